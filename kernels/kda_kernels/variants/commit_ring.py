"""KdaCommit with source=ring: a CTA per (chunk of heads of one request, request, layer); pages pass
through two stages.

A chunk is gcd(heads, heads_per_cta) heads. A page passes through shared memory in tiles of 32 KiB,
one (BF16) or two (FP32), kept in two stages. Per head:
  weigh     keys and gates wait in shared memory; thread c makes e^{L_n} and k^_t e^{L_n - L_t} of
            key channel c and leaves them where the keys were; all threads take those of their 8
            columns into registers; the next head's keys and gates start to load
  fold      per tile: thread = 8 columns x 4 (align: 2) rows at a time; FP32; the result goes to the
            destination page straight from registers, or in place and out by a bulk copy
  refill    the free stage starts to load the tile after next; the next head's corrections start to
            load
align: a window that crosses a block boundary after m tokens is folded twice from the same tiles,
first to S_m.

Shared memory stays below a third of an SM, which is why keys and corrections have one buffer each:
their load hides behind the fold and behind `weigh`, that of the other CTAs of the SM behind
everything else.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, const_expr, range_constexpr

from kda_kernels.device import bulk, smem
from kda_kernels.device.smem import Area, Barriers, Smem
from kda_kernels.problem import HEAD_DIM, MAX_TOKENS
from kda_kernels.step import host_of
from kda_kernels.variants.commit_fold import (
    RECORD_BYTES,
    STAGES,
    TILE_BYTES,
    Arguments,
    Plan,
    address_of,
    counts_of,
    fold_tile,
    look_up,
    rescale,
    take_weighed,
    weigh,
    weights_of,
)

_KEYS, _CORRECTIONS, _TILES = 0, 1, 2
"""mbarriers; one per stage from _TILES on."""

# `if`s inside an `if const_expr` stay nested, so that the outer one is decided while tracing.
# ruff: noqa: SIM102
arch = cute.arch


def areas(P: Plan) -> dict[str, Area]:
    tiles = Area(P.dtype, STAGES * TILE_BYTES // P.item_bytes)
    return (
        {"tiles": tiles} | P.vector_areas | {"barriers": Barriers(shape=_TILES + STAGES, align=8)}
    )


@cute.kernel
def kda_commit(A: Arguments, P: cutlass.Constexpr) -> None:
    tid, _, _ = arch.thread_idx()
    first, request, layer = arch.block_idx()
    first = first * A.chunk

    M = smem.allocate_as_they_are(areas(P))
    tiles = cute.make_tensor(M.tiles.iterator, cute.make_layout(P.tile_shape, stride=P.tile_stride))
    arch.griddepcontrol_wait()
    arch.griddepcontrol_launch_dependents()

    found = look_up(A, request, layer, P)
    gate_row = layer * A.heads + first
    a_log, bias = weights_of(A, gate_row, tid)
    if tid == 0:
        bulk.init(M.barriers, _TILES + STAGES)
    arch.sync_threads()

    n, m = counts_of(found, A.tokens, P)
    if n > 0 and found.page > 0 and found.target > 0 and found.row >= 0:
        pages = address_of(found.states, found.page, first, HEAD_DIM * HEAD_DIM, P.item_bytes)
        target_pages = address_of(
            found.states, found.target, first, HEAD_DIM * HEAD_DIM, P.item_bytes
        )
        boundary_pages = target_pages
        if const_expr(P.align):
            boundary_pages = address_of(
                found.states, found.boundary, first, HEAD_DIM * HEAD_DIM, P.item_bytes
            )
        corrections = address_of(found.corrections, found.row, first, A.tokens * HEAD_DIM, 4)
        records = address_of(found.records, found.row, first, A.tokens * 2 * HEAD_DIM, 2)
        record_bytes = n * RECORD_BYTES
        record_pitch = Int64(A.tokens * RECORD_BYTES)
        if tid == 0:
            bulk.load(M.records.iterator, records, record_bytes, M.barriers + _KEYS)
            load_tile(tiles, pages, Int32(0), M)
            bulk.load(M.corrections.iterator, corrections, record_bytes, M.barriers + _CORRECTIONS)
            if A.chunk * P.tiles > 1:
                load_tile(tiles, pages, Int32(1), M)
        # Tokens that weren't accepted: their folded keys are zero, so their corrections need only
        # be finite. The copies write tokens < n alone, of every head.
        for t in range_constexpr(MAX_TOKENS):
            if t >= n:
                M.corrections[tid, t] = Float32(0)

        for i in range(A.chunk):
            arch.mbarrier_wait(M.barriers + _KEYS, i & 1)
            weigh(M, n, m, a_log, bias, A.lower_bound, tid, P)
            if const_expr(P.store == "bulk"):
                if tid == 0:
                    refill_after_store(tiles, pages, i * P.tiles, A.chunk * P.tiles, M)
            if const_expr(P.align):
                if m > 0:
                    fold_to_boundary(M, tiles, i, m, boundary_pages, tid, P)

            keys, decay = take_weighed(M, n, tid, P)
            bulk.publish()
            arch.sync_threads()
            if tid == 0 and i + 1 < A.chunk:
                bulk.load(
                    M.records.iterator,
                    records + Int64(i + 1) * record_pitch,
                    record_bytes,
                    M.barriers + _KEYS,
                )
            # Behind the fence of `publish`, which would wait for them.
            following = min(i + 1, A.chunk - 1)
            a_log, bias = weights_of(A, gate_row + following, tid)

            arch.mbarrier_wait(M.barriers + _CORRECTIONS, i & 1)
            for part in cutlass.range(P.tiles, unroll=1):
                tile = i * P.tiles + part
                stage = stage_of(tile)
                if const_expr(P.store == "bulk" and P.tiles > 1):
                    if tid == 0 and part > 0:
                        refill_after_store(tiles, pages, tile, A.chunk * P.tiles, M)
                arch.mbarrier_wait(M.barriers + _TILES + stage, phase_of(tile))
                address = target_pages + Int64(tile) * TILE_BYTES
                fold_tile(
                    tiles,
                    stage,
                    M.corrections,
                    part,
                    keys,
                    decay,
                    n,
                    address,
                    P.store == "bulk",
                    tid,
                    P,
                )
                if const_expr(P.store == "bulk"):
                    bulk.publish()
                arch.sync_threads()
                if tid == 0:
                    if const_expr(P.store == "bulk"):
                        bulk.store(
                            address, tiles[(None, None, None, stage)].iterator, Int32(TILE_BYTES)
                        )
                    if part == P.tiles - 1 and i + 1 < A.chunk:
                        following_corrections = corrections + Int64(i + 1) * record_pitch
                        bulk.load(
                            M.corrections.iterator,
                            following_corrections,
                            record_bytes,
                            M.barriers + _CORRECTIONS,
                        )
                    if const_expr(P.store == "direct"):
                        if tile + STAGES < A.chunk * P.tiles:
                            load_tile(tiles, pages, tile + STAGES, M)
        if const_expr(P.store == "bulk"):
            if tid == 0:
                bulk.wait_stores()


@cute.jit
def fold_to_boundary(
    M: Smem,
    tiles: cute.Tensor,
    head: Int32,
    m: Int32,
    pages: Int64,
    tid: Int32,
    P: cutlass.Constexpr,
) -> None:
    """A head's first m tokens folded into its tiles, which stay; then its keys weighed for all its
    tokens.

    head    of the chunk
    pages   address of the boundary slot's first head
    """
    # Keys of tokens >= m are already those of S_n: they stay out of S_m.
    keys, decay = take_weighed(M, m, tid, P)
    arch.mbarrier_wait(M.barriers + _CORRECTIONS, head & 1)
    for part in cutlass.range(P.tiles, unroll=1):
        tile = head * P.tiles + part
        arch.mbarrier_wait(M.barriers + _TILES + stage_of(tile), phase_of(tile))
        address = pages + Int64(tile) * TILE_BYTES
        fold_tile(
            tiles, stage_of(tile), M.corrections, part, keys, decay, m, address, False, tid, P
        )
    arch.sync_threads()
    rescale(M, m, tid, P)


@cute.jit
def stage_of(tile: Int32) -> Int32:
    return tile & 1


@cute.jit
def phase_of(tile: Int32) -> Int32:
    """Parity of the stage's barrier once the tile is there."""
    return (tile >> 1) & 1


@cute.jit
def load_tile(tiles: cute.Tensor, pages: Int64, tile: Int32, M: Smem) -> None:
    """Start to load the chunk's tile number `tile` into its stage."""
    stage = stage_of(tile)
    bulk.load(
        tiles[(None, None, None, stage)].iterator,
        pages + Int64(tile) * TILE_BYTES,
        Int32(TILE_BYTES),
        M.barriers + _TILES + stage,
    )


@cute.jit
def refill_after_store(
    tiles: cute.Tensor, pages: Int64, tile: Int32, count: Int32, M: Smem
) -> None:
    """Before tile number `tile` of `count` is folded: load the next one where the one before was
    stored from.

    So late that the store has had the time of `weigh` to read its stage.
    """
    if tile > 0 and tile + 1 < count:
        bulk.wait_stores_read()
        load_tile(tiles, pages, tile + 1, M)


HOST = host_of(kda_commit)
