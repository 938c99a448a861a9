"""Adaptive sweeps: what is measured of made-up rows, in which order, and what becomes of interrupts
and shares."""

import json
import math
import random
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from kdabench import cli
from kdabench.data import measurements
from kdabench.data.measurements import Candidate, Cell, Measurement, cell_order
from kdabench.data.sweep import Sweep
from kdabench.measure import session
from kdabench.measure.journal import Journal, merge
from kdabench.measure.recorded import RecordedRunner
from kdabench.policy import adaptive, emit, fit, regret
from kdabench.policy.adaptive import MOST, Course, first_cells, part, rows_of
from kdabench.policy.rows import find_rows
from support import synthetic

RECORDED = Path(__file__).parents[2] / "results" / "nvidia-h200"
SMS = 100
ONE, TWO = (Candidate.of("KdaSplit", {"split": n}) for n in (1, 2))
Times = Callable[[Cell, Candidate], float]


def row(requests: Sequence[int], heads: int = 1) -> list[Cell]:
    return [Cell("decode", r, heads) for r in requests]


def measured(cell: Cell, times: Times, noise: float = 0.0, process: int = 0) -> list[Measurement]:
    rng = random.Random(f"{cell.key}{process}")
    return [
        synthetic.measurement(
            cell, c, [times(cell, c) * math.exp(rng.gauss(0, noise)) for _ in range(5)], process
        )
        if times(cell, c) < math.inf
        else synthetic.failed(cell, c, process=process)
        for c in (ONE, TWO)
    ]


def chosen(
    cells: Sequence[Cell], times: Times, noise: float = 0.0, processes: int = 1, **options: float
) -> list[tuple[Cell, int]]:
    course = Course(cells, (ONE, TWO), processes, **options)  # type: ignore[arg-type]
    found: list[tuple[Cell, int]] = []
    while (pair := course.next()) is not None:
        found.append(pair)
        course.tell(*pair, measured(pair[0], times, noise, pair[1]), SMS)
    assert len(set(found)) == len(found)
    assert course.total == len(found)
    return found


def most_lost(cells: Sequence[Cell], times: Times, found: Sequence[tuple[Cell, int]]) -> float:
    """By the policy that is fitted on what was found, in any of the cells."""
    some, whole = (
        [r for cell in where for r in measured(cell, times)]
        for where in ([c for c, _ in found], cells)
    )
    fitted, grid = regret.make_grid(some), regret.make_grid(whole)
    assert fitted.candidates == grid.candidates
    (heads_rows,) = find_rows(fitted, SMS).values()
    (taken,) = heads_rows.values()
    picked = [taken[max(items for items in taken if items <= cell.items)] for cell in grid.cells]
    return float(np.expm1(regret.log_regret(grid, np.array(picked)).max()))


def crossing(at: float, slope: float = 0.3) -> Times:
    """TWO is the faster one below so many items."""
    return lambda cell, c: 10.0 * (cell.items / at) ** (slope if c is TWO else 0.0)


def waves(cell: Cell, c: Candidate) -> float:
    """TWO needs twice the CTAs, each of them a third faster."""
    splits = int(c.options["split"])
    return math.ceil(cell.items * splits / SMS) * (9.0 if splits == 1 else 6.0)


def test_rows_differ_in_requests_alone_and_parts_are_whole_rows() -> None:
    cells = tuple(
        sorted([*row((1, 4, 16)), *row((2, 8), heads=12), *row((3,), heads=96)], key=cell_order)
    )
    assert [[c.requests for c in found] for found in rows_of(cells)] == [[1, 4, 16], [2, 8], [3]]
    first, second = part(cells, 1, 2), part(cells, 2, 2)
    assert {c.heads for c in first} == {1, 96}
    assert {c.heads for c in second} == {12}
    assert part(cells, 1, 1) == cells


