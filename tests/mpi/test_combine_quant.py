"""Rows that are encoded on their way home, on either backend, against the oracle bit by bit and against its bounds."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from harness import examples, planted_bug, to_device, to_host
from hypothesis import strategies as st
from moe import Step, config, random_step, run_step
from rig import Graph, Rig, some_step
from test_ll_forms import Extras, run_form
from test_protocol import random_walk

import cuep
from cuep import env, layout, reference

CODECS = ("logfmt10", "fp8_block128")
FORMS: dict[str, dict[str, Any]] = {
    "exact": {},
    "per_rank": {"reduce": "per_rank"},
    "rank_major": {"layout": "rank_major"},
}
HIDDEN = 384  # 3 blocks of values


def coded(form: str, combine_quant: str, **changes: Any) -> cuep.GroupConfig:
    settings: dict[str, Any] = {"hidden": HIDDEN, "combine_quant": combine_quant}
    return config("ll", **(settings | FORMS[form] | changes))


def ordinary(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Values near 1, whose blocks and rows differ in size; every fourth row has blocks of zeros."""
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-6, 4, (*shape[:-1], 1)))
    x[::4, ..., 128:256] = 0
    return x.astype(np.float32).astype(layout.dtype_of(dtype))


def of_all_kinds(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Rows of any bits, or of a range of exponents that may be as wide as the dtype's, with zeros and -0 among them."""
    kind = layout.dtype_of(dtype)
    info: Any = ml_dtypes.finfo(kind)
    least, most = np.log2(float(info.smallest_subnormal)), np.log2(float(info.max)) - 1
    ends = np.sort(rng.uniform(least, most, (2, *shape[:-1], 1)), 0)
    x = np.exp2(rng.uniform(ends[0], ends[1], shape)) * rng.choice([-1, 0, 1, 1], shape)
    x[1::5] = rng.choice([-1, 1], shape)[1::5] * np.exp2(least) * rng.integers(0, 9, shape)[1::5]
    rows = x.astype(np.float32).astype(kind)
    bits = rng.integers(0, 256, (*shape[:-1], shape[-1] * kind.itemsize), np.uint8).view(kind)
    rows[2::5] = bits[2::5]
    return rows


def with_infinities(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """One value of every other row is none, in its second block."""
    rows = ordinary(rng, shape, dtype)
    rows[::2, ..., 200] = rng.choice([np.inf, -np.inf, np.nan], rows[::2, ..., 200].shape).astype(rows.dtype)
    return rows


class Answers:
    """What every expert (expert_major) or rank answers to every token: drawn from the token's rank, known to all."""

    def __init__(self, world: Any, cfg: cuep.GroupConfig, step: Step, seed: int, kind: Any) -> None:
        self.world, self.cfg = world, cfg
        self.inputs = reference.gather_inputs(world.comm, cfg.num_experts, step.x, step.topk_idx, step.topk_weights)
        self.want = reference.dispatch(self.inputs, world.rank, cfg)
        owners = world.size if cfg.layout == "rank_major" else cfg.num_experts
        self.rows = [
            kind(np.random.default_rng([seed, src]), (len(x), owners, cfg.hidden), str(cfg.combine_dtype))
            for src, x in enumerate(self.inputs.x)
        ]  # of each source rank [T, owners, H]

    def expert_out(self) -> Any:
        """For this rank, NaN where no row is."""
        cfg, rank, want = self.cfg, self.world.rank, self.want
        shape = layout.combine_shape(cfg, self.world.size)
        out = np.full(shape, np.nan, np.float32).astype(layout.dtype_of(cfg.combine_dtype)).reshape(-1, cfg.hidden)
        for row, source in zip(want.row_idx, want.source, strict=True):
            src, token = source[:2]
            owner = rank if cfg.layout == "rank_major" else self.inputs.topk_idx[src][token, source[2]]
            out[row] = self.rows[src][token, owner]
        return to_device(self.world, out.reshape(shape))

    def answer(self, which: int) -> np.ndarray:
        """As reference.combine asks for them."""
        rows, ids = self.rows[self.world.rank], self.inputs.topk_idx[self.world.rank]
        return rows[:, which] if self.cfg.layout == "rank_major" else rows[np.arange(len(rows)), ids[:, which]]

    def y(self) -> np.ndarray:
        return reference.combine(self.inputs, self.world.rank, self.cfg, self.answer)

    def exact_y(self) -> tuple[np.ndarray, np.ndarray]:
        """The sum in float64, and how far combine may be off."""
        cfg, rank, inputs = self.cfg, self.world.rank, self.inputs
        ids, owner = inputs.topk_idx[rank], inputs.owner(rank)
        weights = np.where(ids >= 0, np.nan_to_num(reference.weights_or_ones(inputs, rank)), 0)
        total, magnitude, error = (np.zeros((len(ids), cfg.hidden)) for _ in range(3))
        for dst in range(inputs.num_ranks):
            partial = np.zeros(total.shape, np.float32)  # what this rank sends, where it is a sum
            for k in range(cfg.num_topk) if cfg.layout == "expert_major" else [dst]:
                is_here = (owner == dst).any(1) if cfg.layout == "rank_major" else owner[:, k] == dst
                weight = np.ones(len(ids), np.float32) if cfg.layout == "rank_major" else weights[:, k]
                weight = np.where(is_here, weight, 0)[:, None].astype(np.float32)
                rows = self.answer(k)
                term = weight * rows.astype(np.float64)
                total, magnitude = total + term, magnitude + np.abs(term)
                partial += weight * rows.astype(np.float32)
                if dst != rank and cfg.reduce == "exact":
                    error += weight * reference.carried_bound(rows, str(cfg.combine_quant))
            if dst != rank and cfg.reduce != "exact":
                error += reference.carried_bound(partial, str(cfg.combine_quant))
        bound = reference.coded_bound(magnitude, error, cfg.num_topk, inputs.num_ranks, self.rows[rank].dtype)
        return total, bound


def run(world: Any, group: cuep.Group, step: Step, answers: Answers, *, is_staged: bool = False) -> np.ndarray:
    handle = group.create_handle(to_device(world, step.topk_idx), to_device(world, step.topk_weights))
    handle.dispatch(to_device(world, step.x))
    handle.arrays["y"][...] = float("nan")
    world.backend.synchronize()
    y = handle.combine(answers.expert_out(), send_only=is_staged)
    if is_staged:
        handle.complete()
    group.check()
    y = to_host(world, y)
    reference.assert_same(y, answers.y(), "y")
    handle.close()
    return y


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("combine_quant", CODECS)
@pytest.mark.parametrize("form", FORMS)
def test_values(world: Any, form: str, combine_quant: str, dtype: str) -> None:
    """Any bits, more steps than banks, whole and staged; sums of ordinary rows are as close as promised."""
    settings = {"dtype": "bfloat16", "combine_dtype": dtype, "num_topk": 3}
    with cuep.Group(world, coded(form, combine_quant, **settings)) as group:
        for seed, kind in enumerate((of_all_kinds, ordinary, with_infinities, of_all_kinds, ordinary)):
            step = random_step(world, group.cfg, seed, (6 + 5 * world.rank + 3 * seed) % 19)
            answers = Answers(world, group.cfg, step, seed, kind)
            y = run(world, group, step, answers, is_staged=seed % 2 == 1)
            if kind is not ordinary:
                continue
            total, bound = answers.exact_y()
            error = np.abs(y.astype(np.float64) - total)
            assert (error <= bound).all(), float((error - bound).max())


@pytest.mark.parametrize("combine_quant", CODECS)
@pytest.mark.parametrize("form", FORMS)
def test_what_is_no_number(world: Any, form: str, combine_quant: str) -> None:
    """An infinity or NaN in a peer's row makes NaN of its block of the sum and of nothing else; zeros stay zeros; a
    rank's own rows are exact."""
    with cuep.Group(world, coded(form, combine_quant, num_topk=1)) as group:
        num_experts, local = group.cfg.num_experts, group.cfg.num_experts // world.size
        token = np.arange(8)
        ids = ((world.rank * local + token * local) % num_experts)[:, None]  # to all ranks in turn
        step = random_step(world, group.cfg, 1, 8, masked=0.0)
        step.topk_idx, step.topk_weights = ids, np.ones((8, 1), np.float32)

        def kind(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
            rows = np.ones(shape, np.float32)
            rows[..., :128] = 0
            rows[1::2, ..., 130] = np.inf
            return rows.astype(layout.dtype_of(dtype))

        y = run(world, group, step, Answers(world, group.cfg, step, 1, kind)).astype(np.float32)
        is_peers = ids[:, 0] // local != world.rank
        assert (y[:, :128] == 0).all() and np.isfinite(y[:, 256:]).all()
        is_nan = np.isnan(y[:, 128:256])
        assert (is_nan.all(1) == (is_peers & (token % 2 == 1))).all() and not is_nan[~is_peers].any()
        assert np.isinf(y[~is_peers & (token % 2 == 1), 130]).all() and (y[~is_peers][:, 256:] == 1).all()


@pytest.fixture(scope="module")
def groups(world: Any) -> Any:
    made: dict[tuple[str, str], cuep.Group] = {}

    def get(form: str, combine_quant: str) -> cuep.Group:
        key = form, combine_quant
        if key not in made:
            made[key] = cuep.Group(world, coded(form, combine_quant, num_topk=3, combine_dtype="float32"))
        return made[key]

    yield get
    for group in made.values():
        group.close()


@pytest.mark.parametrize("combine_quant", CODECS)
@pytest.mark.parametrize("form", FORMS)
@examples(
    8,
    seed=st.integers(0, 10_000),
    tokens=st.lists(st.integers(0, 16), min_size=8, max_size=8),
    masked=st.sampled_from([0.0, 0.3, 1.0]),
    num_bias=st.sampled_from([0, 1, 2]),
    has_grads=st.booleans(),
    flags=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    weights=st.sampled_from(["handle", "none", "other"]),
)
def test_every_form(
    world: Any,
    groups: Any,
    form: str,
    combine_quant: str,
    seed: int,
    tokens: list[int],
    masked: float,
    num_bias: int,
    has_grads: bool,
    flags: tuple[bool, bool, bool],
    weights: str,
) -> None:
    """Biases, gradients of weights, out=, strides, phases, a count on the device."""
    group = groups(form, combine_quant)
    step = random_step(world, group.cfg, seed, tokens[world.rank], masked)
    if weights == "other" and group.cfg.reduce != "exact":
        weights = "handle"
    run_form(world, group, step, Extras(num_bias, has_grads, *flags, weights)).close()


@pytest.mark.parametrize(("form", "combine_quant"), [("exact", "logfmt10"), ("per_rank", "fp8_block128")])
def test_graphs(world: Any, form: str, combine_quant: str) -> None:
    """One graph, replayed with other routings, rows and numbers of tokens."""
    with cuep.Group(world, coded(form, combine_quant, hidden=256)) as group:
        rig = Rig(world, group, world.stream())
        rig.load(some_step(world, group.cfg, 0))
        rig.run()
        group.check()
        graph = Graph(world, rig.stream, rig.run)
        for number in range(1, 6):
            step = some_step(world, group.cfg, number)
            rig.load(step)
            rig.poison()
            graph.launch()
            group.check()
            rig.compare(step)
        rig.handle.close()


@pytest.mark.parametrize("combine_quant", CODECS)
def test_quantised_both_ways(world: Any, combine_quant: str) -> None:
    """With dispatch's quant, and few tokens, where dispatch uses lines and combine does not."""
    cfg = coded("rank_major", combine_quant, quant="fp8_block128", max_tokens_per_rank=6)
    with cuep.Group(world, cfg) as group:
        assert layout.uses_lines(cfg, "dispatch") and not layout.uses_lines(cfg, "combine")
        step = random_step(world, cfg, 2, 5)
        run(world, group, step, Answers(world, cfg, step, 2, ordinary))


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize(("form", "combine_quant"), [("exact", "logfmt10"), ("per_rank", "logfmt10")])
def test_shuffled_schedules(world: Any, form: str, combine_quant: str) -> None:
    if world.backend.name != "cpu":
        pytest.skip("only the CPU backend has a scheduler to shuffle")
    try:
        for seed in range(1, 7):
            world.backend.set_seed(seed, seed % 4)
            with cuep.Group(world, coded(form, combine_quant, hidden=128, max_tokens_per_rank=6)) as group:
                random_walk(world, group, seed)
    finally:
        world.backend.set_seed(env.seed(), env.delay_level())


@pytest.mark.ranks(2)
def test_a_wrong_codec_is_found(world: Any, monkeypatch: Any) -> None:
    """A copy of the kernels whose levels are one step apart from what was sent."""
    right, wrong = "coded.v.w + code * coded.step;", "coded.v.w + (code - 1) * coded.step;"
    with (
        planted_bug(world, monkeypatch, "include/cuep/combine_codec.cuh", right, wrong),
        cuep.Group(world, coded("exact", "logfmt10")) as group,
        pytest.raises(AssertionError, match="y differs"),
    ):
        step = random_step(world, group.cfg, 3, 9, masked=0.0)
        run(world, group, step, Answers(world, group.cfg, step, 3, ordinary))


def test_lines_are_refused(world: Any) -> None:
    """Rows that are encoded do not fit lines; a variant that cannot encode is named, and the next group works."""
    for form, name in (("exact", "line"), ("per_rank", "line_partial")):
        cfg = coded(form, "logfmt10", variants={"combine": name})
        with pytest.raises(
            cuep.ArgumentError, match=rf"variants\['combine'\]='{name}' is not allowed; .*combine_quant='logfmt10'"
        ):
            cuep.Group(world, cfg)
    with cuep.Group(world, coded("exact", "logfmt10", variants={"combine": "direct"})) as group:
        run_step(world, group, random_step(world, group.cfg, 1, 5))


@pytest.mark.ranks(2, 4)
def test_settings_must_agree(world: Any) -> None:
    with pytest.raises(cuep.SettingsMismatch, match="combine_quant: .*logfmt10"):
        cuep.Group(world, coded("exact", CODECS[world.rank % 2]))
