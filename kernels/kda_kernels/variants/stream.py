"""KDA decode, spec and record steps: persistent, two CTAs of 256 threads per SM, the next item
loaded during this one.

projected   [requests * tokens, pitch]     bf16   q, k, v | output gate | f_a | raw beta
conv_state  [slots, 3D, W]                 bf16, dim-first or window-major; read and rolled
state       [slots, heads, V=128, K=128]   f32 or bf16; updated (decode), read and written (spec),
            read (record)
corrections [rows, heads, Q, 128]          f32, written (record)
key_gates   [rows, heads, Q, 256]          bf16, written (record)
out         [requests * tokens, D]         bf16

A CTA walks a run of items that mostly share a head, whose gate weights stay in registers. Its
shared memory holds one state, in cells that only the thread (record: the warp) that copied them
reads, and one or two stages of operands. A piece of the next item's state is asked for as soon as
that of this item has been read: no barrier of the CTA stands between. Per item:
  prologue   gate on tensor cores, convolution; decays, q, k, v to shared memory. Window rolled
  ask        the next item's operands, into the other stage, or as soon as this item's have been
             used
  rows       decode, spec: a half-warp holds a row, a piece is two rows of each; token by token,
             each token's state stored as soon as it is known. Norms are deferred: with S' the
             decayed state,
               u = beta (v - rk S' k),  o = rq S' q + u (k.q) rk rq,  S = S' + u rk k,  rk and rq
                                        the inverse norms
  products   record: vectors as fragments, the triangles solved by one warp, the state multiplied
             piece by piece on tensor cores, corrections and outputs in registers: see
             `kda_kernels.parts.chunked`
  finish     RMSNorm and output gate, behind the barrier that also hands over the next item's
             operands
Barriers per item: 2 (decode), 3 (spec), 5 (record). Null items are computed from whatever is there,
and not stored.

Budget per item at the memory floor of an H200's SM: decode 4.2 us, some 7400 clocks; record q=8 3.0
us, 5200. Needed by count of instructions: a third of the issue slots (decode), two thirds (record
q=8). In flight while both CTAs of an SM are in their prologues: 128 KiB of FP32 states, for which
the SM's part of the bandwidth takes 4 us. Source: docs/operation.md, "The mathematics, per item"
and "The same, chunked".
"""

# A condition known at compile time can't share an `if` with one of the running kernel.
# ruff: noqa: SIM102
from __future__ import annotations

from dataclasses import dataclass, make_dataclass, replace
from typing import Any, Literal, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, Uint32, const_expr, range_constexpr

from kda_kernels import arguments, step, walk
from kda_kernels.arguments import Arguments
from kda_kernels.device import blocks, smem
from kda_kernels.device.gpu import Gpu
from kda_kernels.device.smem import Area, Smem
from kda_kernels.operands import StepOperands
from kda_kernels.parts import chunked, conv_window, gate_product, prologue, state_rows, streaming
from kda_kernels.parts.conv_window import Window
from kda_kernels.parts.prologue import Record
from kda_kernels.parts.state_rows import COLUMNS, HALF_WARP, LANES, PIECE_ROWS
from kda_kernels.parts.streaming import Place, Turn, Weights
from kda_kernels.problem import CONV_WIDTH, HEAD_DIM, Problem
from kda_kernels.step import Compiled

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


arch = cute.arch