@pytest.mark.parametrize(
    ("requests", "first"),
    [
        ((5,), {5}),
        ((1, 2), {1, 2}),
        (range(1, 257), {1, 16, 256}),
        ((1, 3, 11, 23, 256), {1, 23, 256}),
    ],
)
def test_a_row_begins_with_its_ends_and_a_geometric_selection(
    requests: Sequence[int], first: set[int]
) -> None:
    cells = row(requests)
    assert {cells[at].requests for at in first_cells(cells)} == first


def test_a_crossover_is_found_with_few_cells() -> None:
    cells = row(range(1, 257))
    found = chosen(cells, crossing(40.5))
    assert len(found) <= 3 + MOST
    assert most_lost(cells, crossing(40.5), found) < adaptive.TARGET


def test_the_cells_may_be_limited() -> None:
    """Those that are chosen are the first that would be chosen without a limit; later processes
    measure no others."""
    cells = row(range(1, 257))
    whole = [cell for cell, process in chosen(cells, crossing(40.5)) if process == 0]
    for most in (1, 5, len(whole), 100):
        found = chosen(cells, crossing(40.5), processes=2, most=most)
        assert [cell for cell, process in found if process == 0] == whole[: max(3, most)]
        assert {cell for cell, process in found if process == 1} == set(whole[: max(3, most)])


def test_a_row_with_one_clear_winner_is_left_alone() -> None:
    cells = row(range(1, 257))
    assert len(chosen(cells, lambda cell, c: 10.0 if c is ONE else 11.0)) == 3


def test_edges_of_waves_are_measured_where_they_matter() -> None:
    cells = row((1, 10, 30, 49, 50, 51, 70, 99, 100, 101, 130, 160))
    found = chosen(cells, waves)
    assert len(found) < len(cells)
    assert most_lost(cells, waves, found) < adaptive.TARGET
    assert most_lost(cells, waves, [(cell, 0) for cell in cells[::5]]) > 0.2, "others would not do"


def test_where_an_sm_gets_one_more_cta_and_where_a_wave_of_all_ends() -> None:
    steps = {ctas: round(math.expm1(jump), 9) for ctas, jump in adaptive._edges(3, 100, 901)}
    assert steps == {100: 1.0, 200: 0.5, 300: 1.0, 600: 0.5, 900: round(1 / 3, 9)}
    assert dict(adaptive._edges(0, 100, 901)).keys() == set(range(100, 801, 100))
    assert dict(adaptive._edges(1, 100, 901)).keys() == set(range(100, 901, 100))
    assert adaptive._edges(3, None, 901) == ()
    options = ({}, {"ctas": 3}, {"ctas_per_sm": 0}, {"ctas_per_sm": 2})
    assert [adaptive.residents_of(Candidate.of("KdaWide", options)) for options in options] == [
        0,
        3,
        0,
        2,
    ]
    assert adaptive.residents_of(Candidate.of("KdaStream", {})) == 1


def test_no_crossover_gets_more_than_its_cells() -> None:
    cells = row(range(1, 257))
    rng = random.Random(0)
    times = {(cell, c): rng.uniform(10, 20) for cell in cells for c in (ONE, TWO)}
    found = sorted(cell.requests for cell, _ in chosen(cells, lambda cell, c: times[cell, c]))
    faster = [times[cells[r - 1], ONE] < times[cells[r - 1], TWO] for r in found]
    changes = sum(a != b for a, b in pairwise(faster))
    assert len(found) <= 3 + MOST * max(2, changes)


def test_noise_ends_the_search_between_what_is_alike() -> None:
    cells = row(range(1, 257))
    alike = crossing(40.5, slope=0.002)
    assert (
        len(chosen(cells, alike, noise=0.05, target=0.0))
        < len(chosen(cells, alike, target=0.0)) / 2
    )


