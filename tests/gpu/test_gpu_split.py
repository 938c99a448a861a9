"""KdaSplit on a GPU against the float64 reference, on awkward shapes, with poisoned outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from kda_kernels.device.gpu import current_gpu
from kda_kernels.operands import StepOperands, make_step
from kda_kernels.problem import Problem
from kda_kernels.variants import split
from support.gpu_checks import (
    check,
    check_far_pages,
    check_repeatable,
    layouts_and_weights,
    longer_records,
)

pytestmark = pytest.mark.gpu

SHAPES = (
    (1, 256, 16),
    (1, 512, 32),
    (1, 256, 8),
    (2, 256, 16),
    (2, 128, 16),
    (2, 128, 32),
    (4, 128, 16),
    (4, 256, 16),
    (8, 128, 16),
    (8, 128, 32),
)
KINDS = (("decode", 1), ("record", 8), ("record", 5), ("record", 2), ("spec", 8), ("spec", 3))


def options(shape: tuple[int, int, int], **choices: Any) -> split.Options:
    return split.Options(split=shape[0], threads=shape[1], lanes_per_row=shape[2], **choices)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("kind", "tokens"), KINDS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_shape(shape: tuple[int, int, int], kind: Any, tokens: int, dtype: Any) -> None:
    problem = Problem(kind, 37, 3, tokens, state_dtype=dtype)
    check(
        split,
        problem,
        options(shape),
        make_step(problem, seed=tokens, pad=64, null_requests=(0, 7, 36), inputs="generic"),
    )


@pytest.mark.parametrize("heads", [1, 6, 8, 12, 24, 64, 96])
@pytest.mark.parametrize("shape", [(1, 256, 16), (4, 128, 16)])
@pytest.mark.parametrize(("kind", "tokens"), [("decode", 1), ("record", 4), ("spec", 4)])
@pytest.mark.parametrize("pdl", [False, True])
def test_heads_that_fill_the_machine(
    heads: int, shape: tuple[int, int, int], kind: Any, tokens: int, pdl: bool
) -> None:
    problem = Problem(kind, 16, heads, tokens)
    check(
        split, problem, options(shape, pdl=pdl), make_step(problem, seed=heads, null_requests=(3,))
    )


@pytest.mark.parametrize("shape", [(1, 256, 16), (2, 128, 32), (4, 128, 16), (8, 128, 16)])
@pytest.mark.parametrize(("kind", "tokens"), KINDS)
@pytest.mark.parametrize(
    "choices",
    [
        {"gate_mode": 0},
        {"gate_mode": 1},
        {"staging": "shared"},
        {"staging": "shared", "evict": True, "state_late": True},
        {"state_late": True},
        {"stream_hints": False},
        {"pdl": True, "staging": "shared"},
        {"pdl": True, "state_late": True},
        {"spin": True},
    ],
    ids=str,
)
def test_choices(
    shape: tuple[int, int, int], kind: Any, tokens: int, choices: dict[str, Any]
) -> None:
    if choices.get("spin") and shape[0] == 1:
        pytest.skip("nothing to wait for")
    problem = Problem(kind, 9, 6, tokens)
    check(
        split,
        problem,
        options(shape, **choices),
        make_step(problem, seed=1, pad=16, null_requests=(4,), inputs="generic"),
    )


@pytest.mark.parametrize("shape", [(1, 256, 16), (8, 128, 16)])
@pytest.mark.parametrize(("kind", "tokens"), KINDS)
@pytest.mark.parametrize("layout", ["dim-first", "window-major"])
@layouts_and_weights
def test_layouts_and_weights(
    shape: tuple[int, int, int],
    kind: Any,
    tokens: int,
    layout: Any,
    change: Callable[[StepOperands], StepOperands],
    choices: dict[str, Any],
) -> None:
    problem = Problem(kind, 5, 3, tokens, conv_layout=layout)
    check(
        split,
        problem,
        options(shape, **choices),
        change(make_step(problem, seed=2, null_requests=(1, 4))),
    )


@pytest.mark.parametrize("shape", [(1, 256, 16), (4, 128, 16)])
def test_records_longer_than_the_window_in_any_order(shape: tuple[int, int, int]) -> None:
    problem = Problem("record", 6, 3, 4)
    check(split, problem, options(shape), longer_records(make_step(problem, seed=3)))


@pytest.mark.parametrize("shape", [(1, 256, 16), (4, 128, 16)])
def test_spec_slots_that_are_null(shape: tuple[int, int, int]) -> None:
    """Some states are not kept; some requests continue from one that was not, and do nothing."""
    problem = Problem("spec", 8, 3, 5)
    o = make_step(problem, seed=4)
    assert o.accepted is not None
    slots, accepted = o.slots.clone(), o.accepted.clone()
    slots[0, 2], accepted[0] = 0, 1
    slots[1, 4], accepted[1] = -1, 4
    slots[2, 2], accepted[2] = 0, 3
    slots[3, 4], accepted[3] = -1, 5
    slots[4, 0], accepted[4] = 0, 2
    check(split, problem, options(shape), replace(o, slots=slots, accepted=accepted))


@pytest.mark.parametrize(("kind", "tokens"), [("decode", 1), ("spec", 2), ("record", 2)])
def test_offsets_beyond_32_bits(kind: Any, tokens: int) -> None:
    problem = Problem(kind, 2, 12, tokens)
    small = make_step(problem, seed=5)
    compiled = split.compile(problem, options((4, 128, 16)), current_gpu())
    check_far_pages(split, compiled, small)


@pytest.mark.parametrize("shape", [(1, 256, 16), (8, 128, 16)])
@pytest.mark.parametrize(("kind", "tokens"), [("decode", 1), ("record", 8)])
def test_repeated_launches_agree(shape: tuple[int, int, int], kind: Any, tokens: int) -> None:
    """A chain of launches with programmatic edges over eight layers; bits depend on the inputs
    alone."""
    problem = Problem(kind, 33, 12, tokens)
    compiled = split.compile(problem, options(shape, pdl=True), current_gpu())
    check_repeatable(split, compiled, lambda i: make_step(problem, seed=6 + i))
