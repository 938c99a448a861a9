"""Runs the Python source of a CuTe kernel of this package on the CPU, one Python thread per GPU
thread.

One thread runs at a time, until it blocks. What the real machine leaves open is made as bad as
possible:
  * registers and shared memory start as NaN; a global access outside the registered tensors raises,
    and so does a misaligned one
  * cp.async copies nothing before the thread waits for its group, or with `Thread.early` all at
    once
  * warps take turns in a random order, each until it blocks, and so do the lanes of a warp, so that
    a missing barrier shows; lanes that meet at different places raise
  * integers that leave their type raise
Arithmetic is FP32 with every operation rounded, so results agree with a GPU's but for contraction
and approximations.

mbarriers and what goes between CTAs: `simt_cluster`.
"""

from __future__ import annotations

import _thread
import builtins
import contextlib
import ctypes
import functools
import importlib
import importlib.util
import math
import operator
import random
import sys
import threading
from array import array
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, make_dataclass, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast
from unittest import mock

import numpy as np
import torch

from kda_kernels.check import compare, reference
from kda_kernels.device import cubin, sources
from kda_kernels.device.gpu import Gpu
from kda_kernels.operands import StepOperands
from kda_kernels.problem import Problem

KERNELS = Path(__file__).parents[2] / "kernels" / "kda_kernels"
WARP = 32

# A float and its bits: one place serves all, as one thread runs at a time.
_floats = array("f", [0.0])
_words = memoryview(_floats).cast("B").cast("I")


class Scalar:
    """A typed scalar of one thread."""

    __slots__ = ("v",)
    width = 32
    floating = False
    code = ""

    v: Any

    def __init__(self, value: Any = 0) -> None:
        self.v = self.convert(value.v if isinstance(value, Scalar) else value)

    @classmethod
    def convert(cls, value: Any) -> Any:
        raise NotImplementedError

    def to(self, kind: type[Scalar]) -> Scalar:
        return kind(self.v)

    def __bool__(self) -> bool:
        return bool(self.v)

    def __int__(self) -> int:
        return int(self.v)

    __index__ = __int__

    def __float__(self) -> float:
        return float(self.v)

    def __hash__(self) -> int:
        return hash(self.v)

    def __neg__(self) -> Scalar:
        return type(self)(-self.v)

    def __lshift__(self, by: Any) -> Scalar:
        return type(self)(self.v << int(by) & (1 << self.width) - 1)

    def __rshift__(self, by: Any) -> Scalar:
        return type(self)(self.v >> int(by))


class _Integer(Scalar):
    __slots__ = ()
    lowest, highest = 0, 0

    @classmethod
    def convert(cls, value: Any) -> int:
        found = int(value)
        if not cls.lowest <= found <= cls.highest:
            raise OverflowError(f"{found} in {cls.__name__}")
        return found


class Int32(_Integer):
    __slots__ = ()
    lowest, highest, code = -(2**31), 2**31 - 1, "i"
    mlir_type = None


class Uint32(_Integer):
    __slots__ = ()
    highest, code = 2**32 - 1, "I"


class Int64(_Integer):
    __slots__ = ()
    width, lowest, highest, code = 64, -(2**63), 2**63 - 1, "q"


class Uint8(_Integer):
    __slots__ = ()
    width, highest, code = 8, 255, "B"


class Float32(Scalar):
    __slots__ = ()
    floating, code = True, "f"

    @classmethod
    def convert(cls, value: Any) -> float:
        _floats[0] = value
        return _floats[0]


class BFloat16(Scalar):
    __slots__ = ()
    width, floating, code = 16, True, "H"

    @classmethod
    def convert(cls, value: Any) -> float:
        return _bf16_value(_bf16_bits(value))


def _joined(a: Scalar, b: Any) -> type[Scalar]:
    if not isinstance(b, Scalar):
        return Float32 if isinstance(b, float) and not a.floating else type(a)
    kinds = {type(a), type(b)}
    return next((kind for kind in (Float32, BFloat16, Int64, Uint32) if kind in kinds), Int32)


def _binary(name: str) -> None:
    function = getattr(operator, f"{name}_" if name in ("and", "or") else name)

    def mixed(a: Scalar, b: Any) -> Scalar:
        return _joined(a, b)(function(a.v, b.v if isinstance(b, Scalar) else b))

    def of_integers(a: _Integer, b: Any) -> Scalar:
        kind, other = a.__class__, b.__class__
        if other is kind:
            value = function(a.v, b.v)
        elif other is int:
            value = function(a.v, b)
        else:
            return mixed(a, b)
        if not kind.lowest <= value <= kind.highest:
            raise OverflowError(f"{value} in {kind.__name__}")
        result = kind.__new__(kind)
        result.v = value
        return result

    def of_floats(a: Float32, b: Any) -> Scalar:
        if b.__class__ is not Float32:
            return mixed(a, b)
        _floats[0] = function(a.v, b.v)
        result = Float32.__new__(Float32)
        result.v = _floats[0]
        return result

    def backward(b: Scalar, a: Any) -> Scalar:
        return _joined(b, a)(function(a, b.v))

    setattr(Scalar, f"__{name}__", mixed)
    setattr(_Integer, f"__{name}__", of_integers)
    setattr(Float32, f"__{name}__", of_floats)
    setattr(Scalar, f"__r{name}__", backward)


