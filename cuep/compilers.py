"""Run a compiler on a rendered unit: g++ to a shared object, NVRTC (and nvJitLink for NVSHMEM) to a cubin."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path
from typing import Any

from cuep import toolchain
from cuep.errors import BackendUnavailable, CompileError

_HOST_FLAGS = (
    *("-std=c++17", "-O2", "-fPIC", "-shared", "-pthread", "-DCUEP_CPU"),
    "-fno-strict-aliasing",  # rows are read as other types than they were written; without it sums came out as zero
    "-ffp-contract=off",  # sums must round as the GPU's __fmul_rn and __fadd_rn do
)
_NVRTC_FLAGS = ("-std=c++17", "-lineinfo")  # not -ftz: denormals must survive, as they do on the CPU
_NVSHMEM_INLINE_FLAGS = ("-DNVSHMEM_ENABLE_ALL_DEVICE_INLINING", "-DEXTERN_CONSTANT=__constant__", "-default-device")
_NVSHMEM_LINK_FLAGS = ("-rdc=true", "-default-device")


def identity(target: str, needs_nvshmem: bool) -> str:
    """Everything besides the text that decides what comes out: compiler and flags, but no path."""
    if target == "cpu":
        return " ".join([toolchain.host_compiler().version, *_HOST_FLAGS])
    parts = [toolchain.nvrtc_identity(), f"-arch={target}", *_NVRTC_FLAGS]
    if needs_nvshmem:
        found = _nvshmem_with_headers()
        parts += ["nvshmem", *map(str, found.version), *_nvshmem_flags(found)]
    return " ".join(parts)


def compile_unit(name: str, text: str, target: str, needs_nvshmem: bool, include_dirs: list[Path]) -> bytes:
    """Compile a translation unit; CompileError carries the compiler's own text."""
    if target == "cpu":
        return _compile_host(name, text, include_dirs)
    flags = [f"-arch={target}", *_NVRTC_FLAGS, *(f"-I{path}" for path in include_dirs)]
    if not needs_nvshmem:
        return _compile_nvrtc(name, text, target, flags)
    found = _nvshmem_with_headers()
    headers = (found.include, toolchain.cudart_include(), toolchain.cccl_include())
    flags += [*_nvshmem_flags(found), *(f"-I{path}" for path in headers)]
    relocatable_or_final = _compile_nvrtc(name, text, target, flags)
    if found.can_inline:
        return relocatable_or_final
    return _link(name, relocatable_or_final, target, found.device_archive)


def _compile_host(name: str, text: str, include_dirs: list[Path]) -> bytes:
    compiler = toolchain.host_compiler()
    with tempfile.TemporaryDirectory(prefix="cuep-") as folder:
        source, output = Path(folder) / f"{name}.jit.cpp", Path(folder) / f"{name}.so"
        source.write_text(text)
        includes = [f"-I{path}" for path in include_dirs]
        # Messages of a running kernel name files as kernels_cu/..., so the same build serves every checkout.
        prefix = [f"-fmacro-prefix-map={include_dirs[0]}=kernels_cu"]
        command = [*compiler.command, *_HOST_FLAGS, *prefix, *includes, "-x", "c++", str(source), "-o", str(output)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        if done.returncode != 0:
            raise CompileError(f"kernel {name} for cpu: {compiler.command[0]} failed:\n{done.stderr or done.stdout}")
        return output.read_bytes()


def _compile_nvrtc(name: str, text: str, target: str, flags: list[str]) -> bytes:
    nvrtc = toolchain.nvrtc()
    _, supported = nvrtc.nvrtcGetSupportedArchs()
    number = target.removeprefix("sm_").rstrip("af")
    if not number.isdigit() or int(number) not in supported:
        version = "{}.{}".format(*toolchain.nvrtc_version())
        known = ", ".join(f"sm_{arch}" for arch in supported)
        raise CompileError(f"kernel {name}: NVRTC {version} cannot compile for {target}; it knows {known}")
    created, program = nvrtc.nvrtcCreateProgram(text.encode(), f"{name}.jit.cu".encode(), 0, None, None)
    if created != 0:
        raise CompileError(f"kernel {name}: nvrtcCreateProgram failed with {created}")
    try:
        encoded = [flag.encode() for flag in flags]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        if status != 0:
            log = _nvrtc_buffer(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
            message = log.rstrip(b"\0\n ").decode(errors="replace")
            raise CompileError(f"kernel {name} for {target}: NVRTC failed ({status.name}):\n{message}")
        return _nvrtc_buffer(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _nvrtc_buffer(get_size: Any, get: Any, program: Any) -> bytes:
    status, size = get_size(program)
    buffer = bytes(bytearray(size))  # a fresh object, because NVRTC writes into it
    if status == 0:
        (status,) = get(program, buffer)
    if status != 0:
        raise CompileError(f"NVRTC did not return its output: {status}")
    return buffer


def _link(name: str, cubin: bytes, target: str, archive: Path) -> bytes:
    """Link relocatable device code with NVSHMEM's device library."""
    if not archive.is_file():
        raise BackendUnavailable(f"kernel {name} needs {archive}, which is not there: {toolchain.GET_NVSHMEM}")
    nvjitlink = toolchain.nvjitlink()
    linker = nvjitlink.create(1, [f"-arch={target}"])
    try:
        nvjitlink.add_data(linker, nvjitlink.InputType.CUBIN, cubin, len(cubin), name)
        nvjitlink.add_file(linker, nvjitlink.InputType.LIBRARY, str(archive))
        nvjitlink.complete(linker)
        linked = bytearray(nvjitlink.get_linked_cubin_size(linker))
        nvjitlink.get_linked_cubin(linker, linked)
        return bytes(linked)
    except nvjitlink.nvJitLinkError as error:
        log = bytearray(nvjitlink.get_error_log_size(linker))
        nvjitlink.get_error_log(linker, log)
        message = log.rstrip(b"\0\n ").decode(errors="replace")
        where = f"kernel {name} for {target}: nvJitLink with {archive} failed"
        raise CompileError(f"{where} ({error}):\n{message}") from error
    finally:
        nvjitlink.destroy(linker)


def _nvshmem_flags(found: toolchain.Nvshmem) -> tuple[str, ...]:
    return _NVSHMEM_INLINE_FLAGS if found.can_inline else _NVSHMEM_LINK_FLAGS


def _nvshmem_with_headers() -> toolchain.Nvshmem:
    found = toolchain.nvshmem()
    if found.include is None:
        raise BackendUnavailable(f"the headers of NVSHMEM are not beside {found.library}: {toolchain.GET_NVSHMEM}")
    return found
