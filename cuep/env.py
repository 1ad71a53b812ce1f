"""Every environment variable that cuep reads. No other module touches os.environ."""

from __future__ import annotations

import os

from cuep.errors import ArgumentError

# Set by the launchers of Open MPI, MPICH/Hydra, Intel MPI and Slurm: a process that has none was started alone.
_LAUNCHER_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "PMI_RANK", "PMIX_RANK", "MPI_LOCALNRANKS")
_LOCAL_RANK_VARIABLES = (  # torchrun's first: its processes inherit those of a launcher that started it
    "LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "MV2_COMM_WORLD_LOCAL_RANK",
    "SLURM_LOCALID",
)


def backend() -> str | None:
    """CUEP_BACKEND: "cpu", "cuda" or "auto"; used where cuep.init(backend="auto") leaves the choice open."""
    return os.environ.get("CUEP_BACKEND") or None


def cache_dir() -> str | None:
    """CUEP_CACHE_DIR: where compiled kernels are kept."""
    return os.environ.get("CUEP_CACHE_DIR") or None


def user_cache_home() -> str | None:
    """XDG_CACHE_HOME: parent of the default cache directory."""
    return os.environ.get("XDG_CACHE_HOME") or None


def seed() -> int:
    """CUEP_SEED: seed of the CPU backend's scheduler; 0 (the default) runs threads in order without delays."""
    return _number("CUEP_SEED", 0, most=2**62)


def delay_level() -> int:
    """CUEP_DELAY: how often a seeded CPU scheduler injects delays, 0 to 3."""
    return _number("CUEP_DELAY", 1, most=3)


def timeout_s() -> float:
    """CUEP_TIMEOUT_S: seconds after which a wait for a peer ends in PeerTimeout, where GroupConfig does not say."""
    text = os.environ.get("CUEP_TIMEOUT_S") or "30"
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 1e-3 <= seconds <= 1e6:
        raise ArgumentError(f"environment variable CUEP_TIMEOUT_S must be seconds from 0.001 to 1e6, got {text!r}")
    return seconds


def start_epoch() -> int:
    """CUEP_START_EPOCH: first epoch of a group, for tests that run across the 32-bit wrap."""
    return _number("CUEP_START_EPOCH", 0, most=2**40)


def cxx() -> str | None:
    """CUEP_CXX, else CXX: the C++ compiler of the CPU backend."""
    return os.environ.get("CUEP_CXX") or os.environ.get("CXX") or None


def cuda_home() -> str | None:
    """CUDA_HOME, else CUDA_PATH: a CUDA toolkit."""
    return os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or None


def nvshmem_home() -> str | None:
    """NVSHMEM_HOME: an NVSHMEM installation with include/ and lib/."""
    return os.environ.get("NVSHMEM_HOME") or None


def visible_devices() -> str | None:
    """CUDA_VISIBLE_DEVICES, as the driver sees it."""
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def local_rank() -> int | None:
    """This process's rank on its host as the launcher says, or None."""
    for name in _LOCAL_RANK_VARIABLES:
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return None


def has_mpi_launcher() -> bool:
    """Whether an MPI launcher started this process."""
    return any(name in os.environ for name in _LAUNCHER_VARIABLES)


def set_default(name: str, value: str) -> None:
    """Give another library's variable a value unless the user has set it."""
    os.environ.setdefault(name, value)


def _number(name: str, default: int, most: int) -> int:
    text = os.environ.get(name) or str(default)
    if not text.isdigit() or int(text) > most:
        raise ArgumentError(f"environment variable {name} must be a whole number from 0 to {most}, got {text!r}")
    return int(text)
