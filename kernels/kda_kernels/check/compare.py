"""Whether a launch computed what the reference did: the tolerances of docs/operation.md, and
nothing else.

All measures of one check are reduced on the device and read back at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kda_kernels.check import reference
from kda_kernels.check.reference import StepResult
from kda_kernels.operands import CommitOperands, Operands, StepOperands
from kda_kernels.problem import HEAD_DIM, Problem

OUT_ATOL = OUT_RTOL = 2e-2
OUT_NORM = 5e-3
CORRECTIONS_NORM = {torch.float32: 1e-3, torch.bfloat16: 5e-3}
"""By dtype of the state."""
STATE_NORM = {torch.float32: 1e-4, torch.bfloat16: 4e-3}

ITEM_NORM = 5e-2
"""Beside the norm over all, in which one wrong item of thousands would drown. Far above the
tolerances, because a raw gate at a BF16 tie may fall either way: with A up to 16 that moves a key
channel's decay by up to 16 %, 1.4e-2 of the state of its item, and several tokens may have one. An
item that is lost, swapped or not written is off by about 1."""

TIE_FRACTION = 2**-6
"""Part of the rounding distance (half a BF16 ulp) within which a value counts as a tie."""
TIE_RMS = 2**-18
"""The same, absolute, relative to the root mean square of the tensor: FP32 sums that cancel."""
GATE_ERROR = 2**-20
"""What an FP32 sum of 128 products errs by, relative to the root mean square of the sums: 7e-7
typically."""
VALUE_ERROR = 2**-21
"""What an FP32 convolution of four taps and its SiLU err by, relative to the value and to the root
mean square."""

_CHUNK_ELEMENTS = 1 << 26


@dataclass
class _Checks:
    """Measures to compare with their limits, in the order reported; the values stay on the device
    until `verdict`."""

    labels: list[tuple[str, float]] = field(default_factory=list)
    values: list[Tensor] = field(default_factory=list)

    def add(self, label: str, value: Tensor, limit: float) -> None:
        self.labels.append((label, limit))
        self.values.append(value.double().reshape(()))

    def verdict(self) -> str | None:
        for (label, limit), value in zip(
            self.labels, torch.stack(self.values).tolist(), strict=True
        ):
            if not value <= limit:  # NaN fails too
                return f"{label} {value:.1e} > {limit:.1e}" if limit else f"{label}: {value:.0f}"
        return None


def check_step(problem: Problem, operands: StepOperands, expected: StepResult) -> str | None:
    """None, or one line naming the first tensor that is wrong after a step, its error and its
    tolerance."""
    checks = _Checks()
    _check_out(checks, problem, operands, expected)
    dtype = operands.state.dtype
    _check_pages(
        checks, "state", operands.state, expected.state, expected.state_written, STATE_NORM[dtype]
    )
    _count(checks, "conv_state: wrong elements", _differs(operands.conv_state, expected.conv_state))
    if expected.corrections is not None:
        _check_records(checks, problem, operands, expected)
    for name, before in expected.padding.items():
        after = reference.padding(getattr(operands, name))
        assert after is not None
        _count(checks, f"{name}: elements changed between rows", _differs(after, before))
    return checks.verdict()


def check_outputs(problem: Problem, operands: StepOperands, expected: StepResult) -> str | None:
    """The same for the output and the written records alone."""
    checks = _Checks()
    _check_out(checks, problem, operands, expected)
    if expected.corrections is not None:
        _check_written_records(checks, problem, operands, expected)
    return checks.verdict()


def check_commit(operands: CommitOperands, expected: Tensor, layer: int) -> str | None:
    """The same for the states of one layer after a commit or flush; `expected` is
    `reference.commit`'s."""
    checks = _Checks()
    state = operands.states[layer]
    written = torch.zeros(state.shape[0], dtype=torch.bool, device=state.device)
    written[operands.destination[reference.committing(operands)].long()] = True
    boundaries = reference.boundary_stores(operands)
    if boundaries is not None:
        written[boundaries[boundaries > 0]] = True
    _check_pages(
        checks, f"state of layer {layer}", state, expected, written, STATE_NORM[state.dtype]
    )
    return checks.verdict()


