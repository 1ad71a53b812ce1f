"""High throughput, every form: layouts, capacity, counts on the device, rows into the caller's array, bias, gradients.

What must come out is worked out here row by row, from all ranks' inputs, without the oracle's vectorised code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import pickle
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from harness import examples, planted_bug, to_device, to_host
from hypothesis import strategies as st
from moe import Step, config, random_step, tagged_rows

import cuep
from cuep import env, layout, reference
from cuep.backend import cpu_stream
from cuep.bench.workload import scale

FORMS: dict[str, dict[str, Any]] = {
    "flat": {"layout": "flat"},
    "flat_global": {"layout": "flat", "expert_ids": "global", "combine_dtype": "float32"},
    "pulled": {"layout": "flat", "variants": {"combine": "pull"}},
    "copied": {"layout": "flat", "variants": {"combine": "copy"}},
    "fetched": {"layout": "flat", "variants": {"dispatch": "copy", "combine": "copy"}, "expert_ids": "global"},
    "expert_major": {"layout": "expert_major"},
    "aligned": {"layout": "expert_major", "alignment": 8, "combine_dtype": "float16", "zero_padding": True},
    "odd": {
        "layout": "expert_major",
        "alignment": 3,
        "num_experts": 16,
        "hidden": 264,
        "num_topk": 5,
        "dtype": "float32",
        "num_buffers": 1,
    },
}


@pytest.fixture(scope="module")
def groups(world: Any) -> Iterator[Any]:
    """Groups by their settings, made at first use and kept for the module."""
    made: dict[str, cuep.Group] = {}

    def get(form: str, **changes: Any) -> cuep.Group:
        key = repr((form, sorted(changes.items())))
        if key not in made:
            made[key] = cuep.Group(world, config("ht", **(FORMS[form] | changes)))
        return made[key]

    yield get
    for group in made.values():
        group.close()


@dataclass
class Row:
    """One row of Received.tokens."""

    at: int  # its index; negative: left out
    rank: int  # that receives it
    expert: int  # local; -1: flat
    source: tuple[int, ...]


class Expected:
    """Where every row of a step goes, and what comes back, from all ranks' inputs."""

    def __init__(self, world: Any, cfg: cuep.GroupConfig, step: Step) -> None:
        self.world, self.cfg = world, cfg
        parts = world.comm.allgather((step.topk_idx, step.topk_weights, step.x))
        self.ids = [np.where((ids >= 0) & (ids < cfg.num_experts), ids, -1) for ids, _, _ in parts]
        self.weights = [np.ones(ids.shape, np.float32) if w is None else w for ids, w, _ in parts]
        self.x = [x for _, _, x in parts]
        self.num_local = cfg.num_experts // world.size
        self.max_rows = layout.max_recv_rows(cfg, world.size)
        self.offsets = np.zeros((world.size, self.num_local + 1), np.int64)  # as if there was room
        find = self._flat_rows if cfg.layout == "flat" else self._zone_rows
        self.rows = [find(rank) for rank in range(world.size)]
        self.at = {(row.rank, *row.source): row.at for rows in self.rows for row in rows}

    def _flat_rows(self, rank: int) -> list[Row]:
        owned = [(ids // self.num_local == rank).any(1) for ids in self.ids]
        sources = [(src, int(token)) for src, is_here in enumerate(owned) for token in np.flatnonzero(is_here)]
        return [Row(i if i < self.max_rows else -1, rank, -1, source) for i, source in enumerate(sources)]

    def _zone_rows(self, rank: int) -> list[Row]:
        rows, at = [], 0
        for local in range(self.num_local):
            self.offsets[rank, local] = at
            for src, ids in enumerate(self.ids):
                for token, k in np.argwhere(ids == rank * self.num_local + local):
                    source = (src, int(token), int(k))
                    rows.append(Row(at if at < self.max_rows else -1, rank, local, source))
                    at += 1
            at += -at % self.cfg.alignment
        self.offsets[rank, -1] = at
        return rows

    @property
    def kept(self) -> list[Row]:
        return [row for row in self.rows[self.world.rank] if row.at >= 0]

    def needed(self) -> list[int]:
        """Rows that each rank must have."""
        return [int(self.offsets[r, -1]) or len(rows) for r, rows in enumerate(self.rows)]

    def check_received(self, recv: Any) -> None:
        world, cfg, rank = self.world, self.cfg, self.world.rank
        have = {name: to_host(world, getattr(recv, name)) for name in ("tokens", "source", "expert_counts", "total")}
        assert have["total"][0] == len(self.rows[rank])
        counts, by_source = np.zeros(self.num_local, int), np.zeros((self.num_local, world.size), int)
        for row in self.kept:
            src, token = row.source[:2]
            reference.assert_same(have["tokens"][row.at], self.x[src][token], f"row {row.at}")
            assert tuple(have["source"][row.at]) == row.source
            if cfg.layout == "flat":
                by_source[0, src] += 1
                mine = self.ids[src][token] // self.num_local == rank
                counts += np.bincount(self.ids[src][token][mine] % self.num_local, minlength=self.num_local)
            else:
                by_source[row.expert, src] += 1
                counts[row.expert] += 1
        assert (have["expert_counts"] == counts).all()
        src_rank_counts = to_host(world, recv.src_rank_counts)
        if cfg.layout == "flat":
            assert (src_rank_counts == by_source[0]).all()
            self._check_ids(recv)
        else:
            assert (src_rank_counts == by_source).all()
            offsets = np.minimum(self.offsets[rank], self.max_rows)
            assert (to_host(world, recv.expert_offsets) == offsets).all()
            if cfg.zero_padding:
                is_padding = np.arange(offsets[-1])
                for first, num_rows in zip(offsets, counts, strict=False):
                    is_padding[first : first + num_rows] = -1
                assert not have["tokens"][is_padding[is_padding >= 0]].astype(np.float32).any()

    def _check_ids(self, recv: Any) -> None:
        ids, first = to_host(self.world, recv.topk_idx), self.world.rank * self.num_local
        for row in self.kept:
            src, token = row.source
            mine = self.ids[src][token] // self.num_local == self.world.rank
            numbered = self.ids[src][token] - (0 if self.cfg.expert_ids == "global" else first)
            assert (ids[row.at] == np.where(mine, numbered, -1)).all()
            if recv.topk_weights is not None:
                weights = np.where(mine, self.weights[src][token], 0)
                assert (to_host(self.world, recv.topk_weights)[row.at] == weights).all()
        assert (ids[len(self.kept) :] == -1).all()

    def factor(self, row: Row) -> np.float32:
        """What a row's expert, or its rank, multiplies it by."""
        number = row.rank if row.expert < 0 else row.rank * self.num_local + row.expert
        return np.float32(scale(np.array(number)))

    def expert_out(self, num_rows: int) -> np.ndarray:
        out = np.full((num_rows, self.cfg.hidden), np.nan, np.float32).astype(self.dtype)
        for row in self.kept:
            out[row.at] = self.answer(row)
        return out

    @property
    def dtype(self) -> Any:
        return layout.dtype_of(self.cfg.combine_dtype)

    def answer(self, row: Row) -> np.ndarray:
        src, token = row.source[:2]
        return (self.x[src][token].astype(np.float32) * self.factor(row)).astype(self.dtype)

    def y(self, bias: tuple[np.ndarray, ...] = (), is_weighted: bool = True) -> np.ndarray:
        rank, (num_tokens, hidden) = self.world.rank, self.x[self.world.rank].shape
        y = np.zeros((num_tokens, hidden), np.float32)
        for rows in self.rows:
            partial = np.zeros_like(y)
            for row in sorted((row for row in rows if row.at >= 0 and row.source[0] == rank), key=lambda r: r.source):
                token = row.source[1]
                answer = self.answer(row).astype(np.float32)
                if self.cfg.layout == "expert_major" and is_weighted:
                    answer = self.weights[rank][token, row.source[2]] * answer
                partial[token] += answer
            y += partial.astype(self.dtype).astype(np.float32)
        for added in bias:
            y += added.astype(np.float32)
        return y.astype(self.dtype)

    def row_grads(self, num_rows: int) -> np.ndarray:
        """A number for each row (and k, flat) that says where it comes from."""
        shape = (num_rows, self.cfg.num_topk) if self.cfg.layout == "flat" else (num_rows,)
        grads = np.full(shape, np.nan, np.float32)
        for row in self.kept:
            grads[row.at] = self.grad(row, np.arange(self.cfg.num_topk))
        return grads

    def grad(self, row: Row, k: np.ndarray) -> Any:
        src, token = row.source[:2]
        number = 1 + row.rank * 1e4 + src * 1e3 + token * 32
        return number + k if len(row.source) == 2 else number + row.source[2]

    def weight_grads(self) -> np.ndarray:
        rank, ids = self.world.rank, self.ids[self.world.rank]
        grads = np.zeros(ids.shape, np.float32)
        for row in (row for rows in self.rows for row in rows if row.at >= 0 and row.source[0] == rank):
            token = row.source[1]
            if len(row.source) == 2:
                mine = ids[token] // self.num_local == row.rank
                grads[token, mine] = self.grad(row, np.arange(self.cfg.num_topk))[mine]
            else:
                grads[token, row.source[2]] = self.grad(row, np.arange(1))
        return grads


def routed(world: Any, group: cuep.Group, step: Step, handle: Any = None, num_tokens: Any = None) -> Any:
    ids = to_device(world, step.topk_idx)
    weights = None if step.topk_weights is None else to_device(world, step.topk_weights)
    if handle is None:
        return group.create_handle(ids, weights, num_tokens=num_tokens)
    handle.update(ids, weights, num_tokens=num_tokens)
    return handle


def poison(world: Any, handle: Any, recv: Any) -> None:
    """recv's topk_idx is left alone: that rows beyond the count stay -1 is cuep's own promise."""
    recv.tokens[...] = float("nan")
    recv.source[...] = 777
    handle.arrays["y"][...] = float("nan")
    handle.arrays["weight_grads"][...] = float("nan")
    world.backend.synchronize()


def expert_out(world: Any, handle: Any, rows: np.ndarray, *, is_in_buffer: bool) -> Any:
    """rows on the device, where combine pulls and is_in_buffer in the handle's combine buffer."""
    on_device = to_device(world, rows)
    if not (is_in_buffer and layout.is_pulled(handle.group.cfg)):
        return on_device
    buffer = handle.combine_buffer()
    buffer[: len(rows)] = on_device
    world.backend.synchronize()
    return buffer


def run_form(world: Any, group: cuep.Group, step: Step, handle: Any = None, with_all: bool = False) -> Any:
    """create_handle or update, dispatch twice, combine; all compared. with_all: bias, gradients, own arrays."""
    handle = routed(world, group, step, handle)
    x = to_device(world, step.x)
    poison(world, handle, handle.dispatch(x))
    want = Expected(world, group.cfg, step)
    out = y_out = None
    bias: tuple[np.ndarray, ...] = ()
    grads = None
    if with_all:
        num_rows = min(max(want.needed()[world.rank], 1), want.max_rows)
        wide = np.full((num_rows, 2 * group.cfg.hidden), np.nan, np.float32)
        out = to_device(world, wide.astype(layout.dtype_of(group.cfg.dtype)))[:, : group.cfg.hidden]
        shape = step.x.shape
        rng = np.random.default_rng(world.rank)
        bias = tuple(rng.standard_normal(shape).astype(np.float32).astype(want.dtype) for _ in range(2))
        y_out = to_device(world, np.full((shape[0], 2 * shape[1]), np.nan, np.float32).astype(want.dtype))
        y_out = y_out[:, : shape[1]]
        grads = to_device(world, want.row_grads(num_rows))
    recv = handle.dispatch(x, out=out)
    want.check_received(recv)
    combined = handle.combine(
        expert_out(world, handle, want.expert_out(recv.tokens.shape[0]), is_in_buffer=not with_all),
        bias=tuple(to_device(world, b) for b in bias),
        row_weight_grads=grads,
        out=y_out,
    )
    y, weight_grads = combined if with_all else (combined, None)
    group.check()
    reference.assert_same(to_host(world, y), want.y(bias), "y")
    if with_all:
        reference.assert_same(to_host(world, weight_grads), want.weight_grads(), "weight_grads")
    return handle


@pytest.mark.ranks(1, 2, 4, 8)
@pytest.mark.parametrize("form", FORMS)
@examples(
    6,
    seed=st.integers(0, 10_000),
    tokens=st.lists(st.integers(0, 16), min_size=8, max_size=8),
    masked=st.sampled_from([0.0, 0.3, 1.0]),
    with_all=st.booleans(),
    has_weights=st.booleans(),
)
def test_random_steps(
    world: Any,
    groups: Any,
    form: str,
    seed: int,
    tokens: list[int],
    masked: float,
    with_all: bool,
    has_weights: bool,
) -> None:
    group = groups(form)
    step = random_step(world, group.cfg, seed, tokens[world.rank], masked)
    if not has_weights:
        step.topk_weights = None
    run_form(world, group, step, with_all=with_all).close()


@pytest.mark.parametrize("form", FORMS)
def test_duplicates(world: Any, groups: Any, form: str) -> None:
    """A07: the same expert twice in a token's list."""
    group = groups(form)
    step = random_step(world, group.cfg, 1, 9, 0.0)
    step.topk_idx[:, 1] = step.topk_idx[:, 0]
    step.topk_idx[3:6] = 1
    run_form(world, group, step, with_all=True).close()


@pytest.mark.parametrize("form", FORMS)
def test_weights_of_one(world: Any, groups: Any, form: str) -> None:
    """topk_weights=None at combine: every weight counts as 1."""
    group = groups(form)
    step = random_step(world, group.cfg, 2, 7)
    handle = routed(world, group, step)
    recv = handle.dispatch(to_device(world, step.x))
    want = Expected(world, group.cfg, step)
    y = handle.combine(to_device(world, want.expert_out(recv.tokens.shape[0])), topk_weights=None)
    group.check()
    reference.assert_same(to_host(world, y), want.y(is_weighted=False), "y")
    handle.close()


@pytest.mark.parametrize("dtype", ["int32", "int64"])
@pytest.mark.parametrize("form", ["flat", "aligned", "fetched"])
def test_token_counts_on_the_device(world: Any, groups: Any, form: str, dtype: str) -> None:
    """The rows behind num_tokens are nobody's: their ids may be anything."""
    group = groups(form)
    handle = None
    for number, count in enumerate((0, 5, 12, 3)):
        step = random_step(world, group.cfg, number, 12, 0.1)
        step.topk_idx[count:] = 10_000
        step.x[count:] = np.nan
        num_tokens = to_device(world, np.array(count, dtype))
        handle = routed(world, group, step, handle, num_tokens)
        num_tokens[...] = 99  # it was read
        recv = handle.dispatch(to_device(world, step.x))
        want = Expected(world, group.cfg, Step(step.topk_idx[:count], step.topk_weights[:count], step.x[:count]))
        want.check_received(recv)
        handle.arrays["y"][...] = float("nan")
        y = handle.combine(to_device(world, want.expert_out(recv.tokens.shape[0])))
        group.check()
        reference.assert_same(to_host(world, y)[:count], want.y(), "y")
        assert np.isnan(to_host(world, y)[count:].astype(np.float32)).all()
    handle.close()


@pytest.mark.parametrize("count", [-1, 13])
@pytest.mark.parametrize("form", ["flat", "aligned", "fetched"])
def test_a_bad_token_count(world: Any, groups: Any, form: str, count: int) -> None:
    """The last rank's count is wrong: all ranks refuse, and the next routing works."""
    group = groups(form)
    step = random_step(world, group.cfg, 3, 12)
    is_bad = world.rank == world.size - 1
    error = cuep.ArgumentError if is_bad else cuep.PeerRefused
    with pytest.raises(
        error, match="num_tokens on the device was not between" if is_bad else f"rank {world.size - 1} refused"
    ):
        routed(world, group, step, None, to_device(world, np.array(count if is_bad else 12)))
        group.check()
    run_form(world, group, step).close()


@pytest.mark.parametrize("form", FORMS)
def test_gradients_on_some_ranks_only(world: Any, groups: Any, form: str) -> None:
    """Every rank refuses; the next step works."""
    group = groups(form)
    step = random_step(world, group.cfg, 4, 6)
    if world.size > 1:
        handle = routed(world, group, step)
        recv = handle.dispatch(to_device(world, step.x))
        want = Expected(world, group.cfg, step)
        out = to_device(world, want.expert_out(recv.tokens.shape[0]))
        grads = to_device(world, want.row_grads(recv.tokens.shape[0])) if world.rank == 0 else None
        with pytest.raises(cuep.ArgumentError, match="row_weight_grads was given on some ranks"):
            handle.combine(out, row_weight_grads=grads)
            group.check()
        handle.close()
    run_form(world, group, step, with_all=True).close()


@pytest.mark.parametrize("form", ["flat", "aligned", "fetched"])
def test_rows_of_out(world: Any, groups: Any, form: str) -> None:
    """As many rows as were received are enough; one less on one rank is refused on all."""
    group = groups(form)
    cfg = group.cfg
    step = random_step(world, cfg, 5, 12, 0.0)
    handle = routed(world, group, step)
    want = Expected(world, cfg, step)
    needed = want.needed()[world.rank]
    x = to_device(world, step.x)
    dtype = layout.dtype_of(cfg.dtype)
    short = to_device(world, np.zeros((needed - (world.rank == 0), cfg.hidden), dtype))
    with pytest.raises(cuep.ArgumentError if world.rank == 0 else cuep.PeerRefused):
        handle.dispatch(x, out=short)
        group.check()
    exact = to_device(world, np.zeros((needed, cfg.hidden), dtype))
    recv = handle.dispatch(x, out=exact)
    want.check_received(recv)
    y = handle.combine(to_device(world, want.expert_out(needed)))
    group.check()
    reference.assert_same(to_host(world, y), want.y(), "y")
    handle.close()


@pytest.mark.parametrize("form", ["flat", "aligned", "fetched"])
def test_an_out_without_rows(world: Any, groups: Any, monkeypatch: Any, form: str) -> None:
    """Arrays without elements have no address in torch and CuPy. Such an out is refused where rows come, else fine."""
    group = groups(form)
    dtype = layout.dtype_of(group.cfg.dtype)
    empty = to_device(world, np.zeros((0, group.cfg.hidden), dtype))
    view = group.view

    def without_address(array: Any, name: str, **kwargs: Any) -> Any:
        found = view(array, name, **kwargs)
        return dataclasses.replace(found, address=0) if array is empty else found

    monkeypatch.setattr(group, "view", without_address)
    for num_tokens in (6, 0):
        step = random_step(world, group.cfg, 5, num_tokens, 0.0)
        handle = routed(world, group, step)
        want = Expected(world, group.cfg, step)
        with contextlib.ExitStack() as stack:
            if num_tokens:
                stack.enter_context(pytest.raises((cuep.ArgumentError, cuep.PeerRefused)))
            recv = handle.dispatch(to_device(world, step.x), out=empty)
            group.check()
            want.check_received(recv)
            assert recv.tokens is empty
        handle.close()


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("form", ["flat", "pulled", "aligned", "copied"])
def test_gradients_without_rows(world: Any, groups: Any, monkeypatch: Any, form: str) -> None:
    """A rank that received nothing has gradients all the same, at no address."""
    group = groups(form)
    cfg, view = group.cfg, group.view

    def without_address(array: Any, name: str, **kwargs: Any) -> Any:
        found = view(array, name, **kwargs)
        return dataclasses.replace(found, address=0) if 0 in found.shape else found

    monkeypatch.setattr(group, "view", without_address)
    step = random_step(world, cfg, 5, 6, 0.0)
    step.topk_idx %= cfg.num_experts // world.size  # all to rank 0
    handle = routed(world, group, step)
    want = Expected(world, cfg, step)
    num_rows = want.needed()[world.rank]
    assert (num_rows == 0) == (world.rank > 0)
    handle.dispatch(to_device(world, step.x))
    grads = to_device(world, want.row_grads(num_rows))
    y, weight_grads = handle.combine(to_device(world, want.expert_out(num_rows)), row_weight_grads=grads)
    group.check()
    reference.assert_same(to_host(world, y), want.y(), "y")
    reference.assert_same(to_host(world, weight_grads), want.weight_grads(), "weight_grads")
    handle.close()


@pytest.mark.parametrize("form", ["flat", "aligned"])
def test_receive_buffers(world: Any, groups: Any, form: str) -> None:
    """Two handles hold both buffers; out= needs a free one for its launch; release() gives one back."""
    group = groups(form)
    step = random_step(world, group.cfg, 6, 8)
    want = Expected(world, group.cfg, step)
    x = to_device(world, step.x)
    out = to_device(world, np.zeros((want.max_rows, group.cfg.hidden), layout.dtype_of(group.cfg.dtype)))
    handles = [routed(world, group, step) for _ in range(3)]
    for handle in handles:  # one buffer serves them all
        want.check_received(handle.dispatch(x, out=out))
    received = [handle.dispatch(x) for handle in handles[:2]]
    with pytest.raises(cuep.ArgumentError, match="all 2 receive buffers are held"):
        handles[2].dispatch(x, out=out)
    received[0].release()
    third = handles[2].dispatch(x)
    want.check_received(third)
    want.check_received(received[1])
    with pytest.raises(cuep.ArgumentError, match="all 2 receive buffers are held"):
        handles[0].dispatch(x)
    third.release()
    want.check_received(handles[0].dispatch(x))
    for handle in handles:
        handle.close()
    group.check()


def test_who_holds_a_receive_buffer(world: Any, groups: Any) -> None:
    """Not a handle whose newest dispatch was into the caller's array, or did nothing and had taken it."""
    group = groups("flat", num_buffers=1)
    step = random_step(world, group.cfg, 6, 8)
    want = Expected(world, group.cfg, step)
    x = to_device(world, step.x)
    out = to_device(world, np.zeros((want.max_rows, group.cfg.hidden), layout.dtype_of(group.cfg.dtype)))
    first, second = (routed(world, group, step) for _ in range(2))
    first.dispatch(x)
    want.check_received(first.dispatch(x, out=out))
    received = second.dispatch(x)
    want.check_received(received)
    with pytest.raises(cuep.ArgumentError, match="all 1 receive buffers are held"):
        first.dispatch(x, out=out)
    received.release()
    if world.size > 1:
        is_bad = world.rank == world.size - 1
        with pytest.raises(cuep.ArgumentError if is_bad else cuep.PeerRefused):
            first.dispatch(x[:1] if is_bad else x)
            group.check()
        want.check_received(second.dispatch(x))  # not held by the one that was refused
        with pytest.raises(cuep.ArgumentError if is_bad else cuep.PeerRefused):
            second.dispatch(x[:1] if is_bad else x)
            group.check()
        with pytest.raises(cuep.ArgumentError, match="all 1 receive buffers are held"):
            first.dispatch(x)  # but by the one that received before
    first.close()
    second.close()
    group.check()


@pytest.mark.ranks(2)
def test_receive_buffers_of_what_did_nothing(world: Any, groups: Any) -> None:
    """A dispatch, and a combine, queued behind an update that a peer refuses: the buffer is free again, but one that
    holds rows of before stays."""
    group, stream = groups("flat", num_buffers=1), world.stream()
    step = random_step(world, group.cfg, 6, 8)
    want = Expected(world, group.cfg, step)
    ids, x = to_device(world, step.topk_idx), to_device(world, step.x)
    weights = None if step.topk_weights is None else to_device(world, step.topk_weights)
    out = to_device(world, want.expert_out(want.max_rows))
    for has_rows in (False, True):
        handle, other = (group.create_handle(ids, weights, stream=stream) for _ in range(2))
        if has_rows:
            handle.dispatch(x, stream=stream)
            handle.combine(out, stream=stream)
        if world.rank == 0:
            with pytest.raises(cuep.ArgumentError, match="topk_idx"):
                handle.update(ids[:, :1], weights, stream=stream)
        else:
            handle.update(ids, weights, stream=stream)
            if not has_rows:
                handle.dispatch(x, stream=stream)
                handle.combine(out, stream=stream)
            with pytest.raises(cuep.PeerRefused, match="rank 0 refused"):
                group.check()
        with pytest.raises(cuep.ArgumentError, match="1 receive buffers") if has_rows else contextlib.nullcontext():
            want.check_received(other.dispatch(x))
        group.check()
        handle.close()
        other.close()


@pytest.mark.ranks(2, 4)
def test_combine_buffers(world: Any, groups: Any) -> None:
    """Who holds one: a handle from asking until its next combine. What lies elsewhere is copied into a free one."""
    group = groups("pulled")
    step = random_step(world, group.cfg, 6, 8)
    want = Expected(world, group.cfg, step)
    rows = to_device(world, want.expert_out(want.max_rows))
    handles = [routed(world, group, step) for _ in range(3)]

    def dispatch(handle: Any) -> None:
        handle.dispatch(to_device(world, step.x)).release()

    def combine(handle: Any, given: Any) -> None:
        y = handle.combine(given)
        group.check()
        reference.assert_same(to_host(world, y), want.y(), "y")

    def fill(handle: Any) -> Any:
        buffer = handle.combine_buffer()
        buffer[...] = rows
        world.backend.synchronize()
        return buffer

    first, second = fill(handles[0]), fill(handles[1])
    assert first.shape == rows.shape and handles[0].combine_buffer() is not None
    with pytest.raises(cuep.ArgumentError, match="combine_buffer: all 2 combine buffers are held"):
        handles[2].combine_buffer()
    for given, problem in ((rows, "must be copied, but all 2 combine buffers are held"), (first, "another handle")):
        dispatch(handles[2])
        with pytest.raises(cuep.ArgumentError, match=problem):
            handles[2].combine(given)
    few, grads = first[: len(step.x)], first.view("float32").reshape(-1)[: want.max_rows * group.cfg.num_topk]
    forbidden = {"out": few, "bias": few, "row_weight_grads": grads.reshape(want.max_rows, group.cfg.num_topk)}
    for name, given in forbidden.items():
        dispatch(handles[0])
        with pytest.raises(cuep.ArgumentError, match=f"{name} lies in a combine buffer"):
            handles[0].combine(rows, **{name: given})
    dispatch(handles[0])
    combine(handles[0], first)
    dispatch(handles[2])
    combine(handles[2], rows)  # copied, into what the first gave back
    first = fill(handles[0])
    dispatch(handles[0])
    combine(handles[0], rows)  # into its own
    dispatch(handles[1])
    combine(handles[1], second)
    dispatch(handles[1])
    combine(handles[1], second)  # nobody took it: it holds what it held
    mine = fill(handles[1])
    mine[0], mine[1:] = float("nan"), rows[:-1]
    world.backend.synchronize()
    dispatch(handles[1])
    combine(handles[1], mine[1:])  # copied into another
    for handle in handles:
        handle.close()
    one = groups("pulled", num_buffers=1)
    handles = [routed(world, one, step) for _ in range(2)]
    first = fill(handles[0])
    handles[0].close()
    second = fill(handles[1])  # given back by close
    handles[1].dispatch(to_device(world, step.x))
    with pytest.raises(cuep.ArgumentError, match="a part of the only combine buffer that is free"):
        handles[1].combine(second[1:])  # rows may not be copied over themselves
    handles[1].close()
    one.check()


@pytest.mark.ranks(2, 4)
def test_combine_buffers_that_graphs_use(world: Any, groups: Any, monkeypatch: Any) -> None:
    """A handle holds them for good: what it asked for in a capture, and what a captured combine copied into."""
    if world.backend.name != "cpu":
        pytest.skip("tests with graphs: test_gpu_forms.py")
    group, stream = groups("pulled", num_buffers=4), world.stream()
    step = random_step(world, group.cfg, 6, 8)
    want = Expected(world, group.cfg, step)
    rows = want.expert_out(want.max_rows)
    asking, sending, copying, other = (routed(world, group, step) for _ in range(4))
    is_capturing = False
    monkeypatch.setattr(type(world.backend.stream(stream)), "is_capturing", lambda _: is_capturing)
    for handle in (asking, sending, copying):
        handle.dispatch(step.x, stream=stream).release()
    sent = sending.combine_buffer(stream=stream)
    is_capturing = True
    asked = asking.combine_buffer(stream=stream)  # the rest of its combine is not captured
    sending.combine(sent, stream=stream)
    copying.combine(rows, stream=stream)
    is_capturing = False
    world.backend.synchronize()
    for handle, given in ((asking, asked), (sending, sent), (copying, rows)):
        given[...] = rows
        handle.dispatch(step.x, stream=stream).release()
        y = handle.combine(given, stream=stream)
        group.check()
        reference.assert_same(y, want.y(), "y")
    last = other.combine_buffer(stream=stream)
    assert not np.shares_memory(last, asked) and not np.shares_memory(last, sent)
    with pytest.raises(cuep.ArgumentError, match="all 4 combine buffers are held"):
        routed(world, group, step).combine_buffer(stream=stream)
    other.dispatch(step.x, stream=stream).release()
    with pytest.raises(cuep.ArgumentError, match="combine buffer that another handle, or a graph, holds"):
        other.combine(sent, stream=stream)
    for handle in (asking, sending, copying, other):
        handle.close()
    handles = [routed(world, group, step) for _ in range(4)]
    assert len({handle.combine_buffer().ctypes.data for handle in handles}) == 4  # all are back
    for handle in handles:
        handle.close()
    group.check()


def run_on(stream: Any, group: cuep.Group, handle: Any, step: Step, want: Expected) -> None:
    """dispatch and combine on a stream of the CPU, compared."""
    recv = handle.dispatch(step.x, stream=stream)
    y = handle.combine(want.expert_out(want.max_rows), stream=stream)
    group.check()
    want.check_received(recv)
    reference.assert_same(y, want.y(), "y")


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("form", ["copied", "fetched"])
def test_copies_of_another_routing(world: Any, groups: Any, monkeypatch: Any, form: str) -> None:
    """Sizes that a graph holds are not those of the routing: refused. Eager calls ask again."""
    if world.backend.name != "cpu":
        pytest.skip("tests with graphs: test_gpu_forms.py")
    group, stream = groups(form), world.stream()
    steps = [random_step(world, group.cfg, number, 6 + number, 0.0) for number in range(3)]
    wants = [Expected(world, group.cfg, step) for step in steps]
    outs = [want.expert_out(want.max_rows) for want in wants]
    is_capturing = False
    monkeypatch.setattr(type(world.backend.stream(stream)), "is_capturing", lambda _: is_capturing)

    def update(handle: Any, number: int) -> None:
        handle.update(steps[number].topk_idx, steps[number].topk_weights, stream=stream)

    def run(number: int) -> None:
        run_on(stream, group, handle, steps[number], wants[number])

    handle = group.create_handle(steps[0].topk_idx, steps[0].topk_weights, stream=stream)
    is_capturing = True
    with pytest.raises(cuep.OrderError, match="must know how many rows go where"):
        handle.dispatch(steps[0].x, stream=stream)
        handle.combine(outs[0], stream=stream)
    is_capturing = False
    handle.num_recv_tokens()
    is_capturing = True
    handle.dispatch(steps[0].x, stream=stream)
    handle.combine(outs[0], stream=stream)
    update(handle, 1)
    handle.dispatch(steps[1].x, stream=stream)  # fetched: refused
    handle.combine(outs[1], stream=stream)  # copied: refused
    is_capturing = False
    with pytest.raises(cuep.OrderError, match="as many rows as an earlier routing of this handle had"):
        group.check()
    run(1)
    is_capturing = True
    update(handle, 2)
    is_capturing = False
    run(2)
    handle.close()


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("form", ["copied", "fetched"])
def test_copies_where_a_graph_routes(world: Any, groups: Any, monkeypatch: Any, form: str) -> None:
    """Each of its replays may route anew, also after an eager update, and the host asks again."""
    if world.backend.name != "cpu":
        pytest.skip("launches by hand what a graph would")
    group, stream = groups(form), world.backend.stream(world.stream())
    steps = [random_step(world, group.cfg, number, 8, 0.3) for number in range(3)]
    wants = [Expected(world, group.cfg, step) for step in steps]
    ids, weights = steps[0].topk_idx.copy(), np.array(steps[0].topk_weights)
    is_capturing = False
    monkeypatch.setattr(type(stream), "is_capturing", lambda _: is_capturing)

    def load(number: int) -> None:
        stream.synchronize()
        ids[...], weights[...] = steps[number].topk_idx, steps[number].topk_weights

    def replay(number: int) -> None:
        load(number)
        group.mode._route.launch(handle.state.route, stream)

    def run(number: int) -> None:
        run_on(stream, group, handle, steps[number], wants[number])

    handle = group.create_handle(ids, weights, stream=stream)
    run(0)
    is_capturing = True
    handle.update(ids, weights, stream=stream)
    is_capturing = False
    replay(1)
    run(1)
    load(2)
    handle.update(ids, weights, stream=stream)
    run(2)
    replay(1)
    run(1)
    replay(0)
    assert handle.num_recv_tokens() == wants[0].needed()[world.rank]
    is_capturing = True  # with what num_recv_tokens() has learnt
    recv = handle.dispatch(steps[0].x, stream=stream)
    is_capturing = False
    group.check()
    wants[0].check_received(recv)
    handle.close()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("is_update_refused", [False, True])
def test_refusals_that_are_told_late(world: Any, is_update_refused: bool) -> None:
    """Of what was before an update: they say nothing of the routing that the handle has, or has not, since."""
    stream = world.stream()
    with cuep.Group(world, config("ht", max_recv_tokens_per_rank=8, **FORMS["flat"])) as group:
        many, few = (random_step(world, group.cfg, number, number, 0.0) for number in (10, 3))
        ids, weights, x = (to_device(world, array) for array in (few.topk_idx, few.topk_weights, few.x))
        if is_update_refused:  # by rank 1, after a dispatch that rank 0 refuses
            handle = group.create_handle(ids, weights, stream=stream)
            with contextlib.nullcontext() if world.rank else pytest.raises(cuep.ArgumentError, match="x has shape"):
                handle.dispatch(x if world.rank else x[:1], stream=stream)
            with pytest.raises(cuep.ArgumentError, match="topk_idx") if world.rank else contextlib.nullcontext():
                handle.update(ids if world.rank == 0 else ids[:, :1], weights, stream=stream)
        else:  # after a routing for which there is no room
            handle = group.create_handle(
                *(to_device(world, a) for a in (many.topk_idx, many.topk_weights)), stream=stream
            )
            handle.update(ids, weights, stream=stream)
        if world.rank == 1:
            with pytest.raises(cuep.CuepError):
                group.check()
        if is_update_refused:
            with pytest.raises(cuep.OrderError if world.rank else cuep.PeerRefused):
                handle.dispatch(x, stream=stream)
                group.check()
            handle.update(ids, weights, stream=stream)
        recv = handle.dispatch(x, stream=stream)
        with contextlib.suppress(cuep.CuepError):
            group.check()
        group.check()
        Expected(world, group.cfg, few).check_received(recv)


def test_copies_of_strided_rows(world: Any, groups: Any) -> None:
    group = groups("copied")
    step = random_step(world, group.cfg, 6, 8)
    want = Expected(world, group.cfg, step)
    rows = want.expert_out(want.max_rows)
    wide = np.full((len(rows), 2 * group.cfg.hidden), np.nan, np.float32).astype(rows.dtype)
    wide[:, : group.cfg.hidden] = rows
    handle = routed(world, group, step)
    handle.dispatch(to_device(world, step.x))
    y = handle.combine(to_device(world, wide)[:, : group.cfg.hidden])
    group.check()
    reference.assert_same(to_host(world, y), want.y(), "y")
    handle.close()


def test_fewer_rows_than_are_to_be_copied(world: Any, groups: Any) -> None:
    """Nothing behind the end of expert_out or the gradients is read; every rank refuses, and the next step works."""
    group = groups("copied")
    step = random_step(world, group.cfg, 6, 8, 0.0)
    want = Expected(world, group.cfg, step)
    needed = want.needed()[world.rank]
    rows, grads = to_device(world, want.expert_out(needed)), to_device(world, want.row_grads(needed))
    handle = routed(world, group, step)
    for are_rows_short in (True, False):
        handle.dispatch(to_device(world, step.x))
        short = slice(None, -1 if world.rank == 0 else None)
        error, text = (cuep.ArgumentError, "fewer rows") if world.rank == 0 else (cuep.PeerRefused, "rank 0 refused")
        with pytest.raises(error, match=text):
            handle.combine(
                rows[short] if are_rows_short else rows, row_weight_grads=grads if are_rows_short else grads[short]
            )
            group.check()
    run_form(world, group, step, handle, with_all=True).close()


@pytest.mark.ranks(2, 4)
def test_a_combine_lasts_as_long_as_its_copies(world: Any, groups: Any, monkeypatch: Any) -> None:
    """In stream order; and what they read is kept until a kernel behind them is over."""
    if world.backend.name != "cpu":
        pytest.skip("needs copies that are slow")
    group, stream = groups("copied"), world.stream()
    step = random_step(world, group.cfg, 6, 8, 0.0)
    want = Expected(world, group.cfg, step)
    handle = group.create_handle(step.topk_idx, step.topk_weights, stream=stream)
    recv = handle.dispatch(step.x, stream=stream)
    rows = want.expert_out(len(recv.tokens))
    group.check()
    num_running = 0

    def slow_copy(to: Any, source: Any) -> None:
        nonlocal num_running
        num_running += 1
        time.sleep(0.02)
        copy_rows(to, source)
        num_running -= 1

    copy_rows = cpu_stream._copy_rows
    if world.rank == 0:
        monkeypatch.setattr(cpu_stream, "_copy_rows", slow_copy)
    kept = weakref.ref(rows)
    y = handle.combine(rows, stream=stream)
    del rows
    handle.event.synchronize()
    assert num_running == 0
    assert kept() is not None  # the kernel may have been over before
    group.check()
    gc.collect()
    assert kept() is None
    reference.assert_same(y, want.y(), "y")
    handle.close()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("form", "file", "start", "num_combines"),
    [
        # what it makes next of its combine buffer may be what the slow peer reads
        ("pulled", "ht_combine_pull.cu", "const uint32_t lane_total = lane_idx()", 1),
        # its next combine was queued already, and copies over that
        ("copied", "ht_combine_copy.cu", "Arrived arrived(lane_total);", 2),
    ],
)
def test_a_rank_that_gives_up_while_it_is_read(
    world: Any, monkeypatch: Any, form: str, file: str, start: str, num_combines: int
) -> None:
    """Both learn of it."""
    slow = "if (p.rank == 1) for (const uint64_t end = now_ns() + 4000000000ull; now_ns() < end;) relax();\n    "
    if world.backend.name != "cpu":
        pytest.skip("needs kernels with a bug in them")
    with planted_bug(world, monkeypatch, file, start, slow + start):
        group = cuep.Group(world, config("ht", timeout_s=1.0, **FORMS[form]))
        step = random_step(world, group.cfg, 3, 4, 0.0)
        stream = world.stream()
        handles = [group.create_handle(step.topk_idx, step.topk_weights, stream=stream) for _ in range(num_combines)]
        for handle in handles:
            rows = Expected(world, group.cfg, step).expert_out(handle.dispatch(step.x, stream=stream).tokens.shape[0])
            handle.num_recv_tokens()
        for handle in handles:
            handle.combine(rows, stream=stream)
        problem = (
            "waited more than 1 s" if world.rank == 0 else "rank 0 gave up while rank 1 was still reading its rows"
        )
        with pytest.raises(cuep.PeerTimeout, match=problem):
            group.check()
        world.comm.barrier()
        group.abandon()


def test_received_can_be_pickled(world: Any, groups: Any) -> None:
    if world.backend.name != "cpu":
        pytest.skip("GPU arrays are the array library's to pickle")
    step = random_step(world, groups("flat").cfg, 6, 8)
    handle = routed(world, groups("flat"), step)
    recv = handle.dispatch(step.x)
    copy = pickle.loads(pickle.dumps(recv))
    reference.assert_same(copy.tokens, recv.tokens, "tokens")
    copy.release()
    with pytest.raises(cuep.ClosedError, match="the handle that received this is gone"):
        _ = copy.event
    Expected(world, groups("flat").cfg, step).check_received(recv)
    handle.close()


def lopsided(world: Any, cfg: cuep.GroupConfig, num_tokens: int) -> Step:
    """Every token to two experts of rank 0, half of them to others, too."""
    step = random_step(world, cfg, 7, num_tokens, 0.0)
    step.topk_idx[:, 0] = np.arange(num_tokens) % (cfg.num_experts // world.size)
    return step


@pytest.mark.parametrize("form", ["flat", "pulled", "expert_major", "aligned", "fetched"])
def test_capacity(world: Any, groups: Any, form: str) -> None:
    """C07, A16: exactly enough rows are enough; one (or one aligned piece) less is refused, or rows are left out."""
    cfg = groups(form).cfg
    step = lopsided(world, cfg, 12)
    most = max(Expected(world, cfg, step).needed())
    enough = groups(form, max_recv_tokens_per_rank=most)
    run_form(world, enough, step, with_all=True).close()

    less = most - cfg.alignment
    refusing = groups(form, max_recv_tokens_per_rank=less)
    with pytest.raises(cuep.ArgumentError, match=f"rank . would receive {most} rows.*max_recv_tokens_per_rank={less}"):
        routed(world, refusing, step)
        refusing.check()
    few = lopsided(world, cfg, 2)
    run_form(world, refusing, few).close()

    for num_rows in (less, max(cfg.alignment, most // 2 // cfg.alignment * cfg.alignment), cfg.alignment):
        dropping = groups(form, max_recv_tokens_per_rank=num_rows, overflow="drop")
        handle = run_form(world, dropping, step)
        handle = run_form(world, dropping, step, handle, with_all=True)
        handle = run_form(world, dropping, few, handle)
        handle.close()


@pytest.mark.parametrize("form", FORMS)
def test_the_worst_case_fits(world: Any, groups: Any, form: str) -> None:
    """C07: all tokens of all ranks to one expert, K times; then to all experts of one rank."""
    group = groups(form)
    step = random_step(world, group.cfg, 8, group.cfg.max_tokens_per_rank, 0.0)
    step.topk_idx[...] = 1
    handle = run_form(world, group, step)
    step.topk_idx[...] = np.arange(step.topk_idx.size).reshape(step.topk_idx.shape) % (
        group.cfg.num_experts // world.size
    )
    run_form(world, group, step, handle, with_all=True).close()


def test_footprint(world: Any, groups: Any) -> None:
    """What a group and a handle hold is what footprint says."""
    for form in FORMS:
        group = groups(form)
        handle = routed(world, group, random_step(world, group.cfg, 9, 3))
        told = cuep.footprint(group.cfg, world.size)
        assert told["handle"] == sum(array.nbytes for array in handle.arrays.values())
        assert told["workspace"] == sum(array.nbytes for array in group.workspace.values())
        assert handle.combine_buffer().shape == layout.combine_shape(group.cfg, world.size)
        assert told["combine_buffer"] == (0 if form == "pulled" else handle.combine_buffer().nbytes)
        handle.close()


NUM_SEEDS = int(os.environ.get("CUEP_TEST_SEEDS", "50"))
SEEDS_TO_FIND = 300
ALMOST_WRAPPED = 2**32 - 3


@pytest.fixture
def shuffled(world: Any, monkeypatch: Any) -> Iterator[Any]:
    """Sets the seed of the scheduler, and how late copies of rows come; back to what CUEP_SEED says afterwards."""
    if world.backend.name != "cpu":
        pytest.skip("only the CPU backend has a scheduler to shuffle")
    copy_rows, rng = cpu_stream._copy_rows, np.random.default_rng(world.rank)

    def late_copy(to: Any, source: Any) -> None:
        if rng.random() < 0.05:
            time.sleep(rng.random() * 1e-2)
        copy_rows(to, source)

    monkeypatch.setattr(cpu_stream, "_copy_rows", late_copy)
    yield world.backend.set_seed
    world.backend.set_seed(env.seed(), env.delay_level())


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("form", ["flat", "pulled", "aligned", "dropping", "copied", "fetched"])
def test_shuffled_schedules(world: Any, shuffled: Any, monkeypatch: Any, form: str) -> None:
    """Across the wrap of epochs, steps with few and many tokens, with and without all that combine can do."""
    monkeypatch.setenv("CUEP_START_EPOCH", str(ALMOST_WRAPPED))
    settings = FORMS["aligned"] | {"max_recv_tokens_per_rank": 16, "overflow": "drop"}
    settings = settings if form == "dropping" else FORMS[form]
    for seed in range(1, NUM_SEEDS // 4 + 1):
        shuffled(seed, seed % 4)
        rng = np.random.default_rng(seed)
        with cuep.Group(world, config("ht", max_tokens_per_rank=6, **settings)) as group:
            handle = None
            for number in range(5):
                counts = rng.integers(0, 7, world.size)
                step = random_step(world, group.cfg, 10 * seed + number, int(counts[world.rank]))
                handle = run_form(world, group, step, handle, with_all=bool(rng.integers(2)))
            handle.close()


class Rounds:
    """One routing and four rounds of rows; knows every rank's part, so that checking needs no other rank."""

    def __init__(self, world: Any, cfg: cuep.GroupConfig, seed: int, num_tokens: int) -> None:
        self.steps: list[Step] = []
        self.wants: list[Expected] = []
        for number in range(4):
            step = random_step(world, cfg, seed, num_tokens, masked=0.0)
            step.x = tagged_rows(world.rank, num_tokens, cfg.hidden, number, cfg.dtype)
            self.steps.append(step)
            self.wants.append(Expected(world, cfg, step))

    def outs_like(self, received: list[Any]) -> list[np.ndarray]:
        return [want.expert_out(recv.tokens.shape[0]) for want, recv in zip(self.wants, received, strict=True)]


def queued(world: Any, group: cuep.Group, rounds: Rounds, with_out: bool | None) -> None:
    """Four handles, all dispatches and then all combines queued at once, so that fast ranks run into slow ones.

    with_out: None: on odd ranks only.
    """
    stream = world.stream()
    handles, received, combined = [], [], []
    for step in rounds.steps:
        handles.append(group.create_handle(step.topk_idx, step.topk_weights, stream=stream))
    for handle, step, want in zip(handles, rounds.steps, rounds.wants, strict=True):
        has_out = world.rank % 2 == 1 if with_out is None else with_out
        out = np.full((want.max_rows, group.cfg.hidden), np.nan, step.x.dtype) if has_out else None
        received.append(handle.dispatch(step.x, out=out, stream=stream))
    outs = rounds.outs_like(received)
    for handle, want, out in zip(handles, rounds.wants, outs, strict=True):
        grads = want.row_grads(len(out))
        combined.append(handle.combine(out, row_weight_grads=grads, stream=stream))
    group.check()
    for handle, recv, (y, weight_grads), want in zip(handles, received, combined, rounds.wants, strict=True):
        want.check_received(recv)
        reference.assert_same(y, want.y(), "y")
        reference.assert_same(weight_grads, want.weight_grads(), "weight_grads")
        handle.close()


def first_failing_seed(
    world: Any, shuffled: Any, settings: dict[str, Any], with_out: bool | None
) -> tuple[int, str] | None:
    """The first seed under which a rank sees wrong data or an error; the same answer on every rank."""
    for seed in range(1, SEEDS_TO_FIND + 1):
        shuffled(seed, 3)
        group = cuep.Group(world, config("ht", timeout_s=1.0, max_tokens_per_rank=8, num_buffers=4, **settings))
        rounds = Rounds(world, group.cfg, seed, (8, 1, 0)[seed % 3])
        problem = None
        try:
            queued(world, group, rounds, with_out)
        except (cuep.CuepError, AssertionError) as error:
            problem = str(error) or "wrong counts"
        found = [text for text in world.comm.allgather(problem) if text is not None]
        if found:
            group.abandon()
            return seed, found[0]
        group.close()
    return None


PULLED, COPIED, FETCHED = FORMS["pulled"], FORMS["copied"], FORMS["fetched"]
EXPERT_MAJOR: dict[str, Any] = {"layout": "expert_major", "alignment": 4, "zero_padding": True}

# (name, file, what it says, what the bug says, settings, with out=)
PLANTED = [
    (
        "expand takes rows without waiting for their flags",
        "ht_dispatch_expand.cu",
        "if (lane == 0) is_ok = wait_flag(op, flag_of(p, p.rank, at), Phase::kRows, src, token);",
        "if (lane == 0) token = static_cast<uint32_t>(ld_acquire_sys(flag_of(p, p.rank, at)));",
        EXPERT_MAJOR,
        False,
    ),
    (
        "expand refills shared memory that is still being stored",
        "include/cuep/row_pipe.cuh",
        "bulk_wait_read<kNumStages - 2>();",
        "",
        EXPERT_MAJOR | {"num_sms": 1},
        False,
    ),
    (
        "expand stores rows that are still on their way into shared memory",
        "include/cuep/row_pipe.cuh",
        "wait(before(stage));",
        "",
        EXPERT_MAJOR | {"num_sms": 1},
        False,
    ),
    (
        "flags are released for rows that are still to be brought",
        "include/cuep/ht_home.cuh",
        "ld_acquire_block(brought + lane_idx()) : 0;",
        "num_told + !walk.is_over() : 0;",
        {},
        False,
    ),
    (
        "a flag is released when its row is only read",
        "include/cuep/row_pipe.cuh",
        "bulk_wait<kNumUntold>();",
        "bulk_wait_read<kNumUntold>();",
        EXPERT_MAJOR | {"num_sms": 2},
        True,
    ),
    (
        "the last flags are released when their rows are only read",
        "include/cuep/row_pipe.cuh",
        "bulk_wait<0>();\n        if constexpr",
        "bulk_wait_read<0>();\n        if constexpr",
        EXPERT_MAJOR,
        True,
    ),
    (
        "a row counts as brought when it is only read",
        "include/cuep/row_pipe.cuh",
        "bulk_wait<kLate>();",
        "bulk_wait_read<kLate>();",
        {"hidden": 1024, "num_sms": 1},
        False,
    ),
    (
        "the last rows count as brought when they are only read",
        "include/cuep/row_pipe.cuh",
        "bulk_wait<0>();\n        for",
        "bulk_wait_read<0>();\n        for",
        {},
        False,
    ),
    (
        "one bank of ready words",
        "include/cuep/ht_receive.cuh",
        "const int bank = static_cast<int>(op.epoch) & (kReadyBanks - 1);",
        # blocks but the first come late, so that peers are an operation ahead when they look
        "const int bank = 0;"
        " for (const uint64_t end = now_ns() + 20000000; blockIdx.x != 0 && now_ns() < end;) relax();",
        EXPERT_MAJOR,
        False,
    ),
    (
        "expand stores before the receiver is ready",
        "include/cuep/ht_receive.cuh",
        "is_ok = wait_flag(op, ready_of<kNumRanks>(p, op, p.rank, tid), Phase::kReuse, tid, buffers[tid]);",
        "buffers[tid] = static_cast<uint32_t>(p.buffer);",
        EXPERT_MAJOR | {"num_sms": 1},
        False,
    ),
    (
        "slots takes counts of another epoch",
        "ht_route_slots.cu",
        "if (epoch_of(words[src]) != static_cast<uint32_t>(op.epoch)) {",
        "if (false) {",
        EXPERT_MAJOR,
        False,
    ),
    (
        "partial releases a sum that its other lanes have not stored",
        "include/cuep/ht_home.cuh",
        "__syncwarp();  // what all lanes stored is released by one",
        "",
        EXPERT_MAJOR,
        False,
    ),
    (
        "partial adds up pieces that are still on their way into shared memory",
        "ht_combine_partial.cu",
        "pipe.wait(stage);\n                if (num_vecs",
        "if (num_vecs",
        EXPERT_MAJOR,
        False,
    ),
    (
        "partial sums without waiting for flags",
        "include/cuep/ht_home.cuh",
        "is_ok = wait_flag(op, flag_of(p, p.rank, lane, slot), Phase::kRows, lane, unused);",
        "unused = 0;",
        EXPERT_MAJOR,
        False,
    ),
    (
        "bulk copies out what has not arrived",
        "ht_dispatch_bulk.cu",
        "if (lane == 0) is_ok = wait_flag(op, flag_of(p, p.rank, src, walk.slot()), Phase::kRows, src, unused);",
        "",
        {"layout": "flat"},
        True,
    ),
    (
        "bulk begins with the turns that an earlier dispatch took",
        "include/cuep/operation.cuh",
        "op.control->ops[static_cast<int>(op.op)].turns = 0;",
        "",
        {"layout": "flat", "num_sms": 1},
        False,
    ),
    (
        "pull tells of rows that other blocks are still to copy",
        "ht_combine_pull.cu",
        "if (!is_refused) copy_in(p);\n        is_teller = is_last_block(op);",
        "is_teller = is_last_block(op);\n        if (!is_refused) copy_in(p);",
        PULLED,
        False,
    ),
    (
        "pull reads before it hears that rows are there",
        "ht_combine_pull.cu",
        "is_ok = wait_flag(op, Rows::total_of(p, p.rank, tid), Phase::kCounts, tid, totals[tid]);",
        "totals[tid] = static_cast<uint32_t>(p.buffer) | kHasGrads;",
        PULLED,
        False,
    ),
    (
        "pull ends while peers still read the buffer",
        "ht_combine_pull.cu",
        "is_ok = wait_flag(op, Rows::done_of(p, p.rank, tid), Phase::kReuse, tid, has_left);",
        "",
        PULLED,
        False,
    ),
    (
        "copies begin while owners still read",
        "ht_combine_copy.cu",
        "if (is_peer(p)) is_ok = wait_bank_free(op, Rows::done_of(p, p.rank, tid), 1, tid);",
        "",
        COPIED,
        False,
    ),
    (
        "rows are added up without waiting for their part",
        "ht_combine_copy.cu",
        "is_ok = wait_flag(op, flag, Phase::kRows, lane, unused);",
        "unused = flag != nullptr;",
        COPIED,
        False,
    ),
    (
        "one part is taken for all",
        "ht_combine_copy.cu",
        "num_parts = part + 1;",
        "num_parts = kNumParts;",
        COPIED | {"num_sms": 1},
        False,
    ),
    (
        "rows are packed over those that peers still fetch",
        "include/cuep/ht_receive.cuh",
        "is_ok = wait_flag(op, ready_of<kNumRanks>(p, op, p.rank, tid), Phase::kReuse, tid, buffers[tid]);",
        "buffers[tid] = static_cast<uint32_t>(p.buffer);",
        FETCHED,
        False,
    ),
    (
        "rows are fetched before they are packed",
        "ht_dispatch_copy.cu",
        "is_ok &= wait_flag(op, theirs, Phase::kRows, tid, unused);",
        "unused = theirs != nullptr;",
        FETCHED,
        False,
    ),
    (
        "a part is given out when its rows are only read",
        "include/cuep/row_pipe.cuh",
        "bulk_wait<0>();\n        if constexpr",
        "bulk_wait_read<0>();\n        if constexpr",
        FETCHED,
        False,
    ),
]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "settings",
    [EXPERT_MAJOR, {"layout": "flat", "num_sms": 2}, PULLED, COPIED, FETCHED],
    ids=["expert_major", "flat", "pulled", "copied", "fetched"],
)
@pytest.mark.parametrize("with_out", [False, True, None])
def test_the_loop_that_finds_bugs_finds_none_in_cuep(
    world: Any, shuffled: Any, monkeypatch: Any, settings: Any, with_out: bool | None
) -> None:
    monkeypatch.setattr("test_ht_forms.SEEDS_TO_FIND", 50)
    assert first_failing_seed(world, shuffled, settings, with_out) is None


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("file", "settings"), [("ht_dispatch_expand.cu", EXPERT_MAJOR), ("ht_dispatch_bulk.cu", {"layout": "flat"})]
)
@pytest.mark.parametrize("with_out", [False, True])
def test_rows_so_long_that_one_warp_sends_and_receives(
    world: Any, shuffled: Any, monkeypatch: Any, file: str, settings: Any, with_out: bool
) -> None:
    """What cuep chooses where only two or three rows fit into shared memory."""
    monkeypatch.setattr("test_ht_forms.SEEDS_TO_FIND", 10)
    with planted_bug(world, monkeypatch, file, "CUEP_TUNABLE(kNumWarps, 6, 2)", "CUEP_TUNABLE(kNumWarps, 6, 1)"):
        assert first_failing_seed(world, shuffled, settings, with_out) is None


@pytest.mark.ranks(2)
def test_pieces_that_all_lanes_share(world: Any, monkeypatch: Any) -> None:
    """Of 512 bytes, as GPUs have them, and a last one of fewer: rows of 1,056 bytes."""
    if world.backend.name != "cpu":
        pytest.skip("GPUs have them anyway")
    tunable = "CUEP_TUNABLE(kMostPieceBytes, 3584, {})"
    with (
        planted_bug(world, monkeypatch, "ht_combine_partial.cu", tunable.format(64), tunable.format(512)),
        cuep.Group(world, config("ht", **FORMS["odd"])) as group,
    ):
        run_form(world, group, random_step(world, group.cfg, 3, 9), with_all=True)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("bug", PLANTED, ids=[bug[0] for bug in PLANTED])
def test_a_planted_bug_is_found(world: Any, shuffled: Any, monkeypatch: Any, bug: Any) -> None:
    """A copy of the kernels with one rule of the protocol taken out must fail within SEEDS_TO_FIND seeds."""
    _, file, right, wrong, settings, with_out = bug
    with planted_bug(world, monkeypatch, file, right, wrong):
        assert first_failing_seed(world, shuffled, settings, with_out) is not None, "the bug was not found"
