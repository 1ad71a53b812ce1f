"""What both modes share: a kernel of a group, its records, and how many blocks it gets."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cuep import jit, layout
from cuep.arrays import View
from cuep.backend import Array, Stream
from cuep.config import GroupConfig
from cuep.errors import ArgumentError, CompileError
from cuep.kernel import Kernel
from cuep.params import Constant, FastRecord

if TYPE_CHECKING:
    from cuep.group import Group
    from cuep.handle import Handle

_PER_CALL = frozenset(
    "x x_stride x_scales x_scales_row_stride x_scales_stride routing topk_idx topk_weights is_int64 num_tokens"
    " num_tokens_at is_count_int64 out out_stride out_rows buffer expert_out expert_out_stride num_rows weights"
    " is_weighted bias bias_stride row_weight_grads weight_grads y y_stride is_send is_receive is_refused"
    " is_copied num_copied ticket".split()
)
_ELEM_TYPES = {"bfloat16": "cuep::bf16_t", "float16": "cuep::fp16_t", "float32": "float"}


@dataclass(frozen=True)
class CombineCall:
    """The checked arguments of one combine."""

    expert_out: View
    y: View
    weights: View | None = None  # given with the call
    is_weighted: bool = True  # False: every weight counts as 1
    bias: tuple[View, ...] = ()
    row_weight_grads: View | None = None

    def objects(self) -> tuple[View | None, ...]:
        """What must stay alive until the kernel has run."""
        return (self.expert_out, self.y, self.weights, *self.bias, self.row_weight_grads)


def set_count(record: FastRecord, handle: Handle, callers: View | None = None) -> None:
    """Where the kernel finds the number of tokens: the caller's scalar, what a kernel made of it, or in num_tokens."""
    record["num_tokens"] = handle.num_tokens
    if callers is not None:
        record["num_tokens_at"] = callers.address
        record["is_count_int64"] = callers.dtype == "int64"
    else:
        in_state = handle.addresses["state"] + layout.STATE_NUM_TOKENS
        record["num_tokens_at"] = in_state if handle.has_device_count else 0
        record["is_count_int64"] = False


def given_address(view: View | None, handle: Handle) -> int:
    """For kernels, to which 0 says that nothing was given. Arrays without elements may have no address, but are given:
    any other stands for it."""
    return 0 if view is None else view.address or handle.addresses["state"]


def set_combine(record: FastRecord, handle: Handle, call: CombineCall, row_stride: int) -> None:
    """What every combine kernel is told. row_stride: bytes between the rows of expert_out."""
    record["expert_out"] = call.expert_out.address
    record["expert_out_stride"] = row_stride
    record["y"] = call.y.address
    record["y_stride"] = call.y.strides[0]
    set_count(record, handle)
    grads = call.row_weight_grads
    optional = {
        "is_weighted": call.is_weighted,
        "bias": _pair([bias.address for bias in call.bias]),
        "bias_stride": _pair([bias.strides[0] for bias in call.bias]),
        "row_weight_grads": given_address(grads, handle),
        "weight_grads": 0 if grads is None else handle.addresses["weight_grads"],
    }
    for name, value in optional.items():
        if name in record.names:
            record[name] = value


def check_takes(record: FastRecord, op: str, **options: bool) -> None:
    """ArgumentError if the kernel of `op` has no Params field for an option that is used."""
    for name, is_used in options.items():
        if is_used and name not in record.names:
            raise ArgumentError(f"{op}: the variant of the kernel that this group has (variants=) does not take {name}")


def _pair(values: list[int]) -> tuple[int, int]:
    """Of the two biases; 0 where there is none."""
    first, second, *_ = (*values, 0, 0)
    return first, second


def elem_type(dtype: str) -> str:
    """The C++ name of an element type."""
    return _ELEM_TYPES[dtype]


def sent_row(cfg: GroupConfig) -> dict[str, Constant]:
    """Constants of a dispatch kernel about its rows: what they are and become (sent_row.cuh)."""
    return {
        "kRowBytes": cfg.sent_row_bytes,
        "kSrcBytes": cfg.row_bytes,
        "kTokenBytes": cfg.recv_row_bytes,
        "kQuant": cfg.quantised_scale_bytes,
        "kNumScales": cfg.scale_columns,
        "kScaleBytes": cfg.scale_bytes,
        "src_t": elem_type(cfg.dtype if cfg.quantised_scale_bytes else "bfloat16"),  # matters where it is quantised
    }


def set_scales(record: FastRecord, scales: View | None) -> None:
    """Where dispatch finds the caller's scales, if there are any."""
    if scales is not None:
        record["x_scales"] = scales.address
        record["x_scales_row_stride"], record["x_scales_stride"] = scales.strides


