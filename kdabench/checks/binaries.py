"""Which machine code the kernels are: a manifest of the digests of all binaries, written once and
compared ever after.

A manifest is of one target and one compiler. It names every binary of the standard grids (what is
compiled, what is verified) and every one that a recorded measurement ran, and keeps beside them
what the sources said when they were compiled, so that unchanged sources need no compilation to be
believed. Certificates and measurements name binaries by the same digests: one that is not in the
manifest any more is stale.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

from kda_kernels import build
from kda_kernels.case import Case
from kda_kernels.cases import compile_cases, verify_cases
from kda_kernels.problem import Problem
from kdabench.data.exported import load
from kdabench.data.measurements import Measurement, write_atomic

FOLDER = Path("kernels/manifests")
"""Of the manifests, in a checkout; one file per target."""


class ManifestError(ValueError):
    """A manifest that can't be used. One line: file and rule."""


@dataclass(frozen=True)
class Manifest:
    """Digests of binaries, by variant and name (`name_of`).

    arch      target, as sm_90a
    compiler  `cubin.toolchain()`: binaries of another one are other binaries
    written   by variant: what the sources said, by `variants.digest`, when all its binaries were
              compiled
    """

    arch: str
    compiler: str
    written: Mapping[str, str]
    binaries: Mapping[str, Mapping[str, str]]

    def digest(self, variant: str, name: str) -> str | None:
        """Of the binary of that name; None if there is none."""
        return self.binaries.get(variant, {}).get(name)


@dataclass(frozen=True)
class Comparison:
    """What a manifest and binaries compiled now say of each other, as "variant name"; failed:
    (name, reason)."""

    same: int = 0
    changed: tuple[str, ...] = ()
    missing: tuple[str, ...] = ()
    failed: tuple[tuple[str, str], ...] = field(default=())

    @property
    def holds(self) -> bool:
        return not (self.changed or self.missing or self.failed)


def path_of(arch: str, folder: Path = FOLDER) -> Path:
    return folder / f"{arch}.json"


def read(path: Path) -> Manifest:
    """Raises ManifestError for a file that is missing or no manifest."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        manifest = Manifest(**found)
        texts = [
            *manifest.written.values(),
            *(d for named in manifest.binaries.values() for d in named.values()),
        ]
        if not all(isinstance(text, str) for text in (manifest.arch, manifest.compiler, *texts)):
            raise TypeError("digests must be texts")
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ManifestError(f"{path}: no manifest of binaries: {error}") from None
    return manifest


def write(manifest: Manifest, path: Path) -> None:
    """One line per binary, sorted; whole or not at all. Raises OSError."""
    about = {
        "arch": manifest.arch,
        "compiler": manifest.compiler,
        "written": dict(sorted(manifest.written.items())),
        "binaries": {
            v: dict(sorted(named.items())) for v, named in sorted(manifest.binaries.items())
        },
    }
    write_atomic(path, json.dumps(about, indent=0) + "\n")


def name_of(problem: Problem, options: Mapping[str, Any]) -> str:
    """A variant's binary by what decides it: "record q8 fp32 dim-first form=chunked
    gate_mode=1"."""
    chosen = " ".join(f"{key}={options[key]}" for key in sorted(options))
    return f"{problem.kind} q{problem.tokens} {problem.state_dtype} {problem.conv_layout} {chosen}".rstrip()


def name(case: Case) -> str:
    """`name_of` of a case, by those of its options that are not the default."""
    return name_of(case.problem, _chosen(case.variant, case.options))


