"""A step in float64, one item and one token at a time: what reference and stock chain are compared
with."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kda_kernels.operands import StepOperands


def naive(
    kind: str, operands: StepOperands, starts: list[int], lengths: list[int]
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """out, state, conv_state, corrections, key_gates in float64: one item and one token at a time,
    rows as given."""
    o = operands
    heads, D = o.state.shape[1], 128 * o.state.shape[1]
    x_all, f_b = o.projected.double(), o.f_b.double()
    out = torch.full(o.out.shape, torch.nan, dtype=torch.float64)
    state, window = o.state.double(), o.conv_state.double()
    corrections = None if o.corrections is None else o.corrections.double()
    key_gates = None if o.key_gates is None else o.key_gates.double()

    def bf16(x: Tensor) -> Tensor:
        return x.to(torch.bfloat16).double()

    def decay(raw: Tensor, h: int) -> Tensor:
        A, x = math.exp(o.A_log[h]), raw + o.dt_bias.double()[128 * h : 128 * h + 128]
        if o.lower_bound is None:
            return torch.exp(-A * torch.log1p(torch.exp(x)))
        return torch.exp(o.lower_bound / (1 + torch.exp(-A * x)))

    for b, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        slots = o.slots[b].reshape(-1).tolist()
        n = int(o.accepted[b]) if kind == "spec" else 0
        row = -1 if o.record_rows is None else int(o.record_rows[b])
        if kind == "replay" and row >= 0:
            n = int(o.pending[row])
        read = slots[max(n - 1, 0)] if kind == "spec" else slots[0]
        if slots[0] <= 0 or read <= 0:
            out[start : start + length] = 0
            continue
        if length == 0:
            continue
        first = max(n - 1, 0)
        history = o.conv_state[slots[0], :, first : first + 3].double()
        inputs = torch.cat((history, x_all[start : start + length, : 3 * D].T), 1)
        window[slots[0], :, : length + 2] = inputs[:, 1:]
        for h in range(heads):
            here = slice(128 * h, 128 * h + 128)
            S = o.state[read, h].double()
            if kind == "replay":
                for t in range(n):
                    k, raw = (
                        o.key_gates[row, h, t, :128].double(),
                        o.key_gates[row, h, t, 128:].double(),
                    )
                    k = k / math.sqrt(float(k @ k) + 1e-6)
                    S = S * decay(raw, h) + torch.outer(o.corrections[row, h, t].double(), k)
                if n:
                    state[read, h] = S
            for t in range(length):
                vectors = []
                for part in range(3):
                    y = torch.zeros(128, dtype=torch.float64)
                    channels = slice(part * D + 128 * h, part * D + 128 * h + 128)
                    if o.conv_bias is not None:
                        y += o.conv_bias[channels].double()
                    for tap in range(4):
                        y += o.conv_weight[part, tap, here].double() * inputs[channels, t + tap]
                    vectors.append(bf16(y / (1 + torch.exp(-y))))
                q, k, v = vectors
                x = x_all[start + t]
                raw = bf16(f_b[here] @ x[4 * D : 4 * D + 128])
                beta = 1 / (1 + math.exp(-x[4 * D + 128 + h]))
                unit_k = k / math.sqrt(float(k @ k) + 1e-6)
                unit_q = o.scale * q / math.sqrt(float(q @ q) + 1e-6)
                S = S * decay(raw, h)
                u = beta * (v - S @ unit_k)
                S = S + torch.outer(u, unit_k)
                a = bf16(S @ unit_q)
                gate = 1 / (1 + torch.exp(-x[3 * D + 128 * h : 3 * D + 128 * h + 128]))
                rms = 1 / math.sqrt(float(a @ a) / 128 + o.eps)
                out[start + t, here] = a * rms * o.norm_weight.double() * gate
                if kind in ("decode", "spec") and slots[t] > 0:
                    state[slots[t], h] = S
                if row >= 0 and corrections is not None and key_gates is not None:
                    corrections[row, h, t] = u
                    key_gates[row, h, t] = torch.cat((k, raw))
    return out, state, window, corrections, key_gates
