"""KdaWS without a GPU: its rules, the walk over items, the handing on between its groups of warps,
its index maps, its source run thread by thread, and what the compiler made of it."""

from __future__ import annotations

import itertools
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast

import pytest
import torch

from kda_kernels import arguments, walk
from kda_kernels.device import cubin
from kda_kernels.device.gpu import Gpu
from kda_kernels.operands import StepOperands, make_step
from kda_kernels.problem import HEAD_DIM, Problem
from kda_kernels.step import Compiled
from kda_kernels.variants import ws, ws_plan, ws_prologue
from support import simt, simt_cluster
from support.compiled import Recorder, item_at, items_of, next_item, odd, plain, sass_of

GPUS = {
    arch: Gpu(arch, 132 if arch == "sm_90a" else 148) for arch in ("sm_90a", "sm_100a", "sm_103a")
}
H200 = GPUS["sm_90a"]


pytestmark = pytest.mark.usefixtures("own_cache")


def problem(tokens: int = 8, kind: Any = None, **sizes: Any) -> Problem:
    """A record unless said otherwise, or with one token a decode."""
    kind = kind or ("decode" if tokens == 1 else "record")
    return Problem(kind, **{"requests": 4, "heads": 6, "tokens": tokens, **sizes})


@pytest.mark.parametrize(
    ("of", "choices", "reason"),
    [
        (Problem("replay", 4, 6, 4, pending=2), {}, "kind=replay"),
        (Problem("commit", 4, 6, 4), {}, "kind=commit"),
        (problem(), {"gate_mode": 2}, "gate_mode=2 is not one of 0, 1"),
        (problem(), {"terms": 3}, "terms=3"),
        (problem(), {"terms": 1}, "terms=1: only record with a BF16 state"),
        (problem(4, "spec", state_dtype="bf16"), {"terms": 1}, "terms=1: only record"),
        (problem(), {"conv_weight_dtype": "fp16"}, "conv_weight_dtype='fp16'"),
        (problem(), {"window": 9}, "window=9 must lie in 10..16"),
        (problem(), {"window": 17}, "window=17 must lie in 10..16"),
        (problem(1), {"window": 2}, "window=2 must lie in 3..16"),
        (problem(8, lower_bound=-8.5), {}, "lower_bound=-8.5 is too low for 8 tokens"),
        (problem(1, lower_bound=None), {}, "the gate is unbounded"),
    ],
)
def test_unsupported(of: Problem, choices: dict[str, Any], reason: str) -> None:
    found = ws.unsupported(of, ws.Options(**choices), H200)
    assert found is not None
    assert reason in found
    with pytest.raises(ValueError, match=re.escape(reason)):
        ws.compile(of, ws.Options(**choices), H200)


STEPS = [("decode", 1), *((kind, tokens) for kind in ("spec", "record") for tokens in range(2, 9))]


@pytest.mark.parametrize(("kind", "tokens"), STEPS)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("layout", ["dim-first", "window-major"])
def test_fits_an_sm(kind: str, tokens: int, dtype: Any, layout: Any) -> None:
    of = problem(tokens, kind, state_dtype=dtype, conv_layout=layout)
    assert ws.unsupported(of, ws.Options(), H200) is None
    p = ws.plan(of, ws.Options(), H200)
    for area in p.areas.values():
        stages = area.shape[1] if isinstance(area.shape, tuple) else 1
        assert area.nbytes // stages % 32 == 0
    assert p.smem_bytes <= H200.smem_per_block
    assert p.state_stages >= (3 if tokens == 1 else 2)
    assert p.lane_tokens * 4 >= tokens


def test_only_the_chunked_form_limits_how_fast_a_state_decays() -> None:
    assert ws.unsupported(problem(8, lower_bound=-8.0), ws.Options(), H200) is None
    assert ws.unsupported(problem(8, "spec", lower_bound=-50.0), ws.Options(), H200) is None


