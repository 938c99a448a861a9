"""KDA replay steps: persistent, two CTAs of 256 threads per SM, the next item loaded during this
one.

projected   [requests * tokens, pitch]     bf16   q, k, v | output gate | f_a | raw beta
conv_state  [slots, 3D, W]                 bf16, dim-first or window-major; read and rolled
state       [slots, heads, V=128, K=128]   f32, read; written in place where tokens are pending
corrections [rows, heads, Q, 128]          f32, the pending tokens' are read, then the window's
                                           written
key_gates   [rows, heads, Q, 256]          bf16, the same
pending     [rows]                         int32, tokens of a record row to fold
out         [requests * tokens, D]         bf16

KdaFused's arithmetic on KdaStream's walk: a CTA has a run of items that mostly share a head, whose
gate weights stay in registers. A ring of lines in shared memory, of which each is read only by the
warp that copied it, runs from one item's state into the next one's, so that no barrier of the CTA
stands between copies. Per item:
  prologue   gate on tensor cores, convolution on six warps, the pending tokens' weighed keys on
             two; new keys and gates to the record, whose old ones are in shared memory. Window
             rolled
  build      norms, and the 2q vectors as fragments; the pending tokens' corrections as fragments,
             to registers
  solve      A and B, a part per warp; one warp makes the triangles T and C of them
  ask        the next item's operands, and as much of its record as is pending, in place of this
             item's
  advance    each line: folded, stored by whole lines if tokens are pending, multiplied; its room
             goes to the line `staged` later in the walk
  finish     corrections and outputs; RMSNorm and output gate, behind the barrier that hands over
             what was asked for
Barriers per item: 5. Null items are computed from whatever is there, and not stored. What an item
needs is looked up an item ahead: slot and record row come with the operands of the item before, the
count of pending tokens during it.

Budget per item at the memory floor of an H200's SM: q=4 4.8 us, q=8 5.4 us, some 9500 and 10700
clocks; a CTA has twice as long. Needed by count of instructions at q=8: half of the issue slots.
Copies in flight while both CTAs of an SM are in their prologues: `staged` lines each, 96 KiB and
more, for which the SM's part of the bandwidth takes 3 us, and 6 us where as much is written.
Source: docs/operation.md, "The same, chunked" and "Commit: folding n accepted tokens".
"""

# A condition known at compile time can't share an `if` with one of the running kernel.
# ruff: noqa: SIM102
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, Uint32, const_expr, range_constexpr

from kda_kernels import arguments, step, walk
from kda_kernels.arguments import Arguments
from kda_kernels.device import blocks, smem
from kda_kernels.device.gpu import Gpu
from kda_kernels.device.smem import Area, Smem
from kda_kernels.operands import StepOperands
from kda_kernels.parts import chunked, fold, gate_product, prologue, streaming
from kda_kernels.parts.conv_window import Window
from kda_kernels.parts.prologue import Record
from kda_kernels.parts.streaming import Place, Turn, Weights
from kda_kernels.problem import CONV_WIDTH, HEAD_DIM, Problem, ceil_div
from kda_kernels.step import Compiled

KERNELS = ("kda_fused_ws",)
KINDS = ("replay",)
RULE = "fused_ws_items"
STREAMS = True
TRIED = {"gate_mode": (0, 1), "staged": (None, 2, 3, 4), "most_items": (None, 2, 4)}
GIVEN = ("conv_weight_dtype", "window")


def forms(kind: str, state_dtype: str) -> list[dict[str, object]]:
    """Every form that is another kernel, and one that differs in its launch."""
    if state_dtype != "fp32":
        return []
    return [{}, {"gate_mode": 1}, {"most_items": 2, "stream_stores": True}]


_FEWEST_LINES = 2
"""Of a state that there must be room for."""

arch = cute.arch


