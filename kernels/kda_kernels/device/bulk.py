"""Bulk copies between global and shared memory, and the mbarriers they complete on.

Addresses must be multiples of 16, and so must byte counts. None of these elects a thread: call them
from one.
"""

from __future__ import annotations

import cutlass.cute as cute
from cutlass import Int32, Int64, range_constexpr

arch = cute.arch


@cute.jit
def init(barriers: cute.Pointer, count: int) -> None:
    """`count` mbarriers with one arrival each: that of `load`. Follow with a CTA barrier."""
    for i in range_constexpr(count):
        arch.mbarrier_init(barriers + i, 1)
    arch.mbarrier_init_fence()


@cute.jit
def load(shared: cute.Pointer, address: Int64, nbytes: Int32, barrier: cute.Pointer) -> None:
    """Expect `nbytes` on the barrier and start their copy from a global address."""
    arch.mbarrier_arrive_and_expect_tx(barrier, nbytes)
    arch.inline_ptx(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{$r0}], [{$r1}], {$r2}, [{$r3}];",
        read_only_args=[shared.toint(), address, nbytes, barrier.toint()],
    )


@cute.jit
def store(address: Int64, shared: cute.Pointer, nbytes: Int32) -> None:
    """Start a copy to a global address, as a group of its own.

    Every thread that wrote the shared bytes must have called `publish` before a barrier that
    precedes this.
    """
    arch.inline_ptx(
        "cp.async.bulk.global.shared::cta.bulk_group [{$r0}], [{$r1}], {$r2};",
        read_only_args=[address, shared.toint(), nbytes],
    )
    arch.cp_async_bulk_commit_group()


@cute.jit
def publish() -> None:
    """Order this thread's plain accesses to shared memory before later bulk copies of it."""
    arch.fence_proxy("async.shared", space="cta")


@cute.jit
def wait_stores_read() -> None:
    """Wait until the calling thread's stores have read their shared memory, which may then be
    refilled."""
    arch.cp_async_bulk_wait_group(0, read=True)


@cute.jit
def wait_stores() -> None:
    """Wait until the calling thread's stores are complete."""
    arch.cp_async_bulk_wait_group(0)
