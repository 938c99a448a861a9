"""run: from a sweep to its policy and report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kdabench.cli import arguments, console, drawing, guards, reports, sweeping
from kdabench.cli.arguments import (
    OUT,
    RESULTS,
    Budget,
    DeviceChoice,
    Json,
    Out,
    Results,
    SweepFile,
)

if TYPE_CHECKING:
    from kdabench.data.sweep import Sweep
    from kdabench.measure.session import Summary
    from kdabench.policy.constants import Policy
    from kdabench.policy.regret import Evidence


def run(
    file: SweepFile,
    device: DeviceChoice = "auto",
    budget: Budget = None,
    out: Out = OUT,
    results: Results = RESULTS,
    as_json: Json = False,
) -> None:
    """Sweep, fit, write the policy, plot and report, in one go.

    Everything goes to OUT/<sweep>: policy.py, plots, regret.txt and report.html. Without a GPU the recorded
    measurements are replayed, and every output says so. Nothing in the recorded results changes; that takes export and
    emit.

    \b
    Examples:
      kdabench run sweeps/dispatch.toml
      kdabench run sweeps/quick.toml --budget 300
      kdabench run sweeps/dispatch.toml --device replay:nvidia-h200
    """
    from kdabench.measure.journal import Journal
    from kdabench.policy.emit import held as held_back

    arguments.require_sweep_file(file)
    target = arguments.find_device(device, results)
    plan = arguments.load_sweep(file, target.sms)
    summary = sweeping.run(
        plan, target, device, out=out, results=results, budget=budget, as_json=as_json
    )
    if summary.interrupted:
        sweeping.finish(summary)
    with Journal.read(summary.journal) as journal:
        envs = journal.envs()
    folder = out / plan.stem
    arguments.require_writable(folder)
    with console.user_input():
        held = held_back(results / target.slug)
    outcome = _fitted(summary, envs, held)
    written = _write(outcome, plan, summary, target, folder)
    fitted = (
        None
        if outcome.policy is None or outcome.evidence is None
        else (outcome.policy, outcome.evidence)
    )
    page = reports.of_run(
        plan, summary, target, envs, fitted or str(outcome.why_not), written, results
    )
    written.append(folder / "report.html")
    reports.write(page, written[-1])
    if as_json:
        console.emit_json(
            {
                **sweeping.summary_json(summary, target),
                "policy": None if outcome.policy is None else outcome.policy.to_json(),
                "evidence": None if outcome.evidence is None else outcome.evidence.to_json(),
                "why_no_policy": outcome.why_not,
                "written": [str(path) for path in written],
            }
        )
    else:
        console.line()
        console.write((folder / "regret.txt").read_text(encoding="utf-8"))
        console.line()
        for path in written:
            console.line(console.relative(path))
    sweeping.finish(summary)


@dataclass(frozen=True)
class _Outcome:
    """A fit, or why there is none."""

    policy: Policy | None = None
    evidence: Evidence | None = None
    why_not: str | None = None


def _fitted(
    summary: Summary, envs: Mapping[str, Mapping[str, Any]], held: Mapping[str, str]
) -> _Outcome:
    from kdabench.policy.fit import fit
    from kdabench.policy.regret import FitError

    try:
        return _Outcome(
            *fit(
                summary.measurements, envs, default_schedule=arguments.default_schedule(), held=held
            )
        )
    except FitError as error:
        return _Outcome(why_not=str(error))


def _write(
    outcome: _Outcome, plan: Sweep, summary: Summary, target: arguments.Device, folder: Path
) -> list[Path]:
    """Policy, report and plots of a run; a replay is labelled in each."""
    from kdabench.cli import evidence
    from kdabench.policy import emit

    written = []
    module = None
    title = f"{plan.stem} on {target.name}"
    title += ": REPLAY of recorded measurements" if summary.replay else ""
    report = f"{title}\n{plan.question}\n{sweeping.outcome(summary)}\n\n"
    if outcome.policy is not None and outcome.evidence is not None:
        text = emit.emit(outcome.policy, outcome.evidence)
        if summary.replay:
            text = f"# Replay of recorded measurements, in {console.relative(folder)}: not for use.\n{text}"
        module = emit.load(text)
        written.append(folder / "policy.py")
        emit.write_atomic(written[-1], text)
        report += evidence.text(outcome.policy, outcome.evidence) + guards.checks(
            outcome.policy, outcome.evidence
        )
    else:
        report += f"No policy: {outcome.why_not}\n"
    written.append(folder / "regret.txt")
    emit.write_atomic(written[-1], report)
    if summary.measurements:
        written += drawing.write_plots(
            summary.measurements,
            folder / "plots",
            name=target.name,
            sms=target.sms,
            policy=module,
            replay=summary.replay,
            held=() if outcome.evidence is None else tuple(outcome.evidence.held),
        )
    return written
