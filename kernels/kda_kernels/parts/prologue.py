"""How a step's kernel begins: an item's operands on their way to shared memory, by cp.async.

Serves KdaSplit in both forms, KdaFused, KdaWide, KdaStream. A CTA has `rows` state rows of an item,
and as many channels of each of q, k, v, output gate and gate features: all 128, or in a cluster its
share. Rows in shared memory are dense; 16-byte unit u of a swizzled row r lies at place u ^ (r % 8)
of it. Of a kernel's areas the functions here and in `conv_window` fill or read
  x            [history + tokens, 3, rows] bf16, q, k and v; behind the window's last entries,
               unless it is copied whole
  window       [3, rows, entries] bf16, where it is copied whole; else the first entries of x
  f_a          [tokens, K] bf16, swizzled where tensor cores read it
  out_gate     [tokens, rows] bf16
  beta         [tokens, 2] bf16, of an even head and its neighbour
  taps, bias   [3, 4, rows] and [3, rows] of the convolution
  barriers     of a cluster
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Int64, const_expr, range_constexpr

from kda_kernels.arguments import Arguments
from kda_kernels.device import blocks
from kda_kernels.device.blocks import UNIT as UNIT
from kda_kernels.device.smem import Smem
from kda_kernels.problem import CONV_WIDTH, HEAD_DIM, ceil_div

SPLITS = (1, 2, 4, 8)
"""CTAs that can share an item, as a cluster."""

arch = cute.arch
GMEM = cutlass.AddressSpace.gmem
SMEM = cutlass.AddressSpace.smem


class Place(NamedTuple):
    """Where a thread works: item and CTA of its cluster, and their first element in a head-major
    vector [D]."""

    tid: Int32
    warp: Int32
    lane: Int32
    rank: Int32
    head: Int32
    channel: Int32
    D: Int32


@cute.jit
def place_anew(A: Arguments, P: cutlass.Constexpr) -> tuple[Place, Int32]:
    """Where a thread of a cluster works, and its request, read again: kept from the start of the
    kernel they would take registers that are needed elsewhere."""
    column, request = blocks.special("%ctaid.x"), blocks.special("%ctaid.y")
    tid = blocks.special("%tid.x")
    rank, head = column % P.split, column // P.split
    at = Place(
        tid, tid // 32, tid % 32, rank, head, head * HEAD_DIM + rank * P.rows, A.heads * HEAD_DIM
    )
    return at, request


@cute.jit
def slots_of(A: Arguments, request: Int32) -> Int64:
    """Address of a request's slots."""
    return A.slots + Int64(request) * A.slots_stride * 4


@cute.jit
def projected_of(A: Arguments, request: Int32, P: cutlass.Constexpr) -> Int64:
    """Address of a request's first row of the projection."""
    return A.projected + Int64(request * P.tokens) * A.pitch * 2


@cute.jit
def results_of(A: Arguments, request: Int32, at: Place, P: cutlass.Constexpr) -> Int64:
    """Address of the CTA's channels of a request's first token in `out`."""
    return A.out + (Int64(request * P.tokens) * at.D + at.channel) * 2


class Record(NamedTuple):
    """A request's record row, negative for none, and the addresses of the item's entries in it."""

    row: Int32
    key_gates: Int64
    corrections: Int64


@cute.jit
def record_of(A: Arguments, row: Int32, head: Int32) -> Record:
    entry = Int64(head * A.record_tokens) * HEAD_DIM
    return Record(
        row,
        A.key_gates + (Int64(row) * A.key_gates_stride + entry * 2) * 2,
        A.corrections + (Int64(row) * A.corrections_stride + entry) * 4,
    )


@cute.jit
def state_of(A: Arguments, slot: Int32, head: Int32, P: cutlass.Constexpr) -> Int64:
    """Address of an item's state in a slot."""
    return (
        A.state
        + (Int64(slot) * A.state_stride + Int64(head) * (HEAD_DIM * HEAD_DIM)) * P.item_bytes
    )


@cute.jit
def join_cluster(barriers: cute.Pointer, received: cutlass.Constexpr, tid: Int32) -> None:
    """Prepare mbarriers for the bytes that all CTAs send to each, and say so; a wait for the others
    is to follow."""
    if tid == 0:
        for i in range_constexpr(len(received)):
            arch.mbarrier_init(barriers + i, 1)
        arch.mbarrier_init_fence()
    arch.sync_warp()
    if tid == 0:
        for i in range_constexpr(len(received)):
            arch.mbarrier_arrive_and_expect_tx(barriers + i, received[i])
    arch.cluster_arrive_relaxed()


@cute.jit
def wait(M: Smem, barrier: cutlass.Constexpr, P: cutlass.Constexpr) -> None:
    """Wait for all that the CTAs of the cluster send to one of this CTA's mbarriers."""
    if const_expr(P.spin):
        blocks.poll(M.barriers + barrier, 0)
    else:
        arch.mbarrier_wait(M.barriers + barrier, 0)


