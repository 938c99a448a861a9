"""What a serving engine calls for a layer's steps, chosen and compiled ahead of time.

A key names a step's shape: `requests` for a decode, `(requests, tokens)` for a verify of 2..8
tokens, kind record where the layer keeps records, else spec. `PreparedKda.prepare` chooses and
compiles per key; `PreparedKda.run` only looks its key up and launches. Where commits are deferred
(`Caches.pending`), a verify replays what is pending or flushes first, as the policy says, and a
decode flushes. Source: docs/kernels.md, "The dispatcher".
"""

from __future__ import annotations

import pkgutil
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor

from kda_kernels import policies, stock, variants
from kda_kernels.device.gpu import Gpu, current_gpu
from kda_kernels.operands import StepOperands
from kda_kernels.problem import CONV_WIDTH, HEAD_DIM, ConvLayout, Kind, Problem, StateDtype
from kda_kernels.serving.commits import Flush
from kda_kernels.serving.layer import STATE_DTYPE, Caches, LayerWeights, check_own, stream_handle
from kda_kernels.tensors import on_stream

Key = int | tuple[int, int]
_UNIT = 8  # BF16 elements of a 16-byte copy
_LONGEST_WINDOW = 16  # entries that variants copy whole


class Policy(Protocol):
    """What is asked of a module of `kda_kernels.policies`; docs/policy.md."""

    def ranked(
        self, heads: int, requests: int, tokens: int, kind: str, *, streamable: bool = ...
    ) -> Any: ...
    def explain(
        self, heads: int, requests: int, tokens: int, kind: str, *, streamable: bool = ...
    ) -> Any: ...


class Choice(NamedTuple):
    variant: str
    options: Mapping[str, Any]
    flush: bool = False


class DefaultPolicy:
    """For devices without a policy: what has schedules, with its default one, and else the last
    resort."""

    rule, note = "default", "no policy was measured on this device"

    def ranked(self, *step: object, streamable: bool = True) -> Sequence[Choice]:
        taken = (variants.of_rule(rule) for rule in ("schedule", "stock_items"))
        return [Choice(name, {}, "replay" in step) for name in taken if name is not None]

    def explain(self, *step: object, streamable: bool = True) -> DefaultPolicy:
        return self


@dataclass(frozen=True)
class Row:
    """What `prepare` decided for a key.

    options  the variant's options in full
    flush    what is pending is folded in before the step
    """

    key: Key
    variant: str
    options: dict[str, Any]
    reason: str
    flush: bool = False


@dataclass(frozen=True)
class _Step:
    row: Row
    kind: Kind
    rows: int
    pitch: int
    module: Any
    compiled: Any
    unchained: Any  # `compiled` without PDL, for what comes right after a copy of slots or a flush: it would read early
    slots: Tensor  # the step's table, where the caller's isn't contiguous
    flush: Flush | None


_warned: set[tuple[str, Gpu]] = set()


def find_policy(gpu: Gpu, device_name: str) -> Policy:
    """The policy measured on this device, else `DefaultPolicy`, with one warning per device and
    process."""
    capability = divmod(int(gpu.arch[3:-1]), 10)
    for found in pkgutil.iter_modules(policies.__path__):
        module: Any = import_module(f"{policies.__name__}.{found.name}")
        if module.matches(device_name, gpu.sms, capability):
            return cast(Policy, module)
    if (device_name, gpu) not in _warned:
        _warned.add((device_name, gpu))
        where = f"{device_name or 'an unnamed device'} ({gpu.arch}, {gpu.sms} SMs)"
        scheduled = variants.of_rule("schedule")
        warnings.warn(
            f"no policy for {where}: {scheduled}'s default schedule serves all steps", stacklevel=3
        )
    return DefaultPolicy()


