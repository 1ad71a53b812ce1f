"""Calls that are refused: the right error on this rank, PeerRefused on the others, and the next correct call works."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from harness import to_device, to_host
from moe import check_combined, check_received, config, expected, random_step, run_experts, run_step

import cuep

MODES = ["ll", "ht"]


def refused_on(world: Any, rank: int, error: type[Exception], match: str) -> Any:
    """What a collective call must raise where only `rank`'s arguments are wrong."""
    if world.rank == rank:
        return pytest.raises(error, match=match)
    return pytest.raises(cuep.PeerRefused, match=f"rank {rank} refused")


@pytest.mark.parametrize("mode", MODES)
def test_bad_routing_on_one_rank(world: Any, mode: str) -> None:
    """C11: one rank passes float ids. ll peers meet it at dispatch, the first operation on a routing."""
    bad = world.size - 1
    with cuep.Group(world, config(mode)) as group:
        step = random_step(world, group.cfg, 1, 5)
        ids, x = to_device(world, step.topk_idx), to_device(world, step.x)
        with refused_on(world, bad, cuep.ArgumentTypeError, "topk_idx has dtype float64, allowed: int32, int64"):
            if world.rank == bad:
                group.create_handle(to_device(world, step.topk_idx.astype(np.float64)))
            handle = group.create_handle(ids)
            if mode == "ll":
                handle.dispatch(x)
            group.check()
        run_step(world, group, step).close()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["shape", "dtype", "list"])
def test_bad_x_on_one_rank(world: Any, mode: str, kind: str) -> None:
    """C11: dispatch refused on one rank does nothing on any; the handles dispatch again at once."""
    with cuep.Group(world, config(mode)) as group:
        step = random_step(world, group.cfg, 2, 5)
        handle = group.create_handle(to_device(world, step.topk_idx), to_device(world, step.topk_weights))
        x = to_device(world, step.x)
        wrong = {"shape": x[:, :-1], "dtype": x.astype("float32"), "list": [1, 2, 3]}[kind]
        error = cuep.ArgumentError if kind == "shape" else cuep.ArgumentTypeError
        with refused_on(world, 0, error, "^x"):
            handle.dispatch(wrong if world.rank == 0 else x)
            group.check()
        with pytest.raises(cuep.OrderError, match="combine: this handle was not dispatched yet"):
            handle.combine(x)
        recv = handle.dispatch(x)
        check_received(world, group.cfg, recv, expected(world, group.cfg, step)[1])
        handle.combine(recv.tokens)
        group.check()


@pytest.mark.parametrize("mode", MODES)
def test_bad_expert_out_on_one_rank(world: Any, mode: str) -> None:
    """C11: combine refused on one rank; its handle must be dispatched again before it combines."""
    with cuep.Group(world, config(mode)) as group:
        step = random_step(world, group.cfg, 3, 5)
        handle = group.create_handle(to_device(world, step.topk_idx), to_device(world, step.topk_weights))
        for _ in range(3):
            recv = handle.dispatch(to_device(world, step.x))
            with refused_on(world, 0, cuep.ArgumentError, "expert_out has shape"):
                handle.combine(recv.tokens[..., :-8] if world.rank == 0 else recv.tokens)
                group.check()
            with pytest.raises(cuep.OrderError, match="combine: this handle was not dispatched yet"):
                handle.combine(recv.tokens)
        run_step(world, group, step, handle)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("mode", MODES)
def test_operations_behind_a_refused_one_do_nothing(world: Any, mode: str) -> None:
    """Peers had queued a combine when they learnt that the dispatch was refused: no epoch is lost."""
    if world.backend.name != "cpu":
        pytest.skip("a CuPy stream is as asynchronous as this test needs, but not slower than the host on purpose")
    stream = world.stream()
    with cuep.Group(world, config(mode)) as group:
        step = random_step(world, group.cfg, 4, 5)
        handle = group.create_handle(step.topk_idx, step.topk_weights, stream=stream)
        bad = step.x[:, :-1] if world.rank == 0 else step.x
        try:
            recv = handle.dispatch(bad, stream=stream)
            time.sleep(0.05 * world.rank)  # some learn it before they combine, some after
            handle.combine(recv.tokens, stream=stream)
            group.check()
        except (cuep.ArgumentError, cuep.PeerRefused, cuep.OrderError) as error:
            assert isinstance(error, cuep.ArgumentError) == (world.rank == 0)
        world.comm.barrier()
        run_step(world, group, step).close()


