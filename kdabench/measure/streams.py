"""The loads of a calibration on a GPU: an empty kernel, one that only reads, one that changes
memory in place.

Elements are 32-bit integers, whose sums are exact: what a graph read or changed is checked before
it is timed.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from kdabench.data.measurements import Candidate
from kdabench.data.roofline import Ceilings
from kdabench.measure import calibration
from kdabench.measure.calibration import BLOCKS, POOL_L2S, SLICES, CalibrationError, Load
from kdabench.measure.cell_bench import Device, bit_sum
from kdabench.measure.cuda_graphs import GraphClock, Timed, capture
from kdabench.measure.environment import describe
from kdabench.measure.session import lock_gpu
from kdabench.measure.stream_kernels import empty_kernel, read_kernel, update_kernel
from kdabench.measure.telemetry import Telemetry

STEPS = 4
"""Blocks that a program streams, one after another."""
_PER_THREAD = 16
"""Elements of a block: four loads of 16 bytes are under way in each thread."""
_WORD = 1 << 32


def pool_elements(l2_bytes: int) -> int:
    """Count the pool's elements: so many L2s, in whole programs of every slice and block."""
    grain = SLICES[0] * STEPS * BLOCKS[-1]
    return -(-POOL_L2S * l2_bytes // (4 * grain)) * grain


def warps(block: int) -> int:
    """Count a program's warps."""
    return block // (32 * _PER_THREAD)


def launch(load: Load, i: int, pool: torch.Tensor, sums: torch.Tensor) -> None:
    """Launch the i-th kernel of a load on the current stream.

    pool  [elements] int32: the i-th of as many slices as there are launches is streamed
    sums  [elements // (STEPS * BLOCK), at least] int32: what a read found, by program
    """
    if load.what == "launch":
        empty_kernel[(1,)](pool, num_warps=1)
        return
    size = len(pool) // load.launches
    programs = size // (STEPS * load.block)
    part = pool[i * size :]
    if load.what == "read":
        into = sums[i * programs :]
        read_kernel[(programs,)](part, into, load.block, STEPS, num_warps=warps(load.block))
    else:
        update_kernel[(programs,)](part, load.block, STEPS, num_warps=warps(load.block))


def verdict(load: Load, pool: torch.Tensor, sums: torch.Tensor, before: int) -> str | None:
    """Say why a pass did not do what is timed, or None.

    before  sum of the pool's elements before the pass
    """
    now = int(bit_sum(pool))
    if load.what == "read":
        programs = len(pool) // (STEPS * load.block)
        found, expected = int(bit_sum(sums[:programs])), before
    else:
        found, expected = now, before + len(pool) * (load.what == "update")
    if (found - expected) % _WORD:
        return f"{load}: the sum is {found % _WORD}, not {expected % _WORD}"
    return None


class Streams:
    """Loads made ready on the current device, each captured into a graph and checked."""

    def __init__(self, device: Device, telemetry: Telemetry) -> None:
        elements = pool_elements(device.l2_bytes)
        low, high = -_WORD // 2, _WORD // 2
        self.pool = torch.randint(low, high, (elements,), dtype=torch.int32, device="cuda")
        programs = elements // (STEPS * BLOCKS[0])
        self._sums = torch.zeros(programs, dtype=torch.int32, device="cuda")
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._graphs: dict[Candidate, Timed] = {}
        self._clock = GraphClock(self._graphs, None, telemetry, self._stream)

    def prepare(self, load: Load) -> Callable[[], float]:
        """Capture a load and check one pass; give its clock, as `calibrate` takes it.

        Raises CalibrationError if the pass did something else, CaptureFailedError.
        """

        def enqueue(handle: int) -> None:
            for i in range(load.launches):
                launch(load, i, self.pool, self._sums)

        # Compiled before the capture.
        with torch.cuda.stream(self._stream):
            enqueue(self._stream.cuda_stream)
        graph = capture(enqueue, self._stream)
        before = int(bit_sum(self.pool))
        self._sums.zero_()
        torch.cuda.synchronize()
        with torch.cuda.stream(self._stream):
            graph.replay()
        torch.cuda.synchronize()
        why = verdict(load, self.pool, self._sums, before)
        if why is not None:
            raise CalibrationError(why)
        name = Candidate.of(load.what, {"launches": load.launches, "block": load.block})
        self._graphs[name] = Timed(graph, load.launches)
        return lambda: self._clock.read(name).time_us


def measure(index: int) -> Ceilings:
    """Measure the ceilings of a CUDA device in this process.

    Raises CalibrationError, JournalError if the GPU is being measured on already, RuntimeError from
    torch and the driver.
    """
    torch.cuda.set_device(index)
    device = Device.current()
    telemetry = Telemetry(device.uuid, device.pci_id)
    device = device.knowing(telemetry)
    lock_gpu(device.uuid)  # until this process ends
    loads = Streams(device, telemetry)
    pool_bytes = 4 * len(loads.pool)
    found = calibration.calibrate(loads.prepare, pool_bytes, device.peak_bytes_per_us)
    return calibration.ceilings(*found, describe(device.name, device.uuid, telemetry))
