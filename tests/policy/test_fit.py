from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdabench.data.measurements import Candidate, Cell, Measurement
from kdabench.policy import constants, emit, fit, regret
from kdabench.policy.constants import Policy
from kdabench.policy.regret import NOWHERE, Evidence, FitError
from kdabench.policy.thresholds import ladder, schedules
from support import synthetic
from support.synthetic import STOCK, failed, measurement, split

SMS = synthetic.ENV["sms"]
SPLITS = (split(1), split(2), split(4))
Times = dict[tuple[Cell, Candidate], float]


def run(measurements: Sequence[Measurement], **options: Any) -> tuple[Policy, Evidence]:
    return fit.fit(measurements, synthetic.ENVS, **{"resamples": 0} | options)


def measurements_of(times: Times) -> list[Measurement]:
    return [measurement(cell, candidate, [us]) for (cell, candidate), us in times.items()]


def random_times(seed: int, failures: float = 0.0, others: Sequence[Candidate] = ()) -> Times:
    """A small grid of all kinds; a candidate lacks a time here and there."""
    rng = random.Random(seed)
    kinds = [("decode", 1), ("record", 2), ("record", 4), ("spec", 4)]
    cells = [
        Cell(kind, requests, heads, tokens)  # type: ignore[arg-type]
        for (kind, tokens), heads, requests in itertools.product(kinds, (12, 24), (1, 3, 8))
    ]
    return {
        (cell, c): math.exp(rng.gauss(1, 0.3))
        for cell in cells
        for c in (STOCK, *SPLITS, *others)
        if rng.random() >= failures
    }


def brute_force(times: Times, kind: str, rules: Mapping[str, Candidate]) -> float:
    """The least cost over all thresholds of a kind, and a schedule of its own for each cell, by
    plain loops.

    rules  threshold -> variant; the first whose threshold is reached and that has a time takes a
           cell, else KdaSplit, else stock
    """
    cells = {cell for cell, _ in times if cell.kind == kind}
    best = {cell: min(us for (c, _), us in times.items() if c == cell) for cell in cells}
    split_us = {
        cell: min((times[cell, s] for s in SPLITS if (cell, s) in times), default=None)
        for cell in cells
    }
    ends = [*sorted({cell.items for cell in cells}), 10**9]
    islands = [(0, 0)]
    if kind == "record" and "ws_items" in rules:
        islands += itertools.combinations(ends, 2)
    least = math.inf
    for firsts in itertools.product(ends, repeat=len(rules)):
        cuts = dict(zip(rules, firsts, strict=True))
        for low, high in islands:
            total = 0.0
            for cell in cells:
                took = [
                    times.get((cell, candidate))
                    for rule, candidate in rules.items()
                    if cell.items >= cuts[rule] or (rule == "ws_items" and low <= cell.items < high)
                ]
                us = next(
                    (
                        us
                        for us in (*took, split_us[cell], times.get((cell, STOCK)))
                        if us is not None
                    ),
                    None,
                )
                total += 1e4 if us is None else math.log(us / best[cell])
            least = min(least, total)
    return least


