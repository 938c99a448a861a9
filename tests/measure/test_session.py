"""Sweeps with real worker processes whose measurements are made up: resume, blame, hangs, crashes,
kills, recorded runs."""

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from kdabench.cli import console
from kdabench.data.devices import Gpu, Recorded
from kdabench.data.measurements import Candidate, Cell
from kdabench.data.sweep import Sweep
from kdabench.measure import messages, session, sources, worker_process
from kdabench.measure.clock import Reading
from kdabench.measure.contest import Plan, run_contest
from kdabench.measure.errors import JournalError
from kdabench.measure.gpu_runner import GpuRunner
from kdabench.measure.journal import Journal, export, merge
from kdabench.measure.recorded import RecordedRunner
from support import workers

PLAN = Plan(min_rounds=3, max_rounds=4)


@pytest.fixture(autouse=True)
def locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several test runs on one machine have the same made-up GPU."""
    monkeypatch.setenv("KDABENCH_LOCKS", str(tmp_path))


ENV = {"gpu": "Synthetic GPU", "sms": 100, "uuid": "GPU-0"}
GOOD, BETTER, BAD = (Candidate.of("KdaSplit", {"split": n}) for n in (1, 2, 4))


def make_sweep(
    path: Path,
    requests: tuple[int, ...] = (1, 2),
    processes: int = 2,
    candidates: tuple[Candidate, ...] = (GOOD, BETTER, BAD),
) -> Sweep:
    cells = tuple(Cell("decode", r, 12) for r in requests)
    return Sweep(path / "made-up.toml", "Is it kept?", ("KdaSplit",), processes, cells, candidates)


class NoisyClock:
    def __init__(self, seed: str) -> None:
        self.random = random.Random(seed)

    def begin_round(self, index: int) -> None:
        pass

    def read(self, candidate: Candidate) -> Reading:
        base = 4.0 if candidate == BETTER else 5.0
        return Reading(base * (1 + self.random.gauss(0, 0.001)), 1980, False)


def serve(pipe: Connection, trouble: str | None, pause_s: float = 0.0) -> None:
    """A worker that measures by a made-up clock and, for candidate BAD, does what `trouble`
    says."""
    os.setpgrp()
    pipe.send(messages.Ready(ENV))
    while (job := pipe.recv()) is not None:
        pipe.send(messages.Began("cell"))
        ready = []
        for candidate in job.candidates:
            pipe.send(messages.Began("check", candidate))
            if candidate == BAD and trouble == "abort":
                os.abort()
            if candidate == BAD and trouble == "exit":
                os._exit(0)
            if candidate == BAD and trouble == "hang":
                time.sleep(1000)
            if candidate == BAD and trouble == "wrong":
                pipe.send(
                    messages.Outcome(
                        candidate, "wrong", "out: norm error 1.0 > 5e-3", 0, 10**6, "0-0"
                    )
                )
                continue
            ready.append(candidate)
        pipe.send(messages.Began("measure"))

        def keep(index: int, readings: object) -> None:
            time.sleep(pause_s)
            pipe.send(messages.RoundDone(index, tuple(readings)))  # type: ignore[arg-type]

        run_contest(
            ready,
            NoisyClock(job.cell.key),
            job.plan,
            history=job.history,
            first_round=job.first_round,
            on_round=keep,
        )
        for candidate in ready:
            pipe.send(messages.Outcome(candidate, "ok", None, 10**9, 10**6, "0-0"))
        pipe.send(messages.CellDone())


def well_behaved(pipe: Connection, index: int) -> None:
    serve(pipe, None)


def slow(pipe: Connection, index: int) -> None:
    serve(pipe, None, pause_s=0.02)


def aborting(pipe: Connection, index: int) -> None:
    serve(pipe, "abort")


def exiting(pipe: Connection, index: int) -> None:
    serve(pipe, "exit")


def hanging(pipe: Connection, index: int) -> None:
    serve(pipe, "hang")


def wrong(pipe: Connection, index: int) -> None:
    serve(pipe, "wrong")


def run(sweep: Sweep, out: Path, main: worker_process.WorkerMain = well_behaved) -> session.Summary:
    return workers.run(sweep, out, worker_main=main, plan=PLAN)


def test_every_process_measures_every_cell(tmp_path: Path) -> None:
    summary = run(make_sweep(tmp_path), tmp_path)
    assert (summary.done, summary.total, summary.interrupted) == (4, 4, False)
    assert {(r.cell.requests, r.process) for r in summary.measurements} == {
        (1, 0),
        (1, 1),
        (2, 0),
        (2, 1),
    }
    assert all(len(r.samples_us) >= 3 for r in summary.measurements)
    assert not summary.without_winner


def test_a_finished_sweep_starts_no_worker(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path)
    first = run(sweep, tmp_path)
    again = run(sweep, tmp_path, main=aborting)
    assert again.measurements == first.measurements


@pytest.mark.parametrize(
    ("main", "status", "word"),
    [
        (aborting, "fault", "exit code -6"),
        (exiting, "fault", "exit code 0"),
        (wrong, "wrong", "norm error"),
    ],
)
def test_trouble_costs_the_guilty_candidate_alone(
    tmp_path: Path, main: worker_process.WorkerMain, status: str, word: str
) -> None:
    summary = run(make_sweep(tmp_path), tmp_path, main)
    assert summary.done == summary.total
    bad = [r for r in summary.measurements if r.candidate == BAD]
    assert {r.status for r in bad} == {status}
    assert all(word in str(r.reason) and not r.samples_us for r in bad)
    assert {r.process for r in bad} == {0}, "later processes don't pay for it again"
    good = [r for r in summary.measurements if r.candidate != BAD]
    assert len(good) == 8
    assert all(r.status == "ok" and len(r.samples_us) >= 3 for r in good)


def test_a_hang_costs_its_limit_and_is_not_paid_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(worker_process.LIMITS_S, "check", 1.0)
    sweep = make_sweep(tmp_path, requests=(1,))
    begin = time.monotonic()
    run(sweep, tmp_path / "clean")
    clean_s = time.monotonic() - begin
    begin = time.monotonic()
    summary = run(sweep, tmp_path, hanging)
    assert time.monotonic() - begin - clean_s < 1.0 + 5.0
    assert {r.status for r in summary.measurements if r.candidate == BAD} == {"timeout"}
    assert len([r for r in summary.measurements if r.status == "ok"]) == 4
    begin = time.monotonic()
    run(sweep, tmp_path, hanging)
    assert time.monotonic() - begin < 1.0


def test_who_crashes_in_company_alone_is_said_to(tmp_path: Path) -> None:
    odd = workers.candidate(4, "abort in company")
    summary = workers.run(workers.make_sweep(tmp_path, (workers.candidate(1), odd)), tmp_path)
    found = {r.candidate: r for r in summary.measurements}
    assert (found[odd].status, found[odd].samples_us) == ("fault", ())
    assert str(found[odd].reason).endswith("not when it was tried alone")
    assert found[workers.candidate(1)].status == "ok"


def test_a_worker_that_does_not_come_up_ends_the_sweep_in_one_line(tmp_path: Path) -> None:
    sweep = workers.make_sweep(tmp_path, (workers.candidate(1),))
    with pytest.raises(
        OSError, match=r"did not start: .* exit code 1 .*all devices are busy"
    ) as caught:
        workers.run(sweep, tmp_path, worker_main=workers.broken)
    assert "\n" not in console.describe(caught.value)
    assert workers.run(sweep, tmp_path).done == 1


def test_rounds_come_with_the_state_of_the_gpu(tmp_path: Path) -> None:
    sweep = workers.make_sweep(tmp_path, (workers.candidate(1), workers.candidate(2)))
    summary = workers.run(sweep, tmp_path)
    with Journal.read(summary.journal) as journal:
        states = journal.gpu_states(sweep.cells[0], 0)
    assert list(states) == list(range(len(states)))
    assert states[0] == {"power_w": 300}
    assert sum(summary.twins.values()) == 1


def test_a_cell_in_which_nothing_is_ok_has_no_winner(tmp_path: Path) -> None:
    summary = run(make_sweep(tmp_path, requests=(1,), candidates=(BAD,)), tmp_path, wrong)
    assert summary.without_winner == (Cell("decode", 1, 12),)


def test_the_budget_stops_between_cells_and_the_rest_follows(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path)
    summary = workers.run(sweep, tmp_path, worker_main=well_behaved, plan=PLAN, budget_s=0)
    assert summary.done == 0
    assert run(sweep, tmp_path).done == 4


def test_retry_measures_again_only_where_a_candidate_failed(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, requests=(1,), processes=2)
    failed = run(sweep, tmp_path, wrong)
    again = workers.run(sweep, tmp_path, worker_main=well_behaved, plan=PLAN, retry=True)
    # Process 1 never met the bad candidate: process 0 had ruled it out.
    kept = [r for r in failed.measurements if r.process == 1]
    assert [r for r in again.measurements if r.process == 1] == kept
    assert {r.candidate: r.status for r in again.measurements if r.process == 0} == dict.fromkeys(
        (GOOD, BETTER, BAD), "ok"
    )


def test_shares_of_a_sweep_join_to_the_whole(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path, requests=(1, 2, 3))
    parts = []
    for k in (1, 2):
        summary = workers.run(
            sweep, tmp_path / str(k), worker_main=well_behaved, plan=PLAN, part=(k, 2)
        )
        assert summary.done == summary.total
        parts.append(summary)
    assert [{r.cell.requests for r in part.measurements} for part in parts] == [{1, 3}, {2}]
    merge([part.journal for part in parts], tmp_path / "whole.db")
    with Journal.read(tmp_path / "whole.db") as journal:
        assert {(r.cell.requests, r.process) for r in journal.measurements()} == {
            (r, p) for r in (1, 2, 3) for p in (0, 1)
        }


def test_sigkill_at_random_loses_no_finished_round(tmp_path: Path) -> None:
    """Killed five times, then resumed: the same cells complete, every round once."""
    script = textwrap.dedent(f"""
        import sys
        sys.path[:0] = {[str(Path(__file__).parents[1]), *sys.path]!r}
        import test_session as t
        from pathlib import Path
        if __name__ == "__main__":
            t.run(t.make_sweep(Path({str(tmp_path)!r}), requests=tuple(range(1, 13))), Path({str(tmp_path)!r}), t.slow)
    """)
    (tmp_path / "sweep.py").write_text(script)
    chance = random.Random(3)
    for _ in range(5):
        running = subprocess.Popen(
            [sys.executable, str(tmp_path / "sweep.py")], start_new_session=True
        )
        time.sleep(chance.uniform(0.8, 2.0))
        running.send_signal(signal.SIGKILL)
        running.wait()
    summary = run(make_sweep(tmp_path, requests=tuple(range(1, 13))), tmp_path)
    assert summary.done == summary.total == 24
    for measurement in summary.measurements:
        assert measurement.status == "ok"
        rounds = sorted(set(measurement.rounds))
        assert rounds == list(range(len(rounds)))
        assert max(measurement.rounds.count(index) for index in rounds) <= 2, (
            "the sentinel's twice, nothing more often"
        )
        assert len(measurement.samples_us) >= 3


def test_a_recorded_run_is_on_recorded_samples_and_cannot_be_exported(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path)
    measured = run(sweep, tmp_path)
    results = tmp_path / "results"
    with Journal.read(measured.journal) as journal:
        export(journal, results, "synthetic", sweep.stem)
    runner = RecordedRunner(results / "synthetic")
    run_again = workers.run(sweep, tmp_path / "again", runner=runner, plan=PLAN)
    assert run_again.recorded
    assert run_again.journal.name == "made-up.recorded.db"
    assert [r.samples_us for r in run_again.measurements] == [
        r.samples_us for r in measured.measurements
    ]
    with (
        Journal.read(run_again.journal) as journal,
        pytest.raises(JournalError, match="recorded run"),
    ):
        export(journal, results, "synthetic", sweep.stem)


def test_an_interrupted_recorded_run_resumes(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path)
    measured = run(sweep, tmp_path)
    results, out = tmp_path / "results", tmp_path / "again"
    with Journal.read(measured.journal) as journal:
        export(journal, results, "synthetic", sweep.stem)

    def interrupt(event: session.Event) -> None:
        if event.kind == "cell":
            raise KeyboardInterrupt

    runner = RecordedRunner(results / "synthetic")
    first = workers.run(sweep, out, runner=runner, plan=PLAN, listener=interrupt)
    assert first.interrupted
    again = workers.run(sweep, out, runner=runner, plan=PLAN)
    assert (again.done, again.interrupted) == (4, False)
    assert [r.samples_us for r in again.measurements] == [
        r.samples_us for r in measured.measurements
    ]


def test_a_recorded_run_on_other_measurements_begins_anew(tmp_path: Path) -> None:
    sweep = make_sweep(tmp_path)
    measured = run(sweep, tmp_path)
    results, runner = tmp_path / "results", RecordedRunner(tmp_path / "results" / "synthetic")
    with pytest.raises(ValueError, match="no recorded measurements"):
        workers.run(sweep, tmp_path / "again", runner=runner)
    with Journal.read(measured.journal) as journal:
        path = export(journal, results, "synthetic", sweep.stem)
    whole = workers.run(sweep, tmp_path / "again", runner=runner)
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:3]))
    notes: list[str] = []
    part = workers.run(
        sweep, tmp_path / "again", runner=runner, listener=lambda event: notes.append(event.text)
    )
    assert (len(whole.measurements), len(part.measurements)) == (12, 3)
    assert any(text.startswith("not recorded: 2 cells and processes") for text in notes)


def test_a_source_is_found_for_what_a_user_gives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "_gpu_count", lambda: 0)
    with pytest.raises(ValueError, match="none in"):
        sources.find("auto", tmp_path)
    folder = tmp_path / "nvidia-h200"
    folder.mkdir()
    (folder / "dispatch.jsonl").write_text("")
    recorded = Recorded("nvidia-h200", folder)
    assert str(recorded) == "recorded:nvidia-h200"
    for text in ("auto", "recorded", "recorded:nvidia-h200"):
        assert sources.find(text, tmp_path) == recorded
    assert sources.runner(recorded) == RecordedRunner(folder)
    with pytest.raises(ValueError, match="0 CUDA devices"):
        sources.find("cuda:0", tmp_path)
    for unknown in ("gpu", "replay", "replay:nvidia-h200"):
        with pytest.raises(ValueError, match="one of auto, cuda, cuda:INDEX, recorded, recorded:"):
            sources.find(unknown, tmp_path)
    with pytest.raises(ValueError, match="recorded: nvidia-h200"):
        sources.find("recorded:h100", tmp_path)
    monkeypatch.setattr(sources, "_gpu_count", lambda: 2)
    assert sources.find("auto", tmp_path) == Gpu(0)
    assert sources.find("cuda:1", tmp_path) == Gpu(1)
    assert sources.runner(Gpu(1)) == GpuRunner(1)
