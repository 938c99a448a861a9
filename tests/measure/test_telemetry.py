"""What NVML says of a device, matched in every way it can be, and the clock that reads it; on a
made-up NVML."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from kdabench.data.measurements import Candidate
from kdabench.measure import cuda_graphs, telemetry
from kdabench.measure.clock import ExhaustedError
from kdabench.measure.telemetry import GpuState, Telemetry

UUID = "1a074ddc-c474-6da7-379d-49b5fa83532b"
PCI = "00000000:0f:00.0"


class NVMLError(Exception):
    pass


def nvml(names: dict[str, str], **changes: Any) -> Any:
    """A driver that knows devices by these names; a device that starts with MIG is a part of
    "GPU"."""

    def by_name(name: str) -> str:
        if name not in names:
            raise NVMLError("Not Found")
        return names[name]

    def of_whole_gpu(answer: Any) -> Any:
        def ask(handle: str, *arguments: Any) -> Any:
            if handle.startswith("MIG"):
                raise NVMLError("Not Supported")
            return answer(*arguments) if callable(answer) else answer

        return ask

    answers: dict[str, Any] = {
        "nvmlDeviceGetClockInfo": lambda which: {"sm": 1980, "memory": 3201}[which],
        "nvmlDeviceGetMaxClockInfo": lambda which: {"sm": 1980, "memory": 3201}[which],
        "nvmlDeviceGetCurrentClocksThrottleReasons": 0x4 | 0x40,
        "nvmlDeviceGetTemperature": 61,
        "nvmlDeviceGetPowerUsage": 412_345,
        "nvmlDeviceGetMemoryBusWidth": 6144,
        "nvmlDeviceGetEnforcedPowerLimit": 700_000,
        "nvmlDeviceGetEccMode": (1, 1),
        "nvmlDeviceGetMigMode": (1, 1),
        "nvmlDeviceGetPciInfo": SimpleNamespace(busId=b"00000000:0F:00.0"),
    } | changes
    return SimpleNamespace(
        NVMLError=NVMLError,
        NVML_CLOCK_SM="sm",
        NVML_CLOCK_MEM="memory",
        NVML_TEMPERATURE_GPU=0,
        nvmlInit=lambda: None,
        nvmlSystemGetDriverVersion=lambda: "580.1",
        nvmlDeviceGetHandleByUUID=by_name,
        nvmlDeviceGetHandleByPciBusId=by_name,
        nvmlDeviceIsMigDeviceHandle=lambda handle: handle.startswith("MIG"),
        nvmlDeviceGetDeviceHandleFromMigDeviceHandle=lambda handle: "GPU",
        **{name: of_whole_gpu(answer) for name, answer in answers.items() if answer is not None},
    )


@pytest.mark.parametrize(
    ("known", "uuid", "pci_id", "matched"),
    [
        ({f"GPU-{UUID}": "GPU"}, UUID, None, "uuid"),
        ({f"GPU-{UUID}": "GPU"}, f"GPU-{UUID}", PCI, "uuid"),
        ({f"MIG-{UUID}": "MIG 0"}, UUID, None, "uuid"),
        ({f"MIG-{UUID}": "MIG 0"}, f"MIG-{UUID}", None, "uuid"),
        ({PCI: "GPU"}, UUID, PCI, "pci id"),
        ({PCI: "GPU"}, "", PCI, "pci id"),
    ],
)
def test_a_device_is_found(
    known: dict[str, str],
    uuid: str,
    pci_id: str | None,
    matched: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", nvml(known))
    found = Telemetry(uuid, pci_id)
    assert found.matched == matched
    assert found.state() == GpuState(1980, True)
    assert found.round_state() == {
        "sm_clock_mhz": 1980,
        "memory_clock_mhz": 3201,
        "throttle": ["software power cap", "hardware thermal slowdown"],
        "temperature_c": 61,
        "power_w": 412,
    }
    assert found.peak_bytes_per_us() == pytest.approx(4.917e6, rel=1e-3)
    assert found.describe() == {
        "driver": "580.1", "power_limit_w": 700, "ecc": True, "mig": True, "sm_clock_max_mhz": 1980,
        "memory_clock_max_mhz": 3201, "pci_id": "00000000:0F:00.0", "nvml": matched,
    }  # fmt: skip


def broken_driver() -> Any:
    def refuse() -> None:
        raise NVMLError("Driver Not Loaded")

    return SimpleNamespace(NVMLError=NVMLError, nvmlInit=refuse)


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (None, "ModuleNotFoundError"),
        (broken_driver(), "Driver Not Loaded"),
        (nvml({}), "NVMLError: Not Found"),
    ],
)
def test_an_absent_nvml_is_tolerated_and_labelled(
    module: Any, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", module)
    found = Telemetry(UUID, PCI)
    assert found.matched.startswith("absent: ")
    assert why in found.matched
    assert found.state() == GpuState(None, None)
    assert found.round_state() == {}
    assert found.full_clock_mhz is None
    assert found.peak_bytes_per_us() is None
    described = found.describe()
    assert described.pop("nvml") == found.matched
    assert set(described.values()) == {None}


def test_what_nvml_does_not_answer_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    lacking = nvml(
        {PCI: "GPU"}, nvmlDeviceGetCurrentClocksThrottleReasons=None, nvmlDeviceGetEccMode=None
    )
    monkeypatch.setitem(sys.modules, "pynvml", lacking)
    found = Telemetry(UUID, PCI)
    assert found.state() == GpuState(1980, None)
    assert found.describe()["ecc"] is None
    assert set(found.describe()) == set(telemetry.Telemetry.describe(found))


STEP = Candidate.of("KdaSplit", {"split": 1})


class Graphs:
    """A GraphClock without a GPU: graph replays move a made-up time on, in us. A list of times is used up
    one by one."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, states: list[GpuState], **times: float | list[float]
    ) -> None:
        self.told: list[str] = []
        self.now = 0.0
        made = self

        class Event:
            at = 0.0

            def __init__(self, enable_timing: bool) -> None: ...
            def synchronize(self) -> None: ...
            def record(self) -> None:
                self.at = made.now

            def elapsed_time(self, end: Event) -> float:
                return (end.at - self.at) / 1e3

        def graph(name: str) -> SimpleNamespace:
            def replay() -> None:
                taken = times[name]
                made.now += taken.pop(0) if isinstance(taken, list) else taken

            return SimpleNamespace(replay=replay)

        monkeypatch.setattr(cuda_graphs.torch.cuda, "Event", Event)
        monkeypatch.setattr(cuda_graphs.torch.cuda, "stream", lambda stream: nullcontext())
        monkeypatch.setattr(cuda_graphs.torch.cuda, "_sleep", lambda cycles: None)
        monkeypatch.setattr(
            cuda_graphs.time, "sleep", lambda seconds: self.told.append(f"rest {seconds} s")
        )
        step, neighbours = (cuda_graphs.Timed(graph(name), 10) for name in ("step", "neighbours"))  # type: ignore[arg-type]
        source = SimpleNamespace(state=lambda: states.pop(0), round_state=lambda: {"power_w": 1})
        self.clock = cuda_graphs.GraphClock(
            {STEP: step}, neighbours if "neighbours" in times else None, source, None,  # type: ignore[arg-type]
            lambda c: self.told.append(c.variant), slowed_mhz=1782,
        )  # fmt: skip


