"""What the tests of compiled kernels share without a GPU: a cache of their own, SASS, a launch that only records."""

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

    def launch(self, grid: tuple[int, int, int], values: tuple[int | float, ...], stream: int, pdl: bool) -> None:
        self.grid, self.values, self.stream, self.pdl = grid, values, stream, pdl


def sass_of(image: bytes, folder: Path) -> str:
    """A binary disassembled, by the tool in Triton's wheel."""
    import triton

    path = folder / "kernel.cubin"
    path.write_bytes(image)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    return subprocess.run([tool, "-c", path], check=True, capture_output=True, text=True).stdout


def plain(jitted: Any, **others: Any) -> Callable[..., Any]:
    """The Python function as written: the DSL rewrites the code of jit functions when a process first compiles.

    others   plain ones, by name, of those that it calls
    """
    inner = jitted.__wrapped__
    names = {**inner.__globals__, **others}
    return FunctionType(inner.__code__, names, inner.__name__, inner.__defaults__, inner.__closure__)


# The walk over items. The device functions are plain integer arithmetic: here they run on Python's.
part_of = plain(walk.part_of, half_of=plain(walk.half_of))
item_at = plain(walk.item_at)
next_item = plain(walk.next_item)


def items_of(cta: int, per: int, heads: int, requests: int) -> list[tuple[int, int]]:
    """(head, request) of the items of a CTA that has a run of its own, in turn."""
    return _items(cta * per, min(per, heads * requests - cta * per), per, heads, requests)


def items_of_part(cta: int, ctas: int, per: int, heads: int, requests: int) -> list[tuple[int, int]]:
    """The same of one that has a part as `walk.divided` or `walk.halved` says, of which those are positive."""
    return _items(*part_of(cta, ctas, per, heads, requests), abs(per), heads, requests)


def _items(begin: int, count: int, per: int, heads: int, requests: int) -> list[tuple[int, int]]:
    item = item_at(begin, per, heads, requests)
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
