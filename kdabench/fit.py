"""Records -> policy: KdaSplit's schedules and the thresholds between variants, by exact search.

The cost of a policy is the weighted sum over cells of log(time of its choice / time of the best).

Kinds that share a schedule table are solved together (`FAMILIES`): a schedule must serve every token count and kind of
its (heads, requests), except where a threshold hands the step to another variant. So for each (heads, requests), a
*group*, the cost of the best common schedule is tabulated for every subset of the kinds that it may have to serve, and
a setting of the thresholds is a 0/1 row over groups: where KdaSplit serves. The cost of all pairs of settings of two
kinds then is one matrix product, and its minimum is exact.

Where WS_ITEMS, WS_SMALL, STREAM_ITEMS, STREAM_HEADS and WIDE_ITEMS go: they are further settings of a kind, that is
more rows of `_settings` (the product of their breakpoints), each with the cost of the groups it takes from KdaSplit.
FUSED_ITEMS compares whole steps, replay against flush and record; it needs no schedule and is a search of its own
over the breakpoints of each head count, after this one.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdabench import device, emit, provenance
from kdabench.policy import DEFAULT_GATE_MODE, STEP_KINDS, Options, Origin, Policy, with_pdl
from kdabench.problem import Problem
from kdabench.records import Cell, Record, SpecValue, dumps
from kdabench.regret import (
    NOWHERE,
    TIE,
    Evidence,
    FitError,
    Floats,
    Grid,
    Ints,
    check_comparable,
    count_statuses,
    find_flips,
    log_regret,
    make_grid,
    picks,
    summarize,
)

FAMILIES: dict[str, tuple[str, ...]] = {"schedule": ("decode",), "spec_schedule": ("record", "spec")}
"""Schedule tables and the kinds that share one; at most two."""
VERSIONS = ("cuda", "driver", "torch", "triton", "cutlass_dsl")

_NO_TIME = 1e4  # cost of a cell that gets no time: coverage comes before speed
_SAME = 1e-8  # costs closer than this differ by rounding only

Group = tuple[int, int]
"""(heads, requests)."""


def fit(
    records: Sequence[Record],
    envs: Mapping[str, Mapping[str, Any]],
    *,
    weights: Mapping[int, float] | None = None,
    default_schedule: Options | None = None,
    resamples: int = 100,
    seed: int = 0,
) -> tuple[Policy, Evidence]:
    """The policy of some records and what speaks for it. Same arguments, same result.

    envs              environments by digest, as records.load_envs gives them
    weights           request count -> how often it occurs; None weighs all cells alike
    default_schedule  KdaSplit's default options, to compare with; its spec may have more fields than were swept
    resamples, seed   of the bootstrap

    Raises FitError if there is nothing to fit, or if the records must not be mixed.
    """
    steps = [r for r in records if r.cell.kind in STEP_KINDS]
    check_comparable(steps)
    grid = make_grid((r for r in steps if r.cell.inputs == "model"), weights)
    if not grid.cells:
        raise FitError(f"no records of kind {', '.join(STEP_KINDS)} with inputs model: nothing to fit")
    stock = _best_single(grid, "stock")
    solved = {table: Family(grid, kinds, stock).solve() for table, kinds in FAMILIES.items()}
    policy = _policy(grid, stock, solved, _origin(records, envs))
    picked = picks(grid, emit.load(emit.emit(policy)).ranked)
    policy = replace(policy, measured=_margins(grid, picked))
    generic = make_grid(r for r in steps if r.cell.inputs == "generic")
    evidence = _evidence(grid, stock, solved, picked, default_schedule)
    intervals = _intervals(grid, stock, resamples, seed)
    flips = find_flips(grid, generic)
    return policy, replace(evidence, statuses=count_statuses(records), intervals=intervals, flips=flips)


def _best_single(grid: Grid, variant: str) -> int | None:
    """The variant's candidate that has a time in most cells, and of those the fastest over all."""
    relative = np.where(np.isnan(grid.log_us), _NO_TIME, grid.log_us - grid.best[:, None])
    costs = {i: float(grid.weights @ np.nan_to_num(relative[:, i], nan=_NO_TIME)) for i in grid.of(variant)}
    return min(costs, key=lambda i: (costs[i], i), default=None)


