"""KdaSplit's chunked windows without a GPU: rules, index maps, the source run thread by thread over
whole clusters, and what the compiler made of it."""

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
from kda_kernels.operands import make_step
from kda_kernels.problem import Problem
from kda_kernels.variants import split, split_chunked
from support import simt, simt_cluster
from support.compiled import Recorder, sass_of

GPUS = {
    "sm_90a": Gpu("sm_90a", 132),
    "sm_100a": Gpu("sm_100a", 148),
    "sm_103a": Gpu("sm_103a", 148),
}
H200 = GPUS["sm_90a"]
CTAS = {(1, 256): 2, (2, 128): 3, (2, 256): 2, (4, 128): 5, (4, 256): 3, (8, 128): 6}
"""That an SM must hold of each shape."""


def options(ctas: int = 8, threads: int = 128, gate_mode: int = 0, **choices: Any) -> split.Options:
    return split.Options(
        split=ctas, threads=threads, gate_mode=gate_mode, form="chunked", **choices
    )


pytestmark = pytest.mark.usefixtures("own_cache")


def problem(tokens: int = 8, state_dtype: Any = "fp32", **sizes: Any) -> Problem:
    return Problem(
        "record",
        **{"requests": 4, "heads": 6, "tokens": tokens, "state_dtype": state_dtype, **sizes},
    )


@pytest.mark.parametrize(
    ("of", "choices", "reason"),
    [
        (Problem("decode", 4, 6), {}, "kind=decode"),
        (Problem("spec", 4, 6, 4), {}, "kind=spec"),
        (
            problem(),
            {"ctas": 8, "threads": 256},
            "split=8 threads=256: form=chunked takes 1 x 256, 2 x 128",
        ),
        (problem(), {"gate_mode": 2}, "gate_mode=2: form=chunked takes 0, 1"),
        (problem(), {"terms": 3}, "terms=3"),
        (problem(), {"terms": 1}, "terms=1: only for BF16 state"),
        (problem(), {"staging": "shared"}, "staging='shared': form=chunked takes registers"),
        (problem(), {"conv_weight_dtype": "fp16"}, "conv_weight_dtype='fp16'"),
        (problem(), {"window": 9}, "window=9 must lie in 10..16"),
        (problem(requests=70_000), {}, "requests=70000"),
        (problem(lower_bound=-8.0), {}, "lower_bound=-8.0 is too low for 8 tokens"),
    ],
)
def test_unsupported(of: Problem, choices: dict[str, Any], reason: str) -> None:
    found = split.unsupported(of, options(**choices), H200)
    assert found is not None
    assert reason in found
    with pytest.raises(ValueError, match=re.escape(reason)):
        split.compile(of, options(**choices), H200)


def test_shared_memory_is_checked() -> None:
    found = split.unsupported(problem(), options(1, 256), Gpu("sm_90a", 132, smem_per_block=50_000))
    assert found is not None
    assert "shared memory" in found


