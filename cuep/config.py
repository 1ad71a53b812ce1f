"""GroupConfig: everything that the ranks of a group agree on."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

from cuep import env
from cuep.errors import ArgumentError

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
_LAYOUTS = {"ll": ("expert_major", "rank_major"), "ht": ("flat",)}
_REDUCES = {"expert_major": ("exact", "per_rank"), "rank_major": ("per_rank",), "flat": ("per_rank",)}
_OPERATIONS = {"ll": ("dispatch", "combine"), "ht": ("route", "dispatch", "combine")}
MAX_TOPK = 32
MAX_RANKS = 32
_MOST = {
    "num_experts": 2**16,
    "hidden": 2**20,
    "num_topk": MAX_TOPK,
    "max_tokens_per_rank": 2**24,
    "num_buffers": 64,
    "num_sms": 2**16,
}


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
    combine_dtype: str | None = None
    reduce: str | None = None
    expert_ids: str = "local"
    num_buffers: int = 2
    num_sms: int | None = None
    timeout_s: float | None = None
    variants: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        _require(_is_one_of(self.mode, _LAYOUTS), "mode", self.mode, "'ll' or 'ht'")
        if self.layout is None:
            object.__setattr__(self, "layout", _LAYOUTS[self.mode][0])
        allowed = _LAYOUTS[self.mode]
        _require(_is_one_of(self.layout, allowed), "layout", self.layout, f"{allowed} with mode={self.mode!r}")
        if self.reduce is None:
            object.__setattr__(self, "reduce", _REDUCES[str(self.layout)][0])
        allowed = _REDUCES[str(self.layout)]
        _require(_is_one_of(self.reduce, allowed), "reduce", self.reduce, f"{allowed} with layout={self.layout!r}")
        if self.combine_dtype is None:
            object.__setattr__(self, "combine_dtype", self.dtype)
        _require(_is_one_of(self.dtype, DTYPE_BYTES), "dtype", self.dtype, f"one of {tuple(DTYPE_BYTES)}")
        for name, most in _MOST.items():
            if name != "num_sms" or self.num_sms is not None:
                object.__setattr__(self, name, _count(getattr(self, name), name, most))
        row_rule = f"a row of a multiple of 16 bytes: a multiple of {16 // DTYPE_BYTES[self.dtype]} with {self.dtype}"
        _require(self.row_bytes % 16 == 0, "hidden", self.hidden, row_rule)
        if self.mode == "ll":
            _require(self.num_buffers in (1, 2, 4, 8), "num_buffers", self.num_buffers, "1, 2, 4 or 8 with mode='ll'")
        timeout_s: Any = env.timeout_s() if self.timeout_s is None else self.timeout_s
        is_time = isinstance(timeout_s, numbers.Real) and not isinstance(timeout_s, bool)
        _require(is_time and 1e-3 <= timeout_s <= 1e6, "timeout_s", self.timeout_s, "seconds from 0.001 to 1e6")
        object.__setattr__(self, "timeout_s", float(timeout_s))
        object.__setattr__(self, "variants", _checked_variants(self.variants, self.mode))

    @property
    def elem_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]

    @property
    def row_bytes(self) -> int:
        return self.hidden * self.elem_bytes

    @property
    def combine_row_bytes(self) -> int:
        return self.hidden * DTYPE_BYTES[str(self.combine_dtype)]

    def settings(self) -> dict[str, Any]:
        """What must be equal on all ranks."""
        return {f.name: getattr(self, f.name) for f in fields(self)} | {"variants": dict(self.variants)}

    def check_ranks(self, num_ranks: int) -> None:
        """Raise ArgumentError unless these settings work on `num_ranks` ranks."""
        num_ranks = _count(num_ranks, "num_ranks", MAX_RANKS)
        if self.num_experts % num_ranks != 0:
            raise ArgumentError(
                f"num_experts must be a multiple of the number of ranks: got {self.num_experts} experts on "
                f"{num_ranks} ranks"
            )
        rows = self.num_experts * self.max_tokens_per_rank
        if self.mode == "ht":
            rows = num_ranks * self.max_tokens_per_rank * self.num_topk
        if rows >= 2**31:
            product = "num_experts" if self.mode == "ll" else "num_topk * ranks"
            raise ArgumentError(
                f"max_tokens_per_rank={self.max_tokens_per_rank} is too large: {product} * max_tokens_per_rank is "
                f"{rows}, allowed: below 2**31; at most {self.max_tokens_per_rank * (2**31 - 1) // rows} tokens"
            )


def _count(value: Any, name: str, most: int) -> int:
    """A whole number from 1 to `most`, also one of NumPy's."""
    allowed = f"a whole number from 1 to {most}"
    try:
        number = operator.index(value)
    except TypeError:
        raise ArgumentError(f"{name}={value!r} is not allowed; allowed: {allowed}") from None
    _require(not isinstance(value, bool) and 1 <= number <= most, name, value, allowed)
    return number


def _is_one_of(value: object, allowed: Iterable[str]) -> bool:
    return isinstance(value, str) and value in tuple(allowed)


def _checked_variants(variants: Any, mode: str) -> Mapping[str, str]:
    rule = f"operation -> name of a variant, with operations {_OPERATIONS[mode]}"
    is_mapping = isinstance(variants, Mapping)
    _require(is_mapping and all(isinstance(v, str) for v in variants.values()), "variants", variants, rule)
    _require(all(_is_one_of(op, _OPERATIONS[mode]) for op in variants), "variants", variants, rule)
    return MappingProxyType(dict(variants))


def _require(condition: bool, name: str, given: object, allowed: str) -> None:
    if not condition:
        raise ArgumentError(f"{name}={given!r} is not allowed; allowed: {allowed}")
