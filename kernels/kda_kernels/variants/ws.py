"""KDA decode, spec and record steps for many items: persistent, one CTA per SM, its warps specialized.

projected   [requests * tokens, pitch]     bf16   q, k, v | output gate | f_a | raw beta
conv_state  [slots, 3D, W]                 bf16, dim-first or window-major; read and rolled
state       [slots, heads, V=128, K=128]   f32 or bf16; read (record), updated in place (decode), written after every
                                           token (spec)
corrections [rows, heads, Q, 128]          f32, written (record)
key_gates   [rows, heads, Q, 256]          bf16, written (record)
out         [requests * tokens, D]         bf16

A CTA walks a run of consecutive items (walk.py). In its steady state three groups of warps work on three items:
  prologue  8 warps, item i+1: convolution, gate on tensor cores, decays, sums for the norms; leaves the window, the
            recorded keys and gates, and the vectors for the product (ws_prologue.py)
  product   8 warps, item i: what the state takes part in. The state lies in cells of shared memory that are private to
            the threads (cp.async, no barrier), several items of it, and is refilled as it is read
  epilogue  4 warps, item i-1: RMSNorm and output gate; for record also the substitution and the corrections
Norms are deferred: vectors stay unnormalized, rk and rq are the inverse norms.

record: the chunked form. The vectors are MMA fragments of the 2q vectors Gamma_t k_t, Gamma_t q_t and of the q vectors
k_t / Gamma_t. Product, warp = 16 state rows: w = S (Gamma k), y = S (Gamma q) on tensor cores, state and vectors in two
BF16 terms. The products of vectors with vectors, A and B, come from the same fragments: k_s / Gamma_s are further state
rows. Epilogue, thread = row, with u'_s = rk_s u_s:
  u_t = beta_t (v_t - rk_t (w_t + sum_{s<t} A_ts u'_s)),  o_t = rq_t (y_t + sum_{s<=t} B_ts u'_s)

decode, spec: the recurrence in FP32. Product, warp = 16 state rows, half a warp per row: the state stays in registers
over the tokens; w = S (d k), y = S (d q), then
  u = beta (v - w rk),  o = rq (y + u rk k.q),  S <- S d + (u rk) k

Handed on by mbarriers, a full and an empty one per stage: vectors (prologue to product), results (product to epilogue).
What the epilogue takes from the prologue (v and the sums of a window) lies behind them and has an empty one alone.
Source: docs/operation.md, "The mathematics, per item" and "The same, chunked".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32, const_expr, range_constexpr

from kda_kernels import arguments, step, walk
from kda_kernels.arguments import Arguments
from kda_kernels.device import blocks, ring
from kda_kernels.device.gpu import Gpu
from kda_kernels.operands import StepOperands
from kda_kernels.parts import chunked
from kda_kernels.parts.chunked import STEPS
from kda_kernels.parts.prologue import UNIT
from kda_kernels.problem import HEAD_DIM, Problem
from kda_kernels.step import Compiled
from kda_kernels.variants.ws_plan import (
    EPILOGUE,
    LAUNCHED,
    PRODUCT,
    PROLOGUE,
    REGISTERS,
    RESULT_PITCH,
    THREADS,
    Plan,
    allocate,
    copy_async,
    fragments_of,
    load_numbers,
    pages_of,
    place_of,
)
from kda_kernels.variants.ws_prologue import prologue
from kda_kernels.walk import Item

KERNELS = ("kda_ws",)
KINDS = ("decode", "spec", "record")
RULE = "ws_items"
STREAMS = True
TRIED = {"gate_mode": (0, 1)}
GIVEN = ("terms", "conv_weight_dtype", "window")


def forms(kind: str, state_dtype: str) -> list[dict[str, object]]:
    """Every form that is another kernel."""
    return [
        {"gate_mode": gate_mode, "terms": terms}
        for gate_mode in (0, 1)
        for terms in ((1, 2) if (kind, state_dtype) == ("record", "bf16") else (2,))
    ]


_EPILOGUE_BARRIER = 1

arch = cute.arch


@dataclass(frozen=True)
class Spec:
    """Compile-time choices, and `pdl` of the launch.

    gate_mode          0: one chain of 8 tensor-core accumulations; 1: four chains of 2, summed in order
    terms              BF16 terms that a record's vectors are split in; 1 only with a BF16 state
    conv_weight_dtype  of convolution weight and bias
    window             entries W of a dim-first window; None: those of the problem
    pdl                programmatic dependent launch
    """

    gate_mode: int = 0
    terms: int = 2
    conv_weight_dtype: Literal["fp32", "bf16"] = "fp32"
    window: int | None = None
    pdl: bool = False


def plan(problem: Problem, spec: Spec, gpu: Gpu) -> Plan:
    """As many stages of state as fit (at least 2), up to 192 KiB, for record 128 KiB; of results 2 if they fit."""
    layout, window = arguments.window_rules(problem, streamable=True, entries=spec.window)

    def with_stages(state: int, results: int) -> Plan:
        return Plan(
            kind=problem.kind,
            tokens=problem.tokens,
            state_dtype=problem.state_dtype,
            threads=THREADS,
            layout=layout,
            window=window,
            streamable=True,
            weight_dtype=spec.conv_weight_dtype,
            gate_mode=spec.gate_mode,
            terms=spec.terms,
            state_stages=state,
            result_stages=results,
        )

    most = (2 if problem.kind == "record" else 3) * (1 if problem.state_dtype == "fp32" else 2)
    plans = [*(with_stages(stages, 2) for stages in range(most, 1, -1)), with_stages(2, 1)]
    return next((p for p in plans if p.smem_bytes <= gpu.smem_per_block), plans[-1])


def unsupported(problem: Problem, spec: Spec, gpu: Gpu) -> str | None:
    """Why this pair can't run, or None. Pure: no CUDA."""
    if problem.kind not in ("decode", "spec", "record"):
        return f"kind={problem.kind}: only decode, spec and record"
    choices = (
        ("gate_mode", spec.gate_mode, (0, 1)),
        ("terms", spec.terms, (1, 2)),
        ("conv_weight_dtype", spec.conv_weight_dtype, ("fp32", "bf16")),
    )
    if why := step.not_allowed(choices):
        return why
    if spec.terms == 1 and (problem.kind != "record" or problem.state_dtype == "fp32"):
        return "terms=1: only record with a BF16 state"
    if why := step.window_refused(problem, spec.window):
        return why
    p = plan(problem, spec, gpu)
    return step.gate_refused(problem, p.least_log_gate) or step.smem_refused(p.smem_bytes, gpu.smem_per_block)


