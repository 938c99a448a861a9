"""Figures: the data behind them, their bytes, and that no text covers another."""

from __future__ import annotations

import hashlib
import itertools
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.text import Text

from kda_kernels import variants
from kdabench.data.measurements import Candidate, Cell, Measurement
from kdabench.review import curves, plot
from support import synthetic


def cell(requests: int, heads: int = 12, **changes: Any) -> Cell:
    return Cell("decode", requests, heads, **changes)


def choice(variant: str, flush: bool = False, **options: Any) -> SimpleNamespace:
    return SimpleNamespace(variant=variant, options=options, flush=flush)


def ranked(heads: int, requests: int, tokens: int, kind: str) -> list[SimpleNamespace]:
    items = heads * requests
    stock = choice("stock", pdl=False)
    split = next((s for s in (8, 4, 2) if items * s <= 200), 1)
    return (
        [stock]
        if items >= 6000
        else [choice("KdaSplit", split=split, staging="registers", pdl=True), stock]
    )


def grid_measurements(heads: Sequence[int] = (12, 96)) -> list[Measurement]:
    cells = [cell(r, h) for h in heads for r in (1, 2, 4, 8, 11, 16, 22, 32, 64, 128, 256)]
    return list(synthetic.measurements(cells))


def test_quartiles_are_of_all_samples_and_the_median_of_the_processes_medians() -> None:
    samples = ([1.0, 2.0, 9.0], [4.0, 4.0, 4.0], [5.0, 6.0, 7.0])
    measurements = [
        synthetic.measurement(cell(1), synthetic.STOCK, s, p) for p, s in enumerate(samples)
    ]
    timing = curves.timings(measurements)[12][1][synthetic.STOCK]
    assert timing == curves.Timing(low=4.0, median=4.0, high=6.0)


def test_a_candidate_that_failed_in_one_process_has_no_time() -> None:
    measurements = [
        synthetic.measurement(cell(1), synthetic.STOCK, [3.0]),
        synthetic.failed(cell(1), synthetic.STOCK, process=1),
        synthetic.measurement(cell(1), synthetic.split(2), [4.0]),
    ]
    assert list(curves.timings(measurements)[12][1]) == [synthetic.split(2)]


def test_runs_of_equal_picks_are_joined() -> None:
    runs = curves.policy_runs(ranked, 12, 1, "decode", 1, 20)
    assert [(r.first, r.last, r.split) for r in runs] == [
        (1, 2, 8),
        (3, 4, 4),
        (5, 8, 2),
        (9, 20, 1),
    ]


def test_fastest_runs_cover_the_measured_counts() -> None:
    cells = curves.timings(grid_measurements())[12]
    runs = curves.fastest_runs(cells)
    assert (runs[0].first, runs[-1].last) == (1, 256)
    assert all(a.what != b.what for a, b in itertools.pairwise(runs))


def test_regret_is_that_of_the_fit() -> None:
    measurements = [
        synthetic.measurement(cell(1), synthetic.split(8, pdl=True), [4.0]),
        synthetic.measurement(cell(1), synthetic.STOCK, [5.0]),
        synthetic.measurement(cell(500), synthetic.split(1), [100.0]),
        synthetic.measurement(cell(500), synthetic.STOCK, [125.0]),
    ]
    assert curves.policy_regrets(measurements, ranked) == pytest.approx(
        {(12, 1): 0.0, (12, 500): 0.25}
    )


def test_questions_have_distinct_file_names() -> None:
    changes: list[dict[str, Any]] = [
        {}, {"state_dtype": "bf16"}, {"context": "isolated"}, {"l2": "warm"}, {"inputs": "generic"},
        {"conv_layout": "window-major"},
    ]  # fmt: skip
    cells = [cell(1, **c) for c in changes]
    cells += [
        Cell("commit", 1, 12, 4, layers=n, pending=p) for n in (1, 69) for p in (None, "mix", 0)
    ]  # type: ignore[arg-type]
    cells += [Cell("record", 1, 12, q) for q in (2, 4)]
    stems = {curves.Question.of(c).stem for c in cells}
    assert len(stems) == len(cells)
    assert "decode-q1" in stems


def test_every_variant_has_its_own_look() -> None:
    looks = {name: plot._look(name) for name in variants.NAMES}
    assert plot._UNKNOWN_LOOK not in looks.values()
    assert len({color for color, _, _ in looks.values()}) == len(looks)
    steps = [name for name in looks if set(variants.declared(name).kinds) - {"flush", "commit"}]
    assert len({looks[name][1] for name in steps}) == len(steps)


