"""KDA decode, spec and record steps: a cluster of `split` CTAs per item, state rows in registers.

projected   [requests * tokens, pitch]     bf16   q, k, v | output gate | f_a | raw beta
conv_state  [slots, 3D, W]                 bf16, any strides; read and rolled
state       [slots, heads, V=128, K=128]   f32 or bf16; updated (decode), read and written (spec), read (record)
corrections [rows, heads, Q, 128]          f32, written (record)
key_gates   [rows, heads, Q, 256]          bf16, written (record)
out         [requests * tokens, D]         bf16

CTA r of a cluster owns rows, channels and gate features r*128/split .. of its item. Two forms, a kernel each:
  recurrence  token by token, all kinds: `kda_kernels.variants.split_recurrence`
  chunked     all tokens of a window at once, on tensor cores, kind record: `kda_kernels.variants.split_chunked`
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
from kda_kernels.variants import split_chunked, split_recurrence

KERNELS = ("kda_split",)


@dataclass(frozen=True)
class Spec:
    """Compile-time choices, and `pdl` of the launch.

    split              CTAs per item
    threads            per CTA
    lanes_per_row      lanes that share a state row
    staging            state rows wait in registers, or in shared memory (cp.async)
    evict              evict-first in L2 for staged state
    gate_mode          0: one chain of 8 tensor-core accumulations; 1: four chains of 2, summed in order;
                       2: FP32 dot products
    stream_hints       state passes L1 by, and is stored as streaming: gains below some 1000 items, costs above
    state_late         state is asked for when the other operands have landed, not at once
    streamable         16-byte copies of projection and window (docs/operation.md, "Streamable"); False: by element
    conv_weight_dtype  of convolution weight and bias
    window             most entries of a dim-first window that is copied whole; None: those of the problem
    spin               what other CTAs send is polled for, not slept for
    form               recurrence; chunked: `kda_kernels.variants.split_chunked`, records only
    terms              BF16 terms of vectors in form chunked; 1 is for BF16 state
    pdl                programmatic dependent launch: all but the projection is asked for before its wait
    """

    split: int = 1
    threads: int = 256
    lanes_per_row: int = 16
    staging: Literal["registers", "shared"] = "registers"
    evict: bool = False
    gate_mode: int = 2
    stream_hints: bool = True
    state_late: bool = False
    streamable: bool = True
    conv_weight_dtype: Literal["fp32", "bf16"] = "fp32"
    window: int | None = None
    spin: bool = False
    form: Literal["recurrence", "chunked"] = "recurrence"
    terms: int = 2
    pdl: bool = False


def plan(problem: Problem, spec: Spec) -> split_recurrence.Plan | split_chunked.Plan:
    layout, window = arguments.window_rules(problem, spec.streamable, spec.window)
    of_both: dict[str, Any] = {
        "kind": problem.kind,
        "tokens": problem.tokens,
        "state_dtype": problem.state_dtype,
        "threads": spec.threads,
        "layout": layout,
        "window": window,
        "streamable": spec.streamable,
        "weight_dtype": spec.conv_weight_dtype,
        "gate_mode": spec.gate_mode,
        "split": spec.split,
        "hints": spec.stream_hints,
        "late": spec.state_late,
        "chained": spec.pdl,
        "spin": spec.spin,
    }
    if spec.form == "chunked":
        return split_chunked.Plan(**of_both, terms=2 if problem.state_dtype == "fp32" else spec.terms)
    return split_recurrence.Plan(**of_both, lanes=spec.lanes_per_row, staging=spec.staging, evict=spec.evict)


def unsupported(problem: Problem, spec: Spec, gpu: Gpu) -> str | None:
    """Why this pair can't run, or None. Pure: no CUDA."""
    if problem.kind not in ("decode", "spec", "record"):
        return f"kind={problem.kind}: only decode, spec and record"
    choices = (
        ("split", spec.split, prologue.SPLITS),
        ("threads", spec.threads, (128, 256, 512)),
        ("lanes_per_row", spec.lanes_per_row, (8, 16, 32)),
        ("staging", spec.staging, ("registers", "shared")),
        ("gate_mode", spec.gate_mode, (0, 1, 2)),
        ("conv_weight_dtype", spec.conv_weight_dtype, ("fp32", "bf16")),
        ("form", spec.form, ("recurrence", "chunked")),
        ("terms", spec.terms, (1, 2)),
    )
    if why := step.not_allowed(choices):
        return why
    if spec.evict and spec.staging != "shared":
        return "evict: only with staging=shared"
    if spec.spin and spec.split == 1:
        return "spin: only with split > 1"
    if spec.terms == 1 and (spec.form != "chunked" or problem.state_dtype != "bf16"):
        return "terms=1: only for BF16 state in form chunked"
    if spec.form == "chunked" and spec.staging != "registers":
        return f"staging={spec.staging!r}: form=chunked takes registers"
    if why := step.window_refused(problem, spec.window) or step.grid_refused(problem):
        return why
    p = plan(problem, spec)
    if why := p.refused(gpu) or step.gate_refused(problem, p.least_log_gate):
        return why
    return step.smem_refused(p.smem_bytes, gpu.smem_per_block)


def compile(problem: Problem, spec: Spec, gpu: Gpu) -> Compiled:
    """From shapes alone; one binary serves all heads, requests and strides. Raises ValueError for unsupported pairs."""
    step.require("KdaSplit", unsupported(problem, spec, gpu))
    return step.build(_HOSTS[spec.form], plan(problem, spec), spec, gpu)


def launch(compiled: Compiled, operands: StepOperands, stream: int) -> None:
    """Enqueue one step. Raises ValueError, naming the operand, for operands that the compiled kernel can't take."""
    grid = (compiled.plan.split * operands.A_log.shape[0], operands.slots.shape[0], 1)
    step.enqueue("KdaSplit", compiled, operands, stream, grid)


_HOSTS = {
    "recurrence": step.host_of(split_recurrence.kda_split, cluster=True),
    "chunked": step.host_of(split_chunked.kda_split_chunked, cluster=True),
}
