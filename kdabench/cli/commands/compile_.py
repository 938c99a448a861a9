"""compile: all kernels, without a GPU."""

from __future__ import annotations

import os
from typing import Annotated, Any

import typer

from kda_kernels import build, variants
from kda_kernels.build import Row
from kda_kernels.device.gpu import ARCHS
from kdabench.cli import arguments, console
from kdabench.cli.arguments import Jobs, Json, Variants

Archs = Annotated[
    list[str] | None,
    typer.Option(
        "--arch", metavar="ARCH", help="Target, such as sm_100a; may be given several times."
    ),
]


def command(
    variant: Variants = None, arch: Archs = None, jobs: Jobs = None, as_json: Json = False
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
    archs = arch or ["sm_90a"]
    for name in archs:
        arguments.one_of("--arch", name, tuple(ARCHS))
    chosen = arguments.chosen_variants(variant)
    names = [name for name in chosen if variants.declared(name).binaries]
    rows = build.compile_grid(names, archs, jobs or os.cpu_count() or 1, console.ticks("kernels"))
    if as_json:
        console.emit_json([_row_json(row) for row in rows])
    else:
        console.show_table(_HEADINGS, [_row_cells(row) for row in rows], right=range(4, 11))
    failed = [row for row in rows if row.failed]
    for row in failed:
        what = row.reason or f"spills: {row.stack_bytes} bytes of stack"
        console.error_line(f"{console.case_name(row.case)} {row.arch}: {what}")
    if failed:
        raise typer.Exit(console.FINDING)


_HEADINGS = (
    *("variant", "choices", "problem", "arch"),
    *("registers", "stack", "smem", "threads", "cluster", "CTAs/SM", "compile s"),
)


def _row_cells(row: Row) -> tuple[object, ...]:
    problem = row.case.problem
    name = (
        row.case.variant,
        " ".join(f"{key}={value}" for key, value in row.case.options),
        f"{problem.kind} q={problem.tokens} {problem.state_dtype}",
        row.arch,
    )
    if row.reason is not None:
        return (*name, *["-"] * 6, row.reason.split(":")[0])
    sizes = (row.registers, row.stack_bytes, row.smem_bytes, row.threads, row.cluster)
    return (*name, *sizes, row.ctas_per_sm, f"{row.compile_s:.1f}")


def _row_json(row: Row) -> dict[str, Any]:
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
