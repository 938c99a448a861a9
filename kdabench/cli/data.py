"""list, show, plot, export, merge: the commands about sweeps, journals and recorded
measurements."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kdabench.cli import console, inputs
from kdabench.cli.inputs import OUT, RESULTS, Json, Out, Results, SweepFile

if TYPE_CHECKING:
    from kdabench.data.measurements import Candidate, Cell, Measurement

Sweeps = Annotated[Path, typer.Option("--sweeps", metavar="FOLDER", help="Sweep files.")]


def list_all(
    sweeps: Sweeps = Path("sweeps"),
    results: Results = RESULTS,
    out: Out = OUT,
    as_json: Json = False,
) -> None:
    """List sweeps, recorded devices, journals and variants.

    \b
    Examples:
      kdabench list
      kdabench list --json
    """
    from kda_kernels import variants
    from kdabench.data import devices

    listed: dict[str, list[dict[str, Any]]] = {
        "sweeps": [
            {"file": str(path), "question": _question(path)}
            for path in sorted(sweeps.glob("*.toml"))
        ],
        "devices": [
            {
                "device": slug,
                "records": [path.name for path in sorted((results / slug).glob("*.jsonl"))],
                "policy": (results / slug / "policy.py").is_file(),
            }
            for slug in devices.recorded(results)
        ],
        "journals": [{"file": str(path)} for path in sorted(out.glob("*.db"))],
        "variants": [{"variant": name} for name in variants.NAMES],
    }
    if as_json:
        console.emit_json(listed)
        return
    for heading, rows in listed.items():
        console.line(heading)
        for row in rows:
            console.line("  " + "  ".join(_plain(value) for value in row.values()))
        if not rows:
            console.line("  none")


def _plain(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, bool):
        return "with policy" if value else "no policy"
    return str(value)


def _question(path: Path) -> str:
    """Only the question: listing needs no variant's options. A broken file says so in its place."""
    import tomllib

    try:
        return str(tomllib.loads(path.read_text(encoding="utf-8")).get("question", "no question"))
    except (OSError, ValueError) as error:
        return f"cannot be read: {' '.join(str(error).split())}"


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
    return inputs.load_measurements(results, target)[1]


def _show_sweep(path: Path, results: Path, as_json: bool) -> None:
    inputs.require_sweep_file(path)
    sweep = inputs.load_sweep(path, inputs.any_sms(results))
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


def plot(
    source: Annotated[
        str, typer.Argument(metavar="SOURCE", help="A recorded device, or a journal (.db).")
    ] = "nvidia-h200",
    policy: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Policy module to show; the device's own by default."),
    ] = None,
    to: Annotated[
        Path | None, typer.Option("--to", metavar="FOLDER", help="Where to write the figures.")
    ] = None,
    results: Results = RESULTS,
    as_json: Json = False,
) -> None:
    """Draw latency curves.

    An SVG and a PNG per kind, tokens and circumstances. A device's figures go to RESULTS/<device>/plots, those of a
    journal to OUT/<sweep>/plots.

    \b
    Examples:
      kdabench plot nvidia-h200
      kdabench plot out/dispatch.db --policy out/dispatch/policy.py
      kdabench plot nvidia-h200 --to /tmp/plots
    """
    from kdabench.policy import emit

    path = Path(source)
    if path.suffix == ".db":
        from kdabench.measure.journal import Journal

        with Journal.read(path) as journal:
            measurements, envs, recorded = journal.measurements(), journal.envs(), journal.recorded
        with console.user_input():
            name, sms = inputs.device_of(envs, str(path))
        home = path.with_name(path.name.removesuffix(".db").removesuffix(".recorded"))
        folder, own = to or home / "plots", home / "policy.py"
    else:
        home, files = inputs.load_measurements(results, source)
        measurements = _fullest(files)
        with console.user_input():
            name, sms = inputs.describe(home)
        folder, recorded, own = to or home / "plots", False, home / "policy.py"
    if not measurements:
        console.fail(f"{source}: no records to draw")
    module = inputs.load_policy(policy or own) if policy or own.is_file() else None
    held = () if path.suffix == ".db" else tuple(emit.held(home))
    written = write_plots(
        measurements, folder, name=name, sms=sms, policy=module, recorded=recorded, held=held
    )
    if as_json:
        console.emit_json([str(path) for path in written])
        return
    for path in written:
        console.line(console.relative(path))


def _fullest(files: Mapping[str, Sequence[Measurement]]) -> list[Measurement]:
    """For each question the records of the file that has most of its cells: sessions are not mixed
    in one figure.

    Held-out cells are scattered on purpose, and not drawn.
    """
    from kdabench.policy.emit import HELD_OUT
    from kdabench.review.curves import Question, by_question

    best: dict[Question, list[Measurement]] = {}
    for name, measurements in files.items():
        if name != HELD_OUT:
            for question, group in by_question(measurements).items():
                best[question] = max(
                    best.get(question, []), group, key=lambda rows: len({r.cell for r in rows})
                )
    return [measurement for group in best.values() for measurement in group]


def write_plots(
    measurements: Sequence[Measurement],
    folder: Path,
    *,
    name: str,
    sms: int,
    policy: Any,
    recorded: bool,
    held: Collection[str] = (),
) -> list[Path]:
    from kdabench.review import plot

    inputs.require_writable(folder)
    return plot.write_plots(
        measurements, folder, device=name, sms=sms, policy=policy, recorded=recorded, held=held
    )


def export(
    file: SweepFile, out: Out = OUT, results: Results = RESULTS, as_json: Json = False
) -> None:
    """Write a measured journal into the recorded results.

    They are RESULTS/<device>/<sweep>.jsonl and env.json. A recorded run is not a measurement and is refused.

    \b
    Examples:
      kdabench export sweeps/dispatch.toml
    """
    from kdabench.data import devices
    from kdabench.measure import journal

    path = out / f"{file.stem}.db"
    if not path.exists():
        run = path.with_suffix(".recorded.db")
        if run.exists():
            console.fail(f"{run}: is a recorded run; it is never exported as a measurement")
        console.fail(f"{path}: no such journal; measure with: kdabench sweep {file}")
    with journal.Journal.read(path) as measured:
        with console.user_input():
            name, _ = inputs.device_of(measured.envs(), str(path))
        written = journal.export(measured, results, devices.slug(name), file.stem)
        count = len(measured.measurements())
    if as_json:
        console.emit_json({"file": str(written), "records": count})
    else:
        console.line(f"{count} records in {console.relative(written)}")


def merge(
    journals: Annotated[
        list[Path], typer.Argument(metavar="JOURNAL...", help="Journals of one sweep.")
    ],
    to: Annotated[Path, typer.Option("--to", metavar="FILE", help="The new journal.")],
) -> None:
    """Join journals of one sweep into a new one.

    \b
    Examples:
      kdabench merge a/dispatch.db b/dispatch.db --to out/dispatch.db
    """
    from kdabench.measure import journal

    journal.merge(journals, to)
    console.line(console.relative(to))


COMMANDS: dict[str, Callable[..., None]] = {
    "plot": plot,
    "list": list_all,
    "show": show,
    "export": export,
    "merge": merge,
}
