"""What a user names: a recorded device, a file of records, a journal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kdabench.cli import arguments, console

if TYPE_CHECKING:
    from kdabench.data.measurements import Cell, Measurement


@dataclass(frozen=True)
class Source:
    """A recorded device, a file of records or a journal. files: records by the name of their
    sweep"""

    name: str
    files: Mapping[str, Sequence[Measurement]]
    envs: Mapping[str, Mapping[str, Any]]
    policy: Path
    replay: bool = False

    def measurements(self, preferred: Sequence[str]) -> list[Measurement]:
        """Each cell from one file: of the preferred ones if it is in such, else of the fullest."""
        order = sorted(
            self.files, key=lambda stem: (stem not in preferred, -len(self.files[stem]), stem)
        )
        owner: dict[Cell, str] = {}
        for stem in order:
            for measurement in self.files[stem]:
                owner.setdefault(measurement.cell, stem)
        return [r for stem in order for r in self.files[stem] if owner[r.cell] == stem]


def open_source(name: str, results: Path) -> Source:
    from kdabench.data import measurements
    from kdabench.measure.journal import Journal

    path = Path(name)
    if path.suffix == ".db":
        stem = path.name.removesuffix(".db").removesuffix(".replay")
        with Journal.read(path) as journal:
            files = {stem: journal.measurements()}
            return Source(
                name, files, journal.envs(), path.with_name(stem) / "policy.py", journal.replay
            )
    if path.suffix == ".jsonl":
        with console.user_input():
            files = {path.stem: measurements.load([path])}
            return Source(name, files, measurements.load_envs([path]), path.with_name("policy.py"))
    folder, by_file = arguments.load_measurements(results, name)
    with console.user_input():
        envs = measurements.load_envs([folder / "env.json"])
    return Source(
        name,
        {Path(file).stem: found for file, found in by_file.items()},
        envs,
        folder / "policy.py",
    )
