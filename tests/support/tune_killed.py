"""A search on a made-up grid with slow trials, for a test that kills it: `python tune_killed.py
STORAGE`."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from kdabench.data.measurements import Candidate, Cell
from kdabench.measure.contest import Contest, Plan
from kdabench.tune import search
from kdabench.tune.heats import Heat
from kdabench.tune.space import Point, Space

AXES = {
    "split": (1, 2, 4, 8),
    "threads": (128, 256),
    "staging": ("registers", "shared"),
    "pdl": (False, True),
}


def space(axes: dict[str, tuple[int | str | bool, ...]] = AXES) -> Space:
    options = [dict(zip(axes, values, strict=True)) for values in product(*axes.values())]
    points = [Point(Candidate.of("KdaSplit", options), options) for options in options]
    return Space.of("KdaSplit", points, points[0])


def planted_us(cell: Cell, candidate: Candidate) -> float:
    """Smooth in the options; the best split falls with the items."""
    options = candidate.options
    best = 8 if cell.items < 50 else 4 if cell.items < 300 else 1
    apart = abs(int(options["split"]).bit_length() - best.bit_length())
    slow = (
        1
        + 0.12 * apart
        + 0.05 * (options["threads"] == 256) * (best > 1)
        + 0.03 * (options["staging"] == "registers")
    )
    slow += (
        0.04 * int(options.get("gate_mode", 0))
        + 0.02 * bool(options.get("evict"))
        - 0.02 * bool(options["pdl"])
    )
    return cell.problem.floor_us() * slow


class PlantedBench:
    def __init__(self, pause_s: float = 0.0) -> None:
        self.pause_s, self.heats = pause_s, 0

    def fresh(self) -> None:
        pass

    def heat(
        self, cell: Cell, candidates: Sequence[Candidate], plan: Plan, process: int = 0
    ) -> Heat:
        time.sleep(self.pause_s)
        self.heats += 1
        times = {c: planted_us(cell, c) for c in candidates}
        contest = Contest(
            {c: [us] * 5 for c, us in times.items()}, {c: list(range(5)) for c in candidates}
        )
        return Heat(contest, recorded=times)


TASKS = [search.Task(Cell("decode", requests, 12), space()) for requests in (1, 16, 256)]

if __name__ == "__main__":
    with search.open_storage(Path(sys.argv[1])) as storage:
        search.run(
            TASKS,
            PlantedBench(0.03),
            storage,
            search.SearchOptions(trials=8, sampler="tpe", warm=True),
        )
