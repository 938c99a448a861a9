"""The search for schedules: spaces, samplers, studies that are killed, heats on workers, the
command."""

from __future__ import annotations

import json
import math
import os
import random
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import optuna
import pytest
import typer
from optuna.storages import InMemoryStorage
from optuna.trial import TrialState

from kda_kernels import variants
from kdabench import cli
from kdabench.cli import inputs
from kdabench.data import measurements, sweep
from kdabench.data.measurements import Candidate, Cell, Measurement
from kdabench.measure.contest import Contest, Left, Plan
from kdabench.review import search_plot
from kdabench.tune import search
from kdabench.tune.heats import Heat, RecordedBench, WorkerBench
from kdabench.tune.sampler import KINDS
from kdabench.tune.space import Point, Space, apart, cell_title
from support import synthetic, tune_killed, workers
from support.tune_killed import TASKS, PlantedBench, planted_us, space

ROOT = Path(__file__).parents[2]
CELL = Cell("decode", 8, 12)


def finished(storage: Any) -> list[tuple[Any, ...]]:
    """What counts of all finished trials."""
    studies = optuna.study.get_all_study_names(storage)
    trials = [
        (name, t)
        for name in studies
        for t in optuna.load_study(study_name=name, storage=storage).trials
    ]
    return sorted(
        (name, sorted(t.params.items()), t.state.name, t.value)
        for name, t in trials
        if t.state.is_finished()
    )


# --- spaces
# -----------------------------------------------------------------------------------------------------------


def test_a_space_is_its_points_not_their_box() -> None:
    options = [{"split": 1, "staging": "shared"}, {"split": 2}, {"split": 8}, {"split": 8}]
    full = [{"staging": "registers", "gate_mode": 0, **options} for options in options]
    found = Space.of(
        "KdaSplit",
        [Point(Candidate.of("KdaSplit", s), o) for s, o in zip(options, full, strict=True)],
    )
    assert len(found.points) == 3
    assert found.values == {"split": [1, 2, 8], "staging": ["registers", "shared"]}
    assert isinstance(found.distributions["split"], optuna.distributions.IntDistribution)
    assert isinstance(found.distributions["staging"], optuna.distributions.CategoricalDistribution)
    assert found.place({"split": 8, "staging": "registers"}) == 2
    assert found.place({"split": 8, "staging": "shared"}) is None
    assert found.nearest({"split": 5, "staging": "registers"}, [0, 1, 2]) == 2
    assert found.nearest({"split": 5, "staging": "registers"}, [0, 1]) == 1


def test_none_and_flags_are_values_of_an_option() -> None:
    options: list[dict[str, Any]] = [
        {"ctas": None, "pdl": True},
        {"ctas": 2, "pdl": False},
        {"ctas": 3, "pdl": True},
    ]
    found = Space.of(
        "KdaWide", [Point(Candidate.of("KdaWide", {"n": n}), o) for n, o in enumerate(options)]
    )
    assert isinstance(found.distributions["ctas"], optuna.distributions.CategoricalDistribution)
    assert [found.place(params) for params in found.params] == [0, 1, 2]


def test_cells_borrow_only_from_their_like() -> None:
    assert apart(CELL, Cell("decode", 8, 12, state_dtype="bf16")) is None
    near, far = apart(CELL, Cell("decode", 16, 12)), apart(CELL, Cell("decode", 256, 12))
    assert near is not None
    assert far is not None
    assert 0 < near < far


def test_titles_tell_cells_apart() -> None:
    cells = [
        CELL,
        Cell("record", 8, 12, 4),
        Cell("decode", 8, 12, context="isolated"),
        Cell("decode", 8, 12, l2="warm"),
    ]
    assert len({cell_title(cell) for cell in cells}) == 4
    assert cell_title(CELL) == "decode H=12 R=8"


# --- samplers
# ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_every_sampler_takes_every_point_once(kind: Any) -> None:
    small = space(
        {
            "split": (1, 2, 4, 8),
            "threads": (128, 256),
            "staging": ("registers",),
            "pdl": (False, True),
        }
    )
    task = search.Task(CELL, Space.of("KdaSplit", small.points[:7]))
    bench, storage = PlantedBench(), InMemoryStorage()
    summary = search.run(
        [task], bench, storage, search.SearchOptions(50, kind, finalists=0, processes=0)
    )
    assert bench.heats == 7
    assert {search.candidate_of(task.space, t) for t in summary.outcomes[0].trials} == {
        p.candidate for p in task.space.points
    }


