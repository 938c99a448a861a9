"""KdaStream on a GPU against the float64 reference, on awkward shapes, with poisoned outputs.

A small number of SMs in the Gpu makes CTAs walk many items.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kda_kernels.device.gpu import current_gpu
from kda_kernels.operands import StepOperands, make_step
from kda_kernels.problem import Problem
from kda_kernels.variants import stream
from support.gpu_checks import (
    bf16_weights,
    check,
    check_far_pages,
    check_repeatable,
    longer_records,
    longer_window,
)

pytestmark = pytest.mark.gpu

KINDS = (("decode", 1), *(("record", q) for q in range(2, 9)), *(("spec", q) for q in range(2, 9)))
FEW = (("decode", 1), ("record", 3), ("record", 4), ("record", 8), ("spec", 2), ("spec", 8))


@pytest.mark.parametrize(("kind", "tokens"), KINDS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("layout", ["dim-first", "window-major"])
@pytest.mark.parametrize("inputs", ["model", "generic"])
def test_every_kind(kind: Any, tokens: int, dtype: Any, layout: Any, inputs: Any) -> None:
    problem = Problem(kind, 37, 3, tokens, state_dtype=dtype, conv_layout=layout)
    draw: dict[str, Any] = {"pad": 64, "null_requests": (0, 7, 8, 36), "inputs": inputs}
    for sms in (None, 5):
        check(stream, problem, stream.Options(), make_step(problem, seed=tokens, **draw), sms)


@pytest.mark.parametrize("sms", [1, 2, 3, 5])
@pytest.mark.parametrize(
    ("requests", "heads"), [(1, 1), (1, 2), (1, 7), (7, 1), (3, 3), (5, 4), (29, 1)]
)
@pytest.mark.parametrize(("kind", "tokens"), [("decode", 1), ("record", 4), ("spec", 3)])
def test_items_per_cta(sms: int, requests: int, heads: int, kind: Any, tokens: int) -> None:
    """1, 2, 3, 7 and more, heads that change at any of them, last CTAs with fewer."""
    problem = Problem(kind, requests, heads, tokens)
    null = (requests // 2,) if requests > 2 else ()
    check(stream, problem, stream.Options(), make_step(problem, seed=sms, null_requests=null), sms)


@pytest.mark.parametrize("heads", [1, 6, 8, 12, 24, 64, 96])
@pytest.mark.parametrize(("kind", "tokens"), FEW)
@pytest.mark.parametrize("pdl", [False, True])
def test_heads_that_fill_the_machine(heads: int, kind: Any, tokens: int, pdl: bool) -> None:
    problem = Problem(kind, 16, heads, tokens)
    check(
        stream, problem, stream.Options(pdl=pdl), make_step(problem, seed=heads, null_requests=(3,))
    )


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    ("kind", "tokens"), [("decode", 1), ("record", 4), ("record", 8), ("spec", 2)]
)
def test_many_items(dtype: Any, kind: Any, tokens: int) -> None:
    problem = Problem(kind, 256, 12, tokens, state_dtype=dtype)
    check(
        stream,
        problem,
        stream.Options(),
        make_step(problem, seed=2, null_requests=(0, 100, 101, 255)),
    )


@pytest.mark.parametrize(("kind", "tokens"), FEW)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "choices",
    [
        {"gate_mode": 1},
        {"evict": True, "ahead": True},
        {"stream_hints": True},
        {"terms": 1},
        {"window": 14},
    ],
    ids=str,
)
@pytest.mark.parametrize("pdl", [False, True])
def test_choices(kind: Any, tokens: int, dtype: Any, choices: dict[str, Any], pdl: bool) -> None:
    problem = Problem(kind, 9, 6, tokens, state_dtype=dtype)
    operands = make_step(problem, seed=1, pad=16, null_requests=(4,), inputs="generic")
    check(stream, problem, stream.Options(pdl=pdl, **choices), operands, sms=7)


@pytest.mark.parametrize(("kind", "tokens"), [("record", 2), ("record", 4), ("spec", 4)])
@pytest.mark.parametrize("layout", ["dim-first", "window-major"])
@pytest.mark.parametrize("stages", [1, 2])
def test_stages(kind: Any, tokens: int, layout: Any, stages: int) -> None:
    problem = Problem(kind, 19, 6, tokens, conv_layout=layout)
    check(
        stream,
        problem,
        stream.Options(stages=stages),
        make_step(problem, seed=1, null_requests=(4,)),
        sms=7,
    )


@pytest.mark.parametrize(("kind", "tokens"), FEW)
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
    kind: Any,
    tokens: int,
    layout: Any,
    change: Callable[[StepOperands], StepOperands],
    choices: dict[str, Any],
) -> None:
    problem = Problem(kind, 5, 3, tokens, conv_layout=layout)
    check(
        stream,
        problem,
        stream.Options(**choices),
        change(make_step(problem, seed=2, null_requests=(1, 4))),
        sms=2,
    )


@pytest.mark.parametrize("tokens", [2, 4, 8])
def test_records_longer_than_the_window_in_any_order(tokens: int) -> None:
    problem = Problem("record", 6, 3, tokens)
    check(stream, problem, stream.Options(), longer_records(make_step(problem, seed=3)), sms=2)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("bound", [-7.5, -5.0, -0.01])
def test_gates_at_their_bounds(dtype: Any, bound: float) -> None:
    """Decays that come to e^-60 over eight tokens, and such that hardly decay."""
    problem = Problem("record", 8, 3, 8, state_dtype=dtype)
    o = make_step(problem, seed=4, lower_bound=bound)
    o.dt_bias[::2] = 20
    o.dt_bias[1::4] = -20
    check(stream, problem, stream.Options(), o, sms=3)


@pytest.mark.parametrize(("kind", "tokens"), [("decode", 1), ("record", 2), ("spec", 2)])
def test_offsets_beyond_32_bits(kind: Any, tokens: int) -> None:
    problem = Problem(kind, 2, 12, tokens)
    small = make_step(problem, seed=5)
    compiled = stream.compile(problem, stream.Options(), replace(current_gpu(), sms=3))
    check_far_pages(stream, compiled, small)


@pytest.mark.parametrize(("kind", "tokens"), FEW)
@pytest.mark.parametrize("ahead", [False, True])
def test_repeated_launches_agree(kind: Any, tokens: int, ahead: bool) -> None:
    """A chain of launches with programmatic edges over eight layers; bits depend on the inputs
    alone."""
    problem = Problem(kind, 33, 12, tokens)
    compiled = stream.compile(problem, stream.Options(ahead=ahead, pdl=True), current_gpu())
    check_repeatable(stream, compiled, lambda i: make_step(problem, seed=6 + i))
