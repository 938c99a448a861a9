"""KDA decode, spec and record steps: persistent, two CTAs of 256 threads per SM, the next item loaded during this one.

projected   [requests * tokens, pitch]     bf16   q, k, v | output gate | f_a | raw beta
conv_state  [slots, 3D, W]                 bf16, dim-first or window-major; read and rolled
state       [slots, heads, V=128, K=128]   f32 or bf16; updated (decode), read and written (spec), read (record)
corrections [rows, heads, Q, 128]          f32, written (record)
key_gates   [rows, heads, Q, 256]          bf16, written (record)
out         [requests * tokens, D]         bf16

A CTA walks a run of items that mostly share a head, whose gate weights stay in registers. Its shared memory holds one
state, in cells that only the thread (record: the warp) that copied them reads, and one or two stages of operands. A
piece of the next item's state is asked for as soon as that of this item has been read: no barrier of the CTA stands
between. Per item:
  prologue   gate on tensor cores, convolution; decays, q, k, v to shared memory. Window rolled
  ask        the next item's operands, into the other stage, or as soon as this item's have been used
  rows       decode, spec: a half-warp holds a row, a piece is two rows of each; token by token, each token's state
             stored as soon as it is known. Norms are deferred: with S' the decayed state,
               u = beta (v - rk S' k),  o = rq S' q + u (k.q) rk rq,  S = S' + u rk k,  rk and rq the inverse norms
  products   record: vectors as fragments, the triangles solved by one warp, the state multiplied piece by piece on
             tensor cores, corrections and outputs in registers: see `kda_kernels.parts.chunked`
  finish     RMSNorm and output gate, behind the barrier that also hands over the next item's operands
Barriers per item: 2 (decode), 3 (spec), 5 (record). Null items are computed from whatever is there, and not stored.

Budget per item at the memory floor of an H200's SM: decode 4.2 us, some 7400 clocks; record q=8 3.0 us, 5200. Needed by
count of instructions: a third of the issue slots (decode), two thirds (record q=8). In flight while both CTAs of an SM
are in their prologues: 128 KiB of FP32 states, for which the SM's part of the bandwidth takes 4 us.
Source: docs/operation.md, "The mathematics, per item" and "The same, chunked".
"""

# A condition known at compile time can't share an `if` with one of the running kernel.
# ruff: noqa: SIM102
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, Uint32, const_expr, range_constexpr
from cutlass.memory import SmemAllocator

from kda_kernels import arguments, walk
from kda_kernels.arguments import Arguments
from kda_kernels.device import blocks, cubin
from kda_kernels.device.gpu import Gpu
from kda_kernels.operands import StepOperands
from kda_kernels.parts import chunked, conv_window, gate_product, prologue, state_rows
from kda_kernels.parts.conv_window import Window
from kda_kernels.parts.prologue import ALIGNMENT, UNIT, Operands
from kda_kernels.parts.state_rows import COLUMNS, HALF_WARP, LANES, PIECE_ROWS
from kda_kernels.problem import CONV_WIDTH, HEAD_DIM, HISTORY, Problem, ceil_div

KERNELS = ("kda_stream",)
KINDS = ("decode", "spec", "record")
RULE = "stream_items"
STREAMS = True
TRIED = {"gate_mode": (0, 1), "stages": (None, 1, 2), "most_items": (None, 2, 4)}
GIVEN = ("terms", "conv_weight_dtype", "window")


def forms(kind: str, state_dtype: str) -> list[dict[str, object]]:
    """Every form that is another kernel."""
    found: list[dict[str, object]] = [
        {"gate_mode": gate_mode, "terms": terms}
        for gate_mode in (0, 1)
        for terms in ((1, 2) if (kind, state_dtype) == ("record", "bf16") else (2,))
    ]
    return [*found, {"gate_mode": 1, "terms": 2, "ahead": True}]


CTAS_PER_SM = 2
SMEM_BYTES = prologue.SM_SMEM // CTAS_PER_SM - prologue.RESERVED_SMEM
"""Shared memory of a CTA, so that two fit an SM."""

_THREADS = 32 * chunked.WARPS

arch = cute.arch
GMEM = cutlass.AddressSpace.gmem
SMEM = cutlass.AddressSpace.smem


@dataclass(frozen=True)
class Spec:
    """Compile-time choices; `most_items` and `pdl` are of the launch.

    gate_mode          0: one chain of 8 tensor-core accumulations; 1: four chains of 2, summed in order
    terms              record, BF16 state: terms of the vectors in its products. 2: FP32 precision; 1: 4e-4
    stages             of operands, 1 or 2, decode 2; None: as many as fit
    ahead              a CTA's first state is asked for before the PDL wait; its first prologue then waits for it
    evict              evict-first in L2 for states that are read
    stream_hints       decode, spec: stored states are streaming
    conv_weight_dtype  of convolution weight and bias
    window             most entries of a dim-first window; None: those of the problem
    most_items         of a CTA: with more, CTAs come one after the other, each as an SM is ready for it; None: no limit
    pdl                programmatic dependent launch
    """

    gate_mode: int = 0
    terms: int = 2
    stages: int | None = None
    ahead: bool = False
    evict: bool = False
    stream_hints: bool = False
    conv_weight_dtype: Literal["fp32", "bf16"] = "fp32"
    window: int | None = None
    most_items: int | None = None
    pdl: bool = False


