"""A handle with arrays at fixed addresses, so that its step can be captured in a graph: `from rig import FORMS, Rig`.

Everything works on both backends; a "graph" of the CPU backend is the call itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from harness import to_device, to_host
from moe import Step, check_received, config, expected, expected_y, expert_factor, poison, random_step

import cuep
from cuep import layout, reference

FORMS: dict[str, tuple[str, dict[str, Any]]] = {
    "ll exact": ("ll", {}),
    "ll per_rank": ("ll", {"reduce": "per_rank"}),
    "ll rank_major": ("ll", {"layout": "rank_major"}),
    "ht flat": ("ht", {}),
    "ht pulled": ("ht", {"variants": {"combine": "pull"}}),
    "ht expert_major": ("ht", {"layout": "expert_major", "alignment": 4}),
    "ht copied": ("ht", {"variants": {"combine": "copy"}}),
    "ht fetched": ("ht", {"variants": {"dispatch": "copy", "combine": "copy"}}),
}
#: where the host needs to know nothing of a routing
ON_DEVICE = [name for name in FORMS if name not in ("ht copied", "ht fetched")]
LL_FORMS = [name for name in FORMS if name.startswith("ll")]

_SCALE_ROWS = r"""
extern "C" __global__ void scale_rows(
    unsigned short* out, const unsigned short* rows, const int* offsets, const float* factors, int num_zones,
    long long num_rows, int hidden) {
    for (long long row = blockIdx.x; row < num_rows; row += gridDim.x) {
        int zone = 0;
        while (zone + 1 < num_zones && row >= offsets[zone + 1]) zone++;
        for (int i = threadIdx.x; i < hidden; i += blockDim.x) {
            const long long at = row * hidden + i;
            const float scaled = __uint_as_float((unsigned int)rows[at] << 16) * factors[zone];
            out[at] = (unsigned short)(__float_as_uint(scaled) >> 16);  // factors are powers of two: all exact
        }
    }
}
"""


def form_config(form: str, **changes: Any) -> cuep.GroupConfig:
    mode, settings = FORMS[form]
    return config(mode, **(settings | changes))


class Experts:
    """The oracle's experts for bfloat16 rows, enqueued without an allocation."""

    def __init__(self, world: Any, cfg: cuep.GroupConfig) -> None:
        self._world, self._cfg = world, cfg
        if world.backend.name == "cpu":
            return
        has_zones = cfg.layout == "expert_major"
        local = cfg.num_experts // world.size
        shifts = (np.arange(local + 1), local) if has_zones else None  # an expert's zone of one row: its factor
        factors = expert_factor(cfg, world.rank, world.size, shifts)
        self._factors = to_device(world, np.asarray(factors, np.float32).reshape(-1))
        self._one_zone = None if has_zones else to_device(world, np.zeros(1, np.int32))
        self._kernel = world.backend.xp.RawKernel(_SCALE_ROWS, "scale_rows")
        scratch = to_device(world, np.zeros(1, np.uint16))
        self._launch(scratch, scratch, self._factors.view("int32"), 0, None)  # compiled and loaded before any capture

    def enqueue(self, recv: cuep.Received, out: Any, stream: Any) -> None:
        """out[...] = what the experts make of recv.tokens, valid or not."""
        if self._world.backend.name == "cpu":
            backend = self._world.backend
            offsets = recv.expert_offsets

            def work() -> None:
                rows = len(recv.tokens)
                factor = expert_factor(self._cfg, self._world.rank, self._world.size, (offsets, rows))
                with np.errstate(invalid="ignore", over="ignore"):
                    out[...] = (recv.tokens.astype(np.float32) * factor).astype(out.dtype)

            backend.stream(stream).submit(work)
            return
        offsets = self._one_zone if self._one_zone is not None else recv.expert_offsets
        num_rows = recv.tokens.size // self._cfg.hidden
        self._launch(out, recv.tokens, offsets, num_rows, stream)

    def _launch(self, out: Any, rows: Any, offsets: Any, num_rows: int, stream: Any) -> None:
        backend = self._world.backend
        sizes = (np.int32(self._factors.size), np.int64(num_rows), np.int32(self._cfg.hidden))
        with backend.current_stream(backend.stream(stream)):
            self._kernel((min(max(num_rows, 1), 256),), (128,), (out, rows, offsets, self._factors, *sizes))