@cute.jit
def meet(M: Smem, barrier: cutlass.Constexpr, P: cutlass.Constexpr) -> None:
    """`wait`, or where a CTA is alone a barrier of its threads."""
    if const_expr(P.split > 1):
        wait(M, barrier, P)
    else:
        arch.sync_threads()


@dataclass(frozen=True)
class Rows:
    """Rows [outer, inner] of `units` 16-byte units each, to be copied to dense rows in shared
    memory.

    swizzled   as above
    wide       by cp.async; otherwise element by element, for rows at any even address
    first      thread that gets the first unit
    """

    outer: int
    inner: int
    units: int
    swizzled: bool = False
    wide: bool = True
    first: int = 0


@cute.jit
def copy_rows(
    shared: cute.Pointer,
    address: Int64,
    outer_bytes: Int64,
    inner_bytes: Int64,
    R: cutlass.Constexpr,
    at: Place,
    P: cutlass.Constexpr,
) -> None:
    """Start to copy rows that lie outer_bytes and inner_bytes apart."""
    total = R.outer * R.inner * R.units
    base = shared.toint()
    thread = (at.tid + (P.threads - R.first % P.threads)) % P.threads
    if const_expr(R.outer == 1 and P.threads % ((8 if R.swizzled else 1) * R.units) == 0):
        # A thread's units lie at one place of their rows, at equal distances.
        place, source = _unit_places(base, address, thread, outer_bytes, inner_bytes, R)
        distance = inner_bytes * (P.threads // R.units)
        for i in range_constexpr(ceil_div(total, P.threads)):
            if const_expr((i + 1) * P.threads <= total):
                copy_unit(place + i * P.threads * 16, source + i * distance, R.wide)
            else:
                if thread + i * P.threads < total:
                    copy_unit(place + i * P.threads * 16, source + i * distance, R.wide)
    else:
        for i in range_constexpr(ceil_div(total, P.threads)):
            unit = thread + i * P.threads
            if const_expr((i + 1) * P.threads <= total):
                place, source = _unit_places(base, address, unit, outer_bytes, inner_bytes, R)
                copy_unit(place, source, R.wide)
            else:
                if unit < total:
                    place, source = _unit_places(base, address, unit, outer_bytes, inner_bytes, R)
                    copy_unit(place, source, R.wide)


@cute.jit
def _unit_places(
    base: Int32,
    address: Int64,
    unit: Int32,
    outer_bytes: Int64,
    inner_bytes: Int64,
    R: cutlass.Constexpr,
) -> tuple[Int32, Int64]:
    """Shared and global address of a unit. Rows of one outer index lie within 2 GiB."""
    row, u = unit // R.units, unit % R.units
    inner = row % R.inner if const_expr(R.outer > 1) else row
    source = address + Int64(inner * Int32(inner_bytes) + u * 16)
    if const_expr(R.outer > 1):
        source += Int64(row // R.inner) * outer_bytes
    place = unit
    if const_expr(R.swizzled):
        place = row * R.units + (u ^ (row % 8))
    return base + place * 16, source


@cute.jit
def copy_rows_anew(
    shared: cute.Pointer,
    address: Int64,
    outer_bytes: Int64,
    inner_bytes: Int64,
    R: cutlass.Constexpr,
    at: Place,
    P: cutlass.Constexpr,
) -> None:
    """`copy_rows` with the addresses of each unit found anew: fewer registers, more
    instructions."""
    total = R.outer * R.inner * R.units
    thread = (at.tid + (P.threads - R.first % P.threads)) % P.threads
    for i in range_constexpr(ceil_div(total, P.threads)):
        unit = thread + i * P.threads
        if const_expr((i + 1) * P.threads <= total):
            _copy_unit_anew(shared, address, outer_bytes, inner_bytes, unit, R)
        else:
            if unit < total:
                _copy_unit_anew(shared, address, outer_bytes, inner_bytes, unit, R)


@cute.jit
def _copy_unit_anew(
    shared: cute.Pointer,
    address: Int64,
    outer_bytes: Int64,
    inner_bytes: Int64,
    unit: Int32,
    R: cutlass.Constexpr,
) -> None:
    row, u = unit // R.units, unit % R.units
    source = (
        address + Int64(row // R.inner) * outer_bytes + Int64(row % R.inner) * inner_bytes + u * 16
    )
    place = unit
    if const_expr(R.swizzled):
        place = row * R.units + (u ^ (row % 8))
    copy_unit(shared.toint() + place * 16, source, R.wide)


@cute.jit
def copy_unit(shared: Int32, address: Int64, wide: cutlass.Constexpr) -> None:
    """16 bytes: by cp.async, or element by element from any even address."""
    if const_expr(wide):
        blocks.copy_async(shared, address, 16)
    else:
        values = cute.make_rmem_tensor(UNIT, BFloat16)
        for e in range_constexpr(UNIT):
            values[e] = blocks.at(BFloat16, address, Int32(e))
        target = cute.make_ptr(BFloat16, shared, SMEM, assumed_align=16)
        cute.autovec_copy(values, cute.make_tensor(target, cute.make_layout(UNIT)))


@cute.jit
def load_taps(
    copy: cutlass.Constexpr,
    A: Arguments,
    M: Smem,
    row_bytes: Int64,
    first: cutlass.Constexpr,
    at: Place,
    P: cutlass.Constexpr,
) -> None:
    """Convolution weight and bias of the CTA's channels to M.taps [3, 4, rows] and M.bias [3,
    rows], zero for none.

    copy        `copy_rows` or `copy_rows_anew`
    row_bytes   of a tap of D channels
    Threads from `first` on take `tap_units` units.
    """
    size, none, taps = P.weight_bytes, Int64(0), 3 * CONV_WIDTH
    units, start = P.rows * size // 16, Int64(at.channel) * size
    rows = Rows(1, taps, units, first=first)
    copy(M.taps.iterator, A.conv_weight + start, none, row_bytes, rows, at, P)
    if A.conv_bias != none:
        rows = Rows(1, 3, units, first=first + taps * units)
        copy(M.bias.iterator, A.conv_bias + start, none, row_bytes, rows, at, P)
    else:
        if at.tid < P.rows:
            for part in range_constexpr(3):
                M.bias[at.tid, part] = P.conv_dtype(0)


def tap_units(P: Any) -> int:
    """16-byte units that `load_taps` copies."""
    units: int = 3 * (CONV_WIDTH + 1) * P.rows * P.weight_bytes // 16
    return units


@cute.jit
def load_projection(
    copy: cutlass.Constexpr,
    M: Smem,
    projected: Int64,
    pitch: Int64,
    at: Place,
    P: cutlass.Constexpr,
) -> None:
    """The CTA's channels of q, k, v and output gate of all tokens, f_a, beta.

    copy        `copy_rows` or `copy_rows_anew`
    projected   address of the request's first row
    f_a is swizzled unless gate_mode is 2.
    """
    units, columns = P.rows // UNIT, HEAD_DIM // UNIT
    row_bytes, part_bytes, wide = pitch * 2, Int64(at.D) * 2, P.streamable
    mine = projected + Int64(at.channel) * 2
    f_a = projected + 4 * part_bytes
    rows = Rows(P.tokens, 1, columns, swizzled=P.gate_mode != 2, wide=wide)
    copy(M.f_a.iterator, f_a, row_bytes, Int64(0), rows, at, P)
    used = P.tokens * columns
    rows = Rows(P.tokens, 3, units, wide=wide, first=used)
    copy(M.x.iterator + P.history * 3 * P.rows, mine, row_bytes, part_bytes, rows, at, P)
    rows = Rows(P.tokens, 1, units, wide=wide, first=used + 3 * P.tokens * units)
    copy(M.out_gate.iterator, mine + 3 * part_bytes, row_bytes, Int64(0), rows, at, P)
    load_beta(M, f_a, row_bytes, at, P)


@cute.jit
def load_beta(M: Smem, f_a: Int64, row_bytes: Int64, at: Place, P: cutlass.Constexpr) -> None:
    """Of all tokens, by the last threads. f_a: address of the first token's, behind which beta
    lies."""
    t = P.threads - 1 - at.tid
    if t < P.tokens:
        beta = f_a + 2 * HEAD_DIM + Int64(t) * row_bytes
        if const_expr(P.streamable):
            # A word: the other half is beta of the neighbouring head, or padding of the row.
            blocks.copy_async(M.beta.iterator.toint() + t * 4, beta + Int64(at.head // 2) * 4, 4)
        else:
            M.beta[at.head % 2, t] = blocks.at(BFloat16, beta, at.head)


@cute.jit
def store_zeros(results: Int64, at: Place, P: cutlass.Constexpr) -> None:
    """Zeros in this CTA's channels of all tokens."""
    lanes = P.rows // 4
    zeros = cute.make_rmem_tensor(4, BFloat16)
    zeros.fill(BFloat16(0))
    for i in range_constexpr(ceil_div(P.tokens * lanes, P.threads)):
        index = at.tid + i * P.threads
        if index < P.tokens * lanes:
            store_quad(zeros, results + (Int64(index // lanes) * at.D + 4 * (index % lanes)) * 2)


@cute.jit
def store_quad(values: cute.Tensor, address: Int64) -> None:
    """Four channels of a token."""
    target = cute.make_ptr(BFloat16, address, GMEM, assumed_align=8)
    cute.autovec_copy(values, cute.make_tensor(target, cute.make_layout(4)))
