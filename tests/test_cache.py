"""The cache of compiled kernels: what is compiled once, damage, many processes, folders that cannot be written."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from kernel_folder import CONSTANTS, ROOT, call, unit

from cuep import cache, compilers, jit, toolchain

pytest_plugins = ("kernel_folder",)
pytestmark = pytest.mark.usefixtures("folders")


def entries(tmp_path: Path) -> list[str]:
    return sorted(os.listdir(tmp_path / "cache" / "copy_plain"))


def test_build_runs_and_hits(gcc: None, tmp_path: Path, folders: Path) -> None:
    path = jit.build(unit())
    assert call(path) == 6404
    assert jit.build(unit()) == path
    assert (jit.stats.compiled, jit.stats.hits) == (1, 1)
    link = tmp_path / "link"
    link.symlink_to(folders)
    jit.KERNELS_DIR = link
    assert jit.build(unit()) == path, "F04: the same sources through a symlink are the same unit"
    assert call(jit.build(jit.render("copy_plain", CONSTANTS, "cpu", {"kNumThreads": 32}))) == 3204


def test_second_process_compiles_nothing(gcc: None, folders: Path) -> None:
    """F04."""
    jit.build(unit())
    code = (
        "from pathlib import Path; from cuep import jit; jit.KERNELS_DIR = Path(__import__('sys').argv[1]);"
        "jit.build(jit.render('copy_plain', {'kNumRanks': 4, 'kHidden': 64}, 'cpu')); print(jit.stats.compiled)"
    )
    command = [sys.executable, "-c", code, str(folders)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "0"


def test_compiler_and_flags_are_in_the_key(gcc: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """F04."""
    jit.build(unit())
    monkeypatch.setattr(compilers, "_HOST_FLAGS", (*compilers._HOST_FLAGS, "-g"))
    jit.build(unit())
    other = toolchain.HostCompiler(toolchain.host_compiler().command, "another version")
    monkeypatch.setattr(toolchain, "host_compiler", lambda: other)
    jit.build(unit())
    assert jit.stats.compiled == 3


@pytest.mark.parametrize("damage", ["truncated", "changed", "empty"])
def test_damaged_entry_is_rebuilt(gcc: None, damage: str) -> None:
    path = jit.build(unit())
    content = path.read_bytes()
    damaged = {"truncated": content[: len(content) // 2], "changed": b"x" + content[1:], "empty": b""}[damage]
    path.write_bytes(damaged)
    assert call(jit.build(unit())) == 6404
    assert jit.stats.compiled == 2
    assert jit.build(unit()).read_bytes() == content


def test_many_processes_at_once(gcc: None, tmp_path: Path, folders: Path) -> None:
    """F01: eight processes and an empty cache."""
    code = (
        "import ctypes, sys; from pathlib import Path; from cuep import jit; jit.KERNELS_DIR = Path(sys.argv[1]);"
        "path = jit.build(jit.render('copy_plain', {'kNumRanks': 4, 'kHidden': 64}, 'cpu'));"
        "print(ctypes.CDLL(str(path)).cuep_launch_copy_plain())"
    )
    for _ in range(3):
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        command = [sys.executable, "-c", code, str(folders)]
        jobs = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) for _ in range(8)]
        assert [job.communicate(timeout=60)[0].strip() for job in jobs] == ["6404"] * 8
        assert len(entries(tmp_path)) == 1, "one whole entry and no temporary file"


def test_entry_that_stays_invisible(gcc: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """F01: on a network file system the published file may not be seen for seconds."""
    real = cache.is_intact
    monkeypatch.setattr(cache, "is_intact", lambda path: tmp_path not in path.parents and real(path))
    path = jit.build(unit())
    assert tmp_path not in path.parents
    assert call(path) == 6404


def test_cache_that_cannot_be_written(
    gcc: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """F03: one warning that names the folder and the variable, and a private folder."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CUEP_CACHE_DIR", str(tmp_path / "file"))
    with caplog.at_level(logging.WARNING, "cuep"):
        path = jit.build(unit())
        assert call(path) == 6404
        jit.build(unit(kHidden=32))
        assert jit.build(unit()) == path
    assert len(caplog.records) == 1
    assert "CUEP_CACHE_DIR" in caplog.text
    assert str(tmp_path / "file") in caplog.text
    assert jit.stats.compiled == 2


def test_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """F03: the order of the variables, and no home at all."""
    assert cache.directory() == tmp_path / "cache"
    monkeypatch.delenv("CUEP_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert cache.directory() == Path("/x/cuep")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/nonexistent")
    assert cache.directory() == Path("/nonexistent/.cache/cuep")

    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", no_home)
    assert cache.directory() is None
    assert cache.publish("k", "key", ".so", b"content").read_bytes() == b"content"


def test_private_folder_goes_with_its_process(tmp_path: Path) -> None:
    code = "from cuep import cache; print(cache.publish('k', 'key', '.so', b'x'))"
    (tmp_path / "file").write_text("")
    environment = {**os.environ, "CUEP_CACHE_DIR": str(tmp_path / "file")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment, cwd=ROOT
    )
    assert not Path(done.stdout.strip()).parents[1].exists()
