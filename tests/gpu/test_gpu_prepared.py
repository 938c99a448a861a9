"""The dispatcher on a GPU: eager and captured steps against the reference, reloads under a graph,
commits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from kda_kernels.check import compare, reference
from kda_kernels.operands import StepOperands, make_commit, make_step
from kda_kernels.problem import Problem
from kda_kernels.serving.commits import CommitContext
from kda_kernels.serving.layer import Caches, LayerWeights
from kda_kernels.serving.prepared import Choice, DefaultPolicy, PreparedKda

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:no policy for")]

PROBLEMS = [
    Problem("decode", 1, 12),
    Problem("decode", 64, 12, state_dtype="bf16", conv_layout="window-major"),
    Problem("spec", 5, 6, 4),
    Problem("record", 8, 12, 8),
    Problem("record", 33, 6, 2, conv_layout="window-major"),
]


class Stock(DefaultPolicy):
    def ranked(self, *step: object, streamable: bool = True) -> tuple[Choice, ...]:
        return (Choice("stock", {}),)


def weights(o: StepOperands) -> LayerWeights:
    weight = o.conv_weight.transpose(1, 2).reshape(-1, 1, 4).contiguous()
    return LayerWeights(
        weight, o.conv_bias, o.f_b, o.A_log, o.dt_bias, o.norm_weight, o.lower_bound
    )


def caches(o: StepOperands) -> Caches:
    return Caches(o.state, o.conv_state, o.corrections, o.key_gates, o.record_rows)


def copies(o: StepOperands) -> list[torch.Tensor]:
    written = (o.state, o.conv_state, o.corrections, o.key_gates)
    return [t.clone() for t in written if t is not None]


def restore(o: StepOperands, kept: list[torch.Tensor]) -> None:
    written = (o.state, o.conv_state, o.corrections, o.key_gates)
    for tensor, copy in zip((t for t in written if t is not None), kept, strict=True):
        tensor.copy_(copy)


def captured(run: Callable[[], None]) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: f"{p.kind}{p.tokens}-{p.requests}")
@pytest.mark.parametrize("policy", [None, Stock()], ids=["device", "stock"])
@pytest.mark.parametrize("sliced", [False, True])
def test_steps(problem: Problem, policy: Any, sliced: bool) -> None:
    """prepare changes no cache; a step captured without an eager launch before it, and its replay,
    are right."""
    o = make_step(
        problem, seed=1, null_requests=(problem.requests // 2,) if problem.requests > 1 else ()
    )
    key = (problem.requests, problem.tokens) if problem.tokens > 1 else problem.requests
    kda = PreparedKda(weights(o), {key: (problem.pitch, None)}, problem.conv_layout)
    kept = copies(o)
    kda.prepare(caches(o), policy=policy)
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(copies(o), kept, strict=True))
    slots = o.slots
    if sliced:
        columns = slots.view(problem.requests, -1)
        table = torch.full((problem.requests, 9), -3, dtype=torch.int32, device="cuda")
        slots = table[:, : columns.shape[1]]
        slots.copy_(columns)
    expected = reference.step(problem, o)

    def run() -> None:
        kda.run(o.projected, o.out, caches(o), slots, o.accepted, problem.tokens)

    graph = captured(run)
    for launch in (graph.replay, run):
        restore(o, kept)
        compare.poison(o)
        launch()
        torch.cuda.synchronize()
        assert compare.check_step(problem, o, expected) is None


def test_run_allocates_nothing() -> None:
    problem = Problem("decode", 8, 12)
    o = make_step(problem, seed=2)
    kda = PreparedKda(weights(o), {8: (problem.pitch, None)})
    kda.prepare(caches(o))
    table = o.slots[:, None].expand(-1, 3).contiguous()
    made = caches(o)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    kda.run(o.projected, o.out, made, o.slots)
    kda.run(o.projected, o.out, made, table[:, 1])
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_a_graph_outlives_a_reload() -> None:
    problem = Problem("decode", 4, 6)
    o, other = make_step(problem, seed=3), make_step(problem, seed=4)
    kda = PreparedKda(weights(o), {4: (problem.pitch, None)})
    kda.prepare(caches(o))
    graph = captured(lambda: kda.run(o.projected, o.out, caches(o), o.slots))
    new = weights(other)
    for name in ("conv_weight", "conv_bias", "f_b", "A_log", "dt_bias", "norm_weight"):
        getattr(kda.weights, name).copy_(getattr(new, name))
    kda.process_weights_after_loading()
    loaded = replace(
        o, conv_weight=other.conv_weight
    )  # the rest was loaded into the operands' own tensors
    expected = reference.step(problem, loaded)
    compare.poison(o)
    graph.replay()
    torch.cuda.synchronize()
    assert compare.check_step(problem, loaded, expected) is None


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize("requests", [3, 40, 500], ids=["registers", "bulk", "ring"])
def test_commits(dtype: Any, align: bool, requests: int) -> None:
    problem = Problem("commit", requests, 6, 4, 2, state_dtype=dtype, pending="mix")
    o = make_commit(problem, seed=5, align=align, null_requests=(1,))
    step = make_step(Problem("decode", 1, 6), seed=6)
    layers = [
        replace(weights(step), A_log=A.clone(), dt_bias=b.reshape(-1).clone())
        for A, b in zip(o.A_log, o.dt_bias, strict=True)
    ]
    kept = [
        Caches(s, step.conv_state, c, k, o.record_rows)
        for s, c, k in zip(o.states, o.corrections, o.key_gates, strict=True)
    ]
    context = CommitContext(layers, kept, align=align)
    expected = [reference.commit(o, layer) for layer in range(2)]
    compare.poison(o)
    plan = (o.source, o.length, o.destination, o.record_rows, o.boundary_length, o.boundary_slot)
    captured(lambda: context.commit(*plan)).replay()
    torch.cuda.synchronize()
    for layer in range(2):
        assert compare.check_commit(o, expected[layer], layer) is None
