"""A request's convolution window: its history to shared memory, rolled, and back.

Layouts of a window [3D, W] at any strides (`arguments.Rules`) and what a CTA of `rows` channels of
each of q, k, v has of it in shared memory:
  rows   dim-first: all entries as they are, [3, rows, W]; rolled there
  taps   window-major: the three entries of history, [3 entries, 3, rows], in front of the inputs,
         which come next; by units of 16 bytes
  any    the same, element by element
A window is loaded and stored by the warps that convolve its channels, 64 each (`load_own`,
`store_own`), or by all threads, which a barrier must then stand between (`load_all`, `store_all`).
"""

# A condition known at compile time can't share an `if` with one of the running kernel.
# ruff: noqa: SIM102
from __future__ import annotations

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import BFloat16, Int32, Int64, const_expr, range_constexpr

from kda_kernels.arguments import Arguments
from kda_kernels.device import blocks
from kda_kernels.device.blocks import UNIT
from kda_kernels.device.smem import Smem
from kda_kernels.parts.prologue import Place
from kda_kernels.problem import CONV_WIDTH, HISTORY, ceil_div

_WARP_CHANNELS = 64
"""Channels that a warp convolves, two per lane."""

GMEM = cutlass.AddressSpace.gmem


class Window(NamedTuple):
    """A request's convolution window: address of its page, element strides, first entry of the
    history."""

    page: Int64
    channel_stride: Int32
    tap_stride: Int32
    start: Int32


@cute.jit
def window_of(A: Arguments, page: Int32, start: Int32) -> Window:
    return Window(
        A.conv_state + Int64(page) * A.conv_stride * 2, A.channel_stride, A.tap_stride, start
    )


@cute.jit
def load_own(M: Smem, window: Window, at: Place, P: cutlass.Constexpr) -> None:
    """What of the window this warp convolves."""
    base = M.window.iterator.toint()
    if const_expr(P.layout == "rows"):
        for i in range_constexpr(_own_units(P)):
            unit, inside, address = _own_unit(window, i, at, P)
            if inside:
                blocks.copy_async(base + unit * 16, address, 16)
    else:
        for i in range_constexpr(_own_cells(HISTORY, P)):
            place, inside, address = _own_cell(window, window.start, HISTORY, i, at, P)
            if inside:
                if const_expr(P.layout == "taps"):
                    blocks.copy_async(base + place * 2, address, 16)
                else:
                    flat = cute.make_tensor(
                        M.window.iterator, cute.make_layout(HISTORY * 3 * P.rows)
                    )
                    flat[place] = blocks.at(BFloat16, address, Int32(0))


