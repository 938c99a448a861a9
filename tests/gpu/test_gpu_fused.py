"""KdaFused on a GPU against the float64 reference, on awkward shapes, with poisoned outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from kda_kernels.check import compare, reference
from kda_kernels.device.gpu import current_gpu
from kda_kernels.operands import StepOperands, make_step
from kda_kernels.problem import Problem
from kda_kernels.variants import fused
from support.gpu_checks import (
    check,
    check_far_pages,
    check_repeatable,
    forget_rejected,
    layouts_and_weights,
    longer_records,
)

pytestmark = pytest.mark.gpu

SHAPES = ((1, 256), (2, 256), (2, 128), (4, 256), (4, 128), (8, 256), (8, 128))
LINES = fused.Options(source="shared", fold="late", state_first=False)
FEW = (
    fused.Options(),
    fused.Options(2, 128),
    fused.Options(4, 128),
    LINES,
    replace(LINES, threads=320),
)
ALL = (*(fused.Options(*shape) for shape in SHAPES), LINES, replace(LINES, threads=288))


def problem(tokens: int, requests: int = 37, heads: int = 3, **more: Any) -> Problem:
    return Problem("replay", requests, heads, tokens, **{"pending": "mix", **more})


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tokens", range(2, 9))
@pytest.mark.parametrize("gate_mode", [0, 1])
@pytest.mark.parametrize("inputs", ["model", "generic"])
def test_every_shape(shape: tuple[int, int], tokens: int, gate_mode: int, inputs: Any) -> None:
    of = problem(tokens)
    operands = make_step(of, seed=tokens, pad=64, null_requests=(0, 7, 36), inputs=inputs)
    check(fused, of, fused.Options(*shape, gate_mode=gate_mode), forget_rejected(operands))


@pytest.mark.parametrize("tokens", range(2, 9))
@pytest.mark.parametrize("threads", [256, 288, 320])
@pytest.mark.parametrize("ctas", [0, 3])
@pytest.mark.parametrize(
    "choices", [{}, {"gate_mode": 1}, {"stream_stores": True, "records": "pending"}], ids=str
)
def test_state_in_shared_memory(
    tokens: int, threads: int, ctas: int, choices: dict[str, Any]
) -> None:
    of = problem(tokens)
    options = replace(LINES, threads=threads, ctas_per_sm=ctas, **choices)
    if (why := fused.unsupported(of, options, current_gpu())) is not None:
        pytest.skip(why)
    operands = make_step(of, seed=tokens, pad=64, null_requests=(0, 7, 36), inputs="generic")
    check(fused, of, options, forget_rejected(operands))


@pytest.mark.parametrize("heads", [1, 6, 8, 12, 24, 64, 96])
@pytest.mark.parametrize("options", FEW)
@pytest.mark.parametrize("tokens", [4, 8])
@pytest.mark.parametrize("pdl", [False, True])
def test_heads_that_fill_the_machine(
    heads: int, options: fused.Options, tokens: int, pdl: bool
) -> None:
    of = problem(tokens, 16, heads)
    check(fused, of, replace(options, pdl=pdl), make_step(of, seed=heads, null_requests=(3,)))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tokens", [3, 8])
@pytest.mark.parametrize(
    "choices",
    [
        {"fold": "late"},
        {"state_first": False},
        {"records": "pending"},
        {"bypass_l1": True, "stream_stores": True},
        {"fold": "late", "state_first": False, "records": "pending"},
    ],
    ids=str,
)
def test_choices(shape: tuple[int, int], tokens: int, choices: dict[str, Any]) -> None:
    of = problem(tokens, 11, 6)
    operands = make_step(of, seed=1, pad=16, null_requests=(4,), inputs="generic")
    check(fused, of, fused.Options(*shape, **choices), forget_rejected(operands))


@pytest.mark.parametrize("options", FEW)
@pytest.mark.parametrize("tokens", [2, 5, 8])
@pytest.mark.parametrize("layout", ["dim-first", "window-major"])
@layouts_and_weights
def test_layouts_and_weights(
    options: fused.Options,
    tokens: int,
    layout: Any,
    change: Callable[[StepOperands], StepOperands],
    choices: dict[str, Any],
) -> None:
    of = problem(tokens, 5, 3, conv_layout=layout)
    check(
        fused, of, replace(options, **choices), change(make_step(of, seed=2, null_requests=(1, 4)))
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("n", [0, 1, 8, "beyond"])
def test_one_count_for_all(shape: tuple[int, int], n: Any) -> None:
    """Counts outside 0..q count as the nearest of these."""
    of = problem(8, 6, 3, pending=0 if n == "beyond" else n)
    operands = make_step(of, seed=3)
    if n == "beyond":
        operands = replace(
            operands, pending=torch.tensor([9, -1, 100, -(2**31), 8, 2**31 - 1]).int().cuda()
        )
    check(fused, of, fused.Options(*shape), operands)


@pytest.mark.parametrize("options", FEW)
@pytest.mark.parametrize("tokens", [2, 4, 8])
def test_records_longer_than_the_window_in_any_order(options: fused.Options, tokens: int) -> None:
    of = problem(tokens, 6)
    pending = torch.arange(9, dtype=torch.int32, device="cuda") % (tokens + 1)
    check(fused, of, options, replace(longer_records(make_step(of, seed=3)), pending=pending))


@pytest.mark.parametrize("options", FEW)
@pytest.mark.parametrize("bound", [-7.5, -5.0, -0.01])
def test_gates_at_their_bounds(options: fused.Options, bound: float) -> None:
    """Decays that come to e^-60 over eight tokens, and such that hardly decay."""
    of = problem(8, 9, 3)
    o = make_step(of, seed=4, lower_bound=bound)
    o.dt_bias[::2] = 20
    o.dt_bias[1::4] = -20
    check(fused, of, options, o)


@pytest.mark.parametrize("options", FEW)
@pytest.mark.parametrize("tokens", [4, 8])
def test_a_chain_of_steps(options: fused.Options, tokens: int) -> None:
    """Each step folds what the one before it recorded; every step is checked from where the kernel
    had come to."""
    of = problem(tokens, 2 * tokens + 2, 6)
    o = make_step(of, seed=5)
    compiled = fused.compile(of, options, current_gpu())
    g = torch.Generator(device="cuda").manual_seed(6)
    for step in range(20):
        fresh = make_step(of, seed=100 + step, weights=o)
        pending = torch.randint(0, tokens + 1, o.pending.shape, generator=g, device="cuda")
        o = replace(o, projected=fresh.projected, pending=pending.int())
        expected = reference.step(of, o)
        o.out.fill_(torch.nan)
        fused.launch(compiled, o, torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
        assert compare.check_step(of, o, expected) is None, step


@pytest.mark.parametrize("options", FEW)
def test_offsets_beyond_32_bits(options: fused.Options) -> None:
    of = problem(2, 3, 12)
    small = make_step(of, seed=5)
    compiled = fused.compile(of, options, current_gpu())
    check_far_pages(fused, compiled, small)


@pytest.mark.parametrize("options", ALL)
@pytest.mark.parametrize("tokens", [2, 8])
def test_repeated_launches_agree(options: fused.Options, tokens: int) -> None:
    """A chain of launches with programmatic edges over eight layers; bits depend on the inputs
    alone."""
    of = problem(tokens, 33, 12)
    compiled = fused.compile(of, replace(options, pdl=True), current_gpu())
    check_repeatable(fused, compiled, lambda i: make_step(of, seed=6 + i))
