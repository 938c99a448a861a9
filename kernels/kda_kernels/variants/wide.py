"""KDA decode, spec and record steps, one CTA of 256 threads per item, two or three per SM, any
convolution layout.

projected   [requests * tokens, pitch]     bf16   q, k, v | output gate | f_a | raw beta
conv_state  [slots, 3D, W]                 bf16, any strides; read and rolled
state       [slots, heads, V=128, K=128]   f32 or bf16; updated (decode), read and written (spec),
            read (record)
corrections [rows, heads, Q, 128]          f32, written (record)
key_gates   [rows, heads, Q, 256]          bf16, written (record)
out         [requests * tokens, D]         bf16

All kinds begin alike; the state comes to shared memory meanwhile, in pieces that no barrier of the
CTA stands before:
  load      slot; weights, projection, window (cp.async); gate and convolution weights (registers);
            state (cp.async)
  gate      gate projection on tensor cores, its decays; raw gates stored (record)
  convolve  q, k, v of all tokens; keys stored (record), window rolled
Kind record, the chunked form. A warp's lines of the state are its own:
  build     norms, and the 2q vectors as fragments
  solve     A and B, a part per warp; one warp turns them into the triangles T and C
  multiply  the state, line by line. Fewer lines than there are may have room: the others follow as
            these are used up
  finish    corrections and outputs by one more small product, in registers; RMSNorm over the CTA
Kinds decode and spec, token by token: a half-warp holds a row, and a thread the same columns of all
its rows. Rows are advanced some at a time, by all tokens, and stored as soon as they are computed.
Source: docs/operation.md, "The mathematics, per item" and "The same, chunked".
"""

# A condition known at compile time can't share an `if` with one of the running kernel.
# ruff: noqa: SIM102
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, Uint32, const_expr, range_constexpr

from kda_kernels import arguments, step
from kda_kernels.arguments import Arguments
from kda_kernels.device import blocks, smem
from kda_kernels.device.gpu import RESERVED_SMEM_BYTES, SM_SMEM_BYTES, Gpu
from kda_kernels.device.smem import Area, Smem
from kda_kernels.operands import StepOperands
from kda_kernels.parts import (
    chunked,
    conv_window,
    gate_product,
    prologue,
    state_rows,
    wide_prologue,
)
from kda_kernels.parts.conv_window import Window
from kda_kernels.parts.prologue import Place, Record
from kda_kernels.parts.state_rows import COLUMNS, HALF_WARP, LANES, PIECE_ROWS
from kda_kernels.problem import CONV_WIDTH, HEAD_DIM, HISTORY, MAX_TOKENS, Problem
from kda_kernels.step import Compiled

KERNELS = ("kda_wide",)
KINDS = ("decode", "spec", "record")
RULE = "wide_items"
TRIED = {"gate_mode": (0, 1), "ctas": (None, 1, 2, 3, 4)}
GIVEN = ("terms", "streamable", "conv_weight_dtype", "window")


def forms(kind: str, state_dtype: str) -> list[dict[str, object]]:
    """Every form that is another kernel."""
    form = "chunked" if kind == "record" else "recurrence"
    found: list[dict[str, object]] = [
        {"form": form, "gate_mode": gate_mode, "terms": terms}
        for gate_mode in (0, 1)
        for terms in ((1, 2) if (kind, state_dtype) == ("record", "bf16") else (2,))
    ]
    if (kind, state_dtype) == ("record", "fp32"):
        found.append({"form": form, "gate_mode": 1, "terms": 2, "ctas": 3})
    return found


_THREADS = 32 * chunked.WARPS
_PIECES = 4
"""Pieces in which the rows of a decode or spec step arrive."""
_PASSES = 2
"""A spec step's rows in turn: a thread keeps a pass's, of eight columns each, in registers."""
_PASS_ROWS = HEAD_DIM // 16 // _PASSES

arch = cute.arch
GMEM = cutlass.AddressSpace.gmem
SMEM = cutlass.AddressSpace.smem


@dataclass(frozen=True)
class Options:
    """Compile-time choices, and `pdl` of the launch.

    form               chunked: kind record; recurrence, token by token: the others
    gate_mode          0: one chain of 8 tensor-core accumulations; 1: four chains of 2, summed in
                       order
    ctas               CTAs per SM to have room for; a record whose state is too large for it gets
                       it by fewer lines at a time. None: as many as hold whole states, at most
                       `most_ctas`
    evict              evict-first in L2 for the state
    stream_hints       stored states are streaming
    terms              chunked, BF16 state: terms of the vectors in its products. 2: FP32 precision;
                       1: 4e-4
    streamable         16-byte copies of projection and window (docs/operation.md, "Streamable");
                       False: by element
    conv_weight_dtype  of convolution weight and bias
    window             most entries of a dim-first window that is copied whole; None: those of the
                       problem
    pdl                programmatic dependent launch
    """

    form: Literal["recurrence", "chunked"] = "recurrence"
    gate_mode: int = 0
    ctas: int | None = None
    evict: bool = False
    stream_hints: bool = False
    terms: int = 2
    streamable: bool = True
    conv_weight_dtype: Literal["fp32", "bf16"] = "fp32"
    window: int | None = None
    pdl: bool = False


