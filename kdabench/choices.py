"""What takes a step, per kind, tokens and heads, as a function of the items: the form of a policy that decides.

Of the candidates within the tie band of a cell's best, any will do. So a row, the candidates along the items of one
head count, is what changes least often; by dynamic programming, exactly. Between a row's own cells those of the other
head counts decide, with a weight that falls with their distance: what they lose together must outweigh a change.
Why not thresholds by kind, or by kind and tokens: see docs/policy.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kdabench.ladder import cheapest_path, place_cut
from kdabench.regret import FLUSH, TIE, Floats, Grid, Ints, resampled_log_us

_CHANGE = 0.01  # cost of a change along a row, in log units
_BORROWED = 0.2  # weight of another head count at a distance of zero; falls as the root of the ratio
_MOST_BORROWED = 1.0  # what one cell of another head count can cost at most, in log units: what has no time there

Step = tuple[str, int]
"""(kind, tokens)"""
Rows = dict[Step, dict[int, dict[int, int]]]
"""step -> heads -> items -> index of the candidate that takes over there."""


@dataclass(frozen=True)
class _StepGrid:
    """The cells of a step where something has a time.

    rows     [cells] their place in the grid
    states   [states] indices of the candidates with any time, those that are good in most cells first
    heads, items   [cells]
    """

    rows: Ints
    states: Ints
    heads: Ints
    items: Ints


def _steps(grid: Grid) -> Iterator[tuple[Step, _StepGrid]]:
    steps = [(cell.kind, cell.tokens) for cell in grid.cells]
    own = np.array([c.variant != FLUSH for c in grid.candidates], dtype=bool)
    for step in sorted(set(steps)):
        known = ~np.isnan(grid.log_us) & own & np.array([s == step for s in steps])[:, None]
        rows, states = np.flatnonzero(known.any(axis=1)), np.flatnonzero(known.any(axis=0))
        if not len(rows):
            continue
        loss = _loss(grid.log_us[np.ix_(rows, states)])
        order = np.argsort(-(loss <= math.log1p(TIE)).sum(axis=0), kind="stable")
        yield step, _StepGrid(rows, states[order], grid.cells.heads[rows], grid.cells.items[rows])


def _loss(log_us: Floats) -> Floats:
    """[..., cells, states] over the fastest; inf without a time, 0 where nothing has one."""
    known = np.where(np.isnan(log_us), np.inf, log_us)
    best = known.min(axis=-1, keepdims=True)
    some = np.isfinite(best)
    loss: Floats = np.where(some, known, 0.0) - np.where(some, best, 0.0)
    return loss


def find_rows(grid: Grid, sms: int) -> Rows:
    """The rows of each step and head count that have a time somewhere."""
    found: Rows = {}
    for step, part in _steps(grid):
        loss = _loss(grid.log_us[np.ix_(part.rows, part.states)])[None]
        for heads in sorted(set(part.heads.tolist())):
            levels, path, costs = _path(part, loss, heads)
            found.setdefault(step, {})[heads] = _row(part, levels, path[0], costs[0], sms)
    return found


def _path(part: _StepGrid, loss: Floats, heads: int) -> tuple[Ints, Ints, Floats]:
    """Levels of items, [batch, levels] states of a row, and [batch, levels, states] what they lose at a level."""
    levels, level_of = np.unique(part.items, return_inverse=True)
    own = part.heads == heads
    weights = np.where(own, 1.0, _BORROWED * np.exp(-np.abs(np.log(part.heads / heads)) / 2))
    tie = math.log1p(TIE)
    beyond = np.clip(loss, tie, _MOST_BORROWED) - tie
    allowed = np.where(own[:, None] & (loss > tie), math.inf, np.where(own[:, None], 0.0, weights[:, None] * beyond))
    lost = weights[:, None] * np.minimum(loss, _MOST_BORROWED)
    order = np.argsort(level_of, kind="stable")
    begins = np.searchsorted(level_of[order], np.arange(len(levels)))
    bounds, costs = (np.add.reduceat(values[:, order], begins, axis=1) for values in (allowed, lost))
    change = _CHANGE * (1 - np.eye(loss.shape[2]))
    return levels, cheapest_path(bounds, change), costs


def _row(part: _StepGrid, levels: Ints, path: Ints, costs: Floats, sms: int) -> dict[int, int]:
    """Items -> candidate: from 1, and where a path changes."""
    row = {1: int(part.states[path[0]])}
    for n in range(1, len(levels)):
        before, after = path[n - 1], path[n]
        if before != after:
            low, high = (float(costs[m, before] - costs[m, after]) for m in (n - 1, n))
            row[place_cut(int(levels[n - 1]), int(levels[n]), low, high, sms)] = int(part.states[after])
    return row


def agreement(grid: Grid, draws: Ints) -> Floats:
    """[cells] the share of resamples in which a cell's row has the same variant there; NaN where nothing has a time.

    draws  [resamples, cells, processes] as Grid.draws gives them
    """
    variants = np.array([c.variant for c in grid.candidates])
    found = np.full(len(grid.cells), np.nan)
    for _, part in _steps(grid):
        place = np.ix_(part.rows, part.states)
        fitted = _loss(grid.log_us[place])[None]
        drawn = _loss(resampled_log_us(grid.process_us[place], draws[:, part.rows]))
        names = variants[part.states]
        for heads in sorted(set(part.heads.tolist())):
            (levels, mine, _), (_, others, _) = (_path(part, loss, heads) for loss in (fitted, drawn))
            shares = (names[others] == names[mine]).mean(axis=0)
            own = part.heads == heads
            found[part.rows[own]] = shares[np.searchsorted(levels, part.items[own])]
    return found
