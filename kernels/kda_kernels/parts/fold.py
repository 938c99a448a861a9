"""The fold of a request's pending tokens into a state, where a window's products with it follow in
the same pass.

With S the state, u_t and k^_t the recorded corrections and normalized keys of the n pending tokens,
L_t the log decays of tokens 0..t summed up:
    S <- S e^{L_{n-1}} + sum_{t<n} u_t (k^_t e^{L_{n-1} - L_t})
What a record holds of a token is its key, its raw gates and its corrections, so that first
  weigh   two warps make the weighed keys of all columns and e^{L_{n-1}}, a pair of columns per
          lane, of what `load_keys` has brought to shared memory: M.fold, as B fragments, and
          M.fold_scale
and then each warp folds its rows on tensor cores, U as A fragment (`old_corrections`,
`load_corrections`), in the registers that hold S (`fold_cell`), or line by line of a state in
shared memory (`advance_line`). U and K are two BF16 terms each, hi and lo, and all four products of
them are summed: see `fold_cell`. Lanes, cells and lines: `parts.chunked`. Serves KdaFused and
KdaFusedWS. Source: docs/operation.md, "Commit: folding n accepted tokens".
"""

# A condition known at compile time can't share an `if` with one of the running kernel.
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr

from kda_kernels.arguments import Arguments
from kda_kernels.device import blocks
from kda_kernels.device.smem import Smem
from kda_kernels.parts import chunked, conv_window
from kda_kernels.parts.conv_window import Window
from kda_kernels.parts.prologue import UNIT, Record
from kda_kernels.problem import HEAD_DIM, ceil_div

ROW_BYTES = 4 * HEAD_DIM
"""Of a state."""
WEIGHING_WARPS = 2

arch = cute.arch
GMEM = cutlass.AddressSpace.gmem
SMEM = cutlass.AddressSpace.smem


@dataclass(frozen=True)
class Shape(chunked.Shape):
    """What decides the code of a replay step.

    records         all: an item's record is read whole; pending: as far as tokens are pending, once
                    their count is known
    stream_stores   the state is stored as streaming
    """

    records: str
    stream_stores: bool

    @property
    def least_log_gate(self) -> float | None:
        return chunked.MIN_LOG_GAMMA

    @property
    def fold_places(self) -> int:
        """Lanes whose weighed keys differ: with four slots lanes t and t + 2 have the same."""
        return 4 * self.slots

    @property
    def fold_layout(self) -> Any:
        """Words of M.fold: (hi or lo, half of a cell, place, cell)."""
        pitch = 4 * self.fold_places + 4
        return cute.make_layout((2, 2, self.fold_places, self.row_cells), stride=(1, 2, 4, pitch))

    @property
    def fold_bytes(self) -> int:
        return 4 * self.row_cells * (4 * self.fold_places + 4)

    @property
    def areas(self) -> Any:
        """Shared memory: bytes by use, or what stands for it."""
        raise NotImplementedError

    @property
    def smem_bytes(self) -> int:
        return sum(self.areas.values())


@cute.jit
def clamped(pending: Int32, P: cutlass.Constexpr) -> Int32:
    """Tokens to fold."""
    return min(max(blocks.pinned(pending), Int32(0)), Int32(P.tokens))


@cute.jit
def pending_of(A: Arguments, row: Int32) -> Int32:
    """Pending tokens of a record row as they are given; 0 without a record."""
    pending = Int32(0)
    if row >= 0:
        pending = blocks.at(Int32, A.pending, row)
    return pending


@cute.jit
def window_of(A: Arguments, page: Int32, n: Int32) -> Window:
    """The history starts n - 1 entries in, if n tokens are pending."""
    window: Window = conv_window.window_of(A, page, max(n - 1, Int32(0)))
    return window


