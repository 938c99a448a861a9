"""Who a kernel is: names of its machine code and of its launches, by which measurements and
certificates refer to it.

    identity.code(name, compiled, problem, options, gpu)   "3f2a9c01d5e8b7a6-90ab12cd34ef5678"

The first half names the binary (`cubin.Binary.digest`), the second what the host asks of the driver
for one launch over standard operands of the problem: grid, CTAs, clusters, attributes and the value
of every parameter. Neither changes with a comment, a name or a file; either changes with what a GPU
does. Of a variant without binaries of ours, as the Triton chain, both name its sources without
their prose.
"""

from __future__ import annotations

import hashlib
from dataclasses import fields, replace
from functools import cache
from typing import Any

import torch

from kda_kernels import variants
from kda_kernels.device import cubin
from kda_kernels.device.gpu import Gpu
from kda_kernels.device.machine_code import DIGITS
from kda_kernels.operands import CommitOperands, Operands, StepOperands
from kda_kernels.problem import HEAD_DIM, Problem

_PAGE = 1 << 40
"""Between the addresses of stand-in operands: no stride or size comes near."""


def code(variant: str, compiled: Any, problem: Problem, options: Any, gpu: Gpu) -> str:
    """Names of the binary and of the launch of a compiled variant, as "binary-launch"."""
    return f"{binary(variant, compiled)}-{launch(variant, problem, options, gpu)}"


def binary(variant: str, compiled: Any) -> str:
    """16 hexadecimal digits that name the machine code of a compiled variant."""
    found = getattr(compiled, "binary", None)
    return _sources(variant) if found is None else str(found.digest)


@cache
def _sources(variant: str) -> str:
    """The same for a variant that has no binaries of ours."""
    return variants.digest(variant).removeprefix("sha256:")[:DIGITS]


@cache
def launch(variant: str, problem: Problem, options: Any, gpu: Gpu) -> str:
    """16 hexadecimal digits that name what one launch over standard operands asks of the driver.
    Needs no GPU.

    Raises ValueError if the variant can't take the problem.
    """
    module = variants.load(variant)
    if not variants.declared(variant).binaries:
        return _sources(variant)
    operands = standard(problem, align=getattr(options, "align", False))
    with cubin.recorded() as launches:
        module.launch(module.compile(problem, options, gpu), operands, 0)
    names = {
        getattr(operands, f.name).data_ptr(): f.name
        for f in fields(operands)
        if _is_placed(operands, f.name)
    }
    told = []
    for found in launches:
        values: tuple[Any, ...] = tuple(names.get(value, value) for value in found.values)
        told.append(replace(found, values=values))
    return hashlib.sha256(repr(told).encode()).hexdigest()[:DIGITS]


class _Placed(torch.Tensor):
    """A tensor without memory that says it has an address."""

    address: int

    def data_ptr(self) -> int:
        return self.address


def _is_placed(operands: Operands, name: str) -> bool:
    return isinstance(getattr(operands, name), _Placed)


def standard(problem: Problem, align: bool = False) -> Operands:
    """Operands of a problem without memory, laid out as `make_step` and `make_commit` do, at
    made-up addresses.

    align   of a commit: with block boundaries
    """
    make = _Maker()
    return _commit(problem, make, align) if problem.folds_only else _step(problem, make)


class _Maker:
    """Makes stand-ins, each at an address of its own."""

    def __init__(self) -> None:
        self._made = 0

    def __call__(
        self, shape: tuple[int, ...], dtype: torch.dtype, *, transposed: bool = False
    ) -> torch.Tensor:
        if transposed:
            shape = (*shape[:-2], shape[-1], shape[-2])
        tensor = torch.empty(shape, dtype=dtype, device="meta")
        placed = (tensor.transpose(-1, -2) if transposed else tensor).as_subclass(_Placed)
        self._made += 1
        placed.address = self._made * _PAGE
        return placed


_DTYPES = {
    "projected": torch.bfloat16,
    "conv_state": torch.bfloat16,
    "f_b": torch.bfloat16,
    "out": torch.bfloat16,
    "key_gates": torch.bfloat16,
    "slots": torch.int32,
    "accepted": torch.int32,
    "record_rows": torch.int32,
    "pending": torch.int32,
}
"""Of a step's operands; FP32 those that are not named."""
_STATE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def _step(problem: Problem, make: _Maker) -> StepOperands:
    tensors: dict[str, Any] = {}
    for name, shape in problem.operand_shapes.items():
        dtype = _DTYPES.get(name, torch.float32)
        if name == "state":
            dtype = _STATE_DTYPES[problem.state_dtype]
        swapped = name == "conv_state" and problem.conv_layout == "window-major"
        tensors[name] = make(shape, dtype, transposed=swapped)
    return StepOperands(**tensors, lower_bound=problem.lower_bound)


def _commit(problem: Problem, make: _Maker, align: bool) -> CommitOperands:
    R, H, Q, L = problem.requests, problem.heads, problem.tokens, problem.layers
    pages = 1 + R * (1 + (problem.kind == "commit") + align)
    state, row = _STATE_DTYPES[problem.state_dtype], torch.int32
    table, plan = ((L, 2), torch.int64), ((R,), row)
    return CommitOperands(
        states=tuple(make((pages, H, HEAD_DIM, HEAD_DIM), state) for _ in range(L)),
        corrections=tuple(make((R, H, Q, HEAD_DIM), torch.float32) for _ in range(L)),
        key_gates=tuple(make((R, H, Q, 2 * HEAD_DIM), torch.bfloat16) for _ in range(L)),
        A_log=make((L, H), torch.float32),
        dt_bias=make((L, H, HEAD_DIM), torch.float32),
        source=make(*plan),
        length=make(*plan),
        destination=make(*plan),
        record_rows=make(*plan),
        boundary_length=make(*plan) if align else None,
        boundary_slot=make(*plan) if align else None,
        state_table=make(*table),
        corrections_table=make(*table),
        key_gates_table=make(*table),
        lower_bound=-5.0 if problem.lower_bound is None else problem.lower_bound,
    )
