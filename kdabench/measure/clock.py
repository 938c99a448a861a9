"""Clocks: what turns one run of a candidate into a time. The measuring core takes one as an
argument.

On a GPU the clock times CUDA graph replays by events (kdabench.graphs); here stand the pieces that
need no GPU.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from kdabench.data.measurements import Candidate, Measurement

MIN_COPIES = 8
"""Independent layers that a graph goes round, at least."""
TIME_DIGITS = 6
"""Of a sample in microseconds. Events tick every 32 ns (H200) around MIN_COPIES launches or more:
what a picosecond leaves out was never measured."""


@dataclass(frozen=True)
class Reading:
    """One sample: microseconds per launch, the SM clock in MHz and whether the GPU throttled (None:
    unknown)."""

    time_us: float
    sm_clock_mhz: int | None = None
    throttled: bool | None = None


class ExhaustedError(Exception):
    """A replayed clock has no further recorded sample of a candidate."""


class Clock(Protocol):
    def begin_round(self, index: int) -> None:
        """Called once before the candidates of a round are read."""

    def read(self, candidate: Candidate) -> Reading:
        """One sample. Raises ExhaustedError if there can be no more."""


EXHAUSTED = "no recorded sample of round"


class ReplayedClock:
    """Gives back the recorded samples of one (cell, process), round by round, in the order they
    were taken."""

    def __init__(self, measurements: Iterable[Measurement]) -> None:
        self._by_round: dict[Candidate, dict[int, list[Reading]]] = {}
        for r in measurements:
            rounds = self._by_round.setdefault(r.candidate, {})
            for i, us, mhz, throttled in zip(
                r.rounds, r.samples_us, r.sm_clock_mhz, r.throttled, strict=True
            ):
                rounds.setdefault(i, []).append(Reading(us, mhz, throttled))
        self._round = 0
        self._given: dict[Candidate, int] = {}

    def begin_round(self, index: int) -> None:
        self._round = index
        self._given = {}

    def read(self, candidate: Candidate) -> Reading:
        readings = self._by_round.get(candidate, {}).get(self._round, [])
        place = self._given.get(candidate, 0)
        if place >= len(readings):
            raise ExhaustedError(f"{candidate} has {EXHAUSTED} {self._round}")
        self._given[candidate] = place + 1
        return readings[place]


def rotation(
    step: Callable[..., Any], copies: Sequence[Any], launches: int, layers: int = 1
) -> list[Callable[..., Any]]:
    """`launches` calls of `step(operands, ...)`, each bound to the next of `copies` in turn.

    layers  independent layers that each of the copies consists of

    What takes no operands always finds its data where it left them, so it can't be timed cold.
    Raises ValueError for such a step, for fewer than MIN_COPIES layers in all, and for a copy that
    is there twice.
    """
    try:
        inspect.signature(step).bind_partial(object())
    except TypeError:
        raise ValueError(
            f"{step!r}: takes no operands, so nothing can be rotated: not timed cold"
        ) from None
    if len(copies) * layers < MIN_COPIES:
        raise ValueError(
            f"copies={len(copies)}, {layers=}: at least {MIN_COPIES} layers in all to time cold"
        )
    if len({id(copy) for copy in copies}) < len(copies):
        raise ValueError("copies: the same operands twice")

    return [partial(step, copies[i % len(copies)]) for i in range(launches)]
