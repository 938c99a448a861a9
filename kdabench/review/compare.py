"""Two sessions, cell by cell: what became slower or faster, by more than noise and by more than
what matters.

A session's own bias can't be seen within it. What has the same source and environment on both sides
can't have changed, so what moved there is the sessions' doing: it is taken out of the ratios, and
widens their intervals. The statistics are described in docs/reviewing.md.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import NormalDist, fmean, median, variance
from typing import Any, Literal

from kdabench.data.measurements import Candidate, Cell, Measurement, canonical, cell_order
from kdabench.data.provenance import FIELDS
from kdabench.policy.constants import FITTED_KINDS, with_pdl

Verdict = Literal["slower", "faster", "same", "unclear"]
Mode = Literal["same", "best", "policy"]
Ranked = Callable[[int, int, int, str], Sequence[Any]]
Key = tuple[Cell, Candidate]

VERDICTS: tuple[Verdict, ...] = ("slower", "faster", "same", "unclear")
CONFIDENCE = 0.95
"""Of the intervals, which are not widened for their number."""
ONE_SIDED = 3
"""So many findings on one side and none on the other are worth a warning."""
SHIFT = 0.005
"""A session that moved what can't have changed by more than this, as a log ratio, is worth a
warning."""

# Of the recorded H200 samples the variance between processes is 2.0 (context layer) to 2.6 times
# (isolated) what the rounds let expect, and scatters about that like an estimate from 2.3 to 2.5
# degrees of freedom.
_PROCESS_FACTOR = 2.0
_PROCESS_DEGREES = 2.5
_FACTOR_WEIGHT = 10  # pairs that the factor above counts for beside those at hand
# samples that the usual spread of a context and head count counts for beside a candidate's own
_SPREAD_WEIGHT = 4
_CONTROL_CELLS = 5  # fewer unchanged cells don't tell a session's shift from their own noise


@dataclass(frozen=True)
class Side:
    """What is compared. ranked: of its policy module, or None. recorded: not a measurement of its
    own."""

    name: str
    measurements: Sequence[Measurement]
    envs: Mapping[str, Mapping[str, Any]]
    recorded: bool = False
    ranked: Ranked | None = None


@dataclass(frozen=True)
class Gates:
    """A difference counts if it exceeds both, as a part of A's time and in microseconds. error: see
    `compare`"""

    relative: float = 0.01
    absolute_us: float = 0.05
    error: float = 0.01

    def __post_init__(self) -> None:
        if (
            not 0 <= self.relative < 1
            or not 0 <= self.absolute_us < math.inf
            or not 0 < self.error < 1
        ):
            raise ValueError(
                f"gates: relative in [0, 1), absolute_us >= 0, error in (0, 1): {self}"
            )


@dataclass(frozen=True)
class Row:
    """A cell with the candidates that stand for A and B in it.

    a, b       None where a side has nothing
    a_us, b_us geometric mean over processes of their medians; None without a time
    ratio      B over A, without what the session did; interval: its 95 % confidence interval
    cycles     the same ratio in clock cycles, None where a clock is unknown
    p          that the difference does not exceed the gates, not corrected for the number of rows
    verdict    None where a time is missing: `note` says why
    unchanged  same candidate, source and environment on both sides
    lost       A has a time, and in B the candidate failed
    """

    cell: Cell
    a: Candidate | None
    b: Candidate | None
    a_us: float | None = None
    b_us: float | None = None
    ratio: float | None = None
    interval: tuple[float, float] | None = None
    cycles: float | None = None
    p: float | None = None
    verdict: Verdict | None = None
    unchanged: bool = False
    lost: bool = False
    note: str = ""


@dataclass(frozen=True)
class Session:
    """How what can't have changed moved from A to B, as log ratios.

    shift   common to all cells; error: its standard error
    spread  standard deviation from cell to cell, beyond the noise within sessions
    """

    cells: int
    shift: float
    error: float
    spread: float


@dataclass(frozen=True)
class Comparison:
    """session: None where too little is unchanged to tell. Rows are in the order of their cells."""

    a: str
    b: str
    mode: Mode
    gates: Gates
    session: Session | None
    warnings: tuple[str, ...]
    rows: tuple[Row, ...]

    def of(self, verdict: Verdict | None) -> list[Row]:
        return [row for row in self.rows if row.verdict == verdict]

    @property
    def regression(self) -> bool:
        return any(row.verdict == "slower" or row.lost for row in self.rows)

    @property
    def geomean(self) -> float | None:
        """Of the ratios."""
        ratios = [row.ratio for row in self.rows if row.ratio is not None]
        return math.exp(fmean(map(math.log, ratios))) if ratios else None

    def to_json(self) -> dict[str, Any]:
        rows = [
            {
                **asdict(row),
                **{side: None if c is None else {"variant": c.variant, "spec": c.options}
                   for side, c in (("a", row.a), ("b", row.b))},
            }
            for row in self.rows
        ]  # fmt: skip
        return {
            "a": self.a,
            "b": self.b,
            "mode": self.mode,
            "gates": asdict(self.gates),
            "correction": "Benjamini-Hochberg",
            "session": None if self.session is None else asdict(self.session),
            "warnings": list(self.warnings),
            "counts": {
                **{verdict: len(self.of(verdict)) for verdict in VERDICTS},
                "lost": sum(row.lost for row in self.rows),
                "missing": len(self.of(None)),
            },
            "geomean": self.geomean,
            "regression": self.regression,
            "rows": rows,
        }


def compare(a: Side, b: Side, mode: Mode = "same", gates: Gates | None = None) -> Comparison:
    """Judge every cell of two sides.

    mode "same" pairs equal candidates, "best" the fastest of each side, "policy" what each side's
    policy picks. Of all rows called slower or faster a share of at most `gates.error` is expected
    to be within the gates (Benjamini-Hochberg); if nothing differs, that is the chance that any row
    is called so.

    Raises ValueError if nothing is measured on both sides, or for mode "policy" without a policy.
    """
    gates = gates or Gates()
    if mode == "policy" and (a.ranked is None or b.ranked is None):
        raise ValueError("there is no policy to compare the picks of")
    differing = _differing(a, b)
    sides = _Times(a), _Times(b)
    unchanged = set[Key]() if differing else _unchanged(*sides)
    sessions = {channel: _session(sides, channel, unchanged) for channel in ("us", "cycles")}
    judged = [_judged(row, sides, sessions, gates) for row in _paired(sides, mode, unchanged)]
    if all(row.ratio is None for row in judged):
        raise ValueError(f"{a.name}, {b.name}: no cell has a time on both sides")
    rows = _decided(judged, gates)
    session = sessions["us"]
    notes = (*_sides_notes(a, b, differing), *_findings_notes(rows, session))
    return Comparison(a.name, b.name, mode, gates, session, notes, tuple(rows))


# --- samples of one side ---


@dataclass(frozen=True)
class _Channel:
    """Of a candidate in a cell, in log units: medians of its processes, number of samples of each,
    and the sum of all absolute deviations from the medians."""

    medians: tuple[float, ...]
    counts: tuple[int, ...]
    deviation: float

    @classmethod
    def of(cls, processes: Iterable[Sequence[float]]) -> _Channel:
        logs = [[math.log(value) for value in samples] for samples in processes]
        medians = tuple(median(values) for values in logs)
        deviation = sum(abs(v - m) for values, m in zip(logs, medians, strict=True) for v in values)
        return cls(medians, tuple(map(len, logs)), deviation)

    @property
    def degrees(self) -> int:
        return sum(self.counts) - len(self.counts)


@dataclass(frozen=True)
class _Estimate:
    """A log time or log cycle count, its variance, and the degrees of freedom that this has."""

    mean: float
    variance: float
    degrees: float


class _Times:
    """A side's records by cell and candidate, and what they say with which uncertainty."""

    def __init__(self, side: Side) -> None:
        self.ranked = side.ranked
        self.measurements: dict[Key, list[Measurement]] = defaultdict(list)
        self.candidates: dict[Cell, list[Candidate]] = defaultdict(list)
        for measurement in side.measurements:
            found = self.measurements[measurement.cell, measurement.candidate]
            if not found:
                self.candidates[measurement.cell].append(measurement.candidate)
            found.append(measurement)
        timed = {key: ok for key, found in self.measurements.items() if (ok := _with_time(found))}
        channels = {key: _Channel.of(r.samples_us for r in ok) for key, ok in timed.items()}
        cycles = {
            key: _Channel.of(map(_cycles, ok))
            for key, ok in timed.items()
            if all(map(_clocked, ok))
        }
        self.estimates = {"us": _estimates(channels), "cycles": _estimates(cycles)}

    def trouble(self, cell: Cell, candidate: Candidate) -> str:
        """Why there is no time."""
        found = self.measurements.get((cell, candidate))
        if found is None:
            return "not measured"
        measurement = next((r for r in found if r.status != "ok"), found[0])
        return f"{measurement.status}: {measurement.reason}"

    def estimate(self, channel: str, cell: Cell, candidate: Candidate | None) -> _Estimate | None:
        return None if candidate is None else self.estimates[channel].get((cell, candidate))

    def failed(self, cell: Cell, candidate: Candidate | None) -> bool:
        found = () if candidate is None else self.measurements.get((cell, candidate), ())
        return any(r.status not in ("ok", "unstable") for r in found)

    def best(self, cell: Cell) -> Candidate | None:
        us = self.estimates["us"]
        timed = [c for c in self.candidates.get(cell, ()) if (cell, c) in us]
        return min(timed, key=lambda c: (us[cell, c].mean, str(c)), default=None)

    def pick(self, cell: Cell) -> Candidate | None:
        """Of the policy: the first of its choices that was measured. A flush is no candidate."""
        assert self.ranked is not None
        by_options = {
            (c.variant, canonical(with_pdl(c.options))): c for c in self.candidates.get(cell, ())
        }
        for choice in self.ranked(cell.heads, cell.requests, cell.tokens, cell.kind):
            found = by_options.get((choice.variant, canonical(dict(choice.options))))
            if choice.flush or found is not None:
                return None if choice.flush else found
        return None


