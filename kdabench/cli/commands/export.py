"""export: a journal into the recorded results."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kdabench.cli import arguments, console
from kdabench.cli.arguments import (
    OUT,
    RESULTS,
    Json,
    Out,
    Results,
    SweepFile,
)

if TYPE_CHECKING:
    pass


def export(
    file: SweepFile, out: Out = OUT, results: Results = RESULTS, as_json: Json = False
) -> None:
    """Write a measured journal into the recorded results.

    They are RESULTS/<device>/<sweep>.jsonl and env.json. A replay is not a measurement and is refused.

    \b
    Examples:
      kdabench export sweeps/dispatch.toml
    """
    from kdabench.data import devices
    from kdabench.measure import journal

    path = out / f"{file.stem}.db"
    if not path.exists():
        replayed = path.with_suffix(".replay.db")
        if replayed.exists():
            console.fail(f"{replayed}: is a replay; it is never exported as a measurement")
        console.fail(f"{path}: no such journal; measure with: kdabench sweep {file}")
    with journal.Journal.read(path) as measured:
        with console.user_input():
            name, _ = arguments.device_of(measured.envs(), str(path))
        written = journal.export(measured, results, devices.slug(name), file.stem)
        count = len(measured.measurements())
    if as_json:
        console.emit_json({"file": str(written), "records": count})
    else:
        console.line(f"{count} records in {console.relative(written)}")
