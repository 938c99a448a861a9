from __future__ import annotations

import json
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kda_kernels.problem import CONV_LAYOUTS, STATE_DTYPES
from kdabench.data import measurements, provenance
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
    values = st.one_of(st.integers(), st.booleans(), st.text())
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
        unique_bytes=draw(st.integers(0)),
        bytes_moved=draw(st.integers(0)),
        code="1-0" if status == "ok" else draw(st.sampled_from(["", "1-0"])),
        env="sha256:0",
    )


@given(any_measurements())
def test_lines_round_trip(measurement: Measurement) -> None:
    line = measurements.dumps([measurement])
    assert line == measurements.canonical(measurement.to_json()) + "\n"
    assert Measurement.from_json(measurements.parse_json(line, "here")) == measurement
    assert measurements.dumps([Measurement.from_json(json.loads(line))]) == line


@given(
    st.lists(any_measurements(), max_size=5).flatmap(
        lambda rs: st.tuples(st.just(rs), st.permutations(rs))
    )
)
def test_the_order_of_records_does_not_show(
    pair: tuple[list[Measurement], list[Measurement]],
) -> None:
    assert measurements.dumps(pair[0]) == measurements.dumps(pair[1])


GOOD = synthetic.measurement(CELL, synthetic.STOCK, [5.0, 5.1]).to_json()
BAD: list[tuple[str, Any, str]] = [
    ("schema", 1, "schema: 1: this version reads 2"),
    ("schema", True, "schema: True"),
    ("variant", "", "variant: ''"),
    ("spec", {"a": 1.5}, "spec.a: 1.5"),
    ("spec", [], "spec: []: a JSON object"),
    ("status", "fine", "status: 'fine': one of ok, unsupported"),
    ("status", "wrong", "status wrong has no time"),
    ("status", "unstable", "reason: None: text"),
    ("status", [], "status: []"),
    ("reason", "", "reason: ''"),
    ("process", -1, "process: -1: an integer >= 0"),
    ("process", True, "process: True"),
    ("samples_us", [], "status ok needs a time"),
    ("samples_us", [5.0, 0], "samples_us: 0: finite numbers > 0"),
    ("samples_us", [5.0, -1.0], "samples_us: -1.0"),
    ("samples_us", [5.0, float("inf")], "samples_us: inf"),
    ("samples_us", [5.0, float("nan")], "samples_us: nan"),
    ("samples_us", [5.0, True], "samples_us: True"),
    ("samples_us", [5.0, "6"], "samples_us: '6'"),
    ("samples_us", None, "samples_us: None: a list"),
    ("rounds", [1, 0], "rounds: 0: integers >= 0 that never decrease"),
    ("rounds", [0], "rounds: [0]: a list as long as samples_us, 2"),
    ("sm_clock_mhz", [1, 1.5], "sm_clock_mhz: 1.5"),
    ("throttled", [0, 1], "throttled: 0"),
    ("unique_bytes", 1.0, "unique_bytes: 1.0"),
    ("code", "", "code: ''"),
    ("code", "sha256:1", "code: 'sha256:1'"),
    ("env", "md5:1", "env: 'md5:1'"),
    ("cell", {}, "cell: keys: ['context'"),
    ("cell", 1, "cell: line: 1: a JSON object"),
    ("cell", asdict(CELL) | {"colour": 1}, "cell: keys: ['colour']: unknown"),
    ("cell", asdict(CELL) | {"context": "moon"}, "cell.context: 'moon'"),
    ("cell", asdict(CELL) | {"requests": True}, "requests=True must be an integer"),
    ("cell", asdict(CELL) | {"kind": []}, "cell.kind: []: one of decode"),
    ("cell", asdict(CELL) | {"state_dtype": []}, "cell: unhashable type"),
    ("cell", asdict(CELL) | {"tokens": True}, "tokens=True must be an integer"),
    ("cell", asdict(CELL) | {"layers": 1.0}, "layers=1.0 must be an integer"),
    ("extra", 1, "keys: ['extra']: unknown"),
]


