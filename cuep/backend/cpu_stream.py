"""Streams of the CPU backend: work in order, at once or in a thread."""

from __future__ import annotations

import ctypes
import queue
import threading
import weakref
from collections.abc import Callable, Hashable
from typing import Any

from cuep.backend import Rows

Work = Callable[[], None]


class CpuEvent:
    """A point in a stream."""

    def __init__(self) -> None:
        self._reached = threading.Event()

    def reach(self) -> None:
        self._reached.set()

    def synchronize(self) -> None:
        self._reached.wait()

    def query(self) -> bool:
        return self._reached.is_set()


def _copy_rows(to: Rows, source: Rows) -> None:
    """Releases the interpreter's lock: kernels of other threads go on."""
    (first, _, to_stride, _), (address, num_rows, stride, row_bytes) = to, source
    if stride == to_stride == row_bytes:
        ctypes.memmove(first, address, num_rows * row_bytes)
        return
    for row in range(num_rows):
        ctypes.memmove(first + row * to_stride, address + row * stride, row_bytes)


class SynchronousStream:
    """Runs work in the calling thread before submit() returns. What fails raises there."""

    is_synchronous = True
    key: Hashable = "synchronous"

    def submit(self, work: Work) -> None:
        work()

    def synchronize(self) -> None:
        pass

    def record(self) -> CpuEvent:
        event = CpuEvent()
        event.reach()
        return event

    def wait(self, event: CpuEvent) -> None:
        event.synchronize()

    def copy_rows(self, to: Rows, source: Rows) -> None:
        _copy_rows(to, source)

    def is_capturing(self) -> bool:
        return False

    def capture_id(self) -> int:
        return 0


class _Worker:
    """The thread of a stream; it holds no reference to the stream, so that dropping the stream ends it."""

    def __init__(self) -> None:
        self.jobs: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self.error: BaseException | None = None
        threading.Thread(target=self._serve, name="cuep stream", daemon=True).start()

    def _serve(self) -> None:
        while (job := self.jobs.get()) is not None:
            job()

    def run(self, work: Work) -> None:
        if self.error is not None:  # what follows a failure would work on garbage
            return
        try:
            work()
        except BaseException as error:  # kept for the thread that asks
            self.error = error


class CpuStream:
    """Runs work in order in a thread of its own.

    After a failure later work is dropped until synchronize() has raised it.
    """

    is_synchronous = False

    def __init__(self) -> None:
        self._worker = _Worker()
        weakref.finalize(self, self._worker.jobs.put, None)

    @property
    def key(self) -> Hashable:
        return id(self._worker)

    def submit(self, work: Work) -> None:
        worker = self._worker
        worker.jobs.put(lambda: worker.run(work))

    def synchronize(self) -> None:
        """Wait for all work so far.

        Raises:
            DeviceError: a kernel failed.
        """
        self.record().synchronize()
        error, self._worker.error = self._worker.error, None
        if error is not None:
            raise error

    def record(self) -> CpuEvent:
        event = CpuEvent()
        self._worker.jobs.put(event.reach)
        return event

    def wait(self, event: CpuEvent) -> None:
        """What is submitted from now on starts after `event`."""
        self._worker.jobs.put(event.synchronize)

    def copy_rows(self, to: Rows, source: Rows) -> None:
        self.submit(lambda: _copy_rows(to, source))

    def is_capturing(self) -> bool:
        return False

    def capture_id(self) -> int:
        return 0
