"""Situations that broke benchmarks and autotuners in public, one test per situation and number.

Rows that need a GPU are marked so; what each row asks for is in its test's docstring.
"""

from __future__ import annotations

import ast
import json
import math
import os
import random
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer

from kdabench.cli import console, data, evidence, measuring
from kdabench.data import devices, measurements, provenance
from kdabench.data.measurements import Candidate, Cell, Measurement, MeasurementError, l2_state
from kdabench.data.provenance import ProvenanceWarning
from kdabench.measure import worker_process
from kdabench.measure.clock import Reading, RecordedClock, rotation
from kdabench.measure.contest import Plan, run_contest, twin_verdict, twins
from kdabench.measure.errors import JournalBusy, JournalError
from kdabench.measure.journal import Journal, export
from kdabench.measure.locks import lock_gpu
from kdabench.measure.recorded import RecordedRunner
from kdabench.policy import emit, fit, regret
from kdabench.review import compare
from support import synthetic, workers
from support.synthetic import STOCK, split
from support.workers import candidate

ROOT = Path(__file__).parents[2]
CELL = Cell("decode", 4, 12)
L2_BYTES = 62_914_560
GOOD, BETTER = candidate(1), candidate(2)


@pytest.fixture(autouse=True)
def locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KDABENCH_LOCKS", str(tmp_path))


class FixedClock:
    """Gives what a function of the round says."""

    def __init__(self, reading: Callable[[Candidate, int], Reading]) -> None:
        self.reading, self.index = reading, 0

    def begin_round(self, index: int) -> None:
        self.index = index

    def read(self, candidate: Candidate) -> Reading:
        return self.reading(candidate, self.index)


def fitted(rows: Sequence[Measurement]) -> tuple[Any, Any]:
    return fit.fit(rows, synthetic.ENVS, resamples=0)


def write(
    folder: Path, found: Sequence[Measurement], envs: dict[str, dict[str, Any]] = synthetic.ENVS
) -> Path:
    measurements.dump(found, folder / "dispatch.jsonl")
    (folder / "env.json").write_text(json.dumps(envs))
    return folder / "dispatch.jsonl"


# --- 1 to 4: what is timed ---


@pytest.mark.parametrize("heads", [1, 2, 6, 12, 24, 48])
@pytest.mark.parametrize("context", ["layer", "isolated", "chain"])
def test_case_01_small_cells_are_cold_by_their_bytes(heads: int, context: Any) -> None:
    from kdabench.measure import cell_bench

    for kind, tokens in (("decode", 1), ("record", 8), ("spec", 4)):
        cell = Cell(kind, 1, heads, tokens, context=context)  # type: ignore[arg-type]
        copies = cell_bench.copies_for(cell, L2_BYTES)
        assert copies >= 8
        assert l2_state(cell_bench.unique_bytes(cell, copies), L2_BYTES) == "cold"
    warm = Cell("decode", 1, heads, context="isolated", l2="warm")
    assert l2_state(cell_bench.unique_bytes(warm, 1), L2_BYTES) == "warm"


def test_case_01_cold_and_warm_are_not_mixed(tmp_path: Path) -> None:
    rows = [synthetic.measurement(replace(CELL, l2=l2), STOCK, [5.0]) for l2 in ("cold", "warm")]
    with pytest.raises(regret.FitError, match="l2: cold, warm"):
        fitted(rows)
    path = write(tmp_path, [synthetic.measurement(CELL, STOCK, [5.0], unique_bytes=10**8)])
    with pytest.raises(
        MeasurementError,
        match=r"unique_bytes: 100000000: below 3 x the L2 of 50000000 bytes is not cold",
    ):
        measurements.load([path])


@pytest.mark.gpu
def test_case_01_more_copies_are_no_slower() -> None:
    """The time of one launch plateaus: 4 times the copies of a cold cell take as long per
    launch."""
    from support import planted

    times = planted.times_by_copies(Cell("decode", 1, 12, context="isolated"), (1, 4))
    assert times[4] == pytest.approx(times[1], rel=0.05)


def test_case_02_what_takes_no_operands_is_not_timed_cold() -> None:
    copies = [object() for _ in range(8)]
    with pytest.raises(ValueError, match="takes no operands, so nothing can be rotated"):
        rotation(lambda: None, copies, 8)
    with pytest.raises(ValueError, match="at least 8 layers in all"):
        rotation(lambda operands: None, copies[:7], 8)
    with pytest.raises(ValueError, match="the same operands twice"):
        rotation(lambda operands: None, [copies[0]] * 8, 8)
    seen: list[object] = []
    for launch in rotation(lambda operands, stream: seen.append(operands), copies, 20):
        launch(0)
    assert seen == [copies[i % 8] for i in range(20)]