WS, WIDE = Candidate.of("KdaWS", {"prologue": 8}), Candidate.of("KdaWide", {"pdl": True})
LADDERS = {
    "stock": {"stock_items": STOCK},
    "all": {"ws_items": WS, "wide_items": WIDE, "stock_items": STOCK},
}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("failures", [0.0, 0.15])
@pytest.mark.parametrize("rules", list(LADDERS.values()), ids=list(LADDERS))
def test_the_search_is_exact(seed: int, failures: float, rules: dict[str, Candidate]) -> None:
    """And the policy's thresholds cost what they say, through the emitted module, within the band
    of settled ties."""
    times = random_times(seed, failures, [c for c in rules.values() if c != STOCK])
    grid = regret.make_grid(measurements_of(times))
    found = replace(run(measurements_of(times))[0], choices={})
    picked = regret.picks(grid, emit.load(emit.emit(found)).ranked)
    costs = np.nan_to_num(regret.log_regret(grid, picked), nan=1e4)
    for kind in constants.STEP_KINDS:
        (solved,) = ladder.solve([grid], kind, ladder.singles(grid), SMS)
        least = brute_force(times, kind, rules)
        assert solved.cost == pytest.approx(least, abs=1e-6)
        mine = [cost for cell, cost in zip(grid.cells, costs, strict=True) if cell.kind == kind]
        assert least - 1e-6 <= sum(mine) <= least + len(mine) * math.log1p(regret.TIE) + 1e-6
        split_picked = [grid.candidates[i].variant == "KdaSplit" for i in picked]
        known = ~np.isnan(np.fmin.reduce(grid.log_us[:, grid.of("KdaSplit")], axis=1))
        of_kind = np.array([cell.kind == kind for cell in grid.cells])
        assert np.array_equal(solved.ours & known, split_picked & known & of_kind)
    assert max(costs) < 1e4
    for (cell, candidate), us in times.items():
        row, column = grid.cells.index(cell), grid.candidates.index(candidate)
        assert grid.log_us[row, column] == pytest.approx(math.log(us))


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("failures", [0.0, 0.15])
def test_the_shared_table_is_the_best_one(seed: int, failures: float) -> None:
    """Over the window cells that KdaSplit serves; by plain loops."""
    times = random_times(seed, failures)
    found, evidence = run(measurements_of(times))
    found = replace(found, choices={})
    grid = regret.make_grid(measurements_of(times))
    picked = regret.picks(grid, emit.load(emit.emit(found)).ranked)
    stocked = {
        cell for cell, i in zip(grid.cells, picked, strict=True) if grid.candidates[i] == STOCK
    }
    windows = {cell for cell, _ in times if cell.kind != "decode"}
    for heads, requests in {(c.heads, c.requests) for c in windows}:
        group = [c for c in windows if (c.heads, c.requests) == (heads, requests)]
        group = [c for c in group if any((c, s) in times for s in SPLITS)]
        served = [c for c in group if c not in stocked] or group
        cost = {
            s: sum(math.log(times[c, s]) if (c, s) in times else 1e4 for c in served)
            for s in SPLITS
        }
        wanted = found.spec_schedule[heads][requests]
        mine = next(cost[s] for s in SPLITS if constants.with_pdl(s.options) == wanted)
        assert mine <= min(cost.values()) + len(served) * math.log1p(regret.TIE) + 1e-6
    plain, shared = (
        evidence.baselines[name]["all"]
        for name in ("thresholds and schedules", "one window schedule")
    )
    assert failures or shared.geomean > plain.geomean


def test_thresholds_of_other_variants() -> None:
    """KdaWS takes an island of records and the far end, KdaWide a stretch between; options by token
    count."""
    slow, fast = (Candidate.of("KdaWS", {"prologue": n}) for n in (4, 8))
    times: Times = {}
    for requests in (1, 2, 4, 8, 16, 32, 64, 128):
        for tokens in (2, 4):
            cell = Cell("record", requests, 10, tokens)
            times[cell, split(1)] = 4.0
            times[cell, WIDE] = 3.0 if requests >= 16 else 5.0
            us = 2.0 if requests in (4, 64, 128) else 6.0
            times[cell, slow] = us * (1.1 if tokens == 4 else 1.0)
            times[cell, fast] = us * (1.1 if tokens == 2 else 1.0)
    found, evidence = run(measurements_of(times))
    assert found.ws_items == {
        "decode": None,
        "record": 501,
        "spec": None,
    }  # more than five per SM, nearest to the zero of log(3/6) .. log(3/2)
    assert (found.ws_small, found.ws_small_end) == (26, 62)
    assert found.wide_items == {
        "decode": None,
        "record": 101,
        "spec": None,
    }  # more than one item per SM
    assert found.step_options["KdaWS"] == {
        ("record", 2): constants.with_pdl(slow.options), ("record", 4): constants.with_pdl(fast.options)}  # fmt: skip
    assert (
        evidence.regret["all"].max == evidence.baselines["thresholds and schedules"]["all"].max == 0
    )
    assert set(evidence.other_intervals) == {"ws_items", "ws_small", "ws_small_end", "wide_items"}
    module = emit.load(emit.emit(replace(found, choices={})))
    assert module.explain(10, 4, 4, "record").rule == "WS_SMALL"
    assert (
        module.choose(10, 128, 3, "record").options["prologue"] == 8
    )  # of 2 and 4 the nearer one is 4
    assert [module.wide(10, r, 4, True) for r in (10, 11)] == [False, True]
    assert not module.wide(10, 10**6, 4, False)


