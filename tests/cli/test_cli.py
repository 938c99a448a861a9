"""The command line as a user meets it: every command, their mistakes, interrupts, pipes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from kdabench import cli
from kdabench.cli import inputs
from kdabench.data import measurements
from support import synthetic

ROOT = Path(__file__).parents[2]
SWEEP = """\
question = "Which split of a made-up device is fastest?"
variants = ["stock", "KdaSplit"]
processes = 2

[[cells]]
kind = "decode"
heads = [12, 96]
requests = [1, 4, 16, 64, 256]

[[cells]]
kind = "record"
tokens = 4
heads = [12, 96]
requests = [1, 4, 16, 64, 256]

[options.KdaSplit]
split = [1, 2, 4, 8]
pdl = [false, true]
"""
SLUG = "synthetic-one"
COMMANDS = cli._ORDER


@pytest.fixture(scope="session")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A working folder with a sweep and the records of a made-up device."""
    folder = tmp_path_factory.mktemp("recorded")
    (folder / "sweeps").mkdir()
    (folder / "sweeps" / "dispatch.toml").write_text(SWEEP)
    plan = inputs.load_sweep(folder / "sweeps" / "dispatch.toml", 100)
    made = synthetic.measurements(plan.cells, plan.candidates, processes=2)
    measurements.dump(made, folder / "results" / SLUG / "dispatch.jsonl")
    (folder / "results" / SLUG / "env.json").write_text(json.dumps(synthetic.ENVS))
    return folder


