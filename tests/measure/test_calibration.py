"""Ceilings on a made-up device, and the kernels that find them, under Triton's interpreter and
compiled."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kdabench.data.roofline import Roofline
from kdabench.measure import calibration
from kdabench.measure.calibration import BLOCKS, CalibrationError, Load, calibrate
from kdabench.measure.journal import JournalError

ROOT = Path(__file__).parents[2]
TRUE = Roofline(read_bytes_per_us=4.4e6, update_bytes_per_us=4.2e6, launch_us=0.9)
POOL_BYTES = 64 * 50_000_000
PEAK = 4.9e6


class MadeUp:
    """A device with these ceilings. Blocks but the second are 4 % slower; replaying a graph costs
    1.5 us.

    noise  of a reading, one-sided; by what a load is
    lost   microseconds that a launch loses at its start and end
    """

    def __init__(self, noise: dict[str, float], lost_us: float = 0.0) -> None:
        self.noise, self.lost_us = noise, lost_us
        self.random = random.Random(0)
        self.prepared: list[Load] = []

    def prepare(self, load: Load) -> Callable[[], float]:
        self.prepared.append(load)
        return lambda: self.read(load)

    def read(self, load: Load) -> float:
        us = TRUE.launch_us
        if load.what != "launch":
            bandwidth = {"read": TRUE.read_bytes_per_us, "update": TRUE.update_bytes_per_us}
            slow = 1.0 if load.block == BLOCKS[1] else 1.04
            us += slow * load.launch_bytes / bandwidth[load.what] + self.lost_us
        return us * (1 + self.random.random() * self.noise.get(load.what, 0.002)) + (
            1.5 / load.launches
        )


def test_the_ceilings_of_a_made_up_device_are_found() -> None:
    found, timings = calibrate(MadeUp({}).prepare, POOL_BYTES, PEAK)
    assert found.launch_us == pytest.approx(TRUE.launch_us, rel=0.005)
    assert found.read_bytes_per_us == pytest.approx(TRUE.read_bytes_per_us, rel=0.01)
    assert found.update_bytes_per_us == pytest.approx(TRUE.update_bytes_per_us, rel=0.01)
    assert len(timings) == 2 + 2 * 3 * len(BLOCKS)
    assert all(timing.steady for timing in timings)


def test_every_pass_moves_the_whole_pool_by_slices_far_beyond_the_cache() -> None:
    loads = list(calibration.passes(POOL_BYTES))
    assert {load.what for load in loads} == {"read", "update"}
    for load in loads:
        moved = {"read": POOL_BYTES, "update": 2 * POOL_BYTES}[load.what]
        assert load.launches * load.launch_bytes == moved
        assert load.launch_bytes >= 8 * 50_000_000


def test_a_load_that_settles_late_is_timed_again() -> None:
    device = MadeUp({})
    calm, readings = device.read, 0

    def read(load: Load) -> float:
        nonlocal readings
        readings += load.what == "launch"
        return calm(load) * (1.5 if readings % 3 and readings < 18 else 1)

    device.read = read  # type: ignore[method-assign]
    found, _ = calibrate(device.prepare, POOL_BYTES, PEAK)
    assert readings > 2 * 18
    assert found.launch_us == pytest.approx(TRUE.launch_us, rel=0.005)


@pytest.mark.parametrize("what", ["launch", "read", "update"])
def test_what_is_not_steady_is_no_ceiling(what: str) -> None:
    with pytest.raises(CalibrationError, match=rf"^{what}: spread .*%: at most [25]%"):
        calibrate(MadeUp({what: 0.2}).prepare, POOL_BYTES, PEAK)


def test_one_steady_shape_is_enough() -> None:
    device = MadeUp({})
    calm = device.read

    def read(load: Load) -> float:
        jumps = load.what == "read" and load.block == BLOCKS[0]
        return calm(load) * (1 + device.random.random() * jumps)

    device.read = read  # type: ignore[method-assign]
    found, timings = calibrate(device.prepare, POOL_BYTES, PEAK)
    assert found.read_bytes_per_us == pytest.approx(TRUE.read_bytes_per_us, rel=0.01)
    assert not all(timing.steady for timing in timings)


def test_a_bandwidth_that_still_grows_with_the_slice_is_no_ceiling() -> None:
    with pytest.raises(CalibrationError, match=r"^read: .* TB/s with the two largest slices: 3%"):
        calibrate(MadeUp({}, lost_us=20.0).prepare, POOL_BYTES, PEAK)


def test_nothing_is_faster_than_the_memory() -> None:
    with pytest.raises(
        CalibrationError, match=r"^read: 4.* TB/s: at most 4.300, the memory's peak"
    ):
        calibrate(MadeUp({}).prepare, POOL_BYTES, 4.3e6)
    assert calibrate(MadeUp({}).prepare, POOL_BYTES, None)[0].read_bytes_per_us > 4.3e6


def test_a_longer_chain_takes_longer() -> None:
    def prepare(load: Load) -> Callable[[], float]:
        return lambda: 100.0 / load.launches**2

    with pytest.raises(CalibrationError, match=r"^launch: .*: the longer chain must take longer"):
        calibrate(prepare, POOL_BYTES, PEAK)


def test_what_is_written_down_says_how_and_where() -> None:
    roofline, timings = calibrate(MadeUp({}).prepare, POOL_BYTES, PEAK)
    found = calibration.ceilings(roofline, timings, {"gpu": "SYNTHETIC ONE"})
    assert found.roofline == roofline
    assert found.env["gpu"] == "SYNTHETIC ONE"
    first = found.readings[0]
    assert first["what"], first["launches"] == ("launch", calibration.CHAINS[0])
    assert first["best_us"] == pytest.approx(0.9 + 1.5 / 100, rel=0.01)


# --- the process


@pytest.mark.parametrize("error", [CalibrationError("made up"), JournalError("busy")])
def test_a_childs_errors_are_told(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    assert told(error, monkeypatch) is error
    other = told(KeyError("no such thing"), monkeypatch)
    assert isinstance(other, CalibrationError)
    assert str(other) == "KeyError: 'no such thing'"


def told(error: Exception, monkeypatch: pytest.MonkeyPatch) -> Any:
    """What a measuring process sends if this is raised in it."""
    from kdabench.measure import streams

    def measure(index: int) -> Any:
        raise error

    sent: list[Any] = []
    monkeypatch.setattr(streams, "measure", measure)
    pipe: Any = type("Pipe", (), {"send": lambda self, value: sent.append(value)})()
    calibration._child(pipe, 0)
    (answer,) = sent
    return answer


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_the_process_says_so_in_one_line() -> None:
    with pytest.raises(CalibrationError) as error:
        calibration.on_gpu(0)
    assert "\n" not in str(error.value)


# --- the kernels


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton runs compiled here")
@pytest.mark.parametrize("what", ["launch", "read", "update"])
def test_kernels_do_what_is_timed(what: Any) -> None:
    from kdabench.measure import streams

    launches, block = 4, BLOCKS[0]
    elements = 2 * launches * streams.STEPS * block
    seeded = torch.Generator().manual_seed(1)
    pool = torch.randint(-(2**31), 2**31, (elements,), dtype=torch.int32, generator=seeded)
    sums = torch.zeros(elements // (streams.STEPS * block), dtype=torch.int32)
    kept, before = pool.clone(), int(pool.sum(dtype=torch.int64))
    load = Load(what, launches, 4 * elements // launches, block)
    for i in range(launches):
        assert (streams.verdict(load, pool, sums, before) is None) == (what == "launch")
        streams.launch(load, i, pool, sums)
    assert streams.verdict(load, pool, sums, before) is None
    added = 1 if what == "update" else 0
    assert torch.equal(pool, kept + added)
    pool[-1] += 1
    if what == "read":
        sums[-1] += 1
    assert "the sum is" in str(streams.verdict(load, pool, sums, before))


@pytest.mark.parametrize("l2_bytes", [1, 40 << 20, 62_914_560, 132_644_864])
def test_a_pool_is_many_caches_in_whole_programs(l2_bytes: int) -> None:
    from kdabench.measure import streams

    elements = streams.pool_elements(l2_bytes)
    assert 4 * elements >= calibration.POOL_L2S * l2_bytes
    for launches in calibration.SLICES:
        for block in BLOCKS:
            assert elements % (launches * streams.STEPS * block) == 0


COMPILE = """\
import sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from kdabench.measure import stream_kernels, streams
for block in streams.BLOCKS:
    for name, pointers in ("read_kernel", ("pool", "sums")), ("update_kernel", ("pool",)):
        signature = dict.fromkeys(pointers, "*i32") | {"BLOCK": "constexpr", "STEPS": "constexpr"}
        at = len(pointers)
        constants = {(at,): block, (at + 1,): streams.STEPS}
        aligned = {(i,): [["tt.divisibility", 16]] for i in range(at)}
        source = ASTSource(getattr(stream_kernels, name), signature, constants, aligned)
        made = triton.compile(source, GPUTarget("cuda", int(sys.argv[1]), 32),
                              {"num_warps": streams.warps(block)})
        ptx = made.asm["ptx"]
        print(name, block, ptx.count("ld.global.v4"), ptx.count("st.global.v4"))
source = ASTSource(stream_kernels.empty_kernel, {"pool": "*i32"}, {}, {})
empty = triton.compile(source, GPUTarget("cuda", int(sys.argv[1]), 32)).asm["ptx"]
print("empty_kernel", empty.count("ld.global") + empty.count("st.global"))
"""


@pytest.mark.parametrize("arch", [90, 100])
def test_kernels_stream_by_16_bytes(arch: int) -> None:
    """Four loads of 16 bytes for each of the steps of a thread, and as many stores."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    run = subprocess.run(
        [sys.executable, "-c", COMPILE, str(arch)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stderr
    lines = run.stdout.splitlines()
    assert lines.pop() == "empty_kernel 0"
    assert lines == [
        f"{name} {block} 16 {stores}"
        for block in BLOCKS
        for name, stores in (("read_kernel", 0), ("update_kernel", 16))
    ]