def test_case_03_faster_than_memory_cannot_win() -> None:
    from kdabench.measure import cell_bench

    peak = 4.9e6
    floor_us = CELL.problem.bytes_moved / peak
    assert "is below" in str(cell_bench.below_floor(CELL, 0.9 * floor_us, peak))
    assert cell_bench.below_floor(CELL, 1.1 * floor_us, peak) is None
    assert cell_bench.below_floor(replace(CELL, l2="warm"), 0.5 * floor_us, peak) is None
    rows = [
        synthetic.measurement(CELL, STOCK, [5.0]),
        synthetic.failed(CELL, split(1), "implausible"),
    ]
    policy, found = fitted(rows)
    assert emit.load(emit.emit(policy)).choose(12, 4, 1, "decode").variant == "stock"
    assert found.statuses == {"implausible": 1, "ok": 1}


def test_case_04_a_winner_of_one_gate_distribution_that_loses_at_another_is_reported() -> None:
    rows = []
    for inputs, us in (
        ("model", {STOCK: 7.0, split(1): 5.0}),
        ("generic", {STOCK: 5.0, split(1): 7.0}),
    ):
        rows += [synthetic.measurement(replace(CELL, inputs=inputs), c, [t]) for c, t in us.items()]  # type: ignore[arg-type]
    policy, found = fitted(rows)
    assert found.flips == ((CELL, pytest.approx(0.4)),)
    assert "generic inputs, by up to 40.0 %" in evidence.text(policy, found)


# --- 5 to 9: samples and results ---

IMPOSSIBLE = [math.nan, math.inf, -math.inf, 0.0, -1.0]


@pytest.mark.parametrize("time_us", IMPOSSIBLE)
def test_case_05_impossible_samples_never_win(time_us: float, tmp_path: Path) -> None:
    kept: list[tuple[Candidate, Reading]] = []
    clock = FixedClock(lambda c, index: Reading(time_us if c == BETTER else 5.0))
    contest = run_contest(
        [GOOD, BETTER], clock, Plan(), on_round=lambda i, readings: kept.extend(readings)
    )
    assert contest.best == GOOD
    assert contest.left[BETTER].why == "impossible"
    assert {c for c, _ in kept} == {GOOD}
    with (
        Journal.open(tmp_path / "a.db", "sha256:0", "?") as journal,
        pytest.raises(ValueError, match="finite and > 0"),
    ):
        journal.add_round(CELL, 0, 0, [(GOOD, time_us, None, None)])
    line = synthetic.measurement(CELL, STOCK, [5.0]).to_json() | {
        "samples_us": [time_us],
        "rounds": [0],
    }
    with pytest.raises(MeasurementError, match="samples_us"):
        Measurement.from_json(line | {"sm_clock_mhz": [None], "throttled": [None]})
    if not math.isfinite(time_us):
        with pytest.raises(ValueError, match="JSON compliant"):
            measurements.canonical(line)


def test_case_05_empty_single_and_failed(tmp_path: Path) -> None:
    with pytest.raises(MeasurementError, match="status ok needs a time"):
        Measurement.from_json(synthetic.measurement(CELL, STOCK, []).to_json())
    rows = [synthetic.measurement(CELL, STOCK, [5.0]), synthetic.failed(CELL, split(1))]
    module = emit.load(emit.emit(fitted(rows)[0]))
    assert module.choose(12, 4, 1, "decode").variant == "stock"
    sweep = workers.make_sweep(tmp_path, (candidate(1, "nan"), candidate(2, "wrong")))
    summary = workers.run(sweep, tmp_path)
    assert summary.without_winner == sweep.cells
    assert {r.candidate.options["split"]: (r.status, r.reason) for r in summary.measurements} == {
        1: ("unstable", "impossible sample: nan us"), 2: ("wrong", "made up: wrong")}  # fmt: skip
    assert "NaN" not in measurements.dumps(summary.measurements)
    with pytest.raises(typer.Exit) as ended:
        measuring.finish(summary)
    assert ended.value.exit_code == console.FINDING


def test_case_06_a_clock_that_never_recovers_ends_unstable() -> None:
    seen: list[int] = []
    clock = FixedClock(
        lambda c, index: Reading(5.0 / 0.6, 1188, True) if index else Reading(5.0, 1980, False)
    )
    begin = time.monotonic()
    contest = run_contest(
        [GOOD, BETTER], clock, Plan(), on_round=lambda i, readings: seen.append(i)
    )
    assert time.monotonic() - begin < 1
    assert len(seen) == 1 + Plan().max_repeats + 1
    assert (
        contest.unstable
        == "the SM clock was at 60% of 1980 MHz, and 4 repeated rounds did not help"
    )
    assert all(math.isfinite(us) for samples in contest.samples.values() for us in samples)


def test_case_06_unstable_is_a_status_with_its_samples(tmp_path: Path) -> None:
    rows = [
        replace(
            synthetic.measurement(CELL, c, [8.0] * 9),
            sm_clock_mhz=(1100,) * 9,
            throttled=(True,) * 9,
        )
        for c in (GOOD, BETTER)
    ]
    write(tmp_path / "results" / "synthetic-one", rows)
    sweep = workers.make_sweep(tmp_path, (GOOD, BETTER), requests=(4,))
    summary = workers.run(
        sweep, tmp_path, runner=RecordedRunner(tmp_path / "results" / "synthetic-one")
    )
    assert {r.status for r in summary.measurements} == {"unstable"}
    assert all(
        "the SM clock was at 55%" in str(r.reason) and r.samples_us for r in summary.measurements
    )
    assert summary.without_winner == (CELL,)