@dataclass(frozen=True)
class Plan(chunked.Shape):
    """What decides the code.

    staged        lines of the state that there is room for
    ctas_per_sm   by which registers are capped
    gate_bytes    of a lane in one load of gate weights, 16 or 8
    """

    evict: bool
    hints: bool
    staged: int
    ctas_per_sm: int
    gate_bytes: int

    @property
    def least_log_gate(self) -> float | None:
        return chunked.MIN_LOG_GAMMA if self.kind == "record" else None

    @property
    def areas(self) -> dict[str, Area]:
        tokens, entries = self.tokens, self.history + self.tokens
        x = {
            "x": Area(BFloat16, (HEAD_DIM, 3, entries)),
            "f_a": Area(BFloat16, tokens * HEAD_DIM, inside="x", skip=6 * HEAD_DIM * entries),
            "window": Area(BFloat16, (HEAD_DIM, 3, entries), inside="x"),
        }
        if self.layout == "rows":
            x["window"] = Area(BFloat16, 3 * HEAD_DIM * self.window)
        vectors = {
            "dt_bias": Area(Float32, HEAD_DIM),
            "norm_weight": Area(Float32, HEAD_DIM),
            "out_gate": Area(BFloat16, (HEAD_DIM, tokens)),
            "A_log": Area(Float32, 1),
            "beta": Area(BFloat16, (2, tokens)),
        }
        state = Area(Uint8, self.staged * chunked.LINE_BYTES)
        return {"state": state} | x | vectors | _OWN_AREAS[self.kind](self)

    @property
    def smem_bytes(self) -> int:
        return smem.total(self.areas)

    @property
    def fits(self) -> bool:
        return self.ctas_per_sm * (self.smem_bytes + RESERVED_SMEM_BYTES) <= SM_SMEM_BYTES


def _decode_areas(p: Plan) -> dict[str, Area]:
    """q, k, decay and v; sums of squares of o by warp."""
    return {"vectors": Area(Float32, 4 * HEAD_DIM), "sums": Area(Float32, chunked.WARPS)}


