"""The stock chain on a GPU against the reference, inside a CUDA graph, on awkward shapes, with
poisoned outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from kda_kernels import stock
from kda_kernels.check import compare, reference
from kda_kernels.device.gpu import current_gpu
from kda_kernels.operands import StepOperands, address_table, make_commit, make_step
from kda_kernels.problem import Problem
from support.naive import naive

pytestmark = pytest.mark.gpu

OPTIONS = [
    stock.Options(),
    stock.Options(8, 1),
    stock.Options(16, 2),
    stock.Options(64, 8),
    stock.Options(128, 8),
]


def captured(
    warm_up: Callable[[int], None], enqueue: Callable[[int], None]
) -> torch.cuda.CUDAGraph:
    """A graph of `enqueue`, whose argument is the stream handle; what `warm_up` did before it is
    ordered first."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    warm_up(side.cuda_stream)
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        enqueue(side.cuda_stream)
    return graph


def check_step(problem: Problem, operands: StepOperands, options: stock.Options) -> None:
    compiled = stock.compile(problem, options, current_gpu())
    # The warm-up works on operands of its own: a step may change its state.
    other = replace(operands, **{
        name: getattr(operands, name).clone(memory_format=torch.preserve_format)
        for name in ("conv_state", "state", "out", "corrections", "key_gates") if getattr(operands, name) is not None
    })  # fmt: skip
    expected = reference.step(problem, operands)
    compare.poison(operands)
    graph = captured(
        lambda stream: stock.launch(compiled, other, stream),
        lambda stream: stock.launch(compiled, operands, stream),
    )
    assert compare.check_step(problem, operands, expected) is not None, (
        "capturing must not run anything"
    )
    graph.replay()
    torch.cuda.synchronize()
    assert compare.check_step(problem, operands, expected) is None


@pytest.mark.parametrize(
    ("layout", "inputs"), [("dim-first", "model"), ("window-major", "generic")]
)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("requests", "heads"), [(1, 1), (1, 12), (5, 3), (33, 12), (7, 96)])
@pytest.mark.parametrize(("kind", "tokens"), [("decode", 1), ("spec", 2), ("spec", 5), ("record", 2), ("record", 4),
                                              ("record", 7), ("record", 8)])  # fmt: skip
def test_steps(
    kind: str, tokens: int, requests: int, heads: int, dtype: str, layout: str, inputs: str
) -> None:
    problem = Problem(kind, requests, heads, tokens, state_dtype=dtype, conv_layout=layout)
    operands = make_step(
        problem, seed=1, inputs=inputs, pad=16, null_requests=(1, 2) if requests > 2 else ()
    )
    check_step(problem, operands, stock.Options())


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize(("kind", "tokens"), [("decode", 1), ("spec", 3), ("record", 8)])
def test_every_spec(kind: str, tokens: int, dtype: str, options: stock.Options) -> None:
    problem = Problem(kind, 6, 12, tokens, state_dtype=dtype)
    check_step(problem, make_step(problem, seed=2), options)


@pytest.mark.parametrize(("kind", "tokens"), [("decode", 1), ("spec", 4), ("record", 4)])
def test_unbounded_gate_without_bias(kind: str, tokens: int) -> None:
    problem = Problem(kind, 6, 3, tokens)
    check_step(
        problem,
        make_step(problem, seed=3, lower_bound=None, conv_bias=False, inputs="generic"),
        stock.Options(),
    )


def test_bf16_weights_and_a_padded_fp32_window() -> None:
    problem = Problem("record", 5, 12, 4)
    operands = make_step(problem, seed=4, null_requests=(2,))
    flat = torch.randn(6, 3 * 1536 * 9 + 3, device="cuda")
    check_step(problem, replace(
        operands, conv_weight=operands.conv_weight.bfloat16(), conv_bias=operands.conv_bias.bfloat16(),
        conv_state=flat.as_strided((6, 3 * 1536, 9), (flat.stride(0), 9, 1))), stock.Options())  # fmt: skip


@pytest.mark.parametrize(
    "problem", [Problem("decode", 256, 96), Problem("record", 128, 96, 8)], ids=lambda p: p.kind
)
def test_many_items(problem: Problem) -> None:
    check_step(problem, make_step(problem, seed=5), stock.Options())


