"""A barrier over all ranks in stream order, on the device: the host does not wait."""

from __future__ import annotations

from typing import Any

from cuep import env
from cuep.backend import Backend, Comm
from cuep.errors import ClosedError, PeerTimeout
from cuep.kernel import Kernel

_REPORT_BYTES = 32


class DeviceBarrier:
    """Stream-ordered barrier of the CUDA backend, through NVSHMEM's signals; works inside CUDA graphs. Collective.

    Every rank calls it equally often, one call at a time: calls on different streams must be put in order.
    """

    def __init__(self, backend: Backend, comm: Comm, timeout_s: float | None = None) -> None:
        self._rank = comm.rank
        self._timeout_s = env.timeout_s() if timeout_s is None else timeout_s
        self._signals = backend.symmetric(8 * comm.size)
        self._epoch = backend.zeros((1,), "uint64")
        self._report = backend.pinned(_REPORT_BYTES)
        self._words = self._report.view("uint64")  # 1 after a timeout, then peer, expected, seen
        self._kernel = Kernel(backend, "barrier_nvshmem", {"kNumRanks": comm.size}, comm)
        self._record = self._kernel.layout.new()
        self._record["signals"] = self._signals.address
        self._record["epoch"] = self._epoch.data.ptr
        self._record["report"] = self._report.ctypes.data
        self._record["timeout_ns"] = int(self._timeout_s * 1e9)
        self._record["rank"] = comm.rank
        self._backend = backend
        self._is_closed = False
        comm.barrier()  # nobody signals before all words are zero

    def enqueue(self, stream: Any = None) -> None:
        """What is enqueued on `stream` after this runs when all ranks have got here. None: CuPy's current stream.

        Raises:
            PeerTimeout: an earlier barrier waited too long for a peer.
        """
        self.check()
        if self._is_closed:
            raise ClosedError("this barrier is closed")
        self._kernel.launch(1, self._record, self._backend.stream(stream))

    def check(self) -> None:
        """Raise PeerTimeout if a barrier that has run so far gave up. Does not wait."""
        timed_out, peer, expected, seen = (int(word) for word in self._words)
        if timed_out:
            raise PeerTimeout(
                f"barrier: rank {self._rank} waited more than {self._timeout_s:g} s for rank {peer}"
                f" (barrier {expected}, rank {peer} has reached {seen})"
            )

    def close(self) -> None:
        """Free its memory: collective, but local after a PeerTimeout. Twice is fine."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._words[0]:
            self._signals.leak()
            return
        self._backend.synchronize()
        self._signals.free()
