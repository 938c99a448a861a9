#!/usr/bin/env python3
"""What an adaptive sweep costs and what its policy is worth, on a device's recorded dispatch cells.

.venv/bin/python scripts/adaptive_sampling.py [results/nvidia-h200]

Each policy is fitted on the records of some cells alone; its regret is that over all recorded
cells. "Settled once": without the later processes of cells whose decision an earlier one settled.
Beside stand the policies of as many cells drawn at random, with each row's ends: the mean of
several draws.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Collection, Iterator
from pathlib import Path

from kdabench.cli import console
from kdabench.data import results
from kdabench.data.measurements import Cell, Measurement, cell_order, load, load_envs
from kdabench.policy import emit, fit, regret
from kdabench.policy.adaptive import TARGET, Course, rows_of

ROOT = Path(__file__).parents[1]
HEADINGS = ("cells measured", "cells", "of all samples %", "mean regret %", "p99 %", "max %")


class Study:
    """The steps of a device's dispatch.jsonl: what a policy is fitted on."""

    def __init__(self, folder: Path) -> None:
        path = folder / "dispatch.jsonl"
        self.held, self.envs = results.held(folder), load_envs([path])
        self.measurements = [r for r in load([path]) if r.cell.kind != "flush"]
        self.grid = fit.step_grid(self.measurements, held=self.held)
        self.by_pair: dict[tuple[Cell, int], list[Measurement]] = {}
        for measurement in self.measurements:
            self.by_pair.setdefault((measurement.cell, measurement.process), []).append(measurement)
        self.cells = sorted({r.cell for r in self.measurements}, key=cell_order)

    def adaptive(self, target: float) -> list[tuple[Cell, int]]:
        """The (cell, process) pairs of an adaptive sweep, in its order."""
        candidates = sorted({r.candidate for r in self.measurements}, key=str)
        course = Course(
            self.cells, candidates, 1 + max(process for _, process in self.by_pair), target=target
        )
        found = []
        while (pair := course.next()) is not None:
            course.tell(
                *pair, self.by_pair.get(pair, []), self.envs[self.measurements[0].env]["sms"]
            )
            found.append(pair)
        return found

    def judge(self, pairs: Collection[tuple[Cell, int]]) -> tuple[float, ...]:
        """Cells, part of all samples, and mean, p99 and maximum of the regret over all cells."""
        known = set(pairs)
        some = [r for r in self.measurements if (r.cell, r.process) in known]
        policy, _ = fit.fit(some, self.envs, held=self.held, resamples=0)
        whole = regret.summarize(
            self.grid, regret.picks(self.grid, emit.load(emit.emit(policy)).ranked)
        )["all"]
        part = sum(len(r.samples_us) for r in some) / sum(
            len(r.samples_us) for r in self.measurements
        )
        return len({cell for cell, _ in known}), part, whole.geomean, whole.p99, whole.max

    def all_of(self, cells: Collection[Cell]) -> list[tuple[Cell, int]]:
        return [pair for pair in self.by_pair if pair[0] in set(cells)]

    def random(self, count: int, seed: int) -> list[Cell]:
        ends = {cell for row in rows_of(self.cells) for cell in (row[0], row[-1])}
        others = [cell for cell in self.cells if cell not in ends]
        return [*ends, *random.Random(seed).sample(others, max(0, count - len(ends)))]


def ways(
    study: Study, targets: list[float], counts: list[int], draws: int
) -> Iterator[tuple[str, tuple[float, ...]]]:
    yield "all", study.judge(study.by_pair)
    for target in targets:
        chosen = study.adaptive(target)
        yield f"adaptive, target {100 * target:g} %", study.judge(chosen)
        again = next(
            (n for n in range(1, len(chosen)) if chosen[n][1] < chosen[n - 1][1]), len(chosen)
        )
        yield "   the same, settled once", study.judge(chosen[:again])
    first = [cell for cell, process in study.adaptive(min(targets)) if process == 0]
    for count in counts:
        if count < len(first):
            yield f"adaptive, stopped after {count}", study.judge(study.all_of(first[:count]))
    for count in (len(first), *counts):
        drawn = [study.judge(study.all_of(study.random(count, seed))) for seed in range(draws)]
        yield (
            f"{count} at random",
            tuple(sum(values) / draws for values in zip(*drawn, strict=True)),
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "results" / "nvidia-h200")
    parser.add_argument(
        "--target",
        type=float,
        nargs="+",
        default=[TARGET, 0.05],
        help="ratios, as of adaptive.TARGET",
    )
    parser.add_argument(
        "--stopped",
        type=int,
        nargs="*",
        default=[200, 150],
        help="cell counts of interrupted sweeps",
    )
    parser.add_argument("--draws", type=int, default=5)
    args = parser.parse_args()
    rows = [
        (
            name,
            f"{cells:.0f}",
            *(
                f"{100 * value:.{digits}f}"
                for value, digits in zip(figures, (0, 2, 1, 1), strict=True)
            ),
        )
        for name, (cells, *figures) in ways(
            Study(args.folder), args.target, args.stopped, args.draws
        )
    ]
    console.show_table(HEADINGS, rows, right=range(1, len(HEADINGS)))


if __name__ == "__main__":
    main()
