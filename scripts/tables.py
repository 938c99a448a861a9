#!/usr/bin/env python3
"""Print the latency tables of README and docs as Markdown, from results/<device>."""

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median

import numpy as np

from kda_kernels.problem import STATE_DTYPES
from kdabench.data import exported, roofline
from kdabench.data.measurements import Candidate, Cell
from kdabench.data.roofline import Roofline
from kdabench.policy.fit import step_grid
from kdabench.policy.regret import FLUSH

RESULTS = Path(__file__).parent.parent / "results"
SIZES = [(12, 1), (12, 8), (12, 32), (12, 128), (12, 256), (96, 1), (96, 64), (96, 256)]
STEPS = (("decode", 1), ("spec", 4), ("record", 2), ("record", 4), ("record", 8))
Times = dict[Cell, dict[Candidate, float]]


def times(path: Path) -> Times:
    """Median over processes of each process's median, as the fit takes it. us; nothing if there is
    no such file."""
    if not path.exists():
        return {}
    medians: dict[Cell, dict[Candidate, list[float]]] = {}
    for measurement in exported.load([path]):
        if measurement.status == "ok":
            medians.setdefault(measurement.cell, {}).setdefault(measurement.candidate, []).append(
                median(measurement.samples_us)
            )
    return {
        cell: {c: median(values) for c, values in found.items()} for cell, found in medians.items()
    }


def best(found: dict[Candidate, float], variant: str) -> float | None:
    return min((us for c, us in found.items() if c.variant == variant), default=None)


def print_rows(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    if rows:
        print(f"\n{title}\n")
        print("| " + " | ".join(columns) + " |")
        print("| --- " * len(columns) + "|")
        print("\n".join("| " + " | ".join(row) + " |" for row in rows))


def table(title: str, found: Times, chosen: Iterable[Cell], ceilings: Roofline | None) -> None:
    """A row per cell with the best of each variant that has a time in some cell, stock last;
    without ceilings no floor and no efficiency."""
    cells = [cell for cell in chosen if cell in found]
    timed = sorted(
        {c.variant for cell in cells for c in found[cell]}, key=lambda name: (name == "stock", name)
    )
    rows = []
    for cell in cells:
        floor = "-" if ceilings is None else f"{ceilings.floor_us(cell.problem):.2f}"
        row = [f"{cell.heads}", f"{cell.requests}", f"{cell.items * cell.layers}", floor]
        for variant in timed:
            us = best(found[cell], variant)
            row.append("-" if us is None else with_efficiency(cell, us, ceilings))
        rows.append(row)
    print_rows(title, ["heads", "requests", "items", "floor", *timed], rows)


def with_efficiency(cell: Cell, us: float, ceilings: Roofline | None) -> str:
    if ceilings is None:
        return f"{us:.2f}"
    return f"{us:.2f} ({ceilings.efficiency(cell.problem, us):.2f})"


def deferred(path: Path) -> None:
    """A replay in context layer against a layer's share of a flush of all layers and the record
    that follows it, as the fit compares them."""
    grid = step_grid(exported.load([path])) if path.exists() else None
    if grid is None or not any(c.variant == FLUSH for c in grid.candidates):
        return
    us = np.exp(grid.log_us)
    eager = us[:, [c.variant == FLUSH for c in grid.candidates]].min(axis=1)
    replay = np.nanmin(us[:, [c.variant not in (FLUSH, "stock") for c in grid.candidates]], axis=1)
    rows = [
        [
            f"{c.tokens}",
            f"{c.heads}",
            f"{c.requests}",
            f"{c.items}",
            f"{r:.2f}",
            f"{e:.2f}",
            f"{e / r:.2f}",
        ]
        for c, r, e in sorted(
            zip(grid.cells, replay, eager, strict=True),
            key=lambda row: (row[0].tokens, row[0].items),
        )
        if c.kind == "replay" and not np.isnan(r + e)
    ]
    columns = [
        "tokens",
        "heads",
        "requests",
        "items",
        "replay",
        "flush and record",
        "eager / deferred",
    ]
    print_rows("the deferred cycle against the eager one, us per layer", columns, rows)


def steps(layer: Times, isolated: Times, ceilings: Roofline | None) -> None:
    for kind, tokens in (*STEPS, ("replay", 2), ("replay", 4), ("replay", 8)):
        pending = "mix" if kind == "replay" else None
        cells = [Cell(kind, requests, heads, tokens, pending=pending) for heads, requests in SIZES]  # type: ignore[arg-type]
        table(f"{kind}, {tokens} tokens, context layer, us (efficiency)", layer, cells, ceilings)
    for dtype in STATE_DTYPES:
        for kind, tokens in (
            ("decode", 1),
            ("spec", 4),
            ("record", 4),
            ("record", 8),
            ("replay", 4),
            ("replay", 8),
        ):
            pending = "mix" if kind == "replay" else None
            cells = [Cell(kind, r, h, tokens, state_dtype=dtype, pending=pending, context="isolated")  # type: ignore[arg-type]
                     for h, r in SIZES]  # fmt: skip
            table(
                f"{kind}, {tokens} tokens, {dtype} state, context isolated",
                isolated,
                cells,
                ceilings,
            )


def commits(found: Times, ceilings: Roofline | None) -> None:
    groups: dict[tuple[str, int, int, bool], list[Cell]] = {}
    for cell in sorted(
        found,
        key=lambda c: (c.kind, c.layers, c.tokens, c.pending is not None, c.heads, c.requests),
    ):
        groups.setdefault(
            (cell.kind, cell.layers, cell.tokens, cell.pending is not None), []
        ).append(cell)
    for (kind, layers, tokens, mixed), cells in groups.items():
        folded = f"0 to {tokens}" if mixed else f"{tokens} of {tokens}"
        title = f"{kind}, {folded} tokens, {cells[0].state_dtype} state, {layers} layers"
        table(title, found, cells, ceilings)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "device", nargs="?", default="nvidia-h200", help="a folder of results (nvidia-h200)"
    )
    folder = RESULTS / parser.parse_args().device
    if not folder.is_dir():
        parser.error(
            f"{folder} is no folder; there are: {', '.join(sorted(p.name for p in RESULTS.iterdir()))}"
        )
    layer, isolated, committed = (
        times(folder / f"{name}.jsonl") for name in ("dispatch", "targets", "commit")
    )
    found = roofline.load(folder)
    ceilings = None if found is None else found.roofline
    steps(layer, isolated, ceilings)
    deferred(folder / "dispatch.jsonl")
    commits(committed, ceilings)


if __name__ == "__main__":
    main()