def poison(operands: Operands) -> None:
    """NaN wherever a correct launch writes without reading: to be called before a launch that is to
    be checked.

    A step: out; the records that kind record writes; the state pages that kind spec only writes.
    A commit: destination and boundary pages other than the source.
    """
    if isinstance(operands, CommitOperands):
        destination = operands.destination[
            reference.committing(operands) & (operands.destination != operands.source)
        ].long()
        boundaries = reference.boundary_stores(operands)
        for state in operands.states:
            state[destination] = torch.nan
            if boundaries is not None:
                state[boundaries[boundaries > 0]] = torch.nan
        return
    operands.out.fill_(torch.nan)
    tokens = operands.projected.shape[0] // operands.slots.shape[0]
    if (
        operands.corrections is not None
        and operands.key_gates is not None
        and operands.pending is None
    ):
        assert operands.record_rows is not None
        rows = operands.record_rows[(operands.slots[:, 0] > 0) & (operands.record_rows >= 0)].long()
        operands.corrections[rows, :, :tokens] = torch.nan
        operands.key_gates[rows, :, :tokens] = torch.nan
    if operands.accepted is not None:
        read_at = (operands.accepted - 1).clamp(0, tokens - 1)[:, None].long()
        read = operands.slots.gather(1, read_at)
        live = (operands.slots[:, :1] > 0) & (read > 0)
        operands.state[
            operands.slots[live & (operands.slots > 0) & (operands.slots != read)].long()
        ] = torch.nan


def _check_out(
    checks: _Checks, problem: Problem, operands: StepOperands, expected: StepResult
) -> None:
    error = operands.out.double() - expected.out
    worst = (error.abs() / (OUT_ATOL + OUT_RTOL * expected.out.abs())).max()
    checks.add(
        f"out: elementwise error over {OUT_ATOL:g} + {OUT_RTOL:g} * |reference|:", worst, 1.0
    )
    checks.add(
        "out: norm error", _ratio(error.square().sum(), expected.out.square().sum()), OUT_NORM
    )
    wrong = (operands.out != 0).view(-1, problem.tokens, problem.channels) & ~expected.live[
        :, None, None
    ]
    _count(checks, "out: elements of null requests that are not zero", wrong)


def _check_pages(
    checks: _Checks, name: str, actual: Tensor, expected: Tensor, written: Tensor, tolerance: float
) -> None:
    """Pages `[n, H, ...]`: norm error of the written ones, bits of the others."""
    items = actual.shape[:2]
    error = torch.zeros(items, dtype=torch.float64, device=actual.device)
    norm = torch.zeros_like(error)
    changed = torch.zeros((), dtype=torch.int64, device=actual.device)
    for part in _parts(actual):
        difference = actual[part].double() - expected[part]
        mine = written[part, None]
        # where, not a product: NaN in an untouched page is nobody's error.
        error[part] = torch.where(mine, difference.square_().flatten(2).sum(-1), 0)
        norm[part] = torch.where(mine, expected[part].flatten(2).square().sum(-1), 0)
        bits = _differs(actual[part], expected[part].to(actual.dtype)).flatten(1).sum(1)
        changed += (bits * ~written[part]).sum()
    checks.add(f"{name}: norm error", _ratio(error.sum(), norm.sum()), tolerance)
    worst = _ratio(error, norm).max() if error.numel() else error.sum()
    checks.add(f"{name}: norm error of one item", worst, ITEM_NORM)
    _count(checks, f"{name}: elements changed in pages not to be written", changed)


def _check_records(
    checks: _Checks, problem: Problem, operands: StepOperands, expected: StepResult
) -> None:
    _check_written_records(checks, problem, operands, expected)
    q, written = problem.tokens, expected.records_written
    assert operands.corrections is not None
    assert operands.key_gates is not None
    assert expected.corrections is not None
    assert expected.key_gates is not None
    assert written is not None
    unwritten = (
        ~written[:, None, None, None]
        | (torch.arange(operands.key_gates.shape[2], device=written.device) >= q)[:, None]
    )
    pairs = ((operands.key_gates, expected.key_gates), (operands.corrections, expected.corrections))
    for name, (after, before) in zip(("key_gates", "corrections"), pairs, strict=True):
        changed = _differs(after, before.to(after.dtype)) & unwritten
        _count(checks, f"{name}: elements changed outside the records to be written", changed)


