"""What users reported of libraries like this one, over every form: numerics, shapes, order of calls, determinism."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from harness import to_device, to_host
from moe import Step, check_received, config, expected, expected_y, random_step, run_experts, run_step, tagged_rows

import cuep
from cuep import jit, layout, reference

FORMS: dict[str, dict[str, Any]] = {
    "ll exact": {"mode": "ll"},
    "ll per_rank": {"mode": "ll", "reduce": "per_rank"},
    "ll rank_major": {"mode": "ll", "layout": "rank_major"},
    "ht flat": {"mode": "ht"},
    "ht expert_major": {"mode": "ht", "layout": "expert_major", "alignment": 8},
}
WEIGHTED = [name for name, form in FORMS.items() if form.get("layout", form["mode"]) not in ("rank_major", "ht")]


def ones_step(world: Any, cfg: cuep.GroupConfig, num_tokens: int, value: float = 1.0) -> Step:
    """Every token to all experts of the first K, weights 1, rows of one value."""
    ids = np.tile(np.arange(cfg.num_topk) % cfg.num_experts, (num_tokens, 1))
    x = np.full((num_tokens, cfg.hidden), value, np.float32).astype(layout.dtype_of(cfg.dtype))
    return Step(ids, np.ones(ids.shape, np.float32), x)


def start(world: Any, group: cuep.Group, step: Step) -> tuple[cuep.Handle, Any]:
    weights = None if step.topk_weights is None else to_device(world, step.topk_weights)
    handle = group.create_handle(to_device(world, step.topk_idx), weights)
    return handle, handle.dispatch(to_device(world, step.x))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num_topk", [1, 9, 12, 32])
def test_numbers_of_experts_per_token(world: Any, form: str, num_topk: int) -> None:
    """A10: top-k up to 32, also more than there are experts; 33 is refused when the settings are made."""
    num_experts = 64 if num_topk == 12 else 8
    num_tokens = 4 if num_topk <= num_experts else 2
    with cuep.Group(world, config(**FORMS[form], num_experts=num_experts, num_topk=num_topk)) as group:
        step = random_step(world, group.cfg, num_topk, num_tokens)
        if num_topk > num_experts:
            step.topk_idx[:, num_experts:] = -1
            step.topk_idx[:, :num_experts] = np.arange(num_experts)
            step.topk_weights[:, :num_experts] = 0.5
        run_step(world, group, step)
    with pytest.raises(cuep.ArgumentError, match="num_topk=33"):
        config(**FORMS[form], num_topk=33)


@pytest.mark.parametrize("form", FORMS)
def test_the_same_bits_every_time(world: Any, form: str) -> None:
    """A20: 20 runs of one step; rows and sums are those of the oracle, so those of the other backend, too."""
    with cuep.Group(world, config(**FORMS[form], num_experts=16, num_topk=4, hidden=512)) as group:
        step = random_step(world, group.cfg, 20, 16)
        handle = None
        for _ in range(20 if world.backend.name == "cuda" else 5):
            handle = run_step(world, group, step, handle)


@pytest.mark.parametrize("form", WEIGHTED)
def test_weights_of_one(world: Any, form: str) -> None:
    """B03: combine(topk_weights=None) is the plain sum; a handle without weights has none to give back."""
    with cuep.Group(world, config(**FORMS[form])) as group:
        step = random_step(world, group.cfg, 3, 9)
        handle, recv = start(world, group, step)
        y = to_host(world, handle.combine(run_experts(group.cfg, world, recv), topk_weights=None))
        group.check()
        inputs, _ = expected(world, group.cfg, step)
        ones = np.ones(step.topk_idx.shape, np.float32)
        reference.assert_same(y, expected_y(group.cfg, world.rank, step, inputs, weights=ones), "y")
        assert (recv.topk_weights is None) == (group.cfg.mode == "ll")
        step.topk_weights = None
        run_step(world, group, step, handle)


@pytest.mark.parametrize("form", [name for name in FORMS if name not in WEIGHTED])
def test_forms_without_weights(world: Any, form: str) -> None:
    """B03: they take "handle" or None alike, and refuse an array; without weights recv has None, not stale memory."""
    with cuep.Group(world, config(**FORMS[form])) as group:
        step = random_step(world, group.cfg, 3, 9)
        inputs, want = expected(world, group.cfg, step)
        handle, recv = start(world, group, step)
        check_received(world, group.cfg, recv, want)
        y = handle.combine(run_experts(group.cfg, world, recv), topk_weights=None)
        reference.assert_same(to_host(world, y), expected_y(group.cfg, world.rank, step, inputs), "y")
        recv = handle.dispatch(to_device(world, step.x))
        with pytest.raises(cuep.ArgumentError, match="topk_weights: an array is allowed with reduce='exact' only"):
            handle.combine(recv.tokens, topk_weights=to_device(world, step.topk_weights))
        group.check()
        step.topk_weights = None
        handle = run_step(world, group, step, handle)
        assert handle.dispatch(to_device(world, step.x)).topk_weights is None
        handle.combine(recv.tokens)
        group.check()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("combine_dtype", ["bfloat16", "float32"])
def test_bias(world: Any, form: str, combine_dtype: str) -> None:
    """B04: one or two biases, added once in fp32 before the one rounding; a token without experts is its bias."""
    with cuep.Group(world, config(**FORMS[form], combine_dtype=combine_dtype)) as group:
        cfg = group.cfg
        dtype = layout.dtype_of(combine_dtype)
        step = random_step(world, cfg, 4, 0 if world.rank == world.size - 1 and world.size > 1 else 9)
        if step.num_tokens:
            step.topk_idx[5] = -1
        rng = np.random.default_rng(world.rank)
        biases = [rng.standard_normal((step.num_tokens, 2 * cfg.hidden)).astype(dtype)[:, : cfg.hidden] for _ in "ab"]
        inputs, _ = expected(world, cfg, step)
        handle, recv = start(world, group, step)
        given = [to_device(world, np.concatenate([b, b], 1))[:, : cfg.hidden] for b in biases]  # strided rows
        for bias in (given[0], (given[0],), tuple(given), ()):
            out = run_experts(cfg, world, recv)
            y = to_host(world, handle.combine(out, bias=bias))
            used = tuple(biases[: len(bias)]) if isinstance(bias, tuple) else (biases[0],)
            reference.assert_same(y, expected_y(cfg, world.rank, step, inputs, bias=used), "y")
            if step.num_tokens and len(used) == 1:
                reference.assert_same(y[5], biases[0][5], "y of a token without experts")
            recv = handle.dispatch(to_device(world, step.x))
        wrong: list[tuple[Any, str]] = [
            (to_device(world, np.zeros(cfg.hidden, dtype)), "bias has shape"),
            (to_device(world, np.zeros((step.num_tokens + 1, cfg.hidden), dtype)), "bias has shape"),
            (to_device(world, np.zeros((step.num_tokens, cfg.hidden), np.float64)), "bias has dtype float64"),
            ((given[0],) * 3, "bias: got a tuple of 3 arrays, allowed: at most 2"),
        ]
        for bias, match in wrong:
            with pytest.raises((cuep.ArgumentError, cuep.ArgumentTypeError), match=match):
                handle.combine(recv.tokens if combine_dtype == cfg.dtype else run_experts(cfg, world, recv), bias=bias)
            group.check()
            recv = handle.dispatch(to_device(world, step.x))
        run_step(world, group, step, handle)


@pytest.mark.parametrize("form", FORMS)
def test_half_precision(world: Any, form: str) -> None:
    """B05: fp16 rows of 60000 with weights of a half stay 60000: nothing between is fp16; 0.1 keeps its bits."""
    with cuep.Group(world, config(**FORMS[form], dtype="float16")) as group:
        for value in (60000.0, 0.1):
            step = ones_step(world, group.cfg, 4, value)
            step.topk_weights[...] = 0.5
            handle, recv = start(world, group, step)
            if form in WEIGHTED:  # both experts belong to rank 0 or to two ranks: halves of the same number
                y = to_host(world, handle.combine(recv.tokens))
                assert (y == np.float16(value)).all(), y
            else:
                y = to_host(world, handle.combine(recv.tokens))
                num_ranks = len(set(step.topk_idx[0] // group.num_local_experts))
                assert (y == np.float16(np.float32(np.float16(value)) * num_ranks)).all() or not np.isfinite(y).all()
            group.check()
            handle.close()
        run_step(world, group, random_step(world, group.cfg, 5, 7)).close()
        with pytest.raises(cuep.ArgumentTypeError, match="x has dtype float64, allowed: float16"):
            handle = group.create_handle(to_device(world, step.topk_idx))
            handle.dispatch(to_device(world, step.x.astype(np.float64)))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_special_values(world: Any, form: str, dtype: str) -> None:
    """B07, B08: infinity, NaN, large and subnormal numbers and -0 pass dispatch bit by bit, and sums are right."""
    with cuep.Group(world, config(**FORMS[form], dtype=dtype)) as group:
        step = random_step(world, group.cfg, 7, 5, masked=0.0)
        special = np.float32([np.inf, np.nan, 1e38, -0.0, 2.0**-133, 1e-30, 6e-8, -np.inf])
        with np.errstate(over="ignore"):
            step.x[:4, : len(special)] = np.stack([np.roll(special, i) for i in range(4)]).astype(step.x.dtype)
        run_step(world, group, step)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("hidden", [8, 24, 2880, 5120])
def test_hidden_sizes(world: Any, form: str, hidden: int) -> None:
    """B14: any row of a multiple of 16 bytes; others are refused with the rule."""
    with cuep.Group(world, config(**FORMS[form], num_experts=4, hidden=hidden)) as group:
        run_step(world, group, random_step(world, group.cfg, hidden, 4))
    for bad in (100, 127):
        with pytest.raises(
            cuep.ArgumentError, match=f"hidden={bad} is not allowed; allowed: a row of a multiple of 16"
        ):
            config(**FORMS[form], hidden=bad)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("expert_ids", ["local", "global"])
def test_what_the_layouts_are(world: Any, expert_ids: str) -> None:
    """C10: one token of rank 0 for both experts of rank 1: one row (flat, rank_major) or two (expert_major)."""
    ids = np.array([[2, 3]]) if world.rank == 0 else np.zeros((0, 2), np.int64)
    for form, settings in FORMS.items():
        with cuep.Group(world, config(**settings, num_experts=4, expert_ids=expert_ids)) as group:
            step = Step(ids, None, tagged_rows(world.rank, len(ids), group.cfg.hidden, 1, "bfloat16"))
            handle, recv = start(world, group, step)
            check_received(world, group.cfg, recv, expected(world, group.cfg, step)[1])
            rows = {"expert_major": 2}.get(str(group.cfg.layout), 1)
            assert int(to_host(world, recv.total)[0]) == (rows if world.rank == 1 else 0), form
            if recv.topk_idx is not None and world.rank == 1:
                first = to_host(world, recv.topk_idx).reshape(-1, 2)[0]
                assert first.tolist() == ([2, 3] if expert_ids == "global" else [0, 1]), form
            handle.combine(recv.tokens)
            group.check()


def test_rows_beyond_the_count_name_no_expert(world: Any) -> None:
    """B13: a small step after a large one into the same buffers: nothing of the large one looks valid."""
    for form in ("ll rank_major", "ht flat"):
        with cuep.Group(world, config(**FORMS[form])) as group:
            handle = None
            for num_tokens in (16, 2, 16, 0):
                step = random_step(world, group.cfg, num_tokens, num_tokens, masked=0.0)
                handle = run_step(world, group, step, handle)
                recv = handle.dispatch(to_device(world, step.x))
                ids = to_host(world, recv.topk_idx).reshape(-1, group.cfg.num_topk)
                is_row = np.zeros(len(ids), bool)
                is_row[expected(world, group.cfg, step)[1].row_idx] = True
                assert (ids[~is_row] == -1).all()
                handle.combine(recv.tokens)
                group.check()


@pytest.mark.parametrize("form", FORMS)
def test_rows_of_any_stride(world: Any, form: str) -> None:
    """x, expert_out and out may be columns of something wider; rows that overlap or are torn are refused."""
    with cuep.Group(world, config(**FORMS[form])) as group:
        cfg = group.cfg
        step = random_step(world, cfg, 12, 9)
        inputs, want = expected(world, cfg, step)
        handle, _ = start(world, group, step)
        wide = to_device(world, np.concatenate([step.x, step.x], 1))
        recv = handle.dispatch(wide[:, : cfg.hidden])
        check_received(world, cfg, recv, want)
        answers = to_host(world, run_experts(cfg, world, recv))
        strided = to_device(world, np.concatenate([answers, answers[..., :8]], -1))[..., : cfg.hidden]
        into = to_device(world, np.zeros((step.num_tokens, cfg.hidden + 64), step.x.dtype))
        y = handle.combine(strided, out=into[:, 8 : cfg.hidden + 8])
        reference.assert_same(to_host(world, y), expected_y(cfg, world.rank, step, inputs), "y")
        beside = to_host(world, into)
        assert not beside[:, :8].any() and not beside[:, cfg.hidden + 8 :].any(), "columns beside out were written"
        group.check()
        bad: list[Callable[[], Any]] = [
            lambda: to_device(world, step.x.repeat(2, 1))[:, ::2],
            lambda: wide[:, 1 : cfg.hidden + 1],
        ]
        for make in bad:
            with pytest.raises(cuep.ArgumentError, match="x: "):
                handle.dispatch(make())
            group.check()
        run_step(world, group, step, handle)


@pytest.mark.parametrize("form", FORMS)
def test_gradients_of_weights_come_home(world: Any, form: str) -> None:
    """row_weight_grads: what each rank says of a received (row, k) arrives at [token, k] of the token's owner."""
    with cuep.Group(world, config(**FORMS[form])) as group:
        cfg = group.cfg
        step = random_step(world, cfg, 13, 9)
        inputs, _ = expected(world, cfg, step)
        handle, recv = start(world, group, step)
        # a number that says where it comes from: 10000 * source rank + 100 * token + k
        if cfg.layout == "expert_major":
            source = to_host(world, recv.source).reshape(-1, 3).astype(np.int64)
            grads = source @ np.array([10000, 100, 1])
            grads = grads.reshape(recv.source.shape[:-1])
        else:
            source = to_host(world, recv.source).astype(np.int64)
            grads = (source @ np.array([10000, 100]))[..., None] + np.arange(cfg.num_topk)
        given = to_device(world, grads.astype(np.float32))
        y, home = handle.combine(run_experts(cfg, world, recv), row_weight_grads=given)
        reference.assert_same(to_host(world, y), expected_y(cfg, world.rank, step, inputs), "y")
        own = 10000 * world.rank + 100 * np.arange(step.num_tokens)[:, None] + np.arange(cfg.num_topk)
        reference.assert_same(to_host(world, home), np.where(step.topk_idx >= 0, own, 0).astype(np.float32), "grads")
        group.check()
        if world.size > 1:
            recv = handle.dispatch(to_device(world, step.x))
            with pytest.raises(cuep.ArgumentError, match="row_weight_grads was given on some ranks and not on others"):
                handle.combine(recv.tokens, row_weight_grads=given if world.rank == 0 else None)
                group.check()
        run_step(world, group, step, handle)


