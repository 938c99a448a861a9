"""sweep, verify, compile, doctor: the commands about machines and kernels."""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kdabench.cli import console, inputs
from kdabench.cli.inputs import OUT, RESULTS, DeviceChoice, Json, Out, Results, SweepFile

if TYPE_CHECKING:
    from kdabench.data.measurements import Cell
    from kdabench.data.sweep import Sweep
    from kdabench.measure.queue import Course
    from kdabench.measure.session import Summary

Budget = Annotated[
    float | None,
    typer.Option(
        "--budget", metavar="SECONDS", min=1, help="Begin no cell after this many seconds."
    ),
]
CellSeconds = Annotated[
    float | None,
    typer.Option(
        "--cell-seconds",
        metavar="SECONDS",
        min=0.01,
        help="Begin no further round of a cell after this much time in a process (1); five rounds there are always.",
    ),
]
Share = Annotated[
    str,
    typer.Option(
        "--share",
        metavar="K/N",
        help="Only every N-th cell from the K-th on; join the journals with merge.",
    ),
]
Adaptive = Annotated[
    bool,
    typer.Option(
        "--adaptive",
        help="Only the cells a policy depends on, those first where it could lose most; shares are of rows.",
    ),
]
Target = Annotated[
    float | None,
    typer.Option(
        "--target",
        metavar="PERCENT",
        min=0,
        help="With --adaptive: leave out where less than this can be lost (0.5).",
    ),
]
Cells = Annotated[
    int | None,
    typer.Option("--cells", metavar="N", min=1, help="With --adaptive: choose at most N cells."),
]
Variants = Annotated[
    list[str] | None,
    typer.Option(
        "--variant", metavar="NAME", help="Only this variant; may be given several times."
    ),
]


def sweep(
    file: SweepFile,
    device: DeviceChoice = "auto",
    budget: Budget = None,
    cell_seconds: CellSeconds = None,
    share: Share = "1/1",
    adaptive: Adaptive = False,
    target: Target = None,
    cells: Cells = None,
    retry: Annotated[
        bool, typer.Option("--retry", help="Measure again the cells in which a candidate failed.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Count cells and estimate the time; measure none.")
    ] = False,
    out: Out = OUT,
    results: Results = RESULTS,
    as_json: Json = False,
) -> None:
    """Measure a sweep; a recorded run where no GPU is.

    Every finished round is kept in OUT/<sweep>.db. Stop at any time: the same command goes on where it stopped.
    Without --adaptive it adds what an adaptive sweep left out. Exit status 1 if a cell has no result at all.

    \b
    Examples:
      kdabench sweep sweeps/quick.toml
      kdabench sweep sweeps/dispatch.toml --dry-run
      kdabench sweep sweeps/dispatch.toml --adaptive --budget 600
      kdabench sweep sweeps/quick.toml --device recorded:nvidia-h200
      kdabench sweep sweeps/dispatch.toml --device cuda:1 --share 2/2 --out out/second
    """
    inputs.require_sweep_file(file)
    part = parse_share(share)
    for option, value in (("--target", target), ("--cells", cells)):
        if value is not None and not adaptive:
            console.fail(f"{option}: needs --adaptive")
    most_lost = _target(adaptive, target)
    where = inputs.find_device(device, results)
    plan = inputs.load_sweep(file, where.sms)
    if dry_run:
        _estimate(plan, where, adaptive, as_json, cells)
        return
    summary = run(
        plan, where, device, out=out, results=results, budget=budget, as_json=as_json, share=part, retry=retry,
        cell_seconds=cell_seconds, most_lost=most_lost, most_cells=cells,
    )  # fmt: skip
    if summary.stopped_by is not None:
        finish(summary)
    if as_json:
        console.emit_json(summary_json(summary, where))
    else:
        console.line(outcome(summary))
        if summary.done == summary.total and not summary.recorded:
            console.line(f"keep it: kdabench export {console.relative(file)}")
    finish(summary)


