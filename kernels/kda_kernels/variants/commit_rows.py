"""KdaCommit with source=bulk or registers: a CTA per (rows_per_cta rows of a page, head, request,
layer).

More CTAs of an SM instead of stages:
  load      everything at once: rows by one bulk copy or straight to registers; keys, gates,
            corrections by cp.async
  weigh     thread c makes e^{L_n} and k^_t e^{L_n - L_t} of key channel c, meanwhile; a page's CTAs
            each make them
  fold      thread = `columns` columns, some rows at a time; FP32; straight to the destination; with
            align first to S_m
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, const_expr, range_constexpr

from kda_kernels.device import bulk, smem
from kda_kernels.device.smem import Area, Barriers, Smem
from kda_kernels.problem import HEAD_DIM, MAX_TOKENS, ceil_div
from kda_kernels.step import host_of
from kda_kernels.variants.commit_fold import (
    RECORD_BYTES,
    THREADS,
    Arguments,
    Plan,
    address_of,
    counts_of,
    fold_rows,
    fold_tile,
    look_up,
    rescale,
    store_rows,
    take_weighed,
    weigh,
    weights_of,
)

# `if`s inside an `if const_expr` stay nested, so that the outer one is decided while tracing.
# ruff: noqa: SIM102
arch = cute.arch
GMEM = cutlass.AddressSpace.gmem


def areas(P: Plan) -> dict[str, Area]:
    if P.source == "registers":
        return P.vector_areas
    tile = Area(P.dtype, P.tile_bytes // P.item_bytes)
    return {"tile": tile} | P.vector_areas | {"barriers": Barriers(align=8)}


@cute.kernel
def kda_commit_rows(A: Arguments, P: cutlass.Constexpr) -> None:
    tid, _, _ = arch.thread_idx()
    part, request, layer = arch.block_idx()
    head = part // P.parts
    part = part % P.parts

    M = smem.allocate_as_they_are(areas(P))
    arch.griddepcontrol_wait()
    arch.griddepcontrol_launch_dependents()

    found = look_up(A, request, layer, P)
    a_log, bias = weights_of(A, layer * A.heads + head, tid)
    if const_expr(P.source == "bulk"):
        if tid == 0:
            bulk.init(M.barriers, 1)
    keep_order()

    n, m = counts_of(found, A.tokens, P)
    if n > 0 and found.page > 0 and found.target > 0 and found.row >= 0:
        first_row = part * P.rows_per_cta
        offset = Int64(first_row * (HEAD_DIM * P.item_bytes))
        page = (
            address_of(found.states, found.page, head, HEAD_DIM * HEAD_DIM, P.item_bytes) + offset
        )
        target_page = (
            address_of(found.states, found.target, head, HEAD_DIM * HEAD_DIM, P.item_bytes) + offset
        )
        corrections = (
            address_of(found.corrections, found.row, head, A.tokens * HEAD_DIM, 4) + first_row * 4
        )
        records = address_of(found.records, found.row, head, A.tokens * 2 * HEAD_DIM, 2)
        raw = cute.make_rmem_tensor((P.vector, P.runs, P.rows, P.steps), P.dtype)
        if const_expr(P.source == "bulk"):
            if tid == 0:
                bulk.load(M.tile.iterator, page, Int32(P.tile_bytes), M.barriers)
        copy_tokens(M.records.iterator.toint(), records, RECORD_BYTES, n, tid)
        copy_tokens(M.corrections.iterator.toint(), corrections, P.rows_per_cta * 4, n, tid)
        arch.cp_async_commit_group()
        if const_expr(P.source == "registers"):
            load_rows(raw, page, tid, P)
            keep_order()
        arch.cp_async_wait_group(0)
        arch.sync_threads()
        weigh(M, n, m, a_log, bias, A.lower_bound, tid, P)
        if const_expr(P.source == "bulk"):
            arch.mbarrier_wait(M.barriers, 0)
        if const_expr(P.align):
            if m > 0:
                boundary_page = (
                    address_of(
                        found.states, found.boundary, head, HEAD_DIM * HEAD_DIM, P.item_bytes
                    )
                    + offset
                )
                # Keys of tokens >= m are already those of S_n: they stay out of S_m.
                fold(M, raw, m, boundary_page, tid, P)
                arch.sync_threads()
                rescale(M, m, tid, P)
        fold(M, raw, n, target_page, tid, P)


@cute.jit
def fold(
    M: Smem, raw: cute.Tensor, count: Int32, address: Int64, tid: Int32, P: cutlass.Constexpr
) -> None:
    """`count` tokens into the CTA's rows, which wait in shared memory or `raw` and stay as they
    are, to an address."""
    keys, decay = take_weighed(M, count, tid, P)
    if const_expr(P.source == "bulk"):
        tile = cute.make_tensor(
            M.tile.iterator, cute.make_layout(P.tile_shape, stride=P.tile_stride)
        )
        fold_tile(tile, 0, M.corrections, 0, keys, decay, count, address, False, tid, P)
    else:
        fold_registers(raw, M.corrections, keys, decay, count, address, tid, P)


@cute.jit
def keep_order() -> None:
    """Loads before this are issued before it: ptxas would put them off until behind a branch or a
    wait."""
    arch.sync_warp()


@cute.jit
def copy_tokens(
    shared: Int32, address: Int64, token_bytes: cutlass.Constexpr, n: Int32, tid: Int32
) -> None:
    """Start to copy the first `token_bytes` of the 512-byte records of tokens < n, packed; zeros
    from n on."""
    token_pieces = token_bytes // 16
    for i in range_constexpr(ceil_div(MAX_TOKENS * token_pieces, THREADS)):
        piece = i * THREADS + tid
        token = piece // token_pieces
        # A copy of no bytes still wants an address: that of the first token.
        nbytes, begin = Int32(0), Int32(0)
        if token < n:
            nbytes, begin = Int32(16), token * RECORD_BYTES + piece % token_pieces * 16
        if token < MAX_TOKENS:
            arch.inline_ptx(
                "cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};",
                read_only_args=[shared + piece * 16, address + begin, nbytes],
            )


@cute.jit
def fold_registers(
    raw: cute.Tensor,
    corrections: cute.Tensor,
    keys: cute.Tensor,
    decay: cute.Tensor,
    count: Int32,
    address: Int64,
    tid: Int32,
    P: cutlass.Constexpr,
) -> None:
    """`fold` of rows in registers [vector, runs, rows, steps], which stay as they are."""
    for step in range_constexpr(P.steps):
        rows = fold_rows(
            raw[None, None, None, step], corrections, keys, decay, count, tid // P.lanes, step, P
        )
        store_rows(rows, address, step, tid, P)


@cute.jit
def load_rows(raw: cute.Tensor, address: Int64, tid: Int32, P: cutlass.Constexpr) -> None:
    """This thread's part of the tile at the address to registers: [vector, runs, rows, steps]."""
    nbytes = P.vector * P.item_bytes
    layout = cute.make_layout(P.tile_shape, stride=P.tile_stride)
    tile = cute.make_tensor(cute.make_ptr(P.dtype, address, GMEM, assumed_align=nbytes), layout)
    priority = cute.nvgpu.CacheEvictionPriority.EVICT_NORMAL
    if const_expr(P.hints):
        priority = cute.nvgpu.CacheEvictionPriority.NO_ALLOCATE
    load = cute.nvgpu.CopyG2ROp()
    atom = cute.make_copy_atom(
        load, P.dtype, num_bits_per_copy=8 * nbytes, l1c_evict_priority=priority
    )
    for step in range_constexpr(P.steps):
        for r in range_constexpr(P.rows):
            for j in range_constexpr(P.runs):
                piece = tile[(None, j, r), (tid % P.lanes, tid // P.lanes), step, 0]
                cute.copy(atom, piece, raw[None, j, r, step])


HOST = host_of(kda_commit_rows)
