"""What takes a step, per kind, tokens and heads, as a function of the items: the form of a policy that decides.

Of the candidates within the tie band of a cell's best, any will do. Between a row's own cells decides what the cells
nearby say, of whatever heads and tokens: what a candidate loses there, in the mean, with weights that fall with the
distance in items, heads, tokens and waves of CTAs; and how far this mean of the others is off in the row's own cells.
A row, the candidates along the items of one head count, is what loses least and changes least often; by dynamic
programming, exactly.
Why not thresholds by kind, or by kind and tokens: see docs/policy.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from kdabench.ladder import PARTS, WAVES, cheapest_path, place_cut
from kdabench.regret import FLUSH, TIE, Floats, Grid, Ints, resampled_log_us

_CHANGE = 0.01  # cost of a change along a row, in log units
_NEAR = {"items": 0.1, "waves": 0.1, "tokens": 0.3, "heads": 0.7}  # log ratios over which a weight falls by e
_NEAR_FEW = 0.35  # of heads with items for less than half of the SMs, where the GEMMs around a step tell in its time
_ALONG = 0.7  # the same of items, for what a row's own cells lose beyond the mean of the others
_MOST = 0.3  # what a cell nearby can cost at most, in log units
_NO_TIME = 1.0  # cost where a candidate has no time, so that what runs comes first

Step = tuple[str, int]
"""(kind, tokens)"""
Rows = dict[Step, dict[int, dict[int, int]]]
"""step -> heads -> items -> index of the candidate that takes over there."""


@dataclass(frozen=True)
class _Part:
    """The cells of a kind where something has a time, as rows of one step look at them.

    step, states      the step and the indices of the candidates with any time in it, those that are good in most of its
                      cells first
    rows              [cells] their place in the grid
    features          [cells, 2] logs of items and waves, over what _NEAR says
    levels            items of any of the cells, ascending
    level_features    [levels, 2] as features
    heads_reach       [levels] what _NEAR or _NEAR_FEW says of heads
    """

    step: Step
    states: Ints
    rows: Ints
    tokens: Ints
    heads: Ints
    items: Ints
    features: Floats
    levels: Ints
    level_features: Floats
    heads_reach: Floats

    def own(self, heads: int) -> Ints:
        """Which cells are those of a row."""
        return np.flatnonzero((self.tokens == self.step[1]) & (self.heads == heads))

    def expected(self, loss: Floats, heads: int) -> Floats:
        """[..., levels, states] what a row is expected to lose at a level. loss: [..., cells, states]"""
        own = self.own(heads)
        others = np.setdiff1d(np.arange(len(self.items)), own)
        along = np.abs(self.level_features[:, None] - self.features[others]).sum(axis=2)
        tokens = np.abs(np.log(self.tokens[others] / self.step[1])) / _NEAR["tokens"]
        distance = along + tokens + np.abs(np.log(self.heads[others] / heads)) / self.heads_reach[:, None]
        weights = np.exp(distance.min(axis=1, keepdims=True, initial=math.inf) - distance)
        found: Floats = weights / weights.sum(axis=1, keepdims=True) @ loss[..., others, :]

        at = np.searchsorted(self.levels, self.items[own])
        reach = np.exp(-np.abs(np.log(self.levels[:, None] / self.items[own])) / _ALONG)
        found += reach / (1 + reach.sum(axis=1, keepdims=True)) @ (loss[..., own, :] - found[..., at, :])
        found[..., at, :] = loss[..., own, :]
        return found


def _parts(grid: Grid, sms: int) -> Iterator[_Part]:
    own = np.array([c.variant != FLUSH for c in grid.candidates], dtype=bool)
    known = ~np.isnan(grid.log_us) & own
    for step in sorted({(cell.kind, cell.tokens) for cell in grid.cells}):
        rows = np.flatnonzero((grid.cells.kinds == step[0]) & known.any(axis=1))
        mine = rows[grid.cells.tokens[rows] == step[1]]
        states = np.flatnonzero(known[mine].any(axis=0))
        if not len(mine):
            continue
        loss = _loss(grid.log_us[np.ix_(mine, states)])
        order = np.argsort(-(loss <= math.log1p(TIE)).sum(axis=0), kind="stable")
        items, tokens, heads = (values[rows] for values in (grid.cells.items, grid.cells.tokens, grid.cells.heads))
        levels = np.unique(items)
        reach = np.where(2 * levels < sms, _NEAR_FEW, _NEAR["heads"])
        features, level_features = _along(items, sms), _along(levels, sms)
        yield _Part(step, states[order], rows, tokens, heads, items, features, levels, level_features, reach)


def _along(items: Ints, sms: int) -> Floats:
    """[items, 2] logs of items and of the waves that they make with one CTA per item, or of the part of a wave."""
    waves = np.minimum(np.ceil(items / sms), WAVES)
    for part in PARTS:
        waves = np.where(items * part <= sms, 1 / part, waves)
    found: Floats = np.log([items, waves]).T / [_NEAR["items"], _NEAR["waves"]]
    return found


def _loss(log_us: Floats) -> Floats:
    """[..., cells, states] over the fastest; inf without a time, 0 where nothing has one."""
    known = np.where(np.isnan(log_us), np.inf, log_us)
    best = known.min(axis=-1, keepdims=True)
    some = np.isfinite(best)
    loss: Floats = np.where(some, known, 0.0) - np.where(some, best, 0.0)
    return loss


def find_rows(grid: Grid, sms: int) -> Rows:
    """The rows of each step that has a time somewhere, and of each head count that its kind was measured with."""
    found: Rows = {}
    for part in _parts(grid, sms):
        loss = _loss(grid.log_us[np.ix_(part.rows, part.states)])[None]
        for heads in np.unique(part.heads).tolist():
            path, costs = _path(part, loss, heads)
            found.setdefault(part.step, {})[heads] = _row(part, path[0], costs[0], sms)
    return found


def _path(part: _Part, loss: Floats, heads: int) -> tuple[Ints, Floats]:
    """[batch, levels] states of a row, and [batch, levels, states] what they are expected to lose at a level."""
    costs = part.expected(np.where(np.isinf(loss), _NO_TIME, np.minimum(loss, _MOST)), heads)
    bounds = costs.copy()
    own = part.own(heads)
    bounds[:, np.searchsorted(part.levels, part.items[own])] = np.where(loss[:, own] <= math.log1p(TIE), 0.0, math.inf)
    return cheapest_path(bounds, _CHANGE * (1 - np.eye(loss.shape[2]))), costs


def _row(part: _Part, path: Ints, costs: Floats, sms: int) -> dict[int, int]:
    """Items -> candidate: from 1, and where a path changes."""
    row = {1: int(part.states[path[0]])}
    for n in range(1, len(part.levels)):
        before, after = path[n - 1], path[n]
        if before != after:
            low, high = (float(costs[m, before] - costs[m, after]) for m in (n - 1, n))
            cut = place_cut(int(part.levels[n - 1]), int(part.levels[n]), low, high, sms, PARTS)
            row[cut] = int(part.states[after])
    return row


def agreement(grid: Grid, draws: Ints, sms: int) -> Floats:
    """[cells] the share of resamples in which a cell's row has the same variant there; NaN where nothing has a time.

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
