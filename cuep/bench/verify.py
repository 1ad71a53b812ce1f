"""Compares what dispatch and combine returned with the oracle, bit by bit."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from cuep import reference
from cuep.bench.workload import Inputs, Options, group_config, make_inputs, scale
from cuep.config import GroupConfig
from cuep.world import World


@dataclass(frozen=True)
class Expected:
    """What this rank must get from its make_inputs(), with experts that multiply by scale()."""

    received: reference.Dispatched
    combined: reference.Array


def expect(world: World, options: Options) -> Expected:
    """Needs nothing of the other ranks: every rank's inputs can be made again."""
    ranks = [make_inputs(options, rank) for rank in range(world.size)]
    inputs = reference.make_inputs(
        options.experts, [r.x for r in ranks], [r.topk_idx for r in ranks], [r.topk_weights for r in ranks]
    )
    cfg = group_config(options, {})
    received = reference.dispatch(inputs, world.rank, cfg)
    return Expected(received, _expected_combine(inputs, ranks[world.rank], cfg, world.rank))


def problems(world: World, expected: Expected, received: Any, combined: Any) -> list[str]:
    """What differs on any rank, one line each; empty if all is right. Collective."""
    mine = [f"dispatch: {text}" for text in _compare_received(world, received, expected.received)]
    difference = reference.first_difference(world.backend.to_numpy(combined), expected.combined)
    if difference is not None:
        mine.append(f"combine: y {difference}")
    return [f"rank {rank}: {text}" for rank, texts in enumerate(world.comm.allgather(mine)) for text in texts]


def _expected_combine(inputs: reference.Inputs, mine: Inputs, cfg: GroupConfig, rank: int) -> reference.Array:
    ids = inputs.topk_idx[rank]

    def answer(owner: int) -> reference.Array:
        """Of the owner-th expert of each token, or of rank `owner`."""
        factor = scale(ids[:, owner])[:, None] if cfg.layout == "expert_major" else scale(owner)
        rows: reference.Array = (mine.x.astype(np.float32) * factor).astype(mine.x.dtype)
        return rows

    return reference.combine(inputs, rank, cfg, answer)


def _compare_received(world: World, received: Any, expected: reference.Dispatched) -> list[str]:
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
    for name in ("tokens", "source", "topk_idx", "topk_weights"):
        value = getattr(received, name)
        compare(name, None if value is None else _valid_rows(world, value, expected), getattr(expected, name))
    return found


def _valid_rows(world: World, value: Any, expected: reference.Dispatched) -> reference.Array:
    """The rows that hold something, on the host. Taken on the device, as bits: receive tensors are much larger, and not
    every array library indexes every dtype."""
    rows = (value if value.ndim == 1 else value.reshape(-1, value.shape[-1])).view(f"u{value.dtype.itemsize}")
    taken = world.backend.to_numpy(rows[world.backend.asarray(expected.row_idx)])
    bits: reference.Array = taken.view(value.dtype)
    return bits
