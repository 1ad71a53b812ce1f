"""The oracle: what dispatch and combine must return, computed with NumPy from every rank's inputs.

It shares no code with the kernels or their layouts, and is used only by tests, `demo` and `bench --check`. Sums are
done as the kernels promise them: from 0, in a fixed order, a float32 multiply, then a float32 add, and one rounding at
the end; so results are compared bit by bit.

Letters: N ranks, E experts, L = E/N local experts, T tokens of a rank, B max tokens per rank, K top-k, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from cuep.config import QUANT_BLOCK, GroupConfig

Array = npt.NDArray[Any]
IntArray = npt.NDArray[np.int64]
FloatArray = npt.NDArray[np.float32]
Double = npt.NDArray[np.float64]


class Comm(Protocol):
    def allgather(self, sendobj: Any) -> list[Any]: ...


@dataclass(frozen=True)
class Inputs:
    """One step of all ranks; index = rank. Ids outside [0, E) have become -1: no expert, whatever their weight."""

    num_experts: int
    topk_idx: list[IntArray]  # [T, K] each
    topk_weights: list[FloatArray | None]  # [T, K] each; None = the handle was made without weights, which counts as 1
    x: list[Array]  # [T, H] each

    @property
    def num_ranks(self) -> int:
        return len(self.x)

    @property
    def num_local_experts(self) -> int:
        return self.num_experts // self.num_ranks

    def owner(self, rank: int) -> IntArray:
        """Rank that owns each of `rank`'s chosen experts, [T, K]; -1 where there is none."""
        return self.topk_idx[rank] // self.num_local_experts


@dataclass(frozen=True)
class Dispatched:
    """What one rank must hold after dispatch. R rows are valid; everything else in the receive tensors is unspecified.

    `row_idx[i]` is where row i of `tokens`, `source`, `topk_idx` and `topk_weights` must be found in the received
    tensor of the same name, seen as [rows, ...].
    """

    row_idx: IntArray  # [R]
    tokens: Array  # [R, H]
    source: npt.NDArray[np.int32]  # [R, 3] (rank, token, k) expert-major, else [R, 2] (rank, token)
    expert_counts: npt.NDArray[np.int32]  # [L]
    expert_offsets: npt.NDArray[np.int32] | None  # [L + 1], expert-major only
    src_rank_counts: npt.NDArray[np.int32]  # [L, N] expert-major, else [N]
    total: int  # rows that came, or would have come
    topk_idx: npt.NDArray[np.int32] | None = None  # [R, K], not expert-major
    topk_weights: FloatArray | None = None  # with weights only; ht expert-major [R], else [R, K], ll expert-major None


def make_inputs(
    num_experts: int, x: Sequence[Array], topk_idx: Sequence[Array], topk_weights: Sequence[Array | None]
) -> Inputs:
    """Inputs of all ranks, from one entry per rank."""
    if num_experts % len(x):
        raise ValueError(f"num_experts={num_experts} is not a multiple of {len(x)} ranks")
    ids = [_valid_ids(a, num_experts) for a in topk_idx]
    weights = [None if w is None else np.asarray(w, np.float32) for w in topk_weights]
    return Inputs(num_experts, ids, weights, list(x))


def gather_inputs(comm: Comm, num_experts: int, x: Array, topk_idx: Array, topk_weights: Array | None = None) -> Inputs:
    """Inputs of all ranks, from this rank's part. Collective."""
    parts = comm.allgather((x, topk_idx, topk_weights))
    return make_inputs(num_experts, *map(list, zip(*parts, strict=True)))


def dispatch_expert_major(inputs: Inputs, rank: int, max_tokens_per_rank: int) -> Dispatched:
    """Low latency, layout expert_major: one row per (token, k); within an expert by source rank, token, k."""
    num_ranks, num_local = inputs.num_ranks, inputs.num_local_experts
    found = []
    for src in range(num_ranks):
        token, k = np.nonzero(inputs.owner(src) == rank)
        expert = inputs.topk_idx[src][token, k] - rank * num_local
        found.append(np.stack([expert, np.full_like(token, src), token, k], 1))
    rows = np.concatenate(found)
    rows = rows[np.lexsort(rows.T[::-1])]  # by expert, then source rank, token, k
    expert, src_rank = rows[:, 0], rows[:, 1]

    src_rank_counts = np.zeros((num_local, num_ranks), np.int32)
    np.add.at(src_rank_counts, (expert, src_rank), 1)
    expert_counts = src_rank_counts.sum(1, dtype=np.int32)
    zone = num_ranks * max_tokens_per_rank
    first_row = np.cumsum(expert_counts) - expert_counts
    return Dispatched(
        row_idx=expert * zone + np.arange(len(rows)) - first_row[expert],
        tokens=_take(inputs, src_rank, rows[:, 2]),
        source=rows[:, 1:].astype(np.int32),
        expert_counts=expert_counts,
        expert_offsets=(np.arange(num_local + 1) * zone).astype(np.int32),
        src_rank_counts=src_rank_counts,
        total=len(rows),
    )


