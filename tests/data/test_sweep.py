from __future__ import annotations

import subprocess
import sys
from dataclasses import fields
from itertools import product
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kda_kernels import variants
from kda_kernels.device.gpu import Gpu
from kdabench.cli.inputs import known_options
from kdabench.data import sweep
from kdabench.data.measurements import Candidate
from kdabench.data.sweep import SweepError, wave_requests

SWEEPS = Path(__file__).parents[2] / "sweeps"
KNOWN: dict[str, dict[str, type]] = {
    "stock": {"pdl": bool},
    "KdaSplit": {"split": int, "staging": str, "gate_mode": int, "pdl": bool},
    "KdaCommit": {"pdl": bool},
}
SMS = 100  # of no real device
MINIMAL = """
question = "Does it load?"
variants = ["stock", "KdaSplit"]

[[cells]]
kind = "decode"
requests = [1, 8]
heads = 12
"""


def load(tmp_path: Path, text: str, sms: int | None = SMS) -> sweep.Sweep:
    path = tmp_path / "a.toml"
    path.write_text(text, encoding="utf-8")
    return sweep.load(path, KNOWN, sms)


def test_minimal(tmp_path: Path) -> None:
    found = load(tmp_path, MINIMAL)
    assert (found.stem, found.question, found.processes) == ("a", "Does it load?", 1)
    assert [(c.kind, c.heads, c.requests, c.tokens, c.context) for c in found.cells] == [
        ("decode", 12, 1, 1, "layer"),
        ("decode", 12, 8, 1, "layer"),
    ]
    assert found.candidates == (Candidate.of("stock", {}), Candidate.of("KdaSplit", {}))


def test_specs_are_a_product_and_tables_add_up(tmp_path: Path) -> None:
    tables = "[[options.KdaSplit]]\nsplit = [1, 2]\npdl = [false, true]\n[[options.KdaSplit]]\nsplit = 4\n"
    options = [
        c.options for c in load(tmp_path, MINIMAL + tables).candidates if c.variant == "KdaSplit"
    ]
    assert options == [
        *({"split": s, "pdl": p} for s in (1, 2) for p in (False, True)),
        {"split": 4},
    ]


def test_cells_of_several_tables_are_joined_and_sorted(tmp_path: Path) -> None:
    more = '[[cells]]\nkind = ["decode"]\nrequests = [8, 2]\nheads = [24, 12]\n'
    assert [(c.heads, c.requests) for c in load(tmp_path, MINIMAL + more).cells] == [
        (12, 1), (12, 2), (12, 8), (24, 2), (24, 8)]  # fmt: skip


def test_digest_is_of_what_is_measured(tmp_path: Path) -> None:
    digest = load(tmp_path, MINIMAL).digest
    assert load(tmp_path, MINIMAL.replace("Does it load?", "Does it still?")).digest == digest
    assert load(tmp_path, MINIMAL.replace("[1, 8]", "[8, 1]")).digest == digest
    assert load(tmp_path, MINIMAL.replace("[1, 8]", "[1, 9]")).digest != digest
    assert load(tmp_path, "processes = 2" + MINIMAL).digest != digest


@pytest.mark.parametrize(
    ("heads", "splits", "sms", "expected"),
    [
        (12, [1], 132, [10, 11, 12, 21, 22, 23]),
        (12, [8], 132, [1, 2, 3]),
        (12, [4], 132, [2, 3, 5, 6]),
        (200, [1], 132, [1, 2]),
    ],
)
def test_wave_requests(heads: int, splits: list[int], sms: int, expected: list[int]) -> None:
    assert wave_requests(heads, splits, sms, 1, 256) == expected


def test_more_waves_of_items_but_not_of_splits() -> None:
    two, four = (set(wave_requests(12, [1, 4], 132, 1, 256, waves)) for waves in (2, 4))
    assert four - two == {32, 33, 34, 43, 44, 45}
    assert set(wave_requests(12, [1, 4], 132, 1, 256, 1)) == {2, 3, 10, 11, 12}