def run(
    plan: Sweep,
    target: inputs.Device,
    asked: str,
    *,
    out: Path,
    results: Path,
    budget: float | None,
    as_json: bool,
    share: tuple[int, int] = (1, 1),
    retry: bool = False,
    cell_seconds: float | None = None,
    most_lost: float | None = None,
    most_cells: int | None = None,
) -> Summary:
    """Sweep with progress on stderr; the first line says what it measures or runs on.

    most_lost   target of an adaptive sweep, as a ratio; None measures every cell
    most_cells  that it chooses; None: as many as the target asks for
    """
    from kdabench.measure import session, sources
    from kdabench.measure.contest import Plan
    from kdabench.measure.queue import every_cell

    first = inputs.headline(target, asked, results)
    if as_json:
        console.note(first)
    else:
        console.line(first)
    inputs.require_writable(out)
    runner = sources.runner(target.source)
    with (
        console.user_input(),
        console.progress() as listener,
        runner.open_journal(plan, out) as journal,
    ):
        begun = session.reopen_failed(plan, journal) if retry else ()
        return session.run_sweep(
            plan,
            runner,
            journal,
            every_cell(plan, share)
            if most_lost is None
            else _course(plan, share, begun, most_lost, most_cells),
            plan=None if cell_seconds is None else Plan(seconds=cell_seconds),
            budget_s=budget,
            listener=listener,
        )


def _course(
    plan: Sweep,
    share: tuple[int, int],
    begun: Collection[Cell],
    target: float,
    most_cells: int | None,
) -> Course:
    """Of an adaptive sweep, over its share of the rows."""
    from kdabench.policy.adaptive import Course, part

    cells = part(plan.cells, *share)
    return Course(cells, plan.candidates, plan.processes, begun, target, most_cells)


def parse_share(text: str) -> tuple[int, int]:
    """(k, n) of "k/n" with 1 <= k <= n. Ends the command for anything else."""
    number, _, of = text.partition("/")
    if not (number.isdecimal() and of.isdecimal() and 1 <= int(number) <= int(of)):
        console.fail(f"--share: {text!r}: K/N with 1 <= K <= N, such as 2/4")
    return int(number), int(of)


def _target(adaptive: bool, percent: float | None) -> float | None:
    """As run_sweep takes it."""
    if not adaptive:
        return None
    from kdabench.policy.adaptive import TARGET

    return TARGET if percent is None else percent / 100


def outcome(summary: Summary) -> str:
    state = "" if summary.done == summary.total else "unfinished: "
    what = "run on recorded samples" if summary.recorded else "measured"
    return (
        f"{state}{summary.done} of {summary.total} cells and processes {what}, "
        f"{len(summary.measurements)} records in {console.relative(summary.journal)}{_false_alarms(summary)}"
    )


def _false_alarms(summary: Summary) -> str:
    judged = sum(summary.twins.values())
    wrong = judged - summary.twins.get("same", 0)
    return (
        f"; {wrong} of {judged} found their best candidate different from itself" if judged else ""
    )


def finish(summary: Summary) -> None:
    """End the command with what a sweep's summary calls for, or return if all is well."""
    if summary.without_winner:
        first, more = cell_name(summary.without_winner[0]), len(summary.without_winner) - 1
        others = f" and {more} more" if more else ""
        console.error_line(
            f"no variant has a result in {first}{others}; the reasons: kdabench show {summary.journal}"
        )
    if summary.stopped_by is not None:
        console.error_line(
            f"interrupted: {summary.done} of {summary.total} are kept; the same command goes on"
        )
        raise typer.Exit(console.SIGNALLED + summary.stopped_by)
    if summary.without_winner:
        raise typer.Exit(console.FINDING)


def cell_name(cell: Cell) -> str:
    text = f"{cell.kind} heads={cell.heads} requests={cell.requests} tokens={cell.tokens}"
    return text + (f" context={cell.context}" if cell.context != "layer" else "")


