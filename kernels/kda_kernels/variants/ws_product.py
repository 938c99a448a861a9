"""KdaWS's product: what the state takes part in.

record   the chunked form, warp = 16 state rows: products of the state with all vectors, and this
         warp's part of those of vectors with vectors, on tensor cores
others   token by token, warp = 16 state rows, two at a time: the state stays in registers over the
tokens A thread's cells of the state come by cp.async, item n + stages as soon as item n's are read,
without a barrier.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr

from kda_kernels import walk
from kda_kernels.arguments import Arguments
from kda_kernels.device import blocks, ring
from kda_kernels.device.smem import Smem
from kda_kernels.parts import chunked
from kda_kernels.parts.chunked import STEPS
from kda_kernels.problem import HEAD_DIM
from kda_kernels.variants.ws_plan import (
    PRODUCT,
    PROLOGUE,
    RESULT_PITCH,
    copy_async,
    fragments_of,
    load_numbers,
    pages_of,
    place_of,
    sums_of,
    total_of,
)
from kda_kernels.walk import Item

arch = cute.arch


@cute.jit
def page_of(A: Arguments, base: Int64, slot: Int32, head: Int32, P: cutlass.Constexpr) -> Int64:
    return (
        base + (Int64(slot) * A.state_stride + Int64(head) * (HEAD_DIM * HEAD_DIM)) * P.item_bytes
    )


@cute.jit
def cells_of(M: Smem, P: cutlass.Constexpr) -> cute.Tensor:
    """(word, thread, cell, stage)"""
    threads = 32 * PRODUCT
    return cute.make_tensor(
        M.state.iterator,
        cute.make_layout(
            (4, threads, P.units, P.state_stages), stride=(1, 4, 4 * threads, 4 * threads * P.units)
        ),
    )


@cute.jit
def load_group(
    cells: cute.Tensor,
    page: Int64,
    group: cutlass.Constexpr,
    stage: Int32,
    tid: Int32,
    P: cutlass.Constexpr,
) -> None:
    """Ask for a group of a thread's cells, from its place in a page."""
    for i in range_constexpr(P.units // P.groups):
        unit = group * (P.units // P.groups) + i
        copy_async(cells[None, tid, unit, stage].iterator.toint(), page + P.unit_offset(unit))


@cute.jit
def first_loads(
    A: Arguments,
    base: Int64,
    cells: cute.Tensor,
    start: Item,
    count: Int32,
    tid: Int32,
    zero: Int32,
    P: cutlass.Constexpr,
) -> Item:
    """Ask for the states that there are stages for. Returns the item after them."""
    items, sources = [], []
    item = start
    for _ in range_constexpr(P.state_stages):
        items.append(item)
        sources.append(pages_of(A, item.request, zero, P)[1])
        item = walk.next_item(item, A.heads, A.requests)
    for n in range_constexpr(P.state_stages):
        page = page_of(A, base, sources[n], items[n].head, P)
        for group in range_constexpr(P.groups):
            if n < count and sources[n] > 0:
                load_group(cells, page, group, Int32(n), tid, P)
            arch.cp_async_commit_group()
    return item


@cute.jit
def record_product(
    A: Arguments,
    M: Smem,
    start: Item,
    count: Int32,
    warp: Int32,
    lane: Int32,
    zero: Int32,
    P: cutlass.Constexpr,
) -> None:
    """Warp = 16 state rows, lane (g, q) = columns of rows g and g + 8. Its cells are refilled with
    item n + stages."""
    tid = warp * 32 + lane
    base = A.state + Int64((warp * 16 + lane // 4) * (HEAD_DIM * P.item_bytes) + lane % 4 * 16)
    cells = cells_of(M, P)
    item = first_loads(A, base, cells, start, count, tid, zero, P)
    numbers = cute.make_rmem_tensor(P.numbers, Int32)
    load_numbers(A, numbers, start, lane, P)
    arch.griddepcontrol_wait()
    arch.griddepcontrol_launch_dependents()
    arch.sync_threads()

    place = place_of(lane)
    state = ring.first()
    for n in cutlass.range(count, unroll=1):
        turn, result_turn = M.vector_ring.turn(n), M.result_ring.turn(n)
        later = n + P.state_stages
        slot = arch.shuffle_sync(numbers[0], later % 32)
        refill = slot if later < count else Int32(0)
        page = page_of(A, base, slot, item.head, P)
        item = walk.next_item(item, A.heads, A.requests)
        if (later + 1) % 32 == 0 and later + 1 < count:
            load_numbers(A, numbers, item, lane, P)

        M.vector_ring.consumer_wait(turn)
        fragments = fragments_of(M, turn.stage, P)
        coefficients = vector_products(fragments, warp, place, P)
        none = (Float32(0), Float32(0), Float32(0), Float32(0))
        sums = [none for _ in range(P.tiles)]
        corrections = [none for _ in range(P.tiles)]  # products with a second term
        for group in range_constexpr(P.groups):
            # All stages are asked for, each group again as soon as it is read: this one is the
            # oldest.
            arch.cp_async_wait_group(P.state_stages * P.groups - 1)
            words = cute.make_rmem_tensor((4, P.units // P.groups), Uint32)
            for i in range_constexpr(P.units // P.groups):
                unit = group * (P.units // P.groups) + i
                cute.autovec_copy(cells[None, tid, unit, state.stage], words[None, i])
            for j in range_constexpr(STEPS // P.groups):
                step = group * (STEPS // P.groups) + j
                a, a_rest = operand(words, j, P)
                for tile in range_constexpr(P.tiles):
                    b = vector_of(fragments, place, tile, step)
                    sums[tile] = blocks.mma_16816(sums[tile], a, (b[0, 0], b[0, 1]))
                    if const_expr(P.terms == 2):
                        corrections[tile] = blocks.mma_16816(
                            corrections[tile], a, (b[1, 0], b[1, 1])
                        )
                    if const_expr(P.state_dtype == "fp32"):
                        corrections[tile] = blocks.mma_16816(
                            corrections[tile], a_rest, (b[0, 0], b[0, 1])
                        )
            if refill > 0:
                load_group(cells, page, group, state.stage, tid, P)
            arch.cp_async_commit_group()
        M.vector_ring.consumer_release(turn)

        M.result_ring.producer_acquire(result_turn)
        put_results(
            M.results[None, result_turn.stage], sums, corrections, coefficients, warp, lane, P
        )
        M.result_ring.producer_commit(result_turn)
        state = ring.after(state, P.state_stages)


@cute.jit
def vector_of(fragments: cute.Tensor, place: Int32, tile: Any, step: Any) -> cute.Tensor:
    """A lane's fragment: (first and second term, half)."""
    words = cute.make_rmem_tensor((2, 2), Uint32)
    cute.autovec_copy(fragments[None, None, place, tile, step], words)
    return words


@cute.jit
def truncated_off(x: Float32, y: Float32) -> Uint32:
    """What `chunked.truncated` leaves of two floats, rounded to BF16, as the halves of a word.

    The second term of `chunked.split_truncated`, whose order of instructions schedules this kernel
    otherwise.
    """
    return blocks.pack(x - blocks.high_half(x), y - blocks.high_half(y))


@cute.jit
def operand(
    words: cute.Tensor, j: cutlass.Constexpr, P: cutlass.Constexpr
) -> tuple[tuple[Uint32, ...], tuple[Uint32, ...]]:
    """First and second terms of step j of a group, from the cells of rows g (even) and g + 8
    (odd)."""
    if const_expr(P.state_dtype == "bf16"):
        a = (words[2 * j, 0], words[2 * j, 1], words[2 * j + 1, 0], words[2 * j + 1, 1])
        return a, a
    cells = cute.recast_tensor(words, Float32)
    pairs = [
        (cells[2 * half, 2 * j + row], cells[2 * half + 1, 2 * j + row])
        for half in range(2)
        for row in range(2)
    ]
    first = tuple(chunked.truncated(*pair) for pair in pairs)
    return first, tuple(truncated_off(*pair) for pair in pairs)


@cute.jit
def vector_products(
    fragments: cute.Tensor, warp: Int32, place: Int32, P: cutlass.Constexpr
) -> tuple[Float32, Float32]:
    """This warp's part of A or B: (k_s / Gamma_s) . vector n over `tiles` steps, s = g, n = 2q and
    2q + 1 of its tile.

    The vectors of tile `warp % tiles` and the steps from `warp // tiles * tiles` on.
    """
    none = Uint32(0)
    sums = (Float32(0), Float32(0), Float32(0), Float32(0))
    corrections = sums
    for i in range_constexpr(P.tiles):
        step = warp // P.tiles * P.tiles + i
        a = vector_of(fragments, place, P.tiles, step)
        b = vector_of(fragments, place, warp % P.tiles, step)
        first, second = (a[0, 0], none, a[0, 1], none), (a[1, 0], none, a[1, 1], none)
        sums = blocks.mma_16816(sums, first, (b[0, 0], b[0, 1]))
        corrections = blocks.mma_16816(corrections, first, (b[1, 0], b[1, 1]))
        corrections = blocks.mma_16816(corrections, second, (b[0, 0], b[0, 1]))
    return sums[0] + corrections[0], sums[1] + corrections[1]


@cute.jit
def put_results(
    results: cute.Tensor,
    sums: list[tuple[Float32, ...]],
    corrections: list[tuple[Float32, ...]],
    coefficients: tuple[Float32, Float32],
    warp: Int32,
    lane: Int32,
    P: cutlass.Constexpr,
) -> None:
    """w and y [column, row], and this warp's partial sums of A and B [partial, s, column]."""
    g, q = lane // 4, lane % 4
    rows = cute.make_tensor(
        results.iterator, cute.make_layout((HEAD_DIM, P.columns), stride=(1, RESULT_PITCH))
    )
    for tile in range_constexpr(P.tiles):
        for half in range_constexpr(2):
            for side in range_constexpr(2):
                total = sums[tile][2 * half + side] + corrections[tile][2 * half + side]
                rows[warp * 16 + 8 * half + g, 8 * tile + 2 * q + side] = total
    partial = cute.make_tensor(
        results.iterator + P.columns * RESULT_PITCH,
        cute.make_layout(
            (2, 4, P.tiles, 8, P.partials), stride=(1, 2, 8, P.columns, 8 * P.columns)
        ),
    )
    two = cute.make_rmem_tensor(2, Float32)
    two[0], two[1] = coefficients
    cute.autovec_copy(two, partial[None, q, warp % P.tiles, g, warp // P.tiles])


@cute.jit
def step_product(
    A: Arguments,
    M: Smem,
    start: Item,
    count: Int32,
    warp: Int32,
    lane: Int32,
    zero: Int32,
    P: cutlass.Constexpr,
) -> None:
    """Warp = 16 state rows, two at a time; a half-warp holds a row. Its cells are refilled with
    item n + stages."""
    tid = warp * 32 + lane
    row = warp * 16 + lane // 16
    base = A.state + Int64(row * (HEAD_DIM * P.item_bytes) + lane % 16 * 16)
    cells = cells_of(M, P)
    item = first_loads(A, base, cells, start, count, tid, zero, P)
    _, slot, _ = pages_of(A, item.request, zero, P)  # of that item
    own_item = start
    target, _, _ = pages_of(A, start.request, zero, P)  # where the next state goes
    arch.griddepcontrol_wait()
    arch.griddepcontrol_launch_dependents()
    arch.sync_threads()

    own = row + lane % 16 // 2 * 2  # row whose sums end up on this lane, and on a neighbour
    state = ring.first()
    for n in cutlass.range(count, unroll=1):
        turn, result_turn = M.vector_ring.turn(n), M.result_ring.turn(n)
        refill = slot if n + P.state_stages < count else Int32(0)
        page = page_of(A, base, slot, item.head, P)
        item = walk.next_item(item, A.heads, A.requests)
        _, slot, _ = pages_of(A, item.request, zero, P)
        head, request, live = own_item.head, own_item.request, target > 0
        own_item = walk.next_item(own_item, A.heads, A.requests)
        following, _, _ = pages_of(A, own_item.request, zero, P)

        arch.cp_async_wait_group(P.state_stages - 1)
        S = take_state(cells, tid, state.stage, P)
        if refill > 0:
            load_group(cells, page, 0, state.stage, tid, P)
        arch.cp_async_commit_group()

        M.vector_ring.consumer_wait(turn)
        M.result_ring.producer_acquire(result_turn)
        results = M.results[None, result_turn.stage]
        for t in cutlass.range(P.tokens, unroll=1):
            upcoming = Int32(0)
            if const_expr(P.tokens > 1):
                upcoming = token_slot(A, request, min(t + 1, P.tokens - 1))
            words = vectors_of(M, turn.stage, t, P)
            u, rk = put_output(A, M, S, words, results, turn.stage, t, own, lane, P)
            if t == P.tokens - 1:
                M.result_ring.producer_commit(result_turn)
            update(S, words, u * rk, lane, P)
            if t == P.tokens - 1:
                M.vector_ring.consumer_release(turn)
            if live and target > 0:
                store_state(S, page_of(A, base, target, head, P), P)
            target = upcoming
        target = following
        state = ring.after(state, P.state_stages)


@cute.jit
def put_output(
    A: Arguments,
    M: Smem,
    S: cute.Tensor,
    words: cute.Tensor,
    results: cute.Tensor,
    stage: Int32,
    t: Int32,
    own: Int32,
    lane: Int32,
    P: cutlass.Constexpr,
) -> tuple[Float32, Float32]:
    """A token's o of the row `own`, to the results. Returns u and rk, by which the state is
    corrected.

    words   the token's vectors
    """
    w = row_products(S, words, 0, lane, P)
    y = row_products(S, words, 1, lane, P)
    kk, qq, kq, beta = factors_of(M, stage, t, P)
    rk = blocks.rsqrt(kk + Float32(blocks.KEY_EPS))
    rq = A.scale * blocks.rsqrt(qq + Float32(blocks.KEY_EPS))
    u = beta * (words[own, 4] - w * rk)
    if lane % 2 == 0:
        results[t * HEAD_DIM + own] = rq * (y + u * rk * kq)
    return u, rk


@cute.jit
def token_slot(A: Arguments, request: Int32, t: Int32) -> Int32:
    """Where a spec's state after a token goes."""
    return blocks.at(Int32, A.slots + Int64(request) * A.slots_stride * 4, t)


@cute.jit
def vectors_of(M: Smem, stage: Int32, t: Int32, P: cutlass.Constexpr) -> cute.Tensor:
    """(channel, vector) of a token: d k, d q, d, k, v."""
    return cute.make_tensor(
        M.vectors[None, stage].iterator,
        cute.make_layout((HEAD_DIM, 5, P.tokens), stride=(1, HEAD_DIM, 5 * HEAD_DIM)),
    )[None, None, t]


@cute.jit
def factors_of(
    M: Smem, stage: Int32, t: Int32, P: cutlass.Constexpr
) -> tuple[Float32, Float32, Float32, Float32]:
    """k.k, q.q, k.q and beta of a token."""
    words = sums_of(M, stage, t, P)
    kk, qq, kq = [total_of(words, which) for which in range(3)]
    return kk, qq, kq, words[3 * PROLOGUE]


@cute.jit
def take_state(cells: cute.Tensor, tid: Int32, stage: Int32, P: cutlass.Constexpr) -> cute.Tensor:
    """A thread's cells of a stage in registers, (element, cell)."""
    S = cute.make_rmem_tensor((P.vector, P.units), Float32)
    for unit in range_constexpr(P.units):
        raw = cute.make_rmem_tensor(4, Uint32)
        cute.autovec_copy(cells[None, tid, unit, stage], raw)
        S[None, unit].store(cute.recast_tensor(raw, P.dtype).load().to(Float32))
    return S


@cute.jit
def store_state(S: cute.Tensor, target: Int64, P: cutlass.Constexpr) -> None:
    for unit in range_constexpr(P.units):
        piece = cute.make_rmem_tensor(P.vector, P.dtype)
        piece.store(S[None, unit].load().to(P.dtype))
        blocks.put_vector(piece, target + P.unit_offset(unit))


@cute.jit
def columns_of(
    words: cute.Tensor, which: cutlass.Constexpr, lane: Int32, P: cutlass.Constexpr
) -> cute.Tensor:
    """A vector's elements in this lane's columns, (4, fours of a row)."""
    fours = cute.make_tensor(
        words.iterator,
        cute.make_layout(
            (4, 16, 2, 5), stride=(1, P.vector, 64 if P.state_dtype == "fp32" else 4, HEAD_DIM)
        ),
    )
    x = cute.make_rmem_tensor((4, 2), Float32)
    for i in range_constexpr(2):
        cute.autovec_copy(fours[None, lane % 16, i, which], x[None, i])
    return x


@cute.jit
def row_products(
    S: cute.Tensor, words: cute.Tensor, which: cutlass.Constexpr, lane: Int32, P: cutlass.Constexpr
) -> Float32:
    """The product of a vector with this lane's row: see `own` in `step_product`."""
    x = columns_of(words, which, lane, P)
    sums = cute.make_rmem_tensor(8, Float32)
    for j in range_constexpr(8):
        sums[j] = Float32(0)
        for e in range_constexpr(8):
            sums[j] += S[8 * j + e] * x[e]
    return blocks.row_sums(sums, 8, 16, lane)


@cute.jit
def update(
    S: cute.Tensor, words: cute.Tensor, correction: Float32, lane: Int32, P: cutlass.Constexpr
) -> None:
    """S = S d + (u rk) k, each row's u rk from the lanes that hold it."""
    d = columns_of(words, 2, lane, P)
    k = columns_of(words, 3, lane, P)
    for j in range_constexpr(8):
        # Within groups of 16 lanes, so that the source is a constant.
        u = arch.shuffle_sync(correction, 2 * j, mask_and_clamp=(32 - 16) << 8 | 31)
        for e in range_constexpr(8):
            S[8 * j + e] = fma(u, k[e], S[8 * j + e] * d[e])


@cute.jit
def fma(a: Float32, b: Float32, c: Float32) -> Float32:
    """a b + c, rounded once. The compiler may fuse the product that c is instead, and then keeps
    all a b at a time."""
    return arch.inline_ptx(
        "fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};",
        write_only_types=[Float32],
        read_only_args=[a, b, c],
    )
