"""One rank of a job that process_comm.Job starts: rounds of routing, dispatch and combine, each checked.

    python rank_program.py FOLDER PLAN [RANK SIZE]         without RANK and SIZE the communicator is MPI's

At one place one rank, the victim, does what the plan says. What happens goes to FOLDER/events-RANK.jsonl, one write per
event: what was told before a rank was killed is there. Times are of the clock that all processes share.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
from process_comm import FileComm

import cuep
from cuep import reference

_EXIT_STATUS = 3
_ROUNDS_MASKED, _ROUNDS_AGAIN = 1000, 100_000  # numbers of the first rounds without the victim, and with it again
_TOKENS, _EXPERTS_PER_RANK, _TOPK, _HIDDEN = 5, 4, 2, 128


@dataclass(frozen=True)
class Plan:
    """What the ranks do.

    Attributes:
        mode, timeout_s: the group's.
        num_rounds: rounds that are run if nothing goes wrong.
        victim: the rank that does `action` once, in round `at[0]` right before `at[1]`: "group" (making it), "route",
            "dispatch", "combine" or "close". Before any but the first, all its own operations so far are over.
        seconds: how long the victim sleeps before that.
        action: "kill" and "stop" (signals to itself), "exit" (sys.exit), "" (it was late, that is all).
        streamed: operations are queued on a stream of their own, and the rank looks at them after the round only.
        catches: a CuepError is written down, and the program ends well; else it ends the program.
        bare_comm: a communicator that has only what cuep.init asks for.
        masks: after a PeerTimeout the others go on without the victim, and with it again if it was only stopped.
        wrong_mask: they try it with the victim before.
        variants, reduce, combine_quant: the group's.
    """

    mode: str
    num_rounds: int
    timeout_s: float = 20
    victim: int = -1
    at: tuple[int, str] = (-1, "")
    seconds: float = 0
    action: str = ""
    streamed: bool = False
    catches: bool = True
    bare_comm: bool = False
    masks: bool = False
    wrong_mask: bool = False
    variants: dict[str, str] | None = None
    reduce: str | None = None
    combine_quant: str | None = None


class Rank:
    """This process."""

    def __init__(self, folder: Path, plan: Plan, comm: Any) -> None:
        self.plan = plan
        self.world = cuep.init(comm)
        self.rank, self.size = self.world.rank, self.world.size
        self._events = os.open(folder / f"events-{self.rank}.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        self._folder = folder
        self._handle: Any = None
        self._active = [1] * self.size
        self._num_dropped = 0
        self.tell(pid=os.getpid(), backend=self.world.backend.name)

    def tell(self, **events: Any) -> None:
        os.write(self._events, json.dumps(events).encode() + b"\n")

    def run(self) -> None:
        plan = self.plan
        self._reach(0, "group")
        cfg = cuep.GroupConfig(
            mode=plan.mode,
            num_experts=_EXPERTS_PER_RANK * self.size,
            hidden=_HIDDEN,
            num_topk=_TOPK,
            max_tokens_per_rank=2 * _TOKENS,
            timeout_s=plan.timeout_s,
            mask=plan.masks,
            variants=plan.variants or {},
            reduce=plan.reduce,
            combine_quant=plan.combine_quant,
        )
        group = cuep.Group(self.world, cfg)
        self._stream = self.world.stream() if plan.streamed else None
        try:
            for number in range(plan.num_rounds):
                self.tell(begun=number, round_begun_s=time.monotonic())
                self._round(group, number)
                self.tell(good_rounds=number + 1)
            self._reach(plan.num_rounds, "close")
        except cuep.CuepError as error:
            self.tell(error=type(error).__name__, message=str(error), raised_s=time.monotonic())
            if not plan.catches:
                raise
            if plan.masks:
                self._go_on(group)
            else:
                self.tell(afterwards=self._afterwards(group))
        self._close(group)

    def _go_on(self, group: cuep.Group) -> None:
        plan = self.plan
        everyone, victim = [1] * self.size, plan.victim
        if plan.wrong_mask:
            try:
                group.update_mask(everyone)
            except cuep.PeerTimeout as error:
                self.tell(wrong_mask_message=str(error))
        if self.rank != victim:
            self._use(group, [int(rank != victim) for rank in range(self.size)])
            self._masked_rounds(group)
        if plan.action == "stop":
            self._use(group, everyone)
            for number in range(_ROUNDS_AGAIN, _ROUNDS_AGAIN + 5):
                self._round(group, number)
                self.tell(rounds_again=number - _ROUNDS_AGAIN + 1)
        self.tell(num_dropped=group.num_dropped(), expected_dropped=self._num_dropped)

    def _use(self, group: cuep.Group, active: list[int]) -> None:
        group.update_mask(active)
        self._active = group.query_mask().tolist()
        assert self._active == active
        with suppress(cuep.OrderError):  # it needs a new routing
            self._handle.dispatch(self.world.backend.asarray(_inputs(0, self.size).x[self.rank]))
            raise AssertionError("a dispatch with the routing of another mask")

    def _masked_rounds(self, group: cuep.Group) -> None:
        """Five, or while a victim that was stopped has yet to notice: it may be storing. All are equally many."""
        victim, last = self.plan.victim, self._folder / "last-round"
        decider = min(rank for rank in range(self.size) if rank != victim)
        for number in range(_ROUNDS_MASKED, _ROUNDS_AGAIN):
            if last.exists() and number > int(last.read_text()):
                return
            is_noticed = self.plan.action == "kill" or _has_event(self._folder, victim, "raised_s")
            if self.rank == decider and number >= _ROUNDS_MASKED + 5 and is_noticed and not last.exists():
                whole = last.with_suffix(".whole")
                whole.write_text(str(number + 1))  # a peer that starts the round behind the next has seen it
                whole.rename(last)
            self._round(group, number)
            self.tell(masked_rounds=number - _ROUNDS_MASKED + 1)

    def _reach(self, number: int, place: str) -> None:
        """The victim does what it is to do, if this is where."""
        plan = self.plan
        if self.rank != plan.victim or (number, place) != tuple(plan.at):
            return
        time.sleep(plan.seconds)
        self.tell(acted_s=time.monotonic())
        if plan.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif plan.action == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
            self.tell(continued_s=time.monotonic())
        elif plan.action == "exit":
            sys.exit(_EXIT_STATUS)

    def _round(self, group: cuep.Group, number: int) -> None:
        backend, stream, place = self.world.backend, self._stream, lambda name: self._reach(number, name)
        every = _inputs(number, self.size)
        inputs = _masked(every, self._active)
        self._num_dropped += int((every.topk_idx[self.rank] >= 0).sum() - (inputs.topk_idx[self.rank] >= 0).sum())
        ids, weights, x = (
            backend.asarray(of_ranks[self.rank]) for of_ranks in (every.topk_idx, every.topk_weights, every.x)
        )
        place("route")
        if self._handle is None:
            self._handle = group.create_handle(ids, weights, stream=stream)
        else:
            self._handle.update(ids, weights, stream=stream)
        handle = self._handle
        self._look(group)
        place("dispatch")
        recv = handle.dispatch(x, stream=stream)
        if self._look(group):
            self._check_received(group.cfg, recv, inputs)
        place("combine")
        y = handle.combine(recv.tokens, stream=stream)
        group.check()
        self._check_received(group.cfg, recv, inputs)
        self._check_combined(group.cfg, y, inputs)
        recv.tokens[...], recv.source[...], y[...] = float("nan"), 777, float("nan")
        backend.synchronize()

    def _look(self, group: cuep.Group) -> bool:
        """Whether the operations so far are over and were good."""
        if not self.plan.streamed:
            group.check()
        return not self.plan.streamed

    def _check_received(self, cfg: cuep.GroupConfig, recv: cuep.Received, inputs: reference.Inputs) -> None:
        if cfg.mode == "ll":
            want = reference.dispatch_expert_major(inputs, self.rank, cfg.max_tokens_per_rank)
        else:
            want = reference.dispatch_flat(inputs, self.rank)
        host = self.world.backend.to_numpy
        reference.assert_same(host(recv.expert_counts), want.expert_counts, "expert_counts")
        reference.assert_same(host(recv.src_rank_counts), want.src_rank_counts, "src_rank_counts")
        reference.assert_same(host(recv.tokens).reshape(-1, cfg.hidden)[want.row_idx], want.tokens, "tokens")
        rows = host(recv.source).reshape(-1, want.source.shape[1])
        reference.assert_same(rows[want.row_idx], want.source, "source")

    def _check_combined(self, cfg: cuep.GroupConfig, y: Any, inputs: reference.Inputs) -> None:
        x = inputs.x[self.rank]
        if cfg.mode == "ll":
            want = reference.combine(inputs, self.rank, cfg, lambda k: x)
        else:
            want = reference.rank_sum(inputs.owner(self.rank), self.size, lambda rank: x, x.dtype)
        reference.assert_same(self.world.backend.to_numpy(y), want, "y")

    def _afterwards(self, group: cuep.Group) -> dict[str, str]:
        """What every call on the group and its handle raises now."""
        handle, rank_inputs = self._handle, _inputs(0, self.size)
        ids, x = (self.world.backend.asarray(part[self.rank]) for part in (rank_inputs.topk_idx, rank_inputs.x))
        calls: dict[str, Callable[[], Any]] = {
            "create_handle": lambda: group.create_handle(ids),
            "update": lambda: handle.update(ids),
            "dispatch": lambda: handle.dispatch(x),
            "combine": lambda: handle.combine(x),
            "num_recv_tokens": handle.num_recv_tokens,
            "host_counts": handle.host_counts,
            "check": group.check,
        }
        return {name: _raised_by(call) for name, call in calls.items()}

    def _close(self, group: cuep.Group) -> None:
        begin = time.monotonic()
        raised = [_raised_by(close) for close in (group.close, group.close, self.world.close)]
        self.tell(closing_raised=raised, closing_s=time.monotonic() - begin)


def _raised_by(call: Callable[[], Any]) -> str:
    try:
        call()
    except cuep.CuepError as error:
        return type(error).__name__
    return ""


def _inputs(number: int, num_ranks: int) -> reference.Inputs:
    """All ranks' inputs of a round. Rows say which rank, token and round they are; some (token, k) have no expert."""
    ids, weights, x = [], [], []
    for rank in range(num_ranks):
        rng = np.random.default_rng([number, rank])
        num_tokens = _TOKENS + (rank + number) % 3
        scores = rng.random((num_tokens, num_ranks * _EXPERTS_PER_RANK))
        ids.append(np.argsort(-scores, 1)[:, :_TOPK].astype(np.int64))
        ids[-1][rng.random(ids[-1].shape) < 0.1] = -1
        weights.append(rng.random(ids[-1].shape, np.float32))
        rows = rng.standard_normal((num_tokens, _HIDDEN), np.float32)
        rows[:, 0], rows[:, 1], rows[:, 2] = rank, np.arange(num_tokens), number
        x.append(rows.astype(ml_dtypes.bfloat16))
    return reference.make_inputs(num_ranks * _EXPERTS_PER_RANK, x, ids, weights)


