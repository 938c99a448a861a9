"""From a sweep to its policy and report, called as a library: no shell, no exit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kdabench import pipeline, sources
from kdabench.data import measurements
from kdabench.data.sweep import Sweep
from kdabench.measure import session, target
from kdabench.measure.target import Target
from kdabench.pipeline import Outcome, Run
from kdabench.policy import emit
from support import synthetic

SLUG = "synthetic-one"


def recorded(folder: Path, context: str = "layer") -> None:
    cells = [replace(cell, context=context) for cell in synthetic.cells(("decode",))]  # type: ignore[arg-type]
    made = synthetic.measurements(cells, processes=2)
    measurements.dump(made, folder / SLUG / "dispatch.jsonl")
    (folder / SLUG / "env.json").write_text(json.dumps(synthetic.ENVS))


def plan_of(folder: Path) -> Sweep:
    found = measurements.load([folder / SLUG / "dispatch.jsonl"])
    cells = tuple(dict.fromkeys(m.cell for m in found))
    candidates = tuple(dict.fromkeys(m.candidate for m in found))
    names = tuple(dict.fromkeys(candidate.variant for candidate in candidates))
    return Sweep(folder / "made-up.toml", "Which is fastest?", names, 2, cells, candidates)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(session, "_gpu_count", lambda: 0)
    recorded(tmp_path / "results")
    return tmp_path / "results"


def run(folder: Path) -> tuple[Run, Target]:
    found = target.find("auto", folder)
    return pipeline.run(plan_of(folder), found, out=folder.parent / "out", folder=folder), found


def test_a_run_writes_policy_figures_evidence_and_report(folder: Path) -> None:
    before = {path: path.read_bytes() for path in folder.rglob("*.json*")}
    found, where = run(folder)
    assert (where.replay, where.slug, where.sms) == (True, SLUG, 100)
    assert (found.summary.done, found.summary.total) == (20, 20)
    assert [path.name for path in found.written] == [
        *("policy.py", "regret.txt", "decode-q1.svg", "decode-q1.png", "report.html")
    ]
    home = folder.parent / "out" / "made-up"
    assert {path.parent for path in found.written} == {home, home / "plots"}
    assert "REPLAY" in (home / "regret.txt").read_text()
    assert emit.load((home / "policy.py").read_text()).choose(12, 4, 1, "decode").variant
    assert {path: path.read_bytes() for path in folder.rglob("*.json*")} == before


def test_without_a_policy_all_else_is_written(folder: Path) -> None:
    recorded(folder, "isolated")
    found, _ = run(folder)
    assert isinstance(found.outcome, Outcome)
    assert (found.outcome.policy, found.outcome.module) == (None, None)
    assert "context: isolated" in str(found.outcome.fitted)
    assert "policy.py" not in {path.name for path in found.written}
    assert "No policy: context: isolated" in found.written[0].read_text()


def test_an_interrupted_run_writes_nothing(folder: Path) -> None:
    def interrupt(event: session.Event) -> None:
        if event.kind == "cell":
            raise KeyboardInterrupt

    found = pipeline.run(
        plan_of(folder),
        target.find("auto", folder),
        out=folder.parent / "out",
        folder=folder,
        listener=interrupt,
    )
    assert found.summary.interrupted
    assert (found.outcome, found.written) == (None, ())
    assert not (folder.parent / "out" / "made-up").exists()


def test_mistakes_are_exceptions_of_one_line(folder: Path) -> None:
    (folder / SLUG / "held.json").write_text("[]")
    with pytest.raises(ValueError, match=r"held\.json: an object") as caught:
        run(folder)
    assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=f"recorded: {SLUG}"):
        sources.open_source("other", folder)


def test_a_report_names_a_sweep_file_that_it_cannot_read(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "dispatch.toml").write_text("question = ")
    source = sources.open_source(SLUG, folder)
    with pytest.warns(UserWarning, match=r"dispatch\.toml: .*not TOML"):
        subject = pipeline.report_of_source(source, folder, tmp_path)
    assert [(m.sweep, m.question, m.planned) for m in subject.measured] == [
        ("dispatch", None, None)
    ]
    assert subject.notes == (
        f"policy.py is not what these records give; repair: kdabench emit {SLUG}",
    )


def test_changes_are_told_against_the_module_in_place(folder: Path) -> None:
    found = emit.regenerate(folder / SLUG)
    same = pipeline.changes(found.module, found)
    assert (same.cells, same.of, same.gain.geomean) == ((), 10, 0.0)
    with pytest.raises(ValueError, match="the module in place can't be loaded: SyntaxError"):
        pipeline.changes("def", found)
