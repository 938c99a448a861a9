"""The GPU's own state while it is measured, by NVML. Read only: clocks and limits are never set."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# Reasons that lower the clock below what the load asks for: power cap, hardware and software thermal, power brake.
_THROTTLE_MASK = 0x4 | 0x8 | 0x20 | 0x40 | 0x80


@dataclass(frozen=True)
class GpuState:
    sm_clock_mhz: int | None
    throttled: bool | None


class Telemetry:
    """NVML's view of one CUDA device, matched by UUID. Without NVML every reading is None."""

    def __init__(self, uuid: str) -> None:
        self._handle: Any = None
        try:
            import pynvml

            pynvml.nvmlInit()
            self._nvml = pynvml
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(uuid if uuid.startswith("GPU-") else f"GPU-{uuid}")
        except (ImportError, OSError) as reason:
            self.reason: str | None = str(reason)
        except Exception as reason:
            # NVML's own errors share no importable base class where the library is missing.
            self.reason = f"{type(reason).__name__}: {reason}"
        else:
            self.reason = None

    def state(self) -> GpuState:
        if self._handle is None:
            return GpuState(None, None)
        try:
            clock = self._nvml.nvmlDeviceGetClockInfo(self._handle, self._nvml.NVML_CLOCK_SM)
            reasons = self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(self._handle)
        except self._nvml.NVMLError:
            return GpuState(None, None)
        return GpuState(int(clock), bool(reasons & _THROTTLE_MASK))

    def describe(self) -> dict[str, Any]:
        """Driver, power limit, ECC, MIG and maximum clocks; None where NVML doesn't say."""
        if self._handle is None:
            return {
                "driver": None,
                "power_limit_w": None,
                "ecc": None,
                "mig": None,
                "sm_clock_max_mhz": None,
                "memory_clock_max_mhz": None,
                "pci_id": None,
            }
        nvml, handle = self._nvml, self._handle

        def ask(question: Any, *arguments: Any) -> Any:
            try:
                return question(handle, *arguments)
            except nvml.NVMLError:
                return None

        power = ask(nvml.nvmlDeviceGetEnforcedPowerLimit)
        ecc, mig = ask(nvml.nvmlDeviceGetEccMode), ask(nvml.nvmlDeviceGetMigMode)
        pci = ask(nvml.nvmlDeviceGetPciInfo)
        bus_id = getattr(pci, "busId", None)
        return {
            "driver": nvml.nvmlSystemGetDriverVersion(),
            "power_limit_w": None if power is None else power // 1000,
            "ecc": None if ecc is None else bool(ecc[0]),
            "mig": None if mig is None else bool(mig[0]),
            "sm_clock_max_mhz": ask(nvml.nvmlDeviceGetMaxClockInfo, nvml.NVML_CLOCK_SM),
            "memory_clock_max_mhz": ask(nvml.nvmlDeviceGetMaxClockInfo, nvml.NVML_CLOCK_MEM),
            "pci_id": bus_id.decode() if isinstance(bus_id, bytes) else bus_id,
        }
