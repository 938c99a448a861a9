"""The prologue of a CTA of at least 256 threads that has all 128 rows of an item: KdaWide, KdaFused
with source=shared.

The grid is heads x requests. Gate and convolution weights go to registers, all else to shared
memory by cp.async.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, range_constexpr

from kda_kernels.arguments import Arguments
from kda_kernels.device import blocks
from kda_kernels.device.smem import Smem
from kda_kernels.parts import chunked, prologue
from kda_kernels.parts.prologue import GMEM, UNIT, Place
from kda_kernels.problem import CONV_WIDTH, HEAD_DIM, ceil_div

arch = cute.arch


@cute.jit
def place(A: Arguments) -> Place:
    tid, _, _ = arch.thread_idx()
    head, _, _ = arch.block_idx()
    warp, D = arch.make_warp_uniform(tid // 32), A.heads * HEAD_DIM
    return Place(tid, warp, tid % 32, Int32(0), head, head * HEAD_DIM, D)


@cute.jit
def load_vectors(A: Arguments, M: Smem, at: Place, P: cutlass.Constexpr) -> None:
    """The head's vectors of FP32, by cp.async."""
    quads = HEAD_DIM // 4
    if at.tid < quads:
        blocks.copy_async(
            M.dt_bias.iterator.toint() + at.tid * 16,
            A.dt_bias + Int64(at.channel + 4 * at.tid) * 4,
            16,
        )
    if at.tid >= P.threads - quads:
        unit = at.tid - (P.threads - quads)
        blocks.copy_async(
            M.norm_weight.iterator.toint() + unit * 16, A.norm_weight + Int64(unit) * 16, 16
        )
    if at.tid == quads:
        blocks.copy_async(M.A_log.iterator.toint(), A.A_log + Int64(at.head) * 4, 4)


@cute.jit
def load_projection(A: Arguments, M: Smem, request: Int32, at: Place, P: cutlass.Constexpr) -> None:
    """The item's rows of q, k, v, output gate and f_a of all tokens; beta. A half-warp takes every
    third row of one."""
    lanes, parts, step = HEAD_DIM // UNIT, 5, 3
    token_bytes = 2 * HEAD_DIM
    row_bytes = A.pitch * 2
    projected = A.projected + Int64(request * P.tokens) * row_bytes
    part, first, u = at.tid // lanes % parts, at.tid // lanes // parts, at.tid % lanes
    if first < step:
        column = part * at.D + at.channel + u * UNIT
        target = M.x.iterator.toint() + (P.history * 3 + part) * token_bytes
        distance, swizzle = Int32(3 * token_bytes), Int32(0)
        if part == 3:
            target, distance = M.out_gate.iterator.toint(), Int32(token_bytes)
        if part == 4:
            target, distance, swizzle = M.f_a.iterator.toint(), Int32(token_bytes), Int32(7)
            column = column - at.channel
        source = projected + first * row_bytes + Int64(column) * 2
        for i in range_constexpr(ceil_div(P.tokens, step)):
            token = first + i * step
            if token < P.tokens:
                cell = target + token * distance + (u ^ (token & swizzle)) * 16
                prologue.copy_unit(cell, source + i * (step * row_bytes), P.streamable)
    prologue.load_beta(M, projected + Int64(4 * at.D) * 2, row_bytes, at, P)


@cute.jit
def load_taps(
    A: Arguments, taps: cute.Tensor, bias: cute.Tensor, at: Place, P: cutlass.Constexpr
) -> None:
    """Convolution weight and bias of this thread's two channels, to registers."""
    bias.fill(P.conv_dtype(0))
    if at.warp < chunked.CONVOLVING_WARPS:
        part, pair = at.tid // (HEAD_DIM // 2), at.tid % (HEAD_DIM // 2)
        size = P.weight_bytes
        for tap in range_constexpr(CONV_WIDTH):
            element = Int64(part * CONV_WIDTH + tap) * at.D + (at.channel + 2 * pair)
            source = cute.make_ptr(
                P.conv_dtype, A.conv_weight + element * size, GMEM, assumed_align=2 * size
            )
            cute.autovec_copy(cute.make_tensor(source, cute.make_layout(2)), taps[None, tap])
        if A.conv_bias != Int64(0):
            element = Int64(part) * at.D + (at.channel + 2 * pair)
            source = cute.make_ptr(
                P.conv_dtype, A.conv_bias + element * size, GMEM, assumed_align=2 * size
            )
            cute.autovec_copy(cute.make_tensor(source, cute.make_layout(2)), bias)
    # Keeps these loads in front of the state's copies: behind them, they would come late.
    arch.sync_warp()
