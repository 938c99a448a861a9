"""From a sweep to its policy and report: what `kdabench run`, `fit` and `report` do, without a
shell.

    sweep -> fit -> policy.py, plots, regret.txt -> report.html
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from kda_kernels.problem import KINDS
from kdabench.cli import evidence
from kdabench.data import devices, results, sweep
from kdabench.data.measurements import Measurement, MeasurementError, write_atomic
from kdabench.data.paths import relative
from kdabench.data.sweep import Sweep, SweepError
from kdabench.measure import session
from kdabench.measure.contest import Plan
from kdabench.measure.journal import Journal
from kdabench.measure.session import Listener, Summary
from kdabench.measure.target import Target
from kdabench.policy import certificate, emit, fit, regret
from kdabench.policy.constants import Policy, default_schedule
from kdabench.policy.regret import Evidence, FitError
from kdabench.review import guards, plot, report
from kdabench.review.curves import by_question
from kdabench.review.report import Fitted, Measured, Subject
from kdabench.sources import Source, known_options

Envs = Mapping[str, Mapping[str, Any]]


@dataclass(frozen=True)
class Outcome:
    """A policy and what speaks for it, or why there is none."""

    policy: Policy | None = None
    evidence: Evidence | None = None
    why_not: str | None = None

    @property
    def fitted(self) -> Fitted | str:
        """The same as a report takes it."""
        if self.policy is None or self.evidence is None:
            return str(self.why_not)
        return Fitted(self.policy, self.evidence)

    @property
    def module(self) -> str | None:
        """Text of the policy's module."""
        return None if self.policy is None else emit.emit(self.policy, self.evidence)


@dataclass(frozen=True)
class Run:
    """What `run` came to. outcome: None if it was interrupted; written: files, in order"""

    summary: Summary
    outcome: Outcome | None = None
    written: tuple[Path, ...] = ()


def run(
    plan: Sweep,
    target: Target,
    *,
    out: Path,
    folder: Path,
    budget_s: float | None = None,
    listener: Listener = lambda event: None,
    contest: Plan | None = None,
) -> Run:
    """Measure a sweep, or run it on recorded samples; fit; write policy, plots and report.

    out     folder of journals; all else goes to out/<sweep>
    folder  results by device: read, never written

    Raises JournalError for the journal, ValueError for measurements that can't be used, OSError if
    a file can't be written.
    """
    held = results.held(folder / target.slug)
    summary = session.run_sweep(
        plan,
        device=target.choice,
        out=out,
        results=folder,
        budget_s=budget_s,
        listener=listener,
        plan=contest,
    )
    if summary.interrupted:
        return Run(summary)
    with Journal.read(summary.journal) as journal:
        envs = journal.envs()
    outcome = fitted(summary.measurements, envs, held)
    home = out / plan.stem
    written = write(outcome, plan, summary, target, home)
    page = report_of_run(plan, summary, target, envs, outcome, written, folder)
    write_atomic(home / "report.html", report.render(page))
    return Run(summary, outcome, (*written, home / "report.html"))


def fitted(found: Sequence[Measurement], envs: Envs, held: Mapping[str, str]) -> Outcome:
    """Fit a policy to measurements, or say why there is none; held: what it may not pick, and
    why."""
    try:
        return Outcome(*fit.fit(found, envs, default_schedule=default_schedule(), held=held))
    except FitError as error:
        return Outcome(why_not=str(error))


def summary_line(summary: Summary) -> str:
    """Say how much of a sweep is done, and where it is kept."""
    state = "" if summary.done == summary.total else "unfinished: "
    what = "replayed" if summary.replay else "measured"
    judged = sum(summary.twins.values())
    wrong = judged - summary.twins.get("same", 0)
    alarms = f"; {wrong} of {judged} found their best candidate different from itself"
    return (
        f"{state}{summary.done} of {summary.total} cells and processes {what}, "
        f"{len(summary.measurements)} records in {relative(summary.journal)}"
        f"{alarms if judged else ''}"
    )


def write(
    outcome: Outcome, plan: Sweep, summary: Summary, target: Target, home: Path
) -> list[Path]:
    """Write policy, regret.txt and plots of a run into its folder; a recorded run is labelled in
    each.

    Raises OSError if a file can't be written.
    """
    written, module = [], None
    title = f"{plan.stem} on {target.name}"
    title += ": REPLAY of recorded measurements" if summary.replay else ""
    lines = f"{title}\n{plan.question}\n{summary_line(summary)}\n\n"
    if (text := outcome.module) is not None and outcome.policy and outcome.evidence:
        if summary.replay:
            text = f"# Replay of recorded measurements, in {relative(home)}: not for use.\n{text}"
        module = emit.load(text)
        written.append(home / "policy.py")
        write_atomic(written[-1], text)
        lines += evidence_text(outcome.policy, outcome.evidence)
    else:
        lines += f"No policy: {outcome.why_not}\n"
    written.append(home / "regret.txt")
    write_atomic(written[-1], lines)
    if summary.measurements:
        written += plot.write_plots(
            summary.measurements,
            home / "plots",
            device=target.name,
            sms=target.sms,
            policy=module,
            replay=summary.replay,
            held=() if outcome.evidence is None else tuple(outcome.evidence.held),
        )
    return written


def evidence_text(policy: Policy, facts: Evidence) -> str:
    """Write what speaks for a policy, and what it must not do, as plain text."""
    return evidence.text(policy, facts) + guards.checks(policy, facts)


# --- reports ---


