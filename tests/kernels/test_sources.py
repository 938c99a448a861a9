"""What a kernel is written in, and what of that its digest shows."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from kda_kernels import variants
from kda_kernels.device import sources

WRITTEN = '''"""A module."""

import math

WIDTH = 4
"""Taps."""


def area(radius: float) -> float:
    """Of a circle."""
    # Near enough.
    return math.pi * radius**2  # square
'''


@pytest.mark.parametrize("name", [n for n in variants.NAMES if n != "stock"])
def test_a_variant_is_written_in_every_module_with_device_code_that_it_names(name: str) -> None:
    module = variants.load(name).__name__
    behind = sources.behind(module)
    assert {module, "kda_kernels.problem", "kda_kernels.device.blocks"} <= set(behind)
    for other in behind:
        for node in ast.parse(sources.path_of(other).read_text()).body:
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(
                "kda_kernels.parts."
            ):
                assert node.module in behind


def test_modules_stand_behind_what_they_need() -> None:
    order = sources.in_order(["kda_kernels.variants.fused_ws"])
    for place, module in enumerate(order):
        assert set(sources.in_order([module])) <= set(order[: place + 1])


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"""A module."""', '"""Another one."""'),
        ('"""A module."""\n', ""),
        ('    """Of a circle."""\n', ""),
        ('"""Taps."""\n', ""),
        ("    # Near enough.\n", "\n\n"),
        ("  # square", ""),
        ("math.pi * radius**2", "(\n        math.pi\n        * radius**2\n    )"),
    ],
)
def test_prose_and_line_breaks_leave_the_digest(tmp_path: Path, old: str, new: str) -> None:
    assert _said(tmp_path, WRITTEN.replace(old, new)) == _said(tmp_path, WRITTEN)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("4", "5"),
        ("radius**2", "radius**3"),
        ("pi *", "pi +"),
        ("area", "surface"),
        ("WIDTH = 4\n", ""),
    ],
)
def test_code_changes_the_digest(tmp_path: Path, old: str, new: str) -> None:
    assert _said(tmp_path, WRITTEN.replace(old, new)) != _said(tmp_path, WRITTEN)


def test_a_text_that_is_used_is_code(tmp_path: Path) -> None:
    assert _said(tmp_path, 'A = "x"\n') != _said(tmp_path, 'A = "y"\n')


def _said(folder: Path, text: str) -> str:
    path = folder / f"{abs(hash(text))}.py"
    path.write_text(text)
    return sources.said(path)


def test_a_module_of_another_package_is_none_of_ours() -> None:
    with pytest.raises(ModuleNotFoundError, match="kdabench"):
        sources.path_of("kdabench.cli")
