"""What must hold of a cell before it is timed, on the CPU: inputs, slots, bytes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from kda_kernels.operands import CommitOperands, StepOperands, make_commit, make_step
from kda_kernels.problem import Problem
from kdabench.measure import cell_bench, inspection

STEPS = [("decode", 1, None), ("spec", 4, None), ("record", 4, None), ("replay", 4, "mix")]


def step(
    kind: Any = "decode", tokens: int = 1, pending: Any = None, **options: Any
) -> StepOperands:
    return make_step(Problem(kind, 9, 2, tokens, pending=pending), seed=1, device="cpu", **options)


@pytest.mark.parametrize(("kind", "tokens", "pending"), STEPS)
@pytest.mark.parametrize("inputs", ["model", "generic"])
def test_the_operands_that_are_timed_are_proper(
    kind: str, tokens: int, pending: Any, inputs: str
) -> None:
    assert inspection.improper_inputs(step(kind, tokens, pending, inputs=inputs)) is None


@pytest.mark.parametrize("kind", ["commit", "flush"])
def test_so_are_those_of_commits(kind: Any) -> None:
    commit = make_commit(Problem(kind, 9, 2, 4, layers=2), seed=1, device="cpu")
    assert inspection.improper_inputs(commit) is None
    other = replace(commit, source=commit.source.sort().values)
    assert "in order" in str(
        inspection.improper_inputs(other if kind == "commit" else in_place(other))
    )


def in_place(commit: CommitOperands) -> CommitOperands:
    return replace(commit, destination=commit.source)


def improper() -> list[tuple[str, StepOperands]]:
    good = step()
    twice = good.slots.clone()
    twice[0] = twice[1]
    broken = good.projected.clone()
    broken[3, 5] = torch.nan
    return [
        ("slots: in order", replace(good, slots=good.slots.sort().values)),
        ("slots: in order", replace(good, slots=good.slots.sort(descending=True).values)),
        ("slots: not distinct", replace(good, slots=twice)),
        ("slots: 0..8", replace(good, slots=good.slots - 1)),
        ("slots: 2..10, beyond the pages 1..9", replace(good, slots=good.slots + 1)),
        ("not all finite", replace(good, projected=broken)),
        ("all alike", replace(good, state=torch.zeros_like(good.state))),
        ("all alike", replace(good, dt_bias=torch.full_like(good.dt_bias, -5))),
    ]


@pytest.mark.parametrize(("why", "operands"), improper(), ids=[why for why, _ in improper()])
def test_improper_ones_are_refused(why: str, operands: StepOperands) -> None:
    assert str(inspection.improper_inputs(operands)).startswith(why)


def test_any_bit_of_what_is_only_read_shows() -> None:
    commit = make_commit(Problem("commit", 3, 2, 4), seed=1, device="cpu")
    for operands in (step("record", 4), commit):
        constant = list(inspection.constant(operands))
        assert len(constant) >= 7
        for tensor in constant:
            before = inspection.bit_sum(tensor)
            flat = (
                tensor.view(torch.uint8)
                if tensor.dim() == 1
                else tensor.flatten().view(torch.uint8)
            )
            flat[-1] ^= 1
            assert inspection.bit_sum(tensor) != before


def test_a_device_without_a_known_peak_rate_asks_nvml() -> None:
    from types import SimpleNamespace

    from kda_kernels.device.gpu import Gpu

    unknown = cell_bench.Device(0, Gpu("sm_90a", 7), "X", "uuid", None, 10**6, None)
    telemetry: Any = SimpleNamespace(peak_bytes_per_us=lambda: 4.9e6)
    assert unknown.knowing(telemetry).peak_bytes_per_us == 4.9e6
    assert replace(unknown, peak_bytes_per_us=1e6).knowing(telemetry).peak_bytes_per_us == 1e6


def test_neighbours_take_no_longer_than_their_weights_do() -> None:
    """As wide as the model's while their weights are few and the rows too; then narrower, by
    either."""
    sizes = {(heads, rows): cell_bench.hidden_size(Problem("decode", rows, heads))
             for heads in (4, 12, 96) for rows in (1, 200, 400, 2048)}  # fmt: skip
    assert sizes[4, 1] == sizes[12, 1] == sizes[12, 200] == 7168
    assert sizes[96, 1] == sizes[96, 200] == 960
    for (heads, rows), hidden in sizes.items():
        weights = 2 * hidden * Problem("decode", rows, heads).pitch
        assert hidden == 512 or weights * max(rows, 200) <= 200 * (96 << 20)
        assert hidden % 64 == 0