def test_the_neighbours_are_taken_off_and_the_candidate_announced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Graphs(monkeypatch, [GpuState(1980, False)], step=300.0, neighbours=250.0)
    made.clock.begin_round(0)
    reading = made.clock.read(STEP)
    assert reading.time_us == pytest.approx(5.0)
    assert (reading.sm_clock_mhz, reading.throttled) == (1980, False)
    assert made.told == ["KdaSplit"]
    assert made.clock.round_state == {"power_w": 1}


def test_a_drift_of_the_clocks_hits_neighbours_and_step_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Graphs(monkeypatch, [GpuState(1980, False)], step=[310.0], neighbours=[250.0, 270.0])
    made.clock.begin_round(0)
    assert made.clock.read(STEP).time_us == pytest.approx(5.0)


def test_without_neighbours_a_graph_replay_is_the_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Graphs(monkeypatch, [GpuState(1980, False)], step=300.0)
    assert made.clock.read(STEP).time_us == pytest.approx(30.0)


def test_after_a_throttled_round_the_gpu_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    states = [GpuState(1700, True), GpuState(1900, True), GpuState(1980, False)]
    made = Graphs(monkeypatch, states, step=300.0, neighbours=250.0)
    for index in range(3):
        made.clock.begin_round(index)
        made.clock.read(STEP)
    assert [word for word in made.told if word != "KdaSplit"] == ["rest 0.1 s"]


def test_neighbours_that_take_longer_than_all_leave_no_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = Graphs(monkeypatch, [], step=240.0, neighbours=250.0)
    made.clock.begin_round(0)
    with pytest.raises(ExhaustedError, match="baseline's noise exceeds the step"):
        made.clock.read(STEP)


def test_the_launched_kernel_is_asserted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        cuda_graphs,
        "kernel_names",
        lambda graph: ["gemm", "kernel_kda_wide_0", "kernel_kda_wide_0"],
    )
    cuda_graphs.require_kernels(None, ("kda_wide",), 2)  # type: ignore[arg-type]
    with pytest.raises(
        cuda_graphs.WrongKernelError,
        match="expected 2 launches of kda_split, the graph has 0 of them",
    ):
        cuda_graphs.require_kernels(None, ("kda_split",), 2)  # type: ignore[arg-type]
    with pytest.raises(
        cuda_graphs.WrongKernelError, match="has 2 of them; it launches gemm, kernel_kda_wide_0"
    ):
        cuda_graphs.require_kernels(None, ("kda_wide",), 3)  # type: ignore[arg-type]
