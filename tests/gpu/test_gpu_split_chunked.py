"""KdaSplit's chunked windows on a GPU against the float64 reference, on awkward shapes, with
poisoned outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kda_kernels.device.gpu import current_gpu
from kda_kernels.operands import StepOperands, make_step
from kda_kernels.problem import Problem
from kda_kernels.variants import split, split_chunked
from support.gpu_checks import (
    check,
    check_far_pages,
    check_repeatable,
    layouts_and_weights,
    longer_records,
)

pytestmark = pytest.mark.gpu

SHAPES = split_chunked.SHAPES
FEW = ((1, 256), (2, 256), (4, 128), (8, 128))


def options(shape: tuple[int, int], **choices: Any) -> split.Options:
    return split.Options(
        **{"split": shape[0], "threads": shape[1], "gate_mode": 0, "form": "chunked", **choices}
    )


def record(requests: int, heads: int, tokens: int, **more: Any) -> Problem:
    return Problem("record", requests, heads, tokens, **more)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tokens", range(2, 9))
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_shape(shape: tuple[int, int], tokens: int, dtype: Any) -> None:
    problem = record(37, 3, tokens, state_dtype=dtype)
    check(
        split,
        problem,
        options(shape),
        make_step(problem, seed=tokens, pad=64, null_requests=(0, 7, 36), inputs="generic"),
    )


@pytest.mark.parametrize("heads", [1, 6, 8, 12, 24, 64, 96])
@pytest.mark.parametrize("shape", FEW)
@pytest.mark.parametrize("tokens", [4, 8])
@pytest.mark.parametrize("pdl", [False, True])
def test_heads_that_fill_the_machine(
    heads: int, shape: tuple[int, int], tokens: int, pdl: bool
) -> None:
    problem = record(16, heads, tokens)
    check(
        split, problem, options(shape, pdl=pdl), make_step(problem, seed=heads, null_requests=(3,))
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("tokens", "dtype"), [(2, "fp32"), (4, "bf16"), (5, "fp32"), (8, "fp32"), (8, "bf16")]
)
@pytest.mark.parametrize(
    "choices",
    [
        {"gate_mode": 1},
        {"terms": 1},
        {"state_late": True},
        {"spin": True},
        {"stream_hints": False},
        {"gate_mode": 1, "pdl": True, "state_late": True},
    ],
    ids=str,
)
def test_choices(shape: tuple[int, int], tokens: int, dtype: Any, choices: dict[str, Any]) -> None:
    if choices.get("terms") == 1 and dtype == "fp32":
        pytest.skip("one term is for BF16 states")
    if choices.get("spin") and shape[0] == 1:
        pytest.skip("nothing to wait for")
    problem = record(9, 6, tokens, state_dtype=dtype)
    check(
        split,
        problem,
        options(shape, **choices),
        make_step(problem, seed=1, pad=16, null_requests=(4,), inputs="generic"),
    )


@pytest.mark.parametrize("shape", FEW)
@pytest.mark.parametrize("tokens", [3, 8])
@pytest.mark.parametrize("layout", ["dim-first", "window-major"])
@layouts_and_weights
def test_layouts_and_weights(
    shape: tuple[int, int],
    tokens: int,
    layout: Any,
    change: Callable[[StepOperands], StepOperands],
    choices: dict[str, Any],
) -> None:
    problem = record(5, 3, tokens, conv_layout=layout)
    check(
        split,
        problem,
        options(shape, **choices),
        change(make_step(problem, seed=2, null_requests=(1, 4))),
    )


@pytest.mark.parametrize("shape", FEW)
def test_records_longer_than_the_window_in_any_order(shape: tuple[int, int]) -> None:
    problem = record(6, 3, 4)
    check(split, problem, options(shape), longer_records(make_step(problem, seed=3)))


@pytest.mark.parametrize("shape", FEW)
@pytest.mark.parametrize("lower_bound", [-7.5, -0.01])
def test_strongest_and_weakest_decays(shape: tuple[int, int], lower_bound: float) -> None:
    problem = record(8, 3, 8)
    check(
        split,
        problem,
        options(shape),
        replace(make_step(problem, seed=4, inputs="generic"), lower_bound=lower_bound),
    )


@pytest.mark.parametrize("shape", FEW)
def test_keys_of_zeros(shape: tuple[int, int]) -> None:
    """Their norm is that of epsilon."""
    problem = record(4, 3, 8)
    o = make_step(problem, seed=5)
    assert o.conv_bias is not None
    keys = slice(3 * 128, 6 * 128)
    o.projected[:, keys] = 0
    o.conv_state[:, keys] = 0
    o.conv_bias[keys] = 0
    check(split, problem, options(shape), o)


@pytest.mark.parametrize("shape", FEW)
def test_offsets_beyond_32_bits(shape: tuple[int, int]) -> None:
    problem = record(2, 12, 2)
    small = make_step(problem, seed=6)
    compiled = split.compile(problem, options(shape), current_gpu())
    check_far_pages(split, compiled, small)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tokens", [3, 8])
def test_repeated_launches_agree(shape: tuple[int, int], tokens: int) -> None:
    """A chain of launches with programmatic edges over eight layers; bits depend on the inputs
    alone."""
    problem = record(33, 12, tokens)
    compiled = split.compile(problem, options(shape, pdl=True), current_gpu())
    check_repeatable(split, compiled, lambda i: make_step(problem, seed=7 + i))
