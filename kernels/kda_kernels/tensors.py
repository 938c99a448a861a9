"""Checks of torch operands, and launching on a caller's stream, for the host side of the
kernels."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def on_stream(stream: Any, device: torch.device) -> AbstractContextManager[Any]:
    """Makes a stream, torch's own or a handle, current. None is for the CPU, and only for it:
    ValueError otherwise."""
    if device.type != "cuda":
        if stream is not None:
            raise ValueError(f"{stream=} with operands on {device}")
        return nullcontext()
    if stream is None:
        raise ValueError(f"stream=None with operands on {device}")
    if not isinstance(stream, torch.cuda.Stream):
        # Handle 0 is the default stream, which is no external one.
        external: Any = torch.cuda.ExternalStream
        stream = external(int(stream), device) if int(stream) else torch.cuda.default_stream(device)
    return torch.cuda.stream(stream)


def check_tensor(
    name: str,
    tensor: Tensor,
    shape: tuple[int | None, ...],
    dtypes: tuple[torch.dtype, ...],
    device: torch.device,
    dense_from: int = 0,
) -> None:
    """Raises ValueError unless the tensor fits; None is any size, dimensions from `dense_from` on
    are contiguous."""
    if tensor.ndim != len(shape) or any(
        w not in (None, g) for w, g in zip(shape, tensor.shape, strict=True)
    ):
        wanted = ", ".join("any" if n is None else str(n) for n in shape)
        raise ValueError(f"{name}: shape {list(tensor.shape)} is not [{wanted}]")
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name}: {tensor.dtype} is not {' or '.join(map(str, dtypes))}")
    if tensor.device != device:
        raise ValueError(f"{name}: on {tensor.device}, not {device}")
    step = 1
    for size, stride in reversed(
        list(zip(tensor.shape, tensor.stride(), strict=True))[dense_from:]
    ):
        if size != 1 and stride != step:
            raise ValueError(
                f"{name}: strides {tensor.stride()} of shape {list(tensor.shape)} are not dense"
            )
        step *= size
