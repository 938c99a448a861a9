"""Correctness of every variant on a GPU: each case of the grid through a CUDA graph against the reference.

The outcome is kept in results/<device>/verified.json with the digest of the kernels' sources, so that a test without
a GPU can tell when a kernel changed after it was verified.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from kda_kernels.cases import Case, verify_cases
from kdabench import build


@dataclass(frozen=True)
class Row:
    """One case and its verdict: None is a pass, "unsupported: ..." was not run, anything else a failure."""

    case: Case
    verdict: str | None

    @property
    def failed(self) -> bool:
        return self.verdict is not None and not self.verdict.startswith("unsupported")


def run(
    variants: Sequence[str],
    *,
    listener: Callable[[Row], None] = lambda row: None,
    choose: Callable[[Case], bool] = lambda case: True,
) -> list[Row]:
    """Check the grid of `variants` on the current CUDA device. Raises RuntimeError if there is none."""
    from kda_kernels.device.gpu import current_gpu

    cases = [case for variant in variants for case in verify_cases(variant) if choose(case)]
    build.fill_cache(cases, current_gpu().arch)
    rows = []
    for case in cases:
        row = Row(case, check(case))
        rows.append(row)
        listener(row)
    return rows


def check(case: Case, seed: int = 1) -> str | None:
    """The verdict of one case: two launches of fresh operands captured in one graph, poisoned, replayed, compared."""
    import torch

    from kda_kernels import variants
    from kda_kernels.check import compare, reference
    from kda_kernels.device.gpu import current_gpu
    from kda_kernels.operands import CommitOperands, make_commit, make_step
    from kdabench.graphs import capture, require_kernels

    module = variants.load(case.variant)
    spec = variants.make_spec(case.variant, dict(case.choices))
    why = module.unsupported(case.problem, spec, current_gpu())
    if why is not None:
        return f"unsupported: {why}"
    compiled = module.compile(case.problem, spec, current_gpu())

    def make(seed: int) -> Any:
        if case.problem.folds_only:
            return make_commit(
                case.problem,
                seed=seed,
                inputs=case.inputs,  # type: ignore[arg-type]
                align=case.align,
                in_place=case.in_place,
                pad=case.pad,
                null_requests=case.null_requests,
            )
        return make_step(
            case.problem,
            seed=seed,
            inputs=case.inputs,  # type: ignore[arg-type]
            pad=case.pad,
            null_requests=case.null_requests,
            conv_bias=case.conv_bias,
        )

    warm, *tested = make(seed), _untied(case, make, seed + 1), _untied(case, make, seed + 1 + _SEEDS)
    if isinstance(warm, CommitOperands):
        expected: list[Any] = [[reference.commit(o, layer) for layer in range(len(o.states))] for o in tested]
    else:
        expected = [reference.step(case.problem, o) for o in tested]
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        module.launch(compiled, warm, stream.cuda_stream)
    for operands in tested:
        compare.poison(operands)

    def enqueue(handle: int) -> None:
        for operands in tested:
            module.launch(compiled, operands, handle)

    graph = capture(enqueue, stream)
    require_kernels(graph, module.KERNELS, len(tested))
    graph.replay()
    torch.cuda.synchronize()
    for operands, want in zip(tested, expected, strict=True):
        if isinstance(operands, CommitOperands):
            verdicts = [compare.check_commit(operands, w, layer) for layer, w in enumerate(want)]
            verdict = next((v for v in verdicts if v is not None), None)
        else:
            verdict = compare.check_step(case.problem, operands, want)
        if verdict is not None:
            return str(verdict)
    return None


_SEEDS = 10
_FEW = 64  # items times tokens: above, one flipped gate drowns in the norm, and inputs without a tie are rare


def _untied(case: Case, make: Callable[[int], Any], first: int) -> Any:
    """Where a step is small: operands of the first of some seeds that has no raw gate at a BF16 tie, if one has."""
    from kda_kernels.check import compare

    if case.problem.folds_only or case.problem.items * case.problem.tokens > _FEW:
        return make(first)
    for seed in range(first, first + _SEEDS):
        operands = make(seed)
        if compare.gate_ties(case.problem, operands) == 0:
            return operands
    return make(first)


def save(rows: Sequence[Row], path: Path, env: dict[str, Any]) -> None:
    """Write the verdicts by variant; variants that were not run keep their entries."""
    from kda_kernels import variants

    known = json.loads(path.read_text())["variants"] if path.exists() else {}
    for name in sorted({row.case.variant for row in rows}):
        ours = [row for row in rows if row.case.variant == name]
        known[name] = {
            "kernel_digest": variants.digest(name),
            "passed": sum(row.verdict is None for row in ours),
            "unsupported": sum(row.verdict is not None and not row.failed for row in ours),
            "failed": [{**asdict(replace(row.case)), "verdict": row.verdict} for row in ours if row.failed],
        }
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"env": env, "variants": known}, indent=1, sort_keys=True) + "\n"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(text)
    temporary.replace(path)
