from __future__ import annotations

import functools
import json
import random
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kdabench.data import measurements
from kdabench.data.measurements import Cell
from kdabench.policy import constants, emit, fit
from kdabench.policy.constants import Policy
from kdabench.policy.regret import FitError
from support import synthetic

ROOT = Path(__file__).parents[2]


def make(**changes: Any) -> Policy:
    """A policy in which every rule fires somewhere."""
    schedules = {s: constants.with_pdl({"split": s, "staging": "registers"}) for s in (1, 2, 4)}
    plain = Policy(
        origin=constants.Origin("SYNTHETIC ONE", "synthetic-one", 100, (9, 0), "sha256:0", 4, 5, {"cuda": "13.0"}),
        schedule={12: {1: schedules[4], 10: schedules[2], 100: schedules[1]}, 48: {2: schedules[2]}},
        spec_schedule={12: {1: schedules[2], 64: schedules[1]}},
        stock_items={"decode": None, "record": 9000, "spec": 700},
        options={"stock": {"pdl": False}, "KdaWS": {"pdl": True}},
        policies={12: {(1, 1): (6288, 0)}},
        measured={"decode": {12: {1: {1: 1.5, 10: None, 100: 1.25}}, 48: {1: {2: 2.0}}}, "record": {12: {
            2: {1: 3.0, 64: 1.1}, 8: {1: 3.0, 64: 1.1}}}, "spec": {}},
    )  # fmt: skip
    fields = {name: getattr(plain, name) for name in plain.__dataclass_fields__}
    return Policy(**fields | changes)


def module(**changes: Any) -> ModuleType:
    return emit.load(emit.emit(make(**changes)))


CLOSEST = module()._closest
RULES: dict[str, Any] = {
    "fused_items": {12: 500}, "fused_default_items": 2000, "fused_ws_items": 3000,
    "ws_items": {"decode": 4000, "spec": None, "record": 5000}, "ws_small": 300, "ws_small_end": 400,
    "stream_items": {"decode": 2000, "spec": None, "record": None}, "stream_heads": 64,
    "wide_items": {"decode": 1000, "spec": None, "record": 1000},
}  # fmt: skip


@pytest.mark.parametrize(
    ("key", "variant", "split", "rule", "flush"),
    [
        ((12, 1, 1, "decode"), "KdaSplit", 4, "SCHEDULE", False),
        ((12, 83, 1, "decode"), "KdaSplit", 1, "SCHEDULE", False),
        ((12, 84, 1, "decode"), "KdaWide", None, "WIDE_ITEMS", False),
        ((12, 167, 1, "decode"), "KdaStream", None, "STREAM_ITEMS", False),
        ((12, 334, 1, "decode"), "KdaWS", None, "WS_ITEMS", False),
        ((12, 24, 4, "record"), "KdaSplit", 1, "SPEC_SCHEDULE", False),
        ((12, 25, 4, "record"), "KdaWS", None, "WS_SMALL", False),
        ((12, 34, 4, "record"), "KdaSplit", 1, "SPEC_SCHEDULE", False),
        ((64, 1, 4, "record"), "KdaStream", None, "STREAM_HEADS", False),
        ((64, 1, 4, "spec"), "KdaSplit", 2, "SPEC_SCHEDULE", False),
        ((12, 59, 4, "spec"), "stock", None, "STOCK_ITEMS", False),
        ((12, 41, 4, "replay"), "KdaSplit", 1, "SPEC_SCHEDULE", True),
        ((12, 42, 4, "replay"), "KdaFused", 1, "FUSED_ITEMS", False),
        ((24, 20, 4, "replay"), "KdaSplit", 1, "SPEC_SCHEDULE", True),
        ((24, 100, 4, "replay"), "KdaFused", 1, "FUSED_ITEMS", False),
        ((24, 125, 4, "replay"), "KdaFusedWS", None, "FUSED_WS_ITEMS", False),
    ],
)
def test_the_decision_list(
    key: tuple[Any, ...], variant: str, split: int | None, rule: str, flush: bool
) -> None:
    found = module(**RULES).explain(*key)
    assert (found.choice.variant, found.choice.options.get("split"), found.rule) == (
        variant,
        split,
        rule,
    )
    assert found.choice.flush is flush
    assert "pdl" in found.choice.options
    assert module(**RULES).choose(*key) == found.choice