def test_a_seed_repeats_a_search() -> None:
    def path(seed: int) -> list[Any]:
        storage = InMemoryStorage()
        search.run(
            TASKS[:1],
            PlantedBench(),
            storage,
            search.SearchOptions(9, "tpe", seed, finalists=0, processes=0),
        )
        return finished(storage)

    assert path(3) == path(3)
    assert path(3) != path(4)


WIDE = space({**tune_killed.AXES, "gate_mode": (0, 1, 2), "evict": (False, True)})


@pytest.mark.parametrize("seed", range(5))
def test_a_quarter_of_a_grid_is_enough_for_tpe(seed: int) -> None:
    task = search.Task(CELL, WIDE)
    best = min(planted_us(CELL, p.candidate) for p in WIDE.points)
    options = search.SearchOptions(len(WIDE.points) // 4, "tpe", seed, finalists=0, processes=0)
    outcome = search.run([task], PlantedBench(), InMemoryStorage(), options).outcomes[0]
    assert len(outcome.finished) == 48
    assert outcome.best_so_far()[-1] <= 1.01 * best


def recorded_tasks(bench: RecordedBench, cells: Sequence[Cell], variant: str) -> list[search.Task]:
    return [
        search.Task(
            cell,
            Space.of(
                variant, [Point(c, c.options) for c in bench.recorded(cell) if c.variant == variant]
            ),
        )
        for cell in cells
    ]


@pytest.mark.parametrize("sampler", ["tpe", "transfer"])
def test_a_quarter_of_the_recorded_grid_is_enough(sampler: Any) -> None:
    """Decodes of the H200, 168 candidates in each: within 1 % of the exhaustive best, with each of
    five seeds."""
    path = ROOT / "results" / "nvidia-h200" / "grid.jsonl"
    lines = [
        line
        for line in path.read_text().splitlines()
        if '"decode"' in line and '"KdaSplit"' in line
    ]
    bench = RecordedBench([Measurement.from_json(json.loads(line)) for line in lines])
    tasks = recorded_tasks(bench, bench.cells, "KdaSplit")
    assert [len(t.space.points) for t in tasks] == [168] * 6
    best = [
        min(us for p in t.space.points if (us := bench.time_us(t.cell, p.candidate))) for t in tasks
    ]
    for seed in range(5):
        options = search.SearchOptions(
            sampler=sampler, seed=seed, share=0.25, finalists=0, processes=0
        )
        outcomes = search.run(tasks, bench, InMemoryStorage(), options).outcomes
        assert all(len(o.finished) <= 42 for o in outcomes)
        assert all(o.best_so_far()[-1] <= 1.01 * us for o, us in zip(outcomes, best, strict=True))


# --- studies
# ----------------------------------------------------------------------------------------------------------


class Scripted:
    """Fails, prunes or is interrupted as told, by split."""

    def __init__(self, does: dict[int, str]) -> None:
        self.does, self.pairs = does, list[tuple[Any, Any]]()

    def fresh(self) -> None:
        pass

    def heat(
        self, cell: Cell, candidates: Sequence[Candidate], plan: Plan, process: int = 0
    ) -> Heat:
        split = int(candidates[0].options["split"])
        self.pairs.append(
            (split, int(candidates[1].options["split"]) if len(candidates) > 1 else None)
        )
        heat = Heat(Contest({}, {}, {}))
        for n, c in enumerate(candidates):
            heat.contest.samples[c] = [
                planted_us(cell, c) * (1 + 0.01 * len(self.pairs) * (n + 1) / (n + 1))
            ] * 3
            heat.contest.rounds[c] = [0, 1, 2]
        match self.does.get(split):
            case "wrong":
                heat.failed[candidates[0]] = ("wrong", "made up")
            case "hopeless":
                text = "hopeless: over 1.5x the best after 1 rounds"
                heat.contest.left[candidates[0]] = Left("hopeless", text)
            case "interrupt":
                raise KeyboardInterrupt
        return heat


SPLITS = search.Task(
    CELL, space({"split": (1, 2, 4, 8), "threads": (128,), "staging": ("shared",), "pdl": (False,)})
)


def test_what_failed_has_no_value_and_what_was_pruned_its_first_round() -> None:
    bench = Scripted({1: "wrong", 8: "hopeless"})
    outcome = search.run(
        [SPLITS], bench, InMemoryStorage(), search.SearchOptions(10, "exhaustive")
    ).outcomes[0]
    assert [t.state.name for t in outcome.trials] == ["FAIL", "COMPLETE", "COMPLETE", "PRUNED"]
    assert outcome.trials[0].values is None
    assert outcome.trials[0].user_attrs["heat"]["reason"] == "made up"
    assert outcome.trials[3].intermediate_values.keys() == {0}
    assert bench.pairs[:4] == [(1, None), (2, None), (4, 2), (8, 4)]
    assert outcome.verdict is not None
    assert outcome.verdict.winner.options["split"] == 4


def test_drift_between_trials_cancels() -> None:
    """The made-up GPU slows down by 1 % a trial; values stay as if it didn't."""
    outcome = search.run(
        [SPLITS], Scripted({}), InMemoryStorage(), search.SearchOptions(10, "exhaustive")
    ).outcomes[0]
    first = outcome.trials[0].value
    assert first is not None
    for trial in outcome.trials:
        split = trial.params["split"]
        true = planted_us(CELL, SPLITS.space.points[[1, 2, 4, 8].index(split)].candidate)
        assert trial.value == pytest.approx(
            first * true / planted_us(CELL, SPLITS.space.points[0].candidate)
        )


def test_the_best_are_measured_again_against_the_default() -> None:
    outcome = search.run(
        [SPLITS], PlantedBench(), InMemoryStorage(), search.SearchOptions(10, "exhaustive")
    ).outcomes[0]
    verdict = outcome.verdict
    assert verdict is not None
    assert (verdict.winner.options["split"], verdict.verdict) == (4, "faster")
    one, four = (planted_us(CELL, SPLITS.space.points[n].candidate) for n in (0, 2))
    assert verdict.gain == pytest.approx(math.log(one / four))


def test_nothing_works() -> None:
    bench = Scripted(dict.fromkeys((1, 2, 4, 8), "wrong"))
    summary = search.run([SPLITS], bench, InMemoryStorage(), search.SearchOptions())
    assert summary.without_winner == [SPLITS]
    assert summary.outcomes[0].verdict is None


def test_neighbours_winners_are_tried_first() -> None:
    summary = search.run(
        TASKS, PlantedBench(), InMemoryStorage(), search.SearchOptions(8, "random", warm=True)
    )
    first = summary.outcomes[0].trials[0]
    assert summary.outcomes[1].trials[0].params == first.params


def test_a_budget_ends_a_search_and_the_next_goes_on(tmp_path: Path) -> None:
    path, options = tmp_path / "made-up.tune.db", search.SearchOptions(4, finalists=0, processes=0)
    with search.open_storage(path) as storage:
        first = search.run(TASKS, PlantedBench(0.2), storage, options, budget_s=0.9)
        count = len(finished(storage))
        assert 0 < count < 12
        assert not first.interrupted
    for left in (12 - count, 0):
        with search.open_storage(path) as storage:
            bench = PlantedBench()
            search.run(TASKS, bench, storage, options)
            assert bench.heats == left


def test_an_interrupted_trial_is_queued_again() -> None:
    storage = InMemoryStorage()
    options = search.SearchOptions(10, "random", finalists=0, processes=0)
    broken = search.run([SPLITS], Scripted({4: "interrupt"}), storage, options)
    assert broken.interrupted
    outcome = search.run([SPLITS], Scripted({}), storage, options).outcomes[0]
    assert {t.state for t in outcome.trials} == {TrialState.COMPLETE}
    assert len(outcome.trials) == 4


def test_killed_five_times_a_search_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    whole = tmp_path / "whole.db"
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(ROOT / part) for part in (".", "kernels", "tests")),
    }

    def start(path: Path) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, str(ROOT / "tests" / "support" / "tune_killed.py"), str(path)],
            env=environment,
        )

    with search.open_storage(whole) as storage:
        search.run(TASKS, PlantedBench(), storage, search.SearchOptions(8, "tpe", warm=True))
        expected = finished(storage)
    killed, rng = tmp_path / "killed.db", random.Random(0)
    for stop in sorted(rng.sample(range(1, 23), 5)):
        process = start(killed)
        while process.poll() is None and trials_in(killed) < stop:
            time.sleep(0.005)
        time.sleep(rng.uniform(0, 0.05))
        assert process.poll() is None, "ended before it was killed"
        process.kill()
        process.wait()
    assert start(killed).wait() == 0
    with search.open_storage(killed) as storage:
        assert finished(storage) == expected
        assert len(expected) == 24
        for name in optuna.study.get_all_study_names(storage):
            states = {t.state for t in optuna.load_study(study_name=name, storage=storage).trials}
            assert states <= {TrialState.COMPLETE, TrialState.PRUNED}


