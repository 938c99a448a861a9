"""Where a measurement comes from, and which measurements may stand side by side.

An environment is the flat dict of environment.py; a value that could not be read is None. Each field has a class:
a *hard* difference forbids mixing, a *soft* one is named in a warning, a *free* one is fine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from kdabench.records import Record, canonical

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
"""The class of each field of an environment. The source of a kernel has its own digest in every record, also hard."""


class ProvenanceError(ValueError):
    """Measurements that must not be mixed; names the field and both values."""


class ProvenanceWarning(UserWarning):
    """Measurements that differ in a soft field."""


def digest(env: Mapping[str, Any]) -> str:
    return "sha256:" + hashlib.sha256(canonical(dict(env)).encode()).hexdigest()


def check_mix(envs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Warnings, one for each soft field that differs. A field that `FIELDS` doesn't know counts as soft.

    Raises ProvenanceError if a hard field differs.
    """
    warnings = []
    for field in sorted({key for env in envs for key in env}):
        values = sorted({canonical(env.get(field)) for env in envs})
        kind = FIELDS.get(field, "soft")
        if len(values) < 2 or kind == "free":
            continue
        if kind == "hard":
            raise ProvenanceError(f"{field}: {' and '.join(values)}: such measurements must not be mixed")
        warnings.append(f"{field} differs between the measurements: {', '.join(values)}")
    return warnings


def check_kernels(records: Iterable[Record]) -> None:
    """Raises ProvenanceError if records of one variant come from different kernel sources.

    An empty digest (the candidate was lost before its source was read) agrees with any.
    """
    seen: dict[str, str] = {}
    for record in records:
        variant, source = record.candidate.variant, record.kernel_digest
        if source and seen.setdefault(variant, source) != source:
            raise ProvenanceError(
                f"kernel_digest of {variant}: {seen[variant]} and {source}: such measurements must not be mixed"
            )
