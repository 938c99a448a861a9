"""Files of measurements, schema 3."""

from __future__ import annotations

import json
import math
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kda_kernels.problem import CONV_LAYOUTS, STATE_DTYPES
from kdabench.data import exported, measurements, provenance
from kdabench.data.measurements import (
    CONTEXTS,
    INPUTS,
    STATUSES,
    Candidate,
    Cell,
    Measurement,
    MeasurementError,
)
from kdabench.data.provenance import ProvenanceError, ProvenanceWarning
from support import synthetic

ROOT = Path(__file__).parents[2]
CELL = Cell("decode", 4, 12)


@st.composite
def cells(draw: st.DrawFn) -> Cell:
    kind, tokens = draw(
        st.sampled_from([("decode", 1), ("spec", 4), ("record", 8), ("replay", 2), ("commit", 3)])
    )
    pending = draw(st.sampled_from(["mix", 0, tokens])) if kind in ("replay", "commit") else None
    layers = draw(st.integers(1, 100)) if kind == "commit" else 1
    axes = [
        draw(st.sampled_from(words))
        for words in (STATE_DTYPES, CONV_LAYOUTS, CONTEXTS, ("cold", "warm"), INPUTS)
    ]
    requests, heads = draw(st.integers(1, 10**6)), draw(st.integers(1, 200))
    return Cell(kind, requests, heads, tokens, layers, axes[0], pending, *axes[1:])  # type: ignore[arg-type]


@st.composite
def any_measurements(draw: st.DrawFn) -> Measurement:
    status = draw(st.sampled_from(STATUSES))
    sizes = {"ok": (1, 9), "unstable": (0, 9)}.get(status, (0, 0))
    samples = draw(
        st.lists(st.floats(0, 1e12, exclude_min=True), min_size=sizes[0], max_size=sizes[1])
    )
    count = len(samples)
    values = st.one_of(st.integers(-(2**63), 2**63), st.booleans(), st.text())
    return Measurement(
        cell=draw(cells()),
        candidate=Candidate.of(
            draw(st.text(min_size=1)), draw(st.dictionaries(st.text(), values, max_size=3))
        ),
        status=status,
        reason=draw(st.text(min_size=1))
        if status != "ok"
        else draw(st.none() | st.text(min_size=1)),
        process=draw(st.integers(0, 99)),
        samples_us=tuple(samples),
        rounds=tuple(sorted(draw(st.lists(st.integers(0, 999), min_size=count, max_size=count)))),
        sm_clock_mhz=tuple(
            draw(st.lists(st.none() | st.integers(0, 3000), min_size=count, max_size=count))
        ),
        throttled=tuple(draw(st.lists(st.none() | st.booleans(), min_size=count, max_size=count))),
        unique_bytes=draw(st.integers(0, 2**63)),
        code="1-0" if status == "ok" else draw(st.sampled_from(["", "1-0"])),
        env="sha256:0",
    )


def read(text: str) -> list[Measurement]:
    """What a file says, in its order, without what `load` asks of an environment."""
    return exported._Reader("a.jsonl").measurements(text.encode())


def once(found: list[Measurement]) -> list[Measurement]:
    """The first of those that a sweep can't have twice."""
    return list({measurements.measurement_order(m): m for m in reversed(found)}.values())


@given(st.lists(any_measurements(), max_size=5).map(once))
def test_what_is_written_is_read(found: list[Measurement]) -> None:
    text = exported.dumps(found)
    back = read(text)
    assert sorted(back, key=measurements.measurement_order) == sorted(
        found, key=measurements.measurement_order
    )
    assert exported.dumps(back) == text


@given(
    st.lists(any_measurements(), max_size=5).flatmap(
        lambda rs: st.tuples(st.just(rs), st.permutations(rs))
    )
)
def test_the_order_of_measurements_does_not_show(
    pair: tuple[list[Measurement], list[Measurement]],
) -> None:
    assert exported.dumps(pair[0]) == exported.dumps(pair[1])


