"""A persistent CTA of 256 threads, two per SM, that asks for its next item's operands during this
one: KdaStream and KdaFusedWS.

An item is a head of a request, and its numbers (cache slot, record row, ...) are what the request
is looked up by. They come with the operands of the item before, a lane each, so that no item waits
for its own. Gate weights stay in registers until the head changes, convolution weights there or in
cells of shared memory that are private to a thread.

Words here: to *ask* for something starts its copy to shared memory by cp.async; to *load* it starts
loads to registers, which are *settled* when they have come; to *take* it reads it from shared
memory. A thread asks for its `place` anew now and then, most of all behind a barrier (`meet`), so
that what depends on it isn't kept in registers for long.
"""

# A condition known at compile time can't share an `if` with one of the running kernel.
# ruff: noqa: SIM102
from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32, const_expr, range_constexpr

from kda_kernels import step, walk
from kda_kernels.arguments import Arguments
from kda_kernels.device import blocks
from kda_kernels.device.gpu import RESERVED_SMEM_BYTES, SM_SMEM_BYTES, Gpu
from kda_kernels.device.smem import Area, Smem
from kda_kernels.parts import chunked, gate_product, prologue
from kda_kernels.parts.conv_window import Window
from kda_kernels.parts.prologue import UNIT
from kda_kernels.problem import CONV_WIDTH, HEAD_DIM, HISTORY, Problem, ceil_div

THREADS = 32 * chunked.WARPS
CTAS_PER_SM = 2
SMEM_BYTES = SM_SMEM_BYTES // CTAS_PER_SM - RESERVED_SMEM_BYTES
"""Shared memory of a CTA, so that two fit an SM."""

_CONVOLVING_THREADS = 32 * chunked.CONVOLVING_WARPS
_ROW_LANES = HEAD_DIM // UNIT
"""Lanes that copy a head's channels of an entry or a token, 16 bytes each."""

arch = cute.arch
GMEM = cutlass.AddressSpace.gmem


def operand_areas(p: Any) -> dict[str, Area]:
    """An item's part of the projection, and its window: if window-major, in front of the inputs."""
    x = Area(BFloat16, (HEAD_DIM, 3, p.history + p.tokens))
    whole = Area(BFloat16, 3 * HEAD_DIM * p.window)
    return {
        "x": x,
        "f_a": Area(BFloat16, p.tokens * HEAD_DIM),
        "out_gate": Area(BFloat16, (HEAD_DIM, p.tokens)),
        "window": whole if p.layout == "rows" else replace(x, inside="x"),
    }


def taps_area(p: Any) -> Area:
    """Convolution weights and bias of two channels of each thread that convolves, [tap or bias,
    thread, channel].
    """
    return Area(p.conv_dtype, (2, _CONVOLVING_THREADS, CONV_WIDTH + 1))


def refused(problem: Problem, options: Any, p: Any, gpu: Gpu) -> str | None:
    """Why a plan of options with `window` and `most_items` can't run, or None."""
    if options.most_items is not None and options.most_items < 1:
        return f"most_items={options.most_items} must be at least 1"
    return (
        step.window_refused(problem, options.window)
        or step.gate_refused(problem, p.least_log_gate)
        or step.smem_refused(p.smem_bytes, min(SMEM_BYTES, gpu.smem_per_block))
    )


class Place(NamedTuple):
    """Where a thread is."""

    tid: Int32
    warp: Int32
    lane: Int32


class Turn(NamedTuple):
    """An item in its turn.

    numbers     its, a lane each
    following   those of the item after it; zeros behind the last one
    index       of the item in the CTA's walk of `count` items
    """

    item: walk.Item
    numbers: Int32
    following: Int32
    index: Int32
    count: Int32

    @property
    def left(self) -> Int32:
        """Items after it. Computed where it is asked for: computed earlier, it makes other code."""
        return self.count - 1 - self.index


@cute.jit
def place() -> Place:
    """Read from the special register where this stands."""
    tid = blocks.special("%tid.x") & (THREADS - 1)  # known not to be negative
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
    later: walk.Item = walk.next_item(
        walk.Item(blocks.pinned(head), request, first, size), A.heads, A.requests
    )
    return later


@cute.jit
def number_address(A: Arguments, request: Int32, number: Int32, P: cutlass.Constexpr) -> Int64:
    """Of one of `P.numbers` of a request: slots, then `accepted` (spec) or the record row (record,
    replay).
    """
    address = A.slots + Int64(request) * A.slots_stride * 4
    if const_expr(P.kind != "decode"):
        if number < P.numbers - 1:
            address += Int64(number) * 4
        else:
            address = (A.accepted if const_expr(P.kind == "spec") else A.record_rows) + Int64(
                request
            ) * 4
    return address


