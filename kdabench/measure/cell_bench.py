"""One cell on the GPU: operands, neighbours, correctness, graphs. Runs inside a worker; sees suite
and kernels.

A graph launches the step once for each of P independent copies of a layer (own state, window,
records, slots, weights), so no launch finds what another one left in the cache. In context `layer`
each step stands between its real neighbours, the projection GEMM that writes its input and the
output-projection GEMM that reads its output; those two alone are the baseline that is taken off.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kda_kernels import variants
from kda_kernels.check import compare, reference
from kda_kernels.device.gpu import Gpu, current_gpu
from kda_kernels.operands import CommitOperands, Operands, StepOperands, make_commit, make_step
from kda_kernels.problem import Problem, ceil_div
from kdabench.data.measurements import COLD_FACTOR, Candidate, Cell, Status, l2_state
from kdabench.measure.clock import MIN_COPIES, rotation
from kdabench.measure.cuda_graphs import (
    CaptureFailedError,
    GraphClock,
    Timed,
    WrongKernelError,
    capture,
    require_kernels,
)
from kdabench.measure.inspection import (
    bit_sum,
    checked_layers,
    constant,
    degenerate,
    improper_inputs,
    mutated,
)
from kdabench.measure.telemetry import Telemetry

HIDDEN = 7168
"""Hidden size of the model whose projections surround a step."""
_PROJECTION_BYTES = 96 << 20
"""Above this much weight a projection has washed every L2: more would only add noise to the
difference."""
_MEMORY_BOUND_ROWS = 200
"""Up to so many rows an H200 reads a projection's weights for longer than it computes."""
_LEAST_HIDDEN = 512
_MIN_GRAPH_US = 250.0
_MEMORY_FRACTION = 0.85
_DRIFT_REPLAYS = 50
Variants = Mapping[str, ModuleType]
"""Further variants by name, beside those of the kernels' package: faulty ones, planted by tests and
benchmarks."""


class CandidateError(Exception):
    """A candidate that gets a status instead of a time."""

    def __init__(self, status: Status, reason: str) -> None:
        super().__init__(reason)
        self.status: Status = status
        self.reason = reason


@dataclass(frozen=True)
class Device:
    """The CUDA device under test. peak_bytes_per_us: of its memory; None where neither torch nor
    NVML says."""

    index: int
    gpu: Gpu
    name: str
    uuid: str
    pci_id: str | None
    l2_bytes: int
    peak_bytes_per_us: float | None

    @classmethod
    def current(cls) -> Device:
        index = torch.cuda.current_device()
        p = torch.cuda.get_device_properties(index)
        clock_khz, bus_bits = getattr(p, "memory_clock_rate", 0), getattr(p, "memory_bus_width", 0)
        # Double data rate: two transfers a clock.
        peak = 2 * clock_khz * 1e3 * bus_bits / 8 / 1e6 if clock_khz and bus_bits else None
        place = [
            int(n)
            for part in ("domain", "bus", "device")
            if (n := getattr(p, f"pci_{part}_id", None)) is not None
        ]
        pci_id = "{:08x}:{:02x}:{:02x}.0".format(*place) if len(place) == 3 else None
        return cls(index, current_gpu(), p.name, str(p.uuid), pci_id, p.L2_cache_size, peak)

    def knowing(self, telemetry: Telemetry) -> Device:
        """The same with NVML's peak rate of the memory where torch doesn't say it."""
        return replace(
            self, peak_bytes_per_us=self.peak_bytes_per_us or telemetry.peak_bytes_per_us()
        )


@dataclass
class Neighbours:
    """The projections before and after the steps: weights of several layers, rotating. hidden [B,
    C]."""

    hidden: Tensor
    into: Tensor  # [copies, pitch, C]
    out_of: Tensor  # [copies, C, D]
    result: Tensor  # [B, C]

    def before(self, i: int, step: StepOperands) -> None:
        torch.mm(self.hidden, self.into[i % len(self.into)].t(), out=step.projected)

    def after(self, i: int, step: StepOperands) -> None:
        torch.mm(step.out, self.out_of[i % len(self.out_of)].t(), out=self.result)