@pytest.mark.parametrize("form", FORMS)
def test_tokens_that_only_the_device_counts(world: Any, form: str) -> None:
    """num_tokens on the device, of either width, or a number of the host's; out of range it is refused everywhere."""
    with cuep.Group(world, config(**FORMS[form])) as group:
        cfg = group.cfg
        full = random_step(world, cfg, 14, 12)
        handle = None
        for number, dtype in enumerate([np.int32, np.int64, None]):
            count = (5 * number + 3 * world.rank) % 13
            step = Step(full.topk_idx[:count], full.topk_weights[:count], full.x[:count])
            inputs, want = expected(world, cfg, step)
            arrays = (to_device(world, full.topk_idx), to_device(world, full.topk_weights))
            num_tokens = count if dtype is None else to_device(world, np.array([count], dtype))
            if handle is None:
                handle = group.create_handle(*arrays, num_tokens=num_tokens)
            else:
                handle.update(*arrays, num_tokens=num_tokens)
            for _ in range(2):  # the second has the handle's own count
                recv = handle.dispatch(to_device(world, full.x))
                check_received(world, cfg, recv, want)
                y = to_host(world, handle.combine(run_experts(cfg, world, recv)))
                assert len(y) == 12
                reference.assert_same(y[:count], expected_y(cfg, world.rank, step, inputs), "y")
            group.check()
        for bad in (-1, 13, 2**33 + 1):
            on_device = to_device(world, np.array(bad if world.rank == 0 else 3, np.int64).reshape(1))
            error = cuep.ArgumentError if world.rank == 0 else cuep.PeerRefused
            with pytest.raises(error, match="num_tokens on the device|rank 0 refused"):
                handle.update(*arrays, num_tokens=on_device)
                handle.dispatch(to_device(world, full.x))
                group.check()
        handle.update(*arrays)
        run_step(world, group, full, handle)
        for bad_host in (-1, 13):
            with pytest.raises(cuep.ArgumentError, match=rf"num_tokens={bad_host} is not allowed; allowed: 0 to 12"):
                group.create_handle(*arrays, num_tokens=bad_host)
            group.check()


