"""Where compilers, headers and NVSHMEM are on this machine, and how to get what is missing."""

from __future__ import annotations

import functools
import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cuep import env
from cuep.errors import BackendUnavailable

_HOST_COMPILERS = ("g++", "c++", "clang++")
GET_CXX = "install one (Debian, Ubuntu: apt-get install g++) or name it in CUEP_CXX"
GET_NVRTC = "pip install cuda-bindings nvidia-cuda-nvrtc (CUDA 12: 'cuda-bindings<13' nvidia-cuda-nvrtc-cu12)"
GET_NVJITLINK = "pip install nvidia-nvjitlink (CUDA 12: nvidia-nvjitlink-cu12)"
GET_CUDART = "pip install nvidia-cuda-runtime (CUDA 12: nvidia-cuda-runtime-cu12), or set CUDA_HOME to a toolkit"
GET_CCCL = "pip install nvidia-cuda-cccl (CUDA 12: nvidia-cuda-cccl-cu12), or set CUDA_HOME to a toolkit"
GET_NVSHMEM = "pip install nvidia-nvshmem-cu13 (CUDA 12: nvidia-nvshmem-cu12), or set NVSHMEM_HOME"


@dataclass(frozen=True)
class HostCompiler:
    """A C++ compiler: the words that start it, and what it says about itself."""

    command: tuple[str, ...]
    version: str


@dataclass(frozen=True)
class Nvshmem:
    """One NVSHMEM installation. `include` is None where only the library is there."""

    library: Path  # libnvshmem_host.so.3
    device_archive: Path  # libnvshmem_device.a; may be missing
    include: Path | None
    version: tuple[int, int, int]  # of the headers; (0, 0, 0) without them

    @property
    def can_inline(self) -> bool:
        """Whether kernels can be compiled from its headers alone, without a device link."""
        return self.version >= (3, 6, 5)


@dataclass(frozen=True)
class Tool:
    """One line of `cuep info`: where a tool is, or how to get it."""

    name: str
    version: str
    path: str
    missing: str  # "" when found


@functools.cache
def host_compiler() -> HostCompiler:
    """CUEP_CXX or CXX, else the first of g++, c++, clang++ on PATH."""
    chosen = env.cxx()
    candidates = [tuple(shlex.split(chosen))] if chosen else [(name,) for name in _HOST_COMPILERS]
    for command in candidates:
        if command and shutil.which(command[0]):
            probe = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False)
            machine = subprocess.run([*command, "-dumpmachine"], capture_output=True, text=True, check=False)
            if probe.returncode == 0:
                return HostCompiler(command, f"{probe.stdout.splitlines()[0]} {machine.stdout.strip()}")
    tried = chosen or ", ".join(_HOST_COMPILERS)
    raise BackendUnavailable(f"the CPU backend needs a C++17 compiler and none works here (tried: {tried}): {GET_CXX}")


@functools.cache
def nvrtc() -> Any:
    """The module cuda.bindings.nvrtc, with its library loaded."""
    try:
        from cuda.bindings import nvrtc as module

        module.nvrtcVersion()
    except Exception as error:  # ImportError, or cuda.bindings' own errors for a library it cannot find
        raise BackendUnavailable(
            f"GPU kernels are compiled with NVRTC, which is not usable here ({error}): {GET_NVRTC}"
        ) from error
    return module


@functools.cache
def nvjitlink() -> Any:
    """The module cuda.bindings.nvjitlink, with its library loaded."""
    try:
        from cuda.bindings import nvjitlink as module

        module.version()
    except Exception as error:
        raise BackendUnavailable(
            f"this NVSHMEM needs a device link with nvJitLink, which is not usable here ({error}): {GET_NVJITLINK}"
        ) from error
    return module


def nvrtc_version() -> tuple[int, int]:
    _, major, minor = nvrtc().nvrtcVersion()
    return int(major), int(minor)


@functools.cache
def nvrtc_identity() -> str:
    """Version and, because patch releases share a version, the size of the library file."""
    major, minor = nvrtc_version()
    path = loaded_library("libnvrtc.so")
    return f"nvrtc {major}.{minor} {path.stat().st_size if path else ''}".strip()


def cudart_include() -> Path:
    """The folder of cuda_runtime.h."""
    return _header_folder("cuda_runtime.h", ("cuda_runtime/include",), GET_CUDART)


def cccl_include() -> Path:
    """The folder of cuda/std/cstdint."""
    return _header_folder("cuda/std/cstdint", ("cuda_cccl/include",), GET_CCCL)


