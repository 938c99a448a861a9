"""How good a policy is on held-out cells, and what one policy gains over another."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kdabench.data.measurements import Cell
from kdabench.policy.regret import (
    FLUSH,
    NOWHERE,
    Certificate,
    Floats,
    Gain,
    Grid,
    Ints,
    log_regret,
    picks,
    resampled_log_us,
    summarize,
)
from kdabench.policy.thresholds.ladder import singles

_ERRORS = 3.0
_LEAST_GAIN = 0.001


def certify(
    grid: Grid, ranked: Callable[..., Any], ways: Mapping[str, Ints], resamples: int, seed: int
) -> Certificate | None:
    """What the cells of a grid say of a policy; None if it has no time there at all. ways: other
    picks, by name"""
    picked = picks(grid, ranked)
    regret = summarize(grid, picked)
    if not regret:
        return None
    ways = {**ways, **{f"only {variant}": found for variant, found in singles(grid).items()}}
    baselines = {
        name: found["all"] for name, way in ways.items() if (found := summarize(grid, way))
    }
    uncovered = ~np.isnan(grid.best) & (picked == NOWHERE)
    return Certificate(
        cells=len(grid.cells),
        regret=regret,
        bounds=_bounds(grid, picked, resamples, seed),
        baselines=baselines,
        uncovered=tuple(cell for cell, mine in zip(grid.cells, uncovered, strict=True) if mine),
    )


def _bounds(grid: Grid, picked: Ints, resamples: int, seed: int) -> dict[str, float]:
    rows = np.flatnonzero(~np.isnan(log_regret(grid, picked)))
    if resamples < 2:
        return {}
    draws = grid.draws(resamples, seed)[:, rows]
    times = resampled_log_us(grid.process_us[rows], draws)
    mine = resampled_log_us(grid.picked_us(picked)[rows], draws)
    regret = mine - np.fmin.reduce(times, axis=2)
    cells = (np.random.PCG64(seed + 1).random_raw(regret.size) % np.uint64(len(rows))).astype(
        np.int64
    )
    regret = np.take_along_axis(regret, cells.reshape(regret.shape), axis=1)
    ranked = np.sort(np.nan_to_num(regret), axis=1)
    figures = {
        "geomean": ranked.mean(axis=1),
        "p99": ranked[:, math.ceil(0.99 * len(rows)) - 1],
        "max": ranked[:, -1],
    }
    return {name: math.expm1(float(_quantile(values, 0.95))) for name, values in figures.items()}


def _quantile(values: Floats, part: float) -> float:
    ranked = np.sort(values)
    return float(ranked[max(0, math.ceil(part * len(ranked)) - 1)])


def nearest_winners(fitted: Grid, grid: Grid) -> Ints:
    """[cells of grid] the fastest candidate in the nearest fitted cell of its kind: a table with an
    entry per cell."""
    index = {candidate: i for i, candidate in enumerate(grid.candidates)}
    found = np.full(len(grid.cells), NOWHERE)
    for row, cell in enumerate(grid.cells):
        near = [
            i
            for i, c in enumerate(fitted.cells)
            if c.kind == cell.kind and not math.isnan(fitted.best[i])
        ]
        if near:
            best = min(near, key=lambda i: (_distance(fitted.cells[i], cell), i))
            found[row] = index.get(
                fitted.candidates[int(np.nanargmin(fitted.log_us[best]))], NOWHERE
            )
    return found


def _distance(a: Cell, b: Cell) -> tuple[float, float, float]:
    tokens, heads, items = ((a.tokens, b.tokens), (a.heads, b.heads), (a.items, b.items))
    return (
        abs(math.log(tokens[0] / tokens[1])),
        abs(math.log(heads[0] / heads[1])),
        abs(math.log(items[0] / items[1])),
    )


def gain(grid: Grid, old: Ints, new: Ints, resamples: int, seed: int) -> Gain:
    """Of the new picks over the old ones, where both have a time."""
    rows = np.flatnonzero(~np.isnan(log_regret(grid, old)) & ~np.isnan(log_regret(grid, new)))
    if not len(rows):
        return Gain(0.0, 0.0, 0.0, 0.0)
    weights = grid.weights[rows]
    ratios = (log_regret(grid, old) - log_regret(grid, new))[rows]
    drawn = _drawn_ratios(grid, old, new, rows, resamples, seed)
    means = (
        (drawn @ weights) / weights.sum()
        if len(drawn)
        else np.array([np.average(ratios, weights=weights)])
    )
    return _gain(float(np.average(ratios, weights=weights)), means)


def _gain(log_ratio: float, drawn: Floats) -> Gain:
    low, high = (math.expm1(_quantile(drawn, part)) for part in (0.05, 0.95))
    return Gain(math.expm1(log_ratio), low, high, float(drawn.std()))


def _drawn_ratios(
    grid: Grid, old: Ints, new: Ints, rows: Ints, resamples: int, seed: int
) -> Floats:
    """[resamples, rows] log ratios of the old time over the new one; the processes of both are
    drawn together."""
    draws = grid.draws(max(resamples, 0), seed)[:, rows]
    before, after = (resampled_log_us(grid.picked_us(picked)[rows], draws) for picked in (old, new))
    ratios: Floats = np.where(np.isnan(before - after), 0.0, before - after)
    return ratios


def wins(grid: Grid, old: Ints, new: Ints, found: Gain) -> bool:
    """Whether the new picks are to replace the old ones: by more than noise, or where the old ones
    have no time.

    The new ones were chosen on these times, so what they gain here flatters them; drawn anew they
    gain less. Hence the least gain is asked of the interval's lower end.
    """
    if np.any(np.isnan(log_regret(grid, old)) & ~np.isnan(log_regret(grid, new))):
        return True
    return found.low > _LEAST_GAIN and math.log1p(found.geomean) > _ERRORS * found.error


@dataclass(frozen=True)
class Change:
    """A cell in which another candidate is picked. old and new: as text; gain: None if one of them
    has no time"""

    cell: Cell
    old: str
    new: str
    gain: Gain | None


def changes(
    grid: Grid,
    old: Callable[..., Any],
    new: Callable[..., Any],
    resamples: int = 200,
    seed: int = 0,
) -> list[Change]:
    """Where two policies differ in their first choices, largest gain first."""
    before, after = picks(grid, old), picks(grid, new)
    known = ~np.isnan(log_regret(grid, before)) & ~np.isnan(log_regret(grid, after))
    ratios = log_regret(grid, before) - log_regret(grid, after)
    rows = np.flatnonzero(known)
    drawn = dict(
        zip(rows.tolist(), _drawn_ratios(grid, before, after, rows, resamples, seed).T, strict=True)
    )
    found = []
    for row, cell in enumerate(grid.cells):
        key = cell.heads, cell.requests, cell.tokens, cell.kind
        was, becomes = old(*key)[0], new(*key)[0]
        if was != becomes:
            measured = _gain(float(ratios[row]), drawn[row]) if row in drawn else None
            found.append(Change(cell, *_texts(was, becomes), measured))
    return sorted(
        found, key=lambda change: -math.inf if change.gain is None else -change.gain.geomean
    )


def _texts(old: Any, new: Any) -> tuple[str, str]:
    """Both choices, without the options in which they agree if their variants do."""
    same = old.variant == new.variant
    common = {
        name for name, value in old.options.items() if same and new.options.get(name) == value
    }
    return _text(old, common), _text(new, common)


def _text(choice: Any, without: set[str]) -> str:
    options = ", ".join(
        f"{name}={value}" for name, value in sorted(choice.options.items()) if name not in without
    )
    return f"{FLUSH}, then {choice.variant}" if choice.flush else f"{choice.variant}({options})"
