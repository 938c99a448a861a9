"""plot: latency curves."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kdabench import library
from kdabench.cli import arguments, console
from kdabench.cli.arguments import RESULTS, Json, Results
from kdabench.data.paths import relative


def command(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="A recorded device, or a journal (.db).")
    ] = "nvidia-h200",
    policy: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Policy module to show; the device's own by default."),
    ] = None,
    to: Annotated[
        Path | None, typer.Option("--to", metavar="FOLDER", help="Where to write the figures.")
    ] = None,
    results: Results = RESULTS,
    as_json: Json = False,
) -> None:
    """Draw latency curves.

    An SVG and a PNG per kind, tokens and circumstances. A device's figures go to RESULTS/<device>/plots, those of a
    journal to OUT/<sweep>/plots.

    \b
    Examples:
      kdabench plot nvidia-h200
      kdabench plot out/dispatch.db --policy out/dispatch/policy.py
      kdabench plot nvidia-h200 --to /tmp/plots
    """
    found = arguments.open_source(source, results)
    folder = to or found.home / "plots"
    arguments.require_writable(folder)
    with console.user_input():
        written = library.plot(found, folder, policy=policy)
    if as_json:
        console.emit_json([str(path) for path in written])
        return
    for path in written:
        console.line(relative(path))
