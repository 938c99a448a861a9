"""results/*/verified.json speaks of the kernels as they are now: who changes a kernel verifies it
on a GPU again.

A variant with failed cases, or one that held.json keeps back for another reason, is in no policy.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kda_kernels import identity, variants
from kda_kernels.device.gpu import Gpu
from kdabench.checks import binaries, verify
from kdabench.data import measurements, results
from kdabench.policy import emit

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "results").glob("*/verified.json"))


def test_there_is_a_verified_device() -> None:
    assert FILES


@pytest.fixture(params=FILES, ids=lambda path: path.parent.name)
def path(request: pytest.FixtureRequest) -> Path:
    found: Path = request.param
    return found


@pytest.mark.parametrize("name", variants.NAMES)
def test_every_variant_was_verified_as_it_stands(path: Path, name: str) -> None:
    content = json.loads(path.read_text())
    found = content["variants"].get(name)
    assert found is not None, f"kdabench verify --variant {name}"
    assert found["passed"] > 0
    gpu = Gpu(binaries.arch_of(content["env"]), content["env"]["sms"])
    stale = verify.stale(name, found, _manifest(gpu.arch), gpu)
    assert stale == [], (
        f"{len(stale)} binaries or launches are not as verified: kdabench verify --variant {name}"
    )
    assert found["failed"] == [] or name in results.held(path.parent)


def _manifest(arch: str) -> binaries.Manifest:
    return binaries.read(binaries.path_of(arch, ROOT / binaries.FOLDER))


def test_every_measurement_is_of_a_binary_and_a_launch_of_today(path: Path) -> None:
    """By what the manifest says of the binary, and by what the host would ask of the driver."""
    content = json.loads(path.read_text())
    gpu = Gpu(binaries.arch_of(content["env"]), content["env"]["sms"])
    manifest, wrong, checked = _manifest(gpu.arch), [], set()
    measured = (
        measurement
        for file in sorted(path.parent.glob("*.jsonl"))
        for measurement in measurements.load([file])
    )
    for measurement in measured:
        variant, problem = measurement.candidate.variant, measurement.cell.problem
        if not measurement.code or (what := (measurement.candidate, problem)) in checked:
            continue
        checked.add(what)
        options = variants.make_options(variant, dict(measurement.candidate.options))
        if not variants.declared(variant).binaries:
            binary: str | None = identity.binary(variant, None)
        else:
            binary = manifest.digest(variant, binaries.name(binaries.case_of(measurement)))
        if measurement.code != f"{binary}-{identity.launch(variant, problem, options, gpu)}":
            wrong.append(f"{measurement.candidate} {measurement.cell.key}")
    assert len(checked) > 1000
    assert wrong == []


def test_a_change_is_told_by_what_it_touches(path: Path) -> None:
    content = json.loads(path.read_text())
    gpu = Gpu(binaries.arch_of(content["env"]), content["env"]["sms"])
    found, manifest = content["variants"]["KdaWS"], _manifest(gpu.arch)
    changed = {**manifest.binaries["KdaWS"], "decode q1 fp32 dim-first": "0" * 16}
    other = replace(manifest, binaries=manifest.binaries | {"KdaWS": changed})
    assert verify.stale("KdaWS", found, other, gpu) == ["KdaWS decode q1 fp32 dim-first"]
    divided = {**found, "launches": {**found["launches"], "record": "0" * 16}}
    assert verify.stale("KdaWS", divided, manifest, gpu) == ["KdaWS launches of record"]


def test_the_policy_picks_no_variant_that_is_held_back(path: Path) -> None:
    held = results.held(path.parent)
    policy: Any = emit.load((path.parent / "policy.py").read_text())
    for heads in (3, 6, 12, 24, 48, 96):
        for requests in (1, 2, 7, 16, 64, 256, 512):
            for kind, tokens in (("decode", 1), ("spec", 4), ("record", 2), ("record", 8)):
                assert policy.choose(heads, requests, tokens, kind).variant not in held
