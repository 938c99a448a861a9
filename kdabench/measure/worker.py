"""The process that touches the GPU. A parent sends it cells; it answers with messages as things
happen.

It announces every phase before it enters it, so that a parent that finds it dead or silent knows
what to blame.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Mapping
from multiprocessing.connection import Connection
from types import ModuleType
from typing import TYPE_CHECKING, Any

from kdabench.data.measurements import Candidate, Cell, Status
from kdabench.measure.contest import Contest, Left, run_contest
from kdabench.measure.messages import Began, CellDone, Job, Outcome, Ready, RoundDone
from kdabench.measure.ranges import span

if TYPE_CHECKING:
    from kdabench.measure import cell_bench
    from kdabench.measure.telemetry import Telemetry


def main(pipe: Connection, device_index: int) -> None:
    """Answer jobs until the parent closes the pipe. Runs in its own process group."""
    serve(pipe, device_index)


def serve(
    pipe: Connection, device_index: int, extra: Mapping[str, ModuleType] | None = None
) -> None:
    """The same with variants beside those of the kernels' package, by name: how tests and
    benchmarks plant faulty ones.

    Such a variant is any object with the names that kda_kernels.variants lists, but for what is
    declared of it.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    try:
        _serve(pipe, device_index, extra or {})
    except BrokenPipeError:
        sys.exit("kdabench: the sweep that started this worker is gone")


def _serve(pipe: Connection, device_index: int, extra: Mapping[str, ModuleType]) -> None:
    pipe.send(Began("start"))
    import torch

    from kdabench.measure import cell_bench
    from kdabench.measure.environment import describe
    from kdabench.measure.telemetry import Telemetry

    torch.cuda.set_device(device_index)
    device = cell_bench.Device.current()
    telemetry = Telemetry(device.uuid, device.pci_id)
    pipe.send(Ready(describe(device.name, device.uuid, telemetry)))
    bench_of = _Benches(device.knowing(telemetry), telemetry, extra)
    while True:
        try:
            job: Job | None = pipe.recv()
        except EOFError:
            break
        if job is None:
            break
        with span(job.cell.key):
            done = _CellRun(pipe, job, bench_of).run()
        pipe.send(done)
        if done.sticky:
            break


class _Benches:
    """Makes cells ready; what lives as long as the worker."""

    def __init__(
        self, device: cell_bench.Device, telemetry: Telemetry, extra: Mapping[str, ModuleType]
    ) -> None:
        from kdabench.measure import cell_bench

        self.device, self.telemetry, self.extra = device, telemetry, extra
        self.weights = cell_bench.WeightCache()

    def code(self, cell: Cell, candidate: Candidate, compiled: Any) -> str:
        """Names of the binary and the launch that run; empty if the variant refuses operands of the
        cell."""
        from kda_kernels import identity, variants
        from kda_kernels.device.gpu import current_gpu

        if candidate.variant in self.extra:
            return "planted-planted"
        options = variants.make_options(candidate.variant, dict(candidate.options))
        try:
            return identity.code(candidate.variant, compiled, cell.problem, options, current_gpu())
        except ValueError:
            return ""

    def fresh(self, cell: Cell) -> cell_bench.CellBench:
        """New operands, from the same seeds. Raises CandidateError, torch.OutOfMemoryError."""
        import torch

        from kdabench.measure import cell_bench

        torch.cuda.empty_cache()
        return cell_bench.make_ready(cell, self.device, self.weights, self.telemetry, self.extra)

    def fresh_after_damage(self, cell: Cell) -> cell_bench.CellBench:
        """The same where a kernel may have written anywhere."""
        self.weights.clear()
        return self.fresh(cell)


class _LostContextError(Exception):
    """Not even a trivial kernel runs any more."""