def line(pairs: Mapping[int, tuple[float, float]], heads: int = 10) -> list[Measurement]:
    """Decode cells: requests -> (stock, KdaSplit) microseconds."""
    times: Times = {}
    for requests, (stock, split_us) in pairs.items():
        times[Cell("decode", requests, heads), STOCK] = stock
        times[Cell("decode", requests, heads), split(1)] = split_us
    return measurements_of(times)


CLOSEST = emit.load(emit.emit(run(line({1: (2, 1)}))[0]))._closest


def test_the_cut_is_where_the_ratio_crosses() -> None:
    found, _ = run(line({1: (2, 1), 2: (2, 1), 8: (1, 2), 64: (1, 2)}))
    assert found.stock_items == {"decode": 40, "spec": None, "record": None}  # sqrt(20 * 80)
    found, _ = run(line({2: (2, 1), 8: (1, math.sqrt(2))}))
    assert found.stock_items["decode"] == math.ceil(20 * 4 ** (2 / 3))
    found, _ = run(line({2: (2, 1), 16: (1, 2)}))
    assert found.stock_items["decode"] == 101  # the second wave of 100 SMs begins in between


@settings(deadline=None)
@given(st.integers(1, 10**6), st.integers(1, 10**6), st.floats(-3, 3), st.floats(-3, 3))
def test_a_cut_stays_inside_its_bracket(low: int, width: int, a: float, b: float) -> None:
    assert low < ladder.place_cut(low, low + width, a, b, None) <= low + width
    assert low < ladder.place_cut(low, low + width, a, b, 132) <= low + width


@pytest.mark.parametrize(
    ("ratios", "first"),
    [
        ((-1, 1), 33),
        ((-0.133, -0.004), 40),
        ((0.004, 0.133), 27),
        ((-0.1, -0.1), 33),
        ((0, 0), 33),
        ((-3, 1), 36),
    ],
)
def test_a_change_lies_where_the_ratio_is_nearest_to_zero(
    ratios: tuple[float, float], first: int
) -> None:
    """Between 26 and 40 items."""
    assert ladder.place_cut(26, 40, *ratios, None) == first


def test_never_and_always() -> None:
    assert run(line({1: (2, 1), 4: (2, 1)}))[0].stock_items["decode"] is None
    assert run(line({1: (1, 2), 4: (1, 2)}))[0].stock_items["decode"] == 1


def test_magnitudes_decide_not_signs() -> None:
    """Stock wins five cells by 0.5 % and loses one by 30 %."""
    small = dict.fromkeys((1, 2, 4, 8, 16), (1.0, 1.005))
    assert run(line(small | {32: (1.3, 1.0)}))[0].stock_items["decode"] is None
    assert (
        run(line({1: (1.3, 1.0)} | {r * 2: us for r, us in small.items()}))[0].stock_items["decode"]
        is not None
    )


def test_weights_decide() -> None:
    rows = line({1: (1.3, 1.0), 4: (1.0, 1.2), 16: (1.2, 1.0)})
    assert run(rows)[0].stock_items["decode"] is None
    assert run(rows, weights={5: 100, 1: 1})[0].stock_items["decode"] is not None
    with pytest.raises(FitError, match="weights: 0: 1"):
        run(rows, weights={0: 1})