def test_what_a_file_looks_like() -> None:
    """So does the example of docs/formats.md."""
    found = [
        synthetic.measurement(CELL, synthetic.split(2), [4.5, 4.25], reason="settled"),
        synthetic.measurement(CELL, synthetic.split(2), [4.75], 1, rounds=(3,), throttled=(True,)),
        synthetic.failed(CELL, synthetic.STOCK, "fault"),
    ]
    lines = exported.dumps(found).splitlines()
    assert lines[5:] == [
        '{"line":"candidate","index":1,"variant":"stock","options":{"pdl":false},"binaries":["stock"]}',
        '{"line":"cell","kind":"decode","requests":4,"heads":12}',
        '[0,0,"0",1000000000,[[0,0,0,1980,[4.5,4.25]],[1,0,null,1980,[4.75],[3],1]]]',
        '[1,0,"0",1000000000,[[0,0,1,null,[],null,0,"fault"]]]',
    ]
    documented = (ROOT / "docs" / "formats.md").read_text().split("```\n")[1]
    assert exported.dumps(read(documented)) == documented


def test_one_cell_measured_again_changes_its_own_lines() -> None:
    cells = synthetic.cells(["decode"])
    found = list(synthetic.measurements(cells))
    again = [m for m in synthetic.measurements(cells, seed=1) if m.cell == cells[3]]
    before, after = (
        exported.dumps(ms).splitlines()
        for ms in (found, [*again, *(m for m in found if m.cell != cells[3])])
    )
    changed = [old for old, new in zip(before, after, strict=True) if old != new]
    assert len(changed) == len(synthetic.CANDIDATES)


