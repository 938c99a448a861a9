"""Latency curves from records: one figure per question, one column per head count.

Each column shows, over items = requests x heads: latency with its spread above the byte floor, a
ribbon of what the policy picks, and how far every variant and the pick are from the best. Same
records and policy, same bytes.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from kda_kernels import variants
from kdabench.data.measurements import Measurement
from kdabench.policy.constants import FITTED_KINDS
from kdabench.review.curves import (
    Pick,
    Question,
    Ranked,
    Timings,
    by_question,
    by_split,
    count,
    fastest_runs,
    policy_regrets,
    policy_runs,
    timings,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_Look = tuple[str, str, Any]
"""Colour, marker and dashes."""
# Okabe-Ito, its yellow darkened to olive for lines on white, then of Tol's muted colours. Markers
# and dashes tell variants apart without colour.
_LOOKS: tuple[_Look, ...] = (
    ("#0072B2", "o", "-"),
    ("#E69F00", "s", (0, (5, 1.5))),
    ("#009E73", "^", (0, (3, 1, 1, 1))),
    ("#D55E00", "D", (0, (2, 1))),
    ("#CC79A7", "v", "-"),
    ("#56B4E9", "P", (0, (5, 1.5))),
    ("#8A8500", "o", "-"),
    ("#882255", "<", (0, (3, 1, 1, 1))),
    ("#44AA99", ">", (0, (2, 1))),
    ("#332288", "h", "-"),
)
_LAST_RESORT_LOOK: _Look = ("#000000", "X", (0, (1, 1.2)))
_UNKNOWN_LOOK: _Look = ("#7F7F7F", "*", (0, (6, 1, 1, 1)))
_POINT: dict[str, Any] = {"markersize": 3.6, "markeredgecolor": "white", "markeredgewidth": 0.4}
_PICK: dict[str, Any] = {
    "color": "black",
    "marker": "o",
    "markersize": 3.2,
    "mfc": "white",
    "linestyle": "none",
}
_CHANGE: dict[str, Any] = {"color": "#404040", "linestyle": (0, (3, 2))}
_SPLIT_STRENGTH = {1: 0.4, 2: 0.6, 4: 0.8}

_RC: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 8,
    "axes.linewidth": 0.7,
    "axes.edgecolor": "#404040",
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#EBEBEB",
    "grid.linewidth": 0.6,
    "ytick.minor.size": 0,
    # fixed: matplotlib would look for a free place at each draw, by laying out all ticks
    "axes.titley": 1.0,
    "xtick.labelsize": 7.5,
    "ytick.labelsize": 7.5,
    "xtick.color": "#404040",
    "ytick.color": "#404040",
    "xtick.labelcolor": "black",
    "ytick.labelcolor": "black",
    "svg.hashsalt": "kdabench",
    "svg.fonttype": "path",
}

# Inches.
_COLUMNS = 5
_MARGINS = {"left": 0.62, "right": 0.12, "top": 1.05, "bottom": 0.62}
_LEGEND_ROW = 0.19
_HEIGHTS = (2.2, 0.2, 1.05)  # latency, ribbon, distance from the best
_SPACES = (0.0, 0.06, 0.1)  # above each of them
_COLUMN_GAP, _ROW_GAP = 0.14, 0.95

_WAVES = {0.125: "⅛", 0.25: "¼", 0.5: "½", **{2**n: str(2**n) for n in range(9)}}
_NO_RESULT = ("compile_error", "wrong", "fault", "timeout", "oom", "capture_failed", "implausible")


def write_plots(
    measurements: Sequence[Measurement],
    folder: Path,
    *,
    device: str,
    sms: int | None,
    policy: ModuleType | None,
    recorded: bool,
    held: Collection[str] = (),
) -> list[Path]:
    """Write an SVG and a PNG per question, and return their paths.

    device   as the title names it
    sms      multiprocessors of the device, for the wave boundaries
    policy   a generated policy module, for ribbon, thresholds and regret; without it the ribbon
             shows the fastest
    recorded  whether nothing was measured here: the title says that it is a recorded run
    held     variants that the policy may not pick: the line below the title names them
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    with _collecting_nothing():
        for question, group in by_question(measurements).items():
            ranked: Ranked | None = None
            if policy is not None and question.kind in FITTED_KINDS and question.context == "layer":
                ranked = policy.ranked
            figure = draw(
                question, group, device=device, sms=sms, ranked=ranked, recorded=recorded, held=held
            )
            for suffix, metadata in ((".svg", {"Date": None}), (".png", {"Software": None})):
                path = folder / f"{question.stem}{suffix}"
                with _style():
                    figure.savefig(path, metadata=metadata, dpi=150)
                written.append(path)
    return written


