"""A sweep from start to end: the device, the cells that are left, a worker that measures, a journal
that keeps.

The journal has one writer, this process. The worker is replaced after a hang, a crash or a lost
CUDA context; what it was doing at that moment gets the blame and is not tried again.
"""

from __future__ import annotations

import hashlib
import os
import re
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from statistics import median
from types import FrameType
from typing import TYPE_CHECKING, Any, Literal

from kda_kernels import build
from kda_kernels.case import Case
from kdabench.data import devices, exported
from kdabench.data.measurements import Candidate, Cell, Measurement, Status
from kdabench.data.sweep import Sweep
from kdabench.measure import worker
from kdabench.measure.clock import EXHAUSTED, ReplayedClock
from kdabench.measure.contest import Contest, Plan, run_contest, twin_verdict, twins
from kdabench.measure.journal import Journal, JournalError, Outcome, hold
from kdabench.measure.worker_process import Worker, WorkerLostError, WorkerMain

if TYPE_CHECKING:
    from kdabench.policy import adaptive

REPLAY = "replay:"
_RULED_OUT = 1.15  # a settled loser this far behind the best isn't measured by later processes


@dataclass(frozen=True)
class Event:
    """Progress, for whoever shows it. done and total count (cell, process) pairs, the total at
    most."""

    kind: Literal["plan", "cell", "note"]
    done: int
    total: int
    cell: Cell | None = None
    process: int = 0
    best: str | None = None
    time_us: float | None = None
    text: str = ""


@dataclass
class Summary:
    """What a sweep came to. `records` are all that its journal holds.

    stopped_by      the signal that ended it, or None
    twins           how often a candidate measured twice was found faster, slower or the same as
                    itself
    """

    journal: Path
    done: int
    total: int
    stopped_by: int | None
    replay: bool
    measurements: list[Measurement]
    without_winner: tuple[Cell, ...] = field(default=())
    twins: Mapping[str, int] = field(default_factory=dict)

    @property
    def interrupted(self) -> bool:
        return self.stopped_by is not None


Listener = Callable[[Event], None]
Share = tuple[int, int]
WHOLE: Share = (1, 1)