GOOD = exported.dumps(
    [
        synthetic.measurement(CELL, synthetic.STOCK, [5.0, 5.1]),
        synthetic.measurement(CELL, synthetic.STOCK, [5.2], 1, reason="settled"),
    ]
)
ROW = '[0,0,"0",1000000000,[[0,0,null,1980,[5.0,5.1]],[1,0,0,1980,[5.2]]]]'
CELL_LINE = '{"line":"cell","kind":"decode","requests":4,"heads":12}'
HEAD = GOOD.splitlines()[0]
BAD: list[tuple[str, str, str]] = [
    (HEAD, CELL_LINE, "1: schema: None: this version reads 3"),
    (HEAD, "[]", "1: schema: None"),
    (HEAD, "", "1: schema: None"),
    ('"schema":3', '"schema":2', "1: schema: 2: this version reads 3"),
    ('"schema":3', '"schema":3,"more":1', "1: line: {'line': 'header'"),
    ('"row":["candidate",', '"row":["variant",', "1: row, run: "),
    (CELL_LINE, HEAD, "5: line: 'header': stands once, at the top"),
    ('{"line":"env","index":0', '{"line":"env","index":1', "2: index: 1: counts from 0"),
    ("sha256:", "md5:", "2: digest: 'md5:"),
    ('"text":"settled"', '"text":""', "3: text: ''"),
    ('"text":"settled"', '"text":1', "3: text: 1: Expected `str`, got `int`"),
    ('"options":{"pdl":false}', '"options":{"pdl":1.5}', "4: options: {'pdl': 1.5}"),
    ('"options":{"pdl":false}', '"options":[]', "4: options: []"),
    ('"binaries":["stock"]', '"binaries":["sto-ck"]', "4: binaries: 'sto-ck'"),
    ('"variant":"stock"', '"variant":""', "4: variant: ''"),
    ('"variant":"stock",', "", "missing required field `variant`"),
    ('"kind":"decode"', '"kind":"moon"', "5: kind: 'moon'"),
    ('"kind":"decode"', '"kind":[]', "5: kind: []"),
    ('"heads":12', '"heads":true', "5: heads: True: Expected `int`"),
    ('"heads":12', '"heads":-1', "5: cell: heads=-1"),
    ('"heads":12', '"heads":12,"colour":1', "unknown field `colour`"),
    ('"heads":12', '"heads":12,"context":"moon"', "5: context: 'moon'"),
    ('"heads":12', '"heads":12,"layers":1.5', "5: layers: 1.5"),
    (CELL_LINE, CELL_LINE + "\n" + CELL_LINE, "6: cell: "),
    (CELL_LINE + "\n", "", "5: candidate: 0: a row stands below its cell"),
    (ROW, "[]", "6: line: []"),
    (ROW, "null", "6: line: None"),
    ('[0,0,"0"', '[1,0,"0"', "6: candidate: 1: below 1, the length of its table"),
    ('[0,0,"0"', '[0,1,"0"', "6: binary: 1: below 1"),
    ('[0,0,"0"', '[0,null,"0"', "6: launch: '0': null if and only if binary is"),
    ('[0,0,"0"', "[0,null,null", "6: binary: None: null only if nothing could run"),
    ('[0,0,"0"', '[0,0,"0-0"', "6: launch: '0-0'"),
    ("1000000000", "-1", "6: unique_bytes: -1: Expected `int` >= 0"),
    (
        "[1,0,0,1980,[5.2]]",
        '[1,0,0,1980,[5.2],null,0,"ok",1]',
        "Expected `array` of at most length 8",
    ),
    ("[1,0,0", "[0,0,0", "6: process: 0: stock(pdl=False): is there twice"),
    ("[1,0,0", "[true,0,0", "6: runs.process: True"),
    ("[1,0,0", "[1,1,0", "6: env: 1: below 1"),
    ("[1,0,0", "[1,0,1", "6: reason: 1: below 1"),
    ("1980,[5.2]", "1980.5,[5.2]", "6: runs.sm_clock_mhz: 1980.5"),
    ("1980,[5.2]", "[1980,1980],[5.2]", "6: sm_clock_mhz: (1980, 1980): as many as samples_us, 1"),
    ("[5.2]", "[]", "6: samples_us: []: status ok needs a time"),
    ("[5.2]", "null", "6: runs.samples_us: None"),
    ("[5.2]", "[0]", "6: runs.samples_us: 0: Expected `float` > 0"),
    ("[5.2]", "[-1.0]", "6: runs.samples_us: -1.0"),
    ("[5.2]", "[1e999]", "6: runs.samples_us: inf: Number out of range"),
    ("[5.2]", "[NaN]", "6: not strict JSON"),
    ("[5.2]", "[true]", "6: runs.samples_us: True"),
    ("[5.0,5.1]", "[5.0,5.1],[1,0]", "6: rounds: (1, 0): never decrease"),
    ("[5.0,5.1]", "[5.0,5.1],[1]", "6: rounds: (1,): as many as samples_us, 2"),
    ("[5.0,5.1]", "[5.0,5.1],null,[0,2]", "6: runs.throttled: 2"),
    ("[5.0,5.1]", "[5.0,5.1],null,[0]", "6: throttled: (0,): as many as samples_us, 2"),
    ("[5.0,5.1]", '[5.0,5.1],null,0,"fine"', "6: runs.status: 'fine'"),
    (
        "[5.0,5.1]",
        '[5.0,5.1],null,0,"wrong"',
        "6: samples_us: (5.0, 5.1): status wrong has no time",
    ),
    ("[5.0,5.1]", '[5.0,5.1],null,0,"unstable"', "6: reason: None: null only for status ok"),
]


@pytest.mark.parametrize(("old", "new", "message"), BAD, ids=[b[2] for b in BAD])
def test_bad_files_are_refused(old: str, new: str, message: str) -> None:
    assert GOOD.count(old) == 1
    with pytest.raises(MeasurementError) as caught:
        read(GOOD.replace(old, new))
    assert message in str(caught.value)
    assert str(caught.value).startswith("a.jsonl:")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("line", range(1, 7))
@pytest.mark.parametrize("cut", [1, -2])
def test_a_damaged_line_is_named(line: int, cut: int) -> None:
    lines = GOOD.splitlines()
    lines[line - 1] = lines[line - 1][:cut]
    with pytest.raises(MeasurementError, match=rf"a\.jsonl:{line}: "):
        read("\n".join(lines) + "\n")


