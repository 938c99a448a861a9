"""The studies of a search: a variant in a cell, with what there is to choose from."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kda_kernels.device import gpu
from kdabench.data.measurements import Cell
from kdabench.data.sweep import Sweep
from kdabench.tune.heats import RecordedBench
from kdabench.tune.search import Task
from kdabench.tune.space import Points, recorded_points, spaces, supported_points


def on_records(plan: Sweep, names: Sequence[str], full: bool, bench: RecordedBench) -> list[Task]:
    """Give the studies that recorded samples allow; full: all that was recorded, not the sweep's
    candidates alone.

    Raises ValueError if there is nothing to choose from.
    """
    return _tasks(
        plan, names, lambda cell, name: recorded_points(bench.recorded(cell), plan, name, full)
    )


def on_gpu(plan: Sweep, names: Sequence[str], full: bool, index: int) -> list[Task]:
    """Give the studies of what can run on a GPU; full: all that the variants' options can say.

    Raises ValueError if there is nothing to choose from, or if a variant does not list an option's
    values.
    """
    import torch  # heavy, and of no use on recorded samples

    with torch.cuda.device(index):
        found = gpu.current_gpu()
    return _tasks(plan, names, lambda cell, name: supported_points(plan, cell, name, full, found))


def _tasks(plan: Sweep, names: Sequence[str], points: Callable[[Cell, str], Points]) -> list[Task]:
    found = [Task(cell, space) for cell, space in spaces(plan, names, points)]
    if not found:
        raise ValueError(
            f"{plan.path}: nothing to choose from: "
            f"no cell has two candidates of {', '.join(names)} that can run"
        )
    return found
