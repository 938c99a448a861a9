"""A serving trace, run by several engines side by side: does an error grow with the steps?

Requests join, leave, change place in the batch and sit steps out; windows are accepted in part;
some cross a block of the prefix cache; null rows pad the batch; its size moves across the item
count from which an engine replays. After every step each engine's output, records, windows and
states are compared with those of a float64 reference that commits eagerly, within the tolerances of
docs/operation.md.

No choice of rounding is left that errors could hide behind: the gate projection is drawn on a grid
on which FP32 sums are exact, and inputs whose key or value would lie at a BF16 tie are moved by an
ulp.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from statistics import median
from types import ModuleType
from typing import Any, Protocol

import torch
from torch import Tensor

from kda_kernels import stock, variants
from kda_kernels.check import compare, reference
from kda_kernels.device.gpu import Gpu
from kda_kernels.operands import CommitOperands, Operands, StepOperands, address_table, make_step
from kda_kernels.problem import HEAD_DIM, Problem

_BLOCK = 32
"""Tokens of a block of the prefix cache."""
_LEAVE, _SKIP, _NULL = 0.1, 0.1, 0.15
"""Chances, per step: that a request leaves, that it sits the step out, that a null row stands
before a request."""


@dataclass(frozen=True)
class Shape:
    """heads, tokens of every step; requests: the most that are served at once."""

    heads: int
    tokens: int
    requests: int

    @property
    def window(self) -> int:
        return self.tokens + 2

    def problem(self, kind: str, requests: int) -> Problem:
        pending = "mix" if kind == "replay" else None
        return Problem(kind, requests, self.heads, self.tokens, pending=pending)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Batch:
    """One step: what the engines are given. R rows, of which some are null (slot 0, record row -1).

    joined           slots and record rows of requests that are new, with their states and windows
    projected        [R * tokens, pitch] bf16
    slots            [R, 1] int32
    record_rows      [R] int32
    accepted         [R] int32, 0..tokens: known after the step
    eager            [R] bool: the request crosses a block and must be committed at once
    boundary_length  [R] int32, boundary_slot [R] int32: where a block ends inside the accepted
                     tokens; else 0
    """

    joined: Sequence[tuple[int, int, Tensor, Tensor]]
    projected: Tensor
    slots: Tensor
    record_rows: Tensor
    accepted: Tensor
    eager: Tensor
    boundary_length: Tensor
    boundary_slot: Tensor

    @property
    def requests(self) -> int:
        return self.slots.shape[0]


@dataclass
class _Request:
    slot: int
    row: int
    boundary: int
    position: int


class Trace:
    """`steps` batches, the same for the same arguments. Slots: one per request, then one per
    request for boundaries."""

    def __init__(
        self, shape: Shape, steps: int, seed: int, device: torch.device | str = "cuda"
    ) -> None:
        self.shape, self.steps, self.device = shape, steps, torch.device(device)
        self._random = Random(seed)
        self._g = torch.Generator(device=device).manual_seed(seed)
        problem = shape.problem("record", 1)
        weights = make_step(problem, seed=seed, device=device)
        self.weights = replace(weights, f_b=self._grid(weights.f_b.shape, 64, HEAD_DIM**-0.5))
        self.pages = 1 + 2 * shape.requests

    def _grid(self, shape: Sequence[int], denominator: int, std: float) -> Tensor:
        x = torch.empty(*shape, device=self.device).normal_(0, std, generator=self._g)
        return (x * denominator).round_().div_(denominator).to(torch.bfloat16)

    def _normal(self, shape: Sequence[int], std: float, dtype: torch.dtype) -> Tensor:
        return torch.empty(*shape, dtype=dtype, device=self.device).normal_(
            0, std, generator=self._g
        )

    def __iter__(self) -> Iterator[Batch]:
        C, draw = self.shape.requests, self._random
        active: list[_Request] = []
        for _ in range(self.steps):
            active = [r for r in active if draw.random() >= _LEAVE]
            free = [i for i in range(C) if i not in {r.row for r in active}]
            draw.shuffle(free)
            target = draw.choice((1, draw.randint(1, C), C))
            new = [
                _Request(1 + i, i, 1 + C + i, draw.randrange(_BLOCK))
                for i in free[: max(0, target - len(active))]
            ]
            active = (active + new)[: max(target, len(new))]
            yield self._batch(active, new)

    def _batch(self, active: list[_Request], new: list[_Request]) -> Batch:
        draw, q, D = self._random, self.shape.tokens, HEAD_DIM * self.shape.heads
        rows: list[_Request | None] = []
        for request in draw.sample(active, len(active)):
            if draw.random() < _NULL:
                rows.append(None)
            if request in new or draw.random() >= _SKIP:
                rows.append(request)
        rows = rows or [None]
        accepted = [draw.randint(0, q) for _ in rows]
        boundary = [0] * len(rows)
        for i, (served, n) in enumerate(zip(rows, accepted, strict=True)):
            if served is not None:
                to_edge = _BLOCK - served.position % _BLOCK
                boundary[i] = to_edge if to_edge <= n else 0
                served.position += n

        def ints(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=self.device)

        problem = self.shape.problem("record", len(rows))
        projected = self._normal((problem.rows, problem.pitch), 1.0, torch.bfloat16)
        projected[:, 4 * D : 4 * D + HEAD_DIM] = self._grid((problem.rows, HEAD_DIM), 8, 1.0)
        joined = [
            (r.slot, r.row, self._normal(self.weights.state.shape[1:], 0.3, torch.float32),
             self._normal(self.weights.conv_state.shape[1:], 1.0, torch.bfloat16))
            for r in new
        ]  # fmt: skip
        return Batch(
            joined,
            projected,
            ints([0 if r is None else r.slot for r in rows])[:, None],
            ints([-1 if r is None else r.row for r in rows]),
            ints(accepted),
            ints(boundary) > 0,
            ints(boundary),
            ints(
                [
                    0 if r is None or not m else r.boundary
                    for r, m in zip(rows, boundary, strict=True)
                ]
            ),
        )


class Kernels(Protocol):
    """How an engine's steps and commits are computed: by a kernel variant, or by the reference."""

    def step(self, problem: Problem, operands: StepOperands) -> None: ...
    def commit(self, operands: CommitOperands) -> None: ...


