"""results/*/verified.json speaks of the kernels as they are now: who changes a kernel verifies it on a GPU again."""

import json
from pathlib import Path

import pytest

from kda_kernels import variants

FILES = sorted((Path(__file__).parent.parent / "results").glob("*/verified.json"))


def test_there_is_a_verified_device() -> None:
    assert FILES


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.parent.name)
@pytest.mark.parametrize("name", variants.NAMES)
def test_every_variant_was_verified_as_it_stands(path: Path, name: str) -> None:
    found = json.loads(path.read_text())["variants"].get(name)
    assert found is not None, f"kdabench verify --variant {name}"
    assert not found["failed"]
    assert found["passed"] > 0
    assert found["kernel_digest"] == variants.digest(name), f"{name} changed: kdabench verify --variant {name}"
