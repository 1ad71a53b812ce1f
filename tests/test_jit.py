"""cuep.jit and the cache: what is a new unit, what is compiled once, what a failure says.

A small kernel folder of its own keeps this independent of the real kernels; every real kernel is compiled at the end.
"""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cuep import cache, compilers, jit, toolchain
from cuep.errors import ArgumentError, BackendUnavailable, CompileError, CuepError

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


@pytest.fixture(autouse=True)
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


def entries(tmp_path: Path) -> list[str]:
    return sorted(os.listdir(tmp_path / "cache" / "copy_plain"))


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


def test_names_and_variants(folders: Path) -> None:
    (folders / "copy_fast.cu").write_text(KERNEL)
    assert jit.kernel_names() == ["copy_fast", "copy_plain"]
    assert jit.variants("copy") == ["fast", "plain"]
    assert jit.variants("other") == []
    assert jit.tunables("copy_plain") == {"kNumThreads": (512, 64)}
    assert jit.samples("copy_plain")[1] == {"kNumRanks": 2, "kHidden": 32, "kNumThreads": 96, "elem_t": "float"}


def test_render() -> None:
    text = jit.render("copy_plain", {**CONSTANTS, "kOn": True, "kBig": 2**40, "elem_t": "float"}, "cpu").text
    lines = text.splitlines()
    assert lines[0].startswith("// kernel=copy_plain sources=")
    assert lines[1] == "#define CUEP_JIT 1"
    for line in ("kNumRanks = 4;", "kHidden = 64;", "bool kOn = true;", f"long long kBig = {2**40};"):
        assert any(found.endswith(line) and "constexpr" in found for found in lines), line
    assert "using elem_t = float;" in lines
    assert lines.index('#include "copy_plain.cu"') > lines.index("[[maybe_unused]] constexpr int kNumThreads = 64;")
    assert lines[-1] == "CUEP_CPU_EXPORT(copy_plain)"
    gpu = unit("sm_90").text
    assert "constexpr int kNumThreads = 512;" in gpu
    assert "CUEP_CPU_EXPORT" not in gpu


def test_wrong_names_are_refused() -> None:
    with pytest.raises(CompileError, match="copy_plain"):
        jit.render("copy_plane", CONSTANTS, "cpu")
    with pytest.raises(ArgumentError, match=r"no tunable kThreads.*kNumThreads"):
        jit.render("copy_plain", CONSTANTS, "cpu", {"kThreads": 1})
    with pytest.raises(ArgumentError, match="kNumThreads is a tunable"):
        jit.render("copy_plain", {**CONSTANTS, "kNumThreads": 1}, "cpu")


def test_what_makes_a_new_unit(folders: Path) -> None:
    """F04: constant, tunable, target, kernel or (nested) header; nothing else."""
    (folders / "include/cuep/extra.cuh").write_text('#include "deep.cuh"\n')
    (folders / "include/cuep/deep.cuh").write_text("constexpr int kExtra = 1;\n")
    first = unit().digest
    assert unit().digest == first
    assert unit(kHidden=65).digest != first
    assert unit("sm_90").digest != unit("sm_80").digest != first
    assert jit.render("copy_plain", CONSTANTS, "cpu", {"kNumThreads": 32}).digest != first
    (folders / "include/cuep/unrelated.cuh").write_text("// never included\n")
    assert unit().digest == first
    (folders / "include/cuep/deep.cuh").write_text("constexpr int kExtra = 2;\n")
    assert unit().digest != first


def test_build_runs_and_hits(gcc: None, tmp_path: Path, folders: Path) -> None:
    path = jit.build(unit())
    assert call(path) == 6404
    assert jit.build(unit()) == path
    assert (jit.stats.compiled, jit.stats.hits) == (1, 1)
    link = tmp_path / "link"
    link.symlink_to(folders)
    jit.KERNELS_DIR = link
    assert jit.build(unit()) == path, "F04: the same sources through a symlink are the same unit"
    assert call(jit.build(jit.render("copy_plain", CONSTANTS, "cpu", {"kNumThreads": 32}))) == 3204