@pytest.mark.parametrize("form", FORMS)
def test_rows_into_the_callers_array(world: Any, form: str) -> None:
    """dispatch(out=): rows lie there as they would in the handle's own; what does not fit is refused."""
    with cuep.Group(world, config(**FORMS[form])) as group:
        cfg = group.cfg
        step = random_step(world, cfg, 15, 9)
        _, want = expected(world, cfg, step)
        shape = layout.combine_shape(cfg, world.size)
        handle = group.create_handle(to_device(world, step.topk_idx), to_device(world, step.topk_weights))
        out = to_device(world, np.full(shape, np.nan, step.x.dtype))
        recv = handle.dispatch(to_device(world, step.x), out=out)
        assert recv.tokens is out
        check_received(world, cfg, recv, want)
        handle.combine(run_experts(cfg, world, recv))
        group.check()
        with pytest.raises(cuep.ArgumentTypeError, match="out has dtype float64"):
            handle.dispatch(to_device(world, step.x), out=to_device(world, np.zeros(shape, np.float64)))
        group.check()
        with pytest.raises(cuep.ArgumentError, match="out has shape"):
            handle.dispatch(to_device(world, step.x), out=to_device(world, np.zeros((3, 5, 8), step.x.dtype)))
        group.check()
        if cfg.mode == "ht":  # exactly as many rows as come, then one less
            handle.update(to_device(world, step.topk_idx), to_device(world, step.topk_weights))
            rows = handle.num_recv_tokens()
            exact = to_device(world, np.full((rows, cfg.hidden), np.nan, step.x.dtype))
            check_received(world, cfg, handle.dispatch(to_device(world, step.x), out=exact), want)
            with pytest.raises((cuep.ArgumentError, cuep.PeerRefused), match="out has fewer rows|refused its call"):
                handle.dispatch(to_device(world, step.x), out=exact[: rows - 1] if world.rank == 0 and rows else exact)
                group.check()
        run_step(world, group, step, handle)


