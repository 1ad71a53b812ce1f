"""Combines whose rows copy engines bring home (ht, flat, variants={"combine": "copy"}): what the host enqueues, and how
it comes to know how many rows go where."""

from __future__ import annotations

import weakref
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from cuep import layout
from cuep.arrays import rows_of
from cuep.backend import Backend, Event, Rows, Stream
from cuep.errors import OrderError
from cuep.launching import CombineCall

if TYPE_CHECKING:
    from cuep.group import Group

Counts = tuple[int, ...]  # rows for each rank


class RowCounts:
    """How many rows a handle sends to each rank, on the host.

    source: where the device has the first row of each rank, int32, and how many there are after the last.
    """

    def __init__(self, backend: Backend, source: int, num_ranks: int, most_rows: int) -> None:
        self._source = source
        self._most_rows = most_rows
        self._memory: npt.NDArray[np.int32] = backend.pinned(4 * (num_ranks + 1)).view(np.int32)
        self._event: Event | None = None  # of the copy that is to be waited for
        self._known: Counts | None = None
        self._is_fixed = False  # until the next call that routes; else any replay of a graph may have changed them
        weakref.finalize(self, backend.unpinned, self._memory.view(np.uint8))

    def ask(self, stream: Stream) -> None:
        """Behind a routing. Does not wait."""
        self._is_fixed = not stream.is_capturing()
        if self._is_fixed:
            self._copy(stream)

    def get(self, stream: Stream) -> Counts:
        """Waits for the routing, or, where that was captured in a graph, for all that `stream` has been given.

        Raises:
            OrderError: inside a capture, before they were known.
        """
        if stream.is_capturing():
            if self._known is None or self._event is not None:
                raise OrderError(
                    "combine: with variants={'combine': 'copy'} the host must know how many rows go where, and cannot"
                    " wait for that in a stream capture: call num_recv_tokens() or combine once before"
                )
            return self._known
        if not self._is_fixed:
            self._copy(stream)
        return self.learn() or ()

    def learn(self) -> Counts | None:
        """Waits for what was asked."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
            self._known = _counts(self._memory.tolist(), self._most_rows)
        return self._known

    def _copy(self, stream: Stream) -> None:
        stream.copy_rows(self._memory.ctypes.data, (self._source, 1, self._memory.nbytes, self._memory.nbytes))
        self._event = stream.record()


def _counts(bases: list[int], most_rows: int) -> Counts:
    """All 0 where there is no routing, and `bases` are anything: the device refuses that then."""
    counts = tuple(after - before for before, after in pairwise(bases))
    is_routing = bases[0] == 0 and all(0 <= count <= most_rows for count in counts)
    return counts if is_routing else (0,) * len(counts)


class RowCopies:
    """A group's copies, to each peer on a stream of its own."""

    def __init__(self, group: Group) -> None:
        backend = group.world.backend
        self._group = group
        self._streams = [
            backend.stream(backend.new_stream(is_urgent=True)) if rank != group.rank else None
            for rank in range(group.num_ranks)
        ]
        self._stamp = group.memory.address + group.arena.offsets["combine_stamp"]

    def enqueue(self, stream: Stream, call: CombineCall, counts: Counts) -> list[Event]:
        """Rows to their owners, behind what `stream` has been given so far. Returns what to wait for in the end."""
        group, begin = self._group, stream.record()
        firsts = np.cumsum((0, *counts)).tolist()
        ends = []
        for step in range(1, group.num_ranks):
            dst = (group.rank + step) % group.num_ranks
            side = stream if stream.is_synchronous else self._streams[dst]
            if side is None or counts[dst] == 0:
                continue
            side.wait(begin)
            self._copy_to(dst, side, call, firsts[dst], counts[dst])
            ends.append(side.record())
        return ends

    def _copy_to(self, dst: int, side: Stream, call: CombineCall, first: int, count: int) -> None:
        """Each part of the rows, and its flag behind it."""
        group, cfg = self._group, self._group.cfg
        slot = (group.rank - dst - 1) % group.num_ranks * cfg.max_tokens_per_rank  # Home::staged_index
        if call.row_weight_grads is not None:
            grads_bytes = 4 * cfg.num_topk
            from_ = _part((call.row_weight_grads.address, 0, grads_bytes, grads_bytes), first, count)
            side.copy_rows(self._at(dst, "combine_grads") + slot * grads_bytes, from_)
        row_bytes = cfg.combine_row_bytes
        to, rows = self._at(dst, "combine_rows") + slot * row_bytes, rows_of(call.expert_out)
        flags = self._at(dst, "combine_flags") + group.rank * layout.COPY_CHUNKS * layout.WORD_BYTES
        per_chunk = -(-count // layout.COPY_CHUNKS)
        for chunk, begin in enumerate(range(0, count, per_chunk)):
            side.copy_rows(to + begin * row_bytes, _part(rows, first + begin, min(per_chunk, count - begin)))
            side.copy_rows(flags + chunk * layout.WORD_BYTES, (self._stamp, 1, layout.WORD_BYTES, layout.WORD_BYTES))

    def _at(self, rank: int, region: str) -> int:
        return self._group.memory.peers[self._group.members[rank]] + self._group.arena.offsets[region]


def _part(rows: Rows, first: int, count: int) -> Rows:
    address, _, stride, row_bytes = rows
    return address + first * stride, count, stride, row_bytes
