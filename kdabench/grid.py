"""The standard grids: which problems and choices of each variant are compiled, checked and verified.

Plain data, no kernel imports: choices are the fields of a variant's Spec.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

from kda_kernels.problem import CONV_LAYOUTS, MAX_TOKENS, STATE_DTYPES, Kind, Problem, StateDtype
from kdabench.records import SpecValue

_WINDOWS: tuple[Kind, ...] = ("spec", "record")
HEADS = (3, 6, 8, 12, 24, 32, 48, 64, 96)
STEPS: tuple[tuple[Kind, int], ...] = (
    ("decode", 1),
    *((kind, q) for kind in _WINDOWS for q in range(2, MAX_TOKENS + 1)),
)
SPLITS = (1, 2, 4, 8)
_TYPICAL: tuple[tuple[Kind, int], ...] = (("decode", 1), ("record", 4), ("record", 8), ("spec", 4))
_TYPICAL_REPLAYS: tuple[tuple[Kind, int], ...] = (("replay", 2), ("replay", 4), ("replay", 8))
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


CHUNKED_SPLITS = ((1, 256), (2, 128), (2, 256), (4, 128), (8, 128))
"""CTAs per item and threads of KdaSplit's chunked form."""

_LINES: Choices = {"split": 1, "source": "shared", "fold": "late", "state_first": False}
_REPLAY_FORMS: Mapping[str, tuple[Choices, ...]] = {
    "KdaFused": (
        {"split": 1},
        {"split": 1, "gate_mode": 1},
        _LINES,
        {**_LINES, "gate_mode": 1, "ctas_per_sm": 3},
        {"split": 2},
        {"split": 4, "threads": 128, "fold": "late"},
        {"split": 8, "threads": 128},
    ),
    "KdaFusedWS": ({}, {"gate_mode": 1}, {"most_items": 2, "stream_stores": True}),
}


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
    if variant == "KdaCommit":
        for align, form, dtype in product(_ALIGN, _COMMIT_FORMS, STATE_DTYPES):
            yield _case(variant, {"align": align, **form}, Problem("commit", 1, 12, 8, state_dtype=dtype))
    if variant not in ("stock", "KdaCommit"):
        for (kind, q), dtype in product(_steps(variant), STATE_DTYPES):
            for choices in _forms(variant, kind, dtype):
                yield _case(variant, choices, _step(kind, 1, 12, q, state_dtype=dtype))


def _step(kind: Kind, requests: int, heads: int, tokens: int, **layout: Any) -> Problem:
    return Problem(kind, requests, heads, tokens, pending="mix" if kind == "replay" else None, **layout)


def _steps(variant: str) -> tuple[tuple[Kind, int], ...]:
    """The kinds and token counts that a variant takes."""
    if variant in ("KdaFused", "KdaFusedWS"):
        return tuple(("replay", q) for q in range(2, MAX_TOKENS + 1))
    return STEPS


def _forms(variant: str, kind: Kind, dtype: StateDtype) -> Iterator[Choices]:
    """What a variant can be for a kind of step, where that is another kernel; of KdaSplit the chunked form alone."""
    if kind == "replay":
        if dtype == "fp32":
            yield from _REPLAY_FORMS[variant]
        return
    for gate_mode, terms in product((0, 1), (1, 2) if dtype == "bf16" and kind == "record" else (2,)):
        choices: Choices = {"gate_mode": gate_mode, "terms": terms}
        if variant == "KdaSplit":
            if kind == "record":
                for split, threads in CHUNKED_SPLITS:
                    yield {"form": "chunked", "split": split, "threads": threads, **choices}
        elif variant == "KdaWide":
            yield {**choices, "form": "chunked" if kind == "record" else "recurrence"}
            if kind == "record" and dtype == "fp32" and gate_mode == 1:
                yield {**choices, "form": "chunked", "ctas": 3}
        else:
            yield choices
            if variant == "KdaStream" and gate_mode == 1 and terms == 2:
                yield {**choices, "ahead": True}


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
    if variant == "KdaSplit":
        # All choices on a small problem with null slots, padding and permuted rows ...
        for (kind, q), split, staging, gate_mode in product(STEPS, SPLITS, ("registers", "shared"), (0, 1, 2)):
            problem = Problem(kind, 5, 3, q)
            choices: Choices = {"split": split, "staging": staging, "gate_mode": gate_mode}
            yield _case(variant, choices, problem, pad=64, null_requests=(1, 3))
        # ... then layouts, state types, inputs, head counts and batches, one after the other.
        for (kind, q), split, layout, dtype in product(STEPS, SPLITS, CONV_LAYOUTS, STATE_DTYPES):
            problem = Problem(kind, 6, 6, q, state_dtype=dtype, conv_layout=layout)
            choices = {"split": split, "spin": split > 1}
            yield _case(variant, choices, problem, pad=64, null_requests=(2,), inputs="generic", conv_bias=False)
        for heads, (kind, q), split in product(HEADS, _TYPICAL, SPLITS):
            yield _case(variant, {"split": split}, Problem(kind, 37 if heads < 24 else 9, heads, q))
    yield from _form_cases(variant)


def _form_cases(variant: str) -> Iterator[Case]:
    """All forms of a variant on awkward operands, then head counts and batches."""
    for (kind, q), layout, dtype in product(_steps(variant), CONV_LAYOUTS, STATE_DTYPES):
        for choices in _forms(variant, kind, dtype):
            problem = _step(kind, 5, 3, q, state_dtype=dtype, conv_layout=layout)
            yield _case(variant, choices, problem, pad=64, null_requests=(1, 3))
    for (kind, q), dtype in product(_steps(variant), STATE_DTYPES):
        for choices in _forms(variant, kind, dtype):
            problem = _step(kind, 6, 6, q, state_dtype=dtype)
            yield _case(variant, choices, problem, pad=64, null_requests=(2,), inputs="generic", conv_bias=False)
    typical = {(kind, q) for kind, q in _steps(variant) if (kind, q) in (*_TYPICAL, *_TYPICAL_REPLAYS)}
    for heads, (kind, q), requests in product(HEADS, sorted(typical), (1, 37, 90)):
        for choices in _forms(variant, kind, "fp32"):
            if requests < 90 or variant != "KdaSplit":  # more CTAs than an SM has room for, or items that one walks
                yield _case(variant, choices, _step(kind, requests, heads, q))


def _commit_cases(variant: str, dtypes: tuple[StateDtype, ...]) -> Iterator[Case]:
    forms: tuple[Choices, ...] = _COMMIT_FORMS if variant == "KdaCommit" else ({},)
    for dtype, align, in_place, q, form in product(dtypes, _ALIGN, _ALIGN, (3, 8), forms):
        choices = {**form, "align": align} if variant == "KdaCommit" else form
        for heads in (3, 12):
            problem = Problem("commit", 7, heads, q, 2, dtype, "mix")
            yield Case(variant, tuple(sorted(choices.items())), problem, 64, (1, 4), align=align, in_place=in_place)
    for q, form, layers in product((2, 4, 8), forms, (1, 3)):
        yield Case(variant, tuple(sorted(form.items())), Problem("flush", 7, 6, q, layers, "fp32", "mix"), 64, (1, 4))
