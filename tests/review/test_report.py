"""The report: what stands in it, that it stands alone, and that what was not measured is no
pass."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from kdabench import cli
from kdabench.cli import inputs
from kdabench.data import measurements
from kdabench.data.measurements import Cell, Measurement
from kdabench.policy import fit
from kdabench.review import report
from kdabench.review.report import Measured, Subject
from support import synthetic
from support.synthetic import STOCK, split

SLUG = "synthetic-one"
SVG = """<?xml version="1.0"?>
<!DOCTYPE svg PUBLIC "-//W3C//DTD SVG 1.1//EN" "http://www.w3.org/Graphics/SVG/1.1/DTD/svg11.dtd">
<svg xmlns:xlink="http://www.w3.org/1999/xlink" width="8pt" height="4pt" viewBox="0 0 8 4"
     xmlns="http://www.w3.org/2000/svg" version="1.1">
 <metadata><a href="https://matplotlib.org/"/></metadata>
 <defs><clipPath id="p1"><path id="m1" d="M 0 0"/></clipPath></defs>
 <g clip-path="url(#p1)"><use xlink:href="#m1"/></g>
</svg>
"""
SWEEP = """\
question = "Which split of a made-up device is <fastest>?"
variants = ["stock", "KdaSplit"]
processes = 1

[[cells]]
kind = "decode"
heads = [12]
requests = [1, 4, 16, 64]

