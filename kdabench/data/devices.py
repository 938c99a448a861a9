"""Devices by safe names: folders of results, modules of policies, and the `--device` option."""

from __future__ import annotations

import hashlib
import re
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kdabench.data import measurements

_PLAIN = re.compile(r"[A-Z0-9]+( [A-Z0-9]+)*")
_SLUG = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*(--[0-9a-f]{8})?")
_LONGEST = 64


class DeviceError(ValueError):
    """A device that doesn't exist or a malformed name. One line: value and the rule."""


def slug(name: str) -> str:
    """A folder name for a device: lower case, digits, hyphens.

    Plain names (`NVIDIA H200`) turn into themselves in lower case and could be turned back. Any
    other name loses something, so it ends in `--` and a digest, which no plain one does: distinct
    devices stay distinct.
    """
    if len(name) <= _LONGEST and _PLAIN.fullmatch(name):
        return name.lower().replace(" ", "-")
    ascii_name = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode().lower()
    readable = "-".join(re.findall(r"[a-z0-9]+", ascii_name))[:_LONGEST].strip("-") or "unnamed"
    return f"{readable}--{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()[:8]}"


def module_name(device: str) -> str:
    """Name of the policy module of a slug. Raises DeviceError if it is not a slug."""
    return _checked(device).replace("-", "_")


def _checked(device: str) -> str:
    if not _SLUG.fullmatch(device):
        raise DeviceError(
            f"device: {device!r}: lower-case letters and digits joined by hyphens, such as nvidia-h200"
        )
    return device


def recorded(results_dir: Path) -> list[str]:
    """Slugs of the devices that have records."""
    found = {path.parent.name for path in results_dir.glob("*/*.jsonl")}
    return sorted(name for name in found if _SLUG.fullmatch(name))


def results_folder(results_dir: Path, device: str) -> Path:
    """The folder of a slug's records. Raises DeviceError naming the recorded devices."""
    known = recorded(results_dir)
    if _checked(device) not in known:
        raise DeviceError(
            f"device: {device!r}: no records in {results_dir}; recorded: {', '.join(known) or 'none'}"
        )
    return results_dir / device


def load_envs(folder: Path) -> dict[str, dict[str, Any]]:
    """Environments by digest of a results folder. Raises RecordError."""
    return measurements.load_envs([folder / "env.json"])


@dataclass(frozen=True)
class Gpu:
    """A CUDA device of this machine, by its index. As text what a user gives for it: cuda:1."""

    index: int = 0

    def __str__(self) -> str:
        return f"cuda:{self.index}"


@dataclass(frozen=True)
class Recorded:
    """What was recorded of a device, a slug, and the folder that it lies in. As text what a user
    gives for it: recorded:nvidia-h200."""

    device: str
    folder: Path

    def __str__(self) -> str:
        return f"recorded:{self.device}"


Source = Gpu | Recorded
"""Where a command takes samples from."""


@dataclass(frozen=True)
class Choice:
    """What `--device` asks for.

    auto      the GPU if there is one, else a recorded device
    cuda      the GPU with this `index`
    recorded  recorded measurements of `device`, a slug, or None for the only recorded one
    """

    kind: Literal["auto", "cuda", "recorded"]
    index: int = 0
    device: str | None = None


def parse(text: str) -> Choice:
    """Read `auto`, `cuda`, `cuda:1`, `recorded` or `recorded:nvidia-h200`. Raises DeviceError."""
    kind, colon, rest = text.partition(":")
    if kind == "auto" and not colon:
        return Choice("auto")
    if kind == "cuda" and (not colon or re.fullmatch(r"[0-9]{1,3}", rest)):
        return Choice("cuda", index=int(rest or 0))
    if kind == "recorded":
        return Choice("recorded", device=_checked(rest) if colon else None)
    raise DeviceError(f"device: {text!r}: one of auto, cuda, cuda:INDEX, recorded, recorded:DEVICE")


def recorded_source(results_dir: Path, choice: Choice) -> Recorded:
    """Find the measurements that a recorded run is on.

    Raises DeviceError if the device has none, or if several could be meant.
    """
    known = recorded(results_dir)
    if choice.device is not None:
        return Recorded(choice.device, results_folder(results_dir, choice.device))
    if len(known) != 1:
        listing = ", ".join(f"recorded:{name}" for name in known) or f"none in {results_dir}"
        why = "no GPU found; " if choice.kind == "auto" else ""
        raise DeviceError(f"device: {choice.kind!r}: {why}name the recorded device: {listing}")
    return Recorded(known[0], results_dir / known[0])
