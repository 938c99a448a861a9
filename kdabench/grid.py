"""The standard grids: which problems and choices of each variant are compiled, checked and verified.

Plain data, no kernel imports: choices are the fields of a variant's Spec.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product

from kdabench.problem import CONV_LAYOUTS, MAX_TOKENS, STATE_DTYPES, Kind, Problem, StateDtype
from kdabench.records import SpecValue

_WINDOWS: tuple[Kind, ...] = ("spec", "record")
HEADS = (3, 6, 8, 12, 24, 32, 48, 64, 96)
STEPS: tuple[tuple[Kind, int], ...] = (
    ("decode", 1),
    *((kind, q) for kind in _WINDOWS for q in range(2, MAX_TOKENS + 1)),
)
SPLITS = (1, 2, 4, 8)
_TYPICAL: tuple[tuple[Kind, int], ...] = (("decode", 1), ("record", 4), ("record", 8), ("spec", 4))
_ALIGN = (False, True)

Choices = Mapping[str, SpecValue]


def _row_form(source: str, rows: int, columns: int) -> Choices:
    return {"source": source, "heads_per_cta": 1, "rows_per_cta": rows, "columns": columns}


_COMMIT_FORMS: tuple[Choices, ...] = (
    {"store": "direct", "heads_per_cta": 1},
    {"store": "direct", "heads_per_cta": 4},
    {"store": "bulk", "heads_per_cta": 4},
    *(_row_form(*form) for form in product(("bulk", "registers"), (32, 64, 128), (4, 8))),
)


@dataclass(frozen=True)
class Case:
    """One check of a variant: a problem, the variant's choices, and what is awkward about the operands."""

    variant: str
    choices: tuple[tuple[str, SpecValue], ...]
    problem: Problem
    pad: int = 0
    null_requests: tuple[int, ...] = ()
    inputs: str = "model"
    conv_bias: bool = True
    align: bool = False
    in_place: bool = False


def _case(
    variant: str,
    choices: Choices,
    problem: Problem,
    pad: int = 0,
    null_requests: tuple[int, ...] = (),
    inputs: str = "model",
    conv_bias: bool = True,
) -> Case:
    return Case(variant, tuple(sorted(choices.items())), problem, pad, null_requests, inputs, conv_bias)


def compile_cases(variant: str) -> Iterator[Case]:
    """Every binary of a variant that differs, on the smallest problem that has it."""
    if variant == "KdaSplit":
        for (kind, q), split, staging, dtype in product(STEPS, SPLITS, ("registers", "shared"), STATE_DTYPES):
            problem = Problem(kind, 1, 12, q, state_dtype=dtype)
            yield _case(variant, {"split": split, "staging": staging}, problem)
        for (kind, q), split, gate_mode in product(_TYPICAL, SPLITS, (0, 1)):
            yield _case(variant, {"split": split, "gate_mode": gate_mode}, Problem(kind, 1, 12, q))
    elif variant in ("KdaWide", "KdaWS"):
        for (kind, q), dtype in product(STEPS, STATE_DTYPES):
            for choices in _forms(variant, kind, dtype):
                yield _case(variant, choices, Problem(kind, 1, 12, q, state_dtype=dtype))
    elif variant == "KdaCommit":
        for align, form, dtype in product(_ALIGN, _COMMIT_FORMS, STATE_DTYPES):
            yield _case(variant, {"align": align, **form}, Problem("commit", 1, 12, 8, state_dtype=dtype))


def _forms(variant: str, kind: Kind, dtype: StateDtype) -> Iterator[Choices]:
    """What KdaWide and KdaWS can be for a kind of step."""
    terms = (1, 2) if dtype == "bf16" else (2,)
    if variant == "KdaWS":
        if kind == "record":
            for prologue, gate_mode, n in product((4, 8), (0, 1), terms):
                yield {"prologue": prologue, "gate_mode": gate_mode, "terms": n}
        return
    for gate_mode in (0, 1):
        yield {"gate_mode": gate_mode}
    if kind == "record":
        for gate_mode, n in product((0, 1), terms):
            yield {"form": "chunked", "gate_mode": gate_mode, "terms": n}


