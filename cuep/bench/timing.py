"""How long an operation takes: device events on a GPU, the host's clock on a CPU, always of the slowest rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuep.world import World

Step = Callable[[], None]

# Repetitions within one iteration: enough to make launch latency and the ranks' unequal start small beside the work.
_GPU_REPEATS = 10
_CPU_REPEATS = 2
_HOST_REPEATS = 10  # few enough to fit the device's queue of launches


@dataclass(frozen=True)
class Operation:
    """What is timed: `timed` steps, each time between untimed ones: a combine needs a dispatch before it, what is only
    sent must be received after it."""

    name: str
    timed: tuple[Step, ...]
    before: tuple[Step, ...] = ()
    after: tuple[Step, ...] = ()

    def run(self) -> None:
        take(self.before)
        take(self.timed)
        take(self.after)


def take(steps: tuple[Step, ...]) -> None:
    for step in steps:
        step()


@dataclass(frozen=True)
class Timing:
    """Microseconds of one operation; each iteration counts as long as its slowest rank took."""

    us_median: float
    us_p10: float
    us_p90: float
    host_us: float  # what the calls cost the host, until they return, when it does nothing else
    host_cold_us: float  # the same for the first calls after it has waited for the device


def measure(world: World, stream: Any, operation: Operation, iterations: int, graph: bool) -> Timing:
    """Time an operation whose steps enqueue on `stream`, or fork from it and join it again. Collective."""
    synchronize = world.backend.stream(stream).synchronize
    host = _iterate(world, iterations, lambda: _host_times(operation, synchronize))
    if world.backend.name == "cpu":
        us = _iterate(world, iterations, lambda: _cpu_time(operation, synchronize))
    else:
        timer = _GraphTimer(world, stream, operation) if graph else _EagerTimer(world, stream, operation)
        us = _iterate(world, iterations, timer)
    p10, median, p90 = (round(float(v), 2) for v in np.percentile(us, (10, 50, 90)))
    host_us, host_cold_us = (round(float(v), 2) for v in np.median(host, axis=0))
    return Timing(median, p10, p90, host_us, host_cold_us)


def _iterate(world: World, iterations: int, sample: Callable[[], Any]) -> list[Any]:
    """`iterations` samples after one that does not count; of each, the largest of all ranks, in microseconds."""
    mine = []
    for _ in range(iterations + 1):
        world.comm.barrier()
        mine.append(sample())
    return list(np.max(world.comm.allgather(mine[1:]), axis=0))


def _host_times(operation: Operation, synchronize: Step) -> tuple[float, float]:
    """Microseconds of the timed steps: the median of calls one after another, and of the first."""
    seconds: list[float] = []
    synchronize()
    for _ in range(_HOST_REPEATS):
        take(operation.before)
        if not seconds:
            synchronize()
        start = time.perf_counter()
        take(operation.timed)
        seconds.append(time.perf_counter() - start)
        take(operation.after)
    synchronize()
    return float(np.median(seconds[1:])) * 1e6, seconds[0] * 1e6


def _cpu_time(operation: Operation, synchronize: Step) -> float:
    operation.run()  # brings the ranks into step
    synchronize()
    seconds = 0.0
    for _ in range(_CPU_REPEATS):
        take(operation.before)
        synchronize()
        start = time.perf_counter()
        take(operation.timed)
        synchronize()
        seconds += time.perf_counter() - start
        take(operation.after)
    return seconds / _CPU_REPEATS * 1e6


class _EagerTimer:
    """Events around the timed steps of calls that are enqueued back to back."""

    def __init__(self, world: World, stream: Any, operation: Operation) -> None:
        self._cuda = world.backend.xp.cuda
        self._stream = stream
        self._operation = operation
        self._events = [(self._cuda.Event(), self._cuda.Event()) for _ in range(_GPU_REPEATS)]

    def __call__(self) -> float:
        self._operation.run()  # brings the ranks into step
        for before, after in self._events:
            take(self._operation.before)
            before.record(self._stream)
            take(self._operation.timed)
            after.record(self._stream)
            take(self._operation.after)
        self._stream.synchronize()
        return _mean_us(self._cuda, self._events)


class _GraphTimer:
    """Replays of one CUDA graph that holds the operation several times.

    Two replays are enqueued together: the first brings the ranks into step and hides the launch of the second, which is
    timed by events around it. Where some steps must not count, event nodes inside the graph stand around those that do.
    """

    def __init__(self, world: World, stream: Any, operation: Operation) -> None:
        self._cuda = world.backend.xp.cuda
        self._stream = stream
        self._inner: list[tuple[Any, Any]] = []
        operation.run()  # whatever a first call allocates or loads cannot happen while capturing
        stream.synchronize()
        world.comm.barrier()
        stream.begin_capture()
        try:
            for _ in range(_GPU_REPEATS):
                self._capture(operation)
        finally:
            self._graph = stream.end_capture()
        self._outer = (self._cuda.Event(), self._cuda.Event())

    def __call__(self) -> float:
        self._graph.launch(self._stream)
        self._outer[0].record(self._stream)
        self._graph.launch(self._stream)
        self._outer[1].record(self._stream)
        self._stream.synchronize()
        return _mean_us(self._cuda, self._inner) if self._inner else _mean_us(self._cuda, [self._outer]) / _GPU_REPEATS

    def _capture(self, operation: Operation) -> None:
        if not (operation.before or operation.after):
            operation.run()
            return
        before, after = self._cuda.Event(), self._cuda.Event()
        take(operation.before)
        self._record_in_graph(before)
        take(operation.timed)
        self._record_in_graph(after)
        take(operation.after)
        self._inner.append((before, after))

    def _record_in_graph(self, event: Any) -> None:
        """Without the external flag, recording while capturing only orders streams and stores no time."""
        from cuda.bindings import driver

        external = driver.CUevent_record_flags.CU_EVENT_RECORD_EXTERNAL
        (status,) = driver.cuEventRecordWithFlags(event.ptr, self._stream.ptr, int(external))
        if status != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"cuEventRecordWithFlags failed: {status}")


def _mean_us(cuda: Any, events: list[tuple[Any, Any]]) -> float:
    return float(np.mean([cuda.get_elapsed_time(before, after) for before, after in events])) * 1e3
