"""cuep.init takes any object that has rank, size, allgather, bcast and barrier. CUEP_BACKEND=cuda: on GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
from process_comm import Job


@pytest.mark.parametrize("mode", ["ll", "ht"])
@pytest.mark.parametrize("is_bare", [True, False], ids=["five names", "with Ibarrier"])
def test_a_communicator_without_mpi(tmp_path: Path, mode: str, is_bare: bool) -> None:
    """E11: three plain processes dispatch and combine right values, close in order, and never load MPI."""
    with Job(tmp_path, 3, {"mode": mode, "num_rounds": 4, "bare_comm": is_bare}) as job:
        assert job.wait(60) == [0, 0, 0], job.printed()
        for rank in range(3):
            events = job.events(rank)
            assert events["good_rounds"] == 4
            assert events["closing_raised"] == ["", "", ""]
            assert events["imported_mpi"] is False
