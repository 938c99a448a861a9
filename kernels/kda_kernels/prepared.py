"""What a serving engine calls: a layer's steps and the layers' commits, chosen and compiled ahead of time.

A key names a step's shape: `requests` for a decode, `(requests, tokens)` for a verify of 2..8 tokens, kind record where
the layer keeps records, else spec. `PreparedKda.prepare` chooses and compiles per key; `PreparedKda.run` only looks its
key up and launches. Deferred commits (`Caches.pending`) are refused: nothing here replays or flushes yet.
Source: docs/kernels.md, "The dispatcher".
"""

from __future__ import annotations

import pkgutil
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from kda_kernels import policies, stock, variants
from kda_kernels.gpu import Gpu, current_gpu
from kda_kernels.operands import CommitOperands, StepOperands, address_table
from kdabench.problem import CONV_WIDTH, HEAD_DIM, ConvLayout, Kind, Problem, StateDtype

Key = int | tuple[int, int]
_STATE_DTYPE: dict[torch.dtype, StateDtype] = {torch.float32: "fp32", torch.bfloat16: "bf16"}
_UNIT = 8  # BF16 elements of a 16-byte copy
_LONGEST_WINDOW = 16  # entries that variants copy whole

_COMMIT_FORMS: tuple[tuple[int | None, dict[str, Any]], ...] = (
    (400, {"source": "registers", "rows_per_cta": 64, "columns": 4, "heads_per_cta": 1}),
    (4400, {"source": "bulk", "rows_per_cta": 128, "columns": 4, "heads_per_cta": 1}),
    (None, {"source": "ring", "heads_per_cta": 1}),
)
"""Pages (layers * heads * requests) up to which a form of KdaCommit is taken. From results/nvidia-h200/commit.jsonl,
BF16: registers win by 9 % and more up to 192 pages, bulk from 828 to 3072 (by 1 %), the ring from 6144 on; between two
measured counts their geometric mean."""


class Policy(Protocol):
    """What is asked of a module of `kda_kernels.policies`; docs/policy.md."""

    def ranked(self, heads: int, requests: int, tokens: int, kind: str, *, streamable: bool = ...) -> Any: ...
    def explain(self, heads: int, requests: int, tokens: int, kind: str, *, streamable: bool = ...) -> Any: ...


class Choice(NamedTuple):
    variant: str
    options: Mapping[str, Any]
    flush: bool = False


class DefaultPolicy:
    """For devices without a policy: KdaSplit with its default schedule, stock where that is unsupported."""

    rule, note = "default", "no policy was measured on this device"

    def ranked(self, *step: object, streamable: bool = True) -> Sequence[Choice]:
        return Choice("KdaSplit", {}), Choice("stock", {})

    def explain(self, *step: object, streamable: bool = True) -> DefaultPolicy:
        return self


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
    """A layer's caches, `StepOperands` says their shapes. Meta tensors will do to see what `prepare` would choose.

    corrections, key_gates, record_rows   all or none: with them verifies are of kind record
    record_rows   [>= R] int32: entry b is the record row of the step's request b
    pending       refused: deferred commits aren't served yet
    """

    state: Tensor
    conv_state: Tensor
    corrections: Tensor | None = None
    key_gates: Tensor | None = None
    record_rows: Tensor | None = None
    pending: Tensor | None = None


@dataclass(frozen=True)
class Row:
    """What `prepare` decided for a key. options: the variant's Spec in full."""

    key: Key
    variant: str
    options: dict[str, Any]
    reason: str


@dataclass(frozen=True)
class _Step:
    row: Row
    kind: Kind
    rows: int
    pitch: int
    module: Any
    compiled: Any
    unchained: Any  # `compiled` without PDL, under which slots would be read before the copy of them is visible
    slots: Tensor  # the step's table, where the caller's isn't contiguous


_binaries: dict[Any, Any] = {}
_warned: set[tuple[str, Gpu]] = set()


