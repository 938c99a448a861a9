from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from kdabench.data import measurements, sweep
from kdabench.data.measurements import Cell, Measurement
from kdabench.policy import certificate, emit, fit, regret
from kdabench.policy.constants import RULES
from kdabench.policy.regret import FitError
from support import synthetic
from support.synthetic import STOCK, measurement, split

ROOT = Path(__file__).parents[2]


def held_out(seed: int = 5) -> list[Measurement]:
    cells = [Cell("decode", r, h) for h in (12, 24, 96) for r in (2, 6, 100)]
    cells += [Cell("record", r, h, t) for h in (12, 96) for r in (3, 20) for t in (3, 6)]
    return list(synthetic.measurements(cells, seed=seed))


def test_the_certificate_of_the_floor_model() -> None:
    rows = list(synthetic.measurements())
    default = {"split": 1, "staging": "registers", "pdl": False, "threads": 256}
    before = emit.load(emit.emit(fit.fit(rows[: len(rows) // 2], synthetic.ENVS, resamples=0)[0]))
    policy, evidence = fit.fit(
        rows,
        synthetic.ENVS,
        held_out=held_out(),
        in_force=before,
        default_schedule=default,
        resamples=40,
    )
    found = evidence.certificate
    assert found is not None
    assert (found.cells, found.uncovered) == (17, ())
    assert set(found.regret) == {"all", "decode", "record"}
    assert found.regret["all"].geomean <= found.bounds["geomean"]
    assert found.regret["all"].max <= found.bounds["max"] * 1.1
    assert found.bounds["geomean"] <= found.bounds["p99"] <= found.bounds["max"]
    others = {
        "only KdaSplit",
        "only stock",
        "default schedule",
        "policy before",
        "nearest measured cell's fastest",
    }
    assert set(found.baselines) == others | {"thresholds and schedules"}
    assert found.baselines["default schedule"].geomean > found.regret["all"].geomean
    text = emit.emit(policy, evidence)
    assert "# certificate: regret on 17 held-out cells: geometric mean " in text
    assert "#   policy before, 17 cells: geometric mean " in text
    assert len(max(text.splitlines(), key=len)) <= 120


def test_the_bounds_cover_fresh_validations() -> None:
    """Of 20 validations with noise of their own, at most a few have more regret than the bound of
    another."""
    policy, _ = fit.fit(list(synthetic.measurements(noise=0.01)), synthetic.ENVS, resamples=0)
    ranked = emit.load(emit.emit(policy)).ranked
    figures = []
    for seed in range(20):
        grid = regret.make_grid(
            measurement(r.cell, r.candidate, r.samples_us, r.process)
            for r in synthetic.measurements(
                [r.cell for r in held_out()[:: 9 * 3]], noise=0.01, seed=seed
            )
        )
        found = certificate.certify(grid, ranked, {}, 40, 0)
        assert found is not None
        figures.append((found.regret["all"].geomean, found.bounds["geomean"]))
    truth = float(np.median([value for value, _ in figures]))
    assert sum(bound >= truth for _, bound in figures) >= 19


def test_held_out_cells_take_no_part() -> None:
    rows = list(synthetic.measurements())
    alone, _ = fit.fit(rows, synthetic.ENVS, resamples=0)
    assert fit.fit(rows, synthetic.ENVS, held_out=held_out(), resamples=0)[0] == alone
    with pytest.raises(FitError, match="held out, but fitted too"):
        fit.fit(rows, synthetic.ENVS, held_out=rows[:1], resamples=0)
    stale = [replace(r, code="other-0") for r in held_out()]
    with pytest.raises(FitError, match="binary of stock"):
        fit.fit(rows, synthetic.ENVS, held_out=stale, resamples=0)
    assert fit.fit(rows, synthetic.ENVS, resamples=0)[1].certificate is None


def pair(us: tuple[float, float], requests: int = 1, processes: int = 3) -> list[Measurement]:
    """A decode cell: stock, KdaSplit."""
    cell = Cell("decode", requests, 12)
    return [
        measurement(cell, c, [t], p)
        for c, t in zip((STOCK, split(1)), us, strict=True)
        for p in range(processes)
    ]


def test_the_policy_in_force_stays_unless_a_new_one_wins() -> None:
    old, _ = fit.fit(pair((1.0, 2.0)), synthetic.ENVS, resamples=0)
    module = emit.load(emit.emit(old))

    def fitted(rows: list[Measurement], **held: dict[str, str]) -> str:
        policy, evidence = fit.fit(rows, synthetic.ENVS, in_force=module, resamples=50, **held)
        variant = emit.load(emit.emit(policy)).choose(12, 1, 1, "decode").variant
        assert (evidence.kept is None) == (variant == "KdaSplit")
        if evidence.kept is not None:
            assert replace(policy, origin=old.origin, measured={}, policies={}) == replace(
                old, measured={}, policies={}
            )
            assert "# constants of the policy before: " in emit.emit(policy, evidence)
        return str(variant)

    assert fitted(pair((1.1, 1.0))) == "KdaSplit"
    assert fitted(pair((1.0008, 1.0))) == "stock"  # 0.08 %
    # Ten per cent, but one process in three says the contrary.
    noisy = [
        replace(r, samples_us=(1.0 if (r.candidate == STOCK) == (r.process == 0) else 1.1,))
        for r in pair((1.0, 1.0))
    ]
    assert fitted(noisy) == "stock"
    # What the old one picks was not measured again.
    assert fitted([r for r in pair((1.0, 1.0)) if r.candidate != STOCK]) == "KdaSplit"
    assert fitted(pair((1.0, 2.0)), held={"stock": "in doubt"}) == "KdaSplit"


def test_resampled_noise_changes_nothing() -> None:
    """Nineteen of twenty fits of the same device keep the constants in force."""
    some = synthetic.cells(["decode"])
    policy, _ = fit.fit(
        list(synthetic.measurements(some, noise=0.005)), synthetic.ENVS, resamples=0
    )
    module = emit.load(emit.emit(policy))
    kept = 0
    for seed in range(1, 21):
        rows = list(synthetic.measurements(some, noise=0.005, seed=seed))
        again, _ = fit.fit(rows, synthetic.ENVS, in_force=module, resamples=10)
        kept += all(
            getattr(again, name) == getattr(policy, name)
            for name in ("choices", "schedule", *RULES)
        )
    assert kept >= 19


def publish(folder: Path, rows: list[Measurement]) -> None:
    measurements.dump(rows, folder / "dispatch.jsonl")
    (folder / "env.json").write_text(json.dumps(synthetic.ENVS))


def test_the_module_of_other_records_comes_before(tmp_path: Path) -> None:
    publish(tmp_path, pair((1.0, 2.0)))
    first = emit.regenerate(tmp_path)
    assert first.previous is None
    (tmp_path / "policy.py").write_text(first.module)
    assert emit.regenerate(tmp_path).module == first.module
    publish(tmp_path, pair((1.0008, 1.0)))
    second = emit.regenerate(tmp_path)
    assert second.previous == first.module
    assert second.evidence.kept is not None
    assert emit.regenerate(tmp_path, fresh=True).evidence.kept is None
    emit.previous_path(tmp_path).write_text(first.module)
    (tmp_path / "policy.py").write_text(second.module)
    assert emit.regenerate(tmp_path).module == second.module
    # Held-out cells are certified.
    measurements.dump(
        list(synthetic.measurements([Cell("decode", 3, 24)])), tmp_path / "holdout.jsonl"
    )
    assert "# certificate: regret on 1 held-out cells" in emit.regenerate(tmp_path).module
    emit.previous_path(tmp_path).write_text("# Generated by kdabench\n1 / 0\n")
    with pytest.raises(
        measurements.MeasurementError, match=r"previous\.py: not a policy module: ZeroDivisionError"
    ):
        emit.regenerate(tmp_path)


def test_changes_name_cells_and_gains() -> None:
    grid = regret.make_grid([*pair((1.0, 2.0)), *pair((2.0, 1.0), 64)])
    modules = [
        emit.load(emit.emit(fit.fit(rows, synthetic.ENVS, resamples=0)[0]))
        for rows in (pair((2.0, 1.0)), pair((1.0, 2.0)))
    ]
    found = certificate.changes(grid, modules[0].ranked, modules[1].ranked)
    assert [change.cell.requests for change in found] == [1, 64]
    assert found[0].gain is not None
    assert (found[0].gain.geomean, found[0].gain.low) == (pytest.approx(1.0), pytest.approx(1.0))
    assert (found[0].old.split("(")[0], found[0].new) == ("KdaSplit", "stock(pdl=False)")
    assert found[1].gain is not None
    assert found[1].gain.geomean == pytest.approx(-0.5)
    assert certificate.changes(grid, modules[0].ranked, modules[0].ranked) == []


def test_the_held_out_sweep_measures_what_a_policy_may_pick() -> None:
    """The candidates of dispatch.toml, in cells of which it has none."""
    variants = pytest.importorskip("kda_kernels.variants")
    from kdabench.sources import known_options

    assert variants.NAMES
    dispatch, others = (
        sweep.load(ROOT / "sweeps" / f"{n}.toml", known_options(), 132)
        for n in ("dispatch", "holdout")
    )
    assert set(others.candidates) >= {c for c in dispatch.candidates if c.variant != "KdaCommit"}
    assert not set(others.cells) & set(dispatch.cells)
    kinds = {cell.kind for cell in dispatch.cells} - {"flush"}
    assert {cell.kind for cell in others.cells} >= kinds
    assert {cell.context for cell in others.cells if cell.kind != "flush"} == {"layer"}
    heads = {cell.heads for cell in dispatch.cells}
    assert {cell.heads for cell in others.cells} - heads
    most = max(cell.items for cell in dispatch.cells if cell.kind != "flush")
    assert max(cell.items for cell in others.cells) > most
    assert 50 <= len(others.cells) <= 200


def test_many_records_take_seconds() -> None:
    """The fit of records already loaded, with intervals; a hundred thousand take about five times
    as long."""
    cells = [
        Cell(kind, requests, heads, tokens)  # type: ignore[arg-type]
        for kind, tokens in (("decode", 1), ("record", 4), ("spec", 4))
        for heads in (12, 96)
        for requests in range(1, 125)
    ]
    rows = list(synthetic.measurements(cells))
    assert len(rows) > 20_000
    began = time.process_time()
    _, evidence = fit.fit(rows, synthetic.ENVS)
    assert time.process_time() - began < 10
    assert evidence.regret["all"].max < 0.02
