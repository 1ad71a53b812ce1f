"""Errors that all ranks raise together, so that none waits for one that has left."""

from __future__ import annotations

from typing import Any

from cuep.errors import CuepError


def raise_together(comm: Any, error: CuepError | None) -> None:
    """Raise on every rank the first error that any rank passes (collective)."""
    for other in comm.allgather(error):
        if other is not None:
            raise other
