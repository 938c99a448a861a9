"""What one measurement says: the shapes of cells and records, shared by every stage after
measuring.

The exported form is one strict JSON line per (cell, variant, spec, process); see docs/measuring.md.
"""

from __future__ import annotations

import gc
import json
import math
import os
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args

from kda_kernels.problem import KINDS, ConvLayout, Kind, Pending, Problem, StateDtype

Context = Literal["layer", "isolated", "chain"]
L2 = Literal["cold", "warm"]
Inputs = Literal["model", "generic"]
Status = Literal[
    "ok",
    "unsupported",
    "compile_error",
    "wrong",
    "fault",
    "timeout",
    "oom",
    "capture_failed",
    "implausible",
    "unstable",
]
OptionValue = int | str | bool

SCHEMA = 2
COLD_FACTOR = 3
"""A graph replay is cold if the bytes it touches are this many times the L2."""
CONTEXTS: tuple[Context, ...] = ("layer", "isolated", "chain")
INPUTS: tuple[Inputs, ...] = ("model", "generic")
STATUSES: tuple[Status, ...] = (
    "ok",
    "unsupported",
    "compile_error",
    "wrong",
    "fault",
    "timeout",
    "oom",
    "capture_failed",
    "implausible",
    "unstable",
)


def l2_state(unique_bytes: int, l2_bytes: int) -> L2:
    """By the bytes that one graph replay touches."""
    return "cold" if unique_bytes >= COLD_FACTOR * l2_bytes else "warm"


_ENCODER = json.JSONEncoder(sort_keys=True, separators=(",", ":"), allow_nan=False)


def canonical(value: object) -> str:
    """Sorted, compact, strict JSON: equal values give equal text. Raises ValueError for NaN and
    infinities."""
    return _ENCODER.encode(value)


@dataclass(frozen=True)
class Cell:
    """One question: a problem, and the circumstances under which it is timed."""

    kind: Kind
    requests: int
    heads: int
    tokens: int = 1
    layers: int = 1
    state_dtype: StateDtype = "fp32"
    pending: Pending = None
    conv_layout: ConvLayout = "dim-first"
    context: Context = "layer"
    l2: L2 = "cold"
    inputs: Inputs = "model"

    @cached_property
    def problem(self) -> Problem:
        return Problem(
            self.kind,
            self.requests,
            self.heads,
            self.tokens,
            self.layers,
            self.state_dtype,
            self.pending,
            self.conv_layout,
        )

    @property
    def items(self) -> int:
        return self.heads * self.requests

    @cached_property
    def key(self) -> str:
        """Identity in journals and joins."""
        return canonical({name: getattr(self, name) for name in CELL_FIELDS})


@dataclass(frozen=True)
class Candidate:
    """A variant with its compile-time and launch choices, as canonical JSON so that it hashes and
    sorts."""

    variant: str
    options_json: str

    @classmethod
    def of(cls, variant: str, options: Mapping[str, OptionValue]) -> Candidate:
        return cls(variant, canonical(dict(options)))

    @cached_property
    def options(self) -> dict[str, OptionValue]:
        return json.loads(self.options_json)  # type: ignore[no-any-return]

    def __str__(self) -> str:
        return f"{self.variant}({', '.join(f'{k}={v}' for k, v in self.options.items())})"


