"""`python -m cuep info`: which backend would run here and why, what it found, and how to get what is missing."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cuep
from cuep import cache, jit, mpiexec, toolchain
from cuep.errors import CuepError
from cuep.world import World

_PACKAGES = ("numpy", "ml_dtypes", "mpi4py", "rich", "cupy-cuda13x", "cupy-cuda12x", "cuda-core", "cuda-bindings")
_GPU_FIELDS = ("name", "compute_cap", "memory.total", "driver_version")

Facts = dict[str, Any]


def collect(open_world: Callable[[], World]) -> Facts:
    """All facts as plain data. Sections whose source is not installed are empty, never errors."""
    facts: Facts = {
        "cuep": {
            "version": cuep.__version__,
            "path": str(Path(cuep.__file__).parent),
            "kernels": str(jit.KERNELS_DIR),
            "cache": str(cache.directory() or "none can be written: a private folder per process"),
        },
        "python": {"version": platform.python_version(), "path": sys.executable, "system": platform.platform()},
        "packages": {name: version for name in _PACKAGES if (version := _package_version(name))},
    }
    try:
        with open_world() as world:
            facts["backend"] = {
                "name": world.backend.name,
                "device": world.backend.description,
                "reason": world.backend_reason,
                "ranks": world.size,
            }
    except CuepError as error:
        facts["backend"] = {"name": None, "reason": str(error)}
    facts["mpi"] = _mpi()
    facts["devices"] = _devices()
    facts["links"] = _links() if facts["devices"] else []
    tools = toolchain.survey()
    facts["tools"] = {tool.name: {"version": tool.version, "path": tool.path} for tool in tools if not tool.missing}
    facts["missing"] = {tool.name: tool.missing for tool in tools if tool.missing}
    if "error" in facts["mpi"]:
        facts["missing"]["MPI"] = facts["mpi"].pop("error")
    return facts


def show(facts: Facts) -> None:
    """Print the facts for people."""
    backend = facts["backend"]
    print(f"cuep {facts['cuep']['version']}: backend {backend['name'] or 'NONE'}, because {backend['reason']}")
    for section in ("backend", "cuep", "python", "packages", "mpi"):
        print(f"\n{section}")
        for name, value in facts[section].items():
            if not (section == "backend" and name in ("name", "reason")):
                print(f"  {name:<14} {value}")
    print("\ndevices")
    for device in facts["devices"] or ["none (nvidia-smi finds no GPU)"]:
        print(f"  {device}")
    for line in facts["links"]:
        print(f"  {line}")
    print("\ntools")
    for name, tool in facts["tools"].items():
        print(f"  {name:<21} {tool['version']}  {tool['path']}".rstrip())
    if facts["missing"]:
        print(
            "\nmissing (the CPU backend needs the C++ compiler; the CUDA backend NVRTC and NVSHMEM, its device"
            " barrier all else; several ranks MPI)"
        )
        for name, how in facts["missing"].items():
            print(f"  {name:<21} {how}")


def _package_version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _mpi() -> Facts:
    """The library that mpi4py loads, without starting MPI: inside some batch systems that would end the process."""
    facts: Facts = {}
    try:
        import mpi4py

        if "mpi4py.MPI" not in sys.modules:
            mpi4py.rc(initialize=False, finalize=False)
        from mpi4py import MPI

        facts["library"] = MPI.Get_library_version().splitlines()[0].strip("\0 ")
        facts["mpiexec"] = " ".join(mpiexec.command())
    except (ImportError, RuntimeError, CuepError) as error:
        facts["error"] = f"{error} (pip install mpi4py mpich, or the site's own MPI)"
    return facts


def _devices() -> list[str]:
    query = ["--query-gpu=" + ",".join(_GPU_FIELDS), "--format=csv,noheader"]
    labels = ("", "compute capability ", "", "driver ")
    return [
        f"GPU {index}: " + ", ".join(label + text.strip() for label, text in zip(labels, line.split(","), strict=False))
        for index, line in enumerate(_nvidia_smi(*query))
    ]


def _links() -> list[str]:
    """Rows of the driver's own table that tell how each pair of GPUs is connected."""
    return [line.expandtabs(8) for line in _nvidia_smi("topo", "-m") if "GPU" in line.split("\t")[0] or "GPU0" in line]


def _nvidia_smi(*arguments: str) -> list[str]:
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        shown = subprocess.run([program, *arguments], capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line for line in shown.stdout.splitlines() if line.strip()]
