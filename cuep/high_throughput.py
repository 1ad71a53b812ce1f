"""High-throughput mode: which kernels run, with what, for routing, dispatch and combine.

Protocols: kernels_cu/README.md.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cuep import layout
from cuep.arrays import View, check_rows
from cuep.backend import Array, Stream
from cuep.errors import ArgumentError, ArgumentTypeError
from cuep.launching import CombineCall, ModeKernel, elem_type
from cuep.params import FastRecord

if TYPE_CHECKING:
    from cuep.group import Group
    from cuep.handle import Handle

_ROUTE_BLOCKS = 8  # one places rows, one counts experts, the others copy
_SMEM_BYTES = 200 * 1024  # of a block, for rows in flight, where the GPU has that much
_STATIC_SMEM_BYTES = 2048  # left for everything else
_DISPATCH_REGIONS = ("tokens", "topk_idx", "topk_weights", "source")


@dataclass
class HandleState:
    """Params of a handle's kernels, all but what changes from call to call, and the receive buffer that it holds."""

    route: FastRecord
    dispatch: FastRecord
    combine: FastRecord
    recv_range: tuple[int, int] = (0, 0)  # addresses between which dispatch writes rows
    lease: Lease | None = None


class Lease:
    """One receive buffer, held until it is given back, or until nobody holds the lease: no handle and no Received."""

    def __init__(self, free_buffers: list[int]) -> None:
        self.buffer = free_buffers.pop(0)
        self.give_back = weakref.finalize(self, free_buffers.append, self.buffer)

    @property
    def is_held(self) -> bool:
        return self.give_back.alive