@dataclass(frozen=True)
class Options:
    """Compile-time choices; `most_items` and `pdl` are of the launch.

    gate_mode          0: one chain of 8 tensor-core accumulations; 1: four chains of 2, summed in
                       order
    terms              record, BF16 state: terms of the vectors in its products. 2: FP32 precision;
                       1: 4e-4
    stages             of operands, 1 or 2, decode 2; None: as many as fit
    ahead              a CTA's first state is asked for before the PDL wait; its first prologue then
                       waits for it
    evict              evict-first in L2 for states that are read
    stream_hints       decode, spec: stored states are streaming
    conv_weight_dtype  of convolution weight and bias
    window             most entries of a dim-first window; None: those of the problem
    most_items         of a CTA: with more, CTAs come one after the other, each as an SM is ready
                       for it; None: no limit
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
    """What decides the code.

    stages        of operands
    taps_shared   convolution weights wait in cells of shared memory that are private to the
                  threads, not in registers
    """

    stages: int
    taps_shared: bool
    ahead: bool
    evict: bool
    hints: bool

    @property
    def ctas_per_sm(self) -> int:
        return streaming.CTAS_PER_SM

    @property
    def least_log_gate(self) -> float | None:
        return chunked.MIN_LOG_GAMMA if self.kind == "record" else None

    @property
    def pieces(self) -> int:
        """Pieces of a state."""
        return self.lines if self.kind == "record" else 4

    @property
    def piece_bytes(self) -> int:
        """Bytes of a piece."""
        return HEAD_DIM * HEAD_DIM * self.item_bytes // self.pieces

    @property
    def numbers(self) -> int:
        """What a request is looked up by: slot; slot and record row; or the slots of all tokens and
        `accepted`."""
        return {"decode": 1, "record": 2}.get(self.kind, self.tokens + 1)

    @property
    def stage_areas(self) -> dict[str, Area]:
        """An item's operands, and the numbers of the item after."""
        return streaming.operand_areas(self) | {
            "dt_bias": Area(Float32, HEAD_DIM),
            "A_log": Area(Float32, 1),
            "beta": Area(BFloat16, (2, self.tokens)),
            "numbers": Area(Int32, self.numbers),
        }

    @property
    def areas(self) -> dict[str, Area]:
        """What a CTA has beside: the state in cells of 16 bytes, [cell][thread], and room for the
        stages."""
        areas = {
            "state": Area(Uint8, HEAD_DIM * HEAD_DIM * self.item_bytes),
            "stages": Area(Uint8, self.stages * smem.total(self.stage_areas)),
            "norm_weight": Area(Float32, HEAD_DIM),
            "gamma": Area(Float32, self.gamma_bytes // 4),
            "qkv": Area(BFloat16, self.qkv_bytes // 2),
        }
        if self.taps_shared:
            areas["taps"] = streaming.taps_area(self)
        return areas | (_record_areas(self) if self.kind == "record" else _step_areas(self))

    @property
    def smem_bytes(self) -> int:
        return smem.total(self.areas)


def _record_areas(p: Plan) -> dict[str, Area]:
    return {
        # A and B, a part per step.
        "partials": Area(Float32, p.partial_bytes // 4, inside="gamma"),
        "pairs": Area(Float32, p.pair_floats),
        # T and C, then as fragments.
        "matrix": Area(Float32, 2 * p.slots**2),
        # Of o, summed up by slot and warp.
        "squares": Area(Float32, p.slots * chunked.WARPS),
        "fragments": Area(Uint32, p.fragment_bytes // 4),
        "solution": Area(Uint32, 32 * p.solution_words),
    }


def _step_areas(p: Plan) -> dict[str, Area]:
    """Kinds decode and spec, for which gamma holds decays."""
    return {
        # rk, rq, (k.q) rk rq, beta of a token.
        "factors": Area(Float32, (4, p.tokens)),
        "o": Area(BFloat16, (HEAD_DIM, p.tokens)),
    }


def plan(problem: Problem, options: Options) -> Plan:
    layout, window = arguments.window_rules(problem, True, options.window)
    record = problem.kind == "record"
    p = Plan(
        tokens=problem.tokens,
        state_dtype=problem.state_dtype,
        threads=streaming.THREADS,
        layout=layout,
        window=window,
        streamable=True,
        weight_dtype=options.conv_weight_dtype,
        terms=options.terms if record and problem.state_dtype == "bf16" else 2,
        kind=problem.kind,
        gate_mode=options.gate_mode,
        stages=1,
        taps_shared=False,
        ahead=options.ahead,
        evict=options.evict,
        hints=options.stream_hints and not record,
    )
    stages = (
        (options.stages,)
        if options.stages is not None
        else (2,)
        if problem.kind == "decode"
        else (2, 1)
    )
    plans = [replace(p, stages=n, taps_shared=shared) for n in stages for shared in (True, False)]
    return next((p for p in plans if p.smem_bytes <= streaming.SMEM_BYTES), plans[-1])


def unsupported(problem: Problem, options: Options, gpu: Gpu) -> str | None:
    """Why this pair can't run, or None. Pure: no CUDA."""
    if problem.kind not in ("decode", "spec", "record"):
        return f"kind={problem.kind}: only decode, spec and record"
    choices = (
        ("gate_mode", options.gate_mode, (0, 1)),
        ("terms", options.terms, (1, 2)),
        ("stages", options.stages, (None, 2) if problem.kind == "decode" else (None, 1, 2)),
        ("conv_weight_dtype", options.conv_weight_dtype, ("fp32", "bf16")),
    )
    if why := step.not_allowed(choices):
        return why
    return streaming.refused(problem, options, plan(problem, options), gpu)


def compile(problem: Problem, options: Options, gpu: Gpu) -> Compiled:
    """From shapes alone; one binary serves all heads, requests and strides. Raises ValueError for
    unsupported pairs."""
    step.require("KdaStream", unsupported(problem, options, gpu))
    return step.build(_HOST, plan(problem, options), options, gpu)


def launch(compiled: Compiled, operands: StepOperands, stream: int) -> None:
    """Enqueue one step. Raises ValueError, naming the operand, for operands that the compiled
    kernel can't take."""
    heads, requests = operands.A_log.shape[0], operands.slots.shape[0]
    runs = walk.BY_HEAD.runs(heads, requests, compiled.sms, compiled.most_items)
    step.enqueue("KdaStream", compiled, operands, stream, runs.grid, runs.per)


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
    here = streaming.place()
    ctas, _, _ = arch.grid_dim()
    item, count = walk.BY_HEAD.first(cta, ctas, A.per, A.heads, A.requests)

    # The slot must be the first load: behind the copies it comes back a microsecond later.
    numbers = blocks.at(
        Int32, streaming.number_address(A, item.request, min(here.lane, P.numbers - 1), P), Int32(0)
    )
    own = smem.allocate(P.areas)
    stage = own.stages.iterator.toint()
    both_stages = 2 * stage + smem.total(P.stage_areas)
    weights = streaming.weight_registers(P)
    numbers = ask_first(A, with_stage(own, stage, P), weights, item, numbers, count, here, P)

    for index in cutlass.range(count, unroll=1):
        at = streaming.place()
        M = with_stage(own, stage, P)
        now = request_of(numbers, P)
        window = conv_window.window_of(A, now.page, now.start)
        record = prologue.record_of(A, now.row, item.head)
        following = M.numbers[min(at.lane, P.numbers - 1)]
        if index + 1 == count:
            following = Int32(0)
        turn = Turn(item, numbers, following, index, count)

        prepare(A, M, weights, record, window, at, P)
        if const_expr(P.layout == "taps"):
            if now.read > 0:
                streaming.store_window_major(A, M, window, item.head, at, P)
        at = streaming.meet()

        if const_expr(P.layout == "rows"):
            if now.read > 0:
                streaming.store_dim_first(A, M, window, item.head, at)
        other = both_stages - stage if const_expr(P.stages == 2) else stage
        if const_expr(P.stages == 2):
            ask_next(A, with_stage(own, other, P), turn, at, P)
        if const_expr(P.kind == "record"):
            at = record_item(A, M, weights, turn, at, P)
        else:
            at = step_item(A, M, weights, turn, now, at, P)

        later = streaming.after(A, item)
        if later.head != item.head:
            streaming.settle_weights(A, weights, at, P)
        item, numbers, stage = later, following, other


@cute.jit
def ask_first(
    A: Arguments,
    M: Smem,
    weights: Weights,
    item: walk.Item,
    numbers: Int32,
    count: Int32,
    at: Place,
    P: cutlass.Constexpr,
) -> Int32:
    """A CTA's first item: its operands, of `count` items, are there, its state is asked for.
    Returns its numbers."""
    streaming.ask_constants(A, M, at, P)
    streaming.ask_parameters(A, M, item, count > 0, count > 1, at, P)
    if const_expr(not P.ahead):
        arch.griddepcontrol_wait()
        arch.griddepcontrol_launch_dependents()
        streaming.ask_projection(A, M, item, at, P)
    # So that nothing later waits for the gate weights on its behalf.
    numbers = blocks.pinned(numbers)
    ask_window(A, M, numbers, item.head, at, P)
    if const_expr(not P.ahead):
        arch.cp_async_commit_group()
    streaming.load_weights(A, weights, item.head, Int32(0), at, P)
    # Keeps these loads in front of the state's copies: behind them, they would come late.
    arch.sync_warp()
    ask_state(A, M, numbers, item.head, at, P)
    if const_expr(P.ahead):
        arch.griddepcontrol_wait()
        arch.griddepcontrol_launch_dependents()
        streaming.ask_projection(A, M, item, at, P)
        arch.cp_async_commit_group()
        arch.cp_async_wait_group(0)
    else:
        arch.cp_async_wait_group(P.pieces)
    arch.sync_threads()
    streaming.settle_weights(A, weights, at, P)
    return numbers


@cute.jit
def prepare(
    A: Arguments,
    M: Smem,
    weights: Weights,
    record: Record,
    window: Window,
    at: Place,
    P: cutlass.Constexpr,
) -> None:
    """The gate's decays, multiplied up in kind record; q, k and v, of a dim-first window rolled."""
    raw = gate_product.raw_gates(weights.gate, M.f_a, at.lane, P)
    if const_expr(P.kind == "record"):
        exp_A = blocks.exp(M.A_log[0])
        chunked.store_gammas(
            raw, M.gamma, M.dt_bias, exp_A, A.lower_bound, record, at.warp, at.lane, P
        )
    else:
        store_decays(raw, M, A.lower_bound, at, P)
    if at.warp < chunked.CONVOLVING_WARPS:
        if const_expr(P.taps_shared):
            cute.autovec_copy(M.taps[None, at.tid, None], weights.taps)
        bias = weights.taps[None, CONV_WIDTH]
        chunked.convolve_with(weights.taps, bias, M, M.qkv, window, record, at.tid, P)


@cute.jit
def record_item(
    A: Arguments, M: Smem, weights: Weights, turn: Turn, at: Place, P: cutlass.Constexpr
) -> Place:
    """Products and finish of an item that is only read, in the chunked form."""
    beta = M.beta[turn.item.head % 2, min(at.lane % P.slots, P.tokens - 1)].to(Float32)
    if const_expr(P.stages == 1):
        factors = chunked.output_factors(M.out_gate, M.norm_weight, at.warp, at.lane, P)
    chunked.build_fragments(
        M.fragments, M.qkv, M.gamma, A.scale, at.warp, chunked.WARPS, at.lane, P
    )
    at = streaming.meet()
    chunked.token_products(M.fragments, M.partials, at.warp, at.lane, P)
    at = streaming.meet()
    if at.warp == chunked.SOLVER:
        chunked.solve(M.partials, M.pairs, M.matrix, M.solution, blocks.sigmoid(beta), at.lane, P)
    if const_expr(P.stages == 1):
        ask_next(A, M, turn, at, P)
    streaming.refresh_weights(A, weights, turn, at, P)
    sums = multiply(A, M, turn, P)
    v = chunked.values(M.qkv, at.warp, at.lane, P)
    if const_expr(P.stages == 2):
        factors = chunked.output_factors(M.out_gate, M.norm_weight, at.warp, at.lane, P)
    at = streaming.meet()
    now = request_of(blocks.pinned(turn.numbers), P)
    at = streaming.finish(A, M, turn.item, now.read, now.row, sums, v, factors, at, P)
    return at


@cute.jit
def step_item(
    A: Arguments,
    M: Smem,
    weights: Weights,
    turn: Turn,
    now: Request,
    at: Place,
    P: cutlass.Constexpr,
) -> Place:
    """Rows and finish of an item that is advanced token by token, kinds decode and spec."""
    gates = cute.make_rmem_tensor(4, BFloat16)
    if const_expr(P.stages == 1):
        take_gates(gates, M, at, P)
    if const_expr(P.kind == "spec"):
        token_factors(M, A.scale, turn.item.head, at, P)
        at = streaming.meet()
        if const_expr(P.stages == 1):
            ask_next(A, M, turn, at, P)
        streaming.refresh_weights(A, weights, turn, at, P)
        advance_window(A, M, turn, at, P)
    else:
        beta = blocks.sigmoid(M.beta[turn.item.head % 2, 0].to(Float32))
        streaming.refresh_weights(A, weights, turn, at, P)
        advance_decode(A, M, turn, beta, at, P)
    arch.cp_async_wait_group(P.pieces)
    at = streaming.meet()
    if const_expr(P.stages == 2):
        take_gates(gates, M, at, P)
    normalize(A, M, gates, turn.item, now.read > 0, at, P)
    return at


def with_stage(M: Smem, address: Int32, P: Plan) -> Any:
    """A CTA's shared memory with the operands in the stage at an address of it."""
    views = vars(M) | vars(smem.at(P.stage_areas, address))
    # As `smem` says of its bundles: frozen, or the tracer takes it apart.
    return make_dataclass("Smem", views, frozen=True)(**views)


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
def ask_next(A: Arguments, M: Smem, turn: Turn, at: Place, P: cutlass.Constexpr) -> None:
    """All operands of the item after this one, as one group of copies."""
    if turn.left > 0:
        later = streaming.after(A, turn.item)
        streaming.ask_parameters(A, M, later, later.head != turn.item.head, turn.left > 1, at, P)
        ask_window(A, M, turn.following, later.head, at, P)
        streaming.ask_projection(A, M, later, at, P)
    arch.cp_async_commit_group()


@cute.jit
def ask_window(
    A: Arguments, M: Smem, numbers: Int32, head: Int32, at: Place, P: cutlass.Constexpr
) -> None:
    request = request_of(numbers, P)
    if request.read > 0:
        window = conv_window.window_of(A, request.page, request.start)
        streaming.ask_window(A, M, window, head, at, P)


@cute.jit
def ask_state(
    A: Arguments, M: Smem, numbers: Int32, head: Int32, at: Place, P: cutlass.Constexpr
) -> None:
    """A CTA's first state, a group of copies per piece."""
    slot = request_of(numbers, P).read
    for piece in range_constexpr(P.pieces):
        if slot > 0:
            ask_piece(M, prologue.state_of(A, slot, head, P), Int32(piece), at, P)
        arch.cp_async_commit_group()


@cute.jit
def ask_piece(M: Smem, page: Int64, piece: Int32, at: Place, P: cutlass.Constexpr) -> None:
    cells = cells_of(M, piece, at, P)
    policy = blocks.evict_first() if const_expr(P.evict) else Int64(0)
    if const_expr(P.kind == "record"):
        chunked.copy_line(cells, page, piece, at.warp, at.lane, policy, P.evict, P)
    else:
        state_rows.ask_piece(
            cells, page + state_rows.first_cell(piece, at.warp, at.lane, P), 0, policy, P
        )


@cute.jit
def cells_of(M: Smem, piece: Int32, at: Place, P: cutlass.Constexpr) -> Int32:
    """Shared address of this thread's first cell of a piece."""
    return M.state.iterator.toint() + at.tid * 16 + piece * P.piece_bytes


@cute.jit
def multiply(A: Arguments, M: Smem, turn: Turn, P: cutlass.Constexpr) -> cute.Tensor:
    """Products of the state with the vectors; each piece is replaced by that of the next item.

    As many groups are younger than a piece that is waited for, whichever it is: its successors, the
    operands, and the next item's pieces before it.
    """
    sums = chunked.accumulators(P)
    slot = request_of(turn.following, P).read
    page = prologue.state_of(A, slot, streaming.after(A, turn.item).head, P)
    for piece in cutlass.range(P.pieces, unroll=1):
        at = streaming.place()
        arch.cp_async_wait_group(P.pieces)
        cells = cells_of(M, piece, at, P)
        chunked.multiply_line(sums, cells, M.fragments, piece, at.lane, P)
        arch.sync_warp()  # all lanes have read it
        if slot > 0:
            ask_piece(M, page, piece, at, P)
        arch.cp_async_commit_group()
    return sums


@cute.jit
def advance_decode(
    A: Arguments, M: Smem, turn: Turn, beta: Float32, at: Place, P: cutlass.Constexpr
) -> None:
    """The state by one token, back to its page; its pieces as in `multiply`."""
    token = take_token(M, Int32(0), at.lane, P)
    factors = (*blocks.normalizers(token.q, token.k, A.scale, LANES), beta)
    slot = request_of(turn.following, P).read
    page = prologue.state_of(A, slot, streaming.after(A, turn.item).head, P)
    target = prologue.state_of(A, turn.numbers, turn.item.head, P)
    for piece in cutlass.range(P.pieces, unroll=1):
        arch.cp_async_wait_group(P.pieces)
        S = take_piece(cells_of(M, piece, at, P), P)
        if slot > 0:
            ask_piece(M, page, piece, at, P)
        arch.cp_async_commit_group()
        advance(S, token, factors, M, Int32(0), piece, at, P)
        if turn.numbers > 0:
            store_piece(S, target + state_rows.first_cell(piece, at.warp, at.lane, P), P)


@cute.jit
def advance_window(A: Arguments, M: Smem, turn: Turn, at: Place, P: cutlass.Constexpr) -> None:
    """The state by all tokens; after each it goes to the token's slot. Its pieces as in
    `multiply`."""
    live = request_of(turn.numbers, P).read > 0
    slot = request_of(turn.following, P).read
    page = prologue.state_of(A, slot, streaming.after(A, turn.item).head, P)
    for piece in cutlass.range(P.pieces, unroll=1):
        at = streaming.place()
        arch.cp_async_wait_group(P.pieces)
        S = take_piece(cells_of(M, piece, at, P), P)
        if slot > 0:
            ask_piece(M, page, piece, at, P)
        arch.cp_async_commit_group()
        for t in cutlass.range(P.tokens, unroll=1):
            token = take_token(M, t, at.lane, P)
            factors = cute.make_rmem_tensor(4, Float32)
            cute.autovec_copy(M.factors[None, t], factors)
            of_token = (factors[0], factors[1], factors[2], factors[3])
            advance(S, token, of_token, M, t, piece, at, P)
            own = arch.shuffle_sync(turn.numbers, t)
            if live and own > 0:
                item_state = prologue.state_of(A, own, turn.item.head, P)
                store_piece(S, item_state + state_rows.first_cell(piece, at.warp, at.lane, P), P)


@cute.jit
def take_piece(cells: Int32, P: cutlass.Constexpr) -> cute.Tensor:
    """A piece from its cells to registers, [columns, rows]."""
    S = cute.make_rmem_tensor((COLUMNS, PIECE_ROWS), Float32)
    for j in range_constexpr(PIECE_ROWS):
        raw = state_rows.take_row(cells, j, P)
        for i in range_constexpr(COLUMNS):
            S[i, j] = raw[i].to(Float32)
    return S


@cute.jit
def store_piece(S: cute.Tensor, target: Int64, P: cutlass.Constexpr) -> None:
    """A piece to its place in a page."""
    for j in range_constexpr(PIECE_ROWS):
        raw = cute.make_rmem_tensor(COLUMNS, P.dtype)
        for i in range_constexpr(COLUMNS):
            raw[i] = S[i, j].to(P.dtype)
        state_rows.store_row(raw, target + 2 * j * HEAD_DIM * P.item_bytes, P)


@cute.jit
def store_decays(
    raw: tuple[Float32, ...],
    M: Smem,
    lower_bound: Float32,
    at: Place,
    P: cutlass.Constexpr,
) -> None:
    """Decays of 16 features of all tokens from `gate_product.raw_gates`."""
    feature = 16 * at.warp + at.lane // 4 * 2
    decays = cute.make_tensor(
        M.gamma.iterator,
        cute.make_layout((2, HEAD_DIM // 2, P.tokens), stride=(1, 2, chunked.GAMMA_PITCH)),
    )
    exp_A = blocks.exp(M.A_log[0])
    for side in range_constexpr(min(2, P.tokens)):
        token = at.lane % 4 * 2 + side
        pair = cute.make_rmem_tensor(2, Float32)
        for i in range_constexpr(2):
            rounded = blocks.rounded(raw[2 * i + side])
            pair[i] = blocks.exp(
                blocks.log_decay(rounded, M.dt_bias[feature + i], exp_A, lower_bound)
            )
        if token < P.tokens:
            cute.autovec_copy(pair, decays[None, feature // 2, token])


class Token(NamedTuple):
    """q, k and decay of a token in this lane's columns, in the order of its cells of a row."""

    q: cute.Tensor
    k: cute.Tensor
    d: cute.Tensor


@cute.jit
def take_token(M: Smem, t: Int32, lane: Int32, P: cutlass.Constexpr) -> Token:
    """Columns 64 c + 4 l .. +3 (fp32) or 8 l .. +7 (bf16), l the lane of its half-warp."""
    fp32 = P.state_dtype == "fp32"
    words = cute.make_tensor(
        cute.recast_ptr(M.qkv.iterator, dtype=Uint32),
        cute.make_layout(
            (2, LANES, 2, 3, P.tokens),
            stride=(1, 2 if fp32 else 4, 32 if fp32 else 2, HEAD_DIM // 2, chunked.QKV_PITCH // 2),
        ),
    )
    decays = cute.make_tensor(
        M.gamma.iterator,
        cute.make_layout(
            (4, LANES, 2, P.tokens),
            stride=(1, 4 if fp32 else 8, 64 if fp32 else 4, chunked.GAMMA_PITCH),
        ),
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
    M: Smem,
    scale: Float32,
    head: Int32,
    at: Place,
    P: cutlass.Constexpr,
) -> None:
    """rk, rq, (k.q) rk rq and beta, a warp per token."""
    warp, lane = at.warp, at.lane
    if warp < P.tokens:
        words = cute.make_tensor(
            cute.recast_ptr(M.qkv.iterator, dtype=Uint32),
            cute.make_layout(
                (2, 32, 3, P.tokens), stride=(1, 2, HEAD_DIM // 2, chunked.QKV_PITCH // 2)
            ),
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
            cute.autovec_copy(factors, M.factors[None, warp])


@cute.jit
def advance(
    S: cute.Tensor,
    token: Token,
    factors: tuple[Float32, Float32, Float32, Float32],
    M: Smem,
    t: Int32,
    piece: Int32,
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
    row = 16 * warp + 2 * (rows * piece + lane % (LANES // 2) // copies) + lane // LANES
    v = cute.make_tensor(
        M.qkv.iterator,
        cute.make_layout((HEAD_DIM, 3, P.tokens), stride=(1, HEAD_DIM, chunked.QKV_PITCH)),
    )
    u = beta * (v[row, 2, t].to(Float32) - rk * total)
    o = rq * total + kq * arch.shuffle_sync_bfly(u, offset=LANES // 2)
    if lane % LANES >= LANES // 2 and lane % copies == 0:
        M.o[row, t] = o.to(BFloat16)
    for j in range_constexpr(rows):
        u_row = rk * arch.shuffle_sync(u, copies * j, mask_and_clamp=HALF_WARP)
        for i in range_constexpr(COLUMNS):
            S[i, j] += u_row * token.k[i]


@cute.jit
def take_gates(gates: cute.Tensor, M: Smem, at: Place, P: cutlass.Constexpr) -> None:
    """Output gates of the channels that this lane normalizes: four of token WARPS - 1 - warp."""
    token = min(chunked.WARPS - 1 - at.warp, P.tokens - 1)
    quads = cute.make_tensor(
        M.out_gate.iterator, cute.make_layout((4, 32, P.tokens), stride=(1, 4, HEAD_DIM))
    )
    cute.autovec_copy(quads[None, at.lane, token], gates)


@cute.jit
def normalize(
    A: Arguments,
    M: Smem,
    gates: cute.Tensor,
    item: walk.Item,
    live: cutlass.Boolean,
    at: Place,
    P: cutlass.Constexpr,
) -> None:
    """RMSNorm and output gate, a warp per token; zeros for a null item."""
    token, lane = chunked.WARPS - 1 - at.warp, at.lane
    if token < P.tokens:
        quads = cute.make_tensor(
            M.o.iterator, cute.make_layout((4, 32, P.tokens), stride=(1, 4, HEAD_DIM))
        )
        weights = cute.make_tensor(M.norm_weight.iterator, cute.make_layout((4, 32), stride=(1, 4)))
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
        address = (
            streaming.results_of(A, item, P) + (Int64(token * A.heads) * HEAD_DIM + 4 * lane) * 2
        )
        prologue.store_quad(result, address)


_HOST = step.host_of(kda_stream)
