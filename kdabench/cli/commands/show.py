"""show: what a sweep asks, or what was recorded."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer

from kdabench.cli import arguments, console
from kdabench.cli.arguments import RESULTS, Json, Results
from kdabench.data.measurements import Candidate, Cell, Measurement
from kdabench.data.sweep import Sweep
from kdabench.measure.target import any_sms

What = Annotated[
    str,
    typer.Argument(
        metavar="WHAT", help="A sweep file, a journal, a file of records, or a recorded device."
    ),
]
Heads = Annotated[int | None, typer.Option(min=1, help="Only cells with this many heads.")]
Requests = Annotated[int | None, typer.Option(min=1, help="Only cells with this many requests.")]
Tokens = Annotated[
    int | None, typer.Option(min=1, help="Only cells with this many tokens per request.")
]
KindName = Annotated[str | None, typer.Option(help="Only cells of this kind.")]
Files = Mapping[str, Sequence[Measurement]]
"""Measurements by the name of their file."""


def command(
    target: What,
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
    if Path(target).suffix == ".toml":
        _show_sweep(Path(target), results, as_json)
        return
    files = _files(target, results)
    wanted = {"heads": heads, "requests": requests, "tokens": tokens, "kind": kind}
    limits = {name: value for name, value in wanted.items() if value is not None}
    if limits:
        _show_candidates({name: _within(found, limits) for name, found in files.items()}, as_json)
    else:
        _show_summary(files, as_json)


def _files(target: str, results: Path) -> Files:
    sweeps = arguments.open_source(target, results).sweeps
    if Path(target).suffix:
        return {Path(target).name: found for found in sweeps.values()}
    return {f"{stem}.jsonl": found for stem, found in sweeps.items()}


def _within(found: Sequence[Measurement], limits: Mapping[str, object]) -> list[Measurement]:
    return [m for m in found if all(getattr(m.cell, key) == v for key, v in limits.items())]


def _show_sweep(path: Path, results: Path, as_json: bool) -> None:
    arguments.require_sweep_file(path)
    sweep = arguments.load_sweep(path, any_sms(results))
    if as_json:
        console.emit_json(_sweep_json(sweep))
        return
    console.line(sweep.question)
    console.line(
        f"{len(sweep.cells)} cells x {len(sweep.candidates)} candidates x {sweep.processes} processes"
    )
    console.line()
    headings = ("kind", "tokens", "heads", "state", "context", "requests")
    console.show_table(headings, list(_cell_rows(sweep.cells)), right=(1, 2))
    console.line()
    for candidate in sweep.candidates:
        console.line(str(candidate))


def _sweep_json(sweep: Sweep) -> dict[str, Any]:
    return {
        "question": sweep.question,
        "processes": sweep.processes,
        "cells": [asdict(cell) for cell in sweep.cells],
        "candidates": [{"variant": c.variant, "spec": c.options} for c in sweep.candidates],
    }


def _cell_rows(cells: Sequence[Cell]) -> Iterator[tuple[object, ...]]:
    rows: dict[tuple[object, ...], set[int]] = {}
    for cell in cells:
        key: tuple[object, ...] = (cell.kind, cell.tokens, cell.heads, cell.state_dtype)
        rows.setdefault((*key, cell.context), set()).add(cell.requests)
    for shown, requests in rows.items():
        yield (*shown, " ".join(map(str, sorted(requests))))


def _show_summary(files: Files, as_json: bool) -> None:
    rows = list(_summary_rows(files))
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


def _summary_rows(files: Files) -> Iterator[dict[str, Any]]:
    groups: dict[tuple[str, str, int, str, str], list[Measurement]] = {}
    for name, found in files.items():
        for measurement in found:
            cell = measurement.cell
            key = (name, cell.kind, cell.tokens, cell.context, measurement.candidate.variant)
            groups.setdefault(key, []).append(measurement)
    for names, group in groups.items():
        statuses = Counter(measurement.status for measurement in group)
        yield {
            **dict(zip(("file", "kind", "tokens", "context", "variant"), names, strict=True)),
            "cells": len({measurement.cell for measurement in group}),
            "records": len(group),
            "samples": sum(len(measurement.samples_us) for measurement in group),
            "statuses": dict(sorted(statuses.items())),
        }


_HEADINGS = (
    *("file", "kind", "q", "H", "R", "context", "candidate"),
    *("median us", "quartiles", "n", "floor/time", "status", "reason"),
)


def _show_candidates(files: Files, as_json: bool) -> None:
    rows = [row for name, found in files.items() for row in _candidate_rows(name, found)]
    if as_json:
        console.emit_json(rows)
    elif rows:
        console.show_table(_HEADINGS, list(map(_texts, rows)), right=(2, 3, 4, 7, 8, 9, 10))
    else:
        console.line("no such cell was measured")


def _texts(row: Mapping[str, Any]) -> tuple[object, ...]:
    cell, quartiles = row["cell"], row["quartiles_us"]
    where = (cell[key] for key in ("kind", "tokens", "heads", "requests", "context"))
    return (
        row["file"],
        *where,
        row["candidate"],
        _number(row["median_us"], ".3f"),
        None if quartiles is None else "{:.3f}..{:.3f}".format(*quartiles),
        row["samples"],
        _number(row["efficiency"], ".2f"),
        row["status"],
        row["reason"],
    )


def _candidate_rows(name: str, found: Sequence[Measurement]) -> list[dict[str, Any]]:
    """Pool each candidate's processes within a cell: a row each, within a cell the fastest
    first."""
    pooled: dict[tuple[Cell, Candidate], list[Measurement]] = {}
    for measurement in found:
        pooled.setdefault((measurement.cell, measurement.candidate), []).append(measurement)
    order = {cell: i for i, cell in enumerate(dict.fromkeys(cell for cell, _ in pooled))}
    rows = [_candidate_row(name, *key, group) for key, group in pooled.items()]
    places = [
        (order[cell], row["median_us"] or math.inf, str(candidate), i)
        for i, ((cell, candidate), row) in enumerate(zip(pooled, rows, strict=True))
    ]
    return [rows[i] for *_, i in sorted(places)]


def _candidate_row(
    name: str, cell: Cell, candidate: Candidate, group: Sequence[Measurement]
) -> dict[str, Any]:
    samples = [us for m in group if m.status == "ok" for us in m.samples_us]
    trouble = next((m for m in group if m.status != "ok"), group[0])
    row: dict[str, Any] = {
        "file": name,
        "cell": asdict(cell),
        "candidate": str(candidate),
        "median_us": None,
        "quartiles_us": None,
        "samples": len(samples),
        "efficiency": None,
        "status": trouble.status,
        "reason": trouble.reason,
    }
    if samples:
        low, middle, high = (round(float(v), 3) for v in np.percentile(samples, (25, 50, 75)))
        row |= {"median_us": middle, "quartiles_us": [low, high]}
        row["efficiency"] = round(cell.problem.floor_us() / middle, 3)
    return row


def _number(value: float | None, form: str) -> str | None:
    return None if value is None else format(value, form)
