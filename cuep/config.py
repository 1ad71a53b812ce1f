"""GroupConfig: everything that the ranks of a group agree on."""

from __future__ import annotations

import numbers
import operator
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

from cuep import env
from cuep.errors import ArgumentError

DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
QUANT_BLOCK = 128  # values that share a scale that cuep makes
_QUANTS = (None, "fp8_block128", "forward")
_QUANT_SCALES = {"fp32": 4, "ue8m0": 1}  # bytes of a scale that cuep makes
_FORWARDED = {"float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1, "uint8": 1, "float4_e2m1fn_x2": 2}  # values in a byte
_SCALE_DTYPES = {"fp32": "float32", "ue8m0": "uint8", "bf16": "bfloat16", "fp16": "float16", "e4m3": "uint8"}
_SCALE_BYTES = {"float32": 4, "int32": 4, "bfloat16": 2, "float16": 2, "uint8": 1}
COMBINE_CODECS = (None, "logfmt10", "fp8_block128")  # in the order of their numbers in ll_home.cuh
_LAYOUTS = {"ll": ("expert_major", "rank_major"), "ht": ("flat", "expert_major")}
_REDUCES = {  # of each form, the first is what None means
    ("ll", "expert_major"): ("exact", "per_rank"),
    ("ll", "rank_major"): ("per_rank",),
    ("ht", "flat"): ("per_rank",),
    ("ht", "expert_major"): ("per_rank",),
}
_OPERATIONS = {"ll": ("dispatch", "combine"), "ht": ("route", "dispatch", "combine")}
_SHARED_BYTES = 45 * 1024  # of a block's shared memory, for what grows with experts or a quantised row
MAX_TOPK = 32
MAX_RANKS = 32
_MOST = {
    "num_experts": 2**16,
    "hidden": 2**20,
    "num_topk": MAX_TOPK,
    "max_tokens_per_rank": 2**24,
    "num_buffers": 64,
    "num_sms": 2**16,
    "alignment": 2**16,
    "max_recv_tokens_per_rank": 2**31 - 1,
}
_OPTIONAL = ("num_sms", "max_recv_tokens_per_rank")  # None is allowed
_HT_ONLY = {  # name -> default
    "max_recv_tokens_per_rank": None,
    "overflow": "raise",
    "alignment": 1,
    "zero_padding": False,
}


@dataclass(frozen=True)
class GroupConfig:
    """Settings of a group; every rank must pass the same.

    Attributes:
        mode: "ll" (low latency: decode, 1 to some hundred tokens) or "ht" (high throughput: training, prefill).
        layout: how received rows lie: ll "expert_major" (a zone of N*B rows for each local expert) or "rank_major" (a
            zone of B rows for each source rank, one row per token); ht "flat" (one row per (token, rank)) or
            "expert_major" (one row per (token, k), zones as long as needed). None: the first of the mode's.
        num_experts: experts in all (E), a multiple of the number of ranks; rank r owns E/N consecutive experts.
        hidden: elements of a row (H); a row must be a multiple of 16 bytes.
        num_topk: experts per token (K), 1 to 32.
        max_tokens_per_rank: the most tokens (B) that any rank brings to one dispatch.
        dtype: element type of rows that are dispatched: "bfloat16", "float16" or "float32"; with quant="forward"
            "float8_e4m3fn", "float8_e5m2", "int8", "uint8", or "float4_e2m1fn_x2": two values in each byte. Such rows
            are passed in that dtype or as bytes (uint8; of float4 there are H/2).
        combine_dtype: element type of what combine takes, sends and returns. None: dtype, or with quant="forward"
            "bfloat16".
        reduce: how combine sums. "exact" (ll expert_major; the default there): fp32 sum of weight * row in top-k order,
            rounded once. "per_rank": every rank sends one row per token; the ranks' rows are added in rank order in
            fp32 and rounded once. With expert_major that row is the rank's weighted fp32 sum over its own experts in
            top-k order, rounded to combine_dtype; with rank_major and flat the caller has summed its experts, and
            cuep applies no weights. Error bound of "per_rank": cuep.reference.per_rank_bound.
        max_recv_tokens_per_rank: ht: rows of Received.tokens, on every rank; None: as many as can ever come.
        overflow: ht: what happens when a rank would receive more: "raise" (nothing is sent, every rank raises) or
            "drop" (the last rows in the layout's order are left out, the same on every run).
        alignment: ht expert_major: every expert's zone starts at a multiple of this many rows.
        zero_padding: ht expert_major: dispatch sets the rows between an expert's last row and the next zone to 0, and
            their scales: for matrix products that sum over all rows, as those of weight gradients do. False: they are
            unspecified.
        quant: "fp8_block128" quantises rows while they are sent: Received.tokens are e4m3 values with one scale for
            each 128 of them (Received.scales); how is in kernels_cu/include/cuep/quant.cuh. hidden must be a multiple
            of 128. "forward": the caller's quantised rows and their scales travel as they are: dispatch(x, scales).
            What combine takes is not quantised. None: rows travel as they are, and there are no scales.
        scale_format: of scales: "fp32", or "ue8m0", powers of two as one byte, the exponent; with "forward" also
            "bf16", "fp16" or "e4m3" (which cuep does not look into).
        scales_per_row: with quant="forward": 0 to H. None: one for each 128 values.
        scale_layout: of Received.scales: "row_major", or (ll) "column_major" as DeepGEMM's grouped GEMMs take them: in
            each zone the scales of one block of all rows are adjacent, and columns begin 16-byte aligned (the array is
            a view with such strides). "ue8m0" is packed there: four exponents in an int32, the first in its lowest
            byte. In ht, and in ll where a handle receives in place, values and scales of a row lie together, so both
            arrays are strided.
        combine_quant: ll: how combine's rows travel home; hidden must be a multiple of 128. None: as they are.
            "logfmt10": 10 bits a value, the logarithm of its size in 511 levels between the largest and the smallest of
            each 128 values (DeepSeek's LogFMT), 8 bytes more for each 128: two thirds of a bfloat16 row.
            "fp8_block128": e4m3 values and one float32 scale for each 128, half of a bfloat16 row. A row is encoded
            where it is sent (with reduce="per_rank" and expert_major: the rank's fp32 sum, not rounded first) and
            decoded to fp32 where it is summed; a rank's own rows are not encoded. What combine takes and returns
            stays combine_dtype. Relative error of rows of N(0, 1) values (root mean square): logfmt10 0.35 %,
            fp8_block128 2.6 %; bfloat16 itself 0.17 %. Bound: cuep.reference.coded_bound. Formats, and what becomes of
            NaN, infinities and tiny values: kernels_cu/include/cuep/combine_codec.cuh.
        in_place: ll rank_major, without mask: so many handles, the first that the group makes, receive rows where peers
            put them, in symmetric memory, and copy nothing (the place of one that is closed is not used again). Their
            Received.tokens and scales are the peers' to write from the handle's combine, or its next dispatch or
            update, on: do not read or write them then. Not even out= keeps the rows before. 0 to 64.
        expert_ids: numbering of Received.topk_idx: "local" (0 to L-1) or "global".
        num_buffers: ll: banks that dispatch and combine each rotate through, 1, 2, 4 or 8. ht: handles that may hold
            received rows at the same time, and where combine pulls likewise combine buffers, 1 to 64.
        num_sms: blocks that each kernel may use at most. None: chosen by cuep. Groups that are used at the same time
            on one device must fit it together.
        mask: ll: after a PeerTimeout the group can go on without some of its ranks: Group.update_mask.
        arrival_stats: ll: kernels note how long they wait for each rank: Group.arrival_stats.
        timeout_s: seconds after which a wait for a peer ends in PeerTimeout. None: CUEP_TIMEOUT_S, else 30.
        allocator: where arrays outside the symmetric heap come from: a pair alloc(bytes) -> address, free(address), or
            (cuda) a CuPy allocator, bytes -> MemoryPointer. None: the backend's own (CuPy's current pool). May differ
            between ranks.
        variants: operation -> kernel variant, for example {"dispatch": "direct"}; see kernels_cu/README.md. ll: up to
            128 tokens rows travel in a form that counts on NVLink; a group of GPUs on other links is refused and must
            name "direct" here, with reduce="per_rank" for combine "partial". ht flat: {"combine": "pull"} is faster
            with few multiprocessors where the experts write into Handle.combine_buffer(). That takes num_buffers
            buffers of symmetric memory, of combine_dtype and as many rows as Received.tokens. {"dispatch": "copy"},
            {"combine": "copy"}: copy engines move the rows, so that no multiprocessor is busy with the links;
            multiprocessors pack and add up. The first such operation of a routing waits until the routing is done on
            the device, since the host must know how many rows go where: so all ranks must call groups that have these
            in the same order. A graph with one serves the routing that it was captured with; for another one it is
            refused (OrderError at check()). dispatch then needs symmetric memory for N - 1 rows a token, and where it
            is refused leaves anything in `out`, or in Received.tokens of the handle's dispatch before it.
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
    max_recv_tokens_per_rank: int | None = None
    overflow: str = "raise"
    alignment: int = 1
    zero_padding: bool = False
    quant: str | None = None
    scale_format: str = "fp32"
    scales_per_row: int | None = None
    scale_layout: str = "row_major"
    combine_quant: str | None = None
    in_place: int = 0
    expert_ids: str = "local"
    num_buffers: int = 2
    num_sms: int | None = None
    mask: bool = False
    arrival_stats: bool = False
    timeout_s: float | None = None
    allocator: Any = field(default=None, compare=False, repr=False)
    variants: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        _require(_is_one_of(self.mode, _LAYOUTS), "mode", self.mode, "'ll' or 'ht'")
        self._choose("layout", _LAYOUTS[self.mode], f"with mode={self.mode!r}")
        form = f"with mode={self.mode!r}, layout={self.layout!r}"
        self._choose("reduce", _REDUCES[self.mode, str(self.layout)], form)
        _require(self.quant in _QUANTS, "quant", self.quant, f"one of {_QUANTS}")
        is_forward = self.quant == "forward"
        self._choose("dtype", tuple(_FORWARDED if is_forward else DTYPE_BYTES), f"with quant={self.quant!r}")
        self._choose("combine_dtype", tuple(DTYPE_BYTES) if is_forward else (self.dtype, *DTYPE_BYTES))
        self._choose("overflow", ("raise", "drop"))
        self._choose("expert_ids", ("local", "global"))
        for name in ("mask", "arrival_stats", "zero_padding"):
            value = getattr(self, name)
            _require(_is_bool(value), name, value, "True or False")
            object.__setattr__(self, name, bool(value))
        for name in ("mask", "arrival_stats"):
            value = getattr(self, name)
            _require(self.mode == "ll" or not value, name, value, "False with mode='ht'")
        for name, most in _MOST.items():
            if name not in _OPTIONAL or getattr(self, name) is not None:
                object.__setattr__(self, name, _count(getattr(self, name), name, most))
        self._check_quant()
        self._check_in_place()
        for name, default in _HT_ONLY.items() if self.mode == "ll" else ():
            _require(getattr(self, name) == default, name, getattr(self, name), f"{default!r} with mode='ll'")
        if self.max_recv_tokens_per_rank is not None:
            most, rule = self.max_recv_tokens_per_rank, f"a multiple of alignment={self.alignment}"
            _require(most % self.alignment == 0, "max_recv_tokens_per_rank", most, rule)
        if self.layout == "flat":
            _require(self.alignment == 1, "alignment", self.alignment, f"1 {form}")
            _require(not self.zero_padding, "zero_padding", self.zero_padding, f"False {form}")
        for dtype in {self.dtype, str(self.combine_dtype)}:
            elems = 16 * _FORWARDED[dtype] if dtype in _FORWARDED else 16 // DTYPE_BYTES[dtype]
            row_rule = f"a row of a multiple of 16 bytes: a multiple of {elems} with {dtype}"
            _require(self.hidden % elems == 0, "hidden", self.hidden, row_rule)
        _require(_is_allocator(self.allocator), "allocator", self.allocator, "a function, a pair of functions, or None")
        if self.mode == "ll":
            self._check_shared_memory()
            _require(self.num_buffers in (1, 2, 4, 8), "num_buffers", self.num_buffers, "1, 2, 4 or 8 with mode='ll'")
        timeout_s: Any = env.timeout_s() if self.timeout_s is None else self.timeout_s
        is_time = isinstance(timeout_s, numbers.Real) and not isinstance(timeout_s, bool)
        _require(is_time and 1e-3 <= timeout_s <= 1e6, "timeout_s", self.timeout_s, "seconds from 0.001 to 1e6")
        object.__setattr__(self, "timeout_s", float(timeout_s))
        object.__setattr__(self, "variants", _checked_variants(self.variants, self.mode))

    @property
    def columns(self) -> int:
        """Elements of a row of x and of Received.tokens, as arrays have them."""
        return self.hidden // 2 if self.dtype.startswith("float4") else self.hidden

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of x."""
        return self.columns * DTYPE_BYTES.get(self.dtype, 1)

    @property
    def array_dtype(self) -> str:
        """Element type of x, for who has no arrays of two values in a byte."""
        return "uint8" if self.dtype.startswith("float4") else self.dtype

    @property
    def recv_dtype(self) -> str:
        """Element type of Received.tokens."""
        return "float8_e4m3fn" if self.quant == "fp8_block128" else self.array_dtype

    @property
    def recv_row_bytes(self) -> int:
        """Bytes of a row of Received.tokens."""
        return self.hidden if self.quant == "fp8_block128" else self.row_bytes

    @property
    def num_scales(self) -> int:
        """Scales of a row; 0: rows have none."""
        if self.quant == "forward" and self.scales_per_row is not None:
            return self.scales_per_row
        return self.hidden // QUANT_BLOCK if self.quant else 0

    @property
    def scale_columns(self) -> int:
        """Elements of a row of Received.scales: packed scales are four of them."""
        return -(-self.num_scales // 4) if self.scale_dtype == "int32" else self.num_scales

    @property
    def scale_dtype(self) -> str:
        """Element type of Received.scales."""
        is_packed = self.scale_format == "ue8m0" and self.scale_layout == "column_major"
        return "int32" if is_packed else _SCALE_DTYPES[self.scale_format]

    @property
    def scale_bytes(self) -> int:
        """Of an element of Received.scales."""
        return _SCALE_BYTES[self.scale_dtype]

    @property
    def quantised_scale_bytes(self) -> int:
        """Bytes of each scale that cuep makes; 0: it makes none."""
        return _QUANT_SCALES[self.scale_format] if self.quant == "fp8_block128" else 0

    @property
    def sent_row_bytes(self) -> int:
        """Bytes of a row as it travels: values and scales, a multiple of 16."""
        return -(-(self.recv_row_bytes + self.scale_columns * self.scale_bytes) // 16) * 16

    @property
    def combine_row_bytes(self) -> int:
        return self.hidden * DTYPE_BYTES[str(self.combine_dtype)]

    @property
    def combine_sent_row_bytes(self) -> int:
        """Bytes of a row on its way home: combine_row_bytes or, where it is encoded, codes and what their blocks share,
        a multiple of 16."""
        blocks = self.hidden // QUANT_BLOCK
        encoded = {"logfmt10": self.hidden + self.hidden // 4 + 8 * blocks, "fp8_block128": self.hidden + 4 * blocks}
        return -(-encoded.get(str(self.combine_quant), self.combine_row_bytes) // 16) * 16

    def settings(self) -> dict[str, Any]:
        """What must be equal on all ranks."""
        shared = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "allocator"}
        return shared | {"variants": dict(self.variants)}

    def __reduce__(self) -> tuple[Any, ...]:
        """For pickle and copy: a mapping proxy has neither."""
        values = {f.name: getattr(self, f.name) for f in fields(self)} | {"variants": dict(self.variants)}
        return _make_config, (values,)

    def _check_quant(self) -> None:
        given = f"with quant={self.quant!r}"
        is_forward = self.quant == "forward"
        formats = tuple(_SCALE_DTYPES if is_forward else _QUANT_SCALES)
        self._choose("scale_format", formats if self.quant else formats[:1], given)
        by_column = ("column_major",) if self.mode == "ll" and self.quant else ()
        self._choose("scale_layout", ("row_major", *by_column), f"with mode={self.mode!r}, quant={self.quant!r}")
        if self.scales_per_row is not None:
            _require(is_forward, "scales_per_row", self.scales_per_row, f"None {given}")
            object.__setattr__(self, "scales_per_row", _count(self.scales_per_row, "scales_per_row", self.hidden, 0))
        elif self.quant is not None:
            _require(self.hidden % QUANT_BLOCK == 0, "hidden", self.hidden, f"a multiple of 128 {given}")
        _require(self.combine_quant in COMBINE_CODECS, "combine_quant", self.combine_quant, f"{COMBINE_CODECS}")
        if self.combine_quant is not None:
            _require(self.mode == "ll", "combine_quant", self.combine_quant, "None with mode='ht'")
            rule = f"a multiple of 128 with combine_quant={self.combine_quant!r}"
            _require(self.hidden % QUANT_BLOCK == 0, "hidden", self.hidden, rule)

    def _check_in_place(self) -> None:
        object.__setattr__(self, "in_place", _count(self.in_place, "in_place", 64, 0))
        if self.in_place == 0:
            return
        form = f"with mode={self.mode!r}, layout={self.layout!r}"
        _require(self.mode == "ll" and self.layout == "rank_major", "in_place", self.in_place, f"0 {form}")
        # after a mask change ranks may have made different numbers of handles, and their places would differ
        _require(not self.mask, "in_place", self.in_place, "0 with mask=True")
        rule = "0 with scale_layout='column_major'"
        _require(self.scale_layout == "row_major" or not self.num_scales, "in_place", self.in_place, rule)

    def _check_shared_memory(self) -> None:
        """ll: a block of dispatch counts rows of every expert, and holds a row while it quantises it."""
        row = self.sent_row_bytes if self.quant == "fp8_block128" else 0
        _require(
            row < _SHARED_BYTES // 2, "hidden", self.hidden, f"less than {_SHARED_BYTES // 2} with quant={self.quant!r}"
        )
        counters = 2 if self.layout == "expert_major" else 1
        most = (_SHARED_BYTES - row) // (4 * counters)
        _require(self.num_experts <= most, "num_experts", self.num_experts, f"at most {most} with mode='ll'")

    def _choose(self, name: str, allowed: tuple[str, ...], where: str = "") -> None:
        """Give a setting that is None the first of what is allowed; refuse any other that is not."""
        if getattr(self, name) is None:
            object.__setattr__(self, name, allowed[0])
        given = getattr(self, name)
        _require(_is_one_of(given, allowed), name, given, f"{tuple(dict.fromkeys(allowed))} {where}".rstrip())

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
            rows += self.num_experts // num_ranks * (self.alignment - 1)
        if rows >= 2**31:
            product = "num_experts" if self.mode == "ll" else "num_topk * ranks"
            raise ArgumentError(
                f"max_tokens_per_rank={self.max_tokens_per_rank} is too large: {product} * max_tokens_per_rank is "
                f"{rows}, allowed: below 2**31; at most {self.max_tokens_per_rank * (2**31 - 1) // rows} tokens"
            )


def _make_config(values: dict[str, Any]) -> GroupConfig:
    return GroupConfig(**values)


def _count(value: Any, name: str, most: int, least: int = 1) -> int:
    """A whole number from `least` to `most`, also one of NumPy's."""
    allowed = f"a whole number from {least} to {most}"
    try:
        number = operator.index(value)
    except TypeError:
        raise ArgumentError(f"{name}={value!r} is not allowed; allowed: {allowed}") from None
    _require(not isinstance(value, bool) and least <= number <= most, name, value, allowed)
    return number


def _is_one_of(value: object, allowed: Iterable[str]) -> bool:
    return isinstance(value, str) and value in tuple(allowed)


def _is_allocator(value: Any) -> bool:
    if isinstance(value, tuple):
        return len(value) == 2 and all(callable(part) for part in value)
    return value is None or callable(value)


def _checked_variants(variants: Any, mode: str) -> Mapping[str, str]:
    rule = f"operation -> name of a variant, with operations {_OPERATIONS[mode]}"
    is_mapping = isinstance(variants, Mapping)
    _require(is_mapping and all(isinstance(v, str) for v in variants.values()), "variants", variants, rule)
    _require(all(_is_one_of(op, _OPERATIONS[mode]) for op in variants), "variants", variants, rule)
    return MappingProxyType(dict(variants))


def _is_bool(value: Any) -> bool:
    """Python's or NumPy's; whoever has one of NumPy's has imported NumPy, which `import cuep` leaves to those."""
    numpy = sys.modules.get("numpy")
    return isinstance(value, bool) or (numpy is not None and isinstance(value, numpy.bool_))


def _require(condition: bool, name: str, given: object, allowed: str) -> None:
    if not condition:
        raise ArgumentError(f"{name}={given!r} is not allowed; allowed: {allowed}")
