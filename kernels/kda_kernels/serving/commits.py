"""Commits as a serving engine makes them: all layers in one launch, or one layer's flush before a
step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from kda_kernels import stock, variants
from kda_kernels.device.gpu import Gpu, current_gpu
from kda_kernels.operands import CommitOperands, address_table
from kda_kernels.problem import HEAD_DIM, Problem
from kda_kernels.serving.layer import STATE_DTYPE, Caches, LayerWeights, stream_handle
from kda_kernels.tensors import check_tensor, on_stream

_FORMS: tuple[tuple[int | None, dict[str, Any]], ...] = (
    (400, {"source": "registers", "rows_per_cta": 64, "columns": 4, "heads_per_cta": 1}),
    (4400, {"source": "bulk", "rows_per_cta": 128, "columns": 4, "heads_per_cta": 1}),
    (None, {"source": "ring", "heads_per_cta": 1}),
)
"""Pages (layers * heads * requests) up to which a form of KdaCommit is taken. From
results/nvidia-h200/commit.jsonl, BF16: registers win by 9 % and more up to 192 pages, bulk from 828
to 3072 (by 1 %), the ring from 6144 on; between two measured counts their geometric mean."""


class CommitContext:
    """The commits of all layers, one launch each. Convolution windows are rolled apart, by
    `stock.roll_window`.

    The caches' tensors are found by address: they must stay where they are.
    align   commits store block boundaries too
    Raises ValueError for layers that differ in shape, keep no records, or have an unbounded gate.
    """

    def __init__(
        self,
        weights: Sequence[LayerWeights],
        caches: Sequence[Caches],
        gpu: Gpu | None = None,
        align: bool = False,
    ) -> None:
        live = gpu is None
        gpu = gpu or current_gpu()
        if not caches or len(weights) != len(caches):
            raise ValueError(
                f"{len(weights)} weights and {len(caches)} caches: one of each per layer"
            )
        bound = weights[0].lower_bound
        if bound is None or any(w.lower_bound != bound for w in weights):
            raise ValueError(
                f"lower_bound: {[w.lower_bound for w in weights]} must be one number, the gate bounded"
            )
        per_layer = [
            tuple(getattr(c, name) for c in caches)
            for name in ("state", "corrections", "key_gates")
        ]
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
        dtype = STATE_DTYPE[states[0].dtype]
        problem = Problem(
            "commit", 1, heads, corrections[0].shape[2], len(states), state_dtype=dtype
        )
        self._forms = [(most, *_form(problem, form, align, gpu)) for most, form in _FORMS]
        if live and device.type == "cuda":
            for _, module, compiled in self._forms:
                module.launch(
                    compiled, self._operands, torch.cuda.current_stream(device).cuda_stream
                )

    def process_weights_after_loading(self) -> None:
        """Gather the layers' gate weights again, in place."""
        with torch.no_grad():
            for w, A_log, dt_bias in zip(
                self.weights, self._operands.A_log, self._operands.dt_bias, strict=True
            ):
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
        """Fold `length` recorded tokens of each request into every layer's state. All `[R]` int32,
        contiguous.

        Compiles and allocates nothing. Raises ValueError for operands that don't fit; boundaries
        must be given if the context was made with `align`, and only then.
        """
        operands = replace(
            self._operands, source=source, length=length, destination=destination, record_rows=record_rows,
            boundary_length=boundary_length, boundary_slot=boundary_slot,
        )  # fmt: skip
        requests, device = source.shape[0], self._operands.A_log.device
        for name in (
            "source",
            "length",
            "destination",
            "record_rows",
            "boundary_length",
            "boundary_slot",
        ):
            tensor, before = getattr(operands, name), getattr(self._operands, name)
            if (tensor is None) is not (before is None):
                raise ValueError(
                    f"{name}: {'missing' if tensor is None else 'given'}, unlike when the context was made"
                )
            if tensor is not None:
                check_tensor(name, tensor, (requests,), (torch.int32,), device)
        pages = len(operands.states) * operands.A_log.shape[1] * requests
        _, module, compiled = next(
            form for form in self._forms if form[0] is None or pages <= form[0]
        )
        if requests:
            module.launch(compiled, operands, stream_handle(stream, device))


def _form(problem: Problem, form: dict[str, Any], align: bool, gpu: Gpu) -> tuple[Any, Any]:
    """Module and compiled commit: KdaCommit, or stock where it is unsupported."""
    for name, given in (("KdaCommit", {**form, "align": align}), ("stock", {})):
        module, options = variants.load(name), variants.make_options(name, given)
        why = module.unsupported(problem, options, gpu)
        if why is None:
            return module, variants.compile_once(name, problem, options, gpu)
    raise ValueError(f"commit: {why}")


class Flush:
    """Folds what is pending of one layer, before a step that doesn't replay: states by KdaCommit,
    windows by stock.

    `pending` itself stays as it is, for the other layers: `stock.defer` overwrites it after the
    step, with zeros after a decode. The caches are found by address: they must stay where they are.
    """

    def __init__(self, weights: LayerWeights, caches: Caches, requests: int, gpu: Gpu) -> None:
        assert caches.corrections is not None
        assert caches.key_gates is not None
        assert weights.lower_bound is not None
        self._state, device = caches.state, caches.state.device
        heads, self._tokens = caches.state.shape[1], caches.corrections.shape[2]
        self._source, self._length, self._destination = torch.zeros(
            3, requests, dtype=torch.int32, device=device
        )
        states, corrections, key_gates = (caches.state,), (caches.corrections,), (caches.key_gates,)
        rows = torch.full((requests,), -1, dtype=torch.int32, device=device)
        self._operands = CommitOperands(
            states, corrections, key_gates,
            weights.A_log.view(1, heads), weights.dt_bias.view(1, heads, HEAD_DIM),
            self._source, self._length, self._destination, rows, None, None,
            address_table(states), address_table(corrections), address_table(key_gates), weights.lower_bound,
        )  # fmt: skip
        self._windows = (caches.conv_state,)
        self._window_table = address_table(self._windows)
        problem = Problem("flush", requests, heads, self._tokens)
        form = next(form for most, form in _FORMS if most is None or problem.items <= most)
        self._module, self._compiled = _form(problem, form, False, gpu)

    def launch(self, caches: Caches, slots: Tensor, record_rows: Tensor, stream: Any) -> None:
        """Enqueue on a stream's handle. slots: a column of request slots; record_rows [R].

        Raises ValueError for caches other than the layer was prepared with.
        """
        if caches.pending is None:
            raise ValueError(
                "caches: pending is missing; the layer was prepared to defer its commits"
            )
        if caches.state.data_ptr() != self._state.data_ptr():
            raise ValueError("caches: the states are not those that the layer was prepared with")
        with on_stream(stream, caches.state.device):
            stock.flush_plan(
                caches.pending,
                record_rows,
                slots,
                self._source,
                self._length,
                self._destination,
                self._tokens,
            )
            self._module.launch(
                self._compiled, replace(self._operands, record_rows=record_rows), stream
            )
            stock.roll_window(
                self._windows, self._window_table, self._source, self._length, self._destination
            )
