"""A sweep from start to end: the device, the cells that are left, a worker that measures, a journal that keeps.

The journal has one writer, this process. The worker is replaced after a hang, a crash or a lost CUDA context; what it
was doing at that moment gets the blame and is not tried again.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from statistics import median
from typing import Literal

from kdabench import build, worker
from kdabench import device as devices
from kdabench.clock import ReplayedClock
from kdabench.grid import Case
from kdabench.journal import Journal
from kdabench.measure import Plan, Round, run_contest
from kdabench.records import Candidate, Cell, Record, Status, load
from kdabench.sweep import Sweep

REPLAY = "replay:"
_LIMITS_S: Mapping[worker.Phase, float] = {"start": 120, "cell": 120, "compile": 180, "check": 60, "measure": 60}
_KILL_GRACE_S = 3.0
_RULED_OUT = 1.15  # a settled loser this far behind the best isn't measured by later processes


@dataclass(frozen=True)
class Event:
    """Progress, for whoever shows it. done and total count (cell, process) pairs."""

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
    """What a sweep came to. `records` are all that its journal holds."""

    journal: Path
    done: int
    total: int
    interrupted: bool
    replay: bool
    records: list[Record]
    without_winner: tuple[Cell, ...] = field(default=())


Listener = Callable[[Event], None]
Share = tuple[int, int]
WHOLE: Share = (1, 1)
WorkerMain = Callable[[Connection, int], None]


def find_device(choice: str, results: Path) -> str:
    """ "cuda:N" or "replay:<slug>" for a user's choice; "auto" without a GPU replays the only recorded device.

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
    worker_main: WorkerMain = worker.main,
) -> Summary:
    """Measure what is left of `sweep` on "cuda:N", or replay it from `results`; everything is kept in out/<stem>.db.

    budget_s     no further cell starts after this many seconds
    share        (k, n): every n-th cell from the k-th on, for n GPUs or machines; `merge` joins their journals
    retry        first forget the (cell, process) pairs in which a candidate failed
    worker_main  what a worker process runs
    Raises JournalError or JournalBusy for the journal, ValueError for records that can't be replayed.
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
        if retry:
            journal.reopen_failed()
        cells = sweep.cells[share[0] - 1 :: share[1]]
        todo = [
            (cell, process)
            for process in range(sweep.processes)
            for cell in cells
            if journal.cell_state(cell, process) != "done"
        ]
        total = sweep.processes * len(cells)
        listener(Event("plan", total - len(todo), total))
        interrupted = False
        try:
            progress = _Progress(listener, total - len(todo), total, budget_s)
            if replay:
                _replay(sweep, todo, journal, results / device.removeprefix(REPLAY), plan, progress)
            else:
                _measure(sweep, todo, journal, int(device.removeprefix("cuda:")), worker_main, plan, progress)
        except KeyboardInterrupt:
            interrupted = True
        left = sum(journal.cell_state(cell, process) != "done" for cell, process in todo)
        records = journal.records()
    winners = {r.cell for r in records if r.status == "ok"}
    measured = {r.cell for r in records}
    return Summary(
        path,
        total - left,
        total,
        interrupted,
        replay,
        records,
        tuple(cell for cell in cells if cell in measured and cell not in winners),
    )


class _Progress:
    """Counts finished cells, tells the listener, and says when the budget is spent."""

    def __init__(self, listener: Listener, done: int, total: int, budget_s: float | None) -> None:
        self._listener, self._done, self._total = listener, done, total
        self._deadline = None if budget_s is None else time.monotonic() + budget_s

    @property
    def spent(self) -> bool:
        return self._deadline is not None and time.monotonic() > self._deadline

    def note(self, text: str) -> None:
        self._listener(Event("note", self._done, self._total, text=text))

    def cell(self, cell: Cell, process: int, times: Mapping[Candidate, Sequence[float]]) -> None:
        self._done += 1
        best = min(times, key=lambda c: median(times[c]), default=None)
        self._listener(
            Event(
                "cell",
                self._done,
                self._total,
                cell,
                process,
                None if best is None else str(best),
                None if best is None else median(times[best]),
            )
        )


# --- replay ---------------------------------------------------------------------------------------------------------


def _replay(
    sweep: Sweep, todo: Sequence[tuple[Cell, int]], journal: Journal, folder: Path, plan: Plan, progress: _Progress
) -> None:
    """Sampling and stopping, run on recorded samples."""
    recorded = _recorded(folder, sweep)
    envs: set[str] = set()
    for cell, process in todo:
        if progress.spent:
            return
        records = recorded.get((cell, process), [])
        wanted = [r for r in records if r.candidate in sweep.candidates]
        if not wanted:
            progress.note(f"not recorded: {cell.kind} requests={cell.requests} heads={cell.heads} process={process}")
        for digest in {r.env for r in wanted} - envs:
            envs.add(journal.add_env(devices.load_envs(folder)[digest]))
        timed = [r for r in wanted if r.samples_us]
        history, first_round = journal.history(cell, process)
        contest = run_contest(
            [r.candidate for r in timed],
            ReplayedClock(timed),
            replace(plan, seconds=float("inf")),
            history=history,
            first_round=first_round,
            on_round=partial(_keep_round, journal, cell, process),
        )
        for record in wanted:
            reason = contest.left.get(record.candidate, record.reason)
            journal.set_outcome(
                cell,
                process,
                record.candidate,
                record.status,
                reason,
                record.unique_bytes,
                record.bytes_moved,
                record.kernel_digest,
                record.env,
                {},
            )
        journal.finish_cell(cell, process)
        progress.cell(
            cell,
            process,
            {r.candidate: contest.samples.get(r.candidate, r.samples_us) for r in timed if r.status == "ok"},
        )


def _keep_round(journal: Journal, cell: Cell, process: int, index: int, readings: Round) -> None:
    journal.add_round(cell, process, index, [(c, x.time_us, x.sm_clock_mhz, x.throttled) for c, x in readings])


def _replayed_paths(sweep: Sweep, folder: Path) -> list[Path]:
    """The record files that a replay reads: the sweep's own, else every file of the device. Raises ValueError."""
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


