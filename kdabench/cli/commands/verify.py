"""verify: every variant against the reference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import typer

from kdabench.checks import verify
from kdabench.checks.verify import Row
from kdabench.cli import arguments, console
from kdabench.cli.arguments import RESULTS, Json, Results, Variants
from kdabench.data.paths import relative
from kdabench.measure import session
from kdabench.measure.environment import describe
from kdabench.measure.telemetry import Telemetry


def command(variant: Variants = None, results: Results = RESULTS, as_json: Json = False) -> None:
    """Check every variant against the reference, on the GPU.

    Writes RESULTS/<device>/verified.json with the digests of the binaries that were right. Exit status 1 if a case
    fails, or if a variant declares a kind that no case of it is of.

    \b
    Examples:
      kdabench verify
      kdabench verify --variant KdaSplit
    """
    names = arguments.chosen_variants(variant)
    with console.user_input():
        if session.find_device("auto", results).startswith(session.REPLAY):
            raise ValueError(
                "verify needs an NVIDIA GPU, and this machine has none that torch can use"
            )
    target = arguments.find_target("cuda", results)
    arguments.require_writable(results / target.slug)
    rows = verify.run(names, listener=_report_failure)
    path = results / target.slug / "verified.json"
    verify.save(rows, path, _environment())
    counts = [_count(name, rows) for name in names]
    if as_json:
        console.emit_json({"device": target.name, "file": str(path), "variants": counts})
    else:
        console.show_table(
            tuple(counts[0]), [tuple(row.values()) for row in counts], right=(1, 2, 3)
        )
        console.line(f"written: {relative(path)}")
    _finish(rows)


def _report_failure(row: Row) -> None:
    if row.failed:
        console.note(f"{console.case_name(row.case)}: {row.verdict}")


def _environment() -> dict[str, Any]:
    from kdabench.measure import cell_bench  # torch: not before there is a GPU

    device = cell_bench.Device.current()
    return describe(device.name, device.uuid, Telemetry(device.uuid, device.pci_id))


def _count(name: str, rows: Sequence[Row]) -> dict[str, Any]:
    ours = [row for row in rows if row.case.variant == name]
    failed = sum(row.failed for row in ours)
    passed = sum(row.verdict is None for row in ours)
    unsupported = len(ours) - passed - failed
    return {"variant": name, "passed": passed, "unsupported": unsupported, "failed": failed}


def _finish(rows: Sequence[Row]) -> None:
    unseen = verify.unverified(rows)
    for text in unseen:
        console.error_line(text)
    if unseen or any(row.failed for row in rows):
        raise typer.Exit(console.FINDING)
