"""KDA commit: fold n recorded tokens into the state of every (layer, request, head).

states       L x [slots, H, V=128, K=128]   bf16 or f32, by address table; source page read,
             destination written
corrections  L x [rows, H, Q, 128]          f32, by address table
key_gates    L x [rows, H, Q, 256]          bf16, by address table: keys, then raw gates
A_log        [L, H]          f32
dt_bias      [L, H, 128]     f32
source, length, destination, record_rows, boundary_length, boundary_slot   [R]  int32

    S_n = S_0 * e^{L_n} + sum_{t<n} u_t (k^_t e^{L_n - L_t})

Two kernels, both with CTAs of 128 threads, by where pages wait (`Options.source`):
  ring               `commit_ring`: a CTA has some heads of a request, whose pages pass through two
                     stages
  bulk, registers    `commit_rows`: a CTA has some rows of a page, and loads all at once
What they share: `commit_fold`. Source: docs/operation.md, "Commit: folding n accepted tokens".
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd
from typing import Literal

from kda_kernels import step
from kda_kernels.device import cubin
from kda_kernels.device.gpu import Gpu
from kda_kernels.operands import CommitOperands
from kda_kernels.problem import HEAD_DIM, MAX_TOKENS, Problem, StateDtype
from kda_kernels.variants import commit_fold, commit_ring, commit_rows
from kda_kernels.variants.commit_fold import CTAS_PER_SM, Plan

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
"""Most CTAs of an SM by (source, rows_per_cta, columns): BF16, BF16 with align, FP32, FP32 with
align.

Found by compiling for ever more of them, on every target, until a thread's registers no longer
suffice and the compiler spills, or the SM's shared memory. Whether the compiler still makes them so
tests/kernels/test_commit.py asks of each.
"""


@dataclass(frozen=True)
class Options:
    """Compile-time choices, and two of the launch.

    store          direct: results go to global memory from registers; bulk: in place, then out by a
                   bulk copy (ring)
    align          with block boundaries
    heads_per_cta  launch: most heads of a CTA; 1 unless ring
    pdl            launch: programmatic dependent launch
    source         where pages wait: ring, bulk (shared memory), registers
    rows_per_cta   rows of a CTA's page; 128 if ring
    columns        columns of a thread, 4 or 8; 8 if ring. 4 take half the registers for keys, and
                   8-byte rows of BF16
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
    options: Options
    plan: Plan

    @property
    def resources(self) -> cubin.Resources:
        return self.binary.resources


def heads_of_cta(heads: int, heads_per_cta: int) -> int:
    """Heads of a chunk: the greatest common divisor, so that chunks are equal."""
    return gcd(heads, heads_per_cta)


def most_ctas(state_dtype: StateDtype, options: Options) -> int:
    """CTAs of an SM that a kernel can be compiled for: all fit and none spills."""
    if options.source == "ring":
        return CTAS_PER_SM
    most = _MOST_CTAS[options.source, options.rows_per_cta, options.columns]
    return most[2 * (state_dtype == "fp32") + options.align]


def plan(problem: Problem, options: Options) -> Plan:
    dtype = problem.state_dtype
    return Plan(
        state_dtype=dtype,
        store=options.store,
        align=options.align,
        source=options.source,
        rows_per_cta=options.rows_per_cta,
        columns=options.columns,
        ctas_per_sm=options.ctas_per_sm or most_ctas(dtype, options),
        hints=options.hints,
    )


def unsupported(problem: Problem, options: Options, gpu: Gpu) -> str | None:
    """Why this pair can't run, or None. Pure: no CUDA."""
    if not problem.folds_only:
        return f"kind={problem.kind}: only commit and flush"
    if why := step.not_allowed([("store", options.store, ("direct", "bulk"))]):
        return why
    if options.heads_per_cta < 1:
        return f"heads_per_cta={options.heads_per_cta} must be >= 1"
    if why := _source_refused(problem.state_dtype, options):
        return why
    if options.align and problem.kind == "flush":
        return "align: a flush has no block boundary"
    if max(problem.requests, problem.layers) > 65_535:
        return f"requests={problem.requests}, layers={problem.layers}: the grid takes at most 65535 of each"
    return None


