"""KDA decode, spec and record steps for many items: persistent, one CTA per SM, its warps
specialized.

projected   [requests * tokens, pitch]     bf16   q, k, v | output gate | f_a | raw beta
conv_state  [slots, 3D, W]                 bf16, dim-first or window-major; read and rolled
state       [slots, heads, V=128, K=128]   f32 or bf16; read (record), updated in place (decode),
                                           written after every token (spec)
corrections [rows, heads, Q, 128]          f32, written (record)
key_gates   [rows, heads, Q, 256]          bf16, written (record)
out         [requests * tokens, D]         bf16

A CTA walks a run of consecutive items (walk.py). In its steady state three groups of warps work on
three items:
  prologue  8 warps, item i+1: convolution, gate on tensor cores, decays, sums for the norms; leaves
            the window, the recorded keys and gates, and the vectors for the product
            (ws_prologue.py)
  product   8 warps, item i: what the state takes part in. The state lies in cells of shared memory
            that are private to the threads (cp.async, no barrier), several items of it, and is
            refilled as it is read (ws_product.py)
  epilogue  4 warps, item i-1: RMSNorm and output gate; for record also the substitution and the
            corrections (ws_epilogue.py)
Norms are deferred: vectors stay unnormalized, rk and rq are the inverse norms.

record: the chunked form. The vectors are MMA fragments of the 2q vectors Gamma_t k_t, Gamma_t q_t
and of the q vectors k_t / Gamma_t. Product, warp = 16 state rows: w = S (Gamma k), y = S (Gamma q)
on tensor cores, state and vectors in two BF16 terms. The products of vectors with vectors, A and B,
come from the same fragments: k_s / Gamma_s are further state rows. Epilogue, thread = row, with
u'_s = rk_s u_s:
  u_t = beta_t (v_t - rk_t (w_t + sum_{s<t} A_ts u'_s)),  o_t = rq_t (y_t + sum_{s<=t} B_ts u'_s)

decode, spec: the recurrence in FP32. Product, warp = 16 state rows, half a warp per row: the state
stays in registers over the tokens; w = S (d k), y = S (d q), then
  u = beta (v - w rk),  o = rq (y + u rk k.q),  S <- S d + (u rk) k

Handed on by rings of stages (ring.py): vectors (prologue to product), results (product to
epilogue). What the epilogue takes from the prologue, v and the sums of a window, is there when the
results are: its ring says only when it is empty. Source: docs/operation.md, "The mathematics, per
item" and "The same, chunked".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import cutlass
import cutlass.cute as cute
from cutlass import Int32, const_expr

from kda_kernels import arguments, step, walk
from kda_kernels.arguments import Arguments
from kda_kernels.device.gpu import Gpu
from kda_kernels.operands import StepOperands
from kda_kernels.problem import Problem
from kda_kernels.step import Compiled
from kda_kernels.variants.ws_epilogue import record_epilogue, step_epilogue
from kda_kernels.variants.ws_plan import (
    LAUNCHED,
    PRODUCT,
    PROLOGUE,
    REGISTERS,
    THREADS,
    Plan,
    allocate,
)
from kda_kernels.variants.ws_product import record_product, step_product
from kda_kernels.variants.ws_prologue import prologue
from kda_kernels.walk import Item

KERNELS = ("kda_ws",)
KINDS = ("decode", "spec", "record")
RULE = "ws_items"
STREAMS = True
TRIED = {"gate_mode": (0, 1)}
GIVEN = ("terms", "conv_weight_dtype", "window")


def forms(kind: str, state_dtype: str) -> list[dict[str, object]]:
    """Every form that is another kernel."""
    return [
        {"gate_mode": gate_mode, "terms": terms}
        for gate_mode in (0, 1)
        for terms in ((1, 2) if (kind, state_dtype) == ("record", "bf16") else (2,))
    ]


arch = cute.arch


@dataclass(frozen=True)
class Options:
    """Compile-time choices, and `pdl` of the launch.

    gate_mode          0: one chain of 8 tensor-core accumulations; 1: four chains of 2, summed in
                       order
    terms              BF16 terms that a record's vectors are split in; 1 only with a BF16 state
    conv_weight_dtype  of convolution weight and bias
    window             entries W of a dim-first window; None: those of the problem
    pdl                programmatic dependent launch
    """

    gate_mode: int = 0
    terms: int = 2
    conv_weight_dtype: Literal["fp32", "bf16"] = "fp32"
    window: int | None = None
    pdl: bool = False


def plan(problem: Problem, options: Options, gpu: Gpu) -> Plan:
    """As many stages of state as fit (at least 2), up to 192 KiB, for record 128 KiB; of results 2
    if they fit."""
    layout, window = arguments.window_rules(problem, streamable=True, entries=options.window)

    def with_stages(state: int, results: int) -> Plan:
        return Plan(
            kind=problem.kind,
            tokens=problem.tokens,
            state_dtype=problem.state_dtype,
            threads=THREADS,
            layout=layout,
            window=window,
            streamable=True,
            weight_dtype=options.conv_weight_dtype,
            gate_mode=options.gate_mode,
            terms=options.terms,
            state_stages=state,
            result_stages=results,
        )

    most = (2 if problem.kind == "record" else 3) * (1 if problem.state_dtype == "fp32" else 2)
    plans = [*(with_stages(stages, 2) for stages in range(most, 1, -1)), with_stages(2, 1)]
    return next((p for p in plans if p.smem_bytes <= gpu.smem_per_block), plans[-1])


def unsupported(problem: Problem, options: Options, gpu: Gpu) -> str | None:
    """Why this pair can't run, or None. Pure: no CUDA."""
    if problem.kind not in ("decode", "spec", "record"):
        return f"kind={problem.kind}: only decode, spec and record"
    choices = (
        ("gate_mode", options.gate_mode, (0, 1)),
        ("terms", options.terms, (1, 2)),
        ("conv_weight_dtype", options.conv_weight_dtype, ("fp32", "bf16")),
    )
    if why := step.not_allowed(choices):
        return why
    if options.terms == 1 and (problem.kind != "record" or problem.state_dtype == "fp32"):
        return "terms=1: only record with a BF16 state"
    if why := step.window_refused(problem, options.window):
        return why
    p = plan(problem, options, gpu)
    return step.gate_refused(problem, p.least_log_gate) or step.smem_refused(
        p.smem_bytes, gpu.smem_per_block
    )


