"""compare, report: the commands for a reviewer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kda_kernels.problem import KINDS
from kdabench.cli import console, inputs
from kdabench.cli.inputs import RESULTS, Json, Results

if TYPE_CHECKING:
    from kdabench.data.measurements import Cell, Measurement
    from kdabench.data.sweep import Sweep
    from kdabench.measure.session import Summary
    from kdabench.policy.constants import Policy
    from kdabench.policy.regret import Evidence
    from kdabench.review.compare import Comparison, Mode, Row, Session, Side
    from kdabench.review.report import Fitted, Measured, Subject

_SHOWN = 20  # rows of a verdict, unless all are asked for


@dataclass(frozen=True)
class _Source:
    """A recorded device, a file of records or a journal. files: records by the name of their
    sweep"""

    name: str
    files: Mapping[str, Sequence[Measurement]]
    envs: Mapping[str, Mapping[str, Any]]
    policy: Path
    recorded: bool = False

    def measurements(self, preferred: Sequence[str]) -> list[Measurement]:
        """Each cell from one file: of the preferred ones if it is in such, else of the fullest."""
        order = sorted(
            self.files, key=lambda stem: (stem not in preferred, -len(self.files[stem]), stem)
        )
        owner: dict[Cell, str] = {}
        for stem in order:
            for measurement in self.files[stem]:
                owner.setdefault(measurement.cell, stem)
        return [r for stem in order for r in self.files[stem] if owner[r.cell] == stem]


def _open(name: str, results: Path) -> _Source:
    from kdabench.data import measurements
    from kdabench.measure.journal import Journal

    path = Path(name)
    if path.suffix == ".db":
        stem = path.name.removesuffix(".db").removesuffix(".recorded")
        with Journal.read(path) as journal:
            files = {stem: journal.measurements()}
            return _Source(
                name, files, journal.envs(), path.with_name(stem) / "policy.py", journal.recorded
            )
    if path.suffix == ".jsonl":
        with console.user_input():
            files = {path.stem: measurements.load([path])}
            return _Source(name, files, measurements.load_envs([path]), path.with_name("policy.py"))
    folder, by_file = inputs.load_measurements(results, name)
    with console.user_input():
        envs = measurements.load_envs([folder / "env.json"])
    return _Source(
        name,
        {Path(file).stem: found for file, found in by_file.items()},
        envs,
        folder / "policy.py",
    )


def compare(
    a: Annotated[
        str,
        typer.Argument(
            metavar="A", help="A recorded device, a file of records (.jsonl), or a journal."
        ),
    ],
    b: Annotated[str, typer.Argument(metavar="B", help="The same, measured after the change.")],
    best: Annotated[
        bool, typer.Option("--best", help="Compare the fastest of each side in each cell.")
    ] = False,
    policy: Annotated[
        bool, typer.Option("--policy", help="Compare what the policy of each side picks.")
    ] = False,
    relative: Annotated[
        float,
        typer.Option(
            "--relative", metavar="PERCENT", min=0, max=99, help="What differs by less is the same."
        ),
    ] = 1.0,
    absolute: Annotated[
        float,
        typer.Option(
            "--absolute", metavar="US", min=0, help="What differs by less is the same, too."
        ),
    ] = 0.05,
    everything: Annotated[
        bool, typer.Option("--all", help="Show every row, those that are the same, too.")
    ] = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="As Markdown, for a pull request.")
    ] = False,
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
    from kdabench.review import compare as comparing

    if best and policy:
        console.fail("--best, --policy: one of them")
    if markdown and as_json:
        console.fail("--markdown, --json: one of them")
    sources = _open(a, results), _open(b, results)
    mode: Mode = "best" if best else "policy" if policy else "same"
    with console.user_input():
        gates = comparing.Gates(relative / 100, absolute)
        found = comparing.compare(*_sides(sources, policy), mode, gates)
    if as_json:
        console.emit_json(found.to_json())
    elif markdown:
        console.write("\n".join(_markdown(found, everything)) + "\n")
    else:
        _show(found, everything)
    if found.regression:
        raise typer.Exit(console.FINDING)


def _sides(sources: tuple[_Source, _Source], policy: bool) -> tuple[Side, Side]:
    a, b = sources
    modules: list[Any] = [None, None]
    if policy:
        own = [source.policy if source.policy.is_file() else None for source in sources]
        given = next((path for path in own if path is not None), None)
        if given is None:
            raise ValueError(f"{a.policy}, {b.policy}: no policy there")
        for name, path in zip("AB", own, strict=True):
            if path is None:
                console.note(f"{name} has no policy of its own; its picks are those of {given}")
        modules = [inputs.load_policy(path or given) for path in own]
    return _side(a, b, modules[0]), _side(b, a, modules[1])


def _side(source: _Source, other: _Source, module: Any) -> Side:
    from kdabench.review.compare import Side

    measurements = source.measurements(tuple(other.files))
    return Side(
        source.name,
        measurements,
        source.envs,
        source.recorded,
        None if module is None else module.ranked,
    )


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


def report(
    source: Annotated[
        str,
        typer.Argument(
            metavar="DEVICE", help="A recorded device, or a journal (.db).", show_default=False
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="The file; else report.html beside the policy."),
    ] = None,
    sweeps: Annotated[Path, typer.Option("--sweeps", metavar="FOLDER", help="Sweep files.")] = Path(
        "sweeps"
    ),
    results: Results = RESULTS,
) -> None:
    """Write one HTML file about a device, for a reviewer.

    It stands alone: figures are inside, nothing is loaded from anywhere. It has the question, what was measured, the
    policy with its regret, latency curves, targets, failures, every cell, and how to reproduce it.

    \b
    Examples:
      kdabench report nvidia-h200
      kdabench report nvidia-h200 --out review.html
      kdabench report out/dispatch.db
    """
    from kdabench.data import devices
    from kdabench.policy.emit import held
    from kdabench.review.report import Subject

    found = _open(source, results)
    journal = Path(source).suffix == ".db"
    if Path(source).suffix == ".jsonl" or not any(found.files.values()):
        console.fail(f"{source}: a recorded device or a journal with records is expected")
    home = found.policy.parent
    target = out or home / "report.html"
    inputs.require_writable(target.parent)
    with console.user_input():
        name, sms = inputs.device_of(found.envs, source)
        recorded = results / devices.slug(name) if journal else home
        kept_back = held(recorded)
    fitted, text = _fit_journal(found, kept_back) if journal else _fit_device(home)
    subject = Subject(
        device=name,
        recorded=found.recorded,
        measured=_measured(found, sweeps, sms),
        envs=found.envs,
        fitted=fitted,
        figures=_figures(found, name, sms, text, kept_back),
        verified=_verified(recorded),
        reproduce=_commands(found, source, sweeps),
        notes=_stale(found.policy, text) if not journal else (),
    )
    write(subject, target)
    console.line(console.relative(target))


def of_run(
    plan: Sweep,
    summary: Summary,
    target: inputs.Device,
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
        recorded=summary.recorded,
        measured=[Measured(plan.stem, plan.question, summary.measurements, plan.cells)],
        envs=envs,
        fitted=fitted if isinstance(fitted, str) else Fitted(*fitted),
        figures=_read_figures(summary.measurements, written),
        verified=_verified(results / target.slug),
        reproduce=[again + (f" --device {target.source}" if target.recorded else "")],
        notes=unfinished,
    )


def write(subject: Subject, path: Path) -> None:
    """A report, whole or not at all."""
    from kdabench.data.measurements import write_atomic
    from kdabench.review.report import render

    write_atomic(path, render(subject))


def _fit_device(home: Path) -> tuple[Fitted | str, str | None]:
    """What a device's records give, or why not, and the text of that policy's module."""
    from kdabench.data.measurements import MeasurementError
    from kdabench.policy import certificate, emit, regret
    from kdabench.review.report import Fitted

    try:
        found = emit.regenerate(home, inputs.default_schedule())
    except (regret.FitError, MeasurementError) as error:
        return str(error), None
    changes = None
    if found.previous is not None:
        before, after = (emit.load(text).ranked for text in (found.previous, found.module))
        changes = certificate.changes(found.grid, before, after)
    return Fitted(found.policy, found.evidence, changes), found.module


def _fit_journal(found: _Source, held: Mapping[str, str]) -> tuple[Fitted | str, str | None]:
    from kdabench.policy import emit, fit, regret
    from kdabench.review.report import Fitted

    (measurements,) = found.files.values()
    try:
        policy, evidence = fit.fit(
            measurements, found.envs, default_schedule=inputs.default_schedule(), held=held
        )
    except regret.FitError as error:
        return str(error), None
    return Fitted(policy, evidence), emit.emit(policy, evidence)


def _measured(found: _Source, sweeps: Path, sms: int) -> list[Measured]:
    """By sweep, with question and cells of its file; one that can't be read is named on stderr."""
    from kdabench.data import sweep
    from kdabench.review.report import Measured

    options = inputs.known_options()
    measured = []
    for stem, measurements in found.files.items():
        path, plan = sweeps / f"{stem}.toml", None
        if path.is_file():
            try:
                plan = sweep.load(path, options, sms)
            except sweep.SweepError as error:
                console.note(f"warning: {error}")
        asked = None if plan is None else (plan.question, plan.cells)
        measured.append(Measured(stem, asked and asked[0], measurements, asked and asked[1]))
    return measured


