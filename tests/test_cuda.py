"""The parts of the CUDA backend that need no GPU: the GPU that a rank takes, its streams, the start of NVSHMEM."""

from __future__ import annotations

import ctypes
import logging
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from cuep import nvshmem, toolchain
from cuep.backend import cuda, cuda_context, cuda_stream
from cuep.backend.cuda_context import Gpu, RankGpu
from cuep.errors import ArgumentError, ArgumentTypeError, BackendUnavailable, DeviceError, OrderError
from cuep.world import SingleComm

GPUS = [Gpu(index, f"GPU-{index}", "H200", (9, 0)) for index in range(2)]


class TwoRanks(SingleComm):
    """Rank 0 of two that always say the same."""

    size = 2

    def allgather(self, sendobj: Any) -> list[Any]:
        return [sendobj, sendobj]


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cuep.env.local_rank", lambda: None)


def test_gpu_by_rank_on_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """E13: the node-local rank, modulo what is visible; the launcher's number where there is one."""
    assert [cuda_context._pick(GPUS, None, rank, rank).ordinal for rank in range(4)] == [0, 1, 0, 1]
    assert cuda_context._pick(GPUS[:1], None, 3, 3).ordinal == 0
    assert cuda_context._pick(GPUS, 1, 0, 0).ordinal == 1
    monkeypatch.setattr("cuep.env.local_rank", lambda: 1)
    assert cuda_context._pick(GPUS, None, 0, 0).ordinal == 1


def test_gpu_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArgumentError, match="device=2 is not allowed on rank 7; allowed: 0 to 1"):
        cuda_context._pick(GPUS, 2, 0, 7)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5")
    with pytest.raises(BackendUnavailable, match="rank 3 .* sees no GPU .*CUDA_VISIBLE_DEVICES='5'"):
        cuda_context._pick([], None, 0, 3)


