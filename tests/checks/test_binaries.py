"""The manifest of binaries: written, read, compared; and the committed one against today's
sources."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from kda_kernels import build, variants
from kda_kernels.case import Case
from kda_kernels.device import cubin
from kda_kernels.problem import Problem
from kdabench.checks import binaries
from kdabench.checks.binaries import Manifest, ManifestError
from kdabench.data.measurements import Candidate, Cell
from support import synthetic

ROOT = Path(__file__).parents[2]
COMMITTED = sorted((ROOT / binaries.FOLDER).glob("*.json"))
OURS = [name for name in variants.NAMES if variants.declared(name).binaries]
SAMPLE = 40
"""Binaries that are compiled from today's sources in every run: some 40 s on two cores."""


def manifest(**changes: Any) -> Manifest:
    plain = {
        "arch": "sm_90a",
        "compiler": "4.8.1 cu13",
        "written": {"KdaWide": "sha256:0"},
        "binaries": {
            "KdaWide": {"decode q1 fp32 dim-first": "0a", "decode q1 bf16 dim-first": "0b"}
        },
    }
    return Manifest(**plain | changes)


def row(
    name: str, digest: str, reason: str | None = None, refused: bool = False
) -> dict[str, build.Row]:
    case = Case("KdaWide", (), Problem("decode", 1, 12))
    return {name: build.Row(case, "sm_90a", reason, digest=digest, refused=refused)}


