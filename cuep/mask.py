"""The ranks of a group that take part, and how they agree on that: the host's side of kernels_cu/mask_agree.cu."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from cuep.errors import ArgumentError, ArgumentTypeError
from cuep.kernel import Kernel
from cuep.launching import address
from cuep.status import agreement_s

if TYPE_CHECKING:
    from cuep.backend import Stream
    from cuep.group import Group


class Mask:
    """Of one group. Making it is collective, where the group compiles together."""

    def __init__(self, group: Group, start_epoch: int) -> None:
        self._num_ranks = group.num_ranks
        self._rank = group.rank
        self.active = (1,) * group.num_ranks
        self._kernel = Kernel(group.world.backend, "mask_agree", {"kNumRanks": group.num_ranks}, group.comm)
        self._record = self._kernel.layout.new()
        known = {
            "arena": [group.memory.peers[rank] for rank in group.members],
            "mask_offset": group.arena.offsets["mask"],
            "control": address(group.workspace["control"]),
            "report": group.report.address,
            "timeout_ns": int(agreement_s(float(group.cfg.timeout_s or 0)) * 1e9),
            "start_epoch": start_epoch,
            "rank": group.rank,
        }
        for name, value in known.items():
            self._record[name] = value

    def checked(self, active: Any) -> tuple[int, ...]:
        """The ranks of an argument, 1 = takes part."""
        allowed = f"{self._num_ranks} values, 1 for a rank that takes part and 0 for one that does not"
        if isinstance(active, np.ndarray) and active.ndim == 1:
            active = active.tolist()
        if not isinstance(active, (list, tuple)):
            raise ArgumentTypeError(f"active: got {type(active).__name__}, allowed: {allowed}")
        values = tuple(active)
        is_number = all(isinstance(value, (int, float, np.number, np.bool_)) for value in values)
        if len(values) != self._num_ranks or not is_number or any(value not in (0, 1) for value in values):
            raise ArgumentError(f"active={list(values)} is not allowed; allowed: {allowed}")
        if not values[self._rank]:
            raise ArgumentError(f"active={list(values)} leaves out rank {self._rank}, which calls; allowed: 1 for it")
        return tuple(int(value) for value in values)

    def enqueue(self, active: tuple[int, ...], ticket: int, stream: Stream) -> None:
        """The agreement with all active ranks."""
        self._record["active"] = bits(active)
        self._record["nonce"] = secrets.randbelow(2**32 - 1) + 1
        self._record["ticket"] = ticket
        self._kernel.launch(1, self._record, stream)


def bits(active: Sequence[int]) -> int:
    return sum(value << rank for rank, value in enumerate(active))
