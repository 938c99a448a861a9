"""What every step kernel takes: one tuple of parameters, its values for some operands, and what the
operands must be.

A kernel is launched with the fields of `Arguments` in order; a field that it does not read costs
nothing.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol, get_type_hints

from cutlass import Float32, Int32, Int64

from kda_kernels.operands import StepOperands
from kda_kernels.problem import HEAD_DIM, Problem

_UNIT = 8  # bf16 elements of a 16-byte copy
_BF16, _F32, _INT32 = "torch.bfloat16", "torch.float32", "torch.int32"


class Arguments(NamedTuple):
    """Parameters of a step kernel: addresses (0 where there is no such operand), strides in
    elements, sizes.

    What a kernel needs first stands first: parameters are constants, which come by cache line.

    channel_stride, tap_stride   of the convolution window
    slots_stride                 between requests
    record_tokens                Q, tokens that a record can hold
    per                          items of a CTA of a persistent kernel
    """

    slots: Int64
    slots_stride: Int32
    heads: Int32
    f_b: Int64
    conv_weight: Int64
    conv_bias: Int64
    projected: Int64
    pitch: Int64
    A_log: Int64
    dt_bias: Int64
    norm_weight: Int64
    conv_state: Int64
    conv_stride: Int64
    channel_stride: Int32
    tap_stride: Int32
    state: Int64
    state_stride: Int64
    accepted: Int64
    corrections: Int64
    key_gates: Int64
    record_rows: Int64
    pending: Int64
    out: Int64
    corrections_stride: Int64
    key_gates_stride: Int64
    record_tokens: Int32
    requests: Int32
    per: Int32
    lower_bound: Float32
    scale: Float32
    eps: Float32


def placeholder() -> Arguments:
    """Values to compile with: only their types matter."""
    return Arguments(*(kind(1) for kind in get_type_hints(Arguments).values()))


_TENSORS = (
    "slots",
    "f_b",
    "conv_weight",
    "conv_bias",
    "projected",
    "A_log",
    "dt_bias",
    "norm_weight",
    "conv_state",
    "state",
    "accepted",
    "corrections",
    "key_gates",
    "record_rows",
    "pending",
    "out",
)


def values(operands: StepOperands, per: int = 0) -> tuple[int | float, ...]:
    """The fields of `Arguments` for checked operands."""
    o = operands
    assert o.lower_bound is not None
    found: dict[str, int | float] = {
        name: 0 if (tensor := getattr(o, name)) is None else tensor.data_ptr() for name in _TENSORS
    }
    found["conv_stride"], found["channel_stride"], found["tap_stride"] = o.conv_state.stride()
    found |= {
        "slots_stride": o.slots.stride(0),
        "heads": o.A_log.shape[0],
        "pitch": o.projected.stride(0),
        "state_stride": o.state.stride(0),
        "corrections_stride": 0 if o.corrections is None else o.corrections.stride(0),
        "key_gates_stride": 0 if o.key_gates is None else o.key_gates.stride(0),
        "record_tokens": 0 if o.corrections is None else o.corrections.shape[2],
        "requests": o.slots.shape[0],
        "per": per,
        "lower_bound": o.lower_bound,
        "scale": o.scale,
        "eps": o.eps,
    }
    return tuple(found[name] for name in Arguments._fields)


class Rules(Protocol):
    """The part of a kernel's plan that says what its operands must be.

    layout      of the window: rows = dim-first, copied whole; taps = window-major; any = read by
                element
    window      most entries of a `rows` window
    streamable  projection and window are read by 16-byte copies
    """

    @property
    def kind(self) -> str: ...
    @property
    def tokens(self) -> int: ...
    @property
    def state_dtype(self) -> str: ...
    @property
    def weight_dtype(self) -> str: ...
    @property
    def layout(self) -> str: ...
    @property
    def window(self) -> int: ...
    @property
    def streamable(self) -> bool: ...


def window_rules(
    problem: Problem, streamable: bool, entries: int | None
) -> tuple[Literal["rows", "taps", "any"], int]:
    """`layout` and `window` of `Rules`. entries: most of a `rows` window; None: those of the
    problem."""
    if not streamable:
        return "any", 0
    if problem.conv_layout == "window-major":
        return "taps", 0
    return "rows", problem.window if entries is None else entries


def _refuse(o: StepOperands, name: str, rule: str) -> None:
    tensor = getattr(o, name)
    about = (
        ""
        if tensor is None
        else f" ({tensor.dtype}, {tuple(tensor.shape)}, strides {tensor.stride()})"
    )
    raise ValueError(f"{name}{about} {rule}")


def check(variant: str, rules: Rules, operands: StepOperands) -> None:
    """Raises ValueError, naming the operand, for operands that a kernel compiled under `rules`
    can't take."""
    o, p = operands, rules
    if o.lower_bound is None:
        raise ValueError(f"lower_bound is None: {variant} needs a bounded gate")
    dtypes = _dtypes(p, o)
    for name, dtype in dtypes.items():
        tensor = getattr(o, name)
        if tensor is None or str(tensor.dtype) != dtype:
            _refuse(o, name, f"must be {dtype} for the compiled kernel")
    _check_layouts(p, o, dtypes)
    _check_sizes(p, o)
    _check_window(p, o)


