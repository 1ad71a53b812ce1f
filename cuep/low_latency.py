"""Low-latency mode: which kernels run, with what, for dispatch and combine. Protocols: kernels_cu/README.md."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from cuep import layout
from cuep.arrays import View, allowed_dtypes
from cuep.backend import Array, Rows, Stream
from cuep.config import COMBINE_CODECS, DTYPE_BYTES, GroupConfig
from cuep.errors import ArgumentError, ArgumentTypeError
from cuep.launching import (
    CombineCall,
    KernelSpec,
    changed,
    elem_type,
    load_kernels,
    most_blocks,
    sent_row,
    set_combine,
    set_count,
    set_scales,
    threads_for,
)
from cuep.params import Constant, FastRecord

if TYPE_CHECKING:
    from cuep.group import Group
    from cuep.handle import Handle

_DISPATCH_REGIONS = ("rows", "headers", "flags", "counts", "totals", "done")
_COMBINE_REGIONS = ("rows", "grads", "flags", "totals", "done")
_OF_SOME_FORMS = ("scales", "row_idx", "recv_weights", "recv_topk_idx", "recv_topk_weights")  # null in the others
_LEAST_BLOCKS = 4  # with fewer no block shares a row
_OPS = ("dispatch", "combine")
_RECEIVED = ("tokens", "scales", "expert_counts", "src_rank_counts", "source", "total")


@dataclass
class HandleState:
    """Params of a handle's kernels, all but what changes from call to call."""

    dispatch: FastRecord
    combine: FastRecord
    recv_rows: Rows = (0, 0, 0, 0)  # that dispatch writes
    lease: None = None  # the arrays own their memory


