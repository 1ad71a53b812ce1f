"""The model of scripts/train_moe.py: a byte-level language model of MoE layers, its gradients by hand, and plain SGD.

The MoE layer is the caller's: DenseMoe below needs no other rank; train_moe.py has one whose experts lie on all ranks.
Everything works in NumPy or CuPy, in the precision of the parameters.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

Array = Any  # numpy.ndarray or cupy.ndarray
Params = dict[str, Array]  # also gradients and momentum, by the same names

EXPERT_PARAMS = ("up", "down")  # [layers, experts, ...]; the others are the same on every rank
_MOMENTUM = 0.9
_EPSILON = 1e-5  # of the normalisation
# Higher for embeddings and experts, which see only some of the tokens. Twice as high, roundings begin to grow from step
# to step, and no two computations stay close.
_RATES = {"embedding": 0.5, "router": 0.05, "up": 0.125, "down": 0.125, "output": 0.05}


@dataclass(frozen=True)
class Sizes:
    batch: int = 256  # bytes to predict in a step, over all ranks
    context: int = 4  # bytes that each is predicted from
    hidden: int = 64
    inner: int = 64
    experts: int = 8
    topk: int = 2
    layers: int = 2


class Moe(Protocol):
    """One MoE layer; backward follows its forward, with the same parameters."""

    def forward(self, x: Array, topk_idx: Array, topk_weights: Array, up: Array, down: Array) -> Array: ...
    def backward(self, grad_y: Array, up: Array, down: Array) -> tuple[Array, Array, Array, Array]:
        """Gradients of x, topk_weights, up and down."""


def make_params(sizes: Sizes) -> Params:
    """The same on every rank: float32."""
    rng = np.random.default_rng(1)
    layers, experts, hidden, inner = sizes.layers, sizes.experts, sizes.hidden, sizes.inner
    shapes = {
        "embedding": (sizes.context * 256, hidden),
        "router": (layers, hidden, experts),
        "up": (layers, experts, hidden, inner),
        "down": (layers, experts, inner, hidden),
        "output": (hidden, 256),
    }
    scales = {"embedding": sizes.context**-0.5, "down": inner**-0.5}
    return {
        name: (rng.standard_normal(shape) * scales.get(name, hidden**-0.5)).astype(np.float32)
        for name, shape in shapes.items()
    }


def make_batch(sizes: Sizes, text: np.ndarray, step: int) -> tuple[np.ndarray, np.ndarray]:
    """The same on every rank: one-hot contexts [batch, context * 256] float32, and the bytes that follow [batch]."""
    at = np.random.default_rng([2, step]).integers(sizes.context, len(text), sizes.batch)
    place = np.arange(sizes.context)
    one_hot = np.zeros((sizes.batch, sizes.context * 256), np.float32)
    one_hot[np.arange(sizes.batch)[:, None], text[at[:, None] - 1 - place] + 256 * place] = 1
    return one_hot, text[at]


def loss_and_gradients(
    params: Params, moe: Sequence[Moe], topk: int, one_hot: Array, targets: Array, batch: int
) -> tuple[float, Params, float]:
    """These tokens' part of the mean loss of a batch, its gradients, and by how much the closest choice of an expert
    was made: the smallest difference between the score of a token's last chosen expert and the next one's.
    """
    hidden = product(one_hot, params["embedding"])
    kept, margin = [], np.inf
    for layer, router, up, down in zip(moe, params["router"], params["up"], params["down"], strict=True):
        x, scale = _normalise(hidden)
        topk_idx, topk_weights, closest = _route(product(x, router), topk)
        margin = min(margin, closest)
        hidden = hidden + layer.forward(x, topk_idx, topk_weights, up, down)
        kept.append((x, scale, topk_idx, topk_weights))
    x, scale = _normalise(hidden)
    loss, grad = _cross_entropy(product(x, params["output"]), targets, batch)

    grads: dict[str, Any] = {"output": product(x.T, grad)}
    per_layer: dict[str, list[Array]] = {name: [] for name in ("router", "up", "down")}
    grad = _normalise_backward(x, scale, product(grad, params["output"].T))
    for i in reversed(range(len(moe))):
        x, scale, topk_idx, topk_weights = kept[i]
        grad_x, grad_weights, grad_up, grad_down = moe[i].backward(grad, params["up"][i], params["down"][i])
        grad_scores = _route_backward(topk_idx, topk_weights, grad_weights, params["router"].shape[2])
        grad_x = grad_x + product(grad_scores, params["router"][i].T)
        for name, value in (("router", product(x.T, grad_scores)), ("up", grad_up), ("down", grad_down)):
            per_layer[name].insert(0, value)
        grad = grad + _normalise_backward(x, scale, grad_x)
    grads["embedding"] = product(one_hot.T, grad)
    return loss, grads | {name: _xp(x).stack(values) for name, values in per_layer.items()}, margin


def update(params: Params, momentum: Params, grads: Params) -> None:
    """SGD with momentum: it does not magnify roundings where gradients are small, as Adam does."""
    for name, grad in grads.items():
        momentum[name] = _MOMENTUM * momentum[name] + grad
        params[name] = params[name] - _RATES[name] * momentum[name]


def expert_forward(x: Array, up: Array, down: Array) -> tuple[Array, Array]:
    """One expert's answers, and relu(x up), of which it takes the square: smooth, so that roundings change little."""
    inner = _xp(x).maximum(product(x, up), 0)
    return product(inner * inner, down), inner