@cache
def _chosen(variant: str, choices: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    from kda_kernels import variants

    default = variants.make_options(variant, {})
    return {key: value for key, value in choices if value != getattr(default, key)}


def named(variant: str, recorded: Iterable[Measurement] = ()) -> dict[str, Case]:
    """Every binary of a variant, by name: what is compiled, verified or was measured. Empty for
    Triton's."""
    from kda_kernels import variants

    if not variants.declared(variant).binaries:
        return {}
    cases = [
        *compile_cases(variant),
        *verify_cases(variant),
        *(case_of(r) for r in recorded if _of(r, variant)),
    ]
    return {name(case): replace(case, problem=_smallest(case.problem)) for case in cases}


def to_verify(variant: str, manifest: Manifest) -> set[str]:
    """Digests of the binaries that `kdabench verify` runs; of Triton's, what names its sources."""
    from kda_kernels import identity, variants

    if not variants.declared(variant).binaries:
        return {identity.binary(variant, None)}
    digests = {manifest.digest(variant, name(case)) for case in verify_cases(variant)}
    return {digest for digest in digests if digest is not None}


def _of(measurement: Measurement, variant: str) -> bool:
    return measurement.candidate.variant == variant and measurement.code != ""


def case_of(measurement: Measurement) -> Case:
    """What a measurement ran."""
    return Case(
        measurement.candidate.variant,
        tuple(sorted(measurement.candidate.options.items())),
        measurement.cell.problem,
    )


def _smallest(problem: Problem) -> Problem:
    """One binary serves all requests, heads and layers."""
    smaller = replace(problem, requests=1, heads=12, layers=1)
    return smaller if problem.pending is None else replace(smaller, pending="mix")


def recorded(results: Path, arch: str) -> list[Measurement]:
    """The measurements of all devices of a target. Raises MeasurementError."""
    found: list[Measurement] = []
    for folder in sorted({path.parent for path in results.glob("*/*.jsonl")}):
        envs = json.loads((folder / "env.json").read_text(encoding="utf-8"))
        if {arch_of(env) for env in envs.values()} == {arch}:
            found += [
                measurement
                for path in sorted(folder.glob("*.jsonl"))
                for measurement in load([path])
            ]
    return found


def arch_of(env: Mapping[str, Any]) -> str:
    """The target of a device's kernels, by its environment: "sm_90a" for compute capability 9.0."""
    return f"sm_{str(env.get('capability')).replace('.', '')}a"


def compiled(
    arch: str,
    wanted: Mapping[str, Mapping[str, Case]],
    jobs: int,
    listener: Callable[[build.Row, int], None] = lambda row, total: None,
) -> dict[str, dict[str, build.Row]]:
    """Rows of the wanted binaries, by variant and name; what is in the cache is taken from
    there."""
    flat = [
        (variant, key, case) for variant, cases in wanted.items() for key, case in cases.items()
    ]
    rows = build.compile_all([(case, arch) for _, _, case in flat], jobs, listener)
    found: dict[str, dict[str, build.Row]] = {variant: {} for variant in wanted}
    for (variant, key, _), row in zip(flat, rows, strict=True):
        found[variant][key] = row
    return found


def made(
    arch: str, rows: Mapping[str, Mapping[str, build.Row]], known: Manifest | None = None
) -> tuple[Manifest, list[tuple[str, str]]]:
    """A manifest of what was compiled, and what failed, with the reason. known: whose other
    variants stay in."""
    from kda_kernels import variants
    from kda_kernels.device import cubin

    compiler = cubin.toolchain()
    if known is not None and known.compiler != compiler:
        known = None
    binaries = dict(known.binaries) if known else {}
    written = dict(known.written) if known else {}
    failed = []
    for variant, named_rows in rows.items():
        binaries[variant] = {key: row.digest for key, row in named_rows.items() if row.digest}
        written[variant] = variants.digest(variant)
        failed += [
            (f"{variant} {key}", row.reason or "") for key, row in named_rows.items() if row.broken
        ]
    return Manifest(arch, compiler, written, binaries), failed


def compare(manifest: Manifest, rows: Mapping[str, Mapping[str, build.Row]]) -> Comparison:
    """Of every row: is the binary the manifest's?"""
    same, changed, missing, failed = 0, [], [], []
    for variant, named_rows in rows.items():
        for key, row in named_rows.items():
            was, text = manifest.digest(variant, key), f"{variant} {key}"
            if row.broken:
                failed.append((text, row.reason or ""))
            elif row.digest and was is None:
                missing.append(text)
            elif (row.digest or None) != was:
                changed.append(text)
            else:
                same += 1
    return Comparison(same, tuple(changed), tuple(missing), tuple(failed))


def sample(wanted: Mapping[str, Mapping[str, Case]], count: int) -> dict[str, dict[str, Case]]:
    """Some `count` of the wanted binaries, of every variant its part, the same each time and spread
    over the names."""
    total = sum(map(len, wanted.values()))
    every = max(1, total // max(1, count))
    return {
        variant: dict(sorted(cases.items())[every // 2 :: every])
        for variant, cases in wanted.items()
    }


def unproven(manifest: Manifest, names: Sequence[str]) -> list[str]:
    """Variants whose sources say something else than when the manifest's binaries were compiled."""
    from kda_kernels import variants

    return [
        v for v in names if v in manifest.binaries and manifest.written.get(v) != variants.digest(v)
    ]