def compile(problem: Problem, options: Options, gpu: Gpu) -> Compiled:
    """From shapes alone; one binary serves all heads, requests and strides. Raises ValueError for
    unsupported pairs."""
    step.require("KdaWS", unsupported(problem, options, gpu))
    return step.build(_HOST, plan(problem, options, gpu), options, gpu)


def launch(compiled: Compiled, operands: StepOperands, stream: int) -> None:
    """Enqueue one step. Raises ValueError, naming the operand, for operands that the compiled
    kernel can't take."""
    _check(compiled.plan, operands)
    runs = walk.PLAIN.runs(operands.A_log.shape[0], operands.slots.shape[0], compiled.sms, least=2)
    step.enqueue("KdaWS", compiled, operands, stream, runs.grid, runs.per)


def _check(p: Plan, o: StepOperands) -> None:
    """A window's entries are part of the code here, where other kernels take any number up to the
    plan's."""
    if p.layout == "rows" and o.conv_state.shape[2] != p.window:
        raise ValueError(
            f"conv_state has {o.conv_state.shape[2]} entries, the compiled kernel takes {p.window}"
        )


@cute.kernel
def kda_ws(A: Arguments, P: cutlass.Constexpr) -> None:
    """Every group asks for what it can before the barrier behind which the mbarriers are ready."""
    thread, _, _ = arch.thread_idx()
    cta, _, _ = arch.block_idx()
    lane = thread % 32
    warp = arch.make_warp_uniform(thread // 32)
    M = allocate(P)
    if thread == 0:
        M.f_a_ring.init(32 * PROLOGUE, 32 * PROLOGUE)
        M.vector_ring.init(32 * PROLOGUE, 32 * PRODUCT)
        M.result_ring.init(32 * PRODUCT, 32 * P.finishers)
        M.value_ring.init(32 * PROLOGUE, 32 * P.finishers)
        arch.mbarrier_init_fence()

    # Zero, which the compiler must not know: loads that it takes for the same in all lanes go to a
    # uniform register, and so are waited for at once.
    zero = Int32(lane >= 32 * A.heads)
    more, product, less = REGISTERS[P.kind, P.layout]
    if warp < PROLOGUE:
        set_registers(more)
        start, count = run_of(A, cta)
        prologue(A, M, start, count, warp, lane, zero, P)
    elif warp < PROLOGUE + PRODUCT:
        set_registers(product)
        start, count = run_of(A, cta)
        if const_expr(P.chunked):
            record_product(A, M, start, count, warp - PROLOGUE, lane, zero, P)
        else:
            step_product(A, M, start, count, warp - PROLOGUE, lane, zero, P)
    else:
        set_registers(less)
        start, count = run_of(A, cta)
        if const_expr(P.chunked):
            record_epilogue(A, M, start, count, thread - 32 * (PROLOGUE + PRODUCT), P)
        else:
            step_epilogue(A, M, start, count, warp - (PROLOGUE + PRODUCT), lane, zero, P)


_HOST = step.host_of(kda_ws, carveout=None)


@cute.jit
def run_of(A: Arguments, cta: Int32) -> tuple[Item, Int32]:
    """A CTA's first item and how many it has. For each group anew: nothing then stays in registers
    over all of them."""
    begin = cta * A.per
    return walk.item_at(begin, A.per, A.heads, A.requests), min(A.per, A.heads * A.requests - begin)


@cute.jit
def set_registers(count: cutlass.Constexpr) -> None:
    """Of the calling group of warps, from what the CTA is launched with."""
    if const_expr(count > LAUNCHED):
        arch.setmaxregister_increase(count)
    if const_expr(count < LAUNCHED):
        arch.setmaxregister_decrease(count)