def test_windows_have_schedules_of_their_own() -> None:
    cells = [Cell("record", 1, 12, tokens) for tokens in (2, 4, 8)]
    us = {split(1): (1.0, 1.0, 2.0), split(2): (1.1, 1.1, 1.0), split(4): (1.5, 0.9, 1.9)}
    times = {(cell, c): row[i] for c, row in us.items() for i, cell in enumerate(cells)}
    found, evidence = run(measurements_of(times))
    assert found.spec_schedule == {12: {1: constants.with_pdl(split(2).options)}}
    assert found.window_schedule == {
        ("record", tokens): {12: {1: constants.with_pdl(split(s).options)}}
        for tokens, s in ((2, 1), (4, 4), (8, 2))
    }
    assert evidence.regret["all"].max == 0
    best = math.prod((1.0, 0.9, 1.0))
    shared = evidence.baselines["one window schedule"]["all"]
    assert shared.geomean == pytest.approx((1.1 * 1.1 / best) ** (1 / 3) - 1)
    assert shared.worst == cells[1]
    module = emit.load(emit.emit(replace(found, choices={})))
    assert [module.choose(12, 1, t, "record").options["split"] for t in (2, 3, 4, 5, 6, 7, 8)] == [
        1,
        4,
        4,
        4,
        2,
        2,
        2,
    ]
    assert module.explain(12, 1, 3, "record").rule == "WINDOW_SCHEDULE"
    # A kind that was never measured.
    assert module.explain(12, 1, 4, "spec")[:2] == (module.Choice("KdaSplit", found.spec_schedule[12][1], False),
                                                    "SPEC_SCHEDULE")  # fmt: skip


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(1, 300), st.integers(0, 2)),
        min_size=1,
        max_size=12,
        unique_by=lambda e: e[0],
    )
)
def test_thinned_tables_say_the_same(entries: list[tuple[int, int]]) -> None:
    whole = {12: {requests: {"split": s} for requests, s in sorted(entries)}}
    thin = schedules.thinned(whole)
    assert len(thin[12]) <= len(whole[12])
    for heads, requests in itertools.product((12, 7), range(1, 320)):
        near = [
            table[12][CLOSEST(tuple(table[12]), heads * requests, 12)] for table in (whole, thin)
        ]
        assert near[0] == near[1]


def test_settle_prefers_few_changes_then_few_schedules() -> None:
    groups = [(12, 1), (12, 2), (12, 4), (24, 1), (24, 2)]
    assert schedules.settle(groups, [{0, 1}, {1, 2}, {1}, {2, 3}, {3}]) == [1, 1, 1, 3, 3]
    assert schedules.settle(groups, [{0}, {0, 1}, {1}, {0, 1, 5}, {1, 5}]) == [0, 1, 1, 1, 1]
    assert schedules.settle(groups, [{2, 1}, set(), {1, 2}, set(), set()]) == [
        1,
        NOWHERE,
        1,
        NOWHERE,
        NOWHERE,
    ]


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sets(st.integers(0, 4), min_size=1), min_size=1, max_size=6))
def test_settle_changes_as_little_as_can_be(tied: list[set[int]]) -> None:
    def changes(path: Sequence[int]) -> int:
        return sum(a != b for a, b in itertools.pairwise(path))

    found = schedules.settle([(12, i + 1) for i in range(len(tied))], tied)
    assert all(s in choices for s, choices in zip(found, tied, strict=True))
    assert changes(found) == min(changes(path) for path in itertools.product(*tied))


def test_ties_of_schedules_are_steady_under_noise() -> None:
    """Two schedules within the tie band, noise far below it: the same tables whichever happens to
    lead."""
    tables = []
    for seed in range(5):
        rng = random.Random(seed)
        times: Times = {}
        for requests in (1, 2, 4, 8):
            for candidate in SPLITS[:2]:
                times[Cell("decode", requests, 12), candidate] = 5 * rng.uniform(0.999, 1.001)
        tables.append(run(measurements_of(times))[0].schedule)
    assert all(table == tables[0] for table in tables)
    assert len({str(schedule) for row in tables[0].values() for schedule in row.values()}) == 1


