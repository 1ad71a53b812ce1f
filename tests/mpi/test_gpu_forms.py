"""Every form on GPUs: graphs, streams, threads, and slabs beyond 2^31 (other frameworks: test_frameworks.py)."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from harness import to_device, to_host
from moe import check_combined, check_received, expected, random_step
from rig import FORMS, LL_FORMS, ON_DEVICE, Busy, Experts, Graph, Rig, form_config, some_step

import cuep
from cuep import layout


@pytest.fixture(autouse=True)
def needs_gpus(world: Any) -> None:
    if world.backend.name != "cuda":
        pytest.skip("needs GPUs")


@pytest.mark.parametrize("form", ON_DEVICE)
def test_two_graphs_and_eager_calls_alternate(world: Any, form: str) -> None:
    """G01, G04: each captured once, replayed with other rows, routing, weights and numbers of tokens."""
    stream = world.stream()
    with cuep.Group(world, form_config(form)) as group:
        rigs = [Rig(world, group, stream, count_dtype) for count_dtype in ("int32", "int64")]
        for rig in rigs:
            rig.run()
        group.check()
        graphs = [Graph(world, stream, rig.run) for rig in rigs]
        for number in range(14):
            rig, step = rigs[number % 2], some_step(world, group.cfg, number)
            rig.load(step)
            rig.poison()
            if number % 5 == 4:
                rig.run()
            else:
                graphs[number % 2].launch()
            group.check()
            rig.compare(step)
        step = some_step(world, group.cfg, 6)
        rigs[0].load(step)
        for _ in range(7):  # with nothing between them
            graphs[0].launch()
        group.check()
        rigs[0].compare(step)


@pytest.mark.parametrize("form", ON_DEVICE)
def test_first_use_inside_a_capture(world: Any, form: str) -> None:
    """G05, G06, C08: what allocates or waits is refused and the capture goes on; the rest needs no call before it."""
    if world.backend.name != "cuda":
        pytest.skip("a CPU captures nothing")
    runtime = world.backend.xp.cuda.runtime
    stream = world.stream()
    with cuep.Group(world, form_config(form)) as group:
        rig = Rig(world, group, stream)

        def body() -> None:
            with pytest.raises(cuep.OrderError, match="create_handle allocates"):
                group.create_handle(rig.ids, rig.weights, stream=stream)
            if "combine_buffer" not in rig.handle.arrays and not layout.is_pulled(group.cfg):
                with pytest.raises(cuep.OrderError, match="combine_buffer: its first use allocates"):
                    rig.handle.combine_buffer(stream=stream)
            rig.run()
            for wait in (group.check, rig.handle.num_recv_tokens, rig.handle.host_counts):
                with pytest.raises(cuep.OrderError, match="waits for the device"):
                    wait()

        modes = (
            runtime.streamCaptureModeGlobal,
            runtime.streamCaptureModeThreadLocal,
            runtime.streamCaptureModeRelaxed,
        )
        for number, mode in enumerate(modes):
            graph = Graph(world, stream, body, mode)
            step = some_step(world, group.cfg, number)
            rig.load(step)
            graph.launch()
            group.check()
            rig.compare(step)
        step = some_step(world, group.cfg, 6)
        rig.load(step)
        rig.run()
        group.check()
        rig.compare(step)


def test_a_captured_combine_buffer(world: Any) -> None:
    """A handle holds it for good, as replays use it again: what was asked for, or what a captured copy goes into."""
    stream = world.stream()
    with cuep.Group(world, form_config("ht pulled", num_buffers=4)) as group:
        asking, copying, other = (Rig(world, group, stream) for _ in range(3))
        graphs = [Graph(world, stream, asking.run)]
        rows = world.backend.zeros(layout.combine_shape(group.cfg, world.size), layout.dtype_of(group.cfg.dtype))

        def copy() -> None:
            copying.update()
            copying.dispatch()
            copying.experts.enqueue(copying.recv, rows, stream)
            copying.y = copying.handle.combine(rows, stream=stream)

        graphs.append(Graph(world, stream, copy))
        for number in range(3):
            for rig, graph in ((asking, graphs[0]), (copying, graphs[1]), (other, None)):
                step = some_step(world, group.cfg, 3 * number)
                rig.load(step)
                late = other.handle.combine_buffer(stream=stream)  # of neither
                late[...] = float("nan")
                if graph is None:
                    rig.run()
                else:
                    graph.launch()
                group.check()
                rig.compare(step)
        with pytest.raises(cuep.ArgumentError, match="combine buffer that another handle, or a graph, holds"):
            other.dispatch()
            other.handle.combine(asking.out, stream=stream)
        for rig in (asking, copying, other):
            rig.handle.close()
        handles = [Rig(world, group, stream).handle for _ in range(4)]
        assert len({handle.combine_buffer(stream=stream).data.ptr for handle in handles}) == 4  # all are back


@pytest.mark.parametrize("form", ["ht copied", "ht fetched"])
def test_captured_copies(world: Any, form: str) -> None:
    """They have the sizes of the routing at the capture: others are refused, not copied."""
    stream = world.stream()
    with cuep.Group(world, form_config(form)) as group:
        rig = Rig(world, group, stream)

        def step_and_combine() -> None:
            rig.dispatch()
            rig.combine()

        def load(number: int) -> Any:
            step = random_step(world, group.cfg, number, 9, 0.0)
            rig.load(step)
            rig.update()
            return step

        load(1)
        with pytest.raises(cuep.OrderError, match="must know how many rows go where"):
            Graph(world, stream, step_and_combine)
        rig.handle.num_recv_tokens()
        rig.dispatch()
        graph = Graph(world, stream, step_and_combine)
        for number in (1, 2, 1):
            step = load(number)
            graph.launch()
            if number == 2:
                with pytest.raises(cuep.OrderError, match="as many rows as an earlier routing of this handle had"):
                    group.check()
                continue
            group.check()
            rig.compare(step)


@pytest.mark.parametrize("form", ["ht flat", "ht fetched"])
def test_eager_calls_while_another_stream_is_captured(world: Any, form: str) -> None:
    """The capture goes on, and both are right."""
    streams = (world.stream(), world.stream())
    with cuep.Group(world, form_config(form)) as group:
        rigs = [Rig(world, group, stream) for stream in streams]
        steps = [random_step(world, group.cfg, number, 9, 0.0) for number in range(2)]
        for rig, step in zip(rigs, steps, strict=True):
            rig.load(step)
            rig.run()
        group.check()
        for rig in rigs:
            rig.poison()

        def body() -> None:
            for rig in rigs:  # the second on a stream that is not captured
                rig.dispatch()
                rig.combine()

        graph = Graph(world, streams[0], body, world.backend.xp.cuda.runtime.streamCaptureModeRelaxed)
        group.check()
        rigs[1].compare(steps[1])
        for _ in range(2):
            graph.launch()
            group.check()
            rigs[0].compare(steps[0])


@pytest.mark.parametrize("form", LL_FORMS)
def test_a_staged_pipeline_in_a_graph(world: Any, form: str) -> None:
    """D05, G01: two handles, each sending while the other's operation is under way."""
    stream = world.stream()
    with cuep.Group(world, form_config(form)) as group:
        rigs = [Rig(world, group, stream) for _ in range(2)]

        def pipeline() -> None:
            for rig in rigs:
                rig.update()
                rig.dispatch(send_only=True)
            for rig in rigs:
                rig.complete()
                rig.combine(send_only=True)
            for rig in rigs:
                rig.complete()

        pipeline()
        group.check()
        graph = Graph(world, stream, pipeline)
        for number in range(7):
            steps = [some_step(world, group.cfg, 2 * number + i) for i in range(2)]
            for rig, step in zip(rigs, steps, strict=True):
                rig.load(step)
                rig.poison()
            pipeline() if number == 3 else graph.launch()
            group.check()
            for rig, step in zip(rigs, steps, strict=True):
                rig.compare(step)


