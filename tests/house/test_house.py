"""The house of the kernels: which way imports may go, what a variant may import, how long a file
may be."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_imports import imports

from kda_kernels import variants

KERNELS = Path(__file__).parents[2] / "kernels" / "kda_kernels"
LONGEST = 1150
FLOORS = (
    {"problem"},
    {"device"},
    {"case", "operands", "tensors", "arguments", "walk"},
    {"step"},
    {"parts"},
    {"variants", "stock"},
    {"cases", "identity"},
    {"build", "check", "policies"},
    {"serving"},
)
"""Rooms of the package, from the ground up: a room knows those of its own floor and below."""
FILES = sorted(
    path for path in KERNELS.rglob("*.py") if path.name != "__init__.py" or path.parent != KERNELS
)


def room(module: str) -> str:
    """The second part of a module's name: kda_kernels.parts.chunked is of parts."""
    return module.split(".")[1]


def own_name(path: Path) -> str:
    parts = path.relative_to(KERNELS.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def floor(name: str) -> int:
    (found,) = [height for height, rooms in enumerate(FLOORS) if name in rooms]
    return found


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(KERNELS)))
def test_a_room_knows_only_rooms_below(path: Path) -> None:
    own = floor(room(own_name(path)))
    above = {
        name
        for name in imports(path)
        if name.startswith("kda_kernels.") and floor(room(name)) > own
    }
    assert above == set()


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(KERNELS)))
def test_files_are_short(path: Path) -> None:
    if "policies" not in path.parts:
        assert len(path.read_text(encoding="utf-8").splitlines()) <= LONGEST


@pytest.mark.parametrize(
    "path", sorted((KERNELS / "variants").glob("[!_]*.py")), ids=lambda path: path.stem
)
def test_a_variant_imports_no_other(path: Path) -> None:
    """Files of kernels that belong to one variant are named after it; they are its own."""
    for name in imports(path):
        if name.startswith("kda_kernels.variants."):
            assert owner(name.split(".")[2]) == owner(path.stem), name


def owner(stem: str) -> str:
    """The variant that a file of variants/ belongs to: itself, or the one that it is named
    after."""
    registered = {variants.load(name).__name__.rpartition(".")[2] for name in variants.NAMES}
    fitting = [name for name in registered if stem == name or stem.startswith(f"{name}_")]
    return max(fitting, key=len)
