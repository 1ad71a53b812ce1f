"""Helpers for tests that run on several MPI ranks: `from harness import ...`."""

from __future__ import annotations

import contextlib
import functools
import inspect
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import numpy as np
from mpi4py import MPI

from cuep import jit


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


@contextlib.contextmanager
def planted_bug(world: Any, monkeypatch: Any, file: str, right: str, wrong: str) -> Iterator[None]:
    """Within the block, every rank compiles a copy of the kernels whose `file` says `wrong` where it said `right`.

    Collective. `right` must stand there exactly once: a rule that was reworded must not leave its test without a bug.
    """
    assert (jit.KERNELS_DIR / file).read_text().count(right) == 1, f"{file} no longer says {right!r}"
    folder = Path(world.comm.bcast(tempfile.mkdtemp(prefix="cuep-planted-") if world.rank == 0 else None))
    try:
        if world.rank == 0:
            shutil.copytree(jit.KERNELS_DIR, folder / "kernels_cu")
            kernel = folder / "kernels_cu" / file
            kernel.write_text(kernel.read_text().replace(right, wrong))
        world.comm.barrier()
        monkeypatch.setattr(jit, "KERNELS_DIR", folder / "kernels_cu")
        yield
    finally:
        world.comm.barrier()
        if world.rank == 0:
            shutil.rmtree(folder)


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
