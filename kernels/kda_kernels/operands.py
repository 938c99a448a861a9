"""Operands of one layer step, of one commit, and how to make realistic or awkward ones.

Shapes, dtypes and layouts are those of docs/operation.md, "Inputs of one layer step" and "Commit".
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from kda_kernels.problem import HEAD_DIM, Problem

Inputs = Literal["model", "generic"]

_TORCH_DTYPE = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class StepOperands:
    """One layer of a decode, spec, record or replay step. B = requests * tokens, D = 128 * heads.

    projected    [B, pitch]                 bf16   q, k, v | output gate | f_a | raw beta
    conv_weight  [3, 4, D]                  f32 or bf16
    conv_bias    [3D] or None               f32 or bf16
    conv_state   [slots, 3D, W]             bf16 or f32; in memory dim-first, or window-major (a
                 transposed view)
    f_b          [D, 128]                   bf16
    A_log        [H]                        f32
    dt_bias      [D]                        f32
    norm_weight  [128]                      f32
    state        [slots, H, V=128, K=128]   f32 or bf16; the slot stride may be padded
    slots        [R] decode, [R, q] spec, [R, 1] record and replay    int32
    out          [B, D]                     bf16
    accepted     [R]                        int32, spec
    corrections  [rows, H, Q, 128]          f32, record and replay
    key_gates    [rows, H, Q, 256]          bf16, record and replay
    record_rows  [R]                        int32, record and replay
    pending      [rows]                     int32, replay

    lower_bound is negative, or None for the unbounded gate (stock only).
    """

    projected: Tensor
    conv_weight: Tensor
    conv_bias: Tensor | None
    conv_state: Tensor
    f_b: Tensor
    A_log: Tensor
    dt_bias: Tensor
    norm_weight: Tensor
    state: Tensor
    slots: Tensor
    out: Tensor
    accepted: Tensor | None = None
    corrections: Tensor | None = None
    key_gates: Tensor | None = None
    record_rows: Tensor | None = None
    pending: Tensor | None = None
    lower_bound: float | None = -5.0
    scale: float = HEAD_DIM**-0.5
    eps: float = 1e-5


@dataclass(frozen=True)
class CommitOperands:
    """One commit over L layers. The tensors of each layer stay where they are; kernels find them by
    address tables.

    states         L x [slots, H, 128, 128]      f32 or bf16, equal shapes
    corrections    L x [rows, H, Q, 128]         f32
    key_gates      L x [rows, H, Q, 256]         bf16
    A_log          [L, H]        f32
    dt_bias        [L, H, 128]   f32
    source, length, destination        [R]  int32   a request commits if length > 0 and both slots
                                       are > 0
    record_rows    [R]  int32   row of request b's records; b itself for an eager commit
    boundary_length, boundary_slot     [R]  int32, or None   align: also store the state after this
                                       many tokens
    state_table, corrections_table, key_gates_table   [L, 2]  int64   base address, slot or row
                                                      stride in elements
    """

    states: tuple[Tensor, ...]
    corrections: tuple[Tensor, ...]
    key_gates: tuple[Tensor, ...]
    A_log: Tensor
    dt_bias: Tensor
    source: Tensor
    length: Tensor
    destination: Tensor
    record_rows: Tensor
    boundary_length: Tensor | None
    boundary_slot: Tensor | None
    state_table: Tensor
    corrections_table: Tensor
    key_gates_table: Tensor
    lower_bound: float = -5.0


Operands = StepOperands | CommitOperands


def address_table(tensors: tuple[Tensor, ...]) -> Tensor:
    """Base address and leading stride (elements) per tensor: `[L, 2]` int64 on their device."""
    rows = [(t.data_ptr(), t.stride(0)) for t in tensors]
    return torch.tensor(rows, dtype=torch.int64, device=tensors[0].device)


def _generator(device: torch.device | str, seed: int) -> torch.Generator:
    return torch.Generator(device=device).manual_seed(seed)


def _gate_parameters(
    heads: int, inputs: Inputs, g: torch.Generator, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    """A_log [H], dt_bias [D]. model: A in 1..16 as models initialize it, slow to middling decay;
    generic: both wide."""
    if inputs == "model":
        A_log = torch.empty(heads, device=device).uniform_(1, 16, generator=g).log_()
        dt_bias = torch.empty(heads * HEAD_DIM, device=device).uniform_(-7, -2, generator=g)
        # The bias is that of softplus; with the bounded gate it gives decays from 0.2 to 1.
        return A_log, dt_bias / A_log.exp().repeat_interleave(HEAD_DIM)
    A_log = torch.empty(heads, device=device).normal_(0, 1, generator=g)
    return A_log, torch.empty(heads * HEAD_DIM, device=device).normal_(0, 2, generator=g)


def _padded(
    shape: tuple[int, ...], pad: int, dtype: torch.dtype, device: torch.device | str
) -> Tensor:
    """An empty tensor whose leading stride exceeds its rows by `pad` elements."""
    row = 1
    for n in shape[1:]:
        row *= n
    flat = torch.empty(shape[0], row + pad, dtype=dtype, device=device)
    inner = torch.empty(shape[1:], device="meta").stride()
    return flat.as_strided(shape, (row + pad, *inner))


def make_step(
    problem: Problem,
    *,
    seed: int,
    device: torch.device | str = "cuda",
    inputs: Inputs = "model",
    weights: StepOperands | None = None,
    pad: int = 0,
    null_requests: tuple[int, ...] = (),
    conv_bias: bool = True,
    lower_bound: float | Literal["problem"] | None = "problem",
) -> StepOperands:
    """Fresh random operands of `problem`, slots and record rows in random order, slot 0 never used.

    weights        take the layer's weights from these operands instead of drawing new ones
    pad            elements added to the slot stride of the state and of the records' rows (a
                   multiple of 16)
    null_requests  these get slot 0 (the last one -1), and record row -1
    lower_bound    of the log-decays; problem: the problem's
    Raises ValueError for kinds commit and flush: see `make_commit`.
    """
    if problem.folds_only:
        raise ValueError(f"kind {problem.kind} has no step operands: use make_commit")
    g = _generator(device, seed)
    R, H, q, D = problem.requests, problem.heads, problem.tokens, problem.channels
    shapes = problem.operand_shapes

    def normal(name: str, std: float, dtype: torch.dtype) -> Tensor:
        return torch.empty(shapes[name], dtype=dtype, device=device).normal_(0, std, generator=g)

    projected = normal("projected", 1.0, torch.bfloat16)
    window = torch.empty(shapes["conv_state"], dtype=torch.bfloat16, device=device).normal_(
        0, 1, generator=g
    )
    if problem.conv_layout == "window-major":
        window = window.transpose(1, 2).contiguous().transpose(1, 2)
    state = _padded(shapes["state"], pad, _TORCH_DTYPE[problem.state_dtype], device)
    state.normal_(0, 0.3, generator=g)

    pages = shapes["state"][0]
    order = 1 + torch.randperm(pages - 1, generator=g, device=device).to(torch.int32)
    slots = order.reshape(shapes["slots"]).contiguous()
    for i, b in enumerate(null_requests):
        slots[b] = -1 if i == len(null_requests) - 1 else 0

    if weights is None:
        A_log, dt_bias = _gate_parameters(H, inputs, g, device)
        conv_weight = normal("conv_weight", 0.4, torch.float32)
        bias = normal("conv_bias", 0.1, torch.float32) if conv_bias else None
        f_b = normal("f_b", HEAD_DIM**-0.5, torch.bfloat16)
        norm_weight = 1 + normal("norm_weight", 0.1, torch.float32)
    else:
        A_log, dt_bias, conv_weight, bias = (
            weights.A_log,
            weights.dt_bias,
            weights.conv_weight,
            weights.conv_bias,
        )
        f_b, norm_weight = weights.f_b, weights.norm_weight

    step = StepOperands(
        projected=projected,
        conv_weight=conv_weight,
        conv_bias=bias,
        conv_state=window,
        f_b=f_b,
        A_log=A_log,
        dt_bias=dt_bias,
        norm_weight=norm_weight,
        state=state,
        slots=slots,
        out=torch.empty(problem.rows, D, dtype=torch.bfloat16, device=device),
        lower_bound=problem.lower_bound if lower_bound == "problem" else lower_bound,
    )
    if problem.kind == "spec":
        accepted = torch.randint(1, q + 1, (R,), generator=g, device=device, dtype=torch.int32)
        step = replace(step, accepted=accepted)
    if problem.kind in ("record", "replay"):
        corrections, key_gates = _records(problem, R, pad, g, device)
        rows = torch.randperm(R, generator=g, device=device).to(torch.int32)
        rows[list(null_requests)] = -1
        step = replace(step, corrections=corrections, key_gates=key_gates, record_rows=rows)
        if problem.kind == "replay":
            counts = torch.tensor(problem.pending_counts, dtype=torch.int32, device=device)
            pending = torch.zeros(R, dtype=torch.int32, device=device)
            pending[rows[rows >= 0].long()] = counts[rows >= 0]
            step = replace(step, pending=pending)
    return step


def _records(
    problem: Problem, rows: int, pad: int, g: torch.Generator, device: torch.device | str
) -> tuple[Tensor, Tensor]:
    H, Q = problem.heads, problem.tokens
    corrections = _padded((rows, H, Q, HEAD_DIM), pad, torch.float32, device).normal_(
        0, 0.5, generator=g
    )
    key_gates = _padded((rows, H, Q, 2 * HEAD_DIM), pad, torch.bfloat16, device).normal_(
        0, 1, generator=g
    )
    return corrections, key_gates


def make_commit(
    problem: Problem,
    *,
    seed: int,
    device: torch.device | str = "cuda",
    inputs: Inputs = "model",
    align: bool = False,
    in_place: bool = False,
    pad: int = 0,
    null_requests: tuple[int, ...] = (),
) -> CommitOperands:
    """Fresh random operands of a commit or flush over `problem.layers` layers.

    align     every third request also stores the state of a block boundary inside its window
    in_place  destination = source (a flush is always so)
    Raises ValueError for the other kinds, for which see `make_step`, and for an unbounded gate.
    """
    if not problem.folds_only:
        raise ValueError(f"kind {problem.kind} is a step: use make_step")
    if problem.lower_bound is None:
        raise ValueError(f"lower_bound=None: kind {problem.kind} needs a bounded gate")
    g = _generator(device, seed)
    R, H, L = problem.requests, problem.heads, problem.layers
    in_place = in_place or problem.kind == "flush"
    pages = 1 + R * (1 + (not in_place) + align)
    states, corrections, key_gates = [], [], []
    for _ in range(L):
        state = _padded(
            (pages, H, HEAD_DIM, HEAD_DIM), pad, _TORCH_DTYPE[problem.state_dtype], device
        )
        states.append(state.normal_(0, 0.3, generator=g))
        layer_corrections, layer_key_gates = _records(problem, R, pad, g, device)
        corrections.append(layer_corrections)
        key_gates.append(layer_key_gates)
    gates = [_gate_parameters(H, inputs, g, device) for _ in range(L)]
    order = 1 + torch.randperm(pages - 1, generator=g, device=device).to(torch.int32)
    source = order[:R].clone()
    destination = source.clone() if in_place else order[R : 2 * R].clone()
    length = torch.tensor(problem.pending_counts, dtype=torch.int32, device=device)
    for i, b in enumerate(null_requests):
        source[b] = -1 if i == len(null_requests) - 1 else 0
    rows = torch.arange(R, dtype=torch.int32, device=device)
    if problem.kind == "flush":
        rows = rows[torch.randperm(R, generator=g, device=device)].contiguous()
    boundary_length = boundary_slot = None
    if align:
        boundary_slot = torch.where(rows % 3 == 0, order[-R:], torch.zeros_like(rows))
        boundary_length = (length + 1) // 2
    states_, corrections_, key_gates_ = tuple(states), tuple(corrections), tuple(key_gates)
    return CommitOperands(
        states=states_,
        corrections=corrections_,
        key_gates=key_gates_,
        A_log=torch.stack([A for A, _ in gates]),
        dt_bias=torch.stack([bias.reshape(H, HEAD_DIM) for _, bias in gates]),
        source=source,
        length=length,
        destination=destination,
        record_rows=rows,
        boundary_length=boundary_length,
        boundary_slot=boundary_slot,
        state_table=address_table(states_),
        corrections_table=address_table(corrections_),
        key_gates_table=address_table(key_gates_),
        lower_bound=problem.lower_bound,
    )