def test_error_bound_of_per_rank_sums(world: Any) -> None:
    """reduce="per_rank" stays within the derived bound of the exact sum, and uses a good part of it."""
    worst = 0.0
    for mode, name in (("ll", "expert_major"), ("ht", "expert_major")):
        cfg = config(mode, layout=name, reduce="per_rank", num_topk=8, num_experts=16, hidden=512)
        with cuep.Group(world, cfg) as group:
            step = random_step(world, cfg, 16, 16)
            step.x = np.random.default_rng(world.rank).standard_normal(step.x.shape).astype(step.x.dtype)
            handle, recv = start(world, group, step)
            y = to_host(world, handle.combine(recv.tokens)).astype(np.float64)  # experts do nothing
            group.check()
        weights = np.where(step.topk_idx >= 0, step.topk_weights, 0).astype(np.float64).sum(1)[:, None]
        exact = weights * step.x.astype(np.float64)
        bound = reference.per_rank_bound(np.abs(exact), 8, world.size, step.x.dtype)
        error = np.abs(y - exact)
        assert (error <= bound).all()
        worst = max(worst, float((error / bound).max()))
    assert worst > 0.2, f"the bound is loose: {worst}"


def test_sizes_beyond_every_limit() -> None:
    """B16: a calculation without a device says what is too large, and the most tokens that fit."""
    cfg = cuep.GroupConfig(mode="ll", num_experts=448, hidden=5120, num_topk=8, max_tokens_per_rank=2048)
    assert cuep.footprint(cfg, 16)["handle"] > 2**33
    with pytest.raises(cuep.ArgumentError, match=r"at most \d+ tokens") as caught:
        large = cuep.GroupConfig(mode="ll", num_experts=448, hidden=5120, num_topk=8, max_tokens_per_rank=2**23)
        cuep.footprint(large, 16)
    most = int(str(caught.value).split("at most ")[1].split()[0])
    for tokens, fits in ((most, True), (most + 1, False)):
        cfg = cuep.GroupConfig(mode="ll", num_experts=448, hidden=5120, num_topk=8, max_tokens_per_rank=tokens)
        try:
            cuep.footprint(cfg, 16)
            assert fits
        except cuep.ArgumentError:
            assert not fits


