#!/usr/bin/env python3
"""Print the latency tables of README and docs as Markdown, from results/<device>.

.venv/bin/python scripts/tables.py [DEVICE]        (nvidia-h200)
"""

import sys
from collections.abc import Iterable
from pathlib import Path
from statistics import median

from kdabench import records
from kdabench.problem import STATE_DTYPES
from kdabench.records import Candidate, Cell

RESULTS = Path(__file__).parent.parent / "results"
Times = dict[Cell, dict[Candidate, float]]


def times(path: Path) -> Times:
    """Median over processes of each process's median, as the fit takes it. us."""
    medians: dict[Cell, dict[Candidate, list[float]]] = {}
    for record in records.load([path]):
        if record.status == "ok":
            medians.setdefault(record.cell, {}).setdefault(record.candidate, []).append(median(record.samples_us))
    return {cell: {c: median(values) for c, values in found.items()} for cell, found in medians.items()}


def best(found: dict[Candidate, float], variant: str) -> float | None:
    return min((us for candidate, us in found.items() if candidate.variant == variant), default=None)


def row(cell: Cell, found: dict[Candidate, float], variants: Iterable[str]) -> str:
    floor = cell.problem.floor_us()
    cells = [f"{cell.heads}", f"{cell.requests}", f"{cell.items * cell.layers}", f"{floor:.2f}"]
    for variant in variants:
        us = best(found, variant)
        cells.append("-" if us is None else f"{us:.2f} ({floor / us:.2f})")
    return "| " + " | ".join(cells) + " |"


def table(title: str, found: Times, chosen: Iterable[Cell], variants: tuple[str, ...]) -> None:
    rows = [row(cell, found[cell], variants) for cell in chosen if cell in found]
    if not rows:
        return
    print(f"\n{title}\n")
    print("| heads | requests | items | floor | " + " | ".join(variants) + " |")
    print("| --- " * (4 + len(variants)) + "|")
    print("\n".join(rows))


def main() -> None:
    folder = RESULTS / (sys.argv[1] if len(sys.argv) > 1 else "nvidia-h200")
    layer, isolated, commits = (times(folder / f"{name}.jsonl") for name in ("dispatch", "targets", "commit"))
    steps = ("KdaSplit", "KdaWide", "KdaWS", "stock")
    sizes = [(12, 1), (12, 8), (12, 32), (12, 128), (12, 256), (96, 1), (96, 64), (96, 256)]
    for kind, tokens in (("decode", 1), ("spec", 4), ("record", 2), ("record", 4), ("record", 8)):
        cells = [Cell(kind, requests, heads, tokens) for heads, requests in sizes]
        table(f"{kind}, {tokens} tokens, context layer, us (efficiency)", layer, cells, steps)
    for dtype in STATE_DTYPES:
        for kind, tokens in (("decode", 1), ("spec", 4), ("record", 4), ("record", 8)):
            cells = [Cell(kind, r, h, tokens, state_dtype=dtype, context="isolated") for h, r in sizes]
            table(f"{kind}, {tokens} tokens, {dtype} state, context isolated", isolated, cells, steps)
    for layers in (1, 69):
        for tokens in (4, 8):
            cells = sorted((c for c in commits if (c.layers, c.tokens, c.pending) == (layers, tokens, None)),
                           key=lambda c: (c.heads, c.requests))  # fmt: skip
            table(f"commit, {tokens} of {tokens} tokens, bf16 state, {layers} layers", commits, cells,
                  ("KdaCommit", "stock"))  # fmt: skip


if __name__ == "__main__":
    main()
