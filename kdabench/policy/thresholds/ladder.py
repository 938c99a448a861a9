"""The thresholds between variants: one per variant and kind, the plain form of a policy. By exact
search.

A kind's thresholds are found by dynamic programming along its item counts. The state says which
thresholds are passed, and where WS_SMALL's island is: the first variant of the decision list that
is passed and has a time takes a cell, else the best schedule there. STREAM_HEADS goes around the
search, once for each of its breakpoints.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise, product

import numpy as np

from kda_kernels import variants
from kdabench.policy.regret import NOWHERE, Floats, Grid, Ints, Mask, log_regret

LADDER = ("ws_items", "stream_items", "wide_items", "stock_items")
"""Thresholds in the order of the decision list. Which variant each hands a step to the variants
say: `RULE`."""
BESIDE = {"ws_items": ("ws_small", "ws_small_end"), "stream_items": ("stream_heads",)}
"""Of kind record, what else hands a step to a threshold's variant."""

NO_TIME = 1e4  # cost of a cell that gets no time: coverage comes before speed
SAME = 1e-8  # costs closer than this differ by rounding only
WAVES = 12
"""Waves of CTAs, one per item and SM, whose ends matter: the share that one more adds falls."""

PARTS = (2, 4, 8)
"""Parts of a wave that end where a wave of a split does."""

Phase = int
"""Of a threshold: not passed, inside its island, behind the island, passed. Odd where its variant
takes the step."""
_BEFORE, _ISLAND, _BEHIND, _PASSED = range(4)
State = tuple[Phase, ...]
"""The phase of each threshold."""


def cheapest_path(cost: Floats, change: Floats) -> Ints:
    """[batch, levels] the states of the cheapest path; of equally cheap ones the first in order of
    states.

    cost    [batch, levels, states]  finite somewhere in every level
    change  [states, states]  from one state to the next level's; inf where that isn't allowed
    """
    rest = np.ascontiguousarray(
        np.moveaxis(cost, 0, 2)
    )  # [levels, states, batch]: long rows are the fast ones
    for later, level in pairwise(rest[::-1]):
        level += (change[:, :, None] + later).min(axis=1)
    path = np.zeros(cost.shape[:2], dtype=np.int64)
    ahead = np.zeros((cost.shape[2], len(cost)))
    for n, left in enumerate(rest):
        total = ahead + left
        path[:, n] = (total <= total.min(axis=0) + SAME).argmax(axis=0)
        ahead = change[path[:, n]].T
    return path


def best_of(grid: Grid, candidates: Sequence[int], rows: Mask) -> int:
    """The one of some candidates that has a time in most of the cells, and of those the fastest
    over all."""
    relative = np.nan_to_num(grid.log_us[:, candidates] - grid.best[:, None], nan=NO_TIME)
    return candidates[int(np.argmin((grid.weights * rows) @ relative))]


def singles(grid: Grid) -> dict[str, Ints]:
    """Variant -> [cells] its candidate: one for each kind and token count, of the last resort one
    for all.

    Of all variants but the one that has schedules; in the order of the thresholds, then of the
    registry.
    """
    found = {}
    takers = [variants.of_rule(rule) for rule in (*LADDER, "fused_items", "fused_ws_items")]
    ranked = [name for name in takers if name is not None]
    others = [
        name for name in variants.NAMES if name not in (*ranked, variants.of_rule("schedule"))
    ]
    steps = [(cell.kind, cell.tokens) for cell in grid.cells]
    of_step = {step: np.array([s == step for s in steps]) for step in set(steps)}
    for variant in (*ranked, *others):
        mine = grid.of(variant)
        if not mine:
            continue
        if variant == variants.of_rule("stock_items"):
            best = dict.fromkeys(of_step, best_of(grid, mine, np.ones(len(steps), dtype=bool)))
        else:
            best = {step: best_of(grid, mine, rows) for step, rows in of_step.items()}
        found[variant] = np.array([best[step] for step in steps])
    return found


@dataclass(frozen=True)
class Solved:
    """A kind's optimum.

    cuts    threshold -> items from which its variant takes the step; None is never. Those of
            LADDER, ws_small, ws_small_end and stream_heads
    ours    [cells of the grid]  whether a schedule serves: false for other kinds
    cost    of the optimum, with the best schedules, in log units
    """

    cuts: Mapping[str, int | None]
    ours: Mask
    cost: float