def _with_time(found: Sequence[Measurement]) -> list[Measurement]:
    """Those of status ok; none if the candidate failed in any process, as in a fit."""
    if any(r.status not in ("ok", "unstable") for r in found):
        return []
    return [r for r in found if r.status == "ok"]


def _clocked(measurement: Measurement) -> bool:
    return all(measurement.sm_clock_mhz)


def _cycles(measurement: Measurement) -> list[float]:
    pairs = zip(measurement.samples_us, measurement.sm_clock_mhz, strict=True)
    return [us * (mhz or math.nan) for us, mhz in pairs]


def _estimates(channels: Mapping[Key, _Channel]) -> dict[Key, _Estimate]:
    """Processes, then rounds: what the rounds of a candidate let expect of its processes' medians,
    times how much more processes scatter on this side, joined with how they scatter for this very
    candidate."""
    expected = {
        key: value for key, value in zip(channels, _expected(channels), strict=True) if value > 0
    }
    between = {
        key: variance(channels[key].medians) for key in expected if len(channels[key].medians) > 1
    }
    factor = _factor(
        [(between[key] / expected[key], len(channels[key].medians) - 1) for key in between]
    )
    found = {}
    for key, channel in channels.items():
        processes = len(channel.medians)
        degrees = _PROCESS_DEGREES + processes - 1
        of_one = math.inf
        if key in expected:
            prior = _PROCESS_DEGREES * factor * expected[key]
            of_one = (prior + (processes - 1) * between.get(key, 0.0)) / degrees
        found[key] = _Estimate(fmean(channel.medians), of_one / processes, degrees)
    return found


