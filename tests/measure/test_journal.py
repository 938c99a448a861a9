from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kdabench.data import measurements
from kdabench.data.measurements import Cell
from kdabench.measure import journal as journals
from kdabench.measure.errors import JournalBusy, JournalError
from kdabench.measure.journal import Journal
from support import synthetic
from support.synthetic import STOCK, split

CELL = Cell("record", 4, 12, 4)
OTHER = Cell("decode", 1, 12)
DIGEST = "sha256:sweep"
ENV = next(iter(synthetic.ENVS))


def start(path: Path, **changes: Any) -> Journal:
    return Journal.open(path, **{"sweep_digest": DIGEST, "question": "Why?"} | changes)


def outcome(
    journal: Journal,
    cell: Cell,
    process: int,
    candidate: measurements.Candidate,
    status: Any = "ok",
    reason: str | None = None,
) -> None:
    journal.set_outcome(
        cell, process, candidate, status, reason, 10**9, 5, "k-0", ENV, {"compile_s": 1.5}
    )


def fill(path: Path, process: int = 0, **changes: Any) -> None:
    """A finished share with an A/A candidate, an unfinished one, and a failure."""
    with start(path, **changes) as journal:
        assert journal.add_env(synthetic.ENV) == ENV
        for i in range(3):
            journal.add_round(CELL, process, i, [(split(2), 5.0 + i, 1980, False), (STOCK, 9.0, None, None),
                                                 (split(2), 5.5 + i, 1980, True)], order=[1, 0, 1])  # fmt: skip
        outcome(journal, CELL, process, split(2))
        outcome(journal, CELL, process, STOCK)
        outcome(journal, CELL, process, split(8), "fault", "illegal access")
        journal.finish_cell(CELL, process)
        journal.add_round(OTHER, process, 0, [(STOCK, 3.0, 1980, False)])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "out" / "dispatch.db"


def test_what_goes_in_comes_out(path: Path) -> None:
    fill(path)
    with start(path) as journal:
        assert [journal.cell_state(c, p) for c, p in ((CELL, 0), (OTHER, 0), (CELL, 1))] == [
            "done",
            "partial",
            "new",
        ]
        assert journal.history(OTHER, 0) == ({STOCK: [(0, 3.0)]}, 1)
        assert journal.history(CELL, 1) == ({}, 0)
        assert journal.history(CELL, 0)[0][split(2)] == [
            (0, 5.0),
            (0, 5.5),
            (1, 6.0),
            (1, 6.5),
            (2, 7.0),
            (2, 7.5),
        ]
        found = journal.measurements()
        assert [(r.candidate, r.status, len(r.samples_us)) for r in found] == [
            (split(2), "ok", 6), (split(8), "fault", 0), (STOCK, "ok", 3)]  # fmt: skip
        assert found == journal.outcomes(CELL, 0)
        assert found[0].samples_us == (5.0, 5.5, 6.0, 6.5, 7.0, 7.5)
        assert found[0].rounds == (0, 0, 1, 1, 2, 2)
        assert found[0].throttled == (False, True) * 3
        assert found[2].sm_clock_mhz == (None,) * 3
        assert journal.envs() == synthetic.ENVS
        progress = journal.progress()
    assert (progress.done, progress.partial, progress.rounds, progress.readings) == (1, 1, 4, 10)
    assert progress.statuses == {"fault": 1, "ok": 2}


def test_a_candidate_that_fails_later_has_no_time_but_its_samples_are_kept(path: Path) -> None:
    fill(path)
    with start(path) as journal:
        outcome(journal, CELL, 0, STOCK, "wrong", "state differs")
        failed = journal.outcomes(CELL, 0)[2]
        assert (failed.status, failed.reason, failed.samples_us) == ("wrong", "state differs", ())
        assert len(journal.history(CELL, 0)[0][STOCK]) == 3


def test_rounds_are_forgotten_and_failures_stay(path: Path) -> None:
    fill(path)
    with start(path) as journal:
        journal.add_round(CELL, 0, 3, [(STOCK, 9.0, None, None)], gpu={"power_w": 300})
        assert journal.gpu_states(CELL, 0) == {3: {"power_w": 300}}
        journal.forget_rounds(CELL, 0)
        assert journal.readings(CELL, 0) == ({}, 0)
        assert journal.gpu_states(CELL, 0) == {}
        assert [r.status for r in journal.outcomes(CELL, 0)] == ["fault"]
        assert journal.history(OTHER, 0)[1] == 1