def test_case_07_a_failed_capture_has_no_time(tmp_path: Path) -> None:
    sweep = workers.make_sweep(tmp_path, (GOOD, candidate(4, "capture_failed")))
    failed = [r for r in workers.run(sweep, tmp_path).measurements if r.status != "ok"]
    assert [(r.status, r.samples_us) for r in failed] == [("capture_failed", ())]
    line = synthetic.failed(CELL, STOCK, "capture_failed").to_json()
    with pytest.raises(MeasurementError, match="status capture_failed has no time"):
        Measurement.from_json(
            line | {"samples_us": [5.0], "rounds": [0], "sm_clock_mhz": [None], "throttled": [None]}
        )


@pytest.mark.gpu
def test_case_07_what_cannot_be_captured_gets_its_status() -> None:
    from support import planted

    assert (
        planted.statuses(Cell("decode", 4, 12), ["Synchronizes"])["Synchronizes"][0]
        == "capture_failed"
    )


HALF_DONE = ["nothing", "half the heads", "no state", "no window", "no records", "another's slots"]


@pytest.mark.parametrize("leaves_out", HALF_DONE)
def test_case_08_what_writes_too_little_is_wrong_after_poison(leaves_out: str) -> None:
    """The buffers hold another candidate's right results when the faulty one starts."""
    from kda_kernels.check import compare, reference
    from kda_kernels.operands import make_step

    kind, tokens = ("record", 2) if leaves_out == "no records" else ("decode", 1)
    problem = Cell(kind, 3, 4, tokens).problem  # type: ignore[arg-type]
    step = make_step(problem, seed=1, device="cpu")
    initial = [t.clone() for t in (step.state, step.conv_state)]
    expected = reference.step(problem, step)

    def launch(fault: str) -> None:
        if fault == "nothing":
            return
        step.out.copy_(expected.out)
        if fault == "half the heads":
            step.out[:, problem.channels // 2 :] = torch.nan  # as poisoned
        if fault not in ("no state", "another's slots"):
            step.state.copy_(expected.state)
        if fault == "another's slots":
            step.state.copy_(
                expected.state[torch.randperm(len(expected.state), generator=torch.Generator())]
            )
        if fault != "no window":
            step.conv_state.copy_(expected.conv_state)
        if step.corrections is not None and fault != "no records":
            step.corrections.copy_(expected.corrections)
            step.key_gates.copy_(expected.key_gates)

    import torch

    for fault in ("", leaves_out):
        for tensor, kept in zip((step.state, step.conv_state), initial, strict=True):
            tensor.copy_(kept)
        compare.poison(step)
        launch(fault)
        assert (compare.check_step(problem, step, expected) is None) == (fault == "")


@pytest.mark.gpu
def test_case_08_faulty_kernels_are_found_through_the_timed_graph() -> None:
    from support import planted

    found = planted.statuses(CELL, ["KdaSplit", "WritesNothing", "HalfTheHeads", "SkipsTheState", "WritesWeights",
                                    "Imposter"])  # fmt: skip
    assert found.pop("KdaSplit") == ("ok", None)
    assert {status for status, _ in found.values()} == {"wrong"}
    assert "only reads" in str(found["WritesWeights"][1])
    assert "expected" in str(found["Imposter"][1])


def test_case_09_a_state_that_drifts_away_is_noticed() -> None:
    import torch

    from kda_kernels.operands import make_step
    from kdabench.measure import inspection

    step = make_step(CELL.problem, seed=1, device="cpu")
    step.out.zero_()
    assert inspection.degenerate(step) is None
    for value, why in (
        (math.inf, "not all finite"),
        (math.nan, "not all finite"),
        (1e-39, "denormal"),
    ):
        broken = replace(step, state=torch.full_like(step.state, value))
        assert why in str(inspection.degenerate(broken))


def test_case_09_the_state_stays_bounded_over_many_steps() -> None:
    from kda_kernels.check import reference
    from kda_kernels.operands import make_step
    from kdabench.measure import inspection

    problem = Cell("decode", 2, 1).problem
    for inputs in ("model", "generic"):
        step = make_step(problem, seed=3, device="cpu", inputs=inputs)  # type: ignore[arg-type]
        step.out.zero_()
        for _ in range(30):
            step.state.copy_(reference.step(problem, step).state)
        assert inspection.degenerate(step) is None
        assert step.state.abs().max() < 100


# --- 10, 11: workers ---

CRASHES = {
    "abort": "exit code -6",
    "exit without an answer": "exit code 0",
    "segmentation fault": "exit code -11",
    "unpicklable exception": "UnpicklableError: and here the reason",
    "unreadable answer": "answer cannot be read",
    "much on stderr, then abort": "exit code -6 in phase check: a kernel printed this",
}


def test_case_10_a_crash_costs_the_guilty_candidate_alone(tmp_path: Path) -> None:
    """Six ways to go in one cell, and one candidate that merely talks much."""
    guilty = {candidate(4 + i, does): word for i, (does, word) in enumerate(CRASHES.items())}
    loud = candidate(3, "much on stderr")
    summary = workers.run(
        workers.make_sweep(tmp_path, (GOOD, *guilty, BETTER, loud), processes=2), tmp_path
    )
    outcomes = {(r.candidate, r.process): r for r in summary.measurements}
    for bad, word in guilty.items():
        assert outcomes[bad, 0].status == "fault"
        assert word in str(outcomes[bad, 0].reason), bad
        assert (bad, 1) not in outcomes, "later processes don't pay for it again"
    for good in (GOOD, BETTER, loud):
        assert [outcomes[good, p].status for p in (0, 1)] == ["ok", "ok"]
        assert all(len(set(outcomes[good, p].rounds)) >= 3 for p in (0, 1))


@pytest.mark.gpu
def test_case_10_an_out_of_bounds_store_is_blamed_and_hurts_no_other(tmp_path: Path) -> None:
    from support import planted

    found = planted.statuses(CELL, ["KdaSplit", "OutOfBounds", "KdaWide"], tmp_path)
    assert found["OutOfBounds"][0] == "fault"
    assert found["KdaSplit"] == found["KdaWide"] == ("ok", None)


@pytest.mark.parametrize("does", ["hang in compile", "hang", "hang in the rounds", "hold the pipe"])
def test_case_11_a_hang_costs_its_limit_and_is_remembered(
    does: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for phase in ("compile", "check", "measure"):
        monkeypatch.setitem(worker_process.LIMITS_S, phase, 1.0)
    bad = candidate(4, does)
    sweep = workers.make_sweep(tmp_path, (GOOD, bad, BETTER))
    begin = time.monotonic()
    summary = workers.run(sweep, tmp_path)
    assert (
        time.monotonic() - begin < 1 + 5 + 4
    )  # limit, allowance, and two workers' start on a busy machine
    found = {r.candidate: r for r in summary.measurements}
    assert found[bad].status == "timeout"
    assert "no answer within 1 s of phase" in str(found[bad].reason)
    assert {found[c].status for c in (GOOD, BETTER)} == {"ok"}
    begin = time.monotonic()
    assert workers.run(sweep, tmp_path).measurements == summary.measurements
    assert time.monotonic() - begin < 1


def test_case_11_no_process_is_left_behind(tmp_path: Path) -> None:
    begin = time.monotonic()
    workers.run(workers.make_sweep(tmp_path, (GOOD, candidate(4, "leave a child"))), tmp_path)
    assert time.monotonic() - begin < 30, (
        "that its child holds the pipe doesn't hide a worker's end"
    )
    assert not processes_of(tmp_path)


def processes_of(tmp_path: Path) -> list[int]:
    """Running processes, this one aside, that a test started: known by the folder of locks in their
    environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            mine = f"KDABENCH_LOCKS={tmp_path}\0".encode() in path.read_bytes()
            running = (path.parent / "stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            continue
        if mine and running and "resource_tracker" not in (path.parent / "cmdline").read_text():
            found.append(int(path.parent.name))
    return found


@pytest.mark.gpu
def test_case_11_a_spinning_kernel_costs_its_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from support import planted

    monkeypatch.setitem(worker_process.LIMITS_S, "check", 10.0)
    begin = time.monotonic()
    clean = planted.statuses(CELL, ["KdaSplit"], tmp_path / "clean")
    clean_s, begin = time.monotonic() - begin, time.monotonic()
    found = planted.statuses(CELL, ["KdaSplit", "Spins"], tmp_path / "spins")
    assert found == {**clean, "Spins": ("timeout", "no answer within 10 s of phase check")}
    assert time.monotonic() - begin - clean_s < 10 + 5


# --- 12 to 16: journals, provenance, devices, policies ---


def test_case_12_a_journal_cut_anywhere_keeps_all_complete_results(tmp_path: Path) -> None:
    path, log = tmp_path / "a.db", tmp_path / "a.db-wal"
    ends = []
    with Journal.open(path, "sha256:0", "?") as journal:
        for index in range(3):
            journal.add_round(CELL, 0, index, [(STOCK, 1.0 + index, None, None)])
            ends.append(log.stat().st_size)
        journal.set_outcome(CELL, 0, STOCK, "ok", None, 1, 1, "k-0", "sha256:e", {})
        ends.append(log.stat().st_size)
        content = log.read_bytes()
        shutil.copy(path, tmp_path / "whole.db")
    rng = random.Random(1)
    places = {
        0,
        len(content),
        *(end + off for end in ends for off in (-1, 0, 1)),
        *rng.sample(range(len(content)), 40),
    }
    for at in sorted(place for place in places if place <= len(content)):
        shutil.copy(tmp_path / "whole.db", path)
        log.write_bytes(content[:at])
        path.with_name("a.db-shm").unlink(missing_ok=True)
        with Journal.open(path, "sha256:0", "?") as journal:
            assert journal.history(CELL, 0)[1] == sum(end <= at for end in ends[:3])
            assert len(journal.measurements()) == (at >= ends[3])
    assert sqlite3.connect(path).execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_case_12_leases_of_a_killed_writer_are_free_again(tmp_path: Path) -> None:
    shares = [(CELL, 0), (CELL, 1)]
    with Journal.open(tmp_path / "a.db", "sha256:0", "?") as journal:
        assert journal.lease(shares, "gpu 0", 10, now=100) == (CELL, 0)
        assert journal.lease(shares, "gpu 1", 10, now=100) == (CELL, 1)
        assert journal.lease(shares, "gpu 2", 10, now=105) is None
        assert journal.renew(CELL, 0, "gpu 0", 10, now=109)
        assert not journal.renew(CELL, 1, "gpu 1", 10, now=111), "it lapsed"
        assert journal.lease(shares, "gpu 2", 10, now=111) == (CELL, 1)
        journal.finish_cell(CELL, 0)
        assert journal.leases() == {(CELL, 1): ("gpu 2", 121)}
        with Journal.read(tmp_path / "a.db") as reader:
            assert reader.leases() == journal.leases()
    with Journal.open(tmp_path / "a.db", "sha256:0", "?") as journal:
        assert journal.leases() == {}
        assert journal.lease(shares, "gpu 0", 10) == (CELL, 1)


@pytest.mark.parametrize("field", [*provenance.FIELDS, "code"])
def test_case_13_each_altered_field_is_refused_warned_of_or_free(
    tmp_path: Path, field: str
) -> None:
    other = synthetic.ENV | {field: "altered"} if field in provenance.FIELDS else synthetic.ENV
    envs = synthetic.ENVS | {provenance.digest(other): other}
    changes = {"code": "altered-0"} if field == "code" else {"env": provenance.digest(other)}
    path = write(tmp_path, [synthetic.measurement(CELL, STOCK, [5.0]), synthetic.measurement(CELL, STOCK, [5.0], 1, **changes)],
                 envs)  # fmt: skip
    kind = provenance.FIELDS.get(field, "hard")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        if kind == "hard":
            with pytest.raises(MeasurementError, match=f"{field}.*must not be mixed"):
                measurements.load([path])
        else:
            assert len(measurements.load([path])) == 2
    assert [str(w.message).startswith(field) for w in seen if w.category is ProvenanceWarning] == [
        True
    ] * (kind == "soft")


def test_case_14_device_names_become_safe_and_distinct_slugs() -> None:
    names = ["NVIDIA H200 MIG 1g.18gb", "NVIDIA H200", "A/B", "A B", " ", "", "..", ".", "ビデオ", "x" * 300, "x" * 301,
             "nvidia-h200", "A\\B", "a\nb", "\0"]  # fmt: skip
    slugs = [devices.slug(name) for name in names]
    assert len(set(slugs)) == len(names)
    for slug in slugs:
        assert re.fullmatch(r"[a-z0-9-]{1,99}", slug)
        assert Path(slug).name == slug
        assert devices.module_name(slug).isidentifier()


def test_case_15_a_policy_is_asked_at_odd_places() -> None:
    import torch

    module = emit.load(
        emit.emit(
            fitted(list(synthetic.measurements(synthetic.cells(), noise=0.0, processes=1)))[0]
        )
    )
    for bad in (0, -1):
        with pytest.raises(ValueError, match="requests"):
            module.choose(12, bad, 1, "decode")
    for bad in (1.5, 4.0, "4", None):
        with pytest.raises(TypeError):
            module.choose(12, bad, 1, "decode")
    assert module.explain(12, 256, 1, "decode").place == "measured"
    for requests in (257, 2560):
        assert module.explain(12, requests, 1, "decode").place == "extrapolated"
        assert module.choose(12, requests, 1, "decode") == module.choose(12, 256, 1, "decode")
    assert module.explain(11, 1, 1, "decode").place != "measured"
    for integer in (np.int64(4), np.int32(4), torch.tensor(4)):
        assert module.choose(12, integer, 1, "decode") == module.choose(12, 4, 1, "decode")


SM_COUNTS = {108, 114, 132, 148}
"""Of the A100, H100 PCIe, H100 SXM and H200, B200."""
NOT_OF_A_CHIP = {
    "kernels/kda_kernels/build.py": "cross-compiling needs some count and depends on none"
}


def test_case_16_a_policy_of_another_chip_says_so() -> None:
    module = emit.load(emit.emit(fitted(list(synthetic.measurements([CELL])))[0]))
    assert module.matches("SYNTHETIC ONE", 100, (9, 0))
    for other in (
        ("SYNTHETIC TWO", 100, (9, 0)),
        ("SYNTHETIC ONE", 99, (9, 0)),
        ("SYNTHETIC ONE", 100, (10, 0)),
    ):
        assert not module.matches(*other)


def test_case_16_no_sm_count_is_written_into_the_code() -> None:
    found = []
    sources = [*(ROOT / "kdabench").rglob("*.py"), *(ROOT / "kernels" / "kda_kernels").glob("*.py")]
    for path in sources:
        name = str(path.relative_to(ROOT))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if (
                isinstance(node, ast.Constant)
                and type(node.value) is int
                and node.value in SM_COUNTS
            ):
                found.append(f"{name}:{node.lineno}: {node.value}")
    assert not [place for place in found if place.split(":")[0] not in NOT_OF_A_CHIP]


# --- 17 to 22: what is concluded ---


def test_case_17_a_step_faster_with_more_requests_is_blamed_on_its_threshold() -> None:
    steps = {35: (4.0, 9.0), 40: (9.0, 3.0)}
    cells = {requests: Cell("decode", requests, 12) for requests in steps}
    rows = [synthetic.measurement(cells[n], c, [us]) for n, pair in steps.items() for c, us in zip((STOCK, split(1)), pair, strict=True)]  # fmt: skip
    grid = regret.make_grid(rows)
    avoidable = [
        replace(r, samples_us=(3.05,)) if (r.cell.requests, r.candidate) == (35, split(1)) else r
        for r in rows
    ]
    explain = lambda *key: type("Why", (), {"rule": "STOCK_ITEMS"})  # noqa: E731
    at = {c: i for i, c in enumerate(grid.candidates)}
    picked = np.array([at[STOCK] if cell.requests == 35 else at[split(1)] for cell in grid.cells])
    assert regret.find_cliffs(grid, picked, explain) == (), "no variant avoids it"
    (cliff,) = regret.find_cliffs(regret.make_grid(avoidable), picked, explain)
    assert (cliff.cell.requests, cliff.faster.requests, cliff.rule) == (35, 40, "STOCK_ITEMS")


def test_case_18_a_bias_of_the_session_is_no_verdict_within_it() -> None:
    """Every sample of a session 3 % slower: the pairs of a round, and of one candidate with itself,
    don't show it."""
    false_alarms, judged = 0, 0
    for seed in range(200):
        rng = random.Random(seed)
        bias = rng.choice([1.0, 1.03])
        clock = FixedClock(
            lambda c, index, rng=rng, bias=bias: Reading(5 * bias * (1 + rng.gauss(0, 0.004)))
        )  # type: ignore[misc]
        contest = run_contest([GOOD, BETTER], clock, Plan(max_rounds=12, seconds=60, seed=seed))
        false_alarms += any(left.why == "settled" for left in contest.left.values())
        assert contest.sentinel is not None
        row = synthetic.measurement(CELL, contest.sentinel, contest.samples[contest.sentinel])
        verdict = twin_verdict(
            twins(replace(row, rounds=tuple(contest.rounds[contest.sentinel]))), Plan()
        )
        judged += verdict is not None
        false_alarms += verdict not in (None, "same")
    assert judged > 150
    assert false_alarms <= 0.01 * (200 + judged)


def test_case_18_all_slower_and_none_faster_warns_about_the_session() -> None:
    """A/A of two sessions, each with a bias of its own of up to 3 % and processes that differ:
    false alarms <= 1 % of the rows and of the comparisons. Without anything unchanged to tell,
    one-sided findings warn about the session."""
    cells = [Cell("decode", requests, heads) for heads in (12, 96) for requests in (1, 4, 16, 64)]

    def measured(rng: random.Random, bias: float) -> compare.Side:
        rows = []
        for cell in cells:
            for one in (STOCK, split(1), split(4)):
                for number in range(3):
                    us = synthetic.model_us(cell, one) * bias * rng.gauss(1, 0.003)
                    rows.append(
                        synthetic.measurement(
                            cell, one, [us * rng.gauss(1, 0.004) for _ in range(8)], number
                        )
                    )
        return compare.Side("a session", rows, synthetic.ENVS)

    alarms, rows, alarmed, warned, of = 0, 0, 0, 0, 100
    for seed in range(of):
        rng = random.Random(seed)
        a, b = (measured(rng, rng.uniform(0.97, 1.03)) for _ in range(2))
        found = compare.compare(a, b)
        false = found.of("slower") + found.of("faster")
        alarms, rows, alarmed = alarms + len(false), rows + len(found.rows), alarmed + bool(false)
        if seed < 20:
            slow = [
                replace(r, samples_us=tuple(us * 1.1 for us in r.samples_us), code="new-0")
                for r in a.measurements
            ]
            changed = compare.compare(a, replace(b, measurements=slow))
            assert changed.of("slower")
            assert not changed.of("faster")
            warned += any("that may be the session" in warning for warning in changed.warnings)
    assert rows == of * len(cells) * 3
    assert alarms <= 0.01 * rows
    assert alarmed <= 0.01 * of
    assert warned == 20


def test_case_19_statistics_are_of_the_raw_samples_in_order(tmp_path: Path) -> None:
    samples = [9.0, 5.0, 100.0, 5.5, 5.25]  # an outlier in the middle
    with Journal.open(tmp_path / "a.db", "sha256:0", "?") as journal:
        env = journal.add_env(synthetic.ENV)
        for index, us in enumerate(samples):
            journal.add_round(CELL, 0, index, [(STOCK, us, None, None)])
        journal.set_outcome(CELL, 0, STOCK, "ok", None, 10**9, 1, "k-0", env, {})
        path = export(journal, tmp_path, "synthetic-one", "dispatch")
    (row,) = measurements.load([path])
    assert list(row.samples_us) == samples
    again = run_contest([STOCK], RecordedClock([row]), Plan(max_rounds=9))
    assert again.samples[STOCK] == samples
    (shown,) = data._candidate_rows("a.db", [row])
    assert shown["median_us"] == 5.5
    assert shown["quartiles_us"] == [5.25, 9.0]
    assert shown["samples"] == 5


def test_case_20_compilation_is_not_on_the_clock(tmp_path: Path) -> None:
    summary = workers.run(workers.make_sweep(tmp_path, (GOOD, BETTER)), tmp_path)
    with sqlite3.connect(summary.journal) as database:
        infos = [json.loads(text) for (text,) in database.execute("SELECT info FROM outcome")]
    assert infos == [{"compile_s": 1.5}] * 2
    assert max(us for r in summary.measurements for us in r.samples_us) < 6


def test_case_21_magnitudes_decide_not_the_number_of_wins() -> None:
    """Stock wins five cells by 0.4 % and loses one by 30 %: no threshold hands it that one."""
    rows = []
    for requests, (stock, splits) in {
        **dict.fromkeys((1, 2, 4, 8, 16), (1.0, 1.004)),
        32: (1.3, 1.0),
    }.items():
        cell = Cell("decode", requests, 12)
        rows += [
            synthetic.measurement(cell, STOCK, [stock]),
            synthetic.measurement(cell, split(1), [splits]),
        ]
    policy, found = fitted(rows)
    assert emit.load(emit.emit(policy)).choose(12, 32, 1, "decode").variant == "KdaSplit"
    assert found.regret["all"].max < 0.005


def test_case_22_what_was_not_measured_is_no_pass() -> None:
    cells = [Cell("decode", requests, 12) for requests in (1, 2)]
    rows = [synthetic.failed(cells[0], STOCK), synthetic.failed(cells[0], split(1)),
            synthetic.measurement(cells[1], STOCK, [5.0]), synthetic.measurement(cells[1], split(1), [4.0])]  # fmt: skip
    policy, found = fitted(rows)
    assert found.without_winner == (cells[0],)
    text = evidence.text(policy, found)
    assert "2 cells" in text
    assert "no variant has a time in 1: decode heads=12 requests=1" in text
    shown = data._candidate_rows("a", rows)
    figures = [
        (row["median_us"], row["efficiency"]) for row in shown if row["cell"]["requests"] == 1
    ]
    assert figures == [(None, None)] * 2
    assert console.table(("us",), [(None,)]).splitlines()[1] == "-"


# --- 23 to 26: files, locks, streams ---


@pytest.mark.parametrize("at", ["fsync", "replace"])
def test_case_23_an_interrupted_emit_leaves_the_old_module(
    at: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "policy.py"
    emit.write_atomic(path, "old = 1\n")

    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, at, interrupt)
    with pytest.raises(KeyboardInterrupt):
        emit.write_atomic(path, "new = 1\n" * 10_000)
    assert path.read_text() == "old = 1\n"
    assert list(tmp_path.iterdir()) == [path]


def test_case_24_a_full_disk_while_journaling_keeps_what_is_done(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    with Journal.open(path, "sha256:0", "?") as journal:
        pages = journal._db.execute("PRAGMA page_count").fetchone()[0]
        journal._db.execute(f"PRAGMA max_page_count = {pages + 1}")
        with pytest.raises(JournalError, match="disk is full") as caught:  # noqa: PT012
            for index in range(10_000):
                journal.add_round(CELL, 0, index, [(STOCK, 3.0, 1980, False)] * 50)
        assert isinstance(caught.value.__cause__, sqlite3.Error), "a finding, status 1"
    with Journal.read(path) as journal:
        assert journal.history(CELL, 0)[1] == index


def test_case_24_a_results_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "results").touch()
    with Journal.open(tmp_path / "a.db", "sha256:0", "?") as journal:
        env = journal.add_env(synthetic.ENV)
        journal.add_round(CELL, 0, 0, [(STOCK, 5.0, None, None)])
        journal.set_outcome(CELL, 0, STOCK, "ok", None, 10**9, 1, "k-0", env, {})
        with pytest.raises(JournalError, match=r"results.*(Not a directory|File exists)") as caught:
            export(journal, tmp_path / "results", "synthetic-one", "dispatch")
        assert isinstance(caught.value.__cause__, OSError), "a finding, status 1"
        assert len(journal.measurements()) == 1


def test_case_25_two_sweeps_on_one_gpu(tmp_path: Path) -> None:
    """The second names the first and gives up; the first's work and lock are as they were."""
    held = lock_gpu(workers.ENV["uuid"])  # type: ignore[arg-type]
    sweep = workers.make_sweep(tmp_path, (GOOD,))
    with pytest.raises(
        JournalBusy, match=rf"GPU-0: is being measured on by pid {os.getpid()} on "
    ) as caught:
        workers.run(sweep, tmp_path)
    assert caught.value.__cause__ is None, "the user's mistake, status 2"
    os.close(held)
    assert workers.run(sweep, tmp_path).done == 1


def test_case_25_two_processes_on_one_journal(tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from kdabench.measure.journal import *\n"
    code += "Journal.open(Path(sys.argv[1]), '', '')"
    with Journal.open(tmp_path / "a.db", "", "?"):
        done = subprocess.run(
            [sys.executable, "-c", code, tmp_path / "a.db"], capture_output=True, text=True
        )
    assert f"JournalBusy: {tmp_path}/a.db: is being written by pid {os.getpid()} on " in done.stderr


def test_case_26_a_capture_waits_for_the_stream_that_wrote_the_inputs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Late inputs: what other streams were told to do before is ordered before what is captured and
    replayed."""
    from contextlib import contextmanager
    from types import SimpleNamespace

    from kdabench.measure import cuda_graphs

    told: list[str] = []

    @contextmanager
    def graph(made: object, stream: Any, capture_error_mode: str) -> Iterator[None]:
        told.append("begin")
        yield
        told.append("end")

    stream = SimpleNamespace(
        cuda_stream=7, wait_stream=lambda other: told.append(f"wait for {other}")
    )
    fake = SimpleNamespace(
        CUDAGraph=lambda keep_graph: SimpleNamespace(
            instantiate=lambda: told.append("instantiate")
        ),
        current_stream=lambda: "the writer's",
        synchronize=lambda: told.append("synchronize"),
        graph=graph,
    )
    monkeypatch.setattr(cuda_graphs.torch, "cuda", fake)
    cuda_graphs.capture(lambda handle: told.append(f"enqueue on {handle}"), stream)  # type: ignore[arg-type]
    assert told == [
        "wait for the writer's",
        "synchronize",
        "begin",
        "enqueue on 7",
        "end",
        "instantiate",
    ]


@pytest.mark.gpu
def test_case_26_no_cell_is_captured_with_stale_inputs() -> None:
    """1000 captures whose slots are written late, by a stream that first works for a while."""
    from support import planted

    assert planted.stale_captures(1000) == 0


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signals_end_a_sweep_cleanly(number: signal.Signals, tmp_path: Path) -> None:
    """Finished work kept, no process left, exit status 128 + number, and the same command goes
    on."""
    script = tmp_path / "sweep.py"
    script.write_text(f"""
import os, signal, sys
sys.path[:0] = {[str(Path(__file__).parents[1]), *sys.path]!r}
from pathlib import Path
import typer
from support import workers
from kdabench.cli import measuring

if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    here = Path({str(tmp_path)!r})
    sweep = workers.make_sweep(here, (workers.candidate(1), workers.candidate(2)), requests=tuple(range(1, 400)))
    try:
        measuring.finish(workers.run(sweep, here, listener=lambda event: print(event.done, flush=True)))
    except typer.Exit as ended:
        sys.exit(ended.exit_code)
""")
    running = subprocess.Popen(
        [sys.executable, script], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert running.stdout is not None
    while int(running.stdout.readline()) < 3:
        pass
    running.send_signal(number)
    _, error = running.communicate(timeout=20)
    assert running.returncode == 128 + number, error
    assert "the same command goes on" in error
    assert not processes_of(tmp_path)
    with Journal.read(tmp_path / "made-up.db") as journal:
        assert journal.progress().done >= 3
        assert journal.progress().partial <= 1


def test_a_killed_sweep_takes_its_worker_with_it(tmp_path: Path) -> None:
    script = tmp_path / "sweep.py"
    script.write_text(f"""
import sys
sys.path[:0] = {[str(Path(__file__).parents[1]), *sys.path]!r}
from pathlib import Path
from support import workers

if __name__ == "__main__":
    sweep = workers.make_sweep(Path({str(tmp_path)!r}), (workers.candidate(1), workers.candidate(2, "hang")))
    workers.run(sweep, Path({str(tmp_path)!r}))
""")
    running = subprocess.Popen([sys.executable, script])
    wait_until(lambda: len(processes_of(tmp_path)) == 2, 20)
    time.sleep(0.5)
    running.kill()
    running.wait()
    wait_until(lambda: not processes_of(tmp_path), 5)


def wait_until(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.05)
