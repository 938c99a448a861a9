"""What a device can do at best: bandwidth of reading, of changing in place, and the cost of a
launch.

    chains of empty kernels -> launch_us
    passes over a pool of memory, by slices of several sizes -> bytes per us of the fastest

Every graph passes over the whole pool once, whatever its slices: the pool is so much larger than
the L2 that next to nothing of it is still there at the next pass. What a slice takes beyond one
launch counts as traffic, so that the streaming kernel itself has efficiency 1.

The kernels and their graphs are those of `streams`; here is the arithmetic, on any clock.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import pairwise
from multiprocessing.connection import Connection
from statistics import median
from typing import Any, Literal

from kdabench.data.roofline import Ceilings, Roofline
from kdabench.measure.journal import JournalError

What = Literal["launch", "read", "update"]

BLOCKS = (2048, 4096, 8192)
"""Elements that a program streams at a time. Which is fastest depends on the device."""
POOL_L2S = 64
"""Size of the pool in L2s: at most 1/64 of a pass could be served from there."""
SLICES = (8, 4, 2)
"""Launches of a pass: slices of 8, 16 and 32 L2s. What a launch loses at its start and its end, some
microseconds, is under 1 % of the largest."""
CHAINS = (100, 300)
"""Empty kernels in a graph. Two lengths: what a replay costs once cancels in the difference."""

_BANDWIDTHS: tuple[What, ...] = ("read", "update")
_REPEATS = 15
_WARM_UP = 3
_TRIES = 3
_SPREAD: dict[What, float] = {"launch": 0.05, "read": 0.02, "update": 0.02}
"""By how much the middle of the repeats may exceed the fastest. A chain lasts only some 100 us; 5 %
of a launch is 0.05 us of a floor."""
_PLATEAU = 0.03
"""By how much the two largest slices may differ."""
_LIMIT_S = 180.0


class CalibrationError(ValueError):
    """Ceilings that can't be measured. One line: which, value and the rule."""


@dataclass(frozen=True)
class Load:
    """What one graph does.

    launches      kernels in it, one after another
    launch_bytes  that each of them moves, read and written; 0 of empty kernels
    block         elements that a program streams at a time; 0 of empty kernels
    """

    what: What
    launches: int
    launch_bytes: int = 0
    block: int = 0

    def __str__(self) -> str:
        return (
            f"{self.what}, {self.launches} x {self.launch_bytes / 1e6:.0f} MB, block {self.block}"
        )


@dataclass(frozen=True)
class Timing:
    """A load's repeats: the fastest in microseconds per launch, and by which part the middle one is
    slower."""

    load: Load
    best_us: float
    spread: float

    @property
    def steady(self) -> bool:
        return self.spread <= _SPREAD[self.load.what]

    def bytes_per_us(self, launch_us: float) -> float:
        """Compute the bandwidth, one launch aside."""
        return self.load.launch_bytes / (self.best_us - launch_us)


Prepare = Callable[[Load], Callable[[], float]]
"""Makes a load ready and gives its clock: microseconds per launch of one more replay."""


def calibrate(
    prepare: Prepare, pool_bytes: int, peak_bytes_per_us: float | None
) -> tuple[Roofline, list[Timing]]:
    """Measure a device's roofline; give what was timed, too.

    pool_bytes         size of the pool that loads pass over
    peak_bytes_per_us  of the memory by its clock and width; None where it isn't known

    Raises CalibrationError if repeats differ, larger slices are still faster, or memory seems
    faster than it can be.
    """
    timings = [_timed(prepare, load) for load in passes(pool_bytes)]
    # After the passes: these have brought an idle GPU's clocks up.
    chains = [_timed(prepare, Load("launch", launches)) for launches in CHAINS]
    _require_steady("launch", chains)
    launch_us = _per_launch(*chains)
    read, update = (
        _bandwidth(what, [t for t in timings if t.load.what == what], launch_us, peak_bytes_per_us)
        for what in _BANDWIDTHS
    )
    return Roofline(read, update, launch_us), [*chains, *timings]


