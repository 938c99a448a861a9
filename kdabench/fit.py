"""Records -> policy: KdaSplit's schedules and the thresholds between variants, by exact search.

The cost of a policy is the weighted sum over cells of log(time of its choice / time of the best).

Each (kind, tokens) has a schedule table of its own, so the schedule of a cell is free: KdaSplit costs what its best
schedule there costs, and the thresholds of one kind don't depend on those of another. A kind's thresholds are found by
dynamic programming along its item counts. The state says which thresholds are passed, and where WS_SMALL's island is:
the first variant of the decision list that is passed and has a time takes a cell, else KdaSplit. SPEC_SCHEDULE, the
best table that all windows could share, is fitted afterwards, on the cells that KdaSplit is left with.

Where STREAM_HEADS goes: around the search, once for each of its breakpoints. FUSED_ITEMS compares whole steps, replay
against flush and record; it needs no schedule and is a search of its own over the breakpoints of each head count.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, product
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kdabench import device, emit, provenance
from kdabench.policy import (
    DEFAULT_GATE_MODE,
    STEP_KINDS,
    WINDOW_KINDS,
    Options,
    Origin,
    Policy,
    ScheduleTable,
    with_pdl,
)
from kdabench.problem import Problem
from kdabench.records import Cell, Record, dumps
from kdabench.regret import (
    NOWHERE,
    TIE,
    Evidence,
    FitError,
    Floats,
    Grid,
    Interval,
    Ints,
    check_comparable,
    count_statuses,
    find_cliffs,
    find_flips,
    log_regret,
    make_grid,
    picks,
    slower_than,
    summarize,
)

LADDER = {"ws_items": "KdaWS", "stream_items": "KdaStream", "wide_items": "KdaWide", "stock_items": "stock"}
"""Thresholds and the variants that they hand a step to, in the order of the decision list."""
VERSIONS = ("cuda", "driver", "torch", "triton", "cutlass_dsl")

_NO_TIME = 1e4  # cost of a cell that gets no time: coverage comes before speed
_SAME = 1e-8  # costs closer than this differ by rounding only

Group = tuple[str, int, int, int]
"""(kind, tokens, heads, requests) that one entry of a table serves. Of the table that windows share: ("", 0, ...)."""
Phase = int
"""Of a threshold: not passed, inside its island, behind the island, passed. Odd where its variant takes the step."""
_BEFORE, _ISLAND, _BEHIND, _PASSED = range(4)
State = tuple[Phase, ...]
"""The phase of each threshold."""


def fit(
    records: Sequence[Record],
    envs: Mapping[str, Mapping[str, Any]],
    *,
    weights: Mapping[int, float] | None = None,
    default_schedule: Options | None = None,
    held: Mapping[str, str] | None = None,
    resamples: int = 100,
    seed: int = 0,
) -> tuple[Policy, Evidence]:
    """The policy of some records and what speaks for it. Same arguments, same result.

    envs              environments by digest, as records.load_envs gives them
    weights           request count -> how often it occurs; None weighs all cells alike
    default_schedule  KdaSplit's default options, to compare with; its spec may have more fields than were swept
    held              variants that were measured but must not be picked, and why
    resamples, seed   of the bootstrap

    Raises FitError if there is nothing to fit, or if the records must not be mixed.
    """
    held = held or {}
    steps = [r for r in records if r.cell.kind in STEP_KINDS and r.candidate.variant not in held]
    check_comparable(steps)
    grid = make_grid((r for r in steps if r.cell.inputs == "model"), weights)
    if not grid.cells:
        raise FitError(f"no records of kind {', '.join(STEP_KINDS)} with inputs model: nothing to fit")
    singles = _singles(grid)
    solved = {kind: Search(grid, kind, singles).solve() for kind in STEP_KINDS}
    own, shared = own_schedules(grid), shared_schedules(grid, solved)
    policy = _policy(grid, singles, solved, own, shared, _origin(records, envs))
    module = emit.load(emit.emit(policy))
    picked = picks(grid, module.ranked)
    policy = replace(policy, policies=_keys(grid, module), measured=_margins(grid, picked))
    ways = {"only KdaSplit": np.array([own.get(_own(cell), NOWHERE) for cell in grid.cells])}
    ways |= {f"only {variant}": single for variant, single in singles.items()}
    if policy.window_schedule:
        without = emit.load(emit.emit(replace(policy, window_schedule={})))
        ways["one window schedule"] = picks(grid, without.ranked)
    evidence = _evidence(grid, emit.load(emit.emit(policy)), picked, ways, default_schedule)
    generic = make_grid(r for r in steps if r.cell.inputs == "generic")
    intervals = _intervals(grid, singles, resamples, seed)
    return policy, replace(
        evidence,
        statuses=count_statuses(records),
        intervals=intervals.pop("stock_items"),
        other_intervals=intervals,
        flips=find_flips(grid, generic),
        held={name: why for name, why in sorted(held.items()) if any(r.candidate.variant == name for r in records)},
    )


def _best_single(grid: Grid, variant: str, rows: NDArray[np.bool_] | None = None) -> int | None:
    """The variant's candidate that has a time in most of the cells, and of those the fastest over all."""
    weights = grid.weights if rows is None else grid.weights * rows
    relative = np.nan_to_num(grid.log_us - grid.best[:, None], nan=_NO_TIME)
    costs = {i: float(weights @ relative[:, i]) for i in grid.of(variant)}
    return min(costs, key=lambda i: (costs[i], i), default=None)


