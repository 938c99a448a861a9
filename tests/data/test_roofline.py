"""Ceilings: floors that follow from them, and the file they lie in."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kda_kernels.problem import Problem
from kdabench.data import roofline
from kdabench.data.roofline import Ceilings, Roofline, RooflineError

RESULTS = Path(__file__).parents[2] / "results"

KINDS: dict[str, Callable[[int, int], Problem]] = {
    "decode": lambda H, R: Problem("decode", R, H),
    "record4": lambda H, R: Problem("record", R, H, 4),
    "record8": lambda H, R: Problem("record", R, H, 8),
    "replay4": lambda H, R: Problem("replay", R, H, 4, pending=4),
    "replay8": lambda H, R: Problem("replay", R, H, 8, pending=8),
}


@pytest.mark.parametrize(
    ("heads", "requests", "floors_us"),
    [
        (12, 1, (1.4, 1.2, 1.3, 1.4, 1.5)),
        (12, 8, (4.1, 2.9, 3.2, 4.5, 4.9)),
        (12, 32, (13.4, 8.4, 9.8, 15.0, 16.7)),
        (12, 128, (50.7, 30.5, 36.0, 56.8, 63.8)),
        (96, 64, (200.7, 119.8, 141.7, 224.9, 253.1)),
    ],
)
def test_floors_equal_the_published_table(
    heads: int, requests: int, floors_us: tuple[float, ...]
) -> None:
    h200 = roofline.of("NVIDIA H200", RESULTS / "nvidia-h200")
    assert h200 is not None
    got = [h200.floor_us(make(heads, requests)) for make in KINDS.values()]
    # The table has one decimal, and charges a record's writes at the update bandwidth, which makes
    # up to 0.7 %.
    assert got == pytest.approx(floors_us, abs=0.06, rel=0.012)


def test_what_only_reads_the_state_has_the_ceiling_of_reading() -> None:
    ceilings = Roofline(read_bytes_per_us=4e6, update_bytes_per_us=2e6, launch_us=0.5)
    record, decode = Problem("record", 8, 12, 4), Problem("decode", 8, 12)
    assert ceilings.floor_us(record) == pytest.approx(record.bytes_moved / 4e6 + 0.5)
    assert ceilings.floor_us(decode) == pytest.approx(decode.bytes_moved / 2e6 + 0.5)
    assert ceilings.efficiency(decode, 2 * ceilings.floor_us(decode)) == 0.5


@pytest.mark.parametrize("name", roofline.CEILINGS)
@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), True, None, "4e6"])
def test_ceilings_are_numbers_above_nothing(name: str, value: Any) -> None:
    values = {"read_bytes_per_us": 4e6, "update_bytes_per_us": 2e6, "launch_us": 0.5, name: value}
    with pytest.raises(RooflineError, match=f"{name}: .*: a finite number above 0 is expected"):
        Roofline(**values)


def ceilings(gpu: str = "SYNTHETIC ONE") -> Ceilings:
    readings = ({"what": "read", "best_us": 1.25},)
    return Ceilings(Roofline(4e6, 2e6, 0.5), "made up", {"gpu": gpu, "sms": 100}, readings)


def test_a_file_says_what_was_saved(tmp_path: Path) -> None:
    assert roofline.load(tmp_path) is None
    path = roofline.save(ceilings(), tmp_path)
    first = path.read_bytes()
    assert roofline.load(tmp_path) == ceilings()
    assert roofline.save(ceilings(), tmp_path).read_bytes() == first


def test_of_several_folders_the_first_with_this_gpu_counts(tmp_path: Path) -> None:
    run, other, home = (tmp_path / name for name in ("run", "other", "home"))
    roofline.save(ceilings("SYNTHETIC TWO"), other)
    roofline.save(ceilings(), home)
    assert roofline.of("SYNTHETIC ONE", run, other, home) == ceilings().roofline
    assert roofline.of("SYNTHETIC ONE", run, other) is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"launch_us": -1}, "launch_us: -1: a finite number above 0"),
        ({"speed": 1}, "keys: .*'speed'"),
        ({"note": ""}, "note: '': a sentence"),
        ({"env": {}}, "env: {}: an environment with `gpu`"),
        ({"readings": {}}, "readings: {}: a list"),
        ({"readings": [1]}, "readings: .1.: a list of objects"),
    ],
)
def test_a_malformed_file_is_named_in_one_line(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    path = tmp_path / roofline.FILE
    path.write_text(json.dumps({**ceilings().to_json(), **change}))
    with pytest.raises(RooflineError, match=f"^{path}: {message}") as error:
        roofline.load(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["[]", "{", '{"launch_us": NaN}'])
def test_so_is_what_is_no_object(tmp_path: Path, text: str) -> None:
    (tmp_path / roofline.FILE).write_text(text)
    with pytest.raises(RooflineError, match=f"^{tmp_path / roofline.FILE}: "):
        roofline.load(tmp_path)
