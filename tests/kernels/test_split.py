"""KdaSplit without a GPU: its rules, its index maps, and what the compiler made of it."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import cutlass.cute as cute
import pytest
import torch

from kda_kernels import arguments, step
from kda_kernels.device.gpu import Gpu
from kda_kernels.operands import StepOperands, make_step
from kda_kernels.problem import HEAD_DIM, Problem
from kda_kernels.variants import split
from support import simt, simt_cluster
from support.compiled import odd

GPUS = {"sm_90a": Gpu("sm_90a", 132), "sm_100a": Gpu("sm_100a", 148)}
H200 = GPUS["sm_90a"]
SHAPES = ((1, 256, 16), (1, 512, 32), (2, 256, 16), (2, 128, 32), (4, 128, 16), (8, 128, 16))
"""split, threads, lanes per row: those of the schedules."""


pytestmark = pytest.mark.usefixtures("own_cache")


def problem(kind: str, tokens: int = 1, **sizes: Any) -> Problem:
    return Problem(kind, **{"requests": 4, "heads": 6, "tokens": tokens, **sizes})  # type: ignore[arg-type]


def options(shape: tuple[int, int, int] = (1, 256, 16), **choices: Any) -> split.Options:
    return split.Options(split=shape[0], threads=shape[1], lanes_per_row=shape[2], **choices)


@pytest.mark.parametrize(
    ("of", "choices", "reason"),
    [
        (Problem("replay", 4, 6, 4, pending=2), {}, "kind=replay"),
        (Problem("commit", 4, 6, 4), {}, "kind=commit"),
        (problem("decode"), {"split": 3}, "split=3 is not one of 1, 2, 4, 8"),
        (problem("decode"), {"threads": 64}, "threads=64"),
        (problem("decode"), {"lanes_per_row": 4}, "lanes_per_row=4"),
        (problem("decode"), {"staging": "tensor"}, "staging='tensor'"),
        (problem("decode"), {"gate_mode": 3}, "gate_mode=3"),
        (problem("decode"), {"conv_weight_dtype": "fp16"}, "conv_weight_dtype='fp16'"),
        (problem("decode"), {"form": "wide"}, "form='wide'"),
        (problem("record", 4), {"terms": 3}, "terms=3"),
        (
            problem("record", 4, state_dtype="bf16"),
            {"terms": 1},
            "terms=1: only for BF16 state in form chunked",
        ),
        (problem("decode"), {"evict": True}, "evict: only with staging=shared"),
        (problem("decode"), {"spin": True}, "spin: only with split > 1"),
        (problem("record", 4), {"window": 5}, "window=5 must lie in 6..16"),
        (problem("decode"), {"threads": 128}, "128 state values per thread"),
        (problem("decode"), {"split": 8, "threads": 512}, "rows per warp"),
        (problem("decode"), {"split": 8, "lanes_per_row": 8, "threads": 256}, "rows per warp"),
        (problem("decode", requests=70_000), {}, "requests=70000"),
        (problem("decode", lower_bound=None), {}, "the gate is unbounded"),
    ],
)
def test_unsupported(of: Problem, choices: dict[str, Any], reason: str) -> None:
    found = split.unsupported(of, split.Options(**choices), H200)
    assert found is not None
    assert reason in found
    with pytest.raises(ValueError, match=re.escape(reason)):
        split.compile(of, split.Options(**choices), H200)


def test_shared_memory_is_checked() -> None:
    small = Gpu("sm_90a", 132, smem_per_block=100_000)
    found = split.unsupported(problem("record", 8), options(staging="shared"), small)
    assert found is not None
    assert "shared memory" in found


@pytest.mark.parametrize("shape", [*SHAPES, (1, 256, 8), (4, 256, 16), (8, 256, 16)])
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_threads_cover_the_state_once(shape: tuple[int, int, int], dtype: str) -> None:
    p = split.plan(problem("decode", state_dtype=dtype), options(shape))
    assert split.unsupported(problem("decode"), options(shape), H200) is None
    seen: Counter[int] = Counter()
    owners: Counter[int] = Counter()
    for rank in range(p.split):
        for tid in range(p.threads):
            warp, lane = divmod(tid, 32)
            first = rank * p.rows + warp * p.warp_rows + lane // p.lanes
            for j in range(p.thread_rows):
                for c in range(p.chunks):
                    at = (
                        (first + p.step * j) * HEAD_DIM
                        + c * p.lanes * p.vector
                        + lane % p.lanes * p.vector
                    )
                    seen.update(range(at, at + p.vector))
            # The row whose sums `row_sums` leaves on this lane.
            own = (
                rank * p.rows
                + warp * p.warp_rows
                + p.step * (lane % p.lanes // p.copies)
                + lane // p.lanes
            )
            owners[own] += 1
    assert seen == Counter(range(HEAD_DIM * HEAD_DIM))
    assert owners == Counter(dict.fromkeys(range(HEAD_DIM), p.copies))


@pytest.mark.parametrize("shape", SHAPES)
def test_lanes_that_hold_a_feature_reach_every_cta(shape: tuple[int, int, int]) -> None:
    p = split.plan(problem("decode"), options(shape))
    count = p.warp_rows // 2
    sent = Counter(
        (warp * p.warp_rows + 2 * (column // (16 // count)) + half, column % (16 // count))
        for warp in range(p.warps)
        for half in range(2)
        for column in range(16)
        if column % (16 // count) < p.split
    )
    assert sent == Counter((feature, cta) for feature in range(p.rows) for cta in range(p.split))


@pytest.mark.parametrize("tokens", range(2, 9))
@pytest.mark.parametrize("shape", SHAPES)
def test_later_token_groups_stay_out_of_the_window(
    tokens: int, shape: tuple[int, int, int]
) -> None:
    """It is rolled in place while they run."""
    p = split.plan(problem("record", tokens), options(shape))
    assert p.token_groups == 1 or p.group_tokens >= 3
    assert p.token_groups * p.group_tokens >= tokens
    assert 3 * p.rows // 2 * p.token_groups <= p.threads


GRID = [
    *(
        (kind, tokens, shape, {})
        for kind, tokens in (("decode", 1), ("record", 8), ("spec", 4))
        for shape in SHAPES
    ),
    *(("record", 8, shape, {"gate_mode": 0}) for shape in SHAPES if shape[1] < 512),
    ("record", 4, SHAPES[0], {"gate_mode": 1}),
    ("decode", 1, SHAPES[4], {"gate_mode": 1}),
    ("decode", 1, SHAPES[0], {"staging": "shared"}),
    ("decode", 1, SHAPES[4], {"staging": "shared", "evict": True}),
    ("record", 8, SHAPES[4], {"staging": "shared"}),
    ("decode", 1, SHAPES[3], {"state_late": True}),
    ("record", 8, SHAPES[0], {"state_late": True}),
    ("decode", 1, SHAPES[0], {"stream_hints": False}),
    ("decode", 1, SHAPES[0], {"streamable": False}),
    ("spec", 5, SHAPES[4], {"streamable": False}),
    ("record", 3, SHAPES[0], {"conv_weight_dtype": "bf16"}),
    ("decode", 1, SHAPES[0], {"pdl": True}),
    ("decode", 1, SHAPES[3], {"staging": "shared", "pdl": True, "spin": True}),
    ("decode", 1, SHAPES[4], {"spin": True}),
    ("record", 8, SHAPES[0], {"pdl": True}),
]


@pytest.mark.parametrize(("kind", "tokens", "shape", "choices"), GRID)
def test_compiles_for_hopper(
    kind: str, tokens: int, shape: tuple[int, int, int], choices: dict[str, Any]
) -> None:
    compiled = split.compile(problem(kind, tokens), options(shape, **choices), H200)
    check_resources(compiled)
    assert len(compiled.binary.parameters) == len(arguments.Arguments._fields)


@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("kind", "tokens"), [("decode", 1), ("record", 8), ("spec", 3)])
def test_compiles_for_blackwell(
    kind: str, tokens: int, shape: tuple[int, int, int], arch: str
) -> None:
    of, gpu = problem(kind, tokens), Gpu(arch, 148)
    reason = split.unsupported(of, options(shape), gpu)
    if kind != "decode" and shape in ((1, 256, 16), (2, 128, 32)):
        assert reason is not None
        assert "windows spill with 64 state values per thread" in reason
    else:
        assert reason is None
        check_resources(split.compile(of, options(shape), gpu))


@pytest.mark.parametrize(("layout", "dtype"), [("window-major", "fp32"), ("dim-first", "bf16")])
@pytest.mark.parametrize(("kind", "tokens"), [("decode", 1), ("record", 8)])
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[5]])
def test_compiles_for_layouts_and_state_types(
    layout: str, dtype: str, kind: str, tokens: int, shape: tuple[int, int, int]
) -> None:
    of = problem(kind, tokens, conv_layout=layout, state_dtype=dtype)
    check_resources(split.compile(of, options(shape), H200))


def check_resources(compiled: step.Compiled) -> None:
    resources, p = compiled.resources, compiled.plan
    assert split.KERNELS[0] in compiled.binary.symbol
    assert resources.stack_bytes == 0
    assert (resources.threads, resources.cluster) == (p.threads, p.split)
    assert resources.smem_bytes == p.smem_bytes
    assert resources.ctas_per_sm >= p.ctas_per_sm
    if p.split == 1 and p.threads == 256 and p.staging == "registers":
        assert resources.ctas_per_sm == 2


def test_sizes_share_a_binary() -> None:
    first = split.compile(problem("decode"), options(SHAPES[5]), H200)
    second = split.compile(problem("decode", requests=300, heads=96), options(SHAPES[5]), H200)
    assert second.binary.image == first.binary.image
    assert second.binary.compile_s == first.binary.compile_s


def test_no_cluster_barrier_asks_how_it_was_launched(tmp_path: Path) -> None:
    p = split.plan(problem("decode"), options(SHAPES[4]))
    asked = f"--keep-ptx --dump-dir={tmp_path} --gpu-arch sm_90a"
    ptx = cute.compile(
        split._HOSTS["recurrence"], arguments.placeholder(), p, options=asked
    ).__ptx__
    assert ".reqnctapercluster 4, 1, 1" in ptx


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda o: {"lower_bound": None}, "lower_bound"),
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
        (lambda o: {"slots": o.slots.long()}, "slots"),
        (lambda o: {"slots": o.slots.expand(-1, 5)}, "slots"),
        (lambda o: {"corrections": o.corrections[:, :, :4]}, "corrections"),
        (lambda o: {"key_gates": None}, "key_gates"),
        (lambda o: {"record_rows": o.record_rows.long()}, "record_rows"),
    ],
)
def test_launch_names_operands_that_do_not_fit(change: Any, named: str) -> None:
    of = problem("record", 5)
    operands: StepOperands = make_step(of, seed=0, device="cpu", pad=16)
    plan = split.plan(of, options())
    arguments.check("KdaSplit", plan, operands)
    with pytest.raises(ValueError, match=f"^{named} "):
        arguments.check("KdaSplit", plan, replace(operands, **change(operands)))


# Whole steps on the CPU, the CTAs of a cluster side by side.
@pytest.fixture(scope="module")
def modules() -> dict[str, ModuleType]:
    return simt_cluster.load("split")


@pytest.fixture
def emulated(modules: dict[str, ModuleType]) -> ModuleType:
    return modules["split"]


@pytest.mark.parametrize(
    ("of", "shape", "choices"),
    [
        (Problem("decode", 1, 1, 1), SHAPES[0], {"staging": "shared"}),
        (Problem("decode", 1, 1, 1), SHAPES[5], {"spin": True}),
        (Problem("decode", 2, 1, 1, conv_layout="window-major"), SHAPES[4], {}),
        (Problem("decode", 2, 1, 1), SHAPES[3], {"staging": "shared", "pdl": True}),
        (
            Problem("decode", 1, 1, 1, state_dtype="bf16"),
            SHAPES[4],
            {"staging": "shared", "state_late": True},
        ),
        (Problem("decode", 1, 1, 1), SHAPES[5], {"streamable": False, "gate_mode": 1}),
        (Problem("record", 1, 1, 3), SHAPES[5], {"gate_mode": 0, "pdl": True}),
        (Problem("spec", 1, 1, 2, conv_layout="window-major"), SHAPES[4], {}),
    ],
)
def test_steps_on_the_cpu(
    emulated: Any, of: Problem, shape: tuple[int, int, int], choices: dict[str, Any]
) -> None:
    null = (1,) if of.requests > 1 else ()
    operands = make_step(of, seed=of.tokens, device="cpu", pad=16, null_requests=null)
    assert simt.compare_step(emulated, of, options(shape, **choices), operands, seed=1) is None


def emulate_exchange(emulated: Any) -> str | None:
    """A decode by four CTAs."""
    of = Problem("decode", 1, 1, 1)
    return simt.compare_step(
        emulated, of, options(SHAPES[4]), make_step(of, seed=1, device="cpu", pad=16), seed=2
    )


def test_nothing_is_overwritten_by_what_comes_early(
    emulated: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What CTAs send to each other comes at once."""
    monkeypatch.setattr(simt_cluster.Barrier, "early", True)
    assert emulate_exchange(emulated) is None