@pytest.mark.parametrize("form", ON_DEVICE)
@pytest.mark.parametrize("bad_count", [21, -1])
def test_a_token_count_out_of_range(world: Any, form: str, bad_count: int) -> None:
    """A15, G01: one rank's num_tokens on the device is wrong in one replay; the next is right."""
    stream = world.stream()
    bad_rank = world.size - 1
    with cuep.Group(world, form_config(form)) as group:
        rig = Rig(world, group, stream)
        rig.run()
        group.check()
        graph = Graph(world, stream, rig.run)
        for number in (6, 0):
            step = some_step(world, group.cfg, number)
            rig.load(step)
            if world.rank == bad_rank:
                rig.count[...] = bad_count
                world.backend.synchronize()
            graph.launch()
            if world.rank == bad_rank:
                with pytest.raises(cuep.ArgumentError, match="num_tokens on the device"):
                    group.check()
            else:
                with pytest.raises(cuep.PeerRefused, match=f"rank {bad_rank} refused"):
                    group.check()
            rig.load(step)
            rig.poison()
            graph.launch()
            group.check()
            rig.compare(step)


class Foreign:
    """Somebody's stream that has nothing but the protocol."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.stream.ptr


def all_streams(world: Any) -> dict[str, Any]:
    cupy = world.backend.xp
    raw = world.stream()
    return {
        "legacy, 0": 0,
        "non-blocking": world.stream(),
        "legacy, 1": 1,
        "per-thread": 2,
        "blocking": cupy.cuda.Stream(),
        "high priority": cupy.cuda.Stream(non_blocking=True, priority=-1),
        "raw": raw.ptr,
        "foreign": Foreign(raw),
        "CuPy's null": cupy.cuda.Stream.null,
        "current": None,
    }


@pytest.mark.parametrize("form", FORMS)
def test_every_kind_of_stream(world: Any, form: str) -> None:
    """C05, D01: dispatch on one stream, at once after the slow work there that makes x, and combine on another."""
    streams = list(all_streams(world).values())
    runtime = world.backend.xp.cuda.runtime
    with cuep.Group(world, form_config(form)) as group:
        rig, busy = Rig(world, group, None), Busy(world)
        before = (world.backend.xp.cuda.get_current_stream().ptr, runtime.getDevice())
        for number, stream in enumerate(streams):
            step = random_step(world, group.cfg, number, 4 + number % 9)
            rig.load(step)
            rows = rig.x.copy()
            rig.x[...] = float("nan")
            rig.stream = stream
            world.backend.synchronize()
            busy.enqueue(stream)
            with world.backend.current_stream(world.backend.stream(stream)):
                rig.x[...] = rows
            rig.update()
            rig.dispatch()
            rig.experts.enqueue(rig.recv, rig.out, stream)
            rig.y = rig.handle.combine(rig.out, stream=streams[number - 1])
            group.check()
            rig.compare(step)
        assert before == (world.backend.xp.cuda.get_current_stream().ptr, runtime.getDevice())


@pytest.mark.parametrize("form", FORMS)
def test_inputs_freed_or_refilled_after_the_call(world: Any, form: str) -> None:
    """D02, D03: with the call still queued behind slow work, memory is dropped and taken by others, or refilled in
    order; handles are made in memory that slow work on their stream has yet to fill with NaN.
    """
    stream, later = world.stream(), world.stream()
    backend, xp = world.backend, world.backend.xp
    with cuep.Group(world, form_config(form)) as group:
        cfg, busy, experts = group.cfg, Busy(world), Experts(world, group.cfg)

        def refill(array: Any) -> None:
            """Once what is queued has read it."""
            backend.stream(later).wait(backend.stream(stream).record())
            with backend.current_stream(backend.stream(later)):
                array[...] = 7

        def take_place(shape: tuple[int, ...], dtype: Any) -> None:
            """Of an array that was just dropped, if its memory is free."""
            xp.empty(shape, dtype)[...] = 7

        for number in range(4):
            is_dropped = number % 2 == 0
            step = random_step(world, cfg, number, 8)
            assert step.topk_weights is not None
            ids, weights, x = (to_device(world, a) for a in (step.topk_idx, step.topk_weights, step.x))
            with backend.current_stream(backend.stream(current := stream if number < 2 else later)):
                busy.enqueue(current)
                poison_pool(world, cfg)
                handle = group.create_handle(ids, weights, stream=stream)
            busy.enqueue(stream)
            recv = handle.dispatch(x, stream=stream)
            out = backend.zeros(layout.combine_shape(cfg, group.num_ranks), layout.dtype_of(cfg.combine_dtype))
            if is_dropped:
                del ids, weights, x
                for array in (step.topk_idx, step.topk_weights, step.x):
                    take_place(array.shape, array.dtype)
            else:
                for array in (ids, weights, x):
                    refill(array)
            experts.enqueue(recv, out, stream)
            busy.enqueue(stream)
            y = handle.combine(out, stream=stream)
            if is_dropped:
                shape, dtype = out.shape, out.dtype
                del out
                take_place(shape, dtype)
            else:
                refill(out)
            group.check()
            inputs, want = expected(world, cfg, step)
            check_received(world, cfg, recv, want)
            check_combined(world, cfg, step, inputs, y)
            handle.close()


def poison_pool(world: Any, cfg: cuep.GroupConfig) -> None:
    """Give CuPy's pool memory back that is filled with NaN and stale ids only when the current stream gets there."""
    shapes = layout.handle_arrays(cfg, world.size)
    sizes = [layout.num_bytes({name: shape}) for name, shape in shapes.items()]
    junk = [world.backend.xp.empty(size, "uint8") for size in sizes if size]
    for array in junk:
        array.fill(255)


