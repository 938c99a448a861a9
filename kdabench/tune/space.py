"""What a tuner chooses from: the candidates of one variant in one cell, as points of an Optuna
search space.

The points need not fill their box: a sweep's specs are a union of products, and `unsupported` or a
lack of records takes points away. So the space is a list, with an Optuna distribution for each
field that differs within it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution

from kdabench.data.measurements import CELL_FIELDS, Candidate, Cell, canonical

Value = int | str | bool | None
Params = Mapping[str, Value]


@dataclass(frozen=True)
class Point:
    """A candidate, and all options of its variant, the defaults among them."""

    candidate: Candidate
    options: Params


@dataclass(frozen=True)
class Space:
    """Distinct points of one variant in a fixed order.

    default  the point of the variant's own defaults, to compare with; it need not be one of
             `points`. None: can't run
    """

    variant: str
    points: tuple[Point, ...]
    default: Point | None = None

    @classmethod
    def of(cls, variant: str, points: Iterable[Point], default: Point | None = None) -> Space:
        """Points with equal options count once, as the first of them."""
        distinct: dict[str, Point] = {}
        for point in points:
            distinct.setdefault(canonical(dict(point.options)), point)
        return cls(variant, tuple(distinct.values()), default)

    @cached_property
    def values(self) -> dict[str, list[Value]]:
        """The values of each field that differs between points, in ascending order."""
        fields = sorted({name for point in self.points for name in point.options})
        found = {
            name: {canonical(p.options.get(name)): p.options.get(name) for p in self.points}
            for name in fields
        }
        return {
            name: sorted(seen.values(), key=_order) for name, seen in found.items() if len(seen) > 1
        }

    @cached_property
    def distributions(self) -> dict[str, BaseDistribution]:
        """Counts of three or more values are integers on a log scale; all else is a category."""
        return {
            name: IntDistribution(int(values[0] or 0), int(values[-1] or 0), log=True)
            if _ordinal(values)
            else CategoricalDistribution(values)
            for name, values in self.values.items()
        }

    @cached_property
    def params(self) -> tuple[Params, ...]:
        """Of each point its values of the fields that differ."""
        return tuple(
            {name: point.options.get(name) for name in self.values} for point in self.points
        )

    @cached_property
    def _places(self) -> dict[str, int]:
        return {canonical(dict(params)): place for place, params in enumerate(self.params)}

    def place(self, params: Params) -> int | None:
        """The point's index, or None if there is none with these values."""
        return self._places.get(canonical({name: params.get(name) for name in self.values}))

    def place_of(self, candidate: Candidate) -> int | None:
        return next(
            (i for i, point in enumerate(self.points) if point.candidate == candidate), None
        )

    def nearest(self, params: Params, among: Sequence[int]) -> int:
        """Of some points the one that differs least; of equally near ones the first.

        A category counts one where it differs, a count its distance on a log scale, as a part of
        the whole range.
        """
        return min(among, key=lambda place: self._distance(params, self.params[place]))

    def _distance(self, a: Params, b: Params) -> float:
        return sum(self._apart(name, a[name], b[name]) for name in self.values)

    def _apart(self, name: str, a: Value, b: Value) -> float:
        if isinstance(self.distributions[name], IntDistribution):
            values = self.values[name]
            return abs(math.log(int(a or 1) / int(b or 1))) / math.log(
                int(values[-1] or 1) / int(values[0] or 1)
            )
        return float(a != b)

    @cached_property
    def digest(self) -> str:
        content = [self.variant, [dict(point.options) for point in self.points]]
        return hashlib.sha256(canonical(content).encode()).hexdigest()


def _order(value: Value) -> tuple[str, Any]:
    return type(value).__name__, 0 if value is None else value


def _ordinal(values: Sequence[Value]) -> bool:
    return len(values) > 2 and all(type(value) is int and value >= 1 for value in values)


def cell_title(cell: Cell) -> str:
    """Short and distinct: heads, requests and what differs from the commonplace."""
    plain = Cell(cell.kind, cell.requests, cell.heads, cell.tokens)
    shown = ("kind", "heads", "requests", "tokens")
    others = [
        name
        for name in CELL_FIELDS
        if name not in shown and getattr(cell, name) != getattr(plain, name)
    ]
    parts = [
        f"H={cell.heads}",
        f"R={cell.requests}",
        *(f"{name}={getattr(cell, name)}" for name in others),
    ]
    return " ".join([cell.kind, *([f"q={cell.tokens}"] if cell.tokens > 1 else []), *parts])


def apart(a: Cell, b: Cell) -> float | None:
    """How far two cells are from each other for whoever borrows a winner; None if nothing can be
    borrowed."""
    if (a.state_dtype, a.context, a.layers) != (b.state_dtype, b.context, b.layers):
        return None
    return (
        abs(math.log(a.items / b.items))
        + 0.3 * abs(math.log(a.heads / b.heads))
        + 0.7 * abs(math.log(a.tokens / b.tokens))
        + 2.0 * (a.kind != b.kind)
        + 1.0 * (a.pending != b.pending)
    )
