"""The command line. Exit status 0, 1 for a finding, 2 for a mistake in the command or its input,
130 after Ctrl-C.

A command's module is imported when the command is asked for; to list them imports none. Each has a
function `command`.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib import import_module, metadata
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from kdabench.cli import console
from kdabench.data.errors import KdaBenchError

COMMANDS = {
    "run": ("run", "Sweep, fit, write the policy, plot and report, in one go."),
    "sweep": ("sweep", "Measure a sweep, or replay it where there is no GPU."),
    "tune": ("tune", "Search each variant's fastest options by Optuna, cell by cell."),
    "fit": ("fit", "Fit the thresholds and schedules; print regret and confidence."),
    "emit": ("emit", "Write a device's policy module from its records."),
    "check": ("check", "Compare every generated module with what its records give."),
    "choose": ("choose", "Print what a device's policy picks for a step, and why."),
    "plot": ("plot", "Draw latency curves."),
    "compare": ("compare", "Compare two sessions cell by cell: B against A."),
    "report": ("report", "Write one HTML file about a device, for a reviewer."),
    "compile": ("compile_", "Cross-compile all kernels and report what they take."),
    "binaries": ("binaries", "Write or compare the manifest of the kernels' machine code."),
    "verify": ("verify", "Check every variant against the reference, on the GPU."),
    "list": ("list_", "List sweeps, recorded devices, journals and variants."),
    "show": ("show", "Show what a sweep asks, or what was recorded."),
    "export": ("export", "Write a measured journal into the recorded results, or a table."),
    "merge": ("merge", "Join journals of one sweep into a new one."),
    "doctor": ("doctor", "Say what this machine has and lacks, and how to mend it."),
}
"""Commands in the order of the help: module in kdabench.cli.commands, and short help."""

_CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


class LazyGroup(TyperGroup):
    """A group that imports a command when it is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Name the commands, in order."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import a command; None if there is no such one."""
        if cmd_name not in COMMANDS:
            return None
        module = import_module(f"kdabench.cli.commands.{COMMANDS[cmd_name][0]}")
        app = _typer()
        app.command(cmd_name, context_settings=_CONTEXT)(_interruptible(module.command))
        return typer.main.get_command(app)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List names and short helps, importing nothing."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the command that the arguments begin with.

        Raises a usage error that names what might have been meant.
        """
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            close = get_close_matches(args[0], COMMANDS, n=1)
            hint = f". Did you mean {close[0]!r}?" if close else ""
            ctx.fail(f"No such command {args[0]!r}{hint}")
        return super().resolve_command(ctx, args)


def _version(asked: bool) -> None:
    if asked:
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


def _typer(**options: Any) -> typer.Typer:
    return typer.Typer(
        rich_markup_mode=None, add_completion=False, pretty_exceptions_enable=False, **options
    )


def _app() -> typer.Typer:
    app = _typer(name="kdabench", cls=LazyGroup, no_args_is_help=True, context_settings=_CONTEXT)
    app.callback()(_root)
    return app


def _interruptible(command: Callable[..., None]) -> Callable[..., None]:
    """Wrap a command, so that Ctrl-C is one line and an exit status."""

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
    try:
        returned = _app()(arguments or ["--help"], prog_name="kdabench", standalone_mode=False)
        return returned if isinstance(returned, int) else 0
    except typer.TyperException as error:
        console.error_line(_usage_error(error))
        return error.exit_code
    except KdaBenchError as error:
        console.error_line(str(error))
        return console.USAGE if error.mistake else console.FINDING
    except BrokenPipeError:
        return console.BROKEN_PIPE
    except OSError as error:
        console.error_line(console.describe(error))
        return console.FINDING
    except (KeyboardInterrupt, typer.Abort):
        return console.INTERRUPTED


def _usage_error(error: Any) -> str:
    """Say in one line what is wrong with the command line, and what might have been meant."""
    path = getattr(getattr(error, "ctx", None), "command_path", "kdabench")
    command = path.removeprefix("kdabench").strip()
    option, possible = getattr(error, "option_name", None), getattr(error, "possibilities", None)
    if option and possible:
        close = get_close_matches(option, possible, n=1, cutoff=0)[0]
        text = f"no such option {option}; did you mean {close}?"
    else:
        text = error.format_message().rstrip(".")
        text = text[:1].lower() + text[1:]
    return f"{command}: {text}" if command else text
