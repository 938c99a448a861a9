"""Benchmarks and autotunes the decode-side kernels of Kimi Delta Attention.

The library behind the command line, docs/library.md. Its names are loaded when they are first asked
for: to import the package loads nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kdabench.data.measurements import Candidate, Cell, Measurement
    from kdabench.library import choose, compare, load, load_policy, plot
    from kdabench.measure.session import run_sweep
    from kdabench.policy.fit import fit
    from kdabench.review.frame import frame
    from kdabench.sources import load_envs, load_sweep, open_source

__all__ = [
    "Candidate",
    "Cell",
    "Measurement",
    "choose",
    "compare",
    "fit",
    "frame",
    "load",
    "load_envs",
    "load_policy",
    "load_sweep",
    "open_source",
    "plot",
    "run_sweep",
]

_HOMES = {
    "kdabench.data.measurements": ("Candidate", "Cell", "Measurement"),
    "kdabench.library": ("choose", "compare", "load", "load_policy", "plot"),
    "kdabench.measure.session": ("run_sweep",),
    "kdabench.policy.fit": ("fit",),
    "kdabench.review.frame": ("frame",),
    "kdabench.sources": ("load_envs", "load_sweep", "open_source"),
}


def __getattr__(name: str) -> Any:
    """Load a public name. Raises AttributeError for any other."""
    for module, names in _HOMES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
