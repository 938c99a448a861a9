"""Operands are of the documented shapes, and as awkward as asked for."""

from __future__ import annotations

import pytest
import torch

from kda_kernels.check.reference import padding
from kda_kernels.operands import address_table, make_commit, make_step
from kda_kernels.problem import Problem

STEPS = [
    Problem("decode", 4, 3),
    Problem("decode", 4, 3, state_dtype="bf16", conv_layout="window-major"),
    Problem("spec", 4, 3, 3),
    Problem("record", 4, 3, 4, conv_layout="window-major"),
    Problem("replay", 9, 1, 2, pending="mix"),
]


@pytest.mark.parametrize("problem", STEPS, ids=lambda p: f"{p.kind}-{p.state_dtype}")
@pytest.mark.parametrize("inputs", ["model", "generic"])
def test_shapes_dtypes_and_values(problem: Problem, inputs: str) -> None:
    operands = make_step(problem, seed=0, device="cpu", inputs=inputs)  # type: ignore[arg-type]
    present = {
        name: tuple(v.shape) for name, v in vars(operands).items() if isinstance(v, torch.Tensor)
    }
    assert present == problem.operand_shapes
    for name, value in vars(operands).items():
        if isinstance(value, torch.Tensor) and value.is_floating_point() and name != "out":
            assert value.isfinite().all(), name
    assert (
        operands.state.dtype is {"fp32": torch.float32, "bf16": torch.bfloat16}[problem.state_dtype]
    )
    channel, entry = operands.conv_state.stride()[1:]
    assert (channel == 1) is (problem.conv_layout == "window-major")
    assert (entry == 1) is (problem.conv_layout == "dim-first")


@pytest.mark.parametrize("problem", STEPS, ids=lambda p: f"{p.kind}-{p.state_dtype}")
def test_slots_are_distinct_and_never_null(problem: Problem) -> None:
    operands = make_step(problem, seed=1, device="cpu")
    slots = operands.slots.flatten().tolist()
    assert sorted(slots) == list(range(1, operands.state.shape[0]))
    if operands.accepted is not None:
        assert set(operands.accepted.tolist()) <= set(range(1, problem.tokens + 1))
    if operands.record_rows is not None:
        assert sorted(operands.record_rows.tolist()) == list(range(problem.requests))


def test_slots_are_in_random_order() -> None:
    slots = make_step(Problem("decode", 64, 1), seed=2, device="cpu").slots.tolist()
    assert slots != sorted(slots)


def test_null_requests() -> None:
    problem = Problem("replay", 9, 1, 2, pending="mix")
    operands = make_step(problem, seed=3, device="cpu", null_requests=(1, 4, 8))
    assert operands.slots.flatten()[[1, 4, 8]].tolist() == [0, 0, -1]
    assert operands.record_rows[[1, 4, 8]].tolist() == [-1, -1, -1]
    assert (operands.slots > 0).sum() == 6


@pytest.mark.parametrize("null", [(), (0,), (2, 3)])
def test_pending_stands_at_the_record_row(null: tuple[int, ...]) -> None:
    problem = Problem("replay", 9, 1, 2, pending="mix")
    for seed in range(8):
        operands = make_step(problem, seed=seed, device="cpu", null_requests=null)
        for b, n in enumerate(problem.pending_counts):
            if b not in null:
                assert operands.pending[operands.record_rows[b]] == n


def test_padding_separates_pages_and_records() -> None:
    operands = make_step(Problem("record", 3, 2, 4), seed=4, device="cpu", pad=32)
    for name in ("state", "corrections", "key_gates"):
        tensor = getattr(operands, name)
        assert tensor.stride(0) == tensor[0].numel() + 32
        assert padding(tensor).shape == (tensor.shape[0] - 1, 32)
        assert padding(tensor.contiguous()) is None
    gap = padding(operands.state)
    before = operands.state.clone()
    gap.fill_(7)
    assert torch.equal(operands.state, before)


def test_padding_of_a_window_major_window() -> None:
    flat = torch.zeros(3, 5 * 6 + 10)
    window = flat.as_strided((3, 6, 5), (40, 1, 6))
    padding(window).fill_(1)
    assert flat.sum() == 20
    assert not window.any()


