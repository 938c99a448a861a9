#!/usr/bin/env python3
"""Carry measurements that name kernels by their sources over to names of machine code, once, with
proof.

    python scripts/carry_over.py OLD [--results results] [--jobs N]

OLD is a checkout of the revision whose sources made the measurements. For the files of schema 1 in
RESULTS/<device> and its verified.json, in this order:

 1. the digest of sources in every measurement and certificate is that of OLD's sources: OLD is what
    ran;
 2. every binary that was measured or verified is compiled from OLD and from these sources: the
    machine code, parameters and resources are the same;
 3. what the Triton chain is written in is the same, prose and places aside;
 4. every launch that was measured or verified is recorded from OLD and from these sources: grid,
    threads, attributes and the value of every parameter are the same.

Then the files are rewritten with what `kda_kernels.identity` names; else nothing is, and what
differs is told. Needs no GPU, but the compiler that the measurements were made with.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, fields
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
NOTHING_RAN = ("unsupported", "compile_error")
SHOWN = 20

Asked = tuple[str, str, str]
"""Variant, options and problem, the latter two as canonical JSON."""


# --- what either tree does, in processes whose path leads to it ---


def facts(work: tuple[list[Asked], str, int]) -> list[Any]:
    """Of each asked: the binary's name and what a launch asks of the driver; None if the variant
    refuses.

    Works on the modules of this revision and of OLD alike.
    """
    asked, arch, sms = work
    try:
        from kda_kernels.device import cubin
        from kda_kernels.device.gpu import Gpu
        from kda_kernels.problem import Problem
    except ImportError:  # OLD
        from kda_kernels.gpu import Gpu  # type: ignore[import-not-found, no-redef]
        from kdabench.problem import Problem  # type: ignore[import-not-found, no-redef]

        from kda_kernels import cubin  # type: ignore[attr-defined, no-redef]
    from kda_kernels import variants

    name = runpy.run_path(str(ROOT / "kernels/kda_kernels/device/machine_code.py"))["digest"]
    found: list[Any] = []
    for variant, options, sizes in asked:
        problem, options = (
            Problem(**json.loads(sizes)),
            variants.make_options(variant, json.loads(options)),
        )
        module, gpu = variants.load(variant), Gpu(arch, sms)
        if module.unsupported(problem, options, gpu) is not None:
            found.append(None)
            continue
        launched = _launched(cubin, module, problem, options, gpu)
        taken: Any = module.compile(problem, options, gpu).binary
        named = name(
            taken.arch, taken.image, taken.parameters, tuple(asdict(taken.resources).values())
        )
        found.append((named, launched))
    return found


def _launched(cubin: Any, module: Any, problem: Any, options: Any, gpu: Any) -> list[Any]:
    """Grid, threads, cluster, values with operands by name, and pdl, of every launch over
    stand-ins."""
    told: list[Any] = []

    class Recorder:
        def __init__(self, shape: tuple[int, int]) -> None:
            self.shape = shape

        def launch(self, grid: Any, values: Any, stream: int, pdl: bool) -> None:
            told.append([list(grid), *self.shape, list(values), pdl])

    class Hollow:
        """A binary without code."""

        def __init__(self, threads: int, cluster: int) -> None:
            self.shape = (threads, cluster)

    kept = cubin.build, cubin.launcher
    cubin.build = lambda *_, threads, cluster, **__: Hollow(threads, cluster)
    cubin.launcher = lambda binary: Recorder(binary.shape)
    try:
        operands, names = _stand_ins(problem, options)
        module.launch(module.compile(problem, options, gpu), operands, 0)
    finally:
        cubin.build, cubin.launcher = kept
    return [[*before, [names.get(v, v) for v in values], pdl] for *before, values, pdl in told]


def _stand_ins(problem: Any, options: Any) -> tuple[Any, dict[int, str]]:
    """Operands without memory, of the tree's own makers' layout, at addresses by name."""
    import torch

    from kda_kernels import operands as kinds

    class Placed(torch.Tensor):
        address = 0

        def data_ptr(self) -> int:
            return self.address

    names: dict[int, str] = {}

    def place(name: str, tensor: Any) -> Any:
        placed = tensor.as_subclass(Placed)
        placed.address = (len(names) + 1) << 40
        names[placed.address] = name
        return placed

    with torch.device("meta"):
        made = _laid_out(problem, getattr(options, "align", False))
    kind = kinds.CommitOperands if problem.kind in ("commit", "flush") else kinds.StepOperands
    placed = {
        n: tuple(place(n, t) for t in v) if isinstance(v, tuple) else place(n, v)
        for n, v in made.items()
    }
    absent = {f.name: None for f in fields(kind) if f.name.startswith("boundary")}
    return kind(**(absent | placed)), names


def _laid_out(problem: Any, align: bool) -> dict[str, Any]:
    """Tensors of a step or a commit by operand, as docs/operation.md lays them out."""
    import torch

    bf16, f32, i32 = torch.bfloat16, torch.float32, torch.int32
    state = f32 if problem.state_dtype == "fp32" else bf16
    R, H, Q, L = problem.requests, problem.heads, problem.tokens, problem.layers
    if problem.kind in ("commit", "flush"):
        pages, row, table = 1 + R * (1 + (problem.kind == "commit") + align), (R,), (L, 2)
        found: dict[str, Any] = {
            "states": tuple(torch.empty(pages, H, 128, 128, dtype=state) for _ in range(L)),
            "corrections": tuple(torch.empty(R, H, Q, 128, dtype=f32) for _ in range(L)),
            "key_gates": tuple(torch.empty(R, H, Q, 256, dtype=bf16) for _ in range(L)),
            "A_log": torch.empty(L, H),
            "dt_bias": torch.empty(L, H, 128),
        }
        boundary = ["boundary_length", "boundary_slot"] if align else []
        plan = ["source", "length", "destination", "record_rows", *boundary]
        found |= {name: torch.empty(row, dtype=i32) for name in plan}
        tables = ("state_table", "corrections_table", "key_gates_table")
        return found | {name: torch.empty(table, dtype=torch.int64) for name in tables}
    dtypes = dict.fromkeys(("projected", "conv_state", "f_b", "out", "key_gates"), bf16) | {
        "state": state
    }
    dtypes |= dict.fromkeys(("slots", "accepted", "record_rows", "pending"), i32)
    found = {}
    for name, shape in problem.operand_shapes.items():
        found[name] = torch.empty(shape, dtype=dtypes.get(name, f32))
        if name == "conv_state" and problem.conv_layout == "window-major":
            found[name] = torch.empty(shape[0], shape[2], shape[1], dtype=bf16).transpose(1, 2)
    return found


def _enter(root: Path) -> None:
    sys.path[:0] = [str(root), str(root / "kernels")]
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def all_facts(
    root: Path, asked: Sequence[Asked], arch: str, sms: int, jobs: int
) -> dict[Asked, Any]:
    """`facts` from a tree, in `jobs` processes. Raises whatever the tree's compilation raises."""
    chunks = [list(asked[i : i + 16]) for i in range(0, len(asked), 16)]
    found: dict[Asked, Any] = {}
    with ProcessPoolExecutor(jobs, get_context("spawn"), _enter, (root,)) as pool:
        for chunk, answers in zip(
            chunks, pool.map(facts, [(c, arch, sms) for c in chunks]), strict=True
        ):
            found |= dict(zip(chunk, answers, strict=True))
            print(f"\r{len(found)}/{len(asked)} of {root}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return found


# --- what is carried over ---


def old_digests(old: Path, names: Sequence[str]) -> dict[str, str]:
    """By variant: the digest of OLD's sources, as OLD computes it."""
    code = "from kda_kernels import variants; import json, sys; "
    code += "found = {n: variants.digest(n) for n in sys.argv[1:]}; "
    code += "print(json.dumps([found, variants.spec_dict(variants.load('stock').Spec())]))"
    paths = [str(old), str(old / "kernels"), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths).rstrip(os.pathsep)}
    done = subprocess.run(
        [sys.executable, "-c", code, *names],
        env=environment,
        cwd=old,
        check=True,
        capture_output=True,
        text=True,
    )
    found, defaults = json.loads(done.stdout)
    assert defaults == variants.options_dict(variants.load("stock").Options()), (
        f"other defaults of stock: {defaults}"
    )
    return dict(found)


