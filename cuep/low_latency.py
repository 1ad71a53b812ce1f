"""Low-latency mode: which kernels run, with what, for dispatch and combine. Protocols: kernels_cu/README.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from cuep.arrays import View
from cuep.backend import Array, Record, Stream
from cuep.errors import ArgumentError, ArgumentTypeError
from cuep.launching import ModeKernel, address, elem_type, threads_for

if TYPE_CHECKING:
    from cuep.group import Group
    from cuep.handle import Handle

_DISPATCH_REGIONS = ("rows", "headers", "flags", "counts", "totals", "done")
_COMBINE_REGIONS = ("rows", "flags", "totals", "done")


@dataclass
class HandleState:
    """Params of a handle's kernels, all but what changes from call to call."""

    dispatch: Record
    combine: Record
    recv_range: tuple[int, int] = (0, 0)  # addresses between which dispatch writes rows
    lease: None = None  # the arrays own their memory


class LowLatency:
    """The ll kernels of a group."""

    def __init__(self, group: Group) -> None:
        cfg = group.cfg
        self._group = group
        shape = {
            "kNumRanks": group.num_ranks,
            "kNumExperts": cfg.num_experts,
            "kNumTopk": cfg.num_topk,
            "kRowBytes": cfg.row_bytes,
        }
        tunables = {} if group.world.backend.name == "cpu" else {"kNumThreads": threads_for(cfg.row_bytes // 16)}
        self._dispatch = ModeKernel(group, "dispatch", "direct", shape, tunables)
        self._combine = ModeKernel(group, "combine", "direct", shape | {"elem_t": elem_type(cfg.dtype)}, tunables)
        self._refusal = self._records(None)

    def attach(self, handle: Handle) -> HandleState:
        handle.arrays["expert_offsets"][...] = self._group.world.backend.asarray(self._expert_offsets())
        state = self._records(handle)
        tokens = handle.arrays["tokens"]
        state.recv_range = (address(tokens), address(tokens) + tokens.nbytes)
        return state

    def detach(self, handle: Handle) -> None:
        handle.state = None

    def route(self, handle: Handle, stream: Stream) -> None:
        """Nothing runs: dispatch reads the routing, in stream order."""

    def refuse_route(self, stream: Stream) -> None:
        """The peers' next operation on this routing is dispatch: that is what this rank refuses."""
        self._dispatch.refuse(self._refusal.dispatch, stream)

    def prepare_dispatch(self, handle: Handle, out: View | None = None) -> None:
        """Nothing to reserve."""

    def dispatch(self, handle: Handle, x: View, out: View | None, stream: Stream) -> int:
        record = handle.state.dispatch
        idx, weights = handle.topk_idx, handle.topk_weights
        if idx is not None:  # a new routing: the kernel reads the caller's arrays and keeps a copy
            record["topk_idx"] = idx.address
            record["is_int64"] = idx.dtype == "int64"
            record["topk_weights"] = 0 if weights is None else weights.address
        record["x"] = x.address
        record["x_stride"] = x.strides[0]
        record["num_tokens"] = handle.num_tokens
        ticket = self._dispatch.launch(record, stream, handle.arrays, x, idx, weights)
        if idx is not None and not stream.is_capturing():  # the copy serves the dispatches that follow
            record["topk_idx"] = address(handle.arrays["ids"])
            record["is_int64"] = False
            handle.topk_idx = handle.topk_weights = None
        return ticket

    def refuse_dispatch(self, handle: Handle, stream: Stream) -> None:
        self._dispatch.refuse(handle.state.dispatch, stream, handle.arrays)

    def check_expert_out(self, handle: Handle, expert_out: View) -> None:
        group, cfg = self._group, self._group.cfg
        shape = (group.num_local_experts, group.num_ranks * cfg.max_tokens_per_rank, cfg.hidden)
        if expert_out.dtype != cfg.dtype:
            raise ArgumentTypeError(f"expert_out has dtype {expert_out.dtype}, allowed: {cfg.dtype}")
        if expert_out.shape != shape:
            raise ArgumentError(f"expert_out has shape {list(expert_out.shape)}, allowed: {list(shape)}")
        if not expert_out.is_contiguous or expert_out.address % 16:
            raise ArgumentError(
                f"expert_out must be C-contiguous and 16-byte aligned, got strides {expert_out.strides} bytes"
            )

    def combine(self, handle: Handle, call: Any, stream: Stream) -> int:
        expert_out = call.expert_out
        record = handle.state.combine
        record["expert_out"] = expert_out.address
        record["num_tokens"] = handle.num_tokens
        return self._combine.launch(record, stream, handle.arrays, expert_out)

    def refuse_combine(self, handle: Handle, stream: Stream) -> None:
        self._combine.refuse(handle.state.combine, stream, handle.arrays)

    def received(self, handle: Handle) -> dict[str, Array]:
        names = ("tokens", "expert_counts", "expert_offsets", "src_rank_counts", "source", "total")
        return {name: handle.arrays[name] for name in names}

    def _records(self, handle: Handle | None) -> HandleState:
        """Params for a handle, or (None) for refusing a call that has no handle."""
        group = self._group
        own = group.handle_values(handle)
        shared = {"max_tokens": group.cfg.max_tokens_per_rank, "num_banks": group.cfg.num_buffers}
        offsets = group.arena.offsets
        dispatch = own | shared | {f"{name}_offset": offsets[f"dispatch_{name}"] for name in _DISPATCH_REGIONS}
        combine = own | shared | {f"{name}_offset": offsets[f"combine_{name}"] for name in _COMBINE_REGIONS}
        is_complete = handle is not None
        return HandleState(
            self._dispatch.record(dispatch, is_complete=is_complete),
            self._combine.record(combine, is_complete=is_complete),
        )

    def _expert_offsets(self) -> Any:
        group = self._group
        rows = group.num_ranks * group.cfg.max_tokens_per_rank
        return (np.arange(group.num_local_experts + 1) * rows).astype(np.int32)