@dataclass(frozen=True)
class Solved:
    """A family's optimum.

    schedules  group -> index of the candidate
    cuts       kind -> items from which stock is taken; None is never
    cost       of the optimum before ties are broken, in log units
    """

    schedules: Mapping[Group, int]
    cuts: Mapping[str, int | None]
    cost: float


class Family:
    """The search over the cells of kinds that share a schedule table."""

    def __init__(self, grid: Grid, kinds: tuple[str, ...], stock: int | None) -> None:
        self.kinds = kinds
        self.candidates = grid.of("KdaSplit")
        ours = [*self.candidates, *([] if stock is None else [stock])]
        timeless = np.all(np.isnan(grid.log_us[:, ours]), axis=1)
        self.rows = [i for i, cell in enumerate(grid.cells) if cell.kind in kinds and not timeless[i]]
        self.cells = [grid.cells[i] for i in self.rows]
        self.weights = grid.weights[self.rows]
        self.stock_at = stock
        self._take_times(grid)
        self.groups: list[Group] = sorted({(c.heads, c.requests) for c in self.cells})
        place = {group: i for i, group in enumerate(self.groups)}
        self.group_of = np.array([place[c.heads, c.requests] for c in self.cells], dtype=np.int64)
        self.kind_of = np.array([kinds.index(c.kind) for c in self.cells], dtype=np.int64)
        self.items = np.array([c.items for c in self.cells], dtype=np.int64)
        # Of the first and the second kind; a family of one has no cells of a second, so one setting.
        self.points = [self._breakpoints(kind) for kind in (0, 1)]
        self.serves = [self._settings(points) for points in self.points]

    def _take_times(self, grid: Grid) -> None:
        """split [cells, schedules], stock [cells]: log of the time over the cell's best.

        schedule_cost [cells, schedules]: of serving a cell with a schedule. A schedule must work wherever any does; a
        cell where none does goes to stock.
        """
        relative = grid.log_us[self.rows] - grid.best[self.rows, None]
        self.split = relative[:, self.candidates]
        self.stock = np.full(len(self.rows), np.nan) if self.stock_at is None else relative[:, self.stock_at]
        hopeless = np.isnan(self.split).all(axis=1)
        otherwise = np.where(hopeless & ~np.isnan(self.stock), self.stock, _NO_TIME)[:, None]
        self.schedule_cost: Floats = np.where(np.isnan(self.split), otherwise, self.split) * self.weights[:, None]

    def resampled(self, grid: Grid) -> Family:
        """The same search on other times of the same cells."""
        other = copy(self)
        other._take_times(grid)
        return other

    def _sums(self, served: NDArray[np.bool_]) -> Floats:
        """[groups, schedules] cost of each schedule over the served cells. Cells without stock always are."""
        rows = served | np.isnan(self.stock)
        costs, groups = self.schedule_cost[rows].T, self.group_of[rows]
        return np.stack([np.bincount(groups, cost, len(self.groups)) for cost in costs], axis=1)

    def _served(self, kinds: Sequence[bool]) -> Floats:
        """[groups] cost of the best common schedule, if the kinds marked true are served by KdaSplit."""
        best: Floats = self._sums(np.array(kinds, dtype=bool)[self.kind_of]).min(axis=1)
        return best

    def _breakpoints(self, kind: int) -> Ints:
        """Item counts of a kind at which stock could be taken."""
        return np.unique(self.items[(self.kind_of == kind) & ~np.isnan(self.stock)])

    def _settings(self, points: Ints) -> Floats:
        """[settings, groups] all settings of a kind's thresholds: 1 where KdaSplit serves.

        Setting n hands all from breakpoint n on to stock; the last one nothing.
        """
        group_items = np.array([heads * requests for heads, requests in self.groups])
        ends = np.append(points, np.iinfo(np.int64).max)
        return (group_items[None, :] < ends[:, None]).astype(np.float64)

    def _others(self, kind: int) -> Floats:
        """[settings] cost of what KdaSplit doesn't serve."""
        mine = (self.kind_of == kind) & ~np.isnan(self.stock)
        cost = np.bincount(self.group_of[mine], (self.stock * self.weights)[mine], len(self.groups))
        others: Floats = cost.sum() - self.serves[kind] @ cost
        return others

    def solve(self) -> Solved:
        """The optimum, with ties between schedules broken."""
        if not self.candidates or not self.cells:
            return Solved({}, dict.fromkeys(self.kinds, 1 if self.cells else None), 0.0)
        settings, least = self._optimum()
        chosen = self._settle(self._served_under(settings))
        schedules = {group: self.candidates[s] for group, s in zip(self.groups, chosen, strict=True) if s != NOWHERE}
        return Solved(schedules, self._cuts(settings, chosen), least)

    def cuts(self) -> dict[str, int | None]:
        """Those of the optimum, with the best schedules, tied or not."""
        if not self.candidates or not self.cells:
            return dict(self.solve().cuts)
        settings, _ = self._optimum()
        return self._cuts(settings, self._sums(self._served_under(settings)).argmin(axis=1).tolist())

    def _served_under(self, settings: Sequence[int]) -> NDArray[np.bool_]:
        """[cells] whether KdaSplit serves, under one setting of each kind."""
        by_kind = np.stack([serves[n] for serves, n in zip(self.serves, settings, strict=True)])
        served: NDArray[np.bool_] = by_kind[self.kind_of, self.group_of] > 0
        return served

    def _optimum(self) -> tuple[tuple[int, int], float]:
        """The best setting of each kind, and its cost."""
        neither, second, first, both = (self._served(pair) for pair in product((False, True), repeat=2))
        serves_a, serves_b = self.serves
        cost = (self._others(0) + serves_a @ (first - neither))[:, None]
        cost = cost + (self._others(1) + serves_b @ (second - neither))[None, :]
        cost += neither.sum() + (serves_a * (both - first - second + neither)) @ serves_b.T
        least = float(cost.min())
        # Of equal costs the one that hands least to stock.
        n, m = np.argwhere(cost <= least + _SAME)[-1]
        return (int(n), int(m)), least

    def _cuts(self, settings: Sequence[int], chosen: Sequence[int]) -> dict[str, int | None]:
        return {kind: self._cut(i, settings[i], chosen) for i, kind in enumerate(self.kinds)}

    def _settle(self, served: NDArray[np.bool_]) -> list[int]:
        """[groups] index of the schedule, ties broken: see `settle`. A group that stock serves gets one too."""
        idle = np.isin(self.group_of, np.setdiff1d(self.group_of, self.group_of[served | np.isnan(self.stock)]))
        rows = served | idle
        sums = self._sums(rows)
        rows = rows | np.isnan(self.stock)
        slack = np.bincount(self.group_of[rows], self.weights[rows], len(self.groups)) * math.log1p(TIE)
        measured = ~np.isnan(self.split)
        usable = np.zeros(sums.shape, dtype=bool)
        np.logical_or.at(usable, self.group_of, measured)
        within = (sums <= (sums.min(axis=1) + slack + _SAME)[:, None]) & usable
        return settle(self.groups, [set(np.flatnonzero(row).tolist()) for row in within])

    def _cut(self, kind: int, setting: int, chosen: Sequence[int]) -> int | None:
        """Items from which stock is taken: inside the bracket of two breakpoints where the log ratio crosses zero."""
        points = self.points[kind]
        if setting == len(points):
            return None
        if setting == 0:
            return 1
        low, high = int(points[setting - 1]), int(points[setting])
        return place_cut(low, high, self._ratio(kind, low, chosen), self._ratio(kind, high, chosen))

    def _ratio(self, kind: int, items: int, chosen: Sequence[int]) -> float:
        """Mean log of KdaSplit's time over stock's in a kind's cells of one item count; NaN if there is none."""
        schedule = np.array(chosen)[self.group_of]
        rows = np.flatnonzero((self.kind_of == kind) & (self.items == items) & (schedule != NOWHERE))
        ratios = self.split[rows, schedule[rows]] - self.stock[rows]
        known = ~np.isnan(ratios)
        return float(np.average(ratios[known], weights=self.weights[rows][known])) if known.any() else math.nan


