"""cuep: dispatch and combine for mixture-of-experts layers, over MPI ranks, on GPUs and on the CPU.

Importing this package starts neither CUDA nor MPI.
"""

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
from cuep.group import Group
from cuep.handle import Handle, Received
from cuep.layout import footprint
from cuep.world import World, init

__version__ = "0.1.0"

__all__ = [
    "ArgumentError",
    "ArgumentTypeError",
    "BackendUnavailable",
    "ClosedError",
    "CompileError",
    "CuepError",
    "DeviceError",
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
