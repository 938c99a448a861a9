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

import pytest
from packaging.requirements import Requirement
from test_imports import imports

from kdabench.checks.doctor import MODULES

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
    assert kernels["dependencies"] == both["dependencies"]
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


# Tools that are run, and what others import: pandas reads and writes Parquet by pyarrow.
WITH_ANOTHER = {"mypy", "pandas-stubs", "pyarrow", "pytest-xdist", "ruff"}
OURS = {"kdabench", "kda_kernels", "support"}


def imported(*folders: str) -> set[str]:
    """Names of packages that files import, at their top or inside functions, without our own."""
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    own = {path.stem for path in files}
    names = {name.partition(".")[0] for path in files for name in imports(path)}
    return names - set(sys.stdlib_module_names) - OURS - own


def needed(*texts: str) -> dict[str, tuple[str, ...]]:
    """What the packages of some requirements are imported as, by name."""
    names = (Requirement(text).name for text in texts)
    return {name: MODULES.get(name, (name,)) for name in names}


def listed() -> dict[str, list[str]]:
    """Requirements by the part of the project that has them."""
    found = project(ROOT / "pyproject.toml")
    return {"kernels": found["dependencies"], **found["optional-dependencies"]}


def test_the_kernels_need_what_they_import() -> None:
    needs = needed(*listed()["kernels"])
    names = imported("kernels")
    assert names <= {module for modules in needs.values() for module in modules}
    assert [name for name, modules in needs.items() if not names & set(modules)] == []


def test_the_suite_needs_what_it_imports() -> None:
    parts = listed()
    needs = needed(*parts["suite"])
    names = imported("kdabench")
    known = {**needs, **needed(*parts["kernels"])}
    assert names <= {module for modules in known.values() for module in modules}
    assert [name for name, modules in needs.items() if not names & set(modules)] == []


def test_tests_need_what_they_import() -> None:
    parts = listed()
    needs = needed(*parts["test"])
    names = imported("tests", "scripts")
    known = needed(*parts["kernels"], *parts["suite"], *parts["test"])
    assert names <= {module for modules in known.values() for module in modules}
    unused = {name for name, modules in needs.items() if not names & set(modules)}
    assert unused <= WITH_ANOTHER


def test_setup_installs_the_suite() -> None:
    assert "pip install -e '.[suite,test]'" in (ROOT / "scripts" / "setup.sh").read_text()


HIDDEN = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {hidden!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Missing())
sys.argv = ["kdabench", *{arguments!r}]
from kdabench.__main__ import main
main()
"""


@pytest.mark.parametrize(
    ("hidden", "arguments"), [("typer", ["--help"]), ("optuna", ["tune", "--help"])]
)
def test_the_command_says_what_to_install(hidden: str, arguments: list[str]) -> None:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    done = subprocess.run(
        [sys.executable, "-c", HIDDEN.format(hidden=[hidden], arguments=arguments)],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"kdabench: {hidden} is not installed: pip install 'kdabench[suite]'\n"
