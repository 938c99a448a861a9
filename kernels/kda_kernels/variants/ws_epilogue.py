"""KdaWS's epilogue: RMSNorm and output gate; of a record before that the substitution and the
corrections."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, const_expr, range_constexpr

from kda_kernels import walk
from kda_kernels.arguments import Arguments
from kda_kernels.device import blocks, ring
from kda_kernels.device.smem import Smem
from kda_kernels.parts.prologue import UNIT
from kda_kernels.problem import HEAD_DIM
from kda_kernels.variants.ws_plan import (
    EPILOGUE,
    PROLOGUE,
    RESULT_PITCH,
    load_numbers,
    pages_of,
    sums_of,
    total_of,
)
from kda_kernels.walk import Item

arch = cute.arch

_BARRIER = 1
"""Of the epilogue's warps alone; 0 is that of the CTA."""


@cute.jit
def record_epilogue(
    A: Arguments, M: Smem, start: Item, count: Int32, tid: Int32, P: cutlass.Constexpr
) -> None:
    """Thread = state row in the substitution, 8 channels of a token in the norm. Gates come an item
    ahead."""
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
            kept = (
                Int64(record) * A.corrections_stride
                + Int64(item.head * A.record_tokens) * HEAD_DIM
                + tid
            )
            add_parts(A, M, results, value_turn.stage, tid, P)
            arch.barrier(barrier_id=_BARRIER, number_of_threads=32 * EPILOGUE)
            substitute(M, results, value_turn.stage, record, A.corrections + kept * 4, tid, P)
            arch.barrier(barrier_id=_BARRIER, number_of_threads=32 * EPILOGUE)
            # From L1; over the substitution registers are short.
            norm = blocks.get_vector(Float32, A.norm_weight + Int64(unit) * 32, UNIT)
            outputs = cute.make_tensor(
                results.iterator,
                cute.make_layout((4, 2, 16, P.tokens), stride=(1, 4, UNIT, RESULT_PITCH)),
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
            gates.store(
                blocks.get_vector(BFloat16, channels_of(A, item, t, unit * UNIT, P)[0], UNIT).load()
            )
            if (n + 1) % 32 == 0:
                load_numbers(A, numbers, item, lane, P)


@cute.jit
def channels_of(
    A: Arguments, item: Item, t: Int32, channel: Int32, P: cutlass.Constexpr
) -> tuple[Int64, Int64]:
    """Addresses of a token's output gate and output, from a channel of the item's head on."""
    row = Int64(item.request * P.tokens) + t
    D = Int64(A.heads) * HEAD_DIM
    mine = Int64(item.head * HEAD_DIM + channel)
    return A.projected + (row * A.pitch + D * 3 + mine) * 2, A.out + (row * D + mine) * 2


@cute.jit
def add_parts(
    A: Arguments,
    M: Smem,
    results: cute.Tensor,
    value_stage: Int32,
    tid: Int32,
    P: cutlass.Constexpr,
) -> None:
    """A and B [s, column] from their partial sums, to the place of the first; beta of a token, from
    its raw one, and behind it rk and rq. In the same order every time.
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
    M: Smem,
    results: cute.Tensor,
    value_stage: Int32,
    record: Int32,
    kept: Int64,
    row: Int32,
    P: cutlass.Constexpr,
) -> None:
    """Corrections of one row, and outputs, rounded, in the place of its first products. As soon as
    a correction is known, all later sums take their part of it.
    """
    half = P.columns // 2
    rows = cute.make_tensor(
        results.iterator, cute.make_layout((HEAD_DIM, P.columns), stride=(1, RESULT_PITCH))
    )
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
def normalize(
    o: cute.Tensor,
    gates: cute.Tensor,
    norm: cute.Tensor,
    result: cute.Tensor,
    eps: Float32,
    lanes: cutlass.Constexpr,
) -> None:
    """RMSNorm and output gate of a token's channels, which lie on neighbouring lanes; o is
    rounded."""
    square = Float32(0)
    for e in range_constexpr(cute.size(o)):
        square += o[e] * o[e]
    rms = blocks.rsqrt(blocks.lane_sum(square, 1, lanes) * Float32(1 / HEAD_DIM) + eps)
    for e in range_constexpr(cute.size(o)):
        result[e] = (o[e] * rms * (norm[e] * blocks.sigmoid(gates[e].to(Float32)))).to(BFloat16)


@cute.jit
def step_epilogue(
    A: Arguments,
    M: Smem,
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
        tokens = [
            min(warp + EPILOGUE * i, P.tokens - 1)
            for i in range((P.tokens + EPILOGUE - 1) // EPILOGUE)
        ]
        gates = [
            blocks.get_vector(BFloat16, channels_of(A, item, t, 4 * lane, P)[0], 4) for t in tokens
        ]
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
