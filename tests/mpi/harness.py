"""Helpers for tests that run on several MPI ranks: `from harness import ...`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import hypothesis
import numpy as np
from mpi4py import MPI


@functools.cache
def verdict_comm() -> MPI.Intracomm:
    """The harness's own communicator: a test that went wrong in the middle of a collective call cannot confuse it."""
    return MPI.COMM_WORLD.Dup()


def to_device(world: Any, array: np.ndarray) -> Any:
    """The same values as an array of the world's backend (NumPy or CuPy)."""
    return world.backend.asarray(array)


def to_host(world: Any, array: Any, stream: Any = None) -> np.ndarray:
    """A NumPy copy of an array of the world's backend, once what is queued on `stream` has run."""
    return world.backend.to_numpy(array, stream)


def examples(max_examples: int = 20, **strategies: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test once for each of `max_examples` values drawn by hypothesis, the same on every rank.

    Rank 0 draws and broadcasts: a rank whose example failed must not start to shrink alone while its peers go on. So
    nothing is shrunk; the failing example is in the report instead. Keyword arguments are strategies, as for
    `hypothesis.given`.
    """

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            comm = verdict_comm()
            drawn = _draw(max_examples, strategies) if comm.rank == 0 else None
            for number, example in enumerate(comm.bcast(drawn)):
                failure: BaseException | None = None
                try:
                    test(**fixtures, **example)
                except Exception as error:
                    failure = error
                failed_ranks = [rank for rank, failed in enumerate(comm.allgather(failure is not None)) if failed]
                if failed_ranks:
                    message = f"example {number} failed on ranks {failed_ranks}: {example!r}"
                    raise AssertionError(message) from failure

        # pytest sees the fixtures only: the drawn arguments are not fixtures.
        signature = inspect.signature(test)
        left = [p for name, p in signature.parameters.items() if name not in strategies]
        run.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        return run

    return decorate


def _draw(max_examples: int, strategies: dict[str, Any]) -> list[dict[str, Any]]:
    drawn: list[dict[str, Any]] = []

    @hypothesis.settings(max_examples=max_examples, phases=[hypothesis.Phase.generate])
    @hypothesis.given(hypothesis.strategies.fixed_dictionaries(strategies))
    def keep(example: dict[str, Any]) -> None:
        drawn.append(example)

    keep()
    return drawn
