"""The unfused chain in Triton: convolution, gate GEMM (torch), verify, gated RMSNorm, commit.
Baseline and fallback.

The only path for ragged windows (`query_start_loc`) and for the unbounded gate. Every public
function checks its operands before it launches and raises ValueError naming the one that is wrong;
with no tokens it returns at once.

`query_start_loc` `[R + 1]` int32: request b's rows of the packed tensors are `query_start_loc[b] ..
[b + 1] - 1`, at most `tokens` of them; without it they are `b * tokens .. (b + 1) * tokens - 1`.
One with no tokens changes nothing.

On CPU tensors everything runs under Triton's interpreter (TRITON_INTERPRET=1).
Source: docs/operation.md. The kernels: `kda_kernels.stock.kernels`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kda_kernels.case import HEADS, Case, case, steps_of
from kda_kernels.device.gpu import Gpu
from kda_kernels.operands import CommitOperands, Operands, StepOperands
from kda_kernels.problem import (
    CONV_LAYOUTS,
    CONV_WIDTH,
    HEAD_DIM,
    MAX_TOKENS,
    STATE_DTYPES,
    Problem,
)
from kda_kernels.stock import kernels
from kda_kernels.tensors import check_tensor, on_stream

KERNELS = ("stock_convolution", "stock_verify", "stock_norm", "stock_fold")
"""What `launch` enqueues, besides the gate's GEMM, whose name the GEMM library chooses."""
KINDS = ("decode", "spec", "record", "flush", "commit")
RULE = "stock_items"
BINARIES = False
WRITTEN_IN = ("kda_kernels.stock", "kda_kernels.stock.kernels")
"""Modules that decide what its launches do: Triton compiles where they run."""
WINDOW_DTYPES = ("bf16", "fp32")
TRIED = {"value_tile": (8, 16, 32, 64, 128), "num_warps": (1, 2, 4, 8)}


def forms(kind: str, state_dtype: str) -> list[dict[str, object]]:
    """Commits are verified as those of other variants, steps by `more_cases`."""
    return [{}] if kind in ("flush", "commit") else []


def more_cases(name: str, purpose: str) -> list[Case]:
    """Steps, with all layouts and state types in some windows."""
    if purpose == "compile":
        return []
    found = []
    for (kind, q), layout, dtype in product(steps_of(KINDS), CONV_LAYOUTS, STATE_DTYPES):
        if q in (1, 2, 4, 8) or (layout, dtype) == ("dim-first", "fp32"):
            problem = Problem(kind, 5, 6, q, state_dtype=dtype, conv_layout=layout)
            found.append(case(name, {}, problem, pad=64, null_requests=(1, 3)))
    return found + [case(name, {}, Problem("record", 7, heads, 4)) for heads in HEADS]


_FLOATS = (torch.float32, torch.bfloat16)
_TILES = (8, 16, 32, 64, 128)
_TILE_ELEMENTS_PER_THREAD = 64
_CONV_BLOCK = 128
_ROLL_BLOCK = 256
_NORM_HEADS = 4
_TRITON_DTYPE = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16}


@dataclass(frozen=True)
class Options:
    """Compile-time choices of the verify and commit kernels."""

    value_tile: int = 32  # state rows of one program
    num_warps: int = 4


def unsupported(problem: Problem, options: Options, gpu: Gpu) -> str | None:
    """Why this pair can't run, or None. Pure: no CUDA."""
    if problem.kind == "replay":
        return "kind replay: the stock chain flushes pending tokens, then records"
    if options.value_tile not in _TILES:
        return f"value_tile={options.value_tile} is not one of {', '.join(map(str, _TILES))}"
    if options.num_warps not in (1, 2, 4, 8):
        return f"num_warps={options.num_warps} is not 1, 2, 4 or 8"
    per_thread = options.value_tile * HEAD_DIM // (32 * options.num_warps)
    if per_thread > _TILE_ELEMENTS_PER_THREAD:
        return f"value_tile={options.value_tile} over num_warps={options.num_warps} is {per_thread} elements per thread"
    return None


