"""Reports of a run, and what reports have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kda_kernels.problem import KINDS
from kdabench.cli import arguments, console

if TYPE_CHECKING:
    from kdabench.data.measurements import Measurement
    from kdabench.data.sweep import Sweep
    from kdabench.measure.session import Summary
    from kdabench.policy.constants import Policy
    from kdabench.policy.regret import Evidence
    from kdabench.review.report import Subject


def of_run(
    plan: Sweep,
    summary: Summary,
    target: arguments.Device,
    envs: Mapping[str, Mapping[str, Any]],
    fitted: tuple[Policy, Evidence] | str,
    written: Sequence[Path],
    results: Path,
) -> Subject:
    """Of one sweep that has just ended. fitted: policy and evidence, or why there is none; written:
    figures among it"""
    from kdabench.review.report import Fitted, Measured, Subject

    again = f"kdabench run {console.relative(plan.path)}"
    unfinished = (
        ()
        if summary.done == summary.total
        else (f"Unfinished: {summary.done} of {summary.total} are done.",)
    )
    return Subject(
        device=target.name,
        replay=summary.replay,
        measured=[Measured(plan.stem, plan.question, summary.measurements, plan.cells)],
        envs=envs,
        fitted=fitted if isinstance(fitted, str) else Fitted(*fitted),
        figures=read_figures(summary.measurements, written),
        verified=verified(results / target.slug),
        reproduce=[again + (f" --device {target.choice}" if target.replay else "")],
        notes=unfinished,
    )


def write(subject: Subject, path: Path) -> None:
    """A report, whole or not at all."""
    from kdabench.data.measurements import write_atomic
    from kdabench.review.report import render

    write_atomic(path, render(subject))


def read_figures(
    measurements: Sequence[Measurement], paths: Sequence[Path]
) -> list[tuple[str, str]]:
    """Title and SVG of some records' figures, from those of the files that are SVG; what policies
    are about first."""
    from kdabench.review.curves import by_question

    questions = {q.stem: q for q in by_question(measurements)}
    drawn = [(questions[path.stem], path) for path in paths if path.suffix == ".svg"]
    drawn.sort(key=lambda pair: (pair[0].context != "layer", KINDS.index(pair[0].kind)))
    return [
        (f"{q.title}; {q.circumstances}", path.read_text(encoding="utf-8")) for q, path in drawn
    ]


def verified(folder: Path) -> Mapping[str, Any] | None:
    from kdabench.data.measurements import parse_json

    path = folder / "verified.json"
    if not path.is_file():
        return None
    with console.user_input():
        found = parse_json(path.read_text(encoding="utf-8"), str(path))
        if not isinstance(found, dict) or not isinstance(found.get("variants"), dict):
            raise ValueError(f"{path}: variants: an object is expected")
        return found