@dataclass(frozen=True)
class Plan(chunked.Shape):
    """What decides the code: the problem's compile-time part and the Spec's. Its repr is the cache key.

    taps_shared   convolution weights wait in cells of shared memory that are private to the threads, not in registers
    """

    kind: str
    gate_mode: int
    stages: int
    taps_shared: bool
    ahead: bool
    evict: bool
    hints: bool

    @property
    def chains(self) -> int:
        return 1 if self.gate_mode == 0 else HEAD_DIM // chunked.WARPS // 2 // PIECE_ROWS

    @property
    def groups(self) -> int:
        """Pieces of a state."""
        return self.lines if self.kind == "record" else 4

    @property
    def piece_cells(self) -> int:
        """Bytes of a piece."""
        return HEAD_DIM * HEAD_DIM * self.item_bytes // self.groups

    @property
    def numbers(self) -> int:
        """What a request is looked up by: slot; slot and record row; or the slots of all tokens and `accepted`."""
        return {"decode": 1, "record": 2}.get(self.kind, self.tokens + 1)

    @property
    def stage_areas(self) -> dict[str, int]:
        """Bytes of an item's operands."""
        areas = {
            "x": 6 * HEAD_DIM * (self.history + self.tokens),
            "f_a": 2 * HEAD_DIM * self.tokens,
            "out_gate": 2 * HEAD_DIM * self.tokens,
            "window": 6 * HEAD_DIM * self.window,
            "dt_bias": 4 * HEAD_DIM,
            "A_log": 4,
            "beta": 4 * self.tokens,
            "numbers": 4 * self.numbers,
        }
        return prologue.aligned(areas)

    @property
    def stage_bytes(self) -> int:
        return sum(self.stage_areas.values())

    @property
    def areas(self) -> dict[str, int]:
        """Bytes of shared memory by use."""
        areas = {
            "state": HEAD_DIM * HEAD_DIM * self.item_bytes,
            "operands": self.stages * self.stage_bytes,
            "norm_weight": 4 * HEAD_DIM,
            "qkv": self.qkv_bytes,
            "gamma": self.gamma_bytes,
        }
        if self.taps_shared:
            areas["taps"] = (CONV_WIDTH + 1) * 3 * HEAD_DIM * self.weight_bytes
        if self.kind == "record":
            areas |= {
                "gamma": max(self.gamma_bytes, self.partial_bytes),
                "fragments": self.fragment_bytes,
                "pairs": 4 * self.pair_floats,
                "matrix": 8 * self.slots**2,
                "solution": 128 * self.solution_words,
                "sums": 4 * self.slots * chunked.WARPS,
            }
        else:
            areas |= {"factors": 16 * self.tokens, "o": 2 * HEAD_DIM * self.tokens}
        return prologue.aligned(areas)

    @property
    def smem_bytes(self) -> int:
        return sum(self.areas.values())


@dataclass(frozen=True)
class Compiled:
    binary: cubin.Binary
    plan: Plan
    sms: int
    pdl: bool
    most_items: int | None = None

    @property
    def resources(self) -> cubin.Resources:
        return self.binary.resources


def plan(problem: Problem, spec: Spec) -> Plan:
    layout, window = arguments.window_rules(problem, True, spec.window)
    record = problem.kind == "record"
    p = Plan(
        tokens=problem.tokens,
        state_dtype=problem.state_dtype,
        threads=_THREADS,
        layout=layout,
        window=window,
        streamable=True,
        weight_dtype=spec.conv_weight_dtype,
        terms=spec.terms if record and problem.state_dtype == "bf16" else 2,
        kind=problem.kind,
        gate_mode=spec.gate_mode,
        stages=1,
        taps_shared=False,
        ahead=spec.ahead,
        evict=spec.evict,
        hints=spec.stream_hints and not record,
    )
    stages = (spec.stages,) if spec.stages is not None else (2,) if problem.kind == "decode" else (2, 1)
    plans = [replace(p, stages=n, taps_shared=shared) for n in stages for shared in (True, False)]
    return next((p for p in plans if p.smem_bytes <= SMEM_BYTES), plans[-1])


def unsupported(problem: Problem, spec: Spec, gpu: Gpu) -> str | None:
    """Why this pair can't run, or None. Pure: no CUDA."""
    if problem.kind not in ("decode", "spec", "record"):
        return f"kind={problem.kind}: only decode, spec and record"
    for name, value, allowed in (
        ("gate_mode", spec.gate_mode, (0, 1)),
        ("terms", spec.terms, (1, 2)),
        ("stages", spec.stages, (None, 2) if problem.kind == "decode" else (None, 1, 2)),
        ("conv_weight_dtype", spec.conv_weight_dtype, ("fp32", "bf16")),
    ):
        if value not in allowed:
            return f"{name}={value!r} is not one of {', '.join(map(str, allowed))}"
    if spec.window is not None and not problem.tokens + 2 <= spec.window <= 16:
        return f"window={spec.window} must lie in {problem.tokens + 2}..16"
    if spec.most_items is not None and spec.most_items < 1:
        return f"most_items={spec.most_items} must be at least 1"
    needed, most = plan(problem, spec).smem_bytes, min(SMEM_BYTES, gpu.smem_per_block)
    if needed > most:
        return f"{needed} bytes of shared memory exceed {most}"
    return None


def compile(problem: Problem, spec: Spec, gpu: Gpu) -> Compiled:
    """From shapes alone; one binary serves all heads, requests and strides. Raises ValueError for unsupported pairs."""
    reason = unsupported(problem, spec, gpu)
    if reason is not None:
        raise ValueError(f"KdaStream: {reason}")
    p = plan(problem, spec)
    binary = cubin.build(
        _host,
        lambda: (arguments.placeholder(), p),
        arch=gpu.arch,
        threads=p.threads,
        cluster=1,
        choices=p,
    )
    return Compiled(binary, p, gpu.sms, spec.pdl, spec.most_items)


def launch(compiled: Compiled, operands: StepOperands, stream: int) -> None:
    """Enqueue one step. Raises ValueError, naming the operand, for operands that the compiled kernel can't take."""
    o, p = operands, compiled.plan
    arguments.check("KdaStream", p, o)
    assert o.lower_bound is not None
    if p.kind == "record" and not o.lower_bound * p.tokens >= chunked.MIN_LOG_GAMMA:
        raise ValueError(f"lower_bound={o.lower_bound} is too low for {p.tokens} tokens")
    per, ctas = walk.divided(o.A_log.shape[0], o.slots.shape[0], compiled.sms, compiled.most_items)
    cubin.launcher(compiled.binary).launch((ctas, 1, 1), arguments.values(o, per), stream, compiled.pdl)


@cute.jit
def _host(A: Arguments, P: cutlass.Constexpr) -> None:
    kda_stream(A, P).launch(
        grid=(1, 1, 1), block=(P.threads, 1, 1), min_blocks_per_mp=CTAS_PER_SM, preferred_smem_carveout=100
    )


