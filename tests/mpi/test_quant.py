"""Rows that are quantised while they are sent, on either backend, against the oracle bit by bit."""

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

FP8 = ml_dtypes.float8_e4m3fn
DIRECT = {"dispatch": "direct"}
FORMS: dict[str, dict[str, Any]] = {
    "exact": {"variants": DIRECT},
    "per_rank, ue8m0": {"reduce": "per_rank", "scale_format": "ue8m0", "variants": DIRECT},
    "rank_major": {"layout": "rank_major", "variants": DIRECT},
    "exact, lines": {"max_tokens_per_rank": 6},
    "rank_major, lines, ue8m0": {"layout": "rank_major", "scale_format": "ue8m0", "max_tokens_per_rank": 6},
    "float32, three scales": {"dtype": "float32", "hidden": 384, "combine_dtype": "bfloat16"},
    "columns": {"scale_layout": "column_major", "variants": DIRECT},
    "packed columns, lines": {"scale_layout": "column_major", "scale_format": "ue8m0", "max_tokens_per_rank": 5},
    "rank_major, packed columns, five scales": {
        "layout": "rank_major",
        "scale_layout": "column_major",
        "scale_format": "ue8m0",
        "hidden": 640,
        "variants": DIRECT,
    },
    "float16, lines, five scales": {"dtype": "float16", "hidden": 640, "max_tokens_per_rank": 6, "num_topk": 3},
}


def quant_config(form: str, **changes: Any) -> cuep.GroupConfig:
    return config("ll", **({"quant": "fp8_block128"} | FORMS[form] | changes))


def random_rows(cfg: cuep.GroupConfig, rank: int, seed: int, num_tokens: int) -> np.ndarray:
    rng = np.random.default_rng([seed, rank])
    rows = rng.standard_normal((num_tokens, cfg.hidden)) * np.exp2(rng.integers(-20, 10, (num_tokens, 1)))
    return rows.astype(np.float32).astype(np.dtype(ml_dtypes.bfloat16) if cfg.dtype == "bfloat16" else cfg.dtype)


def check_columns(scales: Any) -> None:
    """Grouped GEMMs load columns: the scales of one block of all rows lie next to one another, 16-byte aligned."""
    zone, row, column = scales.strides
    assert row == scales.itemsize and column % 16 == 0 and zone == column * scales.shape[2]
    assert column - 16 < scales.shape[1] * scales.itemsize <= column


class Quantised:
    """A step, what every rank sends of it, and what this rank must get."""

    def __init__(self, world: Any, cfg: cuep.GroupConfig, step: Step) -> None:
        self.cfg, self.step = cfg, step
        sent = [reference.quantise(x, cfg.scale_format) for x in world.comm.allgather(step.x)]
        inputs = reference.gather_inputs(world.comm, cfg.num_experts, step.x, step.topk_idx, step.topk_weights)
        self.inputs = replace(inputs, x=[values for values, _ in sent])
        self.want = reference.dispatch(self.inputs, world.rank, cfg)
        self.scales = [scales for _, scales in sent]
        self.values, self.own_scales = sent[world.rank]

    def check(self, world: Any, recv: cuep.Received) -> np.ndarray:
        """Compares; returns the received rows as float32, all of them, valid or not."""
        cfg, want = self.cfg, self.want
        tokens, scales = to_host(world, recv.tokens).view(FP8), to_host(world, recv.scales)
        assert scales.shape == (*tokens.shape[:-1], cfg.scale_columns)
        if cfg.scale_layout == "column_major":
            check_columns(recv.scales)
        scales = np.ascontiguousarray(scales)
        flat = tokens.reshape(-1, cfg.hidden)[want.row_idx]
        reference.assert_same(flat, want.tokens, "tokens")
        source = want.source
        sent = self.scales if scales.dtype != np.int32 else [reference.pack_scales(scales) for scales in self.scales]
        expected = np.array([sent[rank][token] for rank, token in source[:, :2]], scales.dtype)
        expected = expected.reshape(-1, scales.shape[-1])
        reference.assert_same(scales.reshape(-1, scales.shape[-1])[want.row_idx], expected, "scales")
        reference.assert_same(to_host(world, recv.expert_counts), want.expert_counts, "expert_counts")
        reference.assert_same(to_host(world, recv.source).reshape(-1, source.shape[1])[want.row_idx], source, "source")
        factors = scales.view(self.own_scales.dtype)[..., : cfg.num_scales]
        return reference.dequantise(tokens, factors)

    def experts(self, world: Any, rows: np.ndarray) -> Any:
        cfg, local = self.cfg, self.cfg.num_experts // world.size
        owner = world.rank if cfg.layout == "rank_major" else world.rank * local + np.arange(local)
        factor = np.asarray(expert_scale(owner)).reshape(-1, 1, 1)
        dtype = np.dtype(ml_dtypes.bfloat16) if cfg.combine_dtype == "bfloat16" else np.dtype(str(cfg.combine_dtype))
        with np.errstate(all="ignore"):
            return to_device(world, (rows * factor).astype(dtype))

    def check_y(self, world: Any, y: Any) -> None:
        rows = reference.dequantise(self.values, self.own_scales)
        check_combined(world, self.cfg, replace(self.step, x=rows), self.inputs, y)


