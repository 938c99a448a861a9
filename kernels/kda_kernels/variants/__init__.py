"""The kernel variants by name. A variant is one module with the same names in the same order:

Spec                                    frozen dataclass of compile-time choices (and `pdl`, a launch option)
unsupported(problem, spec, gpu)         why this pair can't run, or None; pure, no CUDA
compile(problem, spec, gpu)             from shapes alone, works with no GPU
launch(compiled, operands, stream)      enqueues once; allocates nothing, never synchronizes

and KERNELS, the names of the GPU kernels that a launch enqueues (or their beginnings), by which a measurement
proves what it timed.
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


def load(name: str) -> ModuleType:
    """The module of a variant. Raises KeyError naming the known ones."""
    return import_module(_module(name))


def make_spec(name: str, choices: dict[str, Any]) -> Any:
    """A variant's Spec from plain values; omitted fields keep their defaults. Raises ValueError for unknown fields."""
    spec_type = load(name).Spec
    known = [f.name for f in fields(spec_type)]
    for key in choices:
        if key not in known:
            raise ValueError(f"{name} has no option {key!r}; it has: {', '.join(known)}")
    return spec_type(**choices)


_binaries: dict[Any, Any] = {}


@cache
def compile_once(name: str, problem: Problem, spec: Any, gpu: Gpu) -> Any:
    """A variant compiled: the same object for the same choices, and one binary where they are equal, loaded once.

    Raises as the variant's `compile` does.
    """
    compiled = load(name).compile(problem, spec, gpu)
    binary = getattr(compiled, "binary", None)
    return compiled if binary is None else replace(compiled, binary=_binaries.setdefault(binary, binary))


def spec_dict(spec: Any) -> dict[str, Any]:
    return asdict(spec)


def is_triton(name: str) -> bool:
    """Whether a variant has no binaries of ours: Triton compiles it where it runs."""
    return hasattr(load(name), "WRITTEN_IN")


def digest(name: str) -> str:
    """sha256 over what the sources say that decide what a variant computes and how fast, but for their prose.

    Of a variant of Triton's: over what its launches are written in, so that moving a module or declaring something of
    the variant leaves it as it was.
    """
    module = load(name)
    if is_triton(name):
        said = launched_by([sources.path_of(m) for m in module.WRITTEN_IN]) | spec_dict(module.Spec())
        return "sha256:" + hashlib.sha256(repr(sorted(said.items())).encode()).hexdigest()
    return sources.digest(sources.behind(module.__name__))


def launched_by(paths: Sequence[Path]) -> dict[str, str]:
    """Digests of the definitions in a Triton variant's files, its own first, without what describes the variant."""
    own = sources.definitions(paths[0])
    described = {name for name in own if name.isupper() and not name.startswith("_")} | {"Spec", "unsupported"}
    found = {name: digest for name, digest in own.items() if name not in described}
    for path in paths[1:]:
        found |= sources.definitions(path)
    return found