def test_second_process_compiles_nothing(gcc: None, folders: Path) -> None:
    """F04."""
    jit.build(unit())
    code = (
        "from pathlib import Path; from cuep import jit; jit.KERNELS_DIR = Path(__import__('sys').argv[1]);"
        "jit.build(jit.render('copy_plain', {'kNumRanks': 4, 'kHidden': 64}, 'cpu')); print(jit.stats.compiled)"
    )
    command = [sys.executable, "-c", code, str(folders)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "0"


def test_compiler_and_flags_are_in_the_key(gcc: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """F04."""
    jit.build(unit())
    monkeypatch.setattr(compilers, "_HOST_FLAGS", (*compilers._HOST_FLAGS, "-g"))
    jit.build(unit())
    other = toolchain.HostCompiler(toolchain.host_compiler().command, "another version")
    monkeypatch.setattr(toolchain, "host_compiler", lambda: other)
    jit.build(unit())
    assert jit.stats.compiled == 3


@pytest.mark.parametrize("damage", ["truncated", "changed", "empty"])
def test_damaged_entry_is_rebuilt(gcc: None, damage: str) -> None:
    path = jit.build(unit())
    content = path.read_bytes()
    damaged = {"truncated": content[: len(content) // 2], "changed": b"x" + content[1:], "empty": b""}[damage]
    path.write_bytes(damaged)
    assert call(jit.build(unit())) == 6404
    assert jit.stats.compiled == 2
    assert jit.build(unit()).read_bytes() == content


def test_many_processes_at_once(gcc: None, tmp_path: Path, folders: Path) -> None:
    """F01: eight processes and an empty cache."""
    code = (
        "import ctypes, sys; from pathlib import Path; from cuep import jit; jit.KERNELS_DIR = Path(sys.argv[1]);"
        "path = jit.build(jit.render('copy_plain', {'kNumRanks': 4, 'kHidden': 64}, 'cpu'));"
        "print(ctypes.CDLL(str(path)).cuep_launch_copy_plain())"
    )
    for _ in range(3):
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        command = [sys.executable, "-c", code, str(folders)]
        jobs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) for _ in range(8)]
        assert [job.communicate(timeout=60)[0].strip() for job in jobs] == ["6404"] * 8
        assert len(entries(tmp_path)) == 1, "one whole entry and no temporary file"


def test_entry_that_stays_invisible(gcc: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """F01: on a network file system the published file may not be seen for seconds."""
    real = cache.is_intact
    monkeypatch.setattr(cache, "is_intact", lambda path: tmp_path not in path.parents and real(path))
    path = jit.build(unit())
    assert tmp_path not in path.parents
    assert call(path) == 6404


def test_cache_that_cannot_be_written(
    gcc: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """F03: one warning that names the folder and the variable, and a private folder."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CUEP_CACHE_DIR", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING, "cuep"):
        path = jit.build(unit())
        assert call(path) == 6404
        jit.build(unit(kHidden=32))
        assert jit.build(unit()) == path
    assert len(caplog.records) == 1
    assert "CUEP_CACHE_DIR" in caplog.text
    assert str(tmp_path / "file") in caplog.text
    assert jit.stats.compiled == 2


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """F03: the order of the variables, and no home at all."""
    assert cache.directory() == tmp_path / "cache"
    monkeypatch.delenv("CUEP_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache.directory() == Path("/x/cuep")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/nonexistent")
    assert cache.directory() == Path("/nonexistent/.cache/cuep")

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    assert cache.directory() is None
    assert cache.publish("k", "key", ".so", b"content").read_bytes() == b"content"


def test_private_folder_goes_with_its_process(tmp_path: Path) -> None:
    code = "from cuep import cache; print(cache.publish('k', 'key', '.so', b'x'))"
    (tmp_path / "file").write_text("")
    environment = {**os.environ, "CUEP_CACHE_DIR": str(tmp_path / "file")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment, cwd=ROOT
    )
    assert not Path(done.stdout.strip()).parents[1].exists()


@pytest.mark.parametrize("target", ["cpu", "sm_90"])
def test_errors_name_the_real_line(folders: Path, target: str, request: pytest.FixtureRequest) -> None:
    request.getfixturevalue("gcc" if target == "cpu" else "nvrtc")
    (folders / "include/cuep/extra.cuh").write_text("#pragma once\n\nconstexpr int kExtra = missing_thing;\n")
    with pytest.raises(CompileError) as caught:
        jit.build(unit(target))
    text = str(caught.value)
    assert "missing_thing" in text
    assert "extra.cuh:3" in text.replace("(3)", ":3")
    assert str(folders) in text
    assert jit.stats.compiled == 0


@pytest.mark.parametrize("target", ["cpu", "sm_90"])
def test_layout_drift_is_a_compile_error(
    monkeypatch: pytest.MonkeyPatch, target: str, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue("gcc" if target == "cpu" else "nvrtc")
    good = unit(target)
    bad = good.text.replace("OFFSETOF(scale) == 32", "OFFSETOF(scale) == 40")
    assert bad != good.text
    with pytest.raises(CompileError, match="Params::scale"):
        jit.build(jit.Unit(good.name, target, bad, good.layout, "digest", False))


def test_ranks_compile_once(gcc: None) -> None:
    paths = on_threads(4, lambda comm: jit.build_shared(unit(), comm))
    assert len(set(paths)) == 1
    assert call(paths[0]) == 6404
    assert (jit.stats.compiled, jit.stats.hits) == (1, 3)


def test_ranks_share_the_error(gcc: None, folders: Path) -> None:
    (folders / "include/cuep/extra.cuh").write_text("constexpr int kExtra = missing_thing;\n")
    errors = on_threads(3, lambda comm: jit.build_shared(unit(), comm))
    assert {type(error) for error in errors} == {CompileError}
    assert len({str(error) for error in errors}) == 1


def test_rank_that_cannot_see_the_file_builds_itself(gcc: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache, "is_intact", lambda path: False)
    monkeypatch.setattr(cache, "find", lambda *entry: None)
    paths = on_threads(2, lambda comm: jit.build_shared(unit(), comm))
    assert [call(path) for path in paths] == [6404, 6404]
    assert jit.stats.compiled == 2


def test_one_rank_alone_fails(gcc: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The rank that has another unit fails to build it: every rank gets that error."""

    def work(comm: ThreadComm) -> Path:
        mine = unit()
        if comm.rank == 1:
            mine = jit.Unit(mine.name, "cpu", "#error only here\n", mine.layout, "other", False)
        return jit.build_shared(mine, comm)

    errors = on_threads(2, work)
    assert all(isinstance(error, CompileError) and "only here" in str(error) for error in errors)


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """F09 for the CPU backend: one error that says how to get a compiler, the same on every rank."""
    monkeypatch.setenv("CUEP_CXX", "/nonexistent/g++")
    toolchain.host_compiler.cache_clear()
    try:
        errors = on_threads(2, lambda comm: jit.build_shared(unit(), comm))
    finally:
        toolchain.host_compiler.cache_clear()
    for error in errors:
        assert isinstance(error, BackendUnavailable)
        assert "/nonexistent/g++" in str(error)
        assert "apt-get install g++" in str(error)


def test_no_nvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    """F09: NVRTC missing."""
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    toolchain.nvrtc.cache_clear()
    toolchain.nvrtc_identity.cache_clear()
    try:
        with pytest.raises(BackendUnavailable, match="pip install cuda-bindings nvidia-cuda-nvrtc"):
            jit.build(unit("sm_90"))
    finally:
        toolchain.nvrtc.cache_clear()


def test_no_headers(nvrtc: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """F09, F07: a header or NVSHMEM that is missing is named with the package that brings it."""
    monkeypatch.setattr(toolchain, "_nvidia_packages", lambda: iter(()))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(toolchain, "loaded_library", lambda prefix: None)
    for name in ("CUDA_HOME", "CUDA_PATH", "NVSHMEM_HOME"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(BackendUnavailable, match=r"cuda_runtime.h.*pip install nvidia-cuda-runtime"):
        toolchain.cudart_include()
    with pytest.raises(BackendUnavailable, match=r"cuda/std/cstdint.*pip install nvidia-cuda-cccl"):
        toolchain.cccl_include()
    with pytest.raises(BackendUnavailable, match=r"libnvshmem_host.so.3.*pip install nvidia-nvshmem-cu13"):
        toolchain.nvshmem.__wrapped__()


def test_gpu_code_is_for_the_exact_device(nvrtc: None) -> None:
    """F05: machine code, never PTX that a driver must understand; an unknown architecture is named."""
    for target in ("sm_80", "sm_90"):
        path = jit.build(unit(target))
        assert path.suffix == ".cubin"
        assert path.read_bytes()[:4] == b"\x7fELF"
        assert b"copy_plain" in path.read_bytes()
    with pytest.raises(CompileError, match=r"cannot compile for sm_35; it knows .*sm_90"):
        jit.build(unit("sm_35"))


def test_compile_all(gcc: None, folders: Path) -> None:
    (folders / "broken_one.cu").write_text(KERNEL.replace("kHidden +", "nothing +"))
    seen: list[jit.CompileResult] = []
    results = jit.compile_all(["cpu"], seen.append)
    assert seen == results
    assert [(r.name, r.status) for r in results] == [("broken_one", "failed")] * 2 + [("copy_plain", "compiled")] * 2
    assert "nothing" in results[0].message
    assert [r.status for r in jit.compile_all(["cpu"], seen.append)][2:] == ["cached"] * 2


def test_compile_all_without_nvshmem(nvrtc: None, folders: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel of NVSHMEM's device library is skipped, with the reason, where NVSHMEM is not installed."""
    (folders / "copy_plain.cu").unlink()
    (folders / "far_one.cu").write_text("#include <nvshmem.h>\n" + KERNEL)

    def missing() -> toolchain.Nvshmem:
        raise BackendUnavailable(f"libnvshmem_host.so.3 was not found: {toolchain.GET_NVSHMEM}")

    monkeypatch.setattr(toolchain, "nvshmem", missing)
    results = jit.compile_all(["cpu", "90"], lambda result: None)
    assert {(r.target, r.status) for r in results} == {("sm_90", "skipped")}
    assert "pip install nvidia-nvshmem-cu13" in results[0].message


def test_survey() -> None:
    tools = {tool.name: tool for tool in toolchain.survey()}
    assert {"C++ compiler", "NVRTC", "nvJitLink", "CUDA runtime headers", "CCCL headers", "NVSHMEM"} == set(tools)
    assert all(tool.path or tool.missing for tool in tools.values())


def test_errors_survive_the_trip_between_ranks() -> None:
    import pickle

    for kind in (CompileError, BackendUnavailable, ArgumentError):
        error = pickle.loads(pickle.dumps(kind("text")))
        assert isinstance(error, CuepError)
        assert str(error) == "text"


@pytest.mark.parametrize("linked", [False, True])
def test_nvshmem_kernel_both_ways(nvrtc: None, monkeypatch: pytest.MonkeyPatch, linked: bool) -> None:
    """Inlined from headers, and linked with the device library: each has the state that cumodule_init looks up."""
    monkeypatch.setattr(jit, "KERNELS_DIR", REAL_KERNELS)
    try:
        found = toolchain.nvshmem()
        if linked:
            toolchain.nvjitlink()
        elif not found.can_inline:
            pytest.skip("this NVSHMEM can only be linked")
        monkeypatch.setattr(toolchain.Nvshmem, "can_inline", not linked)
        unit = jit.render("barrier_nvshmem", {"kNumRanks": 4}, "sm_90")
        content = jit.build(unit).read_bytes()
    except BackendUnavailable as missing:
        pytest.skip(str(missing))
    for symbol in (b"nvshmemi_device_state_d", b"nvshmemi_device_lib_version_d", b"cuep_launch", b"barrier_nvshmem"):
        assert symbol in content


def test_every_kernel_compiles_for_gpus(nvrtc: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without GPU, driver or toolkit. The kernel of NVSHMEM's device library has the test above."""
    monkeypatch.setattr(jit, "KERNELS_DIR", REAL_KERNELS)

    def missing() -> toolchain.Nvshmem:
        raise BackendUnavailable("not for this test")

    monkeypatch.setattr(toolchain, "nvshmem", missing)
    results = jit.compile_all(["90"], lambda result: None)
    assert {result.name for result in results} == set(jit.kernel_names())
    assert [result.message for result in results if result.status == "failed"] == []
    assert {result.name for result in results if result.status == "skipped"} == {"barrier_nvshmem"}
