"""What each candidate took in each cell, and what a way of choosing costs against the fastest.

Times enter as logarithms, so that costs are ratios: a miss of 30 % weighs as much as hundreds of
0.1 %.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kda_kernels import variants
from kdabench.data.measurements import Candidate, Cell, Measurement, canonical, cell_order
from kdabench.policy.constants import FITTED_KINDS, with_pdl

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Mask = NDArray[np.bool_]
Interval = tuple[int | None, int | None]
"""Of items; None is never."""

TIE = 0.005
"""Times closer than this, as a ratio, are a tie."""
CLIFF = 0.03
"""A step that is slower than one with more requests by more than this, as a ratio, stands on a
cliff."""
NOWHERE = -1
"""Index of the candidate where nothing can be picked."""
FLUSH = "flush"
"""What stands for a variant in replay cells: a flush and then the fastest record."""
_FLUSH_OPTIONS = canonical(with_pdl({}))
_UNLISTED_WEIGHT = 1e-6


class FitError(ValueError):
    """Records that no policy can be fitted on. One line with the reason."""


class Cells(tuple[Cell, ...]):
    """Cells in the order of records.cell_order, and what is often asked of them as arrays
    [cells]."""

    @cached_property
    def kinds(self) -> NDArray[np.str_]:
        return np.array([cell.kind for cell in self], dtype=np.str_)

    @cached_property
    def tokens(self) -> Ints:
        return np.array([cell.tokens for cell in self], dtype=np.int64)

    @cached_property
    def heads(self) -> Ints:
        return np.array([cell.heads for cell in self], dtype=np.int64)

    @cached_property
    def items(self) -> Ints:
        return np.array([cell.items for cell in self], dtype=np.int64)


@dataclass(frozen=True)
class Grid:
    """Measured steps of one input distribution.

    candidates  by variant and spec
    process_us  [cells, candidates, processes]  median of one process's samples; NaN where there is
                none
    weights     [cells]  1 in the mean
    """

    cells: Cells
    candidates: tuple[Candidate, ...]
    process_us: Floats
    weights: Floats

    @cached_property
    def log_us(self) -> Floats:
        """[cells, candidates] log of the median over processes; NaN where a candidate has no
        time."""
        log_us: Floats = np.log(_middle(self.process_us))
        return log_us

    @cached_property
    def best(self) -> Floats:
        """[cells] the smallest of `log_us`; NaN where nothing has a time."""
        best: Floats = np.fmin.reduce(self.log_us, axis=1, initial=np.nan)
        return best

    def of(self, variant: str) -> list[int]:
        """Indices of a variant's candidates."""
        return [i for i, candidate in enumerate(self.candidates) if candidate.variant == variant]

    def of_rule(self, rule: str) -> list[int]:
        """Indices of the candidates of the variant that a rule hands steps to."""
        variant = variants.of_rule(rule)
        return [] if variant is None else self.of(variant)

    @cached_property
    def by_options(self) -> dict[tuple[str, str], int]:
        """Index of a candidate by its variant and what `choose` calls its options."""
        return {
            (c.variant, canonical(with_pdl(c.options))): i for i, c in enumerate(self.candidates)
        }

    def draws(self, resamples: int, seed: int) -> Ints:
        """[resamples, cells, processes] processes drawn anew in each cell, with repetition."""
        # The raw stream of a bit generator is the same in every numpy; that of its distributions
        # need not be.
        cells, _, processes = self.process_us.shape
        raw = np.random.PCG64(seed).random_raw(resamples * cells * processes)
        draws: Ints = (
            (raw % np.uint64(processes)).astype(np.int64).reshape(resamples, cells, processes)
        )
        return draws

    def resampled(self, draw: Ints) -> Grid:
        """The grid with other processes: draw [cells, processes]."""
        return replace(
            self, process_us=np.take_along_axis(self.process_us, draw[:, None, :], axis=2)
        )

    def picked_us(self, picked: Ints) -> Floats:
        """[cells, processes] times of the picked candidates; NaN where there is none."""
        times = self.process_us[np.arange(len(self.cells)), picked]
        times[picked == NOWHERE] = np.nan
        return times


