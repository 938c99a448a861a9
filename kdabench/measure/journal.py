"""The journal of a sweep: an SQLite file that survives a kill at any moment.

Each round is one transaction, synced to disk before `add_round` returns (WAL, synchronous=FULL).
One process writes; a lock file beside the journal names it, and the kernel drops the lock when that
process ends, however it ends.
"""

from __future__ import annotations

import json
import math
import os
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from kdabench.data import provenance
from kdabench.data.measurements import (
    STATUSES,
    Candidate,
    Cell,
    Measurement,
    Status,
    canonical,
    dumps,
    load_envs,
    measurement_order,
    write_atomic,
)
from kdabench.measure import clock
from kdabench.measure.errors import JournalError
from kdabench.measure.locks import hold

Reading = tuple[Candidate, float, int | None, bool | None]
"""Candidate, microseconds per launch, SM clock in MHz, throttled; None where the GPU did not
say."""

_SCHEMA_VERSION = "2"
_BUSY_S = 10.0
_SCHEMA = (
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL)",
    "CREATE TABLE env (digest TEXT PRIMARY KEY, fields TEXT NOT NULL)",
    "CREATE TABLE cell (id INTEGER PRIMARY KEY, key TEXT NOT NULL UNIQUE)",
    """CREATE TABLE candidate (id INTEGER PRIMARY KEY, variant TEXT NOT NULL, spec TEXT NOT NULL,
       UNIQUE (variant, spec))""",
    """CREATE TABLE round (cell INTEGER NOT NULL, process INTEGER NOT NULL, round INTEGER NOT NULL,
       shuffle TEXT NOT NULL, PRIMARY KEY (cell, process, round)) WITHOUT ROWID""",
    """CREATE TABLE reading (cell INTEGER NOT NULL, process INTEGER NOT NULL, round INTEGER NOT NULL,
       position INTEGER NOT NULL, candidate INTEGER NOT NULL, time_us REAL NOT NULL, sm_clock_mhz INTEGER,
       throttled INTEGER, PRIMARY KEY (cell, process, round, position)) WITHOUT ROWID""",
    """CREATE TABLE outcome (cell INTEGER NOT NULL, process INTEGER NOT NULL, candidate INTEGER NOT NULL,
       status TEXT NOT NULL, reason TEXT, unique_bytes INTEGER NOT NULL, bytes_moved INTEGER NOT NULL,
       code TEXT NOT NULL, env TEXT NOT NULL, info TEXT NOT NULL,
       PRIMARY KEY (cell, process, candidate)) WITHOUT ROWID""",
    "CREATE TABLE done (cell INTEGER NOT NULL, process INTEGER NOT NULL, PRIMARY KEY (cell, process)) WITHOUT ROWID",
)
_LATER = (
    """CREATE TABLE IF NOT EXISTS gpu (cell INTEGER NOT NULL, process INTEGER NOT NULL, round INTEGER NOT NULL,
       state TEXT NOT NULL, PRIMARY KEY (cell, process, round)) WITHOUT ROWID""",
    """CREATE TABLE IF NOT EXISTS lease (cell INTEGER NOT NULL, process INTEGER NOT NULL, holder TEXT NOT NULL,
       expires REAL NOT NULL, PRIMARY KEY (cell, process)) WITHOUT ROWID""",
)
"""Tables that journals of this layout may lack: what they hold is not needed to read one."""


@dataclass(frozen=True)
class Progress:
    """done and partial count (cell, process) pairs; statuses counts outcomes."""

    done: int
    partial: int
    rounds: int
    readings: int
    statuses: Mapping[str, int]


@contextmanager
def _one_line(path: Path) -> Iterator[None]:
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        reason = getattr(error, "strerror", None) or " ".join(str(error).split())
        raise JournalError(f"{path}: {reason}") from error


