"""What takes a step, per kind, tokens and heads, as a function of the items: the form of a policy
that decides.

Of the candidates within the tie band of a cell's best, any will do. Between a row's own cells
decides what a candidate is expected to lose there: the mean of a Gaussian process over all cells of
the kind, of whatever heads and tokens. Its covariance has two parts, each of which falls with the
distance: what changes along the items, at about the same items whatever the heads and tokens, and
by how much a row is off from the others. A row, the candidates along the items of one head count,
is what loses least and changes least often; by dynamic programming, exactly. Why not thresholds by
kind, or by kind and tokens: see docs/policy.md.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from scipy.spatial.distance import cdist

from kdabench.policy.regret import FLUSH, TIE, Floats, Grid, Ints, resampled_log_us
from kdabench.policy.thresholds.ladder import PARTS, WAVES, cheapest_path, place_cut

_CHANGE = 0.005  # cost of a change along a row, in log units
_ALONG = (
    0.7,
    0.6,
    7.0,
    28.0,
)  # log ratios of items, waves, tokens, heads over which what changes falls by e
_ACROSS = (10.0, math.inf, 0.6, 4.0)  # the same of what a row is off
_NOISE = 0.02  # variance of a cell alone; that of each part is 1
_MOST = 0.3  # what a candidate can lose at most, in log units, and what one without a time does

Step = tuple[str, int]
"""(kind, tokens)"""
Rows = dict[Step, dict[int, dict[int, int]]]
"""step -> heads -> items -> index of the candidate that takes over there."""


@dataclass(frozen=True)
class _Part:
    """The cells of a kind where something has a time, as rows of one step look at them.

    step, states   the step and the indices of the candidates with any time in it, those that are
                   good in most of its cells first
    rows           [cells] their place in the grid
    places         [cells, 4] as `_places`
    precision      [cells, cells] inverse of the covariance of what is lost in them
    levels         items of any of the cells, ascending
    sms            of the device
    """

    step: Step
    states: Ints
    rows: Ints
    tokens: Ints
    heads: Ints
    items: Ints
    places: Floats
    precision: Floats
    levels: Ints
    sms: int

    def own(self, heads: int) -> Ints:
        """Which cells are those of a row."""
        return np.flatnonzero((self.tokens == self.step[1]) & (self.heads == heads))

    def expected(self, loss: Floats, heads: int) -> Floats:
        """[..., levels, states] what a row is expected to lose at a level. loss: [..., cells,
        states]"""
        every = np.ones_like(self.levels)
        asked = _places(self.levels, every * self.step[1], every * heads, self.sms)
        weights = _covariance(asked, self.places) @ self.precision
        mean = loss.mean(axis=-2, keepdims=True)
        found: Floats = np.round(
            mean + weights @ (loss - mean), 9
        )  # the same wherever it is computed
        return found


def _parts(grid: Grid, sms: int) -> Iterator[_Part]:
    own = np.array([c.variant != FLUSH for c in grid.candidates], dtype=bool)
    known = ~np.isnan(grid.log_us) & own
    for kind, steps in itertools.groupby(
        sorted({(cell.kind, cell.tokens) for cell in grid.cells}), lambda s: s[0]
    ):
        rows = np.flatnonzero((grid.cells.kinds == kind) & known.any(axis=1))
        items, tokens, heads = (
            values[rows] for values in (grid.cells.items, grid.cells.tokens, grid.cells.heads)
        )
        places = _places(items, tokens, heads, sms)
        covariance = _covariance(places, places) + _NOISE * np.eye(len(rows))
        precision = np.asarray(np.linalg.inv(covariance), dtype=np.float64)
        levels = np.unique(items)
        for step in steps:
            mine = rows[tokens == step[1]]
            states = np.flatnonzero(known[mine].any(axis=0))
            if not len(mine):
                continue
            loss = _loss(grid.log_us[np.ix_(mine, states)])
            order = np.argsort(-(loss <= math.log1p(TIE)).sum(axis=0), kind="stable")
            yield _Part(
                step, states[order], rows, tokens, heads, items, places, precision, levels, sms
            )


def _places(items: Ints, tokens: Ints, heads: Ints, sms: int) -> Floats:
    """[cells, 4] logs of items, of the waves of CTAs that they make, or the part of one, of tokens
    and of heads."""
    waves = np.minimum(np.ceil(items / sms), WAVES)
    for part in PARTS:
        waves = np.where(items * part <= sms, 1 / part, waves)
    found: Floats = np.log([items, waves, tokens, heads]).T
    return found


def _covariance(a: Floats, b: Floats) -> Floats:
    """[cells of a, cells of b] of what a candidate loses."""
    along, across = (
        np.exp(-cdist(a / reach, b / reach, "cityblock")) for reach in (_ALONG, _ACROSS)
    )
    found: Floats = along + across
    return found


def _loss(log_us: Floats) -> Floats:
    """[..., cells, states] over the fastest; inf without a time, 0 where nothing has one."""
    known = np.where(np.isnan(log_us), np.inf, log_us)
    best = known.min(axis=-1, keepdims=True)
    some = np.isfinite(best)
    loss: Floats = np.where(some, known, 0.0) - np.where(some, best, 0.0)
    return loss


def find_rows(grid: Grid, sms: int) -> Rows:
    """The rows of each step that has a time somewhere, and of each head count that its kind was
    measured with."""
    found: Rows = {}
    for part in _parts(grid, sms):
        loss = _loss(grid.log_us[np.ix_(part.rows, part.states)])[None]
        for heads in np.unique(part.heads).tolist():
            path, costs = _path(part, loss, heads)
            found.setdefault(part.step, {})[heads] = _row(part, path[0], costs[0])
    return found


def _path(part: _Part, loss: Floats, heads: int) -> tuple[Ints, Floats]:
    """[batch, levels] states of a row, and [batch, levels, states] what they are expected to lose
    at a level."""
    costs = part.expected(np.minimum(loss, _MOST), heads)
    bounds = costs.copy()
    own = part.own(heads)
    bounds[:, np.searchsorted(part.levels, part.items[own])] = np.where(
        loss[:, own] <= math.log1p(TIE), 0.0, math.inf
    )
    return cheapest_path(bounds, _CHANGE * (1 - np.eye(loss.shape[2]))), costs


def _row(part: _Part, path: Ints, costs: Floats) -> dict[int, int]:
    """Items -> candidate: from 1, and where a path changes."""
    row = {1: int(part.states[path[0]])}
    for n in range(1, len(part.levels)):
        before, after = path[n - 1], path[n]
        if before != after:
            low, high = (float(costs[m, before] - costs[m, after]) for m in (n - 1, n))
            cut = place_cut(
                int(part.levels[n - 1]), int(part.levels[n]), low, high, part.sms, PARTS
            )
            row[cut] = int(part.states[after])
    return row


def agreement(grid: Grid, draws: Ints, sms: int) -> Floats:
    """[cells] the share of resamples in which a cell's row has the same variant there; NaN where
    nothing has a time.

    draws  [resamples, cells, processes] as Grid.draws gives them
    """
    variants = np.array([c.variant for c in grid.candidates])
    found = np.full(len(grid.cells), np.nan)
    for part in _parts(grid, sms):
        place = np.ix_(part.rows, part.states)
        drawn = resampled_log_us(grid.process_us[place], draws[:, part.rows])
        loss = _loss(np.concatenate([grid.log_us[place][None], drawn]))
        names = variants[part.states]
        for heads in np.unique(part.heads[part.tokens == part.step[1]]).tolist():
            path, _ = _path(part, loss, heads)
            shares = (names[path[1:]] == names[path[0]]).mean(axis=0)
            own = part.own(heads)
            found[part.rows[own]] = shares[np.searchsorted(part.levels, part.items[own])]
    return found
