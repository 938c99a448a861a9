"""results/*/verified.json speaks of the kernels as they are now: who changes a kernel verifies it on a GPU again.

A variant with failed cases, or one that held.json keeps back for another reason, is in no policy.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from kda_kernels import variants
from kdabench import emit

FILES = sorted((Path(__file__).parent.parent / "results").glob("*/verified.json"))


def test_there_is_a_verified_device() -> None:
    assert FILES


@pytest.fixture(params=FILES, ids=lambda path: path.parent.name)
def path(request: pytest.FixtureRequest) -> Path:
    found: Path = request.param
    return found


@pytest.mark.parametrize("name", variants.NAMES)
def test_every_variant_was_verified_as_it_stands(path: Path, name: str) -> None:
    found = json.loads(path.read_text())["variants"].get(name)
    assert found is not None, f"kdabench verify --variant {name}"
    assert found["passed"] > 0
    assert found["kernel_digest"] == variants.digest(name), f"{name} changed: kdabench verify --variant {name}"
    assert found["failed"] == [] or name in emit.held(path.parent)


def test_the_policy_picks_no_variant_that_is_held_back(path: Path) -> None:
    held = emit.held(path.parent)
    policy: Any = emit.load((path.parent / "policy.py").read_text())
    for heads in (3, 6, 12, 24, 48, 96):
        for requests in (1, 2, 7, 16, 64, 256, 512):
            for kind, tokens in (("decode", 1), ("spec", 4), ("record", 2), ("record", 8)):
                assert policy.choose(heads, requests, tokens, kind).variant not in held
