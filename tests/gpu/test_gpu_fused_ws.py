"""KdaFusedWS on a GPU against the float64 reference, on awkward shapes, with poisoned outputs.

A small number of SMs in the Gpu makes CTAs walk many items.
"""

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
from kda_kernels.variants import fused_ws
from support.gpu_checks import (
    bf16_weights,
    check,
    check_far_pages,
    check_repeatable,
    forget_rejected,
    longer_records,
    longer_window,
)

pytestmark = pytest.mark.gpu


def problem(tokens: int, requests: int = 37, heads: int = 3, **more: Any) -> Problem:
    return Problem("replay", requests, heads, tokens, **{"pending": "mix", **more})


@pytest.mark.parametrize("tokens", range(2, 9))
@pytest.mark.parametrize("layout", ["dim-first", "window-major"])
@pytest.mark.parametrize("gate_mode", [0, 1])
@pytest.mark.parametrize("inputs", ["model", "generic"])
def test_every_window(tokens: int, layout: Any, gate_mode: int, inputs: Any) -> None:
    of = problem(tokens, conv_layout=layout)
    for sms in (None, 5):
        operands = make_step(of, seed=tokens, pad=64, null_requests=(0, 7, 8, 36), inputs=inputs)
        check(fused_ws, of, fused_ws.Options(gate_mode=gate_mode), forget_rejected(operands), sms)


