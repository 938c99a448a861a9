"""verify: every variant against the reference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from kdabench.cli import arguments, console
from kdabench.cli.arguments import (
    RESULTS,
    Json,
    Results,
    Variants,
    chosen_variants,
)

if TYPE_CHECKING:
    pass


def verify(variant: Variants = None, results: Results = RESULTS, as_json: Json = False) -> None:
    """Check every variant against the reference, on the GPU.

    Writes RESULTS/<device>/verified.json with the digests of the binaries that were right. Exit status 1 if a case
    fails, or if a variant declares a kind that no case of it is of.

    \b
    Examples:
      kdabench verify
      kdabench verify --variant KdaSplit
    """
    from kdabench.checks import verify as checks
    from kdabench.measure import session

    names = chosen_variants(variant)
    with console.user_input():
        if session.find_device("auto", results).startswith("replay:"):
            raise ValueError(
                "verify needs an NVIDIA GPU, and this machine has none that torch can use"
            )
    target = arguments.find_device("cuda", results)
    arguments.require_writable(results / target.slug)
    rows = checks.run(names, listener=_report_failure)
    path = results / target.slug / "verified.json"
    checks.save(rows, path, _environment())
    counts = []
    for name in names:
        ours = [row for row in rows if row.case.variant == name]
        failed = sum(row.failed for row in ours)
        passed = sum(row.verdict is None for row in ours)
        counts.append(
            {
                "variant": name,
                "passed": passed,
                "unsupported": len(ours) - passed - failed,
                "failed": failed,
            }
        )
    if as_json:
        console.emit_json({"device": target.name, "file": str(path), "variants": counts})
    else:
        console.show_table(
            tuple(counts[0]), [tuple(row.values()) for row in counts], right=(1, 2, 3)
        )
        console.line(f"written: {console.relative(path)}")
    unseen = checks.unverified(rows)
    for text in unseen:
        console.error_line(text)
    if unseen or any(row.failed for row in rows):
        raise typer.Exit(console.FINDING)


def _report_failure(row: Any) -> None:
    if row.failed:
        console.note(f"{console.case_name(row.case)}: {row.verdict}")


def _environment() -> dict[str, Any]:
    from kdabench.measure import cell_bench
    from kdabench.measure.environment import describe
    from kdabench.measure.telemetry import Telemetry

    device = cell_bench.Device.current()
    return describe(device.name, device.uuid, Telemetry(device.uuid, device.pci_id))
