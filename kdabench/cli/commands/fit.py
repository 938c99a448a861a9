"""fit: thresholds, schedules and what speaks for them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kdabench import pipeline
from kdabench.cli import console
from kdabench.cli.arguments import RESULTS, Json, Results
from kdabench.data import devices, measurements
from kdabench.measure.journal import Journal
from kdabench.policy import emit, fit
from kdabench.policy.constants import Policy, default_schedule
from kdabench.policy.regret import Evidence

Sources = Annotated[
    list[str],
    typer.Argument(
        metavar="SOURCE...",
        help="A recorded device, or files of records (.jsonl) or a journal (.db).",
    ),
]


def command(source: Sources, results: Results = RESULTS, as_json: Json = False) -> None:
    """Fit the thresholds and schedules; print regret and confidence.

    Of a device its dispatch.jsonl is fitted, the records that its policy is made from, without the variants that its
    held.json keeps back. Files are fitted with all their variants. Nothing is written.

    \b
    Examples:
      kdabench fit nvidia-h200
      kdabench fit out/dispatch.db
      kdabench fit results/nvidia-h200/dispatch.jsonl --json
    """
    with console.user_input():
        policy, facts = _fit([Path(name) for name in source], results)
    if as_json:
        console.emit_json({"policy": policy.to_json(), "evidence": facts.to_json()})
    else:
        console.line(f"{policy.origin.device}, {policy.origin.sms} SMs, {policy.origin.digest}")
        console.write(pipeline.evidence_text(policy, facts))


def _fit(paths: list[Path], results: Path) -> tuple[Policy, Evidence]:
    default = default_schedule()
    first = paths[0]
    if len(paths) == 1 and not first.suffix:
        found = emit.regenerate(devices.results_folder(results, str(first)), default)
        return found.policy, found.evidence
    if len(paths) == 1 and first.suffix == ".db":
        with Journal.read(first) as journal:
            return fit.fit(journal.measurements(), journal.envs(), default_schedule=default)
    for path in paths:
        if path.suffix != ".jsonl":
            raise ValueError(
                f"{path}: one recorded device, one journal (.db), or files of records (.jsonl)"
            )
    loaded = measurements.load(paths)
    return fit.fit(loaded, measurements.load_envs(paths), default_schedule=default)
