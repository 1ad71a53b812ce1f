"""Handle: the routing of one set of tokens, and the operations on it."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from cuep import arrays, layout
from cuep.backend import Array, Stream
from cuep.errors import ArgumentError, ArgumentTypeError, ClosedError, DeviceError, OrderError, PeerTimeout
from cuep.events import Event
from cuep.launching import CombineCall, address, check_takes
from cuep.status import ROUTE, Refusal

if TYPE_CHECKING:
    from cuep.group import Group

_TOPK_DTYPES = ("int32", "int64")
_NOTHING_SENT = (OrderError, ClosedError, PeerTimeout, DeviceError)  # no refusals: the peers do not wait for this rank
_MAX_BIASES = 2


@dataclass(frozen=True)
class Received:
    """What a rank received; arrays of x's framework that belong to the handle and keep their addresses.

    They hold until the handle's next dispatch or release() (tokens and scales of a handle that receives in place: as
    GroupConfig.in_place says), and are complete in stream order (after a send_only
    dispatch: of complete()). L local experts, N ranks, B max_tokens_per_rank, K num_topk, H hidden, R rows
    (max_recv_tokens_per_rank, or the most that can come). What a layout does not have is None. Rows beyond the counts
    are unspecified: never read them.

    Attributes:
        tokens: ll expert_major [L, N*B, H], the first expert_counts[l] rows of each, by source rank, token, k; ll
            rank_major [N, B, H], the first src_rank_counts[n] rows of each, by token; ht flat [R, H], the first total
            rows, by source rank, token; ht expert_major [R, H], expert_counts[l] rows from expert_offsets[l] on, by
            source rank, token, k.
        scales: with GroupConfig.quant, those of each row in the order of tokens: [..., S], S one for each 128 values
            or scales_per_row; float32, uint8 exponents e of 2**(e - 127) (ue8m0; packed by four in int32 where they lie
            by columns), or as the caller's. tokens are float8_e4m3fn then, or of the caller's dtype; bytes (uint8) from
            CuPy, Numba, and JAX on a GPU.
        expert_counts: int32 [L], rows of each local expert (rank_major and flat: (row, k) pairs).
        expert_offsets: int32 [L+1], first row of each expert's zone in tokens.reshape(-1, H) (expert_major).
        src_rank_counts: int32, rows from each source rank: [L, N] (expert_major) or [N].
        source: int32, where every row comes from: (rank, token, k) [..., 3] (expert_major) or (rank, token) [..., 2].
        topk_idx: int32 [N, B, K] or [R, K] (rank_major, flat): expert of every (row, k), numbered as
            GroupConfig.expert_ids says, or -1 where it is not this rank's, and in all rows beyond the counts.
        topk_weights: float32; rank_major and flat: the shape of topk_idx, 0 where that is -1; ht expert_major: [R], the
            weight of every row. None if the handle has no weights.
        total: int32 [1], rows that came or, with overflow="drop", would have come.
        event: Handle.event of the handle that received it.
        lease: keeps a receive buffer (ht) from other handles as long as someone holds this Received, or its handle
            lives: an array of it alone does not.
    """

    tokens: Any
    expert_counts: Any
    src_rank_counts: Any
    source: Any
    total: Any
    expert_offsets: Any = None
    topk_idx: Any = None
    topk_weights: Any = None
    scales: Any = None
    lease: Any = field(default=None, repr=False)
    handle: Any = field(default=None, repr=False, compare=False)  # a weak reference

    @property
    def event(self) -> Event:
        handle = self.handle()
        if handle is None:
            raise ClosedError("event: the handle that received this is gone")
        event: Event = handle.event
        return event

    def release(self) -> None:
        """Say that the rows have been read, in stream order: ht gives the receive buffer to the next handle that needs
        one, and this handle takes one again at its next dispatch. combine works all the same. Local; twice is fine.
        """
        if self.lease is not None:
            self.lease.give_back()


class Stage(enum.Enum):
    """How far a handle is; decides which call may come next."""

    UNROUTED = "has no routing: its last create_handle or update was refused, or the mask was updated since"
    ROUTED = "was not dispatched yet"
    DISPATCHED = "was dispatched"
    COMBINED = "was combined already"


class Handle:
    """Made by Group.create_handle. Operations are enqueued and nothing blocks but num_recv_tokens and host_counts.
    Keep it until what it has pending is completed: nobody else can do that.

    (NumPy has no streams: with NumPy arrays and stream=None a call returns when it is done.)

    Attributes: num_rows, rows of the arrays that dispatch takes and combine returns; num_tokens, how many of them are
    tokens, or num_rows where only the device knows.
    """

    def __init__(self, group: Group, serial: int) -> None:
        self.serial = serial
        self.routing = 0  # number of its routing among the group's, modulo 32: the same on all ranks
        self.num_rows = 0
        self.num_tokens = 0
        self.count: arrays.View | None = None  # the caller's num_tokens on the device, until it has been read
        self.has_device_count = False
        self.pending: str | None = None  # the operation that was only sent
        self.topk_idx: arrays.View | None = None  # the caller's, until a dispatch has copied it (ll)
        self.topk_weights: arrays.View | None = None
        self.has_weights = False
        self.is_closed = False
        self._group = group
        self._stage = Stage.UNROUTED
        self._is_fresh = True  # its state on the device is still to be cleared
        self._newest = 0  # ticket of the newest launch on this handle
        self._stream: Stream = group.fallback_stream()  # of its newest operation
        self._event: Event | None = None  # likewise
        self._sent: CombineCall | arrays.View | None = None  # what complete() still reads
        self._beside: tuple[arrays.View | None, ...] = ()  # what else it reads and writes: dispatch's scales and out
        self._export: Callable[[], Any] | None = None  # makes what complete() returns
        self._exports: dict[tuple[str, str, int], Any] = {}
        #: operation -> its last call: signature of the array, and what makes that call again; None if it had options
        self._plain_calls: dict[str, tuple[Any, Callable[[Any, tuple[Any, ...]], int]] | None] = {}
        backend = group.world.backend
        self.is_in_place = serial <= group.cfg.in_place  # as on the other ranks, which make the same handles
        shapes = layout.handle_arrays(group.cfg, group.num_ranks, is_in_place=self.is_in_place)
        self.arrays: dict[str, Array] = {
            name: backend.empty(shape, layout.dtype_of(dtype), group.cfg.allocator)
            for name, (shape, dtype) in shapes.items()
        }
        if self.is_in_place:
            self.arrays |= group.in_place_arrays(self)
        self.addresses = {name: address(array) for name, array in self.arrays.items()}
        self._y_view: Any = arrays.view(self.arrays["y"], "y", backend)
        with backend.active():
            self.state: Any = group.mode.attach(self)  # the mode's own; None once closed

    def route(
        self, call: str, topk_idx: Any, topk_weights: Any, num_tokens: Any, previous_event: Any, stream: Any
    ) -> None:
        group = self._group
        with group.lock:
            chosen = group.begin()
            self._check_open()
            self._check_not_pending(call)
            self._plain_calls.clear()
            group.check_turn(call)  # a refused routing counts as the dispatch that follows (ll)
            self.routing = group.take_routing()
            self._stage = Stage.UNROUTED
            try:
                chosen = group.choose_stream(stream, topk_idx, previous_event)
                self._take_routing(topk_idx, topk_weights, num_tokens)
                if self._is_fresh:
                    group.world.backend.clear(self.arrays["state"], chosen)
                    self._is_fresh = False
            except _NOTHING_SENT:
                raise
            except Exception:  # also what an array's own library raises
                group.refuse_route(chosen)  # the peers wait for this rank's part
                raise
            group.mode.route(self, chosen)
            self._stage = Stage.ROUTED
            self._leave(chosen)

    def update(
        self,
        topk_idx: Any,
        topk_weights: Any = None,
        *,
        num_tokens: Any = None,
        previous_event: Any = None,
        stream: Any = None,
    ) -> None:
        """Give the handle a new routing, as create_handle does, without allocating. ht: collective.

        May be captured in a CUDA graph: every replay then reads the arrays again. (A graph without it, of a dispatch or
        combine alone, serves routings of at most as many tokens as at its capture, unless num_tokens is on the device.)

        Raises:
            as Group.create_handle. A handle whose update was refused has no routing. OrderError: an operation of the
            handle is pending.
        """
        self.route("update", topk_idx, topk_weights, num_tokens, previous_event, stream)

    def dispatch(
        self,
        x: Any,
        scales: Any = None,
        *,
        out: Any = None,
        send_only: bool = False,
        previous_event: Any = None,
        stream: Any = None,
    ) -> Received:
        """Send this rank's tokens to the ranks of their experts. Collective; may be repeated with the same routing.

        Args:
            x: [num_rows, hidden] of the group's dtype; rows may be strided, each contiguous and 16-byte aligned. As
                many rows as topk_idx had. With send_only it must stay as it is until complete().
            scales: with quant="forward", and only then: [num_rows, S] of the dtype of Received.scales, in any strides
                (rows, columns, part of a wider array). S = 0: None. Stays as x does.
            out: where to put Received.tokens instead of memory of the handle: ll the same shape, with one stride for
                all rows; ht [rows, hidden] with at least the rows of num_recv_tokens(), rows may be strided; no receive
                buffer is held then. Fewer rows than come: ArgumentError at check() here, PeerRefused there, nothing
                dispatched.
            send_only: (ll) only send; complete() receives. At most num_buffers dispatches may be under way.
            previous_event: an event that the stream first waits for: a cuep.Event, or one of CuPy, torch, Numba or
                cuda.core, or its handle.
            stream: where to enqueue; None = the current stream of x's framework.

        Returns:
            Received: what this rank's experts get, complete in stream order (send_only: of complete()).

        Raises:
            ArgumentError, ArgumentTypeError: x, scales, out or stream does not fit, or (ht) other handles hold all
                receive buffers; nothing is dispatched on any rank, and the next dispatch works.
            OrderError: the handle has no routing, an operation of it is pending, or too many are. Nothing is sent.
            ClosedError, PeerTimeout: see Group.check. PeerRefused, DeviceError: only where the call waits.
        """
        group = self._group
        with group.lock:
            chosen = group.begin()
            self._check_open()
            self._check_not_pending("dispatch")
            if self._stage is Stage.UNROUTED:
                raise OrderError(f"dispatch: this handle {self._stage.value}")
            group.check_turn("dispatch")
            try:
                chosen = group.choose_stream(stream, x, previous_event)
                self._check_send_only(send_only)
                is_plain = out is None and not send_only
                given = (x,) if scales is None else (x, scales)
                repeat = self._repeater("dispatch", given) if is_plain else None
                if repeat is None:
                    self._plain_calls.pop("dispatch", None)
                    view = group.view(x, "x")
                    factors = None if scales is None else group.view(scales, "scales")
                    into = None if out is None else group.view(out, "out", is_written=True)
                    self._check_dispatch(view, factors, into)
            except _NOTHING_SENT:
                raise
            except Exception:  # also what an array's own library raises
                self._stage = Stage.ROUTED
                group.take_turn()
                group.mode.refuse_dispatch(self, chosen)  # the peers wait for this rank's part
                raise
            group.take_turn()
            if repeat is not None:
                self._newest = repeat(chosen, given)
            else:
                is_plain = is_plain and self.topk_idx is None  # not the first of a routing
                self._newest = group.mode.dispatch(self, view, factors, into, chosen, send_only=send_only)
                self._remember("dispatch", given if is_plain else None)
            self._stage = Stage.DISPATCHED
            if send_only:
                group.begin_pending(self)
                export = partial(self._received, arrays.framework(x), out)
                self._begin_pending("dispatch", view, export, (factors, into))
            self._leave(chosen)
            return self._received(arrays.framework(x), out)

    def combine(
        self,
        expert_out: Any,
        *,
        topk_weights: Any = "handle",
        bias: Any = None,
        row_weight_grads: Any = None,
        out: Any = None,
        send_only: bool = False,
        previous_event: Any = None,
        stream: Any = None,
    ) -> Any:
        """Bring the experts' outputs home. Collective; once after each dispatch.

        A combine that was refused on any rank must be preceded by a dispatch again.

        Args:
            expert_out: outputs of combine_dtype in the order of Received.tokens, and of its shape (ll), or [rows, H]
                with at least the received rows (ht). rank_major and flat: each row is already the sum over this rank's
                experts. Rows may be strided, each contiguous and 16-byte aligned (ll: with one stride for all rows).
                With send_only it must stay as it is until complete().
            topk_weights: expert_major: "handle" = those of create_handle; None = 1 (with reduce="per_rank" on all ranks
                or on none); with reduce="exact" also [num_rows, num_topk] float32, C-contiguous. rank_major and flat
                apply no weights.
            bias: [num_rows, H] of combine_dtype, or a tuple of two, added once to each token in fp32 before the one
                rounding. Rows as those of expert_out.
            row_weight_grads: float32, C-contiguous, on all ranks or on none: a number for each received (row, k):
                expert_major [L, N*B] (ll) or [rows] (ht); rank_major [N, B, K]; flat [rows, K]. They go home with the
                rows: the gradients of topk_weights, in a backward pass.
            out: [num_rows, H] of combine_dtype: where to put y instead of memory of the handle. Rows may be strided.
            send_only: (ll) only send; complete() receives. At most num_buffers combines may be under way: one more does
                nothing on any rank, and OrderError comes at check().
            previous_event: as for dispatch.
            stream: where to enqueue; None = the current stream of expert_out's framework.

        Returns:
            y [num_rows, hidden]: the sum that GroupConfig.reduce describes, 0 (or the bias) for a token without
            experts. It is `out`, or belongs to the handle and holds until its next combine. With row_weight_grads:
            (y, grads), grads float32 [num_rows, num_topk], 0 where topk_idx is -1.

        Raises:
            ArgumentError, ArgumentTypeError: an argument does not fit; nothing is combined on any rank.
            OrderError: the handle was not dispatched, or combined already, or an operation of it is pending. Nothing is
                sent.
            ClosedError, PeerTimeout: see Group.check. PeerRefused, DeviceError: only where the call waits.
        """
        group = self._group
        with group.lock:
            chosen = group.begin()
            self._check_open()
            self._check_not_pending("combine")
            if self._stage is not Stage.DISPATCHED:
                raise OrderError(f"combine: this handle {self._stage.value}")
            try:
                chosen = group.choose_stream(stream, expert_out, previous_event)
                self._check_send_only(send_only)
                is_plain = isinstance(topk_weights, str) and topk_weights == "handle" and not send_only
                is_plain = is_plain and bias is None and row_weight_grads is None and out is None
                repeat = self._repeater("combine", (expert_out,)) if is_plain else None
                if repeat is None:
                    self._plain_calls.pop("combine", None)
                    view = group.view(expert_out, "expert_out")
                    group.mode.check_expert_out(self, view)
                    call = self._combine_call(view, topk_weights, bias, row_weight_grads, out)
            except _NOTHING_SENT:
                raise
            except Exception:  # also what an array's own library raises
                self._stage = Stage.ROUTED
                group.mode.refuse_combine(self, chosen)  # the peers wait for this rank's part
                raise
            if repeat is not None:
                self._newest = repeat(chosen, (expert_out,))
            else:
                self._newest = group.mode.combine(self, call, chosen, send_only=send_only)
                self._remember("combine", (expert_out,) if is_plain else None)
            has_grads = row_weight_grads is not None
            self._stage = Stage.COMBINED
            if send_only:
                export = partial(self._combined, arrays.framework(expert_out), out, has_grads=has_grads)
                self._begin_pending("combine", call, export)
            self._leave(chosen)
            return self._combined(arrays.framework(expert_out), out, has_grads=has_grads)

    def complete(self, stream: Any = None, *, previous_event: Any = None) -> Any:
        """(ll) Receive what a send_only dispatch or combine began. Collective.

        Args:
            stream: where to enqueue; None = the current stream of the framework of that call's array.
            previous_event: as for dispatch.

        Returns:
            what that call returned, now complete in stream order.

        Raises:
            OrderError: nothing of this handle is pending. ArgumentError, ArgumentTypeError: stream or previous_event is
                none; it stays pending.
            ClosedError, PeerTimeout: see Group.check. PeerRefused, DeviceError: only where the call waits.
        """
        group = self._group
        with group.lock:
            group.begin()
            self._check_open()
            if self.pending is None:
                raise OrderError("complete: no operation of this handle is pending")
            sent = self._sent
            like = sent.expert_out if isinstance(sent, CombineCall) else sent
            chosen = group.choose_stream(stream, None if like is None else like.owner, previous_event)
            self._plain_calls.clear()
            self._newest = group.mode.complete(self, chosen, sent, *self._beside)
            assert self._export is not None
            export = self._export
            group.end_pending(self)
            self._end_pending()
            self._leave(chosen)
            return export()

    @property
    def event(self) -> Event:
        """The handle's newest operation (create_handle, update, dispatch, combine, complete), for streams that wait.

        It is recorded when it is first asked for, on the stream of that operation: so ask before that stream is given
        other work, which the event would stand for, too. Inside a capture it belongs to the graph.

        Raises:
            ClosedError: the handle is closed.
        """
        with self._group.lock:
            self._check_open()
            event = self._event or Event(self._group.world.backend, self._stream.record())
            self._event = None if self._stream.is_capturing() else event
            return event

    def _leave(self, chosen: Stream) -> None:
        """After an operation was launched on `chosen`."""
        self._stream, self._event = chosen, None
        self._group.leave(chosen)

    def combine_buffer(self, *, stream: Any = None) -> Any:
        """An array of the handle's for the experts to write, of the shape and dtype that combine takes.

        It saves nothing over any other array, as combine sends from wherever the rows are, but it is there, has a fixed
        address, and is counted by cuep.footprint ("combine_buffer").

        Args:
            stream: the stream that will write it: it is put behind the group's operations so far. None = the current
                stream of the backend's own framework.

        Raises:
            OrderError: first use inside a capture. MemoryError: no room for it.
        """
        group, cfg = self._group, self._group.cfg
        with group.lock:
            group.begin()
            self._check_open()
            chosen = group.world.backend.stream(stream)
            if "combine_buffer" not in self.arrays:
                if chosen.is_capturing():
                    raise OrderError("combine_buffer: its first use allocates, which a stream capture does not allow")
                shape = layout.combine_shape(cfg, group.num_ranks)
                dtype = layout.dtype_of(cfg.combine_dtype)
                self.arrays["combine_buffer"] = group.world.backend.empty(shape, dtype, cfg.allocator)
            group.put_behind(chosen)
            return self.arrays["combine_buffer"]

    def num_recv_tokens(self) -> int:
        """Rows received: ll after dispatch, ht after create_handle or update. Waits for the device.

        ht: how many rows dispatch(out=) needs: those that are kept, and with layout="expert_major" the padding of
        zones, too.

        Raises:
            OrderError: too early, or inside a capture. Otherwise as Group.check.
        """
        cfg = self._group.cfg
        has_zones = cfg.mode == "ht" and cfg.layout == "expert_major"
        rows = int(self._read_counts("num_recv_tokens", "expert_offsets" if has_zones else "total")[-1])
        return rows if cfg.max_recv_tokens_per_rank is None else min(rows, cfg.max_recv_tokens_per_rank)

    def host_counts(self) -> npt.NDArray[np.int32]:
        """Received.expert_counts on the host, int32 [L]. Waits for the device. Raises as num_recv_tokens."""
        return self._read_counts("host_counts", "expert_counts")

    def _read_counts(self, call: str, name: str) -> npt.NDArray[np.int32]:
        with self._group.finished(call):
            self._check_open()
            needed = (Stage.ROUTED, Stage.DISPATCHED, Stage.COMBINED)[0 if self._group.cfg.mode == "ht" else 1 :]
            if self._stage not in needed:
                raise OrderError(f"{call}: this handle {self._stage.value}")
            if self.pending == "dispatch":
                raise OrderError(f"{call}: the dispatch of this handle is pending; complete() it first")
            return self._group.world.backend.to_numpy(self.arrays[name])

    def was_refused(self, refusal: Refusal) -> None:
        """The group learnt that an operation on this handle did nothing."""
        if refusal.operation == ROUTE:
            self._stage = Stage.UNROUTED
        elif refusal.ticket == self._newest:  # what came after it was an operation again
            self._stage = Stage.ROUTED

    def forget_routing(self, stream: Any) -> None:
        """The group starts anew: what was under way is not any more. Enqueues on `stream`, outside captures."""
        self._group.world.backend.clear(self.arrays["state"], stream)
        self._stage = Stage.UNROUTED
        self._is_fresh = False
        self._newest = 0
        self._plain_calls.clear()
        self._end_pending()

    def close(self) -> None:
        """Give back what the handle holds. Local; twice is fine. OrderError: an operation of it is pending."""
        with self._group.lock:
            if not self.is_closed:
                if not self._group.is_closed:
                    self._check_not_pending("close")
                self.is_closed = True
                self._group.mode.detach(self)
                self.arrays, self._y_view = {}, None
                self._exports = {}
                self._plain_calls = {}
                self._end_pending()

    def _take_routing(self, topk_idx: Any, topk_weights: Any, num_tokens: Any) -> None:
        group, cfg = self._group, self._group.cfg
        idx = group.view(topk_idx, "topk_idx")
        arrays.check_matrix(idx, "topk_idx", None, cfg.num_topk, _TOPK_DTYPES, cfg.max_tokens_per_rank)
        _check_contiguous(idx, "topk_idx")
        weights = None
        if topk_weights is not None:
            weights = group.view(topk_weights, "topk_weights")
            arrays.check_matrix(weights, "topk_weights", idx.shape[0], cfg.num_topk, ("float32",))
            _check_contiguous(weights, "topk_weights")
        count = _token_count(num_tokens, idx.shape[0], group)
        self.num_rows = idx.shape[0]
        self.num_tokens = count if isinstance(count, int) else self.num_rows
        self.count, self.has_device_count = (None, False) if isinstance(count, int) else (count, True)
        self.topk_idx, self.topk_weights, self.has_weights = idx, weights, weights is not None

    def _repeater(self, operation: str, given: tuple[Any, ...]) -> Callable[[Any, tuple[Any, ...]], int] | None:
        """What makes the operation's last call again, if that was on such arrays and had no options either: then all
        is checked and set already."""
        last = self._plain_calls.get(operation)
        if last is None or last[0] != self._signature(given):
            return None
        return last[1]

    def _remember(self, operation: str, given: tuple[Any, ...] | None) -> None:
        """For _repeater. given: the call's arrays, None if it had options."""
        seen = None if given is None else self._signature(given)
        repeater = None if seen is None else self._group.mode.repeater(operation, self)
        self._plain_calls[operation] = None if repeater is None else (seen, repeater)

    def _signature(self, given: tuple[Any, ...]) -> tuple[Any, ...] | None:
        backend = self._group.world.backend
        signatures = tuple(arrays.signature(array, backend) for array in given)
        return None if None in signatures else signatures

    def _check_dispatch(self, x: arrays.View, scales: arrays.View | None, out: arrays.View | None) -> None:
        group, cfg = self._group, self._group.cfg
        arrays.check_matrix(x, "x", self.num_rows, cfg.columns, arrays.allowed_dtypes(cfg.dtype))
        arrays.check_rows(x, "x", cfg.row_bytes)
        if cfg.num_scales and (cfg.scale_layout == "column_major" or self.is_in_place or cfg.mode == "ht"):
            what = f"mode={cfg.mode!r}, quant={cfg.quant!r} with rows and scales in one place or by columns"
            arrays.check_takes_strides(x, "x", group.world.backend, what)
        group.mode.prepare_dispatch(self, out)
        self._check_scales(scales, out)
        if out is not None:
            arrays.check_apart(x, "x", arrays.rows_of(out), "out, which dispatch writes")
        own = "this handle's own Received.tokens, which its dispatch writes"
        arrays.check_apart(x, "x", self.state.recv_rows, own)
        if out is not None:
            for rows in self._rows_of_peers():
                arrays.check_apart(x, "x", rows, own)
                is_same = rows[0] == out.address and rows[2] == arrays.rows_of(out)[2]
                if not is_same:
                    arrays.check_disjoint(out, "out", arrays.extent(rows), own)

    def _rows_of_peers(self) -> list[arrays.Rows]:
        """Memory of this handle that peers write, also with out=."""
        if self._group.cfg.mode == "ht":
            rows: arrays.Rows = self.state.recv_rows
            return [rows]
        if not self.is_in_place:
            return []
        begin, num_rows, stride, _ = arrays.rows_of(arrays.view(self.arrays["tokens"], "", self._group.world.backend))
        return [(begin, num_rows, stride, stride)]

    def _check_scales(self, scales: arrays.View | None, out: arrays.View | None) -> None:
        cfg = self._group.cfg
        columns = cfg.scale_columns if cfg.quant == "forward" else 0
        if (scales is not None) != (columns > 0):
            allowed = f"[{self.num_rows}, {columns}] {cfg.scale_dtype}" if columns else "None"
            given = "None" if scales is None else f"an array {list(scales.shape)}"
            raise ArgumentError(f"scales: got {given}, allowed with quant={cfg.quant!r}: {allowed}")
        if scales is None:
            return
        dtypes = arrays.allowed_dtypes(cfg.scale_dtype, cfg.scale_format)
        arrays.check_matrix(scales, "scales", self.num_rows, columns, dtypes)
        if any(place % cfg.scale_bytes for place in (scales.address, *scales.strides)):
            raise ArgumentError(
                f"scales must be aligned to their elements, got address {scales.address:#x}, strides {scales.strides}"
            )
        for name in ("tokens", "scales", "out_scales"):
            if name in self.arrays:
                own = arrays.view(self.arrays[name], name, self._group.world.backend)
                what = f"this handle's own Received.{name.removeprefix('out_')}, which its dispatch writes"
                arrays.check_disjoint(scales, "scales", arrays.span(own), what)
        for rows in self._rows_of_peers():
            own_rows = "this handle's own receive buffer, which its dispatch writes"
            arrays.check_disjoint(scales, "scales", arrays.extent(rows), own_rows)
        if out is not None:
            arrays.check_disjoint(scales, "scales", arrays.span(out), "out, which dispatch writes")

    def _combine_call(
        self, expert_out: arrays.View, topk_weights: Any, bias: Any, row_weight_grads: Any, out: Any
    ) -> CombineCall:
        """The arguments of combine, checked; expert_out has been."""
        group, cfg = self._group, self._group.cfg
        weights = None
        if not isinstance(topk_weights, str) and topk_weights is not None:
            if cfg.reduce != "exact":
                raise ArgumentError(
                    f"topk_weights: an array is allowed with reduce='exact' only, not with reduce={cfg.reduce!r},"
                    f" layout={cfg.layout!r}; allowed: 'handle', None"
                )
            weights = group.view(topk_weights, "topk_weights")
            arrays.check_matrix(weights, "topk_weights", self.num_rows, cfg.num_topk, ("float32",))
            _check_contiguous(weights, "topk_weights")
        elif topk_weights not in ("handle", None):
            raise ArgumentError(f"topk_weights={topk_weights!r} is not allowed; allowed: 'handle', None or an array")
        given = () if bias is None else bias if isinstance(bias, tuple) else (bias,)
        if len(given) > _MAX_BIASES:
            raise ArgumentError(f"bias: got a tuple of {len(given)} arrays, allowed: at most {_MAX_BIASES}")
        names = [f"bias[{i}]" if isinstance(bias, tuple) else "bias" for i in range(len(given))]
        biases = tuple(self._check_output_like(array, name) for array, name in zip(given, names, strict=True))
        grads = None
        if row_weight_grads is not None:
            grads = group.view(row_weight_grads, "row_weight_grads")
            shape = group.mode.row_weight_grads_shape(self)
            arrays.check_shape(grads, "row_weight_grads", shape, ("float32",))
            _check_contiguous(grads, "row_weight_grads")
        check_takes(self.state.combine, "combine", bias=bool(given), row_weight_grads=grads is not None)
        y = self._y_view if out is None else self._check_output_like(out, "out", is_written=True)
        written, what = arrays.rows_of(y), "out" if out is not None else "this handle's own y"
        for name, read in (("expert_out", expert_out), ("topk_weights", weights), ("row_weight_grads", grads)):
            if read is not None:
                arrays.check_apart(read, name, written, f"{what}, which combine writes")
        if self.is_in_place:
            theirs = "this handle's own Received.tokens, which peers write from its combine on"
            for name, view in (("out", y), *zip(names, biases, strict=True)):
                for rows in self._rows_of_peers():
                    arrays.check_disjoint(view, name, arrays.extent(rows), theirs)
        for name, bias_view in zip(names, biases, strict=True):
            own = arrays.rows_of(bias_view)
            if (own[0], own[2]) != (written[0], written[2]):  # row by row, y may be written over its bias
                arrays.check_apart(bias_view, name, written, f"{what}, which combine writes")
        return CombineCall(expert_out, y, weights, topk_weights is not None, biases, grads)

    def _check_output_like(self, array: Any, name: str, *, is_written: bool = False) -> arrays.View:
        """bias and out have the shape of y."""
        cfg = self._group.cfg
        view = self._group.view(array, name, is_written=is_written)
        arrays.check_matrix(view, name, self.num_rows, cfg.hidden, (str(cfg.combine_dtype),))
        arrays.check_rows(view, name, cfg.combine_row_bytes)
        return view

    def _check_send_only(self, send_only: Any) -> None:
        if not isinstance(send_only, (bool, np.bool_)):
            raise ArgumentTypeError(f"send_only: got {type(send_only).__name__}, allowed: True or False")
        if send_only and self._group.cfg.mode != "ll":
            raise ArgumentError("send_only=True is not allowed with mode='ht'; allowed: False")

    def _begin_pending(
        self,
        operation: str,
        sent: CombineCall | arrays.View,
        export: Callable[[], Any],
        beside: tuple[arrays.View | None, ...] = (),
    ) -> None:
        self.pending, self._sent, self._export, self._beside = operation, sent, export, beside

    def _end_pending(self) -> None:
        self.pending = self._sent = self._export = None
        self._beside = ()

    def _check_not_pending(self, call: str) -> None:
        if self.pending is not None:
            raise OrderError(f"{call}: the {self.pending} of this handle is pending; complete() it first")

    def _received(self, framework: str, out: Any) -> Received:
        key = ("recv", framework, self.has_weights)
        kept: Received | None = self._exports.get(key)
        if out is not None or kept is None or kept.lease is not self.state.lease:
            group = self._group
            fields = group.mode.received(self)
            exported = {k: group.export(v, framework) for k, v in fields.items() if k != "tokens"}
            if out is not None:
                return Received(tokens=out, **exported, handle=weakref.ref(self))
            exported["tokens"] = group.export(fields["tokens"], framework, group.cfg.recv_dtype)
            kept = Received(**exported, lease=self.state.lease, handle=weakref.ref(self))
            if arrays.is_ordered(framework):
                self._exports[key] = kept
        return kept

    def _combined(self, framework: str, out: Any, *, has_grads: bool) -> Any:
        y = self._export_rows("y", framework) if out is None else out
        return (y, self._export_rows("weight_grads", framework)) if has_grads else y

    def _export_rows(self, name: str, framework: str) -> Any:
        key = (name, framework, self.num_rows)
        exported = self._exports.get(key)
        if exported is None:
            exported = self._group.export(self.arrays[name][: self.num_rows], framework)
            if arrays.is_ordered(framework):
                self._exports[key] = exported
        return exported

    def _check_open(self) -> None:
        if self.is_closed:
            raise ClosedError("this handle is closed")