def test_written_and_read(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "sm_90a.json"
    binaries.write(manifest(), path)
    assert binaries.read(path) == manifest()
    text = path.read_text()
    binaries.write(binaries.read(path), path)
    assert path.read_text() == text
    assert '"decode q1 bf16 dim-first": "0b",\n' in text, "a binary is a line"


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "[]",
        "{}",
        '{"arch": "sm_90a"}',
        json.dumps(vars(manifest()) | {"binaries": {"KdaWide": {"a": 1}}}),
    ],
)
def test_what_is_no_manifest_is_refused_by_name(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "sm_90a.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ManifestError, match=r"sm_90a\.json: no manifest of binaries"):
        binaries.read(path)


def test_a_comparison_names_what_a_change_touches() -> None:
    rows = {
        "KdaWide": row("decode q1 fp32 dim-first", "0c")
        | row("decode q1 bf16 dim-first", "0b")
        | row("spec q2 fp32 dim-first", "0d")
        | row("spec q8 fp32 dim-first", "", "unsupported: too many", refused=True)
        | row("record q8 fp32 dim-first", "", "DSLError: no")
    }
    found = binaries.compare(manifest(), rows)
    assert found.same == 2, "an unsupported case has no binary, then and now"
    assert found.changed == ("KdaWide decode q1 fp32 dim-first",)
    assert found.missing == ("KdaWide spec q2 fp32 dim-first",)
    assert found.failed == (("KdaWide record q8 fp32 dim-first", "DSLError: no"),)
    assert not found.holds
    assert binaries.compare(manifest(), {"KdaWide": row("decode q1 bf16 dim-first", "0b")}).holds


def test_a_binary_that_is_refused_today_is_another_one() -> None:
    gone = {"KdaWide": row("decode q1 fp32 dim-first", "", "unsupported: no more", refused=True)}
    assert binaries.compare(manifest(), gone).changed == ("KdaWide decode q1 fp32 dim-first",)


def test_names_are_of_what_decides_a_binary() -> None:
    of = Problem("record", 7, 24, 8)
    plain = Case("KdaWide", (("form", "chunked"), ("gate_mode", 0)), of)
    assert binaries.name(plain) == "record q8 fp32 dim-first form=chunked"
    other = Case("KdaWide", (("form", "chunked"), ("pdl", False)), Problem("record", 1, 12, 8))
    assert binaries.name(other) == binaries.name(plain)
    assert binaries.name(
        Case("KdaWide", (("form", "chunked"), ("gate_mode", 1)), of)
    ) != binaries.name(plain)


def test_what_was_measured_is_named_too() -> None:
    cell, candidate = (
        Cell("record", 7, 24, 8),
        Candidate.of("KdaWide", {"form": "chunked", "evict": True}),
    )
    measured = [
        synthetic.measurement(cell, candidate, [5.0]),
        synthetic.measurement(
            cell,
            Candidate.of("KdaWide", {"evict": True}),
            (),
            status="unsupported",
            reason="no",
            code="",
        ),
    ]
    extra = binaries.named("KdaWide", measured).keys() - binaries.named("KdaWide").keys()
    assert extra == {"record q8 fp32 dim-first evict=True form=chunked"}
    assert binaries.named("stock", measured) == {}


def test_a_manifest_is_made_of_rows_and_keeps_the_variants_that_were_not_asked_for() -> None:
    known = manifest(
        compiler=cubin.toolchain(),
        written={"KdaWS": "sha256:1"},
        binaries={"KdaWS": {"decode": "0e"}},
    )
    rows = {"KdaWide": row("decode q1 fp32 dim-first", "0c") | row("record", "", "DSLError: no")}
    made, failed = binaries.made("sm_90a", rows, known)
    assert made.binaries == {
        "KdaWS": {"decode": "0e"},
        "KdaWide": {"decode q1 fp32 dim-first": "0c"},
    }
    assert made.written == {"KdaWS": "sha256:1", "KdaWide": variants.digest("KdaWide")}
    assert failed == [("KdaWide record", "DSLError: no")]
    of_another_compiler = manifest(compiler="4.8.0 cu12")
    assert binaries.made("sm_90a", rows, of_another_compiler)[0].binaries.keys() == {"KdaWide"}


def test_a_sample_is_the_same_each_time_and_of_every_variant() -> None:
    wanted = {name: binaries.named(name) for name in OURS}
    taken = binaries.sample(wanted, SAMPLE)
    assert taken == binaries.sample(wanted, SAMPLE)
    assert all(taken[name] for name in OURS)
    assert SAMPLE * 0.8 <= sum(map(len, taken.values())) <= SAMPLE * 1.5


# --- the committed manifests ---


def test_there_is_a_manifest() -> None:
    assert {"sm_90a", "sm_100a"} <= {path.stem for path in COMMITTED}


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_sources_say_what_they_said_when_the_manifest_was_made(path: Path) -> None:
    found = binaries.read(path)
    assert found.arch == path.stem
    assert found.binaries.keys() == set(OURS)
    stale = binaries.unproven(found, OURS)
    assert stale == [], (
        f"kdabench binaries --check --arch {found.arch}; then, if that is meant, without --check"
    )


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_every_binary_that_is_verified_or_compiled_is_named(path: Path) -> None:
    found = binaries.read(path)
    for name in OURS:
        supported = {
            key for key, case in binaries.named(name).items() if _supported(case, found.arch)
        }
        assert supported <= found.binaries[name].keys()


def _supported(case: Case, arch: str) -> bool:
    from kda_kernels.device.gpu import Gpu

    options = variants.make_options(case.variant, dict(case.options))
    return (
        variants.load(case.variant).unsupported(case.problem, options, Gpu(arch, build.SMS)) is None
    )


def test_a_sample_of_the_binaries_is_what_the_manifest_says() -> None:
    found = binaries.read(binaries.path_of("sm_90a", ROOT / binaries.FOLDER))
    if found.compiler != cubin.toolchain():
        pytest.skip(f"the manifest is of compiler {found.compiler}, this is {cubin.toolchain()}")
    wanted = binaries.sample({name: binaries.named(name) for name in OURS}, SAMPLE)
    compared = binaries.compare(found, binaries.compiled("sm_90a", wanted, 2))
    assert compared.holds, compared
    assert compared.same >= SAMPLE * 0.8