@pytest.mark.parametrize("mode", MODES)
def test_too_many_tokens(world: Any, mode: str) -> None:
    """A15: as many as declared work; one more on one rank is refused before anything is sent."""
    bad = min(2, world.size - 1)
    with cuep.Group(world, config(mode)) as group:
        run_step(world, group, random_step(world, group.cfg, 5, 20)).close()
        step = random_step(world, group.cfg, 6, 21 if world.rank == bad else 20)
        with refused_on(world, bad, cuep.ArgumentError, r"topk_idx has shape \[21, 2\], allowed: \[at most 20, 2\]"):
            handle = group.create_handle(to_device(world, step.topk_idx), to_device(world, step.topk_weights))
            handle.dispatch(to_device(world, step.x))
            group.check()
        run_step(world, group, random_step(world, group.cfg, 7, 20)).close()


@pytest.mark.parametrize("mode", MODES)
def test_order_of_calls(world: Any, mode: str) -> None:
    """C06: combine before dispatch, combine twice, a closed handle: refused on every rank, nothing is sent."""
    with cuep.Group(world, config(mode)) as group:
        step = random_step(world, group.cfg, 8, 5)
        handle = group.create_handle(to_device(world, step.topk_idx), to_device(world, step.topk_weights))
        with pytest.raises(cuep.OrderError, match="combine: this handle was not dispatched yet"):
            handle.combine(to_device(world, step.x))
        recv = handle.dispatch(to_device(world, step.x))
        handle.combine(recv.tokens)
        with pytest.raises(cuep.OrderError, match="combine: this handle was combined already"):
            handle.combine(recv.tokens)
        run_step(world, group, step, handle)
        handle.close()
        for call in (lambda: handle.dispatch(to_device(world, step.x)), lambda: handle.combine(recv.tokens)):
            with pytest.raises(cuep.ClosedError, match="this handle is closed"):
                call()
        other = run_step(world, group, step)
    with pytest.raises(cuep.ClosedError, match="this group is closed"):
        other.dispatch(to_device(world, step.x))


def test_receive_buffers_run_out(world: Any) -> None:
    """ht: num_buffers handles hold received rows; one more is refused on every rank, until one is closed."""
    with cuep.Group(world, config("ht", num_buffers=2)) as group:
        step = random_step(world, group.cfg, 9, 5)
        handles = [run_step(world, group, step) for _ in range(2)]
        third = group.create_handle(to_device(world, step.topk_idx), to_device(world, step.topk_weights))
        with pytest.raises(cuep.ArgumentError, match="all 2 receive buffers are held"):
            third.dispatch(to_device(world, step.x))
        handles[0].close()
        run_step(world, group, step, third)


@pytest.mark.ranks(2, 4)
def test_settings_that_differ(world: Any) -> None:
    """A14: every rank raises, naming the setting and the values; a correct group can be made at once."""
    for change in (
        {"max_tokens_per_rank": 32},
        {"num_experts": 16},
        {"hidden": 512},
        {"num_topk": 3},
        {"dtype": "float32"},
    ):
        cfg = config("ll", **(change if world.rank == 1 else {}))
        name, value = next(iter(change.items()))
        with pytest.raises(cuep.SettingsMismatch, match=f"{name}: .*{value}"):
            cuep.Group(world, cfg)
    with pytest.raises(cuep.SettingsMismatch, match="mode: "):
        cuep.Group(world, config("ll" if world.rank else "ht"))
    with cuep.Group(world, config("ll")) as group:
        run_step(world, group, random_step(world, group.cfg, 1, 5))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("num_experts", [10, 2])
