"""What decides the code of a kernel whose items are each shared by a cluster of CTAs."""

from __future__ import annotations

from dataclasses import dataclass

from kda_kernels.device.gpu import RESERVED_SMEM_BYTES, SM_REGISTERS, SM_SMEM_BYTES
from kda_kernels.problem import HEAD_DIM
from kda_kernels.step import StepPlan


@dataclass(frozen=True)
class ClusterPlan(StepPlan):
    """CTA r of a cluster owns rows, channels and gate features r*128/split .. of its item.

    split     CTAs of a cluster
    hints     the state passes L1 by, and where it is stored it is streaming
    late      the state is asked for when the other operands have landed, not at once
    chained   the projection is asked for last, behind the wait for the previous launch; else before
              the slot is known
    spin      what other CTAs send is polled for, not slept for
    """

    split: int
    hints: bool
    late: bool
    chained: bool
    spin: bool

    @property
    def cluster(self) -> int:
        return self.split

    @property
    def rows(self) -> int:
        """State rows, channels of each of q, k, v and gate features of a CTA."""
        return HEAD_DIM // self.split

    def ctas_with(self, registers: int) -> int:
        """CTAs that an SM holds, with so many registers per thread."""
        by_smem = SM_SMEM_BYTES // (self.smem_bytes + RESERVED_SMEM_BYTES)
        return min(SM_REGISTERS // (registers * self.threads), by_smem)