@pytest.mark.parametrize(("key", "value", "message"), BAD, ids=[b[2] for b in BAD])
def test_bad_records_are_refused(key: str, value: Any, message: str) -> None:
    with pytest.raises(MeasurementError) as caught:
        Measurement.from_json(GOOD | {key: value}, "a.jsonl:7")
    assert str(caught.value).startswith("a.jsonl:7: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", sorted(GOOD))
def test_missing_keys_are_refused(key: str) -> None:
    with pytest.raises(MeasurementError, match=f"keys: .'{key}'.: missing"):
        Measurement.from_json({k: v for k, v in GOOD.items() if k != key})


@pytest.mark.parametrize(
    "text", ["NaN", "[Infinity]", '{"a": 1, "a": 2}', "", "{", "[" * 100_000, "1e", "9" * 5000]
)
def test_lax_json_is_refused(text: str) -> None:
    with pytest.raises(MeasurementError, match=r"^here: not strict JSON"):
        measurements.parse_json(text, "here")


def write(
    folder: Path, found: list[Measurement], envs: dict[str, dict[str, Any]], stem: str = "dispatch"
) -> Path:
    measurements.dump(found, folder / f"{stem}.jsonl")
    (folder / "env.json").write_text(json.dumps(envs))
    return folder / f"{stem}.jsonl"


def test_load(tmp_path: Path) -> None:
    found = list(synthetic.measurements(synthetic.cells(["decode"])))
    path = write(tmp_path, found[::-1], synthetic.ENVS)
    assert measurements.load([path]) == sorted(found, key=measurements.measurement_order)
    assert not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("cut", [1, 50, -2])
def test_a_damaged_line_is_named(tmp_path: Path, cut: int) -> None:
    path = write(tmp_path, list(synthetic.measurements([CELL])), synthetic.ENVS)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:3], lines[3][:cut], *lines[4:]]) + "\n")
    with pytest.raises(MeasurementError, match=r"dispatch\.jsonl:4: "):
        measurements.load([path])


def test_what_load_refuses(tmp_path: Path) -> None:
    one = synthetic.measurement(CELL, synthetic.STOCK, [5.0])
    path = write(tmp_path, [one, one], synthetic.ENVS)
    with pytest.raises(
        MeasurementError, match=r"jsonl:2: stock\(pdl=False\), process 0.*is there twice"
    ):
        measurements.load([path])
    write(tmp_path, [one], {})
    with pytest.raises(MeasurementError, match=r"not in the env\.json beside it"):
        measurements.load([path])
    write(tmp_path, [one], {next(iter(synthetic.ENVS)): synthetic.ENV | {"driver": "altered"}})
    with pytest.raises(MeasurementError, match="an environment with this digest"):
        measurements.load([path])
    with pytest.raises(MeasurementError, match=r"none\.jsonl: cannot be read: No such file"):
        measurements.load([tmp_path / "none.jsonl"])
    other = synthetic.measurement(CELL, synthetic.STOCK, [5.0], 1, code="other-0")
    write(tmp_path, [one, other], synthetic.ENVS)
    with pytest.raises(
        MeasurementError, match=r"binary of stock\(pdl=False\), .*: stock and other: such"
    ):
        measurements.load([path])


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
                measurements.load([path])
            with pytest.raises(ProvenanceError):
                provenance.check_mix([synthetic.ENV, other])
        else:
            assert len(measurements.load([path])) == 2
    notes = [str(w.message) for w in seen if issubclass(w.category, ProvenanceWarning)]
    assert len(notes) == (kind == "soft")
    assert all(note.startswith(field) for note in notes)


def test_write_atomic_leaves_the_old_file_on_failure(tmp_path: Path) -> None:
    path = tmp_path / "a"
    measurements.write_atomic(path, "old")
    with pytest.raises(UnicodeEncodeError):
        measurements.write_atomic(path, "new \ud800")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]