def report_of_run(
    plan: Sweep,
    summary: Summary,
    target: Target,
    envs: Envs,
    outcome: Outcome,
    written: Sequence[Path],
    folder: Path,
) -> Subject:
    """Say what the report of a sweep that has just ended is about; written: figures among it."""
    again = f"kdabench run {relative(plan.path)}"
    unfinished = f"Unfinished: {summary.done} of {summary.total} are done."
    return Subject(
        device=target.name,
        replay=summary.replay,
        measured=[Measured(plan.stem, plan.question, summary.measurements, plan.cells)],
        envs=envs,
        fitted=outcome.fitted,
        figures=_read_figures(summary.measurements, written),
        verified=results.verified(folder / target.slug),
        reproduce=[again + (f" --device {target.choice}" if target.replay else "")],
        notes=() if summary.done == summary.total else (unfinished,),
    )


def report_of_source(source: Source, folder: Path, sweeps: Path) -> Subject:
    """Say what the report of a recorded device or a journal is about.

    folder, sweeps  where results and sweep files lie; a sweep file that can't be read is a warning

    Raises ValueError if the source is of several devices, or a file beside it is malformed.
    """
    name, sms = results.device_of(source.envs, source.name)
    recorded = folder / devices.slug(name) if source.journal else source.home
    held = results.held(recorded)
    found, text = _fit_journal(source, held) if source.journal else _fit_device(source.home)
    return Subject(
        device=name,
        replay=source.replay,
        measured=_measured(source, sweeps, sms),
        envs=source.envs,
        fitted=found,
        figures=_figures(source, name, sms, text, held),
        verified=results.verified(recorded),
        reproduce=_commands(source, sweeps),
        notes=() if source.journal else _stale(source.policy, text),
    )


def _fit_device(home: Path) -> tuple[Fitted | str, str | None]:
    """Give what a device's measurements say, or why not, and the text of that policy's module."""
    try:
        found = emit.regenerate(home, default_schedule())
    except (FitError, MeasurementError) as error:
        return str(error), None
    changes = None
    if found.previous is not None:
        before, after = (emit.load(text).ranked for text in (found.previous, found.module))
        changes = certificate.changes(found.grid, before, after)
    return Fitted(found.policy, found.evidence, changes), found.module


def _fit_journal(source: Source, held: Mapping[str, str]) -> tuple[Fitted | str, str | None]:
    outcome = fitted(source.measurements(), source.envs, held)
    return outcome.fitted, outcome.module


def _measured(source: Source, sweeps: Path, sms: int) -> list[Measured]:
    """Pair each sweep's measurements with the question and the cells of its file."""
    options = known_options()
    measured = []
    for stem, found in source.sweeps.items():
        path, plan = sweeps / f"{stem}.toml", None
        if path.is_file():
            try:
                plan = sweep.load(path, options, sms)
            except SweepError as error:
                warnings.warn(str(error), stacklevel=2)
        asked = None if plan is None else (plan.question, plan.cells)
        measured.append(Measured(stem, asked and asked[0], found, asked and asked[1]))
    return measured


def _figures(
    source: Source, name: str, sms: int, policy: str | None, held: Mapping[str, str]
) -> list[tuple[str, str]]:
    module = None if policy is None else emit.load(policy)
    found = results.fullest(source.sweeps)
    with TemporaryDirectory() as folder:
        paths = plot.write_plots(
            found,
            Path(folder),
            device=name,
            sms=sms,
            policy=module,
            replay=source.replay,
            held=tuple(held),
        )
        return _read_figures(found, paths)


def _read_figures(found: Sequence[Measurement], paths: Sequence[Path]) -> list[tuple[str, str]]:
    """Read title and SVG of each figure; what policies are about comes first."""
    questions = {question.stem: question for question in by_question(found)}
    drawn = [(questions[path.stem], path) for path in paths if path.suffix == ".svg"]
    drawn.sort(key=lambda pair: (pair[0].context != "layer", KINDS.index(pair[0].kind)))
    return [
        (f"{question.title}; {question.circumstances}", path.read_text(encoding="utf-8"))
        for question, path in drawn
    ]


def _stale(path: Path, text: str | None) -> tuple[str, ...]:
    if text is None or (path.is_file() and path.read_text(encoding="utf-8") == text):
        return ()
    return (f"policy.py is not what these records give; repair: kdabench emit {path.parent.name}",)


def _commands(source: Source, sweeps: Path) -> list[str]:
    """Say how to measure and derive the same again."""
    revisions = sorted({str(env.get("git_revision")) for env in source.envs.values()} - {"None"})
    commands = [f"# measured with revision {', '.join(revisions) or '-'}"]
    files = [(sweeps / f"{stem}.toml").as_posix() for stem in source.sweeps]
    commands += [f"kdabench sweep {file}" for file in files]
    if not source.journal:
        commands += [f"kdabench export {file}" for file in files]
        commands += ["kdabench verify", f"kdabench emit {source.name}", "kdabench check"]
    return [*commands, f"kdabench report {source.name}"]


# --- a device's policy, compared with the one in place ---


@dataclass(frozen=True)
class Changes:
    """Cells whose choice a new policy changes, of how many, and what it gains over all cells."""

    cells: tuple[certificate.Change, ...]
    of: int
    gain: regret.Gain


def changes(old: str, found: emit.Regenerated) -> Changes:
    """Compare the text of the module in place with what the measurements give.

    Raises ValueError if the module in place can't be loaded.
    """
    try:
        before, after = (emit.load(text).ranked for text in (old, found.module))
    except Exception as error:  # a module that is executed may raise anything
        raise ValueError(
            f"the module in place can't be loaded: {type(error).__name__}: {error}"
        ) from None
    changed = certificate.changes(found.grid, before, after)
    one, two = (regret.picks(found.grid, ranked) for ranked in (before, after))
    whole = certificate.gain(found.grid, one, two, resamples=200, seed=0)
    return Changes(tuple(changed), len(found.grid.cells), whole)
