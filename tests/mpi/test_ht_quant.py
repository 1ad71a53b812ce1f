"""Quantised rows in ht, made by cuep or by the caller, on either backend, against the oracle bit by bit."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from harness import to_device, to_host
from moe import config, expert_factor, random_step
from test_forward import Forwarded, to_rows
from test_quant import Quantised, random_rows

import cuep

FETCHED = {"dispatch": "copy"}
FORMS: dict[str, dict[str, Any]] = {
    "flat": {},
    "flat, ue8m0, float32, three scales": {
        "scale_format": "ue8m0",
        "dtype": "float32",
        "combine_dtype": "bfloat16",
        "hidden": 384,
    },
    "flat, fetched": {"variants": FETCHED},
    "expert_major": {"layout": "expert_major", "alignment": 4, "zero_padding": True},
    "expert_major, float16, five scales": {"layout": "expert_major", "dtype": "float16", "hidden": 640, "num_topk": 3},
}
FORWARD: dict[str, dict[str, Any]] = {
    "flat": {},
    "flat, bf16, five scales": {"dtype": "float8_e5m2", "scale_format": "bf16", "scales_per_row": 5, "hidden": 272},
    "flat, fetched, five scales": {"scale_format": "bf16", "scales_per_row": 5, "variants": FETCHED},
    "expert_major, ue8m0": {"layout": "expert_major", "scale_format": "ue8m0"},
    "expert_major, float4": {
        "layout": "expert_major",
        "dtype": "float4_e2m1fn_x2",
        "scale_format": "e4m3",
        "scales_per_row": 16,
    },
    "flat, many scales": {"scales_per_row": 320, "hidden": 320},
    "flat, no scales": {"scales_per_row": 0, "hidden": 48},
}


def experts(world: Any, cfg: cuep.GroupConfig, recv: cuep.Received, rows: np.ndarray) -> Any:
    """Rows times each expert's or rank's power of two."""
    offsets = None if recv.expert_offsets is None else to_host(world, recv.expert_offsets)
    factor = expert_factor(cfg, world.rank, world.size, (offsets, len(rows)))
    dtype = np.dtype(ml_dtypes.bfloat16) if cfg.combine_dtype == "bfloat16" else np.dtype(str(cfg.combine_dtype))
    with np.errstate(all="ignore"):
        return to_device(world, (rows * factor).astype(dtype))


def out_like(world: Any, recv: cuep.Received) -> Any:
    return world.backend.zeros(recv.tokens.shape, recv.tokens.dtype)


def check_padding(world: Any, recv: cuep.Received) -> None:
    """Values and scales of the rows between zones are 0."""
    offsets, counts = to_host(world, recv.expert_offsets), to_host(world, recv.expert_counts)
    tokens, scales = to_host(world, recv.tokens), to_host(world, recv.scales)
    for first, end, num_rows in zip(offsets, offsets[1:], counts, strict=False):
        assert not tokens[first + num_rows : end].view(np.uint8).any()
        assert not scales[first + num_rows : end].any()


@pytest.mark.parametrize("form", FORMS)
def test_quantised_while_sent(world: Any, form: str) -> None:
    """Routings anew and kept, ranks without tokens, into the handle's memory and into the caller's."""
    cfg = config("ht", quant="fp8_block128", **FORMS[form])
    with cuep.Group(world, cfg) as group:
        for seed, num_tokens in enumerate((cfg.max_tokens_per_rank, 0, 5, world.rank)):
            step = random_step(world, cfg, seed, num_tokens)
            handle = group.create_handle(to_device(world, step.topk_idx), to_device(world, step.topk_weights))
            recv = None
            for again in range(2):
                step.x = random_rows(cfg, world.rank, 50 * again + seed, num_tokens)
                case = Quantised(world, cfg, step)
                out = None if recv is None else out_like(world, recv)
                recv = handle.dispatch(to_device(world, step.x), out=out)
                assert (recv.tokens is out) == (out is not None)
                rows = case.check(world, recv)
                if cfg.zero_padding:
                    check_padding(world, recv)
                case.check_y(world, handle.combine(experts(world, cfg, recv, rows)))
                group.check()
            handle.close()
            del recv


@pytest.mark.parametrize("form", FORWARD)
def test_the_callers_rows(world: Any, form: str) -> None:
    cfg = config("ht", **({"quant": "forward", "dtype": "float8_e4m3fn"} | FORWARD[form]))
    with cuep.Group(world, cfg) as group:
        for seed, num_tokens in enumerate((cfg.max_tokens_per_rank, 0, 5, world.rank)):
            case = Forwarded(world, cfg, seed, num_tokens)
            step = case.step
            handle = group.create_handle(to_device(world, step.topk_idx), to_device(world, step.topk_weights))
            scales = None if case.scales is None else to_device(world, case.scales)
            recv = None
            for _ in range(2):
                out = None if recv is None else out_like(world, recv)
                recv = handle.dispatch(to_rows(world, cfg, step.x), scales, out=out)
                rows = case.values(case.check(world, recv))
                case.check_y(world, handle.combine(experts(world, cfg, recv, rows)))
                group.check()
            handle.close()
            del recv


def test_settings_and_scales_that_do_not_fit(world: Any) -> None:
    with pytest.raises(cuep.ArgumentError, match="scale_layout='column_major' is not allowed; .* with mode='ht'"):
        config("ht", quant="fp8_block128", scale_layout="column_major")
    cfg = config("ht", quant="forward", dtype="uint8")
    plain = config("ht", dtype="bfloat16")
    used, without = cuep.footprint(cfg, world.size), cuep.footprint(plain, world.size)
    rows = cfg.num_buffers * world.size * cfg.max_tokens_per_rank
    assert abs(without["symmetric"] - used["symmetric"] - rows * (512 - 272)) < 256  # regions are aligned
    with cuep.Group(world, cfg) as group:
        case = Forwarded(world, cfg, 1, 4)
        ids, weights = to_device(world, case.step.topk_idx), to_device(world, case.step.topk_weights)
        handle = group.create_handle(ids, weights)
        x, scales = to_rows(world, cfg, case.step.x), to_device(world, case.scales)
        recv = handle.dispatch(x, scales)
        for given, match in ((None, "scales: got None"), (recv.scales[:4], "scales lies in this handle's own")):
            with pytest.raises(cuep.ArgumentError, match=match):
                handle.dispatch(x, given)
        shifted = handle.dispatch(x, scales).tokens[1:]
        with pytest.raises(cuep.ArgumentError, match="out lies in this handle's own Received.tokens"):
            handle.dispatch(x, scales, out=shifted)
        for strange in (np.zeros(2), 1, None):
            with pytest.raises(cuep.ArgumentTypeError, match="send_only: got .*, allowed: True or False"):
                handle.dispatch(x, scales, send_only=strange)
        with pytest.raises(cuep.ArgumentError, match="send_only=True is not allowed with mode='ht'"):
            handle.dispatch(x, scales, send_only=True)
        case.check(world, handle.dispatch(x, scales))
        group.check()
