"""Who holds which of a group's buffers in symmetric memory (ht): receive buffers, and those that combine pulls from."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field

from cuep.arrays import View
from cuep.backend import Rows
from cuep.errors import ArgumentError


class Lease:
    """One buffer, held until it is given back, or until nobody holds the lease. wanted: the one to take, if it is free;
    else the one that has been free for longest."""

    def __init__(self, free_buffers: list[int], wanted: int | None = None) -> None:
        self.buffer = wanted if wanted in free_buffers else free_buffers[0]
        free_buffers.remove(self.buffer)
        self.give_back = weakref.finalize(self, free_buffers.append, self.buffer)

    @property
    def is_held(self) -> bool:
        return self.give_back.alive


@dataclass
class Hold:
    """What a handle holds of the combine buffers."""

    lease: Lease | None = None  # from when the caller asks for it until the next combine
    is_captured: bool = False  # for good: each replay of a graph uses it
    last: int | None = None  # number of the one that the caller asked for last
    copies: list[Lease] = field(default_factory=list)  # for good: what captured combines copy into


class CombineBuffers:
    """A group's combine buffers: peers pull rows from them, which the experts have written there or combine copies.

    memory: all of them, one after another, each of `rows_per_buffer` rows. has_peers: else nothing is ever copied.
    """

    def __init__(self, memory: Rows, rows_per_buffer: int, *, has_peers: bool) -> None:
        self.memory = memory
        self._num_buffers = memory[1] // rows_per_buffer
        self._buffer_bytes = rows_per_buffer * memory[2]
        self._free = list(range(self._num_buffers))
        self._has_peers = has_peers

    def ask(self, hold: Hold, *, is_capturing: bool) -> int:
        """The buffer that the experts are to write.

        Raises:
            ArgumentError: there is none left.
        """
        if hold.lease is None:
            if not self._free:
                raise ArgumentError(f"combine_buffer: {self._all_held()}")
            hold.lease = Lease(self._free, hold.last)
        hold.last = hold.lease.buffer
        hold.is_captured = hold.is_captured or is_capturing
        return hold.lease.buffer

    def find(self, hold: Hold, expert_out: View) -> tuple[int | None, bool]:
        """The buffer that peers will pull from, None where there is nothing to pull, and whether expert_out is to be
        copied there.

        Raises:
            ArgumentError: expert_out is the buffer of another handle, or there is none to copy to.
        """
        first, _, row_bytes, _ = self.memory
        own = [] if hold.lease is None else [hold.lease.buffer]
        buffer, offset = divmod(expert_out.address - first, self._buffer_bytes)
        is_inside = 0 <= buffer < self._num_buffers and expert_out.shape[0] > 0
        if is_inside:
            if buffer not in own and buffer not in self._free:
                raise ArgumentError(
                    "expert_out lies in a combine buffer that another handle, or a graph, holds; allowed: what this"
                    " handle's combine_buffer() returned since its last combine, or any other array"
                )
            if offset == 0 and expert_out.strides[0] == row_bytes:
                return buffer, False
        if expert_out.shape[0] == 0 or not self._has_peers:
            return None, False
        known = [lease.buffer for lease in hold.copies] + ([hold.last] if hold.last in self._free else [])
        places = [place for place in (*own, *known, *self._free) if not (is_inside and place == buffer)]
        if places:
            return places[0], True
        if is_inside:
            raise ArgumentError(
                "expert_out is a part of the only combine buffer that is free, and must be copied into another: give"
                " it as combine_buffer() returned it, or make the group with more num_buffers"
            )
        raise ArgumentError(
            f"expert_out is not what combine_buffer() returned, so it must be copied, but {self._all_held()}"
        )

    def use(self, hold: Hold, expert_out: View, *, is_capturing: bool) -> tuple[int | None, bool]:
        """find(), for a combine that is launched now: what comes behind it may have the buffer, unless replays of a
        graph will use it again."""
        buffer, is_copied = self.find(hold, expert_out)
        if is_capturing:
            hold.is_captured = hold.is_captured or hold.lease is not None
            if buffer in self._free:
                hold.copies.append(Lease(self._free, buffer))
        elif hold.lease is not None and not hold.is_captured:
            hold.lease.give_back()
            hold.lease = None
        return buffer, is_copied

    def give_back(self, hold: Hold) -> None:
        for lease in hold.copies if hold.lease is None else [hold.lease, *hold.copies]:
            lease.give_back()

    def _all_held(self) -> str:
        return (
            f"all {self._num_buffers} combine buffers are held, by other handles or for captured graphs; combine or"
            f" close a handle, or make the group with num_buffers > {self._num_buffers}"
        )
