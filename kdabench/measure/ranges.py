"""Ranges on a profiler's timeline."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

_DOMAIN = "kdabench"


def span(name: str) -> AbstractContextManager[Any]:
    """Mark what runs within as an NVTX range, in the suite's own domain. Costs next to nothing
    without a profiler."""
    import nvtx  # loads numpy, which a finished sweep does without

    marked: AbstractContextManager[Any] = nvtx.annotate(name, domain=_DOMAIN)
    return marked
