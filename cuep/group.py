"""Group: ranks that dispatch and combine together, their symmetric memory, kernels and order of operations."""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from cuep import layout
from cuep.agreement import agree_on_settings, together
from cuep.backend import Array, Stream
from cuep.config import GroupConfig
from cuep.errors import ArgumentError, ClosedError, CuepError, OrderError, PeerTimeout
from cuep.handle import Handle
from cuep.high_throughput import HighThroughput
from cuep.launching import address
from cuep.low_latency import LowLatency
from cuep.status import Cause, Report
from cuep.world import World

_serials = itertools.count()
_leaked: list[Any] = []  # memory of groups that could not be closed in order: kernels may still use it


class Group:
    """The ranks of `world` with one GroupConfig. Making and closing it is collective; threads may share it.

    All ranks must call the operations of a group (ll: dispatch, combine; ht: create_handle, update, dispatch, combine)
    in the same order. A call that is refused for its arguments counts as its operation (ll: a refused create_handle or
    update counts as the dispatch that the peers do next): the operation does nothing on any rank, and the next correct
    call works. Peers raise PeerRefused at check(), num_recv_tokens() or host_counts(), or at the call itself where it
    waits (NumPy arrays without a stream).

    Raises:
        ArgumentError, ArgumentTypeError: the settings do not work on this number of ranks.
        SettingsMismatch: ranks passed different settings; names them.
        CompileError, OutOfSymmetricMemory, BackendUnavailable: see there.
        (All of these on every rank.)
    """

    def __init__(self, world: World, cfg: GroupConfig) -> None:
        world.check_open()
        self.is_closed = True  # until there is something to close
        start_epoch = agree_on_settings(world.comm, cfg)
        cfg.check_ranks(world.size)
        self.serial = next(_serials)
        self.world = world
        self.comm = world.comm
        self.cfg = cfg
        self._timeout_s = float(cfg.timeout_s or 0)  # GroupConfig has filled it in
        self.rank = world.rank
        self.num_ranks = world.size
        self.num_local_experts = cfg.num_experts // self.num_ranks
        self.max_recv_rows = layout.max_recv_rows(cfg, self.num_ranks)
        self.lock = threading.RLock()
        self._process = os.getpid()
        self._last_stream: Stream | None = None
        self._broken: CuepError | None = None
        self._tickets = itertools.count(1)
        self._in_flight: deque[tuple[int, tuple[Any, ...]]] = deque()
        self._handle_serials = itertools.count(1)
        self._handles: weakref.WeakValueDictionary[int, Handle] = weakref.WeakValueDictionary()
        with world.backend.active():
            self._allocate(start_epoch)
        world.register(self)

    def _allocate(self, start_epoch: int) -> None:
        backend, comm = self.world.backend, self.world.comm
        self.arena = layout.arena(self.cfg, self.num_ranks)
        self.memory = backend.symmetric(self.arena.num_bytes)
        self.is_closed = False
        try:
            together(comm, lambda: self._make_workspace(start_epoch))
            self.mode = LowLatency(self) if self.cfg.mode == "ll" else HighThroughput(self)
        except (CuepError, MemoryError):  # raised on every rank
            self.is_closed = True
            self.memory.free()
            raise
        backend.synchronize()
        comm.barrier()  # nobody sends before every arena is ready

    def _make_workspace(self, start_epoch: int) -> None:
        backend = self.world.backend
        for name, region in self.arena.regions.items():
            if region.is_words and region.num_bytes:  # nothing may look like a flag of this group's operations
                self.words(name)[...] = (start_epoch & 0xFFFFFFFF) << 32
        self.workspace = {
            name: backend.zeros(shape, layout.dtype_of(dtype))
            for name, (shape, dtype) in layout.workspace_arrays(self.cfg, self.num_ranks).items()
        }
        self.workspace["control"][:3] = start_epoch
        self.report = Report(backend.pinned(layout.REPORT_BYTES), self.rank)

    def handle_values(self, handle: Handle | None) -> dict[str, Any]:
        """Values of Params fields that every kernel has: addresses of the group's and the handle's memory."""
        if handle is not None:
            own = handle.arrays
        else:  # a refused call without a handle needs only what a kernel writes all the same
            prefix = "refused_"
            own = {k.removeprefix(prefix): v for k, v in self.workspace.items() if k.startswith(prefix)}
        return {name: address(array) for name, array in own.items()} | {
            "arena": self.memory.peers,
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

    def create_handle(
        self, topk_idx: Any, topk_weights: Any = None, *, num_tokens: Any = None, stream: Any = None
    ) -> Handle:
        """Fix the routing of one set of tokens. ht: exchanges counts with all ranks (collective).

        Args:
            topk_idx: [num_tokens, num_topk] int32 or int64, C-contiguous (argsort(...)[:, :k] is not: copy it): the
                expert of every (token, k); -1 = none. num_tokens from 0 to max_tokens_per_rank, different on each
                rank. Ids outside [-1, num_experts) are treated as -1 and raise ArgumentError at check().
            topk_weights: [num_tokens, num_topk] float32, C-contiguous, or None for weights of 1. Where topk_idx is -1
                the weight is ignored, even NaN.
            stream: where to enqueue; None = the current stream of topk_idx's framework.

        Both arrays are read in stream order: by this call (ht), or by the first dispatch (ll).

        Raises:
            ArgumentError, ArgumentTypeError: an argument does not fit. ClosedError, PeerTimeout: see Group.check.
            MemoryError: no room for what the handle owns (cuep.footprint).
        """
        with self.lock:
            self._check_usable()
            try:
                handle = Handle(self, next(self._handle_serials))
            except MemoryError:
                self.mode.refuse_route(self.fallback_stream())  # the peers wait for this rank's part
                raise
            self._handles[handle.serial] = handle
            handle.route(topk_idx, topk_weights, stream, num_tokens)
        return handle

    def check(self) -> None:
        """Wait for everything enqueued so far and raise what went wrong on the device or on another rank.

        Raises:
            PeerTimeout: a peer did not do its part in time. The group can only be closed afterwards.
            PeerRefused: a peer refused its part of an operation since the last check, which did nothing on any rank.
            ArgumentError: since the last check there were expert ids out of range; ids that fill an expert's zone
                beyond its rows; or an expert_out with fewer rows than were received.
            DeviceError: a kernel failed. ClosedError: the group is closed or broke down. OrderError: inside a capture.
        """
        with self.finished("check"):
            num_bad_ids = self.report.take_bad_ids()
            if num_bad_ids:
                raise ArgumentError(
                    f"topk_idx had {num_bad_ids} ids outside [-1, {self.cfg.num_experts}); they were treated as -1"
                )

    def begin(self) -> Stream:
        """Start a call; returns the stream for a refusal, should the call's own stream not be known. Hold `lock`."""
        self._check_usable()
        if self.report.is_broken:
            self._break_down()
        self._release_finished()
        return self.fallback_stream()

    def fallback_stream(self) -> Stream:
        return self._last_stream or self.world.backend.stream(None)

    def choose_stream(self, stream: Any, like: Any) -> Stream:
        """The stream of an operation, put behind the group's previous one."""
        chosen: Stream = self.world.backend.stream(stream, like)
        last = self._last_stream
        if last is not None and last.key != chosen.key and not (chosen.is_capturing() or last.is_capturing()):
            chosen.wait(last.record())
        self._last_stream = chosen
        return chosen

    def take_ticket(self, *objects: Any) -> int:
        """Number a launch, and keep what it reads and writes until the device says that it is over."""
        ticket = next(self._tickets) & 0xFFFFFFFF
        self._in_flight.append((ticket, objects))
        return ticket

    def _release_finished(self) -> None:
        done = self.report.ticket
        while self._in_flight and (done - self._in_flight[0][0]) & 0xFFFFFFFF < 2**31:
            self._in_flight.popleft()

    def leave(self, chosen: Stream) -> None:
        """After an operation was launched: on a synchronous stream it is over, so raise what came of it."""
        if chosen.is_synchronous:
            self.raise_pending()

    @contextmanager
    def finished(self, call: str) -> Iterator[None]:
        """Lock the group and wait for everything enqueued so far."""
        with self.lock:
            self._check_usable()
            if self._last_stream is not None:
                if self._last_stream.is_capturing():
                    raise OrderError(f"{call} waits for the device, which a stream capture does not allow")
                self._last_stream.synchronize()
            self.raise_pending()
            self._release_finished()
            yield

    def raise_pending(self) -> None:
        """Raise what the device has reported so far; does not wait."""
        if self.report.is_broken:
            self._break_down()
        error: CuepError | None = None
        for refusal in self.report.take_refusals():
            if refusal.rank == self.rank and refusal.cause is Cause.CALL:
                continue  # the call that was refused has raised its error already
            handle = self._handles.get(refusal.handle)
            if handle is not None:
                handle.was_refused(refusal)
            error = error or refusal.error(self.cfg.max_tokens_per_rank, self.max_recv_rows)
        if error is not None:
            raise error

    def _break_down(self) -> None:
        self._broken = self.report.breakdown(self._timeout_s)
        raise self._broken

    def _check_usable(self) -> None:
        if self.is_closed:
            raise ClosedError("this group is closed")
        if os.getpid() != self._process:
            raise ClosedError("this group belongs to the process that this one was forked from")
        if self._broken is not None:
            raise ClosedError(f"this group broke down and can only be closed: {self._broken}")

    def close(self) -> None:
        """Free the group's memory. Collective; twice is fine.

        Waits for what is enqueued, and for the peers at most timeout_s: what was not freed by then is leaked. On a rank
        that saw a PeerTimeout it is local, and memory is leaked.

        Raises:
            what check() would have raised, after closing; PeerTimeout if the peers did not come.
        """
        with self.lock:
            if self.is_closed:
                return
            problem: CuepError | None = None
            if self._broken is None:
                try:
                    self.check()
                except CuepError as error:
                    problem = error
            is_late = self._broken is None and not self.world.meet(self._timeout_s)
            if is_late and problem is None:  # a peer may still be storing into this arena
                problem = PeerTimeout("close: the peers did not close this group in time; its memory is leaked")
            is_leaked = self._broken is not None or is_late
            self._end(is_leaked=is_leaked)
            if not is_leaked:
                self.memory.free()
            if problem is not None:
                raise problem

    def abandon(self) -> None:
        """Local: what an exception leaves behind. Peers may be anywhere, so nothing collective is done."""
        if not self.is_closed:
            self._end(is_leaked=True)

    def _end(self, *, is_leaked: bool) -> None:
        self.is_closed = True
        if is_leaked:  # kernels may still run
            _leaked.append((self.memory, self.workspace, self.report, list(self._in_flight)))
            _leaked.extend(handle.arrays for handle in self._handles.values())
            self.memory.leak()
        for handle in list(self._handles.values()):
            handle.close()
        self.world.forget(self)

    def __enter__(self) -> Group:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()
