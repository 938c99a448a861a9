"""What happens to a variant that was added by one file and one line: run by test_added_variant.py,
with paths set.

It compiles, is verified, swept, tuned, fitted, chosen, prepared and drawn, and no other file knows
its name.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from kda_kernels import build, cases, variants
from kda_kernels.device.gpu import Gpu
from kda_kernels.problem import HEAD_DIM, Problem
from kda_kernels.serving.layer import Caches, LayerWeights
from kda_kernels.serving.prepared import PreparedKda
from kdabench.cli import inputs, tuning
from kdabench.data import sweep
from kdabench.data.measurements import Candidate, Cell, Measurement
from kdabench.policy import emit, fit
from kdabench.review import curves, plot
from support import synthetic

ADDED, COPIED = "KdaAdded", "KdaWide"
H200 = Gpu("sm_90a", 132)
SWEEP = f"""\
question = "Is what was added fast?"
variants = ["stock", "KdaSplit", "{ADDED}"]

[[cells]]
kind = "decode"
heads = [12, 24]
requests = [1, 16, 64, 256]

[options.KdaSplit]
split = [1, 4]

[options.{ADDED}]
evict = [false, true]
"""


def time_us(cell: Cell, candidate: Candidate) -> float:
    """What was added is the fastest from 500 items on, evict-first a little more so."""
    if candidate.variant != ADDED:
        return synthetic.model_us(
            cell, Candidate.of(candidate.variant, {"pdl": False, **candidate.options})
        )
    return cell.problem.floor_us() * (1.0 if candidate.options["evict"] else 1.02) + (
        0.1 if cell.items >= 500 else 9.0
    )


def measurements(plan: sweep.Sweep) -> Iterator[Measurement]:
    for cell in plan.cells:
        for candidate in plan.candidates:
            yield synthetic.measurement(cell, candidate, [time_us(cell, candidate)])


def compiled() -> None:
    mine = [case for case in cases.compile_cases(ADDED) if ("terms", 2) in case.options]
    assert len(list(cases.compile_cases(ADDED))) == len(list(cases.compile_cases(COPIED)))
    for case in (mine[0], mine[-1]):
        row = build.compile_case(case, "sm_90a")
        assert (row.reason, row.failed) == (None, False), row


def verified() -> None:
    found = list(cases.verify_cases(ADDED))
    assert found == [replace(case, variant=ADDED) for case in cases.verify_cases(COPIED)]
    assert cases.unverified_kinds(ADDED, found) == ()


def prepared(policy: object) -> None:
    heads, requests = 24, 64
    D = heads * HEAD_DIM
    empty, bf16 = torch.empty, torch.bfloat16
    weights = LayerWeights(
        empty(3 * D, 1, 4),
        None,
        empty(D, HEAD_DIM, dtype=bf16),
        empty(heads),
        empty(D),
        empty(HEAD_DIM),
    )
    kda = PreparedKda(weights, {requests: (Problem("decode", 1, heads).pitch, None)})
    caches = Caches(
        empty(2, heads, HEAD_DIM, HEAD_DIM, device="meta"),
        empty(2, 3 * D, 3, dtype=bf16, device="meta"),
    )
    (row,) = kda.prepare(caches, H200, policy)  # type: ignore[arg-type]
    assert (row.variant, row.options["evict"]) == (ADDED, True), row


def main(folder: Path) -> None:
    (folder / "added.toml").write_text(SWEEP)
    plan = inputs.load_sweep(folder / "added.toml", 132)
    assert {c.options["evict"] for c in plan.candidates if c.variant == ADDED} == {False, True}
    assert len(list(tuning._every(ADDED, plan.cells[0]))) == len(
        list(tuning._every(COPIED, plan.cells[0]))
    )
    compiled()
    verified()
    measured = list(measurements(plan))
    policy, evidence = fit.fit(measured, synthetic.ENVS, resamples=0)
    assert f"only {ADDED}" in evidence.baselines
    module = emit.load(emit.emit(policy, evidence))
    assert module.choose(24, 64, 1, "decode").variant == ADDED
    assert module.choose(12, 1, 1, "decode").variant == "KdaSplit"
    assert ADDED in {
        choice.variant for choice in module.ranked(24, 64, 1, "decode", streamable=False)
    }
    prepared(module)
    assert plot._look(ADDED) not in (
        plot._UNKNOWN_LOOK,
        *(plot._look(n) for n in variants.NAMES if n != ADDED),
    )
    paths = plot.write_plots(
        measured, folder, device="SYNTHETIC ONE", sms=100, policy=module, recorded=False
    )
    assert {path.stem for path in paths} == {curves.Question.of(plan.cells[0]).stem}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