def solve(
    grids: Sequence[Grid], kind: str, of_variant: Mapping[str, Ints], sms: int
) -> list[Solved]:
    """The best thresholds of a kind in each of some grids of the same cells. of_variant: `singles`
    of one like them."""
    streams = kind == "record" and variants.of_rule("stream_items") in of_variant
    heads = sorted(set(grids[0].cells.heads.tolist())) if streams else []
    tried = [
        _solve([Search(grid, kind, of_variant, sms, least) for grid in grids])
        for least in (None, *reversed(heads))
    ]
    found = []
    for ways in zip(*tried, strict=True):
        least_cost = min(solved.cost for solved in ways)
        found.append(next(solved for solved in ways if solved.cost <= least_cost + SAME))
    return found


def _solve(searches: Sequence[Search]) -> list[Solved]:
    """Those with as many levels and the same states are solved at once: that takes little longer
    than one."""
    alike: dict[tuple[int, tuple[State, ...]], list[Search]] = {}
    for search in searches:
        alike.setdefault((len(search.levels), search.states), []).append(search)
    found: dict[Search, Solved] = {}
    for (_, states), group in alike.items():
        paths = cheapest_path(np.stack([search.bounded for search in group]), _changes(states))
        found |= {search: search.solved(path) for search, path in zip(group, paths, strict=True)}
    return [found[search] for search in searches]


class Search:
    """The search for one kind's thresholds, with STREAM_HEADS given."""

    def __init__(
        self,
        grid: Grid,
        kind: str,
        of_variant: Mapping[str, Ints],
        sms: int,
        stream_heads: int | None = None,
    ) -> None:
        of_kind = grid.cells.kinds == kind
        takers = {rule: variants.of_rule(rule) for rule in LADDER}
        times = {
            rule: log_regret(grid, of_variant[v])
            for rule, v in takers.items()
            if v is not None and v in of_variant
        }
        self.rules = [rule for rule, us in times.items() if not np.isnan(us[of_kind]).all()]
        split = (
            np.fmin.reduce(grid.log_us[:, grid.of_rule("schedule")], axis=1, initial=np.nan)
            - grid.best
        )
        any_time = ~np.isnan([split, *(times[rule] for rule in self.rules)]).all(axis=0)
        self.mask = of_kind & any_time
        self.sms = sms
        self.split: Floats = split[self.mask]
        self.times = [times[rule][self.mask] for rule in self.rules]
        self.weights = grid.weights[self.mask]
        self.stream_heads = stream_heads
        self.streams = grid.cells.heads[self.mask] >= (
            math.inf if stream_heads is None else stream_heads
        )
        self.levels, self.level_of = np.unique(grid.cells.items[self.mask], return_inverse=True)
        island = kind == "record"
        phases = [
            range(4) if island and rule == "ws_items" else (_BEFORE, _PASSED) for rule in self.rules
        ]
        # Of equally cheap paths the one that hands least to other variants.
        self.states: tuple[State, ...] = tuple(
            sorted(product(*phases), key=lambda state: (sum(p % 2 for p in state), state))
        )
        self.takes, self.values = self._outcomes()
        weighted: Floats = np.nan_to_num(self.values, nan=NO_TIME) * self.weights
        rows = [np.bincount(self.level_of, row, len(self.levels)) for row in weighted]
        self.cost: Floats = np.stack(
            rows, axis=1, dtype=np.float64
        )  # without a level they are integers

    def _outcomes(self) -> tuple[Ints, Floats]:
        """takes [states, cells] index of the threshold that takes it, NOWHERE: a schedule; values:
        the log time."""
        takes = np.full((len(self.states), len(self.split)), NOWHERE)
        values = np.full(takes.shape, np.nan)
        for take, value, state in zip(takes, values, self.states, strict=True):
            for i, (rule, phase, times) in enumerate(
                zip(self.rules, state, self.times, strict=True)
            ):
                holds = (phase % 2 == 1) | (self.streams & (rule == "stream_items"))
                free = np.isnan(value) & holds
                value[free] = times[free]
                take[free & ~np.isnan(times)] = i
            free = np.isnan(value)
            value[free] = self.split[free]
            # What nothing else has a time for goes to stock in the end, threshold or not.
            if "stock_items" in self.rules:
                free = np.isnan(value)
                value[free] = self.times[self.rules.index("stock_items")][free]
        return takes, values

    @property
    def bounded(self) -> Floats:
        """[levels, states] the cost, with the states in which no path may begin or end ruled
        out."""
        bounded = self.cost.copy()
        bounded[:1] += _changes(self.states)[self.states.index((_BEFORE,) * len(self.rules))]
        bounded[-1:, [_ISLAND in state for state in self.states]] = math.inf
        return bounded

    def solved(self, path: Ints) -> Solved:
        """path: [levels] index of the state"""
        cuts: dict[str, int | None] = dict.fromkeys(
            (*LADDER, "ws_small", "ws_small_end", "stream_heads")
        )
        ours = np.zeros(len(self.mask), dtype=bool)
        if not len(self.levels):
            return Solved(cuts, ours, 0.0)
        for i, rule in enumerate(self.rules):
            cuts[rule] = self._cut(path, i, _PASSED)
            if rule == "ws_items":
                cuts |= {
                    "ws_small": self._cut(path, i, _ISLAND),
                    "ws_small_end": self._cut(path, i, _BEHIND),
                }
        if "stock_items" in self.rules and np.isnan(self.split).all():
            cuts["stock_items"] = 1  # not a schedule that only other kinds were measured with
        cuts["stream_heads"] = self.stream_heads
        ours[self.mask] = self.takes[path[self.level_of], np.arange(len(self.split))] == NOWHERE
        return Solved(cuts, ours, float(self.cost[np.arange(len(path)), path].sum()))

    def _cut(self, path: Ints, rule: int, phase: Phase) -> int | None:
        """Items from which a rule is in a phase: in a bracket of two levels, where the log ratio
        crosses zero."""
        n = next((n for n, state in enumerate(path) if self.states[state][rule] == phase), None)
        if n is None:
            return None
        if n == 0:
            return 1
        low, high = (self._ratio(level, path[n - 1], path[n]) for level in (n - 1, n))
        return place_cut(int(self.levels[n - 1]), int(self.levels[n]), low, high, self.sms)

    def _ratio(self, level: int, before: int, after: int) -> float:
        """Mean log of the time in one state over that in another, in the cells of a level; NaN if
        there is none."""
        ratios = (self.values[before] - self.values[after])[self.level_of == level]
        known = ~np.isnan(ratios)
        weights = self.weights[self.level_of == level]
        return float(np.average(ratios[known], weights=weights[known])) if known.any() else math.nan