def _figures(
    found: _Source, name: str, sms: int, policy: str | None, held: Mapping[str, str]
) -> list[tuple[str, str]]:
    from tempfile import TemporaryDirectory

    from kdabench.cli import data
    from kdabench.policy import emit

    module = None if policy is None else emit.load(policy)
    measurements = data._fullest(found.files)
    with TemporaryDirectory() as folder:
        paths = data.write_plots(
            measurements,
            Path(folder),
            name=name,
            sms=sms,
            policy=module,
            recorded=found.recorded,
            held=tuple(held),
        )
        return _read_figures(measurements, paths)


def _read_figures(
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


def _verified(folder: Path) -> Mapping[str, Any] | None:
    from kdabench.data.measurements import parse_json

    path = folder / "verified.json"
    if not path.is_file():
        return None
    with console.user_input():
        found = parse_json(path.read_text(encoding="utf-8"), str(path))
        if not isinstance(found, dict) or not isinstance(found.get("variants"), dict):
            raise ValueError(f"{path}: variants: an object is expected")
        return found


def _stale(path: Path, text: str | None) -> tuple[str, ...]:
    if text is None or (path.is_file() and path.read_text(encoding="utf-8") == text):
        return ()
    return (f"policy.py is not what these records give; repair: kdabench emit {path.parent.name}",)


def _commands(found: _Source, source: str, sweeps: Path) -> list[str]:
    """How to measure and derive the same again."""
    revisions = sorted({str(env.get("git_revision")) for env in found.envs.values()} - {"None"})
    commands = [f"# measured with revision {', '.join(revisions) or '-'}"]
    files = [(sweeps / f"{stem}.toml").as_posix() for stem in found.files]
    commands += [f"kdabench sweep {file}" for file in files]
    if Path(source).suffix != ".db":
        commands += [f"kdabench export {file}" for file in files]
        commands += ["kdabench verify", f"kdabench emit {source}", "kdabench check"]
    return [*commands, f"kdabench report {source}"]


COMMANDS: dict[str, Callable[..., None]] = {"compare": compare, "report": report}
