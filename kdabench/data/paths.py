"""Paths as a user would type them."""

from __future__ import annotations

from pathlib import Path


def relative(path: Path) -> str:
    """Give a path relative to the working directory if it lies below it, else as it is."""
    try:
        return str(path.resolve().relative_to(Path.cwd()))
    except ValueError:
        return str(path)
