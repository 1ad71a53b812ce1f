"""Arrays of every framework in and out, on both backends: torch, JAX, Numba, cuda.core, and rows that lie apart."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from harness import to_device, to_host
from moe import Step, check_received, expected, expected_y, expert_factor, random_step, run_experts, run_step
from rig import FORMS, form_config

import cuep
from cuep import layout, reference

IS_CUDA_ONLY = "needs GPUs"


def rows_factor(world: Any, cfg: cuep.GroupConfig, recv: Any) -> np.ndarray:
    """What the experts multiply each row of recv.tokens by, on the host."""
    offsets = None if recv.expert_offsets is None else np.asarray(host(recv.expert_offsets))
    return expert_factor(cfg, world.rank, world.size, (offsets, len(recv.tokens)))


def host(array: Any) -> np.ndarray:
    """A NumPy copy of any framework's array."""
    kind = type(array).__module__.partition(".")[0]
    if kind == "torch":
        bits = array.dtype.is_floating_point and array.dtype.itemsize == 2
        values = (array.view(__import__("torch").int16) if bits else array).cpu().numpy()
        name = str(array.dtype).rpartition(".")[2]
        return values.view(layout.dtype_of(name)) if bits else values
    if kind == "cupy":
        return array.get()
    if kind == "numba":
        return array.copy_to_host()
    return np.asarray(array)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("form", FORMS)
def test_torch(world: Any, form: str, dtype: str) -> None:
    """C04, C05: torch in and out with no copy, x fresh from a slow chain of matmuls on the current side stream; with
    bias and out.
    """
    torch = pytest.importorskip("torch")
    is_cuda = world.backend.name == "cuda"
    if is_cuda and not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    device = torch.device("cuda", world.backend.device) if is_cuda else torch.device("cpu")
    kind = getattr(torch, dtype)

    def tensor(array: np.ndarray) -> Any:
        is_bf16 = array.dtype == ml_dtypes.bfloat16
        made = torch.from_numpy(np.array(array.view(np.int16) if is_bf16 else array)).to(device)
        return made.view(torch.bfloat16) if is_bf16 else made

    cfg = form_config(form, dtype=dtype)
    side = torch.cuda.Stream(device) if is_cuda else None
    with cuep.Group(world, cfg) as group, torch.cuda.stream(side):
        big = torch.ones((4096 if is_cuda else cfg.hidden, 4096 if is_cuda else cfg.hidden), dtype=kind, device=device)
        eye = torch.eye(cfg.hidden, dtype=kind, device=device)
        for number in range(3):
            step = random_step(world, cfg, number, 6)
            assert step.topk_weights is not None
            source, ids, weights = tensor(step.x), tensor(step.topk_idx), tensor(step.topk_weights)
            bias = tensor(np.full(step.x.shape, 0.5, np.float32).astype(step.x.dtype))
            out = torch.full_like(source, float("nan"))
            for _ in range(5):
                big = (big @ big).clamp(-1, 1)
            x = (source + 0 * big[:6, : cfg.hidden]) @ eye
            handle = group.create_handle(ids, weights)
            recv = handle.dispatch(x)
            assert recv.tokens.dtype == kind and recv.tokens.data_ptr() == handle.state.recv_rows[0]
            assert recv.tokens.device == device
            factor = torch.from_numpy(np.array(rows_factor(world, cfg, recv))).to(device)
            y = handle.combine((recv.tokens.float() * factor).to(kind), bias=bias if number else None, out=out)
            assert y is out
            got, rows = host(y), replace(recv, **{k: to_device(world, v) for k, v in fields(recv).items()})
            group.check()
            inputs, want = expected(world, cfg, step)
            check_received(world, cfg, rows, want)
            used = (host(bias),) if number else ()
            reference.assert_same(got, expected_y(cfg, world.rank, step, inputs, bias=used), "y")
            handle.close()