def test_ranked_choices_end_with_stock() -> None:
    def variants(*key: Any) -> list[str]:
        found = module(**RULES).ranked(*key)
        assert found[0] == module(**RULES).choose(*key)
        return [choice.variant for choice in found]

    assert variants(12, 1, 1, "decode") == ["KdaSplit", "stock"]
    assert variants(12, 334, 1, "decode") == ["KdaWS", "KdaStream", "KdaWide", "KdaSplit", "stock"]
    assert variants(12, 59, 4, "spec") == ["stock", "KdaSplit", "stock"]
    assert variants(24, 125, 4, "replay") == [
        "KdaFusedWS",
        "KdaFused",
        "KdaWide",
        "KdaSplit",
        "stock",
    ]
    assert [c.flush for c in module(**RULES).ranked(24, 125, 4, "replay")] == [
        False,
        False,
        True,
        True,
        True,
    ]


def test_what_cannot_stream_is_not_streamed() -> None:
    rules = module(**RULES)
    assert rules.choose(12, 334, 1, "decode", streamable=False).variant == "KdaWide"
    assert rules.choose(12, 334, 1, "decode").variant == "KdaWS"
    assert rules.choose(24, 125, 4, "replay", streamable=False).variant == "KdaFused"


def test_replays_and_splits() -> None:
    rules = module(**RULES)
    assert [rules.replays(12, r) for r in (41, 42)] == [False, True]
    assert [rules.replays(12, 1, fused) for fused in (12, 13, {12: 12}, {24: 1})] == [
        True,
        False,
        True,
        False,
    ]
    assert [
        module(fused_split={1: 8, 50: 2}).fused_split(items) for items in (1, 49, 50, 10**6)
    ] == [8, 8, 2, 2]
    assert module(fused_items={12: None}, fused_default_items=1).replays(12, 1) is False
    assert [rules.fused_split(items) for items in (1, 25, 26, 50, 51, 100, 101, 10**6)] == [
        8,
        8,
        4,
        4,
        2,
        2,
        1,
        1,
    ]
    never = module()
    assert not never.replays(12, 10**6)
    assert never.choose(12, 10**6, 4, "replay").flush


@settings(deadline=None)
@given(
    st.lists(st.integers(1, 500), min_size=1, max_size=8, unique=True),
    st.integers(1, 2000),
    st.integers(1, 60),
)
def test_the_nearest_entry_by_ratio(listed: list[int], target: int, scale: int) -> None:
    listed.sort()
    ratios = [max(v * scale / target, target / (v * scale)) for v in listed]
    best = min(ratios)
    assert CLOSEST(listed, target, scale) in [
        v for v, r in zip(listed, ratios, strict=True) if r <= best * (1 + 1e-12)
    ]


def test_unlisted_keys_take_the_nearest() -> None:
    choose = module().choose

    def split(*key: Any) -> Any:
        return choose(*key).options["split"]

    assert [split(12, r, 1, "decode") for r in (1, 3, 4, 31, 32, 10**6)] == [4, 4, 2, 2, 1, 1]
    # Unlisted heads: the nearest listed ones, at the same number of items.
    assert split(13, 1, 1, "decode") == split(12, 1, 1, "decode")
    assert split(24, 16, 1, "decode") == split(12, 32, 1, "decode")
    assert split(1, 12, 1, "decode") == split(12, 1, 1, "decode")
    assert split(25, 1000, 1, "decode") == split(48, 1, 1, "decode")


def test_explain_says_where_a_key_lies() -> None:
    explain = module().explain
    assert explain(12, 1, 1, "decode")[2:] == (1.5, "measured", "measured")
    assert explain(12, 10, 1, "decode")[2:] == (
        None,
        "measured",
        "measured, no other variant to compare",
    )
    assert explain(12, 99, 1, "decode")[3:] == (
        "interpolated", "interpolated; nearest measured: 12 heads, 100 requests, 1 tokens")  # fmt: skip
    outside = [(12, 101, 1, "decode"), (12, 1000, 1, "decode"), (11, 2, 1, "decode"), (49, 2, 1, "decode"),
               (12, 1, 4, "spec"), (12, 65, 4, "record")]  # fmt: skip
    inside = [(24, 2, 1, "decode"), (12, 1, 3, "record"), (12, 2, 4, "replay")]
    assert {explain(*key).place for key in outside} == {"extrapolated"}
    assert {explain(*key).place for key in inside} == {"interpolated"}