def _recorded(folder: Path, sweep: Sweep) -> dict[tuple[Cell, int], list[Record]]:
    """Records by cell and process; a cell that stands in several files is taken from the first of them."""
    found: dict[tuple[Cell, int], list[Record]] = {}
    for path in _replayed_paths(sweep, folder):
        here: dict[tuple[Cell, int], list[Record]] = {}
        for record in load([path]):
            here.setdefault((record.cell, record.process), []).append(record)
        found = {**here, **found}
    return found


# --- measuring ------------------------------------------------------------------------------------------------------


class _WorkerLostError(Exception):
    """The worker died or hung: `status` and `reason` for whatever it was doing."""

    def __init__(self, status: Status, reason: str, began: worker.Began) -> None:
        super().__init__(reason)
        self.status: Status = status
        self.reason = reason
        self.began = began


class _Worker:
    """One worker process and the pipe to it."""

    def __init__(self, device_index: int, worker_main: WorkerMain) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process: BaseProcess = context.Process(target=worker_main, args=(theirs, device_index), daemon=True)
        self._process.start()
        theirs.close()
        self._began = worker.Began("start")
        message = self.receive()
        while not isinstance(message, worker.Ready):
            message = self.receive()
        self.env = message.env

    def send(self, job: worker.Job) -> None:
        self._pipe.send(job)

    def receive(self) -> worker.Message:
        """The next message. Raises _WorkerLostError if the worker dies or is silent beyond its phase's limit."""
        limit = _LIMITS_S[self._began.phase]
        try:
            if not self._pipe.poll(limit):
                raise _WorkerLostError(
                    "timeout", f"no answer within {limit:.0f} s of phase {self._began.phase}", self._began
                )
            message: worker.Message = self._pipe.recv()
        except (EOFError, OSError) as gone:
            self._process.join(_KILL_GRACE_S)
            raise _WorkerLostError(
                "fault",
                f"the worker ended with exit code {self._process.exitcode} in phase {self._began.phase}",
                self._began,
            ) from gone
        if isinstance(message, worker.Began):
            self._began = message
        return message

    def close(self) -> None:
        """End the process and everything it started."""
        pid = self._process.pid
        self._pipe.close()
        self._process.join(0.5)
        if self._process.is_alive() and pid is not None:
            try:
                os.killpg(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                self._process.kill()
        self._process.join(_KILL_GRACE_S)


def _measure(
    sweep: Sweep,
    todo: Sequence[tuple[Cell, int]],
    journal: Journal,
    device_index: int,
    worker_main: WorkerMain,
    plan: Plan,
    progress: _Progress,
) -> None:
    """Measure on a GPU: for each process number a fresh worker goes through the cells that are left."""
    if not todo:
        return
    if worker_main is worker.main:
        progress.note("compiling what the cache lacks")
        cases = {
            Case(c.variant, tuple(sorted(c.spec.items())), cell.problem) for cell, _ in todo for c in sweep.candidates
        }
        build.fill_cache(cases, _arch(device_index))
    for process in sorted({process for _, process in todo}):
        cells = [cell for cell, p in todo if p == process]
        with _workers(device_index, worker_main) as fresh:
            for cell in cells:
                if progress.spent:
                    return
                _measure_cell(cell, process, sweep, journal, fresh, plan, progress)


def _arch(device_index: int) -> str:
    import torch

    from kda_kernels.gpu import current_gpu

    with torch.cuda.device(device_index):
        return current_gpu().arch


@contextmanager
def _workers(device_index: int, worker_main: WorkerMain) -> Iterator[_WorkerSlot]:
    slot = _WorkerSlot(device_index, worker_main)
    try:
        yield slot
    finally:
        slot.drop()


class _WorkerSlot:
    """The current worker, started when first needed and after the last one was lost."""

    def __init__(self, device_index: int, worker_main: WorkerMain) -> None:
        self._index, self._main = device_index, worker_main
        self._worker: _Worker | None = None

    def get(self) -> _Worker:
        if self._worker is None:
            self._worker = _Worker(self._index, self._main)
        return self._worker

    def drop(self) -> None:
        if self._worker is not None:
            self._worker.close()
            self._worker = None


def _measure_cell(
    cell: Cell, process: int, sweep: Sweep, journal: Journal, slot: _WorkerSlot, plan: Plan, progress: _Progress
) -> None:
    """Until every candidate of the cell has an outcome; a lost worker costs the candidate it was busy with."""
    blamed: set[Candidate] = {r.candidate for r in journal.outcomes(cell, process) if r.status != "ok"}
    while True:
        env = ""
        try:
            active = slot.get()
            env = journal.add_env(active.env)
            history, first_round = journal.history(cell, process)
            candidates = tuple(c for c in _entrants(cell, process, sweep, journal) if c not in blamed)
            if not candidates:
                break
            active.send(worker.Job(cell, candidates, replace(plan, seed=process), history, first_round))
            sticky = _follow(active, cell, process, journal, env)
        except _WorkerLostError as lost:
            slot.drop()
            if lost.began.phase == "start" and not env:
                raise RuntimeError(f"the worker did not start: {lost.reason}") from lost
            guilty = [lost.began.candidate] if lost.began.candidate else list(candidates)
            for candidate in guilty:
                blamed.add(candidate)
                journal.set_outcome(
                    cell, process, candidate, lost.status, lost.reason, 0, cell.problem.bytes_moved, "", env, {}
                )
            progress.note(f"{lost.reason}: {', '.join(map(str, guilty[:2]))}")
            if lost.began.candidate is None:
                break
            continue
        if sticky:
            slot.drop()
            blamed |= {r.candidate for r in journal.outcomes(cell, process) if r.status != "ok"}
            continue
        break
    journal.finish_cell(cell, process)
    times = {r.candidate: r.samples_us for r in journal.outcomes(cell, process) if r.status == "ok" and r.samples_us}
    progress.cell(cell, process, times)


def _entrants(cell: Cell, process: int, sweep: Sweep, journal: Journal) -> list[Candidate]:
    """The sweep's candidates, less those that an earlier process ruled out: failed, or clearly slower."""
    out: set[Candidate] = set()
    for earlier in range(process):
        outcomes = journal.outcomes(cell, earlier)
        times = {r.candidate: median(r.samples_us) for r in outcomes if r.samples_us}
        limit = _RULED_OUT * min(times.values(), default=0.0)
        out |= {r.candidate for r in outcomes if r.status != "ok" or (r.reason and times[r.candidate] > limit)}
    return [c for c in sweep.candidates if c not in out]


def _follow(active: _Worker, cell: Cell, process: int, journal: Journal, env: str) -> bool:
    """Keep what the worker reports until its cell is done. True if it asks to be replaced."""
    while True:
        message = active.receive()
        if isinstance(message, worker.RoundDone):
            _keep_round(journal, cell, process, message.index, message.readings)
        elif isinstance(message, worker.Outcome):
            journal.set_outcome(
                cell,
                process,
                message.candidate,
                message.status,
                message.reason,
                message.unique_bytes,
                message.bytes_moved,
                message.kernel_digest,
                env,
                dict(message.info),
            )
        elif isinstance(message, worker.CellDone):
            return message.sticky


def dry_run(sweep: Sweep, device: str) -> tuple[int, int, float]:
    """Cells, candidates per cell, and a rough estimate of the seconds that all processes take."""
    per_cell = 0.35 + 0.06 * len(sweep.candidates)
    replayed = 0.02 if device.startswith(REPLAY) else per_cell
    return len(sweep.cells), len(sweep.candidates), sweep.processes * (len(sweep.cells) * replayed + 8)
