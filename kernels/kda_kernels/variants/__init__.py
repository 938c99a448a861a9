"""The kernel variants by name. A variant is one module with the same names in the same order:

KERNELS, KINDS, ...                 what it says about itself, in literals: `variants.contract`
forms(kind, state_dtype)            options of each form of it that is another kernel, for `cases`
Options                             frozen dataclass of compile-time choices (and `pdl`, of a
                                    launch)
unsupported(problem, options, gpu)  why this pair can't run, or None; pure, no CUDA
compile(problem, options, gpu)      from shapes alone, works with no GPU
launch(compiled, operands, stream)  enqueues once; allocates nothing, never synchronizes

`_MODULES` is the registry: a new variant is its file and a line there, at the end, so that figures
keep the colours of the others. To import this package loads no variant; docs/new-variant.md.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, fields, replace
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

from kda_kernels.device import sources
from kda_kernels.device.gpu import Gpu
from kda_kernels.problem import Problem
from kda_kernels.variants import contract
from kda_kernels.variants.contract import RULES as RULES
from kda_kernels.variants.contract import Declaration

_MODULES = {
    "KdaSplit": "kda_kernels.variants.split",
    "KdaWide": "kda_kernels.variants.wide",
    "KdaStream": "kda_kernels.variants.stream",
    "KdaWS": "kda_kernels.variants.ws",
    "KdaFused": "kda_kernels.variants.fused",
    "KdaFusedWS": "kda_kernels.variants.fused_ws",
    "KdaCommit": "kda_kernels.variants.commit",
    "stock": "kda_kernels.stock",
}

NAMES = tuple(_MODULES)


def source(name: str) -> Path:
    """The file of a variant's module. Raises KeyError naming the known ones."""
    return sources.path_of(_module(name))


def _module(name: str) -> str:
    if name not in _MODULES:
        raise KeyError(f"unknown variant {name!r}; known: {', '.join(NAMES)}")
    return _MODULES[name]


@cache
def declared(name: str) -> Declaration:
    """What a variant says about itself, by its file's text alone.

    Raises KeyError naming the known variants, ValueError for a file that declares what isn't there.
    """
    return contract.read(source(name))


def of_rule(rule: str) -> str | None:
    """The variant that a rule of a policy hands steps to: the first in the registry, or None.

    Raises KeyError naming the known rules.
    """
    if rule not in RULES:
        raise KeyError(f"unknown rule {rule!r}; known: {', '.join(RULES)}")
    return next((name for name in NAMES if declared(name).rule == rule), None)


@cache
def streaming() -> tuple[str, ...]:
    """The variants that need a streamable step, in the order of their rules in a policy."""
    found = [name for name in NAMES if declared(name).streams]
    rules = [*RULES, None]
    return tuple(sorted(found, key=lambda name: rules.index(declared(name).rule)))


def load(name: str) -> ModuleType:
    """The module of a variant. Raises KeyError naming the known ones."""
    return import_module(_module(name))


def make_options(name: str, given: dict[str, Any]) -> Any:
    """A variant's Options from plain values; omitted fields keep their defaults. Raises ValueError for
    unknown fields."""
    options_type = load(name).Options
    known = [f.name for f in fields(options_type)]
    for key in given:
        if key not in known:
            raise ValueError(f"{name} has no option {key!r}; it has: {', '.join(known)}")
    return options_type(**given)


_binaries: dict[Any, Any] = {}


@cache
def compile_once(name: str, problem: Problem, options: Any, gpu: Gpu) -> Any:
    """A variant compiled: the same object for the same choices, and one binary where they are
    equal, loaded once.

    Raises as the variant's `compile` does.
    """
    compiled = load(name).compile(problem, options, gpu)
    binary = getattr(compiled, "binary", None)
    return (
        compiled
        if binary is None
        else replace(compiled, binary=_binaries.setdefault(binary, binary))
    )


def options_dict(options: Any) -> dict[str, Any]:
    return asdict(options)


def digest(name: str) -> str:
    """sha256 over what the sources say that decide what a variant computes and how fast, but for
    their prose.

    Of a variant of Triton's: over what its launches are written in, so that moving a module or
    declaring something of the variant leaves it as it was.
    """
    module = load(name)
    if not declared(name).binaries:
        said = launched_by([sources.path_of(m) for m in module.WRITTEN_IN]) | options_dict(
            module.Options()
        )
        return "sha256:" + hashlib.sha256(repr(sorted(said.items())).encode()).hexdigest()
    return sources.digest(sources.behind(module.__name__))


_DESCRIBING = {"Options", "forms", "more_cases", "unsupported"}


def launched_by(paths: Sequence[Path]) -> dict[str, str]:
    """Digests of the definitions in a Triton variant's files, its own first, without what describes
    the variant."""
    own = sources.definitions(paths[0])
    described = {name for name in own if name.isupper() and not name.startswith("_")} | _DESCRIBING
    found = {name: digest for name, digest in own.items() if name not in described}
    for path in paths[1:]:
        found |= sources.definitions(path)
    return found
