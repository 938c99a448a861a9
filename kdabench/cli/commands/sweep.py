"""sweep: measure, or run on what was recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kdabench import pipeline
from kdabench.cli import arguments, console, sweeping
from kdabench.cli.arguments import OUT, RESULTS, Budget, DeviceChoice, Json, Out, Results, SweepFile
from kdabench.data.paths import relative
from kdabench.data.sweep import Sweep
from kdabench.measure import session
from kdabench.measure.contest import Plan
from kdabench.measure.session import Summary
from kdabench.measure.target import Target
from kdabench.policy.adaptive import TARGET, first_cells, rows_of

CellSeconds = Annotated[
    float | None,
    typer.Option(
        "--cell-seconds",
        metavar="SECONDS",
        min=0.01,
        help="Begin no further round of a cell after this much time in a process (1); five rounds there are always.",
    ),
]
Share = Annotated[
    str,
    typer.Option(
        "--share",
        metavar="K/N",
        help="Only every N-th cell from the K-th on; join the journals with merge.",
    ),
]
Adaptive = Annotated[
    bool,
    typer.Option(
        "--adaptive",
        help="Only the cells a policy depends on, those first where it could lose most; shares are of rows.",
    ),
]
Percent = Annotated[
    float | None,
    typer.Option(
        "--target",
        metavar="PERCENT",
        min=0,
        help="With --adaptive: leave out where less than this can be lost (0.5).",
    ),
]
Cells = Annotated[
    int | None,
    typer.Option("--cells", metavar="N", min=1, help="With --adaptive: choose at most N cells."),
]
Retry = Annotated[
    bool, typer.Option("--retry", help="Measure again the cells in which a candidate failed.")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Count cells and estimate the time; measure none.")
]


def command(
    file: SweepFile,
    device: DeviceChoice = "auto",
    budget: Budget = None,
    cell_seconds: CellSeconds = None,
    share: Share = "1/1",
    adaptive: Adaptive = False,
    target: Percent = None,
    cells: Cells = None,
    retry: Retry = False,
    dry_run: DryRun = False,
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
    wanted = _Wanted(budget, cell_seconds, share, adaptive, target, cells, retry)
    where = arguments.find_target(device, results)
    plan = arguments.load_sweep(file, where.sms)
    if dry_run:
        _estimate(plan, where, wanted, as_json)
        return
    sweeping.announce(where, device, results, as_json)
    arguments.require_writable(out)
    summary = wanted.run(plan, where, out, results)
    _show(summary, where, file, as_json)


class _Wanted:
    """How to sweep, as the options say. Ends the command for options that contradict each other."""

    def __init__(
        self,
        budget: float | None,
        cell_seconds: float | None,
        share: str,
        adaptive: bool,
        percent: float | None,
        cells: int | None,
        retry: bool,
    ) -> None:
        self.share = arguments.parse_share(share)
        for option, value in (("--target", percent), ("--cells", cells)):
            if value is not None and not adaptive:
                console.fail(f"{option}: needs --adaptive")
        self.budget, self.retry, self.adaptive, self.cells = budget, retry, adaptive, cells
        self.plan = None if cell_seconds is None else Plan(seconds=cell_seconds)
        share_lost = TARGET if percent is None else percent / 100
        self.most_lost = share_lost if adaptive else None

    def run(self, plan: Sweep, where: Target, out: Path, results: Path) -> Summary:
        """Sweep with progress on stderr."""
        with console.user_input(), console.progress() as listener:
            return session.run_sweep(
                plan,
                device=where.choice,
                out=out,
                results=results,
                budget_s=self.budget,
                share=self.share,
                retry=self.retry,
                target=self.most_lost,
                most_cells=self.cells,
                listener=listener,
                plan=self.plan,
            )


def _show(summary: Summary, where: Target, file: Path, as_json: bool) -> None:
    if summary.stopped_by is not None:
        sweeping.finish(summary)
    if as_json:
        console.emit_json(sweeping.summary_json(summary, where))
    else:
        console.line(pipeline.summary_line(summary))
        if summary.done == summary.total and not summary.replay:
            console.line(f"keep it: kdabench export {relative(file)}")
    sweeping.finish(summary)


def _estimate(plan: Sweep, where: Target, wanted: _Wanted, as_json: bool) -> None:
    cells, candidates, seconds = session.dry_run(plan, where.choice)
    rows = rows_of(plan.cells)
    first = sum(len(first_cells(row)) for row in rows) if wanted.adaptive else cells
    if wanted.cells is not None and wanted.cells < cells:
        most = max(first, wanted.cells)
        cells, seconds = most, seconds * most / cells
    if as_json:
        console.emit_json(
            {
                "device": where.choice,
                "cells": cells,
                "first_cells": first,
                "candidates": candidates,
                "processes": plan.processes,
                "seconds": seconds,
            }
        )
        return
    count = f"{first} cells at first, at most {cells}," if wanted.adaptive else f"{cells} cells"
    console.line(
        f"{count} x {candidates} candidates x {plan.processes} processes on {where.choice}"
    )
    console.line(f"{'at most ' if wanted.adaptive else ''}about {console.duration(seconds)}")
