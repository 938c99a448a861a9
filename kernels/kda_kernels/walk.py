"""The walk of persistent CTAs over items.

Blocks of as many requests as a CTA has items; in a block, head by head. Consecutive items of a CTA so share a head, and
neighbouring CTAs work on neighbouring heads of one request at a time.
"""

from __future__ import annotations

from typing import NamedTuple

import cutlass.cute as cute
from cutlass import Int32

from kdabench.problem import ceil_div


class Item(NamedTuple):
    """A place in the walk: head and request, first request and size of the block of requests."""

    head: Int32
    request: Int32
    first: Int32
    size: Int32


def schedule(items: int, ctas: int, least: int = 1) -> tuple[int, int]:
    """Items per CTA, at least `least` and the same for all but the last, and CTAs, at most `ctas`.

    Raises ValueError if a count is below one.
    """
    if min(items, ctas, least) < 1:
        raise ValueError(f"counts must be >= 1: {items=} {ctas=} {least=}")
    per = max(least, ceil_div(items, ctas))
    return per, ceil_div(items, per)


@cute.jit
def first_item(cta: Int32, per: Int32, heads: Int32, requests: Int32) -> Item:
    """A CTA's first item."""
    size = min(per, requests)
    full = requests // size  # blocks of that size
    index = cta * per
    block = min(index // (size * heads), full)
    index = index - block * size * heads
    first = block * size
    if block == full:
        size = requests - first
    head = index // size
    return Item(head, first + index - head * size, first, size)


@cute.jit
def next_item(item: Item, heads: Int32, requests: Int32) -> Item:
    """The item after it; past the last one, request = requests."""
    head, request, first, size = item
    request = request + 1
    if request == first + size:
        head = head + 1
        if head == heads:
            head = Int32(0)
            first = first + size
            size = min(size, requests - first)
        request = first
    return Item(head, request, first, size)
