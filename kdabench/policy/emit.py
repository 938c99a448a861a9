"""Policy -> a module, JSON, or the block of constants. The same policy and evidence give the same
bytes."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Literal

from kda_kernels import variants
from kdabench.data import devices, measurements, results
from kdabench.data.measurements import OptionValue
from kdabench.policy.constants import RULES, Options, Policy, ScheduleTable

if TYPE_CHECKING:
    from kdabench.policy.regret import Certificate, Evidence, Grid, Regret

Format = Literal["module", "json", "constants"]

_WIDTH = 100
_BY_KIND = "dict[str, int | None]"
_TYPES = {
    "fused_items": "dict[int, int | None]",
    "fused_split": "dict[int, int]",
    "ws_items": _BY_KIND,
    "stream_items": _BY_KIND,
    "wide_items": _BY_KIND,
    "stock_items": _BY_KIND,
}
_TABLE_TYPE = "dict[int, dict[int, Options]]"


def emit(policy: Policy, evidence: Evidence | None = None, format: Format = "module") -> str:
    """The text of a policy; evidence goes into a module's header."""
    if format == "json":
        return json.dumps(policy.to_json(), indent=1, sort_keys=True, allow_nan=False) + "\n"
    if format == "constants":
        return "\n".join(_constants(policy)) + "\n"
    # Not at the top: a command that emits nothing need not load it.
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("kdabench.policy", "templates")
    environment = Environment(
        loader=loader, undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False
    )
    template = environment.get_template("policy.py.j2")
    constants = "\n".join(_constants(policy))
    header = list(_header(policy, evidence))
    taker = {rule: variants.of_rule(rule) or "" for rule in variants.RULES}
    streaming = variants.streaming()
    return template.render(
        origin=policy.origin,
        header=header,
        constants=constants,
        taker=taker,
        streaming=streaming,
        names=_value(streaming),
    )


def load(text: str, name: str = "kdabench_policy") -> ModuleType:
    """A module from the text that `emit` made: what is evaluated is what is shipped."""
    module = ModuleType(name)
    exec(compile(text, f"<{name}>", "exec"), module.__dict__)
    return module


def diff(old: str, new: str, name: str = "policy.py") -> str:
    """Unified diff; empty if there is none."""
    lines = difflib.unified_diff(
        old.splitlines(keepends=True),
        new.splitlines(keepends=True),
        f"{name} (old)",
        f"{name} (new)",
    )
    return "".join(lines)


@dataclass(frozen=True)
class Stale:
    """A generated module that is not what its records give. repair: the command that makes it
    so."""

    path: Path
    diff: str
    repair: str


@dataclass(frozen=True)
class Regenerated:
    """grid: the measured steps that were fitted; previous: the text of the module before, None
    without one"""

    policy: Policy
    evidence: Evidence
    module: str
    grid: Grid
    previous: str | None


def regenerate(
    folder: Path, default_schedule: Options | None = None, fresh: bool = False
) -> Regenerated:
    """What a device's folder gives: its dispatch.jsonl, and, if there are such, what else counts:

    holdout.jsonl  held-out cells, for the certificate
    policy.py      if made from other records, and else previous.py: the module before, whose
                   constants stay unless new ones win, or `fresh`
    weights.json   request counts and weights
    held.json      variants that no policy of this device may pick, and why

    Raises RecordError or FitError (both ValueError).
    """
    from kdabench.policy.fit import (
        digest_of,
        fit,
        step_grid,
    )  # which itself evaluates emitted modules

    path, beside = (folder / f"{stem}.jsonl" for stem in (results.DISPATCH, results.HELD_OUT))
    loaded, weights = measurements.load([path]), results.weights(folder)
    kept_back = results.held(folder)
    previous = None if fresh else _previous(folder, digest_of(loaded))
    policy, evidence = fit(
        loaded,
        measurements.load_envs([path]),
        weights=weights,
        default_schedule=default_schedule,
        held=kept_back,
        in_force=None if previous is None else load(previous, "kdabench_previous"),
        held_out=measurements.load([beside]) if beside.exists() else (),
    )
    grid = step_grid(loaded, weights=weights, held=kept_back)
    return Regenerated(policy, evidence, emit(policy, evidence), grid, previous)


def previous_path(folder: Path) -> Path:
    """Where `emit` keeps the module that was in force before the records changed."""
    return folder / "previous.py"


