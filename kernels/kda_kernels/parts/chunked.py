"""Device pieces of the chunked form of a window: the state is only read, by tensor cores. One
window of one item.

With Gamma_t the decays of tokens 0..t multiplied up, k and q normalized, S the state, and r_t = v_t
- S Gamma_t k_t:
    A_ts = k_s / Gamma_s . Gamma_t k_t  (s < t)       B_ts = k_s / Gamma_s . Gamma_t q_t  (s <= t)
    T = (I + diag(beta) A)^-1 diag(beta)              C = B T
    u_t = sum_{s<=t} T_ts r_s                         o_t = S Gamma_t q_t + sum_{s<=t} C_ts r_s
so that what follows the products with the state is a product with two small triangles, in
registers.

Products are m16n8k16 in BF16 with FP32 accumulation; an FP32 factor is two BF16 terms, hi and lo,
and lo * lo is left out. What `Shape` says of lanes: lane = 4 g + t, g < 8, t < 4.
  state      warp w owns rows 16w .. 16w+15. MMA row g is state row 16w + 2g, MMA row g + 8 is 16w +
             2g + 1, so that a thread's two rows are neighbours. A lane's 16 bytes of a row are one
             cell: columns 16c + 4t .. +3 (fp32), or 32c + 8t .. +7 (bf16), of which the first half
             belongs to step 2c and the second to step 2c + 1. Within a step the lane's columns 0,
             1, 2, 3 are the MMA's k = 2t, 2t+1, 2t+8, 2t+9.
  vectors    Gamma k of token t is column t, Gamma q of token t column `slots` + t of the product.
             Eight columns make a tile; k / Gamma stands behind the tiles in the same form, and
             serves as eight more state rows.
  fragments  [step][tile][lane] of 16 bytes: hi(0,1) hi(2,3) lo(0,1) lo(2,3) of vector g in the
             lane's columns of the step. A step's stride is 64 bytes more than its contents, so that
             neither side has bank conflicts.
Gamma must not get below some e^-60, or k / Gamma overflows: `MIN_LOG_GAMMA`. A state waits in
shared memory by lines: 128 bytes of a row, of which a warp copies four rows at a time. A warp's
lines are its own, so that `cp_async_wait_group` and a barrier of the warp stand before their use,
and no more. No function here has a CTA barrier. Source: docs/operation.md, "The same, chunked".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32, const_expr, range_constexpr

from kda_kernels.device import blocks
from kda_kernels.parts import conv_window
from kda_kernels.parts.conv_window import Window
from kda_kernels.parts.prologue import Record
from kda_kernels.problem import CONV_WIDTH, HEAD_DIM, HISTORY
from kda_kernels.step import StepPlan

arch = cute.arch
GMEM = cutlass.AddressSpace.gmem
SMEM = cutlass.AddressSpace.smem

MIN_LOG_GAMMA = -60.0
STEPS = HEAD_DIM // 16
"""k16 steps of a product over the 128 columns."""
WARPS = HEAD_DIM // 16
"""Warps that share a state of 128 rows."""
SOLVER = WARPS - 1
"""The warp that solves, where there are no more: one of those that convolve nothing."""
CONVOLVING_WARPS = 3 * HEAD_DIM // 2 // 32
"""A thread of these convolves two channels."""
LINE_BYTES = 128 * HEAD_DIM
"""Of a line of every row."""


GAMMA_PITCH = HEAD_DIM + 4
"""Floats per token of Gamma in shared memory: a quad of lanes writes four pairs of tokens without
bank conflicts."""
QKV_PITCH = 3 * HEAD_DIM + 8
"""The same, BF16 elements, of q, k and v."""


@dataclass(frozen=True)
class Shape(StepPlan):
    """Compile-time facts of a window.

    terms   BF16 terms of the vectors in products with a BF16 state, 1 or 2; an FP32 state takes 2
    """

    terms: int

    @property
    def rows(self) -> int:
        """State rows, channels of each of q, k, v and gate features of a CTA."""
        return HEAD_DIM

    @property
    def slots(self) -> int:
        """Columns of each of Gamma k and Gamma q; those past the last token are zero."""
        return 4 if self.tokens <= 4 else 8

    @property
    def tiles(self) -> int:
        """Tiles of eight columns."""
        return self.slots // 4

    @property
    def lines(self) -> int:
        """Lines of a row."""
        return self.item_bytes

    @property
    def row_cells(self) -> int:
        """Cells of a thread per row."""
        return 2 * self.item_bytes

    @property
    def step_bytes(self) -> int:
        return 512 * (self.tiles + 1) + 64

    @property
    def fragment_bytes(self) -> int:
        return STEPS * self.step_bytes

    @property
    def fragment_layout(self) -> Any:
        """Words: (word, lane, tile, step)."""
        return cute.make_layout(
            (4, 32, self.tiles + 1, STEPS), stride=(1, 4, 128, self.step_bytes // 4)
        )

    @property
    def pair_floats(self) -> int:
        """A and B of all pairs of tokens, [tile][s][column]: A where the column is one of Gamma
        k."""
        return 64 * self.tiles

    @property
    def partial_bytes(self) -> int:
        """Of A and B, a part per step."""
        return 4 * STEPS * self.pair_floats

    @property
    def gamma_bytes(self) -> int:
        return 4 * GAMMA_PITCH * self.tokens

    @property
    def qkv_bytes(self) -> int:
        return 2 * QKV_PITCH * self.tokens

    @property
    def solution_words(self) -> int:
        """Words per lane: T hi, T lo and C hi, C lo, or with four slots the hi and lo of both in
        one matrix."""
        return 2 * self.tiles

    def quad_place(self, quad: Any) -> tuple[Any, Any]:
        """Step and t of the columns 4 quad .. 4 quad + 3 in a fragment."""
        if self.state_dtype == "fp32":
            return quad // 4, quad % 4
        return quad // 8 * 2 + quad % 2, quad % 8 // 2


@cute.jit
def split_rounded(x: Float32, y: Float32) -> tuple[Uint32, Uint32]:
    """hi and lo of two floats, hi rounded to nearest: the two leave 2^-18 of each."""
    high = blocks.pack(x, y)
    return high, blocks.pack(x - blocks.low_half(high), y - blocks.high_half(high))


@cute.jit
def truncated(x: Float32, y: Float32) -> Uint32:
    """Two floats, truncated to BF16, as the halves of a word."""
    return arch.inline_ptx(
        "prmt.b32 {$w0}, {$r0}, {$r1}, 0x7632;", write_only_types=[Uint32], read_only_args=[x, y]
    )


@cute.jit
def split_truncated(x: Float32, y: Float32) -> tuple[Uint32, Uint32]:
    """The same with hi truncated: 2^-17, and no instruction waits for hi."""
    high = truncated(x, y)
    rest_x = arch.inline_ptx(
        "and.b32 {$w0}, {$r0}, 0xffff0000;", write_only_types=[Float32], read_only_args=[x]
    )
    rest_y = arch.inline_ptx(
        "and.b32 {$w0}, {$r0}, 0xffff0000;", write_only_types=[Float32], read_only_args=[y]
    )
    return high, blocks.pack(x - rest_x, y - rest_y)


@cute.jit
def load_gate_weights(weights: cute.Tensor, address: Int64, warp: Int32, lane: Int32) -> None:
    """Features 16 warp .. +15 of a head's gate weights as A fragments: words (2, row 0 or 1, k16
    chunk).

    Within a chunk columns are permuted like the state's; MMA row g is feature 16 warp + 2g, row g +
    8 the next.
    """
    first = address + Int64((16 * warp + lane // 4 * 2) * (2 * HEAD_DIM) + lane % 4 * 8)
    source = cute.make_tensor(
        cute.make_ptr(Uint32, first, GMEM, assumed_align=8),
        cute.make_layout((2, 2, STEPS), stride=(1, HEAD_DIM // 2, 8)),
    )
    for c in range_constexpr(STEPS):
        for row in range_constexpr(2):
            cute.autovec_copy(source[None, row, c], weights[None, row, c])


@cute.jit
def raw_gates(
    weights: cute.Tensor,
    s_f_a: cute.Tensor,
    lane: Int32,
    chains: cutlass.Constexpr,
    P: cutlass.Constexpr,
) -> tuple[Float32, Float32, Float32, Float32]:
    """Products of `load_gate_weights` with f_a of all tokens, before rounding: tokens 2t, 2t+1 of
    feature 2g, then of 2g+1. `chains` of 8 / chains accumulations are summed in order. Columns past
    the last token repeat it.

    s_f_a   [tokens, 128] bf16; 16-byte unit u of token t at place u ^ (t % 8) of its row
    """
    token = min(lane // 4, P.tokens - 1)
    t = lane % 4
    inputs = cute.make_tensor(
        cute.recast_ptr(s_f_a.iterator, dtype=Uint32),
        cute.make_layout((2, 2, HEAD_DIM // 8, P.tokens), stride=(1, 2, 4, HEAD_DIM // 2)),
    )
    sums = []
    for chain in range_constexpr(chains):
        c = (Float32(0), Float32(0), Float32(0), Float32(0))
        for i in range_constexpr(STEPS // chains):
            step = chain * (STEPS // chains) + i
            b = cute.make_rmem_tensor(2, Uint32)
            cute.autovec_copy(inputs[None, t % 2, (2 * step + t // 2) ^ (token % 8), token], b)
            a = (weights[0, 0, step], weights[0, 1, step], weights[1, 0, step], weights[1, 1, step])
            c = blocks.mma_16816(c, a, (b[0], b[1]))
        sums.append(c)
    c0, c1, c2, c3 = sums[0]
    for chain in range_constexpr(1, chains):
        c0, c1, c2, c3 = (
            c0 + sums[chain][0],
            c1 + sums[chain][1],
            c2 + sums[chain][2],
            c3 + sums[chain][3],
        )
    return c0, c1, c2, c3


@cute.jit
def store_gammas(
    raw: tuple[Float32, Float32, Float32, Float32],
    s_gamma: cute.Tensor,
    s_dt: cute.Tensor,
    exp_A: Float32,
    lower_bound: Float32,
    record: Record,
    warp: Int32,
    lane: Int32,
    P: cutlass.Constexpr,
) -> None:
    """Gamma of 16 features from `raw_gates`, summed up in the log domain across lanes; raw gates to
    the record.

    s_gamma   [tokens, GAMMA_PITCH]
    """
    t = lane % 4
    feature = 16 * warp + lane // 4 * 2
    gammas = cute.make_tensor(
        s_gamma.iterator, cute.make_layout((2, HEAD_DIM // 2, P.tokens), stride=(1, 2, GAMMA_PITCH))
    )
    biases = cute.make_rmem_tensor(2, Float32)
    cute.autovec_copy(
        cute.make_tensor(s_dt.iterator, cute.make_layout((2, HEAD_DIM // 2), stride=(1, 2)))[
            None, feature // 2
        ],
        biases,
    )
    rounded = (blocks.pack(raw[0], raw[2]), blocks.pack(raw[1], raw[3]))  # a word per token
    logs = cute.make_rmem_tensor((2, 2), Float32)  # (feature, token), base 2
    for side in range_constexpr(2):
        for i in range_constexpr(2):
            gate = (
                blocks.high_half(rounded[side])
                if const_expr(i == 1)
                else blocks.low_half(rounded[side])
            )
            logs[i, side] = blocks.log_decay(gate, biases[i], exp_A, lower_bound) * Float32(
                blocks.LOG2E
            )
    for i in range_constexpr(2):
        total = logs[i, 0] + logs[i, 1]
        for distance in (1, 2):
            before = arch.shuffle_sync_up(total, distance)
            total += before if t >= distance else Float32(0)
        logs[i, 0] = total - logs[i, 1]
        logs[i, 1] = total
    gates = record.key_gates + Int64(t * (4 * HEAD_DIM) + HEAD_DIM + feature) * 2
    for side in range_constexpr(2):
        token = 2 * t + side
        if token < P.tokens:
            pair = cute.make_rmem_tensor(2, Float32)
            for i in range_constexpr(2):
                pair[i] = cute.math.exp2(logs[i, side], approx=True, ftz=True)
            cute.autovec_copy(pair, gammas[None, feature // 2, token])
            if record.row >= 0:
                blocks.put(Uint32, gates + side * (4 * HEAD_DIM), rounded[side])


@cute.jit
def convolve_with(
    taps: cute.Tensor,
    bias: cute.Tensor,
    M: cutlass.Constexpr,
    s_qkv: cute.Tensor,
    window: Window,
    record: Record,
    task: Int32,
    P: cutlass.Constexpr,
) -> None:
    """Two channels of one of q, k, v, all tokens: task = 64 * part + pair, 192 in all. Keys go to
    the record.

    taps, bias   of the two channels: (2, 4), (2)
    M            has x [history + tokens, 3, 128] bf16 and, of layout rows, window [3, 128,
                 entries], which is rolled
    s_qkv        [tokens, QKV_PITCH] bf16: q, k, v
    """
    pairs = HEAD_DIM // 2
    part, pair = task // pairs, task % pairs
    inputs = cute.make_tensor(
        cute.recast_ptr(M.x.iterator, dtype=Uint32),
        cute.make_layout((pairs, 3, P.history + P.tokens), stride=(1, pairs, 3 * pairs)),
    )
    results = cute.make_tensor(
        cute.recast_ptr(s_qkv.iterator, dtype=Uint32),
        cute.make_layout((pairs, 3, P.tokens), stride=(1, pairs, QKV_PITCH // 2)),
    )
    key = record.key_gates + Int64(pair) * 4
    words = cute.make_rmem_tensor(
        HISTORY + P.tokens, Uint32
    )  # both channels of an entry: the history, then inputs
    if const_expr(P.layout == "rows"):
        take_history(words, M, window, task)
    else:
        for e in range_constexpr(HISTORY):
            words[e] = inputs[pair, part, e]
    for t in range_constexpr(P.tokens):
        if const_expr(t == 4):
            arch.sync_warp()  # all inputs at once take too many registers
        words[HISTORY + t] = inputs[pair, part, P.history + t]
        y = cute.make_rmem_tensor(2, Float32)
        for i in range_constexpr(2):
            y[i] = bias[i].to(Float32)
            for tap in range_constexpr(CONV_WIDTH):
                seen = (
                    blocks.high_half(words[t + tap])
                    if const_expr(i == 1)
                    else blocks.low_half(words[t + tap])
                )
                y[i] += taps[i, tap].to(Float32) * seen
        rounded = blocks.pack(y[0] * blocks.sigmoid(y[0]), y[1] * blocks.sigmoid(y[1]))
        results[pair, part, t] = rounded
        if part == 1 and record.row >= 0:
            blocks.put(Uint32, key + t * (4 * HEAD_DIM), rounded)
    if const_expr(P.layout == "rows"):
        roll_window(words, M, window, task, P)


@cute.jit
def take_history(words: cute.Tensor, M: cutlass.Constexpr, window: Window, task: Int32) -> None:
    """Entries start .. start+2 of two channels of a window that is copied whole, a word for
    each."""
    values = cute.make_tensor(
        cute.recast_ptr(words.iterator, dtype=BFloat16),
        cute.make_layout((2, HISTORY), stride=(1, 2)),
    )
    conv_window.take_history(values, M, window, 2 * task)


@cute.jit
def roll_window(
    words: cute.Tensor, M: cutlass.Constexpr, window: Window, task: Int32, P: cutlass.Constexpr
) -> None:
    """The last two entries of the history, then the inputs, as the first entries of two channels.

    words   both channels of an entry: three of history, then the inputs
    """
    entries = window.channel_stride
    rolled = P.tokens + 2
    if entries == rolled:
        # The two channels are all of `rolled` neighbouring words.
        width = 2 - P.tokens % 2
        packed = cute.make_rmem_tensor(rolled, Uint32)
        for w in range_constexpr(rolled):
            first, second = 2 * w, 2 * w + 1
            low, high = words[1 + first % rolled], words[1 + second % rolled]
            low = low // 65536 if const_expr(first >= rolled) else low & Uint32(0xFFFF)
            high = (
                high & Uint32(0xFFFF0000)
                if const_expr(second >= rolled)
                else (high & Uint32(0xFFFF)) * 65536
            )
            packed[w] = low | high
        source = cute.make_tensor(
            packed.iterator, cute.make_layout((width, rolled // width), stride=(1, width))
        )
        target = cute.make_tensor(
            cute.recast_ptr(M.window.iterator, dtype=Uint32),
            cute.make_layout(
                (width, rolled // width, 3 * HEAD_DIM // 2), stride=(1, width, rolled)
            ),
        )
        for piece in range_constexpr(rolled // width):
            cute.autovec_copy(source[None, piece], target[None, piece, task])
    else:
        place = 2 * task * entries
        values = cute.make_tensor(
            cute.recast_ptr(words.iterator, dtype=BFloat16),
            cute.make_layout((2, 1 + rolled), stride=(1, 2)),
        )
        for i in range_constexpr(2):
            for e in range_constexpr(rolled):
                M.window[place + i * entries + e] = values[i, 1 + e]


@cute.jit
def build_fragments(
    s_fragments: cute.Tensor,
    s_qkv: cute.Tensor,
    s_gamma: cute.Tensor,
    scale: Float32,
    index: Int32,
    count: cutlass.Constexpr,
    lane: Int32,
    P: cutlass.Constexpr,
) -> None:
    """Normalizes k and q and writes all fragments, by `count` warps (1, 2, 4 or 8) of which this
    one is `index`.

    Lane = four columns, so a warp holds a whole vector.
    """
    for i in range_constexpr(8 // count):
        task = index + i * count
        if const_expr(P.slots == 8):
            _build_token(s_fragments, s_qkv, s_gamma, scale, task, lane, P)
        else:
            _build_vector(s_fragments, s_qkv, s_gamma, scale, task, lane, P)


@cute.jit
def _build_token(
    s_fragments: cute.Tensor,
    s_qkv: cute.Tensor,
    s_gamma: cute.Tensor,
    scale: Float32,
    token: Int32,
    lane: Int32,
    P: cutlass.Constexpr,
) -> None:
    """Gamma k, Gamma q and k / Gamma of a token, eight slots."""
    aged_k = cute.make_rmem_tensor(4, Float32)
    aged_q = cute.make_rmem_tensor(4, Float32)
    young_k = cute.make_rmem_tensor(4, Float32)
    aged_k.fill(Float32(0))
    aged_q.fill(Float32(0))
    young_k.fill(Float32(0))
    if token < P.tokens:
        q = _quad(s_qkv, 0, token, lane, P)
        k = _quad(s_qkv, 1, token, lane, P)
        gamma = _gamma_quad(s_gamma, token, lane, P)
        kk, qq = Float32(0), Float32(0)
        for e in range_constexpr(4):
            kk += k[e] * k[e]
            qq += q[e] * q[e]
        rk = blocks.rsqrt(blocks.lane_sum(kk, 1, 32) + Float32(blocks.KEY_EPS))
        rq = scale * blocks.rsqrt(blocks.lane_sum(qq, 1, 32) + Float32(blocks.KEY_EPS))
        for e in range_constexpr(4):
            aged_k[e] = k[e] * rk * gamma[e]
            aged_q[e] = q[e] * rq * gamma[e]
            young_k[e] = k[e] * rk * arch.rcp_approx(gamma[e])
    _put_quad(s_fragments, aged_k, 0, token, lane, P)
    _put_quad(s_fragments, aged_q, 1, token, lane, P)
    _put_quad(s_fragments, young_k, 2, token, lane, P)


@cute.jit
def _build_vector(
    s_fragments: cute.Tensor,
    s_qkv: cute.Tensor,
    s_gamma: cute.Tensor,
    scale: Float32,
    column: Int32,
    lane: Int32,
    P: cutlass.Constexpr,
) -> None:
    """Gamma k and k / Gamma, or Gamma q, of a token, four slots."""
    token = column % 4
    is_query = column // 4
    aged = cute.make_rmem_tensor(4, Float32)
    young = cute.make_rmem_tensor(4, Float32)
    aged.fill(Float32(0))
    young.fill(Float32(0))
    if token < P.tokens:
        x = _quad(s_qkv, 1 - is_query, token, lane, P)
        gamma = _gamma_quad(s_gamma, token, lane, P)
        square = Float32(0)
        for e in range_constexpr(4):
            square += x[e] * x[e]
        factor = blocks.rsqrt(blocks.lane_sum(square, 1, 32) + Float32(blocks.KEY_EPS))
        if is_query == 1:
            factor = factor * scale
        for e in range_constexpr(4):
            aged[e] = x[e] * factor * gamma[e]
            young[e] = x[e] * factor * arch.rcp_approx(gamma[e])
    _put_quad(s_fragments, aged, 0, column, lane, P)
    if is_query == 0:
        _put_quad(s_fragments, young, 1, column, lane, P)


@cute.jit
def _quad(
    s_qkv: cute.Tensor, part: Int32, token: Int32, lane: Int32, P: cutlass.Constexpr
) -> tuple[Float32, ...]:
    """Four columns of q, k or v."""
    words = cute.make_tensor(
        cute.recast_ptr(s_qkv.iterator, dtype=Uint32),
        cute.make_layout((2, 32, 3, P.tokens), stride=(1, 2, HEAD_DIM // 2, QKV_PITCH // 2)),
    )
    pair = cute.make_rmem_tensor(2, Uint32)
    cute.autovec_copy(words[None, lane, part, token], pair)
    return (
        blocks.low_half(pair[0]),
        blocks.high_half(pair[0]),
        blocks.low_half(pair[1]),
        blocks.high_half(pair[1]),
    )


@cute.jit
def _gamma_quad(
    s_gamma: cute.Tensor, token: Int32, lane: Int32, P: cutlass.Constexpr
) -> cute.Tensor:
    gammas = cute.make_tensor(
        s_gamma.iterator, cute.make_layout((4, 32, P.tokens), stride=(1, 4, GAMMA_PITCH))
    )
    gamma = cute.make_rmem_tensor(4, Float32)
    cute.autovec_copy(gammas[None, lane, token], gamma)
    return gamma


@cute.jit
def _put_quad(
    s_fragments: cute.Tensor,
    x: cute.Tensor,
    tile: cutlass.Constexpr,
    slot: Int32,
    quad: Int32,
    P: cutlass.Constexpr,
) -> None:
    """Columns 4 quad .. +3 of the vector in column `slot` of a tile."""
    step, t = P.quad_place(quad)
    words = cute.make_rmem_tensor(4, Uint32)
    words[0], words[2] = split_rounded(x[0], x[1])
    words[1], words[3] = split_rounded(x[2], x[3])
    fragments = cute.make_tensor(
        cute.recast_ptr(s_fragments.iterator, dtype=Uint32), P.fragment_layout
    )
    cute.autovec_copy(words, fragments[None, 4 * slot + t, tile, step])


@cute.jit
def fragment(
    s_fragments: cute.Tensor,
    step: Int32,
    tile: cutlass.Constexpr,
    lane: Int32,
    P: cutlass.Constexpr,
) -> cute.Tensor:
    """Four words: hi of the lane's columns 0..3, lo of them."""
    fragments = cute.make_tensor(
        cute.recast_ptr(s_fragments.iterator, dtype=Uint32), P.fragment_layout
    )
    words = cute.make_rmem_tensor(4, Uint32)
    cute.autovec_copy(fragments[None, lane, tile, step], words)
    return words


