"""The base of errors that a command shows as one line."""

from __future__ import annotations


class KdaBenchError(Exception):
    """An error whose text is one line for a user: where, what, and the rule.

    Raised `from` another exception it is a failure of the disk or of a library; by itself it is a
    mistake in what the user asked for.
    """

    @property
    def mistake(self) -> bool:
        """Whether the user can mend it by asking for something else."""
        return self.__cause__ is None