class PreparedKda:
    """The steps of one KDA layer.

    table   key -> (row pitch of the projection, gate mode); `(requests, 1)` is the decode key
            `requests`. The gate mode overrides that of the policy's options; None leaves it to them
    Launches of one key share its slot table and, with stock, scratch: they must be ordered, as
    those of a stream are. Raises ValueError, naming what is wrong, for weights and keys that don't
    fit.
    """

    def __init__(
        self,
        weights: LayerWeights,
        table: Mapping[Key, tuple[int, int | None]],
        conv_layout: ConvLayout = "dim-first",
    ) -> None:
        self.weights, self.conv_layout = weights, conv_layout
        self.heads = heads = weights.A_log.numel()
        D = heads * HEAD_DIM
        own = [t for t in (weights.conv_weight, weights.conv_bias) if t is not None]
        for t, shape in zip(own, ((3 * D, 1, CONV_WIDTH), (3 * D,)), strict=False):
            check_own("conv_weight, conv_bias", t, shape, tuple(STATE_DTYPE))
        check_own("f_b", weights.f_b, (D, HEAD_DIM), (torch.bfloat16,))
        check_own("A_log", weights.A_log, tuple(weights.A_log.shape), (torch.float32,))
        check_own("dt_bias", weights.dt_bias, (D,), (torch.float32,))
        self.table: dict[Key, tuple[int, int | None]] = {}
        for given, (pitch, gate_mode) in table.items():
            key = given[0] if isinstance(given, tuple) and given[1] == 1 else given
            problem = _problem(key, "spec", heads, "fp32", conv_layout, weights.lower_bound)
            if pitch < problem.used_columns:
                raise ValueError(
                    f"key {given}: row pitch {pitch} is below the {problem.used_columns} columns used"
                )
            if self.table.setdefault(key, (pitch, gate_mode)) != (pitch, gate_mode):
                raise ValueError(
                    f"key {given}: given twice, as {self.table[key]} and {(pitch, gate_mode)}"
                )
        dtype = torch.bfloat16 if all(t.dtype == torch.bfloat16 for t in own) else torch.float32
        device = weights.conv_weight.device
        self._conv_weight = torch.empty(3, CONV_WIDTH, D, dtype=dtype, device=device)
        self._conv_bias = (
            None if weights.conv_bias is None else torch.empty(3 * D, dtype=dtype, device=device)
        )
        self._norm_weight = torch.empty(HEAD_DIM, dtype=torch.float32, device=device)
        self._steps: dict[Key, _Step] = {}
        self.process_weights_after_loading()

    def process_weights_after_loading(self) -> None:
        """Derive what the kernels read from the layer's weights again, in place: captured graphs
        stay valid."""
        with torch.no_grad():
            self._conv_weight.copy_(
                self.weights.conv_weight.view(3, -1, CONV_WIDTH).transpose(1, 2)
            )
            self._norm_weight.copy_(self.weights.norm_weight)
            if self._conv_bias is not None and self.weights.conv_bias is not None:
                self._conv_bias.copy_(self.weights.conv_bias)

    def prepare(
        self, caches: Caches, gpu: Gpu | None = None, policy: Policy | None = None
    ) -> tuple[Row, ...]:
        """Choose and compile for every key, from shapes alone; on a GPU also load, by a launch that
        changes nothing.

        gpu      None: the current device; else nothing is loaded, and without a `policy`
                 `DefaultPolicy` holds
        policy   None: the one that was measured on this device, or `DefaultPolicy`

        Graphs captured before hold the old slot tables: capture them again. Raises ValueError for
        caches that no variant takes.
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
        deferred: bool | None = None,
        stream: Any = None,
    ) -> None:
        """Enqueue one step on a stream (handle or torch's; None: the current one). Compiles and
        allocates nothing.

        projected  [R * tokens, pitch]   bf16   of the key's row pitch
        slots      [R] int32; spec: [R, tokens]. A slice of a larger table is copied to the key's
                   own first
        accepted   [R] int32, spec only
        deferred   False: nothing is pending of these requests, so that a key that flushes need not
        Raises KeyError for a key that wasn't prepared, ValueError for operands that don't fit it.
        """
        requests = slots.shape[0]
        key: Key = requests if tokens == 1 else (requests, tokens)
        step = self._steps.get(key)
        if step is None:
            raise KeyError(
                f"key {key} was not prepared; prepared: {', '.join(map(str, self._steps)) or 'none'}"
            )
        if projected.stride(0) != step.pitch:
            raise ValueError(
                f"projected: row pitch {projected.stride(0)} is not the {step.pitch} of key {key}"
            )
        columns = 4 * self.heads * HEAD_DIM + HEAD_DIM + self.heads
        if projected.ndim != 2 or projected.shape[0] != step.rows or projected.shape[1] < columns:
            raise ValueError(
                f"projected: {tuple(projected.shape)} is not [{step.rows}, >= {columns}] of key {key}"
            )
        check_own("out", out, (step.rows, self.heads * HEAD_DIM), (torch.bfloat16,))
        if slots.dtype != torch.int32 or slots.numel() != step.slots.numel():
            raise ValueError(
                f"slots: {slots.dtype} {tuple(slots.shape)} is not int32 {tuple(step.slots.shape)}"
            )
        if slots.device != step.slots.device:
            raise ValueError(
                f"slots: on {slots.device}, but key {key} was prepared on {step.slots.device}"
            )
        if (accepted is None) is (step.kind == "spec"):
            raise ValueError(
                f"accepted: {'missing' if accepted is None else 'given'} for key {key}, kind {step.kind}"
            )
        if accepted is not None:
            check_own("accepted", accepted, (requests,), (torch.int32,))
        stream, slots, compiled = (
            stream_handle(stream, projected.device),
            slots.view(step.slots.shape),
            step.compiled,
        )
        if not slots.is_contiguous():
            with on_stream(stream if slots.is_cuda else None, slots.device):
                step.slots.copy_(slots)
            slots, compiled = step.slots, step.unchained
        if step.flush is not None and deferred is not False:
            assert caches.record_rows is not None
            step.flush.launch(caches, slots, caches.record_rows[:requests], stream)
            compiled = step.unchained
        step.module.launch(
            compiled, self._operands(step, projected, out, caches, slots, accepted), stream
        )

    def _operands(
        self,
        step: _Step,
        projected: Tensor,
        out: Tensor,
        caches: Caches,
        slots: Tensor,
        accepted: Tensor | None,
    ) -> StepOperands:
        w, record = self.weights, step.kind in ("record", "replay")
        rows = caches.record_rows
        if record and (rows is None or caches.corrections is None or caches.key_gates is None):
            raise ValueError(f"caches: key {step.row.key} was prepared with records")
        if step.kind == "replay" and caches.pending is None:
            raise ValueError(
                f"caches: pending is missing; key {step.row.key} was prepared to replay it"
            )
        return StepOperands(
            projected=projected, conv_weight=self._conv_weight, conv_bias=self._conv_bias,
            conv_state=caches.conv_state, f_b=w.f_b, A_log=w.A_log.view(-1), dt_bias=w.dt_bias,
            norm_weight=self._norm_weight, state=caches.state, slots=slots, out=out, accepted=accepted,
            corrections=caches.corrections if record else None, key_gates=caches.key_gates if record else None,
            record_rows=rows[: slots.shape[0]] if record and rows is not None else None,
            pending=caches.pending if step.kind == "replay" else None,
            lower_bound=w.lower_bound, scale=w.scale, eps=w.eps,
        )  # fmt: skip

    def _check_caches(self, caches: Caches) -> None:
        state, window, H = caches.state, caches.conv_state, self.heads
        tokens = max((key[1] for key in self.table if isinstance(key, tuple)), default=1)
        requests = max((key if isinstance(key, int) else key[0] for key in self.table), default=1)
        check_own("state", state, (None, H, HEAD_DIM, HEAD_DIM), tuple(STATE_DTYPE), dense_from=1)
        check_own(
            "conv_state", window, (None, 3 * H * HEAD_DIM, None), tuple(STATE_DTYPE), dense_from=3
        )
        if window.shape[2] < tokens + 2:
            raise ValueError(
                f"conv_state: {window.shape[2]} entries; {tokens} tokens need {tokens + 2}"
            )
        if window.stride(2 if self.conv_layout == "dim-first" else 1) != 1:
            raise ValueError(f"conv_state: strides {window.stride()} are not {self.conv_layout}")
        records = (caches.corrections, caches.key_gates, caches.record_rows)
        if any(t is None for t in records):
            if not all(t is None for t in records):
                raise ValueError("corrections, key_gates and record_rows go together")
            if caches.pending is not None:
                raise ValueError("pending: commits are deferred only where records are kept")
            return
        corrections, key_gates, rows = cast(tuple[Tensor, Tensor, Tensor], records)
        capacity = corrections.shape[2]
        check_own(
            "corrections", corrections, (None, H, None, HEAD_DIM), (torch.float32,), dense_from=1
        )
        check_own(
            "key_gates",
            key_gates,
            (None, H, capacity, 2 * HEAD_DIM),
            (torch.bfloat16,),
            dense_from=1,
        )
        check_own("record_rows", rows, (None,), (torch.int32,))
        if capacity < tokens or rows.shape[0] < requests:
            raise ValueError(
                f"records: {capacity} tokens, {rows.shape[0]} rows; the keys need {tokens}, {requests}"
            )
        if caches.pending is not None:
            check_own("pending", caches.pending, (None,), (torch.int32,))
            if caches.pending.shape[0] < corrections.shape[0]:
                raise ValueError(
                    f"pending: {caches.pending.shape[0]} entries for {corrections.shape[0]} record rows"
                )
            if state.dtype != torch.float32 or self.weights.lower_bound is None:
                raise ValueError(
                    "pending: commits are deferred only with an FP32 state and a bounded gate"
                )

    def _choose(self, key: Key, caches: Caches, gpu: Gpu, policy: Policy) -> _Step:
        """The first of the policy's choices that runs here, compiled."""
        kind: Kind = (
            "spec"
            if caches.corrections is None
            else "record"
            if caches.pending is None
            else "replay"
        )
        state_dtype, bound = STATE_DTYPE[caches.state.dtype], self.weights.lower_bound
        problem = _problem(key, kind, self.heads, state_dtype, self.conv_layout, bound)
        pitch = self.table[key][0]
        known = self._known(key, caches)
        streamable = known["streamable"]
        where = (self.heads, problem.requests, problem.tokens, problem.kind)
        refused = []
        for choice in policy.ranked(*where, streamable=streamable):
            own = problem
            if choice.flush and problem.kind == "replay":
                own = replace(problem, kind="record", pending=None)
            options, why = self._fit(choice, own, known, caches, gpu)
            if why is None:
                break
            refused.append(f"{choice.variant}: {why}")
        else:
            raise ValueError(f"key {key}: no variant takes it; {'; '.join(refused)}")
        flushes = caches.pending is not None and own.kind != "replay"
        explanation = policy.explain(*where, streamable=streamable)
        reason = "; ".join((f"{explanation.rule} ({explanation.note})", *refused))
        compiled = variants.compile_once(choice.variant, own, options, gpu)
        device = caches.state.device
        if isinstance(compiled, stock.Compiled) and device.type != "meta":
            scratch = device, own.rows
            if scratch not in compiled.scratch:
                compiled.scratch[scratch] = stock.Scratch.allocate(own.rows, own.channels, device)
        row = Row(key, choice.variant, variants.options_dict(options), reason, flushes)
        return _Step(
            row, own.kind, own.rows, pitch, variants.load(choice.variant), compiled,
            replace(compiled, pdl=False) if getattr(compiled, "pdl", False) else compiled,
            torch.zeros(own.operand_shapes["slots"], dtype=torch.int32, device=device),
            Flush(self.weights, caches, own.requests, gpu) if flushes else None,
        )  # fmt: skip

    def _known(self, key: Key, caches: Caches) -> dict[str, Any]:
        """What weights, caches and table say of a variant's options."""
        pitch, gate_mode = self.table[key]
        (slot, channel, tap), entries = caches.conv_state.stride(), caches.conv_state.shape[2]
        dim_first = self.conv_layout == "dim-first"
        dense = channel == entries <= _LONGEST_WINDOW if dim_first else tap % _UNIT == 0
        streamable = dense and slot % _UNIT == 0 and pitch % _UNIT == 0
        known: dict[str, Any] = {
            "streamable": streamable,
            "window": entries if dim_first and streamable else None,
            "conv_weight_dtype": STATE_DTYPE[self._conv_weight.dtype],
        }
        return known if gate_mode is None else known | {"gate_mode": gate_mode}

    def _fit(
        self, choice: Choice, problem: Problem, known: Mapping[str, Any], caches: Caches, gpu: Gpu
    ) -> tuple[Any, str | None]:
        """A choice's options here, and why it can't be taken, if so."""
        if choice.variant not in variants.NAMES:
            return None, "not in this version"
        declared = variants.declared(choice.variant)
        if STATE_DTYPE[caches.conv_state.dtype] not in declared.window_dtypes:
            return None, f"the convolution window is {caches.conv_state.dtype}"
        options = _options_of(choice.variant, choice.options, known)
        if declared.streams and not known["streamable"]:
            return options, "the step is not streamable"
        return options, variants.load(choice.variant).unsupported(problem, options, gpu)

    def _load(self, step: _Step, caches: Caches) -> None:
        """Run the step with null requests alone: loads its binary, or has Triton compile, and
        changes no cache."""
        device = caches.state.device
        if device.type != "cuda":
            return
        projected = torch.zeros(step.rows, step.pitch, dtype=torch.bfloat16, device=device)
        out = torch.empty(step.rows, self.heads * HEAD_DIM, dtype=torch.bfloat16, device=device)
        requests = step.slots.shape[0]
        accepted = (
            torch.ones(requests, dtype=torch.int32, device=device) if step.kind == "spec" else None
        )
        operands = self._operands(step, projected, out, caches, step.slots, accepted)
        stream = torch.cuda.current_stream(device).cuda_stream
        if step.flush is not None:
            step.flush.launch(caches, step.slots, torch.full_like(step.slots.view(-1), -1), stream)
        step.module.launch(step.unchained, operands, stream)


def _problem(
    key: Key,
    window_kind: Kind,
    heads: int,
    state_dtype: StateDtype,
    conv_layout: ConvLayout,
    lower_bound: float | None,
) -> Problem:
    requests, tokens = key if isinstance(key, tuple) else (key, 1)
    kind: Kind = window_kind if isinstance(key, tuple) else "decode"
    return Problem(
        kind,
        requests,
        heads,
        tokens,
        state_dtype=state_dtype,
        pending="mix" if kind == "replay" else None,
        conv_layout=conv_layout,
        lower_bound=lower_bound,
    )


def _options_of(variant: str, options: Mapping[str, Any], known: Mapping[str, Any]) -> Any:
    """The policy's options, with what the weights and caches say wherever the variant has such a
    choice."""
    names = variants.declared(variant).options
    given = {name: value for name, value in options.items() if not (name == "pdl" and not value)}
    return variants.make_options(
        variant, given | {name: value for name, value in known.items() if name in names}
    )
