"""Tables of the documents, as Markdown, from a device's recorded measurements.

Times are medians over processes of each process's median, in microseconds, as the fit takes them.
Regret is of the policy in force: `kdabench check` says whether it is what the measurements give.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from kda_kernels import variants
from kda_kernels.problem import STATE_DTYPES, Kind, StateDtype
from kdabench.data import exported, roofline
from kdabench.data.measurements import Candidate, Cell, Context, Measurement
from kdabench.policy import certificate, emit
from kdabench.policy.fit import step_grid
from kdabench.policy.regret import FLUSH, Grid, Regret, log_regret, picks, summarize

Times = dict[Cell, dict[Candidate, float]]

SIZES = ((12, 1), (12, 8), (12, 32), (12, 128), (12, 256), (96, 1), (96, 64), (96, 256))
"""Heads and requests of the tables of steps."""
LAYER_STEPS: tuple[tuple[Kind, int], ...] = (
    ("decode", 1), ("spec", 4), ("record", 2), ("record", 4), ("record", 8),
    ("replay", 2), ("replay", 4), ("replay", 8),
)  # fmt: skip
ISOLATED_STEPS: tuple[tuple[Kind, int], ...] = (
    ("decode", 1), ("spec", 4), ("record", 4), ("record", 8), ("replay", 4), ("replay", 8),
)  # fmt: skip
SUMMARY_REQUESTS = (1, 66, 256)
"""Requests of the README's table, at 12 heads: one, the end of the third wave of two CTAs per SM,
and what fills any GPU."""
MISS = 0.03
"""A held-out cell that loses more than this, as a ratio, is listed."""
RESAMPLES, SEED = 100, 0  # of the certificate's bounds, as `fit` draws them


class Recorded:
    """What a device's folder holds; each file is read when a table first asks for it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def dispatch(self) -> list[Measurement]:
        """Measurements that the policy is fitted on; none if there is no such file."""
        return self._load("dispatch.jsonl")

    @cached_property
    def fitted(self) -> Grid:
        """The measured steps that the policy is fitted on."""
        return step_grid(self.dispatch, held=emit.held(self.folder))

    @cached_property
    def held_out(self) -> Grid:
        """The measured steps that no fit has seen, with the flushes of the fitted ones."""
        flushes = [m for m in self.dispatch if m.cell.kind == "flush"]
        return step_grid([*self._load(emit.HELD_OUT), *flushes], held=emit.held(self.folder))

    @cached_property
    def policy(self) -> Any:
        """The policy in force."""
        return self._module()

    @cached_property
    def without_rows(self) -> Any:
        """The policy in force by its thresholds and schedules alone."""
        plain = self._module()
        plain._CHOICES.clear()
        return plain

    def _module(self) -> Any:
        return emit.load((self.folder / "policy.py").read_text(encoding="utf-8"))

    def floor_us(self, cell: Cell) -> float:
        """Least time of a cell by the device's ceilings. Raises RooflineError if none were
        measured."""
        ceilings = self._ceilings
        if ceilings is None:
            raise roofline.RooflineError(f"{self.folder}: no {roofline.FILE}: kdabench calibrate")
        return ceilings.roofline.floor_us(cell.problem)

    @cached_property
    def _ceilings(self) -> roofline.Ceilings | None:
        return roofline.load(self.folder)

    def times(self, sweep: str) -> Times:
        """Times of a sweep's candidates, over the processes where they are `ok`; none without its
        file."""
        loaded = self.dispatch if sweep == "dispatch" else self._load(f"{sweep}.jsonl")
        medians: dict[Cell, dict[Candidate, list[float]]] = {}
        for found in loaded:
            if found.status == "ok":
                by_candidate = medians.setdefault(found.cell, {})
                by_candidate.setdefault(found.candidate, []).append(median(found.samples_us))
        return {
            cell: {candidate: median(values) for candidate, values in by_candidate.items()}
            for cell, by_candidate in medians.items()
        }

    def _load(self, name: str) -> list[Measurement]:
        path = self.folder / name
        return exported.load([path]) if path.exists() else []