def _comparison(name: str) -> None:
    function = getattr(operator, name)

    def compare(a: Scalar, b: Any) -> bool:
        return bool(function(a.v, b.v if isinstance(b, Scalar) else b))

    setattr(Scalar, f"__{name}__", compare)


for _name in ("add", "sub", "mul", "floordiv", "mod", "and", "or", "xor"):
    _binary(_name)
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    _comparison(_name)


def bits(x: Any) -> int:
    """The 32 bits of a float or word."""
    if isinstance(x, _Integer):
        return int(x.v) & 0xFFFFFFFF
    _floats[0] = float(x)
    return int(_words[0])


def _from_bits(kind: type[Scalar], word: int) -> Scalar:
    result = kind.__new__(kind)
    if kind is Float32:
        _words[0] = word
        result.v = _floats[0]
    elif kind is Int32:
        result.v = word - (word >> 31 << 32)
    else:
        result.v = word
    return result


def _bf16_bits(x: float) -> int:
    _floats[0] = x
    word = _words[0]
    return 0x7FFF if x != x else ((word + 0x7FFF + (word >> 16 & 1)) >> 16) & 0xFFFF


def _bf16_value(half: int) -> float:
    _words[0] = half << 16
    return _floats[0]


class Memory:
    """An address space of one piece, with bounds."""

    def __init__(self, size: int, base: int = 0, content: Any = None) -> None:
        self.base, self.size = base, size
        self.bytes = memoryview(bytearray(b"\xff") * size if content is None else content)
        self.views: dict[str, memoryview] = {}

    def piece(self, address: int, size: int) -> Memory:
        """The piece of memory that has all of these bytes. Raises for addresses outside, and for
        misaligned ones."""
        if not 0 <= address - self.base <= self.size - size:
            raise IndexError(f"address {address - self.base} of {self.size} bytes")
        if address % size:
            raise ValueError(f"{size} bytes at misaligned {address}")
        return self

    def view(self, kind: type[Scalar]) -> Any:
        """As an array of a type, which `views` has from then on."""
        item = kind.width // 8
        found = self.views[kind.code] = self.bytes[: self.size // item * item].cast(
            cast(Any, kind.code)
        )
        return found

    def read(self, address: int, size: int) -> memoryview:
        piece = self.piece(address, size)
        at = address - piece.base
        return piece.bytes[at : at + size]

    def write(self, address: int, content: Any) -> None:
        piece = self.piece(address, len(content))
        at = address - piece.base
        piece.bytes[at : at + len(content)] = content


class Global(Memory):
    """The process's own memory, inside the given (address, bytes) alone."""

    def __init__(self, spans: Sequence[tuple[int, int]]) -> None:
        self.pieces = [
            Memory(size, base, memoryview((ctypes.c_char * size).from_address(base)).cast("B"))
            for base, size in sorted(set(spans))
            if size
        ]
        self.bases = [piece.base for piece in self.pieces]

    def piece(self, address: int, size: int) -> Memory:
        index = bisect_right(self.bases, address) - 1
        if index < 0 or address + size > self.bases[index] + self.pieces[index].size:
            raise IndexError(f"{size} bytes outside of all tensors")
        if address % size:
            raise ValueError(f"{size} bytes at misaligned {address}")
        return self.pieces[index]