def place_cut(low: int, high: int, ratio_low: float, ratio_high: float) -> int:
    """The first item count above `low`, up to `high`, of the rule's other side.

    At the interpolated zero of the log ratio over log items; else at the geometric mean.
    """
    share = -ratio_low / (ratio_high - ratio_low) if ratio_low < 0 < ratio_high else 0.5
    position = math.exp(math.log(low) + share * math.log(high / low))
    return min(max(math.ceil(position - 1e-9 * position), low + 1), high)


def settle(groups: Sequence[Group], tied: Sequence[set[int]]) -> list[int]:
    """One schedule per group out of those tied there; NOWHERE where none is.

    Along a head count's requests as few changes as can be; then schedules that are tied in most groups, so that few
    distinct ones are left; then the lexicographically first.
    """
    popularity = Counter(s for choices in tied for s in choices)
    rank = {s: i for i, s in enumerate(sorted(popularity, key=lambda s: (-popularity[s], s)))}
    found = [NOWHERE] * len(groups)
    for heads in sorted({heads for heads, _ in groups}):
        rows = [i for i, group in enumerate(groups) if group[0] == heads and tied[i]]
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
    return min((changes + (s != schedule), ranks + r, (*path, r)) for s, (changes, ranks, path) in ways.items())


def _origin(records: Sequence[Record], envs: Mapping[str, Mapping[str, Any]]) -> Origin:
    used = [envs[digest] for digest in sorted({r.env for r in records}) if digest in envs]
    if not used:
        raise FitError("env: the records' environments are unknown: env.json is missing or of other records")
    try:
        provenance.check_mix(used)
        provenance.check_kernels(records)
    except provenance.ProvenanceError as error:
        raise FitError(str(error)) from None
    env = used[0]
    versions = {name: ", ".join(sorted({str(e[name]) for e in used if e.get(name)})) for name in VERSIONS}
    major, minor = str(env["capability"]).split(".")
    return Origin(
        device=env["gpu"],
        slug=device.slug(env["gpu"]),
        sms=env["sms"],
        capability=(int(major), int(minor)),
        digest="sha256:" + hashlib.sha256(dumps(records).encode()).hexdigest(),
        ok=sum(r.status == "ok" for r in records),
        total=len(records),
        versions={name: text for name, text in versions.items() if text},
    )