class LowLatency:
    """The ll kernels of a group."""

    combine_buffers: None = None  #: rows are sent from wherever they lie

    def __init__(self, group: Group) -> None:
        cfg = group.cfg
        self._group = group
        _check_links(group)
        self._combine_shape = layout.combine_shape(cfg, group.num_ranks)
        is_rank_major = cfg.layout == "rank_major"
        shape: dict[str, Constant] = {
            "kNumRanks": group.num_ranks,
            "kNumExperts": cfg.num_experts,
            "kNumTopk": cfg.num_topk,
        }
        rows_out = sent_row(cfg) | {
            "kHasInPlace": cfg.in_place > 0,
            "kHasScaleColumns": cfg.num_scales > 0 and cfg.scale_layout == "column_major",
        }
        rows_home: dict[str, Constant] = {
            "kRowBytes": cfg.combine_row_bytes,
            "kCombineCodec": COMBINE_CODECS.index(cfg.combine_quant),
            "kSentBytes": cfg.combine_sent_row_bytes,
            "elem_t": elem_type(str(cfg.combine_dtype)),
        }
        shape |= {"kHasMask": cfg.mask, "kHasStats": cfg.arrival_stats}
        forms = {op: {"kIsRankMajor": is_rank_major, "kHasLineSlots": layout.uses_lines(cfg, op)} for op in _OPS}
        most_blocks = group.world.backend.num_processors  # more would take turns in waiting
        specs = [
            KernelSpec(
                op, layout.variant(cfg, op), shape | rows | forms[op], self._tunables(op, row_bytes), most_blocks
            )
            for op, rows, row_bytes in (
                ("dispatch", rows_out, cfg.sent_row_bytes),
                ("combine", rows_home, cfg.combine_row_bytes),
            )
        ]
        self._dispatch, self._combine = load_kernels(group, specs)
        self._refusal = self._records(None)
        if "expert_offsets" in group.workspace:
            group.workspace["expert_offsets"][...] = group.world.backend.asarray(self._expert_offsets())

    def attach(self, handle: Handle) -> HandleState:
        return self._records(handle)

    def detach(self, handle: Handle) -> None:
        handle.state = None

    def route(self, handle: Handle, stream: Stream) -> int:
        """Nothing runs, so there is no ticket: dispatch reads the routing, in stream order."""
        return 0

    def refuse_route(self, stream: Stream) -> None:
        """The peers' next operation on this routing is dispatch: that is what this rank refuses."""
        self._dispatch.refuse(self._refusal.dispatch, stream)

    def prepare_dispatch(self, handle: Handle, out: View | None) -> None:
        """Choose where rows go."""
        cfg, record, tokens = self._group.cfg, handle.state.dispatch, handle.arrays["tokens"]
        if out is None:
            begin, row_stride = handle.addresses["tokens"], handle.arrays["tokens"].strides[1]
        else:
            _check_rows(out, "out", tokens.shape, cfg.recv_dtype)
            begin, row_stride = out.address, out.strides[1]
        record["tokens"], record["tokens_stride"] = begin, row_stride
        handle.state.recv_rows = (begin, tokens.shape[0] * tokens.shape[1], row_stride, cfg.recv_row_bytes)

    def dispatch(
        self, handle: Handle, x: View, scales: View | None, out: View | None, stream: Stream, *, send_only: bool
    ) -> int:
        record = handle.state.dispatch
        idx, weights, count = handle.topk_idx, handle.topk_weights, handle.count
        if idx is not None:  # a new routing: the kernel reads the caller's arrays and keeps a copy
            record["topk_idx"] = idx.address
            record["is_int64"] = idx.dtype == "int64"
            record["topk_weights"] = 0 if weights is None else weights.address
        record["routing"] = handle.routing
        record["x"] = x.address
        record["x_stride"] = x.strides[0]
        set_scales(record, scales)
        record["is_send"], record["is_receive"] = True, not send_only
        set_count(record, handle, count)
        ticket = self._dispatch.launch(record, stream, handle.arrays, x, scales, out, idx, weights, count)
        if idx is not None and not stream.is_capturing():  # the copy serves the dispatches that follow
            record["topk_idx"] = handle.addresses["ids"]
            record["is_int64"] = False
            record["topk_weights"] = handle.addresses["weights"]
            handle.topk_idx = handle.topk_weights = handle.count = None
        return ticket

    def repeater(self, operation: str, handle: Handle) -> Callable[[Stream, tuple[Any, ...]], int]:
        """Makes the last dispatch or combine once more, on the same arrays: its Params are as that call left them."""
        kernel, record = self._dispatch, handle.state.dispatch
        if operation == "combine":
            kernel, record = self._combine, handle.state.combine
        return lambda stream, arrays: kernel.launch(record, stream, handle.arrays, *arrays)

    def undo_dispatch(self, handle: Handle) -> None:
        """The handle's newest dispatch did nothing. There is nothing to give back."""

    def refuse_dispatch(self, handle: Handle, stream: Stream) -> None:
        self._dispatch.refuse(handle.state.dispatch, stream, handle.arrays)

    def combine_buffer(self, handle: Handle, stream: Stream) -> Array | None:
        """There is none."""
        return None

    def learn_counts(self, handle: Handle) -> None:
        """The host needs none."""

    def check_expert_out(self, handle: Handle, expert_out: View) -> None:
        _check_rows(expert_out, "expert_out", self._combine_shape, str(self._group.cfg.combine_dtype))

    def row_weight_grads_shape(self, handle: Handle) -> tuple[int | None, ...]:
        cfg = self._group.cfg
        zones, rows, _ = self._combine_shape
        return (zones, rows, cfg.num_topk) if cfg.layout == "rank_major" else (zones, rows)

    def combine(self, handle: Handle, call: CombineCall, stream: Stream, *, send_only: bool) -> int:
        record = handle.state.combine
        set_combine(record, handle, call, call.expert_out.strides[1])
        if call.weights is not None:
            record["weights"] = call.weights.address
        elif "weights" in record.names:  # "per_rank" uses those that came with the rows
            record["weights"] = handle.addresses["weights"] if call.is_weighted else 0
        record["routing"] = handle.routing
        record["is_send"], record["is_receive"] = True, not send_only
        return self._combine.launch(record, stream, handle.arrays, *call.objects())

    def refuse_combine(self, handle: Handle, stream: Stream) -> None:
        self._combine.refuse(handle.state.combine, stream, handle.arrays)

    def complete(self, handle: Handle, stream: Stream, *kept: Any) -> int:
        """The receive phase of the handle's pending operation, with the Params of its send. kept: what it reads and
        writes beside the handle's own."""
        is_dispatch = handle.pending == "dispatch"
        kernel = self._dispatch if is_dispatch else self._combine
        record = handle.state.dispatch if is_dispatch else handle.state.combine
        set_count(record, handle)
        own = {"topk_idx": handle.addresses["ids"], "topk_weights": handle.addresses["weights"], "is_int64": False}
        with changed(record, is_send=False, is_receive=True, **(own if is_dispatch else {})):
            return kernel.launch(record, stream, handle.arrays, *kept)

    def received(self, handle: Handle) -> dict[str, Array]:
        fields = {name: handle.arrays[name] for name in _RECEIVED if name in handle.arrays}
        if "scales" in fields and self._group.cfg.scale_layout == "column_major":
            fields["scales"] = fields["scales"].transpose(0, 2, 1)[:, : self._combine_shape[1]]
        if self._group.cfg.layout == "expert_major":
            fields["expert_offsets"] = self._group.workspace["expert_offsets"]
        else:
            fields["topk_idx"] = handle.arrays["recv_topk_idx"]
            if handle.has_weights:
                fields["topk_weights"] = handle.arrays["recv_topk_weights"]
        return fields

    def _records(self, handle: Handle | None) -> HandleState:
        """Params for a handle, or (None) for refusing a call that has no handle."""
        group, cfg = self._group, self._group.cfg
        own = dict.fromkeys(_OF_SOME_FORMS, 0) | group.handle_values(handle)
        own |= {"max_tokens": cfg.max_tokens_per_rank, "num_banks": cfg.num_buffers}
        own["mask_offset"] = group.arena.offsets.get("mask", 0)
        own |= {"in_place_offset": -1, "ready_offset": group.arena.offsets.get("dispatch_ready", 0)}
        own["scales_stride"] = cfg.scale_columns * cfg.scale_bytes
        if handle is not None and handle.is_in_place:
            own["in_place_offset"] = group.in_place_offset(handle)
            own["scales_stride"] = cfg.sent_row_bytes
        own["arrivals"] = group.workspace_address("arrivals") if cfg.arrival_stats else 0
        own |= {
            "is_alone": cfg.num_sms is None,
            "is_global_ids": cfg.expert_ids == "global",
            "tokens_stride": cfg.recv_row_bytes,
        }
        offsets = group.arena.offsets
        dispatch = own | {f"{name}_offset": offsets.get(f"dispatch_{name}", 0) for name in _DISPATCH_REGIONS}
        combine = own | {f"{name}_offset": offsets[f"combine_{name}"] for name in _COMBINE_REGIONS}
        is_complete = handle is not None
        return HandleState(
            self._dispatch.record(dispatch, is_complete=is_complete),
            self._combine.record(combine, is_complete=is_complete),
        )

    def _tunables(self, op: str, row_bytes: int) -> dict[str, int]:
        """A thread handles pieces of 16 bytes, or lanes of lines."""
        cfg, on_cpu = self._group.cfg, self._group.world.backend.name == "cpu"
        if not layout.uses_lines(cfg, op):
            return {} if on_cpu else {"kNumThreads": threads_for(row_bytes // 16)}
        num_blocks = most_blocks(self._group)
        fewest = 2 if on_cpu else 1  # blocks are few there, but what teams do together must show
        parts = parts_of_rows(cfg, self._group.num_ranks, num_blocks, fewest)
        pieces = 8 * layout.num_lines(row_bytes)
        return {"kParts": parts} | ({} if on_cpu else {"kNumThreads": threads_for(-(-pieces // parts))})

    def _expert_offsets(self) -> Any:
        group = self._group
        rows = group.num_ranks * group.cfg.max_tokens_per_rank
        return (np.arange(group.num_local_experts + 1) * rows).astype(np.int32)


def _check_links(group: Group) -> None:
    """Raise ArgumentError, on all ranks, where rows would travel as lines over what may tear them (line.cuh)."""
    far = [pair for pair in group.world.backend.not_over_nvlink if set(pair) <= set(group.members)]
    for op in _OPS:
        if far and layout.uses_lines(group.cfg, op):
            raise ArgumentError(
                f"variants[{op!r}]={layout.variant(group.cfg, op)!r} is not allowed where NVLink does not connect the"
                f" GPUs, as of ranks {far[0][0]} and {far[0][1]}; allowed:"
                f" {layout.flag_variant(group.cfg, op)!r}"
            )


def parts_of_rows(cfg: GroupConfig, num_ranks: int, num_blocks: int, fewest: int = 1) -> int:
    """How many blocks share a row that travels as lines: 8 or 4 where that leaves every row that a rank receives blocks
    of its own, 2 where it leaves every token such, else `fewest`; 1 where there are hardly any blocks."""
    if num_blocks < _LEAST_BLOCKS:
        return 1
    tokens = cfg.max_tokens_per_rank
    rows = tokens * max(1, num_ranks - 1)
    return next((parts for parts, units in ((8, rows), (4, rows), (2, tokens)) if units * parts <= num_blocks), fewest)


def _check_rows(view: View, name: str, shape: tuple[int, ...], dtype: str) -> None:
    """[zones, rows, H] with one stride for all rows, each contiguous and 16-byte aligned."""
    allowed = allowed_dtypes(dtype)
    if view.dtype not in allowed:
        raise ArgumentTypeError(f"{name} has dtype {view.dtype}, allowed: {', '.join(allowed)}")
    if view.shape != shape:
        raise ArgumentError(f"{name} has shape {list(view.shape)}, allowed: {list(shape)}")
    zone_stride, row_stride, elem_stride = view.strides
    elem_bytes = DTYPE_BYTES.get(dtype, 1)
    is_even = shape[0] == 1 or zone_stride == shape[1] * row_stride
    is_row = elem_stride == elem_bytes and row_stride >= shape[2] * elem_bytes
    if not (is_even and is_row) or view.address % 16 or row_stride % 16:
        raise ArgumentError(
            f"{name} must have one stride for all rows, each contiguous and 16-byte aligned; "
            f"got strides {view.strides} bytes"
        )
