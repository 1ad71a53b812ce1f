"""NCCL EP (PyPI: nccl-extensions) as a peer: ll expert-major and rank-major, ht flat, bfloat16, fp8 dispatch in ll.

Its group is as large as cuep's and otherwise as its defaults make it; receive buffers have their full, fixed size, as a
CUDA graph needs. Descriptors of arrays are made once, outside what is timed: each costs the host some 10 us.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuep import layout
from cuep.agreement import together
from cuep.bench import experts, verify
from cuep.bench.workload import Array, Inputs, Options, group_config
from cuep.config import QUANT_BLOCK, GroupConfig
from cuep.errors import ArgumentError, BackendUnavailable
from cuep.launching import address
from cuep.world import World

_PACKAGES = "'nccl-extensions[cu13]==0.1.0' (which brings nccl4py and nvidia-nccl-cu13==2.30.7)"
_LAYOUTS = {("ll", "expert_major"): "EXPERT_MAJOR", ("ll", "rank_major"): "RANK_MAJOR", ("ht", "flat"): "FLAT"}
_QUANT_MULTIPLE = 512  # of hidden, for its fp8
_ONE_GRAPH = 1  # NCCLConfig.graph_usage_mode: replays and eager calls never run at the same time
# Of arrays, and what its descriptors call them. CuPy has no float8: what it holds as bytes are fp8 rows.
_DTYPES = {"bfloat16": "BFLOAT16", "float32": "FLOAT32", "int32": "INT32", "int64": "INT64", "uint8": "FLOAT8E4M3"}


def load() -> tuple[Any, Any]:
    """Its modules nccl.core and nccl.ep. Raises BackendUnavailable where they, or what they need, are missing."""
    try:
        core, ep = importlib.import_module("nccl.core"), importlib.import_module("nccl.ep")
        ep.get_lib_version()  # loads libnccl and libnccl_ep, which importing does not
        return core, ep
    except (ImportError, RuntimeError, OSError) as error:
        raise BackendUnavailable(f"peer nccl-ep cannot be used ({error}): pip install {_PACKAGES}") from error


def require(world: World, options: Options) -> None:
    """Raise, on every rank, what stands against running it. Collective."""
    config = group_config(options, {})
    if (config.mode, config.layout) not in _LAYOUTS:
        raise ArgumentError(f"peer nccl-ep: layout={config.layout!r} is not allowed with mode='ht'; allowed: 'flat'")
    if config.quant == "forward":
        raise ArgumentError("peer nccl-ep: quant='forward' is not allowed; allowed: None or 'fp8_block128'")
    if config.dtype != "bfloat16":
        raise ArgumentError(f"peer nccl-ep: dtype={config.dtype!r} is not allowed; allowed: 'bfloat16'")
    if config.quant and config.mode == "ht":
        raise ArgumentError(f"peer nccl-ep: quant={config.quant!r} is not allowed with mode='ht'; allowed: None")
    if config.quant and config.hidden % _QUANT_MULTIPLE:
        raise ArgumentError(
            f"peer nccl-ep: hidden={config.hidden} is not allowed with quant={config.quant!r}; allowed: multiples of"
            f" {_QUANT_MULTIPLE}"
        )
    if world.backend.name != "cuda":
        raise BackendUnavailable(f"peer nccl-ep runs on GPUs only, not on the {world.backend.name} backend")
    together(world.comm, load, BackendUnavailable)


@contextmanager
def opened(world: World, options: Options, inputs: Inputs, stream: Any) -> Iterator[NcclEpBatch]:
    """A communicator, group and handle of its own. Collective. After an exception nothing is closed: closing waits for
    peers, and they may be anywhere.
    """
    core, ep = load()
    unique_id = world.comm.bcast(core.get_unique_id().as_bytes if world.rank == 0 else None)
    comm = core.Communicator.init(
        nranks=world.size,
        rank=world.rank,
        unique_id=core.UniqueId.from_bytes(unique_id),
        config=core.NCCLConfig(graph_usage_mode=_ONE_GRAPH),
    )
    group = ep.Group.create(comm, _group_config(ep, group_config(options, {}), world.size))
    batch = NcclEpBatch(world, options, inputs, stream, (core, ep, group))
    yield batch
    world.backend.synchronize()
    world.comm.barrier()
    batch.handle.destroy()
    group.destroy()
    comm.destroy()


def _group_config(ep: Any, config: GroupConfig, num_ranks: int) -> Any:
    is_ll = config.mode == "ll"
    most = config.max_tokens_per_rank
    return ep.GroupConfig(
        algorithm=ep.Algorithm.LOW_LATENCY if is_ll else ep.Algorithm.HIGH_THROUGHPUT,
        num_experts=config.num_experts,
        max_dispatch_tokens_per_rank=most,
        max_recv_tokens_per_rank=0 if is_ll else num_ranks * most,
        max_token_bytes=config.row_bytes,
        max_num_sms=config.num_sms or 0,
    )


@dataclass(frozen=True)
class _View:
    """What it received, under cuep.Received's names."""

    tokens: Array
    scales: Array | None = None
    expert_counts: Array | None = None
    expert_offsets: Array | None = None
    src_rank_counts: Array | None = None
    total: Array | None = None


