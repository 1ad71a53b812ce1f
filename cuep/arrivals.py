"""How long a rank waited for each of its peers: the host's side of kernels_cu/include/cuep/arrivals.cuh."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from cuep.status import COUNTED


@dataclass(frozen=True)
class Arrivals:
    """How long this rank's kernels of one kind waited for each rank, arrays [num_ranks].

    Attributes:
        num_waits: kernels that had to wait for it, int64. This rank's own: its blocks wait for one another's words.
        total_us, longest_us: from the start of such a kernel until its last wait for that rank was over, float64; by a
            clock that on some GPUs ticks once in a microsecond.
    """

    num_waits: npt.NDArray[np.int64]
    total_us: npt.NDArray[np.float64]
    longest_us: npt.NDArray[np.float64]


def arrivals_of(words: Any, num_ranks: int) -> dict[str, Arrivals]:
    """Of "dispatch" and "combine", from struct Arrivals. What the last kernel noted is not added up yet."""
    numbers = words.astype(np.int64)
    newest = numbers[: 4 * num_ranks].reshape(2, 2, num_ranks).max(0)
    num_waits, sums, longest = numbers[4 * num_ranks : -1].reshape(3, 2, num_ranks)
    return {
        operation: Arrivals(
            num_waits[i] + (newest[i] > 0), (sums[i] + newest[i]) / 1e3, np.maximum(longest[i], newest[i]) / 1e3
        )
        for i, operation in enumerate(COUNTED[1:])
    }
