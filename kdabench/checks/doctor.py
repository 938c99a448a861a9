"""What this machine has and lacks: interpreter, libraries, GPU, cache, and whether the recorded
results are current.

Every check is a function that returns findings; nothing here raises for a broken installation.
"""

from __future__ import annotations

import importlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

State = Literal["ok", "missing", "absent"]

_PACKAGES = {
    "numpy": "numpy",
    "pandas": "pandas",
    "matplotlib": "matplotlib",
    "triton": "triton",
    "nvidia-cutlass-dsl": "cutlass",
    "nvidia-ml-py": "pynvml",
}
_ARCHS = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a"}


@dataclass(frozen=True)
class Finding:
    """state: ok; missing, with the `repair` that mends it; absent, where the suite does without."""

    name: str
    state: State
    found: str
    repair: str | None = None


def examine(results: Path) -> list[Finding]:
    """All findings about this machine and the recorded results."""
    checks: tuple[Callable[[], Iterator[Finding]], ...] = (_python, _torch, _packages, _gpu, _cache)
    findings = [finding for check in checks for finding in check()]
    return findings + list(_results(results))


def _python() -> Iterator[Finding]:
    version = ".".join(map(str, sys.version_info[:3]))
    if (3, 11) <= sys.version_info[:2] < (3, 14):
        yield Finding("python", "ok", version)
    else:
        yield Finding(
            "python", "missing", f"{version}; 3.11 to 3.13 needed", "make setup PYTHON=python3.11"
        )


def _importable(name: str, module: str) -> tuple[Any, Finding]:
    """The module, or None, and the finding about it."""
    try:
        version = metadata.version(name)
        return importlib.import_module(module), Finding(name, "ok", version)
    except metadata.PackageNotFoundError:
        return None, Finding(name, "missing", "not installed", "make setup")
    except Exception as error:  # a broken extension module raises anything
        first = str(error).strip().splitlines()[:1]
        return None, Finding(name, "missing", f"does not import: {' '.join(first)}", "make setup")


def _torch() -> Iterator[Finding]:
    torch, finding = _importable("torch", "torch")
    if torch is None:
        yield finding
        return
    cuda = torch.version.cuda
    build = f"{torch.__version__}, {'CUDA ' + cuda if cuda else 'CPU'} build"
    if cuda is None and _nvml_devices():
        repair = "pip uninstall -y torch && rm -f .venv/setup-stamp && make setup"
        yield Finding("torch", "missing", f"{build}, although this machine has a GPU", repair)
        return
    yield Finding("torch", "ok", build)
    if cuda is not None and cuda.startswith("13."):
        try:
            yield Finding(
                "cutlass for CUDA 13", "ok", metadata.version("nvidia-cutlass-dsl-libs-cu13")
            )
        except metadata.PackageNotFoundError:
            yield Finding(
                "cutlass for CUDA 13",
                "missing",
                "not installed",
                "pip install 'nvidia-cutlass-dsl[cu13]'",
            )


def _packages() -> Iterator[Finding]:
    for name, module in _PACKAGES.items():
        yield _importable(name, module)[1]


def _nvml_devices() -> list[tuple[str, str]]:
    """Name and driver version of each NVIDIA GPU; empty without a driver."""
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        driver = _text(pynvml.nvmlSystemGetDriverVersion())
        count = pynvml.nvmlDeviceGetCount()
        return [
            (_text(pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(i))), driver)
            for i in range(count)
        ]
    except pynvml.NVMLError:
        return []
    finally:
        pynvml.nvmlShutdown()


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def _gpu() -> Iterator[Finding]:
    devices = _nvml_devices()
    if not devices:
        yield Finding(
            "gpu", "absent", "no NVIDIA GPU or driver: sweep and run use recorded measurements"
        )
        return
    for index, (name, driver) in enumerate(devices):
        yield Finding(f"gpu {index}", "ok", f"{name}, driver {driver}")
    try:
        import torch

        usable = torch.cuda.is_available()
        capability = torch.cuda.get_device_capability(0) if usable else None
    except Exception as error:  # a driver too old, a library that doesn't load
        yield Finding("cuda", "missing", str(error).splitlines()[0], "make setup")
        return
    if capability is None:
        yield Finding(
            "cuda", "missing", "torch finds no usable device", "a driver for torch's CUDA version"
        )
    elif capability not in _ARCHS:
        known = ", ".join(_ARCHS.values())
        found = f"compute capability {capability[0]}.{capability[1]}; the kernels are for {known}"
        yield Finding("cuda", "missing", found, "another GPU, or: --device recorded:nvidia-h200")
    else:
        yield Finding("cuda", "ok", f"usable from torch, {_ARCHS[capability]}")


def _cache() -> Iterator[Finding]:
    try:
        from kda_kernels.device.cubin import cache_dir

        folder = cache_dir()
    except Exception as error:
        yield Finding(
            "kernel cache", "missing", f"kda_kernels does not import: {error}", "make setup"
        )
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        repair = "export KDA_KERNELS_CACHE=/a/folder/you/can/write"
        yield Finding("kernel cache", "missing", f"{folder}: {error.strerror}", repair)
        return
    kept = sum(1 for _ in folder.glob("*.cubin"))
    yield Finding("kernel cache", "ok", f"{folder}, {kept} kernel{'s' * (kept != 1)}")


def _results(results: Path) -> Iterator[Finding]:
    """Per recorded device: are its records there, and were the kernels verified as they are now?"""
    from kdabench.data import devices

    recorded = devices.recorded(results)
    if not recorded:
        yield Finding(
            "results",
            "absent",
            f"no records in {results}: run from the checkout, or give --results",
        )
        return
    for slug in recorded:
        files = len(list((results / slug).glob("*.jsonl")))
        yield Finding(f"results of {slug}", "ok", f"{files} file{'s' * (files != 1)} of records")
        yield _verified(results / slug, slug)


def _verified(folder: Path, slug: str) -> Finding:
    name, repair = f"verified on {slug}", "kdabench verify   (on that GPU)"
    try:
        from kda_kernels import variants
        from kdabench.checks import binaries

        content = json.loads((folder / "verified.json").read_text())
        known, arch = content["variants"], binaries.arch_of(content.get("env", {}))
        manifest = binaries.read(binaries.path_of(arch, folder.parents[1] / binaries.FOLDER))
        if unproven := binaries.unproven(manifest, variants.NAMES):
            found = f"sources changed since the manifest of binaries: {', '.join(unproven)}"
            return Finding(name, "missing", found, f"kdabench binaries --check --arch {arch}")
        stale = []
        for variant in variants.NAMES:
            if not binaries.to_verify(variant, manifest) <= set(
                known.get(variant, {}).get("binaries", ())
            ):
                stale.append(variant)
        failed = [v for v in variants.NAMES if known.get(v, {}).get("failed")]
    except FileNotFoundError:
        return Finding(name, "missing", "never verified", repair)
    except Exception as error:
        return Finding(name, "missing", f"cannot tell: {type(error).__name__}: {error}", repair)
    if stale:
        return Finding(
            name, "missing", f"changed since, or never verified: {', '.join(stale)}", repair
        )
    if failed:
        return Finding(name, "missing", f"failing cases: {', '.join(failed)}", repair)
    return Finding(name, "ok", f"{len(known)} variants, binaries as verified")