@pytest.mark.parametrize("sms", [1, 2, 3, 5])
@pytest.mark.parametrize(
    ("requests", "heads"), [(1, 1), (1, 2), (1, 7), (7, 1), (3, 3), (5, 4), (29, 1)]
)
@pytest.mark.parametrize("tokens", [2, 4, 8])
def test_items_per_cta(sms: int, requests: int, heads: int, tokens: int) -> None:
    """1, 2, 3, 7 and more, heads that change at any of them, last CTAs with fewer."""
    of = problem(tokens, requests, heads)
    null = (requests // 2,) if requests > 2 else ()
    check(
        fused_ws,
        of,
        fused_ws.Options(),
        forget_rejected(make_step(of, seed=sms, null_requests=null)),
        sms,
    )


@pytest.mark.parametrize("heads", [1, 6, 8, 12, 24, 64, 96])
@pytest.mark.parametrize("tokens", [2, 4, 8])
@pytest.mark.parametrize("pdl", [False, True])
def test_heads_that_fill_the_machine(heads: int, tokens: int, pdl: bool) -> None:
    of = problem(tokens, 16, heads)
    check(fused_ws, of, fused_ws.Options(pdl=pdl), make_step(of, seed=heads, null_requests=(3,)))


@pytest.mark.parametrize("tokens", [2, 4, 8])
@pytest.mark.parametrize("pending", ["mix", 0, 2])
def test_many_items(tokens: int, pending: Any) -> None:
    of = problem(tokens, 256, 12, pending=pending)
    check(
        fused_ws,
        of,
        fused_ws.Options(),
        forget_rejected(make_step(of, seed=2, null_requests=(0, 100, 101, 255))),
    )


@pytest.mark.parametrize("tokens", [2, 3, 4, 5, 8])
@pytest.mark.parametrize(
    "choices",
    [
        {"staged": 2},
        {"staged": 3},
        {"records": "all"},
        {"ahead": True},
        {"stream_stores": True, "most_items": 1},
        {"window": 14, "most_items": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("pdl", [False, True])
def test_choices(tokens: int, choices: dict[str, Any], pdl: bool) -> None:
    of = problem(tokens, 9, 6)
    operands = make_step(of, seed=1, pad=16, null_requests=(4,), inputs="generic")
    check(fused_ws, of, fused_ws.Options(pdl=pdl, **choices), forget_rejected(operands), sms=7)


@pytest.mark.parametrize("tokens", [2, 5, 8])
@pytest.mark.parametrize("layout", ["dim-first", "window-major"])
@pytest.mark.parametrize(
    ("change", "choices"),
    [
        (longer_window, {"window": 13}),
        (bf16_weights, {"conv_weight_dtype": "bf16"}),
        (lambda o: replace(o, conv_bias=None), {}),
    ],
    ids=["longer window", "bf16 weights", "no bias"],
)
def test_layouts_and_weights(
    tokens: int,
    layout: Any,
    change: Callable[[StepOperands], StepOperands],
    choices: dict[str, Any],
) -> None:
    of = problem(tokens, 5, 3, conv_layout=layout)
    check(
        fused_ws,
        of,
        fused_ws.Options(**choices),
        change(make_step(of, seed=2, null_requests=(1, 4))),
        sms=2,
    )


@pytest.mark.parametrize("tokens", [2, 4, 8])
@pytest.mark.parametrize("n", [0, 1, "all", "beyond"])
def test_one_count_for_all(tokens: int, n: Any) -> None:
    """Counts outside 0..q count as the nearest of these."""
    of = problem(tokens, 6, 3, pending={"all": tokens, "beyond": 0}.get(n, n))
    operands = make_step(of, seed=3)
    if n == "beyond":
        operands = replace(
            operands, pending=torch.tensor([9, -1, 100, -(2**31), 8, 2**31 - 1]).int().cuda()
        )
    check(fused_ws, of, fused_ws.Options(), operands, sms=2)


@pytest.mark.parametrize("tokens", [2, 4, 8])
@pytest.mark.parametrize("sms", [None, 1])
def test_records_longer_than_the_window_in_any_order(tokens: int, sms: int | None) -> None:
    of = problem(tokens, 6)
    pending = torch.arange(9, dtype=torch.int32, device="cuda") % (tokens + 1)
    check(
        fused_ws,
        of,
        fused_ws.Options(),
        replace(longer_records(make_step(of, seed=3)), pending=pending),
        sms,
    )


@pytest.mark.parametrize("bound", [-7.5, -5.0, -0.01])
def test_gates_at_their_bounds(bound: float) -> None:
    """Decays that come to e^-60 over eight tokens, and such that hardly decay."""
    of = problem(8, 9, 3)
    o = make_step(of, seed=4, lower_bound=bound)
    o.dt_bias[::2] = 20
    o.dt_bias[1::4] = -20
    check(fused_ws, of, fused_ws.Options(), o, sms=3)


@pytest.mark.parametrize("tokens", [2, 4, 8])
def test_a_chain_of_steps(tokens: int) -> None:
    """Each step folds what the one before it recorded; every step is checked from where the kernel
    had come to."""
    of = problem(tokens, 2 * tokens + 2, 6)
    o = make_step(of, seed=5)
    compiled = fused_ws.compile(of, fused_ws.Options(), replace(current_gpu(), sms=9))
    g = torch.Generator(device="cuda").manual_seed(6)
    for step in range(20):
        fresh = make_step(of, seed=100 + step, weights=o)
        pending = torch.randint(0, tokens + 1, o.pending.shape, generator=g, device="cuda")
        o = replace(o, projected=fresh.projected, pending=pending.int())
        expected = reference.step(of, o)
        o.out.fill_(torch.nan)
        fused_ws.launch(compiled, o, torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
        assert compare.check_step(of, o, expected) is None, step


def test_offsets_beyond_32_bits() -> None:
    of = problem(2, 3, 12)
    compiled = fused_ws.compile(of, fused_ws.Options(), replace(current_gpu(), sms=6))
    check_far_pages(fused_ws, compiled, make_step(of, seed=5))


@pytest.mark.parametrize(
    "options", [fused_ws.Options(pdl=True), fused_ws.Options(pdl=True, ahead=True)]
)
@pytest.mark.parametrize("tokens", [2, 8])
def test_repeated_launches_agree(options: fused_ws.Options, tokens: int) -> None:
    """A chain of launches with programmatic edges over eight layers; bits depend on the inputs
    alone."""
    of = problem(tokens, 33, 12)
    compiled = fused_ws.compile(of, options, current_gpu())
    check_repeatable(fused_ws, compiled, lambda i: make_step(of, seed=6 + i))