def passes(pool_bytes: int) -> Iterator[Load]:
    """List the passes over a pool: each kind, slice and block."""
    for what in _BANDWIDTHS:
        moved = 2 * pool_bytes if what == "update" else pool_bytes
        for launches in SLICES:
            for block in BLOCKS:
                yield Load(what, launches, moved // launches, block)


def _timed(prepare: Prepare, load: Load) -> Timing:
    """Repeat a load; of several attempts the first steady one, else the steadiest."""
    clock = prepare(load)
    found: list[Timing] = []
    while len(found) < _TRIES and not (found and found[-1].steady):
        times = [clock() for _ in range(_WARM_UP + _REPEATS)][_WARM_UP:]
        best_us = min(times)
        found.append(Timing(load, best_us, median(times) / best_us - 1))
    return min(found, key=lambda timing: timing.spread)


def _per_launch(short: Timing, long: Timing) -> float:
    """Microseconds that one more launch adds to a chain."""
    few, many = short.load.launches, long.load.launches
    launch_us = (many * long.best_us - few * short.best_us) / (many - few)
    if launch_us <= 0:
        times = f"{few} launches {few * short.best_us:.2f} us, {many} {many * long.best_us:.2f} us"
        raise CalibrationError(f"launch: {times}: the longer chain must take longer")
    return launch_us


def _bandwidth(
    what: What, timings: Sequence[Timing], launch_us: float, peak_bytes_per_us: float | None
) -> float:
    """Bytes per us of the fastest steady load."""
    steady = _require_steady(what, timings)
    if any(timing.best_us <= launch_us for timing in steady):
        raise CalibrationError(f"{what}: a slice takes no longer than an empty launch")
    by_slice: dict[int, float] = {}
    for timing in steady:
        size = timing.load.launch_bytes
        by_slice[size] = max(by_slice.get(size, 0.0), timing.bytes_per_us(launch_us))
    _require_plateau(what, [by_slice[size] for size in sorted(by_slice)])
    best = max(by_slice.values())
    if peak_bytes_per_us is not None and best > peak_bytes_per_us:
        raise CalibrationError(
            f"{what}: {best / 1e6:.3f} TB/s: at most {peak_bytes_per_us / 1e6:.3f}, the memory's peak"
        )
    return best


def _require_plateau(what: What, by_size: Sequence[float]) -> None:
    """Raises CalibrationError unless the two largest slices are about as fast; by_size: bytes per
    us, the smallest slice first."""
    for one, other in list(pairwise(by_size))[-1:]:
        if abs(other / one - 1) > _PLATEAU:
            pair = f"{one / 1e6:.3f} and {other / 1e6:.3f} TB/s"
            raise CalibrationError(
                f"{what}: {pair} with the two largest slices: {_PLATEAU:.0%} apart at most"
            )


def _require_steady(what: What, timings: Iterable[Timing]) -> list[Timing]:
    """Give the steady ones. All of a chain must be, one of several streams is enough."""
    timings = list(timings)
    steady = [timing for timing in timings if timing.steady]
    if not steady or (what == "launch" and len(steady) < len(timings)):
        worst = (max if what == "launch" else min)(timing.spread for timing in timings)
        raise CalibrationError(
            f"{what}: spread {worst:.1%}: at most {_SPREAD[what]:.0%} from the fastest to the middle of "
            f"{_REPEATS} repeats; does something else use the GPU?"
        )
    return steady


def ceilings(roofline: Roofline, timings: Iterable[Timing], env: dict[str, Any]) -> Ceilings:
    """Put a roofline beside what was timed, and where."""
    readings = tuple(
        {**asdict(t.load), "best_us": round(t.best_us, 4), "spread": round(t.spread, 4)}
        for t in timings
    )
    note = (
        f"kdabench calibrate: streaming kernels under CUDA graphs over {POOL_L2S} L2s, the fastest "
        f"of {_REPEATS} repeats of the best slice and block, a launch taken off"
    )
    return Ceilings(roofline, note, env, readings)


# --- in a process of its own ---


def on_gpu(index: int) -> Ceilings:
    """Measure a CUDA device in a new process, so that this one keeps no context and no memory of
    it.

    Raises CalibrationError, or JournalError if the GPU is being measured on already.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_child, args=(theirs, index), daemon=True)
    process.start()
    theirs.close()
    answer: Ceilings | Exception = CalibrationError("the process that measures ended unasked")
    try:
        with suppress(EOFError):
            late = CalibrationError(f"no answer within {_LIMIT_S:.0f} s")
            answer = ours.recv() if ours.poll(_LIMIT_S) else late
    finally:
        process.kill()
        process.join()
    if isinstance(answer, Exception):
        raise answer
    return answer


def _child(pipe: Connection, index: int) -> None:
    from kdabench.measure import streams  # torch and triton

    try:
        pipe.send(streams.measure(index))
    except (CalibrationError, JournalError) as error:
        pipe.send(error)
    except Exception as error:
        # Whatever torch, Triton and the driver raise: their errors share no base class.
        line = " ".join(str(error).split())[:300]
        pipe.send(CalibrationError(f"{type(error).__name__}: {line}"))
