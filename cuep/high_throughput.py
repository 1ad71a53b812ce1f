"""High-throughput mode: which kernels run, with what, for routing, dispatch and combine.

Protocols: kernels_cu/README.md.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cuep import layout
from cuep.arrays import Rows, View, allowed_dtypes, check_rows
from cuep.backend import Array, Stream
from cuep.errors import ArgumentError, ArgumentTypeError
from cuep.launching import (
    CombineCall,
    KernelSpec,
    elem_type,
    given_address,
    load_kernels,
    most_blocks,
    sent_row,
    set_combine,
    set_count,
    set_scales,
)
from cuep.params import Constant, FastRecord

if TYPE_CHECKING:
    from cuep.group import Group
    from cuep.handle import Handle

_ROUTE_BLOCKS = 8  # one places rows, one counts experts, the others copy
_SMEM_BYTES = 200 * 1024  # of a block, for rows in flight, where the GPU has that much
_STATIC_SMEM_BYTES = 2048  # left for everything else
_TURNS_BLOCKS = 64  # up to so many, some of which get more of the links than others, flat dispatch gives rows by turns
_PIECE_BYTES = 3584  # of a row that a combine kernel moves in pieces
_FEW_BLOCKS = 24  # up to so many are too few to fill the links unless flat combine keeps more rows on their way
_RECV_FIELDS = ("topk_idx", "topk_weights", "source")  # of a receive buffer (flat), beside rows


@dataclass
class HandleState:
    """Params of a handle's kernels, all but what changes from call to call, and the receive buffer that it holds."""

    route: FastRecord
    dispatch: FastRecord
    combine: FastRecord
    recv_rows: Rows = (0, 0, 0, 0)  # that dispatch writes
    lease: Lease | None = None
    first_use: int | None = None  # ticket of the first dispatch that was launched with the lease
    is_captured: bool = False  # each replay of a graph receives into that buffer
    is_out: bool = False  # rows of the newest dispatch are in the caller's own array
    answer: Lease | None = None  # combine buffer, from when the caller asks for it until combine
    last_answer: int | None = None  # number of the newest
    is_answer_captured: bool = False  # it is held for good: each replay of a graph uses it
    captured_copies: list[Lease] = field(default_factory=list)  # likewise, what captured combines copied into


class Lease:
    """One receive or combine buffer, held until it is given back, or until nobody holds the lease: no handle and no
    Received. wanted: the one to take, if it is free."""

    def __init__(self, free_buffers: list[int], wanted: int | None = None) -> None:
        self.buffer = wanted if wanted in free_buffers else free_buffers[0]
        free_buffers.remove(self.buffer)
        self.give_back = weakref.finalize(self, free_buffers.append, self.buffer)

    @property
    def is_held(self) -> bool:
        return self.give_back.alive