@dataclass(frozen=True)
class Shared:
    """A CTA's shared memory."""

    state: Any  # cells of 16 bytes, [cell][thread]
    operands: Any  # stages of `Stage`
    norm_weight: Any  # [128]
    taps: Any  # [4 taps and bias, 192 threads, 2 channels], if `taps_shared`
    qkv: Any  # [tokens, QKV_PITCH] bf16
    gamma: Any  # [tokens, GAMMA_PITCH], record; decode, spec: decays
    partials: Any  # record: A and B, a part per step, in the place of gamma
    fragments: Any  # record, as all that follows: `chunked.Shape.fragment_layout`
    pairs: Any  # A and B
    matrix: Any  # T and C
    solution: Any  # T and C as fragments
    sums: Any  # [slots, warps] sums of squares of o
    factors: Any  # decode, spec: [tokens, 4] rk, rq, (k.q) rk rq, beta
    o: Any  # decode, spec: [tokens, 128] bf16


@dataclass(frozen=True)
class Stage(Operands):
    """An item's operands."""

    numbers: Any  # [numbers] i32 of the item after


class Place(NamedTuple):
    """Where a thread is."""

    tid: Int32
    warp: Int32
    lane: Int32


class Request(NamedTuple):
    """page    of the window, and of the first token's state
    read    page of the state to start from; below one for a null item
    start   first entry of the window's history
    row     of the records, negative for none
    """

    page: Int32
    read: Int32
    start: Int32
    row: Int32


@cute.kernel
def kda_stream(A: Arguments, P: cutlass.Constexpr) -> None:
    cta, _, _ = arch.block_idx()
    here = place()
    ctas, _, _ = arch.grid_dim()
    begin, count = walk.part_of(cta, ctas, A.per, A.heads, A.requests)
    item = walk.item_at(begin, max(A.per, -A.per), A.heads, A.requests)

    # The slot must be the first load: behind the copies it comes back a microsecond later.
    numbers = blocks.at(Int32, number_address(A, item.request, min(here.lane, P.numbers - 1), P), Int32(0))
    F = allocate(P)
    stage = F.operands.iterator.toint()
    both_stages = 2 * stage + P.stage_bytes
    first = stage_at(stage, P)
    ask_constants(A, F, here, P)
    ask_parameters(A, F, first, item, count > 0, count > 1, here, P)
    if const_expr(not P.ahead):
        arch.griddepcontrol_wait()
        arch.griddepcontrol_launch_dependents()
        ask_projection(A, first, item, here, P)
    # So that nothing later waits for the gate weights on its behalf.
    numbers = blocks.pinned(numbers)
    ask_window(A, first, numbers, item.head, here, P)
    if const_expr(not P.ahead):
        arch.cp_async_commit_group()
    gate_weights = cute.make_rmem_tensor(gate_product.WEIGHTS, Uint32)
    taps = cute.make_rmem_tensor((2, CONV_WIDTH + 1), P.conv_dtype)
    load_weights(A, gate_weights, taps, item.head, Int32(0), here, P)
    # Keeps these loads in front of the state's copies: behind them, they would come late.
    arch.sync_warp()
    ask_state(A, F, numbers, item.head, here, P)
    if const_expr(P.ahead):
        arch.griddepcontrol_wait()
        arch.griddepcontrol_launch_dependents()
        ask_projection(A, first, item, here, P)
        arch.cp_async_commit_group()
        arch.cp_async_wait_group(0)
    else:
        arch.cp_async_wait_group(P.groups)
    arch.sync_threads()
    settle_weights(A, gate_weights, taps, here, P)

    for n in cutlass.range(count, unroll=1):
        at = place()
        M = stage_at(stage, P)
        now = request_of(numbers, P)
        window = conv_window.window_of(A, now.page, now.start)
        record = prologue.record_of(A, now.row, item.head)
        following = M.numbers[min(at.lane, P.numbers - 1)]
        if n + 1 == count:
            following = Int32(0)

        raw = gate_product.raw_gates(gate_weights, M.f_a, at.lane, P)
        if const_expr(P.kind == "record"):
            exp_A = blocks.exp(M.A_log[0])
            chunked.store_gammas(raw, F.gamma, M.dt_bias, exp_A, A.lower_bound, record, at.warp, at.lane, P)
        else:
            store_decays(raw, F, M, A.lower_bound, at, P)
        if at.warp < chunked.CONVOLVING_WARPS:
            if const_expr(P.taps_shared):
                cute.autovec_copy(F.taps[None, at.tid, None], taps)
            bias = taps[None, CONV_WIDTH]
            chunked.convolve_with(taps, bias, M, F.qkv, window, record, at.tid, P)
        if const_expr(P.layout == "taps"):
            if now.read > 0:
                store_taps(A, M, window, item.head, at, P)
        at = meet()

        if const_expr(P.layout == "rows"):
            if now.read > 0:
                store_rows_window(A, M, window, item.head, at)
        other = both_stages - stage if const_expr(P.stages == 2) else stage
        if const_expr(P.stages == 2):
            ask_next(A, F, stage_at(other, P), item, following, count - 1 - n, at, P)

        if const_expr(P.kind == "record"):
            beta = M.beta[item.head % 2, min(at.lane % P.slots, P.tokens - 1)].to(Float32)
            if const_expr(P.stages == 1):
                factors = chunked.output_factors(M.out_gate, F.norm_weight, at.warp, at.lane, P)
            chunked.build_fragments(F.fragments, F.qkv, F.gamma, A.scale, at.warp, chunked.WARPS, at.lane, P)
            at = meet()
            chunked.token_products(F.fragments, F.partials, at.warp, at.lane, P)
            at = meet()
            if at.warp == chunked.SOLVER:
                chunked.solve(F.partials, F.pairs, F.matrix, F.solution, blocks.sigmoid(beta), at.lane, P)
            if const_expr(P.stages == 1):
                ask_next(A, F, stage_at(other, P), item, following, count - 1 - n, at, P)
            refresh_weights(A, gate_weights, taps, item, count - 1 - n, at, P)
            sums = multiply(A, F, item, following, P)
            v = chunked.values(F.qkv, at.warp, at.lane, P)
            if const_expr(P.stages == 2):
                factors = chunked.output_factors(M.out_gate, F.norm_weight, at.warp, at.lane, P)
            at = meet()
            now = request_of(blocks.pinned(numbers), P)
            record = prologue.record_of(A, now.row, item.head)
            u, attended = chunked.finish(sums, v, F.solution, at.lane, P)
            o = cute.make_rmem_tensor(4, Float32)
            for i in range_constexpr(4):
                o[i] = blocks.rounded(attended[i])
                if now.read <= 0:
                    o[i] = Float32(0)
                    factors[i] = Float32(0)
            chunked.store_squares(o, F.sums, at.warp, at.lane, P)
            if record.row >= 0:
                chunked.store_corrections(u, record.corrections, at.warp, at.lane, P)
            arch.cp_async_wait_group(P.groups)
            at = meet()
            results = results_of(A, item, P)
            chunked.store_outputs(o, factors, F.sums, A.eps, results, A.heads * HEAD_DIM, at.warp, at.lane, P)
        else:
            gates = cute.make_rmem_tensor(4, BFloat16)
            if const_expr(P.stages == 1):
                take_gates(gates, M, at, P)
            if const_expr(P.kind == "spec"):
                token_factors(F, M, A.scale, item.head, at, P)
                at = meet()
                if const_expr(P.stages == 1):
                    ask_next(A, F, stage_at(other, P), item, following, count - 1 - n, at, P)
                refresh_weights(A, gate_weights, taps, item, count - 1 - n, at, P)
                advance_window(A, F, item, numbers, following, at, P)
            else:
                beta = blocks.sigmoid(M.beta[item.head % 2, 0].to(Float32))
                refresh_weights(A, gate_weights, taps, item, count - 1 - n, at, P)
                advance_decode(A, F, item, numbers, following, beta, at, P)
            arch.cp_async_wait_group(P.groups)
            at = meet()
            if const_expr(P.stages == 2):
                take_gates(gates, M, at, P)
            normalize(A, F, gates, item, now.read > 0, at, P)

        later = after(A, item)
        if later.head != item.head:
            settle_weights(A, gate_weights, taps, at, P)
        item, numbers, stage = later, following, other


