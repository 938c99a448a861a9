"""Records -> policy: what takes each step, thresholds and schedules, and what speaks for them.

The cost of a way of choosing is the weighted sum over cells of log(time of its choice / time of the
best).

A policy comes in two forms. CHOICES decide: rows of candidates per kind, tokens and heads
(choices.py). Thresholds (ladder.py) and one variant's schedules (schedules.py) say nearly the same
in fewer constants, for an engine that has its own form of them, and serve where nothing that a row
names can run. Replay or flush: replay.py.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any

import numpy as np

from kda_kernels import variants
from kda_kernels.problem import Problem
from kdabench.data import devices, provenance
from kdabench.data.measurements import Cell, Measurement, canonical, measurement_order
from kdabench.policy import certificate, emit, replay_or_flush
from kdabench.policy.constants import (
    FITTED_KINDS,
    STEP_KINDS,
    WINDOW_KINDS,
    Options,
    Origin,
    Policy,
    policy_of,
    with_pdl,
)
from kdabench.policy.regret import (
    NOWHERE,
    Certificate,
    Evidence,
    FitError,
    Gain,
    Grid,
    Interval,
    Ints,
    Mask,
    check_comparable,
    count_statuses,
    find_cliffs,
    find_flips,
    make_grid,
    picks,
    slower_than,
    summarize,
)
from kdabench.policy.rows import Rows, agreement, find_rows
from kdabench.policy.thresholds import ladder
from kdabench.policy.thresholds.ladder import BESIDE, LADDER, Solved
from kdabench.policy.thresholds.schedules import (
    Group,
    own_schedules,
    shared_schedules,
    table_of,
    thinned,
)

VERSIONS = ("cuda", "driver", "torch", "triton", "cutlass_dsl")
_SETTLED = 0.9
_AT_ONCE = 20  # resamples whose thresholds are solved together: more take memory and save little


def fit(
    measurements: Sequence[Measurement],
    envs: Mapping[str, Mapping[str, Any]],
    *,
    weights: Mapping[int, float] | None = None,
    default_schedule: Options | None = None,
    held: Mapping[str, str] | None = None,
    in_force: ModuleType | None = None,
    held_out: Sequence[Measurement] = (),
    resamples: int = 100,
    seed: int = 0,
) -> tuple[Policy, Evidence]:
    """The policy of some records and what speaks for it. Same arguments, same result.

    envs              environments by digest, as records.load_envs gives them
    weights           request count -> how often it occurs; None weighs all cells alike
    default_schedule  default options of the variant with schedules, to compare with; they may be
                      more than were swept
    held              variants that were measured but must not be picked, and why
    in_force          the module to replace: its constants stay unless new ones win by more than
                      noise
    held_out          records of cells that take no part in the fit, for the certificate
    resamples, seed   of the bootstrap

    Raises FitError if there is nothing to fit, or if the records must not be mixed.
    """
    held = held or {}
    check_comparable(
        [
            r
            for r in (*measurements, *held_out)
            if r.cell.kind in FITTED_KINDS and r.candidate.variant not in held
        ]
    )
    grid = step_grid(measurements, weights=weights, held=held)
    if not grid.cells:
        raise FitError(
            f"no records of kind {', '.join(FITTED_KINDS)} with inputs model: nothing to fit"
        )
    origin = _origin(measurements, held_out, envs)
    parts = _solve(grid, origin.sms)
    policy = _policy(grid, parts, origin)
    module = emit.load(emit.emit(policy))
    picked = picks(grid, module.ranked)
    kept = None if in_force is None else _kept(grid, in_force, picked, resamples, seed)
    if in_force is not None and kept is not None:
        policy = policy_of(in_force, origin)
        module = emit.load(emit.emit(policy))
        picked = picks(grid, module.ranked)
    policy = replace(policy, policies=_keys(grid, module), measured=_margins(grid, picked))
    module = emit.load(emit.emit(policy))
    evidence = _evidence(grid, policy, module, picked, _ways(grid, parts, policy), default_schedule)
    generic = make_grid(
        r for r in measurements if r.cell.inputs == "generic" and r.candidate.variant not in held
    )
    intervals, unsettled = _intervals(grid, parts, origin.sms, resamples, seed)
    names = {r.candidate.variant for r in measurements}
    flushes = [r for r in measurements if r.cell.kind == "flush"]
    others = step_grid([*held_out, *flushes], held=held)
    return policy, replace(
        evidence,
        statuses=count_statuses(measurements),
        intervals=intervals.pop("stock_items"),
        other_intervals=intervals,
        unsettled=unsettled,
        flips=find_flips(grid, generic),
        held={name: why for name, why in sorted(held.items()) if name in names},
        kept=kept,
        certificate=_certificate(grid, others, policy, in_force, default_schedule, resamples, seed),
    )


def step_grid(
    measurements: Sequence[Measurement],
    *,
    weights: Mapping[int, float] | None = None,
    held: Mapping[str, str] | None = None,
) -> Grid:
    """What is fitted of some records: inputs model, of replays those with mixed pending tokens,
    nothing held back."""
    steps = (
        r
        for r in measurements
        if r.cell.kind in FITTED_KINDS
        and r.cell.inputs == "model"
        and (r.cell.kind != "replay" or r.cell.pending == replay_or_flush.PENDING)
        and r.candidate.variant not in (held or {})
    )
    return replay_or_flush.with_flush(make_grid(steps, weights), measurements)


@dataclass(frozen=True)
class _Parts:
    """What is solved apart.

    singles      variant -> [cells] the candidate that its thresholds stand for
    solved       kind -> its thresholds
    own, shared  schedules of each table's groups
    rows         what decides
    in_row       [cells] the candidate of the cell's row; NOWHERE where nothing has a time
    """

    singles: Mapping[str, Ints]
    solved: Mapping[str, Solved]
    own: Mapping[Group, int]
    shared: Mapping[Group, int]
    rows: Rows
    in_row: Ints
    fused: replay_or_flush.Fused


def _solve(grid: Grid, sms: int) -> _Parts:
    singles = ladder.singles(grid)
    solved = {kind: ladder.solve([grid], kind, singles, sms)[0] for kind in STEP_KINDS}
    rows = find_rows(grid, sms)
    in_row = np.array([_in_row(rows, cell) for cell in grid.cells])
    shared = shared_schedules(grid, solved)
    return _Parts(
        singles,
        solved,
        own_schedules(grid),
        shared,
        rows,
        in_row,
        replay_or_flush.solve(grid, in_row, sms),
    )


def _in_row(rows: Rows, cell: Cell) -> int:
    row = rows.get((cell.kind, cell.tokens), {}).get(cell.heads, {})
    return next((row[items] for items in sorted(row, reverse=True) if items <= cell.items), NOWHERE)


def _kept(grid: Grid, in_force: ModuleType, picked: Ints, resamples: int, seed: int) -> Gain | None:
    """What new picks gain over those of the module in force; None if they are to replace it."""
    for cell in grid.cells:
        first = in_force.ranked(cell.heads, cell.requests, cell.tokens, cell.kind)[0]
        if (
            not first.flush
            and (first.variant, canonical(dict(first.options))) not in grid.by_options
        ):
            return None  # it picks what was not measured, or is held back
    old = picks(grid, in_force.ranked)
    found = certificate.gain(grid, old, picked, resamples, seed)
    return None if certificate.wins(grid, old, picked, found) else found


def digest_of(measurements: Sequence[Measurement]) -> str:
    """Of what they say, however they are stored; not of what a variant refuses."""
    told = (m for m in measurements if m.status != "unsupported")
    text = "".join(m.text + "\n" for m in sorted(told, key=measurement_order))
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def _origin(
    measurements: Sequence[Measurement],
    held_out: Sequence[Measurement],
    envs: Mapping[str, Mapping[str, Any]],
) -> Origin:
    every = [*measurements, *held_out]
    used = [envs[env] for env in sorted({r.env for r in every}) if env in envs]
    if not used:
        raise FitError(
            "env: the records' environments are unknown: env.json is missing or of other records"
        )
    try:
        provenance.check_mix(used)
        provenance.check_kernels(every)
    except provenance.ProvenanceError as error:
        raise FitError(str(error)) from None
    env = used[0]
    versions = {
        name: ", ".join(sorted({str(e[name]) for e in used if e.get(name)})) for name in VERSIONS
    }
    major, minor = str(env["capability"]).split(".")
    return Origin(
        device=env["gpu"],
        slug=devices.slug(env["gpu"]),
        sms=env["sms"],
        capability=(int(major), int(minor)),
        digest=digest_of(measurements),
        ok=sum(r.status == "ok" for r in measurements),
        total=len(measurements),
        versions={name: text for name, text in versions.items() if text},
    )


def _policy(grid: Grid, parts: _Parts, origin: Origin) -> Policy:
    """All but what takes the emitted module."""
    cuts = {rule: {kind: parts.solved[kind].cuts[rule] for kind in STEP_KINDS} for rule in LADDER}
    measurement = parts.solved["record"].cuts
    steps = sorted({(kind, tokens) for kind, tokens, _, _ in parts.own if kind in WINDOW_KINDS})
    fallback = variants.of_rule("stock_items")
    last = None if fallback is None else parts.singles.get(fallback)
    return Policy(
        origin=origin,
        choices={
            step: {
                heads: {items: _taker(grid, i) for items, i in row.items()}
                for heads, row in table.items()
            }
            for step, table in parts.rows.items()
        },
        schedule=table_of(grid, parts.own, ("decode", 1)),
        spec_schedule=table_of(grid, parts.shared, ("", 0)),
        window_schedule={step: thinned(table_of(grid, parts.own, step)) for step in steps},
        fused_items=parts.fused.items,
        fused_default_items=parts.fused.default_items,
        fused_split=parts.fused.split,
        fused_ws_items=parts.fused.ws_items,
        ws_items=cuts["ws_items"],
        ws_small=measurement.get("ws_small"),
        ws_small_end=measurement.get("ws_small_end"),
        stream_items=cuts["stream_items"],
        stream_heads=measurement.get("stream_heads"),
        wide_items=cuts["wide_items"],
        stock_items=cuts["stock_items"],
        options={
            fallback or "": with_pdl({} if last is None else grid.candidates[last[0]].options)
        },
        step_options=_step_options(grid, parts),
        policies={},
    )


def _taker(grid: Grid, index: int) -> tuple[str, Options]:
    candidate = grid.candidates[index]
    return candidate.variant, with_pdl(candidate.options)


def _step_options(grid: Grid, parts: _Parts) -> dict[str, dict[tuple[str, int], Options]]:
    """Options of the variants that some threshold hands a step to, but the last resort."""
    rules = {
        variants.of_rule(rule): (rule, *BESIDE.get(rule, ()))
        for rule in LADDER
        if rule != "stock_items"
    }
    fused = variants.of_rule("fused_items")
    replayed = {
        fused: any(parts.fused.items.values()),
        variants.of_rule("fused_ws_items"): parts.fused.ws_items is not None,
    }
    found: dict[str, dict[tuple[str, int], Options]] = {}
    for variant, single in parts.singles.items():
        for cell, index in zip(grid.cells, single, strict=True):
            if cell.kind == "replay":
                taken = replayed.get(variant, False)
            else:
                taken = any(
                    parts.solved[cell.kind].cuts[rule] is not None
                    for rule in rules.get(variant, ())
                )
            if taken:
                options = (
                    parts.fused.options if variant == fused else grid.candidates[index].options
                )
                found.setdefault(variant, {})[cell.kind, cell.tokens] = with_pdl(options)
    return found


def _keys(grid: Grid, module: ModuleType) -> dict[int, dict[tuple[int, int], tuple[int, int]]]:
    """heads -> (requests, tokens) -> (row pitch, gate mode of what is picked).

    Of every count of requests that was measured anywhere: an adaptive sweep leaves out those that
    follow from others. Of kind record, where both kinds of window were measured.
    """
    found: dict[int, dict[tuple[int, int], tuple[int, int]]] = {}
    steps = {(c.heads, c.tokens, c.kind) for c in grid.cells}
    every = {c.requests for c in grid.cells}
    keys = sorted(
        (heads, requests, tokens, kind) for heads, tokens, kind in steps for requests in every
    )
    scheduled, fallback = variants.of_rule("schedule"), variants.of_rule("stock_items")
    for heads, requests, tokens, kind in keys:
        if kind == "replay" or (requests, tokens) in found.get(heads, {}):
            continue  # record sorts before spec
        own = (c for c in module.ranked(heads, requests, tokens, kind) if c.variant != fallback)
        choice = next(own, None)
        name, options = (scheduled, {}) if choice is None else (choice.variant, choice.options)
        mode = options.get("gate_mode", _default_gate_mode(name))
        found.setdefault(heads, {})[requests, tokens] = Problem("decode", 1, heads).pitch, int(mode)
    return found


def _default_gate_mode(name: str | None) -> int:
    """Of a variant's options; 0 of one that is no more, or has no such option."""
    found = variants.declared(name).options.get("gate_mode") if name in variants.NAMES else None
    return 0 if found is None else int(found.default or 0)


