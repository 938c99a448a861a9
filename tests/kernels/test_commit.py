"""KdaCommit without a GPU: its rules, its arithmetic, and what the compiler made of it."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kda_kernels.device import cubin
from kda_kernels.device.gpu import Gpu
from kda_kernels.operands import make_commit
from kda_kernels.problem import HEAD_DIM, MAX_TOKENS, Problem
from kda_kernels.variants import commit, commit_fold
from support.compiled import Recorder, sass_of

H200 = Gpu("sm_90a", 132)
THIRD_OF_AN_SM = 233_472 // 3 - 1024


pytestmark = pytest.mark.usefixtures("own_cache")


def problem(state_dtype: Any = "bf16", kind: Any = "commit", **sizes: Any) -> Problem:
    given: Any = {"requests": 4, "heads": 6, "tokens": 8, "layers": 2, **sizes}
    return Problem(kind, **given, state_dtype=state_dtype)


@pytest.mark.parametrize(
    ("heads", "most", "chunk"),
    [(12, 4, 4), (12, 8, 4), (6, 4, 2), (96, 8, 8), (3, 4, 1), (3, 3, 3), (64, 6, 2)],
)
def test_chunks_are_equal_and_cover_the_heads(heads: int, most: int, chunk: int) -> None:
    assert commit.heads_of_cta(heads, most) == chunk
    assert heads % chunk == 0 <= most - chunk


# (source, rows_per_cta, columns)
FORMS = list(itertools.product(["bulk", "registers"], [32, 64, HEAD_DIM], [4, 8]))


def rows_spec(form: tuple[Any, int, int], **choices: Any) -> commit.Options:
    source, rows, columns = form
    return commit.Options(
        source=source, rows_per_cta=rows, columns=columns, heads_per_cta=1, **choices
    )


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize("form", [("ring", HEAD_DIM, 8), *FORMS])
def test_threads_cover_a_tile_once_with_the_columns_of_their_vectors(
    dtype: str, align: bool, form: tuple[str, int, int]
) -> None:
    ctas = commit.most_ctas(dtype, rows_spec(form, align=align))  # type: ignore[arg-type]
    choices = commit_fold.Plan(dtype, "direct", align, *form, ctas_per_sm=ctas)  # type: ignore[arg-type]
    (vector, runs, rows), (lanes, groups), steps, _ = choices.tile_shape
    (s_vector, s_run, s_row), (s_lane, s_group), s_step, s_stage = choices.tile_stride
    seen = []
    for e, j, r, lane, g, step in itertools.product(
        *map(range, (vector, runs, rows, lanes, groups, steps))
    ):
        at = e * s_vector + j * s_run + r * s_row + lane * s_lane + g * s_group + step * s_step
        seen.append(at)
        row, channel = divmod(at, HEAD_DIM)
        c = j * vector + e  # among the thread's columns: [half, 4] in `take_vectors`
        assert commit_fold.place(channel, vector) == c % 4 + 4 * lane + 64 * (c // 4)
        assert row == r + rows * (g + groups * step)  # the row whose corrections `fold` takes
    assert lanes * groups == commit_fold.THREADS
    assert sorted(seen) == list(range(s_stage))
    assert s_stage * choices.item_bytes == choices.tile_bytes
    assert choices.tiles * s_stage == choices.rows_per_cta * HEAD_DIM
    assert choices.parts * choices.rows_per_cta == HEAD_DIM
    assert sorted(commit_fold.place(c, vector) for c in range(HEAD_DIM)) == list(range(HEAD_DIM))


@pytest.mark.parametrize(
    ("of", "options", "reason"),
    [
        (Problem("decode", 4, 6), commit.Options(), "kind=decode"),
        (Problem("record", 4, 6, 4), commit.Options(), "kind=record"),
        (problem(kind="flush"), commit.Options(align=True), "no block boundary"),
        (problem(), commit.Options(heads_per_cta=0), "heads_per_cta=0"),
        (problem(), commit.Options(store="smem"), "store='smem'"),  # type: ignore[arg-type]
        (problem(requests=70_000), commit.Options(), "requests=70000"),
        (problem(), commit.Options(source="smem"), "source='smem'"),  # type: ignore[arg-type]
        (problem(), commit.Options(columns=4), "source=ring has"),
        (problem(), commit.Options(hints=True), "source=ring has"),
        (problem(), commit.Options(source="bulk"), "heads_per_cta=1, not direct and 4"),
        (problem(), commit.Options("bulk", heads_per_cta=1, source="registers"), "store=direct"),
        (problem(), rows_spec(("bulk", 16, 4)), "rows_per_cta=16"),
        (problem(), rows_spec(("bulk", 64, 2)), "columns=2"),
        (problem(), rows_spec(("bulk", 128, 4), ctas_per_sm=6), "ctas_per_sm=6 is not within 0..5"),
        (
            problem("fp32"),
            rows_spec(("bulk", 128, 4), ctas_per_sm=4),
            "ctas_per_sm=4 is not within 0..3",
        ),
    ],
)
def test_unsupported(of: Problem, options: commit.Options, reason: str) -> None:
    found = commit.unsupported(of, options, H200)
    assert found is not None
    assert reason in found
    with pytest.raises(ValueError, match=re.escape(reason)):
        commit.compile(of, options, H200)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("kind", ["commit", "flush"])
def test_supported(dtype: str, kind: str) -> None:
    for tokens in range(1, MAX_TOKENS + 1):
        assert (
            commit.unsupported(problem(dtype, kind, tokens=tokens), commit.Options(), H200) is None
        )


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize("store", ["direct", "bulk"])
def test_three_ctas_per_sm_and_no_spills(arch: str, dtype: str, align: bool, store: Any) -> None:
    compiled = commit.compile(
        problem(dtype), commit.Options(store=store, align=align), Gpu(arch, 132)
    )
    found = compiled.resources
    assert found.threads == commit_fold.THREADS
    assert found.stack_bytes == 0
    assert found.registers <= 168
    assert 2 * commit_fold.TILE_BYTES < found.smem_bytes <= THIRD_OF_AN_SM
    assert found.ctas_per_sm == commit_fold.CTAS_PER_SM
    assert commit.KERNELS[0] in compiled.binary.symbol
    assert len(compiled.binary.parameters) == 15


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_most_ctas_per_sm_and_no_spills(
    arch: str, dtype: str, align: bool, form: tuple[str, int, int]
) -> None:
    options = rows_spec(form, align=align)
    compiled = commit.compile(problem(dtype), options, Gpu(arch, 132))
    found = compiled.resources
    assert found.threads == commit_fold.THREADS
    assert found.stack_bytes == 0
    assert found.ctas_per_sm >= commit.most_ctas(dtype, options)  # type: ignore[arg-type]
    assert commit.KERNELS[0] in compiled.binary.symbol
    assert len(compiled.binary.parameters) == 15


def test_sizes_and_launch_options_share_one_binary() -> None:
    first = commit.compile(problem(), commit.Options(), H200)
    second = commit.compile(
        problem(requests=1, heads=96, tokens=3, layers=69),
        commit.Options(heads_per_cta=8, pdl=True),
        H200,
    )
    assert first.binary == second.binary  # the time it took to compile is part of it
    assert second.options.heads_per_cta == 8


def disassembly(options: commit.Options, folder: Path) -> str:
    return sass_of(commit.compile(problem(), options, H200).binary.image, folder)


def test_every_access_to_a_page_is_16_bytes_wide(tmp_path: Path) -> None:
    sass = disassembly(commit.Options(), tmp_path)
    stores = re.findall(r"\bSTG\.\S+", sass)
    assert stores == ["STG.E.128"] * 4
    assert len(re.findall(r"\bLDS\.128\b", sass)) >= 4 + 8 + 18  # rows, corrections, folded keys
    assert len(re.findall(r"\bFFMA\b", sass)) >= 4 * 8 * MAX_TOKENS
    assert not re.findall(r"\b(?:STL|LDL)\b", sass)


@pytest.mark.parametrize("form", [("ring", HEAD_DIM, 8), *FORMS])
def test_loads_are_in_flight_together(form: tuple[str, int, int], tmp_path: Path) -> None:
    """Plan, tables and weights before the first branch; a page's rows before the wait for its
    records."""
    sass = disassembly(rows_spec(form, hints=form[0] != "ring"), tmp_path)
    before, after = re.split(r"\bEXIT\b", sass, maxsplit=1)
    assert len(re.findall(r"\bLDG\.E ", before)) == 6
    assert len(re.findall(r"\bLDG\.E\.128 ", before)) == 3
    source, rows, columns = form
    width = 8 * columns * 2
    expected = rows * HEAD_DIM // columns // commit_fold.THREADS if source == "registers" else 0
    assert len(re.findall(rf"\bLDG\.E\.NA\.{width} ", after.split("DEPBAR.LE", 1)[0])) == expected
    assert len(re.findall(r"\bLDG\.", after)) == expected + (
        2 if source == "ring" else 0
    )  # the next head's weights
    if source != "ring":
        assert set(re.findall(r"\bSTG\.\S+", sass)) == {f"STG.E.EF.{width}"}


def test_launch_passes_addresses_and_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    of = problem()
    recorder = Recorder()
    monkeypatch.setattr(cubin, "launcher", lambda _: recorder)
    compiled = commit.compile(of, commit.Options(heads_per_cta=4, pdl=True), H200)
    operands = make_commit(of, seed=1, device="cpu")
    commit.launch(compiled, operands, 7)
    assert recorder.grid == (3, 4, 2)
    assert (recorder.stream, recorder.pdl) == (7, True)
    assert len(recorder.values) == len(compiled.binary.parameters)
    assert recorder.values[0] == operands.state_table.data_ptr()
    assert recorder.values[9:] == (0, 0, 6, 2, 8, -5.0)
    commit.launch(commit.compile(of, rows_spec(("bulk", 32, 4)), H200), operands, 7)
    assert recorder.grid == (24, 4, 2)
    assert recorder.values[9:] == (0, 0, 6, 1, 8, -5.0)


def test_launch_refuses_operands_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cubin, "launcher", lambda _: Recorder())
    compiled = commit.compile(problem(), commit.Options(), H200)
    with pytest.raises(ValueError, match="compiled for bf16"):
        commit.launch(compiled, make_commit(problem("fp32"), seed=1, device="cpu"), 0)
    with pytest.raises(ValueError, match="align=False"):
        commit.launch(compiled, make_commit(problem(), seed=1, device="cpu", align=True), 0)
    operands = make_commit(problem(), seed=1, device="cpu", pad=16)
    commit.launch(compiled, operands, 0)
    crooked = torch.empty(4 * 6 * 8 * 128 + 64).as_strided(
        (4, 6, 8, 128), (6 * 8 * 128 + 2, 8 * 128, 128, 1)
    )
    with pytest.raises(ValueError, match="corrections: leading stride"):
        commit.launch(compiled, replace(operands, corrections=(crooked, crooked)), 0)