def test_a_journal_of_the_first_layout_is_read_and_merged(path: Path, tmp_path: Path) -> None:
    fill(path)
    with sqlite3.connect(path) as database:
        database.execute("DROP TABLE gpu")
        database.execute("DROP TABLE lease")
    with Journal.read(path) as journal:
        assert journal.gpu_states(CELL, 0) == journal.leases() == {}
        assert len(journal.measurements()) == 3
    journals.merge([path], tmp_path / "merged.db")
    with start(path) as journal:
        assert journal.lease([(OTHER, 0)], "me", 10) == (OTHER, 0)


@pytest.mark.parametrize("time_us", [0.0, -1.0, float("nan"), float("inf")])
def test_impossible_samples_are_refused(path: Path, time_us: float) -> None:
    with start(path) as journal:
        with pytest.raises(ValueError, match="finite and > 0"):
            journal.add_round(
                CELL, 0, 0, [(STOCK, 1.0, None, None), (split(1), time_us, None, None)]
            )
        assert journal.cell_state(CELL, 0) == "new"


def test_mistakes_of_a_caller(path: Path) -> None:
    fill(path)
    with start(path) as journal:
        with pytest.raises(ValueError, match="round 0 of process 0 is there already"):
            journal.add_round(OTHER, 0, 0, [(STOCK, 1.0, None, None)])
        with pytest.raises(ValueError, match="with a reason unless ok"):
            outcome(journal, CELL, 0, STOCK, "fault")
        with pytest.raises(ValueError, match="status='fine'"):
            outcome(journal, CELL, 0, STOCK, "fine", "x")
        assert journal.progress().rounds == 4


def test_other_sweeps_and_recorded_runs_are_refused(path: Path) -> None:
    fill(path)
    with pytest.raises(JournalError, match="belongs to another sweep"):
        start(path, sweep_digest="sha256:else")
    with pytest.raises(JournalError, match="is not a recorded run"):
        start(path, recorded=True)
    with start(path, question="Reworded?") as journal:
        assert journal.question == "Reworded?"


def test_one_writer_many_readers(path: Path) -> None:
    with start(path):
        fill_code = "import sys; from pathlib import Path; from kdabench.measure.journal import *\n"
        code = fill_code + "Journal.open(Path(sys.argv[1]), 'sha256:sweep', 'Why?')"
        done = subprocess.run(
            [sys.executable, "-c", code, str(path)], capture_output=True, text=True
        )
        assert f"JournalBusy: {path}: is being written by pid {os.getpid()} on " in done.stderr
        with pytest.raises(JournalBusy):
            start(path)
        with Journal.read(path) as reader:
            assert reader.measurements() == []
    fill(path)


def test_readers_do_not_write(path: Path) -> None:
    with pytest.raises(JournalError, match="no such journal"):
        Journal.read(path)
    fill(path)
    with Journal.read(path) as journal, pytest.raises(JournalError, match="readonly"):
        journal.finish_cell(OTHER, 0)


