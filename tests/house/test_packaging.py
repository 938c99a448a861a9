"""The kernels are a distribution of their own: it needs nothing of the suite."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]

ALONE = """
import sys

class NoSuite:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "kdabench":
            raise ModuleNotFoundError(f"{name}: the kernels must do without")

sys.meta_path.insert(0, NoSuite())
import kda_kernels
from kda_kernels import cases, operands, variants
from kda_kernels.device.gpu import Gpu
from kda_kernels.policies import nvidia_h200
from kda_kernels.problem import Problem
from kda_kernels.serving import commits, prepared

assert not any(name.partition(".")[0] == "kdabench" for name in sys.modules)
for name in variants.NAMES:
    module = variants.load(name)
    first = next(iter(cases.verify_cases(name)))
    spec = variants.make_options(name, dict(first.options))
    assert module.unsupported(first.problem, spec, Gpu("sm_90a", 132)) is None, name
assert nvidia_h200.choose(12, 1, 1, "decode").variant in variants.NAMES
print(*kda_kernels.__path__)
"""


def project(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
    return found


def test_both_distributions_need_the_same() -> None:
    both, kernels = project(ROOT / "pyproject.toml"), project(ROOT / "kernels" / "pyproject.toml")
    assert set(kernels["dependencies"]) <= set(both["dependencies"])
    for key in ("version", "license", "requires-python"):
        assert kernels[key] == both[key]


def test_the_kernels_install_and_work_alone(tmp_path: Path) -> None:
    source, wheels, site = (tmp_path / name for name in ("kernels", "wheels", "site"))
    shutil.copytree(
        ROOT / "kernels",
        source,
        ignore=shutil.ignore_patterns("__pycache__", "build", "*.egg-info"),
    )
    build = (
        "wheel",
        "--quiet",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-w",
        wheels,
        source,
    )
    subprocess.run([sys.executable, "-m", "pip", *map(str, build)], check=True, capture_output=True)
    (wheel,) = wheels.glob("kda_kernels-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if name.startswith("kda_kernels/")}
        archive.extractall(site)
    package = ROOT / "kernels" / "kda_kernels"
    written = {str(path.relative_to(package.parent)) for path in package.rglob("*.py")}
    assert names == {*written, "kda_kernels/py.typed"}
    done = subprocess.run(
        [sys.executable, "-c", ALONE],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(site / "kda_kernels")]
