"""KdaCommit on a GPU against the float64 reference, on awkward shapes, with poisoned outputs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from kda_kernels.check import compare, reference
from kda_kernels.device.gpu import current_gpu
from kda_kernels.operands import CommitOperands, address_table, make_commit
from kda_kernels.problem import Problem, StateDtype
from kda_kernels.variants import commit

pytestmark = pytest.mark.gpu


def checked_launch(problem: Problem, options: commit.Options, operands: CommitOperands) -> None:
    """Poison, launch and compare all layers; records are left alone."""
    compiled = commit.compile(problem, options, current_gpu())
    expected = [reference.commit(operands, layer) for layer in range(len(operands.states))]
    records = [t.clone() for t in (*operands.corrections, *operands.key_gates)]
    compare.poison(operands)
    commit.launch(compiled, operands, torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    for layer, states in enumerate(expected):
        assert compare.check_commit(operands, states, layer) is None
    for before, after in zip(records, (*operands.corrections, *operands.key_gates), strict=True):
        assert torch.equal(before.view(torch.uint8), after.view(torch.uint8))


def poison_rejected(operands: CommitOperands) -> None:
    """NaN in the records of tokens that were not accepted."""
    for b, (row, n) in enumerate(
        zip(operands.record_rows.tolist(), operands.length.tolist(), strict=True)
    ):
        assert b >= 0
        for records in (*operands.corrections, *operands.key_gates):
            records[row, :, max(n, 0) :] = torch.nan


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("store", ["direct", "bulk"])
@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(
    ("heads", "heads_per_cta", "tokens"),
    [(1, 4, 2), (3, 3, 5), (6, 4, 8), (8, 8, 4), (12, 4, 8), (12, 1, 1)],
)
def test_commit(
    dtype: StateDtype,
    store: str,
    align: bool,
    in_place: bool,
    heads: int,
    heads_per_cta: int,
    tokens: int,
) -> None:
    problem = Problem("commit", 19, heads, tokens, layers=2, state_dtype=dtype, pending="mix")
    options = commit.Options(store=store, align=align, heads_per_cta=heads_per_cta)  # type: ignore[arg-type]
    operands = make_commit(
        problem, seed=heads, align=align, in_place=in_place, pad=16, null_requests=(2, 11)
    )
    poison_rejected(operands)
    checked_launch(problem, options, operands)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("source", ["bulk", "registers"])
@pytest.mark.parametrize("rows", [32, 64, 128])
@pytest.mark.parametrize("columns", [4, 8])
@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize(("heads", "tokens"), [(3, 5), (12, 8), (12, 1)])
def test_commit_by_rows(
    dtype: StateDtype,
    source: str,
    rows: int,
    columns: int,
    align: bool,
    in_place: bool,
    heads: int,
    tokens: int,
) -> None:
    problem = Problem("commit", 19, heads, tokens, layers=2, state_dtype=dtype, pending="mix")
    options = commit.Options(
        source=source,  # type: ignore[arg-type]
        rows_per_cta=rows,
        columns=columns,
        heads_per_cta=1,
        align=align,
        hints=in_place,
        pdl=in_place,
    )
    operands = make_commit(
        problem, seed=heads, align=align, in_place=in_place, pad=16, null_requests=(2, 11)
    )
    poison_rejected(operands)
    checked_launch(problem, options, operands)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("store", ["direct", "bulk"])
@pytest.mark.parametrize("pdl", [False, True])
def test_flush_takes_records_in_any_order(dtype: StateDtype, store: str, pdl: bool) -> None:
    problem = Problem("flush", 40, 12, 8, layers=3, state_dtype=dtype, pending="mix")
    operands = make_commit(problem, seed=5, inputs="generic", pad=32, null_requests=(0, 39))
    checked_launch(problem, commit.Options(store=store, pdl=pdl), operands)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("store", ["direct", "bulk"])
def test_full_machine(dtype: StateDtype, store: str) -> None:
    problem = Problem("commit", 64, 24, 8, layers=2, state_dtype=dtype, pending="mix")
    operands = make_commit(problem, seed=6, align=True)
    options = commit.Options(store=store, align=True, heads_per_cta=8)  # type: ignore[arg-type]
    checked_launch(problem, options, operands)


@pytest.mark.parametrize("store", ["direct", "bulk"])
def test_boundaries_of_every_length(store: str) -> None:
    """m from 1 to n, and m > n, which stores nothing."""
    problem = Problem("commit", 40, 3, 8, state_dtype="bf16")
    operands = make_commit(problem, seed=7, align=True)
    b = torch.arange(40, dtype=torch.int32, device="cuda")
    pages = operands.states[0].shape[0]
    operands = replace(
        operands,
        length=(b % 8 + 1).to(torch.int32),
        boundary_length=(b // 4).to(torch.int32),
        boundary_slot=(pages - 40 + b).to(torch.int32),
        source=(1 + b).to(torch.int32),
        destination=(1 + b).to(torch.int32),
    )
    poison_rejected(operands)
    checked_launch(problem, commit.Options(store=store, align=True), operands)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_counts_beyond_the_record_and_negative_rows(dtype: StateDtype) -> None:
    problem = Problem("commit", 4, 6, 5, state_dtype=dtype)
    operands = make_commit(problem, seed=8)
    length = torch.tensor([7, -3, 5, 5], dtype=torch.int32, device="cuda")
    rows = torch.tensor([0, 1, -1, 3], dtype=torch.int32, device="cuda")
    operands = replace(operands, length=length, record_rows=rows)
    # What is expected: request 0 folds the 5 recorded tokens, 1 and 2 nothing.
    plain = replace(operands, length=torch.tensor([5, 0, 0, 5], dtype=torch.int32, device="cuda"))
    expected = reference.commit(plain, 0)
    commit.launch(commit.compile(problem, commit.Options(), current_gpu()), operands, 0)
    torch.cuda.synchronize()
    assert compare.check_commit(plain, expected, 0) is None


@pytest.mark.parametrize("store", ["direct", "bulk"])
def test_offsets_beyond_32_bits(store: str) -> None:
    problem = Problem("commit", 2, 12, 8, state_dtype="bf16")
    small = make_commit(problem, seed=9)
    pages = 2**31 // (12 * 128 * 128) + 3  # the last slots begin past 2^31 elements
    state = torch.empty((pages, 12, 128, 128), dtype=torch.bfloat16, device="cuda")
    source = torch.tensor([pages - 1, 1], dtype=torch.int32, device="cuda")
    destination = torch.tensor([2, pages - 2], dtype=torch.int32, device="cuda")
    state[source.long()] = small.states[0][small.source.long()]
    large = replace(
        small,
        states=(state,),
        state_table=address_table((state,)),
        source=source,
        destination=destination,
    )
    compiled = commit.compile(problem, commit.Options(store=store), current_gpu())  # type: ignore[arg-type]
    for operands in (small, large):
        commit.launch(compiled, operands, 0)
    torch.cuda.synchronize()
    assert torch.equal(state[destination.long()], small.states[0][small.destination.long()])


def test_repeated_launches_agree() -> None:
    """In place over and over with n = 0 in between: bits depend on the inputs alone."""
    problem = Problem("flush", 33, 12, 8, layers=2, state_dtype="bf16", pending="mix")
    a, b = (make_commit(problem, seed=10) for _ in range(2))
    compiled = commit.compile(problem, commit.Options(pdl=True), current_gpu())
    for operands in (a, b):
        for _ in range(20):
            commit.launch(compiled, operands, torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    for x, y in zip(a.states, b.states, strict=True):
        assert torch.equal(x, y)