def _singles(grid: Grid) -> dict[str, Ints]:
    """Variant -> [cells] its candidate: one for each kind and token count, of stock one for all."""
    found = {}
    steps = [(cell.kind, cell.tokens) for cell in grid.cells]
    for variant in LADDER.values():
        if not grid.of(variant):
            continue
        if variant == "stock":
            best = dict.fromkeys(steps, _best_single(grid, variant))
        else:
            best = {step: _best_single(grid, variant, np.array([s == step for s in steps])) for step in set(steps)}
        found[variant] = np.array([NOWHERE if (i := best[step]) is None else i for step in steps])
    return found


@dataclass(frozen=True)
class Solved:
    """A kind's optimum.

    cuts    threshold -> items from which its variant takes the step; None is never. Those of LADDER, ws_small and
            ws_small_end
    ours    [cells of the grid]  whether KdaSplit serves: false for other kinds
    cost    of the optimum, with the best schedules, in log units
    """

    cuts: Mapping[str, int | None]
    ours: NDArray[np.bool_]
    cost: float


class Search:
    """The search for one kind's thresholds."""

    def __init__(self, grid: Grid, kind: str, singles: Mapping[str, Ints]) -> None:
        of_kind = np.array([cell.kind == kind for cell in grid.cells])
        times = {rule: log_regret(grid, singles[v]) for rule, v in LADDER.items() if v in singles}
        self.rules = [rule for rule, us in times.items() if not np.isnan(us[of_kind]).all()]
        split = np.fmin.reduce(grid.log_us[:, grid.of("KdaSplit")], axis=1, initial=np.nan) - grid.best
        any_time = ~np.isnan([split, *(times[rule] for rule in self.rules)]).all(axis=0)
        self.mask = of_kind & any_time
        self.split: Floats = split[self.mask]
        self.times = [times[rule][self.mask] for rule in self.rules]
        self.weights = grid.weights[self.mask]
        items = np.array([cell.items for cell in grid.cells], dtype=np.int64)[self.mask]
        self.levels, self.level_of = np.unique(items, return_inverse=True)
        island = kind == "record"
        phases = [range(4) if island and rule == "ws_items" else (_BEFORE, _PASSED) for rule in self.rules]
        self.states: list[State] = list(product(*phases))
        self.takes, self.values = self._outcomes()

    def _outcomes(self) -> tuple[Ints, Floats]:
        """takes [states, cells] index of the threshold that takes it, NOWHERE: KdaSplit; values: the log time."""
        takes = np.full((len(self.states), len(self.split)), NOWHERE)
        values = np.full(takes.shape, np.nan)
        for take, value, state in zip(takes, values, self.states, strict=True):
            for i, (phase, times) in enumerate(zip(state, self.times, strict=True)):
                if phase % 2:
                    free = np.isnan(value)
                    value[free] = times[free]
                    take[free & ~np.isnan(times)] = i
            free = np.isnan(value)
            value[free] = self.split[free]
            # What nothing else has a time for goes to stock in the end, threshold or not.
            if "stock_items" in self.rules:
                free = np.isnan(value)
                value[free] = self.times[self.rules.index("stock_items")][free]
        return takes, values

    def solve(self) -> Solved:
        cuts: dict[str, int | None] = dict.fromkeys((*LADDER, "ws_small", "ws_small_end"))
        ours = np.zeros(len(self.mask), dtype=bool)
        if not len(self.levels):
            return Solved(cuts, ours, 0.0)
        path, cost = self._optimum()
        for i, rule in enumerate(self.rules):
            cuts[rule] = self._cut(path, i, _PASSED)
            if rule == "ws_items":
                cuts |= {"ws_small": self._cut(path, i, _ISLAND), "ws_small_end": self._cut(path, i, _BEHIND)}
        if "stock_items" in self.rules and np.isnan(self.split).all():
            cuts["stock_items"] = 1  # not a schedule that only other kinds were measured with
        ours[self.mask] = self.takes[np.array(path)[self.level_of], np.arange(len(self.split))] == NOWHERE
        return Solved(cuts, ours, cost)

    def _optimum(self) -> tuple[list[int], float]:
        """[levels] index of the state, and the cost. Of equal costs the path that hands least to other variants."""
        weighted = np.nan_to_num(self.values, nan=_NO_TIME) * self.weights
        cost = np.stack([np.bincount(self.level_of, row, len(self.levels)) for row in weighted], axis=1)
        follows = np.array([[_may_follow(a, b) for b in self.states] for a in self.states])
        # [levels + 1, states] cost of the best path from a level on; one must not end inside an island.
        rest = np.zeros((len(self.levels) + 1, len(self.states)))
        rest[-1, [_ISLAND in state for state in self.states]] = np.inf
        for n in reversed(range(len(self.levels))):
            rest[n] = cost[n] + np.where(follows, rest[n + 1], np.inf).min(axis=1)
        state = self.states.index((_BEFORE,) * len(self.rules))
        left = least = float(rest[0, follows[state]].min())
        order = sorted(range(len(self.states)), key=lambda i: (sum(p % 2 for p in self.states[i]), self.states[i]))
        path = []
        for n in range(len(self.levels)):
            state = next(i for i in order if follows[state, i] and rest[n, i] <= left + _SAME)
            left -= float(cost[n, state])
            path.append(state)
        return path, least

    def _cut(self, path: Sequence[int], rule: int, phase: Phase) -> int | None:
        """Items from which a rule is in a phase: in a bracket of two levels, where the log ratio crosses zero."""
        n = next((n for n, state in enumerate(path) if self.states[state][rule] == phase), None)
        if n is None:
            return None
        if n == 0:
            return 1
        low, high = (self._ratio(level, path[n - 1], path[n]) for level in (n - 1, n))
        return place_cut(int(self.levels[n - 1]), int(self.levels[n]), low, high)

    def _ratio(self, level: int, before: int, after: int) -> float:
        """Mean log of the time in one state over that in another, in the cells of a level; NaN if there is none."""
        ratios = (self.values[before] - self.values[after])[self.level_of == level]
        known = ~np.isnan(ratios)
        weights = self.weights[self.level_of == level]
        return float(np.average(ratios[known], weights=weights[known])) if known.any() else math.nan