@cute.jit
def load_keys(M: Smem, record: Record, count: Int32, tid: Int32, P: cutlass.Constexpr) -> None:
    """Keys and gates of a record's first `count` tokens."""
    tokens = Int32(0)
    if record.row >= 0:
        tokens = count
    units = 2 * HEAD_DIM // UNIT
    keys = M.old_key_gates.iterator.toint()
    for i in range_constexpr(ceil_div(P.tokens * units, P.threads)):
        unit = tid + i * P.threads
        if unit < tokens * units:
            blocks.copy_async(keys + unit * 16, record.key_gates + Int64(unit) * 16, 16)


@cute.jit
def weigh(
    M: Smem,
    n: Int32,
    exp_A: Float32,
    lower_bound: Float32,
    index: Int32,
    lane: Int32,
    P: cutlass.Constexpr,
) -> None:
    """k^_t e^{L_n - L_t} of the n pending tokens as B fragments, and e^{L_n}: two columns, by one
    of two warps.

    Whatever stands in a record past the pending tokens has no part in it.
    """
    pair = 32 * index + lane
    words = cute.make_tensor(
        cute.recast_ptr(M.old_key_gates.iterator, dtype=Uint32),
        cute.make_layout((HEAD_DIM // 2, 2, P.tokens), stride=(1, HEAD_DIM // 2, HEAD_DIM)),
    )
    squares = cute.make_rmem_tensor(P.slots, Float32)
    squares.fill(Float32(0))
    for t in range_constexpr(P.tokens):
        for half in range_constexpr(2):
            word = words[32 * half + lane, 0, t]
            low, high = blocks.low_half(word), blocks.high_half(word)
            squares[t] += low * low + high * high
    norms = blocks.rsqrt(blocks.row_sums(squares, P.slots, 32, lane) + Float32(blocks.KEY_EPS))

    biases = cute.make_rmem_tensor(2, Float32)
    cute.autovec_copy(
        cute.make_tensor(M.dt_bias.iterator, cute.make_layout((2, HEAD_DIM // 2), stride=(1, 2)))[
            None, pair
        ],
        biases,
    )
    later = cute.make_rmem_tensor(2, Float32)  # log decay after token t, base 2
    weighed = cute.make_rmem_tensor((2, P.slots), Float32)
    later.fill(Float32(0))
    weighed.fill(Float32(0))
    for t in range_constexpr(P.tokens - 1, -1, -1):
        norm = arch.shuffle_sync(norms, t * (32 // P.slots))
        key, raw = words[pair, 0, t], words[pair, 1, t]
        for i in range_constexpr(2):
            k = blocks.high_half(key) if const_expr(i == 1) else blocks.low_half(key)
            g = blocks.high_half(raw) if const_expr(i == 1) else blocks.low_half(raw)
            aged = k * norm * cute.math.exp2(later[i], approx=True, ftz=True)
            log = blocks.log_decay(g, biases[i], exp_A, lower_bound) * Float32(blocks.LOG2E)
            weighed[i, t] = aged if t < n else Float32(0)
            later[i] = later[i] + (log if t < n else Float32(0))
    for i in range_constexpr(2):
        later[i] = cute.math.exp2(later[i], approx=True, ftz=True)
    scales = cute.make_tensor(
        M.fold_scale.iterator, cute.make_layout((2, HEAD_DIM // 2), stride=(1, 2))
    )
    cute.autovec_copy(later, scales[None, pair])

    # Columns 2 pair, 2 pair + 1: of half `pair % 2` of cell `pair / 8`, there columns g, g + 1 of
    # the MMA.
    fragments = cute.make_tensor(M.fold.iterator, P.fold_layout)
    for t in range_constexpr(P.slots // 2):
        for i in range_constexpr(2):
            two = cute.make_rmem_tensor(2, Uint32)
            two[0], two[1] = chunked.split_rounded(weighed[i, 2 * t], weighed[i, 2 * t + 1])
            place = fold_place(pair % 8 // 2 * 2 + i, t)
            cute.autovec_copy(two, fragments[None, pair % 2, place, pair // 8])


def fold_place(g: Any, t: Any) -> Any:
    """Where the fragment of lane 4g + t lies: spread so that neither side has bank conflicts."""
    return 8 * t + (g + 2 * t) % 8


@cute.jit
def fold_cell(
    x: cute.Tensor,
    y: cute.Tensor,
    u: tuple[Uint32, ...],
    M: Smem,
    cell: Int32,
    lane: Int32,
    P: cutlass.Constexpr,
) -> None:
    """A cell of each of the thread's two rows, x and y, in place. u: of `corrections_fragment`.

    A cell's columns 0, 1 and 2, 3 of both rows are each what an m16n8 accumulator has on this lane.
    The K axis holds tokens: up to eight as (hi, lo) of the corrections, with the keys' hi and then
    their lo; up to four as (hi, lo, hi, lo) against (hi, hi, lo, lo).
    """
    fragments = cute.make_tensor(
        cute.recast_ptr(M.fold.iterator, dtype=Uint32),
        cute.make_layout((4, P.fold_places, P.row_cells), stride=(1, 4, 4 * P.fold_places + 4)),
    )
    scales = cute.make_tensor(
        M.fold_scale.iterator, cute.make_layout((4, 4, P.row_cells), stride=(1, 4, 16))
    )
    scale = cute.make_rmem_tensor(4, Float32)
    keys = cute.make_rmem_tensor(4, Uint32)
    cute.autovec_copy(scales[None, lane % 4, cell], scale)
    cute.autovec_copy(fragments[None, fold_place(lane // 4, lane % (P.slots // 2)), cell], keys)
    for half in range_constexpr(2):
        i, j = 2 * half, 2 * half + 1
        sums = (x[i] * scale[i], x[j] * scale[j], y[i] * scale[i], y[j] * scale[j])
        if const_expr(P.slots == 8):
            sums = blocks.mma_16816(sums, u, (keys[i], keys[i]))
            sums = blocks.mma_16816(sums, u, (keys[j], keys[j]))
        else:
            sums = blocks.mma_16816(sums, u, (keys[i], keys[j]))
        x[i], x[j], y[i], y[j] = sums


@cute.jit
def old_corrections(
    M: Smem, n: Int32, tile: Int32, lane: Int32, P: cutlass.Constexpr
) -> tuple[Uint32, ...]:
    """The pending tokens' corrections of 16 rows as the A fragment of `fold_cell`."""
    pairs = cute.make_tensor(
        M.old_corrections.iterator,
        cute.make_layout((2, P.rows // 2, P.tokens), stride=(1, 2, P.rows)),
    )
    token = chunked.first_token(lane, P)
    u = cute.make_rmem_tensor((2, 2), Float32)
    for side in range_constexpr(2):
        cute.autovec_copy(
            pairs[None, 8 * tile + lane // 4, min(token + side, P.tokens - 1)], u[None, side]
        )
    fragment: tuple[Uint32, ...] = corrections_fragment(u, n, lane, P)
    return fragment


@cute.jit
def load_corrections(
    u: cute.Tensor, record: Record, warp: Int32, lane: Int32, P: cutlass.Constexpr
) -> None:
    """What `corrections_fragment` takes, of a warp's 16 rows, from the record."""
    u.fill(Float32(0))
    if record.row >= 0:
        pairs = cute.make_tensor(
            cute.make_ptr(Float32, record.corrections, GMEM, assumed_align=8),
            cute.make_layout((2, HEAD_DIM // 2, P.tokens), stride=(1, 2, HEAD_DIM)),
        )
        token = chunked.first_token(lane, P)
        for side in range_constexpr(2):
            cute.autovec_copy(
                pairs[None, 8 * warp + lane // 4, min(token + side, P.tokens - 1)], u[None, side]
            )


@cute.jit
def corrections_fragment(
    u: cute.Tensor, n: Int32, lane: Int32, P: cutlass.Constexpr
) -> tuple[Uint32, ...]:
    """The A fragment of `fold_cell`.

    u: (row, token) of the lane's two rows and its two tokens, `chunked.first_token` and the next
    """
    token = chunked.first_token(lane, P)
    for side in range_constexpr(2):
        for row in range_constexpr(2):
            u[row, side] = u[row, side] if token + side < n else Float32(0)
    high_x, low_x = chunked.split_rounded(u[0, 0], u[0, 1])
    high_y, low_y = chunked.split_rounded(u[1, 0], u[1, 1])
    if const_expr(P.slots == 8):
        return high_x, high_y, low_x, low_y
    x = high_x if lane % 4 < 2 else low_x
    y = high_y if lane % 4 < 2 else low_y
    return x, y, x, y


@cute.jit
def advance_line(
    sums: cute.Tensor,
    M: Smem,
    u: tuple[Uint32, ...],
    slot: Int32,
    state: Int64,
    n: Int32,
    line: Int32,
    warp: Int32,
    lane: Int32,
    P: cutlass.Constexpr,
) -> None:
    """Fold a line of the warp's rows, for which each of its lanes has waited, add its products,
    store it if n > 0.

    slot    shared address of the line's LINE_BYTES
    state   address of the item's state

    With n = 0 the fold leaves a line as it is.
    """
    g, t = lane // 4, lane % 4
    piece = 32 * chunked.WARPS * 16  # of the warp's rows 4j .. 4j + 3, from one j to the next
    cells = slot + 512 * warp
    arch.sync_warp()
    for half in range_constexpr(2):
        if const_expr(half == 1 and P.tiles == 2 and P.ctas_per_sm > 2):
            arch.sync_warp()  # both halves at once take too many registers
        first = cells + (g // 2 * piece + g % 2 * 256 + (g % 2 ^ half) * 64 + t * 16)
        x = cute.make_rmem_tensor(4, Float32)
        y = cute.make_rmem_tensor(4, Float32)
        cute.autovec_copy(_shared_cell(first), x)
        cute.autovec_copy(_shared_cell(first + 128), y)
        fold_cell(x, y, u, M, 2 * line + half, lane, P)
        cute.autovec_copy(x, _shared_cell(first))
        cute.autovec_copy(y, _shared_cell(first + 128))
        chunked.multiply_cell(sums, words(x), words(y), M.fragments, 2 * line + half, lane, P)
    if n > 0:
        arch.sync_warp()
        # Asked for anew, so that nothing but the state's address is kept in registers for it.
        tid = blocks.special("%tid.x") & 511  # which is known not to be negative
        warp, lane = tid // 32, tid % 32
        cells = slot + 512 * warp
        rows = state + Int64((16 * warp + lane // 8) * ROW_BYTES + line * 128 + lane % 8 * 16)
        target = cute.make_tensor(
            cute.make_ptr(Float32, rows, GMEM, assumed_align=16),
            cute.make_layout((4, 4), stride=(1, 4 * HEAD_DIM)),
        )
        for j in range_constexpr(4):
            four = cute.make_rmem_tensor(4, Float32)
            cute.autovec_copy(
                _shared_cell(cells + (lane ^ (lane // 16 * 4)) * 16 + j * piece), four
            )
            cute.copy(store_atom(P), four, target[None, j])


def _shared_cell(address: Int32) -> cute.Tensor:
    return cute.make_tensor(
        cute.make_ptr(Float32, address, SMEM, assumed_align=16), cute.make_layout(4)
    )


def words(x: cute.Tensor) -> cute.Tensor:
    """The same registers as words."""
    return cute.make_tensor(cute.recast_ptr(x.iterator, dtype=Uint32), cute.make_layout(4))


def store_atom(P: Shape) -> Any:
    """Copies 16 bytes of a state to where it lies."""
    mode = (
        cute.nvgpu.StoreCacheMode.STREAMING if P.stream_stores else cute.nvgpu.StoreCacheMode.NONE
    )
    return cute.make_copy_atom(
        cute.nvgpu.CopyR2GOp(), Float32, num_bits_per_copy=128, store_cache_mode=mode
    )
