"""What speaks for a policy, as plain text: for the terminal and for regret.txt. Same evidence, same
text."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from kdabench.cli import console

if TYPE_CHECKING:
    from kdabench.data.measurements import Cell
    from kdabench.policy.constants import Policy
    from kdabench.policy.regret import Certificate, Evidence, Regret

_SHOWN = 10


def text(policy: Policy, evidence: Evidence) -> str:
    return "\n".join(_lines(policy, evidence)) + "\n"


def _lines(policy: Policy, evidence: Evidence) -> Iterator[str]:
    statuses = ", ".join(f"{count} {status}" for status, count in evidence.statuses.items())
    yield f"{evidence.cells} cells; records: {statuses}"
    for what, cells in (
        ("no variant has a time", evidence.without_winner),
        ("no pick has a time", evidence.uncovered),
    ):
        if cells:
            yield f"{what} in {len(cells)}: {_named(cells)}"
    for name, why in evidence.held.items():
        yield f"held back: {name}: {why}"
    yield ""
    yield "Time of the pick over the fastest in each cell, minus 1, on the cells of the fit (per cent):"
    yield ""
    rows = [("policy", kind, *_figures(regret)) for kind, regret in evidence.regret.items()]
    for name, by_kind in evidence.baselines.items():
        rows += [
            (name, kind, *_figures(regret)) for kind, regret in by_kind.items() if kind == "all"
        ]
    headings = ("choice", "kind", "cells", "mean", "p99", "max", "worst cell", "fastest picked")
    yield from console.table(headings, rows, right=(2, 3, 4, 5, 7)).splitlines()
    yield ""
    yield f"CHOICES: {evidence.entries} entries. One for every cell would gain {100 * evidence.table_gain:.2f} %."
    if evidence.kept is not None:
        gain = f"new ones gain {100 * evidence.kept.geomean:.2f} %, standard error {100 * evidence.kept.error:.2f} %"
        yield f"The constants of the policy before stay: {gain}."
    if evidence.unsettled:
        unsettled = sorted(evidence.unsettled, key=lambda found: found[1])
        yield f"The variant is open in {len(unsettled)} cells: {_named([cell for cell, _ in unsettled])}"
    yield ""
    yield from _certificate(evidence.certificate)
    yield ""
    yield from _thresholds(policy, evidence.intervals)
    if evidence.flips:
        worst = max(lost for _, lost in evidence.flips)
        flipped = _named([cell for cell, _ in evidence.flips])
        yield f"Winners that lose with generic inputs, by up to {100 * worst:.1f} %: {flipped}"


def _certificate(certificate: Certificate | None) -> Iterator[str]:
    if certificate is None:
        yield "No certificate: no cells were held out (sweeps/holdout.toml)."
        return
    yield f"Certificate: the same on {certificate.cells} held-out cells, which no fit has seen (per cent):"
    yield ""
    rows = [("policy", kind, *_figures(regret)) for kind, regret in certificate.regret.items()]
    rows += [(name, "all", *_figures(regret)) for name, regret in certificate.baselines.items()]
    if certificate.bounds:
        bounds = (f"{100 * certificate.bounds[name]:.2f}" for name in ("geomean", "p99", "max"))
        rows.insert(
            1, ("policy, 95 % bounds", "all", str(certificate.regret["all"].cells), *bounds, "", "")
        )
    headings = ("choice", "kind", "cells", "mean", "p99", "max", "worst cell", "fastest picked")
    yield from console.table(headings, rows, right=(2, 3, 4, 5, 7)).splitlines()
    if certificate.uncovered:
        yield f"no pick has a time in {len(certificate.uncovered)}: {_named(certificate.uncovered)}"


def markdown(certificate: Certificate) -> str:
    """The certificate as a table for a README, in per cent."""
    rows = [("**the policy**", certificate.regret["all"]), *certificate.baselines.items()]
    lines = [
        f"Time over the fastest on {certificate.cells} held-out cells, minus 1:",
        "",
        "| choice | cells | geometric mean | p99 | max |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, regret in rows:
        figures = " | ".join(
            f"{100 * value:.2f} %" for value in (regret.geomean, regret.p99, regret.max)
        )
        lines.append(f"| {name} | {regret.cells} | {figures} |")
    if certificate.bounds:
        bounds = (f"{100 * certificate.bounds[name]:.2f} %" for name in ("geomean", "p99", "max"))
        lines.append(f"| 95 % bounds of the policy | | {' | '.join(bounds)} |")
    return "\n".join(lines) + "\n"


def _figures(regret: Regret) -> tuple[str, ...]:
    figures = (f"{100 * value:.2f}" for value in (regret.geomean, regret.p99, regret.max))
    return str(regret.cells), *figures, cell_name(regret.worst), f"{100 * regret.top1:.0f} %"


def _thresholds(
    policy: Policy, intervals: Mapping[str, tuple[int | None, int | None] | None]
) -> Iterator[str]:
    for kind, items in policy.stock_items.items():
        interval = intervals.get(kind)
        span = "no interval: fewer than two processes"
        if interval is not None:
            span = f"90 % interval: {_items(interval[0])} to {_items(interval[1])}"
        rule = (
            f"stock never takes {kind}"
            if items is None
            else f"stock takes {kind} from {items} items"
        )
        yield f"{rule} ({span})"
    for name in ("schedule", "spec_schedule"):
        table = getattr(policy, name)
        keys = sum(len(row) for row in table.values())
        distinct = len(
            {tuple(sorted(options.items())) for row in table.values() for options in row.values()}
        )
        yield f"{name.upper()}: {keys} keys, {distinct} different schedules"


def _items(value: int | None) -> str:
    return "never" if value is None else str(value)


def cell_name(cell: Cell) -> str:
    return f"{cell.kind} heads={cell.heads} requests={cell.requests} tokens={cell.tokens}"


def _named(cells: Sequence[Cell]) -> str:
    more = len(cells) - _SHOWN
    return "; ".join(map(cell_name, cells[:_SHOWN])) + (f"; and {more} more" if more > 0 else "")
