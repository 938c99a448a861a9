"""The serving trace on the CPU: what it contains, that stock and the reference's replay pass, that
faults are found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from kda_kernels.check import compare
from kda_kernels.check.trace import (
    Engine,
    Outcome,
    ReferenceKernels,
    Shape,
    Trace,
    VariantKernels,
    run,
)
from kda_kernels.device.gpu import Gpu
from kda_kernels.operands import CommitOperands, StepOperands
from kda_kernels.problem import Problem

cpu_only = pytest.mark.skipif(
    torch.cuda.is_available(), reason="Triton runs compiled here: see test_gpu_trace.py"
)
GPU = Gpu("sm_90a", 132)
STOCK = {"record": ("stock", {"value_tile": 64})}


def trace(tokens: int = 3, steps: int = 12, heads: int = 2, requests: int = 4) -> Trace:
    return Trace(Shape(heads, tokens, requests), steps, seed=5, device="cpu")


def replay_above(items: int) -> Callable[[int], bool]:
    return lambda n: n >= items


def test_a_trace_has_all_that_a_server_meets() -> None:
    batches = list(trace(tokens=8, steps=64, requests=8))
    slots = [b.slots[:, 0].tolist() for b in batches]
    assert any(b.joined for b in batches[1:])  # join ...
    assert any(set(a) - set(b) - {0} for a, b in pairwise(slots))  # ... leave, or sit out ...
    assert any([s for s in a if s in b] != [s for s in b if s in a] for a, b in pairwise(slots))
    assert any(0 in s for s in slots)
    assert {int(n) for b in batches for n in b.accepted} == set(range(9))
    crossing = [b for b in batches if b.eager.any()]
    assert crossing
    for b in crossing:
        assert (b.boundary_length <= b.accepted).all()
        assert ((b.boundary_length > 0) == (b.boundary_slot > 0)).all()
    assert len({b.requests for b in batches}) > 4
    for b in batches:
        live = b.record_rows >= 0
        assert (live == (b.slots[:, 0] > 0)).all()
        assert len(set(b.record_rows[live].tolist())) == int(live.sum())


def test_the_same_arguments_give_the_same_trace() -> None:
    for a, b in zip(trace(), trace(), strict=True):
        assert torch.equal(a.projected, b.projected)
        assert torch.equal(a.slots, b.slots)


@cpu_only
def test_stock_serves_eagerly_and_deferred_with_a_flush_in_every_step() -> None:
    served = trace()
    engines = [
        Engine("eager", served, VariantKernels(STOCK, None, GPU)),
        Engine("flushing", served, VariantKernels(STOCK, None, GPU), replay_above(1 << 30)),
    ]
    outcome = run(served, engines)
    assert outcome.failed == []
    assert {row.kind for row in outcome.rows} == {"record"}
    assert len(outcome.rows) == 24
    assert 0 < max(row.state for row in outcome.rows) < 1e-6  # FP32 against float64


@cpu_only
@pytest.mark.parametrize("tokens", [2, 5])
def test_replay_and_flush_in_turn(tokens: int) -> None:
    served = trace(tokens, steps=16)
    engine = Engine("deferred", served, ReferenceKernels(), replay_above(5))
    outcome = run(served, [engine])
    assert outcome.failed == []
    assert set(engine.kinds) == {"record", "replay"}


class Faulty(ReferenceKernels):
    """Replays one token too few, forgets the oldest record's update of the window, or commits to
    one head only."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault

    def step(self, problem: Problem, operands: StepOperands) -> None:
        if self.fault == "pending" and operands.pending is not None:
            operands = replace(operands, pending=(operands.pending - 1).clamp(min=0))
        super().step(problem, operands)
        if self.fault == "window":
            operands.conv_state[operands.slots[0], 0, 0] += 1

    def commit(self, operands: CommitOperands) -> None:
        before = operands.states[0].clone()
        super().commit(operands)
        if self.fault == "commit":
            operands.states[0][:, 1:] = before[:, 1:]


@cpu_only
@pytest.mark.parametrize(
    ("fault", "names"),
    [("pending", ("out", "state")), ("window", ("conv_state",)), ("commit", ("state", "out"))],
)
def test_faults_are_found(fault: str, names: tuple[str, ...]) -> None:
    served = trace()
    outcome = run(served, [Engine("faulty", served, Faulty(fault), replay_above(5))])
    assert outcome.failed
    assert outcome.failed[0].verdict is not None
    assert outcome.failed[0].verdict.startswith(names)


def test_growth_compares_halves_of_each_kind() -> None:
    from kda_kernels.check.trace import Row

    errors = {
        "record": [9.0, 1.0, 1.0, 1.0, 1.0, 1.0, 9.0, 1.0],
        "replay": [9.0, 2.0, 2.0, 2.0, 6.0, 6.0, 2.0, 6.0],
    }
    steps = [
        (kind, x)
        for pair in zip(*errors.values(), strict=True)
        for kind, x in zip(errors, pair, strict=True)
    ]
    outcome = Outcome([Row("e", i, kind, x, 0.0, 1.0, None) for i, (kind, x) in enumerate(steps)])
    assert outcome.growth("e", "out") == pytest.approx((6 - 2) / compare.OUT_NORM)
    assert outcome.growth("e", "corrections") == outcome.growth("e", "state") == 0