def _masked(inputs: reference.Inputs, active: list[int]) -> reference.Inputs:
    """What is left of a round where some ranks take no part."""
    ids, local = [], inputs.num_local_experts
    for rank, of_rank in enumerate(inputs.topk_idx):
        is_kept = (of_rank >= 0) & np.array(active, bool)[np.maximum(of_rank, 0) // local] & bool(active[rank])
        ids.append(np.where(is_kept, of_rank, -1))
    return replace(inputs, topk_idx=ids)


def _has_event(folder: Path, rank: int, event: str) -> bool:
    path = folder / f"events-{rank}.jsonl"
    return path.exists() and f'"{event}"' in path.read_text()


def main() -> None:
    folder, plan = Path(sys.argv[1]), Plan(**json.loads(sys.argv[2]))
    comm: Any = None
    if len(sys.argv) > 3:
        comm = FileComm(folder, int(sys.argv[3]), int(sys.argv[4]))
        if plan.bare_comm:
            names = ("rank", "size", "allgather", "bcast", "barrier")
            comm = SimpleNamespace(**{name: getattr(comm, name) for name in names})
    rank = Rank(folder, plan, comm)
    with rank.world.backend.active():
        rank.run()
    rank.tell(imported_mpi="mpi4py" in sys.modules)


if __name__ == "__main__":
    main()