@cache
def _compiled(variant: str, problem: Problem, spec: Any, gpu: Gpu) -> Any:
    """One per choice and process, so that layers share stock's scratch; one binary, so that it is loaded once."""
    compiled = variants.load(variant).compile(problem, spec, gpu)
    binary = getattr(compiled, "binary", None)
    return compiled if binary is None else replace(compiled, binary=_binaries.setdefault(binary, binary))


def find_policy(gpu: Gpu, device_name: str) -> Policy:
    """The policy measured on this device, else `DefaultPolicy`, with one warning per device and process."""
    capability = divmod(int(gpu.arch[3:-1]), 10)
    for found in pkgutil.iter_modules(policies.__path__):
        module: Any = import_module(f"{policies.__name__}.{found.name}")
        if module.matches(device_name, gpu.sms, capability):
            return cast(Policy, module)
    if (device_name, gpu) not in _warned:
        _warned.add((device_name, gpu))
        where = f"{device_name or 'an unnamed device'} ({gpu.arch}, {gpu.sms} SMs)"
        warnings.warn(f"no policy for {where}: KdaSplit's default schedule serves all steps", stacklevel=3)
    return DefaultPolicy()


class PreparedKda:
    """The steps of one KDA layer.

    table   key -> (row pitch of the projection, gate mode); `(requests, 1)` is the decode key `requests`. The gate mode
            overrides that of the policy's options; None leaves it to them
    Launches of one key share its slot table and, with stock, scratch: they must be ordered, as those of a stream are.
    Raises ValueError, naming what is wrong, for weights and keys that don't fit.
    """

    def __init__(
        self, weights: LayerWeights, table: Mapping[Key, tuple[int, int | None]], conv_layout: ConvLayout = "dim-first"
    ) -> None:
        self.weights, self.conv_layout = weights, conv_layout
        self.heads = heads = weights.A_log.numel()
        D = heads * HEAD_DIM
        own = [t for t in (weights.conv_weight, weights.conv_bias) if t is not None]
        for t, shape in zip(own, ((3 * D, 1, CONV_WIDTH), (3 * D,)), strict=False):
            _check("conv_weight, conv_bias", t, shape, tuple(_STATE_DTYPE))
        _check("f_b", weights.f_b, (D, HEAD_DIM), (torch.bfloat16,))
        _check("A_log", weights.A_log, tuple(weights.A_log.shape), (torch.float32,))
        _check("dt_bias", weights.dt_bias, (D,), (torch.float32,))
        self.table: dict[Key, tuple[int, int | None]] = {}
        for given, (pitch, gate_mode) in table.items():
            key = given[0] if isinstance(given, tuple) and given[1] == 1 else given
            problem = _problem(key, "spec", heads, "fp32", conv_layout)
            if pitch < problem.used_columns:
                raise ValueError(f"key {given}: row pitch {pitch} is below the {problem.used_columns} columns used")
            if self.table.setdefault(key, (pitch, gate_mode)) != (pitch, gate_mode):
                raise ValueError(f"key {given}: given twice, as {self.table[key]} and {(pitch, gate_mode)}")
        dtype = torch.bfloat16 if all(t.dtype == torch.bfloat16 for t in own) else torch.float32
        device = weights.conv_weight.device
        self._conv_weight = torch.empty(3, CONV_WIDTH, D, dtype=dtype, device=device)
        self._conv_bias = None if weights.conv_bias is None else torch.empty(3 * D, dtype=dtype, device=device)
        self._norm_weight = torch.empty(HEAD_DIM, dtype=torch.float32, device=device)
        self._steps: dict[Key, _Step] = {}
        self.process_weights_after_loading()

    def process_weights_after_loading(self) -> None:
        """Derive what the kernels read from the layer's weights again, in place: captured graphs stay valid."""
        with torch.no_grad():
            self._conv_weight.copy_(self.weights.conv_weight.view(3, -1, CONV_WIDTH).transpose(1, 2))
            self._norm_weight.copy_(self.weights.norm_weight)
            if self._conv_bias is not None and self.weights.conv_bias is not None:
                self._conv_bias.copy_(self.weights.conv_bias)

    def prepare(self, caches: Caches, gpu: Gpu | None = None, policy: Policy | None = None) -> tuple[Row, ...]:
        """Choose and compile for every key, from shapes alone; on a GPU also load, by a launch that changes nothing.

        gpu      None: the current device; else nothing is loaded, and without a `policy` `DefaultPolicy` holds
        policy   None: the one that was measured on this device, or `DefaultPolicy`
        Graphs captured before hold the old slot tables: capture them again. Raises ValueError for caches that no
        variant takes, and for `pending`.
        """
        live = gpu is None
        gpu = gpu or current_gpu()
        if policy is None:
            policy = find_policy(gpu, torch.cuda.get_device_name() if live else "")
        self._check_caches(caches)
        steps = {key: self._choose(key, caches, gpu, policy) for key in self.table}
        if live:
            for step in steps.values():
                self._load(step, caches)
        self._steps = steps
        return tuple(step.row for step in steps.values())

    def run(
        self,
        projected: Tensor,
        out: Tensor,
        caches: Caches,
        slots: Tensor,
        accepted: Tensor | None = None,
        tokens: int = 1,
        stream: Any = None,
    ) -> None:
        """Enqueue one step on a stream (handle or torch's; None: the current one). Compiles and allocates nothing.

        projected  [R * tokens, pitch]   bf16   of the key's row pitch
        slots      [R] int32; spec: [R, tokens]. A slice of a larger table is copied to the key's own first
        accepted   [R] int32, spec only
        Raises KeyError for a key that wasn't prepared, ValueError for operands that don't fit it.
        """
        requests = slots.shape[0]
        key: Key = requests if tokens == 1 else (requests, tokens)
        step = self._steps.get(key)
        if step is None:
            raise KeyError(f"key {key} was not prepared; prepared: {', '.join(map(str, self._steps)) or 'none'}")
        _refuse_pending(caches)
        if projected.stride(0) != step.pitch:
            raise ValueError(f"projected: row pitch {projected.stride(0)} is not the {step.pitch} of key {key}")
        columns = 4 * self.heads * HEAD_DIM + HEAD_DIM + self.heads
        if projected.ndim != 2 or projected.shape[0] != step.rows or projected.shape[1] < columns:
            raise ValueError(f"projected: {tuple(projected.shape)} is not [{step.rows}, >= {columns}] of key {key}")
        _check("out", out, (step.rows, self.heads * HEAD_DIM), (torch.bfloat16,))
        if slots.dtype != torch.int32 or slots.numel() != step.slots.numel():
            raise ValueError(f"slots: {slots.dtype} {tuple(slots.shape)} is not int32 {tuple(step.slots.shape)}")
        if slots.device != step.slots.device:
            raise ValueError(f"slots: on {slots.device}, but key {key} was prepared on {step.slots.device}")
        if (accepted is None) is (step.kind == "spec"):
            raise ValueError(f"accepted: {'missing' if accepted is None else 'given'} for key {key}, kind {step.kind}")
        if accepted is not None:
            _check("accepted", accepted, (requests,), (torch.int32,))
        stream, slots, compiled = _handle(stream, projected.device), slots.view(step.slots.shape), step.compiled
        if not slots.is_contiguous():
            with stock._on(stream, slots.device) if slots.is_cuda else nullcontext():
                step.slots.copy_(slots)
            slots, compiled = step.slots, step.unchained
        step.module.launch(compiled, self._operands(step, projected, out, caches, slots, accepted), stream)

    def _operands(
        self, step: _Step, projected: Tensor, out: Tensor, caches: Caches, slots: Tensor, accepted: Tensor | None
    ) -> StepOperands:
        w, record = self.weights, step.kind == "record"
        rows = caches.record_rows
        if record and (rows is None or caches.corrections is None or caches.key_gates is None):
            raise ValueError(f"caches: key {step.row.key} was prepared with records")
        return StepOperands(
            projected=projected, conv_weight=self._conv_weight, conv_bias=self._conv_bias,
            conv_state=caches.conv_state, f_b=w.f_b, A_log=w.A_log.view(-1), dt_bias=w.dt_bias,
            norm_weight=self._norm_weight, state=caches.state, slots=slots, out=out, accepted=accepted,
            corrections=caches.corrections if record else None, key_gates=caches.key_gates if record else None,
            record_rows=rows[: slots.shape[0]] if record and rows is not None else None,
            lower_bound=w.lower_bound, scale=w.scale, eps=w.eps,
        )  # fmt: skip

    def _check_caches(self, caches: Caches) -> None:
        _refuse_pending(caches)
        state, window, H = caches.state, caches.conv_state, self.heads
        tokens = max((key[1] for key in self.table if isinstance(key, tuple)), default=1)
        requests = max((key if isinstance(key, int) else key[0] for key in self.table), default=1)
        _check("state", state, (None, H, HEAD_DIM, HEAD_DIM), tuple(_STATE_DTYPE), dense_from=1)
        _check("conv_state", window, (None, 3 * H * HEAD_DIM, None), tuple(_STATE_DTYPE), dense_from=3)
        if window.shape[2] < tokens + 2:
            raise ValueError(f"conv_state: {window.shape[2]} entries; {tokens} tokens need {tokens + 2}")
        if window.stride(2 if self.conv_layout == "dim-first" else 1) != 1:
            raise ValueError(f"conv_state: strides {window.stride()} are not {self.conv_layout}")
        records = (caches.corrections, caches.key_gates, caches.record_rows)
        if any(t is None for t in records):
            if not all(t is None for t in records):
                raise ValueError("corrections, key_gates and record_rows go together")
            return
        corrections, key_gates, rows = cast(tuple[Tensor, Tensor, Tensor], records)
        capacity = corrections.shape[2]
        _check("corrections", corrections, (None, H, None, HEAD_DIM), (torch.float32,), dense_from=1)
        _check("key_gates", key_gates, (None, H, capacity, 2 * HEAD_DIM), (torch.bfloat16,), dense_from=1)
        _check("record_rows", rows, (None,), (torch.int32,))
        if capacity < tokens or rows.shape[0] < requests:
            raise ValueError(f"records: {capacity} tokens, {rows.shape[0]} rows; the keys need {tokens}, {requests}")

    def _choose(self, key: Key, caches: Caches, gpu: Gpu, policy: Policy) -> _Step:
        """The first of the policy's choices that runs here, compiled."""
        kind: Kind = "record" if caches.corrections is not None else "spec"
        problem = _problem(key, kind, self.heads, _STATE_DTYPE[caches.state.dtype], self.conv_layout)
        pitch, gate_mode = self.table[key]
        (slot, channel, tap), entries = caches.conv_state.stride(), caches.conv_state.shape[2]
        dim_first = self.conv_layout == "dim-first"
        dense = channel == entries <= _LONGEST_WINDOW if dim_first else tap % _UNIT == 0
        streamable = dense and slot % _UNIT == 0 and pitch % _UNIT == 0
        known: dict[str, Any] = {
            "streamable": streamable,
            "window": entries if dim_first and streamable else None,
            "conv_weight_dtype": _STATE_DTYPE[self._conv_weight.dtype],
        }
        if gate_mode is not None:
            known["gate_mode"] = gate_mode
        only_stock = "the gate is unbounded" if self.weights.lower_bound is None else None
        if caches.conv_state.dtype != torch.bfloat16:
            only_stock = f"the convolution window is {caches.conv_state.dtype}"
        where = (self.heads, problem.requests, problem.tokens, problem.kind)
        refused = []
        for choice in policy.ranked(*where, streamable=streamable):
            why = only_stock if choice.variant != "stock" else None
            if choice.flush or choice.variant not in variants.NAMES:
                why = "not in this version"
            if why is None:
                spec = _spec(choice.variant, choice.options, known)
                module = variants.load(choice.variant)
                why = module.unsupported(problem, spec, gpu)
                if not streamable and choice.variant != "stock" and not hasattr(spec, "streamable"):
                    why = "the step is not streamable"
            if why is None:
                break
            refused.append(f"{choice.variant}: {why}")
        else:
            raise ValueError(f"key {key}: no variant takes it; {'; '.join(refused)}")
        explanation = policy.explain(*where, streamable=streamable)
        reason = "; ".join((f"{explanation.rule} ({explanation.note})", *refused))
        compiled = _compiled(choice.variant, problem, spec, gpu)
        device = caches.state.device
        if isinstance(compiled, stock.Compiled) and device.type != "meta":
            scratch = device, problem.rows
            if scratch not in compiled.scratch:
                compiled.scratch[scratch] = stock.Scratch.allocate(problem.rows, problem.channels, device)
        unchained = replace(compiled, pdl=False) if getattr(compiled, "pdl", False) else compiled
        table = torch.zeros(problem.operand_shapes["slots"], dtype=torch.int32, device=device)
        row = Row(key, choice.variant, variants.spec_dict(spec), reason)
        return _Step(row, problem.kind, problem.rows, pitch, module, compiled, unchained, table)

    def _load(self, step: _Step, caches: Caches) -> None:
        """Run the step with null requests alone: loads its binary, or has Triton compile, and changes no cache."""
        device = caches.state.device
        if device.type != "cuda":
            return
        projected = torch.zeros(step.rows, step.pitch, dtype=torch.bfloat16, device=device)
        out = torch.empty(step.rows, self.heads * HEAD_DIM, dtype=torch.bfloat16, device=device)
        requests = step.slots.shape[0]
        accepted = torch.ones(requests, dtype=torch.int32, device=device) if step.kind == "spec" else None
        operands = self._operands(step, projected, out, caches, step.slots, accepted)
        step.module.launch(step.unchained, operands, torch.cuda.current_stream(device).cuda_stream)


