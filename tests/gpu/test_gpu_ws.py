"""KdaWS on a GPU against the float64 reference, on awkward shapes, with poisoned outputs.

A small number of SMs in the Gpu makes CTAs walk many items.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from kda_kernels.device.gpu import current_gpu
from kda_kernels.operands import StepOperands, make_step
from kda_kernels.problem import Problem
from kda_kernels.variants import ws
from support.gpu_checks import bf16_weights, check

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("tokens", range(2, 9))
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("layout", ["dim-first", "window-major"])
@pytest.mark.parametrize("kind", ["record", "spec"])
def test_every_window(tokens: int, dtype: Any, layout: Any, kind: Any) -> None:
    problem = Problem(kind, 37, 3, tokens, state_dtype=dtype, conv_layout=layout)
    operands = make_step(
        problem, seed=tokens, pad=64, null_requests=(0, 7, 8, 36), inputs="generic"
    )
    check(ws, problem, ws.Options(), operands)
    check(ws, problem, ws.Options(), operands, sms=9)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("layout", ["dim-first", "window-major"])
@pytest.mark.parametrize("sms", [1, 5, None])
def test_decode(dtype: Any, layout: Any, sms: int | None) -> None:
    problem = Problem("decode", 37, 3, state_dtype=dtype, conv_layout=layout)
    check(
        ws,
        problem,
        ws.Options(),
        make_step(problem, seed=1, pad=64, null_requests=(0, 7, 8, 36)),
        sms,
    )


def test_accepted_counts_beyond_the_window_and_none() -> None:
    problem = Problem("spec", 9, 2, 3)
    o = make_step(problem, seed=8, null_requests=(4,))
    accepted = torch.arange(-1, 8, dtype=torch.int32, device="cuda")
    check(ws, problem, ws.Options(), replace(o, accepted=accepted), sms=4)


@pytest.mark.parametrize("sms", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize(
    ("requests", "heads"), [(1, 1), (1, 2), (1, 7), (7, 1), (3, 3), (5, 4), (29, 1)]
)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_items_per_cta(sms: int, requests: int, heads: int, dtype: Any) -> None:
    """1, 2, 3, 7 and more, last CTAs with fewer."""
    problem = Problem("record", requests, heads, 4, state_dtype=dtype)
    null = (requests // 2,) if requests > 2 else ()
    check(ws, problem, ws.Options(), make_step(problem, seed=sms, null_requests=null), sms)


@pytest.mark.parametrize("heads", [1, 6, 8, 12, 24, 64, 96])
@pytest.mark.parametrize("tokens", [4, 8])
@pytest.mark.parametrize("pdl", [False, True])
def test_heads_that_fill_the_machine(heads: int, tokens: int, pdl: bool) -> None:
    problem = Problem("record", 40, heads, tokens)
    check(ws, problem, ws.Options(pdl=pdl), make_step(problem, seed=heads, null_requests=(3,)))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("tokens", [4, 8])
def test_many_items(dtype: Any, tokens: int) -> None:
    problem = Problem("record", 256, 12, tokens, state_dtype=dtype)
    check(ws, problem, ws.Options(), make_step(problem, seed=2, null_requests=(0, 100, 101, 255)))


@pytest.mark.parametrize("tokens", [3, 8])
@pytest.mark.parametrize(
    ("choices", "dtype", "change"),
    [
        ({"gate_mode": 1}, "fp32", None),
        ({"terms": 1}, "bf16", None),
        ({"conv_weight_dtype": "bf16"}, "fp32", bf16_weights),
        ({}, "fp32", lambda o: replace(o, conv_bias=None)),
    ],
)
def test_choices(
    tokens: int,
    choices: dict[str, Any],
    dtype: Any,
    change: Callable[[StepOperands], StepOperands] | None,
) -> None:
    problem = Problem("record", 9, 6, tokens, state_dtype=dtype)
    operands = make_step(problem, seed=1, pad=16, null_requests=(4,), inputs="generic")
    options = ws.Options(**choices)
    check(ws, problem, options, operands if change is None else change(operands), sms=6)


@pytest.mark.parametrize("layout", ["dim-first", "window-major"])
@pytest.mark.parametrize(("tokens", "window"), [(4, 6), (4, 10), (5, 8), (7, 9), (8, 11)])
def test_padded_strides_and_longer_windows(layout: Any, tokens: int, window: int) -> None:
    """Entries behind the step's stay; what lies between padded rows and slots too."""
    problem = Problem("record", 11, 6, tokens, conv_layout=layout)
    o = make_step(problem, seed=3, pad=32, null_requests=(0,))
    slots, channels, entries = o.conv_state.shape
    size = channels * window + 8
    storage = torch.randn(slots, size, device="cuda").bfloat16()
    inner = (window, 1) if layout == "dim-first" else (1, channels)
    conv_state = storage.as_strided((slots, channels, window), (size, *inner))
    conv_state[:, :, :entries] = o.conv_state
    rows, pitch = o.projected.shape
    projected = torch.full((rows, pitch + 24), torch.nan, dtype=torch.bfloat16, device="cuda")
    projected[:, :pitch] = o.projected
    check(
        ws,
        problem,
        ws.Options(window=window),
        replace(o, conv_state=conv_state, projected=projected),
        sms=5,
    )