def _margins(grid: Grid, picked: Ints) -> dict[str, dict[int, dict[int, dict[int, float | None]]]]:
    """What Policy.measured says, of the cells where the policy has a time."""
    found: dict[str, dict[int, dict[int, dict[int, float | None]]]] = {
        kind: {} for kind in FITTED_KINDS
    }
    variants = np.array([c.variant for c in grid.candidates])
    for cell, mine, row in zip(grid.cells, picked, grid.log_us, strict=True):
        if mine == NOWHERE:
            continue
        other = float(np.fmin.reduce(row[variants != variants[mine]], initial=np.nan)) - float(
            row[mine]
        )
        margin = None if math.isnan(other) else math.exp(other)
        found[cell.kind].setdefault(cell.heads, {}).setdefault(cell.tokens, {})[cell.requests] = (
            margin
        )
    return found


def _ways(grid: Grid, parts: _Parts, policy: Policy) -> dict[str, Ints]:
    """Picks of other ways of choosing, by name."""
    own = parts.own
    ways = {
        _only_scheduled(): np.array(
            [own.get((c.kind, c.tokens, c.heads, c.requests), NOWHERE) for c in grid.cells]
        )
    }
    ways |= {f"only {variant}": single for variant, single in parts.singles.items()}
    plain = replace(policy, choices={})
    ways["thresholds and schedules"] = picks(grid, emit.load(emit.emit(plain)).ranked)
    if policy.window_schedule:
        shared = emit.load(emit.emit(replace(plain, window_schedule={})))
        ways["one window schedule"] = picks(grid, shared.ranked)
    return ways