def test_looks_stay_when_variants_are_added(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {name: plot._look(name) for name in variants.NAMES}
    added = [f"New{n}" for n in range(9)]
    last = variants.of_rule("stock_items")
    monkeypatch.setattr(variants, "of_rule", lambda rule: last)
    monkeypatch.setattr(variants, "NAMES", (*variants.NAMES, *added))
    assert {name: plot._look(name) for name in before} == before
    looks = [plot._look(name) for name in added]
    distinct = [look for look in looks if look != plot._UNKNOWN_LOOK]
    assert 0 < len(distinct) == len({color for color, _, _ in distinct})
    assert looks[-1] == plot._look("of an older version") == plot._UNKNOWN_LOOK


def write(folder: Path) -> dict[str, str]:
    measurements = grid_measurements() + list(
        synthetic.measurements([Cell("commit", r, 12, 4) for r in (1, 8)], noise=0.01)
    )
    policy: Any = SimpleNamespace(ranked=ranked)
    paths = plot.write_plots(
        measurements, folder, device="SYNTHETIC ONE", sms=100, policy=policy, recorded=False
    )
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def test_same_records_same_bytes(tmp_path: Path) -> None:
    first = write(tmp_path / "first")
    assert set(first) == {"decode-q1.svg", "decode-q1.png", "commit-q4.svg", "commit-q4.png"}
    assert write(tmp_path / "second") == first
    code = f"import test_plot, pathlib; print(test_plot.write(pathlib.Path({str(tmp_path / 'third')!r})))"
    path = os.pathsep.join([*sys.path, str(Path(__file__).parents[1])])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONHASHSEED": "7"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(first)


def texts(figure: Figure) -> Iterator[tuple[str, Any]]:
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    for text in figure.findobj(Text):
        assert isinstance(text, Text)
        if text.get_visible() and text.get_text().strip():
            box = text.get_window_extent(canvas.get_renderer())
            if box.width > 0 and _shown(text, figure):
                yield text.get_text(), box


def _shown(text: Text, figure: Figure) -> bool:
    """Whether a text is drawn: tick labels outside their axis' view are not."""
    for axes in figure.axes:
        for axis in (axes.xaxis, axes.yaxis):
            ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
            for tick in ticks:
                if text in (tick.label1, tick.label2):
                    low, high = sorted(axis.get_view_interval())
                    return bool(
                        low <= tick.get_loc() <= high and text in axis.get_ticklabels(which="both")
                    )
    return True


@pytest.mark.parametrize(
    ("heads", "policy", "recorded", "device"),
    [
        ((12,), True, True, "SYNTHETIC ONE"),
        ((12, 96), False, True, "SYNTHETIC ONE MIG 1g.18gb"),
        ((6, 12, 24, 48, 96), True, False, "SYNTHETIC ONE"),
        ((3, 6, 12, 24, 32, 64, 96), True, True, "SYNTHETIC ONE"),
    ],
)
def test_no_text_covers_another(
    heads: tuple[int, ...], policy: bool, recorded: bool, device: str
) -> None:
    measurements = grid_measurements(heads)
    question = curves.Question.of(measurements[0].cell)
    picks = ranked if policy else None
    with plot._style():
        figure = plot.draw(
            question, measurements, device=device, sms=100, ranked=picks, recorded=recorded
        )
        shown = list(texts(figure))
        width, height = figure.canvas.get_width_height()
    for text, box in shown:
        inside = box.x0 >= -1 and box.x1 <= width + 1 and box.y0 >= -1 and box.y1 <= height + 1
        assert inside, f"{text!r} is cut off"
    for (one, a), (other, b) in itertools.combinations(shown, 2):
        apart = a.x1 <= b.x0 + 0.5 or b.x1 <= a.x0 + 0.5 or a.y1 <= b.y0 + 0.5 or b.y1 <= a.y0 + 0.5
        assert apart, f"{one!r} covers {other!r}"
    assert any("recorded run" in text for text, _ in shown) == recorded


def test_failures_only_and_single_points_can_be_drawn(tmp_path: Path) -> None:
    measurements = [
        synthetic.failed(cell(1), synthetic.STOCK),
        synthetic.failed(cell(1), Candidate.of("New", {})),
    ]
    plot.write_plots(measurements, tmp_path, device="X", sms=None, policy=None, recorded=False)
    measurements.append(synthetic.measurement(cell(1), synthetic.split(1), [3.0]))
    policy: Any = SimpleNamespace(ranked=ranked)
    plot.write_plots(measurements, tmp_path, device="X", sms=100, policy=policy, recorded=False)
    assert (tmp_path / "decode-q1.svg").stat().st_size > 1000
