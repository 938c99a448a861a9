"""KDA replay steps: pending tokens folded into the state, then a window from it, in one pass over the state.

projected   [requests * tokens, pitch]     bf16   q, k, v | output gate | f_a | raw beta
conv_state  [slots, 3D, W]                 bf16, any strides; read and rolled
state       [slots, heads, V=128, K=128]   f32, read; written in place where tokens are pending
corrections [rows, heads, Q, 128]          f32, the pending tokens' are read, then the window's written
key_gates   [rows, heads, Q, 256]          bf16, the same
pending     [rows]                         int32, tokens of a record row to fold
out         [requests * tokens, D]         bf16

A cluster of `split` CTAs has an item; CTA r owns rows, channels and gate features r*128/split .. of it:
  load      slot, record row, pending count; weights, window, record, projection (cp.async); gate weights and state rows
            (registers: the state stays in flight until it is folded)
  gate      its features of all tokens on tensor cores, Gamma across lanes
  convolve  its channels of q, k, v of all tokens
  weigh     two warps: k^_t e^{L_n - L_t} of the pending tokens and e^{L_n}, all columns, as fragments
  exchange  q, k and Gamma of its channels go to the other CTAs by st.async, on one mbarrier per CTA
  fold      S <- S e^{L_n} + U K on tensor cores, in the registers that hold S; stored where it came from
  build     norms, and the 2q vectors as fragments; then keys, raw gates and window are written
  solve     A and B, a part per warp; one warp turns them into the triangles T and C
  multiply  the state with the vectors, by three products of BF16 terms
  finish    corrections and outputs; RMSNorm, its sums of squares to every CTA by st.async
A record is overwritten by the one that replaces it: every CTA has read all of the old one when it sends, and writes
the new one when it has received.
From the fold on a warp has 16 rows and, in a CTA of fewer rows than 16 per warp, a part of the columns; the parts'
products are summed in shared memory.
No CTA leaves before it has received all that its peers send, so none is written to after its end.

With source=shared one CTA has an item, and its state comes by cp.async in lines of 128 bytes, a warp's 16 rows for
itself, so that no barrier of the CTA stands before them:
  load      slot, record row; vectors, projection, window, record (cp.async); gate and convolution weights and the old
            corrections (registers); as many lines of the state as there is room for (cp.async)
  gate      as above, and on to the record, which nobody needs any more
  convolve  q, k, v of all tokens on six warps; weigh, on two others
  build     norms, and the 2q vectors as fragments
  solve     A and B, T and C
  advance   each line: folded, stored by whole lines if tokens are pending, multiplied; its room goes to the next one
  finish    as above
More than eight warps: the last one solves, while the first eight have the state, and the last two weigh.
Source: docs/operation.md, "The same, chunked" and "Commit: folding n accepted tokens".
"""

# A condition known at compile time can't share an `if` with one of the running kernel.
# ruff: noqa: SIM102
from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32, Int32, Int64, Uint8, Uint32, const_expr, range_constexpr
from cutlass.memory import SmemAllocator

from kda_kernels import arguments
from kda_kernels.arguments import Arguments
from kda_kernels.device import blocks, cubin
from kda_kernels.device.gpu import Gpu
from kda_kernels.operands import StepOperands
from kda_kernels.parts import chunked, conv_window, gate_product, prologue, wide_prologue
from kda_kernels.parts.conv_window import Window
from kda_kernels.parts.prologue import ALIGNMENT, UNIT, Operands, Place, Record, Rows
from kda_kernels.problem import CONV_WIDTH, HEAD_DIM, HISTORY, Problem, ceil_div

KERNELS = ("kda_fused",)
KINDS = ("replay",)
RULE = "fused_items"
TRIED = {
    "split": (1, 2, 4, 8),
    "threads": (128, 256, 288),
    "gate_mode": (0, 1),
    "ctas_per_sm": (0, 1, 2, 3, 4),
}
GIVEN = ("streamable", "conv_weight_dtype", "window")


def forms(kind: str, state_dtype: str) -> list[dict[str, object]]:
    """Every form that is another kernel."""
    if state_dtype != "fp32":
        return []
    lines: dict[str, object] = {"split": 1, "source": "shared", "fold": "late", "state_first": False}
    return [
        {"split": 1},
        {"split": 1, "gate_mode": 1},
        lines,
        {**lines, "gate_mode": 1, "ctas_per_sm": 3},
        {"split": 2},
        {"split": 4, "threads": 128, "fold": "late"},
        {"split": 8, "threads": 128},
    ]


_ROW_BYTES = 4 * HEAD_DIM  # of a state
_WEIGHING_WARPS = 2
_VECTORS, _SUMS, _SOLUTION = 0, 1, 2
"""mbarriers."""
_FEWEST_LINES = 2
"""Of a state that there must be room for at a time."""

arch = cute.arch
GMEM = cutlass.AddressSpace.gmem
SMEM = cutlass.AddressSpace.smem


@dataclass(frozen=True)
class Spec:
    """Compile-time choices, and `pdl` of the launch.

    split              CTAs per item
    threads            per CTA, 128 or 256; or, with source=shared, 256, 288 or 320
    gate_mode          0: one chain of 8 tensor-core accumulations; 1: four chains of 2, summed in order
    source             where state rows wait: registers; or shared memory, in lines of 128 bytes that are folded, stored
                       and multiplied one after the other (takes split=1, fold=late, state_first=False)
    fold               early: before the window's vectors are built; late: after, right before the products
    state_first        the state is asked for before the projection (and the PDL wait), not after
    records            read all tokens of a record at once, or only the pending ones, when their count is known
    bypass_l1          state loads don't allocate in L1
    stream_stores      the state is stored as streaming
    ctas_per_sm        CTAs of an SM to compile for, which caps registers and, with source=shared, the lines of a state
                       that there is room for at a time; 0: as many as never spill and hold whole states
    streamable         16-byte copies of projection and window (docs/operation.md, "Streamable"); False: by element
    conv_weight_dtype  of convolution weight and bias
    window             most entries of a dim-first window that is copied whole; None: those of the problem
    pdl                programmatic dependent launch
    """

    split: int = 1
    threads: int = 256
    gate_mode: int = 0
    source: Literal["registers", "shared"] = "registers"
    fold: Literal["early", "late"] = "early"
    state_first: bool = True
    records: Literal["all", "pending"] = "all"
    bypass_l1: bool = False
    stream_stores: bool = False
    ctas_per_sm: int = 0
    streamable: bool = True
    conv_weight_dtype: Literal["fp32", "bf16"] = "fp32"
    window: int | None = None
    pdl: bool = False


@dataclass(frozen=True)
class Common(chunked.Shape):
    """What decides the code in all forms. A plan's repr is the cache key."""

    kind: str
    gate_mode: int
    records: str
    stream_stores: bool

    @property
    def warps(self) -> int:
        return self.threads // 32

    @property
    def chains(self) -> int:
        return 1 if self.gate_mode == 0 else 4

    @property
    def fold_places(self) -> int:
        """Lanes whose fragments differ in `fold`: with four slots lanes t and t + 2 have the same."""
        return 4 * self.slots

    @property
    def fold_layout(self) -> Any:
        """Words: (hi or lo, half of a cell, place, cell)."""
        pitch = 4 * self.fold_places + 4
        return cute.make_layout((2, 2, self.fold_places, self.row_cells), stride=(1, 2, 4, pitch))

    @property
    def fold_bytes(self) -> int:
        return 4 * self.row_cells * (4 * self.fold_places + 4)

    @property
    def areas(self) -> dict[str, int]:
        """Bytes of shared memory by use."""
        raise NotImplementedError

    @property
    def smem_bytes(self) -> int:
        return sum(self.areas.values())


