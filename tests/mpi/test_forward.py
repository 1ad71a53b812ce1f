"""Rows that the caller has quantised, with scales of any width and in any order, on either backend: bit by bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from harness import to_device, to_host
from moe import Step, check_combined, config, random_step

import cuep
from cuep import reference
from cuep.bench.workload import scale as expert_scale

DIRECT = {"dispatch": "direct"}
FORMS: dict[str, dict[str, Any]] = {
    "fp32": {"variants": DIRECT},
    "ue8m0, lines": {"scale_format": "ue8m0", "max_tokens_per_rank": 6},
    "rank_major, bf16, e5m2": {
        "layout": "rank_major",
        "dtype": "float8_e5m2",
        "scale_format": "bf16",
        "scales_per_row": 5,
        "variants": DIRECT,
    },
    "rank_major, lines, fp16, int8": {
        "layout": "rank_major",
        "dtype": "int8",
        "scale_format": "fp16",
        "scales_per_row": 3,
        "max_tokens_per_rank": 6,
    },
    "float4, one scale for 16": {
        "dtype": "float4_e2m1fn_x2",
        "scale_format": "e4m3",
        "scales_per_row": 16,
        "reduce": "per_rank",
        "variants": DIRECT,
    },
    "packed columns": {"scale_format": "ue8m0", "scale_layout": "column_major", "hidden": 640, "variants": DIRECT},
    "columns, lines, one scale": {
        "scale_layout": "column_major",
        "scales_per_row": 1,
        "hidden": 80,
        "max_tokens_per_rank": 7,
    },
    "no scales": {"scales_per_row": 0, "hidden": 48, "combine_dtype": "float32"},
}


def forward_config(form: str, **changes: Any) -> cuep.GroupConfig:
    return config("ll", **({"quant": "forward", "dtype": "float8_e4m3fn"} | FORMS[form] | changes))


def scale_dtype(cfg: cuep.GroupConfig) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16 if cfg.scale_dtype == "bfloat16" else cfg.scale_dtype)


def random_bytes(rng: np.random.Generator, shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Any bits at all: cuep must not look into them."""
    return rng.integers(0, 256, (*shape[:-1], shape[-1] * np.dtype(dtype).itemsize), np.uint8).view(dtype)


