"""Clocks: what turns one run of a candidate into a time. The measuring core takes one as an argument.

On a GPU the clock times CUDA graph replays by events (kdabench.graphs); here stand the pieces that need no GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from kdabench.records import Candidate, Record


@dataclass(frozen=True)
class Reading:
    """One sample: microseconds per launch, the SM clock in MHz and whether the GPU throttled (None: unknown)."""

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


class ReplayedClock:
    """Gives back the recorded samples of one (cell, process), round by round, in the order they were taken."""

    def __init__(self, records: Iterable[Record]) -> None:
        self._by_round: Mapping[Candidate, dict[int, Reading]] = {
            r.candidate: {
                i: Reading(us, clock, throttled)
                for i, us, clock, throttled in zip(r.rounds, r.samples_us, r.sm_clock_mhz, r.throttled, strict=True)
            }
            for r in records
        }
        self._round = 0

    def begin_round(self, index: int) -> None:
        self._round = index

    def read(self, candidate: Candidate) -> Reading:
        reading = self._by_round.get(candidate, {}).get(self._round)
        if reading is None:
            raise ExhaustedError(f"{candidate} has no recorded sample of round {self._round}")
        return reading
