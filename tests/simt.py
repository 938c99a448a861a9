"""Runs the Python source of a CuTe kernel of this package on the CPU, one Python thread per GPU thread.

For kernels without clusters, mbarriers or bulk copies. What the real machine leaves open is made as bad as possible:
  * registers and shared memory start as NaN; a global access outside the registered tensors raises, and so does a
    misaligned one
  * cp.async copies nothing before the thread waits for its group
  * warps take turns in a random order, and each runs until it blocks, so that a missing barrier shows
  * integers that leave their type raise
Arithmetic is FP32 with every operation rounded, so results agree with a GPU's but for contraction and approximations.
"""

from __future__ import annotations

import builtins
import ctypes
import importlib
import importlib.util
import math
import random
import struct
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch

KERNELS = Path(__file__).parent.parent / "kernels" / "kda_kernels"
WARP = 32


class Scalar:
    """A typed scalar of one thread."""

    __slots__ = ("v",)
    width = 32
    floating = False
    span = (0, 0)

    def __init__(self, value: Any = 0) -> None:
        value = value.v if isinstance(value, Scalar) else value
        self.v = self.convert(value)

    @classmethod
    def convert(cls, value: Any) -> Any:
        value = int(value)
        if not cls.span[0] <= value <= cls.span[1]:
            raise OverflowError(f"{value} in {cls.__name__}")
        return value

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


def _binary(name: str, function: Callable[[Any, Any], Any]) -> None:
    def forward(a: Scalar, b: Any) -> Any:
        return _joined(a, b)(function(a.v, b.v if isinstance(b, Scalar) else b))

    def backward(b: Scalar, a: Any) -> Any:
        return _joined(b, a)(function(a, b.v))

    setattr(Scalar, f"__{name}__", forward)
    setattr(Scalar, f"__r{name}__", backward)


def _joined(a: Scalar, b: Any) -> type[Scalar]:
    if not isinstance(b, Scalar):
        return Float32 if isinstance(b, float) and not a.floating else type(a)
    kinds = {type(a), type(b)}
    for kind in (Float32, BFloat16, Int64, Uint32):
        if kind in kinds:
            return kind
    return Int32


for _name, _function in {
    "add": lambda a, b: a + b,
    "sub": lambda a, b: a - b,
    "mul": lambda a, b: a * b,
    "floordiv": lambda a, b: a // b,
    "mod": lambda a, b: a % b,
    "and": lambda a, b: a & b,
    "or": lambda a, b: a | b,
    "xor": lambda a, b: a ^ b,
}.items():
    _binary(_name, _function)
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):

    def _compare(a: Scalar, b: Any, name: str = _name) -> bool:
        return bool(getattr(float(a.v), f"__{name}__")(float(b.v if isinstance(b, Scalar) else b)))

    setattr(Scalar, f"__{_name}__", _compare)


class Int32(Scalar):
    __slots__ = ()
    span, code = (-(2**31), 2**31 - 1), "i"


class Uint32(Scalar):
    __slots__ = ()
    span, code = (0, 2**32 - 1), "I"


class Int64(Scalar):
    __slots__ = ()
    width, span, code = 64, (-(2**63), 2**63 - 1), "q"


class Uint8(Scalar):
    __slots__ = ()
    width, span, code = 8, (0, 255), "B"


class Float32(Scalar):
    __slots__ = ()
    floating, code = True, "f"

    @classmethod
    def convert(cls, value: Any) -> float:
        with np.errstate(over="ignore"):
            return float(np.float32(value))


class BFloat16(Scalar):
    __slots__ = ()
    width, floating, code = 16, True, "H"

    @classmethod
    def convert(cls, value: Any) -> float:
        return _bf16_value(_bf16_bits(float(value)))


def _bits(x: Any) -> int:
    """The 32 bits of a float or word."""
    if isinstance(x, Scalar) and not x.floating:
        return int(x.v) & 0xFFFFFFFF
    return int(struct.unpack("I", struct.pack("f", float(x)))[0])