def trials_in(path: Path) -> int:
    import sqlite3

    try:
        with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as db:
            return int(
                db.execute("SELECT count(*) FROM trials WHERE state = 'COMPLETE'").fetchone()[0]
            )
    except sqlite3.OperationalError:
        return 0


def test_one_search_at_a_time(tmp_path: Path) -> None:
    from kdabench.measure.errors import JournalBusy

    busy = pytest.raises(JournalBusy, match=r"a\.db: is being written by pid")
    with search.open_storage(tmp_path / "a.db"), busy, search.open_storage(tmp_path / "a.db"):
        pass


# --- heats
# ------------------------------------------------------------------------------------------------------------


def test_a_heat_on_records() -> None:
    slow, fast, broken, refused = (synthetic.split(s) for s in (1, 4, 2, 8))
    made: list[Measurement] = [
        *(synthetic.measurement(CELL, slow, [8.0] * 5, p) for p in range(2)),
        *(synthetic.measurement(CELL, fast, [5.0, 4.9, 5.1, 5.0, 5.0], p) for p in range(2)),
        synthetic.failed(CELL, broken, "wrong"),
        synthetic.failed(CELL, refused, "unsupported"),
    ]
    bench = RecordedBench(made)
    assert set(bench.recorded(CELL)) == {slow, fast, broken}
    heat = bench.heat(CELL, [slow, fast], Plan(hopeless=1.5, sentinel=False))
    assert heat.contest.left[slow].why == "hopeless"
    assert heat.ratio(slow, fast) == pytest.approx(1.6)
    assert bench.heat(CELL, [broken, fast], Plan()).failed == {broken: ("wrong", "synthetic wrong")}