def fields(recv: cuep.Received) -> dict[str, np.ndarray]:
    """All arrays of recv on the host."""
    names = "tokens expert_counts src_rank_counts source total expert_offsets topk_idx topk_weights".split()
    return {name: host(getattr(recv, name)) for name in names if getattr(recv, name) is not None}


@pytest.fixture
def jax(world: Any) -> Any:
    """JAX, taking memory as it needs it."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    module = pytest.importorskip("jax")
    if world.backend.name == "cuda":
        try:
            module.devices("cuda")
        except RuntimeError as error:
            pytest.skip(f"JAX sees no GPU: {error}")
    return module


@pytest.mark.parametrize("form", FORMS)
def test_jax(world: Any, jax: Any, form: str) -> None:
    """C04, C05: JAX in and out, bfloat16 too; x comes from work that JAX has only begun."""
    is_cuda = world.backend.name == "cuda"
    device = jax.devices("cuda" if is_cuda else "cpu")[world.backend.device]
    jnp = jax.numpy
    with cuep.Group(world, form_config(form)) as group, jax.default_device(device):
        cfg = group.cfg
        handle = None
        for number in range(3):
            step = random_step(world, cfg, number, 6)
            step.topk_idx = step.topk_idx.astype(np.int32)  # JAX's own width
            ids, weights, source = (jax.device_put(a, device) for a in (step.topk_idx, step.topk_weights, step.x))
            slow = jnp.ones((2048 if is_cuda else 64,) * 2, jnp.float32)
            for _ in range(20):
                slow = jnp.clip(slow @ slow, -1, 1)
            x = source + (slow[0, 0] * 0).astype(source.dtype)
            if handle is None:
                handle = group.create_handle(ids, weights)
            else:
                handle.update(ids, weights)
            recv = handle.dispatch(x)
            assert isinstance(recv.tokens, jax.Array) and recv.tokens.dtype == jnp.bfloat16
            if is_cuda:
                assert recv.tokens.unsafe_buffer_pointer() == handle.state.recv_rows[0]
            factor = jax.device_put(np.asarray(rows_factor(world, cfg, recv)), device)
            y = handle.combine((recv.tokens.astype(jnp.float32) * factor).astype(jnp.bfloat16))
            assert isinstance(y, jax.Array)
            got, rows = np.array(y), fields(recv)
            group.check()
            inputs, want = expected(world, cfg, step)
            check_received(world, cfg, replace(recv, **{k: to_device(world, v) for k, v in rows.items()}), want)
            reference.assert_same(got, expected_y(cfg, world.rank, step, inputs), "y")


def test_jax_arrays_are_not_written(world: Any, jax: Any) -> None:
    """They are immutable: refused as out, on all ranks, and the next call works."""
    device = jax.devices("cuda" if world.backend.name == "cuda" else "cpu")[0]
    with cuep.Group(world, form_config("ll exact")) as group:
        step = random_step(world, group.cfg, 1, 5)
        handle = group.create_handle(to_device(world, step.topk_idx), to_device(world, step.topk_weights))
        recv = handle.dispatch(to_device(world, step.x))
        with pytest.raises(cuep.ArgumentTypeError, match="out is a JAX array, which must not be written"):
            handle.combine(recv.tokens, out=jax.device_put(step.x, device))
        with suppress(cuep.PeerRefused):
            group.check()
        run_step(world, group, step)


@pytest.mark.parametrize("form", FORMS)
def test_numba(world: Any, form: str) -> None:
    """Device arrays in and out, with no copy. Numba has no arrays of bfloat16."""
    if world.backend.name != "cuda":
        pytest.skip(IS_CUDA_ONLY)
    cuda = pytest.importorskip("numba.cuda")
    cupy = world.backend.xp
    try:
        cuda.select_device(world.backend.device)
        cuda.to_device(np.zeros(4, np.float16))
    except Exception as error:
        pytest.skip(f"Numba does not work here: {error}")
    cfg = form_config(form, dtype="float16")
    with cuep.Group(world, cfg) as group:
        step = random_step(world, cfg, 1, 6)
        ids, weights, x = (cuda.to_device(array) for array in (step.topk_idx, step.topk_weights, step.x))
        cuda.synchronize()
        handle = group.create_handle(ids, weights)
        recv = handle.dispatch(x)
        assert type(recv.tokens) is type(x) and recv.tokens.dtype == np.float16
        assert recv.tokens.__cuda_array_interface__["data"][0] == handle.state.recv_rows[0]
        group.check()
        factor = to_device(world, np.asarray(rows_factor(world, cfg, recv)))
        answers = (cupy.asarray(recv.tokens).astype("float32") * factor).astype("float16")
        y = handle.combine(cuda.as_cuda_array(answers, sync=False))
        group.check()
        assert type(y) is type(x)
        inputs, want = expected(world, cfg, step)
        rows = replace(recv, **{k: to_device(world, v) for k, v in fields(recv).items()})
        check_received(world, cfg, rows, want)
        reference.assert_same(host(y), expected_y(cfg, world.rank, step, inputs), "y")


def test_cuda_core(world: Any) -> None:
    """cuda.core's view of strided memory comes in through DLPack; results come out as CuPy arrays."""
    if world.backend.name != "cuda":
        pytest.skip(IS_CUDA_ONLY)
    utils = pytest.importorskip("cuda.core.utils")
    if not hasattr(utils.StridedMemoryView, "__dlpack__"):
        pytest.skip("this cuda.core exports nothing through DLPack")

    def seen(array: np.ndarray) -> Any:
        return utils.StridedMemoryView(to_device(world, array), stream_ptr=-1)

    cfg = form_config("ll exact", dtype="float32")
    with cuep.Group(world, cfg) as group:
        step = random_step(world, cfg, 1, 6)
        assert step.topk_weights is not None
        handle = group.create_handle(seen(step.topk_idx), seen(step.topk_weights))
        recv = handle.dispatch(seen(step.x))
        assert isinstance(recv.tokens, world.backend.xp.ndarray)
        y = handle.combine(run_experts(cfg, world, recv))
        group.check()
        inputs, want = expected(world, cfg, step)
        check_received(world, cfg, recv, want)
        reference.assert_same(to_host(world, y), expected_y(cfg, world.rank, step, inputs), "y")


