"""A sweep as `sweep` and `run` end it, and show it as JSON."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from kdabench.cli import console
from kdabench.data.measurements import Cell
from kdabench.measure.session import Summary
from kdabench.measure.target import Target


def announce(target: Target, asked: str, results: Path, as_json: bool) -> None:
    """Say first whether a command measures, or runs on recorded samples."""
    first = target.headline(asked, results)
    if as_json:
        console.note(first)
    else:
        console.line(first)


def finish(summary: Summary) -> None:
    """End the command with what a sweep's summary calls for, or return if all is well."""
    if summary.without_winner:
        first, more = _cell_name(summary.without_winner[0]), len(summary.without_winner) - 1
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


def _cell_name(cell: Cell) -> str:
    text = f"{cell.kind} heads={cell.heads} requests={cell.requests} tokens={cell.tokens}"
    return text + (f" context={cell.context}" if cell.context != "layer" else "")


def summary_json(summary: Summary, target: Target) -> dict[str, Any]:
    """Give a sweep's summary as JSON takes it."""
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