def run(world: Any, group: cuep.Group, step: Step, handle: Any = None, *, is_staged: bool = False) -> Any:
    case = Quantised(world, group.cfg, step)
    if handle is None:
        handle = group.create_handle(to_device(world, step.topk_idx), to_device(world, step.topk_weights))
    recv = handle.dispatch(to_device(world, step.x), send_only=is_staged)
    if is_staged:
        recv = handle.complete()
    rows = case.check(world, recv)
    case.check_y(world, handle.combine(case.experts(world, rows)))
    group.check()
    return handle


@pytest.mark.parametrize("form", FORMS)
def test_values_and_scales(world: Any, form: str) -> None:
    """Random rows of very different sizes, more steps than banks, ranks without tokens, a kept routing, both phases."""
    with cuep.Group(world, quant_config(form)) as group:
        most = group.cfg.max_tokens_per_rank
        for seed, num_tokens in enumerate((most, 0, 5, 1)):
            step = random_step(world, group.cfg, seed, num_tokens if seed != 1 else world.rank % 2 * 3)
            step.x = random_rows(group.cfg, world.rank, seed, step.num_tokens)
            handle = run(world, group, step)
            step.x = random_rows(group.cfg, world.rank, 50 + seed, step.num_tokens)
            run(world, group, step, handle, is_staged=True).close()


@pytest.mark.parametrize("form", ["exact", "per_rank, ue8m0", "exact, lines"])
def test_values_that_are_not_ordinary(world: Any, form: str) -> None:
    """B06, B07, B08: zero blocks, NaN, infinities, tiny and largest values; neighbours are right."""
    with cuep.Group(world, quant_config(form)) as group:
        step = random_step(world, group.cfg, 3, 6, masked=0.0)
        x = np.random.default_rng(world.rank).standard_normal((6, group.cfg.hidden)).astype(np.float32)
        x[0] = 0
        x[1, :128] = 0
        x[2, 5] = np.inf
        x[3, 200] = np.nan
        x[4, :128] = 2.0**-133
        x[4, 128:] = -1e-30
        x[5, :128] = 448 * np.sign(x[5, :128])
        x[5, 128] = 3e38
        step.x = x.astype(ml_dtypes.bfloat16)
        run(world, group, step).close()
        values, scales = reference.quantise(step.x, group.cfg.scale_format)
        finite = reference.dequantise(values, scales)
        assert (finite[0] == 0).all() and (finite[1, :128] == 0).all() and (finite[4] == 0).all()
        assert np.isfinite(finite[[0, 1, 4, 5]]).all() and np.isfinite(finite[2, 128:]).all()
        assert np.isfinite(finite[3, :128]).all() and not np.isfinite(finite[3, 128:]).any()
        if group.cfg.scale_format == "fp32":
            assert scales[5, 0] == 1 and (np.abs(values[5, :128].astype(np.float32)) == 448).all()


@pytest.mark.parametrize("form", ["exact", "rank_major, lines, ue8m0"])
def test_how_close(world: Any, form: str) -> None:
    """A value of a block is off by at most 2**-4 of itself or, where it is subnormal, 2**-10 of the scale."""
    cfg = quant_config(form)
    x = random_rows(cfg, world.rank, 9, 64).astype(np.float32)
    values, scales = reference.quantise(x, cfg.scale_format)
    factors = scales if cfg.scale_format == "fp32" else np.exp2(scales.astype(np.float32) - 127)
    error = np.abs(reference.dequantise(values, scales).astype(np.float64) - x)
    bound = np.maximum(np.abs(x) * 2.0**-4, np.repeat(factors, 128, 1) * 2.0**-10)
    assert (error <= bound * 1.0001).all()


def test_out(world: Any) -> None:
    """Rows go where the caller wants them, scales stay with the handle."""
    with cuep.Group(world, quant_config("exact")) as group:
        step = random_step(world, group.cfg, 4, 7)
        step.x = random_rows(group.cfg, world.rank, 4, 7)
        case = Quantised(world, group.cfg, step)
        handle = group.create_handle(to_device(world, step.topk_idx), to_device(world, step.topk_weights))
        own = handle.arrays["tokens"]
        out = world.backend.empty(own.shape, own.dtype)
        recv = handle.dispatch(to_device(world, step.x), out=out)
        assert recv.tokens is out
        case.check(world, recv)
        group.check()


def test_settings_that_do_not_fit() -> None:
    for changes, match in (
        ({"hidden": 192}, "hidden=192 is not allowed; allowed: a multiple of 128"),
        ({"hidden": 46080}, "hidden=46080 is not allowed; allowed: less than 23040 with quant"),
        ({"num_experts": 8192, "quant": None}, "num_experts=8192 is not allowed; allowed: at most 5760 with mode='ll'"),
        ({"quant": "fp4"}, "quant='fp4' is not allowed"),
        ({"scales_per_row": 2}, "scales_per_row=2 is not allowed; allowed: None with quant='fp8_block128'"),
        ({"scale_layout": "tiled"}, "scale_layout='tiled' is not allowed"),
        ({"quant": "forward"}, "dtype='bfloat16' is not allowed; allowed: .*float8_e4m3fn.* with quant='forward'"),
        ({"quant": "forward", "dtype": "uint8", "hidden": 264}, "hidden=264 is not allowed"),
        ({"quant": "forward", "dtype": "uint8", "scales_per_row": -1}, "scales_per_row=-1 is not allowed"),
        ({"quant": None, "dtype": "float8_e4m3fn"}, "dtype='float8_e4m3fn' is not allowed"),
        ({"scale_format": "fp16"}, "scale_format='fp16' is not allowed"),
    ):
        with pytest.raises(cuep.ArgumentError, match=match):
            quant_config("exact", **changes)