def _dtypes(p: Rules, o: StepOperands) -> dict[str, str]:
    weight = _F32 if p.weight_dtype == "fp32" else _BF16
    dtypes = {
        "projected": _BF16,
        "conv_weight": weight,
        "conv_state": _BF16,
        "f_b": _BF16,
        "A_log": _F32,
        "dt_bias": _F32,
        "norm_weight": _F32,
        "state": _F32 if p.state_dtype == "fp32" else _BF16,
        "slots": _INT32,
        "out": _BF16,
    }
    if o.conv_bias is not None:
        dtypes["conv_bias"] = weight
    if p.kind == "spec":
        dtypes["accepted"] = _INT32
    if p.kind in ("record", "replay"):
        dtypes |= {"corrections": _F32, "key_gates": _BF16, "record_rows": _INT32}
    if p.kind == "replay":
        dtypes["pending"] = _INT32
    return dtypes


def _check_layouts(p: Rules, o: StepOperands, dtypes: dict[str, str]) -> None:
    """Strides and alignments of all but the window."""
    strided = ("projected", "conv_state", "state", "slots", "corrections", "key_gates")
    for name in dtypes:
        tensor = getattr(o, name)
        if name not in strided and not tensor.is_contiguous():
            _refuse(o, name, "must be contiguous")
        if (
            name in ("conv_weight", "conv_bias", "f_b", "dt_bias", "norm_weight", "out")
            and tensor.data_ptr() % 16
        ):
            _refuse(o, name, "must start at a multiple of 16 bytes")
        if name in ("state", "corrections", "key_gates"):
            if not tensor[0].is_contiguous():
                _refuse(o, name, "must be dense but for its leading stride")
            if tensor.data_ptr() % 16 or tensor.stride(0) * tensor.element_size() % 16:
                _refuse(o, name, "must have 16-byte aligned pages")
    if o.projected.stride(1) != 1:
        _refuse(o, "projected", "must have contiguous rows")
    if p.streamable and (o.projected.data_ptr() % 16 or o.projected.stride(0) % _UNIT):
        _refuse(o, "projected", "must have 16-byte aligned rows: compile with streamable=False")
    if o.slots.ndim == 2 and o.slots.shape[1] > 1 and o.slots.stride(1) != 1:
        _refuse(o, "slots", "must have contiguous rows")


def _check_sizes(p: Rules, o: StepOperands) -> None:
    heads, requests = o.A_log.shape[0], o.slots.shape[0]
    D = heads * HEAD_DIM
    if o.dt_bias.shape[0] != D:
        _refuse(o, "dt_bias", f"must have {D} elements")
    if o.projected.shape[1] < 4 * D + HEAD_DIM + heads:
        _refuse(o, "projected", f"must have {4 * D + HEAD_DIM + heads} columns")
    if o.projected.shape[0] != requests * p.tokens:
        _refuse(o, "projected", f"must have {p.tokens} rows per request")
    tokens = 1 if o.slots.ndim == 1 else o.slots.shape[1]
    if tokens != (p.tokens if p.kind == "spec" else 1):
        _refuse(o, "slots", f"doesn't fit kind {p.kind} with {p.tokens} tokens")
    if p.kind in ("record", "replay"):
        assert o.corrections is not None
        assert o.key_gates is not None
        if o.corrections.shape[2] < p.tokens:
            _refuse(o, "corrections", f"must hold {p.tokens} tokens")
        if o.key_gates.shape[2] != o.corrections.shape[2]:
            _refuse(o, "key_gates", "must hold as many tokens as corrections")


def _check_window(p: Rules, o: StepOperands) -> None:
    slot, channel, tap = o.conv_state.stride()
    entries = o.conv_state.shape[2]
    if entries < p.tokens + 2:
        _refuse(o, "conv_state", f"must have at least {p.tokens + 2} entries")
    if not p.streamable:
        return
    if o.conv_state.data_ptr() % 16 or slot % _UNIT:
        _refuse(o, "conv_state", "must have 16-byte aligned slots: compile with streamable=False")
    if p.layout == "rows" and not (tap == 1 and channel == entries and entries <= p.window):
        _refuse(
            o,
            "conv_state",
            f"must be dim-first with at most {p.window} entries for the compiled kernel",
        )
    if p.layout == "taps" and not (channel == 1 and tap % _UNIT == 0):
        _refuse(
            o,
            "conv_state",
            "must be window-major with 16-byte aligned entries for the compiled kernel",
        )
