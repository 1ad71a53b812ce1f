"""What only a GPU has: CUDA graphs, torch tensors in and out, other people's streams."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from harness import to_host
from moe import Step, check_combined, check_received, config, expected, random_step, run_experts, run_step

import cuep

MODES = ["ll", "ht"]


@pytest.fixture(autouse=True)
def needs_gpus(world: Any) -> None:
    if world.backend.name != "cuda":
        pytest.skip("needs GPUs")


@pytest.mark.parametrize("mode", MODES)
def test_graph_replays_with_other_routing(world: Any, mode: str) -> None:
    """G01: captured once, replayed with other rows, routing and weights in the same arrays, mixed with eager calls."""
    cupy = world.backend.xp
    with cuep.Group(world, config(mode)) as group:
        first = random_step(world, group.cfg, 0, 9)
        ids, weights = cupy.asarray(first.topk_idx), cupy.asarray(first.topk_weights)
        x = world.backend.asarray(first.x)
        stream = world.stream()
        with stream:
            handle = group.create_handle(ids, weights, stream=stream)
            recv = handle.dispatch(x, stream=stream)
            out = cupy.empty_like(recv.tokens)

            def step() -> Any:
                handle.update(ids, weights, stream=stream)
                cupy.multiply(handle.dispatch(x, stream=stream).tokens, x.dtype.type(1), out=out)
                return handle.combine(out, stream=stream)

            step()
            stream.synchronize()
            stream.begin_capture()
            y = step()
            graph = stream.end_capture()
            for number in range(1, 8):
                changed = random_step(world, group.cfg, number, 9, masked=(0.2, 1.0)[number == 3])
                ids.set(changed.topk_idx, stream=stream)
                weights.set(changed.topk_weights, stream=stream)
                x[...] = world.backend.asarray(changed.x)
                stream.synchronize()
                if number % 3 == 2:
                    y = step()
                else:
                    graph.launch(stream)
                group.check()
                inputs, want = expected(world, group.cfg, changed)
                check_received(world, group.cfg, recv, want)
                check_identity(world, group.cfg, changed, inputs, to_host(world, y, stream))
        run_step(world, group, first).close()


def check_identity(world: Any, cfg: Any, step: Step, inputs: Any, y: np.ndarray) -> None:
    """The experts of the captured step return what they get."""
    from cuep import reference

    weights = reference.weights_or_ones(inputs, world.rank)
    if cfg.mode == "ll":
        want = reference.weighted_sum(inputs.topk_idx[world.rank], weights, lambda k: step.x, step.x.dtype)
    else:
        want = reference.rank_sum(inputs.owner(world.rank), world.size, lambda rank: step.x, step.x.dtype)
    reference.assert_same(y, want, "y")


@pytest.mark.parametrize("mode", MODES)
def test_waiting_inside_a_capture_is_refused(world: Any, mode: str) -> None:
    """C08: the two calls that wait for the device say so; the capture goes on."""
    cupy = world.backend.xp
    with cuep.Group(world, config(mode)) as group:
        step = random_step(world, group.cfg, 0, 4)
        stream = world.stream()
        handle = group.create_handle(cupy.asarray(step.topk_idx), stream=stream)
        x = world.backend.asarray(step.x)
        handle.dispatch(x, stream=stream)
        stream.begin_capture()
        handle.dispatch(x, stream=stream)
        for call in (handle.num_recv_tokens, handle.host_counts, group.check):
            with pytest.raises(cuep.OrderError, match="waits for the device"):
                call()
        stream.end_capture()
        group.check()


@pytest.mark.parametrize("mode", MODES)
def test_torch_tensors(world: Any, mode: str) -> None:
    """C04: torch in, torch out, bfloat16 too, on torch's current stream, with no copy."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    device = torch.device("cuda", world.backend.device)
    with cuep.Group(world, config(mode)) as group, torch.cuda.device(device):
        for number in range(3):
            step = random_step(world, group.cfg, number, 6)
            with torch.cuda.stream(torch.cuda.Stream()):
                ids = torch.from_numpy(step.topk_idx).to(device)
                weights = torch.from_numpy(step.topk_weights).to(device)
                x = torch.from_numpy(step.x.view(np.int16)).to(device).view(torch.bfloat16)
                handle = group.create_handle(ids, weights)
                recv = handle.dispatch(x)
                assert recv.tokens.dtype == torch.bfloat16 and recv.tokens.data_ptr() == handle.state.recv_rows[0]
                y = handle.combine(recv.tokens)
                got = y.view(torch.int16).cpu().numpy().view(step.x.dtype)
            group.check()
            inputs, _ = expected(world, group.cfg, step)
            check_identity(world, group.cfg, step, inputs, got)
            handle.close()


def test_torch_tensors_on_the_wrong_device(world: Any) -> None:
    """C03: a CPU tensor or a NumPy array is refused on this rank, and as PeerRefused on the others."""
    torch = pytest.importorskip("torch")
    with cuep.Group(world, config("ht")) as group:
        step = random_step(world, group.cfg, 1, 6)
        for wrong in (step.topk_idx, torch.from_numpy(step.topk_idx)):
            with pytest.raises(cuep.ArgumentTypeError, match="topk_idx"):
                group.create_handle(wrong)
        run_step(world, group, step)


@pytest.mark.parametrize("mode", MODES)
def test_other_peoples_streams(world: Any, mode: str) -> None:
    """D01: a raw handle, an object with __cuda_stream__, the legacy stream; each step on another one."""
    cupy = world.backend.xp

    class Foreign:
        def __init__(self, stream: Any) -> None:
            self.stream = stream

        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, self.stream.ptr

    streams = [cupy.cuda.Stream(non_blocking=True) for _ in range(2)]
    choices: list[Any] = [streams[0], Foreign(streams[1]), streams[1].ptr, cupy.cuda.Stream.null, None]
    with cuep.Group(world, config(mode)) as group:
        for number, chosen in enumerate(choices):
            step = random_step(world, group.cfg, number, 6)
            ids, weights = cupy.asarray(step.topk_idx), cupy.asarray(step.topk_weights)
            x = world.backend.asarray(step.x)
            cupy.cuda.Device().synchronize()
            handle = group.create_handle(ids, weights, stream=chosen)
            recv = handle.dispatch(x, stream=choices[number - 1])
            group.check()
            inputs, want = expected(world, group.cfg, step)
            check_received(world, group.cfg, recv, want)
            y = handle.combine(run_experts(group.cfg, world, recv), stream=chosen)
            group.check()
            check_combined(world, group.cfg, step, inputs, y)
            handle.close()
