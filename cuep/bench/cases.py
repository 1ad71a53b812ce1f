"""The operations that `cuep bench` times, and how each is checked."""

from __future__ import annotations

from dataclasses import dataclass

from cuep.backend import Backend
from cuep.bench.batch import Batch, Routed
from cuep.bench.gemm import Gemm
from cuep.bench.timing import Operation, Step
from cuep.bench.verify import Expected
from cuep.world import World

PAIR = ("dispatch", "combine")


@dataclass(frozen=True)
class Case:
    """An operation on some batches.

    Attributes:
        moves: "dispatch" and "combine", each as often as the operation does it.
        again: steps that do it once, from a dispatch to its combine, for the check.
        gemm: shape (experts, rows, hidden, columns) of the matrix products in it, if there are any.
    """

    operation: Operation
    moves: tuple[str, ...]
    again: tuple[Step, ...]
    batches: tuple[Routed, ...]
    gemm: tuple[int, int, int, int] | None = None

    def problems(self, world: World, expected: Expected) -> list[str]:
        """Do it once more, on what all those repetitions left behind, and compare. Collective."""
        for batch in self.batches:
            batch.forget()
        world.backend.synchronize()
        world.comm.barrier()  # nobody's rows arrive before everybody has cleared
        for step in self.again:
            step()
        world.backend.synchronize()
        return [text for batch in self.batches for text in batch.problems(expected)]


def plain(batch: Routed, *, in_turn: bool = False) -> list[Case]:
    """in_turn: a combine follows every dispatch, for libraries that want it so; where it is not timed it is not part of
    the figure."""
    again, after = (batch.dispatch, batch.answer_again, batch.combine), (batch.combine,) if in_turn else ()
    return [
        Case(Operation("dispatch", (batch.dispatch,), after=after), ("dispatch",), again, (batch,)),
        Case(Operation("combine", (batch.combine,), before=(batch.dispatch,)), ("combine",), again, (batch,)),
        Case(Operation("route+dispatch", (batch.update, batch.dispatch), after=after), ("dispatch",), again, (batch,)),
        Case(Operation("pair", (batch.dispatch, batch.combine)), PAIR, again, (batch,)),
    ]


def staged(batch: Batch) -> list[Case]:
    """The send phases alone, each completed outside the measured time, and a pair of staged calls."""
    again = (batch.send, batch.receive, batch.answer, batch.finish)
    return [
        Case(Operation("dispatch send", (batch.send,), after=(batch.receive,)), ("dispatch",), again, (batch,)),
        Case(
            Operation("combine send", (batch.answer,), before=(batch.dispatch,), after=(batch.finish,)),
            ("combine",),
            again,
            (batch,),
        ),
        Case(Operation("staged pair", again), PAIR, again, (batch,)),
    ]


def two_groups(backend: Backend, first: Batch, second: Batch) -> list[Case]:
    """Batches of two groups, in a stream each: the time from a common start until both are through."""
    steps = (
        _behind(backend, second.stream, first.stream),
        first.dispatch,
        second.dispatch,
        first.combine,
        second.combine,
        _behind(backend, first.stream, second.stream),
    )
    return [Case(Operation("pair, 2 groups", steps), 2 * PAIR, steps, (first, second))]


def overlap(backend: Backend, first: Batch, second: Batch, gemm: Gemm, aside: Gemm, *, is_staged: bool) -> list[Case]:
    """A layer's work on two micro-batches of one group, both in one stream, which is also that of `gemm`.

    "pipeline" (is_staged: where the mode has staged calls) has one stream: what one micro-batch sent travels, and peers
    that are late catch up, while the product of the other one runs; only then is it received. In "pipeline, 2 streams"
    whole dispatches and combines run beside the products, which are enqueued on the stream of `aside`.
    """
    both = (first, second)
    communication = (first.dispatch, first.combine, second.dispatch, second.combine)
    sequence = (first.dispatch, gemm, first.combine, second.dispatch, gemm, second.combine)
    pipeline = (
        *(first.send, second.send),
        *(first.receive, gemm, first.answer),
        *(second.receive, gemm, first.finish),
        *(second.answer, second.finish),
    )
    to_product = _behind(backend, aside.stream, first.stream)
    from_product = _behind(backend, first.stream, aside.stream)
    two_streams = (
        *(first.dispatch, to_product, aside, second.dispatch),
        *(from_product, to_product, aside, first.combine),
        *(from_product, second.combine),
    )
    shape = gemm.shape
    return [
        Case(Operation("gemms", (gemm, gemm)), (), (), (), shape),
        Case(Operation("communication", communication), 2 * PAIR, communication, both),
        Case(Operation("gemms + communication", sequence), 2 * PAIR, sequence, both, shape),
        *([Case(Operation("pipeline", pipeline), 2 * PAIR, pipeline, both, shape)] if is_staged else []),
        Case(Operation("pipeline, 2 streams", two_streams), 2 * PAIR, two_streams, both, shape),
    ]


def _behind(backend: Backend, later: object, earlier: object) -> Step:
    """What stream `later` is given from then on comes after what `earlier` was given so far; also while capturing."""
    last, first = backend.stream(later), backend.stream(earlier)
    return lambda: last.wait(first.record())
