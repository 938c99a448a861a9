"""Ceilings of the GPU at hand: they are found, twice the same, and lie where memory can be."""

from __future__ import annotations

import time

import pytest
import torch

from kdabench.data.roofline import CEILINGS
from kdabench.measure import calibration
from kdabench.measure.cell_bench import Device
from kdabench.measure.telemetry import Telemetry

pytestmark = pytest.mark.gpu


def test_ceilings_are_found_in_seconds_and_twice_the_same() -> None:
    began = time.monotonic()
    first = calibration.on_gpu(0)
    assert time.monotonic() - began < 60  # in an empty cache of Triton's
    again = calibration.on_gpu(0).roofline
    for name in CEILINGS:
        assert getattr(again, name) == pytest.approx(getattr(first.roofline, name), rel=0.05)
    assert first.env["gpu"] == torch.cuda.get_device_name(0)


def test_plain_streams_come_near_the_memorys_peak() -> None:
    device = Device.current()
    peak = device.knowing(Telemetry(device.uuid, device.pci_id)).peak_bytes_per_us
    if peak is None:
        pytest.skip("neither torch nor NVML says how fast the memory is")
    found = calibration.on_gpu(0).roofline
    assert 0.75 * peak < found.update_bytes_per_us <= peak
    assert 0.8 * peak < found.read_bytes_per_us <= peak
    assert 0.2 < found.launch_us < 5