class Journal:
    """See the module. Make one with `open` (to write) or `read`; both are context managers.

    All methods raise JournalError if the file can't be read or written; what was acknowledged
    before stays.
    """

    def __init__(self, path: Path, connection: sqlite3.Connection, lock: int | None) -> None:
        self.path = path
        self._db = connection
        self._lock = lock

    @classmethod
    def open(
        cls, path: Path, sweep_digest: str, question: str, *, recorded: bool = False
    ) -> Journal:
        """The journal of a sweep, new or as it was left. `recorded` marks one of a recorded
        run.

        Raises JournalBusy if another process writes it, JournalError if it belongs to another
        sweep.
        """
        with _one_line(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            lock = hold(path)
            try:
                connection = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None)
                journal = cls(path, connection, lock)
            except BaseException:
                os.close(lock)
                raise
            try:
                connection.execute("PRAGMA journal_mode=WAL")
                connection.execute("PRAGMA synchronous=FULL")
                journal._begin(sweep_digest, question, recorded)
            except BaseException:
                journal.close()
                raise
        return journal

    @classmethod
    def read(cls, path: Path) -> Journal:
        """An existing journal, without the right to write; it may be in use. Raises
        JournalError."""
        with _one_line(path):
            if not path.is_file():
                raise JournalError(f"{path}: no such journal")
            connection = sqlite3.connect(
                f"{path.absolute().as_uri()}?mode=ro", uri=True, timeout=_BUSY_S
            )
            journal = cls(path, connection, None)
            try:
                journal._check_version()
            except BaseException:
                journal.close()
                raise
        return journal

    def __enter__(self) -> Journal:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the journal's use; a second call does nothing."""
        try:
            self._db.close()
        finally:
            if self._lock is not None:
                os.close(self._lock)
                self._lock = None

    def _begin(self, sweep_digest: str, question: str, recorded: bool) -> None:
        with self._transaction():
            tables = self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
            if not tables:
                for statement in _SCHEMA:
                    self._db.execute(statement)
                meta = {
                    "schema": _SCHEMA_VERSION,
                    "sweep": sweep_digest,
                    "recorded": str(int(recorded)),
                }
                self._db.executemany("INSERT INTO meta VALUES (?, ?)", meta.items())
            self._check_version()
            if self.sweep_digest != sweep_digest:
                raise JournalError(
                    f"{self.path}: belongs to another sweep or another version of it ({self.sweep_digest}, this one is "
                    f"{sweep_digest}): move it away, or give another output folder"
                )
            if self.recorded != recorded:
                raise JournalError(
                    f"{self.path}: {'is' if self.recorded else 'is not'} a recorded run: use another journal"
                )
            self._db.execute("INSERT OR REPLACE INTO meta VALUES ('question', ?)", (question,))
            for statement in _LATER:
                self._db.execute(statement)
            self._db.execute("DELETE FROM lease")  # of an earlier writer, which is gone

    def _has(self, table: str) -> bool:
        return bool(
            self._db.execute("SELECT 1 FROM sqlite_master WHERE name = ?", (table,)).fetchone()
        )

    def _check_version(self) -> None:
        if self._meta("schema") != _SCHEMA_VERSION:
            raise JournalError(
                f"{self.path}: has another layout: this version reads {_SCHEMA_VERSION}"
            )

    def _meta(self, key: str) -> str:
        row = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return "" if row is None else str(row[0])

    @property
    def sweep_digest(self) -> str:
        return self._meta("sweep")

    @property
    def question(self) -> str:
        return self._meta("question")

    @property
    def recorded(self) -> bool:
        """Whether this journal is of a recorded run, not of a measurement."""
        return self._meta("recorded") == "1"

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        """All or nothing, on disk when it ends."""
        with _one_line(self.path):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._db.execute("COMMIT")
            finally:
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")

    def _cell(self, cell: Cell) -> int:
        self._db.execute("INSERT OR IGNORE INTO cell (key) VALUES (?)", (cell.key,))
        return int(self._db.execute("SELECT id FROM cell WHERE key = ?", (cell.key,)).fetchone()[0])

    def _candidate(self, candidate: Candidate) -> int:
        names = (candidate.variant, candidate.options_json)
        self._db.execute("INSERT OR IGNORE INTO candidate (variant, spec) VALUES (?, ?)", names)
        row = self._db.execute(
            "SELECT id FROM candidate WHERE variant = ? AND spec = ?", names
        ).fetchone()
        return int(row[0])

    def add_env(self, env: Mapping[str, Any]) -> str:
        """Keeps an environment and returns its digest."""
        digest = provenance.digest(env)
        with self._transaction():
            self._db.execute(
                "INSERT OR IGNORE INTO env VALUES (?, ?)", (digest, canonical(dict(env)))
            )
        return digest

    def cell_state(self, cell: Cell, process: int) -> Literal["new", "partial", "done"]:
        """Whether this process's share of a cell has been begun or finished."""
        with _one_line(self.path):
            for table in ("done", "round", "outcome"):
                query = f"SELECT 1 FROM {table} JOIN cell ON id = {table}.cell WHERE key = ? AND process = ? LIMIT 1"
                if self._db.execute(query, (cell.key, process)).fetchone():
                    return "done" if table == "done" else "partial"
        return "new"

    def history(
        self, cell: Cell, process: int
    ) -> tuple[dict[Candidate, list[tuple[int, float]]], int]:
        """What a partial cell already has: (round, time_us) by candidate in the order taken, and
        the next round."""
        found, upcoming = self.readings(cell, process)
        return {
            c: [(index, reading.time_us) for index, reading in past] for c, past in found.items()
        }, upcoming

    def readings(
        self, cell: Cell, process: int
    ) -> tuple[dict[Candidate, list[tuple[int, clock.Reading]]], int]:
        """The same with the GPU's clock and whether it throttled: what an interrupted contest goes
        on from."""
        query = """SELECT variant, spec, round, time_us, sm_clock_mhz, throttled FROM reading
                   JOIN cell ON cell.id = reading.cell JOIN candidate ON candidate.id = candidate
                   WHERE key = ? AND process = ? ORDER BY round, position"""
        latest = (
            "SELECT max(round) FROM round JOIN cell ON cell.id = cell WHERE key = ? AND process = ?"
        )
        found: dict[Candidate, list[tuple[int, clock.Reading]]] = {}
        with _one_line(self.path):
            for variant, options, index, time_us, mhz, slow in self._db.execute(
                query, (cell.key, process)
            ):
                reading = clock.Reading(time_us, mhz, None if slow is None else bool(slow))
                found.setdefault(Candidate(variant, options), []).append((index, reading))
            last = self._db.execute(latest, (cell.key, process)).fetchone()[0]
        return found, 0 if last is None else last + 1

    def add_round(
        self,
        cell: Cell,
        process: int,
        round_index: int,
        readings: Sequence[Reading],
        order: Sequence[int] = (),
        gpu: Mapping[str, Any] | None = None,
    ) -> None:
        """Keeps one round, readings in the order taken.

        order  how it was shuffled, if that is worth keeping
        gpu    the GPU's state as the round began, as JSON

        Raises ValueError for a round that is there already and for a time that isn't finite and
        positive.
        """
        for candidate, time_us, _, _ in readings:
            if not 0 < time_us < math.inf:
                raise ValueError(
                    f"time_us={time_us} of {candidate}: a sample must be finite and > 0"
                )
        with self._transaction():
            key = (self._cell(cell), process, round_index)
            if self._db.execute(
                "SELECT 1 FROM round WHERE cell=? AND process=? AND round=?", key
            ).fetchone():
                raise ValueError(
                    f"round {round_index} of process {process} is there already: {cell.key}"
                )
            self._db.execute(
                "INSERT INTO round VALUES (?, ?, ?, ?)", (*key, canonical(list(order)))
            )
            self._db.executemany(
                "INSERT INTO reading VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                [(*key, place, self._candidate(c), float(us), mhz, slow)
                 for place, (c, us, mhz, slow) in enumerate(readings)],
            )  # fmt: skip
            if gpu:
                self._db.execute(
                    "INSERT INTO gpu VALUES (?, ?, ?, ?)", (*key, canonical(dict(gpu)))
                )

    def set_outcome(
        self,
        cell: Cell,
        process: int,
        candidate: Candidate,
        status: Status,
        reason: str | None,
        unique_bytes: int,
        bytes_moved: int,
        code: str,
        env: str,
        info: Mapping[str, Any],
    ) -> None:
        """What became of a candidate; replaces an earlier outcome. `info` holds facts off the
        clock, as JSON.

        Raises ValueError for an unknown status, or a failure without a reason.
        """
        if status not in STATUSES or (status != "ok" and not reason):
            raise ValueError(
                f"{status=} {reason=}: one of {', '.join(STATUSES)}, with a reason unless ok"
            )
        facts = (status, reason, unique_bytes, bytes_moved, code, env, canonical(dict(info)))
        with self._transaction():
            key = (self._cell(cell), process, self._candidate(candidate))
            self._db.execute(
                "INSERT OR REPLACE INTO outcome VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (*key, *facts),
            )

    def finish_cell(self, cell: Cell, process: int) -> None:
        """Nothing is left to measure in this process's share of the cell; ends its lease."""
        with self._transaction():
            key = (self._cell(cell), process)
            self._db.execute("INSERT OR IGNORE INTO done VALUES (?, ?)", key)
            self._db.execute("DELETE FROM lease WHERE cell = ? AND process = ?", key)

    def lease(
        self,
        shares: Sequence[tuple[Cell, int]],
        holder: str,
        seconds: float,
        now: float | None = None,
    ) -> tuple[Cell, int] | None:
        """Hands the first of `shares` that is neither finished nor leased to `holder`, for so long;
        None: none is free.

        The lease of a holder that stopped renewing it lapses. Leases end with the writer's use of
        the journal.
        """
        now = time.time() if now is None else now
        with self._transaction():
            self._db.execute("DELETE FROM lease WHERE expires <= ?", (now,))
            for cell, process in shares:
                key = (self._cell(cell), process)
                taken = any(
                    self._db.execute(
                        f"SELECT 1 FROM {table} WHERE cell = ? AND process = ?", key
                    ).fetchone()
                    for table in ("done", "lease")
                )
                if not taken:
                    self._db.execute(
                        "INSERT INTO lease VALUES (?, ?, ?, ?)", (*key, holder, now + seconds)
                    )
                    return cell, process
        return None

    def renew(
        self, cell: Cell, process: int, holder: str, seconds: float, now: float | None = None
    ) -> bool:
        """A sign of life: prolongs a lease. False if it lapsed and another holder may have the
        share."""
        now = time.time() if now is None else now
        with self._transaction():
            key = (now + seconds, self._cell(cell), process, holder, now)
            query = "UPDATE lease SET expires = ? WHERE cell = ? AND process = ? AND holder = ? AND expires > ?"
            return self._db.execute(query, key).rowcount == 1

    def leases(self) -> dict[tuple[Cell, int], tuple[str, float]]:
        """Holder, and when the lease lapses in seconds of the epoch, by share."""
        query = "SELECT key, process, holder, expires FROM lease JOIN cell ON cell.id = cell ORDER BY 1, 2"
        with _one_line(self.path):
            rows = self._db.execute(query).fetchall() if self._has("lease") else []
        return {
            (Cell(**json.loads(key)), process): (holder, expires)
            for key, process, holder, expires in rows
        }

    def gpu_states(self, cell: Cell, process: int) -> dict[int, dict[str, Any]]:
        """The GPU's state by round."""
        query = "SELECT round, state FROM gpu JOIN cell ON cell.id = cell WHERE key = ? AND process = ? ORDER BY 1"
        with _one_line(self.path):
            rows = (
                self._db.execute(query, (cell.key, process)).fetchall() if self._has("gpu") else []
            )
        return {index: json.loads(state) for index, state in rows}

    def forget_rounds(self, cell: Cell, process: int) -> None:
        """Drops the rounds of a share in which a candidate failed, and outcomes with times: what it
        did to them is unknown. Failures stay."""
        with self._transaction():
            key = (self._cell(cell), process)
            for table in ("reading", "round", "gpu"):
                self._db.execute(f"DELETE FROM {table} WHERE cell = ? AND process = ?", key)
            query = "DELETE FROM outcome WHERE cell = ? AND process = ? AND status IN ('ok', 'unstable')"
            self._db.execute(query, key)

    def reopen_failed(self) -> int:
        """Forgets all (cell, process) shares in which a candidate failed, and returns their number.

        `unsupported` is no failure: it comes out the same again.
        """
        query = (
            "SELECT DISTINCT cell, process FROM outcome WHERE status NOT IN ('ok', 'unsupported')"
        )
        with self._transaction():
            shares = self._db.execute(query).fetchall()
            for table in ("reading", "round", "outcome", "done", "gpu"):
                self._db.executemany(f"DELETE FROM {table} WHERE cell = ? AND process = ?", shares)
        return len(shares)

    def measurements(self) -> list[Measurement]:
        """All candidates that have an outcome, sorted. Only status ok and unstable come with
        samples."""
        return self._measurements("", ())

    def outcomes(self, cell: Cell, process: int) -> list[Measurement]:
        """The same, of one process's share of a cell."""
        return self._measurements("WHERE key = ? AND process = ?", (cell.key, process))

    def _measurements(self, where: str, values: tuple[Any, ...]) -> list[Measurement]:
        readings = f"""SELECT reading.cell, process, candidate, time_us, round, sm_clock_mhz, throttled FROM reading
                       JOIN cell ON cell.id = reading.cell {where} ORDER BY round, position"""
        outcomes = f"""SELECT outcome.cell, process, candidate, key, variant, spec, status, reason, unique_bytes,
                       bytes_moved, code, env FROM outcome JOIN cell ON cell.id = outcome.cell
                       JOIN candidate ON candidate.id = candidate {where}"""
        samples: dict[tuple[int, int, int], list[tuple[float, int, int | None, bool | None]]] = {}
        cells: dict[str, Cell] = {}
        found = []
        with _one_line(self.path):
            for at, process, who, time_us, index, clock, slow in self._db.execute(readings, values):
                reading = (time_us, index, clock, None if slow is None else bool(slow))
                samples.setdefault((at, process, who), []).append(reading)
            for at, process, who, key, variant, options, status, reason, *facts in self._db.execute(
                outcomes, values
            ):
                cell = cells.get(key) or cells.setdefault(key, Cell(**json.loads(key)))
                taken = samples.get((at, process, who), []) if status in ("ok", "unstable") else []
                times, rounds, clocks, slowed = (
                    zip(*taken, strict=True) if taken else ((), (), (), ())
                )
                candidate = Candidate(variant, options)
                found.append(
                    Measurement(
                        cell,
                        candidate,
                        status,
                        reason,
                        process,
                        times,
                        rounds,
                        clocks,
                        slowed,
                        *facts,
                    )
                )
        return sorted(found, key=measurement_order)

    def envs(self) -> dict[str, dict[str, Any]]:
        """Environments by digest."""
        with _one_line(self.path):
            return {
                digest: json.loads(fields)
                for digest, fields in self._db.execute("SELECT * FROM env ORDER BY 1")
            }

    def progress(self) -> Progress:
        with _one_line(self.path):
            counts = {
                name: self._count(f"SELECT count(*) FROM {name}")
                for name in ("done", "round", "reading")
            }
            begun = self._count("""SELECT count(*) FROM (SELECT cell, process FROM round UNION
                                   SELECT cell, process FROM outcome UNION SELECT cell, process FROM done)""")
            statuses = dict(
                self._db.execute("SELECT status, count(*) FROM outcome GROUP BY 1 ORDER BY 1")
            )
        return Progress(
            counts["done"], begun - counts["done"], counts["round"], counts["reading"], statuses
        )

    def _count(self, query: str) -> int:
        return int(self._db.execute(query).fetchone()[0])

    def _shares(self) -> dict[tuple[str, int], dict[str, list[tuple[Any, ...]]]]:
        """All rows by (cell key, process) and table, with names in the place of ids: what a merge
        compares."""
        found: dict[tuple[str, int], dict[str, list[tuple[Any, ...]]]] = {}
        with _one_line(self.path):
            for table, query in _SHARES.items():
                if not self._has(table):
                    continue
                for key, process, *row in self._db.execute(query):
                    found.setdefault((key, process), {}).setdefault(table, []).append(tuple(row))
        return found

    def _insert_share(
        self, key: str, process: int, share: Mapping[str, list[tuple[Any, ...]]]
    ) -> None:
        with self._transaction():
            cell = self._cell(Cell(**json.loads(key)))
            for table, rows in share.items():
                for row in rows:
                    values = list(row)
                    if table in _NAMED:
                        place = _NAMED[table]
                        values[place : place + 2] = [
                            self._candidate(Candidate(*values[place : place + 2]))
                        ]
                    marks = ", ".join("?" * (2 + len(values)))
                    self._db.execute(
                        f"INSERT INTO {table} VALUES ({marks})", (cell, process, *values)
                    )