class Forwarded:
    """A step whose rows are bytes, and what this rank must get."""

    def __init__(self, world: Any, cfg: cuep.GroupConfig, seed: int, num_tokens: int, flipped: int = 0) -> None:
        """flipped: bits of every byte of a row, for other rows with the same routing."""
        rng = np.random.default_rng([seed, world.rank])
        self.cfg = cfg
        self.step = random_step(world, config("ll", num_topk=cfg.num_topk), seed, num_tokens)
        self.step.x = random_bytes(rng, (num_tokens, cfg.columns), np.uint8) ^ np.uint8(flipped)
        self.scales = random_bytes(rng, (num_tokens, cfg.scale_columns), scale_dtype(cfg)) if cfg.num_scales else None
        step = self.step
        self.inputs = reference.gather_inputs(world.comm, cfg.num_experts, step.x, step.topk_idx, step.topk_weights)
        self.all_scales = world.comm.allgather(self.scales)
        self.want = reference.dispatch(self.inputs, world.rank, cfg)

    def check(self, world: Any, recv: cuep.Received) -> np.ndarray:
        """Compares; returns the received bytes, all of them, valid or not."""
        cfg, want = self.cfg, self.want
        tokens = to_host(world, recv.tokens).view(np.uint8)
        assert tokens.shape[-1] == cfg.columns
        reference.assert_same(tokens.reshape(-1, cfg.columns)[want.row_idx], want.tokens, "tokens")
        source = want.source
        reference.assert_same(to_host(world, recv.source).reshape(-1, source.shape[1])[want.row_idx], source, "source")
        assert (recv.scales is None) == (cfg.num_scales == 0)
        if recv.scales is not None:
            scales = np.ascontiguousarray(to_host(world, recv.scales))
            assert scales.dtype == scale_dtype(cfg)
            assert scales.shape == (*tokens.shape[:-1], cfg.scale_columns)
            rows = [self.all_scales[rank][token] for rank, token in source[:, :2]]
            expected = np.array(rows, scales.dtype).reshape(-1, cfg.scale_columns)
            found = scales.reshape(-1, cfg.scale_columns)[want.row_idx]
            reference.assert_same(found.view(np.uint8), expected.view(np.uint8), "scales")
        return tokens

    def values(self, rows: np.ndarray) -> np.ndarray:
        """A stand-in for what the caller's experts make of bytes: H numbers of a row."""
        return np.repeat(rows.astype(np.float32), self.cfg.hidden // self.cfg.columns, -1)

    def experts(self, world: Any, rows: np.ndarray) -> Any:
        cfg, local = self.cfg, self.cfg.num_experts // world.size
        owner = world.rank if cfg.layout == "rank_major" else world.rank * local + np.arange(local)
        factor = np.asarray(expert_scale(owner)).reshape(-1, 1, 1)
        dtype = np.dtype(ml_dtypes.bfloat16) if cfg.combine_dtype == "bfloat16" else np.dtype(str(cfg.combine_dtype))
        return to_device(world, (self.values(rows) * factor).astype(dtype))

    def check_y(self, world: Any, y: Any) -> None:
        check_combined(world, self.cfg, replace(self.step, x=self.values(self.step.x)), self.inputs, y)


def to_rows(world: Any, cfg: cuep.GroupConfig, x: np.ndarray) -> Any:
    """x in its own dtype, where arrays have that, as the tag says."""
    names = {"float8_e4m3fn": ml_dtypes.float8_e4m3fn, "float8_e5m2": ml_dtypes.float8_e5m2, "int8": np.int8}
    if world.backend.name == "cuda" and cfg.dtype.startswith("float8"):
        return to_device(world, x)
    return to_device(world, x.view(names.get(cfg.dtype, np.uint8)))


def run(world: Any, group: cuep.Group, case: Forwarded, handle: Any = None, *, is_staged: bool = False) -> Any:
    if handle is None:
        handle = group.create_handle(to_device(world, case.step.topk_idx), to_device(world, case.step.topk_weights))
    scales = None if case.scales is None else to_device(world, case.scales)
    recv = handle.dispatch(to_rows(world, group.cfg, case.step.x), scales, send_only=is_staged)
    if is_staged:
        recv = handle.complete()
    case.check_y(world, handle.combine(case.experts(world, case.check(world, recv))))
    group.check()
    return handle


@pytest.mark.parametrize("form", FORMS)
def test_bytes_arrive_as_they_are(world: Any, form: str) -> None:
    """More steps than banks, ranks without tokens, a kept routing, both phases."""
    with cuep.Group(world, forward_config(form)) as group:
        most = group.cfg.max_tokens_per_rank
        for seed, num_tokens in enumerate((most, 0, 5, 1)):
            num_tokens = num_tokens if seed != 1 else world.rank % 2 * 3
            handle = run(world, group, Forwarded(world, group.cfg, seed, num_tokens))
            again = Forwarded(world, group.cfg, seed, num_tokens, flipped=0x55)
            run(world, group, again, handle, is_staged=True).close()


def in_columns(scales: np.ndarray, more_rows: int) -> np.ndarray:
    """The same scales, column by column, with room for more rows behind each."""
    base = np.full((scales.shape[1], len(scales) + more_rows), 99, scales.dtype)
    base[:, : len(scales)] = scales.T
    return base.T[: len(scales)]


@pytest.mark.parametrize("form", ["fp32", "ue8m0, lines", "rank_major, bf16, e5m2"])
def test_strides_of_scales(world: Any, form: str) -> None:
    """B10: row-major, column-major, columns padded to a multiple of 4 rows, part of a wider array."""
    with cuep.Group(world, forward_config(form)) as group:
        case = Forwarded(world, group.cfg, 5, 6)
        handle = group.create_handle(to_device(world, case.step.topk_idx), to_device(world, case.step.topk_weights))
        x = to_rows(world, group.cfg, case.step.x)
        wide = np.repeat(case.scales, 3, 1)
        device = world.backend.asarray
        tall, padded = in_columns(case.scales, 0), in_columns(case.scales, 2)
        kinds = {
            "rows": device(case.scales),
            "columns": device(np.ascontiguousarray(tall.base))[:, :6].T,
            "padded columns": device(np.ascontiguousarray(padded.base))[:, :6].T,
            "every third": device(wide)[:, ::3],
        }
        for scales in kinds.values():
            for _ in range(2):  # the second is the repeated plain call
                recv = handle.dispatch(x, scales)
                case.check(world, recv)
        group.check()


def test_other_scales_on_the_same_rows(world: Any) -> None:
    """A repeated call looks at both arrays."""
    with cuep.Group(world, forward_config("fp32")) as group:
        case = Forwarded(world, group.cfg, 6, 4)
        handle = run(world, group, case)
        x = to_rows(world, group.cfg, case.step.x)
        for factor in (1, 2, 3):
            scales = np.full_like(case.scales, factor)
            case.all_scales = [
                np.full((len(rows), group.cfg.scale_columns), factor, np.float32) for rows in case.inputs.x
            ]
            case.check(world, handle.dispatch(x, to_device(world, scales)))
        group.check()


def test_wrong_scales(world: Any) -> None:
    """Each is one clear error, on every rank alike here, and the next dispatch works."""
    with cuep.Group(world, forward_config("fp32")) as group:
        case = Forwarded(world, group.cfg, 7, 4)
        handle = run(world, group, case)
        x, scales = to_rows(world, group.cfg, case.step.x), to_device(world, case.scales)
        own = handle.dispatch(x, scales).scales
        for given, error, match in (
            (None, cuep.ArgumentError, r"scales: got None, allowed with quant='forward': \[4, 2\] float32"),
            (scales[:3], cuep.ArgumentError, r"scales has shape \[3, 2\], allowed: \[4, 2\]"),
            (scales.astype("float64"), cuep.ArgumentTypeError, "scales has dtype float64, allowed: float32"),
            (own[0, :4], cuep.ArgumentError, "scales lies in this handle's own Received.scales"),
        ):
            with pytest.raises(error, match=match):
                handle.dispatch(x, given)
        case.check(world, handle.dispatch(x, scales))
        group.check()
    with cuep.Group(world, config("ll")) as group:
        step = random_step(world, group.cfg, 1, 4)
        handle = group.create_handle(to_device(world, step.topk_idx), to_device(world, step.topk_weights))
        with pytest.raises(cuep.ArgumentError, match="scales: got an array .* allowed with quant=None: None"):
            handle.dispatch(to_device(world, step.x), to_device(world, np.ones((4, 2), np.float32)))
        case = Step(step.topk_idx, step.topk_weights, step.x)
        handle.dispatch(to_device(world, case.x))
        group.check()
