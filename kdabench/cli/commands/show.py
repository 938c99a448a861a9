"""show: what a sweep asks, or what was recorded."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kdabench.cli import arguments, console
from kdabench.cli.arguments import (
    RESULTS,
    Json,
    Results,
)

if TYPE_CHECKING:
    from kdabench.data.measurements import Candidate, Cell, Measurement


Heads = Annotated[int | None, typer.Option(min=1, help="Only cells with this many heads.")]


Requests = Annotated[int | None, typer.Option(min=1, help="Only cells with this many requests.")]


Tokens = Annotated[
    int | None, typer.Option(min=1, help="Only cells with this many tokens per request.")
]


KindName = Annotated[str | None, typer.Option(help="Only cells of this kind.")]


def show(
    target: Annotated[
        str,
        typer.Argument(
            metavar="WHAT", help="A sweep file, a journal, a file of records, or a recorded device."
        ),
    ],
    heads: Heads = None,
    requests: Requests = None,
    tokens: Tokens = None,
    kind: KindName = None,
    results: Results = RESULTS,
    as_json: Json = False,
) -> None:
    """Show what a sweep asks, or what was recorded.

    Of records: a summary by kind, tokens and variant; with --heads, --requests, --tokens or --kind, one line per
    candidate and cell.

    \b
    Examples:
      kdabench show sweeps/dispatch.toml
      kdabench show out/dispatch.db
      kdabench show nvidia-h200
      kdabench show nvidia-h200 --kind decode --heads 12 --requests 8
    """
    path = Path(target)
    if path.suffix == ".toml":
        _show_sweep(path, results, as_json)
        return
    files = _measurements(path, target, results)
    wanted = {"heads": heads, "requests": requests, "tokens": tokens, "kind": kind}
    limits = {name: value for name, value in wanted.items() if value is not None}
    if not limits:
        _show_summary(files, as_json)
        return
    for name, measurements in files.items():
        files[name] = [
            r
            for r in measurements
            if all(getattr(r.cell, key) == value for key, value in limits.items())
        ]
    _show_candidates(files, as_json)


def _measurements(path: Path, target: str, results: Path) -> dict[str, list[Measurement]]:
    """Records by the name of their file."""
    from kdabench.data import measurements
    from kdabench.measure.journal import Journal

    if path.suffix == ".db":
        with Journal.read(path) as journal:
            return {path.name: journal.measurements()}
    if path.suffix == ".jsonl":
        with console.user_input():
            return {path.name: measurements.load([path])}
    return arguments.load_measurements(results, target)[1]


def _show_sweep(path: Path, results: Path, as_json: bool) -> None:
    arguments.require_sweep_file(path)
    sweep = arguments.load_sweep(path, arguments.any_sms(results))
    if as_json:
        console.emit_json(
            {
                "question": sweep.question,
                "processes": sweep.processes,
                "cells": [asdict(cell) for cell in sweep.cells],
                "candidates": [{"variant": c.variant, "spec": c.options} for c in sweep.candidates],
            }
        )
        return
    console.line(sweep.question)
    console.line(
        f"{len(sweep.cells)} cells x {len(sweep.candidates)} candidates x {sweep.processes} processes"
    )
    console.line()
    rows: dict[tuple[object, ...], list[Cell]] = {}
    for cell in sweep.cells:
        rows.setdefault(
            (cell.kind, cell.tokens, cell.heads, cell.state_dtype, cell.context), []
        ).append(cell)
    console.show_table(
        ("kind", "tokens", "heads", "state", "context", "requests"),
        [
            (*key, " ".join(map(str, sorted({c.requests for c in cells}))))
            for key, cells in rows.items()
        ],
        right=(1, 2),
    )
    console.line()
    for candidate in sweep.candidates:
        console.line(str(candidate))


def _show_summary(files: Mapping[str, Sequence[Measurement]], as_json: bool) -> None:
    groups: dict[tuple[str, str, int, str, str], list[Measurement]] = {}
    for name, measurements in files.items():
        for measurement in measurements:
            cell = measurement.cell
            key = (name, cell.kind, cell.tokens, cell.context, measurement.candidate.variant)
            groups.setdefault(key, []).append(measurement)
    rows: list[dict[str, Any]] = []
    for names, group in groups.items():
        statuses = Counter(measurement.status for measurement in group)
        rows.append(
            {
                **dict(zip(("file", "kind", "tokens", "context", "variant"), names, strict=True)),
                "cells": len({measurement.cell for measurement in group}),
                "records": len(group),
                "samples": sum(len(measurement.samples_us) for measurement in group),
                "statuses": dict(sorted(statuses.items())),
            }
        )
    if as_json:
        console.emit_json(rows)
        return
    if not rows:
        console.line("no records")
        return
    shown = [
        (*list(row.values())[:-1], ", ".join(f"{n} {s}" for s, n in row["statuses"].items()))
        for row in rows
    ]
    console.show_table(tuple(rows[0]), shown, right=(2, 5, 6, 7))


def _show_candidates(files: Mapping[str, Sequence[Measurement]], as_json: bool) -> None:
    rows = [
        row for name, measurements in files.items() for row in _candidate_rows(name, measurements)
    ]
    if as_json:
        console.emit_json(rows)
        return
    if not rows:
        console.line("no such cell was measured")
        return
    shown = []
    for row in rows:
        cell, quartiles = row["cell"], row["quartiles_us"]
        spread = None if quartiles is None else "{:.3f}..{:.3f}".format(*quartiles)
        figures = (
            _number(row["median_us"], ".3f"),
            spread,
            row["samples"],
            _number(row["efficiency"], ".2f"),
        )
        where = (
            row["file"],
            cell["kind"],
            cell["tokens"],
            cell["heads"],
            cell["requests"],
            cell["context"],
        )
        shown.append((*where, row["candidate"], *figures, row["status"], row["reason"]))
    headings = (
        *("file", "kind", "q", "H", "R", "context", "candidate"),
        *("median us", "quartiles", "n", "floor/time", "status", "reason"),
    )
    console.show_table(headings, shown, right=(2, 3, 4, 7, 8, 9, 10))


def _candidate_rows(name: str, measurements: Sequence[Measurement]) -> list[dict[str, Any]]:
    """One row per cell and candidate over all processes; within a cell the fastest first."""
    import numpy as np

    pooled: dict[tuple[Cell, Candidate], list[Measurement]] = {}
    for measurement in measurements:
        pooled.setdefault((measurement.cell, measurement.candidate), []).append(measurement)
    order = {cell: i for i, cell in enumerate(dict.fromkeys(cell for cell, _ in pooled))}
    rows: list[tuple[tuple[int, float, str], dict[str, Any]]] = []
    for (cell, candidate), group in pooled.items():
        samples = [
            us
            for measurement in group
            if measurement.status == "ok"
            for us in measurement.samples_us
        ]
        quartiles = (
            np.percentile(samples, (25, 50, 75)) if samples else (math.inf, math.inf, math.inf)
        )
        low, middle, high = (round(float(v), 3) for v in quartiles)
        trouble = next((r for r in group if r.status != "ok"), group[0])
        row = {
            "file": name,
            "cell": asdict(cell),
            "candidate": str(candidate),
            "median_us": middle if samples else None,
            "quartiles_us": [low, high] if samples else None,
            "samples": len(samples),
            "efficiency": round(cell.problem.floor_us() / middle, 3) if samples else None,
            "status": trouble.status,
            "reason": trouble.reason,
        }
        rows.append(((order[cell], middle, str(candidate)), row))
    return [row for _, row in sorted(rows, key=lambda pair: pair[0])]


def _number(value: float | None, form: str) -> str | None:
    return None if value is None else format(value, form)
