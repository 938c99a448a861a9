"""Where a measurement comes from, and which measurements may stand side by side.

An environment is the flat dict of environment.py; a value that could not be read is None. Each
field has a class: a *hard* difference forbids mixing, a *soft* one is named in a warning, a *free*
one is fine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from kdabench.data.measurements import Measurement, canonical

FieldClass = Literal["hard", "soft", "free"]

FIELDS: dict[str, FieldClass] = {
    "gpu": "hard",
    "capability": "hard",
    "sms": "hard",
    "l2_bytes": "hard",
    "mig": "hard",
    "memory_bytes": "soft",
    "ecc": "soft",
    "power_limit_w": "soft",
    "sm_clock_max_mhz": "soft",
    "memory_clock_max_mhz": "soft",
    "driver": "soft",
    "cuda": "soft",
    "torch": "soft",
    "triton": "soft",
    "cutlass_dsl": "soft",
    "python": "soft",
    "kdabench": "soft",
    "uuid": "free",
    "pci_id": "free",
    "nvml": "free",
    "git_revision": "free",
    "git_dirty": "free",
}
"""The class of each field of an environment. What ran is named in every record, and that is hard,
too."""


class ProvenanceError(ValueError):
    """Measurements that must not be mixed; names the field and both values."""


class ProvenanceWarning(UserWarning):
    """Measurements that differ in a soft field."""


def digest(env: Mapping[str, Any]) -> str:
    return "sha256:" + hashlib.sha256(canonical(dict(env)).encode()).hexdigest()


def check_mix(envs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Warnings, one for each soft field that differs. A field that `FIELDS` doesn't know counts as
    soft.

    Raises ProvenanceError if a hard field differs.
    """
    warnings = []
    for field in sorted({key for env in envs for key in env}):
        values = sorted({canonical(env.get(field)) for env in envs})
        kind = FIELDS.get(field, "soft")
        if len(values) < 2 or kind == "free":
            continue
        if kind == "hard":
            raise ProvenanceError(
                f"{field}: {' and '.join(values)}: such measurements must not be mixed"
            )
        warnings.append(f"{field} differs between the measurements: {', '.join(values)}")
    return warnings


def check_kernels(measurements: Iterable[Measurement]) -> None:
    """Raises ProvenanceError if records that should be of one binary, or of one launch of it, are
    not; says of which.

    A candidate has one binary for all cells of a kind, tokens, state dtype and window layout, and
    one launch per cell. An empty code (nothing could run) agrees with any.
    """
    binaries: dict[tuple[object, ...], str] = {}
    launches: dict[tuple[object, ...], str] = {}
    last: tuple[object, ...] = ()
    for measurement in measurements:
        cell, candidate = measurement.cell, measurement.candidate
        ran = (measurement.code, cell, candidate)
        if not measurement.code or ran == last:  # as the process before it
            continue
        last = ran
        binary, _, launch = measurement.code.partition("-")
        compiled = (candidate, cell.kind, cell.tokens, cell.state_dtype, cell.conv_layout)
        if (seen := binaries.setdefault(compiled, binary)) != binary:
            of = f"{candidate}, {cell.kind} of {cell.tokens} tokens, {cell.state_dtype}, {cell.conv_layout}"
            raise ProvenanceError(
                f"binary of {of}: {seen} and {binary}: such measurements must not be mixed"
            )
        if (seen := launches.setdefault((candidate, cell), launch)) != launch:
            raise ProvenanceError(
                f"launch of {candidate}, {cell.key}: {seen} and {launch}: they must not be mixed"
            )