class HighThroughput:
    """The ht kernels of a group, and its receive buffers."""

    def __init__(self, group: Group) -> None:
        cfg = group.cfg
        self._group = group
        self._free_buffers = list(range(cfg.num_buffers))
        self._max_rows = layout.max_recv_rows(cfg, group.num_ranks)
        group.workspace["high_water"][...] = self._max_rows  # ids of a fresh buffer are no ids either
        ranks: dict[str, Any] = {"kNumRanks": group.num_ranks}
        routing = ranks | {"kNumExperts": cfg.num_experts, "kNumTopk": cfg.num_topk}
        rows = {"kRowBytes": cfg.row_bytes}
        max_smem_bytes = group.world.backend.max_smem_bytes
        self._route = ModeKernel(group, "route", "ballot", routing, {}, most_blocks=_ROUTE_BLOCKS)
        self._dispatch = ModeKernel(
            group, "dispatch", "bulk", routing | rows, _pipeline(cfg.row_bytes, "kNumWarps", 4, 3, max_smem_bytes)
        )
        self._combine = ModeKernel(
            group,
            "combine",
            "push",
            ranks | rows | {"elem_t": elem_type(cfg.dtype)},
            _pipeline(cfg.row_bytes, "kNumPushWarps", 7, 2, max_smem_bytes),
        )
        self._refusal = self._records(None)

    def attach(self, handle: Handle) -> HandleState:
        return self._records(handle)

    def detach(self, handle: Handle) -> None:
        if handle.state is not None and handle.state.lease is not None:
            handle.state.lease.give_back()
        handle.state = None

    def route(self, handle: Handle, stream: Stream) -> None:
        record, idx, weights = handle.state.route, handle.topk_idx, handle.topk_weights
        assert idx is not None
        record["topk_idx"] = idx.address
        record["is_int64"] = idx.dtype == "int64"
        record["topk_weights"] = 0 if weights is None else weights.address
        record["num_tokens"] = handle.num_tokens
        self._route.launch(record, stream, handle.arrays, idx, weights)
        handle.topk_idx = handle.topk_weights = None

    def refuse_route(self, stream: Stream) -> None:
        self._route.refuse(self._refusal.route, stream)

    def prepare_dispatch(self, handle: Handle, out: View | None) -> None:
        """Take a receive buffer at the handle's first dispatch; the handle keeps it until it is closed or dropped."""
        group, state = self._group, handle.state
        if state.lease is not None and state.lease.is_held:
            return
        if not self._free_buffers:
            raise ArgumentError(
                f"dispatch: all {group.cfg.num_buffers} receive buffers are held by other handles; close or drop "
                f"one, or make the group with num_buffers > {group.cfg.num_buffers}"
            )
        state.lease = Lease(self._free_buffers)
        num_bytes = self._max_rows * group.cfg.row_bytes
        first = group.memory.address + group.arena.offsets["recv_tokens"] + state.lease.buffer * num_bytes
        state.recv_range = (first, first + num_bytes)
        state.dispatch["buffer"] = state.lease.buffer

    def dispatch(self, handle: Handle, x: View, out: View | None, stream: Stream, *, send_only: bool) -> int:
        record = handle.state.dispatch
        record["x"] = x.address
        record["x_stride"] = x.strides[0]
        record["num_tokens"] = handle.num_tokens
        return self._dispatch.launch(record, stream, handle.arrays, x)

    def refuse_dispatch(self, handle: Handle, stream: Stream) -> None:
        self._dispatch.refuse(handle.state.dispatch, stream, handle.arrays)

    def check_expert_out(self, handle: Handle, expert_out: View) -> None:
        cfg = self._group.cfg
        if expert_out.dtype != cfg.dtype:
            raise ArgumentTypeError(f"expert_out has dtype {expert_out.dtype}, allowed: {cfg.dtype}")
        if len(expert_out.shape) != 2 or expert_out.shape[1] != cfg.hidden:
            raise ArgumentError(f"expert_out has shape {list(expert_out.shape)}, allowed: [rows, {cfg.hidden}]")
        check_rows(expert_out, "expert_out", cfg.row_bytes)

    def combine(self, handle: Handle, call: CombineCall, stream: Stream, *, send_only: bool) -> int:
        record = handle.state.combine
        expert_out = call.expert_out
        record["expert_out"] = expert_out.address
        record["expert_out_stride"] = expert_out.strides[0]
        record["num_tokens"] = handle.num_tokens
        record["num_rows"] = min(expert_out.shape[0], self._max_rows)
        return self._combine.launch(record, stream, handle.arrays, expert_out)

    def refuse_combine(self, handle: Handle, stream: Stream) -> None:
        self._combine.refuse(handle.state.combine, stream, handle.arrays)

    def row_weight_grads_shape(self, handle: Handle) -> tuple[int | None, ...]:
        return (None, self._group.cfg.num_topk) if self._group.cfg.layout == "flat" else (None,)

    def complete(self, handle: Handle, stream: Stream, sent: Any) -> int:
        raise NotImplementedError  # nothing of this mode is ever pending

    def received(self, handle: Handle) -> dict[str, Array]:
        group, cfg, buffer = self._group, self._group.cfg, handle.state.lease.buffer
        shapes = {
            "tokens": ((cfg.hidden,), cfg.dtype),
            "topk_idx": ((cfg.num_topk,), "int32"),
            "topk_weights": ((cfg.num_topk,), "float32"),
            "source": ((2,), "int32"),
        }
        fields = {
            name: group.region(f"recv_{name}")
            .view(layout.dtype_of(dtype))
            .reshape(cfg.num_buffers, self._max_rows, *shape)[buffer]
            for name, (shape, dtype) in shapes.items()
        }
        if not handle.has_weights:
            del fields["topk_weights"]
        return fields | {name: handle.arrays[name] for name in ("src_rank_counts", "expert_counts", "total")}

    def _records(self, handle: Handle | None) -> HandleState:
        """Params for a handle, or (None) for refusing a call that has no handle."""
        group = self._group
        offsets = group.arena.offsets
        own = group.handle_values(handle) | {"high_water": group.workspace_address("high_water")}
        own |= {"max_tokens": group.cfg.max_tokens_per_rank, "max_rows": self._max_rows}
        route = {f"{name}_offset": offsets[f"route_{name}"] for name in ("matrix", "counts")}
        dispatch = {f"{name}_offset": offsets[f"recv_{name}"] for name in _DISPATCH_REGIONS}
        dispatch |= {f"{name}_offset": offsets[f"dispatch_{name}"] for name in ("ready", "arrived")}
        combine = {f"{name}_offset": offsets[f"combine_{name}"] for name in ("rows", "flags", "totals", "done")}
        is_complete = handle is not None
        return HandleState(
            self._route.record(own | route, is_complete=is_complete),
            self._dispatch.record(own | dispatch, is_complete=is_complete),
            self._combine.record(own | combine, is_complete=is_complete),
        )


def _pipeline(row_bytes: int, warps_name: str, num_warps: int, num_stages: int, max_smem_bytes: int) -> dict[str, int]:
    """Tunables: how many warps of a block move rows, each with how many in flight, as far as shared memory goes.

    Empty where there is no shared memory to fill: the kernel's own defaults.
    """
    if max_smem_bytes == 0:
        return {}
    smem_bytes = min(_SMEM_BYTES, max_smem_bytes - _STATIC_SMEM_BYTES)
    fitting = smem_bytes // (row_bytes + 256)
    if fitting < 2:
        raise ArgumentError(
            f"hidden: a row of {row_bytes} bytes is too long for mode='ht', two must fit in {smem_bytes}"
        )
    stages = min(num_stages, fitting)
    return {warps_name: max(1, min(num_warps, fitting // stages)), "kNumStages": stages}
