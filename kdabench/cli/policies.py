"""run, fit, emit, check, choose: the commands about policies."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from kdabench.cli import console, data, inputs, measuring, reviewing
from kdabench.cli.inputs import (
    OUT,
    RESULTS,
    DeviceChoice,
    Json,
    Out,
    RecordedDevice,
    Results,
    SweepFile,
)

if TYPE_CHECKING:
    from kdabench.data.measurements import Measurement
    from kdabench.data.sweep import Sweep
    from kdabench.measure.session import Summary
    from kdabench.policy.constants import Policy
    from kdabench.policy.emit import Regenerated
    from kdabench.policy.regret import Evidence, Gain


def run(
    file: SweepFile,
    device: DeviceChoice = "auto",
    budget: measuring.Budget = None,
    out: Out = OUT,
    results: Results = RESULTS,
    as_json: Json = False,
) -> None:
    """Sweep, fit, write the policy, plot and report, in one go.

    Everything goes to OUT/<sweep>: policy.py, plots, regret.txt and report.html. Without a GPU the recorded
    samples are run on, and every output says so. Nothing in the recorded results changes; that takes export and
    emit.

    \b
    Examples:
      kdabench run sweeps/dispatch.toml
      kdabench run sweeps/quick.toml --budget 300
      kdabench run sweeps/dispatch.toml --device recorded:nvidia-h200
    """
    from kdabench.measure.journal import Journal
    from kdabench.policy.emit import held as held_back

    inputs.require_sweep_file(file)
    target = inputs.find_device(device, results)
    plan = inputs.load_sweep(file, target.sms)
    summary = measuring.run(
        plan, target, device, out=out, results=results, budget=budget, as_json=as_json
    )
    if summary.interrupted:
        measuring.finish(summary)
    with Journal.read(summary.journal) as journal:
        envs = journal.envs()
    folder = out / plan.stem
    inputs.require_writable(folder)
    with console.user_input():
        held = held_back(results / target.slug)
    outcome = _fitted(summary, envs, held)
    written = _write(outcome, plan, summary, target, folder)
    fitted = (
        None
        if outcome.policy is None or outcome.evidence is None
        else (outcome.policy, outcome.evidence)
    )
    page = reviewing.of_run(
        plan, summary, target, envs, fitted or str(outcome.why_not), written, results
    )
    written.append(folder / "report.html")
    reviewing.write(page, written[-1])
    if as_json:
        console.emit_json(
            {
                **measuring.summary_json(summary, target),
                "policy": None if outcome.policy is None else outcome.policy.to_json(),
                "evidence": None if outcome.evidence is None else outcome.evidence.to_json(),
                "why_no_policy": outcome.why_not,
                "written": [str(path) for path in written],
            }
        )
    else:
        console.line()
        console.write((folder / "regret.txt").read_text(encoding="utf-8"))
        console.line()
        for path in written:
            console.line(console.relative(path))
    measuring.finish(summary)


@dataclass(frozen=True)
class _Outcome:
    """A fit, or why there is none."""

    policy: Policy | None = None
    evidence: Evidence | None = None
    why_not: str | None = None


def _fitted(
    summary: Summary, envs: Mapping[str, Mapping[str, Any]], held: Mapping[str, str]
) -> _Outcome:
    from kdabench.policy.fit import fit
    from kdabench.policy.regret import FitError

    try:
        return _Outcome(
            *fit(summary.measurements, envs, default_schedule=inputs.default_schedule(), held=held)
        )
    except FitError as error:
        return _Outcome(why_not=str(error))


def _certifying(results: Path) -> dict[str, Any] | None:
    """The default schedule where a module's header compares with it: beside held-out cells. Else
    nothing is loaded."""
    from kdabench.policy.emit import HELD_OUT

    return inputs.default_schedule() if any(results.glob(f"*/{HELD_OUT}")) else None


def _write(
    outcome: _Outcome, plan: Sweep, summary: Summary, target: inputs.Device, folder: Path
) -> list[Path]:
    """Policy, report and plots of a run; a recorded run is labelled in each."""
    from kdabench.cli import evidence
    from kdabench.policy import emit

    written = []
    module = None
    label = "RECORDED RUN of " if summary.recorded else ""
    title = f"{label}{plan.stem} on {target.name}"
    report = f"{title}\n{plan.question}\n{measuring.outcome(summary)}\n\n"
    if outcome.policy is not None and outcome.evidence is not None:
        text = emit.emit(outcome.policy, outcome.evidence)
        if summary.recorded:
            text = f"# Recorded run, in {console.relative(folder)}: nothing was measured, not for use.\n{text}"
        module = emit.load(text)
        written.append(folder / "policy.py")
        emit.write_atomic(written[-1], text)
        report += evidence.text(outcome.policy, outcome.evidence) + _checks(
            outcome.policy, outcome.evidence
        )
    else:
        report += f"No policy: {outcome.why_not}\n"
    written.append(folder / "regret.txt")
    emit.write_atomic(written[-1], report)
    if summary.measurements:
        written += data.write_plots(
            summary.measurements,
            folder / "plots",
            name=target.name,
            sms=target.sms,
            policy=module,
            recorded=summary.recorded,
            held=() if outcome.evidence is None else tuple(outcome.evidence.held),
        )
    return written


def fit(
    source: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE...",
            help="A recorded device, or files of records (.jsonl) or a journal (.db).",
        ),
    ],
    results: Results = RESULTS,
    as_json: Json = False,
) -> None:
    """Fit the thresholds and schedules; print regret and confidence.

    Of a device its dispatch.jsonl is fitted, the records that its policy is made from, without the variants that its
    held.json keeps back. Files are fitted with all their variants. Nothing is written.

    \b
    Examples:
      kdabench fit nvidia-h200
      kdabench fit out/dispatch.db
      kdabench fit results/nvidia-h200/dispatch.jsonl --json
    """
    from kdabench.cli import evidence
    from kdabench.policy import emit
    from kdabench.policy import fit as fits

    default = inputs.default_schedule()
    with console.user_input():
        if len(source) == 1 and not Path(source[0]).suffix:
            from kdabench.data import devices

            found = emit.regenerate(devices.results_folder(results, source[0]), default)
            policy, facts = found.policy, found.evidence
        else:
            policy, facts = fits.fit(*_files(source), default_schedule=default)
    if as_json:
        console.emit_json({"policy": policy.to_json(), "evidence": facts.to_json()})
    else:
        console.line(f"{policy.origin.device}, {policy.origin.sms} SMs, {policy.origin.digest}")
        console.write(evidence.text(policy, facts) + _checks(policy, facts))


def _checks(policy: Policy, facts: Evidence) -> str:
    """Rules that evidence.text leaves out, and what a policy must not do: lose to the default, jump
    over a cliff."""
    return "".join(f"{line}\n" for line in (*_other_rules(policy, facts), *_guards(facts)))


def _other_rules(policy: Policy, facts: Evidence) -> Iterator[str]:
    rows = [row for table in policy.window_schedule.values() for row in table.values()]
    distinct = {tuple(sorted(options.items())) for row in rows for options in row.values()}
    tables = f"{len(policy.window_schedule)} tables, {sum(map(len, rows))} entries"
    yield f"WINDOW_SCHEDULE: {tables}, {len(distinct)} different schedules"
    for rule, by_key in facts.other_intervals.items():
        constant = getattr(policy, rule)
        for key, interval in by_key.items():
            table = isinstance(constant, Mapping)
            value = constant.get(int(key) if key.isdecimal() else key) if table else constant
            ends = None if interval is None else [_items(end) for end in interval]
            span = "no interval" if ends is None else f"90 % interval: {' to '.join(ends)}"
            yield f"{rule.upper()}{f'[{key}]' if table else ''}: {_items(value)} ({span})"


def _items(value: int | None) -> str:
    return "never" if value is None else str(value)


_SHOWN = 10


def _guards(facts: Evidence) -> Iterator[str]:
    from kdabench.cli.evidence import cell_name

    slower = facts.slower_than_default
    if slower is None:
        yield "Against the default schedule: not checked, it was not measured"
    else:
        yield f"Slower than the default schedule: {len(slower)} cells"
        worst = sorted(slower, key=lambda found: -found[1])
        yield from (f"  {cell_name(cell)}: {100 * lost:.1f} %" for cell, lost in worst[:_SHOWN])
    yield f"Cliffs, slower than with more requests though it could be avoided: {len(facts.cliffs)}"
    for cliff in sorted(facts.cliffs, key=lambda found: -found.lost)[:_SHOWN]:
        than = f"{100 * cliff.lost:.1f} % slower than with {cliff.faster.requests} requests"
        yield f"  {cell_name(cliff.cell)}: {than}, by {cliff.rule}"


def _files(source: list[str]) -> tuple[list[Measurement], Mapping[str, Mapping[str, Any]]]:
    from kdabench.data import measurements
    from kdabench.measure.journal import Journal

    paths = [Path(name) for name in source]
    if len(paths) == 1 and paths[0].suffix == ".db":
        with Journal.read(paths[0]) as journal:
            return journal.measurements(), journal.envs()
    for path in paths:
        if path.suffix != ".jsonl":
            raise ValueError(
                f"{path}: one recorded device, one journal (.db), or files of records (.jsonl)"
            )
    return measurements.load(paths), measurements.load_envs(paths)


def _policies_folder() -> Path:
    """Where the dispatcher looks for generated modules."""
    import importlib.util

    options = importlib.util.find_spec("kda_kernels")
    assert options is not None
    assert options.origin is not None
    return Path(options.origin).parent / "policies"


def emit(
    device: RecordedDevice,
    form: Annotated[
        str | None,
        typer.Option(
            "--format", metavar="FORMAT", help="Print as json, constants or module; write nothing."
        ),
    ] = None,
    diff: Annotated[
        bool,
        typer.Option(
            "--diff",
            help="Print what would change, cell by cell, then line by line; write nothing.",
        ),
    ] = False,
    fresh: Annotated[
        bool,
        typer.Option(
            "--fresh",
            help="Forget the policy before: take new constants even if they gain nothing.",
        ),
    ] = False,
    results: Results = RESULTS,
) -> None:
    """Write a device's policy module from its records.

    It goes to RESULTS/<device>/policy.py and to kda_kernels/policies, where the dispatcher finds it. Same records, same
    bytes. A module of other records becomes RESULTS/<device>/previous.py: its constants stay in force unless new ones
    gain over 0.1 % and over 3 standard errors.

    \b
    Examples:
      kdabench emit nvidia-h200
      kdabench emit nvidia-h200 --diff
      kdabench emit nvidia-h200 --format constants
    """
    from kdabench.cli import evidence
    from kdabench.data import devices
    from kdabench.policy import emit as emitting

    forms: dict[str, Literal["module", "json", "constants"]] = {
        "module": "module",
        "json": "json",
        "constants": "constants",
    }
    if form is not None and form not in forms:
        console.fail(f"--format: {form!r}: one of {', '.join(forms)}")
    with console.user_input():
        folder = devices.results_folder(results, device)
        found = emitting.regenerate(folder, _certifying(results), fresh)
    if form is not None:
        console.write(emitting.emit(found.policy, found.evidence, forms[form]))
        return
    paths = emitting.module_paths(folder, _policies_folder())
    texts = [path.read_text(encoding="utf-8") if path.exists() else "" for path in paths]
    if diff:
        if texts[0] and texts[0] != found.module:
            console.write(_changes(texts[0], found))
        for path, old in zip(paths, texts, strict=True):
            console.write(emitting.diff(old, found.module, console.relative(path)))
        return
    if found.previous is None:
        emitting.previous_path(folder).unlink(missing_ok=True)
    else:
        emitting.write_atomic(emitting.previous_path(folder), found.previous)
    for path, old in zip(paths, texts, strict=True):
        if old == found.module:
            console.line(f"{console.relative(path)}: as it was")
        else:
            emitting.write_atomic(path, found.module)
            console.line(f"{console.relative(path)}: written")
    if found.evidence.certificate is not None:
        console.write("\n" + evidence.markdown(found.evidence.certificate))


def _changes(old: str, found: Regenerated) -> str:
    """Cells whose choice changes, and what that gains, for a reviewer."""
    from kdabench.cli.evidence import cell_name
    from kdabench.policy import certificate, regret
    from kdabench.policy import emit as emitting

    try:
        before, after = (emitting.load(text).ranked for text in (old, found.module))
    except Exception as error:
        return f"the module in place can't be loaded: {type(error).__name__}: {error}\n"
    changed = certificate.changes(found.grid, before, after)
    old_picks, new_picks = (regret.picks(found.grid, ranked) for ranked in (before, after))
    whole = certificate.gain(found.grid, old_picks, new_picks, resamples=200, seed=0)
    rows = [
        (
            cell_name(c.cell),
            c.old,
            c.new,
            "-" if c.gain is None else _percent(c.gain.geomean),
            _interval(c.gain),
        )
        for c in changed
    ]
    text = f"{len(changed)} of {len(found.grid.cells)} cells change; "
    text += f"gain over all: {_percent(whole.geomean)} % ({_interval(whole)})\n"
    headings = ("cell", "old", "new", "gain %", "90 % interval")
    return text + (console.table(headings, rows, right=(3,)) if rows else "")


def _percent(value: float) -> str:
    return f"{100 * value:.2f}"


def _interval(gain: Gain | None) -> str:
    return "not measured" if gain is None else f"{_percent(gain.low)} to {_percent(gain.high)}"


def check(results: Results = RESULTS, as_json: Json = False) -> None:
    """Compare every generated module with what its records give.

    Exit status 1 if one is stale; the differences and the command that repairs them are printed.

    \b
    Examples:
      kdabench check
      kdabench check --json
    """
    from kdabench.data import devices
    from kdabench.policy import emit as emitting

    with console.user_input():
        stale = emitting.check(results, _policies_folder(), _certifying(results))
    if as_json:
        console.emit_json(
            [{"path": str(s.path), "diff": s.diff, "repair": s.repair} for s in stale]
        )
    else:
        for module in stale:
            console.write(module.diff)
        for module in stale:
            console.line(f"stale: {console.relative(module.path)}; repair: {module.repair}")
        if not stale:
            recorded = devices.recorded(results)
            console.line(
                f"{len(recorded)} recorded device{'s' * (len(recorded) != 1)}: all generated modules current"
            )
    if stale:
        raise typer.Exit(console.FINDING)


def choose(
    heads: Annotated[int, typer.Option(help="KDA heads on the GPU.")],
    requests: Annotated[int, typer.Option(help="Requests in the batch.")],
    tokens: Annotated[int, typer.Option(help="Tokens per request.")] = 1,
    kind: Annotated[
        str | None,
        typer.Option(help="decode, spec, record or replay; decode for 1 token, else record."),
    ] = None,
    device: Annotated[
        str, typer.Option(metavar="DEVICE", help="A recorded device.")
    ] = "nvidia-h200",
    streamable: Annotated[
        bool, typer.Option(help="Whether the streaming variants may be picked.")
    ] = True,
    results: Results = RESULTS,
    as_json: Json = False,
) -> None:
    """Print what a device's policy picks for a step, and why.

    \b
    Examples:
      kdabench choose --heads 24 --requests 8
      kdabench choose --heads 24 --requests 8 --tokens 4 --kind record
      kdabench choose --heads 12 --requests 64 --tokens 8 --kind replay --json
    """
    module = inputs.load_policy(results / device / "policy.py")
    kind = kind or ("decode" if tokens == 1 else "record")
    with console.user_input():
        why = module.explain(heads, requests, tokens, kind, streamable=streamable)
    choice = why.choice
    if as_json:
        console.emit_json(
            {
                "variant": choice.variant,
                "options": dict(choice.options),
                "flush": choice.flush,
                "rule": why.rule,
                "margin": why.margin,
                "place": why.place,
                "note": why.note,
            }
        )
        return
    options = ", ".join(f"{name}={value}" for name, value in choice.options.items())
    console.line(f"{'flush, then ' if choice.flush else ''}{choice.variant}({options})")
    console.line(f"rule    {why.rule}")
    console.line(f"margin  {_margin(why.margin)}")
    console.line(f"place   {why.note}")


def _margin(ratio: float | None) -> str:
    if ratio is None:
        return "not measured against another variant here"
    percent = 100 * (ratio - 1)
    return (
        f"{abs(percent):.1f} % {'faster' if percent >= 0 else 'slower'} than the best other variant"
    )


COMMANDS: dict[str, Callable[..., None]] = {
    "run": run,
    "fit": fit,
    "emit": emit,
    "check": check,
    "choose": choose,
}
