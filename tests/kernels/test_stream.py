"""KdaStream without a GPU: its rules, the walk over items, its source run thread by thread, what
the compiler made of it."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from kda_kernels import walk
from kda_kernels.arguments import Arguments
from kda_kernels.device import cubin, smem
from kda_kernels.device.gpu import Gpu
from kda_kernels.operands import make_step
from kda_kernels.parts import streaming
from kda_kernels.problem import HEAD_DIM, Problem
from kda_kernels.step import Compiled
from kda_kernels.variants import stream
from support import simt, simt_cluster
from support.compiled import Recorder, items_of, sass_of

GPUS = {
    "sm_90a": Gpu("sm_90a", 132),
    "sm_100a": Gpu("sm_100a", 148),
    "sm_103a": Gpu("sm_103a", 148),
}
H200 = GPUS["sm_90a"]
TARGET_SIZES = [
    (12, 1),
    (96, 1),
    (12, 8),
    (12, 32),
    (12, 128),
    (12, 256),
    (96, 16),
    (96, 256),
    (1, 7),
    (3, 50),
]


pytestmark = pytest.mark.usefixtures("own_cache")


def problem(
    kind: str = "record", tokens: int = 8, state_dtype: str = "fp32", **more: Any
) -> Problem:
    sizes = {"requests": 4, "heads": 6, **more}
    return Problem(kind, tokens=1 if kind == "decode" else tokens, state_dtype=state_dtype, **sizes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("of", "choices", "reason"),
    [
        (Problem("replay", 4, 6, 4, pending=2), {}, "kind=replay"),
        (Problem("commit", 4, 6, 4), {}, "kind=commit"),
        (problem(), {"gate_mode": 2}, "gate_mode=2 is not one of 0, 1"),
        (problem(), {"terms": 3}, "terms=3"),
        (problem("decode"), {"stages": 1}, "stages=1 is not one of None, 2"),
        (problem(), {"stages": 2}, "bytes of shared memory exceed 115712"),
        (problem(), {"conv_weight_dtype": "fp16"}, "conv_weight_dtype='fp16'"),
        (problem(), {"window": 9}, "window=9 must lie in 10..16"),
        (problem("decode"), {"window": 17}, "window=17 must lie in 3..16"),
        (problem(), {"most_items": 0}, "most_items=0 must be at least 1"),
    ],
)
def test_unsupported(of: Problem, choices: dict[str, Any], reason: str) -> None:
    found = stream.unsupported(of, stream.Options(**choices), H200)
    assert found is not None
    assert reason in found
    with pytest.raises(ValueError, match=re.escape(reason)):
        stream.compile(of, stream.Options(**choices), H200)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("layout", ["dim-first", "window-major"])
@pytest.mark.parametrize("window", [None, 16])
def test_two_ctas_fit_an_sm(dtype: str, layout: str, window: int | None) -> None:
    for kind, tokens in (("decode", 1), *itertools.product(("record", "spec"), range(2, 9))):
        of, options = (
            problem(kind, tokens, dtype, conv_layout=layout),
            stream.Options(window=window),
        )
        assert stream.unsupported(of, options, H200) is None
        p = stream.plan(of, options)
        assert 2 * (p.smem_bytes + 1024) <= 233_472
        sizes = smem.sizes(p.areas) | smem.sizes(p.stage_areas)
        assert all(size % 128 == 0 for size in sizes.values())
        assert p.stages == 2 or kind != "decode"


# KdaStream's and KdaFusedWS's.
DIVISIONS = pytest.mark.parametrize(
    "division", [walk.BY_HEAD, walk.HALVED], ids=["by_head", "halved"]
)


@DIVISIONS
@pytest.mark.parametrize(("heads", "requests"), TARGET_SIZES)
@pytest.mark.parametrize("sms", [1, 2, 5, 132, 148])
def test_ctas_cover_all_items_once(
    heads: int, requests: int, sms: int, division: walk.Division
) -> None:
    """Where each SM takes one CTA before any takes its second, no SM has more than its part of the
    items."""
    runs = division.runs(heads, requests, sms)
    assert runs.ctas <= 2 * sms
    found = [items_of(division, cta, runs, heads, requests) for cta in range(runs.ctas)]
    assert all(found)
    assert sorted(itertools.chain(*found)) == list(itertools.product(range(heads), range(requests)))
    counts = [len(part) for part in found]
    loads = [a + b for a, b in itertools.zip_longest(counts[:sms], counts[sms:], fillvalue=0)]
    assert max(loads) <= -(-heads * requests // sms)


@DIVISIONS
@pytest.mark.parametrize(("heads", "requests"), TARGET_SIZES)
@pytest.mark.parametrize("most", [1, 3, 1000])
def test_ctas_of_few_items_cover_all_items_once(
    heads: int, requests: int, most: int, division: walk.Division
) -> None:
    runs = division.runs(heads, requests, H200.sms, most)
    assert (
        runs.ctas <= 2 * H200.sms
        or runs.per == 2 * most
        or (runs.of_a_head and 0 < runs.size <= most)
    )
    found = [items_of(division, cta, runs, heads, requests) for cta in range(runs.ctas)]
    assert all(1 <= len(part) <= most for part in found)
    assert sorted(itertools.chain(*found)) == list(itertools.product(range(heads), range(requests)))


@DIVISIONS
@pytest.mark.parametrize(("heads", "requests"), [(12, 128), (12, 256), (96, 256), (96, 16)])
def test_ctas_keep_heads_and_neighbours_share_requests(
    heads: int, requests: int, division: walk.Division
) -> None:
    """Of a CTA's steps few go to another head; of neighbouring CTAs most are at the same request,
    one head apart."""
    runs = division.runs(heads, requests, H200.sms)
    found = [items_of(division, cta, runs, heads, requests) for cta in range(runs.ctas)]
    steps = [a[0] != b[0] for items in found for a, b in itertools.pairwise(items)]
    assert sum(steps) <= 0.1 * len(steps)
    pairs = [(a, b) for x, y in itertools.pairwise(found) for a, b in zip(x, y, strict=False)]
    near = sum(a[1] == b[1] and abs(a[0] - b[0]) == 1 for a, b in pairs)
    assert near >= 0.6 * len(pairs)


@pytest.mark.parametrize(
    ("heads", "requests"),
    [(12, 41), (12, 64), (12, 128), (6, 99), (4, 150), (32, 18), (24, 32), (24, 64)],
)
def test_no_cta_changes_heads_where_there_are_sms_enough(heads: int, requests: int) -> None:
    runs = walk.BY_HEAD.runs(heads, requests, H200.sms)
    for cta in range(runs.ctas):
        assert len({head for head, _ in items_of(walk.BY_HEAD, cta, runs, heads, requests)}) == 1


@DIVISIONS
@pytest.mark.parametrize("counts", [(0, 5, 132), (5, 0, 132), (5, 5, 0), (5, 5, 132, 0)])
def test_a_division_refuses_nothing_to_do(counts: tuple[int, ...], division: walk.Division) -> None:
    with pytest.raises(ValueError, match="counts must be >= 1"):
        division.runs(*counts)


@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_group_that_is_waited_for_is_complete(groups: int, count: int) -> None:
    """cp.async.wait_group of the kernel: all but the youngest `groups` groups are complete."""
    asked: list[tuple[int, int | str]] = [(0, "operands"), *((0, g) for g in range(groups))]

    def oldest_pending() -> int:
        return len(asked) - groups

    assert asked.index((0, "operands")) < oldest_pending()
    for item in range(count):
        asked.append((item + 1, "operands"))
        for group in range(groups):
            assert asked.index((item, group)) < oldest_pending()
            asked.append((item + 1, group))
        assert asked.index((item + 1, "operands")) < oldest_pending()


# The source, thread by thread.


@pytest.fixture(scope="module")
def emulated() -> ModuleType:
    return simt_cluster.load("stream")["stream"]


# Two CTAs share the items. With three heads each changes heads on its way, and of six items each
# has three, so that either stage is used again.
NULL = {"null_requests": (1,)}
CASES: dict[str, tuple[Problem, dict[str, Any], dict[str, Any]]] = {
    "decode": (problem("decode", requests=2, heads=3), {}, NULL),
    "decode, bf16, window-major": (
        problem("decode", 1, "bf16", conv_layout="window-major", requests=3, heads=1),
        {"gate_mode": 1, "stream_hints": True, "ahead": True},
        {"conv_bias": False, **NULL},
    ),
    "spec 3": (problem("spec", 3, requests=3, heads=1), {"evict": True}, {"inputs": "generic", **NULL}),
    "spec 2, bf16, window-major, one stage": (
        problem("spec", 2, "bf16", conv_layout="window-major", requests=1, heads=3),
        {"stages": 1, "conv_weight_dtype": "bf16"},
        {},
    ),
    "record 8": (problem(requests=3, heads=1), {}, NULL),
    "record 3, bf16, window-major": (
        problem("record", 3, "bf16", conv_layout="window-major", requests=3, heads=1),
        {"terms": 1, "gate_mode": 1, "conv_weight_dtype": "bf16", "evict": True},
        {"inputs": "generic", "unrecorded": (2,), **NULL},
    ),
    "record 5, long window": (
        problem("record", 5, requests=1, heads=3), {"window": 9, "ahead": True}, {"conv_bias": False},
    ),
}  # fmt: skip


def emulate(
    m: ModuleType, of: Problem, choices: dict[str, Any], draw: dict[str, Any], seed: int
) -> str | None:
    """Against the reference. Drawn beside what `make_step` knows: requests without a record."""
    draw = dict(draw)
    unrecorded = draw.pop("unrecorded", ())
    operands = make_step(of, seed=seed, device="cpu", pad=16, **draw)
    if choices.get("conv_weight_dtype") == "bf16":
        operands = simt.with_bf16_weights(operands)
    for request in unrecorded:
        assert operands.record_rows is not None
        operands.record_rows[request] = -1
    return simt.compare_step(m, of, m.Options(**choices), operands, seed)


@pytest.mark.parametrize("case", CASES)
def test_emulation_agrees_with_the_reference(emulated: ModuleType, case: str) -> None:
    assert emulate(emulated, *CASES[case], seed=len(case)) is None


@pytest.mark.parametrize("case", ["decode", "spec 2, bf16, window-major, one stage", "record 8"])
def test_nothing_is_replaced_before_it_is_read(
    emulated: ModuleType, monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    monkeypatch.setattr(simt.Thread, "early", True)
    assert emulate(emulated, *CASES[case], seed=2) is None


def test_emulation_notices_a_missing_barrier(
    emulated: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emulated.arch, "sync_threads", lambda: None)
    assert emulate(emulated, problem("decode", requests=1, heads=1), {}, {}, seed=1) is not None


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_cells_of_rows_cover_a_page_once(emulated: ModuleType, dtype: str) -> None:
    """Every 16 bytes of a page come to one cell, as far from a 128-byte line as it; a half-warp
    asks for whole rows."""
    P, rows = emulated.plan(problem("decode", 1, dtype), emulated.Options()), emulated.state_rows
    item_bytes = 4 if dtype == "fp32" else 2
    cells, units = set(), set()
    for thread in range(256):
        at = emulated.Place(simt.Int32(thread), simt.Int32(thread // 32), simt.Int32(thread % 32))
        for piece in range(P.pieces):
            first = simt.Int32(16 * thread + piece * P.piece_bytes)
            source = simt.Int64(0) + rows.first_cell(simt.Int32(piece), at.warp, at.lane, P)
            for shared, address, nbytes in simt.asked_copies(
                thread, rows.ask_piece, first, source, 0, simt.Int64(0), P
            ):
                assert nbytes == 16
                assert shared % 128 == address % 128
                row = address // (HEAD_DIM * item_bytes)
                assert row // 16 == thread // 32
                assert row % 2 == thread % 32 // 16
                cells.add(shared)
                units.add(address)
    assert cells == units == set(range(0, HEAD_DIM * HEAD_DIM * item_bytes, 16))


# What the compiler made of it.

GRID = [
    *(
        ("decode", 1, dtype, layout, "sm_90a")
        for dtype in ("fp32", "bf16")
        for layout in ("dim-first", "window-major")
    ),
    *(("record", q, "fp32", "dim-first", "sm_90a") for q in range(2, 9)),
    *(("record", q, "bf16", "window-major", "sm_90a") for q in (2, 4, 8)),
    *(("spec", q, "fp32", "dim-first", "sm_90a") for q in (2, 3, 8)),
    ("spec", 5, "bf16", "window-major", "sm_90a"),
    *(
        (kind, q, dtype, "dim-first", arch)
        for kind, q in (("decode", 1), ("record", 4), ("record", 8), ("spec", 8))
        for dtype, arch in (("fp32", "sm_100a"), ("bf16", "sm_103a"))
    ),
]


@pytest.mark.parametrize(("kind", "tokens", "dtype", "layout", "arch"), GRID)
def test_two_ctas_per_sm_and_no_spills(
    kind: str, tokens: int, dtype: str, layout: str, arch: str
) -> None:
    check_resources(
        stream.compile(
            problem(kind, tokens, dtype, conv_layout=layout), stream.Options(), GPUS[arch]
        )
    )


@pytest.mark.parametrize(
    ("kind", "tokens", "dtype", "choices"),
    [
        ("decode", 1, "fp32", {"gate_mode": 1, "evict": True}),
        ("decode", 1, "bf16", {"conv_weight_dtype": "bf16", "stream_hints": True, "ahead": True}),
        ("record", 8, "fp32", {"gate_mode": 1, "evict": True, "window": 16}),
        ("record", 8, "bf16", {"terms": 1, "conv_weight_dtype": "bf16"}),
        ("spec", 8, "fp32", {"gate_mode": 1, "stream_hints": True, "ahead": True}),
    ],
)
def test_choices_compile(kind: str, tokens: int, dtype: str, choices: dict[str, Any]) -> None:
    check_resources(stream.compile(problem(kind, tokens, dtype), stream.Options(**choices), H200))


def check_resources(compiled: Compiled) -> None:
    found = compiled.resources
    assert stream.KERNELS[0] in compiled.binary.symbol
    assert found.stack_bytes == 0
    assert (found.threads, found.cluster) == (256, 1)
    assert found.registers <= 128
    assert found.smem_bytes == compiled.plan.smem_bytes <= streaming.SMEM_BYTES
    assert found.ctas_per_sm >= 2
    assert len(compiled.binary.parameters) == len(Arguments._fields)


def test_launch_options_and_sizes_share_a_binary() -> None:
    first = stream.compile(problem(tokens=4), stream.Options(), H200)
    second = stream.compile(
        problem(tokens=4, requests=300, heads=96), stream.Options(pdl=True), Gpu("sm_90a", 114)
    )
    assert second.binary == first.binary  # the time it took to compile is part of it
    assert ((first.sms, first.pdl), (second.sms, second.pdl)) == ((132, False), (114, True))


def test_gate_weights_stay_and_states_stream(tmp_path: Path) -> None:
    """Gate weights are loaded at the start and behind a change of heads, not per item; states by
    cp.async alone."""
    text = sass_of(stream.compile(problem("decode"), stream.Options(), H200).binary.image, tmp_path)
    assert not re.findall(r"\b(?:STL|LDL)\b", text)
    assert len(re.findall(r"\bLDG\.E\.128\b", text)) == 2 * 8
    assert not re.findall(r"\bLDG\.E\.64\b", text)
    assert len(re.findall(r"\bSTG\.E\.128\b", text)) >= 4
    assert len(re.findall(r"\bBAR\.SYNC", text)) == 1 + 2


def test_launch_passes_addresses_and_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    monkeypatch.setattr(cubin, "launcher", lambda _: recorder)
    of = problem(tokens=4, requests=5, heads=3)
    compiled = stream.compile(of, stream.Options(pdl=True), Gpu("sm_90a", 2))
    o = make_step(of, seed=1, device="cpu", pad=64)
    stream.launch(compiled, o, 7)
    assert recorder.grid == (4, 1, 1)  # 15 items, eight for each SM
    assert (recorder.stream, recorder.pdl) == (7, True)
    passed = Arguments(*recorder.values)
    assert (passed.projected, passed.out) == (o.projected.data_ptr(), o.out.data_ptr())
    assert (passed.heads, passed.requests, passed.per) == (3, 5, 8)
    limited = stream.compile(of, stream.Options(most_items=2), Gpu("sm_90a", 2))
    assert limited.binary.image == compiled.binary.image
    stream.launch(limited, o, 7)
    assert recorder.grid == (9, 1, 1)  # of one head each


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda o: {"lower_bound": None}, "lower_bound is None"),
        (lambda o: {"lower_bound": -8.0}, "too low for 8 tokens"),
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
    compiled = Compiled(None, stream.plan(of, stream.Options()), pdl=False, sms=132)  # type: ignore[arg-type]
    operands = make_step(of, seed=1, device="cpu")
    stream.launch(compiled, operands, 0)
    with pytest.raises(ValueError, match=reason):
        stream.launch(compiled, replace(operands, **change(operands)), 0)