@cute.jit
def token_products(
    s_fragments: cute.Tensor,
    s_partials: cute.Tensor,
    step: Int32,
    lane: Int32,
    P: cutlass.Constexpr,
) -> None:
    """A step's part of A and B, by one warp: s_partials [step][tile][s][column] f32."""
    none = Uint32(0)
    k = fragment(s_fragments, step, P.tiles, lane, P)
    high, low = (k[0], none, k[1], none), (k[2], none, k[3], none)
    partials = cute.make_tensor(
        s_partials.iterator,
        cute.make_layout((2, 32, P.tiles, STEPS), stride=(1, 2, 64, P.pair_floats)),
    )
    for tile in range_constexpr(P.tiles):
        x = fragment(s_fragments, step, tile, lane, P)
        c = (Float32(0), Float32(0), Float32(0), Float32(0))
        c = blocks.mma_16816(c, low, (x[0], x[1]))
        c = blocks.mma_16816(c, high, (x[2], x[3]))
        c = blocks.mma_16816(c, high, (x[0], x[1]))
        pair = cute.make_rmem_tensor(2, Float32)
        pair[0], pair[1] = c[0], c[1]
        cute.autovec_copy(pair, partials[None, lane, tile, step])


@cute.jit
def solve(
    s_partials: cute.Tensor,
    s_pairs: cute.Tensor,
    s_matrix: cute.Tensor,
    s_solution: cute.Tensor,
    beta: Float32,
    lane: Int32,
    P: cutlass.Constexpr,
) -> None:
    """T and C as B fragments, by one warp.

    beta        of token lane % slots (anything for lanes past the last token)
    s_pairs     scratch, pair_floats f32
    s_matrix    scratch, [2 * slots, slots] f32: T, C
    s_solution  [lane] of `solution_words` words
    """
    count = P.pair_floats // 32
    partials = cute.make_tensor(
        s_partials.iterator, cute.make_layout((count, 32, STEPS), stride=(1, count, P.pair_floats))
    )
    parts = cute.make_rmem_tensor((count, STEPS), Float32)
    for step in range_constexpr(STEPS):
        cute.autovec_copy(partials[None, lane, step], parts[None, step])
    total = cute.make_rmem_tensor(count, Float32)
    for i in range_constexpr(count):
        total[i] = ((parts[i, 0] + parts[i, 1]) + (parts[i, 2] + parts[i, 3])) + (
            (parts[i, 4] + parts[i, 5]) + (parts[i, 6] + parts[i, 7])
        )
    cute.autovec_copy(
        total,
        cute.make_tensor(s_pairs.iterator, cute.make_layout((count, 32), stride=(1, count)))[
            None, lane
        ],
    )
    arch.sync_warp()

    # Column lane % slots of T and C, from the unit vector of that token.
    column = lane % P.slots
    rows = cute.make_tensor(
        s_pairs.iterator, cute.make_layout((4, 2, 8, P.tiles), stride=(1, 4, 8, 64))
    )  # (4 columns, half of a tile, s, tile)
    rest = cute.make_rmem_tensor(P.slots, Float32)
    corrections = cute.make_rmem_tensor(P.slots, Float32)
    outputs = cute.make_rmem_tensor(P.slots, Float32)
    corrections.fill(Float32(0))
    outputs.fill(Float32(0))
    for t in range_constexpr(P.slots):
        rest[t] = Float32(1) if column == t else Float32(0)
    for s in range_constexpr(P.tokens):
        row = cute.make_rmem_tensor((4, P.slots // 4, 2), Float32)  # A_ts, then B_ts, of all t
        for part in range_constexpr(2):
            for half in range_constexpr(P.slots // 4):
                source = (part, 0) if const_expr(P.slots == 4) else (half, part)
                cute.autovec_copy(rows[None, source[0], s, source[1]], row[None, half, part])
        u = arch.shuffle_sync(beta, s) * rest[s]
        corrections[s] = u
        for t in range_constexpr(s, P.tokens):
            if const_expr(t > s):
                rest[t] = rest[t] - row[t % 4, t // 4, 0] * u
            outputs[t] = outputs[t] + row[t % 4, t // 4, 1] * u
    matrix = cute.make_tensor(
        s_matrix.iterator, cute.make_layout((P.slots, 2 * P.slots), stride=(1, P.slots))
    )
    if lane < P.slots:
        for t in range_constexpr(P.slots):
            matrix[column, t] = corrections[t]
            matrix[column, P.slots + t] = outputs[t]
    arch.sync_warp()

    g, t = lane // 4, lane % 4
    words = cute.make_rmem_tensor(P.solution_words, Uint32)
    words.fill(Uint32(0))
    pairs = cute.make_tensor(
        s_matrix.iterator, cute.make_layout((2, P.slots // 2, 2 * P.slots), stride=(1, 2, P.slots))
    )
    pair = cute.make_rmem_tensor(2, Float32)
    if const_expr(P.slots == 8):
        for part in range_constexpr(2):
            cute.autovec_copy(pairs[None, t, 8 * part + g], pair)
            words[2 * part], words[2 * part + 1] = split_rounded(pair[0], pair[1])
    else:
        # k = 4..7 belong to columns of Gamma q, which take no part.
        if t < 2:
            cute.autovec_copy(pairs[None, t, g], pair)
            high, low = split_rounded(pair[0], pair[1])
            words[0] = high
            words[1] = low
    cute.autovec_copy(
        words,
        cute.make_tensor(
            cute.recast_ptr(s_solution.iterator, dtype=Uint32),
            cute.make_layout((P.solution_words, 32), stride=(1, P.solution_words)),
        )[None, lane],
    )


@cute.jit
def copy_line(
    cells: Int32,
    page: Int64,
    line: Int32,
    warp: Int32,
    lane: Int32,
    policy: Int64,
    hinted: cutlass.Constexpr,
    P: cutlass.Constexpr,
) -> None:
    """Ask for a line of the warp's rows, by cp.async.

    cells   16 * thread behind the shared address of the line's LINE_BYTES, which is a multiple of
            128
    page    address of the item's state
    policy  of the L2 cache, if hinted

    Rows 4j .. 4j + 3 of the warp lie together. The halves of a line change places in rows 2 and 3
    of them, so that a quarter of a warp reads cells of its two rows without bank conflicts.
    """
    row_bytes = HEAD_DIM * P.item_bytes
    source = page + (Int64((16 * warp + lane // 8) * row_bytes + lane % 8 * 16) + line * 128)
    target = cells + ((lane ^ (lane // 16 * 4)) - lane) * 16
    for j in range_constexpr(4):
        if const_expr(hinted):
            blocks.copy_async_hinted(
                target + j * (32 * WARPS * 16), source + j * (4 * row_bytes), 16, policy
            )
        else:
            blocks.copy_async(target + j * (32 * WARPS * 16), source + j * (4 * row_bytes), 16)


@cute.jit
def accumulators(P: cutlass.Constexpr) -> cute.Tensor:
    """Zeros: (4, chain, tile); the two chains are summed at the end."""
    sums = cute.make_rmem_tensor((4, 2, P.tiles), Float32)
    sums.fill(Float32(0))
    return sums


@cute.jit
def multiply_line(
    sums: cute.Tensor,
    cells: Int32,
    s_fragments: cute.Tensor,
    line: Int32,
    lane: Int32,
    P: cutlass.Constexpr,
) -> None:
    """Add the products of a line of the warp's rows, for which each of its lanes has waited. cells:
    as `copy_line`."""
    arch.sync_warp()
    for half in range_constexpr(2):
        _multiply_half(sums, cells, s_fragments, 2 * line + half, half, lane, P)


@cute.jit
def _multiply_half(
    sums: cute.Tensor,
    cells: Int32,
    s_fragments: cute.Tensor,
    cell: Int32,
    half: cutlass.Constexpr,
    lane: Int32,
    P: cutlass.Constexpr,
) -> None:
    """Add the products of half of a line, which is one cell of each of the thread's rows."""
    g, t = lane // 4, lane % 4
    first = cells + (
        g // 2 * (32 * WARPS * 16) - 16 * lane + g % 2 * 256 + (g % 2 ^ half) * 64 + t * 16
    )
    x = cute.make_rmem_tensor(4, Uint32)
    y = cute.make_rmem_tensor(4, Uint32)
    for row in range_constexpr(2):
        source = cute.make_ptr(Uint32, first + row * 128, SMEM, assumed_align=16)
        cute.autovec_copy(
            cute.make_tensor(source, cute.make_layout(4)), y if const_expr(row == 1) else x
        )
    multiply_cell(sums, x, y, s_fragments, cell, lane, P)


@cute.jit
def multiply_cell(
    sums: cute.Tensor,
    x: cute.Tensor,
    y: cute.Tensor,
    s_fragments: cute.Tensor,
    cell: Int32,
    lane: Int32,
    P: cutlass.Constexpr,
) -> None:
    """Add the products of one cell of each of the thread's two rows, x and y, as four words
    each."""
    if const_expr(P.state_dtype == "fp32"):
        fx = cute.make_tensor(cute.recast_ptr(x.iterator, dtype=Float32), cute.make_layout(4))
        fy = cute.make_tensor(cute.recast_ptr(y.iterator, dtype=Float32), cute.make_layout(4))
        x_high0, x_low0 = split_truncated(fx[0], fx[1])
        x_high1, x_low1 = split_truncated(fx[2], fx[3])
        y_high0, y_low0 = split_truncated(fy[0], fy[1])
        y_high1, y_low1 = split_truncated(fy[2], fy[3])
        high = (x_high0, y_high0, x_high1, y_high1)
        low = (x_low0, y_low0, x_low1, y_low1)
        for tile in range_constexpr(P.tiles):
            b = fragment(s_fragments, cell, tile, lane, P)
            _add(sums, 1, tile, low, (b[0], b[1]))
            _add(sums, 0, tile, high, (b[0], b[1]))
            _add(sums, 1, tile, high, (b[2], b[3]))
    else:
        for half in range_constexpr(2):
            a = (x[2 * half], y[2 * half], x[2 * half + 1], y[2 * half + 1])
            for tile in range_constexpr(P.tiles):
                b = fragment(s_fragments, 2 * cell + half, tile, lane, P)
                if const_expr(P.terms == 2):
                    _add(sums, 0, tile, a, (b[0], b[1]))
                    _add(sums, 1, tile, a, (b[2], b[3]))
                else:
                    _add(sums, half, tile, a, (b[0], b[1]))


@cute.jit
def _add(
    sums: cute.Tensor,
    chain: cutlass.Constexpr,
    tile: cutlass.Constexpr,
    a: tuple[Uint32, ...],
    b: tuple[Uint32, ...],
) -> None:
    c = (sums[0, chain, tile], sums[1, chain, tile], sums[2, chain, tile], sums[3, chain, tile])
    sums[0, chain, tile], sums[1, chain, tile], sums[2, chain, tile], sums[3, chain, tile] = (
        blocks.mma_16816(c, a, b)
    )


@cute.jit
def first_token(lane: Int32, P: cutlass.Constexpr) -> Int32:
    """The first of the two tokens whose results this lane holds."""
    return lane % (P.slots // 2) * 2


@cute.jit
def values(
    s_qkv: cute.Tensor, warp: Int32, lane: Int32, P: cutlass.Constexpr
) -> tuple[Float32, ...]:
    """v of the lane's two rows and two tokens: row 2g of both, then row 2g+1. Tokens past the last
    repeat it."""
    words = cute.make_tensor(
        cute.recast_ptr(s_qkv.iterator, dtype=Uint32),
        cute.make_layout((HEAD_DIM // 2, 3, P.tokens), stride=(1, HEAD_DIM // 2, QKV_PITCH // 2)),
    )
    token = first_token(lane, P)
    place = 8 * warp + lane // 4
    first = words[place, 2, min(token, P.tokens - 1)]
    second = words[place, 2, min(token + 1, P.tokens - 1)]
    return (
        blocks.low_half(first),
        blocks.low_half(second),
        blocks.high_half(first),
        blocks.high_half(second),
    )


@cute.jit
def finish(
    sums: cute.Tensor,
    v: tuple[Float32, ...],
    s_solution: cute.Tensor,
    lane: Int32,
    P: cutlass.Constexpr,
) -> tuple[tuple[Float32, ...], tuple[Float32, ...]]:
    """u and o of the lane's two rows and two tokens, in the order of `values`.

    With four slots only lanes t < 2 hold u, and only the others o: `holds_corrections`,
    `holds_outputs`.
    """
    solution = cute.make_rmem_tensor(P.solution_words, Uint32)
    cute.autovec_copy(
        cute.make_tensor(
            cute.recast_ptr(s_solution.iterator, dtype=Uint32),
            cute.make_layout((P.solution_words, 32), stride=(1, P.solution_words)),
        )[None, lane],
        solution,
    )
    token = first_token(lane, P)
    r = cute.make_rmem_tensor(4, Float32)
    for i in range_constexpr(4):
        r[i] = v[i] - (sums[i, 0, 0] + sums[i, 1, 0])
        if const_expr(P.tokens < P.slots):
            r[i] = r[i] if token + i % 2 < P.tokens else Float32(0)
        if const_expr(P.slots == 4):
            r[i] = r[i] if lane % 4 < 2 else Float32(0)
    high0, low0 = split_rounded(r[0], r[1])
    high1, low1 = split_rounded(r[2], r[3])
    a = (high0, high1, low0, low1)  # k = 0..7: hi of r, k = 8..15: lo of it
    zero = Float32(0)
    if const_expr(P.slots == 8):
        u = blocks.mma_16816((zero, zero, zero, zero), a, (solution[1], solution[1]))
        u = blocks.mma_16816(u, a, (solution[0], solution[0]))
        y = (
            sums[0, 0, 1] + sums[0, 1, 1],
            sums[1, 0, 1] + sums[1, 1, 1],
            sums[2, 0, 1] + sums[2, 1, 1],
            sums[3, 0, 1] + sums[3, 1, 1],
        )
        o = blocks.mma_16816(y, a, (solution[3], solution[3]))
        o = blocks.mma_16816(o, a, (solution[2], solution[2]))
    else:
        y = cute.make_rmem_tensor(4, Float32)
        for i in range_constexpr(4):
            y[i] = sums[i, 0, 0] + sums[i, 1, 0] if lane % 4 >= 2 else zero
        u = blocks.mma_16816((y[0], y[1], y[2], y[3]), a, (solution[1], solution[1]))
        u = blocks.mma_16816(u, a, (solution[0], solution[0]))
        o = u
    return u, o


@cute.jit
def store_corrections(
    u: tuple[Float32, ...], address: Int64, warp: Int32, lane: Int32, P: cutlass.Constexpr
) -> None:
    """u of `finish` to the item's record [tokens, 128] f32."""
    token = first_token(lane, P)
    for side in range_constexpr(2):
        held = token + side < P.tokens
        if const_expr(P.slots == 4):
            held = held and lane % 4 < 2
        if held:
            pair = cute.make_rmem_tensor(2, Float32)
            pair[0], pair[1] = u[side], u[2 + side]
            place = address + Int64((token + side) * HEAD_DIM + 16 * warp + lane // 4 * 2) * 4
            target = cute.make_ptr(Float32, place, GMEM, assumed_align=8)
            cute.autovec_copy(pair, cute.make_tensor(target, cute.make_layout(2)))


@cute.jit
def store_squares(
    o: cute.Tensor, s_sums: cute.Tensor, warp: Int32, lane: Int32, P: cutlass.Constexpr
) -> None:
    """Sums of squares over the warp's rows of the lane's two tokens, o rounded, in the order of
    `values`.

    s_sums   [slots, WARPS] f32; the halves of tokens 4.. change places, so that no banks conflict
    """
    first = o[0] * o[0] + o[2] * o[2]
    second = o[1] * o[1] + o[3] * o[3]
    upper = lane >= 16
    kept = second if upper else first
    sent = first if upper else second
    kept += arch.shuffle_sync_bfly(sent, offset=16)
    kept += arch.shuffle_sync_bfly(kept, offset=8)
    kept += arch.shuffle_sync_bfly(kept, offset=4)
    holds = lane % 16 < 4
    if const_expr(P.slots == 4):
        holds = holds and lane % 4 >= 2
    squares = cute.make_tensor(s_sums.iterator, cute.make_layout((WARPS, P.slots)))
    if holds:
        token = first_token(lane, P) + lane // 16
        squares[warp ^ (token // 4 * 4), token] = kept


@cute.jit
def output_factors(
    s_out_gate: cute.Tensor,
    s_norm_weight: cute.Tensor,
    tile: Int32,
    lane: Int32,
    P: cutlass.Constexpr,
) -> cute.Tensor:
    """Norm weight times sigmoid of the output gate, in the order of `values`.

    tile   16 of the CTA's rows
    """
    words = cute.make_tensor(
        cute.recast_ptr(s_out_gate.iterator, dtype=Uint32),
        cute.make_layout((P.rows // 2, P.tokens)),
    )
    token = first_token(lane, P)
    place = 8 * tile + lane // 4
    weights = cute.make_rmem_tensor(2, Float32)
    cute.autovec_copy(
        cute.make_tensor(s_norm_weight.iterator, cute.make_layout((2, P.rows // 2), stride=(1, 2)))[
            None, place
        ],
        weights,
    )
    factors = cute.make_rmem_tensor(4, Float32)
    for side in range_constexpr(2):
        gates = words[place, min(token + side, P.tokens - 1)]
        factors[side] = weights[0] * blocks.sigmoid(blocks.low_half(gates))
        factors[2 + side] = weights[1] * blocks.sigmoid(blocks.high_half(gates))
    return factors


@cute.jit
def store_outputs(
    o: cute.Tensor,
    factors: cute.Tensor,
    s_sums: cute.Tensor,
    eps: Float32,
    results: Int64,
    D: Int32,
    warp: Int32,
    lane: Int32,
    P: cutlass.Constexpr,
) -> None:
    """RMSNorm from all warps' `store_squares`, output gate, and store to `results`, [tokens, D]
    bf16."""
    token = first_token(lane, P)
    sums = cute.make_tensor(
        s_sums.iterator, cute.make_layout((4, 2, P.slots), stride=(1, 4, WARPS))
    )
    for side in range_constexpr(2):
        part = cute.make_rmem_tensor((4, 2), Float32)
        for half in range_constexpr(2):
            cute.autovec_copy(sums[None, half ^ (token // 4), token + side], part[None, half])
        total = ((part[0, 0] + part[1, 0]) + (part[2, 0] + part[3, 0])) + (
            (part[0, 1] + part[1, 1]) + (part[2, 1] + part[3, 1])
        )
        rms = blocks.rsqrt(total * Float32(1 / HEAD_DIM) + eps)
        held = token + side < P.tokens
        if const_expr(P.slots == 4):
            held = held and lane % 4 >= 2
        if held:
            word = blocks.pack(o[side] * rms * factors[side], o[2 + side] * rms * factors[2 + side])
            place = results + (Int64(token + side) * D + 16 * warp + lane // 4 * 2) * 2
            blocks.put(Uint32, place, word)