@cute.jit
def store_own(M: Smem, window: Window, at: Place, P: cutlass.Constexpr) -> None:
    """The two inputs before this step's, then these, as the first tokens+2 entries; a warp those of
    its channels."""
    if const_expr(P.layout == "rows"):
        for i in range_constexpr(_own_units(P)):
            unit, inside, address = _own_unit(window, i, at, P)
            if inside:
                store_unit(M.window.iterator, unit, 3 * P.rows // UNIT * P.window, address)
    else:
        entries = M.x.iterator + 3 * P.rows
        total = (P.tokens + 2) * 3 * P.rows
        for i in range_constexpr(_own_cells(P.tokens + 2, P)):
            place, inside, address = _own_cell(window, Int32(0), P.tokens + 2, i, at, P)
            if inside:
                if const_expr(P.layout == "taps"):
                    store_unit(entries, place // UNIT, total // UNIT, address)
                else:
                    blocks.put(
                        BFloat16, address, cute.make_tensor(entries, cute.make_layout(total))[place]
                    )


def _own_units(P: Any) -> int:
    """16-byte units per lane of a dim-first window."""
    return ceil_div(_WARP_CHANNELS // UNIT * P.window, 32)


@cute.jit
def _own_unit(
    window: Window, i: cutlass.Constexpr, at: Place, P: cutlass.Constexpr
) -> tuple[Int32, cutlass.Boolean, Int64]:
    """A lane's unit i of a dim-first window: its place in `[3, rows, W]`, whether there is one, its
    address."""
    units = P.rows // UNIT * window.channel_stride  # of one of q, k, v
    of_warp = _WARP_CHANNELS // UNIT * window.channel_stride
    mine = at.lane + 32 * i
    unit = at.warp * of_warp + mine
    part, address = _part_of(window, unit, units, at)
    return unit, mine < of_warp and unit < 3 * units, address + Int64(unit - part * units) * 16


@cute.jit
def _part_of(window: Window, unit: Int32, units: Int32, at: Place) -> tuple[Int32, Int64]:
    """Which of q, k, v, `units` of each, a unit of a dim-first window is of, and the address of its
    first unit."""
    part = Int32(0)
    if unit >= units:
        part = Int32(1)
    if unit >= 2 * units:
        part = Int32(2)
    return part, window.page + Int64(part * at.D + at.channel) * (window.channel_stride * 2)


@cute.jit
def _unit_address(window: Window, unit: Int32, units: Int32, at: Place) -> Int64:
    part, address = _part_of(window, unit, units, at)
    return address + Int64(unit - part * units) * 16


def _own_cells(entries: int, P: Any) -> int:
    """Pieces per lane of entries of a window that is not dim-first: 16 bytes, or one element."""
    piece = UNIT if P.layout == "taps" else 1
    return ceil_div(_WARP_CHANNELS // piece * entries, 32)


@cute.jit
def _own_cell(
    window: Window,
    first: Int32,
    entries: cutlass.Constexpr,
    i: cutlass.Constexpr,
    at: Place,
    P: cutlass.Constexpr,
) -> tuple[Int32, cutlass.Boolean, Int64]:
    """A lane's piece i of `[entries from first, 3, rows]`: its element, whether there is one, its
    address."""
    piece = UNIT if const_expr(P.layout == "taps") else 1
    per_entry = _WARP_CHANNELS // piece
    mine = at.lane + 32 * i
    entry = mine // per_entry
    channel = at.warp * _WARP_CHANNELS + mine % per_entry * piece
    c = channel // P.rows * at.D + at.channel + channel % P.rows
    address = (
        window.page
        + (Int64(first + entry) * window.tap_stride + Int64(c) * window.channel_stride) * 2
    )
    return entry * (3 * P.rows) + channel, entry < entries and channel < 3 * P.rows, address


@cute.jit
def load_all(M: Smem, window: Window, at: Place, P: cutlass.Constexpr) -> None:
    if const_expr(P.layout == "rows"):
        units = P.rows // UNIT * window.channel_stride  # of one of q, k, v
        base = M.window.iterator.toint()
        for i in range_constexpr(ceil_div(3 * P.rows // UNIT * P.window, P.threads)):
            unit = at.tid + i * P.threads
            if unit < 3 * units:
                blocks.copy_async(base + unit * 16, _unit_address(window, unit, units, at), 16)
    elif const_expr(P.layout == "taps"):
        base = M.window.iterator.toint()
        total = HISTORY * 3 * P.rows // UNIT
        for i in range_constexpr(ceil_div(total, P.threads)):
            unit = at.tid + i * P.threads
            if unit < total:
                blocks.copy_async(
                    base + unit * 16, _element_address(window, unit * UNIT, window.start, at, P), 16
                )
    else:
        load_elements(M, window, at, P)


@cute.jit
def load_elements(M: Smem, window: Window, at: Place, P: cutlass.Constexpr) -> None:
    """Of layout any, as `load_all`."""
    total = HISTORY * 3 * P.rows
    flat = cute.make_tensor(M.window.iterator, cute.make_layout(total))
    for i in range_constexpr(ceil_div(total, P.threads)):
        index = at.tid + i * P.threads
        if index < total:
            flat[index] = blocks.at(
                BFloat16, _element_address(window, index, window.start, at, P), Int32(0)
            )


@cute.jit
def _element_address(
    window: Window, index: Int32, first: Int32, at: Place, P: cutlass.Constexpr
) -> Int64:
    """Of element `index` of `[entries from first, 3, rows]`."""
    entry = first + index // (3 * P.rows)
    c = index // P.rows % 3 * at.D + at.channel + index % P.rows
    return window.page + (Int64(entry) * window.tap_stride + Int64(c) * window.channel_stride) * 2


@cute.jit
def store_all(M: Smem, window: Window, at: Place, P: cutlass.Constexpr) -> None:
    """The two inputs before this step's, then these, as the first tokens+2 entries."""
    if const_expr(P.layout == "rows"):
        units = P.rows // UNIT * window.channel_stride
        most = 3 * P.rows // UNIT * P.window
        for i in range_constexpr(ceil_div(most, P.threads)):
            unit = at.tid + i * P.threads
            if unit < 3 * units:
                store_unit(M.window.iterator, unit, most, _unit_address(window, unit, units, at))
    else:
        store_entries(M, window, at, P)


@cute.jit
def store_entries(M: Smem, window: Window, at: Place, P: cutlass.Constexpr) -> None:
    """Of layouts taps and any, as `store_all`."""
    total = (P.tokens + 2) * 3 * P.rows
    entries = M.x.iterator + 3 * P.rows
    if const_expr(P.layout == "taps"):
        for i in range_constexpr(ceil_div(total // UNIT, P.threads)):
            unit = at.tid + i * P.threads
            if unit < total // UNIT:
                address = _element_address(window, unit * UNIT, Int32(0), at, P)
                store_unit(entries, unit, total // UNIT, address)
    else:
        flat = cute.make_tensor(entries, cute.make_layout(total))
        for i in range_constexpr(ceil_div(total, P.threads)):
            index = at.tid + i * P.threads
            if index < total:
                blocks.put(BFloat16, _element_address(window, index, Int32(0), at, P), flat[index])


@cute.jit
def store_unit(source: cute.Pointer, unit: Int32, units: cutlass.Constexpr, address: Int64) -> None:
    """One of `units` 16-byte units of shared memory to global memory."""
    values = cute.make_rmem_tensor(UNIT, BFloat16)
    layout = cute.make_layout((UNIT, units), stride=(1, UNIT))
    cute.autovec_copy(cute.make_tensor(source, layout)[None, unit], values)
    target = cute.make_ptr(BFloat16, address, GMEM, assumed_align=16)
    cute.autovec_copy(values, cute.make_tensor(target, cute.make_layout(UNIT)))


@cute.jit
def take_history(past: cute.Tensor, M: Smem, window: Window, channel: Int32) -> None:
    """Entries start .. start+2, (channel of two, entry), of a window of layout rows.

    channel   the first of the two, of the CTA's 3 * rows
    """
    entries = window.channel_stride
    place = channel * entries + window.start
    for i in range_constexpr(2):
        for e in range_constexpr(HISTORY):
            past[i, e] = M.window[place + i * entries + e]


@cute.jit
def inputs_by_pair(M: Smem, P: cutlass.Constexpr) -> cute.Tensor:
    """M.x as (channel of two, pair, part, entry)."""
    pairs = P.rows // 2
    layout = cute.make_layout(
        (2, pairs, 3, P.history + P.tokens), stride=(1, 2, P.rows, 3 * P.rows)
    )
    return cute.make_tensor(M.x.iterator, layout)


@cute.jit
def take_weights(
    weight: cute.Tensor, bias: cute.Tensor, M: Smem, pair: Int32, part: Int32, P: cutlass.Constexpr
) -> None:
    """Taps (2, 4) and bias (2) of two channels."""
    pairs = P.rows // 2
    taps = cute.make_tensor(
        M.taps.iterator,
        cute.make_layout((2, pairs, CONV_WIDTH, 3), stride=(1, 2, P.rows, CONV_WIDTH * P.rows)),
    )
    biases = cute.make_tensor(
        M.bias.iterator, cute.make_layout((2, pairs, 3), stride=(1, 2, P.rows))
    )
    cute.autovec_copy(biases[None, pair, part], bias)
    for tap in range_constexpr(CONV_WIDTH):
        cute.autovec_copy(taps[None, pair, tap, part], weight[None, tap])


@cute.jit
def take_past(
    past: cute.Tensor,
    x: cute.Tensor,
    M: Smem,
    window: Window,
    group: Int32,
    pair: Int32,
    part: Int32,
    P: cutlass.Constexpr,
) -> None:
    """The three inputs of two channels before a group of tokens, (channel of two, entry). x:
    `inputs_by_pair`."""
    if group == 0:
        if const_expr(P.layout == "rows"):
            take_history(past, M, window, part * P.rows + 2 * pair)
        else:
            for e in range_constexpr(HISTORY):
                cute.autovec_copy(x[None, pair, part, e], past[None, e])
    if const_expr(P.token_groups > 1):
        if group > 0:
            for e in range_constexpr(HISTORY):
                entry = P.history + P.group_tokens - HISTORY + e
                cute.autovec_copy(x[None, pair, part, entry], past[None, e])


@cute.jit
def roll(
    past: cute.Tensor,
    x: cute.Tensor,
    M: Smem,
    window: Window,
    pair: Int32,
    part: Int32,
    P: cutlass.Constexpr,
) -> None:
    """The last two entries of the history, then the inputs, as the first entries of two channels,
    layout rows.

    past   of `take_history`
    x      (channel of two, pair, part, token)
    """
    entries = window.channel_stride
    place = (part * P.rows + 2 * pair) * entries
    for i in range_constexpr(2):
        M.window[place + i * entries] = past[i, 1]
        M.window[place + i * entries + 1] = past[i, 2]
        for t in range_constexpr(P.tokens):
            M.window[place + i * entries + 2 + t] = x[i, pair, part, t]
