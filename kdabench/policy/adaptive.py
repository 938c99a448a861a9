"""Which cells of a sweep to measure, and in which order, so that few of them make a good policy.

A row is what differs in the requests alone. Its ends and a geometric selection between come first.
Between two measured neighbours a policy takes what is good at both, or changes from one's best to
the other's; in every unmeasured cell there the most that this can lose is bounded by

* the log ratio to each rival, interpolated over log items between its values at the two ends
* where a wave of CTAs ends, or one more than before must share an SM: what passes from w to w+1
  takes up to log((w + 1) / w) longer at once, though no longer than at the upper end, and no
  shorter than at the lower end before
* a bend of the log ratios, which grows with the width

What the cells between two neighbours could lose together is their bracket's potential: the larger,
the sooner one of them is measured, that with the largest bound. A bracket is closed when no cell's
bound is above the target, or above what the noise of its ends hides, or when its crossover has had
its cells. Later processes measure the same cells again: first those in which, within the noise, a
rival may be faster than the fastest by more than the target.

All of this follows from what was told, whatever the order: an interrupted sweep goes on as if it
had never stopped.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import pairwise

import numpy as np

from kda_kernels import variants
from kdabench.data.measurements import Candidate, Cell, Measurement
from kdabench.policy.regret import TIE, Floats, Ints
from kdabench.policy.thresholds.ladder import PARTS, place_cut

TARGET = 0.005
"""A cell that can't lose more than this, as a ratio, need not be measured."""
MOST = 15
"""Cells that one crossover gets, its row's first cells aside."""

_RATIO = 16.0  # of the requests of a row's first cells
_BEND = 0.02  # of a log ratio in the middle of a bracket whose items double, or more
_DOUBT = 2.0  # standard errors within which a rival may be the fastest after all
_UNKNOWN_RESIDENTS = (
    8  # up to how many CTAs per SM an edge is looked for where their number isn't known
)
_MEDIAN = 1.2533  # standard error of a median over that of a mean


def residents_of(candidate: Candidate) -> int:
    """CTAs that an SM holds at a time: as the spec says; 1 of a persistent variant, whose items an
    SM takes one after the other; 0 if that isn't known.
    """
    options = candidate.options
    return int(
        options.get("ctas")
        or options.get("ctas_per_sm")
        or candidate.variant in variants.streaming()
    )


def rows_of(cells: Sequence[Cell]) -> list[tuple[Cell, ...]]:
    """Cells that differ in their requests alone, ascending; rows in the order of their first
    cells."""
    found: dict[Cell, list[Cell]] = {}
    for cell in cells:
        found.setdefault(replace(cell, requests=1), []).append(cell)
    return [tuple(sorted(row, key=lambda cell: cell.requests)) for row in found.values()]


def part(cells: Sequence[Cell], k: int, n: int) -> tuple[Cell, ...]:
    """Every n-th row from the k-th on, in the order of `cells`: each part decides about its own
    rows."""
    mine = {cell for row in rows_of(cells)[k - 1 :: n] for cell in row}
    return tuple(cell for cell in cells if cell in mine)


def first_cells(row: Sequence[Cell]) -> list[int]:
    """Places of a row's ends and of the cells nearest to geometric steps between."""
    requests = np.log([cell.requests for cell in row])
    steps = max(1, round((requests[-1] - requests[0]) / math.log(_RATIO)))
    wanted = np.linspace(requests[0], requests[-1], steps + 1)
    return sorted({int(np.argmin(np.abs(requests - value))) for value in wanted})


