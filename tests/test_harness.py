"""The harness of tests/mpi, by running it on tests that fail in ways a real one might."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from cuep import mpiexec
from cuep.errors import BackendUnavailable

HERE = Path(__file__).parent
SHM = Path("/dev/shm")
TESTS = """
import pytest
from harness import examples, verdict_comm
from hypothesis import strategies as st

rank = verdict_comm().rank

def test_fine():
    pass

def test_fails_on_rank_1():
    print("printed by rank", rank)
    assert rank != 1, "rank 1 is wrong"

@pytest.fixture
def breaks_on_rank_1():
    if rank == 1:
        raise RuntimeError("fixture broke")

def test_fixture(breaks_on_rank_1):
    raise AssertionError("this body must not run on rank 0 alone")

@pytest.mark.ranks(3)
def test_for_3_ranks():
    raise AssertionError("these are 2")

@examples(30, value=st.integers(0, 100), more=st.lists(st.booleans()))
def test_examples_are_the_same(value, more):
    assert set(map(repr, verdict_comm().allgather((value, more)))) == {repr((value, more))}

@examples(30, value=st.integers(0, 100))
def test_example_fails_on_rank_1(value):
    assert rank == 0 or value < 50
"""
HANG = """
import pytest
from harness import verdict_comm

@pytest.mark.timeout(2)
def test_rank_1_never_comes():
    if verdict_comm().rank == 1:
        import time
        time.sleep(60)
"""


@pytest.fixture
def run(tmp_path):
    try:
        launcher = mpiexec.command()
    except BackendUnavailable as missing:
        pytest.skip(str(missing))
    folder = tmp_path / "mpi"
    folder.mkdir()
    shutil.copy(HERE.parent / "pyproject.toml", tmp_path)
    for name in ("conftest.py", "harness.py"):
        shutil.copy(HERE / "mpi" / name, folder)

    def run(tests: str, num_ranks: int = 2) -> subprocess.CompletedProcess[str]:
        (folder / "test_it.py").write_text(tests)
        command = [*launcher, "-n", str(num_ranks), sys.executable, "-m", "pytest", "--color=no", "mpi"]
        env = os.environ | {"PYTHONPATH": str(HERE.parent), "TMPDIR": str(tmp_path)}
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)

    before = set(SHM.glob("mpich_shm_*"))
    yield run
    # A job that was killed leaves its segment behind; new ones that no process maps are ours.
    mapped = "".join(_read(maps) for maps in Path("/proc").glob("[0-9]*/maps"))
    for segment in set(SHM.glob("mpich_shm_*")) - before:
        if segment.name not in mapped:
            segment.unlink(missing_ok=True)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # the process is gone, or is someone else's
        return ""


def test_a_failure_on_one_rank_is_reported_once_with_that_ranks_message(run):
    done = run(TESTS)
    assert done.returncode == 1
    assert done.stdout.count("test session starts") == 1
    assert "2 failed, 2 passed, 1 skipped, 1 error" in done.stdout
    assert "rank 1: AssertionError: rank 1 is wrong" in done.stdout and "printed by rank 1" in done.stdout
    assert "rank 1: RuntimeError: fixture broke" in done.stdout and "must not run" not in done.stdout
    assert "failed on ranks [1]: {'value': " in done.stdout


def test_more_than_4_ranks_run_only_tests_that_name_them(run):
    done = run("import pytest\ndef test_a(): pass\n@pytest.mark.ranks(2, 5)\ndef test_b(): pass\n", num_ranks=5)
    assert done.returncode == 0 and "1 passed, 1 deselected" in done.stdout


def test_a_rank_that_hangs_is_ended(run):
    done = run(HANG)
    assert done.returncode != 0
    assert "test_rank_1_never_comes" in done.stdout + done.stderr


def test_a_rank_that_cannot_collect_stops_all(run):
    done = run("from harness import verdict_comm\nif verdict_comm().rank == 1: import nothing\ndef test_a(): pass\n")
    assert done.returncode != 0 and "No module named 'nothing'" in done.stderr + done.stdout
