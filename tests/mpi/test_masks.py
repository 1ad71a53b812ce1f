"""Masks of ranks that are all alive: who is left out, what is told, what is counted. Ranks that die: test_mask.py."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from harness import to_device, to_host, verdict_comm
from moe import config

import cuep

TIMEOUT_S = 2.0


def mask_config(world: Any, **changes: Any) -> cuep.GroupConfig:
    settings = {"mask": True, "timeout_s": TIMEOUT_S, "num_experts": 4 * world.size, "hidden": 128}
    return config("ll", **(settings | changes))


class OneEach:
    """Every rank's token goes to an expert of each rank with weight 1; experts return what they get: y is as many times
    x as ranks take part."""

    def __init__(self, world: Any, group: cuep.Group) -> None:
        self._world, self._group = world, group
        self.ids = to_device(world, np.arange(world.size, dtype=np.int32)[None] * 4)
        self.x = to_device(world, np.full((1, group.cfg.hidden), 1 + world.rank, ml_dtypes.bfloat16))
        self.handle = group.create_handle(self.ids)

    def run(self, num_active: int) -> None:
        self.handle.update(self.ids)
        y = self.handle.combine(self.handle.dispatch(self.x).tokens)
        self._group.check()
        assert (to_host(self._world, y).astype(np.float32) == num_active * (1 + self._world.rank)).all()


@pytest.mark.ranks(4)
def test_a_rank_with_a_mask_of_its_own_breaks_no_other(world: Any) -> None:
    """The others have left it out; then it leaves them out; they go on; then all are taken in again."""
    group = cuep.Group(world, mask_config(world, num_topk=world.size))
    step, last = OneEach(world, group), world.size - 1
    step.run(world.size)
    verdict_comm().Barrier()
    others = [int(rank != last) for rank in range(world.size)]
    if world.rank != last:
        group.update_mask(others)
        step.run(last)
    verdict_comm().Barrier()
    if world.rank == last:
        group.update_mask([1 - active for active in others])
        step.run(1)
    verdict_comm().Barrier()
    if world.rank != last:
        step.run(last)
    verdict_comm().Barrier()
    group.clear_mask()
    assert group.query_mask().tolist() == [1] * world.size
    step.run(world.size)
    assert group.num_dropped() == (2 if world.rank != last else last)
    group.close()


@pytest.mark.ranks(4)
def test_a_rank_that_gave_up_calls_again(world: Any) -> None:
    """The last rank is late. Rank 1 gives up, works alone for a while, and calls again; the others wait meanwhile, and
    agree with what it says by then, not with what it said first."""
    group = cuep.Group(world, mask_config(world, num_topk=world.size, timeout_s=1.0))  # an agreement waits for 3 s
    step, last = OneEach(world, group), world.size - 1
    step.run(world.size)
    verdict_comm().Barrier()
    if world.rank == 1:
        with pytest.raises(cuep.PeerTimeout, match="update_mask: rank 1 waited more than 3 s"):
            group.clear_mask()
        group.update_mask([int(rank == 1) for rank in range(world.size)])
        step.run(1)
    else:
        time.sleep(4.0 if world.rank == last else 2.0)
    group.clear_mask()
    step.run(world.size)
    group.close()


@pytest.mark.ranks(2, 4)
def test_each_dispatch_counts_what_it_drops(world: Any) -> None:
    """Also when the routing is kept."""
    group = cuep.Group(world, mask_config(world, num_topk=world.size))
    step, last = OneEach(world, group), world.size - 1
    verdict_comm().Barrier()
    if world.rank != last:
        group.update_mask([int(rank != last) for rank in range(world.size)])
        step.handle.update(step.ids)
        for number in range(1, 4):
            step.handle.dispatch(step.x)
            assert group.num_dropped() == number
    verdict_comm().Barrier()
    group.clear_mask()
    step.run(world.size)
    group.close()


@pytest.mark.ranks(2, 4)
def test_what_was_refused_before_is_told(world: Any) -> None:
    """A mask that is updated in a group that works hides nothing."""
    with cuep.Group(world, mask_config(world, num_topk=world.size)) as group:
        step = OneEach(world, group)
        step.run(world.size)
        stream = world.stream()
        if world.rank == 0:
            with pytest.raises(cuep.ArgumentError, match="x has shape"):
                step.handle.dispatch(step.x[:, 1:], stream=stream)
        else:
            step.handle.dispatch(step.x, stream=stream)
        group.clear_mask()
        if world.rank != 0:
            with pytest.raises(cuep.PeerRefused, match="dispatch: rank 0 refused its call"):
                group.check()
        step.run(world.size)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("changes", [{}, {"reduce": "per_rank"}], ids=["exact", "per_rank"])
def test_a_rank_that_is_left_out_amid_a_combine(world: Any, changes: dict[str, Any]) -> None:
    """Rank 2 has what it needs and goes on without rank 0, which is still sending to rank 1: rank 1 gets all of it, or
    an error in time, but never rows that rank 0 has left out."""
    tokens, hidden = 256, 1024
    cfg = mask_config(world, num_topk=4, max_tokens_per_rank=tokens, hidden=hidden, **changes)
    group = cuep.Group(world, cfg)
    num_tokens = tokens if world.rank == 1 else 0
    ids = to_device(world, np.tile(np.arange(4, dtype=np.int32), (num_tokens, 1)))
    weights = to_device(world, np.full((num_tokens, 4), 0.25, np.float32))
    rng = np.random.default_rng(world.rank)
    handle, problem, y = group.create_handle(ids, weights), None, None
    for number in range(3):
        x = rng.standard_normal((num_tokens, hidden), np.float32).astype(ml_dtypes.bfloat16)
        handle.update(ids, weights)
        recv = handle.dispatch(to_device(world, x))
        group.check()
        verdict_comm().Barrier()
        try:
            y = handle.combine(recv.tokens)
            group.check()
            if number == 2 and world.rank != 0:
                group.update_mask([0, 1, 1, 1])
        except cuep.PeerTimeout as error:
            problem = error
        if y is not None and problem is None:
            assert (to_host(world, y) == x).all()
    verdict_comm().Barrier()
    with contextlib.suppress(cuep.PeerTimeout):  # some have a mask
        group.close()


def test_arguments(world: Any) -> None:
    with cuep.Group(world, mask_config(world)) as group:
        before = group.query_mask().tolist()
        assert before == [1] * world.size
        one_less, ones = [1] * (world.size + 1), np.ones((1, world.size))
        for wrong in (one_less, [2] * world.size, [None] * world.size, [np.ones(2)] * world.size):
            with pytest.raises(cuep.ArgumentError, match=rf"active=.* is not allowed; allowed: {world.size} values"):
                group.update_mask(wrong)
        for strange in (ones, np.array(1), "1" * world.size, b"1" * world.size, None, 1):
            with pytest.raises(cuep.ArgumentTypeError, match=r"active: got .*, allowed: "):
                group.update_mask(strange)
        with pytest.raises(cuep.ArgumentError, match=f"leaves out rank {world.rank}, which calls"):
            group.update_mask([int(rank != world.rank) for rank in range(world.size)])
        group.update_mask(np.ones(world.size, bool))
        group.update_mask((1,) * world.size)
    with (
        cuep.Group(world, config("ll")) as group,
        pytest.raises(cuep.OrderError, match=r"GroupConfig\(mask=True\), got mask=False"),
    ):
        group.update_mask([1] * world.size)
    with pytest.raises(cuep.ArgumentError, match="mask=True is not allowed; allowed: False with mode='ht'"):
        config("ht", mask=True)