def windows() -> dict[str, Any]:
    """Tables for two token counts of records; spec was never measured."""
    schedules = {s: constants.with_pdl({"split": s, "staging": "registers"}) for s in (1, 2, 4, 8)}
    return {"window_schedule": {
        ("record", 2): {12: {1: schedules[8], 7: schedules[4], 64: schedules[1]}, 48: {2: schedules[2]}},
        ("record", 8): {12: {3: schedules[4]}, 96: {1: schedules[2], 5: schedules[1]}},
    }}  # fmt: skip


def test_windows_take_the_table_of_the_nearest_token_count() -> None:
    found = module(**windows())
    picks = [found.choose(12, 1, tokens, "record").options["split"] for tokens in range(2, 9)]
    assert picks == [8, 8, 8, 4, 4, 4, 4]  # of 2 and 8 the lower one, at 4
    assert found.explain(12, 1, 5, "record").rule == "WINDOW_SCHEDULE"
    assert found.choose(12, 1, 5, "replay") == found.choose(12, 1, 5, "record")._replace(flush=True)
    assert found.explain(12, 1, 5, "spec")[:2] == module().explain(12, 1, 5, "spec")[:2]
    assert found.explain(12, 1, 5, "spec").rule == "SPEC_SCHEDULE"
    assert found.explain(12, 1, 1, "decode").rule == "SCHEDULE"


@functools.cache
def _with_windows() -> ModuleType:
    return module(**windows(), stock_items=constants.never())


@settings(deadline=None)
@given(
    st.integers(1, 200) | st.just(10**20), st.integers(1, 200) | st.just(10**20), st.integers(2, 8)
)
def test_the_entry_is_the_nearest_one(heads: int, requests: int, tokens: int) -> None:
    found = _with_windows()
    table = found.WINDOW_SCHEDULE["record", 2 if tokens <= 4 else 8]
    listed = found._closest(tuple(table), heads)
    entry = found._closest(tuple(table[listed]), heads * requests, listed)
    assert found.choose(heads, requests, tokens, "record").options == table[listed][entry]


def test_options_of_the_step() -> None:
    options = {
        "KdaWide": {("record", 2): {"pdl": True, "threads": 512}, ("record", 8): {"pdl": False}}
    }
    found = module(**RULES, step_options=options)
    shown = [found.choose(12, 84, tokens, "record").options for tokens in (2, 4, 5, 8)]
    assert shown == [options["KdaWide"]["record", t] for t in (2, 2, 8, 8)]
    assert found.choose(12, 84, 1, "decode").options == {"pdl": False}
    assert found.choose(12, 420, 4, "record").options == {"pdl": True}  # KdaWS, of OPTIONS
    assert [found.wide(12, r, t, rec) for r, t, rec in ((84, 4, True), (83, 4, True), (84, 1, False), (84, 4, False))
            ] == [True, False, True, False]  # fmt: skip


@pytest.mark.parametrize("bad", [0, -1, np.int64(0), -(10**30)])
@pytest.mark.parametrize("place", range(3))
def test_counts_below_one_are_refused(bad: Any, place: int) -> None:
    key = [12, 1, 4]
    key[place] = bad
    for function in (module().choose, module().explain):
        with pytest.raises(ValueError, match=f"={bad} must be >= 1"):
            function(*key, "record")


@pytest.mark.parametrize(
    "bad", [1.0, True, False, "1", None, np.float32(1), np.bool_(True), [1], 1j, float("nan")]
)
@pytest.mark.parametrize("place", range(3))
def test_what_is_no_integer_is_refused(bad: Any, place: int) -> None:
    choose = module().choose
    choose(1, 1, 1, "decode")  # True == 1.0 == 1: a remembered answer must not serve them
    key: list[Any] = [1, 1, 1]
    key[place] = bad
    with pytest.raises(TypeError):
        choose(*key, "decode")


def test_integers_of_other_kinds_are_taken() -> None:
    import torch

    choose = module().choose
    for make_int in (np.int8, np.uint64, np.array, torch.tensor):
        assert choose(make_int(12), make_int(1), make_int(4), "record") == choose(
            12, 1, 4, "record"
        )


@pytest.mark.parametrize(
    ("tokens", "kind"),
    [(2, "decode"), (1, "spec"), (9, "record"), (1, "replay"), (4, "commit"), (4, ""), (4, None)],
)
def test_steps_that_do_not_exist_are_refused(tokens: int, kind: Any) -> None:
    with pytest.raises(ValueError, match=r"takes|is not one of"):
        module().choose(12, 1, tokens, kind)


