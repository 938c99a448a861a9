"""Every step and commit in float64: what the kernels are checked against.

Vectorized over items, serial over tokens, on any device. Rounded to BF16 exactly where
docs/operation.md, "Rounding points", says so: SiLU output, raw gate, recurrence output before the
norm, recorded keys and gates. The final output and the states are left unrounded: a kernel's own
last rounding is part of its error.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from kda_kernels.operands import CommitOperands, StepOperands
from kda_kernels.problem import HEAD_DIM, Problem

Form = Literal["recurrence", "chunked"]

KEY_EPS = 1e-6
"""Added to the sum of squares when keys and queries are normalized."""


@dataclass(frozen=True)
class StepResult:
    """What the operands of a step must hold after it. Pages and rows that it doesn't touch equal
    the input.

    out              [B, D]                 f64, not rounded
    state            [slots, H, 128, 128]   f64, not rounded
    conv_state       [slots, 3D, W]         the operand's dtype, exact
    corrections      [rows, H, Q, 128]      f64, or None
    key_gates        [rows, H, Q, 256]      bf16, or None
    key_gates_exact  [rows, H, Q, 256]      f64, `key_gates` before rounding, or None
    live             [R]      bool   requests that run; the others get zeros and change nothing
    state_written    [slots]  bool   pages that the step writes
    records_written  [rows]   bool   record rows whose first `tokens` entries the step writes, or
                     None
    padding          copies of what lies between the pages and rows of the written tensors, by
                     operand name
    """

    out: Tensor
    state: Tensor
    conv_state: Tensor
    corrections: Tensor | None
    key_gates: Tensor | None
    key_gates_exact: Tensor | None
    live: Tensor
    state_written: Tensor
    records_written: Tensor | None
    padding: dict[str, Tensor]


def step(problem: Problem, operands: StepOperands, form: Form = "recurrence") -> StepResult:
    """The result of one decode, spec, record or replay step; the operands are only read.

    Raises ValueError for commit and flush: see `commit`.
    """
    if problem.folds_only:
        raise ValueError(f"kind {problem.kind} is no step: use commit")
    q = problem.tokens
    requests = slot_plan(problem, operands)
    live = requests.live.nonzero().squeeze(1)
    page, n = requests.page[live], requests.count[live]

    inputs, window = _window(problem, operands, live, page, n)
    exact = _convolve(operands, window, q)
    keys_exact, (queries, keys, values) = exact[1], _bf16(exact)
    raw_exact = raw_gate(problem, operands, live)
    raw = _bf16(raw_exact)
    decay = log_decay(
        raw, operands.A_log[:, None, None], _dt_bias(operands)[:, None, :], operands.lower_bound
    )
    rows = projected_rows(problem, operands)[live]
    D = problem.channels
    beta = torch.sigmoid(
        rows[..., 4 * D + HEAD_DIM : 4 * D + HEAD_DIM + problem.heads].double()
    ).transpose(1, 2)

    state = operands.state.to(torch.float64, copy=True)
    S = state[requests.read[live]]  # [live, H, V, K]
    written = torch.zeros(state.shape[0], dtype=torch.bool, device=state.device)
    if problem.kind == "replay":
        S = _fold_pending(operands, requests, live, S)
        folded = n > 0
        state[page[folded]] = S[folded]
        written[page[folded]] = True

    def keep(t: int, after: Tensor) -> None:
        if problem.kind in ("decode", "spec"):
            slot = _slot_table(operands)[live, t].long()
            state[slot[slot > 0]] = after[slot > 0]
            written[slot[slot > 0]] = True

    run = recurrence if form == "recurrence" else chunked
    attended, corrections = run(
        S, normalized(keys), operands.scale * normalized(queries), values, decay, beta, keep
    )

    result_out = torch.zeros(operands.out.shape, dtype=torch.float64, device=state.device)
    gate = rows[..., 3 * D : 4 * D].double().reshape(-1, q, problem.heads, HEAD_DIM).transpose(1, 2)
    out = _normalize(_bf16(attended), gate, operands)  # [live, H, q, V]
    result_out.view(-1, q, D)[live] = out.transpose(1, 2).flatten(2)

    records = _records(
        operands, requests, live, corrections, torch.cat((keys_exact, raw_exact), -1), q
    )
    conv_state = operands.conv_state.clone()
    entries = torch.cat((window[:, :, 1:3], inputs), 2)  # [live, 3D, q + 2]
    conv_state[page, :, : q + 2] = entries.to(conv_state.dtype)
    names = ("state", "conv_state", "corrections", "key_gates", "out")
    return StepResult(
        result_out,
        state,
        conv_state,
        *records[:3],
        requests.live,
        written,
        records[3],
        paddings(operands, names),
    )


@dataclass(frozen=True)
class SlotPlan:
    """Per request, `[R]` int64 or bool: its convolution page, the state page it reads, the tokens
    accepted or pending of its last window, its record row (-1: none), and whether it runs at
    all."""

    page: Tensor
    read: Tensor
    count: Tensor
    row: Tensor
    live: Tensor


def slot_plan(problem: Problem, operands: StepOperands) -> SlotPlan:
    table = _slot_table(operands).long()
    page = table[:, 0]
    zeros = torch.zeros_like(page)
    row = zeros - 1 if operands.record_rows is None else operands.record_rows.long()
    count, read = zeros, page
    if problem.kind == "spec":
        assert operands.accepted is not None
        count = operands.accepted.long().clamp(0, problem.tokens)
        read = table.gather(1, (count - 1).clamp(min=0)[:, None]).squeeze(1)
    elif problem.kind == "replay":
        assert operands.pending is not None
        pending = operands.pending.long()[row.clamp(min=0)].clamp(0, problem.tokens)
        count = torch.where(row >= 0, pending, 0)
    return SlotPlan(page, read, count, row, (page > 0) & (read > 0))


def recurrence(
    state: Tensor,
    keys: Tensor,
    queries: Tensor,
    values: Tensor,
    decay: Tensor,
    beta: Tensor,
    keep: Callable[[int, Tensor], None] | None = None,
) -> tuple[Tensor, Tensor]:
    """Outputs and corrections `[..., q, V]`, token by token; `state` `[..., V, K]` is updated in
    place.

    keys, queries  [..., q, K]   normalized, queries scaled
    values         [..., q, V]
    decay          [..., q, K]   log
    beta           [..., q]
    keep           called with (t, state after token t)
    """
    outputs, corrections = [], []
    for t in range(keys.shape[-2]):
        k = keys[..., t, :]
        state *= decay[..., t, :].exp()[..., None, :]
        u = beta[..., t, None] * (values[..., t, :] - _times(state, k))
        state.addcmul_(u[..., :, None], k[..., None, :])
        outputs.append(_times(state, queries[..., t, :]))
        corrections.append(u)
        if keep is not None:
            keep(t, state)
    return torch.stack(outputs, -2), torch.stack(corrections, -2)


def chunked(
    state: Tensor,
    keys: Tensor,
    queries: Tensor,
    values: Tensor,
    decay: Tensor,
    beta: Tensor,
    keep: Callable[[int, Tensor], None] | None = None,
) -> tuple[Tensor, Tensor]:
    """`recurrence` from 2q products with the state, which is only read, and a forward
    substitution."""
    L = decay.cumsum(-2)
    w = (keys * L.exp()) @ state.transpose(-1, -2)  # [..., q, V]
    y = (queries * L.exp()) @ state.transpose(-1, -2)
    outputs: list[Tensor] = []
    corrections: list[Tensor] = []
    for t in range(keys.shape[-2]):
        # P(s, t) for s <= t
        between = (L[..., t : t + 1, :] - L[..., : t + 1, :]).exp()
        aged = keys[..., : t + 1, :] * between
        rest = values[..., t, :] - w[..., t, :]
        for s, u in enumerate(corrections):
            rest = rest - (aged[..., s, :] * keys[..., t, :]).sum(-1, keepdim=True) * u
        corrections.append(beta[..., t, None] * rest)
        o = y[..., t, :]
        for s, u in enumerate(corrections):
            o = o + (aged[..., s, :] * queries[..., t, :]).sum(-1, keepdim=True) * u
        outputs.append(o)
        if keep is not None:
            kept = slice(None, t + 1)
            keep(
                t,
                fold(state, torch.stack(corrections, -2), keys[..., kept, :], decay[..., kept, :]),
            )
    return torch.stack(outputs, -2), torch.stack(corrections, -2)


def fold(
    state: Tensor, corrections: Tensor, keys: Tensor, decay: Tensor, length: Tensor | None = None
) -> Tensor:
    """The state `[R, H, V, K]` after the first `length` `[R]` recorded tokens (default: all); the
    input is only read.

    corrections  [R, H, T, V]
    keys         [R, H, T, K]   normalized
    decay        [R, H, T, K]   log
    """
    if length is not None:
        taken = (torch.arange(keys.shape[-2], device=keys.device) < length[:, None])[
            :, None, :, None
        ]
        # Whatever stands in the entries of rejected tokens, NaN too, has no part in it.
        decay, corrections, keys = (torch.where(taken, x, 0) for x in (decay, corrections, keys))
    L = decay.cumsum(-2)
    total = L[..., -1:, :]
    return torch.mul(state, total.exp()).add_(
        corrections.transpose(-1, -2) @ (keys * (total - L).exp())
    )


def commit(operands: CommitOperands, layer: int) -> Tensor:
    """The states of one layer after a commit or flush, `[slots, H, 128, 128]` f64, not rounded."""
    state = operands.states[layer].to(torch.float64, copy=True)
    source, destination = operands.source.long(), operands.destination.long()
    live = committing(operands).nonzero().squeeze(1)
    rows = operands.record_rows[live].long()
    S = state[source[live]]
    length = operands.length[live]
    u = operands.corrections[layer][rows].double()
    k, raw = _split(operands.key_gates[layer][rows])
    decay = log_decay(
        raw,
        operands.A_log[layer][:, None, None],
        operands.dt_bias[layer][:, None, :],
        operands.lower_bound,
    )
    boundaries = boundary_stores(operands)
    if boundaries is not None:
        slot = boundaries[live]
        stored = slot > 0
        assert operands.boundary_length is not None
        at = operands.boundary_length[live][stored]
        state[slot[stored]] = fold(S[stored], u[stored], normalized(k)[stored], decay[stored], at)
    state[destination[live]] = fold(S, u, normalized(k), decay, length)
    return state


def committing(operands: CommitOperands) -> Tensor:
    """Requests that commit: `[R]` bool."""
    return (operands.length > 0) & (operands.source > 0) & (operands.destination > 0)


def boundary_stores(operands: CommitOperands) -> Tensor | None:
    """The slot that gets each request's state at a block boundary, 0 for none: `[R]` int64; None
    without align."""
    if operands.boundary_length is None or operands.boundary_slot is None:
        return None
    at, slot = operands.boundary_length, operands.boundary_slot.long()
    return torch.where(
        committing(operands) & (at > 0) & (at <= operands.length) & (slot > 0), slot, 0
    )


def select(
    problem: Problem, operands: StepOperands, requests: Tensor
) -> tuple[Problem, StepOperands]:
    """The same step for some of its requests, with copies of their pages and record rows alone.

    So that a huge cell can be checked in parts: the same call before and after the launch gives
    operands that `step` and then `compare.check_step` take. Pages of other requests are left out,
    and with them their checks.
    """
    requests = requests.to(operands.slots.device).long()
    slots, pages = _compact(operands.slots[requests], first=1)
    changes: dict[str, Tensor | None] = {
        "projected": projected_rows(problem, operands)[requests].flatten(0, 1),
        "out": operands.out.view(-1, problem.tokens, problem.channels)[requests].flatten(0, 1),
        "slots": slots,
        "state": operands.state[pages],
        "conv_state": operands.conv_state[pages],
        "accepted": None if operands.accepted is None else operands.accepted[requests],
    }
    if operands.record_rows is not None:
        rows, kept = _compact(operands.record_rows[requests], first=0)
        changes["record_rows"] = rows
        for name in ("corrections", "key_gates", "pending"):
            tensor = getattr(operands, name)
            changes[name] = None if tensor is None else tensor[kept]
    return replace(problem, requests=len(requests)), replace(operands, **changes)  # type: ignore[arg-type]


def log_decay(raw: Tensor, A_log: Tensor, dt_bias: Tensor, lower_bound: float | None) -> Tensor:
    """Log decay in float64 from raw gates."""
    A, x = A_log.double().exp(), raw.double() + dt_bias.double()
    if lower_bound is None:
        return -A * torch.logaddexp(x, torch.zeros_like(x))
    return lower_bound * torch.sigmoid(A * x)


def normalized(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + KEY_EPS)


def projected_rows(problem: Problem, operands: StepOperands) -> Tensor:
    """`[R, q, pitch]`"""
    return operands.projected.view(-1, problem.tokens, operands.projected.shape[1])


def padding(tensor: Tensor) -> Tensor | None:
    """View of the elements between the leading rows of a tensor whose rows are dense: `[n - 1,
    gap]`; None if none."""
    n, row, stride = tensor.shape[0], tensor.shape[1:].numel(), tensor.stride(0)
    last = sum(
        (size - 1) * step for size, step in zip(tensor.shape[1:], tensor.stride()[1:], strict=True)
    )
    if n < 2 or stride <= row or last != row - 1:
        return None
    return tensor.as_strided((n - 1, stride - row), (stride, 1), tensor.storage_offset() + row)


def paddings(operands: StepOperands, names: tuple[str, ...]) -> dict[str, Tensor]:
    """Copies of `padding` of the named operands that have some."""
    views = {
        name: padding(getattr(operands, name))
        for name in names
        if getattr(operands, name) is not None
    }
    return {name: view.clone() for name, view in views.items() if view is not None}


def _bf16(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).double()


def _slot_table(operands: StepOperands) -> Tensor:
    return operands.slots if operands.slots.ndim == 2 else operands.slots[:, None]


def _dt_bias(operands: StepOperands) -> Tensor:
    return operands.dt_bias.view(-1, HEAD_DIM)


def _split(key_gates: Tensor) -> tuple[Tensor, Tensor]:
    """Keys and raw gates of records, f64."""
    return key_gates[..., :HEAD_DIM].double(), key_gates[..., HEAD_DIM:].double()


def _times(state: Tensor, vector: Tensor) -> Tensor:
    return (state @ vector[..., None]).squeeze(-1)


def _window(
    problem: Problem, operands: StepOperands, live: Tensor, page: Tensor, n: Tensor
) -> tuple[Tensor, Tensor]:
    """This step's inputs `[live, 3D, q]`, and the three before them followed by them, both f64."""
    inputs = (
        projected_rows(problem, operands)[live, :, : 3 * problem.channels].double().transpose(1, 2)
    )
    at = (n - 1).clamp(min=0)[:, None] + torch.arange(3, device=n.device)
    history = operands.conv_state[page].gather(
        2, at[:, None, :].expand(-1, 3 * problem.channels, -1)
    )
    return inputs, torch.cat((history.double(), inputs), 2)


