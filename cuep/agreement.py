"""Errors that all ranks raise together, so that none waits for one that has left."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

from cuep import env
from cuep.backend import Comm
from cuep.config import GroupConfig
from cuep.errors import ArgumentTypeError, CuepError, DeviceError, SettingsMismatch

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
    except (CuepError, MemoryError) as error:
        problem = error
    problems = comm.allgather(None if problem is None else f"{type(problem).__name__}: {problem}")
    if problem is not None:
        raise problem
    for rank, text in enumerate(problems):
        if text is not None:
            raise otherwise(f"rank {rank} failed: {text}")
    return cast("T", result)


def agree_on_settings(comm: Comm, cfg: GroupConfig) -> int:
    """SettingsMismatch on every rank, naming each setting that differs. Returns the first epoch."""
    mine: dict[str, Any] | str
    try:
        if not isinstance(cfg, GroupConfig):
            raise ArgumentTypeError(f"cfg must be a GroupConfig, got {type(cfg).__name__}")
        mine = cfg.settings() | {"CUEP_START_EPOCH": env.start_epoch()}
    except CuepError as error:
        mine = str(error)
    everyone = comm.allgather(mine)
    for rank, settings in enumerate(everyone):
        if isinstance(settings, str):
            raise ArgumentTypeError(f"rank {rank}: {settings}")
    differing = [name for name in everyone[0] if any(other[name] != everyone[0][name] for other in everyone)]
    if differing:
        values = "; ".join(f"{name}: {[settings[name] for settings in everyone]}" for name in differing)
        raise SettingsMismatch(f"GroupConfig differs between ranks 0 to {comm.size - 1}: {values}")
    return int(everyone[0]["CUEP_START_EPOCH"])
