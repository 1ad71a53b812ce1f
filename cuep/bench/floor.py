"""The simplest kernels that move what a high-throughput dispatch or combine must move, to compare with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from cuep.bench import experts, verify
from cuep.bench.cases import PAIR, Case
from cuep.bench.timing import Operation
from cuep.bench.workload import Inputs, Options, group_config
from cuep.group import Group
from cuep.high_throughput import row_pipeline
from cuep.kernel import Kernel
from cuep.launching import address, elem_type
from cuep.params import Constant
from cuep.world import World

NAME = "floor"  # in the place of a variant


def options_of(options: Options) -> Options:
    """Of the group whose memory and routing the kernels use: rows one per (token, rank), as they are."""
    return replace(
        options, layout="flat", reduce=None, alignment=1, zero_padding=False, quant=None, scale_format="fp32"
    )


class Floor:
    """Rows of `inputs` pushed into, and answers pulled from, receive buffers of `group`, which is made with
    options_of(options). Collective.

    Attributes: stream, where everything is enqueued.
    """

    def __init__(self, world: World, group: Group, options: Options, inputs: Inputs, stream: Any) -> None:
        backend = world.backend
        self.stream = stream
        self._world = world
        arrays = (inputs.x, inputs.topk_idx, inputs.topk_weights)
        self._x, idx, weights = (backend.asarray(array) for array in arrays)
        backend.synchronize()  # the arrays were filled on another stream
        self._handles = [group.create_handle(idx, weights, stream=stream) for _ in range(2)]
        self._received, answered = (handle.dispatch(self._x, stream=stream) for handle in self._handles)
        backend.stream(stream).synchronize()
        answered.tokens[...] = experts.answers(world, options_of(options), answered)
        self._combined = backend.zeros(self._x.shape, answered.tokens.dtype)

        moved, sizes = group_config(options, {}), group.cfg
        shared: dict[str, Constant] = {"kNumRanks": world.size}
        pipeline = row_pipeline(moved.sent_row_bytes, "kNumWarps", 4, 3, backend.max_smem_bytes)
        push = Kernel(
            backend, "floor_dispatch_push", shared | {"kRowBytes": moved.sent_row_bytes}, world.comm, pipeline
        )
        returned: dict[str, Constant] = {
            "kRowBytes": sizes.combine_row_bytes,
            "elem_t": elem_type(str(sizes.combine_dtype)),
        }
        pull = Kernel(backend, "floor_combine_pull", shared | returned, world.comm)
        common = {
            "arena": [group.memory.peers[rank] for rank in group.members],
            "row_stride": sizes.row_bytes,
            "rows": address(self._handles[0].arrays["rows"]),
            "num_tokens": options.tokens,
        }
        base = group.memory.address
        self._push = self._launcher(
            push,
            options,
            common
            | {
                "rows_offset": address(self._received.tokens) - base,
                "x": address(self._x),
                "x_stride": sizes.row_bytes,
                "rank": world.rank,
            },
        )
        self._pull = self._launcher(
            pull,
            options,
            common
            | {
                "rows_offset": address(answered.tokens) - base,
                "y": address(self._combined),
                "y_stride": sizes.row_bytes,
            },
        )
        backend.synchronize()
        world.comm.barrier()  # all answers are there to be pulled

    def _launcher(self, kernel: Kernel, options: Options, values: dict[str, Any]) -> Any:
        backend = self._world.backend
        record = kernel.layout.new()
        for name, value in values.items():
            record[name] = value
        grid = min(kernel.max_grid, options.num_sms or backend.num_processors)
        stream = backend.stream(self.stream)
        return lambda: kernel.launch(grid, record, stream)

    def update(self) -> None:
        """The rows lie where they lay."""

    def dispatch(self) -> None:
        self._push()

    def answer_again(self) -> None:
        """They are in another buffer."""

    def combine(self) -> None:
        self._pull()

    def forget(self) -> None:
        backend = self._world.backend
        for array in (self._received.tokens, self._combined):
            backend.clear(array, backend.stream(self.stream))

    def problems(self, expected: verify.Expected) -> list[str]:
        self._world.comm.barrier()  # nothing else says that all rows have been pushed
        return verify.problems(self._world, expected, self._received, self._combined)


def cases(floor: Floor, options: Options) -> list[Case]:
    """Pushed rows are compared with the oracle only where they travel as they are."""
    again = (floor.dispatch, floor.combine)
    batches = (floor,) if options.quant is None else ()
    return [
        Case(Operation("dispatch", (floor.dispatch,)), ("dispatch",), again, batches),
        Case(Operation("combine", (floor.combine,)), ("combine",), again, batches),
        Case(Operation("pair", again), PAIR, again, batches),
    ]
