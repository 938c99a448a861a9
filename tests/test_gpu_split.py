"""KdaSplit on a GPU against the float64 reference, on awkward shapes, with poisoned outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from kda_kernels import compare, reference, split
from kda_kernels.gpu import current_gpu
from kda_kernels.operands import StepOperands, make_step
from kdabench.problem import Problem

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


def spec(shape: tuple[int, int, int], **choices: Any) -> split.Spec:
    return split.Spec(split=shape[0], threads=shape[1], lanes_per_row=shape[2], **choices)


def checked(problem: Problem, of: split.Spec, operands: StepOperands) -> None:
    """Poison, launch, compare everything that the step may and may not write."""
    compiled = split.compile(problem, of, current_gpu())
    expected = reference.step(problem, operands)
    compare.poison(operands)
    split.launch(compiled, operands, torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    assert compare.check_step(problem, operands, expected) is None


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("kind", "tokens"), KINDS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_every_shape(shape: tuple[int, int, int], kind: Any, tokens: int, dtype: Any) -> None:
    problem = Problem(kind, 37, 3, tokens, state_dtype=dtype)
    checked(problem, spec(shape), make_step(problem, seed=tokens, pad=64, null_requests=(0, 7, 36), inputs="generic"))


@pytest.mark.parametrize("heads", [1, 6, 8, 12, 24, 64, 96])
@pytest.mark.parametrize("shape", [(1, 256, 16), (4, 128, 16)])
@pytest.mark.parametrize(("kind", "tokens"), [("decode", 1), ("record", 4), ("spec", 4)])
@pytest.mark.parametrize("pdl", [False, True])
def test_heads_that_fill_the_machine(
    heads: int, shape: tuple[int, int, int], kind: Any, tokens: int, pdl: bool
) -> None:
    problem = Problem(kind, 16, heads, tokens)
    checked(problem, spec(shape, pdl=pdl), make_step(problem, seed=heads, null_requests=(3,)))


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
def test_choices(shape: tuple[int, int, int], kind: Any, tokens: int, choices: dict[str, Any]) -> None:
    if choices.get("spin") and shape[0] == 1:
        pytest.skip("nothing to wait for")
    problem = Problem(kind, 9, 6, tokens)
    checked(problem, spec(shape, **choices), make_step(problem, seed=1, pad=16, null_requests=(4,), inputs="generic"))


def any_strides(o: StepOperands) -> StepOperands:
    """Projection and window with rows and slots at odd distances."""
    rows, pitch = o.projected.shape
    projected = torch.full((rows, pitch + 3), torch.nan, dtype=torch.bfloat16, device=o.projected.device)
    projected[:, :pitch] = o.projected
    size = o.conv_state[0].numel()
    shape, (_, channel, tap) = o.conv_state.shape, o.conv_state.stride()
    storage = torch.randn(shape[0] * (size + 5), device=projected.device).to(torch.bfloat16)
    window = storage.as_strided(shape, (size + 5, channel, tap))
    window.copy_(o.conv_state)
    return replace(o, projected=projected, conv_state=window)


def longer_window(o: StepOperands) -> StepOperands:
    slots, channels, entries = o.conv_state.shape
    major = o.conv_state.stride(1) == 1
    shape = (slots, entries + 3, channels) if major else (slots, channels, entries + 3)
    window = torch.randn(shape, device=o.conv_state.device).to(torch.bfloat16)
    window = window.transpose(1, 2) if major else window
    window[:, :, :entries] = o.conv_state
    return replace(o, conv_state=window)


def bf16_weights(o: StepOperands) -> StepOperands:
    assert o.conv_bias is not None
    return replace(o, conv_weight=o.conv_weight.bfloat16(), conv_bias=o.conv_bias.bfloat16())


@pytest.mark.parametrize("shape", [(1, 256, 16), (8, 128, 16)])
@pytest.mark.parametrize(("kind", "tokens"), KINDS)
@pytest.mark.parametrize("layout", ["dim-first", "window-major"])
@pytest.mark.parametrize(
    ("change", "choices"),
    [
        (lambda o: o, {}),
        (any_strides, {"streamable": False}),
        (longer_window, {"window": 13}),
        (bf16_weights, {"conv_weight_dtype": "bf16"}),
        (lambda o: replace(o, conv_bias=None), {}),
    ],
    ids=["plain", "any strides", "longer window", "bf16 weights", "no bias"],
)
def test_layouts_and_weights(
    shape: tuple[int, int, int],
    kind: Any,
    tokens: int,
    layout: Any,
    change: Callable[[StepOperands], StepOperands],
    choices: dict[str, Any],
) -> None:
    problem = Problem(kind, 5, 3, tokens, conv_layout=layout)
    checked(problem, spec(shape, **choices), change(make_step(problem, seed=2, null_requests=(1, 4))))


@pytest.mark.parametrize("shape", [(1, 256, 16), (4, 128, 16)])
def test_records_longer_than_the_window_in_any_order(shape: tuple[int, int, int]) -> None:
    problem = Problem("record", 6, 3, 4)
    o = make_step(problem, seed=3)
    assert o.record_rows is not None
    rows = o.record_rows + 2
    rows[3] = -4
    corrections = torch.randn(9, 3, 7, 128, device="cuda")
    key_gates = torch.randn(9, 3, 7, 256, device="cuda").to(torch.bfloat16)
    o = replace(o, corrections=corrections, key_gates=key_gates, record_rows=rows)
    checked(problem, spec(shape), o)


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
    checked(problem, spec(shape), replace(o, slots=slots, accepted=accepted))


@pytest.mark.parametrize(("kind", "tokens"), [("decode", 1), ("spec", 2), ("record", 2)])
def test_offsets_beyond_32_bits(kind: Any, tokens: int) -> None:
    problem = Problem(kind, 2, 12, tokens)
    small = make_step(problem, seed=5)
    last = 2**31 // (12 * 128 * 128) + 8  # pages whose first element lies past 2^31
    used = torch.arange(1, small.state.shape[0], device="cuda")
    state = torch.empty((last + 1, 12, 128, 128), device="cuda")
    window = torch.zeros((last + 1, *small.conv_state.shape[1:]), dtype=torch.bfloat16, device="cuda")
    state[last - used] = small.state[used]
    window[last - used] = small.conv_state[used]
    large = replace(small, state=state, conv_state=window, slots=last - small.slots)
    compiled = split.compile(problem, spec((4, 128, 16)), current_gpu())
    for operands in (small, large):
        split.launch(compiled, operands, torch.cuda.current_stream().cuda_stream)
        if operands is small:
            out = small.out.clone()
    torch.cuda.synchronize()
    assert torch.equal(large.out, out)
    assert torch.equal(state[last - used], small.state[used])
    assert torch.equal(window[last - used], small.conv_state[used])


@pytest.mark.parametrize("shape", [(1, 256, 16), (8, 128, 16)])
@pytest.mark.parametrize(("kind", "tokens"), [("decode", 1), ("record", 8)])
def test_repeated_launches_agree(shape: tuple[int, int, int], kind: Any, tokens: int) -> None:
    """A chain of launches with programmatic edges over eight layers; bits depend on the inputs alone."""
    problem = Problem(kind, 33, 12, tokens)
    compiled = split.compile(problem, spec(shape, pdl=True), current_gpu())
    runs = []
    for _ in range(2):
        layers = [make_step(problem, seed=6 + i) for i in range(8)]
        for _ in range(5):
            for operands in layers:
                split.launch(compiled, operands, torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
        runs.append(layers)
    for a, b in zip(*runs, strict=True):
        assert torch.equal(a.out, b.out)
        assert torch.equal(a.state, b.state)
        assert torch.equal(a.conv_state, b.conv_state)
