"""One batch of tokens on one handle: every method enqueues one call, which is what operations are made of."""

from __future__ import annotations

from typing import Any, Protocol

from cuep.bench import experts, verify
from cuep.bench.workload import Inputs, Options, rows_to_send
from cuep.group import Group
from cuep.world import World


class Routed(Protocol):
    """What operations need of a batch, cuep's or a peer's."""

    stream: Any

    def update(self) -> None: ...
    def dispatch(self) -> None: ...
    def answer_again(self) -> None: ...  # the experts' answers to the last dispatch, where rows may lie otherwise now
    def combine(self) -> None: ...

    def forget(self) -> None: ...  # clears the results of earlier calls, in stream order
    def problems(self, expected: verify.Expected) -> list[str]: ...  # of the last results, on any rank; collective


class Batch:
    """`inputs` on a handle of `group`, dispatched once so that the experts' answers are there. Collective.

    Attributes: stream, where everything is enqueued.
    """

    def __init__(self, world: World, group: Group, options: Options, inputs: Inputs, stream: Any) -> None:
        backend = world.backend
        self.stream = stream
        self._world = world
        x, scales = rows_to_send(options, inputs)
        arrays = (x, inputs.topk_idx, inputs.topk_weights)
        self._x, self._topk_idx, self._topk_weights = (backend.asarray(array) for array in arrays)
        self._scales = None if scales is None else backend.asarray(scales)
        backend.synchronize()  # the arrays were filled on another stream
        self._handle = group.create_handle(self._topk_idx, self._topk_weights, stream=stream)
        self._out: Any = None
        self._received: Any = self._handle.dispatch(self._x, self._scales, stream=stream)
        backend.stream(stream).synchronize()
        self._answers = experts.answers(world, options, self._received)
        if options.with_out:
            self._out = backend.empty(self._received.tokens.shape, self._received.tokens.dtype)
        if options.combine_buffer:
            self._answers, answers = self._handle.combine_buffer(stream=stream), self._answers
            self._answers[...] = answers
        self._has_buffer = options.combine_buffer
        backend.synchronize()
        self._combined: Any = None

    def update(self) -> None:
        self._handle.update(self._topk_idx, self._topk_weights, stream=self.stream)

    def dispatch(self) -> None:
        self._received = self._handle.dispatch(self._x, self._scales, out=self._out, stream=self.stream)

    def answer_again(self) -> None:
        """Rows always lie in the same order."""

    def combine(self) -> None:
        if self._has_buffer:  # as the experts would ask for it; it is the same one every time
            self._answers = self._handle.combine_buffer(stream=self.stream)
        self._combined = self._handle.combine(self._answers, stream=self.stream)

    def send(self) -> None:
        self._handle.dispatch(self._x, self._scales, out=self._out, send_only=True, stream=self.stream)

    def receive(self) -> None:
        self._received = self._handle.complete(self.stream)

    def answer(self) -> None:
        self._handle.combine(self._answers, send_only=True, stream=self.stream)

    def finish(self) -> None:
        self._combined = self._handle.complete(self.stream)

    def forget(self) -> None:
        backend = self._world.backend
        for array in (self._received.tokens, self._combined):
            if array is not None and array.flags.c_contiguous:  # rows in place may have scales between them
                backend.clear(array, backend.stream(self.stream))

    def problems(self, expected: verify.Expected) -> list[str]:
        return verify.problems(self._world, expected, self._received, self._combined)
