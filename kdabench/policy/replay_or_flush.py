"""Replay or flush: whole steps compared, a replay against a flush (an FP32 commit) and the record
that follows it.

A flush commits all layers in one launch; what a layer pays is its share. So of the flush cells
those with the most layers count, whatever their context: such a launch has no layer's neighbours.
Between their item counts the share is interpolated, log over log; above them it grows with the
items, below them it stays. An adaptive sweep need not have measured the record of every replay:
between the requests that it has, the fastest record's time is taken as linear.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from kdabench.data.measurements import Candidate, Measurement, OptionValue, canonical
from kdabench.policy.constants import Options
from kdabench.policy.regret import FLUSH, Floats, Grid, Ints, Mask, log_regret, median
from kdabench.policy.thresholds.ladder import NO_TIME, SAME, best_of, cheapest_path, place_cut

PENDING = "mix"
"""The pending tokens for which the policy is fitted."""
_CHANGE = 0.01  # cost of another split, in log units


def with_flush(grid: Grid, measurements: Iterable[Measurement]) -> Grid:
    """The grid with one more candidate, FLUSH: in replay cells a flush and the fastest record,
    elsewhere no time."""
    if not any(cell.kind == "replay" for cell in grid.cells):
        return grid
    flushes = _FlushTimes.of(measurements, grid)
    rows: dict[tuple[int, int], list[int]] = {}
    for i in sorted(
        np.flatnonzero(~np.isnan(grid.best)).tolist(), key=lambda i: grid.cells[i].items
    ):
        if grid.cells[i].kind == "record":
            rows.setdefault((grid.cells[i].heads, grid.cells[i].tokens), []).append(i)
    column = np.full((len(grid.cells), 1, grid.process_us.shape[2]), np.nan)
    for i, cell in enumerate(grid.cells):
        if cell.kind == "replay":
            row = rows.get((cell.heads, cell.tokens), [])
            measured = ~np.isnan(grid.process_us[i]).all(axis=0)
            column[i, 0, measured] = flushes.us(cell.items, cell.tokens) + _record_us(
                grid, row, cell.items
            )
    candidates = (*grid.candidates, Candidate.of(FLUSH, {}))
    return replace(
        grid, candidates=candidates, process_us=np.concatenate([grid.process_us, column], axis=1)
    )


def _record_us(grid: Grid, row: Sequence[int], items: int) -> float:
    """Of the fastest record at so many items; NaN beyond what was measured. row: its cells by their
    items"""
    if not row:
        return math.nan
    known = [grid.cells[i].items for i in row]
    return float(np.interp(items, known, np.exp(grid.best[row]), left=np.nan, right=np.nan))


@dataclass(frozen=True)
class _FlushTimes:
    """tokens -> items -> microseconds a layer, in ascending order of both."""

    shares: Mapping[int, Mapping[int, float]]

    @classmethod
    def of(cls, measurements: Iterable[Measurement], grid: Grid) -> _FlushTimes:
        dtypes = {cell.state_dtype for cell in grid.cells if cell.kind == "replay"}
        rows = [
            r
            for r in measurements
            if (r.cell.kind, r.cell.pending, r.cell.inputs) == ("flush", PENDING, "model")
            and r.cell.state_dtype in dtypes
        ]
        failed = {(r.cell, r.candidate) for r in rows if r.status not in ("ok", "unstable")}
        by_process: dict[tuple[int, int, int, Candidate], list[float]] = {}
        for r in rows:
            if r.status == "ok" and (r.cell, r.candidate) not in failed:
                key = r.cell.tokens, r.cell.layers, r.cell.items, r.candidate
                by_process.setdefault(key, []).append(median(r.samples_us) / r.cell.layers)
        most = {
            tokens: max(n for t, n, _, _ in by_process if t == tokens)
            for tokens, _, _, _ in by_process
        }
        shares: dict[int, dict[int, float]] = {}
        for (tokens, layers, items, _), us in by_process.items():
            if layers == most[tokens]:
                row = shares.setdefault(tokens, {})
                row[items] = min(median(us), row.get(items, math.inf))
        return cls({tokens: dict(sorted(row.items())) for tokens, row in sorted(shares.items())})

    def us(self, items: int, tokens: int) -> float:
        """A layer's share, with the nearest token count; NaN if nothing was measured."""
        if not self.shares:
            return math.nan
        row = self.shares[min(self.shares, key=lambda n: abs(math.log(n / tokens)))]
        known = list(row)
        beyond = max(0.0, math.log(items / known[-1]))
        log_us = np.interp(math.log(items), np.log(known), np.log(list(row.values())))
        return math.exp(float(log_us) + beyond)


@dataclass(frozen=True)
class Fused:
    """The thresholds of replays; see policy.Policy. options: of what replays at few items, but
    `split`"""

    items: Mapping[int, int | None]
    default_items: int | None
    options: Options
    split: Mapping[int, int]
    ws_items: int | None