def _estimate(
    plan: Sweep, target: inputs.Device, adaptive: bool, as_json: bool, most_cells: int | None
) -> None:
    from kdabench.measure import session
    from kdabench.policy.adaptive import first_cells, rows_of

    cells, candidates, seconds = session.dry_run(plan, target.source)
    first = sum(len(first_cells(row)) for row in rows_of(plan.cells)) if adaptive else cells
    if most_cells is not None and most_cells < cells:
        most = max(first, most_cells)
        cells, seconds = most, seconds * most / cells
    if as_json:
        console.emit_json(
            {
                "device": str(target.source),
                "cells": cells,
                "first_cells": first,
                "candidates": candidates,
                "processes": plan.processes,
                "seconds": seconds,
            }
        )
        return
    count = f"{first} cells at first, at most {cells}," if adaptive else f"{cells} cells"
    console.line(
        f"{count} x {candidates} candidates x {plan.processes} processes on {target.source}"
    )
    console.line(f"{'at most ' if adaptive else ''}about {console.duration(seconds)}")


def summary_json(summary: Summary, target: inputs.Device) -> dict[str, Any]:
    return {
        "device": str(target.source),
        "recorded": summary.recorded,
        "journal": str(summary.journal),
        "done": summary.done,
        "total": summary.total,
        "records": len(summary.measurements),
        "interrupted": summary.interrupted,
        "twins": dict(summary.twins),
        "without_winner": [asdict(cell) for cell in summary.without_winner],
    }


def chosen_variants(names: list[str] | None) -> list[str]:
    from kda_kernels import variants

    for name in names or ():
        if name not in variants.NAMES:
            console.fail(f"--variant: {name!r}: one of {', '.join(variants.NAMES)}")
    return list(dict.fromkeys(names)) if names else list(variants.NAMES)


def verify(variant: Variants = None, results: Results = RESULTS, as_json: Json = False) -> None:
    """Check every variant against the reference, on the GPU.

    Writes RESULTS/<device>/verified.json with the digests of the binaries that were right. Exit status 1 if a case
    fails, or if a variant declares a kind that no case of it is of.

    \b
    Examples:
      kdabench verify
      kdabench verify --variant KdaSplit
    """
    from kdabench.checks import verify as checks
    from kdabench.data.devices import Recorded
    from kdabench.measure import sources

    names = chosen_variants(variant)
    with console.user_input():
        if isinstance(sources.find("auto", results), Recorded):
            raise ValueError(
                "verify needs an NVIDIA GPU, and this machine has none that torch can use"
            )
    target = inputs.find_device("cuda", results)
    inputs.require_writable(results / target.slug)
    rows = checks.run(names, listener=_report_failure)
    path = results / target.slug / "verified.json"
    checks.save(rows, path, _environment())
    counts = []
    for name in names:
        ours = [row for row in rows if row.case.variant == name]
        failed = sum(row.failed for row in ours)
        passed = sum(row.verdict is None for row in ours)
        counts.append(
            {
                "variant": name,
                "passed": passed,
                "unsupported": len(ours) - passed - failed,
                "failed": failed,
            }
        )
    if as_json:
        console.emit_json({"device": target.name, "file": str(path), "variants": counts})
    else:
        console.show_table(
            tuple(counts[0]), [tuple(row.values()) for row in counts], right=(1, 2, 3)
        )
        console.line(f"written: {console.relative(path)}")
    unseen = checks.unverified(rows)
    for text in unseen:
        console.error_line(text)
    if unseen or any(row.failed for row in rows):
        raise typer.Exit(console.FINDING)


def _report_failure(row: Any) -> None:
    if row.failed:
        console.note(f"{_case_name(row.case)}: {row.verdict}")


def _environment() -> dict[str, Any]:
    from kdabench.measure import cell_bench
    from kdabench.measure.environment import describe
    from kdabench.measure.telemetry import Telemetry

    device = cell_bench.Device.current()
    return describe(device.name, device.uuid, Telemetry(device.uuid, device.pci_id))


def _case_name(case: Any) -> str:
    choices = ", ".join(f"{key}={value}" for key, value in case.options)
    problem = case.problem
    return f"{case.variant}({choices}) {problem.kind} q={problem.tokens} {problem.state_dtype}"