class Engine:
    """Caches of one layer, and the steps on them.

    replays  whether a step of so many items folds what is pending itself; None: everything is
             committed eagerly
    """

    def __init__(
        self,
        name: str,
        trace: Trace,
        kernels: Kernels,
        replays: Callable[[int], bool] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        shape, device = trace.shape, trace.device
        self.name, self.shape, self.kernels, self.replays = name, shape, kernels, replays
        self.kinds: list[str] = []
        records = (shape.requests, shape.heads, shape.tokens)
        self._weights = trace.weights
        self.state = torch.zeros(
            trace.pages, shape.heads, HEAD_DIM, HEAD_DIM, dtype=dtype, device=device
        )
        windows = (trace.pages, *trace.weights.conv_state.shape[1:])
        self.conv_state = torch.zeros(windows, dtype=torch.bfloat16, device=device)
        self.corrections = torch.zeros(*records, HEAD_DIM, device=device)
        self.key_gates = torch.zeros(*records, 2 * HEAD_DIM, dtype=torch.bfloat16, device=device)
        self.pending = torch.zeros(shape.requests, dtype=torch.int32, device=device)

    def admit(self, batch: Batch) -> tuple[Problem, StepOperands]:
        """The step of a batch, its new requests in the caches, and what must be committed before it
        flushed."""
        for slot, row, state, window in batch.joined:
            self.state[slot], self.conv_state[slot] = state, window
            self.pending[row] = 0
        replay = self.replays is not None and self.replays(batch.requests * self.shape.heads)
        if self.replays is not None and not replay:
            self._flush(batch)
        problem = self.shape.problem("replay" if replay else "record", batch.requests)
        return problem, replace(
            self._weights,
            projected=batch.projected,
            conv_state=self.conv_state,
            state=self.state,
            slots=batch.slots,
            out=torch.full(
                (problem.rows, problem.channels),
                torch.nan,
                dtype=torch.bfloat16,
                device=self.state.device,
            ),
            corrections=self.corrections,
            key_gates=self.key_gates,
            record_rows=batch.record_rows,
            pending=self.pending if replay else None,
        )

    def step(self, batch: Batch) -> StepOperands:
        """Serves one batch and returns the operands as the launch left them."""
        problem, operands = self.admit(batch)
        self.kinds.append(problem.kind)
        self.kernels.step(problem, operands)
        return operands

    def settle(self, batch: Batch) -> None:
        """After sampling: commits the accepted tokens, or leaves them pending."""
        length = batch.accepted.clone()
        if self.replays is not None:
            stock.defer(length, self.pending, batch.record_rows, batch.slots, batch.eager)
        self._commit(
            batch,
            batch.slots[:, 0].contiguous(),
            length,
            batch.boundary_length,
            batch.boundary_slot,
        )

    def _flush(self, batch: Batch) -> None:
        source, length = torch.empty_like(batch.record_rows), torch.empty_like(batch.record_rows)
        stock.flush_plan(
            self.pending,
            batch.record_rows,
            batch.slots,
            source,
            length,
            source.clone(),
            self.shape.tokens,
        )
        self._commit(batch, source, length, None, None)

    def _commit(
        self,
        batch: Batch,
        source: Tensor,
        length: Tensor,
        boundary_length: Tensor | None,
        boundary_slot: Tensor | None,
    ) -> None:
        """In place, and the windows with it."""
        states, corrections, key_gates = (self.state,), (self.corrections,), (self.key_gates,)
        self.kernels.commit(
            CommitOperands(
                states, corrections, key_gates,
                self._weights.A_log[None], self._weights.dt_bias.view(1, -1, HEAD_DIM), source, length, source,
                batch.record_rows, boundary_length, boundary_slot,
                address_table(states), address_table(corrections), address_table(key_gates),
            )
        )  # fmt: skip
        windows = (self.conv_state,)
        stock.roll_window(
            windows, address_table(windows), source, length, source, boundary_length, boundary_slot
        )

    def states(self, slots: Tensor, rows: Tensor) -> Tensor:
        """States `[n, H, 128, 128]` f64 with what is pending folded in."""
        held = self.state[slots.long()].double()
        if self.replays is None:
            return held
        rows = rows.long()
        keys, raw = self.key_gates[rows].double().chunk(2, -1)
        A_log, dt_bias = (
            self._weights.A_log[:, None, None],
            self._weights.dt_bias.view(-1, 1, HEAD_DIM),
        )
        decay = reference.log_decay(raw, A_log, dt_bias, self._weights.lower_bound)
        return reference.fold(
            held,
            self.corrections[rows].double(),
            reference.normalized(keys),
            decay,
            self.pending[rows],
        )


class VariantKernels:
    """Kernel variants by kind of step, and one for commits, on the current stream.

    steps    kind -> variant and its options
    commit   options of KdaCommit, or None: stock
    """

    def __init__(
        self,
        steps: Mapping[str, tuple[str, Mapping[str, Any]]],
        commit: Mapping[str, Any] | None,
        gpu: Gpu,
    ) -> None:
        self._chosen = dict(steps) | {
            "commit": ("stock", {}) if commit is None else ("KdaCommit", commit)
        }
        self._gpu = gpu
        self._compiled: dict[tuple[Problem, bool], tuple[ModuleType, Any]] = {}

    def step(self, problem: Problem, operands: StepOperands) -> None:
        self._launch(problem, operands)

    def commit(self, operands: CommitOperands) -> None:
        _, heads, tokens, _ = operands.corrections[0].shape
        self._launch(Problem("commit", operands.source.shape[0], heads, tokens), operands)

    def _launch(self, problem: Problem, operands: Operands) -> None:
        align = isinstance(operands, CommitOperands) and operands.boundary_length is not None
        if (problem, align) not in self._compiled:
            name, given = self._chosen[problem.kind]
            module = variants.load(name)
            options = variants.make_options(
                name, {**given, **({"align": align} if name == "KdaCommit" else {})}
            )
            why = module.unsupported(problem, options, self._gpu)
            if why is not None:
                raise ValueError(f"{name}: {why}")
            self._compiled[problem, align] = module, module.compile(problem, options, self._gpu)
        module, compiled = self._compiled[problem, align]
        device = (
            operands.slots.device if isinstance(operands, StepOperands) else operands.source.device
        )
        module.launch(
            compiled,
            operands,
            torch.cuda.current_stream().cuda_stream if device.type == "cuda" else None,
        )


class ReferenceKernels:
    """The reference, writing what it computed where a kernel would."""

    def __init__(self) -> None:
        self.expected: reference.StepResult | None = None

    def step(self, problem: Problem, operands: StepOperands) -> None:
        self.expected = found = reference.step(problem, operands)
        assert operands.corrections is not None
        assert operands.key_gates is not None
        assert found.corrections is not None
        assert found.key_gates is not None
        operands.out.copy_(found.out)
        operands.state.copy_(found.state)
        operands.conv_state.copy_(found.conv_state)
        operands.corrections.copy_(found.corrections)
        operands.key_gates.copy_(found.key_gates)

    def commit(self, operands: CommitOperands) -> None:
        operands.states[0].copy_(reference.commit(operands, 0))


_TOLERANCE = {
    "out": compare.OUT_NORM,
    "state": compare.STATE_NORM[torch.float32],
    "corrections": compare.CORRECTIONS_NORM[torch.float32],
}


@dataclass(frozen=True)
class Row:
    """One engine in one step. Norm errors against the reference, and the first tolerance that was
    exceeded, if any."""

    engine: str
    step: int
    kind: str
    out: float
    state: float
    corrections: float
    verdict: str | None


@dataclass(frozen=True)
class Outcome:
    rows: list[Row] = field(default_factory=list)

    @property
    def failed(self) -> list[Row]:
        return [row for row in self.rows if row.verdict is not None]

    def growth(self, engine: str, measure: str) -> float:
        """By how much the median error is larger in the later half of the steps than in the earlier
        one, as a part of the tolerance with FP32 states; the largest over kinds of step, 0 if none
        grew.

        The first eighth is left out: there the errors come to where they stay. A replay's are not a
        record's, and how many of each a half has is chance. Not the medians' ratio: of what is a
        thousandth of the tolerance, and zero in steps that accept nothing, that is chance, too.
        """
        rows = [row for row in self.rows if row.engine == engine]
        rows = rows[len(rows) // 8 :]
        half, grown = rows[len(rows) // 2].step, [0.0]
        for kind in {row.kind for row in rows}:
            early, late = (
                [
                    getattr(row, measure)
                    for row in rows
                    if row.kind == kind and (row.step >= half) == later
                ]
                for later in (False, True)
            )
            if early and late:
                grown.append((median(late) - median(early)) / _TOLERANCE[measure])
        return max(grown)


def run(trace: Trace, engines: Sequence[Engine]) -> Outcome:
    """Serve the trace by the reference and by every engine; one row per engine and step."""
    truth = ReferenceKernels()
    leader = Engine("reference", trace, truth, dtype=torch.float64)
    outcome = Outcome()
    for number, batch in enumerate(trace):
        _untie(*leader.admit(batch))
        leader.step(batch)
        expected = truth.expected
        assert expected is not None
        after = [(engine, engine.step(batch)) for engine in engines]
        leader.settle(batch)
        for engine, operands in after:
            verdict, out, corrections = _check(engine, batch, operands, expected)
            engine.settle(batch)
            state, wrong = _check_states(engine, leader, batch)
            outcome.rows.append(
                Row(
                    engine.name, number, engine.kinds[-1], out, state, corrections, verdict or wrong
                )
            )
    return outcome


def _untie(problem: Problem, operands: StepOperands) -> None:
    """Moves inputs by an ulp until no key or value of a step lies at a BF16 tie."""
    bits = reference.projected_rows(problem, operands)[..., : 3 * problem.channels].view(
        torch.int16
    )
    while (tied := compare.value_ties(problem, operands)).any():
        bits += tied


def _check(
    engine: Engine, batch: Batch, operands: StepOperands, expected: reference.StepResult
) -> tuple[str | None, float, float]:
    """What a step left, apart from its states. All engines use the same slots and record rows."""
    problem = engine.shape.problem("record", batch.requests)
    pages = batch.slots[batch.slots > 0].long()
    verdict = compare.check_outputs(problem, operands, expected)
    if verdict is None and not torch.equal(operands.conv_state[pages], expected.conv_state[pages]):
        verdict = "conv_state: not that of the reference"
    rows = batch.record_rows[batch.record_rows >= 0].long()
    assert operands.corrections is not None
    assert expected.corrections is not None
    return (
        verdict,
        _norm(operands.out, expected.out),
        _norm(operands.corrections[rows], expected.corrections[rows]),
    )


def _check_states(engine: Engine, leader: Engine, batch: Batch) -> tuple[float, str | None]:
    live = batch.slots[:, 0] > 0
    slots, rows = batch.slots[live, 0], batch.record_rows[live]
    error = _norm(engine.states(slots, rows), leader.states(slots, rows))
    limit = compare.STATE_NORM[engine.state.dtype]
    if not error <= limit:
        return error, f"state: norm error {error:.1e} > {limit:.1e}"
    boundaries = batch.boundary_slot[batch.boundary_slot > 0].long()
    stored = _norm(engine.state[boundaries], leader.state[boundaries])
    if not stored <= limit:
        return error, f"state at a block's end: norm error {stored:.1e} > {limit:.1e}"
    return error, None


def _norm(actual: Tensor, expected: Tensor) -> float:
    error, norm = (
        float((actual.double() - expected.double()).square().sum()),
        float(expected.double().square().sum()),
    )
    return (error / norm) ** 0.5 if norm else error