def solve(grid: Grid, picked: Ints, sms: int) -> Fused:
    """The best thresholds, each by exact search.

    picked  [cells] the candidate that replays, where one does
    """
    of_kind = grid.cells.kinds == "replay"
    if not of_kind.any() or not any(c.variant == FLUSH for c in grid.candidates):
        return Fused({}, None, {}, {}, None)
    replayed = np.where(of_kind, log_regret(grid, picked), np.nan)
    flush = np.where(of_kind, log_regret(grid, np.full(len(grid.cells), grid.of(FLUSH)[0])), np.nan)
    heads = grid.cells.heads
    per_heads = {
        h: _threshold(grid, flush, replayed, heads == h)
        for h in sorted(set(heads[of_kind].tolist()))
    }
    forms = _forms(grid, of_kind, sms)
    default_items = _threshold(grid, flush, replayed, of_kind)
    return Fused(per_heads, default_items, forms.options, forms.split, forms.ws_items)


def _threshold(grid: Grid, below: Floats, above: Floats, mask: Mask) -> int | None:
    """Items from which `above` is to be taken. Of equally good ones the largest; None is never."""
    known = mask & ~(np.isnan(below) & np.isnan(above))
    levels, costs = _by_items(grid, np.stack([below, above], axis=1), known)
    if not len(levels):
        return None
    # Of a cut before each level, and of none.
    total = np.append(0.0, np.cumsum(costs[:, 0])) + np.append(np.cumsum(costs[::-1, 1])[::-1], 0.0)
    n = int(np.flatnonzero(total <= total.min() + SAME)[-1])
    return None if n == len(levels) else _cut(levels, costs, n, 0, 1, None)


def _by_items(grid: Grid, lost: Floats, known: Mask) -> tuple[Ints, Floats]:
    """The levels of items, and [levels, ways] what each way loses there. lost: [cells, ways]"""
    levels, level_of = np.unique(grid.cells.items[known], return_inverse=True)
    costs = np.zeros((len(levels), lost.shape[1]))
    np.add.at(costs, level_of, np.nan_to_num(lost[known], nan=NO_TIME) * grid.weights[known, None])
    return levels, costs


def _cut(levels: Ints, costs: Floats, n: int, before: int, after: int, sms: int | None) -> int:
    """Items from which on `after` is taken, that `_by_items` has from level n on."""
    if n == 0:
        return 1
    low, high = (float(costs[m, before] - costs[m, after]) for m in (n - 1, n))
    return place_cut(int(levels[n - 1]), int(levels[n]), low, high, sms)


@dataclass(frozen=True)
class _Forms:
    """How replays are done by items alone, and what that costs."""

    cost: float
    options: Options
    split: Mapping[int, int]
    ws_items: int | None


def _forms(grid: Grid, of_kind: Mask, sms: int) -> _Forms:
    """Of what `fused_items` hands steps to: options, and split by items. And where `fused_ws_items`
    takes over.

    Searched together.
    """
    families: dict[str, list[int]] = {}
    for i in grid.of_rule("fused_items"):
        families.setdefault(canonical(_but_split(grid, i)), []).append(i)
    found = [_form(grid, family, of_kind, sms) for _, family in sorted(families.items())]
    found = found or [_form(grid, [], of_kind, sms)]
    return min(found, key=lambda form: form.cost)


def _but_split(grid: Grid, index: int) -> dict[str, OptionValue]:
    return {
        name: value for name, value in grid.candidates[index].options.items() if name != "split"
    }


def _form(grid: Grid, family: Sequence[int], of_kind: Mask, sms: int) -> _Forms:
    """The best form with some candidates for few items, which differ in their split alone."""
    splits = [int(grid.candidates[i].options.get("split", 1)) for i in family]
    streaming = grid.of_rule("fused_ws_items")
    ways = [*family, *([best_of(grid, streaming, of_kind)] if streaming else [])]
    options = _but_split(grid, family[0]) if family else {}
    lost = grid.log_us[:, ways] - grid.best[:, None]
    levels, costs = _by_items(grid, lost, of_kind & ~np.isnan(lost).all(axis=1))
    if not len(levels):
        return _Forms(math.inf, options, {}, None)
    change = _CHANGE * (1 - np.eye(len(ways)))
    if streaming:
        change[-1, :-1] = math.inf
    path = cheapest_path(costs[None], change)[0].tolist()
    cost = sum(float(row[way]) for row, way in zip(costs, path, strict=True))
    split: dict[int, int] = {}
    ws_items = None
    for n, way in enumerate(path):
        if n == 0 or way != path[n - 1]:
            items = _cut(levels, costs, n, path[n - 1], way, sms)
            if way < len(splits):
                split[items] = splits[way]
            else:
                ws_items = items
    return _Forms(cost, options, split, ws_items)