def dispatch_flat(inputs: Inputs, rank: int) -> Dispatched:
    """High throughput, layout flat: one row per token that has an expert here, by source rank, then token."""
    num_local = inputs.num_local_experts
    tokens = [np.flatnonzero((inputs.owner(src) == rank).any(1)) for src in range(inputs.num_ranks)]
    src_rank = np.repeat(np.arange(inputs.num_ranks), [len(t) for t in tokens])
    token = np.concatenate(tokens)

    ids, weights = [], []
    for src, chosen in enumerate(tokens):
        is_here = inputs.owner(src)[chosen] == rank
        ids.append(np.where(is_here, inputs.topk_idx[src][chosen] - rank * num_local, -1))
        weights.append(np.where(is_here, weights_or_ones(inputs, src)[chosen], np.float32(0)))
    local_ids = np.concatenate(ids)
    return Dispatched(
        row_idx=np.arange(len(token)),
        tokens=_take(inputs, src_rank, token),
        source=np.stack([src_rank, token], 1).astype(np.int32),
        expert_counts=np.bincount(local_ids[local_ids >= 0], minlength=num_local).astype(np.int32),
        expert_offsets=None,
        src_rank_counts=np.array([len(t) for t in tokens], np.int32),
        total=len(token),
        topk_idx=local_ids.astype(np.int32),
        topk_weights=None if inputs.topk_weights[rank] is None else np.concatenate(weights),
    )


