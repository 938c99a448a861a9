"""KdaFused without a GPU: its rules and index maps, its source run thread by thread, what the
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

from kda_kernels import arguments
from kda_kernels.device import cubin
from kda_kernels.device.gpu import Gpu
from kda_kernels.operands import StepOperands, make_step
from kda_kernels.parts import fold
from kda_kernels.problem import HEAD_DIM, Problem
from kda_kernels.step import Compiled
from kda_kernels.variants import fused, fused_cluster
from support import simt, simt_cluster
from support.compiled import Recorder, sass_of

H200 = Gpu("sm_90a", 132)
SHAPES = ((1, 256), (2, 256), (2, 128), (4, 256), (4, 128), (8, 256), (8, 128))
"""split, threads"""
LINE_CHOICES: dict[str, Any] = {"source": "shared", "fold": "late", "state_first": False}
LINES = fused.Options(**LINE_CHOICES)


pytestmark = pytest.mark.usefixtures("own_cache")


def problem(tokens: int = 8, **more: Any) -> Problem:
    return Problem(
        "replay", **{"requests": 4, "heads": 6, "tokens": tokens, "pending": "mix", **more}
    )


def plan(of: Problem, options: fused.Options) -> fused_cluster.Plan:
    p = fused.plan(of, options)
    assert isinstance(p, fused_cluster.Plan)
    return p


@pytest.mark.parametrize(
    ("of", "choices", "reason"),
    [
        (Problem("record", 4, 6, 4), {}, "kind=record: only replay"),
        (Problem("commit", 4, 6, 4), {}, "kind=commit"),
        (problem(state_dtype="bf16"), {}, "state_dtype=bf16"),
        (problem(), {"split": 3}, "split=3 is not one of 1, 2, 4, 8"),
        (problem(), {"threads": 512}, "threads=512"),
        (problem(), {"threads": 128}, "128 rows take 256 threads"),
        (problem(), {"gate_mode": 2}, "gate_mode=2 is not one of 0, 1"),
        (problem(), {"fold": "never"}, "fold='never'"),
        (problem(), {"ctas_per_sm": 9}, "ctas_per_sm=9 must lie in 0..8"),
        (problem(), {"source": "disk"}, "source='disk'"),
        (problem(), {"source": "shared"}, "source=shared takes split=1, fold=late"),
        (problem(), {**LINE_CHOICES, "threads": 128}, "threads=128 is not one of 256, 288, 320"),
        (
            problem(4),
            {**LINE_CHOICES, "ctas_per_sm": 4},
            "ctas_per_sm=4: too few registers for 4 tokens",
        ),
        (
            problem(),
            {**LINE_CHOICES, "ctas_per_sm": 3, "window": 16},
            "leave no room for ctas_per_sm=3",
        ),
        (
            problem(5),
            {**LINE_CHOICES, "ctas_per_sm": 3, "threads": 288},
            "too few registers for 5 tokens",
        ),
        (problem(), {"records": "some"}, "records='some'"),
        (problem(), {"conv_weight_dtype": "fp16"}, "conv_weight_dtype='fp16'"),
        (problem(), {"window": 9}, "window=9 must lie in 10..16"),
        (problem(), {"window": 17}, "window=17 must lie in 10..16"),
        (problem(requests=70_000), {}, "requests=70000"),
        (problem(lower_bound=-8.0), {}, "lower_bound=-8.0 is too low for 8 tokens"),
        (problem(lower_bound=-8.0), LINE_CHOICES, "lower_bound=-8.0 is too low for 8 tokens"),
        (problem(lower_bound=None), {}, "unbounded"),
    ],
)
def test_unsupported(of: Problem, choices: dict[str, Any], reason: str) -> None:
    found = fused.unsupported(of, fused.Options(**choices), H200)
    assert found is not None
    assert reason in found
    with pytest.raises(ValueError, match=re.escape(reason)):
        fused.compile(of, fused.Options(**choices), H200)


@pytest.mark.parametrize("tokens", range(2, 9))
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("layout", ["dim-first", "window-major"])
@pytest.mark.parametrize("streamable", [True, False])
def test_supported(tokens: int, shape: tuple[int, int], layout: Any, streamable: bool) -> None:
    of, options = problem(tokens, conv_layout=layout), fused.Options(*shape, streamable=streamable)
    assert fused.unsupported(of, options, H200) is None
    p = plan(of, options)
    assert p.row_tiles * p.column_parts == p.warps
    assert p.cells * p.column_parts == p.row_cells
    assert p.gate_warp + p.row_tiles <= p.warps
    assert 3 * p.rows // 2 * p.token_groups <= p.threads
    # A second group's history lies among the inputs: the window is rolled meanwhile.
    assert p.token_groups == 1 or (
        p.group_tokens >= 3 and p.token_groups * p.group_tokens >= tokens
    )


@pytest.mark.parametrize("shape", SHAPES)
def test_threads_cover_a_state_once(shape: tuple[int, int]) -> None:
    """And a thread's columns are those of its fragments."""
    p = plan(problem(), fused.Options(*shape))
    seen: Counter[int] = Counter()
    for rank in range(p.split):
        for tid in range(p.threads):
            warp, lane = divmod(tid, 32)
            tile, part = warp % p.row_tiles, warp // p.row_tiles
            cell = (
                (rank * p.row_tiles + tile) * (16 * 512)
                + lane // 4 * 1024
                + part * (p.cells * 64)
                + lane % 4 * 16
            )
            for c in range(p.cells):
                for row in range(2):
                    at = cell // 4 + 128 * row + 16 * c
                    assert p.quad_place(at % 128 // 4) == (part * p.cells + c, lane % 4)
                    seen.update(range(at, at + 4))
    assert seen == Counter(range(HEAD_DIM * HEAD_DIM))


@pytest.mark.parametrize("slots", [4, 8])
def test_fold_fragments_have_no_bank_conflicts(slots: int) -> None:
    pitch = 4 * (4 * slots) + 4
    for first in range(0, 32, 8):  # eight lanes at a time load 16 bytes each
        places = {
            fold.fold_place(lane // 4, lane % (slots // 2)) for lane in range(first, first + 8)
        }
        assert len({place % 8 for place in places}) == len(places)
    for t in range(slots // 2):
        for i in range(2):
            for warp in range(4):  # sixteen lanes at a time store 8 bytes each
                banks = [
                    (
                        pair // 8 * pitch
                        + 4 * fold.fold_place(pair % 8 // 2 * 2 + i, t)
                        + 2 * (pair % 2)
                    )
                    // 2
                    % 16
                    for pair in range(16 * warp, 16 * warp + 16)
                ]
                assert len(set(banks)) == 16


@pytest.mark.parametrize("shape", SHAPES)
def test_channels_that_are_sent_are_those_that_others_lack(shape: tuple[int, int]) -> None:
    p = plan(problem(3), fused.Options(*shape))
    for rank in range(p.split):
        got: Counter[tuple[int, str, int, int]] = Counter()
        for sender in set(range(p.split)) - {rank}:
            for unit in range(p.tokens * p.sent_units):
                token, u = divmod(unit, p.sent_units)
                if u < p.rows // 4:
                    got.update((token, "gamma", 0, sender * p.rows + 4 * u + e) for e in range(4))
                else:
                    v = u - p.rows // 4
                    part, first = divmod(v, p.rows // 8)
                    got.update(
                        (token, "qk", part, sender * p.rows + 8 * first + e) for e in range(8)
                    )
        own = range(rank * p.rows, (rank + 1) * p.rows)
        others = [c for c in range(HEAD_DIM) if c not in own]
        assert got == Counter(
            (t, kind, part, c)
            for t in range(p.tokens)
            for kind, part in (("gamma", 0), ("qk", 0), ("qk", 1))
            for c in (others if p.split > 1 else ())
        )


# The source, thread by thread.


@pytest.fixture(scope="module")
def emulated() -> ModuleType:
    return simt_cluster.load("fused")["fused"]


def draw(of: Problem, options: Any, seed: int, **choices: Any) -> tuple[Problem, StepOperands]:
    """All counts of pending tokens named by `pending`, a live request without a record if asked
    for, and a null one."""
    counts, unrecorded = choices.pop("pending"), choices.pop("unrecorded", False)
    of = replace(of, requests=len(counts) + unrecorded + 1, heads=1)
    operands = make_step(
        of, seed=seed, device="cpu", pad=16, null_requests=(of.requests - 1,), **choices
    )
    if options.conv_weight_dtype == "bf16":
        operands = simt.with_bf16_weights(operands)
    assert operands.record_rows is not None
    assert operands.pending is not None
    rows, pending = operands.record_rows.clone(), operands.pending.clone()
    for b, n in enumerate(counts):
        pending[int(rows[b])] = n
    rows[len(counts) :] = -3
    operands = replace(operands, record_rows=rows, pending=pending)
    # Whatever stands in the entries of rejected tokens has no part in it.
    assert operands.corrections is not None
    assert operands.key_gates is not None
    for b, n in enumerate(counts):
        operands.corrections[int(rows[b]), :, max(n, 0) :] = torch.nan
        operands.key_gates[int(rows[b]), :, max(n, 0) :] = torch.nan
    return of, operands


def emulate(m: ModuleType, of: Problem, options: Any, seed: int, **choices: Any) -> str | None:
    of, operands = draw(of, options, seed, **choices)
    return simt.compare_step(m, of, options, operands, seed)


CASES: dict[str, tuple[Problem, fused.Options, dict[str, Any]]] = {
    "8": (problem(), fused.Options(), {"pending": (5,), "unrecorded": True}),
    "2, late, all counts": (
        problem(2),
        fused.Options(fold="late", gate_mode=1),
        {"pending": (0, 1, 2, 7, -2)},
    ),
    "4, after the projection": (
        problem(4),
        fused.Options(state_first=False),
        {"pending": (4,), "inputs": "generic"},
    ),
    "4, lines": (problem(4), LINES, {"pending": (3, 0)}),
    "5, lines": (problem(5), LINES, {"pending": (5,), "unrecorded": True}),
    "8, two lines at a time": (
        problem(),
        replace(LINES, ctas_per_sm=3, records="pending"),
        {"pending": (6,)},
    ),
    "7, lines, two more warps": (
        problem(7),
        replace(LINES, threads=320, stream_stores=True),
        {"pending": (7,)},
    ),
    "2, lines, any layout, a ninth warp": (
        problem(2, conv_layout="window-major"),
        replace(
            LINES,
            threads=288,
            ctas_per_sm=3,
            streamable=False,
            conv_weight_dtype="bf16",
            gate_mode=1,
        ),
        {"pending": (1, 0), "conv_bias": False},
    ),
    "5, any layout": (
        problem(5, conv_layout="window-major"),
        fused.Options(streamable=False, conv_weight_dtype="bf16"),
        {"pending": (3,), "conv_bias": False},
    ),
    "3 on 4 CTAs": (problem(3), fused.Options(4, 128), {"pending": (2,), "unrecorded": True}),
    "6 on 2 CTAs, pending tokens only": (
        problem(6),
        fused.Options(2, 128, records="pending"),
        {"pending": (4,)},
    ),
    "7 on 2 CTAs, late": (problem(7), fused.Options(2, fold="late"), {"pending": (7,)}),
    "8 on 8 CTAs, window-major": (
        problem(conv_layout="window-major"),
        fused.Options(8, 128),
        {"pending": (8,)},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_emulation_agrees_with_the_reference(emulated: ModuleType, case: str) -> None:
    of, options, choices = CASES[case]
    assert emulate(emulated, of, options, seed=len(case), **choices) is None


def test_emulation_notices_a_missing_barrier(
    emulated: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one behind the convolution."""
    real, passed = emulated.fused_cluster.arch.sync_threads, Counter[Any]()

    def all_but_one() -> None:
        thread = id(simt.current())
        passed[thread] += 1
        if passed[thread] != 2:
            real()

    monkeypatch.setattr(emulated.fused_cluster.arch, "sync_threads", all_but_one)
    of, options, choices = CASES["4, after the projection"]
    assert emulate(emulated, of, options, seed=1, **choices) is not None


def test_no_record_is_overwritten_before_all_have_read_it(
    emulated: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One CTA's copies come late, when the others would long have written theirs."""
    real = simt.Thread.wait_groups

    def late(self: simt.Thread, pending: int) -> None:
        if self.cta.rank == 1:
            self.warp.meet(
                "wait_group", None, lambda _: self.cta.turns.after_others(self.warp.index)
            )
        real(self, pending)

    monkeypatch.setattr(simt.Thread, "wait_groups", late)
    of, options, choices = CASES["3 on 4 CTAs"]
    assert emulate(emulated, of, options, seed=1, **choices) is None


def test_nothing_is_overwritten_by_what_comes_early(
    emulated: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What CTAs send to each other comes at once."""
    monkeypatch.setattr(simt_cluster.Barrier, "early", True)
    of, options, choices = CASES["3 on 4 CTAs"]
    assert emulate(emulated, of, options, seed=2, **choices) is None


def assert_resources(compiled: Compiled) -> None:
    found, p = compiled.resources, compiled.plan
    assert found.stack_bytes == 0
    assert found.smem_bytes == p.smem_bytes
    assert found.ctas_per_sm >= p.ctas_per_sm >= 2
    assert (found.threads, found.cluster) == (p.threads, p.cluster)
    assert fused.KERNELS[0] in compiled.binary.symbol
    assert len(compiled.binary.parameters) == len(arguments.Arguments._fields)


@pytest.mark.parametrize("tokens", range(2, 9))
@pytest.mark.parametrize("gate_mode", [0, 1])
def test_one_cta_per_item_compiles(tokens: int, gate_mode: int) -> None:
    assert_resources(fused.compile(problem(tokens), fused.Options(gate_mode=gate_mode), H200))


@pytest.mark.parametrize("tokens", [2, 4, 8])
@pytest.mark.parametrize("shape", SHAPES[1:])
def test_clusters_compile(tokens: int, shape: tuple[int, int]) -> None:
    assert_resources(fused.compile(problem(tokens), fused.Options(*shape), H200))


@pytest.mark.parametrize("tokens", range(2, 9))
@pytest.mark.parametrize(("threads", "ctas"), [(256, 0), (256, 3), (288, 0), (288, 3), (320, 0)])
def test_lines_compile(tokens: int, threads: int, ctas: int) -> None:
    options = replace(LINES, threads=threads, ctas_per_sm=ctas)
    of = problem(tokens)
    if tokens > 4 and (threads, ctas) == (288, 3):
        assert fused.unsupported(of, options, H200) is not None
    else:
        compiled = fused.compile(of, options, H200)
        assert_resources(compiled)
        assert compiled.plan.ctas_per_sm == (ctas or 2)


@pytest.mark.parametrize(
    ("arch", "tokens"), [("sm_90a", 5), ("sm_90a", 7), ("sm_100a", 2), ("sm_100a", 7)]
)
def test_three_lines_ctas_per_sm_with_more_chains(arch: str, tokens: int) -> None:
    options = replace(LINES, ctas_per_sm=3, gate_mode=1)
    assert_resources(fused.compile(problem(tokens), options, Gpu(arch, 132)))


@pytest.mark.parametrize("tokens", [2, 4])
def test_a_state_in_registers_with_more_chains(tokens: int) -> None:
    assert_resources(
        fused.compile(problem(tokens), fused.Options(gate_mode=1), Gpu("sm_100a", 148))
    )


@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
@pytest.mark.parametrize(
    ("tokens", "shape"), [(8, (1, 256)), (4, (1, 256)), (8, (4, 128)), (8, (2, 128))]
)
def test_compiles_for_blackwell(arch: str, tokens: int, shape: tuple[int, int]) -> None:
    assert_resources(fused.compile(problem(tokens), fused.Options(*shape), Gpu(arch, 148)))


@pytest.mark.parametrize(
    "options",
    [
        fused.Options(fold="late"),
        fused.Options(state_first=False, records="pending"),
        fused.Options(bypass_l1=True, stream_stores=True, window=16),
        fused.Options(conv_weight_dtype="bf16"),
        fused.Options(streamable=False),
        fused.Options(4, 128, fold="late", records="pending"),
        replace(LINES, stream_stores=True, gate_mode=1),
    ],
)
@pytest.mark.parametrize("layout", ["dim-first", "window-major"])
def test_choices_compile(options: fused.Options, layout: Any) -> None:
    tokens = 4 if options.source == "shared" else 8
    assert_resources(fused.compile(problem(tokens, conv_layout=layout), options, H200))


def test_sizes_and_launch_options_share_one_binary() -> None:
    first = fused.compile(problem(), fused.Options(), H200)
    second = fused.compile(problem(requests=1, heads=96, pending=3), fused.Options(pdl=True), H200)
    assert first.binary == second.binary  # the time it took to compile is part of it
    assert (first.pdl, second.pdl) == (False, True)


def disassembled(options: fused.Options, tokens: int, folder: Path) -> str:
    return sass_of(fused.compile(problem(tokens), options, H200).binary.image, folder)


@pytest.mark.parametrize(("tokens", "fold_mmas"), [(4, 16), (8, 32)])
def test_the_state_stays_in_registers(tokens: int, fold_mmas: int, tmp_path: Path) -> None:
    sass = disassembled(fused.Options(), tokens, tmp_path)
    assert not re.findall(r"\b(?:STL|LDL)\b", sass)
    # Gate, A and B, state, T and C.
    tiles = tokens // 4
    assert (
        len(re.findall(r"\bHMMA\.16816\.F32\.BF16\b", sass))
        == 8 + fold_mmas + 3 * tiles + 24 * tiles + 2 * tiles
    )
    # The state is asked for before the first barrier, and all of it before any is stored.
    loads = [m.start() for m in re.finditer(r"\bLDG\.E\.128\b", sass)]
    assert len(loads) == 16 + 8  # states, gate weights
    assert max(loads) < re.search(r"\bBAR\.SYNC", sass).start()
    assert len(re.findall(r"\bSTG\.E\.128\b", sass)) >= 16


@pytest.mark.parametrize(
    "options", [LINES, replace(LINES, ctas_per_sm=3), fused.Options(), fused.Options(4, 128)]
)
@pytest.mark.parametrize("tokens", [4, 8])
def test_no_load_waits_for_the_count_of_pending_tokens(
    options: fused.Options, tokens: int, tmp_path: Path
) -> None:
    before = disassembled(options, tokens, tmp_path).split("BAR.SYNC")[0]
    count = list(re.finditer(r"\bLDG\.E (R\d+),", before))[-1]  # of words the last one
    last = max(m.end() for m in re.finditer(r"\b(?:LDG\.E\.(?:64|128)|LDGSTS)\S*", before))
    assert not re.search(rf"\b{count[1]}\b", before[count.end() : last])


def test_launch_passes_addresses_and_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    monkeypatch.setattr(cubin, "launcher", lambda _: recorder)
    of = problem()
    compiled = fused.compile(of, fused.Options(4, 128, pdl=True), H200)
    operands = make_step(of, seed=1, device="cpu", pad=16)
    fused.launch(compiled, operands, 7)
    assert recorder.grid == (24, 4, 1)
    assert (recorder.stream, recorder.pdl) == (7, True)
    assert len(recorder.values) == len(compiled.binary.parameters)
    passed = arguments.Arguments(*recorder.values)
    assert operands.pending is not None
    assert passed.pending == operands.pending.data_ptr()


def test_launch_refuses_operands_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cubin, "launcher", lambda _: Recorder())
    of = problem()
    compiled = fused.compile(of, fused.Options(), H200)
    operands = make_step(of, seed=1, device="cpu")
    fused.launch(compiled, operands, 0)
    with pytest.raises(ValueError, match="lower_bound is None"):
        fused.launch(compiled, replace(operands, lower_bound=None), 0)
    with pytest.raises(ValueError, match="too low for 8 tokens"):
        fused.launch(compiled, replace(operands, lower_bound=-8.0), 0)
    with pytest.raises(ValueError, match="pending"):
        fused.launch(compiled, replace(operands, pending=None), 0)
    with pytest.raises(ValueError, match="corrections"):
        fused.launch(compiled, replace(operands, corrections=operands.corrections[:, :, :4]), 0)
    with pytest.raises(ValueError, match="conv_state"):
        fused.launch(
            compiled, make_step(problem(conv_layout="window-major"), seed=1, device="cpu"), 0
        )
