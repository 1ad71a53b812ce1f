"""Arrays of any framework in, arrays of the caller's framework out.

In: NumPy on the CPU backend, CuPy on the CUDA backend, torch tensors and JAX arrays on either, and whatever else has
__cuda_array_interface__ (Numba) or DLPack (cuda.core). Nothing is copied.

Out: as x or expert_out came in: torch, JAX, Numba; CuPy or NumPy for all others. Nothing is copied either, but for JAX
on the CPU backend, whose kernels JAX would not wait for. JAX has no streams to name: a result is ready for JAX's next
computation, but what JAX reads of it must be done (jax.block_until_ready) before the handle overwrites it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cuep.backend import Array, Backend, Rows, Stream
from cuep.errors import ArgumentError, ArgumentTypeError

_JAX = ("jax", "jaxlib")  # where the types of its arrays come from


@dataclass(frozen=True, slots=True)
class View:
    """What a kernel needs to know of an array, and the array itself to keep it alive."""

    address: int
    shape: tuple[int, ...]
    dtype: str
    strides: tuple[int, ...]  # bytes
    owner: Any
    lender: Any = None  # of another framework's memory: keeps it alive

    @property
    def is_contiguous(self) -> bool:
        if 0 in self.shape:
            return True
        expected = _itemsize(self.dtype)
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if size > 1 and stride != expected:
                return False
            expected *= size
        return True


_BYTES = ("float8", "float4", "int8")


def _itemsize(dtype: str) -> int:
    if dtype.startswith(_BYTES):  # NumPy alone does not know these
        return 1
    return 2 if dtype == "bfloat16" else np.dtype(dtype).itemsize


_frameworks: dict[type, str] = {}


def framework(array: Any) -> str:
    """Top-level package that the array's type comes from: "numpy", "cupy", "torch", ..."""
    kind = type(array)
    known = _frameworks.get(kind)
    if known is None:
        known = _frameworks[kind] = kind.__module__.partition(".")[0]
    return known


def signature(array: Any, backend: Backend) -> tuple[Any, ...] | None:
    """Equal for two arrays of which view() would say the same, quickly; None where that cannot be told."""
    if isinstance(array, backend.xp.ndarray):
        address = array.__array_interface__["data"][0] if backend.name == "cpu" else array.data.ptr
        return type(array), address, array.shape, array.strides, array.dtype
    if framework(array) == "torch":
        return type(array), array.data_ptr(), array.shape, array.stride(), array.dtype, array.device
    return None


def is_ordered(kind: str) -> bool:
    """Whether what is enqueued on a stream after an export sees what was enqueued before it. JAX hides its streams, so
    that every export must order them anew."""
    return kind not in _JAX


def view(array: Any, name: str, backend: Backend, stream: Stream | None = None, *, is_written: bool = False) -> View:
    """See `array` as device memory of `backend`.

    Args:
        stream: which will use it: what another framework has yet to compute is put before its next work (DLPack).
        is_written: read-only arrays are refused.

    Raises:
        ArgumentTypeError: not an array, or one that lives elsewhere (nothing is copied between devices).
        ArgumentError: it is on another GPU, or read-only.
    """
    kind = framework(array)
    if kind == "torch":
        return _view_torch(array, name, backend)
    if isinstance(array, backend.xp.ndarray):
        return _view_native(array, name, backend, is_written=is_written)
    if kind in _JAX and is_written:
        raise ArgumentTypeError(f"{name} is a JAX array, which must not be written")
    seen = _view_native(_borrowed(array, kind, name, backend, stream), name, backend, is_written=is_written)
    return replace(seen, owner=array, lender=seen.owner)


def _view_native(array: Array, name: str, backend: Backend, *, is_written: bool) -> View:
    """Of NumPy on the CPU, of CuPy on a GPU."""
    is_cpu = backend.name == "cpu"
    if not is_cpu and array.size and array.data.device_id != backend.device:
        raise ArgumentError(f"{name} is on GPU {array.data.device_id}, the group is on GPU {backend.device}")
    if isinstance(array, np.ma.MaskedArray):
        raise ArgumentTypeError(f"{name} is a masked array, which is not allowed")
    if is_cpu and is_written and not array.flags.writeable:
        raise ArgumentError(f"{name} is read-only")
    address = array.__array_interface__["data"][0] if is_cpu else array.data.ptr
    return View(address, array.shape, _dtype_name(array.dtype, name), array.strides, array)


