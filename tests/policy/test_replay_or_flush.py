from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from kdabench.data.measurements import Candidate, Cell, Measurement
from kdabench.policy import emit, fit, replay_or_flush
from kdabench.policy.constants import Policy
from kdabench.policy.regret import FLUSH, NOWHERE, Evidence
from support import synthetic
from support.synthetic import STOCK, failed, measurement, split

FUSED = {s: Candidate.of("KdaFused", {"split": s}) for s in (1, 4)}
FUSED_WS = Candidate.of("KdaFusedWS", {})
COMMIT = Candidate.of("KdaCommit", {"source": "ring"})


def replay_cell(requests: int, heads: int, tokens: int = 4, **changes: Any) -> Cell:
    given: dict[str, Any] = {"pending": "mix", **changes}
    return Cell("replay", requests, heads, tokens, **given)


def flush_cell(requests: int, heads: int, tokens: int = 4, **changes: Any) -> Cell:
    given: dict[str, Any] = {"layers": 69, "pending": "mix", "context": "isolated", **changes}
    return Cell("flush", requests, heads, tokens, **given)


def rows_of(
    replay_us: Callable[[Cell, Candidate], float],
    flush_us: Callable[[Cell], float],
    heads: Sequence[int] = (12, 96),
    requests: Sequence[int] = (1, 4, 16, 64, 256),
) -> list[Measurement]:
    """Records that take 5 us each, replays of the same steps, and flushes of 69 layers, flush_us a
    layer."""
    rows = []
    for h, r in itertools.product(heads, requests):
        rows.append(measurement(Cell("record", r, h, 4), split(1), [5.0]))
        cell = replay_cell(r, h)
        rows += [measurement(cell, c, [replay_us(cell, c)]) for c in (*FUSED.values(), FUSED_WS)]
        flushed = flush_cell(r, h)
        rows.append(measurement(flushed, COMMIT, [flush_us(flushed) * 69]))
    return rows


def run(rows: Sequence[Measurement]) -> tuple[Policy, Evidence]:
    return fit.fit(rows, synthetic.ENVS, resamples=0)


def forms_us(cell: Cell, candidate: Candidate) -> float:
    """split 4 wins up to 48 items, 1 up to 3072, streaming above; 96 heads are slower than a flush
    up to 400 items."""
    base = 9.0 if cell.heads == 96 and cell.items < 400 else 6.0
    if candidate == FUSED_WS:
        return base * (0.8 if cell.items > 4000 else 1.5)
    return base * (1.3 if (candidate == FUSED[4]) != (cell.items <= 48) else 1.0)


def test_whole_steps_are_compared() -> None:
    """Replays win at 12 heads everywhere, at 96 from 1536 items on; the forms by items."""
    found, evidence = run(rows_of(forms_us, lambda cell: 2.0))
    assert found.fused_items[12] == 1
    cut = found.fused_items[96]
    assert cut is not None
    assert 384 < cut <= 1536
    assert found.fused_ws_items is not None
    assert 3072 < found.fused_ws_items <= 6144
    assert list(found.fused_split.values()) == [4, 1]
    assert 48 < list(found.fused_split)[1] <= 96
    module = emit.load(emit.emit(found))
    assert [module.replays(96, r) for r in (4, 16)] == [False, True]
    assert [module.choose(96, r, 4, "replay").variant for r in (4, 16, 256)] == [
        "KdaSplit",
        "KdaFused",
        "KdaFusedWS",
    ]
    assert [module.choose(96, r, 4, "replay").flush for r in (4, 16)] == [True, False]
    assert module.choose(12, 1, 4, "replay").options["split"] == 4
    assert module.choose(12, 256, 4, "replay").options["split"] == 1
    assert module.choose(96, 256, 4, "replay", streamable=False).variant == "KdaFused"
    assert module.explain(96, 256, 4, "replay").rule == "CHOICES"
    assert evidence.regret["replay"].max == 0
    assert evidence.regret["replay"].cells == 10
    assert evidence.uncovered == ()
    assert module.MEASURED["replay"][96][4][1] == pytest.approx(9 / 7, abs=1e-3)


def test_thresholds_alone_say_the_same() -> None:
    found, _ = run(rows_of(forms_us, lambda cell: 2.0))
    module = emit.load(emit.emit(replace(found, choices={})))
    assert module.explain(96, 256, 4, "replay").rule == "FUSED_WS_ITEMS"
    assert module.explain(96, 16, 4, "replay").rule == "FUSED_ITEMS"
    assert [module.choose(12, r, 4, "replay").options["split"] for r in (1, 256)] == [4, 1]


@pytest.mark.parametrize("seed", range(6))
def test_the_threshold_is_the_best_one(seed: int) -> None:
    """By plain loops over the breakpoints of each head count."""
    rng = random.Random(seed)
    replayed = {(h, r): math.exp(rng.gauss(2, 0.3)) for h in (12, 96) for r in (1, 4, 16, 64, 256)}
    flushed = {key: math.exp(rng.gauss(1, 0.3)) for key in replayed}
    rows = rows_of(
        lambda cell, _: replayed[cell.heads, cell.requests], lambda c: flushed[c.heads, c.requests]
    )
    module = emit.load(emit.emit(run(rows)[0]))
    for heads in (12, 96):
        ratios = [math.log((flushed[h, r] + 5) / replayed[h, r]) for h, r in replayed if h == heads]
        best = max(sum(ratios[n:]) for n in range(len(ratios) + 1))
        mine = sum(
            ratio
            for ratio, r in zip(ratios, (1, 4, 16, 64, 256), strict=True)
            if module.replays(heads, r)
        )
        assert mine == pytest.approx(best)