def test_no_group_waits_for_registers_that_nobody_gives_back() -> None:
    assert ws_plan.LAUNCHED * ws_plan.THREADS <= 65_536
    warps = (ws_plan.PROLOGUE, ws_plan.PRODUCT, ws_plan.EPILOGUE)
    assert all(n % 4 == 0 for n in warps)  # setmaxnreg is for whole warpgroups
    for registers in ws_plan.REGISTERS.values():
        assert all(r % 8 == 0 for r in registers)
        total = sum(n * r for n, r in zip(warps, registers, strict=True))
        assert total <= ws_plan.LAUNCHED * ws_plan.THREADS // 32


def test_shared_memory_of_the_gpu_decides() -> None:
    small = Gpu("sm_90a", 132, smem_per_block=200_000)
    found = ws.unsupported(problem(), ws.Options(), small)
    assert found is not None
    assert "shared memory exceed 200000" in found
    assert ws.plan(problem(8), ws.Options(), H200).result_stages == 2
    assert ws.plan(problem(8), ws.Options(window=11), H200).result_stages == 1
    assert ws.plan(problem(4, state_dtype="bf16"), ws.Options(), H200).state_stages == 4
    assert ws.plan(problem(1, state_dtype="bf16"), ws.Options(), H200).state_stages == 6


request_after = plain(ws_plan.request_after)


SIZES = [
    (1, 1),
    (1, 2),
    (12, 1),
    (1, 7),
    (96, 1),
    (12, 8),
    (12, 32),
    (12, 128),
    (12, 256),
    (96, 16),
    (96, 256),
    (3, 50),
]


@pytest.mark.parametrize(("heads", "requests"), SIZES)
@pytest.mark.parametrize("sms", [1, 2, 5, 132, 148])
def test_ctas_cover_all_items_once(heads: int, requests: int, sms: int) -> None:
    items = heads * requests
    runs = walk.PLAIN.runs(heads, requests, sms, 2)
    assert runs.per >= 2
    assert runs.ctas <= sms
    assert (runs.ctas - 1) * runs.per < items <= runs.ctas * runs.per
    found = [items_of(walk.PLAIN, cta, runs, heads, requests) for cta in range(runs.ctas)]
    assert sorted(itertools.chain(*found)) == list(itertools.product(range(heads), range(requests)))


@pytest.mark.parametrize(
    ("heads", "requests", "changes", "neighbours"),
    [
        (12, 128, 0.1, 0.8),
        (12, 256, 0.1, 0.8),
        (96, 256, 0.01, 0.6),
        (96, 16, 0.1, 0.6),
        (12, 32, 0.2, 0.8),
    ],
)
def test_ctas_keep_heads_and_neighbours_share_requests(
    heads: int, requests: int, changes: float, neighbours: float
) -> None:
    """Of a CTA's steps few go to another head; of neighbouring CTAs most are at the same request,
    one head apart."""
    runs = walk.PLAIN.runs(heads, requests, H200.sms, 2)
    found = [items_of(walk.PLAIN, cta, runs, heads, requests) for cta in range(runs.ctas)]
    steps = [a[0] != b[0] for items in found for a, b in itertools.pairwise(items)]
    assert sum(steps) <= changes * len(steps)
    pairs = [(a, b) for x, y in itertools.pairwise(found) for a, b in zip(x, y, strict=False)]
    near = sum(a[1] == b[1] and abs(a[0] - b[0]) == 1 for a, b in pairs)
    assert near >= neighbours * len(pairs)


@pytest.mark.parametrize(("heads", "requests"), [*SIZES, (7, 300), (5, 1000)])
@pytest.mark.parametrize("sms", [1, 5, 132])
def test_numbers_of_many_items_are_those_of_each(heads: int, requests: int, sms: int) -> None:
    """What a lane finds from the item that its 32 begin with is what the walk comes to."""
    per, ctas = walk.schedule(heads * requests, sms, 2)
    for cta in range(ctas):
        count = min(per, heads * requests - cta * per)
        item, begin = item_at(cta * per, per, heads, requests), None
        for n in range(count):
            begin = item if n % 32 == 0 else begin
            assert request_after(begin, n % 32) == item.request
            item = next_item(item, heads, requests)
        assert all(0 <= request_after(begin, lane) < requests for lane in range(32))