def _policy(grid: Grid, stock: int | None, solved: Mapping[str, Solved], origin: Origin) -> Policy:
    tables = {name: _table(grid, found.schedules) for name, found in solved.items()}
    cuts = {kind: cut for found in solved.values() for kind, cut in found.cuts.items()}
    return Policy(
        origin=origin,
        schedule=tables["schedule"],
        spec_schedule=tables["spec_schedule"],
        stock_items={kind: cuts[kind] for kind in STEP_KINDS},
        options={"stock": with_pdl({} if stock is None else grid.candidates[stock].spec)},
        policies=_keys(grid, tables),
    )


def _table(grid: Grid, schedules: Mapping[Group, int]) -> dict[int, dict[int, Options]]:
    table: dict[int, dict[int, Options]] = {}
    for (heads, requests), index in sorted(schedules.items()):
        table.setdefault(heads, {})[requests] = with_pdl(grid.candidates[index].spec)
    return table


def _keys(
    grid: Grid, tables: Mapping[str, Mapping[int, Mapping[int, Mapping[str, SpecValue]]]]
) -> dict[int, dict[tuple[int, int], tuple[int, int]]]:
    """heads -> (requests, tokens) -> (row pitch, gate mode of the key's schedule) of the measured keys."""
    found: dict[int, dict[tuple[int, int], tuple[int, int]]] = {}
    for heads, requests, tokens in sorted({(c.heads, c.requests, c.tokens) for c in grid.cells}):
        schedules = tables["schedule" if tokens == 1 else "spec_schedule"]
        mode = schedules.get(heads, {}).get(requests, {}).get("gate_mode", DEFAULT_GATE_MODE)
        found.setdefault(heads, {})[requests, tokens] = Problem("decode", 1, heads).pitch, int(mode)
    return found


def _margins(grid: Grid, picked: Ints) -> dict[str, dict[int, dict[int, dict[int, float | None]]]]:
    """What Policy.measured says, of the cells where the policy has a time."""
    found: dict[str, dict[int, dict[int, dict[int, float | None]]]] = {kind: {} for kind in STEP_KINDS}
    variants = np.array([c.variant for c in grid.candidates])
    for cell, mine, row in zip(grid.cells, picked, grid.log_us, strict=True):
        if mine == NOWHERE:
            continue
        other = float(np.fmin.reduce(row[variants != variants[mine]], initial=np.nan)) - float(row[mine])
        margin = None if math.isnan(other) else math.exp(other)
        found[cell.kind].setdefault(cell.heads, {}).setdefault(cell.tokens, {})[cell.requests] = margin
    return found


