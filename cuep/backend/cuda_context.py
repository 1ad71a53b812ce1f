"""The GPU of this process: its context, made current around every call, and which GPU a rank takes."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Event
from typing import Any
from uuid import UUID

from cuep import env, toolchain
from cuep.agreement import raise_together
from cuep.backend import Comm
from cuep.errors import ArgumentError, BackendUnavailable, CuepError, DeviceError

_log = logging.getLogger("cuep")

_MIN_CAPABILITY = (8, 0)
_has_forked = False


def _note_fork() -> None:
    global _has_forked
    _has_forked = True


os.register_at_fork(after_in_child=_note_fork)


def check(result: tuple[Any, ...], what: str = "") -> Any:
    """The value of a cuda.bindings.driver call; DeviceError with CUDA's own words if it failed."""
    if result[0] != 0:
        raise DeviceError(f"{what or 'CUDA'}: {_words(result[0])}")
    return result[1] if len(result) == 2 else result[1:]


def _words(status: Any) -> str:
    from cuda.bindings import driver

    failed, text = driver.cuGetErrorString(status)
    name = getattr(status, "name", str(status))
    return f"{name} ({text.decode()})" if failed == 0 and text else name


class CudaContext:
    """The primary context of one GPU, shared with CuPy, torch and the CUDA runtime."""

    def __init__(self, ordinal: int) -> None:
        from cuda.bindings import driver

        self.ordinal = ordinal
        self.driver = driver
        self._process = os.getpid()
        self.device = check(driver.cuDeviceGet(ordinal))
        self._context = check(driver.cuDevicePrimaryCtxRetain(self.device), f"GPU {ordinal}")
        self._number = int(self._context)

    def attribute(self, name: str) -> int:
        """A device attribute, by its name without CU_DEVICE_ATTRIBUTE_."""
        kind = getattr(self.driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(check(self.driver.cuDeviceGetAttribute(kind, self.device)))

    def enter(self) -> bool:
        """Make it current; leave(what this returned) restores the caller's."""
        if _has_forked and os.getpid() != self._process:
            raise DeviceError("this process was forked after CUDA had started in its parent; start ranks with mpirun")
        status, current = self.driver.cuCtxGetCurrent()
        if status == 0 and int(current) == self._number:
            return False
        check(self.driver.cuCtxPushCurrent(self._context))
        return True

    def leave(self, was_pushed: bool) -> None:
        if was_pushed:
            self.driver.cuCtxPopCurrent()

    @contextmanager
    def current(self) -> Iterator[None]:
        was_pushed = self.enter()
        try:
            yield
        finally:
            self.leave(was_pushed)

    def synchronize(self) -> None:
        """Wait for everything on the device."""
        with self.current():
            check(self.driver.cuCtxSynchronize(), "waiting for the GPU")

    def fill_zero(self, address: int, num_bytes: int, stream: int = 0) -> None:
        """After what is queued on `stream`; complete when this returns, for whatever stream comes next."""
        with self.current():
            check(self.driver.cuMemsetD8Async(address, 0, num_bytes, stream), "zeroing memory")
            check(self.driver.cuStreamSynchronize(stream), "zeroing memory")

    def clear(self, address: int, num_bytes: int, stream: Any) -> None:
        """Zero it, in stream order."""
        with self.current():
            check(self.driver.cuMemsetD8Async(address, 0, num_bytes, stream), "zeroing memory")

    def copy_in(self, address: int, host_address: int, num_bytes: int, stream: int = 0) -> None:
        """From the host, after what is queued on `stream`; complete when this returns, for whatever comes next."""
        with self.current():
            check(self.driver.cuMemcpyHtoDAsync(address, host_address, num_bytes, stream), "copying to the GPU")
            check(self.driver.cuStreamSynchronize(stream), "copying to the GPU")

    def free_bytes(self) -> int:
        """GPU memory that nobody has."""
        with self.current():
            return int(check(self.driver.cuMemGetInfo())[0])

    def set_current(self) -> None:
        """Make it current in this thread for good."""
        check(self.driver.cuCtxSetCurrent(self._context))


@dataclass(frozen=True)
class Gpu:
    """One visible GPU. `uuid` is the same in every process, whatever CUDA_VISIBLE_DEVICES makes of the index."""

    ordinal: int
    uuid: str
    name: str
    capability: tuple[int, int]


@dataclass(frozen=True)
class RankGpu:
    """Where a rank is, and the GPU that it took."""

    host: str
    gpu: Gpu


def choose_gpu(comm: Comm, device: int | None) -> tuple[Gpu, list[RankGpu], list[tuple[int, int]]]:
    """The GPU of this rank, every rank's, and the pairs of ranks that reach one another, but not over NVLink
    (collective). Raises on all ranks what is wrong on any.

    device: an index among the visible GPUs; None takes the rank's number on its host, modulo the visible GPUs.
    """
    host = socket.gethostname()
    hosts = comm.allgather(host)
    gpus: list[Gpu] = []
    chosen: Gpu | None = None
    error: CuepError | None = None
    try:
        gpus = visible_gpus()
        chosen = _pick(gpus, device, hosts[: comm.rank].count(host), comm.rank)
    except CuepError as caught:
        error = caught
    raise_together(comm, error)
    everyone = [RankGpu(*place) for place in zip(hosts, comm.allgather(chosen), strict=True)]
    if comm.rank == 0:
        _warn_of_sharing(everyone)
    error, not_over_nvlink = _reach(comm.rank, gpus, everyone)
    raise_together(comm, error)
    return everyone[comm.rank].gpu, everyone, [pair for pairs in comm.allgather(not_over_nvlink) for pair in pairs]


def wake(device: int | None, is_begun: Event) -> None:
    """Start beside other things what takes long: the driver, the context where its GPU is clear, and NVRTC."""
    from cuda.bindings import driver

    is_begun.set()
    check(driver.cuInit(0))
    count = check(driver.cuDeviceGetCount())
    local_rank = env.local_rank()
    number = local_rank if device is None else device
    if number is not None and count and (device is None or 0 <= device < count):
        check(driver.cuDevicePrimaryCtxRetain(check(driver.cuDeviceGet(number % count))))  # for the process's life
    if count and local_rank in (None, 0):  # the rank that compiles, or asks which compiler the cache is for
        toolchain.nvrtc_identity()


def visible_gpus() -> list[Gpu]:
    """The GPUs that this process may use. Makes no context."""
    try:
        from cuda.bindings import driver

        status = driver.cuInit(0)[0]
    except Exception as error:  # ImportError, or what cuda.bindings raises where there is no libcuda
        raise BackendUnavailable(f"no CUDA driver on host {socket.gethostname()}: {error}") from error
    if status != 0:
        raise BackendUnavailable(f"no usable GPU on host {socket.gethostname()}: {_words(status)}")
    gpus = []
    for ordinal in range(check(driver.cuDeviceGetCount())):
        device = check(driver.cuDeviceGet(ordinal))
        get_uuid = getattr(driver, "cuDeviceGetUuid_v2", None) or driver.cuDeviceGetUuid  # CUDA 12 has both
        uuid = UUID(bytes=bytes(check(get_uuid(device)).bytes))
        name = check(driver.cuDeviceGetName(128, device)).split(b"\0")[0].decode()
        major, minor = (
            int(check(driver.cuDeviceGetAttribute(kind, device)))
            for kind in (
                driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR,
            )
        )
        gpus.append(Gpu(ordinal, f"GPU-{uuid}", name, (major, minor)))
    return gpus


def _pick(gpus: list[Gpu], device: int | None, rank_on_host: int, rank: int) -> Gpu:
    if not gpus:
        visible = env.visible_devices()
        hint = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible!r})"
        raise BackendUnavailable(f"rank {rank} on host {socket.gethostname()} sees no GPU{hint}")
    if device is not None and not 0 <= device < len(gpus):
        raise ArgumentError(f"device={device!r} is not allowed on rank {rank}; allowed: 0 to {len(gpus) - 1}, or None")
    local_rank = env.local_rank()
    number = rank_on_host if local_rank is None else local_rank
    gpu = gpus[number % len(gpus) if device is None else device]
    if gpu.capability < _MIN_CAPABILITY:
        found, needed = ("{}.{}".format(*capability) for capability in (gpu.capability, _MIN_CAPABILITY))
        raise BackendUnavailable(
            f"rank {rank}: GPU {gpu.ordinal} ({gpu.name}) has compute capability {found}, needed: {needed} or newer"
        )
    return gpu


