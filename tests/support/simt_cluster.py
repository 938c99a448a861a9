"""`simt` for kernels with mbarriers, and for those whose CTAs form clusters and send to each other
by st.async.

What a CTA sends arrives as late as it may: when the receiver waits, and all that the mbarrier
expects has been sent. With `Barrier.early` it arrives at once, over whatever is still to be read
there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

from support import simt

_RANK_BITS = 24
"""A cluster address is a rank over an address in shared memory."""


class Barrier:
    """An mbarrier, and what is on its way to it: (shared memory, address, content).

    count      arrivals of each phase
    pending    of them, those that this phase still lacks
    nbytes     that this phase expects, less those that have been sent
    reached    whether any have been sent in this phase
    phase      phases that are over
    """

    early = False

    def __init__(self, count: int) -> None:
        self.count = self.pending = count
        self.nbytes = self.phase = 0
        self.reached = False
        self.sent: list[tuple[simt.Memory, int, bytes]] = []

    def arrive(self, expected: int = 0) -> None:
        self.nbytes += expected
        self.pending -= 1
        if self.pending < 0:
            raise RuntimeError("more arrivals at an mbarrier than its count")
        if not self.sent:
            self._settle()

    def send(self, memory: simt.Memory, address: int, content: bytes) -> None:
        self.nbytes -= len(content)
        self.reached = True
        if self.early:
            memory.write(address, content)
            self._settle()
        else:
            self.sent.append((memory, address, content))

    def is_over(self, parity: int) -> bool:
        """Of the phase of a parity. Asked when somebody waits for it: what completes it arrives."""
        if self.phase % 2 == parity:
            self._settle()
        return self.phase % 2 != parity

    def _settle(self) -> None:
        if self.pending:
            return
        if self.nbytes < 0:
            raise RuntimeError(f"{-self.nbytes} bytes more came to an mbarrier than it expects")
        if self.nbytes == 0:
            for memory, address, content in self.sent:
                memory.write(address, content)
            self.sent.clear()
            self.reached = False
            self.pending = self.count
            self.phase += 1

    def check_empty(self) -> None:
        """At the end of the CTA."""
        assert not self.reached, "a CTA left before all had come that an mbarrier expects"


def _barrier(cta: simt.Cta, address: int) -> Barrier:
    if address not in cta.barriers:
        raise RuntimeError(f"no mbarrier is ready at {address}")
    found: Barrier = cta.barriers[address]
    return found


def _mine(barrier: simt.Pointer) -> Barrier:
    return _barrier(simt.current().cta, barrier.address)


def _init(barrier: simt.Pointer, count: int) -> None:
    simt.current().cta.barriers[barrier.address] = Barrier(int(count))


def _wait(barrier: simt.Pointer, parity: Any) -> bool:
    found, phase = _mine(barrier), int(parity)
    _until(f"mbarrier {barrier.address}", lambda: found.is_over(phase))
    return True


def _until(place: str, condition: Callable[[], bool]) -> None:
    """A whole warp lets others run until a condition holds."""
    me = simt.current()
    me.warp.meet(place, None, lambda _: me.cta.turns.until(me.warp.index, condition))


def _cluster_arrive() -> None:
    me = simt.current()

    def arrive(_: list[Any]) -> None:
        me.warp.cluster_arrivals += 1
        me.cta.cluster.arrivals += 1

    me.warp.meet("cluster_arrive", None, arrive)


def _cluster_wait() -> None:
    me = simt.current()
    cluster, awaited = me.cta.cluster, me.warp.cluster_arrivals * len(me.cta.cluster.warps)
    assert awaited, "waits for the cluster without an arrival"
    _until("cluster_wait", lambda: cluster.arrivals >= awaited)


def _declare_cluster(size: int) -> None:
    assert size == len(simt.current().cta.cluster.ctas)


def _peer(shared: Any, rank: Any) -> simt.Int32:
    """The cluster address of a shared address; that of rank 0 is none of a CTA's own."""
    assert 0 <= int(rank) < len(simt.current().cta.cluster.ctas)
    return simt.Int32((int(rank) + 1 << _RANK_BITS) + int(shared))


def _send(address: Any, barrier: Any, *words: Any) -> None:
    """st.async."""
    cluster = simt.current().cta.cluster
    (rank, place), (same, place_of_barrier) = (
        divmod(int(a), 1 << _RANK_BITS) for a in (address, barrier)
    )
    assert rank == same > 0, "an address and its mbarrier must be of one CTA of the cluster"
    if cluster.arrivals < len(cluster.warps):
        raise RuntimeError("sends to a CTA that may not have started")
    target = cluster.ctas[rank - 1]
    if target.has_left:
        raise RuntimeError("sends to a CTA that has left")
    content = b"".join(simt.bits(word).to_bytes(4, "little") for word in words)
    _barrier(target, place_of_barrier).send(target.shared, place, content)


def _inline_ptx(code: str, *, read_only_args: Sequence[Any] = (), **named: Any) -> Any:
    if code.startswith("mapa.shared::cluster.u32"):
        return _peer(*read_only_args)
    if code.startswith("st.async"):
        return _send(*read_only_args)
    return simt.inline_ptx(code, read_only_args=read_only_args, **named)


def load(*names: str) -> dict[str, ModuleType]:
    """`simt.load`, with what this adds to `cute.arch`."""
    loaded = simt.load(*names)
    blocks: Any = loaded["blocks"]
    blocks.declare_cluster = _declare_cluster
    blocks.arch.__dict__.update(
        inline_ptx=_inline_ptx,
        mbarrier_init=_init,
        mbarrier_init_fence=lambda: None,
        mbarrier_arrive=lambda barrier: _mine(barrier).arrive(),
        mbarrier_arrive_and_expect_tx=lambda barrier, nbytes: _mine(barrier).arrive(int(nbytes)),
        mbarrier_wait=_wait,
        mbarrier_test_wait=_wait,
        cluster_arrive_relaxed=_cluster_arrive,
        cluster_wait=_cluster_wait,
    )
    return loaded
