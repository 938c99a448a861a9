"""export: a journal into the recorded results, or measurements into a table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kdabench.cli import arguments, console
from kdabench.cli.arguments import OUT, RESULTS, Json, Out, Results
from kdabench.data import devices
from kdabench.data.paths import relative
from kdabench.data.results import device_of
from kdabench.measure import journal
from kdabench.review import frame

What = Annotated[
    str,
    typer.Argument(
        metavar="WHAT",
        help="A sweep file; with --to a recorded device, a file of records or a journal.",
        show_default=False,
    ),
]
Table = Annotated[
    Path | None,
    typer.Option("--to", metavar="FILE", help="Write a table there: .csv, or .parquet."),
]


def command(
    what: What,
    to: Table = None,
    out: Out = OUT,
    results: Results = RESULTS,
    as_json: Json = False,
) -> None:
    """Write a measured journal into the recorded results, or a table.

    Of a sweep file its journal goes to RESULTS/<device>/<sweep>.jsonl and env.json. A replay is not a measurement and
    is refused. With --to, measurements become a table, one row per cell, candidate and process, for pandas or a
    spreadsheet; .parquet needs pyarrow.

    \b
    Examples:
      kdabench export sweeps/dispatch.toml
      kdabench export nvidia-h200 --to h200.csv
      kdabench export out/dispatch.db --to dispatch.parquet
    """
    if to is None:
        written, count = _into_results(Path(what), out, results)
    else:
        written, count = to, _table(what, to, results)
    if as_json:
        console.emit_json({"file": str(written), "records": count})
    else:
        console.line(f"{count} records in {relative(written)}")


def _into_results(file: Path, out: Path, folder: Path) -> tuple[Path, int]:
    """Export a sweep's journal: the file written, and how many measurements it has."""
    path = out / f"{file.stem}.db"
    if not path.exists():
        replayed = path.with_suffix(".replay.db")
        if replayed.exists():
            console.fail(f"{replayed}: is a replay; it is never exported as a measurement")
        console.fail(f"{path}: no such journal; measure with: kdabench sweep {file}")
    with journal.Journal.read(path) as measured:
        with console.user_input():
            name, _ = device_of(measured.envs(), str(path))
        written = journal.export(measured, folder, devices.slug(name), file.stem)
        return written, len(measured.measurements())


def _table(what: str, to: Path, folder: Path) -> int:
    """Write measurements as a table, and count its rows."""
    with console.user_input():
        frame.require_format(to)
        found = arguments.open_source(what, folder)
        return frame.write(frame.frame(found.measurements(), found.envs), to)
