"""The worker of a GPU, replaced when it is lost, with workers that don't come up."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from kdabench.measure.contest import Plan
from kdabench.measure.errors import JournalBusy
from kdabench.measure.locks import lock_gpu
from kdabench.measure.slot import Slot, SweepFailedError
from kdabench.tune.heats import WorkerBench
from support import workers

CELL = workers.make_sweep(Path(), ()).cells[0]


@pytest.fixture(autouse=True)
def locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several test runs on one machine have the same made-up GPU."""
    monkeypatch.setenv("KDABENCH_LOCKS", str(tmp_path))


def up_at_the_second_start(pipe: Connection, index: int) -> None:
    started = Path(os.environ["KDABENCH_LOCKS"]) / "started"
    if not started.exists():
        started.touch()
        workers.broken(pipe, index)
    workers.obedient(pipe, index)


def test_a_search_survives_a_worker_that_does_not_come_up_at_once(tmp_path: Path) -> None:
    slow, fast = workers.candidate(1), workers.candidate(40)
    with WorkerBench(0, worker_main=up_at_the_second_start) as bench:
        heat = bench.heat(CELL, [slow, fast], Plan(min_rounds=3, max_rounds=4, hopeless=1.5))
    assert (tmp_path / "started").exists()
    assert heat.failed == {}
    assert heat.contest.left[slow].why == "hopeless"


def test_one_that_never_comes_up_is_told_in_one_line() -> None:
    with Slot(0, workers.broken) as slot, pytest.raises(SweepFailedError) as caught:
        slot.get()
    assert "did not start" in str(caught.value)
    assert "all devices are busy" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_slot_holds_its_gpu_until_it_is_left() -> None:
    uuid = str(workers.ENV["uuid"])
    with Slot(0, workers.obedient) as slot:
        first = slot.get()
        assert slot.get() is first
        with pytest.raises(JournalBusy, match=f"is being measured on by pid {os.getpid()}"):
            lock_gpu(uuid)
        slot.drop()
        assert slot.get() is not first
    os.close(lock_gpu(uuid))