def test_arena_of_a_low_latency_group() -> None:
    """P01: 256 experts, 8 ranks, 128 tokens, 7168, bf16: at most 62 MiB of symmetric memory."""
    for form in ({}, {"reduce": "per_rank"}, {"layout": "rank_major"}):
        cfg = cuep.GroupConfig(mode="ll", num_experts=256, hidden=7168, num_topk=8, max_tokens_per_rank=128, **form)
        assert cuep.footprint(cfg, 8)["symmetric"] <= 62 * 2**20


@pytest.mark.parametrize("mode", ["ll", "ht"])
def test_capacity_costs_no_compile_and_calls_wait_for_nothing(world: Any, mode: str) -> None:
    """P03: on a queue of its own a call returns before its kernel has run; the host waits at check() only."""
    if world.size == 1:
        pytest.skip("one rank waits for nobody")
    with cuep.Group(world, config(mode)) as group:
        step = random_step(world, group.cfg, 3, 8)
        handle = run_step(world, group, step)
        compiled = jit.stats.compiled
        stream = world.stream()
        x = to_device(world, step.x)
        world.comm.barrier()
        if world.rank == 0:  # no peer has begun, so nothing of this can be over
            recv = handle.dispatch(x, stream=stream)
            handle.combine(recv.tokens, stream=stream)
        world.comm.barrier()
        if world.rank != 0:
            recv = handle.dispatch(x, stream=stream)
            handle.combine(recv.tokens, stream=stream)
        group.check()
        assert jit.stats.compiled == compiled