class NcclEpBatch:
    """`inputs` on a handle of its group, dispatched once. Collective.

    Attributes: stream, a CuPy stream; version; handle.
    """

    def __init__(
        self, world: World, options: Options, inputs: Inputs, stream: Any, library: tuple[Any, Any, Any]
    ) -> None:
        self._core, self._ep, group = library
        ep = self._ep
        self.stream = stream
        self.version = str(ep.get_lib_version())
        self._world = world
        self._config = group_config(options, {})
        self._kept: list[Any] = []  # arrays that descriptors point to
        backend = world.backend
        x = self._tensor(backend.asarray(inputs.x))
        weights = self._tensor(backend.asarray(inputs.topk_weights))
        self._topk_idx = self._tensor(backend.asarray(inputs.topk_idx.astype(np.int64)))
        self._view = self._make_view()
        self._at_routing, self._at_dispatch = self._layout_infos()
        self._inputs = ep.DispatchInputs(tokens=x, topk_weights=None if self._is_expert_major else weights)
        self._outputs = ep.DispatchOutputs(**self._received_tensors())
        self._dispatch_config = None
        if self._config.quant:
            self._dispatch_config = ep.DispatchConfig(
                round_scales=int(self._config.scale_format == "ue8m0"),
                quantization_recipe=ep.DispatchQuantizationRecipe.DS_FP8E3M4,
            )
        backend.synchronize()  # the arrays were filled on another stream
        self.handle = group.create_handle(
            getattr(ep.Layout, _LAYOUTS[self._config.mode, str(self._config.layout)]),
            self._topk_idx,
            layout_info=self._at_routing,
            stream=stream.ptr,
        )
        self.dispatch()
        backend.stream(stream).synchronize()
        self._options = options
        self._answers = experts.answers(world, options, self._view)
        self._y = backend.zeros((options.tokens, self._config.hidden), self._answers.dtype)
        self._combine_inputs = ep.CombineInputs(tokens=self._tensor(self._answers))
        # expert-major: it multiplies by the weights at home, though they are called an output
        home_weights = weights if self._is_expert_major else None
        self._combine_outputs = ep.CombineOutputs(tokens=self._tensor(self._y), topk_weights=home_weights)
        backend.synchronize()

    def update(self) -> None:
        self.handle.update(self._topk_idx, layout_info=self._at_routing, stream=self.stream.ptr)

    def dispatch(self) -> None:
        self.handle.dispatch(
            self._inputs,
            self._outputs,
            layout_info=self._at_dispatch,
            config=self._dispatch_config,
            stream=self.stream.ptr,
        )

    def answer_again(self) -> None:
        """It takes rows as they come: each dispatch may put them in another order."""
        backend = self._world.backend
        backend.stream(self.stream).synchronize()
        self._answers[...] = experts.answers(self._world, self._options, self._view)
        backend.synchronize()

    def combine(self) -> None:
        self.handle.combine(self._combine_inputs, self._combine_outputs, stream=self.stream.ptr)

    def forget(self) -> None:
        backend = self._world.backend
        for array in (self._view.tokens, self._y):
            backend.clear(array, backend.stream(self.stream))

    def problems(self, expected: verify.Expected) -> list[str]:
        """Counts must be equal. Rows come in any order within an expert or rank, so only their sum at home is compared:
        each expert's factor differs from its neighbours'."""
        to_numpy = self._world.backend.to_numpy
        counts = {"expert_counts": self._view.expert_counts, "src_rank_counts": self._view.src_rank_counts}
        mine = [
            f"dispatch: {name} {to_numpy(count).tolist()}, expected {getattr(expected.received, name).tolist()}"
            for name, count in counts.items()
            if count is not None and not np.array_equal(to_numpy(count), getattr(expected.received, name))
        ]
        if self._view.total is not None and int(self._view.total[0]) != expected.received.total:
            mine.append(f"dispatch: {int(self._view.total[0])} rows, expected {expected.received.total}")
        mine += verify.far_off(to_numpy(self._y), expected.combined, is_quantised=self._config.quant is not None)
        return verify.of_all_ranks(self._world, mine)

    @property
    def _is_expert_major(self) -> bool:
        return self._config.layout == "expert_major"

    def _make_view(self) -> _View:
        """Receive buffers of the full size, zeroed."""
        backend, config, num_ranks = self._world.backend, self._config, self._world.size
        shape = layout.combine_shape(config, num_ranks)
        tokens = backend.zeros(shape, np.uint8 if config.quant else layout.dtype_of(config.dtype))
        scales = backend.zeros((*shape[:-1], config.hidden // QUANT_BLOCK), np.float32) if config.quant else None
        if config.layout == "flat":
            return _View(tokens, total=backend.zeros((1,), np.int32))
        if config.layout == "rank_major":
            return _View(tokens, scales, src_rank_counts=backend.zeros((num_ranks,), np.int32))
        zones, rows = shape[:2]
        offsets = backend.asarray((np.arange(zones + 1) * rows).astype(np.int32))
        return _View(tokens, scales, backend.zeros((zones,), np.int32), offsets)

    def _layout_infos(self) -> tuple[Any, Any]:
        """Where counts go: ht learns them with the routing, ll with the rows."""
        view, ep = self._view, self._ep
        if view.total is not None:
            return ep.LayoutInfo(recv_total_counter=self._tensor(view.total)), None
        if view.src_rank_counts is not None:
            return None, ep.LayoutInfo(src_rank_counters=self._tensor(view.src_rank_counts))
        return None, ep.LayoutInfo(expert_counters=self._tensor(view.expert_counts))

    def _received_tensors(self) -> dict[str, Any]:
        view, config, backend = self._view, self._config, self._world.backend
        tensors = {"tokens": self._tensor(view.tokens)}
        if view.scales is not None:
            tensors["scales"] = self._tensor(view.scales)
        if not self._is_expert_major:
            shape = (*view.tokens.shape[:-1], config.num_topk)
            id_dtype = np.int32 if config.mode == "ll" else np.int64
            tensors["topk_weights"] = self._tensor(backend.zeros(shape, np.float32))
            tensors["topk_idx"] = self._tensor(backend.zeros(shape, id_dtype))
        return tensors

    def _tensor(self, array: Array) -> Any:
        """Its descriptor of a CuPy array, by address: so it needs neither torch nor DLPack."""
        self._kept.append(array)
        dtype = getattr(self._core, _DTYPES[array.dtype.name])
        return self._ep.Tensor(address(array), dtype=dtype, shape=tuple(array.shape))
