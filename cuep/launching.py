"""What both modes share: a kernel of a group, its records, and how many blocks it gets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from cuep import jit
from cuep.backend import Array, Record, Stream
from cuep.errors import ArgumentError
from cuep.kernel import Kernel
from cuep.params import Constant

if TYPE_CHECKING:
    from cuep.group import Group

_CPU_BLOCKS = 4  # two cores run four ranks: more blocks would only take turns
_ELEM_TYPES = {"bfloat16": "cuep::bf16_t", "float32": "float"}


def elem_type(dtype: str) -> str:
    """The C++ name of an element type."""
    return _ELEM_TYPES[dtype]


def threads_for(num_vecs: int, most: int = 512) -> int:
    """Threads of a block that moves rows of `num_vecs` 16-byte pieces: whole warps, as few idle as possible."""
    per_thread = -(-num_vecs // most)
    threads = -(-num_vecs // per_thread)
    return max(64, -(-threads // 32) * 32)


def address(array: Array) -> int:
    """Device address of a NumPy or CuPy array."""
    return int(array.ctypes.data if hasattr(array, "ctypes") else array.data.ptr)


class ModeKernel:
    """Kernel <mode>_<op>_<variant> of a group, with the group's choice of variant and number of blocks."""

    def __init__(
        self,
        group: Group,
        op: str,
        default_variant: str,
        constants: Mapping[str, Constant],
        tunables: Mapping[str, int],
        most_blocks: int | None = None,
    ) -> None:
        """most_blocks: what the kernel can use; None: as many as num_sms and the device allow."""
        self._group = group
        mode = group.cfg.mode
        variant = group.cfg.variants.get(op, default_variant)
        known = jit.variants(f"{mode}_{op}")
        if variant not in known:
            raise ArgumentError(f"variants[{op!r}]={variant!r} is not allowed; allowed: {known}")
        backend = group.world.backend
        comm = group.world.comm
        self._kernel = Kernel(backend, f"{mode}_{op}_{variant}", constants, comm, tunables)
        limits = [self._kernel.max_grid, group.cfg.num_sms, most_blocks, _CPU_BLOCKS if backend.name == "cpu" else None]
        self.grid = min(limit for limit in limits if limit is not None)

    def record(self, values: Mapping[str, Any]) -> Record:
        """Params filled by name; fields without a value are zero, to be set for each call."""
        record = self._kernel.layout.new()
        for name in record.dtype.names or ():
            if name in values:
                record[name] = values[name]
        return record

    def launch(self, record: Record, stream: Stream, *objects: Any) -> int:
        """Enqueue it; `objects` live until it has run. Returns the launch's ticket."""
        ticket = self._group.take_ticket(*objects)
        record["ticket"] = ticket
        self._kernel.launch(self.grid, record, stream)
        return ticket
