"""One cell on the GPU: operands, neighbours, correctness, graphs. Runs inside a worker; sees suite and kernels.

A graph launches the step once for each of P independent copies of a layer (own state, window, records, slots,
weights), so no launch finds what another one left in the cache. In context `layer` each step stands between its real
neighbours, the projection GEMM that writes its input and the output-projection GEMM that reads its output; those two
alone are the baseline that is taken off.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kda_kernels import compare, reference, variants
from kda_kernels.gpu import Gpu
from kda_kernels.operands import CommitOperands, Operands, StepOperands, make_commit, make_step
from kdabench.graphs import CaptureFailedError, GraphClock, Timed, capture, require_kernels
from kdabench.problem import ceil_div
from kdabench.records import Candidate, Cell, Status
from kdabench.telemetry import Telemetry

HIDDEN = 7168
"""Hidden size of the model whose projections surround a step."""
_MIN_COPIES = 8
_MIN_REPLAY_US = 250.0
_COLD_FACTOR = 3
_MEMORY_FRACTION = 0.85


class CandidateError(Exception):
    """A candidate that gets a status instead of a time."""

    def __init__(self, status: Status, reason: str) -> None:
        super().__init__(reason)
        self.status: Status = status
        self.reason = reason


@dataclass(frozen=True)
class Device:
    """The CUDA device under test."""

    index: int
    gpu: Gpu
    name: str
    uuid: str
    l2_bytes: int
    peak_bytes_per_us: float | None

    @classmethod
    def current(cls) -> Device:
        from kda_kernels.gpu import current_gpu

        index = torch.cuda.current_device()
        p = torch.cuda.get_device_properties(index)
        clock_khz, bus_bits = getattr(p, "memory_clock_rate", 0), getattr(p, "memory_bus_width", 0)
        # Double data rate: two transfers a clock.
        peak = 2 * clock_khz * 1e3 * bus_bits / 8 / 1e6 if clock_khz and bus_bits else None
        return cls(index, current_gpu(), p.name, str(p.uuid), p.L2_cache_size, peak)


@dataclass
class Neighbours:
    """The projections before and after the steps: weights of several layers, rotating. hidden [B, 7168]."""

    hidden: Tensor
    into: Tensor  # [copies, pitch, 7168]
    out_of: Tensor  # [copies, 7168, D]
    result: Tensor  # [B, 7168]

    def before(self, i: int, step: StepOperands) -> None:
        torch.mm(self.hidden, self.into[i % len(self.into)].t(), out=step.projected)

    def after(self, i: int, step: StepOperands) -> None:
        torch.mm(step.out, self.out_of[i % len(self.out_of)].t(), out=self.result)


class WeightCache:
    """Projection weights by head count, kept while consecutive cells share it."""

    def __init__(self) -> None:
        self._key: tuple[int, int] | None = None
        self._weights: tuple[Tensor, Tensor] | None = None

    def get(self, pitch: int, channels: int) -> tuple[Tensor, Tensor]:
        if self._key != (pitch, channels) or self._weights is None:
            self._weights = None
            g = torch.Generator("cuda").manual_seed(7)
            std = HIDDEN**-0.5

            def draw(*shape: int) -> Tensor:
                return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(0, std, generator=g)

            self._key = (pitch, channels)
            self._weights = draw(_MIN_COPIES, pitch, HIDDEN), draw(_MIN_COPIES, HIDDEN, channels)
        return self._weights


def copies_for(cell: Cell, l2_bytes: int) -> int:
    """Layer copies: at least 8 layers, long enough a replay for the clock's resolution, and cold if the cell asks."""
    problem = cell.problem
    guess_us = 1.3 * problem.floor_us() + 2
    copies = max(ceil_div(_MIN_COPIES, problem.layers), math.ceil(_MIN_REPLAY_US / guess_us))
    if cell.l2 == "warm":
        return copies
    per_copy = problem.bytes_moved
    if cell.context == "layer":
        # The neighbours' weights alone are several times the cache; they evict each step's operands.
        copies = min(copies, 40)
        unique = copies * per_copy + _MIN_COPIES * HIDDEN * 2 * (problem.pitch + problem.channels)
        return copies if unique >= _COLD_FACTOR * l2_bytes else copies + ceil_div(_COLD_FACTOR * l2_bytes, per_copy)
    return max(copies, ceil_div(_COLD_FACTOR * l2_bytes, per_copy))


