"""Schedule tables: an entry for each measured request count, and one table that all windows can
share.

Of the variant that declares the rule `schedule`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from kdabench.data.measurements import Cell
from kdabench.policy.constants import WINDOW_KINDS, Options, ScheduleTable, with_pdl
from kdabench.policy.regret import NOWHERE, TIE, Grid, Mask
from kdabench.policy.thresholds.ladder import NO_TIME, SAME, Solved

Group = tuple[str, int, int, int]
"""(kind, tokens, heads, requests) that one entry of a table serves. Of the table that windows
share: ("", 0, ...)."""


def settle(groups: Sequence[tuple[Any, ...]], tied: Sequence[set[int]]) -> list[int]:
    """One schedule per group out of those tied there; NOWHERE where none is.

    Along the requests, the last entry of a group, as few changes as can be; then schedules that are
    tied in most groups, so that few distinct ones are left; then the lexicographically first.
    """
    popularity = Counter(s for choices in tied for s in choices)
    rank = {s: i for i, s in enumerate(sorted(popularity, key=lambda s: (-popularity[s], s)))}
    found = [NOWHERE] * len(groups)
    for series in sorted({group[:-1] for group in groups}):
        rows = [i for i, group in enumerate(groups) if group[:-1] == series and tied[i]]
        # Schedule -> (changes, ranks, path) of the best way to end there.
        ways: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        for i in rows:
            ways = {s: _extend(ways, s, rank) for s in tied[i]}
        if ways:
            path = min(ways.values())[2]
            for i, r in zip(rows, path, strict=True):
                found[i] = next(s for s in tied[i] if rank[s] == r)
    return found


def _extend(
    ways: Mapping[int, tuple[int, int, tuple[int, ...]]], schedule: int, rank: Mapping[int, int]
) -> tuple[int, int, tuple[int, ...]]:
    r = rank[schedule]
    if not ways:
        return 0, r, (r,)
    return min(
        (changes + (s != schedule), ranks + r, (*path, r))
        for s, (changes, ranks, path) in ways.items()
    )


def _own(cell: Cell) -> Group:
    return cell.kind, cell.tokens, cell.heads, cell.requests


def _shared(cell: Cell) -> Group:
    return "", 0, cell.heads, cell.requests


def own_schedules(grid: Grid) -> dict[Group, int]:
    """Index of the candidate that each cell has in the table of its kind and token count, ties
    settled."""
    found: dict[Group, int] = {}
    for kinds in (("decode",), WINDOW_KINDS):
        rows = np.isin(grid.cells.kinds, kinds)
        found |= _schedules(grid, rows, rows, _own)
    return found


def shared_schedules(grid: Grid, solved: Mapping[str, Solved]) -> dict[Group, int]:
    """The same of the table that all windows could share, over the cells that schedules serve."""
    rows = np.isin(grid.cells.kinds, WINDOW_KINDS)
    ours = np.logical_or.reduce([solved[kind].ours for kind in WINDOW_KINDS])
    return _schedules(grid, rows, ours, _shared)


def _schedules(
    grid: Grid, rows: Mask, served: Mask, group: Callable[[Cell], Group]
) -> dict[Group, int]:
    """The candidate of each group of some cells, ties settled. A group that isn't served anywhere
    gets one too.

    A schedule must work wherever any does.
    """
    candidates = grid.of_rule("schedule")
    times = grid.log_us[:, candidates] - grid.best[:, None]
    rows = rows & ~np.isnan(times).all(axis=1)
    of_cell = [group(cell) for cell in grid.cells]
    busy = {g for g, mine in zip(of_cell, rows & served, strict=True) if mine}
    rows = rows & (served | np.array([g not in busy for g in of_cell]))
    found = sorted({g for g, mine in zip(of_cell, rows, strict=True) if mine})
    place = {g: i for i, g in enumerate(found)}
    at = np.array([place[g] for g, mine in zip(of_cell, rows, strict=True) if mine], dtype=np.int64)
    weights, times = grid.weights[rows], times[rows]
    costs = np.nan_to_num(times, nan=NO_TIME) * weights[:, None]
    sums = np.zeros((len(found), len(candidates)))
    np.add.at(sums, at, costs)
    usable = np.zeros(sums.shape, dtype=bool)
    np.logical_or.at(usable, at, ~np.isnan(times))
    slack = np.bincount(at, weights, len(found)) * math.log1p(TIE)
    within = (sums <= (sums.min(axis=1, initial=np.inf) + slack + SAME)[:, None]) & usable
    chosen = settle(found, [set(np.flatnonzero(row).tolist()) for row in within])
    return {g: candidates[s] for g, s in zip(found, chosen, strict=True) if s != NOWHERE}


def table_of(
    grid: Grid, schedules: Mapping[Group, int], step: tuple[str, int]
) -> dict[int, dict[int, Options]]:
    table: dict[int, dict[int, Options]] = {}
    for (kind, tokens, heads, requests), index in sorted(schedules.items()):
        if (kind, tokens) == step:
            table.setdefault(heads, {})[requests] = with_pdl(grid.candidates[index].options)
    return table


def thinned(table: ScheduleTable) -> ScheduleTable:
    """Without the entries between two of the same schedule: the nearest entry says the same."""
    found: dict[int, dict[int, Options]] = {}
    for heads, row in table.items():
        runs = [
            [requests for requests, _ in run]
            for _, run in groupby(row.items(), key=lambda entry: entry[1])
        ]
        found[heads] = {requests: row[requests] for run in runs for requests in (run[0], run[-1])}
    return found
