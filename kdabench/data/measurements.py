"""What one measurement says: the shapes of cells, candidates and measurements, shared by every
stage after measuring.

`exported` reads and writes files of them; docs/formats.md says how those look.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
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

COLD_FACTOR = 3
"""A replay is cold if the bytes it touches are this many times the L2."""
CONTEXTS: tuple[Context, ...] = get_args(Context)
INPUTS: tuple[Inputs, ...] = get_args(Inputs)
STATUSES: tuple[Status, ...] = get_args(Status)


class MeasurementError(ValueError):
    """Not a measurement, or not one that may be mixed with the others. One line: where, key, value
    and the rule."""


def l2_state(unique_bytes: int, l2_bytes: int) -> L2:
    """By the bytes that one replay touches."""
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

    @cached_property
    def order(self) -> tuple[Any, ...]:
        """See `cell_order`."""
        return (
            self.heads,
            KINDS.index(self.kind),
            self.tokens,
            self.requests,
            self.layers,
            self.state_dtype,
            str(self.pending),
            self.conv_layout,
            self.context,
            self.l2,
            self.inputs,
        )


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
    unique_bytes  bytes touched in one replay: what decides "cold"
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
    code: str
    env: str

    @property
    def text(self) -> str:
        """All that it says, as canonical JSON: what digests are made of, however it is stored."""
        names = [field.name for field in fields(self)[2:]]
        own = {name: getattr(self, name) for name in names}
        return canonical([self.cell.key, self.candidate.variant, self.candidate.options_json, own])


CELL_FIELDS = tuple(f.name for f in fields(Cell))


def cell_order(cell: Cell) -> tuple[Any, ...]:
    """Sort key of cells. Heads, kind and tokens first, so that a worker can reuse weights between
    neighbours."""
    return cell.order


def measurement_order(measurement: Measurement) -> tuple[Any, ...]:
    """Sort key of measurements: by cell, candidate, process; no two of a sweep have the same."""
    candidate = measurement.candidate
    return (
        measurement.cell.order,
        candidate.variant,
        candidate.options_json,
        measurement.process,
    )


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
    """Strict JSON: no NaN or Infinity, no key twice. Raises MeasurementError naming `where`."""
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
