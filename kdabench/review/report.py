"""One self-contained HTML file about a device's measurements, for a reviewer. Same input, same
bytes.

It loads nothing from anywhere: figures stand in it as SVG. What was not measured is shown as "-".
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kda_kernels import variants
from kdabench.data.measurements import Candidate, Cell, Measurement, cell_order
from kdabench.policy.certificate import Change
from kdabench.policy.constants import Policy
from kdabench.policy.regret import Certificate, Evidence, Regret, count_statuses
from kdabench.review.curves import Question, by_question, timings

MISSING = "-"
NO_RESULT = "none"
"""Measured, but nothing has a time."""

_SHOWN = 10  # cells that a row names


@dataclass(frozen=True)
class Measured:
    """The records of one sweep. question: None if unknown. planned: its cells; None if the sweep
    file is not there"""

    sweep: str
    question: str | None
    measurements: Sequence[Measurement]
    planned: Sequence[Cell] | None = None


@dataclass(frozen=True)
class Fitted:
    """A policy and what speaks for it. changes: against the policy before; None if there is none
    before."""

    policy: Policy
    evidence: Evidence
    changes: Sequence[Change] | None = None


@dataclass(frozen=True)
class Subject:
    """What a report is about.

    fitted     or why there is no policy
    figures    title and SVG
    verified   contents of verified.json, or None
    reproduce  commands, in order
    notes      what a reviewer must know first
    """

    device: str
    recorded: bool
    measured: Sequence[Measured]
    envs: Mapping[str, Mapping[str, Any]]
    fitted: Fitted | str
    figures: Sequence[tuple[str, str]] = ()
    verified: Mapping[str, Any] | None = None
    reproduce: Sequence[str] = ()
    notes: Sequence[str] = ()


@dataclass(frozen=True)
class Table:
    """right: indices of the columns with figures. Cells that are None are shown as "-"."""

    headings: Sequence[str]
    rows: Sequence[Sequence[object]]
    right: Sequence[int] = ()


def render(subject: Subject) -> str:
    """The whole file."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("kdabench.review", "templates"),
        undefined=StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    figures = [
        (title, Markup(inline_svg(svg, f"f{number}-")))
        for number, (title, svg) in enumerate(subject.figures, 1)
    ]
    return environment.get_template("report.html.j2").render(
        subject=subject,
        summary=_summary(subject),
        measured=_measured(subject.measured),
        environment=_environment(subject.envs),
        verified=_verified(subject),
        policy=None if isinstance(subject.fitted, str) else _policy(subject.fitted),
        figures=figures,
        targets=_targets(subject.device, subject.measured),
        efficiency=list(_efficiency(subject.measured)),
        failures=_failures(subject.measured),
        coverage=[_coverage(found) for found in subject.measured],
    )


def inline_svg(svg: str, prefix: str) -> str:
    """An SVG file as a part of an HTML file: its identifiers prefixed, so that those of several
    don't meet; as wide as there is room; without a document type, metadata and XML namespaces,
    which HTML does not need."""
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, count=1, flags=re.DOTALL)
    body = re.sub(r'\bid="', f'id="{prefix}', body)
    body = re.sub(r'(?:xlink:)?href="#', f'href="#{prefix}', body)
    body = body.replace("url(#", f"url(#{prefix}")
    head, rest = body.split(">", 1)
    head = re.sub(r'\s(?:xmlns(?::\w+)?|version|height)="[^"]*"', "", head)
    head = re.sub(r'\swidth="([^"]*)"', r' role="img" style="width:100%;max-width:\1"', head)
    return re.sub(r"\s*\n\s*", "\n", f"{head}>{rest}").strip()


# --- what was measured ---


def _summary(subject: Subject) -> list[tuple[str, str]]:
    measurements = [r for found in subject.measured for r in found.measurements]
    cells = len({r.cell for r in measurements})
    statuses = count_statuses(measurements)
    facts = [("measured", f"{cells} cells, {len(measurements)} records: {_counts(statuses)}")]
    if isinstance(subject.fitted, str):
        return [*facts, ("policy", f"none: {subject.fitted}")]
    evidence = subject.fitted.evidence
    if "all" in evidence.regret:
        facts.append(("regret of the policy, fitted cells", _regret_text(evidence.regret["all"])))
    if evidence.certificate is None:
        facts.append(("certificate", f"{MISSING} (no cells were held out)"))
    else:
        facts.append(
            ("certificate, held-out cells", _regret_text(evidence.certificate.regret["all"]))
        )
    without = len(evidence.without_winner)
    facts.append(
        (
            "coverage of the fit",
            f"{evidence.cells - without} of {evidence.cells} cells have a winner",
        )
    )
    return facts


