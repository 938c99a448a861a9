"""doctor: what this machine has and lacks."""

from __future__ import annotations

from dataclasses import asdict

import typer

from kdabench.checks import doctor
from kdabench.cli import console
from kdabench.cli.arguments import RESULTS, Json, Results


def command(results: Results = RESULTS, as_json: Json = False) -> None:
    """Say what this machine has and lacks, and how to mend it.

    Exit status 1 if something needed is missing. A missing GPU is not: sweep and run then replay.

    \b
    Examples:
      kdabench doctor
      kdabench doctor --json
    """
    findings = doctor.examine(results)
    if as_json:
        console.emit_json([asdict(finding) for finding in findings])
    else:
        rows = [(f.state, f.name, f.found) for f in findings]
        console.show_table(("state", "what", "found"), rows)
        for finding in findings:
            if finding.repair:
                console.line(f"repair {finding.name}:  {finding.repair}")
    if any(finding.state == "missing" for finding in findings):
        raise typer.Exit(console.FINDING)
