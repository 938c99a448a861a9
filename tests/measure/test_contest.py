"""The measuring core on clocks whose truth is known, and on recorded samples."""

import random
from collections.abc import Callable, Sequence

import pytest

from kdabench.data.measurements import Candidate, Cell, Measurement
from kdabench.measure.clock import Reading, RecordedClock
from kdabench.measure.contest import (
    Plan,
    log_ratio_interval,
    run_contest,
    student,
    twin_verdict,
    twins,
)

FAST, SLOW, TWIN = (Candidate.of("KdaSplit", {"split": n}) for n in (1, 2, 4))


class SyntheticClock:
    """Times drawn around a truth with relative noise, shared per round like a real clock drift."""

    def __init__(
        self, truth: dict[Candidate, float], noise: float, drift: float = 0.0, seed: int = 1
    ) -> None:
        self.truth, self.noise, self.drift = truth, noise, drift
        self.random = random.Random(seed)
        self.level = 1.0
        self.order: list[list[Candidate]] = []

    def begin_round(self, index: int) -> None:
        self.level = 1 + self.random.gauss(0, self.drift)
        self.order.append([])

    def read(self, candidate: Candidate) -> Reading:
        self.order[-1].append(candidate)
        return Reading(self.truth[candidate] * self.level * (1 + self.random.gauss(0, self.noise)))


def test_clear_winner_settles_at_the_minimum_of_rounds() -> None:
    clock = SyntheticClock({FAST: 5.0, SLOW: 6.0}, noise=0.002)
    contest = run_contest([FAST, SLOW], clock, Plan(min_rounds=5, max_rounds=50))
    assert contest.best == FAST
    assert len(contest.samples[SLOW]) == 5
    assert contest.left[SLOW].why == "settled"


def test_hopeless_candidate_leaves_after_its_first_round_and_says_so() -> None:
    clock = SyntheticClock({FAST: 5.0, SLOW: 10.1, TWIN: 5.3}, noise=0.0)
    contest = run_contest([FAST, SLOW, TWIN], clock, Plan(min_rounds=4, sentinel=False))
    assert len(contest.samples[SLOW]) == 1
    assert contest.left[SLOW].why == "hopeless"
    assert len(contest.samples[FAST]) == 4


def test_a_tie_is_settled_without_exhausting_the_rounds() -> None:
    clock = SyntheticClock({FAST: 5.0, TWIN: 5.0}, noise=0.001)
    contest = run_contest([FAST, TWIN], clock, Plan(min_rounds=5, max_rounds=500))
    assert len(contest.samples[FAST]) < 50


def test_noise_hides_the_order_until_the_bound_of_rounds() -> None:
    clock = SyntheticClock({FAST: 5.0, TWIN: 5.03}, noise=0.05)
    contest = run_contest([FAST, TWIN], clock, Plan(min_rounds=3, max_rounds=12, seconds=60))
    assert {len(set(rounds)) for rounds in contest.rounds.values()} == {12}


def test_pairing_by_round_removes_drift_shared_by_a_round() -> None:
    clock = SyntheticClock({FAST: 5.0, TWIN: 5.1}, noise=0.001, drift=0.1)
    contest = run_contest([FAST, TWIN], clock, Plan(min_rounds=8, max_rounds=8))
    low, high = log_ratio_interval(contest, TWIN, FAST, z=2.6)
    assert 0.01 < low < high < 0.03


def test_order_is_shuffled_each_round_and_reproducible() -> None:
    def orders(seed: int) -> list[list[Candidate]]:
        clock = SyntheticClock({FAST: 5.0, SLOW: 5.0, TWIN: 5.0}, noise=0.05)
        run_contest([FAST, SLOW, TWIN], clock, Plan(min_rounds=9, max_rounds=9, seed=seed))
        return clock.order

    assert orders(1) == orders(1)
    assert orders(1) != orders(2)
    assert len({tuple(o) for o in orders(1)}) > 1


def test_samples_keep_their_order_and_rounds_reach_the_callback() -> None:
    seen: list[tuple[int, list[float]]] = []
    clock = SyntheticClock({FAST: 5.0}, noise=0.1)
    contest = run_contest(
        [FAST],
        clock,
        Plan(min_rounds=4),
        on_round=lambda i, r: seen.append((i, [x.time_us for _, x in r])),
    )
    assert [i for i, _ in seen] == [0, 1, 2, 3]
    assert contest.samples[FAST] == [x for _, xs in seen for x in xs]


