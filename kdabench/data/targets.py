"""What the best variant of our own is to reach on a device: `targets.toml` in its folder of results.

Every target is of isolated launches with a cold L2. docs/reviewing.md, "Targets", says how the file
is written.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from kda_kernels.problem import KINDS, MAX_TOKENS, STATE_DTYPES

FILE = "targets.toml"


class TargetError(ValueError):
    """A target that can't be. One line: where, key, value and the rule."""


@dataclass(frozen=True)
class Target:
    """One kind of step, and what is asked of it.

    tokens      None: any
    time_us     microseconds at most, by number of items
    efficiency  floor over time at least, from `from_items` items on; None for both asks for nothing

    Raises TargetError for words and sizes that no step has, and if nothing is asked for.
    """

    kind: str
    state_dtype: str
    tokens: int | None = None
    time_us: Mapping[int, float] = field(default_factory=dict)
    efficiency: float | None = None
    from_items: int | None = None

    def __post_init__(self) -> None:
        for name, words in (("kind", KINDS), ("state_dtype", STATE_DTYPES)):
            value = getattr(self, name)
            _require(value in words, name, value, f"one of {', '.join(words)}")
        counts = range(1, MAX_TOKENS + 1)
        known = self.tokens is None or (type(self.tokens) is int and self.tokens in counts)
        _require(known, "tokens", self.tokens, f"a count in 1..{MAX_TOKENS}")
        for items, time_us in self.time_us.items():
            _require(items >= 1, "time_us", items, "a number of items is a count >= 1")
            _require(_positive(time_us), f"time_us.{items}", time_us, "microseconds above 0")
        both = (self.efficiency is None) == (self.from_items is None)
        _require(both, "efficiency", self.efficiency, "stands together with from_items")
        if self.efficiency is not None:
            possible = _positive(self.efficiency) and self.efficiency <= 1
            _require(possible, "efficiency", self.efficiency, "a ratio above 0, at most 1")
            counted = type(self.from_items) is int and self.from_items >= 1
            _require(counted, "from_items", self.from_items, "a count >= 1")
        asks = bool(self.time_us) or self.efficiency is not None
        _require(asks, "time_us, efficiency", None, "one of them at least")


def load(folder: Path) -> tuple[Target, ...]:
    """Read a device's targets, in the file's order; () without the file.

    Raises TargetError if the file is not TOML or not of that form.
    """
    path = folder / FILE
    if not path.is_file():
        return ()
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TargetError(f"{path}: not TOML: {error}") from None
    tables = content.get("target")
    if content.keys() != {"target"} or not isinstance(tables, list):
        raise TargetError(f"{path}: keys: {sorted(content)}: only [[target]] is expected")
    return tuple(_parsed(table, f"{path}: target {i}") for i, table in enumerate(tables, 1))


def _parsed(table: object, where: str) -> Target:
    known = {f.name for f in fields(Target)}
    try:
        if not isinstance(table, dict):
            raise TargetError(f"{table!r}: a table is expected")
        unknown = sorted(table.keys() - known)
        _require(not unknown, ", ".join(unknown), None, f"one of {', '.join(sorted(known))}")
        for name in ("kind", "state_dtype"):
            _require(name in table, name, None, "is required")
        return Target(**{**table, "time_us": _by_items(table.get("time_us", {}))})
    except TargetError as error:
        raise TargetError(f"{where}: {error}") from None


def _by_items(found: Any) -> dict[int, float]:
    """Turn TOML's keys, which are text, into numbers of items."""
    rule = "a table of microseconds by number of items"
    _require(isinstance(found, dict), "time_us", found, rule)
    for key in found:
        _require(key.isascii() and key.isdecimal(), "time_us", key, rule)
    return {int(key): value for key, value in found.items()}


def _positive(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value) and value > 0  # type: ignore[arg-type,operator]


def _require(holds: bool, key: str, value: object, rule: str) -> None:
    if not holds:
        raise TargetError(f"{key}: {rule}" if value is None else f"{key}: {value!r}: {rule}")
