"""The protocols under shuffled schedules, across the wrap of 32-bit epochs; and that a broken protocol is found.

CPU backend only: its scheduler shuffles threads and injects delays from a seed. CUEP_TEST_SEEDS sets how many seeds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from harness import planted_bug
from moe import check_combined, check_received, config, expected, random_step, run_experts, tagged_rows

import cuep
from cuep import env, reference

NUM_SEEDS = int(os.environ.get("CUEP_TEST_SEEDS", "50"))
SEEDS_PER_TEST = 10  # so that a hang names its tenth
ALMOST_WRAPPED = 2**32 - 3
DIRECT: dict[str, Any] = {"ll": {"variants": {"dispatch": "direct", "combine": "direct"}}, "ht": {}}
LINES: dict[str, Any] = {"variants": {"dispatch": "line", "combine": "line"}}


@pytest.fixture
def shuffled(world: Any) -> Iterator[Any]:
    """Sets the seed of the scheduler; back to what CUEP_SEED says afterwards."""
    if world.backend.name != "cpu":
        pytest.skip("only the CPU backend has a scheduler to shuffle")
    yield world.backend.set_seed
    world.backend.set_seed(env.seed(), env.delay_level())


def random_walk(world: Any, group: cuep.Group, seed: int) -> None:
    """Steps of two handles, interleaved, with dispatches that are not combined; all compared with the oracle."""
    cfg = group.cfg
    rng = np.random.default_rng(seed)  # the same on every rank
    handles: list[Any] = [None, None]
    for number in range(6):
        which = int(rng.integers(2))
        counts = rng.integers(0, cfg.max_tokens_per_rank + 1, world.size)
        step = random_step(world, cfg, 100 * seed + number, int(counts[world.rank]))
        if handles[which] is None:
            handles[which] = group.create_handle(step.topk_idx, step.topk_weights)
        else:
            handles[which].update(step.topk_idx, step.topk_weights)
        recv = handles[which].dispatch(step.x)
        if rng.random() < 0.3:  # a kept routing: send something else along it
            step.x = tagged_rows(world.rank, step.num_tokens, cfg.hidden, 50 + number, cfg.dtype)
            recv = handles[which].dispatch(step.x)
        inputs, want = expected(world, cfg, step)
        check_received(world, cfg, recv, want)
        if rng.random() < 0.8:
            y = handles[which].combine(run_experts(cfg, world, recv))
            check_combined(world, cfg, step, inputs, y)
    group.check()


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("first_seed", range(1, NUM_SEEDS + 1, SEEDS_PER_TEST))
@pytest.mark.parametrize(
    "mode,settings",
    [("ll", {}), ("ll", {"num_buffers": 1}), ("ll", LINES), ("ll", LINES | {"num_buffers": 1}), ("ht", {})],
)
def test_shuffled_schedules(
    world: Any, shuffled: Any, monkeypatch: Any, mode: str, settings: dict[str, Any], first_seed: int
) -> None:
    monkeypatch.setenv("CUEP_START_EPOCH", str(ALMOST_WRAPPED))
    for seed in range(first_seed, min(first_seed + SEEDS_PER_TEST, NUM_SEEDS + 1)):
        shuffled(seed, seed % 4)
        with cuep.Group(world, config(mode, max_tokens_per_rank=6, **(DIRECT[mode] | settings))) as group:
            random_walk(world, group, seed)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("mode", ["ll", "ht"])
def test_streams(world: Any, shuffled: Any, mode: str) -> None:
    """Two steps queued on a stream, and one that goes on on another: the group keeps its operations in order."""
    with cuep.Group(world, config(mode)) as group:
        for seed in range(1, 11):
            shuffled(seed, 2)
            streams = [world.stream(), world.stream()]
            steps = [random_step(world, group.cfg, 10 * seed + i, 3 + i) for i in range(2)]
            handles, received, ys = [], [], []
            for step, stream in zip(steps, streams, strict=True):
                handles.append(group.create_handle(step.topk_idx, step.topk_weights, stream=stream))
                received.append(handles[-1].dispatch(step.x, stream=stream))
            for handle, recv, stream in zip(handles, received, streams, strict=True):
                stream.synchronize()
                ys.append(handle.combine(run_experts(group.cfg, world, recv, stream), stream=streams[0]))
            group.check()
            for step, recv, y in zip(steps, received, ys, strict=True):
                inputs, want = expected(world, group.cfg, step)
                check_received(world, group.cfg, recv, want)
                check_combined(world, group.cfg, step, inputs, y)
            for handle in handles:
                handle.close()


# (name, file, what it says, what the bug says, mode, settings)
PLANTED = [
    (
        "ll dispatch takes rows without waiting for their flags",
        "ll_dispatch_direct.cu",
        "is_ok = wait_flag<kHasStats>(op, flag_of(p, p.rank, bank, src, slot), Phase::kRows, src, s.token[0]);",
        "s.token[0] = static_cast<uint32_t>(ld_acquire_sys(flag_of(p, p.rank, bank, src, slot)));",
        "ll",
        {},
    ),
    (
        "ll combine sums without waiting for flags",
        "include/cuep/ll_combine.cuh",
        "is_ok = wait_flag<kHasStats>(op, flag_of(p, p.rank, bank, tid, t), Phase::kRows, tid, unused);",
        "unused = 0;",
        "ll",
        {},
    ),
    (
        "a flag of the epoch before last is taken",
        "include/cuep/operation.cuh",
        "if (epoch_of(seen) == static_cast<uint32_t>(op.epoch)) {",
        "if (static_cast<uint32_t>(op.epoch) - epoch_of(seen) <="
        " (kIsAcquire && op.control->ops[1].num_epochs > 1 ? 2u : 0u)) {",
        "ll",
        {},
    ),
    (
        "ll dispatch does not switch banks",
        "include/cuep/ll_dispatch.cuh",
        "const int bank = bank_of(p, op);",
        "const int bank = 0;",
        "ll",
        {},
    ),
    (
        "ll does not wait for done words",
        "include/cuep/ll.cuh",
        "is_ok = wait_bank_free(op, done_of(p, p.rank, bank, tid), p.num_banks, tid);",
        "",
        "ll",
        {"num_buffers": 1},
    ),
    (
        "ll dispatch keeps the flags of a block's last tokens",
        "ll_dispatch_direct.cu",
        "if (num_sent < kFlagBatch && !is_last) return;",
        "if (num_sent < kFlagBatch) return;",
        "ll",
        {},
    ),
    (
        "ll dispatch counts the tokens before its own twice",
        "include/cuep/ll_dispatch.cuh",
        "if (tid == 0) counted.num_tokens = t;",
        "",
        "ll",
        {},
    ),
    (
        "ll does not say that a bank was read",
        "include/cuep/ll.cuh",
        "if (is_own_free && is_clerk()) publish_last_read(p, op, bank);",
        "",
        "ll",
        {"num_buffers": 1},
    ),
    (
        "ht dispatch ends before its peers' rows are there",
        "include/cuep/ht_receive.cuh",
        "is_ok = wait_flag(op, arrived_of(p, p.rank, tid), Phase::kRows, tid, unused);",
        "unused = 0;",
        "ht",
        {"num_buffers": 4},
    ),
    (
        "ht dispatch stores before the receiver is ready",
        "include/cuep/ht_receive.cuh",
        "is_ok = wait_flag(op, ready_of<kNumRanks>(p, op, p.rank, tid), Phase::kReuse, tid, buffers[tid]);",
        "buffers[tid] = static_cast<uint32_t>(p.buffer);",
        "ht",
        {"num_buffers": 4},
    ),
    (
        "ht dispatch says that rows arrived before they are sent",
        "ht_dispatch_bulk.cu",
        "bool is_ok = true;\n    if (refused_by < 0) {\n",
        "bool is_ok = true;\n    release_arrived<kNumRanks>(p, op);\n    if (refused_by < 0) {\n",
        "ht",
        {"num_buffers": 4},
    ),
    (
        "ht dispatch says that rows arrived when they are only read",
        "include/cuep/row_pipe.cuh",
        "bulk_wait<0>();\n        if constexpr",
        "bulk_wait_read<0>();\n        if constexpr",
        "ht",
        {"num_buffers": 4},
    ),
    (
        "ht combine sums without waiting for flags",
        "include/cuep/ht_home.cuh",
        "is_ok = wait_flag(op, flag_of(p, p.rank, lane, slot), Phase::kRows, lane, unused);",
        "unused = 0;",
        "ht",
        {"num_buffers": 4},
    ),
    (
        "ht combine does not wait for done words",
        "include/cuep/ht_home.cuh",
        "if (tid < kRanks && tid != p.rank) is_ok = wait_bank_free(op, done_of(p, p.rank, tid), 1, tid);",
        "",
        "ht",
        {"num_buffers": 4},
    ),
]
SEEDS_TO_FIND = 50


class Rounds:
    """One routing and four rounds of rows; knows every rank's part, so that checking needs no other rank."""

    def __init__(self, world: Any, cfg: cuep.GroupConfig, seed: int) -> None:
        self.world, self.cfg = world, cfg
        self.step = random_step(world, cfg, seed, cfg.max_tokens_per_rank, masked=0.0)
        self.routing = world.comm.allgather((self.step.topk_idx, self.step.topk_weights))

    def rows(self, number: int, rank: int) -> np.ndarray:
        return tagged_rows(rank, self.cfg.max_tokens_per_rank, self.cfg.hidden, number, self.cfg.dtype)

    def problem(self, number: int, tokens: np.ndarray, source: np.ndarray, y: np.ndarray | None) -> str | None:
        """What is wrong in a round whose experts are the identity, or None."""
        cfg, rank = self.cfg, self.world.rank
        xs = [self.rows(number, other) for other in range(self.world.size)]
        inputs = reference.make_inputs(cfg.num_experts, xs, *map(list, zip(*self.routing, strict=True)))
        if cfg.mode == "ll":
            want = reference.dispatch_expert_major(inputs, rank, cfg.max_tokens_per_rank)
            total = reference.weighted_sum(
                inputs.topk_idx[rank], reference.weights_or_ones(inputs, rank), lambda k: xs[rank], xs[rank].dtype
            )
        else:
            want = reference.dispatch_flat(inputs, rank)
            total = reference.rank_sum(inputs.owner(rank), self.world.size, lambda _: xs[rank], xs[rank].dtype)
        return (
            reference.first_difference(tokens.reshape(-1, cfg.hidden)[want.row_idx], want.tokens)
            or reference.first_difference(source.reshape(-1, source.shape[-1])[want.row_idx], want.source)
            or (None if y is None else reference.first_difference(y, total))
        )


