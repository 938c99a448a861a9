"""What the tests of step kernels on a GPU share: one step against the reference, operands in
awkward places."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from kda_kernels.check import compare, reference
from kda_kernels.device.gpu import current_gpu
from kda_kernels.operands import StepOperands
from kda_kernels.problem import HEAD_DIM, Problem


def check(
    module: Any, problem: Problem, options: Any, operands: StepOperands, sms: int | None = None
) -> None:
    """Poison, launch, compare everything that the step may and may not write.

    sms   that the GPU is taken to have: few make the CTAs of a persistent kernel walk many items
    """
    gpu = current_gpu()
    compiled = module.compile(problem, options, gpu if sms is None else replace(gpu, sms=sms))
    expected = reference.step(problem, operands)
    compare.poison(operands)
    module.launch(compiled, operands, torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    assert compare.check_step(problem, operands, expected) is None


def check_far_pages(module: Any, compiled: Any, small: StepOperands) -> None:
    """The same step on pages whose first element lies past 2^31."""
    last = 2**31 // small.state[0].numel() + 8
    used = torch.arange(1, small.state.shape[0], device="cuda")
    state = torch.empty((last + 1, *small.state.shape[1:]), dtype=small.state.dtype, device="cuda")
    window = torch.zeros(
        (last + 1, *small.conv_state.shape[1:]), dtype=torch.bfloat16, device="cuda"
    )
    state[last - used] = small.state[used]
    window[last - used] = small.conv_state[used]
    own = {
        name: tensor.clone()
        for name in ("corrections", "key_gates")
        if (tensor := getattr(small, name)) is not None
    }
    large = replace(small, state=state, conv_state=window, slots=last - small.slots, **own)
    stream = torch.cuda.current_stream().cuda_stream
    module.launch(compiled, small, stream)
    out = small.out.clone()
    module.launch(compiled, large, stream)
    torch.cuda.synchronize()
    assert torch.equal(large.out, out)
    assert torch.equal(state[last - used], small.state[used])
    assert torch.equal(window[last - used], small.conv_state[used])


def check_repeatable(module: Any, compiled: Any, make: Callable[[int], StepOperands]) -> None:
    """Five rounds of launches over eight layers, twice: bits depend on the inputs alone. make: of a
    layer's number."""
    runs = []
    for _ in range(2):
        layers = [make(i) for i in range(8)]
        for _ in range(5):
            for operands in layers:
                module.launch(compiled, operands, torch.cuda.current_stream().cuda_stream)
        torch.cuda.synchronize()
        runs.append(layers)
    for first, second in zip(*runs, strict=True):
        for name in ("out", "state", "conv_state", "corrections", "key_gates"):
            a, b = getattr(first, name), getattr(second, name)
            assert a is b is None or torch.equal(a.nan_to_num(), b.nan_to_num()), name


def any_strides(o: StepOperands) -> StepOperands:
    """Projection and window with rows and slots at odd distances."""
    rows, pitch = o.projected.shape
    projected = torch.full(
        (rows, pitch + 3), torch.nan, dtype=torch.bfloat16, device=o.projected.device
    )
    projected[:, :pitch] = o.projected
    size = o.conv_state[0].numel()
    shape, (_, channel, tap) = o.conv_state.shape, o.conv_state.stride()
    storage = torch.randn(shape[0] * (size + 5), device=projected.device).to(torch.bfloat16)
    window = storage.as_strided(shape, (size + 5, channel, tap))
    window.copy_(o.conv_state)
    return replace(o, projected=projected, conv_state=window)


def longer_window(o: StepOperands) -> StepOperands:
    """Windows of three more entries, in the same layout."""
    slots, channels, entries = o.conv_state.shape
    major = o.conv_state.stride(1) == 1
    shape = (slots, entries + 3, channels) if major else (slots, channels, entries + 3)
    window = torch.randn(shape, device=o.conv_state.device).to(torch.bfloat16)
    window = window.transpose(1, 2) if major else window
    window[:, :, :entries] = o.conv_state
    return replace(o, conv_state=window)


def longer_records(o: StepOperands) -> StepOperands:
    """Three more records and entries in each, not from the first on; the fourth request has
    none."""
    assert o.record_rows is not None
    assert o.corrections is not None
    count, heads, tokens = o.corrections.shape[:3]
    rows = o.record_rows + 2
    rows[3] = -4
    corrections = torch.randn(count + 3, heads, tokens + 3, HEAD_DIM, device="cuda")
    key_gates = torch.randn(count + 3, heads, tokens + 3, 2 * HEAD_DIM, device="cuda").to(
        torch.bfloat16
    )
    return replace(o, corrections=corrections, key_gates=key_gates, record_rows=rows)


def bf16_weights(o: StepOperands) -> StepOperands:
    assert o.conv_bias is not None
    return replace(o, conv_weight=o.conv_weight.bfloat16(), conv_bias=o.conv_bias.bfloat16())


layouts_and_weights = pytest.mark.parametrize(
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
"""What is changed in the operands, and the kernel's choices that take it."""


def forget_rejected(operands: StepOperands) -> StepOperands:
    """NaN in the records' entries past the pending tokens."""
    assert operands.pending is not None
    for tensor in (operands.corrections, operands.key_gates):
        assert tensor is not None
        for row, n in enumerate(operands.pending.tolist()):
            tensor[row, :, max(n, 0) :] = torch.nan
    return operands