@contextmanager
def _collecting_nothing() -> Iterator[None]:
    """What is there now isn't garbage: with many records the collector would walk them again for
    each few artists."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def draw(
    question: Question,
    measurements: Sequence[Measurement],
    *,
    device: str,
    sms: int | None,
    ranked: Ranked | None,
    recorded: bool,
    held: Collection[str] = (),
) -> Figure:
    """The figure of one question."""
    from matplotlib.figure import Figure

    measured = timings(measurements)
    of_heads: dict[int, list[Measurement]] = {}
    for measurement in measurements:
        of_heads.setdefault(measurement.cell.heads, []).append(measurement)
    heads_list = sorted(of_heads)
    rows = math.ceil(len(heads_list) / _COLUMNS)
    columns = math.ceil(len(heads_list) / rows)
    panel = 2.4 if columns <= 4 else 2.0
    block = sum(_HEIGHTS) + sum(_SPACES)
    width = _MARGINS["left"] + columns * (panel + _COLUMN_GAP) - _COLUMN_GAP + _MARGINS["right"]
    width = max(width, 5.4)
    handles = _legend_handles(measurements, sms, ranked is not None)
    legend_columns = max(3, min(len(handles), int(width / 1.45)))
    bottom = _MARGINS["bottom"] + _LEGEND_ROW * math.ceil(len(handles) / legend_columns)
    height = _MARGINS["top"] + rows * (block + _ROW_GAP) - _ROW_GAP + bottom
    limits = _latency_limits(measured, measurements)
    regrets = policy_regrets(measurements, ranked) if ranked is not None else {}
    highest = max([0.1, *regrets.values()]) * 100
    with _style():
        figure = Figure(figsize=(width, height))
        for index, heads in enumerate(heads_list):
            row, column = divmod(index, columns)
            x = _MARGINS["left"] + column * (panel + _COLUMN_GAP)
            y = height - _MARGINS["top"] - row * (block + _ROW_GAP)
            panels = []
            for panel_height, space in zip(_HEIGHTS, _SPACES, strict=True):
                y -= panel_height + space
                box = (x / width, y / height, panel / width, panel_height / height)
                panels.append(figure.add_axes(box, xscale="log"))
            drawn = _Column(
                question,
                heads,
                of_heads[heads],
                measured.get(heads, {}),
                ranked,
                regrets,
                sms,
                *panels,
            )
            drawn.draw(limits, panel * 72, first=column == 0)
            drawn.distance.set_ylim(-0.05 * highest, 1.4 * highest)
        title = question.title + ("  (recorded run)" if recorded else "")
        left = _MARGINS["left"] / width
        figure.text(left, 1 - 0.15 / height, title, fontsize=11, fontweight="bold", va="top")
        below = f"{device}, {question.circumstances}"
        if ranked is not None and (
            kept := sorted({r.candidate.variant for r in measurements}.intersection(held))
        ):
            below += f"; held back from the policy: {', '.join(kept)}"
        figure.text(left, 1 - 0.39 / height, below, fontsize=8, va="top", color="#404040")
        figure.legend(
            handles=handles, loc="lower center", ncols=legend_columns, frameon=False, fontsize=7.5, columnspacing=1.4,
            handlelength=2.6, borderaxespad=0.4,
        )  # fmt: skip
    return figure


def _look(variant: str) -> _Look:
    """By the place in the registry, the last resort aside; one for all that it lacks or that come
    late in it."""
    last = variants.of_rule("stock_items")
    own = [name for name in variants.NAMES if name != last]
    if variant == last:
        return _LAST_RESORT_LOOK
    place = own.index(variant) if variant in own else len(_LOOKS)
    return _LOOKS[place] if place < len(_LOOKS) else _UNKNOWN_LOOK


def _style() -> Any:
    import matplotlib

    return matplotlib.rc_context(_RC)


def _latency_limits(
    measured: Mapping[int, Timings], measurements: Sequence[Measurement]
) -> tuple[float, float]:
    """Shared by all columns: from the lowest floor to the slowest variant's best. Slower splits may
    leave the top."""
    shown = [cell.problem.floor_us() for cell in {r.cell for r in measurements}]
    for cells in measured.values():
        for splits in by_split(1, cells).values():
            shown += [timing.median for _, timing in splits["best"]]
    return min(shown) / 1.3, max(shown) * 1.35


@dataclass
class _Column:
    """One head count: three panels over the same items."""

    question: Question
    heads: int
    measurements: Sequence[Measurement]
    cells: Timings
    ranked: Ranked | None
    regrets: Mapping[tuple[int, int], float]
    sms: int | None
    latency: Axes
    ribbon: Axes
    distance: Axes

    def draw(self, limits: tuple[float, float], points: float, *, first: bool) -> None:
        """limits: of the latency axis; points: width of the column; first: the leftmost one, with
        the labels."""
        items = [r.cell.items for r in self.measurements]
        for axes in (self.latency, self.ribbon, self.distance):
            axes.set_xlim(min(items) / 1.3, max(items) * 1.3)
        self.latency.set(yscale="log", ylim=limits)
        self.latency.set_title(count(self.heads, "head"), fontsize=9, fontweight="bold", pad=13)
        if self.ranked is not None:
            requests = [r.cell.requests for r in self.measurements]
            question = self.question
            runs = policy_runs(
                self.ranked,
                self.heads,
                question.tokens,
                question.kind,
                min(requests),
                max(requests),
            )
            self._draw_changes(runs)
        else:
            runs = fastest_runs(self.cells)
        self._draw_waves()
        self._draw_floor()
        self._draw_by_split()
        self._draw_failures()
        self._draw_ribbon(runs, points / math.log10(max(items) * 1.3 / (min(items) / 1.3)))
        self._draw_distance()
        self._label(-30 / points if first else None)

    def _draw_waves(self) -> None:
        """Items that fill k waves of one CTA per item and SM, or 1/k of a wave: there a split's
        waves change, too."""
        low, high = self.latency.get_xlim()
        sms = self.sms or 0
        labels = {
            factor * sms: label for factor, label in _WAVES.items() if low < factor * sms < high
        }
        for axes in (self.latency, self.distance):
            axes.vlines(
                list(labels),
                0,
                1,
                transform=axes.get_xaxis_transform(),
                color="#D9D9D9",
                linewidth=0.7,
                zorder=0.5,
            )
        for items, label in labels.items():
            self.latency.annotate(
                label, (items, 1), (0, 2.5), xycoords=("data", "axes fraction"),
                textcoords="offset points", ha="center", va="bottom", fontsize=6.5, color="#707070",
            )  # fmt: skip

    def _draw_floor(self) -> None:
        floors = sorted(
            (cell.items, cell.problem.floor_us()) for cell in {r.cell for r in self.measurements}
        )
        items, times = zip(*floors, strict=True)
        self.latency.plot(items, times, color="#8C8C8C", linewidth=1.4, zorder=1.5)
        self.latency.fill_between(items, times, 1e-3, color="#F2F2F2", linewidth=0, zorder=0.2)

    def _draw_by_split(self) -> None:
        for variant, splits in by_split(self.heads, self.cells).items():
            color, marker, dashes = _look(variant)
            best = splits.pop("best")
            for points in splits.values() if len(splits) > 1 else ():
                items, times = [x for x, _ in points], [t.median for _, t in points]
                self.latency.plot(items, times, color=color, linewidth=0.7, alpha=0.4, zorder=2)
            items, times = [x for x, _ in best], [t.median for _, t in best]
            spread = [t.low for _, t in best], [t.high for _, t in best]
            self.latency.fill_between(
                items, *spread, color=color, alpha=0.25, linewidth=0, zorder=2.5
            )
            self.latency.plot(
                items,
                times,
                color=color,
                marker=marker,
                linestyle=dashes,
                linewidth=1.3,
                zorder=3,
                **_POINT,
            )

    def _draw_failures(self) -> None:
        """Crosses along the lower edge where a variant was tried and has no time."""
        timed = {(requests, c.variant) for requests, cell in self.cells.items() for c in cell}
        missing = {
            (r.cell.requests, r.candidate.variant)
            for r in self.measurements
            if r.status in _NO_RESULT
        } - timed
        ranks = {variant: i for i, variant in enumerate(sorted({v for _, v in missing}))}
        for requests, variant in sorted(missing):
            self.latency.plot(
                [self.heads * requests], [0.03 + 0.04 * ranks[variant]], marker="x", markersize=4, markeredgewidth=1.2,
                color=_look(variant)[0], transform=self.latency.get_xaxis_transform(), zorder=4,
            )  # fmt: skip

    def _draw_changes(self, runs: Sequence[Pick]) -> None:
        """Verticals where the policy changes its mind: strong for a variant, weak for a split."""
        for before, after in pairwise(runs):
            strong = (before.variant, before.flush) != (after.variant, after.flush)
            for axes in (self.latency, self.distance):
                axes.axvline(
                    self.heads * math.sqrt(before.last * after.first), linewidth=1.0 if strong else 0.5,
                    alpha=1 if strong else 0.6, zorder=1.8, **_CHANGE,
                )  # fmt: skip

    def _draw_ribbon(self, runs: Sequence[Pick], decade_points: float) -> None:
        """Segments in the variants' colours; a higher split is darker; named where the name
        fits."""
        edges = [self.heads * math.sqrt(a.last * b.first) for a, b in pairwise(runs)]
        if runs:
            edges = [runs[0].first * self.heads / 1.12, *edges, runs[-1].last * self.heads * 1.12]
        for run, start, end in zip(runs, edges, edges[1:], strict=False):
            color = _tint(_look(run.variant)[0], _SPLIT_STRENGTH.get(run.split or 0, 1.0))
            self.ribbon.axvspan(start, end, color=color, linewidth=0)
            self.ribbon.axvline(end, color="white", linewidth=1.0)
            split = "" if run.split is None else str(run.split)
            name = ("flush, " if run.flush else "") + run.variant + (f"/{split}" if split else "")
            names = (name, name.replace("Kda", ""), split)
            room = decade_points * math.log10(end / start) - 4
            self.ribbon.text(
                math.sqrt(start * end), 0.47, next((n for n in names if n and _text_points(n, 7) < room), ""),
                transform=self.ribbon.get_xaxis_transform(), ha="center", va="center", fontsize=7,
                color="white" if _luma(color) < 0.6 else "black",
            )  # fmt: skip

    def _draw_distance(self) -> None:
        """How much slower than the best each variant, each split and the policy's pick are, in per
        cent."""
        best = {
            self.heads * requests: min(t.median for t in cell.values())
            for requests, cell in self.cells.items()
        }
        for variant, splits in by_split(self.heads, self.cells).items():
            color, _, dashes = _look(variant)
            for split, points in splits.items():
                strong = split == "best"
                if strong or len(splits) > 2:
                    self.distance.plot(
                        [x for x, _ in points], [100 * (t.median / best[x] - 1) for x, t in points], color=color,
                        linestyle=dashes, linewidth=1.0 if strong else 0.6, alpha=1 if strong else 0.5, zorder=2,
                    )  # fmt: skip
        regrets = {h * r: value for (h, r), value in self.regrets.items() if h == self.heads}
        if not regrets:
            return
        values = list(regrets.values())
        self.distance.plot(
            list(regrets),
            [100 * value for value in values],
            markeredgewidth=0.9,
            zorder=3,
            clip_on=False,
            **_PICK,
        )
        mean = math.expm1(math.fsum(map(math.log1p, values)) / len(values))
        self.distance.text(
            0.975, 0.93, f"mean {100 * mean:.2f} %, worst {100 * max(values):.1f} %", transform=self.distance.transAxes,
            ha="right", va="top", fontsize=7, zorder=4,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5, "alpha": 0.9},
        )  # fmt: skip

    def _label(self, label_x: float | None) -> None:
        """label_x: where the labels of the y axes stand, in widths of the column; None for no
        labels."""
        from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator

        def plain(value: float, _: object) -> str:
            return f"{value:,.0f}" if value >= 1 else f"{value:g}"

        self.latency.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        self.latency.yaxis.set_minor_locator(LogLocator(subs=(1,)))
        self.latency.yaxis.set_major_formatter(FuncFormatter(plain))
        self.distance.yaxis.set_major_locator(MaxNLocator(3, steps=[1, 2, 5, 10]))
        self.distance.xaxis.set_major_formatter(FuncFormatter(plain))
        self.distance.set_xlabel("items (requests × heads)")
        self.ribbon.set(yticks=[])
        for side in self.ribbon.spines.values():
            side.set_visible(False)
        self.latency.tick_params(labelbottom=False, labelleft=label_x is not None)
        self.distance.tick_params(labelleft=label_x is not None)
        self.ribbon.xaxis.set_visible(False)
        for axes in (self.latency, self.distance):
            _draw_minor_ticks(axes)
        if label_x is not None:
            self.latency.set_ylabel("latency (µs)")
            self.distance.set_ylabel("over best (%)")
            for axes in (self.latency, self.distance):
                axes.yaxis.set_label_coords(label_x, 0.5)
            name = "policy" if self.ranked is not None else "fastest"
            self.ribbon.set_ylabel(name, rotation=0, ha="right", va="center", labelpad=4)


def _draw_minor_ticks(axes: Axes) -> None:
    """Those of the x axis, as one line of markers: ticks of matplotlib's own take half of the time
    of a figure."""
    from matplotlib import rcParams
    from matplotlib.markers import TICKDOWN
    from matplotlib.ticker import NullLocator

    low, high = axes.get_xlim()
    places = [x for x in axes.xaxis.get_minorticklocs() if low <= x <= high]
    axes.xaxis.set_minor_locator(NullLocator())
    axes.plot(
        places, [0] * len(places), color=rcParams["xtick.color"], marker=TICKDOWN, linestyle="none", clip_on=False,
        markersize=rcParams["xtick.minor.size"], markeredgewidth=rcParams["xtick.minor.width"], zorder=2.01,
        transform=axes.get_xaxis_transform(),
    )  # fmt: skip


def _tint(color: str, strength: float) -> tuple[float, float, float]:
    """A colour mixed with white."""
    red, green, blue = (int(color[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return 1 - strength * (1 - red), 1 - strength * (1 - green), 1 - strength * (1 - blue)


def _luma(color: tuple[float, float, float]) -> float:
    return 0.299 * color[0] + 0.587 * color[1] + 0.114 * color[2]


@cache
def _text_points(text: str, size: float) -> float:
    """Width of a text in points."""
    from matplotlib.textpath import TextPath

    return float(TextPath((0, 0), text, size=size).get_extents().width)


def _legend_handles(
    measurements: Iterable[Measurement], sms: int | None, policy: bool
) -> list[Any]:
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    measurements = list(measurements)
    timed = {r.candidate.variant for r in measurements if r.status == "ok"}
    handles: list[Any] = []
    for variant in [v for v in variants.NAMES if v in timed] + sorted(timed - set(variants.NAMES)):
        color, marker, dashes = _look(variant)
        handles.append(
            Line2D([], [], color=color, marker=marker, ls=dashes, lw=1.3, label=variant, **_POINT)
        )
    if any("split" in r.candidate.options for r in measurements):
        handles.append(Line2D([], [], color="#606060", lw=0.7, alpha=0.6, label="one split"))
    handles.append(Patch(color="#606060", alpha=0.3, lw=0, label="quartiles"))
    handles.append(Line2D([], [], color="#8C8C8C", lw=1.4, label="floor: bytes and one launch"))
    if sms is not None:
        handles.append(Line2D([], [], color="#C9C9C9", lw=0.9, label=f"k × {sms} SMs"))
    if policy:
        handles.append(Line2D([], [], lw=1.0, label="policy changes", **_CHANGE))
        handles.append(
            Line2D([], [], markeredgewidth=0.9, label="regret of the policy's pick", **_PICK)
        )
    if any(r.status in _NO_RESULT for r in measurements):
        handles.append(
            Line2D([], [], color="#606060", marker="x", ls="none", ms=4, label="tried, no result")
        )
    return handles
