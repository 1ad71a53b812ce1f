"""High-throughput mode: which kernels run, with what, for routing, dispatch and combine.

Protocols: kernels_cu/README.md.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cuep import layout
from cuep.arrays import View, allowed_dtypes, check_rows
from cuep.backend import Array, Rows, Stream
from cuep.copies import Counts, RowCopies, RowCounts
from cuep.errors import ArgumentError, ArgumentTypeError
from cuep.launching import (
    CombineCall,
    KernelSpec,
    changed,
    elem_type,
    given_address,
    load_kernels,
    most_blocks,
    sent_row,
    set_combine,
    set_count,
    set_scales,
)
from cuep.leases import CombineBuffers, Hold, Lease
from cuep.params import Constant, FastRecord

if TYPE_CHECKING:
    from cuep.group import Group
    from cuep.handle import Handle

_ROUTE_BLOCKS = 8  # one places rows, one counts experts, the others copy
_SMEM_BYTES = 200 * 1024  # of a block, for rows in flight, where the GPU has that much
_STATIC_SMEM_BYTES = 2048  # left for everything else
_SOME_BLOCKS = 64  # up to so many, blocks are the limit: flat dispatch gives rows by turns; with more, it is links
_PIECE_BYTES = 3584  # of a row that a combine kernel moves in pieces
_FEW_BLOCKS = 24  # up to so many are too few to fill the links unless flat combine keeps more rows on their way
_RECV_FIELDS = ("topk_idx", "topk_weights", "source")  # of a receive buffer (flat), beside rows


@dataclass
class HandleState:
    """Params of a handle's kernels, all but what changes from call to call, and the buffers that it holds."""

    route: FastRecord
    dispatch: FastRecord
    combine: FastRecord
    recv_rows: Rows = (0, 0, 0, 0)  # that dispatch writes
    lease: Lease | None = None
    first_use: int | None = None  # ticket of the first dispatch that was launched with the lease
    last_use: int | None = None  # ticket of the newest dispatch of its routing
    is_captured: bool = False  # each replay of a graph receives into that buffer
    is_out: bool = False  # rows of the newest dispatch are in the caller's own array
    hold: Hold = field(default_factory=Hold)  # on combine buffers
    row_counts: RowCounts | None = None  # where the host copies rows
    counts: Counts = (0,)  # of the call that is being made