def wrong_arrays(world: Any, array: np.ndarray) -> list[tuple[Any, type[Exception], str]]:
    """The same values where the backend cannot reach them, and what is to be raised about each."""
    if world.backend.name == "cpu":
        return [(array.tolist(), cuep.ArgumentTypeError, "got list, the cpu backend takes NumPy")]
    cupy = world.backend.xp
    wrong: list[tuple[Any, type[Exception], str]] = [
        (array, cuep.ArgumentTypeError, "got ndarray, the cuda backend takes arrays on the GPU")
    ]
    count = cupy.cuda.runtime.getDeviceCount()
    if count > 1:
        other = (world.backend.device + 1) % count
        with cupy.cuda.Device(other):
            bits = cupy.asarray(array.view(np.int16) if array.dtype.itemsize == 2 else array)
            wrong.append((bits.view(array.dtype), cuep.ArgumentError, f"is on GPU {other}, the group is on GPU"))
    return wrong


@pytest.mark.parametrize("mode", ["ll exact", "ht flat"])
def test_arrays_elsewhere(world: Any, mode: str) -> None:
    """C03: each argument in turn on the host or on another GPU is refused with one clear error, nothing is copied, the
    current device stays, and the next call works.
    """
    with cuep.Group(world, form_config(mode)) as group:
        step = random_step(world, group.cfg, 1, 6)
        assert step.topk_weights is not None
        ids, weights, x = (to_device(world, a) for a in (step.topk_idx, step.topk_weights, step.x))
        out = to_device(world, np.zeros(layout.combine_shape(group.cfg, world.size), step.x.dtype))

        def refused(name: str, array: np.ndarray, call: Any) -> None:
            for wrong, error, text in wrong_arrays(world, array):
                with pytest.raises(error, match=f"{name}.*{text}"):
                    call(wrong)
                with suppress(cuep.PeerRefused):
                    group.check()

        refused("topk_idx", step.topk_idx, lambda wrong: group.create_handle(wrong, weights))
        refused("topk_weights", step.topk_weights, lambda wrong: group.create_handle(ids, wrong))
        handle = group.create_handle(ids, weights)
        refused("x", step.x, handle.dispatch)

        def combine(wrong: Any) -> None:
            handle.dispatch(x)
            handle.combine(wrong)

        refused("expert_out", np.zeros(out.shape, step.x.dtype), combine)
        if world.backend.name == "cuda":
            assert world.backend.xp.cuda.runtime.getDevice() == world.backend.device
        run_step(world, group, step, handle)