@dataclass(frozen=True)
class _Seen:
    """What was measured in a cell.

    log_us  [candidates] log of the median; NaN without one
    error   [candidates] its standard error; NaN with fewer than two samples
    """

    log_us: Floats
    error: Floats

    @classmethod
    def of(cls, measurements: Sequence[Measurement], candidates: Sequence[Candidate]) -> _Seen:
        samples: dict[Candidate, list[float]] = {}
        for measurement in measurements:
            samples.setdefault(measurement.candidate, []).extend(measurement.samples_us)
        failed = {
            measurement.candidate for measurement in measurements if measurement.status != "ok"
        }
        log_us, error = np.full((2, len(candidates)), np.nan)
        for at, candidate in enumerate(candidates):
            logs = np.log(samples.get(candidate, []))
            if candidate in failed or not len(logs):
                continue
            log_us[at] = np.median(logs)
            if len(logs) > 1:
                error[at] = _MEDIAN * logs.std(ddof=1) / math.sqrt(len(logs))
        return cls(log_us, error)

    @property
    def timed(self) -> bool:
        return not bool(np.isnan(self.log_us).all())

    @property
    def noise(self) -> float:
        """The standard error of a candidate like others; 0 if none is known."""
        known = self.error[~np.isnan(self.error)]
        return float(np.median(known)) if len(known) else 0.0

    @property
    def doubt(self) -> float:
        """How much faster than the fastest some other candidate may be, in log units; below 0 if
        none may."""
        if not self.timed:
            return -math.inf
        fastest = int(np.nanargmin(self.log_us))
        reach = _DOUBT * np.hypot(self.error, self.error[fastest]) - (
            self.log_us - self.log_us[fastest]
        )
        reach[fastest] = np.nan
        return float(np.fmax.reduce(reach, initial=-math.inf))


@dataclass(frozen=True)
class _Bracket:
    """potential: what its cells could lose together; place: of the cell to measure, in the row"""

    potential: float
    place: int