class CommitContext:
    """The commits of all layers, one launch each. Convolution windows are rolled apart, by `stock.roll_window`.

    The caches' tensors are found by address: they must stay where they are.
    align   commits store block boundaries too
    Raises ValueError for layers that differ in shape, keep no records, or have an unbounded gate.
    """

    def __init__(
        self, weights: Sequence[LayerWeights], caches: Sequence[Caches], gpu: Gpu | None = None, align: bool = False
    ) -> None:
        live = gpu is None
        gpu = gpu or current_gpu()
        if not caches or len(weights) != len(caches):
            raise ValueError(f"{len(weights)} weights and {len(caches)} caches: one of each per layer")
        bound = weights[0].lower_bound
        if bound is None or any(w.lower_bound != bound for w in weights):
            raise ValueError(f"lower_bound: {[w.lower_bound for w in weights]} must be one number, the gate bounded")
        per_layer = [tuple(getattr(c, name) for c in caches) for name in ("state", "corrections", "key_gates")]
        for tensors in per_layer:
            if any(t is None for t in tensors):
                raise ValueError("caches: a layer keeps no records")
            if len({(t.dtype, t.shape[1:], t.stride()[1:], t.device) for t in tensors}) != 1:
                raise ValueError("caches: layers differ in dtype, shape, inner strides or device")
        states, corrections, key_gates = per_layer
        heads, device, f32 = states[0].shape[1], states[0].device, torch.float32
        nothing = torch.zeros(1, dtype=torch.int32, device=device)  # commits nothing
        boundary = nothing if align else None
        self.weights = tuple(weights)
        self._operands = CommitOperands(
            states, corrections, key_gates,
            torch.empty(len(weights), heads, dtype=f32, device=device),
            torch.empty(len(weights), heads, HEAD_DIM, dtype=f32, device=device),
            nothing, nothing, nothing, nothing, boundary, boundary,
            address_table(states), address_table(corrections), address_table(key_gates), bound,
        )  # fmt: skip
        self.process_weights_after_loading()
        dtype = _STATE_DTYPE[states[0].dtype]
        problem = Problem("commit", 1, heads, corrections[0].shape[2], len(states), state_dtype=dtype)
        self._forms = [(most, *_commit_form(problem, form, align, gpu)) for most, form in _COMMIT_FORMS]
        if live and device.type == "cuda":
            for _, module, compiled in self._forms:
                module.launch(compiled, self._operands, torch.cuda.current_stream(device).cuda_stream)

    def process_weights_after_loading(self) -> None:
        """Gather the layers' gate weights again, in place."""
        with torch.no_grad():
            for w, A_log, dt_bias in zip(self.weights, self._operands.A_log, self._operands.dt_bias, strict=True):
                A_log.copy_(w.A_log.view_as(A_log))
                dt_bias.copy_(w.dt_bias.view_as(dt_bias))

    def commit(
        self,
        source: Tensor,
        length: Tensor,
        destination: Tensor,
        record_rows: Tensor,
        boundary_length: Tensor | None = None,
        boundary_slot: Tensor | None = None,
        stream: Any = None,
    ) -> None:
        """Fold `length` recorded tokens of each request into every layer's state. All `[R]` int32, contiguous.

        Compiles and allocates nothing. Raises ValueError for operands that don't fit; boundaries must be given if the
        context was made with `align`, and only then.
        """
        operands = replace(
            self._operands, source=source, length=length, destination=destination, record_rows=record_rows,
            boundary_length=boundary_length, boundary_slot=boundary_slot,
        )  # fmt: skip
        requests, device = source.shape[0], self._operands.A_log.device
        for name in ("source", "length", "destination", "record_rows", "boundary_length", "boundary_slot"):
            tensor, before = getattr(operands, name), getattr(self._operands, name)
            if (tensor is None) is not (before is None):
                raise ValueError(
                    f"{name}: {'missing' if tensor is None else 'given'}, unlike when the context was made"
                )
            if tensor is not None:
                stock._check(name, tensor, (requests,), (torch.int32,), device)
        pages = len(operands.states) * operands.A_log.shape[1] * requests
        _, module, compiled = next(form for form in self._forms if form[0] is None or pages <= form[0])
        if requests:
            module.launch(compiled, operands, _handle(stream, device))