@dataclass
class CellBench:
    """A cell made ready on the current device. Raises CandidateError('oom', ...) if it doesn't fit in memory."""

    cell: Cell
    device: Device
    weights: WeightCache
    telemetry: Telemetry
    copies: list[Operands] = field(init=False)
    neighbours: Neighbours | None = field(init=False, default=None)
    unique_bytes: int = field(init=False)
    stream: torch.cuda.Stream = field(init=False)
    graphs: dict[Candidate, Timed] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        problem = self.cell.problem
        count = copies_for(self.cell, self.device.l2_bytes)
        distinct = 1 if self.cell.l2 == "warm" else count
        self._require_memory(distinct)
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        seeds = range(1000, 1000 + distinct)
        if problem.folds_only:
            self.copies = [make_commit(problem, seed=s, inputs=self.cell.inputs) for s in seeds]
        else:
            self.copies = [make_step(problem, seed=s, inputs=self.cell.inputs) for s in seeds]
        self.launches = count
        self.unique_bytes = distinct * problem.bytes_moved
        if self.cell.context == "layer" and not problem.folds_only:
            self._add_neighbours()
        # Where checked launches start from: the parts of the first copy that a launch changes.
        self._pristine = [t.clone() for t in _mutated(self.copies[0])]
        self._expected: Any = None

    def _require_memory(self, distinct: int) -> None:
        problem = self.cell.problem
        pages = problem.requests * (2 if problem.kind == "commit" else problem.tokens if problem.kind == "spec" else 1)
        state = pages * problem.heads * problem.page_bytes * problem.layers
        records = problem.items * problem.tokens * 1024 * problem.layers
        per_copy = state + records + problem.rows * problem.pitch * 2
        # Beside the copies: the first one's pristine clone, and float64 temporaries of the reference.
        wide = 8 // problem.state_item_bytes
        need = per_copy * distinct + state // problem.layers * (1 + 3 * wide)
        free = torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        if need > _MEMORY_FRACTION * free:
            raise CandidateError("oom", f"{distinct} copies need {need / 1e9:.1f} GB, {free / 1e9:.1f} GB are free")

    def _add_neighbours(self) -> None:
        problem = self.cell.problem
        into, out_of = self.weights.get(problem.pitch, problem.channels)
        g = torch.Generator("cuda").manual_seed(11)
        hidden = torch.empty(problem.rows, HIDDEN, dtype=torch.bfloat16, device="cuda").normal_(0, 1, generator=g)
        self.neighbours = Neighbours(hidden, into, out_of, torch.empty_like(hidden))
        self.unique_bytes += (into.numel() + out_of.numel()) * 2

    def _layers(self) -> Sequence[tuple[int, Operands]]:
        return [(i, self.copies[i % len(self.copies)]) for i in range(self.launches)]

    def baseline(self) -> Timed | None:
        """The neighbours alone, captured; None outside context `layer`."""
        neighbours = self.neighbours
        if neighbours is None:
            return None

        def enqueue(stream: int) -> None:
            for i, step in self._layers():
                assert isinstance(step, StepOperands)
                neighbours.before(i, step)
                neighbours.after(i, step)

        with torch.cuda.stream(self.stream):
            enqueue(self.stream.cuda_stream)
        return Timed(capture(enqueue, self.stream), self.launches)

    def clock(self) -> GraphClock:
        return GraphClock(self.graphs, self.baseline(), self.telemetry, self.stream)

    def compile(self, candidate: Candidate) -> tuple[ModuleType, Any]:
        """The candidate's module and compiled kernel. Raises CandidateError: unsupported or compile_error."""
        module = variants.load(candidate.variant)
        try:
            spec = variants.make_spec(candidate.variant, candidate.spec)
        except ValueError as reason:
            raise CandidateError("unsupported", str(reason)) from reason
        why = module.unsupported(self.cell.problem, spec, self.device.gpu)
        if why is None and self.cell.context == "isolated" and candidate.spec.get("pdl"):
            why = "pdl=true: context isolated has no PDL edges"
        if why is not None:
            raise CandidateError("unsupported", why)
        try:
            return module, module.compile(self.cell.problem, spec, self.device.gpu)
        except Exception as reason:
            # Whatever the compilers raise belongs to this candidate alone.
            raise CandidateError("compile_error", _first_line(reason)) from reason

    def prepare(self, candidate: Candidate, module: ModuleType, compiled: Any) -> None:
        """Capture the candidate's graph and check it through one replay.

        Raises CandidateError: capture_failed or wrong.
        """

        def enqueue(stream: int) -> None:
            for i, operands in self._layers():
                if self.neighbours is not None:
                    assert isinstance(operands, StepOperands)
                    self.neighbours.before(i, operands)
                module.launch(compiled, operands, stream)
                if self.neighbours is not None:
                    assert isinstance(operands, StepOperands)
                    self.neighbours.after(i, operands)

        # Modules load, libraries pick their kernels and scratch memory is made before the capture.
        with torch.cuda.stream(self.stream):
            module.launch(compiled, self.copies[0], self.stream.cuda_stream)
            if self.neighbours is not None:
                assert isinstance(self.copies[0], StepOperands)
                self.neighbours.before(0, self.copies[0])
        torch.cuda.synchronize()
        try:
            graph = capture(enqueue, self.stream)
            require_kernels(graph, module.KERNELS, self.launches)
        except CaptureFailedError as reason:
            raise CandidateError("capture_failed", str(reason)) from reason
        self._check(graph)
        self.graphs[candidate] = Timed(graph, self.launches, compiled)

    def _check(self, graph: torch.cuda.CUDAGraph) -> None:
        if len(self.copies) < self.launches:
            return  # warm: the same copy is stepped several times in a replay; verified cold
        first = self.copies[0]
        for tensor, kept in zip(_mutated(first), self._pristine, strict=True):
            tensor.copy_(kept)
        if self._expected is None:
            if self.neighbours is not None:
                assert isinstance(first, StepOperands)
                self.neighbours.before(0, first)
            self._expected = _expect(self.cell, first)
        compare.poison(first)
        torch.cuda.synchronize()
        with torch.cuda.stream(self.stream):
            graph.replay()
        torch.cuda.synchronize()
        why = _verdict(self.cell, first, self._expected)
        if why is not None:
            raise CandidateError("wrong", why)

    def require_plausible(self, time_us: float) -> None:
        """Raise CandidateError('implausible', ...) for a time below what the memory's peak rate allows."""
        peak = self.device.peak_bytes_per_us
        if peak is not None and self.cell.l2 == "cold" and time_us < self.cell.problem.bytes_moved / peak:
            floor = self.cell.problem.bytes_moved / peak
            raise CandidateError("implausible", f"{time_us:.3f} us is below {floor:.3f} us, the bytes at peak rate")


def _mutated(operands: Operands) -> list[Tensor]:
    """The tensors that a launch updates from their own contents or beside live data."""
    if isinstance(operands, CommitOperands):
        return [operands.states[layer] for layer in _checked_layers(operands)]
    return [operands.state, operands.conv_state]


def _checked_layers(operands: CommitOperands) -> list[int]:
    return sorted({0, len(operands.states) - 1})


def _expect(cell: Cell, operands: Operands) -> Any:
    if isinstance(operands, CommitOperands):
        return [reference.commit(operands, layer) for layer in _checked_layers(operands)]
    return reference.step(cell.problem, operands)


def _verdict(cell: Cell, operands: Operands, expected: Any) -> str | None:
    if isinstance(operands, CommitOperands):
        for layer, want in zip(_checked_layers(operands), expected, strict=True):
            why = compare.check_commit(operands, want, layer)
            if why is not None:
                return f"layer {layer}: {why}"
        return None
    return compare.check_step(cell.problem, operands, expected)


def _first_line(reason: BaseException) -> str:
    text = str(reason).strip().splitlines()
    return f"{type(reason).__name__}: {text[0] if text else ''}"[:300]