def test_longer_records_negative_rows_and_a_column_of_a_slot_table() -> None:
    problem = Problem("record", 12, 6, 4)
    o = make_step(problem, seed=4, pad=16, null_requests=(2, 5))
    assert o.record_rows is not None
    rows = torch.where(o.record_rows >= 0, o.record_rows + 3, -1)
    rows[7] = -4
    table = torch.full((12, 5), 9, dtype=torch.int32, device="cuda")
    table[:, :1] = o.slots
    records: dict[str, Any] = {
        "corrections": torch.randn(16, 6, 7, 128, device="cuda"),
        "key_gates": torch.randn(16, 6, 7, 256, device="cuda").bfloat16(),
    }
    check(
        ws,
        problem,
        ws.Options(),
        replace(o, record_rows=rows, slots=table[:, :1], **records),
        sms=4,
    )


@pytest.mark.parametrize("null", [(0,), (0, 1), tuple(range(6))])
def test_null_requests_first_last_and_alone(null: tuple[int, ...]) -> None:
    problem = Problem("record", 6, 2, 4)
    for sms in (1, 2, 6):
        check(ws, problem, ws.Options(), make_step(problem, seed=5, null_requests=null), sms)
        check(
            ws,
            problem,
            ws.Options(),
            make_step(problem, seed=6, null_requests=tuple(5 - b for b in null)),
            sms,
        )


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_offsets_beyond_32_bits(dtype: Any) -> None:
    problem = Problem("record", 3, 12, 4, state_dtype=dtype)
    small = make_step(problem, seed=7)
    pages = 2**31 // (12 * 128 * 128) + 3  # the last slots begin past 2^31 elements
    state = torch.empty((pages, 12, 128, 128), dtype=small.state.dtype, device="cuda")
    slots = torch.tensor([[pages - 1], [1], [pages - 2]], dtype=torch.int32, device="cuda")
    conv_state = torch.zeros(
        (pages, *small.conv_state.shape[1:]), dtype=torch.bfloat16, device="cuda"
    )
    state[slots[:, 0].long()] = small.state[small.slots[:, 0].long()]
    conv_state[slots[:, 0].long()] = small.conv_state[small.slots[:, 0].long()]
    large = replace(
        small, state=state, slots=slots, conv_state=conv_state, out=torch.empty_like(small.out)
    )
    compiled = ws.compile(problem, ws.Options(), current_gpu())
    for operands in (small, large):
        ws.launch(compiled, operands, 0)
    torch.cuda.synchronize()
    assert torch.equal(large.out, small.out)
    assert torch.equal(conv_state[slots[:, 0].long()], small.conv_state[small.slots[:, 0].long()])


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_repeated_launches_agree(dtype: Any) -> None:
    """The window rolls from launch to launch, so every one differs from the last; the bits depend
    on inputs alone.

    Without programmatic launches: the window is read before their wait, and here the launch before
    still writes it.
    """
    problem = Problem("record", 90, 12, 8, state_dtype=dtype)
    a, b = (make_step(problem, seed=10, null_requests=(17,)) for _ in range(2))
    compiled = ws.compile(problem, ws.Options(), current_gpu())
    for operands in (a, b):
        for _ in range(50):
            ws.launch(compiled, operands, torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    for name in ("out", "conv_state", "state", "corrections", "key_gates"):
        x, y = getattr(a, name), getattr(b, name)
        assert torch.equal(x.view(torch.uint8), y.view(torch.uint8)), name