def _source_refused(state_dtype: StateDtype, options: Options) -> str | None:
    """Why a source can't have the other choices, or None."""
    if options.source == "ring":
        if (options.rows_per_cta, options.columns, options.ctas_per_sm, options.hints) != (
            HEAD_DIM,
            8,
            0,
            False,
        ):
            return f"source=ring has rows_per_cta={HEAD_DIM}, columns=8, ctas_per_sm=0 and no hints"
        return None
    if why := step.not_allowed([("source", options.source, ("ring", "bulk", "registers"))]):
        return why
    if (options.store, options.heads_per_cta) != ("direct", 1):
        return f"source={options.source} has store=direct and heads_per_cta=1, not {options.store} and {options.heads_per_cta}"
    if (options.source, options.rows_per_cta, options.columns) not in _MOST_CTAS:
        return f"rows_per_cta={options.rows_per_cta}, columns={options.columns}: takes 32, 64, {HEAD_DIM} and 4, 8"
    most = most_ctas(state_dtype, options)
    if not 0 <= options.ctas_per_sm <= most:
        return f"ctas_per_sm={options.ctas_per_sm} is not within 0..{most}: more don't fit or spill"
    return None


def compile(problem: Problem, options: Options, gpu: Gpu) -> Compiled:
    """From shapes alone; one binary serves every size. Raises ValueError for unsupported pairs."""
    step.require("KdaCommit", unsupported(problem, options, gpu))
    p = plan(problem, options)
    binary = cubin.build(
        commit_ring.HOST if options.source == "ring" else commit_rows.HOST,
        lambda: (commit_fold.placeholder(), p),
        arch=gpu.arch,
        threads=p.threads,
        cluster=1,
        choices=p,
    )
    return Compiled(binary, options, p)


def launch(compiled: Compiled, operands: CommitOperands, stream: int) -> None:
    """Enqueue one commit over all layers and requests of the operands. Raises ValueError for
    operands that don't fit.

    Row and slot strides must be multiples of 16 bytes.
    """
    _check(compiled, operands)
    o, options, p = operands, compiled.options, compiled.plan
    heads, tokens = o.corrections[0].shape[1], o.corrections[0].shape[2]
    chunk = heads_of_cta(heads, options.heads_per_cta)
    values = commit_fold.Arguments(
        state_table=o.state_table.data_ptr(),
        corrections_table=o.corrections_table.data_ptr(),
        key_gates_table=o.key_gates_table.data_ptr(),
        A_log=o.A_log.data_ptr(),
        dt_bias=o.dt_bias.data_ptr(),
        source=o.source.data_ptr(),
        length=o.length.data_ptr(),
        destination=o.destination.data_ptr(),
        record_rows=o.record_rows.data_ptr(),
        boundary_length=0 if o.boundary_length is None else o.boundary_length.data_ptr(),
        boundary_slot=0 if o.boundary_slot is None else o.boundary_slot.data_ptr(),
        heads=heads,
        chunk=chunk,
        tokens=tokens,
        lower_bound=o.lower_bound,
    )
    grid = (heads // chunk * p.parts, o.source.shape[0], len(o.states))
    cubin.launcher(compiled.binary).launch(grid, tuple(values), stream, options.pdl)


def _check(compiled: Compiled, operands: CommitOperands) -> None:
    """Raises ValueError for operands that a compiled kernel can't take."""
    options, p = compiled.options, compiled.plan
    state, corrections, key_gates = (
        operands.states[0],
        operands.corrections[0],
        operands.key_gates[0],
    )
    if state.element_size() != p.item_bytes:
        raise ValueError(f"states are {state.dtype}, the kernel was compiled for {p.state_dtype}")
    if options.align != (
        operands.boundary_slot is not None and operands.boundary_length is not None
    ):
        raise ValueError(
            f"align={options.align} must match whether boundary_length and boundary_slot are given"
        )
    for name, tensor in (("states", state), ("corrections", corrections), ("key_gates", key_gates)):
        if tensor.stride(0) * tensor.element_size() % 16:
            raise ValueError(
                f"{name}: leading stride {tensor.stride(0)} must be a multiple of 16 bytes"
            )
    if corrections.shape[2] > MAX_TOKENS:
        raise ValueError(
            f"records hold {corrections.shape[2]} tokens, the kernel folds at most {MAX_TOKENS}"
        )
