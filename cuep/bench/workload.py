"""What a benchmark runs on: its settings, and inputs that every rank can make again for any rank."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from cuep import reference
from cuep.config import GroupConfig
from cuep.errors import ArgumentError

Array = Any  # numpy.ndarray or cupy.ndarray
ROUTINGS = ("uniform", "skewed")
_SEED = 1000
_HOT_SHARE = 3  # skewed: one token in so many goes to expert 0


@dataclass(frozen=True)
class Options:
    """One call of `cuep bench`. None means: what the mode's figures are usually quoted for, or cuep's own choice.

    Attributes, beside those of GroupConfig:
        dtype: of the inputs, and of what combine takes and returns. With quant="forward" they are quantised beforehand.
        routing: one of ROUTINGS, see routing().
        with_out: dispatch puts rows into an array of the caller's, not into the handle's memory.
        combine_buffer: the experts' answers lie in the handle's combine buffer, not in any array.
        staged: (ll) also time the send phases alone, and the pair made of staged calls.
        groups: 2: also time two groups that each run the pair at the same time, in two streams.
        overlap: also time two micro-batches whose communication hides behind matrix products.
        floor: (ht) also time the simplest kernels that move the same rows, see floor.Floor.
        gemm_columns: width of these products, see gemm.Gemm; None: 256.
        peer: another library to time on the same inputs, one of peers.NAMES.
        graph: replay CUDA graphs; False: enqueue every call.

    Raises:
        ArgumentError: settings that do not go together.
    """

    mode: str
    tokens: int
    hidden: int
    experts: int
    topk: int
    dtype: str = "bfloat16"
    layout: str | None = None
    reduce: str | None = None
    quant: str | None = None
    scale_format: str = "fp32"
    in_place: int = 0
    combine_quant: str | None = None
    alignment: int = 1
    zero_padding: bool = False
    num_sms: int | None = None
    routing: str = "uniform"
    with_out: bool = False
    combine_buffer: bool = False
    staged: bool = False
    groups: int = 1
    overlap: bool = False
    floor: bool = False
    gemm_columns: int | None = None
    peer: str | None = None
    graph: bool = False
    check: bool = False
    iterations: int = 20
    variants: tuple[str, ...] = ("default",)

    def __post_init__(self) -> None:
        for name, mode in (("staged", "ll"), ("floor", "ht")):
            if getattr(self, name) and self.mode != mode:
                raise ArgumentError(f"{name}=True is not allowed with mode={self.mode!r}; allowed: False")
        if self.routing not in ROUTINGS:
            raise ArgumentError(f"routing={self.routing!r} is not allowed; allowed: {ROUTINGS}")
        if self.topk > self.experts:
            raise ArgumentError(f"topk={self.topk} is not allowed; allowed: at most experts={self.experts}")
        if self.gemm_columns is not None and not self.overlap:
            raise ArgumentError(f"gemm_columns={self.gemm_columns} is not allowed without overlap; allowed: None")
        if self.groups not in (1, 2):
            raise ArgumentError(f"groups={self.groups!r} is not allowed; allowed: 1 or 2")


@dataclass(frozen=True)
class Inputs:
    """One rank's tokens and routing, as NumPy arrays."""

    x: reference.Array  # [T, H]
    topk_idx: reference.Array  # [T, K] int32
    topk_weights: reference.Array  # [T, K] float32


def group_config(options: Options, variants: dict[str, str]) -> GroupConfig:
    is_forward = options.quant == "forward"  # the caller's rows are those that cuep would make
    return GroupConfig(
        mode=options.mode,
        layout=options.layout,
        num_experts=options.experts,
        hidden=options.hidden,
        num_topk=options.topk,
        max_tokens_per_rank=max(1, options.tokens),
        dtype="float8_e4m3fn" if is_forward else options.dtype,
        combine_dtype=options.dtype,
        reduce=options.reduce,
        quant=options.quant,
        scale_format=options.scale_format,
        in_place=options.in_place,
        combine_quant=options.combine_quant,
        alignment=options.alignment,
        zero_padding=options.zero_padding,
        num_sms=options.num_sms,
        variants=variants,
    )


def rows_to_send(options: Options, inputs: Inputs) -> tuple[reference.Array, reference.Array | None]:
    """x and scales, as dispatch takes them."""
    if options.quant != "forward":
        return inputs.x, None
    values, scales = reference.quantise(inputs.x, options.scale_format)
    return values.view(np.uint8), scales  # not every array library has the dtype


def numpy_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(ml_dtypes.bfloat16 if name == "bfloat16" else name)


def routing(options: Options, rank: int) -> reference.Array:
    """Top-k of random scores, [T, K] int32: each token's experts are distinct.

    uniform: all experts are equally likely. skewed: expert 0 is among the experts of exactly one third of all ranks'
    tokens (rounded up), spread at random within each rank; the other places go to the other experts, equally likely.
    """
    rng = np.random.default_rng(_SEED + rank)
    scores = rng.random((options.tokens, options.experts))
    if options.routing == "skewed":
        number = rank * options.tokens + rng.permutation(options.tokens)
        scores[:, 0] = np.where(number % _HOT_SHARE == 0, 2, -1)
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