@cache
def _changes(states: tuple[State, ...]) -> Floats:
    """[states, states] as `cheapest_path` takes them."""
    return np.array(
        [[0.0 if _may_follow(before, after) else math.inf for after in states] for before in states]
    )


def _may_follow(before: State, after: State) -> bool:
    """Whether a state may follow, by items. An island is entered and left; what lies next to the
    rest is no island."""
    never = ((_BEFORE, _BEHIND), (_ISLAND, _PASSED))
    return all(a <= b and (a, b) not in never for a, b in zip(before, after, strict=True))


def place_cut(
    low: int,
    high: int,
    ratio_low: float,
    ratio_high: float,
    sms: int | None,
    parts: Sequence[int] = (),
) -> int:
    """The first item count above `low`, up to `high`, of the rule's other side.

    Where the items begin to exceed one of WAVES, or one of `parts` of a wave, if that lies between;
    else at the interpolated zero of the log ratio over log items; else at the end where the ratio
    is nearer to zero; else at the geometric mean. sms None: wherever waves end, it doesn't matter.
    """
    share = 0.5
    if ratio_low < 0 < ratio_high:
        share = -ratio_low / (ratio_high - ratio_low)
    elif abs(ratio_low) != abs(ratio_high):
        share = 1.0 if abs(ratio_high) < abs(ratio_low) else 0.0
    position = math.exp(math.log(low) + share * math.log(high / low))
    ends = (
        []
        if sms is None
        else [*(sms // part for part in parts), *(waves * sms for waves in range(1, WAVES + 1))]
    )
    between = [end + 1 for end in ends if low <= end < high]
    if between:
        return min(between, key=lambda first: abs(math.log(first / position)))
    return min(max(math.ceil(position - 1e-9 * position), low + 1), high)
