"""A worker process as its parent sees it: started, listened to, and ended with everything that it
started.

Whatever the worker does, the parent waits for no message longer than the phase allows: messages and
what the worker prints are drained by threads, so neither a torn message nor a full pipe holds
anybody up.
"""

from __future__ import annotations

import ctypes
import math
import multiprocessing
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess

from kdabench.data.measurements import Status
from kdabench.measure.messages import Began, Job, Message, Phase, Ready

WorkerMain = Callable[[Connection, int], None]
LIMITS_S: dict[Phase, float] = {
    "start": 120,
    "cell": 120,
    "compile": 180,
    "check": 60,
    "measure": 30,
}
"""Longest silence of each phase."""
_LOOK_S = 0.5
_WORKER_START_S = 15.0
_LEAVE_S = 0.5
_KILL_GRACE_S = 3.0
_TAIL_BYTES = 1 << 14
_PR_SET_PDEATHSIG = 1


class WorkerLostError(Exception):
    """The worker died or hung: `status` and `reason` for whatever it was doing, as it announced in
    `began`."""

    def __init__(self, status: Status, reason: str, began: Began) -> None:
        super().__init__(reason)
        self.status: Status = status
        self.reason = reason
        self.began = began


class Worker:
    """One worker process, started, and the pipe to it; `wait` until it is up.

    main  what the process runs; a function of a module, since the process is spawned
    late  called once in a silence that nears its limit, to prepare for the worst
    """

    def __init__(
        self, device_index: int, main: WorkerMain, late: Callable[[], None] = lambda: None
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        log, their_log = context.Pipe(duplex=False)
        arguments = (main, theirs, their_log, device_index)
        self._process: BaseProcess = context.Process(target=_enter, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        their_log.close()
        self._tail = _Tail(log)
        self._inbox: queue.SimpleQueue[Message | _Gone] = queue.SimpleQueue()
        self._threads = [threading.Thread(target=self._listen, daemon=True)]
        self._threads[0].start()
        self._began = Began("start")
        self._late = late
        self.env: Mapping[str, object] = {}

    def wait(self) -> None:
        """Until the worker is up and `env` known. Raises WorkerLostError, and ends it, if it
        doesn't come up."""
        try:
            message = self.receive()
            while not isinstance(message, Ready):
                message = self.receive()
        except BaseException:
            self.close()
            raise
        self.env = message.env

    def _listen(self) -> None:
        while True:
            try:
                message = self._pipe.recv()
            except (EOFError, OSError):
                self._inbox.put(_Gone())
                return
            except Exception as reason:  # what cannot be unpickled raises anything
                self._inbox.put(
                    _Gone(f"the worker's answer cannot be read: {type(reason).__name__}")
                )
                return
            self._inbox.put(message)

    def send(self, job: Job) -> None:
        """Hand over a job. One that isn't taken shows as silence."""
        self._began = Began("cell")
        self._send(job)

    def _send(self, job: Job | None) -> None:
        def write() -> None:
            with suppress(OSError, ValueError):
                self._pipe.send(job)

        self._threads.append(threading.Thread(target=write, daemon=True))
        self._threads[-1].start()

    def receive(self) -> Message:
        """The next message. Raises WorkerLostError if the worker dies or is silent beyond its
        phase's limit."""
        message = self._next(LIMITS_S[self._began.phase])
        if isinstance(message, _Gone):
            raise WorkerLostError("fault", self._epitaph(message), self._began)
        if isinstance(message, Began):
            self._began = message
        return message

    def _next(self, limit: float) -> Message | _Gone:
        end = time.monotonic() + limit
        late = end - min(limit / 2, _WORKER_START_S)
        while True:
            if time.monotonic() > late:
                late = math.inf
                self._late()
            try:
                return self._inbox.get(timeout=min(_LOOK_S, max(0.0, end - time.monotonic())))
            except queue.Empty:
                if not self._process.is_alive() and self._inbox.empty():
                    return _Gone()  # though what it started still holds its end of the pipe
                if time.monotonic() >= end:
                    reason = f"no answer within {limit:g} s of phase {self._began.phase}"
                    raise WorkerLostError("timeout", reason, self._began) from None

    def _epitaph(self, gone: _Gone) -> str:
        phase = self._began.phase
        if gone.reason:
            return f"in phase {phase} {gone.reason}"
        self._process.join(_KILL_GRACE_S)
        code = self._process.exitcode
        ended = "closed its pipe" if code is None else f"ended with exit code {code}"
        return ": ".join(
            filter(None, (f"the worker {ended} in phase {phase}", self._tail.last_line()))
        )

    def close(self) -> None:
        """End the process and everything it started."""
        pid = self._process.pid
        self._send(None)
        self._process.join(_LEAVE_S)
        if pid is not None:
            try:
                os.killpg(pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                self._process.kill()
        self._process.join(_KILL_GRACE_S)
        for thread in self._threads:
            thread.join(_LEAVE_S)
        if not any(thread.is_alive() for thread in self._threads):
            self._pipe.close()  # whose number the next worker's pipe may get


class _Gone:
    """No message will come any more; `reason` if that isn't for the worker's end."""

    def __init__(self, reason: str = "") -> None:
        self.reason = reason


class _Tail:
    """The end of what a worker prints, however much that is."""

    def __init__(self, log: Connection) -> None:
        self._log = log
        self._end = b""
        self._thread = threading.Thread(target=self._drain, daemon=True)
        self._thread.start()

    def _drain(self) -> None:
        with suppress(OSError), self._log:
            while chunk := os.read(self._log.fileno(), 1 << 16):
                self._end = (self._end + chunk)[-_TAIL_BYTES:]

    def last_line(self) -> str:
        self._thread.join(_LEAVE_S)
        lines = self._end.decode(errors="replace").split("\n")
        printable = (
            "".join(c if c.isprintable() else " " for c in line).strip() for line in reversed(lines)
        )
        return next(filter(None, printable), "")[:200]


def _enter(main: WorkerMain, pipe: Connection, log: Connection, device_index: int) -> None:
    """First thing in the new process: a group of its own, which ends with its parent, and a place
    for its output."""
    os.setpgrp()
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for descriptor in (1, 2):
        os.dup2(log.fileno(), descriptor)
    log.close()
    main(pipe, device_index)
