"""check: is every generated module what its records give?"""

from __future__ import annotations

import typer

from kdabench.cli import arguments, console
from kdabench.cli.arguments import RESULTS, Json, Results
from kdabench.data import devices
from kdabench.data.paths import relative
from kdabench.policy import emit
from kdabench.policy.constants import default_schedule


def command(results: Results = RESULTS, as_json: Json = False) -> None:
    """Compare every generated module with what its records give.

    Exit status 1 if one is stale; the differences and the command that repairs them are printed.

    \b
    Examples:
      kdabench check
      kdabench check --json
    """
    with console.user_input():
        stale = emit.check(results, arguments.policies_folder(), default_schedule())
    if as_json:
        console.emit_json(
            [{"path": str(s.path), "diff": s.diff, "repair": s.repair} for s in stale]
        )
    else:
        for module in stale:
            console.write(module.diff)
        for module in stale:
            console.line(f"stale: {relative(module.path)}; repair: {module.repair}")
        if not stale:
            count = len(devices.recorded(results))
            console.line(
                f"{count} recorded device{'s' * (count != 1)}: all generated modules current"
            )
    if stale:
        raise typer.Exit(console.FINDING)