@pytest.mark.parametrize("order", ["same order", "opposite orders"])
def test_two_groups_at_the_same_time(world: Any, order: str) -> None:
    """Each has half of the device, so that kernels of both may wait beside one another, whichever a rank starts."""
    half = world.backend.xp.cuda.Device(world.backend.device).attributes["MultiProcessorCount"] // 2
    configs = [form_config(form, num_sms=half, timeout_s=5) for form in ("ll exact", "ht flat")]
    with cuep.Group(world, configs[0]) as first, cuep.Group(world, configs[1]) as second:
        rigs = [Rig(world, group, world.stream()) for group in (first, second)]
        steps = [some_step(world, rig.cfg, number) for number, rig in enumerate(rigs)]
        for rig, step in zip(rigs, steps, strict=True):
            rig.load(step)
        mine = rigs[::-1] if order == "opposite orders" and world.rank % 2 else rigs
        for _ in range(10):
            for rig in mine:
                rig.run()
        for rig in mine:
            rig.group.check()
        for rig, step in zip(rigs, steps, strict=True):
            rig.compare(step)


class Turns:
    """Threads go one after another, so that all ranks call in the same order."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads
        self._number = 0
        self._changed = threading.Condition()

    @contextmanager
    def mine(self, thread: int) -> Iterator[None]:
        with self._changed:
            if not self._changed.wait_for(lambda: self._number % self._num_threads == thread, timeout=30):
                raise TimeoutError("the other thread did not come")
            yield
            self._number += 1
            self._changed.notify_all()


@pytest.mark.parametrize("form", ["ll exact", "ht flat"])
def test_threads_share_a_group(world: Any, form: str) -> None:
    """D09: two threads with a handle and a stream each, and a third one that only asks how things are."""
    num_steps = 10
    with cuep.Group(world, form_config(form)) as group:
        rigs = [Rig(world, group, world.stream()) for _ in range(2)]
        steps = [[some_step(world, group.cfg, 20 * which + i) for i in range(num_steps)] for which in range(2)]
        ys: list[list[np.ndarray]] = [[], []]
        errors: list[BaseException] = []
        turns = Turns(2)

        def work(which: int) -> None:
            rig = rigs[which]
            try:
                with world.backend.active():
                    for step in steps[which]:
                        rig.load(step)
                        for operation in (rig.update, rig.dispatch, rig.combine):
                            with turns.mine(which):
                                operation()
                        ys[which].append(to_host(world, rig.y, rig.stream))
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(which,)) for which in range(2)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            group.check()
            time.sleep(0.001)
        if errors:
            raise errors[0]
        group.check()
        for rig, own_steps, own_ys in zip(rigs, steps, ys, strict=True):
            for step, y in zip(own_steps, own_ys, strict=True):
                inputs, _ = expected(world, group.cfg, step)
                rig.compare_y(step, inputs, y)


def pattern(xp: Any, rank: int, tokens: Any, hidden: int) -> Any:
    """Rows of bfloat16 bits, [len(tokens), hidden] uint16: numbers from 1 to 4 that say rank, token and column."""
    tokens = tokens.astype(xp.int32)[:, None]
    columns = xp.arange(hidden, dtype=xp.int32)[None]
    values = (tokens * 31 + columns * 7 + rank * 64) & 0xFF
    for column, value in enumerate((rank + 0 * tokens, tokens & 0xFF, (tokens >> 8) & 0xFF, (tokens >> 16) & 0xFF)):
        values[:, column : column + 1] = value
    return (values + 0x3F80).astype(xp.uint16)


def run_large(world: Any, group: cuep.Group, num_tokens: int) -> Any:
    """Everything to the last expert, whose rank gives back what it gets. Returns the handle, and what it received."""
    cfg, xp, backend = group.cfg, world.backend.xp, world.backend
    x = pattern(xp, world.rank, xp.arange(num_tokens), cfg.hidden)
    ids = xp.full((num_tokens, 1), cfg.num_experts - 1, "int32")
    backend.synchronize()
    handle = group.create_handle(ids)
    recv = handle.dispatch(x.view(layout.dtype_of("bfloat16")))
    y = handle.combine(recv.tokens)
    group.check()
    backend.synchronize()
    assert bool((y.view("uint16") == x).all()), "y"
    return handle, recv


def check_rows(world: Any, rows: Any, first_row: int, num_tokens: int) -> None:
    """The first and last rows of each source rank, of [rows, hidden], all ranks' tokens lying one after another."""
    xp = world.backend.xp
    probes = xp.asarray([0, 1, num_tokens // 2, num_tokens - 2, num_tokens - 1])
    for src in range(world.size):
        want = pattern(xp, src, probes, rows.shape[1])
        have = xp.stack([rows[first_row + src * num_tokens + int(token)] for token in probes.get()])
        assert bool((have == want).all()), f"rows of rank {src}"


@contextmanager
def memory_given_back(world: Any) -> Iterator[None]:
    pool = world.backend.xp.get_default_memory_pool()
    pool.free_all_blocks()
    yield
    world.backend.synchronize()
    pool.free_all_blocks()


@pytest.mark.large
def test_zones_beyond_two_to_the_31(world: Any) -> None:
    """B15, ll: the last expert's zone ends beyond 2^31 elements, and so does every offset in bytes."""
    num_tokens, hidden = 33792, 8192
    cfg = cuep.GroupConfig("ll", 8, hidden, 1, num_tokens, num_buffers=1, timeout_s=20)
    assert cfg.num_experts * num_tokens * hidden > 2**31 and cfg.num_experts % world.size == 0
    with memory_given_back(world), cuep.Group(world, cfg) as group:
        handle, recv = run_large(world, group, num_tokens)
        counts = recv.expert_counts.get()
        is_last = world.rank == world.size - 1
        assert counts[-1] == (world.size * num_tokens if is_last else 0) and not counts[:-1].any()
        if is_last:
            check_rows(world, recv.tokens[-1].view("uint16"), 0, num_tokens)
        del handle, recv


@pytest.mark.large
@pytest.mark.parametrize("form", ["ht flat", "ht expert_major"])
def test_received_rows_beyond_two_to_the_31(world: Any, form: str) -> None:
    """B15, ht: one rank receives more than 2^31 elements."""
    hidden = 4096
    num_tokens = -(-(2**31 + hidden) // (hidden * world.size))
    cfg = form_config(form, hidden=hidden, num_topk=1, max_tokens_per_rank=num_tokens, num_buffers=1, timeout_s=20)
    with memory_given_back(world), cuep.Group(world, cfg) as group:
        handle, recv = run_large(world, group, num_tokens)
        is_last = world.rank == world.size - 1
        assert int(recv.total[0]) == (world.size * num_tokens if is_last else 0)
        if is_last:
            first = 0 if recv.expert_offsets is None else int(recv.expert_offsets[-2])
            check_rows(world, recv.tokens.view("uint16"), first, num_tokens)
        del handle, recv