@pytest.mark.parametrize(("more", "found"), [(-4, "4 bytes more came"), (4, "deadlock")])
def test_emulation_notices_wrong_counts_of_bytes(
    modules: Any, monkeypatch: pytest.MonkeyPatch, more: int, found: str
) -> None:
    arch = modules["blocks"].arch
    expect = arch.mbarrier_arrive_and_expect_tx
    monkeypatch.setattr(
        arch, "mbarrier_arrive_and_expect_tx", lambda b, nbytes: expect(b, nbytes + more)
    )
    with pytest.raises(RuntimeError, match=found):
        emulate_exchange(modules["split"])


def test_copies_fill_lines_in_order(modules: Any) -> None:
    """Staged state and gate weights: eight lanes copy 128 neighbouring bytes to the same 128."""
    for shape in SHAPES[:1] + SHAPES[3:5]:
        P = modules["split"].plan(problem("decode"), options(shape, staging="shared"))
        lanes = [asked_state(modules["split_recurrence"], lane, P) for lane in range(32)]
        for copies in zip(*lanes, strict=True):
            for first in range(0, 32, 8):
                shared, source, nbytes = zip(*copies[first : first + 8], strict=True)
                assert (
                    [s - shared[0] for s in shared]
                    == [a - source[0] for a in source]
                    == list(range(0, 128, 16))
                )
                assert shared[0] % 128 == source[0] % 128 == 0
                assert set(nbytes) == {16}


def asked_state(m: Any, lane: int, P: Any) -> list[tuple[int, int, int]]:
    at = m.Place(*(simt.Int32(i) for i in (lane, 0, lane, 0, 0, 0, 128)))
    stage = simt.Tensor(simt.Pointer(simt.Float32, 1024, simt.Memory(16)), simt.Layout(1))
    address = simt.Int64(int(m.thread_offset(at, P)) * P.item_bytes)
    return simt.asked_copies(lane, m.stage_state, SimpleNamespace(state=stage), address, at, P)
