"""tune: the search for schedules."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any

import typer
from optuna.trial import TrialState

from kdabench.cli import arguments, console, sweeping
from kdabench.cli.arguments import (
    OUT,
    RESULTS,
    DeviceChoice,
    Json,
    Out,
    Results,
    SweepFile,
    Variants,
)
from kdabench.data.measurements import write_atomic
from kdabench.data.paths import relative
from kdabench.data.sweep import Sweep
from kdabench.measure.session import recorded
from kdabench.measure.target import Target
from kdabench.review import search_plot
from kdabench.tune import emitted_sweep, search, tasks
from kdabench.tune.compare import WAYS, Found, compare
from kdabench.tune.heats import RecordedBench, WorkerBench
from kdabench.tune.sampler import KINDS
from kdabench.tune.search import Event, Options, Outcome, Summary, Task

_SPACES = ("sweep", "full")
_LINE_S = 5.0

Trials = Annotated[int, typer.Option(min=1, help="Trials of a study, a variant in a cell.")]
Budget = Annotated[
    float | None,
    typer.Option(metavar="SECONDS", min=1, help="Begin no trial after this many seconds."),
]
Space = Annotated[
    str,
    typer.Option(metavar="SPACE", help="sweep: its candidates; full: all that the variant can be."),
]
Sampler = Annotated[str, typer.Option(metavar="NAME", help=f"{', '.join(KINDS)}.")]
Neighbours = Annotated[
    bool,
    typer.Option(
        "--neighbours", help="Try what wins in the nearest cells before the sampler is asked."
    ),
]
Seed = Annotated[int, typer.Option(help="Of all that is random.")]
Compare = Annotated[
    bool,
    typer.Option("--compare", help="On recorded samples: compare the samplers. Keeps no study."),
]
Seeds = Annotated[int, typer.Option(min=1, help="Of each sampler, with --compare.")]
Part = Annotated[
    float,
    typer.Option(min=0.01, max=1, help="Of the exhaustive search's trials, with --compare."),
]


@dataclass(frozen=True)
class _Job:
    """What is searched, and where. names: of the variants; title: of figures"""

    plan: Sweep
    names: Sequence[str]
    full: bool
    target: Target
    out: Path
    as_json: bool

    @property
    def title(self) -> str:
        where = ", replay of recorded measurements" if self.target.replay else ""
        return f"{self.plan.stem} on {self.target.name}{where}"

    def path(self, suffix: str) -> Path:
        """OUT/<sweep>.<suffix>; a recorded run's says so."""
        return self.out / f"{self.plan.stem}{'.replay' if self.target.replay else ''}.{suffix}"


def command(
    file: SweepFile,
    device: DeviceChoice = "auto",
    trials: Trials = 50,
    budget: Budget = None,
    variant: Variants = None,
    space: Space = "sweep",
    sampler: Sampler = "transfer",
    neighbours: Neighbours = False,
    seed: Seed = 0,
    compare: Compare = False,
    seeds: Seeds = 5,
    share: Part = 0.25,
    out: Out = OUT,
    results: Results = RESULTS,
    as_json: Json = False,
) -> None:
    """Search each variant's fastest options by Optuna, cell by cell.

    Every trial is kept in OUT/<sweep>.tune.db: the same command goes on where it stopped, and `optuna-dashboard
    sqlite:///OUT/<sweep>.tune.db` shows it. What is found is measured again beside the default; what is faster goes to
    OUT/<sweep>.tuned.toml, a sweep. Without a GPU the search runs on the recorded measurements, where a candidate
    that was not recorded doesn't exist. Exit status 1 if in some cell every candidate failed.

    \b
    Examples:
      kdabench tune sweeps/quick.toml
      kdabench tune sweeps/quick.toml --variant KdaSplit --space full --budget 1200
      kdabench tune sweeps/quick.toml --device replay:nvidia-h200 --trials 50
      kdabench tune sweeps/quick.toml --device replay:nvidia-h200 --space full --compare
    """
    options = _options(trials, sampler, seed, neighbours)
    job = _job(file, device, variant, space, out, results, as_json)
    _require_records(job, compare)
    sweeping.announce(job.target, device, results, as_json)
    arguments.require_writable(out)
    if compare:
        _compare(job, results, seeds, share)
    else:
        _report(job, _search(job, results, options, budget))


def _options(trials: int, sampler: str, seed: int, neighbours: bool) -> Options:
    arguments.one_of("--sampler", sampler, KINDS)
    return Options(trials, sampler, seed, warm=neighbours)  # type: ignore[arg-type]


def _job(
    file: Path,
    device: str,
    variant: list[str] | None,
    space: str,
    out: Path,
    results: Path,
    as_json: bool,
) -> _Job:
    arguments.require_sweep_file(file)
    arguments.one_of("--space", space, _SPACES)
    target = arguments.find_target(device, results)
    plan = arguments.load_sweep(file, target.sms)
    names = arguments.chosen_variants(variant, plan.variants)
    return _Job(plan, names, space == "full", target, out, as_json)


def _require_records(job: _Job, compare: bool) -> None:
    if compare and not job.target.replay:
        console.fail(
            "--compare: the best of each cell must be known: --device replay:<recorded device>"
        )