def refused() -> Iterator[tuple[str, list[Measurement]]]:
    cell = Cell("decode", 1, 12)
    for message, other in {
        "context: isolated, layer": replace(cell, context="isolated"),
        "l2: cold, warm": replace(cell, l2="warm"),
        "state_dtype: bf16, fp32": replace(cell, state_dtype="bf16"),
        "conv_layout: dim-first, window-major": replace(cell, conv_layout="window-major"),
    }.items():
        yield message, [measurement(c, STOCK, [5.0]) for c in (cell, other)]
    yield "context: isolated", [measurement(replace(cell, context="isolated"), STOCK, [5.0])]
    yield "nothing to fit", []
    yield (
        "nothing to fit",
        [measurement(Cell("commit", 1, 12, 4, context="isolated"), STOCK, [5.0])],
    )
    yield (
        "env: the records' environments are unknown",
        [measurement(cell, STOCK, [5.0], env="sha256:other")],
    )
    yield "binary of stock", [measurement(cell, STOCK, [5.0], i, code=f"{i}-0") for i in range(2)]
    yield "launch of stock", [measurement(cell, STOCK, [5.0], i, code=f"0-{i}") for i in range(2)]


@pytest.mark.parametrize(("message", "rows"), list(refused()))
def test_what_cannot_be_fitted_is_refused(message: str, rows: list[Measurement]) -> None:
    with pytest.raises(FitError, match=message):
        run(rows)


def test_failures_never_win_and_are_counted() -> None:
    cells = [Cell("decode", r, 12) for r in (1, 2, 4)]
    rows = [failed(cells[0], c, status) for c, status in ((STOCK, "oom"), (split(1), "wrong"))]
    # Fastest by far in one process, but a failure in another: no time in this cell.
    rows += [measurement(cells[1], split(2), [0.1]), failed(cells[1], split(2), "fault", 1)]
    rows += [measurement(cells[1], c, [us]) for c, us in ((STOCK, 9.0), (split(1), 5.0))]
    rows += [
        measurement(cells[2], STOCK, [9.0]),
        *(failed(cells[2], c) for c in (split(1), split(2))),
    ]
    found, evidence = run(rows)
    assert found.schedule == {12: {2: constants.with_pdl(split(1).options)}}
    assert evidence.without_winner == (cells[0],)
    assert (evidence.cells, evidence.uncovered) == (3, ())
    assert evidence.statuses == {"fault": 3, "ok": 4, "oom": 1, "wrong": 1}
    assert evidence.regret["decode"].cells == 2
    assert evidence.regret["decode"].max == 0
    assert found.measured["decode"][12][1] == {2: pytest.approx(1.8), 4: None}


def test_nothing_ok_at_all() -> None:
    found, evidence = run([failed(Cell("decode", 1, 12), c) for c in (STOCK, split(1))])
    assert (found.schedule, found.stock_items["decode"], evidence.regret) == ({}, None, {})
    assert emit.load(emit.emit(found, evidence)).choose(12, 1, 1, "decode").variant == "stock"


def test_a_single_variant_is_enough() -> None:
    cell = Cell("spec", 1, 12, 4)
    alone, _ = run([measurement(cell, split(1), [5.0])])
    assert emit.load(emit.emit(alone)).choose(12, 1, 4, "spec").variant == "KdaSplit"
    only_stock, _ = run([measurement(cell, STOCK, [5.0])])
    assert emit.load(emit.emit(only_stock)).choose(12, 1, 4, "spec").variant == "stock"
    assert only_stock.stock_items["spec"] == 1


def test_medians_of_processes_not_of_samples() -> None:
    cell = Cell("decode", 1, 12)
    rows = [
        measurement(cell, STOCK, samples, i)
        for i, samples in enumerate([[1.0] * 9, [4.0, 2.0, 3.0], [5.0, 7.0]])
    ]
    assert math.exp(regret.make_grid(rows).log_us[0, 0]) == pytest.approx(3.0)


