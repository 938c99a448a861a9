"""What `doctor` finds on a whole, a broken and a bare machine."""

from __future__ import annotations

import json
import os
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from kda_kernels import identity, variants
from kdabench.checks import binaries, doctor


def found(results: Path) -> dict[str, doctor.Finding]:
    return {finding.name: finding for finding in doctor.examine(results)}


def test_this_machine(tmp_path: Path) -> None:
    findings = found(tmp_path)
    assert {"python", "torch", "triton", "nvidia-cutlass-dsl", "kernel cache", "results"} <= set(
        findings
    )
    assert findings["python"].state == "ok"
    assert findings["results"].state == "absent"
    for finding in findings.values():
        assert (finding.repair is not None) == (finding.state == "missing"), finding


def test_without_a_gpu_nothing_needed_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doctor, "_nvml_devices", list)
    assert found(tmp_path)["gpu"].state == "absent"


def test_cpu_torch_beside_a_gpu_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(doctor, "_nvml_devices", lambda: [("NVIDIA H200", "570.1")])
    monkeypatch.setattr(torch.version, "cuda", None)
    findings = found(tmp_path)
    assert findings["gpu 0"].found == "NVIDIA H200, driver 570.1"
    assert findings["torch"].state == "missing"
    assert "CPU build" in findings["torch"].found


def test_missing_and_broken_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version = metadata.version

    def without_triton(name: str) -> str:
        if name == "triton":
            raise metadata.PackageNotFoundError(name)
        return version(name)

    def broken(name: str) -> Any:
        raise (
            ImportError("libfoo.so: cannot open\nmore")
            if name == "pandas"
            else ModuleNotFoundError(name)
        )

    monkeypatch.setattr(metadata, "version", without_triton)
    monkeypatch.setattr("importlib.import_module", broken)
    findings = {finding.name: finding for finding in doctor._packages()}
    assert (findings["triton"].state, findings["triton"].found) == ("missing", "not installed")
    assert findings["pandas"].found == "does not import: libfoo.so: cannot open"


def test_a_version_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metadata, "requires", lambda name: ["torch", "numpy>=99"])
    findings = {finding.name: finding for finding in doctor._packages()}
    assert findings["torch"].state == "ok"
    assert findings["numpy"].state == "missing"
    assert findings["numpy"].found.endswith("; >=99 needed")


def test_what_is_needed_is_what_the_installation_says(monkeypatch: pytest.MonkeyPatch) -> None:
    said = ["torch>=2", "rich; extra == 'suite'", "mypy; extra == 'test'"]
    monkeypatch.setattr(metadata, "requires", lambda name: said)
    assert [need.name for need in doctor.required()] == ["torch", "rich"]


def test_a_source_tree_that_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> list[str]:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", missing)
    (finding,) = doctor._packages()
    assert (finding.name, finding.repair) == ("kdabench", "make setup")


def test_unusable_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KDA_KERNELS_CACHE", str(tmp_path / "file" / "cache"))
    (finding,) = doctor._cache()
    assert finding.state == "missing"
    assert "KDA_KERNELS_CACHE" in (finding.repair or "")


def verified(tmp_path: Path, content: object) -> doctor.Finding:
    folder = tmp_path / "results" / "some-gpu"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "dispatch.jsonl").write_text("")
    if content is not None:
        (folder / "verified.json").write_text(json.dumps(content))
    return {f.name: f for f in doctor._results(tmp_path / "results")}["verified on some-gpu"]


def manifest(tmp_path: Path, **written: str) -> None:
    """Every binary that is verified, by its variant's name."""
    ours = [name for name in variants.NAMES if variants.declared(name).binaries]
    digests = {name: dict.fromkeys(binaries.named(name), name) for name in ours}
    sources = {name: variants.digest(name) for name in ours} | written
    path = binaries.path_of("sm_90a", tmp_path / binaries.FOLDER)
    binaries.write(binaries.Manifest("sm_90a", "4.8.1 cu13", sources, digests), path)


def test_verified_results(tmp_path: Path) -> None:
    current: dict[str, Any] = {name: {"binaries": [name], "failed": []} for name in variants.NAMES}
    current["stock"]["binaries"] = [identity.binary("stock", None)]

    def found(variants: dict[str, Any] = current) -> doctor.Finding:
        return verified(tmp_path, {"env": {"capability": "9.0"}, "variants": variants})

    assert verified(tmp_path, None).found == "never verified"
    assert "no manifest of binaries" in found().found
    manifest(tmp_path)
    assert found().state == "ok"
    assert verified(tmp_path, {}).state == "missing"
    assert found(
        current | {"stock": current["stock"] | {"failed": [{"verdict": "out differs"}]}}
    ).found == ("failing cases: stock")
    assert (
        "KdaSplit" in found(current | {"KdaSplit": {"binaries": ["another"], "failed": []}}).found
    )
    manifest(tmp_path, KdaWide="sha256:0")
    assert found().found == "sources changed since the manifest of binaries: KdaWide"
    assert found().repair == "kdabench binaries --check --arch sm_90a"
    assert sorted(os.listdir(tmp_path)) == ["kernels", "results"]
