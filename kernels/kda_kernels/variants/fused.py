"""KDA replay steps: pending tokens folded into the state, then a window from it, in one pass over
the state.

projected   [requests * tokens, pitch]     bf16   q, k, v | output gate | f_a | raw beta
conv_state  [slots, 3D, W]                 bf16, any strides; read and rolled
state       [slots, heads, V=128, K=128]   f32, read; written in place where tokens are pending
corrections [rows, heads, Q, 128]          f32, the pending tokens' are read, then the window's
                                           written
key_gates   [rows, heads, Q, 256]          bf16, the same
pending     [rows]                         int32, tokens of a record row to fold
out         [requests * tokens, D]         bf16

Two kernels, by where the state waits until it is folded and multiplied:
  source=registers   `fused_cluster`: a cluster of `split` CTAs has an item
  source=shared      `fused_lines`: a CTA has an item, whose state comes through shared memory, line
                     by line
Source: docs/operation.md, "The same, chunked" and "Commit: folding n accepted tokens".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from kda_kernels import arguments, step
from kda_kernels.device.gpu import Gpu
from kda_kernels.operands import StepOperands
from kda_kernels.parts import prologue
from kda_kernels.problem import Problem
from kda_kernels.step import Compiled
from kda_kernels.variants import fused_cluster, fused_lines

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
    lines: dict[str, object] = {
        "split": 1,
        "source": "shared",
        "fold": "late",
        "state_first": False,
    }
    return [
        {"split": 1},
        {"split": 1, "gate_mode": 1},
        lines,
        {**lines, "gate_mode": 1, "ctas_per_sm": 3},
        {"split": 2},
        {"split": 4, "threads": 128, "fold": "late"},
        {"split": 8, "threads": 128},
    ]


_FEWEST_LINES = 2
"""Of a state that there must be room for at a time."""


@dataclass(frozen=True)
class Options:
    """Compile-time choices, and `pdl` of the launch.

    split              CTAs per item
    threads            per CTA, 128 or 256; or, with source=shared, 256, 288 or 320: warps of their
                       own to solve and to weigh
    gate_mode          0: one chain of 8 tensor-core accumulations; 1: four chains of 2, summed in
                       order
    source             where state rows wait: registers; or shared memory, in lines of 128 bytes
                       that are folded, stored and multiplied one after the other (takes split=1,
                       fold=late, state_first=False)
    fold               early: before the window's vectors are built; late: after, right before the
                       products
    state_first        the state is asked for before the projection (and the PDL wait), not after
    records            read all tokens of a record at once, or only the pending ones, when their
                       count is known
    bypass_l1          state loads don't allocate in L1
    stream_stores      the state is stored as streaming
    ctas_per_sm        CTAs of an SM to compile for, which caps registers and, with source=shared,
                       the lines of a state that there is room for at a time; 0: as many as never
                       spill and hold whole states
    streamable         16-byte copies of projection and window (docs/operation.md, "Streamable");
                       False: by element
    conv_weight_dtype  of convolution weight and bias
    window             most entries of a dim-first window that is copied whole; None: those of the
                       problem
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


Plan = fused_cluster.Plan | fused_lines.Plan


def plan(problem: Problem, options: Options) -> Plan:
    layout, window = arguments.window_rules(problem, options.streamable, options.window)
    common: dict[str, Any] = {
        "tokens": problem.tokens,
        "state_dtype": problem.state_dtype,
        "threads": options.threads,
        "layout": layout,
        "window": window,
        "streamable": options.streamable,
        "weight_dtype": options.conv_weight_dtype,
        "terms": 2,
        "kind": problem.kind,
        "gate_mode": options.gate_mode,
        "gate_bytes": 16,
        "records": options.records,
        "stream_stores": options.stream_stores,
    }
    if options.source == "shared":
        ctas = options.ctas_per_sm or 2
        room = range(4, _FEWEST_LINES - 1, -1)
        plans = [fused_lines.Plan(**common, staged=staged, ctas_per_sm=ctas) for staged in room]
        return next((p for p in plans if p.fits), plans[-1])
    return fused_cluster.Plan(
        **common,
        split=options.split,
        fold=options.fold,
        state_first=options.state_first,
        bypass_l1=options.bypass_l1,
        asked_ctas=options.ctas_per_sm,
    )


def unsupported(problem: Problem, options: Options, gpu: Gpu) -> str | None:
    """Why this pair can't run, or None. Pure: no CUDA."""
    if problem.kind != "replay":
        return f"kind={problem.kind}: only replay"
    if problem.state_dtype != "fp32":
        return f"state_dtype={problem.state_dtype}: deferred steps keep an FP32 state"
    threads = (256, 288, 320) if options.source == "shared" else (128, 256)
    refused = step.not_allowed(
        (
            ("split", options.split, prologue.SPLITS),
            ("source", options.source, ("registers", "shared")),
            ("threads", options.threads, threads),
            ("gate_mode", options.gate_mode, (0, 1)),
            ("fold", options.fold, ("early", "late")),
            ("records", options.records, ("all", "pending")),
            ("conv_weight_dtype", options.conv_weight_dtype, ("fp32", "bf16")),
        )
    )
    refused = refused or _combination_refused(problem, options)
    refused = refused or step.window_refused(problem, options.window) or step.grid_refused(problem)
    if refused is not None:
        return refused
    p = plan(problem, options)
    if isinstance(p, fused_lines.Plan) and not p.fits:
        return (
            f"{p.smem_bytes} bytes of shared memory leave no room for ctas_per_sm={p.ctas_per_sm}"
        )
    return step.gate_refused(problem, p.least_log_gate) or step.smem_refused(
        p.smem_bytes, gpu.smem_per_block
    )


def _combination_refused(problem: Problem, options: Options) -> str | None:
    """Why choices that are allowed each don't go together, or None."""
    if options.split == 1 and options.threads < 256:
        return f"split=1 threads={options.threads}: 128 rows take 256 threads"
    if not 0 <= options.ctas_per_sm <= 8:
        return f"ctas_per_sm={options.ctas_per_sm} must lie in 0..8"
    if options.source == "shared":
        if options.split > 1 or options.fold == "early" or options.state_first or options.bypass_l1:
            return "source=shared takes split=1, fold=late, state_first=False, bypass_l1=False"
        most = (
            3 if options.threads == 256 or (options.threads == 288 and problem.tokens <= 4) else 2
        )
        if options.ctas_per_sm > most:
            asked = f"threads={options.threads} ctas_per_sm={options.ctas_per_sm}"
            return f"{asked}: too few registers for {problem.tokens} tokens"
    return None


def compile(problem: Problem, options: Options, gpu: Gpu) -> Compiled:
    """From shapes alone; one binary serves all heads, requests and strides. Raises ValueError for
    unsupported pairs."""
    step.require("KdaFused", unsupported(problem, options, gpu))
    host = fused_lines.HOST if options.source == "shared" else fused_cluster.HOST
    return step.build(host, plan(problem, options).on(gpu), options, gpu)


def launch(compiled: Compiled, operands: StepOperands, stream: int) -> None:
    """Enqueue one step. Raises ValueError, naming the operand, for operands that the compiled
    kernel can't take."""
    grid = (compiled.plan.cluster * operands.A_log.shape[0], operands.slots.shape[0], 1)
    step.enqueue("KdaFused", compiled, operands, stream, grid)
