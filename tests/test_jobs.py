"""Whole jobs of several ranks: how they end. CUEP_BACKEND=cuda runs them on GPUs."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cuep import mpiexec

ROOT = Path(__file__).resolve().parents[1]
NUM_RANKS = int(os.environ.get("CUEP_TEST_JOB_RANKS", "2"))

_PROLOGUE = """
import sys
import ml_dtypes
import numpy as np
import cuep

world = cuep.init()
cfg = cuep.GroupConfig(mode="ll", num_experts=8, hidden=64, num_topk=2, max_tokens_per_rank=4, timeout_s=5)
group = cuep.Group(world, cfg)
with world.backend.active():
    ids = world.backend.asarray(np.array([[world.rank % 2, 3]]))
    x = world.backend.asarray(np.ones((1, 64), ml_dtypes.bfloat16))
handle = group.create_handle(ids)
y = handle.combine(handle.dispatch(x).tokens)
group.check()
assert (world.backend.to_numpy(y).astype(np.float32) == 2).all()
print("worked", flush=True)
"""

# (how it ends, what it does after a step that worked, exit status is 0)
ENDINGS = [
    ("closes", "group.close(); world.close()", True),
    ("just ends", "", True),
    ("sys.exit(0)", "sys.exit(0)", True),
    ("closes, then finalises MPI", "group.close(); world.close(); from mpi4py import MPI; MPI.Finalize()", True),
    ("finalises MPI without closing", "from mpi4py import MPI; MPI.Finalize()", True),
    ("raises", "raise RuntimeError('mine')", False),
    ("one rank raises between calls", "handle.dispatch(x) if world.rank else 1 / 0; group.check()", False),
]


@pytest.mark.parametrize("ending,is_good", [e[1:] for e in ENDINGS], ids=[e[0] for e in ENDINGS])
def test_how_a_job_ends(tmp_path: Path, ending: str, is_good: bool) -> None:
    """E04, E09, C11: the intended exit status, soon, without a crash; the group is the first use of the GPU."""
    script = tmp_path / "job.py"
    script.write_text(_PROLOGUE + ending + "\n")
    command = [*mpiexec.command(), "-n", str(NUM_RANKS), sys.executable, str(script)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUEP_BACKEND": os.environ.get("CUEP_BACKEND", "cpu")}
    begin = time.monotonic()
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)
    seconds = time.monotonic() - begin
    printed = result.stdout + result.stderr
    assert result.stdout.count("worked") == NUM_RANKS, printed
    assert (result.returncode == 0) == is_good, printed
    assert not any(word in printed for word in ("Segmentation", "core dumped", "terminate called")), printed
    assert seconds < 40, printed


@pytest.mark.skipif(os.environ.get("CUEP_BACKEND") == "cuda", reason="the same on every backend")
def test_wrong_results_are_told(tmp_path: Path) -> None:
    """A copy of cuep whose combine forgets the weights: bench --check prints what is wrong and ends with status 1."""
    for folder in ("cuep", "kernels_cu"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    kernel = tmp_path / "kernels_cu/include/cuep/ll_combine.cuh"
    source = kernel.read_text()
    assert source.count("__fmul_rn(weight, term[c])") == 1
    kernel.write_text(source.replace("__fmul_rn(weight, term[c])", "term[c]"))
    command = [sys.executable, "-m", "cuep", "bench", "ll", "--ranks", "2", "--check", "--iterations", "1"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "CUEP_BACKEND": "cpu"}
    result = subprocess.run(
        command, capture_output=True, text=True, timeout=100, env=environment, cwd=tmp_path, check=False
    )
    printed = result.stdout + result.stderr
    assert result.returncode != 0, printed
    assert "WRONG" in printed and "combine: y differs" in printed, printed