def _check_written_records(
    checks: _Checks, problem: Problem, operands: StepOperands, expected: StepResult
) -> None:
    assert operands.corrections is not None
    assert operands.key_gates is not None
    assert expected.corrections is not None
    assert expected.key_gates is not None
    assert expected.key_gates_exact is not None
    assert expected.records_written is not None
    q, written = problem.tokens, expected.records_written
    tolerance = CORRECTIONS_NORM[operands.state.dtype]
    mine = written.nonzero().squeeze(1)
    actual_corrections, right = operands.corrections[mine, :, :q], expected.corrections[mine, :, :q]
    _check_pages(
        checks,
        "corrections",
        actual_corrections,
        right,
        torch.ones_like(mine, dtype=torch.bool),
        tolerance,
    )
    for name, part in (("keys", slice(0, HEAD_DIM)), ("raw gates", slice(HEAD_DIM, None))):
        actual, exact = operands.key_gates[:, :, :q, part], expected.key_gates_exact[:, :, :q, part]
        allowed = (
            _half_ulp(exact) * (1 + TIE_FRACTION)
            + TIE_RMS * exact[written].square().mean().sqrt().nan_to_num()
        )
        # NaN fails: the comparison is of what is right.
        wrong = ~((actual.double() - exact).abs() <= allowed) & written[:, None, None, None]
        _count(checks, f"recorded {name}: elements off the BF16 rounding", wrong)


def _count(checks: _Checks, label: str, wrong: Tensor) -> None:
    checks.add(label, wrong.sum(), 0)


def _ratio(error_squares: Tensor, norm_squares: Tensor) -> Tensor:
    """Relative norm error; 0 / 0 counts as 0, anything else / 0 as infinite, NaN stays."""
    ratio = (error_squares / norm_squares).sqrt()
    return torch.where((error_squares == 0) & (norm_squares == 0), torch.zeros_like(ratio), ratio)


def _differs(a: Tensor, b: Tensor) -> Tensor:
    """Elements whose bits differ; any NaN equals any other."""
    integer = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return (a.view(integer) != b.view(integer)) & ~(a.isnan() & b.isnan())


def _half_ulp(x: Tensor) -> Tensor:
    """Half the distance between BF16 neighbours around float64 values (8 significant bits)."""
    return torch.where(x == 0, 0, torch.exp2(torch.frexp(x).exponent.double() - 9))


def gate_ties(problem: Problem, operands: StepOperands) -> int:
    """Raw gates of running requests that lie so near a BF16 tie that an FP32 sum may round them
    either way.

    One of them moves a decay by up to 16 %: in a step of few items that alone can exceed the
    tolerance of the state. Gates below 1/4 are left out: their neighbours are close enough.
    """
    live = reference.slot_plan(problem, operands).live.nonzero().squeeze(1)
    exact = reference.raw_gate(problem, operands, live)
    near = GATE_ERROR * exact.square().mean().sqrt().nan_to_num()
    rounded = exact.to(torch.bfloat16).double()
    tied = (exact - rounded).abs() >= _half_ulp(exact) - near
    return int((tied & (exact.abs() >= 0.25)).sum())


def value_ties(problem: Problem, operands: StepOperands) -> Tensor:
    """Where a key or a value lies so near a BF16 tie that an FP32 convolution may round it either
    way.

    `[R, q, 3D]` bool, in the order of the projection's channels. Each counts by an ulp in the
    state: 1e-4 of an item of few tokens. Those below 1/16 of their root mean square are left out:
    their neighbours are close enough.
    """
    live = reference.slot_plan(problem, operands).live.nonzero().squeeze(1)
    exact = reference.convolved(problem, operands, live)
    rms = exact.square().mean().sqrt().nan_to_num()
    distance = _half_ulp(exact) - (exact - exact.to(torch.bfloat16).double()).abs()
    tied = (distance <= VALUE_ERROR * (exact.abs() + rms)) & (exact.abs() >= rms / 16)
    tied[0] = False
    found = torch.zeros(
        problem.requests, problem.tokens, 3 * problem.channels, dtype=torch.bool, device=tied.device
    )
    found[live] = tied.permute(1, 3, 0, 2, 4).flatten(2)
    return found


def _parts(tensor: Tensor) -> Iterator[slice]:
    """Slices of the leading dimension that keep temporaries small."""
    rows = max(1, _CHUNK_ELEMENTS // max(1, tensor[:1].numel()))
    for start in range(0, tensor.shape[0], rows):
        yield slice(start, start + rows)
