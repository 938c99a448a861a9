"""KdaWide on a GPU against the float64 reference, on awkward shapes, with poisoned outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kda_kernels.device.gpu import current_gpu
from kda_kernels.operands import StepOperands, make_step
from kda_kernels.problem import Problem
from kda_kernels.variants import wide
from support.gpu_checks import (
    check,
    check_far_pages,
    check_repeatable,
    layouts_and_weights,
    longer_records,
)

pytestmark = pytest.mark.gpu

KINDS = (
    ("decode", 1, "recurrence"),
    *(("record", q, "chunked") for q in range(2, 9)),
    *(("spec", q, "recurrence") for q in range(2, 9)),
)
FEW = tuple(
    k
    for k in KINDS
    if k[:2] in (("decode", 1), ("record", 3), ("record", 4), ("record", 8), ("spec", 3))
)


@pytest.mark.parametrize(("kind", "tokens", "form"), KINDS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("gate_mode", [0, 1])
@pytest.mark.parametrize("inputs", ["model", "generic"])
def test_every_kind(
    kind: Any, tokens: int, form: Any, dtype: Any, gate_mode: int, inputs: Any
) -> None:
    problem = Problem(kind, 37, 3, tokens, state_dtype=dtype)
    operands = make_step(problem, seed=tokens, pad=64, null_requests=(0, 7, 36), inputs=inputs)
    check(wide, problem, wide.Options(form, gate_mode=gate_mode), operands)


@pytest.mark.parametrize("heads", [1, 6, 8, 12, 24, 64, 96])
@pytest.mark.parametrize(("kind", "tokens", "form"), FEW)
@pytest.mark.parametrize("pdl", [False, True])
def test_heads_that_fill_the_machine(
    heads: int, kind: Any, tokens: int, form: Any, pdl: bool
) -> None:
    problem = Problem(kind, 16, heads, tokens)
    check(
        wide,
        problem,
        wide.Options(form, pdl=pdl),
        make_step(problem, seed=heads, null_requests=(3,)),
    )


@pytest.mark.parametrize(("kind", "tokens", "form"), FEW)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "choices", [{"evict": True}, {"stream_hints": True}, {"terms": 1}], ids=str
)
def test_choices(kind: Any, tokens: int, form: Any, dtype: Any, choices: dict[str, Any]) -> None:
    problem = Problem(kind, 9, 6, tokens, state_dtype=dtype)
    operands = make_step(problem, seed=1, pad=16, null_requests=(4,), inputs="generic")
    check(wide, problem, wide.Options(form, **choices), operands)


@pytest.mark.parametrize("tokens", range(2, 9))
@pytest.mark.parametrize("layout", ["dim-first", "window-major"])
@pytest.mark.parametrize("ctas", [1, 2, 3])
def test_records_with_fewer_lines_of_the_state_at_a_time(
    tokens: int, layout: Any, ctas: int
) -> None:
    problem = Problem("record", 90, 12, tokens, conv_layout=layout)
    check(
        wide,
        problem,
        wide.Options("chunked", ctas=ctas),
        make_step(problem, seed=7, pad=16, null_requests=(4,)),
    )


@pytest.mark.parametrize("tokens", [2, 5, 8])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_spec_goes_on_from_any_token_in_place(tokens: int, dtype: Any) -> None:
    """Each request's state is read from one of the slots that the step writes."""
    problem = Problem("spec", tokens + 2, 3, tokens, state_dtype=dtype)
    operands = make_step(problem, seed=8, pad=16)
    assert operands.accepted is not None
    operands.accepted.copy_(torch.arange(tokens + 2, device=operands.accepted.device))
    check(wide, problem, wide.Options(), operands)


@pytest.mark.parametrize(("kind", "tokens", "form"), FEW)
@pytest.mark.parametrize("layout", ["dim-first", "window-major"])
@layouts_and_weights
def test_layouts_and_weights(
    kind: Any,
    tokens: int,
    form: Any,
    layout: Any,
    change: Callable[[StepOperands], StepOperands],
    choices: dict[str, Any],
) -> None:
    problem = Problem(kind, 5, 3, tokens, conv_layout=layout)
    check(
        wide,
        problem,
        wide.Options(form, **choices),
        change(make_step(problem, seed=2, null_requests=(1, 4))),
    )


@pytest.mark.parametrize("tokens", [2, 4, 8])
def test_records_longer_than_the_window_in_any_order(tokens: int) -> None:
    problem = Problem("record", 6, 3, tokens)
    check(wide, problem, wide.Options("chunked"), longer_records(make_step(problem, seed=3)))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("bound", [-7.5, -5.0, -0.01])
def test_gates_at_their_bounds(dtype: Any, bound: float) -> None:
    """Decays that come to e^-60 over eight tokens, and such that hardly decay."""
    problem = Problem("record", 8, 3, 8, state_dtype=dtype)
    o = make_step(problem, seed=4, lower_bound=bound)
    o.dt_bias[::2] = 20
    o.dt_bias[1::4] = -20
    check(wide, problem, wide.Options("chunked"), o)


@pytest.mark.parametrize(
    ("kind", "tokens", "form"), [("decode", 1, "recurrence"), ("record", 2, "chunked")]
)
def test_offsets_beyond_32_bits(kind: Any, tokens: int, form: Any) -> None:
    problem = Problem(kind, 2, 12, tokens)
    small = make_step(problem, seed=5)
    compiled = wide.compile(problem, wide.Options(form), current_gpu())
    check_far_pages(wide, compiled, small)


@pytest.mark.parametrize(("kind", "tokens", "form"), FEW)
def test_repeated_launches_agree(kind: Any, tokens: int, form: Any) -> None:
    """A chain of launches with programmatic edges over eight layers; bits depend on the inputs
    alone."""
    problem = Problem(kind, 33, 12, tokens)
    compiled = wide.compile(problem, wide.Options(form, pdl=True), current_gpu())
    check_repeatable(wide, compiled, lambda i: make_step(problem, seed=6 + i))
