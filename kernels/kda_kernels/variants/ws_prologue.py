"""KdaWS's prologue: convolution, gate, decays and sums for the norms; what of it goes to records
and windows.

Warp = 16 channels of a head, of all tokens; lane (g, q) = a pair of them, `lane_tokens` tokens from
`lane_tokens * q` on. A lane so keeps what it makes: the features of the gate's MMA are put in that
order, and its sums stay in registers. Of all inputs a warp shares f_a alone with the others, so
that they meet once per item, at an mbarrier.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32, const_expr, range_constexpr

from kda_kernels import walk
from kda_kernels.arguments import Arguments
from kda_kernels.device import blocks, ring
from kda_kernels.device.smem import Smem
from kda_kernels.parts import chunked
from kda_kernels.parts.chunked import GMEM, STEPS
from kda_kernels.parts.prologue import UNIT
from kda_kernels.problem import CONV_WIDTH, HEAD_DIM, HISTORY, ceil_div
from kda_kernels.variants.ws_plan import (
    BOTTLENECK_PITCH,
    PROLOGUE,
    copy_async,
    fragment_of,
    fragments_of,
    load_numbers,
    place_of,
)
from kda_kernels.walk import Item

_WARP_CHANNELS = HEAD_DIM // PROLOGUE

arch = cute.arch


class Work(NamedTuple):
    """An item as the prologue needs it: slot of its window, not above 0 for none; entry where its
    history begins; row of its record, negative for none.
    """

    head: Int32
    slot: Int32
    entry: Int32
    record: Int32


class Lane(NamedTuple):
    """A thread's place in the prologue: its warp, its number in it and in a group of four, its
    first channel; addresses of what it takes of the first request's inputs, of head 0, and f_a.
    """

    warp: Int32
    number: Int32
    q: Int32
    channel: Int32
    inputs: Int64
    f_a: Int64


class Gate(NamedTuple):
    """Of a head: a lane's fragments of f_b, (word, feature, step), biases of its two features, and
    exp(A_log)."""

    weights: cute.Tensor
    biases: cute.Tensor
    rate: cute.Tensor


@cute.jit
def prologue(
    A: Arguments,
    M: Smem,
    start: Item,
    count: Int32,
    warp: Int32,
    lane: Int32,
    zero: Int32,
    P: cutlass.Constexpr,
) -> None:
    """Works on item n while the inputs of items n+1 and, towards its end, n+2 are on their way."""
    L = lane_of(A, warp, lane, P)
    numbers = cute.make_rmem_tensor(P.numbers, Int32)
    load_numbers(A, numbers, start, lane, P)
    work = work_of(numbers, start, Int32(0), count, P)
    item = walk.next_item(start, A.heads, A.requests)
    following = work_of(numbers, item, Int32(1), count, P)
    weights = cute.make_rmem_tensor((2, 2, STEPS), Uint32)
    G = Gate(weights, cute.make_rmem_tensor(2, Float32), cute.make_rmem_tensor(1, Float32))
    if const_expr(P.keeps_gate):
        load_gate(A, G, work.head, zero, L)
    loaded = work.head
    load_taps(A, M, work.head, L, P)
    load_window(A, M, Int32(0), work, L, P)
    arch.griddepcontrol_wait()
    arch.griddepcontrol_launch_dependents()
    load_rows(A, M, Int32(0), Int32(0), work, start.request, L, P)
    arch.cp_async_commit_group()
    load_inputs(A, M, Int32(1), Int32(1), following, item.request, L, P)
    arch.sync_threads()

    f_a_turn = ring.first()  # that of the values too: they have as many stages
    for n in cutlass.range(count, unroll=1):
        turn = M.vector_ring.turn(n)
        stage = turn.stage
        item = walk.next_item(item, A.heads, A.requests)
        if (n + 2) % 32 == 0 and n + 2 < count:
            load_numbers(A, numbers, item, lane, P)
        # All copies but those for item n+1.
        arch.cp_async_wait_group(1)
        M.f_a_ring.producer_commit(f_a_turn)
        if work.head != loaded:
            loaded = work.head
            change_head(A, M, G, work.head, zero, L, P)

        x, window = inputs_of(M, stage, work, L, P)
        M.f_a_ring.consumer_wait(f_a_turn)
        f_a = M.f_a[None, f_a_turn.stage]
        raw = cute.make_rmem_tensor((2, P.lane_tokens), BFloat16)
        logs = cute.make_rmem_tensor((2, P.lane_tokens), Float32)
        if work.slot > 0:
            if const_expr(not P.keeps_gate):
                load_gate(A, G, work.head, zero, L)
            gate(A, G, f_a, raw, logs, L, P)

        M.vector_ring.producer_acquire(turn)
        if const_expr(P.chunked):
            M.value_ring.producer_acquire(f_a_turn)
        if work.slot > 0:
            sums = M.sums[None, f_a_turn.stage if const_expr(P.chunked) else stage]
            if const_expr(P.chunked):
                record_vectors(A, M, x, window, raw, logs, sums, stage, f_a_turn.stage, work, L, P)
            else:
                step_vectors(M, x, window, logs, sums, stage, L, P)
            put_beta(f_a, sums, work.head, L, P)
        # Once on each way: behind one arrival for both, what stores the window moves ahead of it,
        # and spills.
        if work.slot > 0:
            M.vector_ring.producer_commit(turn)
            store_window(A, window, work, L, P)
        else:
            M.vector_ring.producer_commit(turn)

        f_a_turn = M.f_a_ring.after(f_a_turn)
        # The stage of f_a after the next is that of item n-1, whose gate all warps have behind
        # them: each of them has arrived for item n since.
        arch.sync_warp()
        later_stage = M.f_a_ring.after(f_a_turn).stage
        later = work_of(numbers, item, n + 2, count, P)
        load_inputs(A, M, stage, later_stage, later, item.request, L, P)
        work, following = following, later


@cute.jit
def lane_of(A: Arguments, warp: Int32, lane: Int32, P: cutlass.Constexpr) -> Lane:
    """With BF16 fragments the pairs are such that half a warp meets all banks."""
    g = lane // 4
    number = g
    if const_expr(P.chunked and P.state_dtype == "bf16"):
        number = g // 2 % 2 * 4 + g // 4 * 2 + g % 2
    half, t, unit = lane // 16, lane // 2 % 8, lane % 2
    part_bytes = Int64(A.heads) * (2 * HEAD_DIM)
    inputs = (
        A.projected + A.pitch * 2 * t + part_bytes * half + warp * (2 * _WARP_CHANNELS) + unit * 16
    )
    f_a = A.projected + A.pitch * 2 * warp + part_bytes * 4
    return Lane(warp, lane, lane % 4, warp * _WARP_CHANNELS + 2 * number, inputs, f_a)


@cute.jit
def work_of(
    numbers: cute.Tensor, item: Item, index: Int32, count: Int32, P: cutlass.Constexpr
) -> Work:
    """The item that is the CTA's `index`-th, by the numbers of its 32; past the CTA's last one
    without a slot."""
    slot, entry, record = arch.shuffle_sync(numbers[0], index % 32), Int32(0), Int32(-1)
    if const_expr(P.kind == "spec"):
        entry = arch.shuffle_sync(numbers[1], index % 32)
    if const_expr(P.chunked):
        record = arch.shuffle_sync(numbers[1], index % 32)
    return Work(item.head, slot if index < count else Int32(0), entry, record)


@cute.jit
def load_gate(A: Arguments, G: Gate, head: Int32, zero: Int32, L: Lane) -> None:
    """A lane's features are its channels. K is permuted inside an MMA step, so that it takes eight
    bytes at a time."""
    feature = head * HEAD_DIM + L.channel
    row_words = HEAD_DIM // 2
    words = cute.make_ptr(
        Uint32, A.f_b + Int64(feature) * (4 * row_words) + L.q * 8, GMEM, assumed_align=8
    )
    part = cute.make_tensor(words, cute.make_layout((2, 2, STEPS), stride=(1, row_words, 8)))
    for step in range_constexpr(STEPS):
        for i in range_constexpr(2):
            cute.autovec_copy(part[None, i, step], G.weights[None, i, step])
    cute.autovec_copy(blocks.get_vector(Float32, A.dt_bias + Int64(feature) * 4, 2), G.biases)
    G.rate[0] = blocks.exp(blocks.at(Float32, A.A_log, head + zero))


@cute.jit
def change_head(
    A: Arguments, M: Smem, G: Gate, head: Int32, zero: Int32, L: Lane, P: cutlass.Constexpr
) -> None:
    """Convolution weights, and gate weights that stay in registers, of another head; waits for all
    copies."""
    load_taps(A, M, head, L, P)
    if const_expr(P.keeps_gate):
        load_gate(A, G, head, zero, L)
    arch.cp_async_commit_group()
    arch.cp_async_wait_group(0)
    arch.sync_warp()


@cute.jit
def load_taps(A: Arguments, M: Smem, head: Int32, L: Lane, P: cutlass.Constexpr) -> None:
    """Ask for the convolution weights [3, 4, 128] and biases [3, 128] of the warp's channels."""
    units = _WARP_CHANNELS * P.weight_bytes // 16  # of a row
    row, unit = L.number // units, L.number % units
    step = 32 // units  # rows at a time
    row_bytes = Int64(A.heads) * (HEAD_DIM * P.weight_bytes)
    offset = L.warp * (_WARP_CHANNELS * P.weight_bytes) + unit * 16
    source = row_bytes * row + Int64(head) * (HEAD_DIM * P.weight_bytes) + offset
    target = row * (HEAD_DIM * P.weight_bytes) + offset
    for i in range_constexpr(ceil_div(3 * CONV_WIDTH, step)):
        if row + i * step < 3 * CONV_WIDTH:
            copy_async(
                M.taps.iterator.toint() + target + i * (step * HEAD_DIM * P.weight_bytes),
                A.conv_weight + source + row_bytes * (i * step),
            )
    if row < 3:
        if A.conv_bias != Int64(0):
            copy_async(M.bias.iterator.toint() + target, A.conv_bias + source)
        else:
            for i in range_constexpr(UNIT * 2 // P.weight_bytes):
                M.bias[target // P.weight_bytes + i] = P.conv_dtype(0)


@cute.jit
def load_inputs(
    A: Arguments,
    M: Smem,
    stage: Int32,
    f_a_stage: Int32,
    work: Work,
    request: Int32,
    L: Lane,
    P: cutlass.Constexpr,
) -> None:
    """Ask for the window and the rows of an item, as a group of copies."""
    load_window(A, M, stage, work, L, P)
    load_rows(A, M, stage, f_a_stage, work, request, L, P)
    arch.cp_async_commit_group()


@cute.jit
def load_window(
    A: Arguments, M: Smem, stage: Int32, work: Work, L: Lane, P: cutlass.Constexpr
) -> None:
    """Ask for the warp's channels. rows: all entries; taps: those before this step, as the first
    rows of inputs."""
    if work.slot > 0:
        page = A.conv_state + Int64(work.slot) * A.conv_stride * 2
        D = Int64(A.heads) * HEAD_DIM
        if const_expr(P.layout == "rows"):
            piece = L.warp * (_WARP_CHANNELS * P.window * 2) + L.number * 16
            source = page + Int64(work.head) * (HEAD_DIM * P.window * 2) + piece
            target = M.window[None, stage].iterator.toint() + piece
            if L.number < 2 * P.window:
                for part in range_constexpr(3):
                    copy_async(
                        target + part * (HEAD_DIM * P.window * 2),
                        source + D * (part * P.window * 2),
                    )
        else:
            entry, part, unit = row_of(L.number)
            if entry < HISTORY:
                source = (
                    page + Int64(work.head * HEAD_DIM + L.warp * _WARP_CHANNELS + unit * UNIT) * 2
                )
                source = source + (Int64(work.entry + entry) * A.tap_stride + D * part) * 2
                target = M.inputs[None, stage].iterator.toint()
                copy_async(target + row_byte(entry, part, L, P) + unit * 16, source)


@cute.jit
def row_of(index: Int32) -> tuple[Int32, Int32, Int32]:
    """Row, part and 16-byte unit of a warp's `index`-th unit of rows [3, 128]."""
    return index // 6, index // 2 % 3, index % 2


@cute.jit
def row_byte(row: Int32, part: Int32, L: Lane, P: cutlass.Constexpr) -> Int32:
    """Offset of the warp's channels in a row of inputs."""
    low, high = P.row_place(row)
    return (
        low * (3 * HEAD_DIM) + high * P.row_pitch + part * HEAD_DIM + L.warp * _WARP_CHANNELS
    ) * 2


@cute.jit
def load_rows(
    A: Arguments,
    M: Smem,
    stage: Int32,
    f_a_stage: Int32,
    work: Work,
    request: Int32,
    L: Lane,
    P: cutlass.Constexpr,
) -> None:
    """Ask for the warp's channels of q, k and v, and for f_a and beta of one token. A half-warp
    takes a part of all."""
    if work.slot > 0:
        half, t, unit = L.number // 16, L.number // 2 % 8, L.number % 2
        first = Int64(request * P.tokens) * (A.pitch * 2)
        target = M.inputs[None, stage].iterator.toint() + unit * 16
        if t < P.tokens:
            own = L.inputs + first + work.head * (2 * HEAD_DIM)
            copy_async(target + row_byte(HISTORY + t, half, L, P), own)
            if half == 0:
                copy_async(
                    target + row_byte(HISTORY + t, Int32(2), L, P),
                    own + Int64(A.heads) * (4 * HEAD_DIM),
                )
        if L.warp < P.tokens:
            f_a = L.f_a + first
            place = M.f_a[None, f_a_stage].iterator.toint() + L.warp * (2 * BOTTLENECK_PITCH)
            if half == 1:
                copy_async(place + (L.number - 16) * 16, f_a + (L.number - 16) * 16)
            # The word's other half is beta of a neighbouring head, or padding of the row.
            if L.number == 0:
                blocks.copy_async(
                    place + 2 * HEAD_DIM, f_a + 2 * HEAD_DIM + (work.head >> 1) * 4, 4
                )


@cute.jit
def inputs_of(
    M: Smem, stage: Int32, work: Work, L: Lane, P: cutlass.Constexpr
) -> tuple[cute.Tensor, cute.Tensor]:
    """A stage's inputs, with the history before them, and window, which for taps is the inputs."""
    x = M.inputs[None, stage]
    window = x
    if const_expr(P.layout == "rows"):
        window = M.window[None, stage]
        if work.slot > 0:
            roll_history(window, x, work.entry, L, P)
            arch.sync_warp()
    return x, window


@cute.jit
def roll_history(
    window: cute.Tensor, x: cute.Tensor, entry: Int32, L: Lane, P: cutlass.Constexpr
) -> None:
    """The three entries before this step go in front of the inputs, the last two of them to the
    window's first."""
    entries = window_entries(window, P)
    inputs = input_rows(x, P)
    for i in range_constexpr(2):
        job = L.number + 32 * i
        if job < 3 * _WARP_CHANNELS:
            part, channel = job // _WARP_CHANNELS, L.warp * _WARP_CHANNELS + job % _WARP_CHANNELS
            seen = cute.make_rmem_tensor(HISTORY, BFloat16)
            for e in range_constexpr(HISTORY):
                seen[e] = entries[entry + e, channel, part]
            for e in range_constexpr(HISTORY):
                low, high = P.row_place(e)
                inputs[channel % 2, channel // 2, part, low, high] = seen[e]
            entries[0, channel, part] = seen[1]
            entries[1, channel, part] = seen[2]


@cute.jit
def window_entries(window: cute.Tensor, P: cutlass.Constexpr) -> cute.Tensor:
    """(entry, channel, part)"""
    return cute.make_tensor(
        window.iterator,
        cute.make_layout((P.window, HEAD_DIM, 3), stride=(1, P.window, HEAD_DIM * P.window)),
    )


@cute.jit
def input_rows(x: cute.Tensor, P: cutlass.Constexpr) -> cute.Tensor:
    """(channel of a pair, pair, part) and the coordinates of `row_place`."""
    return cute.make_tensor(
        x.iterator,
        cute.make_layout(
            (2, HEAD_DIM // 2, 3, 2, P.rows), stride=(1, 2, HEAD_DIM, 3 * HEAD_DIM, P.row_pitch)
        ),
    )


@cute.jit
def gate(
    A: Arguments,
    G: Gate,
    f_a: cute.Tensor,
    raw: cute.Tensor,
    logs: cute.Tensor,
    L: Lane,
    P: cutlass.Constexpr,
) -> None:
    """Raw gates and base-2 logarithms, of Gamma or, without the chunked form, of the decay:
    (channel, lane's token)."""
    g = L.number // 4
    token = min(g // 2 if const_expr(P.lane_tokens == 1) else g, P.tokens - 1)
    pairs = cute.make_tensor(
        cute.recast_ptr(f_a.iterator, dtype=Uint32),
        cute.make_layout((2, 4, STEPS, P.tokens), stride=(1, 2, 8, BOTTLENECK_PITCH // 2)),
    )
    none = (Float32(0), Float32(0), Float32(0), Float32(0))
    totals = [none for _ in range(P.chains)]
    for i in range_constexpr(STEPS):
        b = cute.make_rmem_tensor(2, Uint32)
        cute.autovec_copy(pairs[None, L.q, i, token], b)
        a = (G.weights[0, 0, i], G.weights[0, 1, i], G.weights[1, 0, i], G.weights[1, 1, i])
        chain = i * P.chains // STEPS
        totals[chain] = blocks.mma_16816(totals[chain], a, (b[0], b[1]))
    for c in range_constexpr(2):
        for i in range_constexpr(P.lane_tokens):
            total = totals[0][2 * c + i]
            for chain in range_constexpr(1, P.chains):
                total = total + totals[chain][2 * c + i]
            raw[c, i] = total.to(BFloat16)
            logs[c, i] = blocks.log_decay(
                raw[c, i].to(Float32), G.biases[c], G.rate[0], A.lower_bound * Float32(blocks.LOG2E)
            )
        if const_expr(P.chunked):
            own = logs[c, 0]
            if const_expr(P.lane_tokens == 2):
                own = own + logs[c, 1]
            before = earlier(own, L.q, P)
            for i in range_constexpr(P.lane_tokens):
                before = before + logs[c, i]
                logs[c, i] = before


@cute.jit
def earlier(x: Float32, q: Int32, P: cutlass.Constexpr) -> Float32:
    """Sum of x over the lower lanes of a group of four, of which lane q is number q."""
    group = (32 - 4) << 8
    one = arch.shuffle_sync_up(x, 1, mask_and_clamp=group)
    one = one if q >= 1 else Float32(0)
    total = one
    if const_expr(P.tokens > 2 * P.lane_tokens):
        two = arch.shuffle_sync_up(one, 1, mask_and_clamp=group)
        total = total + (two if q >= 2 else Float32(0))
    if const_expr(P.tokens > 3 * P.lane_tokens):
        three = arch.shuffle_sync_up(one, 2, mask_and_clamp=group)
        total = total + (three if q >= 3 else Float32(0))
    return total


@cute.jit
def convolve(
    M: Smem,
    x: cute.Tensor,
    window: cute.Tensor,
    part: cutlass.Constexpr,
    L: Lane,
    P: cutlass.Constexpr,
) -> cute.Tensor:
    """A part's channels after convolution and SiLU, a word per token of the lane. Its inputs go to
    the window."""
    taps = cute.make_tensor(
        M.taps.iterator,
        cute.make_layout(
            (2, HEAD_DIM // 2, CONV_WIDTH, 3), stride=(1, 2, HEAD_DIM, CONV_WIDTH * HEAD_DIM)
        ),
    )
    biases = cute.make_tensor(
        M.bias.iterator, cute.make_layout((2, HEAD_DIM // 2, 3), stride=(1, 2, HEAD_DIM))
    )
    inputs = input_rows(x, P)
    number = L.channel // 2
    weight = cute.make_rmem_tensor((2, CONV_WIDTH), P.conv_dtype)
    bias = cute.make_rmem_tensor(2, P.conv_dtype)
    seen = cute.make_rmem_tensor((2, HISTORY + P.lane_tokens), BFloat16)
    cute.autovec_copy(biases[None, number, part], bias)
    for tap in range_constexpr(CONV_WIDTH):
        cute.autovec_copy(taps[None, number, tap, part], weight[None, tap])
    for e in range_constexpr(HISTORY + P.lane_tokens):
        low, high = P.row_place(e)
        cute.autovec_copy(inputs[None, number, part, low, high + L.q], seen[None, e])
    if const_expr(P.layout == "rows"):
        keep_inputs(window, seen, part, L, P)
    words = cute.make_rmem_tensor(P.lane_tokens, Uint32)
    for i in range_constexpr(P.lane_tokens):
        y = cute.make_rmem_tensor(2, Float32)
        for c in range_constexpr(2):
            total = bias[c].to(Float32)
            for tap in range_constexpr(CONV_WIDTH):
                total += weight[c, tap].to(Float32) * seen[c, tap + i].to(Float32)
            y[c] = total * blocks.sigmoid(total)
        words[i] = blocks.pack(y[0], y[1])
    return words


@cute.jit
def keep_inputs(
    window: cute.Tensor, seen: cute.Tensor, part: cutlass.Constexpr, L: Lane, P: cutlass.Constexpr
) -> None:
    """The step's inputs become the window's entries from 2 on; two at a time where they are
    words."""
    if const_expr(P.window % 2 == 0 and P.tokens % 2 == 0 and P.lane_tokens == 2):
        words = cute.make_tensor(
            window.iterator,
            cute.make_layout(
                (2, P.window // 2, HEAD_DIM, 3), stride=(1, 2, P.window, HEAD_DIM * P.window)
            ),
        )
        if 2 * L.q < P.tokens:
            for c in range_constexpr(2):
                new = cute.make_rmem_tensor(2, BFloat16)
                new[0], new[1] = seen[c, HISTORY], seen[c, HISTORY + 1]
                cute.autovec_copy(new, words[None, 1 + L.q, L.channel + c, part])
    else:
        entries = window_entries(window, P)
        for i in range_constexpr(P.lane_tokens):
            t = P.lane_tokens * L.q + i
            if t < P.tokens:
                for c in range_constexpr(2):
                    entries[2 + t, L.channel + c, part] = seen[c, HISTORY + i]


@cute.jit
def record_vectors(
    A: Arguments,
    M: Smem,
    x: cute.Tensor,
    window: cute.Tensor,
    raw: cute.Tensor,
    logs: cute.Tensor,
    sums: cute.Tensor,
    stage: Int32,
    value_stage: Int32,
    work: Work,
    L: Lane,
    P: cutlass.Constexpr,
) -> None:
    """Leaves the fragments, v and the sums for the norms; keys and raw gates go to the record. What
    is computed of tokens past the last stays in columns that nobody reads.
    """
    values = cute.make_tensor(
        cute.recast_ptr(M.values[None, value_stage].iterator, dtype=Uint32),
        cute.make_layout((HEAD_DIM // 2, P.tokens), stride=(1, P.value_pitch // 2)),
    )
    record = Int64(work.record) * A.key_gates_stride + Int64(work.head * A.record_tokens) * (
        2 * HEAD_DIM
    )
    kept = A.key_gates + (record + L.channel) * 2
    fragments = fragments_of(M, stage, P)
    step, column = fragment_of(L.channel // 4, P)
    half = L.channel // 2 % 2
    squares = cute.make_rmem_tensor(2 * P.lane_tokens, Float32)

    v = convolve(M, x, window, 2, L, P)
    for i in range_constexpr(P.lane_tokens):
        t = P.lane_tokens * L.q + i
        if t < P.tokens:
            values[L.channel // 2, t] = v[i]
    k = convolve(M, x, window, 1, L, P)
    q = convolve(M, x, window, 0, L, P)
    for i in range_constexpr(P.lane_tokens):
        t = P.lane_tokens * L.q + i
        place = place_of(t * 4 + column)
        low, high = blocks.low_half(k[i]), blocks.high_half(k[i])
        squares[i] = low * low + high * high
        over_low, over_high = low * blocks.exp2(-logs[0, i]), high * blocks.exp2(-logs[1, i])
        put_pair(over_low, over_high, fragments[None, half, place, P.tiles, step])
        gamma_low, gamma_high = blocks.exp2(logs[0, i]), blocks.exp2(logs[1, i])
        put_pair(low * gamma_low, high * gamma_high, fragments[None, half, place, 0, step])
        if work.record >= 0 and t < P.tokens:
            address = kept + Int64(t * (2 * HEAD_DIM)) * 2
            blocks.put(Uint32, address, k[i])
            blocks.put_vector(raw[None, i], address + 2 * HEAD_DIM)
        low, high = blocks.low_half(q[i]), blocks.high_half(q[i])
        squares[P.lane_tokens + i] = low * low + high * high
        if const_expr(P.tiles == 1):
            place = place_of((4 + t) * 4 + column)
        put_pair(
            low * gamma_low, high * gamma_high, fragments[None, half, place, P.tiles - 1, step]
        )
    put_sums(squares, sums, L, P)


@cute.jit
def put_pair(low: Float32, high: Float32, words: cute.Tensor) -> None:
    """Two columns of a vector as a word of first terms and one of second terms."""
    terms = cute.make_rmem_tensor(2, Uint32)
    terms[0], terms[1] = chunked.split_rounded(low, high)
    cute.autovec_copy(terms, words)


@cute.jit
def step_vectors(
    M: Smem,
    x: cute.Tensor,
    window: cute.Tensor,
    logs: cute.Tensor,
    sums: cute.Tensor,
    stage: Int32,
    L: Lane,
    P: cutlass.Constexpr,
) -> None:
    """Leaves d k, d q, d, k, v of every token and the sums for the norms."""
    words = cute.make_tensor(
        M.vectors[None, stage].iterator,
        cute.make_layout((2, HEAD_DIM // 2, 5, P.tokens), stride=(1, 2, HEAD_DIM, 5 * HEAD_DIM)),
    )
    parts = [convolve(M, x, window, part, L, P) for part in range(3)]
    products = cute.make_rmem_tensor(4 * P.lane_tokens, Float32)
    products.fill(Float32(0))
    for i in range_constexpr(P.lane_tokens):
        t = P.lane_tokens * L.q + i
        vectors = cute.make_rmem_tensor((2, 5), Float32)
        for c in range_constexpr(2):
            q, k, v = [
                blocks.low_half(part[i]) if const_expr(c == 0) else blocks.high_half(part[i])
                for part in parts
            ]
            d = blocks.exp2(logs[c, i])
            vectors[c, 0], vectors[c, 1], vectors[c, 2], vectors[c, 3], vectors[c, 4] = (
                d * k,
                d * q,
                d,
                k,
                v,
            )
            products[i] += k * k
            products[P.lane_tokens + i] += q * q
            products[2 * P.lane_tokens + i] += k * q
        if t < P.tokens:
            for vector in range_constexpr(5):
                cute.autovec_copy(vectors[None, vector], words[None, L.channel // 2, vector, t])
    put_sums(products, sums, L, P)


@cute.jit
def put_sums(values: cute.Tensor, sums: cute.Tensor, L: Lane, P: cutlass.Constexpr) -> None:
    """The warp's part of the sums over channels, of (token of the lane, sum): transposed over the
    lanes of equal q."""
    count = cute.size(values)
    distance = 16
    while const_expr(distance > 2):
        if const_expr(count > 1):
            count = count // 2
            up = (L.number & distance) != 0
            for j in range_constexpr(count):
                kept = values[j + count] if up else values[j]
                sent = values[j] if up else values[j + count]
                values[j] = kept + arch.shuffle_sync_bfly(sent, offset=distance)
        else:
            values[0] = values[0] + arch.shuffle_sync_bfly(values[0], offset=distance)
        distance = distance // 2
    copies = 8 // cute.size(values)
    index, g = L.number // 4 // copies, L.number // 4
    which, t = index // P.lane_tokens, P.lane_tokens * L.q + index % P.lane_tokens
    if g % copies == 0 and which < P.sums and t < P.tokens:
        sums[t * P.sum_words + which * PROLOGUE + L.warp] = values[0]


@cute.jit
def put_beta(
    f_a: cute.Tensor, sums: cute.Tensor, head: Int32, L: Lane, P: cutlass.Constexpr
) -> None:
    """beta of all tokens behind their sums; in the chunked form the raw one."""
    if L.warp == 0 and L.number < P.tokens:
        beta = f_a[L.number * BOTTLENECK_PITCH + HEAD_DIM + (head & 1)].to(Float32)
        if const_expr(not P.chunked):
            beta = blocks.sigmoid(beta)
        sums[L.number * P.sum_words + PROLOGUE * P.sums] = beta


@cute.jit
def store_window(
    A: Arguments, window: cute.Tensor, work: Work, L: Lane, P: cutlass.Constexpr
) -> None:
    """The warp's channels: the two inputs before this step's, then these, as the first tokens + 2
    entries.

    window   its stage, for taps that of the inputs
    """
    page = A.conv_state + Int64(work.slot) * A.conv_stride * 2
    D = Int64(A.heads) * HEAD_DIM
    arch.sync_warp()
    if const_expr(P.layout == "rows"):
        units = cute.make_tensor(
            window.iterator,
            cute.make_layout(
                (UNIT, HEAD_DIM * P.window // UNIT, 3), stride=(1, UNIT, HEAD_DIM * P.window)
            ),
        )
        unit = L.warp * (2 * P.window) + L.number
        target = page + Int64(work.head) * (HEAD_DIM * P.window * 2) + unit * 16
        if L.number < 2 * P.window:
            for part in range_constexpr(3):
                blocks.copy_out(
                    units[None, unit, part].iterator.toint(), target + D * (part * P.window * 2)
                )
    else:
        inputs = cute.make_tensor(
            window.iterator,
            cute.make_layout(
                (UNIT, HEAD_DIM // UNIT, 3, 2, P.rows),
                stride=(1, UNIT, HEAD_DIM, 3 * HEAD_DIM, P.row_pitch),
            ),
        )
        # A loop, lest all addresses of a lane stay in registers over the items.
        for i in cutlass.range(ceil_div(6 * (P.tokens + 2), 32), unroll=1):
            entry, part, unit = row_of(L.number + 32 * i)
            if entry < P.tokens + 2:
                low, high = P.row_place(entry + 1)
                own = L.warp * 2 + unit
                target = (
                    page
                    + (Int64(entry) * A.tap_stride + D * part + work.head * HEAD_DIM + own * UNIT)
                    * 2
                )
                blocks.copy_out(inputs[None, own, part, low, high].iterator.toint(), target)
