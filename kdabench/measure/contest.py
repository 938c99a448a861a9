"""The measuring core: candidates of one cell, interleaved round by round until the decision is
settled.

It knows neither kernels nor GPUs: a clock gives it times, a callback keeps them.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby
from statistics import NormalDist, fmean, median, stdev
from typing import Literal

from kdabench.data.measurements import Candidate, Measurement
from kdabench.measure.clock import Clock, ExhaustedError, Reading

Round = Sequence[tuple[Candidate, Reading]]
LogInterval = tuple[float, float]
"""Ends of a confidence interval of a log ratio."""


@dataclass(frozen=True)
class Plan:
    """When to stop.

    min_rounds, max_rounds   bounds on the rounds of a candidate
    seconds      no round starts after this much time
    tie          half width of the band of log ratios that counts as a tie
    hopeless     a candidate this many times slower than the best after its first round leaves
    z            width of the confidence interval in standard errors; Student's factor widens it for
                 few rounds
    seed         of the order within the rounds
    sentinel     measure the best of the first round twice in each later one: what differs there is
                 noise
    slowed       a throttled round below this part of the full SM clock is repeated, up to
                 `max_repeats` in all
    lost         after that, a round below this part makes the contest unstable; else it counts
    """

    min_rounds: int = 5
    max_rounds: int = 60
    seconds: float = 1.0
    tie: float = 0.005
    hopeless: float = 2.0
    z: float = 2.8
    seed: int = 0
    sentinel: bool = True
    slowed: float = 0.9
    lost: float = 0.65
    max_repeats: int = 4

    def __post_init__(self) -> None:
        if not 1 <= self.min_rounds <= self.max_rounds:
            raise ValueError(
                f"rounds must satisfy 1 <= min <= max: {self.min_rounds=} {self.max_rounds=}"
            )


@dataclass(frozen=True)
class Left:
    """Why a candidate left the rounds of a contest.

    why   hopeless: far slower than the best at once; settled: slower beyond doubt; exhausted: there
          is no further sample; impossible: a sample can't be
    text  the same for a reader, with figures
    """

    why: Literal["hopeless", "settled", "exhausted", "impossible"]
    text: str

    def __str__(self) -> str:
        return self.text


@dataclass
class Contest:
    """Samples that count, by candidate and in order, and why candidates left the rounds.

    Samples of repeated rounds are not among them. `cycles` holds time x SM clock, NaN where the
    clock is unknown.
    unstable  why nothing can be said about this contest, or None
    """

    samples: dict[Candidate, list[float]] = field(default_factory=dict)
    rounds: dict[Candidate, list[int]] = field(default_factory=dict)
    cycles: dict[Candidate, list[float]] = field(default_factory=dict)
    left: dict[Candidate, Left] = field(default_factory=dict)
    sentinel: Candidate | None = None
    unstable: str | None = None

    @classmethod
    def of(cls, candidates: Sequence[Candidate]) -> Contest:
        """A contest before its first round."""
        return cls(
            {c: [] for c in candidates}, {c: [] for c in candidates}, {c: [] for c in candidates}
        )

    def time_us(self, candidate: Candidate) -> float:
        return median(self.samples[candidate])

    def fastest(self, of: Sequence[Candidate]) -> Candidate:
        return min(of, key=lambda c: (self.time_us(c), c.variant, c.options_json))

    @property
    def best(self) -> Candidate:
        """The candidate with the lowest median. Raises ValueError before the first round."""
        return self.fastest([c for c, samples in self.samples.items() if samples])

    def add(self, index: int, readings: Round) -> None:
        for candidate, reading in readings:
            self.samples[candidate].append(reading.time_us)
            self.rounds[candidate].append(index)
            self.cycles[candidate].append(reading.time_us * (reading.sm_clock_mhz or math.nan))


def _interval(ratios: Sequence[float], z: float) -> LogInterval:
    if len(ratios) < 2:
        return -math.inf, math.inf
    center, half = (
        fmean(ratios),
        student(z, len(ratios) - 1) * stdev(ratios) / math.sqrt(len(ratios)),
    )
    return center - half, center + half


@lru_cache(maxsize=10_000)
def student(z: float, degrees: int) -> float:
    """The quantile of Student's t distribution that leaves as much beyond it as z does of the
    normal one.

    With five rounds, 2.6 of the standard errors that they themselves give are too few: 4.7 are
    meant. Not scipy's, whose import takes longer than a worker may need to start.
    """
    wanted, low, high = NormalDist().cdf(z), 0.0, 1.0
    while _student_cdf(high, degrees) < wanted:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if _student_cdf(middle, degrees) < wanted else (low, middle)
    return high


def _student_cdf(t: float, degrees: int) -> float:
    """Of t >= 0, by its finite series for a whole number of degrees of freedom."""
    angle = math.atan2(t, math.sqrt(degrees))
    square, odd = math.cos(angle) ** 2, degrees % 2
    term = total = math.cos(angle) if odd else 1.0
    for k in range(2 + odd, degrees, 2):
        term *= (k - 1) / k * square
        total += term
    if odd:
        return 0.5 + (angle + math.sin(angle) * total * (degrees > 1)) / math.pi
    return 0.5 + math.sin(angle) * total / 2


def _log_ratios(
    contest: Contest,
    values: Mapping[Candidate, Sequence[float]],
    candidate: Candidate,
    best: Candidate,
) -> list[float]:
    """log(value of candidate / value of best) of each round that has both; of two readings in a
    round the mean log."""
    ours, theirs = (
        {
            index: fmean(math.log(value) for _, value in pairs)
            for index, pairs in groupby(
                zip(contest.rounds[c], values[c], strict=True), key=lambda pair: pair[0]
            )
        }
        for c in (candidate, best)
    )
    return [ours[index] - theirs[index] for index in sorted(ours.keys() & theirs.keys())]


def log_ratio_interval(
    contest: Contest, candidate: Candidate, best: Candidate, z: float
) -> LogInterval:
    """Confidence interval of log(time of candidate / time of best), paired by round."""
    return _interval(_log_ratios(contest, contest.samples, candidate, best), z)


def twins(measurement: Measurement) -> list[tuple[float, float]]:
    """The two samples of each round in which a candidate was measured twice, in the order taken."""
    pairs = zip(measurement.rounds, measurement.samples_us, strict=True)
    by_round = ([us for _, us in group] for _, group in groupby(pairs, key=lambda pair: pair[0]))
    return [(found[0], found[1]) for found in by_round if len(found) == 2]


def twin_verdict(
    pairs: Sequence[tuple[float, float]], plan: Plan
) -> Literal["faster", "slower", "same"] | None:
    """What the stopping rule would say of a candidate against itself: anything but "same" is a
    false alarm.

    None with fewer pairs than a contest of `plan.min_rounds` has.
    """
    if len(pairs) < max(2, plan.min_rounds - 1):
        return None
    low, high = _interval([math.log(b / a) for a, b in pairs], plan.z)
    return "slower" if low > plan.tie else "faster" if high < -plan.tie else "same"


def run_contest(
    candidates: Sequence[Candidate],
    clock: Clock,
    plan: Plan,
    *,
    history: Mapping[Candidate, Sequence[tuple[int, Reading]]] | None = None,
    first_round: int = 0,
    full_clock_mhz: int | None = None,
    on_round: Callable[[int, Round], None] = lambda index, readings: None,
) -> Contest:
    """Measure `candidates` until their order is settled, and return every sample that counts in the
    order taken.

    history         (round, reading) pairs of an interrupted contest, which goes on from
                    `first_round`
    full_clock_mhz  SM clock of the GPU when nothing slows it; None: the highest one seen
    on_round        gets each round as soon as it is complete, repeated ones too
    """
    contest = Contest.of(candidates)
    clock = _Resumed(clock, history or {}, first_round)
    throttle = _Throttle(plan, full_clock_mhz)
    active = list(candidates)
    deadline = time.monotonic() + plan.seconds
    index = counted = 0
    while (
        active
        and counted < plan.max_rounds
        and (index < first_round or counted < plan.min_rounds or time.monotonic() < deadline)
    ):
        readings = list(_read(clock, index, _order(active, contest, index, plan.seed), contest))
        if readings and index >= first_round:
            on_round(index, readings)
        index += 1
        if throttle.repeats(readings):
            continue
        contest.unstable = throttle.verdict(readings)
        if contest.unstable is not None:
            break
        counted += 1
        contest.add(index - 1, readings)
        active = _still_open(contest, [c for c in active if c not in contest.left], plan)
        if plan.sentinel and active and contest.sentinel not in active:
            contest.sentinel = contest.fastest(active)
    contest.samples = {c: s for c, s in contest.samples.items() if s}
    return contest


def _order(active: list[Candidate], contest: Contest, index: int, seed: int) -> list[Candidate]:
    """Who is measured in a round, shuffled; the sentinel twice."""
    order = [*active, contest.sentinel] if contest.sentinel in active else active.copy()
    random.Random(f"{seed}:{index}").shuffle(order)
    return order


def _read(
    clock: Clock, index: int, order: Sequence[Candidate], contest: Contest
) -> Iterator[tuple[Candidate, Reading]]:
    """One round. A candidate that has no sample any more, or an impossible one, leaves the
    contest."""
    clock.begin_round(index)
    read = set[Candidate]()
    for candidate in order:
        if candidate in contest.left:
            continue
        try:
            reading = clock.read(candidate)
        except ExhaustedError as reason:
            if candidate not in read:  # of the sentinel the second sample may be missing
                contest.left[candidate] = Left("exhausted", str(reason))
            continue
        if not 0 < reading.time_us < math.inf:
            text = f"impossible sample: {reading.time_us} us"
            contest.left[candidate] = Left("impossible", text)
            continue
        read.add(candidate)
        yield candidate, reading


class _Throttle:
    """Which rounds to repeat because the GPU ran slowly, a bounded number of times."""

    def __init__(self, plan: Plan, full_clock_mhz: int | None) -> None:
        self._plan, self._full = plan, full_clock_mhz or 0
        self._left = plan.max_repeats

    def _part(self, readings: Round) -> float:
        """The lowest SM clock of the throttled readings as a part of the full one; 0 if unknown, 1
        without any."""
        self._full = max([self._full, *(r.sm_clock_mhz or 0 for _, r in readings)])
        slowed = [
            r.sm_clock_mhz or 0
            for _, r in readings
            if r.throttled or (r.throttled is None and r.sm_clock_mhz)
        ]
        return min(slowed) / max(self._full, 1) if slowed else 1.0

    def repeats(self, readings: Round) -> bool:
        if self._left and self._part(readings) < self._plan.slowed:
            self._left -= 1
            return True
        return False

    def verdict(self, readings: Round) -> str | None:
        part = self._part(readings)
        if part >= self._plan.lost:
            return None
        return (
            f"the SM clock was at {part:.0%} of {self._full} MHz, and {self._plan.max_repeats} repeated rounds did not "
            "help"
        )


class _Resumed:
    """The rounds before `first_round` from what was kept of them, so that an interrupted contest
    decides in them as it did; then the clock."""

    def __init__(
        self,
        clock: Clock,
        kept: Mapping[Candidate, Sequence[tuple[int, Reading]]],
        first_round: int,
    ) -> None:
        self._clock, self._first = clock, first_round
        self._kept: dict[tuple[Candidate, int], list[Reading]] = {}
        for candidate, past in kept.items():
            for index, reading in past:
                self._kept.setdefault((candidate, index), []).append(reading)
        self._round = 0

    def begin_round(self, index: int) -> None:
        self._round = index
        if index >= self._first:
            self._clock.begin_round(index)

    def read(self, candidate: Candidate) -> Reading:
        if self._round >= self._first:
            return self._clock.read(candidate)
        kept = self._kept.get((candidate, self._round))
        if not kept:
            raise ExhaustedError(f"{candidate} was not measured in round {self._round}")
        return kept.pop(0)


def _still_open(contest: Contest, active: list[Candidate], plan: Plan) -> list[Candidate]:
    """Drop the hopeless and the settled losers; none is left once the whole order is settled."""
    if not active:
        return []
    timed = {c: contest.time_us(c) for c in active}
    best = contest.fastest(active)
    stay, settled = [], True
    for candidate in active:
        rounds = len(set(contest.rounds[candidate]))
        if timed[candidate] > plan.hopeless * timed[best] > 0:
            text = f"hopeless: over {plan.hopeless:g}x the best after {rounds} rounds"
            contest.left[candidate] = Left("hopeless", text)
            continue
        if rounds < plan.min_rounds:
            settled = False
        elif candidate is not best:
            low, high = log_ratio_interval(contest, candidate, best, plan.z)
            if low > plan.tie and _slower_in_cycles(contest, candidate, best, plan.z):
                text = f"settled: slower than the best after {rounds} rounds"
                contest.left[candidate] = Left("settled", text)
                continue
            settled &= -plan.tie < low and high < plan.tie
        stay.append(candidate)
    return [] if settled else stay


def _slower_in_cycles(contest: Contest, candidate: Candidate, best: Candidate, z: float) -> bool:
    """Whether more clock cycles confirm that a candidate is slower; unknown clocks don't speak
    against it."""
    ratios = [r for r in _log_ratios(contest, contest.cycles, candidate, best) if not math.isnan(r)]
    return len(ratios) < 2 or _interval(ratios, z)[0] > 0
