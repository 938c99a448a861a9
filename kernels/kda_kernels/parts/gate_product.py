"""Raw gates of a head on tensor cores: f_b f_a, by eight warps of 16 features, with weights that
stay in registers.

weights   of a thread: (4 words, 2 rows, 4 units). Lane = 4 g + t; MMA row g is feature 16 warp +
          2g, row g + 8 the next one. A unit is 16 bytes of a row: columns 32 u + 8 t .. +7, half of
          them for each of two k16 steps
f_a       a unit of a token holds the same columns

Loads take their time by the lines of 128 bytes that they touch, not by the bytes, most of all
behind the copies of a state. By eight bytes of a lane, a head's weights touch 1024 lines; by
sixteen (`load_weights`) 512; whole lines, of which a lane then gets half by way of its neighbour's
registers (`load_lines`, `settle`), are 256. Words of a load of sixteen bytes must be moved before
an MMA takes them. Where there are no registers for that, `registers`, `load` and `product` are by
eight bytes: `P.gate_bytes`.
"""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32, const_expr, range_constexpr

from kda_kernels.device import blocks
from kda_kernels.parts import chunked
from kda_kernels.problem import HEAD_DIM

arch = cute.arch

ROW_BYTES = 2 * HEAD_DIM
UNITS = 4
"""Of a lane in a row."""
WEIGHTS = (4, 2, UNITS)
"""Shape of a thread's weights, words."""
_NEIGHBOUR = 4
"""Distance of the lane whose features are next to a lane's."""


@cute.jit
def registers(P: cutlass.Constexpr) -> cute.Tensor:
    """For a thread's weights."""
    return cute.make_rmem_tensor(
        WEIGHTS if const_expr(P.gate_bytes == 16) else (2, 2, chunked.STEPS), Uint32
    )


@cute.jit
def load(
    weights: cute.Tensor, address: Int64, warp: Int32, lane: Int32, P: cutlass.Constexpr
) -> None:
    """Features 16 warp .. +15 of the head at an address, for `product`."""
    if const_expr(P.gate_bytes == 16):
        load_weights(weights, address, warp, lane)
    else:
        chunked.load_gate_weights(weights, address, warp, lane)


@cute.jit
def product(
    weights: cute.Tensor, s_f_a: cute.Tensor, lane: Int32, P: cutlass.Constexpr
) -> tuple[Float32, Float32, Float32, Float32]:
    """As `raw_gates`."""
    gates: tuple[Float32, Float32, Float32, Float32]
    if const_expr(P.gate_bytes == 16):
        gates = raw_gates(weights, s_f_a, lane, P)
    else:
        gates = chunked.raw_gates(weights, s_f_a, lane, P.chains, P)
    return gates


@cute.jit
def load_weights(weights: cute.Tensor, address: Int64, warp: Int32, lane: Int32) -> None:
    """Features 16 warp .. +15 of the head at an address; a load touches a line of each of eight
    rows."""
    own = address + Int64((16 * warp + lane // 4 * 2) * ROW_BYTES + lane % 4 * 16)
    source = cute.make_tensor(
        cute.make_ptr(Uint32, own, cutlass.AddressSpace.gmem, assumed_align=16),
        cute.make_layout(WEIGHTS, stride=(1, HEAD_DIM // 2, 16)),
    )
    for unit in range_constexpr(UNITS):
        for row in range_constexpr(2):
            cute.autovec_copy(source[None, row, unit], weights[None, row, unit])


@cute.jit
def load_lines(weights: cute.Tensor, address: Int64, zero: Int32, warp: Int32, lane: Int32) -> None:
    """Features 16 warp .. +15 of the head at an address, to be put in place by `settle`.

    zero   0, unknown to the compiler where other work follows at once: each load then has an
           address of its own, in registers that it overwrites, and nothing waits for others until
           the loads have left their queue
    """
    g, t = lane // 4, lane % 4
    lines = address + Int64((16 * warp + g // 2 * 4) * ROW_BYTES + (g % 2 * 4 + t) * 16)
    for line in range_constexpr(2):
        for row in range_constexpr(2):
            for odd in range_constexpr(2):  # of the features of this lane and its neighbour
                place = lines + Int64(zero ^ ((2 * odd + row) * ROW_BYTES + line * 128))
                source = cute.make_ptr(Uint32, place, cutlass.AddressSpace.gmem, assumed_align=16)
                target = weights[None, row, 2 * line + odd]
                cute.autovec_copy(cute.make_tensor(source, cute.make_layout(4)), target)


@cute.jit
def settle(weights: cute.Tensor, lane: Int32) -> None:
    """Waits for `load_lines`. Of a line's two units lanes of an even g have loaded the first, those
    of an odd g the second, for their own features and their neighbour's.
    """
    odd = lane // _NEIGHBOUR % 2 == 1
    for line in range_constexpr(2):
        for row in range_constexpr(2):
            for word in range_constexpr(4):
                first, second = weights[word, row, 2 * line], weights[word, row, 2 * line + 1]
                taken = arch.shuffle_sync_bfly(first if odd else second, offset=_NEIGHBOUR)
                weights[word, row, 2 * line] = taken if odd else first
                weights[word, row, 2 * line + 1] = second if odd else taken


@cute.jit
def raw_gates(
    weights: cute.Tensor, s_f_a: cute.Tensor, lane: Int32, P: cutlass.Constexpr
) -> tuple[Float32, Float32, Float32, Float32]:
    """Products of the weights with f_a of all tokens, before rounding: tokens 2t, 2t+1 of feature
    2g, then of 2g+1. `P.chains` of 8 / chains accumulations are summed in order. Columns past the
    last token repeat it.

    s_f_a   [tokens, 128] bf16; unit u of a token at place u ^ (token % 8) of its row
    """
    token, t = min(lane // 4, P.tokens - 1), lane % 4
    row = cute.make_ptr(
        Uint32,
        s_f_a.iterator.toint() + token * ROW_BYTES,
        cutlass.AddressSpace.smem,
        assumed_align=16,
    )
    inputs = cute.make_tensor(row, cute.make_layout((4, HEAD_DIM // 8)))
    sums = []
    for chain in range_constexpr(P.chains):
        c = (Float32(0), Float32(0), Float32(0), Float32(0))
        for i in range_constexpr(UNITS // P.chains):
            unit = chain * (UNITS // P.chains) + i
            b = cute.make_rmem_tensor(4, Uint32)
            cute.autovec_copy(inputs[None, (4 * unit + t) ^ (token % 8)], b)
            for low, high in ((0, 1), (2, 3)):
                a = (
                    weights[low, 0, unit],
                    weights[low, 1, unit],
                    weights[high, 0, unit],
                    weights[high, 1, unit],
                )
                c = blocks.mma_16816(c, a, (b[low], b[high]))
        sums.append(c)
    c0, c1, c2, c3 = sums[0]
    for chain in range_constexpr(1, P.chains):
        c0, c1, c2, c3 = (
            c0 + sums[chain][0],
            c1 + sums[chain][1],
            c2 + sums[chain][2],
            c3 + sums[chain][3],
        )
    return c0, c1, c2, c3
