"""list: sweeps, recorded devices, journals and variants."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kdabench.cli import console
from kdabench.cli.arguments import (
    OUT,
    RESULTS,
    Json,
    Out,
    Results,
    Sweeps,
)

if TYPE_CHECKING:
    pass


def list_all(
    sweeps: Sweeps = Path("sweeps"),
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
    from kda_kernels import variants
    from kdabench.data import devices

    listed: dict[str, list[dict[str, Any]]] = {
        "sweeps": [
            {"file": str(path), "question": _question(path)}
            for path in sorted(sweeps.glob("*.toml"))
        ],
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
    if as_json:
        console.emit_json(listed)
        return
    for heading, rows in listed.items():
        console.line(heading)
        for row in rows:
            console.line("  " + "  ".join(_plain(value) for value in row.values()))
        if not rows:
            console.line("  none")


def _plain(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, bool):
        return "with policy" if value else "no policy"
    return str(value)


def _question(path: Path) -> str:
    """Only the question: listing needs no variant's options. A broken file says so in its place."""
    import tomllib

    try:
        return str(tomllib.loads(path.read_text(encoding="utf-8")).get("question", "no question"))
    except (OSError, ValueError) as error:
        return f"cannot be read: {' '.join(str(error).split())}"