def _search(job: _Job, results: Path, options: Options, budget: float | None) -> Summary:
    path = job.path("tune.db")
    with console.user_input():
        bench, studies = _studies(job, results)
    opened = bench if isinstance(bench, WorkerBench) else nullcontext(bench)
    with search.open_storage(path) as storage, _progress() as listener, opened:
        return search.run(
            studies, bench, storage, options, budget_s=budget, listener=listener, where=str(path)
        )


def _studies(job: _Job, results: Path) -> tuple[RecordedBench | WorkerBench, list[Task]]:
    return _on_records(job, results) if job.target.replay else _on_gpu(job)


def _on_records(job: _Job, results: Path) -> tuple[RecordedBench, list[Task]]:
    bench = RecordedBench(recorded(results / job.target.slug, job.plan))
    return bench, tasks.on_records(job.plan, job.names, job.full, bench)


def _on_gpu(job: _Job) -> tuple[WorkerBench, list[Task]]:
    index = int(job.target.choice.removeprefix("cuda:"))
    studies = tasks.on_gpu(job.plan, job.names, job.full, index)
    return WorkerBench(index, note=console.note), studies


@contextmanager
def _progress() -> Iterator[Callable[[Event], None]]:
    """A line now and then on stderr, on a terminal in place, with the best of the study in work."""

    last = time.monotonic()
    in_place = sys.stderr.isatty()

    def listen(event: Event) -> None:
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


def _report(job: _Job, summary: Summary) -> None:
    done = sum(len(o.finished) for o in summary.outcomes)
    if summary.interrupted:
        console.error_line(f"interrupted: {done} trials are kept; the same command goes on")
        raise typer.Exit(console.INTERRUPTED)
    written = _write(job, summary)
    if job.as_json:
        console.emit_json(_json(job, summary, written))
    else:
        console.show_table(
            _HEADINGS, [_row(o) for o in summary.outcomes], right=(1, 2, 3, 4, 6, 7, 8)
        )
        what = "simulated on recorded samples" if job.target.replay else "measured"
        console.line(f"{done} trials {what}, in {relative(Path(summary.storage))}")
        for path in written:
            console.line(relative(path))
    if summary.without_winner:
        first, more = summary.without_winner[0], len(summary.without_winner) - 1
        others = f" and {more} more" if more else ""
        console.error_line(f"nothing works in {_name(first)}{others}")
        raise typer.Exit(console.FINDING)


def _write(job: _Job, summary: Summary) -> list[Path]:
    """Write figures, and a sweep of what was found to be faster."""
    written = search_plot.write(summary.outcomes, job.out, job.path("tune").name, job.title)
    faster = emitted_sweep.winners(summary.outcomes)
    if faster:
        written.append(job.path("tuned.toml"))
        write_atomic(written[-1], emitted_sweep.text(faster, job.title))
    return written


def _json(job: _Job, summary: Summary, written: Sequence[Path]) -> dict[str, Any]:
    return {
        "device": job.target.choice,
        "replay": job.target.replay,
        "storage": summary.storage,
        "studies": [_study_json(o) for o in summary.outcomes],
        "written": [str(path) for path in written],
    }


_HEADINGS = (
    *("study", "trials", "of", "pruned", "failed"),
    *("winner", "us", "default us", "gain %", "", "verdict"),
)


def _row(outcome: Outcome) -> tuple[object, ...]:
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

    return 100 * math.expm1(log_ratio)


def _study_json(outcome: Outcome) -> dict[str, Any]:

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


_WAY_KEYS = (
    *("way", "regret", "regret_worst_seed", "within_1_percent"),
    *("worst_cell", "trials", "readings"),
)
_WAY_HEADINGS = (
    *("sampler", "regret %", "worst seed %", "within 1 % of cells"),
    *("worst cell %", "trials %", "readings %"),
)


def _compare(job: _Job, results: Path, seeds: int, share: float) -> None:
    with console.user_input():
        bench, studies = _on_records(job, results)
    points = sum(len(task.space.points) for task in studies)
    text = f"{len(studies)} studies, {points} points, {seeds} seeds, {share:.0%} of an exhaustive search's trials"
    console.note(text)
    found = compare(studies, bench, WAYS, range(seeds), share, _note_way)
    title = f"{job.title}\n{text}"
    written = search_plot.write_comparison(found, job.out, f"{job.plan.stem}.replay", title)
    rows = [_way_row(way, [f for f in found if f.way == way]) for way in WAYS]
    if job.as_json:
        console.emit_json([dict(zip(_WAY_KEYS, row, strict=True)) for row in rows])
        return
    console.show_table(_WAY_HEADINGS, list(map(_way_texts, rows)), right=range(1, 7))
    for path in written:
        console.line(relative(path))


def _note_way(found: Found) -> None:
    console.note(f"{found.way}, seed {found.seed}: {100 * found.geomean:.2f} %")


def _way_texts(row: Sequence[Any]) -> tuple[str, ...]:
    precise = (f"{100 * value:.2f}" for value in row[1:3])
    return (row[0], *precise, *(f"{100 * value:.0f}" for value in row[3:]))


def _way_row(way: Any, found: Sequence[Found]) -> tuple[Any, ...]:
    return (
        str(way),
        fmean(f.geomean for f in found),
        max(f.geomean for f in found),
        fmean(f.near for f in found),
        max(f.worst for f in found),
        fmean(f.trials for f in found),
        fmean(f.readings for f in found),
    )
