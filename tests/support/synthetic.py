"""Made-up records of a device that doesn't exist, from the floor model. For tests alone; never a
measurement."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from kdabench.data import provenance
from kdabench.data.measurements import Candidate, Cell, Measurement
from kdabench.data.roofline import Roofline

ENV: dict[str, Any] = {
    "gpu": "SYNTHETIC ONE", "capability": "9.0", "sms": 100, "l2_bytes": 50_000_000, "mig": None,
    "memory_bytes": 10**11, "ecc": True, "power_limit_w": 700, "sm_clock_max_mhz": 2000, "memory_clock_max_mhz": 3000,
    "driver": "1.2", "cuda": "13.0", "torch": "2.13.0", "triton": "3.9.0", "cutlass_dsl": "4.8.1", "python": "3.11.9",
    "kdabench": "0.1.0", "uuid": "GPU-0", "pci_id": "0", "git_revision": None, "git_dirty": None,
}  # fmt: skip
ENVS = {provenance.digest(ENV): ENV}
ROOFLINE = Roofline(read_bytes_per_us=4.39e6, update_bytes_per_us=4.23e6, launch_us=0.9)
STOCK = Candidate.of("stock", {"pdl": False})


def split(split: int, pdl: bool = False) -> Candidate:
    return Candidate.of("KdaSplit", {"split": split, "staging": "registers", "pdl": pdl})


CANDIDATES = (STOCK, *(split(s, pdl) for s in (1, 2, 4, 8) for pdl in (False, True)))


def model_us(cell: Cell, candidate: Candidate) -> float:
    """Many splits win at few items, one at many; stock has a high start and wins windows of very
    many items."""
    floor = ROOFLINE.floor_us(cell.problem)
    if candidate.variant == "stock":
        return 6.0 + floor * (1.3 if cell.kind == "decode" else 1.02)
    splits, pdl = int(candidate.options["split"]), bool(candidate.options["pdl"])
    waves = cell.items * splits / 132
    return floor * (1.05 + 0.02 * splits) + 3.0 / splits + 0.1 * waves + (-0.2 if pdl else 0.0)


def cells(kinds: Sequence[str] = ("decode", "record", "spec")) -> list[Cell]:
    grid = {"decode": (1,), "record": (2, 4, 8), "spec": (4,)}
    return [
        Cell(kind, requests, heads, tokens)  # type: ignore[arg-type]
        for kind in kinds
        for heads in (12, 96)
        for requests in (1, 4, 16, 64, 256)
        for tokens in grid[kind]
    ]


def measurement(
    cell: Cell, candidate: Candidate, samples: Sequence[float], process: int = 0, **changes: Any
) -> Measurement:
    plain = Measurement(
        cell, candidate, "ok", None, process, tuple(samples), tuple(range(len(samples))), (1980,) * len(samples),
        (False,) * len(samples), 10**9, candidate.variant + "-0", next(iter(ENVS)),
    )  # fmt: skip
    return replace(plain, **changes)


def failed(
    cell: Cell, candidate: Candidate, status: str = "fault", process: int = 0
) -> Measurement:
    return measurement(cell, candidate, (), process, status=status, reason=f"synthetic {status}")


def measurements(
    where: Sequence[Cell] | None = None, candidates: Sequence[Candidate] = CANDIDATES, noise: float = 0.003,
    processes: int = 3, seed: int = 0,
) -> Iterator[Measurement]:  # fmt: skip
    rng = random.Random(seed)
    for cell in cells() if where is None else where:
        for candidate in candidates:
            for process in range(processes):
                bias = rng.gauss(1, noise)
                us = model_us(cell, candidate)
                yield measurement(
                    cell, candidate, [us * bias * rng.gauss(1, noise) for _ in range(5)], process
                )
