"""sweep: measure, or replay what was recorded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from kdabench.cli import arguments, console, sweeping
from kdabench.cli.arguments import (
    OUT,
    RESULTS,
    Adaptive,
    Budget,
    Cells,
    CellSeconds,
    DeviceChoice,
    Json,
    Out,
    Results,
    Share,
    SweepFile,
    Target,
)

if TYPE_CHECKING:
    from kdabench.data.sweep import Sweep


def sweep(
    file: SweepFile,
    device: DeviceChoice = "auto",
    budget: Budget = None,
    cell_seconds: CellSeconds = None,
    share: Share = "1/1",
    adaptive: Adaptive = False,
    target: Target = None,
    cells: Cells = None,
    retry: Annotated[
        bool, typer.Option("--retry", help="Measure again the cells in which a candidate failed.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Count cells and estimate the time; measure none.")
    ] = False,
    out: Out = OUT,
    results: Results = RESULTS,
    as_json: Json = False,
) -> None:
    """Measure a sweep, or replay it where there is no GPU.

    Every finished round is kept in OUT/<sweep>.db. Stop at any time: the same command goes on where it stopped.
    Without --adaptive it adds what an adaptive sweep left out. Exit status 1 if a cell has no result at all.

    \b
    Examples:
      kdabench sweep sweeps/quick.toml
      kdabench sweep sweeps/dispatch.toml --dry-run
      kdabench sweep sweeps/dispatch.toml --adaptive --budget 600
      kdabench sweep sweeps/quick.toml --device replay:nvidia-h200
      kdabench sweep sweeps/dispatch.toml --device cuda:1 --share 2/2 --out out/second
    """
    arguments.require_sweep_file(file)
    part = arguments.parse_share(share)
    for option, value in (("--target", target), ("--cells", cells)):
        if value is not None and not adaptive:
            console.fail(f"{option}: needs --adaptive")
    most_lost = _target(adaptive, target)
    where = arguments.find_device(device, results)
    plan = arguments.load_sweep(file, where.sms)
    if dry_run:
        _estimate(plan, where, adaptive, as_json, cells)
        return
    summary = sweeping.run(
        plan, where, device, out=out, results=results, budget=budget, as_json=as_json, share=part, retry=retry,
        cell_seconds=cell_seconds, most_lost=most_lost, most_cells=cells,
    )  # fmt: skip
    if summary.stopped_by is not None:
        sweeping.finish(summary)
    if as_json:
        console.emit_json(sweeping.summary_json(summary, where))
    else:
        console.line(sweeping.outcome(summary))
        if summary.done == summary.total and not summary.replay:
            console.line(f"keep it: kdabench export {console.relative(file)}")
    sweeping.finish(summary)


def _target(adaptive: bool, percent: float | None) -> float | None:
    """As run_sweep takes it."""
    if not adaptive:
        return None
    from kdabench.policy.adaptive import TARGET

    return TARGET if percent is None else percent / 100


def _estimate(
    plan: Sweep, target: arguments.Device, adaptive: bool, as_json: bool, most_cells: int | None
) -> None:
    from kdabench.measure import session
    from kdabench.policy.adaptive import first_cells, rows_of

    cells, candidates, seconds = session.dry_run(plan, target.choice)
    first = sum(len(first_cells(row)) for row in rows_of(plan.cells)) if adaptive else cells
    if most_cells is not None and most_cells < cells:
        most = max(first, most_cells)
        cells, seconds = most, seconds * most / cells
    if as_json:
        console.emit_json(
            {
                "device": target.choice,
                "cells": cells,
                "first_cells": first,
                "candidates": candidates,
                "processes": plan.processes,
                "seconds": seconds,
            }
        )
        return
    count = f"{first} cells at first, at most {cells}," if adaptive else f"{cells} cells"
    console.line(
        f"{count} x {candidates} candidates x {plan.processes} processes on {target.choice}"
    )
    console.line(f"{'at most ' if adaptive else ''}about {console.duration(seconds)}")