_SHARES = {
    "round": "SELECT key, process, round, shuffle FROM round JOIN cell ON cell.id = cell ORDER BY 1, 2, 3",
    "reading": """SELECT key, process, round, position, variant, spec, time_us, sm_clock_mhz, throttled FROM reading
                  JOIN cell ON cell.id = cell JOIN candidate ON candidate.id = candidate ORDER BY 1, 2, 3, 4""",
    "outcome": """SELECT key, process, variant, spec, status, reason, unique_bytes, bytes_moved, code, env,
                  info FROM outcome JOIN cell ON cell.id = cell JOIN candidate ON candidate.id = candidate
                  ORDER BY 1, 2, 3, 4""",
    "done": "SELECT key, process FROM done JOIN cell ON cell.id = cell ORDER BY 1, 2",
    "gpu": "SELECT key, process, round, state FROM gpu JOIN cell ON cell.id = cell ORDER BY 1, 2, 3",
}
_NAMED = {"reading": 2, "outcome": 0}
"""Where a row of `_SHARES` names its candidate, in variant and spec."""


def export(journal: Journal, results_dir: Path, device_slug: str, stem: str) -> Path:
    """Writes the records to `results_dir/<device_slug>/<stem>.jsonl`, the environments to its
    env.json.

    Raises JournalError for a recorded run, for environments that must not stand beside those already
    there, and if a file can't be written; files are replaced whole or not at all.
    """
    if journal.recorded:
        raise JournalError(
            f"{journal.path}: is a recorded run; it is never exported as a measurement"
        )
    measurements = journal.measurements()
    for measurement in measurements:
        if measurement.status == "ok" and not measurement.samples_us:
            raise JournalError(
                f"{journal.path}: {measurement.candidate} is ok without a sample: {measurement.cell.key}"
            )
    folder = results_dir / device_slug
    path = folder / f"{stem}.jsonl"
    try:
        known = load_envs([folder / "env.json"]) if (folder / "env.json").exists() else {}
        envs = known | journal.envs()
        provenance.check_mix(list(envs.values()))
        provenance.check_kernels(measurements)
    except ValueError as error:
        raise JournalError(f"{path}: not exported: {error}") from None
    with _one_line(path):
        # The environments first, so that no record ever names one that isn't there.
        write_atomic(
            folder / "env.json", json.dumps(envs, indent=1, sort_keys=True, allow_nan=False) + "\n"
        )
        write_atomic(path, dumps(measurements))
    return path


