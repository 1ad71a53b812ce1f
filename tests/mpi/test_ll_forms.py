"""Low latency in all its forms against the oracle, staged pipelines, refusals between phases, and planted bugs."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from harness import examples, planted_bug, to_device, to_host
from hypothesis import strategies as st
from moe import (
    Step,
    check_combined,
    check_received,
    config,
    expected_y,
    random_step,
    run_experts,
    run_step,
    tagged_rows,
)

import cuep
from cuep import env, layout, reference

FLAGS = {"variants": {"dispatch": "direct", "combine": "partial"}}  # so few tokens would travel as lines
FORMS: dict[str, dict[str, Any]] = {
    "exact": {"variants": {"dispatch": "direct", "combine": "direct"}},
    "per_rank": {"reduce": "per_rank"} | FLAGS,
    "rank_major": {"layout": "rank_major"} | FLAGS,
    "exact, float32 home": {"num_experts": 16, "hidden": 264, "num_topk": 5, "combine_dtype": "float32"},
    "per_rank, bfloat16 home": {
        "num_experts": 16,
        "hidden": 264,
        "num_topk": 5,
        "reduce": "per_rank",
        "dtype": "float32",
        "combine_dtype": "bfloat16",
    },
    "rank_major, float16": {
        "num_experts": 16,
        "hidden": 264,
        "num_topk": 5,
        "layout": "rank_major",
        "dtype": "float16",
        "expert_ids": "global",
        "num_buffers": 1,
    },
}
NUM_SEEDS = max(1, int(os.environ.get("CUEP_TEST_SEEDS", "50")) // 8)
LINES = {"variants": {"dispatch": "line", "combine": "line_partial"}}
FORMS |= {
    "exact, lines": {"variants": {"dispatch": "line", "combine": "line"}},
    "per_rank, lines": FORMS["per_rank"] | LINES,
    "rank_major, lines": FORMS["rank_major"] | LINES,
    "exact, lines, float32 home": FORMS["exact, float32 home"]
    | {"variants": {"dispatch": "line", "combine": "line"}, "num_sms": 1},
    "rank_major, lines, float16": FORMS["rank_major, float16"] | LINES,
}
PLAIN = ["exact", "per_rank", "rank_major", "exact, lines", "per_rank, lines", "rank_major, lines"]


@dataclass(frozen=True)
class Extras:
    """What a step uses beyond x and the routing."""

    num_bias: int = 0
    has_grads: bool = False
    is_strided: bool = False  # rows of x, out, expert_out, bias and y lie apart
    is_staged: bool = False
    is_counted: bool = False  # the number of tokens is on the device
    weights: str = "handle"  # of combine: "handle", "none" or, exact only, "other"


@pytest.fixture(scope="module")
def groups(world: Any) -> Iterator[Any]:
    made: dict[str, cuep.Group] = {}

    def get(form: str) -> cuep.Group:
        if form not in made:
            made[form] = cuep.Group(world, config("ll", **FORMS[form]))
        return made[form]

    yield get
    for group in made.values():
        group.close()


@pytest.fixture
def shuffled(world: Any) -> Iterator[Any]:
    if world.backend.name != "cpu":
        pytest.skip("only the CPU backend has a scheduler to shuffle")
    yield world.backend.set_seed
    world.backend.set_seed(env.seed(), env.delay_level())


@pytest.fixture
def reseed(world: Any) -> Iterator[Any]:
    """As shuffled, but a GPU, which has its own schedule, runs the test, too."""
    if world.backend.name != "cpu":
        yield lambda seed, delay_level: None
        return
    yield world.backend.set_seed
    world.backend.set_seed(env.seed(), env.delay_level())


def inputs_of(world: Any, cfg: cuep.GroupConfig, step: Step) -> reference.Inputs:
    return reference.gather_inputs(world.comm, cfg.num_experts, step.x, step.topk_idx, step.topk_weights)


def wanted(inputs: reference.Inputs, cfg: cuep.GroupConfig, rank: int) -> reference.Dispatched:
    return reference.dispatch(inputs, rank, cfg)


def check_rows(world: Any, cfg: cuep.GroupConfig, recv: cuep.Received, want: reference.Dispatched) -> None:
    check_received(world, cfg, recv, want)
    if recv.topk_idx is not None:  # a row beyond the counts must look like none
        ids = to_host(world, recv.topk_idx).reshape(-1, cfg.num_topk).copy()
        ids[want.row_idx] = -1
        assert (ids == -1).all(), "topk_idx beyond the counts"


def grad_tag(owner: Any, rank: Any, token: Any, k: Any) -> Any:
    """A gradient that says who made it for whom."""
    return (((owner * 32 + rank) * 64 + token) * 32 + k).astype(np.float32)


def row_grads(world: Any, cfg: cuep.GroupConfig, recv: cuep.Received, want: reference.Dispatched) -> np.ndarray:
    """Gradients of the received rows, NaN where there is none."""
    source = to_host(world, recv.source).reshape(-1, recv.source.shape[-1])[want.row_idx].astype(np.int64)
    if cfg.layout == "expert_major":
        grads = np.full(recv.source.shape[:2], np.nan, np.float32).reshape(-1)
        grads[want.row_idx] = grad_tag(world.rank, source[:, 0], source[:, 1], source[:, 2])
        return grads.reshape(recv.source.shape[:2])
    assert want.topk_idx is not None
    grads = np.full((recv.source.shape[0] * recv.source.shape[1], cfg.num_topk), np.nan, np.float32)
    tags = grad_tag(world.rank, source[:, :1], source[:, 1:2], np.arange(cfg.num_topk)[None])
    grads[want.row_idx] = np.where(want.topk_idx >= 0, tags, np.nan)
    return grads.reshape(*recv.source.shape[:2], cfg.num_topk)


def apart(world: Any, array: np.ndarray, is_strided: bool) -> Any:
    """On the device; with gaps of NaN between the rows."""
    if not is_strided:
        return to_device(world, array)
    gap = 64 // array.dtype.itemsize
    wide = np.full((*array.shape[:-1], array.shape[-1] + gap), np.nan, np.float32).astype(array.dtype)
    wide[..., : array.shape[-1]] = array
    return to_device(world, wide)[..., : array.shape[-1]]


def padded(step: Step, cfg: cuep.GroupConfig) -> tuple[np.ndarray, np.ndarray | None, np.ndarray]:
    """As many rows as there may be: those beyond the count name experts, but must not be looked at."""
    more = cfg.max_tokens_per_rank - step.num_tokens
    ids = np.concatenate([step.topk_idx, np.ones((more, cfg.num_topk), step.topk_idx.dtype)])
    weights = step.topk_weights
    if weights is not None:
        weights = np.concatenate([weights, np.full((more, cfg.num_topk), np.nan, np.float32)])
    x = np.concatenate([step.x, np.full((more, cfg.hidden), np.nan, np.float32).astype(step.x.dtype)])
    return ids, weights, x


def run_form(
    world: Any, group: cuep.Group, step: Step, extras: Extras, handle: cuep.Handle | None = None, stream: Any = None
) -> cuep.Handle:
    """One step with all that `extras` names; everything compared."""
    cfg = group.cfg
    ids, weights, x = padded(step, cfg) if extras.is_counted else (step.topk_idx, step.topk_weights, step.x)
    count = to_device(world, np.array([step.num_tokens], np.int64)) if extras.is_counted else None
    device_ids, device_weights = to_device(world, ids), None if weights is None else to_device(world, weights)
    if handle is None:
        handle = group.create_handle(device_ids, device_weights, num_tokens=count, stream=stream)
    else:
        handle.update(device_ids, device_weights, num_tokens=count, stream=stream)
    shape = handle.arrays["tokens"].shape
    out = None
    if extras.is_strided:
        out = apart(world, np.full(shape, np.nan, np.float32).astype(step.x.dtype), True)
    recv = handle.dispatch(apart(world, x, extras.is_strided), out=out, send_only=extras.is_staged, stream=stream)
    if extras.is_staged:
        handle.complete(stream=stream)
    group.check()
    assert out is None or recv.tokens is out
    inputs = inputs_of(world, cfg, step)
    want = wanted(inputs, cfg, world.rank)
    check_rows(world, cfg, recv, want)

    rng = np.random.default_rng([world.rank, step.num_tokens])
    dtype = layout.dtype_of(cfg.combine_dtype)
    bias = [rng.standard_normal(x.shape).astype(np.float32).astype(dtype) for _ in range(extras.num_bias)]
    others = rng.random(ids.shape, np.float32)
    grads = to_device(world, row_grads(world, cfg, recv, want)) if extras.has_grads else None
    y_out = apart(world, np.full(x.shape, np.nan, np.float32).astype(dtype), True) if extras.is_strided else None
    handle.arrays["weight_grads"][...] = float("nan")
    world.backend.synchronize()
    combined = handle.combine(
        apart(world, to_host(world, run_experts(cfg, world, recv)), extras.is_strided),
        topk_weights={"handle": "handle", "none": None, "other": to_device(world, others)}[extras.weights],
        bias=tuple(apart(world, b, extras.is_strided) for b in bias),
        row_weight_grads=grads,
        out=y_out,
        send_only=extras.is_staged,
        stream=stream,
    )
    if extras.is_staged:
        handle.complete(stream=stream)
    group.check()
    y, weight_grads = combined if extras.has_grads else (combined, None)
    num_tokens = step.num_tokens
    used = {"handle": None, "none": np.ones_like(others), "other": others}[extras.weights]
    used = None if used is None else used[:num_tokens]
    total = expected_y(cfg, world.rank, step, inputs, used, tuple(b[:num_tokens] for b in bias))
    reference.assert_same(to_host(world, y)[:num_tokens], total, "y")
    if extras.has_grads:
        owner = inputs.owner(world.rank)
        token, k = np.indices(owner.shape)
        tags = np.where(owner >= 0, grad_tag(owner, world.rank, token, k), np.float32(0))
        reference.assert_same(to_host(world, weight_grads)[:num_tokens], tags, "weight_grads")
    return handle


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("form", FORMS)
@examples(
    10,
    seed=st.integers(0, 10_000),
    tokens=st.lists(st.integers(0, 16), min_size=8, max_size=8),
    masked=st.sampled_from([0.0, 0.3, 1.0]),
    has_weights=st.booleans(),
    num_bias=st.sampled_from([0, 1, 2]),
    has_grads=st.booleans(),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    weights=st.sampled_from(["handle", "none", "other"]),
)
def test_every_form(
    world: Any,
    groups: Any,
    form: str,
    seed: int,
    tokens: list[int],
    masked: float,
    has_weights: bool,
    num_bias: int,
    has_grads: bool,
    flags: tuple[bool, bool, bool],
    weights: str,
) -> None:
    group = groups(form)
    step = random_step(world, group.cfg, seed, tokens[world.rank], masked)
    if not has_weights:
        step.topk_weights = None
    if weights == "other" and group.cfg.reduce != "exact":
        weights = "handle"
    run_form(world, group, step, Extras(num_bias, has_grads, *flags, weights)).close()


@pytest.mark.parametrize("form", PLAIN)
def test_the_same_expert_twice(world: Any, groups: Any, form: str) -> None:
    """A07: expert_major: two rows; rank_major: one row that names the expert twice."""
    group = groups(form)
    ids = np.tile([[1, 1]], (4, 1))
    weights = np.tile(np.float32([[0.25, 0.5]]), (4, 1))
    x = tagged_rows(world.rank, 4, group.cfg.hidden, 0, group.cfg.dtype)
    run_form(world, group, Step(ids, weights, x), Extras(has_grads=True)).close()


@pytest.mark.parametrize("form", PLAIN)
def test_a_kept_routing(world: Any, groups: Any, form: str) -> None:
    """The second dispatch along a routing uses the handle's copy of ids, weights and count, whole or staged."""
    group = groups(form)
    cfg = group.cfg
    step = random_step(world, cfg, 5, 3 + 5 * (world.rank % 2))
    handle = run_form(world, group, step, Extras(is_counted=True))
    for number in (6, 7):
        step.x = tagged_rows(world.rank, step.num_tokens, cfg.hidden, number, cfg.dtype)
        _, _, x = padded(step, cfg)
        recv = handle.dispatch(to_device(world, x), send_only=number == 7)
        if number == 7:
            handle.complete()
        group.check()
        inputs = inputs_of(world, cfg, step)
        check_rows(world, cfg, recv, wanted(inputs, cfg, world.rank))
        y = handle.combine(run_experts(cfg, world, recv))
        group.check()
        check_combined(world, cfg, step, inputs, y[: step.num_tokens])
    handle.close()


