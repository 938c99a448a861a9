from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdabench.data import devices
from kdabench.data.devices import Choice, DeviceError, Recorded

AWKWARD = ["NVIDIA H200 MIG 1g.18gb", "NVIDIA H200 MIG 2g.35gb", "A/B", "A B", "A\\B", " ", "", "..", ".", "ビデオ",
           "é", "e", "E", "nvidia h200", "NVIDIA-H200", "NVIDIA  H200", " NVIDIA H200", "x" * 300, "x" * 301, "X" * 300,
           "a\nb", "a\0b", "\ud800", "NVIDIA GeForce RTX 4090"]  # fmt: skip


def test_plain_names_are_readable() -> None:
    assert devices.slug("NVIDIA H200") == "nvidia-h200"
    assert devices.slug("NVIDIA H100 80GB HBM3") == "nvidia-h100-80gb-hbm3"


def test_awkward_names_are_safe_and_distinct() -> None:
    slugs = [devices.slug(name) for name in [*AWKWARD, "NVIDIA H200"]]
    assert len(set(slugs)) == len(slugs)
    for slug in slugs:
        assert re.fullmatch(r"[a-z0-9]+(-{1,2}[a-z0-9]+)*", slug)
        assert len(slug) < 100
    assert devices.slug("NVIDIA H200 MIG 1g.18gb").startswith("nvidia-h200-mig-1g-18gb--")


@given(st.text(max_size=400), st.text(max_size=400))
def test_slugs_of_different_names_differ(a: str, b: str) -> None:
    slugs = devices.slug(a), devices.slug(b)
    assert (slugs[0] == slugs[1]) == (a == b)
    assert all(devices.module_name(slug).replace("_", "a").isalnum() for slug in slugs)


def test_a_name_cannot_imitate_a_digest() -> None:
    lossy = devices.slug("A/B")
    assert devices.slug(lossy.upper()) != lossy
    assert devices.slug(lossy.upper().replace("-", " ")) != lossy


@pytest.mark.parametrize("bad", ["", "..", "a/b", "A", "a_b", "-a", "a\n", "../x"])
def test_only_slugs_name_folders(tmp_path: Path, bad: str) -> None:
    for refuse in (lambda: devices.module_name(bad), lambda: devices.results_folder(tmp_path, bad)):
        with pytest.raises(DeviceError, match="joined by hyphens"):
            refuse()


def test_parse() -> None:
    assert devices.parse("auto") == Choice("auto")
    assert devices.parse("cuda") == Choice("cuda")
    assert devices.parse("cuda:3") == Choice("cuda", index=3)
    assert devices.parse("recorded") == Choice("recorded")
    assert devices.parse("recorded:nvidia-h200") == Choice("recorded", device="nvidia-h200")
    for bad in (
        "",
        "gpu",
        "auto:1",
        "cuda:",
        "cuda:-1",
        "cuda:x",
        "recorded:",
        "recorded:../x",
        "replay",
        "replay:nvidia-h200",
        "cuda:９",
    ):
        with pytest.raises(DeviceError, match="device: "):
            devices.parse(bad)


def test_recorded_runs_find_recorded_devices(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="none in"):
        devices.recorded_source(tmp_path, Choice("auto"))
    for name in ("nvidia-h200", "nvidia-b200"):
        (tmp_path / name).mkdir()
    (tmp_path / "nvidia-h200" / "dispatch.jsonl").touch()
    assert devices.recorded(tmp_path) == ["nvidia-h200"]
    assert devices.recorded_source(tmp_path, Choice("auto")) == Recorded(
        "nvidia-h200", tmp_path / "nvidia-h200"
    )
    with pytest.raises(DeviceError, match=r"no records in .*; recorded: nvidia-h200"):
        devices.recorded_source(tmp_path, Choice("recorded", device="nvidia-b200"))
    (tmp_path / "nvidia-b200" / "quick.jsonl").touch()
    with pytest.raises(DeviceError, match="recorded:nvidia-b200, recorded:nvidia-h200"):
        devices.recorded_source(tmp_path, Choice("recorded"))
