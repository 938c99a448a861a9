"""What the groups of warps of KdaWS share: the plan of a binary, shared memory, the hand-over,
places of fragments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint32, const_expr, range_constexpr

from kda_kernels.arguments import Arguments
from kda_kernels.device import blocks, smem
from kda_kernels.device.gpu import SM_REGISTERS
from kda_kernels.device.ring import Ring
from kda_kernels.device.smem import Area, Smem
from kda_kernels.parts.chunked import STEPS
from kda_kernels.problem import CONV_WIDTH, HEAD_DIM, HISTORY, ceil_div
from kda_kernels.step import StepPlan
from kda_kernels.walk import Item

PROLOGUE, PRODUCT, EPILOGUE = 8, 8, 4
"""Warps of each group."""
THREADS = 32 * (PROLOGUE + PRODUCT + EPILOGUE)
LAUNCHED = SM_REGISTERS // THREADS // 8 * 8
"""Registers per thread that a CTA starts with."""
REGISTERS = {
    ("decode", "rows"): (80, 136, 48),
    ("decode", "taps"): (80, 136, 48),
    ("spec", "rows"): (72, 144, 48),
    ("spec", "taps"): (72, 144, 48),
    ("record", "rows"): (96, 96, 96),
    ("record", "taps"): (104, 96, 80),
}
"""Of a thread of each group, by setmaxnreg, by kind and layout: the splits without spills on all
targets. Multiples of 8; together at most LAUNCHED per thread.
"""

INPUT_STAGES = 2
VECTOR_STAGES = 2
VALUE_STAGES = 3
BOTTLENECK_STAGES = VALUE_STAGES
"""One more than of the other inputs: who asks for item n+2's then knows that all warps are done
with item n-1's."""

RESULT_PITCH = HEAD_DIM + 4  # pitches that spread an MMA's rows over the banks
BOTTLENECK_PITCH = HEAD_DIM + 16  # of f_a in bf16; behind the 128 elements raw betas of two heads

arch = cute.arch


MIN_LOG_DECAY = -64.0
"""Record: lower_bound * tokens must not lie below, so that 1 / Gamma and its split stay far inside
FP32."""