def test_evidence_of_the_floor_model() -> None:
    default = {"split": 1, "staging": "registers", "pdl": False, "threads": 256}
    found, evidence = run(list(synthetic.measurements()), default_schedule=default)
    assert found.stock_items["decode"] is None
    assert found.stock_items["record"] is not None
    assert set(evidence.regret) == {"all", "decode", "record", "spec"}
    ways = {
        "only stock",
        "only KdaSplit",
        "thresholds and schedules",
        "one window schedule",
        "default schedule",
    }
    assert set(evidence.baselines) == ways
    assert evidence.best_single_variant == "only KdaSplit"
    assert evidence.regret["all"].geomean < 0.005
    assert evidence.regret["all"].p99 <= evidence.regret["all"].max < 0.05
    others = [way["all"].geomean for way in evidence.baselines.values()]
    assert min(others) >= evidence.regret["all"].geomean - math.log1p(regret.TIE)
    assert evidence.regret["all"].max <= regret.TIE
    assert evidence.slower_than_default == ()
    assert evidence.to_json()["regret"]["all"]["cells"] == evidence.cells == 50


def test_intervals_of_thresholds() -> None:
    rows = list(synthetic.measurements(noise=0.01))
    found, evidence = run(rows, resamples=60)
    for kind in ("record", "spec"):
        cut, interval = found.stock_items[kind], evidence.intervals[kind]
        assert cut is not None
        assert interval is not None
        assert interval[0] is not None
        assert interval[1] is not None
        assert interval[0] <= interval[1]
        assert interval[0] * 0.7 <= cut <= interval[1] * 1.4
    assert evidence.intervals["decode"] == (None, None)
    assert run(rows, resamples=60)[1].intervals == evidence.intervals
    assert set(run([r for r in rows if r.process == 0], resamples=60)[1].intervals.values()) == {
        None
    }


def test_flips_between_input_distributions() -> None:
    cell = Cell("decode", 1, 12)
    generic = replace(cell, inputs="generic")
    rows = [measurement(cell, STOCK, [6.0]), measurement(cell, split(1), [5.0])]
    rows += [measurement(generic, STOCK, [5.0]), measurement(generic, split(1), [7.0])]
    found, evidence = run(rows)
    assert evidence.flips == ((cell, pytest.approx(0.4)),)
    assert found == replace(run(rows[:2])[0], origin=found.origin)


def test_the_order_of_records_does_not_matter() -> None:
    rows = list(synthetic.measurements())
    shuffled = rows.copy()
    random.Random(1).shuffle(shuffled)
    assert run(rows, resamples=20) == run(shuffled, resamples=20)


def test_keys_name_pitch_and_gate_mode() -> None:
    modes = [Candidate.of("KdaSplit", {"split": 1, "gate_mode": m}) for m in (0, 2)]
    cells = [Cell("decode", 1, 12), Cell("record", 1, 24, 4)]
    times = {
        (cells[0], modes[0]): 2.0,
        (cells[0], modes[1]): 1.0,
        (cells[1], modes[0]): 1.0,
        (cells[1], modes[1]): 2.0,
    }
    assert run(measurements_of(times))[0].policies == {
        12: {(1, 1): (6288, 2)},
        24: {(1, 4): (12448, 0)},
    }


def test_gate_mode_of_the_schedule_that_is_picked() -> None:
    """Per token count, and of kind record where both kinds have a schedule; of all counts of
    requests there are."""
    modes = [Candidate.of("KdaSplit", {"split": 1, "gate_mode": m}) for m in (0, 2)]
    fastest = {Cell("record", 1, 12, 2): 2, Cell("record", 1, 12, 4): 0, Cell("spec", 1, 12, 4): 2,
               Cell("spec", 1, 12, 8): 2, Cell("record", 9, 12, 4): 0}  # fmt: skip
    times = {
        (cell, c): 1.0 if c.options["gate_mode"] == mode else 2.0
        for cell, mode in fastest.items()
        for c in modes
    }
    keys = run(measurements_of(times))[0].policies[12]
    # At 9 requests 2 tokens are off from 4 as much as at one.
    modes_of = {2: (2, 2), 4: (0, 0), 8: (2, 2)}
    assert keys == {
        (r, q): (6288, mode)
        for q, pair in modes_of.items()
        for r, mode in zip((1, 9), pair, strict=True)
    }