def _regret_text(regret: Regret) -> str:
    mean, p99, worst = (
        f"{100 * value:.2f} %" for value in (regret.geomean, regret.p99, regret.max)
    )
    return f"geometric mean {mean}, p99 {p99}, max {worst} ({regret.cells} cells)"


def _counts(statuses: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {status}" for status, count in statuses.items()) or "no records"


def _measured(sources: Iterable[Measured]) -> Table:
    rows = []
    for found in sources:
        measurements = found.measurements
        cells = {r.cell for r in measurements}
        planned = (
            None
            if found.planned is None
            else f"{len(cells.intersection(found.planned))} of {len(found.planned)}"
        )
        rows.append(
            (
                found.sweep,
                found.question,
                len(cells),
                planned,
                len({r.candidate for r in measurements}),
                len({r.process for r in measurements}),
                sum(len(r.samples_us) for r in measurements),
                _counts(count_statuses(measurements)),
            )
        )
    headings = (
        "sweep",
        "question",
        "cells",
        "of the sweep file",
        "candidates",
        "processes",
        "samples",
        "records",
    )
    return Table(headings, rows, (2, 3, 4, 5, 6))


def _environment(envs: Mapping[str, Mapping[str, Any]]) -> Table:
    """Each field, with all its values."""
    names = sorted({name for env in envs.values() for name in env})
    rows = []
    for name in names:
        values = sorted({str(env.get(name)) for env in envs.values() if env.get(name) is not None})
        rows.append((name, ", ".join(values) or None))
    return Table(("field", "value"), rows)


def _verified(subject: Subject) -> Table | None:
    if subject.verified is None:
        return None
    ran: dict[str, set[str]] = defaultdict(set)
    for found in subject.measured:
        for measurement in found.measurements:
            if measurement.code:
                ran[measurement.candidate.variant].add(measurement.code.partition("-")[0])
    rows: list[Sequence[object]] = []
    for variant, facts in sorted(subject.verified.get("variants", {}).items()):
        measured = ran.get(variant)
        verified = set(facts.get("binaries", ()))
        same = None if not measured else f"{len(measured & verified)} of {len(measured)}"
        rows.append((variant, facts["passed"], len(facts["failed"]), facts["unsupported"], same))
    rows += [
        (variant, None, None, None, None)
        for variant in sorted(ran.keys() - subject.verified["variants"])
    ]
    return Table(
        ("variant", "passed", "failed", "unsupported", "measured binaries verified"),
        rows,
        (1, 2, 3, 4),
    )


# --- policy ---


def _policy(fitted: Fitted) -> dict[str, Any]:
    policy, evidence = fitted.policy, fitted.evidence
    return {
        "origin": policy.origin,
        "regret": _regret(evidence.regret, evidence.baselines),
        "certificate": None if evidence.certificate is None else _certificate(evidence.certificate),
        "thresholds": Table(
            ("constant", "value", "90 % interval"), list(_thresholds(policy, evidence))
        ),
        "picks": list(_picks(policy)),
        "changes": None if fitted.changes is None else _changes(fitted.changes),
        "remarks": list(_remarks(evidence)),
    }


_REGRET = ("choice", "kind", "cells", "mean %", "p99 %", "max %", "worst cell", "fastest picked %")


def _figures(regret: Regret) -> tuple[object, ...]:
    figures = (f"{100 * value:.2f}" for value in (regret.geomean, regret.p99, regret.max))
    return regret.cells, *figures, cell_name(regret.worst), f"{100 * regret.top1:.0f}"


def _regret(regret: Mapping[str, Regret], baselines: Mapping[str, Mapping[str, Regret]]) -> Table:
    rows: list[Sequence[object]] = [
        ("policy", kind, *_figures(found)) for kind, found in regret.items()
    ]
    rows += [
        (name, "all", *_figures(found["all"]))
        for name, found in baselines.items()
        if "all" in found
    ]
    return Table(_REGRET, rows, (2, 3, 4, 5, 7))


def _certificate(certificate: Certificate) -> Table:
    rows: list[Sequence[object]] = [
        ("policy", kind, *_figures(found)) for kind, found in certificate.regret.items()
    ]
    if certificate.bounds:
        bounds = (f"{100 * certificate.bounds[name]:.2f}" for name in ("geomean", "p99", "max"))
        rows.append(("policy, 95 % bounds", "all", certificate.cells, *bounds, None, None))
    rows += [(name, "all", *_figures(found)) for name, found in certificate.baselines.items()]
    return Table(_REGRET, rows, (2, 3, 4, 5, 7))


def _thresholds(policy: Policy, evidence: Evidence) -> Iterator[tuple[str, str, str | None]]:
    intervals = {
        "stock_items": evidence.intervals,
        **{name.lower(): v for name, v in evidence.other_intervals.items()},
    }
    for rule, by_key in intervals.items():
        constant = getattr(policy, rule)
        for key, interval in by_key.items():
            table = isinstance(constant, Mapping)
            value = constant.get(int(key) if key.isdecimal() else key) if table else constant
            span = None if interval is None else " to ".join(map(_items, interval))
            yield f"{rule.upper()}{f'[{key}]' if table else ''}", _items(value), span


def _items(value: int | None) -> str:
    return "never" if value is None else str(value)


def _picks(policy: Policy) -> Iterator[tuple[str, list[tuple[int, list[tuple[str, str, str]]]]]]:
    """Of CHOICES: the step, and by heads from how many items on which variant takes it, with what
    options."""
    for (kind, tokens), table in sorted(policy.choices.items()):
        rows = []
        for heads, row in sorted(table.items()):
            runs: list[tuple[str, str, str]] = []
            for items, (variant, options) in sorted(row.items()):
                name = f"{variant}/{options['split']}" if "split" in options else variant
                detail = ", ".join(f"{option}={value}" for option, value in sorted(options.items()))
                if runs and runs[-1][1] == name:
                    runs[-1] = (runs[-1][0], name, f"{runs[-1][2]}; from {items}: {detail}")
                else:
                    runs.append((str(items), name, detail))
            rows.append((heads, runs))
        yield f"{kind}, {tokens} token{'s' * (tokens != 1)}", rows


def _changes(changes: Sequence[Change]) -> Table:
    rows = []
    for change in changes:
        gain = change.gain
        figures = (
            (None, None)
            if gain is None
            else (f"{100 * gain.geomean:.2f}", f"{100 * gain.low:.2f} to {100 * gain.high:.2f}")
        )
        rows.append((cell_name(change.cell), change.old, change.new, *figures))
    return Table(("cell", "before", "now", "gain %", "90 % interval"), rows, (3,))


def _remarks(evidence: Evidence) -> Iterator[str]:
    for what, cells in (
        ("No variant has a time", evidence.without_winner),
        ("No pick has a time", evidence.uncovered),
        (
            "The variant is open",
            [cell for cell, _ in sorted(evidence.unsettled, key=lambda found: found[1])],
        ),
    ):
        if cells:
            yield f"{what} in {len(cells)} cells: {_named(cells)}"
    for variant, why in evidence.held.items():
        yield f"Held back: {variant}: {why}"
    if evidence.kept is not None:
        yield f"The constants of the policy before stay: new ones gain {100 * evidence.kept.geomean:.2f} %"
    if evidence.slower_than_default is None:
        yield "Against the default schedule: not checked, it was not measured"
    elif evidence.slower_than_default:
        cells = [cell for cell, _ in evidence.slower_than_default]
        yield f"Slower than the default schedule in {len(cells)} cells: {_named(cells)}"
    for cliff in sorted(evidence.cliffs, key=lambda found: -found.lost)[:_SHOWN]:
        than = f"{100 * cliff.lost:.1f} % slower than with {cliff.faster.requests} requests"
        yield f"Cliff: {cell_name(cliff.cell)}: {than}, by {cliff.rule}"
    if evidence.flips:
        worst = max(lost for _, lost in evidence.flips)
        cells = [cell for cell, _ in evidence.flips]
        yield f"Winners that lose with generic inputs, by up to {100 * worst:.1f} %: {_named(cells)}"


def _named(cells: Sequence[Cell]) -> str:
    more = len(cells) - _SHOWN
    return "; ".join(map(cell_name, cells[:_SHOWN])) + (f"; and {more} more" if more > 0 else "")


# --- times against the floor ---


@dataclass(frozen=True)
class Target:
    """What the best variant of our own is to reach with an isolated launch.

    few_us      at 12 items, and at 96: microseconds; None asks for nothing
    efficiency  floor over time from 1536 items on
    """

    kind: str
    tokens: int | None
    state_dtype: str
    few_us: tuple[float | None, float | None]
    efficiency: float


TARGETS: dict[str, tuple[Target, ...]] = {
    "NVIDIA H200": (
        Target("decode", 1, "fp32", (3.5, 5.7), 0.92),
        Target("decode", 1, "bf16", (3.5, 4.7), 0.88),
        Target("record", 4, "fp32", (5.5, 6.5), 0.85),
        Target("record", 8, "fp32", (6.0, 7.5), 0.80),
        Target("record", 8, "bf16", (6.0, 7.0), 0.80),
        Target("replay", 4, "fp32", (6.5, 8.5), 0.85),
        Target("replay", 8, "fp32", (7.5, 10.0), 0.80),
        Target("commit", None, "bf16", (None, None), 0.90),
        Target("commit", None, "fp32", (None, None), 0.88),
    ),
}
"""By device."""
_FEW_ITEMS = (12, 96)
_MANY_ITEMS = 1536


@dataclass(frozen=True)
class _Best:
    cell: Cell
    candidate: Candidate | None
    time_us: float | None

    @property
    def efficiency(self) -> float | None:
        return None if self.time_us is None else self.cell.problem.floor_us() / self.time_us


def _fastest(
    measurements: Iterable[Measurement],
    choose: Callable[[Candidate], bool] = lambda candidate: True,
) -> list[_Best]:
    """Of each cell; nothing where no chosen candidate has a time."""
    measurements = list(measurements)
    times: dict[Cell, tuple[Candidate, float]] = {}
    for group in by_question(measurements).values():
        cells = {(r.cell.heads, r.cell.requests): r.cell for r in group}
        for heads, rows in timings(group).items():
            for requests, row in rows.items():
                found = [(t.median, str(c), c) for c, t in row.items() if choose(c)]
                if found:
                    time_us, _, candidate = min(found)
                    times[cells[heads, requests]] = candidate, time_us
    cells_in_order = sorted({r.cell for r in measurements}, key=cell_order)
    return [_Best(cell, *times.get(cell, (None, None))) for cell in cells_in_order]


def _isolated(sources: Iterable[Measured]) -> list[_Best]:
    """The best of our own variants in isolated, cold cells; of two sweeps with the same cell the
    first counts."""
    found: dict[Cell, _Best] = {}
    for source in sources:
        measurements = [
            r for r in source.measurements if r.cell.context == "isolated" and r.cell.l2 == "cold"
        ]
        for best in _fastest(measurements, lambda c: c.variant != variants.of_rule("stock_items")):
            found.setdefault(best.cell, best)
    return sorted(found.values(), key=lambda best: cell_order(best.cell))


def _targets(device: str, sources: Sequence[Measured]) -> Table | None:
    """Every target of the device: met, missed, or "-" where it was not measured. None for a device
    without targets."""
    if device not in TARGETS:
        return None
    best = _isolated(sources)
    rows = []
    for target in TARGETS[device]:
        mine = [b for b in best if _asks_for(target, b.cell)]
        name = (target.kind, target.tokens or "any", target.state_dtype)
        for items, limit in zip(_FEW_ITEMS, target.few_us, strict=True):
            if limit is not None:
                rows += [
                    (*name, *row)
                    for row in _few(items, limit, [b for b in mine if b.cell.items == items])
                ]
        many = [b for b in mine if b.cell.items * b.cell.layers >= _MANY_ITEMS]
        worst = min(many, key=lambda b: b.efficiency or 0.0, default=None)
        asked = f">= {target.efficiency:.2f} of the floor"
        where = (
            f"{_MANY_ITEMS} and more, worst of {len(many)} cells"
            if many
            else f"{_MANY_ITEMS} and more"
        )
        got = (
            None
            if worst is None
            else NO_RESULT
            if worst.efficiency is None
            else f"{worst.efficiency:.2f}"
        )
        met = None if worst is None else (worst.efficiency or 0.0) >= target.efficiency
        rows.append((*name, where, asked, got, _verdict(met), *_who(worst)))
    headings = ("kind", "tokens", "state", "items", "target", "measured", "verdict", "cell", "by")
    return Table(headings, rows, (1,))


def _asks_for(target: Target, cell: Cell) -> bool:
    if (cell.kind, cell.state_dtype) != (target.kind, target.state_dtype) or cell.inputs != "model":
        return False
    if target.kind == "commit":
        return cell.layers > 1 and cell.pending is None
    return cell.tokens == target.tokens and cell.pending in (None, "mix")


def _few(items: int, limit: float, found: Sequence[_Best]) -> Iterator[tuple[object, ...]]:
    asked = f"<= {limit:g} us"
    if not found:
        yield (items, asked, None, _verdict(None), *_who(None))
    for best in found:
        got = NO_RESULT if best.time_us is None else f"{best.time_us:.2f} us"
        met = best.time_us is not None and best.time_us <= limit
        yield (items, asked, got, _verdict(met), *_who(best))


def _verdict(met: bool | None) -> str | None:
    return None if met is None else "met" if met else "missed"


def _who(best: _Best | None) -> tuple[str | None, str | None]:
    if best is None:
        return None, None
    return cell_name(best.cell), None if best.candidate is None else str(best.candidate)


def _efficiency(sources: Sequence[Measured]) -> Iterator[tuple[str, Table]]:
    """Isolated, cold cells by question: floor, best time of our own, efficiency."""
    groups: dict[Question, list[_Best]] = defaultdict(list)
    for best in _isolated(sources):
        groups[Question.of(best.cell)].append(best)
    for question, found in sorted(groups.items(), key=lambda pair: pair[0].stem):
        rows = [
            (
                best.cell.heads,
                best.cell.requests,
                best.cell.items * best.cell.layers,
                f"{best.cell.problem.floor_us():.2f}",
                NO_RESULT if best.time_us is None else f"{best.time_us:.2f}",
                None if best.efficiency is None else f"{best.efficiency:.2f}",
                None if best.candidate is None else str(best.candidate),
            )
            for best in found
        ]
        headings = ("heads", "requests", "items", "floor us", "best us", "floor/time", "by")
        yield (
            f"{question.title}; {question.circumstances}",
            Table(headings, rows, (0, 1, 2, 3, 4, 5)),
        )


# --- failures and coverage ---


def _failures(sources: Iterable[Measured]) -> Table:
    """Everything that is not ok, alike ones together."""
    groups: dict[tuple[str, str, str, str], list[Measurement]] = defaultdict(list)
    for found in sources:
        for measurement in found.measurements:
            if measurement.status != "ok":
                key = (
                    measurement.status,
                    measurement.candidate.variant,
                    found.sweep,
                    measurement.reason or "no reason",
                )
                groups[key].append(measurement)
    rows = []
    for (status, variant, sweep, reason), measurements in sorted(groups.items()):
        cells = sorted({r.cell for r in measurements}, key=cell_order)
        options = len({r.candidate for r in measurements})
        rows.append((status, variant, sweep, reason, len(measurements), options, _named(cells)))
    headings = ("status", "variant", "sweep", "reason", "records", "options", "cells")
    return Table(headings, rows, (4, 5))


@dataclass(frozen=True)
class Coverage:
    """The fastest time in every cell of a sweep. unmeasured: of its file's cells; None if the file
    is not there"""

    sweep: str
    unmeasured: int | None
    planned: int | None
    tables: Sequence[tuple[str, Table]]


def _coverage(found: Measured) -> Coverage:
    """By question, heads down and requests across: us and variant, "none" without a result, "-" if
    never measured."""
    best = {b.cell: b for b in _fastest(found.measurements)}
    cells = sorted({*best, *(found.planned or ())}, key=cell_order)
    groups: dict[Question, dict[tuple[int, int], Cell]] = defaultdict(dict)
    for cell in cells:
        groups[Question.of(cell)][cell.heads, cell.requests] = cell
    tables = []
    for question, by_size in sorted(groups.items(), key=lambda pair: pair[0].stem):
        requests = sorted({r for _, r in by_size})
        rows = [
            (heads, *(_shown(best.get(by_size.get((heads, r)))) for r in requests))  # type: ignore[arg-type]
            for heads in sorted({h for h, _ in by_size})
        ]
        table = Table(("heads", *map(str, requests)), rows, tuple(range(len(requests) + 1)))
        tables.append((f"{question.title}; {question.circumstances}", table))
    unmeasured = None if found.planned is None else len(set(found.planned) - best.keys())
    return Coverage(
        found.sweep, unmeasured, None if found.planned is None else len(found.planned), tables
    )


def _shown(best: _Best | None) -> str | None:
    if best is None:
        return None
    if best.time_us is None or best.candidate is None:
        return NO_RESULT
    digits = 2 if best.time_us < 100 else 1
    return f"{best.time_us:.{digits}f} {best.candidate.variant.removeprefix('Kda')}"


def cell_name(cell: Cell) -> str:
    text = f"{cell.kind} heads={cell.heads} requests={cell.requests} tokens={cell.tokens}"
    text += f" layers={cell.layers}" * (cell.layers != 1)
    text += f" pending={cell.pending}" * (cell.pending is not None)
    text += f" {cell.state_dtype}" * (cell.state_dtype != "fp32")
    return text + f" {cell.context}" * (cell.context != "layer")