def test_a_flush_never_wins_or_always() -> None:
    never, _ = run(rows_of(lambda *_: 6.0, lambda _: 9.0))
    assert (never.fused_items, never.fused_default_items) == ({12: 1, 96: 1}, 1)
    always, evidence = run(rows_of(lambda *_: 60.0, lambda _: 9.0))
    assert (always.fused_items, always.fused_default_items) == ({12: None, 96: None}, None)
    assert evidence.regret["replay"].max == 0
    assert emit.load(emit.emit(always)).choose(12, 1, 4, "replay").flush


def test_without_flushes_what_was_measured_replays() -> None:
    rows = [r for r in rows_of(lambda *_: 60.0, lambda _: 9.0) if r.cell.kind != "flush"]
    assert run(rows)[0].fused_items == {12: 1, 96: 1}
    # And without replays there is nothing to decide: a flush.
    rows = [r for r in rows_of(lambda *_: 6.0, lambda _: 9.0) if r.cell.kind != "replay"]
    found, _ = run(rows)
    assert (found.fused_items, found.fused_default_items) == ({}, None)


def flushes(*points: tuple[Cell, float]) -> Any:
    grid = fit.step_grid([measurement(replay_cell(1, 12), FUSED[1], [5.0])])
    return replay_or_flush._FlushTimes.of(
        [measurement(cell, COMMIT, [us]) for cell, us in points], grid
    ).us


def test_a_layers_share_of_the_launch_with_most_layers() -> None:
    one, all_layers = flush_cell(8, 12, layers=1, context="layer"), flush_cell(8, 12)
    assert flushes((one, 4.0))(96, 4) == pytest.approx(4.0)
    assert flushes((one, 4.0), (all_layers, 69.0))(96, 4) == pytest.approx(1.0)
    # Another token count's launch of all layers doesn't count here.
    assert flushes((one, 4.0), (flush_cell(8, 12, 8), 138.0))(96, 4) == pytest.approx(4.0)


def test_between_flushes_it_is_interpolated() -> None:
    us = flushes(
        (flush_cell(1, 12), 69.0), (flush_cell(16, 12), 4 * 69.0), (flush_cell(1, 12, 8), 690.0)
    )
    assert us(12, 4) == pytest.approx(1.0)
    assert us(48, 4) == pytest.approx(2.0)
    assert us(6, 4) == pytest.approx(1.0)
    assert us(384, 4) == pytest.approx(8.0)  # above: grows with the items
    assert us(12, 7) == pytest.approx(10.0)
    assert math.isnan(flushes()(12, 4))


def test_other_flushes_do_not_count() -> None:
    other = [
        flush_cell(1, 12, pending=None),
        flush_cell(1, 12, state_dtype="bf16"),
        flush_cell(1, 12, inputs="generic"),
    ]
    assert math.isnan(flushes(*((cell, 69.0) for cell in other))(12, 4))
    grid = fit.step_grid([measurement(replay_cell(1, 12), FUSED[1], [5.0])])
    broken = [
        measurement(flush_cell(1, 12), COMMIT, [69.0]),
        failed(flush_cell(1, 12), COMMIT, "wrong", 1),
    ]
    assert math.isnan(replay_or_flush._FlushTimes.of(broken, grid).us(12, 4))


def test_only_mixed_pending_tokens_are_fitted() -> None:
    rows = [
        measurement(replay_cell(1, 12), FUSED[1], [5.0]),
        measurement(replay_cell(1, 12, pending=0), FUSED[4], [1.0]),
    ]
    grid = fit.step_grid([*rows, measurement(Cell("record", 1, 12, 4), STOCK, [5.0])])
    assert [cell.pending for cell in grid.cells] == [None, "mix"]
    assert [c.variant for c in grid.candidates] == ["KdaFused", "stock", FLUSH]
    assert NOWHERE not in grid.of(FLUSH)


def test_the_plain_form_names_one_set_of_options_for_all_splits() -> None:
    """Each split is fastest with another source; together the registers are."""
    sources = {
        Candidate.of("KdaFused", {"split": s, "source": w}): (s, w)
        for s in (1, 4)
        for w in ("a", "b")
    }
    us = {(1, "a"): (3.0, 1.0), (4, "a"): (1.1, 9.0), (4, "b"): (1.0, 9.0), (1, "b"): (3.0, 8.0)}
    rows = [
        measurement(replay_cell(r, 12), c, [us[key][i]])
        for i, r in enumerate((1, 64))
        for c, key in sources.items()
    ]
    found, evidence = run(rows)
    assert found.step_options["KdaFused"] == {("replay", 4): {"pdl": False, "source": "a"}}
    assert list(found.fused_split.values()) == [4, 1]
    assert evidence.regret["all"].max == 0
    choice = emit.load(emit.emit(replace(found, choices={}))).choose(12, 64, 4, "replay")
    assert choice.options == {"pdl": False, "source": "a", "split": 1}


def test_intervals_of_replay_thresholds() -> None:
    rows = [replace(r, process=p) for r in rows_of(forms_us, lambda cell: 2.0) for p in range(2)]
    found, evidence = fit.fit(rows, synthetic.ENVS, resamples=5)
    intervals = evidence.other_intervals
    assert intervals["fused_items"] == {
        "12": (1, 1),
        "96": (found.fused_items[96], found.fused_items[96]),
    }
    assert intervals["fused_ws_items"] == {"replay": (found.fused_ws_items, found.fused_ws_items)}
    assert set(intervals["fused_default_items"]) == {"replay"}
