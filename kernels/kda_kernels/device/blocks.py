"""Device-side pieces that several CuTe kernels share: fast scalar mathematics in FP32, copies, sums
over lanes.

Errors over N(0, 4), relative: exp 1.3e-7, rsqrt 1.1e-7, sigmoid 6.7e-7.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass._mlir.dialects import llvm

arch = cute.arch

UNIT = 8
"""bf16 elements of a 16-byte copy."""
LOG2E = 1.4426950408889634
KEY_EPS = 1e-6
"""Added to |q|^2 and |k|^2."""


@cute.jit
def exp(x: Float32) -> Float32:
    return cute.math.exp2(x * Float32(LOG2E), approx=True, ftz=True)


@cute.jit
def exp2(x: Float32) -> Float32:
    return cute.math.exp2(x, approx=True, ftz=True)


@cute.jit
def rsqrt(x: Float32) -> Float32:
    return cute.math.rsqrt(x, approx=True, ftz=True)


@cute.jit
def sigmoid(x: Float32) -> Float32:
    return arch.rcp_approx(Float32(1) + cute.math.exp2(x * Float32(-LOG2E), approx=True, ftz=True))


@cute.jit
def log_decay(raw_gate: Float32, dt_bias: Float32, exp_A: Float32, lower_bound: Float32) -> Float32:
    """log d of one key channel: lower_bound * sigmoid(exp(A_log) * (raw_g + dt_bias))."""
    return lower_bound * sigmoid(exp_A * (raw_gate + dt_bias))


@cute.jit
def at(dtype: Any, address: Int64, index: Int32) -> Any:
    """One element of an array in global memory."""
    pointer = cute.make_ptr(
        dtype, address, cutlass.AddressSpace.gmem, assumed_align=dtype.width // 8
    )
    return cute.make_tensor(pointer + index, cute.make_layout(1))[0]


@cute.jit
def put(dtype: Any, address: Int64, value: Any) -> None:
    """Store one element to global memory."""
    pointer = cute.make_ptr(
        dtype, address, cutlass.AddressSpace.gmem, assumed_align=dtype.width // 8
    )
    cute.make_tensor(pointer, cute.make_layout(1))[0] = value


@cute.jit
def get_vector(dtype: Any, address: Int64, count: cutlass.Constexpr) -> cute.Tensor:
    """Neighbouring elements from global memory to registers, up to 16 bytes at a time."""
    values = cute.make_rmem_tensor(count, dtype)
    align = min(16, count * dtype.width // 8)
    source = cute.make_ptr(dtype, address, cutlass.AddressSpace.gmem, assumed_align=align)
    cute.autovec_copy(cute.make_tensor(source, cute.make_layout(count)), values)
    return values


@cute.jit
def put_vector(values: cute.Tensor, address: Int64) -> None:
    """Neighbouring elements, of 16 bytes at most, from registers to global memory, in one
    access."""
    dtype, count = values.element_type, cute.size(values)
    target = cute.make_ptr(
        dtype, address, cutlass.AddressSpace.gmem, assumed_align=count * dtype.width // 8
    )
    cute.autovec_copy(values, cute.make_tensor(target, cute.make_layout(count)))


@cute.jit
def pinned(x: Int32) -> Int32:
    """x, so that what is computed from it isn't taken for what was computed from x before."""
    return arch.inline_ptx("mov.b32 {$w0}, {$r0};", write_only_types=[Int32], read_only_args=[x])


def special(register: str) -> Int32:
    """A special register as "%tid.x", read where this stands instead of kept from the start of the
    kernel."""
    # inline_ptx takes the % for an operand.
    value = llvm.inline_asm(
        Int32.mlir_type, [], f"mov.u32 $0, {register};", "=r", has_side_effects=True
    )
    return Int32(value)


