"""Figures of a search: best so far against trials, and what each option matters."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import optuna
from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances
from optuna.trial import TrialState

from kdabench.review.plot import _style
from kdabench.tune.search import StudyOutcome

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from kdabench.tune.compare import Found

_LEAST = 4  # completed trials from which importance is told
_LINES = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_DASHES: tuple[Any, ...] = (
    "-",
    (0, (5, 1.5)),
    (0, (2, 1)),
    (0, (3, 1, 1, 1)),
    "-",
    (0, (5, 1.5)),
    (0, (1, 1)),
)


def write(outcomes: Sequence[StudyOutcome], folder: Path, stem: str, title: str) -> list[Path]:
    """best.svg and importance.svg of a search, and the same as PNG; a panel per variant. Returns
    the files."""
    by_variant: dict[str, list[StudyOutcome]] = {}
    for outcome in outcomes:
        if outcome.best is not None:
            by_variant.setdefault(outcome.task.space.variant, []).append(outcome)
    if not by_variant:
        return []
    written = _save(by_variant, _best, folder / f"{stem}.best", f"{title}\nbest so far")
    weights = {
        variant: found for variant, ours in by_variant.items() if (found := importances(ours))
    }
    if weights:
        written += _save(
            weights,
            _importance,
            folder / f"{stem}.importance",
            f"{title}\nimportance of the options",
        )
    return written


def _save(panels: Mapping[str, Any], draw: Any, path: Path, title: str) -> list[Path]:
    from matplotlib.figure import Figure

    with _style():
        figure = Figure(figsize=(1.6 + 3.4 * len(panels), 3.4), layout="constrained")
        figure.suptitle(title, fontsize=9)
        for axes, (name, content) in zip(
            figure.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True
        ):
            axes.set_title(name, fontsize=8.5)
            draw(axes, content)
            axes.spines[["top", "right"]].set_visible(False)
        written = [path.with_name(path.name + suffix) for suffix in (".svg", ".png")]
        for target, metadata in zip(written, ({"Date": None}, {"Software": None}), strict=True):
            figure.savefig(target, metadata=metadata, dpi=150)
    return written


def _best(axes: Axes, outcomes: Sequence[StudyOutcome]) -> None:
    """A thin line per cell, and their median."""
    curves = [
        [100 * (v / path[-1] - 1) for v in path] for o in outcomes if (path := o.best_so_far())
    ]
    for curve in curves:
        axes.step(
            range(1, len(curve) + 1),
            curve,
            where="post",
            color="#0072B2",
            alpha=0.35,
            linewidth=0.7,
        )
    longest = max(map(len, curves))
    middle = [median(curve[min(n, len(curve) - 1)] for curve in curves) for n in range(longest)]
    axes.step(
        range(1, longest + 1),
        middle,
        where="post",
        color="black",
        linewidth=1.6,
        label="median of the cells",
    )
    _axes(axes, "trials of a cell", "best so far above the final best (%)")


def _axes(axes: Axes, x: str, y: str) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.set_yscale("symlog", linthresh=1)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    axes.grid(axis="y", color="#E0E0E0", linewidth=0.6)
    axes.legend(frameon=False, fontsize=7)


def importances(outcomes: Sequence[StudyOutcome]) -> dict[str, list[float]]:
    """By option its part of what the options decide, in each study that can tell (PED-ANOVA); most
    important first."""
    found: dict[str, list[float]] = {}
    for outcome in outcomes:
        done = [t for t in outcome.trials if t.state == TrialState.COMPLETE]
        if len(done) < _LEAST or len({t.value for t in done}) < 2:
            continue
        study = optuna.create_study()
        study.add_trials(done)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            shares = get_param_importances(
                study, evaluator=PedAnovaImportanceEvaluator(), normalize=True
            )
        for name, share in shares.items():
            found.setdefault(name, []).append(float(share))
    return dict(sorted(found.items(), key=lambda item: -fmean(item[1])))


def _importance(axes: Axes, shares: Mapping[str, Sequence[float]]) -> None:
    """A bar per option, the mean over the cells, and a dot per cell."""
    names = list(shares)[::-1]
    axes.barh(names, [100 * fmean(shares[n]) for n in names], color="#9CC4E0", height=0.65)
    for row, name in enumerate(names):
        axes.plot(
            [100 * s for s in shares[name]],
            [row] * len(shares[name]),
            ".",
            color="#0072B2",
            markersize=3,
            alpha=0.5,
        )
    axes.set_xlim(0, 100)
    axes.set_xlabel("importance (%): mean and cells")


def write_comparison(found: Sequence[Found], folder: Path, stem: str, title: str) -> list[Path]:
    """Median over the cells, mean over the seeds, of the best so far against trials; a line per way
    of searching."""
    return _save(
        {"median of the cells, mean of the seeds": found}, _ways, folder / f"{stem}.samplers", title
    )


def _ways(axes: Axes, found: Sequence[Found]) -> None:
    ways = list(dict.fromkeys(f.way for f in found if f.way.sampler != "exhaustive"))
    for number, way in enumerate(ways):
        curves = [f.curves for f in found if f.way == way]
        longest = max(len(curve) for seed in curves for curve in seed)
        mean = [
            fmean(
                min(1e3, 100 * (median(c[min(n, len(c) - 1)] for c in seed) - 1)) for seed in curves
            )
            for n in range(longest)
        ]
        look = {"color": _LINES[number % len(_LINES)], "linestyle": _DASHES[number % len(_DASHES)]}
        axes.step(range(1, longest + 1), mean, where="post", linewidth=1.3, label=str(way), **look)
    _axes(axes, "trials of a cell", "best so far above the best there is (%)")