def _previous(folder: Path, digest: str) -> str | None:
    """The text of the module before that of the records with a digest. Raises RecordError if it
    isn't one."""
    for path in (folder / "policy.py", previous_path(folder)):
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        if (
            not text.startswith("# Generated by kdabench")
            or f"# records {digest.replace(':', ' ')}," in text
        ):
            continue
        try:
            load(text).ranked  # noqa: B018
        except Exception as error:
            raise measurements.MeasurementError(
                f"{path}: not a policy module: {type(error).__name__}: {error}"
            ) from None
        return text
    return None


def module_paths(folder: Path, policies_dir: Path) -> tuple[Path, Path]:
    """Where a device's module belongs: beside its records, and where the dispatcher finds it."""
    return folder / "policy.py", policies_dir / f"{devices.module_name(folder.name)}.py"


def check(
    results_dir: Path, policies_dir: Path, default_schedule: Options | None = None
) -> list[Stale]:
    """The modules that are missing, or differ from what the records give, or whose records are
    gone.

    Raises RecordError or FitError (both ValueError) for records that can't be used.
    """
    stale = []
    expected = set()
    for folder in sorted(path.parent for path in results_dir.glob("*/dispatch.jsonl")):
        text = regenerate(folder, default_schedule).module
        for path in module_paths(folder, policies_dir):
            expected.add(path)
            old = path.read_text(encoding="utf-8") if path.exists() else ""
            if changes := diff(old, text, str(path)):
                stale.append(Stale(path, changes, f"kdabench emit {folder.name}"))
    generated = [*results_dir.glob("*/policy.py"), *policies_dir.glob("*.py")]
    for path in sorted(p for p in generated if p not in expected and p.name != "__init__.py"):
        text = path.read_text(encoding="utf-8")
        if text.startswith("# Generated by kdabench"):
            stale.append(Stale(path, diff(text, "", str(path)), f"rm {path}"))
    return stale


def _header(policy: Policy, evidence: Evidence | None) -> Iterator[str]:
    origin = policy.origin
    name = ascii(origin.device)[1:-1][:60]
    yield f"records {origin.digest.replace(':', ' ')},"
    yield f"{origin.ok} ok of {origin.total}; {name} ({origin.sms} SMs)"
    if origin.versions:
        yield ascii(", ".join(f"{key} {text}" for key, text in sorted(origin.versions.items())))[
            1:-1
        ][: _WIDTH - 2]
    if evidence is not None:
        yield f"{evidence.cells} cells, {len(evidence.without_winner)} of them without a winner"
        if evidence.held:
            yield f"measured but held back (held.json): {', '.join(evidence.held)}"
        yield f"{evidence.entries} entries of CHOICES"
        if evidence.kept is not None:
            yield f"constants of the policy before: those of these records would gain {_percent(evidence.kept.geomean)}"
        rows = [
            ("regret on the fitted cells", kind, regret) for kind, regret in evidence.regret.items()
        ]
        for name, what in _PLAINER.items():
            if plainer := evidence.baselines.get(name):
                rows.append((what, "all", plainer["all"]))
        for what, kind, regret in rows:
            yield f"{what}, {kind}: {_figures(regret)}"
    certificate = None if evidence is None else evidence.certificate
    if certificate is None:
        yield "certificate: none (no cells measured after the fit)"
    else:
        yield from _certificate(certificate)


_PLAINER = {
    "thresholds and schedules": "with thresholds and schedules in place of CHOICES",
    "one window schedule": "with SPEC_SCHEDULE for all windows, too",
}


def _certificate(certificate: Certificate) -> Iterator[str]:
    total, bounds = certificate.regret["all"], certificate.bounds
    yield f"certificate: regret on {certificate.cells} held-out cells: {_figures(total)}"
    if bounds:
        yield f"  95 % bounds: {', '.join(f'{_NAMES[name]} {_percent(bound)}' for name, bound in bounds.items())}"
    yield f"  the fastest was picked in {_percent(total.top1, 0)}; without a time: {len(certificate.uncovered)} cells"
    for kind, regret in certificate.regret.items():
        if kind != "all":
            yield f"  {kind}: {_figures(regret)}"
    for name, regret in certificate.baselines.items():
        yield f"  {name}, {regret.cells} cells: {_figures(regret)}"


_NAMES = {"geomean": "geometric mean", "p99": "p99", "max": "max"}


def _figures(regret: Regret) -> str:
    return ", ".join(f"{words} {_percent(getattr(regret, name))}" for name, words in _NAMES.items())


def _percent(value: float, digits: int = 2) -> str:
    return f"{100 * value:.{digits}f} %"