def _may_follow(before: State, after: State) -> bool:
    """Whether a state may follow, by items. An island is entered and left; what lies next to the rest is no island."""
    never = ((_BEFORE, _BEHIND), (_ISLAND, _PASSED))
    return all(a <= b and (a, b) not in never for a, b in zip(before, after, strict=True))


def place_cut(low: int, high: int, ratio_low: float, ratio_high: float) -> int:
    """The first item count above `low`, up to `high`, of the rule's other side.

    At the interpolated zero of the log ratio over log items; else at the geometric mean.
    """
    share = -ratio_low / (ratio_high - ratio_low) if ratio_low < 0 < ratio_high else 0.5
    position = math.exp(math.log(low) + share * math.log(high / low))
    return min(max(math.ceil(position - 1e-9 * position), low + 1), high)


def settle(groups: Sequence[tuple[Any, ...]], tied: Sequence[set[int]]) -> list[int]:
    """One schedule per group out of those tied there; NOWHERE where none is.

    Along the requests, the last entry of a group, as few changes as can be; then schedules that are tied in most
    groups, so that few distinct ones are left; then the lexicographically first.
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
    return min((changes + (s != schedule), ranks + r, (*path, r)) for s, (changes, ranks, path) in ways.items())


def _own(cell: Cell) -> Group:
    return cell.kind, cell.tokens, cell.heads, cell.requests


def _shared(cell: Cell) -> Group:
    return "", 0, cell.heads, cell.requests


def own_schedules(grid: Grid) -> dict[Group, int]:
    """Index of the candidate that each cell has in the table of its kind and token count, ties settled."""
    found: dict[Group, int] = {}
    for kinds in (("decode",), WINDOW_KINDS):
        rows = np.array([cell.kind in kinds for cell in grid.cells])
        found |= _schedules(grid, rows, rows, _own)
    return found


def shared_schedules(grid: Grid, solved: Mapping[str, Solved]) -> dict[Group, int]:
    """The same of the table that all windows could share, over the cells that KdaSplit serves."""
    rows = np.array([cell.kind in WINDOW_KINDS for cell in grid.cells])
    ours = np.logical_or.reduce([solved[kind].ours for kind in WINDOW_KINDS])
    return _schedules(grid, rows, ours, _shared)


def _schedules(
    grid: Grid, rows: NDArray[np.bool_], served: NDArray[np.bool_], group: Callable[[Cell], Group]
) -> dict[Group, int]:
    """The candidate of each group of some cells, ties settled. A group that isn't served anywhere gets one too.

    A schedule must work wherever any does.
    """
    candidates = grid.of("KdaSplit")
    times = grid.log_us[:, candidates] - grid.best[:, None]
    rows = rows & ~np.isnan(times).all(axis=1)
    of_cell = [group(cell) for cell in grid.cells]
    busy = {g for g, mine in zip(of_cell, rows & served, strict=True) if mine}
    rows = rows & (served | np.array([g not in busy for g in of_cell]))
    found = sorted({g for g, mine in zip(of_cell, rows, strict=True) if mine})
    place = {g: i for i, g in enumerate(found)}
    at = np.array([place[g] for g, mine in zip(of_cell, rows, strict=True) if mine], dtype=np.int64)
    weights, times = grid.weights[rows], times[rows]
    costs = np.nan_to_num(times, nan=_NO_TIME) * weights[:, None]
    sums = np.zeros((len(found), len(candidates)))
    np.add.at(sums, at, costs)
    usable = np.zeros(sums.shape, dtype=bool)
    np.logical_or.at(usable, at, ~np.isnan(times))
    slack = np.bincount(at, weights, len(found)) * math.log1p(TIE)
    within = (sums <= (sums.min(axis=1, initial=np.inf) + slack + _SAME)[:, None]) & usable
    chosen = settle(found, [set(np.flatnonzero(row).tolist()) for row in within])
    return {g: candidates[s] for g, s in zip(found, chosen, strict=True) if s != NOWHERE}


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


def _policy(
    grid: Grid,
    singles: Mapping[str, Ints],
    solved: Mapping[str, Solved],
    own: Mapping[Group, int],
    shared: Mapping[Group, int],
    origin: Origin,
) -> Policy:
    """All but what takes the emitted module."""
    cuts = {rule: {kind: solved[kind].cuts[rule] for kind in STEP_KINDS} for rule in LADDER}
    steps = sorted({(kind, tokens) for kind, tokens, _, _ in own if kind in WINDOW_KINDS})
    stock = singles.get("stock")
    return Policy(
        origin=origin,
        schedule=_table(grid, own, ("decode", 1)),
        spec_schedule=_table(grid, shared, ("", 0)),
        window_schedule={step: _thinned(_table(grid, own, step)) for step in steps},
        ws_items=cuts["ws_items"],
        stream_items=cuts["stream_items"],
        wide_items=cuts["wide_items"],
        stock_items=cuts["stock_items"],
        ws_small=solved["record"].cuts["ws_small"],
        ws_small_end=solved["record"].cuts["ws_small_end"],
        options={"stock": with_pdl({} if stock is None else grid.candidates[stock[0]].spec)},
        step_options=_step_options(grid, singles, solved),
        policies={},
    )


def _table(grid: Grid, schedules: Mapping[Group, int], step: tuple[str, int]) -> dict[int, dict[int, Options]]:
    table: dict[int, dict[int, Options]] = {}
    for (kind, tokens, heads, requests), index in sorted(schedules.items()):
        if (kind, tokens) == step:
            table.setdefault(heads, {})[requests] = with_pdl(grid.candidates[index].spec)
    return table


def _thinned(table: ScheduleTable) -> ScheduleTable:
    """Without the entries between two of the same schedule: the nearest entry says the same."""
    found: dict[int, dict[int, Options]] = {}
    for heads, row in table.items():
        runs = [[requests for requests, _ in run] for _, run in groupby(row.items(), key=lambda entry: entry[1])]
        found[heads] = {requests: row[requests] for run in runs for requests in (run[0], run[-1])}
    return found


def _step_options(
    grid: Grid, singles: Mapping[str, Ints], solved: Mapping[str, Solved]
) -> dict[str, dict[tuple[str, int], Options]]:
    """Options of the variants that some threshold hands a step to, but stock."""
    found: dict[str, dict[tuple[str, int], Options]] = {}
    for rule, variant in LADDER.items():
        for cell, index in zip(grid.cells, singles.get(variant, ()), strict=variant in singles):
            taken = [solved[cell.kind].cuts[rule]]
            if rule == "ws_items" and cell.kind == "record":
                taken.append(solved["record"].cuts["ws_small"])
            if variant != "stock" and index != NOWHERE and any(cut is not None for cut in taken):
                found.setdefault(variant, {})[cell.kind, cell.tokens] = with_pdl(grid.candidates[index].spec)
    return found


def _keys(grid: Grid, module: ModuleType) -> dict[int, dict[tuple[int, int], tuple[int, int]]]:
    """heads -> (requests, tokens) -> (row pitch, gate mode of the key's schedule) of the measured keys.

    Of kind record, where both kinds of window were measured.
    """
    found: dict[int, dict[tuple[int, int], tuple[int, int]]] = {}
    for heads, requests, tokens, kind in sorted({(c.heads, c.requests, c.tokens, c.kind) for c in grid.cells}):
        if (requests, tokens) in found.get(heads, {}):
            continue  # record sorts before spec
        ranked = module.ranked(heads, requests, tokens, kind)
        options: Options = next((c.options for c in ranked if c.variant == "KdaSplit"), {})
        mode = int(options.get("gate_mode", DEFAULT_GATE_MODE))
        found.setdefault(heads, {})[requests, tokens] = Problem("decode", 1, heads).pitch, mode
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
    grid: Grid, singles: Mapping[str, Ints], resamples: int, seed: int
) -> dict[str, dict[str, Interval | None]]:
    """Threshold -> kind -> 90 % interval, by drawing each cell's processes anew; `never` counts as the largest.

    Only thresholds whose variant was measured, and stock's.
    """
    rules = [rule for rule, variant in LADDER.items() if variant in singles or variant == "stock"]
    cells, _, processes = grid.process_us.shape
    if processes < 2 or resamples < 2:
        return {rule: dict.fromkeys(STEP_KINDS) for rule in rules}
    # The raw stream of a bit generator is the same in every numpy; that of its distributions need not be.
    stream = np.random.PCG64(seed)
    values: dict[tuple[str, str], list[float]] = {}
    for _ in range(resamples):
        draw = (stream.random_raw(cells * processes) % np.uint64(processes)).astype(np.int64)
        again = grid.resampled(draw.reshape(cells, processes))
        for kind in STEP_KINDS:
            cuts = Search(again, kind, singles).solve().cuts
            for rule in rules:
                cut = cuts[rule]
                values.setdefault((rule, kind), []).append(math.inf if cut is None else cut)
    return {rule: {kind: _middle_90(sorted(values[rule, kind])) for kind in STEP_KINDS} for rule in rules}


def _middle_90(ranked: Sequence[float]) -> Interval:
    ends = ranked[int(0.05 * len(ranked))], ranked[math.ceil(0.95 * len(ranked)) - 1]
    low, high = (None if math.isinf(end) else int(end) for end in ends)
    return low, high


def _evidence(
    grid: Grid, module: ModuleType, picked: Ints, ways: dict[str, Ints], default_schedule: Options | None
) -> Evidence:
    """All but what takes more than the grid."""
    default = None if default_schedule is None else _matching(grid, default_schedule)
    if default is not None:
        ways["default schedule"] = np.full(len(grid.cells), default)
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
        slower_than_default=None if default is None else slower_than(grid, picked, default),
        cliffs=find_cliffs(grid, picked, module.explain),
        intervals={},
        other_intervals={},
        flips=(),
        held={},
    )


def _cells(grid: Grid, mask: Iterable[bool]) -> tuple[Cell, ...]:
    return tuple(cell for cell, marked in zip(grid.cells, mask, strict=True) if marked)


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
