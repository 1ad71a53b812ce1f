"""Errors that all ranks raise together, so that none waits for one that has left."""

from __future__ import annotations

import math
import operator
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

from cuep import env, layout
from cuep.backend import Comm
from cuep.config import GroupConfig
from cuep.errors import ArgumentError, ArgumentTypeError, CuepError, DeviceError, OrderError, SettingsMismatch

T = TypeVar("T")


def raise_together(comm: Any, error: CuepError | None) -> None:
    """Raise on every rank the first error that any rank passes (collective)."""
    for other in comm.allgather(error):
        if other is not None:
            raise other


def idle_barrier(comm: Any, seconds: float = math.inf) -> bool:
    """A barrier that sleeps between looks, where there is Ibarrier: a blocking MPI call spins on a core that
    another rank may need, and cannot give up. False: not all ranks came in time.
    """
    if not hasattr(comm, "Ibarrier"):
        comm.barrier()
        return True
    request = comm.Ibarrier()
    deadline = time.monotonic() + seconds
    pause = 1e-5
    while not request.Test():
        if time.monotonic() > deadline:
            return False
        time.sleep(pause)
        pause = min(2 * pause, 1e-3)
    return True


def together(comm: Comm, work: Callable[[], T], otherwise: type[CuepError] = DeviceError) -> T:
    """Do local work on every rank; if it fails on any, raise on all: there its own error, elsewhere `otherwise`."""
    result: T | None = None
    problem: Exception | None = None
    try:
        result = work()
    except Exception as error:  # also of a user's allocator
        problem = error
    problems = comm.allgather(None if problem is None else f"{type(problem).__name__}: {problem}")
    if problem is not None:
        raise problem
    for rank, text in enumerate(problems):
        if text is not None:
            raise otherwise(f"rank {rank} failed: {text}")
    return cast("T", result)


@dataclass(frozen=True)
class Agreed:
    """What the ranks of a new group have in common."""

    members: tuple[int, ...]  # ranks of the world
    start_epoch: int
    num_bytes: int  # of symmetric memory, on every rank of the world


def agree_on_members(comm: Comm, cfg: GroupConfig, ranks: Sequence[int] | None, *, is_capturing: bool) -> Agreed:
    """Who is in the group that this rank passes, with which settings (collective). Raises on all ranks."""
    mine: tuple[tuple[int, ...], dict[str, Any], int] | CuepError
    try:
        if not isinstance(cfg, GroupConfig):
            raise ArgumentTypeError(f"rank {comm.rank}: cfg must be a GroupConfig, got {type(cfg).__name__}")
        if is_capturing:
            raise OrderError("a group cannot be made inside a stream capture: it allocates and loads")
        members = _checked_ranks(ranks, comm)
        settings = cfg.settings() | {"CUEP_START_EPOCH": env.start_epoch()}
        cfg.check_ranks(len(members))
        mine = (members, settings, layout.arena(cfg, len(members)).num_bytes)
    except CuepError as error:
        mine = error
    everyone = comm.allgather(mine)
    for other in everyone:
        if isinstance(other, CuepError):
            _raise_mismatch(everyone)  # different settings explain why one of them is refused
            raise other
    for rank, (listed, _, _) in enumerate(everyone):
        for member in listed:
            if everyone[member][0] != listed:
                raise SettingsMismatch(
                    f"ranks differs between ranks: rank {rank} passed {list(listed)}, rank {member}, which is one of"
                    f" them, {list(everyone[member][0])}"
                )
    _raise_mismatch(everyone)
    members, settings, _ = everyone[comm.rank]
    return Agreed(members, int(settings["CUEP_START_EPOCH"]), max(num_bytes for _, _, num_bytes in everyone))


def _raise_mismatch(everyone: list[Any]) -> None:
    """SettingsMismatch that names each setting in which ranks with one list of ranks differ."""
    known = [(rank, other) for rank, other in enumerate(everyone) if not isinstance(other, CuepError)]
    for members in dict.fromkeys(listed for _, (listed, _, _) in known):
        alike = {rank: settings for rank, (listed, settings, _) in known if listed == members}
        first = next(iter(alike.values()))
        differing = [name for name in first if any(other[name] != first[name] for other in alike.values())]
        if differing:
            values = "; ".join(f"{name}: {[settings[name] for settings in alike.values()]}" for name in differing)
            raise SettingsMismatch(f"GroupConfig differs between ranks {list(alike)}: {values}")


def _checked_ranks(ranks: Sequence[int] | None, comm: Comm) -> tuple[int, ...]:
    if ranks is None:
        return tuple(range(comm.size))
    try:
        members = tuple(operator.index(rank) for rank in ranks)
    except TypeError:
        members = ()
    if not members or len(set(members)) < len(members) or not all(0 <= rank < comm.size for rank in members):
        raise ArgumentError(
            f"rank {comm.rank}: ranks={ranks!r} is not allowed; allowed: distinct ranks of the world,"
            f" 0 to {comm.size - 1}"
        )
    return members