def queued(group: cuep.Group, rounds: Rounds) -> str | None:
    """Four handles, all dispatches and then all combines queued at once, so that fast ranks run into slow ones."""
    stream = rounds.world.stream()
    step, xs = rounds.step, [rounds.rows(number, rounds.world.rank) for number in range(4)]
    handles = [group.create_handle(step.topk_idx, step.topk_weights, stream=stream) for _ in range(4)]
    received = [handle.dispatch(x, stream=stream) for handle, x in zip(handles, xs, strict=True)]
    ys = [handle.combine(recv.tokens, stream=stream) for handle, recv in zip(handles, received, strict=True)]
    group.check()
    problems = [rounds.problem(i, r.tokens, r.source, y) for i, (r, y) in enumerate(zip(received, ys, strict=True))]
    for handle in handles:
        handle.close()
    return next((problem for problem in problems if problem), None)


def kept(group: cuep.Group, rounds: Rounds) -> str | None:
    """One handle dispatched again and again, by ranks that come late or read late."""
    rng = np.random.default_rng([rounds.world.rank, int(rounds.step.topk_idx.sum())])
    handle = group.create_handle(rounds.step.topk_idx, rounds.step.topk_weights)
    copies = []
    for number in range(4):
        time.sleep(rng.choice([0, 0.004]))
        recv = handle.dispatch(rounds.rows(number, rounds.world.rank))
        time.sleep(rng.choice([0, 0.004]))
        copies.append((recv.tokens.copy(), recv.source.copy()))
    group.check()
    problems = [rounds.problem(i, tokens, source, None) for i, (tokens, source) in enumerate(copies)]
    handle.close()
    return next((problem for problem in problems if problem), None)