@pytest.mark.parametrize("form", FORMS)
def test_arrays_that_overlap(world: Any, form: str) -> None:
    """What an operation reads must not lie in what it writes: refused by name; columns of one wider array do not."""
    with cuep.Group(world, config(**FORMS[form])) as group:
        cfg = group.cfg
        step = random_step(world, cfg, 17, 8)
        inputs, _ = expected(world, cfg, step)
        handle, recv = start(world, group, step)
        wide = to_device(world, np.zeros((9, 2 * cfg.hidden), step.x.dtype))
        left, right = wide[:8, : cfg.hidden], wide[:8, cfg.hidden :]
        y = handle.combine(run_experts(cfg, world, recv), bias=right, out=left)  # of the same rows, side by side
        reference.assert_same(
            to_host(world, y), expected_y(cfg, world.rank, step, inputs, bias=(np.zeros_like(step.x),)), "y"
        )
        group.check()
        for bias in (wide[1:9, : cfg.hidden], wide[:8, 8 : cfg.hidden + 8]):
            recv = handle.dispatch(to_device(world, step.x))
            with pytest.raises(cuep.ArgumentError, match="bias lies in out, which combine writes"):
                handle.combine(recv.tokens, bias=bias, out=left)
            group.check()
        recv = handle.dispatch(to_device(world, step.x))
        own = handle.combine(run_experts(cfg, world, recv))
        recv = handle.dispatch(to_device(world, step.x))
        handle.combine(run_experts(cfg, world, recv), bias=own)  # row by row over itself
        handle.update(to_device(world, step.topk_idx[:7]), to_device(world, step.topk_weights[:7]))
        recv = handle.dispatch(to_device(world, step.x[:7]))
        with pytest.raises(cuep.ArgumentError, match="bias lies in this handle's own y"):
            handle.combine(recv.tokens, bias=own[1:8])
        group.check()


