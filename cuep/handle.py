"""Handle: the routing of one set of tokens, and the operations on it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from cuep import arrays, layout
from cuep.backend import Array
from cuep.errors import ArgumentError, ArgumentTypeError, ClosedError, OrderError
from cuep.launching import CombineCall
from cuep.status import ROUTE, Refusal

if TYPE_CHECKING:
    from cuep.group import Group

_TOPK_DTYPES = ("int32", "int64")


@dataclass(frozen=True)
class Received:
    """What a rank received; arrays of x's framework that belong to the handle and keep their addresses.

    They hold until the handle's next dispatch, and are complete in stream order. L local experts, N ranks, B
    max_tokens_per_rank, K num_topk, H hidden. What a layout does not have is None. Rows beyond the counts are
    unspecified: never read them.

    Attributes:
        tokens: ll expert_major [L, N*B, H], the first expert_counts[l] rows of each; ht flat [N*B, H], the first total.
            Order: ll by source rank, token, k; ht by source rank, token.
        expert_counts: int32 [L], rows of each local expert (ht flat: (row, k) pairs).
        expert_offsets: int32 [L+1], first row of each expert's zone in tokens.reshape(-1, H) (ll).
        src_rank_counts: int32 [L, N] (ll) or [N] (ht), rows from each source rank.
        source: int32, (rank, token, k) of every row [L, N*B, 3] (ll), or (rank, token) [N*B, 2] (ht).
        topk_idx: int32 [N*B, K], local expert or -1 of every row; -1 in rows beyond total (ht).
        topk_weights: float32 [N*B, K], 0 where topk_idx is -1; None if the handle has no weights (ht).
        total: int32 [1], rows received.
        lease: keeps a receive buffer (ht) from other handles as long as someone holds these rows.
    """

    tokens: Any
    expert_counts: Any
    src_rank_counts: Any
    source: Any
    total: Any
    expert_offsets: Any = None
    topk_idx: Any = None
    topk_weights: Any = None
    lease: Any = field(default=None, repr=False)


class Stage(enum.Enum):
    """How far a handle is; decides which call may come next."""

    UNROUTED = "has no routing: its last create_handle or update was refused"
    ROUTED = "was not dispatched yet"
    DISPATCHED = "was dispatched"
    COMBINED = "was combined already"


class Handle:
    """Made by Group.create_handle. Operations are enqueued and nothing blocks but num_recv_tokens and host_counts.

    (NumPy has no streams: with NumPy arrays and stream=None a call returns when it is done.)
    """

    def __init__(self, group: Group, serial: int) -> None:
        self.serial = serial
        self.num_tokens = 0
        self.topk_idx: arrays.View | None = None  # the caller's, until a dispatch has copied it (ll)
        self.topk_weights: arrays.View | None = None
        self.has_weights = False
        self.num_tokens_at: arrays.View | None = None
        self.has_device_count = False
        self.is_closed = False
        self._group = group
        self._stage = Stage.UNROUTED
        self._newest = 0  # ticket of the newest launch on this handle
        self._exports: dict[tuple[str, str, int], Any] = {}
        backend = group.world.backend
        self.arrays: dict[str, Array] = {
            name: backend.zeros(shape, layout.dtype_of(dtype))
            for name, (shape, dtype) in layout.handle_arrays(group.cfg, group.num_ranks).items()
        }
        with backend.active():
            self.state: Any = group.mode.attach(self)  # the mode's own; None once closed

    def route(self, topk_idx: Any, topk_weights: Any, stream: Any, num_tokens: Any = None) -> None:
        group = self._group
        with group.lock:
            chosen = group.begin()
            self._check_open()
            self._stage = Stage.UNROUTED
            try:
                chosen = group.choose_stream(stream, topk_idx)
                self._take_routing(topk_idx, topk_weights)
                self.has_device_count = num_tokens is not None
                if num_tokens is not None:
                    self.num_tokens_at = arrays.view(num_tokens, "num_tokens", group.world.backend)
            except (ArgumentError, ArgumentTypeError):
                group.mode.refuse_route(chosen)  # the peers wait for this rank's part
                raise
            group.mode.route(self, chosen)
            self._stage = Stage.ROUTED
            group.leave(chosen)

    def update(self, topk_idx: Any, topk_weights: Any = None, *, num_tokens: Any = None, stream: Any = None) -> None:
        """Give the handle a new routing, as create_handle does, without allocating. ht: collective.

        Raises:
            as Group.create_handle. A handle whose update was refused has no routing.
        """
        self.route(topk_idx, topk_weights, stream, num_tokens)

    def dispatch(self, x: Any, *, out: Any = None, stream: Any = None) -> Received:
        """Send this rank's tokens to the ranks of their experts. Collective; may be repeated with the same routing.

        Args:
            x: [num_tokens, hidden] of the group's dtype; rows may be strided, each contiguous and 16-byte aligned.
            stream: where to enqueue; None = the current stream of x's framework.

        Returns:
            Received: what this rank's experts get, complete in stream order.

        Raises:
            ArgumentError, ArgumentTypeError: x or stream does not fit, or (ht) other handles hold all receive buffers;
                nothing is dispatched on any rank, and the next dispatch works.
            OrderError: the handle has no routing. Nothing is sent.
            ClosedError, PeerTimeout: see Group.check. PeerRefused, DeviceError: only where the call waits.
        """
        group, cfg = self._group, self._group.cfg
        with group.lock:
            chosen = group.begin()
            self._check_open()
            if self._stage is Stage.UNROUTED:
                raise OrderError(f"dispatch: this handle {self._stage.value}")
            try:
                chosen = group.choose_stream(stream, x)
                view = arrays.view(x, "x", group.world.backend)
                arrays.check_matrix(view, "x", self.num_tokens, cfg.hidden, (cfg.dtype,))
                arrays.check_rows(view, "x", cfg.row_bytes)
                to = None if out is None else arrays.view(out, "out", group.world.backend)
                group.mode.prepare_dispatch(self, to)
                _check_apart(view, self.state.recv_range)
            except (ArgumentError, ArgumentTypeError):
                self._stage = Stage.ROUTED
                group.mode.refuse_dispatch(self, chosen)  # the peers wait for this rank's part
                raise
            self._newest = group.mode.dispatch(self, view, to, chosen)
            self._stage = Stage.DISPATCHED
            group.leave(chosen)
        return self._received(arrays.framework(x), out)

    def combine(
        self,
        expert_out: Any,
        *,
        topk_weights: Any = "handle",
        bias: Any = (),
        row_weight_grads: Any = None,
        out: Any = None,
        stream: Any = None,
    ) -> Any:
        """Bring the experts' outputs home. Collective; once after each dispatch.

        A combine that was refused on any rank must be preceded by a dispatch again.

        Args:
            expert_out: outputs in the order of Received.tokens: [L, N*B, H], C-contiguous and 16-byte aligned (ll);
                [rows, H] with at least the received rows (ht), where each row is already the sum over this rank's
                experts; rows may be strided, each contiguous and 16-byte aligned.
            stream: where to enqueue; None = the current stream of expert_out's framework.

        Returns:
            y [num_tokens, hidden]: ll: sum over k of topk_weights * row in order of k; ht: sum of the ranks' rows in
            order of rank; in fp32, rounded once. It belongs to the handle and holds until its next combine.

        Raises:
            ArgumentError, ArgumentTypeError: expert_out or stream does not fit; nothing is combined on any rank.
            OrderError: the handle was not dispatched, or combined already. Nothing is sent.
            ClosedError, PeerTimeout: see Group.check. PeerRefused, DeviceError: only where the call waits.
        """
        group = self._group
        with group.lock:
            chosen = group.begin()
            self._check_open()
            if self._stage is not Stage.DISPATCHED:
                raise OrderError(f"combine: this handle {self._stage.value}")
            try:
                chosen = group.choose_stream(stream, expert_out)
                view = arrays.view(expert_out, "expert_out", group.world.backend)
                group.mode.check_expert_out(self, view)
                call = CombineCall(
                    view,
                    arrays.view(self.arrays["y"] if out is None else out, "y", group.world.backend),
                    is_weighted=topk_weights is not None,
                    bias=tuple(arrays.view(b, "bias", group.world.backend) for b in bias),
                    row_weight_grads=None
                    if row_weight_grads is None
                    else arrays.view(row_weight_grads, "row_weight_grads", group.world.backend),
                )
            except (ArgumentError, ArgumentTypeError):
                self._stage = Stage.ROUTED
                group.mode.refuse_combine(self, chosen)  # the peers wait for this rank's part
                raise
            self._newest = group.mode.combine(self, call, chosen)
            self._stage = Stage.COMBINED
            group.leave(chosen)
        return self._combined(arrays.framework(expert_out)) if out is None else out

    def num_recv_tokens(self) -> int:
        """Rows received: ll after dispatch, ht after create_handle or update. Waits for the device.

        Raises:
            OrderError: too early, or inside a capture. Otherwise as Group.check.
        """
        return int(self._read_counts("num_recv_tokens", "total")[0])

    def host_counts(self) -> npt.NDArray[np.int32]:
        """Received.expert_counts on the host, int32 [L]. Waits for the device. Raises as num_recv_tokens."""
        return self._read_counts("host_counts", "expert_counts")

    def _read_counts(self, call: str, name: str) -> npt.NDArray[np.int32]:
        with self._group.finished(call):
            self._check_open()
            needed = (Stage.ROUTED, Stage.DISPATCHED, Stage.COMBINED)[0 if self._group.cfg.mode == "ht" else 1 :]
            if self._stage not in needed:
                raise OrderError(f"{call}: this handle {self._stage.value}")
            return self._group.world.backend.to_numpy(self.arrays[name])

    def was_refused(self, refusal: Refusal) -> None:
        """The group learnt that an operation on this handle did nothing."""
        if refusal.operation == ROUTE:
            self._stage = Stage.UNROUTED
        elif refusal.ticket == self._newest:  # what came after it was an operation again
            self._stage = Stage.ROUTED

    def close(self) -> None:
        """Give back what the handle holds. Local; twice is fine."""
        if not self.is_closed:
            self.is_closed = True
            self._group.mode.detach(self)
            self.arrays = {}
            self._exports = {}

    def _take_routing(self, topk_idx: Any, topk_weights: Any) -> None:
        backend, cfg = self._group.world.backend, self._group.cfg
        idx = arrays.view(topk_idx, "topk_idx", backend)
        arrays.check_matrix(idx, "topk_idx", None, cfg.num_topk, _TOPK_DTYPES, cfg.max_tokens_per_rank)
        _check_contiguous(idx, "topk_idx")
        weights = None
        if topk_weights is not None:
            weights = arrays.view(topk_weights, "topk_weights", backend)
            arrays.check_matrix(weights, "topk_weights", idx.shape[0], cfg.num_topk, ("float32",))
            _check_contiguous(weights, "topk_weights")
        self.num_tokens = idx.shape[0]
        self.topk_idx, self.topk_weights, self.has_weights = idx, weights, weights is not None

    def release(self) -> None:
        self._group.mode.release(self)
        self._exports = {}

    def _received(self, framework: str, out: Any = None) -> Received:
        key = ("recv", framework, self.has_weights if out is None else id(out))
        if key not in self._exports:
            backend = self._group.world.backend
            fields = self._group.mode.received(self)
            exported = {k: arrays.export(v, framework, backend) for k, v in fields.items()}
            if out is not None:
                exported["tokens"] = out
            self._exports[key] = Received(**exported, lease=self.state.lease)
        received: Received = self._exports[key]
        return received

    def _combined(self, framework: str) -> Any:
        key = ("y", framework, self.num_tokens)
        if key not in self._exports:
            y = self.arrays["y"][: self.num_tokens]
            self._exports[key] = arrays.export(y, framework, self._group.world.backend)
        return self._exports[key]

    def _check_open(self) -> None:
        if self.is_closed:
            raise ClosedError("this handle is closed")


def _check_contiguous(view: arrays.View, name: str) -> None:
    if not view.is_contiguous:
        raise ArgumentError(f"{name} must be C-contiguous, got strides {view.strides} bytes")
    if view.address % np.dtype(view.dtype).itemsize:
        raise ArgumentError(f"{name} must be aligned to its elements, got address {view.address:#x}")


def _check_apart(x: arrays.View, written: tuple[int, int]) -> None:
    """x must not lie in what its own dispatch writes."""
    end = x.address + (x.shape[0] - 1) * x.strides[0] + 1 if x.shape[0] else x.address
    if x.address < written[1] and written[0] < end:
        raise ArgumentError("x lies in this handle's own Received.tokens, which its dispatch writes")
