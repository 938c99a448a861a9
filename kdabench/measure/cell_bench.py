"""One cell on the GPU: operands, neighbours, correctness, graphs. Runs inside a worker; sees suite
and kernels.

A graph launches the step once for each of P independent copies of a layer (own state, window,
records, slots, weights), so no launch finds what another one left in the cache. In context `layer`
each step stands between its real neighbours, the projection GEMM that writes its input and the
output-projection GEMM that reads its output; those two alone are the baseline that is taken off.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kda_kernels import variants
from kda_kernels.check import compare, reference
from kda_kernels.device.gpu import Gpu
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
from kdabench.measure.telemetry import Telemetry

HIDDEN = 7168
"""Hidden size of the model whose projections surround a step."""
_PROJECTION_BYTES = 96 << 20
"""Above this much weight a projection has washed every L2: more would only add noise to the
difference."""
_MEMORY_BOUND_ROWS = 200
"""Up to so many rows an H200 reads a projection's weights for longer than it computes."""
_LEAST_HIDDEN = 512
_MIN_REPLAY_US = 250.0
_FASTEST_BYTES_PER_US = 8e6
"""Of any memory today (HBM3e, eight stacks): where a device doesn't say how fast its own is."""
_MEMORY_FRACTION = 0.85
_DRIFT_REPLAYS = 50
_DENORMAL_PART = 0.01
_SAMPLED_ELEMENTS = 1 << 24
_RANDOM_FROM = 8
"""Slots from which on a sorted order can't be chance."""
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
        from kda_kernels.device.gpu import current_gpu

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


