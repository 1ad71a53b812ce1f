"""Trains a small byte-level language model of two MoE layers, forward and backward through cuep, without a framework:

    mpirun -n 4 python -m mpi4py scripts/train_moe.py [--text FILE] [--steps N]

Tokens are split over the ranks and so are the experts; all other parameters are on every rank. The training runs twice,
and once in float64 on rank 0 with neither cuep nor ranks. Exit status 0: both runs have the same bits, their losses lie
within BOUND of the float64 ones, and they fell.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

# Read when NumPy is loaded: ranks share the cores, and threads of a linear-algebra library would only be in the way.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
from train_model import (
    EXPERT_PARAMS,
    Array,
    DenseMoe,
    Params,
    Sizes,
    expert_backward,
    expert_forward,
    loss_and_gradients,
    make_batch,
    make_params,
    update,
)

import cuep
from cuep.tables import print_table

README = Path(__file__).resolve().parents[1] / "README.md"
STEPS = 50
# DenseMoe in float32 took losses at most 4e-7 away from those in float64: 60 steps on 31 texts, 240 on five of them.
BOUND = 2e-6
# A token that chose an expert by less may choose another in float32; from there on the curves part for a good reason.
UNDECIDED = 2e-6


class ExpertParallelMoe:
    """One layer: tokens travel to the ranks of their experts and back, in both directions.

    expert_major, because each expert's rows then lie in one piece, a matrix product's operand, and cuep applies the
    weights. Rows are float32: the whole training is as exact as in one process.
    """

    def __init__(self, world: cuep.World, group: cuep.Group) -> None:
        self._world, self._group = world, group
        self._handle: Any = None

    def forward(self, x: Array, topk_idx: Array, topk_weights: Array, up: Array, down: Array) -> Array:
        xp, to_numpy = self._world.backend.xp, self._world.backend.to_numpy
        if self._handle is None:
            self._handle = self._group.create_handle(topk_idx, topk_weights)
        else:
            self._handle.update(topk_idx, topk_weights)
        # Into an array of ours: backward needs these rows, after its dispatch has overwritten the receive buffer.
        num_rows = max(1, self._handle.num_recv_tokens())
        self._rows = xp.empty((num_rows, x.shape[1]), x.dtype)
        received = self._handle.dispatch(x, out=self._rows)
        offsets = to_numpy(received.expert_offsets).tolist()
        self._zones = [slice(*pair) for pair in pairwise(offsets)]
        self._answers = xp.zeros_like(self._rows)
        self._inner = []
        for e, zone in enumerate(self._zones):
            self._answers[zone], inner = expert_forward(self._rows[zone], up[e], down[e])
            self._inner.append(inner)
        return self._handle.combine(self._answers)

    def backward(self, grad_y: Array, up: Array, down: Array) -> tuple[Array, Array, Array, Array]:
        """combine's backward is a dispatch with the same routing, dispatch's a combine without weights."""
        xp = self._world.backend.xp
        received = self._handle.dispatch(grad_y)
        grad_rows, weights = received.tokens[: len(self._rows)], received.topk_weights[: len(self._rows)]
        grad_x_rows, grad_up, grad_down = xp.zeros_like(self._rows), xp.zeros_like(up), xp.zeros_like(down)
        grad_weights = xp.zeros(len(self._rows), xp.float32)
        for e, zone in enumerate(self._zones):
            grad_weights[zone] = (grad_rows[zone] * self._answers[zone]).sum(1)
            grad = weights[zone, None] * grad_rows[zone]
            gradients = expert_backward(self._rows[zone], self._inner[e], grad, up[e], down[e])
            grad_x_rows[zone], grad_up[e], grad_down[e] = gradients
        grad_x, grad_weights = self._handle.combine(grad_x_rows, topk_weights=None, row_weight_grads=grad_weights)
        return grad_x, grad_weights, grad_up, grad_down


def train(world: cuep.World, sizes: Sizes, text: np.ndarray, num_steps: int) -> list[float]:
    """The training on all ranks, through cuep: the loss of each step, the same on all ranks. Collective."""
    to_device = world.backend.asarray
    mine = np.array_split(np.arange(sizes.batch), world.size)[world.rank]
    owned = np.array_split(np.arange(sizes.experts), world.size)[world.rank]
    params = {
        name: to_device(value[:, owned] if name in EXPERT_PARAMS else value)
        for name, value in make_params(sizes).items()
    }
    momentum = {name: world.backend.xp.zeros_like(value) for name, value in params.items()}
    cfg = cuep.GroupConfig(
        mode="ht",
        layout="expert_major",
        num_experts=sizes.experts,
        hidden=sizes.hidden,
        num_topk=sizes.topk,
        max_tokens_per_rank=-(-sizes.batch // world.size),
        dtype="float32",
        num_buffers=sizes.layers,  # from its first backward on, every layer's handle holds one
    )
    losses = []
    with cuep.Group(world, cfg) as group:
        moe = [ExpertParallelMoe(world, group) for _ in range(sizes.layers)]
        for step in range(num_steps):
            one_hot, targets = (to_device(whole[mine]) for whole in make_batch(sizes, text, step))
            loss, grads, _ = loss_and_gradients(params, moe, sizes.topk, one_hot, targets, sizes.batch)
            loss, shared = _sum_over_ranks(world, loss, grads)
            update(params, momentum, grads | shared)
            losses.append(loss)
        group.check()
    return losses


def _sum_over_ranks(world: cuep.World, loss: float, grads: Params) -> tuple[float, Params]:
    """The loss, and gradients of what every rank has, added in rank order. Those of experts are whole already."""
    shared = {name: world.backend.to_numpy(grad) for name, grad in grads.items() if name not in EXPERT_PARAMS}
    losses, everyone = zip(*world.comm.allgather((loss, shared)), strict=True)
    return sum(losses), {name: world.backend.asarray(sum(theirs[name] for theirs in everyone)) for name in shared}


def train_dense(sizes: Sizes, text: np.ndarray, num_steps: int) -> tuple[list[float], list[float]]:
    """The same training in this process alone, in float64: losses, and the margins of loss_and_gradients."""
    params = {name: value.astype(np.float64) for name, value in make_params(sizes).items()}
    momentum = {name: np.zeros_like(value) for name, value in params.items()}
    moe = [DenseMoe() for _ in range(sizes.layers)]
    losses, margins = [], []
    for step in range(num_steps):
        one_hot, targets = make_batch(sizes, text, step)
        loss, grads, margin = loss_and_gradients(params, moe, sizes.topk, one_hot, targets, sizes.batch)
        update(params, momentum, grads)
        losses.append(loss)
        margins.append(margin)
    return losses, margins


def compare(losses: list[float], dense: list[float], margins: list[float]) -> tuple[float, int]:
    """The largest difference between losses, and how many steps are compared: those before the first UNDECIDED one."""
    undecided = (step for step, margin in enumerate(margins) if margin < UNDECIDED)
    num_steps = next(undecided, len(dense))
    differences = np.abs(np.subtract(losses, dense))[:num_steps]
    return float(differences.max(initial=0)), num_steps


def report(losses: list[float], again: list[float], dense: list[float], margins: list[float]) -> bool:
    difference, num_steps = compare(losses, dense, margins)
    last = len(losses) - 1
    rows = [[f"{i}", f"{losses[i]:.7f}", f"{dense[i]:.7f}"] for i in sorted({*range(0, last, 10), last})]
    print_table("Loss of a byte, in nats", ["step", "cuep", "one process, float64"], rows)
    verdicts = {
        # False for NaN, and where nothing could be compared
        f"largest difference in {num_steps} of {len(losses)} steps {difference:.1e}, bound {BOUND:.0e}": (
            num_steps > 0 and difference <= BOUND
        ),
        "losses of a second run have the same bits": losses == again,
        f"loss from {losses[0]:.3f} to {losses[last]:.3f}": losses[last] < losses[0],
    }
    for what, is_right in verdicts.items():
        print(f"{what}: {'ok' if is_right else 'NOT'}", flush=True)
    return all(verdicts.values())


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split(":")[0])
    parser.add_argument("--text", type=Path, default=README, help="what to learn (default: README.md)")
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args(arguments)
    sizes = Sizes()
    with cuep.init() as world, world.backend.active():
        content = world.comm.bcast(options.text.read_bytes() if world.rank == 0 else None)
        text = np.frombuffer(content, np.uint8).astype(np.int64)
        begin = time.monotonic()
        losses, again = (train(world, sizes, text, options.steps) for _ in range(2))
        is_right = True
        if world.rank == 0:
            where = f"{world.size} rank{'s' * (world.size > 1)} ({world.backend.name} backend)"
            print(f"{options.text}: {options.steps} steps on {where}, twice, {time.monotonic() - begin:.1f} s")
            is_right = report(losses, again, *train_dense(sizes, text, options.steps))
        world.meet(600)  # the others sleep meanwhile; in bcast they would spin
        return 0 if world.comm.bcast(is_right) else 1


if __name__ == "__main__":
    sys.exit(main())
