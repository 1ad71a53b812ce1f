"""Group: ranks that dispatch and combine together, their symmetric memory, kernels and order of operations."""

from __future__ import annotations

import itertools
import logging
import os
import threading
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from cuep import env, layout
from cuep.backend import Array, Stream
from cuep.config import GroupConfig
from cuep.errors import (
    ArgumentError,
    ArgumentTypeError,
    ClosedError,
    CuepError,
    OrderError,
    PeerRefused,
    SettingsMismatch,
)
from cuep.handle import Handle
from cuep.high_throughput import HighThroughput
from cuep.launching import address
from cuep.low_latency import LowLatency
from cuep.status import Report
from cuep.world import World

_serials = itertools.count()
_log = logging.getLogger("cuep")


class Group:
    """The ranks of `world` with one GroupConfig. Making and closing it is collective; threads may share it.

    All ranks must call the operations of a group (ll: dispatch, combine; ht: create_handle, update, dispatch, combine)
    in the same order. A call that is refused for its arguments counts as its operation: its peers raise PeerRefused and
    the next correct call works.

    Raises:
        ArgumentError: the settings do not work on this number of ranks.
        SettingsMismatch: ranks passed different settings; names them. Raised on every rank.
        CompileError, OutOfSymmetricMemory, BackendUnavailable: raised on every rank.
    """

    def __init__(self, world: World, cfg: GroupConfig) -> None:
        world.check_open()
        self.is_closed = True  # until there is something to close
        self.serial = next(_serials)
        self.world = world
        self.cfg = cfg
        self.rank = world.rank
        self.num_ranks = world.size
        self.num_local_experts = cfg.num_experts // max(self.num_ranks, 1)
        self.lock = threading.RLock()
        self._process = os.getpid()
        self._last_stream: Stream | None = None
        self._broken: CuepError | None = None
        self._handle_serials = itertools.count(1)
        self._handles: weakref.WeakValueDictionary[int, Handle] = weakref.WeakValueDictionary()
        _agree_on_settings(world, cfg)
        cfg.check_ranks(self.num_ranks)
        with world.backend.active():
            self._allocate()
        world.register(self)

    def _allocate(self) -> None:
        backend = self.world.backend
        start_epoch = env.start_epoch()
        self.arena = layout.arena(self.cfg, self.num_ranks)
        self.memory = backend.symmetric(self.arena.num_bytes)
        self.is_closed = False
        try:
            for name, region in self.arena.regions.items():
                if region.is_words and region.num_bytes:  # nothing may look like a flag of this group's operations
                    self.words(name)[...] = (start_epoch & 0xFFFFFFFF) << 32
            self.workspace = {
                name: backend.zeros(shape, layout.dtype_of(dtype))
                for name, (shape, dtype) in layout.workspace_arrays(self.cfg, self.num_ranks).items()
            }
            self.workspace["control"][:3] = start_epoch
            self.report = Report(backend.pinned(layout.REPORT_BYTES), self.rank)
            self.mode = LowLatency(self) if self.cfg.mode == "ll" else HighThroughput(self)
        except CuepError:  # raised on every rank
            self.close()
            raise
        backend.synchronize()
        self.world.comm.barrier()  # nobody sends before every arena is ready

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
            "timeout_ns": int(float(self.cfg.timeout_s or 0) * 1e9),
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

    def create_handle(self, topk_idx: Any, topk_weights: Any = None, *, stream: Any = None) -> Handle:
        """Fix the routing of one set of tokens. ht: exchanges counts with all ranks (collective).

        Args:
            topk_idx: [num_tokens, num_topk] int32 or int64, expert of every (token, k); -1 = none. num_tokens from 0 to
                max_tokens_per_rank, different on each rank. Ids outside [-1, num_experts) are treated as -1 and raise
                ArgumentError at check().
            topk_weights: [num_tokens, num_topk] float32, or None for weights of 1. Where topk_idx is -1 the weight is
                ignored, even NaN.
            stream: where to enqueue; None = the current stream of topk_idx's framework.

        Both arrays are read in stream order: by this call (ht), or by the first dispatch (ll).
        """
        handle = Handle(self, next(self._handle_serials))
        self._handles[handle.serial] = handle
        handle.route(topk_idx, topk_weights, stream)
        return handle

    def check(self) -> None:
        """Wait for everything enqueued so far and raise what went wrong on the device or on another rank.

        Raises:
            PeerTimeout, PeerRefused, DeviceError; ArgumentError for expert ids out of range since the last check.
        """
        with self.finished("check"):
            num_bad_ids = self.report.take_bad_ids()
            if num_bad_ids:
                raise ArgumentError(
                    f"topk_idx had {num_bad_ids} ids outside [-1, {self.cfg.num_experts}); they were treated as -1"
                )

    def enter(self, stream: Any, like: Any) -> Stream:
        """Choose the stream of an operation and put it behind the group's previous one. `lock` must be held."""
        self._check_usable()
        self.raise_pending()
        chosen: Stream = self.world.backend.stream(stream, like)
        last = self._last_stream
        if last is not None and last.key != chosen.key and not (chosen.is_capturing() or last.is_capturing()):
            chosen.wait(last.record())
        self._last_stream = chosen
        return chosen

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
            yield

    def raise_pending(self) -> None:
        """Raise what the device has reported so far; does not wait."""
        if not self.report.has_news():
            return
        timeout = self.report.timeout(float(self.cfg.timeout_s or 0))
        if timeout is not None:
            self._broken = timeout
            raise timeout
        refusal = self.report.take_refusal()
        if refusal is None:
            return
        has_overflow = self.report.take_overflow()
        if refusal["rank"] == self.rank and not has_overflow:
            return  # the call that was refused has raised its error already
        handle = self._handles.get(refusal["handle"])
        if handle is not None:
            handle.was_refused(refusal["op"])
        if has_overflow:
            raise ArgumentError(
                f"{refusal['op']}: topk_idx names an expert more than max_tokens_per_rank="
                f"{self.cfg.max_tokens_per_rank} times, which its zone has no rows for; nothing was dispatched"
            )
        raise PeerRefused(f"{refusal['op']}: rank {refusal['rank']} refused its call, so it did nothing on any rank")

    def _check_usable(self) -> None:
        if self.is_closed:
            raise ClosedError("this group is closed")
        if os.getpid() != self._process:
            raise ClosedError("this group belongs to the process that this one was forked from")
        if self._broken is not None:
            raise ClosedError(f"this group broke down and can only be closed: {self._broken}")

    def close(self) -> None:
        """Free the group's memory. Collective; twice is fine. After a PeerTimeout it is local, and memory is leaked."""
        with self.lock:
            if self.is_closed:
                return
            self.is_closed = True
            for handle in list(self._handles.values()):
                handle.close()
            if self._broken is not None:
                self.memory.leak()
                return
            if self._last_stream is not None:
                self._last_stream.synchronize()
            try:
                self.world.comm.barrier()  # a peer may still be storing into this arena
            except Exception as error:  # the communicator is gone, so nothing collective is possible any more
                _log.warning("group %d leaks its memory, since its ranks cannot be reached: %s", self.serial, error)
                self.memory.leak()
                return
            self.memory.free()

    def abandon(self) -> None:
        """Local: what an exception leaves behind. Peers may be anywhere, so nothing collective is done."""
        if not self.is_closed:
            self.is_closed = True
            self.memory.leak()

    def __enter__(self) -> Group:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self.abandon()

    def __del__(self) -> None:
        if not getattr(self, "is_closed", True):
            warnings.warn(
                f"cuep group {self.serial} was never closed; its memory is leaked", ResourceWarning, stacklevel=2
            )


def _agree_on_settings(world: World, cfg: GroupConfig) -> None:
    """Collective: SettingsMismatch on every rank, naming each setting that differs."""
    if not isinstance(cfg, GroupConfig):
        mine: dict[str, Any] | str = f"cfg must be a GroupConfig, got {type(cfg).__name__}"
    else:
        mine = cfg.settings()
    everyone = world.comm.allgather(mine)
    for rank, settings in enumerate(everyone):
        if isinstance(settings, str):
            raise ArgumentTypeError(f"rank {rank}: {settings}")
    differing = [name for name in everyone[0] if any(other[name] != everyone[0][name] for other in everyone)]
    if differing:
        values = "; ".join(f"{name}: {[settings[name] for settings in everyone]}" for name in differing)
        raise SettingsMismatch(f"GroupConfig differs between ranks 0 to {world.size - 1}: {values}")
