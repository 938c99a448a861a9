"""Measurements as a table for pandas: one row per cell, candidate and process.

kind .. inputs      the cell, a column per field
variant, option_*   the candidate; an option that a variant lacks, or leaves at its default, is NA
process, status, reason
samples             number of samples
time_us             median of the samples, NA without any
efficiency          the floor of the cell over time_us
code, env           names of the machine code, and digest of the environment
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import pandas as pd

from kdabench.data.measurements import CELL_FIELDS, Measurement, write_atomic

OPTION = "option_"
FORMATS = (".csv", ".parquet")
"""File types of tables, by suffix."""

_FLAGS_AND_COUNTS = {bool: "boolean", int: "Int64", str: "string"}
_TYPES = {
    **dict.fromkeys(("kind", "state_dtype", "pending", "conv_layout", "context"), "string"),
    **dict.fromkeys(("l2", "inputs", "variant", "status", "reason", "code", "env"), "string"),
    **dict.fromkeys(("requests", "heads", "tokens", "layers", "process", "samples"), "Int64"),
    **dict.fromkeys(("time_us", "efficiency"), "Float64"),
    "gpu": "string",
}


def frame(
    measurements: Sequence[Measurement], envs: Mapping[str, Mapping[str, Any]] | None = None
) -> pd.DataFrame:
    """Make a tidy table, one row per measurement, in their order.

    envs  environments by digest; with them there is a column `gpu`

    >>> from kdabench import load
    >>> table = frame(load("nvidia-h200", sweep="commit"))
    >>> table[table.status == "ok"].groupby("kind").time_us.min().round(2).to_dict()
    {'commit': 2.69, 'flush': 3.29}
    """
    options = sorted({name for m in measurements for name in m.candidate.options})
    columns = [*CELL_FIELDS, "variant", *(OPTION + name for name in options)]
    columns += ["process", "status", "reason", "samples", "time_us", "efficiency", "code", "env"]
    columns += ["gpu"] * (envs is not None)
    rows = [_row(m, envs or {}) for m in measurements]
    table = pd.DataFrame(rows, columns=columns, dtype=object)  # keeps counts beside NA counts
    return table.astype({name: _type(name, table[name]) for name in columns})


def _row(m: Measurement, envs: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    time_us = median(m.samples_us) if m.samples_us else None
    pending = m.cell.pending
    return {
        **{name: getattr(m.cell, name) for name in CELL_FIELDS},
        "pending": None if pending is None else str(pending),  # a count, or "mix"
        "variant": m.candidate.variant,
        **{OPTION + name: value for name, value in m.candidate.options.items()},
        "process": m.process,
        "status": m.status,
        "reason": m.reason,
        "samples": len(m.samples_us),
        "time_us": time_us,
        "efficiency": None if time_us is None else m.cell.problem.floor_us() / time_us,
        "code": m.code,
        "env": m.env,
        "gpu": envs.get(m.env, {}).get("gpu"),
    }


def _type(name: str, column: pd.Series[Any]) -> str:
    """A column's type; an option's by its values: flags, counts or words."""
    if name in _TYPES:
        return _TYPES[name]
    kinds = {type(value) for value in column.dropna()}
    return _FLAGS_AND_COUNTS[kinds.pop()] if len(kinds) == 1 else "string"


def write(table: pd.DataFrame, path: Path) -> int:
    """Write a table as its file's suffix says, whole or not at all; give the number of rows.

    Raises ValueError as `require_format` does, OSError.
    """
    require_format(path)
    if path.suffix == ".csv":
        write_atomic(path, table.to_csv(index=False))
    else:
        write_atomic(path, table.to_parquet(index=False))
    return len(table)


def require_format(path: Path) -> None:
    """Raises ValueError unless tables can be written as a file's suffix says."""
    if path.suffix not in FORMATS:
        raise ValueError(f"{path}: suffix: {path.suffix!r}: one of {', '.join(FORMATS)}")
    if path.suffix == ".parquet" and find_spec("pyarrow") is None:
        raise ValueError(f"{path}: Parquet needs pyarrow: pip install 'kdabench[parquet]'")
