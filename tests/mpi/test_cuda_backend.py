"""The CUDA backend on real GPUs: symmetric memory, streams, launches, and the barrier of NVSHMEM's device library."""

from __future__ import annotations

import threading
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from cuep.barrier import DeviceBarrier
from cuep.errors import ArgumentTypeError, DeviceError, OrderError, OutOfSymmetricMemory, PeerTimeout, SettingsMismatch

ROUNDS = 20


@pytest.fixture
def backend(world: Any) -> Iterator[Any]:
    if world.backend.name != "cuda":
        pytest.skip("needs GPUs")
    with world.backend.active():
        yield world.backend


@pytest.fixture
def barrier(world: Any, backend: Any) -> Iterator[DeviceBarrier]:
    barrier = DeviceBarrier(backend, world.comm, timeout_s=20)
    yield barrier
    barrier.close()


def peer_words(backend: Any, block: Any, rank: int) -> Any:
    """Another rank's block as a uint64 CuPy array."""
    cuda = backend.xp.cuda
    memory = cuda.UnownedMemory(block.peers[rank], block.num_bytes, block, backend.device)
    return backend.xp.ndarray((block.num_bytes // 8,), "uint64", cuda.MemoryPointer(memory, 0))


def busy(backend: Any, rounds: int) -> None:
    """Some device time on the current stream: each round is about 40 us."""
    values = backend.xp.ones(1 << 24, "float32")
    for _ in range(rounds):
        values *= 0.5


def test_symmetric_memory(world: Any, backend: Any) -> None:
    """E12: zeroed, the same block under each rank's address, and given back; NVSHMEM has started by a unique id over
    the communicator, whatever MPI that is (Open MPI in gpu_check; no plug-in of NVSHMEM's is involved)."""
    block = backend.symmetric(4096)
    words = block.bytes.view("uint64")
    assert int(words.sum()) == 0
    world.comm.barrier()
    for rank in range(world.size):
        peer_words(backend, block, rank)[world.rank] = 100 * world.rank + rank
    backend.synchronize()
    world.comm.barrier()
    assert words[: world.size].get().tolist() == [100 * source + world.rank for source in range(world.size)]
    block.free()
    block.free()


def test_sizes_must_agree(world: Any, backend: Any) -> None:
    if world.size == 1:
        pytest.skip("needs two ranks")
    with pytest.raises(SettingsMismatch, match="sizes"):
        backend.symmetric(1024 * (1 + world.rank))


def test_out_of_symmetric_memory(world: Any, backend: Any) -> None:
    """E15: refused on all ranks with the bytes asked, nothing is leaked, and a smaller block works."""
    with pytest.raises(OutOfSymmetricMemory, match=f"{2**44} bytes"):
        backend.symmetric(2**44)
    backend.symmetric(1 << 20).free()


def test_blocks_are_given_back(world: Any, backend: Any) -> None:
    """E01: 50 times 64 MiB take no more than one."""
    backend.symmetric(64 << 20).free()
    free_before = backend.xp.cuda.runtime.memGetInfo()[0]
    for _ in range(50):
        backend.symmetric(64 << 20).free()
    world.comm.barrier()
    assert free_before - backend.xp.cuda.runtime.memGetInfo()[0] < 8 << 20 or len(world.backend.places) > len(
        {place.gpu.uuid for place in world.backend.places}
    )


def test_arrays(backend: Any) -> None:
    assert backend.to_numpy(backend.zeros((3, 5), "float32")).tolist() == np.zeros((3, 5)).tolist()
    source = np.arange(24, dtype="int64").reshape(4, 6)
    assert backend.to_numpy(backend.asarray(source[:, ::2])).tolist() == source[:, ::2].tolist()
    assert backend.to_numpy(backend.asarray(source)[:, 1::2]).tolist() == source[:, 1::2].tolist()
    assert backend.empty((0, 7), "float32").shape == (0, 7)


def test_allocators(backend: Any) -> None:
    """A CuPy allocator, and a pair of functions whose free is called once."""
    runtime = backend.xp.cuda.runtime
    freed: list[int] = []

    def free(address: int) -> None:
        runtime.free(address)
        freed.append(address)

    array = backend.zeros((64,), "int32", (runtime.malloc, free))
    address = array.data.ptr
    assert int(array.sum()) == 0
    del array
    assert freed == [address]
    pool = backend.xp.cuda.MemoryPool()
    array = backend.zeros((64,), "int32", pool.malloc)
    assert int(array.sum()) == 0
    assert pool.used_bytes() > 0


def test_pinned_memory(backend: Any) -> None:
    """A kernel writes it at the host's address."""
    host = backend.pinned(64).view("uint64")
    assert host.tolist() == [0] * 8
    cuda = backend.xp.cuda
    memory = cuda.UnownedMemory(host.ctypes.data, host.nbytes, host, backend.device)
    backend.xp.ndarray((8,), "uint64", cuda.MemoryPointer(memory, 0))[...] = 7
    backend.synchronize()
    assert host.tolist() == [7] * 8


def test_streams_of_others(backend: Any) -> None:
    cupy = backend.xp
    own = cupy.cuda.Stream(non_blocking=True)
    assert backend.stream(own).key == own.ptr == backend.stream(own.ptr).key
    assert backend.stream(None).key == backend.stream(0).key
    assert backend.stream(0).key == backend.stream(1).key
    with own:
        assert backend.stream(None).key == own.ptr
    protocol = types.SimpleNamespace(__cuda_stream__=lambda: (0, own.ptr))
    assert backend.stream(protocol).key == own.ptr
    assert backend.stream(backend.new_stream()).key != backend.stream(own).key
    with pytest.raises(ArgumentTypeError):
        backend.stream("default")


def test_torch_stream(backend: Any) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    tensor = torch.zeros(1, device=f"cuda:{backend.device}")
    stream = torch.cuda.Stream(device=backend.device)
    assert backend.stream(stream).key == stream.cuda_stream
    with torch.cuda.stream(stream):
        assert backend.stream(None, tensor).key == stream.cuda_stream


def test_core_stream(backend: Any) -> None:
    core = pytest.importorskip("cuda.core")
    device = core.Device(backend.device)
    device.set_current()
    stream = device.create_stream()
    assert backend.stream(stream).key == int(stream.handle)


def test_events(backend: Any) -> None:
    first, second = backend.new_stream(), backend.new_stream()
    array = backend.zeros((1,), "int64")
    with first:
        busy(backend, 200)
        array += 1
    event = backend.stream(first).record()
    backend.stream(second).wait(event)
    with second:
        array *= 10
    backend.stream(second).synchronize()
    assert event.query()
    assert int(array[0]) == 10


def test_capture_is_seen(backend: Any) -> None:
    stream = backend.new_stream()
    assert not backend.stream(stream).is_capturing()
    stream.begin_capture()
    assert backend.stream(stream).is_capturing()
    stream.end_capture()
    assert not backend.stream(stream).is_capturing()


def test_grid_that_does_not_fit(backend: Any, barrier: DeviceBarrier) -> None:
    function, record = barrier._kernel._function, barrier._record
    most = barrier._kernel.max_grid
    assert most % backend.xp.cuda.Device(backend.device).attributes["MultiProcessorCount"] == 0
    for grid in (0, most + 1):
        with pytest.raises(DeviceError, match=f"a grid of {grid} blocks"):
            function.launch(grid, barrier._kernel.threads, barrier._kernel.smem_bytes, record, backend.stream(None))


def test_callers_device_stays(world: Any, backend: Any, barrier: DeviceBarrier) -> None:
    """Calls from a thread without a context, and with another device current."""
    runtime = backend.xp.cuda.runtime
    other = (backend.device + 1) % runtime.getDeviceCount()
    seen: list[Any] = []

    def work() -> None:
        try:
            barrier.enqueue()
            runtime.setDevice(other)
            barrier.enqueue()
            seen.append(int(backend.zeros((4,), "int32").device.id))
            backend.synchronize()
            seen.append(runtime.getDevice())
        except Exception as error:
            seen.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [backend.device, other]
    barrier.check()


def test_second_device_is_refused(world: Any, backend: Any) -> None:
    """D09."""
    count = backend.xp.cuda.runtime.getDeviceCount()
    if count == 1:
        pytest.skip("needs two visible GPUs")
    with pytest.raises(OrderError, match="one GPU per process"):
        type(backend)(world.comm, (backend.device + 1) % count)


@pytest.mark.parametrize("cooperative", [True, False])
def test_barrier(world: Any, backend: Any, barrier: DeviceBarrier, cooperative: bool) -> None:
    """F06: a module that calls NVSHMEM's device functions is registered when it is loaded, once, also when it is loaded
    again. Nobody reads a peer's word before it was written, nor after it is overwritten, however late the ranks are."""
    barrier._kernel._function.cooperative = cooperative
    block = backend.symmetric(64)
    own = block.bytes.view("uint64")
    peers = [peer_words(backend, block, rank) for rank in range(world.size)]
    seen = backend.zeros((ROUNDS, world.size), "uint64")
    world.comm.barrier()
    with backend.new_stream() as stream:
        for number in range(ROUNDS):
            if number % world.size == world.rank:
                busy(backend, 50)
            own[0] = number + 1
            barrier.enqueue()
            for rank, words in enumerate(peers):
                seen[number, rank] = words[0]
            barrier.enqueue()
        stream.synchronize()
    barrier.check()
    assert seen.get().tolist() == [[number + 1] * world.size for number in range(ROUNDS)]
    block.free()


def test_barrier_in_a_graph(world: Any, backend: Any, barrier: DeviceBarrier) -> None:
    """G01: its number lives on the device, so replays and eager calls count on."""
    stream = backend.new_stream()
    with stream:
        barrier.enqueue()
        stream.begin_capture()
        barrier.enqueue()
        barrier.enqueue()
        graph = stream.end_capture()
        for _ in range(5):
            graph.launch(stream)
        barrier.enqueue()
        stream.synchronize()
    barrier.check()
    assert int(barrier._epoch[0]) == 12


def test_barrier_that_a_rank_misses(world: Any, backend: Any) -> None:
    """Every wait is bounded, and says who is missing."""
    if world.size == 1:
        pytest.skip("needs two ranks")
    late = world.size - 1
    barrier = DeviceBarrier(backend, world.comm, timeout_s=0.5)
    if world.rank != late:
        barrier.enqueue()
        backend.synchronize()
        with pytest.raises(PeerTimeout, match=f"rank {world.rank} waited more than 0.5 s for rank {late}"):
            barrier.check()
    world.comm.barrier()
    if world.rank == late:  # finds everyone's signal already there
        barrier.enqueue()
        backend.synchronize()
        barrier.check()
    barrier._words[:] = 0
    barrier.close()