@dataclass(frozen=True)
class Plan(Common):
    """source=registers. gate_bytes: of a lane in one load of gate weights, 16 or 8."""

    split: int
    gate_bytes: int
    fold: str
    state_first: bool
    bypass_l1: bool
    asked_ctas: int

    @property
    def rows(self) -> int:
        """State rows, channels of each of q, k, v and gate features of a CTA."""
        return HEAD_DIM // self.split

    @property
    def row_tiles(self) -> int:
        """Tiles of 16 state rows, or of 16 gate features."""
        return self.rows // 16

    @property
    def column_parts(self) -> int:
        """Warps that share a tile of rows."""
        return self.warps // self.row_tiles

    @property
    def cells(self) -> int:
        """16-byte cells of a thread per row."""
        return self.row_cells // self.column_parts

    @property
    def gate_warp(self) -> int:
        """First of the warps that have a tile of gate features: where they can, they leave `weigh` to others."""
        return max(0, self.warps - _WEIGHING_WARPS - self.row_tiles)

    @property
    def token_groups(self) -> int:
        """Groups of tokens that different threads convolve; the second never reaches back into the window."""
        return 2 if self.tokens > 4 and 3 * self.rows <= self.threads else 1

    @property
    def group_tokens(self) -> int:
        return ceil_div(self.tokens, self.token_groups)

    @property
    def sent_units(self) -> int:
        """16-byte units of a token's q, k and Gamma that a CTA sends to each other."""
        return self.rows // 2

    @property
    def areas(self) -> dict[str, int]:
        """Bytes of shared memory by use."""
        rows, tokens = self.rows, self.tokens
        areas = {
            "taps": 12 * rows * self.weight_bytes,
            "bias": 3 * rows * self.weight_bytes,
            "x": 6 * rows * (self.history + tokens),
            "f_a": 2 * HEAD_DIM * tokens,
            "dt_bias": 4 * HEAD_DIM,
            "norm_weight": 4 * rows,
            "A_log": 4,
            "out_gate": 2 * rows * tokens,
            "beta": 4 * tokens,
            "old_key_gates": 4 * HEAD_DIM * tokens,
            "old_corrections": 4 * rows * tokens,
            "fold": self.fold_bytes,
            "fold_scale": 4 * HEAD_DIM,
            "gamma": self.gamma_bytes,
            "qkv": self.qkv_bytes,
            "raw_gates": 2 * rows * tokens,
            "fragments": self.fragment_bytes,
            "partials": self.partial_bytes,
            "pairs": 4 * self.pair_floats,
            "matrix": 8 * self.slots**2,
            "solution": 128 * self.solution_words,
            "squares": 4 * self.slots * chunked.WARPS,
            "sums": 4 * self.slots * chunked.WARPS,
            "barriers": 24,
        }
        if self.layout == "rows":
            areas["window"] = 6 * rows * self.window
        if self.column_parts > 1:
            areas["parts"] = 512 * self.tiles * self.warps
        return prologue.aligned(areas)

    @property
    def ctas_per_sm(self) -> int:
        """As asked for; else by shared memory and registers, 96 a thread, with 64 of state 128 or, in clusters, 168."""
        if self.asked_ctas:
            return self.asked_ctas
        registers = 96
        if self.cells == self.row_cells:
            registers = 128 if self.split == 1 else 168
        return min(65_536 // (registers * self.threads), prologue.SM_SMEM // (self.smem_bytes + prologue.RESERVED_SMEM))


@dataclass(frozen=True)
class LinesPlan(Common):
    """source=shared. staged: lines of the state that there is room for; gate_bytes as `Plan` has it."""

    staged: int
    gate_bytes: int
    ctas_per_sm: int

    @property
    def split(self) -> int:
        return 1

    @property
    def areas(self) -> dict[str, int]:
        row, tokens = 2 * HEAD_DIM, self.tokens
        areas = {
            "state": self.staged * chunked.LINE_BYTES,
            # x, f_a, the record's keys and gates; then the fragments.
            "inputs": max(row * (3 * (self.history + tokens) + tokens + 2 * tokens), self.fragment_bytes),
            "dt_bias": 4 * HEAD_DIM,
            "norm_weight": 4 * HEAD_DIM,
            "out_gate": row * tokens,
            "A_log": 4,
            "beta": 4 * tokens,
            "fold": self.fold_bytes,
            "fold_scale": 4 * HEAD_DIM,
            # Then A and B, a part per step.
            "gamma": max(self.gamma_bytes, self.partial_bytes),
            "qkv": self.qkv_bytes,
            "pairs": 4 * self.pair_floats,
            "matrix": 8 * self.slots**2,
            "solution": 128 * self.solution_words,
            "squares": 4 * self.slots * chunked.WARPS,
        }
        if self.layout == "rows":
            areas["window"] = 3 * row * self.window
        return prologue.aligned(areas)

    @property
    def fits(self) -> bool:
        return self.ctas_per_sm * (self.smem_bytes + prologue.RESERVED_SMEM) <= prologue.SM_SMEM


@dataclass(frozen=True)
class Compiled:
    binary: cubin.Binary
    plan: Plan | LinesPlan
    pdl: bool

    @property
    def resources(self) -> cubin.Resources:
        return self.binary.resources


def plan(problem: Problem, spec: Spec) -> Plan | LinesPlan:
    layout, window = arguments.window_rules(problem, spec.streamable, spec.window)
    common: dict[str, Any] = {
        "tokens": problem.tokens,
        "state_dtype": problem.state_dtype,
        "threads": spec.threads,
        "layout": layout,
        "window": window,
        "streamable": spec.streamable,
        "weight_dtype": spec.conv_weight_dtype,
        "terms": 2,
        "kind": problem.kind,
        "gate_mode": spec.gate_mode,
        "gate_bytes": 16,
        "records": spec.records,
        "stream_stores": spec.stream_stores,
    }
    if spec.source == "shared":
        ctas = spec.ctas_per_sm or 2
        plans = [LinesPlan(**common, staged=staged, ctas_per_sm=ctas) for staged in range(4, _FEWEST_LINES - 1, -1)]
        return next((p for p in plans if p.fits), plans[-1])
    return Plan(
        **common,
        split=spec.split,
        fold=spec.fold,
        state_first=spec.state_first,
        bypass_l1=spec.bypass_l1,
        asked_ctas=spec.ctas_per_sm,
    )


def unsupported(problem: Problem, spec: Spec, gpu: Gpu) -> str | None:
    """Why this pair can't run, or None. Pure: no CUDA."""
    if problem.kind != "replay":
        return f"kind={problem.kind}: only replay"
    if problem.state_dtype != "fp32":
        return f"state_dtype={problem.state_dtype}: deferred steps keep an FP32 state"
    for name, value, allowed in (
        ("split", spec.split, prologue.SPLITS),
        ("source", spec.source, ("registers", "shared")),
        ("threads", spec.threads, (256, 288, 320) if spec.source == "shared" else (128, 256)),
        ("gate_mode", spec.gate_mode, (0, 1)),
        ("fold", spec.fold, ("early", "late")),
        ("records", spec.records, ("all", "pending")),
        ("conv_weight_dtype", spec.conv_weight_dtype, ("fp32", "bf16")),
    ):
        if value not in allowed:
            return f"{name}={value!r} is not one of {', '.join(map(str, allowed))}"
    if spec.split == 1 and spec.threads < 256:
        return f"split=1 threads={spec.threads}: 128 rows take 256 threads"
    if not 0 <= spec.ctas_per_sm <= 8:
        return f"ctas_per_sm={spec.ctas_per_sm} must lie in 0..8"
    if spec.source == "shared":
        if spec.split > 1 or spec.fold == "early" or spec.state_first or spec.bypass_l1:
            return "source=shared takes split=1, fold=late, state_first=False, bypass_l1=False"
        most = 3 if spec.threads == 256 or (spec.threads == 288 and problem.tokens <= 4) else 2
        if spec.ctas_per_sm > most:
            return (
                f"threads={spec.threads} ctas_per_sm={spec.ctas_per_sm}: too few registers for {problem.tokens} tokens"
            )
    if spec.window is not None and not problem.tokens + 2 <= spec.window <= 16:
        return f"window={spec.window} must lie in {problem.tokens + 2}..16"
    if problem.requests > 65_535:
        return f"requests={problem.requests}: the grid takes at most 65535"
    p = plan(problem, spec)
    if isinstance(p, LinesPlan) and not p.fits:
        return f"{p.smem_bytes} bytes of shared memory leave no room for ctas_per_sm={p.ctas_per_sm}"
    if p.smem_bytes > gpu.smem_per_block:
        return f"{p.smem_bytes} bytes of shared memory exceed {gpu.smem_per_block}"
    return None


def compile(problem: Problem, spec: Spec, gpu: Gpu) -> Compiled:
    """From shapes alone; one binary serves all heads, requests and strides. Raises ValueError for unsupported pairs."""
    reason = unsupported(problem, spec, gpu)
    if reason is not None:
        raise ValueError(f"KdaFused: {reason}")
    p = plan(problem, spec)
    if _few_registers(p, gpu):
        p = replace(p, gate_bytes=8)
    binary = cubin.build(
        _host_lines if isinstance(p, LinesPlan) else _host,
        lambda: (arguments.placeholder(), p),
        arch=gpu.arch,
        threads=p.threads,
        cluster=p.split,
        choices=p,
    )
    return Compiled(binary, p, spec.pdl)


def _few_registers(p: Plan | LinesPlan, gpu: Gpu) -> bool:
    """Where gate weights by sixteen bytes spill."""
    if p.gate_mode == 0:
        return False
    if isinstance(p, Plan):
        return p.split == 1 and gpu.arch != "sm_90a"
    return p.ctas_per_sm > 2 and (p.tokens in (5, 7) or gpu.arch != "sm_90a")


def launch(compiled: Compiled, operands: StepOperands, stream: int) -> None:
    """Enqueue one step. Raises ValueError, naming the operand, for operands that the compiled kernel can't take."""
    o, p = operands, compiled.plan
    arguments.check("KdaFused", p, o)
    if o.lower_bound is not None and o.lower_bound * p.tokens < chunked.MIN_LOG_GAMMA:
        raise ValueError(f"lower_bound={o.lower_bound} is too low for {p.tokens} tokens")
    grid = (p.split * o.A_log.shape[0], o.slots.shape[0], 1)
    cubin.launcher(compiled.binary).launch(grid, arguments.values(o), stream, compiled.pdl)


@cute.jit
def _host(A: Arguments, P: cutlass.Constexpr) -> None:
    kda_fused(A, P).launch(
        grid=(P.split, 1, 1),
        block=(P.threads, 1, 1),
        cluster=(P.split, 1, 1),
        min_blocks_per_mp=P.ctas_per_sm,
        preferred_smem_carveout=100,
    )


@cute.jit
def _host_lines(A: Arguments, P: cutlass.Constexpr) -> None:
    kda_fused_lines(A, P).launch(
        grid=(1, 1, 1),
        block=(P.threads, 1, 1),
        min_blocks_per_mp=P.ctas_per_sm,
        preferred_smem_carveout=100,
    )


@dataclass(frozen=True)
class Shared(Operands):
    """A CTA's shared memory."""

    taps: Any  # [3, 4, rows]
    bias: Any  # [3, rows]
    norm_weight: Any  # [rows]
    old_key_gates: Any  # [tokens, 256] bf16
    old_corrections: Any  # [tokens, rows]
    fold: Any  # `Plan.fold_layout`
    fold_scale: Any  # [K] e^{L_n}
    gamma: Any  # [tokens, GAMMA_PITCH]
    qkv: Any  # [tokens, QKV_PITCH] bf16; v of this CTA's channels alone
    raw_gates: Any  # [tokens, rows] bf16
    fragments: Any  # `chunked.Shape.fragment_layout`
    partials: Any  # A and B, a part per step
    pairs: Any  # A and B
    matrix: Any  # T and C
    solution: Any  # T and C as fragments
    squares: Any  # sums of squares of o of this CTA's tiles, as `chunked.store_squares` has them
    sums: Any  # the same of all tiles, as received
    parts: Any  # [warps, tiles, lane, 4] products, to be summed
    barriers: Any


def _areas(P: Plan | LinesPlan) -> Any:
    """All shared memory, by `prologue.viewer`."""
    smem = SmemAllocator()
    area = smem.allocate_tensor(Uint8, cute.make_layout(P.smem_bytes), byte_alignment=ALIGNMENT)
    return prologue.side_by_side(P.areas, area.iterator.toint())


def allocate(P: Plan) -> Shared:
    view = _areas(P)
    x = view(BFloat16, "x", (P.rows, 3, P.history + P.tokens))
    return Shared(
        taps=view(P.conv_dtype, "taps", (P.rows, CONV_WIDTH, 3)),
        bias=view(P.conv_dtype, "bias", (P.rows, 3)),
        x=x,
        f_a=view(BFloat16, "f_a", P.tokens * HEAD_DIM),
        dt_bias=view(Float32, "dt_bias", HEAD_DIM),
        norm_weight=view(Float32, "norm_weight", P.rows),
        A_log=view(Float32, "A_log", 1),
        out_gate=view(BFloat16, "out_gate", (P.rows, P.tokens)),
        beta=view(BFloat16, "beta", (2, P.tokens)),
        window=view(BFloat16, "window", 3 * P.rows * P.window) if P.layout == "rows" else x,
        old_key_gates=view(BFloat16, "old_key_gates", 2 * HEAD_DIM * P.tokens),
        old_corrections=view(Float32, "old_corrections", (P.rows, P.tokens)),
        fold=view(Uint32, "fold", P.areas["fold"] // 4),
        fold_scale=view(Float32, "fold_scale", HEAD_DIM),
        gamma=view(Float32, "gamma", P.gamma_bytes // 4),
        qkv=view(BFloat16, "qkv", P.qkv_bytes // 2),
        raw_gates=view(BFloat16, "raw_gates", (P.rows, P.tokens)),
        fragments=view(Uint8, "fragments", P.fragment_bytes),
        partials=view(Float32, "partials", P.partial_bytes // 4),
        pairs=view(Float32, "pairs", P.pair_floats),
        matrix=view(Float32, "matrix", 2 * P.slots**2),
        solution=view(Uint32, "solution", 32 * P.solution_words),
        squares=view(Float32, "squares", P.slots * chunked.WARPS),
        sums=view(Float32, "sums", P.slots * chunked.WARPS),
        parts=view(Float32, "parts", (4, 32, P.tiles, P.warps)) if P.column_parts > 1 else None,
        barriers=view(Int64, "barriers", 3).iterator,
    )


@dataclass(frozen=True)
class SharedLines(Operands):
    """A CTA's shared memory with source=shared: as `Shared` has it, but for what is said here."""

    state: Any  # lines as `chunked.copy_line` has them
    old_key_gates: Any
    fragments: Any  # in the place of x, f_a and old_key_gates
    norm_weight: Any
    fold: Any
    fold_scale: Any
    gamma: Any
    partials: Any  # in the place of gamma
    qkv: Any
    pairs: Any
    matrix: Any
    solution: Any
    squares: Any


def allocate_lines(P: LinesPlan) -> SharedLines:
    view = _areas(P)
    entries = P.history + P.tokens
    x = view(BFloat16, "inputs", (HEAD_DIM, 3, entries))
    f_a = 6 * HEAD_DIM * entries
    return SharedLines(
        state=view(Uint8, "state", P.staged * chunked.LINE_BYTES),
        x=x,
        f_a=view(BFloat16, "inputs", P.tokens * HEAD_DIM, f_a),
        old_key_gates=view(BFloat16, "inputs", 2 * HEAD_DIM * P.tokens, f_a + 2 * HEAD_DIM * P.tokens),
        fragments=view(Uint8, "inputs", P.fragment_bytes),
        window=view(BFloat16, "window", 3 * HEAD_DIM * P.window) if P.layout == "rows" else x,
        dt_bias=view(Float32, "dt_bias", HEAD_DIM),
        norm_weight=view(Float32, "norm_weight", HEAD_DIM),
        out_gate=view(BFloat16, "out_gate", (HEAD_DIM, P.tokens)),
        A_log=view(Float32, "A_log", 1),
        beta=view(BFloat16, "beta", (2, P.tokens)),
        fold=view(Uint32, "fold", P.fold_bytes // 4),
        fold_scale=view(Float32, "fold_scale", HEAD_DIM),
        gamma=view(Float32, "gamma", P.gamma_bytes // 4),
        partials=view(Float32, "gamma", P.partial_bytes // 4),
        qkv=view(BFloat16, "qkv", P.qkv_bytes // 2),
        pairs=view(Float32, "pairs", P.pair_floats),
        matrix=view(Float32, "matrix", 2 * P.slots**2),
        solution=view(Uint32, "solution", 32 * P.solution_words),
        squares=view(Float32, "squares", P.slots * chunked.WARPS),
    )


@cute.kernel
def kda_fused(A: Arguments, P: cutlass.Constexpr) -> None:
    tid, _, _ = arch.thread_idx()
    column, request, _ = arch.block_idx()
    rank, head = column % P.split, column // P.split
    lane = tid % 32
    warp = arch.make_warp_uniform(tid // 32)

    # The slot must be the first load: behind the copies it comes back a microsecond later.
    # One load for slot and record row, on the first lanes, so that neither shares a scoreboard with the state.
    table = A.slots + Int64(request) * A.slots_stride * 4
    if lane > 0:
        table = A.record_rows + Int64(request) * 4
    mine = blocks.at(Int32, table, Int32(0))

    M = allocate(P)
    if const_expr(P.split > 1):
        blocks.declare_cluster(P.split)
    if tid == 0:
        arch.mbarrier_init(M.barriers + _VECTORS, 1)
        arch.mbarrier_init(M.barriers + _SUMS, 1)
        arch.mbarrier_init(M.barriers + _SOLUTION, 32)
        arch.mbarrier_init_fence()
    if const_expr(P.split > 1):
        arch.sync_warp()
        if tid == 0:
            sent = (P.split - 1) * P.tokens * P.sent_units * 16
            arch.mbarrier_arrive_and_expect_tx(M.barriers + _VECTORS, sent)
            arch.mbarrier_arrive_and_expect_tx(M.barriers + _SUMS, chunked.WARPS * P.slots * 4)
        arch.cluster_arrive_relaxed()

    at = place_of(A, tid, column, P)
    load_weights(A, M, at, P)
    gate_tile = rank * P.row_tiles + (warp - P.gate_warp)
    gate_weights = gate_product.registers(P)
    features = A.f_b + Int64(head * HEAD_DIM) * (2 * HEAD_DIM)
    if const_expr(P.row_tiles == P.warps):
        gate_product.load(gate_weights, features, gate_tile, lane, P)
    else:
        if warp >= P.gate_warp and warp < P.gate_warp + P.row_tiles:
            gate_product.load(gate_weights, features, gate_tile, lane, P)

    page, row = arch.shuffle_sync(mine, 0), arch.shuffle_sync(mine, 1)
    inputs = A.projected + Int64(request * P.tokens) * A.pitch * 2
    first = Int64(request * P.tokens) * at.D
    if page > 0:
        record = prologue.record_of(A, row, head)
        S = cute.make_rmem_tensor((4, 2, P.cells), Float32)

        if const_expr(P.layout == "rows"):
            conv_window.load_own(M, window_of(A, page, Int32(0)), at, P)
        if const_expr(P.records == "all"):
            load_record(M, record, Int32(P.tokens), at, P)
        if const_expr(P.state_first):
            load_rows(S, rows_of(A, page, at, P), P)
        arch.griddepcontrol_wait()
        arch.griddepcontrol_launch_dependents()
        prologue.load_projection(prologue.copy_rows, M, inputs, A.pitch, at, P)
        pending = Int32(0)
        if row >= 0:
            pending = blocks.at(Int32, A.pending, row)
        if const_expr(not P.state_first):
            # Keeps the state's loads behind the copies, which are waited for first.
            arch.sync_warp()
            load_rows(S, rows_of(A, page, at, P), P)
        if const_expr(P.records == "pending"):
            load_record(M, record, clamped(pending, P), at, P)
        if const_expr(P.layout != "rows"):
            conv_window.load_own(M, window_of(A, page, clamped(pending, P)), at, P)
        arch.cp_async_commit_group()
        arch.cp_async_wait_group(0)
        arch.sync_threads()

        # Not sooner: whatever stands behind its first use waits for it.
        n = clamped(pending, P)
        # From here on places and addresses are asked for anew, so that they aren't kept beside the state.
        at = here(A, P)
        warp, lane = at.warp, at.lane
        gate_tile = at.rank * P.row_tiles + (warp - P.gate_warp)
        exp_A = blocks.exp(M.A_log[0])
        if const_expr(P.row_tiles == P.warps):
            gate(M, gate_weights, exp_A, A.lower_bound, gate_tile, at, P)
        else:
            if warp >= P.gate_warp and warp < P.gate_warp + P.row_tiles:
                gate(M, gate_weights, exp_A, A.lower_bound, gate_tile, at, P)
        if at.tid < 3 * P.rows // 2 * P.token_groups:
            convolve(M, window_of(A, page, n), at, P)
        if warp >= P.warps - _WEIGHING_WARPS:
            weigh(M, n, exp_A, A.lower_bound, warp - (P.warps - _WEIGHING_WARPS), lane, P)
        arch.sync_threads()
        if const_expr(P.split > 1):
            arch.cluster_wait()
            send_vectors(M, at, P)

        if const_expr(P.fold == "early"):
            if n > 0:
                fold(A, S, M, page, n, P)
        if const_expr(P.split > 1):
            blocks.poll(M.barriers + _VECTORS, 0)
        chunked.build_fragments(M.fragments, M.qkv, M.gamma, A.scale, warp, P.warps, lane, P)
        at = here(A, P)
        if row >= 0:
            store_keys_and_gates(M, prologue.record_of(A, row, at.head), at, P)
        conv_window.store_own(M, window_of(A, page, n), at, P)
        arch.sync_threads()

        for i in range_constexpr(chunked.STEPS // P.warps):
            chunked.token_products(M.fragments, M.partials, warp + i * P.warps, lane, P)
        arch.sync_threads()
        if warp == P.warps - 1:
            beta = blocks.sigmoid(M.beta[at.head % 2, min(lane % P.slots, P.tokens - 1)].to(Float32))
            chunked.solve(M.partials, M.pairs, M.matrix, M.solution, beta, lane, P)
            if const_expr(P.column_parts == 1):
                arch.mbarrier_arrive(M.barriers + _SOLUTION)
        sums = chunked.accumulators(P)
        if const_expr(P.fold == "late"):
            if n > 0:
                fold(A, S, M, page, n, P)
        multiply(sums, S, M, warp // P.row_tiles, lane, P)
        if const_expr(P.column_parts == 1):
            arch.mbarrier_wait(M.barriers + _SOLUTION, 0)
            finish(A, sums, M, row, P)
        else:
            put_part(sums, M, warp, lane, P)
            arch.sync_threads()
            if warp < P.row_tiles:
                add_parts(sums, M, warp, lane, P)
                finish(A, sums, M, row, P)
    else:
        arch.cp_async_commit_group()
        arch.cp_async_wait_group(0)
        arch.griddepcontrol_wait()
        arch.griddepcontrol_launch_dependents()
        prologue.store_zeros(A.out + (first + at.channel) * 2, at, P)
        if const_expr(P.split > 1):
            arch.cluster_wait()


@cute.kernel
def kda_fused_lines(A: Arguments, P: cutlass.Constexpr) -> None:
    at = wide_prologue.place(A)
    _, request, _ = arch.block_idx()
    warp, lane = at.warp, at.lane

    # The slot must be the first load: behind the copies it comes back a microsecond later.
    page = blocks.at(Int32, A.slots + Int64(request) * A.slots_stride * 4, Int32(0))
    row = blocks.at(Int32, A.record_rows, request)

    M = allocate_lines(P)
    wide_prologue.load_vectors(A, M, at, P)
    arch.griddepcontrol_wait()
    arch.griddepcontrol_launch_dependents()
    wide_prologue.load_projection(A, M, request, at, P)
    if page > 0:
        # So that nothing later waits for the weights on its behalf.
        row = blocks.pinned(row)
        pending = Int32(0)
        if row >= 0:
            pending = blocks.at(Int32, A.pending, row)
        record = prologue.record_of(A, row, at.head)
        asked, start = Int32(P.tokens), Int32(0)
        if const_expr(P.records == "pending"):
            asked = clamped(pending, P)
        if const_expr(P.layout != "rows"):
            start = max(clamped(pending, P) - 1, Int32(0))
        load_keys(M, record, asked, at.tid, P)
        conv_window.load_all(M, conv_window.window_of(A, page, start), at, P)
        arch.cp_async_commit_group()
        u = cute.make_rmem_tensor((2, 2), Float32)
        gate_weights = gate_product.registers(P)
        taps = cute.make_rmem_tensor((2, CONV_WIDTH), P.conv_dtype)
        bias = cute.make_rmem_tensor(2, P.conv_dtype)
        state = prologue.state_of(A, page, at.head, P)
        if warp < chunked.WARPS:
            load_corrections(u, record, warp, lane, P)
            features = A.f_b + Int64(at.channel) * gate_product.ROW_BYTES
            gate_product.load(gate_weights, features, warp, lane, P)
            wide_prologue.load_taps(A, taps, bias, at, P)
        for line in range_constexpr(P.staged):
            if warp < chunked.WARPS:
                ask_line(M, state, Int32(line), at, P)
            arch.cp_async_commit_group()
        arch.cp_async_wait_group(P.staged)
        arch.sync_threads()

        # Not sooner: whatever stands behind its first use waits for it.
        n = clamped(pending, P)
        window = conv_window.window_of(A, page, max(n - 1, Int32(0)))
        exp_A = blocks.exp(M.A_log[0])
        if warp < chunked.WARPS:
            raw = gate_product.product(gate_weights, M.f_a, lane, P)
            chunked.store_gammas(raw, M.gamma, M.dt_bias, exp_A, A.lower_bound, record, warp, lane, P)
        if warp < chunked.CONVOLVING_WARPS:
            chunked.convolve_with(taps, bias, M, M.qkv, window, record, at.tid, P)
        if warp >= P.warps - _WEIGHING_WARPS:
            weigh(M, n, exp_A, A.lower_bound, warp - (P.warps - _WEIGHING_WARPS), lane, P)
        if const_expr(P.layout != "rows"):
            conv_window.store_all(M, window, at, P)
        arch.sync_threads()

        if warp < chunked.WARPS:
            chunked.build_fragments(M.fragments, M.qkv, M.gamma, A.scale, warp, chunked.WARPS, lane, P)
        if const_expr(P.layout == "rows"):
            conv_window.store_all(M, window, at, P)
        arch.sync_threads()

        if const_expr(P.warps == chunked.WARPS):
            chunked.token_products(M.fragments, M.partials, warp, lane, P)
            arch.sync_threads()
        if warp == P.warps - 1:
            if const_expr(P.warps > chunked.WARPS):
                for step in cutlass.range(chunked.STEPS, unroll=4):
                    chunked.token_products(M.fragments, M.partials, step, lane, P)
                arch.sync_warp()
            beta = blocks.sigmoid(M.beta[at.head % 2, min(lane % P.slots, P.tokens - 1)].to(Float32))
            chunked.solve(M.partials, M.pairs, M.matrix, M.solution, beta, lane, P)

        sums = chunked.accumulators(P)
        if warp < chunked.WARPS:
            old = corrections_fragment(u, n, lane, P)
            # Rolled: the compiler would put off the products of a line until the last one has arrived.
            for line in cutlass.range(P.lines, unroll=1):
                arch.cp_async_wait_group(P.staged - 1)
                slot = M.state.iterator.toint() + line % P.staged * chunked.LINE_BYTES
                advance_line(sums, M, old, slot, state, n, line, warp, lane, P)
                if const_expr(P.staged < P.lines):
                    if line + P.staged < P.lines:
                        arch.sync_warp()
                        ask_line(M, state, line + P.staged, again(A), P)
                arch.cp_async_commit_group()
        arch.sync_threads()

        # Asked for anew, so that less is kept in registers until here.
        at = again(A)
        warp, lane = at.warp, at.lane
        o = cute.make_rmem_tensor(4, Float32)
        if warp < chunked.WARPS:
            v = chunked.values(M.qkv, warp, lane, P)
            corrections, attended = chunked.finish(sums, v, M.solution, lane, P)
            for i in range_constexpr(4):
                o[i] = blocks.rounded(attended[i])
            chunked.store_squares(o, M.squares, warp, lane, P)
            if row >= 0:
                chunked.store_corrections(corrections, prologue.record_of(A, row, at.head).corrections, warp, lane, P)
        arch.sync_threads()
        if warp < chunked.WARPS:
            factors = chunked.output_factors(M.out_gate, M.norm_weight, warp, lane, P)
            chunked.store_outputs(o, factors, M.squares, A.eps, results_of(A, at, P), at.D, warp, lane, P)
    else:
        arch.cp_async_commit_group()
        arch.cp_async_wait_group(0)
        prologue.store_zeros(results_of(A, at, P), at, P)


@cute.jit
def again(A: Arguments) -> Place:
    """`wide_prologue.place`, from special registers read where this stands."""
    tid, head = blocks.special("%tid.x"), blocks.special("%ctaid.x")
    warp = arch.make_warp_uniform(tid // 32)
    return Place(tid, warp, tid % 32, Int32(0), head, head * HEAD_DIM, A.heads * HEAD_DIM)


@cute.jit
def results_of(A: Arguments, at: Place, P: cutlass.Constexpr) -> Int64:
    address: Int64 = A.out + (Int64(blocks.special("%ctaid.y") * P.tokens) * at.D + at.channel) * 2
    return address


@cute.jit
def clamped(pending: Int32, P: cutlass.Constexpr) -> Int32:
    """Tokens to fold."""
    return min(max(blocks.pinned(pending), Int32(0)), Int32(P.tokens))


@cute.jit
def load_keys(M: cutlass.Constexpr, record: Record, count: Int32, tid: Int32, P: cutlass.Constexpr) -> None:
    """Keys and gates of a record's first `count` tokens."""
    tokens = Int32(0)
    if record.row >= 0:
        tokens = count
    units = 2 * HEAD_DIM // UNIT
    keys = M.old_key_gates.iterator.toint()
    for i in range_constexpr(ceil_div(P.tokens * units, P.threads)):
        unit = tid + i * P.threads
        if unit < tokens * units:
            blocks.copy_async(keys + unit * 16, record.key_gates + Int64(unit) * 16, 16)


@cute.jit
def ask_line(M: cutlass.Constexpr, state: Int64, line: Int32, at: Place, P: cutlass.Constexpr) -> None:
    cells = M.state.iterator.toint() + (line % P.staged * chunked.LINE_BYTES + 16 * at.tid)
    chunked.copy_line(cells, state, line, at.warp, at.lane, Int64(0), False, P)


@cute.jit
def place_of(A: Arguments, tid: Int32, column: Int32, P: cutlass.Constexpr) -> Place:
    rank, head = column % P.split, column // P.split
    channel = head * HEAD_DIM + rank * P.rows
    return Place(tid, arch.make_warp_uniform(tid // 32), tid % 32, rank, head, channel, A.heads * HEAD_DIM)


@cute.jit
def here(A: Arguments, P: cutlass.Constexpr) -> Place:
    """`place_of`, from special registers read where this stands."""
    tid, column = blocks.special("%tid.x"), blocks.special("%ctaid.x")
    place: Place = place_of(A, tid, column, P)
    return place


@cute.jit
def window_of(A: Arguments, page: Int32, n: Int32) -> Window:
    """The history starts n - 1 entries in, if n tokens are pending."""
    window: Window = conv_window.window_of(A, page, max(n - 1, Int32(0)))
    return window


@cute.jit
def rows_of(A: Arguments, page: Int32, at: Place, P: cutlass.Constexpr) -> Int64:
    """Address of a thread's first cell: of rows 2g, 2g + 1 of its warp's tile, in its warp's part of the columns."""
    tile = at.rank * P.row_tiles + at.warp % P.row_tiles
    cell = (16 * tile + at.lane // 4 * 2) * _ROW_BYTES + at.warp // P.row_tiles * (P.cells * 64) + at.lane % 4 * 16
    address: Int64 = prologue.state_of(A, page, at.head, P) + Int64(cell)
    return address


@cute.jit
def load_weights(A: Arguments, M: cutlass.Constexpr, at: Place, P: cutlass.Constexpr) -> None:
    """All weights of this CTA but the gate's, by cp.async."""
    prologue.load_taps(prologue.copy_rows, A, M, Int64(at.D) * P.weight_bytes, 0, at, P)
    used, none = prologue.tap_units(P), Int64(0)
    rows = Rows(1, 1, HEAD_DIM // 4, first=used)
    prologue.copy_rows(M.dt_bias.iterator, A.dt_bias + Int64(at.head * HEAD_DIM) * 4, none, none, rows, at, P)
    rows = Rows(1, 1, P.rows // 4, first=used + HEAD_DIM // 4)
    prologue.copy_rows(M.norm_weight.iterator, A.norm_weight + Int64(at.rank * P.rows) * 4, none, none, rows, at, P)
    if at.tid == P.threads - 1:
        blocks.copy_async(M.A_log.iterator.toint(), A.A_log + Int64(at.head) * 4, 4)


@cute.jit
def load_record(M: cutlass.Constexpr, record: Record, count: Int32, at: Place, P: cutlass.Constexpr) -> None:
    """Keys and gates, and this CTA's rows of the corrections, of a record's first `count` tokens."""
    load_keys(M, record, count, at.tid, P)
    tokens = Int32(0)
    if record.row >= 0:
        tokens = count
    units = P.rows // 4
    corrections = M.old_corrections.iterator.toint()
    source = record.corrections + Int64(at.rank * P.rows) * 4
    for i in range_constexpr(ceil_div(P.tokens * units, P.threads)):
        unit = P.threads - 1 - at.tid + i * P.threads
        if unit < tokens * units:
            place = unit // units * (4 * HEAD_DIM) + unit % units * 16
            blocks.copy_async(corrections + unit * 16, source + Int64(place), 16)


@cute.jit
def load_rows(S: cute.Tensor, address: Int64, P: cutlass.Constexpr) -> None:
    """This thread's cells of its two state rows: (4, row, cell)."""
    priority = cute.nvgpu.CacheEvictionPriority.EVICT_NORMAL
    if const_expr(P.bypass_l1):
        priority = cute.nvgpu.CacheEvictionPriority.NO_ALLOCATE
    load = cute.nvgpu.CopyG2ROp()
    atom = cute.make_copy_atom(load, Float32, num_bits_per_copy=128, l1c_evict_priority=priority)
    part = _cells(address, P)
    for c in range_constexpr(P.cells):
        for row in range_constexpr(2):
            cute.copy(atom, part[None, row, c], S[None, row, c])


def _cells(address: Int64, P: Plan) -> cute.Tensor:
    pointer = cute.make_ptr(Float32, address, GMEM, assumed_align=16)
    return cute.make_tensor(pointer, cute.make_layout((4, 2, P.cells), stride=(1, HEAD_DIM, 16)))


@cute.jit
def gate(
    M: cutlass.Constexpr,
    weights: cute.Tensor,
    exp_A: Float32,
    lower_bound: Float32,
    tile: Int32,
    at: Place,
    P: cutlass.Constexpr,
) -> None:
    """Gamma and raw gates of 16 features, those of a tile of the item's eight."""
    raw = gate_product.product(weights, M.f_a, at.lane, P)
    # The record still holds the old gates.
    none = Record(Int32(-1), Int64(0), Int64(0))
    chunked.store_gammas(raw, M.gamma, M.dt_bias, exp_A, lower_bound, none, tile, at.lane, P)
    gates = cute.make_tensor(
        cute.recast_ptr(M.raw_gates.iterator, dtype=Uint32), cute.make_layout((P.rows // 2, P.tokens))
    )
    place = 8 * (tile - at.rank * P.row_tiles) + at.lane // 4
    for side in range_constexpr(2):
        token = at.lane % 4 * 2 + side
        if token < P.tokens:
            gates[place, token] = blocks.pack(raw[side], raw[2 + side])


@cute.jit
def convolve(M: cutlass.Constexpr, window: Window, at: Place, P: cutlass.Constexpr) -> None:
    """Two channels of one of q, k, v, a group of tokens; a window that is copied whole is rolled in shared memory."""
    pairs = P.rows // 2
    group = at.tid // (3 * pairs)
    part, pair = at.tid // pairs % 3, at.tid % pairs
    x = conv_window.inputs_by_pair(M, P)
    results = cute.make_tensor(
        cute.recast_ptr(M.qkv.iterator, dtype=Uint32),
        cute.make_layout((HEAD_DIM // 2, 3, P.tokens), stride=(1, HEAD_DIM // 2, chunked.QKV_PITCH // 2)),
    )
    weight = cute.make_rmem_tensor((2, CONV_WIDTH), P.conv_dtype)
    bias = cute.make_rmem_tensor(2, P.conv_dtype)
    conv_window.take_weights(weight, bias, M, pair, part, P)
    past = cute.make_rmem_tensor((2, HISTORY), BFloat16)
    conv_window.take_past(past, x, M, window, group, pair, part, P)
    seen = cute.make_rmem_tensor((2, CONV_WIDTH), Float32)
    for e in range_constexpr(HISTORY):
        for i in range_constexpr(2):
            seen[i, e + 1] = past[i, e].to(Float32)
    for j in range_constexpr(P.group_tokens):
        t = group * P.group_tokens + j
        if t < P.tokens:
            new = cute.make_rmem_tensor(2, BFloat16)
            cute.autovec_copy(x[None, pair, part, P.history + t], new)
            y = cute.make_rmem_tensor(2, Float32)
            for i in range_constexpr(2):
                for e in range_constexpr(HISTORY):
                    seen[i, e] = seen[i, e + 1]
                seen[i, HISTORY] = new[i].to(Float32)
                y[i] = bias[i].to(Float32)
                for tap in range_constexpr(CONV_WIDTH):
                    y[i] += weight[i, tap].to(Float32) * seen[i, tap]
            rounded = blocks.pack(y[0] * blocks.sigmoid(y[0]), y[1] * blocks.sigmoid(y[1]))
            results[at.rank * pairs + pair, part, t] = rounded
    if const_expr(P.layout == "rows"):
        if group == 0:
            conv_window.roll(past, x, M, window, pair, part, P)


@cute.jit
def weigh(
    M: cutlass.Constexpr,
    n: Int32,
    exp_A: Float32,
    lower_bound: Float32,
    index: Int32,
    lane: Int32,
    P: cutlass.Constexpr,
) -> None:
    """k^_t e^{L_n - L_t} of the n pending tokens as B fragments, and e^{L_n}: two columns, by one of two warps.

    Whatever stands in a record past the pending tokens has no part in it.
    """
    pair = 32 * index + lane
    words = cute.make_tensor(
        cute.recast_ptr(M.old_key_gates.iterator, dtype=Uint32),
        cute.make_layout((HEAD_DIM // 2, 2, P.tokens), stride=(1, HEAD_DIM // 2, HEAD_DIM)),
    )
    squares = cute.make_rmem_tensor(P.slots, Float32)
    squares.fill(Float32(0))
    for t in range_constexpr(P.tokens):
        for half in range_constexpr(2):
            word = words[32 * half + lane, 0, t]
            low, high = blocks.low_half(word), blocks.high_half(word)
            squares[t] += low * low + high * high
    norms = blocks.rsqrt(blocks.row_sums(squares, P.slots, 32, lane) + Float32(blocks.KEY_EPS))

    biases = cute.make_rmem_tensor(2, Float32)
    cute.autovec_copy(
        cute.make_tensor(M.dt_bias.iterator, cute.make_layout((2, HEAD_DIM // 2), stride=(1, 2)))[None, pair], biases
    )
    later = cute.make_rmem_tensor(2, Float32)  # log decay after token t, base 2
    weighed = cute.make_rmem_tensor((2, P.slots), Float32)
    later.fill(Float32(0))
    weighed.fill(Float32(0))
    for t in range_constexpr(P.tokens - 1, -1, -1):
        norm = arch.shuffle_sync(norms, t * (32 // P.slots))
        key, raw = words[pair, 0, t], words[pair, 1, t]
        for i in range_constexpr(2):
            k = blocks.high_half(key) if const_expr(i == 1) else blocks.low_half(key)
            g = blocks.high_half(raw) if const_expr(i == 1) else blocks.low_half(raw)
            aged = k * norm * cute.math.exp2(later[i], approx=True, ftz=True)
            log = blocks.log_decay(g, biases[i], exp_A, lower_bound) * Float32(blocks.LOG2E)
            weighed[i, t] = aged if t < n else Float32(0)
            later[i] = later[i] + (log if t < n else Float32(0))
    for i in range_constexpr(2):
        later[i] = cute.math.exp2(later[i], approx=True, ftz=True)
    scales = cute.make_tensor(M.fold_scale.iterator, cute.make_layout((2, HEAD_DIM // 2), stride=(1, 2)))
    cute.autovec_copy(later, scales[None, pair])

    # Columns 2 pair, 2 pair + 1: of half `pair % 2` of cell `pair / 8`, there columns g, g + 1 of the MMA.
    fragments = cute.make_tensor(M.fold.iterator, P.fold_layout)
    for t in range_constexpr(P.slots // 2):
        for i in range_constexpr(2):
            two = cute.make_rmem_tensor(2, Uint32)
            two[0], two[1] = chunked.split_rounded(weighed[i, 2 * t], weighed[i, 2 * t + 1])
            place = fold_place(pair % 8 // 2 * 2 + i, t)
            cute.autovec_copy(two, fragments[None, pair % 2, place, pair // 8])


def fold_place(g: Any, t: Any) -> Any:
    """Where the fragment of lane 4g + t lies: spread so that neither side has bank conflicts."""
    return 8 * t + (g + 2 * t) % 8


@cute.jit
def send_vectors(M: cutlass.Constexpr, at: Place, P: cutlass.Constexpr) -> None:
    """q, k and Gamma of this CTA's channels to the same places of the other CTAs, by 16 bytes."""
    units, values = P.rows // UNIT, P.rows // 4
    total = P.tokens * P.sent_units
    barrier = M.barriers.toint() + 8 * _VECTORS
    qkv, gamma = M.qkv.iterator.toint(), M.gamma.iterator.toint()
    for i in range_constexpr(ceil_div(total * (P.split - 1), P.threads)):
        index = at.tid + i * P.threads
        if index < total * (P.split - 1):
            cta = (at.rank + 1 + index // total) % P.split
            token, unit = index % total // P.sent_units, index % P.sent_units
            place = gamma + (token * chunked.GAMMA_PITCH + at.rank * P.rows) * 4 + unit * 16
            if unit >= values:
                unit -= values
                channel = unit // units * HEAD_DIM + at.rank * P.rows + unit % units * UNIT
                place = qkv + (token * chunked.QKV_PITCH + channel) * 2
            four = cute.make_rmem_tensor(4, Uint32)
            source = cute.make_ptr(Uint32, place, SMEM, assumed_align=16)
            cute.autovec_copy(cute.make_tensor(source, cute.make_layout(4)), four)
            blocks.send_quad(blocks.peer(place, cta), blocks.peer(barrier, cta), four)


@cute.jit
def fold(A: Arguments, S: cute.Tensor, M: cutlass.Constexpr, page: Int32, n: Int32, P: cutlass.Constexpr) -> None:
    """S e^{L_n} + U K of this thread's cells, in place and to the page.

    A cell's columns 0, 1 and 2, 3 of both rows are each what an m16n8 accumulator has on this lane. The K axis holds
    tokens: up to eight as (hi, lo) of the corrections, with the keys' hi and then their lo; up to four as (hi, lo, hi,
    lo) against (hi, hi, lo, lo).
    """
    at = here(A, P)
    lane, part = at.lane, at.warp // P.row_tiles
    u = old_corrections(M, n, at.warp % P.row_tiles, lane, P)
    atom = _store_atom(P)
    target = _cells(rows_of(A, page, at, P), P)
    for c in range_constexpr(P.cells):
        fold_cell(S[None, 0, c], S[None, 1, c], u, M, part * P.cells + c, lane, P)
        for row in range_constexpr(2):
            cute.copy(atom, S[None, row, c], target[None, row, c])


def _store_atom(P: Plan) -> Any:
    mode = cute.nvgpu.StoreCacheMode.STREAMING if P.stream_stores else cute.nvgpu.StoreCacheMode.NONE
    return cute.make_copy_atom(cute.nvgpu.CopyR2GOp(), Float32, num_bits_per_copy=128, store_cache_mode=mode)


@cute.jit
def fold_cell(
    x: cute.Tensor,
    y: cute.Tensor,
    u: tuple[Uint32, ...],
    M: cutlass.Constexpr,
    cell: Int32,
    lane: Int32,
    P: cutlass.Constexpr,
) -> None:
    """A cell of each of the thread's two rows, x and y, in place. u: of `old_corrections`."""
    fragments = cute.make_tensor(
        cute.recast_ptr(M.fold.iterator, dtype=Uint32),
        cute.make_layout((4, P.fold_places, P.row_cells), stride=(1, 4, 4 * P.fold_places + 4)),
    )
    scales = cute.make_tensor(M.fold_scale.iterator, cute.make_layout((4, 4, P.row_cells), stride=(1, 4, 16)))
    scale = cute.make_rmem_tensor(4, Float32)
    keys = cute.make_rmem_tensor(4, Uint32)
    cute.autovec_copy(scales[None, lane % 4, cell], scale)
    cute.autovec_copy(fragments[None, fold_place(lane // 4, lane % (P.slots // 2)), cell], keys)
    for half in range_constexpr(2):
        i, j = 2 * half, 2 * half + 1
        sums = (x[i] * scale[i], x[j] * scale[j], y[i] * scale[i], y[j] * scale[j])
        if const_expr(P.slots == 8):
            sums = blocks.mma_16816(sums, u, (keys[i], keys[i]))
            sums = blocks.mma_16816(sums, u, (keys[j], keys[j]))
        else:
            sums = blocks.mma_16816(sums, u, (keys[i], keys[j]))
        x[i], x[j], y[i], y[j] = sums


@cute.jit
def advance_line(
    sums: cute.Tensor,
    M: cutlass.Constexpr,
    u: tuple[Uint32, ...],
    slot: Int32,
    state: Int64,
    n: Int32,
    line: Int32,
    warp: Int32,
    lane: Int32,
    P: cutlass.Constexpr,
) -> None:
    """Fold a line of the warp's rows, for which each of its lanes has waited, add its products, store it if n > 0.

    slot    shared address of the line's LINE_BYTES
    state   address of the item's state

    With n = 0 the fold leaves a line as it is.
    """
    g, t = lane // 4, lane % 4
    piece = 32 * chunked.WARPS * 16  # of the warp's rows 4j .. 4j + 3, from one j to the next
    cells = slot + 512 * warp
    arch.sync_warp()
    for half in range_constexpr(2):
        if const_expr(half == 1 and P.tiles == 2 and P.ctas_per_sm > 2):
            arch.sync_warp()  # both halves at once take too many registers
        first = cells + (g // 2 * piece + g % 2 * 256 + (g % 2 ^ half) * 64 + t * 16)
        x = cute.make_rmem_tensor(4, Float32)
        y = cute.make_rmem_tensor(4, Float32)
        cute.autovec_copy(_shared_cell(first), x)
        cute.autovec_copy(_shared_cell(first + 128), y)
        fold_cell(x, y, u, M, 2 * line + half, lane, P)
        cute.autovec_copy(x, _shared_cell(first))
        cute.autovec_copy(y, _shared_cell(first + 128))
        chunked.multiply_cell(sums, _words(x), _words(y), M.fragments, 2 * line + half, lane, P)
    if n > 0:
        arch.sync_warp()
        # Asked for anew, so that nothing but the state's address is kept in registers for it.
        tid = blocks.special("%tid.x") & 511  # which is known not to be negative
        warp, lane = tid // 32, tid % 32
        cells = slot + 512 * warp
        rows = state + Int64((16 * warp + lane // 8) * _ROW_BYTES + line * 128 + lane % 8 * 16)
        target = cute.make_tensor(
            cute.make_ptr(Float32, rows, GMEM, assumed_align=16), cute.make_layout((4, 4), stride=(1, 4 * HEAD_DIM))
        )
        for j in range_constexpr(4):
            four = cute.make_rmem_tensor(4, Float32)
            cute.autovec_copy(_shared_cell(cells + (lane ^ (lane // 16 * 4)) * 16 + j * piece), four)
            cute.copy(_store_atom(P), four, target[None, j])


def _shared_cell(address: Int32) -> cute.Tensor:
    return cute.make_tensor(cute.make_ptr(Float32, address, SMEM, assumed_align=16), cute.make_layout(4))


@cute.jit
def old_corrections(
    M: cutlass.Constexpr, n: Int32, tile: Int32, lane: Int32, P: cutlass.Constexpr
) -> tuple[Uint32, ...]:
    """The pending tokens' corrections of 16 rows as A fragment: see `fold`."""
    pairs = cute.make_tensor(
        M.old_corrections.iterator, cute.make_layout((2, P.rows // 2, P.tokens), stride=(1, 2, P.rows))
    )
    token = chunked.first_token(lane, P)
    u = cute.make_rmem_tensor((2, 2), Float32)
    for side in range_constexpr(2):
        cute.autovec_copy(pairs[None, 8 * tile + lane // 4, min(token + side, P.tokens - 1)], u[None, side])
    fragment: tuple[Uint32, ...] = corrections_fragment(u, n, lane, P)
    return fragment


@cute.jit
def load_corrections(u: cute.Tensor, record: Record, warp: Int32, lane: Int32, P: cutlass.Constexpr) -> None:
    """What `corrections_fragment` takes, of a warp's 16 rows, from the record."""
    u.fill(Float32(0))
    if record.row >= 0:
        pairs = cute.make_tensor(
            cute.make_ptr(Float32, record.corrections, GMEM, assumed_align=8),
            cute.make_layout((2, HEAD_DIM // 2, P.tokens), stride=(1, 2, HEAD_DIM)),
        )
        token = chunked.first_token(lane, P)
        for side in range_constexpr(2):
            cute.autovec_copy(pairs[None, 8 * warp + lane // 4, min(token + side, P.tokens - 1)], u[None, side])


@cute.jit
def corrections_fragment(u: cute.Tensor, n: Int32, lane: Int32, P: cutlass.Constexpr) -> tuple[Uint32, ...]:
    """A fragment of `fold`.

    u: (row, token) of the lane's two rows and its two tokens, `chunked.first_token` and the next
    """
    token = chunked.first_token(lane, P)
    for side in range_constexpr(2):
        for row in range_constexpr(2):
            u[row, side] = u[row, side] if token + side < n else Float32(0)
    high_x, low_x = chunked.split_rounded(u[0, 0], u[0, 1])
    high_y, low_y = chunked.split_rounded(u[1, 0], u[1, 1])
    if const_expr(P.slots == 8):
        return high_x, high_y, low_x, low_y
    x = high_x if lane % 4 < 2 else low_x
    y = high_y if lane % 4 < 2 else low_y
    return x, y, x, y


@cute.jit
def store_keys_and_gates(M: cutlass.Constexpr, record: Record, at: Place, P: cutlass.Constexpr) -> None:
    """Keys and raw gates of this CTA's channels to the record."""
    units = P.rows // UNIT
    total = 2 * P.tokens * units
    for i in range_constexpr(ceil_div(total, P.threads)):
        index = at.tid + i * P.threads
        if index < total:
            token, unit = index // (2 * units), index % (2 * units)
            channel = at.rank * P.rows + unit * UNIT
            place = M.qkv.iterator.toint() + (token * chunked.QKV_PITCH + HEAD_DIM + channel) * 2
            if unit >= units:
                channel += HEAD_DIM - P.rows
                place = M.raw_gates.iterator.toint() + (token * P.rows + (unit - units) * UNIT) * 2
            blocks.copy_out(place, record.key_gates + Int64(token * (2 * HEAD_DIM) + channel) * 2)


@cute.jit
def multiply(
    sums: cute.Tensor, S: cute.Tensor, M: cutlass.Constexpr, part: Int32, lane: Int32, P: cutlass.Constexpr
) -> None:
    """Add the products of this thread's cells with the window's vectors."""
    address = M.fragments.iterator.toint() + part * (P.cells * P.step_bytes)
    pointer = cute.make_ptr(Uint8, address, SMEM, assumed_align=16)
    fragments = cute.make_tensor(pointer, cute.make_layout(P.cells * P.step_bytes))
    for c in range_constexpr(P.cells):
        x = cute.make_rmem_tensor(4, Float32)
        y = cute.make_rmem_tensor(4, Float32)
        for e in range_constexpr(4):
            x[e], y[e] = S[e, 0, c], S[e, 1, c]
        chunked.multiply_cell(sums, _words(x), _words(y), fragments, Int32(c), lane, P)


def _words(x: cute.Tensor) -> cute.Tensor:
    return cute.make_tensor(cute.recast_ptr(x.iterator, dtype=Uint32), cute.make_layout(4))


@cute.jit
def put_part(sums: cute.Tensor, M: cutlass.Constexpr, warp: Int32, lane: Int32, P: cutlass.Constexpr) -> None:
    for tile in range_constexpr(P.tiles):
        total = cute.make_rmem_tensor(4, Float32)
        for i in range_constexpr(4):
            total[i] = sums[i, 0, tile] + sums[i, 1, tile]
        cute.autovec_copy(total, M.parts[None, lane, tile, warp])


@cute.jit
def add_parts(sums: cute.Tensor, M: cutlass.Constexpr, row_tile: Int32, lane: Int32, P: cutlass.Constexpr) -> None:
    """The sums of all warps that share a tile of rows."""
    sums.fill(Float32(0))
    for part in range_constexpr(P.column_parts):
        for tile in range_constexpr(P.tiles):
            values = cute.make_rmem_tensor(4, Float32)
            cute.autovec_copy(M.parts[None, lane, tile, part * P.row_tiles + row_tile], values)
            for i in range_constexpr(4):
                sums[i, part % 2, tile] = sums[i, part % 2, tile] + values[i]


@cute.jit
def finish(A: Arguments, sums: cute.Tensor, M: cutlass.Constexpr, row: Int32, P: cutlass.Constexpr) -> None:
    """Corrections and outputs of a warp's tile of rows."""
    # Asked for anew, so that less is kept in registers until here.
    at = here(A, P)
    tile = at.warp % P.row_tiles
    own_tile = at.rank * P.row_tiles + tile  # of the item's eight
    v = chunked.values(M.qkv, own_tile, at.lane, P)
    u, attended = chunked.finish(sums, v, M.solution, at.lane, P)
    o = cute.make_rmem_tensor(4, Float32)
    for i in range_constexpr(4):
        o[i] = blocks.rounded(attended[i])
    chunked.store_squares(o, M.squares, own_tile, at.lane, P)
    if const_expr(P.split > 1):
        send_squares(M, own_tile, at.lane, P)
    factors = chunked.output_factors(M.out_gate, M.norm_weight, tile, at.lane, P)
    if row >= 0:
        chunked.store_corrections(u, prologue.record_of(A, row, at.head).corrections, own_tile, at.lane, P)
    first = Int64(blocks.special("%ctaid.y") * P.tokens)
    results = A.out + (first * at.D + at.head * HEAD_DIM) * 2
    if const_expr(P.split > 1):
        blocks.poll(M.barriers + _SUMS, 0)
        chunked.store_outputs(o, factors, M.sums, A.eps, results, at.D, own_tile, at.lane, P)
    else:
        arch.sync_threads()
        chunked.store_outputs(o, factors, M.squares, A.eps, results, at.D, own_tile, at.lane, P)


@cute.jit
def send_squares(M: cutlass.Constexpr, own_tile: Int32, lane: Int32, P: cutlass.Constexpr) -> None:
    """A tile's sums of squares, left by `chunked.store_squares`, to every CTA."""
    arch.sync_warp()
    if lane < P.slots:
        place = lane * chunked.WARPS + (own_tile ^ (lane // 4 * 4))
        square = M.squares[place]
        address, barrier = M.sums.iterator.toint() + place * 4, M.barriers.toint() + 8 * _SUMS
        for cta in range_constexpr(P.split):
            blocks.send(blocks.peer(address, Int32(cta)), blocks.peer(barrier, Int32(cta)), square)
