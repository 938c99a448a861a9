"""What both kernels of KdaCommit are made of: arguments, plan, a head's keys weighed, the fold of
rows.

Of their areas of shared memory the functions here take
  corrections  [tokens, rows] f32
  records      [tokens, 256] bf16, keys and raw gates; then, as [tokens, 128] f32, the keys that are
               folded: the sizes are equal
  decay        [128] f32; ratio the same, with align
  norms        [tokens] f32
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.runtime import make_ptr

from kda_kernels.device import blocks
from kda_kernels.device.smem import Area, Smem
from kda_kernels.problem import HEAD_DIM, MAX_TOKENS, StateDtype

THREADS = HEAD_DIM
"""Of a CTA: in `weigh` a thread has a key channel."""
RECORD_BYTES = 4 * HEAD_DIM
"""Corrections, or keys and gates, of one token of one head."""
STAGES = 2
TILE_BYTES = 32 * 1024
"""Of what of a page passes through a stage of the ring at a time."""
CTAS_PER_SM = 3
"""Of the ring's kernel."""

_TOKEN_STEP = 4
"""Tokens per branch of the fold."""

# `if`s inside an `if const_expr` stay nested, so that the outer one is decided while tracing.
# ruff: noqa: SIM102
arch = cute.arch
GMEM = cutlass.AddressSpace.gmem


class Arguments(NamedTuple):
    """Parameters of a commit kernel.

    state_table, corrections_table, key_gates_table   base address and leading stride of each
                                                      layer's tensor
    boundary_length, boundary_slot   null without align
    chunk                            heads of a CTA
    tokens                           that a record can hold
    """

    state_table: Any
    corrections_table: Any
    key_gates_table: Any
    A_log: Any
    dt_bias: Any
    source: Any
    length: Any
    destination: Any
    record_rows: Any
    boundary_length: Any
    boundary_slot: Any
    heads: Int32
    chunk: Int32
    tokens: Int32
    lower_bound: Float32


def placeholder() -> Arguments:
    """Values to compile with: only their types matter."""
    tables = (make_ptr(Int64, 16, GMEM, assumed_align=16),) * 3
    weights = (make_ptr(Float32, 16, GMEM, assumed_align=4),) * 2
    requests = (make_ptr(Int32, 16, GMEM, assumed_align=4),) * 6
    return Arguments(
        *tables, *weights, *requests, Int32(4), Int32(4), Int32(MAX_TOKENS), Float32(-5)
    )


