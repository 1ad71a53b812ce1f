"""NVSHMEM's host library, started once per process by a unique id over the communicator. No nvshmem4py, no MPI plug-in.

NVSHMEM stays up for the life of the process and is finalised at exit, but only if everything that used it was closed on
all ranks: finalising is collective, and a rank that died or leaked must not keep the others from leaving.
"""

from __future__ import annotations

import atexit
import ctypes
import logging
import os
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cuep import env, toolchain
from cuep.agreement import raise_together
from cuep.errors import ArgumentError, BackendUnavailable, CuepError, DeviceError, OrderError

_log = logging.getLogger("cuep")

_INIT_WITH_UNIQUEID = 1 << 3
_STATUS_INITIALIZED = 2  # and above: also initialised, with several ranks on a GPU
_EXIT_SECONDS = 5.0  # how long leaving may wait for the other ranks
_PROTOTYPES: dict[str, tuple[Any, list[Any]]] = {
    "nvshmemx_vendor_get_version_info": (None, [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]),
    "nvshmemx_get_uniqueid": (ctypes.c_int, [ctypes.c_void_p]),
    "nvshmemx_set_attr_uniqueid_args": (ctypes.c_int, [ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]),
    "nvshmemx_hostlib_init_attr": (ctypes.c_int, [ctypes.c_uint, ctypes.c_void_p]),
    "nvshmemx_init_status": (ctypes.c_int, []),
    "nvshmemx_hostlib_finalize": (None, []),
    "nvshmemx_cumodule_init": (ctypes.c_int, [ctypes.c_void_p]),
    "nvshmemx_cumodule_finalize": (ctypes.c_int, [ctypes.c_void_p]),
    "nvshmem_my_pe": (ctypes.c_int, []),
    "nvshmem_n_pes": (ctypes.c_int, []),
    "nvshmem_malloc": (ctypes.c_void_p, [ctypes.c_size_t]),
    "nvshmem_free": (None, [ctypes.c_void_p]),
    "nvshmem_ptr": (ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_int]),
}


class _UniqueId(ctypes.Structure):
    _fields_ = (("version", ctypes.c_int), ("internal", ctypes.c_char * 124))


class _UniqueIdArgs(ctypes.Structure):
    _fields_ = (("version", ctypes.c_int), ("id", ctypes.c_void_p), ("rank", ctypes.c_int), ("size", ctypes.c_int))


class _InitArgs(ctypes.Structure):
    _fields_ = (("version", ctypes.c_int), ("unique_id", _UniqueIdArgs), ("content", ctypes.c_char * 96))


class _InitAttributes(ctypes.Structure):
    _fields_ = (("version", ctypes.c_int), ("mpi_comm", ctypes.c_void_p), ("args", _InitArgs))


def _version_1(kind: type[ctypes.Structure]) -> int:
    """NVSHMEM writes a struct's version and size into its first word; 1 is understood by all of 3.x."""
    return (1 << 16) + ctypes.sizeof(kind)


class Nvshmem:
    """NVSHMEM running in this process; start() makes the one object. Calls need the device's context to be current."""

    def __init__(self, library: Any, path: Path, members: list[tuple[str, int]]) -> None:
        self.path = path
        self.members = members  # (host, process) of every rank
        self._library = library
        self._modules: dict[int, Any] = {}
        self._sizes: dict[int, int] = {}  # of the blocks in use, by address
        self._peak_bytes = 0
        self._num_open = 0
        self._is_orderly = True
        self._process = os.getpid()
        self.start_seconds = 0.0  # what its own start and first block took, for people who measure cuep's

    def version(self) -> tuple[int, int, int]:
        numbers = [ctypes.c_int() for _ in range(3)]
        self._library.nvshmemx_vendor_get_version_info(*(ctypes.byref(number) for number in numbers))
        major, minor, patch = (number.value for number in numbers)
        return major, minor, patch

    def malloc(self, num_bytes: int) -> int:
        """Symmetric memory (collective); 0 if there is none."""
        begin = time.monotonic()
        address = self._library.nvshmem_malloc(num_bytes) or 0
        if not self._sizes and not self._peak_bytes:
            self.start_seconds += time.monotonic() - begin  # its heap comes with the first block
        if address:
            self._sizes[address] = num_bytes
            self._peak_bytes = max(self._peak_bytes, sum(self._sizes.values()))
        return address

    def free(self, address: int) -> None:
        """Collective. The heap keeps the GPU memory for blocks to come."""
        self._library.nvshmem_free(address)
        del self._sizes[address]

    def missing_bytes(self, num_bytes: int) -> int:
        """How much the heap must grow for a block, if freed blocks can be used again."""
        return max(0, sum(self._sizes.values()) + num_bytes - self._peak_bytes)

    def peer_address(self, address: int, rank: int) -> int:
        """Where this process sees the block of another rank, or 0 if it can only be reached by put and get."""
        return self._library.nvshmem_ptr(address, rank) or 0

    def register_module(self, handle: int, owner: Any) -> None:
        """Give a loaded CUmodule that calls NVSHMEM's device functions the state that they need, once.

        owner is kept, so that the module is not unloaded and its handle not given to another.
        """
        if handle in self._modules:
            return
        status = self._library.nvshmemx_cumodule_init(handle)
        if status != 0:
            raise DeviceError(f"nvshmemx_cumodule_init failed with status {status} for the module {owner}")
        self._modules[handle] = owner

    def opened(self) -> None:
        """A user of symmetric memory has begun."""
        self._num_open += 1

    def closed(self, *, is_orderly: bool) -> None:
        """A user has ended; is_orderly: on all ranks, with all its memory freed. The same value on every rank."""
        self._num_open -= 1
        self._is_orderly = self._is_orderly and is_orderly

    def finalize_at_exit(self, make_current: Callable[[], None]) -> None:
        """Finalise when the interpreter exits, in a thread that already runs: a rank that is gone cannot hold us."""
        leaving, left = threading.Event(), threading.Event()

        def finalize() -> None:
            leaving.wait()
            try:
                make_current()
                for handle in self._modules:
                    self._library.nvshmemx_cumodule_finalize(handle)
                self._library.nvshmemx_hostlib_finalize()
            finally:
                left.set()

        def leave() -> None:
            if self._is_orderly and self._num_open == 0 and os.getpid() == self._process:
                leaving.set()
                left.wait(_EXIT_SECONDS)

        threading.Thread(target=finalize, name="cuep-nvshmem-exit", daemon=True).start()
        atexit.register(leave)


