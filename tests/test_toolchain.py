"""Compilers, headers and NVSHMEM: found, missing, and every real kernel compiled for GPUs without one."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from kernel_folder import KERNEL, REAL_KERNELS, on_threads, unit

from cuep import jit, toolchain
from cuep.errors import BackendUnavailable, CompileError

pytest_plugins = ("kernel_folder",)
pytestmark = pytest.mark.usefixtures("folders")


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
