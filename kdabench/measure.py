"""The measuring core: candidates of one cell, interleaved round by round until the decision is settled.

It knows neither kernels nor GPUs: a clock gives it times, a callback keeps them.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median, stdev

from kdabench.clock import Clock, ExhaustedError, Reading
from kdabench.records import Candidate

Round = Sequence[tuple[Candidate, Reading]]


@dataclass(frozen=True)
class Plan:
    """When to stop.

    min_rounds, max_rounds   bounds on the samples of a candidate
    seconds      no round starts after this much time
    tie          half width of the band of log ratios that counts as a tie
    hopeless     a candidate this many times slower than the best after its first round leaves
    z            width of the confidence interval in standard errors
    seed         of the order within the rounds
    """

    min_rounds: int = 5
    max_rounds: int = 25
    seconds: float = 1.0
    tie: float = 0.005
    hopeless: float = 2.0
    z: float = 2.6
    seed: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.min_rounds <= self.max_rounds:
            raise ValueError(f"rounds must satisfy 1 <= min <= max: {self.min_rounds=} {self.max_rounds=}")


@dataclass
class Contest:
    """Samples so far, by candidate and in order, and why candidates left the rounds."""

    samples: dict[Candidate, list[float]] = field(default_factory=dict)
    rounds: dict[Candidate, list[int]] = field(default_factory=dict)
    left: dict[Candidate, str] = field(default_factory=dict)

    def time_us(self, candidate: Candidate) -> float:
        return median(self.samples[candidate])

    @property
    def best(self) -> Candidate:
        """The candidate with the lowest median. Raises ValueError before the first round."""
        return min(self.samples, key=lambda c: (self.time_us(c), c.variant, c.spec_json))


def log_ratio_interval(contest: Contest, candidate: Candidate, best: Candidate, z: float) -> tuple[float, float]:
    """Confidence interval of log(time of candidate / time of best), paired by round."""
    ours = dict(zip(contest.rounds[candidate], contest.samples[candidate], strict=True))
    theirs = dict(zip(contest.rounds[best], contest.samples[best], strict=True))
    ratios = [
        math.log(ours[r] / theirs[r]) for r in sorted(ours.keys() & theirs.keys()) if ours[r] > 0 and theirs[r] > 0
    ]
    if len(ratios) < 2:
        return -math.inf, math.inf
    center, half = fmean(ratios), z * stdev(ratios) / math.sqrt(len(ratios))
    return center - half, center + half


def run_contest(
    candidates: Sequence[Candidate],
    clock: Clock,
    plan: Plan,
    *,
    history: Mapping[Candidate, Sequence[tuple[int, float]]] | None = None,
    first_round: int = 0,
    on_round: Callable[[int, Round], None] = lambda index, readings: None,
) -> Contest:
    """Measure `candidates` until their order is settled, and return every sample in the order taken.

    history      (round, time_us) pairs of an interrupted contest, which goes on from `first_round`
    on_round     gets each round as soon as it is complete
    """
    contest = Contest({c: [] for c in candidates}, {c: [] for c in candidates})
    clock = _Resumed(clock, {c: dict(past) for c, past in (history or {}).items()}, first_round)
    active = list(candidates)
    deadline = time.monotonic() + plan.seconds
    index = 0
    while (
        active
        and index < plan.max_rounds
        and (index < max(first_round, plan.min_rounds) or time.monotonic() < deadline)
    ):
        order = active.copy()
        random.Random(f"{plan.seed}:{index}").shuffle(order)
        clock.begin_round(index)
        readings = []
        for candidate in order:
            try:
                reading = clock.read(candidate)
            except ExhaustedError as reason:
                contest.left[candidate] = str(reason)
                continue
            readings.append((candidate, reading))
            contest.samples[candidate].append(reading.time_us)
            contest.rounds[candidate].append(index)
        if readings and index >= first_round:
            on_round(index, readings)
        index += 1
        active = _still_open(contest, [c for c in active if c not in contest.left], plan)
    contest.samples = {c: s for c, s in contest.samples.items() if s}
    return contest


class _Resumed:
    """The rounds before `first_round` from what was kept of them, so that an interrupted contest decides in them as it
    did; then the clock."""

    def __init__(self, clock: Clock, kept: Mapping[Candidate, Mapping[int, float]], first_round: int) -> None:
        self._clock, self._kept, self._first = clock, kept, first_round
        self._round = 0

    def begin_round(self, index: int) -> None:
        self._round = index
        if index >= self._first:
            self._clock.begin_round(index)

    def read(self, candidate: Candidate) -> Reading:
        if self._round >= self._first:
            return self._clock.read(candidate)
        time_us = self._kept.get(candidate, {}).get(self._round)
        if time_us is None:
            raise ExhaustedError(f"{candidate} was not measured in round {self._round}")
        return Reading(time_us)


def _still_open(contest: Contest, active: list[Candidate], plan: Plan) -> list[Candidate]:
    """Drop the hopeless and the settled losers; none is left once the whole order is settled."""
    if not active:
        return []
    timed = {c: contest.time_us(c) for c in active}
    best = min(timed, key=lambda c: (timed[c], c.variant, c.spec_json))
    stay, settled = [], True
    for candidate in active:
        rounds = len(contest.samples[candidate])
        if timed[candidate] > plan.hopeless * timed[best] > 0:
            contest.left[candidate] = f"hopeless: over {plan.hopeless:g}x the best after {rounds} rounds"
            continue
        if rounds < plan.min_rounds:
            settled = False
        elif candidate is not best:
            low, high = log_ratio_interval(contest, candidate, best, plan.z)
            if low > plan.tie:
                contest.left[candidate] = f"settled: slower than the best after {rounds} rounds"
                continue
            settled &= -plan.tie < low and high < plan.tie
        stay.append(candidate)
    return [] if settled else stay
