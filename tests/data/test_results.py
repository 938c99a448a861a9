"""A device's folder: which sweep owns a cell, and the files beside the measurements."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kdabench.data import measurements, results
from kdabench.data.measurements import Cell, MeasurementError
from support import synthetic

CELLS = [Cell("decode", requests, 12) for requests in (1, 4, 16)]


def measured(time_us: float, *cells: Cell) -> list[measurements.Measurement]:
    return [synthetic.measurement(cell, synthetic.STOCK, [time_us]) for cell in cells]


def times(found: list[measurements.Measurement]) -> dict[Cell, set[float]]:
    by_cell: dict[Cell, set[float]] = {}
    for m in found:
        by_cell.setdefault(m.cell, set()).add(m.samples_us[0])
    return by_cell


SWEEPS = {
    "dispatch": measured(5.0, *CELLS),
    "quick": measured(6.0, CELLS[0]),
    "holdout": measured(7.0, CELLS[1], Cell("decode", 5, 12)),
}


def test_a_cell_is_owned_by_the_fullest_sweep_or_by_a_preferred_one() -> None:
    assert times(results.owned(SWEEPS))[CELLS[0]] == {5.0}
    assert times(results.owned(SWEEPS, ["quick"]))[CELLS[0]] == {6.0}
    for preferred in ((), ("quick",), ("holdout", "quick")):
        found = times(results.owned(SWEEPS, preferred))
        assert len(found) == 4
        assert all(len(us) == 1 for us in found.values())


def test_a_figure_is_of_one_sweep_and_never_of_held_out_cells() -> None:
    warm = replace(CELLS[0], l2="warm")
    found = times(results.fullest({**SWEEPS, "quick": measured(6.0, CELLS[0], warm)}))
    assert found == {**{cell: {5.0} for cell in CELLS}, warm: {6.0}}


def test_a_folder_is_read_whole_or_by_sweep(tmp_path: Path) -> None:
    for name in ("dispatch", "quick"):
        measurements.dump(SWEEPS[name], tmp_path / f"{name}.jsonl")
    (tmp_path / "env.json").write_text(json.dumps(synthetic.ENVS))
    assert {name: len(found) for name, found in results.by_sweep(tmp_path).items()} == {
        "dispatch": 3,
        "quick": 1,
    }
    assert list(results.by_sweep(tmp_path, "quick")) == ["quick"]
    with pytest.raises(MeasurementError, match="sweep: 'slow': one of dispatch, quick"):
        results.by_sweep(tmp_path, "slow")
    assert results.describe(tmp_path) == ("SYNTHETIC ONE", 100)


def test_one_device_is_expected() -> None:
    other = {**synthetic.ENV, "gpu": "SYNTHETIC TWO"}
    with pytest.raises(ValueError, match=r"here: gpu, sms: .*: one device expected"):
        results.device_of({**synthetic.ENVS, "sha256:1": other}, "here")
    with pytest.raises(ValueError, match="one device expected"):
        results.device_of({}, "here")


@pytest.mark.parametrize(
    ("read", "file", "bad", "good", "expected"),
    [
        (results.held, "held.json", ["KdaWS"], {"KdaWS": "hangs"}, {"KdaWS": "hangs"}),
        (results.held, "held.json", {"KdaWS": ""}, {}, {}),
        (results.weights, "weights.json", {"many": 1}, {"8": 2, "16": 0.5}, {8: 2.0, 16: 0.5}),
        (results.weights, "weights.json", {"8": True}, {}, {}),
        (results.verified, "verified.json", {"variants": []}, {"variants": {}}, {"variants": {}}),
    ],
)
def test_files_beside_are_read_or_named(
    read: Callable[[Path], Any],
    file: str,
    bad: object,
    good: object,
    expected: object,
    tmp_path: Path,
) -> None:
    assert not read(tmp_path)
    (tmp_path / file).write_text(json.dumps(bad))
    with pytest.raises(MeasurementError, match=f"{file}: .*is expected"):
        read(tmp_path)
    (tmp_path / file).write_text(json.dumps(good))
    assert read(tmp_path) == expected