def compile(problem: Problem, spec: Spec, gpu: Gpu) -> Compiled:
    """From shapes alone; one binary serves all heads, requests and strides. Raises ValueError for unsupported pairs."""
    step.require("KdaWS", unsupported(problem, spec, gpu))
    return step.build(_HOST, plan(problem, spec, gpu), spec, gpu)


def launch(compiled: Compiled, operands: StepOperands, stream: int) -> None:
    """Enqueue one step. Raises ValueError, naming the operand, for operands that the compiled kernel can't take."""
    _check(compiled.plan, operands)
    items = operands.A_log.shape[0] * operands.slots.shape[0]
    per, ctas = walk.schedule(items, compiled.sms, least=2)
    step.enqueue("KdaWS", compiled, operands, stream, (ctas, 1, 1), per)


def _check(p: Plan, o: StepOperands) -> None:
    """A window's entries are part of the code here, where other kernels take any number up to the plan's."""
    if p.layout == "rows" and o.conv_state.shape[2] != p.window:
        raise ValueError(f"conv_state has {o.conv_state.shape[2]} entries, the compiled kernel takes {p.window}")


@cute.kernel
def kda_ws(A: Arguments, P: cutlass.Constexpr) -> None:
    """Every group asks for what it can before the barrier behind which the mbarriers are ready."""
    thread, _, _ = arch.thread_idx()
    cta, _, _ = arch.block_idx()
    lane = thread % 32
    warp = arch.make_warp_uniform(thread // 32)
    M = allocate(P)
    if thread == 0:
        M.f_a_ring.init(32 * PROLOGUE, 32 * PROLOGUE)
        M.vector_ring.init(32 * PROLOGUE, 32 * PRODUCT)
        M.result_ring.init(32 * PRODUCT, 32 * P.finishers)
        M.value_ring.init(32 * PROLOGUE, 32 * P.finishers)
        arch.mbarrier_init_fence()

    # Zero, which the compiler must not know: loads that it takes for the same in all lanes go to a uniform register,
    # and so are waited for at once.
    zero = Int32(lane >= 32 * A.heads)
    more, product, less = REGISTERS[P.kind, P.layout]
    if warp < PROLOGUE:
        set_registers(more)
        start, count = run_of(A, cta)
        prologue(A, M, start, count, warp, lane, zero, P)
    elif warp < PROLOGUE + PRODUCT:
        set_registers(product)
        start, count = run_of(A, cta)
        if const_expr(P.chunked):
            record_product(A, M, start, count, warp - PROLOGUE, lane, zero, P)
        else:
            step_product(A, M, start, count, warp - PROLOGUE, lane, zero, P)
    else:
        set_registers(less)
        start, count = run_of(A, cta)
        if const_expr(P.chunked):
            record_epilogue(A, M, start, count, thread - 32 * (PROLOGUE + PRODUCT), P)
        else:
            step_epilogue(A, M, start, count, warp - (PROLOGUE + PRODUCT), lane, zero, P)


_HOST = step.host_of(kda_ws, carveout=None)


@cute.jit
def run_of(A: Arguments, cta: Int32) -> tuple[Item, Int32]:
    """A CTA's first item and how many it has. For each group anew: nothing then stays in registers over all of them."""
    begin = cta * A.per
    return walk.item_at(begin, A.per, A.heads, A.requests), min(A.per, A.heads * A.requests - begin)


@cute.jit
def set_registers(count: cutlass.Constexpr) -> None:
    """Of the calling group of warps, from what the CTA is launched with."""
    if const_expr(count > LAUNCHED):
        arch.setmaxregister_increase(count)
    if const_expr(count < LAUNCHED):
        arch.setmaxregister_decrease(count)


@cute.jit
def page_of(A: Arguments, base: Int64, slot: Int32, head: Int32, P: cutlass.Constexpr) -> Int64:
    return base + (Int64(slot) * A.state_stride + Int64(head) * (HEAD_DIM * HEAD_DIM)) * P.item_bytes


@cute.jit
def cells_of(M: cutlass.Constexpr, P: cutlass.Constexpr) -> cute.Tensor:
    """(word, thread, cell, stage)"""
    threads = 32 * PRODUCT
    return cute.make_tensor(
        M.state.iterator,
        cute.make_layout((4, threads, P.units, P.state_stages), stride=(1, 4, 4 * threads, 4 * threads * P.units)),
    )


@cute.jit
def load_group(
    cells: cute.Tensor, page: Int64, group: cutlass.Constexpr, stage: Int32, tid: Int32, P: cutlass.Constexpr
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
    M: cutlass.Constexpr,
    start: Item,
    count: Int32,
    warp: Int32,
    lane: Int32,
    zero: Int32,
    P: cutlass.Constexpr,
) -> None:
    """Warp = 16 state rows, lane (g, q) = columns of rows g and g + 8. Its cells are refilled with item n + stages."""
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
            # All stages are asked for, each group again as soon as it is read: this one is the oldest.
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
                        corrections[tile] = blocks.mma_16816(corrections[tile], a, (b[1, 0], b[1, 1]))
                    if const_expr(P.state_dtype == "fp32"):
                        corrections[tile] = blocks.mma_16816(corrections[tile], a_rest, (b[0, 0], b[0, 1]))
            if refill > 0:
                load_group(cells, page, group, state.stage, tid, P)
            arch.cp_async_commit_group()
        M.vector_ring.consumer_release(turn)

        M.result_ring.producer_acquire(result_turn)
        put_results(M.results[None, result_turn.stage], sums, corrections, coefficients, warp, lane, P)
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

    The second term of `chunked.split_truncated`, whose order of instructions schedules this kernel otherwise.
    """
    return blocks.pack(x - blocks.high_half(x), y - blocks.high_half(y))


@cute.jit
def operand(
    words: cute.Tensor, j: cutlass.Constexpr, P: cutlass.Constexpr
) -> tuple[tuple[Uint32, ...], tuple[Uint32, ...]]:
    """First and second terms of step j of a group, from the cells of rows g (even) and g + 8 (odd)."""
    if const_expr(P.state_dtype == "bf16"):
        a = (words[2 * j, 0], words[2 * j, 1], words[2 * j + 1, 0], words[2 * j + 1, 1])
        return a, a
    cells = cute.recast_tensor(words, Float32)
    pairs = [(cells[2 * half, 2 * j + row], cells[2 * half + 1, 2 * j + row]) for half in range(2) for row in range(2)]
    first = tuple(chunked.truncated(*pair) for pair in pairs)
    return first, tuple(truncated_off(*pair) for pair in pairs)


@cute.jit
def vector_products(fragments: cute.Tensor, warp: Int32, place: Int32, P: cutlass.Constexpr) -> tuple[Float32, Float32]:
    """This warp's part of A or B: (k_s / Gamma_s) . vector n over `tiles` steps, s = g, n = 2q and 2q + 1 of its tile.

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
    rows = cute.make_tensor(results.iterator, cute.make_layout((HEAD_DIM, P.columns), stride=(1, RESULT_PITCH)))
    for tile in range_constexpr(P.tiles):
        for half in range_constexpr(2):
            for side in range_constexpr(2):
                total = sums[tile][2 * half + side] + corrections[tile][2 * half + side]
                rows[warp * 16 + 8 * half + g, 8 * tile + 2 * q + side] = total
    partial = cute.make_tensor(
        results.iterator + P.columns * RESULT_PITCH,
        cute.make_layout((2, 4, P.tiles, 8, P.partials), stride=(1, 2, 8, P.columns, 8 * P.columns)),
    )
    two = cute.make_rmem_tensor(2, Float32)
    two[0], two[1] = coefficients
    cute.autovec_copy(two, partial[None, q, warp % P.tiles, g, warp // P.tiles])


@cute.jit
def step_product(
    A: Arguments,
    M: cutlass.Constexpr,
    start: Item,
    count: Int32,
    warp: Int32,
    lane: Int32,
    zero: Int32,
    P: cutlass.Constexpr,
) -> None:
    """Warp = 16 state rows, two at a time; a half-warp holds a row. Its cells are refilled with item n + stages."""
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
            w = row_products(S, words, 0, lane, P)
            y = row_products(S, words, 1, lane, P)
            kk, qq, kq, beta = factors_of(M, turn.stage, t, P)
            rk = blocks.rsqrt(kk + Float32(blocks.KEY_EPS))
            rq = A.scale * blocks.rsqrt(qq + Float32(blocks.KEY_EPS))
            u = beta * (words[own, 4] - w * rk)
            if lane % 2 == 0:
                results[t * HEAD_DIM + own] = rq * (y + u * rk * kq)
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
def token_slot(A: Arguments, request: Int32, t: Int32) -> Int32:
    """Where a spec's state after a token goes."""
    return blocks.at(Int32, A.slots + Int64(request) * A.slots_stride * 4, t)


@cute.jit
def vectors_of(M: cutlass.Constexpr, stage: Int32, t: Int32, P: cutlass.Constexpr) -> cute.Tensor:
    """(channel, vector) of a token: d k, d q, d, k, v."""
    return cute.make_tensor(
        M.vectors[None, stage].iterator,
        cute.make_layout((HEAD_DIM, 5, P.tokens), stride=(1, HEAD_DIM, 5 * HEAD_DIM)),
    )[None, None, t]


@cute.jit
def factors_of(
    M: cutlass.Constexpr, stage: Int32, t: Int32, P: cutlass.Constexpr
) -> tuple[Float32, Float32, Float32, Float32]:
    """k.k, q.q, k.q and beta of a token."""
    words = sums_of(M, stage, t, P)
    kk, qq, kq = [total_of(words, which) for which in range(3)]
    return kk, qq, kq, words[3 * PROLOGUE]


@cute.jit
def total_of(words: cute.Tensor, which: Any) -> Float32:
    """A token's sum from the parts of all warps of the prologue."""
    fours = cute.make_tensor(words.iterator, cute.make_layout((4, PROLOGUE // 4, 3), stride=(1, 4, PROLOGUE)))
    parts = cute.make_rmem_tensor((4, PROLOGUE // 4), Float32)
    for i in range_constexpr(PROLOGUE // 4):
        cute.autovec_copy(fours[None, i, which], parts[None, i])
    pairs = [parts[e, 0] + parts[e, 1] for e in range(4)]
    return (pairs[0] + pairs[1]) + (pairs[2] + pairs[3])


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
def columns_of(words: cute.Tensor, which: cutlass.Constexpr, lane: Int32, P: cutlass.Constexpr) -> cute.Tensor:
    """A vector's elements in this lane's columns, (4, fours of a row)."""
    fours = cute.make_tensor(
        words.iterator,
        cute.make_layout((4, 16, 2, 5), stride=(1, P.vector, 64 if P.state_dtype == "fp32" else 4, HEAD_DIM)),
    )
    x = cute.make_rmem_tensor((4, 2), Float32)
    for i in range_constexpr(2):
        cute.autovec_copy(fours[None, lane % 16, i, which], x[None, i])
    return x


@cute.jit
def row_products(
    S: cute.Tensor, words: cute.Tensor, which: cutlass.Constexpr, lane: Int32, P: cutlass.Constexpr
) -> Float32:
    """The product of a vector with this lane's row: see `own` in `decode_product`."""
    x = columns_of(words, which, lane, P)
    sums = cute.make_rmem_tensor(8, Float32)
    for j in range_constexpr(8):
        sums[j] = Float32(0)
        for e in range_constexpr(8):
            sums[j] += S[8 * j + e] * x[e]
    return blocks.row_sums(sums, 8, 16, lane)


@cute.jit
def update(S: cute.Tensor, words: cute.Tensor, correction: Float32, lane: Int32, P: cutlass.Constexpr) -> None:
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
    """a b + c, rounded once. The compiler may fuse the product that c is instead, and then keeps all a b at a time."""
    return arch.inline_ptx(
        "fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};", write_only_types=[Float32], read_only_args=[a, b, c]
    )


@cute.jit
def record_epilogue(
    A: Arguments, M: cutlass.Constexpr, start: Item, count: Int32, tid: Int32, P: cutlass.Constexpr
) -> None:
    """Thread = state row in the substitution, 8 channels of a token in the norm. Gates come an item ahead."""
    lane = tid % 32
    t, unit = min(tid // 16, P.tokens - 1), tid % 16
    numbers = cute.make_rmem_tensor(P.numbers, Int32)
    load_numbers(A, numbers, start, lane, P)
    arch.griddepcontrol_wait()
    arch.griddepcontrol_launch_dependents()
    gates = blocks.get_vector(BFloat16, channels_of(A, start, t, unit * UNIT, P)[0], UNIT)
    arch.sync_threads()

    item = start
    value_turn = ring.first()
    for n in cutlass.range(count, unroll=1):
        result_turn = M.result_ring.turn(n)
        slot, record = arch.shuffle_sync(numbers[0], n % 32), arch.shuffle_sync(numbers[1], n % 32)
        _, target = channels_of(A, item, t, unit * UNIT, P)

        M.result_ring.consumer_wait(result_turn)
        result = cute.make_rmem_tensor(UNIT, BFloat16)
        result.fill(BFloat16(0))
        if slot > 0:
            results = M.results[None, result_turn.stage]
            kept = Int64(record) * A.corrections_stride + Int64(item.head * A.record_tokens) * HEAD_DIM + tid
            add_parts(A, M, results, value_turn.stage, tid, P)
            arch.barrier(barrier_id=_EPILOGUE_BARRIER, number_of_threads=32 * EPILOGUE)
            substitute(M, results, value_turn.stage, record, A.corrections + kept * 4, tid, P)
            arch.barrier(barrier_id=_EPILOGUE_BARRIER, number_of_threads=32 * EPILOGUE)
            # From L1; over the substitution registers are short.
            norm = blocks.get_vector(Float32, A.norm_weight + Int64(unit) * 32, UNIT)
            outputs = cute.make_tensor(
                results.iterator, cute.make_layout((4, 2, 16, P.tokens), stride=(1, 4, UNIT, RESULT_PITCH))
            )
            o = cute.make_rmem_tensor((4, 2), Float32)
            for i in range_constexpr(2):
                cute.autovec_copy(outputs[None, i, unit, t], o[None, i])
            normalize(o, gates, norm, result, A.eps, 16)
        M.result_ring.consumer_release(result_turn)
        M.value_ring.consumer_release(value_turn)
        if tid < 16 * P.tokens:
            blocks.put_vector(result, target)

        value_turn = M.value_ring.after(value_turn)
        item = walk.next_item(item, A.heads, A.requests)
        if n + 1 < count:
            gates.store(blocks.get_vector(BFloat16, channels_of(A, item, t, unit * UNIT, P)[0], UNIT).load())
            if (n + 1) % 32 == 0:
                load_numbers(A, numbers, item, lane, P)


@cute.jit
def channels_of(A: Arguments, item: Item, t: Int32, channel: Int32, P: cutlass.Constexpr) -> tuple[Int64, Int64]:
    """Addresses of a token's output gate and output, from a channel of the item's head on."""
    row = Int64(item.request * P.tokens) + t
    D = Int64(A.heads) * HEAD_DIM
    mine = Int64(item.head * HEAD_DIM + channel)
    return A.projected + (row * A.pitch + D * 3 + mine) * 2, A.out + (row * D + mine) * 2


@cute.jit
def add_parts(
    A: Arguments, M: cutlass.Constexpr, results: cute.Tensor, value_stage: Int32, tid: Int32, P: cutlass.Constexpr
) -> None:
    """A and B [s, column] from their partial sums, to the place of the first; beta of a token, from its raw one, and
    behind it rk and rq. In the same order every time.
    """
    partial = cute.make_tensor(
        results.iterator + P.columns * RESULT_PITCH,
        cute.make_layout((8 * P.columns, P.partials), stride=(1, 8 * P.columns)),
    )
    if tid < 8 * P.columns:
        total = partial[tid, 0]
        for i in range_constexpr(1, P.partials):
            total += partial[tid, i]
        partial[tid, 0] = total
    mine = tid - (32 * EPILOGUE - 2 * P.tokens)
    if mine >= 0:
        t, which = mine // 2, mine % 2
        words = sums_of(M, value_stage, t, P)
        inverse = blocks.rsqrt(total_of(words, which) + Float32(blocks.KEY_EPS))
        words[P.sums * PROLOGUE + 1 + which] = inverse * A.scale if which == 1 else inverse
        if which == 0:
            words[P.sums * PROLOGUE] = blocks.sigmoid(words[P.sums * PROLOGUE])


@cute.jit
def substitute(
    M: cutlass.Constexpr,
    results: cute.Tensor,
    value_stage: Int32,
    record: Int32,
    kept: Int64,
    row: Int32,
    P: cutlass.Constexpr,
) -> None:
    """Corrections of one row, and outputs, rounded, in the place of its first products. As soon as a correction is
    known, all later sums take their part of it.
    """
    half = P.columns // 2
    rows = cute.make_tensor(results.iterator, cute.make_layout((HEAD_DIM, P.columns), stride=(1, RESULT_PITCH)))
    v = cute.make_tensor(
        M.values[None, value_stage].iterator,
        cute.make_layout((HEAD_DIM, P.tokens), stride=(1, P.value_pitch)),
    )
    coefficients = cute.make_tensor(
        results.iterator + P.columns * RESULT_PITCH,
        cute.make_layout((4, P.columns // 4, 8), stride=(1, 4, P.columns)),
    )
    factors = cute.make_tensor(
        M.sums[None, value_stage].iterator + P.sums * PROLOGUE,
        cute.make_layout((4, P.tokens), stride=(1, P.sum_words)),
    )
    w = cute.make_rmem_tensor(P.tokens, Float32)
    y = cute.make_rmem_tensor(P.tokens, Float32)
    for t in range_constexpr(P.tokens):
        w[t] = rows[row, t]
        y[t] = rows[row, half + t]
    for s in range_constexpr(P.tokens):
        factor = cute.make_rmem_tensor(4, Float32)  # beta, rk, rq
        cute.autovec_copy(factors[None, s], factor)
        u = factor[0] * (v[row, s].to(Float32) - factor[1] * w[s])
        scaled = factor[1] * u
        column = cute.make_rmem_tensor((4, P.columns // 4), Float32)
        for i in range_constexpr(P.columns // 4):
            # Of A only the tokens after s, of B those from s on.
            if const_expr(s + 1 <= i * 4 % half + 3 or (i * 4 >= half and s <= i * 4 % half + 3)):
                cute.autovec_copy(coefficients[None, i, s], column[None, i])
        for t in range_constexpr(s, P.tokens):
            if const_expr(t > s):
                w[t] = w[t] + column[t % 4, t // 4] * scaled
            y[t] = y[t] + column[(half + t) % 4, (half + t) // 4] * scaled
        rows[row, s] = (factor[2] * y[s]).to(BFloat16).to(Float32)
        if record >= 0:
            blocks.put(Float32, kept + s * (HEAD_DIM * 4), u)


@cute.jit
def sums_of(M: cutlass.Constexpr, stage: Int32, t: Int32, P: cutlass.Constexpr) -> cute.Tensor:
    """A token's sums and factors, `sum_words`."""
    return cute.make_tensor(
        M.sums[None, stage].iterator,
        cute.make_layout((P.sum_words, P.tokens), stride=(1, P.sum_words)),
    )[None, t]


@cute.jit
def normalize(
    o: cute.Tensor,
    gates: cute.Tensor,
    norm: cute.Tensor,
    result: cute.Tensor,
    eps: Float32,
    lanes: cutlass.Constexpr,
) -> None:
    """RMSNorm and output gate of a token's channels, which lie on neighbouring lanes; o is rounded."""
    square = Float32(0)
    for e in range_constexpr(cute.size(o)):
        square += o[e] * o[e]
    rms = blocks.rsqrt(blocks.lane_sum(square, 1, lanes) * Float32(1 / HEAD_DIM) + eps)
    for e in range_constexpr(cute.size(o)):
        result[e] = (o[e] * rms * (norm[e] * blocks.sigmoid(gates[e].to(Float32)))).to(BFloat16)


@cute.jit
def step_epilogue(
    A: Arguments,
    M: cutlass.Constexpr,
    start: Item,
    count: Int32,
    warp: Int32,
    lane: Int32,
    zero: Int32,
    P: cutlass.Constexpr,
) -> None:
    """Warp = every fourth token, lane = four channels."""
    norm = blocks.get_vector(Float32, A.norm_weight + Int64(lane) * 16, 4)
    arch.griddepcontrol_wait()
    arch.griddepcontrol_launch_dependents()
    arch.sync_threads()

    item = start
    rounds = count if warp < P.finishers else Int32(0)
    for n in cutlass.range(rounds, unroll=1):
        result_turn = M.result_ring.turn(n)
        slot, _, _ = pages_of(A, item.request, zero, P)
        tokens = [min(warp + EPILOGUE * i, P.tokens - 1) for i in range((P.tokens + EPILOGUE - 1) // EPILOGUE)]
        gates = [blocks.get_vector(BFloat16, channels_of(A, item, t, 4 * lane, P)[0], 4) for t in tokens]
        M.result_ring.consumer_wait(result_turn)
        results = cute.make_tensor(
            M.results[None, result_turn.stage].iterator,
            cute.make_layout((4, 32, P.tokens), stride=(1, 4, HEAD_DIM)),
        )
        rounded = cute.make_rmem_tensor((4, len(tokens)), Float32)
        for i in range_constexpr(len(tokens)):
            cute.autovec_copy(results[None, lane, tokens[i]], rounded[None, i])
        M.result_ring.consumer_release(result_turn)
        rounded.store(rounded.load().to(BFloat16).to(Float32))
        for i in range_constexpr(len(tokens)):
            result = cute.make_rmem_tensor(4, BFloat16)
            normalize(rounded[None, i], gates[i], norm, result, A.eps, 32)
            if slot <= 0:
                result.fill(BFloat16(0))
            blocks.put_vector(result, channels_of(A, item, tokens[i], 4 * lane, P)[1])
        item = walk.next_item(item, A.heads, A.requests)
