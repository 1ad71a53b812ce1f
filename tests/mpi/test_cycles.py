"""Making and destroying groups many times."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest
from moe import random_step, run_step
from rig import FORMS, form_config

import cuep


def resources(world: Any) -> dict[str, int]:
    """What a leak would show in. Collective: all ranks are idle when they look."""
    gc.collect()
    counts = {"fds": len(os.listdir("/proc/self/fd"))}
    if world.backend.name == "cuda":
        world.backend.synchronize()
        world.backend.xp.get_default_memory_pool().free_all_blocks()
        world.backend.xp.get_default_pinned_memory_pool().free_all_blocks()
        world.comm.barrier()
        counts["device MiB used"] = -(world.backend.xp.cuda.runtime.memGetInfo()[0] >> 20)
    else:
        world.comm.barrier()
        counts["shared memory files"] = len(list(Path("/dev/shm").glob(f"cuep-{os.getpid()}-*")))
    world.comm.barrier()
    return counts


@pytest.mark.large
def test_many_groups_leave_nothing_behind(world: Any) -> None:
    """E01: group, handle and step of every form in turn, 200 times on GPUs; compared with the second time round."""
    num_rounds = 40 if world.backend.name == "cuda" else 4
    for number in range(num_rounds):
        for form in FORMS:
            with cuep.Group(world, form_config(form)) as group:
                run_step(world, group, random_step(world, group.cfg, number, 5))
        if number == 1:
            before = resources(world)
    after = resources(world)
    for name, value in after.items():
        allowed = 8 if "MiB" in name else 0
        assert value <= before[name] + allowed, f"{name}: {before[name]} after two rounds, {value} after {num_rounds}"
