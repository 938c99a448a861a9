"""A case of a variant: a problem and options that it is compiled for, or verified with; and the
usual sizes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kda_kernels.problem import MAX_TOKENS, Kind, Problem

OptionValue = int | str | bool
Options = Mapping[str, OptionValue]
Step = tuple[Kind, int]
"""(kind, tokens)"""

HEADS = (3, 6, 8, 12, 24, 32, 48, 64, 96)
"""Of models in use on 1 to 8 GPUs, and some that no number of warps divides."""
_WINDOW_KINDS: tuple[Kind, ...] = ("spec", "record", "replay")
STEPS: tuple[Step, ...] = (
    ("decode", 1),
    *((kind, q) for kind in _WINDOW_KINDS for q in range(2, MAX_TOKENS + 1)),
)
TYPICAL: tuple[Step, ...] = (
    ("decode", 1),
    ("record", 4),
    ("record", 8),
    ("spec", 4),
    *(("replay", q) for q in (2, 4, 8)),
)
"""Steps for what would take too long with all of `STEPS`."""


@dataclass(frozen=True)
class Case:
    """A problem, a variant's choices, and what is awkward about the operands: see `operands`."""

    variant: str
    options: tuple[tuple[str, OptionValue], ...]
    problem: Problem
    pad: int = 0
    null_requests: tuple[int, ...] = ()
    inputs: str = "model"
    conv_bias: bool = True
    align: bool = False
    in_place: bool = False


def case(variant: str, options: Options, problem: Problem, **awkward: Any) -> Case:
    """A case with choices in any order. awkward: fields of Case behind the problem"""
    return Case(variant, tuple(sorted(options.items())), problem, **awkward)


def steps_of(kinds: Collection[str], among: Iterable[Step] = STEPS) -> list[Step]:
    """Those of some steps that are of these kinds."""
    return [step for step in among if step[0] in kinds]
