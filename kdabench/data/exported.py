"""Files of measurements, schema 3: plain text, one JSON value a line; docs/formats.md shows one.

First the header, then tables of what measurements share (environments, reasons, candidates), then
each cell, followed by a row for each of its candidates with the runs of its processes.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field
from functools import cache, lru_cache
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from kdabench.data import provenance
from kdabench.data.lines import (
    CELL_DEFAULTS,
    HEADER,
    SCHEMA,
    CandidateLine,
    EnvLine,
    Header,
    Line,
    ReasonLine,
    Row,
    Run,
    encode,
    fail,
    parse_object,
    parse_row,
    plain,
)
from kdabench.data.measurements import (
    CELL_FIELDS,
    COLD_FACTOR,
    Candidate,
    Cell,
    Measurement,
    MeasurementError,
    l2_state,
    measurement_order,
    parse_json,
    write_atomic,
)


def dumps(measurements: Iterable[Measurement]) -> str:
    """The text of a file: the same measurements give the same text, in whatever order.

    Raises ValueError for NaN and infinities.
    """
    # By their text, too: it refuses what is no number, and no order of what is there twice shows.
    ordered = sorted(measurements, key=lambda m: (measurement_order(m), m.text))
    tables = _Tables.of(ordered)
    lines: list[Any] = [HEADER, *tables.lines()]
    for cell, of_cell in groupby(ordered, key=lambda m: m.cell):
        lines.append({"line": "cell"} | _told(cell))
        rows = groupby(of_cell, key=lambda m: (m.candidate, m.code, m.unique_bytes))
        lines += (tables.row(*key, runs) for key, runs in rows)
    return "".join(encode(line) + "\n" for line in lines)


def _told(cell: Cell) -> dict[str, Any]:
    """What of a cell is written."""
    values = {name: getattr(cell, name) for name in CELL_FIELDS}
    return {name: v for name, v in values.items() if v != CELL_DEFAULTS.get(name, MISSING)}


@dataclass(frozen=True)
class _Tables:
    """What lines refer to by place, while a file is written."""

    envs: Mapping[str, int]
    reasons: Mapping[str, int]
    candidates: Mapping[Candidate, int]
    binaries: Mapping[Candidate, Mapping[str, int]]

    @classmethod
    def of(cls, measurements: Sequence[Measurement]) -> _Tables:
        binaries: dict[Candidate, set[str]] = {}
        for m in measurements:
            names = binaries.setdefault(m.candidate, set())
            if m.code:
                names.add(m.code.partition("-")[0])
        order = sorted(binaries, key=lambda c: (c.variant, c.options_json))
        return cls(
            _places({m.env for m in measurements}),
            _places({m.reason for m in measurements if m.reason is not None}),
            {candidate: place for place, candidate in enumerate(order)},
            {candidate: _places(names) for candidate, names in binaries.items()},
        )

    def lines(self) -> Iterator[Line]:
        for digest, place in self.envs.items():
            yield EnvLine(place, digest)
        for text, place in self.reasons.items():
            yield ReasonLine(place, text)
        for candidate, place in self.candidates.items():
            binaries = tuple(self.binaries[candidate])
            yield CandidateLine(place, candidate.variant, candidate.options, binaries)

    def row(
        self, candidate: Candidate, code: str, unique_bytes: int, runs: Iterable[Measurement]
    ) -> list[Any]:
        name, _, launch = code.partition("-")
        binary = self.binaries[candidate][name] if code else None
        told = [self._run(run) for run in runs]
        return [self.candidates[candidate], binary, launch or None, unique_bytes, told]

    def _run(self, m: Measurement) -> list[Any]:
        """As Run has it, without the last fields where they say what is taken for granted."""
        counted = m.rounds == _counted(len(m.rounds))
        throttled = _folded(tuple(None if slow is None else int(slow) for slow in m.throttled), 0)
        rest = [None if counted else m.rounds, throttled, m.status]
        while rest and rest[-1] == (None, 0, "ok")[len(rest) - 1]:
            rest.pop()
        reason = None if m.reason is None else self.reasons[m.reason]
        clock = _folded(m.sm_clock_mhz, None)
        return [m.process, self.envs[m.env], reason, clock, m.samples_us, *rest]


def _places(names: Iterable[str]) -> dict[str, int]:
    return {name: place for place, name in enumerate(sorted(names))}


def _folded(column: tuple[Any, ...], empty: Any) -> Any:
    """The one value of a column of equal ones."""
    return column if len(set(column)) > 1 else next(iter(column), empty)


def dump(measurements: Iterable[Measurement], path: Path) -> None:
    """Writes `dumps`, whole or not at all. Raises OSError."""
    write_atomic(path, dumps(measurements))


def load(paths: Iterable[Path]) -> list[Measurement]:
    """All measurements of some files, sorted, fit to be mixed.

    Raises MeasurementError naming file and line for a line that does not belong there, a
    measurement that occurs twice, an unknown environment, or a mixture that provenance.py forbids.
    Soft differences are a ProvenanceWarning naming the fields.
    """
    paths = list(paths)
    loaded = [(path, _Reader(str(path)).measurements(_read(path))) for path in paths]
    envs = load_envs(paths)
    for path, found in loaded:
        _check_envs(found, envs, path)
    measurements = sorted((m for _, found in loaded for m in found), key=measurement_order)
    names = ", ".join(map(str, paths))
    if len(paths) > 1:
        _check_once(measurements, names)
    try:
        provenance.check_kernels(measurements)
        used = sorted({measurement.env for measurement in measurements})
        notes = provenance.check_mix([envs[digest] for digest in used])
    except provenance.ProvenanceError as error:
        raise MeasurementError(f"{names}: {error}") from None
    for note in notes:
        warnings.warn(note, provenance.ProvenanceWarning, stacklevel=2)
    return measurements


@dataclass
class _Reader:
    """A file on its way into measurements. `where`: file and line that are being read."""

    path: str
    where: str = ""
    envs: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    candidates: list[tuple[Candidate, tuple[str, ...]]] = field(default_factory=list)
    cells: set[Cell] = field(default_factory=set)
    cell: Cell | None = None
    seen: set[tuple[int, int]] = field(default_factory=set)  # candidate, process of the cell

    def measurements(self, content: bytes) -> list[Measurement]:
        """In their order, once. Raises MeasurementError."""
        found: list[Measurement] = []
        # Not splitlines(): JSON leaves U+2028 and its like unescaped inside strings.
        for number, text in enumerate(content.removesuffix(b"\n").split(b"\n"), 1):
            self.where = f"{self.path}:{number}"
            if number == 1:
                self._header(text)
            elif text.startswith(b"["):
                found += self._row(parse_row(text, self.where))
            else:
                self._shared(parse_object(text, self.where))
        return found

    def _header(self, text: bytes) -> None:
        schema = plain(text).get("schema") if text.startswith(b"{") else None
        if schema != SCHEMA:
            fail(self.where, "schema", schema, f"this version reads {SCHEMA}")
        header = parse_object(text, self.where)
        if header != HEADER:
            fail(self.where, "row, run", text.decode(), encode(HEADER))

    def _shared(self, line: Line) -> None:
        match line:
            case EnvLine():
                self._next(line.index, self.envs)
                self.envs.append(line.digest)
            case ReasonLine():
                self._next(line.index, self.reasons)
                self.reasons.append(line.text)
            case CandidateLine():
                self._next(line.index, self.candidates)
                candidate = Candidate.of(line.variant, line.options)
                self.candidates.append((candidate, line.binaries))
            case Header():
                fail(self.where, "line", "header", "stands once, at the top")
            case _:
                self._begin(line)

    def _next(self, index: int, table: Sequence[object]) -> None:
        if index != len(table):
            fail(self.where, "index", index, f"counts from 0 in each table: {len(table)} is next")

    def _begin(self, line: Line) -> None:
        self.cell = Cell(**{name: getattr(line, name) for name in CELL_FIELDS})
        self.seen.clear()
        try:
            self.cell.problem  # noqa: B018  its rules are checked as it is built
        except ValueError as error:
            raise MeasurementError(f"{self.where}: cell: {error}") from None
        if self.cell in self.cells:
            fail(self.where, "cell", self.cell.key, "is there twice")
        self.cells.add(self.cell)

    def _row(self, row: Row) -> Iterator[Measurement]:
        if self.cell is None:
            fail(self.where, "candidate", row.candidate, "a row stands below its cell")
        candidate, binaries = self._at("candidate", row.candidate, self.candidates)
        code = ""
        if row.binary is not None and row.launch is not None:
            code = f"{self._at('binary', row.binary, binaries)}-{row.launch}"
        elif row.binary is not None or row.launch is not None:
            fail(self.where, "launch", row.launch, "null if and only if binary is")
        for run in row.runs:
            if (row.candidate, run.process) in self.seen:
                fail(self.where, "process", run.process, f"{candidate}: is there twice")
            self.seen.add((row.candidate, run.process))
            yield self._measurement(self.cell, candidate, code, row.unique_bytes, run)

    def _measurement(
        self, cell: Cell, candidate: Candidate, code: str, unique_bytes: int, run: Run
    ) -> Measurement:
        samples = run.samples_us
        reason = None if run.reason is None else self._at("reason", run.reason, self.reasons)
        if run.status != "ok" or not samples or not code:
            self._check_status(run, code)
        return Measurement(
            cell,
            candidate,
            run.status,
            reason,
            run.process,
            samples,
            _counted(len(samples)) if run.rounds is None else self._rounds(run),
            self._column("sm_clock_mhz", run.sm_clock_mhz, len(samples)),
            self._throttled(run),
            unique_bytes,
            code,
            self._at("env", run.env, self.envs),
        )

    def _check_status(self, run: Run, code: str) -> None:
        """Of what has no time or failed."""
        if run.samples_us and run.status not in ("ok", "unstable"):
            fail(self.where, "samples_us", run.samples_us, f"status {run.status} has no time")
        if run.status != "ok":
            if run.reason is None:
                fail(self.where, "reason", None, "null only for status ok")
        elif not run.samples_us:
            fail(self.where, "samples_us", [], "status ok needs a time")
        elif not code:
            fail(self.where, "binary", None, "null only if nothing could run")

    def _at(self, key: str, index: int, table: Sequence[Any]) -> Any:
        if index >= len(table):
            fail(self.where, key, index, f"below {len(table)}, the length of its table")
        return table[index]

    def _rounds(self, run: Run) -> tuple[int, ...]:
        rounds = run.rounds or ()
        if any(later < sooner for sooner, later in pairwise(rounds)):
            fail(self.where, "rounds", rounds, "never decrease")
        return self._column("rounds", rounds, len(run.samples_us))

    def _throttled(self, run: Run) -> tuple[bool | None, ...]:
        told = run.throttled
        if not isinstance(told, tuple):
            return _alike(None if told is None else told == 1, len(run.samples_us))
        column = self._column("throttled", told, len(run.samples_us))
        return tuple(None if slow is None else slow == 1 for slow in column)

    def _column(self, key: str, value: Any, length: int) -> tuple[Any, ...]:
        if not isinstance(value, tuple):
            return _alike(value, length)
        if len(value) != length:
            fail(self.where, key, value, f"as many as samples_us, {length}")
        return value


@cache
def _counted(length: int) -> tuple[int, ...]:
    """Shared by all runs of so many rounds."""
    return tuple(range(length))


@lru_cache(maxsize=None, typed=True)
def _alike(value: bool | int | None, length: int) -> tuple[Any, ...]:
    """A column of equal values, shared by all runs that have it."""
    return (value,) * length


def _check_envs(
    measurements: Iterable[Measurement], envs: Mapping[str, Mapping[str, Any]], path: Path
) -> None:
    """Raises MeasurementError for an unknown environment, and for a time that is called cold though
    one replay of it fits into the L2."""
    for m in measurements:
        if m.env not in envs:
            fail(f"{path}", "env", m.env, "not in the env.json beside it")
        l2_bytes = envs[m.env].get("l2_bytes")
        if m.status != "ok" or m.cell.l2 != "cold" or not isinstance(l2_bytes, int):
            continue
        if l2_state(m.unique_bytes, l2_bytes) != "cold":
            where = f"{path}: {m.candidate}, {m.cell.key}"
            rule = f"below {COLD_FACTOR} x the L2 of {l2_bytes} bytes is not cold"
            fail(where, "unique_bytes", m.unique_bytes, rule)


def _check_once(ordered: Sequence[Measurement], names: str) -> None:
    """Raises MeasurementError for a measurement that several files hold."""
    for one, other in pairwise(ordered):
        if measurement_order(one) == measurement_order(other):
            fail(f"{names}: {one.candidate}, {one.cell.key}", "process", one.process, "twice")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise MeasurementError(f"{path}: cannot be read: {error.strerror}") from None


def load_envs(paths: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """Environments by digest, from the env.json beside each file. Raises MeasurementError."""
    envs: dict[str, dict[str, Any]] = {}
    for path in sorted({path.parent / "env.json" for path in paths}):
        found = parse_json(_read(path).decode(errors="replace"), str(path))
        if not isinstance(found, dict):
            fail(str(path), "file", found, "an object of environments by digest")
        for digest, env in found.items():
            if not isinstance(env, dict) or provenance.digest(env) != digest:
                fail(str(path), digest, env, "an environment with this digest")
            envs[digest] = env
    return envs
