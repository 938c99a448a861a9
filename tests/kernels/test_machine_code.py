"""Binaries and launches have names that follow what a GPU does, and nothing else."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kda_kernels import identity, variants, walk
from kda_kernels.device import cubin, gpu, machine_code
from kda_kernels.device.gpu import Gpu
from kda_kernels.problem import Problem
from kdabench.data.measurements import Candidate, Cell
from kdabench.measure import worker

ROOT = Path(__file__).parents[2]
H200 = Gpu("sm_90a", 132)
COMPILED: tuple[tuple[str, str, int, dict[str, Any]], ...] = (
    ("KdaWide", "decode", 1, {}),
    ("KdaWide", "record", 2, {"form": "chunked"}),
    ("KdaStream", "decode", 1, {}),
    ("KdaSplit", "decode", 1, {"split": 8}),
)
"""Small binaries of three variants, two of which share no device code but the blocks."""


def names_in(kernels: Path, cache: Path) -> dict[str, str]:
    """Names of `COMPILED` from a copy of the kernels, in a process of its own; and what the
    variants' sources say."""
    code = f"""
import json
from kda_kernels import variants
from kda_kernels.device.gpu import Gpu
from kda_kernels.problem import Problem
found = {{name: variants.digest(name) for name in variants.NAMES}}
for variant, kind, tokens, options in {COMPILED!r}:
    module = variants.load(variant)
    compiled = module.compile(Problem(kind, 1, 12, tokens), module.Options(**options), Gpu("sm_90a", 132))
    found[f"{{variant}} {{kind}}"] = compiled.binary.digest
print(json.dumps(found))
"""
    environment = os.environ | {"PYTHONPATH": str(kernels), "KDA_KERNELS_CACHE": str(cache)}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.fixture(scope="module")