class Job:
    """A handle on its way through a staged step."""

    def __init__(self, world: Any, group: cuep.Group, step: Step, stream: Any) -> None:
        self.world, self.group, self.step, self.stream = world, group, step, stream
        self.inputs = inputs_of(world, group.cfg, step)
        self.handle = group.create_handle(
            to_device(world, step.topk_idx), to_device(world, step.topk_weights), stream=stream
        )
        self.recv: Any = None
        self.y: Any = None

    def send_dispatch(self) -> None:
        self.recv = self.handle.dispatch(to_device(self.world, self.step.x), send_only=True, stream=self.stream)

    def complete(self) -> None:
        self.handle.complete(stream=self.stream)

    def send_combine(self) -> None:
        self.stream.synchronize()
        out = run_experts(self.group.cfg, self.world, self.recv, self.stream)
        self.y = self.handle.combine(out, send_only=True, stream=self.stream)

    def check_received(self) -> None:
        self.stream.synchronize()
        check_rows(self.world, self.group.cfg, self.recv, wanted(self.inputs, self.group.cfg, self.world.rank))

    def check_combined(self) -> None:
        self.stream.synchronize()
        check_combined(self.world, self.group.cfg, self.step, self.inputs, self.y)


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("form", PLAIN)
@pytest.mark.parametrize("num_buffers", [2, 4])
def test_staged_pipelines(world: Any, reseed: Any, monkeypatch: Any, form: str, num_buffers: int) -> None:
    """As many sends as there are buffers are under way; they end in any order; kinds overlap."""
    monkeypatch.setenv("CUEP_START_EPOCH", str(2**32 - 3))
    cfg = config("ll", **FORMS[form], num_buffers=num_buffers, max_tokens_per_rank=6)
    for seed in range(1, NUM_SEEDS + 1):
        reseed(seed, seed % 4)
        rng = np.random.default_rng(seed)  # the same on every rank
        with cuep.Group(world, cfg) as group:
            stream = world.stream()
            for number in range(3):
                counts = rng.integers(0, 7, (num_buffers, world.size))
                steps = [
                    random_step(world, cfg, 1000 * seed + 10 * number + i, int(counts[i][world.rank]))
                    for i in range(num_buffers)
                ]
                jobs = [Job(world, group, step, stream) for step in steps]
                for job in jobs:
                    job.send_dispatch()
                for i in rng.permutation(num_buffers):
                    jobs[i].complete()
                    jobs[i].check_received()
                    jobs[i].send_combine()
                for i in rng.permutation(num_buffers):
                    jobs[i].complete()
                group.check()
                for job in jobs:
                    job.check_combined()
                    job.handle.close()


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("reduce", ["exact", "per_rank"])
def test_lines_arrive_whole(world: Any, reduce: str) -> None:
    """Rows with other bits in every call go to the next rank and come home: no value of an earlier call is left."""
    is_gpu = world.backend.name == "cuda"
    xp, num_tokens, hidden = world.backend.xp, 64, 7168 if is_gpu else 264
    variants = {"dispatch": "line", "combine": "line" if reduce == "exact" else "line_partial"}
    cfg = config(
        "ll", num_experts=world.size, num_topk=1, hidden=hidden, max_tokens_per_rank=num_tokens, reduce=reduce,
        variants=variants,
    )  # fmt: skip
    with cuep.Group(world, cfg) as group:
        ids = to_device(world, np.full((num_tokens, 1), (world.rank + 1) % world.size, np.int32))
        handle = group.create_handle(ids)
        x = to_device(world, np.zeros((num_tokens, hidden), layout.dtype_of("bfloat16")))
        place = xp.arange(x.size, dtype=xp.uint32).reshape(x.shape) * xp.uint32(2654435761)
        num_wrong = xp.zeros((), xp.int64)
        for number in range(500 if is_gpu else 10):
            bits = (place + xp.uint32(number * 40503 + world.rank * 977)) >> xp.uint32(13)
            bits = ((bits & xp.uint32(0xBFFF)) | xp.uint32(0x0080)).astype(xp.uint16)  # no zeros, infinities or NaN
            x.view(xp.uint16)[...] = bits
            y = handle.combine(handle.dispatch(x).tokens)
            num_wrong = num_wrong + (y.view(xp.uint16) != bits).sum()
        group.check()
        assert int(num_wrong) == 0