def _commit_form(problem: Problem, form: dict[str, Any], align: bool, gpu: Gpu) -> tuple[Any, Any]:
    """Module and compiled commit: KdaCommit, or stock where it is unsupported."""
    for name, options in (("KdaCommit", {**form, "align": align}), ("stock", {})):
        module, spec = variants.load(name), variants.make_spec(name, options)
        why = module.unsupported(problem, spec, gpu)
        if why is None:
            return module, _compiled(name, problem, spec, gpu)
    raise ValueError(f"commit: {why}")


def _problem(key: Key, window_kind: Kind, heads: int, state_dtype: StateDtype, conv_layout: ConvLayout) -> Problem:
    if isinstance(key, tuple):
        return Problem(window_kind, key[0], heads, key[1], state_dtype=state_dtype, conv_layout=conv_layout)
    return Problem("decode", key, heads, state_dtype=state_dtype, conv_layout=conv_layout)


def _spec(variant: str, options: Mapping[str, Any], known: Mapping[str, Any]) -> Any:
    """The policy's options, with what the weights and caches say wherever the variant has such a choice."""
    names = {f.name for f in fields(variants.load(variant).Spec)}
    given = {name: value for name, value in options.items() if not (name == "pdl" and not value)}
    return variants.make_spec(variant, given | {name: value for name, value in known.items() if name in names})


def _handle(stream: Any, device: torch.device) -> Any:
    """The stream's handle; on a GPU None is the current stream."""
    if stream is None and device.type == "cuda":
        stream = torch.cuda.current_stream(device)
    return stream.cuda_stream if isinstance(stream, torch.cuda.Stream) else stream


def _refuse_pending(caches: Caches) -> None:
    if caches.pending is not None:
        raise ValueError("pending: deferred commits are not served yet; commit eagerly, by CommitContext")


def _check(
    name: str, tensor: Tensor, shape: tuple[int | None, ...], dtypes: tuple[torch.dtype, ...], dense_from: int = 0
) -> None:
    stock._check(name, tensor, shape, dtypes, tensor.device, dense_from)
