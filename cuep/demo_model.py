"""The layer that `cuep demo` runs: byte embeddings of a text, a router, and two-layer experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from cuep.reference import Array, Experts, FloatArray

# Rows of a product of CuPy arrays that are formed at once: rows * in * out float32 values of scratch.
_ROWS_AT_ONCE = 64


@dataclass(frozen=True)
class Model:
    """Weights, the same on every rank. H hidden, F inner width of an expert, E experts."""

    embedding: FloatArray  # [256, H], one row per byte value
    router: FloatArray  # [H, E]
    router_bias: FloatArray  # [E]
    experts: Experts
    num_topk: int


def make_model(num_experts: int, num_topk: int, hidden: int, inner: int) -> Model:
    rng = np.random.default_rng(7)

    def normal(*shape: int, size: float) -> FloatArray:
        drawn: FloatArray = rng.standard_normal(shape, np.float32) * np.float32(size)
        return drawn

    # Routers that were not balanced favour few experts. The last experts are so unpopular that they get nothing.
    popularity = -1.5 * np.log(np.arange(1, num_experts + 1, dtype=np.float32))
    popularity[num_experts - num_experts // 8 :] = -100
    return Model(
        embedding=normal(256, hidden, size=1),
        router=normal(hidden, num_experts, size=hidden**-0.5),
        router_bias=rng.permuted(popularity),
        experts=Experts(
            up=normal(num_experts, hidden, inner, size=hidden**-0.5),
            down=normal(num_experts, inner, hidden, size=inner**-0.5),
        ),
        num_topk=num_topk,
    )


def split_text(text: bytes, num_ranks: int) -> list[bytes]:
    """Lines dealt out to the ranks in turn: as with real sequences, ranks get different numbers of tokens."""
    lines = text.splitlines(keepends=True)
    return [b"".join(lines[rank::num_ranks]) for rank in range(num_ranks)]


def embed(model: Model, text: bytes) -> Array:
    """[T, H] bfloat16: the embedding of each byte plus a wave that tells where in the text it stands."""
    hidden = model.embedding.shape[1]
    position = np.arange(len(text), dtype=np.float32)[:, None]
    rate = np.exp(-np.arange(hidden, dtype=np.float32) / hidden * np.float32(np.log(1e4)))
    rows = model.embedding[np.frombuffer(text, np.uint8)] + np.float32(0.3) * np.sin(position * rate)
    x: Array = rows.astype(ml_dtypes.bfloat16)
    return x


def route(model: Model, x: Array) -> tuple[Array, FloatArray]:
    """Each token's top-k experts, best first, [T, K] int32, and the softmax of their scores, [T, K] float32."""
    scores = x.astype(np.float32) @ model.router + model.router_bias
    topk_idx = np.argsort(-scores, axis=1, kind="stable")[:, : model.num_topk]
    best = np.take_along_axis(scores, topk_idx, 1)
    weights = np.exp(best - best[:, :1])
    return topk_idx.astype(np.int32), (weights / weights.sum(1, keepdims=True)).astype(np.float32)


class LocalExperts:
    """The experts that one rank owns, on its device."""

    def __init__(self, backend: Any, model: Model, rank: int, num_ranks: int) -> None:
        num_local = len(model.experts.up) // num_ranks
        owned = slice(rank * num_local, (rank + 1) * num_local)
        self._xp = backend.xp
        self._up = backend.asarray(model.experts.up[owned])
        self._down = backend.asarray(model.experts.down[owned])

    def __call__(self, local: int, rows: Any) -> Any:
        """Answers of one expert to rows [R, H], in float32."""
        inner = self._xp.maximum(self._product(rows.astype(self._xp.float32), self._up[local]), 0)
        return self._product(inner, self._down[local])

    def _product(self, rows: Any, matrix: Any) -> Any:
        if self._xp is np:
            return rows @ matrix
        # CuPy's own product needs cuBLAS, half a gigabyte that cuep itself has no use for.
        result = self._xp.empty((rows.shape[0], matrix.shape[1]), self._xp.float32)
        for first in range(0, rows.shape[0], _ROWS_AT_ONCE):
            some = rows[first : first + _ROWS_AT_ONCE]
            result[first : first + _ROWS_AT_ONCE] = (some[:, :, None] * matrix[None]).sum(1)
        return result
