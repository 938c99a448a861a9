"""Signals that end a sweep cleanly."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Stopped(KeyboardInterrupt):
    """A signal, `number`, asked the sweep to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def number_of(stopped: KeyboardInterrupt) -> int:
    """Give the signal behind an interruption: that of Ctrl-C unless it says another."""
    return stopped.number if isinstance(stopped, Stopped) else int(signal.SIGINT)


@contextmanager
def stopping() -> Iterator[None]:
    """Let SIGTERM and SIGHUP, a closed terminal among its senders, raise Stopped within the block:
    once, so that what ends then ends undisturbed.

    One that is ignored, as by nohup, stays so. Outside the main thread nothing is changed.
    """

    def stop(number: int, frame: FrameType | None) -> None:
        for each in replaced:
            signal.signal(each, signal.SIG_IGN)
        raise Stopped(number)

    replaced: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        replaced = {
            n: old
            for n in (signal.SIGTERM, signal.SIGHUP)
            if (old := signal.getsignal(n)) != signal.SIG_IGN
        }
    for number in replaced:
        signal.signal(number, stop)
    try:
        yield
    finally:
        for number, old in replaced.items():
            signal.signal(number, old)