@cute.jit
def results_of(A: Arguments, item: walk.Item, P: cutlass.Constexpr) -> Int64:
    """Address of the item's channels of its first token in `out`."""
    return A.out + (Int64(item.request * P.tokens) * A.heads + item.head) * (2 * HEAD_DIM)


class Weights(NamedTuple):
    """A thread's weights of a head, in registers: `gate_product.WEIGHTS`; (channel of two, tap or
    bias)."""

    gate: cute.Tensor
    taps: cute.Tensor


def weight_registers(P: Any) -> Weights:
    gate = cute.make_rmem_tensor(gate_product.WEIGHTS, Uint32)
    return Weights(gate, cute.make_rmem_tensor((2, CONV_WIDTH + 1), P.conv_dtype))


@cute.jit
def load_weights(
    A: Arguments, weights: Weights, head: Int32, zero: Int32, at: Place, P: cutlass.Constexpr
) -> None:
    """A head's gate weights; unless `taps_shared`, convolution weight and bias of two channels. To
    be completed by `settle_weights`. zero: as in `gate_product.load_lines`.
    """
    features = A.f_b + Int64(head) * (HEAD_DIM * gate_product.ROW_BYTES)
    gate_product.load_lines(weights.gate, features, zero, at.warp, at.lane)
    if const_expr(not P.taps_shared):
        if at.warp < chunked.CONVOLVING_WARPS:
            for tap in range_constexpr(CONV_WIDTH):
                _load_pair(
                    weights.taps, tap, A.conv_weight, _pair_place(A, CONV_WIDTH, tap, head, at), P
                )
            # No bias: something else, so that this load, too, can have its address where it puts
            # what it loads.
            bias = A.conv_weight
            if A.conv_bias != Int64(0):
                bias = A.conv_bias
            _load_pair(weights.taps, CONV_WIDTH, bias, _pair_place(A, 1, 0, head, at), P)


@cute.jit
def settle_weights(A: Arguments, weights: Weights, at: Place, P: cutlass.Constexpr) -> None:
    """What `load_weights` has left to be done when its loads are there."""
    gate_product.settle(weights.gate, at.lane)
    if const_expr(not P.taps_shared):
        if A.conv_bias == Int64(0):
            weights.taps[None, CONV_WIDTH].fill(P.conv_dtype(0))


@cute.jit
def refresh_weights(
    A: Arguments, weights: Weights, turn: Turn, at: Place, P: cutlass.Constexpr
) -> None:
    """Load the weights of the next item's head, if there is one and it is another.

    It stands where threads wait for the state anyway: with copies in flight the loads leave their
    queue slowly.
    """
    head = after(A, turn.item).head
    if turn.left > 0 and head != turn.item.head:
        load_weights(A, weights, head, A.heads >> 31, at, P)


@cute.jit
def _load_pair(
    taps: cute.Tensor, tap: cutlass.Constexpr, base: Int64, place: Int64, P: cutlass.Constexpr
) -> None:
    address = base + place * P.weight_bytes
    source = cute.make_ptr(P.conv_dtype, address, GMEM, assumed_align=2 * P.weight_bytes)
    cute.autovec_copy(cute.make_tensor(source, cute.make_layout(2)), taps[None, tap])


@cute.jit
def _pair_place(
    A: Arguments, rows: cutlass.Constexpr, row: cutlass.Constexpr, head: Int32, at: Place
) -> Int64:
    """Element of this thread's two channels in weights [3, rows, D]."""
    part, pair = at.tid // (HEAD_DIM // 2), at.tid % (HEAD_DIM // 2)
    return (Int64(part * rows + row) * A.heads + head) * HEAD_DIM + 2 * pair


@cute.jit
def ask_constants(A: Arguments, M: Smem, at: Place, P: cutlass.Constexpr) -> None:
    """What is the same for all items."""
    if at.warp == 0:
        blocks.copy_async(
            M.norm_weight.iterator.toint() + at.lane * 16, A.norm_weight + at.lane * 16, 16
        )
    if const_expr(P.taps_shared):
        if at.warp < chunked.CONVOLVING_WARPS and A.conv_bias == Int64(0):
            M.taps[None, at.tid, CONV_WIDTH].fill(P.conv_dtype(0))


@cute.jit
def ask_parameters(
    A: Arguments,
    M: Smem,
    item: walk.Item,
    new_head: cutlass.Boolean,
    more: cutlass.Boolean,
    at: Place,
    P: cutlass.Constexpr,
) -> None:
    """Parameters of the gate and, of a new head, of the convolution; the numbers of the item after,
    if there are `more`.
    """
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
            cell = M.taps.iterator.toint() + at.tid * size
            for tap in range_constexpr(CONV_WIDTH):
                source = (
                    A.conv_weight + _pair_place(A, CONV_WIDTH, tap, item.head, at) * P.weight_bytes
                )
                blocks.copy_async(cell + tap * (_CONVOLVING_THREADS * size), source, size)
            if A.conv_bias != Int64(0):
                source = A.conv_bias + _pair_place(A, 1, 0, item.head, at) * P.weight_bytes
                blocks.copy_async(cell + CONV_WIDTH * (_CONVOLVING_THREADS * size), source, size)