def today(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return names_in(ROOT / "kernels", tmp_path_factory.mktemp("cubin"))


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copytree(
        ROOT / "kernels",
        tmp_path / "kernels",
        ignore=shutil.ignore_patterns("__pycache__", "*.pyc"),
    )
    return tmp_path / "kernels"


def edit(path: Path, pattern: str, new: str) -> None:
    text, count = re.subn(pattern, new, path.read_text(), count=1)
    assert count == 1, f"{path}: nothing like {pattern}"
    path.write_text(text)


def test_comments_and_docstrings_change_no_name_anywhere(
    copy: Path, tmp_path: Path, today: dict[str, str]
) -> None:
    for path in copy.rglob("*.py"):
        text = path.read_text()
        text = re.sub(r'^("""|    """)(?=\w)', r"\1In other words: ", text, flags=re.M)
        path.write_text(
            text.replace("\nfrom __future__", "\n# A remark.\n\nfrom __future__", 1)
            + "\n# The end.\n"
        )
    assert names_in(copy, tmp_path / "cache") == today


def test_one_instruction_changes_the_binaries_that_it_touches_and_no_other(
    copy: Path, tmp_path: Path, today: dict[str, str]
) -> None:
    wrong = "blocks.normalizers(q, k, A.eps"
    edit(copy / "kda_kernels/variants/wide.py", r"blocks\.normalizers\(q, k, A\.scale", wrong)
    found = names_in(copy, tmp_path / "cache")
    assert {key for key in today if found[key] != today[key]} == {"KdaWide", "KdaWide decode"}


def test_another_symbol_is_the_same_binary(
    copy: Path, tmp_path: Path, today: dict[str, str]
) -> None:
    path = copy / "kda_kernels/variants/wide.py"
    path.write_text(path.read_text().replace("kda_wide_", "kda_broad_"))
    found = names_in(copy, tmp_path / "cache")
    assert {key for key in today if found[key] != today[key]} == {"KdaWide"}


# --- images ---


def elf(sections: dict[str, bytes], no_bits: dict[str, int] | None = None) -> bytes:
    """An ELF file with these sections."""
    no_bits = no_bits or {}
    names, places = b"\0", []
    for name in [*sections, *no_bits, ".shstrtab"]:
        places.append(len(names))
        names += name.encode() + b"\0"
    body, headers = b"", [b"\0" * 64]
    for place, content in zip(places, [*sections.values(), *no_bits.values(), names], strict=True):
        data = content if isinstance(content, bytes) else b""
        size = len(data) if isinstance(content, bytes) else content
        kind = 1 if isinstance(content, bytes) else 8
        headers.append(
            struct.pack("<IIQQQQIIQQ", place, kind, 0, 0, 64 + len(body), size, 0, 0, 1, 0)
        )
        body += data
    table = 64 + len(body)
    head = b"\x7fELF\x02\x01" + b"\0" * 34 + struct.pack("<Q", table) + b"\0" * 10
    head += struct.pack("<HHH", 64, len(headers), len(headers) - 1)
    return head + body + b"".join(headers)


PLAIN = {
    ".text.kernel": b"code",
    ".nv.constant0.kernel": b"constants",
    ".nv.info.kernel": b"facts",
    ".symtab": b"a",
}


def name(
    sections: dict[str, bytes],
    shared: int = 64,
    parameters: tuple[str, ...] = (".u64",),
    registers: int = 40,
) -> str:
    image = elf(sections, {".nv.shared.kernel": shared})
    return machine_code.digest("sm_90a", image, parameters, (128, 1, registers, 0, 1024))


def test_symbol_and_notes_are_no_part_of_the_name() -> None:
    renamed = {key.replace("kernel", "other"): value for key, value in PLAIN.items()}
    assert name(renamed) == name(PLAIN)
    assert name(PLAIN | {".symtab": b"b", ".note.nv.tkinfo": b"made by"}) == name(PLAIN)
    assert name(dict(reversed(PLAIN.items()))) == name(PLAIN)


@pytest.mark.parametrize("section", [".text.kernel", ".nv.constant0.kernel", ".nv.info.kernel"])
def test_what_runs_is_the_name(section: str) -> None:
    assert name(PLAIN | {section: b"other"}) != name(PLAIN)


def test_shared_memory_parameters_and_registers_are_part_of_it() -> None:
    names = {
        name(PLAIN),
        name(PLAIN, shared=65),
        name(PLAIN, parameters=(".u32",)),
        name(PLAIN, registers=41),
    }
    assert len(names) == 4


def test_an_image_that_is_none() -> None:
    with pytest.raises(ValueError, match="no 64-bit little-endian ELF"):
        machine_code.digest("sm_90a", b"#!/bin/sh", (), ())


# --- launches ---


def launch(variant: str, problem: Problem, gpu: Gpu = H200, **options: Any) -> str:
    identity.launch.cache_clear()
    return identity.launch(variant, problem, variants.make_options(variant, options), gpu)


STEP = Problem("record", 7, 12, 4)


def test_a_launch_is_of_sizes_attributes_and_places() -> None:
    same = launch("KdaStream", STEP)
    assert same == launch("KdaStream", STEP)
    others = [
        launch("KdaStream", Problem("record", 8, 12, 4)),
        launch("KdaStream", Problem("record", 7, 8, 4)),
        launch("KdaStream", STEP, pdl=True),
        launch("KdaStream", Problem("record", 7, 12, 4, conv_layout="window-major")),
        launch("KdaStream", Problem("record", 7, 12, 4, lower_bound=-4.0)),
        launch("KdaStream", Problem("record", 70, 12, 4), Gpu("sm_90a", 78)),
    ]
    assert len({same, *others}) == 1 + len(others)
    many = Problem("record", 100, 12, 4)
    assert launch("KdaStream", many) != launch("KdaStream", many, most_items=1)


def test_another_division_is_another_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    of = Problem("record", 100, 12, 4)
    before = launch("KdaWS", of)
    schedule = walk.schedule
    monkeypatch.setattr(
        walk, "schedule", lambda items, ctas, least=1: schedule(items, ctas // 2, least)
    )
    assert launch("KdaWS", of) != before


@pytest.mark.parametrize("kind", ["commit", "flush"])
def test_a_commit_has_launches_too(kind: Any) -> None:
    of = Problem(kind, 7, 12, 4, 2, "fp32", "mix")
    assert launch("KdaCommit", of) != launch("KdaCommit", of, heads_per_cta=1)


def test_launches_are_recorded_without_a_binary_or_a_gpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KDA_KERNELS_CACHE", str(tmp_path))
    launch("KdaWide", STEP, form="chunked")
    assert list(tmp_path.iterdir()) == []


def test_outside_a_recording_nothing_is_recorded() -> None:
    with cubin.recorded() as launches:
        operands = identity.standard(STEP)
        module = variants.load("KdaWide")
        module.launch(module.compile(STEP, module.Options(form="chunked"), H200), operands, 0)
    assert [found.grid for found in launches] == [(12, 7, 1)]
    assert cubin._recording.get() is None


def test_triton_is_named_by_its_sources() -> None:
    binary, _, launched = identity.code(
        "stock", None, STEP, variants.make_options("stock", {}), H200
    ).partition("-")
    assert binary == launched
    assert (
        variants.digest("stock") == f"sha256:{binary}{variants.digest('stock')[7 + len(binary) :]}"
    )


def test_a_worker_names_nothing_where_operands_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such a candidate has failed already; its outcome must still be told."""
    monkeypatch.setattr(gpu, "current_gpu", lambda: H200)
    benches: Any = SimpleNamespace(extra={})
    cell, compiled = Cell("decode", 4, 12), SimpleNamespace(binary=SimpleNamespace(digest="0" * 16))
    other = Candidate.of(
        "KdaWide", {"conv_weight_dtype": "bf16"}
    )  # where a cell's weights are FP32
    assert worker._Benches.code(benches, cell, other, compiled) == ""
    assert worker._Benches.code(benches, cell, Candidate.of("KdaWide", {}), compiled).startswith(
        "0" * 16 + "-"
    )
