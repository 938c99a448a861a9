"""What a kernel must know of the GPU it is compiled or checked for."""

from __future__ import annotations

from dataclasses import dataclass

ARCHS = ("sm_90a", "sm_100a", "sm_103a")
"""Targets the kernels are written for."""

SM_REGISTERS = 65_536
SM_SMEM_BYTES = 233_472  # 228 KiB
RESERVED_SMEM_BYTES = 1_024
"""Of shared memory, taken by the system for each CTA."""

_SMEM_PER_BLOCK = 232_448  # 227 KiB, the opt-in limit of every target above


@dataclass(frozen=True)
class Gpu:
    """arch: a target of `ARCHS`; sms: multiprocessors; smem_per_block: bytes a block may opt in
    to."""

    arch: str
    sms: int
    smem_per_block: int = _SMEM_PER_BLOCK

    def __post_init__(self) -> None:
        if self.arch not in ARCHS:
            raise ValueError(f"arch={self.arch!r} is not one of {', '.join(ARCHS)}")
        if self.sms < 1:
            raise ValueError(f"sms={self.sms} must be >= 1")


def current_gpu() -> Gpu:
    """The current CUDA device. Raises RuntimeError if there is none, ValueError if its architecture
    has no kernels."""
    import torch

    if not torch.cuda.is_available():
        raise RuntimeError("no CUDA device is available")
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    arch = f"sm_{properties.major}{properties.minor}a"
    return Gpu(
        arch,
        properties.multi_processor_count,
        getattr(properties, "shared_memory_per_block_optin", _SMEM_PER_BLOCK),
    )
