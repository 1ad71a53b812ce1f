"""The CPU backend: NumPy arrays, shared memory of one host, and the kernels compiled by g++."""

from __future__ import annotations

import ctypes
import os
import platform
import socket
import weakref
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cuep import env
from cuep.backend import Comm, Record
from cuep.backend.cpu_memory import SharedMemory
from cuep.backend.cpu_stream import CpuEvent, CpuStream, SynchronousStream
from cuep.backend.user_memory import UserBlock
from cuep.errors import ArgumentError, ArgumentTypeError, BackendUnavailable, DeviceError

_MAX_GRID = 1024  # every block is an OS thread
_ERROR_BYTES = 2048


class CpuBackend:
    """Runs kernels on this host's cores. All ranks must be on one host. Collective.

    Raises:
        BackendUnavailable: ranks are on different hosts, or this is not Linux.
    """

    name = "cpu"
    target = "cpu"
    num_processors = 4  # threads, that is: two cores run four ranks, and more would only take turns
    max_smem_bytes = 0
    xp: Any = np
    device = 0
    is_shared = False  # nobody's work keeps another's from running

    def __init__(self, comm: Comm, device: int | None = None) -> None:
        hosts = comm.allgather((socket.gethostname(), _boot_id()))
        if platform.system() != "Linux":
            raise BackendUnavailable("the cpu backend needs Linux")
        if len({boot_id for _, boot_id in hosts}) > 1:
            names = sorted({name for name, _ in hosts})
            raise BackendUnavailable(f"the cpu backend shares memory, so all ranks must be on one host: {names}")
        if device not in (None, 0):
            raise ArgumentError(f"device={device!r} is not allowed on the cpu backend; allowed: None, 0")
        self.comm = comm
        self.description = _cpu_name()
        self.not_over_nvlink: list[tuple[int, int]] = []
        self._synchronous = SynchronousStream()
        self._streams: weakref.WeakSet[CpuStream] = weakref.WeakSet()
        self._libraries: dict[Path, ctypes.CDLL] = {}
        self.set_seed(env.seed(), env.delay_level())

    def set_seed(self, seed: int, delay_level: int = 1) -> None:
        """Seed the scheduler of all kernels of this process: 0 = in order without delays.

        Other seeds shuffle the order of threads, differently on each rank and in each launch, and inject delays:
        delay_level 0 (none) to 3 (many).
        """
        if not 0 <= delay_level <= 3:
            raise ArgumentError(f"delay_level={delay_level} is not allowed; allowed: 0 to 3")
        self._seed = (seed * 0x9E3779B97F4A7C15 + self.comm.rank) % 2**64 if seed else 0
        self._delay_level = delay_level
        for library in self._libraries.values():
            self._configure(library)

    def _configure(self, library: ctypes.CDLL) -> None:
        library.cuep_cpu_configure(ctypes.c_uint64(self._seed), ctypes.c_int(self._delay_level))

    def active(self) -> nullcontext[None]:
        """NumPy has one device."""
        return nullcontext()

    def symmetric(self, num_bytes: int) -> SharedMemory:
        return SharedMemory(self.comm, num_bytes)

    def empty(self, shape: tuple[int, ...], dtype: Any, allocator: Any = None) -> npt.NDArray[Any]:
        if allocator is None:
            return np.empty(shape, dtype)
        if not isinstance(allocator, tuple):
            raise ArgumentError("allocator: the cpu backend takes a pair alloc(bytes) -> address, free(address)")
        num_bytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
        block = UserBlock(allocator, num_bytes)
        memory = (ctypes.c_uint8 * num_bytes).from_address(block.address)
        memory.owner = block  # arrays keep the ctypes object, and it keeps the block
        array: npt.NDArray[Any] = np.frombuffer(memory, np.uint8).view(dtype).reshape(shape)
        return array

    def zeros(self, shape: tuple[int, ...], dtype: Any, allocator: Any = None) -> npt.NDArray[Any]:
        if allocator is None:
            return np.zeros(shape, dtype)
        array = self.empty(shape, dtype, allocator)
        array[...] = np.zeros((), dtype)
        return array

    def clear(self, array: npt.NDArray[Any], stream: CpuStream | SynchronousStream) -> None:
        """Zero it, in stream order."""
        stream.submit(lambda: array.fill(0))

    def asarray(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        return np.asarray(array)

    def to_numpy(self, array: npt.NDArray[Any], stream: Any = None) -> npt.NDArray[Any]:
        """A copy, after what `stream` has been given so far."""
        self.stream(stream).synchronize()
        return np.array(array)

    def pinned(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        return np.zeros(num_bytes, np.uint8)

    def unpinned(self, array: npt.NDArray[np.uint8]) -> None:
        """It goes with its last reference."""

    def load(self, path: Path, name: str) -> CpuModule:
        if path not in self._libraries:
            self._libraries[path] = ctypes.CDLL(str(path))
            self._configure(self._libraries[path])
        return CpuModule(self._libraries[path], self.comm.rank)

    def stream(self, stream: Any, like: Any = None) -> CpuStream | SynchronousStream:
        """None is the synchronous stream, which runs everything in the calling thread at once."""
        if stream is None:
            return self._synchronous
        if isinstance(stream, (CpuStream, SynchronousStream)):
            return stream
        raise ArgumentTypeError(
            f"stream has type {type(stream).__name__}; the cpu backend takes None or what world.stream() returns"
        )

    def event(self, event: Any) -> CpuEvent:
        point = getattr(event, "point", event)
        if isinstance(point, CpuEvent):
            return point
        raise ArgumentTypeError(
            f"previous_event has type {type(event).__name__}; the cpu backend takes None or a cuep.Event of its own"
        )

    def array_dtype(self, dtype: Any) -> np.dtype[Any]:
        """NumPy has arrays of all."""
        known: np.dtype[Any] = np.dtype(dtype)
        return known

    def new_stream(self, *, is_urgent: bool = False) -> CpuStream:
        """Streams are threads here, all alike."""
        stream = CpuStream()
        self._streams.add(stream)
        return stream

    def current_stream(self, stream: Any) -> nullcontext[None]:
        """NumPy has no streams."""
        return nullcontext()

    def synchronize(self) -> None:
        for stream in list(self._streams):
            stream.synchronize()

    def close(self) -> None:
        self.synchronize()


class CpuModule:
    """The shared object of one kernel."""

    def __init__(self, library: ctypes.CDLL, rank: int) -> None:
        self._library = library
        self._rank = rank

    def symbol_int32(self, name: str, count: int) -> list[int]:
        return list((ctypes.c_int32 * count).in_dll(self._library, name))

    def function(self, name: str) -> CpuFunction:
        return CpuFunction(self._library, name, self._rank)


class CpuFunction:
    """One kernel."""

    def __init__(self, library: ctypes.CDLL, name: str, rank: int) -> None:
        self._name = name
        self._rank = rank
        self._entry = library[f"cuep_launch_{name}"]
        sizes = (ctypes.c_uint32, ctypes.c_uint32, ctypes.c_uint64)
        self._entry.argtypes = (*sizes, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_uint64)
        self._entry.restype = ctypes.c_int

    def max_grid(self, threads: int, smem_bytes: int) -> int:
        return _MAX_GRID

    def launch(
        self, grid: int, threads: int, smem_bytes: int, record: Record, stream: Any, *, is_early: bool = False
    ) -> None:
        """Enqueue a launch with the record's present values. Nothing starts early here.

        Raises:
            DeviceError: the grid is too large, or the kernel failed (at synchronize(), but on the synchronous stream
                here).
        """
        if not 0 < grid <= _MAX_GRID:
            raise DeviceError(f"{self._name}: a grid of {grid} blocks is not allowed; allowed: 1 to {_MAX_GRID}")
        params = record.tobytes()
        stream.submit(lambda: self._run(grid, threads, smem_bytes, params))

    def _run(self, grid: int, threads: int, smem_bytes: int, params: bytes) -> None:
        error = ctypes.create_string_buffer(_ERROR_BYTES)
        if self._entry(grid, threads, smem_bytes, params, error, _ERROR_BYTES) != 0:
            raise DeviceError(f"rank {self._rank}: {error.value.decode(errors='replace')}")


def _boot_id() -> str:
    """Tells hosts apart, also where containers have made their names equal or different."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return socket.gethostname()


def _cpu_name() -> str:
    cores = len(os.sched_getaffinity(0))
    model = platform.machine()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            model = line.partition(":")[2].strip()
            break
    return f"{model}, {cores} core{'s' if cores != 1 else ''}"
