"""The standard cases: problems and options that a variant is compiled for, and verified with on a
GPU.

What a variant can be it says itself. `forms(kind, state_dtype)` lists the options of each form of
it that is another kernel; `more_cases(name, purpose)`, which few have, gives cases that no rule
here makes of forms.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import product
from types import ModuleType
from typing import Any, Literal

from kda_kernels import variants
from kda_kernels.case import HEADS, STEPS, TYPICAL, Case, Options, Step, case, steps_of
from kda_kernels.problem import CONV_LAYOUTS, STATE_DTYPES, Kind, Problem, StateDtype

Purpose = Literal["compile", "verify"]


def compile_cases(variant: str) -> Iterator[Case]:
    """Every binary of a variant that differs, on the smallest problem that has it."""
    if not variants.declared(variant).binaries:
        return
    module = variants.load(variant)
    if "commit" in variants.declared(variant).kinds:
        for align, (form, dtype) in product((False, True), _forms(module, "commit")):
            problem = Problem("commit", 1, 12, 8, state_dtype=dtype)
            yield case(variant, _with_align(variant, form, align), problem)
    yield from _more_cases(variant, module, "compile")
    for kind, q in _steps(variant):
        for form, dtype in _forms(module, kind):
            yield case(variant, form, _step(kind, 1, 12, q, state_dtype=dtype))


def verify_cases(variant: str) -> Iterator[Case]:
    """What a variant must get right on a GPU before it is trusted."""
    module = variants.load(variant)
    yield from _commit_cases(variant, module)
    yield from _more_cases(variant, module, "verify")
    yield from _step_cases(variant, module)


def unverified_kinds(variant: str, supported: Iterable[Case]) -> tuple[Kind, ...]:
    """Kinds that a variant declares but none of its supported cases is of: it would pass unseen."""
    seen = {found.problem.kind for found in supported if found.variant == variant}
    return tuple(kind for kind in variants.declared(variant).kinds if kind not in seen)


def _more_cases(variant: str, module: ModuleType, purpose: Purpose) -> Iterable[Case]:
    found: Iterable[Case] = (
        module.more_cases(variant, purpose) if hasattr(module, "more_cases") else ()
    )
    return found


def _forms(module: ModuleType, kind: Kind) -> Iterator[tuple[Options, StateDtype]]:
    """Of a kind, with every state type."""
    return ((form, dtype) for dtype in STATE_DTYPES for form in module.forms(kind, dtype))


def _steps(variant: str, among: Iterable[Step] = STEPS) -> list[Step]:
    """Those of some steps that a variant takes."""
    return steps_of(variants.declared(variant).kinds, among)


def _step(kind: Kind, requests: int, heads: int, tokens: int, **layout: Any) -> Problem:
    return Problem(
        kind, requests, heads, tokens, pending="mix" if kind == "replay" else None, **layout
    )


def _step_cases(variant: str, module: ModuleType) -> Iterator[Case]:
    """All forms of a variant on awkward operands, then head counts and batches."""
    steps = _steps(variant)
    for (kind, q), layout, dtype in product(steps, CONV_LAYOUTS, STATE_DTYPES):
        for form in module.forms(kind, dtype):
            problem = _step(kind, 5, 3, q, state_dtype=dtype, conv_layout=layout)
            yield case(variant, form, problem, pad=64, null_requests=(1, 3))
    for kind, q in steps:
        for form, dtype in _forms(module, kind):
            problem = _step(kind, 6, 6, q, state_dtype=dtype)
            yield case(
                variant,
                form,
                problem,
                pad=64,
                null_requests=(2,),
                inputs="generic",
                conv_bias=False,
            )
    typical, batches = sorted(_steps(variant, TYPICAL)), variants.declared(variant).requests
    for heads, (kind, q), requests in product(HEADS, typical, batches):
        for form in module.forms(kind, "fp32"):
            yield case(variant, form, _step(kind, requests, heads, q))


def _commit_cases(variant: str, module: ModuleType) -> Iterator[Case]:
    """Commits with and without block boundaries, in place or not; flushes of a layer and of
    several."""
    kinds = variants.declared(variant).kinds
    awkward: dict[str, Any] = {"pad": 64, "null_requests": (1, 4)}
    sides = product(STATE_DTYPES, (False, True), (False, True), (3, 8))
    for dtype, align, in_place, q in sides if "commit" in kinds else ():
        for form, heads in product(module.forms("commit", dtype), (3, 12)):
            problem = Problem("commit", 7, heads, q, 2, dtype, "mix")
            choices = _with_align(variant, form, align)
            yield case(variant, choices, problem, **awkward, align=align, in_place=in_place)
    for q in (2, 4, 8) if "flush" in kinds else ():
        for form, layers in product(module.forms("flush", "fp32"), (1, 3)):
            yield case(variant, form, Problem("flush", 7, 6, q, layers, "fp32", "mix"), **awkward)


def _with_align(variant: str, form: Options, align: bool) -> Options:
    """A form that says whether a commit has block boundaries, if the variant has to know."""
    return {**form, "align": align} if "align" in variants.declared(variant).options else form
