from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest

from kdabench.data import measurements
from kdabench.data.measurements import Cell, Measurement, MeasurementError
from support import synthetic

CELL = Cell("decode", 4, 12)


def test_the_text_tells_everything() -> None:
    one = synthetic.measurement(CELL, synthetic.STOCK, [5.0])
    changes = {
        "cell": Cell("decode", 4, 13),
        "candidate": synthetic.split(1),
        "samples_us": (5.0000001,),
        "rounds": (1,),
        "sm_clock_mhz": (None,),
        "throttled": (None,),
        "process": 1,
        "unique_bytes": 1,
    }
    changed = [
        replace(one, **{field.name: changes.get(field.name, "other")})  # type: ignore[arg-type]
        for field in fields(Measurement)
    ]
    assert len({one.text, *(other.text for other in changed)}) == 1 + len(fields(Measurement))
    assert replace(one).text == one.text


@pytest.mark.parametrize(
    "text", ["NaN", "[Infinity]", '{"a": 1, "a": 2}', "", "{", "[" * 100_000, "1e", "9" * 5000]
)
def test_lax_json_is_refused(text: str) -> None:
    with pytest.raises(MeasurementError, match=r"^here: not strict JSON"):
        measurements.parse_json(text, "here")


def test_write_atomic_leaves_the_old_file_on_failure(tmp_path: Path) -> None:
    path = tmp_path / "a"
    measurements.write_atomic(path, "old")
    with pytest.raises(UnicodeEncodeError):
        measurements.write_atomic(path, "new \ud800")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