@pytest.mark.parametrize("us", [math.nan, math.inf])
def test_what_is_no_number_is_not_written(us: float) -> None:
    with pytest.raises(ValueError, match="JSON compliant"):
        exported.dumps([synthetic.measurement(CELL, synthetic.STOCK, [us])])


def write(
    folder: Path, found: list[Measurement], envs: dict[str, dict[str, Any]], stem: str = "dispatch"
) -> Path:
    exported.dump(found, folder / f"{stem}.jsonl")
    (folder / "env.json").write_text(json.dumps(envs))
    return folder / f"{stem}.jsonl"


def test_load(tmp_path: Path) -> None:
    found = list(synthetic.measurements(synthetic.cells(["decode"])))
    path = write(tmp_path, found[::-1], synthetic.ENVS)
    assert exported.load([path]) == sorted(found, key=measurements.measurement_order)
    assert not list(tmp_path.glob(".*"))


def test_what_load_refuses(tmp_path: Path) -> None:
    one = synthetic.measurement(CELL, synthetic.STOCK, [5.0])
    path = write(tmp_path, [one, one], synthetic.ENVS)
    with pytest.raises(
        MeasurementError, match=r"jsonl:5: process: 0: stock\(pdl=False\): is there twice"
    ):
        exported.load([path])
    both = [write(tmp_path, [one], synthetic.ENVS, stem) for stem in ("dispatch", "other")]
    with pytest.raises(
        MeasurementError, match=r"other\.jsonl: stock\(pdl=False\), .*: process: 0: twice"
    ):
        exported.load(both)
    write(tmp_path, [one], {})
    with pytest.raises(MeasurementError, match=r"not in the env\.json beside it"):
        exported.load([path])
    write(tmp_path, [one], {next(iter(synthetic.ENVS)): synthetic.ENV | {"driver": "altered"}})
    with pytest.raises(MeasurementError, match="an environment with this digest"):
        exported.load([path])
    with pytest.raises(MeasurementError, match=r"none\.jsonl: cannot be read: No such file"):
        exported.load([tmp_path / "none.jsonl"])
    other = synthetic.measurement(CELL, synthetic.STOCK, [5.0], 1, code="other-0")
    write(tmp_path, [one, other], synthetic.ENVS)
    with pytest.raises(
        MeasurementError, match=r"binary of stock\(pdl=False\), .*: stock and other: such"
    ):
        exported.load([path])


@pytest.mark.parametrize("field", [*provenance.FIELDS, "a field of the future"])
def test_each_altered_field(tmp_path: Path, field: str) -> None:
    other = synthetic.ENV | {field: "altered"}
    envs = synthetic.ENVS | {provenance.digest(other): other}
    here, there = (
        synthetic.measurement(CELL, synthetic.STOCK, [5.0], i, env=digest)
        for i, digest in enumerate(envs)
    )
    path = write(tmp_path, [here, there], envs)
    kind = provenance.FIELDS.get(field, "soft")
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        if kind == "hard":
            with pytest.raises(MeasurementError, match=f"{field}: .*altered.* must not be mixed"):
                exported.load([path])
            with pytest.raises(ProvenanceError):
                provenance.check_mix([synthetic.ENV, other])
        else:
            assert len(exported.load([path])) == 2
    notes = [str(w.message) for w in seen if issubclass(w.category, ProvenanceWarning)]
    assert len(notes) == (kind == "soft")
    assert all(note.startswith(field) for note in notes)


def test_a_hundred_thousand_are_read_in_seconds(tmp_path: Path) -> None:
    cells = [
        Cell("decode", r, h) for h in (4, 6, 8, 12, 16, 24, 32, 48, 64, 96) for r in range(1, 371)
    ]
    path = write(tmp_path, list(synthetic.measurements(cells)), synthetic.ENVS)
    begin = time.process_time()
    assert len(exported.load([path])) == 99_900
    assert time.process_time() - begin < 5, "1 s on an idle core"


@pytest.mark.parametrize("path", sorted((ROOT / "results").glob("*/*.jsonl")), ids=lambda p: p.name)
def test_recorded_files_are_as_they_would_be_written(path: Path) -> None:
    assert exported.dumps(exported.load([path])) == path.read_text()