class HighThroughput:
    """The ht kernels of a group, and its receive buffers."""

    def __init__(self, group: Group) -> None:
        cfg = group.cfg
        self._group = group
        self._is_flat = cfg.layout == "flat"
        self._free_buffers = list(range(cfg.num_buffers))
        self._max_rows = layout.max_recv_rows(cfg, group.num_ranks)
        self.combine_buffers: CombineBuffers | None = None  #: where combine pulls
        if layout.is_pulled(cfg):
            first, row_bytes = group.memory.address + group.arena.offsets["combine_rows"], cfg.combine_row_bytes
            memory = (int(first), cfg.num_buffers * self._max_rows, row_bytes, row_bytes)
            self.combine_buffers = CombineBuffers(memory, self._max_rows, has_peers=group.num_ranks > 1)
        transports = {op: layout.transport(cfg, op) for op in ("dispatch", "combine")}
        self._copied = {op for op, transport in transports.items() if transport == "copy"}
        self._copies = RowCopies(group) if self._copied else None
        group.workspace["high_water"][...] = self._max_rows  # ids of a fresh buffer are no ids either
        routing: dict[str, Constant] = {
            "kNumRanks": group.num_ranks,
            "kNumExperts": cfg.num_experts,
            "kNumTopk": cfg.num_topk,
        }
        sent = routing | sent_row(cfg)
        returned = routing | {"kRowBytes": cfg.combine_row_bytes, "elem_t": elem_type(str(cfg.combine_dtype))}
        for op, constants in (("dispatch", sent), ("combine", returned)):
            constants |= {"kTransport": layout.TRANSPORTS.index(transports[op]), "kNumParts": layout.COPY_PARTS}
        smem_bytes = group.world.backend.max_smem_bytes
        room = max(cfg.row_bytes, cfg.sent_row_bytes) + cfg.num_scales * cfg.quantised_scale_bytes
        out = row_pipeline(room, "kNumWarps", 6, 2, smem_bytes)
        if self._is_flat:
            sent["kTakesTurns"] = most_blocks(group) <= _SOME_BLOCKS
        in_pieces = not self._is_flat or most_blocks(group) <= _FEW_BLOCKS
        piece, num_ahead = (_PIECE_BYTES, 8) if in_pieces else (cfg.combine_row_bytes, 2)
        num_warps, sums = 7, {}
        if not self._is_flat and most_blocks(group) <= _SOME_BLOCKS:
            num_warps, num_ahead, sums = 11, 5, {"kNumSumWarps": 4}
        home = row_pipeline(min(cfg.combine_row_bytes, piece), "kNumPushWarps", num_warps, num_ahead, smem_bytes)
        if home:  # else the kernels' own defaults
            home |= {"kNumTellWarps": int(in_pieces), "kMostPieceBytes": piece} | sums
        self._route, self._dispatch, self._combine = load_kernels(
            group,
            [
                KernelSpec("route", layout.ht_variant(cfg, "route"), routing, {}, _ROUTE_BLOCKS),
                KernelSpec("dispatch", layout.ht_variant(cfg, "dispatch"), sent, out),
                KernelSpec("combine", layout.ht_variant(cfg, "combine"), returned, home, self._combine_blocks()),
            ],
        )
        self._refusal = self._records(None)

    def _combine_blocks(self) -> int | None:
        """Copies between ranks that share a GPU are made by multiprocessors, which the kernel must leave some of."""
        backend = self._group.world.backend
        return max(1, backend.num_processors // 2) if "combine" in self._copied and backend.is_shared else None

    def attach(self, handle: Handle) -> HandleState:
        state, group = self._records(handle), self._group
        if self._copies is not None and group.num_ranks > 1:
            most_rows = (group.cfg.max_tokens_per_rank, self._max_rows)
            state.row_counts = RowCounts(group.world.backend, handle.addresses["recv_base"], group.num_ranks, most_rows)
        return state

    def detach(self, handle: Handle) -> None:
        state = handle.state
        if state is not None and state.lease is not None:
            state.lease.give_back()
        if state is not None and self.combine_buffers is not None:
            self.combine_buffers.give_back(state.hold)
        handle.state = None

    def route(self, handle: Handle, stream: Stream) -> int:
        record, idx, weights = handle.state.route, handle.topk_idx, handle.topk_weights
        assert idx is not None
        record["topk_idx"] = idx.address
        record["is_int64"] = idx.dtype == "int64"
        record["topk_weights"] = 0 if weights is None else weights.address
        set_count(record, handle, handle.count)
        ticket = self._route.launch(record, stream, handle.arrays, idx, weights, handle.count)
        handle.topk_idx = handle.topk_weights = handle.count = None
        handle.state.last_use = None
        counts = handle.state.row_counts
        if counts is not None:
            counts.ask(stream)
            self._group.take_ticket(counts)  # it lives until the launch that comes next is over
        return ticket

    def refuse_route(self, stream: Stream) -> None:
        self._route.refuse(self._refusal.route, stream)

    def prepare_dispatch(self, handle: Handle, out: View | None) -> None:
        """Take a receive buffer unless the handle has one. It keeps it until Received.release(), close() or a dispatch
        with `out`, or until nobody holds what it received.

        Raises:
            ArgumentError, ArgumentTypeError: `out` does not fit, or other handles hold all buffers.
        """
        group, state = self._group, handle.state
        self._wait_for_counts(handle, "dispatch")
        if out is not None:
            self._check_rows(out, "out", group.cfg.recv_dtype, group.cfg.columns, group.cfg.recv_row_bytes)
        if state.lease is None or not state.lease.is_held:
            if not self._free_buffers:
                raise ArgumentError(
                    f"dispatch: all {group.cfg.num_buffers} receive buffers are held by other handles; release, close"
                    f" or drop one, or make the group with num_buffers > {group.cfg.num_buffers}"
                )
            state.lease = Lease(self._free_buffers)
            state.first_use, state.is_captured = None, False
            num_bytes = self._max_rows * group.cfg.sent_row_bytes
            first = group.memory.address + group.arena.offsets["recv_tokens"] + state.lease.buffer * num_bytes
            state.recv_rows = (first, self._max_rows, group.cfg.sent_row_bytes, group.cfg.sent_row_bytes)
            state.dispatch["buffer"] = state.lease.buffer

    def dispatch(
        self, handle: Handle, x: View, scales: View | None, out: View | None, stream: Stream, *, send_only: bool
    ) -> int:
        state, record = handle.state, handle.state.dispatch
        record["x"] = x.address
        record["x_stride"] = x.strides[0]
        set_scales(record, scales)
        record["out"] = given_address(out, handle)
        record["out_stride"] = 0 if out is None else out.strides[0]
        record["out_rows"] = 0 if out is None else out.shape[0]
        set_count(record, handle)
        state.is_out = out is not None
        if "dispatch" in self._copied:
            ticket = self._dispatch_by_copies(handle, stream, x, scales, out)
        else:
            ticket = self._dispatch.launch(record, stream, handle.arrays, x, scales, out)
        state.first_use, state.last_use = ticket if state.first_use is None else state.first_use, ticket
        state.is_captured = state.is_captured or stream.is_capturing()
        if out is not None and not state.is_captured:
            self._drop_lease(handle)
        return ticket

    def _dispatch_by_copies(
        self, handle: Handle, stream: Stream, x: View, scales: View | None, out: View | None
    ) -> int:
        assert self._copies is not None
        record = handle.state.dispatch
        counts = _set_copied(record, handle, self._max_rows if out is None else out.shape[0])
        places, sides, ends = self._where_received(handle, out), self._copies.sides(stream), []
        for part in range(layout.COPY_PARTS):
            with changed(record, first_part=part, end_part=part + 1):
                self._dispatch.launch(record, stream)
            ends += self._copies.fetch(stream, sides, part, counts, places)
        for end in ends:
            stream.wait(end)
        with changed(record, first_part=layout.COPY_PARTS):
            grid = 1 if out is None else None  # all blocks bring what lies beside rows
            return self._dispatch.launch(record, stream, handle.arrays, x, scales, out, grid=grid)

    def _where_received(self, handle: Handle, out: View | None) -> list[tuple[Rows, int]]:
        """Rows, or values and scales of them, and where in a row these begin."""
        cfg = self._group.cfg
        if out is None:
            return [(handle.state.recv_rows, 0)]
        parts = [((out.address, out.shape[0], out.strides[0], cfg.recv_row_bytes), 0)]
        if cfg.num_scales:
            row_bytes = cfg.scale_columns * cfg.scale_bytes
            parts.append(((handle.addresses["out_scales"], out.shape[0], row_bytes, row_bytes), cfg.recv_row_bytes))
        return parts

    def repeater(self, operation: str, handle: Handle) -> None:
        """There is none: each dispatch may take another receive buffer."""

    def refuse_dispatch(self, handle: Handle, stream: Stream) -> None:
        self._dispatch.refuse(handle.state.dispatch, stream, handle.arrays)
        if handle.state.first_use is None:  # it may have been taken for this very call
            self._drop_lease(handle)

    def undo_dispatch(self, handle: Handle) -> None:
        """The newest dispatch of its routing, if any, did nothing: a buffer that was taken for it is empty."""
        state = handle.state
        if state.last_use is not None and state.first_use == state.last_use and not state.is_captured:
            self._drop_lease(handle)

    def learn_counts(self, handle: Handle) -> None:
        """When the device is idle: the host may need to know of the routing in a capture."""
        if handle.state.row_counts is not None:
            handle.state.row_counts.know(self._group.world.backend.to_numpy(handle.arrays["recv_base"]))

    def _wait_for_counts(self, handle: Handle, op: str) -> None:
        """Waits for the routing, if the host copies rows in this operation."""
        counts, stream = handle.state.row_counts, self._group.call_stream
        if op in self._copied and counts is not None and stream is not None:
            handle.state.counts = counts.get(stream)
            self._group.begin()  # the wait may have ended in a timeout

    def check_expert_out(self, handle: Handle, expert_out: View) -> None:
        self._wait_for_counts(handle, "combine")
        cfg = self._group.cfg
        self._check_rows(expert_out, "expert_out", str(cfg.combine_dtype), cfg.hidden, cfg.combine_row_bytes)
        if self.combine_buffers is not None:
            self.combine_buffers.find(handle.state.hold, expert_out)

    def combine_buffer(self, handle: Handle, stream: Stream) -> Array | None:
        """Symmetric memory for expert_out, which the handle holds until its next combine; None: the mode has none.

        Raises:
            ArgumentError: other handles hold all.
        """
        if self.combine_buffers is None:
            return None
        number = self.combine_buffers.ask(handle.state.hold, is_capturing=stream.is_capturing())
        group = self._group
        shape, dtype = layout.combine_buffer(group.cfg, group.num_ranks)
        rows = group.region("combine_rows").view(group.world.backend.array_dtype(layout.dtype_of(dtype)))
        buffers: Array = rows.reshape(group.cfg.num_buffers, *shape)
        return buffers[number]

    def row_weight_grads_shape(self, handle: Handle) -> tuple[int | None, ...]:
        """Of combine's row_weight_grads; None: at least as many as rows were received."""
        return (None, self._group.cfg.num_topk) if self._is_flat else (None,)

    def combine(self, handle: Handle, call: CombineCall, stream: Stream, *, send_only: bool) -> int:
        record, grads = handle.state.combine, call.row_weight_grads
        set_combine(record, handle, call, call.expert_out.strides[0])
        rows = min(self._max_rows, call.expert_out.shape[0])
        record["num_rows"] = rows if grads is None else min(rows, grads.shape[0])
        if "combine" in self._copied:
            return self._combine_by_copies(handle, call, stream)
        if self.combine_buffers is not None:
            buffer, record["is_copied"] = self.combine_buffers.use(
                handle.state.hold, call.expert_out, is_capturing=stream.is_capturing()
            )
            record["buffer"] = buffer or 0
        return self._combine.launch(record, stream, handle.arrays, *call.objects())

    def _combine_by_copies(self, handle: Handle, call: CombineCall, stream: Stream) -> int:
        assert self._copies is not None
        record = handle.state.combine
        counts = _set_copied(record, handle, record["num_rows"])
        with changed(record, is_send=True):
            self._combine.launch(record, stream, grid=1)
        ends = self._copies.send(stream, call, counts)
        with changed(record, is_receive=True):
            ticket = self._combine.launch(record, stream)
        for end in ends:
            stream.wait(end)
        self._group.take_ticket(handle.arrays, *call.objects())  # the kernel may be over before the copies are
        return ticket

    def refuse_combine(self, handle: Handle, stream: Stream) -> None:
        self._combine.refuse(handle.state.combine, stream, handle.arrays)

    def complete(self, handle: Handle, stream: Stream, *kept: Any) -> int:
        raise NotImplementedError  # nothing of this mode is ever pending

    def received(self, handle: Handle) -> dict[str, Array]:
        """Of the newest dispatch; without "tokens" where rows are in the caller's own array."""
        names = ["src_rank_counts", "expert_counts", "total"]
        names += [] if self._is_flat else ["expert_offsets", "source"]
        fields = {name: handle.arrays[name] for name in names}
        if not self._is_flat:
            fields["topk_weights"] = handle.arrays["row_weights"]
        if handle.state.is_out:
            if self._is_flat:
                fields |= {name: handle.arrays[f"out_{name}"] for name in _RECV_FIELDS}
            if "out_scales" in handle.arrays:
                fields["scales"] = handle.arrays["out_scales"]
        else:
            buffer = handle.state.lease.buffer
            fields |= self._received_rows(buffer)
            if self._is_flat:
                fields |= {name: self._received_region(name, buffer) for name in _RECV_FIELDS}
        if not handle.has_weights:
            fields.pop("topk_weights", None)
        return fields

    def _received_rows(self, buffer: int) -> dict[str, Array]:
        rows = self._group.region("recv_tokens").reshape(self._group.cfg.num_buffers, self._max_rows, -1)
        return self._group.parts_of_rows(rows[buffer])

    def _received_region(self, name: str, buffer: int) -> Array:
        group, cfg = self._group, self._group.cfg
        shape, dtype = {
            "topk_idx": ((cfg.num_topk,), "int32"),
            "topk_weights": ((cfg.num_topk,), "float32"),
            "source": ((2,), "int32"),
        }[name]
        rows = group.region(f"recv_{name}").view(layout.dtype_of(dtype))
        return rows.reshape(cfg.num_buffers, self._max_rows, *shape)[buffer]

    def _check_rows(self, rows: View, name: str, dtype: str, columns: int, row_bytes: int) -> None:
        allowed = allowed_dtypes(dtype)
        if rows.dtype not in allowed:
            raise ArgumentTypeError(f"{name} has dtype {rows.dtype}, allowed: {', '.join(allowed)}")
        if len(rows.shape) != 2 or rows.shape[1] != columns:
            raise ArgumentError(f"{name} has shape {list(rows.shape)}, allowed: [rows, {columns}]")
        check_rows(rows, name, row_bytes)

    def _drop_lease(self, handle: Handle) -> None:
        state = handle.state
        if state.lease is not None:
            state.lease.give_back()
            state.lease, state.recv_rows, state.first_use = None, (0, 0, 0, 0), None

    def _records(self, handle: Handle | None) -> HandleState:
        """Params for a handle, or (None) for refusing a call that has no handle."""
        group = self._group
        offsets = group.arena.offsets
        own = group.handle_values(handle) | {"high_water": group.workspace_address("high_water")}
        cfg = group.cfg
        own |= {"max_tokens": cfg.max_tokens_per_rank, "max_rows": self._max_rows, "alignment": cfg.alignment}
        own = {"out_scales": 0} | own  # where rows have none
        own |= {"first_part": 0, "end_part": layout.COPY_PARTS + 1}  # where nothing else is said: all
        own |= {"is_drop": cfg.overflow == "drop", "is_global_ids": cfg.expert_ids == "global"}
        own["is_padding_zeroed"] = cfg.zero_padding
        recv = {f"{name.removeprefix('recv_')}_offset": at for name, at in offsets.items() if name.startswith("recv_")}
        route, dispatch, combine = (
            {f"{name.removeprefix(op)}_offset": at for name, at in offsets.items() if name.startswith(op)}
            for op in ("route_", "dispatch_", "combine_")
        )
        is_complete = handle is not None
        return HandleState(
            self._route.record(own | route, is_complete=is_complete),
            self._dispatch.record(own | recv | dispatch, is_complete=is_complete),
            self._combine.record(own | combine, is_complete=is_complete),
        )


def _set_copied(record: FastRecord, handle: Handle, num_rows: int) -> Counts:
    """How many rows the host copies for each rank, of or into an array of so many: none where it has too few, which the
    kernel refuses."""
    counts: Counts = handle.state.counts
    if sum(counts) > num_rows:
        counts = (0,) * len(counts)
    record["num_copied"] = counts
    return counts


def row_pipeline(
    row_bytes: int, warps_name: str, num_warps: int, num_stages: int, max_smem_bytes: int
) -> dict[str, int]:
    """Tunables: how many warps of a block move rows, each with how many in flight, as far as shared memory goes.

    Empty where there is no shared memory to fill: the kernel's own defaults.
    """
    if max_smem_bytes == 0:
        return {}
    smem_bytes = min(_SMEM_BYTES, max_smem_bytes - _STATIC_SMEM_BYTES)
    fitting = smem_bytes // (-(-row_bytes // 128) * 128 + 8)  # RowPipe
    if fitting < 2:  # a row is loaded while the one before it is stored
        raise ArgumentError(
            f"hidden: a row of {row_bytes} bytes is too long for mode='ht', two must fit in {smem_bytes}"
        )
    stages = min(num_stages, fitting)
    return {warps_name: min(num_warps, fitting // stages), "kNumStages": stages}