@dataclass
class _Row:
    """
    splits     [candidates] CTAs per item
    residents  [candidates] CTAs that an SM holds at a time; 0 where that isn't known
    seen       by place, in process 0
    absent     places of which nothing can be had
    """

    cells: tuple[Cell, ...]
    splits: Ints
    residents: Ints
    target: float
    seen: dict[int, _Seen] = field(default_factory=dict)
    absent: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.items = np.array([cell.items for cell in self.cells])
        self.first = first_cells(self.cells)

    def widest(self, sms: int | None) -> _Bracket | None:
        """Of the brackets that are still open that with the largest potential."""
        found = (bracket for pair in pairwise(self.first) for bracket in self._open(*pair, sms))
        return max(found, key=lambda bracket: (bracket.potential, -bracket.place), default=None)

    def _open(self, low: int, high: int, sms: int | None) -> list[_Bracket]:
        """The open brackets between two of the first cells; none once their crossovers have had
        their cells."""
        places = [place for place in sorted(self.seen) if low <= place <= high]
        pairs = list(pairwise(places))
        crossovers = sum(self._common(*pair) is None for pair in pairs)
        if len(places) - 2 >= MOST * max(1, crossovers):
            return []
        found = (self._bracket(*pair, sms) for pair in pairs if pair[1] - pair[0] > 1)
        return [bracket for bracket in found if bracket is not None]

    def _bracket(self, low: int, high: int, sms: int | None) -> _Bracket | None:
        ends = self.seen[low], self.seen[high]
        width = math.log(self.items[high] / self.items[low])
        at = np.log(self.items[low + 1 : high] / self.items[low]) / width
        if all(end.timed for end in ends):
            bounds = self._bounds(low, high, at, width, sms)
        else:
            bounds = np.full(len(at), math.inf if any(end.timed for end in ends) else 0.0)
        bounds[[place - low - 1 for place in self.absent if low < place < high]] = 0.0
        if bounds.max() <= max(math.log1p(self.target), math.hypot(*(end.noise for end in ends))):
            return None
        # Of equally bad cells that nearest to the middle, then the smaller one.
        chosen = min(range(len(at)), key=lambda i: (-bounds[i], abs(at[i] - 0.5)))
        return _Bracket(float(bounds.sum()), low + 1 + chosen)

    def _ends(self, low: int, high: int) -> tuple[Floats, Floats]:
        """[candidates] log times at both ends. What has a time at one of them is taken to lose as
        much at the other."""
        a, b = self.seen[low].log_us, self.seen[high].log_us
        shift = np.nanmin(b) - np.nanmin(a)
        return np.where(np.isnan(a), b - shift, a), np.where(np.isnan(b), a + shift, b)

    def _common(self, low: int, high: int) -> int | None:
        """The candidate that is within the tie band of the best at both ends, if there is one."""
        if not (self.seen[low].timed and self.seen[high].timed):
            return None
        a, b = self._ends(low, high)
        lost = np.maximum(a - np.nanmin(a), b - np.nanmin(b))
        best = int(np.nanargmin(lost))
        return best if lost[best] <= math.log1p(TIE) else None

    def _picks(self, low: int, high: int, sms: int | None) -> Ints:
        """[cells between] what a policy takes that knows the two ends alone."""
        between = self.items[low + 1 : high]
        common = self._common(low, high)
        if common is not None:
            return np.full(len(between), common)
        a, b = self._ends(low, high)
        before, after = int(np.nanargmin(a)), int(np.nanargmin(b))
        ratios = float(a[before] - a[after]), float(b[before] - b[after])
        cut = place_cut(int(self.items[low]), int(self.items[high]), *ratios, sms, PARTS)
        return np.where(between < cut, before, after)

    def _bounds(self, low: int, high: int, at: Floats, width: float, sms: int | None) -> Floats:
        """[cells between] the most that a policy could lose, in log units. at: their places, 0 to
        1, of log items"""
        picks = self._picks(low, high, sms)
        a, b = self._ends(low, high)
        between = self.items[low + 1 : high]
        line = a + at[:, None] * (b - a)
        slower = np.minimum(self._jumps(self.items[low], between, sms), np.maximum(b - line, 0.0))
        faster = np.minimum(self._jumps(between, self.items[high], sms), np.maximum(line - a, 0.0))
        mine = np.arange(len(at)), picks
        alike = (self.splits == self.splits[picks][:, None]) & (
            self.residents == self.residents[picks][:, None]
        )
        jumps = np.where(alike, 0.0, slower[mine][:, None] + faster)
        bend = _BEND * min(1.0, width / math.log(2)) * 4 * at * (1 - at)
        lost = line[mine][:, None] - line + jumps + bend[:, None]
        lost[mine] = 0.0
        bounds: Floats = np.fmax.reduce(lost, axis=1)
        return bounds

    def _jumps(self, low: Ints, high: Ints, sms: int | None) -> Floats:
        """[cells, candidates] by how much an edge between `low` and `high` items raises a time at
        most."""
        jumps = np.zeros((np.broadcast(low, high).size, len(self.splits)))
        for n, (split, residents) in enumerate(zip(self.splits, self.residents, strict=True)):
            edges = _edges(int(residents), sms, int(self.items[-1] * split))
            ctas, raised = np.array(edges).reshape(-1, 2).T[..., None]
            passed = (low * split <= ctas) & (ctas < high * split)
            jumps[:, n] = np.where(passed, raised, 0.0).max(axis=0, initial=0.0)
        return jumps