@pytest.mark.parametrize(
    "content",
    [b"not a database, but long enough to be taken for one" * 50, b"SQLite format 3\0" * 99],
)
def test_garbage_is_one_line(path: Path, content: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(content)
    for use in (start, Journal.read):
        with pytest.raises(JournalError) as caught:
            use(path)
        assert "\n" not in str(caught.value)
        assert str(path) in str(caught.value)


def test_no_folder_to_write_into(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(JournalError, match=r"Not a directory|File exists"):
        start(tmp_path / "file" / "a.db")


def test_disk_full_keeps_what_was_acknowledged(path: Path) -> None:
    fill(path)
    with start(path) as journal:
        pages = journal._db.execute("PRAGMA page_count").fetchone()[0]
        journal._db.execute(f"PRAGMA max_page_count = {pages}")
        kept = 1
        with pytest.raises(JournalError, match="database or disk is full"):  # noqa: PT012
            for i in range(1, 100_000):
                journal.add_round(OTHER, 0, i, [(STOCK, 3.0, 1980, False)] * 50)
                kept += 1
        assert journal.history(OTHER, 0)[1] == kept
        assert journal.progress().rounds == 3 + kept


WRITER = textwrap.dedent("""
    import sys
    from pathlib import Path
    from kdabench.measure.journal import Journal
    from kdabench.data.measurements import Candidate, Cell
    candidates = [Candidate.of("KdaSplit", {"split": s}) for s in (1, 2, 4)]
    with Journal.open(Path(sys.argv[1]), "sha256:sweep", "Why?") as journal:
        cell = Cell("decode", 1, 12)
        first = journal.history(cell, 0)[1]
        for i in range(first, 10**6):
            journal.add_round(cell, 0, i, [(c, 1.0 + i, 1980, False) for c in candidates])
            print(i, flush=True)
""")


def test_killed_at_random_no_acknowledged_round_is_lost(path: Path) -> None:
    rng = random.Random(0)
    acknowledged = -1
    for _ in range(8):
        command = [sys.executable, "-c", WRITER, str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            process.stdout.readline()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(rng.uniform(0, 0.15))
            process.send_signal(signal.SIGKILL)
            rest = process.stdout.read().splitlines()
        acknowledged = max([acknowledged, *(int(line) for line in rest[:-1])])
        with start(path) as journal:
            found, upcoming = journal.history(OTHER, 0)
            assert upcoming > acknowledged
            assert {len(times) for times in found.values()} == {upcoming}
            assert all(times == [(i, 1.0 + i) for i in range(upcoming)] for times in found.values())


def cuts(size: int, frame: int = 4096 + 24) -> Iterator[int]:
    """Every byte around the headers of the log's frames, and every 101st."""
    for at in range(size + 1):
        if (
            at % 101 == 0
            or (at - 32) % frame in (0, 1, 8, 16, 23, 24, 25, frame - 1)
            or size - at < 3
        ):
            yield at


def test_a_log_cut_anywhere_keeps_all_whole_rounds(path: Path, tmp_path: Path) -> None:
    sizes = []
    log = Path(f"{path}-wal")
    with start(path) as journal:
        for i in range(4):
            journal.add_round(OTHER, 0, i, [(STOCK, 1.0 + i, None, None)])
            sizes.append(log.stat().st_size)
        for file in (path, log):
            shutil.copy(file, tmp_path)
    (tmp_path / path.name).rename(tmp_path / "whole.db")
    content = (tmp_path / log.name).read_bytes()
    cut = tmp_path / "cut.db"
    for at in cuts(len(content)):
        shutil.copy(tmp_path / "whole.db", cut)
        Path(f"{cut}-wal").write_bytes(content[:at])
        Path(f"{cut}-shm").unlink(missing_ok=True)
        with start(cut) as journal:
            assert journal.history(OTHER, 0)[1] == sum(size <= at for size in sizes)


def test_an_empty_log_is_a_new_journal(path: Path) -> None:
    path.parent.mkdir()
    path.touch()
    with start(path) as journal:
        assert journal.measurements() == []


def test_export_writes_what_load_reads(path: Path, tmp_path: Path) -> None:
    fill(path)
    with Journal.read(path) as journal:
        written = journals.export(journal, tmp_path / "results", "synthetic-one", "dispatch")
        assert written == tmp_path / "results" / "synthetic-one" / "dispatch.jsonl"
        assert measurements.load([written]) == journal.measurements()
        before = written.read_bytes(), (written.parent / "env.json").read_bytes()
        journals.export(journal, tmp_path / "results", "synthetic-one", "dispatch")
        assert before == (written.read_bytes(), (written.parent / "env.json").read_bytes())
    assert json.loads(before[1]) == synthetic.ENVS
    assert sorted(p.name for p in written.parent.iterdir()) == ["dispatch.jsonl", "env.json"]


def test_what_export_refuses(path: Path, tmp_path: Path) -> None:
    fill(path, recorded=True)
    with (
        Journal.read(path) as journal,
        pytest.raises(JournalError, match="is a recorded run; it is never exported"),
    ):
        journals.export(journal, tmp_path / "results", "synthetic-one", "dispatch")
    assert not (tmp_path / "results").exists()
    real = path.with_name("real.db")
    fill(real)
    with start(real) as journal:
        journals.export(journal, tmp_path / "results", "synthetic-one", "dispatch")
        journal.add_env(synthetic.ENV | {"sms": 7})
        with pytest.raises(JournalError, match="not exported: sms: 100 and 7"):
            journals.export(journal, tmp_path / "results", "synthetic-one", "dispatch")
    with start(path.with_name("b.db")) as journal:
        outcome(journal, CELL, 0, STOCK)
        with pytest.raises(JournalError, match="is ok without a sample"):
            journals.export(journal, tmp_path / "results", "synthetic-one", "other")
        (tmp_path / "file").touch()
        journal.add_round(CELL, 0, 0, [(STOCK, 1.0, None, None)])
        with pytest.raises(JournalError, match=r"Not a directory|File exists"):
            journals.export(journal, tmp_path / "file", "synthetic-one", "other")


def test_merge_joins(tmp_path: Path) -> None:
    paths = [tmp_path / f"{i}.db" for i in range(3)]
    for process, path in enumerate(paths[:2]):
        fill(path, process)
    shutil.copy(paths[0], paths[2])
    journals.merge(paths, tmp_path / "all.db")
    with start(tmp_path / "all.db") as merged:
        assert {r.process for r in merged.measurements()} == {0, 1}
        assert [merged.cell_state(CELL, p) for p in (0, 1)] == ["done", "done"]
        for process, path in enumerate(paths[:2]):
            with Journal.read(path) as journal:
                assert [
                    r for r in merged.measurements() if r.process == process
                ] == journal.measurements()
                assert merged.history(OTHER, process) == journal.history(OTHER, process)
        assert merged.envs() == synthetic.ENVS
    assert {p.name for p in tmp_path.iterdir()} >= {"all.db"}
    assert not list(tmp_path.glob(".all*"))


def test_what_merge_refuses(tmp_path: Path) -> None:
    a, b, out = tmp_path / "a.db", tmp_path / "b.db", tmp_path / "out.db"
    fill(a)
    fill(b)
    with start(b) as journal:
        journal.add_round(OTHER, 0, 1, [(STOCK, 3.0, 1980, False)])
    with pytest.raises(
        JournalError, match=r"b\.db: differs from the others in process 0 of .*decode"
    ):
        journals.merge([a, b], out)
    fill(tmp_path / "c.db", 1, sweep_digest="sha256:else")
    with pytest.raises(JournalError, match="journals of different sweeps"):
        journals.merge([a, tmp_path / "c.db"], out)
    fill(tmp_path / "d.db", 1)
    with start(tmp_path / "d.db") as journal:
        journal.add_env(synthetic.ENV | {"gpu": "SYNTHETIC TWO"})
    with pytest.raises(JournalError, match=r"gpu: .*SYNTHETIC ONE.* must not be mixed"):
        journals.merge([a, tmp_path / "d.db"], out)
    assert not out.exists()
    with pytest.raises(JournalError, match="exists already"):
        journals.merge([a], b)


@settings(
    max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None
)
@given(
    st.lists(
        st.lists(
            st.tuples(st.sampled_from(synthetic.CANDIDATES), st.floats(1e-9, 1e9)), max_size=6
        ),
        max_size=6,
    )
)
def test_samples_survive_to_the_last_bit(
    tmp_path: Path, rounds: list[list[tuple[measurements.Candidate, float]]]
) -> None:
    path = tmp_path / "bits.db"
    path.unlink(missing_ok=True)
    with start(path) as journal:
        for i, readings in enumerate(rounds):
            journal.add_round(CELL, 0, i, [(c, us, None, None) for c, us in readings])
        expected: dict[measurements.Candidate, list[tuple[int, float]]] = {}
        for i, readings in enumerate(rounds):
            for candidate, us in readings:
                expected.setdefault(candidate, []).append((i, us))
        assert journal.history(CELL, 0) == (expected, len(rounds))


def test_the_log_is_synced(path: Path) -> None:
    with start(path) as journal:
        assert journal._db.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        assert journal._db.execute("PRAGMA synchronous").fetchone() == (2,)
    assert sqlite3.connect(path).execute("PRAGMA integrity_check").fetchone() == ("ok",)
