"""The GPU's own state while it is measured, by NVML. Read only: clocks and limits are never set."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

_REASONS = {
    0x4: "software power cap",
    0x8: "hardware slowdown",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "power brake",
}
"""What lowers the clock below what the load asks for, by NVML's bit."""
_THROTTLE_MASK = sum(_REASONS)


@dataclass(frozen=True)
class GpuState:
    """SM clock and whether something lowers it; None where the GPU doesn't say."""

    sm_clock_mhz: int | None
    throttled: bool | None


class Telemetry:
    """NVML's view of one CUDA device. Without NVML every reading is None.

    uuid     as torch gives it, with or without the prefix that tells a GPU from a MIG instance
    pci_id   domain:bus:device.function; tried if NVML doesn't know the UUID
    matched  "uuid", "pci id", or "absent: " and why
    """

    def __init__(self, uuid: str, pci_id: str | None = None) -> None:
        self._handle: Any = None
        self._whole: Any = None
        try:
            import pynvml

            pynvml.nvmlInit()
        except Exception as reason:
            # NVML's errors share no base class that could be imported where the library is missing.
            self.matched = f"absent: {_line(reason)}"
            return
        self._nvml = pynvml
        self.matched = self._match(uuid, pci_id)

    def _match(self, uuid: str, pci_id: str | None) -> str:
        nvml = self._nvml
        why = "no UUID and no PCI id"
        for how, question, name in _names(uuid, pci_id):
            try:
                self._handle = getattr(nvml, question)(name)
            except nvml.NVMLError as reason:
                why = _line(reason)
                continue
            self._whole = self._parent(self._handle)
            return how
        return f"absent: {why}"

    def _parent(self, handle: Any) -> Any:
        """The GPU that a MIG instance is a part of, which knows the clocks; a whole GPU itself."""
        try:
            if self._nvml.nvmlDeviceIsMigDeviceHandle(handle):
                return self._nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle)
        except (AttributeError, self._nvml.NVMLError):
            pass
        return handle

    def _ask(self, question: str, *arguments: Any) -> Any:
        """The answer of the whole GPU, or None if it has none."""
        if self._whole is None:
            return None
        try:
            return getattr(self._nvml, question)(self._whole, *arguments)
        except (AttributeError, self._nvml.NVMLError):
            return None

    def state(self) -> GpuState:
        """SM clock and throttling: two short questions, for every sample."""
        if self._whole is None:
            return GpuState(None, None)
        mhz = self._ask("nvmlDeviceGetClockInfo", self._nvml.NVML_CLOCK_SM)
        reasons = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons")
        throttled = None if reasons is None else bool(reasons & _THROTTLE_MASK)
        return GpuState(None if mhz is None else int(mhz), throttled)

    def round_state(self) -> dict[str, Any]:
        """Of each round: clocks in MHz, what lowers them, degrees Celsius, watts. Empty without
        NVML."""
        if self._whole is None:
            return {}
        nvml = self._nvml
        reasons = self._ask("nvmlDeviceGetCurrentClocksThrottleReasons")
        power_mw = self._ask("nvmlDeviceGetPowerUsage")
        return {
            "sm_clock_mhz": self._ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_SM),
            "memory_clock_mhz": self._ask("nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM),
            "throttle": None
            if reasons is None
            else [name for bit, name in _REASONS.items() if reasons & bit],
            "temperature_c": self._ask("nvmlDeviceGetTemperature", nvml.NVML_TEMPERATURE_GPU),
            "power_w": None if power_mw is None else round(power_mw / 1000),
        }

    @property
    def full_clock_mhz(self) -> int | None:
        """The highest SM clock; None where NVML doesn't say."""
        return (
            None
            if self._whole is None
            else self._ask("nvmlDeviceGetMaxClockInfo", self._nvml.NVML_CLOCK_SM)
        )

    def peak_bytes_per_us(self) -> float | None:
        """Of the memory at its highest clock, two transfers a clock; None where NVML doesn't
        say."""
        if self._whole is None:
            return None
        mhz = self._ask("nvmlDeviceGetMaxClockInfo", self._nvml.NVML_CLOCK_MEM)
        bits = self._ask("nvmlDeviceGetMemoryBusWidth")
        return 2 * mhz * bits / 8 if mhz and bits else None

    def describe(self) -> dict[str, Any]:
        """Driver, power limit, ECC, MIG and maximum clocks; None where NVML doesn't say."""
        if self._whole is None:
            return {
                "driver": None,
                "power_limit_w": None,
                "ecc": None,
                "mig": None,
                "sm_clock_max_mhz": None,
                "memory_clock_max_mhz": None,
                "pci_id": None,
                "nvml": self.matched,
            }
        nvml = self._nvml
        power_mw = self._ask("nvmlDeviceGetEnforcedPowerLimit")
        ecc, mig = self._ask("nvmlDeviceGetEccMode"), self._ask("nvmlDeviceGetMigMode")
        bus_id = getattr(self._ask("nvmlDeviceGetPciInfo"), "busId", None)
        return {
            "driver": nvml.nvmlSystemGetDriverVersion(),
            "power_limit_w": None if power_mw is None else power_mw // 1000,
            "ecc": None if ecc is None else bool(ecc[0]),
            "mig": None if mig is None else bool(mig[0]),
            "sm_clock_max_mhz": self.full_clock_mhz,
            "memory_clock_max_mhz": self._ask("nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_MEM),
            "pci_id": bus_id.decode() if isinstance(bus_id, bytes) else bus_id,
            "nvml": self.matched,
        }


def _names(uuid: str, pci_id: str | None) -> Iterator[tuple[str, str, str]]:
    """How a device may be found: what is matched, NVML's question, and the name to ask for."""
    if uuid:
        names = [uuid] if uuid.startswith(("GPU-", "MIG-")) else [f"GPU-{uuid}", f"MIG-{uuid}"]
        yield from (("uuid", "nvmlDeviceGetHandleByUUID", name) for name in names)
    if pci_id:
        yield "pci id", "nvmlDeviceGetHandleByPciBusId", pci_id


def _line(reason: BaseException) -> str:
    return " ".join(f"{type(reason).__name__}: {reason}".split())[:200]
