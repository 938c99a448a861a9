"""Marked blocks of documents: found, filled, and current in this repository."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from kdabench.data.measurements import Candidate, Cell
from kdabench.review import doc_blocks, doc_tables
from kdabench.review.doc_blocks import BlockError, filled
from kdabench.review.doc_tables import Recorded

RESULTS = Path(__file__).parents[2] / "results"
BLOCK = "above\n<!-- begin: a b -->\nold\n<!-- end -->\nbelow\n"


def test_the_repositorys_blocks_are_current() -> None:
    assert [document.diff for document in doc_blocks.stale(RESULTS)] == []


def test_only_the_inside_of_a_block_changes() -> None:
    text = filled(Path("x.md"), BLOCK + BLOCK, lambda name: f"new {name}\n")
    assert text == (BLOCK + BLOCK).replace("old", "new a b")
    assert filled(Path("x.md"), text, lambda name: f"new {name}\n") == text


def test_an_empty_block_is_filled() -> None:
    text = filled(Path("x.md"), "<!-- begin: a -->\n<!-- end -->\n", lambda _: "made\n")
    assert text == "<!-- begin: a -->\nmade\n<!-- end -->\n"


@pytest.mark.parametrize(
    "text",
    [
        "<!-- begin: a -->\nno end\n",
        "<!-- end -->\n",
        "<!-- begin: a -->\n<!-- begin: b -->\n<!-- end -->\n<!-- end -->\n",
        BLOCK + "<!-- end -->\n",
    ],
)
def test_a_marker_alone_is_refused(text: str) -> None:
    with pytest.raises(BlockError, match=r"x\.md: block: a begin without its own end"):
        filled(Path("x.md"), text, lambda _: "")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder with a document whose block is a command's output, and results without records."""
    (tmp_path / "docs" / "log").mkdir(parents=True)
    (tmp_path / "results").mkdir()
    return tmp_path


def test_a_changed_number_is_found_and_mended(root: Path) -> None:
    path = root / "docs" / "log" / "a.md"
    path.write_text("<!-- begin: $ kdabench --version -->\nkdabench 7\n<!-- end -->\n")
    (document,) = doc_blocks.stale(root / "results")
    assert "-kdabench 7\n" in document.diff
    assert "+    $ kdabench --version\n" in document.diff
    document.write()
    assert doc_blocks.stale(root / "results") == []
    path.write_text(path.read_text().replace("$ kdabench --version\n", "$ kdabench  --version\n"))
    assert len(doc_blocks.stale(root / "results")) == 1


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("tables nvidia-h200", "a table and a device"),
        ("latency nvidia-h300", "no records"),
        ("$ kdabench check", "can't stand in one"),
        ("$ kdabench choose --heads 0 --requests 1", "exit status 2: "),
    ],
)
def test_a_block_that_cannot_be_made_is_named(root: Path, name: str, why: str) -> None:
    (root / "README.md").write_text(f"<!-- begin: {name} -->\n<!-- end -->\n")
    with pytest.raises(BlockError) as caught:
        doc_blocks.stale(root / "results")
    assert str(caught.value).startswith(f"{root / 'README.md'}: block: {name!r}: ")
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_time_is_the_median_over_processes_of_their_medians() -> None:
    recorded = Recorded(RESULTS / "nvidia-h200")
    of_candidate: dict[Candidate, list[float]] = {}
    for found in recorded.dispatch:
        if (found.cell, found.status) == (Cell("decode", 256, 12), "ok"):
            times = of_candidate.setdefault(found.candidate, [])
            times.append(statistics.median(found.samples_us))
    stock = min(
        statistics.median(times) for c, times in of_candidate.items() if c.variant == "stock"
    )
    _, _, floor, pick, last, *_ = doc_tables.latency(recorded).splitlines()
    floor_us = float(floor.split(" | ")[-1].strip("| "))
    assert last.split(" | ")[-1] == f"{stock:.2f} ({floor_us / stock:.2f}) |"
    picked = float(pick.split(" | ")[-1].partition(" ")[0])
    assert any(abs(statistics.median(times) - picked) <= 0.005 for times in of_candidate.values())
