"""The runner that measures: a worker process on a GPU goes through the pairs of a sweep."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from kda_kernels import build
from kda_kernels.case import Case
from kdabench.data.measurements import Cell
from kdabench.data.sweep import Sweep
from kdabench.measure import worker
from kdabench.measure.journal import Journal
from kdabench.measure.session import Work
from kdabench.measure.share import Share
from kdabench.measure.slot import Slot
from kdabench.measure.worker_process import WorkerMain


@dataclass(frozen=True)
class GpuRunner:
    """Measures on the CUDA device of an index.

    worker_main  what a worker process runs
    compiles     fill the kernels' cache before the first cell, on all cores; not for workers that
                 launch no kernels of the package
    """

    index: int
    worker_main: WorkerMain = worker.main
    compiles: bool = True

    def open_journal(self, sweep: Sweep, out: Path) -> Journal:
        """Open out/<stem>.db. Raises JournalError if it is of another sweep, JournalBusy."""
        return Journal.open(out / f"{sweep.stem}.db", sweep.digest, sweep.question)

    def run(self, work: Work) -> None:
        """Measure: for each process number a fresh worker goes through the cells that are left.

        Raises JournalBusy if another command measures on the GPU, SweepFailedError if no worker
        comes up.
        """
        pairs = iter(work.queue)
        first = next(pairs, None)
        if first is None or work.tally.spent:
            return
        with Slot(self.index, self.worker_main) as slot:
            slot.get()
            if self.compiles:
                work.tally.note("compiling what the cache lacks")
                build.fill_cache(_cases(work), _arch(self.index))
            _measure(chain([first], pairs), work, slot)


def _measure(pairs: Iterable[tuple[Cell, int]], work: Work, slot: Slot) -> None:
    before: int | None = None
    for cell, process in pairs:
        if work.tally.spent:
            return
        if before is not None and process != before:
            slot.drop()
        before = process
        Share(cell, process, work, slot).measure()


def _cases(work: Work) -> set[Case]:
    """All that the queue may launch."""
    return {
        Case(c.variant, tuple(sorted(c.options.items())), cell.problem)
        for cell, _ in work.queue.left
        for c in work.sweep.candidates
    }


def _arch(index: int) -> str:
    import torch  # heavy: a finished sweep does without

    from kda_kernels.device.gpu import current_gpu

    with torch.cuda.device(index):
        return current_gpu().arch
