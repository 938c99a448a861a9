"""Locks that name their holder, and that the kernel drops when the holder ends, however it ends."""

from __future__ import annotations

import fcntl
import os
import re
import socket
import tempfile
from pathlib import Path

from kdabench.measure.errors import JournalBusy, JournalError


def hold(path: Path, what: str = "written") -> int:
    """Lock `<path>.lock` for this process alone, until the returned descriptor is closed or the
    process ends.

    what  is being done to `path` meanwhile, for the message of whoever comes second

    Raises JournalBusy naming the holder, OSError if the lock file can't be written.
    """
    descriptor = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"pid {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    except BlockingIOError:
        holder = (
            os.pread(descriptor, 300, 0).decode(errors="replace").strip()
            or "a process that is just starting"
        )
        os.close(descriptor)
        raise JournalBusy(f"{path}: is being {what} by {holder}") from None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def lock_gpu(uuid: str) -> int:
    """Keep other sweeps off a GPU until the returned descriptor is closed or this process ends.

    The lock lies in $KDABENCH_LOCKS, by default the machine's folder for temporary files.

    Raises JournalBusy naming the holder, JournalError if nothing can be written there.
    """
    folder = Path(os.environ.get("KDABENCH_LOCKS") or tempfile.gettempdir())
    path = folder / f"kdabench-{re.sub('[^A-Za-z0-9-]', '-', uuid)}"
    try:
        return hold(path, "measured on")
    except OSError as error:
        raise JournalError(
            f"{path}.lock: {error.strerror}; name another folder by KDABENCH_LOCKS"
        ) from error
