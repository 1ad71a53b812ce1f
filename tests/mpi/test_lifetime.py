"""Making, closing, dropping and forking: nothing leaks, nothing collective hides in a finaliser."""

from __future__ import annotations

import gc
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from harness import to_device
from moe import config, random_step, run_step

import cuep


def resources(world: Any) -> dict[str, int]:
    """What a leak would show in."""
    counts = {"fds": len(os.listdir("/proc/self/fd")), "threads": threading.active_count()}
    if world.backend.name == "cuda":
        counts["device MiB used"] = -(world.backend.xp.cuda.runtime.memGetInfo()[0] >> 20)
    else:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        counts["resident MiB"] = pages * os.sysconf("SC_PAGE_SIZE") >> 20
    return counts


def test_fifty_groups_leave_nothing_behind(world: Any) -> None:
    """E01: ll and ht in turn; memory, files and threads stay as they were, and no cycle takes much longer."""
    seconds = []
    for number in range(50):
        begin = time.monotonic()
        with cuep.Group(world, config(("ll", "ht")[number % 2])) as group:
            run_step(world, group, random_step(world, group.cfg, number, 5))
        seconds.append(time.monotonic() - begin)
        if number == 3:
            before = resources(world)
    after = resources(world)
    for name, value in after.items():
        allowed = 8 if "MiB" in name else 0
        assert value <= before[name] + allowed, f"{name}: {before[name]} after 4 cycles, {value} after 50"
    if world.backend.name == "cuda":  # two cores shared by all ranks say nothing about time
        assert max(seconds[4:]) < 3 * sorted(seconds)[25] + 0.2


@pytest.mark.parametrize("mode", ["ll", "ht"])
def test_close_right_after_dispatch(world: Any, mode: str) -> None:
    """E02: close() waits for what is queued, also where a rank closes late; a second close does nothing."""
    group = cuep.Group(world, config(mode))
    step = random_step(world, group.cfg, 1, 5)
    handle = group.create_handle(to_device(world, step.topk_idx))
    handle.dispatch(to_device(world, step.x))
    if world.rank == world.size - 1:
        time.sleep(1)
    group.close()
    group.close()
    with pytest.raises(cuep.ClosedError):
        handle.dispatch(to_device(world, step.x))
    with pytest.raises(cuep.ClosedError):
        group.check()


def test_close_after_the_communicator_is_gone(world: Any) -> None:
    """E02: cuep has a copy of the communicator, so a group closes in order after its user has freed his."""
    if world.backend.name == "cuda" or world.size == 1:
        pytest.skip("NVSHMEM serves one communicator per process; one rank needs none")
    comm = world.comm.Dup()
    with cuep.init(comm, backend="cpu") as other, cuep.Group(other, config("ll")) as group:
        run_step(other, group, random_step(other, group.cfg, 1, 5))
        comm.Free()
    with pytest.raises(cuep.ClosedError):
        group.check()


def test_a_dropped_group_does_nothing_collective(world: Any) -> None:
    """E03: rank 0 drops a group and collects garbage while the others go on with another one."""
    with cuep.init(world.comm, backend=world.backend.name) as other:
        kept, dropped = cuep.Group(other, config("ll")), cuep.Group(other, config("ht"))
        run_step(other, dropped, random_step(other, dropped.cfg, 1, 5))
        if other.rank == 0:
            del dropped
            gc.collect()
        for number in range(20):
            run_step(other, kept, random_step(other, kept.cfg, number, 4)).close()
        if other.rank != 0:
            del dropped
            gc.collect()
        kept.close()
    assert other.is_closed  # and with it, on all ranks together, the dropped group


def test_fork(world: Any) -> None:
    """E07: a child that only computes leaves the parent's group alone; a child that dispatches is refused."""
    if world.backend.name == "cuda":
        pytest.skip("forking a process that uses CUDA is refused by CUDA itself")
    with cuep.Group(world, config("ll")) as group:
        step = random_step(world, group.cfg, 1, 5)
        handle = run_step(world, group, step)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                assert step.x.sum() is not None
                handle.dispatch(step.x)
            except cuep.ClosedError:
                status = 0
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        run_step(world, group, step, handle)


@pytest.mark.parametrize("mode", ["ll", "ht"])
def test_memory_of_queued_work(world: Any, mode: str) -> None:
    """D03: handles, inputs and outputs may be dropped while kernels that use them are still queued."""
    with cuep.Group(world, config(mode)) as group:
        stream = world.stream()
        for number in range(20):
            step = random_step(world, group.cfg, number, 8)
            handle = group.create_handle(
                to_device(world, step.topk_idx.copy()), to_device(world, step.topk_weights.copy()), stream=stream
            )
            recv = handle.dispatch(to_device(world, step.x.copy()), stream=stream)
            if number % 3:
                handle.combine(recv.tokens, stream=stream)
            if number % 2:
                handle.close()
            del handle, recv
            junk = to_device(world, step.x + 7)  # takes over memory that was given back too early
            del junk
        group.check()
        run_step(world, group, random_step(world, group.cfg, 99, 8))


@pytest.mark.parametrize("mode", ["ll", "ht"])
def test_close_with_work_queued(world: Any, mode: str) -> None:
    """E02: everything that was queued runs before its memory goes."""
    group = cuep.Group(world, config(mode))
    stream = world.stream()
    step = random_step(world, group.cfg, 1, 8)
    handle = group.create_handle(to_device(world, step.topk_idx), stream=stream)
    for _ in range(5):
        handle.combine(handle.dispatch(to_device(world, step.x), stream=stream).tokens, stream=stream)
    group.close()


@pytest.mark.ranks(2)
def test_close_waits_for_peers_only_so_long(world: Any) -> None:
    """A rank that does not close is named by nobody's hang: its peer leaks the memory and says so."""
    other = cuep.init(world.comm, backend=world.backend.name)
    group = cuep.Group(other, config("ll", timeout_s=0.5))
    if world.rank == 1:
        time.sleep(1.5)
    begin = time.monotonic()
    with pytest.raises(cuep.PeerTimeout, match="close: the peers did not close"):
        group.close()
    assert time.monotonic() - begin < 5
    other.close()


def test_dropped_handles_give_back_their_buffers(world: Any) -> None:
    """ht: a handle that was dropped, and whose rows nobody holds, keeps no receive buffer."""
    with cuep.Group(world, config("ht", num_buffers=1)) as group:
        for number in range(3):
            run_step(world, group, random_step(world, group.cfg, number, 5))