def _warn_of_sharing(everyone: list[RankGpu]) -> None:
    ranks: dict[str, list[int]] = {}
    for rank, place in enumerate(everyone):
        ranks.setdefault(place.gpu.uuid, []).append(rank)
    shared = [f"ranks {sharing} on {uuid}" for uuid, sharing in ranks.items() if len(sharing) > 1]
    if shared:
        _log.warning("several ranks share a GPU: %s; results are right, timings mean nothing", "; ".join(shared))


def _reach(rank: int, gpus: list[Gpu], everyone: list[RankGpu]) -> tuple[CuepError | None, list[tuple[int, int]]]:
    """What keeps this rank from the memory of another on its host, as far as can be seen from here, and the pairs of
    it and a rank that it reaches, but not over NVLink."""
    from cuda.bindings import driver

    mine = everyone[rank]
    ordinals = {gpu.uuid: gpu.ordinal for gpu in gpus}
    has_atomics = driver.CUdevice_P2PAttribute.CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED  # as NVLink alone has
    not_over_nvlink: list[tuple[int, int]] = []
    for other, place in enumerate(everyone):
        ordinal = ordinals.get(place.gpu.uuid)
        if place.host != mine.host or ordinal is None or place.gpu.uuid == mine.gpu.uuid:
            continue
        devices = [check(driver.cuDeviceGet(number)) for number in (mine.gpu.ordinal, ordinal)]
        if not check(driver.cuDeviceCanAccessPeer(*devices)):
            error = BackendUnavailable(
                f"rank {rank} ({mine.gpu.uuid}) cannot access the memory of rank {other} ({place.gpu.uuid}) on host"
                f" {mine.host}: these GPUs have no peer-to-peer link (see nvidia-smi topo -p2p r)"
            )
            return error, []
        if not check(driver.cuDeviceGetP2PAttribute(has_atomics, *devices)):
            not_over_nvlink.append((rank, other))
    return None, not_over_nvlink
