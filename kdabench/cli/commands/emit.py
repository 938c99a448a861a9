"""emit: a device's policy module."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, get_args

import typer

from kdabench import pipeline
from kdabench.cli import arguments, console, evidence
from kdabench.cli.arguments import RESULTS, RecordedDevice, Results
from kdabench.cli.evidence import cell_name
from kdabench.data import devices
from kdabench.data.measurements import write_atomic
from kdabench.data.paths import relative
from kdabench.policy import emit
from kdabench.policy.constants import default_schedule
from kdabench.policy.emit import Format, Regenerated
from kdabench.policy.regret import Gain

Form = Annotated[
    str | None,
    typer.Option(
        "--format", metavar="FORMAT", help="Print as json, constants or module; write nothing."
    ),
]
Diff = Annotated[
    bool,
    typer.Option(
        "--diff",
        help="Print what would change, cell by cell, then line by line; write nothing.",
    ),
]
Fresh = Annotated[
    bool,
    typer.Option(
        "--fresh",
        help="Forget the policy before: take new constants even if they gain nothing.",
    ),
]


def command(
    device: RecordedDevice,
    form: Form = None,
    diff: Diff = False,
    fresh: Fresh = False,
    results: Results = RESULTS,
) -> None:
    """Write a device's policy module from its records.

    It goes to RESULTS/<device>/policy.py and to kda_kernels/policies, where the dispatcher finds it. Same records, same
    bytes. A module of other records becomes RESULTS/<device>/previous.py: its constants stay in force unless new ones
    gain over 0.1 % and over 3 standard errors.

    \b
    Examples:
      kdabench emit nvidia-h200
      kdabench emit nvidia-h200 --diff
      kdabench emit nvidia-h200 --format constants
    """
    if form is not None:
        arguments.one_of("--format", form, get_args(Format))
    with console.user_input():
        folder = devices.results_folder(results, device)
        found = emit.regenerate(folder, default_schedule(), fresh)
    paths = emit.module_paths(folder, arguments.policies_folder())
    if form is not None:
        console.write(emit.emit(found.policy, found.evidence, form))  # type: ignore[arg-type]
    elif diff:
        _show_changes(found, paths)
    else:
        _write(found, paths, folder)


def _write(found: Regenerated, paths: tuple[Path, ...], folder: Path) -> None:
    if found.previous is None:
        emit.previous_path(folder).unlink(missing_ok=True)
    else:
        write_atomic(emit.previous_path(folder), found.previous)
    for path in paths:
        if _text(path) == found.module:
            console.line(f"{relative(path)}: as it was")
        else:
            write_atomic(path, found.module)
            console.line(f"{relative(path)}: written")
    if found.evidence.certificate is not None:
        console.write("\n" + evidence.markdown(found.evidence.certificate))


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def _show_changes(found: Regenerated, paths: tuple[Path, ...]) -> None:
    """Print cells whose choice changes and what that gains, then the lines that change."""
    own = _text(paths[0])
    if own and own != found.module:
        try:
            console.write(_changes(pipeline.changes(own, found)))
        except ValueError as error:
            console.line(str(error))
    for path in paths:
        console.write(emit.diff(_text(path), found.module, relative(path)))


def _changes(found: pipeline.Changes) -> str:
    rows = [
        (
            cell_name(c.cell),
            c.old,
            c.new,
            "-" if c.gain is None else _percent(c.gain.geomean),
            _interval(c.gain),
        )
        for c in found.cells
    ]
    text = f"{len(rows)} of {found.of} cells change; "
    text += f"gain over all: {_percent(found.gain.geomean)} % ({_interval(found.gain)})\n"
    headings = ("cell", "old", "new", "gain %", "90 % interval")
    return text + (console.table(headings, rows, right=(3,)) if rows else "")


def _percent(value: float) -> str:
    return f"{100 * value:.2f}"


def _interval(gain: Gain | None) -> str:
    return "not measured" if gain is None else f"{_percent(gain.low)} to {_percent(gain.high)}"