@cute.jit
def copy_async(shared: Int32, address: Int64, nbytes: cutlass.Constexpr) -> None:
    """cp.async of 4, 8 or 16 bytes from global memory; both addresses are multiples of `nbytes`."""
    cache = "cg" if cutlass.const_expr(nbytes == 16) else "ca"
    arch.inline_ptx(
        f"cp.async.{cache}.shared.global [{{$r0}}], [{{$r1}}], {nbytes};",
        read_only_args=[shared, address],
    )


@cute.jit
def copy_async_hinted(
    shared: Int32, address: Int64, nbytes: cutlass.Constexpr, policy: Int64
) -> None:
    """`copy_async` with an L2 cache policy."""
    cache = "cg" if cutlass.const_expr(nbytes == 16) else "ca"
    arch.inline_ptx(
        f"cp.async.{cache}.shared.global.L2::cache_hint [{{$r0}}], [{{$r1}}], {nbytes}, {{$r2}};",
        read_only_args=[shared, address, policy],
    )


@cute.jit
def copy_out(shared: Int32, address: Int64) -> None:
    """16 bytes from shared to global memory."""
    words = cute.make_rmem_tensor(4, Uint32)
    source = cute.make_ptr(Uint32, shared, cutlass.AddressSpace.smem, assumed_align=16)
    target = cute.make_ptr(Uint32, address, cutlass.AddressSpace.gmem, assumed_align=16)
    cute.autovec_copy(cute.make_tensor(source, cute.make_layout(4)), words)
    cute.autovec_copy(words, cute.make_tensor(target, cute.make_layout(4)))


@cute.jit
def evict_first() -> Int64:
    """L2 cache policy of data that won't be used again."""
    return arch.inline_ptx(
        "createpolicy.fractional.L2::evict_first.b64 {$w0}, 1.0;", write_only_types=[Int64]
    )


@cute.jit
def peer(shared: Int32, rank: Int32) -> Int32:
    """Cluster address of the same shared memory in the CTA `rank` of this cluster. Linear in
    `shared`."""
    return arch.inline_ptx(
        "mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};",
        write_only_types=[Int32],
        read_only_args=[shared, rank],
    )


@cute.jit
def send(address: Int32, barrier: Int32, x: Float32) -> None:
    """Store 4 bytes to a cluster address; they complete on the mbarrier of the same CTA, given by
    cluster address."""
    arch.inline_ptx(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [{$r0}], {$r2}, [{$r1}];",
        read_only_args=[address, barrier, x],
    )


@cute.jit
def send_pair(address: Int32, barrier: Int32, x: Float32, y: Float32) -> None:
    """`send` of 8 bytes, to a multiple of 8."""
    arch.inline_ptx(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [{$r0}], {{$r2}, {$r3}}, [{$r1}];",
        read_only_args=[address, barrier, x, y],
    )


@cute.jit
def send_quad(address: Int32, barrier: Int32, words: cute.Tensor) -> None:
    """`send` of four words, to a multiple of 16."""
    arch.inline_ptx(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [{$r0}], {{$r2}, {$r3}, {$r4}, {$r5}}, [{$r1}];",
        read_only_args=[address, barrier, words[0], words[1], words[2], words[3]],
    )


@cute.jit
def row_sums(
    values: cute.Tensor, n: cutlass.Constexpr, lanes: cutlass.Constexpr, lane: Int32
) -> Float32:
    """Sums over groups of `lanes` neighbouring lanes of n values each, transposed: lane l of a
    group gets the total of value `l // (lanes // n)`. n and lanes are powers of two, n <= lanes;
    the values are overwritten.
    """
    distance = lanes // 2
    count = n
    while cutlass.const_expr(count > 1):
        half = count // 2
        upper = (lane & distance) != 0
        for j in cutlass.range_constexpr(half):
            kept = values[j + half] if upper else values[j]
            sent = values[j] if upper else values[j + half]
            values[j] = kept + arch.shuffle_sync_bfly(sent, offset=distance)
        count = half
        distance = distance // 2
    total = values[0]
    while cutlass.const_expr(distance > 0):
        total += arch.shuffle_sync_bfly(total, offset=distance)
        distance = distance // 2
    return total