def test_matches_its_device_alone() -> None:
    matches = module().matches
    assert matches("SYNTHETIC ONE", 100, (9, 0))
    assert matches("SYNTHETIC ONE", 100, [9, 0])
    assert not matches("SYNTHETIC ONE MIG 1g.18gb", 100, (9, 0))
    assert not matches("SYNTHETIC ONE", 99, (9, 0))
    assert not matches("SYNTHETIC ONE", 100, (10, 0))


def test_memory_of_choices_is_bounded() -> None:
    rules = module()
    rules._MAX_REMEMBERED = 10
    for requests in range(1, 100):
        rules.choose(12, requests, 1, "decode")
    assert len(rules._remembered) <= 10


@pytest.fixture(scope="module")
def fitted() -> tuple[Policy, str]:
    found, evidence = fit.fit(list(synthetic.measurements()), synthetic.ENVS, resamples=0)
    return found, emit.emit(found, evidence)


def test_same_records_same_bytes(fitted: tuple[Policy, str]) -> None:
    rows = list(synthetic.measurements())
    random.Random(3).shuffle(rows)
    again, evidence = fit.fit(rows, synthetic.ENVS, resamples=0)
    assert emit.emit(again, evidence) == fitted[1]


def test_header(fitted: tuple[Policy, str]) -> None:
    lines = fitted[1].splitlines()
    assert lines[:2] == [
        "# Generated by kdabench; do not edit. Regenerate:",
        "#   kdabench emit synthetic-one",
    ]
    assert lines[2].startswith("# records sha256 ")
    assert lines[3] == "# 1350 ok of 1350; SYNTHETIC ONE (100 SMs)"
    assert "# certificate: none" in fitted[1]
    assert "# with thresholds and schedules in place of CHOICES, all: geometric mean " in fitted[1]
    assert "# with SPEC_SCHEDULE for all windows, too, all: geometric mean " in fitted[1]
    assert str(ROOT) not in fitted[1]


def test_first_choices_come_without_the_list(fitted: tuple[Policy, str]) -> None:
    found = emit.load(fitted[1])
    for kind, tokens in (("decode", 1), ("record", 3), ("spec", 8), ("replay", 2)):
        for key in (
            (heads, requests, tokens, kind) for heads in (1, 12, 50) for requests in (1, 9, 1000)
        ):
            assert found.choose(*key) == found.ranked(*key)[0] == found.explain(*key).choice


AWKWARD = ["A\nB", 'say "x"', "it's", '"\'"', "\\", "ビ\U0001f600", "x" * 300, ""]


@pytest.mark.parametrize("name", AWKWARD)
def test_device_names_survive(name: str) -> None:
    origin = make().origin
    found = emit.load(emit.emit(make(origin=constants.Origin(**vars(origin) | {"device": name}))))
    assert found.matches(name, 100, (9, 0))


def test_generated_modules_are_clean(tmp_path: Path, fitted: tuple[Policy, str]) -> None:
    nothing: dict[str, Any] = {"decode": {}, "record": {}, "spec": {}}
    empty = make(schedule={}, spec_schedule={}, policies={}, options={}, measured=nothing)
    texts = {"fitted": fitted[1], "rules": emit.emit(make(**RULES)), "empty": emit.emit(empty)}
    long = {f"option_{i}": "x" * 20 for i in range(5)}
    step_options = {
        "KdaWS": {("record", 2): long, ("decode", 1): {"pdl": True}},
        "KdaWide": {("spec", 4): long},
    }
    texts["windows"] = emit.emit(
        make(**RULES | windows(), step_options=step_options, schedule={6: {1: long}})
    )
    texts["heads"] = emit.emit(
        make(**RULES | {"fused_items": {heads: 100 + heads for heads in range(4, 100, 8)}})
    )
    texts["long"] = emit.emit(make(options={"stock": long, "KdaWS": {}}, **windows()))
    for i, name in enumerate(n for n in AWKWARD if len(n) < 100):
        texts[f"name{i}"] = emit.emit(
            make(origin=constants.Origin(**vars(make().origin) | {"device": name}))
        )
    for name, text in texts.items():
        (tmp_path / f"{name}.py").write_text(text)
    config = ("--config", str(ROOT / "pyproject.toml"), "--no-cache")
    for command in (
        ["ruff", "check", *config],
        ["ruff", "format", "--check", "--diff", *config],
        ["mypy", "--strict", "--config-file=", "--no-incremental"],
    ):
        done = subprocess.run(
            [sys.executable, "-m", *command, str(tmp_path)], capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_modules_need_the_standard_library_alone(
    tmp_path: Path, fitted: tuple[Policy, str]
) -> None:
    (tmp_path / "policy.py").write_text(fitted[1])
    code = "import policy; print(policy.choose(12, 1, 4, 'record').variant)"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, '.'); {code}"],
                          cwd=tmp_path, capture_output=True, text=True)  # fmt: skip
    assert done.stdout == "KdaSplit\n", done.stderr


