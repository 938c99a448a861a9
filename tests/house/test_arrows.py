"""The arrows between the modules of the suite: which way imports may go. Computed from the text,
imports inside functions among them."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest
from test_imports import imports

ROOT = Path(__file__).parents[2]
SUITE = sorted((ROOT / "kdabench").rglob("*.py"))
STAGES = {"data", "measure", "policy", "tune", "review", "checks"}
MAY_SEE = {
    "data": set[str](),
    "measure": {"data"},
    "policy": {"data"},
    "tune": {"data", "measure", "policy"},
    "review": {"data", "policy", "tune"},
    "checks": {"data", "measure"},
    "sources": {"data", "measure", "policy"},
    "pipeline": {*STAGES, "sources"},
    "library": {*STAGES, "sources"},
    "cli": {*STAGES, "sources", "pipeline", "library"},
    "__init__": {*STAGES, "sources", "library"},
    "__main__": {"cli"},
}
"""Rooms of the suite, and the others that each may import from."""


def name_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room(module: str) -> str:
    """The part of a module's name below the package: kdabench.data.sweep is of data."""
    return [*module.split("."), "__init__"][1]


MODULES = {name_of(path): path for path in SUITE}


def module_of(name: str) -> str | None:
    """The module of the suite that an imported name is, or is in."""
    while name:
        if name in MODULES:
            return name
        name = name.rpartition(".")[0]
    return None


def needs(path: Path) -> set[str]:
    """Other modules of the suite that a file imports."""
    found = {module_of(name) for name in imports(path) if name.split(".")[0] == "kdabench"}
    return {module for module in found if module is not None} - {name_of(path)}


def test_every_room_has_its_rule() -> None:
    assert {room(module) for module in MODULES} == set(MAY_SEE)


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_from_rooms_that_it_may_see(module: str) -> None:
    own = room(module)
    others = {name for name in needs(MODULES[module]) if room(name) not in {own, *MAY_SEE[own]}}
    assert others == set()


def test_no_module_needs_itself_in_a_circle() -> None:
    graph = {module: needs(path) for module, path in MODULES.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"a circle: {' <- '.join(error.args[1])}")
