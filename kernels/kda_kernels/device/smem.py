"""Shared memory of a CTA: one table says what there is, its type, shape and place; sizes and views
follow from it.

    areas = {
        "x": Area(BFloat16, (HEAD_DIM, 3, tokens)),
        "o": Area(BFloat16, (HEAD_DIM, tokens), inside="x"),   # when x is used up
        "sums": Area(Float32, warps),
    }
    M = smem.allocate(areas)   # M.x, M.o, M.sums are tensors

Device functions take what `allocate` gives as `M: Smem`. That is the DSL's mark for what is known
at compile time, and here stands for a bundle of tensors, which are not: the mark keeps the tracer
from taking the bundle apart, and the tensors in it are values of the running kernel all the same.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, make_dataclass
from itertools import zip_longest
from math import prod
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64, Uint8
from cutlass.memory import SmemAllocator

from kda_kernels.problem import ceil_div

Smem = cutlass.Constexpr
"""Annotates a parameter that is a bundle of tensors in shared memory."""

ALIGNMENT = 128
"""Of shared memory that cp.async fills: where source and target differ modulo 128, lines are
written in pieces, and modulo 32 also fetched twice."""


@dataclass(frozen=True)
class Area:
    """A tensor of shared memory.

    shape    of a compact layout, first index fastest; or a layout, then `nbytes` must be given
    inside   name of the area whose bytes it shares, from `skip` bytes on; "": it has its own
    align    of an area of its own: what nobody copies to, and is small, may stand closer
    """

    dtype: Any
    shape: Any
    inside: str = ""
    skip: int = 0
    nbytes: int = -1
    align: int = ALIGNMENT

    def __post_init__(self) -> None:
        if self.nbytes < 0:
            count = prod(self.shape) if isinstance(self.shape, tuple) else self.shape
            object.__setattr__(self, "nbytes", count * self.dtype.width // 8)


@dataclass(frozen=True)
class Barriers(Area):
    """mbarriers. What `allocate` gives for them is a pointer to the first: functions take such.

    As the last area they end without what would align another one.
    """

    dtype: Any = Int64
    shape: Any = 1


Areas = Mapping[str, Area]


def sizes(areas: Areas, tail: bool = True) -> dict[str, int]:
    """Bytes of each area that has its own, with what aligns the next one. Areas without elements
    have none.

    tail   whether the last one too has what would align a next one; barriers never have
    """
    found: dict[str, int] = {}
    for name, area in areas.items():
        owner = area.inside or name
        found[owner] = max(found.get(owner, 0), area.skip + area.nbytes)
    owners = [name for name, size in found.items() if size]
    padded, start = {}, 0
    for name, following in zip_longest(owners, owners[1:], fillvalue=""):
        align = areas[following or name].align
        end = start + found[name]
        if following or (tail and not isinstance(areas[name], Barriers)):
            end = align * ceil_div(end, align)
        padded[name], start = end - start, end
    return padded


def total(areas: Areas, tail: bool = True) -> int:
    """Bytes of all areas, as `sizes` has them."""
    return sum(sizes(areas, tail).values())


def allocate(areas: Areas, align: int = 16, tail: bool = True) -> Any:
    """Areas with an allocation for each: with one for all, the compiler allots registers otherwise.

    align   that views may assume
    tail    as `sizes` has it
    """
    allocator = SmemAllocator()
    starts = {}
    for name, size in sizes(areas, tail).items():
        area = allocator.allocate_tensor(
            Uint8, cute.make_layout(size), byte_alignment=areas[name].align
        )
        starts[name] = (area.iterator.toint(), 0)
    return _views(areas, starts, align)


def allocate_as_they_are(areas: Areas) -> Any:
    """Areas each allocated with its own type and alignment, by which the compiler then orders loads
    and addresses.

    Raises ValueError for an area inside another one that isn't of its type or doesn't start where
    it does.
    """
    allocator = SmemAllocator()
    views: dict[str, Any] = {}
    for name, area in areas.items():
        layout = cute.make_layout(area.shape)
        if area.inside:
            if area.skip or area.dtype is not areas[area.inside].dtype:
                raise ValueError(f"{name} must begin {area.inside}, in its type")
            views[name] = cute.make_tensor(views[area.inside].iterator, layout)
        else:
            tensor = allocator.allocate_tensor(area.dtype, layout, byte_alignment=area.align)
            views[name] = tensor.iterator if isinstance(area, Barriers) else tensor
    return bundle(views)


def allocate_together(areas: Areas, align: int = 16, last: Collection[str] = ()) -> Any:
    """Areas that follow each other in one allocation.

    last   names of those that stand behind all others. Views are made in the order of the table
           whatever the order of places, and by that of views the compiler allots registers
    """
    area = SmemAllocator().allocate_tensor(
        Uint8, cute.make_layout(total(areas)), byte_alignment=ALIGNMENT
    )
    return at(areas, area.iterator.toint(), align, last)


def at(areas: Areas, address: Int32, align: int = 16, last: Collection[str] = ()) -> Any:
    """Areas that follow each other from an address on, as `allocate_together` says."""
    starts, offset = {}, 0
    for name, size in sorted(sizes(areas).items(), key=lambda named: named[0] in last):
        starts[name] = (address, offset)
        offset += size
    return _views(areas, starts, align)


def _views(areas: Areas, starts: Mapping[str, tuple[Int32, int]], align: int) -> Any:
    """Tensors by name; None where an area has no bytes."""
    views: dict[str, Any] = {}
    for name, area in areas.items():
        owner = area.inside or name
        if owner not in starts:
            views[name] = None
            continue
        address, offset = starts[owner]
        pointer = cute.make_ptr(
            area.dtype,
            address + (offset + area.skip),
            cutlass.AddressSpace.smem,
            assumed_align=align,
        )
        barriers = isinstance(area, Barriers)
        views[name] = (
            pointer if barriers else cute.make_tensor(pointer, cute.make_layout(area.shape))
        )
    return bundle(views)


def bundle(views: dict[str, Any]) -> Any:
    # Frozen: the tracer takes any other object apart, and then a tensor made outside a loop isn't
    # seen in it.
    return make_dataclass("Smem", views, frozen=True)(**views)