def allocate(P: Plan) -> Shared:
    smem = SmemAllocator()

    def take(dtype: Any, name: str) -> Any:
        count = P.areas[name] // (dtype.width // 8)
        return smem.allocate_tensor(dtype, cute.make_layout(count), byte_alignment=ALIGNMENT)

    def view(flat: Any, layout: Any) -> Any:
        return cute.make_tensor(flat.iterator, cute.make_layout(layout))

    areas = {name: take(Uint8, name) for name in ("state", "operands")}
    areas |= {name: take(Float32, name) for name in ("norm_weight", "gamma")}
    areas["qkv"] = take(BFloat16, "qkv")
    areas["taps"] = None
    if P.taps_shared:
        areas["taps"] = view(take(P.conv_dtype, "taps"), (2, 32 * chunked.CONVOLVING_WARPS, CONV_WIDTH + 1))
    if P.kind == "record":
        areas |= {name: take(Float32, name) for name in ("pairs", "matrix", "sums")}
        areas |= {name: take(Uint32, name) for name in ("fragments", "solution")}
        return Shared(**areas, partials=areas["gamma"], factors=None, o=None)
    factors = view(take(Float32, "factors"), (4, P.tokens))
    o = view(take(BFloat16, "o"), (HEAD_DIM, P.tokens))
    none = dict.fromkeys(("partials", "fragments", "pairs", "matrix", "solution", "sums"))
    return Shared(**areas, **none, factors=factors, o=o)


def stage_at(address: Int32, P: Plan) -> Stage:
    """The stage of operands at a shared address."""
    view = prologue.side_by_side(P.stage_areas, address)
    x = view(BFloat16, "x", (HEAD_DIM, 3, P.history + P.tokens))
    return Stage(
        x=x,
        f_a=view(BFloat16, "f_a", P.tokens * HEAD_DIM),
        out_gate=view(BFloat16, "out_gate", (HEAD_DIM, P.tokens)),
        window=view(BFloat16, "window", 3 * HEAD_DIM * P.window) if P.layout == "rows" else x,
        dt_bias=view(Float32, "dt_bias", HEAD_DIM),
        A_log=view(Float32, "A_log", 1),
        beta=view(BFloat16, "beta", (2, P.tokens)),
        numbers=view(Int32, "numbers", P.numbers),
    )