CONSTANTS = (
    "CHOICES",
    "SCHEDULE",
    "SPEC_SCHEDULE",
    "WINDOW_SCHEDULE",
    "POLICIES",
    "OPTIONS",
    "STEP_OPTIONS",
)


def test_constants_can_be_copied(fitted: tuple[Policy, str]) -> None:
    found, text = fitted
    space: dict[str, Any] = {"Options": dict}
    exec(emit.emit(found, format="constants"), space)
    whole = emit.load(text)
    for name in (*(rule.upper() for rule in constants.RULES), *CONSTANTS):
        assert space[name] == getattr(whole, name)
    assert space["CHOICES"] == found.options
    assert space["SCHEDULE"] == found.schedule
    assert space["WINDOW_SCHEDULE"] == found.window_schedule != {}
    assert space["POLICIES"] == found.policies


def test_json_says_the_same(fitted: tuple[Policy, str]) -> None:
    found = json.loads(emit.emit(fitted[0], format="json"))
    whole = emit.load(fitted[1])
    assert found["STOCK_ITEMS"] == whole.STOCK_ITEMS
    assert found["SCHEDULE"]["12"]["1"] == whole.SCHEDULE[12][1]
    variant, options = whole.CHOICES["decode", 1][12][1]
    assert found["CHOICES"]["decode,1"]["12"]["1"] == {"variant": variant, "options": options}
    assert (
        found["WINDOW_SCHEDULE"]["record,8"]["12"]["1"] == whole.WINDOW_SCHEDULE["record", 8][12][1]
    )
    assert found["POLICIES"]["12"]["4,8"] == list(whole.POLICIES[12][4, 8])


def publish(tmp_path: Path) -> tuple[Path, Path, Path]:
    results, modules = tmp_path / "results", tmp_path / "policies"
    folder = results / "synthetic-one"
    measurements.dump(
        synthetic.measurements(synthetic.cells(["decode"])), folder / "dispatch.jsonl"
    )
    (folder / "env.json").write_text(json.dumps(synthetic.ENVS))
    modules.mkdir()
    (modules / "__init__.py").write_text("# Generated by kdabench too, but no policy\n")
    return results, modules, folder


def test_check_finds_what_is_stale(tmp_path: Path) -> None:
    results, modules, folder = publish(tmp_path)
    missing = emit.check(results, modules)
    assert [s.path for s in missing] == [folder / "policy.py", modules / "synthetic_one.py"]
    assert {s.repair for s in missing} == {"kdabench emit synthetic-one"}
    text = emit.regenerate(folder).module
    for path in emit.module_paths(folder, modules):
        measurements.write_atomic(path, text)
    assert emit.check(results, modules) == []
    (folder / "policy.py").write_text(text.replace("SMS = 100", "SMS = 99"))
    (stale,) = emit.check(results, modules)
    assert "-SMS = 99\n" in stale.diff
    assert "+SMS = 100\n" in stale.diff
    (folder / "policy.py").write_text(text)
    (modules / "gone.py").write_text(text)
    assert [(s.path.name, s.repair) for s in emit.check(results, modules)] == [
        ("gone.py", f"rm {modules / 'gone.py'}")
    ]


def test_weights_beside_the_records_count(tmp_path: Path) -> None:
    results, modules, folder = publish(tmp_path)
    (folder / "weights.json").write_text('{"1": 5, "256": 0.5}')
    assert emit.check(results, modules)
    (folder / "weights.json").write_text('{"one": 5}')
    with pytest.raises(
        measurements.MeasurementError, match=r"weights\.json: an object of request counts"
    ):
        emit.regenerate(folder)
    (folder / "weights.json").unlink()
    measurements.dump([synthetic.measurement(Cell("decode", 1, 12, context="chain"), synthetic.STOCK, [1.0])],
                 folder / "dispatch.jsonl")  # fmt: skip
    with pytest.raises(FitError, match="context: chain"):
        emit.check(results, modules)


def test_diff() -> None:
    assert emit.diff("a\n", "a\n") == ""
    assert emit.diff("a\n", "b\n").splitlines()[:2] == [
        "--- policy.py (old)",
        "+++ policy.py (new)",
    ]
