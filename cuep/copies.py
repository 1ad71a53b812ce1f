"""Rows that copy engines move (ht, flat, variants={"dispatch": "copy", "combine": "copy"}): what the host enqueues, and
how it comes to know how many rows go where."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise
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
    """How many rows a handle receives from each rank in dispatch, and sends there in combine, on the host.

    source: where the device has the first row of each rank, int32, and how many there are after the last. most_rows: of
    a rank, and of all.
    """

    def __init__(self, backend: Backend, source: int, num_ranks: int, most_rows: tuple[int, int]) -> None:
        self._source = source
        self._most_rows = most_rows
        self._memory: npt.NDArray[np.int32] = backend.pinned(4 * (num_ranks + 1)).view(np.int32)
        self._event: Event | None = None  # of the copy that is to be waited for
        self._known: Counts | None = None
        self._is_captured = False  # a graph routes the handle anew at each of its replays
        weakref.finalize(self, backend.unpinned, self._memory.view(np.uint8))

    def ask(self, stream: Stream) -> None:
        """Behind a routing. Does not wait."""
        if stream.is_capturing():
            self._is_captured = True
        else:
            self._copy(stream)

    def know(self, bases: npt.NDArray[np.int32]) -> None:
        """What the device has, when it is idle."""
        self._event = None
        self._known = _counts(bases.tolist(), self._most_rows)

    def get(self, stream: Stream) -> Counts:
        """Waits for the newest routing, or, where graphs route the handle, for all that `stream` has been given.

        Raises:
            OrderError: inside a capture, before they were known.
        """
        if stream.is_capturing():
            if self._known is None or self._event is not None:
                raise OrderError(
                    "variants that copy: the host must know how many rows go where, and cannot wait for that in a"
                    " stream capture; call num_recv_tokens(), or dispatch or combine once, before"
                )
            return self._known
        if self._is_captured:
            self._copy(stream)
        if self._event is not None:
            self._event.synchronize()
            self.know(self._memory)
        assert self._known is not None
        return self._known

    def _copy(self, stream: Stream) -> None:
        stream.copy_rows(
            *(_bytes(address, self._memory.nbytes) for address in (self._memory.ctypes.data, self._source))
        )
        self._event = stream.record()


def _counts(bases: list[int], most_rows: tuple[int, int]) -> Counts:
    """All 0 where there is no routing, and `bases` are anything: the device refuses that then."""
    counts = tuple(after - before for before, after in pairwise(bases))
    is_routing = bases[0] == 0 and bases[-1] <= most_rows[1] and all(0 <= count <= most_rows[0] for count in counts)
    return counts if is_routing else (0,) * len(counts)


class RowCopies:
    """A group's copies, from or to each peer on a stream of its own."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._streams = {0: self._new_streams()}  # of each capture; 0: of none

    def sides(self, stream: Stream) -> list[Stream]:
        """The streams of each rank for what is enqueued beside `stream`. One that was forked into a capture belongs to
        it until it ends: others have others."""
        if stream.is_synchronous:
            return [stream] * self._group.num_ranks
        capture = stream.capture_id() if stream.is_capturing() else 0
        if capture not in self._streams:
            over = [old for old, them in self._streams.items() if old and not any(it.is_capturing() for it in them)]
            self._streams[capture] = self._streams.pop(over[0]) if over else self._new_streams()
        return self._streams[capture]

    def fetch(
        self,
        stream: Stream,
        sides: Sequence[Stream],
        part: int,
        counts: Counts,
        places: Sequence[tuple[Rows, int]],
    ) -> list[Event]:
        """Of dispatch: a part of what peers have packed to where it is received, behind what `stream` has been given so
        far. places: where rows, or values and scales of them, are received, and where in a row they begin.
        Returns what to wait for in the end."""
        group, cfg, row_bytes = self._group, self._group.cfg, self._group.cfg.sent_row_bytes
        per_part = -(-cfg.max_tokens_per_rank // layout.COPY_PARTS)  # struct Part of ht_dispatch_copy.cu
        begin, firsts = part * per_part, _firsts(counts)

        def copy(src: int, side: Stream) -> None:
            slot = (group.rank - src - 1) % group.num_ranks * cfg.max_tokens_per_rank + begin  # packed_row there
            num_rows = min(per_part, counts[src] - begin)
            packed = self._at(src, "dispatch_packed") + slot * row_bytes
            for rows, offset in places:
                source = (packed + offset, num_rows, row_bytes, rows[-1])
                side.copy_rows(_part(rows, firsts[src] + begin, num_rows), source)

        return self._beside(stream, sides, [count > begin for count in counts], copy)

    def send(self, stream: Stream, call: CombineCall, counts: Counts) -> list[Event]:
        """Of combine: rows to their owners, likewise."""
        firsts = _firsts(counts)
        return self._beside(
            stream,
            self.sides(stream),
            [count > 0 for count in counts],
            lambda dst, side: self._send_to(dst, side, call, firsts[dst], counts[dst]),
        )

    def _beside(
        self, stream: Stream, sides: Sequence[Stream], has_rows: list[bool], copy: Callable[[int, Stream], None]
    ) -> list[Event]:
        group, begin, ends = self._group, stream.record(), []
        for step in range(1, group.num_ranks):
            rank = (group.rank + step) % group.num_ranks
            if has_rows[rank]:
                sides[rank].wait(begin)
                copy(rank, sides[rank])
                ends.append(sides[rank].record())
        return ends

    def _new_streams(self) -> list[Stream]:
        backend = self._group.world.backend
        return [backend.stream(backend.new_stream(is_urgent=True)) for _ in range(self._group.num_ranks)]

    def _send_to(self, dst: int, side: Stream, call: CombineCall, first: int, count: int) -> None:
        """Each part of the rows, and its flag behind it."""
        group, cfg = self._group, self._group.cfg
        slot = (group.rank - dst - 1) % group.num_ranks * cfg.max_tokens_per_rank  # Home::staged_index
        if call.row_weight_grads is not None:
            row_bytes = 4 * cfg.num_topk
            grads = _part((call.row_weight_grads.address, 0, row_bytes, row_bytes), first, count)
            side.copy_rows(_part((self._at(dst, "combine_grads"), 0, row_bytes, row_bytes), slot, count), grads)
        rows = rows_of(call.expert_out)
        staging = (self._at(dst, "combine_rows"), 0, rows[-1], rows[-1])
        flags = self._at(dst, "combine_flags") + group.rank * layout.COPY_PARTS * layout.WORD_BYTES
        stamp = _bytes(self._at(group.rank, "combine_stamp"), layout.WORD_BYTES)
        per_part = -(-count // layout.COPY_PARTS)  # struct Arrived of ht_combine_copy.cu
        for part, begin in enumerate(range(0, count, per_part)):
            num_rows = min(per_part, count - begin)
            side.copy_rows(_part(staging, slot + begin, num_rows), _part(rows, first + begin, num_rows))
            side.copy_rows(_bytes(flags + part * layout.WORD_BYTES, layout.WORD_BYTES), stamp)

    def _at(self, rank: int, region: str) -> int:
        return self._group.memory.peers[self._group.members[rank]] + self._group.arena.offsets[region]


def _firsts(counts: Counts) -> list[int]:
    return list(accumulate(counts, initial=0))


def _part(rows: Rows, first: int, count: int) -> Rows:
    address, _, stride, row_bytes = rows
    return address + first * stride, count, stride, row_bytes


def _bytes(address: int, num_bytes: int) -> Rows:
    return address, 1, num_bytes, num_bytes