def _expected(channels: Mapping[Key, _Channel]) -> Iterator[float]:
    """Variance of a process's median by its rounds alone; 0 if nothing is known about them."""
    usual: dict[object, list[float]] = defaultdict(list)
    for (cell, _), channel in channels.items():
        if channel.degrees >= _SPREAD_WEIGHT:
            for group in ((cell.context, cell.heads), cell.context):
                usual[group].append(channel.deviation / channel.degrees)
    middles = {group: median(values) for group, values in usual.items()}
    for (cell, _), channel in channels.items():
        prior = middles.get((cell.context, cell.heads), middles.get(cell.context))
        weight = 0 if prior is None else _SPREAD_WEIGHT
        spread = (channel.deviation + weight * (prior or 0.0)) / max(channel.degrees + weight, 1)
        yield spread**2 * fmean(1 / count for count in channel.counts)


def _factor(ratios: Sequence[tuple[float, int]]) -> float:
    """How much more processes scatter than their rounds let expect, from (ratio of variances,
    degrees of freedom).

    By mean logarithms, after G. Smyth, "Linear models and empirical Bayes methods", 2004.
    """
    bias = _mean_log_chi2(_PROCESS_DEGREES)
    logs = [
        math.log(max(ratio, 0.01)) - _mean_log_chi2(degrees) + bias for ratio, degrees in ratios
    ]
    return math.exp(
        (sum(logs) + _FACTOR_WEIGHT * math.log(_PROCESS_FACTOR)) / (len(logs) + _FACTOR_WEIGHT)
    )


