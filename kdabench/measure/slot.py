"""The one worker that measures on a GPU, replaced whenever it is lost."""

from __future__ import annotations

import os
import time

from kdabench.measure.locks import lock_gpu
from kdabench.measure.worker_process import Worker, WorkerLostError, WorkerMain

_AGAIN_S = 1.0  # the GPU may not yet be rid of what a lost worker left


class SweepFailedError(OSError):
    """Nothing can be measured at all, in one line."""


class Slot:
    """The current worker, started when first needed and after the last one was lost; and the lock
    on its GPU. A context manager.

    While a worker is silent for long, a spare one is started, so that a hang costs little more than
    its time limit.
    """

    def __init__(self, device_index: int, worker_main: WorkerMain) -> None:
        self._index, self._main = device_index, worker_main
        self._worker: Worker | None = None
        self._spare: Worker | None = None
        self._lock: int | None = None

    def __enter__(self) -> Slot:
        return self

    def __exit__(self, *about: object) -> None:
        self.drop()
        if self._spare is not None:
            self._spare.close()
        if self._lock is not None:
            os.close(self._lock)

    def get(self) -> Worker:
        """Give the worker, up and ready; a start that fails is tried a second time.

        Raises JournalBusy if another command measures on the GPU, SweepFailedError if no worker
        comes up.
        """
        if self._worker is None:
            try:
                self._worker = self._started()
            except WorkerLostError:
                time.sleep(_AGAIN_S)
                try:
                    self._worker = self._started()
                except WorkerLostError as lost:
                    raise SweepFailedError(f"the worker did not start: {lost.reason}") from lost
            if self._lock is None:
                self._lock = lock_gpu(str(self._worker.env.get("uuid") or f"cuda-{self._index}"))
        return self._worker

    def _started(self) -> Worker:
        self._prepare_spare()
        assert self._spare is not None
        started, self._spare = self._spare, None
        started.wait()
        return started

    def _prepare_spare(self) -> None:
        if self._spare is None:
            self._spare = Worker(self._index, self._main, self._prepare_spare)

    def drop(self) -> None:
        """End the worker, if there is one: the next is a fresh process."""
        if self._worker is not None:
            self._worker.close()
            self._worker = None
