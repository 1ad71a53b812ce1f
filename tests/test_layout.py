"""Settings, shapes and byte counts, without any device."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

import cuep
from cuep import jit, layout
from cuep.backend.cpu import CpuBackend

MIB = 2**20


def config(**changes: Any) -> cuep.GroupConfig:
    settings: dict[str, Any] = {
        "mode": "ll",
        "num_experts": 256,
        "hidden": 7168,
        "num_topk": 8,
        "max_tokens_per_rank": 128,
    }
    return cuep.GroupConfig(**(settings | changes))


def test_low_latency_arena_is_small() -> None:
    """256 experts, 8 ranks, 128 tokens, 7168, bfloat16; peers need 938 MiB and more."""
    assert cuep.footprint(config(), 8)["symmetric"] < 62 * MIB
    for change in ({"reduce": "per_rank"}, {"layout": "rank_major"}):
        assert cuep.footprint(config(**change), 8)["symmetric"] < 54 * MIB


@pytest.mark.parametrize("mode", ["ll", "ht"])
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_footprint_is_linear(mode: str, num_ranks: int) -> None:
    """P01: twice the tokens or hidden size take about twice the memory, whatever the ranks."""
    small, more_tokens, wider = (
        cuep.footprint(config(mode=mode, **change), num_ranks)
        for change in ({}, {"max_tokens_per_rank": 256}, {"hidden": 14336})
    )
    for kind in ("symmetric", "handle"):
        assert 1.9 * small[kind] <= more_tokens[kind] <= 2.01 * small[kind] + 4096
        assert small[kind] < wider[kind] <= 2.01 * small[kind] + 4096


@pytest.mark.parametrize("mode", ["ll", "ht"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_footprint_is_what_is_requested(mode: str, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """P01: the sums of what a group and a handle ask the backend for, to the byte."""
    requested = {"symmetric": 0, "allocator": 0}
    symmetric, allocators = CpuBackend.symmetric, {name: getattr(CpuBackend, name) for name in ("zeros", "empty")}

    def counted_symmetric(self: CpuBackend, num_bytes: int) -> Any:
        requested["symmetric"] += num_bytes
        return symmetric(self, num_bytes)

    def counted(name: str) -> Any:
        def allocate(self: CpuBackend, shape: Any, dtype: Any, allocator: Any = None) -> Any:
            array = allocators[name](self, shape, dtype, allocator)
            requested["allocator"] += array.nbytes
            return array

        return allocate

    monkeypatch.setattr(CpuBackend, "symmetric", counted_symmetric)
    for name in allocators:
        monkeypatch.setattr(CpuBackend, name, counted(name))
    cfg = config(mode=mode, dtype=dtype, num_experts=8, hidden=264, num_topk=3, max_tokens_per_rank=10)
    want = cuep.footprint(cfg, 1)
    with cuep.init(backend="cpu") as world, cuep.Group(world, cfg) as group:
        assert requested == {"symmetric": want["symmetric"], "allocator": want["workspace"]}
        group.create_handle(np.zeros((2, 3), np.int32))
        assert requested["allocator"] == want["workspace"] + want["handle"]


@pytest.mark.parametrize("mode", ["ll", "ht"])
def test_regions_do_not_overlap(mode: str) -> None:
    for num_ranks in (1, 3, 8):
        arena = layout.arena(config(mode=mode, num_experts=24, max_tokens_per_rank=13), num_ranks)
        end = 0
        for name, region in arena.regions.items():
            assert arena.offsets[name] >= end and arena.offsets[name] % layout.ALIGNMENT == 0
            end = arena.offsets[name] + region.num_bytes
        assert end <= arena.num_bytes


@pytest.mark.parametrize(
    "change,match",
    [
        ({"mode": "fast"}, "mode='fast' is not allowed; allowed: 'll' or 'ht'"),
        ({"layout": "flat"}, r"layout='flat' is not allowed; allowed: \('expert_major', 'rank_major'\) with mode='ll'"),
        ({"hidden": 7}, "hidden=7 is not allowed; .*a multiple of 8 with bfloat16"),
        ({"num_topk": 33}, "num_topk=33 is not allowed; allowed: a whole number from 1 to 32"),
        ({"num_topk": True}, "num_topk=True"),
        ({"num_experts": 0}, "num_experts=0"),
        ({"max_tokens_per_rank": 2.5}, "max_tokens_per_rank=2.5"),
        ({"dtype": "float64"}, "dtype='float64'"),
        ({"mode": ["ll"]}, "mode="),
        ({"variants": None}, "variants=None"),
        ({"variants": {"dispach": "direct"}}, "variants="),
        ({"num_buffers": 2.0}, "num_buffers=2.0"),
        ({"max_tokens_per_rank": 2**62}, "max_tokens_per_rank="),
        ({"timeout_s": True}, "timeout_s=True"),
        ({"zero_padding": True}, "zero_padding=True is not allowed; allowed: False with mode='ll'"),
        ({"mode": "ht", "zero_padding": True}, "zero_padding=True is not allowed; .*False with .*layout='flat'"),
        ({"mode": "ht", "layout": "expert_major", "zero_padding": 1}, "zero_padding=1 is not allowed; .*True or False"),
        ({"num_buffers": 3}, "num_buffers=3 is not allowed; allowed: 1, 2, 4 or 8"),
        ({"timeout_s": -1}, "timeout_s=-1"),
        ({"num_sms": 0}, "num_sms=0"),
    ],
)
def test_settings_are_checked(change: dict[str, Any], match: str) -> None:
    with pytest.raises(cuep.ArgumentError, match=match):
        config(**change)


def test_fields_that_do_not_exist_are_refused() -> None:
    with pytest.raises(TypeError, match="mask_ranks"):
        config(mask_ranks=True)


def test_footprint_needs_a_split_of_experts() -> None:
    with pytest.raises(cuep.ArgumentError, match="256 experts on 3 ranks"):
        cuep.footprint(config(), 3)
    for num_ranks in (64, 0, -1, 1.0, True, None):
        with pytest.raises(cuep.ArgumentError, match="num_ranks="):
            cuep.footprint(config(), num_ranks)
    with pytest.raises(cuep.ArgumentError, match="max_tokens_per_rank=16777216 is too large"):
        cuep.footprint(config(max_tokens_per_rank=2**24), 8)


def test_numpy_numbers_are_numbers() -> None:
    cfg = config(num_experts=np.int64(256), hidden=np.int32(7168), timeout_s=np.float32(2), mask=np.bool_(True))
    assert cfg.mask is True
    same = config(timeout_s=2.0, mask=True)
    assert cfg == same and hash(cfg) == hash(same)


def test_unknown_variants_are_named() -> None:
    with cuep.init(backend="cpu") as world:
        cfg = config(num_experts=8, hidden=64, num_topk=2, max_tokens_per_rank=4, variants={"dispatch": "magic"})
        with pytest.raises(cuep.ArgumentError, match=r"variants\['dispatch'\]='magic' is not allowed; .*direct"):
            cuep.Group(world, cfg)


def test_every_variant_says_what_it_serves() -> None:
    """Where an operation has several kernel files, each names its form: else it is offered for any."""
    names = [name for name in jit.kernel_names() if name.count("_") == 2]
    operations = [name.rpartition("_")[0] for name in names]
    for name, operation in zip(names, operations, strict=True):
        source = (jit.KERNELS_DIR / f"{name}.cu").read_text()
        assert operations.count(operation) == 1 or re.search(r"^// serves: ", source, re.MULTILINE), name
    assert jit.variants("ll_dispatch", {"layout": "rank_major", "in_place": 0}) == ["direct", "line"]
    assert jit.variants("ll_dispatch", {"layout": "rank_major", "in_place": 1}) == ["direct"]
    assert jit.variants("ht_combine", {"layout": "flat", "reduce": "per_rank"}) == ["copy", "pull", "push"]
