"""Samplers compared on recorded grids, where the best of each cell is known."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from statistics import fmean

import optuna
from optuna.storages import InMemoryStorage

from kdabench.tune.heats import RecordedBench
from kdabench.tune.sampler import Kind
from kdabench.tune.search import SearchOptions, StudyOutcome, Task, run

NEAR = 0.01
"""Within this of the exhaustive best a search has succeeded."""


@dataclass(frozen=True)
class Way:
    sampler: Kind
    warm: bool

    def __str__(self) -> str:
        return f"{self.sampler}, neighbours first" if self.warm else self.sampler


_SAMPLERS: tuple[Kind, ...] = ("random", "tpe", "gp")
WAYS = (
    *(Way(sampler, warm) for sampler, warm in product(_SAMPLERS, (False, True))),
    Way("transfer", False),
    Way("exhaustive", False),
)


@dataclass(frozen=True)
class Found:
    """One way of searching with one seed, over all studies.

    regret     by study: time of the best found over that of the best there is, less one; None:
               nothing worked
    trials     as a part of the exhaustive search's
    readings   as a part of those of an exhaustive search by the same small contests
    curves     by study: best so far over the best there is, after each trial
    """

    way: Way
    seed: int
    regret: tuple[float | None, ...]
    trials: float
    readings: float
    curves: tuple[tuple[float, ...], ...]

    @property
    def geomean(self) -> float:
        known = [math.log1p(r) for r in self.regret if r is not None]
        return math.expm1(fmean(known)) if known else math.inf

    @property
    def near(self) -> float:
        """Part of the studies within NEAR of their best."""
        return fmean(r is not None and r <= NEAR for r in self.regret)

    @property
    def worst(self) -> float:
        return max((r for r in self.regret if r is not None), default=math.inf)


def compare(
    tasks: Sequence[Task],
    bench: RecordedBench,
    ways: Sequence[Way],
    seeds: Sequence[int],
    share: float,
    listener: Callable[[Found], None] = lambda found: None,
) -> list[Found]:
    """Each way with each seed, and `share` of the trials of an exhaustive search; of that, all."""
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    everything = _search(tasks, bench, Way("exhaustive", False), 0, 1.0)
    best = [None if o.best is None else o.best.value for o in everything]
    found = []
    for way in ways:
        whole = way.sampler == "exhaustive"
        for seed in seeds[:1] if whole else seeds:
            outcomes = everything if whole else _search(tasks, bench, way, seed, share)
            found.append(_summed(way, seed, outcomes, everything, best))
            listener(found[-1])
    return found


def _search(
    tasks: Sequence[Task], bench: RecordedBench, way: Way, seed: int, share: float
) -> list[StudyOutcome]:
    """Studies of equal share, in memory."""
    most = max(len(task.space.points) for task in tasks)
    options = SearchOptions(
        most, way.sampler, seed, warm=way.warm, finalists=0, processes=0, share=share
    )
    return run(tasks, bench, InMemoryStorage(), options).outcomes


def _summed(
    way: Way,
    seed: int,
    outcomes: Sequence[StudyOutcome],
    everything: Sequence[StudyOutcome],
    best: Sequence[float | None],
) -> Found:
    pairs = list(zip(outcomes, best, strict=True))
    return Found(
        way,
        seed,
        tuple(None if o.best is None or not b else (o.best.value or 0.0) / b - 1 for o, b in pairs),
        sum(len(o.finished) for o in outcomes) / sum(len(o.finished) for o in everything),
        sum(o.readings for o in outcomes) / sum(o.readings for o in everything),
        tuple(tuple(value / b for value in o.best_so_far()) for o, b in pairs if b),
    )
