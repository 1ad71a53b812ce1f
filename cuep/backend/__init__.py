"""The boundary between cuep and a machine: arrays, streams, symmetric memory and launches.

Two classes implement it, `cpu.CpuBackend` and `cuda.CudaBackend`; nothing else allocates, copies or launches.
"""

from __future__ import annotations

from collections.abc import Hashable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from cuep.params import FastRecord

Array = Any  # numpy.ndarray or cupy.ndarray
Rows = tuple[int, int, int, int]  # address of the first row, rows, bytes from row to row, bytes of a row
Record = npt.NDArray[np.void] | FastRecord  # a kernel's Params: a structured array of one element


class Comm(Protocol):
    """What cuep needs of a communicator; mpi4py's has it, and so can any object."""

    rank: int
    size: int

    def allgather(self, sendobj: Any) -> list[Any]: ...
    def bcast(self, obj: Any, root: int = 0) -> Any: ...
    def barrier(self) -> None: ...


class Event(Protocol):
    def synchronize(self) -> None: ...
    def query(self) -> bool: ...


class Stream(Protocol):
    """A stream as cuep uses it: `key` tells whether two are the same.

    On a synchronous stream a launch has run when it returns.
    """

    is_synchronous: bool

    @property
    def key(self) -> Hashable: ...
    def synchronize(self) -> None: ...
    def record(self) -> Event: ...
    def wait(self, event: Event) -> None: ...
    # as many as source has; addresses are such that this device reaches them
    def copy_rows(self, to: Rows, source: Rows) -> None: ...
    def is_capturing(self) -> bool: ...
    def capture_id(self) -> int: ...  # which capture that is


class Symmetric(Protocol):
    """A block of memory that every rank has and every rank can address."""

    num_bytes: int
    address: int
    peers: list[int]
    bytes: Array

    def free(self) -> None: ...  # collective
    def leak(self) -> None: ...  # local, after a peer died


class Function(Protocol):
    def max_grid(self, threads: int, smem_bytes: int) -> int: ...
    def launch(
        self, grid: int, threads: int, smem_bytes: int, record: Record, stream: Any, *, is_early: bool = False
    ) -> None: ...


class Module(Protocol):
    def symbol_int32(self, name: str, count: int) -> list[int]: ...
    def function(self, name: str) -> Function: ...


class Backend(Protocol):
    name: str
    description: str
    device: int
    target: str
    num_processors: int  # blocks of a kernel that are worth having: one for each multiprocessor
    max_smem_bytes: int  # shared memory of a block; 0 = there is no such thing
    is_shared: bool  # some ranks have one device
    not_over_nvlink: list[tuple[int, int]]  # ranks that reach one another in another way; the same on all ranks
    xp: Any

    def active(self) -> AbstractContextManager[Any]: ...  # inside, xp works on this backend's device
    def symmetric(self, num_bytes: int) -> Symmetric: ...
    def empty(self, shape: tuple[int, ...], dtype: Any, allocator: Any = None) -> Array: ...
    def zeros(self, shape: tuple[int, ...], dtype: Any, allocator: Any = None) -> Array: ...
    def clear(self, array: Array, stream: Any) -> None: ...
    def asarray(self, array: npt.NDArray[Any]) -> Array: ...
    def to_numpy(self, array: Array, stream: Any = None) -> npt.NDArray[Any]: ...
    def pinned(self, num_bytes: int) -> npt.NDArray[np.uint8]: ...
    def unpinned(self, array: npt.NDArray[np.uint8]) -> None: ...
    def load(self, path: Path, name: str) -> Module: ...
    def stream(self, stream: Any, like: Any = None) -> Any: ...
    def event(self, event: Any) -> Event: ...  # of whatever a user may have recorded
    def array_dtype(self, dtype: Any) -> np.dtype[Any]: ...
    def new_stream(self, *, is_urgent: bool = False) -> Any: ...
    def current_stream(self, stream: Any) -> AbstractContextManager[Any]: ...  # inside, xp works on it; None: any
    def synchronize(self) -> None: ...
    def close(self) -> None: ...
