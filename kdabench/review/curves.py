"""What a figure shows, as data: records grouped by question, timings, picks, regrets."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from kda_kernels.problem import Kind, Pending, StateDtype
from kdabench.data.measurements import Candidate, Cell, Context, Measurement

_QUESTION = (
    "kind",
    "tokens",
    "layers",
    "state_dtype",
    "pending",
    "conv_layout",
    "context",
    "l2",
    "inputs",
)
_ORDINARY = {
    "state_dtype": "fp32",
    "conv_layout": "dim-first",
    "context": "layer",
    "l2": "cold",
    "inputs": "model",
}


@dataclass(frozen=True)
class Question:
    """What the cells of one figure have in common: everything but requests and heads."""

    kind: Kind
    tokens: int
    layers: int
    state_dtype: StateDtype
    pending: Pending
    conv_layout: str
    context: Context
    l2: str
    inputs: str

    @classmethod
    def of(cls, cell: Cell) -> Question:
        return cls(**{name: getattr(cell, name) for name in _QUESTION})

    @property
    def stem(self) -> str:
        """File name: kind and tokens, then whatever differs from what policies are fitted on."""
        parts = [self.kind, f"q{self.tokens}"]
        parts += [f"{self.layers}layers"] * (self.layers != 1)
        parts += [f"n{self.pending}"] * (self.pending is not None)
        parts += [
            getattr(self, name) for name, usual in _ORDINARY.items() if getattr(self, name) != usual
        ]
        return "-".join(parts)

    @property
    def title(self) -> str:
        pending = f", {self.pending} pending" if self.pending is not None else ""
        return f"{self.kind}, {count(self.tokens, 'token')}{pending}"

    @property
    def circumstances(self) -> str:
        parts = [f"{self.state_dtype.upper()} state", f"context {self.context}", f"{self.l2} L2"]
        parts += [f"{self.conv_layout} window"] * (self.conv_layout != "dim-first")
        parts += [f"{self.inputs} inputs"] * (self.inputs != "model")
        parts += [count(self.layers, "layer")] * (self.layers > 1)
        return ", ".join(parts)


@dataclass(frozen=True)
class Timing:
    """Microseconds: median over processes of their medians, as in a fit; quartiles over all
    samples."""

    low: float
    median: float
    high: float


Timings = dict[int, dict[Candidate, Timing]]
"""Of one head count: requests -> candidate -> timing."""


@dataclass(frozen=True)
class Pick:
    """What is picked from `first` to `last` requests: a variant and, where it has one, a split."""

    first: int
    last: int
    variant: str
    split: int | None
    flush: bool = False

    @property
    def what(self) -> tuple[str, int | None, bool]:
        return self.variant, self.split, self.flush


Ranked = Callable[[int, int, int, str], Sequence[Any]]
"""`ranked` of a policy module: (heads, requests, tokens, kind) -> its choices in order."""


def by_question(measurements: Iterable[Measurement]) -> dict[Question, list[Measurement]]:
    """Records by figure, in the order of their file names."""
    by_cell: dict[Cell, list[Measurement]] = defaultdict(list)
    for measurement in measurements:
        by_cell[measurement.cell].append(measurement)
    found: dict[Question, list[Measurement]] = defaultdict(list)
    for cell, of_cell in by_cell.items():
        found[Question.of(cell)] += of_cell
    return dict(sorted(found.items(), key=lambda pair: pair[0].stem))


def timings(measurements: Iterable[Measurement]) -> dict[int, Timings]:
    """Heads -> requests -> candidate -> timing. A candidate that failed in any process of a cell
    has none there."""
    by_process: dict[tuple[int, int, Candidate], list[tuple[float, ...]]] = defaultdict(list)
    failed = set()
    for measurement in measurements:
        key = (measurement.cell.heads, measurement.cell.requests, measurement.candidate)
        if measurement.status == "ok":
            by_process[key].append(measurement.samples_us)
        elif measurement.status != "unstable":
            failed.add(key)
    found: dict[int, Timings] = {}
    for key, processes in sorted(by_process.items(), key=lambda p: (p[0][:2], str(p[0][2]))):
        if key in failed:
            continue
        pooled = sorted(chain.from_iterable(processes))
        middle = _quantile(sorted(_quantile(sorted(samples), 0.5) for samples in processes), 0.5)
        heads, requests, candidate = key
        timing = Timing(_quantile(pooled, 0.25), middle, _quantile(pooled, 0.75))
        found.setdefault(heads, {}).setdefault(requests, {})[candidate] = timing
    return found


def _quantile(ordered: Sequence[float], part: float) -> float:
    place = part * (len(ordered) - 1)
    below = int(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (place - below) * (ordered[above] - ordered[below])


def policy_runs(
    ranked: Ranked, heads: int, tokens: int, kind: str, first: int, last: int
) -> list[Pick]:
    """Runs of request counts for which a policy picks the same."""
    chosen = (
        (requests, ranked(heads, requests, tokens, kind)[0]) for requests in range(first, last + 1)
    )
    return _joined(Pick(n, n, c.variant, c.options.get("split"), bool(c.flush)) for n, c in chosen)


def fastest_runs(cells: Timings) -> list[Pick]:
    """Runs of measured request counts with the same fastest variant and split."""
    best = (
        (requests, min(cell, key=lambda c: (cell[c].median, str(c))))
        for requests, cell in cells.items()
    )
    return _joined(Pick(n, n, c.variant, c.options.get("split")) for n, c in best)  # type: ignore[arg-type]


def _joined(picks: Iterable[Pick]) -> list[Pick]:
    runs: list[Pick] = []
    for pick in picks:
        first = runs.pop().first if runs and runs[-1].what == pick.what else pick.first
        runs.append(Pick(first, pick.last, *pick.what))
    return runs


def policy_regrets(
    measurements: Iterable[Measurement], ranked: Ranked
) -> dict[tuple[int, int], float]:
    """(heads, requests) -> time of what a policy picks over the best time, minus 1; only where both
    have one."""
    from kdabench.policy import regret

    grid = regret.make_grid(measurements)
    found = regret.log_regret(grid, regret.picks(grid, ranked))
    pairs = zip(grid.cells, found, strict=True)
    return {
        (cell.heads, cell.requests): math.expm1(value)
        for cell, value in pairs
        if not math.isnan(value)
    }


def by_split(heads: int, cells: Timings) -> dict[str, dict[Any, list[tuple[int, Timing]]]]:
    """Variant -> split -> the fastest such candidate by items; under split "best" the fastest of
    the variant."""
    curves: dict[str, dict[Any, list[tuple[int, Timing]]]] = {}
    for requests, cell in cells.items():
        fastest: dict[tuple[str, Any], Timing] = {}
        for candidate, timing in cell.items():
            for split in ("best", candidate.options.get("split")):
                key = (candidate.variant, split)
                fastest[key] = min(timing, fastest.get(key, timing), key=lambda t: t.median)
        for (variant, split), timing in fastest.items():
            curves.setdefault(variant, {}).setdefault(split, []).append((heads * requests, timing))
    return dict(sorted(curves.items()))


def count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"