def test_a_heat_on_a_worker_and_one_that_loses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    good, better, bad = workers.candidate(1), workers.candidate(8), workers.candidate(2, "abort")
    notes: list[str] = []
    with WorkerBench(0, notes.append, workers.obedient) as bench:
        heat = bench.heat(CELL, [better, good], workers.PLAN)
        assert heat.ratio(better, good) == pytest.approx(4.2 / 4.9, rel=0.01)
        assert heat.failed == {}
        slow, fast = workers.candidate(1), workers.candidate(40)
        told = bench.heat(CELL, [slow, fast], replace(workers.PLAN, hopeless=1.5))
        assert (told.contest.left[slow].why, told.failed) == ("hopeless", {})
        lost = bench.heat(CELL, [bad, good], workers.PLAN)
        assert lost.failed[bad][0] == "fault"
        assert len(notes) == 1
        assert bench.heat(CELL, [good], workers.PLAN).failed == {}


# --- the command
# ------------------------------------------------------------------------------------------------------

SWEEP = """\
question = "Which split of a made-up device is fastest?"
variants = ["stock", "KdaSplit"]

[[cells]]
kind = "decode"
heads = [12, 96]
requests = [1, 16, 256]

[options.KdaSplit]
split = [1, 2, 4, 8]
pdl = [false, true]
"""