def _spec_areas(p: Plan) -> dict[str, Area]:
    """Decays of each token; outputs in the place of x."""
    return {
        "gamma": Area(Float32, p.gamma_bytes // 4),
        "qkv": Area(BFloat16, p.qkv_bytes // 2),
        "factors": Area(Float32, (4, p.tokens)),
        "o": Area(BFloat16, (HEAD_DIM, p.tokens), inside="x"),
    }


def _record_areas(p: Plan) -> dict[str, Area]:
    """Fragments in the place of x and f_a; A and B, a part per step, in that of gamma; T and C,
    also as fragments; sums of squares of o by slot and warp."""
    return {
        "fragments": Area(Uint8, p.fragment_bytes, inside="x"),
        "gamma": Area(Float32, p.gamma_bytes // 4),
        "partials": Area(Float32, p.partial_bytes // 4, inside="gamma"),
        "qkv": Area(BFloat16, p.qkv_bytes // 2),
        "pairs": Area(Float32, p.pair_floats),
        "matrix": Area(Float32, 2 * p.slots**2),
        "solution": Area(Uint32, 32 * p.solution_words),
        "sums": Area(Float32, p.slots * chunked.WARPS),
    }


_OWN_AREAS = {"decode": _decode_areas, "spec": _spec_areas, "record": _record_areas}


def plan(problem: Problem, options: Options) -> Plan:
    layout, window = arguments.window_rules(problem, options.streamable, options.window)

    def with_room(staged: int, ctas: int) -> Plan:
        return Plan(
            tokens=problem.tokens,
            state_dtype=problem.state_dtype,
            threads=_THREADS,
            layout=layout,
            window=window,
            streamable=options.streamable,
            weight_dtype=options.conv_weight_dtype,
            terms=2 if problem.state_dtype == "fp32" or problem.kind != "record" else options.terms,
            kind=problem.kind,
            evict=options.evict,
            hints=options.stream_hints and problem.kind != "record",
            gate_mode=options.gate_mode,
            staged=staged,
            ctas_per_sm=ctas,
            # Sixteen spill at the registers of three or four CTAs per SM.
            gate_bytes=8 if problem.kind == "decode" else 16,
        )

    lines = with_room(0, 1).lines
    if options.ctas is None:
        ctas = range(most_ctas(problem, options), 1, -1)
        return next((p for c in ctas if (p := with_room(lines, c)).fits), with_room(lines, 1))
    fewest = 2 if problem.kind == "record" else lines
    plans = (with_room(staged, options.ctas) for staged in range(lines, fewest, -1))
    return next((p for p in plans if p.fits), with_room(fewest, options.ctas))


def most_ctas(problem: Problem, options: Options) -> int:
    """CTAs per SM that a thread has enough registers for, on all targets."""
    if problem.kind == "record":
        return (
            2
            if (problem.state_dtype, options.terms, problem.tokens) == ("bf16", 2, MAX_TOKENS)
            else 3
        )
    return 2 if problem.kind == "spec" else 4 if problem.state_dtype == "bf16" else 3


def unsupported(problem: Problem, options: Options, gpu: Gpu) -> str | None:
    """Why this pair can't run, or None. Pure: no CUDA."""
    if problem.kind not in ("decode", "spec", "record"):
        return f"kind={problem.kind}: only decode, spec and record"
    form = "chunked" if problem.kind == "record" else "recurrence"
    for name, value, allowed in (
        ("form", options.form, (form,)),
        ("gate_mode", options.gate_mode, (0, 1)),
        ("ctas", options.ctas, (None, 1, 2, 3, 4)),
        ("terms", options.terms, (1, 2)),
        ("conv_weight_dtype", options.conv_weight_dtype, ("fp32", "bf16")),
    ):
        if value not in allowed:
            return f"{name}={value!r}: kind={problem.kind} takes {', '.join(map(str, allowed))}"
    if why := step.window_refused(problem, options.window) or step.grid_refused(problem):
        return why
    p = plan(problem, options)
    if why := step.gate_refused(problem, p.least_log_gate):
        return why
    if not p.fits or p.smem_bytes > gpu.smem_per_block:
        return f"{p.smem_bytes} bytes of shared memory leave no room for ctas={p.ctas_per_sm}"
    return None


def compile(problem: Problem, options: Options, gpu: Gpu) -> Compiled:
    """From shapes alone; one binary serves all heads, requests and strides. Raises ValueError for
    unsupported pairs."""
    step.require("KdaWide", unsupported(problem, options, gpu))
    p = plan(problem, options)
    if _few_registers(p, gpu):
        p = replace(p, gate_bytes=8)
    return step.build(_HOSTS[p.kind], p, options, gpu)


def _few_registers(p: Plan, gpu: Gpu) -> bool:
    """Where gate weights by sixteen bytes spill in a record step."""
    return (
        p.kind == "record"
        and (p.ctas_per_sm > 2 or p.state_dtype == "bf16")
        and gpu.arch != "sm_90a"
    )


def launch(compiled: Compiled, operands: StepOperands, stream: int) -> None:
    """Enqueue one step. Raises ValueError, naming the operand, for operands that the compiled
    kernel can't take."""
    grid = (operands.A_log.shape[0], operands.slots.shape[0], 1)
    step.enqueue("KdaWide", compiled, operands, stream, grid)


@cute.kernel
def kda_wide_record(A: Arguments, P: cutlass.Constexpr) -> None:
    at = wide_prologue.place(A)
    _, request, _ = arch.block_idx()
    warp, lane = at.warp, at.lane

    # The slot must be the first load: behind the copies it comes back a microsecond later.
    page = blocks.at(Int32, A.slots + Int64(request) * A.slots_stride * 4, Int32(0))
    row = blocks.at(Int32, A.record_rows, request)

    M = smem.allocate(P.areas)
    results = begin(A, M, request, at, P)
    if page > 0:
        window = ask_window(A, M, page, Int32(0), at, P)
        # So that nothing later waits for the weights on its behalf.
        row = blocks.pinned(row)
        weights = load_weights(A, at, P)
        item = prologue.state_of(A, page, at.head, P)
        cells = M.state.iterator.toint() + at.tid * 16
        policy = blocks.evict_first() if const_expr(P.evict) else Int64(0)
        for line in range_constexpr(P.staged):
            chunked.copy_line(
                cells + line * chunked.LINE_BYTES, item, Int32(line), warp, lane, policy, P.evict, P
            )
            arch.cp_async_commit_group()
        arch.cp_async_wait_group(P.staged)
        arch.sync_threads()

        record = prologue.record_of(A, row, at.head)
        raw = gate_product.product(weights.gate, M.f_a, lane, P)
        exp_A = blocks.exp(M.A_log[0])
        chunked.store_gammas(raw, M.gamma, M.dt_bias, exp_A, A.lower_bound, record, warp, lane, P)
        if warp < chunked.CONVOLVING_WARPS:
            chunked.convolve_with(weights.taps, weights.bias, M, M.qkv, window, record, at.tid, P)
        if const_expr(P.layout != "rows"):
            conv_window.store_all(M, window, at, P)
        arch.sync_threads()

        chunked.build_fragments(M.fragments, M.qkv, M.gamma, A.scale, warp, chunked.WARPS, lane, P)
        if const_expr(P.layout == "rows"):
            conv_window.store_all(M, window, at, P)
        arch.sync_threads()

        chunked.token_products(M.fragments, M.partials, warp, lane, P)
        arch.sync_threads()
        if warp == chunked.SOLVER:
            beta = blocks.sigmoid(
                M.beta[at.head % 2, min(lane % P.slots, P.tokens - 1)].to(Float32)
            )
            chunked.solve(M.partials, M.pairs, M.matrix, M.solution, beta, lane, P)

        sums = chunked.accumulators(P)
        # Rolled: the compiler would put off the products of a line until the last one has arrived.
        for line in cutlass.range(P.lines, unroll=1):
            arch.cp_async_wait_group(P.staged - 1)
            place = cells + line % P.staged * chunked.LINE_BYTES
            chunked.multiply_line(sums, place, M.fragments, line, lane, P)
            if const_expr(P.staged < P.lines):
                if line + P.staged < P.lines:
                    arch.sync_warp()
                    chunked.copy_line(place, item, line + P.staged, warp, lane, policy, P.evict, P)
            arch.cp_async_commit_group()
        v = chunked.values(M.qkv, warp, lane, P)
        # The solver comes last; nobody could be done before it.
        arch.sync_threads()
        u, attended = chunked.finish(sums, v, M.solution, lane, P)
        factors = chunked.output_factors(M.out_gate, M.norm_weight, warp, lane, P)
        o = cute.make_rmem_tensor(4, Float32)
        for i in range_constexpr(4):
            o[i] = attended[i].to(BFloat16).to(Float32)
        chunked.store_squares(o, M.sums, warp, lane, P)
        if row >= 0:
            chunked.store_corrections(u, record.corrections, warp, lane, P)
        arch.sync_threads()
        chunked.store_outputs(o, factors, M.sums, A.eps, results, at.D, warp, lane, P)
    else:
        skip(results, at, P)


@cute.kernel
def kda_wide_decode(A: Arguments, P: cutlass.Constexpr) -> None:
    at = wide_prologue.place(A)
    _, request, _ = arch.block_idx()
    warp, lane = at.warp, at.lane

    # The slot must be the first load: behind the copies it comes back a microsecond later.
    page = blocks.at(Int32, A.slots + Int64(request) * A.slots_stride * 4, Int32(0))

    M = smem.allocate(P.areas)
    results = begin(A, M, request, at, P)
    if page > 0:
        window = ask_window(A, M, page, Int32(0), at, P)
        weights = load_weights(A, at, P)
        item = prologue.state_of(A, page, at.head, P) + state_rows.first_cell(
            Int32(0), warp, lane, P
        )
        cells = M.state.iterator.toint() + at.tid * 16
        ask_state(cells, item, P)
        arch.cp_async_wait_group(_PIECES)
        arch.sync_threads()

        raw = gate_product.product(weights.gate, M.f_a, lane, P)
        store_decay(raw, M, A.lower_bound, at, P)
        if warp < chunked.CONVOLVING_WARPS:
            convolve_token(M, weights, window, at, P)
        if const_expr(P.layout != "rows"):
            conv_window.store_all(M, window, at, P)
        arch.sync_threads()

        # This lane's columns, in the order of its cells of a row.
        k = take_vector(M, 1, lane, P)
        q = take_vector(M, 0, lane, P)
        d = take_vector(M, 2, lane, P)
        rk, rq, kq = blocks.normalizers(q, k, A.scale, LANES)
        dk = cute.make_rmem_tensor(COLUMNS, Float32)
        dq = cute.make_rmem_tensor(COLUMNS, Float32)
        for i in range_constexpr(COLUMNS):
            k[i] = k[i] * rk
            dk[i] = k[i] * d[i]
            dq[i] = q[i] * rq * d[i]
        beta = blocks.sigmoid(M.beta[at.head % 2, 0].to(Float32))
        if const_expr(P.layout == "rows"):
            conv_window.store_all(M, window, at, P)

        # Lanes 8.. of a half-warp get o of rows 4 piece + 2 (lane / 4 % 2) + half.
        o = cute.make_rmem_tensor(_PIECES, Float32)
        for piece in range_constexpr(_PIECES):
            arch.cp_async_wait_group(_PIECES - 1 - piece)
            o[piece] = advance_rows(cells, item, M, dk, dq, d, k, beta, kq, piece, warp, lane, P)
        square = Float32(0)
        for piece in range_constexpr(_PIECES):
            o[piece] = o[piece].to(BFloat16).to(Float32)
            square += o[piece] * o[piece]
        square += arch.shuffle_sync_bfly(square, offset=4)
        square += arch.shuffle_sync_bfly(square, offset=16)
        if lane == 8:
            M.sums[warp] = square
        arch.sync_threads()
        normalize_rows(o, M, A.eps, results, warp, lane)
    else:
        skip(results, at, P)


@cute.kernel
def kda_wide_spec(A: Arguments, P: cutlass.Constexpr) -> None:
    at = wide_prologue.place(A)
    _, request, _ = arch.block_idx()
    warp, lane = at.warp, at.lane

    # The slots must be the first loads: behind the copies they come back a microsecond later.
    slots = blocks.at(Int32, A.slots + Int64(request) * A.slots_stride * 4, min(lane, P.tokens - 1))
    start = min(max(blocks.at(Int32, A.accepted, request) - 1, Int32(0)), Int32(P.tokens - 1))
    page, read = arch.shuffle_sync(slots, 0), arch.shuffle_sync(slots, start)

    M = smem.allocate(P.areas)
    results = begin(A, M, request, at, P)
    if page > 0 and read > 0:
        window = ask_window(A, M, page, start, at, P)
        weights = load_weights(A, at, P)
        cells = M.state.iterator.toint() + at.tid * 16
        ask_state(
            cells,
            prologue.state_of(A, read, at.head, P) + state_rows.first_cell(Int32(0), warp, lane, P),
            P,
        )
        arch.cp_async_wait_group(_PIECES)
        arch.sync_threads()

        raw = gate_product.product(weights.gate, M.f_a, lane, P)
        store_decays(raw, M, A.lower_bound, at, P)
        if warp < chunked.CONVOLVING_WARPS:
            none = Record(Int32(-1), Int64(0), Int64(0))
            chunked.convolve_with(weights.taps, weights.bias, M, M.qkv, window, none, at.tid, P)
        if const_expr(P.layout != "rows"):
            conv_window.store_all(M, window, at, P)
        arch.sync_threads()

        store_factors(M, A.scale, at, P)
        if const_expr(P.layout == "rows"):
            conv_window.store_all(M, window, at, P)
        arch.sync_threads()

        for part in range_constexpr(_PASSES):
            arch.cp_async_wait_group(_PIECES - (part + 1) * (_PIECES // _PASSES))
            advance_window(A, cells, M, slots, part, at, P)
        arch.sync_threads()
        normalize_tokens(M, A.eps, results, at, P)
    else:
        skip(results, at, P)


class Weights(NamedTuple):
    """A thread's weights in registers: for `gate_product.product`; (channel of two, tap); (channel
    of two)."""

    gate: cute.Tensor
    taps: cute.Tensor
    bias: cute.Tensor


@cute.jit
def begin(A: Arguments, M: Smem, request: Int32, at: Place, P: cutlass.Constexpr) -> Int64:
    """Ask for all operands that need no slot. Returns where the item's results go, its first
    token's."""
    wide_prologue.load_vectors(A, M, at, P)
    arch.griddepcontrol_wait()
    arch.griddepcontrol_launch_dependents()
    wide_prologue.load_projection(A, M, request, at, P)
    return A.out + (Int64(request * P.tokens) * at.D + at.channel) * 2


@cute.jit
def ask_window(
    A: Arguments, M: Smem, page: Int32, start: Int32, at: Place, P: cutlass.Constexpr
) -> Window:
    """The last of an item's operands but the state; a group of copies with what `begin` has asked
    for."""
    window: Window = conv_window.window_of(A, page, start)
    conv_window.load_all(M, window, at, P)
    arch.cp_async_commit_group()
    return window


@cute.jit
def load_weights(A: Arguments, at: Place, P: cutlass.Constexpr) -> Weights:
    """Gate and convolution weights, in front of the state's copies."""
    gate = gate_product.registers(P)
    taps = cute.make_rmem_tensor((2, CONV_WIDTH), P.conv_dtype)
    bias = cute.make_rmem_tensor(2, P.conv_dtype)
    gate_product.load(gate, A.f_b + Int64(at.channel) * gate_product.ROW_BYTES, at.warp, at.lane, P)
    wide_prologue.load_taps(A, taps, bias, at, P)
    return Weights(gate, taps, bias)


@cute.jit
def skip(results: Int64, at: Place, P: cutlass.Constexpr) -> None:
    """A null item: nobody leaves copies of `begin` behind; zeros."""
    arch.cp_async_commit_group()
    arch.cp_async_wait_group(0)
    prologue.store_zeros(results, at, P)


@cute.jit
def ask_state(cells: Int32, item: Int64, P: cutlass.Constexpr) -> None:
    """This thread's cells, a group of copies per piece."""
    policy = blocks.evict_first() if const_expr(P.evict) else Int64(0)
    for piece in range_constexpr(_PIECES):
        state_rows.ask_piece(cells, item, piece * PIECE_ROWS, policy, P)
        arch.cp_async_commit_group()


@cute.jit
def store_decay(
    raw: tuple[Float32, ...], M: Smem, lower_bound: Float32, at: Place, P: cutlass.Constexpr
) -> None:
    """Decays of 16 features from `chunked.raw_gates`: all four lanes of a pair hold it, two take
    one each."""
    side = at.lane % 4
    feature = 16 * at.warp + at.lane // 4 * 2 + side % 2
    rounded = (raw[0] if side % 2 == 0 else raw[2]).to(BFloat16).to(Float32)
    d = blocks.exp(
        blocks.log_decay(rounded, M.dt_bias[feature], blocks.exp(M.A_log[0]), lower_bound)
    )
    if side < 2:
        M.vectors[2 * HEAD_DIM + feature] = d


@cute.jit
def convolve_token(
    M: Smem,
    weights: Weights,
    window: Window,
    at: Place,
    P: cutlass.Constexpr,
) -> None:
    """Two channels of one of q, k, v; a window of layout rows is rolled."""
    pairs = HEAD_DIM // 2
    part, pair = at.tid // pairs, at.tid % pairs
    inputs = cute.make_tensor(
        cute.recast_ptr(M.x.iterator, dtype=Uint32),
        cute.make_layout((pairs, 3, P.history + 1), stride=(1, pairs, 3 * pairs)),
    )
    words = cute.make_rmem_tensor(CONV_WIDTH, Uint32)  # both channels of an entry
    if const_expr(P.layout == "rows"):
        chunked.take_history(words, M, window, at.tid)
    else:
        for e in range_constexpr(HISTORY):
            words[e] = inputs[pair, part, e]
    words[HISTORY] = inputs[pair, part, P.history]
    values = cute.make_rmem_tensor(2, Float32)
    for i in range_constexpr(2):
        y = weights.bias[i].to(Float32)
        for tap in range_constexpr(CONV_WIDTH):
            seen = (
                blocks.high_half(words[tap]) if const_expr(i == 1) else blocks.low_half(words[tap])
            )
            y += weights.taps[i, tap].to(Float32) * seen
        values[i] = (y * blocks.sigmoid(y)).to(BFloat16).to(Float32)
    target = (3 if part == 2 else part) * pairs + pair
    vectors = cute.make_tensor(M.vectors.iterator, cute.make_layout((2, 4 * pairs), stride=(1, 2)))
    cute.autovec_copy(values, vectors[None, target])
    if const_expr(P.layout == "rows"):
        chunked.roll_window(words, M, window, at.tid, P)


@cute.jit
def take_vector(M: Smem, part: cutlass.Constexpr, lane: Int32, P: cutlass.Constexpr) -> cute.Tensor:
    """q, k or the decay in this lane's columns: 64 c + 4 l .. +3 (fp32) or 8 l .. +7 (bf16), l of
    its half-warp."""
    stride = (1, 4, 64, HEAD_DIM) if const_expr(P.state_dtype == "fp32") else (1, 8, 4, HEAD_DIM)
    vectors = cute.make_tensor(
        M.vectors.iterator, cute.make_layout((4, LANES, 2, 4), stride=stride)
    )
    x = cute.make_rmem_tensor((4, 2), Float32)
    for c in range_constexpr(2):
        cute.autovec_copy(vectors[None, lane % LANES, c, part], x[None, c])
    return cute.make_tensor(x.iterator, cute.make_layout(COLUMNS))


@cute.jit
def advance_rows(
    cells: Int32,
    item: Int64,
    M: Smem,
    dk: cute.Tensor,
    dq: cute.Tensor,
    d: cute.Tensor,
    k: cute.Tensor,
    beta: Float32,
    kq: Float32,
    piece: cutlass.Constexpr,
    warp: Int32,
    lane: Int32,
    P: cutlass.Constexpr,
) -> Float32:
    """Rows 4 piece + 2j + half, j < 2, by one token, from their cells back to their page.

    Returns o of row j = lane / 4 % 2 in lanes 8.. of each half-warp.
    """
    S = cute.make_rmem_tensor((COLUMNS, 2), Float32)
    sums = cute.make_rmem_tensor(4, Float32)  # S dk of both rows, S dq of both
    for j in range_constexpr(2):
        raw = state_rows.take_row(cells, 2 * piece + j, P)
        w, y = Float32(0), Float32(0)
        for i in range_constexpr(COLUMNS):
            S[i, j] = raw[i].to(Float32)
            w += S[i, j] * dk[i]
            y += S[i, j] * dq[i]
        sums[j] = w
        sums[2 + j] = y
    # Lanes 0..3 of a half-warp get w of the first row, then of the second, then y of both.
    total = blocks.row_sums(sums, 4, LANES, lane)
    row = 16 * warp + 4 * piece + lane // 4 % 2 * 2 + lane // LANES
    u = beta * (M.vectors[3 * HEAD_DIM + row] - total)
    o = total + kq * arch.shuffle_sync_bfly(u, offset=8)
    for j in range_constexpr(2):
        u_row = arch.shuffle_sync(u, 4 * j, mask_and_clamp=HALF_WARP)
        raw = cute.make_rmem_tensor(COLUMNS, P.dtype)
        for i in range_constexpr(COLUMNS):
            raw[i] = (S[i, j] * d[i] + u_row * k[i]).to(P.dtype)
        state_rows.store_row(raw, item + (4 * piece + 2 * j) * HEAD_DIM * P.item_bytes, P)
    return o


@cute.jit
def normalize_rows(
    o: cute.Tensor, M: Smem, eps: Float32, results: Int64, warp: Int32, lane: Int32
) -> None:
    """RMSNorm and output gate; lane 8 + 4j + piece of a half-warp stores that piece's row."""
    piece = lane % 4
    mine = o[0]
    for g in range_constexpr(1, _PIECES):
        mine = o[g] if piece == g else mine
    row = 16 * warp + 4 * piece + lane // 4 % 2 * 2 + lane // LANES
    gated = M.norm_weight[row] * blocks.sigmoid(M.out_gate[row, 0].to(Float32))
    quads = cute.make_tensor(M.sums.iterator, cute.make_layout((4, 2), stride=(1, 4)))
    part = cute.make_rmem_tensor((4, 2), Float32)
    for i in range_constexpr(2):
        cute.autovec_copy(quads[None, i], part[None, i])
    total = ((part[0, 0] + part[1, 0]) + (part[2, 0] + part[3, 0])) + (
        (part[0, 1] + part[1, 1]) + (part[2, 1] + part[3, 1])
    )
    rms = blocks.rsqrt(total * Float32(1 / HEAD_DIM) + eps)
    if lane % LANES >= 8:
        blocks.put(BFloat16, results + Int64(row) * 2, (mine * rms * gated).to(BFloat16))


@cute.jit
def store_decays(
    raw: tuple[Float32, ...], M: Smem, lower_bound: Float32, at: Place, P: cutlass.Constexpr
) -> None:
    """Decays of 16 features and all tokens from `gate_product.raw_gates`."""
    feature = 16 * at.warp + at.lane // 4 * 2
    exp_A = blocks.exp(M.A_log[0])
    decays = cute.make_tensor(
        M.gamma.iterator,
        cute.make_layout((2, HEAD_DIM // 2, P.tokens), stride=(1, 2, chunked.GAMMA_PITCH)),
    )
    for side in range_constexpr(2):
        token = 2 * (at.lane % 4) + side
        if token < P.tokens:
            pair = cute.make_rmem_tensor(2, Float32)
            for i in range_constexpr(2):
                rounded = raw[2 * i + side].to(BFloat16).to(Float32)
                pair[i] = blocks.exp(
                    blocks.log_decay(rounded, M.dt_bias[feature + i], exp_A, lower_bound)
                )
            cute.autovec_copy(pair, decays[None, feature // 2, token])


@cute.jit
def store_factors(M: Smem, scale: Float32, at: Place, P: cutlass.Constexpr) -> None:
    """Per token rk, rq, (k.q) rk rq and beta; a warp per token."""
    if at.warp < P.tokens:
        quads = cute.make_tensor(
            M.qkv.iterator,
            cute.make_layout((4, 32, 3, P.tokens), stride=(1, 4, HEAD_DIM, chunked.QKV_PITCH)),
        )
        q = cute.make_rmem_tensor(4, Float32)
        k = cute.make_rmem_tensor(4, Float32)
        for part in range_constexpr(2):
            raw = cute.make_rmem_tensor(4, BFloat16)
            cute.autovec_copy(quads[None, at.lane, part, at.warp], raw)
            for e in range_constexpr(4):
                if const_expr(part == 0):
                    q[e] = raw[e].to(Float32)
                else:
                    k[e] = raw[e].to(Float32)
        rk, rq, kq = blocks.normalizers(q, k, scale, 32)
        if at.lane == 0:
            M.factors[0, at.warp] = rk
            M.factors[1, at.warp] = rq
            M.factors[2, at.warp] = kq
            M.factors[3, at.warp] = blocks.sigmoid(M.beta[at.head % 2, at.warp].to(Float32))


@cute.jit
def advance_window(
    A: Arguments,
    cells: Int32,
    M: Smem,
    slots: Int32,
    part: cutlass.Constexpr,
    at: Place,
    P: cutlass.Constexpr,
) -> None:
    """A pass's rows 8 part + 2j + half, j < 4, by all tokens, from their cells; each state to its
    page.

    slots   lane t holds that of token t
    """
    S = cute.make_rmem_tensor((COLUMNS, _PASS_ROWS), Float32)
    for j in range_constexpr(_PASS_ROWS):
        raw = state_rows.take_row(cells, part * _PASS_ROWS + j, P)
        for i in range_constexpr(COLUMNS):
            S[i, j] = raw[i].to(Float32)
    # The row whose sums this lane gets: w of it, or in lanes 8.. of a half-warp y.
    own = 16 * at.warp + 2 * _PASS_ROWS * part + at.lane % 8 // 2 * 2 + at.lane // LANES
    first = 2 * _PASS_ROWS * part * HEAD_DIM * P.item_bytes + state_rows.first_cell(
        Int32(0), at.warp, at.lane, P
    )
    for t in cutlass.range(P.tokens, unroll=1):
        d = take_decays(M, t, at.lane, P)
        k = take_columns(M, 1, t, at.lane, P)
        q = take_columns(M, 0, t, at.lane, P)
        factor = cute.make_rmem_tensor(4, Float32)  # rk, rq, (k.q) rk rq, beta
        cute.autovec_copy(M.factors[None, t], factor)
        sums = cute.make_rmem_tensor(2 * _PASS_ROWS, Float32)
        for j in range_constexpr(_PASS_ROWS):
            w, y = Float32(0), Float32(0)
            for i in range_constexpr(COLUMNS):
                S[i, j] = S[i, j] * d[i]
                w += S[i, j] * k[i]
                y += S[i, j] * q[i]
            sums[j] = w
            sums[_PASS_ROWS + j] = y
        total = blocks.row_sums(sums, 2 * _PASS_ROWS, LANES, at.lane)
        v = M.qkv[t * chunked.QKV_PITCH + 2 * HEAD_DIM + own].to(Float32)
        u = factor[3] * (v - total * factor[0])
        o = total * factor[1] + factor[2] * arch.shuffle_sync_bfly(u, offset=8)
        if at.lane % LANES >= 8 and at.lane % 2 == 0:
            M.o[own, t] = o.to(BFloat16)
        slot = arch.shuffle_sync(slots, t)
        page = prologue.state_of(A, slot, at.head, P) + first
        for j in range_constexpr(_PASS_ROWS):
            u_row = arch.shuffle_sync(u, 2 * j, mask_and_clamp=HALF_WARP) * factor[0]
            raw = cute.make_rmem_tensor(COLUMNS, P.dtype)
            for i in range_constexpr(COLUMNS):
                S[i, j] = S[i, j] + u_row * k[i]
                raw[i] = S[i, j].to(P.dtype)
            if slot > 0:
                state_rows.store_row(raw, page + 2 * j * HEAD_DIM * P.item_bytes, P)


@cute.jit
def take_columns(
    M: Smem, part: cutlass.Constexpr, token: Int32, lane: Int32, P: cutlass.Constexpr
) -> cute.Tensor:
    """q or k in this lane's columns, as `take_vector`."""
    stride = (1, 4, 64) if const_expr(P.state_dtype == "fp32") else (1, 8, 4)
    quads = cute.make_tensor(
        M.qkv.iterator + part * HEAD_DIM,
        cute.make_layout((4, LANES, 2, P.tokens), stride=(*stride, chunked.QKV_PITCH)),
    )
    x = cute.make_rmem_tensor(COLUMNS, Float32)
    for c in range_constexpr(2):
        raw = cute.make_rmem_tensor(4, BFloat16)
        cute.autovec_copy(quads[None, lane % LANES, c, token], raw)
        for e in range_constexpr(4):
            x[4 * c + e] = raw[e].to(Float32)
    return x


@cute.jit
def take_decays(M: Smem, token: Int32, lane: Int32, P: cutlass.Constexpr) -> cute.Tensor:
    """A token's decays in this lane's columns, as `take_vector`."""
    stride = (1, 4, 64) if const_expr(P.state_dtype == "fp32") else (1, 8, 4)
    quads = cute.make_tensor(
        M.gamma.iterator,
        cute.make_layout((4, LANES, 2, P.tokens), stride=(*stride, chunked.GAMMA_PITCH)),
    )
    x = cute.make_rmem_tensor((4, 2), Float32)
    for c in range_constexpr(2):
        cute.autovec_copy(quads[None, lane % LANES, c, token], x[None, c])
    return cute.make_tensor(x.iterator, cute.make_layout(COLUMNS))


@cute.jit
def normalize_tokens(
    M: Smem, eps: Float32, results: Int64, at: Place, P: cutlass.Constexpr
) -> None:
    """RMSNorm and output gate of all tokens; a warp per token, four channels per lane."""
    if at.warp < P.tokens:
        layout = cute.make_layout((4, 32, P.tokens), stride=(1, 4, HEAD_DIM))
        raw = cute.make_rmem_tensor(4, BFloat16)
        gates = cute.make_rmem_tensor(4, BFloat16)
        weights = cute.make_rmem_tensor(4, Float32)
        cute.autovec_copy(cute.make_tensor(M.o.iterator, layout)[None, at.lane, at.warp], raw)
        cute.autovec_copy(
            cute.make_tensor(M.out_gate.iterator, layout)[None, at.lane, at.warp], gates
        )
        quads = cute.make_layout((4, 32), stride=(1, 4))
        cute.autovec_copy(cute.make_tensor(M.norm_weight.iterator, quads)[None, at.lane], weights)
        square = Float32(0)
        for e in range_constexpr(4):
            square += raw[e].to(Float32) * raw[e].to(Float32)
        rms = blocks.rsqrt(blocks.lane_sum(square, 1, 32) * Float32(1 / HEAD_DIM) + eps)
        for e in range_constexpr(4):
            gated = weights[e] * blocks.sigmoid(gates[e].to(Float32))
            raw[e] = (raw[e].to(Float32) * rms * gated).to(BFloat16)
        prologue.store_quad(raw, results + (Int64(at.warp) * at.D + 4 * at.lane) * 2)


_HOSTS = {
    kind: step.host_of(kernel)
    for kind, kernel in (
        ("decode", kda_wide_decode),
        ("spec", kda_wide_spec),
        ("record", kda_wide_record),
    )
}
