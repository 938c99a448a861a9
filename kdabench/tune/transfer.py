"""A model of one variant over all cells: what was measured in one cell says something of the
others.

A Gaussian process of log times per byte that must move: a level of its own for each cell, an effect of
the options that all cells share, and one that neighbouring cells share. Its scales are fixed: a few
trials per cell couldn't support a fit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdabench.data.measurements import Cell
from kdabench.tune.space import Params, Space, apart

Floats = NDArray[np.float64]
Key = tuple[int, int]
"""Places of a cell, and of a point in its space."""

# Standard deviations in log units; reaches in fields that differ, and in units of `apart`.
_LEVEL, _SHARED, _LOCAL, _NOISE = 3.0, 0.1, 0.3, 0.01
_OPTIONS_REACH, _CELLS_REACH = 6.0, 3.0
_MOST = 300
"""Results that are looked at for one choice, those of the nearest cells."""


class Transfer:
    """The cells of one variant with their spaces, and the times found so far."""

    def __init__(self, cells: Sequence[Cell], spaces: Sequence[Space]) -> None:
        self._cells, self._spaces = cells, spaces
        self._found: list[dict[int, float]] = [{} for _ in cells]

    def tell(self, cell: int, times_us: dict[int, float]) -> None:
        """All that is known in a cell: microseconds by the point's place."""
        moved = self._cells[cell].problem.bytes_moved
        self._found[cell] = {place: math.log(us / moved) for place, us in times_us.items()}

    @cached_property
    def _far(self) -> Floats:
        distances = [[apart(a, b) for b in self._cells] for a in self._cells]
        return np.array([[math.inf if d is None else d for d in row] for row in distances])

    @cached_property
    def _codes(self) -> list[Floats]:
        """Per cell [points, fields]: numbers one or more apart where values differ; counts half a
        unit an octave."""
        options = [[point.options for point in space.points] for space in self._spaces]
        columns = {
            name: _numbers(options, name)
            for name in sorted({n for o in options for p in o for n in p})
        }
        columns = {name: column for name, column in columns.items() if len(column) > 1}
        numbers = [
            [[column[repr(p.get(n))] for n, column in columns.items()] for p in points]
            for points in options
        ]
        return [np.array(rows) for rows in numbers]

    def pick(self, cell: int, places: Sequence[int]) -> int | None:
        """The one of some points with the largest expected improvement on the best known time in
        the cell.

        Without a time there, the one that is expected to be fastest; of equals the first. None if
        nothing is known.
        """
        order = np.argsort(self._far[cell], kind="stable").tolist()
        known: list[Key] = [
            (c, p) for c in order if self._far[cell, c] < math.inf for p in self._found[c]
        ][:_MOST]
        if not known:
            return None
        target = np.array([self._found[c][p] for c, p in known])
        asked = [(cell, place) for place in places]
        gram = self._kernel(known, known) + _NOISE**2 * np.eye(len(known))
        cross = self._kernel(asked, known)
        solved = _solve(gram, np.column_stack([target - target.mean(), cross.T]))
        mean = float(target.mean()) + np.einsum("ij,j->i", cross, solved[:, 0])
        own = self._found[cell].values()
        if not own:
            return places[int(np.argmin(mean))]
        variance = _LEVEL**2 + _SHARED**2 + _LOCAL**2 - np.einsum("ij,ji->i", cross, solved[:, 1:])
        spread = np.sqrt(np.maximum(variance, 1e-12))
        gains = [
            _improvement(min(own) - m, s)
            for m, s in zip(mean.tolist(), spread.tolist(), strict=True)
        ]
        return places[int(np.argmax(gains))]

    def _kernel(self, a: Sequence[Key], b: Sequence[Key]) -> Floats:
        left, right = (
            np.stack([self._codes[cell][place] for cell, place in keys]) for keys in (a, b)
        )
        differ = np.zeros((len(a), len(b)))
        for x, y in zip(left.T, right.T, strict=True):
            differ += np.minimum(np.abs(x[:, None] - y[None, :]), 1.0)
        far = self._far[np.ix_([cell for cell, _ in a], [cell for cell, _ in b])]
        found: Floats = _LEVEL**2 * (far == 0)
        found = found + (_SHARED**2 + _LOCAL**2 * np.exp(-far / _CELLS_REACH)) * np.exp(
            -differ / _OPTIONS_REACH
        )
        return found


def _solve(gram: Floats, right: Floats) -> Floats:
    """By Gauss and Jordan; `gram` is positive definite. Not LAPACK, whose threads wait for each
    other on busy cores."""
    rows = np.column_stack([gram, right])
    for k in range(len(gram)):
        pivot = rows[k, k:] / rows[k, k]
        rows[:, k:] -= np.multiply.outer(rows[:, k], pivot)
        rows[k, k:] = pivot
    return rows[:, len(gram) :]


def _numbers(options: Sequence[Sequence[Params]], name: str) -> dict[str, float]:
    values: dict[str, Any] = {repr(p.get(name)): p.get(name) for points in options for p in points}
    if all(type(v) is int and v >= 1 for v in values.values()):
        return {text: math.log2(v) / 2 for text, v in values.items()}
    return {text: float(n) for n, text in enumerate(sorted(values))}


def _improvement(gap: float, spread: float) -> float:
    normal = NormalDist()
    return gap * normal.cdf(gap / spread) + spread * normal.pdf(gap / spread)
