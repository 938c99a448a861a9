"""A device's folder in results/: what lies there besides the policy, and which file owns a cell.

<sweep>.jsonl   measurements, one file per sweep; sweeps may share cells
env.json        environments by digest
verified.json   binaries that were right, by variant
held.json       variants that no policy may pick, and why
weights.json    request counts and how often they occur
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kdabench.data import measurements
from kdabench.data.measurements import CELL_FIELDS, Cell, Measurement, MeasurementError

HELD_OUT = "holdout"
"""Name of the sweep whose cells no fit has seen, for the certificate."""
DISPATCH = "dispatch"
"""Name of the sweep that a policy is fitted on."""

Sweeps = Mapping[str, Sequence[Measurement]]
"""Measurements by the name of their sweep."""

_CIRCUMSTANCES = tuple(name for name in CELL_FIELDS if name not in ("requests", "heads"))


def by_sweep(folder: Path, only: str | None = None) -> dict[str, list[Measurement]]:
    """Load every file of a device's folder, or that of one sweep.

    Raises MeasurementError for a file that can't be used, or a sweep that is not there.
    """
    paths = {path.stem: path for path in sorted(folder.glob("*.jsonl"))}
    if only is not None:
        if only not in paths:
            raise MeasurementError(f"{folder}: sweep: {only!r}: one of {', '.join(paths)}")
        paths = {only: paths[only]}
    return {stem: measurements.load([path]) for stem, path in paths.items()}


def owned(sweeps: Sweeps, preferred: Sequence[str] = ()) -> list[Measurement]:
    """Take each cell from one sweep: of the preferred ones if it is in such, else of the fullest.

    Sessions are so never mixed within a cell.
    """
    order = sorted(sweeps, key=lambda stem: (stem not in preferred, -len(sweeps[stem]), stem))
    owner: dict[Cell, str] = {}
    for stem in order:
        for measurement in sweeps[stem]:
            owner.setdefault(measurement.cell, stem)
    return [m for stem in order for m in sweeps[stem] if owner[m.cell] == stem]


def fullest(sweeps: Sweeps) -> list[Measurement]:
    """Take each figure's measurements from the sweep that has most of its cells.

    A figure shows the cells that differ in nothing but requests and heads. Held-out cells are
    scattered on purpose, and left out.
    """
    best: dict[tuple[Any, ...], list[Measurement]] = {}
    for name, found in sweeps.items():
        if name != HELD_OUT:
            for figure, group in _by_figure(found).items():
                best[figure] = max(best.get(figure, []), group, key=_cells)
    return [measurement for group in best.values() for measurement in group]


def _by_figure(found: Sequence[Measurement]) -> dict[tuple[Any, ...], list[Measurement]]:
    groups: dict[tuple[Any, ...], list[Measurement]] = {}
    for measurement in found:
        key = tuple(getattr(measurement.cell, name) for name in _CIRCUMSTANCES)
        groups.setdefault(key, []).append(measurement)
    return groups


def _cells(group: Sequence[Measurement]) -> int:
    return len({measurement.cell for measurement in group})


def describe(folder: Path) -> tuple[str, int]:
    """Read name and SM count of the device that a folder is about.

    Raises ValueError if there is no env.json, or one of several devices.
    """
    path = folder / "env.json"
    return device_of(measurements.load_envs([path]), str(path))


def device_of(envs: Mapping[str, Mapping[str, Any]], where: str) -> tuple[str, int]:
    """Find name and SM count of the one device that environments are about.

    Raises ValueError naming `where` if they are about none or several.
    """
    found = sorted({(env["gpu"], env["sms"]) for env in envs.values()})
    if len(found) != 1:
        raise ValueError(f"{where}: gpu, sms: {found}: one device expected")
    name, sms = found[0]
    return str(name), int(sms)


def held(folder: Path) -> dict[str, str]:
    """Read which variants no policy of a device may pick, and why; {} without held.json.

    Raises MeasurementError if the file is not of that form.
    """
    path = folder / "held.json"
    if not path.exists():
        return {}
    found = measurements.parse_json(path.read_text(encoding="utf-8"), str(path))
    if not isinstance(found, dict) or not all(
        isinstance(why, str) and why for why in found.values()
    ):
        raise MeasurementError(f"{path}: an object of variants and reasons is expected")
    return found


def weights(folder: Path) -> dict[int, float] | None:
    """Read how often each request count occurs; None without weights.json.

    Raises MeasurementError if the file is not of that form.
    """
    path = folder / "weights.json"
    if not path.exists():
        return None
    found = measurements.parse_json(path.read_text(encoding="utf-8"), str(path))
    if not isinstance(found, dict) or not all(
        key.isdecimal() and type(value) in (int, float) for key, value in found.items()
    ):
        raise MeasurementError(f"{path}: an object of request counts and weights is expected")
    return {int(key): float(value) for key, value in found.items()}


def verified(folder: Path) -> Mapping[str, Any] | None:
    """Read what `kdabench verify` wrote; None if it never ran.

    Raises MeasurementError if the file names no variants.
    """
    path = folder / "verified.json"
    if not path.is_file():
        return None
    found = measurements.parse_json(path.read_text(encoding="utf-8"), str(path))
    if not isinstance(found, dict) or not isinstance(found.get("variants"), dict):
        raise MeasurementError(f"{path}: variants: an object is expected")
    return found