@pytest.mark.ranks(2, 4)
def test_lines_need_nvlink(world: Any, monkeypatch: Any) -> None:
    """Other links may tear a line: where two ranks have such a link, all refuse the group, but not one with flags."""
    monkeypatch.setattr(world.backend, "not_over_nvlink", [(1, 0)])
    for variants, op in (({}, "dispatch"), ({"dispatch": "direct"}, "combine")):
        with pytest.raises(cuep.ArgumentError, match=rf"variants\['{op}'\]='line.*ranks 1 and 0; allowed: 'direct'"):
            cuep.Group(world, config("ll", variants=variants, max_tokens_per_rank=6))
    with cuep.Group(world, config("ll", variants={"dispatch": "direct", "combine": "direct"})) as group:
        run_step(world, group, random_step(world, group.cfg, 1, 5))


@pytest.mark.parametrize("op", ["dispatch", "combine"])
def test_a_send_that_needs_a_taken_buffer(world: Any, op: str) -> None:
    """With num_buffers sends not completed the next is refused on every rank, and the group goes on afterwards."""
    with cuep.Group(world, config("ll", num_buffers=2)) as group:
        stream = world.stream()
        jobs = [Job(world, group, random_step(world, group.cfg, i, 5), stream) for i in range(3)]
        if op == "dispatch":
            jobs[0].send_dispatch()
            jobs[1].send_dispatch()
            jobs[1].complete()  # the oldest still holds the buffer that comes next
            with pytest.raises(cuep.OrderError, match=r"complete\(\) the oldest pending dispatch"):
                jobs[2].send_dispatch()
            jobs[0].complete()
            for job in jobs[:2]:
                job.check_received()
        else:
            for job in jobs:
                job.send_dispatch()
                job.complete()
            jobs[0].send_combine()
            jobs[1].send_combine()
            with pytest.raises(cuep.OrderError, match=r"combine: .* complete\(\) the oldest pending one"):
                jobs[2].send_combine()
                group.check()
            for job in jobs[:2]:
                job.complete()
                job.check_combined()
        run_form(world, group, random_step(world, group.cfg, 9, 5), Extras(), stream=stream)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("form", PLAIN)
