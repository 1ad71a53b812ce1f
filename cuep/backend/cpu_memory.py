"""Symmetric memory of the CPU backend: one file in /dev/shm that all ranks map and that has no name afterwards."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
from pathlib import Path

import numpy as np
import numpy.typing as npt

from cuep.backend import Comm
from cuep.errors import BackendUnavailable, OutOfSymmetricMemory

_FOLDER = Path("/dev/shm")
_leaked: list[npt.NDArray[np.uint8]] = []


class SharedMemory:
    """A block of `num_bytes` on every rank, zeroed, that all ranks can address. Collective; not a barrier.

    A file of our own rather than MPI.Win.Allocate_shared: it serves every kind of communicator, arrays that look into
    it stay valid after free(), a full /dev/shm is an error instead of a SIGBUS later, and a killed run leaves no file.

    Attributes:
        address, peers: where this rank's block, and every rank's block, is in this process.
        bytes: this rank's block as a uint8 array.

    Raises:
        OutOfSymmetricMemory: on every rank.
        BackendUnavailable: a rank cannot see the file, as in a container of its own. On every rank.
    """

    def __init__(self, comm: Comm, num_bytes: int) -> None:
        stride = -(-max(num_bytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
        descriptor, path = _open_together(comm, stride * comm.size)
        try:
            mapping = mmap.mmap(descriptor, stride * comm.size)
        finally:
            os.close(descriptor)
            if comm.rank == 0:
                path.unlink()
        everything = np.frombuffer(mapping, np.uint8)  # keeps the mapping, and so do arrays made from it
        base = everything.ctypes.data
        self.num_bytes = num_bytes
        self.peers = [base + rank * stride for rank in range(comm.size)]
        self.address = self.peers[comm.rank]
        self.bytes = everything[comm.rank * stride : comm.rank * stride + num_bytes]
        self._comm = comm

    def free(self) -> None:
        """Collective. The memory goes when the last array that looks into it has gone."""
        self._comm.barrier()
        self.bytes = self.bytes[:0].copy()

    def leak(self) -> None:
        """Local: the memory stays for the life of the process, since kernels may still use it."""
        _leaked.append(self.bytes)


def _open_together(comm: Comm, total_bytes: int) -> tuple[int, Path]:
    """Open one file on all ranks, or raise on all ranks."""
    path, descriptor, available = Path(), -1, -1
    if comm.rank == 0:
        path = _FOLDER / f"cuep-{os.getpid()}-{secrets.token_hex(8)}"
        try:
            descriptor = _create(path, total_bytes)
        except OSError as error:
            available = _available_bytes() if error.errno in (errno.ENOSPC, errno.ENOMEM) else -1
            path = Path(f"{error}") if available < 0 else Path()
    path, available, is_made = comm.bcast((path, available, descriptor >= 0))
    if available >= 0:
        raise OutOfSymmetricMemory(
            f"{comm.size} ranks need {total_bytes} bytes of shared memory, {_FOLDER} has {available} free "
            "(in a container: docker run --shm-size)"
        )
    if not is_made:
        raise BackendUnavailable(f"the cpu backend cannot make a file in {_FOLDER}: {path}")
    if comm.rank != 0:
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDWR)
    blind = [rank for rank, is_open in enumerate(comm.allgather(descriptor >= 0)) if not is_open]
    if blind:
        if descriptor >= 0:
            os.close(descriptor)
        if comm.rank == 0:
            path.unlink()
        raise BackendUnavailable(f"the cpu backend needs one {_FOLDER} for all ranks; rank {blind[0]} has another")
    return descriptor, path


def _create(path: Path, total_bytes: int) -> int:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, total_bytes)  # takes the memory now: touching it cannot fail later
    except OSError:
        os.close(descriptor)
        path.unlink()
        raise
    return descriptor


def _available_bytes() -> int:
    status = os.statvfs(_FOLDER)
    return status.f_bavail * status.f_frsize
