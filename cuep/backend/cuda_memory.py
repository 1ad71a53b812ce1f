"""Symmetric memory of the CUDA backend: blocks of NVSHMEM's heap as CuPy arrays, with every peer's address."""

from __future__ import annotations

import logging
from typing import Any

import cupy

from cuep.backend import Comm
from cuep.backend.cuda_context import CudaContext, RankGpu
from cuep.errors import BackendUnavailable, CuepError, OutOfSymmetricMemory, SettingsMismatch
from cuep.nvshmem import Nvshmem

_log = logging.getLogger("cuep")

_PIECE = 512 << 20  # NVSHMEM's heap grows by this much GPU memory at a time (its NVSHMEM_CUMEM_GRANULARITY)


class SymmetricMemory:
    """One block on every rank. All ranks allocate and free in the same order.

    Attributes: num_bytes; address of this rank's; peers, the address of every rank's in this process; bytes, this
    rank's as a uint8 CuPy array.
    """

    def __init__(self, heap: SymmetricHeap, num_bytes: int, address: int, peers: list[int]) -> None:
        self._heap = heap
        self.num_bytes = num_bytes
        self.address = address
        self.peers = peers
        memory = cupy.cuda.UnownedMemory(address, num_bytes, heap, heap.context.ordinal)
        self.bytes: Any = cupy.ndarray((num_bytes,), cupy.uint8, cupy.cuda.MemoryPointer(memory, 0))

    def free(self) -> None:
        """Give it back (collective). Twice is fine."""
        if self in self._heap.blocks:
            self._heap.free(self)

    def leak(self) -> None:
        """Forget it (local), where peers cannot be asked to free it, too."""
        if self in self._heap.blocks:
            self._heap.blocks.remove(self)
            self._heap.is_orderly = False


class SymmetricHeap:
    """NVSHMEM's heap as one backend uses it."""

    def __init__(self, nvshmem: Nvshmem, comm: Comm, context: CudaContext, places: list[RankGpu]) -> None:
        self.context = context
        self.blocks: list[SymmetricMemory] = []
        self.is_orderly = True
        self._nvshmem = nvshmem
        self._comm = comm
        self._places = places
        nvshmem.opened()

    def allocate(self, num_bytes: int) -> SymmetricMemory:
        """A zeroed block on every rank (collective).

        Raises, on every rank: OutOfSymmetricMemory, SettingsMismatch where ranks ask for different sizes,
        BackendUnavailable where a peer's memory cannot be addressed.
        """
        nvshmem, comm = self._nvshmem, self._comm
        with self.context.current():
            self._check_room(num_bytes)
            address = nvshmem.malloc(max(num_bytes, 16))
            peers = [nvshmem.peer_address(address, rank) if address else 0 for rank in range(comm.size)]
            answers: list[list[int]] = comm.allgather(peers if address else [])
            error = self._refusal(num_bytes, answers)
            if error is not None:
                if all(answers):
                    nvshmem.free(address)
                elif address:  # freeing is collective, and some have nothing to free
                    self.is_orderly = False
                raise error
            self.context.fill_zero(address, max(num_bytes, 16))
            block = SymmetricMemory(self, num_bytes, address, peers)
        self.blocks.append(block)
        return block

    def free(self, block: SymmetricMemory) -> None:
        """Collective: waits until all ranks are done with it."""
        with self.context.current():
            self.context.synchronize()
            self._comm.barrier()
            self._nvshmem.free(block.address)
        self.blocks.remove(block)

    def close(self) -> None:
        """Free what is left, if all ranks can (collective); local where memory was leaked before."""
        is_orderly = False
        if self.is_orderly:
            try:
                everyone = self._comm.allgather([block.num_bytes for block in self.blocks])
                is_orderly = all(sizes == everyone[0] for sizes in everyone)
            except Exception as error:  # the communicator's own kind: its owner has freed it
                _log.warning("symmetric memory is not given back: the communicator does not work any more (%s)", error)
        if is_orderly:
            for block in list(self.blocks):
                self.free(block)
        self.blocks.clear()
        self._nvshmem.closed(is_orderly=is_orderly)

    def _check_room(self, num_bytes: int) -> None:
        """Refuse what cannot fit before NVSHMEM tries: one rank failing inside it would hold the others."""
        asked = self._comm.allgather((num_bytes, self.context.free_bytes(), self._nvshmem.missing_bytes(num_bytes)))
        sizes = [size for size, _, _ in asked]
        if len(set(sizes)) > 1:
            raise SettingsMismatch(f"ranks ask for different sizes of symmetric memory: {sizes}")
        for rank, (_, free, missing) in enumerate(asked):
            uuid = self._places[rank].gpu.uuid
            sharing = sum(place.gpu.uuid == uuid for place in self._places)
            needed = -(-missing // _PIECE) * _PIECE * sharing
            if needed > free:
                raise OutOfSymmetricMemory(
                    f"{num_bytes} bytes of symmetric memory asked on every rank, rank {rank} has {free} bytes of GPU"
                    f" memory free; NVSHMEM's heap grows in pieces of {_PIECE} bytes for each of {sharing} ranks on"
                    " that GPU. Other users of the GPU, or NVSHMEM_SYMMETRIC_SIZE, may hold the rest"
                )

    def _refusal(self, num_bytes: int, answers: list[list[int]]) -> CuepError | None:
        """answers: of each rank, the addresses of all blocks in its process, or nothing if it got no block."""
        failed = [rank for rank, peers in enumerate(answers) if not peers]
        if failed:
            free = self.context.free_bytes()
            return OutOfSymmetricMemory(
                f"NVSHMEM has no {num_bytes} bytes of symmetric memory on ranks {failed} ({free} bytes of GPU memory"
                " are free here); NVSHMEM_SYMMETRIC_SIZE or NVSHMEM_MAX_MEMORY_PER_GPU bounds its heap"
            )
        for rank, peers in enumerate(answers):
            if 0 in peers:
                peer = peers.index(0)
                mine, theirs = self._places[rank], self._places[peer]
                return BackendUnavailable(
                    f"rank {rank} ({mine.host}, {mine.gpu.uuid}) cannot address the memory of rank {peer}"
                    f" ({theirs.host}, {theirs.gpu.uuid}): they are not in one NVLink or PCIe peer-to-peer domain, or"
                    " each sees only its own GPU in a container"
                )
        return None