def _from_bits(kind: type[Scalar], bits: int) -> Scalar:
    result = kind.__new__(kind)
    if kind is Float32:
        result.v = struct.unpack("f", struct.pack("I", bits))[0]
    elif kind is Int32:
        result.v = bits - (bits >> 31 << 32)
    else:
        result.v = bits
    return result


def _bf16_bits(x: float) -> int:
    bits = _bits(np.float32(x))
    if math.isnan(x):
        return 0x7FFF
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16) & 0xFFFF


def _bf16_value(bits: int) -> float:
    return float(struct.unpack("f", struct.pack("I", bits << 16))[0])


class Memory:
    """An address space with bounds."""

    def __init__(self, size: int, base: int = 0) -> None:
        self.base, self.data = base, bytearray(b"\xff" * size)

    def read(self, address: int, size: int) -> bytes:
        at = self._checked(address, size)
        return bytes(self.data[at : at + size])

    def write(self, address: int, content: bytes) -> None:
        at = self._checked(address, len(content))
        self.data[at : at + len(content)] = content

    def _checked(self, address: int, size: int) -> int:
        at = address - self.base
        if not 0 <= at <= len(self.data) - size:
            raise IndexError(f"address {at} of {len(self.data)} bytes")
        if address % size:
            raise ValueError(f"{size} bytes at misaligned {address}")
        return at


class Global(Memory):
    """The process's own memory, inside the given (address, bytes) alone."""

    def __init__(self, spans: Sequence[tuple[int, int]]) -> None:
        self.spans = spans

    def read(self, address: int, size: int) -> bytes:
        self._checked(address, size)
        return ctypes.string_at(address, size)

    def write(self, address: int, content: bytes) -> None:
        self._checked(address, len(content))
        ctypes.memmove(address, content, len(content))

    def _checked(self, address: int, size: int) -> int:
        if address % size:
            raise ValueError(f"{size} bytes at misaligned {address}")
        if not any(start <= address and address + size <= start + length for start, length in self.spans):
            raise IndexError(f"{size} bytes outside of all tensors")
        return address


