"""cuep: dispatch and combine for mixture-of-experts layers, over MPI ranks, on GPUs and on the CPU.

Importing this package starts neither CUDA nor MPI, and loads NumPy only with the first name that needs it.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cuep.config import GroupConfig
from cuep.errors import (
    ArgumentError,
    ArgumentTypeError,
    BackendUnavailable,
    ClosedError,
    CompileError,
    CuepError,
    DeviceError,
    OrderError,
    OutOfSymmetricMemory,
    PeerRefused,
    PeerTimeout,
    SettingsMismatch,
)

if TYPE_CHECKING:
    from cuep.arrivals import Arrivals
    from cuep.events import Event
    from cuep.group import Group
    from cuep.handle import Handle
    from cuep.layout import footprint
    from cuep.received import Received
    from cuep.world import World, init

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "Arrivals",
    "BackendUnavailable",
    "ClosedError",
    "CompileError",
    "CuepError",
    "DeviceError",
    "Event",
    "Group",
    "GroupConfig",
    "Handle",
    "OrderError",
    "OutOfSymmetricMemory",
    "PeerRefused",
    "PeerTimeout",
    "Received",
    "SettingsMismatch",
    "World",
    "footprint",
    "init",
]

_MODULES = {
    "Arrivals": "arrivals",
    "Event": "events",
    "Group": "group",
    "Handle": "handle",
    "Received": "received",
    "World": "world",
    "footprint": "layout",
    "init": "world",
}


def __getattr__(name: str) -> Any:
    """Names that need NumPy, loaded when they are first used (PEP 562)."""
    if name not in _MODULES:
        raise AttributeError(f"module 'cuep' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"cuep.{_MODULES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