def verify_cases(variant: str) -> Iterator[Case]:
    """What a variant must get right on a GPU before it is trusted."""
    if variant == "KdaCommit":
        yield from _commit_cases(variant, STATE_DTYPES)
        return
    if variant == "stock":
        yield from _commit_cases(variant, STATE_DTYPES)
        for (kind, q), layout, dtype in product(STEPS, CONV_LAYOUTS, STATE_DTYPES):
            if q in (1, 2, 4, 8) or (layout, dtype) == ("dim-first", "fp32"):
                problem = Problem(kind, 5, 6, q, state_dtype=dtype, conv_layout=layout)
                yield _case(variant, {}, problem, pad=64, null_requests=(1, 3))
        for heads in HEADS:
            yield _case(variant, {}, Problem("record", 7, heads, 4))
        return
    if variant in ("KdaWide", "KdaWS"):
        yield from _whole_item_cases(variant)
        return
    # All choices on a small problem with null slots, padding and permuted rows ...
    for (kind, q), split, staging, gate_mode in product(STEPS, SPLITS, ("registers", "shared"), (0, 1, 2)):
        problem = Problem(kind, 5, 3, q)
        yield _case(
            variant, {"split": split, "staging": staging, "gate_mode": gate_mode}, problem, pad=64, null_requests=(1, 3)
        )
    # ... then layouts, state types, inputs, head counts and batches, one after the other.
    for (kind, q), split, layout, dtype in product(STEPS, SPLITS, CONV_LAYOUTS, STATE_DTYPES):
        problem = Problem(kind, 6, 6, q, state_dtype=dtype, conv_layout=layout)
        yield _case(variant, {"split": split}, problem, pad=64, null_requests=(2,), inputs="generic", conv_bias=False)
    for heads, (kind, q), split in product(HEADS, _TYPICAL, SPLITS):
        yield _case(variant, {"split": split}, Problem(kind, 37 if heads < 24 else 9, heads, q))


def _whole_item_cases(variant: str) -> Iterator[Case]:
    """Variants whose CTAs take whole items: all forms on awkward operands, then head counts and batches."""
    for (kind, q), layout, dtype in product(STEPS, CONV_LAYOUTS, STATE_DTYPES):
        for choices in _forms(variant, kind, dtype):
            problem = Problem(kind, 5, 3, q, state_dtype=dtype, conv_layout=layout)
            yield _case(variant, choices, problem, pad=64, null_requests=(1, 3))
    for (kind, q), dtype in product(STEPS, STATE_DTYPES):
        for choices in _forms(variant, kind, dtype):
            problem = Problem(kind, 6, 6, q, state_dtype=dtype)
            yield _case(variant, choices, problem, pad=64, null_requests=(2,), inputs="generic", conv_bias=False)
    for heads, (kind, q), requests in product(HEADS, _TYPICAL, (1, 37, 90)):
        for choices in _forms(variant, kind, "fp32"):
            yield _case(variant, choices, Problem(kind, requests, heads, q))


def _commit_cases(variant: str, dtypes: tuple[StateDtype, ...]) -> Iterator[Case]:
    forms: tuple[Choices, ...] = _COMMIT_FORMS if variant == "KdaCommit" else ({},)
    for dtype, align, in_place, q, form in product(dtypes, _ALIGN, _ALIGN, (3, 8), forms):
        choices = {**form, "align": align} if variant == "KdaCommit" else form
        for heads in (3, 12):
            problem = Problem("commit", 7, heads, q, 2, dtype, "mix")
            yield Case(variant, tuple(sorted(choices.items())), problem, 64, (1, 4), align=align, in_place=in_place)
