"""Stages of shared memory that go round between groups of warps, handed on by mbarriers.

    producers                 consumers
    ring.producer_acquire     ring.consumer_wait         stage is empty | stage is full
    fill the stage            read it
    ring.producer_commit      ring.consumer_release      stage is full  | stage is empty

Item n has stage n % stages. All warps of both sides take part in every item, in order; each calls
with all its threads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Int32

arch = cute.arch


class Turn(NamedTuple):
    """An item's stage, and the parity of the round in which it has it."""

    stage: Int32
    phase: Int32


def first() -> Turn:
    """Of item 0."""
    return Turn(Int32(0), Int32(0))


@cute.jit
def after(turn: Turn, stages: cutlass.Constexpr) -> Turn:
    """Of the item after it."""
    stage, phase = turn
    stage = stage + 1
    if stage == stages:
        stage, phase = Int32(0), phase ^ 1
    return Turn(stage, phase)


@dataclass(frozen=True)
class Ring:
    """The mbarriers of some stages, one per stage and way.

    full    None: consumers know by another ring that a stage is full
    empty   None: producers know by another ring, or by what they wait for anyway, that a stage is
            empty
    """

    stages: int
    full: Any
    empty: Any

    def init(self, producers: int, consumers: int) -> None:
        """Threads of both sides. Call from one thread; a fence and a CTA barrier are to follow."""
        for stage in range(self.stages):
            if self.full is not None:
                arch.mbarrier_init(self.full + stage, producers)
            if self.empty is not None:
                arch.mbarrier_init(self.empty + stage, consumers)

    def turn(self, n: Int32) -> Turn:
        """Of item n. Where stages are no power of two, `after` the one before takes less."""
        assert self.stages & (self.stages - 1) == 0
        return Turn(n & (self.stages - 1), (n >> (self.stages.bit_length() - 1)) & 1)

    def after(self, turn: Turn) -> Turn:
        following: Turn = after(turn, self.stages)
        return following

    def producer_acquire(self, turn: Turn) -> None:
        """Wait until the stage is empty; in the first round it is."""
        arch.mbarrier_wait(self.empty + turn.stage, turn.phase ^ 1)

    def producer_commit(self, turn: Turn) -> None:
        _arrive(self.full + turn.stage)

    def consumer_wait(self, turn: Turn) -> None:
        """Wait until the stage is full."""
        arch.mbarrier_wait(self.full + turn.stage, turn.phase)

    def consumer_release(self, turn: Turn) -> None:
        _arrive(self.empty + turn.stage)


@cute.jit
def _arrive(barrier: cute.Pointer) -> None:
    """The warp meets, and each of its threads arrives: race detectors do not follow one lane that
    does so for all."""
    arch.sync_warp()
    arch.mbarrier_arrive(barrier)