def convolved(problem: Problem, operands: StepOperands, live: Tensor) -> Tensor:
    """Queries, keys and values of some requests before rounding, `[3, live, H, q, 128]` f64."""
    requests = slot_plan(problem, operands)
    _, window = _window(problem, operands, live, requests.page[live], requests.count[live])
    return _convolve(operands, window, problem.tokens)


def _convolve(operands: StepOperands, window: Tensor, q: int) -> Tensor:
    taps = operands.conv_weight.double().transpose(1, 2).flatten(0, 1)  # [3D, 4]
    y = torch.zeros_like(window[:, :, :q])
    if operands.conv_bias is not None:
        y = y + operands.conv_bias.double()[:, None]
    for tap in range(4):
        y = y + taps[:, tap, None] * window[:, :, tap : tap + q]
    return (
        (y * torch.sigmoid(y))
        .reshape(len(y), 3, operands.A_log.shape[0], HEAD_DIM, q)
        .permute(1, 0, 2, 4, 3)
    )


def raw_gate(problem: Problem, operands: StepOperands, live: Tensor) -> Tensor:
    """`[live, H, q, K]`, before rounding."""
    D = problem.channels
    f_a = projected_rows(problem, operands)[live, :, 4 * D : 4 * D + HEAD_DIM].double()
    return (
        (f_a @ operands.f_b.double().T)
        .view(*f_a.shape[:2], problem.heads, HEAD_DIM)
        .transpose(1, 2)
    )