def test_experts_must_divide(world: Any, num_experts: int) -> None:
    """A11: refused on every rank with both numbers."""
    with pytest.raises(cuep.ArgumentError, match=f"{num_experts} experts on 4 ranks"):
        cuep.Group(world, config("ll", num_experts=num_experts))


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("mode", MODES)
def test_a_missing_rank_is_named(world: Any, mode: str) -> None:
    """C11: one rank skips an operation; the others get PeerTimeout with its number and can close alone."""
    if world.backend.name == "cuda" and mode == "ht":
        pytest.skip("symmetric memory of a broken group is leaked; once is enough on a GPU")
    group = cuep.Group(world, config(mode, timeout_s=1.0))
    step = random_step(world, group.cfg, 1, 5)
    begin = time.monotonic()
    if world.rank != 1:
        with pytest.raises(cuep.PeerTimeout, match=r"waited more than 1 s for the .*rank 1"):
            handle = group.create_handle(to_device(world, step.topk_idx))
            handle.dispatch(to_device(world, step.x))
            group.check()
        assert time.monotonic() - begin < 6
        with pytest.raises(cuep.ClosedError, match="broke down"):
            group.create_handle(to_device(world, step.topk_idx))
    world.comm.barrier()
    if world.rank == 1:
        with pytest.raises(cuep.PeerTimeout, match="close: this group broke down on ranks"):
            group.close()
    else:
        group.close()
    with cuep.Group(world, config(mode)) as group:  # all ranks are there: the next one works
        run_step(world, group, step)


def test_nothing_is_wrong_with_nan(world: Any) -> None:
    """Values are carried, not looked at: NaN, infinities, subnormals and -0 keep their bits."""
    with cuep.Group(world, config("ht", hidden=64, dtype="float32")) as group:
        step = random_step(world, group.cfg, 1, 4, masked=0.0)
        step.x[:, 4:9] = [np.nan, np.inf, -np.inf, -0.0, 2.0**-140]
        handle = group.create_handle(to_device(world, step.topk_idx), to_device(world, step.topk_weights))
        recv = handle.dispatch(to_device(world, step.x))
        check_received(world, group.cfg, recv, expected(world, group.cfg, step)[1])
        handle.combine(recv.tokens)
        group.check()


def test_duplicates_that_do_not_fit(world: Any) -> None:
    """A04, A07: ll: a zone holds max_tokens_per_rank rows of each rank; more, by ids named twice, is refused on all."""
    with cuep.Group(world, config("ll")) as group:
        step = random_step(world, group.cfg, 1, 20, masked=0.0)
        if world.rank == 0:
            step.topk_idx[:11] = 3  # 22 rows for expert 3, or more
        handle = group.create_handle(to_device(world, step.topk_idx))
        with refused_on(world, 0, cuep.ArgumentError, "names an expert more than max_tokens_per_rank=20 times"):
            handle.dispatch(to_device(world, step.x))
            group.check()
        run_step(world, group, random_step(world, group.cfg, 2, 20), handle)


@pytest.mark.parametrize("is_queued", [False, True])
def test_an_expert_out_that_is_too_short(world: Any, is_queued: bool) -> None:
    """C02: ht: fewer rows than were received are refused on every rank; only the device knows how many there are."""
    with cuep.Group(world, config("ht")) as group:
        stream = world.stream() if is_queued else None
        step = random_step(world, group.cfg, 1, 8, masked=0.0)
        handle = group.create_handle(to_device(world, step.topk_idx), stream=stream)
        recv = handle.dispatch(to_device(world, step.x), stream=stream)
        with refused_on(
            world,
            0,
            cuep.ArgumentError,
            r"expert_out or row_weight_grads has fewer rows than the \d+ that were received",
        ):
            handle.combine(recv.tokens[:1] if world.rank == 0 else recv.tokens, stream=stream)
            group.check()
        run_step(world, group, step, handle)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("kind", ["foreign bytes", "own tokens", "stream"])
def test_more_bad_arguments_of_dispatch(world: Any, mode: str, kind: str) -> None:
    """C02: arrays of foreign byte order, x inside what dispatch writes, something that is no stream."""
    if kind == "foreign bytes" and world.backend.name == "cuda":
        pytest.skip("CuPy has no arrays of foreign byte order")
    with cuep.Group(world, config(mode, dtype="float32")) as group:
        step = random_step(world, group.cfg, 2, 4)
        ids, x = to_device(world, step.topk_idx), to_device(world, step.x)
        handle = run_step(world, group, step)
        own = handle.dispatch(x).tokens.reshape(-1, group.cfg.hidden)[:4]
        match = {"foreign bytes": "foreign byte order", "own tokens": "x lies in this handle", "stream": "stream"}[kind]
        with refused_on(world, 0, (cuep.ArgumentError, cuep.ArgumentTypeError), match):
            wrong = {"foreign bytes": lambda: x.astype(">f4"), "own tokens": lambda: own, "stream": lambda: x}[kind]
            if world.rank == 0:
                handle.dispatch(wrong(), stream=object() if kind == "stream" else None)
            else:
                handle.dispatch(x)
            group.check()
        handle.update(ids)
        run_step(world, group, step, handle)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mode", MODES)