def latency(recorded: Recorded) -> str:
    """The README's table: floor, the policy's pick and the last resort, at 12 heads."""
    rows: list[list[str]] = []
    grid, last = recorded.fitted, variants.of_rule("stock_items")
    picked = picks(grid, recorded.policy.ranked)
    for kind, tokens in LAYER_STEPS[0], LAYER_STEPS[3]:
        cells = [Cell(kind, requests, 12, tokens) for requests in SUMMARY_REQUESTS]
        at = [grid.cells.index(cell) for cell in cells]
        us, others = np.exp(grid.log_us), grid.of(last or "")
        floors = [recorded.floor_us(cell) for cell in cells]
        title = f"{kind}, {tokens} token{'s' * (tokens > 1)}"
        rows.append([f"{title}: floor", *(f"{us:.1f}" for us in floors)])
        found = [
            ("the policy's pick", [us[row, picked[row]] for row in at]),
            (f"{last}", [us[row, others].min() for row in at]),
        ]
        rows += [
            [what, *(_with_efficiency(us, floor) for us, floor in zip(times, floors, strict=True))]
            for what, times in found
        ]
    return _markdown(("requests", *map(str, SUMMARY_REQUESTS)), rows)


def regret(recorded: Recorded) -> str:
    """What the policy loses against the fastest candidate, fitted and held-out cells side by
    side, by kind."""
    rows = []
    for what, grid in ("fitted", recorded.fitted), ("held out", recorded.held_out):
        found = summarize(grid, picks(grid, recorded.policy.ranked))
        rows += [[what, kind, *_figures(of_kind)] for kind, of_kind in found.items()]
    return _markdown(("cells", "kind", "number", "mean %", "p99 %", "max %"), rows)


def certified(recorded: Recorded) -> str:
    """The certificate: the policy and other ways of choosing on held-out cells, with its bounds."""
    grid, ranked = recorded.held_out, recorded.policy.ranked
    ways = {
        "thresholds and schedules": picks(grid, recorded.without_rows.ranked),
        "an entry for each fitted cell": certificate.nearest_winners(recorded.fitted, grid),
    }
    found = certificate.certify(grid, ranked, ways, RESAMPLES, SEED)
    if found is None:
        return "No cells were held out."
    bounds = (f"{100 * found.bounds[name]:.2f}" for name in ("geomean", "p99", "max"))
    rows = [
        ["the policy", *_figures(found.regret["all"])],
        ["its 95 % bounds", str(found.cells), *bounds],
        *([name, *_figures(one)] for name, one in found.baselines.items()),
    ]
    return _markdown(("choice", "cells", "mean %", "p99 %", "max %"), rows)


def misses(recorded: Recorded) -> str:
    """Held-out cells where the policy loses more than `MISS`, the worst first."""
    grid = recorded.held_out
    picked = picks(grid, recorded.policy.ranked)
    lost = np.expm1(log_regret(grid, picked))
    rows = [
        [
            f"{cell.kind}, {_plural(cell.tokens, 'token')}, {cell.heads} heads, "
            f"{_plural(cell.requests, 'request')}",
            f"{cell.items}",
            grid.candidates[picked[row]].variant,
            grid.candidates[int(np.nanargmin(grid.log_us[row]))].variant,
            f"{100 * lost[row]:.1f}",
        ]
        for row in sorted(np.flatnonzero(lost > MISS).tolist(), key=lambda row: -lost[row])
        for cell in [grid.cells[row]]
    ]
    return _markdown(("cell", "items", "picked", "fastest", "lost %"), rows)


def schedules(recorded: Recorded) -> str:
    """What the best schedule of the variant that has schedules gains over its default, by kind."""
    grid, name = recorded.fitted, variants.of_rule("schedule")
    if name is None:
        return "No variant has schedules."
    defaults, mine = variants.declared(name).defaults, grid.of(name)
    # Options that the default candidate leaves out have their default value too.
    (default,) = (
        at
        for at in mine
        if all(defaults[option] == value for option, value in grid.candidates[at].options.items())
    )
    gain = grid.log_us[:, default] - np.fmin.reduce(grid.log_us[:, mine], axis=1)
    rows = []
    for kind in ("decode", "spec", "record"):
        of_kind = gain[(grid.cells.kinds == kind) & ~np.isnan(gain)]
        figures = (of_kind.mean(), of_kind.min(), of_kind.max())
        rows.append([kind, f"{len(of_kind)}", *(f"{100 * math.expm1(x):.1f}" for x in figures)])
    return _markdown((f"{name}, kind", "cells", "mean gain %", "least %", "most %"), rows)


def steps(recorded: Recorded) -> str:
    """Steps between a layer's neighbours: the best of each variant, and its efficiency."""
    return "\n\n".join(_steps(recorded, recorded.times("dispatch"), LAYER_STEPS, "fp32", "layer"))