def _mean_log_chi2(degrees: float) -> float:
    """Mean logarithm of a chi-squared variable over its degrees of freedom: digamma(d/2) -
    log(d/2)."""
    x, shift = degrees / 2, 0.0
    while x < 6:
        shift -= 1 / x
        x += 1
    return (
        shift
        - 1 / (2 * x)
        - 1 / (12 * x**2)
        + 1 / (120 * x**4)
        + math.log(x)
        - math.log(degrees / 2)
    )


# --- both sides ---

_Pair = tuple["_Times", "_Times"]


def _differing(a: Side, b: Side) -> list[str]:
    """What stands in the environments and differs: `field: value in A, value in B`. A serial number
    doesn't count."""
    found = []
    envs = [
        [side.envs[digest] for digest in sorted({r.env for r in side.measurements})]
        for side in (a, b)
    ]
    for field in sorted({name for side in envs for env in side for name in env}):
        if FIELDS.get(field, "soft") == "free":
            continue
        values = [sorted({canonical(env.get(field)) for env in side}) for side in envs]
        if values[0] != values[1]:
            found.append(f"{field}: {', '.join(values[0])} in A, {', '.join(values[1])} in B")
    return found


def _unchanged(a: _Times, b: _Times) -> set[Key]:
    def codes(times: _Times, key: Key) -> set[str]:
        return {measurement.code for measurement in times.measurements[key]}

    return {
        key
        for key in a.estimates["us"].keys() & b.estimates["us"].keys()
        if codes(a, key) == codes(b, key) != {""}
    }


def _session(sides: _Pair, channel: str, unchanged: Iterable[Key]) -> Session | None:
    """What the sessions did to what can't have changed; None if there is none of it.

    Nothing real is in these differences, so the spread takes all of them, by the method of
    DerSimonian and Laird. Of few cells the shift is no surer than it is large.
    """
    a, b = (side.estimates[channel] for side in sides)
    by_cell: dict[Cell, list[float]] = defaultdict(list)
    weighted = []
    for key in unchanged:
        if key not in a or key not in b or math.isinf(a[key].variance + b[key].variance):
            continue
        difference = b[key].mean - a[key].mean
        by_cell[key[0]].append(difference)
        weighted.append((difference, 1 / (a[key].variance + b[key].variance)))
    if not by_cell:
        return None
    middles = [median(values) for values in by_cell.values()]
    shift = median(middles)
    deviation = 1.4826 * median(abs(value - shift) for value in middles)
    total = math.fsum(weight for _, weight in weighted)
    excess = (
        math.fsum(weight * (difference - shift) ** 2 for difference, weight in weighted)
        - len(weighted)
        + 1
    )
    unequal = total - math.fsum(weight**2 for _, weight in weighted) / total
    spread = math.sqrt(max(0.0, excess / unequal)) if len(weighted) > 1 else 0.0
    error = math.sqrt(math.pi / 2 / len(middles)) * deviation
    if len(middles) < _CONTROL_CELLS:
        error = math.hypot(shift, 1 / math.sqrt(total / len(weighted)))
    return Session(len(by_cell), shift, error, spread)


