"""binaries: what machine code the kernels are."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import typer

from kda_kernels import variants
from kda_kernels.build import Row
from kda_kernels.device import cubin
from kda_kernels.device.gpu import ARCHS
from kdabench.checks import binaries
from kdabench.checks.binaries import Comparison, Manifest, ManifestError
from kdabench.cli import arguments, console
from kdabench.cli.arguments import RESULTS, Jobs, Json, Results, Variants

_SHOWN = 20
"""Binaries that are named in each list; --json has all."""
Rows = Mapping[str, Mapping[str, Row]]
"""Variant -> name of a binary -> what compiling it came to."""

Check = Annotated[bool, typer.Option("--check", help="Compare with the manifest; write nothing.")]
Arch = Annotated[str, typer.Option("--arch", metavar="ARCH", help="Target, such as sm_100a.")]
Sample = Annotated[
    int | None,
    typer.Option("--sample", metavar="N", min=1, help="With --check: only some N binaries."),
]
ManifestFile = Annotated[
    Path | None,
    typer.Option("--manifest", metavar="FILE", help="Manifest (kernels/manifests/ARCH.json)."),
]


def command(
    check: Check = False,
    variant: Variants = None,
    arch: Arch = "sm_90a",
    some: Sample = None,
    manifest: ManifestFile = None,
    results: Results = RESULTS,
    jobs: Jobs = None,
    as_json: Json = False,
) -> None:
    """Write or compare the manifest of the kernels' machine code.

    Every binary that is compiled by default, verified or was measured, by a digest of its code, constants,
    parameters and resources; --check names those that a change touches. What is in the cache is not compiled
    again; all of a target takes some 25 minutes on two cores otherwise. Needs no GPU. Exit status 1 with --check if
    a binary is another one than the manifest says.

    \b
    Examples:
      kdabench binaries --check
      kdabench binaries --check --variant KdaWide --arch sm_100a
      kdabench binaries --check --sample 60
      kdabench binaries
    """
    arguments.one_of("--arch", arch, tuple(ARCHS))
    if some is not None and not check:
        console.fail("--sample: only with --check")
    path = manifest or binaries.path_of(arch)
    known = _known(path, arch, must=check)
    rows = _compiled(arch, arguments.chosen_variants(variant), some, results, jobs)
    if check and known is not None:
        _tell(binaries.compare(known, rows), path, as_json)
    else:
        _write(arch, rows, known, path, as_json)


def _compiled(
    arch: str, chosen: Sequence[str], some: int | None, results: Path, jobs: int | None
) -> Rows:
    with console.user_input():
        recorded = binaries.recorded(results, arch)
    names = [name for name in chosen if variants.declared(name).binaries]
    wanted = {name: binaries.named(name, recorded) for name in names}
    if some is not None:
        wanted = binaries.sample(wanted, some)
    return binaries.compiled(arch, wanted, jobs or os.cpu_count() or 1, console.ticks("binaries"))


def _write(
    arch: str,
    rows: Rows,
    known: Manifest | None,
    path: Path,
    as_json: bool,
) -> None:
    """Write the manifest. Ends the command if something does not compile."""
    made, failed = binaries.made(arch, rows, known)
    binaries.write(made, path)
    count = sum(map(len, made.binaries.values()))
    distinct = {digest for named in made.binaries.values() for digest in named.values()}
    if as_json:
        console.emit_json({"manifest": str(path), "names": count, "binaries": len(distinct)})
    else:
        console.line(f"{count} names of {len(distinct)} binaries in {path}")
    for name, reason in failed:
        console.error_line(f"{name}: {reason}")
    if failed:
        raise typer.Exit(console.FINDING)


def _known(path: Path, arch: str, must: bool) -> Manifest | None:
    """Read the manifest, if there is one.

    Ends the command if there must be one, if it is of another target, or, where it must be
    compared, of another compiler.
    """
    if not path.is_file():
        if must:
            console.fail(f"{path}: no such manifest; write it: kdabench binaries --arch {arch}")
        return None
    with console.user_input():
        known = binaries.read(path)
        if known.arch != arch:
            raise ManifestError(f"{path}: is of {known.arch}, not of {arch}")
        if must and known.compiler != cubin.toolchain():
            raise ManifestError(
                f"{path}: made by compiler {known.compiler}, this is {cubin.toolchain()}: not comparable"
            )
    return known


def _tell(found: Comparison, path: Path, as_json: bool) -> None:
    lists = {
        "another binary": list(found.changed),
        "not in the manifest": list(found.missing),
        "does not compile": [f"{name}: {reason}" for name, reason in found.failed],
    }
    if as_json:
        console.emit_json(
            {"same": found.same, **{key.replace(" ", "_"): names for key, names in lists.items()}}
        )
    else:
        console.line(f"{found.same} binaries as {path} says")
        for what, names in lists.items():
            for name in names[:_SHOWN]:
                console.line(f"{what}: {name}")
            if len(names) > _SHOWN:
                console.line(f"{what}: {len(names) - _SHOWN} more; all of them: --json")
    if not found.holds:
        touched = len(found.changed) + len(found.missing) + len(found.failed)
        console.error_line(
            f"{touched} binaries are not what {path} says. If that is meant: kdabench binaries, then kdabench verify "
            "on the GPU for the variants named, and their cells measured again"
        )
        raise typer.Exit(console.FINDING)