@pytest.mark.parametrize("op", ["dispatch", "combine"])
def test_a_refused_call_between_a_send_and_its_completion(world: Any, form: str, op: str) -> None:
    """It takes an epoch of its own; what is under way stays right."""
    with cuep.Group(world, config("ll", **FORMS[form])) as group:
        stream = world.stream()
        jobs = [Job(world, group, random_step(world, group.cfg, i, 5), stream) for i in range(2)]
        jobs[0].send_dispatch()
        if op == "combine":
            jobs[0].complete()
            jobs[0].send_combine()
            jobs[1].send_dispatch()
            jobs[1].complete()
        error = cuep.ArgumentError if world.rank == 0 else cuep.PeerRefused
        cut = slice(None, -8 if world.rank == 0 else None)
        with pytest.raises(error):
            if op == "dispatch":
                jobs[1].handle.dispatch(to_device(world, jobs[1].step.x)[:, cut], send_only=True, stream=stream)
            else:
                out = to_device(world, np.zeros(jobs[1].recv.tokens.shape, jobs[1].step.x.dtype))
                jobs[1].handle.combine(out[..., cut], send_only=True, stream=stream)
            jobs[1].complete()  # the peers learn it there
            group.check()
        jobs[0].complete()
        jobs[0].check_received() if op == "dispatch" else jobs[0].check_combined()
        run_form(world, group, jobs[1].step, Extras(is_staged=True), jobs[1].handle, stream)