def test_late_news_of_a_refusal_shifts_no_steps(world: Any, mode: str) -> None:
    """Rank 1 queues a whole step before it can learn that rank 0's part was refused; later steps stay in step."""
    with cuep.Group(world, config(mode)) as group:
        stream = world.stream()
        for number in range(4):
            step = random_step(world, group.cfg, number, 5)
            is_bad = number == 1 and world.rank == 0
            try:
                handle = group.create_handle(to_device(world, step.topk_idx), stream=stream)
                recv = handle.dispatch(to_device(world, step.x[:, : -8 if is_bad else None]), stream=stream)
                handle.combine(recv.tokens, stream=stream)
            except cuep.ArgumentError:
                assert is_bad
            if number == 1 and world.rank == 1:
                continue  # never checked: the news is still there at the next check
            if number == 2 and world.rank == 1:
                with pytest.raises(cuep.PeerRefused, match="dispatch: rank 0 refused"):
                    group.check()
            else:
                group.check()
            if number != 1:
                step.topk_weights = None
                check_received(world, group.cfg, recv, expected(world, group.cfg, step)[1])
            handle.close()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("mode", MODES)
def test_a_broken_group_sends_no_more(world: Any, mode: str) -> None:
    """E16: what was queued behind a wait that timed out must not write over what a late peer has yet to read."""
    group = cuep.Group(world, config(mode, timeout_s=1.0, num_buffers=4))
    steps = [random_step(world, group.cfg, number, 5) for number in range(3)]
    steps[0].topk_weights = None
    want = expected(world, group.cfg, steps[0])[1]
    stream = world.stream()
    handles = [group.create_handle(to_device(world, steps[0].topk_idx), stream=stream) for _ in steps]
    with pytest.raises(cuep.PeerTimeout):
        if world.rank == 0:
            for handle, step in zip(handles, steps, strict=True):
                handle.dispatch(to_device(world, step.x), stream=stream)
        else:
            time.sleep(2)
            recv = handles[0].dispatch(to_device(world, steps[0].x), stream=stream)
            stream.synchronize()
            if not group.report.has_timed_out:  # then it must be right
                check_received(world, group.cfg, recv, want)
                handles[1].dispatch(to_device(world, steps[1].x), stream=stream)
        group.check()
    world.comm.barrier()
    group.close()


def test_a_refused_call_between_two_alike(world: Any) -> None:
    """What a refused dispatch(out=) or combine(bias=) had set is not there at the next good call."""
    with cuep.Group(world, config("ll")) as group:
        step = random_step(world, group.cfg, 1, 5)
        handle = group.create_handle(to_device(world, step.topk_idx), to_device(world, step.topk_weights))
        x = to_device(world, step.x)
        inputs, want = expected(world, group.cfg, step)
        for _ in range(3):
            recv = handle.dispatch(x)
            answers = run_experts(group.cfg, world, recv)
        own = handle.arrays["tokens"]
        out = world.backend.zeros(own.shape, own.dtype)
        inside = out.reshape(-1, group.cfg.hidden)[3 : 3 + len(step.x)]
        with pytest.raises(cuep.ArgumentError, match="x lies in out"):
            handle.dispatch(inside, out=out)
        own[...] = float("nan")
        world.backend.synchronize()
        check_received(world, group.cfg, handle.dispatch(x), want)
        assert not to_host(world, out).any()
        handle.combine(answers)
        handle.dispatch(x)
        y = handle.combine(answers)
        handle.dispatch(x)
        with pytest.raises(cuep.ArgumentError, match="bias has shape"):
            handle.combine(answers, bias=y[:1])
        handle.dispatch(x)
        check_combined(world, group.cfg, step, inputs, handle.combine(answers))
        group.check()
