"""Low-latency mode: which kernels run, with what, for dispatch and combine. Protocols: kernels_cu/README.md."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from cuep import layout
from cuep.arrays import View
from cuep.backend import Array, Record, Stream
from cuep.errors import ArgumentError, ArgumentTypeError, OrderError
from cuep.launching import CombineCall, ModeKernel, address, elem_type, threads_for

if TYPE_CHECKING:
    from cuep.group import Group
    from cuep.handle import Handle

_REGIONS = {
    "dispatch": ("rows", "headers", "weights", "flags", "counts", "totals", "done"),
    "combine": ("rows", "grads", "flags", "totals", "done"),
}
_OF_SOME_FORMS = ("row_idx", "recv_weights", "recv_topk_idx", "recv_topk_weights")  # null in the others
_COUNT_IN_STATE = 36  # byte of HandleState::num_tokens
_OPTIONAL = ("bias", "row_weight_grads")
_RECEIVED = ("tokens", "expert_counts", "expert_offsets", "src_rank_counts", "source", "total")


@dataclass
class HandleState:
    """Params of a handle's kernels, all but what changes from call to call."""

    dispatch: Record
    combine: Record
    recv_range: tuple[int, int] = (0, 0)  # addresses between which dispatch writes rows
    lease: None = None  # the arrays own their memory


@dataclass
class _Banks:
    """Which sends of one kind of operation still hold a bank, by their number among the operations of that kind."""

    kernel: ModeKernel
    num_sent: int = 0
    pending: dict[int, tuple[int, Handle, tuple[Any, ...]]] = field(default_factory=dict)  # by the handle's serial

    def is_next_held(self, num_banks: int) -> bool:
        oldest = min((number for number, _, _ in self.pending.values()), default=self.num_sent + 1)
        return self.num_sent + 1 - oldest >= num_banks