def resampled_log_us(process_us: Floats, draws: Ints) -> Floats:
    """[resamples, cells, ...] log of the medians of drawn processes. process_us: [cells, ...,
    processes]"""
    between = (None,) * (process_us.ndim - 2)
    at = draws[(slice(None), slice(None), *between)]
    log_us: Floats = np.log(_middle(np.take_along_axis(process_us[None], at, axis=-1)))
    return log_us


def _middle(values: Floats) -> Floats:
    """Median over the last axis without its NaNs; NaN if nothing is left."""
    count = np.sum(~np.isnan(values), axis=-1, keepdims=True)
    ranked = np.sort(values, axis=-1)  # NaNs last
    low = np.take_along_axis(ranked, np.maximum(count - 1, 0) // 2, axis=-1)
    high = np.take_along_axis(ranked, np.minimum(count // 2, values.shape[-1] - 1), axis=-1)
    middle: Floats = np.where(count > 0, (low + high) / 2, np.nan)[..., 0]
    return middle


def median(samples: Sequence[float]) -> float:
    ranked, half = sorted(samples), len(samples) // 2
    return ranked[half] if len(samples) % 2 else (ranked[half - 1] + ranked[half]) / 2


def check_comparable(measurements: Sequence[Measurement]) -> None:
    """Raises FitError unless all were timed in context `layer` and differ only in what a policy
    asks for."""
    contexts = {r.cell.context for r in measurements}
    if contexts - {"layer"}:
        raise FitError(
            f"context: {', '.join(sorted(contexts))}: a policy is fitted on context layer alone"
        )
    for axis in ("l2", "state_dtype", "conv_layout"):
        found = sorted({str(getattr(r.cell, axis)) for r in measurements})
        if len(found) > 1:
            raise FitError(f"{axis}: {', '.join(found)}: one policy is fitted on one of them")


def make_grid(
    measurements: Iterable[Measurement], weights: Mapping[int, float] | None = None
) -> Grid:
    """The grid of some records. A candidate that failed in any process of a cell has no time in it.

    weights  how often each request count occurs; each goes to the nearest measured count. None
             weighs all cells alike.
    """
    rows = [r for r in measurements if r.cell.kind in FITTED_KINDS]
    cells = sorted({r.cell for r in rows}, key=cell_order)
    candidates = sorted({r.candidate for r in rows}, key=lambda c: (c.variant, c.options_json))
    processes = sorted({r.process for r in rows})
    cell_at, candidate_at, process_at = (
        {k: i for i, k in enumerate(keys)} for keys in (cells, candidates, processes)
    )
    process_us = np.full((len(cells), len(candidates), max(1, len(processes))), np.nan)
    for r in rows:
        if r.status == "ok":
            process_us[cell_at[r.cell], candidate_at[r.candidate], process_at[r.process]] = median(
                r.samples_us
            )
    for r in rows:
        if r.status not in ("ok", "unstable"):
            process_us[cell_at[r.cell], candidate_at[r.candidate]] = np.nan
    return Grid(Cells(cells), tuple(candidates), process_us, _weights(cells, weights))


def _weights(cells: Sequence[Cell], histogram: Mapping[int, float] | None) -> Floats:
    if histogram is None:
        return np.ones(len(cells))
    for requests, weight in histogram.items():
        if type(requests) is not int or requests < 1 or not 0 <= weight < math.inf:
            raise FitError(
                f"weights: {requests}: {weight}: request counts >= 1 with finite weights >= 0"
            )
    found = np.full(len(cells), _UNLISTED_WEIGHT * (sum(histogram.values()) or 1.0))
    series: dict[tuple[object, ...], list[int]] = {}
    for i, cell in enumerate(cells):
        series.setdefault((cell.kind, cell.heads, cell.tokens), []).append(i)
    for rows in series.values():
        for requests, weight in histogram.items():
            distance = [abs(math.log(cells[i].requests / requests)) for i in rows]
            found[rows[int(np.argmin(distance))]] += weight
    return found * (len(cells) / float(found.sum()))


def picks(grid: Grid, ranked: Callable[..., Any]) -> Ints:
    """[cells] index of the first candidate of a policy's `ranked` choices that has a time."""
    found = np.full(len(grid.cells), NOWHERE)
    for row, cell in enumerate(grid.cells):
        for choice in ranked(cell.heads, cell.requests, cell.tokens, cell.kind):
            key = (
                (FLUSH, _FLUSH_OPTIONS)
                if choice.flush
                else (choice.variant, canonical(dict(choice.options)))
            )
            index = grid.by_options.get(key)
            if index is not None and not np.isnan(grid.log_us[row, index]):
                found[row] = index
                break
    return found


def log_regret(grid: Grid, picked: Ints) -> Floats:
    """[cells] log of the picked candidate's time over the best; NaN where it has none."""
    with_nowhere = np.column_stack([grid.log_us, np.full(len(grid.cells), np.nan)])
    regret: Floats = np.take_along_axis(with_nowhere, picked[:, None], axis=1)[:, 0] - grid.best
    return regret


@dataclass(frozen=True)
class Regret:
    """Of a way of choosing, over the cells where it has a time. All but counts are fractions: 0.01
    is 1 % slower.

    geomean    weighted geometric mean
    top1       share of cells where the fastest was chosen; only for information, ties make it
               misleading
    """

    cells: int
    geomean: float
    p99: float
    max: float
    worst: Cell
    top1: float


def summarize(grid: Grid, picked: Ints) -> dict[str, Regret]:
    """By kind, and over "all". Kinds without a single time are left out."""
    regret = log_regret(grid, picked)
    found = {}
    for kind in ("all", *FITTED_KINDS):
        rows = np.flatnonzero(~np.isnan(regret) & ((grid.cells.kinds == kind) | (kind == "all")))
        if not len(rows):
            continue
        ranked = np.sort(np.expm1(regret[rows]))
        found[kind] = Regret(
            cells=len(rows),
            geomean=math.expm1(float(np.average(regret[rows], weights=grid.weights[rows]))),
            p99=float(ranked[math.ceil(0.99 * len(rows)) - 1]),
            max=float(ranked[-1]),
            worst=grid.cells[rows[int(np.argmax(regret[rows]))]],
            top1=float(np.mean(regret[rows] == 0)),
        )
    return found


@dataclass(frozen=True)
class Gain:
    """What one way of choosing gains over another in geometric mean, as a fraction.

    low, high  90 % bootstrap interval over processes
    error      standard error
    """

    geomean: float
    low: float
    high: float
    error: float


@dataclass(frozen=True)
class Certificate:
    """Regret on cells that no fit has seen.

    bounds     "geomean", "p99", "max": upper ends of one-sided 95 % intervals, bootstrap over cells
               and processes
    baselines  of other ways of choosing. "only <variant>": with the options that are best on these
               very cells, but the one that has schedules with those of the policy
    uncovered  cells where none of the policy's choices has a time, though something has
    """

    cells: int
    regret: Mapping[str, Regret]
    bounds: Mapping[str, float]
    baselines: Mapping[str, Regret]
    uncovered: tuple[Cell, ...]


@dataclass(frozen=True)
class Cliff:
    """A step that takes longer than one with more requests, though some candidate wouldn't.

    faster  the fastest of the steps with more requests
    lost    ratio of the two times, minus 1
    rule    to blame: that of `faster` if its variant avoids the cliff, else the rule that decided
            in `cell`
    """

    cell: Cell
    faster: Cell
    lost: float
    rule: str


@dataclass(frozen=True)
class Evidence:
    """How good a policy is on the cells it was fitted on. No certificate: that takes cells measured
    afterwards.

    cells, without_winner   measured cells, and those in which nothing has a time
    uncovered               cells where none of the policy's choices has a time, though something
                            has
    statuses                of all records
    regret                  of the policy, by kind and over "all"
    baselines               the same of other ways of choosing: "only <variant>" with its own best
                            options; "thresholds and schedules", the policy without CHOICES; "one
                            window schedule", without WINDOW_SCHEDULE too; "not streamable" among
                            the variants that remain then; and "default schedule" if the kernel's
                            default was measured
    best_single_variant     the better of the "only ..." ways
    table_gain              what an unrestricted table, one entry per cell, would gain in geometric
                            mean
    entries                 of the rows that decide
    slower_than_default     cells where the policy loses to the default schedule by more than the
                            tie band: (cell, ratio lost); None if that wasn't measured
    cliffs                  of the policy, see Cliff
    intervals               STOCK_ITEMS by kind: 90 % bootstrap interval over processes, None with
                            fewer than two
    other_intervals         the same of other thresholds whose variant was measured, by name, then
                            kind or heads
    unsettled               cells where under 90 % of the resamples pick the policy's variant:
                            (cell, share)
    flips                   cells whose winner loses more than the tie band with generic inputs:
                            (cell, ratio lost)
    held                    variants that were measured but kept out of the policy, and why
    kept                    None, or why the constants are those of the policy before: the gain of
                            new ones
    certificate             what held-out cells say; None without such
    """

    cells: int
    without_winner: tuple[Cell, ...]
    uncovered: tuple[Cell, ...]
    statuses: Mapping[str, int]
    regret: Mapping[str, Regret]
    baselines: Mapping[str, Mapping[str, Regret]]
    best_single_variant: str | None
    table_gain: float
    entries: int
    slower_than_default: tuple[tuple[Cell, float], ...] | None
    cliffs: tuple[Cliff, ...]
    intervals: Mapping[str, Interval | None]
    other_intervals: Mapping[str, Mapping[str, Interval | None]]
    flips: tuple[tuple[Cell, float], ...]
    held: Mapping[str, str]
    unsettled: tuple[tuple[Cell, float], ...] = ()
    kept: Gain | None = None
    certificate: Certificate | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def count_statuses(measurements: Iterable[Measurement]) -> dict[str, int]:
    return dict(sorted(Counter(r.status for r in measurements).items()))


def slower_than(grid: Grid, picked: Ints, candidate: int) -> tuple[tuple[Cell, float], ...]:
    """Cells where what is picked is slower than a candidate by more than the tie band, and the
    ratio lost."""
    lost = log_regret(grid, picked) - (grid.log_us[:, candidate] - grid.best)
    return tuple(
        (grid.cells[row], math.expm1(lost[row])) for row in np.flatnonzero(lost > math.log1p(TIE))
    )


def find_cliffs(grid: Grid, picked: Ints, explain: Callable[..., Any]) -> tuple[Cliff, ...]:
    """Where a policy is slower than with more requests, of the same kind, tokens and heads; see
    Cliff."""
    times = log_regret(grid, picked) + grid.best
    limit = math.log1p(CLIFF)
    series: dict[tuple[object, ...], list[int]] = {}
    for at, cell in enumerate(grid.cells):
        if not np.isnan(times[at]):
            series.setdefault((cell.kind, cell.tokens, cell.heads), []).append(at)
    found = []
    for rows in series.values():
        rows.sort(key=lambda row: grid.cells[row].requests)
        for i, row in enumerate(rows[:-1]):
            faster = min(rows[i + 1 :], key=lambda other: times[other])
            if times[row] - times[faster] <= limit or grid.best[row] - times[faster] > limit:
                continue
            cell, other = grid.cells[row], grid.cells[faster]
            same = grid.of(grid.candidates[picked[faster]].variant)
            avoids = np.fmin.reduce(grid.log_us[row, same]) - times[faster] <= limit
            blamed = other if avoids else cell
            rule = explain(blamed.heads, blamed.requests, blamed.tokens, blamed.kind).rule
            found.append(Cliff(cell, other, math.expm1(times[row] - times[faster]), rule))
    return tuple(found)


def find_flips(grid: Grid, other: Grid) -> tuple[tuple[Cell, float], ...]:
    """Cells whose winner in `grid` is slower than the winner in `other` there, by more than the tie
    band."""
    place = {replace(cell, inputs="model"): row for row, cell in enumerate(other.cells)}
    index = {candidate: i for i, candidate in enumerate(other.candidates)}
    found = []
    for row, cell in enumerate(grid.cells):
        there = place.get(replace(cell, inputs="model"))
        if there is None or np.isnan(grid.best[row]):
            continue
        winner = index.get(grid.candidates[int(np.nanargmin(grid.log_us[row]))])
        lost = (
            math.nan if winner is None else float(other.log_us[there, winner] - other.best[there])
        )
        if lost > math.log1p(TIE):
            found.append((cell, math.expm1(lost)))
    return tuple(found)
