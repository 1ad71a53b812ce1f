"""Handle: the routing of one set of tokens, and the operations on it."""

from __future__ import annotations

import enum
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from cuep import arrays, layout
from cuep.backend import Array, Stream
from cuep.errors import ArgumentError, ArgumentTypeError, ClosedError, DeviceError, OrderError, PeerTimeout
from cuep.events import Event
from cuep.handle_arguments import TOPK_DTYPES, check_contiguous, check_dispatch, combine_call, token_count
from cuep.launching import CombineCall, address
from cuep.received import Received
from cuep.status import COMBINE, ROUTE, Refusal

if TYPE_CHECKING:
    from cuep.group import Group

_NOTHING_SENT = (OrderError, ClosedError, PeerTimeout, DeviceError)  # no refusals: the peers do not wait for this rank


class Stage(enum.Enum):
    """How far a handle is; decides which call may come next."""

    UNROUTED = "has no routing: its last create_handle or update was refused, or the mask was updated since"
    ROUTED = "was not dispatched yet"
    DISPATCHED = "was dispatched"
    COMBINED = "was combined already"


class Handle:
    """Made by Group.create_handle. Operations are enqueued and nothing blocks but num_recv_tokens and host_counts (and,
    with variants that copy, the first operation of a routing: GroupConfig.variants). Keep it until what it has pending
    is completed: nobody else can do that.

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
        self.group = group
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
        self.y_view: Any = arrays.view(self.arrays["y"], "y", backend)
        with backend.active():
            self.state: Any = group.mode.attach(self)  # the mode's own; None once closed

    def route(
        self, call: str, topk_idx: Any, topk_weights: Any, num_tokens: Any, previous_event: Any, stream: Any
    ) -> None:
        group = self.group
        with group.lock:
            chosen = group.begin()
            self._check_open()
            self._check_not_pending(call)
            self._plain_calls.clear()
            group.check_turn(call)  # a refused routing counts as the dispatch that follows (ll)
            self.routing = group.take_routing()
            self._stage, self._newest = Stage.UNROUTED, 0
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
            self._newest = group.mode.route(self, chosen)
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
                all rows; ht [rows, hidden] with at least the rows of num_recv_tokens(), rows may be strided: the call
                takes a receive buffer, if the handle holds none, and holds none afterwards (but where it is captured in
                a graph). Fewer rows than come: ArgumentError at check() here, PeerRefused there, nothing dispatched.
            send_only: (ll) only send; complete() receives. At most num_buffers dispatches may be under way.
            previous_event: an event that the stream first waits for: a cuep.Event, or one of CuPy, torch, Numba or
                cuda.core, or its handle.
            stream: where to enqueue; None = the current stream of x's framework.

        Returns:
            Received: what this rank's experts get, complete in stream order (send_only: of complete()).

        Raises:
            ArgumentError, ArgumentTypeError: x, scales, out, previous_event or stream does not fit, or (ht) other
                handles hold all receive buffers; nothing is dispatched on any rank, and the next dispatch works.
            OrderError: the handle has no routing, an operation of it is pending, or too many are; or, with
                variants={"dispatch": "copy"}, it is captured before the host knows the routing. Nothing is sent.
            ClosedError, PeerTimeout: see Group.check. PeerRefused, DeviceError: only where the call waits.
        """
        group = self.group
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
                    check_dispatch(self, view, factors, into)
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
            OrderError: the handle was not dispatched, or combined already, or an operation of it is pending; or,
                with variants={"combine": "copy"}, it is captured before the host knows the routing. Nothing is sent.
            ClosedError, PeerTimeout: see Group.check. PeerRefused, DeviceError: only where the call waits.
        """
        group = self.group
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
                    call = combine_call(self, view, topk_weights, bias, row_weight_grads, out)
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
        group = self.group
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
        with self.group.lock:
            self._check_open()
            event = self._event or Event(self.group.world.backend, self._stream.record())
            self._event = None if self._stream.is_capturing() else event
            return event

    def _leave(self, chosen: Stream) -> None:
        """After an operation was launched on `chosen`."""
        self._stream, self._event = chosen, None
        self.group.leave(chosen)

    def combine_buffer(self, *, stream: Any = None) -> Any:
        """An array of the handle's for the experts to write, of the shape and dtype that combine takes.

        Where combine pulls (ht, flat, variants={"combine": "pull"}) it is one of the num_buffers combine buffers in
        symmetric memory, and what lies there need not be copied. The handle holds it until its next combine (for good,
        if either is captured), so ask again for each: it is the same one if no other handle has taken it. combine
        copies what lies elsewhere into one that is free.

        Elsewhere it saves nothing over any other array, as combine sends from wherever the rows are, but it is there,
        has a fixed address, and is counted by cuep.footprint ("combine_buffer").

        Args:
            stream: the stream that will write it: it is put behind the group's operations so far. None = the current
                stream of the backend's own framework.

        Raises:
            OrderError: its first use allocates and is inside a capture. MemoryError: no room for it. ArgumentError:
                all combine buffers are held, by other handles or for captured graphs.
        """
        group, cfg = self.group, self.group.cfg
        with group.lock:
            group.begin()
            self._check_open()
            chosen = group.world.backend.stream(stream)
            buffer = group.mode.combine_buffer(self, chosen)
            if buffer is None and "combine_buffer" not in self.arrays:
                if chosen.is_capturing():
                    raise OrderError("combine_buffer: its first use allocates, which a stream capture does not allow")
                shape, dtype = layout.combine_buffer(cfg, group.num_ranks)
                allocated = group.world.backend.empty(shape, layout.dtype_of(dtype), cfg.allocator)
                self.arrays["combine_buffer"] = allocated
            group.put_behind(chosen)
            return self.arrays["combine_buffer"] if buffer is None else buffer

    def num_recv_tokens(self) -> int:
        """Rows received: ll after dispatch, ht after create_handle or update. Waits for the device.

        ht: how many rows dispatch(out=) needs: those that are kept, and with layout="expert_major" the padding of
        zones, too.

        Raises:
            OrderError: too early, or inside a capture. Otherwise as Group.check.
        """
        cfg = self.group.cfg
        has_zones = cfg.mode == "ht" and cfg.layout == "expert_major"
        rows = int(self._read_counts("num_recv_tokens", "expert_offsets" if has_zones else "total")[-1])
        return rows if cfg.max_recv_tokens_per_rank is None else min(rows, cfg.max_recv_tokens_per_rank)

    def host_counts(self) -> npt.NDArray[np.int32]:
        """Received.expert_counts on the host, int32 [L]. Waits for the device. Raises as num_recv_tokens."""
        return self._read_counts("host_counts", "expert_counts")

    def _read_counts(self, call: str, name: str) -> npt.NDArray[np.int32]:
        with self.group.finished(call):
            self._check_open()
            needed = (Stage.ROUTED, Stage.DISPATCHED, Stage.COMBINED)[0 if self.group.cfg.mode == "ht" else 1 :]
            if self._stage not in needed:
                raise OrderError(f"{call}: this handle {self._stage.value}")
            if self.pending == "dispatch":
                raise OrderError(f"{call}: the dispatch of this handle is pending; complete() it first")
            self.group.mode.learn_counts(self)
            return self.group.world.backend.to_numpy(self.arrays[name])

    def was_refused(self, refusal: Refusal) -> None:
        """The group learnt that an operation on this handle did nothing."""
        if refusal.ticket != self._newest:  # what came after it was an operation again, or says the same
            return
        self._stage = Stage.UNROUTED if refusal.operation == ROUTE else Stage.ROUTED
        if refusal.operation != COMBINE:
            self.group.mode.undo_dispatch(self)

    def forget_routing(self, stream: Any) -> None:
        """The group starts anew: what was under way is not any more. Enqueues on `stream`, outside captures."""
        self.group.world.backend.clear(self.arrays["state"], stream)
        self._stage = Stage.UNROUTED
        self._is_fresh = False
        self._newest = 0
        self._plain_calls.clear()
        self._end_pending()

    def close(self) -> None:
        """Give back what the handle holds. Local; twice is fine. OrderError: an operation of it is pending."""
        with self.group.lock:
            if not self.is_closed:
                if not self.group.is_closed:
                    self._check_not_pending("close")
                self.is_closed = True
                self.group.mode.detach(self)
                self.arrays, self.y_view = {}, None
                self._exports = {}
                self._plain_calls = {}
                self._end_pending()

    def _take_routing(self, topk_idx: Any, topk_weights: Any, num_tokens: Any) -> None:
        group, cfg = self.group, self.group.cfg
        idx = group.view(topk_idx, "topk_idx")
        arrays.check_matrix(idx, "topk_idx", None, cfg.num_topk, TOPK_DTYPES, cfg.max_tokens_per_rank)
        check_contiguous(idx, "topk_idx")
        weights = None
        if topk_weights is not None:
            weights = group.view(topk_weights, "topk_weights")
            arrays.check_matrix(weights, "topk_weights", idx.shape[0], cfg.num_topk, ("float32",))
            check_contiguous(weights, "topk_weights")
        count = token_count(num_tokens, idx.shape[0], group)
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
        repeater = None if seen is None else self.group.mode.repeater(operation, self)
        self._plain_calls[operation] = None if repeater is None else (seen, repeater)

    def _signature(self, given: tuple[Any, ...]) -> tuple[Any, ...] | None:
        backend = self.group.world.backend
        signatures = tuple(arrays.signature(array, backend) for array in given)
        return None if None in signatures else signatures

    def _check_send_only(self, send_only: Any) -> None:
        if not isinstance(send_only, (bool, np.bool_)):
            raise ArgumentTypeError(f"send_only: got {type(send_only).__name__}, allowed: True or False")
        if send_only and self.group.cfg.mode != "ll":
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
            group = self.group
            fields = group.mode.received(self)
            exported = {k: group.export(v, framework) for k, v in fields.items() if k != "tokens"}
            if out is not None:
                return Received(tokens=out, **exported, _handle=weakref.ref(self))
            exported["tokens"] = group.export(fields["tokens"], framework, group.cfg.recv_dtype)
            kept = Received(**exported, lease=self.state.lease, _handle=weakref.ref(self))
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
            exported = self.group.export(self.arrays[name][: self.num_rows], framework)
            if arrays.is_ordered(framework):
                self._exports[key] = exported
        return exported

    def _check_open(self) -> None:
        if self.is_closed:
            raise ClosedError("this handle is closed")