def _only_scheduled() -> str:
    return f"only {variants.of_rule('schedule')}"


def _thresholds(grid: Grid, parts: _Parts) -> dict[tuple[str, str], int | None]:
    """(name, kind, or heads of fused_items) -> threshold, of those whose variant was measured and
    stock's."""
    found: dict[tuple[str, str], int | None] = {}
    measured = {rule: variants.of_rule(rule) in parts.singles for rule in LADDER}
    for rule in LADDER:
        if measured[rule] or rule == "stock_items":
            found |= {(rule, kind): parts.solved[kind].cuts[rule] for kind in STEP_KINDS}
    measurement = parts.solved["record"].cuts
    for rule in (rule for first, rules in BESIDE.items() if measured[first] for rule in rules):
        found[rule, "record"] = measurement.get(rule)
    if "replay" in grid.cells.kinds:
        fused = parts.fused
        found |= {("fused_items", str(heads)): items for heads, items in fused.items.items()}
        found |= {
            ("fused_default_items", "replay"): fused.default_items,
            ("fused_ws_items", "replay"): fused.ws_items,
        }
    return found


def _intervals(
    grid: Grid, parts: _Parts, sms: int, resamples: int, seed: int
) -> tuple[dict[str, dict[str, Interval | None]], tuple[tuple[Cell, float], ...]]:
    """Threshold -> kind or heads -> 90 % interval, by drawing each cell's processes anew; `never`
    counts as the largest. And the cells whose row is unsettled; see Evidence.
    """
    names = list(_thresholds(grid, parts))
    found: dict[str, dict[str, Interval | None]] = {rule: {} for rule, _ in names}
    if grid.process_us.shape[2] < 2 or resamples < 2:
        for rule, key in names:
            found[rule][key] = None
        return found, ()
    draws = grid.draws(resamples, seed)
    values: dict[tuple[str, str], list[float]] = {name: [] for name in names}
    for begin in range(0, resamples, _AT_ONCE):
        grids = [grid.resampled(draw) for draw in draws[begin : begin + _AT_ONCE]]
        of_kind = [ladder.solve(grids, kind, parts.singles, sms) for kind in STEP_KINDS]
        for again, *solved in zip(grids, *of_kind, strict=True):
            fused = replay_or_flush.solve(again, parts.in_row, sms)
            found_again = replace(
                parts, solved=dict(zip(STEP_KINDS, solved, strict=True)), fused=fused
            )
            for name, cut in _thresholds(again, found_again).items():
                values[name].append(math.inf if cut is None else cut)
    for (rule, key), cuts in values.items():
        found[rule][key] = _middle_90(sorted(cuts))
    shares = agreement(grid, draws, sms)
    return found, tuple(
        (c, float(share)) for c, share in zip(grid.cells, shares, strict=True) if share < _SETTLED
    )


