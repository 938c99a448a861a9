"""A device's ceilings, and the time that follows from them: what no step can beat.

They are measured (`kdabench calibrate`) and lie in `ceilings.json`, beside the environments of a
device's measurements or in the folder of a run. A device without them has no floor, and whatever is
shown of it no efficiency.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kda_kernels.problem import Problem
from kdabench.data.measurements import MeasurementError, parse_json, write_atomic

FILE = "ceilings.json"

_READS_THE_STATE_ONLY = ("record",)
"""Kinds that leave the state as it is; the others write back what they read."""


class RooflineError(ValueError):
    """Ceilings that can't be. One line: where, key, value and the rule."""


@dataclass(frozen=True)
class Roofline:
    """A device's ceilings.

    read_bytes_per_us    bandwidth of memory that is only read
    update_bytes_per_us  bytes read plus bytes written of memory that is changed in place
    launch_us            an empty kernel in a chain of a CUDA graph, no programmatic edges

    Raises RooflineError unless all are finite and above 0.
    """

    read_bytes_per_us: float
    update_bytes_per_us: float
    launch_us: float

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if type(value) not in (int, float) or not (math.isfinite(value) and value > 0):
                raise RooflineError(f"{field.name}: {value!r}: a finite number above 0 is expected")

    def floor_us(self, problem: Problem) -> float:
        """Compute what the memory traffic of a launch and the launch itself take at best."""
        reads_only = problem.kind in _READS_THE_STATE_ONLY
        bandwidth = self.read_bytes_per_us if reads_only else self.update_bytes_per_us
        return problem.bytes_moved / bandwidth + self.launch_us

    def efficiency(self, problem: Problem, time_us: float) -> float:
        """Divide the floor by a measured time."""
        return self.floor_us(problem) / time_us


CEILINGS = tuple(field.name for field in fields(Roofline))


@dataclass(frozen=True)
class Ceilings:
    """A roofline as it was measured.

    note      how, in a sentence
    env       environment of the measurement; at least `gpu`, the device's name
    readings  what was timed, by names with units; () where only the result is known
    """

    roofline: Roofline
    note: str
    env: Mapping[str, Any]
    readings: tuple[Mapping[str, Any], ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Give the content of ceilings.json."""
        return {
            **{name: getattr(self.roofline, name) for name in CEILINGS},
            "note": self.note,
            "env": dict(self.env),
            "readings": [dict(reading) for reading in self.readings],
        }


def save(ceilings: Ceilings, folder: Path) -> Path:
    """Write ceilings.json into a folder, whole or not at all, and return its path.

    Raises OSError.
    """
    path = folder / FILE
    write_atomic(path, json.dumps(ceilings.to_json(), indent=1, sort_keys=True) + "\n")
    return path


def load(folder: Path) -> Ceilings | None:
    """Read a folder's ceilings; None if it has none.

    Raises RooflineError if the file is not of that form.
    """
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        return _parsed(parse_json(path.read_text(encoding="utf-8"), FILE))
    except (RooflineError, MeasurementError) as error:
        raise RooflineError(f"{path}: {str(error).removeprefix(f'{FILE}: ')}") from None


def of(gpu: str, *folders: Path) -> Roofline | None:
    """Read the roofline of a GPU model from the first of some folders that has one; None if none
    has.

    Raises RooflineError as `load` does.
    """
    for folder in folders:
        found = load(folder)
        if found is not None and found.env["gpu"] == gpu:
            return found.roofline
    return None


def _parsed(content: object) -> Ceilings:
    expected = {*CEILINGS, "note", "env", "readings"}
    if not isinstance(content, dict) or content.keys() != expected:
        keys = sorted(content) if isinstance(content, dict) else content
        raise RooflineError(f"keys: {keys!r}: {', '.join(sorted(expected))} are expected")
    note, env, readings = content["note"], content["env"], content["readings"]
    if not isinstance(note, str) or not note:
        raise RooflineError(f"note: {note!r}: a sentence on how they were measured is expected")
    if not isinstance(env, dict) or not isinstance(env.get("gpu"), str):
        raise RooflineError(f"env: {env!r}: an environment with `gpu` is expected")
    if not isinstance(readings, list) or not all(isinstance(one, dict) for one in readings):
        raise RooflineError(f"readings: {readings!r}: a list of objects is expected")
    roofline = Roofline(**{name: content[name] for name in CEILINGS})
    return Ceilings(roofline, note, env, tuple(readings))
