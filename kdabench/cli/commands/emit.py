"""emit: a device's policy module."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

import typer

from kdabench.cli import console, policies
from kdabench.cli.arguments import (
    RESULTS,
    RecordedDevice,
    Results,
)

if TYPE_CHECKING:
    from kdabench.policy.emit import Regenerated
    from kdabench.policy.regret import Gain


def emit(
    device: RecordedDevice,
    form: Annotated[
        str | None,
        typer.Option(
            "--format", metavar="FORMAT", help="Print as json, constants or module; write nothing."
        ),
    ] = None,
    diff: Annotated[
        bool,
        typer.Option(
            "--diff",
            help="Print what would change, cell by cell, then line by line; write nothing.",
        ),
    ] = False,
    fresh: Annotated[
        bool,
        typer.Option(
            "--fresh",
            help="Forget the policy before: take new constants even if they gain nothing.",
        ),
    ] = False,
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
    from kdabench.cli import evidence
    from kdabench.data import devices
    from kdabench.policy import emit as emitting

    forms: dict[str, Literal["module", "json", "constants"]] = {
        "module": "module",
        "json": "json",
        "constants": "constants",
    }
    if form is not None and form not in forms:
        console.fail(f"--format: {form!r}: one of {', '.join(forms)}")
    with console.user_input():
        folder = devices.results_folder(results, device)
        found = emitting.regenerate(folder, policies.certifying(results), fresh)
    if form is not None:
        console.write(emitting.emit(found.policy, found.evidence, forms[form]))
        return
    paths = emitting.module_paths(folder, policies.policies_folder())
    texts = [path.read_text(encoding="utf-8") if path.exists() else "" for path in paths]
    if diff:
        if texts[0] and texts[0] != found.module:
            console.write(_changes(texts[0], found))
        for path, old in zip(paths, texts, strict=True):
            console.write(emitting.diff(old, found.module, console.relative(path)))
        return
    if found.previous is None:
        emitting.previous_path(folder).unlink(missing_ok=True)
    else:
        emitting.write_atomic(emitting.previous_path(folder), found.previous)
    for path, old in zip(paths, texts, strict=True):
        if old == found.module:
            console.line(f"{console.relative(path)}: as it was")
        else:
            emitting.write_atomic(path, found.module)
            console.line(f"{console.relative(path)}: written")
    if found.evidence.certificate is not None:
        console.write("\n" + evidence.markdown(found.evidence.certificate))


def _changes(old: str, found: Regenerated) -> str:
    """Cells whose choice changes, and what that gains, for a reviewer."""
    from kdabench.cli.evidence import cell_name
    from kdabench.policy import certificate, regret
    from kdabench.policy import emit as emitting

    try:
        before, after = (emitting.load(text).ranked for text in (old, found.module))
    except Exception as error:
        return f"the module in place can't be loaded: {type(error).__name__}: {error}\n"
    changed = certificate.changes(found.grid, before, after)
    old_picks, new_picks = (regret.picks(found.grid, ranked) for ranked in (before, after))
    whole = certificate.gain(found.grid, old_picks, new_picks, resamples=200, seed=0)
    rows = [
        (
            cell_name(c.cell),
            c.old,
            c.new,
            "-" if c.gain is None else _percent(c.gain.geomean),
            _interval(c.gain),
        )
        for c in changed
    ]
    text = f"{len(changed)} of {len(found.grid.cells)} cells change; "
    text += f"gain over all: {_percent(whole.geomean)} % ({_interval(whole)})\n"
    headings = ("cell", "old", "new", "gain %", "90 % interval")
    return text + (console.table(headings, rows, right=(3,)) if rows else "")


def _percent(value: float) -> str:
    return f"{100 * value:.2f}"


def _interval(gain: Gain | None) -> str:
    return "not measured" if gain is None else f"{_percent(gain.low)} to {_percent(gain.high)}"