@pytest.mark.parametrize("is_staged", [False, True])
@pytest.mark.parametrize("form", PLAIN)
@pytest.mark.parametrize("bad", [-1, 21])
def test_a_bad_token_count(world: Any, form: str, bad: int, is_staged: bool) -> None:
    """The device finds it: refused on all ranks until the handle's next routing; other handles go on."""
    with cuep.Group(world, config("ll", **FORMS[form])) as group:
        step = random_step(world, group.cfg, 1, 5)
        ids, weights, x = padded(step, group.cfg)
        count = to_device(world, np.array([bad if world.rank == 0 else 5], np.int32))
        handle = group.create_handle(to_device(world, ids), to_device(world, weights), num_tokens=count)
        error = cuep.ArgumentError if world.rank == 0 else cuep.PeerRefused
        for _ in range(2):
            with pytest.raises(error, match="num_tokens" if world.rank == 0 else "rank 0 refused"):
                handle.dispatch(to_device(world, x), send_only=is_staged)
                if is_staged:
                    handle.complete()
                group.check()
        run_form(world, group, step, Extras(is_counted=True)).close()
        run_form(world, group, step, Extras(is_counted=True), handle)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("is_staged", [False, True])
@pytest.mark.parametrize("form", PLAIN)
def test_gradients_on_some_ranks_only(world: Any, form: str, is_staged: bool) -> None:
    """Every rank refuses; the next step works."""
    with cuep.Group(world, config("ll", **FORMS[form])) as group:
        step = random_step(world, group.cfg, 1, 5)
        handle = group.create_handle(to_device(world, step.topk_idx), to_device(world, step.topk_weights))
        recv = handle.dispatch(to_device(world, step.x))
        want = wanted(inputs_of(world, group.cfg, step), group.cfg, world.rank)
        grads = to_device(world, row_grads(world, group.cfg, recv, want)) if world.rank == 1 else None
        with pytest.raises(cuep.ArgumentError, match="row_weight_grads"):
            handle.combine(recv.tokens, row_weight_grads=grads, send_only=is_staged)
            if is_staged:
                handle.complete()
            group.check()
        run_form(world, group, step, Extras(has_grads=True), handle)