@pytest.fixture
def work(recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, as the working directory. No GPU, whatever the machine has."""
    shutil.copytree(recorded, tmp_path / "work")
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setattr("kdabench.measure.sources._gpu_count", lambda: 0)
    return tmp_path / "work"


@pytest.fixture
def kdabench(work: Path, capsys: pytest.CaptureFixture[str]) -> Any:
    """Run a command in this process: its exit status, stdout and stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        status = cli._status(list(arguments))
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def start(*arguments: str, **options: Any) -> subprocess.Popen[str]:
    """A command as a process of its own."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "kernels")])}
    environment |= options.pop("env", {})
    command = [sys.executable, "-m", "kdabench", *arguments]
    return subprocess.Popen(
        command,
        text=True,
        env=environment,
        stderr=subprocess.PIPE,
        preexec_fn=_heed_interrupts,
        **options,
    )


def _heed_interrupts() -> None:
    """A background job of a shell ignores SIGINT, and so does what it starts."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def one_line(error: str) -> str:
    assert error.startswith("kdabench: ")
    assert error.count("\n") == 1
    return error


# --- help and mistakes ---


def test_help_is_plain_and_lists_every_command(kdabench: Any) -> None:
    status, out, err = kdabench("--help")
    assert (status, err) == (0, "")
    assert "\x1b" not in out
    for name in COMMANDS:
        assert f"\n  {name} " in out
    assert kdabench() == (0, out, "")
    assert "..." not in out.split("Commands:")[1]


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help_with_examples(kdabench: Any, command: str) -> None:
    status, out, _ = kdabench(command, "--help")
    assert status == 0
    assert f"\n    kdabench {command}" in out.split("Examples:")[1]
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["swep"], "no such command 'swep'. Did you mean 'sweep'?"),
        (["nonsense"], "no such command 'nonsense'"),
        (["sweep"], "missing argument 'SWEEP.toml'"),
        (["sweep", "--budgt", "3", "x"], "no such option --budgt; did you mean --budget?"),
        (["sweep", "sweeps/dispatch.toml", "--budget", "soon"], "'--budget'"),
        (["sweep", "sweeps/dispatch.toml", "--budget", "0"], "'--budget'"),
        (["sweep", "sweeps/dispatch.toml", "extra"], "extra"),
        (["sweep", "sweeps/dispach.toml"], "did you mean sweeps/dispatch.toml?"),
        (["run", "dispatch"], "did you mean sweeps/dispatch.toml?"),
        (["sweep", "sweeps/dispatch.toml", "--device", "cuda"], "0 CUDA devices"),
        (
            ["sweep", "sweeps/dispatch.toml", "--device", "tpu"],
            "one of auto, cuda, cuda:INDEX, recorded, recorded:DEVICE",
        ),
        (["sweep", "sweeps/dispatch.toml", "--device", "recorded:other"], "synthetic-one"),
        (["sweep", "sweeps/dispatch.toml", "--results", "nowhere"], "no GPU found"),
        (["fit", "other"], "recorded: synthetic-one"),
        (["fit", "sweeps/dispatch.toml"], "files of records (.jsonl)"),
        (["fit", "nothing.jsonl"], "nothing.jsonl"),
        (["emit", SLUG, "--format", "yaml"], "'yaml': one of module, json, constants"),
        (["emit", "../etc"], "'../etc'"),
        (
            ["choose", "--heads", "12", "--requests", "4", "--device", SLUG],
            "kdabench emit synthetic-one",
        ),
        (["choose", "--heads", "x", "--requests", "4"], "'--heads'"),
        (["choose", "--requests", "4"], "'--heads'"),
        (["show", "nothing"], "recorded: synthetic-one"),
        (["show", "nothing.db"], "nothing.db: no such journal"),
        (["show", "nothing.toml"], "nothing.toml: no such sweep file"),
        (["plot", "nothing"], "recorded: synthetic-one"),
        (["plot", SLUG, "--policy", "nothing.py"], "nothing.py: no policy there"),
        (["plot", SLUG, "--policy", "sweeps/dispatch.toml"], "sweeps/dispatch.toml"),
        (["export", "sweeps/dispatch.toml"], "kdabench sweep sweeps/dispatch.toml"),
        (["merge", "a.db", "b.db", "--to", "c.db"], "a.db: no such journal"),
        (["compile", "--arch", "sm_80"], "'sm_80': one of sm_90a, sm_100a, sm_103a"),
        (
            ["compile", "--variant", "Kda"],
            "'Kda': one of KdaSplit, KdaWide, KdaStream, KdaWS, KdaFused, KdaFusedWS, KdaCommit, stock",
        ),
        (
            ["binaries", "--check"],
            "kernels/manifests/sm_90a.json: no such manifest; write it: kdabench binaries",
        ),
        (["binaries", "--arch", "sm_80"], "'sm_80': one of sm_90a, sm_100a, sm_103a"),
        (["binaries", "--sample", "3"], "--sample: only with --check"),
        (
            ["binaries", "--check", "--manifest", "sweeps/dispatch.toml"],
            "dispatch.toml: no manifest of binaries",
        ),
        (["verify"], "needs an NVIDIA GPU"),
    ],
)
def test_mistakes_are_one_line_and_status_2(
    kdabench: Any, arguments: list[str], expected: str
) -> None:
    status, out, err = kdabench(*arguments)
    assert (status, out) == (2, "")
    assert expected in one_line(err)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("question = ", "not TOML"),
        (SWEEP.replace("processes", "proceses"), "proceses: 2: unknown key"),
        (SWEEP.replace("[12, 96]", "[]", 1), "cells[0].heads: []"),
        (SWEEP.replace("split =", "spilt ="), "options.KdaSplit.spilt"),
        (SWEEP.replace('"stock", ', '"stock", "KdaNone", '), "KdaNone"),
    ],
)
def test_a_bad_sweep_file_names_file_key_value_and_rule(
    kdabench: Any, work: Path, text: str, expected: str
) -> None:
    (work / "bad.toml").write_text(text)
    status, out, err = kdabench("sweep", "bad.toml")
    assert (status, out) == (2, "")
    assert one_line(err).startswith("kdabench: bad.toml: ")
    assert expected in err


def test_bad_records_name_file_and_line(kdabench: Any, work: Path) -> None:
    path = work / "results" / SLUG / "dispatch.jsonl"
    path.write_text(path.read_text().replace('"status":"ok"', '"status":"fine"', 1))
    status, out, err = kdabench("fit", SLUG)
    assert (status, out) == (2, "")
    assert f"results/{SLUG}/dispatch.jsonl:1: status: 'fine'" in one_line(err)


def test_a_folder_that_cannot_be_written(kdabench: Any, work: Path) -> None:
    (work / "out").write_text("a file where the folder should be")
    status, _, err = kdabench("sweep", "sweeps/dispatch.toml")
    assert status == 2
    assert one_line(err).startswith("kdabench: out: ")


# --- commands ---