def test_schedule_refuses_nothing_to_do() -> None:
    with pytest.raises(ValueError, match="items=0"):
        walk.schedule(0, 132)


# The pipeline, as the kernel runs it: what each group waits for, reads, writes and announces per
# item.


class Pipeline:
    """mbarriers and buffers. A buffer's stage holds the item it was written for and must have been
    read by all."""

    def __init__(self, p: ws_plan.Plan) -> None:
        prologue, product, epilogue = ws_plan.PROLOGUE, ws_plan.PRODUCT, p.finishers
        counts = {
            "f_a_full": prologue,
            "vectors_full": prologue,
            "vectors_empty": product,
            "results_full": product,
        }
        counts |= {"results_empty": epilogue, "values_empty": epilogue}
        self.counts = counts
        self.left: dict[tuple[str, int], int] = {}
        self.phase: dict[tuple[str, int], int] = defaultdict(int)
        self.readers = {
            "f_a": prologue,
            "vectors": product,
            "results": epilogue,
            "values": epilogue,
        }
        self.writers = {
            "f_a": prologue,
            "vectors": prologue,
            "results": product,
            "values": prologue,
        }
        self.written: dict[tuple[str, int], Counter[int]] = defaultdict(
            Counter
        )  # item -> warps that wrote
        self.read: dict[tuple[str, int], Counter[int]] = defaultdict(
            Counter
        )  # item -> warps that read

    def passes(self, name: str, stage: int, parity: int) -> bool:
        """Whether the phase of this parity is over, as `mbarrier.try_wait.parity` has it."""
        return self.phase[name, stage] & 1 != parity

    def arrive(self, name: str, stage: int) -> None:
        key = (name, stage)
        self.left[key] = self.left.get(key, self.counts[name]) - 1
        if self.left[key] == 0:
            self.left[key] = self.counts[name]
            self.phase[key] += 1

    def write(self, buffer: str, stage: int, item: int) -> None:
        held = self.written[buffer, stage]
        for old in held:
            assert old <= item
            assert old == item or self.read[buffer, stage][old] == self.readers[buffer], (
                f"{buffer} {old} still read"
            )
        held[item] += 1

    def take(self, buffer: str, stage: int, item: int) -> None:
        held = self.written[buffer, stage]
        assert max(held) == item, f"{buffer}: item {item} is gone"
        assert held[item] == self.writers[buffer], f"{buffer}: item {item} isn't complete"
        self.read[buffer, stage][item] += 1


Step = Iterator[tuple[str, int, int] | None]


