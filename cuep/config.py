"""GroupConfig: everything that the ranks of a group agree on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from cuep import env
from cuep.errors import ArgumentError

DTYPE_BYTES = {"bfloat16": 2, "float32": 4}
_LAYOUTS = {"ll": ("expert_major",), "ht": ("flat",)}
_REDUCES = {"ll": ("exact",), "ht": ("per_rank",)}
MAX_TOPK = 32
MAX_RANKS = 32


@dataclass(frozen=True)
class GroupConfig:
    """Settings of a group; every rank must pass the same.

    Attributes:
        mode: "ll" (low latency: decode, 1 to some hundred tokens) or "ht" (high throughput: training, prefill).
        layout: how received rows lie: "expert_major" (ll) or "flat" (ht). None: the mode's layout.
        num_experts: experts in all (E), a multiple of the number of ranks; rank r owns E/N consecutive experts.
        hidden: elements of a row (H); a row must be a multiple of 16 bytes.
        num_topk: experts per token (K), 1 to 32.
        max_tokens_per_rank: the most tokens (B) that any rank brings to one dispatch.
        dtype: element type of rows, "bfloat16" or "float32".
        reduce: "exact" (ll: weighted fp32 sum in top-k order, rounded once) or "per_rank" (ht: the caller sums its own
            experts per row; cuep adds the ranks' rows in rank order in fp32). None: the mode's.
        num_buffers: ll: banks that dispatch and combine each rotate through, 1, 2, 4 or 8. ht: handles that may hold
            received rows at the same time, 1 to 64.
        num_sms: blocks that each kernel may use at most. None: chosen by cuep.
        timeout_s: seconds after which a wait for a peer ends in PeerTimeout. None: CUEP_TIMEOUT_S, else 30.
        variants: operation -> kernel variant, for example {"dispatch": "direct"}; see kernels_cu/README.md.
    """

    mode: str
    num_experts: int
    hidden: int
    num_topk: int
    max_tokens_per_rank: int
    layout: str | None = None
    dtype: str = "bfloat16"
    reduce: str | None = None
    num_buffers: int = 2
    num_sms: int | None = None
    timeout_s: float | None = None
    variants: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _require(self.mode in _LAYOUTS, "mode", self.mode, "'ll' or 'ht'")
        for name, allowed in (("layout", _LAYOUTS[self.mode]), ("reduce", _REDUCES[self.mode])):
            if getattr(self, name) is None:
                object.__setattr__(self, name, allowed[0])
            _require(getattr(self, name) in allowed, name, getattr(self, name), f"{allowed} with mode={self.mode!r}")
        _require(self.dtype in DTYPE_BYTES, "dtype", self.dtype, f"one of {tuple(DTYPE_BYTES)}")
        for name in ("num_experts", "hidden", "max_tokens_per_rank"):
            _require(_is_count(getattr(self, name)), name, getattr(self, name), "a whole number of at least 1")
        _require(_is_count(self.num_topk) and self.num_topk <= MAX_TOPK, "num_topk", self.num_topk, f"1 to {MAX_TOPK}")
        row_rule = f"a row of a multiple of 16 bytes: a multiple of {16 // DTYPE_BYTES[self.dtype]} with {self.dtype}"
        _require(self.row_bytes % 16 == 0, "hidden", self.hidden, row_rule)
        banks = (1, 2, 4, 8) if self.mode == "ll" else tuple(range(1, 65))
        allowed_banks = "1, 2, 4 or 8 with mode='ll'" if self.mode == "ll" else "1 to 64 with mode='ht'"
        _require(self.num_buffers in banks, "num_buffers", self.num_buffers, allowed_banks)
        _require(
            self.num_sms is None or _is_count(self.num_sms), "num_sms", self.num_sms, "None or a number of at least 1"
        )
        if self.timeout_s is None:
            object.__setattr__(self, "timeout_s", env.timeout_s())
        _require(
            isinstance(self.timeout_s, (int, float)) and 0 < self.timeout_s < 1e6,
            "timeout_s",
            self.timeout_s,
            "seconds above 0 and below 1e6",
        )
        object.__setattr__(self, "variants", dict(self.variants))

    @property
    def elem_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def row_bytes(self) -> int:
        return self.hidden * self.elem_bytes

    def settings(self) -> dict[str, Any]:
        """What must be equal on all ranks."""
        return {f.name: getattr(self, f.name) for f in fields(self)}

    def check_ranks(self, num_ranks: int) -> None:
        """Raise ArgumentError unless these settings work on `num_ranks` ranks."""
        if num_ranks > MAX_RANKS:
            raise ArgumentError(f"a group has at most {MAX_RANKS} ranks, got {num_ranks}")
        if self.num_experts % num_ranks != 0:
            raise ArgumentError(
                f"num_experts must be a multiple of the number of ranks: got {self.num_experts} experts on "
                f"{num_ranks} ranks"
            )


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _require(condition: bool, name: str, given: object, allowed: str) -> None:
    if not condition:
        raise ArgumentError(f"{name}={given!r} is not allowed; allowed: {allowed}")