def _intervals(
    grid: Grid, stock: int | None, resamples: int, seed: int
) -> dict[str, tuple[int | None, int | None] | None]:
    """90 % interval of each stock threshold, by drawing each cell's processes anew; `never` counts as the largest."""
    cells, _, processes = grid.process_us.shape
    if processes < 2 or resamples < 2:
        return dict.fromkeys(STEP_KINDS)
    # The raw stream of a bit generator is the same in every numpy; that of its distributions need not be.
    stream = np.random.PCG64(seed)
    families = [Family(grid, kinds, stock) for kinds in FAMILIES.values()]
    values: dict[str, list[float]] = {kind: [] for kind in STEP_KINDS}
    for _ in range(resamples):
        draw = (stream.random_raw(cells * processes) % np.uint64(processes)).astype(np.int64)
        again = grid.resampled(draw.reshape(cells, processes))
        for family in families:
            for kind, cut in family.resampled(again).cuts().items():
                values[kind].append(math.inf if cut is None else cut)
    return {kind: _middle_90(sorted(found)) for kind, found in values.items()}


def _middle_90(ranked: Sequence[float]) -> tuple[int | None, int | None]:
    ends = ranked[int(0.05 * len(ranked))], ranked[math.ceil(0.95 * len(ranked)) - 1]
    low, high = (None if math.isinf(end) else int(end) for end in ends)
    return low, high


def _evidence(
    grid: Grid, stock: int | None, solved: Mapping[str, Solved], picked: Ints, default_schedule: Options | None
) -> Evidence:
    """All but what takes more than the grid."""
    split_picks = _split_everywhere(grid, solved)
    ways = {"only KdaSplit": split_picks, "only stock": _everywhere(grid, stock)}
    default = None if default_schedule is None else _matching(grid, default_schedule)
    if default is not None:
        ways["default schedule"] = _everywhere(grid, default)
    baselines = {name: found for name, way in ways.items() if (found := summarize(grid, way))}
    singles = [name for name in baselines if name.startswith("only ")]
    regret = summarize(grid, picked)
    return Evidence(
        cells=len(grid.cells),
        without_winner=_cells(grid, np.isnan(grid.best)),
        uncovered=_cells(grid, ~np.isnan(grid.best) & (picked == NOWHERE)),
        statuses={},
        regret=regret,
        baselines=baselines,
        best_single_variant=min(
            singles, key=lambda n: (-baselines[n]["all"].cells, baselines[n]["all"].geomean), default=None
        ),
        table_gain=regret["all"].geomean if regret else 0.0,
        token_tables_gain=_token_tables_gain(grid, picked),
        intervals={},
        flips=(),
    )


def _cells(grid: Grid, mask: NDArray[np.bool_]) -> tuple[Cell, ...]:
    return tuple(cell for cell, marked in zip(grid.cells, mask, strict=True) if marked)


def _everywhere(grid: Grid, candidate: int | None) -> Ints:
    return np.full(len(grid.cells), NOWHERE if candidate is None else candidate)


def _split_everywhere(grid: Grid, solved: Mapping[str, Solved]) -> Ints:
    schedules = {kind: solved[table].schedules for table, kinds in FAMILIES.items() for kind in kinds}
    return np.array([schedules[cell.kind].get((cell.heads, cell.requests), NOWHERE) for cell in grid.cells])


def _matching(grid: Grid, options: Options) -> int | None:
    """The KdaSplit candidate whose every field agrees with the options."""
    for i in grid.of("KdaSplit"):
        if all(options.get(key) == value for key, value in grid.candidates[i].spec.items()):
            return i
    return None


def _token_tables_gain(grid: Grid, picked: Ints) -> float:
    """Geometric mean of KdaSplit's time over its best schedule's, in the window cells where it is picked, minus 1."""
    split = np.array(grid.of("KdaSplit"), dtype=np.int64)
    rows = np.flatnonzero(np.isin(picked, split) & np.array([cell.kind != "decode" for cell in grid.cells]))
    if not len(rows):
        return 0.0
    best = np.nanmin(grid.log_us[np.ix_(rows, split)], axis=1) - grid.best[rows]
    return math.expm1(float(np.average(log_regret(grid, picked)[rows] - best, weights=grid.weights[rows])))
