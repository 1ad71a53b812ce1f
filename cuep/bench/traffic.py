"""Bytes of rows that one rank sends or fetches, counted from the routing alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from cuep.reference import Array


@dataclass(frozen=True)
class Traffic:
    """Payload of one operation on one rank: with and without what stays on the rank. Headers and flags do not count."""

    remote: int
    total: int

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.remote + other.remote, self.total + other.total)


def dispatch(topk_idx: Array, rank: int, num_ranks: int, num_experts: int, row_bytes: int) -> Traffic:
    """One row per distinct (token, rank)."""
    owner = _owners(topk_idx, num_ranks, num_experts)
    rows = [int((owner == dst).any(1).sum()) for dst in range(num_ranks)]
    return Traffic((sum(rows) - rows[rank]) * row_bytes, sum(rows) * row_bytes)


def combine(topk_idx: Array, rank: int, num_ranks: int, num_experts: int, row_bytes: int, is_exact: bool) -> Traffic:
    """The answers that come home: one row per (token, k) if exact, else one per distinct (token, rank)."""
    if not is_exact:
        return dispatch(topk_idx, rank, num_ranks, num_experts, row_bytes)
    owner = _owners(topk_idx, num_ranks, num_experts)
    total, own = int((owner >= 0).sum()), int((owner == rank).sum())
    return Traffic((total - own) * row_bytes, total * row_bytes)


def _owners(topk_idx: Array, num_ranks: int, num_experts: int) -> Array:
    ids = topk_idx.astype(np.int64)
    return np.where((ids >= 0) & (ids < num_experts), ids // (num_experts // num_ranks), -1)
