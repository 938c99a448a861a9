"""tune: the search for schedules."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kdabench.cli import console, inputs, measuring
from kdabench.cli.inputs import OUT, RESULTS, DeviceChoice, Json, Out, Results, SweepFile

if TYPE_CHECKING:
    from kdabench.data.measurements import Candidate, Cell
    from kdabench.data.sweep import Sweep
    from kdabench.tune.compare import Found
    from kdabench.tune.heats import RecordedBench
    from kdabench.tune.search import SearchEvent, SearchSummary, StudyOutcome, Task
    from kdabench.tune.space import Point

_SAMPLERS = ("transfer", "tpe", "gp", "random", "exhaustive")
_SPACES = ("sweep", "full")
_LINE_S = 5.0


def tune(
    file: SweepFile,
    device: DeviceChoice = "auto",
    trials: Annotated[
        int, typer.Option(min=1, help="Trials of a study, a variant in a cell.")
    ] = 50,
    budget: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", min=1, help="Begin no trial after this many seconds."),
    ] = None,
    variant: measuring.Variants = None,
    space: Annotated[
        str,
        typer.Option(
            metavar="SPACE", help="sweep: its candidates; full: all that the variant can be."
        ),
    ] = "sweep",
    sampler: Annotated[
        str, typer.Option(metavar="NAME", help=f"{', '.join(_SAMPLERS)}.")
    ] = "transfer",
    neighbours: Annotated[
        bool,
        typer.Option(
            "--neighbours", help="Try what wins in the nearest cells before the sampler is asked."
        ),
    ] = False,
    seed: Annotated[int, typer.Option(help="Of all that is random.")] = 0,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare", help="On recorded samples: compare the samplers. Keeps no study."
        ),
    ] = False,
    seeds: Annotated[int, typer.Option(min=1, help="Of each sampler, with --compare.")] = 5,
    share: Annotated[
        float,
        typer.Option(min=0.01, max=1, help="Of the exhaustive search's trials, with --compare."),
    ] = 0.25,
    out: Out = OUT,
    results: Results = RESULTS,
    as_json: Json = False,
) -> None:
    """Search each variant's fastest options by Optuna, cell by cell.

    Every finished trial is kept in OUT/<sweep>.tune.db: the same command goes on where it stopped, and
    `optuna-dashboard sqlite:///OUT/<sweep>.tune.db` shows it. What is found is measured again, interleaved with the
    default; what is faster goes to OUT/<sweep>.tuned.toml, a sweep of its own. Without a GPU the search runs on the
    recorded measurements, where a candidate that was not recorded doesn't exist. Exit status 1 if in some cell every
    candidate failed.

    \b
    Examples:
      kdabench tune sweeps/quick.toml
      kdabench tune sweeps/quick.toml --variant KdaSplit --space full --budget 1200
      kdabench tune sweeps/quick.toml --device recorded:nvidia-h200 --trials 50
      kdabench tune sweeps/quick.toml --device recorded:nvidia-h200 --space full --compare
    """
    from kdabench.measure.recorded import measurements_of
    from kdabench.tune import search as tuning
    from kdabench.tune.heats import RecordedBench

    inputs.require_sweep_file(file)
    _one_of("--space", space, _SPACES)
    _one_of("--sampler", sampler, _SAMPLERS)
    target = inputs.find_device(device, results)
    plan = inputs.load_sweep(file, target.sms)
    names = _variants(variant, plan)
    if compare and not target.recorded:
        console.fail("--compare: the best of each cell must be known: --device recorded:<device>")
    first = inputs.headline(target, device, results)
    if as_json:
        console.note(first)
    else:
        console.line(first)
    inputs.require_writable(out)
    options = tuning.SearchOptions(trials, sampler, seed, warm=neighbours)  # type: ignore[arg-type]
    title = f"{plan.stem} on {target.name}" + (", a recorded run" if target.recorded else "")
    if target.recorded:
        with console.user_input():
            bench = RecordedBench(measurements_of(plan, results / target.slug))
        tasks = _tasks(
            plan,
            names,
            lambda cell, name: _recorded_points(bench, plan, cell, name, space == "full"),
        )
        _require(tasks, file, names)
        if compare:
            _compare(tasks, bench, seeds, share, out, plan.stem, title, as_json)
            return
        path = out / f"{plan.stem}.recorded.tune.db"
        with tuning.open_storage(path) as storage, _progress() as listener:
            summary = tuning.run(
                tasks, bench, storage, options, budget_s=budget, listener=listener, where=str(path)
            )
    else:
        summary = _measure(plan, names, space == "full", target, options, budget, out, file)
    _report(summary, plan, out, target, title, as_json)


def _one_of(option: str, value: str, allowed: Sequence[str]) -> None:
    if value not in allowed:
        console.fail(f"{option}: {value!r}: one of {', '.join(allowed)}")


def _variants(chosen: list[str] | None, plan: Sweep) -> list[str]:
    for name in chosen or ():
        _one_of("--variant", name, plan.variants)
    return list(dict.fromkeys(chosen or plan.variants))


def _require(tasks: Sequence[Task], file: Path, names: Sequence[str]) -> None:
    if not tasks:
        console.fail(
            f"{file}: nothing to choose from: no cell has two candidates of {', '.join(names)} that can run"
        )


def _measure(
    plan: Sweep, names: Sequence[str], full: bool, target: inputs.Device, options: Any, budget: float | None, out: Path,
    file: Path,
) -> SearchSummary:  # fmt: skip
    import torch

    from kda_kernels.device.gpu import current_gpu
    from kdabench.data.devices import Gpu
    from kdabench.tune import search as tuning
    from kdabench.tune.heats import WorkerBench

    assert isinstance(target.source, Gpu)
    index = target.source.index
    with torch.cuda.device(index):
        gpu = current_gpu()
    tasks = _tasks(plan, names, lambda cell, name: _supported_points(plan, cell, name, full, gpu))
    _require(tasks, file, names)
    path = out / f"{plan.stem}.tune.db"
    with (
        tuning.open_storage(path) as storage,
        _progress() as listener,
        WorkerBench(index, note=console.note) as bench,
    ):
        return tuning.run(
            tasks, bench, storage, options, budget_s=budget, listener=listener, where=str(path)
        )


def _tasks(
    plan: Sweep,
    names: Sequence[str],
    points: Callable[[Cell, str], tuple[list[Point], Point | None]],
) -> list[Task]:
    """Of every variant and cell with at least two points."""
    from kdabench.tune.search import Task
    from kdabench.tune.space import Space

    spaces = ((cell, Space.of(name, *points(cell, name))) for name in names for cell in plan.cells)
    return [Task(cell, space) for cell, space in spaces if len(space.points) > 1]


def _point(candidate: Candidate) -> Point:
    from kda_kernels import variants
    from kdabench.tune.space import Point

    return Point(
        candidate,
        variants.options_dict(variants.make_options(candidate.variant, candidate.options)),
    )


def _default(name: str) -> Point:
    from kdabench.data.measurements import Candidate

    return _point(Candidate.of(name, {}))


def _supported_points(
    plan: Sweep, cell: Cell, name: str, full: bool, gpu: Any
) -> tuple[list[Point], Point | None]:
    from kda_kernels import variants

    module = variants.load(name)

    def runs(point: Point) -> bool:
        return (
            module.unsupported(cell.problem, variants.make_options(name, dict(point.options)), gpu)
            is None
        )

    candidates = _every(name, cell) if full else [c for c in plan.candidates if c.variant == name]
    points = [point for point in map(_point, candidates) if runs(point)]
    default = _default(name)
    return points, default if runs(default) else None


def _every(name: str, cell: Cell) -> Iterator[Candidate]:
    """All that the options can say but what is not for a tuner to choose, as what differs from the
    default.

    Ends the command if a variant lists no values of an option that counts something.
    """
    from kda_kernels import variants
    from kdabench.data.measurements import Candidate

    declared = variants.declared(name)
    axes: dict[str, Sequence[Any]] = {}
    for option in declared.options:
        if option in declared.given or (option == "pdl" and cell.context == "isolated"):
            continue
        try:
            axes[option] = declared.values_to_try(option)
        except ValueError as error:
            console.fail(f"--space full: {name}: {error}")
    for values in product(*axes.values()):
        chosen = dict(zip(axes, values, strict=True))
        yield Candidate.of(
            name, {o: value for o, value in chosen.items() if value != declared.defaults[o]}
        )


def _recorded_points(
    bench: RecordedBench, plan: Sweep, cell: Cell, name: str, full: bool
) -> tuple[list[Point], Point | None]:
    """What was recorded, of the sweep's candidates or of all. One with an option that is no more is
    left out."""
    from kdabench.data.measurements import canonical

    points = []
    for candidate in bench.recorded(cell):
        if candidate.variant == name:
            try:
                points.append(_point(candidate))
            except ValueError:
                continue
    default = _default(name)
    if not full:
        wanted = {canonical(dict(_point(c).options)) for c in plan.candidates if c.variant == name}
        chosen = [point for point in points if canonical(dict(point.options)) in wanted]
    else:
        chosen = points
    return chosen, next((point for point in points if point.options == default.options), None)


@contextmanager
def _progress() -> Iterator[Callable[[SearchEvent], None]]:
    """A line now and then on stderr, on a terminal in place, with the best of the study in work."""
    import sys
    import time

    last = time.monotonic()
    in_place = sys.stderr.isatty()

    def listen(event: SearchEvent) -> None:
        nonlocal last
        now = time.monotonic()
        if event.kind == "plan":
            kept = f", {event.done} of them from before" if event.done else ""
            console.note(f"{event.total} trials{kept}")
        elif event.done == event.total or now - last >= (0.2 if in_place else _LINE_S):
            last = now
            best = (
                "nothing works yet"
                if event.best is None
                else f"best {event.time_us:.2f} us {event.best}"
            )
            text = f"{event.done}/{event.total} {_name(event.task)}: {best}"
            if in_place:
                sys.stderr.write(f"\r\x1b[K{text[:150]}")
                sys.stderr.flush()
            else:
                console.note(text)

    yield listen
    if in_place:
        sys.stderr.write("\r\x1b[K")


def _name(task: Task | None) -> str:
    return "" if task is None else task.name.rpartition(" ")[0]


def _report(
    summary: SearchSummary, plan: Sweep, out: Path, target: inputs.Device, title: str, as_json: bool
) -> None:
    done = sum(len(o.finished) for o in summary.outcomes)
    if summary.interrupted:
        console.error_line(f"interrupted: {done} trials are kept; the same command goes on")
        raise typer.Exit(console.INTERRUPTED)
    from kdabench.review import search_plot

    written = search_plot.write(
        summary.outcomes, out, f"{plan.stem}{'.recorded' if target.recorded else ''}.tune", title
    )
    faster = [
        o for o in summary.outcomes if o.verdict is not None and o.verdict.verdict == "faster"
    ]
    if faster:
        written.append(out / f"{plan.stem}{'.recorded' if target.recorded else ''}.tuned.toml")
        written[-1].write_text(_sweep_text(faster, title), encoding="utf-8")
    if as_json:
        console.emit_json(
            {
                "device": str(target.source),
                "recorded": target.recorded,
                "storage": summary.storage,
                "studies": [_study_json(o) for o in summary.outcomes],
                "written": [str(path) for path in written],
            }
        )
    else:
        rows = [_row(o) for o in summary.outcomes]
        headings = (
            "study",
            "trials",
            "of",
            "pruned",
            "failed",
            "winner",
            "us",
            "default us",
            "gain %",
            "",
            "verdict",
        )
        console.show_table(headings, rows, right=(1, 2, 3, 4, 6, 7, 8))
        what = "simulated on recorded samples" if target.recorded else "measured"
        console.line(f"{done} trials {what}, in {console.relative(Path(summary.storage))}")
        for path in written:
            console.line(console.relative(path))
    if summary.without_winner:
        first, more = summary.without_winner[0], len(summary.without_winner) - 1
        console.error_line(
            f"nothing works in {_name(first)}" + (f" and {more} more" if more else "")
        )
        raise typer.Exit(console.FINDING)


def _row(outcome: StudyOutcome) -> tuple[object, ...]:
    from optuna.trial import TrialState

    v = outcome.verdict
    counts = (outcome.count(TrialState.PRUNED), outcome.count(TrialState.FAIL))
    row = (_name(outcome.task), len(outcome.finished), len(outcome.task.space.points), *counts)
    if v is None:
        return (
            *row,
            None,
            None,
            None,
            None,
            "",
            "nothing works" if outcome.finished else "no trial",
        )
    gain = None if v.gain is None else f"{_percent(v.gain):.1f}"
    known = v.low is not None and v.high is not None
    interval = f"{_percent(v.low or 0):.1f} to {_percent(v.high or 0):.1f}" if known else ""
    default = None if v.default_us is None else f"{v.default_us:.2f}"
    options = ", ".join(f"{name}={value}" for name, value in v.winner.options.items())
    return (*row, options or "default", f"{v.time_us:.2f}", default, gain, interval, v.verdict)


def _percent(log_ratio: float) -> float:
    import math

    return 100 * math.expm1(log_ratio)


def _study_json(outcome: StudyOutcome) -> dict[str, Any]:
    from dataclasses import asdict

    from optuna.trial import TrialState

    v = outcome.verdict
    return {
        "study": outcome.task.name,
        "cell": asdict(outcome.task.cell),
        "variant": outcome.task.space.variant,
        "points": len(outcome.task.space.points),
        "trials": len(outcome.finished),
        "pruned": outcome.count(TrialState.PRUNED),
        "failed": outcome.count(TrialState.FAIL),
        "best_so_far_us": [
            value if value < float("inf") else None for value in outcome.best_so_far()
        ],
        "winner": None if v is None else v.winner.options,
        "time_us": None if v is None else v.time_us,
        "default_us": None if v is None else v.default_us,
        "log_gain": None if v is None else v.gain,
        "interval": None if v is None or v.low is None else [v.low, v.high],
        "verdict": None if v is None else v.verdict,
    }


def _sweep_text(outcomes: Sequence[StudyOutcome], title: str) -> str:
    """A sweep of the winners that beat their default, with the default, in the cells where they
    do."""
    from dataclasses import asdict

    cells = list(dict.fromkeys(o.task.cell for o in outcomes))
    winners = {o.verdict.winner: None for o in outcomes if o.verdict is not None}
    variants = list(dict.fromkeys(c.variant for c in winners))
    text = f'question = "Do the options that a search found ({title}) beat the default when measured like all others?"\n'
    text += f"variants = {json.dumps(variants)}\nprocesses = 3\n"
    for cell in cells:
        given = {key: value for key, value in asdict(cell).items() if value is not None}
        text += "\n[[cells]]\n" + "".join(
            f"{key} = {json.dumps(value)}\n" for key, value in given.items()
        )
    for name in variants:
        won = [c.options for c in winners if c.variant == name]
        for options in [*([] if {} in won else [{}]), *won]:
            text += f"\n[[options.{name}]]\n" + "".join(
                f"{key} = {json.dumps(value)}\n" for key, value in options.items()
            )
    return text


def _compare(
    tasks: Sequence[Task], bench: RecordedBench, seeds: int, share: float, out: Path, stem: str, title: str,
    as_json: bool,
) -> None:  # fmt: skip
    from kdabench.review import search_plot
    from kdabench.tune.compare import WAYS, compare

    points = sum(len(task.space.points) for task in tasks)
    text = f"{len(tasks)} studies, {points} points, {seeds} seeds, {share:.0%} of an exhaustive search's trials"
    console.note(text)
    found = compare(
        tasks,
        bench,
        WAYS,
        range(seeds),
        share,
        lambda f: console.note(f"{f.way}, seed {f.seed}: {100 * f.geomean:.2f} %"),
    )
    written = search_plot.write_comparison(found, out, f"{stem}.recorded", f"{title}\n{text}")
    rows = [_way_row(way, [f for f in found if f.way == way]) for way in WAYS]
    if as_json:
        keys = (
            "way",
            "regret",
            "regret_worst_seed",
            "within_1_percent",
            "worst_cell",
            "trials",
            "readings",
        )
        console.emit_json([dict(zip(keys, row, strict=True)) for row in rows])
        return
    headings = (
        "sampler",
        "regret %",
        "worst seed %",
        "within 1 % of cells",
        "worst cell %",
        "trials %",
        "readings %",
    )
    shown = [
        (
            row[0],
            *(f"{100 * value:.2f}" for value in row[1:3]),
            *(f"{100 * v:.0f}" for v in row[3:]),
        )
        for row in rows
    ]
    console.show_table(headings, shown, right=tuple(range(1, 7)))
    for path in written:
        console.line(console.relative(path))


def _way_row(way: Any, found: Sequence[Found]) -> tuple[Any, ...]:
    from statistics import fmean

    return (
        str(way),
        fmean(f.geomean for f in found),
        max(f.geomean for f in found),
        fmean(f.near for f in found),
        max(f.worst for f in found),
        fmean(f.trials for f in found),
        fmean(f.readings for f in found),
    )


COMMANDS: dict[str, Callable[..., None]] = {"tune": tune}
