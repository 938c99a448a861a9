"""What a user names, opened: a recorded device, a file of measurements, a journal, a sweep, a
policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from kda_kernels import variants
from kdabench.data import devices, measurements, results, sweep
from kdabench.data.measurements import Measurement
from kdabench.data.sweep import Sweep
from kdabench.measure.journal import Journal
from kdabench.policy import emit


@dataclass(frozen=True)
class Source:
    """Measurements and where they come from.

    name     as the user named it
    sweeps   measurements by the name of their sweep
    envs     environments by digest
    policy   where its policy lies, if it has one
    journal  whether it is a journal, and not exported
    replay   whether it is a recorded run's journal: no measurement
    """

    name: str
    sweeps: Mapping[str, Sequence[Measurement]]
    envs: Mapping[str, Mapping[str, Any]]
    policy: Path
    journal: bool = False
    replay: bool = False

    @property
    def home(self) -> Path:
        """The folder that its policy, figures and report go to."""
        return self.policy.parent

    def measurements(self, preferred: Sequence[str] = ()) -> list[Measurement]:
        """Give each cell's measurements of one sweep, a preferred one if it has the cell."""
        return results.owned(self.sweeps, preferred)


def open_source(
    name: str | Path, folder: str | Path = "results", sweep: str | None = None
) -> Source:
    """Open a journal (.db), a file of measurements (.jsonl) or a recorded device (a slug).

    folder  results by device
    sweep   of a device: load this one alone

    Raises JournalError for a journal that can't be read, ValueError for the others.
    """
    path = Path(name)
    if path.suffix == ".db":
        stem = path.name.removesuffix(".db").removesuffix(".replay")
        with Journal.read(path) as journal:
            return Source(
                str(name),
                {stem: journal.measurements()},
                journal.envs(),
                path.with_name(stem) / "policy.py",
                journal=True,
                replay=journal.replay,
            )
    if path.suffix == ".jsonl":
        found = {path.stem: measurements.load([path])}
        return Source(str(name), found, measurements.load_envs([path]), path.with_name("policy.py"))
    home = devices.results_folder(Path(folder), str(name))
    envs = measurements.load_envs([home / "env.json"])
    return Source(str(name), results.by_sweep(home, sweep), envs, home / "policy.py")


def load_envs(name: str | Path, folder: str | Path = "results") -> Mapping[str, Mapping[str, Any]]:
    """Load the environments of a source, by digest, without its measurements.

    >>> sorted({env["gpu"] for env in load_envs("nvidia-h200").values()})
    ['NVIDIA H200']

    Raises as `open_source` does.
    """
    path = Path(name)
    if path.suffix == ".db":
        with Journal.read(path) as journal:
            return journal.envs()
    if path.suffix == ".jsonl":
        return measurements.load_envs([path])
    home = devices.results_folder(Path(folder), str(name))
    return measurements.load_envs([home / "env.json"])


def known_options() -> dict[str, dict[str, type]]:
    """Name the options of every variant, and their types."""
    return {
        name: {option: found.type for option, found in variants.declared(name).options.items()}
        for name in variants.NAMES
    }


def load_sweep(path: str | Path, sms: int | None = None) -> Sweep:
    """Read a sweep file, its options checked against what the variants declare.

    sms  multiprocessors of the device; needed by sweeps that ask for cells by waves

    >>> len(load_sweep("sweeps/quick.toml").cells)
    8

    Raises SweepError (a ValueError) naming file, key, value and rule.
    """
    return sweep.load(Path(path), known_options(), sms)


def load_policy(path: str | Path) -> ModuleType:
    """Load a generated policy by its file: `choose`, `ranked` and `explain`.

    Raises ValueError if it is missing, or is none.
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(
            f"{path}: no policy there; write it with: kdabench emit {path.parent.name}"
        )
    try:
        module = emit.load(path.read_text(encoding="utf-8"), f"kdabench_policy_{path.parent.name}")
    except Exception as error:  # a module that is executed may raise anything
        raise ValueError(f"{path}: not a policy module: {type(error).__name__}: {error}") from None
    if not all(callable(getattr(module, name, None)) for name in ("choose", "ranked", "explain")):
        raise ValueError(f"{path}: not a policy module: it lacks choose(), ranked() or explain()")
    return module
