"""What a tuner chooses from: the candidates of one variant in one cell, as points of an Optuna
search space.

The points need not fill their box: a sweep's specs are a union of products, and `unsupported` or a
lack of records takes points away. So the space is a list, with an Optuna distribution for each
field that differs within it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

from optuna.distributions import BaseDistribution, CategoricalDistribution, IntDistribution

from kda_kernels import variants
from kda_kernels.device.gpu import Gpu
from kdabench.data.measurements import CELL_FIELDS, Candidate, Cell, canonical
from kdabench.data.sweep import Sweep

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


Points = tuple[list[Point], Point | None]
"""What there is to choose from, and the point of the defaults, or None if it can't run."""


def point(candidate: Candidate) -> Point:
    """Complete a candidate's options by its variant's defaults.

    Raises ValueError if the variant has no such option.
    """
    options = variants.make_options(candidate.variant, candidate.options)
    return Point(candidate, variants.options_dict(options))


def default_point(variant: str) -> Point:
    """Give the point of nothing but defaults."""
    return point(Candidate.of(variant, {}))


def spaces(
    plan: Sweep, names: Sequence[str], points: Callable[[Cell, str], Points]
) -> list[tuple[Cell, Space]]:
    """Pair every cell with each variant's space there, if it has two points or more.

    points  what there is of a variant in a cell, as `supported_points` or `recorded_points` say
    """
    found = ((cell, Space.of(name, *points(cell, name))) for name in names for cell in plan.cells)
    return [(cell, space) for cell, space in found if len(space.points) > 1]


def supported_points(plan: Sweep, cell: Cell, name: str, full: bool, gpu: Gpu) -> Points:
    """Find what of a variant can run in a cell on a GPU.

    full  all that its options can say; else the sweep's candidates

    Raises ValueError as `every` does.
    """
    module = variants.load(name)

    def runs(point: Point) -> bool:
        options = variants.make_options(name, dict(point.options))
        return module.unsupported(cell.problem, options, gpu) is None

    candidates = every(name, cell) if full else [c for c in plan.candidates if c.variant == name]
    default = default_point(name)
    return [p for p in map(point, candidates) if runs(p)], default if runs(default) else None


def every(name: str, cell: Cell) -> Iterator[Candidate]:
    """Give all that a variant's options can say, each as what differs from the defaults.

    Left out is what is not for a tuner to choose: options that are given, and `pdl` where no kernel
    comes before.

    Raises ValueError if the variant lists no values of an option that counts something.
    """
    declared = variants.declared(name)
    axes: dict[str, Sequence[Any]] = {}
    for option in declared.options:
        if option in declared.given or (option == "pdl" and cell.context == "isolated"):
            continue
        try:
            axes[option] = declared.values_to_try(option)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    for values in product(*axes.values()):
        chosen = dict(zip(axes, values, strict=True))
        yield Candidate.of(name, {o: v for o, v in chosen.items() if v != declared.defaults[o]})


def recorded_points(recorded: Iterable[Candidate], plan: Sweep, name: str, full: bool) -> Points:
    """Find what of a variant was recorded in a cell.

    recorded  the candidates that were; one with an option that is no more is left out
    full      all of them; else those that are the sweep's, too
    """
    points = []
    for candidate in recorded:
        if candidate.variant == name:
            try:
                points.append(point(candidate))
            except ValueError:
                continue
    default = default_point(name)
    there = next((p for p in points if p.options == default.options), None)
    if full:
        return points, there
    wanted = {canonical(dict(point(c).options)) for c in plan.candidates if c.variant == name}
    return [p for p in points if canonical(dict(p.options)) in wanted], there