@given(
    heads=st.integers(1, 200),
    split=st.sampled_from([1, 2, 4, 8]),
    sms=st.integers(1, 300),
    hi=st.integers(1, 300),
)
def test_wave_requests_surround_the_waves(heads: int, split: int, sms: int, hi: int) -> None:
    found = wave_requests(heads, [split], sms, 1, hi)
    assert all(1 <= requests <= hi for requests in found)
    for waves in (1, 2):
        last = waves * sms // (heads * split)  # the largest count that still fits
        assert {r for r in (last, last + 1) if 1 <= r <= hi} <= set(found)


def test_waves_need_an_sm_count(tmp_path: Path) -> None:
    text = MINIMAL + "waves = true\n"
    assert [c.requests for c in load(tmp_path, text).cells] == [1, 8]
    assert 8 < load(tmp_path, text.replace("[1, 8]", "[1, 64]")).cells[3].requests < 64
    with pytest.raises(SweepError, match="waves: 2: needs the SM count"):
        load(tmp_path, text, sms=None)


def test_waves_may_be_counted(tmp_path: Path) -> None:
    text = MINIMAL.replace("[1, 8]", "[1, 64]")
    found = [
        {c.requests for c in load(tmp_path, text + f"waves = {waves}\n").cells}
        for waves in ("true", "2", "5")
    ]
    assert found[0] == found[1] < found[2]
    assert {41, 42} <= found[2]


BAD = {
    "colour = 1" + MINIMAL: "colour: 1: unknown key; allowed: question, variants",
    MINIMAL + "colour = 1": "cells[0].colour: 1: unknown key",
    MINIMAL.replace(
        "KdaSplit", "KdaFast"
    ): "variants: 'KdaFast': one of stock, KdaSplit, KdaCommit",
    MINIMAL.replace(
        '"stock", ', '"KdaSplit", '
    ): "variants: 'KdaSplit': a value must not occur twice",
    MINIMAL.replace(
        '["stock", "KdaSplit"]', "[]"
    ): "variants: []: an axis needs at least one value",
    MINIMAL.replace('"Does it load?"', '" "'): "question: ' ': text that says",
    MINIMAL.replace("question", "answer"): "answer: 'Does it load?': unknown key",
    MINIMAL.replace("[1, 8]", "[]"): "cells[0].requests: []: an axis needs at least one value",
    MINIMAL.replace("[1, 8]", "[1, 1.5]"): "cells[0].requests: 1.5: an integer",
    MINIMAL.replace("[1, 8]", "[1, true]"): "cells[0].requests: True: an integer >= 1",
    MINIMAL.replace("[1, 8]", "[1, 1]"): "cells[0].requests: 1: a value must not occur twice",
    MINIMAL.replace("[1, 8]", "[0]"): "cells[0].requests: 0: an integer >= 1",
    MINIMAL.replace("[1, 8]", "[nan]"): "cells[0].requests: nan: an integer",
    MINIMAL.replace("[1, 8]", "{}"): "cells[0].requests: {}: an integer",
    MINIMAL.replace('"decode"', '"dance"'): "cells[0].kind: 'dance': one of decode, spec",
    MINIMAL + "tokens = 4": "tokens=4: kind decode takes exactly 1",
    MINIMAL + "waves = 0": "cells[0].waves: 0: true, false or an integer from 1",
    MINIMAL + "waves = 1.5": "cells[0].waves: 1.5: true, false or an integer from 1",
    MINIMAL + 'l2 = "hot"': "cells[0].l2: 'hot': one of cold, warm",
    MINIMAL + "pending = 1": "pending=1: kind decode has no pending tokens",
    MINIMAL.replace("heads = 12", ""): "cells[0].heads: None: missing",
    MINIMAL.split("[[cells]]")[0]: "cells: None: missing",
    MINIMAL.split("[[cells]]")[0] + "cells = []": "cells: []: at least one table",
    MINIMAL.split("[[cells]]")[0] + "cells = [1]": "cells[0]: 1: a table",
    "processes = 0" + MINIMAL: "processes: 0: an integer >= 1",
    "processes = true" + MINIMAL: "processes: True: an integer >= 1",
    MINIMAL + "[options.KdaFast]": "options.KdaFast: {}: unknown key; allowed: stock, KdaSplit",
    MINIMAL
    + "[options.KdaSplit]\nspilt = 1": "options.KdaSplit.spilt: 1: unknown key; allowed: split, staging",
    MINIMAL
    + "[options.KdaSplit]\nsplit = true": "options.KdaSplit.split: True: a value of type int",
    MINIMAL + "[options.KdaSplit]\npdl = 1": "options.KdaSplit.pdl: 1: a value of type bool",
    MINIMAL + "[options.KdaSplit]\nsplit = 0": "options.KdaSplit.split: 0: an integer >= 1",
    MINIMAL
    + "[options.KdaSplit]\nsplit = []": "options.KdaSplit.split: []: an axis needs at least one value",
    MINIMAL
    + "[[options.KdaSplit]]\nsplit = 1\n[[options.KdaSplit]]\nsplit = 1": "a candidate must not occur twice",
    MINIMAL.replace(
        "[1, 8]", str(list(range(1, 100_002)))
    ): "cells[0]: 100001: at most 100000 cells",
    MINIMAL.replace("[1, 8]", "[1, 8"): "not TOML: ",
    MINIMAL + 'kind = "decode"\nheads = 1': "not TOML: Cannot overwrite a value (at line 9",
}


