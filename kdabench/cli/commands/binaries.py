"""binaries: what machine code the kernels are."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kdabench.cli import console
from kdabench.cli.arguments import (
    RESULTS,
    Json,
    Results,
    Variants,
    chosen_variants,
)

if TYPE_CHECKING:
    from kdabench.checks.binaries import Comparison, Manifest


_SHOWN = 20
"""Binaries that are named in each list; --json has all."""


def binaries(
    check: Annotated[
        bool, typer.Option("--check", help="Compare with the manifest; write nothing.")
    ] = False,
    variant: Variants = None,
    arch: Annotated[
        str, typer.Option("--arch", metavar="ARCH", help="Target, such as sm_100a.")
    ] = "sm_90a",
    some: Annotated[
        int | None,
        typer.Option("--sample", metavar="N", min=1, help="With --check: only some N binaries."),
    ] = None,
    manifest: Annotated[
        Path | None,
        typer.Option("--manifest", metavar="FILE", help="Manifest (kernels/manifests/ARCH.json)."),
    ] = None,
    results: Results = RESULTS,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="Processes; as many as cores by default.")
    ] = None,
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
    from kda_kernels import variants
    from kda_kernels.device import cubin
    from kda_kernels.device.gpu import ARCHS
    from kdabench.checks import binaries as code

    if arch not in ARCHS:
        console.fail(f"--arch: {arch!r}: one of {', '.join(ARCHS)}")
    if some is not None and not check:
        console.fail("--sample: only with --check")
    path = manifest or code.path_of(arch)
    known = _known(path, arch, must=check)
    if check and known is not None and known.compiler != cubin.toolchain():
        console.fail(
            f"{path}: made by compiler {known.compiler}, this is {cubin.toolchain()}: not comparable"
        )
    with console.user_input():
        recorded = code.recorded(results, arch)
    names = [name for name in chosen_variants(variant) if variants.declared(name).binaries]
    wanted = {name: code.named(name, recorded) for name in names}
    if some is not None:
        wanted = code.sample(wanted, some)
    rows = code.compiled(arch, wanted, jobs or os.cpu_count() or 1, console.ticks("binaries"))
    if check:
        assert known is not None
        _tell(code.compare(known, rows), path, as_json)
        return
    made, failed = code.made(arch, rows, known)
    code.write(made, path)
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
    """The manifest, if there is one. Ends the command if there `must` be one, or if it is of
    another target."""
    from kdabench.checks import binaries as code

    if not path.is_file():
        if must:
            console.fail(f"{path}: no such manifest; write it: kdabench binaries --arch {arch}")
        return None
    with console.user_input():
        known = code.read(path)
        if known.arch != arch:
            raise code.ManifestError(f"{path}: is of {known.arch}, not of {arch}")
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
