"""Memory that a user's functions allocate and free."""

from __future__ import annotations

from typing import Any


class UserBlock:
    """`num_bytes` from a user's alloc, given to the user's free when the last array on it is gone.

    allocator: a pair alloc(bytes) -> address, free(address).
    """

    def __init__(self, allocator: tuple[Any, Any], num_bytes: int) -> None:
        self.address = 0  # should alloc raise
        alloc, self._free = allocator
        self.address = int(alloc(num_bytes))

    def __del__(self) -> None:
        if self.address:
            self._free(self.address)
