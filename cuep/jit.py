"""From kernels_cu/<name>.cu and its compile-time constants to a compiled artefact in the cache.

A unit of translation is rendered as text: constants, tunables, `#include "<name>.cu"`, then asserts that the layout of
Params is the one that Python fills. Its first line hashes every source it reaches, so an edited header is a new unit.
"""

from __future__ import annotations

import hashlib
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cuep import cache, compilers
from cuep.agreement import idle_barrier, raise_together
from cuep.errors import ArgumentError, BackendUnavailable, CompileError, CuepError
from cuep.params import Constant, ParamsLayout

_BESIDE_PACKAGE = Path(__file__).resolve().parents[1] / "kernels_cu"
KERNELS_DIR = _BESIDE_PACKAGE if _BESIDE_PACKAGE.is_dir() else Path(__file__).resolve().parent / "_kernels_cu"

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*[<"]([^>"\n]+)[>"]', re.MULTILINE)
_TUNABLE = re.compile(r"^CUEP_TUNABLE\(\s*(\w+)\s*,\s*(\d+)\s*,\s*(\d+)\s*\)", re.MULTILINE)
_SERVES = re.compile(r"^//[ \t]*serves:(.*)$", re.MULTILINE)
_SAMPLE = re.compile(r"^//[ \t]*compile:(.*)$", re.MULTILINE)


@dataclass
class Stats:
    """What build() did in this process."""

    compiled: int = 0
    hits: int = 0


stats = Stats()


@dataclass(frozen=True)
class Unit:
    """One kernel file with its constants, ready to compile for one target ("cpu", "sm_90", ...)."""

    name: str
    target: str
    text: str
    layout: ParamsLayout
    digest: str
    needs_nvshmem: bool


@dataclass(frozen=True)
class CompileResult:
    """One line of compile_all: status is "compiled", "cached", "failed" or "skipped"; message says why."""

    name: str
    target: str
    constants: Mapping[str, Constant] = field(hash=False)
    status: str
    seconds: float
    message: str


def kernel_names() -> list[str]:
    """Names of all kernel files."""
    return sorted(path.stem for path in KERNELS_DIR.glob("*.cu"))


def variants(op: str, form: Mapping[str, Any] | None = None) -> list[str]:
    """The <variant> of every file kernels_cu/<op>_<variant>.cu that serves `form`.

    form: settings of a group, such as {"layout": "flat"}; a file names those that it is limited to in a line
    `// serves: layout=flat reduce=per_rank`. None: every file.
    """
    names = [name for name in kernel_names() if name.startswith(f"{op}_")]
    return [name.removeprefix(f"{op}_") for name in names if form is None or _is_serving(name, form)]


def _is_serving(name: str, form: Mapping[str, Any]) -> bool:
    """Several values of one setting are separated by commas."""
    limits = [word.partition("=") for line in _SERVES.findall(_source(name)) for word in line.split()]
    return all(str(form.get(key)) in values.split(",") for key, _, values in limits)


def tunables(name: str) -> dict[str, tuple[int, int]]:
    """Name -> (default on a GPU, default on the CPU) of every CUEP_TUNABLE of a kernel file."""
    return {key: (int(gpu), int(cpu)) for key, gpu, cpu in _TUNABLE.findall(_source(name))}


def render(
    name: str, constants: Mapping[str, Constant], target: str, tunables: Mapping[str, int] | None = None
) -> Unit:
    """The translation unit of a kernel file. `tunables` replaces defaults of its CUEP_TUNABLEs."""
    values = _tunable_values(name, constants, target, tunables or {})
    layout = ParamsLayout.parse(_source(name), {**constants, **values})
    has_types = any(isinstance(value, str) for value in constants.values())
    first = [KERNELS_DIR / f"{name}.cu"] + ([_include_dir() / "cuep/convert.cuh"] if has_types else [])
    sources, foreign = _closure(first)
    digest = hashlib.sha256()
    for path in sorted(sources, key=lambda path: path.relative_to(KERNELS_DIR).as_posix()):
        digest.update(f"{path.relative_to(KERNELS_DIR).as_posix()}\n{sources[path]}\0".encode())
    lines = [
        f"// kernel={name} sources={digest.hexdigest()[:32]}",
        "#define CUEP_JIT 1",
        *(["#include <cuep/convert.cuh>  // the element types"] if has_types else []),
        *(_declare(key, value) for key, value in {**constants, **values}.items()),
        f'#include "{name}.cu"',
        *layout.static_asserts(),
        *([f"CUEP_CPU_EXPORT({name})"] if target == "cpu" else []),
    ]
    text = "\n".join(lines) + "\n"
    key = hashlib.sha256(f"{target}\n{text}".encode()).hexdigest()[:32]
    return Unit(name, target, text, layout, key, any(header.startswith("nvshmem") for header in foreign))


def build(unit: Unit) -> Path:
    """The compiled unit in the cache (.so or .cubin), compiled now if it is not there. Raises CompileError."""
    if unit.target == "cpu" and unit.needs_nvshmem:
        raise CompileError(f"kernel {unit.name} uses NVSHMEM's device library and exists for GPUs only")
    identity = compilers.identity(unit.target, unit.needs_nvshmem)
    key = hashlib.sha256(f"{unit.digest}\n{identity}".encode()).hexdigest()[:24]
    suffix = ".so" if unit.target == "cpu" else ".cubin"
    path = cache.find(unit.name, key, suffix)
    if path is not None:
        stats.hits += 1
        return path
    include_dirs = [KERNELS_DIR, _include_dir()]
    content = compilers.compile_unit(unit.name, unit.text, unit.target, unit.needs_nvshmem, include_dirs)
    stats.compiled += 1
    return cache.find(unit.name, key, suffix) or cache.publish(unit.name, key, suffix, content)


def share_out(units: Sequence[Unit], comm: Any) -> None:
    """Each rank compiles some of the units into the cache, for build_shared to find them there (collective). What fails
    is left to build_shared, which tells all ranks.
    """
    for unit in units[comm.rank :: comm.size]:
        _try_build(unit)
    idle_barrier(comm)


def build_shared(unit: Unit, comm: Any) -> Path:
    """build() once for all ranks of comm (collective): the others get its path, or the same error.

    A rank that cannot see the file, because it is on another host or has another unit, builds for itself.
    """
    if comm is None or comm.size == 1:
        return build(unit)
    path: Path | None = None
    error: CuepError | None = None
    if comm.rank == 0:
        path, error = _try_build(unit)
    idle_barrier(comm)
    digest, path, error = comm.bcast((unit.digest, path, error), root=0)
    if error is None and comm.rank != 0:
        if path is not None and digest == unit.digest and cache.is_intact(path):
            stats.hits += 1
        else:
            path, error = _try_build(unit)
    raise_together(comm, error)
    assert path is not None
    return path


def compile_all(archs: list[str], report: Callable[[CompileResult], None]) -> list[CompileResult]:
    """Compile every kernel file with each of its `// compile:` constants for every target; needs no GPU.

    archs: "80" or "sm_80", and "cpu". A kernel whose headers or linker are not installed is "skipped" and says so.
    """
    results = []
    for target in [arch if arch == "cpu" or arch.startswith("sm_") else f"sm_{arch}" for arch in archs]:
        for name in kernel_names():
            for constants in samples(name):
                result = _compile_sample(name, constants, target)
                if result is not None:
                    report(result)
                    results.append(result)
    return results


def samples(name: str) -> list[dict[str, Constant]]:
    """The sample constants in the `// compile: kNumRanks=4 ...` lines of a kernel file (tunables may be among them)."""
    found = []
    for line in _SAMPLE.findall(_source(name)):
        pairs = [word.partition("=") for word in line.split()]
        found.append({key: _parse_constant(value) for key, _, value in pairs})
    return found or [{}]


def _compile_sample(name: str, sample: Mapping[str, Constant], target: str) -> CompileResult | None:
    known = tunables(name)
    chosen = {key: int(value) for key, value in sample.items() if key in known}
    constants = {key: value for key, value in sample.items() if key not in known}
    start = time.perf_counter()
    compiled = stats.compiled
    try:
        unit = render(name, constants, target, chosen)
        if target == "cpu" and unit.needs_nvshmem:
            return None
        build(unit)
        status, message = ("compiled" if stats.compiled > compiled else "cached"), ""
    except BackendUnavailable as error:
        status, message = "skipped", str(error)
    except CuepError as error:
        status, message = "failed", str(error)
    return CompileResult(name, target, sample, status, time.perf_counter() - start, message)


def _try_build(unit: Unit) -> tuple[Path | None, CuepError | None]:
    try:
        return build(unit), None
    except CuepError as error:
        return None, error
    except OSError as error:
        return None, CompileError(f"kernel {unit.name}: {error}")


def _source(name: str) -> str:
    try:
        return (KERNELS_DIR / f"{name}.cu").read_text()
    except OSError as error:
        known = ", ".join(kernel_names()) or "none"
        raise CompileError(f"no kernel file {KERNELS_DIR / name}.cu ({error.strerror}); there are: {known}") from error


def _include_dir() -> Path:
    return KERNELS_DIR / "include"


def _closure(first: list[Path]) -> tuple[dict[Path, str], set[str]]:
    """Text of the given files and of all of ours that they include; and the names of headers that are not ours."""
    found: dict[Path, str] = {}
    foreign: set[str] = set()
    todo = list(first)
    while todo:
        path = todo.pop()
        if path in found:
            continue
        found[path] = path.read_text()
        for header in _INCLUDE.findall(found[path]):
            ours = next(_existing(header, path.parent), None)
            if ours is None:
                foreign.add(header)
            else:
                todo.append(ours)
    return found, foreign


def _existing(header: str, beside: Path) -> Iterator[Path]:
    for folder in (beside, KERNELS_DIR, _include_dir()):
        path = Path(os.path.normpath(folder / header))
        if path.is_file() and path.is_relative_to(KERNELS_DIR):
            yield path


def _tunable_values(
    name: str, constants: Mapping[str, Constant], target: str, chosen: Mapping[str, int]
) -> dict[str, int]:
    defaults = tunables(name)
    clash = sorted(set(defaults) & set(constants))
    if clash:
        raise ArgumentError(f"kernel {name}: {', '.join(clash)} is a tunable, not a constant")
    unknown = sorted(set(chosen) - set(defaults))
    if unknown:
        known = ", ".join(sorted(defaults)) or "none"
        raise ArgumentError(f"kernel {name} has no tunable {', '.join(unknown)}; it has: {known}")
    return {key: int(chosen.get(key, cpu if target == "cpu" else gpu)) for key, (gpu, cpu) in defaults.items()}


def _declare(name: str, value: Constant) -> str:
    if isinstance(value, str):
        return f"using {name} = {value};"
    if isinstance(value, bool):
        return f"[[maybe_unused]] constexpr bool {name} = {str(value).lower()};"
    kind = "int" if -(2**31) <= value < 2**31 else "long long"
    return f"[[maybe_unused]] constexpr {kind} {name} = {value};"


def _parse_constant(text: str) -> Constant:
    if text in ("true", "false"):
        return text == "true"
    return int(text) if re.fullmatch(r"-?\d+", text) else text
