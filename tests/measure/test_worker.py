"""What a worker does with a cell, on made-up operands: blame for wrong results, lost contexts,
missing samples.

The GPU's part is tested by test_gpu_measuring.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from kdabench.data.measurements import Candidate, Cell, Status
from kdabench.measure import cell_bench, messages, worker
from kdabench.measure.clock import ExhaustedError, Reading
from kdabench.measure.contest import Left, Plan

A, B, C = (Candidate.of("KdaSplit", {"split": n}) for n in (1, 2, 4))
CELL = Cell("decode", 4, 12)


class LostError(RuntimeError):
    """What CUDA says when the context is gone."""


class Bench:
    """Operands that a candidate may damage: then the ones after it are wrong, too."""

    unique_bytes = 10**9

    def __init__(self, behaviour: dict[Candidate, str], times: dict[Candidate, float]) -> None:
        self.behaviour, self.times = behaviour, times
        self.graphs: dict[Candidate, None] = {}
        self.damaged = False
        self.degenerate: dict[Candidate, tuple[Status, str]] = {}

    def compile(self, candidate: Candidate) -> tuple[Any, Any]:
        if self.behaviour.get(candidate) == "does not compile":
            raise cell_bench.CandidateError("compile_error", "DSLError: no")
        return None, None

    def prepare(self, candidate: Candidate, module: Any, compiled: Any) -> None:
        match self.behaviour.get(candidate):
            case "wrong":
                raise cell_bench.CandidateError("wrong", "out: norm error")
            case "damages":
                self.damaged = True
            case "raises":
                raise RuntimeError("invalid configuration argument\nmore")
            case "loses the context":
                raise LostError(
                    "CUDA error: an illegal memory access was encountered\nCompile with ..."
                )
            case _ if self.damaged:
                raise cell_bench.CandidateError("wrong", "state: norm error")
        self.graphs[candidate] = None

    def clock(self, announce: Any, slowed: float) -> Any:
        def read(candidate: Candidate) -> Reading:
            announce(candidate)
            if self.behaviour.get(candidate) == "loses the context in the rounds":
                raise LostError("CUDA error: unspecified launch failure")
            if candidate not in self.times:
                raise ExhaustedError("the baseline's noise exceeds the step")
            return Reading(self.times[candidate])

        return SimpleNamespace(
            begin_round=lambda index: None, read=read, round_state={"power_w": 300}
        )

    def drifted(self, candidates: Sequence[Candidate]) -> dict[Candidate, tuple[Status, str]]:
        return self.degenerate

    def implausible(self, time_us: float) -> str | None:
        return "below the floor" if time_us < 1 else None


class Benches:
    def __init__(self, behaviour: dict[Candidate, str], times: dict[Candidate, float]) -> None:
        self.behaviour, self.times, self.made = behaviour, times, 0
        self.telemetry = SimpleNamespace(full_clock_mhz=1980)
        self.degenerate: dict[Candidate, tuple[Status, str]] = {}

    def digest(self, variant: str) -> str:
        return "sha256:0"

    def fresh(self, cell: Cell) -> Bench:
        self.made += 1
        made = Bench(self.behaviour, self.times)
        made.degenerate = self.degenerate
        return made

    fresh_after_damage = fresh


class Pipe:
    def __init__(self) -> None:
        self.sent: list[messages.Message] = []
        self.left: Mapping[Candidate, Left] = {}

    def send(self, message: messages.Message) -> None:
        self.sent.append(message)

    def outcomes(self) -> dict[Candidate, tuple[str, str | None]]:
        told = [m for m in self.sent if isinstance(m, messages.Outcome)]
        assert len({m.candidate for m in told}) == len(told)
        return {m.candidate: (m.status, m.reason) for m in told}


@pytest.fixture(autouse=True)
def without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    works = [True]

    def context_works() -> bool:
        return works[0]

    monkeypatch.setattr(worker, "_context_works", context_works)
    return works


def run(
    behaviour: dict[Candidate, str], times: dict[Candidate, float] | None = None, **degenerate: Any
) -> tuple[Pipe, bool, Benches]:
    pipe, benches = Pipe(), Benches(behaviour, times or {A: 5.0, B: 5.1, C: 5.2})
    benches.degenerate = degenerate.get("degenerate", {})
    job = messages.Job(CELL, (A, B, C), Plan(min_rounds=3, max_rounds=3))
    done = worker._CellRun(pipe, job, benches).run()  # type: ignore[arg-type]
    pipe.left = done.left
    return pipe, done.sticky, benches


def test_all_is_well() -> None:
    pipe, sticky, benches = run({})
    assert (sticky, benches.made) == (False, 1)
    assert {status for status, _ in pipe.outcomes().values()} == {"ok"}
    phases = [(m.phase, m.candidate) for m in pipe.sent if isinstance(m, messages.Began)]
    assert phases[:3] == [("cell", None), ("compile", A), ("check", A)]
    assert {c for phase, c in phases if phase == "measure"} == {None, A, B, C}, (
        "who is measured is known"
    )
    rounds = [m for m in pipe.sent if isinstance(m, messages.RoundDone)]
    assert [m.index for m in rounds] == [0, 1, 2]
    assert rounds[0].gpu == {"power_w": 300}


def test_a_wrong_candidate_is_proven_alone_and_the_others_start_over() -> None:
    pipe, sticky, benches = run({B: "wrong"})
    assert (sticky, benches.made) == (False, 3)
    assert pipe.outcomes() == {
        B: ("wrong", "out: norm error"),
        A: ("ok", None),
        C: ("ok", pipe.outcomes()[C][1]),
    }


def test_who_suffers_from_anothers_writes_is_not_blamed() -> None:
    pipe, _, _ = run({A: "damages"})
    assert {c: status for c, (status, _) in pipe.outcomes().items()} == {A: "ok", B: "ok", C: "ok"}


def test_failures_before_timing_leave_the_others_alone() -> None:
    pipe, sticky, _ = run({A: "does not compile", C: "raises"})
    assert not sticky
    assert pipe.outcomes() == {
        A: ("compile_error", "DSLError: no"), B: ("ok", None), C: ("fault", "invalid configuration argument"),
    }  # fmt: skip


@pytest.mark.parametrize("when", ["loses the context", "loses the context in the rounds"])
def test_a_lost_context_asks_for_another_worker(when: str, without_a_gpu: list[bool]) -> None:
    without_a_gpu[0] = False
    pipe, sticky, _ = run({B: when})
    assert sticky
    ((candidate, (status, reason)),) = pipe.outcomes().items()
    assert (candidate, status) == (B, "fault")
    assert str(reason).startswith("CUDA error: ")


def test_why_candidates_left_is_told_as_data() -> None:
    pipe, _, _ = run({}, {A: 5.0, B: 11.0})
    assert {c: left.why for c, left in pipe.left.items()} == {B: "hopeless", C: "exhausted"}
    assert pipe.outcomes()[B] == ("ok", str(pipe.left[B]))


def test_no_candidate_goes_missing() -> None:
    pipe, _, _ = run({}, {A: 5.0, B: 0.5})
    statuses = {c: status for c, (status, _) in pipe.outcomes().items()}
    assert statuses == {A: "ok", B: "implausible", C: "unstable"}
    assert pipe.outcomes()[C][1] == "the baseline's noise exceeds the step"


def test_a_state_that_drifted_away_has_no_time() -> None:
    pipe, _, _ = run({}, degenerate={B: ("wrong", "after 50 graph replays: not all finite")})
    assert pipe.outcomes()[B] == ("wrong", "after 50 graph replays: not all finite")
    assert pipe.outcomes()[A][0] == "ok"