_running: Nvshmem | None = None


def running() -> Nvshmem | None:
    """The object that start() made in this process, if it did."""
    return _running


def start(comm: Any, make_current: Callable[[], None]) -> Nvshmem:
    """Start NVSHMEM among the ranks of comm, or return it if it runs among them already (collective).

    make_current() makes the device's context current; it must be by the time of this call, too.
    """
    global _running
    members: list[tuple[str, int]] = comm.allgather((socket.gethostname(), os.getpid()))
    raise_together(comm, _other_members(members))
    if _running is not None:
        return _running
    if len({host for host, _ in members}) == 1:
        env.set_default("NVSHMEM_REMOTE_TRANSPORT", "none")
        env.set_default("NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME", "lo")
    begin = time.monotonic()
    library: Any = None
    path = Path()
    error: CuepError | None = None
    try:
        library, path = _load()
    except CuepError as caught:
        error = caught
    raise_together(comm, error)
    statuses = comm.allgather(library.nvshmemx_init_status())
    is_ours = max(statuses) < _STATUS_INITIALIZED
    if is_ours:
        _bootstrap(library, comm)
    elif min(statuses) < _STATUS_INITIALIZED:
        raise BackendUnavailable("NVSHMEM was already started in some of the ranks by another library, but not in all")
    raise_together(comm, _other_numbering(library, comm))
    _running = Nvshmem(library, path, members)
    _running.start_seconds = time.monotonic() - begin
    if is_ours:
        _running.finalize_at_exit(make_current)
    _log.info("NVSHMEM %d.%d.%d from %s, %d ranks", *_running.version(), path, comm.size)
    return _running


def _bootstrap(library: Any, comm: Any) -> None:
    unique_id = _UniqueId(_version_1(_UniqueId))
    status = library.nvshmemx_get_uniqueid(ctypes.byref(unique_id)) if comm.rank == 0 else 0
    content = comm.bcast((status, bytes(unique_id)), root=0)
    if content[0] != 0:
        raise BackendUnavailable(
            f"nvshmemx_get_uniqueid failed on rank 0 with status {content[0]}: see NVSHMEM_DEBUG=INFO"
        )
    ctypes.memmove(ctypes.byref(unique_id), content[1], ctypes.sizeof(unique_id))
    attributes = _InitAttributes(_version_1(_InitAttributes))
    attributes.args.version = _version_1(_InitArgs)
    attributes.args.unique_id.version = _version_1(_UniqueIdArgs)
    status = library.nvshmemx_set_attr_uniqueid_args(
        comm.rank, comm.size, ctypes.byref(unique_id), ctypes.byref(attributes)
    ) or library.nvshmemx_hostlib_init_attr(_INIT_WITH_UNIQUEID, ctypes.byref(attributes))
    error = BackendUnavailable(f"NVSHMEM did not start on rank {comm.rank}: status {status}; see NVSHMEM_DEBUG=INFO")
    raise_together(comm, error if status != 0 else None)


def _load() -> tuple[Any, Path]:
    """Open the library; a process may hold one copy only, because each would keep a state of its own."""
    found = toolchain.nvshmem()
    for other in toolchain.loaded_libraries("libnvshmem_host.so"):
        if not (other.exists() and other.samefile(found.library)):
            raise BackendUnavailable(
                f"two copies of NVSHMEM: {other} is loaded in this process already, and {found.library} would be the"
                " second; unset NVSHMEM_HOME or install one version for all libraries of the process"
            )
    try:
        # RTLD_GLOBAL: its bootstrap plug-ins, which it opens from its own folder, find their symbols in it
        library = ctypes.CDLL(str(found.library), mode=ctypes.RTLD_GLOBAL)
    except OSError as error:
        raise BackendUnavailable(f"{found.library} cannot be loaded: {error}") from error
    for name, (result, arguments) in _PROTOTYPES.items():
        function = getattr(library, name, None)
        if function is None:
            raise BackendUnavailable(f"{found.library} has no {name}; cuep needs NVSHMEM 3.4.5 or newer")
        function.restype, function.argtypes = result, arguments
    return library, found.library


def _other_members(members: list[tuple[str, int]]) -> CuepError | None:
    if _running is None or _running.members == members:
        return None
    if _running._process != os.getpid():
        return OrderError("this process was forked after NVSHMEM had started; start ranks with mpirun, not by fork")
    return ArgumentError(
        f"NVSHMEM already runs in this process among {len(_running.members)} ranks {_running.members} and cannot be"
        f" started again among others {members}: one set of ranks per process; pass cuep.init() the same communicator"
    )


def _other_numbering(library: Any, comm: Any) -> CuepError | None:
    found = (library.nvshmem_my_pe(), library.nvshmem_n_pes())
    if found == (comm.rank, comm.size):
        return None
    return BackendUnavailable(
        f"NVSHMEM says that rank {comm.rank} of {comm.size} is PE {found[0]} of {found[1]}: another library of this"
        " process started it among other ranks"
    )
