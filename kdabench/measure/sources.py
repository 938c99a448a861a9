"""Where outcomes come from on this machine: a GPU, or what was recorded of a device."""

from __future__ import annotations

from pathlib import Path

from kdabench.data import devices
from kdabench.data.devices import Gpu, Recorded, Source
from kdabench.measure.gpu_runner import GpuRunner
from kdabench.measure.recorded import RecordedRunner
from kdabench.measure.session import Runner


def find(text: str, results: Path) -> Source:
    """Find the source for a user's choice; "auto" without a GPU is the only recorded device.

    results  folder of recorded measurements, by device

    Raises DeviceError, a ValueError, with a one-line reason.
    """
    wanted = devices.parse(text)
    count = 0 if wanted.kind == "recorded" else _gpu_count()
    if wanted.kind == "recorded" or (wanted.kind == "auto" and count == 0):
        return devices.recorded_source(results, wanted)
    if wanted.index >= count:
        raise devices.DeviceError(f"device: {text!r}: this machine has {count} CUDA devices")
    return Gpu(wanted.index)


def runner(source: Source) -> Runner:
    """Make the runner of a source."""
    match source:
        case Gpu(index):
            return GpuRunner(index)
        case Recorded():
            return RecordedRunner(source.folder)


def _gpu_count() -> int:
    """CUDA devices, without creating a context in this process."""
    if not any(Path("/dev").glob("nvidia*")) and not Path("/dev/dxg").exists():
        return 0
    import torch  # heavy: a machine without a GPU does without

    return torch.cuda.device_count()