def copies_for(cell: Cell, l2_bytes: int, peak_bytes_per_us: float | None) -> int:
    """Layer copies: at least 8 layers, long enough a replay for the clock's resolution, and cold if
    the cell asks.

    peak_bytes_per_us  of the device's memory; None where it isn't known
    """
    problem = cell.problem
    # A good kernel moves two thirds of the peak rate, and takes 3 us if there is little to move.
    guess_us = 1.5 * problem.bytes_moved / (peak_bytes_per_us or _FASTEST_BYTES_PER_US) + 3
    copies = max(ceil_div(MIN_COPIES, problem.layers), math.ceil(_MIN_REPLAY_US / guess_us))
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
    """Bytes that one replay over `distinct` copies touches, each counted once."""
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
    """A cell made ready on the current device.

    extra  variants beside those of the kernels' package

    Raises CandidateError: oom if it doesn't fit in memory, unstable if its inputs are not what they
    claim to be.
    """

    cell: Cell
    device: Device
    weights: WeightCache
    telemetry: Telemetry
    extra: Variants = field(default_factory=dict)
    copies: list[Operands] = field(init=False)
    neighbours: Neighbours | None = field(init=False, default=None)
    unique_bytes: int = field(init=False)
    stream: torch.cuda.Stream = field(init=False)
    graphs: dict[Candidate, Timed] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        problem = self.cell.problem
        count = copies_for(self.cell, self.device.l2_bytes, self.device.peak_bytes_per_us)
        distinct = 1 if self.cell.l2 == "warm" else count
        self._require_memory(distinct)
        self.stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        seeds = range(1000, 1000 + distinct)
        if problem.folds_only:
            self.copies = [make_commit(problem, seed=s, inputs=self.cell.inputs) for s in seeds]
        else:
            self.copies = [make_step(problem, seed=s, inputs=self.cell.inputs) for s in seeds]
        self.launches = count
        why = improper_inputs(self.copies[0])
        if why is not None:
            raise CandidateError("unstable", f"inputs: {why}")
        self.unique_bytes = unique_bytes(self.cell, distinct)
        if self.cell.l2 == "cold":
            assert l2_state(self.unique_bytes, self.device.l2_bytes) == "cold"
        if self.cell.context == "layer" and not problem.folds_only:
            self._add_neighbours()
        # Where checked launches start from: the parts of the first copy that a launch changes.
        self._pristine = [t.clone() for t in _mutated(self.copies[0])]
        self._expected: Any = None

    def _require_memory(self, distinct: int) -> None:
        problem = self.cell.problem
        pages = problem.requests * (
            2 if problem.kind == "commit" else problem.tokens if problem.kind == "spec" else 1
        )
        state = pages * problem.heads * problem.page_bytes * problem.layers
        measurements = problem.items * problem.tokens * 1024 * problem.layers
        per_copy = state + measurements + problem.rows * problem.pitch * 2
        # Beside the copies: the first one's pristine clone, and float64 temporaries of the
        # reference.
        wide = 8 // problem.state_item_bytes
        need = per_copy * distinct + state // problem.layers * (1 + 3 * wide)
        free = (
            torch.cuda.mem_get_info()[0]
            + torch.cuda.memory_reserved()
            - torch.cuda.memory_allocated()
        )
        if need > _MEMORY_FRACTION * free:
            raise CandidateError(
                "oom", f"{distinct} copies need {need / 1e9:.1f} GB, {free / 1e9:.1f} GB are free"
            )

    def _add_neighbours(self) -> None:
        problem = self.cell.problem
        into, out_of = self.weights.get(problem)
        g = torch.Generator("cuda").manual_seed(11)
        hidden = torch.empty(
            problem.rows, into.shape[2], dtype=torch.bfloat16, device="cuda"
        ).normal_(0, 1, generator=g)
        self.neighbours = Neighbours(hidden, into, out_of, torch.empty_like(hidden))

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

    def clock(self, announce: Callable[[Candidate], None], slowed: float) -> GraphClock:
        """Announces each candidate before its replay; rests after throttled rounds below `slowed`
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
            if self.neighbours is not None:
                assert isinstance(self.copies[0], StepOperands)
                self.neighbours.before(0, self.copies[0])
        torch.cuda.synchronize()
        graph = self._captured(launches, module.KERNELS)
        # What a warm replay does to its one copy was checked nowhere; its first launch is.
        checked = graph if self.cell.l2 == "cold" else self._captured(launches[:1], module.KERNELS)
        self._check(checked)
        self.graphs[candidate] = Timed(graph, self.launches, compiled)

    def _captured(
        self, launches: Sequence[Callable[[int], None]], kernels: tuple[str, ...]
    ) -> torch.cuda.CUDAGraph:
        def enqueue(stream: int) -> None:
            for i, launch in enumerate(launches):
                operands = self.copies[i % len(self.copies)]
                if self.neighbours is not None:
                    assert isinstance(operands, StepOperands)
                    self.neighbours.before(i, operands)
                launch(stream)
                if self.neighbours is not None:
                    assert isinstance(operands, StepOperands)
                    self.neighbours.after(i, operands)

        try:
            graph = capture(enqueue, self.stream)
            require_kernels(graph, kernels, len(launches))
        except CaptureFailedError as reason:
            raise CandidateError("capture_failed", str(reason)) from reason
        except WrongKernelError as reason:
            raise CandidateError("wrong", str(reason)) from reason
        return graph

    def _restore(self) -> None:
        for tensor, kept in zip(_mutated(self.copies[0]), self._pristine, strict=True):
            tensor.copy_(kept)

    def _check(self, graph: torch.cuda.CUDAGraph) -> None:
        first = self.copies[0]
        self._restore()
        if self._expected is None:
            if self.neighbours is not None:
                assert isinstance(first, StepOperands)
                self.neighbours.before(0, first)
            self._expected = _expect(self.cell, first)
        compare.poison(first)
        before = self._sums()
        torch.cuda.synchronize()
        with torch.cuda.stream(self.stream):
            graph.replay()
        torch.cuda.synchronize()
        why = _verdict(self.cell, first, self._expected)
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
        tensors = [t for operands in some for t in _constant(operands)]
        if self.neighbours is not None:
            tensors += [self.neighbours.into, self.neighbours.out_of, self.neighbours.hidden]
        return torch.stack([bit_sum(t) for t in tensors])

    def drifted(self, candidates: Sequence[Candidate]) -> dict[Candidate, tuple[Status, str]]:
        """Candidates after whose many replays a state is no number any more, with status and
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
                found[candidate] = "wrong", f"after {_DRIFT_REPLAYS} replays: {alone}"
        return found or dict.fromkeys(candidates, ("unstable", f"after timing: {why}"))

    def implausible(self, time_us: float) -> str | None:
        """Why a time can't be, being below what the memory's peak rate allows; None if it can."""
        return below_floor(self.cell, time_us, self.device.peak_bytes_per_us)


