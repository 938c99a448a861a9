from __future__ import annotations

import itertools
import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdabench.data.measurements import Candidate, Cell, Measurement
from kdabench.policy import emit, fit, regret, rows
from kdabench.policy.regret import TIE, Grid
from kdabench.policy.thresholds import ladder
from support import synthetic
from support.synthetic import STOCK, measurement, split

SMS = synthetic.ENV["sms"]
WIDE = Candidate.of("KdaWide", {"form": "chunked"})
CANDIDATES = (split(1), split(2), WIDE)


def grid_of(us: Mapping[tuple[int, int], Sequence[float]], tokens: int = 4) -> Grid:
    """Record cells: (heads, requests) -> microseconds of CANDIDATES; 0 is no time."""
    return regret.make_grid(
        measurement(Cell("record", requests, heads, tokens), candidate, [time])
        for (heads, requests), times in us.items()
        for candidate, time in zip(CANDIDATES, times, strict=True)
        if time
    )


def row_of(grid: Grid, heads: int) -> dict[int, Candidate]:
    row = rows.find_rows(grid, SMS)["record", 4][heads]
    return {items: grid.candidates[i] for items, i in row.items()}


@settings(deadline=None)
@given(
    st.lists(st.lists(st.floats(0, 3), min_size=3, max_size=3), min_size=1, max_size=5),
    st.lists(
        st.lists(st.sampled_from([0.0, 0.5, 1.0, math.inf]), min_size=3, max_size=3),
        min_size=3,
        max_size=3,
    ),
)
def test_the_path_is_the_cheapest(cost: list[list[float]], change: list[list[float]]) -> None:
    """Against all paths; of equally cheap ones the first."""
    for i in range(3):
        change[i][i] = 0.0

    def total(path: Sequence[int]) -> float:
        steps = sum(change[a][b] for a, b in itertools.pairwise(path))
        return steps + sum(row[state] for row, state in zip(cost, path, strict=True))

    found = ladder.cheapest_path(np.array([cost, cost[::-1]]), np.array(change))[0].tolist()
    paths = list(itertools.product(range(3), repeat=len(cost)))
    least = min(map(total, paths))
    assert total(found) == pytest.approx(least)
    assert tuple(found) <= next(path for path in paths if total(path) <= least + 1e-12)


def test_every_cell_is_within_the_tie_band_of_its_best() -> None:
    for seed in range(4):
        rng = random.Random(seed)
        keys = itertools.product((6, 12, 96), (1, 2, 5, 9, 30, 200))
        grid = grid_of(
            {
                key: [math.exp(rng.gauss(1, 0.2)) * (rng.random() > 0.1) for _ in range(3)]
                for key in keys
            }
        )
        found = rows.find_rows(grid, SMS)
        picked = np.array([fit._in_row(found, cell) for cell in grid.cells])
        assert np.nanmax(regret.log_regret(grid, picked)) <= math.log1p(TIE)
        assert np.array_equal(np.isnan(regret.log_regret(grid, picked)), np.isnan(grid.best))


def test_heads_have_rows_of_their_own() -> None:
    grid = grid_of({(96, 1): (1, 2, 2), (12, 8): (2, 2, 1), (12, 1): (1, 2, 2), (96, 8): (2, 2, 1)})
    assert row_of(grid, 12) == {1: split(1), 26: WIDE}  # more than a quarter of a wave
    assert row_of(grid, 96) == {1: split(1), 301: WIDE}  # more than three items per SM


def test_ties_change_nothing() -> None:
    """What leads by less than the tie band, and noise far below it, leave no trace."""
    for seed in range(5):
        rng = random.Random(seed)
        us = {(12, r): [5 * rng.uniform(0.999, 1.001) for _ in CANDIDATES] for r in (1, 2, 4, 8)}
        assert row_of(grid_of(us), 12) == {1: split(1)}


def test_other_heads_decide_between_the_cells() -> None:
    """Alone the change lies where a quarter of a wave ends; 24 heads were measured in between."""
    us: dict[tuple[int, int], Sequence[float]] = {(12, 1): (1, 2, 2), (12, 8): (2, 2, 1)}
    assert row_of(grid_of(us), 12) == {1: split(1), 26: WIDE}
    for wide_from in (2, 3, 4):
        others = {(24, r): ((1, 2, 2) if r < wide_from else (2, 2, 1)) for r in (1, 2, 3, 4)}
        first = list(row_of(grid_of(us | others), 12))[1]
        assert 24 * (wide_from - 1) < first <= 24 * wide_from


def test_what_other_heads_lose_must_outweigh_two_changes_and_never_a_row_s_own_cells() -> None:
    """12 heads were measured at 12 and 96 items, where Split is best; 24 heads say that it isn't in
    between."""
    own = {(12, r): (1, 2, 2) for r in (1, 8)}
    for slower, between in ((1.02, split(1)), (1.3, WIDE)):
        row = row_of(
            grid_of(own | {(24, r): (slower, 9, 1) for r in (2, 3)} | {(24, 5): (1, 9, slower)}), 12
        )
        picked = {items: row[max(n for n in row if n <= items)] for items in (12, 48, 72, 96, 120)}
        assert picked == {12: split(1), 48: between, 72: between, 96: split(1), 120: split(1)}