def _middle_90(ranked: Sequence[float]) -> Interval:
    ends = ranked[int(0.05 * len(ranked))], ranked[math.ceil(0.95 * len(ranked)) - 1]
    low, high = (None if math.isinf(end) else int(end) for end in ends)
    return low, high


def _evidence(
    grid: Grid,
    policy: Policy,
    module: ModuleType,
    picked: Ints,
    ways: dict[str, Ints],
    default_schedule: Options | None,
) -> Evidence:
    """All but what takes more than the grid."""
    default = None if default_schedule is None else _matching(grid, default_schedule)
    if default is not None:
        ways["default schedule"] = np.full(len(grid.cells), default)
    baselines = {name: found for name, way in ways.items() if (found := summarize(grid, way))}
    if any(grid.of(variant) for variant in variants.streaming()):
        baselines |= _not_streamable(grid, module)
    singles = [name for name in baselines if name.startswith("only ")]
    regret = summarize(grid, picked)
    return Evidence(
        cells=len(grid.cells),
        without_winner=_cells(grid, np.isnan(grid.best)),
        uncovered=_cells(grid, ~np.isnan(grid.best) & (picked == NOWHERE)),
        statuses={},
        regret=regret,
        baselines=baselines,
        best_single_variant=min(
            singles,
            key=lambda n: (-baselines[n]["all"].cells, baselines[n]["all"].geomean),
            default=None,
        ),
        table_gain=regret["all"].geomean if regret else 0.0,
        entries=sum(len(row) for table in policy.choices.values() for row in table.values()),
        slower_than_default=None if default is None else slower_than(grid, picked, default),
        cliffs=find_cliffs(grid, picked, module.explain),
        intervals={},
        other_intervals={},
        flips=(),
        held={},
    )