@pytest.fixture
def kdabench(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Any:
    """Run a command where a made-up device was recorded: exit status, stdout and stderr."""
    (tmp_path / "made-up.toml").write_text(SWEEP)
    plan = inputs.load_sweep(tmp_path / "made-up.toml", 100)
    folder = tmp_path / "results" / "synthetic-one"
    measurements.dump(
        synthetic.measurements(plan.cells, plan.candidates, processes=3), folder / "made-up.jsonl"
    )
    (folder / "env.json").write_text(json.dumps(synthetic.ENVS))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("kdabench.measure.sources._gpu_count", lambda: 0)

    def run(*arguments: str) -> tuple[int, str, str]:
        status = cli._status(["tune", "made-up.toml", *arguments])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def test_tune_on_recorded_samples(kdabench: Any) -> None:
    status, out, err = kdabench("--trials", "5", "--sampler", "tpe")
    assert status == 0, err
    assert out.startswith("no GPU found: recorded run of SYNTHETIC ONE")
    assert "KdaSplit decode H=12 R=1" in out
    assert "30 trials simulated on recorded samples, in out/made-up.recorded.tune.db" in out
    assert Path("out/made-up.recorded.tune.best.svg").stat().st_size > 1000
    assert Path("out/made-up.recorded.tune.importance.png").stat().st_size > 1000
    again = sweep.load(Path("out/made-up.recorded.tuned.toml"), inputs.known_options())
    assert Candidate.of("KdaSplit", {}) in again.candidates
    assert "recorded run" in again.question

    status, out, _ = kdabench("--trials", "8", "--json")
    found = json.loads(out)
    assert (status, found["recorded"]) == (0, True)
    assert [study["trials"] for study in found["studies"]] == [8] * 6
    assert found["studies"][0]["winner"]["split"] == 8


def test_compare_samplers(kdabench: Any) -> None:
    status, out, err = kdabench("--compare", "--seeds", "1", "--share", "0.5")
    assert status == 0, err
    assert "exhaustive" in out
    assert Path("out/made-up.recorded.samplers.svg").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--sampler", "best"), "--sampler: 'best': one of transfer, tpe, gp, random, exhaustive"),
        (("--space", "all"), "--space: 'all': one of sweep, full"),
        (("--variant", "KdaWS"), "--variant: 'KdaWS': one of stock, KdaSplit"),
        (("--variant", "stock"), "made-up.toml: nothing to choose from"),
        (("--trials", "0"), "invalid value for '--trials'"),
    ],
)
def test_mistakes(kdabench: Any, arguments: tuple[str, ...], message: str) -> None:
    status, _, err = kdabench(*arguments)
    assert status == 2
    assert message in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize("name", variants.NAMES)
def test_full_space_holds_what_is_for_a_tuner_to_choose(name: str) -> None:
    from kda_kernels.device.gpu import Gpu
    from kdabench.cli import tuning

    kinds = variants.declared(name).kinds
    kind = "record" if "record" in kinds else kinds[0]
    cell = replace(CELL, kind=kind, tokens=4, pending=None if kind == "record" else "mix")
    plan = sweep.Sweep(Path("x.toml"), "?", (name,), 1, (cell,), ())
    points, _ = tuning._supported_points(plan, cell, name, True, Gpu("sm_90a", 132))
    assert len({p.candidate for p in points}) == len(points) > 2
    default = tuning._default(name).options
    given = variants.declared(name).given
    assert all(p.options[option] == default[option] for p in points for option in given)


def test_an_option_without_values_to_try_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Once the product over its values was empty, and the variant left out in silence."""
    from kdabench.cli import tuning

    declared = replace(variants.declared("stock"), tried={"num_warps": (1, 2)})
    monkeypatch.setattr(variants, "declared", lambda name: declared)
    with pytest.raises(typer.Exit):
        list(tuning._every("stock", CELL))
    assert (
        "stock: option value_tile counts something: TRIED must list values"
        in capsys.readouterr().err
    )


def test_importance_names_the_option_that_matters() -> None:
    outcomes = search.run(
        TASKS[:1], PlantedBench(), InMemoryStorage(), search.SearchOptions(32, "random")
    ).outcomes
    assert next(iter(search_plot.importances(outcomes))) == "split"
