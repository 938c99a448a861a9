"""KdaFusedWS without a GPU: its rules, its ring of lines, its source run thread by thread, what the
compiler made of it."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from kda_kernels import variants
from kda_kernels.arguments import Arguments
from kda_kernels.device import cubin, smem
from kda_kernels.device.gpu import Gpu
from kda_kernels.operands import StepOperands, make_step
from kda_kernels.parts import streaming
from kda_kernels.problem import Problem
from kda_kernels.step import Compiled
from kda_kernels.variants import fused_ws
from support import simt, simt_cluster
from support.compiled import Recorder, sass_of

GPUS = {
    "sm_90a": Gpu("sm_90a", 132),
    "sm_100a": Gpu("sm_100a", 148),
    "sm_103a": Gpu("sm_103a", 148),
}
H200 = GPUS["sm_90a"]


pytestmark = pytest.mark.usefixtures("own_cache")


def problem(tokens: int = 8, **more: Any) -> Problem:
    return Problem(
        "replay", **{"requests": 4, "heads": 6, "tokens": tokens, "pending": "mix", **more}
    )


@pytest.mark.parametrize(
    ("of", "choices", "reason"),
    [
        (Problem("record", 4, 6, 4), {}, "kind=record: only replay"),
        (Problem("commit", 4, 6, 4), {}, "kind=commit"),
        (problem(state_dtype="bf16"), {}, "state_dtype=bf16"),
        (problem(), {"gate_mode": 2}, "gate_mode=2 is not one of 0, 1"),
        (problem(), {"staged": 1}, "staged=1 is not one of None, 2, 3, 4"),
        (problem(), {"staged": 4}, "bytes of shared memory exceed 115712"),
        (problem(), {"records": "some"}, "records='some'"),
        (problem(), {"conv_weight_dtype": "fp16"}, "conv_weight_dtype='fp16'"),
        (problem(), {"window": 9}, "window=9 must lie in 10..16"),
        (problem(2), {"window": 17}, "window=17 must lie in 4..16"),
        (problem(), {"most_items": 0}, "most_items=0 must be at least 1"),
    ],
)
def test_unsupported(of: Problem, choices: dict[str, Any], reason: str) -> None:
    found = fused_ws.unsupported(of, fused_ws.Options(**choices), H200)
    assert found is not None
    assert reason in found
    with pytest.raises(ValueError, match=re.escape(reason)):
        fused_ws.compile(of, fused_ws.Options(**choices), H200)


def test_is_a_variant() -> None:
    assert variants.load("KdaFusedWS") is fused_ws


@pytest.mark.parametrize("tokens", range(2, 9))
@pytest.mark.parametrize("layout", ["dim-first", "window-major"])
@pytest.mark.parametrize("window", [None, 16])
def test_two_ctas_fit_an_sm(tokens: int, layout: Any, window: int | None) -> None:
    of, options = problem(tokens, conv_layout=layout), fused_ws.Options(window=window)
    assert fused_ws.unsupported(of, options, H200) is None
    p = fused_ws.plan(of, options)
    assert 2 * (p.smem_bytes + 1024) <= 233_472
    assert all(size % 128 == 0 for size in smem.sizes(p.areas).values())
    assert p.staged >= (
        4 if tokens <= 4 else 3 if tokens < 8 or window is None or layout != "dim-first" else 2
    )


@pytest.mark.parametrize("staged", [2, 3, 4])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_ring_of_lines(staged: int, count: int) -> None:
    """What is waited for is complete, no line is asked for twice, and none over one that is still
    to be read."""
    lines, asked = 4, [("operands", 0), *(("line", turn) for turn in range(staged))]
    unread = {turn % staged: turn for turn in range(staged)}

    def complete(group: tuple[str, int], most_pending: int) -> bool:
        return asked.index(group) < len(asked) - most_pending

    assert complete(("operands", 0), staged)
    for item in range(count):
        asked.append(("operands", item + 1))
        for line in range(lines):
            turn = lines * item + line
            assert complete(("line", turn), staged if line < staged else staged - 1)
            assert unread.pop(turn % staged) == turn
            assert turn + staged not in unread.values()
            unread[(turn + staged) % staged] = turn + staged
            asked.append(("line", turn + staged))
        assert complete(("operands", item + 1), lines)
    assert len(set(asked)) == len(asked)


# The source, thread by thread.


@pytest.fixture(scope="module")
def emulated() -> ModuleType:
    return simt_cluster.load("fused_ws")["fused_ws"]


def draw(of: Problem, choices: dict[str, Any], seed: int, **more: Any) -> StepOperands:
    """`pending`: the count of each live request with a record; `unrecorded` live ones without, and
    a null one, follow.

    Records lie in another order than requests, and whatever stands past their pending tokens is
    NaN.
    """
    counts, unrecorded = more.pop("pending"), more.pop("unrecorded", 0)
    requests = len(counts) + unrecorded + 1
    assert of.requests == requests
    o = make_step(of, seed=seed, device="cpu", pad=16, null_requests=(requests - 1,), **more)
    if choices.get("conv_weight_dtype") == "bf16":
        o = simt.with_bf16_weights(o)
    assert o.record_rows is not None
    assert o.pending is not None
    assert o.corrections is not None
    assert o.key_gates is not None
    rows, pending = o.record_rows.clone(), o.pending.clone()
    rows[len(counts) :] = -3
    for row, n in zip(rows.tolist(), counts, strict=False):
        pending[row] = n
        o.corrections[row, :, max(n, 0) :] = torch.nan
        o.key_gates[row, :, max(n, 0) :] = torch.nan
    return replace(o, record_rows=rows, pending=pending)


def emulate(
    m: ModuleType, of: Problem, choices: dict[str, Any], more: dict[str, Any], seed: int
) -> str | None:
    return simt.compare_step(m, of, m.Options(**choices), draw(of, choices, seed, **more), seed)


# Two CTAs share the items: of three heads each changes heads on its way.
CASES: dict[str, tuple[Problem, dict[str, Any], dict[str, Any]]] = {
    "2, all counts": (problem(2, requests=6, heads=1), {"gate_mode": 1}, {"pending": (1, 0, 2, 7, -2)}),
    "2, heads": (problem(2, requests=2, heads=3), {}, {"pending": (2,), "inputs": "generic"}),
    "3, window-major": (
        problem(3, requests=4, heads=1, conv_layout="window-major"),
        {"conv_weight_dtype": "bf16", "staged": 3},
        {"pending": (3, 1), "unrecorded": 1, "conv_bias": False},
    ),
    "4": (problem(4, requests=4, heads=1), {"stream_stores": True}, {"pending": (3, 0), "unrecorded": 1}),
    "5, ahead": (problem(5, requests=3, heads=1), {"ahead": True, "records": "all"}, {"pending": (5, 2)}),
    "6, window-major, ahead": (
        problem(6, requests=3, heads=1, conv_layout="window-major"),
        {"ahead": True, "gate_mode": 1},
        {"pending": (0, 4)},
    ),
    "7, long window, two lines": (problem(7, requests=3, heads=1), {"window": 12, "staged": 2}, {"pending": (7, 1)}),
    "8": (problem(requests=3, heads=1), {}, {"pending": (5, 8)}),
    "8, heads": (problem(requests=2, heads=3), {"records": "all"}, {"pending": (6,), "inputs": "generic"}),
    "4, one item per CTA": (problem(4, requests=2, heads=2), {"most_items": 1}, {"pending": (2,)}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_emulation_agrees_with_the_reference(emulated: ModuleType, case: str) -> None:
    assert emulate(emulated, *CASES[case], seed=len(case)) is None


@pytest.mark.parametrize("case", ["2, heads", "3, window-major", "7, long window, two lines", "8"])
def test_nothing_is_replaced_before_it_is_read(
    emulated: ModuleType, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.setattr(simt.Thread, "early", True)
    assert emulate(emulated, *CASES[case], seed=2) is None


@pytest.mark.parametrize("left_out", range(6))
def test_emulation_notices_a_missing_barrier(
    emulated: ModuleType, monkeypatch: pytest.MonkeyPatch, left_out: int
) -> None:
    """Any of those that an item passes; what was in time by luck is not, for some order of the
    warps."""
    real, passed = emulated.streaming.arch.sync_threads, Counter[Any]()

    def all_but_one() -> None:
        thread = id(simt.current())
        passed[thread] += 1
        if passed[thread] != left_out + 1:
            real()

    monkeypatch.setattr(emulated.arch, "sync_threads", all_but_one)
    of, choices, more = CASES["4"]

    def wrong(seed: int) -> bool:
        passed.clear()
        try:
            return emulate(emulated, of, choices, more, seed) is not None
        except RuntimeError:
            return True

    assert any(wrong(seed) for seed in range(4))


# What the compiler made of it.

GRID = [
    *((q, layout, "sm_90a") for q in range(2, 9) for layout in ("dim-first", "window-major")),
    *((q, "dim-first", arch) for q in (2, 4, 8) for arch in ("sm_100a", "sm_103a")),
]


@pytest.mark.parametrize(("tokens", "layout", "arch"), GRID)
def test_two_ctas_per_sm_and_no_spills(tokens: int, layout: Any, arch: str) -> None:
    check_resources(
        fused_ws.compile(problem(tokens, conv_layout=layout), fused_ws.Options(), GPUS[arch])
    )


@pytest.mark.parametrize("tokens", [2, 4, 5, 8])
@pytest.mark.parametrize(
    "choices",
    [
        {"gate_mode": 1, "records": "all"},
        {"conv_weight_dtype": "bf16", "stream_stores": True, "ahead": True},
        {"window": 16, "gate_mode": 1},
        {"staged": 2},
        {"staged": 3},
    ],
    ids=str,
)
def test_choices_compile(tokens: int, choices: dict[str, Any]) -> None:
    check_resources(fused_ws.compile(problem(tokens), fused_ws.Options(**choices), H200))


def check_resources(compiled: Compiled) -> None:
    found = compiled.resources
    assert fused_ws.KERNELS[0] in compiled.binary.symbol
    assert found.stack_bytes == 0
    assert (found.threads, found.cluster) == (256, 1)
    assert found.registers <= 128
    assert found.smem_bytes == compiled.plan.smem_bytes <= streaming.SMEM_BYTES
    assert found.ctas_per_sm >= 2
    assert len(compiled.binary.parameters) == len(Arguments._fields)


def test_launch_options_and_sizes_share_a_binary() -> None:
    first = fused_ws.compile(problem(4), fused_ws.Options(), H200)
    more = {"requests": 300, "heads": 96, "pending": 3}
    second = fused_ws.compile(
        problem(4, **more), fused_ws.Options(pdl=True, most_items=3), Gpu("sm_90a", 114)
    )
    assert second.binary == first.binary  # the time it took to compile is part of it
    assert ((first.sms, first.pdl), (second.sms, second.pdl)) == ((132, False), (114, True))


@pytest.mark.parametrize("tokens", [4, 8])
def test_gate_weights_stay_and_states_stream(tokens: int, tmp_path: Path) -> None:
    """Gate weights are loaded at the start and behind a change of heads, not per item; states by
    cp.async alone."""
    text = sass_of(
        fused_ws.compile(problem(tokens), fused_ws.Options(), H200).binary.image, tmp_path
    )
    assert not re.findall(r"\b(?:STL|LDL)\b", text)
    assert len(re.findall(r"\bLDG\.E\.128\b", text)) == 2 * 8
    assert not re.findall(r"\bLDG\.E\.64\b", text)
    assert len(re.findall(r"\bBAR\.SYNC", text)) == 1 + 5
    # Gate, A and B, a line folded and multiplied, T and C.
    tiles = tokens // 4
    fold = 8 if tokens == 8 else 4
    assert (
        len(re.findall(r"\bHMMA\.16816\.F32\.BF16\b", text))
        == 8 + 3 * tiles + fold + 6 * tiles + 2 * tiles
    )


def test_launch_passes_addresses_and_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    monkeypatch.setattr(cubin, "launcher", lambda _: recorder)
    of = problem(4, requests=5, heads=3)
    compiled = fused_ws.compile(of, fused_ws.Options(pdl=True), Gpu("sm_90a", 2))
    o = make_step(of, seed=1, device="cpu", pad=64)
    fused_ws.launch(compiled, o, 7)
    assert recorder.grid == (4, 1, 1)  # 15 items, eight for each SM
    assert (recorder.stream, recorder.pdl) == (7, True)
    passed = Arguments(*recorder.values)
    assert o.pending is not None
    assert (passed.state, passed.pending) == (o.state.data_ptr(), o.pending.data_ptr())
    assert (passed.heads, passed.requests, passed.per) == (3, 5, 8)
    limited = fused_ws.compile(of, fused_ws.Options(most_items=2), Gpu("sm_90a", 2))
    fused_ws.launch(limited, o, 7)
    assert recorder.grid == (8, 1, 1)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda o: {"lower_bound": None}, "lower_bound is None"),
        (lambda o: {"lower_bound": -8.0}, "too low for 8 tokens"),
        (lambda o: {"pending": None}, "pending"),
        (lambda o: {"state": o.state.bfloat16()}, "state"),
        (lambda o: {"corrections": o.corrections[:, :, :4]}, "corrections"),
        (
            lambda o: {"conv_state": o.conv_state.transpose(1, 2).contiguous().transpose(1, 2)},
            "conv_state",
        ),
        (lambda o: {"projected": o.projected[:, 1:]}, "projected"),
    ],
)
def test_launch_refuses_operands_that_do_not_fit(
    monkeypatch: pytest.MonkeyPatch, change: Any, reason: str
) -> None:
    monkeypatch.setattr(cubin, "launcher", lambda _: Recorder())
    of = problem()
    compiled = Compiled(None, fused_ws.plan(of, fused_ws.Options()), pdl=False, sms=132)  # type: ignore[arg-type]
    operands = make_step(of, seed=1, device="cpu")
    fused_ws.launch(compiled, operands, 0)
    with pytest.raises(ValueError, match=reason):
        fused_ws.launch(compiled, replace(operands, **change(operands)), 0)
