"""GroupConfig.in_place: rows that peers put where the caller reads them, on either backend."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from harness import planted_bug, to_device, to_host, verdict_comm
from moe import check_combined, check_received, config, expected, random_step, run_experts, run_step
from test_quant import Quantised, quant_config, random_rows

import cuep
from cuep import reference


def in_place_config(**changes: Any) -> cuep.GroupConfig:
    return config("ll", **({"layout": "rank_major", "in_place": 1} | changes))


def arrays_of(world: Any, step: Any) -> tuple[Any, Any, Any]:
    return to_device(world, step.topk_idx), to_device(world, step.topk_weights), to_device(world, step.x)


@pytest.mark.parametrize(
    "changes", [{}, {"in_place": 3, "num_buffers": 1}, {"max_tokens_per_rank": 5}, {"dtype": "float32", "hidden": 68}]
)
def test_steps(world: Any, changes: dict[str, Any]) -> None:
    """Handles in place and others, more steps than banks, few tokens and none, routings anew and kept."""
    with cuep.Group(world, in_place_config(**changes)) as group:
        most = group.cfg.max_tokens_per_rank
        handles: list[Any] = [None, None]
        for number, num_tokens in enumerate((most, 0, 3, 1, most, 2)):
            for which in (0, 1):
                step = random_step(world, group.cfg, 10 * number + which, num_tokens if world.rank else most)
                handles[which] = run_step(world, group, step, handles[which])
        inside = group.arena.offsets["in_place"] + group.memory.address
        end = inside + group.arena.regions["in_place"].num_bytes
        addresses = [inside <= handle.addresses["tokens"] < end for handle in handles]
        assert addresses == [True, group.cfg.in_place > 1]


@pytest.mark.parametrize("scale_format", ["fp32", "ue8m0"])
def test_scales_lie_behind_the_values(world: Any, scale_format: str) -> None:
    cfg = quant_config("rank_major", in_place=1, scale_format=scale_format)
    with cuep.Group(world, cfg) as group:
        step = random_step(world, cfg, 1, 9)
        step.x = random_rows(cfg, world.rank, 1, 9)
        case = Quantised(world, cfg, step)
        ids, weights, x = arrays_of(world, step)
        handle = group.create_handle(ids, weights)
        for is_staged in (False, True):
            recv = handle.dispatch(x, send_only=is_staged)
            recv = handle.complete() if is_staged else recv
            assert recv.tokens.strides[1] == recv.scales.strides[1] == cfg.sent_row_bytes
            case.check_y(world, handle.combine(case.experts(world, case.check(world, recv))))
        group.check()


def test_out_takes_them_away(world: Any) -> None:
    """On one rank only: the others need not know."""
    with cuep.Group(world, in_place_config()) as group:
        step = random_step(world, group.cfg, 2, 11)
        ids, weights, x = arrays_of(world, step)
        handle = group.create_handle(ids, weights)
        own = handle.arrays["tokens"]
        out = world.backend.empty(own.shape, own.dtype) if world.rank == 0 else None
        recv = handle.dispatch(x, out=out)
        assert (recv.tokens is out) == (world.rank == 0)
        inputs, want = expected(world, group.cfg, step)
        check_received(world, group.cfg, recv, want)
        y = handle.combine(run_experts(group.cfg, world, recv))
        group.check()
        check_combined(world, group.cfg, step, inputs, y)
        with pytest.raises(cuep.ArgumentError, match=r"x lies in this handle's own Received\.tokens"):
            handle.dispatch(own[0, :11], out=world.backend.empty(own.shape, own.dtype))
        own_rows = to_device(world, to_host(world, own))
        handle.dispatch(x)
        for name, given in (("out", {"out": own[0, :11]}), ("bias", {"bias": own[0, :11]})):
            with pytest.raises(
                cuep.ArgumentError, match=f"{name} lies in this handle's own Received.tokens, which peers"
            ):
                handle.combine(own_rows, **given)
            handle.dispatch(x)
        handle.combine(own_rows)
        group.check()


def dispatch_twice(world: Any, group: cuep.Group) -> Any:
    """The first rank is slow to read what the first dispatch brought; the others have begun the second by then, which
    brings other rows. No combine tells that they were read. Returns what the first rank read, and was to read."""
    first, second = (random_step(world, group.cfg, seed, 12, masked=0) for seed in (3, 4))
    second.topk_idx, second.topk_weights = first.topk_idx, first.topk_weights
    ids, weights, x = arrays_of(world, first)
    stream = world.stream()
    handle = group.create_handle(ids, weights, stream=stream)
    again = to_device(world, second.x)
    recv = handle.dispatch(x, stream=stream)
    world.backend.stream(stream).synchronize()
    verdict_comm().Barrier()
    read = None
    if world.rank == 0:
        time.sleep(0.3)
        read = to_host(world, recv.tokens, stream).copy()
    recv = handle.dispatch(again, stream=stream)
    world.backend.stream(stream).synchronize()
    group.check()
    _, want = expected(world, group.cfg, first)
    _, then = expected(world, group.cfg, second)
    check_received(world, group.cfg, recv, then)
    return read, want


@pytest.mark.ranks(2, 4)
def test_rows_hold_until_the_next_dispatch(world: Any) -> None:
    with cuep.Group(world, in_place_config()) as group:
        read, want = dispatch_twice(world, group)
        if read is not None:
            rows = read.reshape(-1, group.cfg.hidden)[want.row_idx]
            reference.assert_same(rows, want.tokens, "tokens")


@pytest.mark.ranks(2, 4)
def test_a_sender_that_does_not_wait_is_found(world: Any, monkeypatch: Any) -> None:
    wrong = ("ll_dispatch.cuh", "if (!is_in_place(p) || !is_unread) return true;", "return true;")
    file, right, bug = wrong
    with (
        planted_bug(world, monkeypatch, f"include/cuep/{file}", right, bug),
        cuep.Group(world, in_place_config()) as group,
    ):
        read, want = dispatch_twice(world, group)
        is_found = False
        if read is not None:
            rows = read.reshape(-1, group.cfg.hidden)[want.row_idx]
            is_found = reference.first_difference(rows, want.tokens) is not None
        assert verdict_comm().bcast(is_found)


def test_refusals(world: Any) -> None:
    """A refused dispatch, update or combine: what was there is given up, and the next calls work on all ranks."""
    with cuep.Group(world, in_place_config()) as group:
        step = random_step(world, group.cfg, 5, 7)
        handle = run_step(world, group, step)
        ids, weights, x = arrays_of(world, step)
        for number, call in enumerate(("dispatch", "update")):
            handle.dispatch(x)
            group.check()
            with pytest.raises((cuep.ArgumentError, cuep.PeerRefused)):
                if call == "update":
                    handle.update(ids[:, :1] if world.rank == 0 else ids, weights)
                handle.dispatch(x[:, 1:] if world.rank == 0 else x)
                group.check()
            step = random_step(world, group.cfg, 60 + number, 5)
            run_step(world, group, step, handle)
            ids, weights, x = arrays_of(world, step)


def test_settings_that_do_not_fit(world: Any) -> None:
    for changes, match in (
        ({"layout": "expert_major"}, "in_place=1 is not allowed; allowed: 0 with mode='ll', layout='expert_major'"),
        ({"in_place": 65}, "in_place=65 is not allowed; allowed: a whole number from 0 to 64"),
        ({"in_place": "all"}, "in_place='all' is not allowed"),
        ({"mask": True}, "in_place=1 is not allowed; allowed: 0 with mask=True"),
        ({"quant": "fp8_block128", "scale_layout": "column_major"}, "in_place=1 is not allowed; allowed: 0 with scale"),
    ):
        with pytest.raises(cuep.ArgumentError, match=match):
            in_place_config(**changes)
    with pytest.raises(cuep.ArgumentError, match="variants.*line"):
        cuep.Group(world, in_place_config(max_tokens_per_rank=4, variants={"dispatch": "line"}))
    flags = {"dispatch": "direct", "combine": "partial"}  # as rows in place have
    cfg, plain = in_place_config(in_place=2, variants=flags), in_place_config(in_place=0, variants=flags)
    used, unused = cuep.footprint(cfg, world.size), cuep.footprint(plain, world.size)
    rows = int(np.prod((world.size, 20, cfg.row_bytes)))
    assert used["handle"] == unused["handle"] == used["in_place_handle"] + rows and unused["in_place_handle"] == 0
    assert used["symmetric"] >= unused["symmetric"] + 2 * rows