@dataclass(frozen=True)
class Measurement:
    """The outcome of one candidate in one cell in one process.

    samples_us    time per launch, raw, in the order taken; empty unless the status is ok or
                  unstable
    rounds        index of the round of each sample
    sm_clock_mhz, throttled   the GPU's state at each sample; None where it could not be read
    unique_bytes  bytes touched in one graph replay: what decides "cold"
    bytes_moved   the problem's bytes, shared by all variants
    code          "binary-launch", as `kda_kernels.identity` names what ran; empty if nothing could
    """

    cell: Cell
    candidate: Candidate
    status: Status
    reason: str | None
    process: int
    samples_us: tuple[float, ...]
    rounds: tuple[int, ...]
    sm_clock_mhz: tuple[int | None, ...]
    throttled: tuple[bool | None, ...]
    unique_bytes: int
    bytes_moved: int
    code: str
    env: str

    def to_json(self) -> dict[str, Any]:
        cell = {name: getattr(self.cell, name) for name in CELL_FIELDS}
        return self._own_json() | {"cell": cell, "spec": dict(self.candidate.options)}

    @property
    def line(self) -> str:
        """`canonical` of `to_json`, but cell and spec are encoded once for all records that share
        them."""
        text = canonical(self._own_json())
        # Quotes are escaped inside strings: only the keys themselves are found.
        text = text.replace('"cell":null', f'"cell":{self.cell.key}', 1)
        return text.replace('"spec":null', f'"spec":{self.candidate.options_json}', 1)

    def _own_json(self) -> dict[str, Any]:
        """Without what records share: cell and spec."""
        return {
            "schema": SCHEMA,
            "cell": None,
            "variant": self.candidate.variant,
            "spec": None,
            "status": self.status,
            "reason": self.reason,
            "process": self.process,
            "samples_us": list(self.samples_us),
            "rounds": list(self.rounds),
            "sm_clock_mhz": list(self.sm_clock_mhz),
            "throttled": list(self.throttled),
            "unique_bytes": self.unique_bytes,
            "bytes_moved": self.bytes_moved,
            "code": self.code,
            "env": self.env,
        }

    @classmethod
    def from_json(cls, data: object, where: str = "record") -> Measurement:
        """The inverse of `to_json`, strict. Raises RecordError naming `where`, key, value and the
        rule."""
        line = _object(data, _KEYS, where)
        if type(line["schema"]) is not int or line["schema"] != SCHEMA:
            _fail(where, "schema", line["schema"], f"this version reads {SCHEMA}")
        status = _one_of(where, "status", line["status"], STATUSES)
        if not isinstance(line["variant"], str) or not line["variant"]:
            _fail(where, "variant", line["variant"], "a name")
        samples = _samples(where, line["samples_us"], status)
        options = _options(line["spec"], where)
        columns = {
            key: _column(where, key, line[key], len(samples))
            for key in ("rounds", "sm_clock_mhz", "throttled")
        }
        return cls(
            cell=_cell(line["cell"], where),
            candidate=_shared_candidate(line["variant"], *options, *options.values()),
            status=status,
            reason=_reason(where, line["reason"], status),
            process=_count(where, line, "process"),
            samples_us=samples,
            **columns,
            unique_bytes=_count(where, line, "unique_bytes"),
            bytes_moved=_count(where, line, "bytes_moved"),
            code=_code(where, line["code"], status),
            env=_digest(where, line, "env"),
        )


CELL_FIELDS = tuple(f.name for f in fields(Cell))


class MeasurementError(ValueError):
    """Not a record, or not one that may be mixed with the others. One line: where, key, value and
    the rule."""


_KEYS = frozenset(
    (
        "schema",
        "cell",
        "variant",
        "spec",
        "status",
        "reason",
        "process",
        "samples_us",
        "rounds",
        "sm_clock_mhz",
        "throttled",
        "unique_bytes",
        "bytes_moved",
        "code",
        "env",
    )
)
_CELL_KEYS = frozenset(CELL_FIELDS)
_CELL_WORDS = {"kind": KINDS, "context": CONTEXTS, "l2": get_args(L2), "inputs": INPUTS}
_SHOWN = 80  # characters of a bad value that an error quotes


def _fail(where: str, key: str, value: object, rule: str) -> NoReturn:
    text = repr(value)
    raise MeasurementError(
        f"{where}: {key}: {text if len(text) <= _SHOWN else text[:_SHOWN] + '...'}: {rule}"
    )


