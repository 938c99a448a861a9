"""The sweep that a search ends with: what it found, to be measured like all else."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from kdabench.tune.search import Outcome

PROCESSES = 3


def winners(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Pick the studies whose winner is faster than the default."""
    return [o for o in outcomes if o.verdict is not None and o.verdict.verdict == "faster"]


def text(outcomes: Sequence[Outcome], title: str) -> str:
    """Write a sweep of winners, each with its variant's default, in the cells where they won."""
    cells = list(dict.fromkeys(o.task.cell for o in outcomes))
    found = {o.verdict.winner: None for o in outcomes if o.verdict is not None}
    variants = list(dict.fromkeys(candidate.variant for candidate in found))
    question = f"Do the options that a search found ({title}) beat the default when measured like all others?"
    lines = list(_values({"question": question, "variants": variants, "processes": PROCESSES}, ""))
    for cell in cells:
        given = {key: value for key, value in asdict(cell).items() if value is not None}
        lines += _values(given, "[[cells]]")
    for name in variants:
        won = [candidate.options for candidate in found if candidate.variant == name]
        for options in [*([] if {} in won else [{}]), *won]:
            lines += _values(options, f"[[options.{name}]]")
    return "\n".join(lines) + "\n"


def _values(values: Mapping[str, Any], heading: str) -> Iterator[str]:
    """A table of TOML; JSON's text, lists, numbers and truth values are TOML's, too."""
    if heading:
        yield from ("", heading)
    yield from (f"{key} = {json.dumps(value)}" for key, value in values.items())