@dataclass(frozen=True)
class Scratch:
    """What the chain's kernels hand to each other.

    convolved  [B, 3D]  bf16   SiLU outputs
    raw_gates  [B, D]   bf16
    """

    convolved: Tensor
    raw_gates: Tensor

    @classmethod
    def allocate(cls, rows: int, channels: int, device: torch.device) -> Scratch:
        def empty(width: int) -> Tensor:
            return torch.empty(rows, width, dtype=torch.bfloat16, device=device)

        return cls(empty(3 * channels), empty(channels))


@dataclass(frozen=True)
class Compiled:
    """A problem's choices, and the scratch buffers of its launches by (device, rows).

    Launches share the buffers, so they must be ordered among themselves, as those of one stream
    are.
    """

    problem: Problem
    options: Options
    scratch: dict[tuple[torch.device, int], Scratch] = field(default_factory=dict)


def compile(problem: Problem, options: Options, gpu: Gpu) -> Compiled:
    """Checks the pair; Triton itself compiles at the first launch. Raises ValueError if
    unsupported."""
    reason = unsupported(problem, options, gpu)
    if reason is not None:
        raise ValueError(reason)
    return Compiled(problem, options)


def launch(compiled: Compiled, operands: Operands, stream: Any) -> None:
    """Enqueues one step or commit on a stream (a handle, or torch's own; None on the CPU); never
    synchronizes.

    The first launch for a device and a number of rows compiles and allocates scratch buffers; those
    after it do neither, and can be captured in a graph.
    """
    problem, options = compiled.problem, compiled.options
    if isinstance(operands, CommitOperands) is not problem.folds_only:
        raise ValueError(f"kind {problem.kind} does not take {type(operands).__name__}")
    if isinstance(operands, CommitOperands):
        with on_stream(stream, operands.source.device):
            fold(operands, options)
        return
    key = operands.projected.device, operands.projected.shape[0]
    with on_stream(stream, key[0]):
        if key not in compiled.scratch:
            compiled.scratch[key] = Scratch.allocate(key[1], problem.channels, key[0])
        step(operands, compiled.scratch[key], problem.tokens, options)


def step(
    operands: StepOperands,
    scratch: Scratch,
    tokens: int,
    options: Options | None = None,
    query_start_loc: Tensor | None = None,
) -> None:
    """The chain of one decode, spec (`accepted` given) or record step (`corrections` given) on the
    current stream."""
    if operands.pending is not None:
        raise ValueError("pending: the stock chain replays nothing; flush, then record")
    o, options = operands, options or Options()
    convolve(
        o.projected, o.conv_weight, o.conv_bias, o.conv_state, o.slots, scratch.convolved, tokens, o.accepted,
        query_start_loc,
    )  # fmt: skip
    project_gate(o.projected, o.f_b, scratch.raw_gates)
    verify(
        scratch.convolved, scratch.raw_gates, o.projected, o.A_log, o.dt_bias, o.state, o.slots, o.out, tokens,
        accepted=o.accepted, query_start_loc=query_start_loc, corrections=o.corrections, key_gates=o.key_gates,
        record_rows=o.record_rows, update_state=o.record_rows is None, scale=o.scale, lower_bound=o.lower_bound,
        options=options,
    )  # fmt: skip
    normalize(
        o.out,
        o.projected,
        o.norm_weight,
        o.slots,
        o.out,
        tokens,
        o.accepted,
        query_start_loc,
        o.eps,
    )


