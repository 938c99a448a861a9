"""Marked blocks of the documents: text that measurements or commands give, kept current.

    <!-- begin: certificate nvidia-h200 -->
    ...
    <!-- end -->

The name is a table of `doc_tables.TABLES` and a recorded device, or `$ kdabench ...`: what that
command prints. Blocks stand in README.md and docs/*.md beside a folder of results.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from kdabench.data import devices
from kdabench.data.measurements import write_atomic
from kdabench.review.doc_tables import TABLES, Recorded

_BLOCK = re.compile(r"^<!-- begin: ([^\n]+) -->\n(.*?)^<!-- end -->$", re.MULTILINE | re.DOTALL)
_MARKER = re.compile(r"^<!-- (?:begin: .+|end) -->$", re.MULTILINE)
_COMMAND = "$ kdabench "
_LIMIT_S = 60  # a command of a document takes a second; this one hangs


class BlockError(ValueError):
    """A block that can't be made. One line: document, block and the rule."""


@dataclass(frozen=True)
class Document:
    """A document as it stands, and as its blocks should be."""

    path: Path
    old: str
    new: str

    @property
    def diff(self) -> str:
        """Unified diff from what stands to what should; empty if it is current."""
        old, new = (text.splitlines(keepends=True) for text in (self.old, self.new))
        return "".join(difflib.unified_diff(old, new, f"{self.path} (old)", f"{self.path} (new)"))

    def write(self) -> None:
        """Replace the file, whole or not at all."""
        write_atomic(self.path, self.new)


def stale(results: Path) -> list[Document]:
    """Documents beside a folder of results whose blocks are not what they should be.

    Raises BlockError for a malformed block, MeasurementError for measurements that can't be read.
    """
    root = results.parent
    recorded = cache(lambda device: Recorded(devices.results_folder(results, device)))

    def text_of(name: str) -> str:
        return _output(name, root) if name.startswith(_COMMAND) else _table(name, recorded)

    found = [Document(path, old, filled(path, old, text_of)) for path, old in _documents(root)]
    return [document for document in found if document.old != document.new]


def _documents(root: Path) -> Iterator[tuple[Path, str]]:
    for path in (root / "README.md", *sorted(root.glob("docs/**/*.md"))):
        if path.is_file():
            yield path, path.read_text(encoding="utf-8")


def filled(path: Path, text: str, text_of: Callable[[str], str]) -> str:
    """A document's text with every block's inside made anew by its name.

    path names the document in errors. Raises BlockError if a marker has no other, or a name no
    text.
    """
    blocks = list(_BLOCK.finditer(text))
    if any(_MARKER.search(block[2]) for block in blocks) or 2 * len(blocks) != len(
        _MARKER.findall(text)
    ):
        raise BlockError(f"{path}: block: a begin without its own end, or an end without a begin")

    def made(block: re.Match[str]) -> str:
        try:
            inside = text_of(block[1])
        except BlockError as error:
            raise BlockError(f"{path}: {error}") from None
        return f"<!-- begin: {block[1]} -->\n{inside}<!-- end -->"

    return _BLOCK.sub(made, text)


def _table(name: str, recorded: Callable[[str], Recorded]) -> str:
    table, _, device = name.partition(" ")
    if table not in TABLES:
        raise BlockError(
            f"block: {name!r}: a table and a device, or `{_COMMAND}...`; tables: {', '.join(TABLES)}"
        )
    try:
        return f"\n{TABLES[table](recorded(device))}\n\n"
    except devices.DeviceError as error:
        raise BlockError(f"block: {name!r}: {error}") from None


def _output(name: str, root: Path) -> str:
    """What a command prints in the root, and the command above it, as a block of code."""
    words = shlex.split(name.removeprefix("$ "))
    if words[1] == "check":
        raise BlockError(f"block: {name!r}: check makes the blocks and can't stand in one")
    plain = {"COLUMNS": "80", "NO_COLOR": "1", "TERM": "dumb"}
    try:
        done = subprocess.run(
            [sys.executable, "-m", *words],
            cwd=root,
            env=os.environ | plain,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise BlockError(f"block: {name!r}: took over {_LIMIT_S} s") from None
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["nothing said"]
        raise BlockError(f"block: {name!r}: exit status {done.returncode}: {last[0]}")
    lines = [name, *done.stdout.rstrip().splitlines()]
    return "\n" + "".join(f"    {line}".rstrip() + "\n" for line in lines) + "\n"
