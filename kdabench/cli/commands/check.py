"""check: is every generated module what its records give?"""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from kdabench.cli import console, policies
from kdabench.cli.arguments import (
    RESULTS,
    Json,
    Results,
)

if TYPE_CHECKING:
    pass


def check(results: Results = RESULTS, as_json: Json = False) -> None:
    """Compare every generated module with what its records give.

    Exit status 1 if one is stale; the differences and the command that repairs them are printed.

    \b
    Examples:
      kdabench check
      kdabench check --json
    """
    from kdabench.data import devices
    from kdabench.policy import emit as emitting

    with console.user_input():
        stale = emitting.check(results, policies.policies_folder(), policies.certifying(results))
    if as_json:
        console.emit_json(
            [{"path": str(s.path), "diff": s.diff, "repair": s.repair} for s in stale]
        )
    else:
        for module in stale:
            console.write(module.diff)
        for module in stale:
            console.line(f"stale: {console.relative(module.path)}; repair: {module.repair}")
        if not stale:
            recorded = devices.recorded(results)
            console.line(
                f"{len(recorded)} recorded device{'s' * (len(recorded) != 1)}: all generated modules current"
            )
    if stale:
        raise typer.Exit(console.FINDING)