class _CellRun:
    """One cell: its candidates are made ready and checked one by one, then timed in rounds."""

    def __init__(self, pipe: Connection, job: Job, benches: _Benches) -> None:
        self._pipe, self._job, self._benches = pipe, job, benches
        self._cell = job.cell
        self._compiled: dict[Candidate, tuple[ModuleType, Any]] = {}
        self._compile_s: dict[Candidate, float] = {}
        self._open = list(job.candidates)
        self._cleared = set[Candidate]()
        self._left: Mapping[Candidate, Left] = {}

    def run(self) -> CellDone:
        """Measure the cell, telling the outcome of each candidate; if the CUDA context is lost, of
        those that had one by then."""
        import torch

        from kdabench.measure import cell_bench
        from kdabench.measure.cuda_graphs import CaptureFailedError

        self._pipe.send(Began("cell"))
        try:
            ready = self._benches.fresh(self._cell)
            while (damaged := self._make_ready(ready)) is not None:
                del ready
                ready = self._settle(damaged)
            self._measure(ready)
        except _LostContextError:
            return CellDone(sticky=True)
        except cell_bench.CandidateError as reason:
            self._fail_all(reason.status, reason.reason)
        except CaptureFailedError as reason:  # of the neighbours alone
            self._fail_all("capture_failed", str(reason))
        except torch.OutOfMemoryError as reason:
            self._fail_all("oom", _line(reason))
        return CellDone(left=self._left)

    def _outcome(
        self, candidate: Candidate, status: Status, reason: str | None, unique_bytes: int = 0
    ) -> None:
        info = {"compile_s": self._compile_s[candidate]} if candidate in self._compile_s else {}
        _, compiled = self._compiled.get(candidate, (None, None))
        code = "" if compiled is None else self._benches.code(self._cell, candidate, compiled)
        moved = self._cell.problem.bytes_moved
        self._pipe.send(Outcome(candidate, status, reason, unique_bytes, moved, code, info))
        self._open.remove(candidate)

    def _fail_all(self, status: Status, reason: str) -> None:
        for candidate in list(self._open):
            self._outcome(candidate, status, reason)

    def _make_ready(self, ready: cell_bench.CellBench) -> Candidate | None:
        """Compile, capture and check every open candidate. Returns the first that computes
        something wrong: it may have written anywhere, or may suffer from what an earlier one
        wrote."""
        for candidate in list(self._open):
            if candidate in ready.graphs:
                continue
            failure = self._prepare(ready, candidate)
            if failure is None:
                continue
            status, reason = failure
            if status == "wrong" and candidate not in self._cleared:
                return candidate
            note = "; right when it was tried alone" if candidate in self._cleared else ""
            self._outcome(candidate, status, reason + note)
            if status not in ("unsupported", "compile_error"):
                _require_context()
        return None

    def _prepare(
        self, ready: cell_bench.CellBench, candidate: Candidate
    ) -> tuple[Status, str] | None:
        """Why a candidate can't be timed, or None. Raises _LostContextError, the outcome being
        told.

        No exception is returned: its frames would hold the operands.
        """
        import torch

        from kdabench.measure import cell_bench

        try:
            with span(f"compile {candidate}"):
                self._pipe.send(Began("compile", candidate))
                begin = time.perf_counter()
                if candidate not in self._compiled:
                    self._compiled[candidate] = ready.compile(candidate)
                    self._compile_s[candidate] = round(time.perf_counter() - begin, 3)
            with span(f"check {candidate}"):
                self._pipe.send(Began("check", candidate))
                ready.prepare(candidate, *self._compiled[candidate])
        except cell_bench.CandidateError as reason:
            return reason.status, reason.reason
        except torch.OutOfMemoryError as reason:
            return "oom", _line(reason)
        except RuntimeError as reason:  # torch.AcceleratorError and the driver's errors among them
            if not _context_works():
                self._outcome(candidate, "fault", _line(reason))
                raise _LostContextError from reason
            return "fault", _line(reason)
        return None

    def _settle(self, suspect: Candidate) -> cell_bench.CellBench:
        """Try a candidate that was wrong alone, on fresh operands; then start over without it, or
        with it first."""
        _require_context()
        alone = self._prepare(self._benches.fresh_after_damage(self._cell), suspect)
        if alone is not None:
            self._outcome(suspect, *alone)
            _require_context()
        else:
            self._cleared.add(suspect)
            self._open.remove(suspect)
            self._open.insert(0, suspect)
        return self._benches.fresh_after_damage(self._cell)

    def _measure(self, ready: cell_bench.CellBench) -> None:
        """The rounds, and the outcome of every candidate that was ready for them. Raises
        _LostContextError, the outcome being told."""
        entrants = sorted(ready.graphs, key=str)
        if not entrants:
            return
        contest, drifted = self._rounds(ready, entrants)
        self._left = contest.left
        for candidate in entrants:
            left = contest.left.get(candidate)
            if candidate in drifted:
                status, why = drifted[candidate]
                self._outcome(candidate, status, why)
            elif contest.unstable is not None or candidate not in contest.samples:
                why = contest.unstable or (str(left) if left else "no sample")
                self._outcome(candidate, "unstable", why, ready.unique_bytes)
            elif (floor := ready.implausible(contest.time_us(candidate))) is not None:
                self._outcome(candidate, "implausible", floor, ready.unique_bytes)
            else:
                reason = None if left is None else str(left)
                self._outcome(candidate, "ok", reason, ready.unique_bytes)

    def _rounds(
        self, ready: cell_bench.CellBench, entrants: list[Candidate]
    ) -> tuple[Contest, dict[Candidate, tuple[Status, str]]]:
        """The contest, and the candidates whose states drifted away in it."""
        import torch

        job, current = self._job, entrants[0]

        def announce(candidate: Candidate) -> None:
            nonlocal current
            current = candidate
            self._pipe.send(Began("measure", candidate))

        self._pipe.send(Began("measure"))
        clock = ready.clock(announce, job.plan.slowed)
        try:
            with span("rounds"):
                contest = run_contest(
                    entrants,
                    clock,
                    job.plan,
                    history=job.history,
                    first_round=job.first_round,
                    full_clock_mhz=self._benches.telemetry.full_clock_mhz,
                    on_round=lambda index, readings: self._pipe.send(
                        RoundDone(index, tuple(readings), clock.round_state)
                    ),
                )
            return contest, ready.drifted(list(contest.samples))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as reason:
            self._outcome(current, "fault", _line(reason))
            raise _LostContextError from reason


def _context_works() -> bool:
    """The health check: whether a trivial kernel still runs, and computes what it should."""
    import torch

    try:
        return int(torch.zeros(1, device="cuda").add_(1).item()) == 1
    except RuntimeError:
        return False


def _require_context() -> None:
    if not _context_works():
        raise _LostContextError


def _line(reason: BaseException) -> str:
    text = str(reason).strip().splitlines()
    return (text[0] if text else type(reason).__name__)[:300]


if __name__ == "__main__":
    sys.exit("kdabench.measure.worker is started by a sweep")