def test_weights_on_some_ranks_only(world: Any) -> None:
    """combine(topk_weights=None) on one rank changes what others get with "per_rank": refused on all."""
    if world.size == 1:
        pytest.skip("one rank agrees with itself")
    for form in ("ll per_rank", "ht expert_major"):
        with cuep.Group(world, config(**FORMS[form])) as group:
            step = random_step(world, group.cfg, 18, 8)
            handle, recv = start(world, group, step)
            with pytest.raises(cuep.ArgumentError, match="topk_weights=None was given on some ranks and not on others"):
                handle.combine(recv.tokens, topk_weights=None if world.rank == 0 else "handle")
                group.check()
            run_step(world, group, step, handle)


@pytest.mark.ranks(2, 4)
def test_ranks_that_dispatch_different_handles(world: Any) -> None:
    """ll: create_handle is refused on one rank while another handle is yet to be dispatched: an error, no mix."""
    with cuep.Group(world, config("ll", timeout_s=2)) as group:
        stream = world.stream()
        step = random_step(world, group.cfg, 19, 5)
        ids, x = to_device(world, step.topk_idx), to_device(world, step.x)
        first = group.create_handle(ids, stream=stream)
        if world.rank == 0:
            with pytest.raises(cuep.ArgumentTypeError):
                group.create_handle(to_device(world, step.topk_idx.astype(np.int16)), stream=stream)
        second = group.create_handle(ids, stream=stream)
        first.dispatch(x, stream=stream)
        if world.rank != 0:
            second.dispatch(x, stream=stream)
        with pytest.raises(
            cuep.OrderError if world.rank == 0 else cuep.CuepError, match="dispatch handles of different|refused"
        ):
            group.check()
        with contextlib.suppress(cuep.CuepError):
            group.check()


def test_settings_can_be_sent(world: Any) -> None:
    """A GroupConfig goes through pickle, and so through comm.bcast."""
    cfg = config("ht", variants={"dispatch": "bulk"})
    assert world.comm.bcast(cfg, root=0) == cfg and copy.deepcopy(cfg).variants == {"dispatch": "bulk"}