@cache
def _edges(residents: int, sms: int | None, most: int) -> tuple[tuple[int, float], ...]:
    """CTAs, below `most`, beyond which a time steps up, and by how much at most: where the first SM
    gets one more than before, and where a wave of all residents is full."""
    if sms is None:
        return ()
    shared = [(n * sms, n) for n in range(1, residents or _UNKNOWN_RESIDENTS + 1)]
    waves = (
        [(n * residents * sms, n) for n in range(1, most // (residents * sms) + 1)]
        if residents
        else []
    )
    return tuple((ctas, math.log1p(1 / n)) for ctas, n in shared + waves if ctas < most)


class Course:
    """What an adaptive sweep measures next, as far as it was told: see the module.

    begun   cells that are measured in any case
    target  see TARGET
    most    cells to choose at most, the first ones of the rows among them; None: as many as the
            target asks for
    """

    def __init__(
        self,
        cells: Sequence[Cell],
        candidates: Sequence[Candidate],
        processes: int,
        begun: Collection[Cell] = (),
        target: float = TARGET,
        most: int | None = None,
    ) -> None:
        self._cells, self._candidates, self._processes = tuple(cells), tuple(candidates), processes
        self._target, self._most = target, len(cells) if most is None else most
        splits = np.array([int(c.options.get("split", 1)) for c in candidates])
        residents = np.array([residents_of(c) for c in candidates])
        self._rows = [_Row(row, splits, residents, target) for row in rows_of(cells)]
        self._place = {
            cell: (n, at) for n, row in enumerate(self._rows) for at, cell in enumerate(row.cells)
        }
        first = {row.cells[at] for row in self._rows for at in row.first}
        self._wanted = first | set(begun)
        self._told: dict[Cell, dict[int, list[Measurement]]] = {cell: {} for cell in cells}
        self._widest: dict[int, _Bracket | None] = {}
        self._doubts: dict[tuple[Cell, int], float] = {}
        self._sms: int | None = None

    @property
    def cells(self) -> tuple[Cell, ...]:
        """All cells that it chooses among."""
        return self._cells

    @property
    def total(self) -> int:
        """(cell, process) pairs in all: the most there may be, until the cells are chosen."""
        chosen = self._chosen
        if self._next_cell() is not None:
            chosen = min(len(self._cells), max(chosen + 1, self._most))
        return self._processes * chosen

    @property
    def _chosen(self) -> int:
        return sum(map(bool, self._told.values()))

    def tell(
        self, cell: Cell, process: int, outcomes: Sequence[Measurement], sms: int | None
    ) -> None:
        """What one process found in a cell, on a device with so many SMs (None: unknown).

        No outcomes at all: a recorded run that lacks the cell.
        """
        self._told[cell][process] = list(outcomes)
        self._doubts = {key: doubt for key, doubt in self._doubts.items() if key[0] != cell}
        if sms != self._sms:
            self._sms = sms
            self._widest.clear()
        if process == 0:
            n, at = self._place[cell]
            if outcomes:
                self._rows[n].seen[at] = _Seen.of(outcomes, self._candidates)
            else:
                self._rows[n].absent.add(at)
            self._widest.pop(n, None)

    def next(self) -> tuple[Cell, int] | None:
        """The cell and the process to measure; None when all is told that matters."""
        cell = self._next_cell()
        if cell is not None:
            return cell, 0
        for least in (math.log1p(self._target), -math.inf):
            for process in range(1, self._processes):
                left = [
                    cell for cell, told in self._told.items() if 0 in told and process not in told
                ]
                # One that was settled once stays so: each process number then takes two workers at
                # most.
                unsettled = [
                    cell
                    for cell in left
                    if all(self._doubt(cell, n) >= least for n in range(1, process + 1))
                ]
                if unsettled:
                    return max(unsettled, key=lambda cell: self._doubt(cell, process)), process
        return None

    def _next_cell(self) -> Cell | None:
        for cell, told in self._told.items():
            if 0 not in told and (told or cell in self._wanted):
                return cell
        if self._chosen >= self._most:
            return None
        for n, row in enumerate(self._rows):
            if n not in self._widest:
                self._widest[n] = row.widest(self._sms)
        found = [
            (bracket.potential, -n, bracket.place)
            for n, bracket in self._widest.items()
            if bracket is not None
        ]
        if not found:
            return None
        _, n, place = max(found)
        return self._rows[-n].cells[place]

    def _doubt(self, cell: Cell, process: int) -> float:
        """Of a cell's decision after the processes before."""
        if (cell, process) not in self._doubts:
            told = [
                r
                for earlier, measurements in self._told[cell].items()
                if earlier < process
                for r in measurements
            ]
            self._doubts[cell, process] = _Seen.of(told, self._candidates).doubt
        return self._doubts[cell, process]