class Rig:
    """A handle with room for max_tokens_per_rank rows, whose number of tokens is on the device.

    `stream` may be changed between calls. `recv` and `y` are the newest results.
    """

    def __init__(self, world: Any, group: cuep.Group, stream: Any, count_dtype: str = "int32") -> None:
        cfg = self.cfg = group.cfg
        self.world, self.group, self.stream = world, group, stream
        backend, rows = world.backend, cfg.max_tokens_per_rank
        self.ids = backend.zeros((rows, cfg.num_topk), "int64")
        self.weights = backend.zeros((rows, cfg.num_topk), "float32")
        self.x = backend.zeros((rows, cfg.hidden), layout.dtype_of(cfg.dtype))
        self.count = backend.zeros((1,), count_dtype)
        self.out = backend.zeros(layout.combine_shape(cfg, group.num_ranks), layout.dtype_of(cfg.combine_dtype))
        self.experts = Experts(world, cfg)
        self.handle = group.create_handle(self.ids, self.weights, num_tokens=self.count, stream=stream)
        self.recv: Any = None
        self.y: Any = None

    def load(self, step: Step, x: Any = None) -> None:
        """New values in the same arrays; rows beyond the step's name experts and hold NaN. Waits for the device."""
        more = self.cfg.max_tokens_per_rank - step.num_tokens
        topk = self.cfg.num_topk
        assert step.topk_weights is not None
        rows = padded_rows(step.x, more)
        self.ids[...] = to_device(self.world, np.concatenate([step.topk_idx, np.ones((more, topk), np.int64)]))
        weights = np.concatenate([step.topk_weights, np.full((more, topk), np.nan, np.float32)])
        self.weights[...] = to_device(self.world, weights)
        self.x[...] = to_device(self.world, rows)
        self.count[...] = step.num_tokens
        self.world.backend.synchronize()

    def poison(self) -> None:
        poison(self.world, self.handle, self.recv)

    def update(self) -> None:
        self.handle.update(self.ids, self.weights, num_tokens=self.count, stream=self.stream)

    def dispatch(self, *, send_only: bool = False) -> None:
        self.recv = self.handle.dispatch(self.x, send_only=send_only, stream=self.stream)

    def combine(self, *, send_only: bool = False) -> None:
        if layout.is_pulled(self.cfg):
            self.out = self.handle.combine_buffer(stream=self.stream)
        self.experts.enqueue(self.recv, self.out, self.stream)
        self.y = self.handle.combine(self.out, send_only=send_only, stream=self.stream)

    def complete(self) -> None:
        self.handle.complete(stream=self.stream)

    def run(self) -> None:
        self.update()
        self.dispatch()
        self.combine()

    def compare(self, step: Step) -> None:
        """The newest results are those of `step`. Collective; call after group.check()."""
        inputs, want = expected(self.world, self.cfg, step)
        check_received(self.world, self.cfg, self.recv, want)
        self.compare_y(step, inputs, to_host(self.world, self.y, self.stream))

    def compare_y(self, step: Step, inputs: reference.Inputs, y: np.ndarray) -> None:
        want = expected_y(self.cfg, self.world.rank, step, inputs)
        reference.assert_same(y[: step.num_tokens], want, "y")


class Graph:
    """What `body` enqueues on `stream`, captured."""

    def __init__(self, world: Any, stream: Any, body: Callable[[], None], mode: int | None = None) -> None:
        self._stream, self._body = stream, body
        self._graph: Any = None
        if world.backend.name == "cuda":
            stream.begin_capture(*(() if mode is None else (mode,)))
            try:
                body()
            finally:
                self._graph = stream.end_capture()

    def launch(self) -> None:
        if self._graph is None:
            self._body()
        else:
            self._graph.launch(self._stream)


class Busy:
    """Something slow to put before other work of a stream."""

    def __init__(self, world: Any) -> None:
        self._backend = world.backend
        self._values = world.backend.xp.ones(1 << (24 if world.backend.name == "cuda" else 4), "float32")
        world.backend.synchronize()

    def enqueue(self, stream: Any, rounds: int = 100) -> None:
        """On a GPU each round is about 30 us, on a CPU a millisecond."""
        if self._backend.name == "cpu":
            self._backend.stream(stream).submit(lambda: time.sleep(rounds / 1000))
            return
        with self._backend.current_stream(self._backend.stream(stream)):
            for _ in range(rounds):
                self._values *= np.float32(0.5)


def padded_rows(x: np.ndarray, more: int) -> np.ndarray:
    return np.concatenate([x, np.full((more, x.shape[1]), np.nan, np.float32).astype(x.dtype)])


def some_step(world: Any, cfg: cuep.GroupConfig, number: int) -> Step:
    """Random, another number of tokens on each rank; some numbers are special: see there."""
    most = cfg.max_tokens_per_rank
    num_tokens = int(np.random.default_rng([number, world.rank]).integers(0, most + 1))
    special = number % 12
    if special == 5:
        num_tokens = 0
    elif special == 6:
        num_tokens = most
    elif special == 7 and world.rank == 0:
        num_tokens = 0
    step = random_step(world, cfg, number, num_tokens)
    if special == 2:
        step.topk_idx[...] = -1
    elif special == 3:  # all to the last expert
        step.topk_idx[...] = -1
        step.topk_idx[:, -1] = cfg.num_experts - 1
        step.topk_weights = np.random.default_rng([number, world.rank]).random(step.topk_idx.shape, np.float32)
    return step
