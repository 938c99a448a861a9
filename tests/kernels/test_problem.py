"""Sizes and bytes of problems: the one arithmetic that all variants are divided by."""

from __future__ import annotations

import pytest

from kda_kernels.problem import HEAD_DIM, Problem, ceil_div


def test_bytes_of_one_decode_item() -> None:
    problem = Problem("decode", 1, 1)
    weights = 32 * 1024 + 6 * 1024
    assert problem.bytes_read == 64 * 1024 + 768 * 3 + 1024 + weights
    assert problem.bytes_written == 64 * 1024 + 768 * 3 + 256


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_pages_per_kind(dtype: str) -> None:
    def written(kind: str, **options: object) -> int:
        return Problem(kind, 4, 3, state_dtype=dtype, **options).bytes_written  # type: ignore[arg-type]

    page = 128 * 128 * (4 if dtype == "fp32" else 2)
    assert Problem("decode", 4, 3, state_dtype=dtype).page_bytes == page  # type: ignore[arg-type]
    no_pages = written("record", tokens=4)
    assert written("spec", tokens=4) == no_pages + 12 * (4 * page - 1024 * 4)
    assert written("replay", tokens=4, pending=0) == no_pages
    assert written("replay", tokens=4, pending=2) == no_pages + 12 * page
    assert written("commit", tokens=4, layers=5) == 5 * 12 * page
    assert written("flush", tokens=4, pending=0) == 0


def test_commit_reads_the_records_of_folded_tokens_only() -> None:
    problem = Problem("commit", 4, 2, 3, layers=3, pending="mix")
    counts = problem.pending_counts
    assert sorted(counts) == [0, 1, 2, 3]
    assert problem.bytes_read == 3 * 2 * (3 * problem.page_bytes + 1024 * sum(counts))


def test_pending_counts() -> None:
    assert Problem("commit", 2, 1, 4).pending_counts == (4, 4)
    assert Problem("replay", 3, 1, 4, pending=1).pending_counts == (1, 1, 1)
    assert Problem("decode", 2, 1).pending_counts == (0, 0)


@pytest.mark.parametrize("tokens", [2, 3, 4, 5, 6, 7, 8])
def test_mixed_pending_counts_are_all_of_them(tokens: int) -> None:
    counts = Problem("replay", tokens + 1, 1, tokens, pending="mix").pending_counts
    assert sorted(counts) == list(range(tokens + 1))


@pytest.mark.parametrize("heads", [3, 12, 96])
def test_projection_columns(heads: int) -> None:
    problem = Problem("decode", 1, heads)
    assert problem.used_columns == 4 * 128 * heads + 128 + heads
    assert problem.pitch % 16 == 0
    assert problem.used_columns <= problem.pitch < problem.used_columns + 16


@pytest.mark.parametrize(
    ("kind", "window"), [("decode", 3), ("spec", 7), ("record", 7), ("replay", 7)]
)
def test_operand_shapes(kind: str, window: int) -> None:
    tokens = 1 if kind == "decode" else 5
    shapes = Problem(kind, 4, 3, tokens, pending=2 if kind == "replay" else None).operand_shapes  # type: ignore[arg-type]
    assert shapes["conv_state"][1:] == (3 * 3 * HEAD_DIM, window)
    assert shapes["projected"][0] == shapes["out"][0] == 4 * tokens
    assert shapes["slots"] == {"decode": (4,), "spec": (4, 5)}.get(kind, (4, 1))
    assert shapes["state"][0] == (21 if kind == "spec" else 5)
    assert ("accepted" in shapes) is (kind == "spec")
    assert ("corrections" in shapes) is (kind in ("record", "replay"))
    assert ("pending" in shapes) is (kind == "replay")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("prefill", 1, 1), "kind='prefill' is not one of"),
        (("decode", 0, 1), "requests=0 must be an integer >= 1"),
        (("decode", 1.0, 1), "requests=1.0 must be an integer"),
        (("decode", True, 1), "requests=True must be an integer"),
        (("decode", 1, -3), "heads=-3"),
        (("decode", 1, 1, 2), "kind decode takes exactly 1"),
        (("record", 1, 1, 1), "kind record takes 2..8"),
        (("record", 1, 1, 9), "exceeds the window limit of 8"),
        (("record", 1, 1, 4, 2), "only commit and flush"),
        (("decode", 1, 1, 1, 1, "fp16"), "state_dtype='fp16'"),
        (("record", 1, 1, 4, 1, "fp32", 2), "kind record has no pending tokens"),
        (("replay", 1, 1, 4), "needs pending"),
        (("replay", 1, 1, 4, 1, "fp32", 5), "pending=5 must be 'mix' or an integer in 0..4"),
        (("replay", 1, 1, 4, 1, "fp32", True), "pending=True"),
        (("commit", 1, 1, 4, 1, "fp32", "all"), "pending='all'"),
        (("decode", 1, 1, 1, 1, "fp32", None, "rowwise"), "conv_layout='rowwise'"),
    ],
)
def test_bad_problems_say_what_is_wrong(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        Problem(*arguments)  # type: ignore[arg-type]


def test_ceil_div() -> None:
    assert [ceil_div(n, 4) for n in (0, 1, 4, 5)] == [0, 1, 1, 2]


def test_problems_hash_and_sort() -> None:
    a, b = Problem("decode", 1, 3), Problem("decode", 2, 3)
    assert len({a, Problem("decode", 1, 3), b}) == 2
    assert sorted([b, a]) == [a, b]
    assert (b.items, b.rows, b.channels, b.window) == (6, 2, 384, 3)
