"""What a sweep and its worker tell each other: one job down the pipe, messages back as things
happen. Light, since both sides import it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from kdabench.data.measurements import Candidate, Cell, Status
from kdabench.measure.clock import Reading
from kdabench.measure.contest import Left, Plan

Phase = Literal["start", "cell", "compile", "check", "measure"]


@dataclass(frozen=True)
class Job:
    """One cell to measure in this process.

    history      (round, reading) pairs by candidate, of an interrupted attempt
    first_round  the one that comes next
    """

    cell: Cell
    candidates: tuple[Candidate, ...]
    plan: Plan
    history: Mapping[Candidate, Sequence[tuple[int, Reading]]] = field(default_factory=dict)
    first_round: int = 0


@dataclass(frozen=True)
class Ready:
    """The worker is up; `env` describes device, driver and libraries."""

    env: Mapping[str, Any]


@dataclass(frozen=True)
class Began:
    """A phase was entered, of one candidate where that applies."""

    phase: Phase
    candidate: Candidate | None = None


@dataclass(frozen=True)
class Outcome:
    """What became of a candidate.

    reason  of a failure, or why an ok candidate left the rounds
    info    facts off the clock, such as seconds of compilation
    """

    candidate: Candidate
    status: Status
    reason: str | None
    unique_bytes: int
    bytes_moved: int
    code: str
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RoundDone:
    """A complete round, readings in the order taken; `gpu` is the state of the GPU as it began."""

    index: int
    readings: tuple[tuple[Candidate, Reading], ...]
    gpu: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class CellDone:
    """The cell is finished.

    sticky  this worker's CUDA context is lost: another one is needed
    left    why candidates left the rounds
    """

    sticky: bool = False
    left: Mapping[Candidate, Left] = field(default_factory=dict)


Message = Ready | Began | Outcome | RoundDone | CellDone
