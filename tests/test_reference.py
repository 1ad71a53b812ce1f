"""The oracle against cases small enough to work out by hand."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from cuep import reference

BF16 = ml_dtypes.bfloat16


class OneRank:
    def allgather(self, sendobj: object) -> list[object]:
        return [sendobj]


def two_ranks(topk_weights=(None, None)) -> reference.Inputs:
    """2 ranks, 4 experts (0, 1 on rank 0; 2, 3 on rank 1), K=2; row value = 10 * rank + token."""
    topk_idx = [np.array([[2, 0], [3, 2], [-1, -1]]), np.array([[1, -1], [3, 3]], np.int32)]
    x = [np.full((3, 2), [[0], [1], [2]], np.float32), np.full((2, 2), [[10], [11]], np.float32)]
    return reference.make_inputs(4, x, topk_idx, topk_weights)


def test_expert_major_rows_are_ordered_by_expert_source_token_k():
    """A07: an expert named twice by one token gets two rows and counts twice."""
    got = reference.dispatch_expert_major(two_ranks(), rank=1, max_tokens_per_rank=3)
    assert got.source.tolist() == [[0, 0, 0], [0, 1, 1], [0, 1, 0], [1, 1, 0], [1, 1, 1]]
    assert got.tokens[:, 0].tolist() == [0, 1, 1, 11, 11]
    assert got.expert_counts.tolist() == [2, 3]
    assert got.src_rank_counts.tolist() == [[2, 0], [1, 2]]
    assert got.expert_offsets.tolist() == [0, 6, 12]
    assert got.row_idx.tolist() == [0, 1, 6, 7, 8]
    assert got.total == 5
    assert got.topk_idx is None and got.topk_weights is None


def test_flat_has_one_row_per_token_and_rank():
    weights = (np.arange(6, dtype=np.float32).reshape(3, 2), np.array([[7, np.nan], [8, 9]], np.float32))
    got = reference.dispatch_flat(two_ranks(weights), rank=1)
    assert got.source.tolist() == [[0, 0], [0, 1], [1, 1]]
    assert got.tokens[:, 0].tolist() == [0, 1, 11]
    assert got.topk_idx.tolist() == [[0, -1], [1, 0], [1, 1]]
    assert got.topk_weights.tolist() == [[0, 0], [2, 3], [8, 9]]
    assert got.expert_counts.tolist() == [2, 3]
    assert got.src_rank_counts.tolist() == [2, 1]
    assert got.row_idx.tolist() == [0, 1, 2] and got.total == 3
    assert got.expert_offsets is None


def test_flat_without_weights_returns_none():
    assert reference.dispatch_flat(two_ranks(), rank=0).topk_weights is None


def test_ids_outside_the_experts_are_no_expert():
    """A08: also 2**33 + 1, which a careless narrowing would turn into expert 1."""
    ids = np.array([[4, 2**33 + 1], [-2, 2**31 - 1]])
    inputs = reference.make_inputs(4, [np.ones((2, 1), np.float32)], [ids], [None])
    assert reference.dispatch_expert_major(inputs, 0, 2).total == 0
    assert reference.dispatch_flat(inputs, 0).total == 0


def test_combine_exact_sums_in_topk_order():
    weights = (np.array([[0.5, 2], [1, -1], [np.nan, np.nan]], np.float32), None)
    inputs = two_ranks(weights)
    # Expert e answers x + 100 * e; rank 0 owns experts 0 and 1.
    rows = []
    for rank in range(2):
        sent = reference.dispatch_expert_major(inputs, rank, 3)
        expert = 2 * rank + np.repeat(np.arange(2), sent.expert_counts)
        rows.append(sent.tokens + 100 * expert[:, None].astype(np.float32))
    assert reference.combine_exact(inputs, 0, rows)[:, 0].tolist() == [0.5 * 200 + 2 * 0, 301 - 201, 0]
    assert reference.combine_exact(inputs, 1, rows)[:, 1].tolist() == [110, 622]


def test_combine_flat_sums_rank_rows_without_weights():
    inputs = two_ranks((np.full((3, 2), 9, np.float32), np.full((2, 2), 9, np.float32)))
    rows = [reference.dispatch_flat(inputs, rank).tokens + 1000 * (rank + 1) for rank in range(2)]
    assert reference.combine_flat(inputs, 0, rows)[:, 0].tolist() == [3000, 2001, 0]
    assert reference.combine_flat(inputs, 1, rows)[:, 0].tolist() == [1010, 2011]


@pytest.mark.parametrize("reverse", [False, True])
def test_combine_exact_accumulates_in_float32(reverse):
    """B01: 256 + 7 ones is 263, rounded once to 264; a bfloat16 accumulator would stay at 256."""
    ids = np.arange(8)[None, ::-1] if reverse else np.arange(8)[None]
    inputs = reference.make_inputs(8, [np.ones((1, 4), BF16)], [ids], [np.ones((1, 8), np.float32)])
    rows = np.ones((8, 4), BF16)
    rows[0] = 256
    assert reference.combine_exact(inputs, 0, [rows]).astype(np.float32).tolist() == [[264] * 4]


def test_weighted_sum_does_not_contract_multiply_and_add():
    """(1 + 2^-12)^2 rounds to 1 + 2^-11 in float32; a fused multiply-add would keep the last 2^-24 and give that."""
    a = np.float32(1 + 2**-12)
    ids, weights = np.zeros((1, 2), np.int64), np.array([[1, a]], np.float32)
    answers = [np.full((1, 1), -(1 + 2**-11), np.float32), np.full((1, 1), a, np.float32)]
    assert reference.weighted_sum(ids, weights, answers.__getitem__, np.float32).tolist() == [[0]]


def test_empty_ranks():
    """A01, A02: ranks with no tokens, also all of them."""
    x, ids = np.zeros((0, 4), BF16), np.zeros((0, 2), np.int64)
    inputs = reference.make_inputs(4, [x, x], [ids, ids], [None, None])
    assert reference.dispatch_expert_major(inputs, 1, 8).tokens.shape == (0, 4)
    assert reference.dispatch_flat(inputs, 1).topk_idx.shape == (0, 2)
    assert reference.combine_exact(inputs, 0, [x, x]).shape == (0, 4)
    assert reference.combine_flat(inputs, 0, [x, x]).shape == (0, 4)


def test_gather_inputs_takes_every_ranks_part():
    inputs = reference.gather_inputs(OneRank(), 2, np.ones((1, 2), BF16), np.array([[1]]), None)
    assert inputs.num_ranks == 1 and inputs.x[0].dtype == BF16 and inputs.topk_weights == [None]


def test_first_difference_compares_bits_but_for_nan():
    nan = np.array([0x7FC00000, 0x7F800001], np.uint32).view(np.float32)
    assert reference.first_difference(nan, nan[::-1].copy()) is None
    zeros = np.zeros(2, BF16)
    assert "first at (0,): -0.0, expected 0.0" in reference.first_difference(-zeros, zeros)
    assert "bfloat16[2], expected float32[2]" in reference.first_difference(zeros, zeros.astype(np.float32))
    with pytest.raises(AssertionError, match="counts differs in 1 of 2 values, first at \\(1,\\): 4, expected 3"):
        reference.assert_same(np.array([1, 4]), np.array([1, 3]), "counts")


def test_dense_moe_equals_combine_of_dispatched_experts():
    rng = np.random.default_rng(1)
    experts = reference.Experts(
        rng.standard_normal((4, 8, 16), np.float32) / 4, rng.standard_normal((4, 16, 8), np.float32) / 4
    )
    x = [rng.standard_normal((5, 8), np.float32) for _ in range(2)]
    ids = [rng.permuted(np.tile(np.arange(-1, 4), (5, 1)), axis=1)[:, :3] for _ in range(2)]
    weights = [rng.random((5, 3), np.float32) for _ in range(2)]
    inputs = reference.make_inputs(4, x, ids, weights)
    rows = []
    for rank in range(2):
        sent = reference.dispatch_expert_major(inputs, rank, 5)
        expert = 2 * rank + np.repeat(np.arange(2), sent.expert_counts)
        inner = np.maximum(np.einsum("rh,rhf->rf", sent.tokens, experts.up[expert]), 0)
        rows.append(np.einsum("rf,rfh->rh", inner, experts.down[expert]))
    for rank in range(2):
        dense = reference.dense_moe(x[rank], ids[rank], weights[rank], experts)
        error = np.abs(reference.combine_exact(inputs, rank, rows) - dense.output)
        # the experts' own error, then 1 product and at most 3 sums of their answers
        assert (error <= dense.error + reference.gamma(4) * (dense.magnitude + dense.error)).all()
        assert error.max() > 0 and dense.error.max() < 1e-4