def _constants(policy: Policy) -> Iterator[str]:
    yield f"DEVICE = {_text(policy.origin.device)}"
    yield f"SMS = {policy.origin.sms}"
    yield f"CAPABILITY = {policy.origin.capability!r}"
    yield "RECORDS = " + _text(policy.origin.digest)
    yield ""
    yield from _choices(policy)
    yield ""
    yield "# Thresholds in items = heads * requests; None: never."
    for rule in RULES:
        yield from _literal(
            f"{rule.upper()}: {_TYPES.get(rule, 'int | None')} = ", getattr(policy, rule), ""
        )
    yield ""
    yield from _literal("OPTIONS: dict[str, Options] = ", policy.options, "")
    yield "# variant -> (kind, tokens) -> options, before OPTIONS"
    yield from _literal(
        "STEP_OPTIONS: dict[str, dict[tuple[str, int], Options]] = ", policy.step_options, ""
    )
    schedules = _distinct(policy)
    names = _names(schedules)
    yield ""
    for schedule, name in zip(schedules, names, strict=True):
        yield from _literal(f"{name}: Options = ", schedule, "")
    yield ""
    yield "# fmt: off"
    by_text = {_value(schedule): name for schedule, name in zip(schedules, names, strict=True)}
    for constant, table in (("SCHEDULE", policy.schedule), ("SPEC_SCHEDULE", policy.spec_schedule)):
        yield "# heads -> requests -> schedule"
        yield f"{constant}: {_TABLE_TYPE} = {{"
        yield from _rows(table, by_text, 4)
        yield "}"
    yield "# (kind, tokens) -> heads -> requests -> schedule, without the entries between two of the same schedule"
    yield f"WINDOW_SCHEDULE: dict[tuple[str, int], {_TABLE_TYPE}] = {{"
    for (kind, tokens), table in sorted(policy.window_schedule.items()):
        yield f"    ({_text(kind)}, {tokens}): {{"
        yield from _rows(table, by_text, 8)
        yield "    },"
    yield "}"
    yield "# heads -> (requests, tokens) -> (row pitch in elements, gate mode)"
    yield "POLICIES: dict[int, dict[tuple[int, int], tuple[int, int]]] = {"
    for heads, keys in sorted(policy.policies.items()):
        yield from _wrapped(
            f"{heads}: {{", (f"{key}: {value}" for key, value in sorted(keys.items())), "},", 4
        )
    yield "}"
    yield "# kind -> heads -> tokens -> requests -> time of the best other variant over that of the choice"
    yield "MEASURED: dict[str, dict[int, dict[int, dict[int, float | None]]]] = {"
    for kind, by_heads in sorted(policy.measured.items()):
        yield f'    "{kind}": {{'
        for heads, by_tokens in sorted(by_heads.items()):
            yield f"        {heads}: {{"
            for tokens, margins in sorted(by_tokens.items()):
                entries = (
                    f"{r}: {'None' if m is None else f'{m:.3f}'}"
                    for r, m in sorted(margins.items())
                )
                yield from _wrapped(f"{tokens}: {{", entries, "},", 12)
            yield "        },"
        yield "    },"
    yield "}"
    yield "# fmt: on"


def _choices(policy: Policy) -> Iterator[str]:
    takers = {
        _value(taker): taker
        for table in policy.choices.values()
        for row in table.values()
        for taker in row.values()
    }
    names = dict(zip(takers, _taker_names(list(takers.values())), strict=True))
    for text, name in sorted(names.items(), key=lambda pair: pair[1]):
        yield from _literal(f"{name}: Taker = ", takers[text], "")
    if takers:
        yield ""
    yield "# fmt: off"
    yield "# (kind, tokens) -> heads -> items from which a variant with its options takes the step"
    yield "CHOICES: dict[tuple[str, int], dict[int, dict[int, Taker]]] = {"
    for (kind, tokens), table in sorted(policy.choices.items()):
        yield f"    ({_text(kind)}, {tokens}): {{"
        for heads, row in sorted(table.items()):
            entries = (f"{items}: {names[_value(taker)]}" for items, taker in sorted(row.items()))
            yield from _wrapped(f"{heads}: {{", entries, "},", 8)
        yield "    },"
    yield "}"
    yield "# fmt: on"


