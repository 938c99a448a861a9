"""A state advanced token by token by 256 threads: KdaWide and KdaStream, kinds decode and spec.

A half-warp holds a row, a warp 16 rows, and a lane the same columns of every row that it has a part
of: its cells of 16 bytes, 64 c + 4 l .. +3 (fp32) or 8 l .. +7 (bf16), l the lane of its half-warp.
A piece is two rows of each half-warp, together four neighbouring ones, row 2j + half. Cells wait in
shared memory, [cell][thread], for their thread alone.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr, range_constexpr

from kda_kernels.device import blocks
from kda_kernels.parts import chunked
from kda_kernels.parts.prologue import GMEM, SMEM
from kda_kernels.problem import HEAD_DIM

LANES = 16
"""Lanes that share a row."""
COLUMNS = HEAD_DIM // LANES
PIECE_ROWS = 2
HALF_WARP = (32 - LANES) << 8 | 31
"""mask_and_clamp of shuffles within a half-warp."""
_THREADS = 32 * chunked.WARPS


@cute.jit
def first_cell(piece: Int32, warp: Int32, lane: Int32, P: cutlass.Constexpr) -> Int32:
    """Byte of a state where this thread's first cell of a piece lies."""
    row = 16 * warp + 2 * PIECE_ROWS * piece + lane // LANES
    return row * HEAD_DIM * P.item_bytes + lane % LANES * 16


@cute.jit
def ask_piece(
    cells: Int32, source: Int64, first: cutlass.Constexpr, policy: Int64, P: cutlass.Constexpr
) -> None:
    """This thread's cells of a piece by cp.async. first: of the thread's rows, from where cells and
    source begin."""
    count = P.item_bytes // 2  # cells of a row
    for j in range_constexpr(first, first + PIECE_ROWS):
        for c in range_constexpr(count):
            cell = cells + (j * count + c) * (_THREADS * 16)
            address = source + (2 * j * HEAD_DIM * P.item_bytes + c * (16 * LANES))
            if const_expr(P.evict):
                blocks.copy_async_hinted(cell, address, 16, policy)
            else:
                blocks.copy_async(cell, address, 16)


@cute.jit
def take_row(cells: Int32, row: cutlass.Constexpr, P: cutlass.Constexpr) -> cute.Tensor:
    """This thread's columns of its row-th row, from their cells."""
    count, width = P.item_bytes // 2, 16 // P.item_bytes
    raw = cute.make_rmem_tensor(COLUMNS, P.dtype)
    pieces = cute.make_tensor(raw.iterator, cute.make_layout((width, count), stride=(1, width)))
    for c in range_constexpr(count):
        cell = cells + (row * count + c) * (_THREADS * 16)
        source = cute.make_tensor(
            cute.make_ptr(P.dtype, cell, SMEM, assumed_align=16), cute.make_layout(width)
        )
        cute.autovec_copy(source, pieces[None, c])
    return raw


@cute.jit
def store_row(raw: cute.Tensor, address: Int64, P: cutlass.Constexpr) -> None:
    """This lane's columns of a row to its place in a page. address: of its first cell."""
    count, width = P.item_bytes // 2, 16 // P.item_bytes
    mode = cute.nvgpu.StoreCacheMode.NONE
    if const_expr(P.hints):
        mode = cute.nvgpu.StoreCacheMode.STREAMING
    atom = cute.make_copy_atom(
        cute.nvgpu.CopyR2GOp(), P.dtype, num_bits_per_copy=128, store_cache_mode=mode
    )
    pieces = cute.make_tensor(raw.iterator, cute.make_layout((width, count), stride=(1, width)))
    target = cute.make_tensor(
        cute.make_ptr(P.dtype, address, GMEM, assumed_align=16),
        cute.make_layout((width, count), stride=(1, LANES * width)),
    )
    for c in range_constexpr(count):
        cute.copy(atom, pieces[None, c], target[None, c])
