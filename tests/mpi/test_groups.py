"""Groups of some ranks of the world, in any order, several at a time; and where a group's memory comes from."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from harness import to_device
from moe import config, random_step, run_step

import cuep
from cuep import layout

MODES = ["ll", "ht"]


@dataclass
class Part:
    """Some ranks of the world, as the steps of moe.py want a world."""

    rank: int
    size: int
    comm: Any
    backend: Any

    @classmethod
    def of(cls, world: Any, members: list[int]) -> Part:
        """Collective over the world; this rank must be a member of the list it passes."""
        place = members.index(world.rank)
        comm = world.comm.Split(members[0], place)
        return cls(place, len(members), comm, world.backend)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("mode", MODES)
def test_two_groups_share_the_world(world: Any, mode: str) -> None:
    """E05: {0, 1} and {3, 2}, made at once with other experts and sizes, beside a group of all; used in turn."""
    members = [0, 1] if world.rank < 2 else [3, 2]
    part = Part.of(world, members)
    other = "ht" if mode == "ll" else "ll"
    cfg = config(mode) if world.rank < 2 else config(other, num_experts=6, hidden=520, max_tokens_per_rank=9)
    with cuep.Group(world, cfg, ranks=members) as group, cuep.Group(world, config(mode)) as everyone:
        assert group.is_active and (group.rank, group.num_ranks) == (part.rank, 2)
        handle, whole = None, None
        for number in range(4):
            handle = run_step(part, group, random_step(part, cfg, number, (number + world.rank) % 9), handle)
            whole = run_step(world, everyone, random_step(world, everyone.cfg, number, 5), whole)
    part.comm.Free()


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("mode", MODES)
def test_ranks_in_another_order(world: Any, mode: str) -> None:
    """The last rank of the world is rank 0 of the group and owns the first experts."""
    members = list(range(world.size))[::-1]
    part = Part.of(world, members)
    with cuep.Group(world, config(mode), ranks=members) as group:
        assert group.rank == world.size - 1 - world.rank
        run_step(part, group, random_step(part, group.cfg, 1, 7))
    part.comm.Free()


@pytest.mark.ranks(2, 4)
def test_a_rank_that_stands_aside(world: Any) -> None:
    """The last rank is in no group: its own can only be closed."""
    members = list(range(world.size - 1))
    is_in = world.rank in members
    part = Part.of(world, members if is_in else [world.rank])
    with cuep.Group(world, config("ll", num_experts=6), ranks=members) as group:
        assert group.is_active == is_in
        if is_in:
            run_step(part, group, random_step(part, group.cfg, 1, 7))
        else:
            ids = to_device(world, np.zeros((1, 2), np.int32))
            for call in (lambda: group.create_handle(ids), group.check):
                with pytest.raises(cuep.OrderError, match=r"is not among the ranks \(0,"):
                    call()
    part.comm.Free()


@pytest.mark.ranks(2, 4)
def test_lists_of_ranks_that_do_not_fit(world: Any) -> None:
    """A14: every rank raises the same, and a following correct creation works."""
    last = world.size - 1
    wrong: list[tuple[Any, type[Exception], str]] = [
        ([0, 0], cuep.ArgumentError, r"ranks=\[0, 0\] is not allowed"),
        ([0, world.size], cuep.ArgumentError, "is not allowed"),
        ([], cuep.ArgumentError, r"ranks=\[\] is not allowed"),
        ([0.5], cuep.ArgumentError, "is not allowed"),
        ([0] if world.rank == 0 else [0, last], cuep.SettingsMismatch, "ranks differs between ranks"),
        ([0, last] if world.rank == 0 else [last, 0], cuep.SettingsMismatch, "ranks differs between ranks"),
    ]
    for ranks, error, match in wrong:
        with pytest.raises(error, match=match):
            cuep.Group(world, config("ll"), ranks=ranks)
    part = Part.of(world, list(range(world.size)))
    with cuep.Group(world, config("ll"), ranks=range(world.size)) as group:
        run_step(part, group, random_step(part, group.cfg, 1, 3))
    part.comm.Free()


@pytest.mark.ranks(4)
def test_settings_may_differ_between_groups_but_not_within(world: Any) -> None:
    """A14: the message names the setting and the ranks of the list."""
    members = [0, 1] if world.rank < 2 else [2, 3]
    hidden = 256 if world.rank != 3 else 512
    with pytest.raises(cuep.SettingsMismatch, match=r"between ranks \[2, 3\]: hidden: \[256, 512\]"):
        cuep.Group(world, config("ht", hidden=hidden), ranks=members)


class Counter:
    """An allocator that keeps count."""

    def __init__(self, world: Any) -> None:
        self._world = world
        self.live: dict[int, tuple[int, Any]] = {}
        self.total = 0

    def alloc(self, num_bytes: int) -> int:
        if self._world.backend.name == "cpu":
            block: Any = ctypes.create_string_buffer(num_bytes + 64)
            address = -(-ctypes.addressof(block) // 64) * 64
        else:
            block = self._world.backend.xp.cuda.alloc(num_bytes)
            address = block.ptr
        self.live[address] = (num_bytes, block)
        self.total += num_bytes
        return address

    def free(self, address: int) -> None:
        del self.live[address]


@pytest.mark.parametrize("form", [("ll", None), ("ll", "rank_major"), ("ht", None), ("ht", "expert_major")])
def test_the_users_allocator(world: Any, form: tuple[str, str | None]) -> None:
    """Memory: what is asked of the allocator and of the symmetric heap is what footprint says, to the byte."""
    mode, layout_name = form
    counter = Counter(world)
    cfg = config(mode, layout=layout_name, allocator=(counter.alloc, counter.free))
    needed = cuep.footprint(cfg, world.size)
    with cuep.Group(world, cfg) as group:
        assert group.memory.num_bytes == needed["symmetric"] == layout.arena(cfg, world.size).num_bytes
        assert counter.total == needed["workspace"]
        step = random_step(world, cfg, 1, 7)
        handle = run_step(world, group, step)
        assert counter.total == needed["workspace"] + needed["handle"]
        run_step(world, group, step, handle)
        assert counter.total == needed["workspace"] + needed["handle"], "an operation allocated"
        assert handle.combine_buffer().shape == layout.combine_shape(cfg, world.size)
        handle.combine_buffer()
        assert counter.total == needed["workspace"] + needed["handle"] + needed["combine_buffer"]
        handle.close()
        del handle
        run_step(world, group, step).close()
        group.check()
    del group
    assert not counter.live, "not given back"


def test_an_allocator_that_is_none(world: Any) -> None:
    for wrong in (5, (len,), (len, 5)):
        with pytest.raises(cuep.ArgumentError, match="allocator="):
            config("ll", allocator=wrong)
