"""plot: latency curves."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kdabench.cli import arguments, console, drawing
from kdabench.cli.arguments import (
    RESULTS,
    Json,
    Results,
)

if TYPE_CHECKING:
    pass


def plot(
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
    from kdabench.policy import emit

    path = Path(source)
    if path.suffix == ".db":
        from kdabench.measure.journal import Journal

        with Journal.read(path) as journal:
            measurements, envs, replay = journal.measurements(), journal.envs(), journal.replay
        with console.user_input():
            name, sms = arguments.device_of(envs, str(path))
        home = path.with_name(path.name.removesuffix(".db").removesuffix(".replay"))
        folder, own = to or home / "plots", home / "policy.py"
    else:
        home, files = arguments.load_measurements(results, source)
        measurements = drawing.fullest(files)
        with console.user_input():
            name, sms = arguments.describe(home)
        folder, replay, own = to or home / "plots", False, home / "policy.py"
    if not measurements:
        console.fail(f"{source}: no records to draw")
    module = arguments.load_policy(policy or own) if policy or own.is_file() else None
    held = () if path.suffix == ".db" else tuple(emit.held(home))
    written = drawing.write_plots(
        measurements, folder, name=name, sms=sms, policy=module, replay=replay, held=held
    )
    if as_json:
        console.emit_json([str(path) for path in written])
        return
    for path in written:
        console.line(console.relative(path))