def compile_kernels(
    variant: Variants = None,
    arch: Annotated[
        list[str] | None,
        typer.Option(
            "--arch", metavar="ARCH", help="Target, such as sm_100a; may be given several times."
        ),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Processes; as many as cores by default.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Cross-compile all kernels and report what they take.

    The standard grid of every variant: registers, spills, shared memory, occupancy. Needs no GPU. Compiled kernels stay
    in the cache that measuring uses. Exit status 1 if one fails to compile or spills.

    \b
    Examples:
      kdabench compile
      kdabench compile --variant KdaSplit --arch sm_90a --arch sm_100a
      kdabench compile --json
    """
    import os

    from kda_kernels import build, variants
    from kda_kernels.device.gpu import ARCHS

    archs = arch or ["sm_90a"]
    for name in archs:
        if name not in ARCHS:
            console.fail(f"--arch: {name!r}: one of {', '.join(ARCHS)}")
    names = [name for name in chosen_variants(variant) if variants.declared(name).binaries]
    rows = build.compile_grid(names, archs, jobs or os.cpu_count() or 1, progress("kernels"))
    if as_json:
        console.emit_json([_row_json(row) for row in rows])
    else:
        console.show_table(_HEADINGS, [_row_cells(row) for row in rows], right=range(4, 11))
    failed = [row for row in rows if row.failed]
    for row in failed:
        what = row.reason or f"spills: {row.stack_bytes} bytes of stack"
        console.error_line(f"{_case_name(row.case)} {row.arch}: {what}")
    if failed:
        raise typer.Exit(console.FINDING)


def progress(what: str) -> Callable[[object, int], None]:
    """A listener that counts what is done of how many, on a terminal."""
    done = 0

    def tick(row: object, total: int) -> None:
        nonlocal done
        done += 1
        if sys.stderr.isatty():
            print(
                f"\r{done}/{total} {what}",
                end="\n" if done == total else "",
                file=sys.stderr,
                flush=True,
            )

    return tick


_HEADINGS = (
    *("variant", "choices", "problem", "arch"),
    *("registers", "stack", "smem", "threads", "cluster", "CTAs/SM", "compile s"),
)


def _row_cells(row: Any) -> tuple[object, ...]:
    problem = row.case.problem
    name = (row.case.variant, " ".join(f"{k}={v}" for k, v in row.case.options),
            f"{problem.kind} q={problem.tokens} {problem.state_dtype}", row.arch)  # fmt: skip
    if row.reason is not None:
        return (*name, *["-"] * 6, row.reason.split(":")[0])
    return (*name, row.registers, row.stack_bytes, row.smem_bytes, row.threads, row.cluster, row.ctas_per_sm,
            f"{row.compile_s:.1f}")  # fmt: skip


def _row_json(row: Any) -> dict[str, Any]:
    problem = row.case.problem
    return {
        "variant": row.case.variant,
        "spec": dict(row.case.options),
        "kind": problem.kind,
        "tokens": problem.tokens,
        "state_dtype": problem.state_dtype,
        "arch": row.arch,
        "reason": row.reason,
        "registers": row.registers,
        "stack_bytes": row.stack_bytes,
        "smem_bytes": row.smem_bytes,
        "threads": row.threads,
        "cluster": row.cluster,
        "ctas_per_sm": row.ctas_per_sm,
        "compile_s": row.compile_s,
    }


def doctor(results: Results = RESULTS, as_json: Json = False) -> None:
    """Say what this machine has and lacks, and how to mend it.

    Exit status 1 if something needed is missing. A missing GPU is not: sweep and run then use what was recorded.

    \b
    Examples:
      kdabench doctor
      kdabench doctor --json
    """
    from kdabench.checks import doctor as examination

    findings = examination.examine(results)
    if as_json:
        console.emit_json([asdict(finding) for finding in findings])
    else:
        rows = [(f.state, f.name, f.found) for f in findings]
        console.show_table(("state", "what", "found"), rows)
        for finding in findings:
            if finding.repair:
                console.line(f"repair {finding.name}:  {finding.repair}")
    if any(finding.state == "missing" for finding in findings):
        raise typer.Exit(console.FINDING)


COMMANDS: dict[str, Callable[..., None]] = {
    "sweep": sweep,
    "verify": verify,
    "compile": compile_kernels,
    "doctor": doctor,
}
