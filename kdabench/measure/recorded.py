"""Recorded runs: sampling and stopping run on recorded samples, where nothing is measured."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from kdabench.data import devices
from kdabench.data.measurements import Cell, Measurement, Status, load
from kdabench.data.sweep import Sweep
from kdabench.measure.clock import RecordedClock
from kdabench.measure.contest import Contest, Plan, Round, run_contest
from kdabench.measure.journal import Journal
from kdabench.measure.messages import RoundDone
from kdabench.measure.session import Work
from kdabench.measure.share import keep_round

Pair = tuple[Cell, int]


def measurements_of(sweep: Sweep, folder: Path) -> list[Measurement]:
    """Load a device's measurements of the sweep's cells; a cell that stands in several files is
    taken from the first of them.

    Raises ValueError if nothing is recorded in the folder.
    """
    found: list[Measurement] = []
    left = set(sweep.cells)
    for path in _paths(sweep, folder):
        here = [measurement for measurement in load([path]) if measurement.cell in left]
        left -= {measurement.cell for measurement in here}
        found += here
    return found


def _paths(sweep: Sweep, folder: Path) -> list[Path]:
    """The files that a recorded run reads: the sweep's own, else every file of the device. Raises
    ValueError."""
    own = folder / f"{sweep.stem}.jsonl"
    paths = [own] if own.exists() else sorted(folder.glob("*.jsonl"))
    if not paths:
        raise ValueError(f"{folder}: no recorded measurements (*.jsonl) to run on")
    return paths


def recorded_contest(measurements: Sequence[Measurement], plan: Plan, **resumed: Any) -> Contest:
    """Run the contest of one (cell, process) on its recorded samples, which take no time.

    resumed  further arguments of run_contest
    """
    return run_contest(
        [r.candidate for r in measurements],
        RecordedClock(measurements),
        replace(plan, seconds=math.inf),
        **resumed,
    )


@dataclass(frozen=True)
class RecordedRunner:
    """Runs on the measurements in a results folder."""

    folder: Path

    def open_journal(self, sweep: Sweep, out: Path) -> Journal:
        """Open out/<stem>.recorded.db; one about other measurements is begun anew, since what it
        came to can always be had again.

        Raises JournalError, JournalBusy; ValueError if nothing is recorded in the folder.
        """
        path, digest = out / f"{sweep.stem}.recorded.db", self._digest(sweep)
        if path.exists() and _digest_of(path) != digest:
            for suffix in ("", "-wal", "-shm"):
                path.with_name(path.name + suffix).unlink(missing_ok=True)
        return Journal.open(path, digest, sweep.question, recorded=True)

    def _digest(self, sweep: Sweep) -> str:
        """Of the sweep and the files that it runs on."""
        digest = hashlib.sha256(sweep.digest.encode())
        for path in _paths(sweep, self.folder):
            digest.update(path.read_bytes())
        return "sha256:" + digest.hexdigest()

    def run(self, work: Work) -> None:
        """Bring the pairs to what their samples come to; those that were not recorded are told of.

        Raises ValueError for measurements that can't be read.
        """
        if not work.queue.left:
            return
        run = _Run(work, self.folder)
        missing: list[Pair] = []
        for pair in work.queue:
            if work.tally.spent:
                break
            if pair not in run.by_pair:
                missing.append(pair)
            run.bring(pair)
        if missing:
            work.tally.note(_not_recorded(missing))


def _digest_of(path: Path) -> str:
    with Journal.read(path) as journal:
        return journal.sweep_digest


class _Run:
    """A recorded run with what it reads: by_pair holds what was recorded of the sweep's
    candidates."""

    def __init__(self, work: Work, folder: Path) -> None:
        self._work, self._envs = work, devices.load_envs(folder)
        self._kept: set[str] = set()
        self.by_pair: dict[Pair, list[Measurement]] = {}
        for measurement in measurements_of(work.sweep, folder):
            if measurement.candidate in work.sweep.candidates:
                pair = measurement.cell, measurement.process
                self.by_pair.setdefault(pair, []).append(measurement)

    def bring(self, pair: Pair) -> None:
        """Run the contest of a pair, and keep its rounds and outcomes."""
        journal, measurements = self._work.journal, self.by_pair.get(pair, [])
        for digest in {r.env for r in measurements} - self._kept:
            self._kept.add(journal.add_env(self._envs[digest]))
        timed = [r for r in measurements if r.samples_us]
        contest = self._contest(pair, timed)
        for measurement in measurements:
            _keep(journal, measurement, contest)
        journal.finish_cell(*pair)
        good = [r for r in timed if r.status == "ok"]
        times = {r.candidate: contest.samples.get(r.candidate, r.samples_us) for r in good}
        self._work.tally.cell(*pair, times)

    def _contest(self, pair: Pair, timed: Sequence[Measurement]) -> Contest:
        journal = self._work.journal
        history, first_round = journal.readings(*pair)
        clocks = [mhz for r in timed if (mhz := self._envs[r.env].get("sm_clock_max_mhz"))]

        def keep(index: int, readings: Round) -> None:
            keep_round(journal, *pair, RoundDone(index, tuple(readings)))

        return recorded_contest(
            timed,
            self._work.plan,
            history=history,
            first_round=first_round,
            full_clock_mhz=max(clocks, default=None),
            on_round=keep,
        )


def _keep(journal: Journal, measurement: Measurement, contest: Contest) -> None:
    status, reason = _outcome(measurement, contest)
    journal.set_outcome(
        measurement.cell,
        measurement.process,
        measurement.candidate,
        status,
        reason,
        measurement.unique_bytes,
        measurement.bytes_moved,
        measurement.code,
        measurement.env,
        {},
    )


def _outcome(measurement: Measurement, contest: Contest) -> tuple[Status, str | None]:
    """Status and reason: what the contest says of a recorded candidate, unless its samples merely
    came to an end."""
    if measurement.status == "ok" and contest.unstable is not None:
        return "unstable", contest.unstable
    left = contest.left.get(measurement.candidate)
    if left is None or (measurement.reason and left.why == "exhausted"):
        return measurement.status, measurement.reason
    return measurement.status, str(left)


def _not_recorded(missing: Sequence[Pair]) -> str:
    cell, process = missing[0]
    return (
        f"not recorded: {len(missing)} cells and processes, {cell.kind} requests={cell.requests} "
        f"heads={cell.heads} tokens={cell.tokens} process={process} the first of them"
    )
