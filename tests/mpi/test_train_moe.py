"""scripts/train_moe.py: a training through cuep takes the same course as one in a single process."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import train_moe
from train_model import DenseMoe, Sizes, loss_and_gradients, make_batch, make_params

TEXT = np.frombuffer(b"the quick brown fox jumps over the lazy dog\n" * 5, np.uint8).astype(np.int64)
SMALL = Sizes(batch=62, context=2, hidden=32, inner=32)  # ranks get different numbers of tokens
FEW = Sizes(batch=3, hidden=32, inner=32)
STEPS = 8
GRADIENTS = ("x", "topk_weights", "up", "down")  # as a layer's backward returns them


@pytest.mark.parametrize("sizes,steps", [(SMALL, STEPS), (FEW, 3)], ids=["small", "fewer tokens than ranks"])
def test_same_curve_as_one_process_and_same_bits_again(world: Any, sizes: Sizes, steps: int) -> None:
    losses, again = (train_moe.train(world, sizes, TEXT, steps) for _ in range(2))
    assert losses == again
    assert world.comm.allgather(losses) == [losses] * world.size
    difference, num_compared = train_moe.compare(losses, *train_moe.train_dense(sizes, TEXT, steps))
    assert num_compared == steps
    assert difference <= train_moe.BOUND
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("wrong", GRADIENTS)
def test_a_gradient_that_is_wrong_by_a_thousandth_is_noticed(world: Any, monkeypatch: Any, wrong: str) -> None:
    """On the last rank only."""
    right = train_moe.ExpertParallelMoe.backward

    def backward(self: Any, *args: Any) -> tuple[Any, ...]:
        gradients = list(right(self, *args))
        if world.rank == world.size - 1:
            gradients[GRADIENTS.index(wrong)] *= 1.001
        return tuple(gradients)

    monkeypatch.setattr(train_moe.ExpertParallelMoe, "backward", backward)
    losses = train_moe.train(world, SMALL, TEXT, STEPS)
    difference, _ = train_moe.compare(losses, *train_moe.train_dense(SMALL, TEXT, STEPS))
    assert difference > 2 * train_moe.BOUND


@pytest.mark.ranks(1)
@pytest.mark.parametrize("name", make_params(SMALL))
def test_gradients_are_those_of_the_loss(name: str) -> None:
    """Both trainings share the model: in float64 its gradients equal difference quotients in a random direction."""
    params = {key: value.astype(np.float64) for key, value in make_params(SMALL).items()}
    one_hot, targets = make_batch(SMALL, TEXT, 0)

    def evaluate(value: np.ndarray) -> tuple[float, Any, float]:
        moe = [DenseMoe() for _ in range(SMALL.layers)]
        return loss_and_gradients(params | {name: value}, moe, SMALL.topk, one_hot, targets, SMALL.batch)

    step = 1e-5 * np.random.default_rng(0).standard_normal(params[name].shape)
    change = evaluate(params[name] + step)[0] - evaluate(params[name] - step)[0]
    assert change == pytest.approx(2 * (evaluate(params[name])[1][name] * step).sum(), rel=1e-5)


@pytest.mark.ranks(1)
def test_steps_after_an_undecided_one_are_not_compared() -> None:
    assert train_moe.compare([3.0, 2.0, 1.5], [3.0, 2.25, 1.0], [1.0, 1.0, 0.0]) == (0.25, 2)
    assert np.isnan(train_moe.compare([3.0, np.nan], [3.0, 2.0], [1.0, 1.0])[0])


@pytest.mark.parametrize("bound,status", [(train_moe.BOUND, 0), (0.0, 1)])
def test_exit_status(world: Any, tmp_path: Any, monkeypatch: Any, bound: float, status: int) -> None:
    text = tmp_path / "text.txt"  # rank 0 reads its own
    text.write_bytes(TEXT.astype(np.uint8).tobytes())
    monkeypatch.setattr(train_moe, "BOUND", bound)
    assert train_moe.main(["--text", str(text), "--steps", "3"]) == status
