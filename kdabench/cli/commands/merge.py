"""merge: journals of one sweep into one."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kdabench.cli import console
from kdabench.data.paths import relative
from kdabench.measure import journal


def command(
    journals: Annotated[
        list[Path], typer.Argument(metavar="JOURNAL...", help="Journals of one sweep.")
    ],
    to: Annotated[Path, typer.Option("--to", metavar="FILE", help="The new journal.")],
) -> None:
    """Join journals of one sweep into a new one.

    \b
    Examples:
      kdabench merge a/dispatch.db b/dispatch.db --to out/dispatch.db
    """
    journal.merge(journals, to)
    console.line(relative(to))