def _borrowed(array: Any, kind: str, name: str, backend: Backend, stream: Stream | None) -> Array:
    """The memory of another framework's array as an array of the backend's own."""
    wants = "NumPy or JAX arrays or CPU tensors"
    if backend.name == "cuda":
        wants = "arrays on the GPU (CuPy, torch, JAX, Numba, DLPack)"
    protocols = ("__dlpack__", "__cuda_array_interface__") if backend.name == "cuda" else ("__dlpack__",)
    if isinstance(array, np.ndarray) or not any(hasattr(array, protocol) for protocol in protocols):
        raise ArgumentTypeError(f"{name}: got {type(array).__name__}, the {backend.name} backend takes {wants}")
    try:
        with backend.current_stream(stream):
            if kind in _JAX:
                return _borrowed_jax(array, backend)
            if backend.name == "cuda" and hasattr(array, "__cuda_array_interface__"):
                return backend.xp.asarray(array)
            return backend.xp.from_dlpack(array)
    except Exception as error:  # whatever another framework's export raises
        raise ArgumentTypeError(
            f"{name}: got {type(array).__name__}, the {backend.name} backend takes {wants} ({error})"
        ) from error


def _borrowed_jax(array: Any, backend: Backend) -> Array:
    (device,) = array.devices()  # one that is spread over several is none of this rank's
    if backend.name == "cuda":
        return backend.xp.from_dlpack(array)
    if device.platform != "cpu":
        raise BufferError(f"it is on {device}")
    return np.asarray(array)  # waits for it; NumPy's DLPack has no bfloat16


_names: dict[Any, str] = {}  # asking a dtype for its name is slow


def _dtype_name(dtype: Any, name: str) -> str:
    known = _names.get(dtype)
    if known is None:
        if not dtype.isnative:
            raise ArgumentTypeError(f"{name} has dtype {dtype.str}, of foreign byte order, which is not allowed")
        known = _names[dtype] = dtype.name
    return known


def _view_torch(tensor: Any, name: str, backend: Backend) -> View:
    device = tensor.device
    expected = "cpu" if backend.name == "cpu" else "cuda"
    if device.type != expected:
        raise ArgumentTypeError(f"{name} is a torch tensor on {device}, the {backend.name} backend takes {expected}")
    if expected == "cuda" and device.index != backend.device:
        raise ArgumentError(f"{name} is on GPU {device.index}, the group is on GPU {backend.device}")
    size = tensor.element_size()
    strides = tuple(s * size for s in tensor.stride())
    return View(tensor.data_ptr(), tuple(tensor.shape), str(tensor.dtype).rpartition(".")[2], strides, tensor)


def export(array: Array, like: str, backend: Backend, stream: Stream | None = None, dtype: str | None = None) -> Any:
    """The same memory as an array of framework `like`; unknown frameworks get the backend's own array.

    stream: which fills it: JAX's own work is put behind it. dtype: what bytes stand for, where the framework has that.
    """
    if like == "torch":
        return _export_torch(array, backend, dtype)
    if like in _JAX:
        return _export_jax(array, backend, stream)
    if like == "numba" and backend.name == "cuda" and array.dtype.name != "bfloat16":  # which Numba has no arrays of
        from numba import cuda

        return cuda.as_cuda_array(array, sync=False)
    return array


def _export_torch(array: Array, backend: Backend, dtype: str | None) -> Any:
    import torch

    if dtype is not None and dtype.startswith("float8"):
        return _export_torch(array.view(np.uint8), backend, None).view(getattr(torch, dtype))
    if backend.name == "cuda":
        return torch.from_dlpack(array)
    if array.dtype.name == "bfloat16":  # NumPy has no DLPack code for it
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _export_jax(array: Array, backend: Backend, stream: Stream | None) -> Any:
    import jax

    with backend.current_stream(stream):
        if backend.name == "cuda":
            return jax.dlpack.from_dlpack(array)
        if stream is not None:
            stream.synchronize()
        return jax.device_put(np.array(array), jax.devices("cpu")[0])


def allowed_dtypes(dtype: str, meaning: str = "") -> tuple[str, ...]:
    """Names of what may be passed for elements of `dtype`: not every library has the small ones. meaning: of scales."""
    if dtype.startswith(_BYTES):
        return dtype, "uint8"
    return (dtype, *_ALSO.get((dtype, meaning), ()))


_ALSO = {
    ("uint8", "ue8m0"): ("float8_e8m0fnu",),
    ("uint8", "e4m3"): ("float8_e4m3fn",),
    ("int32", "ue8m0"): ("uint32",),
}