@pytest.mark.parametrize("tokens", range(2, 9))
@pytest.mark.parametrize("shape", split_chunked.SHAPES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_threads_cover_their_parts_once(shape: tuple[int, int], tokens: int, dtype: str) -> None:
    p = split.plan(problem(tokens, dtype), options(*shape))
    assert isinstance(p, split_chunked.Plan)
    assert split.unsupported(problem(tokens, dtype), options(*shape), H200) is None
    # A warp multiplies whole cells, and every warp takes part in both products.
    assert p.row_tiles * p.column_parts == p.warps
    assert p.steps * p.column_parts == p.pair_steps * p.warps == 8
    assert p.cells * 4 == p.steps * p.item_bytes
    # Gate, convolution and pairs in one pass each.
    assert p.row_tiles <= p.warps
    assert p.conv_tasks <= p.threads
    assert p.groups * p.group_tokens >= tokens > (p.groups - 1) * p.group_tokens
    assert p.pair_count <= p.threads
    # Each row and token has one owner, and the lanes of a row lie in one warp.
    owners = Counter(
        (warp * p.warp_rows + lane % p.warp_rows, lane // p.warp_rows * p.own_tokens + e)
        for warp in range(p.row_warps)
        for lane in range(32)
        for e in range(p.own_tokens)
    )
    assert owners == Counter((row, t) for row in range(p.rows) for t in range(p.slots))
    assert p.row_warps <= p.warps
    assert p.norm_slots % 4 == 0
    for target in range(p.split):
        senders = [r for r in range(p.warp_rows) for j in range(8) if r + j * p.warp_rows == target]
        assert len(senders) == 1


# The source, thread by thread.


@pytest.fixture(scope="module")
def modules() -> dict[str, ModuleType]:
    return simt_cluster.load("split")


@pytest.fixture
def emulated(modules: dict[str, ModuleType]) -> ModuleType:
    return modules["split"]


CASES: dict[str, tuple[Problem, split.Options, dict[str, Any]]] = {
    "8 tokens, split 2": (problem(), options(2, 256), {}),
    "8 tokens, split 4": (problem(), options(4, 128, gate_mode=1, spin=True), {}),
    "2 tokens, split 8, chained": (problem(2), options(8, 128, pdl=True), {"inputs": "generic"}),
    "5 tokens, split 8, late": (problem(5), options(8, 128, window=11, state_late=True), {}),
    "7 tokens, split 4 x 256, bf16": (
        problem(7, "bf16"),
        options(4, 256, terms=1),
        {"conv_bias": False},
    ),
    "3 tokens, split 1, bf16, window-major": (
        problem(3, "bf16", conv_layout="window-major"),
        options(1, 256, gate_mode=1, conv_weight_dtype="bf16"),
        {"inputs": "generic"},
    ),
    "4 tokens, split 2 x 128, any layout": (
        problem(4, conv_layout="window-major"),
        options(2, 128, streamable=False, pdl=True),
        {"conv_bias": False},
    ),
}


def emulate(
    m: ModuleType, of: Problem, options: split.Options, draw: dict[str, Any], seed: int
) -> str | None:
    """A live item and a null one, and with generic inputs a live one without a record, against the
    reference."""
    of = replace(of, requests=3 if draw.get("inputs") == "generic" else 2, heads=1)
    operands = make_step(of, seed=seed, device="cpu", pad=16, null_requests=(1,), **draw)
    if options.conv_weight_dtype == "bf16":
        operands = simt.with_bf16_weights(operands)
    assert operands.record_rows is not None
    operands.record_rows[2:] = -1
    return simt.compare_step(m, of, options, operands, seed)


@pytest.mark.parametrize("case", CASES)
def test_emulation_agrees_with_the_reference(emulated: ModuleType, case: str) -> None:
    of, options, draw = CASES[case]
    assert emulate(emulated, of, options, draw, seed=len(case)) is None


def test_nothing_is_overwritten_by_what_comes_early(
    emulated: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What CTAs send to each other comes at once."""
    monkeypatch.setattr(simt_cluster.Barrier, "early", True)
    of, options, draw = CASES["8 tokens, split 4"]
    assert emulate(emulated, of, options, draw, seed=2) is None


def test_emulation_notices_missing_barriers(modules: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modules["blocks"].arch, "sync_threads", lambda: None)
    try:
        found = emulate(modules["split"], problem(2), options(4, 128), {}, seed=3)
    except (AssertionError, RuntimeError) as error:
        found = str(error)
    assert found is not None


@pytest.mark.parametrize("decays", [-0.01, -7.5])
def test_unnormalized_pairs_in_two_terms_give_norms_and_corrections(decays: float) -> None:
    """Products of split terms at the weakest and strongest decays, norms applied afterwards."""
    g = torch.Generator().manual_seed(1)
    k = (torch.randn(16, 8, 128, generator=g) * 0.3).bfloat16().float()
    gamma = (torch.rand(16, 8, 128, generator=g) * decays).cumsum(1).exp()

    def terms(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        high = x.bfloat16().float()
        return high.double(), (x - high).bfloat16().double()

    (young_high, young_low), (aged_high, aged_low) = terms(k / gamma), terms(k * gamma)
    pairs = aged_high @ young_high.mT + aged_low @ young_high.mT + aged_high @ young_low.mT
    exact = (k.double() * gamma.double()) @ (k.double() / gamma.double()).mT
    scale = k.double().norm(dim=-1)
    error = ((pairs - exact) / (scale[:, :, None] * scale[:, None, :])).tril().abs().max()
    assert error < 1e-5


def check_resources(of: Problem, options: split.Options, gpu: Gpu) -> None:
    compiled = split.compile(of, options, gpu)
    binary, p, found = compiled.binary, compiled.plan, compiled.resources
    assert "kda_split_chunked" in binary.symbol
    assert found.stack_bytes == 0
    assert (found.threads, found.cluster) == (p.threads, p.split)
    assert found.smem_bytes == p.smem_bytes
    assert found.ctas_per_sm >= p.ctas_per_sm >= CTAS[options.split, options.threads]
    assert len(binary.parameters) == len(arguments.Arguments._fields)


@pytest.mark.parametrize("shape", split_chunked.SHAPES)
@pytest.mark.parametrize(
    ("tokens", "dtype", "choices"),
    [
        (8, "fp32", {}),
        (7, "bf16", {"gate_mode": 1, "terms": 1}),
        (5, "fp32", {"gate_mode": 1, "pdl": True, "state_late": True}),
        (4, "fp32", {"window": 16, "stream_hints": False}),
        (3, "bf16", {"conv_weight_dtype": "bf16"}),
    ],
)
def test_compiles_for_hopper(
    shape: tuple[int, int], tokens: int, dtype: str, choices: dict[str, Any]
) -> None:
    check_resources(problem(tokens, dtype), options(*shape, **choices), H200)


@pytest.mark.parametrize("layout", ["dim-first", "window-major"])
@pytest.mark.parametrize("streamable", [True, False])
def test_compiles_for_layouts(layout: str, streamable: bool) -> None:
    check_resources(problem(8, conv_layout=layout), options(4, 128, streamable=streamable), H200)


@pytest.mark.parametrize("arch", ["sm_100a", "sm_103a"])
@pytest.mark.parametrize("shape", split_chunked.SHAPES)
def test_compiles_for_blackwell(arch: str, shape: tuple[int, int]) -> None:
    check_resources(problem(8), options(*shape), GPUS[arch])


def test_products_and_sends_are_what_they_should_be(tmp_path: Path) -> None:
    text = sass_of(split.compile(problem(), options(8, 128), H200).binary.image, tmp_path)
    # Gate 8; pairs and state: 2 steps of 2 tiles, 3 products each.
    assert len(re.findall(r"\bHMMA\.16816\.F32\.BF16\b", text)) == 8 + 12 + 12
    assert len(re.findall(r"\bSTAS\.128\b", text)) == 2 * 7
    assert len(re.findall(r"\bLDG\.E\.NA\.128\b", text)) == 2 * 2
    # The slot first; the state before the first barrier.
    loads = [m.start() for m in re.finditer(r"\bLDG(?:STS)?\b", text)]
    assert text[loads[0] : loads[0] + 6] == "LDG.E "
    assert loads[-1] < text.index("BAR.SYNC")


def test_sizes_share_a_binary_and_the_order_of_loads_does_not() -> None:
    first = split.compile(problem(), options(), H200).binary
    second = split.compile(problem(requests=300, heads=96), options(), H200).binary
    chained = split.compile(problem(), options(pdl=True), H200).binary
    assert second == first  # the time it took to compile is part of it
    assert chained.image != first.image


def test_grid_and_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    monkeypatch.setattr(cubin, "launcher", lambda binary: recorder)
    of = problem(5, requests=9)
    compiled = split.compile(of, options(4, 128), H200)
    operands = make_step(of, seed=0, device="cpu", pad=16)
    split.launch(compiled, operands, 0)
    assert recorder.grid == (24, 9, 1)

    def launch(**changed: Any) -> None:
        split.launch(compiled, replace(operands, **changed), 0)

    with pytest.raises(ValueError, match=r"lower_bound=-13\.0 is too low for 5 tokens"):
        launch(lower_bound=-13.0)
    with pytest.raises(ValueError, match="lower_bound is None"):
        launch(lower_bound=None)
    with pytest.raises(ValueError, match=r"^state "):
        launch(state=operands.state.bfloat16())