[options.KdaSplit]
split = [1, 2, 4, 8]
pdl = [false, true]
"""


def page(found: list[Measurement], **changes: Any) -> str:
    measured = Measured("dispatch", "Which is fastest?", found, changes.pop("planned", None))
    fitted = changes.pop("fitted", None) or report.Fitted(
        *fit.fit(found, synthetic.ENVS, resamples=0)
    )
    subject = Subject(
        device="SYNTHETIC ONE",
        recorded=False,
        measured=[measured],
        envs=synthetic.ENVS,
        fitted=fitted,
    )
    return report.render(replace(subject, **changes))


def section(text: str, name: str) -> str:
    """What stands between a heading and the next one of its level."""
    return text.split(f'<h2 id="{name}">')[1].split("<h2 ")[0]


def rows(html: str) -> list[list[str]]:
    found = [
        re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", row, re.DOTALL)
        for row in re.findall(r"<tr>(.*?)</tr>", html)
    ]
    return [[re.sub(r"<[^>]+>", "", cell) for cell in row] for row in found]


def cells(*requests: int) -> list[Cell]:
    return [Cell("decode", n, 12) for n in requests]


class _Checked(HTMLParser):
    """Collects tags that are not closed, identifiers, references, and whatever a browser would
    fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.fetched: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta", "br", "link", "img"):
            self.open.append(tag)
        self._look(tag, attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._look(tag, attrs)

    def _look(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            text = value or ""
            if name == "id":
                self.ids.append(text)
            if name in ("href", "xlink:href"):
                (self.references if text.startswith("#") else self.fetched).append(
                    text.removeprefix("#")
                )
            self.references += re.findall(r"url\(#([^)]+)\)", text)
            self.fetched += re.findall(r"url\((?!#)([^)]*)\)", text)
            if name in ("src", "srcset", "data", "action", "poster", "background"):
                self.fetched.append(text)
        if tag in ("script", "link", "iframe", "img", "object", "embed", "base"):
            self.fetched.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "style":
            self.fetched += re.findall(r"@import.*|url\(.*", data)


def test_it_loads_nothing_and_is_well_formed() -> None:
    text = page(
        list(synthetic.measurements(cells(1, 4))), figures=[("one", SVG), ("the same again", SVG)]
    )
    assert text.startswith("<!DOCTYPE html>\n")
    assert "http" not in text
    checked = _Checked(text)
    assert checked.fetched == []
    assert checked.open == []
    assert len(set(checked.ids)) == len(checked.ids)
    assert set(checked.references) <= set(checked.ids)
    assert {"f1-p1", "f2-m1", "measured", "reproduce"} <= set(checked.ids)
    assert 'viewBox="0 0 8 4"' in text
    assert "height=" not in section(text, "curves")


def test_text_of_records_is_escaped() -> None:
    found = list(synthetic.measurements(cells(1)))
    found.append(
        replace(
            synthetic.failed(cells(1)[0], split(16), "wrong"),
            reason="<script>alert('out')</script> & so",
        )
    )
    text = page(found)
    assert "<script>" not in text
    assert "&lt;script&gt;alert(&#39;out&#39;)&lt;/script&gt; &amp; so" in section(text, "failures")


def test_what_was_never_measured_is_a_dash() -> None:
    one, two = cells(1, 4)
    found = [synthetic.measurement(one, STOCK, [5.0]), synthetic.measurement(one, split(1), [4.0])]
    found += [synthetic.failed(two, STOCK), synthetic.failed(two, split(1))]
    text = page(found, planned=cells(1, 4, 16))
    grid = rows(section(text, "cells"))
    assert grid == [["heads", "1", "4", "16"], ["12", "4.00 Split", "none", "-"]]
    assert "1 of 3 cells of its sweep file were never measured" in text
    assert "2 of 3" in section(text, "measured")
    assert "1 of 2 cells have a winner" in text
    assert "No variant has a time in 1 cells" in section(text, "policy")
    assert ["certificate", "- (no cells were held out)"] in rows(text)
    assert "Targets for this device: -" in text
    unknown = page(found)
    assert "cells of its sweep file: -" in unknown


def test_targets_are_met_missed_or_a_dash() -> None:
    cell = Cell("decode", 1, 12, context="isolated")
    many = [Cell("decode", n, 12, context="isolated") for n in (128, 256)]
    found = [
        synthetic.measurement(cell, split(1), [3.4]),
        synthetic.measurement(cell, STOCK, [1.5]),  # not our own
        synthetic.measurement(replace(cell, state_dtype="bf16"), split(1), [3.6]),
        synthetic.measurement(many[0], split(1), [many[0].problem.floor_us() / 0.95]),
        synthetic.measurement(many[1], split(1), [many[1].problem.floor_us() / 0.80]),
        synthetic.failed(replace(many[0], state_dtype="bf16"), split(1)),
    ]
    text = page(found, device="NVIDIA H200", fitted="context isolated")
    verdicts = {tuple(row[:4]): row[5:7] for row in rows(section(text, "targets"))}
    assert verdicts["decode", "1", "fp32", "12"] == ["3.40 us", "met"]
    assert verdicts["decode", "1", "bf16", "12"] == ["3.60 us", "missed"]
    assert verdicts["decode", "1", "fp32", "96"] == ["-", "-"]
    assert verdicts["decode", "1", "fp32", "1536 and more, worst of 2 cells"] == ["0.80", "missed"]
    assert verdicts["decode", "1", "bf16", "1536 and more, worst of 1 cells"] == ["none", "missed"]
    assert verdicts["replay", "8", "fp32", "1536 and more"] == ["-", "-"]
    assert 'data-is="met"' in text
    assert "None: context isolated" in section(text, "policy")


def test_failures_stand_together_with_their_reasons() -> None:
    found = list(synthetic.measurements(cells(1, 4)))
    found += [
        synthetic.failed(cell, split(16), "timeout", p) for cell in cells(1, 4) for p in (0, 1)
    ]
    found += [
        replace(r, status="unstable", reason="the clock stayed low")
        for r in synthetic.measurements(cells(16), [STOCK])
    ]
    table = rows(section(page(found), "failures"))[1:]
    assert [(row[0], row[1], row[3], row[4]) for row in table] == [
        ("timeout", "KdaSplit", "synthetic timeout", "4"),
        ("unstable", "stock", "the clock stayed low", "3"),
    ]
    assert "decode heads=12 requests=1 tokens=1; decode heads=12 requests=4 tokens=1" in table[0][6]
    assert "Every record is ok" in page(list(synthetic.measurements(cells(1))))


def test_verification_is_of_the_binaries_that_were_measured() -> None:
    verified = {
        "variants": {
            "stock": {"passed": 3, "failed": [], "unsupported": 1, "binaries": ["stock"]},
            "KdaWide": {"passed": 2, "failed": ["one"], "unsupported": 0, "binaries": ["KdaWide"]},
        }
    }
    found = list(synthetic.measurements(cells(1)))
    table = rows(section(page(found, verified=verified), "measured"))
    assert ["stock", "3", "0", "1", "1 of 1"] in table
    assert ["KdaWide", "2", "1", "0", "-"] in table
    assert ["KdaSplit", "-", "-", "-", "-"] in table


@pytest.fixture
def kdabench(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Any:
    (tmp_path / "sweeps").mkdir()
    (tmp_path / "sweeps" / "dispatch.toml").write_text(SWEEP)
    asked = inputs.load_sweep(tmp_path / "sweeps" / "dispatch.toml", 100).candidates
    found = synthetic.measurements(cells(1, 4, 16), asked, processes=1)
    measurements.dump(found, tmp_path / "results" / SLUG / "dispatch.jsonl")
    (tmp_path / "results" / SLUG / "env.json").write_text(json.dumps(synthetic.ENVS))
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> tuple[int, str, str]:
        status = cli._status(list(arguments))
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def test_the_command_writes_the_same_file_twice(kdabench: Any, tmp_path: Path) -> None:
    assert kdabench("report", SLUG) == (0, f"results/{SLUG}/report.html\n", "")
    text = (tmp_path / "results" / SLUG / "report.html").read_text()
    assert "http" not in text
    checked = _Checked(text)
    assert (checked.fetched, checked.open) == ([], [])
    assert set(checked.references) <= set(checked.ids)
    assert len(set(checked.ids)) == len(checked.ids)
    assert "Which split of a made-up device is &lt;fastest&gt;?" in text
    assert text.count("<svg") == 1
    assert "1 of 4 cells of its sweep file were never measured" in text
    assert "policy.py is not what these records give; repair: kdabench emit synthetic-one" in text
    assert "kdabench sweep sweeps/dispatch.toml\nkdabench export sweeps/dispatch.toml" in text
    assert "RECORDED RUN" not in text
    assert kdabench("report", SLUG, "--out", "again.html") == (0, "again.html\n", "")
    assert (tmp_path / "again.html").read_text() == text


def test_a_run_ends_with_a_report_that_says_it_is_a_recorded_run(
    kdabench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kdabench.measure.sources._gpu_count", lambda: 0)
    status, out, _ = kdabench("run", "sweeps/dispatch.toml")
    assert status == 0
    assert out.splitlines()[-1] == "out/dispatch/report.html"
    text = (tmp_path / "out" / "dispatch" / "report.html").read_text()
    assert "RECORDED RUN of SYNTHETIC ONE" in text
    assert text.count("<svg") == 1
    assert f"kdabench run sweeps/dispatch.toml --device recorded:{SLUG}" in text
    status, out, _ = kdabench("report", "out/dispatch.recorded.db", "--out", "journal.html")
    assert (status, out) == (0, "journal.html\n")
    assert "RECORDED RUN of SYNTHETIC ONE" in (tmp_path / "journal.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["nothing"], "recorded: synthetic-one"),
        (["nothing.db"], "nothing.db: no such journal"),
        (
            [f"results/{SLUG}/dispatch.jsonl"],
            "a recorded device or a journal with records is expected",
        ),
        ([SLUG, "--out", "sweeps/dispatch.toml/report.html"], "sweeps/dispatch.toml"),
    ],
)
def test_mistakes_are_one_line_and_status_2(
    kdabench: Any, arguments: list[str], expected: str
) -> None:
    status, out, err = kdabench("report", *arguments)
    assert (status, out) == (2, "")
    assert expected in err
    assert err.count("\n") == 1