class Pointer:
    def __init__(self, kind: type[Scalar], address: int, memory: Memory) -> None:
        self.kind, self.address, self.memory = kind, int(address), memory

    def __add__(self, elements: Any) -> Pointer:
        return Pointer(self.kind, self.address + int(elements) * self.kind.width // 8, self.memory)

    def toint(self) -> Scalar:
        return (Int64 if isinstance(self.memory, Global) else Int32)(self.address)

    def load(self, count: int = 1) -> list[Scalar]:
        size = self.kind.width // 8
        content = self.memory.read(self.address, size * count)
        result = []
        for (raw,) in struct.iter_unpack(self.kind.code, content):
            value = self.kind.__new__(self.kind)
            value.v = _bf16_value(raw) if self.kind is BFloat16 else raw
            result.append(value)
        return result

    def store(self, values: Sequence[Any]) -> None:
        content = b""
        for value in values:
            converted = self.kind(value).v
            content += struct.pack(self.kind.code, _bf16_bits(converted) if self.kind is BFloat16 else converted)
        self.memory.write(self.address, content)


class Layout:
    def __init__(self, shape: Any, stride: Any = None) -> None:
        self.shape = shape if isinstance(shape, tuple) else (shape,)
        if stride is None:
            stride, step = [], 1
            for n in self.shape:
                stride.append(step)
                step *= n
        self.stride = tuple(stride) if isinstance(stride, (tuple, list)) else (stride,)
        assert len(self.shape) == len(self.stride)


class Fragment(list):
    """Values of a register tensor."""

    def to(self, kind: type[Scalar]) -> Fragment:
        return Fragment(x.to(kind) for x in self)


class Tensor:
    def __init__(self, iterator: Pointer, layout: Layout) -> None:
        self.iterator, self.layout = iterator, layout

    @property
    def places(self) -> list[int]:
        """Element offsets, leftmost mode fastest."""
        found = [0]
        for n, step in _flat(self.layout.shape, self.layout.stride):
            found = [at + i * step for i in range(n) for at in found]
        return found

    def __getitem__(self, index: Any) -> Any:
        offset, modes = self._offset(index)
        if modes:
            shape, stride = zip(*modes, strict=True)
            return Tensor(self.iterator + offset, Layout(shape, stride))
        return (self.iterator + offset).load()[0]

    def __setitem__(self, index: Any, value: Any) -> None:
        offset, modes = self._offset(index)
        assert not modes
        (self.iterator + offset).store([value])

    def _offset(self, index: Any) -> tuple[int, list[tuple[int, int]]]:
        index = index if isinstance(index, tuple) else (index,)
        if len(index) == 1 and len(self.layout.shape) > 1:
            return self.places[int(index[0])], []
        return _walk(index, self.layout.shape, self.layout.stride)

    def load(self) -> Fragment:
        return Fragment((self.iterator + at).load()[0] for at in self.places)

    def store(self, values: Sequence[Any]) -> None:
        for at, value in zip(self.places, values, strict=True):
            (self.iterator + at).store([value])

    def fill(self, value: Any) -> None:
        self.store([value] * len(self.places))


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


def _copy(source: Tensor, target: Tensor) -> None:
    """As wide as the pieces are contiguous, up to 16 bytes: misaligned vectors raise."""
    wide = 16 * 8 // source.iterator.kind.width
    a, b = source.places, target.places
    assert len(a) == len(b)
    i = 0
    while i < len(a):
        n = 1
        while 2 * n <= wide and i + 2 * n <= len(a):
            span = range(2 * n)
            if any(a[i + j] != a[i] + j or b[i + j] != b[i] + j for j in span):
                break
            n *= 2
        (target.iterator + b[i]).store((source.iterator + a[i]).load(n))
        i += n


class _Turns:
    """Warps take turns: one runs until it blocks, then a random runnable one goes on."""

    def __init__(self, warps: int, seed: int) -> None:
        self.condition = threading.Condition()
        self.random = random.Random(seed)
        self.runnable = set(range(warps))
        self.current = self.random.choice(sorted(self.runnable))
        self.arrived: dict[int, int] = {}
        self.waiting: dict[int, set[int]] = {}
        self.failure: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        with self.condition:
            self.failure = self.failure or error
            self.condition.notify_all()

    def _next(self) -> None:
        self.current = self.random.choice(sorted(self.runnable)) if self.runnable else -1
        if self.current < 0 and any(self.waiting.values()):
            self.failure = RuntimeError(f"deadlock: warps wait at barriers {self.waiting}")
        self.condition.notify_all()

    def start(self, warp: int) -> None:
        with self.condition:
            self._until(warp)

    def _until(self, warp: int) -> None:
        while self.current != warp and self.failure is None:
            self.condition.wait()
        if self.failure is not None:
            raise SystemExit

    def arrive(self, warp: int, barrier: int, threads: int, wait: bool) -> None:
        with self.condition:
            self.arrived[barrier] = self.arrived.get(barrier, 0) + WARP
            if wait:
                self.waiting.setdefault(barrier, set()).add(warp)
                self.runnable.discard(warp)
            if self.arrived[barrier] > threads:
                self.failure = RuntimeError(f"barrier {barrier}: more arrivals than {threads}")
            if self.arrived[barrier] == threads:
                self.arrived[barrier] = 0
                self.runnable |= self.waiting.pop(barrier, set())
            if wait:
                self._next()
                self._until(warp)

    def leave(self, warp: int) -> None:
        with self.condition:
            self.runnable.discard(warp)
            self._next()


class _Warp:
    def __init__(self, index: int) -> None:
        self.index = index
        self.barrier = threading.Barrier(WARP)
        self.values: list[Any] = [None] * WARP
        self.results: list[Any] = []

    def together(self, lane: int, value: Any, function: Callable[[list[Any]], list[Any]]) -> Any:
        """Every lane's result of a function of all lanes' values."""
        self.values[lane] = value
        if self.barrier.wait() == 0:
            self.results = function(list(self.values))
        self.barrier.wait()
        return self.results[lane]


class _Cta:
    def __init__(self, block: tuple[int, int, int], threads: int, memory: Global, seed: int) -> None:
        self.block, self.threads, self.memory = block, threads, memory
        self.warps = [_Warp(i) for i in range(threads // WARP)]
        self.turns = _Turns(len(self.warps), seed)
        self.shared = Memory(232_448, base=1024)
        self.asked: list[int] = []  # allocations, the same in every thread
        self.waited_for_previous = [False] * threads


class _Thread:
    def __init__(self, cta: _Cta, tid: int) -> None:
        self.cta, self.tid, self.lane, self.warp = cta, tid, tid % WARP, cta.warps[tid // WARP]
        self.top = 1024
        self.copies: list[tuple[int, int, int]] = []
        self.groups: list[list[tuple[int, int, int]]] = []

    def wait_groups(self, pending: int) -> None:
        while len(self.groups) > pending:
            for shared, address, size in self.groups.pop(0):
                self.cta.shared.write(shared, self.cta.memory.read(address, size))


_local = threading.local()


def _me() -> _Thread:
    thread: _Thread = _local.thread
    return thread


def _collective(value: Any, function: Callable[[list[Any]], list[Any]]) -> Any:
    me = _me()
    return me.warp.together(me.lane, value, function)


def _shuffle(source: Callable[[int, Any], int]) -> Callable[..., Any]:
    def shuffle(value: Any, offset: Any, mask_and_clamp: int = 31, **_: Any) -> Any:
        keep = mask_and_clamp >> 8 & 31  # lane bits that stay

        def exchange(all_: list[Any]) -> list[Any]:
            result = []
            for lane in range(WARP):
                at = source(lane, int(all_[lane][1]))
                result.append(all_[(lane & keep) | (at & ~keep & 31) if keep else at][0])
            return result

        return _collective((value, offset), exchange)

    return shuffle


def _mma(lanes: list[Any]) -> list[Any]:
    """m16n8k16 in BF16; the sums are exact, then rounded."""
    a, b, c = np.zeros((16, 16)), np.zeros((16, 8)), np.zeros((16, 8))
    for lane, words in enumerate(lanes):
        g, t = lane // 4, lane % 4
        for i, (row, k) in enumerate(((g, 2 * t), (g + 8, 2 * t), (g, 2 * t + 8), (g + 8, 2 * t + 8))):
            a[row, k : k + 2] = [_bf16_value(_bits(words[i]) & 0xFFFF), _bf16_value(_bits(words[i]) >> 16)]
        for i, k in enumerate((2 * t, 2 * t + 8)):
            word = _bits(words[4 + i])
            b[k : k + 2, g] = [_bf16_value(word & 0xFFFF), _bf16_value(word >> 16)]
        for i, (row, n) in enumerate(((g, 2 * t), (g, 2 * t + 1), (g + 8, 2 * t), (g + 8, 2 * t + 1))):
            c[row, n] = float(words[6 + i])
    with np.errstate(all="ignore"):
        d = a @ b + c
    return [
        tuple(Float32(d[row, n]) for row in (lane // 4, lane // 4 + 8) for n in (lane % 4 * 2, lane % 4 * 2 + 1))
        for lane in range(WARP)
    ]


def _inline_ptx(
    code: str, *, write_only_types: Sequence[type[Scalar]] = (), read_only_args: Sequence[Any] = (), **_: Any
) -> Any:
    op, args = code.split()[0], read_only_args
    if op.startswith("mma.sync.aligned.m16n8k16.row.col.f32.bf16"):
        return _collective(tuple(args), _mma)
    if op.startswith("cp.async"):
        size = int(code.split("],")[-1].split(",")[0].strip(" ;"))
        _me().copies.append((int(args[0]), int(args[1]), size))
        return None
    if op.startswith("createpolicy"):
        return Int64(0)
    if op == "mov.b32":
        bits = _bits(args[0])
    elif op == "shl.b32":
        bits = _bits(args[0]) << 16 & 0xFFFFFFFF
        assert code.endswith(" 16;")
    elif op == "and.b32":
        bits = _bits(args[0]) & 0xFFFF0000
        assert code.endswith("0xffff0000;")
    elif op == "prmt.b32":
        bits = _bits(args[0]) >> 16 | (_bits(args[1]) & 0xFFFF0000)
        assert code.endswith("{$r0}, {$r1}, 0x7632;")
    elif op == "cvt.rn.bf16x2.f32":
        bits = _bf16_bits(float(args[0])) | _bf16_bits(float(args[1])) << 16
        assert code.endswith("{$r1}, {$r0};")
    else:
        raise NotImplementedError(code)
    return _from_bits(write_only_types[0], bits)


def _barrier(*, barrier_id: int = 0, number_of_threads: int | None = None, wait: bool = True) -> None:
    me = _me()
    me.warp.barrier.wait()
    if me.lane == 0:
        try:
            me.cta.turns.arrive(me.warp.index, barrier_id, number_of_threads or me.cta.threads, wait)
        except SystemExit:
            me.warp.barrier.abort()
            raise
    me.warp.barrier.wait()


def _commit_group() -> None:
    me = _me()
    me.groups.append(me.copies)
    me.copies = []


def _wait_for_previous() -> None:
    me = _me()
    me.cta.waited_for_previous[me.tid] = True


class _SmemAllocator:
    def allocate_tensor(self, kind: type[Scalar], layout: Layout, byte_alignment: int = 16) -> Tensor:
        me = _me()
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
    return Pointer(kind, int(address), _me().cta.memory if space == "gmem" else _me().cta.shared)


def _make_rmem_tensor(shape: Any, kind: type[Scalar]) -> Tensor:
    layout = Layout(shape)
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


def _modules() -> dict[str, ModuleType]:
    """Stand-ins for what the kernels import of the DSL."""
    cutlass, cute, memory = ModuleType("cutlass"), ModuleType("cutlass.cute"), ModuleType("cutlass.memory")
    llvm = ModuleType("llvm")
    arch = SimpleNamespace(
        thread_idx=lambda: (Int32(_me().tid), Int32(0), Int32(0)),
        block_idx=lambda: tuple(Int32(i) for i in _me().cta.block),
        make_warp_uniform=_identity,
        inline_ptx=_inline_ptx,
        rcp_approx=_math(_reciprocal),
        shuffle_sync=_shuffle(lambda lane, at: at),
        shuffle_sync_bfly=_shuffle(lambda lane, by: lane ^ by),
        shuffle_sync_up=_shuffle(lambda lane, by: lane - by if lane >= by else lane),
        sync_threads=_barrier,
        sync_warp=lambda: _me().warp.barrier.wait(),
        barrier=_barrier,
        barrier_arrive=lambda **named: _barrier(**named, wait=False),
        cp_async_commit_group=_commit_group,
        cp_async_wait_group=lambda n: _me().wait_groups(n),
        griddepcontrol_wait=_wait_for_previous,
        griddepcontrol_launch_dependents=lambda: None,
    )
    cute.__dict__.update(
        jit=_identity, kernel=_identity, arch=arch, Tensor=Tensor, Pointer=Pointer, make_layout=Layout,
        make_tensor=Tensor, make_ptr=_make_ptr, make_rmem_tensor=_make_rmem_tensor, autovec_copy=_copy,
        recast_ptr=lambda p, dtype: Pointer(dtype, p.address, p.memory),
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
    dialects.__dict__["llvm"] = llvm
    return {
        "cutlass": cutlass,
        "cutlass.cute": cute,
        "cutlass.memory": memory,
        "cutlass._mlir": ModuleType("cutlass._mlir"),
        "cutlass._mlir.dialects": dialects,
    }


def load(*names: str) -> dict[str, ModuleType]:
    """Copies of modules of `kda_kernels`, in the order of their dependence, over the stand-ins."""
    stand_ins = _modules()
    loaded: dict[str, ModuleType] = {}
    package = importlib.import_module("kda_kernels")
    saved = {key: sys.modules.get(key) for key in (*stand_ins, *(f"kda_kernels.{n}" for n in names))}
    attributes = {n: getattr(package, n, None) for n in names}
    try:
        sys.modules.update(stand_ins)
        for name in names:
            spec = importlib.util.spec_from_file_location(f"kda_kernels.{name}", KERNELS / f"{name}.py")
            assert spec is not None
            assert spec.loader is not None
            module = importlib.util.module_from_spec(spec)
            sys.modules[spec.name] = module
            spec.loader.exec_module(module)
            setattr(package, name, module)
            loaded[name] = module
    finally:
        for key, old in saved.items():
            if old is None:
                sys.modules.pop(key, None)
            else:
                sys.modules[key] = old
        for n, old in attributes.items():
            if old is None:
                delattr(package, n)
            else:
                setattr(package, n, old)
    return loaded


def run(
    kernel: Callable[..., None],
    arguments: Sequence[Any],
    *,
    grid: tuple[int, int, int],
    threads: int,
    spans: Sequence[tuple[int, int]],
    seed: int = 0,
) -> int:
    """Run all CTAs in turn; returns the shared memory that one took. `spans`: (address, bytes) of global memory."""
    memory = Global(spans)
    used = 0
    for z in range(grid[2]):
        for y in range(grid[1]):
            for x in range(grid[0]):
                cta = _Cta((x, y, z), threads, memory, seed + x + 7 * y + 31 * z)
                used = max(used, _run_cta(cta, kernel, arguments))
    return used


def _run_cta(cta: _Cta, kernel: Callable[..., None], arguments: Sequence[Any]) -> int:
    tops = [0] * cta.threads

    def body(tid: int) -> None:
        me = _local.thread = _Thread(cta, tid)
        try:
            if me.lane == 0:
                cta.turns.start(me.warp.index)
            me.warp.barrier.wait()
            kernel(*arguments)
            assert not me.copies, "copies that no group holds"
            assert not any(me.groups), "copies that nobody waited for"
            me.warp.barrier.wait()
            if me.lane == 0:
                cta.turns.leave(me.warp.index)
            tops[tid] = me.top - 1024
        except (SystemExit, threading.BrokenBarrierError):
            pass
        except BaseException as error:
            cta.turns.fail(error)
            for warp in cta.warps:
                warp.barrier.abort()

    stack = threading.stack_size(256 * 1024)
    workers = [threading.Thread(target=body, args=(tid,), daemon=True) for tid in range(cta.threads)]
    threading.stack_size(stack)
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if cta.turns.failure is not None:
        raise cta.turns.failure
    if cta.turns.arrived and any(cta.turns.arrived.values()):
        raise RuntimeError(f"threads left at barriers: {cta.turns.arrived}")
    assert all(cta.waited_for_previous), "some threads never waited for the previous launch"
    return max(tops)


class _Passed:
    """In place of a loaded binary: keeps what a launch passes."""

    def launch(self, grid: tuple[int, int, int], values: Sequence[Any], stream: int, pdl: bool) -> None:
        self.grid, self.values = grid, values


def run_step(module: ModuleType, kernel: Callable[..., None], problem: Any, spec: Any, operands: Any, seed: int) -> int:
    """Launch a step of a variant that `load` gave, on operands in the CPU's memory; returns the shared memory used."""
    plan = module.plan(problem, spec)
    passed = _Passed()
    launcher = module.cubin.launcher
    module.cubin.launcher = lambda _: passed
    try:
        module.launch(module.Compiled(None, plan, False), operands, 0)
    finally:
        module.cubin.launcher = launcher
    prototypes = module._arguments(plan)
    arguments = [type(a)(v) for a, v in zip(prototypes, passed.values, strict=False)]
    storages = [getattr(operands, f.name) for f in fields(operands)]
    spans = [
        (t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) for t in storages if isinstance(t, torch.Tensor)
    ]
    return run(kernel, [*arguments, prototypes[-1]], grid=passed.grid, threads=plan.threads, spans=spans, seed=seed)


def asked_copies(thread: int, function: Callable[..., None], *arguments: Any) -> list[tuple[int, int, int]]:
    """(shared address, global address, bytes) of the cp.async that a thread issues in a function."""
    cta = SimpleNamespace(warps=[SimpleNamespace()] * (thread // WARP + 1))
    _local.thread = _Thread(cta, thread)  # type: ignore[arg-type]
    function(*arguments)
    return _me().copies
