"""The CPU runtime in kernels_cu/include/cuep/cpu and its backend: threads, blocks, errors, streams, memory."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from kernel_folder import ThreadComm, on_threads

from cuep import jit
from cuep.backend.cpu import CpuBackend
from cuep.errors import ArgumentError, ArgumentTypeError, BackendUnavailable, DeviceError, OutOfSymmetricMemory
from cuep.kernel import Kernel
from cuep.world import SingleComm

KERNELS = Path(__file__).parent / "kernels"
SEEDS = (0, 1, 2, 3, 4, 5)
POISON = 0xCDCDCDCD

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module", autouse=True)
def kernel_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The kernels of these tests beside the real headers, and one cache for all tests of this file."""
    folder = tmp_path_factory.mktemp("kernels")
    shutil.copytree(jit.KERNELS_DIR / "include", folder / "include")
    for path in KERNELS.glob("*.cu"):
        shutil.copy(path, folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jit, "KERNELS_DIR", folder)
        patch.setenv("CUEP_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield folder


@pytest.fixture
def backend() -> CpuBackend:
    return CpuBackend(SingleComm())


def aligned(shape: int | tuple[int, ...], dtype: Any) -> npt.NDArray[Any]:
    """Zeros at a multiple of 128 bytes."""
    count = int(np.prod(shape)) * np.dtype(dtype).itemsize
    memory = np.zeros(count + 128, np.uint8)
    skip = -memory.ctypes.data % 128
    return memory[skip : skip + count].view(dtype).reshape(shape)


def launch(kernel: Kernel, grid: int, stream: Any, **values: Any) -> None:
    record = kernel.layout.new()
    for name, value in values.items():
        record[name] = value.ctypes.data if isinstance(value, np.ndarray) else value
    kernel.launch(grid, record, stream)


# ---- what threads of a block see


@pytest.mark.parametrize("seed", SEEDS)
def test_collectives(backend: CpuBackend, seed: int) -> None:
    kernel = Kernel(backend, "simt_collectives", {})
    threads, grid = kernel.threads, 3
    backend.set_seed(seed, seed % 4)
    v = np.random.default_rng(seed).integers(-99, 100, (grid, threads)).astype(np.int32)
    out = np.full((18, grid, threads), -(2**40), np.int64)
    winners, exchange = np.zeros(grid, np.int32), np.zeros(grid, np.int32)
    values = {"in": v, "out": out, "winners": winners, "exchange": exchange}
    launch(kernel, grid, backend.stream(None), **values)

    warps = v.reshape(grid, -1, 32).astype(np.int64)
    lane = np.arange(32)
    expected: list[Any] = [v[:, ::-1], np.repeat(warps[:, :, 5:6], 32, 2)]
    expected += [warps[:, :, lane & 24 | (lane + 1) & 7] << 33]
    expected += [warps[:, :, np.where(lane >= 3, lane - 3, lane)]]
    expected += [warps[:, :, np.where(lane % 16 + 3 < 16, np.minimum(lane + 3, 31), lane)]]
    expected += [warps[:, :, lane ^ 17]]
    bits = 1 << lane
    expected += [np.repeat(((warps & 1) * bits).sum(2, keepdims=True), 32, 2)]
    expected += [np.repeat((warps > 90).any(2, keepdims=True) * 2 + (warps > -90).all(2, keepdims=True), 32, 2)]
    part = lane < 12
    expected += [np.where(part, warps[:, :, np.where(part, (lane - 1) % 12, 0)], 0)]
    expected += [np.where(part, ((warps[:, :, :12] > 0) * bits[:12]).sum(2, keepdims=True), 0)]
    whole = np.ones((grid, threads), np.int64)
    expected += [whole * (v > 0).sum(1, keepdims=True)]
    expected += [whole * ((v > 98).any(1, keepdims=True) * 2 + (v > -99).all(1, keepdims=True))]
    expected += [whole * v.sum(1, keepdims=True), whole * v.max(1, keepdims=True), whole * (threads // 2)]
    expected += [np.array([_bit_functions(int(value)) for value in v.flat])]
    expected += [np.repeat(warps.sum(2, keepdims=True), 32, 2)]
    expected += [np.repeat(np.bitwise_or.reduce(1 << (warps & 31), 2, keepdims=True), 32, 2)]
    for i, rows in enumerate(expected):
        np.testing.assert_array_equal(out[i], np.asarray(rows).reshape(grid, threads), err_msg=f"result {i}")
    assert (winners == 1).all()
    assert (exchange == 7778).all()


def _bit_functions(v: int) -> int:
    bits = v & 0xFFFFFFFF
    ffs = (bits & -bits).bit_length()
    return bits.bit_count() + 100 * ffs + 10000 * (32 - bits.bit_length()) + 1000000 * min(v, 7) + 100000000 * max(v, 7)


@pytest.mark.parametrize("seed", SEEDS)
def test_shared_memory_starts_as_poison(backend: CpuBackend, seed: int) -> None:
    kernel = Kernel(backend, "simt_race", {"kHasBarrier": True})
    backend.set_seed(seed)
    for grid in (1, 4):  # a block in the calling thread runs again in memory that the last launch used
        out, garbage = np.zeros((grid, kernel.threads), np.uint32), np.zeros((grid, 2), np.uint32)
        launch(kernel, grid, backend.stream(None), out=out, garbage=garbage)
        assert (garbage == POISON).all()
        assert (out == 2 * np.roll(np.arange(kernel.threads), 1)).all()


def test_seeds_find_a_missing_barrier(backend: CpuBackend) -> None:
    kernel = Kernel(backend, "simt_race", {"kHasBarrier": False})
    found = 0
    for seed in range(1, 6):
        backend.set_seed(seed, 0)
        out, garbage = np.zeros((1, kernel.threads), np.uint32), np.zeros((1, 2), np.uint32)
        launch(kernel, 1, backend.stream(None), out=out, garbage=garbage)
        found += bool((out != 2 * np.roll(np.arange(kernel.threads), 1)).any())
    assert found >= 4


# ---- bulk copies


@pytest.mark.parametrize("missing", [0, 1, 2, 3])
def test_bulk_copies(backend: CpuBackend, missing: int) -> None:
    """0: all waits are there. Otherwise mbarrier_wait, bulk_wait_read or bulk_wait is left out, which must show."""
    kernel = Kernel(backend, "simt_bulk", {"kRowBytes": 512, "kMissing": missing})
    rows, failures = 37, 0
    for seed in range(8):
        backend.set_seed(seed, seed % 4)
        x, y = aligned((rows, 512), np.uint8), aligned((rows, 512), np.uint8)
        x[...] = np.random.default_rng(seed).integers(0, 255, x.shape)
        arrived, wrong = np.zeros(1, np.uint32), np.zeros(1, np.uint32)
        values = {"x": x, "y": y, "arrived": arrived, "wrong": wrong, "num_rows": rows}
        try:
            launch(kernel, 3, backend.stream(None), **values)
        except DeviceError as error:  # a load into a barrier whose last load nobody waited for
            assert missing == 1, error
            failures += 1
        else:
            failures += bool(wrong[0] != 0 or (x != y).any())
    assert failures == 0 if missing == 0 else failures >= 6


# ---- conversions


def floats_of_interest() -> npt.NDArray[np.float32]:
    """Every bf16 and fp16 value, their neighbours, every midpoint between two of them, and random bit patterns."""
    codes = np.arange(1 << 16, dtype=np.uint16)
    values = [codes.view(ml_dtypes.bfloat16).astype(np.float32), codes.view(np.float16).astype(np.float32)]
    bits = [value.view(np.uint32) for value in values]
    near = [b + np.uint32(d) for b in bits for d in (0, 1, 0xFFFFFFFF)]
    halves = [b + np.uint32(1 << shift) + np.uint32(d) for b in bits for shift in (12, 15) for d in (0, 1, 0xFFFFFFFF)]
    # fp16 subnormals have their midpoints elsewhere: k + 1/2 times 2^-24
    tiny = (np.arange(2048, dtype=np.float32) + np.float32(0.5)) * np.float32(2.0**-24)
    random = np.random.default_rng(0).integers(0, 1 << 32, 100_000, dtype=np.uint64).astype(np.uint32)
    every = np.concatenate([*near, *halves, tiny.view(np.uint32), (-tiny).view(np.uint32), random])
    return every[: every.size // 8 * 8].view(np.float32)


@pytest.mark.parametrize(
    ("elem", "dtype"), [("cuep::bf16_t", ml_dtypes.bfloat16), ("cuep::fp16_t", np.float16), ("float", np.float32)]
)
def test_conversions(backend: CpuBackend, elem: str, dtype: Any) -> None:
    kernel = Kernel(backend, "simt_convert", {"elem_t": elem})
    source = floats_of_interest()
    wide, widened = aligned(source.shape, np.float32), aligned(source.shape, np.float32)
    narrow, narrowed = aligned(source.shape, dtype), aligned(source.shape, dtype)
    wide[...] = source
    with np.errstate(all="ignore"):
        expected = source.astype(dtype)
    narrow[...] = expected
    if dtype != np.float32:
        narrow[: 1 << 16] = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    num_vecs = source.nbytes * narrow.dtype.itemsize // 4 // 16
    values = {"narrow": narrow, "widened": widened, "wide": wide, "narrowed": narrowed, "num_vecs": num_vecs}
    launch(kernel, 1, backend.stream(None), **values)
    is_nan = np.isnan(source)
    code = np.uint16 if dtype != np.float32 else np.uint32
    np.testing.assert_array_equal(np.isnan(narrowed), is_nan)
    np.testing.assert_array_equal(narrowed.view(code)[~is_nan], expected.view(code)[~is_nan])
    with np.errstate(invalid="ignore"):
        back = narrow.astype(np.float32)
    np.testing.assert_array_equal(np.isnan(widened), np.isnan(back))
    np.testing.assert_array_equal(widened.view(np.uint32)[~np.isnan(back)], back.view(np.uint32)[~np.isnan(back)])


def test_e4m3(backend: CpuBackend) -> None:
    """To the nearest value, ties to even, at most 448 in size; NaN is NaN."""
    kernel = Kernel(backend, "simt_e4m3", {})
    source = floats_of_interest()
    codes = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    ordered = np.unique(codes[np.isfinite(codes)])
    middles = ((ordered[1:] + ordered[:-1]) / 2).astype(np.float32)
    around = [np.nextafter(middles, np.float32(side)) for side in (-1e9, 1e9)]
    source = np.concatenate([source.ravel(), codes, middles, *around])
    source = source[: len(source) // 4 * 4]
    wide, narrowed = aligned(source.shape, np.float32), aligned(source.shape, np.uint8)
    wide[...] = source
    launch(kernel, 1, backend.stream(None), wide=wide, narrowed=narrowed, num_words=len(source) // 4)
    with np.errstate(all="ignore"):
        expected = np.clip(source, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    is_nan = np.isnan(source)
    assert (narrowed[is_nan] == 0x7F).all()
    np.testing.assert_array_equal(narrowed[~is_nan], expected[~is_nan])


# ---- errors that the runtime must find


def misuse(backend: CpuBackend, mode: int, grid: int = 2, stream: Any = None) -> None:
    kernel = Kernel(backend, "simt_misuse", {})
    word, x, y = np.zeros(1, np.uint32), aligned(64, np.uint8), aligned(64, np.uint8)
    launch(kernel, grid, backend.stream(stream), word=word, x=x, y=y, mode=mode)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(
    ("mode", "message"),
    [
        (1, "different warp collectives or masks"),
        (2, "different warp collectives or masks"),
        (3, "a thread returned that others of its warp expect|names threads that have returned"),
        (4, "__syncthreads in a thread that others|different warp collectives"),
        (5, "mask leaves out the caller"),
        (6, "different __syncthreads in one block"),
        (7, "wrote beyond its 256 bytes of dynamic shared memory"),
        (8, "bulk_load with a barrier that was not initialised"),
        (9, "no multiple of 16"),
        (10, "all live threads wait for one another"),
        (11, "the block ends before bulk_wait_read"),
        (12, "the block ends before mbarrier_wait"),
        (13, "barrier whose last load nobody has waited for"),
    ],
)
def test_misuse_is_an_error(backend: CpuBackend, mode: int, message: str, seed: int) -> None:
    """One line with kernel, block, file, line and where the threads are; the other block waits and is brought down."""
    backend.set_seed(seed, 0)
    start = time.monotonic()
    # only a failing block 0 ends block 1, so 7 (found when the block has ended) runs alone
    with pytest.raises(DeviceError, match=message) as caught:
        misuse(backend, mode, grid=1 if mode == 7 else 2)
    assert time.monotonic() - start < 20
    text = str(caught.value)
    assert text.startswith("rank 0: simt_misuse: block 0: ")
    assert "\n" not in text
    if mode != 7:
        marks = {i for i, line in enumerate(_misuse_source(), 1) if line.endswith(f"// mark {mode}")}
        lines = {int(number) for number in re.findall(r"simt_misuse\.cu:(\d+)", text)}
        assert marks & lines, text
    misuse(backend, 0, grid=1)  # the next launch works


def _misuse_source() -> list[str]:
    return (KERNELS / "simt_misuse.cu").read_text().splitlines()


def test_stack_overflow_hits_the_guard_page(kernel_folder: Path) -> None:
    """A crash at once rather than another thread's stack overwritten."""
    script = f"""
import sys
sys.path[:0] = {sys.path!r}
from pathlib import Path
from cuep import jit
import test_simt
jit.KERNELS_DIR = Path({str(kernel_folder)!r})
test_simt.misuse(test_simt.CpuBackend(test_simt.SingleComm()), 14, grid=1)
"""
    done = subprocess.run([sys.executable, "-c", script], cwd=Path(__file__).parent, capture_output=True, check=False)
    assert done.returncode == -signal.SIGSEGV, done.stderr.decode()


def test_launch_arguments(backend: CpuBackend) -> None:
    kernel = Kernel(backend, "simt_misuse", {})
    with pytest.raises(DeviceError, match="grid of 0 blocks"):
        misuse(backend, 0, grid=0)
    with pytest.raises(DeviceError, match=f"allowed: 1 to {kernel.max_grid}"):
        misuse(backend, 0, grid=kernel.max_grid + 1)
    with pytest.raises(DeviceError, match="1 to 1024 threads"):
        kernel._function.launch(1, 2048, 0, kernel.layout.new(), backend.stream(None))


# ---- launches that wait for one another


@pytest.mark.parametrize("seed", SEEDS)
def test_two_launches_at_once(backend: CpuBackend, seed: int) -> None:
    """Two kernels in two streams of one process pass messages, as two ranks do."""
    kernel = Kernel(backend, "simt_flags", {})
    grid, rounds = 2, 20
    backend.set_seed(seed, seed % 4)
    data, flags = aligned((2, grid, kernel.threads, 4), np.uint32), np.zeros((4, grid), np.uint64)
    counters, wrong = np.zeros(4, np.uint32), np.zeros(1, np.uint32)
    streams = [backend.new_stream(), backend.new_stream()]
    values = {"data": data, "flags": flags, "counters": counters, "wrong": wrong, "num_rounds": rounds}
    for rank, stream in enumerate(streams):
        launch(kernel, grid, backend.stream(stream), rank=rank, **values)
    backend.synchronize()
    assert wrong[0] == 0
    total = 2 * grid * kernel.threads
    assert counters.tolist() == [total, 2 * total, 3 * total, total]
    assert (flags == rounds).all()


def test_test_kernels_compile_for_gpus() -> None:
    """Every primitive has a PTX body that NVRTC takes for each target."""
    results = jit.compile_all(["sm_80", "sm_90", "sm_100"], lambda result: None)
    if any(result.status == "skipped" for result in results):
        pytest.skip(results[0].message)
    assert [(result.name, result.message) for result in results if result.status == "failed"] == []


# ---- streams


def test_stream_runs_in_order_and_events_order_streams(backend: CpuBackend) -> None:
    first, second = backend.new_stream(), backend.new_stream()
    gate, seen = threading.Event(), []
    first.submit(gate.wait)
    first.submit(lambda: seen.append("first"))
    event = first.record()
    second.wait(event)
    second.submit(lambda: seen.append("second"))
    assert not event.query()
    gate.set()
    second.synchronize()
    assert event.query()
    assert seen == ["first", "second"]
    assert first.key != second.key
    assert not first.is_capturing()


def test_stream_keeps_its_first_error_for_synchronize(backend: CpuBackend) -> None:
    stream = backend.new_stream()
    misuse(backend, 5, grid=1, stream=stream)
    skipped: list[int] = []
    stream.submit(lambda: skipped.append(1))
    with pytest.raises(DeviceError, match="mask leaves out the caller"):
        stream.synchronize()
    assert skipped == []
    stream.submit(lambda: skipped.append(2))
    stream.synchronize()
    assert skipped == [2]


def test_launch_copies_its_record(backend: CpuBackend) -> None:
    kernel = Kernel(backend, "simt_race", {"kHasBarrier": True})
    out, garbage = np.zeros((1, kernel.threads), np.uint32), np.zeros((1, 2), np.uint32)
    stream, gate = backend.new_stream(), threading.Event()
    stream.submit(gate.wait)
    record = kernel.layout.new()
    record["out"], record["garbage"] = out.ctypes.data, garbage.ctypes.data
    kernel.launch(1, record, stream)
    record["out"] = 0
    gate.set()
    stream.synchronize()
    assert out.any()


def test_stream_argument(backend: CpuBackend) -> None:
    synchronous = backend.stream(None)
    assert synchronous is backend.stream(synchronous)
    assert synchronous.is_synchronous
    assert synchronous.record().query()
    with pytest.raises(ArgumentTypeError, match="stream has type int"):
        backend.stream(7)


def test_backend_arguments(backend: CpuBackend) -> None:
    with pytest.raises(ArgumentError, match="device=1"):
        CpuBackend(SingleComm(), device=1)
    with pytest.raises(ArgumentError, match="delay_level=4"):
        backend.set_seed(1, 4)
    with pytest.raises(ArgumentError, match="allocator"):
        backend.empty((3,), np.float32, allocator=object())
    array = np.arange(4)
    copy = backend.to_numpy(array)
    array[0] = 9
    assert copy.tolist() == [0, 1, 2, 3]
    assert backend.pinned(16).tolist() == [0] * 16


# ---- symmetric memory


def test_symmetric_memory_is_shared_and_zeroed() -> None:
    def work(comm: ThreadComm) -> list[int]:
        memory = CpuBackend(comm).symmetric(1000)
        assert memory.bytes.shape == (1000,)
        assert not memory.bytes.any()
        assert memory.address == memory.peers[comm.rank] == memory.bytes.ctypes.data
        comm.barrier()
        memory.bytes[:] = comm.rank + 1
        kept = memory.bytes
        comm.barrier()
        seen = [int(_bytes_at(address, 1000)[999]) for address in memory.peers]
        memory.free()
        assert kept[0] == comm.rank + 1  # an array of the caller outlives free()
        return seen

    before = {path.name for path in Path("/dev/shm").glob("cuep-*")}
    assert on_threads(3, work) == [[1, 2, 3]] * 3
    assert {path.name for path in Path("/dev/shm").glob("cuep-*")} <= before


def _bytes_at(address: int, count: int) -> npt.NDArray[np.uint8]:
    import ctypes

    return np.ctypeslib.as_array((ctypes.c_uint8 * count).from_address(address))


def test_symmetric_memory_that_does_not_fit() -> None:
    results = on_threads(2, lambda comm: CpuBackend(comm).symmetric(1 << 50))
    assert [type(result) for result in results] == [OutOfSymmetricMemory] * 2
    assert str(2 * (1 << 50)) in str(results[1])
    assert "/dev/shm has" in str(results[1])


def test_ranks_without_common_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from cuep.backend import cpu, cpu_memory

    real_open = cpu_memory.os.open

    def blind_open(path: Any, flags: int, mode: int = 0o777) -> int:
        if not flags & cpu_memory.os.O_CREAT:
            raise FileNotFoundError(path)
        return real_open(path, flags, mode)

    monkeypatch.setattr(cpu_memory, "_FOLDER", tmp_path)
    monkeypatch.setattr(cpu_memory.os, "open", blind_open)
    results = on_threads(2, lambda comm: CpuBackend(comm).symmetric(100))
    assert [type(result) for result in results] == [BackendUnavailable] * 2
    assert "rank 1" in str(results[0])
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()

    hosts = iter(["a", "b"])
    monkeypatch.setattr(cpu, "_boot_id", lambda: next(hosts))
    results = on_threads(2, CpuBackend)
    assert [type(result) for result in results] == [BackendUnavailable] * 2
    assert "one host" in str(results[0])
