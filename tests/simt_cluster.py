"""Runs steps whose CTAs form clusters on the CPU: `simt`, with the CTAs of a cluster side by side.

What a CTA sends to another arrives when the other waits for it, never before.
"""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import fields
from types import ModuleType, SimpleNamespace
from typing import Any

import simt
import torch

_RANK_BITS = 24
"""A cluster address is a rank over an address in shared memory."""


class _Barrier:
    """An mbarrier in its first phase, and the bytes on their way to it: (CTA, shared address, content)."""

    def __init__(self, count: int) -> None:
        self.pending, self.bytes = count, 0
        self.sent: list[tuple[Any, int, bytes]] = []

    def complete(self) -> bool:
        for cta, address, content in self.sent:
            cta.shared.write(address, content)
            self.bytes -= len(content)
        self.sent.clear()
        if self.pending < 0 or (self.pending == 0 and self.bytes < 0):
            raise RuntimeError("more came to an mbarrier than was expected")
        return self.pending == 0 and self.bytes == 0


class _Cta(simt._Cta):
    """One of a cluster; its warps are numbered over the cluster, and take turns with all others."""

    def __init__(self, cluster: _Cluster, rank: int, block: tuple[int, int, int], memory: simt.Global) -> None:
        super().__init__(block, cluster.threads, memory, 0)
        self.cluster, self.rank = cluster, rank
        per_cta = cluster.threads // simt.WARP
        self.warps = [simt._Warp(rank * per_cta + i) for i in range(per_cta)]
        turns: Any = cluster.turns
        self.turns: Any = SimpleNamespace(
            start=turns.start,
            leave=turns.leave,
            fail=turns.fail,
            arrive=lambda warp, barrier, threads, wait: turns.arrive(warp, (rank, barrier), threads, wait),
        )
        self.barriers: dict[int, _Barrier] = {}