class HighThroughput:
    """The ht kernels of a group, and its receive buffers."""

    def __init__(self, group: Group) -> None:
        cfg = group.cfg
        self._group = group
        self._is_flat = cfg.layout == "flat"
        self._free_buffers = list(range(cfg.num_buffers))
        self._is_pulled = layout.is_pulled(cfg)
        self._free_answers = list(range(cfg.num_buffers if self._is_pulled else 0))
        self._max_rows = layout.max_recv_rows(cfg, group.num_ranks)
        group.workspace["high_water"][...] = self._max_rows  # ids of a fresh buffer are no ids either
        routing: dict[str, Constant] = {
            "kNumRanks": group.num_ranks,
            "kNumExperts": cfg.num_experts,
            "kNumTopk": cfg.num_topk,
        }
        sent = routing | sent_row(cfg)
        returned = routing | {"kRowBytes": cfg.combine_row_bytes, "elem_t": elem_type(str(cfg.combine_dtype))}
        returned["kIsPulled"] = self._is_pulled
        smem_bytes = group.world.backend.max_smem_bytes
        route, dispatch = ("ballot", "bulk") if self._is_flat else ("slots", "expand")
        room = max(cfg.row_bytes, cfg.sent_row_bytes) + cfg.num_scales * cfg.quantised_scale_bytes
        out = row_pipeline(room, "kNumWarps", 6, 2, smem_bytes)
        if out:
            out["kTakesTurns"] = int(not self._is_flat or most_blocks(group) <= _TURNS_BLOCKS)
        in_pieces = not self._is_flat or most_blocks(group) <= _FEW_BLOCKS
        piece, num_ahead = (_PIECE_BYTES, 8) if in_pieces else (cfg.combine_row_bytes, 2)
        home = row_pipeline(min(cfg.combine_row_bytes, piece), "kNumPushWarps", 7, num_ahead, smem_bytes)
        if home:  # else the kernels' own defaults
            home |= {"kNumTellWarps": int(in_pieces), "kMostPieceBytes": piece}
        self._route, self._dispatch, self._combine = load_kernels(
            group,
            [
                KernelSpec("route", route, routing, {}, _ROUTE_BLOCKS),
                KernelSpec("dispatch", dispatch, sent, out),
                KernelSpec("combine", layout.combine_variant(cfg), returned, home),
            ],
        )
        self._refusal = self._records(None)

    def attach(self, handle: Handle) -> HandleState:
        return self._records(handle)

    def detach(self, handle: Handle) -> None:
        state = handle.state
        if state is not None:
            for lease in (state.lease, state.answer, *state.captured_copies):
                if lease is not None:
                    lease.give_back()
        handle.state = None

    def route(self, handle: Handle, stream: Stream) -> None:
        record, idx, weights = handle.state.route, handle.topk_idx, handle.topk_weights
        assert idx is not None
        record["topk_idx"] = idx.address
        record["is_int64"] = idx.dtype == "int64"
        record["topk_weights"] = 0 if weights is None else weights.address
        set_count(record, handle, handle.count)
        self._route.launch(record, stream, handle.arrays, idx, weights, handle.count)
        handle.topk_idx = handle.topk_weights = handle.count = None

    def refuse_route(self, stream: Stream) -> None:
        self._route.refuse(self._refusal.route, stream)

    def prepare_dispatch(self, handle: Handle, out: View | None) -> None:
        """Take a receive buffer unless the handle has one. It keeps it until Received.release(), close() or a dispatch
        with `out`, or until nobody holds what it received.

        Raises:
            ArgumentError, ArgumentTypeError: `out` does not fit, or other handles hold all buffers.
        """
        group, state = self._group, handle.state
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
        ticket = self._dispatch.launch(record, stream, handle.arrays, x, scales, out)
        state.first_use = ticket if state.first_use is None else state.first_use
        state.is_captured = state.is_captured or stream.is_capturing()
        if out is not None and not state.is_captured:
            self._drop_lease(handle)
        return ticket

    def repeater(self, operation: str, handle: Handle) -> None:
        """There is none: each dispatch may take another receive buffer."""

    def refuse_dispatch(self, handle: Handle, stream: Stream) -> None:
        self._dispatch.refuse(handle.state.dispatch, stream, handle.arrays)
        if handle.state.first_use is None:  # it may have been taken for this very call
            self._drop_lease(handle)

    def undo_dispatch(self, handle: Handle, ticket: int) -> None:
        """The dispatch of this ticket did nothing: a buffer that was taken for it holds no rows."""
        if handle.state.first_use == ticket and not handle.state.is_captured:
            self._drop_lease(handle)

    def check_expert_out(self, handle: Handle, expert_out: View) -> None:
        cfg = self._group.cfg
        self._check_rows(expert_out, "expert_out", str(cfg.combine_dtype), cfg.hidden, cfg.combine_row_bytes)
        if self._is_pulled:
            self._answer_of(handle, expert_out)

    def combine_buffer(self, handle: Handle, stream: Stream) -> Array | None:
        """Symmetric memory for expert_out, which the handle holds until its next combine; None: the mode has none.

        Raises:
            ArgumentError: other handles hold all.
        """
        if not self._is_pulled:
            return None
        group, state = self._group, handle.state
        if state.answer is None:
            if not self._free_answers:
                raise ArgumentError(f"combine_buffer: {self._all_held()}")
            state.answer = Lease(self._free_answers, state.last_answer)
        state.last_answer = state.answer.buffer
        state.is_answer_captured = state.is_answer_captured or stream.is_capturing()
        shape, dtype = layout.combine_buffer(group.cfg, group.num_ranks)
        rows = group.region("combine_rows").view(group.world.backend.array_dtype(layout.dtype_of(dtype)))
        buffers: Array = rows.reshape(group.cfg.num_buffers, *shape)
        return buffers[state.answer.buffer]

    def _all_held(self) -> str:
        number = self._group.cfg.num_buffers
        return (
            f"all {number} combine buffers are held, by other handles or for what replays of graphs copy; combine or"
            f" close a handle, or make the group with num_buffers > {number}"
        )

    def answer_buffers(self) -> Rows | None:
        """Memory that peers pull from, where they do."""
        if not self._is_pulled:
            return None
        num_rows, row_bytes = self._group.cfg.num_buffers * self._max_rows, self._group.cfg.combine_row_bytes
        return self._first_answer, num_rows, row_bytes, row_bytes

    @property
    def _first_answer(self) -> int:
        group = self._group
        return int(group.memory.address + group.arena.offsets["combine_rows"])

    def _answer_of(self, handle: Handle, expert_out: View) -> tuple[int, bool]:
        """The combine buffer that peers pull from, and whether expert_out is to be copied there.

        Raises:
            ArgumentError: expert_out is the buffer of another handle, or there is none to copy to.
        """
        group, state, free = self._group, handle.state, self._free_answers
        row_bytes = group.cfg.combine_row_bytes
        own = [] if state.answer is None else [state.answer.buffer]
        buffer, offset = divmod(expert_out.address - self._first_answer, self._max_rows * row_bytes)
        is_inside = 0 <= buffer < group.cfg.num_buffers and expert_out.shape[0] > 0
        if is_inside:
            if buffer not in own and buffer not in free:
                raise ArgumentError(
                    "expert_out lies in a combine buffer that another handle, or a graph, holds; allowed: what this"
                    " handle's combine_buffer() returned since its last combine, or any other array"
                )
            if offset == 0 and expert_out.strides[0] == row_bytes:
                return buffer, False
        if expert_out.shape[0] == 0 or group.num_ranks == 1:
            return 0, True  # nothing is copied
        known = [lease.buffer for lease in state.captured_copies]
        known += [state.last_answer] if state.last_answer in free else []
        places = [place for place in (*own, *known, *free) if not (is_inside and place == buffer)]
        if not places:
            raise ArgumentError(
                f"expert_out is not what combine_buffer() returned, so it must be copied, but {self._all_held()}"
                if not is_inside
                else "expert_out is a part of the only combine buffer that is free, and must be copied into another:"
                " give it as combine_buffer() returned it, or make the group with more num_buffers"
            )
        return places[0], True

    def _use_answer(self, handle: Handle, record: FastRecord, expert_out: View, stream: Stream) -> None:
        """Tell a kernel that pulls where its peers find this rank's rows. The handle holds the buffer no longer, unless
        replays of a graph will use it again."""
        state = handle.state
        buffer, is_copied = self._answer_of(handle, expert_out)
        record["buffer"], record["is_copied"] = buffer, is_copied
        if stream.is_capturing():
            state.is_answer_captured = state.is_answer_captured or state.answer is not None
            if buffer in self._free_answers:
                state.captured_copies.append(Lease(self._free_answers, buffer))
        elif state.answer is not None and not state.is_answer_captured:
            state.answer.give_back()
            state.answer = None

    def row_weight_grads_shape(self, handle: Handle) -> tuple[int | None, ...]:
        """Of combine's row_weight_grads; None: at least as many as rows were received."""
        return (None, self._group.cfg.num_topk) if self._is_flat else (None,)

    def combine(self, handle: Handle, call: CombineCall, stream: Stream, *, send_only: bool) -> int:
        record, grads = handle.state.combine, call.row_weight_grads
        set_combine(record, handle, call, call.expert_out.strides[0])
        rows = min(self._max_rows, call.expert_out.shape[0])
        record["num_rows"] = rows if grads is None else min(rows, grads.shape[0])
        if self._is_pulled:
            self._use_answer(handle, record, call.expert_out, stream)
        return self._combine.launch(record, stream, handle.arrays, *call.objects())

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