def convolve(
    projected: Tensor,
    conv_weight: Tensor,
    conv_bias: Tensor | None,
    conv_state: Tensor,
    slots: Tensor,
    convolved: Tensor,
    tokens: int,
    accepted: Tensor | None = None,
    query_start_loc: Tensor | None = None,
) -> None:
    """SiLU of the convolution of q, k and v into `convolved` `[B, 3D]`; the windows are moved
    on."""
    rows, requests = _check_rows(projected, slots, tokens, accepted, query_start_loc)
    device = projected.device
    check_tensor("conv_weight", conv_weight, (3, CONV_WIDTH, None), _FLOATS, device)
    channels = conv_weight.shape[2]
    _check_pitch(projected, channels)
    if conv_bias is not None:
        check_tensor("conv_bias", conv_bias, (3 * channels,), _FLOATS, device)
    check_tensor(
        "conv_state", conv_state, (None, 3 * channels, None), _FLOATS, device, dense_from=3
    )
    if conv_state.shape[2] < tokens + 2:
        raise ValueError(
            f"conv_state holds {conv_state.shape[2]} entries; {tokens=} needs {tokens + 2}"
        )
    if 1 not in conv_state.stride()[1:]:
        raise ValueError(
            f"conv_state strides {conv_state.stride()}: neither channels nor entries are adjacent"
        )
    check_tensor("convolved", convolved, (rows, 3 * channels), (torch.bfloat16,), device)
    if rows == 0:
        return
    kernels.stock_convolution[(triton.cdiv(3 * channels, _CONV_BLOCK), requests)](
        projected, conv_weight, conv_bias, conv_state, slots, accepted, query_start_loc, convolved,
        projected.stride(0), channels, *conv_state.stride(), slots.stride(0),
        TOKENS=tokens, SPEC=accepted is not None, RAGGED=query_start_loc is not None, HAS_BIAS=conv_bias is not None,
        ENTRIES=triton.next_power_of_2(tokens + 2), BLOCK=_CONV_BLOCK, num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip


def project_gate(projected: Tensor, f_b: Tensor, raw_gates: Tensor) -> None:
    """Raw gates `[B, D]` from the gate bottleneck: one GEMM, rounded to BF16 once."""
    check_tensor("f_b", f_b, (None, HEAD_DIM), (torch.bfloat16,), projected.device)
    channels = f_b.shape[0]
    _check_pitch(projected, channels)
    check_tensor(
        "raw_gates", raw_gates, (projected.shape[0], channels), (torch.bfloat16,), projected.device
    )
    if projected.shape[0]:
        torch.mm(projected[:, 4 * channels : 4 * channels + HEAD_DIM], f_b.t(), out=raw_gates)


def verify(
    convolved: Tensor,
    raw_gates: Tensor,
    projected: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    slots: Tensor,
    attended: Tensor,
    tokens: int,
    *,
    accepted: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    corrections: Tensor | None = None,
    key_gates: Tensor | None = None,
    record_rows: Tensor | None = None,
    update_state: bool = True,
    scale: float = HEAD_DIM**-0.5,
    lower_bound: float | None = -5.0,
    options: Options | None = None,
) -> None:
    """The recurrence: outputs before the norm into `attended` `[B, D]`, which null requests leave
    alone.

    update_state   the state after token t goes to page slots[b, t]; else no page changes
    record_rows    with corrections and key_gates: what to record, and where
    """
    options = options or Options()
    rows, requests = _check_rows(projected, slots, tokens, accepted, query_start_loc)
    device = projected.device
    check_tensor("A_log", A_log, (None,), (torch.float32,), device)
    heads = A_log.shape[0]
    channels = HEAD_DIM * heads
    _check_pitch(projected, channels)
    check_tensor("convolved", convolved, (rows, 3 * channels), (torch.bfloat16,), device)
    check_tensor("raw_gates", raw_gates, (rows, channels), (torch.bfloat16,), device)
    check_tensor("dt_bias", dt_bias, (channels,), (torch.float32,), device)
    check_tensor("state", state, (None, heads, HEAD_DIM, HEAD_DIM), _FLOATS, device, dense_from=1)
    check_tensor("attended", attended, (rows, channels), (torch.bfloat16,), device)
    if update_state and _columns(slots) < tokens:
        raise ValueError(
            f"slots has {_columns(slots)} columns; storing the states of {tokens=} needs as many"
        )
    if lower_bound is not None and not lower_bound < 0:
        raise ValueError(f"{lower_bound=} must be negative, or None for the unbounded gate")
    record = corrections is not None or key_gates is not None or record_rows is not None
    if record:
        _check_records(corrections, key_gates, record_rows, requests, heads, tokens, device)
    if rows == 0:
        return
    kernels.stock_verify[(HEAD_DIM // options.value_tile, requests, heads)](
        convolved, raw_gates, projected, A_log, dt_bias, state, slots, accepted, query_start_loc,
        corrections, key_gates, record_rows, attended,
        projected.stride(0), channels, state.stride(0), slots.stride(0),
        0 if corrections is None else corrections.stride(0), 0 if key_gates is None else key_gates.stride(0),
        0 if corrections is None else corrections.shape[2], scale, 0.0 if lower_bound is None else lower_bound,
        TOKENS=tokens, SPEC=accepted is not None, RAGGED=query_start_loc is not None, UPDATE=update_state,
        RECORD=record, BOUNDED=lower_bound is not None, V_TILE=options.value_tile,
        K_INNER=64 // state.element_size(), num_warps=options.num_warps, enable_fp_fusion=True,
    )  # fmt: skip


def normalize(
    attended: Tensor,
    projected: Tensor,
    norm_weight: Tensor,
    slots: Tensor,
    out: Tensor,
    tokens: int,
    accepted: Tensor | None = None,
    query_start_loc: Tensor | None = None,
    eps: float = 1e-5,
) -> None:
    """Gated RMSNorm of `attended` into `out` `[B, D]` (they may be one tensor); null requests get
    zeros."""
    rows, requests = _check_rows(projected, slots, tokens, accepted, query_start_loc)
    check_tensor("norm_weight", norm_weight, (HEAD_DIM,), (torch.float32,), projected.device)
    check_tensor("out", out, (rows, None), (torch.bfloat16,), projected.device)
    channels = out.shape[1]
    if channels % HEAD_DIM:
        raise ValueError(f"out has {channels} columns, not a multiple of {HEAD_DIM}")
    _check_pitch(projected, channels)
    check_tensor("attended", attended, (rows, channels), (torch.bfloat16,), projected.device)
    if rows == 0:
        return
    heads = channels // HEAD_DIM
    kernels.stock_norm[(requests * tokens, triton.cdiv(heads, _NORM_HEADS))](
        attended, projected, norm_weight, slots, accepted, query_start_loc, out,
        projected.stride(0), channels, heads, slots.stride(0), eps,
        TOKENS=tokens, SPEC=accepted is not None, RAGGED=query_start_loc is not None, HEADS=_NORM_HEADS,
        num_warps=4, enable_fp_fusion=True,
    )  # fmt: skip


def fold(operands: CommitOperands, options: Options | None = None) -> None:
    """Commits every layer in one launch."""
    o, options = operands, options or Options()
    layers, requests, device = len(o.states), o.source.shape[0], o.source.device
    if not layers:
        raise ValueError("states: no layers")
    _check_plan(
        requests, device, o.source, o.length, o.destination, o.boundary_length, o.boundary_slot
    )
    check_tensor("record_rows", o.record_rows, (requests,), (torch.int32,), device)
    heads, dtype = o.states[0].shape[1], o.states[0].dtype
    per_layer = {"states": o.states, "corrections": o.corrections, "key_gates": o.key_gates}
    for name, tensors in per_layer.items():
        if len(tensors) != layers:
            raise ValueError(f"{name}: {len(tensors)} layers, states has {layers}")
        for tensor in tensors:
            if tensor.data_ptr() % 16 or tensor.stride(0) % 16:
                raise ValueError(f"{name}: address {tensor.data_ptr():#x} and stride {tensor.stride(0)} must be "
                                 "multiples of 16")  # fmt: skip
    tokens = o.corrections[0].shape[2]
    for state, corrections, key_gates in zip(o.states, o.corrections, o.key_gates, strict=True):
        check_tensor(
            "states", state, (None, heads, HEAD_DIM, HEAD_DIM), (dtype,), device, dense_from=1
        )
        check_tensor(
            "corrections",
            corrections,
            (None, heads, tokens, HEAD_DIM),
            (torch.float32,),
            device,
            dense_from=1,
        )
        check_tensor(
            "key_gates",
            key_gates,
            (None, heads, tokens, 2 * HEAD_DIM),
            (torch.bfloat16,),
            device,
            dense_from=1,
        )
    if dtype not in _FLOATS:
        raise ValueError(f"states: {dtype} is neither float32 nor bfloat16")
    check_tensor("A_log", o.A_log, (layers, heads), (torch.float32,), device)
    check_tensor("dt_bias", o.dt_bias, (layers, heads, HEAD_DIM), (torch.float32,), device)
    for name in ("state_table", "corrections_table", "key_gates_table"):
        check_tensor(name, getattr(o, name), (layers, 2), (torch.int64,), device)
    if not o.lower_bound < 0:
        raise ValueError(f"lower_bound={o.lower_bound} must be negative")
    if requests == 0:
        return
    kernels.stock_fold[(HEAD_DIM // options.value_tile * heads, requests, layers)](
        o.state_table, o.corrections_table, o.key_gates_table, o.A_log, o.dt_bias, o.source, o.length, o.destination,
        o.record_rows, o.boundary_length, o.boundary_slot, heads, tokens, o.lower_bound,
        TOKENS=tokens, ALIGN=o.boundary_length is not None, STATE_DTYPE=_TRITON_DTYPE[dtype], V_TILE=options.value_tile,
        num_warps=options.num_warps, enable_fp_fusion=True,
    )  # fmt: skip


def roll_window(
    conv_states: Sequence[Tensor],
    window_table: Tensor,
    source: Tensor,
    length: Tensor,
    destination: Tensor,
    boundary_length: Tensor | None = None,
    boundary_slot: Tensor | None = None,
) -> None:
    """The windows' part of a commit, all layers in one launch: afterwards the next step's taps
    start at entry 0.

    Entries 0..2 of the destination become entries n-1 .. n+1 of the source; no other entry changes.
    window_table   [L, 2] int64, `operands.address_table` of the conv states, which share shape and
                   inner strides
    """
    requests, device, layers = source.shape[0], source.device, len(conv_states)
    if not layers:
        raise ValueError("conv_states: no layers")
    _check_plan(requests, device, source, length, destination, boundary_length, boundary_slot)
    first = conv_states[0]
    for window in conv_states:
        check_tensor(
            "conv_states",
            window,
            (None, first.shape[1], first.shape[2]),
            _FLOATS,
            device,
            dense_from=3,
        )
        if window.stride()[1:] != first.stride()[1:] or window.dtype is not first.dtype:
            raise ValueError("conv_states: layers differ in inner strides or dtype")
    check_tensor("window_table", window_table, (layers, 2), (torch.int64,), device)
    if requests == 0:
        return
    width = first.shape[1]
    kernels.stock_roll_window[(triton.cdiv(width, _ROLL_BLOCK), requests, layers)](
        window_table, source, length, destination, boundary_length, boundary_slot, width, *first.stride()[1:],
        ALIGN=boundary_length is not None, WINDOW_DTYPE=_TRITON_DTYPE[first.dtype], BLOCK=_ROLL_BLOCK, num_warps=4,
    )  # fmt: skip


def defer(
    length: Tensor, pending: Tensor, record_rows: Tensor, slots: Tensor, eager: Tensor | None = None
) -> None:
    """Commit lengths `[R]` move to `pending` `[rows]` and become 0; with `eager` `[R]` set, pending
    becomes 0 instead.

    Requests with a null slot or a negative record row are left alone.
    """
    requests, device = length.shape[0], length.device
    check_tensor("length", length, (requests,), (torch.int32,), device)
    check_tensor("pending", pending, (None,), (torch.int32,), device)
    check_tensor("record_rows", record_rows, (requests,), (torch.int32,), device)
    _check_slots(slots, requests, device)
    if eager is not None:
        check_tensor("eager", eager, (requests,), (torch.bool, torch.int8, torch.int32), device)
    if requests:
        kernels.stock_defer[(requests,)](
            length,
            pending,
            record_rows,
            slots,
            eager,
            slots.stride(0),
            HAS_EAGER=eager is not None,
            num_warps=1,
        )


def flush_plan(
    pending: Tensor,
    record_rows: Tensor,
    slots: Tensor,
    source: Tensor,
    length: Tensor,
    destination: Tensor,
    tokens: int,
) -> None:
    """Writes the commit in place of all pending tokens: length `clamp(pending, 0, tokens)`, 0 for
    null requests.

    `pending` itself is kept: `defer` overwrites it after the step.
    """
    requests, device = source.shape[0], source.device
    _check_plan(requests, device, source, length, destination, None, None)
    check_tensor("pending", pending, (None,), (torch.int32,), device)
    check_tensor("record_rows", record_rows, (requests,), (torch.int32,), device)
    _check_slots(slots, requests, device)
    if requests:
        kernels.stock_flush_plan[(requests,)](
            pending,
            record_rows,
            slots,
            source,
            length,
            destination,
            slots.stride(0),
            TOKENS=tokens,
            num_warps=1,
        )


def _check_rows(
    projected: Tensor,
    slots: Tensor,
    tokens: int,
    accepted: Tensor | None,
    query_start_loc: Tensor | None,
) -> tuple[int, int]:
    """Rows and requests of a step, after checking what says which row belongs to which request."""
    if not 1 <= tokens <= MAX_TOKENS:
        raise ValueError(f"{tokens=} is not in 1..{MAX_TOKENS}")
    check_tensor(
        "projected", projected, (None, None), (torch.bfloat16,), projected.device, dense_from=1
    )
    rows, requests, device = projected.shape[0], slots.shape[0], projected.device
    _check_slots(slots, requests, device)
    if accepted is not None:
        check_tensor("accepted", accepted, (requests,), (torch.int32,), device)
        if _columns(slots) < tokens:
            raise ValueError(
                f"slots has {_columns(slots)} columns; with accepted it needs {tokens=}"
            )
    if query_start_loc is not None:
        check_tensor("query_start_loc", query_start_loc, (requests + 1,), (torch.int32,), device)
        if rows > requests * tokens:
            raise ValueError(
                f"projected: {rows} rows exceed the capacity of {requests} requests x {tokens} tokens"
            )
    elif rows != requests * tokens and rows:
        raise ValueError(f"projected: {rows} rows are not {requests} requests x {tokens} tokens")
    return rows, requests


def _check_pitch(projected: Tensor, channels: int) -> None:
    used = 4 * channels + HEAD_DIM + channels // HEAD_DIM
    if channels % HEAD_DIM or projected.shape[1] < used:
        raise ValueError(
            f"projected: {projected.shape[1]} columns; {channels} channels need {used}"
        )


def _check_slots(slots: Tensor, requests: int, device: torch.device) -> None:
    shape = (requests,) if slots.ndim == 1 else (requests, None)
    check_tensor("slots", slots, shape, (torch.int32,), device, dense_from=1)


def _columns(slots: Tensor) -> int:
    return slots.shape[1] if slots.ndim == 2 else 1


def _check_records(
    corrections: Tensor | None,
    key_gates: Tensor | None,
    record_rows: Tensor | None,
    requests: int,
    heads: int,
    tokens: int,
    device: torch.device,
) -> None:
    if corrections is None or key_gates is None or record_rows is None:
        raise ValueError("corrections, key_gates and record_rows go together")
    check_tensor("record_rows", record_rows, (requests,), (torch.int32,), device)
    check_tensor(
        "corrections",
        corrections,
        (None, heads, None, HEAD_DIM),
        (torch.float32,),
        device,
        dense_from=1,
    )
    capacity = corrections.shape[2]
    if capacity < tokens:
        raise ValueError(f"corrections: a record holds {capacity} tokens, not {tokens}")
    check_tensor(
        "key_gates",
        key_gates,
        (None, heads, capacity, 2 * HEAD_DIM),
        (torch.bfloat16,),
        device,
        dense_from=1,
    )


def _check_plan(
    requests: int,
    device: torch.device,
    source: Tensor,
    length: Tensor,
    destination: Tensor,
    boundary_length: Tensor | None,
    boundary_slot: Tensor | None,
) -> None:
    for name, tensor in (("source", source), ("length", length), ("destination", destination)):
        check_tensor(name, tensor, (requests,), (torch.int32,), device)
    if (boundary_length is None) is not (boundary_slot is None):
        raise ValueError("boundary_length and boundary_slot go together")
    if boundary_length is not None and boundary_slot is not None:
        check_tensor("boundary_length", boundary_length, (requests,), (torch.int32,), device)
        check_tensor("boundary_slot", boundary_slot, (requests,), (torch.int32,), device)