def improper_inputs(operands: Operands) -> str | None:
    """Why operands must not be timed: slots that aren't distinct, in range, live and in random
    order; inputs that aren't numbers or are all alike. None if they may."""
    if isinstance(operands, CommitOperands):
        order, pages = operands.source, operands.states[0].shape[0]
        in_place = torch.equal(operands.source, operands.destination)
        slots = order if in_place else torch.cat([operands.source, operands.destination])
        values = [operands.corrections[0], operands.A_log]
    else:
        order = slots = operands.slots.flatten()
        pages = operands.state.shape[0]
        values = [operands.projected, operands.conv_state, operands.state, operands.dt_bias]
    if (slots.sort().values.diff() == 0).any():
        return "slots: not distinct"
    if slots.min() < 1 or slots.max() >= pages:
        return f"slots: {int(slots.min())}..{int(slots.max())}, beyond the pages 1..{pages - 1}"
    if len(order) >= _RANDOM_FROM and bool((order.diff() > 0).all() or (order.diff() < 0).all()):
        return "slots: in order; that flatters"
    for tensor in values:
        low, high = tensor.aminmax()
        if not (low.isfinite() and high.isfinite()):
            return "not all finite"
        if tensor.numel() > 1 and low == high:
            return "all alike"
    return None


def degenerate(operands: Operands) -> str | None:
    """Why a state can't be timed any more: not finite, or denormal, which is another arithmetic.
    None if it can."""
    tensors = list(_mutated(operands))
    if isinstance(operands, StepOperands):
        tensors.append(operands.out)
    for tensor in tensors:
        if not all(end.isfinite() for end in tensor.aminmax()):
            return "not all finite"
        some = tensor[: max(1, _SAMPLED_ELEMENTS // tensor[:1].numel())]
        if (
            (some != 0) & (some.abs() < torch.finfo(some.dtype).tiny)
        ).float().mean() > _DENORMAL_PART:
            return f"over {_DENORMAL_PART:.0%} of the elements are denormal"
    return None


def bit_sum(tensor: Tensor) -> Tensor:
    """Sum of a tensor's elements taken as integers: changes with any one bit."""
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.view(integer).sum(dtype=torch.int64)


def _constant(operands: Operands) -> Iterator[Tensor]:
    """The tensors that a launch only reads."""
    names: tuple[str, ...] = ("conv_weight", "conv_bias", "f_b", "A_log", "dt_bias", "norm_weight", "slots", "accepted",
                              "record_rows")  # fmt: skip
    if isinstance(operands, CommitOperands):
        names = (
            "A_log",
            "dt_bias",
            "source",
            "length",
            "destination",
            "record_rows",
            "state_table",
        )
    yield from (t for name in names if (t := getattr(operands, name)) is not None)


def _mutated(operands: Operands) -> list[Tensor]:
    """The tensors that a launch updates from their own contents or beside live data."""
    if isinstance(operands, CommitOperands):
        return [operands.states[layer] for layer in _checked_layers(operands)]
    mutated = [operands.state, operands.conv_state]
    if operands.pending is not None:
        assert operands.corrections is not None
        assert operands.key_gates is not None
        mutated += [
            operands.corrections,
            operands.key_gates,
        ]  # a replay folds the records that it finds
    return mutated


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
