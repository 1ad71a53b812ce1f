"""Compares what dispatch and combine returned with the oracle: cuep's bit by bit, a peer's within a tolerance."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cuep import layout, reference
from cuep.bench.workload import Options, group_config, make_inputs, scale
from cuep.config import GroupConfig
from cuep.world import World


@dataclass(frozen=True)
class Expected:
    """What this rank must get from its make_inputs(), with experts that multiply by scale()."""

    received: reference.Dispatched
    scales: reference.Array | None  # of the received rows
    combined: reference.Array


def expect(world: World, options: Options) -> Expected:
    """Needs nothing of the other ranks: every rank's inputs can be made again."""
    ranks = [make_inputs(options, rank) for rank in range(world.size)]
    inputs = reference.make_inputs(
        options.experts, [r.x for r in ranks], [r.topk_idx for r in ranks], [r.topk_weights for r in ranks]
    )
    cfg = group_config(options, {})
    x = ranks[world.rank].x
    if cfg.quant is None:
        received = reference.dispatch(inputs, world.rank, cfg)
        return Expected(received, None, _expected_combine(inputs, x, cfg, world.rank))
    sent = [reference.quantise(rows, cfg.scale_format) for rows in inputs.x]
    received = reference.dispatch(replace(inputs, x=[values for values, _ in sent]), world.rank, cfg)
    rows = [sent[rank][1][token] for rank, token in received.source[:, :2]]
    scales = np.array(rows, sent[0][1].dtype).reshape(-1, cfg.num_scales)
    x = reference.dequantise(*sent[world.rank])
    return Expected(received, scales, _expected_combine(inputs, x, cfg, world.rank))


def problems(world: World, expected: Expected, received: Any, combined: Any) -> list[str]:
    """What differs on any rank, one line each; empty if all is right. Collective."""
    mine = [f"dispatch: {text}" for text in _compare_received(world, received, expected)]
    difference = reference.first_difference(world.backend.to_numpy(combined), expected.combined)
    if difference is not None:
        mine.append(f"combine: y {difference}")
    return of_all_ranks(world, mine)


def of_all_ranks(world: World, mine: list[str]) -> list[str]:
    """What the ranks found, each with its rank. Collective."""
    return [f"rank {rank}: {text}" for rank, texts in enumerate(world.comm.allgather(mine)) for text in texts]


def far_off(y: reference.Array, expected: reference.Array, *, is_quantised: bool) -> list[str]:
    """What of a peer's y is not what was expected, up to its roundings; empty or one line.

    A term is off by at most its rounding and that of partial sums, 2**-8 each in bfloat16, or, where the peer rounds
    e4m3 values and their scales otherwise than the oracle, by one code, 2**-3. A row's largest value stands for the
    size of its terms, which may cancel in y.
    """
    tolerance = 2.0**-3 if is_quantised else 2.0**-6
    ours, theirs = expected.astype(np.float32), y.astype(np.float32)
    bound = tolerance * np.abs(ours).max(1, keepdims=True, initial=0)
    is_far = ~(np.abs(theirs - ours) <= bound)  # also NaN
    if not is_far.any():
        return []
    token, column = np.argwhere(is_far)[0]
    return [
        f"combine: y differs in {is_far.sum()} of {is_far.size} values, first at [{token}, {column}]:"
        f" {theirs[token, column]}, expected {ours[token, column]} +- {bound[token, 0]:.3g}"
    ]


def _expected_combine(inputs: reference.Inputs, x: reference.Array, cfg: GroupConfig, rank: int) -> reference.Array:
    """x: this rank's rows as its experts see them."""
    ids = inputs.topk_idx[rank]

    def answer(owner: int) -> reference.Array:
        """Of the owner-th expert of each token, or of rank `owner`."""
        factor = scale(ids[:, owner])[:, None] if cfg.layout == "expert_major" else scale(owner)
        rows: reference.Array = (x.astype(np.float32) * factor).astype(layout.dtype_of(cfg.combine_dtype))
        return rows

    return reference.combine(inputs, rank, cfg, answer)


def _compare_received(world: World, received: Any, wanted: Expected) -> list[str]:
    expected = wanted.received
    to_numpy = world.backend.to_numpy
    found = []

    def compare(name: str, actual: Any, value: Any) -> None:
        if (actual is None) != (value is None):
            found.append(f"{name} is {'None' if actual is None else 'not None'}")
        elif actual is not None:
            difference = reference.first_difference(actual, value)
            if difference is not None:
                found.append(f"{name} {difference}")

    for name in ("expert_counts", "expert_offsets", "src_rank_counts"):
        value = getattr(received, name)
        compare(name, None if value is None else to_numpy(value), getattr(expected, name))
    compare("total", to_numpy(received.total), np.array([expected.total], np.int32))
    for name in ("tokens", "source", "topk_idx", "topk_weights", "scales"):
        value = getattr(received, name)
        right = wanted.scales if name == "scales" else getattr(expected, name)
        rows = None if value is None else _valid_rows(world, value, expected)
        if name == "tokens" and wanted.scales is not None and rows is not None:
            rows = rows.view(expected.tokens.dtype)  # bytes, where the array library has no float8
        compare(name, rows, right)
    return found


def _valid_rows(world: World, value: Any, expected: reference.Dispatched) -> reference.Array:
    """The rows that hold something, on the host. Taken on the device, as bits: receive tensors are much larger, and not
    every array library indexes every dtype."""
    rows = (value if value.ndim == 1 else value.reshape(-1, value.shape[-1])).view(f"u{value.dtype.itemsize}")
    taken = world.backend.to_numpy(rows[world.backend.asarray(expected.row_idx)])
    bits: reference.Array = taken.view(value.dtype)
    return bits
