"""Rewrites files of measurements of schema 2 (one JSON object a line) as schema 3.

    python scripts/convert_measurements.py [RESULTS]

Drops the rows of candidates whose variant does not take the cell's kind, which are no longer
measured, and rounds times to picoseconds: events tick every 32 ns around 8 launches or more, so the
digits beyond are those of the driver's 32-bit milliseconds. What the files were is kept in
converted.json beside them: schema, sha256, rows, and the dropped rows by reason.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kdabench.data import exported
from kdabench.data.measurements import Candidate, Cell, Measurement, write_atomic
from kdabench.data.sweep import takes
from kdabench.measure.clock import TIME_DIGITS

BEFORE = 2


def main(results: Path) -> None:
    for folder in sorted({path.parent for path in results.glob("*/*.jsonl")}):
        about = folder / "converted.json"
        known = json.loads(about.read_text(encoding="utf-8")) if about.exists() else {}
        for path in sorted(folder.glob("*.jsonl")):
            text = path.read_bytes()
            if text.startswith(b'{"line":"header"'):
                continue
            known[path.name] = convert(path, text)
            print(f"{path}: {len(text)} -> {path.stat().st_size} bytes")
            write_atomic(about, json.dumps(known, indent=1, sort_keys=True) + "\n")


def convert(path: Path, text: bytes) -> dict[str, Any]:
    """Rewrites one file, and says what it was. Raises ValueError if the new one reads otherwise."""
    measurements = list(parse(text))
    kept = [m for m in measurements if takes(m.candidate, m.cell.kind)]
    dropped = [m for m in measurements if not takes(m.candidate, m.cell.kind)]
    if any(m.status != "unsupported" for m in dropped):
        raise ValueError(f"{path}: of a variant that does not take the kind, yet not unsupported")
    exported.dump(kept, path)
    if set(exported.load([path])) != set(kept):
        raise ValueError(f"{path}: reads otherwise than it was written")
    return {
        "schema": BEFORE,
        "sha256": hashlib.sha256(text).hexdigest(),
        "rows": len(measurements),
        "dropped": dict(sorted(Counter(str(m.reason) for m in dropped).items())),
    }


def parse(text: bytes) -> Iterator[Measurement]:
    """Raises ValueError or KeyError for what is not of schema 2."""
    for line in text.decode().removesuffix("\n").split("\n"):
        row = json.loads(line)
        cell, schema = Cell(**row["cell"]), row["schema"]
        if schema != BEFORE or row["bytes_moved"] != cell.problem.bytes_moved:
            raise ValueError(f"{schema=}, or other bytes than the problem's: {line[:80]}")
        yield Measurement(
            cell,
            Candidate.of(row["variant"], row["spec"]),
            row["status"],
            row["reason"],
            row["process"],
            tuple(round(float(us), TIME_DIGITS) for us in row["samples_us"]),
            tuple(row["rounds"]),
            tuple(row["sm_clock_mhz"]),
            tuple(row["throttled"]),
            row["unique_bytes"],
            row["code"],
            row["env"],
        )


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "results"))
