"""The (cell, process) pairs of a sweep, in the order in which they are measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Protocol

from kdabench.data.measurements import Cell, Measurement
from kdabench.data.sweep import Sweep
from kdabench.measure.journal import Journal

Pair = tuple[Cell, int]


class Course(Protocol):
    """What decides pair by pair, from what it was told, which one is measured next."""

    @property
    def cells(self) -> Sequence[Cell]:
        """All cells that it may choose."""

    @property
    def total(self) -> int:
        """(cell, process) pairs in all: the most there may be, until the cells are chosen."""

    def next(self) -> Pair | None:
        """Give the pair to measure; None when all is told that matters."""

    def tell(
        self, cell: Cell, process: int, outcomes: Sequence[Measurement], sms: int | None
    ) -> None:
        """Take note of what one process found in a cell, on a device with so many SMs (None:
        unknown)."""


def every_cell(sweep: Sweep, part: tuple[int, int] = (1, 1)) -> tuple[Cell, ...]:
    """Take every n-th cell of a sweep from the k-th on; part: (k, n)."""
    k, n = part
    return sweep.cells[k - 1 :: n]


class Queue:
    """Pairs of a sweep, each asked for when the one before it is done.

    order  cells, to be measured process by process; or a course, which chooses
    """

    def __init__(self, order: Sequence[Cell] | Course, processes: int, journal: Journal) -> None:
        self._journal, self._processes = journal, processes
        self._course: Course | None = None
        if isinstance(order, Sequence):
            self.cells = tuple(order)
            return
        self.cells = tuple(order.cells)
        self._course = order
        left = set(self.left)
        for pair in self._pairs():
            if pair not in left:
                self._tell(order, pair)

    def _pairs(self) -> list[Pair]:
        return [(cell, process) for process in range(self._processes) for cell in self.cells]

    def _tell(self, course: Course, pair: Pair) -> None:
        sms = next((env["sms"] for env in self._journal.envs().values() if "sms" in env), None)
        course.tell(*pair, self._journal.outcomes(*pair), sms)

    def __iter__(self) -> Iterator[Pair]:
        """Give the pairs one by one; what the journal then holds of each decides what follows."""
        if self._course is None:
            yield from self.left
            return
        while (pair := self._course.next()) is not None:
            yield pair
            self._tell(self._course, pair)

    @property
    def left(self) -> list[Pair]:
        """What is not done. A course need not do all of it."""
        return [pair for pair in self._pairs() if self._journal.cell_state(*pair) != "done"]

    @property
    def done(self) -> int:
        """How many pairs are finished."""
        return len(self._pairs()) - len(self.left)

    @property
    def total(self) -> int:
        """How many pairs there are; of a course the most there may be."""
        return len(self._pairs()) if self._course is None else self._course.total
