"""Loaded kernels of the CUDA backend, launched with cuLaunchKernelEx."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from cuep.backend import Record
from cuep.backend.cuda_context import CudaContext, check
from cuep.backend.cuda_stream import CudaStream
from cuep.errors import DeviceError
from cuep.params import FastRecord

_EARLY_LAUNCH = 9  # compute capability from which a kernel can start before the one before it has ended
_STATIC_LIMIT = 48 * 1024  # dynamic shared memory beyond this must be asked for


class CudaModule:
    """A cubin in the device's context."""

    def __init__(self, context: CudaContext, raw_module: Any, *, cooperative: bool) -> None:
        self._context = context
        self._owner = raw_module  # CuPy unloads it with its last reference
        self._cooperative = cooperative
        self.number = int(raw_module.module.ptr)
        self._module = context.driver.CUmodule(self.number)

    def has_symbol(self, name: str) -> bool:
        """Whether the module has a global variable of this name."""
        with self._context.current():
            return bool(self._context.driver.cuModuleGetGlobal(self._module, name.encode())[0] == 0)

    def symbol_int32(self, name: str, count: int) -> list[int]:
        """The first values of a global int32 array."""
        driver = self._context.driver
        values = np.zeros(count, np.int32)
        with self._context.current():
            address, num_bytes = check(driver.cuModuleGetGlobal(self._module, name.encode()), f"symbol {name}")
            if num_bytes < values.nbytes:
                raise DeviceError(f"symbol {name} has {num_bytes} bytes, expected {values.nbytes}")
            check(driver.cuMemcpyDtoH(values.ctypes.data, address, values.nbytes), f"reading {name}")
        return [int(value) for value in values]

    def function(self, name: str) -> CudaFunction:
        driver = self._context.driver
        with self._context.current():
            # loads the code now, not lazily at the first launch, when a peer may already be waiting
            function = check(driver.cuModuleGetFunction(self._module, name.encode()), f"kernel {name}")
        return CudaFunction(self._context, self, function, name, cooperative=self._cooperative)


class CudaFunction:
    """One kernel. The launch configuration is made once and only its changing fields are set."""

    def __init__(
        self, context: CudaContext, module: CudaModule, function: Any, name: str, *, cooperative: bool
    ) -> None:
        self._context = context
        self._owner = module
        self._function = function
        self._name = name
        self._launch = context.driver.cuLaunchKernelEx
        self.cooperative = cooperative  #: of launches that do not say
        attributes = context.driver.CUlaunchAttributeID
        self._plain_config = self._make_config()
        self._cooperative_config = self._make_config(attributes.CU_LAUNCH_ATTRIBUTE_COOPERATIVE)
        self._early_config = self._plain_config  # older GPUs cannot, and their kernels do not wait
        if context.attribute("COMPUTE_CAPABILITY_MAJOR") >= _EARLY_LAUNCH:
            self._early_config = self._make_config(attributes.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION)
        self._most: dict[tuple[int, int], int] = {}
        self._wanted: tuple[Any, ...] = ()  # configuration set last, and to what
        self._lock = threading.Lock()  # two threads must not set one configuration
        self._record: Record | None = None
        self._params = np.zeros(1, np.uint64)  # what cuLaunchKernelEx takes: an array of addresses, here of one
        self._params_address = int(self._params.ctypes.data)

    def max_grid(self, threads: int, smem_bytes: int) -> int:
        """Blocks that fit the device at once. Raises DeviceError where not even one does."""
        most = self._most.get((threads, smem_bytes))
        if most is None:
            most = self._most[threads, smem_bytes] = self._measure(threads, smem_bytes)
        return most

    def launch(
        self,
        grid: int,
        threads: int,
        smem_bytes: int,
        record: Record,
        stream: CudaStream,
        *,
        is_early: bool = False,
        cooperative: bool | None = None,
    ) -> None:
        """Enqueue a launch with the record's present values.

        is_early: set up while what comes before it in the stream still runs (programmatic dependent launch); the kernel
        waits for that itself. No cooperative launch.
        cooperative: all blocks resident at once, guaranteed by the driver also beside other kernels; costs about 0.7 us
        of device time. None: `self.cooperative`.
        """
        if not 0 < grid <= self.max_grid(threads, smem_bytes):
            most = self.max_grid(threads, smem_bytes)
            raise DeviceError(f"{self._name}: a grid of {grid} blocks is not allowed; GPU holds 1 to {most} at once")
        with self._lock:
            if record is not self._record:
                self._params[0] = record.address if isinstance(record, FastRecord) else record.ctypes.data
                self._record = record
            config = self._config(is_early=is_early, cooperative=cooperative)
            wanted = (config, grid, threads, smem_bytes, stream.number)
            if wanted != self._wanted:  # setting a field takes longer than all else here
                config.gridDimX = grid
                config.blockDimX = threads
                config.sharedMemBytes = smem_bytes
                config.hStream = stream.handle
                self._wanted = wanted
            was_pushed = self._context.enter()
            try:
                result = self._launch(config, self._function, self._params_address, 0)
            finally:
                self._context.leave(was_pushed)
        if result[0] != 0:
            check(result, f"launch of {self._name} with {grid} blocks of {threads} threads")

    def _measure(self, threads: int, smem_bytes: int) -> int:
        context, driver = self._context, self._context.driver
        with context.current():
            if smem_bytes > _STATIC_LIMIT:
                limit = context.attribute("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN")
                if smem_bytes > limit:
                    raise DeviceError(
                        f"{self._name} needs {smem_bytes} bytes of shared memory per block,"
                        f" GPU {context.ordinal} has {limit}"
                    )
                kind = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                check(driver.cuFuncSetAttribute(self._function, kind, smem_bytes), f"{self._name}: shared memory")
            per_processor = check(
                driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(self._function, threads, smem_bytes),
                f"{self._name}: occupancy",
            )
        if per_processor == 0:
            raise DeviceError(
                f"{self._name}: GPU {context.ordinal} cannot hold one block of {threads} threads with {smem_bytes}"
                " bytes of shared memory"
            )
        return int(per_processor) * context.attribute("MULTIPROCESSOR_COUNT")

    def _config(self, *, is_early: bool, cooperative: bool | None) -> Any:
        if is_early:
            return self._early_config
        return (
            self._cooperative_config
            if (self.cooperative if cooperative is None else cooperative)
            else self._plain_config
        )

    def _make_config(self, kind: Any = None) -> Any:
        """A launch configuration with the attribute `kind`, a CUlaunchAttributeID, set to 1."""
        driver = self._context.driver
        config = driver.CUlaunchConfig()
        config.gridDimY = config.gridDimZ = config.blockDimY = config.blockDimZ = 1
        if kind is not None:
            attribute = driver.CUlaunchAttribute()
            attribute.id = kind
            if kind == driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE:
                attribute.value.cooperative = 1
            else:
                attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs = [attribute]
            config.numAttrs = 1
        return config
