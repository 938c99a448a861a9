from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kdabench import device
from kdabench.device import Choice, DeviceError

AWKWARD = ["NVIDIA H200 MIG 1g.18gb", "NVIDIA H200 MIG 2g.35gb", "A/B", "A B", "A\\B", " ", "", "..", ".", "ビデオ",
           "é", "e", "E", "nvidia h200", "NVIDIA-H200", "NVIDIA  H200", " NVIDIA H200", "x" * 300, "x" * 301, "X" * 300,
           "a\nb", "a\0b", "\ud800", "NVIDIA GeForce RTX 4090"]  # fmt: skip


def test_plain_names_are_readable() -> None:
    assert device.slug("NVIDIA H200") == "nvidia-h200"
    assert device.slug("NVIDIA H100 80GB HBM3") == "nvidia-h100-80gb-hbm3"


def test_awkward_names_are_safe_and_distinct() -> None:
    slugs = [device.slug(name) for name in [*AWKWARD, "NVIDIA H200"]]
    assert len(set(slugs)) == len(slugs)
    for slug in slugs:
        assert re.fullmatch(r"[a-z0-9]+(-{1,2}[a-z0-9]+)*", slug)
        assert len(slug) < 100
    assert device.slug("NVIDIA H200 MIG 1g.18gb").startswith("nvidia-h200-mig-1g-18gb--")


@given(st.text(max_size=400), st.text(max_size=400))
def test_slugs_of_different_names_differ(a: str, b: str) -> None:
    slugs = device.slug(a), device.slug(b)
    assert (slugs[0] == slugs[1]) == (a == b)
    assert all(device.module_name(slug).replace("_", "a").isalnum() for slug in slugs)


def test_a_name_cannot_imitate_a_digest() -> None:
    lossy = device.slug("A/B")
    assert device.slug(lossy.upper()) != lossy
    assert device.slug(lossy.upper().replace("-", " ")) != lossy


@pytest.mark.parametrize("bad", ["", "..", "a/b", "A", "a_b", "-a", "a\n", "../x"])
def test_only_slugs_name_folders(tmp_path: Path, bad: str) -> None:
    for refuse in (lambda: device.module_name(bad), lambda: device.results_folder(tmp_path, bad)):
        with pytest.raises(DeviceError, match="joined by hyphens"):
            refuse()


def test_parse() -> None:
    assert device.parse("auto") == Choice("auto")
    assert device.parse("cuda") == Choice("cuda")
    assert device.parse("cuda:3") == Choice("cuda", index=3)
    assert device.parse("replay") == Choice("replay")
    assert device.parse("replay:nvidia-h200") == Choice("replay", device="nvidia-h200")
    for bad in ("", "gpu", "auto:1", "cuda:", "cuda:-1", "cuda:x", "replay:", "replay:../x", "cuda:９"):
        with pytest.raises(DeviceError, match="device: "):
            device.parse(bad)


def test_replays_find_recorded_devices(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="none in"):
        device.replayed(tmp_path, Choice("auto"))
    for name in ("nvidia-h200", "nvidia-b200"):
        (tmp_path / name).mkdir()
    (tmp_path / "nvidia-h200" / "dispatch.jsonl").touch()
    assert device.recorded(tmp_path) == ["nvidia-h200"]
    assert device.replayed(tmp_path, Choice("auto")) == "nvidia-h200"
    with pytest.raises(DeviceError, match=r"no records in .*; recorded: nvidia-h200"):
        device.replayed(tmp_path, Choice("replay", device="nvidia-b200"))
    (tmp_path / "nvidia-b200" / "quick.jsonl").touch()
    with pytest.raises(DeviceError, match="replay:nvidia-b200, replay:nvidia-h200"):
        device.replayed(tmp_path, Choice("replay"))
