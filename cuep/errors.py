"""Every exception that cuep raises. All derive from CuepError and from the built-in that callers expect."""

from __future__ import annotations


class CuepError(Exception):
    """Base of all errors raised by cuep."""


class ArgumentError(CuepError, ValueError):
    """An argument's value is not allowed. The message names it, what was given and what is allowed."""


class ArgumentTypeError(CuepError, TypeError):
    """An argument has a type, dtype or device that is not accepted."""


class OrderError(CuepError, RuntimeError):
    """A call came in an order that is not allowed, for example combine before dispatch. Nothing was sent."""


class ClosedError(CuepError, RuntimeError):
    """The world, group or handle was closed, or the group broke down earlier."""


class SettingsMismatch(CuepError, ValueError):
    """Ranks passed different values for a setting that must agree. Raised on every rank."""


class PeerRefused(CuepError, RuntimeError):
    """Another rank refused its part of an operation. The operation did nothing on any rank; the next call works."""


class PeerTimeout(CuepError, TimeoutError):
    """A peer did not send what an operation waited for within `timeout_s`. The group can only be closed afterwards, or
    with GroupConfig(mask=True) go on without that peer: Group.update_mask.

    Attributes: peer, rank in the group of the one that was waited for (at times one that is well, but gave up waiting
    for another), or that said that the group goes on without this rank; None where it is no one rank.
    """

    peer: int | None = None


class DeviceError(CuepError, RuntimeError):
    """A kernel failed: a CUDA error, or divergence or deadlock found by the CPU runtime."""


class CompileError(CuepError, RuntimeError):
    """A kernel did not compile. The message holds the compiler's own text with real file names and lines."""


class BackendUnavailable(CuepError, RuntimeError):
    """Something that the backend needs is missing. The message says what, and how to get it."""


class OutOfSymmetricMemory(CuepError, MemoryError):
    """The symmetric heap has no room for a group. Raised on every rank; nothing stays allocated."""
