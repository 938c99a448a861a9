"""KDA decode, spec and record steps: a cluster of `split` CTAs per item, state rows in registers.

projected   [requests * tokens, pitch]     bf16   q, k, v | output gate | f_a | raw beta
conv_state  [slots, 3D, W]                 bf16, any strides; read and rolled
state       [slots, heads, V=128, K=128]   f32 or bf16; updated (decode), read and written (spec),
            read (record)
corrections [rows, heads, Q, 128]          f32, written (record)
key_gates   [rows, heads, Q, 256]          bf16, written (record)
out         [requests * tokens, D]         bf16

CTA r of a cluster owns rows, channels and gate features r*128/split .. of its item. Two forms, a
kernel each:
  recurrence  token by token, all kinds: `kda_kernels.variants.split_recurrence`
  chunked     all tokens of a window at once, on tensor cores, kind record:
              `kda_kernels.variants.split_chunked`
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

from kda_kernels import arguments, step
from kda_kernels.case import HEADS, TYPICAL, Case, case, steps_of
from kda_kernels.device.gpu import Gpu
from kda_kernels.operands import StepOperands
from kda_kernels.parts import prologue
from kda_kernels.problem import CONV_LAYOUTS, STATE_DTYPES, Problem
from kda_kernels.step import Compiled
from kda_kernels.variants import split_chunked, split_recurrence

KERNELS = ("kda_split",)
KINDS = ("decode", "spec", "record")
RULE = "schedule"
REQUESTS = (1, 37)
TRIED = {
    "split": (1, 2, 4, 8),
    "threads": (128, 256),
    "lanes_per_row": (8, 16, 32),
    "gate_mode": (0, 1, 2),
}
GIVEN = ("terms", "streamable", "conv_weight_dtype", "window")


def forms(kind: str, state_dtype: str) -> list[dict[str, object]]:
    """The chunked form. For the recurrence see `more_cases`."""
    if kind != "record":
        return []
    return [
        {
            "form": "chunked",
            "split": split,
            "threads": threads,
            "gate_mode": gate_mode,
            "terms": terms,
        }
        for gate_mode in (0, 1)
        for terms in ((1, 2) if state_dtype == "bf16" else (2,))
        for split, threads in ((1, 256), (2, 128), (2, 256), (4, 128), (8, 128))
    ]


def more_cases(name: str, purpose: str) -> list[Case]:
    """Of the recurrence: it has too many choices to combine each with every layout, state type and
    head count."""
    steps, typical = steps_of(KINDS), steps_of(KINDS, TYPICAL)
    found, splits, stagings = [], (1, 2, 4, 8), ("registers", "shared")
    if purpose == "compile":
        for (kind, q), split, staging, dtype in product(steps, splits, stagings, STATE_DTYPES):
            choices: dict[str, Any] = {"split": split, "staging": staging}
            found.append(case(name, choices, Problem(kind, 1, 12, q, state_dtype=dtype)))
        for (kind, q), split, gate_mode in product(typical, splits, (0, 1)):
            found.append(
                case(name, {"split": split, "gate_mode": gate_mode}, Problem(kind, 1, 12, q))
            )
        return found
    # All choices on a small problem with null slots, padding and permuted rows ...
    for (kind, q), split, staging, gate_mode in product(steps, splits, stagings, (0, 1, 2)):
        choices = {"split": split, "staging": staging, "gate_mode": gate_mode}
        found.append(case(name, choices, Problem(kind, 5, 3, q), pad=64, null_requests=(1, 3)))
    # ... then layouts, state types, inputs, head counts and batches, one after the other.
    awkward: dict[str, Any] = {
        "pad": 64,
        "null_requests": (2,),
        "inputs": "generic",
        "conv_bias": False,
    }
    for (kind, q), split, layout, dtype in product(steps, splits, CONV_LAYOUTS, STATE_DTYPES):
        problem = Problem(kind, 6, 6, q, state_dtype=dtype, conv_layout=layout)
        found.append(case(name, {"split": split, "spin": split > 1}, problem, **awkward))
    for heads, (kind, q), split in product(HEADS, typical, splits):
        found.append(case(name, {"split": split}, Problem(kind, 37 if heads < 24 else 9, heads, q)))
    return found


@dataclass(frozen=True)
class Options:
    """Compile-time choices, and `pdl` of the launch.

    split              CTAs per item
    threads            per CTA
    lanes_per_row      lanes that share a state row
    staging            state rows wait in registers, or in shared memory (cp.async)
    evict              evict-first in L2 for staged state
    gate_mode          0: one chain of 8 tensor-core accumulations; 1: four chains of 2, summed in
                       order; 2: FP32 dot products
    stream_hints       state passes L1 by, and is stored as streaming: gains below some 1000 items,
                       costs above
    state_late         state is asked for when the other operands have landed, not at once
    streamable         16-byte copies of projection and window (docs/operation.md, "Streamable");
                       False: by element
    conv_weight_dtype  of convolution weight and bias
    window             most entries of a dim-first window that is copied whole; None: those of the
                       problem
    spin               what other CTAs send is polled for, not slept for
    form               recurrence; chunked: `kda_kernels.variants.split_chunked`, records only
    terms              BF16 terms of vectors in form chunked; 1 is for BF16 state
    pdl                programmatic dependent launch: all but the projection is asked for before its
                       wait
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