def test_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a rank cannot reach is an error, what it does not reach over NVLink is noted; sharing a GPU is neither."""
    driver = pytest.importorskip("cuda.bindings.driver")
    places = [RankGpu("here", GPUS[0]), RankGpu("here", GPUS[1]), RankGpu("here", GPUS[0]), RankGpu("there", GPUS[1])]
    links = {"access": 1, "atomics": 1}
    monkeypatch.setattr(driver, "cuDeviceGet", lambda ordinal: (0, 100 + ordinal))
    monkeypatch.setattr(driver, "cuDeviceCanAccessPeer", lambda mine, theirs: (0, links["access"]))

    def attribute(which: Any, mine: int, theirs: int) -> tuple[int, int]:
        assert which.name.endswith("NATIVE_ATOMIC_SUPPORTED") and {mine, theirs} == {100, 101}
        return 0, links["atomics"]

    monkeypatch.setattr(driver, "cuDeviceGetP2PAttribute", attribute)
    assert cuda_context._reach(0, GPUS, places) == (None, [])
    links["atomics"] = 0
    assert cuda_context._reach(0, GPUS, places) == (None, [(0, 1)])
    assert cuda_context._reach(1, GPUS, places) == (None, [(1, 0), (1, 2)])
    links["access"] = 0
    error, _ = cuda_context._reach(1, GPUS, places)
    assert isinstance(error, BackendUnavailable) and "rank 1 (GPU-1) cannot access the memory of rank 0" in str(error)


def test_gpu_that_is_too_old() -> None:
    """E18."""
    old = Gpu(0, "GPU-0", "T4", (7, 5))
    with pytest.raises(BackendUnavailable, match="T4.*compute capability 7.5, needed: 8.0"):
        cuda_context._pick([old], None, 0, 0)


def test_ranks_that_share_a_gpu(caplog: pytest.LogCaptureFixture) -> None:
    """E14: one warning that names ranks and GPU, by UUID: indices differ under CUDA_VISIBLE_DEVICES."""
    cuda_context._warn_of_sharing([RankGpu("a", GPUS[0]), RankGpu("a", GPUS[1])])
    assert not caplog.records
    same = Gpu(5, "GPU-0", "H200", (9, 0))
    with caplog.at_level(logging.WARNING, "cuep"):
        cuda_context._warn_of_sharing([RankGpu("a", GPUS[0]), RankGpu("a", GPUS[1]), RankGpu("a", same)])
    assert len(caplog.records) == 1
    assert "ranks [0, 2] on GPU-0" in caplog.text


def test_no_driver_or_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    """E08: one error that says what is missing and how to get it."""
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(BackendUnavailable, match="rank 0: the cuda backend needs CuPy .*pip install 'cuep"):
        cuda.CudaBackend(SingleComm())
    monkeypatch.setitem(sys.modules, "cupy", types.ModuleType("cupy"))
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(BackendUnavailable, match="no CUDA driver on host"):
        cuda.CudaBackend(SingleComm())


def test_second_gpu_in_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """D09."""
    monkeypatch.setattr(cuda, "_process_gpu", None)
    assert cuda._take_gpu(0, "GPU-a", 3) is None
    assert cuda._take_gpu(0, "GPU-a", 3) is None
    error = cuda._take_gpu(1, "GPU-b", 3)
    assert isinstance(error, OrderError)
    assert "GPU-a" in str(error)
    assert "GPU-b" in str(error)


def test_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a user may pass; each is kept alive, because its handle dies with it."""
    context: Any = types.SimpleNamespace(ordinal=1)
    cupy_stream = types.SimpleNamespace(ptr=11, wait_event=None)
    event = types.SimpleNamespace(ptr=14)  # cuep's and CuPy's have an address, too
    torch_stream = types.SimpleNamespace(cuda_stream=12)

    class Core:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, 13

    core = Core()
    assert cuda_stream.resolve(context, 10, None) == (10, None)
    assert cuda_stream.resolve(context, cupy_stream, None) == (11, cupy_stream)
    assert cuda_stream.resolve(context, torch_stream, None) == (12, torch_stream)
    assert cuda_stream.resolve(context, core, None) == (13, core)
    for wrong in ("0", 1.0, True, object(), event):
        with pytest.raises(ArgumentTypeError, match="stream has type"):
            cuda_stream.resolve(context, wrong, None)

    driver = types.SimpleNamespace(CUevent=int)
    with_driver: Any = types.SimpleNamespace(ordinal=1, driver=driver)
    torch_event, core_event = types.SimpleNamespace(cuda_event=15), types.SimpleNamespace(handle=16)
    numba_event = types.SimpleNamespace(handle=ctypes.c_void_p(17))
    for given, number in ((10, 10), (event, 14), (torch_event, 15), (core_event, 16), (numba_event, 17)):
        assert cuda_stream.as_event(with_driver, given).handle == number
    for wrong in ("0", 1.0, True, b"5", object(), cupy_stream, core):
        with pytest.raises(ArgumentTypeError, match="previous_event has type"):
            cuda_stream.as_event(with_driver, wrong)
    with pytest.raises(ArgumentError, match="previous_event was never recorded"):
        cuda_stream.as_event(with_driver, types.SimpleNamespace(cuda_event=0))

    def current(device: int) -> Any:
        return {"cuda_stream": torch_stream, "ptr": cupy_stream}["ptr" if device < 0 else "cuda_stream"]

    torch: Any = types.ModuleType("torch")
    torch.cuda = types.SimpleNamespace(current_stream=current)
    torch.Tensor = type("Tensor", (), {"__module__": "torch"})
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert cuda_stream.resolve(context, None, torch.Tensor()) == (12, torch_stream)
    jax_array = type("ArrayImpl", (), {"__module__": "jaxlib._jax"})()
    assert cuda_stream.resolve(context, None, jax_array) == (0, None)


def test_errors_carry_cudas_words() -> None:
    driver = pytest.importorskip("cuda.bindings.driver")
    assert cuda_context.check((driver.CUresult.CUDA_SUCCESS,)) == ()
    assert cuda_context.check((driver.CUresult.CUDA_SUCCESS, 5)) == 5
    assert cuda_context.check((driver.CUresult.CUDA_SUCCESS, 5, 6)) == (5, 6)


def test_failed_call_is_a_device_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_context, "_words", lambda status: f"words of {status}")
    with pytest.raises(DeviceError, match="launch of k: words of 700"):
        cuda_context.check((700,), "launch of k")


def test_layout_of_nvshmem_structs() -> None:
    """Sizes and offsets that NVSHMEM's headers assert, and the version words that its library checks."""
    kinds = (nvshmem._UniqueId, nvshmem._UniqueIdArgs, nvshmem._InitArgs, nvshmem._InitAttributes)
    assert [ctypes.sizeof(kind) for kind in kinds] == [128, 24, 128, 144]
    assert nvshmem._InitAttributes.args.offset == 16
    assert nvshmem._InitArgs.unique_id.offset == 8
    assert nvshmem._version_1(nvshmem._InitAttributes) == 0x10090


