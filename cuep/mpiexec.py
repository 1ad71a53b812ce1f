"""Starting several ranks of this program where no MPI launcher did: `cuep demo --ranks 4`."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from cuep.errors import BackendUnavailable


def run_ranks(num_ranks: int, arguments: list[str]) -> int:
    """Run `python -m cuep <arguments>` on `num_ranks` ranks and return the launcher's exit status."""
    program = [sys.executable, "-m", "mpi4py", "-m", "cuep", *arguments]
    return subprocess.run([*command(), "-n", str(num_ranks), *program], check=False).returncode


def command() -> list[str]:
    """The launcher beside this Python, else the one on PATH, with what it needs to run as root on few cores."""
    beside = shutil.which("mpiexec", path=str(Path(sys.executable).parent))
    found = beside or shutil.which("mpiexec") or shutil.which("mpirun")
    if found is None:
        raise BackendUnavailable("no mpiexec or mpirun was found: pip install mpich (or 'cuep[mpich]')")
    return [found, *_flags(found)]


def _flags(launcher: str) -> list[str]:
    version = subprocess.run([launcher, "--version"], capture_output=True, text=True, check=False)
    is_open_mpi = "Open MPI" in version.stdout + version.stderr or "OpenRTE" in version.stdout
    # Open MPI would refuse root and more ranks than cores, and bind the CPU backend's threads of a rank to one core.
    return ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none"] if is_open_mpi else []