def test_an_interrupted_contest_goes_on_where_it_stopped() -> None:
    history = {
        FAST: [(0, Reading(5.0)), (1, Reading(5.01))],
        SLOW: [(0, Reading(6.0)), (1, Reading(6.02))],
    }
    clock = SyntheticClock({FAST: 5.0, SLOW: 6.0}, noise=0.001)
    contest = run_contest([FAST, SLOW], clock, Plan(min_rounds=4), history=history, first_round=2)
    assert contest.rounds[FAST] == [0, 1, 2, 2, 3, 3]
    assert contest.samples[FAST][:2] == [5.0, 5.01]


def test_a_resumed_contest_decides_as_an_uninterrupted_one() -> None:
    candidates = [FAST, SLOW, TWIN]
    truth = {FAST: 5.0, SLOW: 5.2, TWIN: 5.01}
    measurements = [_record(c, _samples(truth[c])) for c in candidates]
    plan = Plan(min_rounds=4, max_rounds=20, seconds=60)
    whole = run_contest(candidates, RecordedClock(measurements), plan)
    for cut in range(1, 12):
        history = {
            c: [
                (r, Reading(us))
                for r, us in zip(whole.rounds[c], whole.samples[c], strict=True)
                if r < cut
            ]
            for c in candidates
        }
        again = run_contest(
            candidates, RecordedClock(measurements), plan, history=history, first_round=cut
        )
        assert (again.samples, again.left) == (whole.samples, whole.left)


def _samples(truth: float) -> list[float]:
    noise = random.Random(truth)
    return [truth * (1 + noise.gauss(0, 0.004)) for _ in range(20)]


def test_a_true_difference_of_two_percent_is_found() -> None:
    found = 0
    for seed in range(40):
        clock = SyntheticClock({FAST: 5.0, TWIN: 5.1}, noise=0.004, drift=0.01, seed=seed)
        contest = run_contest([FAST, TWIN], clock, Plan(max_rounds=40, seconds=60, seed=seed))
        found += TWIN in contest.left and contest.left[TWIN].why == "settled"
    assert found >= 38


def test_equal_candidates_rarely_get_a_verdict() -> None:
    false_alarms = 0
    for seed in range(100):
        clock = SyntheticClock({FAST: 5.0, TWIN: 5.0}, noise=0.004, drift=0.01, seed=seed)
        contest = run_contest([FAST, TWIN], clock, Plan(max_rounds=25, seconds=60, seed=seed))
        false_alarms += any(left.why == "settled" for left in contest.left.values())
    assert false_alarms <= 1


def _record(
    candidate: Candidate, samples: Sequence[float], rounds: Sequence[int] | None = None
) -> Measurement:
    n = len(samples)
    return Measurement(
        Cell("decode", 1, 12),
        candidate,
        "ok",
        None,
        0,
        tuple(samples),
        tuple(range(n) if rounds is None else rounds),
        (None,) * n,
        (None,) * n,
        10**9,
        10**6,
        "sha256:0",
        "sha256:0",
    )


def test_the_recorded_clock_gives_recorded_samples_back_and_ends_with_them() -> None:
    measurements = [_record(FAST, [5.0, 5.1, 5.0]), _record(TWIN, [5.0, 5.0])]
    contest = run_contest([FAST, TWIN], RecordedClock(measurements), Plan(min_rounds=5))
    assert contest.samples == {FAST: [5.0, 5.1, 5.0], TWIN: [5.0, 5.0]}
    assert contest.left[TWIN].why == "exhausted"
    assert "no recorded sample of round 2" in str(contest.left[TWIN])


def test_the_best_of_the_first_round_is_measured_twice() -> None:
    clock = SyntheticClock({FAST: 5.0, SLOW: 5.3, TWIN: 5.2}, noise=0.001)
    contest = run_contest([FAST, SLOW, TWIN], clock, Plan(min_rounds=6, max_rounds=6, seconds=60))
    assert contest.sentinel == FAST
    assert [order.count(FAST) for order in clock.order] == [1, 2, 2, 2, 2, 2]
    assert all(order.count(c) == 1 for order in clock.order for c in (SLOW, TWIN))
    measurement = _record(FAST, contest.samples[FAST], contest.rounds[FAST])
    pairs = twins(measurement)
    assert [us for pair in pairs for us in pair] == contest.samples[FAST][1:]
    assert twin_verdict(pairs, Plan()) == "same"
    assert twin_verdict([(5.0, 5.2 + i / 1000) for i in range(6)], Plan()) == "slower"
    assert twin_verdict([(5.2 + i / 1000, 5.0) for i in range(6)], Plan()) == "faster"
    assert twin_verdict(pairs[:3], Plan()) is None
    measurements = [_record(c, contest.samples[c], contest.rounds[c]) for c in contest.samples]
    again = run_contest(
        [FAST, SLOW, TWIN],
        RecordedClock(measurements),
        Plan(min_rounds=6, max_rounds=6, seconds=60),
    )
    assert again.samples == contest.samples


