"""Shared memory of a CTA: one table says what there is, its type, shape and place; sizes and views follow from it.

    areas = {
        "x": Area(BFloat16, (HEAD_DIM, 3, tokens)),
        "o": Area(BFloat16, (HEAD_DIM, tokens), inside="x"),   # when x is used up
        "sums": Area(Float32, warps),
    }
    M = smem.allocate(areas)   # M.x, M.o, M.sums are tensors

Device functions take what `allocate` gives as `M: Smem`. That is the DSL's mark for what is known at compile time, and
here stands for a bundle of tensors, which are not: the mark keeps the tracer from taking the bundle apart, and the
tensors in it are values of the running kernel all the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, make_dataclass
from math import prod
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Uint8
from cutlass.memory import SmemAllocator

from kda_kernels.problem import ceil_div

Smem = cutlass.Constexpr
"""Annotates a parameter that is a bundle of tensors in shared memory."""

SM_BYTES = 233_472
"""Bytes of an SM, RESERVED_BYTES of which are lost by each CTA."""
RESERVED_BYTES = 1_024
ALIGNMENT = 128
"""Of shared memory that cp.async fills: where source and target differ modulo 128, lines are written in pieces, and
modulo 32 also fetched twice."""


@dataclass(frozen=True)
class Area:
    """A tensor of shared memory.

    shape    of a compact layout, first index fastest; or a layout, then `nbytes` must be given
    inside   name of the area whose bytes it shares, from `skip` bytes on; "": it has its own
    """

    dtype: Any
    shape: Any
    inside: str = ""
    skip: int = 0
    nbytes: int = -1

    def __post_init__(self) -> None:
        if self.nbytes < 0:
            count = prod(self.shape) if isinstance(self.shape, tuple) else self.shape
            object.__setattr__(self, "nbytes", count * self.dtype.width // 8)


Areas = Mapping[str, Area]


def sizes(areas: Areas, tail: bool = True) -> dict[str, int]:
    """Bytes of each area that has its own, with what aligns the next one. Areas without elements have none.

    tail   whether the last one too has what would align a next one
    """
    found: dict[str, int] = {}
    for name, area in areas.items():
        owner = area.inside or name
        found[owner] = max(found.get(owner, 0), area.skip + area.nbytes)
    aligned = {name: ALIGNMENT * ceil_div(size, ALIGNMENT) for name, size in found.items() if size}
    if not tail:
        *_, last = aligned
        aligned[last] = found[last]
    return aligned


def total(areas: Areas, tail: bool = True) -> int:
    """Bytes of all areas."""
    return sum(sizes(areas, tail).values())


def allocate(areas: Areas, align: int = 16, tail: bool = True) -> Any:
    """Areas with an allocation for each: with one for all, the compiler allots registers otherwise.

    align   that views may assume
    """
    allocator = SmemAllocator()
    starts = {}
    for name, size in sizes(areas, tail).items():
        area = allocator.allocate_tensor(Uint8, cute.make_layout(size), byte_alignment=ALIGNMENT)
        starts[name] = (area.iterator.toint(), 0)
    return _views(areas, starts, align)


def allocate_together(areas: Areas, align: int = 16) -> Any:
    """Areas that follow each other in one allocation."""
    area = SmemAllocator().allocate_tensor(Uint8, cute.make_layout(total(areas)), byte_alignment=ALIGNMENT)
    return at(areas, area.iterator.toint(), align)


def at(areas: Areas, address: Int32, align: int = 16) -> Any:
    """Areas that follow each other from an address on."""
    starts, offset = {}, 0
    for name, size in sizes(areas).items():
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
            area.dtype, address + (offset + area.skip), cutlass.AddressSpace.smem, assumed_align=align
        )
        views[name] = cute.make_tensor(pointer, cute.make_layout(area.shape))
    return bundle(views)


def bundle(parts: Mapping[str, Any]) -> Any:
    """What may stand for an `Smem`. Frozen: the tracer takes any other object apart, and then a tensor made outside a
    loop isn't seen in it.
    """
    return make_dataclass("Smem", parts, frozen=True)(**parts)
