"""What variants say about themselves, and what the standard cases make of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kda_kernels import cases, variants
from kda_kernels.device.gpu import ARCHS, Gpu
from kda_kernels.problem import KINDS, Kind, Problem
from kda_kernels.variants import contract

WRITTEN = '''
KERNELS = ("kda_made_up",)
KINDS = ("decode", "record")
RULE = "wide_items"
TRIED = {"ctas": (None, 1, 2)}
GIVEN = ("window",)

class Options:
    """Choices."""

    form: Literal["plain", "chunked"] = "plain"
    ctas: int | None = None
    rows: int = HEAD_DIM
    window: int | None = None
    pdl: bool = False
'''


def read(folder: Path, text: str) -> contract.Declaration:
    (folder / "made_up.py").write_text(text)
    return contract.read(folder / "made_up.py")


def test_a_declaration_is_read_from_text(tmp_path: Path) -> None:
    found = read(tmp_path, WRITTEN)
    assert (found.kernels, found.kinds, found.rule, found.streams) == (
        ("kda_made_up",),
        ("decode", "record"),
        "wide_items",
        False,
    )
    assert found.defaults == {
        "form": "plain",
        "ctas": None,
        "rows": 128,
        "window": None,
        "pdl": False,
    }
    assert [option.type for option in found.options.values()] == [str, int, int, int, bool]
    assert found.values_to_try("form") == ("plain", "chunked")
    assert found.values_to_try("pdl") == (False, True)
    assert found.values_to_try("ctas") == (None, 1, 2)
    with pytest.raises(
        ValueError, match="option rows counts something: TRIED must list values, or GIVEN name it"
    ):
        found.values_to_try("rows")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('KINDS = ("decode", "record")', "", "KINDS: missing"),
        ('"record")', '"recrod")', "KINDS: 'recrod' is not one of decode"),
        ('"wide_items"', '"width"', "RULE: 'width' is not one of schedule"),
        ('TRIED = {"ctas"', 'TRIED = {"cats"', "TRIED: 'cats' is not one of form, ctas"),
        ('GIVEN = ("window",)', 'GIVEN = ("widow",)', "GIVEN: 'widow'"),
        ("(None, 1, 2)", "(None, *range(3))", "TRIED: .*: must be a literal"),
        ("class Options", "class Choices", "Options: missing"),
        ("pdl: bool = False", "pdl: bool", "Options: pdl: bool: needs a default"),
        ("pdl: bool = False", "pdl: bool = bool()", "must be a literal"),
        ("int | None = None", "float = 1.0", "Options: ctas: float = 1.0: its type must be int"),
    ],
)
def test_what_is_no_declaration(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in WRITTEN
    with pytest.raises(ValueError, match=message):
        read(tmp_path, WRITTEN.replace(old, new, 1))


@pytest.mark.parametrize("name", variants.NAMES)
def test_text_and_module_declare_the_same(name: str) -> None:
    assert variants.declared(name) == contract.of_module(variants.load(name))


@pytest.mark.parametrize("name", variants.NAMES)
def test_every_option_has_values_to_try_or_is_given(name: str) -> None:
    declared = variants.declared(name)
    for option in declared.options:
        assert option in declared.given or declared.values_to_try(option)
    assert not set(declared.tried) & set(declared.given)
    for option, values in declared.tried.items():
        assert declared.defaults[option] in values


@pytest.mark.parametrize("name", variants.NAMES)
def test_a_variant_takes_the_kinds_that_it_declares_and_no_other(name: str) -> None:
    gpu, declared = Gpu("sm_90a", 132), variants.declared(name)
    module, options = variants.load(name), variants.make_options(name, {})
    for kind in KINDS:
        if kind not in declared.kinds:
            tokens = 1 if kind == "decode" else 2
            problem = Problem(kind, 1, 12, tokens, pending="mix" if kind == "replay" else None)
            assert f"kind={kind}" in str(module.unsupported(problem, options, gpu)).replace(
                "kind replay", "kind=replay"
            )


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("name", variants.NAMES)
def test_every_declared_kind_is_verified(name: str, arch: str) -> None:
    gpu, module = Gpu(arch, 132), variants.load(name)
    specs = {
        c.options: variants.make_options(name, dict(c.options)) for c in cases.verify_cases(name)
    }
    supported = [
        c
        for c in cases.verify_cases(name)
        if module.unsupported(c.problem, specs[c.options], gpu) is None
    ]
    assert cases.unverified_kinds(name, supported) == ()


def test_a_kind_that_no_supported_case_is_of_is_named() -> None:
    every = list(cases.verify_cases("KdaWide"))
    kinds: tuple[Kind, ...] = ("decode", "spec")
    assert cases.unverified_kinds("KdaWide", every) == ()
    assert cases.unverified_kinds("KdaWide", [c for c in every if c.problem.kind in kinds]) == (
        "record",
    )
    assert cases.unverified_kinds("KdaWide", cases.verify_cases("KdaSplit")) == (
        "decode",
        "spec",
        "record",
    )


COUNTS = {
    "KdaSplit": (482, 1734),
    "KdaWide": (81, 513),
    "KdaStream": (104, 636),
    "KdaWS": (74, 438),
    "KdaFused": (49, 714),
    "KdaFusedWS": (21, 306),
    "KdaCommit": (60, 570),
    "stock": (0, 83),
}
"""Cases to compile and to verify. A change of `forms` that means to change them changes these."""


@pytest.mark.parametrize("name", COUNTS)
def test_no_case_gets_lost(name: str) -> None:
    found = [list(made(name)) for made in (cases.compile_cases, cases.verify_cases)]
    assert tuple(map(len, found)) == COUNTS[name]
    assert [len(set(some)) for some in found] == [len(some) for some in found]


def test_rules_of_policies_find_their_variants() -> None:
    takers = {rule: variants.of_rule(rule) for rule in variants.RULES}
    assert None not in takers.values()
    assert len(set(takers.values())) == len(takers)
    with pytest.raises(KeyError, match="unknown rule 'wide'; known: schedule, ws_items"):
        variants.of_rule("wide")


def test_a_streaming_variant_has_no_option_to_do_without() -> None:
    for name in variants.NAMES:
        assert not (
            variants.declared(name).streams and "streamable" in variants.declared(name).options
        )
    assert variants.streaming() == ("KdaWS", "KdaStream", "KdaFusedWS")