def quantise(x: Array, scale_format: str) -> tuple[Array, Array]:
    """Rows as GroupConfig.quant="fp8_block128" sends them: e4m3 values [T, H] and scales [T, H // 128], float32 or,
    with "ue8m0", uint8. In float32 throughout, as kernels_cu/include/cuep/quant.cuh says."""
    import ml_dtypes

    blocks = x.astype(np.float32).reshape(len(x), x.shape[1] // QUANT_BLOCK, QUANT_BLOCK)
    bits = blocks.view(np.uint32) & np.uint32(0x7FFFFFFF)  # as integers NaN is larger than infinity
    amax = np.maximum(bits.max(2), np.float32(1e-4).view(np.uint32)).view(np.float32)
    with np.errstate(all="ignore"):
        scales = amax * (np.float32(1) / np.float32(448))
        inverse = np.float32(448) / amax
        if scale_format == "ue8m0":
            word = scales.view(np.uint32)
            exponent = np.minimum((word >> 23) + ((word & np.uint32(0x7FFFFF)) != 0), 255)
            powers = np.where(exponent < 254, (254 - exponent) << 23, 0x7FC00000)
            scales, inverse = exponent.astype(np.uint8), powers.astype(np.uint32).view(np.float32)
        values = np.clip(blocks * inverse[..., None], -448, 448)
    return values.astype(ml_dtypes.float8_e4m3fn).reshape(x.shape), scales


def pack_scales(exponents: Array) -> Array:
    """uint8 [T, S] as GroupConfig.scale_layout="column_major" packs them: int32 [T, ceil(S / 4)], missing ones 0."""
    padded = np.zeros((len(exponents), -(-exponents.shape[1] // 4) * 4), np.uint8)
    padded[:, : exponents.shape[1]] = exponents
    return padded.view("<i4")


def dequantise(values: Array, scales: Array) -> FloatArray:
    """What quantised rows stand for, [..., H] float32."""
    blocks = values.astype(np.float32).reshape(*scales.shape, QUANT_BLOCK)
    with np.errstate(all="ignore"):
        factors = np.exp2(scales.astype(np.float32) - 127) if scales.dtype == np.uint8 else scales
        rows: FloatArray = (blocks * factors[..., None]).astype(np.float32).reshape(values.shape)
    return rows


@dataclass(frozen=True)
class LogFmt10:
    """Rows as GroupConfig.combine_quant="logfmt10" sends them: see kernels_cu/include/cuep/combine_codec.cuh."""

    codes: npt.NDArray[np.int32]  # [..., H] 0 = zero, 1 to 511 = levels
    signs: npt.NDArray[np.bool_]  # [..., H]
    base: npt.NDArray[np.int32]  # [..., H // 128] a level is base + code * step
    step: npt.NDArray[np.int32]  # [..., H // 128]


_UNITS = np.float32(2**23)  # of an octave
_NAN_BITS = 0x7FC00000


def encode_logfmt10(x: FloatArray) -> LogFmt10:
    """[..., H] float32, H a multiple of 128. In float32 throughout, in the order of the kernels."""
    one = np.float32(1)
    bits = _blocks(x).view(np.uint32)
    magnitude = bits & np.uint32(0x7FFFFFFF)
    logs = magnitude.astype(np.int32).astype(np.float32) + _correction(magnitude, 0.42283598, -0.15928389)
    top = logs.max(-1)
    smallest = np.where(magnitude == 0, np.float32(np.inf), logs).min(-1)
    smallest = np.where(np.isinf(smallest), np.float32(0), smallest)
    deepest = np.maximum(top - np.float32(32) * _UNITS, top * np.float32(0.001))
    low = np.maximum(np.maximum(smallest, one), deepest)
    is_finite = top < np.float32(0x7F800000)
    scale = np.where(is_finite, np.float32(510) / np.maximum(top - low, one), np.float32(0))
    place = np.maximum((logs - low[..., None]) * scale[..., None], -one)
    codes = (place + (_UNITS + one)).view(np.uint32) & np.uint32(0x1FF)
    whole_top, whole_low = (np.where(is_finite, value, 0).astype(np.int32) for value in (top, low))
    step = np.maximum(whole_top - whole_low, 0) // 510
    base = np.where(is_finite, whole_top - 511 * step, _NAN_BITS).astype(np.int32)
    return LogFmt10(codes.astype(np.int32).reshape(x.shape), (bits >> 31 != 0).reshape(x.shape), base, step)


def decode_logfmt10(encoded: LogFmt10) -> FloatArray:
    """What encoded rows stand for, [..., H] float32."""
    codes = encoded.codes.reshape(*encoded.base.shape, QUANT_BLOCK)
    levels = (encoded.base[..., None] + codes * encoded.step[..., None]).astype(np.uint32)
    less = (_correction(levels, 0.30457565, 0.07826797) + _UNITS).view(np.uint32) - _UNITS.view(np.uint32)
    magnitude = np.where(codes == 0, np.uint32(0), levels - less).reshape(encoded.codes.shape)
    rows: FloatArray = (magnitude | encoded.signs.astype(np.uint32) << 31).view(np.float32)
    return rows


def _blocks(x: Array) -> Array:
    return np.ascontiguousarray(x).reshape(*x.shape[:-1], x.shape[-1] // QUANT_BLOCK, QUANT_BLOCK)


def _correction(bits: npt.NDArray[np.uint32], a: float, b: float) -> FloatArray:
    """f (1 - f) (a + b f) units, of the mantissa f that the lowest 23 bits are."""
    significand = ((bits & np.uint32(0x7FFFFF)) | np.uint32(0x3F800000)).view(np.float32)
    f, rest = significand - np.float32(1), np.float32(2) - significand
    factor = f * (np.float32(b) * _UNITS) + np.float32(a) * _UNITS
    units: FloatArray = f * rest * factor
    return units


def carried(rows: Array, combine_quant: str | None) -> FloatArray:
    """Rows [..., H] as their owner sees them after combine has sent them home, in float32."""
    exact: FloatArray = rows.astype(np.float32)
    if combine_quant == "logfmt10":
        return decode_logfmt10(encode_logfmt10(exact))
    if combine_quant == "fp8_block128":
        return dequantise(*quantise(exact.reshape(-1, exact.shape[-1]), "fp32")).reshape(exact.shape)
    return exact


def carried_bound(rows: Array, combine_quant: str) -> Double:
    """How far carried(rows) can be from finite rows, element by element, [..., H] float64.

    fp8_block128: half of the last of 3 mantissa bits, 2^-4 of the value; below the normal numbers of e4m3 2^-10 of the
    scale. logfmt10: with s octaves between levels, s/2, and at most 2^-10 octaves by which the logarithm, its way back
    and levels in whole units are off; 0.4 % more, as levels are that far from a true logarithm's. A value that is more
    than 32 octaves below the largest of its block becomes 0 or the lowest level; below 2^-126 levels are spaced evenly
    enough for an error of 2^-130.
    """
    exact = np.abs(rows.astype(np.float64))
    blocks = _blocks(exact)
    largest = np.repeat(blocks.max(-1), QUANT_BLOCK, -1).reshape(exact.shape)
    bound: Double
    if combine_quant == "fp8_block128":
        bound = np.maximum(exact * 2.0**-4, np.maximum(largest, 1e-4) / 448 * 2.0**-10) * (1 + 2.0**-20)
        return bound
    smallest = np.where(blocks == 0, np.inf, blocks).min(-1)
    smallest = np.repeat(smallest, QUANT_BLOCK, -1).reshape(exact.shape)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        octaves = np.where(largest > 0, np.minimum(np.log2(largest / smallest), 32), 0)
    relative = np.exp2(1.004 * (octaves / 1020 + 2.0**-10)) - 1
    is_deep, is_tiny = smallest < largest * 2.0**-32, smallest < 2.0**-126
    bound = exact * relative + np.where(is_deep, largest * 2.0**-31.9, 0) + np.where(is_tiny, 2.0**-130, 0)
    return np.where(exact == 0, 0, bound)


def dispatch(inputs: Inputs, rank: int, cfg: GroupConfig) -> Dispatched:
    """What a rank of a group with these settings must hold, in any layout."""
    if cfg.mode == "ll" and cfg.layout == "expert_major":
        return dispatch_expert_major(inputs, rank, cfg.max_tokens_per_rank)
    if cfg.layout == "expert_major":
        received = _dispatch_zones(inputs, rank, cfg.alignment)
    else:
        received = dispatch_flat(inputs, rank)
        if cfg.layout == "rank_major":
            src, first = received.source[:, 0], np.cumsum(received.src_rank_counts) - received.src_rank_counts
            received = replace(received, row_idx=src * cfg.max_tokens_per_rank + received.row_idx - first[src])
        if cfg.expert_ids == "global" and received.topk_idx is not None:
            base = np.int32(rank * inputs.num_local_experts)
            received = replace(received, topk_idx=np.where(received.topk_idx >= 0, received.topk_idx + base, -1))
    if cfg.overflow == "drop" and cfg.max_recv_tokens_per_rank is not None:
        received = _drop(inputs, rank, received, cfg.max_recv_tokens_per_rank)
    return received


def _dispatch_zones(inputs: Inputs, rank: int, alignment: int) -> Dispatched:
    """High throughput, layout expert_major: zones as long as needed, each from a multiple of `alignment` on."""
    received = dispatch_expert_major(inputs, rank, 0)
    counts = received.expert_counts
    offsets = np.concatenate([[0], np.cumsum(-(-counts // alignment) * alignment)])
    expert = np.repeat(np.arange(len(counts)), counts)
    place = np.arange(received.total) - (np.cumsum(counts) - counts)[expert]
    weights = None
    if inputs.topk_weights[rank] is not None:
        pairs = [weights_or_ones(inputs, src)[token, k] for src, token, k in received.source]
        weights = np.array(pairs, np.float32)
    return replace(
        received, row_idx=offsets[expert] + place, expert_offsets=offsets.astype(np.int32), topk_weights=weights
    )


def _drop(inputs: Inputs, rank: int, received: Dispatched, max_rows: int) -> Dispatched:
    """Only rows that have a place below `max_rows` are kept; counts are of those, total is not."""
    kept = received.row_idx < max_rows
    source, num_local = received.source[kept], inputs.num_local_experts
    src_rank_counts, expert_counts = np.zeros_like(received.src_rank_counts), np.zeros_like(received.expert_counts)
    offsets = received.expert_offsets
    if offsets is not None:
        expert = _experts_of(inputs, source) - rank * num_local
        np.add.at(src_rank_counts, (expert, source[:, 0]), 1)
        np.add.at(expert_counts, expert, 1)
        offsets = np.minimum(offsets, max_rows)
    else:
        np.add.at(src_rank_counts, source[:, 0], 1)
        for src, token in source:
            chosen = inputs.topk_idx[src][token]
            np.add.at(expert_counts, chosen[chosen // num_local == rank] - rank * num_local, 1)
    return replace(
        received,
        row_idx=received.row_idx[kept],
        tokens=received.tokens[kept],
        source=source,
        expert_counts=expert_counts,
        expert_offsets=offsets,
        src_rank_counts=src_rank_counts,
        topk_idx=None if received.topk_idx is None else received.topk_idx[kept],
        topk_weights=None if received.topk_weights is None else received.topk_weights[kept],
    )


def _experts_of(inputs: Inputs, source: Array) -> IntArray:
    """Expert of each (rank, token, k), [R]."""
    return np.array([inputs.topk_idx[src][token, k] for src, token, k in source], np.int64)


def kept_pairs(inputs: Inputs, rank: int, cfg: GroupConfig) -> Array:
    """Which (token, k) of `rank` reach an expert, bool [T, K]."""
    ids = inputs.topk_idx[rank]
    if cfg.overflow != "drop" or cfg.max_recv_tokens_per_rank is None:
        return ids >= 0
    kept = np.zeros(ids.shape, bool)
    for dst in range(inputs.num_ranks):
        source = dispatch(inputs, dst, cfg).source
        mine = source[source[:, 0] == rank]
        if mine.shape[1] == 3:
            kept[mine[:, 1], mine[:, 2]] = True
        else:
            kept[mine[:, 1]] |= inputs.owner(rank)[mine[:, 1]] == dst
    return kept


def combine(
    inputs: Inputs,
    rank: int,
    cfg: GroupConfig,
    answer: Callable[[int], Array],
    *,
    weights: FloatArray | None = None,
    bias: Sequence[Array] = (),
) -> Array:
    """What combine must return on `rank` in any form, [T, H] of combine_dtype.

    Args:
        answer: expert_major: k -> the answers of every token's k-th expert, [T, H]; else: rank -> what that rank
            answers for every token. Of combine_dtype; rows for which there is none are not looked at. With
            combine_quant those of other ranks are carried().
        weights: [T, K], instead of those of the inputs.
        bias: arrays [T, H], added in this order.
    """
    kept = kept_pairs(inputs, rank, cfg)
    dtype = answer(0).dtype
    weights = weights_or_ones(inputs, rank) if weights is None else weights
    owner = np.where(kept, inputs.owner(rank), -1)
    if cfg.reduce == "exact":

        def term(k: int) -> Array:
            rows, is_peers = answer(k), (owner[:, k] != rank)[:, None]
            return np.where(is_peers, carried(rows, cfg.combine_quant), rows.astype(np.float32))

        return weighted_sum(np.where(kept, 0, -1), weights, term, dtype, bias)

    if cfg.layout != "expert_major":

        def rank_row(dst: int) -> Array:
            return carried(answer(dst), None if dst == rank else cfg.combine_quant)

        return rank_sum(owner, inputs.num_ranks, rank_row, dtype, bias)
    partial = np.zeros((inputs.num_ranks, *answer(0).shape), np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for k in range(owner.shape[1]):
            rows = np.flatnonzero(kept[:, k])
            partial[owner[rows, k], rows] += _times(weights[rows, k, None], answer(k)[rows])
        rounded = partial.astype(dtype)
    if cfg.combine_quant is None:
        return rank_sum(owner, inputs.num_ranks, lambda dst: rounded[dst], dtype, bias)
    coded = carried(partial, cfg.combine_quant)  # of the sum itself
    return rank_sum(owner, inputs.num_ranks, lambda dst: rounded[dst] if dst == rank else coded[dst], dtype, bias)


def per_rank_bound(magnitude: Double, num_topk: int, num_ranks: int, dtype: Any) -> Double:
    """How far reduce="per_rank" can be from the exact sum of w[k] * answer[k] (plus bias), element by element.

    magnitude: sum of |w[k]| |answer[k]| and |bias|. With m terms of a rank: the rank's float32 sum is off by at most
    gamma(m + 1) of their magnitude; rounding it to combine_dtype adds a factor 1 + u; the owner's float32 sum over the
    ranks and at most two biases 1 + gamma(N + 2); the last rounding 1 + u again (Higham, section 3.1). What falls below
    the normal numbers of dtype loses at most half its smallest number in each of the N + 1 roundings.
    """
    import ml_dtypes

    info: Any = ml_dtypes.finfo(dtype)  # type: ignore[no-untyped-call]
    u = float(info.eps) / 2
    relative = (1 + gamma(num_topk + 1)) * (1 + u) ** 2 * (1 + gamma(num_ranks + 2)) - 1
    absolute = (num_ranks + 1) * float(info.smallest_subnormal)
    bound: Double = relative * magnitude + absolute
    return bound


def coded_bound(magnitude: Double, error: Double, num_topk: int, num_ranks: int, dtype: Any) -> Double:
    """How far combine with combine_quant can be from the exact sum, element by element, with either reduce.

    magnitude: as in per_rank_bound; error: sum of carried_bound of every row that another rank sent, times |w[k]| with
    reduce="exact". What is summed is off by at most that, and the sum as in per_rank_bound.
    """
    return error + per_rank_bound(magnitude + error, num_topk, num_ranks, dtype)


def combine_exact(inputs: Inputs, rank: int, expert_rows: Sequence[Array]) -> Array:
    """Low latency, reduce="exact": [T, H] of `rank`.

    `expert_rows[d]` are the experts' answers of rank d, one per valid row, in the order of dispatch_expert_major.
    """
    ids = inputs.topk_idx[rank]
    answers = np.zeros((*ids.shape, inputs.x[rank].shape[1]), inputs.x[rank].dtype)
    for dst, rows in enumerate(expert_rows):
        source = dispatch_expert_major(inputs, dst, 0).source
        mine = source[:, 0] == rank
        answers[source[mine, 1], source[mine, 2]] = rows[mine]
    return weighted_sum(ids, weights_or_ones(inputs, rank), lambda k: answers[:, k], inputs.x[rank].dtype)


def combine_flat(inputs: Inputs, rank: int, expert_rows: Sequence[Array]) -> Array:
    """High throughput, layout flat: [T, H] of `rank`: the ranks' rows of a token, summed in rank order without weights.

    `expert_rows[d]` are the answers of rank d, one per valid row, in the order of dispatch_flat(inputs, d).
    """
    partial = np.zeros((inputs.num_ranks, *inputs.x[rank].shape), inputs.x[rank].dtype)
    for dst, rows in enumerate(expert_rows):
        source = dispatch_flat(inputs, dst).source
        mine = source[:, 0] == rank
        partial[dst, source[mine, 1]] = rows[mine]
    return rank_sum(inputs.owner(rank), inputs.num_ranks, lambda dst: partial[dst], inputs.x[rank].dtype)


def weighted_sum(
    ids: IntArray, weights: FloatArray, answer_of_k: Callable[[int], Array], dtype: Any, bias: Sequence[Array] = ()
) -> Array:
    """Sum over k, in order, of weights[:, k] * answer_of_k(k), [T, H]; k without an expert (id -1) add nothing."""
    num_topk = ids.shape[1]
    terms = (_times(weights[:, k, None], answer_of_k(k)) for k in range(num_topk))
    return _sum_in_order((ids.T >= 0), terms, dtype, bias)


def rank_sum(
    owner: IntArray, num_ranks: int, answer_of_rank: Callable[[int], Array], dtype: Any, bias: Sequence[Array] = ()
) -> Array:
    """Sum over the ranks 0..N-1 that own an expert of the token (`owner` [T, K]) of answer_of_rank(n), [T, H]."""
    masks = np.stack([(owner == n).any(1) for n in range(num_ranks)])
    return _sum_in_order(masks, (answer_of_rank(n).astype(np.float32) for n in range(num_ranks)), dtype, bias)


def _times(weights: FloatArray, answers: Array) -> FloatArray:
    with np.errstate(over="ignore", invalid="ignore"):
        product: FloatArray = weights * answers.astype(np.float32)
    return product


def weights_or_ones(inputs: Inputs, rank: int) -> FloatArray:
    weights = inputs.topk_weights[rank]
    return np.ones(inputs.topk_idx[rank].shape, np.float32) if weights is None else weights


def first_difference(actual: Array, expected: Array) -> str | None:
    """Where two arrays differ, as one line, or None. Bits are compared, but NaN equals NaN whatever its bits."""
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return f"is {actual.dtype}{list(actual.shape)}, expected {expected.dtype}{list(expected.shape)}"
    unsigned = np.dtype(f"u{actual.dtype.itemsize}")
    differs = np.ascontiguousarray(actual).view(unsigned) != np.ascontiguousarray(expected).view(unsigned)
    differs &= ~((actual != actual) & (expected != expected))
    if not differs.any():
        return None
    place = tuple(int(i) for i in np.argwhere(differs)[0])
    where = f"{int(differs.sum())} of {differs.size} values, first at {place}"
    return f"differs in {where}: {actual[place]}, expected {expected[place]}"


def assert_same(actual: Array, expected: Array, name: str) -> None:
    """Raise AssertionError with the first place where two arrays differ (see first_difference)."""
    difference = first_difference(actual, expected)
    if difference is not None:
        raise AssertionError(f"{name} {difference}")


@dataclass(frozen=True)
class Experts:
    """Weights of E two-layer feed-forward experts: relu(x @ up[e]) @ down[e]."""

    up: FloatArray  # [E, H, F]
    down: FloatArray  # [E, F, H]


@dataclass(frozen=True)
class Dense:
    """A layer's output in float64, and what a bound on another computation's error is made of; each [T, H].

    output: sum over k of w[k] * answer[k]; magnitude: sum of |w[k]| |answer[k]|; error: sum of |w[k]| times how far the
    answer can be off if an expert is computed in float32 from the same rows.
    """

    output: Double
    magnitude: Double
    error: Double


def dense_moe(x: Array, topk_idx: Array, topk_weights: Array, experts: Experts) -> Dense:
    """The whole MoE layer in one process, without dispatch or combine.

    The error of a float32 dot product of length n, in any order of summation, is at most gamma(n) |a||b| (Higham,
    Accuracy and Stability of Numerical Algorithms, section 3.1). relu enlarges no error; the second layer carries the
    first one's through |down|.
    """
    dense = Dense(*(np.zeros(x.shape, np.float64) for _ in range(3)))
    for expert in range(len(experts.up)):
        token, k = np.nonzero(topk_idx == expert)
        rows, weight = x[token].astype(np.float64), topk_weights[token, k, None].astype(np.float64)
        up, down = experts.up[expert].astype(np.float64), experts.down[expert].astype(np.float64)
        inner = np.maximum(rows @ up, 0)
        inner_error = gamma(len(up)) * (np.abs(rows) @ np.abs(up))
        answer = inner @ down
        answer_error = (gamma(len(down)) * (inner + inner_error) + inner_error) @ np.abs(down)
        np.add.at(dense.output, token, weight * answer)
        np.add.at(dense.magnitude, token, np.abs(weight * answer))
        np.add.at(dense.error, token, np.abs(weight) * answer_error)
    return dense


def gamma(num_operations: int) -> float:
    """Relative error of that many float32 operations in a row."""
    return num_operations * 2.0**-24 / (1 - num_operations * 2.0**-24)


def _valid_ids(topk_idx: Array, num_experts: int) -> IntArray:
    ids = np.asarray(topk_idx).astype(np.int64)
    return np.where((ids >= 0) & (ids < num_experts), ids, -1)


def _take(inputs: Inputs, src_rank: IntArray, token: IntArray) -> Array:
    tokens = np.empty((len(token), inputs.x[0].shape[1]), inputs.x[0].dtype)
    for src, x in enumerate(inputs.x):
        tokens[src_rank == src] = x[token[src_rank == src]]
    return tokens


def _sum_in_order(masks: Array, terms: Iterable[FloatArray], dtype: Any, bias: Sequence[Array] = ()) -> Array:
    """Add each term [T, H] where its mask [T] is set, then the biases. Overflow to infinity and NaN are results here,
    not mistakes.
    """
    total: FloatArray | None = None
    with np.errstate(over="ignore", invalid="ignore"):
        for mask, values in zip(masks, terms, strict=True):
            total = np.zeros_like(values) if total is None else total
            total = np.where(mask[:, None], total + values, total)
        if total is None:
            raise ValueError("nothing to sum")
        for row in bias:
            total = total + row.astype(np.float32)
        return total.astype(dtype)
