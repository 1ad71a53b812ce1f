"""Dispatch and combine against the oracle, bit by bit, over shapes, token counts, masks and routings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from harness import examples, to_device, to_host
from hypothesis import strategies as st
from moe import (
    Step,
    check_combined,
    check_received,
    config,
    expected,
    poison,
    random_step,
    run_experts,
    run_step,
    tagged_rows,
)

import cuep
from cuep import jit, reference

MODES = ["ll", "ht"]

# Few compiled shapes; everything else varies at run time.
SHAPES: dict[str, dict[str, Any]] = {
    "plain": {},
    "odd": {"num_experts": 16, "hidden": 264, "num_topk": 5, "dtype": "float32", "num_buffers": 1},
    "one_buffer": {"num_buffers": 1},
}


@pytest.fixture(scope="module")
def groups(world: Any) -> Iterator[Any]:
    """Groups by (mode, shape), made at first use and kept for the module."""
    made: dict[tuple[str, str], cuep.Group] = {}

    def get(mode: str, shape: str = "plain") -> cuep.Group:
        if (mode, shape) not in made:
            made[mode, shape] = cuep.Group(world, config(mode, **SHAPES[shape]))
        return made[mode, shape]

    yield get
    for group in made.values():
        group.close()


@pytest.mark.ranks(1, 2, 4, 8)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("mode", MODES)
@examples(
    8,
    seed=st.integers(0, 10_000),
    tokens=st.lists(st.integers(0, 16), min_size=8, max_size=8),
    masked=st.sampled_from([0.0, 0.3, 1.0]),
    ids_dtype=st.sampled_from(["int32", "int64"]),
    has_weights=st.booleans(),
)
def test_random_steps(
    world: Any,
    groups: Any,
    mode: str,
    shape: str,
    seed: int,
    tokens: list[int],
    masked: float,
    ids_dtype: str,
    has_weights: bool,
) -> None:
    group = groups(mode, shape)
    step = random_step(world, group.cfg, seed, tokens[world.rank], masked)
    if not has_weights:
        step.topk_weights = None
    run_step(world, group, step, ids_dtype=ids_dtype).close()


@pytest.mark.parametrize("mode", MODES)
def test_an_empty_rank(world: Any, groups: Any, mode: str) -> None:
    """A01: one rank has no tokens, then another; 50 steps."""
    group = groups(mode)
    handle = None
    for number in range(50):
        num_tokens = 0 if number % world.size == world.rank else 8
        handle = run_step(world, group, random_step(world, group.cfg, number, num_tokens), handle)
    handle.close()


@pytest.mark.parametrize("mode", MODES)
def test_all_ranks_empty(world: Any, mode: str) -> None:
    """A02: nobody has tokens, as the first call ever and between others."""
    with cuep.Group(world, config(mode)) as group:
        for number, num_tokens in enumerate((0, 8, 0, 5)):
            run_step(world, group, random_step(world, group.cfg, number, num_tokens)).close()


@pytest.mark.parametrize("mode", MODES)
def test_a_rank_that_receives_nothing(world: Any, groups: Any, mode: str) -> None:
    """A03: all ids belong to rank 0; forward, then the reverse pair on the kept handle."""
    group = groups(mode)
    local = group.cfg.num_experts // world.size
    step = random_step(world, group.cfg, 3, 8, masked=0.0)
    step.topk_idx %= min(local, 2)
    if local == 1:
        step.topk_idx[...] = 0
    handle = run_step(world, group, step)
    gradient = tagged_rows(world.rank, 8, group.cfg.hidden, 4, group.cfg.dtype)
    recv = handle.dispatch(to_device(world, gradient))
    backward = Step(step.topk_idx, step.topk_weights, gradient)
    check_received(world, group.cfg, recv, expected(world, group.cfg, backward)[1])
    handle.combine(recv.tokens)
    group.check()
    handle.close()


@pytest.mark.parametrize("mode", MODES)
def test_everything_to_one_expert(world: Any, groups: Any, mode: str) -> None:
    """A04: the zone of one expert is exactly full; neighbours stay empty, symmetric memory around it untouched."""
    group = groups(mode)
    cfg = group.cfg
    full = np.full((cfg.max_tokens_per_rank, cfg.num_topk), -1, np.int64)
    full[:, 0] = 3
    weights = np.ones(full.shape, np.float32)
    x = tagged_rows(world.rank, len(full), cfg.hidden, 5, cfg.dtype)
    run_step(world, group, Step(full, weights, x)).close()
    full[:, 1], full[:, 0] = 3, -1
    run_step(world, group, Step(full, weights, x)).close()


@pytest.mark.parametrize("mode", MODES)
def test_calls_like_the_last_one(world: Any, groups: Any, mode: str) -> None:
    """The same arrays again and again, refilled, between calls of other kinds: each is what it would be on its own."""
    group = groups(mode)
    cfg = group.cfg
    first, second = (random_step(world, cfg, seed, 6) for seed in (31, 32))
    x, out = to_device(world, first.x.copy()), None
    handle = group.create_handle(to_device(world, first.topk_idx), to_device(world, first.topk_weights))
    unweighted = {} if mode == "ht" else {"topk_weights": None}

    def check_step(step: Step, number: int, **options: Any) -> None:
        nonlocal out
        step.x = tagged_rows(world.rank, 6, cfg.hidden, number, cfg.dtype)
        x[...] = to_device(world, step.x)
        recv = handle.dispatch(x)
        inputs, want = expected(world, cfg, step)
        check_received(world, cfg, recv, want)
        answers = run_experts(cfg, world, recv)
        if out is None:
            out = answers
        out[...] = answers
        y = handle.combine(out, **options)
        group.check()
        if not options:
            check_combined(world, cfg, step, inputs, y)

    for number in range(3):
        check_step(first, number)
    check_step(first, 3, **unweighted)
    check_step(first, 4)
    for number in range(5, 8):
        handle.update(to_device(world, second.topk_idx), to_device(world, second.topk_weights))
        check_step(second, number)
        check_step(second, 10 + number)
    with pytest.raises(cuep.ArgumentError, match="x has shape"):
        handle.dispatch(x[:5])
    check_step(second, 20)
    if mode == "ll":
        handle.dispatch(x, send_only=True)
        handle.complete()
        check_step(second, 21)
    handle.close()


@pytest.mark.parametrize("mode", MODES)
def test_masked_entries(world: Any, groups: Any, mode: str) -> None:
    """A06: half of the ids are -1 with NaN weights, one token has no expert: it comes back exactly 0."""
    group = groups(mode, "odd")
    step = random_step(world, group.cfg, 6, 9, masked=0.5)
    step.topk_idx[5] = -1
    step.topk_weights[5] = np.nan
    handle = run_step(world, group, step)
    assert not to_host(world, handle.arrays["y"])[5].any()
    handle.close()


@pytest.mark.parametrize("mode", MODES)
def test_the_same_expert_twice(world: Any, groups: Any, mode: str) -> None:
    """A07: ll delivers two rows and counts twice; ht one row that names the expert twice."""
    group = groups(mode)
    ids = np.tile([[1, 1]], (4, 1))
    weights = np.tile(np.float32([[0.25, 0.5]]), (4, 1))
    x = np.full((4, group.cfg.hidden), 2, np.float32).astype(tagged_rows(0, 0, 8, 0, group.cfg.dtype).dtype)
    handle = run_step(world, group, Step(ids, weights, x))
    if mode == "ll" and world.size == 1:
        recv = handle.dispatch(to_device(world, x))
        y = to_host(world, handle.combine(recv.tokens)).astype(np.float32)
        assert (y == 1.5).all()
    handle.close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("bad_id", [8, 1008, -2, 2**31 - 1, 2**33 + 1])
def test_ids_out_of_range(world: Any, groups: Any, mode: str, bad_id: int) -> None:
    """A08: such an id is no expert; check() tells how many there were; the next step is fine."""
    group = groups(mode)
    step = random_step(world, group.cfg, 8, 6, masked=0.0)
    step.topk_idx[2, 1] = bad_id
    ids, weights = to_device(world, step.topk_idx), to_device(world, step.topk_weights)
    handle = group.create_handle(ids, weights)
    recv = handle.dispatch(to_device(world, step.x))
    _, want = expected(world, group.cfg, step)
    with pytest.raises(cuep.ArgumentError, match=r"topk_idx had 1 ids outside \[-1, 8\)"):
        group.check()
    check_received(world, group.cfg, recv, want)
    handle.combine(recv.tokens)
    group.check()
    handle.close()


@pytest.mark.parametrize("mode", MODES)
def test_ids_of_both_widths_give_the_same_bits(world: Any, groups: Any, mode: str) -> None:
    """A09: int32 and int64; other types are refused on this rank and, as PeerRefused, on its peers."""
    group = groups(mode)
    step = random_step(world, group.cfg, 9, 7)
    results = []
    for ids_dtype in ("int32", "int64"):
        handle = run_step(world, group, step, ids_dtype=ids_dtype)
        results.append(to_host(world, handle.arrays["y"])[:7].copy())
        handle.close()
    reference.assert_same(results[0], results[1], "y")
    for ids_dtype in ("uint32", "int16", "float32"):
        with pytest.raises(cuep.ArgumentTypeError, match="topk_idx has dtype .*allowed: int32, int64"):
            group.create_handle(to_device(world, step.topk_idx.astype(ids_dtype)))
    run_step(world, group, step).close()


@pytest.mark.ranks(1, 2, 4, 8)
@pytest.mark.parametrize("mode", MODES)
def test_unequal_token_counts(world: Any, mode: str) -> None:
    """A13: 256, 64, 1 and 0 tokens, rotated over the ranks for 20 steps."""
    counts = [256, 64, 1, 0]
    with cuep.Group(world, config(mode, max_tokens_per_rank=256)) as group:
        handle = None
        for number in range(20 if world.backend.name == "cuda" else 6):
            num_tokens = counts[(number + world.rank) % 4]
            handle = run_step(world, group, random_step(world, group.cfg, number, num_tokens), handle)


@pytest.mark.parametrize("mode", MODES)
def test_the_callers_arrays_may_change_after_dispatch(world: Any, groups: Any, mode: str) -> None:
    """A19: routing and weights are the handle's from dispatch on; a second dispatch uses them, too."""
    group = groups(mode)
    step = random_step(world, group.cfg, 19, 8)
    ids, weights = to_device(world, step.topk_idx.copy()), to_device(world, step.topk_weights.copy())
    handle = group.create_handle(ids, weights)
    x = to_device(world, step.x)
    first = handle.dispatch(x)
    ys = [to_host(world, handle.combine(first.tokens)).copy()]
    ids[...] = 0
    weights[...] = 99
    world.backend.synchronize()
    poison(world, handle, first)
    second = handle.dispatch(x)
    check_received(world, group.cfg, second, expected(world, group.cfg, step)[1])
    ys.append(to_host(world, handle.combine(second.tokens)))
    group.check()
    reference.assert_same(ys[1], ys[0], "y")
    handle.close()