@pytest.mark.parametrize(("text", "message"), BAD.items(), ids=[m[:40] for m in BAD.values()])
def test_errors_are_one_line_with_key_value_and_rule(
    tmp_path: Path, text: str, message: str
) -> None:
    with pytest.raises(SweepError) as caught:
        load(tmp_path, text)
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(tmp_path / "a.toml"))
    assert "\n" not in str(caught.value)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(SweepError, match=r"none\.toml: cannot be read: No such file"):
        sweep.load(tmp_path / "none.toml", KNOWN)


def loads_or_fails_cleanly(path: Path) -> None:
    message = ""
    try:
        sweep.load(path, KNOWN, SMS)
    except SweepError as error:
        message = str(error)
    assert "\n" not in message


@given(
    st.one_of(
        st.binary(max_size=200),
        st.text(max_size=200).map(lambda t: MINIMAL.encode() + t.encode("utf-8")),
    )
)
def test_any_bytes_load_or_fail_cleanly(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "any.toml"
    path.write_bytes(content)
    loads_or_fails_cleanly(path)


LITERALS = [
    "1",
    "-1",
    "0",
    "1.5",
    "true",
    '"x"',
    '""',
    "[]",
    "[1]",
    "[[1]]",
    "{}",
    "{a=1}",
    "nan",
    "1979-05-27",
    "9" * 30,
]


@given(
    st.sampled_from(
        ["question", "variants", "processes", "cells", "options", *sweep._AXES, "waves"]
    ),
    st.sampled_from(LITERALS),
)
def test_any_value_anywhere_loads_or_fails_cleanly(
    tmp_path_factory: pytest.TempPathFactory, key: str, literal: str
) -> None:
    path = tmp_path_factory.getbasetemp() / "value.toml"
    kept = [line for line in MINIMAL.splitlines() if not line.startswith(key)]
    place = 0 if key in sweep._KEYS else len(kept)
    if key == "cells":
        kept = kept[: kept.index("[[cells]]")]
    path.write_text("\n".join([*kept[:place], f"{key} = {literal}", *kept[place:]]))
    loads_or_fails_cleanly(path)


def standard(name: str) -> sweep.Sweep:
    return sweep.load(SWEEPS / f"{name}.toml", known_options(), SMS)


@pytest.mark.parametrize("name", ["dispatch", "quick", "targets", "commit", "splits", "grid"])
def test_standard_files(name: str) -> None:
    found = standard(name)
    assert found.question.endswith(("?", "."))
    assert found.processes == (1 if name in ("quick", "splits", "grid") else 3)
    layer = {c.kind for c in found.cells if c.context == "layer"}
    assert {c.context for c in found.cells} <= {"layer", "isolated"}
    assert layer == (
        {c.kind for c in found.cells} - {"flush"} if name in ("dispatch", "quick") else set()
    )
    most = (
        150_000 if name == "dispatch" else 80_000
    )  # the larger one is for choosing from: `sweep --adaptive`
    assert len(found.cells) * len(found.candidates) * found.processes < most
    gpu = Gpu("sm_90a", SMS)
    for candidate in found.candidates:
        module = variants.load(candidate.variant)
        options = variants.make_options(candidate.variant, candidate.options)
        reasons = [module.unsupported(cell.problem, options, gpu) for cell in found.cells]
        assert None in reasons, f"{candidate} runs in no cell: {reasons[0]}"


def test_the_dispatch_sweep_covers_the_policy() -> None:
    found = standard("dispatch")
    assert {(c.kind, c.tokens) for c in found.cells} == {
        ("decode", 1), *product(("spec", "record", "replay"), (2, 3, 4, 6, 8)), *product(("flush",), range(2, 9))
    }  # fmt: skip
    requests = {c.requests for c in found.cells if c.heads == 12 and c.kind == "decode"}
    assert {1, 2, 4, 8, 16, 32, 64, 128, 256} < requests
    assert requests >= set(wave_requests(12, [1, 2, 4, 8], SMS, 1, 256, 12))
    splits = {
        (c.options.get("split"), c.options.get("pdl", False))
        for c in found.candidates
        if c.variant == "KdaSplit"
    }
    assert {(split, False) for split in (1, 2, 4, 8)} < splits
    assert any(pdl for _, pdl in splits)


def test_a_recorded_run_finds_the_quick_sweep_in_the_dispatch_sweep() -> None:
    quick, dispatch = standard("quick"), standard("dispatch")
    assert set(quick.candidates) <= set(dispatch.candidates)
    assert set(quick.cells) <= set(dispatch.cells)


def test_commits_fit_into_memory() -> None:
    """Both pages of every item and its records, over all layers, in a 139 GB GPU."""
    page = 32 * 1024
    cells = standard("commit").cells
    sizes = [c.layers * c.items * (2 * page + 1024 * c.tokens) for c in cells]
    assert 50e9 < max(sizes) < 100e9
    items = [c.items for c in cells if c.layers == 1]
    assert (min(items), max(items)) == (12, 24576)


@pytest.mark.parametrize("name", variants.NAMES)
def test_options_are_read_as_python_reads_them(name: str) -> None:
    options = variants.load(name).Options
    hints = get_type_hints(options)
    first = {
        field.name: next(iter(get_args(hints[field.name])), hints[field.name])
        for field in fields(options)
    }
    assert known_options()[name] == {
        key: one if isinstance(one, type) else type(one) for key, one in first.items()
    }
    assert variants.declared(name).defaults == variants.options_dict(
        variants.make_options(name, {})
    )


def test_the_data_modules_import_nothing_heavy() -> None:
    modules = (
        "data.sweep",
        "data.devices",
        "data.provenance",
        "data.measurements",
        "measure.journal",
        "policy.constants",
        "policy.emit",
    )
    code = f"""
import sys
{"".join(f"import kdabench.{m};" for m in modules)}
heavy = {{"torch", "triton", "cutlass", "numpy", "pandas", "jinja2"}} & set(sys.modules)
assert not heavy, heavy
import kdabench.policy.fit
heavy = {{"torch", "triton", "cutlass", "pandas"}} & set(sys.modules)
assert not heavy, heavy
"""
    subprocess.run([sys.executable, "-c", code], check=True)
