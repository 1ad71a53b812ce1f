"""Other libraries that `cuep bench --peer` times on the same inputs, in the same process, by the same clocks."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from cuep.bench.batch import Routed
from cuep.bench.workload import Inputs, Options
from cuep.errors import ArgumentError
from cuep.world import World

NAMES = ("nccl-ep",)


class PeerBatch(Routed, Protocol):
    """A batch on a peer's own handle; `version` says which release did it."""

    version: str


Opener = Callable[[World, Options, Inputs, Any], AbstractContextManager[PeerBatch]]


def find(name: str, world: World, options: Options) -> Opener:
    """What opens the peer, after looking whether it can do what `options` ask for. Collective.

    Raises, on every rank:
        ArgumentError: no such peer, or it has no such form. BackendUnavailable: its packages are missing.
    """
    if name not in NAMES:
        raise ArgumentError(f"peer={name!r} is not allowed; allowed: {NAMES}")
    from cuep.bench.peers import nccl_ep

    nccl_ep.require(world, options)
    return nccl_ep.opened
