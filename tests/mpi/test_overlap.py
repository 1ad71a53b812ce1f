"""Two operations of a group at once, as replays of two graphs in two streams would be: found out and told."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Any

import pytest
from harness import to_device
from moe import random_step, run_experts, run_step
from rig import ON_DEVICE, form_config

import cuep


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("form", ON_DEVICE)
@pytest.mark.parametrize("operation", ["dispatch", "combine"])
def test_a_second_kernel_in_one_epoch(world: Any, form: str, operation: str) -> None:
    """Rank 0's operation waits for its peers; beside it runs the same kernel, launched by hand; then the peers come."""
    with cuep.init(world.comm, backend=world.backend.name) as other:
        group = cuep.Group(other, form_config(form, num_sms=8, timeout_s=5))
        step = random_step(other, group.cfg, 1, 5, masked=0)
        handle = run_step(other, group, step)
        recv = handle.dispatch(to_device(other, step.x))
        group.check()
        call = handle.dispatch if operation == "dispatch" else handle.combine
        rows = to_device(other, step.x) if operation == "dispatch" else run_experts(group.cfg, other, recv)
        if other.rank == 0:
            kernel = getattr(group.mode, f"_{operation}")
            # GPUs need not run two cooperative kernels beside one another
            if other.backend.name == "cuda":
                kernel._kernel._function.cooperative = False
            first, second = other.stream(), other.stream()
            call(rows, stream=first)
            kernel.launch(getattr(handle.state, operation), other.backend.stream(second), handle.arrays, rows)
            time.sleep(0.3)  # both have begun
        other.comm.barrier()
        errors: list[Any] = []
        if other.rank != 0:
            call(rows, stream=other.stream())  # whatever comes of it, it ends
        with suppress(cuep.CuepError):
            other.backend.synchronize()
        for _ in range(2 if other.rank == 0 else 0):
            try:
                group.check()
                errors.append(None)
            except cuep.CuepError as error:
                errors.append(error)
        other.comm.barrier()
        group.close() if other.rank == 0 and None not in errors else group.abandon()
    if world.rank == 0:
        assert [type(error) for error in errors] == [cuep.OrderError, cuep.ClosedError], errors
        assert "two operations of this group ran at once on rank 0" in str(errors[0])