@cute.jit
def ask_projection(A: Arguments, M: Smem, item: walk.Item, at: Place, P: cutlass.Constexpr) -> None:
    """A warp takes a token: q and k, v and output gate, f_a and beta, a half-warp each."""
    t, half, unit = at.warp, at.lane // _ROW_LANES, at.lane % _ROW_LANES
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
def ask_window(
    A: Arguments, M: Smem, window: Window, head: Int32, at: Place, P: cutlass.Constexpr
) -> None:
    if const_expr(P.layout == "rows"):
        _ask_dim_first(A, M, window, head, at)
    else:
        _ask_window_major(A, M, window, head, at)


@cute.jit
def _ask_dim_first(A: Arguments, M: Smem, window: Window, head: Int32, at: Place) -> None:
    """All entries; a thread takes the same 16 bytes of q, k and v."""
    part_bytes = 2 * HEAD_DIM * window.channel_stride
    if at.tid * 16 < part_bytes:
        target = M.window.iterator.toint() + at.tid * 16
        source = window.page + Int64(head) * part_bytes + at.tid * 16
        for part in range_constexpr(3):
            blocks.copy_async(
                target + part * part_bytes, source + Int64(part * A.heads) * part_bytes, 16
            )


@cute.jit
def store_dim_first(A: Arguments, M: Smem, window: Window, head: Int32, at: Place) -> None:
    """All entries, rolled meanwhile, back to where they were asked for."""
    part_bytes = 2 * HEAD_DIM * window.channel_stride
    if at.tid * 16 < part_bytes:
        source = M.window.iterator.toint() + at.tid * 16
        target = window.page + Int64(head) * part_bytes + at.tid * 16
        for part in range_constexpr(3):
            blocks.copy_out(source + part * part_bytes, target + Int64(part * A.heads) * part_bytes)


@cute.jit
def _ask_window_major(A: Arguments, M: Smem, window: Window, head: Int32, at: Place) -> None:
    """The history, in front of the inputs."""
    row = at.tid // _ROW_LANES
    if row < 3 * HISTORY:
        target = M.x.iterator.toint() + at.tid * 16
        blocks.copy_async(target, _window_major_unit(A, window, row, window.start, head, at), 16)


@cute.jit
def store_window_major(
    A: Arguments, M: Smem, window: Window, head: Int32, at: Place, P: cutlass.Constexpr
) -> None:
    """The two inputs before this step's, then these, as the first tokens + 2 entries."""
    rows, at_once = 3 * (P.tokens + 2), THREADS // _ROW_LANES
    source = M.x.iterator.toint() + 6 * HEAD_DIM + at.tid * 16
    for i in range_constexpr(ceil_div(rows, at_once)):
        row = at.tid // _ROW_LANES + i * at_once
        if row < rows:
            blocks.copy_out(
                source + i * (THREADS * 16), _window_major_unit(A, window, row, Int32(0), head, at)
            )


@cute.jit
def _window_major_unit(
    A: Arguments, window: Window, row: Int32, first: Int32, head: Int32, at: Place
) -> Int64:
    """Address of 16 bytes of a row [entry from `first`, part] of a window."""
    entry, part = row // 3, row % 3
    channel = (part * A.heads + head) * HEAD_DIM + at.tid % _ROW_LANES * UNIT
    return window.page + (Int64(first + entry) * window.tap_stride + channel) * 2


@cute.jit
def finish(
    A: Arguments,
    M: Smem,
    item: walk.Item,
    page: Int32,
    row: Int32,
    sums: cute.Tensor,
    v: cute.Tensor,
    factors: cute.Tensor,
    at: Place,
    P: cutlass.Constexpr,
) -> Place:
    """Corrections and outputs from the products of a state, `chunked.values` and
    `chunked.output_factors`; a barrier, behind which the next item's operands are there.

    page, row   cache slot, not stored to unless positive, and record row, not stored to if negative
    """
    record = prologue.record_of(A, row, item.head)
    u, attended = chunked.finish(sums, v, M.solution, at.lane, P)
    o = cute.make_rmem_tensor(4, Float32)
    for i in range_constexpr(4):
        o[i] = blocks.rounded(attended[i])
        if page <= 0:
            o[i] = Float32(0)
            factors[i] = Float32(0)
    chunked.store_squares(o, M.squares, at.warp, at.lane, P)
    if record.row >= 0:
        chunked.store_corrections(u, record.corrections, at.warp, at.lane, P)
    arch.cp_async_wait_group(P.lines)
    at = meet()
    results = results_of(A, item, P)
    chunked.store_outputs(
        o, factors, M.squares, A.eps, results, A.heads * HEAD_DIM, at.warp, at.lane, P
    )
    return at
