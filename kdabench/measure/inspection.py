"""What operands must be like before they are timed and after, and whether a launch kept what it only
reads."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from kda_kernels.operands import CommitOperands, Operands, StepOperands

_DENORMAL_PART = 0.01
_SAMPLED_ELEMENTS = 1 << 24
_RANDOM_FROM = 8
"""Slots from which on a sorted order can't be chance."""


def improper_inputs(operands: Operands) -> str | None:
    """Why operands must not be timed: slots that aren't distinct, in range, live and in random
    order; inputs that aren't numbers or are all alike. None if they may."""
    if isinstance(operands, CommitOperands):
        order, pages = operands.source, operands.states[0].shape[0]
        in_place = torch.equal(operands.source, operands.destination)
        slots = order if in_place else torch.cat([operands.source, operands.destination])
        values = [operands.corrections[0], operands.A_log]
    else:
        order = slots = operands.slots.flatten()
        pages = operands.state.shape[0]
        values = [operands.projected, operands.conv_state, operands.state, operands.dt_bias]
    if (slots.sort().values.diff() == 0).any():
        return "slots: not distinct"
    if slots.min() < 1 or slots.max() >= pages:
        return f"slots: {int(slots.min())}..{int(slots.max())}, beyond the pages 1..{pages - 1}"
    if len(order) >= _RANDOM_FROM and bool((order.diff() > 0).all() or (order.diff() < 0).all()):
        return "slots: in order; that flatters"
    for tensor in values:
        low, high = tensor.aminmax()
        if not (low.isfinite() and high.isfinite()):
            return "not all finite"
        if tensor.numel() > 1 and low == high:
            return "all alike"
    return None


def degenerate(operands: Operands) -> str | None:
    """Why a state can't be timed any more: not finite, or denormal, which is another arithmetic.
    None if it can."""
    tensors = list(mutated(operands))
    if isinstance(operands, StepOperands):
        tensors.append(operands.out)
    for tensor in tensors:
        if not all(end.isfinite() for end in tensor.aminmax()):
            return "not all finite"
        some = tensor[: max(1, _SAMPLED_ELEMENTS // tensor[:1].numel())]
        if (
            (some != 0) & (some.abs() < torch.finfo(some.dtype).tiny)
        ).float().mean() > _DENORMAL_PART:
            return f"over {_DENORMAL_PART:.0%} of the elements are denormal"
    return None


def bit_sum(tensor: Tensor) -> Tensor:
    """Sum of a tensor's elements taken as integers: changes with any one bit."""
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.view(integer).sum(dtype=torch.int64)


def constant(operands: Operands) -> Iterator[Tensor]:
    """The tensors that a launch only reads."""
    names: tuple[str, ...] = ("conv_weight", "conv_bias", "f_b", "A_log", "dt_bias", "norm_weight", "slots", "accepted",
                              "record_rows")  # fmt: skip
    if isinstance(operands, CommitOperands):
        names = (
            "A_log",
            "dt_bias",
            "source",
            "length",
            "destination",
            "record_rows",
            "state_table",
        )
    yield from (t for name in names if (t := getattr(operands, name)) is not None)


def mutated(operands: Operands) -> list[Tensor]:
    """The tensors that a launch updates from their own contents or beside live data."""
    if isinstance(operands, CommitOperands):
        return [operands.states[layer] for layer in checked_layers(operands)]
    found = [operands.state, operands.conv_state]
    if operands.pending is not None:
        assert operands.corrections is not None
        assert operands.key_gates is not None
        found += [
            operands.corrections,
            operands.key_gates,
        ]  # a replay folds the records that it finds
    return found


def checked_layers(operands: CommitOperands) -> list[int]:
    """Give the layers of a commit that are compared: the first and the last."""
    return sorted({0, len(operands.states) - 1})