def merge(paths: Sequence[Path], out: Path) -> None:
    """Joins journals of one sweep, from several machines, into a new one.

    Equal shares of a cell count once. Raises JournalError if the journals are of different sweeps
    or GPUs, if two of them disagree about one process's share of a cell, or if `out` exists.
    """
    if not paths or out.exists():
        raise JournalError(f"{out}: {'exists already' if paths else 'nothing to merge'}")
    shares: dict[tuple[str, int], dict[str, list[tuple[Any, ...]]]] = {}
    envs: dict[str, dict[str, Any]] = {}
    about = set[tuple[str, bool]]()
    question = ""
    for path in paths:
        with closing(Journal.read(path)) as journal:
            about.add((journal.sweep_digest, journal.recorded))
            question = journal.question
            envs |= journal.envs()
            for share, rows in journal._shares().items():
                if shares.setdefault(share, rows) != rows:
                    raise JournalError(
                        f"{path}: differs from the others in process {share[1]} of {share[0]}"
                    )
    if len(about) > 1:
        raise JournalError(f"{', '.join(map(str, paths))}: are journals of different sweeps")
    try:
        provenance.check_mix(list(envs.values()))
    except ValueError as error:
        raise JournalError(f"{', '.join(map(str, paths))}: {error}") from None
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    ((digest, recorded),) = about
    try:
        with Journal.open(temporary, digest, question, recorded=recorded) as merged:
            for env in envs.values():
                merged.add_env(env)
            for (key, process), rows in sorted(shares.items()):
                merged._insert_share(key, process, rows)
        with _one_line(out):
            os.replace(temporary, out)
    finally:
        for leftover in (
            temporary,
            Path(f"{temporary}.lock"),
            Path(f"{temporary}-wal"),
            Path(f"{temporary}-shm"),
        ):
            leftover.unlink(missing_ok=True)