# (name, file, what it says, what the bug says, form, settings)
PLANTED = [
    (
        "done words of all banks in one",
        "include/cuep/ll.cuh",
        "reinterpret_cast<uint64_t*>(p.arena[dst] + p.done_offset) + bank * kNumRanks + reader;",
        "reinterpret_cast<uint64_t*>(p.arena[dst] + p.done_offset) + reader;",
        "exact",
        {},
    ),
    (
        "a rank says that it has received what it only sent",
        "include/cuep/ll.cuh",
        "return {control.received + 1 == op.epoch, ",
        "return {true, ",
        "rank_major",
        {},
    ),
    (
        "a bank is called free when other banks were read",
        "include/cuep/ll.cuh",
        "control.read_until + p.num_banks >= op.epoch};",
        "control.read_until + p.num_banks + 1 >= op.epoch};",
        "exact",
        {},
    ),
    (
        "a receive phase takes the group's newest epoch",
        "include/cuep/operation.cuh",
        "const uint64_t epoch = p.state->epoch[static_cast<int>(op)];",
        "const uint64_t epoch = p.control->ops[static_cast<int>(op)].epoch;",
        "per_rank",
        {},
    ),
    (
        "partial rows are added without waiting for their flags",
        "include/cuep/ll_combine.cuh",
        "is_ok = wait_flag<kHasStats>(op, flag_of(p, p.rank, bank, tid, t), Phase::kRows, tid, unused);",
        "unused = 0;",
        "per_rank",
        {},
    ),
    (
        "rank-major rows are taken without waiting for their flags",
        "ll_dispatch_direct.cu",
        "is_ok = wait_flag<kHasStats>(op, flag_of(p, p.rank, bank, src, slot), Phase::kRows, src, s.token[0]);",
        "s.token[0] = static_cast<uint32_t>(ld_acquire_sys(flag_of(p, p.rank, bank, src, slot)));",
        "rank_major",
        {},
    ),
    (
        "partial rows lie in the same bank always",
        "include/cuep/ll_combine.cuh",
        "const int bank = bank_of(p, op);",
        "const int bank = 0;",
        "rank_major",
        {},
    ),
    (
        "lines are taken as they are",
        "include/cuep/line.cuh",
        "if (!__any_sync(0xffffffffu, missing.is_any)) break;",
        "break;",
        "rank_major, lines",
        {},
    ),
    (
        "lines of any epoch are taken",
        "include/cuep/line.cuh",
        "if (is_half(piece) && flag != static_cast<uint32_t>(op.epoch)) missing",
        "if (is_half(piece) && flag <= op.control->ops[1].epoch - 2) missing",
        "exact, lines",
        {},
    ),
    (
        "one half of a line's lanes is not waited for",
        "include/cuep/line.cuh",
        "if (is_half(piece) && flag",
        "if (is_upper_half(piece) && flag",
        "rank_major, lines",
        {"hidden": 56},
    ),
    (
        "a line's flag may come before its rows",
        "include/cuep/sync.cuh",
        "if (has_piece && !is_last) store();\n    __syncwarp();\n    if (has_piece && is_last) store();",
        "if (has_piece && is_last) store();\n    __syncwarp();\n    if (has_piece && !is_last) store();",
        "per_rank, lines",
        {},
    ),
    (
        "a line is looked at before its flag",
        "include/cuep/sync.cuh",
        "if (is_last) load();\n    __syncwarp();\n    if (!is_last) load();",
        "if (!is_last) load();\n    __syncwarp();\n    if (is_last) load();",
        "exact, lines",
        {},
    ),
]
SEEDS_TO_FIND = 50


