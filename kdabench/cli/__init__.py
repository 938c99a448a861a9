"""The command line. Exit status 0, 1 for a finding, 2 for a mistake in the command or its input,
130 after Ctrl-C.

Commands import what they need when they run, so that `kdabench --help` stays fast.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from kdabench.cli import certifying, console, data, measuring, policies, reviewing, tuning

_ORDER = ("run", "sweep", "tune", "fit", "emit", "check", "choose", "plot", "compare", "report", "compile", "binaries",
          "verify",
          "list", "show", "export", "merge", "doctor")  # fmt: skip

# The base of click's errors, which carries message and exit status; typer brings click along or
# depends on it.
_CommandLineError: type[Any] = typer.BadParameter.__mro__[2]


def _version(asked: bool) -> None:
    if asked:
        from importlib import metadata

        try:
            version = metadata.version("kdabench")
        except metadata.PackageNotFoundError:
            version = "from a source tree that is not installed; run: make setup"
        console.line(f"kdabench {version}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, help="Print the version and end."
        ),
    ] = False,
) -> None:
    """Benchmark and autotune the decode-side kernels of Kimi Delta Attention, and write the dispatch policy they need.

    \b
    Examples:
      kdabench doctor                     what this machine has and lacks
      kdabench run sweeps/dispatch.toml   sweep, fit, write the policy, plot, report
      kdabench choose --heads 24 --requests 8 --tokens 4 --kind record
      kdabench sweep --help
    """


def _app() -> typer.Typer:
    app = typer.Typer(
        name="kdabench",
        rich_markup_mode=None,
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    )
    app.callback()(_root)
    groups = (policies, measuring, certifying, data, reviewing, tuning)
    commands: dict[str, Callable[..., None]] = {
        n: command for group in groups for n, command in group.COMMANDS.items()
    }
    for name in _ORDER:
        app.command(name)(_interruptible(commands[name]))
    return app


def _interruptible(command: Callable[..., None]) -> Callable[..., None]:
    """The command, with Ctrl-C as one line and an exit status."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
        except KeyboardInterrupt:
            console.error_line("interrupted")
            raise typer.Exit(console.INTERRUPTED) from None

    return wrapped


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and end the process with its exit status."""
    status = _status(sys.argv[1:] if arguments is None else list(arguments))
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        status = console.BROKEN_PIPE
    sys.exit(status)


def _status(arguments: list[str]) -> int:
    if not arguments:
        arguments = ["--help"]
    try:
        returned = _app()(arguments, prog_name="kdabench", standalone_mode=False)
        return returned if isinstance(returned, int) else 0
    except _CommandLineError as error:
        console.error_line(_usage_error(error))
        return int(error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        return console.INTERRUPTED
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            return console.BROKEN_PIPE
        console.error_line(console.describe(error))
        return console.FINDING
    except Exception as error:
        if not _is_journal_error(error):
            raise
        console.error_line(str(error))
        # The disk's or SQLite's own failure is a finding, a journal in use or of another sweep is
        # the user's mistake.
        return console.FINDING if isinstance(error.__cause__, Exception) else console.USAGE


def _usage_error(error: Any) -> str:
    """One line for an error of the command line itself, with what might have been meant."""
    command = (
        getattr(getattr(error, "ctx", None), "command_path", "kdabench")
        .removeprefix("kdabench")
        .strip()
    )
    option, possible = getattr(error, "option_name", None), getattr(error, "possibilities", None)
    if option and possible:
        from difflib import get_close_matches

        text = f"no such option {option}; did you mean {get_close_matches(option, possible, n=1, cutoff=0)[0]}?"
    else:
        text = error.format_message().rstrip(".")
        text = text[:1].lower() + text[1:]
    return f"{command}: {text}" if command else text


def _is_journal_error(error: Exception) -> bool:
    """Whether it is a JournalError; nobody raises one before the module is loaded."""
    errors = sys.modules.get("kdabench.measure.errors")
    return errors is not None and isinstance(error, errors.JournalError)