def test_a_recorded_run_says_so_first(kdabench: Any) -> None:
    status, out, err = kdabench("sweep", "sweeps/dispatch.toml")
    assert status == 0
    assert out.splitlines() == [
        f"no GPU found: recorded run of SYNTHETIC ONE (results/{SLUG})",
        "40 of 40 cells and processes run on recorded samples, 360 records in out/dispatch.recorded.db",
    ]
    assert "\x1b" not in err
    status, out, _ = kdabench("sweep", "sweeps/dispatch.toml", "--json")
    summary = json.loads(out)
    assert (status, summary["recorded"], summary["done"], summary["without_winner"]) == (
        0,
        True,
        40,
        [],
    )
    status, _, err = kdabench("export", "sweeps/dispatch.toml")
    assert status == 2
    assert "never exported as a measurement" in one_line(err)


def test_sweep_dry_run(kdabench: Any, work: Path) -> None:
    status, out, _ = kdabench("sweep", "sweeps/dispatch.toml", "--dry-run")
    assert status == 0
    assert out.startswith("20 cells x 9 candidates x 2 processes")
    assert (
        json.loads(kdabench("sweep", "sweeps/dispatch.toml", "--dry-run", "--json")[1])["cells"]
        == 20
    )
    assert not (work / "out").exists()


def test_cells_without_a_result_are_a_finding(kdabench: Any, work: Path) -> None:
    path = work / "results" / SLUG / "dispatch.jsonl"
    made = measurements.load([path])
    broken = made[0].cell
    made = [
        synthetic.failed(r.cell, r.candidate, process=r.process) if r.cell == broken else r
        for r in made
    ]
    measurements.dump(made, path)
    status, _, err = kdabench("sweep", "sweeps/dispatch.toml")
    assert status == 1
    assert "no variant has a result in decode heads=12 requests=1 tokens=1" in err.splitlines()[-1]


def test_run_writes_everything_and_labels_a_recorded_run(kdabench: Any, work: Path) -> None:
    before = {path: path.read_bytes() for path in (work / "results").rglob("*") if path.is_file()}
    status, out, _ = kdabench("run", "sweeps/dispatch.toml")
    assert status == 0
    lines = out.splitlines()
    assert lines[0] == f"no GPU found: recorded run of SYNTHETIC ONE (results/{SLUG})"
    folder = work / "out" / "dispatch"
    report = (folder / "regret.txt").read_text()
    assert report.splitlines()[0] == "RECORDED RUN of dispatch on SYNTHETIC ONE"
    assert report in out
    policy = (folder / "policy.py").read_text()
    assert policy.startswith("# Recorded run")
    assert {path.name for path in (folder / "plots").iterdir()} == {
        "decode-q1.svg", "decode-q1.png", "record-q4.svg", "record-q4.png",
    }  # fmt: skip
    assert {
        path: path.read_bytes() for path in (work / "results").rglob("*") if path.is_file()
    } == before
    status, out, _ = kdabench("run", "sweeps/dispatch.toml", "--json")
    found = json.loads(out)
    assert (status, found["recorded"], found["why_no_policy"]) == (0, True, None)
    assert (folder / "policy.py").read_text() == policy
    assert (folder / "regret.txt").read_text() == report


def test_run_without_a_policy_still_reports(kdabench: Any, work: Path) -> None:
    path = work / "results" / SLUG / "dispatch.jsonl"
    path.write_text(path.read_text().replace('"context":"layer"', '"context":"isolated"'))
    sweep = work / "sweeps" / "dispatch.toml"
    sweep.write_text(sweep.read_text().replace("heads =", 'context = "isolated"\nheads ='))
    status, out, _ = kdabench("run", "sweeps/dispatch.toml")
    assert status == 0
    assert "No policy: context: isolated" in out
    assert (work / "out" / "dispatch" / "plots" / "decode-q1-isolated.svg").exists()