def expert_backward(x: Array, inner: Array, grad: Array, up: Array, down: Array) -> tuple[Array, Array, Array]:
    """Gradients of x, up and down from those of the answers."""
    grad_inner = 2 * inner * product(grad, down.T)
    return product(grad_inner, up.T), product(x.T, grad_inner), product((inner * inner).T, grad)


class DenseMoe:
    """Every expert answers every token, and is weighted by 0 where it was not chosen."""

    def forward(self, x: Array, topk_idx: Array, topk_weights: Array, up: Array, down: Array) -> Array:
        self._x, self._topk_idx = x, topk_idx
        chosen = topk_idx[:, :, None] == _xp(x).arange(len(up))
        self._gates = (chosen * topk_weights[:, :, None]).sum(1)  # [T, E]
        self._experts = [expert_forward(x, up[e], down[e]) for e in range(len(up))]
        return sum(self._gates[:, e, None] * answers for e, (answers, _) in enumerate(self._experts))

    def backward(self, grad_y: Array, up: Array, down: Array) -> tuple[Array, Array, Array, Array]:
        xp = _xp(grad_y)
        parts = [
            expert_backward(self._x, inner, self._gates[:, e, None] * grad_y, up[e], down[e])
            for e, (_, inner) in enumerate(self._experts)
        ]
        grad_gates = xp.stack([(grad_y * answers).sum(1) for answers, _ in self._experts], axis=1)
        grad_x, grad_up, grad_down = zip(*parts, strict=True)
        return sum(grad_x), xp.take_along_axis(grad_gates, self._topk_idx, 1), xp.stack(grad_up), xp.stack(grad_down)


def product(a: Array, b: Array) -> Array:
    """a @ b. CuPy's own needs cuBLAS, half a gigabyte that cuep itself has no use for."""
    return a @ b if isinstance(a, np.ndarray) else (a[:, :, None] * b[None]).sum(1)


def _xp(array: Array) -> Any:
    """The module that the array is of."""
    if isinstance(array, np.ndarray):
        return np
    import cupy

    return cupy


def _normalise(x: Array) -> tuple[Array, Array]:
    """Rows of root mean square 1, and what they were multiplied by."""
    scale = ((x * x).mean(1, keepdims=True) + _EPSILON) ** -0.5
    return x * scale, scale


def _normalise_backward(y: Array, scale: Array, grad: Array) -> Array:
    return scale * (grad - y * (y * grad).mean(1, keepdims=True))


def _route(scores: Array, topk: int) -> tuple[Array, Array, float]:
    """Each token's best experts [T, K], the softmax of their scores, and the smallest lead over the next expert."""
    xp = _xp(scores)
    order = xp.argsort(-scores, axis=1)
    best = xp.take_along_axis(scores, order[:, : topk + 1], 1)
    weights = xp.exp(best[:, :topk] - best[:, :1])
    closest = float((best[:, topk - 1] - best[:, topk]).min()) if len(best) else np.inf
    return xp.ascontiguousarray(order[:, :topk]), weights / weights.sum(1, keepdims=True), closest


def _route_backward(topk_idx: Array, weights: Array, grad: Array, num_experts: int) -> Array:
    """[T, E], 0 for experts that were not chosen."""
    grad_best = weights * (grad - (weights * grad).sum(1, keepdims=True))
    return ((topk_idx[:, :, None] == _xp(grad).arange(num_experts)) * grad_best[:, :, None]).sum(1)


def _cross_entropy(logits: Array, targets: Array, batch: int) -> tuple[float, Array]:
    """The loss summed over these tokens, divided by batch, and its gradient."""
    xp = _xp(logits)
    shifted = logits - logits.max(1, keepdims=True)
    log_softmax = shifted - xp.log(xp.exp(shifted).sum(1, keepdims=True))
    one_hot = targets[:, None] == xp.arange(256)
    return -float((one_hot * log_softmax).sum(dtype=xp.float64)) / batch, (xp.exp(log_softmax) - one_hot) / batch
