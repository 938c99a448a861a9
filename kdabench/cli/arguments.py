"""What several commands are told: their arguments and options, and what these stand for."""

from __future__ import annotations

import os
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated

import typer

from kda_kernels import policies, variants
from kdabench import sources
from kdabench.cli import console
from kdabench.data.sweep import Sweep
from kdabench.measure import target as targets
from kdabench.measure.target import Target
from kdabench.sources import Source

RESULTS = Path("results")
OUT = Path("out")
SWEEPS = Path("sweeps")

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
        "--device", metavar="DEVICE", help="auto, cuda, cuda:N or replay:<recorded device>."
    ),
]
Results = Annotated[
    Path, typer.Option("--results", metavar="FOLDER", help="Recorded measurements, by device.")
]
Out = Annotated[
    Path, typer.Option("--out", metavar="FOLDER", help="Journals and the output of local runs.")
]
Sweeps = Annotated[Path, typer.Option("--sweeps", metavar="FOLDER", help="Sweep files.")]
Json = Annotated[bool, typer.Option("--json", help="Machine-readable output.")]
Budget = Annotated[
    float | None,
    typer.Option(
        "--budget", metavar="SECONDS", min=1, help="Begin no cell after this many seconds."
    ),
]
Variants = Annotated[
    list[str] | None,
    typer.Option(
        "--variant", metavar="NAME", help="Only this variant; may be given several times."
    ),
]
Jobs = Annotated[int | None, typer.Option(min=1, help="Processes; as many as cores by default.")]


def one_of(option: str, value: str, allowed: Sequence[str]) -> None:
    """End the command unless an option's value is one of some words."""
    if value not in allowed:
        console.fail(f"{option}: {value!r}: one of {', '.join(allowed)}")


def chosen_variants(
    names: Sequence[str] | None, known: Sequence[str] = variants.NAMES
) -> list[str]:
    """Give the variants that --variant names, each once; all known ones without it.

    Ends the command for one that is not known.
    """
    for name in names or ():
        one_of("--variant", name, known)
    return list(dict.fromkeys(names or known))


def parse_share(text: str) -> tuple[int, int]:
    """Read "k/n", 1 <= k <= n, as (k, n). Ends the command for anything else."""
    number, _, of = text.partition("/")
    if not (number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
        console.fail(f"--share: {text!r}: K/N with 1 <= K <= N, such as 2/4")
    return int(number), int(of)


def find_target(choice: str, results: Path) -> Target:
    """Find the device of a user's --device. Ends the command if there is none."""
    with console.user_input():
        return targets.find(choice, results)


def load_sweep(path: Path, sms: int | None) -> Sweep:
    """Read a sweep file. Ends the command if it can't be used."""
    with console.user_input():
        return sources.load_sweep(path, sms)


def open_source(name: str, results: Path) -> Source:
    """Open a recorded device, a file of measurements or a journal. Ends the command if it can't."""
    with console.user_input():
        return sources.open_source(name, results)


def require_sweep_file(path: Path) -> None:
    """End the command if there is no such file, before anything slow happens."""
    if path.is_file():
        return
    known = [str(p) for p in sorted(SWEEPS.glob("*.toml"))]
    close = [p for p in known if Path(p).stem == path.stem]
    close = close or get_close_matches(str(path), known, n=1)
    hint = (
        f"did you mean {close[0]}?" if close else f"known: {', '.join(known) or 'none in sweeps'}"
    )
    console.fail(f"{path}: no such sweep file; {hint}")


def require_writable(folder: Path) -> None:
    """Make a folder, and end the command if nothing can be written there: before hours of work, not
    after."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        console.fail(console.describe(error))
    if not os.access(folder, os.W_OK):
        console.fail(f"{folder}: not writable")


def policies_folder() -> Path:
    """Give the folder in which the dispatcher looks for generated modules."""
    return Path(policies.__path__[0])