def test_by_how_much_a_row_is_off_is_carried_along() -> None:
    """96 heads say nothing at 384 items, where 12 heads want another variant: there alone, or at
    all items."""
    many = {(96, r): (1, 9, 1.02) for r in (2, 3, 5, 6)}
    for elsewhere, between in ((1.0, WIDE), (1.2, split(1))):
        few = {
            (12, r): (1.2 if r == 32 else elsewhere, 9, 1 if r == 32 else 1.02)
            for r in (8, 16, 24, 32, 40, 48)
        }
        row = row_of(grid_of({**few, **many}), 96)
        assert row[max(n for n in row if n <= 384)] == between


def test_a_row_without_cells_is_taken_from_those_near_it() -> None:
    """10 and 56 heads were measured with other tokens only."""
    few, many = (1.2, 9.0, 1.0), (1.0, 9.0, 1.2)
    cells = [(heads, 4, few if heads < 20 else many) for heads in (8, 12, 48, 64)] + [
        (10, 8, few),
        (56, 8, few),
    ]
    grid = regret.make_grid(
        measurement(Cell("record", requests, heads, tokens), candidate, [us])
        for heads, tokens, times in cells
        for requests in (1, 2, 4)
        for candidate, us in zip(CANDIDATES, times, strict=True)
    )
    assert row_of(grid, 10) == {1: WIDE}
    assert row_of(grid, 56) == {1: split(1)}


def test_a_variant_without_a_time_is_not_picked() -> None:
    grid = grid_of({(12, 1): (0, 2, 3), (12, 2): (1, 0, 3), (12, 4): (0, 0, 3), (12, 8): (0, 0, 0)})
    found, evidence = fit.fit(measurements_of(grid), synthetic.ENVS, resamples=0)
    module = emit.load(emit.emit(found))
    assert [module.choose(12, r, 4, "record").variant for r in (1, 2, 4, 8)] == [
        "KdaSplit",
        "KdaSplit",
        *["KdaWide"] * 2,
    ]
    assert evidence.uncovered == ()


def measurements_of(grid: Grid) -> list[Measurement]:
    return [
        measurement(cell, candidate, [us])
        for cell, row in zip(grid.cells, grid.process_us[:, :, 0], strict=True)
        for candidate, us in zip(grid.candidates, row.tolist(), strict=True)
        if not math.isnan(us)
    ]


def test_unmeasured_keys_take_the_nearest_row() -> None:
    grid = grid_of({(12, 1): (1, 2, 2), (12, 8): (2, 2, 1), (96, 1): (2, 1, 3)})
    module = emit.load(emit.emit(fit.fit(measurements_of(grid), synthetic.ENVS, resamples=0)[0]))

    def splits(*key: int) -> list[object]:
        return [choice.options.get("split") for choice in module.ranked(*key, "record")]

    assert splits(16, 1, 4)[0] == 1
    assert splits(64, 1, 2)[0] == 2
    assert splits(96, 10**6, 8)[0] == 2
    assert module.choose(13, 10**6, 4, "record").variant == "KdaWide"
    assert module.explain(13, 10**6, 4, "record").rule == "CHOICES"
    # What a row says for fewer items, then the schedules, then stock.
    variants = [choice.variant for choice in module.ranked(12, 8, 4, "record")]
    assert variants == ["KdaWide", "KdaSplit", "stock"]
    assert module.choose(12, 8, 4, "replay") == module.choose(12, 8, 4, "record")._replace(
        flush=True
    )
    assert module.wide(12, 8, 4, True)
    assert not module.wide(12, 1, 4, True)


def test_what_cannot_stream_takes_what_a_row_says_before() -> None:
    streaming = Candidate.of("KdaWS", {})
    us = {1: (1.0, 2.0, 3.0), 8: (2.0, 1.0, 3.0), 64: (3.0, 2.0, 1.0)}
    rows = [
        measurement(Cell("record", r, 12, 4), c, [time])
        for r, times in us.items()
        for c, time in zip((split(1), WIDE, streaming), times, strict=True)
    ]
    found, evidence = fit.fit(rows, synthetic.ENVS, resamples=0)
    module = emit.load(emit.emit(found))
    assert [module.choose(12, r, 4, "record").variant for r in us] == [
        "KdaSplit",
        "KdaWide",
        "KdaWS",
    ]
    assert module.choose(12, 64, 4, "record", streamable=False).variant == "KdaWide"
    assert "KdaWS" not in {
        choice.variant for choice in module.ranked(12, 64, 4, "record", streamable=False)
    }
    assert evidence.baselines["not streamable"]["all"].max == 0


def test_unsettled_cells() -> None:
    """Two variants a hair apart, one process in three the other way: open. Far apart: settled."""
    close = [(1.0, 1.02), (1.0, 1.02), (1.02, 1.0)]
    rows = [
        measurement(Cell("decode", requests, 12), candidate, [us], process)
        for requests, times in ((1, close), (64, [(1.0, 2.0)] * 3))
        for process, pair in enumerate(times)
        for candidate, us in zip((split(1), STOCK), pair, strict=True)
    ]
    _, evidence = fit.fit(rows, synthetic.ENVS, resamples=60)
    ((cell, share),) = evidence.unsettled
    assert cell == Cell("decode", 1, 12)
    assert 0.5 < share < 0.9
    assert fit.fit(rows, synthetic.ENVS, resamples=60)[1].unsettled == evidence.unsettled


def test_weights_do_not_move_rows() -> None:
    rows = list(synthetic.measurements())
    plain, weighed = (
        fit.fit(rows, synthetic.ENVS, resamples=0, weights=w)[0] for w in (None, {256: 9.0})
    )
    assert plain.choices == weighed.choices
    assert replace(plain, origin=weighed.origin).choices
