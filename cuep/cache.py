"""The folder of compiled kernels: entries are found by key, checked by content, and published by atomic rename."""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import logging
import os
import shutil
import tempfile
from pathlib import Path

from cuep import env

_log = logging.getLogger("cuep")


def directory() -> Path | None:
    """CUEP_CACHE_DIR, else $XDG_CACHE_HOME/cuep, else ~/.cache/cuep; None where there is no home at all."""
    chosen = env.cache_dir()
    if chosen is not None:
        return Path(chosen)
    parent = env.user_cache_home()
    try:
        return (Path(parent) if parent else Path.home() / ".cache") / "cuep"
    except RuntimeError:
        return None


def find(name: str, key: str, suffix: str) -> Path | None:
    """The entry of this key, if there is one whose content is what its name says. A damaged one is removed."""
    for folder in (directory(), _private_folder_if_made()):
        if folder is None:
            continue
        try:
            entries = sorted(entry.name for entry in os.scandir(folder / name) if entry.name.startswith(key))
        except OSError:
            continue
        for path in (folder / name / entry for entry in entries if entry.endswith(suffix)):
            with contextlib.suppress(OSError):  # another user's file, or a network file system's stale one
                if _checksum(path.read_bytes()) == _checksum_in_name(path):
                    return path
                path.unlink()
    return None


def is_intact(path: Path) -> bool:
    """Whether the file can be read and has the checksum that its name ends with."""
    try:
        return _checksum(path.read_bytes()) == _checksum_in_name(path)
    except OSError:
        return False


def publish(name: str, key: str, suffix: str, content: bytes) -> Path:
    """Store an entry and return its path; in a folder of this process, with one warning, where the cache cannot be."""
    entry = f"{key}-{_checksum(content)}{suffix}"
    folder = directory()
    if folder is not None:
        try:
            path = _write(folder / name, entry, content)
            if is_intact(path):
                return path
            reason = "the written file cannot be read back"
        except OSError as error:
            reason = str(error)
    else:
        reason = "this user has no home directory"
    _warn_once(f"compiled kernels are not kept: cannot write to the cache {folder}: {reason}; set CUEP_CACHE_DIR")
    return _write(private_folder() / name, entry, content)


@functools.cache
def private_folder() -> Path:
    """A temporary folder of this process, removed when it exits."""
    folder = Path(tempfile.mkdtemp(prefix="cuep-"))
    owner = os.getpid()

    def remove() -> None:
        if os.getpid() == owner:  # a forked child must not take it away from its parent
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
    return folder


def _private_folder_if_made() -> Path | None:
    return private_folder() if private_folder.cache_info().currsize else None


def _write(folder: Path, entry: str, content: bytes) -> Path:
    """Other processes see the whole file or none."""
    folder.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=".tmp-", dir=folder)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.chmod(temporary, 0o755)
        os.replace(temporary, folder / entry)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    return folder / entry


@functools.cache
def _warn_once(text: str) -> None:
    _log.warning("%s", text)


def _checksum_in_name(path: Path) -> str:
    return path.stem.rpartition("-")[2]


def _checksum(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]
