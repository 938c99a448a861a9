"""What several commands read: sweeps with the variants' options, devices, records, policy
modules."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kdabench.cli import console
from kdabench.data import devices
from kdabench.data.devices import Recorded, Source

if TYPE_CHECKING:
    from kdabench.data.measurements import Measurement
    from kdabench.data.sweep import Sweep

SweepFile = Annotated[
    Path, typer.Argument(metavar="SWEEP.toml", help="A sweep file.", show_default=False)
]
RecordedDevice = Annotated[
    str,
    typer.Argument(
        metavar="DEVICE", help="A recorded device, such as nvidia-h200.", show_default=False
    ),
]
DeviceChoice = Annotated[
    str,
    typer.Option(
        "--device", metavar="DEVICE", help="auto, cuda, cuda:N, recorded or recorded:<device>."
    ),
]
Results = Annotated[
    Path, typer.Option("--results", metavar="FOLDER", help="Recorded measurements, by device.")
]
Out = Annotated[
    Path, typer.Option("--out", metavar="FOLDER", help="Journals and the output of local runs.")
]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]

RESULTS = Path("results")
OUT = Path("out")


@dataclass(frozen=True)
class Device:
    """A device to measure on, or whose measurements a recorded run is on.

    name     as its driver says, such as NVIDIA H200
    slug     of its folder in results/
    """

    source: Source
    name: str
    slug: str
    sms: int

    @property
    def recorded(self) -> bool:
        return isinstance(self.source, Recorded)


def find_device(choice: str, results: Path) -> Device:
    """The device for a user's `--device`. Ends the command if there is none."""
    from kdabench.measure import sources

    with console.user_input():
        found = sources.find(choice, results)
        if isinstance(found, Recorded):
            name, sms = describe(found.folder)
            return Device(found, name, found.device, sms)
    import torch

    properties = torch.cuda.get_device_properties(found.index)
    return Device(
        found, properties.name, devices.slug(properties.name), properties.multi_processor_count
    )


def any_sms(results: Path) -> int | None:
    """SM count of the device that `auto` finds, or None."""
    from kdabench.measure import sources

    try:
        sources.find("auto", results)
    except ValueError:
        return None
    return find_device("auto", results).sms


def describe(folder: Path) -> tuple[str, int]:
    """Name and SM count of the device that a results folder is about. Raises ValueError."""
    from kdabench.data.measurements import load_envs

    return device_of(load_envs([folder / "env.json"]), str(folder / "env.json"))


def device_of(envs: Mapping[str, Mapping[str, Any]], where: str) -> tuple[str, int]:
    """Name and SM count of the one device that environments are about. Raises ValueError."""
    found = sorted({(env["gpu"], env["sms"]) for env in envs.values()})
    if len(found) != 1:
        raise ValueError(f"{where}: gpu, sms: {found}: one device expected")
    name, sms = found[0]
    return str(name), int(sms)


def headline(device: Device, asked: str, results: Path) -> str:
    """First line of a command that measures, or runs on what was recorded."""
    if not device.recorded:
        return f"measuring on {device.name} ({device.source}, {device.sms} SMs)"
    run = f"recorded run of {device.name} ({console.relative(results / device.slug)})"
    return f"no GPU found: {run}" if asked == "auto" else run


def known_options() -> dict[str, dict[str, type]]:
    """Options of every variant by name, and their types."""
    from kda_kernels import variants

    return {
        name: {option: found.type for option, found in variants.declared(name).options.items()}
        for name in variants.NAMES
    }


def require_sweep_file(path: Path) -> None:
    """End the command if there is no such file, before anything slow happens."""
    if path.is_file():
        return
    known = [str(p) for p in sorted(Path("sweeps").glob("*.toml"))]
    close = [p for p in known if Path(p).stem == path.stem]
    if not close:
        from difflib import get_close_matches

        close = get_close_matches(str(path), known, n=1)
    hint = (
        f"did you mean {close[0]}?" if close else f"known: {', '.join(known) or 'none in sweeps'}"
    )
    console.fail(f"{path}: no such sweep file; {hint}")


def load_sweep(path: Path, sms: int | None) -> Sweep:
    from kdabench.data import sweep

    with console.user_input():
        return sweep.load(path, known_options(), sms)


def load_measurements(results: Path, device: str) -> tuple[Path, dict[str, list[Measurement]]]:
    """A recorded device's folder, and its records by file: sweeps may share cells, so files are
    kept apart."""
    from kdabench.data import measurements

    with console.user_input():
        folder = devices.results_folder(results, device)
        return folder, {
            path.name: measurements.load([path]) for path in sorted(folder.glob("*.jsonl"))
        }


def load_policy(path: Path) -> ModuleType:
    """A generated policy module by its path. Ends the command if it is missing or not one."""
    from kdabench.policy import emit

    with console.user_input():
        if not path.is_file():
            raise ValueError(
                f"{path}: no policy there; write it with: kdabench emit {path.parent.name}"
            )
        try:
            module = emit.load(
                path.read_text(encoding="utf-8"), f"kdabench_policy_{path.parent.name}"
            )
        except Exception as error:
            raise ValueError(
                f"{path}: not a policy module: {type(error).__name__}: {error}"
            ) from None
        if not all(
            callable(getattr(module, name, None)) for name in ("choose", "ranked", "explain")
        ):
            raise ValueError(
                f"{path}: not a policy module: it lacks choose(), ranked() or explain()"
            )
        return module


def require_writable(folder: Path) -> None:
    """Make a folder, and end the command if nothing can be written there: before hours of work, not
    after."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        console.fail(console.describe(error))
    if not os.access(folder, os.W_OK):
        console.fail(f"{folder}: not writable")


def default_schedule() -> dict[str, Any]:
    """Of the variant that a policy has schedules of: its own default, in full."""
    from kda_kernels import variants

    name = variants.of_rule("schedule")
    return {} if name is None else dict(variants.declared(name).defaults)
