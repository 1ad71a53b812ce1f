"""The "experts" of a benchmark: what they answer to the rows that a rank received."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np

from cuep import layout
from cuep.bench.workload import Array, Options, group_config, scale
from cuep.config import QUANT_BLOCK, GroupConfig
from cuep.world import World


def answers(world: World, options: Options, received: Any) -> Array:
    """Rows times scale(), NaN wherever no row is. received: cuep.Received, or what looks like one."""
    backend, xp = world.backend, world.backend.xp
    config = group_config(options, {})
    tokens = received.tokens.reshape(-1, config.hidden)
    dtype = layout.dtype_of(config.combine_dtype)
    result = backend.empty(tokens.shape, dtype)
    values, scales = None, None
    if received.scales is not None:
        values = backend.asarray(_values_of_codes(config.recv_dtype))
        scales = _factors(world, received.scales.reshape(len(tokens), -1))

    def fill(first: int, end: int, num_rows: Array, owner: int) -> None:
        rows = tokens[first:end]  # anything may lie beyond num_rows
        if values is not None and scales is not None:
            blocks = values[rows.view(xp.uint8)].reshape(len(rows), -1, QUANT_BLOCK)
            rows = (blocks * scales[first:end, :, None]).reshape(rows.shape)
        is_row = xp.arange(len(rows)) < num_rows
        scaled = rows.astype(xp.float32) * xp.float32(scale(owner))
        result[first:end] = xp.where(is_row[:, None], scaled, xp.float32("nan")).astype(dtype)

    with np.errstate(all="ignore"):
        _fill_zones(world, config, received, fill)
    return result.reshape(received.tokens.shape)


def _fill_zones(world: World, config: GroupConfig, received: Any, fill: Callable[[int, int, Any, int], None]) -> None:
    """Call `fill` for every stretch of rows that one expert (expert_major) or this rank answers."""
    if config.layout == "flat":
        fill(0, len(received.tokens), received.total[0], world.rank)
    elif config.layout == "rank_major":
        for src in range(world.size):
            most = config.max_tokens_per_rank
            fill(src * most, (src + 1) * most, received.src_rank_counts[src], world.rank)
    else:
        num_local = config.num_experts // world.size
        offsets = [int(offset) for offset in world.backend.to_numpy(received.expert_offsets)]
        for local, (first, end) in enumerate(itertools.pairwise(offsets)):
            fill(first, end, received.expert_counts[local], world.rank * num_local + local)


def _values_of_codes(dtype: str) -> Array:
    """float32 of each of the 256 codes: not every array library has the dtype."""
    return np.arange(256, dtype=np.uint8).view(layout.dtype_of(dtype)).astype(np.float32)


def _factors(world: World, scales: Array) -> Array:
    """What scales multiply by, float32. Exponents (ue8m0) are looked up: a GPU's exp2 need not be exact."""
    if scales.dtype != np.uint8:
        return scales
    with np.errstate(over="ignore"):
        powers = np.exp2(np.arange(256, dtype=np.float32) - 127)
    return world.backend.asarray(powers)[scales]
