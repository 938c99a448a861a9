"""list: sweeps, recorded devices, journals and variants."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

from kda_kernels import variants
from kdabench.cli import console
from kdabench.cli.arguments import OUT, RESULTS, SWEEPS, Json, Out, Results, Sweeps
from kdabench.data import devices


def command(
    sweeps: Sweeps = SWEEPS,
    results: Results = RESULTS,
    out: Out = OUT,
    as_json: Json = False,
) -> None:
    """List sweeps, recorded devices, journals and variants.

    \b
    Examples:
      kdabench list
      kdabench list --json
    """
    listed = _listed(sweeps, results, out)
    if as_json:
        console.emit_json(listed)
        return
    for heading, rows in listed.items():
        console.line(heading)
        for row in rows:
            console.line("  " + "  ".join(_plain(value) for value in row.values()))
        if not rows:
            console.line("  none")


def _listed(sweeps: Path, results: Path, out: Path) -> dict[str, list[dict[str, Any]]]:
    files = sorted(sweeps.glob("*.toml"))
    return {
        "sweeps": [{"file": str(path), "question": _question(path)} for path in files],
        "devices": [
            {
                "device": slug,
                "records": [path.name for path in sorted((results / slug).glob("*.jsonl"))],
                "policy": (results / slug / "policy.py").is_file(),
            }
            for slug in devices.recorded(results)
        ],
        "journals": [{"file": str(path)} for path in sorted(out.glob("*.db"))],
        "variants": [{"variant": name} for name in variants.NAMES],
    }


def _plain(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, bool):
        return "with policy" if value else "no policy"
    return str(value)


def _question(path: Path) -> str:
    """Read only the question: listing needs no variant's options. A broken file says so in its
    place."""
    try:
        return str(tomllib.loads(path.read_text(encoding="utf-8")).get("question", "no question"))
    except (OSError, ValueError) as error:
        return f"cannot be read: {' '.join(str(error).split())}"
