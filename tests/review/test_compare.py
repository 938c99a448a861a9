"""Two sessions, cell by cell: verdicts, their errors, and what a user sees of them."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kdabench import cli, sources
from kdabench.data import measurements, provenance
from kdabench.data.measurements import Candidate, Cell, Measurement
from kdabench.measure.contest import student
from kdabench.review import compare
from kdabench.review.compare import Comparison, Gates, Side
from support import synthetic
from support.synthetic import STOCK, split

CELLS = [
    Cell("decode", requests, heads)
    for heads in (12, 96)
    for requests in (1, 2, 4, 8, 16, 32, 64, 128)
]
MINE = [split(n) for n in (1, 2, 4, 8)]
NEW = "new-0"


def session(
    seed: int,
    *,
    bias: float = 1.0,
    effect: Callable[[Cell, Candidate], float] = lambda cell, candidate: 1.0,
    cells: Sequence[Cell] = CELLS,
    candidates: Sequence[Candidate] = (STOCK, *MINE),
    process_noise: float = 0.003,
    noise: float = 0.004,
    processes: int = 3,
    rounds: int = 12,
) -> Iterator[Measurement]:
    """What one session measures: true time x its bias x process x round. What has an effect is of
    another source."""
    rng = random.Random(seed)
    for cell in cells:
        for candidate in candidates:
            us = synthetic.model_us(cell, candidate) * bias * effect(cell, candidate)
            changed = {} if effect(cell, candidate) == 1 else {"code": NEW}
            for process in range(processes):
                mine = us * rng.gauss(1, process_noise)
                samples = [mine * rng.gauss(1, noise) for _ in range(rounds)]
                yield synthetic.measurement(cell, candidate, samples, process, **changed)


def side(
    found: Iterator[Measurement] | Sequence[Measurement],
    envs: Mapping[str, Any] = synthetic.ENVS,
    **more: Any,
) -> Side:
    return Side("a side", list(found), envs, **more)


def one(us: Sequence[float], candidate: Candidate = STOCK, **changes: Any) -> Measurement:
    return synthetic.measurement(CELLS[0], candidate, us, **changes)


def changed(found: Sequence[Measurement]) -> list[Measurement]:
    """The same, of another source: nothing tells what the session did to it."""
    return [replace(r, code=NEW) for r in found]


def verdicts(found: Comparison, candidate: Candidate) -> list[Any]:
    return [row.verdict for row in found.rows if row.a == candidate]


# --- statistics ---


@pytest.mark.parametrize("degrees", [2, 3, 5, 8, 30])
@pytest.mark.parametrize("z", [-1.0, 1.0, 1.96, 2.8])
def test_students_t_agrees_with_its_series(z: float, degrees: int) -> None:
    """Within 2 % from five degrees of freedom on; never less careful below."""
    exact, tail = math.copysign(student(abs(z), degrees), z), math.erfc(z / math.sqrt(2)) / 2
    assert 0.99 < compare._student(z, degrees) / exact < (1.02 if degrees >= 5 else 1.18)
    assert compare._beyond(compare._student(z, degrees), degrees) == pytest.approx(tail)


def test_mean_logarithm_of_chi_squared() -> None:
    euler = 0.5772156649
    assert compare._mean_log_chi2(2) == pytest.approx(-euler)
    assert compare._mean_log_chi2(1) == pytest.approx(-euler - 2 * math.log(2) - math.log(0.5))


def test_benjamini_and_hochberg_by_hand() -> None:
    """Of p = 0.001, 0.004, 0.007, 0.02 at 1 %: the limits are 0.0025, 0.005, 0.0075, 0.01, so three
    pass."""
    ps = (0.02, 0.001, 0.007, 0.004)
    rows = [
        compare.Row(CELLS[0], STOCK, STOCK, 5.0, 5.5, 1.1, (1.0, 1.2), None, p, "unclear")
        for p in ps
    ]
    decided = compare._decided(rows, Gates(error=0.01))
    assert [row.verdict for row in decided] == ["unclear", "slower", "slower", "slower"]
    assert [row.verdict for row in compare._decided(rows, Gates(error=0.0001))] == ["unclear"] * 4


def test_intervals_hold_the_truth() -> None:
    """95 % of them, without and with a bias of the session."""
    held = total = 0
    for seed in range(12):
        bias = (1.0, 0.97, 1.02)[seed % 3]
        found = compare.compare(side(session(seed)), side(session(100 + seed, bias=bias)))
        for row in found.rows:
            assert row.interval is not None
            held += row.interval[0] <= 1 <= row.interval[1]
            total += 1
    assert held / total >= 0.945


def test_a_true_two_per_cent_is_found_whatever_the_session_does() -> None:
    """At 5 us and more, with the noise of isolated launches, on one of five candidates."""
    found = of = others = 0
    for seed in range(6):
        bias = (1.0, 0.97, 1.03)[seed % 3]
        quiet: dict[str, Any] = {"process_noise": 0.0015, "noise": 0.0025, "rounds": 20}
        a = side(session(seed, **quiet))
        b = side(
            session(
                50 + seed, bias=bias, effect=lambda _, c: 1.02 if c == MINE[0] else 1.0, **quiet
            )
        )
        judged = compare.compare(a, b)
        assert judged.session is not None
        assert math.exp(judged.session.shift) == pytest.approx(bias, rel=0.001)
        mine = [row for row in judged.rows if row.a == MINE[0] and (row.a_us or 0) >= 5]
        of += len(mine)
        found += sum(row.verdict == "slower" for row in mine)
        others += sum(
            row.verdict in ("slower", "faster") for row in judged.rows if row.a != MINE[0]
        )
    assert found >= 0.95 * of > 40
    assert others == 0


def test_many_rounds_of_few_processes_prove_little() -> None:
    """Uncertainty is that of processes first: two a side that differ by 3 %, with a hundred quiet
    rounds each."""
    rng = random.Random(1)
    rows = {
        name: [
            one([us * rng.gauss(1, 0.0005) for _ in range(100)], process=p)
            for p, us in enumerate(times)
        ]
        for name, times in (("a", (5.0, 5.15)), ("b", (5.15, 5.30)))
    }
    (row,) = compare.compare(side(rows["a"]), side(changed(rows["b"]))).rows
    assert row.verdict == "unclear"
    assert row.interval is not None
    assert row.interval[1] - row.interval[0] > 0.05


def test_a_single_sample_decides_nothing() -> None:
    found = compare.compare(side([one([5.0])]), side([one([50.0])]))
    assert [(row.verdict, row.interval, row.note) for row in found.rows] == [
        ("unclear", None, "too few samples")
    ]
    json.dumps(found.to_json(), allow_nan=False)


def quiet(
    us: float, candidate: Candidate = STOCK, cell: Cell = CELLS[0], **changes: Any
) -> list[Measurement]:
    """Three processes of ten rounds that hardly differ."""
    return [
        synthetic.measurement(
            cell,
            candidate,
            [us * (1 + 1e-4 * ((7 * n + 3 * p) % 5 - 2)) for n in range(10)],
            p,
            **changes,
        )
        for p in range(3)
    ]


@pytest.mark.parametrize(
    ("before", "after", "verdict"),
    [
        (5.0, 5.02, "same"),  # 0.4 % and 0.02 us
        (0.6, 0.63, "same"),  # 5 %, but 0.03 us
        (50.0, 50.3, "same"),  # 0.3 us, but 0.6 %
        (5.0, 5.2, "slower"),
        (5.2, 5.0, "faster"),
        (0.04, 0.01, "same"),  # nothing can be faster by more than its time
    ],
)
def test_both_gates_must_be_passed(before: float, after: float, verdict: str) -> None:
    (row,) = compare.compare(side(quiet(before)), side(quiet(after, code=NEW))).rows
    assert row.verdict == verdict
    assert row.ratio == pytest.approx(after / before, rel=1e-3)


def test_gates_are_checked() -> None:
    for bad in ({"relative": 1.0}, {"relative": -0.1}, {"absolute_us": math.nan}, {"error": 0.0}):
        with pytest.raises(ValueError, match="gates"):
            Gates(**bad)


# --- the session ---


def test_what_is_unchanged_tells_the_session_from_the_kernels() -> None:
    effect = lambda _, c: 1.1 if c.variant == "KdaSplit" else 1.0  # noqa: E731
    found = compare.compare(side(session(1)), side(session(2, bias=0.95, effect=effect)))
    assert verdicts(found, STOCK).count("faster") == 0
    assert verdicts(found, MINE[1]).count("slower") == len(CELLS)
    assert found.session is not None
    assert found.session.cells == len(CELLS)
    assert found.session.shift == pytest.approx(math.log(0.95), abs=0.003)
    assert any(
        "% faster in B; the ratios are without that" in warning for warning in found.warnings
    )


def test_a_session_that_moves_cells_apart_widens_the_intervals() -> None:
    """Each cell's own bias, as of placement in memory: what is unchanged shows how large such
    are."""
    rng = random.Random(5)
    own = {cell: rng.gauss(1, 0.02) for cell in CELLS}
    moved = [
        replace(r, samples_us=tuple(us * own[r.cell] for us in r.samples_us),
                code=NEW if r.candidate.variant == "KdaSplit" else r.code)
        for r in session(2)
    ]  # fmt: skip
    found = compare.compare(side(session(1)), side(moved))
    assert found.session is not None
    assert 0.01 < found.session.spread < 0.04
    assert not found.of("slower") + found.of("faster")


def test_one_cell_against_itself_is_no_finding() -> None:
    """Though all of it moved by 3 %: with nothing else to tell, that may be the session."""
    found = compare.compare(side(quiet(5.0)), side(quiet(5.15)))
    assert [row.verdict for row in found.rows] == ["unclear"]
    mixed = side([*quiet(5.15), *quiet(5.5, split(1), code=NEW)])
    found = compare.compare(side([*quiet(5.0), *quiet(5.0, split(1))]), mixed)
    assert verdicts(found, STOCK) == ["unclear"]
    assert found.session is not None
    assert found.session.shift == pytest.approx(math.log(1.03), abs=1e-3)


def test_another_driver_leaves_nothing_unchanged() -> None:
    other = {**synthetic.ENV, "driver": "9.9", "uuid": "GPU-1"}
    digest = provenance.digest(other)
    b = side([replace(r, env=digest) for r in session(2, bias=1.1)], {digest: other})
    found = compare.compare(side(session(1)), b)
    assert found.session is None
    assert 'driver: "1.2" in A, "9.9" in B' in found.warnings
    assert any(
        w.startswith("one-sided:") and "that may be the session" in w for w in found.warnings
    )
    assert not any("uuid" in w for w in found.warnings)


def test_findings_on_both_sides_are_no_sign_of_the_session() -> None:
    effect = lambda cell, _: 1.1 if cell.heads == 12 else 0.9  # noqa: E731
    found = compare.compare(side(session(1)), side(session(2, effect=effect)))
    assert found.of("slower")
    assert found.of("faster")
    assert found.session is None
    assert not found.warnings


# --- clocks ---


def clocked(us: float, mhz: int | None, **changes: Any) -> list[Measurement]:
    return [replace(r, sm_clock_mhz=(mhz,) * len(r.samples_us), **changes) for r in quiet(us)]


def test_a_verdict_is_confirmed_in_cycles() -> None:
    before = clocked(5.0, 1980)
    (slower_clock,) = compare.compare(side(before), side(clocked(5.5, 1800, code=NEW))).rows
    assert (slower_clock.verdict, slower_clock.note) == ("unclear", "not confirmed in cycles")
    assert slower_clock.cycles == pytest.approx(1.0, abs=1e-3)
    (same_clock,) = compare.compare(side(before), side(clocked(5.5, 1980, code=NEW))).rows
    assert (same_clock.verdict, same_clock.note) == ("slower", "")
    assert same_clock.cycles == pytest.approx(1.1, abs=1e-3)
    (unknown,) = compare.compare(side(before), side(clocked(5.5, None, code=NEW))).rows
    assert (unknown.verdict, unknown.cycles) == ("slower", None)


# --- what is missing, and what is paired ---


def test_what_is_missing_on_a_side_has_no_verdict() -> None:
    here, there, both = CELLS[:3]
    a = [
        *quiet(5.0, cell=here),
        *quiet(5.0, cell=both),
        *quiet(5.0, split(1), both),
        *quiet(5.0, split(2), both),
    ]
    b = [*quiet(5.0, cell=there), *quiet(5.0, cell=both), synthetic.failed(both, split(2), "wrong")]
    found = compare.compare(side(a), side(b))
    rows = {(row.cell, row.a): row for row in found.rows}
    assert {
        key: (row.verdict, row.note, row.lost) for key, row in rows.items() if row.verdict is None
    } == {
        (here, None): (None, "B: not measured", False),
        (there, None): (None, "A: not measured", False),
        (both, split(1)): (None, "B: not measured", False),
        (both, split(2)): (None, "B: wrong: synthetic wrong", True),
    }
    assert rows[both, STOCK].verdict == "same"
    assert found.regression


def test_what_failed_before_is_no_regression() -> None:
    a = [*quiet(5.0), synthetic.failed(CELLS[0], split(1)), synthetic.failed(CELLS[0], split(2))]
    b = [*quiet(5.0), *quiet(4.0, split(1)), synthetic.failed(CELLS[0], split(2))]
    found = compare.compare(side(a), side(b))
    assert [(row.a, row.verdict) for row in found.rows] == [(split(1), None), (STOCK, "same")]
    assert not found.regression
    with pytest.raises(ValueError, match="no cell has a time on both sides"):
        compare.compare(side(quiet(5.0)), side(quiet(5.0, split(1))))


def test_the_best_of_each_side() -> None:
    a = [*quiet(5.0), *quiet(4.0, split(1)), *quiet(9.0, cell=CELLS[1])]
    b = [*quiet(4.5), *quiet(6.0, split(1)), synthetic.failed(CELLS[1], STOCK)]
    first, second = compare.compare(side(a), side(changed(b)), "best").rows
    assert (first.a, first.b, first.verdict) == (split(1), STOCK, "slower")
    assert (second.b, second.lost, second.note) == (None, True, "B: no time")


def test_the_picks_of_the_policies() -> None:
    def policy(variant: str, **options: Any) -> Any:
        return lambda heads, requests, tokens, kind: [
            SimpleNamespace(variant=variant, options=options, flush=False)
        ]

    a = [
        *quiet(5.0),
        *quiet(4.0, split(1)),
        *quiet(4.0, cell=replace(CELLS[0], context="isolated")),
    ]
    stock, mine = (
        policy("stock", pdl=False),
        policy("KdaSplit", split=1, staging="registers", pdl=False),
    )
    (row,) = compare.compare(side(a, ranked=stock), side(a, ranked=mine), "policy").rows
    assert (row.a, row.b, row.verdict) == (STOCK, split(1), "faster")
    (same,) = compare.compare(side(a, ranked=mine), side(a, ranked=mine), "policy").rows
    assert (same.a, same.verdict) == (split(1), "same")
    with pytest.raises(ValueError, match="no policy"):
        compare.compare(side(a), side(a, ranked=mine), "policy")


# --- the command ---


@pytest.fixture
def kdabench(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Any:
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        status = cli._status(list(arguments))
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def write(path: Path, found: Sequence[Measurement]) -> str:
    measurements.dump(found, path)
    (path.parent / "env.json").write_text(json.dumps(synthetic.ENVS))
    return str(path)


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    effect = lambda cell, c: 1.08 if (cell.requests, c) == (4, split(8)) else 1.0  # noqa: E731
    a = write(tmp_path / "a" / "quick.jsonl", list(session(1, noise=0.002, process_noise=0.001)))
    after = list(session(2, noise=0.002, process_noise=0.001, cells=CELLS[1:], effect=effect))
    b = write(tmp_path / "b" / "quick.jsonl", [
        replace(r, code=NEW) if r.candidate.variant == "KdaSplit" else r for r in after])  # fmt: skip
    return a, b


def test_the_table_and_the_exit_status(kdabench: Any, files: tuple[str, str]) -> None:
    status, out, err = kdabench("compare", *files)
    assert (status, err) == (1, "")
    assert "\x1b" not in out
    lines = out.splitlines()
    (first, *_) = [line for line in lines if "slower" in line and line.startswith("decode")]
    assert "R=4" in first
    assert "2 slower, 0 faster" in lines[-1]
    (missing,) = [line for line in lines if line.startswith("decode q=1 H=12 R=1 ")]
    assert missing.split()[4:11] == ["-"] * 7
    assert "(by 15 cells with the same source and environment on both sides)" in out
    assert kdabench("compare", files[0], files[0])[0] == 0
    assert kdabench("compare", *files, "--relative", "20")[0] == 0


def test_json_is_strict_and_complete(kdabench: Any, files: tuple[str, str]) -> None:
    status, out, _ = kdabench("compare", *files, "--json")
    found = json.loads(out, parse_constant=lambda name: pytest.fail(name))
    assert (status, found["regression"]) == (1, True)
    assert found["counts"]["slower"] == 2
    assert sum(
        found["counts"][name] for name in ("slower", "faster", "same", "unclear", "missing")
    ) == len(found["rows"])
    assert found["correction"] == "Benjamini-Hochberg"


def test_markdown_for_a_pull_request(kdabench: Any, files: tuple[str, str]) -> None:
    status, out, _ = kdabench("compare", *files, "--markdown")
    assert status == 1
    assert out.startswith("### ")
    assert "**regression**" in out.splitlines()[0]
    table = [line for line in out.splitlines() if line.startswith("| decode q=1 H=12 R=4 |")]
    assert table
    assert table[0].count(" | ") == 8
    assert "<details>" in out


def test_mistakes_are_one_line_and_status_2(kdabench: Any, files: tuple[str, str]) -> None:
    for arguments, expected in (
        (["nothing", files[0]], "nothing"),
        (["nothing.jsonl", files[0]], "nothing.jsonl: cannot be read"),
        (["nothing.db", files[0]], "nothing.db: no such journal"),
        ([*files, "--best", "--policy"], "--best, --policy: one of them"),
        ([*files, "--json", "--markdown"], "--markdown, --json: one of them"),
        ([*files, "--policy"], "policy.py: no policy there"),
        ([*files, "--relative", "-1"], "--relative"),
    ):
        status, out, err = kdabench("compare", *arguments)
        assert (status, out) == (2, "")
        assert expected in err
        assert err.count("\n") == 1


def test_a_cell_comes_from_the_other_sides_sweep(tmp_path: Path) -> None:
    files = {
        "dispatch": quiet(5.0) + quiet(5.0, split(1)),
        "quick": quiet(6.0),
        "targets": quiet(7.0, cell=CELLS[1]),
    }
    source = sources.Source("x", files, synthetic.ENVS, tmp_path)
    assert {
        r.samples_us[0] > 5.5 for r in source.measurements(["quick"]) if r.cell == CELLS[0]
    } == {True}
    assert {r.samples_us[0] > 5.5 for r in source.measurements([]) if r.cell == CELLS[0]} == {False}
    assert len(source.measurements(["quick"])) == 6