def _taker_names(takers: list[tuple[str, Options]]) -> list[str]:
    """KDA_WIDE, or KDA_SPLIT_1, KDA_SPLIT_2, ... where a variant is there with several options."""
    found = [""] * len(takers)
    for variant in {variant for variant, _ in takers}:
        mine = sorted(
            (i for i, taker in enumerate(takers) if taker[0] == variant),
            key=lambda i: _value(takers[i]),
        )
        word = "".join(
            "_" + c if c.isupper() and n and variant[n - 1].islower() else c
            for n, c in enumerate(variant)
        )
        for number, i in enumerate(mine, 1):
            found[i] = (
                word.upper()
                if len(mine) == 1
                else f"{word.upper()}_{number:0{len(str(len(mine)))}}"
            )
    if len(set(found)) == len(found) and all(
        name.isidentifier() and name.isascii() for name in found
    ):
        return found
    return [f"TAKER_{i}" for i in range(len(takers))]


def _literal(head: str, value: object, tail: str, indent: int = 0) -> Iterator[str]:
    """An assignment or an entry as the formatter leaves it: one line if it fits, else an entry to a
    line."""
    line = " " * indent + head + _value(value) + tail
    if len(line) <= _WIDTH or not isinstance(value, Mapping | tuple):
        yield line
        return
    if isinstance(value, tuple):
        yield " " * indent + head + "("
        for part in value:
            yield from _literal("", part, ",", indent + 4)
        yield " " * indent + ")" + tail
        return
    yield " " * indent + head + "{"
    for key in sorted(value):
        yield from _literal(f"{_value(key)}: ", value[key], ",", indent + 4)
    yield " " * indent + "}" + tail


def _rows(table: ScheduleTable, by_text: Mapping[str, str], indent: int) -> Iterator[str]:
    for heads, row in sorted(table.items()):
        entries = (
            f"{requests}: {by_text[_value(schedule)]}" for requests, schedule in sorted(row.items())
        )
        yield from _wrapped(f"{heads}: {{", entries, "},", indent)


def _wrapped(head: str, entries: Iterable[str], tail: str, indent: int) -> Iterator[str]:
    """Entries joined by commas, in lines that hold as many as fit."""
    line = " " * indent + head
    pieces = list(entries)
    for i, entry in enumerate(pieces):
        end = tail if i == len(pieces) - 1 else ","
        if len(line) + len(entry) + len(end) + 1 > _WIDTH:
            yield line.rstrip()
            line = " " * (indent + 4)
        line += entry + (end if end == tail else ", ")
    yield line if pieces else line + tail


def _text(value: str) -> str:
    """A string literal as the formatter leaves it: in double quotes unless those need more escapes.
    ASCII."""
    body = "".join(c if c in "'\"" else ascii(c)[1:-1] for c in value)
    quote = "'" if value.count('"') > value.count("'") else '"'
    return quote + body.replace(quote, f"\\{quote}") + quote


def _value(value: object) -> str:
    """A literal on one line, keys sorted."""
    if isinstance(value, str):
        return _text(value)
    if isinstance(value, Mapping):
        return (
            "{" + ", ".join(f"{_value(key)}: {_value(value[key])}" for key in sorted(value)) + "}"
        )
    if isinstance(value, tuple):
        return f"({', '.join(map(_value, value))})"
    return repr(value)


def _distinct(policy: Policy) -> list[Options]:
    found = {
        _value(schedule): schedule
        for table in (policy.schedule, policy.spec_schedule, *policy.window_schedule.values())
        for row in table.values()
        for schedule in row.values()
    }
    return [found[text] for text in sorted(found)]


def _names(schedules: list[Options]) -> list[str]:
    """Identifiers made of the fields in which the schedules differ; numbered where that isn't
    enough."""
    fields = sorted({key for schedule in schedules for key in schedule})
    varying = [
        key for key in fields if len({_value(schedule.get(key)) for schedule in schedules}) > 1
    ]
    switches = {key for key in varying if any(s.get(key) is True for s in schedules)}
    shown = [
        [key for key in varying if key in s and not (key in switches and s[key] is False)]
        for s in schedules
    ]
    names = [
        "_".join(_word(key, s[key]) for key in keys) or "PLAIN"
        for s, keys in zip(schedules, shown, strict=True)
    ]
    if len(set(names)) == len(names) and all(
        name.isidentifier() and name.isascii() for name in names
    ):
        return names
    return [f"SCHEDULE_{i}" for i in range(len(schedules))]


def _word(key: str, value: OptionValue) -> str:
    if isinstance(value, bool):
        return key.upper() if value else f"NO_{key.upper()}"
    return f"{key.upper()}{value}" if isinstance(value, int) else value.upper()
