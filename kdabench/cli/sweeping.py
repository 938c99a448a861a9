"""A sweep as `sweep` and `run` begin, show and end it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kdabench.cli import arguments, console

if TYPE_CHECKING:
    from kdabench.data.measurements import Cell
    from kdabench.data.sweep import Sweep
    from kdabench.measure.session import Summary


def run(
    plan: Sweep,
    target: arguments.Device,
    asked: str,
    *,
    out: Path,
    results: Path,
    budget: float | None,
    as_json: bool,
    share: tuple[int, int] = (1, 1),
    retry: bool = False,
    cell_seconds: float | None = None,
    most_lost: float | None = None,
    most_cells: int | None = None,
) -> Summary:
    """Sweep with progress on stderr; the first line says whether it measures or replays.

    most_lost   target of an adaptive sweep, as a ratio; None measures every cell
    most_cells  that it chooses; None: as many as the target asks for
    """
    from kdabench.measure import session
    from kdabench.measure.contest import Plan

    first = arguments.headline(target, asked, results)
    if as_json:
        console.note(first)
    else:
        console.line(first)
    arguments.require_writable(out)
    with console.user_input(), console.progress() as listener:
        return session.run_sweep(
            plan,
            device=target.choice,
            out=out,
            results=results,
            budget_s=budget,
            share=share,
            retry=retry,
            target=most_lost,
            most_cells=most_cells,
            listener=listener,
            plan=None if cell_seconds is None else Plan(seconds=cell_seconds),
        )


def outcome(summary: Summary) -> str:
    state = "" if summary.done == summary.total else "unfinished: "
    what = "replayed" if summary.replay else "measured"
    return (
        f"{state}{summary.done} of {summary.total} cells and processes {what}, "
        f"{len(summary.measurements)} records in {console.relative(summary.journal)}{_false_alarms(summary)}"
    )


def _false_alarms(summary: Summary) -> str:
    judged = sum(summary.twins.values())
    wrong = judged - summary.twins.get("same", 0)
    return (
        f"; {wrong} of {judged} found their best candidate different from itself" if judged else ""
    )


def finish(summary: Summary) -> None:
    """End the command with what a sweep's summary calls for, or return if all is well."""
    if summary.without_winner:
        first, more = cell_name(summary.without_winner[0]), len(summary.without_winner) - 1
        others = f" and {more} more" if more else ""
        console.error_line(
            f"no variant has a result in {first}{others}; the reasons: kdabench show {summary.journal}"
        )
    if summary.stopped_by is not None:
        console.error_line(
            f"interrupted: {summary.done} of {summary.total} are kept; the same command goes on"
        )
        raise typer.Exit(console.SIGNALLED + summary.stopped_by)
    if summary.without_winner:
        raise typer.Exit(console.FINDING)


def cell_name(cell: Cell) -> str:
    text = f"{cell.kind} heads={cell.heads} requests={cell.requests} tokens={cell.tokens}"
    return text + (f" context={cell.context}" if cell.context != "layer" else "")


def summary_json(summary: Summary, target: arguments.Device) -> dict[str, Any]:
    return {
        "device": target.choice,
        "replay": summary.replay,
        "journal": str(summary.journal),
        "done": summary.done,
        "total": summary.total,
        "records": len(summary.measurements),
        "interrupted": summary.interrupted,
        "twins": dict(summary.twins),
        "without_winner": [asdict(cell) for cell in summary.without_winner],
    }
