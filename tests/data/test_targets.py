"""Targets of a device: the file they stand in, and what it may not say."""

from __future__ import annotations

from pathlib import Path

import pytest

from kdabench.data import targets
from kdabench.data.targets import Target, TargetError

RESULTS = Path(__file__).parents[2] / "results"
GOOD = """\
[[target]]
kind = "decode"
tokens = 1
state_dtype = "fp32"
time_us = { 12 = 3.5, 96 = 5.7 }

[[target]]
kind = "commit"
state_dtype = "bf16"
efficiency = 0.9
from_items = 1536
"""


def test_targets_are_read_in_their_order(tmp_path: Path) -> None:
    assert targets.load(tmp_path) == ()
    (tmp_path / targets.FILE).write_text(GOOD)
    assert targets.load(tmp_path) == (
        Target("decode", "fp32", 1, {12: 3.5, 96: 5.7}),
        Target("commit", "bf16", efficiency=0.9, from_items=1536),
    )


def test_recorded_devices_have_targets_that_can_be_read() -> None:
    found = {path.parent.name: targets.load(path.parent) for path in RESULTS.glob("*/targets.toml")}
    assert len(found["nvidia-h200"]) == 9


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"decode"', '"prefill"', "target 1: kind: 'prefill': one of decode, spec"),
        ('"bf16"', '"fp8"', "target 2: state_dtype: 'fp8': one of fp32, bf16"),
        ("tokens = 1", "tokens = 9", "target 1: tokens: 9: a count in 1..8"),
        ("tokens = 1", "token = 1", "target 1: token: one of efficiency, "),
        ('state_dtype = "bf16"\n', "", "target 2: state_dtype: is required"),
        ("12 = 3.5", "some = 3.5", "target 1: time_us: 'some': a table of microseconds by"),
        ("12 = 3.5", "0 = 3.5", "target 1: time_us: 0: a number of items is a count >= 1"),
        ("12 = 3.5", "12 = -3.5", "target 1: time_us.12: -3.5: microseconds above 0"),
        ("{ 12 = 3.5, 96 = 5.7 }", "3.5", "target 1: time_us: 3.5: a table of microseconds by"),
        ("time_us = { 12 = 3.5, 96 = 5.7 }\n", "", "target 1: time_us, efficiency: one of them"),
        ("= 0.9", "= 92", "target 2: efficiency: 92: a ratio above 0, at most 1"),
        ("from_items = 1536", "", "target 2: efficiency: 0.9: stands together with from_items"),
        ("= 1536", "= 1536.0", "target 2: from_items: 1536.0: a count >= 1"),
        ("[[target]]", "[[goal]]", "keys: ['goal', 'target']: only [[target]] is expected"),
        ("[[target]]", "[[target", "not TOML: "),
    ],
)
def test_a_malformed_file_is_named_in_one_line(
    tmp_path: Path, old: str, new: str, message: str
) -> None:
    path = tmp_path / targets.FILE
    path.write_text(GOOD.replace(old, new, 1))
    with pytest.raises(TargetError) as error:
        targets.load(tmp_path)
    assert str(error.value).startswith(f"{path}: {message}")
    assert "\n" not in str(error.value)