def plan(problem: Problem, options: Options) -> split_recurrence.Plan | split_chunked.Plan:
    layout, window = arguments.window_rules(problem, options.streamable, options.window)
    of_both: dict[str, Any] = {
        "kind": problem.kind,
        "tokens": problem.tokens,
        "state_dtype": problem.state_dtype,
        "threads": options.threads,
        "layout": layout,
        "window": window,
        "streamable": options.streamable,
        "weight_dtype": options.conv_weight_dtype,
        "gate_mode": options.gate_mode,
        "split": options.split,
        "hints": options.stream_hints,
        "late": options.state_late,
        "chained": options.pdl,
        "spin": options.spin,
    }
    if options.form == "chunked":
        return split_chunked.Plan(
            **of_both, terms=2 if problem.state_dtype == "fp32" else options.terms
        )
    return split_recurrence.Plan(
        **of_both, lanes=options.lanes_per_row, staging=options.staging, evict=options.evict
    )


def unsupported(problem: Problem, options: Options, gpu: Gpu) -> str | None:
    """Why this pair can't run, or None. Pure: no CUDA."""
    if problem.kind not in ("decode", "spec", "record"):
        return f"kind={problem.kind}: only decode, spec and record"
    choices = (
        ("split", options.split, prologue.SPLITS),
        ("threads", options.threads, (128, 256, 512)),
        ("lanes_per_row", options.lanes_per_row, (8, 16, 32)),
        ("staging", options.staging, ("registers", "shared")),
        ("gate_mode", options.gate_mode, (0, 1, 2)),
        ("conv_weight_dtype", options.conv_weight_dtype, ("fp32", "bf16")),
        ("form", options.form, ("recurrence", "chunked")),
        ("terms", options.terms, (1, 2)),
    )
    if why := step.not_allowed(choices):
        return why
    if options.evict and options.staging != "shared":
        return "evict: only with staging=shared"
    if options.spin and options.split == 1:
        return "spin: only with split > 1"
    if options.terms == 1 and (options.form != "chunked" or problem.state_dtype != "bf16"):
        return "terms=1: only for BF16 state in form chunked"
    if options.form == "chunked" and options.staging != "registers":
        return f"staging={options.staging!r}: form=chunked takes registers"
    if why := step.window_refused(problem, options.window) or step.grid_refused(problem):
        return why
    p = plan(problem, options)
    if why := p.refused(gpu) or step.gate_refused(problem, p.least_log_gate):
        return why
    return step.smem_refused(p.smem_bytes, gpu.smem_per_block)


def compile(problem: Problem, options: Options, gpu: Gpu) -> Compiled:
    """From shapes alone; one binary serves all heads, requests and strides. Raises ValueError for
    unsupported pairs."""
    step.require("KdaSplit", unsupported(problem, options, gpu))
    return step.build(_HOSTS[options.form], plan(problem, options), options, gpu)


def launch(compiled: Compiled, operands: StepOperands, stream: int) -> None:
    """Enqueue one step. Raises ValueError, naming the operand, for operands that the compiled
    kernel can't take."""
    grid = (compiled.plan.split * operands.A_log.shape[0], operands.slots.shape[0], 1)
    step.enqueue("KdaSplit", compiled, operands, stream, grid)


_HOSTS = {
    "recurrence": step.host_of(split_recurrence.kda_split, cluster=True),
    "chunked": step.host_of(split_chunked.kda_split_chunked, cluster=True),
}
