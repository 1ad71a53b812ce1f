"""The matrix products that stand for the experts' work where `cuep bench --overlap` hides communication."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from cuep import layout
from cuep.bench.workload import Options
from cuep.errors import BackendUnavailable, DeviceError
from cuep.launching import address
from cuep.world import World

_WORKSPACE_BYTES = 32 << 20  # what cuBLAS asks for on Hopper
_OP_N, _R_16BF, _COMPUTE_32F, _DEFAULT_ALGO = 0, 14, 68, -1  # of cublas_api.h and library_types.h


class Gemm:
    """[rows, hidden] x [hidden, gemm_columns] for each of this rank's experts, with as many rows as an expert gets on
    average: as in decoding, reading the weights is most of it. A call enqueues them all on `stream`: bfloat16 by cuBLAS
    on a GPU, float32 by NumPy on a CPU.

    Attributes: stream; shape, (experts, rows, hidden, columns); a, b and c, the arrays: c = a @ b.

    Raises:
        BackendUnavailable: there is no cuBLAS.
    """

    def __init__(self, world: World, options: Options, stream: Any) -> None:
        backend = world.backend
        batch, hidden, columns = options.experts // world.size, options.hidden, options.gemm_columns or 256
        rows = -(-world.size * options.tokens * options.topk // options.experts)
        self.stream = stream
        self.shape = (batch, rows, hidden, columns)
        dtype = layout.dtype_of("bfloat16" if backend.name == "cuda" else "float32")
        rng = np.random.default_rng(0)
        self.a = backend.asarray(rng.standard_normal((batch, rows, hidden), np.float32).astype(dtype))
        self.b = backend.zeros((batch, hidden, columns), dtype)  # the same weights, each expert's in memory of its own
        self.b[...] = backend.asarray(rng.standard_normal((hidden, columns), np.float32).astype(dtype))
        self.c = c = backend.zeros((batch, rows, columns), dtype)
        backend.synchronize()  # the arrays were filled on another stream
        self._multiply: Callable[[], Any]
        if backend.name == "cuda":
            self._multiply = _Cublas(backend, stream).product(self.a, self.b, c)
        else:
            queue = backend.stream(stream)
            self._multiply = lambda: queue.submit(lambda: np.matmul(self.a, self.b, out=c))

    def __call__(self) -> None:
        self._multiply()


class _Cublas:
    """cuBLAS by ctypes, on one stream: CuPy refuses to call it during a stream capture."""

    def __init__(self, backend: Any, stream: Any) -> None:
        self._library = _load()
        handle = ctypes.c_void_p()
        self._check(self._library.cublasCreate_v2(ctypes.byref(handle)), "cublasCreate")
        self._handle = handle
        weakref.finalize(self, self._library.cublasDestroy_v2, handle).atexit = False
        # The library's own workspace would be allocated in the middle of a capture. Setting the stream resets it.
        self._workspace = backend.empty((_WORKSPACE_BYTES,), np.uint8)
        self._check(self._library.cublasSetStream_v2(handle, ctypes.c_void_p(stream.ptr)), "cublasSetStream")
        workspace = ctypes.c_void_p(address(self._workspace))
        size = ctypes.c_size_t(_WORKSPACE_BYTES)
        self._check(self._library.cublasSetWorkspace_v2(handle, workspace, size), "cublasSetWorkspace")

    def product(self, a: Any, b: Any, c: Any) -> Callable[[], None]:
        """Enqueues c = a @ b. The arrays are C-contiguous, cuBLAS counts by columns: it computes c' = b' a'."""
        batch, rows, inner = a.shape
        columns = b.shape[2]
        of_b, of_a, of_c = (ctypes.c_longlong(size) for size in (inner * columns, rows * inner, rows * columns))
        one, zero = ctypes.c_float(1), ctypes.c_float(0)
        m, n, k, op, kind = (ctypes.c_int(v) for v in (columns, rows, inner, _OP_N, _R_16BF))
        first, second, result = (ctypes.c_void_p(address(array)) for array in (b, a, c))
        arguments = (
            *(self._handle, op, op, m, n, k),
            *(ctypes.byref(one), first, kind, m, of_b),
            *(second, kind, k, of_a),
            *(ctypes.byref(zero), result, kind, m, of_c),
            *(ctypes.c_int(batch), ctypes.c_int(_COMPUTE_32F), ctypes.c_int(_DEFAULT_ALGO)),
        )
        gemm = self._library.cublasGemmStridedBatchedEx
        return lambda: self._check(gemm(*arguments), "cublasGemmStridedBatchedEx")

    def _check(self, status: int, call: str) -> None:
        if status != 0:
            raise DeviceError(f"{call} failed with status {status}")


def _load() -> ctypes.CDLL:
    try:
        from cuda.pathfinder import load_nvidia_dynamic_lib

        return ctypes.CDLL(load_nvidia_dynamic_lib("cublas").abs_path)
    except (ImportError, OSError, RuntimeError) as error:
        raise BackendUnavailable(f"overlap needs cuBLAS ({error}): pip install nvidia-cublas") from error
