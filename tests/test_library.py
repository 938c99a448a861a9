"""The public library: its names, its page in the documentation, its examples, its tables."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import io
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pandas as pd
import pytest

import kdabench
from kdabench import cli
from kdabench.data import measurements
from kdabench.data.measurements import CELL_FIELDS, Candidate, Cell
from kdabench.review import frame
from support import synthetic

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "library.md"
BLOCKS = re.compile(r"```python\n(.*?)```\n\n```text\n(.*?)```", re.DOTALL)


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the repository's results and sweeps, in which anything may be written."""
    for name in ("results", "sweeps"):
        (tmp_path / name).symlink_to(ROOT / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def said(blocks: list[str]) -> list[str]:
    """What blocks of Python print, run in order in one namespace."""
    names: dict[str, object] = {}
    outputs = []
    for block in blocks:
        with contextlib.redirect_stdout(io.StringIO()) as output:
            exec(compile(block, str(PAGE), "exec"), names)
        outputs.append(output.getvalue())
    return outputs


def test_the_page_says_what_its_code_prints(checkout: Path) -> None:
    text = PAGE.read_text(encoding="utf-8")
    blocks = BLOCKS.findall(text)
    assert len(blocks) == text.count("```python") > 4
    assert said([code for code, _ in blocks]) == [output for _, output in blocks]


@pytest.mark.parametrize("name", ["library", "sources", "review.frame"])
def test_examples_of_docstrings(checkout: Path, name: str) -> None:
    found = doctest.testmod(importlib.import_module(f"kdabench.{name}"))
    assert found.attempted > 0
    assert found.failed == 0


def test_every_public_name_is_there_and_said_to_be() -> None:
    homes = [name for names in kdabench._HOMES.values() for name in names]
    assert sorted(homes) == sorted(kdabench.__all__)
    assert set(kdabench.__all__) <= set(dir(kdabench))
    for name in kdabench.__all__:
        assert getattr(kdabench, name).__name__ == name
        assert getattr(kdabench, name).__doc__
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = kdabench.nothing


@pytest.mark.parametrize("name", kdabench.__all__)
def test_a_name_is_the_same_whatever_was_imported_before(name: str) -> None:
    """Loading one must not put a submodule in the place of another."""
    statement = (
        f"import kdabench; kdabench.{name}; from kdabench import *; print(*[{name}.__name__])"
    )
    done = subprocess.run(
        [sys.executable, "-c", statement], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [name]


CELLS = (Cell("decode", 4, 12), Cell("replay", 4, 12, 4, pending=2))
WORD = Candidate.of("KdaWS", {"form": "chunked", "pdl": True})


def made() -> list[measurements.Measurement]:
    return [
        synthetic.measurement(CELLS[0], synthetic.split(2), [5.0, 7.0, 6.0]),
        synthetic.measurement(CELLS[0], WORD, [4.0], process=1, status="unstable", reason="NA"),
        synthetic.failed(CELLS[1], synthetic.STOCK, "oom"),
    ]


def test_a_table_has_a_row_per_measurement() -> None:
    table = kdabench.frame(made(), synthetic.ENVS)
    assert len(table) == 3
    assert list(table.columns[: len(CELL_FIELDS)]) == list(CELL_FIELDS)
    first, unstable, failed = table.to_dict("records")
    assert (first["time_us"], first["samples"], first["option_split"]) == (6.0, 3, 2)
    assert first["efficiency"] == pytest.approx(CELLS[0].problem.floor_us() / 6.0)
    assert first["gpu"] == "SYNTHETIC ONE"
    assert unstable["option_form"] == "chunked"
    assert pd.isna(unstable["option_split"])
    assert (failed["status"], failed["pending"], failed["samples"]) == ("oom", "2", 0)
    assert pd.isna(failed["time_us"])
    assert "gpu" not in kdabench.frame(made())
    assert kdabench.frame([]).empty


@pytest.mark.parametrize("suffix", frame.FORMATS)
def test_a_table_comes_back_from_its_file(suffix: str, tmp_path: Path) -> None:
    if suffix == ".parquet" and find_spec("pyarrow") is None:
        pytest.skip("pyarrow is not installed")
    table = kdabench.frame(made(), synthetic.ENVS)
    path = tmp_path / f"table{suffix}"
    assert frame.write(table, path) == 3
    if suffix == ".csv":
        again = pd.read_csv(
            path, dtype=table.dtypes.to_dict(), na_values=[""], keep_default_na=False
        )
    else:
        again = pd.read_parquet(path)
    pd.testing.assert_frame_equal(again, table)


def export(*arguments: str) -> int:
    return cli._status(["export", *arguments])


def test_export_writes_a_table(checkout: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert export("results/nvidia-h200/commit.jsonl", "--to", "commit.csv") == 0
    assert capsys.readouterr().out == "925 records in commit.csv\n"
    table = pd.read_csv("commit.csv")
    assert (len(table), set(table["kind"])) == (925, {"commit", "flush"})
    timed = table[table.status == "ok"]
    found = kdabench.load("nvidia-h200", sweep="commit")
    assert len(timed) == sum(m.status == "ok" for m in found)
    assert (timed.time_us > 0).all()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("nvidia-h200", "--to", "a.xlsx"), "a.xlsx: suffix: '.xlsx': one of .csv, .parquet"),
        (("nothing", "--to", "a.csv"), "recorded: nvidia-h200"),
        (("nvidia-h200", "--to", "a.parquet"), "pip install 'kdabench[parquet]'"),
    ],
)
def test_mistakes_of_export_are_one_line(
    arguments: tuple[str, ...],
    expected: str,
    checkout: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(frame, "find_spec", lambda name: None)
    assert export(*arguments) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert error.count("\n") == 1
