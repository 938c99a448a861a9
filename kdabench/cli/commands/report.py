"""report: one HTML file for a reviewer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kdabench import pipeline
from kdabench.cli import arguments, console
from kdabench.cli.arguments import RESULTS, SWEEPS, Results, Sweeps
from kdabench.data.measurements import write_atomic
from kdabench.data.paths import relative
from kdabench.review.report import render


def command(
    source: Annotated[
        str,
        typer.Argument(
            metavar="DEVICE", help="A recorded device, or a journal (.db).", show_default=False
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="The file; else report.html beside the policy."),
    ] = None,
    sweeps: Sweeps = SWEEPS,
    results: Results = RESULTS,
) -> None:
    """Write one HTML file about a device, for a reviewer.

    It stands alone: figures are inside, nothing is loaded from anywhere. It has the question, what was measured, the
    policy with its regret, latency curves, targets, failures, every cell, and how to reproduce it.

    \b
    Examples:
      kdabench report nvidia-h200
      kdabench report nvidia-h200 --out review.html
      kdabench report out/dispatch.db
    """
    found = arguments.open_source(source, results)
    if Path(source).suffix == ".jsonl" or not any(found.sweeps.values()):
        console.fail(f"{source}: a recorded device or a journal with records is expected")
    file = out or found.home / "report.html"
    arguments.require_writable(file.parent)
    with console.user_input():
        text = render(pipeline.report_of_source(found, results, sweeps))
    write_atomic(file, text)
    console.line(relative(file))