def _fold_pending(operands: StepOperands, requests: SlotPlan, live: Tensor, S: Tensor) -> Tensor:
    assert operands.corrections is not None
    assert operands.key_gates is not None
    row = requests.row[live].clamp(min=0)
    k, raw = _split(operands.key_gates[row])
    decay = log_decay(
        raw, operands.A_log[:, None, None], _dt_bias(operands)[:, None, :], operands.lower_bound
    )
    return fold(S, operands.corrections[row].double(), normalized(k), decay, requests.count[live])


def _normalize(attended: Tensor, gate: Tensor, operands: StepOperands) -> Tensor:
    rms = torch.rsqrt(attended.square().mean(-1, keepdim=True) + operands.eps)
    return attended * rms * operands.norm_weight.double() * torch.sigmoid(gate)


def _records(
    operands: StepOperands,
    requests: SlotPlan,
    live: Tensor,
    u: Tensor,
    key_gates_exact: Tensor,
    q: int,
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    if operands.corrections is None or operands.key_gates is None:
        return None, None, None, None
    row = requests.row[live]
    recorded, row = row >= 0, row[row >= 0]
    corrections = operands.corrections.double()
    corrections[row, :, :q] = u[recorded]
    exact = operands.key_gates.double()
    exact[row, :, :q] = key_gates_exact[recorded]
    key_gates = operands.key_gates.clone()
    key_gates[row, :, :q] = key_gates_exact[recorded].to(torch.bfloat16)
    written = torch.zeros(corrections.shape[0], dtype=torch.bool, device=row.device)
    written[row] = True
    return corrections, key_gates, exact, written


def _compact(indices: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """Indices >= first renumbered from `first` on (the others kept), and the rows to gather for
    them, at least one."""
    used = torch.unique(indices[indices >= first]).long()
    renumbered = torch.searchsorted(used, indices.long()) + first
    rows = torch.cat((used.new_zeros(1), used)) if first or not len(used) else used
    return torch.where(indices >= first, renumbered, indices).to(indices.dtype), rows