def _object(data: object, known: frozenset[str], where: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        _fail(where, "line", data, "a JSON object")
    if data.keys() != known:
        unknown, missing = sorted(data.keys() - known), sorted(known - data.keys())
        _fail(where, "keys", unknown or missing, "unknown" if unknown else "missing")
    return data


def _one_of(where: str, key: str, value: Any, allowed: Sequence[Any]) -> Any:
    if value not in allowed:
        _fail(where, key, value, f"one of {', '.join(allowed)}")
    return value


def _count(where: str, line: Mapping[str, Any], key: str) -> int:
    value = line[key]
    if type(value) is not int or value < 0:
        _fail(where, key, value, "an integer >= 0")
    return value


def _digest(where: str, line: Mapping[str, Any], key: str) -> str:
    value = line[key]
    if not isinstance(value, str) or not value.startswith("sha256:"):
        _fail(where, key, value, "text that begins with 'sha256:'")
    return value


_CODE = re.compile(r"[0-9A-Za-z]+-[0-9A-Za-z]+")


def _code(where: str, value: Any, status: str) -> str:
    if not isinstance(value, str) or not (_CODE.fullmatch(value) or (not value and status != "ok")):
        _fail(
            where,
            "code",
            value,
            "names of a binary and a launch, as 0a1b-2c3d; empty only if nothing could run",
        )
    return value


def _reason(where: str, value: Any, status: str) -> str | None:
    if value is None and status == "ok":
        return None
    if not isinstance(value, str) or not value:
        _fail(where, "reason", value, "text; null only for status ok")
    return value


def _samples(where: str, values: Any, status: str) -> tuple[float, ...]:
    if not isinstance(values, list):
        _fail(where, "samples_us", values, "a list")
    if values and status not in ("ok", "unstable"):
        _fail(where, "samples_us", values, f"status {status} has no time")
    if not values and status == "ok":
        _fail(where, "samples_us", values, "status ok needs a time")
    for value in values:
        if type(value) not in (int, float) or not 0 < value < math.inf:
            _fail(where, "samples_us", value, "finite numbers > 0")
    return tuple(map(float, values))


def _column(where: str, key: str, values: Any, length: int) -> tuple[Any, ...]:
    if not isinstance(values, list) or len(values) != length:
        _fail(where, key, values, f"a list as long as samples_us, {length}")
    before = 0
    for value in values:
        if key == "rounds":
            if type(value) is not int or value < before:
                _fail(where, key, value, "integers >= 0 that never decrease")
            before = value
        elif key == "sm_clock_mhz" and not (value is None or (type(value) is int and value >= 0)):
            _fail(where, key, value, "integers >= 0 or null")
        elif key == "throttled" and not (value is None or type(value) is bool):
            _fail(where, key, value, "true, false or null")
    return tuple(values)


def _options(value: Any, where: str) -> dict[str, OptionValue]:
    if not isinstance(value, dict):
        _fail(where, "spec", value, "a JSON object")
    for key, choice in value.items():
        if type(choice) not in (int, str, bool):
            _fail(where, f"spec.{key}", choice, "an integer, text or a truth value")
    return value


def _cell(data: object, where: str) -> Cell:
    values = _object(data, _CELL_KEYS, f"{where}: cell")
    try:
        return _checked_cell(*map(values.__getitem__, CELL_FIELDS))
    except (TypeError, ValueError) as error:
        for key, allowed in _CELL_WORDS.items():
            _one_of(where, f"cell.{key}", values[key], allowed)
        raise MeasurementError(f"{where}: cell: {error}") from None


@lru_cache(maxsize=100_000, typed=True)
def _checked_cell(*values: Any) -> Cell:
    """A cell whose problem exists; the records of a cell share it."""
    cell = Cell(*values)
    for key, allowed in _CELL_WORDS.items():
        _one_of("cell", key, getattr(cell, key), allowed)
    cell.problem  # noqa: B018  its rules are checked as it is built
    return cell


@lru_cache(maxsize=100_000, typed=True)
def _shared_candidate(variant: str, *options: Any) -> Candidate:
    """A candidate, which its records share. spec: the names of its choices, then their values"""
    half = len(options) // 2
    return Candidate.of(variant, dict(zip(options[:half], options[half:], strict=True)))


def cell_order(cell: Cell) -> tuple[Any, ...]:
    """Sort key of cells. Heads, kind and tokens first, so that a worker can reuse weights between
    neighbours."""
    return (
        cell.heads,
        KINDS.index(cell.kind),
        cell.tokens,
        cell.requests,
        cell.layers,
        cell.state_dtype,
        str(cell.pending),
        cell.conv_layout,
        cell.context,
        cell.l2,
        cell.inputs,
    )


def measurement_order(measurement: Measurement) -> tuple[Any, ...]:
    return (
        *cell_order(measurement.cell),
        measurement.candidate.variant,
        measurement.candidate.options_json,
        measurement.process,
    )


def dumps(measurements: Iterable[Measurement]) -> str:
    """Sorted, strict JSON lines: the same records give the same text."""
    lines = sorted(
        (measurement_order(measurement), measurement.line) for measurement in measurements
    )
    return "".join(line + "\n" for _, line in lines)


def dump(measurements: Iterable[Measurement], path: Path) -> None:
    """Writes `dumps`, whole or not at all. Raises OSError."""
    write_atomic(path, dumps(measurements))


def write_atomic(path: Path, text: str) -> None:
    """Replaces a file's text whole or leaves it as it was. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def parse_json(text: str, where: str) -> object:
    """Strict JSON: no NaN or Infinity, no key twice. Raises RecordError naming `where`."""
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        raise MeasurementError(f"{where}: not strict JSON: {error}") from None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key occurs twice")
    return found


_DECODER = json.JSONDecoder(parse_constant=_no_constant, object_pairs_hook=_unique_keys)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise MeasurementError(
            f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from None


def load(paths: Iterable[Path]) -> list[Measurement]:
    """All records of some exported files, sorted, fit to be mixed.

    Raises RecordError naming file and line for a line that is not a record, a record that occurs
    twice, an unknown environment, or a mixture that provenance.py forbids. Soft differences are a
    ProvenanceWarning naming the fields.
    """
    from kdabench.data import provenance  # which itself needs `canonical` from here

    paths = list(paths)
    found: dict[tuple[Cell, Candidate, int], Measurement] = {}
    with _without_collector():
        for where, line in _lines(paths):
            measurement = Measurement.from_json(parse_json(line, where), where)
            if (
                found.setdefault(
                    (measurement.cell, measurement.candidate, measurement.process), measurement
                )
                is not measurement
            ):
                raise MeasurementError(
                    f"{where}: {measurement.candidate}, process {measurement.process}, {measurement.cell.key}: is there twice"
                )
    measurements = sorted(found.values(), key=measurement_order)
    envs = load_envs(paths)
    if unknown := {measurement.env for measurement in measurements} - envs.keys():
        raise MeasurementError(f"{paths[0]}: env: {min(unknown)}: not in the env.json beside it")
    for measurement in measurements:
        _require_cold(measurement, envs[measurement.env].get("l2_bytes"), paths[0])
    try:
        provenance.check_kernels(measurements)
        notes = provenance.check_mix(
            [envs[digest] for digest in sorted({measurement.env for measurement in measurements})]
        )
    except provenance.ProvenanceError as error:
        raise MeasurementError(f"{', '.join(map(str, paths))}: {error}") from None
    for note in notes:
        warnings.warn(note, provenance.ProvenanceWarning, stacklevel=2)
    return measurements


def _lines(paths: Iterable[Path]) -> Iterator[tuple[str, str]]:
    """Where it stands, and the line."""
    for path in paths:
        # Not splitlines(): JSON leaves U+2028 and its like unescaped inside strings.
        for number, line in enumerate(_read(path).removesuffix("\n").split("\n"), 1):
            yield f"{path}:{number}", line


@contextmanager
def _without_collector() -> Iterator[None]:
    """Records have no cycles: the collector would walk a growing number of them again and again,
    for nothing."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _require_cold(measurement: Measurement, l2_bytes: int | None, path: Path) -> None:
    """Raises RecordError for a time that is called cold, though one graph replay of it fits into the
    L2."""
    if measurement.status != "ok" or measurement.cell.l2 != "cold" or not isinstance(l2_bytes, int):
        return
    if l2_state(measurement.unique_bytes, l2_bytes) != "cold":
        rule = f"below {COLD_FACTOR} x the L2 of {l2_bytes} bytes is not cold"
        _fail(
            f"{path}: {measurement.candidate}, {measurement.cell.key}",
            "unique_bytes",
            measurement.unique_bytes,
            rule,
        )


def load_envs(paths: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """Environments by digest, from the env.json beside each file. Raises RecordError."""
    from kdabench.data import provenance  # which itself needs `canonical` from here

    envs: dict[str, dict[str, Any]] = {}
    for path in sorted({path.parent / "env.json" for path in paths}):
        found = parse_json(_read(path), str(path))
        if not isinstance(found, dict):
            _fail(str(path), "file", found, "an object of environments by digest")
        for digest, env in found.items():
            if not isinstance(env, dict) or provenance.digest(env) != digest:
                _fail(str(path), digest, env, "an environment with this digest")
            envs[digest] = env
    return envs
