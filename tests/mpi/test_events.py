"""previous_event and the events that come back: streams that wait for one another without the host."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from harness import to_device, to_host
from moe import expected, expected_y, random_step
from rig import FORMS, Busy, Experts, Graph, check_received, form_config

import cuep
from cuep import layout, reference


def enqueue_copy(world: Any, to: Any, source: Any, stream: Any) -> None:
    backend = world.backend
    if backend.name == "cpu":
        backend.stream(stream).submit(lambda: np.copyto(to, source))
    else:
        with backend.current_stream(backend.stream(stream)):
            to[...] = source


def recorded(world: Any, kind: str, stream: Any) -> Any:
    """What `stream` was given so far, as an event of some library."""
    if kind == "cuep":
        return world.record_event(stream)
    if world.backend.name == "cpu":
        pytest.skip("NumPy has no events")
    cupy = world.backend.xp
    if kind == "torch":
        torch = pytest.importorskip("torch")
        event = torch.cuda.Event()
        event.record(torch.cuda.ExternalStream(stream.ptr, device=world.backend.device))
        return event
    event = cupy.cuda.Event(disable_timing=True)
    event.record(stream)
    if kind == "handle":
        recorded.kept = event  # type: ignore[attr-defined]  # a number keeps nothing alive
        return event.ptr
    return event


@pytest.mark.parametrize("kind", ["cuep", "cupy", "torch", "handle"])
@pytest.mark.parametrize("form", FORMS)
def test_calls_wait_for_previous_events(world: Any, form: str, kind: str) -> None:
    """Each call's input is filled late on one stream; the call, on another one, waits for an event between them."""
    producer, stream = world.stream(), world.stream()
    backend = world.backend
    with cuep.Group(world, form_config(form)) as group:
        cfg, busy, experts = group.cfg, Busy(world), Experts(world, group.cfg)
        step = random_step(world, cfg, 3, 9)
        assert step.topk_weights is not None
        values = [to_device(world, a) for a in (step.topk_idx, step.topk_weights, step.x)]
        ids, weights, x = (backend.zeros(a.shape, a.dtype) for a in values)
        handle = group.create_handle(ids, weights, stream=stream)
        for again in range(2):
            x[...] = float("nan")
            ids[...] = 1
            backend.synchronize()

            def late(fill: Callable[[], None]) -> Any:
                busy.enqueue(producer)
                fill()
                return recorded(world, kind, producer)

            def fill_routing() -> None:
                enqueue_copy(world, ids, values[0], producer)
                enqueue_copy(world, weights, values[1], producer)

            if again:
                handle.update(ids, weights, previous_event=late(fill_routing), stream=stream)
            else:
                handle.close()
                handle = group.create_handle(ids, weights, previous_event=late(fill_routing), stream=stream)
            filled = late(lambda: enqueue_copy(world, x, values[2], producer))
            recv = handle.dispatch(x, previous_event=filled, stream=stream)
            recv.event.wait(producer)
            out = backend.zeros(layout.combine_shape(cfg, group.num_ranks), layout.dtype_of(cfg.combine_dtype))
            backend.synchronize()
            answered = late(lambda: experts.enqueue(recv, out, producer))  # noqa: B023
            y = handle.combine(out, previous_event=answered, stream=stream)
            group.check()
            inputs, want = expected(world, cfg, step)
            check_received(world, cfg, recv, want)
            reference.assert_same(to_host(world, y), expected_y(cfg, world.rank, step, inputs), "y")


