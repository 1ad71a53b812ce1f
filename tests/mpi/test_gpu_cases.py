"""Reports that only GPUs can answer: rare races over many rounds, and time that follows the tokens."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from harness import to_device
from moe import config

import cuep
from cuep import layout
from cuep.bench.timing import Operation, measure


@pytest.fixture(autouse=True)
def needs_gpus(world: Any) -> None:
    if world.backend.name != "cuda":
        pytest.skip("needs GPUs")


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("form", [{}, {"reduce": "per_rank"}, {"layout": "rank_major"}])
@pytest.mark.parametrize("num_tokens", [256, 1024])
def test_a_thousand_rounds(world: Any, form: dict[str, Any], num_tokens: int) -> None:
    """B11: tokens of rank 0 alone, each to two experts of one rank; y is 2x in every one of 300 rounds of each size."""
    xp, backend = world.backend.xp, world.backend
    cfg = config("ll", num_experts=256, hidden=7168, max_tokens_per_rank=num_tokens, **form)
    with cuep.Group(world, cfg) as group:
        count = num_tokens if world.rank == 0 else 0
        first = np.random.default_rng(0).integers(0, world.size, count) * (256 // world.size)
        ids = to_device(world, np.stack([first, first + 1], 1).astype(np.int64).reshape(count, 2))
        handle = group.create_handle(ids)
        bits = xp.random.default_rng(1).integers(0, 2, (num_tokens + 500, 7168), dtype=xp.int32)
        rows = bits.astype(xp.float32).astype(layout.dtype_of("bfloat16"))
        wrong = xp.zeros(1, xp.int64)
        for number in range(300):
            x = rows[number : number + count]
            recv = handle.dispatch(x)
            out = recv.tokens
            if cfg.layout == "rank_major":  # the caller sums its experts
                out = (out.astype(xp.float32) * 2).astype(out.dtype) if number % 50 == 0 else out + out
            y = handle.combine(out)
            if count:
                wrong += (y.view(xp.uint16) != (x + x).view(xp.uint16)).any(1).sum()
        group.check()
        assert int(wrong[0]) == 0, f"{int(wrong[0])} wrong rows"
    backend.synchronize()


@pytest.mark.ranks(4)
def test_time_follows_the_tokens_not_the_capacity(world: Any) -> None:
    """P02: 4 tokens take at most 1.5 times as long in a group for 2048 tokens as in one for 64; 255 masked rows are
    nearly free."""
    pair_us = {}
    for most, num_tokens, num_live in ((64, 4, 4), (2048, 4, 4), (2048, 256, 1)):
        cfg = config("ll", num_experts=64, hidden=7168, num_topk=8, max_tokens_per_rank=most)
        with cuep.Group(world, cfg) as group:
            rng = np.random.default_rng(world.rank)
            ids = np.argsort(rng.random((num_tokens, 64)), 1)[:, :8].copy()
            ids[num_live:] = -1
            x = to_device(world, np.ones((num_tokens, 7168), layout.dtype_of("bfloat16")))
            stream = world.stream()
            handle = group.create_handle(to_device(world, ids), stream=stream)

            def dispatch(handle: Any = handle, x: Any = x, stream: Any = stream) -> None:
                handle.dispatch(x, stream=stream)

            def combine(handle: Any = handle, stream: Any = stream) -> None:
                handle.combine(handle.arrays["tokens"], stream=stream)

            timing = measure(world, stream, Operation("pair", (dispatch, combine)), 10, graph=True)
            pair_us[most, num_tokens] = timing.us_median
            group.check()
    assert pair_us[2048, 4] <= 1.5 * pair_us[64, 4], pair_us
    assert pair_us[2048, 256] <= 2.0 * pair_us[64, 4], pair_us