class _Cluster:
    def __init__(self, size: int, block: tuple[int, int, int], threads: int, memory: simt.Global, seed: int) -> None:
        self.threads = threads
        self.turns = simt._Turns(size * threads // simt.WARP, seed)
        self.ctas = [_Cta(self, rank, (block[0] + rank, *block[1:]), memory) for rank in range(size)]
        self.arrived = 0

    def until(self, condition: Callable[[], bool]) -> None:
        """Let other warps run until a condition holds; called by all lanes of a warp."""
        me, turns = simt._me(), self.turns
        me.warp.barrier.wait()
        if me.lane == 0:
            with turns.condition:
                for _ in range(100_000):
                    if condition():
                        break
                    others = sorted(turns.runnable - {me.warp.index})
                    if not others:
                        turns.failure = RuntimeError("deadlock: a warp waits for what nobody sends")
                        turns.condition.notify_all()
                    else:
                        turns.current = turns.random.choice(others)
                        turns.condition.notify_all()
                    try:
                        turns._until(me.warp.index)
                    except SystemExit:
                        me.warp.barrier.abort()
                        raise
                else:
                    raise RuntimeError("a warp waited too long")
        me.warp.barrier.wait()


def _of_barrier(cta: Any, address: Any) -> _Barrier:
    found: _Barrier = cta.barriers[int(address)]
    return found


def _init(barrier: simt.Pointer, count: int) -> None:
    simt._me().cta.barriers[barrier.address] = _Barrier(count)  # type: ignore[attr-defined]


def _expect(barrier: simt.Pointer, nbytes: Any) -> None:
    found = _of_barrier(simt._me().cta, barrier.address)
    found.pending -= 1
    found.bytes += int(nbytes)


def _wait(barrier: simt.Pointer, phase: int) -> bool:
    assert phase == 0
    cta: Any = simt._me().cta
    cta.cluster.until(lambda: _of_barrier(cta, barrier.address).complete())
    return True


def _cluster_arrive() -> None:
    me = simt._me()
    me.warp.barrier.wait()
    if me.lane == 0:
        me.cta.cluster.arrived += 1  # type: ignore[attr-defined]
    me.warp.barrier.wait()


def _cluster_wait() -> None:
    cluster: Any = simt._me().cta.cluster  # type: ignore[attr-defined]
    cluster.until(lambda: cluster.arrived == sum(len(cta.warps) for cta in cluster.ctas))


def _ptx(code: str, *, read_only_args: Sequence[Any] = (), **more: Any) -> Any:
    op = code.split()[0]
    if op == "mapa.shared::cluster.u32":
        shared, rank = map(int, read_only_args)
        return simt.Int32(rank << _RANK_BITS | shared)
    if op.startswith("st.async"):
        address, barrier, *values = read_only_args
        rank, at = divmod(int(address), 1 << _RANK_BITS)
        target = simt._me().cta.cluster.ctas[rank]  # type: ignore[attr-defined]
        assert int(barrier) >> _RANK_BITS == rank
        content = b"".join(simt._bits(v).to_bytes(4, "little") for v in values)
        _of_barrier(target, int(barrier) & ((1 << _RANK_BITS) - 1)).sent.append((target, at, content))
        return None
    return simt._inline_ptx(code, read_only_args=read_only_args, **more)


def _special(register: str) -> simt.Int32:
    me = simt._me()
    places = {"%ctaid.x": me.cta.block[0], "%ctaid.y": me.cta.block[1], "%tid.x": me.tid}
    return simt.Int32(places[register])


def load(*names: str) -> dict[str, ModuleType]:
    """`simt.load` of kernels with clusters."""
    loaded = simt.load(*names)
    blocks: Any = loaded["blocks"]
    blocks.declare_cluster = lambda size: None
    blocks.special = _special
    blocks.arch.__dict__.update(
        inline_ptx=_ptx,
        mbarrier_init=_init,
        mbarrier_init_fence=lambda: None,
        mbarrier_arrive_and_expect_tx=_expect,
        mbarrier_wait=_wait,
        mbarrier_test_wait=_wait,
        cluster_arrive_relaxed=_cluster_arrive,
        cluster_wait=_cluster_wait,
    )
    return loaded


def run_step(module: ModuleType, problem: Any, spec: Any, operands: Any, seed: int) -> int:
    """Launch a step of KdaSplit, from `load`, on operands in the CPU's memory; returns a CTA's shared memory."""
    plan = module.plan(problem, spec)
    module.arguments.check("emulated", plan, operands)
    kinds = [getattr(simt, hint.__forward_arg__) for hint in module.arguments.Arguments.__annotations__.values()]
    values = module.arguments.values(operands)
    arguments = module.arguments.Arguments(*(kind(v) for kind, v in zip(kinds, values, strict=True)))
    tensors = [getattr(operands, f.name) for f in fields(operands)]
    spans = [
        (t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) for t in tensors if isinstance(t, torch.Tensor)
    ]
    memory = simt.Global(spans)
    used = 0
    for request in range(operands.slots.shape[0]):
        for head in range(operands.A_log.shape[0]):
            block = (head * plan.split, request, 0)
            cluster = _Cluster(plan.split, block, plan.threads, memory, seed + 31 * request + head)
            used = max(used, _run(cluster, module.kda_split, (arguments, plan)))
    return used


def _run(cluster: _Cluster, kernel: Callable[..., None], arguments: Sequence[Any]) -> int:
    tops: defaultdict[int, int] = defaultdict(int)

    def body(cta: _Cta, tid: int) -> None:
        me = simt._local.thread = simt._Thread(cta, tid)
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
            tops[cta.rank] = max(tops[cta.rank], me.top - 1024)
        except (SystemExit, threading.BrokenBarrierError):
            pass
        except BaseException as error:
            cta.turns.fail(error)
            for other in cluster.ctas:
                for warp in other.warps:
                    warp.barrier.abort()

    stack = threading.stack_size(256 * 1024)
    workers = [
        threading.Thread(target=body, args=(cta, tid), daemon=True)
        for cta in cluster.ctas
        for tid in range(cluster.threads)
    ]
    threading.stack_size(stack)
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if cluster.turns.failure is not None:
        raise cluster.turns.failure
    if any(cluster.turns.arrived.values()):
        raise RuntimeError(f"threads left at barriers: {cluster.turns.arrived}")
    for cta in cluster.ctas:
        assert all(cta.waited_for_previous), "some threads never waited for the previous launch"
        assert not any(barrier.sent for barrier in cta.barriers.values()), "a CTA left before all had arrived"
    return max(tops.values())