def test_a_seed_gives_the_same_operands() -> None:
    one, same, other = (make_step(STEPS[3], seed=s, device="cpu") for s in (5, 5, 6))
    assert torch.equal(one.projected, same.projected)
    assert torch.equal(one.slots, same.slots)
    assert not torch.equal(one.projected, other.projected)


def test_layers_share_weights() -> None:
    first = make_step(STEPS[3], seed=5, device="cpu", conv_bias=False)
    second = make_step(STEPS[3], seed=6, device="cpu", weights=first)
    assert second.f_b is first.f_b
    assert second.conv_bias is None
    assert not torch.equal(first.state, second.state)


@pytest.mark.parametrize("inputs", ["model", "generic"])
def test_decays_are_neither_all_zero_nor_all_one(inputs: str) -> None:
    operands = make_step(Problem("decode", 1, 12), seed=7, device="cpu", inputs=inputs)  # type: ignore[arg-type]
    A = operands.A_log.exp().repeat_interleave(128)
    decay = torch.exp(-5 * torch.sigmoid(A * operands.dt_bias))
    assert decay.median() > 0.05
    assert decay.std() > 0.05


@pytest.mark.parametrize("kind", ["commit", "flush"])
@pytest.mark.parametrize("align", [False, True])
def test_commit_operands(kind: str, align: bool) -> None:
    problem = Problem(kind, 7, 2, 4, layers=3, state_dtype="bf16", pending="mix")  # type: ignore[arg-type]
    operands = make_commit(problem, seed=8, device="cpu", align=align, pad=16, null_requests=(2, 5))
    assert operands.length.tolist() == list(problem.pending_counts)
    assert operands.source[[2, 5]].tolist() == [0, -1]
    live = operands.source[operands.source > 0].tolist()
    targets = operands.destination.tolist()
    stored = (
        []
        if operands.boundary_slot is None
        else operands.boundary_slot[operands.boundary_slot > 0].tolist()
    )
    assert len(stored) == (3 if align else 0)
    assert len({*targets, *stored}) == len(targets) + len(stored)
    assert min(live + targets) > 0
    if kind == "flush":
        assert all(d == s for d, s in zip(targets, operands.source.tolist(), strict=True) if s > 0)
    else:
        assert not {*live} & {*targets}
        assert operands.record_rows.tolist() == list(range(7))
    for table, tensors in (
        (operands.state_table, operands.states),
        (operands.corrections_table, operands.corrections),
        (operands.key_gates_table, operands.key_gates),
    ):
        assert table.tolist() == [[t.data_ptr(), t.stride(0)] for t in tensors]
    assert max(*targets, *stored, *live) < operands.states[0].shape[0]


def test_address_table_keeps_strides_in_elements() -> None:
    tensor = torch.zeros(4, 10, dtype=torch.bfloat16)[:, :6]
    assert address_table((tensor,)).tolist() == [[tensor.data_ptr(), 10]]


def test_kinds_have_their_own_makers() -> None:
    with pytest.raises(ValueError, match="use make_commit"):
        make_step(Problem("flush", 1, 1, 2), seed=0, device="cpu")
    with pytest.raises(ValueError, match="use make_step"):
        make_commit(Problem("decode", 1, 1), seed=0, device="cpu")


def test_the_gates_bound_is_the_problems() -> None:
    for bound in (-5.0, -8.0, None):
        problem = Problem("record", 2, 1, 2, lower_bound=bound)
        assert make_step(problem, seed=0, device="cpu").lower_bound == bound
        assert make_step(problem, seed=0, device="cpu", lower_bound=-3.0).lower_bound == -3.0
    assert (
        make_commit(Problem("commit", 2, 1, 2, lower_bound=-8.0), seed=0, device="cpu").lower_bound
        == -8.0
    )
    with pytest.raises(ValueError, match="lower_bound=None: kind flush needs a bounded gate"):
        make_commit(Problem("flush", 2, 1, 2, lower_bound=None), seed=0, device="cpu")
