"""fit: thresholds, schedules and what speaks for them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kdabench.cli import arguments, console, guards
from kdabench.cli.arguments import (
    RESULTS,
    Json,
    Results,
)

if TYPE_CHECKING:
    from kdabench.data.measurements import Measurement


def fit(
    source: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE...",
            help="A recorded device, or files of records (.jsonl) or a journal (.db).",
        ),
    ],
    results: Results = RESULTS,
    as_json: Json = False,
) -> None:
    """Fit the thresholds and schedules; print regret and confidence.

    Of a device its dispatch.jsonl is fitted, the records that its policy is made from, without the variants that its
    held.json keeps back. Files are fitted with all their variants. Nothing is written.

    \b
    Examples:
      kdabench fit nvidia-h200
      kdabench fit out/dispatch.db
      kdabench fit results/nvidia-h200/dispatch.jsonl --json
    """
    from kdabench.cli import evidence
    from kdabench.policy import emit
    from kdabench.policy import fit as fits

    default = arguments.default_schedule()
    with console.user_input():
        if len(source) == 1 and not Path(source[0]).suffix:
            from kdabench.data import devices

            found = emit.regenerate(devices.results_folder(results, source[0]), default)
            policy, facts = found.policy, found.evidence
        else:
            policy, facts = fits.fit(*_files(source), default_schedule=default)
    if as_json:
        console.emit_json({"policy": policy.to_json(), "evidence": facts.to_json()})
    else:
        console.line(f"{policy.origin.device}, {policy.origin.sms} SMs, {policy.origin.digest}")
        console.write(evidence.text(policy, facts) + guards.checks(policy, facts))


def _files(source: list[str]) -> tuple[list[Measurement], Mapping[str, Mapping[str, Any]]]:
    from kdabench.data import measurements
    from kdabench.measure.journal import Journal

    paths = [Path(name) for name in source]
    if len(paths) == 1 and paths[0].suffix == ".db":
        with Journal.read(paths[0]) as journal:
            return journal.measurements(), journal.envs()
    for path in paths:
        if path.suffix != ".jsonl":
            raise ValueError(
                f"{path}: one recorded device, one journal (.db), or files of records (.jsonl)"
            )
    return measurements.load(paths), measurements.load_envs(paths)
