"""Faulty variants, planted into sweeps on a GPU to see what becomes of them, and measurements
around them.

Never part of the package: a worker learns of them by kdabench.measure.worker.serve's argument.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton
import triton.language as tl

from kda_kernels.variants import split, wide
from kdabench.data.measurements import Candidate, Cell, Measurement
from kdabench.data.sweep import Sweep
from kdabench.measure import cell_bench, cuda_graphs, session, worker
from kdabench.measure.contest import Plan
from kdabench.measure.gpu_runner import GpuRunner
from kdabench.measure.telemetry import Telemetry

SPLIT: dict[str, Any] = {"split": 4, "threads": 128}
REAL = {"KdaSplit": Candidate.of("KdaSplit", SPLIT), "KdaWide": Candidate.of("KdaWide", {})}


@triton.jit
def planted_nothing(out):
    tl.program_id(0)


@triton.jit
def planted_nan(out, pitch, first, width, BLOCK: tl.constexpr):
    columns = tl.arange(0, BLOCK)
    nan = tl.full((BLOCK,), float("nan"), tl.bfloat16)
    tl.store(out + tl.program_id(0) * pitch + first + columns, nan, mask=columns < width)


@triton.jit
def planted_touch(weight):
    tl.store(weight, tl.load(weight) * 1.000001)


@triton.jit
def planted_far(out, offset):
    tl.store(out + offset, 1.0)


@triton.jit
def planted_spin(flag):
    seen = tl.atomic_add(flag, 0)
    while seen == 0:
        seen = tl.atomic_add(flag, 0)


@dataclass(frozen=True)
class Options:
    """requests: the only cells that are faulty have this many; 0: all."""

    requests: int = 0
    pdl: bool = False


def _unsupported(problem: Any, options: Options, gpu: Any) -> str | None:
    return "planted elsewhere" if options.requests not in (0, problem.requests) else None


def _compile(problem: Any, options: Options, gpu: Any) -> Any:
    return SimpleNamespace(
        split=split.compile(problem, split.Options(**SPLIT), gpu),
        wide=wide.compile(
            problem, wide.Options(form="chunked" if problem.kind == "record" else "recurrence"), gpu
        ),
        scratch={},
        flag=torch.zeros(1, dtype=torch.int32, device="cuda"),
    )


def _on(stream: int) -> Any:
    return torch.cuda.stream(torch.cuda.ExternalStream(stream))


def _right(compiled: Any, operands: Any, stream: int) -> None:
    split.launch(compiled.split, operands, stream)


def _writes_nothing(compiled: Any, operands: Any, stream: int) -> None:
    with _on(stream):
        planted_nothing[(1,)](operands.out)


def _half_the_heads(compiled: Any, operands: Any, stream: int) -> None:
    _right(compiled, operands, stream)
    rows, channels = operands.out.shape
    half = channels // 2
    with _on(stream):
        planted_nan[(rows,)](
            operands.out, operands.out.stride(0), half, half, BLOCK=triton.next_power_of_2(half)
        )


def _skips_the_state(compiled: Any, operands: Any, stream: int) -> None:
    """Right output, from a copy of the state; the state itself stays."""
    key = tuple(operands.state.shape)
    if key not in compiled.scratch:
        compiled.scratch[key] = torch.empty_like(operands.state)
    with _on(stream):
        compiled.scratch[key].copy_(operands.state)
    _right(compiled, replace(operands, state=compiled.scratch[key]), stream)


def _writes_weights(compiled: Any, operands: Any, stream: int) -> None:
    _right(compiled, operands, stream)
    with _on(stream):
        planted_touch[(1,)](operands.norm_weight)


def _imposter(compiled: Any, operands: Any, stream: int) -> None:
    wide.launch(compiled.wide, operands, stream)


def _out_of_bounds(compiled: Any, operands: Any, stream: int) -> None:
    _right(compiled, operands, stream)
    with _on(stream):
        planted_far[(1,)](operands.out, 1 << 44)


def _spins(compiled: Any, operands: Any, stream: int) -> None:
    with _on(stream):
        planted_spin[(1,)](compiled.flag)


def _synchronizes(compiled: Any, operands: Any, stream: int) -> None:
    _right(compiled, operands, stream)
    torch.cuda.synchronize()


def _aborts(compiled: Any, operands: Any, stream: int) -> None:
    os.abort()


def _variant(launch: Any, kernels: tuple[str, ...] = split.KERNELS) -> Any:
    return SimpleNamespace(
        Options=Options, unsupported=_unsupported, compile=_compile, launch=launch, KERNELS=kernels
    )


VARIANTS: Mapping[str, Any] = {
    "Twin": _variant(_right),
    "WritesNothing": _variant(_writes_nothing, ("planted_nothing",)),
    "HalfTheHeads": _variant(_half_the_heads),
    "SkipsTheState": _variant(_skips_the_state),
    "WritesWeights": _variant(_writes_weights),
    "Imposter": _variant(_imposter),
    "OutOfBounds": _variant(_out_of_bounds),
    "Spins": _variant(_spins, ("planted_spin",)),
    "Synchronizes": _variant(_synchronizes),
    "Aborts": _variant(_aborts),
}


def serve(pipe: Connection, device_index: int) -> None:
    worker.serve(pipe, device_index, VARIANTS)


def candidate(name: str, requests: int = 0) -> Candidate:
    return REAL.get(name) or Candidate.of(name, {"requests": requests})


def sweep(
    cells: Iterable[Cell], candidates: Sequence[Candidate], out: Path, plan: Plan | None = None
) -> list[Measurement]:
    """The records of a sweep in one process, by a real worker."""
    names = tuple(dict.fromkeys(c.variant for c in candidates))
    asked = Sweep(
        out / "planted.toml", "What becomes of faults?", names, 1, tuple(cells), tuple(candidates)
    )
    runner = GpuRunner(0, serve, compiles=False)
    with runner.open_journal(asked, out) as journal:
        done = session.run_sweep(asked, runner, journal, asked.cells, plan=plan)
    assert done.done == done.total
    return done.measurements


def statuses(
    cell: Cell, names: Sequence[str], out: Path | None = None
) -> dict[str, tuple[str, str | None]]:
    """Status by variant, and the reason of failures."""
    with tempfile.TemporaryDirectory() as folder:
        rows = sweep([cell], [candidate(name) for name in names], out or Path(folder))
    return {r.candidate.variant: (r.status, None if r.status == "ok" else r.reason) for r in rows}


def make_bench(cell: Cell) -> cell_bench.CellBench:
    """The cell made ready in this process."""
    device = cell_bench.Device.current()
    telemetry = Telemetry(device.uuid, device.pci_id)
    return cell_bench.make_ready(
        cell, device.knowing(telemetry), cell_bench.WeightCache(), telemetry, VARIANTS
    )


def times_by_copies(cell: Cell, factors: Sequence[int]) -> dict[int, float]:
    """us per launch with so many times the usual copies."""
    found, real, copies_for = {}, REAL["KdaSplit"], cell_bench.copies_for
    for factor in factors:
        with mock.patch.object(
            cell_bench, "copies_for", lambda c, l2, n=factor: n * copies_for(c, l2)
        ):
            ready = make_bench(cell)
        ready.prepare(real, *ready.compile(real))
        clock = ready.clock(lambda c: None, 0.9)
        clock.begin_round(0)
        found[factor] = median(clock.read(real).time_us for _ in range(15))
    return found


def stale_captures(count: int) -> int:
    """How many of `count` captured copies read their source before it was written."""
    stream = torch.cuda.Stream()
    source, seen = (torch.zeros(4096, dtype=torch.int32, device="cuda") for _ in range(2))
    stale = 0
    for index in range(count):
        torch.cuda._sleep(200_000)
        source.fill_(index + 1)
        graph = cuda_graphs.capture(lambda handle: seen.copy_(source), stream)  # type: ignore[arg-type, return-value]
        with torch.cuda.stream(stream):
            graph.replay()
        torch.cuda.synchronize()
        stale += int((seen != index + 1).any())
        graph.reset()
    return stale