@dataclass(frozen=True)
class Options:
    """Compile-time choices; `most_items` and `pdl` are of the launch.

    gate_mode          0: one chain of 8 tensor-core accumulations; 1: four chains of 2, summed in
                       order
    staged             lines of a state that there is room for, 2..4; None: as many as fit
    records            pending: only the pending tokens of a record are read, but for a CTA's first
                       item; all: all
    ahead              a CTA's first state is asked for before the PDL wait; its first prologue then
                       waits for it
    stream_stores      the state is stored as streaming
    conv_weight_dtype  of convolution weight and bias
    window             most entries of a dim-first window; None: those of the problem
    most_items         of a CTA: with more, CTAs come one after the other, each as an SM is ready
                       for it; None: no limit
    pdl                programmatic dependent launch
    """

    gate_mode: int = 0
    staged: int | None = None
    records: Literal["all", "pending"] = "pending"
    ahead: bool = False
    stream_stores: bool = False
    conv_weight_dtype: Literal["fp32", "bf16"] = "fp32"
    window: int | None = None
    most_items: int | None = None
    pdl: bool = False


@dataclass(frozen=True)
class Plan(fold.Shape):
    """What decides the code. staged: lines of a state that there is room for."""

    staged: int
    ahead: bool

    @property
    def taps_shared(self) -> bool:
        """Convolution weights wait in cells of shared memory that are private to the threads, not
        in registers."""
        return True

    @property
    def ctas_per_sm(self) -> int:
        return streaming.CTAS_PER_SM

    @property
    def numbers(self) -> int:
        """What a request is looked up by: slot and record row."""
        return 2

    @property
    def areas(self) -> dict[str, Area]:
        tokens = self.tokens
        operands = streaming.operand_areas(self) | {
            "old_key_gates": Area(BFloat16, 2 * HEAD_DIM * tokens),
            "old_corrections": Area(Float32, (HEAD_DIM, tokens)),
            "dt_bias": Area(Float32, HEAD_DIM),
            "norm_weight": Area(Float32, HEAD_DIM),
            "A_log": Area(Float32, 1),
            "beta": Area(BFloat16, (2, tokens)),
            # Of the item after.
            "numbers": Area(Int32, self.numbers),
            "taps": streaming.taps_area(self),
        }
        products = {
            "qkv": Area(BFloat16, self.qkv_bytes // 2),
            "gamma": Area(Float32, self.gamma_bytes // 4),
            # A and B, a part per step.
            "partials": Area(Float32, self.partial_bytes // 4, inside="gamma"),
            "fold": Area(Uint32, self.fold_bytes // 4),
            # e^{L_n}
            "fold_scale": Area(Float32, HEAD_DIM),
            "fragments": Area(Uint32, self.fragment_bytes // 4),
            "pairs": Area(Float32, self.pair_floats),
            # T and C, then as fragments.
            "matrix": Area(Float32, 2 * self.slots**2),
            "solution": Area(Uint32, 32 * self.solution_words),
            # Of o, summed up by slot and warp.
            "squares": Area(Float32, self.slots * chunked.WARPS),
        }
        # A ring of lines, each as `chunked.copy_line` has it.
        state = Area(Uint8, self.staged * chunked.LINE_BYTES)
        return {"state": state} | operands | products

    @property
    def smem_bytes(self) -> int:
        return smem.total(self.areas)


def plan(problem: Problem, options: Options) -> Plan:
    layout, window = arguments.window_rules(problem, True, options.window)
    p = Plan(
        tokens=problem.tokens,
        state_dtype=problem.state_dtype,
        threads=streaming.THREADS,
        layout=layout,
        window=window,
        streamable=True,
        weight_dtype=options.conv_weight_dtype,
        terms=2,
        kind=problem.kind,
        gate_mode=options.gate_mode,
        records=options.records,
        stream_stores=options.stream_stores,
        staged=_FEWEST_LINES,
        ahead=options.ahead,
    )
    room = (
        (options.staged,) if options.staged is not None else range(p.lines, _FEWEST_LINES - 1, -1)
    )
    plans = [replace(p, staged=staged) for staged in room]
    return next((p for p in plans if p.smem_bytes <= streaming.SMEM_BYTES), plans[-1])


def unsupported(problem: Problem, options: Options, gpu: Gpu) -> str | None:
    """Why this pair can't run, or None. Pure: no CUDA."""
    if problem.kind != "replay":
        return f"kind={problem.kind}: only replay"
    if problem.state_dtype != "fp32":
        return f"state_dtype={problem.state_dtype}: deferred steps keep an FP32 state"
    choices = (
        ("gate_mode", options.gate_mode, (0, 1)),
        ("staged", options.staged, (None, 2, 3, 4)),
        ("records", options.records, ("all", "pending")),
        ("conv_weight_dtype", options.conv_weight_dtype, ("fp32", "bf16")),
    )
    if why := step.not_allowed(choices):
        return why
    return streaming.refused(problem, options, plan(problem, options), gpu)


def compile(problem: Problem, options: Options, gpu: Gpu) -> Compiled:
    """From shapes alone; one binary serves all heads, requests and strides. Raises ValueError for
    unsupported pairs."""
    step.require("KdaFusedWS", unsupported(problem, options, gpu))
    return step.build(_HOST, plan(problem, options), options, gpu)


def launch(compiled: Compiled, operands: StepOperands, stream: int) -> None:
    """Enqueue one step. Raises ValueError, naming the operand, for operands that the compiled
    kernel can't take."""
    heads, requests = operands.A_log.shape[0], operands.slots.shape[0]
    runs = walk.HALVED.runs(heads, requests, compiled.sms, compiled.most_items)
    step.enqueue("KdaFusedWS", compiled, operands, stream, runs.grid, runs.per)


class Request(NamedTuple):
    """Slot, below one for a null item, and record row, negative for none."""

    page: Int32
    row: Int32


@cute.kernel
def kda_fused_ws(A: Arguments, P: cutlass.Constexpr) -> None:
    cta, _, _ = arch.block_idx()
    at = streaming.place()
    ctas, _, _ = arch.grid_dim()
    item, count = walk.HALVED.first(cta, ctas, A.per, A.heads, A.requests)

    # The slot must be the first load: behind the copies it comes back a microsecond later.
    numbers = blocks.at(
        Int32, streaming.number_address(A, item.request, min(at.lane, 1), P), Int32(0)
    )
    M = smem.allocate(P.areas)
    weights = streaming.weight_registers(P)
    numbers, pending = ask_first(A, M, weights, item, numbers, count, at, P)

    for index in cutlass.range(count, unroll=1):
        at = streaming.place()
        now = request_of(numbers)
        n = fold.clamped(pending, P)
        window = fold.window_of(A, now.page, n)
        record = prologue.record_of(A, now.row, item.head)
        following = M.numbers[min(at.lane, 1)]
        if index + 1 == count:
            following = Int32(0)
        pending = pending_of(A, request_of(following))
        turn = Turn(item, numbers, following, index, count)

        prepare(A, M, weights, n, record, window, at, P)
        if const_expr(P.layout == "taps"):
            if now.page > 0:
                streaming.store_window_major(A, M, window, item.head, at, P)
        at = streaming.meet()

        if const_expr(P.layout == "rows"):
            if now.page > 0:
                streaming.store_dim_first(A, M, window, item.head, at)
        at = replay_item(A, M, weights, turn, n, pending, at, P)

        later = streaming.after(A, item)
        if later.head != item.head:
            streaming.settle_weights(A, weights, at, P)
        item, numbers = later, following


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
) -> tuple[Int32, Int32]:
    """A CTA's first item, of `count`: its operands are there, its state is asked for. Returns its
    numbers and its pending tokens.
    """
    streaming.ask_constants(A, M, at, P)
    streaming.ask_parameters(A, M, item, count > 0, count > 1, at, P)
    if const_expr(P.ahead):
        # So that nothing waits for the gate weights on its behalf.
        numbers = blocks.pinned(numbers)
        ask_first_state(A, M, weights, numbers, item.head, at, P)
    arch.griddepcontrol_wait()
    arch.griddepcontrol_launch_dependents()
    streaming.ask_projection(A, M, item, at, P)
    numbers = blocks.pinned(numbers)
    pending = pending_of(A, request_of(numbers))
    start, asked = Int32(0), Int32(P.tokens)
    if const_expr(P.layout == "taps"):
        start = fold.clamped(pending, P)
    ask_request(A, M, request_of(numbers), item.head, start, asked, at, P)
    arch.cp_async_commit_group()
    if const_expr(P.ahead):
        arch.cp_async_wait_group(0)
    else:
        ask_first_state(A, M, weights, numbers, item.head, at, P)
        arch.cp_async_wait_group(P.staged)
    arch.sync_threads()
    streaming.settle_weights(A, weights, at, P)
    return numbers, pending


@cute.jit
def prepare(
    A: Arguments,
    M: Smem,
    weights: Weights,
    n: Int32,
    record: Record,
    window: Window,
    at: Place,
    P: cutlass.Constexpr,
) -> None:
    """Decays multiplied up; q, k and v, of a dim-first window rolled; the n pending tokens' weighed
    keys."""
    raw = gate_product.raw_gates(weights.gate, M.f_a, at.lane, P)
    exp_A = blocks.exp(M.A_log[0])
    chunked.store_gammas(raw, M.gamma, M.dt_bias, exp_A, A.lower_bound, record, at.warp, at.lane, P)
    if at.warp < chunked.CONVOLVING_WARPS:
        cute.autovec_copy(M.taps[None, at.tid, None], weights.taps)
        chunked.convolve_with(
            weights.taps, weights.taps[None, CONV_WIDTH], M, M.qkv, window, record, at.tid, P
        )
    else:
        fold.weigh(M, n, exp_A, A.lower_bound, at.warp - chunked.CONVOLVING_WARPS, at.lane, P)


@cute.jit
def replay_item(
    A: Arguments,
    M: Smem,
    weights: Weights,
    turn: Turn,
    n: Int32,
    pending: Int32,
    at: Place,
    P: cutlass.Constexpr,
) -> Place:
    """Build, solve, ask, advance and finish. n: tokens to fold; pending: those of the item
    after."""
    beta = M.beta[turn.item.head % 2, min(at.lane % P.slots, P.tokens - 1)].to(Float32)
    factors = chunked.output_factors(M.out_gate, M.norm_weight, at.warp, at.lane, P)
    old = fold.old_corrections(M, n, at.warp, at.lane, P)
    chunked.build_fragments(
        M.fragments, M.qkv, M.gamma, A.scale, at.warp, chunked.WARPS, at.lane, P
    )
    at = streaming.meet()
    chunked.token_products(M.fragments, M.partials, at.warp, at.lane, P)
    at = streaming.meet()
    if at.warp == chunked.SOLVER:
        chunked.solve(M.partials, M.pairs, M.matrix, M.solution, blocks.sigmoid(beta), at.lane, P)
    ask_next(A, M, turn, pending, at, P)
    streaming.refresh_weights(A, weights, turn, at, P)
    sums = advance(A, M, turn, n, old, P)
    v = chunked.values(M.qkv, at.warp, at.lane, P)
    at = streaming.meet()
    now = request_of(blocks.pinned(turn.numbers))
    at = streaming.finish(A, M, turn.item, now.page, now.row, sums, v, factors, at, P)
    return at


@cute.jit
def request_of(numbers: Int32) -> Request:
    """From the numbers on the first lanes."""
    page, row = arch.shuffle_sync(numbers, 0), arch.shuffle_sync(numbers, 1)
    if page <= 0:
        row = Int32(-1)
    return Request(page, row)


@cute.jit
def pending_of(A: Arguments, request: Request) -> Int32:
    """Tokens that a request says are to be folded."""
    pending = Int32(0)
    if request.row >= 0:
        pending = blocks.at(Int32, A.pending, request.row)
    return pending


@cute.jit
def ask_request(
    A: Arguments,
    M: Smem,
    request: Request,
    head: Int32,
    n: Int32,
    tokens: Int32,
    at: Place,
    P: cutlass.Constexpr,
) -> None:
    """A request's window, of layout taps with n pending tokens, and the first `tokens` of its
    record."""
    if request.page > 0:
        window = fold.window_of(A, request.page, n)
        streaming.ask_window(A, M, window, head, at, P)
    record = prologue.record_of(A, request.row, head)
    fold.load_keys(M, record, tokens, at.tid, P)
    units = 4 * HEAD_DIM // 16
    held = Int32(0)
    if record.row >= 0:
        held = tokens
    for j in range_constexpr(ceil_div(P.tokens * units, P.threads)):
        unit = at.tid + j * P.threads
        if unit < held * units:
            place = M.old_corrections.iterator.toint() + unit * 16
            blocks.copy_async(place, record.corrections + Int64(unit) * 16, 16)


@cute.jit
def ask_next(
    A: Arguments, M: Smem, turn: Turn, pending: Int32, at: Place, P: cutlass.Constexpr
) -> None:
    """All operands of the item after this one, as one group of copies. pending: its tokens to
    fold."""
    request = request_of(turn.following)
    if turn.left > 0:
        later = streaming.after(A, turn.item)
        streaming.ask_parameters(A, M, later, later.head != turn.item.head, turn.left > 1, at, P)
        n = fold.clamped(pending, P)
        asked = n if const_expr(P.records == "pending") else Int32(P.tokens)
        ask_request(A, M, request, later.head, n, asked, at, P)
        streaming.ask_projection(A, M, later, at, P)
    arch.cp_async_commit_group()


@cute.jit
def ask_first_state(
    A: Arguments,
    M: Smem,
    weights: Weights,
    numbers: Int32,
    head: Int32,
    at: Place,
    P: cutlass.Constexpr,
) -> None:
    """A head's gate weights, and as much of a CTA's first state as there is room for, a group of
    copies per line."""
    streaming.load_weights(A, weights, head, Int32(0), at, P)
    # Keeps these loads in front of the state's copies: behind them, they would come late.
    arch.sync_warp()
    page = request_of(numbers).page
    for line in range_constexpr(P.staged):
        if page > 0:
            ask_line(M, prologue.state_of(A, page, head, P), Int32(line), Int32(line), at, P)
        arch.cp_async_commit_group()


@cute.jit
def ask_line(
    M: Smem, state: Int64, line: Int32, nth: Int32, at: Place, P: cutlass.Constexpr
) -> None:
    """A line of the state at an address, to its place of the ring: the line is the nth of the CTA's
    walk."""
    cells = line_of(M, nth, P) + 16 * at.tid
    chunked.copy_line(cells, state, line, at.warp, at.lane, Int64(0), False, P)


@cute.jit
def line_of(M: Smem, nth: Int32, P: cutlass.Constexpr) -> Int32:
    return M.state.iterator.toint() + nth % P.staged * chunked.LINE_BYTES


@cute.jit
def advance(
    A: Arguments, M: Smem, turn: Turn, n: Int32, old: tuple[Uint32, ...], P: cutlass.Constexpr
) -> cute.Tensor:
    """The state folded, stored if n > 0, and its products with the vectors. old: of
    `fold.old_corrections`.

    A line that was asked for before the next item's operands has as many younger groups as
    `staged`: its successors and the operands. One that was asked for since has one less.
    """
    page, following = request_of(turn.numbers).page, request_of(turn.following).page
    # One chain of accumulations per tile in the place of two: the registers that it saves are those
    # that would spill.
    total = cute.make_rmem_tensor((4, P.tiles), Float32)
    total.fill(Float32(0))
    sums = cute.make_tensor(total.iterator, cute.make_layout((4, 2, P.tiles), stride=(1, 0, 4)))
    state = prologue.state_of(A, page, turn.item.head, P)
    next_state = prologue.state_of(A, following, streaming.after(A, turn.item).head, P)
    # Rolled: the compiler would put off the products of a line until the last one has arrived.
    for line in cutlass.range(P.lines, unroll=1):
        at = streaming.place()
        nth = P.lines * turn.index + line
        if const_expr(P.staged < P.lines):
            if line < P.staged:
                arch.cp_async_wait_group(P.staged)
            else:
                arch.cp_async_wait_group(P.staged - 1)
        else:
            arch.cp_async_wait_group(P.staged)
        fold.advance_line(sums, M, old, line_of(M, nth, P), state, n, line, at.warp, at.lane, P)
        arch.sync_warp()  # all lanes have read it
        asked, live, source = line + P.staged, page, state
        if asked >= P.lines:
            asked, live, source = asked - P.lines, following, next_state
        if live > 0:
            ask_line(M, source, asked, nth + P.staged, streaming.place(), P)
        arch.cp_async_commit_group()
    both = chunked.accumulators(P)
    for tile in range_constexpr(P.tiles):
        for j in range_constexpr(4):
            both[j, 0, tile] = total[j, tile]
    return both


_HOST = step.host_of(kda_fused_ws)
