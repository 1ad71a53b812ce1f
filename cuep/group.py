"""Group: ranks that dispatch and combine together, their symmetric memory, kernels and order of operations."""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from cuep import layout
from cuep.agreement import agree_on_members, together
from cuep.arrays import View, export, view
from cuep.arrivals import Arrivals, arrivals_of
from cuep.backend import Array, Comm, Stream
from cuep.config import GroupConfig
from cuep.errors import ArgumentError, ArgumentTypeError, ClosedError, CuepError, OrderError, PeerTimeout
from cuep.handle import Handle
from cuep.high_throughput import HighThroughput
from cuep.launching import address
from cuep.low_latency import LowLatency
from cuep.mask import Mask, bits
from cuep.status import COUNTED, Cause, Report
from cuep.world import World

_serials = itertools.count()
_ROUTINGS = 32  # that ll dispatch tells apart: kRoutingShift of ll_dispatch.cuh
_leaked: list[Any] = []  # memory of groups that could not be closed in order: kernels may still use it


class Group:
    """Ranks of `world` with one GroupConfig. Making and closing it is collective; threads may share it.

    Args:
        world: what cuep.init returned.
        cfg: the settings, the same on all of the group's ranks.
        ranks: ranks of the world, in the order in which they are ranks of the group; None = all. Collective over the
            world all the same: every rank of the world makes the group at once, and passes either the list that it is
            in (so a world can be cut into several groups at a time), or, to stand aside, any list that others are in.
            A rank that stands aside has a group that is not active: it can only be closed.

    Attributes: rank, this process's rank in the group (-1: not active); num_ranks; is_active; members, the ranks of the
    world.

    All ranks must call the operations of a group (ll: dispatch, combine; ht: create_handle, update, dispatch, combine)
    in the same order. A call that is refused for its arguments counts as its operation (ll: a refused create_handle or
    update counts as the dispatch that the peers do next): the operation does nothing on any rank, and the next correct
    call works. Peers raise PeerRefused at check(), num_recv_tokens() or host_counts(), or at the call itself where it
    waits (NumPy arrays without a stream).

    Raises:
        ArgumentError, ArgumentTypeError: the settings do not work on this number of ranks.
        SettingsMismatch: ranks passed different settings, or lists of ranks that do not fit; names them.
        OrderError: inside a stream capture.
        CompileError, OutOfSymmetricMemory, BackendUnavailable: see there.
        (All of these on every rank.)
    """

    def __init__(self, world: World, cfg: GroupConfig, ranks: Sequence[int] | None = None) -> None:
        world.check_open()
        world.check_orderly()
        self.is_closed = True  # until there is something to close
        agreed = agree_on_members(world.comm, cfg, ranks, is_capturing=world.backend.stream(None).is_capturing())
        self.serial = next(_serials)
        self.world = world
        self.cfg = cfg
        self._timeout_s = float(cfg.timeout_s or 0)  # GroupConfig has filled it in
        self.members = agreed.members
        self.is_active = world.rank in self.members
        self.rank = self.members.index(world.rank) if self.is_active else -1
        self.num_ranks = len(self.members)
        #: to compile together; None where other groups may be made at the same time
        self.comm: Comm | None = world.comm if self.members == tuple(range(world.size)) else None
        self.num_local_experts = cfg.num_experts // self.num_ranks
        self.lock = threading.RLock()
        self._process = os.getpid()
        self._last_stream: Stream | None = (
            None  # of the newest operation outside captures: the next one comes behind it
        )
        self._captured_stream: Stream | None = None  # of the newest inside one, and where it is probably replayed
        self.call_stream: Stream | None = None  # of the newest call
        self._broken: CuepError | None = None
        self._mask: Mask | None = None
        self._tickets = itertools.count(1)
        self._in_flight: deque[tuple[int, tuple[Any, ...]]] = deque()
        self._num_dispatches = 0
        self._num_routings = 0
        self._pending: list[tuple[int, Handle]] = []  # number and handle of dispatches only sent, oldest first
        self._handle_serials = itertools.count(1)
        self._handles: weakref.WeakValueDictionary[int, Handle] = weakref.WeakValueDictionary()
        with world.backend.active():
            self._allocate(agreed.start_epoch, agreed.num_bytes)
        world.register(self)

    def _allocate(self, start_epoch: int, num_bytes: int) -> None:
        """num_bytes: of the largest arena among groups that are made at this time, as all ranks ask for the same."""
        backend, comm = self.world.backend, self.world.comm
        self.arena = layout.arena(self.cfg, self.num_ranks)
        self.memory = backend.symmetric(num_bytes)
        self.is_closed = False
        try:
            together(comm, lambda: self._make_workspace(start_epoch))
            if self.comm is None:
                together(comm, self._load_kernels)
            else:
                self._load_kernels()
        except Exception:  # raised on every rank
            self.is_closed = True
            self.memory.free()
            raise
        backend.synchronize()
        comm.barrier()  # nobody sends before every arena is ready

    def _load_kernels(self) -> None:
        if self.is_active:
            self.mode = LowLatency(self) if self.cfg.mode == "ll" else HighThroughput(self)
            self._mask = Mask(self, self._start_epoch) if self.cfg.mask else None

    def _make_workspace(self, start_epoch: int) -> None:
        if not self.is_active:
            self.workspace: dict[str, Array] = {}
            return
        backend = self.world.backend
        for name, region in self.arena.regions.items():
            if region.is_words and region.num_bytes:  # nothing may look like a flag of this group's operations
                self.words(name)[...] = (start_epoch & 0xFFFFFFFF) << 32
        self.workspace = {
            name: backend.zeros(shape, layout.dtype_of(dtype), self.cfg.allocator)
            for name, (shape, dtype) in layout.workspace_arrays(self.cfg, self.num_ranks).items()
        }
        self._control_ops()[:, :3] = start_epoch
        self._control_ops_end().view("uint32")[1] = bits((1,) * self.num_ranks)
        self._start_epoch = start_epoch
        self.report = Report(backend.pinned(layout.REPORT_BYTES), self.rank)

    def _control_ops(self) -> Array:
        """The words of `control` that belong to an operation each, [operation, word]."""
        words = layout.CONTROL_OP_WORDS
        return self.workspace["control"][: len(COUNTED) * words].reshape(-1, words)

    def _control_ops_end(self) -> Array:
        """The words behind them."""
        return self.workspace["control"][len(COUNTED) * layout.CONTROL_OP_WORDS :]

    def handle_values(self, handle: Handle | None) -> dict[str, Any]:
        """Values of Params fields that every kernel has: addresses of the group's and the handle's memory."""
        if handle is not None:
            own = handle.arrays
        else:  # a refused call without a handle needs only what a kernel writes all the same
            prefix = "refused_"
            own = {k.removeprefix(prefix): v for k, v in self.workspace.items() if k.startswith(prefix)}
        return {name: address(array) for name, array in own.items()} | {
            "arena": [self.memory.peers[rank] for rank in self.members],
            "control": address(self.workspace["control"]),
            "report": self.report.address,
            "timeout_ns": int(self._timeout_s * 1e9),
            "rank": self.rank,
            "handle": 0 if handle is None else handle.serial,
        }

    def workspace_address(self, name: str) -> int:
        return address(self.workspace[name])

    def words(self, name: str) -> Array:
        """A region of this rank's arena as uint64 words."""
        return self.region(name).view("uint64")

    def region(self, name: str) -> Array:
        """A region of this rank's arena as bytes."""
        start = self.arena.offsets[name]
        return self.memory.bytes[start : start + self.arena.regions[name].num_bytes]

    def in_place_offset(self, handle: Handle) -> int:
        """Where in every rank's arena a handle receives rows in place."""
        each = layout.in_place_bytes(self.cfg, self.num_ranks)
        return self.arena.offsets["in_place"] + (handle.serial - 1) * each

    def in_place_arrays(self, handle: Handle) -> dict[str, Array]:
        """Its tokens and scales there."""
        begin, num_bytes = self.in_place_offset(handle), layout.in_place_bytes(self.cfg, self.num_ranks)
        rows = self.memory.bytes[begin : begin + num_bytes]
        return self.parts_of_rows(rows.reshape(self.num_ranks, self.cfg.max_tokens_per_rank, -1))

    def parts_of_rows(self, rows: Array) -> dict[str, Array]:
        """Tokens and scales of rows as they travel, uint8 [..., sent_row_bytes]."""
        cfg, backend = self.cfg, self.world.backend
        found = {"tokens": rows.view(backend.array_dtype(layout.dtype_of(cfg.recv_dtype)))[..., : cfg.columns]}
        if cfg.num_scales:
            first = cfg.recv_row_bytes // cfg.scale_bytes
            scales = rows.view(backend.array_dtype(layout.dtype_of(cfg.scale_dtype)))
            found["scales"] = scales[..., first : first + cfg.scale_columns]
        return found

    def create_handle(
        self,
        topk_idx: Any,
        topk_weights: Any = None,
        *,
        num_tokens: Any = None,
        previous_event: Any = None,
        stream: Any = None,
    ) -> Handle:
        """Fix the routing of one set of tokens. ht: exchanges counts with all ranks (collective).

        Args:
            topk_idx: [num_rows, num_topk] int32 or int64, C-contiguous (argsort(...)[:, :k] is not: copy it): the
                expert of every (token, k); -1 = none. num_rows from 0 to max_tokens_per_rank, different on each
                rank. Ids outside [-1, num_experts) are treated as -1 and raise ArgumentError at check().
            topk_weights: [num_rows, num_topk] float32, C-contiguous, or None for weights of 1. Where topk_idx is -1
                the weight is ignored, even NaN.
            num_tokens: how many of the rows are tokens, 0 to num_rows; the others are not looked at, here, in x and in
                y. None: all. A number, or an int32 or int64 array of one element on the device: one CUDA graph then
                serves any number of tokens (out of range: ArgumentError at check() here, PeerRefused there).
            previous_event: an event that the stream first waits for, of cuep or another library.
            stream: where to enqueue; None = the current stream of topk_idx's framework.

        The arrays are read in stream order: by this call (ht), or by the first dispatch (ll).

        Raises:
            ArgumentError, ArgumentTypeError: an argument does not fit. ClosedError, PeerTimeout: see Group.check.
            MemoryError: no room for what the handle owns (cuep.footprint). OrderError: inside a stream capture, where
            nothing can be allocated (Handle.update can be captured), or too many operations are pending.
        """
        with self.lock:
            self._check_usable()
            self._check_not_capturing(topk_idx, stream)
            self.check_turn("create_handle")
            try:
                handle = Handle(self, next(self._handle_serials))
            except Exception:  # no memory, as the allocator's own kind of error may say
                self.take_routing()
                self.refuse_route(self.fallback_stream())  # the peers wait for this rank's part
                raise
            self._handles[handle.serial] = handle
            handle.route("create_handle", topk_idx, topk_weights, num_tokens, previous_event, stream)
        return handle

    def _check_not_capturing(self, topk_idx: Any, stream: Any) -> None:
        try:
            is_capturing = self.world.backend.stream(stream, topk_idx).is_capturing()
        except (ArgumentError, ArgumentTypeError):
            return  # refused as an operation is, later
        if is_capturing:
            raise OrderError(
                "create_handle allocates memory, which a stream capture does not allow: make the handle before, and"
                " update() it inside"
            )

    def check(self) -> None:
        """Wait for everything enqueued so far and raise what went wrong on the device or on another rank.

        Raises:
            PeerTimeout: a peer did not do its part in time. The group can only be closed afterwards.
            PeerRefused: a peer refused its part of an operation since the last check, which did nothing on any rank.
            ArgumentError: since the last check there were expert ids out of range; ids that fill an expert's zone
                beyond its rows; more rows for a rank than max_recv_tokens_per_rank; an `out` or expert_out with fewer
                rows than were received; a num_tokens out of range; or row_weight_grads on some ranks only.
            DeviceError: a kernel failed. ClosedError: the group is closed or broke down. OrderError: inside a capture,
                or two operations of the group ran at once, as replays of two graphs can (it can only be closed then).
        """
        with self.finished("check"):
            num_bad_ids = self.report.take_bad_ids()
            if num_bad_ids:
                raise ArgumentError(
                    f"topk_idx had {num_bad_ids} ids outside [-1, {self.cfg.num_experts}); they were treated as -1"
                )

    def update_mask(self, active: Any) -> None:
        """Go on with some of the ranks, or with all again. Needs GroupConfig(mask=True). Waits for the device.

        Collective over the ranks that are to take part: each calls it with the same values, when it is through with
        what it did before, as after a PeerTimeout, which is not raised any more then. Tokens for experts of other
        ranks are left out of dispatch and combine from then on, and counted (num_dropped); weights are not made to
        add up to 1 again. The others' calls raise PeerTimeout as soon as they run; a rank that was only stopped can
        be taken in again, if it calls this as well. Nothing that was pending is completed; handles keep their memory
        and need an update(); CUDA graphs that begin with a handle's dispatch of a new routing can be replayed. To take
        out a rank that is well, let all ranks, that one too, check() and meet before: else it may leave them an
        operation short, which ends in PeerTimeout.

        Args:
            active: [num_ranks] 0 or 1, 1 = takes part (as NCCL EP and FlashInfer have it; vLLM has 1 = left out). This
                rank's own must be 1.

        Raises:
            ArgumentError, ArgumentTypeError: active does not fit; nothing changes.
            PeerTimeout: not all of these ranks called it within 2 * timeout_s + 1 s; it may be called again, with
                others.
            OrderError: mask=False, or inside a stream capture. ClosedError: the group is closed, or broke down in
                another way.
        """
        with self.lock:
            self._check_here()
            if self._mask is None:
                raise OrderError(f"update_mask needs GroupConfig(mask=True), got mask={self.cfg.mask}")
            if self._broken is not None and not isinstance(self._broken, PeerTimeout):
                raise ClosedError(f"this group broke down and can only be closed: {self._broken}")
            wanted = self._mask.checked(active)
            self._wait_for_all("update_mask")
            if self._broken is None and not self.report.has_timed_out:
                self._check_epochs()  # what was refused is told by check(), as ever
            else:
                self.report.take_refusals()
            self.report.clear_timeout()
            self._pending.clear()
            self._num_routings = 0
            stream = self.fallback_stream()
            for handle in list(self._handles.values()):
                if not handle.is_closed:
                    handle.forget_routing(stream)
            self._mask.enqueue(wanted, self.take_ticket(), stream)
            stream.synchronize()
            self._broken = None
            self._release_finished(is_idle=True)
            if self.report.has_timed_out:
                self._break_down()
            self._mask.active = wanted

    def clear_mask(self) -> None:
        """update_mask with all ranks."""
        self.update_mask([1] * self.num_ranks)

    def query_mask(self) -> npt.NDArray[np.int32]:
        """Which ranks take part, int32 [num_ranks], 1 = does, as was last agreed on. Local, does not wait."""
        return np.array((1,) * self.num_ranks if self._mask is None else self._mask.active, np.int32)

    def num_dropped(self) -> int:
        """(token, k) pairs of this rank that were left out so far because their expert's rank did not take part; each
        dispatch counts its own. Waits for the device. Raises as check()."""
        with self.finished("num_dropped"):
            return self.report.num_dropped

    def arrival_stats(self, *, clear: bool = False) -> dict[str, Arrivals]:
        """How long this rank waited for each rank, in "dispatch" and in "combine", since the group was made: what comes
        late shows in it. Needs GroupConfig(arrival_stats=True). Local. Waits for the device.

        Args:
            clear: begin to count anew.

        Raises:
            OrderError: arrival_stats=False. Otherwise as check().
        """
        if not self.cfg.arrival_stats:
            raise OrderError("arrival_stats needs GroupConfig(arrival_stats=True)")
        with self.finished("arrival_stats"):
            backend, array, num_ranks = self.world.backend, self.workspace["arrivals"], self.num_ranks
            words = backend.to_numpy(array, self._last_stream)
            if clear:
                stream = self.fallback_stream()
                backend.clear(array[:-1], stream)  # not whose turn it is
                stream.synchronize()  # a graph may be replayed anywhere next
            return arrivals_of(words, num_ranks)

    def begin(self) -> Stream:
        """Start a call; returns the stream for a refusal, should the call's own stream not be known. Hold `lock`."""
        self._check_usable()
        if self.report.has_timed_out:
            self._break_down()
        self._release_finished()
        return self.fallback_stream()

    def refuse_route(self, stream: Stream) -> None:
        """Take part in a routing, or (ll) in the dispatch that follows it, with nothing."""
        if self.cfg.mode == "ll":
            self.take_turn()
        self.mode.refuse_route(stream)

    def check_turn(self, call: str) -> None:
        """OrderError where the memory of the next dispatch still holds one that is to be received. Nothing is sent.

        (Only the device can tell the same of a combine: it knows which combines a refusal made none.)
        """
        if self._pending:
            oldest, handle = self._pending[0]
            if self._num_dispatches + 1 - oldest >= self.cfg.num_buffers:
                raise OrderError(
                    f"{call}: num_buffers={self.cfg.num_buffers} operations of a kind may be under way at a time;"
                    f" complete() the oldest pending dispatch first (handle {handle.serial})"
                )

    def take_routing(self) -> int:
        """Number a create_handle or update, accepted or refused: all ranks make these calls in the same order."""
        self._num_routings += 1
        return self._num_routings % _ROUTINGS

    def take_turn(self) -> None:
        """A dispatch is sent or refused."""
        self._num_dispatches += 1

    def begin_pending(self, handle: Handle) -> None:
        self._pending.append((self._num_dispatches, handle))

    def end_pending(self, handle: Handle) -> None:
        self._pending = [entry for entry in self._pending if entry[1] is not handle]

    def put_behind(self, stream: Stream) -> None:
        """What is enqueued on `stream` from now on comes after the group's operations so far."""
        if stream.is_capturing():
            return
        for other in (self._last_stream, self._captured_stream):
            if other is not None and other.key != stream.key and not other.is_capturing():
                stream.wait(other.record())

    def fallback_stream(self) -> Stream:
        return self._last_stream or self.world.backend.stream(None)

    def go_on_at(self, stream: Stream) -> None:
        """Put the next operation, on `stream`, behind the group's previous one."""
        last, captured = self._last_stream, self._captured_stream
        if last is None or last.key != stream.key or (captured is not None and captured.key != stream.key):
            if stream.is_capturing():  # nothing of it runs now, and eager work goes on where it was
                if getattr(stream, "owner", None) is not None:  # else nobody says how long it lives
                    self._captured_stream = stream
                return
            self.put_behind(stream)
            if captured is not None and captured.key != stream.key and not captured.is_capturing():
                self._captured_stream = None  # from here on the newest operation is this one
        self._last_stream = stream

    def choose_stream(self, stream: Any, like: Any, previous_event: Any = None) -> Stream:
        """The stream of an operation, put behind the group's previous one, and behind previous_event."""
        chosen: Stream = self.world.backend.stream(stream, like)
        self.call_stream = chosen
        self.go_on_at(chosen)
        if previous_event is not None:
            chosen.wait(self.world.backend.event(previous_event))
        return chosen

    def view(self, array: Any, name: str, *, is_written: bool = False) -> View:
        """An argument of the call whose stream was chosen last."""
        return view(array, name, self.world.backend, self.call_stream, is_written=is_written)

    def export(self, array: Array, framework: str, dtype: str | None = None) -> Any:
        """A result of the call whose stream was chosen last, as an array of `framework`. dtype: what bytes are."""
        return export(array, framework, self.world.backend, self.call_stream, dtype)

    def take_ticket(self, *objects: Any) -> int:
        """Number a launch, and keep what it reads and writes until the device says that it is over."""
        ticket = next(self._tickets) & 0xFFFFFFFF
        self._in_flight.append((ticket, objects))
        return ticket

    def _release_finished(self, *, is_idle: bool = False) -> None:
        """Let go of what launches that are over have read. is_idle: all that was enqueued is over; ll kernels, and
        copies, say so of themselves only when the next kernel does."""
        done = self.report.ticket + is_idle
        while self._in_flight and (done - self._in_flight[0][0]) & 0xFFFFFFFF < 2**31:
            self._in_flight.popleft()

    def leave(self, chosen: Stream) -> None:
        """After an operation was launched: on a synchronous stream it is over, so raise what came of it."""
        if chosen.is_synchronous:
            self.raise_pending()
            self._release_finished(is_idle=True)

    @contextmanager
    def finished(self, call: str) -> Iterator[None]:
        """Lock the group and wait for everything enqueued so far."""
        with self.lock:
            self._check_usable()
            self._wait_for_all(call)
            self.raise_pending()
            self._check_epochs()
            self._release_finished(is_idle=True)
            yield

    def _wait_for_all(self, call: str) -> None:
        if self.call_stream is not None and self.call_stream.is_capturing():
            raise OrderError(f"{call} waits for the device, which a stream capture does not allow")
        for stream in {self._last_stream, self._captured_stream, self.call_stream}:
            if stream is not None and not stream.is_capturing():
                stream.synchronize()

    def _check_epochs(self) -> None:
        """Each epoch must have been taken once. The stream has been waited for."""
        ops = self.world.backend.to_numpy(self._control_ops(), self._last_stream)
        num_epochs = (ops[:, 3] & np.uint64(0xFFFFFFFF)).astype(np.int64)
        newest = (ops[:, 0] - np.uint64(self._start_epoch)).astype(np.int64)
        for operation, taken, count in zip(COUNTED, num_epochs, newest, strict=True):
            if (taken - count) % 2**32:
                self._broken = OrderError(
                    f"{operation}: two operations of this group ran at once on rank {self.rank}; replays of graphs and"
                    " eager calls of one group must follow one another. The group can only be closed now"
                )
                raise self._broken

    def raise_pending(self) -> None:
        """Raise what the device has reported so far; does not wait."""
        if self.report.has_timed_out:
            self._break_down()
        error: CuepError | None = None
        for refusal in self.report.take_refusals():
            if refusal.rank == self.rank and refusal.cause is Cause.CALL:
                continue  # the call that was refused has raised its error already
            handle = self._handles.get(refusal.handle)
            if handle is not None:
                handle.was_refused(refusal)
            error = error or refusal.error(self.cfg)
        if error is not None:
            raise error

    def _break_down(self) -> None:
        self._broken = self.report.timeout(self._timeout_s, has_mask=self.cfg.mask)
        raise self._broken

    def _check_usable(self) -> None:
        self._check_here()
        if self._broken is not None:
            way_out = "closed, or go on by update_mask()" if self._can_go_on() else "closed"
            raise ClosedError(f"this group broke down and can only be {way_out}: {self._broken}")

    def _can_go_on(self) -> bool:
        return self._mask is not None and isinstance(self._broken, PeerTimeout)

    def _check_here(self) -> None:
        if self.is_closed:
            raise ClosedError("this group is closed")
        if not self.is_active:
            raise OrderError(f"rank {self.world.rank} is not among the ranks {self.members} of this group")
        if os.getpid() != self._process:
            raise ClosedError("this group belongs to the process that this one was forked from")

    def close(self) -> None:
        """Free the group's memory. Collective; twice is fine.

        Waits for what is enqueued, and for the peers at most timeout_s. Where they do not come, or a rank has seen a
        PeerTimeout, or has masked others, memory is leaked. If all ranks did come, a new group can be made in any case;
        else none.

        Raises:
            what check() would have raised, after closing; PeerTimeout if the peers did not come or broke down.
        """
        with self.lock:
            if self.is_closed:
                return
            problem: CuepError | None = None
            if self._broken is None and self.is_active:
                try:
                    self.check()
                except CuepError as error:
                    problem = error
            is_whole = self._broken is None and all(self.query_mask())
            is_leaked = True  # unless all ranks say that no kernel can still be storing into an arena
            if not self.world.meet(self._timeout_s):
                late = "close: the peers did not close this group in time; its memory is leaked"
                problem = problem or (PeerTimeout(late) if is_whole else None)
            else:
                broken = [rank for rank, is_it in enumerate(self.world.comm.allgather(not is_whole)) if is_it]
                is_leaked = bool(broken)
                if broken and is_whole and problem is None:
                    problem = PeerTimeout(f"close: this group broke down on ranks {broken}; its memory is leaked")
            self._end(is_leaked=is_leaked)
            if not is_leaked:
                self.memory.free()
                if self.is_active:
                    self.world.backend.unpinned(self.report.memory)
            if problem is not None:
                raise problem

    def abandon(self) -> None:
        """Local: what an exception leaves behind. Peers may be anywhere, so nothing collective is done."""
        if not self.is_closed:
            self._end(is_leaked=True)

    def _end(self, *, is_leaked: bool) -> None:
        self.is_closed = True
        if is_leaked:  # kernels may still run
            report = self.report if self.is_active else None
            _leaked.append((self.memory, self.workspace, report, list(self._in_flight), self._pending))
            _leaked.extend(handle.arrays for handle in self._handles.values())
            self.memory.leak()
        for handle in list(self._handles.values()):
            handle.close()
        self.workspace = {}
        self._in_flight.clear()
        self._pending = []
        self.world.forget(self)

    def __enter__(self) -> Group:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()
