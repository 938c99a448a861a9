"""run: from a sweep to its policy and report."""

from __future__ import annotations

from kdabench import pipeline
from kdabench.cli import arguments, console, sweeping
from kdabench.cli.arguments import OUT, RESULTS, Budget, DeviceChoice, Json, Out, Results, SweepFile
from kdabench.data.paths import relative
from kdabench.measure.target import Target
from kdabench.pipeline import Outcome, Run


def command(
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
    arguments.require_sweep_file(file)
    target = arguments.find_target(device, results)
    plan = arguments.load_sweep(file, target.sms)
    sweeping.announce(target, device, results, as_json)
    arguments.require_writable(out / plan.stem)
    with console.user_input(), console.progress() as listener:
        found = pipeline.run(
            plan, target, out=out, folder=results, budget_s=budget, listener=listener
        )
    if found.outcome is not None:
        _show(found, found.outcome, target, as_json)
    sweeping.finish(found.summary)


def _show(found: Run, outcome: Outcome, target: Target, as_json: bool) -> None:
    policy, evidence = outcome.policy, outcome.evidence
    if as_json:
        console.emit_json(
            {
                **sweeping.summary_json(found.summary, target),
                "policy": None if policy is None else policy.to_json(),
                "evidence": None if evidence is None else evidence.to_json(),
                "why_no_policy": outcome.why_not,
                "written": [str(path) for path in found.written],
            }
        )
        return
    (text,) = (path for path in found.written if path.name == "regret.txt")
    console.line()
    console.write(text.read_text(encoding="utf-8"))
    console.line()
    for path in found.written:
        console.line(relative(path))