class WeightCache:
    """Projection weights by their shape, kept while consecutive cells share it."""

    def __init__(self) -> None:
        self._key: tuple[int, int, int] | None = None
        self._weights: tuple[Tensor, Tensor] | None = None

    def clear(self) -> None:
        """Forget them: a faulty kernel may have written there."""
        self._key = self._weights = None

    def get(self, problem: Problem) -> tuple[Tensor, Tensor]:
        pitch, channels, hidden = key = problem.pitch, problem.channels, hidden_size(problem)
        if self._key != key or self._weights is None:
            self._weights = None
            g = torch.Generator("cuda").manual_seed(7)
            std = hidden**-0.5

            def draw(*shape: int) -> Tensor:
                return torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_(
                    0, std, generator=g
                )

            self._key = key
            self._weights = draw(MIN_COPIES, pitch, hidden), draw(MIN_COPIES, hidden, channels)
        return self._weights


def hidden_size(problem: Problem) -> int:
    """Of a step's neighbours: the model's, or as much as keeps their time to that of reading 96 MiB
    of weights.

    At 12 heads the two GEMMs so take some 25 us. At full size it would be 200 with 96 heads, or 400
    with 2048 rows, at clocks that fall under a GEMM's power: a step of 7 or 80 us is not to be
    found in the difference of two such times.
    """
    most = (
        _PROJECTION_BYTES
        // (2 * problem.pitch)
        * _MEMORY_BOUND_ROWS
        // max(problem.rows, _MEMORY_BOUND_ROWS)
    )
    return min(HIDDEN, max(_LEAST_HIDDEN, most // 64 * 64))


def copies_for(cell: Cell, l2_bytes: int) -> int:
    """Layer copies: at least 8 layers, long enough a graph for the clock's resolution, and cold if
    the cell asks."""
    problem = cell.problem
    guess_us = 1.3 * problem.floor_us() + 2
    copies = max(ceil_div(MIN_COPIES, problem.layers), math.ceil(_MIN_GRAPH_US / guess_us))
    if cell.l2 == "warm":
        return copies
    per_copy = problem.bytes_moved
    if cell.context == "layer":
        # The neighbours' weights alone are several times the cache; they evict each step's
        # operands.
        copies = min(copies, 40)
        cold = l2_state(unique_bytes(cell, copies), l2_bytes) == "cold"
        return copies if cold else copies + ceil_div(COLD_FACTOR * l2_bytes, per_copy)
    return max(copies, ceil_div(COLD_FACTOR * l2_bytes, per_copy))


def unique_bytes(cell: Cell, distinct: int) -> int:
    """Bytes that one graph replay over `distinct` copies touches, each counted once."""
    problem = cell.problem
    between = MIN_COPIES * hidden_size(problem) * 2 * (problem.pitch + problem.channels)
    surrounded = cell.context == "layer" and not problem.folds_only
    return distinct * problem.bytes_moved + (between if surrounded else 0)


def below_floor(cell: Cell, time_us: float, peak_bytes_per_us: float | None) -> str | None:
    """Why a cold time is impossible for a memory of this peak rate (None: unknown), or None."""
    if peak_bytes_per_us is None or cell.l2 != "cold":
        return None
    floor_us = cell.problem.bytes_moved / peak_bytes_per_us
    return (
        None
        if time_us >= floor_us
        else f"{time_us:.3f} us is below {floor_us:.3f} us, the bytes at peak rate"
    )


@dataclass
class CellBench:
    """A cell made ready on the current device, as `make_ready` gives it.

    extra     variants beside those of the kernels' package
    copies    of a layer; all that are launched, or one where the cell is warm
    launches  in a graph
    pristine  what a checked launch starts from: clones of those parts of the first copy that a
              launch changes
    graphs    of the candidates that are captured and checked
    """

    cell: Cell
    device: Device
    telemetry: Telemetry
    extra: Variants
    copies: Sequence[Operands]
    launches: int
    unique_bytes: int
    stream: torch.cuda.Stream
    pristine: Sequence[Tensor]
    graphs: dict[Candidate, Timed] = field(default_factory=dict)
    expected: Any = None

    def before(self, i: int) -> None:
        """Enqueue what stands before launch i."""

    def after(self, i: int) -> None:
        """Enqueue what stands after launch i."""

    def beside(self) -> list[Tensor]:
        """Give what is only read by what stands around the launches."""
        return []

    def baseline(self) -> Timed | None:
        """Capture what stands around the launches alone; None if nothing does."""
        return None

    def expect(self) -> Any:
        """Compute what a launch on the first copy must give."""
        raise NotImplementedError

    def verdict(self) -> str | None:
        """Compare the first copy with what was expected: what is wrong, or None."""
        raise NotImplementedError

    def clock(self, announce: Callable[[Candidate], None], slowed: float) -> GraphClock:
        """Announces each candidate before its graph replay; rests after throttled rounds below `slowed`
        of the full clock."""
        slowed_mhz = slowed * (self.telemetry.full_clock_mhz or 0)
        return GraphClock(
            self.graphs, self.baseline(), self.telemetry, self.stream, announce, slowed_mhz
        )

    def compile(self, candidate: Candidate) -> tuple[ModuleType, Any]:
        """The candidate's module and compiled kernel. Raises CandidateError: unsupported or
        compile_error."""
        planted = self.extra.get(candidate.variant)
        module = planted or variants.load(candidate.variant)
        try:
            known = variants.make_options
            options = (
                planted.Options(**candidate.options)
                if planted
                else known(candidate.variant, candidate.options)
            )
        except (TypeError, ValueError) as reason:
            raise CandidateError("unsupported", str(reason)) from reason
        why = module.unsupported(self.cell.problem, options, self.device.gpu)
        if why is None and self.cell.context == "isolated" and candidate.options.get("pdl"):
            why = "pdl=true: context isolated has no PDL edges"
        if why is not None:
            raise CandidateError("unsupported", why)
        try:
            return module, module.compile(self.cell.problem, options, self.device.gpu)
        except Exception as reason:
            # Whatever the compilers raise belongs to this candidate alone.
            raise CandidateError("compile_error", _first_line(reason)) from reason

    def prepare(self, candidate: Candidate, module: ModuleType, compiled: Any) -> None:
        """Capture the candidate's graph and check it through one replay.

        Raises CandidateError: capture_failed or wrong.
        """

        def step(operands: Operands, stream: int) -> None:
            module.launch(compiled, operands, stream)

        launches: list[Callable[[int], None]] = [partial(step, self.copies[0])] * self.launches
        if self.cell.l2 == "cold":
            launches = rotation(step, self.copies, self.launches, self.cell.problem.layers)

        # Modules load, libraries pick their kernels and scratch memory is made before the capture.
        with torch.cuda.stream(self.stream):
            launches[0](self.stream.cuda_stream)
            self.before(0)
        torch.cuda.synchronize()
        graph = self._captured(launches, module.KERNELS)
        # What a warm graph replay does to its one copy was checked nowhere; its first launch is.
        checked = graph if self.cell.l2 == "cold" else self._captured(launches[:1], module.KERNELS)
        self._check(checked)
        self.graphs[candidate] = Timed(graph, self.launches, compiled)

    def _captured(
        self, launches: Sequence[Callable[[int], None]], kernels: tuple[str, ...]
    ) -> torch.cuda.CUDAGraph:
        def enqueue(stream: int) -> None:
            for i, launch in enumerate(launches):
                self.before(i)
                launch(stream)
                self.after(i)

        try:
            graph = capture(enqueue, self.stream)
            require_kernels(graph, kernels, len(launches))
        except CaptureFailedError as reason:
            raise CandidateError("capture_failed", str(reason)) from reason
        except WrongKernelError as reason:
            raise CandidateError("wrong", str(reason)) from reason
        return graph

    def _restore(self) -> None:
        for tensor, kept in zip(mutated(self.copies[0]), self.pristine, strict=True):
            tensor.copy_(kept)

    def _check(self, graph: torch.cuda.CUDAGraph) -> None:
        self._restore()
        if self.expected is None:
            self.before(0)
            self.expected = self.expect()
        compare.poison(self.copies[0])
        before = self._sums()
        torch.cuda.synchronize()
        with torch.cuda.stream(self.stream):
            graph.replay()
        torch.cuda.synchronize()
        why = self.verdict()
        if why is None and not torch.equal(before, self._sums()):
            why = "changed operands that a step only reads"
        if why is not None:
            raise CandidateError("wrong", why)

    def _sums(self) -> Tensor:
        """Sums over the bits of what no launch may write, of some copies and of the neighbours'
        weights."""
        some = [
            self.copies[i] for i in sorted({0, min(1, len(self.copies) - 1), len(self.copies) - 1})
        ]
        tensors = [t for operands in some for t in constant(operands)]
        return torch.stack([bit_sum(t) for t in [*tensors, *self.beside()]])

    def drifted(self, candidates: Sequence[Candidate]) -> dict[Candidate, tuple[Status, str]]:
        """Candidates after whose many graph replays a state is no number any more, with status and
        reason.

        Each is tried alone from the initial state; if none is found guilty, none of the times can
        be trusted.
        """
        ends = (self.copies[0], self.copies[-1])
        why = next((text for operands in ends if (text := degenerate(operands)) is not None), None)
        if why is None:
            return {}
        found: dict[Candidate, tuple[Status, str]] = {}
        for candidate in candidates:
            self._restore()
            with torch.cuda.stream(self.stream):
                for _ in range(_DRIFT_REPLAYS):
                    self.graphs[candidate].graph.replay()
            torch.cuda.synchronize()
            alone = degenerate(self.copies[0])
            if alone is not None:
                found[candidate] = "wrong", f"after {_DRIFT_REPLAYS} graph replays: {alone}"
        return found or dict.fromkeys(candidates, ("unstable", f"after timing: {why}"))

    def implausible(self, time_us: float) -> str | None:
        """Why a time can't be, being below what the memory's peak rate allows; None if it can."""
        return below_floor(self.cell, time_us, self.device.peak_bytes_per_us)


@dataclass
class CommitBench(CellBench):
    """A cell of commits or flushes: nothing stands around a launch."""

    copies: Sequence[CommitOperands]

    def expect(self) -> list[Any]:
        first = self.copies[0]
        return [reference.commit(first, layer) for layer in checked_layers(first)]

    def verdict(self) -> str | None:
        first = self.copies[0]
        for layer, want in zip(checked_layers(first), self.expected, strict=True):
            why = compare.check_commit(first, want, layer)
            if why is not None:
                return f"layer {layer}: {why}"
        return None


@dataclass
class StepBench(CellBench):
    """A cell of steps; neighbours: None outside context `layer`."""

    copies: Sequence[StepOperands]
    neighbours: Neighbours | None = None

    def before(self, i: int) -> None:
        if self.neighbours is not None:
            self.neighbours.before(i, self.copies[i % len(self.copies)])

    def after(self, i: int) -> None:
        if self.neighbours is not None:
            self.neighbours.after(i, self.copies[i % len(self.copies)])

    def beside(self) -> list[Tensor]:
        around = self.neighbours
        return [] if around is None else [around.into, around.out_of, around.hidden]

    def baseline(self) -> Timed | None:
        if self.neighbours is None:
            return None

        def enqueue(stream: int) -> None:
            for i in range(self.launches):
                self.before(i)
                self.after(i)

        with torch.cuda.stream(self.stream):
            enqueue(self.stream.cuda_stream)
        return Timed(capture(enqueue, self.stream), self.launches)

    def expect(self) -> Any:
        return reference.step(self.cell.problem, self.copies[0])

    def verdict(self) -> str | None:
        return compare.check_step(self.cell.problem, self.copies[0], self.expected)


def make_ready(
    cell: Cell,
    device: Device,
    weights: WeightCache,
    telemetry: Telemetry,
    extra: Variants | None = None,
) -> CellBench:
    """Make the operands of a cell, from the same seeds each time, and what stands around them.

    extra  variants beside those of the kernels' package

    Raises CandidateError: oom if it doesn't fit in memory, unstable if its inputs are not what they
    claim to be.
    """
    problem, launches = cell.problem, copies_for(cell, device.l2_bytes)
    distinct = 1 if cell.l2 == "warm" else launches
    _require_memory(problem, distinct)
    common: dict[str, Any] = {
        "cell": cell,
        "device": device,
        "telemetry": telemetry,
        "extra": extra or {},
        "launches": launches,
        "unique_bytes": unique_bytes(cell, distinct),
        "stream": torch.cuda.Stream(),  # type: ignore[no-untyped-call]
    }
    if cell.l2 == "cold":
        assert l2_state(common["unique_bytes"], device.l2_bytes) == "cold"
    seeds = range(1000, 1000 + distinct)
    if problem.folds_only:
        commits = [make_commit(problem, seed=s, inputs=cell.inputs) for s in seeds]
        return CommitBench(copies=commits, pristine=_pristine(commits[0]), **common)
    steps = [make_step(problem, seed=s, inputs=cell.inputs) for s in seeds]
    pristine = _pristine(steps[0])
    neighbours = _neighbours(problem, weights) if cell.context == "layer" else None
    return StepBench(copies=steps, pristine=pristine, neighbours=neighbours, **common)


def _pristine(first: Operands) -> list[Tensor]:
    """Clones of what a launch on the first copy changes. Raises CandidateError if its inputs are
    improper."""
    why = improper_inputs(first)
    if why is not None:
        raise CandidateError("unstable", f"inputs: {why}")
    return [t.clone() for t in mutated(first)]


def _require_memory(problem: Problem, distinct: int) -> None:
    """Raise CandidateError, oom, if so many distinct copies don't fit."""
    pages = problem.requests * (
        2 if problem.kind == "commit" else problem.tokens if problem.kind == "spec" else 1
    )
    state = pages * problem.heads * problem.page_bytes * problem.layers
    measurements = problem.items * problem.tokens * 1024 * problem.layers
    per_copy = state + measurements + problem.rows * problem.pitch * 2
    # Beside the copies: the first one's pristine clone, and float64 temporaries of the reference.
    wide = 8 // problem.state_item_bytes
    need = per_copy * distinct + state // problem.layers * (1 + 3 * wide)
    free = (
        torch.cuda.mem_get_info()[0] + torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    )
    if need > _MEMORY_FRACTION * free:
        raise CandidateError(
            "oom", f"{distinct} copies need {need / 1e9:.1f} GB, {free / 1e9:.1f} GB are free"
        )


def _neighbours(problem: Problem, weights: WeightCache) -> Neighbours:
    into, out_of = weights.get(problem)
    g = torch.Generator("cuda").manual_seed(11)
    hidden = torch.empty(problem.rows, into.shape[2], dtype=torch.bfloat16, device="cuda").normal_(
        0, 1, generator=g
    )
    return Neighbours(hidden, into, out_of, torch.empty_like(hidden))


def _first_line(reason: BaseException) -> str:
    text = str(reason).strip().splitlines()
    return f"{type(reason).__name__}: {text[0] if text else ''}"[:300]