def _not_streamable(grid: Grid, module: ModuleType) -> dict[str, Any]:
    """The regret where nothing streams, against the fastest that doesn't."""
    process_us = grid.process_us.copy()
    process_us[:, [i for variant in variants.streaming() for i in grid.of(variant)]] = np.nan
    rest = replace(grid, process_us=process_us)
    found = summarize(rest, picks(rest, lambda *key: module.ranked(*key, streamable=False)))
    return {"not streamable": found} if found else {}


def _certificate(
    grid: Grid,
    others: Grid,
    policy: Policy,
    in_force: ModuleType | None,
    default_schedule: Options | None,
    resamples: int,
    seed: int,
) -> Certificate | None:
    """Of held-out cells. Raises FitError if one was fitted, too."""
    if both := set(others.cells) & set(grid.cells):
        raise FitError(f"held out, but fitted too: {min(cell.key for cell in both)}")
    if not others.cells:
        return None
    module, plain = (emit.load(emit.emit(p)) for p in (policy, replace(policy, choices={})))
    scheduled = variants.of_rule("schedule")
    ways = {
        "thresholds and schedules": picks(others, plain.ranked),
        "nearest measured cell's fastest": certificate.nearest_winners(grid, others),
        _only_scheduled(): picks(
            others, lambda *key: [c for c in plain.ranked(*key) if c.variant == scheduled]
        ),
    }
    if in_force is not None:
        ways["policy before"] = picks(others, in_force.ranked)
    default = None if default_schedule is None else _matching(others, default_schedule)
    if default is not None:
        ways["default schedule"] = np.full(len(others.cells), default)
    return certificate.certify(others, module.ranked, ways, resamples, seed)


def _cells(grid: Grid, mask: Mask) -> tuple[Cell, ...]:
    return tuple(cell for cell, marked in zip(grid.cells, mask, strict=True) if marked)


def _matching(grid: Grid, options: Options) -> int | None:
    """The candidate that has schedules and whose every field agrees with the options."""
    for i in grid.of_rule("schedule"):
        if all(options.get(key) == value for key, value in grid.candidates[i].options.items()):
            return i
    return None
