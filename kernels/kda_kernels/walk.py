"""The walk of persistent CTAs over items, and its division into runs.

Blocks of as many requests as a run has items; in a block, head by head. Consecutive items of a run
so share a head, and neighbouring runs are at neighbouring heads of one request at a time.
Divisions:
  PLAIN    a run is that of one CTA
  HALVED   a run is that of two CTAs, in halves
  BY_HEAD  as HALVED, or, where there are SMs enough, runs end where a head's block ends, for a
           change of heads takes about as long as half an item
A division has two sides that must agree: on the host `runs` says how many CTAs are launched and
what `Arguments.per` is; from both, in the kernel, `first` tells a CTA its first item and how many
it has. From there `next_item` leads on, in all divisions.

`Arguments.per` is the items of a run, negated where runs end with a head's block. Nobody but this
module knows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import cutlass.cute as cute
from cutlass import Int32

from kda_kernels.problem import ceil_div


class Item(NamedTuple):
    """A place in the walk: head and request, first request and size of the block of requests."""

    head: Int32
    request: Int32
    first: Int32
    size: Int32


class Runs(NamedTuple):
    """A division as it is launched.

    size       items of a run, but for the last one, or the last one of each head
    ctas
    of_a_head  runs end where a head's block ends
    """

    size: int
    ctas: int
    of_a_head: bool = False

    @property
    def grid(self) -> tuple[int, int, int]:
        return self.ctas, 1, 1

    @property
    def per(self) -> int:
        """`Arguments.per`."""
        return -self.size if self.of_a_head else self.size


def schedule(items: int, ctas: int, least: int = 1) -> tuple[int, int]:
    """Items of a run that one CTA has, at least `least` and the same for all but the last, and
    CTAs, at most `ctas`.

    Raises ValueError if a count is below one.
    """
    if min(items, ctas, least) < 1:
        raise ValueError(f"counts must be >= 1: {items=} {ctas=} {least=}")
    per = max(least, ceil_div(items, ctas))
    return per, ceil_div(items, per)


def _plain(heads: int, requests: int, ctas: int, least: int = 1) -> Runs:
    """As `schedule`."""
    return Runs(*schedule(heads * requests, ctas, least))


def _halved(heads: int, requests: int, sms: int, most: int | None = None) -> Runs:
    """Two CTAs per SM, or more if each takes `most` items at most.

    So no SM has more than its part of the items, rounded up; of two CTAs with as many as each
    other, that may be one more. Raises ValueError if a count is below one.
    """
    if most is not None and most < 1:
        raise ValueError(f"counts must be >= 1: {most=}")
    items = heads * requests
    size, runs = schedule(items, sms)
    if most is not None and size > 2 * most:
        size, runs = 2 * most, ceil_div(items, 2 * most)
    last = items - (runs - 1) * size
    return Runs(size, 2 * runs - (last <= ceil_div(size, 2)) if size > 1 else runs)


def _by_head(heads: int, requests: int, sms: int, most: int | None = None) -> Runs:
    """As `_halved`, or, where there are SMs enough, runs of a head: of a CTA each, or of two if
    there are more CTAs than runs.

    No SM has more than its part of the items, rounded up. Raises ValueError if a count is below
    one.
    """
    if min(heads, requests) < 1:
        raise ValueError(f"counts must be >= 1: {heads=} {requests=}")
    halves = _halved(heads, requests, sms, most)
    share = ceil_div(heads * requests, sms)
    if share == 1:
        return halves
    if halves.size < share:
        size = ceil_div(requests, ceil_div(requests, halves.size // 2))
        return Runs(size, heads * ceil_div(requests, size), of_a_head=True)
    runs = heads * ceil_div(requests, share)
    if runs <= sms:
        return Runs(share, 2 * runs - (heads if requests % share == 1 else 0), of_a_head=True)
    if share % 2 == 0 and heads * ceil_div(requests, share // 2) <= 2 * sms:
        return Runs(share // 2, heads * ceil_div(requests, share // 2), of_a_head=True)
    return halves


@cute.jit
def _first_of_run(
    cta: Int32, ctas: Int32, per: Int32, heads: Int32, requests: Int32
) -> tuple[Item, Int32]:
    begin = cta * per
    return item_at(begin, per, heads, requests), min(per, heads * requests - begin)


@cute.jit
def _first_of_half(
    cta: Int32, ctas: Int32, per: Int32, heads: Int32, requests: Int32
) -> tuple[Item, Int32]:
    begin, count = half_of(cta, ctas, per, heads * requests)
    return item_at(begin, per, heads, requests), count


@cute.jit
def _first_of_part(
    cta: Int32, ctas: Int32, per: Int32, heads: Int32, requests: Int32
) -> tuple[Item, Int32]:
    begin, count = part_of(cta, ctas, per, heads, requests)
    return item_at(begin, max(per, -per), heads, requests), count


@cute.jit
def half_of(cta: Int32, ctas: Int32, per: Int32, items: Int32) -> tuple[Int32, Int32]:
    """Of runs in halves: where a CTA begins, and its items. The second halves belong to the last
    CTAs: those that come when each SM has one.
    """
    runs = ctas
    if per > 1:
        runs = (ctas + 1) // 2
    begin, count = cta * per, (per + 1) // 2
    if cta >= runs:
        begin, count = (cta - runs) * per + count, per - count
    return begin, min(count, items - begin)


@cute.jit
def part_of(
    cta: Int32, ctas: Int32, per: Int32, heads: Int32, requests: Int32
) -> tuple[Int32, Int32]:
    """Where a CTA begins, and its items, of runs as `_by_head` has them."""
    begin, count = half_of(cta, ctas, per, heads * requests)
    if per < 0:
        # Runs of `size` items first, those of the last block, which may be shorter, behind them.
        size = -per
        whole = requests // size * heads
        rest = requests - requests // size * size
        runs = whole
        if rest > 0:
            runs = whole + heads
        run = cta
        if cta >= runs:
            run = cta - runs
        begin, count = run * size, size
        if run >= whole:
            begin, count = whole * size + (run - whole) * rest, rest
        first = count
        if ctas > runs:
            first = (count + 1) // 2
        if cta >= runs:
            begin, count = begin + first, count - first
        else:
            count = first
    return begin, count


@cute.jit
def item_at(index: Int32, per: Int32, heads: Int32, requests: Int32) -> Item:
    """The item of a place in the walk, by runs of `per` items."""
    size = min(per, requests)
    full = requests // size  # blocks of that size
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


class Division(NamedTuple):
    """A way to divide the items, heads x requests, among CTAs.

    runs    (heads, requests, sms, ...): `Runs`
    first   (cta, ctas, per, heads, requests), in the kernel: a CTA's first item, and how many it
            has
    """

    runs: Callable[..., Runs]
    first: Any


PLAIN = Division(_plain, _first_of_run)
HALVED = Division(_halved, _first_of_half)
BY_HEAD = Division(_by_head, _first_of_part)