def _header_folder(header: str, cuda12_folders: Iterable[str], hint: str) -> Path:
    major = nvrtc_version()[0]
    folders = [root / "cu13/include" for root in _nvidia_packages()] if major >= 13 else []
    folders += [root / folder for root in _nvidia_packages() for folder in cuda12_folders] if major == 12 else []
    home = env.cuda_home()
    if home:
        folders.append(Path(home) / "include")
    nvcc = shutil.which("nvcc")
    if nvcc:
        folders.append(Path(nvcc).resolve().parents[1] / "include")
    for folder in folders:
        for candidate in (folder, folder / "cccl"):
            if (candidate / header).is_file():
                return candidate
    searched = ", ".join(map(str, folders)) or "no folder of CUDA headers"
    raise BackendUnavailable(f"<{header}> of CUDA {major} was not found (searched {searched}): {hint}")


@functools.cache
def nvshmem() -> Nvshmem:
    """NVSHMEM_HOME, else the copy that is already loaded in this process, else the one that pip installed."""
    home = env.nvshmem_home()
    loaded = loaded_library("libnvshmem_host.so")
    if home:
        roots = [Path(home)]
    elif loaded:
        roots = [loaded.parents[1]]
    else:
        roots = [root / "nvshmem" for root in _nvidia_packages()]
    for root in roots:
        for folder in (root / "lib", root / "lib64"):
            library = folder / "libnvshmem_host.so.3"
            if library.is_file():
                return _describe_nvshmem(root, library)
    searched = ", ".join(map(str, roots)) or "the Python packages"
    raise BackendUnavailable(f"libnvshmem_host.so.3 was not found (searched {searched}): {GET_NVSHMEM}")


def _describe_nvshmem(root: Path, library: Path) -> Nvshmem:
    include, version = root / "include", (0, 0, 0)
    header = include / "non_abi/nvshmem_version.h"
    if not header.is_file():
        return Nvshmem(library, library.with_name("libnvshmem_device.a"), None, version)
    text = header.read_text()
    numbers = [re.search(rf"NVSHMEM_VENDOR_{part}_VERSION (\d+)", text) for part in ("MAJOR", "MINOR", "PATCH")]
    if all(numbers):
        major, minor, patch = (int(number[1]) for number in numbers if number)
        version = (major, minor, patch)
    return Nvshmem(library, library.with_name("libnvshmem_device.a"), include, version)


def _nvidia_packages() -> Iterator[Path]:
    """Folders of the namespace package `nvidia`, without importing it."""
    spec = importlib.util.find_spec("nvidia")
    known = list(spec.submodule_search_locations or ()) if spec else []
    for folder in dict.fromkeys([*known, *(f"{entry}/nvidia" for entry in sys.path if entry)]):
        if Path(folder).is_dir():
            yield Path(folder)


def loaded_library(prefix: str) -> Path | None:
    """The file of a shared library that is mapped into this process, by the start of its name."""
    return next(iter(loaded_libraries(prefix)), None)


def loaded_libraries(prefix: str) -> list[Path]:
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return []
    paths = (line.split(maxsplit=5)[-1] for line in maps.splitlines() if prefix in line)
    return [Path(path) for path in dict.fromkeys(paths) if Path(path).name.startswith(prefix)]


def survey() -> list[Tool]:
    """Every tool that a kernel's compilation may need, found or not."""

    def look(name: str, find: Any) -> Tool:
        try:
            version, path = find()
        except BackendUnavailable as error:
            return Tool(name, "", "", str(error))
        return Tool(name, version, str(path), "")

    def nvjitlink_found() -> tuple[str, str]:
        major, minor = nvjitlink().version()
        return f"{major}.{minor}", str(loaded_library("libnvJitLink.so") or "")

    def nvshmem_found() -> tuple[str, str]:
        found = nvshmem()
        return ".".join(map(str, found.version)), str(found.library)

    return [
        look("C++ compiler", lambda: (host_compiler().version, shutil.which(host_compiler().command[0]))),
        look("NVRTC", lambda: ("{}.{}".format(*nvrtc_version()), loaded_library("libnvrtc.so") or "")),
        look("nvJitLink", nvjitlink_found),
        look("CUDA runtime headers", lambda: ("", cudart_include())),
        look("CCCL headers", lambda: ("", cccl_include())),
        look("NVSHMEM", nvshmem_found),
    ]