class Stopped(KeyboardInterrupt):
    """A signal asked the sweep to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextmanager
def _stopping() -> Iterator[None]:
    """SIGTERM and SIGHUP, a closed terminal among its senders, end the sweep like Ctrl-C: once, and
    cleanly."""

    def stop(number: int, frame: FrameType | None) -> None:
        for each in replaced:
            signal.signal(each, signal.SIG_IGN)
        raise Stopped(number)

    replaced: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        # One that is ignored, as by nohup, stays so.
        replaced = {
            n: old
            for n in (signal.SIGTERM, signal.SIGHUP)
            if (old := signal.getsignal(n)) != signal.SIG_IGN
        }
    for number in replaced:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, old in replaced.items():
            signal.signal(number, old)


def find_device(choice: str, results: Path) -> str:
    """ "cuda:N" or "replay:<slug>" for a user's choice; "auto" without a GPU replays the only
    recorded device.

    Raises ValueError (DeviceError) with a one-line reason.
    """
    wanted = devices.parse(choice)
    count = 0 if wanted.kind == "replay" else _gpu_count()
    if wanted.kind == "replay" or (wanted.kind == "auto" and count == 0):
        return REPLAY + devices.replayed(results, wanted)
    if wanted.index >= count:
        raise devices.DeviceError(f"device: {choice!r}: this machine has {count} CUDA devices")
    return f"cuda:{wanted.index}"


def _gpu_count() -> int:
    """CUDA devices, without creating a context in this process."""
    if not any(Path("/dev").glob("nvidia*")) and not Path("/dev/dxg").exists():
        return 0
    import torch

    return torch.cuda.device_count()


def run_sweep(
    sweep: Sweep,
    *,
    device: str,
    out: Path,
    results: Path,
    budget_s: float | None = None,
    listener: Listener = lambda event: None,
    plan: Plan | None = None,
    share: Share = WHOLE,
    retry: bool = False,
    target: float | None = None,
    most_cells: int | None = None,
    worker_main: WorkerMain = worker.main,
) -> Summary:
    """Measure what is left of `sweep` on "cuda:N", or replay it from `results`; everything is kept
    in out/<stem>.db.

    budget_s     no further cell starts after this many seconds
    share        (k, n): every n-th cell from the k-th on, for n GPUs or machines; `merge` joins
                 their journals
    retry        first forget the (cell, process) pairs in which a candidate failed
    target       not every cell, but as adaptive.py chooses until none can lose more than this
                 ratio; shares are of rows
    most_cells   with a target: of these cells no more than so many, or the first ones of the rows
                 if those are more
    worker_main  what a worker process runs

    Raises JournalError or JournalBusy for the journal, ValueError for records that can't be
    replayed.
    """
    plan = plan or Plan()
    replay = device.startswith(REPLAY)
    out.mkdir(parents=True, exist_ok=True)
    digest, path = sweep.digest, out / f"{sweep.stem}.db"
    if replay:
        digest = _replay_digest(sweep, results / device.removeprefix(REPLAY))
        path = out / f"{sweep.stem}.replay.db"
        _drop_stale_replay(path, digest)
    with Journal.open(path, digest, sweep.question, replay=replay) as journal:
        begun: list[Cell] = []
        if retry:
            begun = [
                c
                for c in sweep.cells
                if any(journal.cell_state(c, n) != "new" for n in range(sweep.processes))
            ]
            journal.reopen_failed()
        queue = _Queue(sweep, share, journal, target, begun, most_cells)
        listener(Event("plan", queue.done, queue.total))
        stopped_by = None
        try:
            with _stopping():
                progress = _Progress(listener, queue, budget_s)
                if replay:
                    _replay(
                        sweep, queue, journal, results / device.removeprefix(REPLAY), plan, progress
                    )
                else:
                    _measure(
                        sweep,
                        queue,
                        journal,
                        int(device.removeprefix("cuda:")),
                        worker_main,
                        plan,
                        progress,
                    )
        except KeyboardInterrupt as stopped:
            stopped_by = stopped.number if isinstance(stopped, Stopped) else int(signal.SIGINT)
        done, total = queue.done, queue.total
        measurements = journal.measurements()
    winners = {r.cell for r in measurements if r.status == "ok"}
    measured = {r.cell for r in measurements}
    return Summary(
        path,
        done,
        total,
        stopped_by,
        replay,
        measurements,
        tuple(cell for cell in queue.cells if cell in measured and cell not in winners),
        Counter(v for r in measurements if (v := twin_verdict(twins(r), plan)) is not None),
    )


class _Queue:
    """(cell, process) pairs in the order in which they are measured, each asked for when the one
    before it is done.

    target              None: every cell, process by process; else what an adaptive.Course says
    begun, most_cells   of the course
    """

    def __init__(
        self,
        sweep: Sweep,
        share: Share,
        journal: Journal,
        target: float | None,
        begun: Collection[Cell],
        most_cells: int | None,
    ) -> None:
        self._journal, self._processes = journal, sweep.processes
        self.cells = sweep.cells[share[0] - 1 :: share[1]]
        self._course: adaptive.Course | None = None
        if target is not None:
            from kdabench.policy import adaptive

            self.cells = adaptive.part(sweep.cells, *share)
            self._course = adaptive.Course(
                self.cells, sweep.candidates, sweep.processes, begun, target, most_cells
            )
            left = set(self.left)
            for pair in self._pairs():
                if pair not in left:
                    self._tell(self._course, pair)

    def _pairs(self) -> list[tuple[Cell, int]]:
        return [(cell, process) for process in range(self._processes) for cell in self.cells]

    def _tell(self, course: adaptive.Course, pair: tuple[Cell, int]) -> None:
        sms = next((env["sms"] for env in self._journal.envs().values() if "sms" in env), None)
        course.tell(*pair, self._journal.outcomes(*pair), sms)

    def __iter__(self) -> Iterator[tuple[Cell, int]]:
        if self._course is None:
            yield from self.left
            return
        while (pair := self._course.next()) is not None:
            yield pair
            self._tell(self._course, pair)

    @property
    def left(self) -> list[tuple[Cell, int]]:
        """What is not done. An adaptive sweep need not do all of it."""
        return [pair for pair in self._pairs() if self._journal.cell_state(*pair) != "done"]

    @property
    def done(self) -> int:
        return len(self._pairs()) - len(self.left)

    @property
    def total(self) -> int:
        """Of an adaptive sweep the most there may be, until its cells are chosen."""
        return len(self._pairs()) if self._course is None else self._course.total


class _Progress:
    """Counts finished cells, tells the listener, and says when the budget is spent."""

    def __init__(self, listener: Listener, queue: _Queue, budget_s: float | None) -> None:
        self._listener, self._queue, self._done = listener, queue, queue.done
        self._deadline = None if budget_s is None else time.monotonic() + budget_s

    @property
    def spent(self) -> bool:
        return self._deadline is not None and time.monotonic() > self._deadline

    def note(self, text: str) -> None:
        self._listener(Event("note", self._done, self._queue.total, text=text))

    def cell(self, cell: Cell, process: int, times: Mapping[Candidate, Sequence[float]]) -> None:
        self._done += 1
        best = min(times, key=lambda c: median(times[c]), default=None)
        self._listener(
            Event(
                "cell",
                self._done,
                self._queue.total,
                cell,
                process,
                None if best is None else str(best),
                None if best is None else median(times[best]),
            )
        )


# --- replay
# ---------------------------------------------------------------------------------------------------------


def _replay(
    sweep: Sweep, queue: _Queue, journal: Journal, folder: Path, plan: Plan, progress: _Progress
) -> None:
    """Sampling and stopping, run on recorded samples."""
    if not queue.left:
        return
    known = exported.load_envs([folder / "env.json"])
    by_pair: dict[tuple[Cell, int], list[Measurement]] = {}
    for measurement in recorded(folder, sweep):
        by_pair.setdefault((measurement.cell, measurement.process), []).append(measurement)
    envs: set[str] = set()
    missing: list[tuple[Cell, int]] = []
    for cell, process in queue:
        if progress.spent:
            break
        measurements = by_pair.get((cell, process), [])
        candidates = sweep.candidates_of(cell)
        wanted = [r for r in measurements if r.candidate in candidates]
        if candidates and not wanted:
            missing.append((cell, process))
        for digest in {r.env for r in wanted} - envs:
            envs.add(journal.add_env(known[digest]))
        timed = [r for r in wanted if r.samples_us]
        history, first_round = journal.readings(cell, process)
        clocks = [
            known[r.env]["sm_clock_max_mhz"] for r in timed if known[r.env].get("sm_clock_max_mhz")
        ]
        contest = run_contest(
            [r.candidate for r in timed],
            ReplayedClock(timed),
            replace(plan, seconds=float("inf")),
            history=history,
            first_round=first_round,
            full_clock_mhz=max(clocks, default=None),
            on_round=lambda index, readings: journal.add_round(cell, process, index, readings),  # noqa: B023
        )
        for measurement in wanted:
            status, reason = _replayed_outcome(measurement, contest)
            outcome = Outcome(
                measurement.candidate, status, reason, measurement.unique_bytes, measurement.code
            )
            journal.set_outcome(cell, process, outcome, measurement.env)
        journal.finish_cell(cell, process)
        progress.cell(
            cell,
            process,
            {
                r.candidate: contest.samples.get(r.candidate, r.samples_us)
                for r in timed
                if r.status == "ok"
            },
        )
    if missing:
        cell, process = missing[0]
        first = f"{cell.kind} requests={cell.requests} heads={cell.heads} tokens={cell.tokens} process={process}"
        progress.note(
            f"not recorded: {len(missing)} cells and processes, {first} the first of them"
        )


def _replayed_outcome(measurement: Measurement, contest: Contest) -> tuple[Status, str | None]:
    """Status and reason: what the contest says of a recorded candidate, unless its samples merely
    came to an end."""
    if measurement.status == "ok" and contest.unstable is not None:
        return "unstable", contest.unstable
    left = contest.left.get(measurement.candidate)
    return measurement.status, measurement.reason if left is None or (
        measurement.reason and EXHAUSTED in left
    ) else left


def _replayed_paths(sweep: Sweep, folder: Path) -> list[Path]:
    """The record files that a replay reads: the sweep's own, else every file of the device. Raises
    ValueError."""
    own = folder / f"{sweep.stem}.jsonl"
    paths = [own] if own.exists() else sorted(folder.glob("*.jsonl"))
    if not paths:
        raise ValueError(f"{folder}: no recorded measurements (*.jsonl) to replay")
    return paths


def _drop_stale_replay(path: Path, digest: str) -> None:
    """Other records are another replay; what an old one came to can always be had again."""
    if not path.exists():
        return
    with Journal.read(path) as journal:
        stale = journal.sweep_digest != digest
    if stale:
        for suffix in ("", "-wal", "-shm"):
            path.with_name(path.name + suffix).unlink(missing_ok=True)


def _replay_digest(sweep: Sweep, folder: Path) -> str:
    digest = hashlib.sha256(sweep.digest.encode())
    for path in _replayed_paths(sweep, folder):
        digest.update(path.read_bytes())
    return "sha256:" + digest.hexdigest()


def recorded(folder: Path, sweep: Sweep) -> list[Measurement]:
    """Records of the sweep's cells; a cell that stands in several files is taken from the first of
    them.

    Raises ValueError if nothing is recorded there.
    """
    found: list[Measurement] = []
    left = set(sweep.cells)
    for path in _replayed_paths(sweep, folder):
        here = [measurement for measurement in exported.load([path]) if measurement.cell in left]
        left -= {measurement.cell for measurement in here}
        found += here
    return found


# --- measuring
# ------------------------------------------------------------------------------------------------------


class SweepFailedError(OSError):
    """Nothing can be measured at all, in one line."""


def _measure(
    sweep: Sweep,
    queue: _Queue,
    journal: Journal,
    device_index: int,
    worker_main: WorkerMain,
    plan: Plan,
    progress: _Progress,
) -> None:
    """Measure on a GPU: for each process number a fresh worker goes through the cells that are
    left."""
    pairs = iter(queue)
    first = next(pairs, None)
    if first is None or progress.spent:
        return
    with _Slot(device_index, worker_main) as slot:
        slot.get()
        if worker_main is worker.main:
            progress.note("compiling what the cache lacks")
            cases = {
                Case(c.variant, tuple(sorted(c.options.items())), cell.problem)
                for cell, _ in queue.left
                for c in sweep.candidates_of(cell)
            }
            build.fill_cache(cases, _arch(device_index))
        before = first[1]
        for cell, process in chain([first], pairs):
            if progress.spent:
                return
            if process != before:
                slot.drop()
            before = process
            _Share(cell, process, sweep, journal, slot, plan, progress).measure()


def _arch(device_index: int) -> str:
    import torch

    from kda_kernels.device.gpu import current_gpu

    with torch.cuda.device(device_index):
        return current_gpu().arch


class _Slot:
    """The current worker, started when first needed and after the last one was lost; and the lock
    on its GPU.

    While a worker is silent for long, a spare one is started, so that a hang costs little more than
    its time limit.
    """

    def __init__(self, device_index: int, worker_main: WorkerMain) -> None:
        self._index, self._main = device_index, worker_main
        self._worker: Worker | None = None
        self._spare: Worker | None = None
        self._lock: int | None = None

    def __enter__(self) -> _Slot:
        return self

    def __exit__(self, *about: object) -> None:
        self.drop()
        if self._spare is not None:
            self._spare.close()
        if self._lock is not None:
            os.close(self._lock)

    def get(self) -> Worker:
        """Raises JournalBusy if another sweep has the GPU, SweepFailedError if no worker comes
        up."""
        if self._worker is None:
            try:
                self._worker = self._started()
            except WorkerLostError:
                time.sleep(1)  # the GPU may not yet be rid of what the last one left
                try:
                    self._worker = self._started()
                except WorkerLostError as lost:
                    raise SweepFailedError(f"the worker did not start: {lost.reason}") from lost
            if self._lock is None:
                self._lock = lock_gpu(str(self._worker.env.get("uuid") or f"cuda-{self._index}"))
        return self._worker

    def _started(self) -> Worker:
        self._prepare_spare()
        assert self._spare is not None
        started, self._spare = self._spare, None
        started.wait()
        return started

    def _prepare_spare(self) -> None:
        if self._spare is None:
            self._spare = Worker(self._index, self._main, self._prepare_spare)

    def drop(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None


def lock_gpu(uuid: str) -> int:
    """Keeps other sweeps off a GPU until the returned descriptor is closed or this process ends.

    The lock lies in $KDABENCH_LOCKS, by default the machine's folder for temporary files. Raises
    JournalBusy naming the holder, JournalError if nothing can be written there.
    """
    folder = Path(os.environ.get("KDABENCH_LOCKS") or tempfile.gettempdir())
    path = folder / f"kdabench-{re.sub('[^A-Za-z0-9-]', '-', uuid)}"
    try:
        return hold(path, "measured on")
    except OSError as error:
        raise JournalError(
            f"{path}.lock: {error.strerror}; name another folder by KDABENCH_LOCKS"
        ) from error


@dataclass(frozen=True)
class _Trouble:
    """A worker was lost: what was seen, and who was busy if that is known."""

    status: Status
    reason: str
    candidate: Candidate | None
    env: str
    phase: worker.Phase | None = None


@dataclass
class _Share:
    """One process's share of a cell."""

    cell: Cell
    process: int
    sweep: Sweep
    journal: Journal
    slot: _Slot
    plan: Plan
    progress: _Progress

    def measure(self) -> None:
        """Until every candidate has an outcome. A lost worker costs the one that loses it alone."""
        entrants = _entrants(self.cell, self.process, self.sweep, self.journal)
        retried = False
        while True:
            outcomes = self.journal.outcomes(self.cell, self.process)
            failed = {r.candidate for r in outcomes if r.status != "ok"}
            candidates = tuple(c for c in entrants if c not in failed)
            trouble = self._attempt(candidates) if candidates else None
            if trouble is None:
                break
            self.progress.note(f"{trouble.reason}: {trouble.candidate or self.cell.key}")
            self.journal.forget_rounds(self.cell, self.process)
            if trouble.candidate is None and not retried:
                retried = True  # perhaps what an earlier cell left behind
                continue
            for guilty, proof in self._guilty(trouble, candidates).items():
                blamed = Outcome(guilty, proof.status, proof.reason)
                self.journal.set_outcome(self.cell, self.process, blamed, proof.env or trouble.env)
        self.journal.finish_cell(self.cell, self.process)
        self._report()

    def _report(self) -> None:
        good = [
            r
            for r in self.journal.outcomes(self.cell, self.process)
            if r.status == "ok" and r.samples_us
        ]
        for measurement in good:
            verdict = twin_verdict(twins(measurement), self.plan)
            if verdict not in (None, "same"):
                self.progress.note(
                    f"{self.cell.key}: {measurement.candidate} was found {verdict} than itself"
                )
        self.progress.cell(self.cell, self.process, {r.candidate: r.samples_us for r in good})

    def _attempt(self, candidates: tuple[Candidate, ...]) -> _Trouble | None:
        """Measure and keep. None if all is told; else the worker is gone."""
        history, first_round = self.journal.readings(self.cell, self.process)
        job = worker.Job(
            self.cell, candidates, replace(self.plan, seed=self.process), history, first_round
        )
        told = set[Candidate]()

        def keep(message: worker.Message, env: str) -> None:
            if isinstance(message, worker.RoundDone):
                self.journal.add_round(
                    self.cell, self.process, message.index, message.readings, gpu=message.gpu
                )
            elif isinstance(message, Outcome):
                told.add(message.candidate)
                self.journal.set_outcome(self.cell, self.process, message, env)

        trouble = self._run(job, keep)
        if trouble is None:
            for candidate in set(candidates) - told:
                env = self.journal.add_env(self.slot.get().env)
                silent = Outcome(candidate, "fault", "the worker told nothing about it")
                self.journal.set_outcome(self.cell, self.process, silent, env)
        return trouble

    def _run(self, job: worker.Job, keep: Callable[[worker.Message, str], None]) -> _Trouble | None:
        """Follow a job to its end. A fault that takes the CUDA context with it is trouble, and not
        kept."""
        active = self.slot.get()
        env = self.journal.add_env(active.env)
        fault: Outcome | None = None
        try:
            active.send(job)
            while not isinstance(message := active.receive(), worker.CellDone):
                if isinstance(message, Outcome) and message.status == "fault":
                    if fault is not None:
                        keep(fault, env)
                    fault = message
                else:
                    keep(message, env)
        except WorkerLostError as lost:
            self.slot.drop()
            return _Trouble(lost.status, lost.reason, lost.began.candidate, env, lost.began.phase)
        if message.sticky:
            self.slot.drop()
            reason = "the CUDA context was lost" if fault is None else fault.reason or ""
            return _Trouble("fault", reason, None if fault is None else fault.candidate, env)
        if fault is not None:
            keep(fault, env)
        return None

    def _guilty(
        self, trouble: _Trouble, candidates: Sequence[Candidate]
    ) -> dict[Candidate, _Trouble]:
        """Whom to blame. A fault is proven by running a suspect alone in a fresh worker; a hang is
        not paid twice."""
        busy = trouble.candidate
        if busy is None:
            return dict.fromkeys(candidates, trouble)
        if trouble.status == "timeout" or trouble.phase == "compile" or len(candidates) == 1:
            return {busy: trouble}
        alone = self._alone(busy)
        if alone is not None:
            return {busy: alone}
        others = {
            c: proof for c in candidates if c != busy and (proof := self._alone(c)) is not None
        }
        note = f"{trouble.reason}; not when it was tried alone"
        return others or {busy: replace(trouble, reason=note)}

    def _alone(self, candidate: Candidate) -> _Trouble | None:
        """What goes wrong with a candidate that nothing ran before, or None."""
        self.slot.drop()
        once = replace(self.plan, min_rounds=1, max_rounds=1, sentinel=False)
        failed: list[_Trouble] = []

        def keep(message: worker.Message, env: str) -> None:
            if isinstance(message, Outcome) and message.status != "ok":
                failed.append(_Trouble(message.status, message.reason or "", candidate, env))

        trouble = self._run(worker.Job(self.cell, (candidate,), once), keep)
        return trouble or next(iter(failed), None)


def _entrants(cell: Cell, process: int, sweep: Sweep, journal: Journal) -> list[Candidate]:
    """The sweep's candidates, less those that an earlier process ruled out: failed, or clearly
    slower."""
    out: set[Candidate] = set()
    for earlier in range(process):
        outcomes = journal.outcomes(cell, earlier)
        times = {r.candidate: median(r.samples_us) for r in outcomes if r.samples_us}
        limit = _RULED_OUT * min(times.values(), default=0.0)
        out |= {r.candidate for r in outcomes if r.status not in ("ok", "unstable")}
        out |= {r.candidate for r in outcomes if r.reason and times.get(r.candidate, 0.0) > limit}
    return [c for c in sweep.candidates_of(cell) if c not in out]


def dry_run(sweep: Sweep, device: str) -> tuple[int, int, float]:
    """Cells, candidates, and a rough estimate of the seconds that all processes take."""
    measured = sum(0.35 + 0.06 * len(sweep.candidates_of(cell)) for cell in sweep.cells)
    seconds = 0.02 * len(sweep.cells) if device.startswith(REPLAY) else measured
    return (
        len(sweep.cells),
        len(sweep.candidates),
        sweep.processes * (seconds + 8),
    )
