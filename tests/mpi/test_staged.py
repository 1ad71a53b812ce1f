"""Staged low-latency operations as callers use them: orders that are legal and orders that are not."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from harness import to_device, to_host
from moe import Step, check_received, config, expected, expected_y, random_step, run_experts, run_step

import cuep
from cuep import reference


class Batch:
    """One micro-batch: a handle, its step, and the calls on it, each checked where its result is complete."""

    def __init__(self, world: Any, group: cuep.Group, step: Step, stream: Any) -> None:
        self.world, self.group, self.step, self.stream = world, group, step, stream
        self.inputs, self.want = expected(world, group.cfg, step)
        weights = to_device(world, step.topk_weights)
        self.handle = group.create_handle(to_device(world, step.topk_idx), weights, stream=stream)
        self.x = to_device(world, step.x)

    def send(self) -> None:
        self.handle.dispatch(self.x, send_only=True, stream=self.stream)

    def receive(self) -> None:
        recv = self.handle.complete(self.stream)
        self.world.backend.stream(self.stream, self.x).synchronize()
        check_received(self.world, self.group.cfg, recv, self.want)
        self.answers = run_experts(self.group.cfg, self.world, recv, self.stream)

    def answer(self) -> None:
        self.handle.combine(self.answers, send_only=True, stream=self.stream)

    def finish(self) -> None:
        y = to_host(self.world, self.handle.complete(self.stream), self.stream)
        want = expected_y(self.group.cfg, self.world.rank, self.step, self.inputs)
        reference.assert_same(y, want, "y")


@pytest.mark.parametrize("order", ["D0 D1 C0 D2 C1 C2", "D0 D1 D2 C0 C1 C2"])
@pytest.mark.parametrize("layout_name", ["expert_major", "rank_major"])
def test_three_micro_batches(world: Any, order: str, layout_name: str) -> None:
    """D05: sends of three handles in rotation, a rank whose experts are slow; every order within num_buffers is right,
    one send too many is refused before anything is launched."""
    with cuep.Group(world, config("ll", layout=layout_name, num_buffers=4)) as group:
        stream = world.stream()
        for round_number in range(3):
            batches = [
                Batch(world, group, random_step(world, group.cfg, 10 * round_number + i, 3 + 4 * i), stream)
                for i in range(3)
            ]
            for word in order.split():
                batch = batches[int(word[1])]
                if word[0] == "D":
                    batch.send()
                    continue
                batch.receive()
                if world.rank == round_number % world.size:
                    time.sleep(0.02)
                batch.answer()
            for batch in batches:
                batch.finish()
            group.check()


def test_two_micro_batches(world: Any) -> None:
    """D05: the pipeline of the two seed systems: the sends of one micro-batch lie between those of the other; with two
    buffers a third send is refused, on every rank, and nothing is lost."""
    with cuep.Group(world, config("ll")) as group:
        stream = world.stream()
        for number in range(4):
            first, second, third = (
                Batch(world, group, random_step(world, group.cfg, 3 * number + i, 9), stream) for i in range(3)
            )
            first.send()
            second.send()
            with pytest.raises(cuep.OrderError, match="num_buffers=2 operations of a kind may be under way"):
                third.send()
            first.receive()
            first.answer()
            second.receive()
            first.finish()
            second.answer()
            second.finish()
            group.check()
            for batch in (first, second, third):
                batch.handle.close()


def test_orders_that_are_refused(world: Any) -> None:
    """C06, D06: what cannot follow a send; every rank raises, nothing is sent, and what is pending still ends well."""
    with cuep.Group(world, config("ll")) as group:
        step = random_step(world, group.cfg, 6, 9)
        batch = Batch(world, group, step, None)
        handle = batch.handle
        with pytest.raises(cuep.OrderError, match="complete: no operation of this handle is pending"):
            handle.complete()
        batch.send()
        refused = [
            ("dispatch", lambda: handle.dispatch(batch.x)),
            ("combine", lambda: handle.combine(batch.x)),
            ("update", lambda: handle.update(to_device(world, step.topk_idx))),
            ("close", handle.close),
            ("num_recv_tokens", handle.num_recv_tokens),
            ("host_counts", handle.host_counts),
        ]
        for name, call in refused:
            with pytest.raises(cuep.OrderError, match=f"{name}: the dispatch of this handle is pending"):
                call()
        batch.receive()
        with pytest.raises(cuep.OrderError, match="complete: no operation"):
            handle.complete()
        batch.answer()
        for name, call in (refused[0], refused[1]):
            with pytest.raises(cuep.OrderError, match=f"{name}: the combine of this handle is pending"):
                call()
        batch.finish()
        run_step(world, group, step, handle)


def test_a_group_that_closes_with_a_send_pending(world: Any) -> None:
    """D06: destroying the group ends in bounded time; its handle is closed with it."""
    group = cuep.Group(world, config("ll"))
    batch = Batch(world, group, random_step(world, group.cfg, 6, 9), world.stream())
    batch.send()
    begin = time.monotonic()
    group.close()
    assert time.monotonic() - begin < 5
    with pytest.raises(cuep.ClosedError):
        batch.handle.complete()


def test_high_throughput_has_no_staged_calls(world: Any) -> None:
    """D06: ht refuses send_only as an argument, on the rank that passes it; the next step works."""
    with cuep.Group(world, config("ht")) as group:
        step = random_step(world, group.cfg, 6, 9)
        handle = group.create_handle(to_device(world, step.topk_idx))
        with pytest.raises(cuep.ArgumentError, match="send_only=True is not allowed with mode='ht'"):
            handle.dispatch(to_device(world, step.x), send_only=True)
        group.check()
        run_step(world, group, step, handle)


def test_complete_is_queued(world: Any) -> None:
    """D07: complete() returns at once and its result is there in stream order, with a peer that is late."""
    if world.size == 1:
        pytest.skip("one rank waits for nobody")
    with cuep.Group(world, config("ll")) as group:
        stream = world.stream()
        batch = Batch(world, group, random_step(world, group.cfg, 7, 9), stream)
        if world.rank == 0:
            batch.send()
            begin = time.monotonic()
            recv = batch.handle.complete(stream)
            assert time.monotonic() - begin < 0.5, "complete() waited for the peers"
        world.comm.barrier()
        if world.rank != 0:
            time.sleep(0.1)
            batch.send()
            recv = batch.handle.complete(stream)
        assert to_host(world, recv.total, stream)[0] == batch.want.total
        check_received(world, group.cfg, recv, batch.want)
        group.check()


def test_what_a_send_reads_may_go_after_complete(world: Any) -> None:
    """x and expert_out are kept alive from the send to its completion, and not looked at afterwards."""
    with cuep.Group(world, config("ll")) as group:
        batch = Batch(world, group, random_step(world, group.cfg, 8, 9), world.stream())
        batch.send()
        batch.x = np.zeros(0)  # the handle has the only reference
        recv = batch.handle.complete(batch.stream)
        world.backend.stream(batch.stream).synchronize()
        check_received(world, group.cfg, recv, batch.want)
        group.check()
