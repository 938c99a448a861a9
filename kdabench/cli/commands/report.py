"""report: one HTML file for a reviewer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kdabench.cli import arguments, console, drawing, reports, sources
from kdabench.cli.arguments import (
    RESULTS,
    Results,
)

if TYPE_CHECKING:
    from kdabench.review.report import Fitted, Measured


def report(
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
    sweeps: Annotated[Path, typer.Option("--sweeps", metavar="FOLDER", help="Sweep files.")] = Path(
        "sweeps"
    ),
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
    from kdabench.data import devices
    from kdabench.policy.emit import held
    from kdabench.review.report import Subject

    found = sources.open_source(source, results)
    journal = Path(source).suffix == ".db"
    if Path(source).suffix == ".jsonl" or not any(found.files.values()):
        console.fail(f"{source}: a recorded device or a journal with records is expected")
    home = found.policy.parent
    target = out or home / "report.html"
    arguments.require_writable(target.parent)
    with console.user_input():
        name, sms = arguments.device_of(found.envs, source)
        recorded = results / devices.slug(name) if journal else home
        kept_back = held(recorded)
    fitted, text = _fit_journal(found, kept_back) if journal else _fit_device(home)
    subject = Subject(
        device=name,
        replay=found.replay,
        measured=_measured(found, sweeps, sms),
        envs=found.envs,
        fitted=fitted,
        figures=_figures(found, name, sms, text, kept_back),
        verified=reports.verified(recorded),
        reproduce=_commands(found, source, sweeps),
        notes=_stale(found.policy, text) if not journal else (),
    )
    reports.write(subject, target)
    console.line(console.relative(target))


def _fit_device(home: Path) -> tuple[Fitted | str, str | None]:
    """What a device's records give, or why not, and the text of that policy's module."""
    from kdabench.data.measurements import MeasurementError
    from kdabench.policy import certificate, emit, regret
    from kdabench.review.report import Fitted

    try:
        found = emit.regenerate(home, arguments.default_schedule())
    except (regret.FitError, MeasurementError) as error:
        return str(error), None
    changes = None
    if found.previous is not None:
        before, after = (emit.load(text).ranked for text in (found.previous, found.module))
        changes = certificate.changes(found.grid, before, after)
    return Fitted(found.policy, found.evidence, changes), found.module


def _fit_journal(found: sources.Source, held: Mapping[str, str]) -> tuple[Fitted | str, str | None]:
    from kdabench.policy import emit, fit, regret
    from kdabench.review.report import Fitted

    (measurements,) = found.files.values()
    try:
        policy, evidence = fit.fit(
            measurements, found.envs, default_schedule=arguments.default_schedule(), held=held
        )
    except regret.FitError as error:
        return str(error), None
    return Fitted(policy, evidence), emit.emit(policy, evidence)


def _measured(found: sources.Source, sweeps: Path, sms: int) -> list[Measured]:
    """By sweep, with question and cells of its file; one that can't be read is named on stderr."""
    from kdabench.data import sweep
    from kdabench.review.report import Measured

    options = arguments.known_options()
    measured = []
    for stem, measurements in found.files.items():
        path, plan = sweeps / f"{stem}.toml", None
        if path.is_file():
            try:
                plan = sweep.load(path, options, sms)
            except sweep.SweepError as error:
                console.note(f"warning: {error}")
        asked = None if plan is None else (plan.question, plan.cells)
        measured.append(Measured(stem, asked and asked[0], measurements, asked and asked[1]))
    return measured


def _figures(
    found: sources.Source, name: str, sms: int, policy: str | None, held: Mapping[str, str]
) -> list[tuple[str, str]]:
    from tempfile import TemporaryDirectory

    from kdabench.policy import emit

    module = None if policy is None else emit.load(policy)
    measurements = drawing.fullest(found.files)
    with TemporaryDirectory() as folder:
        paths = drawing.write_plots(
            measurements,
            Path(folder),
            name=name,
            sms=sms,
            policy=module,
            replay=found.replay,
            held=tuple(held),
        )
        return reports.read_figures(measurements, paths)


def _stale(path: Path, text: str | None) -> tuple[str, ...]:
    if text is None or (path.is_file() and path.read_text(encoding="utf-8") == text):
        return ()
    return (f"policy.py is not what these records give; repair: kdabench emit {path.parent.name}",)


def _commands(found: sources.Source, source: str, sweeps: Path) -> list[str]:
    """How to measure and derive the same again."""
    revisions = sorted({str(env.get("git_revision")) for env in found.envs.values()} - {"None"})
    commands = [f"# measured with revision {', '.join(revisions) or '-'}"]
    files = [(sweeps / f"{stem}.toml").as_posix() for stem in found.files]
    commands += [f"kdabench sweep {file}" for file in files]
    if Path(source).suffix != ".db":
        commands += [f"kdabench export {file}" for file in files]
        commands += ["kdabench verify", f"kdabench emit {source}", "kdabench check"]
    return [*commands, f"kdabench report {source}"]