def _check_contiguous(view: arrays.View, name: str) -> None:
    if not view.is_contiguous:
        raise ArgumentError(f"{name} must be C-contiguous, got strides {view.strides} bytes")
    if view.address % np.dtype(view.dtype).itemsize:
        raise ArgumentError(f"{name} must be aligned to its elements, got address {view.address:#x}")


def _token_count(num_tokens: Any, num_rows: int, group: Group) -> int | arrays.View:
    """num_tokens as a number of the host's, or as a view of one element on the device."""
    if num_tokens is None:
        return num_rows
    if isinstance(num_tokens, (int, np.integer)) and not isinstance(num_tokens, bool):
        if not 0 <= num_tokens <= num_rows:
            raise ArgumentError(
                f"num_tokens={num_tokens} is not allowed; allowed: 0 to {num_rows}, the rows of topk_idx"
            )
        return int(num_tokens)
    view = group.view(num_tokens, "num_tokens")
    if view.dtype not in _TOPK_DTYPES:
        raise ArgumentTypeError(f"num_tokens has dtype {view.dtype}, allowed: {', '.join(_TOPK_DTYPES)}")
    if view.address % np.dtype(view.dtype).itemsize:
        raise ArgumentError(f"num_tokens must be aligned to its element, got address {view.address:#x}")
    if any(size != 1 for size in view.shape):
        raise ArgumentError(f"num_tokens has shape {list(view.shape)}, allowed: a number, or an array of one element")
    return view
