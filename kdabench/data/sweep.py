"""Sweep files: a question in TOML, expanded into cells and candidates.

    question = "Which split is fastest?"
    variants = ["stock", "KdaSplit"]
    processes = 3

    [[cells]]               # one or more; the product of its axes, each a list or a single value
    kind = "decode"
    requests = [1, 4, 64]
    heads = [12, 96]
    waves = true            # adds the request counts at which a wave of CTAs fills up

    [options.KdaSplit]      # or several [[options.KdaSplit]]; the product of its axes
    split = [1, 2, 4]

Everything is strict: what isn't understood fails with one line that names file, key, value and the
rule.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn, get_args

from kda_kernels import variants
from kda_kernels.problem import CONV_LAYOUTS, KINDS, STATE_DTYPES
from kdabench.data.measurements import (
    CONTEXTS,
    INPUTS,
    L2,
    Candidate,
    Cell,
    OptionValue,
    canonical,
    cell_order,
)

KnownOptions = Mapping[str, Mapping[str, type]]
"""The option names and types (int, str or bool) of every known variant."""

MAX_CELLS = 100_000
MAX_CANDIDATES = 10_000
MAX_PROCESSES = 100
MAX_WAVES = 1_000

_KEYS = ("question", "variants", "processes", "cells", "options")
_WORDS: dict[str, Sequence[str]] = {
    "kind": KINDS,
    "state_dtype": STATE_DTYPES,
    "conv_layout": CONV_LAYOUTS,
    "context": CONTEXTS,
    "l2": get_args(L2),
    "inputs": INPUTS,
}
_COUNTS = ("requests", "heads", "tokens", "layers")
_AXES = (*_COUNTS, *_WORDS, "pending")
_REQUIRED = ("kind", "requests", "heads")
_SHOWN = 80


class SweepError(ValueError):
    """A sweep file that can't be used. One line: file, key, value and the rule."""


@dataclass(frozen=True)
class Sweep:
    """A sweep file, expanded.

    cells       distinct, in the order of records.cell_order
    candidates  distinct, in the order of the file's variants
    processes   fresh processes that measure each cell
    """

    path: Path
    question: str
    variants: tuple[str, ...]
    processes: int
    cells: tuple[Cell, ...]
    candidates: tuple[Candidate, ...]

    @property
    def stem(self) -> str:
        return self.path.stem

    def candidates_of(self, cell: Cell) -> tuple[Candidate, ...]:
        """Those whose variants take cells of this kind at all, in order."""
        return self._by_kind[cell.kind]

    @cached_property
    def _by_kind(self) -> dict[str, tuple[Candidate, ...]]:
        return {kind: tuple(c for c in self.candidates if takes(c, kind)) for kind in KINDS}

    @cached_property
    def digest(self) -> str:
        """Of all that decides what is measured: cells, candidates, processes. Not of the question's
        wording."""
        content = {
            "cells": [asdict(cell) for cell in self.cells],
            "candidates": [[c.variant, c.options] for c in self.candidates],
            "processes": self.processes,
        }
        return "sha256:" + hashlib.sha256(canonical(content).encode()).hexdigest()


def takes(candidate: Candidate, kind: str) -> bool:
    """Whether the candidate's variant takes cells of a kind: else it is no candidate of them, and
    nothing is measured or told. A variant that isn't registered may take any."""
    name = candidate.variant
    return name not in variants.NAMES or kind in variants.declared(name).kinds


def load(path: Path, known_options: KnownOptions, sms: int | None = None) -> Sweep:
    """Reads and expands a sweep file.

    sms is the SM count of the device to measure; only `waves` needs it. Raises SweepError.
    """
    return _Reader(path, known_options, sms).sweep(_parse(path))