@pytest.mark.parametrize("dead", [range(65, 257), range(1, 257)])
def test_cells_without_times(dead: range) -> None:
    def times(cell: Cell, c: Candidate) -> float:
        return math.inf if cell.requests in dead else 10.0

    found = {cell.requests for cell, _ in chosen(row((1, 4, 16, 32, 64, 65, 128, 256)), times)}
    assert (len(found) == 3) if len(dead) == 256 else ({64, 65} <= found), (
        "where something begins to run is looked for"
    )


def test_later_processes_take_what_is_unsettled_first() -> None:
    def times(cell: Cell, c: Candidate) -> float:
        return 10.0 if c is ONE or cell.requests == 16 else 15.0

    cells = row((1, 4, 16, 64, 256))
    found = chosen(cells, times, noise=0.02, processes=3)
    first = [cell for cell, process in found if process == 0]
    assert sorted(found, key=lambda pair: (pair[1], pair[0].requests)) == [
        (cell, process)
        for process in range(3)
        for cell in sorted(first, key=lambda cell: cell.requests)
    ]
    later = found[len(first) :]
    assert later[:2] == [(cells[2], 1), (cells[2], 2)]
    assert [process for _, process in later[2:]] == [1] * (len(first) - 1) + [2] * (len(first) - 1)


def test_the_order_follows_from_what_was_told_in_whatever_order() -> None:
    cells = sorted([*row(range(1, 100, 3)), *row(range(1, 60, 2), heads=12)], key=cell_order)
    found = chosen(cells, waves, noise=0.01, processes=2)
    for cut in range(0, len(found), 7):
        again = Course(cells, (ONE, TWO), 2)
        for pair in random.Random(cut).sample(found[:cut], cut):
            again.tell(*pair, measured(pair[0], waves, 0.01, pair[1]), SMS)
        assert again.next() == found[cut]


def test_what_was_begun_is_measured_in_any_case() -> None:
    cells = row(range(1, 257))
    course = Course(cells, (ONE, TWO), 2, begun=[cells[76]])
    course.tell(cells[76 + 100], 1, measured(cells[176], waves, process=1), SMS)
    asked = set()
    while (pair := course.next()) is not None:
        asked.add(pair)
        course.tell(*pair, measured(pair[0], crossing(1000), process=pair[1]), SMS)
    assert {(cells[76], 0), (cells[76], 1), (cells[176], 0)} <= asked


