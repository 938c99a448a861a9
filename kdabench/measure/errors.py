"""Why a journal or a lock can't be had."""

from __future__ import annotations


class JournalError(Exception):
    """A journal that can't be used or written. One line: file and reason."""


class JournalBusy(JournalError):  # noqa: N818  it names a state, not a mistake
    """Another process holds this journal, storage or GPU; the message says which."""
