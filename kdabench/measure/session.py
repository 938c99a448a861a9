"""A sweep from start to end: the pairs that are left, a runner that brings each to an outcome, a
journal that keeps.

The journal has one writer, this process.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Literal, Protocol

from kdabench.data.devices import Recorded, Source
from kdabench.data.measurements import Candidate, Cell, Measurement
from kdabench.data.sweep import Sweep
from kdabench.measure import signals
from kdabench.measure.contest import Plan, twin_verdict, twins
from kdabench.measure.journal import Journal
from kdabench.measure.queue import Course, Queue


@dataclass(frozen=True)
class Event:
    """Progress of a sweep, for whoever shows it.

    done, total  (cell, process) pairs, the total at most
    best         the fastest candidate of a `cell` event, and its median time_us; None without one
    """

    kind: Literal["plan", "cell", "note"]
    done: int
    total: int
    cell: Cell | None = None
    process: int = 0
    best: str | None = None
    time_us: float | None = None
    text: str = ""


Listener = Callable[[Event], None]


@dataclass(frozen=True)
class Summary:
    """What a sweep came to.

    done, total     (cell, process) pairs
    stopped_by      the signal that ended it, or None
    recorded        whether it ran on recorded samples: nothing was measured
    measurements    all that its journal holds
    without_winner  measured cells in which no candidate is ok
    twins           how often a candidate measured twice was found faster, slower or the same as
                    itself
    """

    journal: Path
    done: int
    total: int
    stopped_by: int | None
    recorded: bool
    measurements: list[Measurement]
    without_winner: tuple[Cell, ...] = ()
    twins: Mapping[str, int] = field(default_factory=dict)

    @property
    def interrupted(self) -> bool:
        """Whether a signal ended it."""
        return self.stopped_by is not None


class Tally:
    """Counts finished pairs, tells the listener, and says when the budget is spent.

    budget_s  seconds from now on; None: no end
    """

    def __init__(self, listener: Listener, queue: Queue, budget_s: float | None) -> None:
        self._listener, self._queue, self._done = listener, queue, queue.done
        self._deadline = None if budget_s is None else time.monotonic() + budget_s
        listener(Event("plan", self._done, queue.total))

    @property
    def spent(self) -> bool:
        """Whether no further cell may begin."""
        return self._deadline is not None and time.monotonic() > self._deadline

    def note(self, text: str) -> None:
        """Tell the listener of something beside the count."""
        self._listener(Event("note", self._done, self._queue.total, text=text))

    def cell(self, cell: Cell, process: int, times: Mapping[Candidate, Sequence[float]]) -> None:
        """Count a pair as finished; times: us of the candidates that are ok."""
        self._done += 1
        best = min(times, key=lambda c: median(times[c]), default=None)
        name, time_us = (None, None) if best is None else (str(best), median(times[best]))
        self._listener(Event("cell", self._done, self._queue.total, cell, process, name, time_us))


@dataclass(frozen=True)
class Work:
    """What a runner is given: the pairs to bring to an outcome, and where to keep it."""

    sweep: Sweep
    queue: Queue
    journal: Journal
    plan: Plan
    tally: Tally


class Runner(Protocol):
    """Where a sweep takes its outcomes from: a GPU, or recorded samples."""

    def open_journal(self, sweep: Sweep, out: Path) -> Journal:
        """Open the sweep's journal in the folder `out`, new or as it was left.

        Raises JournalError or JournalBusy; ValueError if the sweep can't run here.
        """

    def run(self, work: Work) -> None:
        """Bring pair after pair of the queue to an outcome, until the budget is spent.

        Raises JournalError, JournalBusy, OSError; KeyboardInterrupt with all that was finished
        kept.
        """


def reopen_failed(sweep: Sweep, journal: Journal) -> list[Cell]:
    """Forget the pairs in which a candidate failed, and return the cells that had been begun: those
    that a course has to go on with."""
    begun = [
        cell
        for cell in sweep.cells
        if any(journal.cell_state(cell, n) != "new" for n in range(sweep.processes))
    ]
    journal.reopen_failed()
    return begun


def run_sweep(
    sweep: Sweep,
    runner: Runner,
    journal: Journal,
    order: Sequence[Cell] | Course,
    *,
    plan: Plan | None = None,
    budget_s: float | None = None,
    listener: Listener = lambda event: None,
) -> Summary:
    """Run what is left of a sweep; a signal that ends it is told in the summary.

    journal   as `runner.open_journal` gives it
    order     cells, as `every_cell` gives them, or a course that chooses among cells
    budget_s  no further cell begins after this many seconds

    Raises what the runner and the journal raise.
    """
    plan = plan or Plan()
    queue = Queue(order, sweep.processes, journal)
    tally = Tally(listener, queue, budget_s)
    stopped_by = None
    try:
        with signals.stopping():
            runner.run(Work(sweep, queue, journal, plan, tally))
    except KeyboardInterrupt as stopped:
        stopped_by = signals.number_of(stopped)
    return _summary(queue, journal, plan, stopped_by)


def _summary(queue: Queue, journal: Journal, plan: Plan, stopped_by: int | None) -> Summary:
    measurements = journal.measurements()
    measured = {r.cell for r in measurements}
    winners = {r.cell for r in measurements if r.status == "ok"}
    return Summary(
        journal.path,
        queue.done,
        queue.total,
        stopped_by,
        journal.recorded,
        measurements,
        tuple(cell for cell in queue.cells if cell in measured - winners),
        Counter(v for r in measurements if (v := twin_verdict(twins(r), plan)) is not None),
    )


def dry_run(sweep: Sweep, source: Source) -> tuple[int, int, float]:
    """Count the cells, and the candidates of each; estimate roughly the seconds that all processes
    take."""
    per_cell = 0.35 + 0.06 * len(sweep.candidates)
    if isinstance(source, Recorded):
        per_cell = 0.02
    seconds = sweep.processes * (len(sweep.cells) * per_cell + 8)
    return len(sweep.cells), len(sweep.candidates), seconds