def _paired(sides: _Pair, mode: Mode, unchanged: set[Key]) -> Iterator[Row]:
    """Rows without a verdict, in the order of their cells."""
    a, b = sides
    for cell in sorted(a.candidates.keys() | b.candidates.keys(), key=cell_order):
        if mode == "policy" and (
            cell.kind not in FITTED_KINDS or cell.context != "layer" or cell.inputs != "model"
        ):
            continue
        for mine, other in _candidates(sides, mode, cell):
            notes = []
            for name, side, candidate in (("A", a, mine), ("B", b, other)):
                if cell not in side.candidates:
                    notes.append(f"{name}: not measured")
                elif candidate is None:
                    notes += [f"{name}: no time"] * (mode != "same")
                elif side.estimate("us", cell, candidate) is None:
                    notes.append(f"{name}: {side.trouble(cell, candidate)}")
            lost = a.estimate("us", cell, mine) is not None and (
                b.failed(cell, other) or (mode == "best" and other is None and cell in b.candidates)
            )
            same = mine == other and mine is not None and (cell, mine) in unchanged
            yield Row(cell, mine, other, unchanged=same, lost=lost, note="; ".join(notes))


def _candidates(
    sides: _Pair, mode: Mode, cell: Cell
) -> list[tuple[Candidate | None, Candidate | None]]:
    a, b = sides
    if mode == "best":
        return [(a.best(cell), b.best(cell))]
    if mode == "policy":
        return [(a.pick(cell), b.pick(cell))]
    if cell not in a.candidates or cell not in b.candidates:
        return [(None, None)]
    both = sorted(
        {*a.candidates[cell], *b.candidates[cell]}, key=lambda c: (c.variant, c.options_json)
    )
    return [(c, c) for c in both if any((cell, c) in side.estimates["us"] for side in sides)]


def _judged(row: Row, sides: _Pair, sessions: Mapping[str, Session | None], gates: Gates) -> Row:
    """With times, ratio and p; the verdict still takes no account of how many rows there are."""
    a, b = (side.estimate("us", row.cell, c) for side, c in zip(sides, (row.a, row.b), strict=True))
    a_us, b_us = (None if estimate is None else math.exp(estimate.mean) for estimate in (a, b))
    row = replace(row, a_us=a_us, b_us=b_us)
    if a is None or b is None or a_us is None:
        return row
    net = _net(a, b, sessions["us"])
    if math.isinf(net.variance):
        return replace(
            row, ratio=math.exp(net.mean), p=1.0, verdict="unclear", note="too few samples"
        )
    low, high = _interval(net)
    gate = max(gates.relative, gates.absolute_us / a_us)
    above, below = math.log1p(gate), math.log1p(-gate) if gate < 1 else -math.inf
    error = math.sqrt(net.variance)
    p = min(
        _beyond((net.mean - above) / error, net.degrees),
        _beyond((below - net.mean) / error, net.degrees),
    )
    verdict: Verdict = "same" if below < low and high < above else "unclear"
    row = replace(
        row, ratio=math.exp(net.mean), interval=(math.exp(low), math.exp(high)), p=min(1.0, 2 * p)
    )
    a, b = (
        side.estimate("cycles", row.cell, c) for side, c in zip(sides, (row.a, row.b), strict=True)
    )
    if a is None or b is None or math.isinf(a.variance + b.variance):
        return replace(row, verdict=verdict)
    cycles = _net(a, b, sessions["cycles"])
    low, high = _interval(cycles)
    confirmed = low > 0 if net.mean > 0 else high < 0
    return replace(
        row, verdict=verdict, cycles=math.exp(cycles.mean), note="" if confirmed else _UNCONFIRMED
    )


