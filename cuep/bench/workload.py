"""What a benchmark runs on: its settings, and inputs that every rank can make again for any rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from cuep import reference
from cuep.config import GroupConfig

Array = Any  # numpy.ndarray or cupy.ndarray
_SEED = 1000


@dataclass(frozen=True)
class Options:
    """One call of `cuep bench`. None means: what the mode's figures are usually quoted for, or cuep's own choice."""

    mode: str
    tokens: int
    hidden: int
    experts: int
    topk: int
    dtype: str = "bfloat16"
    layout: str | None = None
    reduce: str | None = None
    quant: str | None = None
    alignment: int = 1
    num_sms: int | None = None
    graph: bool = False
    check: bool = False
    iterations: int = 20
    variants: tuple[str, ...] = ("default",)


@dataclass(frozen=True)
class Inputs:
    """One rank's tokens and routing, as NumPy arrays."""

    x: reference.Array  # [T, H]
    topk_idx: reference.Array  # [T, K] int32
    topk_weights: reference.Array  # [T, K] float32


def group_config(options: Options, variants: dict[str, str]) -> GroupConfig:
    return GroupConfig(
        mode=options.mode,
        layout=options.layout,
        num_experts=options.experts,
        hidden=options.hidden,
        num_topk=options.topk,
        max_tokens_per_rank=max(1, options.tokens),
        dtype=options.dtype,
        reduce=options.reduce,
        quant=options.quant,
        alignment=options.alignment,
        num_sms=options.num_sms,
        variants=variants,
    )


def numpy_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def routing(options: Options, rank: int) -> reference.Array:
    """Top-k of random scores: each token's experts are distinct and all experts are equally likely, [T, K] int32."""
    scores = np.random.default_rng(_SEED + rank).random((options.tokens, options.experts))
    return np.argsort(-scores, 1)[:, : options.topk].astype(np.int32)


def make_inputs(options: Options, rank: int) -> Inputs:
    """The inputs of `rank`: the same wherever they are made."""
    rng = np.random.default_rng([_SEED, rank])
    x = rng.standard_normal((options.tokens, options.hidden), np.float32).astype(numpy_dtype(options.dtype))
    return Inputs(x, routing(options, rank), rng.random((options.tokens, options.topk), np.float32))


# The "experts" of a benchmark scale by a power of two: exact in every dtype, so their answers need no tolerance, and
# different for neighbours, so that an answer from the wrong expert or rank shows.
def scale(owner: Any) -> Any:
    """What an expert (ll) or rank (ht) multiplies its rows by; `owner` is its number or an array of numbers."""
    return np.asarray([0.5, 1, 2], np.float32)[np.asarray(owner) % 3]
