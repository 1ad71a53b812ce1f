"""The CUDA backend: CuPy arrays, NVSHMEM's symmetric heap, cubins through CuPy, and streams of any framework."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cuep import nvshmem
from cuep.agreement import raise_together
from cuep.backend import Array, Comm
from cuep.backend.cuda_context import CudaContext, choose_gpu
from cuep.backend.cuda_launch import CudaModule
from cuep.backend.cuda_stream import CudaEvent, CudaStream, as_event, resolve
from cuep.backend.user_memory import UserBlock
from cuep.errors import BackendUnavailable, ClosedError, CuepError, DeviceError, OrderError

_NVSHMEM_STATE = "nvshmemi_device_state_d"  # in every module that calls NVSHMEM's device functions
_MOST_URGENT = -5  # priority of a stream: lower is more urgent, and CUDA takes the nearest that it has
_GET_CUPY = "pip install 'cuep[cuda13]' (drivers before 580: 'cuep[cuda12]')"

_pinned: list[npt.NDArray[np.uint8]] = []
_unpinned: dict[int, list[npt.NDArray[np.uint8]]] = {}  # by size
_process_gpu: tuple[int, str] | None = None  # NVSHMEM allows one GPU per process


class CudaBackend:
    """One GPU of this process. Collective over comm; NVSHMEM starts with the first symmetric().

    device: index among the visible GPUs; None takes the rank's number on its host, modulo the visible GPUs.
    cooperative: how kernels are launched unless a launch says otherwise. False saves 0.7 us a kernel and is safe where
        nothing else on the GPU waits for a peer.

    Attributes: device (index among the visible GPUs), uuid, places (host and GPU of every rank).

    Raises, on every rank: BackendUnavailable, ArgumentError for `device`, OrderError where a rank's process has a
        backend on another GPU already.
    """

    name = "cuda"

    def __init__(self, comm: Comm, device: int | None = None, *, cooperative: bool = True) -> None:
        self.xp = _import_cupy(comm)
        gpu, self.places, self.not_over_nvlink = choose_gpu(comm, device)
        self.is_shared = len({place.gpu.uuid for place in self.places}) < len(self.places)
        raise_together(comm, _take_gpu(gpu.ordinal, gpu.uuid, comm.rank))
        self.comm = comm
        self.device = gpu.ordinal
        self.uuid = gpu.uuid
        self.description = gpu.name
        self.target = "sm_{}{}".format(*gpu.capability)
        self.cooperative = cooperative
        self._context = CudaContext(gpu.ordinal)
        self.max_smem_bytes = self._context.attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
        self.num_processors = self._context.attribute("MULTIPROCESSOR_COUNT")
        self._heap: Any = None
        self._last_stream: CudaStream | None = None
        self._is_closed = False

    def active(self) -> AbstractContextManager[Any]:
        """Inside, CuPy works on this GPU; afterwards on the one that was current before."""
        return self._context.current()

    def symmetric(self, num_bytes: int) -> Any:
        """Zeroed memory on every rank that every rank can address (collective, not followed by a barrier)."""
        if self._is_closed:
            raise ClosedError("this backend is closed")
        if self._heap is None:
            from cuep.backend.cuda_memory import SymmetricHeap

            with self._context.current():
                self.xp.cuda.runtime.free(0)  # NVSHMEM wants a context that the CUDA runtime has seen
                running = nvshmem.start(self.comm, self._context.set_current)
            self._heap = SymmetricHeap(running, self.comm, self._context, self.places)
        return self._heap.allocate(num_bytes)

    def array_dtype(self, dtype: Any) -> np.dtype[Any]:
        """What CuPy has arrays of for such elements: bytes for float8."""
        return np.dtype(np.uint8) if np.dtype(dtype).name.startswith("float8") else np.dtype(dtype)

    def empty(self, shape: tuple[int, ...], dtype: Any, allocator: Any = None) -> Array:
        """allocator: a CuPy allocator (bytes -> MemoryPointer), or a pair alloc(bytes) -> address, free(address)."""
        dtype = self.array_dtype(dtype)
        try:
            with self._context.current():
                if allocator is None:
                    return self.xp.empty(shape, dtype)
                num_bytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
                return self.xp.ndarray(shape, dtype, self._allocate_by(allocator, num_bytes))
        except self.xp.cuda.memory.OutOfMemoryError as error:
            raise DeviceError(f"GPU {self.device} has no memory for an array {shape} of {dtype}: {error}") from error

    def _allocate_by(self, allocator: Any, num_bytes: int) -> Any:
        if not isinstance(allocator, tuple):
            return allocator(num_bytes)
        block = UserBlock(allocator, num_bytes)
        memory = self.xp.cuda.UnownedMemory(block.address, num_bytes, block, self.device)
        return self.xp.cuda.MemoryPointer(memory, 0)

    def zeros(self, shape: tuple[int, ...], dtype: Any, allocator: Any = None) -> Array:
        """Zeroed when this returns, for whatever stream reads it next."""
        array = self.empty(shape, dtype, allocator)
        if array.nbytes:
            self._context.fill_zero(array.data.ptr, array.nbytes, self._pool_stream())
        return array

    def clear(self, array: Array, stream: CudaStream) -> None:
        """Zero it, in stream order."""
        pool = self.stream(None)  # an earlier owner's work on CuPy's memory may still be queued there
        if pool.key != stream.key and not pool.is_capturing():
            stream.wait(pool.record())
        self._context.clear(array.data.ptr, array.nbytes, stream.handle)

    def asarray(self, array: npt.NDArray[Any]) -> Array:
        """A copy on the device, complete when this returns."""
        source = np.ascontiguousarray(array)
        result = self.empty(source.shape, source.dtype)
        if source.nbytes:
            self._context.copy_in(result.data.ptr, source.ctypes.data, source.nbytes, self._pool_stream())
        return result

    def _pool_stream(self) -> int:
        """The stream for which CuPy's pool gives memory: an earlier owner's work on it may still be queued there."""
        with self._context.current():
            return int(self.xp.cuda.get_current_stream().ptr)

    def to_numpy(self, array: Array, stream: Any = None) -> npt.NDArray[Any]:
        """A copy on the host, after what `stream` (None: the current one) has been given so far."""
        self.stream(stream, array).synchronize()
        with self._context.current():
            result: npt.NDArray[Any] = self.xp.asnumpy(array)
        return result

    def pinned(self, num_bytes: int) -> npt.NDArray[np.uint8]:
        """Zeroed host memory that kernels write at the same address, for the life of the process or until unpinned().

        It is never given back to CUDA: that would end a stream capture that happens to run when an array is collected.
        """
        if _unpinned.get(num_bytes):
            array = _unpinned[num_bytes].pop()
        else:
            cuda = self.xp.cuda
            with self._context.current():
                flags = cuda.runtime.hostAllocMapped | cuda.runtime.hostAllocPortable
                pointer = cuda.PinnedMemoryPointer(cuda.PinnedMemory(max(num_bytes, 1), flags), 0)
            array = np.frombuffer(pointer, np.uint8, num_bytes)
            _pinned.append(array)
        array[...] = 0
        return array

    def unpinned(self, array: npt.NDArray[np.uint8]) -> None:
        """What pinned() gave is not used any more, by kernels neither."""
        _unpinned.setdefault(array.nbytes, []).append(array)

    def load(self, path: Path, name: str) -> CudaModule:
        """Load a cubin. CuPy keeps it for the process by its path, which names its content."""
        with self._context.current():
            try:
                raw_module = self.xp.RawModule(path=str(path))
                module = CudaModule(self._context, raw_module, cooperative=self.cooperative)
            except self.xp.cuda.driver.CUDADriverError as error:
                raise BackendUnavailable(f"kernel {name}: the driver refuses {path}: {error}") from error
            if module.has_symbol(_NVSHMEM_STATE):
                running = nvshmem.running()
                if running is None:
                    raise OrderError(f"kernel {name} uses NVSHMEM: allocate symmetric memory before loading it")
                running.register_module(module.number, raw_module)
        return module

    def stream(self, stream: Any, like: Any = None) -> CudaStream:
        """None: the current stream of like's framework. Else an int, CuPy or torch stream, or any __cuda_stream__."""
        if isinstance(stream, CudaStream):
            return stream
        number, owner = resolve(self._context, stream, like)
        last = self._last_stream
        if last is None or last.number != number or last.owner is not owner:
            last = self._last_stream = CudaStream(self._context, number, owner)
        return last

    def event(self, event: Any) -> CudaEvent:
        """An int, cuep, CuPy, torch, Numba or cuda.core event."""
        return as_event(self._context, event)

    def new_stream(self, *, is_urgent: bool = False) -> Any:
        """A cupy.cuda.Stream that does not wait for the default stream."""
        with self._context.current():
            return self.xp.cuda.Stream(non_blocking=True, priority=_MOST_URGENT if is_urgent else None)

    @contextmanager
    def current_stream(self, stream: CudaStream | None) -> Iterator[None]:
        """Inside, CuPy works on this GPU and on `stream` (None: the one that is current)."""
        with self._context.current():
            if stream is None:
                yield
            else:
                with self.xp.cuda.ExternalStream(stream.number):
                    yield

    def synchronize(self) -> None:
        """Wait for everything on the device."""
        self._context.synchronize()

    def close(self) -> None:
        """Free what is left in symmetric memory (collective, but local after a leak). NVSHMEM stays up."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._heap is not None:
            self._heap.close()


def _import_cupy(comm: Comm) -> Any:
    module: Any = None
    error: CuepError | None = None
    try:
        module = importlib.import_module("cupy")
    except ImportError as missing:
        error = BackendUnavailable(f"rank {comm.rank}: the cuda backend needs CuPy ({missing}): {_GET_CUPY}")
    raise_together(comm, error)
    return module


def _take_gpu(ordinal: int, uuid: str, rank: int) -> CuepError | None:
    global _process_gpu
    if _process_gpu is not None and _process_gpu[1] != uuid:
        return OrderError(
            f"rank {rank}: this process already uses GPU {_process_gpu[0]} ({_process_gpu[1]}) and cannot use GPU"
            f" {ordinal} ({uuid}), too: NVSHMEM allows one GPU per process"
        )
    _process_gpu = (ordinal, uuid)
    return None
