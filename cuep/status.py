"""What kernels report to the host: struct Report of operation.cuh, in host memory that the device writes."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from cuep.config import GroupConfig
from cuep.errors import ArgumentError, CuepError, OrderError, PeerRefused, PeerTimeout
from cuep.layout import REPORT_BYTES

OPERATIONS = ("create_handle/update", "dispatch", "combine", "update_mask")  # enum Op
COUNTED = OPERATIONS[:3]  # those that take epochs
ROUTE, COMBINE = OPERATIONS[0], OPERATIONS[2]
_EXCLUDED, _LEFT = 3, 5  # Phase::kExcluded, kLeft
_PHASES = (  # enum Phase
    "reuse of a buffer that the peer reads",
    "counts of the peer",
    "rows of the peer",
    "",
    "call of update_mask with the same ranks by the peer",
)
_REFUSALS_KEPT = 8  # kRefusalsKept

_FIELDS = "timed_out op phase peer expected seen epoch num_bad_ids ticket num_dropped num_refused".split()
_DTYPE = np.dtype([*((name, "u4") for name in _FIELDS), ("refusals", "u4", (_REFUSALS_KEPT, 4))])
assert _DTYPE.itemsize == REPORT_BYTES
_TIMED_OUT, _TICKET = _FIELDS.index("timed_out"), _FIELDS.index("ticket")


def agreement_s(timeout_s: float) -> float:
    """How long update_mask waits: a peer may begin to wait in its last operation when this rank begins here."""
    return 2 * timeout_s + 1


class Cause(enum.IntEnum):
    """Why a rank refused, as its own report says (enum Cause)."""

    CALL = 0
    ZONE_FULL = 1
    TOO_FEW_ROWS = 2
    TOKEN_COUNT = 3
    OVERFLOW = 4
    GRADS_DIFFER = 5
    BANK_TAKEN = 6
    WEIGHTS_DIFFER = 7
    MISPAIRED = 8
    STALE_COUNTS = 9


@dataclass(frozen=True)
class Refusal:
    """A launch that did nothing because a rank refused its part of an operation."""

    operation: str
    cause: Cause
    rank: int
    handle: int
    ticket: int
    detail: int  # rows that a rank needs, where there were too many, or arrays had fewer

    def _short_array(self) -> str:
        return "out" if self.operation == "dispatch" else "expert_out or row_weight_grads"

    def error(self, cfg: GroupConfig) -> CuepError:
        """What to raise about it."""
        max_tokens_per_rank = cfg.max_tokens_per_rank
        if self.cause is Cause.ZONE_FULL:
            return ArgumentError(
                f"{self.operation}: topk_idx names an expert more than max_tokens_per_rank={max_tokens_per_rank} times"
                ", which its zone has no rows for; nothing was dispatched"
            )
        if self.cause is Cause.TOO_FEW_ROWS:
            return ArgumentError(
                f"{self.operation}: {self._short_array()} has fewer rows than the {self.detail} that were received;"
                f" nothing was {'dispatched' if self.operation == 'dispatch' else 'combined'}"
            )
        if self.cause is Cause.TOKEN_COUNT:
            return ArgumentError(
                f"{self.operation}: num_tokens on the device was not between 0 and the rows of topk_idx;"
                " nothing was sent"
            )
        if self.cause is Cause.BANK_TAKEN:
            return OrderError(
                f"{self.operation}: num_buffers={cfg.num_buffers} operations of a kind may be under way at a time;"
                " nothing was sent: complete() the oldest pending one first"
            )
        if self.cause is Cause.MISPAIRED:
            return OrderError(
                f"{self.operation}: the ranks are at handles of different create_handle or update calls, as happens"
                " when one of these was refused while another handle had yet to be dispatched, or one rank's part of a"
                " send_only call was refused and the others went on before completing theirs; nothing was sent"
            )
        if self.cause is Cause.STALE_COUNTS:
            return OrderError(
                f"{self.operation}: the host copies as many rows as an earlier routing of this handle had, as happens"
                " where a graph is replayed after another routing; capture it again. Nothing was"
                f" {'dispatched' if self.operation == 'dispatch' else 'combined'}"
            )
        if self.cause is Cause.WEIGHTS_DIFFER:
            return ArgumentError(
                f"{self.operation}: topk_weights=None was given on some ranks and not on others, which"
                f" reduce={cfg.reduce!r} does not allow; nothing was combined"
            )
        if self.cause is Cause.GRADS_DIFFER:
            return ArgumentError(
                f"{self.operation}: row_weight_grads was given on some ranks and not on others; nothing was combined"
            )
        if self.cause is Cause.OVERFLOW:
            return ArgumentError(
                f"{self.operation}: rank {self.rank} would receive {self.detail} rows of tokens, more than"
                f" max_recv_tokens_per_rank={cfg.max_recv_tokens_per_rank}; nothing is sent"
            )
        return PeerRefused(f"{self.operation}: rank {self.rank} refused its call, so it did nothing on any rank")


class Report:
    """Read without waiting for the device; what the device has not written yet is simply not there yet."""

    def __init__(self, memory: npt.NDArray[np.uint8], rank: int) -> None:
        self._memory = memory
        self._raw = memory.data.cast("B").cast("I")  # much faster to look at than NumPy's
        self._words = memory.view(_DTYPE)[0]
        self._rank = rank
        self._refusals_seen = 0
        self._bad_ids_seen = 0

    @property
    def memory(self) -> npt.NDArray[np.uint8]:
        return self._memory

    @property
    def address(self) -> int:
        return int(self._memory.ctypes.data)

    @property
    def has_timed_out(self) -> bool:
        return self._raw[_TIMED_OUT] != 0

    @property
    def ticket(self) -> int:
        """Of the last launch that is over."""
        return self._raw[_TICKET]

    def timeout(self, timeout_s: float, *, has_mask: bool) -> PeerTimeout:
        """The error of the wait that ran out of time, or of being left out."""
        words = self._words
        peer, operation = int(words["peer"]), OPERATIONS[int(words["op"])]
        end = "update_mask() or close() the group now" if has_mask else "the group can only be closed now"
        if int(words["phase"]) == _EXCLUDED:
            text = f"{operation}: rank {peer} goes on without rank {self._rank}, which its mask leaves out; {end}"
        elif int(words["phase"]) == _LEFT:
            text = f"{operation}: rank {peer} gave up while rank {self._rank} was still reading its rows; {end}"
        else:
            timeout_s = agreement_s(timeout_s) if operation == OPERATIONS[-1] else timeout_s
            awaited = _PHASES[int(words["phase"])].replace("the peer", f"rank {peer}")
            text = (
                f"{operation}: rank {self._rank} waited more than {timeout_s:g} s for the {awaited} "
                f"(epoch {int(words['epoch'])}: expected {int(words['expected'])}, seen {int(words['seen'])}); {end}"
            )
        error = PeerTimeout(text)
        error.peer = peer
        return error

    def clear_timeout(self) -> None:
        """When no kernel runs."""
        self._raw[_TIMED_OUT] = 0

    def take_refusals(self) -> list[Refusal]:
        """The refused launches since the last call, the newest few if there were many."""
        count = int(self._words["num_refused"])
        new = min((count - self._refusals_seen) % 2**32, _REFUSALS_KEPT)
        self._refusals_seen = count
        refusals = []
        for number in range(count - new, count):
            what, handle, ticket, detail = (int(word) for word in self._words["refusals"][number % _REFUSALS_KEPT])
            cause = Cause(what >> 8 & 0xFF)
            refusals.append(Refusal(OPERATIONS[what & 0xFF], cause, what >> 16, handle, ticket, detail))
        return refusals

    @property
    def num_dropped(self) -> int:
        """(token, k) pairs of masked ranks' experts so far."""
        return int(self._words["num_dropped"])

    def take_bad_ids(self) -> int:
        """How many expert ids outside [-1, num_experts) were met since the last call."""
        count = int(self._words["num_bad_ids"])
        new, self._bad_ids_seen = (count - self._bad_ids_seen) % 2**32, count
        return new
