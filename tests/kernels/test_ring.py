"""Rings of stages: a few warps that hand items on, thread by thread, with and without each of a
ring's steps."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from support import simt, simt_cluster

PRODUCERS, CONSUMERS = 2, 3
"""Warps of each side."""
THREADS = simt.WARP * (PRODUCERS + CONSUMERS)


@pytest.fixture(scope="module")
def emulated() -> ModuleType:
    return simt_cluster.load("ring", "blocks")["ring"]


def handing_on(ring: ModuleType, stages: int, count: int, by_step: bool) -> Callable[[], None]:
    """A kernel: each producer thread writes every item's number, and every consumer thread checks
    all of them.

    by_step   turns come one after the other, instead of from the item's number
    """
    arch: Any = ring.arch

    def kernel() -> None:
        me = simt.current()
        memory = me.cta.shared
        barriers = simt.Pointer(simt.Int64, memory.base, memory)
        numbers = simt.Pointer(simt.Int32, memory.base + 128, memory)
        me.top = memory.base + 128 + 4 * simt.WARP * PRODUCERS * stages
        R = ring.Ring(stages, barriers, barriers + stages)
        if me.tid == 0:
            R.init(simt.WARP * PRODUCERS, simt.WARP * CONSUMERS)
        arch.griddepcontrol_wait()
        arch.sync_threads()
        turn = ring.first()
        for n in range(count):
            turn = turn if by_step else R.turn(simt.Int32(n))
            first = int(turn.stage) * simt.WARP * PRODUCERS
            if me.tid < simt.WARP * PRODUCERS:
                R.producer_acquire(turn)
                numbers.put(first + me.tid, simt.Int32(n))
                R.producer_commit(turn)
            else:
                R.consumer_wait(turn)
                found = {int(numbers.get(first + i)) for i in range(simt.WARP * PRODUCERS)}
                assert found == {n}, f"item {n}: found {found}"
                R.consumer_release(turn)
            turn = R.after(turn)

    return kernel


def run(kernel: Callable[[], None], seeds: int) -> None:
    for seed in range(seeds):
        simt.run(kernel, (), grid=(1, 1, 1), threads=THREADS, spans=(), seed=seed)


@pytest.mark.parametrize(
    ("stages", "by_step"), [(1, False), (2, False), (4, False), (1, True), (2, True), (3, True)]
)
@pytest.mark.parametrize("count", [1, 2, 7])
def test_every_item_is_read_before_its_stage_is_filled_again(
    emulated: ModuleType, stages: int, by_step: bool, count: int
) -> None:
    run(handing_on(emulated, stages, count, by_step), 3)


@pytest.mark.parametrize("step", ["producer_acquire", "consumer_wait"])
def test_a_missing_wait_shows(
    emulated: ModuleType, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    monkeypatch.setattr(emulated.Ring, step, lambda *_: None)
    with pytest.raises((AssertionError, RuntimeError)):
        run(handing_on(emulated, 2, 7, by_step=False), 5)


@pytest.mark.parametrize("step", ["producer_commit", "consumer_release"])
def test_a_missing_arrival_is_a_deadlock(
    emulated: ModuleType, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    monkeypatch.setattr(emulated.Ring, step, lambda *_: None)
    with pytest.raises(RuntimeError, match="deadlock"):
        run(handing_on(emulated, 2, 7, by_step=False), 1)


@pytest.mark.parametrize("stages", [1, 2, 4])
def test_turns_of_numbers_and_of_steps_are_the_same(emulated: ModuleType, stages: int) -> None:
    R = emulated.Ring(stages, None, None)
    turn = emulated.first()
    for n in range(20):
        assert (
            tuple(map(int, turn))
            == tuple(map(int, R.turn(simt.Int32(n))))
            == (n % stages, n // stages % 2)
        )
        turn = R.after(turn)


def test_turns_come_from_numbers_only_where_that_is_cheap(emulated: ModuleType) -> None:
    with pytest.raises(AssertionError):
        emulated.Ring(3, None, None).turn(simt.Int32(0))


def test_a_side_that_does_not_wait_has_no_mbarriers(
    emulated: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[tuple[int, int]] = []
    monkeypatch.setattr(
        emulated, "arch", SimpleNamespace(mbarrier_init=lambda at, count: made.append((at, count)))
    )
    emulated.Ring(2, 10, None).init(64, 96)
    emulated.Ring(2, None, 20).init(64, 96)
    assert made == [(10, 64), (11, 64), (20, 96), (21, 96)]