_UNCONFIRMED = "not confirmed in cycles"


def _net(a: _Estimate, b: _Estimate, session: Session | None) -> _Estimate:
    """Log of B over A, without the session's shift. Degrees of freedom after Welch."""
    within = a.variance + b.variance
    if math.isinf(within):
        return _Estimate(b.mean - a.mean, within, 1.0)
    extra = 0.0 if session is None else session.error**2 + session.spread**2
    whole = within + extra
    degrees = whole**2 / (a.variance**2 / a.degrees + b.variance**2 / b.degrees)
    return _Estimate(b.mean - a.mean - (0.0 if session is None else session.shift), whole, degrees)


def _interval(estimate: _Estimate) -> tuple[float, float]:
    half = _student(NormalDist().inv_cdf(0.5 + CONFIDENCE / 2), estimate.degrees) * math.sqrt(
        estimate.variance
    )
    return estimate.mean - half, estimate.mean + half


# Student's t and the normal z that leaves as much beyond it, after D. L. Wallace, 1959: also for
# parts of a degree of freedom, unlike measure.student, and a little too careful below five of them.


def _student(z: float, degrees: float) -> float:
    c = (8 * degrees + 3) / (8 * degrees + 1)
    return math.copysign(math.sqrt(degrees * math.expm1((c * z) ** 2 / degrees)), z)


def _beyond(t: float, degrees: float) -> float:
    """Chance of a value above t."""
    c = (8 * degrees + 1) / (8 * degrees + 3)
    z = (
        math.copysign(c * math.sqrt(degrees * math.log1p(t**2 / degrees)), t)
        if math.isfinite(t)
        else t
    )
    return math.erfc(z / math.sqrt(2)) / 2


def _decided(rows: Sequence[Row], gates: Gates) -> list[Row]:
    """With verdicts by Benjamini and Hochberg."""
    ranked = sorted(row.p for row in rows if row.p is not None)
    passed = [p for n, p in enumerate(ranked, 1) if p <= gates.error * n / len(ranked)]
    limit = passed[-1] if passed else -1.0
    return [_final(row, row.p is not None and row.p <= limit) for row in rows]


def _final(row: Row, found: bool) -> Row:
    if row.ratio is None or row.interval is None:
        return row
    unconfirmed = row.note == _UNCONFIRMED
    verdict = row.verdict
    if found:
        verdict = "unclear" if unconfirmed else "slower" if row.ratio > 1 else "faster"
    notes = [row.note] * (found and unconfirmed) + ["same source on both sides"] * (
        verdict in ("slower", "faster") and row.unchanged
    )
    return replace(row, verdict=verdict, note="; ".join(notes))


# --- warnings ---


def _sides_notes(a: Side, b: Side, differing: Iterable[str]) -> Iterator[str]:
    for name, side in (("A", a), ("B", b)):
        if side.recorded:
            yield f"{name} is a recorded run, not a measurement"
    yield from differing


def _findings_notes(rows: Iterable[Row], session: Session | None) -> Iterator[str]:
    if session is not None and abs(session.shift) > max(SHIFT, 3 * session.error):
        what = "slower" if session.shift > 0 else "faster"
        yield (
            f"the session: what is the same on both sides is {100 * abs(math.expm1(session.shift)):.1f} % {what} in B; "
            "the ratios are without that"
        )
    verdicts = [row.verdict for row in rows]
    counts = {what: verdicts.count(what) for what in ("slower", "faster")}
    for what, other in (("slower", "faster"), ("faster", "slower")):
        if counts[what] >= ONE_SIDED and not counts[other]:
            warning = f"one-sided: {counts[what]} {what}, none {other}; "
            if session is None:
                yield (
                    warning
                    + "that may be the session: nothing that is the same on both sides tells the two apart"
                )
            else:
                yield (
                    warning
                    + f"what is the same on both sides moved by {100 * math.expm1(session.shift):+.2f} %"
                )