def staged(world: Any, group: cuep.Group, seed: int) -> str | None:
    """Pipelines of two handles whose phases end in any order, on ranks that come late. What went wrong, or None."""
    cfg = group.cfg
    order = np.random.default_rng(seed)  # the same on every rank
    late = np.random.default_rng([seed, world.rank])
    stream = world.stream()
    problems: list[str] = []
    jobs = [Job(world, group, random_step(world, cfg, seed, cfg.max_tokens_per_rank, masked=0.0), stream)]
    jobs.append(Job(world, group, random_step(world, cfg, seed + 1, cfg.max_tokens_per_rank, masked=0.0), stream))

    def noted(check: Any) -> None:
        try:
            check()
        except AssertionError as error:
            problems.append(str(error))

    for number in range(4):
        for job in jobs:
            job.step.x = tagged_rows(world.rank, cfg.max_tokens_per_rank, cfg.hidden, number, cfg.dtype)
            xs = [tagged_rows(r, cfg.max_tokens_per_rank, cfg.hidden, number, cfg.dtype) for r in range(world.size)]
            job.inputs = replace(job.inputs, x=xs)
            job.send_dispatch()
        phases = ("dispatch", "combine")[: 1 + (number % 2)]  # without a combine nothing holds fast ranks back
        for phase in phases:
            for i in order.permutation(2):
                time.sleep(late.choice([0, 0.002]))
                jobs[i].complete()
                noted(jobs[i].check_received if phase == "dispatch" else jobs[i].check_combined)
            if phase != phases[-1]:
                for job in jobs:
                    job.send_combine()
    group.check()
    return problems[0] if problems else None


def first_failing_seed(world: Any, shuffled: Any, form: str, settings: dict[str, Any]) -> tuple[int, str] | None:
    """The first seed under which a rank sees wrong data or an error; the same answer on every rank."""
    for seed in range(1, SEEDS_TO_FIND + 1):
        shuffled(seed, 3)
        cfg = config("ll", **({"timeout_s": 1.0, "max_tokens_per_rank": 10} | FORMS[form] | settings))
        group = cuep.Group(world, cfg)
        problem = None
        try:
            problem = staged(world, group, seed)
        except (cuep.CuepError, IndexError) as error:
            problem = str(error)
        found = [text for text in world.comm.allgather(problem) if text is not None]
        if found:
            group.abandon()
            return seed, found[0]
        group.close()
    return None


@pytest.mark.ranks(2)
@pytest.mark.parametrize("form", PLAIN)
def test_the_loop_that_finds_bugs_finds_none_in_cuep(world: Any, shuffled: Any, monkeypatch: Any, form: str) -> None:
    monkeypatch.setattr("test_ll_forms.SEEDS_TO_FIND", 10)
    assert first_failing_seed(world, shuffled, form, {}) is None


@pytest.mark.ranks(2)
@pytest.mark.parametrize("bug", PLANTED, ids=[bug[0] for bug in PLANTED])
def test_a_planted_bug_is_found(world: Any, shuffled: Any, monkeypatch: Any, bug: Any) -> None:
    """A copy of the kernels with one rule of the protocol taken out must fail within SEEDS_TO_FIND seeds."""
    _, file, right, wrong, form, settings = bug
    with planted_bug(world, monkeypatch, file, right, wrong):
        assert first_failing_seed(world, shuffled, form, settings) is not None, "the bug was not found"
