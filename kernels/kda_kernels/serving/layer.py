"""A KDA layer as a serving engine holds it: its weights and its caches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kda_kernels.problem import HEAD_DIM, StateDtype
from kda_kernels.tensors import check_tensor

STATE_DTYPE: dict[torch.dtype, StateDtype] = {torch.float32: "fp32", torch.bfloat16: "bf16"}
"""Names of the types that states, windows and convolution weights may have."""


@dataclass(frozen=True)
class LayerWeights:
    """A layer's parameters as a model keeps them. Reloads must write into these same tensors.

    conv_weight  [3D, 1, 4]     f32 or bf16, depthwise: q, k, v
    conv_bias    [3D] or None   f32 or bf16
    f_b          [D, 128]       bf16
    A_log        H elements     f32
    dt_bias      [D]            f32
    norm_weight  [128]          any float
    """

    conv_weight: Tensor
    conv_bias: Tensor | None
    f_b: Tensor
    A_log: Tensor
    dt_bias: Tensor
    norm_weight: Tensor
    lower_bound: float | None = -5.0
    scale: float = HEAD_DIM**-0.5
    eps: float = 1e-5


@dataclass(frozen=True)
class Caches:
    """A layer's caches, `StepOperands` says their shapes. Meta tensors will do to see what
    `prepare` would choose.

    corrections, key_gates, record_rows   all or none: with them verifies are of kind record
    record_rows   [>= R] int32: entry b is the record row of the step's request b
    pending       [>= rows] int32: tokens of each record row's last window that are accepted but not
                  folded in yet; the same tensor in all layers. With it commits are deferred: an
                  FP32 state, records and a bounded gate are needed
    """

    state: Tensor
    conv_state: Tensor
    corrections: Tensor | None = None
    key_gates: Tensor | None = None
    record_rows: Tensor | None = None
    pending: Tensor | None = None


def check_own(
    name: str,
    tensor: Tensor,
    shape: tuple[int | None, ...],
    dtypes: tuple[torch.dtype, ...],
    dense_from: int = 0,
) -> None:
    """`check_tensor` on whatever device the tensor is."""
    check_tensor(name, tensor, shape, dtypes, tensor.device, dense_from)


def stream_handle(stream: Any, device: torch.device) -> Any:
    """The stream's handle; on a GPU None is the current stream."""
    if stream is None and device.type == "cuda":
        stream = torch.cuda.current_stream(device)
    return stream.cuda_stream if isinstance(stream, torch.cuda.Stream) else stream