@dataclass(frozen=True)
class Plan:
    """What decides the code. Its repr is the key in the cache of binaries."""

    state_dtype: StateDtype
    store: str
    align: bool
    source: str = "ring"
    rows_per_cta: int = HEAD_DIM
    columns: int = 8
    ctas_per_sm: int = CTAS_PER_SM
    hints: bool = False

    @property
    def threads(self) -> int:
        return THREADS

    @property
    def dtype(self) -> Any:
        return Float32 if self.state_dtype == "fp32" else BFloat16

    @property
    def item_bytes(self) -> int:
        return 4 if self.state_dtype == "fp32" else 2

    @property
    def tile_bytes(self) -> int:
        return (
            TILE_BYTES if self.source == "ring" else self.rows_per_cta * HEAD_DIM * self.item_bytes
        )

    @property
    def tiles(self) -> int:
        """Tiles of a CTA's rows of a page."""
        return self.rows_per_cta * HEAD_DIM * self.item_bytes // self.tile_bytes

    @property
    def parts(self) -> int:
        """CTAs of a page."""
        return HEAD_DIM // self.rows_per_cta

    @property
    def lanes(self) -> int:
        """Threads that span a row."""
        return HEAD_DIM // self.columns

    @property
    def groups(self) -> int:
        return THREADS // self.lanes

    @property
    def rows(self) -> int:
        """Rows that a thread folds at a time. 4 = one 16-byte load of corrections per token; 2
        where 4 would spill."""
        if self.columns == 4:
            return 4 if self.ctas_per_sm + self.align < 6 else 2
        return 2 if self.align or self.source != "ring" else 4

    @property
    def steps(self) -> int:
        """Steps of `rows` rows of every group in a tile."""
        return self.rows_per_cta // self.tiles // (self.groups * self.rows)

    @property
    def vector(self) -> int:
        """Elements of one access: 16 bytes, but 8 for 4 columns of BF16."""
        return min(16 // self.item_bytes, self.columns)

    @property
    def runs(self) -> int:
        return self.columns // self.vector

    @property
    def tile_shape(self) -> Any:
        """(vector, vectors of a thread's columns, rows), (lanes of a row, row groups), steps,
        stages.

        A thread's columns are one run, but two runs of 4, 64 apart, for 8 columns of FP32: rows
        then pass 256 bytes at a time, with no bank conflicts and whole lines.
        """
        stages = STAGES if self.source == "ring" else 1
        return (self.vector, self.runs, self.rows), (self.lanes, self.groups), self.steps, stages

    @property
    def tile_stride(self) -> Any:
        group = self.rows * HEAD_DIM
        return (
            (1, 64, HEAD_DIM),
            (self.vector, group),
            self.groups * group,
            self.tile_bytes // self.item_bytes,
        )

    @property
    def vector_areas(self) -> dict[str, Area]:
        """Shared memory of the fold's operands, beside the state."""
        return {
            "corrections": Area(Float32, (self.rows_per_cta, MAX_TOKENS)),
            "records": Area(BFloat16, (2 * HEAD_DIM, MAX_TOKENS)),
            "decay": Area(Float32, HEAD_DIM),
            "ratio": Area(Float32, HEAD_DIM, inside="" if self.align else "decay"),
            "norms": Area(Float32, MAX_TOKENS, align=16),
        }


class Found(NamedTuple):
    """What a request's commit is looked up by, as it is given.

    page, target, boundary   slots of source, destination and block boundary
    row                      of the record
    length, before           tokens to fold, and of them those before the boundary
    states, corrections, records   of the layer, by `entry_of`
    """

    page: Int32
    target: Int32
    boundary: Int32
    row: Int32
    length: Int32
    before: Int32
    states: tuple[Int64, Int64]
    corrections: tuple[Int64, Int64]
    records: tuple[Int64, Int64]


@cute.jit
def look_up(A: Arguments, request: Int32, layer: Int32, P: cutlass.Constexpr) -> Found:
    """Load all that has a known address at once: behind a branch each would be a round trip of its
    own."""
    page = load_word(A.source, request)
    target = load_word(A.destination, request)
    row = load_word(A.record_rows, request)
    length = load_word(A.length, request)
    boundary, before = Int32(0), Int32(0)
    if const_expr(P.align):
        boundary = load_word(A.boundary_slot, request)
        before = load_word(A.boundary_length, request)
    states = entry_of(A.state_table, layer)
    corrections = entry_of(A.corrections_table, layer)
    records = entry_of(A.key_gates_table, layer)
    return Found(page, target, boundary, row, length, before, states, corrections, records)


@cute.jit
def counts_of(found: Found, tokens: Int32, P: cutlass.Constexpr) -> tuple[Int32, Int32]:
    """Tokens to fold, of a record that can hold so many, and of them those before a boundary: 0 for
    none."""
    n, m = min(found.length, tokens), found.before
    if const_expr(P.align):
        if m <= 0 or m > n or found.boundary <= 0:
            m = Int32(0)
    return n, m


@cute.jit
def weights_of(A: Arguments, gate_row: Int32, tid: Int32) -> tuple[Float32, Float32]:
    """A_log of a (layer, head), and dt_bias of a thread's channel."""
    return load_word(A.A_log, gate_row), load_word(A.dt_bias, gate_row * HEAD_DIM + tid)


def place(channel: Any, vector: int) -> Any:
    """Where a key channel's vectors lie: the first four columns of all lanes, then the second
    four."""
    return channel if vector == 4 else channel // 8 * 4 + channel % 4 + channel % 8 // 4 * 64


@cute.jit
def load_word(pointer: cute.Pointer, index: Int32) -> Any:
    """One element; assembly, so that the load stays where it is written and doesn't sink behind a
    branch."""
    return arch.inline_ptx(
        "ld.global.b32 {$w0}, [{$r0}];",
        write_only_types=[pointer.dtype],
        read_only_args=[(pointer + index).toint()],
    )


@cute.jit
def entry_of(table: cute.Pointer, layer: Int32) -> Any:
    """A layer's base address, and its elements between slots or rows."""
    return arch.inline_ptx(
        "ld.global.v2.b64 {{$w0}, {$w1}}, [{$r0}];",
        write_only_types=[Int64, Int64],
        read_only_args=[(table + 2 * layer).toint()],
    )


@cute.jit
def address_of(
    entry: tuple[Int64, Int64],
    index: Int32,
    head: Int32,
    head_elements: Int32,
    item_bytes: cutlass.Constexpr,
) -> Int64:
    """Global address of what a slot or row holds of one head; the next heads follow it."""
    base, pitch = entry
    return base + (Int64(index) * pitch + Int64(head) * head_elements) * item_bytes


@cute.jit
def keys_of(M: Smem) -> cute.Tensor:
    """The folded keys [tokens, 128], in the place of the records."""
    return cute.make_tensor(
        cute.recast_ptr(M.records.iterator, dtype=Float32), cute.make_layout((HEAD_DIM, MAX_TOKENS))
    )


@cute.jit
def weigh(
    M: Smem,
    n: Int32,
    m: Int32,
    a_log: Float32,
    bias: Float32,
    lower_bound: Float32,
    tid: Int32,
    P: cutlass.Constexpr,
) -> None:
    """The head's keys weighed, and decays, from its record, thread = key channel; ends with a CTA
    barrier.

    keys[:, t]   k^_t e^{L_n - L_t} for m <= t < n, k^_t e^{L_m - L_t} for t < m, zero from n on
    decay        e^{L_m} if m > 0, else e^{L_n}
    ratio        e^{L_n - L_m}, if m > 0; by channel, the others in the order of `place`
    """
    warp, lane = tid // 32, tid % 32
    warps = THREADS // 32
    # [4 keys, lane, token]
    quads = cute.make_tensor(
        M.records.iterator, cute.make_layout((4, 32, MAX_TOKENS), stride=(1, 4, 2 * HEAD_DIM))
    )
    squares = cute.make_rmem_tensor(MAX_TOKENS // warps, Float32)
    for j in range_constexpr(MAX_TOKENS // warps):
        quad = cute.make_rmem_tensor(4, BFloat16)
        cute.autovec_copy(quads[None, lane, warp + j * warps], quad)
        squares[j] = Float32(0)
        for e in range_constexpr(4):
            squares[j] = squares[j] + quad[e].to(Float32) * quad[e].to(Float32)
    # All tokens at once and no branches, so that the chains of the tokens overlap; what lies behind
    # n is dropped.
    exp_A = blocks.exp(a_log)
    keys = cute.make_rmem_tensor(MAX_TOKENS, Float32)
    log_decays = cute.make_rmem_tensor(MAX_TOKENS, Float32)
    for t in range_constexpr(MAX_TOKENS):
        keys[t] = M.records[tid, t].to(Float32)
        log_decay = blocks.log_decay(
            M.records[HEAD_DIM + tid, t].to(Float32), bias, exp_A, lower_bound
        )
        if t >= n:
            log_decay = Float32(0)
        log_decays[t] = log_decay
    for j in range_constexpr(MAX_TOKENS // warps):
        squares[j] = arch.warp_reduction_sum(squares[j])
    if lane == 0:
        for j in range_constexpr(MAX_TOKENS // warps):
            M.norms[warp + j * warps] = blocks.rsqrt(squares[j] + Float32(1e-6))

    suffix = Float32(0)
    for j in range_constexpr(MAX_TOKENS):
        t = MAX_TOKENS - 1 - j
        if const_expr(P.align):
            if t == m - 1:
                M.ratio[tid] = blocks.exp(suffix)
                suffix = Float32(0)
        keys[t] = keys[t] * blocks.exp(suffix)
        suffix += log_decays[t]
    arch.sync_threads()
    norms = cute.make_rmem_tensor(MAX_TOKENS, Float32)
    cute.autovec_copy(M.norms, norms)
    position = place(tid, P.vector)
    weighed = keys_of(M)
    for t in range_constexpr(MAX_TOKENS):
        key = keys[t] * norms[t]
        if t >= n:
            key = Float32(0)
        weighed[position, t] = key
    M.decay[position] = blocks.exp(suffix)
    arch.sync_threads()


@cute.jit
def rescale(M: Smem, m: Int32, tid: Int32, P: cutlass.Constexpr) -> None:
    """From what `weigh` leaves for S_m to what it would for S_n, thread = key channel; ends with a
    CTA barrier."""
    position = place(tid, P.vector)
    ratio, keys = M.ratio[tid], keys_of(M)
    for t in range_constexpr(MAX_TOKENS):
        if t < m:
            keys[position, t] = keys[position, t] * ratio
    M.decay[position] = M.decay[position] * ratio
    arch.sync_threads()


@cute.jit
def take_weighed(
    M: Smem, count: Int32, tid: Int32, P: cutlass.Constexpr
) -> tuple[cute.Tensor, cute.Tensor]:
    """This thread's part of what `weigh` left: keys [columns, tokens], zero from `count` on, and
    decay [columns]."""
    lane = tid % P.lanes
    halves = P.columns // 4
    # (4 columns, lane, half, token): see `place`.
    layout = cute.make_layout((4, P.lanes, halves, MAX_TOKENS), stride=(1, 4, 64, HEAD_DIM))
    shared = cute.make_tensor(keys_of(M).iterator, layout)
    keys = cute.make_rmem_tensor(((4, halves), MAX_TOKENS), Float32)
    for t in range_constexpr(MAX_TOKENS):
        if const_expr(P.align):
            for e in range_constexpr(P.columns):
                keys[(e % 4, e // 4), t] = Float32(0)
            if t < count:
                for j in range_constexpr(halves):
                    cute.autovec_copy(shared[None, lane, j, t], keys[(None, j), t])
        else:
            for j in range_constexpr(halves):
                cute.autovec_copy(shared[None, lane, j, t], keys[(None, j), t])
    shared_decay = cute.make_tensor(M.decay.iterator, layout)
    decay = cute.make_rmem_tensor((4, halves), Float32)
    for j in range_constexpr(halves):
        cute.autovec_copy(shared_decay[None, lane, j, 0], decay[None, j])
    return keys, decay


@cute.jit
def fold_tile(
    tiles: cute.Tensor,
    stage: Int32,
    corrections: cute.Tensor,
    part: Int32,
    keys: cute.Tensor,
    decay: cute.Tensor,
    count: Int32,
    address: Int64,
    in_place: cutlass.Constexpr,
    tid: Int32,
    P: cutlass.Constexpr,
) -> None:
    """Fold `count` tokens into a tile, the CTA's number `part`; the result goes to the address, or
    stays in place."""
    lane, group = tid % P.lanes, tid // P.lanes
    for step in cutlass.range(P.steps, unroll=1):
        raw = cute.make_rmem_tensor((P.vector, P.runs, P.rows), P.dtype)
        for r in range_constexpr(P.rows):
            for j in range_constexpr(P.runs):
                cute.autovec_copy(tiles[(None, j, r), (lane, group), step, stage], raw[None, j, r])
        raw = fold_rows(raw, corrections, keys, decay, count, group, part * P.steps + step, P)
        if const_expr(in_place):
            for r in range_constexpr(P.rows):
                for j in range_constexpr(P.runs):
                    cute.autovec_copy(
                        raw[None, j, r], tiles[(None, j, r), (lane, group), step, stage]
                    )
        else:
            store_rows(raw, address, step, tid, P)


@cute.jit
def fold_rows(
    raw: cute.Tensor,
    corrections: cute.Tensor,
    keys: cute.Tensor,
    decay: cute.Tensor,
    count: Int32,
    group: Int32,
    step: Int32,
    P: cutlass.Constexpr,
) -> cute.Tensor:
    """The rows [vector, runs, rows] of a group's step with `count` tokens folded in."""
    shape = (P.rows, P.groups, P.tiles * P.steps, MAX_TOKENS)
    stride = (1, P.rows, P.groups * P.rows, P.rows_per_cta)
    by_group = cute.make_tensor(corrections.iterator, cute.make_layout(shape, stride=stride))
    state = cute.make_rmem_tensor((P.columns, P.rows), Float32)
    for r in range_constexpr(P.rows):
        for c in range_constexpr(P.columns):
            state[c, r] = raw[c % P.vector, c // P.vector, r].to(Float32) * decay[c % 4, c // 4]
    add_tokens(state, by_group, keys, group, step, 0, P)
    if count > _TOKEN_STEP:
        add_tokens(state, by_group, keys, group, step, _TOKEN_STEP, P)
    folded = cute.make_rmem_tensor((P.vector, P.runs, P.rows), P.dtype)
    for r in range_constexpr(P.rows):
        folded[None, None, r].store(state[None, r].load().to(P.dtype).reshape((P.vector, P.runs)))
    return folded


@cute.jit
def add_tokens(
    state: cute.Tensor,
    corrections: cute.Tensor,
    keys: cute.Tensor,
    group: Int32,
    step: Int32,
    begin: cutlass.Constexpr,
    P: cutlass.Constexpr,
) -> None:
    """state [columns, rows] += sum of u_t (folded key)_t over `_TOKEN_STEP` tokens."""
    for t in range_constexpr(begin, begin + _TOKEN_STEP):
        u = cute.make_rmem_tensor(P.rows, Float32)
        cute.autovec_copy(corrections[None, group, step, t], u)
        for r in range_constexpr(P.rows):
            for c in range_constexpr(P.columns):
                state[c, r] = state[c, r] + u[r] * keys[(c % 4, c // 4), t]


@cute.jit
def store_rows(
    folded: cute.Tensor, address: Int64, step: Int32, tid: Int32, P: cutlass.Constexpr
) -> None:
    """A step's rows [vector, runs, rows] to the tile at the address."""
    nbytes = P.vector * P.item_bytes
    layout = cute.make_layout(P.tile_shape, stride=P.tile_stride)
    tile = cute.make_tensor(cute.make_ptr(P.dtype, address, GMEM, assumed_align=nbytes), layout)
    mode = cute.nvgpu.StoreCacheMode.NONE
    if const_expr(P.hints):
        mode = cute.nvgpu.StoreCacheMode.STREAMING
    store = cute.nvgpu.CopyR2GOp()
    atom = cute.make_copy_atom(store, P.dtype, num_bits_per_copy=8 * nbytes, store_cache_mode=mode)
    for r in range_constexpr(P.rows):
        for j in range_constexpr(P.runs):
            cute.copy(
                atom,
                folded[None, j, r],
                tile[(None, j, r), (tid % P.lanes, tid // P.lanes), step, 0],
            )