@pytest.mark.parametrize("kind", ["spec", "record"])
def test_ragged_windows(kind: str) -> None:
    problem = Problem(kind, 5, 3, 3)
    operands = make_step(problem, seed=6, pad=16, null_requests=(2,))
    lengths, starts = [3, 0, 2, 1, 2], [0, 3, 3, 5, 6]
    packed = replace(
        operands, projected=operands.projected[:10], out=torch.full_like(operands.out[:10], 3)
    )
    on_cpu = replace(
        packed, **{k: v.cpu() for k, v in vars(packed).items() if isinstance(v, torch.Tensor)}
    )
    out, state, window, corrections, _ = naive(kind, on_cpu, starts, lengths)
    scratch = stock.Scratch.allocate(10, 384, torch.device("cuda", torch.cuda.current_device()))
    stock.step(
        packed,
        scratch,
        3,
        query_start_loc=torch.tensor([*starts, 8], dtype=torch.int32, device="cuda"),
    )
    assert (packed.out[8:] == 3).all()
    torch.testing.assert_close(packed.out[:8].double().cpu(), out[:8], rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(packed.state.double().cpu(), state, rtol=1e-3, atol=1e-3)
    assert torch.equal(packed.conv_state.double().cpu(), window)
    if corrections is not None:
        torch.testing.assert_close(
            packed.corrections.double().cpu(), corrections, rtol=1e-3, atol=1e-2
        )


@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("kind", ["commit", "flush"])
@pytest.mark.parametrize(
    ("requests", "heads", "tokens", "layers"), [(1, 1, 2, 1), (7, 3, 5, 4), (9, 12, 8, 3)]
)
def test_commit(
    kind: str, requests: int, heads: int, tokens: int, layers: int, dtype: str, align: bool
) -> None:
    problem = Problem(kind, requests, heads, tokens, layers, state_dtype=dtype, pending="mix")
    null = (1, 2) if requests > 2 else ()
    warm, operands = (
        make_commit(problem, seed=s, align=align, pad=16, null_requests=null) for s in (7, 8)
    )
    expected = [reference.commit(operands, layer) for layer in range(layers)]
    compare.poison(operands)
    compiled = stock.compile(problem, stock.Options(), current_gpu())
    graph = captured(
        lambda stream: stock.launch(compiled, warm, stream),
        lambda stream: stock.launch(compiled, operands, stream),
    )
    graph.replay()
    torch.cuda.synchronize()
    for layer in range(layers):
        assert compare.check_commit(operands, expected[layer], layer) is None


@pytest.mark.parametrize("layout", ["dim-first", "window-major"])
@pytest.mark.parametrize("n", [0, 1, 2, 3])
def test_deferred_steps_equal_eager_ones(n: int, layout: str) -> None:
    """record, defer, flush plan, fold, roll, record: the reference's replay."""
    problem = Problem("record", 6, 3, 3, conv_layout=layout)
    operands = make_step(problem, seed=10, null_requests=(1,))
    compiled = stock.compile(problem, stock.Options(), current_gpu())
    stream = torch.cuda.current_stream()
    stock.launch(compiled, operands, stream)
    accepted = torch.full((6,), n, dtype=torch.int32, device="cuda")
    pending = torch.zeros(6, dtype=torch.int32, device="cuda")
    slots = operands.slots[:, 0].contiguous()
    stock.defer(accepted, pending, operands.record_rows, slots)
    assert accepted.tolist() == [0, n, 0, 0, 0, 0]
    following = replace(operands, projected=make_step(problem, seed=11).projected)
    replayed = Problem("replay", 6, 3, 3, pending=n, conv_layout=layout)
    expected = reference.step(replayed, replace(following, pending=pending))

    commit = make_commit(Problem("flush", 6, 3, 3), seed=0)
    plan = replace(
        commit, states=(operands.state,), corrections=(operands.corrections,), key_gates=(operands.key_gates,),
        state_table=address_table((operands.state,)), corrections_table=address_table((operands.corrections,)),
        key_gates_table=address_table((operands.key_gates,)), A_log=operands.A_log[None],
        dt_bias=operands.dt_bias.view(1, 3, 128), record_rows=operands.record_rows)  # fmt: skip
    stock.flush_plan(
        pending, operands.record_rows, slots, plan.source, plan.length, plan.destination, 3
    )
    stock.fold(plan)
    table = address_table((operands.conv_state,))
    stock.roll_window([operands.conv_state], table, plan.source, plan.length, plan.destination)
    stock.launch(compiled, following, stream)
    torch.cuda.synchronize()
    assert compare.check_step(replayed, replace(following, pending=pending), expected) is None


def test_a_selection_of_requests_can_be_checked_alone() -> None:
    problem = Problem("record", 64, 12, 4)
    operands = make_step(problem, seed=12, null_requests=(3,))
    kept = torch.tensor([0, 3, 17, 63])
    part, before = reference.select(problem, operands, kept)
    expected = reference.step(part, before)
    stock.launch(
        stock.compile(problem, stock.Options(), current_gpu()),
        operands,
        torch.cuda.current_stream(),
    )
    torch.cuda.synchronize()
    assert compare.check_step(part, reference.select(problem, operands, kept)[1], expected) is None


@pytest.mark.parametrize("kind", ["decode", "record"])
def test_launches_after_the_first_allocate_nothing(kind: str) -> None:
    problem = Problem(kind, 4, 12, 1 if kind == "decode" else 4)
    compiled, operands = (
        stock.compile(problem, stock.Options(), current_gpu()),
        make_step(problem, seed=13),
    )
    stream = torch.cuda.current_stream()
    stock.launch(compiled, operands, stream)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(3):
        stock.launch(compiled, operands, stream.cuda_stream)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