def prologue_warp(x: Pipeline, p: ws_plan.Plan, count: int) -> Step:
    """What a warp asks for of f_a counts as written at once; nobody may read it before all have
    arrived."""
    for item in range(min(2, count)):
        x.write("f_a", item, item)
    stage, phase = 0, 1
    for item in range(count):
        before = item & 1
        x.arrive("f_a_full", item % ws_plan.BOTTLENECK_STAGES)
        yield ("f_a_full", item % ws_plan.BOTTLENECK_STAGES, item // ws_plan.BOTTLENECK_STAGES & 1)
        x.take("f_a", item % ws_plan.BOTTLENECK_STAGES, item)
        yield ("vectors_empty", before, (item >> 1 & 1) ^ 1)
        if p.chunked:
            yield ("values_empty", stage, phase)
        x.write("vectors", before, item)
        yield None
        if p.chunked:
            x.write("values", stage, item)
        x.arrive("vectors_full", before)
        if item + 2 < count:
            x.write("f_a", (item + 2) % ws_plan.BOTTLENECK_STAGES, item + 2)
        stage += 1
        if stage == ws_plan.VALUE_STAGES:
            stage, phase = 0, phase ^ 1


def product_warp(x: Pipeline, p: ws_plan.Plan, count: int) -> Step:
    """A record is done with the vectors before the results, others after."""
    result, phase = 0, 1
    for item in range(count):
        yield ("vectors_full", item & 1, item >> 1 & 1)
        if p.chunked:
            x.take("vectors", item & 1, item)
            x.arrive("vectors_empty", item & 1)
        yield ("results_empty", result, phase)
        x.write("results", result, item)
        x.arrive("results_full", result)
        if not p.chunked:
            yield None
            x.take("vectors", item & 1, item)
            x.arrive("vectors_empty", item & 1)
        result += 1
        if result == p.result_stages:
            result, phase = 0, phase ^ 1


def epilogue_warp(x: Pipeline, p: ws_plan.Plan, count: int) -> Step:
    result, phase, value = 0, 0, 0
    for item in range(count):
        yield ("results_full", result, phase)
        x.take("results", result, item)
        yield None
        if p.chunked:
            x.take("values", value, item)
            x.arrive("values_empty", value)
        x.arrive("results_empty", result)
        result += 1
        if result == p.result_stages:
            result, phase = 0, phase ^ 1
        value = (value + 1) % ws_plan.VALUE_STAGES


@pytest.mark.parametrize("count", [1, 2, 3, 7, 24])
@pytest.mark.parametrize("result_stages", [1, 2])
@pytest.mark.parametrize(("kind", "tokens"), [("record", 8), ("spec", 3), ("decode", 1)])
def test_no_stage_is_overwritten_before_it_is_read(
    count: int, result_stages: int, kind: str, tokens: int
) -> None:
    p = replace(ws.plan(problem(tokens, kind), ws.Options(), H200), result_stages=result_stages)
    groups = (
        (prologue_warp, ws_plan.PROLOGUE), (product_warp, ws_plan.PRODUCT), (epilogue_warp, p.finishers)
    )  # fmt: skip
    for seed in range(30):
        rng = random.Random(seed)
        x = Pipeline(p)
        warps: dict[Step, Any] = {}
        for make, number in groups:
            for _ in range(number):
                warps[make(x, p, count)] = None
        favourites = [rng.random() for _ in warps]
        order = dict(zip(warps, favourites, strict=True))
        while warps:
            ready = [w for w, wait in warps.items() if wait is None or x.passes(*wait)]
            assert ready, f"deadlock, seed {seed}: {list(warps.values())}"
            warp = rng.choice(ready) if rng.random() < 0.5 else min(ready, key=order.__getitem__)
            try:
                warps[warp] = next(warp)
            except StopIteration:
                del warps[warp]
        for (buffer, _), held in x.written.items():
            assert set(held.values()) == {x.writers[buffer]}


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("stages", [2, 3, 4, 6])
@pytest.mark.parametrize("groups", [1, 4])
def test_the_oldest_group_of_copies_is_the_one_that_is_needed(
    count: int, stages: int, groups: int
) -> None:
    """cp.async.wait_group of the product: all but `stages * groups - 1` groups are complete."""
    asked = [(item, group) for item in range(stages) for group in range(groups)]
    for item in range(count):
        for group in range(groups):
            complete = asked[: len(asked) - (stages * groups - 1)]
            assert complete[-1] == (item, group)
            asked.append((item + stages, group))  # into the stage that was just read: item % stages


# Index maps.

fragment_of = plain(ws_plan.fragment_of)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_cells_cover_a_page_once_and_meet_their_fragments(dtype: Any) -> None:
    p = ws.plan(problem(state_dtype=dtype), ws.Options(), H200)
    bytes_ = p.item_bytes
    seen: Counter[int] = Counter()
    columns: dict[tuple[int, int], list[int]] = {}  # (step, lane % 4) -> columns of one row
    for warp, lane, unit in itertools.product(range(ws_plan.PRODUCT), range(32), range(p.units)):
        at = (warp * 16 + lane // 4) * HEAD_DIM * bytes_ + lane % 4 * 16
        at += p.unit_offset(unit)
        elements = range(at // bytes_, (at + 16) // bytes_)
        seen.update(elements)
        row = {e // HEAD_DIM for e in elements}
        assert row == {warp * 16 + lane // 4 + 8 * (unit % 2)}
        per_step = 4  # columns of a lane per MMA step
        for j in range(len(elements) // per_step):
            step = unit // 2 * (len(elements) // per_step) + j
            mine = [e % HEAD_DIM for e in elements[per_step * j : per_step * (j + 1)]]
            assert columns.setdefault((step, lane % 4), mine) == mine
    assert seen == Counter(range(HEAD_DIM * HEAD_DIM))
    for quad in range(HEAD_DIM // 4):
        assert columns[fragment_of(quad, p)] == list(range(4 * quad, 4 * quad + 4))


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_cells_of_a_decode_cover_a_page_once_and_meet_their_columns(dtype: Any) -> None:
    p = ws.plan(problem(1, state_dtype=dtype), ws.Options(), H200)
    bytes_ = p.item_bytes
    seen: Counter[int] = Counter()
    for warp, lane in itertools.product(range(ws_plan.PRODUCT), range(32)):
        row = warp * 16 + lane // 16
        values: list[int] = []  # a thread's, as `take_state` has them
        for unit in range(p.units):
            at = (row * HEAD_DIM * bytes_ + lane % 16 * 16 + p.unit_offset(unit)) // bytes_
            values += range(at, at + p.vector)
        seen.update(values)
        # `columns_of`: fours at a distance of 64, or side by side
        mine = [
            lane % 16 * p.vector + i * (64 if dtype == "fp32" else 4) + e
            for i in range(2)
            for e in range(4)
        ]
        for j in range(8):
            assert values[8 * j : 8 * j + 8] == [(row + 2 * j) * HEAD_DIM + c for c in mine]
        # `row_sums` leaves row j's on lanes 2j and 2j + 1 of 16.
        assert row + lane % 16 // 2 * 2 == row + 2 * (lane % 16 // (16 // 8))
    assert seen == Counter(range(HEAD_DIM * HEAD_DIM))


@pytest.mark.parametrize("tokens", range(2, 9))
def test_warps_share_a_and_b(tokens: int) -> None:
    """Every warp of the product takes one tile of vectors and `tiles` steps along K."""
    p = ws.plan(problem(tokens), ws.Options(), H200)
    taken = {
        (w % p.tiles, w // p.tiles * p.tiles + i)
        for w in range(ws_plan.PRODUCT)
        for i in range(p.tiles)
    }
    assert taken == set(itertools.product(range(p.tiles), range(8)))
    assert {w // p.tiles for w in range(ws_plan.PRODUCT)} == set(range(p.partials))
    assert tokens <= p.columns // 2


def banks(addresses: list[int], nbytes: int) -> int:
    """Most accesses of a warp to one bank, where each lane takes `nbytes` and equal words count
    once."""
    worst = 0
    together = 32 * 4 // nbytes  # lanes whose accesses go at once
    for i in range(0, 32, together):
        words = {a // 4 + j for a in addresses[i : i + together] for j in range(nbytes // 4)}
        worst = max(worst, *Counter(w % 32 for w in words).values())
    return worst


lane_of = plain(ws_prologue.lane_of)
place_of = plain(ws_plan.place_of)


@pytest.mark.parametrize("tokens", [4, 8])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_lanes_of_the_prologue_cover_the_channels_and_meet_no_bank_twice(
    tokens: int, dtype: Any
) -> None:
    p = ws.plan(problem(tokens, state_dtype=dtype), ws.Options(), H200)
    sizes = SimpleNamespace(heads=1, projected=0, pitch=1)
    lane_of.__globals__["Int64"], saved = int, lane_of.__globals__["Int64"]
    try:
        lanes = [[lane_of(sizes, w, i, p) for i in range(32)] for w in range(ws_plan.PROLOGUE)]
    finally:
        lane_of.__globals__["Int64"] = saved
    assert sorted(x.channel for w in lanes for x in w) == sorted(list(range(0, HEAD_DIM, 2)) * 4)
    for warp in lanes:
        for e in range(3 + p.lane_tokens):
            low, high = p.row_place(e)
            rows = [(low * 384 + (high + x.q) * p.row_pitch + x.channel) * 2 for x in warp]
            assert banks(rows, 4) == 1
        assert banks([(p.lane_tokens * x.q * p.value_pitch + x.channel) * 2 for x in warp], 4) == 1
        for first in (0, 4) if tokens == 4 else (0, 1):
            places = []
            for x in warp:
                step, column = fragment_of(x.channel // 4, p)
                place = place_of((first + p.lane_tokens * x.q) * 4 + column)
                places.append(step * 1024 + place * 16 + x.channel // 2 % 2 * 8)
            assert banks(places, 8) == 1
    assert sorted(place_of(lane) for lane in range(32)) == list(range(32))
    assert banks([place_of(lane) * 16 for lane in range(32)], 16) == 1
    assert (
        banks([(x.number // 4 * ws_plan.BOTTLENECK_PITCH + x.q * 4) * 2 for x in lanes[0]], 8) == 1
    )


@pytest.mark.parametrize("tokens", range(1, 9))
def test_rows_of_inputs_do_not_overlap(tokens: int) -> None:
    p = ws.plan(problem(tokens), ws.Options(), H200)
    places = [p.row_place(row) for row in range(p.rows)]
    begins = [low * 768 + high * p.row_pitch * 2 for low, high in places]
    assert all(b - a >= 768 for a, b in itertools.pairwise(begins))
    assert all(begin % 32 == 0 for begin in begins)  # as the rows of a projection are
    assert p.areas["inputs"].nbytes == ws_plan.INPUT_STAGES * (begins[-1] + 768)
    for q, e in itertools.product(range(4), range(3 + p.lane_tokens)):
        low, high = p.row_place(e)
        assert (low, high + q) == p.row_place(p.lane_tokens * q + e)


@pytest.mark.parametrize("tokens", range(2, 9))
def test_coefficients_that_are_used_are_loaded(tokens: int) -> None:
    p = ws.plan(problem(tokens), ws.Options(), H200)
    half = p.columns // 2
    for s in range(tokens):
        loaded = {
            i
            for i in range(p.columns // 4)
            if s + 1 <= i * 4 % half + 3 or (i * 4 >= half and s <= i * 4 % half + 3)
        }
        used = {t // 4 for t in range(s + 1, tokens)} | {(half + t) // 4 for t in range(s, tokens)}
        assert used <= loaded


# The source, thread by thread.


@pytest.fixture(scope="module")
def emulated() -> dict[str, ModuleType]:
    return simt_cluster.load("ws")


def emulate(
    modules: dict[str, Any], of: Problem, choices: dict[str, Any], draw: dict[str, Any], sms: int
) -> Any:
    """A step of all items by few CTAs, against the reference."""
    o = make_step(of, seed=of.tokens, device="cpu", pad=16, **draw)
    if o.record_rows is not None:
        o = replace(
            o, record_rows=torch.where(torch.arange(of.requests) == 1, -1, o.record_rows).int()
        )
    return simt.compare_step(modules["ws"], of, ws.Options(**choices), o, seed=sms, sms=sms)


def few(kind: Any, tokens: int, requests: int, heads: int = 1, **more: Any) -> Problem:
    return Problem(kind, requests, heads, tokens, **more)


CASES: dict[str, tuple[Problem, dict[str, Any], dict[str, Any]]] = {
    "record, a null request": (few("record", 8, 3), {}, {"null_requests": (0,)}),
    "bf16, two heads": (
        few("record", 3, 2, 2, state_dtype="bf16"),
        {"terms": 1, "gate_mode": 1},
        {"inputs": "generic"},
    ),
    "window-major": (few("record", 5, 2, conv_layout="window-major"), {}, {"conv_bias": False}),
    "decode": (
        few("decode", 1, 3, conv_layout="window-major", state_dtype="bf16"),
        {},
        {"null_requests": (1,)},
    ),
    "spec": (few("spec", 5, 2), {}, {"null_requests": (1,)}),
}


@pytest.mark.parametrize("case", CASES)
def test_emulation_agrees_with_the_reference(emulated: dict[str, ModuleType], case: str) -> None:
    assert emulate(emulated, *CASES[case], sms=1) is None


def test_emulation_notices_a_missing_wait(
    emulated: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(emulated["ws"].arch, "mbarrier_wait", lambda *_: None)
    assert emulate(emulated, *CASES["record, a null request"], sms=1) is not None


# What the compiler made of it.

GRID = [
    *(("record", tokens, "fp32", "dim-first", "sm_90a") for tokens in (2, 4, 5, 8)),
    *(("record", tokens, "bf16", "dim-first", "sm_90a") for tokens in (4, 8)),
    *(("record", 8, dtype, "window-major", "sm_90a") for dtype in ("fp32", "bf16")),
    *(("spec", tokens, "fp32", "dim-first", "sm_90a") for tokens in (2, 4, 8)),
    ("spec", 8, "bf16", "window-major", "sm_90a"),
    *(("decode", 1, dtype, "dim-first", "sm_90a") for dtype in ("fp32", "bf16")),
    *(
        (kind, tokens, "fp32", "dim-first", "sm_100a")
        for kind, tokens in (("record", 8), ("spec", 8), ("decode", 1))
    ),
    ("record", 8, "bf16", "window-major", "sm_103a"),
    ("record", 3, "fp32", "dim-first", "sm_103a"),
]


@pytest.mark.parametrize(("kind", "tokens", "dtype", "layout", "arch"), GRID)
def test_one_cta_per_sm_and_no_spills(
    kind: str, tokens: int, dtype: Any, layout: Any, arch: str
) -> None:
    of = problem(tokens, kind, state_dtype=dtype, conv_layout=layout)
    check_resources(ws.compile(of, ws.Options(), GPUS[arch]))


@pytest.mark.parametrize(
    ("tokens", "choices"),
    [
        (7, {"gate_mode": 1}),
        (7, {"conv_weight_dtype": "bf16", "window": 11}),
        (1, {"gate_mode": 1, "conv_weight_dtype": "bf16", "window": 10}),
    ],
)
def test_choices_compile(tokens: int, choices: dict[str, Any]) -> None:
    check_resources(ws.compile(problem(tokens), ws.Options(**choices), H200))


def check_resources(compiled: Compiled) -> None:
    resources, p = compiled.resources, compiled.plan
    assert ws.KERNELS[0] in compiled.binary.symbol
    assert resources.stack_bytes == 0
    assert (resources.threads, resources.cluster) == (ws_plan.THREADS, 1)
    assert resources.registers <= ws_plan.LAUNCHED
    if set(ws_plan.REGISTERS[p.kind, p.layout]) != {ws_plan.LAUNCHED}:
        assert (
            resources.registers > ws_plan.LAUNCHED - 8
        )  # what the groups share is what the CTA was given
    assert resources.smem_bytes == p.smem_bytes
    assert resources.ctas_per_sm == 1


def test_launch_options_and_sizes_share_a_binary() -> None:
    first = ws.compile(problem(4), ws.Options(), H200)
    second = ws.compile(
        problem(4, requests=300, heads=96), ws.Options(pdl=True), Gpu("sm_90a", 114)
    )
    assert second.binary.image == first.binary.image
    assert second.binary.compile_s == first.binary.compile_s
    assert ((first.sms, first.pdl), (second.sms, second.pdl)) == ((132, False), (114, True))


def test_the_product_is_on_tensor_cores_and_streams_by_16_bytes(tmp_path: Path) -> None:
    text = sass_of(ws.compile(problem(8), ws.Options(), H200).binary.image, tmp_path)
    assert (
        len(re.findall(r"\bHMMA\.16816\.F32\.BF16\b", text)) == 8 + 48 + 6
    )  # gate; state, three products; A and B
    copies = re.findall(r"\bLDGSTS\.\S+", text)
    assert sum(c.endswith("128") and "LTC128B.128" in c for c in copies) >= 3 * 16
    assert not re.findall(r"\b(?:STL|LDL)\b", text)


def test_launch_passes_addresses_and_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    of = problem(4, requests=5, heads=3)
    recorder = Recorder()
    monkeypatch.setattr(cubin, "launcher", lambda _: recorder)
    compiled = ws.compile(of, ws.Options(pdl=True), Gpu("sm_90a", 4))
    o = make_step(of, seed=1, device="cpu", pad=64)
    ws.launch(compiled, o, 7)
    assert recorder.grid == (4, 1, 1)  # 15 items, 4 each
    assert (recorder.stream, recorder.pdl) == (7, True)
    assert len(recorder.values) == len(compiled.binary.parameters)
    assert recorder.values == arguments.values(o, 4)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda o: {"lower_bound": None}, "lower_bound"),
        (lambda o: {"lower_bound": -20.0}, "lower_bound"),
        (lambda o: {"conv_state": o.conv_state.float()}, "conv_state"),
        (lambda o: {"conv_state": odd(o.conv_state)}, "conv_state"),
        (lambda o: {"conv_state": torch.cat((o.conv_state, o.conv_state), 2)}, "conv_state"),
        (
            lambda o: {"conv_state": o.conv_state.transpose(1, 2).contiguous().transpose(1, 2)},
            "conv_state",
        ),
        (lambda o: {"conv_state": o.conv_state[:, :, :4]}, "conv_state"),
        (lambda o: {"conv_weight": o.conv_weight.bfloat16()}, "conv_weight"),
        (lambda o: {"conv_bias": o.conv_bias.bfloat16()}, "conv_bias"),
        (lambda o: {"state": o.state.bfloat16()}, "state"),
        (lambda o: {"state": o.state.transpose(2, 3)}, "state"),
        (lambda o: {"projected": o.projected[:, 1:]}, "projected"),
        (lambda o: {"projected": o.projected[1:]}, "projected"),
        (lambda o: {"projected": o.projected[:, :-16]}, "projected"),
        (lambda o: {"slots": o.slots.long()}, "slots"),
        (lambda o: {"slots": o.slots.expand(-1, 5)}, "slots"),
        (lambda o: {"corrections": o.corrections[:, :, :4]}, "corrections"),
        (lambda o: {"key_gates": None}, "key_gates"),
        (lambda o: {"key_gates": torch.cat((o.key_gates, o.key_gates), 2)}, "key_gates"),
        (lambda o: {"record_rows": o.record_rows.long()}, "record_rows"),
        (lambda o: {"dt_bias": o.dt_bias[:-1]}, "dt_bias"),
    ],
)
def test_launch_names_operands_that_do_not_fit(
    monkeypatch: pytest.MonkeyPatch, change: Any, named: str
) -> None:
    of = problem(5)
    operands: StepOperands = make_step(of, seed=0, device="cpu", pad=16)
    monkeypatch.setattr(cubin, "launcher", lambda _: Recorder())
    compiled: Any = Compiled(cast("Any", None), ws.plan(of, ws.Options(), H200), pdl=False, sms=132)
    ws.launch(compiled, operands, 0)
    with pytest.raises(ValueError, match=f"^{named}[ =]"):
        ws.launch(compiled, replace(operands, **change(operands)), 0)
