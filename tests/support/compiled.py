"""What the tests of compiled kernels share without a GPU: a cache of their own, SASS, a launch that
only records."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import torch

from kda_kernels import walk


class Recorder:
    """In place of a loaded binary: keeps what a launch passes."""

    def launch(
        self, grid: tuple[int, int, int], values: tuple[int | float, ...], stream: int, pdl: bool
    ) -> None:
        self.grid, self.values, self.stream, self.pdl = grid, values, stream, pdl


def sass_of(image: bytes, folder: Path) -> str:
    """A binary disassembled, by the tool in Triton's wheel."""
    import triton

    path = folder / "kernel.cubin"
    path.write_bytes(image)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    return subprocess.run([tool, "-c", path], check=True, capture_output=True, text=True).stdout


def plain(jitted: Any, **others: Any) -> Callable[..., Any]:
    """The Python function as written: the DSL rewrites the code of jit functions when a process
    first compiles.

    others   plain ones, by name, of those that it calls
    """
    inner = jitted.__wrapped__
    names = {**inner.__globals__, **others}
    return FunctionType(
        inner.__code__, names, inner.__name__, inner.__defaults__, inner.__closure__
    )


# The walk over items. The device functions are plain integer arithmetic: here they run on Python's.
item_at = plain(walk.item_at)
next_item = plain(walk.next_item)
half_of = plain(walk.half_of)
part_of = plain(walk.part_of, half_of=half_of)


def items_of(
    division: walk.Division, cta: int, runs: walk.Runs, heads: int, requests: int
) -> list[tuple[int, int]]:
    """(head, request) of a CTA's items, in turn, by what a launch passes."""
    first = plain(division.first, item_at=item_at, half_of=half_of, part_of=part_of)
    item, count = first(cta, runs.ctas, runs.per, heads, requests)
    found = []
    for _ in range(count):
        found.append((int(item.head), int(item.request)))
        item = next_item(item, heads, requests)
    return found


def odd(window: torch.Tensor) -> torch.Tensor:
    """The same window with slots that are not 16-byte aligned."""
    slots, channels, entries = window.shape
    storage = torch.zeros(slots * (channels * entries + 1), dtype=window.dtype)
    return storage.as_strided(window.shape, (channels * entries + 1, entries, 1))
