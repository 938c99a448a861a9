"""Figures as several commands draw them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kdabench.cli import arguments

if TYPE_CHECKING:
    from kdabench.data.measurements import Measurement


def fullest(files: Mapping[str, Sequence[Measurement]]) -> list[Measurement]:
    """For each question the records of the file that has most of its cells: sessions are not mixed
    in one figure.

    Held-out cells are scattered on purpose, and not drawn.
    """
    from kdabench.policy.emit import HELD_OUT
    from kdabench.review.curves import Question, by_question

    best: dict[Question, list[Measurement]] = {}
    for name, measurements in files.items():
        if name != HELD_OUT:
            for question, group in by_question(measurements).items():
                best[question] = max(
                    best.get(question, []), group, key=lambda rows: len({r.cell for r in rows})
                )
    return [measurement for group in best.values() for measurement in group]


def write_plots(
    measurements: Sequence[Measurement],
    folder: Path,
    *,
    name: str,
    sms: int,
    policy: Any,
    replay: bool,
    held: Collection[str] = (),
) -> list[Path]:
    from kdabench.review import plot

    arguments.require_writable(folder)
    return plot.write_plots(
        measurements, folder, device=name, sms=sms, policy=policy, replay=replay, held=held
    )