class Pointer:
    __slots__ = ("address", "kind", "memory")

    def __init__(self, kind: type[Scalar], address: int, memory: Memory) -> None:
        self.kind, self.address, self.memory = kind, int(address), memory

    def __add__(self, elements: Any) -> Pointer:
        return Pointer(self.kind, self.address + int(elements) * self.kind.width // 8, self.memory)

    def toint(self) -> Scalar:
        return (Int64 if isinstance(self.memory, Global) else Int32)(self.address)

    def get(self, offset: int = 0) -> Scalar:
        """An element."""
        kind = self.kind
        size = kind.width >> 3
        address = self.address + offset * size
        piece = self.memory.piece(address, size)
        view = piece.views.get(kind.code) or piece.view(kind)
        raw = view[(address - piece.base) // size]
        value = kind.__new__(kind)
        value.v = _bf16_value(raw) if kind is BFloat16 else raw
        return value

    def put(self, offset: int, value: Any) -> None:
        kind = self.kind
        size = kind.width >> 3
        address = self.address + offset * size
        piece = self.memory.piece(address, size)
        view = piece.views.get(kind.code) or piece.view(kind)
        v = value.v if value.__class__ is kind else kind(value).v
        view[(address - piece.base) // size] = _bf16_bits(v) if kind is BFloat16 else v


class Layout:
    """Equal ones are interchangeable."""

    def __init__(self, shape: Any, stride: Any = None) -> None:
        self.shape = shape if isinstance(shape, tuple) else (shape,)
        if stride is None:
            stride, step = [], 1
            for n in self.shape:
                stride.append(step)
                step *= n
        self.stride = tuple(stride) if isinstance(stride, (tuple, list)) else (stride,)
        assert len(self.shape) == len(self.stride)
        self.modes = tuple(zip(self.shape, self.stride, strict=True))
        self.flat = not any(isinstance(n, tuple) for n in self.shape)
        self.hash = hash(self.modes)
        self.found: dict[Any, tuple[int, tuple[tuple[int, int], ...]]] = {}

    def __hash__(self) -> int:
        return self.hash

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Layout) and self.modes == other.modes)

    @property
    def places(self) -> tuple[int, ...]:
        """Element offsets, leftmost mode fastest."""
        return _places(self)

    def find(self, index: Any) -> tuple[int, tuple[tuple[int, int], ...]]:
        """Offset of a coordinate, and the modes that it leaves, which are those at None; `found`
        has them from then on, if all were constants."""
        if index.__class__ is not tuple and len(self.shape) > 1:
            return self.places[int(index)], ()
        coordinates = index if index.__class__ is tuple else (index,)
        if not self.flat:
            offset, left = _walk(coordinates, self.shape, self.stride)
            return offset, tuple(left)
        offset, constant = 0, True
        remaining: tuple[Any, ...] = ()
        for i, (n, step) in zip(coordinates, self.modes, strict=True):
            if i is None:
                remaining += ((n, step),)
                continue
            place = i
            if i.__class__ is not int:
                place, constant = i.v, False
            if not 0 <= place < n:
                raise IndexError(f"coordinate {place} of {n}")
            offset += place * step
        if constant:
            self.found[index] = offset, remaining
        return offset, remaining


make_layout = functools.cache(Layout)


@functools.cache
def _layout_of(modes: tuple[tuple[int, int], ...]) -> Layout:
    shape, stride = zip(*modes, strict=True)
    return Layout(shape, stride)


@functools.cache
def _places(layout: Layout) -> tuple[int, ...]:
    found = [0]
    for n, step in _flat(layout.shape, layout.stride):
        found = [at + i * step for i in range(n) for at in found]
    return tuple(found)


def _flat(shape: Any, stride: Any) -> list[tuple[int, int]]:
    if not isinstance(shape, tuple):
        return [(shape, stride)]
    return [mode for s, d in zip(shape, stride, strict=True) for mode in _flat(s, d)]


def _walk(index: Any, shape: Any, stride: Any) -> tuple[int, list[tuple[int, int]]]:
    if index is None:
        return 0, _flat(shape, stride)
    if isinstance(index, tuple):
        parts = [_walk(i, s, d) for i, s, d in zip(index, shape, stride, strict=True)]
        return sum(p[0] for p in parts), [mode for p in parts for mode in p[1]]
    i = int(index)
    if not 0 <= i < shape:
        raise IndexError(f"coordinate {i} of {shape}")
    return i * stride, []


class Fragment(list[Any]):
    """Values of a register tensor."""

    def to(self, kind: type[Scalar]) -> Fragment:
        return Fragment(x.to(kind) for x in self)


class Tensor:
    __slots__ = ("iterator", "layout")

    def __init__(self, iterator: Pointer, layout: Layout) -> None:
        self.iterator, self.layout = iterator, layout

    @property
    def places(self) -> tuple[int, ...]:
        return self.layout.places

    @property
    def element_type(self) -> type[Scalar]:
        return self.iterator.kind

    def __getitem__(self, index: Any) -> Any:
        offset, modes = self.layout.found.get(index) or self.layout.find(index)
        return (
            Tensor(self.iterator + offset, _layout_of(modes))
            if modes
            else self.iterator.get(offset)
        )

    def __setitem__(self, index: Any, value: Any) -> None:
        offset, modes = self.layout.found.get(index) or self.layout.find(index)
        assert not modes
        self.iterator.put(offset, value)

    def load(self) -> Fragment:
        return Fragment(self.iterator.get(at) for at in self.places)

    def store(self, values: Sequence[Any]) -> None:
        for at, value in zip(self.places, values, strict=True):
            self.iterator.put(at, value)

    def fill(self, value: Any) -> None:
        for at in self.places:
            self.iterator.put(at, value)


def _recast(tensor: Tensor, kind: type[Scalar]) -> Tensor:
    pointer = tensor.iterator
    layout = tensor.layout
    if kind.width != pointer.kind.width:
        layout = make_layout(len(tensor.places) * pointer.kind.width // kind.width)
    return Tensor(Pointer(kind, pointer.address, pointer.memory), layout)


def _copy(source: Tensor, target: Tensor) -> None:
    """As wide as the pieces are contiguous, up to 16 bytes: misaligned vectors raise."""
    a, b = source.iterator, target.iterator
    size = a.kind.width // 8
    if a.kind is b.kind:
        read, write = a.memory.read, b.memory.write
        for first, second, n in _pieces(source.layout, target.layout, 16 // size):
            write(b.address + second * size, read(a.address + first * size, n * size))
    else:
        target.store(source.load())


@functools.cache
def _pieces(source: Layout, target: Layout, widest: int) -> tuple[tuple[int, int, int], ...]:
    """(offset, offset, elements) of what goes at once."""
    a, b = source.places, target.places
    assert len(a) == len(b)
    found, i = [], 0
    while i < len(a):
        n = 1
        while 2 * n <= widest and i + 2 * n <= len(a):
            if any(a[i + j] != a[i] + j or b[i + j] != b[i] + j for j in range(2 * n)):
                break
            n *= 2
        found.append((a[i], b[i], n))
        i += n
    return tuple(found)


class Turns:
    """Whose turn it is: a warp runs until it blocks, then a random one goes on that can."""

    condition: Any = contextlib.nullcontext()  # one thread runs at a time: nothing to lock

    def __init__(self, warps: Sequence[Warp], seed: int) -> None:
        self.warps = warps
        self.random = random.Random(seed)
        self.runnable = {warp.index for warp in warps}
        self.arrived: dict[Any, int] = {}
        self.waiting: dict[Any, set[int]] = {}
        self.conditions: dict[int, Callable[[], bool]] = {}
        self.patient: set[int] = set()
        self.failure: BaseException | None = None
        self.current = -1

    def start(self) -> None:
        self._next()
        self.warps[self.current].resume()

    def fail(self, error: BaseException) -> None:
        """End all threads."""
        if self.failure is None:
            self.failure = error
            for warp in self.warps:
                for lane in warp.lanes:
                    lane.go.release()

    def _next(self) -> None:
        """Choose the warp that runs next."""
        for warp in [warp for warp, holds in self.conditions.items() if holds()]:
            del self.conditions[warp]
            self.runnable.add(warp)
        if not self.runnable:
            self.runnable, self.patient = self.patient, set()
        self.current = self.random.choice(sorted(self.runnable)) if self.runnable else -1
        if not self.runnable and (self.conditions or any(self.waiting.values())):
            self.fail(
                RuntimeError(
                    f"deadlock: warps wait at barriers {self.waiting}, others: {set(self.conditions)}"
                )
            )

    def _until(self, warp: int) -> None:
        """Let the chosen warp run, until it is this one's turn."""
        if self.current != warp and self.failure is None:
            me = current()
            self.warps[warp].parked = me
            self.warps[self.current].resume()
            me.park()
        if self.failure is not None:
            raise SystemExit

    def arrive(self, warp: int, barrier: Any, threads: int, wait: bool) -> None:
        self.arrived[barrier] = self.arrived.get(barrier, 0) + WARP
        if wait:
            self.waiting.setdefault(barrier, set()).add(warp)
            self.runnable.discard(warp)
        if self.arrived[barrier] > threads:
            raise RuntimeError(f"barrier {barrier}: more arrivals than {threads}")
        if self.arrived[barrier] == threads:
            self.arrived[barrier] = 0
            self.runnable |= self.waiting.pop(barrier, set())
        if wait:
            self._next()
            self._until(warp)

    def until(self, warp: int, condition: Callable[[], bool]) -> None:
        """Let others run until a condition holds; it is asked whenever some warp blocks."""
        self.runnable.discard(warp)
        self.conditions[warp] = condition
        self._next()
        self._until(warp)

    def after_others(self, warp: int) -> None:
        """Let others run until none can."""
        self.runnable.discard(warp)
        self.patient.add(warp)
        self._next()
        self._until(warp)

    def leave(self, warp: int) -> None:
        self.runnable.discard(warp)
        self._next()
        if self.current >= 0:
            self.warps[self.current].resume()


class Thread:
    """early   cp.async copies at once, over whatever is still to be read there"""

    early = False

    def __init__(self, cta: Cta, warp: Warp, tid: int) -> None:
        self.cta, self.warp, self.tid, self.lane = cta, warp, tid, tid % WARP
        self.top = 1024
        self.waited_for_previous = False
        self.copies: list[tuple[int, int, int]] = []
        self.groups: list[list[tuple[int, int, int]]] = []
        self.go = _thread.allocate_lock()
        self.go.acquire()

    def park(self) -> None:
        """Wait until another thread releases `go`."""
        global _running
        self.go.acquire()
        if self.cta.cluster.turns.failure is not None:
            raise SystemExit
        _running = self

    def ask(self, shared: int, address: int, size: int) -> None:
        self.copies.append((shared, address, size))
        if self.early:
            self.cta.shared.write(shared, self.cta.memory.read(address, size))

    def wait_groups(self, pending: int) -> None:
        while len(self.groups) > pending:
            for shared, address, size in self.groups.pop(0):
                if not self.early:
                    self.cta.shared.write(shared, self.cta.memory.read(address, size))


class Warp:
    """Lanes take turns too: the last one to come to a meeting goes on, then the others."""

    def __init__(self, cta: Cta, index: int, first_tid: int) -> None:
        self.index = index
        self.lanes = [Thread(cta, self, first_tid + lane) for lane in range(WARP)]
        self.parked: Thread | None = self.lanes[
            0
        ]  # who holds the warp's place in the order of turns
        self.ready = deque(self.lanes[1:])
        self.values: list[Any] = [None] * WARP
        self.results: list[Any] | None = None
        self.place = ""
        self.arrived = self.left = 0
        self.cluster_arrivals = 0
        self.barrier = SimpleNamespace(wait=lambda: self.meet("barrier"), abort=lambda: None)

    def resume(self) -> None:
        assert self.parked is not None
        self.parked.go.release()

    def meet(
        self, place: str, value: Any = None, function: Callable[[list[Any]], Any] | None = None
    ) -> Any:
        """All lanes: the last one to come evaluates a function of all lanes' values, which gives
        each one's result."""
        me = current()
        if self.arrived and place != self.place:
            raise RuntimeError(
                f"lanes of warp {self.index} meet at different places: {self.place}, {place}"
            )
        self.place = place
        self.values[me.lane] = value
        self.arrived += 1
        if self.arrived < WARP:
            if not self.ready:
                raise RuntimeError(
                    f"lanes of warp {self.index} wait for others that have left: {place}"
                )
            self.ready.popleft().go.release()
            me.park()
        else:
            self.arrived = 0
            self.results = function(self.values) if function is not None else None
            self.ready.extend(lane for lane in self.lanes if lane is not me)
        return None if self.results is None else self.results[me.lane]

    def leave(self, turns: Turns) -> None:
        self.left += 1
        if self.ready:
            self.ready.popleft().go.release()
        elif self.arrived:
            raise RuntimeError(
                f"lanes of warp {self.index} have left while others wait: {self.place}"
            )
        else:
            turns.leave(self.index)


class Cta:
    """One of a cluster, in which warps are numbered throughout. mbarriers by address: see
    `simt_cluster`."""

    def __init__(
        self, cluster: Cluster, rank: int, block: tuple[int, int, int], threads: int, memory: Global
    ) -> None:
        self.cluster, self.rank, self.block, self.threads, self.memory = (
            cluster,
            rank,
            block,
            threads,
            memory,
        )
        first = rank * (threads // WARP)
        self.warps = [Warp(self, first + i, i * WARP) for i in range(threads // WARP)]
        self.shared = Memory(232_448, base=1024)
        self.barriers: dict[int, Any] = {}

    @property
    def turns(self) -> Turns:
        return self.cluster.turns

    @property
    def has_left(self) -> bool:
        return all(warp.left == WARP for warp in self.warps)


class Cluster:
    def __init__(
        self,
        size: int,
        block: tuple[int, int, int],
        grid: tuple[int, int, int],
        threads: int,
        memory: Global,
        seed: int,
    ) -> None:
        self.grid = grid
        self.ctas = [
            Cta(self, rank, (block[0] + rank, *block[1:]), threads, memory) for rank in range(size)
        ]
        self.warps = [warp for cta in self.ctas for warp in cta.warps]
        self.turns = Turns(self.warps, seed)
        self.arrivals = 0  # of warps, at the cluster's barrier

    def run(self, kernel: Callable[..., None], arguments: Sequence[Any]) -> int:
        """All threads from begin to end; returns the shared memory that a CTA took."""

        def body(me: Thread) -> None:
            try:
                me.park()
                kernel(*arguments)
                assert not me.copies, "copies that no group holds"
                assert not any(me.groups), "copies that nobody waited for"
                me.warp.leave(self.turns)
            except SystemExit:
                pass
            except BaseException as error:
                self.turns.fail(error)

        threads = [lane for warp in self.warps for lane in warp.lanes]
        stack = threading.stack_size(1024 * 1024)
        workers = [threading.Thread(target=body, args=(thread,), daemon=True) for thread in threads]
        for worker in workers:
            worker.start()
        threading.stack_size(stack)
        self.turns.start()
        for worker in workers:
            worker.join()
        if self.turns.failure is not None:
            raise self.turns.failure
        if any(self.turns.arrived.values()) or self.arrivals % len(self.warps):
            raise RuntimeError(
                f"threads left at barriers: {self.turns.arrived}, the cluster's: {self.arrivals}"
            )
        assert all(thread.waited_for_previous for thread in threads), (
            "some never waited for the previous launch"
        )
        for cta in self.ctas:
            for barrier in cta.barriers.values():
                barrier.check_empty()
        return max(thread.top for thread in threads) - 1024


_running: Thread


def current() -> Thread:
    """The thread that runs."""
    return _running


def _shuffle(place: str, source: Callable[[int, Any], int]) -> Callable[..., Any]:
    def shuffle(value: Any, offset: Any, mask_and_clamp: int = 31, **_: Any) -> Any:
        keep = mask_and_clamp >> 8 & 31  # lane bits that stay

        def exchange(asked: list[Any]) -> list[Any]:
            result = []
            for lane in range(WARP):
                at = source(lane, asked[lane][1])
                result.append(asked[(lane & keep) | (at & ~keep & 31) if keep else at][0])
            return result

        return current().warp.meet(place, (value, int(offset)), exchange)

    return shuffle


def _mma(lanes: list[Any]) -> list[Any]:
    """m16n8k16 in BF16; the sums are exact, then rounded."""
    words = np.array([[bits(word) for word in lane[:6]] for lane in lanes], dtype=np.uint32)
    halves = (
        np.stack((words << 16, words & 0xFFFF0000), axis=-1).view(np.float32).astype(np.float64)
    )
    # Lane 4g + t: words by half of k and, of a, half of the rows; columns 2t and 2t + 1.
    a = halves[:, :4].reshape(8, 4, 2, 2, 2).transpose(3, 0, 2, 1, 4).reshape(16, 16)
    b = halves[:, 4:].reshape(8, 4, 2, 2).transpose(2, 1, 3, 0).reshape(16, 8)
    c = (
        np.array([[float(x) for x in lane[6:]] for lane in lanes])
        .reshape(8, 4, 2, 2)
        .transpose(2, 0, 1, 3)
    )
    with np.errstate(all="ignore"):
        d = a @ b + c.reshape(16, 8)
    rows = d.reshape(2, 8, 4, 2).transpose(1, 2, 0, 3).reshape(WARP, 4).tolist()
    return [tuple(Float32(x) for x in row) for row in rows]


@functools.cache
def _word_operation(code: str) -> Callable[..., int]:
    """The bits of the result of an instruction on words."""
    found: dict[str, tuple[str, Callable[..., int]]] = {
        "mov.b32": ("{$w0}, {$r0};", bits),
        "shl.b32": (" 16;", lambda x: bits(x) << 16 & 0xFFFFFFFF),
        "and.b32": ("0xffff0000;", lambda x: bits(x) & 0xFFFF0000),
        "prmt.b32": ("{$r0}, {$r1}, 0x7632;", lambda x, y: bits(x) >> 16 | (bits(y) & 0xFFFF0000)),
        "cvt.rn.bf16x2.f32": (
            "{$r1}, {$r0};",
            lambda low, high: _bf16_bits(float(low)) | _bf16_bits(float(high)) << 16,
        ),
        "fma.rn.f32": (
            "{$r0}, {$r1}, {$r2};",
            lambda a, b, c: bits(Float32(float(a) * float(b) + float(c))),
        ),
    }
    operation = code.split()[0]
    if operation not in found:
        raise NotImplementedError(code)
    ending, function = found[operation]
    assert code.endswith(ending), code
    return function


def inline_ptx(
    code: str,
    *,
    write_only_types: Sequence[type[Scalar]] = (),
    read_only_args: Sequence[Any] = (),
    **_: Any,
) -> Any:
    args = read_only_args
    if code.startswith("mma.sync.aligned.m16n8k16.row.col.f32.bf16"):
        return current().warp.meet("mma", tuple(args), _mma)
    if code.startswith("cp.async"):
        size = int(code.split("],")[-1].split(",")[0].strip(" ;"))
        current().ask(int(args[0]), int(args[1]), size)
        return None
    if code.startswith("createpolicy"):
        return Int64(0)
    return _from_bits(write_only_types[0], _word_operation(code)(*args))


def _special(_kind: Any, _operands: Any, code: str, *_: Any, **__: Any) -> Int32:
    """`llvm.inline_asm` that moves a special register."""
    me = current()
    registers = {
        "%tid.x": me.tid,
        **{f"%ctaid.{axis}": at for axis, at in zip("xyz", me.cta.block, strict=True)},
    }
    return Int32(registers[code.split()[-1].rstrip(";")])


def _barrier(
    *, barrier_id: int = 0, number_of_threads: int | None = None, wait: bool = True
) -> None:
    me = current()

    def arrive(_: list[Any]) -> None:
        threads = number_of_threads or me.cta.threads
        me.cta.turns.arrive(me.warp.index, (me.cta.rank, barrier_id), threads, wait)

    me.warp.meet(f"barrier {barrier_id}", None, arrive)


def _commit_group() -> None:
    me = current()
    me.groups.append(me.copies)
    me.copies = []


def _wait_for_previous() -> None:
    current().waited_for_previous = True


class _SmemAllocator:
    def allocate_tensor(
        self, kind: type[Scalar], layout: Layout, byte_alignment: int = 16
    ) -> Tensor:
        me = current()
        me.top = -(-me.top // byte_alignment) * byte_alignment
        pointer = Pointer(kind, me.top, me.cta.shared)
        size = 1 + sum((n - 1) * step for n, step in _flat(layout.shape, layout.stride))
        me.top += size * kind.width // 8
        return Tensor(pointer, layout)

    def allocate_array(self, kind: type[Scalar], count: int, byte_alignment: int = 16) -> Pointer:
        return self.allocate_tensor(kind, Layout(count), byte_alignment).iterator


def _make_ptr(kind: type[Scalar], address: Any, space: str, assumed_align: int = 1) -> Pointer:
    if int(address) % assumed_align:
        raise ValueError(f"address {int(address)} is no multiple of {assumed_align}")
    return Pointer(
        kind, int(address), current().cta.memory if space == "gmem" else current().cta.shared
    )


def _make_rmem_tensor(shape: Any, kind: type[Scalar]) -> Tensor:
    layout = make_layout(shape)
    return Tensor(Pointer(kind, 0, Memory(math.prod(layout.shape) * kind.width // 8)), layout)


def _math(function: Callable[[float], float]) -> Callable[..., Float32]:
    def evaluate(x: Any, **_: Any) -> Float32:
        try:
            return Float32(function(float(x)))
        except OverflowError:
            return Float32(math.inf)

    return evaluate


def _reciprocal(x: float) -> float:
    return 1 / x if x else math.inf


def _identity(f: Any) -> Any:
    return f


class _Kernel:
    """Called, it gives what has `launch`, which runs it where `run_step` says."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function

    def __call__(self, *arguments: Any) -> SimpleNamespace:
        def launch(
            *, block: tuple[int, int, int], cluster: tuple[int, int, int] = (1, 1, 1), **_: Any
        ) -> None:
            _launched.append((self, arguments, block[0], cluster[0]))

        return SimpleNamespace(launch=launch)


_launched: list[tuple[_Kernel, Sequence[Any], int, int]] = []


def _modules() -> dict[str, ModuleType]:
    """Stand-ins for what the kernels import of the DSL."""
    cutlass, cute, memory = (
        ModuleType("cutlass"),
        ModuleType("cutlass.cute"),
        ModuleType("cutlass.memory"),
    )
    arch = SimpleNamespace(
        thread_idx=lambda: (Int32(current().tid), Int32(0), Int32(0)),
        block_idx=lambda: tuple(Int32(i) for i in current().cta.block),
        grid_dim=lambda: tuple(Int32(i) for i in current().cta.cluster.grid),
        make_warp_uniform=_identity,
        inline_ptx=inline_ptx,
        rcp_approx=_math(_reciprocal),
        shuffle_sync=_shuffle("shuffle", lambda lane, at: at),
        shuffle_sync_bfly=_shuffle("butterfly", lambda lane, by: lane ^ by),
        shuffle_sync_up=_shuffle("shuffle up", lambda lane, by: lane - by if lane >= by else lane),
        sync_threads=_barrier,
        sync_warp=lambda: current().warp.meet("sync_warp"),
        barrier=_barrier,
        barrier_arrive=lambda **named: _barrier(**named, wait=False),
        cp_async_commit_group=_commit_group,
        cp_async_wait_group=lambda n: current().wait_groups(n),
        griddepcontrol_wait=_wait_for_previous,
        griddepcontrol_launch_dependents=lambda: None,
        setmaxregister_increase=int,
        setmaxregister_decrease=int,
    )
    cute.__dict__.update(
        jit=_identity, kernel=_Kernel, arch=arch, Tensor=Tensor, Pointer=Pointer, make_layout=make_layout,
        make_tensor=Tensor, make_ptr=_make_ptr, make_rmem_tensor=_make_rmem_tensor, autovec_copy=_copy,
        recast_ptr=lambda p, dtype: Pointer(dtype, p.address, p.memory), recast_tensor=_recast,
        size=lambda t: len(t.places), copy=lambda atom, a, b: _copy(a, b), make_copy_atom=lambda *_, **__: None,
        math=SimpleNamespace(exp2=_math(lambda x: 2.0**x), rsqrt=_math(lambda x: _reciprocal(math.sqrt(x)))),
        nvgpu=SimpleNamespace(
            CopyG2ROp=lambda: None, CopyR2GOp=lambda: None,
            CacheEvictionPriority=SimpleNamespace(EVICT_NORMAL=0, NO_ALLOCATE=1),
            StoreCacheMode=SimpleNamespace(NONE=0, STREAMING=1),
        ),
    )  # fmt: skip
    kinds = {k.__name__: k for k in (Int32, Uint32, Int64, Uint8, Float32, BFloat16)}
    cutlass.__dict__.update(
        kinds, cute=cute, memory=memory, Constexpr=Any, const_expr=_identity, range_constexpr=builtins.range,
        range=lambda *limits, **_: (Int32(i) for i in builtins.range(*(int(n) for n in limits))),
        AddressSpace=SimpleNamespace(gmem="gmem", smem="smem"),
    )  # fmt: skip
    memory.__dict__["SmemAllocator"] = _SmemAllocator
    dialects = ModuleType("cutlass._mlir.dialects")
    dialects.__dict__["llvm"] = SimpleNamespace(inline_asm=_special)
    return {
        "cutlass": cutlass,
        "cutlass.cute": cute,
        "cutlass.memory": memory,
        "cutlass._mlir": ModuleType("cutlass._mlir"),
        "cutlass._mlir.dialects": dialects,
    }


def _module(name: str) -> str:
    """The full name of a module of `kda_kernels`, by its last part, which is enough."""
    (path,) = KERNELS.rglob(f"{name}.py")
    return ".".join(path.relative_to(KERNELS.parent).with_suffix("").parts)


def load(*names: str) -> dict[str, ModuleType]:
    """Copies of modules of `kda_kernels`, and of those that they need, over the stand-ins, by their
    last names."""
    modules = sources.in_order(map(_module, names))
    loaded: dict[str, ModuleType] = {}
    stand_ins = _modules()
    saved = {key: sys.modules.get(key) for key in (*stand_ins, *modules)}
    parents = {module: importlib.import_module(module.rpartition(".")[0]) for module in modules}
    attributes = {module: getattr(parents[module], _last(module), None) for module in modules}
    try:
        sys.modules.update(stand_ins)
        for module in modules:
            options = importlib.util.spec_from_file_location(module, sources.path_of(module))
            assert options is not None
            assert options.loader is not None
            copy = importlib.util.module_from_spec(options)
            sys.modules[options.name] = copy
            options.loader.exec_module(copy)
            if hasattr(copy, "make_dataclass"):
                vars(copy)["make_dataclass"] = _make_dataclass
            setattr(parents[module], _last(module), copy)
            loaded[_last(module)] = copy
    finally:
        for key, old in saved.items():
            if old is None:
                sys.modules.pop(key, None)
            else:
                sys.modules[key] = old
        for module, was in attributes.items():
            if was is None:
                delattr(parents[module], _last(module))
            else:
                setattr(parents[module], _last(module), was)
    return loaded


@functools.cache
def _bundle_class(name: str, names: tuple[str, ...]) -> type:
    return make_dataclass(name, names, frozen=True)


def _make_dataclass(name: str, names: Iterable[str], frozen: bool) -> type:
    """The class of a bundle once: every emulated thread makes a bundle, and making a class takes a
    millisecond."""
    assert frozen
    return _bundle_class(name, tuple(names))


def _last(module: str) -> str:
    return module.rpartition(".")[2]


def run(
    kernel: Callable[..., Any],
    arguments: Sequence[Any],
    *,
    grid: tuple[int, int, int],
    threads: int,
    spans: Sequence[tuple[int, int]],
    cluster: int = 1,
    seed: int = 0,
) -> int:
    """Run all clusters in turn; returns the shared memory that a CTA took.

    spans     (address, bytes) of global memory
    cluster   CTAs that run side by side, along x
    """
    memory = Global(spans)
    function = kernel.function if isinstance(kernel, _Kernel) else kernel
    used = 0
    for z in range(grid[2]):
        for y in range(grid[1]):
            for x in range(0, grid[0], cluster):
                ctas = Cluster(cluster, (x, y, z), grid, threads, memory, seed + x + 7 * y + 31 * z)
                used = max(used, ctas.run(function, arguments))
    return used


def run_step(
    module: ModuleType,
    problem: Problem,
    options: Any,
    operands: StepOperands,
    seed: int,
    sms: int = 1,
) -> None:
    """Compile and launch a step of a variant that `load` gave, on operands in the CPU's memory.

    sms   of the GPU that a persistent kernel has for itself
    """
    tensors = [
        t for f in fields(operands) if isinstance(t := getattr(operands, f.name), torch.Tensor)
    ]
    spans = [(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) for t in tensors]

    def build(
        host: Callable[..., None], arguments: Callable[[], tuple[Any, ...]], **named: Any
    ) -> Any:
        prototypes, plan = arguments()

        def launch(
            grid: tuple[int, int, int], values: Sequence[Any], stream: int, pdl: bool
        ) -> None:
            kinds = (globals()[type(p).__name__] for p in prototypes)
            host(type(prototypes)(*(kind(v) for kind, v in zip(kinds, values, strict=True))), plan)
            kernel, passed, threads, cluster = _launched.pop()
            assert (threads, cluster) == (named["threads"], named["cluster"])
            used = run(
                kernel, passed, grid=grid, threads=threads, spans=spans, cluster=cluster, seed=seed
            )
            assert used == plan.smem_bytes, (
                f"{used} bytes of shared memory, planned {plan.smem_bytes}"
            )

        return SimpleNamespace(launch=launch)

    with mock.patch.object(cubin, "build", build), mock.patch.object(cubin, "launcher", _identity):
        module.launch(module.compile(problem, options, Gpu("sm_90a", sms)), operands, 0)


def compare_step(
    module: ModuleType,
    problem: Problem,
    options: Any,
    operands: StepOperands,
    seed: int,
    sms: int = 1,
) -> str | None:
    """`run_step` against the reference: what disagrees, if anything."""
    expected = reference.step(problem, operands)
    compare.poison(operands)
    run_step(module, problem, options, operands, seed, sms)
    return compare.check_step(problem, operands, expected)


def with_bf16_weights(operands: StepOperands) -> StepOperands:
    """The same operands with convolution weight and bias in BF16."""
    bias = None if operands.conv_bias is None else operands.conv_bias.bfloat16()
    return replace(operands, conv_weight=operands.conv_weight.bfloat16(), conv_bias=bias)


def asked_copies(
    thread: int, function: Callable[..., None], *arguments: Any
) -> list[tuple[int, int, int]]:
    """(shared address, global address, bytes) of the cp.async that a thread issues in a
    function."""
    global _running
    warp: Any = SimpleNamespace()
    _running = Thread(warp, warp, thread)
    function(*arguments)
    return _running.copies
