"""What commands print: tables, JSON, one-line errors, progress. Plain text unless it goes to a
terminal."""

from __future__ import annotations

import io
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NoReturn

import typer

if TYPE_CHECKING:  # the help needs neither
    from kda_kernels.case import Case
    from kdabench.measure.session import Event

FINDING = 1
"""Exit status: the command worked and found something wrong."""
USAGE = 2
"""Exit status: the command line or an input file cannot be used."""
SIGNALLED = 128
"""Exit status of a command that a signal stopped, less the signal's number."""
INTERRUPTED = 130
BROKEN_PIPE = 141


def write(text: str) -> None:
    """Write text to stdout. Ends the program quietly if its reader is gone."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # so that the flush at exit doesn't complain
        raise typer.Exit(BROKEN_PIPE) from None


def line(text: str = "") -> None:
    """Write a line to stdout."""
    write(text + "\n")


def emit_json(value: object) -> None:
    """Write strict JSON to stdout."""
    write(json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False) + "\n")


def error_line(text: str) -> None:
    """Say on stderr what is wrong, in one line."""
    note(f"kdabench: {text}")


def note(text: str) -> None:
    """Write a remark to stderr, beside the output proper; it is lost if the terminal is gone, which
    must not end the work."""
    with suppress(OSError):
        print(" ".join(text.split()), file=sys.stderr, flush=True)


def fail(text: str) -> NoReturn:
    """End the command with one line on stderr and the status for a user's mistake."""
    error_line(text)
    raise typer.Exit(USAGE)


@contextmanager
def user_input() -> Iterator[None]:
    """Turn ValueErrors and unreadable files, which are the user's to mend, into one line and the end
    of the command; print warnings as lines, too."""
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.showwarning = lambda message, *_, **__: note(f"warning: {message}")
        try:
            yield
        except (
            ValueError,
            FileNotFoundError,
            IsADirectoryError,
            NotADirectoryError,
            PermissionError,
        ) as error:
            fail(describe(error))


def describe(error: BaseException) -> str:
    """Say in one line what an exception is; file errors as `path: reason`."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


def table(
    headings: Sequence[str], rows: Sequence[Sequence[object]], *, right: Sequence[int] = ()
) -> str:
    """Align columns, two spaces apart; the columns whose indices are in `right` are flush
    right."""
    cells = [
        list(headings),
        *([("-" if value is None else str(value)) for value in row] for row in rows),
    ]
    widths = [max(len(row[i]) for row in cells) for i in range(len(headings))]

    def aligned(row: Sequence[str]) -> str:
        padded = (
            v.rjust(w) if i in right else v.ljust(w)
            for i, (v, w) in enumerate(zip(row, widths, strict=True))
        )
        return "  ".join(padded).rstrip()

    return "\n".join(map(aligned, cells)) + "\n"


def show_table(
    headings: Sequence[str], rows: Sequence[Sequence[object]], *, right: Sequence[int] = ()
) -> None:
    """Show a table on stdout: drawn by rich on a terminal, plain text elsewhere."""
    if not sys.stdout.isatty():
        write(table(headings, rows, right=right))
        return
    # Not at the top: only a terminal needs it, and every start would pay for it.
    from rich import box
    from rich.console import Console
    from rich.table import Table

    drawn = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for index, heading in enumerate(headings):
        drawn.add_column(heading, justify="right" if index in right else "left", overflow="fold")
    for row in rows:
        drawn.add_row(*("-" if value is None else _escaped(str(value)) for value in row))
    buffer = io.StringIO()
    Console(file=buffer, force_terminal=True, width=Console().width).print(drawn)
    write(buffer.getvalue())


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)


def duration(seconds: float) -> str:
    """Say seconds as 12 s, 3 min 20 s or 2 h 5 min."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


@contextmanager
def progress() -> Iterator[Callable[[Event], None]]:
    """Give a listener for a sweep: bar, time left and live best on a terminal; now and then a line
    elsewhere. On stderr."""
    if not sys.stderr.isatty():
        yield _LineListener()
        return
    listener = _BarListener()
    listener.bar.start()
    try:
        yield listener
    finally:
        with suppress(OSError):
            listener.bar.stop()


class _BarListener:
    """Progress on a terminal; one that is gone must not end the work."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        columns: tuple[Any, ...] = (
            TextColumn("cells"),
            BarColumn(bar_width=30),
            MofNCompleteColumn(),
            TimeRemainingColumn(compact=True),
            TextColumn("{task.description}", markup=False),
        )
        self.bar = Progress(*columns, console=Console(stderr=True), transient=True)
        self._task = self.bar.add_task("", total=None)
        self._skipped = 0

    def __call__(self, event: Event) -> None:
        with suppress(OSError):
            self._show(event)

    def _show(self, event: Event) -> None:
        if event.kind == "note":
            self.bar.console.print(event.text, markup=False, highlight=False)
            return
        if event.kind == "plan":
            self._skipped = event.done
            self.bar.reset(self._task, total=event.total - self._skipped, completed=0)
        self.bar.update(
            self._task,
            total=event.total - self._skipped,
            completed=event.done - self._skipped,
            description=_cell_text(event),
        )


class _LineListener:
    """Progress where nobody watches: a line at the start, then at most one in ten seconds, and
    every note."""

    def __init__(self) -> None:
        self._begin = self._last = time.monotonic()
        self._skipped = 0

    def __call__(self, event: Event) -> None:
        if event.kind == "note":
            note(event.text)
            return
        now = time.monotonic()
        if event.kind == "plan":
            self._skipped = event.done
            kept = f", {event.done} of them from before" if event.done else ""
            note(f"{event.total} cells and processes{kept}")
            return
        if now - self._last < 10 and event.done < event.total:
            return
        self._last = now
        left = (now - self._begin) / max(event.done - self._skipped, 1) * (event.total - event.done)
        when = f"{duration(left)} left" if left else f"in {duration(now - self._begin)}"
        note(f"{event.done}/{event.total}, {when}: {_cell_text(event)}")


def _cell_text(event: Event) -> str:
    if event.cell is None:
        return event.text
    cell = event.cell
    text = f"{cell.kind} q={cell.tokens} H={cell.heads} R={cell.requests}"
    if event.best is None or event.time_us is None:
        return f"{text}: no result"
    return f"{text}: {event.best} {event.time_us:.2f} us"


def ticks(what: str) -> Callable[[object, int], None]:
    """Give a listener that counts what is done of how many, on a terminal."""
    done = 0

    def tick(row: object, total: int) -> None:
        nonlocal done
        done += 1
        if sys.stderr.isatty():
            print(
                f"\r{done}/{total} {what}",
                end="\n" if done == total else "",
                file=sys.stderr,
                flush=True,
            )

    return tick


def case_name(case: Case) -> str:
    """Name a standard case: variant, options, kind, tokens and state."""
    choices = ", ".join(f"{key}={value}" for key, value in case.options)
    problem = case.problem
    return f"{case.variant}({choices}) {problem.kind} q={problem.tokens} {problem.state_dtype}"