@pytest.mark.parametrize("form", FORMS)
def test_events_that_come_back(world: Any, form: str) -> None:
    """Copies on another stream wait for the event of a late dispatch, then for that of a late combine."""
    stream, reader = world.stream(), world.stream()
    backend = world.backend
    with cuep.Group(world, form_config(form)) as group:
        cfg, busy, experts = group.cfg, Busy(world), Experts(world, group.cfg)
        step = random_step(world, cfg, 5, 8)
        arrays = [to_device(world, a) for a in (step.topk_idx, step.topk_weights, step.x)]
        handle = group.create_handle(*arrays[:2], stream=stream)
        out = backend.zeros(layout.combine_shape(cfg, group.num_ranks), layout.dtype_of(cfg.combine_dtype))
        handle.dispatch(arrays[2], stream=stream)
        handle.event.synchronize()
        assert handle.event.query()
        handle.arrays["y"][...] = float("nan")
        backend.synchronize()
        busy.enqueue(stream, 300)
        recv = handle.dispatch(arrays[2], stream=stream)
        event = recv.event
        assert not event.query()
        event.wait(reader)
        experts.enqueue(recv, out, reader)
        y = handle.combine(out, previous_event=world.record_event(reader), stream=stream)
        copy = backend.zeros(y.shape, y.dtype)
        handle.event.wait(reader)
        enqueue_copy(world, copy, y, reader)
        backend.stream(reader).synchronize()
        inputs, _ = expected(world, cfg, step)
        reference.assert_same(to_host(world, copy), expected_y(cfg, world.rank, step, inputs), "y")
        assert event.query()
        group.check()
        handle.close()
        with pytest.raises(cuep.ClosedError, match="this handle is closed"):
            _ = recv.event
        del handle
        with pytest.raises(cuep.ClosedError, match="the handle that received this is gone"):
            _ = recv.event


@pytest.mark.parametrize("form", FORMS)
def test_streams_that_wait_inside_a_graph(world: Any, form: str) -> None:
    """Dispatch, experts on another stream, combine: captured with events between them, and replayed."""
    stream, aside = world.stream(), world.stream()
    backend = world.backend
    with cuep.Group(world, form_config(form)) as group:
        cfg, experts = group.cfg, Experts(world, group.cfg)
        step = random_step(world, cfg, 6, 7)
        arrays = [to_device(world, a) for a in (step.topk_idx, step.topk_weights, step.x)]
        handle = group.create_handle(*arrays[:2], stream=stream)
        out = backend.zeros(layout.combine_shape(cfg, group.num_ranks), layout.dtype_of(cfg.combine_dtype))
        results: list[Any] = []

        def body() -> None:
            recv = handle.dispatch(arrays[2], stream=stream)
            recv.event.wait(aside)
            experts.enqueue(recv, out, aside)
            results[:] = [recv, handle.combine(out, previous_event=world.record_event(aside), stream=stream)]

        body()
        group.check()
        graph = Graph(world, stream, body)
        inputs, want = expected(world, cfg, step)
        for _ in range(3):
            results[1][...] = float("nan")
            backend.synchronize()
            world.comm.barrier()
            graph.launch()
            group.check()
            check_received(world, cfg, results[0], want)
            reference.assert_same(to_host(world, results[1]), expected_y(cfg, world.rank, step, inputs), "y")


def test_what_is_no_event(world: Any) -> None:
    """One rank's call is refused, its peers learn it, and the next call works."""
    with cuep.Group(world, form_config("ll exact")) as group:
        step = random_step(world, group.cfg, 7, 4)
        arrays = [to_device(world, a) for a in (step.topk_idx, step.topk_weights, step.x)]
        handle = group.create_handle(*arrays[:2])
        wrong = [1.5, "now", world.stream(), object()]
        wrong += [sys.modules["cupy"].cuda.Stream()] if world.backend.name == "cuda" else [7]
        for given in wrong:
            if world.rank == 0:
                with pytest.raises(cuep.ArgumentTypeError, match="previous_event has type .*"):
                    handle.dispatch(arrays[2], previous_event=given)
            elif world.backend.name == "cpu":
                with pytest.raises(cuep.PeerRefused):
                    handle.dispatch(arrays[2])
            else:
                handle.dispatch(arrays[2])
                with pytest.raises(cuep.PeerRefused):
                    group.check()
        recv = handle.dispatch(arrays[2])
        group.check()
        check_received(world, group.cfg, recv, expected(world, group.cfg, step)[1])
