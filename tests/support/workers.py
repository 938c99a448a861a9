"""A worker process whose measurements are made up and whose candidates misbehave as their spec
says.

Light to import: every process that a test spawns imports this.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from kdabench.data.measurements import Candidate, Cell
from kdabench.data.sweep import Sweep
from kdabench.measure import messages, session
from kdabench.measure.clock import Reading
from kdabench.measure.contest import Plan, run_contest
from kdabench.measure.gpu_runner import GpuRunner
from kdabench.measure.queue import every_cell
from kdabench.measure.worker_process import WorkerMain

PLAN = Plan(min_rounds=3, max_rounds=4)
ENV = {"gpu": "Synthetic GPU", "sms": 100, "uuid": "GPU-0"}
STDERR_BYTES = 100_000_000


def candidate(split: int, does: str = "its work") -> Candidate:
    return Candidate.of("KdaSplit", {"split": split, "does": does})


def make_sweep(
    folder: Path,
    candidates: tuple[Candidate, ...],
    requests: tuple[int, ...] = (1,),
    processes: int = 1,
) -> Sweep:
    cells = tuple(Cell("decode", r, 12) for r in requests)
    return Sweep(
        folder / "made-up.toml", "Is it kept?", ("KdaSplit",), processes, cells, candidates
    )


def run(
    sweep: Sweep,
    out: Path,
    *,
    runner: session.Runner | None = None,
    worker_main: WorkerMain | None = None,
    plan: Plan = PLAN,
    part: tuple[int, int] = (1, 1),
    retry: bool = False,
    **options: Any,
) -> session.Summary:
    """Run a sweep as the commands do; worker_main: obedient unless given."""
    runner = runner or GpuRunner(0, worker_main or obedient, compiles=False)
    with runner.open_journal(sweep, out) as journal:
        if retry:
            session.reopen_failed(sweep, journal)
        return session.run_sweep(
            sweep, runner, journal, every_cell(sweep, part), plan=plan, **options
        )


class NoisyClock:
    """The true time is `5 - split / 10` us; a candidate that does "nan" has none."""

    def __init__(self, seed: str) -> None:
        self.random = random.Random(seed)

    def begin_round(self, index: int) -> None:
        pass

    def read(self, candidate: Candidate) -> Reading:
        if candidate.options["does"] == "nan":
            return Reading(float("nan"))
        if candidate.options["does"] == "hang in the rounds":
            time.sleep(1000)
        return Reading(
            (5 - int(candidate.options["split"]) / 10) * (1 + self.random.gauss(0, 0.001)),
            1980,
            False,
        )


class UnpicklableError(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("cannot be pickled")


def misbehave(pipe: Connection, does: str) -> None:
    match does:
        case "abort":
            os.abort()
        case "exit without an answer":
            os._exit(0)
        case "segmentation fault":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "unpicklable exception":
            raise UnpicklableError("and here the reason")
        case "unreadable answer":
            pipe.send_bytes(b"not a pickle")
        case "much on stderr, then abort":
            shout()
            os.abort()
        case "much on stderr":
            shout()
        case "hang" | "hang in compile":
            time.sleep(1000)
        case "hold the pipe":
            os.write(pipe.fileno(), (1 << 20).to_bytes(4, "big") + b"the beginning of an answer")
            time.sleep(1000)
        case "leave a child":
            if os.fork() == 0:
                time.sleep(1000)
            os.abort()


def broken(pipe: Connection, index: int) -> None:
    """Doesn't get as far as its first message."""
    raise RuntimeError("CUDA error: all devices are busy")


def shout() -> None:
    line = b"a kernel printed this\n" * 4096
    for _ in range(STDERR_BYTES // len(line)):
        os.write(2, line)


def obedient(pipe: Connection, index: int) -> None:
    pipe.send(messages.Ready(ENV))
    while (job := pipe.recv()) is not None:
        pipe.send(messages.Began("cell"))
        ready = [c for c in job.candidates if prepare(pipe, c, len(job.candidates))]
        pipe.send(messages.Began("measure"))

        def keep(index: int, readings: Any) -> None:
            pipe.send(messages.RoundDone(index, tuple(readings), {"power_w": 300}))

        clock = Announcing(pipe, job.cell.key)
        history: Mapping[Candidate, Any] = job.history
        contest = run_contest(
            ready, clock, job.plan, history=history, first_round=job.first_round, on_round=keep
        )
        for c in ready:
            if c in contest.samples:
                left = contest.left.get(c)
                outcome(pipe, c, "ok", None if left is None else str(left))
            else:
                outcome(pipe, c, "unstable", str(contest.left[c]))
        pipe.send(messages.CellDone(left=contest.left))


class Announcing(NoisyClock):
    def __init__(self, pipe: Connection, seed: str) -> None:
        super().__init__(seed)
        self.pipe = pipe

    def read(self, candidate: Candidate) -> Reading:
        self.pipe.send(messages.Began("measure", candidate))
        return super().read(candidate)


def prepare(pipe: Connection, candidate: Candidate, company: int) -> bool:
    does = str(candidate.options["does"])
    if does == "abort in company" and company > 1:
        does = "abort"
    pipe.send(messages.Began("compile", candidate))
    if does == "hang in compile":
        misbehave(pipe, does)
    pipe.send(messages.Began("check", candidate))
    if does in ("wrong", "capture_failed", "implausible"):
        outcome(pipe, candidate, does, f"made up: {does}")
        return False
    misbehave(pipe, does)
    return True


def outcome(pipe: Connection, candidate: Candidate, status: Any, reason: str | None) -> None:
    pipe.send(
        messages.Outcome(
            candidate, status, reason, 10**9, 10**6, "sha256:" + "0" * 64, {"compile_s": 1.5}
        )
    )


if __name__ == "__main__":
    sys.exit("imported by tests")
