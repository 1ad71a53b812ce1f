"""Streams and events of the CUDA backend, over the streams of any framework."""

from __future__ import annotations

import sys
from collections.abc import Hashable
from typing import Any

from cuep.backend import Rows
from cuep.backend.cuda_context import CudaContext, check
from cuep.errors import ArgumentError, ArgumentTypeError

_LEGACY = 1  # the handles 0 and 1 are both the default stream
_DEFAULT_STREAMS = 2  # handles up to here are not a stream's own, but a name for one


class CudaEvent:
    """A point in a stream. Keeps alive what it was made from."""

    def __init__(self, context: CudaContext, number: int, owner: Any) -> None:
        self._context = context
        self._owner = owner
        self.handle = context.driver.CUevent(number)

    def synchronize(self) -> None:
        with self._context.current():
            check(self._context.driver.cuEventSynchronize(self.handle), "waiting for an event")

    def query(self) -> bool:
        """Whether everything before it is done."""
        driver = self._context.driver
        with self._context.current():
            result = driver.cuEventQuery(self.handle)
        if result[0] == driver.CUresult.CUDA_ERROR_NOT_READY:
            return False
        check(result, "querying an event")
        return True


def new_event(context: CudaContext) -> CudaEvent:
    from cupy.cuda import Event

    owner = Event(disable_timing=True)  # CuPy destroys it, also at interpreter exit
    return CudaEvent(context, owner.ptr, owner)


def as_event(context: CudaContext, event: Any) -> CudaEvent:
    """What a user may pass as an event: an int handle, a cuep.Event, or an event of CuPy, torch, Numba or cuda.core."""
    number = event
    for name in ("ptr", "cuda_event", "handle"):  # cuep and CuPy, torch, Numba and cuda.core
        if hasattr(event, name):
            number = getattr(event, name)
            break
    try:
        number = int(getattr(number, "value", number))  # Numba's is a ctypes.c_void_p
    except (TypeError, ValueError):
        number = None
    is_stream = hasattr(event, "wait_event") or hasattr(event, "__cuda_stream__")
    if number is None or is_stream or isinstance(event, (bool, float, str, bytes)):
        raise ArgumentTypeError(
            f"previous_event has type {type(event).__name__}; allowed: None, an int handle, or an event of cuep, CuPy,"
            " torch, Numba or cuda.core"
        )
    if number == 0:
        raise ArgumentError("previous_event was never recorded")
    return CudaEvent(context, number, event)


class CudaStream:
    """A stream that someone else made. Keeps what it was made from alive."""

    is_synchronous = False

    def __init__(self, context: CudaContext, number: int, owner: Any) -> None:
        self._context = context
        self.number = number
        self.owner = owner
        self.handle = context.driver.CUstream(number)
        if number > _DEFAULT_STREAMS:
            self._check_device()

    @property
    def key(self) -> Hashable:
        return self.number or _LEGACY

    def synchronize(self) -> None:
        with self._context.current():
            check(self._context.driver.cuStreamSynchronize(self.handle), "waiting for a stream")

    def record(self) -> CudaEvent:
        with self._context.current():
            event = new_event(self._context)
            check(self._context.driver.cuEventRecord(event.handle, self.handle), "recording an event")
        return event

    def wait(self, event: CudaEvent) -> None:
        """What is enqueued from now on starts after `event`."""
        with self._context.current():
            check(self._context.driver.cuStreamWaitEvent(self.handle, event.handle, 0), "waiting for an event")

    def copy_rows(self, to: Rows, source: Rows) -> None:
        """By a copy engine where the memory is on two GPUs, or on a GPU and the host."""
        driver = self._context.driver
        (first, _, to_stride, _), (address, num_rows, stride, row_bytes) = to, source
        with self._context.current():
            if num_rows == 1 or stride == to_stride == row_bytes:
                result = driver.cuMemcpyAsync(first, address, num_rows * row_bytes, self.handle)
            else:
                copy = driver.CUDA_MEMCPY2D()
                copy.srcMemoryType = copy.dstMemoryType = driver.CUmemorytype.CU_MEMORYTYPE_UNIFIED
                copy.srcDevice, copy.srcPitch = address, stride
                copy.dstDevice, copy.dstPitch = first, to_stride
                copy.WidthInBytes, copy.Height = row_bytes, num_rows
                result = driver.cuMemcpy2DAsync(copy, self.handle)
            check(result, "copying rows")

    def is_capturing(self) -> bool:
        driver = self._context.driver
        with self._context.current():
            status = check(driver.cuStreamIsCapturing(self.handle), "asking whether a stream is captured")
        return bool(status != driver.CUstreamCaptureStatus.CU_STREAM_CAPTURE_STATUS_NONE)

    def capture_id(self) -> int:
        with self._context.current():
            found = check(self._context.driver.cuStreamGetCaptureInfo(self.handle), "asking which capture it is")
        return int(found[1])  # behind the status

    def _check_device(self) -> None:
        driver = self._context.driver
        with self._context.current():
            theirs = check(driver.cuStreamGetCtx(self.handle), "stream")
            if isinstance(theirs, tuple):  # newer drivers can also return a green context
                theirs = theirs[0]
            mine = check(driver.cuCtxGetCurrent())
        if int(theirs) != int(mine):
            raise ArgumentError(
                f"the stream belongs to another GPU or context, the group is on GPU {self._context.ordinal}"
            )


def resolve(context: CudaContext, stream: Any, like: Any) -> tuple[int, Any]:
    """Handle of what a user may pass as `stream`, and the object to keep alive.

    None is the current stream of like's framework. Takes int handles, CuPy and torch streams, and anything with
    __cuda_stream__.
    """
    if stream is None:
        return _current(context, like)
    if isinstance(stream, int) and not isinstance(stream, bool):
        return stream, None
    if isinstance(getattr(stream, "ptr", None), int) and hasattr(stream, "wait_event"):  # CuPy; its events have no wait
        return stream.ptr, stream
    if isinstance(getattr(stream, "cuda_stream", None), int):  # torch
        return stream.cuda_stream, stream
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        _version, handle = protocol() if callable(protocol) else protocol
        return int(handle), stream
    raise ArgumentTypeError(
        f"stream has type {type(stream).__name__}; allowed: None, an int handle, a CuPy or torch stream, or any object"
        " with __cuda_stream__"
    )


def _current(context: CudaContext, like: Any) -> tuple[int, Any]:
    framework = type(like).__module__.partition(".")[0]
    if framework == "torch":
        stream = sys.modules["torch"].cuda.current_stream(context.ordinal)
        return stream.cuda_stream, stream
    if framework in ("jax", "jaxlib"):  # tells nobody its streams; what it exports is ready on the default stream
        return 0, None
    import cupy

    stream = cupy.cuda.get_current_stream(context.ordinal)
    return stream.ptr, stream
