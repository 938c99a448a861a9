"""scripts/convert_measurements.py: files of schema 2 become files of schema 3."""

from __future__ import annotations

import hashlib
import json
import runpy
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from kdabench.data import exported
from kdabench.data.measurements import Candidate, Cell
from support import synthetic

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "convert_measurements.py"))
CELL = Cell("decode", 4, 12)


def row(candidate: Candidate, samples: list[float], **changes: Any) -> dict[str, Any]:
    n = len(samples)
    return {
        "schema": 2,
        "cell": asdict(CELL),
        "variant": candidate.variant,
        "spec": candidate.options,
        "status": "ok",
        "reason": None,
        "process": 0,
        "samples_us": samples,
        "rounds": list(range(n)),
        "sm_clock_mhz": [1980] * n,
        "throttled": [False] * n,
        "unique_bytes": 10**9,
        "bytes_moved": CELL.problem.bytes_moved,
        "code": "stock-0",
        "env": next(iter(synthetic.ENVS)),
    } | changes


def write(folder: Path, *rows: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "env.json").write_text(json.dumps(synthetic.ENVS))
    path = folder / "dispatch.jsonl"
    path.write_text("".join(json.dumps(row, sort_keys=True) + "\n" for row in rows))
    return path


def refused(**changes: Any) -> dict[str, Any]:
    replays = Candidate.of("KdaFused", {})
    told = {"status": "unsupported", "reason": "kind=decode: only replay", "code": ""}
    return row(replays, [], **(told | changes))


def test_a_file_is_converted_once(tmp_path: Path) -> None:
    path = write(tmp_path / "one", row(synthetic.STOCK, [5.00000040000001, 6.0]), refused())
    before = path.read_bytes()
    SCRIPT["main"](tmp_path)
    (found,) = exported.load([path])
    assert found == synthetic.measurement(CELL, synthetic.STOCK, [5.0, 6.0])
    about = json.loads((path.parent / "converted.json").read_text())
    assert about == {
        "dispatch.jsonl": {
            "schema": 2,
            "sha256": hashlib.sha256(before).hexdigest(),
            "rows": 2,
            "dropped": {"kind=decode: only replay": 1},
        }
    }
    after = path.read_bytes()
    SCRIPT["main"](tmp_path)
    assert path.read_bytes() == after
    assert json.loads((path.parent / "converted.json").read_text()) == about


@pytest.mark.parametrize(
    "bad",
    [
        row(synthetic.STOCK, [5.0], schema=1),
        row(synthetic.STOCK, [5.0], bytes_moved=1),
        refused(status="fault"),
    ],
)
def test_what_is_not_converted_stays(tmp_path: Path, bad: dict[str, Any]) -> None:
    path = write(tmp_path / "one", bad)
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"schema=|bytes|yet not unsupported"):
        SCRIPT["main"](tmp_path)
    assert path.read_bytes() == before
