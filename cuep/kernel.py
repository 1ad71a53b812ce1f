"""One launchable kernel: a file of kernels_cu with its constants, compiled, loaded and launched with a record."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cuep import jit
from cuep.agreement import together
from cuep.backend import Backend, Record
from cuep.params import Constant


class Kernel:
    """A kernel on one backend. The .cu file alone says how it is launched: how many threads, how much shared memory,
    and whether it may be set up while what comes before it in the stream still runs.

    comm: ranks that compile together (collective), or None to compile alone.
    """

    def __init__(
        self,
        backend: Backend,
        name: str,
        constants: Mapping[str, Constant],
        comm: Any = None,
        tunables: Mapping[str, int] | None = None,
    ) -> None:
        unit = jit.render(name, constants, backend.target, tunables)
        path = jit.build_shared(unit, comm)
        self.name = name
        self.layout = unit.layout
        if comm is None:
            self._load(backend, path)
        else:
            together(comm, lambda: self._load(backend, path))

    def _load(self, backend: Backend, path: Path) -> None:
        module = backend.load(path, self.name)
        self.threads, self.smem_bytes, is_early = module.symbol_int32("cuep_launch", 3)
        self._is_early = bool(is_early)
        self._function = module.function(self.name)
        #: blocks that the device can hold at once; a kernel that waits for peers must not have more
        self.max_grid = self._function.max_grid(self.threads, self.smem_bytes)

    def launch(self, grid: int, record: Record, stream: Any) -> None:
        """Enqueue `grid` blocks with a copy of `record` as Params. Raises DeviceError if grid exceeds max_grid."""
        self._function.launch(grid, self.threads, self.smem_bytes, record, stream, is_early=self._is_early)