def test_two_copies_of_nvshmem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One process, one copy: both are named."""
    first, second = tmp_path / "a" / "libnvshmem_host.so.3", tmp_path / "b" / "libnvshmem_host.so.3"
    for path in (first, second):
        path.parent.mkdir()
        path.write_text("")
    found = toolchain.Nvshmem(second, second, None, (3, 8, 0))
    monkeypatch.setattr(toolchain, "nvshmem", lambda: found)
    monkeypatch.setattr(toolchain, "loaded_libraries", lambda prefix: [first])
    with pytest.raises(BackendUnavailable) as caught:
        nvshmem._load()
    assert str(first) in str(caught.value)
    assert str(second) in str(caught.value)


def test_nvshmem_is_found(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """NVSHMEM_HOME, else the copy in this process; the version decides how kernels are built."""
    library = tmp_path / "lib/libnvshmem_host.so.3"
    library.parent.mkdir()
    library.write_text("")
    header = tmp_path / "include/non_abi/nvshmem_version.h"
    header.parent.mkdir(parents=True)
    text = "#define NVSHMEM_VENDOR_MAJOR_VERSION 3\n#define NVSHMEM_VENDOR_MINOR_VERSION {}\n"
    for minor, patch, can_inline in ((4, 5, False), (6, 4, False), (6, 5, True), (8, 0, True)):
        header.write_text(text.format(minor) + f"#define NVSHMEM_VENDOR_PATCH_VERSION {patch}\n")
        monkeypatch.setenv("NVSHMEM_HOME", str(tmp_path))
        found = toolchain.nvshmem.__wrapped__()
        assert (found.version, found.can_inline) == ((3, minor, patch), can_inline)
    monkeypatch.delenv("NVSHMEM_HOME")
    monkeypatch.setattr(toolchain, "loaded_library", lambda prefix: library)
    assert toolchain.nvshmem.__wrapped__().library == library


def test_nvshmem_among_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """E05: NVSHMEM serves one set of ranks per process."""
    running = nvshmem.Nvshmem(None, Path(), [("host", 1), ("host", 2)])
    monkeypatch.setattr(nvshmem, "_running", running)
    with pytest.raises(ArgumentError, match="one set of ranks per process"):
        nvshmem.start(SingleComm(), lambda: None)
    monkeypatch.setattr(running, "_process", -1)
    with pytest.raises(OrderError, match="forked"):
        nvshmem.start(SingleComm(), lambda: None)


@pytest.mark.parametrize("hosts", [["a", "a"], ["a", "b"]])
def test_nvshmem_variables(monkeypatch: pytest.MonkeyPatch, hosts: list[str]) -> None:
    """Set only where all ranks are on one host and the user has not; never anything about multicast."""
    set_by_us: dict[str, str] = {}
    monkeypatch.setattr("cuep.env.set_default", set_by_us.__setitem__)
    monkeypatch.setattr(nvshmem, "_running", None)

    def missing() -> Any:
        raise BackendUnavailable("not here")

    monkeypatch.setattr(toolchain, "nvshmem", missing)
    comm = TwoRanks()
    answers = iter([[(host, number) for number, host in enumerate(hosts)]])
    allgather = comm.allgather
    monkeypatch.setattr(comm, "allgather", lambda mine: next(answers, None) or allgather(mine))
    with pytest.raises(BackendUnavailable, match="not here"):
        nvshmem.start(comm, lambda: None)
    expected = {"NVSHMEM_REMOTE_TRANSPORT": "none", "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME": "lo"}
    assert set_by_us == (expected if len(set(hosts)) == 1 else {})


def test_growth_of_the_heap() -> None:
    """Freed blocks are used again, so they are not asked of the GPU a second time."""
    library: Any = types.SimpleNamespace(nvshmem_malloc=lambda size: size, nvshmem_free=lambda address: None)
    heap = nvshmem.Nvshmem(library, Path(), [])
    assert heap.missing_bytes(100) == 100
    heap.malloc(100)
    heap.malloc(50)
    assert heap.missing_bytes(10) == 10
    heap.free(100)
    assert heap.missing_bytes(80) == 0
    assert heap.missing_bytes(120) == 20
