"""Two operations of a group at once, as replays of two graphs in two streams would be: found out and told."""

from __future__ import annotations

from typing import Any

import pytest
from harness import to_device
from moe import random_step, run_step
from rig import FORMS, form_config

import cuep


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("second", ["dispatch", "combine"])
def test_a_second_kernel_beside_one_that_waits(world: Any, form: str, second: str) -> None:
    """Rank 0's dispatch waits for its peers, which never come; a kernel launched by hand runs beside it."""
    with cuep.init(world.comm, backend=world.backend.name) as other:
        group = cuep.Group(other, form_config(form, num_sms=8, timeout_s=20))
        step = random_step(other, group.cfg, 1, 5, masked=0)
        handle = run_step(other, group, step)
        handle.dispatch(to_device(other, step.x))  # so that its combine may come
        x = to_device(other, step.x)
        group.check()
        if other.rank == 0:
            kernels = {"dispatch": group.mode._dispatch, "combine": group.mode._combine}
            for kernel in kernels.values():  # GPUs need not run two cooperative kernels beside one another
                kernel._kernel._function.cooperative = False
            first, later = other.stream(), other.stream()
            handle.dispatch(x, stream=first)
            kernels[second].launch(getattr(handle.state, second), other.backend.stream(later), handle.arrays)
            other.backend.synchronize()
            with pytest.raises(cuep.OrderError, match="two operations of this group ran at once on rank 0"):
                group.check()
            with pytest.raises(cuep.ClosedError, match="two operations of this group ran at once"):
                group.check()
        other.comm.barrier()
        group.close() if other.rank == 0 else group.abandon()