def asked_of(line: Mapping[str, Any]) -> Asked:
    """What a measurement ran."""
    names = (
        "kind",
        "requests",
        "heads",
        "tokens",
        "layers",
        "state_dtype",
        "pending",
        "conv_layout",
    )
    return (
        line["variant"],
        canonical(line["spec"]),
        canonical({name: line["cell"][name] for name in names}),
    )


def canonical(value: object) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def ran(line: Mapping[str, Any]) -> bool:
    return line["status"] not in NOTHING_RAN


def verified_cases(variant: str) -> Iterator[Asked]:
    """What OLD verified: the cases are those of today."""
    for case in verify_cases(variant):
        sizes = {key: value for key, value in asdict(case.problem).items() if key != "lower_bound"}
        yield (variant, canonical(dict(case.options)), canonical(sizes))


def differences(old: Mapping[Asked, Any], new: Mapping[Asked, Any]) -> list[str]:
    """One line for each that OLD and this revision don't do alike."""
    found = []
    for asked, was in old.items():
        now = new[asked]
        if was != now:
            parts = ("binary", "launch") if was and now else ("support",)
            what = [p for p, a, b in zip(parts, was or [was], now or [now], strict=False) if a != b]
            found.append(f"another {' and '.join(what)}: {' '.join(asked)}")
    return found


