"""cuep among the ranks of a torch job, on torch tensors, without MPI:

    torchrun --nproc-per-node 4 scripts/torchrun_example.py

One step in each mode with experts that do nothing, so that what must come out is known.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

import cuep

TOKENS, HIDDEN, TOPK, EXPERTS_PER_RANK = 64, 1024, 4, 8


class TorchComm:
    """What cuep.init needs of a communicator, over a gloo group of its own: the default group may be NCCL's."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()
        self._group = dist.new_group(backend="gloo")

    def allgather(self, sendobj: Any) -> list[Any]:
        received = [None] * self.size
        dist.all_gather_object(received, sendobj, group=self._group)
        return received

    def bcast(self, obj: Any, root: int = 0) -> Any:
        box = [obj]
        dist.broadcast_object_list(box, src=root, group=self._group)
        return box[0]

    def barrier(self) -> None:
        dist.barrier(group=self._group)


def step(world: cuep.World, mode: str) -> None:
    """Route, dispatch and combine random tokens, and compare with what torch computes from this rank's own."""
    device = f"cuda:{world.backend.device}" if world.backend.name == "cuda" else "cpu"
    num_experts = EXPERTS_PER_RANK * world.size
    num_tokens = TOKENS - world.rank  # may differ between ranks
    x = torch.randn(num_tokens, HIDDEN, dtype=torch.bfloat16, device=device)
    logits = torch.randn(num_tokens, num_experts, device=device)
    topk_weights, topk_idx = torch.softmax(logits, -1).topk(TOPK)

    cfg = cuep.GroupConfig(mode=mode, num_experts=num_experts, hidden=HIDDEN, num_topk=TOPK, max_tokens_per_rank=TOKENS)
    with cuep.Group(world, cfg) as group:
        handle = group.create_handle(topk_idx, topk_weights)
        recv = handle.dispatch(x)
        y = handle.combine(recv.tokens)  # here a model's experts would work on recv.tokens
        group.check()

        assert isinstance(y, torch.Tensor) and y.device == x.device
        if mode == "ll":  # each token's rows come back weighted
            factor = topk_weights.sum(1)
        else:  # one row from each rank that has some of the token's experts
            owner = topk_idx // EXPERTS_PER_RANK
            factor = torch.nn.functional.one_hot(owner, world.size).amax(1).sum(1)
        # summed in float32 and rounded to bfloat16 once, which is less than 2**-8 off
        torch.testing.assert_close(y.float(), x.float() * factor[:, None], rtol=2**-8, atol=1e-6)


def main() -> None:
    dist.init_process_group("gloo")
    with cuep.init(TorchComm()) as world:
        torch.manual_seed(world.rank)
        for mode in ("ll", "ht"):
            step(world, mode)
        if world.rank == 0:  # the groups were closed by all ranks, so all are here
            print(f"torchrun example: ok ({world.size} ranks, {world.backend.name} backend)", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