class SlowedClock(SyntheticClock):
    """Runs at `mhz` of 1980 MHz in the given rounds, and says so; `factor` slower there."""

    def __init__(self, rounds: Sequence[int], mhz: int, factor: float = 1.0) -> None:
        super().__init__({FAST: 5.0, SLOW: 6.0}, noise=0.001)
        self.rounds, self.mhz, self.factor = rounds, mhz, factor

    def read(self, candidate: Candidate) -> Reading:
        slow = len(self.order) - 1 in self.rounds
        us = super().read(candidate).time_us * (self.factor if slow else 1)
        return Reading(us, self.mhz if slow else 1980, slow)


def test_a_throttled_round_is_repeated_and_kept_but_does_not_count() -> None:
    seen: list[int] = []
    clock = SlowedClock([1, 2], 1000, factor=1.8)
    contest = run_contest(
        [FAST, SLOW],
        clock,
        Plan(min_rounds=4, max_rounds=4, seconds=60),
        on_round=lambda i, r: seen.append(i),
    )
    assert seen == [0, 1, 2, 3, 4, 5]
    assert sorted(set(contest.rounds[FAST])) == [0, 3, 4, 5]
    assert max(contest.samples[FAST]) < 6
    assert contest.unstable is None


def test_the_power_cap_is_repeated_too_and_then_counts() -> None:
    clock = SlowedClock(range(100), 1500)
    contest = run_contest(
        [FAST, SLOW], clock, Plan(min_rounds=4, max_rounds=4, seconds=60), full_clock_mhz=1980
    )
    assert sorted(set(contest.rounds[FAST])) == [4, 5, 6, 7]
    assert contest.unstable is None


def test_a_resumed_contest_repeats_what_the_whole_one_repeated() -> None:
    kept: dict[Candidate, list[tuple[int, Reading]]] = {FAST: [], SLOW: []}
    plan = Plan(min_rounds=4, max_rounds=6, seconds=60)

    def keep(index: int, readings: Sequence[tuple[Candidate, Reading]]) -> None:
        for candidate, reading in readings:
            kept[candidate].append((index, reading))

    whole = run_contest([FAST, SLOW], SlowedClock([1, 3], 1000), plan, on_round=keep)
    last = max(i for i, _ in kept[FAST]) + 1
    again = run_contest([FAST, SLOW], SlowedClock([], 0), plan, history=kept, first_round=last)
    assert (again.samples, again.left, again.sentinel) == (
        whole.samples,
        whole.left,
        whole.sentinel,
    )


def test_a_verdict_that_cycles_do_not_confirm_is_none() -> None:
    """Slower by 4 % at a clock that is 5 % lower, not enough for a repeat: the clock's doing."""

    class Uneven(SyntheticClock):
        def read(self, candidate: Candidate) -> Reading:
            return Reading(
                super().read(candidate).time_us,
                1881 if candidate == TWIN else 1980,
                candidate == TWIN,
            )

    clock = Uneven({FAST: 5.0, TWIN: 5.2}, noise=0.001)
    contest = run_contest([FAST, TWIN], clock, Plan(min_rounds=5, max_rounds=8, seconds=60))
    assert not contest.left
    contest = run_contest(
        [FAST, TWIN], SyntheticClock(clock.truth, 0.001), Plan(max_rounds=8, seconds=60)
    )
    assert contest.left[TWIN].why == "settled"


@pytest.mark.parametrize(
    ("z", "degrees", "quantile"),
    [  # of 0.995 and 0.975, as tables give them
        (2.5758293, 1, 63.657), (2.5758293, 2, 9.925), (2.5758293, 3, 5.841), (2.5758293, 4, 4.604),
        (2.5758293, 9, 3.250), (2.5758293, 24, 2.797), (1.9599640, 5, 2.571), (1.9599640, 30, 2.042),
    ],
)  # fmt: skip
def test_quantiles_of_students_distribution(z: float, degrees: int, quantile: float) -> None:
    assert student(z, degrees) == pytest.approx(quantile, abs=6e-4)


@pytest.mark.parametrize(
    "make", [lambda: Plan(min_rounds=0), lambda: Plan(min_rounds=9, max_rounds=3)]
)
def test_impossible_plans_are_refused(make: Callable[[], Plan]) -> None:
    with pytest.raises(ValueError, match="rounds must satisfy"):
        make()
