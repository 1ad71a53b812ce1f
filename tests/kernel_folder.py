"""A small kernel folder, so that tests of the compiler side do not depend on the real kernels. PYTEST_DONT_REWRITE"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cuep import cache, jit, toolchain
from cuep.errors import BackendUnavailable

BASE = """#pragma once
#ifdef CUEP_CPU
#define CUEP_ENTRY
#define CUEP_CPU_EXPORT(name) extern "C" int cuep_launch_##name() { return kNumThreads * 100 + kNumRanks; }
#else
#define CUEP_ENTRY __global__
#endif
#define CUEP_TUNABLE(name, gpu, cpu) static_assert(name > 0)
"""
KERNEL = """// copy_plain: for tests.
// compile: kNumRanks=4 kHidden=64
// compile: kNumRanks=2 kHidden=32 kNumThreads=96 elem_t=float
#include <cuep/base.cuh>
#include "cuep/extra.cuh"
CUEP_TUNABLE(kNumThreads, 512, 64);
struct Params {
    char* peers[kNumRanks];
    float scale;
};
extern "C" CUEP_ENTRY void copy_plain(const Params p) { p.peers[0][0] = kHidden + kExtra; }
"""
REAL_KERNELS = jit.KERNELS_DIR
ROOT = Path(jit.__file__).resolve().parents[1]  # subprocesses start here, so that they find cuep uninstalled, too
CONSTANTS: dict[str, Any] = {"kNumRanks": 4, "kHidden": 64}


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A kernel folder and an empty cache; yields the kernel folder."""
    kernels = tmp_path / "kernels"
    (kernels / "include/cuep").mkdir(parents=True)
    (kernels / "include/cuep/base.cuh").write_text(BASE)
    (kernels / "include/cuep/extra.cuh").write_text("#pragma once\nconstexpr int kExtra = 1;\n")
    (kernels / "include/cuep/convert.cuh").write_text("#pragma once\n")
    (kernels / "copy_plain.cu").write_text(KERNEL)
    monkeypatch.setattr(jit, "KERNELS_DIR", kernels)
    monkeypatch.setattr(jit, "stats", jit.Stats())
    monkeypatch.setenv("CUEP_CACHE_DIR", str(tmp_path / "cache"))
    cache._warn_once.cache_clear()
    cache.private_folder.cache_clear()
    yield kernels


@pytest.fixture
def gcc() -> None:
    try:
        toolchain.host_compiler()
    except BackendUnavailable as missing:
        pytest.skip(str(missing))


@pytest.fixture
def nvrtc() -> None:
    try:
        toolchain.nvrtc()
    except BackendUnavailable as missing:
        pytest.skip(str(missing))


def call(path: Path) -> int:
    """What a unit's CUEP_CPU_EXPORT in BASE returns."""
    return int(ctypes.CDLL(str(path)).cuep_launch_copy_plain())


def unit(target: str = "cpu", **changes: Any) -> jit.Unit:
    return jit.render("copy_plain", {**CONSTANTS, **changes}, target)


class ThreadComm:
    """A communicator among threads, with what cuep needs of one."""

    def __init__(self, rank: int, size: int, shared: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.size, self._shared, self._barrier = rank, size, shared, barrier

    def allgather(self, sendobj: Any) -> list[Any]:
        self._shared[self.rank] = sendobj
        self._barrier.wait()
        result = list(self._shared)
        self._barrier.wait()
        return result

    def bcast(self, obj: Any, root: int = 0) -> Any:
        return self.allgather(obj)[root]

    def barrier(self) -> None:
        self._barrier.wait()


def on_threads(size: int, work: Callable[[ThreadComm], Any]) -> list[Any]:
    """Result, or exception, of work(comm) on every rank."""
    shared, barrier, results = [None] * size, threading.Barrier(size, timeout=60), [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = work(ThreadComm(rank, size, shared, barrier))
        except Exception as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results
