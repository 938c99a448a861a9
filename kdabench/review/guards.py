"""What a policy must not do, and rules of it that evidence.text leaves out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kdabench.cli.evidence import cell_name
from kdabench.policy.constants import Policy
from kdabench.policy.regret import Evidence

_SHOWN = 10
"""Cells that are named of each kind, the worst first."""


def checks(policy: Policy, facts: Evidence) -> str:
    """Write the rules that evidence.text leaves out, and what a policy must not do: lose to the
    default, jump over a cliff."""
    return "".join(f"{line}\n" for line in (*_other_rules(policy, facts), *_guards(facts)))


def _other_rules(policy: Policy, facts: Evidence) -> Iterator[str]:
    rows = [row for table in policy.window_schedule.values() for row in table.values()]
    distinct = {tuple(sorted(options.items())) for row in rows for options in row.values()}
    tables = f"{len(policy.window_schedule)} tables, {sum(map(len, rows))} entries"
    yield f"WINDOW_SCHEDULE: {tables}, {len(distinct)} different schedules"
    for rule, by_key in facts.other_intervals.items():
        constant = getattr(policy, rule)
        for key, interval in by_key.items():
            table = isinstance(constant, Mapping)
            value = constant.get(int(key) if key.isdecimal() else key) if table else constant
            ends = None if interval is None else [_items(end) for end in interval]
            span = "no interval" if ends is None else f"90 % interval: {' to '.join(ends)}"
            yield f"{rule.upper()}{f'[{key}]' if table else ''}: {_items(value)} ({span})"


def _items(value: int | None) -> str:
    return "never" if value is None else str(value)


def _guards(facts: Evidence) -> Iterator[str]:
    slower = facts.slower_than_default
    if slower is None:
        yield "Against the default schedule: not checked, it was not measured"
    else:
        yield f"Slower than the default schedule: {len(slower)} cells"
        worst = sorted(slower, key=lambda found: -found[1])
        yield from (f"  {cell_name(cell)}: {100 * lost:.1f} %" for cell, lost in worst[:_SHOWN])
    yield f"Cliffs, slower than with more requests though it could be avoided: {len(facts.cliffs)}"
    for cliff in sorted(facts.cliffs, key=lambda found: -found.lost)[:_SHOWN]:
        than = f"{100 * cliff.lost:.1f} % slower than with {cliff.faster.requests} requests"
        yield f"  {cell_name(cliff.cell)}: {than}, by {cliff.rule}"
