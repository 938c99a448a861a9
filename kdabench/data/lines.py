"""The lines of a file of measurements, schema 3: their types, and what is wrong with one that is
none. `exported` makes files of them; docs/formats.md shows one.
"""

from __future__ import annotations

import json
import re
from dataclasses import MISSING, fields
from typing import Annotated, Any, Literal, NoReturn, Union, get_type_hints

import msgspec

from kdabench.data.measurements import (
    CELL_FIELDS,
    Cell,
    MeasurementError,
    OptionValue,
    Status,
)

SCHEMA = 3
_SHOWN = 80  # characters of a bad value that an error quotes

Count = Annotated[int, msgspec.Meta(ge=0)]
Time = Annotated[float, msgspec.Meta(gt=0)]
Text = Annotated[str, msgspec.Meta(min_length=1)]
Digest = Annotated[str, msgspec.Meta(pattern="^sha256:")]
Name = Annotated[str, msgspec.Meta(pattern="^[0-9A-Za-z]+$")]
Flag = Literal[0, 1]


class Line(msgspec.Struct, tag_field="line", forbid_unknown_fields=True, frozen=True):
    """A line that is an object; its key `line` says which."""


class EnvLine(Line, tag="env", frozen=True):
    """An environment; env.json says what it is."""

    index: Count
    digest: Digest


class ReasonLine(Line, tag="reason", frozen=True):
    index: Count
    text: Text


class CandidateLine(Line, tag="candidate", frozen=True):
    """binaries: all that its measurements ran, as codes name them before the hyphen."""

    index: Count
    variant: Text
    options: dict[str, OptionValue]
    binaries: tuple[Name, ...]


_CELL_TYPES = get_type_hints(Cell)
CELL_DEFAULTS = {f.name: f.default for f in fields(Cell) if f.default is not MISSING}
CellLine = msgspec.defstruct(
    "CellLine",
    [
        (name, kind, CELL_DEFAULTS[name]) if name in CELL_DEFAULTS else (name, kind)
        for name, kind in ((name, _CELL_TYPES[name]) for name in CELL_FIELDS)
    ],
    bases=(Line,),
    tag="cell",
    frozen=True,
)
"""The cell of all rows up to the next one; what has its default is left out."""


class Run(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """What one process found. Columns of its samples are one value where all are equal.

    env, reason   places in the tables; no reason: null
    sm_clock_mhz  null: could not be read
    rounds        null: 0, 1, 2, ...
    throttled     1, 0, or null where it could not be read
    """

    process: Count
    env: Count
    reason: Count | None
    sm_clock_mhz: Count | tuple[Count | None, ...] | None
    samples_us: tuple[Time, ...]
    rounds: tuple[Count, ...] | None = None
    throttled: Flag | tuple[Flag | None, ...] | None = 0
    status: Status = "ok"


class Row(msgspec.Struct, array_like=True, forbid_unknown_fields=True, frozen=True):
    """A candidate in the cell above. Its place in the table, that of the binary among its own, the
    launch as the code names it after the hyphen; both null if nothing could run."""

    candidate: Count
    binary: Count | None
    launch: Name | None
    unique_bytes: Count
    runs: Annotated[tuple[Run, ...], msgspec.Meta(min_length=1)]


_ROW, _RUN = Row.__struct_fields__, Run.__struct_fields__


class Header(Line, tag="header", frozen=True):
    """row, run: what stands where in the lines that are arrays."""

    schema: int
    row: tuple[str, ...] = _ROW
    run: tuple[str, ...] = _RUN


HEADER = Header(SCHEMA)
_OBJECT = msgspec.json.Decoder(Union[Header, EnvLine, ReasonLine, CandidateLine, CellLine])  # noqa: UP007  CellLine is a value
_ARRAY = msgspec.json.Decoder(Row)
_ENCODER = msgspec.json.Encoder()


def encode(line: object) -> str:
    """One line, without its end. NaN and infinities become null."""
    return _ENCODER.encode(line).decode()


def parse_row(text: bytes, where: str) -> Row:
    """A row. Raises MeasurementError naming `where`, key, value and rule."""
    row: Row = _decoded(_ARRAY, text, where)
    return row


def parse_object(text: bytes, where: str) -> Line:
    """Any other line. Raises MeasurementError as `parse_row` does."""
    line: Line = _decoded(_OBJECT, text, where)
    return line


def _decoded(decoder: msgspec.json.Decoder[Any], text: bytes, where: str) -> Any:
    try:
        return decoder.decode(text)
    except msgspec.ValidationError as error:
        rule, _, at = str(error).partition(" - at `$")
        key, value = _named(plain(text), at.rstrip("`"))
        fail(where, key, value, rule)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise MeasurementError(f"{where}: not strict JSON: {error}") from None


def plain(text: bytes) -> Any:
    """What stands there, numbers out of range included; {} if it is no JSON."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return {}


def _named(line: Any, at: str) -> tuple[str, Any]:
    """Key and value at msgspec's `at`, such as `.options[...]` or, in a row, `[4][0][2]`."""
    keys: list[str] = []
    for depth, (place, name) in enumerate(re.findall(r"\[(\d+|\.\.\.)\]|\.(\w+)", at)):
        if place == "...":  # some value of a table
            break
        if name:
            keys.append(name)
        elif depth == 0:
            keys.append(_ROW[int(place)])
        elif depth == 2 and keys == ["runs"]:
            keys.append(_RUN[int(place)])
        line = line[name or int(place)]
    return ".".join(keys) or "line", line


def fail(where: str, key: str, value: object, rule: str) -> NoReturn:
    """Raises MeasurementError, in one line."""
    text = repr(value)
    text = text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
    raise MeasurementError(" ".join(f"{where}: {key}: {text}: {rule}".splitlines()))