@cute.jit
def lane_sum(x: Float32, first: cutlass.Constexpr, lanes: cutlass.Constexpr) -> Float32:
    """Sum of x over lanes whose numbers differ in the bits first, 2*first, .. lanes/2."""
    distance = first
    while cutlass.const_expr(distance < lanes):
        x += arch.shuffle_sync_bfly(x, offset=distance)
        distance = distance * 2
    return x


@cute.jit
def normalizers(
    q: cute.Tensor, k: cute.Tensor, scale: Float32, lanes: cutlass.Constexpr
) -> tuple[Float32, Float32, Float32]:
    """rk, rq and (k.q) rk rq of a token whose q and k are spread over `lanes` lanes."""
    kk, qq, kq = Float32(0), Float32(0), Float32(0)
    for i in cutlass.range_constexpr(cute.size(q)):
        kk += k[i] * k[i]
        qq += q[i] * q[i]
        kq += k[i] * q[i]
    rk = rsqrt(lane_sum(kk, 1, lanes) + Float32(KEY_EPS))
    rq = scale * rsqrt(lane_sum(qq, 1, lanes) + Float32(KEY_EPS))
    return rk, rq, lane_sum(kq, 1, lanes) * rk * rq


@cute.jit
def mma_16816(c: tuple[Float32, ...], a: tuple[Uint32, ...], b: tuple[Uint32, ...]) -> Any:
    """c + a b of one m16n8k16 step; a and b are fragments of BF16 pairs."""
    return arch.inline_ptx(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        "{{$w0},{$w1},{$w2},{$w3}}, {{$r0},{$r1},{$r2},{$r3}}, {{$r4},{$r5}}, {{$r6},{$r7},{$r8},{$r9}};",
        write_only_types=[Float32] * 4,
        read_only_args=[*a, *b, *c],
    )


@cute.jit
def pack(low: Float32, high: Float32) -> Uint32:
    """Two numbers, rounded to BF16, as the halves of a word."""
    return arch.inline_ptx(
        "cvt.rn.bf16x2.f32 {$w0}, {$r1}, {$r0};",
        write_only_types=[Uint32],
        read_only_args=[low, high],
    )


@cute.jit
def low_half(word: Uint32) -> Float32:
    return arch.inline_ptx(
        "shl.b32 {$w0}, {$r0}, 16;", write_only_types=[Float32], read_only_args=[word]
    )


@cute.jit
def high_half(word: Uint32) -> Float32:
    return arch.inline_ptx(
        "and.b32 {$w0}, {$r0}, 0xffff0000;", write_only_types=[Float32], read_only_args=[word]
    )


@cute.jit
def rounded(x: Float32) -> Float32:
    """x rounded to BF16. `x.to(BFloat16)` alone takes a conversion of many times the latency."""
    word = pack(Float32(0), x)
    return arch.inline_ptx(
        "mov.b32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[word]
    )


@cute.jit
def poll(barrier: cute.Pointer, phase: cutlass.Constexpr) -> None:
    """`arch.mbarrier_wait` without sleeping: sooner awake, at the cost of issue slots."""
    done = arch.mbarrier_test_wait(barrier, phase)
    while not done:
        done = arch.mbarrier_test_wait(barrier, phase)


def declare_cluster(ctas: int) -> None:
    """Make the size of its cluster part of the kernel in whose body this stands.

    Otherwise every cluster barrier has a branch for launches without a cluster.
    """
    from cutlass._mlir import ir

    kernel = ir.InsertionPoint.current.block.owner
    kernel.attributes["nvvm.cluster_dim"] = ir.Attribute.parse(f"array<i32: {ctas}, 1, 1>")
