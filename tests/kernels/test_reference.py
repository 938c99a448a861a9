"""The float64 reference against hand-worked cases, against a loop over single items, and against
itself."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kda_kernels.check import compare, reference
from kda_kernels.operands import CommitOperands, StepOperands, make_commit, make_step
from kda_kernels.problem import Problem
from support.naive import naive


def even_rows(problem: Problem) -> tuple[list[int], list[int]]:
    return [b * problem.tokens for b in range(problem.requests)], [
        problem.tokens
    ] * problem.requests


PROBLEMS = [
    Problem("decode", 3, 2),
    Problem("decode", 2, 1, state_dtype="bf16", conv_layout="window-major"),
    Problem("spec", 3, 2, 3),
    Problem("record", 3, 2, 4, conv_layout="window-major"),
    Problem("replay", 4, 2, 3, pending="mix"),
]


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: f"{p.kind}-{p.state_dtype}")
@pytest.mark.parametrize("lower_bound", [-5.0, None])
def test_equals_a_loop_over_items(problem: Problem, lower_bound: float | None) -> None:
    operands = make_step(problem, seed=3, device="cpu", inputs="generic", pad=16, null_requests=(1,),
                         conv_bias=lower_bound is not None, lower_bound=lower_bound)  # fmt: skip
    result = reference.step(problem, operands)
    out, state, window, corrections, key_gates = naive(problem.kind, operands, *even_rows(problem))
    close: dict[str, Any] = {"rtol": 1e-10, "atol": 1e-10}
    torch.testing.assert_close(result.out, out, **close)
    torch.testing.assert_close(result.state, state, **close)
    assert torch.equal(result.conv_state.double(), window)
    assert result.conv_state.dtype is operands.conv_state.dtype
    if corrections is not None:
        torch.testing.assert_close(result.corrections, corrections, **close)
        assert torch.equal(result.key_gates.double(), key_gates)
        assert torch.equal(result.key_gates_exact.to(torch.bfloat16), result.key_gates)


def test_the_operands_are_only_read() -> None:
    for problem in PROBLEMS:
        operands = make_step(problem, seed=4, device="cpu")
        before = {k: v.clone() for k, v in vars(operands).items() if isinstance(v, Tensor)}
        reference.step(problem, operands)
        for name, tensor in before.items():
            assert torch.equal(tensor.nan_to_num(), getattr(operands, name).nan_to_num()), name


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: f"{p.kind}-{p.state_dtype}")
def test_chunked_equals_recurrence(problem: Problem) -> None:
    operands = make_step(problem, seed=5, device="cpu", inputs="generic")
    serial, chunked = (
        reference.step(problem, operands, form) for form in ("recurrence", "chunked")
    )
    torch.testing.assert_close(chunked.state, serial.state, rtol=1e-12, atol=1e-12)
    if serial.corrections is not None:
        torch.testing.assert_close(chunked.corrections, serial.corrections, rtol=1e-12, atol=1e-12)
    # One ulp of the recurrence output's BF16 rounding, should a tie fall the other way.
    torch.testing.assert_close(chunked.out, serial.out, rtol=2**-7, atol=1e-12)


def test_chunked_equals_recurrence_without_rounding() -> None:
    g = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=torch.float64, generator=g)

    keys, queries = (
        reference.normalized(draw(2, 3, 8, 128)),
        reference.normalized(draw(2, 3, 8, 128)),
    )
    arguments = (
        keys,
        queries,
        draw(2, 3, 8, 128),
        -5 * torch.sigmoid(draw(2, 3, 8, 128)),
        torch.sigmoid(draw(2, 3, 8)),
    )
    state = draw(2, 3, 128, 128)
    serial = reference.recurrence(state.clone(), *arguments)
    untouched = state.clone()
    for got, want in zip(reference.chunked(untouched, *arguments), serial, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    assert torch.equal(untouched, state)


# Hand-worked cases: one head, everything zero but what a case sets.


def blank(kind: str, tokens: int = 1, pending: int | None = None) -> tuple[Problem, StepOperands]:
    """One request on slot 1, all zero; beta 1, decay 1, keys and queries e_0 where their first
    input is 20."""
    problem = Problem(kind, 1, 1, tokens, pending=pending)
    operands = make_step(problem, seed=0, device="cpu", conv_bias=False)
    for name in (
        "projected",
        "conv_weight",
        "conv_state",
        "f_b",
        "A_log",
        "state",
        "corrections",
        "key_gates",
    ):
        if getattr(operands, name) is not None:
            getattr(operands, name).zero_()
    operands.dt_bias.fill_(-1000)
    operands.norm_weight.fill_(1)
    operands.projected[:, 4 * 128 + 128] = 100
    operands.conv_weight[:2, 3, 0] = 1
    operands.projected[:, [0, 128]] = 20
    operands.slots.copy_(torch.arange(1, 1 + operands.slots.numel()).view(operands.slots.shape))
    if operands.accepted is not None:
        operands.accepted.fill_(1)
    return problem, operands


def test_taps_run_from_the_oldest_input_to_the_newest() -> None:
    problem, operands = blank("record", 2)
    value = 256 + 5  # channel 5 of v
    operands.conv_weight[2, :, 5] = torch.tensor([1000.0, 100.0, 10.0, 1.0])
    operands.conv_state[1, value, :3] = torch.tensor([1.0, 2.0, 3.0])
    operands.projected[:, value] = torch.tensor([4.0, 5.0])
    result = reference.step(problem, operands)
    # 1234 and 2345, SiLU leaves them, BF16 rounds to multiples of 8 and 16; the second is stored
    # over the first.
    first = 1232.0
    torch.testing.assert_close(result.corrections[0, 0, :, 5], torch.tensor([first, 2352 - first]).double(), rtol=1e-5,
                               atol=1e-5)  # fmt: skip
    assert result.conv_state[1, value].tolist() == [2, 3, 4, 5]


def test_bias_enters_before_the_activation() -> None:
    problem, operands = blank("record", 2)
    bias = torch.zeros(3 * 128)
    bias[256] = -1.0
    result = reference.step(problem, replace(operands, conv_bias=bias))
    silu = float(torch.tensor(-1 / (1 + math.e)).bfloat16())
    assert result.corrections[0, 0, 0, 0].item() == pytest.approx(silu, rel=1e-6)


def test_decay_acts_on_key_columns() -> None:
    problem, operands = blank("decode")
    operands.projected[:, [0, 128]] = 0  # no key, so no update
    operands.dt_bias[7] = 0  # sigmoid(0) = 1/2 of the lower bound -5
    operands.state[1] = torch.arange(128.0)[:, None] + 1
    result = reference.step(problem, operands)
    rows = torch.arange(128.0, dtype=torch.float64) + 1
    torch.testing.assert_close(result.state[1, 0, :, 7], rows * math.exp(-2.5))
    torch.testing.assert_close(result.state[1, 0, :, 8], rows)


def test_unbounded_decay() -> None:
    problem, operands = blank("decode")
    operands.projected[:, [0, 128]] = 0
    operands.dt_bias[7] = 0  # softplus(0) = log 2
    operands.A_log.fill_(math.log(3))
    operands.state[1] = 1
    result = reference.step(problem, replace(operands, lower_bound=None))
    torch.testing.assert_close(
        result.state[1, 0, :, 7], torch.full((128,), 1 / 8, dtype=torch.float64)
    )


def test_the_delta_rule_replaces_the_value_of_a_key() -> None:
    problem, operands = blank("decode")
    operands.state[1, 0, :, :2] = 9
    operands.conv_weight[2, 3] = 1
    operands.projected[0, 256:384] = 32  # SiLU(32) = 32
    operands.projected[0, 384:512] = 100  # output gate 1
    result = reference.step(problem, operands)
    torch.testing.assert_close(
        result.state[1, 0, :, 0], torch.full((128,), 32.0).double(), rtol=1e-6, atol=0
    )
    assert (result.state[1, 0, :, 1] == 9).all()
    # The output is constant over the head, so the norm makes it 1.
    torch.testing.assert_close(result.out, torch.ones(1, 128).double(), rtol=1e-5, atol=0)
    assert result.state_written.tolist() == [False, True]


@pytest.mark.parametrize(("accepted", "want"), [(1, 1.0), (2, 2.0), (3, 3.0)])
def test_spec_continues_from_the_accepted_state_and_window(accepted: int, want: float) -> None:
    problem, operands = blank("spec", 3)
    operands.accepted.fill_(accepted)
    for t in range(3):
        operands.state[1 + t, 0, :, 1] = t + 1.0
    operands.conv_state[1, 256 + 5] = torch.arange(1.0, 6.0)
    result = reference.step(problem, operands)
    assert (result.state[1:4, 0, :, 1] == want).all()
    assert result.conv_state[1, 256 + 5].tolist() == [want + 1, want + 2, 0, 0, 0]


def test_decode_keeps_the_last_three_inputs() -> None:
    problem, operands = blank("decode")
    operands.conv_state[1, 3] = torch.tensor([1.0, 2.0, 3.0])
    operands.projected[0, 3] = 4
    assert reference.step(problem, operands).conv_state[1, 3].tolist() == [2, 3, 4]


def test_a_longer_window_keeps_its_tail() -> None:
    problem, operands = blank("record", 2)
    wide = torch.arange(8.0).repeat(2, 3 * 128, 1).bfloat16()
    result = reference.step(problem, replace(operands, conv_state=wide))
    assert result.conv_state[1, 300].tolist() == [1, 2, 0, 0, 4, 5, 6, 7]


def test_null_requests_get_zeros_and_change_nothing() -> None:
    for problem in PROBLEMS:
        operands = make_step(
            problem, seed=6, device="cpu", null_requests=tuple(range(problem.requests))
        )
        result = reference.step(problem, operands)
        assert not result.live.any()
        assert not result.out.any()
        assert torch.equal(result.state, operands.state.double())
        assert torch.equal(result.conv_state, operands.conv_state)
        assert not result.state_written.any()


def test_a_null_window_or_accepted_state_makes_a_null_request() -> None:
    problem = Problem("spec", 3, 1, 3)
    operands = make_step(problem, seed=6, device="cpu")
    operands.accepted.fill_(2)
    operands.slots[1, 1] = 0
    operands.slots[2, 0] = 0
    operands.slots[0, 2] = 0
    result = reference.step(problem, operands)
    assert result.live.tolist() == [True, False, False]
    assert result.state_written.sum() == 2
    out, state, window, *_ = naive("spec", operands, *even_rows(problem))
    torch.testing.assert_close(result.out, out, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(result.state, state, rtol=1e-10, atol=1e-10)
    assert torch.equal(result.conv_state.double(), window)


@pytest.mark.parametrize("n", [0, 1, 2, 3])
def test_record_then_commit_or_replay_equals_spec(n: int) -> None:
    """Two windows: states, outputs and windows agree however the accepted tokens of the first get
    into the state."""
    spec_problem, record_problem = Problem("spec", 2, 2, 3), Problem("record", 2, 2, 3)
    replay_problem = Problem("replay", 2, 2, 3, pending=n)
    first, second = (
        make_step(record_problem, seed=7, device="cpu"),
        make_step(record_problem, seed=8, device="cpu"),
    )

    recorded = reference.step(record_problem, first)
    replayed = reference.step(replay_problem, replace(
        second, state=first.state, slots=first.slots, record_rows=first.record_rows, conv_state=recorded.conv_state,
        corrections=recorded.corrections, key_gates=recorded.key_gates, pending=torch.full((2,), n, dtype=torch.int32),
        conv_weight=first.conv_weight, conv_bias=first.conv_bias, f_b=first.f_b, A_log=first.A_log,
        dt_bias=first.dt_bias, norm_weight=first.norm_weight))  # fmt: skip
    if n == 0:
        assert torch.equal(replayed.state, first.state.double())
        assert not replayed.state_written.any()
        return

    slots = torch.stack((first.slots[:, 0], first.slots[:, 0] + 2, first.slots[:, 0] + 4), 1)
    pages = torch.zeros(7, 2, 128, 128)
    pages[:3] = first.state
    windows = torch.zeros(7, 3 * 256, 5).bfloat16()
    windows[:3] = first.conv_state
    ones = torch.ones(2, dtype=torch.int32)
    continued = replace(first, state=pages, conv_state=windows, slots=slots, accepted=ones, corrections=None,
                        key_gates=None, record_rows=None)  # fmt: skip
    after = reference.step(spec_problem, continued)
    torch.testing.assert_close(after.out, recorded.out)
    checkpoint = after.state[slots[:, n - 1].long()]
    torch.testing.assert_close(
        replayed.state[first.slots[:, 0].long()], checkpoint, rtol=1e-9, atol=1e-12
    )
    again = reference.step(spec_problem, replace(
        continued, projected=second.projected, state=after.state, conv_state=after.conv_state,
        accepted=torch.full((2,), n, dtype=torch.int32)))  # fmt: skip
    torch.testing.assert_close(replayed.out, again.out, rtol=2**-7, atol=1e-9)
    assert torch.equal(replayed.conv_state[1:3], again.conv_state[1:3])


def loop_commit(operands: CommitOperands, layer: int) -> Tensor:
    o = operands
    state = o.states[layer].double()
    for b in range(len(o.source)):
        n, source, destination, row = (
            int(x[b]) for x in (o.length, o.source, o.destination, o.record_rows)
        )
        if n <= 0 or source <= 0 or destination <= 0:
            continue
        stores = [(n, destination)]
        if o.boundary_slot is not None and o.boundary_slot[b] > 0 and o.boundary_length[b] > 0:
            stores.append((int(o.boundary_length[b]), int(o.boundary_slot[b])))
        for h in range(state.shape[1]):
            S = o.states[layer][source, h].double()
            for t in range(n):
                k, raw = o.key_gates[layer][row, h, t].double().view(2, 128)
                exponent = -math.exp(o.A_log[layer, h]) * (raw + o.dt_bias[layer, h].double())
                S = S * torch.exp(o.lower_bound / (1 + exponent.exp()))
                S = S + torch.outer(
                    o.corrections[layer][row, h, t].double(), k / (k @ k + 1e-6).sqrt()
                )
                for length, slot in stores:
                    if t + 1 == length:
                        state[slot, h] = S
    return state


@pytest.mark.parametrize("kind", ["commit", "flush"])
@pytest.mark.parametrize("align", [False, True])
def test_commit_equals_a_loop_over_tokens(kind: str, align: bool) -> None:
    problem = Problem(kind, 6, 2, 4, layers=2, pending="mix")
    operands = make_commit(
        problem, seed=9, device="cpu", inputs="generic", align=align, pad=16, null_requests=(1, 4)
    )
    if align:
        # A boundary at the end of the window is stored too; the null slot and a negative one are
        # not.
        operands.boundary_length[0] = operands.length[0]
        operands.boundary_slot[3] = -1
    for records in (*operands.corrections, *operands.key_gates):
        for row, n in zip(operands.record_rows.tolist(), operands.length.tolist(), strict=True):
            records[row, :, n:] = torch.nan  # tokens that were not accepted
    for layer in range(2):
        torch.testing.assert_close(reference.commit(operands, layer), loop_commit(operands, layer), rtol=1e-10,
                                   atol=1e-12)  # fmt: skip


def test_commit_by_hand() -> None:
    operands = make_commit(Problem("commit", 1, 1, 2, pending=1), seed=0, device="cpu")
    operands.A_log.zero_()
    operands.dt_bias.zero_()
    operands.states[0].fill_(2)
    operands.key_gates[0].zero_()
    operands.key_gates[0][0, 0, :, 3] = 4
    operands.corrections[0][0, 0] = torch.tensor([[5.0], [70.0]])
    state = reference.commit(operands, 0)[int(operands.destination[0]), 0]
    torch.testing.assert_close(
        state[:, 0], torch.full((128,), 2 * math.exp(-2.5)).double(), rtol=1e-6, atol=0
    )
    torch.testing.assert_close(
        state[:, 3], torch.full((128,), 2 * math.exp(-2.5) + 5).double(), rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: f"{p.kind}-{p.state_dtype}")
def test_selected_requests_give_the_same_results(problem: Problem) -> None:
    operands = make_step(problem, seed=10, device="cpu", null_requests=(0,))
    whole = reference.step(problem, operands)
    kept = torch.tensor([0, problem.requests - 1])
    part = reference.step(*reference.select(problem, operands, kept))
    rows = (kept[:, None] * problem.tokens + torch.arange(problem.tokens)).flatten()
    torch.testing.assert_close(part.out, whole.out[rows], rtol=1e-12, atol=1e-12)
    assert part.live.tolist() == [False, True]
    table = operands.slots.view(problem.requests, -1)[-1].long()
    pages = table[whole.state_written[table]]
    torch.testing.assert_close(part.state[part.state_written], whole.state[pages.sort().values])
    if whole.corrections is not None:
        row = int(operands.record_rows[-1])
        torch.testing.assert_close(
            part.corrections[part.records_written][0], whole.corrections[row]
        )


def test_a_commit_is_no_step() -> None:
    operands = make_step(Problem("decode", 1, 1), seed=0, device="cpu")
    with pytest.raises(ValueError, match="kind commit"):
        reference.step(Problem("commit", 1, 1, 2), operands)


# compare: a correct result passes, each kind of error is named.


def perfect(problem: Problem, operands: StepOperands, result: reference.StepResult) -> None:
    """Writes the expected result into the operands."""
    for name in ("out", "state", "conv_state", "corrections", "key_gates"):
        if getattr(result, name) is not None:
            getattr(operands, name).copy_(getattr(result, name))


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: f"{p.kind}-{p.state_dtype}")
def test_the_reference_passes_its_own_check(problem: Problem) -> None:
    operands = make_step(problem, seed=11, device="cpu", pad=16, null_requests=(1,))
    result = reference.step(problem, operands)
    compare.poison(operands)
    assert compare.check_step(problem, operands, result) is not None
    perfect(problem, operands, result)
    assert compare.check_step(problem, operands, result) is None


def _spoil_rows(o: StepOperands, _: reference.StepResult) -> None:
    o.out.mul_(1.01)


def _spoil_one(o: StepOperands, _: reference.StepResult) -> None:
    o.out[-1, 5] += 0.1


def _spoil_null(o: StepOperands, _: reference.StepResult) -> None:
    o.out[4, 5] = 1e-6


def _spoil_nan(o: StepOperands, _: reference.StepResult) -> None:
    o.out[-1, 0] = torch.nan


def _spoil_checkpoint(o: StepOperands, r: reference.StepResult) -> None:
    page = int(o.slots[0, 0])
    o.state[page, 0, 0, 0] = torch.nextafter(o.state[page, 0, 0, 0], torch.tensor(9.0))


def _spoil_padding(o: StepOperands, _: reference.StepResult) -> None:
    reference.padding(o.state)[0, 3] = 1.25


def _spoil_window(o: StepOperands, _: reference.StepResult) -> None:
    o.conv_state[int(o.slots[2, 0]), 3, 1] += 1


def _spoil_correction(o: StepOperands, _: reference.StepResult) -> None:
    o.corrections[int(o.record_rows[0]), 1] *= 1.1


def _spoil_key(o: StepOperands, _: reference.StepResult) -> None:
    # To the further BF16 neighbour.
    keys = o.key_gates[int(o.record_rows[0]), 0, 0, :128].view(torch.int16)
    keys += 1


def _spoil_other_record(o: StepOperands, _: reference.StepResult) -> None:
    row = ({*range(3)} - {int(r) for r in o.record_rows}).pop()
    o.key_gates[row, 0, 0, 130] += 1


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_spoil_rows, "out: norm error"),
        (_spoil_one, "out: elementwise error"),
        (_spoil_null, "out: elements of null requests that are not zero: 1"),
        (_spoil_nan, "out: elementwise error .*nan"),
        (_spoil_checkpoint, "state: elements changed in pages not to be written: 1"),
        (_spoil_padding, "state: elements changed between rows: 1"),
        (_spoil_window, "conv_state: wrong elements: 1"),
        (_spoil_correction, "corrections: norm error"),
        (_spoil_key, "recorded keys: elements off the BF16 rounding"),
        (_spoil_other_record, "key_gates: elements changed outside"),
    ],
)
def test_each_error_is_named(spoil, message: str) -> None:  # type: ignore[no-untyped-def]
    problem = Problem("record", 3, 2, 4)
    operands = make_step(problem, seed=12, device="cpu", pad=16, null_requests=(1,))
    result = reference.step(problem, operands)
    perfect(problem, operands, result)
    spoil(operands, result)
    verdict = compare.check_step(problem, operands, result)
    assert verdict is not None
    assert "\n" not in verdict
    assert re.match(message, verdict), verdict


def test_one_wrong_item_does_not_drown() -> None:
    problem = Problem("decode", 64, 2)
    operands = make_step(problem, seed=13, device="cpu")
    result = reference.step(problem, operands)
    perfect(problem, operands, result)
    operands.state[int(operands.slots[5]), 1, 7] *= 1.02
    assert "norm error" in (compare.check_step(problem, operands, result) or "")
    operands.state[int(operands.slots[5]), 1, 7] = torch.nan
    assert "nan" in (compare.check_step(problem, operands, result) or "")


def test_a_tie_may_fall_either_way() -> None:
    problem = Problem("record", 1, 1, 2)
    operands = make_step(problem, seed=14, device="cpu")
    result = reference.step(problem, operands)
    perfect(problem, operands, result)
    row = int(operands.record_rows[0])
    # 1 + 2^-8 is the tie of 1 and 1 + 2^-7.
    for exact, other, passes in (
        (1 + 2**-8 - 1e-7, 1 + 2**-7, True),
        (1 + 2**-8 - 1e-3, 1 + 2**-7, False),
    ):
        result.key_gates_exact[row, 0, 0, 0] = exact
        result.key_gates[row, 0, 0, 0] = 1.0
        operands.key_gates[row, 0, 0, 0] = other
        assert (compare.check_step(problem, operands, result) is None) is passes
        operands.key_gates[row, 0, 0, 0] = 1.0
        assert compare.check_step(problem, operands, result) is None


@pytest.mark.parametrize("align", [False, True])
def test_check_commit(align: bool) -> None:
    problem = Problem("commit", 4, 2, 3, pending="mix")
    operands = make_commit(problem, seed=15, device="cpu", align=align, null_requests=(2,))
    expected = reference.commit(operands, 0)
    compare.poison(operands)
    assert "nan" in (compare.check_commit(operands, expected, 0) or "")
    operands.states[0].copy_(expected)
    assert compare.check_commit(operands, expected, 0) is None
    operands.states[0][int(operands.source[0]), 0, 0, 0] += 1
    assert "not to be written: 1" in (compare.check_commit(operands, expected, 0) or "")


def test_poison_spares_what_a_launch_reads() -> None:
    for problem in (
        *PROBLEMS,
        Problem("commit", 5, 1, 3, pending="mix"),
        Problem("flush", 5, 1, 3, pending="mix"),
    ):
        make = make_commit if problem.folds_only else make_step
        operands, again = (
            make(problem, seed=16, device="cpu", null_requests=(1,)) for _ in range(2)
        )
        compare.poison(operands)
        if isinstance(operands, CommitOperands):
            for layer in range(problem.layers):
                folded, expected = reference.commit(operands, layer), reference.commit(again, layer)
                assert torch.equal(folded, expected)
        else:
            want, got = reference.step(problem, again), reference.step(problem, operands)
            assert torch.equal(got.out, want.out)
            assert torch.equal(got.state, want.state)
            if want.corrections is not None:
                assert torch.equal(got.corrections, want.corrections)


def test_gate_ties_are_counted() -> None:
    problem = Problem("decode", 2, 1)
    step = make_step(problem, seed=3, device="cpu")
    step.f_b.zero_()
    columns = slice(4 * problem.channels, 4 * problem.channels + 128)
    step.projected[:, columns] = 0
    step.projected[:, columns.start] = 1
    step.f_b[:, 0] = 1  # raw gates of exactly 1: no tie
    assert compare.gate_ties(problem, step) == 0
    step.projected[:, columns.start + 1] = 1
    step.f_b[5, 1] = 2**-8  # half way between 1 and its BF16 neighbour, in both requests
    assert compare.gate_ties(problem, step) == 2
    step.f_b[6, 1] = 2**-9
    assert compare.gate_ties(problem, step) == 2