class LowLatency:
    """The ll kernels of a group."""

    def __init__(self, group: Group) -> None:
        cfg = group.cfg
        self._group = group
        shape = {"kNumRanks": group.num_ranks, "kNumExperts": cfg.num_experts, "kNumTopk": cfg.num_topk}
        is_rank_major = cfg.layout == "rank_major"
        self._banks = {
            "dispatch": _Banks(
                ModeKernel(
                    group,
                    "dispatch",
                    "rank" if is_rank_major else "direct",
                    shape | {"kRowBytes": cfg.row_bytes},
                    self._tunables(cfg.row_bytes),
                )
            ),
            "combine": _Banks(
                ModeKernel(
                    group,
                    "combine",
                    "direct" if cfg.reduce == "exact" else "partial",
                    shape
                    | {
                        "kRowBytes": cfg.combine_row_bytes,
                        "kIsRankMajor": is_rank_major,
                        "elem_t": elem_type(str(cfg.combine_dtype)),
                    },
                    self._tunables(cfg.combine_row_bytes),
                )
            ),
        }
        self._refusal = self._records(None)

    def attach(self, handle: Handle) -> HandleState:
        if "expert_offsets" in handle.arrays:
            handle.arrays["expert_offsets"][...] = self._group.world.backend.asarray(self._expert_offsets())
        return self._records(handle)

    def detach(self, handle: Handle) -> None:
        """A send that was not completed is completed now: its bank must not stay taken."""
        for op, banks in self._banks.items():
            if handle.serial in banks.pending and not self._group.is_closed:
                self._receive(handle, op, self._group.fallback_stream())
        handle.state = None

    def route(self, handle: Handle, stream: Stream) -> None:
        """Nothing runs: dispatch reads the routing, in stream order."""

    def refuse_route(self, stream: Stream) -> None:
        """The peers' next operation on this routing is dispatch: that is what this rank refuses."""
        self._refuse("dispatch", self._refusal.dispatch, stream)

    def prepare_dispatch(self, handle: Handle, out: View | None) -> None:
        tokens = handle.arrays["tokens"]
        if out is not None:
            self._check_rows(out, "out", tokens.shape, self._group.cfg.dtype)
            begin, num_bytes = out.address, out.strides[1] * out.shape[0] * out.shape[1]
        else:
            begin, num_bytes = address(tokens), tokens.nbytes
        handle.state.recv_range = (begin, begin + num_bytes)

    def dispatch(self, handle: Handle, x: View, out: View | None, stream: Stream, *, send_only: bool = False) -> int:
        self._check_bank("dispatch")
        record = handle.state.dispatch
        idx, weights = handle.topk_idx, handle.topk_weights
        if idx is not None:  # a new routing: the kernel reads the caller's arrays and keeps a copy
            record["topk_idx"] = idx.address
            record["is_int64"] = idx.dtype == "int64"
            record["topk_weights"] = 0 if weights is None else weights.address
        record["x"] = x.address
        record["x_stride"] = x.strides[0]
        record["tokens"] = address(handle.arrays["tokens"]) if out is None else out.address
        record["tokens_stride"] = self._group.cfg.row_bytes if out is None else out.strides[1]
        record["num_tokens"] = handle.num_tokens
        _set_count(record, handle, handle.num_tokens_at)
        objects = (handle.arrays, x, out, idx, weights, handle.num_tokens_at)
        ticket = self._launch(handle, "dispatch", stream, objects, send_only=send_only)
        if idx is not None and not stream.is_capturing():  # the copy serves the dispatches that follow
            record["topk_idx"] = address(handle.arrays["ids"])
            record["is_int64"] = False
            record["topk_weights"] = address(handle.arrays["weights"])
            handle.topk_idx = handle.topk_weights = handle.num_tokens_at = None
        return ticket

    def refuse_dispatch(self, handle: Handle, stream: Stream) -> None:
        self._refuse("dispatch", handle.state.dispatch, stream, handle.arrays)

    def check_expert_out(self, handle: Handle, expert_out: View) -> None:
        self._check_rows(expert_out, "expert_out", handle.arrays["tokens"].shape, str(self._group.cfg.combine_dtype))

    def row_weight_grads_shape(self, handle: Handle) -> tuple[int, ...]:
        """One gradient per row of expert_out or, rank_major, one per row and k."""
        rows: tuple[int, ...] = handle.arrays["tokens"].shape[:2]
        return (rows[0] * rows[1], self._group.cfg.num_topk) if self._group.cfg.layout == "rank_major" else (
            rows[0] * rows[1],
        )

    def combine(self, handle: Handle, call: CombineCall, stream: Stream, *, send_only: bool = False) -> int:
        self._check_bank("combine")
        record = handle.state.combine
        record["expert_out"] = call.expert_out.address
        record["expert_out_stride"] = call.expert_out.strides[1]
        record["y"] = call.y.address
        record["y_stride"] = call.y.strides[0]
        record["num_tokens"] = handle.num_tokens
        weights = call.weights.address if call.weights else address(handle.arrays["weights"]) if call.is_weighted else 0
        grads = call.row_weight_grads
        _fill(
            record,
            weights=weights,  # "exact" reads weights, "per_rank" has those of dispatch
            is_weighted=call.is_weighted,
            bias=[bias.address for bias in call.bias] + [0] * (2 - len(call.bias)),
            bias_stride=[bias.strides[0] for bias in call.bias] + [0] * (2 - len(call.bias)),
            row_weight_grads=grads.address if grads else 0,
            weight_grads=address(handle.arrays["weight_grads"]) if grads else 0,
        )
        _set_count(record, handle, None)
        return self._launch(handle, "combine", stream, (handle.arrays, call), send_only=send_only)

    def refuse_combine(self, handle: Handle, stream: Stream) -> None:
        self._refuse("combine", handle.state.combine, stream, handle.arrays)

    def complete(self, handle: Handle, stream: Stream) -> int:
        """The receive phase of the handle's pending operation."""
        op = next(op for op, banks in self._banks.items() if handle.serial in banks.pending)
        return self._receive(handle, op, stream)

    def received(self, handle: Handle) -> dict[str, Array]:
        have = {name: handle.arrays[name] for name in _RECEIVED if name in handle.arrays}
        if self._group.cfg.layout == "rank_major":
            have["topk_idx"] = handle.arrays["recv_topk_idx"]
            if handle.has_weights:
                have["topk_weights"] = handle.arrays["recv_topk_weights"]
        return have

    def _launch(self, handle: Handle, op: str, stream: Stream, objects: tuple[Any, ...], *, send_only: bool) -> int:
        banks = self._banks[op]
        record = getattr(handle.state, op)
        record["is_send"], record["is_receive"] = True, not send_only
        ticket = banks.kernel.launch(record, stream, *objects)
        banks.num_sent += 1
        if send_only:
            banks.pending[handle.serial] = (banks.num_sent, handle, objects)
        return ticket

    def _receive(self, handle: Handle, op: str, stream: Stream) -> int:
        banks = self._banks[op]
        _, _, objects = banks.pending.pop(handle.serial)
        record = getattr(handle.state, op)
        record["is_send"], record["is_receive"] = False, True
        _set_count(record, handle, None)
        return banks.kernel.launch(record, stream, *objects)

    def _refuse(self, op: str, record: Record, stream: Stream, *objects: Any) -> None:
        """Where the bank is taken the peers' calls raise OrderError and send nothing; so does this one."""
        banks = self._banks[op]
        if banks.is_next_held(self._group.cfg.num_buffers):
            return
        record["is_send"] = record["is_receive"] = True
        banks.kernel.refuse(record, stream, *objects)
        banks.num_sent += 1

    def _check_bank(self, op: str) -> None:
        """Raise OrderError, on every rank alike, where waiting for the bank would be waiting for ourselves."""
        num_banks = self._group.cfg.num_buffers
        if self._banks[op].is_next_held(num_banks):
            raise OrderError(
                f"{op}: an earlier send_only {op} was not completed and holds the buffer that this one needs; "
                f"call its handle's complete() before {num_banks} more of them (num_buffers={num_banks})"
            )

    def _check_rows(self, view: View, name: str, shape: tuple[int, ...], dtype: str) -> None:
        """[zones, rows, H] whose rows are contiguous, 16-byte aligned and evenly apart."""
        if view.dtype != dtype:
            raise ArgumentTypeError(f"{name} has dtype {view.dtype}, allowed: {dtype}")
        if view.shape != shape:
            raise ArgumentError(f"{name} has shape {list(view.shape)}, allowed: {list(shape)}")
        zone, row, elem = view.strides
        is_even = shape[0] == 1 or zone == shape[1] * row
        is_row = elem == layout.dtype_of(dtype).itemsize and row >= shape[2] * elem
        if not (is_even and is_row) or view.address % 16 or row % 16:
            raise ArgumentError(
                f"{name} must have contiguous rows, 16-byte aligned and evenly apart, got strides {view.strides} bytes"
            )

    def _records(self, handle: Handle | None) -> HandleState:
        """Params for a handle, or (None) for refusing a call that has no handle."""
        group, cfg = self._group, self._group.cfg
        values = dict.fromkeys(_OF_SOME_FORMS, 0) | group.handle_values(handle)
        values |= {"max_tokens": cfg.max_tokens_per_rank, "num_banks": cfg.num_buffers}
        values |= {"is_global_ids": cfg.expert_ids == "global", "tokens_stride": cfg.row_bytes}
        records = {}
        for op, banks in self._banks.items():
            offsets = {f"{name}_offset": group.arena.offsets.get(f"{op}_{name}", 0) for name in _REGIONS[op]}
            records[op] = banks.kernel.record(values | offsets, is_complete=handle is not None)
        return HandleState(**records)

    def _tunables(self, row_bytes: int) -> dict[str, int]:
        on_cpu = self._group.world.backend.name == "cpu"
        return {} if on_cpu else {"kNumThreads": threads_for(row_bytes // 16)}

    def _expert_offsets(self) -> Any:
        group = self._group
        rows = group.num_ranks * group.cfg.max_tokens_per_rank
        return (np.arange(group.num_local_experts + 1) * rows).astype(np.int32)


def _fill(record: Record, **values: Any) -> None:
    """Set the fields that this variant's kernel has. One that it lacks must not be silently left out."""
    names = record.dtype.names or ()
    for name, value in values.items():
        if name in names:
            record[name] = value
        elif name in _OPTIONAL and np.any(value):
            raise ArgumentError(f"this variant of combine does not support it: its kernel has no Params::{name}")


def _set_count(record: Record, handle: Handle, callers: View | None) -> None:
    """Where the kernel finds the number of tokens: the caller's scalar, what dispatch made of it, or in num_tokens."""
    if callers is not None:
        record["num_tokens_at"], record["is_count_int64"] = callers.address, callers.dtype == "int64"
    else:
        in_state = address(handle.arrays["state"]) + _COUNT_IN_STATE
        record["num_tokens_at"], record["is_count_int64"] = in_state if handle.has_device_count else 0, False
