"""Received: what a rank got from a dispatch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from cuep.errors import ClosedError
from cuep.events import Event


@dataclass(frozen=True)
class Received:
    """What a rank received; arrays of x's framework that belong to the handle and keep their addresses.

    They hold until the handle's next dispatch or release() (tokens and scales of a handle that receives in place: as
    GroupConfig.in_place says), and are complete in stream order (after a send_only
    dispatch: of complete()). L local experts, N ranks, B max_tokens_per_rank, K num_topk, H hidden, R rows
    (max_recv_tokens_per_rank, or the most that can come). What a layout does not have is None. Rows beyond the counts
    are unspecified: never read them (but GroupConfig.zero_padding).

    Attributes:
        tokens: ll expert_major [L, N*B, H], the first expert_counts[l] rows of each, by source rank, token, k; ll
            rank_major [N, B, H], the first src_rank_counts[n] rows of each, by token; ht flat [R, H], the first total
            rows, by source rank, token; ht expert_major [R, H], expert_counts[l] rows from expert_offsets[l] on, by
            source rank, token, k.
        scales: with GroupConfig.quant, those of each row in the order of tokens: [..., S], S one for each 128 values
            or scales_per_row; float32, uint8 exponents e of 2**(e - 127) (ue8m0; packed by four in int32 where they lie
            by columns), or as the caller's. tokens are float8_e4m3fn then, or of the caller's dtype; bytes (uint8) from
            CuPy, Numba, and JAX on a GPU.
        expert_counts: int32 [L], rows of each local expert (rank_major and flat: (row, k) pairs).
        expert_offsets: int32 [L+1], first row of each expert's zone in tokens.reshape(-1, H) (expert_major).
        src_rank_counts: int32, rows from each source rank: [L, N] (expert_major) or [N].
        source: int32, where every row comes from: (rank, token, k) [..., 3] (expert_major) or (rank, token) [..., 2].
        topk_idx: int32 [N, B, K] or [R, K] (rank_major, flat): expert of every (row, k), numbered as
            GroupConfig.expert_ids says, or -1 where it is not this rank's, and in all rows beyond the counts.
        topk_weights: float32; rank_major and flat: the shape of topk_idx, 0 where that is -1; ht expert_major: [R], the
            weight of every row. None if the handle has no weights.
        total: int32 [1], rows that came or, with overflow="drop", would have come.
        lease: keeps a receive buffer (ht) from other handles as long as someone holds this Received, or its handle
            lives: an array of it alone does not.
    """

    tokens: Any
    expert_counts: Any
    src_rank_counts: Any
    source: Any
    total: Any
    expert_offsets: Any = None
    topk_idx: Any = None
    topk_weights: Any = None
    scales: Any = None
    lease: Any = field(default=None, repr=False)
    _handle: Any = field(default=None, repr=False, compare=False)  # a weak reference

    @property
    def event(self) -> Event:
        """Handle.event of the handle that received this. Raises ClosedError if that is closed or gone."""
        handle = None if self._handle is None else self._handle()
        if handle is None:
            raise ClosedError("event: the handle that received this is gone")
        event: Event = handle.event
        return event

    def __getstate__(self) -> dict[str, Any]:
        """For pickle and copy: the arrays alone."""
        return self.__dict__ | {"lease": None, "_handle": None}

    def release(self) -> None:
        """Say that the rows have been read, in stream order: ht gives the receive buffer to the next handle that needs
        one, and this handle takes one again at its next dispatch. combine works all the same. Local; twice is fine.
        """
        if self.lease is not None:
            self.lease.give_back()
