"""Correctness of every variant on a GPU: each case of the grid through a CUDA graph against the
reference.

The outcome is kept in results/<device>/verified.json with the digests of the binaries that were
checked, and of what their launches asked of the driver. So a test without a GPU can tell, by the
manifest of binaries, whether what was verified is what the sources give today.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kda_kernels import build
from kda_kernels.case import Case
from kda_kernels.cases import unverified_kinds, verify_cases
from kdabench.data.measurements import write_atomic

if TYPE_CHECKING:
    from kda_kernels.device.gpu import Gpu
    from kdabench.checks.binaries import Manifest


@dataclass(frozen=True)
class Row:
    """One case and what became of it.

    verdict  None is a pass; else why it failed, or why it was not run
    code     "binary-launch" of what ran, as `kda_kernels.identity` names it; empty if nothing did
    refused  the variant doesn't support the case: it was not run
    """

    case: Case
    verdict: str | None
    code: str = ""
    refused: bool = False

    @property
    def failed(self) -> bool:
        """Whether it ran and is wrong."""
        return self.verdict is not None and not self.refused


def run(
    variants: Sequence[str],
    *,
    listener: Callable[[Row], None] = lambda row: None,
    choose: Callable[[Case], bool] = lambda case: True,
) -> list[Row]:
    """Check the grid of `variants` on the current CUDA device. Raises RuntimeError if there is
    none."""
    from kda_kernels.device.gpu import current_gpu

    cases = [case for variant in variants for case in verify_cases(variant) if choose(case)]
    build.fill_cache(cases, current_gpu().arch)
    rows = []
    for case in cases:
        row = check(case)
        rows.append(row)
        listener(row)
    return rows


def check(case: Case, seed: int = 1) -> Row:
    """Check one case: two launches of fresh operands captured in one graph, poisoned, launched,
    compared."""
    import torch

    from kda_kernels import identity, variants
    from kda_kernels.check import compare
    from kda_kernels.device.gpu import current_gpu
    from kdabench.measure.cuda_graphs import capture, require_kernels

    module = variants.load(case.variant)
    options = variants.make_options(case.variant, dict(case.options))
    why = module.unsupported(case.problem, options, current_gpu())
    if why is not None:
        return Row(case, f"unsupported: {why}", refused=True)
    compiled = module.compile(case.problem, options, current_gpu())
    code = identity.code(case.variant, compiled, case.problem, options, current_gpu())
    warm, *tested = (
        _operands(case, seed),
        _untied(case, seed + 1),
        _untied(case, seed + 1 + _SEEDS),
    )
    expected = [_expected(case, operands) for operands in tested]
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
    verdicts = (_verdict(case, o, want) for o, want in zip(tested, expected, strict=True))
    return Row(case, next((text for text in verdicts if text is not None), None), code)


def _operands(case: Case, seed: int) -> Any:
    from kda_kernels.operands import make_commit, make_step

    common: dict[str, Any] = {
        "seed": seed,
        "inputs": case.inputs,
        "pad": case.pad,
        "null_requests": case.null_requests,
    }
    if case.problem.folds_only:
        return make_commit(case.problem, align=case.align, in_place=case.in_place, **common)
    return make_step(case.problem, conv_bias=case.conv_bias, **common)


def _expected(case: Case, operands: Any) -> Any:
    """What the reference gives; of a commit in each layer."""
    from kda_kernels.check import reference

    if case.problem.folds_only:
        return [reference.commit(operands, layer) for layer in range(len(operands.states))]
    return reference.step(case.problem, operands)


def _verdict(case: Case, operands: Any, expected: Any) -> str | None:
    """What is wrong with what a launch left in its operands, or None."""
    from kda_kernels.check import compare

    if not case.problem.folds_only:
        why = compare.check_step(case.problem, operands, expected)
        return None if why is None else str(why)
    verdicts = (compare.check_commit(operands, w, layer) for layer, w in enumerate(expected))
    return next((str(why) for why in verdicts if why is not None), None)


_SEEDS = 10
# items times tokens: above, one flipped gate drowns in the norm, and inputs without a tie are rare
_FEW = 64


def _untied(case: Case, first: int) -> Any:
    """Where a step is small: operands of the first of some seeds that has no raw gate at a BF16
    tie, if one has."""
    from kda_kernels.check import compare

    if case.problem.folds_only or case.problem.items * case.problem.tokens > _FEW:
        return _operands(case, first)
    for seed in range(first, first + _SEEDS):
        operands = _operands(case, seed)
        if compare.gate_ties(case.problem, operands) == 0:
            return operands
    return _operands(case, first)


def unverified(rows: Sequence[Row]) -> list[str]:
    """Of the variants that ran: kinds that one declares, but none of its cases could be of. Such
    would pass unseen."""
    ran = [row.case for row in rows if row.code]
    names = dict.fromkeys(row.case.variant for row in rows)
    return [f"{name}: kind {kind} is declared, and no case of it is supported"
            for name in names for kind in unverified_kinds(name, ran)]  # fmt: skip


def save(rows: Sequence[Row], path: Path, env: dict[str, Any]) -> None:
    """Write the verdicts by variant; variants that were not run keep their entries. Raises
    OSError."""
    known = json.loads(path.read_text())["variants"] if path.exists() else {}
    for name in sorted({row.case.variant for row in rows}):
        ours = [row for row in rows if row.case.variant == name]
        passed = [row for row in ours if row.verdict is None]
        known[name] = {
            "passed": len(passed),
            "unsupported": sum(row.refused for row in ours),
            "failed": [{**asdict(row.case), "verdict": row.verdict} for row in ours if row.failed],
            "binaries": sorted({row.code.partition("-")[0] for row in passed}),
            "launches": launches(
                (row.case.problem.kind, row.code.partition("-")[2]) for row in passed
            ),
        }
    write_atomic(path, json.dumps({"env": env, "variants": known}, indent=1, sort_keys=True) + "\n")


def launches(named: Iterable[tuple[str, str]]) -> dict[str, str]:
    """One name for all launches of each kind, of (kind, name of a launch) in any order."""
    of: dict[str, list[str]] = {}
    for kind, launch in named:
        of.setdefault(kind, []).append(launch)
    return {
        kind: hashlib.sha256(" ".join(sorted(found)).encode()).hexdigest()[:16]
        for kind, found in of.items()
    }


def stale(variant: str, entry: Mapping[str, Any], manifest: Manifest, gpu: Gpu) -> list[str]:
    """What of today's cases an entry of verified.json doesn't cover: names of binaries, and kinds
    of launches.

    entry, manifest   of devices and binaries of `gpu.arch`. Compiles nothing; takes seconds for all
                      variants.
    """
    from kda_kernels import identity, variants
    from kdabench.checks import binaries

    module = variants.load(variant)
    verified, gaps, named = set(entry.get("binaries", ())), [], []
    for case in verify_cases(variant):
        options = variants.make_options(variant, dict(case.options))
        if module.unsupported(case.problem, options, gpu) is not None:
            continue
        name = binaries.name(case)
        ours = variants.declared(variant).binaries
        digest = manifest.digest(variant, name) if ours else identity.binary(variant, None)
        if digest not in verified:
            gaps.append(f"{variant} {name}")
        named.append((case.problem.kind, identity.launch(variant, case.problem, options, gpu)))
    now, then = launches(named), entry.get("launches", {})
    gaps += [f"{variant} launches of {kind}" for kind in sorted(now) if now[kind] != then.get(kind)]
    return list(dict.fromkeys(gaps))