def test_what_a_recorded_run_lacks_is_asked_for_once() -> None:
    cells = row(range(1, 257))
    course, asked = Course(cells, (ONE, TWO), 1), []
    while (pair := course.next()) is not None:
        asked.append(pair[0].requests)
        course.tell(*pair, [] if pair[0].requests % 2 else measured(pair[0], crossing(40)), None)
    assert len(set(asked)) == len(asked) < 60


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Records of a made-up device; two rows."""
    made = synthetic.measurements(CELLS, CANDIDATES, processes=2, noise=0.001)
    measurements.dump(made, tmp_path / "results" / "synthetic" / "made-up.jsonl")
    (tmp_path / "results" / "synthetic" / "env.json").write_text(json.dumps(synthetic.ENVS))
    return tmp_path / "results"


CELLS = tuple(
    sorted(
        (Cell("decode", r, h) for h in (12, 96) for r in (1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128)),
        key=cell_order,
    )
)
CANDIDATES = (synthetic.split(1), synthetic.split(8))
SWEEP = Sweep(Path("made-up.toml"), "Is it adaptive?", ("KdaSplit",), 2, CELLS, CANDIDATES)


def run(
    results: Path,
    out: Path,
    *,
    target: float | None = adaptive.TARGET,
    share: tuple[int, int] = (1, 1),
    retry: bool = False,
    listener: session.Listener = lambda event: None,
) -> session.Summary:
    """A recorded run of SWEEP, adaptive with a target."""
    runner = RecordedRunner(results / "synthetic")
    with runner.open_journal(SWEEP, out) as journal:
        begun = session.reopen_failed(SWEEP, journal) if retry else []
        cells = part(CELLS, *share)
        course = target and Course(cells, CANDIDATES, SWEEP.processes, begun, target)
        return session.run_sweep(SWEEP, runner, journal, course or cells, listener=listener)


def test_a_sweep_goes_on_where_it_stopped_and_can_be_completed(
    results: Path, tmp_path: Path
) -> None:
    seen: list[tuple[Cell | None, int]] = []
    whole = run(
        results, tmp_path / "whole", listener=lambda e: e.cell and seen.append((e.cell, e.process))
    )
    assert whole.done == whole.total == len(seen) < 2 * len(CELLS)

    again: list[tuple[Cell | None, int]] = []

    def listen(event: session.Event) -> None:
        if event.kind == "cell":
            again.append((event.cell, event.process))
            if len(again) in (1, 4, 9, 16):
                raise KeyboardInterrupt

    while (stopped := run(results, tmp_path / "parts", listener=listen)).interrupted:
        assert stopped.done <= stopped.total
    assert again == seen
    assert stopped.measurements == whole.measurements
    assert run(results, tmp_path / "parts", retry=True).measurements == whole.measurements
    assert run(results, tmp_path / "parts", target=None).done == 2 * len(CELLS)


def test_shares_are_of_rows_and_join(results: Path, tmp_path: Path) -> None:
    whole = run(results, tmp_path / "whole")
    parts = [run(results, tmp_path / str(k), share=(k, 2)) for k in (1, 2)]
    assert [{r.cell.heads for r in each.measurements} for each in parts] == [{12}, {96}]
    merge([each.journal for each in parts], tmp_path / "joined.db")
    with Journal.read(tmp_path / "joined.db") as journal:
        assert journal.measurements() == whole.measurements


def test_the_command(
    results: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("made-up.toml").write_text(
        'question = "?"\nvariants = ["stock"]\n[[cells]]\nkind = "decode"\nheads = [12, 96]\n'
        "requests = [1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128]\n"
    )
    command = ["sweep", "made-up.toml", "--device", "recorded:synthetic"]
    assert cli._status([*command, "--adaptive", "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith(
        "6 cells at first, at most 22, x 1 candidates x 1 processes"
    )
    assert cli._status([*command, "--adaptive", "--target", "1", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["done"] == 6, (
        "one candidate: nothing to be lost between the first cells"
    )
    assert cli._status([*command, "--adaptive", "--cells", "9", "--dry-run"]) == 0
    assert capsys.readouterr().out.startswith("6 cells at first, at most 9,")
    for option in ("--target", "--cells"):
        assert cli._status([*command, option, "1"]) == 2
        assert f"{option}: needs --adaptive" in capsys.readouterr().err


def test_recorded_cells_make_a_good_policy_with_fewer_of_them() -> None:
    envs = measurements.load_envs([RECORDED / "dispatch.jsonl"])
    rows = [
        r
        for r in measurements.load([RECORDED / "dispatch.jsonl"])
        if r.cell.kind == "record" and r.cell.tokens == 4
    ]
    found: dict[Cell, list[Measurement]] = {}
    for r in rows:
        if r.process == 0:
            found.setdefault(r.cell, []).append(r)
    cells = sorted(found, key=cell_order)
    course = Course(cells, sorted({r.candidate for r in rows}, key=str), 1)
    taken = []
    while (pair := course.next()) is not None:
        taken.append(pair[0])
        course.tell(*pair, found[pair[0]], envs[found[pair[0]][0].env]["sms"])
    policy, _ = fit.fit([r for r in rows if r.cell in set(taken)], envs, resamples=0)
    grid = fit.step_grid(rows)
    assert len(taken) <= len(cells)
    assert (
        regret.summarize(grid, regret.picks(grid, emit.load(emit.emit(policy)).ranked))[
            "all"
        ].geomean
        < 0.005
    )
