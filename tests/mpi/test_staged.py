"""Staged low-latency operations as callers use them: orders that are legal and orders that are not."""

from __future__ import annotations

import time
import weakref
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


@pytest.mark.parametrize("is_refusal_near", [False, True])
def test_a_combine_too_many(world: Any, is_refusal_near: bool) -> None:
    """D05: the device finds it, on all ranks alike, also where ranks learn of a refusal at different times; what is
    pending ends well, and the group goes on."""
    with cuep.Group(world, config("ll")) as group:
        stream = world.stream()
        batches = [Batch(world, group, random_step(world, group.cfg, i, 9), stream) for i in range(3)]
        for batch in batches:
            batch.send()
            batch.receive()
        group.check()
        batches[0].answer()
        if is_refusal_near:  # a combine of batch 1 that rank 0 refuses, and that all skip afterwards
            with pytest.raises(cuep.ArgumentError if world.rank == 0 else cuep.PeerRefused):
                wrong = batches[1].answers[:, :1] if world.rank == 0 else batches[1].answers
                batches[1].handle.combine(wrong, stream=stream)
                group.check()
        else:
            batches[1].answer()
        batches[2].answer()
        with pytest.raises(cuep.OrderError, match="combine: num_buffers=2 operations of a kind may be under way"):
            group.check()
        batches[0].finish()
        if not is_refusal_near:
            batches[1].finish()
        run_step(world, group, random_step(world, group.cfg, 9, 9))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("reduce", ["exact", "per_rank"])
def test_ranks_that_combine_different_handles(world: Any, reduce: str) -> None:
    """One rank's send_only combine is refused, the other's is pending: their next combines are not the same one."""
    settings = {"num_experts": 2, "num_topk": 1, "hidden": 64, "dtype": "float32", "num_buffers": 1, "timeout_s": 5}
    group = cuep.Group(world, config("ll", reduce=reduce, **settings))
    handles, rows = [], []
    for number in range(3):
        handles.append(group.create_handle(to_device(world, np.full((2, 1), 1 - world.rank, np.int32))))
        x = to_device(world, np.full((2, 64), number, np.float32))
        rows.append(handles[-1].dispatch(x).tokens.copy())
    errors: list[str] = []

    def attempt(call: Any, *args: Any, **options: Any) -> None:
        try:
            call(*args, **options)
            group.check()
        except cuep.CuepError as error:
            errors.append(type(error).__name__ + ": " + str(error))

    attempt(handles[0].combine, rows[0][:, :1] if world.rank == 0 else rows[0], send_only=True)
    attempt(handles[1].combine, rows[1])
    if world.rank == 1:
        attempt(handles[0].complete)
        attempt(handles[2].combine, rows[2])
    world.comm.barrier()
    group.abandon()
    assert any("the ranks are at handles of different" in text for text in errors), errors


@pytest.mark.ranks(2)
def test_out_lives_until_it_is_written(world: Any) -> None:
    """complete() writes what dispatch(out=) named, though the caller has let go of it."""
    with cuep.Group(world, config("ll")) as group:
        stream = world.stream()
        step = random_step(world, group.cfg, 1, 5)
        handles = [group.create_handle(to_device(world, step.topk_idx), stream=stream) for _ in range(2)]
        for handle in handles:
            handle.dispatch(to_device(world, step.x), stream=stream)
        world.backend.stream(stream).synchronize()
        world.comm.barrier()
        if world.rank == 1:
            time.sleep(1)
        out = world.backend.empty(handles[0].arrays["tokens"].shape, handles[0].arrays["tokens"].dtype)
        alive = weakref.ref(out)
        x = to_device(world, step.x)
        handles[0].dispatch(x, out=out, send_only=True, stream=stream)
        del out
        handles[0].complete(stream=stream)
        if world.rank == 0:
            time.sleep(0.5)  # its kernel waits for the other rank
            handles[1].update(to_device(world, step.topk_idx), stream=stream)
            assert alive() is not None
        else:
            handles[1].update(to_device(world, step.topk_idx), stream=stream)
        group.check()
