"""Heats: a few candidates of one cell in a small contest, on a GPU or on recorded samples."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Protocol

from kdabench.data.measurements import Candidate, Cell, Measurement, Status, cell_order
from kdabench.measure import worker
from kdabench.measure.contest import Contest, Plan, log_ratio_interval
from kdabench.measure.messages import CellDone, Job, Outcome, RoundDone
from kdabench.measure.recorded import recorded_contest
from kdabench.measure.slot import Slot
from kdabench.measure.worker_process import WorkerLostError, WorkerMain


@dataclass
class Heat:
    """What a small contest came to.

    failed    status and reason of the candidates that have no time
    recorded  times of a recorded run, which take the place of those of the few samples that it looked at
    """

    contest: Contest
    failed: dict[Candidate, tuple[Status, str]] = field(default_factory=dict)
    recorded: Mapping[Candidate, float] = field(default_factory=dict)

    def time_us(self, candidate: Candidate) -> float:
        return self.recorded.get(candidate) or self.contest.time_us(candidate)

    def ratio(self, candidate: Candidate, reference: Candidate) -> float:
        """Time of one candidate over that of another: the mean of the rounds that have both, so
        that drift cancels."""
        if candidate in self.recorded and reference in self.recorded:
            return self.recorded[candidate] / self.recorded[reference]
        low, high = log_ratio_interval(self.contest, candidate, reference, 1.0)
        middle = (low + high) / 2
        return (
            math.exp(middle)
            if math.isfinite(middle)
            else self.time_us(candidate) / self.time_us(reference)
        )

    @property
    def readings(self) -> int:
        return sum(map(len, self.contest.samples.values()))


class Bench(Protocol):
    """Where candidates are measured. The first of those that stand in a heat is new, the others are
    known to work."""

    def heat(
        self, cell: Cell, candidates: Sequence[Candidate], plan: Plan, process: int = 0
    ) -> Heat: ...

    def fresh(self) -> None:
        """What follows is measured in a new process."""


class RecordedBench:
    """Heats run on recorded samples. A time is the median over processes of each process's
    median."""

    def __init__(self, measurements: Sequence[Measurement]) -> None:
        self._measurements: dict[tuple[Cell, int], dict[Candidate, Measurement]] = {}
        times: dict[tuple[Cell, Candidate], list[float]] = {}
        self._failed: dict[tuple[Cell, Candidate], tuple[Status, str]] = {}
        for measurement in measurements:
            key = measurement.cell, measurement.candidate
            self._measurements.setdefault((measurement.cell, measurement.process), {})[
                measurement.candidate
            ] = measurement
            if measurement.status == "ok":
                times.setdefault(key, []).append(median(measurement.samples_us))
            else:
                self._failed[key] = measurement.status, measurement.reason or ""
        self._times = {key: median(us) for key, us in times.items()}

    @property
    def cells(self) -> list[Cell]:
        return sorted({cell for cell, _ in self._measurements}, key=cell_order)

    def recorded(self, cell: Cell) -> list[Candidate]:
        """The candidates that ran there, or failed, but weren't refused by `unsupported`."""
        found = [key for key in [*self._times, *self._failed] if key[0] == cell]
        refused = {key for key, (status, _) in self._failed.items() if status == "unsupported"}
        return sorted(
            {key[1] for key in found if key not in refused},
            key=lambda c: (c.variant, c.options_json),
        )

    def time_us(self, cell: Cell, candidate: Candidate) -> float | None:
        """None if it failed in any process."""
        return None if (cell, candidate) in self._failed else self._times.get((cell, candidate))

    def fresh(self) -> None:
        pass

    def heat(
        self, cell: Cell, candidates: Sequence[Candidate], plan: Plan, process: int = 0
    ) -> Heat:
        here = self._measurements.get((cell, process), {})
        failed = {c: self._failed[cell, c] for c in candidates if (cell, c) in self._failed}
        measurements = [here[c] for c in candidates if c in here and c not in failed]
        contest = recorded_contest(measurements, replace(plan, seed=process))
        times = {c: us for c in candidates if (us := self.time_us(cell, c)) is not None}
        return Heat(contest, failed, times)


class WorkerBench:
    """Heats in a worker process on a GPU, which is replaced when it is lost. A context manager.

    note  gets a line for each worker that is lost
    """

    def __init__(
        self,
        device_index: int,
        note: Callable[[str], None] = lambda text: None,
        worker_main: WorkerMain = worker.main,
    ) -> None:
        self._slot, self._note = Slot(device_index, worker_main), note

    def __enter__(self) -> WorkerBench:
        return self

    def __exit__(self, *about: object) -> None:
        self._slot.__exit__(*about)

    def fresh(self) -> None:
        self._slot.drop()

    def heat(
        self, cell: Cell, candidates: Sequence[Candidate], plan: Plan, process: int = 0
    ) -> Heat:
        """Measure; a worker that is lost costs the candidate that it was busy with, or the new one.

        Raises JournalBusy if another command measures on the GPU, SweepFailedError if no worker
        comes up.
        """
        heat = Heat(Contest.of(candidates))
        active = self._slot.get()
        try:
            active.send(Job(cell, tuple(candidates), replace(plan, seed=process)))
            while not isinstance(message := active.receive(), CellDone):
                if isinstance(message, RoundDone):
                    heat.contest.add(message.index, message.readings)
                elif isinstance(message, Outcome) and message.status != "ok":
                    heat.failed[message.candidate] = message.status, message.reason or ""
            heat.contest.left |= message.left
            if message.sticky:
                self.fresh()
                heat.failed.setdefault(candidates[0], ("fault", "the CUDA context was lost"))
        except WorkerLostError as lost:
            self.fresh()
            guilty = candidates[0] if lost.began.candidate is None else lost.began.candidate
            self._note(f"{lost.reason}: {guilty}")
            heat.failed[guilty] = lost.status, lost.reason
        _drop_failed(heat, candidates)
        return heat


def _drop_failed(heat: Heat, candidates: Sequence[Candidate]) -> None:
    """Take the samples from who failed; who has none failed."""
    heat.contest.samples = {
        c: us for c, us in heat.contest.samples.items() if us and c not in heat.failed
    }
    for candidate in candidates:
        if candidate not in heat.contest.samples:
            heat.failed.setdefault(candidate, ("fault", "no sample: the worker was lost"))