def _parse(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise SweepError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise SweepError(f"{path}: not TOML: {' '.join(str(error).split())}") from None


def wave_requests(
    heads: int, splits: Sequence[int], sms: int, lo: int, hi: int, waves: int = 2
) -> list[int]:
    """Request counts from lo to hi around which `items * split` fills one or two waves of `sms`
    CTAs, or up to `waves` with a split of 1.

    Where a count fills a wave exactly, it and both its neighbours; else the counts just below and
    just above. Raises ValueError if heads, sms, waves or a split is below one.
    """
    if min(heads, sms, waves, *splits) < 1:
        raise ValueError(f"counts must be >= 1: {heads=} {splits=} {sms=} {waves=}")
    found = set[int]()
    for split in splits:
        for wave in range(1, (waves if split == 1 else min(waves, 2)) + 1):
            full, spill = divmod(wave * sms, heads * split)
            found.update((full, full + 1) if spill else (full - 1, full, full + 1))
    return sorted(requests for requests in found if lo <= requests <= hi)


@dataclass(frozen=True)
class _Reader:
    path: Path
    known: KnownOptions
    sms: int | None

    def fail(self, key: str, value: object, rule: str) -> NoReturn:
        text = repr(value)
        text = text if len(text) <= _SHOWN else text[:_SHOWN] + "..."
        raise SweepError(" ".join(f"{self.path}: {key}: {text}: {rule}".splitlines()))

    def sweep(self, data: dict[str, Any]) -> Sweep:
        self.keys("", data, _KEYS, required=("question", "variants", "cells"))
        question = data["question"]
        if not isinstance(question, str) or not question.strip():
            self.fail("question", question, "text that says what the sweep is for")
        variants = self.axis("variants", data["variants"])
        for name in variants:
            self.word("variants", name, tuple(self.known))
        processes = data.get("processes", 1)
        if self.count("processes", processes) > MAX_PROCESSES:
            self.fail("processes", processes, f"at most {MAX_PROCESSES}")
        candidates = self.candidates(variants, data.get("options", {}))
        cells = self.cells(
            data["cells"], sorted({int(c.options.get("split", 1)) for c in candidates})
        )
        return Sweep(self.path, question.strip(), tuple(variants), processes, cells, candidates)

    def keys(
        self, where: str, table: object, known: Sequence[str], required: Sequence[str] = ()
    ) -> None:
        if not isinstance(table, dict):
            self.fail(where or "file", table, "a table")
        prefix = f"{where}." if where else ""
        for key in table:
            if key not in known:
                self.fail(f"{prefix}{key}", table[key], f"unknown key; allowed: {', '.join(known)}")
        for key in required:
            if key not in table:
                self.fail(f"{prefix}{key}", None, "missing")

    def tables(self, where: str, value: object) -> list[tuple[str, Any]]:
        """A table or an array of tables, each with its name in messages."""
        if not isinstance(value, list):
            return [(where, value)]
        if not value:
            self.fail(where, value, "at least one table")
        return [(f"{where}[{index}]", table) for index, table in enumerate(value)]

    def axis(self, key: str, value: object) -> list[Any]:
        """The values of a list or a single value; not empty, no value twice, no tables or lists
        inside."""
        values = value if isinstance(value, list) else [value]
        if not values:
            self.fail(key, value, "an axis needs at least one value")
        seen = set[tuple[type, Any]]()
        for item in values:
            if not isinstance(item, int | str | bool):
                self.fail(key, item, "an integer, text or true/false")
            if (type(item), item) in seen:
                self.fail(key, item, "a value must not occur twice")
            seen.add((type(item), item))
        return values

    def word(self, key: str, value: object, allowed: Sequence[str]) -> None:
        if not isinstance(value, str) or value not in allowed:
            self.fail(key, value, f"one of {', '.join(allowed)}")

    def count(self, key: str, value: object) -> int:
        if type(value) is not int or value < 1:
            self.fail(key, value, "an integer >= 1")
        return value

    def candidates(self, variants: list[str], tables: object) -> tuple[Candidate, ...]:
        self.keys("options", tables, variants)
        assert isinstance(tables, dict)
        found = dict[Candidate, None]()
        for variant in variants:
            for where, table in self.tables(f"options.{variant}", tables.get(variant, {})):
                for options in self.options(where, variant, table):
                    candidate = Candidate.of(variant, options)
                    if candidate in found:
                        self.fail(where, options, "a candidate must not occur twice")
                    found[candidate] = None
        return tuple(found)

    def options(self, where: str, variant: str, table: Any) -> Iterator[dict[str, OptionValue]]:
        known = self.known[variant]
        self.keys(where, table, tuple(known))
        axes = {key: self.axis(f"{where}.{key}", value) for key, value in table.items()}
        for key, values in axes.items():
            for value in values:
                if type(value) is not known[key]:
                    self.fail(f"{where}.{key}", value, f"a value of type {known[key].__name__}")
                if key == "split":
                    self.count(f"{where}.split", value)
        self.bounded(where, axes, MAX_CANDIDATES, "candidates")
        return (
            dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())
        )

    def bounded(self, where: str, axes: Mapping[str, list[Any]], limit: int, what: str) -> int:
        size = math.prod(map(len, axes.values()))
        if size > limit:
            self.fail(where, size, f"at most {limit} {what}")
        return size

    def cells(self, tables: object, splits: list[int]) -> tuple[Cell, ...]:
        if not isinstance(tables, list):
            self.fail("cells", tables, "one or more [[cells]] tables")
        found = set[Cell]()
        for where, table in self.tables("cells", tables):
            found.update(self.cells_of(where, table, splits))
            if len(found) > MAX_CELLS:
                self.fail("cells", len(found), f"at most {MAX_CELLS} cells")
        return tuple(sorted(found, key=cell_order))

    def cells_of(self, where: str, table: Any, splits: list[int]) -> Iterator[Cell]:
        self.keys(where, table, (*_AXES, "waves"), _REQUIRED)
        waves = table.get("waves", False)
        if type(waves) is bool:
            waves = 2 if waves else 0
        elif type(waves) is not int or not 1 <= waves <= MAX_WAVES:
            self.fail(f"{where}.waves", waves, f"true, false or an integer from 1 to {MAX_WAVES}")
        axes = {
            key: self.axis(f"{where}.{key}", value)
            for key, value in table.items()
            if key != "waves"
        }
        for key, axis in axes.items():
            for value in axis:
                if key in _COUNTS:
                    self.count(f"{where}.{key}", value)
                elif key in _WORDS:
                    self.word(f"{where}.{key}", value, _WORDS[key])
        self.bounded(where, axes, MAX_CELLS, "cells")
        for point in itertools.product(*axes.values()):
            cell = self.cell(where, dict(zip(axes, point, strict=True)))
            yield cell
            if waves and cell.requests == axes["requests"][0]:
                yield from self.waves(where, cell, splits, axes["requests"], waves)

    def cell(self, where: str, values: dict[str, Any]) -> Cell:
        cell = Cell(**values)
        try:
            cell.problem  # noqa: B018  its rules are checked as it is built
        except ValueError as error:
            self.fail(where, values, str(error))
        return cell

    def waves(
        self, where: str, cell: Cell, splits: list[int], requests: list[int], waves: int
    ) -> Iterator[Cell]:
        if self.sms is None:
            self.fail(f"{where}.waves", waves, "needs the SM count of a device: none is at hand")
        for extra in wave_requests(
            cell.heads, splits, self.sms, min(requests), max(requests), waves
        ):
            yield replace(cell, requests=extra)