@cute.jit
def place() -> Place:
    """Asked for anew now and then, so that what depends on it isn't kept in registers for long."""
    tid = blocks.special("%tid.x") & (_THREADS - 1)  # known not to be negative
    return Place(tid, arch.make_warp_uniform(tid // 32), tid % 32)


@cute.jit
def meet() -> Place:
    """A barrier of the CTA; `place` behind it."""
    arch.sync_threads()
    at: Place = place()
    return at


@cute.jit
def after(A: Arguments, item: walk.Item) -> walk.Item:
    """The next item, found anew instead of kept."""
    head, request, first, size = item
    later: walk.Item = walk.next_item(walk.Item(blocks.pinned(head), request, first, size), A.heads, A.requests)
    return later


@cute.jit
def number_address(A: Arguments, request: Int32, number: Int32, P: cutlass.Constexpr) -> Int64:
    """Of one of `Plan.numbers` of a request."""
    address = A.slots + Int64(request) * A.slots_stride * 4
    if const_expr(P.kind != "decode"):
        if number < P.numbers - 1:
            address += Int64(number) * 4
        else:
            address = (A.accepted if const_expr(P.kind == "spec") else A.record_rows) + Int64(request) * 4
    return address


@cute.jit
def request_of(numbers: Int32, P: cutlass.Constexpr) -> Request:
    """From the numbers on the first lanes."""
    page, start, row = numbers, Int32(0), Int32(-1)
    if const_expr(P.kind != "decode"):
        page = arch.shuffle_sync(numbers, 0)
    read = page
    if const_expr(P.kind == "record"):
        row = arch.shuffle_sync(numbers, 1)
        if page <= 0:
            row = Int32(-1)
    if const_expr(P.kind == "spec"):
        start = min(max(arch.shuffle_sync(numbers, P.tokens) - 1, Int32(0)), Int32(P.tokens - 1))
        read = arch.shuffle_sync(numbers, start)
        if page <= 0:
            read = Int32(0)
    return Request(page, read, start, row)


@cute.jit
def results_of(A: Arguments, item: walk.Item, P: cutlass.Constexpr) -> Int64:
    """Address of the item's channels of its first token in `out`."""
    return A.out + (Int64(item.request * P.tokens) * A.heads + item.head) * (2 * HEAD_DIM)


@cute.jit
def load_weights(
    A: Arguments, gate: cute.Tensor, taps: cute.Tensor, head: Int32, zero: Int32, at: Place, P: cutlass.Constexpr
) -> None:
    """To registers: a head's gate weights; unless `taps_shared`, convolution weight and bias of two channels. To be
    completed by `settle_weights`. zero: as in `gate_product.load_lines`.
    """
    features = A.f_b + Int64(head) * (HEAD_DIM * gate_product.ROW_BYTES)
    gate_product.load_lines(gate, features, zero, at.warp, at.lane)
    if const_expr(not P.taps_shared):
        if at.warp < chunked.CONVOLVING_WARPS:
            for tap in range_constexpr(CONV_WIDTH):
                load_pair(taps, tap, A.conv_weight, weight_place(A, CONV_WIDTH, tap, head, at), P)
            # No bias: something else, so that this load, too, can have its address where it puts what it loads.
            bias = A.conv_weight
            if A.conv_bias != Int64(0):
                bias = A.conv_bias
            load_pair(taps, CONV_WIDTH, bias, weight_place(A, 1, 0, head, at), P)


@cute.jit
def settle_weights(A: Arguments, gate: cute.Tensor, taps: cute.Tensor, at: Place, P: cutlass.Constexpr) -> None:
    """What `load_weights` has left to be done when its loads are there."""
    gate_product.settle(gate, at.lane)
    if const_expr(not P.taps_shared):
        if A.conv_bias == Int64(0):
            taps[None, CONV_WIDTH].fill(P.conv_dtype(0))


@cute.jit
def load_pair(taps: cute.Tensor, tap: cutlass.Constexpr, base: Int64, place: Int64, P: cutlass.Constexpr) -> None:
    address = base + place * P.weight_bytes
    source = cute.make_ptr(P.conv_dtype, address, GMEM, assumed_align=2 * P.weight_bytes)
    cute.autovec_copy(cute.make_tensor(source, cute.make_layout(2)), taps[None, tap])


@cute.jit
def weight_place(A: Arguments, rows: cutlass.Constexpr, row: cutlass.Constexpr, head: Int32, at: Place) -> Int64:
    """Element of this thread's two channels in weights [3, rows, D]."""
    part, pair = at.tid // (HEAD_DIM // 2), at.tid % (HEAD_DIM // 2)
    return (Int64(part * rows + row) * A.heads + head) * HEAD_DIM + 2 * pair


@cute.jit
def refresh_weights(
    A: Arguments,
    gate: cute.Tensor,
    taps: cute.Tensor,
    item: walk.Item,
    left: Int32,
    at: Place,
    P: cutlass.Constexpr,
) -> None:
    """Load the weights of the next item's head, if there is one and it is another.

    It stands where threads wait for the state anyway: with copies in flight the loads leave their queue slowly.
    """
    head = after(A, item).head
    if left > 0 and head != item.head:
        load_weights(A, gate, taps, head, A.heads >> 31, at, P)


@cute.jit
def ask_next(
    A: Arguments,
    F: cutlass.Constexpr,
    M: cutlass.Constexpr,
    item: walk.Item,
    numbers: Int32,
    left: Int32,
    at: Place,
    P: cutlass.Constexpr,
) -> None:
    """All operands of the item after this one, as one group of copies. left: items after this one; numbers: its."""
    if left > 0:
        later = after(A, item)
        ask_parameters(A, F, M, later, later.head != item.head, left > 1, at, P)
        ask_window(A, M, numbers, later.head, at, P)
        ask_projection(A, M, later, at, P)
    arch.cp_async_commit_group()


@cute.jit
def ask_constants(A: Arguments, F: cutlass.Constexpr, at: Place, P: cutlass.Constexpr) -> None:
    """What is the same for all items."""
    if at.warp == 0:
        blocks.copy_async(F.norm_weight.iterator.toint() + at.lane * 16, A.norm_weight + at.lane * 16, 16)
    if const_expr(P.taps_shared):
        if at.warp < chunked.CONVOLVING_WARPS and A.conv_bias == Int64(0):
            F.taps[None, at.tid, CONV_WIDTH].fill(P.conv_dtype(0))


@cute.jit
def ask_parameters(
    A: Arguments,
    F: cutlass.Constexpr,
    M: cutlass.Constexpr,
    item: walk.Item,
    new_head: cutlass.Boolean,
    more: cutlass.Boolean,
    at: Place,
    P: cutlass.Constexpr,
) -> None:
    """Parameters of the gate and, of a new head, of the convolution; the numbers of the item after, if there is one."""
    if at.warp == chunked.WARPS - 1:
        source = A.dt_bias + Int64(item.head) * (4 * HEAD_DIM) + at.lane * 16
        blocks.copy_async(M.dt_bias.iterator.toint() + at.lane * 16, source, 16)
        if more and at.lane < P.numbers:
            number = number_address(A, after(A, item).request, at.lane, P)
            blocks.copy_async(M.numbers.iterator.toint() + at.lane * 4, number, 4)
        if at.lane == 31:
            blocks.copy_async(M.A_log.iterator.toint(), A.A_log + Int64(item.head) * 4, 4)
    if const_expr(P.taps_shared):
        if new_head and at.warp < chunked.CONVOLVING_WARPS:
            size = 2 * P.weight_bytes
            cell = F.taps.iterator.toint() + at.tid * size
            for tap in range_constexpr(CONV_WIDTH):
                source = A.conv_weight + weight_place(A, CONV_WIDTH, tap, item.head, at) * P.weight_bytes
                blocks.copy_async(cell + tap * (32 * chunked.CONVOLVING_WARPS * size), source, size)
            if A.conv_bias != Int64(0):
                source = A.conv_bias + weight_place(A, 1, 0, item.head, at) * P.weight_bytes
                blocks.copy_async(cell + CONV_WIDTH * (32 * chunked.CONVOLVING_WARPS * size), source, size)


@cute.jit
def ask_window(
    A: Arguments, M: cutlass.Constexpr, numbers: Int32, head: Int32, at: Place, P: cutlass.Constexpr
) -> None:
    request = request_of(numbers, P)
    if request.read > 0:
        window = conv_window.window_of(A, request.page, request.start)
        if const_expr(P.layout == "rows"):
            ask_rows_window(A, M, window, head, at)
        else:
            ask_taps(A, M, window, head, at)


@cute.jit
def ask_rows_window(A: Arguments, M: cutlass.Constexpr, window: Window, head: Int32, at: Place) -> None:
    """All entries of a dim-first window; a thread takes the same 16 bytes of q, k and v."""
    part_bytes = 2 * HEAD_DIM * window.channel_stride
    if at.tid * 16 < part_bytes:
        target = M.window.iterator.toint() + at.tid * 16
        source = window.page + Int64(head) * part_bytes + at.tid * 16
        for part in range_constexpr(3):
            blocks.copy_async(target + part * part_bytes, source + Int64(part * A.heads) * part_bytes, 16)


@cute.jit
def store_rows_window(A: Arguments, M: cutlass.Constexpr, window: Window, head: Int32, at: Place) -> None:
    """Back to where `ask_rows_window` took it from."""
    part_bytes = 2 * HEAD_DIM * window.channel_stride
    if at.tid * 16 < part_bytes:
        source = M.window.iterator.toint() + at.tid * 16
        target = window.page + Int64(head) * part_bytes + at.tid * 16
        for part in range_constexpr(3):
            blocks.copy_out(source + part * part_bytes, target + Int64(part * A.heads) * part_bytes)


@cute.jit
def taps_unit(A: Arguments, window: Window, row: Int32, first: Int32, head: Int32, at: Place) -> Int64:
    """Address of 16 bytes of a row [entry from `first`, part] of a window-major window."""
    entry, part = row // 3, row % 3
    channel = (part * A.heads + head) * HEAD_DIM + at.tid % 16 * UNIT
    return window.page + (Int64(first + entry) * window.tap_stride + channel) * 2


@cute.jit
def ask_taps(A: Arguments, M: cutlass.Constexpr, window: Window, head: Int32, at: Place) -> None:
    """The history of a window-major window, in front of the inputs."""
    row = at.tid // 16
    if row < 3 * HISTORY:
        target = M.x.iterator.toint() + at.tid * 16
        blocks.copy_async(target, taps_unit(A, window, row, window.start, head, at), 16)


@cute.jit
def store_taps(
    A: Arguments, M: cutlass.Constexpr, window: Window, head: Int32, at: Place, P: cutlass.Constexpr
) -> None:
    """The two inputs before this step's, then these, as the first tokens + 2 entries."""
    rows, step = 3 * (P.tokens + 2), _THREADS // 16
    source = M.x.iterator.toint() + 6 * HEAD_DIM + at.tid * 16
    for i in range_constexpr(ceil_div(rows, step)):
        row = at.tid // 16 + i * step
        if row < rows:
            blocks.copy_out(source + i * (_THREADS * 16), taps_unit(A, window, row, Int32(0), head, at))


@cute.jit
def ask_projection(A: Arguments, M: cutlass.Constexpr, item: walk.Item, at: Place, P: cutlass.Constexpr) -> None:
    """A warp takes a token: q and k, v and output gate, f_a and beta, a half-warp each."""
    t, half, unit = at.warp, at.lane // 16, at.lane % 16
    if t < P.tokens:
        row = A.projected + (Int64(item.request * P.tokens) + t) * A.pitch * 2
        part_bytes = A.heads * (2 * HEAD_DIM)
        mine = row + (item.head * (2 * HEAD_DIM) + half * part_bytes + unit * 16)
        x = M.x.iterator.toint() + (P.history + t) * (6 * HEAD_DIM) + at.lane * 16
        gates = M.out_gate.iterator.toint() + t * (2 * HEAD_DIM) + unit * 16
        blocks.copy_async(x, mine, 16)
        blocks.copy_async(gates if half == 1 else x + 4 * HEAD_DIM, mine + 2 * part_bytes, 16)
        f_a = row + 4 * part_bytes
        if half == 0:
            place = M.f_a.iterator.toint() + t * (2 * HEAD_DIM) + (unit ^ t) * 16
            blocks.copy_async(place, f_a + unit * 16, 16)
        elif unit == 0:
            # A word: the other half is beta of the neighbouring head, or padding of the row.
            beta = f_a + (2 * HEAD_DIM + item.head // 2 * 4)
            blocks.copy_async(M.beta.iterator.toint() + t * 4, beta, 4)


@cute.jit
def ask_state(A: Arguments, F: cutlass.Constexpr, numbers: Int32, head: Int32, at: Place, P: cutlass.Constexpr) -> None:
    """A CTA's first state, a group of copies per piece."""
    slot = request_of(numbers, P).read
    for group in range_constexpr(P.groups):
        if slot > 0:
            ask_piece(F, prologue.state_of(A, slot, head, P), Int32(group), at, P)
        arch.cp_async_commit_group()


@cute.jit
def ask_piece(F: cutlass.Constexpr, page: Int64, group: Int32, at: Place, P: cutlass.Constexpr) -> None:
    cells = cells_of(F, group, at, P)
    policy = blocks.evict_first() if const_expr(P.evict) else Int64(0)
    if const_expr(P.kind == "record"):
        chunked.copy_line(cells, page, group, at.warp, at.lane, policy, P.evict, P)
    else:
        state_rows.ask_piece(cells, page + state_rows.first_cell(group, at.warp, at.lane, P), 0, policy, P)


@cute.jit
def cells_of(F: cutlass.Constexpr, group: Int32, at: Place, P: cutlass.Constexpr) -> Int32:
    """Shared address of this thread's first cell of a piece."""
    return F.state.iterator.toint() + at.tid * 16 + group * P.piece_cells


@cute.jit
def multiply(
    A: Arguments,
    F: cutlass.Constexpr,
    item: walk.Item,
    following: Int32,
    P: cutlass.Constexpr,
) -> cute.Tensor:
    """Products of the state with the vectors; each piece is replaced by that of the next item. following: its numbers.

    As many groups are younger than a piece that is waited for, whichever it is: its successors, the operands, and the
    next item's pieces before it.
    """
    sums = chunked.accumulators(P)
    slot = request_of(following, P).read
    page = prologue.state_of(A, slot, after(A, item).head, P)
    for group in cutlass.range(P.groups, unroll=1):
        at = place()
        arch.cp_async_wait_group(P.groups)
        cells = cells_of(F, group, at, P)
        chunked.multiply_line(sums, cells, F.fragments, group, at.lane, P)
        arch.sync_warp()  # all lanes have read it
        if slot > 0:
            ask_piece(F, page, group, at, P)
        arch.cp_async_commit_group()
    return sums


@cute.jit
def advance_decode(
    A: Arguments,
    F: cutlass.Constexpr,
    item: walk.Item,
    numbers: Int32,
    following: Int32,
    beta: Float32,
    at: Place,
    P: cutlass.Constexpr,
) -> None:
    """The state by one token, back to its page; its pieces as in `multiply`."""
    token = take_token(F, Int32(0), at.lane, P)
    factors = (*blocks.normalizers(token.q, token.k, A.scale, LANES), beta)
    slot = request_of(following, P).read
    page = prologue.state_of(A, slot, after(A, item).head, P)
    target = prologue.state_of(A, numbers, item.head, P)
    for group in cutlass.range(P.groups, unroll=1):
        arch.cp_async_wait_group(P.groups)
        S = take_rows(cells_of(F, group, at, P), P)
        if slot > 0:
            ask_piece(F, page, group, at, P)
        arch.cp_async_commit_group()
        advance(S, token, factors, F, Int32(0), group, at, P)
        if numbers > 0:
            store_rows(S, target + state_rows.first_cell(group, at.warp, at.lane, P), P)


@cute.jit
def advance_window(
    A: Arguments,
    F: cutlass.Constexpr,
    item: walk.Item,
    numbers: Int32,
    following: Int32,
    at: Place,
    P: cutlass.Constexpr,
) -> None:
    """The state by all tokens; after each it goes to the token's slot. Its pieces as in `multiply`."""
    live = request_of(numbers, P).read > 0
    slot = request_of(following, P).read
    page = prologue.state_of(A, slot, after(A, item).head, P)
    for group in cutlass.range(P.groups, unroll=1):
        at = place()
        arch.cp_async_wait_group(P.groups)
        S = take_rows(cells_of(F, group, at, P), P)
        if slot > 0:
            ask_piece(F, page, group, at, P)
        arch.cp_async_commit_group()
        for t in cutlass.range(P.tokens, unroll=1):
            token = take_token(F, t, at.lane, P)
            factors = cute.make_rmem_tensor(4, Float32)
            cute.autovec_copy(F.factors[None, t], factors)
            of_token = (factors[0], factors[1], factors[2], factors[3])
            advance(S, token, of_token, F, t, group, at, P)
            own = arch.shuffle_sync(numbers, t)
            if live and own > 0:
                item_state = prologue.state_of(A, own, item.head, P)
                store_rows(S, item_state + state_rows.first_cell(group, at.warp, at.lane, P), P)


@cute.jit
def take_rows(cells: Int32, P: cutlass.Constexpr) -> cute.Tensor:
    """A piece from its cells to registers, [columns, rows]."""
    S = cute.make_rmem_tensor((COLUMNS, PIECE_ROWS), Float32)
    for j in range_constexpr(PIECE_ROWS):
        raw = state_rows.take_row(cells, j, P)
        for i in range_constexpr(COLUMNS):
            S[i, j] = raw[i].to(Float32)
    return S


@cute.jit
def store_rows(S: cute.Tensor, target: Int64, P: cutlass.Constexpr) -> None:
    """A piece to its place in a page."""
    for j in range_constexpr(PIECE_ROWS):
        raw = cute.make_rmem_tensor(COLUMNS, P.dtype)
        for i in range_constexpr(COLUMNS):
            raw[i] = S[i, j].to(P.dtype)
        state_rows.store_row(raw, target + 2 * j * HEAD_DIM * P.item_bytes, P)


@cute.jit
def store_decays(
    raw: tuple[Float32, ...],
    F: cutlass.Constexpr,
    M: cutlass.Constexpr,
    lower_bound: Float32,
    at: Place,
    P: cutlass.Constexpr,
) -> None:
    """Decays of 16 features of all tokens from `gate_product.raw_gates`."""
    feature = 16 * at.warp + at.lane // 4 * 2
    decays = cute.make_tensor(
        F.gamma.iterator, cute.make_layout((2, HEAD_DIM // 2, P.tokens), stride=(1, 2, chunked.GAMMA_PITCH))
    )
    exp_A = blocks.exp(M.A_log[0])
    for side in range_constexpr(min(2, P.tokens)):
        token = at.lane % 4 * 2 + side
        pair = cute.make_rmem_tensor(2, Float32)
        for i in range_constexpr(2):
            rounded = blocks.rounded(raw[2 * i + side])
            pair[i] = blocks.exp(blocks.log_decay(rounded, M.dt_bias[feature + i], exp_A, lower_bound))
        if token < P.tokens:
            cute.autovec_copy(pair, decays[None, feature // 2, token])


class Token(NamedTuple):
    """q, k and decay of a token in this lane's columns, in the order of its cells of a row."""

    q: cute.Tensor
    k: cute.Tensor
    d: cute.Tensor


@cute.jit
def take_token(F: cutlass.Constexpr, t: Int32, lane: Int32, P: cutlass.Constexpr) -> Token:
    """Columns 64 c + 4 l .. +3 (fp32) or 8 l .. +7 (bf16), l the lane of its half-warp."""
    fp32 = P.state_dtype == "fp32"
    words = cute.make_tensor(
        cute.recast_ptr(F.qkv.iterator, dtype=Uint32),
        cute.make_layout(
            (2, LANES, 2, 3, P.tokens),
            stride=(1, 2 if fp32 else 4, 32 if fp32 else 2, HEAD_DIM // 2, chunked.QKV_PITCH // 2),
        ),
    )
    decays = cute.make_tensor(
        F.gamma.iterator,
        cute.make_layout((4, LANES, 2, P.tokens), stride=(1, 4 if fp32 else 8, 64 if fp32 else 4, chunked.GAMMA_PITCH)),
    )
    column = lane % LANES
    q = cute.make_rmem_tensor(COLUMNS, Float32)
    k = cute.make_rmem_tensor(COLUMNS, Float32)
    d = cute.make_rmem_tensor((4, 2), Float32)
    for c in range_constexpr(2):
        for part in range_constexpr(2):
            pair = cute.make_rmem_tensor(2, Uint32)
            cute.autovec_copy(words[None, column, c, part, t], pair)
            for i in range_constexpr(2):
                x = k if const_expr(part == 1) else q
                x[4 * c + 2 * i] = blocks.low_half(pair[i])
                x[4 * c + 2 * i + 1] = blocks.high_half(pair[i])
        cute.autovec_copy(decays[None, column, c, t], d[None, c])
    return Token(q, k, cute.make_tensor(d.iterator, cute.make_layout(COLUMNS)))


@cute.jit
def token_factors(
    F: cutlass.Constexpr,
    M: cutlass.Constexpr,
    scale: Float32,
    head: Int32,
    at: Place,
    P: cutlass.Constexpr,
) -> None:
    """rk, rq, (k.q) rk rq and beta, a warp per token."""
    warp, lane = at.warp, at.lane
    if warp < P.tokens:
        words = cute.make_tensor(
            cute.recast_ptr(F.qkv.iterator, dtype=Uint32),
            cute.make_layout((2, 32, 3, P.tokens), stride=(1, 2, HEAD_DIM // 2, chunked.QKV_PITCH // 2)),
        )
        q = cute.make_rmem_tensor(4, Float32)
        k = cute.make_rmem_tensor(4, Float32)
        for part in range_constexpr(2):
            pair = cute.make_rmem_tensor(2, Uint32)
            cute.autovec_copy(words[None, lane, part, warp], pair)
            x = k if const_expr(part == 1) else q
            for i in range_constexpr(2):
                x[2 * i] = blocks.low_half(pair[i])
                x[2 * i + 1] = blocks.high_half(pair[i])
        rk, rq, kq = blocks.normalizers(q, k, scale, 32)
        beta = blocks.sigmoid(M.beta[head % 2, warp].to(Float32))
        if lane == 0:
            factors = cute.make_rmem_tensor(4, Float32)
            factors[0], factors[1], factors[2], factors[3] = rk, rq, kq, beta
            cute.autovec_copy(factors, F.factors[None, warp])


@cute.jit
def advance(
    S: cute.Tensor,
    token: Token,
    factors: tuple[Float32, Float32, Float32, Float32],
    F: cutlass.Constexpr,
    t: Int32,
    group: Int32,
    at: Place,
    P: cutlass.Constexpr,
) -> None:
    """A piece by one token, in place; its rows of o to shared memory."""
    warp, lane = at.warp, at.lane
    rows = PIECE_ROWS
    rk, rq, kq, beta = factors
    copies = LANES // (2 * rows)  # lanes that get the same sum
    sums = cute.make_rmem_tensor(2 * rows, Float32)  # S k of all rows, then S q
    for j in range_constexpr(rows):
        w, y = Float32(0), Float32(0)
        for i in range_constexpr(COLUMNS):
            S[i, j] = S[i, j] * token.d[i]
            w += S[i, j] * token.k[i]
            y += S[i, j] * token.q[i]
        sums[j] = w
        sums[rows + j] = y
    total = blocks.row_sums(sums, 2 * rows, LANES, lane)
    row = 16 * warp + 2 * (rows * group + lane % (LANES // 2) // copies) + lane // LANES
    v = cute.make_tensor(
        F.qkv.iterator, cute.make_layout((HEAD_DIM, 3, P.tokens), stride=(1, HEAD_DIM, chunked.QKV_PITCH))
    )
    u = beta * (v[row, 2, t].to(Float32) - rk * total)
    o = rq * total + kq * arch.shuffle_sync_bfly(u, offset=LANES // 2)
    if lane % LANES >= LANES // 2 and lane % copies == 0:
        F.o[row, t] = o.to(BFloat16)
    for j in range_constexpr(rows):
        u_row = rk * arch.shuffle_sync(u, copies * j, mask_and_clamp=HALF_WARP)
        for i in range_constexpr(COLUMNS):
            S[i, j] += u_row * token.k[i]


@cute.jit
def take_gates(gates: cute.Tensor, M: cutlass.Constexpr, at: Place, P: cutlass.Constexpr) -> None:
    """Output gates of the channels that this lane normalizes: four of token WARPS - 1 - warp."""
    token = min(chunked.WARPS - 1 - at.warp, P.tokens - 1)
    quads = cute.make_tensor(M.out_gate.iterator, cute.make_layout((4, 32, P.tokens), stride=(1, 4, HEAD_DIM)))
    cute.autovec_copy(quads[None, at.lane, token], gates)


@cute.jit
def normalize(
    A: Arguments,
    F: cutlass.Constexpr,
    gates: cute.Tensor,
    item: walk.Item,
    live: cutlass.Boolean,
    at: Place,
    P: cutlass.Constexpr,
) -> None:
    """RMSNorm and output gate, a warp per token; zeros for a null item."""
    token, lane = chunked.WARPS - 1 - at.warp, at.lane
    if token < P.tokens:
        quads = cute.make_tensor(F.o.iterator, cute.make_layout((4, 32, P.tokens), stride=(1, 4, HEAD_DIM)))
        weights = cute.make_tensor(F.norm_weight.iterator, cute.make_layout((4, 32), stride=(1, 4)))
        o = cute.make_rmem_tensor(4, BFloat16)
        weight = cute.make_rmem_tensor(4, Float32)
        cute.autovec_copy(quads[None, lane, token], o)
        cute.autovec_copy(weights[None, lane], weight)
        square = Float32(0)
        for e in range_constexpr(4):
            square += o[e].to(Float32) * o[e].to(Float32)
        rms = blocks.rsqrt(blocks.lane_sum(square, 1, 32) * Float32(1 / HEAD_DIM) + A.eps)
        result = cute.make_rmem_tensor(4, BFloat16)
        for e in range_constexpr(4):
            gated = weight[e] * blocks.sigmoid(gates[e].to(Float32))
            y = o[e].to(Float32) * rms * gated
            if not live:
                y = Float32(0)
            result[e] = y.to(BFloat16)
        address = results_of(A, item, P) + (Int64(token * A.heads) * HEAD_DIM + 4 * lane) * 2
        prologue.store_quad(result, address)