def thresholds_alone(rows: Sequence[Measurement]) -> tuple[regret.Grid, Any, regret.Ints]:
    """Grid, module and picks of a policy without CHOICES."""
    grid, module = regret.make_grid(rows), emit.load(emit.emit(replace(run(rows)[0], choices={})))
    return grid, module, regret.picks(grid, module.ranked)


def test_where_a_policy_loses_to_the_default_schedule() -> None:
    """Thresholds alone can do that: here stock takes all that is large, for the sake of one
    cell."""
    rows = line({1: (9, 5), 2: (9, 5), 4: (9, 2), 8: (1, 1.02), 16: (1, 9), 32: (1.03, 1)})
    assert run(rows)[1].slower_than_default is None
    assert (
        run(rows, default_schedule={**split(1).options, "threads": 256})[1].slower_than_default
        == ()
    )
    grid, _, picked = thresholds_alone(rows)
    assert regret.slower_than(grid, picked, 0) == ((Cell("decode", 32, 10), pytest.approx(0.03)),)


def test_cliffs() -> None:
    # At 2 requests nothing avoids it. At 8 stock would; but KdaSplit is what is faster later, so
    # its table is to blame.
    rows = line({1: (9, 1), 2: (9, 5), 4: (9, 2.0), 8: (1.9, 2.4), 16: (9, 2), 32: (2.3, 9)})
    grid, module, picked = thresholds_alone(rows)
    (cliff,) = regret.find_cliffs(grid, picked, module.explain)
    assert (cliff.cell, cliff.faster) == (Cell("decode", 8, 10), Cell("decode", 16, 10))
    assert cliff.lost == pytest.approx(0.2)
    assert cliff.rule == "SCHEDULE"
    assert run(rows)[1].cliffs == ()
    # Two per cent are none.
    assert run(line({1: (9, 1), 2: (9, 1.02), 4: (9, 1.0)}))[1].cliffs == ()


def test_a_threshold_that_comes_too_late_is_blamed() -> None:
    grid, module, picked = thresholds_alone(
        line({1: (9, 1), 2: (1.0, 1.5), 4: (9, 1.2), 8: (1.1, 9)})
    )
    # Nothing avoids the one at 4 requests.
    cliffs = regret.find_cliffs(grid, picked, module.explain)
    assert [(c.cell.requests, c.faster.requests, c.rule) for c in cliffs] == [(2, 8, "STOCK_ITEMS")]


def test_the_default_gate_mode_is_the_kernels() -> None:
    variants = pytest.importorskip("kda_kernels.variants")
    modes = {
        name: getattr(variants.load(name).Options(), "gate_mode", 0) for name in variants.NAMES
    }
    assert {name: fit._default_gate_mode(name) for name in variants.NAMES} == modes
    assert (modes["KdaSplit"], fit._default_gate_mode("of an older version")) == (2, 0)


def test_heads_that_always_stream() -> None:
    """STREAM_HEADS: from 48 heads on KdaStream wins at any item count, below at 500 items."""
    stream = Candidate.of("KdaStream", {"pdl": True})
    times: Times = {}
    for heads, requests in itertools.product((12, 48, 96), (1, 4, 16, 64)):
        cell = Cell("record", requests, heads, 4)
        times |= {
            (cell, split(1)): 2.0,
            (cell, stream): 1.0 if heads >= 48 or cell.items >= 500 else 3.0,
        }
    found, evidence = run(measurements_of(times))
    assert found.stream_heads == 48
    assert found.stream_items["record"] is not None
    plain = emit.load(emit.emit(replace(found, choices={})))
    assert [plain.explain(h, 1, 4, "record").rule for h in (12, 48)] == [
        "WINDOW_SCHEDULE",
        "STREAM_HEADS",
    ]
    assert evidence.baselines["thresholds and schedules"]["all"].max == 0
    assert evidence.other_intervals["stream_heads"] == {"record": None}