def carry(folder: Path, old: Path, jobs: int) -> list[str]:
    """Carry a device's files over. Returns what stands against it; then no file has changed."""
    files = {
        path: list(map(json.loads, path.read_text().splitlines()))
        for path in sorted(folder.glob("*.jsonl"))
    }
    lines = [line for found in files.values() for line in found]
    if {line["schema"] for line in lines} != {1}:
        return [f"{folder}: measurements of schema 1 are expected"]
    verified = json.loads((folder / "verified.json").read_text())
    arch, sms = binaries.arch_of(verified["env"]), verified["env"]["sms"]

    digests = old_digests(old, variants.NAMES)
    stale = {
        line["variant"]
        for line in lines
        if ran(line) and line["kernel_digest"] != digests[line["variant"]]
    }
    stale |= {
        name
        for name in variants.NAMES
        if verified["variants"][name]["kernel_digest"] != digests[name]
    }
    if stale:
        return [
            f"{name}: was not measured or verified from the sources of {old}"
            for name in sorted(stale)
        ]

    then = variants.launched_by(
        [old / "kernels/kda_kernels" / name for name in ("stock.py", "stock_kernels.py")]
    )
    today = variants.launched_by(
        [sources.path_of(name) for name in variants.load("stock").WRITTEN_IN]
    )
    if others := then.items() ^ today.items():
        return [
            f"stock: another definition of {name}" for name in sorted({name for name, _ in others})
        ]

    ours = [name for name in variants.NAMES if variants.declared(name).binaries]
    asked = {asked_of(line) for line in lines if ran(line) and line["variant"] in ours}
    cases = {name: list(verified_cases(name)) for name in ours}
    wanted = sorted(asked.union(*cases.values()))
    new, was = (all_facts(root, wanted, arch, sms, jobs) for root in (ROOT, old))
    if against := differences(was, new):
        return against
    names = {what for found in new.values() if found for what in [found[0]]}
    print(f"{len(wanted)} launches and {len(names)} binaries are the same from {old} and from here")

    gpu = Gpu(arch, sms)

    def code(asked: Asked) -> str:
        variant, options, sizes = asked
        problem, options = (
            Problem(**json.loads(sizes)),
            variants.make_options(variant, json.loads(options)),
        )
        binary = identity.binary(variant, None) if variant not in ours else new[asked][0]
        return f"{binary}-{identity.launch(variant, problem, spec, gpu)}"

    codes: dict[Asked, str] = {}
    for path, found in files.items():
        for line in found:
            del line["kernel_digest"]
            if ran(line) and (what := asked_of(line)) not in codes:
                codes[what] = code(what)
            line |= {
                "schema": measurements.SCHEMA,
                "code": codes[asked_of(line)] if ran(line) else "",
            }
        measurements.write_atomic(path, "".join(canonical(line) + "\n" for line in found))
    for name in variants.NAMES:
        entry = verified["variants"][name]
        del entry["kernel_digest"]
        passed = [
            a
            for a in cases.get(name) or verified_cases(name)
            if name not in ours or new[a] is not None
        ]
        named = [code(a).split("-") for a in passed]
        assert len(passed) == entry["passed"], (
            f"{name}: {entry['passed']} cases passed, {len(passed)} are known"
        )
        kinds = [json.loads(sizes)["kind"] for _, _, sizes in passed]
        entry |= {"binaries": sorted({binary for binary, _ in named})}
        entry |= {
            "launches": verify.launches(zip(kinds, (launch for _, launch in named), strict=True))
        }
    measurements.write_atomic(
        folder / "verified.json", json.dumps(verified, indent=1, sort_keys=True) + "\n"
    )
    return []


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("old", type=Path, metavar="OLD")
    parser.add_argument("--results", type=Path, default=ROOT / "results")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    status = 0
    for folder in sorted({path.parent for path in given.results.glob("*/*.jsonl")}):
        against = carry(folder, given.old.resolve(), given.jobs)
        for text in against[:SHOWN]:
            print(text, file=sys.stderr)
        if against:
            print(f"{folder}: {len(against)} differences; nothing was changed", file=sys.stderr)
            status = 1
        else:
            print(f"{folder}: carried over")
    return status


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]
    from kda_kernels import identity, variants
    from kda_kernels.cases import verify_cases
    from kda_kernels.device import sources
    from kda_kernels.device.gpu import Gpu
    from kda_kernels.problem import Problem
    from kdabench.checks import binaries, verify
    from kdabench.data import measurements

    sys.exit(main())
