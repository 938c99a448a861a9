"""compare: two sessions, cell by cell."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Annotated

import typer

from kdabench import library
from kdabench.cli import arguments, console
from kdabench.cli.arguments import RESULTS, Json, Results
from kdabench.data.measurements import Cell
from kdabench.review.compare import Comparison, Mode, Row, Session

_SHOWN = 20  # rows of a verdict, unless all are asked for

A = Annotated[
    str,
    typer.Argument(
        metavar="A", help="A recorded device, a file of records (.jsonl), or a journal."
    ),
]
B = Annotated[str, typer.Argument(metavar="B", help="The same, measured after the change.")]
Best = Annotated[
    bool, typer.Option("--best", help="Compare the fastest of each side in each cell.")
]
Policy = Annotated[
    bool, typer.Option("--policy", help="Compare what the policy of each side picks.")
]
Relative = Annotated[
    float,
    typer.Option(
        "--relative", metavar="PERCENT", min=0, max=99, help="What differs by less is the same."
    ),
]
Absolute = Annotated[
    float,
    typer.Option("--absolute", metavar="US", min=0, help="What differs by less is the same, too."),
]
All = Annotated[bool, typer.Option("--all", help="Show every row, those that are the same, too.")]
Markdown = Annotated[bool, typer.Option("--markdown", help="As Markdown, for a pull request.")]


def command(
    a: A,
    b: B,
    best: Best = False,
    policy: Policy = False,
    relative: Relative = 1.0,
    absolute: Absolute = 0.05,
    everything: All = False,
    markdown: Markdown = False,
    results: Results = RESULTS,
    as_json: Json = False,
) -> None:
    """Compare two sessions cell by cell: B against A.

    A row is slower or faster if it differs by more than both gates, beyond noise, in time and in clock cycles; same if
    its interval lies within them; else unclear. What is missing on a side is shown as "-". What the session did to
    kernels that can't have changed is taken out. Exit status 1 if something is slower, or failed that had a time.

    \b
    Examples:
      kdabench compare nvidia-h200 out/dispatch.db
      kdabench compare before.jsonl after.jsonl --markdown
      kdabench compare nvidia-h200 out/dispatch.db --best
      kdabench compare nvidia-h200 out/dispatch.db --policy --json
    """
    _require_one("--best, --policy", best, policy)
    _require_one("--markdown, --json", markdown, as_json)
    mode: Mode = "best" if best else "policy" if policy else "same"
    sides = arguments.open_source(a, results), arguments.open_source(b, results)
    with console.user_input():
        found = library.compare(*sides, mode, relative=relative / 100, absolute_us=absolute)
    if as_json:
        console.emit_json(found.to_json())
    elif markdown:
        console.write("\n".join(_markdown(found, everything)) + "\n")
    else:
        _show(found, everything)
    if found.regression:
        raise typer.Exit(console.FINDING)


def _require_one(options: str, *given: bool) -> None:
    if sum(given) > 1:
        console.fail(f"{options}: one of them")


def _show(found: Comparison, everything: bool) -> None:
    for text in _head(found):
        console.line(text)
    console.line()
    rows, left_out = _chosen(found, everything)
    if rows:
        console.show_table(_HEADINGS, [_texts(row) for row in rows], right=(2, 3, 4, 6))
        console.line()
    for text in left_out:
        console.line(text)
    console.line(_counts(found))


_HEADINGS = (
    "cell",
    "candidate",
    "A us",
    "B us",
    "B/A",
    "95 % interval",
    "cycles",
    "verdict",
    "note",
)


def _head(found: Comparison) -> Iterator[str]:
    what = {
        "same": "the same candidates",
        "best": "the fastest of each side",
        "policy": "what the policy picks",
    }
    yield f"A: {found.a}"
    yield f"B: {found.b}"
    yield (
        f"{what[found.mode]}; gates {100 * found.gates.relative:g} % and {found.gates.absolute_us:g} us; "
        f"Benjamini-Hochberg at {100 * found.gates.error:g} %"
    )
    yield _session(found.session)
    yield from (f"warning: {warning}" for warning in found.warnings)


def _session(session: Session | None) -> str:
    if session is None:
        return "the session's own bias: unknown, too little is the same on both sides"
    return (
        f"the session's own bias: {100 * session.shift:+.2f} %, from cell to cell {100 * session.spread:.2f} % "
        f"(by {session.cells} cells with the same source and environment on both sides), taken out of B/A"
    )


def _chosen(found: Comparison, everything: bool) -> tuple[list[Row], list[str]]:
    """Rows to show, the findings first, and what to say of the others."""
    groups = {
        "slower": sorted(found.of("slower"), key=_distance),
        "failed in B": [row for row in found.rows if row.lost],
        "faster": sorted(found.of("faster"), key=_distance),
        "unclear": sorted(found.of("unclear"), key=_distance),
        "missing": sorted(
            (row for row in found.of(None) if not row.lost), key=lambda row: row.a == row.b
        ),
        "same": found.of("same"),
    }
    if everything:
        return [row for group in groups.values() for row in group], []
    limits = {"same": 0, "slower": len(found.rows), "failed in B": len(found.rows)}
    rows, left_out = [], []
    for name, group in groups.items():
        limit = limits.get(name, _SHOWN)
        rows += group[:limit]
        if len(group) > limit:
            left_out.append(f"{len(group) - limit} {'more ' * (limit > 0)}{name}: shown with --all")
    return rows, left_out


def _distance(row: Row) -> float:
    """Sorts what differs most first; what would be printed alike keeps its order."""
    return -round(abs(math.log(row.ratio or 1)), 3)


def _counts(found: Comparison) -> str:
    lost = sum(row.lost for row in found.rows)
    counts = [
        f"{len(found.of(verdict))} {verdict}" for verdict in ("slower", "faster", "same", "unclear")
    ]
    counts += [f"{lost} failed in B"] * (lost > 0)
    counts += [f"{len(found.of(None)) - lost} missing on a side"]
    mean = "" if found.geomean is None else f"; geometric mean of B/A {found.geomean:.4f}"
    return ", ".join(counts) + mean


def _texts(row: Row) -> tuple[str | None, ...]:
    names = list(dict.fromkeys("-" if c is None else str(c) for c in (row.a, row.b)))
    interval = None if row.interval is None else "{:.3f}..{:.3f}".format(*row.interval)
    return (
        cell_name(row.cell),
        " -> ".join(names),
        *(None if value is None else f"{value:.3f}" for value in (row.a_us, row.b_us, row.ratio)),
        interval,
        None if row.cycles is None else f"{row.cycles:.3f}",
        row.verdict,
        row.note,
    )


def cell_name(cell: Cell) -> str:
    """Short, with everything that is not the usual."""
    text = f"{cell.kind} q={cell.tokens} H={cell.heads} R={cell.requests}"
    for field in fields(cell):
        value = getattr(cell, field.name)
        if field.name not in ("kind", "requests", "heads", "tokens") and value != field.default:
            text += (
                f" {value}"
                if isinstance(value, str) and value != "mix"
                else f" {field.name}={value}"
            )
    return text


def _markdown(found: Comparison, everything: bool) -> Iterator[str]:
    verdict = "**regression**" if found.regression else "no regression"
    yield f"### `{found.a}` → `{found.b}`: {verdict}"
    yield ""
    yield f"{_counts(found)}."
    yield ""
    yield from (f"> **Warning** {warning}\n" for warning in found.warnings)
    rows, left_out = _chosen(found, everything)
    findings = [row for row in rows if row.lost or row.verdict in ("slower", "faster")]
    others = [row for row in rows if row not in findings]
    if findings:
        yield from _markdown_table(findings)
        yield ""
    if others or left_out:
        yield f"<details><summary>{len(others)} other rows</summary>"
        yield ""
        yield from _markdown_table(others) if others else ()
        yield ""
        yield from (f"{text}  " for text in left_out)
        yield ""
        yield "</details>"
        yield ""
    yield from (f"<sub>{text}</sub>  " for text in list(_head(found))[2:4])


def _markdown_table(rows: Sequence[Row]) -> Iterator[str]:
    yield "| " + " | ".join(_HEADINGS) + " |"
    yield "| --- | --- | ---: | ---: | ---: | --- | ---: | --- | --- |"
    for row in rows:
        cells = ("-" if text is None else text.replace("|", "\\|") for text in _texts(row))
        yield "| " + " | ".join(cells) + " |"
