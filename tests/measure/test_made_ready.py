"""A cell made ready and its candidates checked, without a GPU: a graph is what was enqueued, and the
reference takes the place of kernels."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kda_kernels.check import reference
from kda_kernels.check.trace import ReferenceKernels
from kda_kernels.device.gpu import Gpu
from kda_kernels.operands import CommitOperands, StepOperands, make_commit, make_step
from kda_kernels.problem import Problem
from kdabench.data.measurements import Candidate, Cell
from kdabench.measure import cell_bench
from kdabench.measure.cell_bench import CandidateError, CellBench, CommitBench, StepBench

COPIES = 8
CANDIDATE = Candidate.of("Reference", {})
TELEMETRY: Any = SimpleNamespace(full_clock_mhz=None)


class Graph:
    def __init__(self, enqueue: Callable[[int], None]) -> None:
        self.replay = lambda: enqueue(0)


@pytest.fixture(autouse=True)
def without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    def neighbours(problem: Problem, weights: Any) -> cell_bench.Neighbours:
        torch.manual_seed(1)
        shapes = (
            (problem.rows, 64),
            (8, problem.pitch, 64),
            (8, 64, problem.channels),
            (problem.rows, 64),
        )
        return cell_bench.Neighbours(*(torch.randn(s).bfloat16() / 8 for s in shapes))

    for name, make in (("make_step", make_step), ("make_commit", make_commit)):
        monkeypatch.setattr(cell_bench, name, lambda p, make=make, **k: make(p, device="cpu", **k))
    monkeypatch.setattr(cell_bench, "_neighbours", neighbours)
    monkeypatch.setattr(cell_bench, "copies_for", lambda cell, l2_bytes: COPIES)
    monkeypatch.setattr(cell_bench, "capture", lambda enqueue, stream: Graph(enqueue))
    monkeypatch.setattr(cell_bench, "require_kernels", lambda graph, kernels, launches: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10**12, 10**12))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 0)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 0)


def ready(cell: Cell, l2_bytes: int = 1) -> CellBench:
    device = cell_bench.Device(0, Gpu("sm_90a", 7), "X", "uuid", None, l2_bytes, None)
    return cell_bench.make_ready(cell, device, cell_bench.WeightCache(), TELEMETRY)


def right(cell: Cell) -> Callable[[Any, Any, int], None]:
    def launch(compiled: Any, operands: Any, stream: int) -> None:
        if isinstance(operands, CommitOperands):
            for layer, state in enumerate(operands.states):
                state.copy_(reference.commit(operands, layer))
            return
        if operands.corrections is not None:
            ReferenceKernels().step(cell.problem, operands)
            return
        found = reference.step(cell.problem, operands)
        operands.out.copy_(found.out)
        operands.state.copy_(found.state)
        operands.conv_state.copy_(found.conv_state)

    return launch


def prepare(made: CellBench, launch: Callable[[Any, Any, int], None]) -> None:
    made.prepare(CANDIDATE, SimpleNamespace(launch=launch, KERNELS=()), None)  # type: ignore[arg-type]


STEPS = [
    Cell("decode", 9, 2, context="layer"),
    Cell("decode", 9, 2, context="isolated", l2="warm"),
    Cell("record", 9, 2, 4, context="layer"),
    Cell("replay", 9, 2, 4, pending="mix", context="isolated"),
]
COMMITS = [
    Cell("commit", 9, 2, 4, pending="mix", context="isolated", layers=3),
    Cell("flush", 9, 2, 4, pending="mix", context="isolated", layers=3),
]


@pytest.mark.parametrize("cell", [*STEPS, *COMMITS], ids=lambda cell: f"{cell.kind} {cell.context}")
def test_what_is_right_gets_a_graph_and_what_writes_nothing_none(cell: Cell) -> None:
    made = ready(cell)
    assert isinstance(made, CommitBench if cell in COMMITS else StepBench)
    assert len(made.copies) == (1 if cell.l2 == "warm" else COPIES)
    with pytest.raises(CandidateError) as caught:
        prepare(made, lambda compiled, operands, stream: None)
    assert caught.value.status == "wrong"
    assert made.graphs == {}
    prepare(made, right(cell))
    assert made.graphs[CANDIDATE].launches == COPIES
    assert made.drifted([CANDIDATE]) == {}


@pytest.mark.parametrize("cell", [STEPS[0], COMMITS[0]], ids=lambda cell: cell.kind)
def test_who_changes_what_is_only_read_is_wrong(cell: Cell) -> None:
    def launch(compiled: Any, operands: Any, stream: int) -> None:
        right(cell)(compiled, operands, stream)
        operands.A_log[0] += 1

    with pytest.raises(CandidateError, match="changed operands that a step only reads"):
        prepare(ready(cell), launch)


def test_neighbours_stand_around_each_step_and_are_the_baseline() -> None:
    cell, told = STEPS[0], []
    made = ready(cell)
    assert isinstance(made, StepBench)
    assert made.neighbours is not None
    around = made.neighbours
    around.before = lambda i, step: told.append(("before", i, step))  # type: ignore[method-assign]
    around.after = lambda i, step: told.append(("after", i, step))  # type: ignore[method-assign]
    prepare(made, lambda c, operands, s: (told.append(("step", None, operands)), right(cell)(c, operands, s))[0])  # fmt: skip
    told.clear()
    made.graphs[CANDIDATE].graph.replay()
    assert [word for word, _, _ in told] == ["before", "step", "after"] * COPIES
    assert all(told[3 * i + k][2] is made.copies[i] for i in range(COPIES) for k in range(3))
    baseline = made.baseline()
    assert baseline is not None
    told.clear()
    baseline.graph.replay()
    assert [(word, i) for word, i, _ in told] == [
        (word, i) for i in range(COPIES) for word in ("before", "after")
    ]


def test_nothing_stands_around_the_others() -> None:
    for cell in (STEPS[1], COMMITS[0]):
        made = ready(cell)
        assert made.baseline() is None
        assert made.beside() == []


def test_a_state_that_is_no_number_any_more_is_found_with_its_cause() -> None:
    cell = STEPS[1]
    made = ready(cell)
    prepare(made, right(cell))
    made.graphs[CANDIDATE].graph.replay = lambda: made.copies[0].state.fill_(torch.nan)  # type: ignore[union-attr]
    made.graphs[CANDIDATE].graph.replay()
    assert made.drifted([CANDIDATE]) == {
        CANDIDATE: ("wrong", "after 50 graph replays: not all finite")
    }


def test_cells_that_do_not_fit_or_are_improper_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def alike(problem: Problem, **given: Any) -> StepOperands:
        made = make_step(problem, device="cpu", **given)
        made.state.zero_()
        return made

    monkeypatch.setattr(cell_bench, "make_step", alike)
    with pytest.raises(CandidateError, match="inputs: all alike") as caught:
        ready(STEPS[0])
    assert caught.value.status == "unstable"
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (10**6, 10**12))
    with pytest.raises(CandidateError, match=r"8 copies need .* GB, 0.0 GB are free") as caught:
        ready(STEPS[0])
    assert caught.value.status == "oom"
