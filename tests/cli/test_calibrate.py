"""Ceilings from the command line: measured, kept, and what is shown with and without them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kdabench import cli
from kdabench.cli import inputs, policies
from kdabench.data import exported, roofline
from kdabench.data.measurements import Cell
from kdabench.data.roofline import Ceilings
from kdabench.measure import calibration
from kdabench.measure.calibration import CalibrationError
from support import synthetic

NAME, SLUG = synthetic.ENV["gpu"], "synthetic-one"
GPU = inputs.Device("cuda:1", NAME, SLUG, 100)
RECORDED = inputs.Device(f"replay:{SLUG}", NAME, SLUG, 100)
FOUND = Ceilings(synthetic.ROOFLINE, "made up", {"gpu": NAME})
CELL = Cell("decode", 8, 12)


@pytest.fixture
def kdabench(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Any:
    floor_us = synthetic.ROOFLINE.floor_us(CELL.problem)
    row = synthetic.measurement(CELL, synthetic.STOCK, [2 * floor_us] * 3)
    exported.dump([row], tmp_path / "results" / SLUG / "dispatch.jsonl")
    (tmp_path / "results" / SLUG / "env.json").write_text(json.dumps(synthetic.ENVS))
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        status = cli._status(list(arguments))
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def measuring(monkeypatch: pytest.MonkeyPatch, answer: Ceilings | Exception) -> list[int]:
    """Pretend that there is a GPU with this answer; which ones are asked."""
    asked: list[int] = []

    def on_gpu(index: int) -> Ceilings:
        asked.append(index)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(inputs, "find_device", lambda choice, results: GPU)
    monkeypatch.setattr(calibration, "on_gpu", on_gpu)
    return asked


def test_ceilings_are_kept_with_the_device_and_shown(
    kdabench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert efficiencies(kdabench) == [None]
    assert measuring(monkeypatch, FOUND) == []
    status, out, err = kdabench("calibrate", "--device", "cuda:1", "--json")
    assert (status, err) == (0, "")
    assert json.loads(out)["ceilings"] == FOUND.to_json()
    assert roofline.load(Path("results") / SLUG) == FOUND
    assert efficiencies(kdabench) == [0.5]


def efficiencies(kdabench: Any) -> list[float | None]:
    status, out, _ = kdabench("show", SLUG, "--heads", "12", "--json")
    assert status == 0
    return [row["efficiency"] for row in json.loads(out)]


def test_without_ceilings_efficiency_is_a_dash(kdabench: Any) -> None:
    _, out, _ = kdabench("show", SLUG, "--heads", "12")
    heading, row = out.splitlines()[0], out.splitlines()[-1]
    assert row[heading.index("floor/time") :].split()[0] == "-"


def test_what_can_not_be_measured_is_a_finding(
    kdabench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    measuring(monkeypatch, CalibrationError("read: spread 9%"))
    assert kdabench("calibrate") == (1, "", "kdabench: read: spread 9%\n")
    assert roofline.load(Path("results") / SLUG) is None


def test_a_malformed_file_is_one_line(kdabench: Any) -> None:
    (Path("results") / SLUG / "ceilings.json").write_text("{}")
    status, out, err = kdabench("show", SLUG, "--heads", "12")
    assert (status, out) == (2, "")
    assert err.startswith(f"kdabench: results/{SLUG}/ceilings.json: keys: []: ")
    assert err.count("\n") == 1


def test_a_run_measures_ceilings_first(
    kdabench: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, results = Path("out/dispatch"), Path("results")
    assert policies._ceilings(RECORDED, folder, results) is None
    asked = measuring(monkeypatch, FOUND)
    assert policies._ceilings(GPU, folder, results) == synthetic.ROOFLINE
    assert asked == [1]
    assert "calibrating SYNTHETIC ONE (cuda:1)" in capsys.readouterr().err
    assert roofline.load(folder) == FOUND
    assert roofline.load(results / SLUG) is None


def test_a_run_goes_on_with_recorded_ceilings(
    kdabench: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measuring(monkeypatch, CalibrationError("read: spread 9%"))
    folder, results = Path("out/dispatch"), Path("results")
    assert policies._ceilings(GPU, folder, results) is None
    assert "warning: not calibrated: read: spread 9%" in capsys.readouterr().err
    roofline.save(FOUND, results / SLUG)
    assert policies._ceilings(GPU, folder, results) == synthetic.ROOFLINE
    assert policies._ceilings(RECORDED, folder, results) == synthetic.ROOFLINE
    assert roofline.load(folder) is None