def apart(world: Any, array: np.ndarray) -> tuple[Any, Any]:
    """The same values with gaps of NaN between the rows: the view, and all of it."""
    gap = 64 // array.dtype.itemsize
    wide = np.full((*array.shape[:-1], array.shape[-1] + gap), np.nan, np.float32).astype(array.dtype)
    wide[..., : array.shape[-1]] = array
    whole = to_device(world, wide)
    return whole[..., : array.shape[-1]], whole


def nothing(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    return np.full(shape, np.nan, np.float32).astype(dtype)


@pytest.mark.parametrize("form", FORMS)
def test_rows_that_lie_apart(world: Any, form: str) -> None:
    """C02, B04: strided rows in x, expert_out, biases and out of both operations; the gaps stay as they are."""
    with cuep.Group(world, form_config(form)) as group:
        cfg, hidden = group.cfg, group.cfg.hidden
        for number in range(3):
            step: Step = random_step(world, cfg, number, 7)
            assert step.topk_weights is not None
            dtype = step.x.dtype
            handle = group.create_handle(to_device(world, step.topk_idx), to_device(world, step.topk_weights))
            into, into_whole = apart(world, nothing(layout.combine_shape(cfg, world.size), dtype))
            recv = handle.dispatch(apart(world, step.x)[0], out=into)
            assert recv.tokens is into
            group.check()
            tokens = to_host(world, into_whole)
            assert (tokens[..., hidden:] != tokens[..., hidden:]).all(), "gaps between received rows"
            rows = np.ascontiguousarray(tokens[..., :hidden])
            inputs, want = expected(world, cfg, step)
            check_received(world, cfg, replace(recv, tokens=to_device(world, rows)), want)

            with np.errstate(invalid="ignore", over="ignore"):
                answers = (rows.astype(np.float32) * rows_factor(world, cfg, recv)).astype(dtype)
            rng = np.random.default_rng([world.rank, number])
            biases = tuple(rng.standard_normal(step.x.shape).astype(np.float32).astype(dtype) for _ in range(2))
            y, y_whole = apart(world, nothing(step.x.shape, dtype))
            given = tuple(apart(world, bias)[0] for bias in biases)
            assert handle.combine(apart(world, answers)[0], bias=given, out=y) is y
            group.check()
            sums = to_host(world, y_whole)
            assert (sums[:, hidden:] != sums[:, hidden:]).all(), "gaps between rows of y"
            have = np.ascontiguousarray(sums[:, :hidden])
            reference.assert_same(have, expected_y(cfg, world.rank, step, inputs, bias=biases), "y")
            handle.close()


def test_read_only_arrays(world: Any) -> None:
    """Fine to read, refused where they would be written."""
    if world.backend.name != "cpu":
        pytest.skip("CuPy has no read-only arrays")
    with cuep.Group(world, form_config("ll exact")) as group:
        step = random_step(world, group.cfg, 1, 6)
        for array in (step.topk_idx, step.x):
            array.flags.writeable = False
        handle = run_step(world, group, step)
        handle.dispatch(step.x)
        with pytest.raises(cuep.ArgumentError, match="out is read-only"):
            handle.combine(handle.arrays["tokens"], out=step.x)
        with suppress(cuep.PeerRefused):
            group.check()
        run_step(world, group, step, handle)
