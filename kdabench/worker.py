"""The process that touches the GPU. A parent sends it cells; it answers with messages as things happen.

It announces every phase before it enters it, so that a parent that finds it dead or silent knows what to blame.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Literal

from kdabench.clock import Reading
from kdabench.measure import Plan
from kdabench.records import Candidate, Cell, Status

Phase = Literal["start", "cell", "compile", "check", "measure"]


@dataclass(frozen=True)
class Job:
    """One cell to measure in this process. `history` holds (round, time_us) of an interrupted attempt."""

    cell: Cell
    candidates: tuple[Candidate, ...]
    plan: Plan
    history: Mapping[Candidate, Sequence[tuple[int, float]]] = field(default_factory=dict)
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
    """What became of a candidate. `info` holds facts off the clock, such as seconds of compilation."""

    candidate: Candidate
    status: Status
    reason: str | None
    unique_bytes: int
    bytes_moved: int
    kernel_digest: str
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class RoundDone:
    index: int
    readings: tuple[tuple[Candidate, Reading], ...]


@dataclass(frozen=True)
class CellDone:
    """The cell is finished; `sticky` asks for a new worker because this one's CUDA context is lost."""

    sticky: bool = False


Message = Ready | Began | Outcome | RoundDone | CellDone


def main(pipe: Connection, device_index: int) -> None:
    """Answer jobs until the parent closes the pipe. Runs in its own process group."""
    os.setpgrp()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    try:
        _serve(pipe, device_index)
    except BrokenPipeError:
        sys.exit("kdabench: the sweep that started this worker is gone")


def _serve(pipe: Connection, device_index: int) -> None:
    pipe.send(Began("start"))
    import torch

    from kdabench import bench
    from kdabench.environment import describe
    from kdabench.telemetry import Telemetry

    torch.cuda.set_device(device_index)
    device = bench.Device.current()
    telemetry = Telemetry(device.uuid)
    pipe.send(Ready(describe(device.name, device.uuid, telemetry)))
    weights = bench.WeightCache()
    while True:
        try:
            job: Job | None = pipe.recv()
        except EOFError:
            break
        if job is None:
            break
        sticky = _run(pipe, job, device, telemetry, weights)
        pipe.send(CellDone(sticky))
        if sticky:
            break


def _run(pipe: Connection, job: Job, device: Any, telemetry: Any, weights: Any) -> bool:
    """Measure one cell. True if the CUDA context is lost."""
    import torch

    from kda_kernels import variants
    from kdabench import bench
    from kdabench.measure import run_contest

    cell = job.cell
    digests = {c: variants.digest(c.variant) for c in job.candidates}

    def outcome(candidate: Candidate, status: Status, reason: str | None, unique: int = 0, **info: Any) -> None:
        pipe.send(Outcome(candidate, status, reason, unique, cell.problem.bytes_moved, digests[candidate], info))

    pipe.send(Began("cell"))
    ready = None
    try:
        torch.cuda.empty_cache()
        ready = bench.CellBench(cell, device, weights, telemetry)
    except (bench.CandidateError, torch.OutOfMemoryError) as reason:
        for candidate in job.candidates:
            outcome(candidate, "oom", str(reason).splitlines()[0])
        return False
    compile_s = {}
    for candidate in job.candidates:
        begin = time.perf_counter()
        try:
            pipe.send(Began("compile", candidate))
            module, compiled = ready.compile(candidate)
            compile_s[candidate] = round(time.perf_counter() - begin, 3)
            pipe.send(Began("check", candidate))
            ready.prepare(candidate, module, compiled)
        except bench.CandidateError as reason:
            outcome(candidate, reason.status, reason.reason)
        except torch.OutOfMemoryError as reason:
            outcome(candidate, "oom", str(reason).splitlines()[0])
        except RuntimeError as reason:  # torch.AcceleratorError and the driver's errors among them
            outcome(candidate, "fault", str(reason).splitlines()[0])
            if _context_lost():
                return True
    pipe.send(Began("measure"))
    contest = run_contest(
        sorted(ready.graphs, key=str),
        ready.clock(),
        job.plan,
        history=job.history,
        first_round=job.first_round,
        on_round=lambda index, readings: pipe.send(RoundDone(index, tuple(readings))),
    )
    for candidate in contest.samples:
        try:
            ready.require_plausible(contest.time_us(candidate))
        except bench.CandidateError as reason:
            outcome(candidate, reason.status, reason.reason, ready.unique_bytes, compile_s=compile_s[candidate])
            continue
        outcome(candidate, "ok", contest.left.get(candidate), ready.unique_bytes, compile_s=compile_s[candidate])
    return False


def _context_lost() -> bool:
    """Whether a trivial kernel no longer runs."""
    import torch

    try:
        torch.zeros(1, device="cuda").add_(1).item()
    except RuntimeError:
        return True
    return False


if __name__ == "__main__":
    sys.exit("kdabench.worker is started by a sweep")
