# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"
# (Triton traces Python: its functions carry no usable types.)
"""The Triton kernels of a calibration; `streams` launches and checks them.

empty_kernel    (1)          nothing
read_kernel     (programs)   every element is read once, a sum written by each program
update_kernel   (programs)   every element is read and written once, in place
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def empty_kernel(pool):
    """Does nothing: what is timed is the launch."""


@triton.jit
def read_kernel(pool, sums, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    """Sum STEPS blocks. pool [programs * STEPS * BLOCK] int32, sums [programs] int32, modulo
    2**32."""
    place = tl.program_id(0).to(tl.int64) * (BLOCK * STEPS) + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.int32)
    for step in tl.static_range(STEPS):
        total += tl.load(pool + place + step * BLOCK)
    tl.store(sums + tl.program_id(0), tl.sum(total, 0))


@triton.jit
def update_kernel(pool, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    """Add 1 to STEPS blocks in place. pool [programs * STEPS * BLOCK] int32."""
    place = tl.program_id(0).to(tl.int64) * (BLOCK * STEPS) + tl.arange(0, BLOCK)
    for step in tl.static_range(STEPS):
        at = pool + place + step * BLOCK
        tl.store(at, tl.load(at) + 1)
