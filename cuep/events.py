"""Event: a point in a stream, for streams of any framework."""

from __future__ import annotations

from typing import Any

from cuep.backend import Backend
from cuep.backend import Event as Point


class Event:
    """What was enqueued on a stream up to some time. From Received.event, Handle.event and World.record_event.

    It can be passed as previous_event. CuPy's and torch's Stream.wait_event take it, too: CuPy reads `ptr`, and torch
    calls `wait`.

    Attributes: ptr, the CUevent (0 on the CPU backend).
    """

    def __init__(self, backend: Backend, point: Point) -> None:
        self._backend = backend
        self.point = point
        self.ptr = int(getattr(point, "handle", 0))

    def wait(self, stream: Any = None) -> None:
        """What is enqueued on `stream` from now on starts after this event. Does not block the host.

        Args:
            stream: None = the current stream of the backend's own framework (CuPy; NumPy has none: returns when all is
                done).
        """
        self._backend.stream(stream).wait(self.point)

    def synchronize(self) -> None:
        """Block the host until everything before it is done."""
        self.point.synchronize()

    def query(self) -> bool:
        """Whether everything before it is done."""
        return self.point.query()