def check_takes_strides(array: View, name: str, backend: Backend, what: str) -> None:
    """Results come in the framework of `array`, and JAX has no strided arrays."""
    if backend.name == "cuda" and framework(array.owner) in _JAX:
        raise ArgumentTypeError(f"{name}: got a JAX array, which {what} does not allow, as JAX has no strided arrays")


def check_matrix(
    array: View, name: str, rows: int | None, columns: int, dtypes: tuple[str, ...], max_rows: int | None = None
) -> None:
    """Check a [rows, columns] argument; `rows` None takes any number up to `max_rows`."""
    allowed_rows = f"at most {max_rows}" if rows is None else str(rows)
    if array.dtype not in dtypes:
        raise ArgumentTypeError(f"{name} has dtype {array.dtype}, allowed: {', '.join(dtypes)}")
    is_right = len(array.shape) == 2 and array.shape[1] == columns
    if is_right and rows is not None:
        is_right = array.shape[0] == rows
    if is_right and rows is None and max_rows is not None:
        is_right = array.shape[0] <= max_rows
    if not is_right:
        raise ArgumentError(f"{name} has shape {list(array.shape)}, allowed: [{allowed_rows}, {columns}]")


def check_shape(array: View, name: str, shape: tuple[int | None, ...], dtypes: tuple[str, ...]) -> None:
    """Check an argument's dtype and shape; None is any size."""
    if array.dtype not in dtypes:
        raise ArgumentTypeError(f"{name} has dtype {array.dtype}, allowed: {', '.join(dtypes)}")
    is_right = len(array.shape) == len(shape)
    is_right = is_right and all(want is None or have == want for have, want in zip(array.shape, shape, strict=True))
    if not is_right:
        allowed = ", ".join("rows" if size is None else str(size) for size in shape)
        raise ArgumentError(f"{name} has shape {list(array.shape)}, allowed: [{allowed}]")


def rows_of(view: View) -> Rows:
    """An array of rows with one stride, of any number of dimensions."""
    shape, strides = view.shape, view.strides
    num_rows = 1
    for size in shape[:-1]:
        num_rows *= size
    row_bytes = shape[-1] * _itemsize(view.dtype) if shape else 0
    return view.address, num_rows, strides[-2] if len(shape) > 1 else row_bytes, row_bytes


def extent(rows: Rows) -> tuple[int, int]:
    """From the first row to where one more would begin."""
    first, num_rows, stride, _ = rows
    return first, first + num_rows * stride


def check_apart(read: View, name: str, written: Rows, what: str) -> None:
    """What an operation reads must not lie in what it writes while it reads."""
    first, num_rows, stride, row_bytes = rows_of(read)
    first_w, num_rows_w, stride_w, row_bytes_w = written
    if not (num_rows and num_rows_w and row_bytes and row_bytes_w):
        return
    end, end_w = first + (num_rows - 1) * stride + row_bytes, first_w + (num_rows_w - 1) * stride_w + row_bytes_w
    if first >= end_w or first_w >= end:
        return
    if stride == stride_w and stride > 0:  # columns of one wider array
        ahead = (first_w - first) % stride
        if row_bytes <= ahead <= stride - row_bytes_w:
            return
    raise ArgumentError(f"{name} lies in {what}")


def check_disjoint(read: View, name: str, written: tuple[int, int], what: str) -> None:
    """The same of an array of any strides and of memory from one address to another."""
    (first, end), (first_w, end_w) = span(read), written
    if first < end_w and first_w < end:
        raise ArgumentError(f"{name} lies in {what}")


def span(view: View) -> tuple[int, int]:
    """From the first element to the end of the last."""
    if 0 in view.shape:
        return 0, 0
    reach = [(size - 1) * stride for size, stride in zip(view.shape, view.strides, strict=True)]
    low, high = sum(r for r in reach if r < 0), sum(r for r in reach if r > 0)
    return view.address + low, view.address + high + _itemsize(view.dtype)


def check_rows(view: View, name: str, row_bytes: int) -> None:
    """Check that a [rows, columns] argument has contiguous, aligned rows that do not overlap."""
    if not all(view.shape):
        return
    elem_bytes = row_bytes // view.shape[-1]
    if view.strides[-1] != elem_bytes and view.shape[-1] > 1:
        raise ArgumentError(f"{name}: elements of a row must be adjacent, got strides {view.strides} bytes")
    if view.address % 16 or (view.shape[0] > 1 and (view.strides[0] % 16 or view.strides[0] < row_bytes)):
        raise ArgumentError(
            f"{name}: rows must be 16-byte aligned and must not overlap, got address {view.address:#x}, "
            f"strides {view.strides} bytes"
        )
