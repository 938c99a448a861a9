"""The arrows between the packages, and what start-up may load."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from kda_kernels import variants
from kda_kernels.device import sources

ROOT = Path(__file__).parents[2]
HEAVY = (
    "torch",
    "triton",
    "cutlass",
    "cuda",
    "pandas",
    "matplotlib",
    "numpy",
    "scipy",
    "jinja2",
    "rich",
    "pynvml",
    "optuna",
    "sqlalchemy",
)
LIGHT = ("kda_kernels.problem", "kda_kernels.variants", "kda_kernels.case", "kda_kernels.cases")
"""What every module of the suite may see of the kernels: what a step is, what variants say about
themselves, and the standard cases. To import these and to read any declaration loads nothing
heavy."""
MAY_SEE_KERNELS = (
    "binaries",
    "cell_bench",
    "cuda_graphs",
    "doctor",
    "gpu_runner",
    "inspection",
    "verify",
    "worker",
)
"""These compile, launch or check kernels, and see more. No variant's module is seen but through
`variants.load`."""


def imports(path: Path) -> Iterator[str]:
    """Full names of what a file imports, at its top or inside its functions."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def loaded(statement: str) -> set[str]:
    """Top-level modules in a fresh interpreter after a statement."""
    code = f"{statement}\nimport sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    paths = [str(ROOT), str(ROOT / "kernels")]
    code = f"import sys; sys.path[:0] = {paths!r}\n{code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.parametrize(
    "module", ["kdabench", "kdabench.cli", "kdabench.measure.session", "kdabench.measure.sources"]
)
def test_start_up_loads_nothing_heavy(module: str) -> None:
    assert loaded(f"import {module}") & set(HEAVY) == set()


def test_a_sweep_is_read_without_anything_heavy() -> None:
    file = str(ROOT / "sweeps" / "dispatch.toml")
    statement = f"from pathlib import Path; from kdabench.cli import inputs; inputs.load_sweep(Path({file!r}), 132)"
    assert loaded(statement) & set(HEAVY) == set()


def test_help_loads_nothing_heavy() -> None:
    statement = "from kdabench.cli import _status\nimport sys, os\n"
    statement += "out = sys.stdout; sys.stdout = open(os.devnull, 'w')\n_status(['--help']); _status(['sweep', '--help'])\n"
    statement += "sys.stdout = out"
    assert loaded(statement) & set(HEAVY) == set()


def test_kernels_import_nothing_from_the_suite() -> None:
    files = [*(ROOT / "kernels").rglob("*.py")]
    assert files
    found = {
        (path.name, name)
        for path in files
        for name in imports(path)
        if name.split(".")[0] == "kdabench"
    }
    assert found == set()


def test_declarations_are_read_without_anything_heavy() -> None:
    statement = "from kda_kernels import cases, variants; [variants.declared(name) for name in variants.NAMES]"
    assert loaded(statement) & set(HEAVY) == set()


SUITE = sorted((ROOT / "kdabench").rglob("*.py"))


@pytest.mark.parametrize("path", SUITE, ids=lambda path: str(path.relative_to(ROOT / "kdabench")))
def test_only_few_modules_see_more_of_the_kernels_than_is_light(path: Path) -> None:
    ours = [name for name in imports(path) if name.startswith("kda_kernels.")]
    modules = {variants.source(name) for name in variants.NAMES}
    of_variants = [
        name for name in ours if _file(name) in modules or _file(name.rpartition(".")[0]) in modules
    ]
    assert of_variants == []
    if path.stem not in MAY_SEE_KERNELS and path.parent.name != "cli":
        assert [name for name in ours if not name.startswith(LIGHT)] == []


def _file(module: str) -> Path | None:
    try:
        return sources.path_of(module)
    except ModuleNotFoundError:
        return None


@pytest.mark.parametrize("path", SUITE, ids=lambda path: str(path.relative_to(ROOT / "kdabench")))
def test_no_module_of_the_suite_names_a_variant(path: Path) -> None:
    """What it must know of one the variant declares. Examples in docstrings may name some."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    prose = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    texts = [
        node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in prose
    ]
    named = {name for node in texts for name in variants.NAMES if str(node.value) == name}
    assert named == set()


def test_the_template_of_policies_names_no_variant() -> None:
    text = (ROOT / "kdabench" / "policy" / "templates" / "policy.py.j2").read_text(encoding="utf-8")
    assert [
        name for name in variants.NAMES if f'"{name}"' in text or (name != "stock" and name in text)
    ] == []


def test_every_package_is_packaged() -> None:
    listed = set(
        tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"][
            "packages"
        ]
    )
    folders = {path.parent.relative_to(ROOT) for path in (ROOT / "kdabench").rglob("__init__.py")}
    folders |= {
        path.parent.relative_to(ROOT / "kernels")
        for path in (ROOT / "kernels").rglob("__init__.py")
    }
    assert {".".join(folder.parts) for folder in folders} <= listed