@dataclass(frozen=True)
class Plan(StepPlan):
    """What decides the code: the problem's compile-time part and the options'.

    window          all entries of a `rows` window
    terms           BF16 terms of a record's vectors
    state_stages    items whose state there is room for
    result_stages   of what the product hands to the epilogue
    """

    terms: int
    state_stages: int
    result_stages: int

    @property
    def chunked(self) -> bool:
        return self.kind == "record"

    @property
    def ctas_per_sm(self) -> int:
        return 1

    @property
    def history(self) -> int:
        """The last entries of a window that is copied whole are put in front of the inputs too."""
        return HISTORY

    @property
    def least_log_gate(self) -> float | None:
        return MIN_LOG_DECAY if self.chunked else None

    @property
    def keeps_gate(self) -> bool:
        """Whether a head's gate weights stay in registers. A spec's time is that of its states: it
        loads them anew."""
        return self.kind != "spec"

    @property
    def numbers(self) -> int:
        """What an item is looked up by: see `load_numbers`."""
        return 1 if self.kind == "decode" else 2

    @property
    def finishers(self) -> int:
        """Warps of the epilogue that have a part in it."""
        return EPILOGUE if self.chunked else min(EPILOGUE, self.tokens)

    @property
    def lane_tokens(self) -> int:
        """Tokens of a lane of the prologue: lane q of a group of four has `lane_tokens * q` and
        those after it."""
        return 1 if self.tokens <= 4 else 2

    @property
    def row_pitch(self) -> int:
        """Elements between the first inputs of neighbouring lanes of a group of four: eight banks
        apart."""
        return (6 * HEAD_DIM * self.lane_tokens + 32) // 2

    @property
    def value_pitch(self) -> int:
        """Elements between tokens of v, which keep neighbouring lanes' eight banks apart too."""
        return HEAD_DIM + 16 // self.lane_tokens

    def row_place(self, row: Any) -> tuple[Any, Any]:
        """Where a row of inputs lies: coordinates with the strides 3 * 128 and `row_pitch`."""
        return (0, row) if self.lane_tokens == 1 else (row % 2, row // 2)

    @property
    def rows(self) -> int:
        """Rows of inputs: the window's last three, then those of all lanes' tokens."""
        return self.history + 4 * self.lane_tokens

    @property
    def sums(self) -> int:
        """Kinds of sums over the channels of a token: k.k, q.q and, without the chunked form,
        k.q."""
        return 2 if self.chunked else 3

    @property
    def sum_words(self) -> int:
        """Of a token: each sum's part from every warp of the prologue; then beta, in the chunked
        form from the prologue raw, and room for rk and rq.
        """
        return PROLOGUE * self.sums + 4

    @property
    def sum_stages(self) -> int:
        return VALUE_STAGES if self.chunked else VECTOR_STAGES

    @property
    def tiles(self) -> int:
        """MMA tiles of 8 vectors: keys and queries share one up to four tokens."""
        return 1 if self.tokens <= 4 else 2

    @property
    def columns(self) -> int:
        """Of the products with the state; column t belongs to Gamma_t k_t, column `columns / 2 + t`
        to Gamma_t q_t."""
        return 8 * self.tiles

    @property
    def partials(self) -> int:
        """Warps that share a tile of A and B, each `tiles` steps along K."""
        return PRODUCT // self.tiles

    @property
    def vector(self) -> int:
        """State elements of a 16-byte cell."""
        return 16 // self.item_bytes

    @property
    def units(self) -> int:
        """Cells of a page per thread of the product."""
        return HEAD_DIM * HEAD_DIM // (self.vector * 32 * PRODUCT)

    def unit_offset(self, unit: int) -> int:
        """Byte offset of a thread's cell in a page, from its first one. A warp asks for 64 bytes of
        eight rows at a time (record, upper rows first), or for half or whole rows, two at a time.
        """
        row_bytes = HEAD_DIM * self.item_bytes
        if self.chunked:
            return unit // 2 * 64 + unit % 2 * (8 * row_bytes)
        cells = row_bytes // 256  # of a lane in a row
        return unit // cells * (2 * row_bytes) + unit % cells * 256

    @property
    def groups(self) -> int:
        """Groups of copies of a page: two MMA steps each, or without the chunked form all."""
        return STEPS // 2 if self.chunked else 1

    @property
    def result_words(self) -> int:
        """A stage of results: w and y, then the partial sums of A and B; without the chunked form
        o."""
        if not self.chunked:
            return self.tokens * HEAD_DIM
        return self.columns * RESULT_PITCH + self.partials * 8 * self.columns

    @property
    def vector_words(self) -> int:
        """A stage of vectors. record: fragments, (word, half, lane, tile, step); the last tile
        holds k / Gamma. Else FP32, per token: d k, d q, d, k, v.
        """
        return STEPS * (self.tiles + 1) * 128 if self.chunked else self.tokens * 5 * HEAD_DIM

    @property
    def barriers(self) -> int:
        return BOTTLENECK_STAGES + 2 * VECTOR_STAGES + 2 * self.result_stages + VALUE_STAGES

    @property
    def areas(self) -> dict[str, Area]:
        """Shared memory, [.., stage]: a stage takes a multiple of 32 bytes."""
        low, high = self.row_place(self.rows - 1)
        last_row = low * 3 * HEAD_DIM + high * self.row_pitch
        words = Uint32 if self.chunked else Float32
        sums = 8 * ceil_div(self.tokens * self.sum_words, 8)
        areas = {
            "state": Area(Uint32, (HEAD_DIM * HEAD_DIM * self.item_bytes // 4, self.state_stages)),
            "inputs": Area(BFloat16, (last_row + 3 * HEAD_DIM, INPUT_STAGES)),
            "window": Area(BFloat16, (3 * HEAD_DIM * self.window, INPUT_STAGES)),
            "f_a": Area(BFloat16, (self.tokens * BOTTLENECK_PITCH, BOTTLENECK_STAGES)),
            "taps": Area(self.conv_dtype, 3 * CONV_WIDTH * HEAD_DIM),
            "bias": Area(self.conv_dtype, 3 * HEAD_DIM),
            "vectors": Area(words, (self.vector_words, VECTOR_STAGES)),
            "sums": Area(Float32, (sums, self.sum_stages)),
            "results": Area(Float32, (self.result_words, self.result_stages)),
            "barriers": Area(Int64, 4 * ceil_div(self.barriers, 4)),
        }
        if self.chunked:
            v = 16 * ceil_div(self.tokens * self.value_pitch, 16)
            areas["values"] = Area(BFloat16, (v, VALUE_STAGES))
        return areas

    @property
    def smem_bytes(self) -> int:
        return smem.total(self.areas, tail=False)


@cute.jit
def allocate(P: cutlass.Constexpr) -> Any:
    """`Plan.areas`, and a ring of mbarriers to each of f_a, vectors, results and values."""
    M = smem.allocate(P.areas, tail=False)
    f_a = M.barriers.iterator
    vectors = f_a + BOTTLENECK_STAGES
    results = vectors + 2 * VECTOR_STAGES
    values = results + 2 * P.result_stages
    return smem.bundle(
        vars(M)
        | {
            "f_a_ring": Ring(BOTTLENECK_STAGES, f_a, None),
            "vector_ring": Ring(VECTOR_STAGES, vectors, vectors + VECTOR_STAGES),
            "result_ring": Ring(P.result_stages, results, results + P.result_stages),
            "value_ring": Ring(VALUE_STAGES, None, values),
        }
    )


@cute.jit
def request_after(item: Item, steps: Int32) -> Int32:
    """The request of the item that many steps after one in its block of the walk; past it, one of
    the block's too."""
    return item.first + (item.request - item.first + steps) % item.size


@cute.jit
def load_numbers(
    A: Arguments, numbers: cute.Tensor, item: Item, lane: Int32, P: cutlass.Constexpr
) -> None:
    """What 32 items from `item` on are looked up by, one item on each lane (`Plan.numbers`): slot
    of its window, not above 0 for a null request; then row of its record or, for spec, the window's
    entry where its history begins.

    A CTA's items lie in one block of the walk. No item waits for its own numbers, which under load
    take a microsecond.
    """
    request = request_after(item, lane)
    row = A.slots + Int64(request) * A.slots_stride * 4
    numbers[0] = blocks.at(Int32, row, Int32(0))
    if const_expr(P.kind == "record"):
        numbers[1] = blocks.at(Int32, A.record_rows + Int64(request) * 4, Int32(0))
    if const_expr(P.kind == "spec"):
        slot = numbers[0]
        accepted = blocks.at(Int32, A.accepted + Int64(request) * 4, Int32(0))
        numbers[1] = max(min(accepted, P.tokens) - 1, 0)
        source = blocks.at(Int32, row, numbers[1])
        numbers[0] = slot if source > 0 else Int32(0)


@cute.jit
def pages_of(
    A: Arguments, request: Int32, zero: Int32, P: cutlass.Constexpr
) -> tuple[Int32, Int32, Int32]:
    """A request's slots of its window and of the state that it starts from, which are not above 0
    for a null request, and the entry of the window where its history begins. Past the last request:
    those of the last.
    """
    row = A.slots + Int64(min(request, A.requests - 1)) * A.slots_stride * 4
    slot = blocks.at(Int32, row, zero)
    if const_expr(P.kind != "spec"):
        return slot, slot, Int32(0)
    accepted = blocks.at(Int32, A.accepted + Int64(min(request, A.requests - 1)) * 4, zero)
    entry = max(min(accepted, P.tokens) - 1, 0)
    source = blocks.at(Int32, row, entry)
    none = Int32(0)
    return slot if source > 0 else none, source if slot > 0 else none, entry


@cute.jit
def copy_async(shared: Int32, address: Int64) -> None:
    """cp.async of 16 bytes from global memory; L2 fetches the whole 128-byte line, whose rest
    others ask for."""
    arch.inline_ptx(
        "cp.async.cg.shared.global.L2::128B [{$r0}], [{$r1}], 16;", read_only_args=[shared, address]
    )


@cute.jit
def fragments_of(M: Smem, stage: Int32, P: cutlass.Constexpr) -> cute.Tensor:
    """(first and second term of two columns, half, place, tile, step) of a stage."""
    return cute.make_tensor(
        M.vectors[None, stage].iterator,
        cute.make_layout(
            (2, 2, 32, P.tiles + 1, STEPS), stride=(1, 2, 4, 128, 128 * (P.tiles + 1))
        ),
    )


@cute.jit
def place_of(lane: Int32) -> Int32:
    """Where the words of an MMA's lane lie in a fragment, so that those who write a pair of columns
    of several vectors meet different banks.
    """
    return lane ^ (lane // 8 * 2)


@cute.jit
def fragment_of(quad: Int32, P: cutlass.Constexpr) -> tuple[Int32, Int32]:
    """MMA step along K, and lane of a group of four, that hold the columns 4*quad .. +3.

    A lane takes 16 neighbouring bytes of a state row: four columns of one step (FP32), or eight of
    two (BF16).
    """
    if const_expr(P.state_dtype == "fp32"):
        return quad // 4, quad % 4
    return quad // 8 * 2 + quad % 2, quad % 8 // 2


@cute.jit
def sums_of(M: Smem, stage: Int32, t: Int32, P: cutlass.Constexpr) -> cute.Tensor:
    """A token's sums and factors, `sum_words`."""
    return cute.make_tensor(
        M.sums[None, stage].iterator,
        cute.make_layout((P.sum_words, P.tokens), stride=(1, P.sum_words)),
    )[None, t]


@cute.jit
def total_of(words: cute.Tensor, which: Any) -> Float32:
    """A token's sum from the parts of all warps of the prologue."""
    fours = cute.make_tensor(
        words.iterator, cute.make_layout((4, PROLOGUE // 4, 3), stride=(1, 4, PROLOGUE))
    )
    parts = cute.make_rmem_tensor((4, PROLOGUE // 4), Float32)
    for i in range_constexpr(PROLOGUE // 4):
        cute.autovec_copy(fours[None, i, which], parts[None, i])
    pairs = [parts[e, 0] + parts[e, 1] for e in range(4)]
    return (pairs[0] + pairs[1]) + (pairs[2] + pairs[3])
