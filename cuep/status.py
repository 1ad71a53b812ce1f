"""What kernels report to the host: struct Report of operation.cuh, in host memory that the device writes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from cuep.errors import PeerTimeout
from cuep.layout import REPORT_BYTES

OPERATIONS = ("create_handle/update", "dispatch", "combine")  # enum Op
PHASES = ("reuse of a buffer that the peer reads", "counts of the peer", "rows of the peer")  # enum Phase

_FIELDS = (
    "timed_out op phase peer expected seen epoch num_refused refused_op refused_by refused_handle num_bad_ids "
    "num_overflows".split()
)
_DTYPE = np.dtype([(name, "u4") for name in _FIELDS])
assert _DTYPE.itemsize == REPORT_BYTES
_TIMED_OUT, _NUM_REFUSED = _FIELDS.index("timed_out"), _FIELDS.index("num_refused")


class Report:
    """Read without waiting for the device; what the device has not written yet is simply not there yet."""

    def __init__(self, memory: npt.NDArray[np.uint8], rank: int) -> None:
        self._memory = memory
        self._raw = memory.data.cast("B").cast("I")  # much faster to look at than NumPy's
        self._words = memory.view(_DTYPE)[0]
        self._rank = rank
        self._refusals_seen = 0
        self._bad_ids_seen = 0
        self._overflows_seen = 0

    @property
    def address(self) -> int:
        return int(self._memory.ctypes.data)

    def has_news(self) -> bool:
        """Whether timeout() or take_refusal() have something to say."""
        return self._raw[_TIMED_OUT] != 0 or self._raw[_NUM_REFUSED] != self._refusals_seen

    def timeout(self, timeout_s: float) -> PeerTimeout | None:
        """The error of the wait that ran out of time, or None."""
        words = self._words
        if not words["timed_out"]:
            return None
        awaited = PHASES[int(words["phase"])].replace("the peer", f"rank {int(words['peer'])}")
        return PeerTimeout(
            f"{OPERATIONS[int(words['op'])]}: rank {self._rank} waited more than {timeout_s:g} s for the {awaited} "
            f"(epoch {int(words['epoch'])}: expected {int(words['expected'])}, seen {int(words['seen'])}); "
            "the group can only be closed now"
        )

    def take_refusal(self) -> dict[str, Any] | None:
        """The newest operation that a rank refused, once: {"op", "rank", "handle"}."""
        count = int(self._words["num_refused"])
        if count == self._refusals_seen:
            return None
        self._refusals_seen = count
        return {
            "op": OPERATIONS[int(self._words["refused_op"])],
            "rank": int(self._words["refused_by"]),
            "handle": int(self._words["refused_handle"]),
        }

    def take_bad_ids(self) -> int:
        """How many expert ids outside [-1, num_experts) were met since the last call."""
        count = int(self._words["num_bad_ids"])
        new, self._bad_ids_seen = (count - self._bad_ids_seen) % 2**32, count
        return new

    def take_overflow(self) -> bool:
        """Whether this rank's duplicate ids were too many for an expert's zone, once."""
        count = int(self._words["num_overflows"])
        is_new, self._overflows_seen = count != self._overflows_seen, count
        return is_new
