"""KDA commit: fold n recorded tokens into the state of every (layer, request, head).

states       L x [slots, H, V=128, K=128]   bf16 or f32, by address table; source page read, destination written
corrections  L x [rows, H, Q, 128]          f32, by address table
key_gates    L x [rows, H, Q, 256]          bf16, by address table: keys, then raw gates
A_log        [L, H]          f32
dt_bias      [L, H, 128]     f32
source, length, destination, record_rows, boundary_length, boundary_slot   [R]  int32

    S_n = S_0 * e^{L_n} + sum_{t<n} u_t (k^_t e^{L_n - L_t})

Two kernels, both with CTAs of 128 threads. `Spec.source` chooses.

ring: a CTA per (chunk of heads of one request, request, layer); a chunk is gcd(heads, heads_per_cta) heads. A page
passes through shared memory in tiles of 32 KiB, one (BF16) or two (FP32), kept in two stages. Per head:
  vectors   keys and gates wait in shared memory; thread c makes e^{L_n} and k^_t e^{L_n - L_t} of key channel c and
            leaves them where the keys were; all threads take those of their 8 columns into registers; the next head's
            keys and gates start to load
  fold      per tile: thread = 8 columns x 4 (align: 2) rows at a time; FP32; the result goes to the destination page
            straight from registers, or in place and out by a bulk copy
  refill    the free stage starts to load the tile after next; the next head's corrections start to load
align: a window that crosses a block boundary after m tokens is folded twice from the same tiles, first to S_m.

Shared memory stays below a third of an SM, which is why keys and corrections have one buffer each: their load hides
behind the fold and behind `vectors`, that of the other CTAs of the SM behind everything else.

bulk, registers: a CTA per (rows_per_cta rows of a page, head, request, layer); more CTAs of an SM instead of stages:
  load      everything at once: rows by one bulk copy or straight to registers; keys, gates, corrections by cp.async
  vectors   as above, meanwhile; a page's CTAs each make them
  fold      as above, straight to the destination; with align first to S_m
Source: docs/operation.md, "Commit: folding n accepted tokens".
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Any, Literal

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, const_expr, range_constexpr
from cutlass.cute.runtime import make_ptr
from cutlass.memory import SmemAllocator

from kda_kernels.device import blocks, bulk, cubin
from kda_kernels.device.gpu import Gpu
from kda_kernels.operands import CommitOperands
from kda_kernels.problem import HEAD_DIM, MAX_TOKENS, Problem, StateDtype

KERNELS = ("kda_commit",)
KINDS = ("flush", "commit")
TRIED = {
    "heads_per_cta": (1, 2, 4, 8),
    "rows_per_cta": (32, 64, 128),
    "columns": (4, 8),
    "ctas_per_sm": (0, 1, 2, 3, 4),
}
GIVEN = ("align",)


def forms(kind: str, state_dtype: str) -> list[dict[str, object]]:
    """Every form that is another kernel, and one with other runs of heads."""
    pages: list[dict[str, object]] = [
        {"source": source, "heads_per_cta": 1, "rows_per_cta": rows, "columns": columns}
        for source in ("bulk", "registers")
        for rows in (32, 64, 128)
        for columns in (4, 8)
    ]
    return [
        {"store": "direct", "heads_per_cta": 1},
        {"store": "direct", "heads_per_cta": 4},
        {"store": "bulk", "heads_per_cta": 4},
        *pages,
    ]


THREADS = 128  # thread = key channel in `vectors`: must equal HEAD_DIM
STAGES = 2  # `_stage` and `_phase` rely on it
TILE_BYTES = 32 * 1024
CTAS_PER_SM = 3  # ring

_TOKEN_STEP = 4  # tokens per branch of the fold
_RECORD_BYTES = 512  # corrections, or keys and gates, of one token of one head
_KEYS, _CORRECTIONS, _TILES = 0, 1, 2  # mbarriers; one per stage from _TILES on

# Most CTAs of an SM by (source, rows_per_cta, columns): BF16, BF16 with align, FP32, FP32 with align. As ptxas makes
# them; tests/test_commit.py compiles each.
_MOST_CTAS = {
    ("registers", 128, 8): (3, 2, 2, 2),
    ("registers", 128, 4): (4, 2, 2, 2),
    ("registers", 64, 8): (4, 2, 3, 3),
    ("registers", 64, 4): (5, 3, 4, 3),
    ("registers", 32, 8): (4, 4, 4, 3),
    ("registers", 32, 4): (7, 7, 6, 4),
    ("bulk", 128, 8): (4, 4, 3, 3),
    ("bulk", 128, 4): (5, 5, 3, 3),
    ("bulk", 64, 8): (4, 4, 4, 4),
    ("bulk", 64, 4): (7, 7, 5, 5),
    ("bulk", 32, 8): (4, 3, 4, 3),
    ("bulk", 32, 4): (7, 7, 7, 7),
}

# `if`s inside an `if const_expr` stay nested, so that the outer one is decided while tracing.
arch = cute.arch
GMEM = cutlass.AddressSpace.gmem


@dataclass(frozen=True)
class Spec:
    """Compile-time choices, and two of the launch.

    store          direct: results go to global memory from registers; bulk: in place, then out by a bulk copy (ring)
    align          with block boundaries
    heads_per_cta  launch: most heads of a CTA; 1 unless ring
    pdl            launch: programmatic dependent launch
    source         where pages wait: ring, bulk (shared memory), registers
    rows_per_cta   rows of a CTA's page; 128 if ring
    columns        columns of a thread, 4 or 8; 8 if ring. 4 take half the registers for keys, and 8-byte rows of BF16
    ctas_per_sm    CTAs of an SM to compile for, which caps registers; 0: the most. 0 if ring
    hints          pages don't enter L1, results leave as streams; not ring
    """

    store: Literal["direct", "bulk"] = "direct"
    align: bool = False
    heads_per_cta: int = 4
    pdl: bool = False
    source: Literal["ring", "bulk", "registers"] = "ring"
    rows_per_cta: int = HEAD_DIM
    columns: int = 8
    ctas_per_sm: int = 0
    hints: bool = False


@dataclass(frozen=True)
class Compiled:
    binary: cubin.Binary
    spec: Spec
    state_dtype: StateDtype

    @property
    def resources(self) -> cubin.Resources:
        return self.binary.resources


@dataclass(frozen=True)
class _Choices:
    """What decides the code."""

    state_dtype: StateDtype
    store: str
    align: bool
    source: str = "ring"
    rows_per_cta: int = HEAD_DIM
    columns: int = 8
    ctas_per_sm: int = CTAS_PER_SM
    hints: bool = False

    @property
    def dtype(self) -> Any:
        return Float32 if self.state_dtype == "fp32" else BFloat16

    @property
    def item_bytes(self) -> int:
        return 4 if self.state_dtype == "fp32" else 2

    @property
    def tile_bytes(self) -> int:
        return TILE_BYTES if self.source == "ring" else self.rows_per_cta * HEAD_DIM * self.item_bytes

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
        """Rows that a thread folds at a time. 4 = one 16-byte load of corrections per token; 2 where 4 would spill."""
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
        """(vector, vectors of a thread's columns, rows), (lanes of a row, row groups), steps, stages.

        A thread's columns are one run, but two runs of 4, 64 apart, for 8 columns of FP32: rows then pass 256 bytes at
        a time, with no bank conflicts and whole lines.
        """
        stages = STAGES if self.source == "ring" else 1
        return (self.vector, self.runs, self.rows), (self.lanes, self.groups), self.steps, stages

    @property
    def tile_stride(self) -> Any:
        group = self.rows * HEAD_DIM
        return (1, 64, HEAD_DIM), (self.vector, group), self.groups * group, self.tile_bytes // self.item_bytes


def place(channel: Any, vector: int) -> Any:
    """Where a key channel's vectors lie: the first four columns of all lanes, then the second four."""
    return channel if vector == 4 else channel // 8 * 4 + channel % 4 + channel % 8 // 4 * 64


def heads_of_cta(heads: int, heads_per_cta: int) -> int:
    """Heads of a chunk: the greatest common divisor, so that chunks are equal."""
    return gcd(heads, heads_per_cta)


def most_ctas(state_dtype: StateDtype, spec: Spec) -> int:
    """CTAs of an SM that a kernel can be compiled for: all fit and none spills."""
    if spec.source == "ring":
        return CTAS_PER_SM
    most = _MOST_CTAS[spec.source, spec.rows_per_cta, spec.columns]
    return most[2 * (state_dtype == "fp32") + spec.align]


def unsupported(problem: Problem, spec: Spec, gpu: Gpu) -> str | None:
    """Why this pair can't run, or None. Pure: no CUDA."""
    if not problem.folds_only:
        return f"kind={problem.kind}: only commit and flush"
    if spec.store not in ("direct", "bulk"):
        return f"store={spec.store!r} is not one of direct, bulk"
    if spec.heads_per_cta < 1:
        return f"heads_per_cta={spec.heads_per_cta} must be >= 1"
    reason = _unsupported_source(problem.state_dtype, spec)
    if reason is not None:
        return reason
    if spec.align and problem.kind == "flush":
        return "align: a flush has no block boundary"
    if max(problem.requests, problem.layers) > 65_535:
        return f"requests={problem.requests}, layers={problem.layers}: the grid takes at most 65535 of each"
    return None


def _unsupported_source(state_dtype: StateDtype, spec: Spec) -> str | None:
    if spec.source == "ring":
        if (spec.rows_per_cta, spec.columns, spec.ctas_per_sm, spec.hints) != (HEAD_DIM, 8, 0, False):
            return f"source=ring has rows_per_cta={HEAD_DIM}, columns=8, ctas_per_sm=0 and no hints"
        return None
    if spec.source not in ("bulk", "registers"):
        return f"source={spec.source!r} is not one of ring, bulk, registers"
    if (spec.store, spec.heads_per_cta) != ("direct", 1):
        return f"source={spec.source} has store=direct and heads_per_cta=1, not {spec.store} and {spec.heads_per_cta}"
    if (spec.source, spec.rows_per_cta, spec.columns) not in _MOST_CTAS:
        return f"rows_per_cta={spec.rows_per_cta}, columns={spec.columns}: takes 32, 64, {HEAD_DIM} and 4, 8"
    most = most_ctas(state_dtype, spec)
    if not 0 <= spec.ctas_per_sm <= most:
        return f"ctas_per_sm={spec.ctas_per_sm} is not within 0..{most}: more don't fit or spill"
    return None


def compile(problem: Problem, spec: Spec, gpu: Gpu) -> Compiled:
    """From shapes alone; one binary serves every size. Raises ValueError for unsupported pairs."""
    reason = unsupported(problem, spec, gpu)
    if reason is not None:
        raise ValueError(f"KdaCommit: {reason}")
    choices = _Choices(
        problem.state_dtype,
        spec.store,
        spec.align,
        spec.source,
        spec.rows_per_cta,
        spec.columns,
        spec.ctas_per_sm or most_ctas(problem.state_dtype, spec),
        spec.hints,
    )
    binary = cubin.build(_host, lambda: _arguments(choices), arch=gpu.arch, threads=THREADS, cluster=1, choices=choices)
    return Compiled(binary, spec, problem.state_dtype)


def launch(compiled: Compiled, operands: CommitOperands, stream: int) -> None:
    """Enqueue one commit over all layers and requests of the operands. Raises ValueError for operands that don't fit.

    Row and slot strides must be multiples of 16 bytes.
    """
    state, corrections, key_gates = operands.states[0], operands.corrections[0], operands.key_gates[0]
    spec = compiled.spec
    item_bytes = 4 if compiled.state_dtype == "fp32" else 2
    if state.element_size() != item_bytes:
        raise ValueError(f"states are {state.dtype}, the kernel was compiled for {compiled.state_dtype}")
    if spec.align != (operands.boundary_slot is not None and operands.boundary_length is not None):
        raise ValueError(f"align={spec.align} must match whether boundary_length and boundary_slot are given")
    for name, tensor in (("states", state), ("corrections", corrections), ("key_gates", key_gates)):
        if tensor.stride(0) * tensor.element_size() % 16:
            raise ValueError(f"{name}: leading stride {tensor.stride(0)} must be a multiple of 16 bytes")
    heads, tokens = corrections.shape[1], corrections.shape[2]
    if tokens > MAX_TOKENS:
        raise ValueError(f"records hold {tokens} tokens, the kernel folds at most {MAX_TOKENS}")
    chunk = heads_of_cta(heads, spec.heads_per_cta)
    boundary = (operands.boundary_length, operands.boundary_slot)
    values = [
        t.data_ptr()
        for t in (
            operands.state_table,
            operands.corrections_table,
            operands.key_gates_table,
            operands.A_log,
            operands.dt_bias,
            operands.source,
            operands.length,
            operands.destination,
            operands.record_rows,
        )
    ]
    values += [0 if t is None else t.data_ptr() for t in boundary]
    parts = HEAD_DIM // spec.rows_per_cta
    grid = (heads // chunk * parts, operands.source.shape[0], len(operands.states))
    cubin.launcher(compiled.binary).launch(
        grid, (*values, heads, chunk, tokens, operands.lower_bound), stream, spec.pdl
    )


def _arguments(choices: _Choices) -> tuple[Any, ...]:
    tables = (make_ptr(Int64, 16, GMEM, assumed_align=16),) * 3
    weights = (make_ptr(Float32, 16, GMEM, assumed_align=4),) * 2
    plan = (make_ptr(Int32, 16, GMEM, assumed_align=4),) * 6
    return (*tables, *weights, *plan, Int32(4), Int32(4), Int32(MAX_TOKENS), Float32(-5), choices)


@cute.jit
def _host(
    state_table: cute.Pointer,
    corrections_table: cute.Pointer,
    key_gates_table: cute.Pointer,
    A_log: cute.Pointer,
    dt_bias: cute.Pointer,
    source: cute.Pointer,
    length: cute.Pointer,
    destination: cute.Pointer,
    record_rows: cute.Pointer,
    boundary_length: cute.Pointer,
    boundary_slot: cute.Pointer,
    heads: Int32,
    chunk: Int32,
    tokens: Int32,
    lower_bound: Float32,
    C: cutlass.Constexpr,
) -> None:
    kernel = kda_commit if const_expr(C.source == "ring") else kda_commit_rows
    kernel(
        state_table,
        corrections_table,
        key_gates_table,
        A_log,
        dt_bias,
        source,
        length,
        destination,
        record_rows,
        boundary_length,
        boundary_slot,
        heads,
        chunk,
        tokens,
        lower_bound,
        C,
    ).launch(grid=(1, 1, 1), block=(THREADS, 1, 1), min_blocks_per_mp=C.ctas_per_sm, preferred_smem_carveout=100)


@cute.kernel
def kda_commit(
    state_table: cute.Pointer,
    corrections_table: cute.Pointer,
    key_gates_table: cute.Pointer,
    A_log: cute.Pointer,
    dt_bias: cute.Pointer,
    source: cute.Pointer,
    length: cute.Pointer,
    destination: cute.Pointer,
    record_rows: cute.Pointer,
    boundary_length: cute.Pointer,
    boundary_slot: cute.Pointer,
    heads: Int32,
    chunk: Int32,
    tokens: Int32,
    lower_bound: Float32,
    C: cutlass.Constexpr,
) -> None:
    tid, _, _ = arch.thread_idx()
    first, request, layer = arch.block_idx()
    first = first * chunk

    smem = SmemAllocator()
    tiles = smem.allocate_tensor(C.dtype, cute.make_layout(C.tile_shape, stride=C.tile_stride), byte_alignment=128)
    s_corrections = smem.allocate_tensor(Float32, cute.make_layout((HEAD_DIM, MAX_TOKENS)), byte_alignment=128)
    s_records = smem.allocate_tensor(BFloat16, cute.make_layout((2 * HEAD_DIM, MAX_TOKENS)), byte_alignment=128)
    s_decay = smem.allocate_tensor(Float32, cute.make_layout(HEAD_DIM), byte_alignment=128)
    s_ratio = s_decay
    if const_expr(C.align):
        s_ratio = smem.allocate_tensor(Float32, cute.make_layout(HEAD_DIM), byte_alignment=128)
    s_norms = smem.allocate_tensor(Float32, cute.make_layout(MAX_TOKENS), byte_alignment=16)
    barriers = smem.allocate_array(Int64, _TILES + STAGES)
    # The folded keys of all tokens lie where the keys and gates were: the sizes are equal.
    s_keys = cute.make_tensor(
        cute.recast_ptr(s_records.iterator, dtype=Float32), cute.make_layout((HEAD_DIM, MAX_TOKENS))
    )
    arch.griddepcontrol_wait()
    arch.griddepcontrol_launch_dependents()

    # All that has a known address at once, before the barrier: behind a branch each would be a round trip of its own.
    slot = _at(source, request)
    target = _at(destination, request)
    row = _at(record_rows, request)
    n = _at(length, request)
    boundary, m = Int32(0), Int32(0)
    if const_expr(C.align):
        boundary = _at(boundary_slot, request)
        m = _at(boundary_length, request)
    states = _entry(state_table, layer)
    all_corrections = _entry(corrections_table, layer)
    all_records = _entry(key_gates_table, layer)
    gate_row = layer * heads + first
    a_log = _at(A_log, gate_row)
    bias = _at(dt_bias, gate_row * HEAD_DIM + tid)
    if tid == 0:
        bulk.init(barriers, _TILES + STAGES)
    arch.sync_threads()

    n = min(n, tokens)
    if const_expr(C.align):  # noqa: SIM102
        if m <= 0 or m > n or boundary <= 0:
            m = Int32(0)

    if n > 0 and slot > 0 and target > 0 and row >= 0:
        pages = _address(states, slot, first, HEAD_DIM * HEAD_DIM, C.item_bytes)
        target_pages = _address(states, target, first, HEAD_DIM * HEAD_DIM, C.item_bytes)
        boundary_pages = target_pages
        if const_expr(C.align):
            boundary_pages = _address(states, boundary, first, HEAD_DIM * HEAD_DIM, C.item_bytes)
        corrections = _address(all_corrections, row, first, tokens * HEAD_DIM, 4)
        records = _address(all_records, row, first, tokens * 2 * HEAD_DIM, 2)
        record_bytes = n * _RECORD_BYTES
        record_pitch = Int64(tokens * _RECORD_BYTES)
        if tid == 0:
            bulk.load(s_records.iterator, records, record_bytes, barriers + _KEYS)
            _load_tile(tiles, pages, Int32(0), barriers)
            bulk.load(s_corrections.iterator, corrections, record_bytes, barriers + _CORRECTIONS)
            if chunk * C.tiles > 1:
                _load_tile(tiles, pages, Int32(1), barriers)
        # Tokens that weren't accepted: their folded keys are zero, so their corrections need only be finite. The
        # copies write tokens < n alone, of every head.
        for t in range_constexpr(MAX_TOKENS):
            if t >= n:
                s_corrections[tid, t] = Float32(0)

        for i in range(chunk):
            arch.mbarrier_wait(barriers + _KEYS, i & 1)
            vectors(s_records, s_keys, s_decay, s_ratio, s_norms, n, m, a_log, bias, lower_bound, tid, C)
            if const_expr(C.store == "bulk"):  # noqa: SIM102
                if tid == 0:
                    _refill_after_store(tiles, pages, i * C.tiles, chunk * C.tiles, barriers)
            if const_expr(C.align):  # noqa: SIM102
                if m > 0:
                    # Keys of tokens >= m are already those of S_n: they stay out of S_m.
                    keys, decay = take_vectors(s_keys, s_decay, m, tid, C)
                    arch.mbarrier_wait(barriers + _CORRECTIONS, i & 1)
                    for part in cutlass.range(C.tiles, unroll=1):
                        tile = i * C.tiles + part
                        arch.mbarrier_wait(barriers + _TILES + _stage(tile), _phase(tile))
                        address = boundary_pages + Int64(tile) * TILE_BYTES
                        fold(tiles, _stage(tile), s_corrections, part, keys, decay, m, address, False, tid, C)
                    arch.sync_threads()
                    rescale(s_keys, s_decay, s_ratio, m, tid, C)

            keys, decay = take_vectors(s_keys, s_decay, n, tid, C)
            bulk.publish()
            arch.sync_threads()
            if tid == 0 and i + 1 < chunk:
                bulk.load(s_records.iterator, records + Int64(i + 1) * record_pitch, record_bytes, barriers + _KEYS)
            # Behind the fence of `publish`, which would wait for them.
            following = min(i + 1, chunk - 1)
            a_log = _at(A_log, gate_row + following)
            bias = _at(dt_bias, (gate_row + following) * HEAD_DIM + tid)

            arch.mbarrier_wait(barriers + _CORRECTIONS, i & 1)
            for part in cutlass.range(C.tiles, unroll=1):
                tile = i * C.tiles + part
                stage = _stage(tile)
                if const_expr(C.store == "bulk" and C.tiles > 1):  # noqa: SIM102
                    if tid == 0 and part > 0:
                        _refill_after_store(tiles, pages, tile, chunk * C.tiles, barriers)
                arch.mbarrier_wait(barriers + _TILES + stage, _phase(tile))
                address = target_pages + Int64(tile) * TILE_BYTES
                fold(tiles, stage, s_corrections, part, keys, decay, n, address, C.store == "bulk", tid, C)
                if const_expr(C.store == "bulk"):
                    bulk.publish()
                arch.sync_threads()
                if tid == 0:
                    if const_expr(C.store == "bulk"):
                        bulk.store(address, tiles[(None, None, None, stage)].iterator, Int32(TILE_BYTES))
                    if part == C.tiles - 1 and i + 1 < chunk:
                        following_corrections = corrections + Int64(i + 1) * record_pitch
                        bulk.load(s_corrections.iterator, following_corrections, record_bytes, barriers + _CORRECTIONS)
                    if const_expr(C.store == "direct"):  # noqa: SIM102
                        if tile + STAGES < chunk * C.tiles:
                            _load_tile(tiles, pages, tile + STAGES, barriers)
        if const_expr(C.store == "bulk"):  # noqa: SIM102
            if tid == 0:
                bulk.wait_stores()


@cute.kernel
def kda_commit_rows(
    state_table: cute.Pointer,
    corrections_table: cute.Pointer,
    key_gates_table: cute.Pointer,
    A_log: cute.Pointer,
    dt_bias: cute.Pointer,
    source: cute.Pointer,
    length: cute.Pointer,
    destination: cute.Pointer,
    record_rows: cute.Pointer,
    boundary_length: cute.Pointer,
    boundary_slot: cute.Pointer,
    heads: Int32,
    chunk: Int32,
    tokens: Int32,
    lower_bound: Float32,
    C: cutlass.Constexpr,
) -> None:
    tid, _, _ = arch.thread_idx()
    part, request, layer = arch.block_idx()
    head = part // C.parts
    part = part % C.parts

    smem = SmemAllocator()
    tile: Any = None
    if const_expr(C.source == "bulk"):
        tile = smem.allocate_tensor(C.dtype, cute.make_layout(C.tile_shape, stride=C.tile_stride), byte_alignment=128)
    s_corrections = smem.allocate_tensor(Float32, cute.make_layout((C.rows_per_cta, MAX_TOKENS)), byte_alignment=128)
    s_records = smem.allocate_tensor(BFloat16, cute.make_layout((2 * HEAD_DIM, MAX_TOKENS)), byte_alignment=128)
    s_decay = smem.allocate_tensor(Float32, cute.make_layout(HEAD_DIM), byte_alignment=128)
    s_ratio = s_decay
    if const_expr(C.align):
        s_ratio = smem.allocate_tensor(Float32, cute.make_layout(HEAD_DIM), byte_alignment=128)
    s_norms = smem.allocate_tensor(Float32, cute.make_layout(MAX_TOKENS), byte_alignment=16)
    s_keys = cute.make_tensor(
        cute.recast_ptr(s_records.iterator, dtype=Float32), cute.make_layout((HEAD_DIM, MAX_TOKENS))
    )
    barrier = None
    if const_expr(C.source == "bulk"):
        barrier = smem.allocate_array(Int64, 1)
    arch.griddepcontrol_wait()
    arch.griddepcontrol_launch_dependents()

    # All that has a known address at once: behind the branch each would be a round trip of its own.
    slot = _at(source, request)
    target = _at(destination, request)
    row = _at(record_rows, request)
    n = _at(length, request)
    boundary, m = Int32(0), Int32(0)
    if const_expr(C.align):
        boundary = _at(boundary_slot, request)
        m = _at(boundary_length, request)
    states = _entry(state_table, layer)
    all_corrections = _entry(corrections_table, layer)
    all_records = _entry(key_gates_table, layer)
    gate_row = layer * heads + head
    a_log = _at(A_log, gate_row)
    bias = _at(dt_bias, gate_row * HEAD_DIM + tid)
    if const_expr(C.source == "bulk"):  # noqa: SIM102
        if tid == 0:
            bulk.init(barrier, 1)
    keep_order()

    n = min(n, tokens)
    if const_expr(C.align):  # noqa: SIM102
        if m <= 0 or m > n or boundary <= 0:
            m = Int32(0)
    if n > 0 and slot > 0 and target > 0 and row >= 0:
        first_row = part * C.rows_per_cta
        offset = Int64(first_row * (HEAD_DIM * C.item_bytes))
        page = _address(states, slot, head, HEAD_DIM * HEAD_DIM, C.item_bytes) + offset
        target_page = _address(states, target, head, HEAD_DIM * HEAD_DIM, C.item_bytes) + offset
        corrections = _address(all_corrections, row, head, tokens * HEAD_DIM, 4) + first_row * 4
        records = _address(all_records, row, head, tokens * 2 * HEAD_DIM, 2)
        raw = cute.make_rmem_tensor((C.vector, C.runs, C.rows, C.steps), C.dtype)
        if const_expr(C.source == "bulk"):  # noqa: SIM102
            if tid == 0:
                bulk.load(tile.iterator, page, Int32(C.tile_bytes), barrier)
        copy_tokens(s_records.iterator.toint(), records, _RECORD_BYTES, n, tid)
        copy_tokens(s_corrections.iterator.toint(), corrections, C.rows_per_cta * 4, n, tid)
        arch.cp_async_commit_group()
        if const_expr(C.source == "registers"):
            load_rows(raw, page, tid, C)
            keep_order()
        arch.cp_async_wait_group(0)
        arch.sync_threads()
        vectors(s_records, s_keys, s_decay, s_ratio, s_norms, n, m, a_log, bias, lower_bound, tid, C)
        if const_expr(C.source == "bulk"):
            arch.mbarrier_wait(barrier, 0)
        if const_expr(C.align):  # noqa: SIM102
            if m > 0:
                # Keys of tokens >= m are already those of S_n: they stay out of S_m.
                boundary_page = _address(states, boundary, head, HEAD_DIM * HEAD_DIM, C.item_bytes) + offset
                keys, decay = take_vectors(s_keys, s_decay, m, tid, C)
                if const_expr(C.source == "bulk"):
                    fold(tile, 0, s_corrections, 0, keys, decay, m, boundary_page, False, tid, C)
                else:
                    fold_registers(raw, s_corrections, keys, decay, m, boundary_page, tid, C)
                arch.sync_threads()
                rescale(s_keys, s_decay, s_ratio, m, tid, C)
        keys, decay = take_vectors(s_keys, s_decay, n, tid, C)
        if const_expr(C.source == "bulk"):
            fold(tile, 0, s_corrections, 0, keys, decay, n, target_page, False, tid, C)
        else:
            fold_registers(raw, s_corrections, keys, decay, n, target_page, tid, C)


@cute.jit
def keep_order() -> None:
    """Loads before this are issued before it: ptxas would put them off until behind a branch or a wait."""
    arch.sync_warp()


@cute.jit
def copy_tokens(shared: Int32, address: Int64, token_bytes: cutlass.Constexpr, n: Int32, tid: Int32) -> None:
    """Start to copy the first `token_bytes` of the 512-byte records of tokens < n, packed; zeros from n on."""
    token_pieces = token_bytes // 16
    for i in range_constexpr(-(-MAX_TOKENS * token_pieces // THREADS)):
        piece = i * THREADS + tid
        token = piece // token_pieces
        # A copy of no bytes still wants an address: that of the first token.
        nbytes, begin = Int32(0), Int32(0)
        if token < n:
            nbytes, begin = Int32(16), token * _RECORD_BYTES + piece % token_pieces * 16
        if token < MAX_TOKENS:
            arch.inline_ptx(
                "cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};",
                read_only_args=[shared + piece * 16, address + begin, nbytes],
            )


@cute.jit
def _at(pointer: cute.Pointer, index: Int32) -> Any:
    """One element; assembly, so that the load stays where it is written and doesn't sink behind a branch."""
    return arch.inline_ptx(
        "ld.global.b32 {$w0}, [{$r0}];", write_only_types=[pointer.dtype], read_only_args=[(pointer + index).toint()]
    )


@cute.jit
def _entry(table: cute.Pointer, layer: Int32) -> Any:
    """A layer's base address, and its elements between slots or rows."""
    return arch.inline_ptx(
        "ld.global.v2.b64 {{$w0}, {$w1}}, [{$r0}];",
        write_only_types=[Int64, Int64],
        read_only_args=[(table + 2 * layer).toint()],
    )


@cute.jit
def _address(
    entry: tuple[Int64, Int64], index: Int32, head: Int32, head_elements: Int32, item_bytes: cutlass.Constexpr
) -> Int64:
    """Global address of what a slot or row holds of one head; the next heads follow it."""
    base, pitch = entry
    return base + (Int64(index) * pitch + Int64(head) * head_elements) * item_bytes


@cute.jit
def _stage(tile: Int32) -> Int32:
    return tile & 1


@cute.jit
def _phase(tile: Int32) -> Int32:
    """Parity of the stage's barrier once the tile is there."""
    return (tile >> 1) & 1


@cute.jit
def _load_tile(tiles: cute.Tensor, pages: Int64, tile: Int32, barriers: cute.Pointer) -> None:
    """Start to load the chunk's tile number `tile` into its stage."""
    stage = _stage(tile)
    bulk.load(
        tiles[(None, None, None, stage)].iterator,
        pages + Int64(tile) * TILE_BYTES,
        Int32(TILE_BYTES),
        barriers + _TILES + stage,
    )


@cute.jit
def _refill_after_store(tiles: cute.Tensor, pages: Int64, tile: Int32, count: Int32, barriers: cute.Pointer) -> None:
    """Before tile number `tile` of `count` is folded: load the next one where the one before was stored from.

    So late that the store has had the time of `vectors` to read its stage.
    """
    if tile > 0 and tile + 1 < count:
        bulk.wait_stores_read()
        _load_tile(tiles, pages, tile + 1, barriers)


@cute.jit
def vectors(
    s_records: cute.Tensor,
    s_keys: cute.Tensor,
    s_decay: cute.Tensor,
    s_ratio: cute.Tensor,
    s_norms: cute.Tensor,
    n: Int32,
    m: Int32,
    a_log: Float32,
    bias: Float32,
    lower_bound: Float32,
    tid: Int32,
    C: cutlass.Constexpr,
) -> None:
    """The head's vectors of the fold from its keys and gates, thread = key channel; ends with a CTA barrier.

    s_keys[:, t]   k^_t e^{L_n - L_t} for m <= t < n, k^_t e^{L_m - L_t} for t < m, zero from n on
    s_decay        e^{L_m} if m > 0, else e^{L_n}
    s_ratio        e^{L_n - L_m}, if m > 0; by channel, the others in the order of `place`
    """
    warp, lane = tid // 32, tid % 32
    warps = THREADS // 32
    # [4 keys, lane, token]
    quads = cute.make_tensor(s_records.iterator, cute.make_layout((4, 32, MAX_TOKENS), stride=(1, 4, 2 * HEAD_DIM)))
    squares = cute.make_rmem_tensor(MAX_TOKENS // warps, Float32)
    for j in range_constexpr(MAX_TOKENS // warps):
        quad = cute.make_rmem_tensor(4, BFloat16)
        cute.autovec_copy(quads[None, lane, warp + j * warps], quad)
        squares[j] = Float32(0)
        for e in range_constexpr(4):
            squares[j] = squares[j] + quad[e].to(Float32) * quad[e].to(Float32)
    # All tokens at once and no branches, so that the chains of the tokens overlap; what lies behind n is dropped.
    exp_A = blocks.exp(a_log)
    keys = cute.make_rmem_tensor(MAX_TOKENS, Float32)
    log_decays = cute.make_rmem_tensor(MAX_TOKENS, Float32)
    for t in range_constexpr(MAX_TOKENS):
        keys[t] = s_records[tid, t].to(Float32)
        log_decay = blocks.log_decay(s_records[HEAD_DIM + tid, t].to(Float32), bias, exp_A, lower_bound)
        if t >= n:
            log_decay = Float32(0)
        log_decays[t] = log_decay
    for j in range_constexpr(MAX_TOKENS // warps):
        squares[j] = arch.warp_reduction_sum(squares[j])
    if lane == 0:
        for j in range_constexpr(MAX_TOKENS // warps):
            s_norms[warp + j * warps] = blocks.rsqrt(squares[j] + Float32(1e-6))

    suffix = Float32(0)
    for j in range_constexpr(MAX_TOKENS):
        t = MAX_TOKENS - 1 - j
        if const_expr(C.align):  # noqa: SIM102
            if t == m - 1:
                s_ratio[tid] = blocks.exp(suffix)
                suffix = Float32(0)
        keys[t] = keys[t] * blocks.exp(suffix)
        suffix += log_decays[t]
    arch.sync_threads()
    norms = cute.make_rmem_tensor(MAX_TOKENS, Float32)
    cute.autovec_copy(s_norms, norms)
    position = place(tid, C.vector)
    for t in range_constexpr(MAX_TOKENS):
        key = keys[t] * norms[t]
        if t >= n:
            key = Float32(0)
        s_keys[position, t] = key
    s_decay[position] = blocks.exp(suffix)
    arch.sync_threads()


@cute.jit
def rescale(
    s_keys: cute.Tensor, s_decay: cute.Tensor, s_ratio: cute.Tensor, m: Int32, tid: Int32, C: cutlass.Constexpr
) -> None:
    """From the vectors of S_m to those of S_n, thread = key channel; ends with a CTA barrier."""
    position = place(tid, C.vector)
    ratio = s_ratio[tid]
    for t in range_constexpr(MAX_TOKENS):
        if t < m:
            s_keys[position, t] = s_keys[position, t] * ratio
    s_decay[position] = s_decay[position] * ratio
    arch.sync_threads()


@cute.jit
def take_vectors(
    s_keys: cute.Tensor, s_decay: cute.Tensor, count: Int32, tid: Int32, C: cutlass.Constexpr
) -> tuple[cute.Tensor, cute.Tensor]:
    """This thread's vectors in registers: keys [columns, tokens], zero from `count` on, and decay [columns]."""
    lane = tid % C.lanes
    halves = C.columns // 4
    # (4 columns, lane, half, token): see `place`.
    layout = cute.make_layout((4, C.lanes, halves, MAX_TOKENS), stride=(1, 4, 64, HEAD_DIM))
    shared = cute.make_tensor(s_keys.iterator, layout)
    keys = cute.make_rmem_tensor(((4, halves), MAX_TOKENS), Float32)
    for t in range_constexpr(MAX_TOKENS):
        if const_expr(C.align):
            for e in range_constexpr(C.columns):
                keys[(e % 4, e // 4), t] = Float32(0)
            if t < count:
                for j in range_constexpr(halves):
                    cute.autovec_copy(shared[None, lane, j, t], keys[(None, j), t])
        else:
            for j in range_constexpr(halves):
                cute.autovec_copy(shared[None, lane, j, t], keys[(None, j), t])
    shared_decay = cute.make_tensor(s_decay.iterator, layout)
    decay = cute.make_rmem_tensor((4, halves), Float32)
    for j in range_constexpr(halves):
        cute.autovec_copy(shared_decay[None, lane, j, 0], decay[None, j])
    return keys, decay


@cute.jit
def fold(
    tiles: cute.Tensor,
    stage: Int32,
    s_corrections: cute.Tensor,
    part: Int32,
    keys: cute.Tensor,
    decay: cute.Tensor,
    count: Int32,
    address: Int64,
    in_place: cutlass.Constexpr,
    tid: Int32,
    C: cutlass.Constexpr,
) -> None:
    """Fold `count` tokens into a tile, the CTA's number `part`; the result goes to the address, or stays in place."""
    lane, group = tid % C.lanes, tid // C.lanes
    for step in cutlass.range(C.steps, unroll=1):
        raw = cute.make_rmem_tensor((C.vector, C.runs, C.rows), C.dtype)
        for r in range_constexpr(C.rows):
            for j in range_constexpr(C.runs):
                cute.autovec_copy(tiles[(None, j, r), (lane, group), step, stage], raw[None, j, r])
        raw = fold_rows(raw, s_corrections, keys, decay, count, group, part * C.steps + step, C)
        if const_expr(in_place):
            for r in range_constexpr(C.rows):
                for j in range_constexpr(C.runs):
                    cute.autovec_copy(raw[None, j, r], tiles[(None, j, r), (lane, group), step, stage])
        else:
            store_rows(raw, address, step, tid, C)


@cute.jit
def fold_registers(
    raw: cute.Tensor,
    s_corrections: cute.Tensor,
    keys: cute.Tensor,
    decay: cute.Tensor,
    count: Int32,
    address: Int64,
    tid: Int32,
    C: cutlass.Constexpr,
) -> None:
    """`fold` of rows in registers [vector, runs, rows, steps], which stay as they are."""
    for step in range_constexpr(C.steps):
        rows = fold_rows(raw[None, None, None, step], s_corrections, keys, decay, count, tid // C.lanes, step, C)
        store_rows(rows, address, step, tid, C)


@cute.jit
def fold_rows(
    raw: cute.Tensor,
    s_corrections: cute.Tensor,
    keys: cute.Tensor,
    decay: cute.Tensor,
    count: Int32,
    group: Int32,
    step: Int32,
    C: cutlass.Constexpr,
) -> cute.Tensor:
    """The rows [vector, runs, rows] of a group's step with `count` tokens folded in."""
    shape = (C.rows, C.groups, C.tiles * C.steps, MAX_TOKENS)
    stride = (1, C.rows, C.groups * C.rows, C.rows_per_cta)
    corrections = cute.make_tensor(s_corrections.iterator, cute.make_layout(shape, stride=stride))
    state = cute.make_rmem_tensor((C.columns, C.rows), Float32)
    for r in range_constexpr(C.rows):
        for c in range_constexpr(C.columns):
            state[c, r] = raw[c % C.vector, c // C.vector, r].to(Float32) * decay[c % 4, c // 4]
    add_tokens(state, corrections, keys, group, step, 0, C)
    if count > _TOKEN_STEP:
        add_tokens(state, corrections, keys, group, step, _TOKEN_STEP, C)
    folded = cute.make_rmem_tensor((C.vector, C.runs, C.rows), C.dtype)
    for r in range_constexpr(C.rows):
        folded[None, None, r].store(state[None, r].load().to(C.dtype).reshape((C.vector, C.runs)))
    return folded


@cute.jit
def add_tokens(
    state: cute.Tensor,
    corrections: cute.Tensor,
    keys: cute.Tensor,
    group: Int32,
    step: Int32,
    begin: cutlass.Constexpr,
    C: cutlass.Constexpr,
) -> None:
    """state [columns, rows] += sum of u_t (folded key)_t over `_TOKEN_STEP` tokens."""
    for t in range_constexpr(begin, begin + _TOKEN_STEP):
        u = cute.make_rmem_tensor(C.rows, Float32)
        cute.autovec_copy(corrections[None, group, step, t], u)
        for r in range_constexpr(C.rows):
            for c in range_constexpr(C.columns):
                state[c, r] = state[c, r] + u[r] * keys[(c % 4, c // 4), t]


@cute.jit
def load_rows(raw: cute.Tensor, address: Int64, tid: Int32, C: cutlass.Constexpr) -> None:
    """This thread's part of the tile at the address to registers: [vector, runs, rows, steps]."""
    nbytes = C.vector * C.item_bytes
    layout = cute.make_layout(C.tile_shape, stride=C.tile_stride)
    tile = cute.make_tensor(cute.make_ptr(C.dtype, address, GMEM, assumed_align=nbytes), layout)
    priority = cute.nvgpu.CacheEvictionPriority.EVICT_NORMAL
    if const_expr(C.hints):
        priority = cute.nvgpu.CacheEvictionPriority.NO_ALLOCATE
    load = cute.nvgpu.CopyG2ROp()
    atom = cute.make_copy_atom(load, C.dtype, num_bits_per_copy=8 * nbytes, l1c_evict_priority=priority)
    for step in range_constexpr(C.steps):
        for r in range_constexpr(C.rows):
            for j in range_constexpr(C.runs):
                piece = tile[(None, j, r), (tid % C.lanes, tid // C.lanes), step, 0]
                cute.copy(atom, piece, raw[None, j, r, step])


@cute.jit
def store_rows(folded: cute.Tensor, address: Int64, step: Int32, tid: Int32, C: cutlass.Constexpr) -> None:
    """A step's rows [vector, runs, rows] to the tile at the address."""
    nbytes = C.vector * C.item_bytes
    layout = cute.make_layout(C.tile_shape, stride=C.tile_stride)
    tile = cute.make_tensor(cute.make_ptr(C.dtype, address, GMEM, assumed_align=nbytes), layout)
    mode = cute.nvgpu.StoreCacheMode.NONE
    if const_expr(C.hints):
        mode = cute.nvgpu.StoreCacheMode.STREAMING
    store = cute.nvgpu.CopyR2GOp()
    atom = cute.make_copy_atom(store, C.dtype, num_bits_per_copy=8 * nbytes, store_cache_mode=mode)
    for r in range_constexpr(C.rows):
        for j in range_constexpr(C.runs):
            cute.copy(atom, folded[None, j, r], tile[(None, j, r), (tid % C.lanes, tid // C.lanes), step, 0])
