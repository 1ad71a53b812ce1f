"""One step of an MoE layer on every rank, checked against the oracle: `from moe import Step, run_step`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from harness import to_device, to_host

import cuep
from cuep import layout, reference
from cuep.bench.workload import scale


def config(mode: str, **changes: Any) -> cuep.GroupConfig:
    """The small default shape: 8 experts, hidden 256, top-2, at most 20 tokens, waits of at most 20 s."""
    settings: dict[str, Any] = {
        "mode": mode,
        "num_experts": 8,
        "hidden": 256,
        "num_topk": 2,
        "max_tokens_per_rank": 20,
        "timeout_s": 20,
    }
    return cuep.GroupConfig(**(settings | changes))


@dataclass
class Step:
    """This rank's inputs of one step, as NumPy arrays."""

    topk_idx: np.ndarray
    topk_weights: np.ndarray | None
    x: np.ndarray

    @property
    def num_tokens(self) -> int:
        return len(self.x)


def tagged_rows(rank: int, num_tokens: int, hidden: int, round_number: int, dtype: str) -> np.ndarray:
    """Rows that say where they come from: rank, token, round and a checksum, all exact in bfloat16; noise between."""
    x = np.random.default_rng([rank, round_number]).standard_normal((num_tokens, hidden)).astype(np.float32)
    token = np.arange(num_tokens)
    for column, value in enumerate((rank, token // 128, token % 128, round_number % 128)):
        x[:, column] = value
    x[:, -1] = (rank + token + round_number) % 251
    return x.astype(layout.dtype_of(dtype))


def random_step(world: Any, cfg: cuep.GroupConfig, seed: int, num_tokens: int, masked: float = 0.2) -> Step:
    """Distinct experts per token, some masked, masked weights NaN."""
    rng = np.random.default_rng([seed, world.rank])
    scores = rng.random((num_tokens, cfg.num_experts))
    if cfg.num_topk <= cfg.num_experts:
        ids = np.argsort(-scores, 1)[:, : cfg.num_topk].astype(np.int64)
    else:
        ids = rng.integers(0, cfg.num_experts, (num_tokens, cfg.num_topk))
    is_masked = rng.random(ids.shape) < masked
    weights = rng.random(ids.shape, np.float32)
    ids[is_masked] = -1
    weights[is_masked] = np.nan
    return Step(ids, weights, tagged_rows(world.rank, num_tokens, cfg.hidden, seed, cfg.dtype))


def poison(world: Any, handle: cuep.Handle, recv: cuep.Received) -> None:
    """Fill what the next dispatch and combine write with NaN and stale ids, so that what they leave out shows.

    ht's topk_idx is left alone: that rows beyond the count stay -1 is cuep's own promise.
    """
    recv.tokens[...] = float("nan")
    recv.source[...] = 777
    handle.arrays["y"][...] = float("nan")
    world.backend.synchronize()


def expert_factor(cfg: cuep.GroupConfig, rank: int, num_ranks: int, recv: Any = None) -> np.ndarray:
    """What a rank's experts multiply their rows by: a power of two per expert (expert_major) or per rank."""
    if cfg.layout != "expert_major":
        return np.float32(scale(rank))
    local = cfg.num_experts // num_ranks
    factors = scale(rank * local + np.arange(local))
    if cfg.mode == "ll":
        return factors[:, None, None]
    offsets, rows = recv
    expert = np.clip(np.searchsorted(offsets, np.arange(rows), side="right") - 1, 0, local - 1)
    return factors[expert][:, None]


def run_experts(cfg: cuep.GroupConfig, world: Any, recv: Any, stream: Any = None) -> Any:
    """The experts' outputs for all rows, valid or not."""
    tokens = to_host(world, recv.tokens, stream)
    offsets = None if recv.expert_offsets is None else to_host(world, recv.expert_offsets, stream)
    factor = expert_factor(cfg, world.rank, world.size, (offsets, len(tokens)))
    with np.errstate(invalid="ignore", over="ignore"):
        out = (tokens.astype(np.float32) * factor).astype(layout.dtype_of(cfg.combine_dtype))
    return to_device(world, out)


def expected(world: Any, cfg: cuep.GroupConfig, step: Step) -> tuple[reference.Inputs, reference.Dispatched]:
    inputs = reference.gather_inputs(world.comm, cfg.num_experts, step.x, step.topk_idx, step.topk_weights)
    return inputs, reference.dispatch(inputs, world.rank, cfg)


def expected_y(
    cfg: cuep.GroupConfig,
    rank: int,
    step: Step,
    inputs: reference.Inputs,
    weights: np.ndarray | None = None,
    bias: tuple[np.ndarray, ...] = (),
) -> np.ndarray:
    """What combine returns for run_experts' outputs."""
    ids = inputs.topk_idx[rank]

    def answer(owner: int) -> np.ndarray:
        factor = scale(ids[:, owner])[:, None] if cfg.layout == "expert_major" else np.float32(scale(owner))
        with np.errstate(invalid="ignore", over="ignore"):
            return (step.x.astype(np.float32) * factor).astype(layout.dtype_of(cfg.combine_dtype))

    return reference.combine(inputs, rank, cfg, answer, weights=weights, bias=bias)


def check_received(world: Any, cfg: cuep.GroupConfig, recv: cuep.Received, want: reference.Dispatched) -> None:
    for name in ("expert_counts", "expert_offsets", "src_rank_counts"):
        have, value = getattr(recv, name), getattr(want, name)
        assert (have is None) == (value is None), name
        if value is not None:
            reference.assert_same(to_host(world, have), value, name)
    assert int(to_host(world, recv.total)[0]) == want.total
    for name in ("source", "tokens", "topk_idx", "topk_weights"):
        have, value = getattr(recv, name), getattr(want, name)
        assert (have is None) == (value is None), name
        if value is not None:
            rows = to_host(world, have)
            rows = rows if rows.ndim == 1 else rows.reshape(-1, have.shape[-1])
            reference.assert_same(rows[want.row_idx], value, name)
    if recv.topk_idx is not None and cfg.mode == "ht":  # nobody may take a row beyond the count for a row
        assert (to_host(world, recv.topk_idx)[len(want.row_idx) :] == -1).all(), "topk_idx beyond the count"


def check_combined(world: Any, cfg: cuep.GroupConfig, step: Step, inputs: reference.Inputs, y: Any) -> None:
    reference.assert_same(to_host(world, y), expected_y(cfg, world.rank, step, inputs), "y")


def run_step(
    world: Any, group: cuep.Group, step: Step, handle: cuep.Handle | None = None, ids_dtype: str = "int64"
) -> cuep.Handle:
    """create_handle or update, dispatch, experts, combine, check(); all compared with the oracle."""
    cfg = group.cfg
    ids = to_device(world, step.topk_idx.astype(ids_dtype))
    weights = None if step.topk_weights is None else to_device(world, step.topk_weights)
    if handle is None:
        handle = group.create_handle(ids, weights)
    else:
        handle.update(ids, weights)
    recv = handle.dispatch(to_device(world, step.x))
    inputs, want = expected(world, cfg, step)
    check_received(world, cfg, recv, want)
    has_zones = cfg.mode == "ht" and want.expert_offsets is not None
    assert handle.num_recv_tokens() == (want.expert_offsets[-1] if has_zones else want.total)
    assert (handle.host_counts() == want.expert_counts).all()
    y = handle.combine(run_experts(cfg, world, recv))
    group.check()
    check_combined(world, cfg, step, inputs, y)
    return handle