def threads_for(num_vecs: int, most: int = 512) -> int:
    """Threads of a block that moves rows of `num_vecs` 16-byte pieces: whole warps, as few idle as possible."""
    per_thread = -(-num_vecs // most)
    threads = -(-num_vecs // per_thread)
    return max(64, -(-threads // 32) * 32)


def most_blocks(group: Group) -> int:
    """That a kernel of the group may have: one for each multiprocessor, or GroupConfig.num_sms."""
    num_processors = group.world.backend.num_processors
    return min(group.cfg.num_sms or num_processors, num_processors)


def address(array: Array) -> int:
    """Device address of a NumPy or CuPy array."""
    return int(array.ctypes.data if hasattr(array, "ctypes") else array.data.ptr)


@dataclass(frozen=True)
class KernelSpec:
    """What a mode asks for: an operation's kernel, by its variant unless the group's settings name another."""

    op: str
    variant: str
    constants: Mapping[str, Constant]
    tunables: Mapping[str, int]
    most_blocks: int | None = None  # what the kernel can use; None: as many as num_sms and the device allow


def load_kernels(group: Group, specs: Sequence[KernelSpec]) -> list[ModeKernel]:
    """The kernels of a group. Collective, where the group compiles together: the ranks share out what is to compile."""
    backend, comm = group.world.backend, group.comm
    chosen = []
    for spec in specs:
        name = _kernel_name(group, spec)
        known = jit.tunables(name)  # a variant may have others
        chosen.append((name, spec.constants, {key: value for key, value in spec.tunables.items() if key in known}))
    if comm is not None:
        units = [jit.render(name, constants, backend.target, tunables) for name, constants, tunables in chosen]
        jit.share_out(units, comm)
    kernels = [Kernel(backend, name, constants, comm, tunables) for name, constants, tunables in chosen]
    return [ModeKernel(group, kernel, spec.most_blocks) for kernel, spec in zip(kernels, specs, strict=True)]


def _kernel_name(group: Group, spec: KernelSpec) -> str:
    mode, form = group.cfg.mode, group.cfg.settings()
    variant = group.cfg.variants.get(spec.op, spec.variant)
    known = jit.variants(f"{mode}_{spec.op}", form)
    if variant not in known:
        names = ("mode", "layout", "reduce", *(("combine_quant",) if form["combine_quant"] else ()))
        where = ", ".join(f"{name}={form[name]!r}" for name in names)
        raise ArgumentError(f"variants[{spec.op!r}]={variant!r} is not allowed; allowed with {where}: {known}")
    return f"{mode}_{spec.op}_{variant}"


class ModeKernel:
    """A kernel of a group, with the group's choice of how many blocks it gets."""

    def __init__(self, group: Group, kernel: Kernel, most_blocks: int | None) -> None:
        self._group = group
        self._kernel = kernel
        backend = group.world.backend
        most = backend.num_processors if backend.name == "cpu" else None
        limits = [kernel.max_grid, group.cfg.num_sms, most_blocks, most]
        self.grid = min(limit for limit in limits if limit is not None)

    def record(self, values: Mapping[str, Any], *, is_complete: bool) -> FastRecord:
        """Params filled by name. What is set for each call stays zero; so does all else where not `is_complete`.

        Raises:
            CompileError: a field that has no value.
        """
        record = FastRecord(self._kernel.layout.new())
        for name in record.names:
            if name in values:
                record[name] = values[name]
            elif is_complete and name not in _PER_CALL:
                known = ", ".join(sorted({*values, *_PER_CALL}))
                raise CompileError(f"kernel {self._kernel.name}: Params::{name} has no value; there are: {known}")
        return record

    def launch(self, record: FastRecord, stream: Stream, *objects: Any, grid: int | None = None) -> int:
        """Enqueue it; `objects` live until it has run. grid: None = all blocks. Returns the launch's ticket."""
        ticket = self._group.take_ticket(*objects)
        record["ticket"] = ticket
        self._kernel.launch(grid or self.grid, record, stream)
        return ticket

    def refuse(self, record: FastRecord, stream: Stream, *objects: Any) -> None:
        """Enqueue this rank's part as one that it refuses: no tokens, and a word that tells the peers."""
        self._group.go_on_at(stream)  # which may be one that the call did not get to choose
        with changed(record, num_tokens=0, num_tokens_at=0, is_send=True, is_receive=True, is_refused=True):
            self.launch(record, stream, *objects)


@contextmanager
def changed(record: FastRecord, **values: Any) -> Iterator[None]:
    """Fields of a record set for one launch."""
    names = [name for name in values if name in record.names]
    before = {name: record[name] for name in names}
    for name in names:
        record[name] = values[name]
    try:
        yield
    finally:
        for name in names:
            record[name] = before[name]