def first_failing_seed(world: Any, shuffled: Any, mode: str, settings: dict[str, Any]) -> tuple[int, str] | None:
    """The first seed under which a rank sees wrong data or an error; the same answer on every rank."""
    for seed in range(1, SEEDS_TO_FIND + 1):
        shuffled(seed, 3)
        group = cuep.Group(world, config(mode, timeout_s=1.0, max_tokens_per_rank=10, **(DIRECT[mode] | settings)))
        rounds = Rounds(world, group.cfg, seed)
        for pattern in (queued, kept):
            try:
                problem = pattern(group, rounds)
            except cuep.CuepError as error:
                problem = str(error)
            found = [text for text in world.comm.allgather(problem) if text is not None]
            if found:
                group.abandon()
                return seed, found[0]
        group.close()
    return None


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mode,settings", [("ll", {}), ("ll", {"num_buffers": 1}), ("ht", {"num_buffers": 4})])
def test_the_loop_that_finds_bugs_finds_none_in_cuep(world: Any, shuffled: Any, mode: str, settings: Any) -> None:
    assert first_failing_seed(world, shuffled, mode, settings) is None


@pytest.mark.ranks(2)
@pytest.mark.parametrize("bug", PLANTED, ids=[bug[0] for bug in PLANTED])
def test_a_planted_bug_is_found(world: Any, shuffled: Any, monkeypatch: Any, bug: Any) -> None:
    """A copy of the kernels with one rule of the protocol taken out must fail within SEEDS_TO_FIND seeds."""
    _, file, right, wrong, mode, settings = bug
    with planted_bug(world, monkeypatch, file, right, wrong):
        assert first_failing_seed(world, shuffled, mode, settings) is not None, "the bug was not found"