def isolated(recorded: Recorded) -> str:
    """Isolated steps, of both state types."""
    found = recorded.times("targets")
    tables = (
        table
        for t in STATE_DTYPES
        for table in _steps(recorded, found, ISOLATED_STEPS, t, "isolated")
    )
    return "\n\n".join(tables)


def commits(recorded: Recorded) -> str:
    """Commits and flushes, of one layer and of all."""
    found = recorded.times("commit")
    groups: dict[tuple[str, int, int, bool], list[Cell]] = {}
    for cell in sorted(found, key=lambda c: (*_fold(c), c.heads, c.requests)):
        groups.setdefault(_fold(cell), []).append(cell)
    tables = []
    for (kind, layers, tokens, mixed), cells in groups.items():
        folded = f"0 to {tokens}" if mixed else f"{tokens} of {tokens}"
        title = f"{kind}, {folded} tokens, {cells[0].state_dtype} state, {_plural(layers, 'layer')}"
        tables.append(_of_variants(title, recorded, found, cells))
    return "\n\n".join(tables)


def deferred(recorded: Recorded) -> str:
    """A replay against a layer's share of a flush of all layers and the record that follows it."""
    grid = recorded.fitted
    us = np.exp(grid.log_us)
    flushed = [c.variant == FLUSH for c in grid.candidates]
    replayed = [c.variant not in (FLUSH, variants.of_rule("stock_items")) for c in grid.candidates]
    eager, replay = (np.fmin.reduce(us[:, chosen], axis=1) for chosen in (flushed, replayed))
    rows = [
        [
            *map(str, (cell.tokens, cell.heads, cell.requests, cell.items)),
            *(f"{value:.2f}" for value in (r, e, e / r)),
        ]
        for cell, r, e in sorted(
            zip(grid.cells, replay, eager, strict=True),
            key=lambda row: (row[0].tokens, row[0].items, row[0].heads),
        )
        if cell.kind == "replay" and cell.heads in {heads for heads, _ in SIZES} and r + e > 0
    ]
    columns = ("tokens", "heads", "requests", "items", "replay", "flush and record", "ratio")
    return _markdown(columns, rows)


TABLES: Mapping[str, Callable[[Recorded], str]] = {
    "latency": latency,
    "regret": regret,
    "certificate": certified,
    "misses": misses,
    "schedules": schedules,
    "steps": steps,
    "isolated": isolated,
    "deferred": deferred,
    "commits": commits,
}
"""Names that a block may have."""


def _steps(
    recorded: Recorded,
    found: Times,
    of: Sequence[tuple[Kind, int]],
    state_dtype: StateDtype,
    context: Context,
) -> Iterator[str]:
    for kind, tokens in of:
        cells = [
            Cell(
                kind,
                requests,
                heads,
                tokens,
                state_dtype=state_dtype,
                pending="mix" if kind == "replay" else None,
                context=context,
            )
            for heads, requests in SIZES
        ]
        title = f"{kind}, {_plural(tokens, 'token')}, {state_dtype} state"
        if any(cell in found for cell in cells):
            yield _of_variants(title, recorded, found, cells)


def _of_variants(title: str, recorded: Recorded, found: Times, cells: Iterable[Cell]) -> str:
    """A row per cell, a column per variant that has a time in one of them, the last resort last."""
    known = [cell for cell in cells if cell in found]
    last = variants.of_rule("stock_items")
    names = sorted(
        {candidate.variant for cell in known for candidate in found[cell]},
        key=lambda name: (name == last, name),
    )
    rows = []
    for cell in known:
        floor = recorded.floor_us(cell)
        row = [f"{cell.heads}", f"{cell.requests}", f"{cell.items * cell.layers}", f"{floor:.2f}"]
        for name in names:
            times = [us for candidate, us in found[cell].items() if candidate.variant == name]
            row.append(_with_efficiency(min(times), floor) if times else "-")
        rows.append(row)
    columns = ("heads", "requests", "items", "floor", *names)
    return f"**{title}**\n\n{_markdown(columns, rows)}"


def _fold(cell: Cell) -> tuple[str, int, int, bool]:
    return cell.kind, cell.layers, cell.tokens, cell.pending is not None


def _with_efficiency(us: float, floor_us: float) -> str:
    return f"{us:.2f} ({floor_us / us:.2f})"


def _figures(found: Regret) -> list[str]:
    figures = (f"{100 * value:.2f}" for value in (found.geomean, found.p99, found.max))
    return [f"{found.cells}", *figures]


def _plural(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def _markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