def test_sums_are_fp32(world: Any) -> None:
    """B01: 256 and seven ones, in both orders, is 264 in bfloat16; a bfloat16 accumulator would say 256."""
    with cuep.Group(world, config("ll", num_topk=8)) as group:
        for order in (np.arange(8), np.arange(8)[::-1]):
            ids = to_device(world, order[None].copy())
            x = np.ones((1, group.cfg.hidden), np.float32).astype(tagged_rows(0, 0, 8, 0, "bfloat16").dtype)
            handle = group.create_handle(ids)
            recv = handle.dispatch(to_device(world, x))
            out = to_host(world, recv.tokens)
            if world.rank == 0:
                out[0] *= 256
            y = to_host(world, handle.combine(to_device(world, out))).astype(np.float32)
            group.check()
            assert (y == 264).all()
            handle.close()


@pytest.mark.parametrize("mode", MODES)
def test_two_handles_at_once(world: Any, groups: Any, mode: str) -> None:
    """D0 D1 C0 C1: combine of one handle after another's dispatch."""
    group = groups(mode)
    steps = [random_step(world, group.cfg, number, 4 + 3 * number) for number in (0, 1)]
    handles = [group.create_handle(to_device(world, s.topk_idx), to_device(world, s.topk_weights)) for s in steps]
    received = [h.dispatch(to_device(world, s.x)) for h, s in zip(handles, steps, strict=True)]
    for handle, recv, step in zip(handles, received, steps, strict=True):
        check_received(world, group.cfg, recv, expected(world, group.cfg, step)[1])
        handle.combine(recv.tokens)
    group.check()
    for handle in handles:
        handle.close()


@pytest.mark.parametrize("mode", MODES)
def test_token_counts_compile_nothing(world: Any, mode: str) -> None:
    """F08: T and the most tokens are run-time values, in either of ll's variants for few and for many tokens."""
    for most in (1, 4, 7, 16, 20):  # few tokens: how many blocks share a row
        with cuep.Group(world, config(mode, max_tokens_per_rank=most)) as group:
            run_step(world, group, random_step(world, group.cfg, 0, min(most, 3)))
    before = jit.stats.compiled
    for most in (1, 7, 64, 100):
        with cuep.Group(world, config(mode, max_tokens_per_rank=most)) as group:
            for num_tokens in sorted({0, 1, most // 2, most}):
                run_step(world, group, random_step(world, group.cfg, num_tokens, num_tokens)).close()
    assert jit.stats.compiled == before
