"""The host side of the step kernels: what their plans, refusals, compilations and launches have in
common.

A variant of a step is its `Options`, from which its `plan` makes a subclass of `StepPlan`; `build`
compiles a kernel for the plan, and `enqueue` launches what came of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Float32

from kda_kernels import arguments
from kda_kernels.device import cubin
from kda_kernels.device.gpu import Gpu
from kda_kernels.operands import StepOperands
from kda_kernels.problem import HISTORY, Problem

MOST_WINDOW = 16
"""Entries of the longest dim-first window that is copied whole."""
MOST_CTAS_ALONG_Y = 65_535


@dataclass(frozen=True)
class StepPlan:
    """What decides the code of every step kernel. A plan's repr is its key in the cache of
    binaries.

    threads       of a CTA
    layout        of the convolution window: rows = dim-first, copied whole; taps = window-major;
                  any = by element
    window        most entries of a `rows` window
    streamable    projection and window are read by 16-byte copies
    weight_dtype  of convolution weight and bias
    """

    kind: str
    tokens: int
    state_dtype: str
    threads: int
    layout: Literal["rows", "taps", "any"]
    window: int
    streamable: bool
    weight_dtype: str
    gate_mode: int

    @property
    def dtype(self) -> Any:
        return Float32 if self.state_dtype == "fp32" else BFloat16

    @property
    def item_bytes(self) -> int:
        return 4 if self.state_dtype == "fp32" else 2

    @property
    def conv_dtype(self) -> Any:
        return Float32 if self.weight_dtype == "fp32" else BFloat16

    @property
    def weight_bytes(self) -> int:
        return 4 if self.weight_dtype == "fp32" else 2

    @property
    def warps(self) -> int:
        return self.threads // 32

    @property
    def history(self) -> int:
        """Entries kept in front of the inputs: the window's last three, unless it is copied
        whole."""
        return 0 if self.layout == "rows" else HISTORY

    @property
    def chains(self) -> int:
        """Chains of tensor-core accumulations in the gate projection."""
        return 1 if self.gate_mode == 0 else 4

    @property
    def cluster(self) -> int:
        """CTAs of a cluster."""
        return 1

    @property
    def least_log_gate(self) -> float | None:
        """`lower_bound * tokens` that the kernel takes at least; None: any."""
        return None

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a CTA."""
        raise NotImplementedError


@dataclass(frozen=True)
class Compiled:
    """A step kernel compiled for a plan, and what its launches need to know.

    sms, most_items   of persistent kernels: multiprocessors, and items of a CTA at most (None: no
                      limit)
    """

    binary: cubin.Binary
    plan: Any
    pdl: bool
    sms: int
    most_items: int | None = None

    @property
    def resources(self) -> cubin.Resources:
        return self.binary.resources


def not_allowed(choices: Iterable[tuple[str, object, tuple[object, ...]]]) -> str | None:
    """Of (name, value, allowed values): why the first value that is not allowed is refused, or
    None."""
    for name, value, allowed in choices:
        if value not in allowed:
            return f"{name}={value!r} is not one of {', '.join(map(str, allowed))}"
    return None


def window_refused(problem: Problem, entries: int | None) -> str | None:
    """Why a window of at most so many entries can't be compiled for, or None."""
    if entries is not None and not problem.tokens + 2 <= entries <= MOST_WINDOW:
        return f"window={entries} must lie in {problem.tokens + 2}..{MOST_WINDOW}"
    return None


def grid_refused(problem: Problem) -> str | None:
    """Why a grid of (.., requests) can't be launched, or None."""
    if problem.requests > MOST_CTAS_ALONG_Y:
        return f"requests={problem.requests}: the grid takes at most {MOST_CTAS_ALONG_Y}"
    return None


def gate_refused(problem: Problem, least: float | None) -> str | None:
    """Why a gate of this bound can't be computed, or None. least: of `lower_bound * tokens`; None:
    any."""
    bound = problem.lower_bound
    if bound is None:
        return "the gate is unbounded"
    if least is not None and not bound * problem.tokens >= least:
        return f"lower_bound={bound} is too low for {problem.tokens} tokens"
    return None


def smem_refused(needed: int, most: int) -> str | None:
    """Why a CTA can't have so many bytes of shared memory, or None."""
    return f"{needed} bytes of shared memory exceed {most}" if needed > most else None


def host_of(kernel: Any, cluster: bool = False, carveout: int | None = 100) -> Any:
    """What `cubin.build` compiles for a kernel of (arguments, plan): a launch with the plan's
    threads.

    cluster    launched in clusters of the plan's `cluster` CTAs
    carveout   per cent of an SM's memory asked for as shared memory; None: not asked
    The plan's `ctas_per_sm` caps registers.
    """
    options: dict[str, Any] = {} if carveout is None else {"preferred_smem_carveout": carveout}

    @cute.jit
    def host(A: Any, P: cutlass.Constexpr) -> None:
        shape = {"cluster": (P.cluster, 1, 1)} if cutlass.const_expr(cluster) else {}
        kernel(A, P).launch(
            grid=(P.cluster if cutlass.const_expr(cluster) else 1, 1, 1),
            block=(P.threads, 1, 1),
            min_blocks_per_mp=P.ctas_per_sm,
            **shape,
            **options,
        )

    host.kernel = kernel
    return host


def require(variant: str, refused: str | None) -> None:
    """Raises ValueError if a variant refused a pair of problem and options."""
    if refused is not None:
        raise ValueError(f"{variant}: {refused}")


def build(host: Callable[..., None], plan: Any, options: Any, gpu: Gpu) -> Compiled:
    """A kernel compiled from its plan alone: one binary serves all heads, requests and strides."""
    binary = cubin.build(
        host,
        lambda: (arguments.placeholder(), plan),
        arch=gpu.arch,
        threads=plan.threads,
        cluster=plan.cluster,
        choices=plan,
    )
    return Compiled(binary, plan, options.pdl, gpu.sms, getattr(options, "most_items", None))


def enqueue(
    variant: str,
    compiled: Compiled,
    operands: StepOperands,
    stream: int,
    grid: tuple[int, int, int],
    per: int = 0,
) -> None:
    """Launch a step once. per: `Arguments.per`. Raises ValueError, naming the operand, for operands
    that don't fit."""
    plan = compiled.plan
    arguments.check(variant, plan, operands)
    assert operands.lower_bound is not None
    least = plan.least_log_gate
    if least is not None and not operands.lower_bound * plan.tokens >= least:
        raise ValueError(f"lower_bound={operands.lower_bound} is too low for {plan.tokens} tokens")
    cubin.launcher(compiled.binary).launch(
        grid, arguments.values(operands, per), stream, compiled.pdl
    )