def test_fit_emit_check_choose(kdabench: Any, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kdabench.cli.policies._policies_folder", lambda: work / "policies")
    status, out, _ = kdabench("fit", SLUG)
    assert status == 0
    assert "stock never takes decode" in out
    assert (
        json.loads(kdabench("fit", f"results/{SLUG}/dispatch.jsonl", "--json")[1])["policy"]["SMS"]
        == 100
    )
    status, out, _ = kdabench("check")
    assert status == 1
    assert out.splitlines()[-1] == f"stale: policies/synthetic_one.py; repair: kdabench emit {SLUG}"
    assert kdabench("emit", SLUG, "--diff")[0] == 0
    assert not (work / "policies").exists()
    status, out, _ = kdabench("emit", SLUG)
    assert out.splitlines() == [
        f"results/{SLUG}/policy.py: written",
        "policies/synthetic_one.py: written",
    ]
    assert kdabench("emit", SLUG)[1].count("as it was") == 2
    assert kdabench("emit", SLUG, "--diff")[1] == ""
    assert json.loads(kdabench("emit", SLUG, "--format", "json")[1])["SMS"] == 100
    assert (
        kdabench("emit", SLUG, "--format", "module")[1]
        == (work / "policies" / "synthetic_one.py").read_text()
    )
    assert kdabench("check") == (0, "1 recorded device: all generated modules current\n", "")
    assert kdabench("check", "--json") == (0, "[]\n", "")
    step = ("choose", "--device", SLUG, "--heads", "12", "--requests", "1")
    status, out, _ = kdabench(*step)
    assert (status, out.splitlines()[0]) == (0, "KdaSplit(pdl=True, split=8)")
    assert json.loads(kdabench(*step, "--tokens", "4", "--json")[1])["place"] == "measured"
    status, _, err = kdabench(*step, "--tokens", "9")
    assert status == 2
    assert "tokens=9" in one_line(err)


def test_plot_list_show_of_a_device(kdabench: Any, work: Path) -> None:
    status, out, _ = kdabench("plot", SLUG)
    assert status == 0
    assert f"results/{SLUG}/plots/decode-q1.svg" in out.splitlines()
    assert json.loads(kdabench("list", "--json")[1])["devices"] == [
        {"device": SLUG, "records": ["dispatch.jsonl"], "policy": False}
    ]
    assert "sweeps/dispatch.toml  Which split" in kdabench("list")[1]
    assert "20 cells x 9 candidates x 2 processes" in kdabench("show", "sweeps/dispatch.toml")[1]
    assert len(json.loads(kdabench("show", SLUG, "--json")[1])) == 4
    status, out, _ = kdabench("show", SLUG, "--kind", "decode", "--heads", "12", "--requests", "1")
    assert (status, len(out.splitlines())) == (0, 10)
    assert "KdaSplit(pdl=True, split=8)" in out.splitlines()[1]
    rows = json.loads(kdabench("show", SLUG, "--requests", "1", "--json")[1])
    assert len(rows) == 36
    assert kdabench("show", SLUG, "--requests", "3")[1] == "no such cell was measured\n"


def test_a_measured_journal_is_exported_and_merged(kdabench: Any, work: Path) -> None:
    from kdabench.measure.journal import Journal

    plan = inputs.load_sweep(work / "sweeps" / "dispatch.toml", 100)
    made = [
        r for r in measurements.load([work / "results" / SLUG / "dispatch.jsonl"]) if r.process == 0
    ][:18]
    for name in ("out/dispatch.db", "other.db"):
        with Journal.open(work / name, plan.digest, plan.question) as journal:
            env = journal.add_env(synthetic.ENV)
            for r in made:
                start = made.index(r) % 9 * len(r.samples_us)
                for index, us in enumerate(r.samples_us):
                    journal.add_round(r.cell, 0, start + index, [(r.candidate, us, None, None)])
                journal.set_outcome(
                    r.cell, 0, r.candidate, "ok", None, 1, r.bytes_moved, r.code, env, {}
                )
    status, out, _ = kdabench("export", "sweeps/dispatch.toml", "--results", "elsewhere")
    assert (status, out) == (0, f"18 records in elsewhere/{SLUG}/dispatch.jsonl\n")
    assert kdabench("merge", "out/dispatch.db", "other.db", "--to", "all.db")[0] == 0
    assert [row["records"] for row in json.loads(kdabench("show", "all.db", "--json")[1])] == [
        16,
        2,
    ]


def test_doctor(kdabench: Any) -> None:
    status, out, _ = kdabench("doctor", "--json")
    findings = json.loads(out)
    missing = [finding["name"] for finding in findings if finding["state"] == "missing"]
    assert f"verified on {SLUG}" in missing
    assert status == 1
    assert "repair" in kdabench("doctor")[1]


def test_compile_reports_rows_and_failures(kdabench: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from kda_kernels import build
    from kda_kernels.cases import compile_cases

    case = next(iter(compile_cases("KdaCommit")))
    whole = build.Row(case, "sm_90a", None, 128, 0, 70_000, 128, 1, 3, 1.5)
    rows = [whole]
    monkeypatch.setattr(build, "compile_grid", lambda *_: rows)
    status, out, err = kdabench("compile")
    assert (status, err) == (0, "")
    assert "70000" in out
    rows += [
        build.Row(case, "sm_90a", "DSLError: no"),
        build.Row(case, "sm_90a", None, 255, 16, 0, 128, 1, 2, 1.0),
    ]
    status, out, err = kdabench("compile", "--json")
    assert (status, len(json.loads(out))) == (1, 3)
    assert "DSLError: no" in err.splitlines()[0]
    assert "spills: 16 bytes" in err.splitlines()[1]


def test_binaries_are_written_compared_and_named(
    kdabench: Any, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kda_kernels import build

    changed: set[str] = set()

    def compile_all(cases: Any, jobs: int, listener: Any) -> list[build.Row]:
        digests = ["b" * 16 if case.problem.kind in changed else "a" * 16 for case, _ in cases]
        return [
            build.Row(c, arch, None, digest=digest)
            for (c, arch), digest in zip(cases, digests, strict=True)
        ]

    monkeypatch.setattr(build, "compile_all", compile_all)
    ours = ("binaries", "--variant", "KdaCommit")
    status, out, err = kdabench(*ours)
    assert (status, err) == (0, "")
    assert out.endswith("names of 1 binaries in kernels/manifests/sm_90a.json\n")
    status, out, err = kdabench(*ours, "--check")
    assert (status, err) == (0, "")
    assert out.endswith("binaries as kernels/manifests/sm_90a.json says\n")
    changed.add("flush")
    status, out, err = kdabench(*ours, "--check")
    assert status == 1
    assert "another binary: KdaCommit flush q2 fp32 dim-first" in out
    assert "commit q8" not in out
    assert "kdabench verify" in one_line(err)
    status, out, err = kdabench(*ours, "--check", "--json")
    found = json.loads(out)
    assert (status, found["does_not_compile"]) == (1, [])
    assert all(name.startswith("KdaCommit flush") for name in found["another_binary"])
    status, out, err = kdabench(
        "binaries", "--check", "--arch", "sm_100a", "--manifest", "kernels/manifests/sm_90a.json"
    )
    assert (status, "is of sm_90a, not of sm_100a" in one_line(err)) == (2, True)


# --- as a process ---


def test_a_reader_that_leaves_is_no_error(work: Path) -> None:
    writer = start(
        "show", f"results/{SLUG}/dispatch.jsonl", "--kind", "decode", stdout=subprocess.PIPE
    )
    assert writer.stdout is not None
    writer.stdout.close()
    assert writer.stderr is not None
    assert writer.stderr.read() == ""
    assert writer.wait() == 141


def test_interrupt_keeps_finished_work(work: Path) -> None:
    slow = "import time, kdabench.measure.clock as c; read = c.RecordedClock.read\n"
    slow += "c.RecordedClock.read = lambda self, x: (time.sleep(0.02), read(self, x))[1]\n"
    (work / "sitecustomize.py").write_text(slow)
    path = os.pathsep.join([str(work), str(ROOT), str(ROOT / "kernels")])
    command = ("sweep", "sweeps/dispatch.toml", "--device", f"recorded:{SLUG}")
    running = start(
        *command, stdout=subprocess.DEVNULL, env={"PYTHONPATH": path}, start_new_session=True
    )
    assert running.stderr is not None
    assert running.stderr.readline() == "40 cells and processes\n"
    time.sleep(2)
    os.killpg(running.pid, signal.SIGINT)
    error = running.stderr.read()
    assert running.wait(20) == 130
    assert "the same command goes on" in one_line(error)
    again = start(*command, stdout=subprocess.PIPE)
    out, err = again.communicate()
    assert (again.returncode, err.count("kdabench: ")) == (0, 0), err
    assert "of them from before" in err.splitlines()[0]
    assert "40 of 40" in out
