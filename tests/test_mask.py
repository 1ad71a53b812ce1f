"""Groups that go on without a rank that died or stopped, and with it again. What a rank does: rank_program.py.

CUEP_BACKEND=cuda runs the jobs on GPUs.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import pytest
from process_comm import Job
from test_death import AMID_S, GOOD_ROUNDS, GRACE_S, NUM_RANKS, START_S, TIMEOUT_S, others, start

# of 10 tokens per rank: lines by default
FORMS: dict[str, dict[str, Any]] = {
    "lines": {},
    "flags": {"variants": {"dispatch": "direct", "combine": "direct"}},
    "flags, per_rank": {"variants": {"dispatch": "direct", "combine": "partial"}, "reduce": "per_rank"},
    "encoded": {"combine_quant": "fp8_block128"},
}


def check_survivors(job: Job, victim: int) -> None:
    for rank in others(victim):
        events = job.events(rank)
        assert events.get("error") == "PeerTimeout", job.printed()
        assert "update_mask() or close() the group now" in events["message"]
        assert events["masked_rounds"] >= 5
        assert events["num_dropped"] == events["expected_dropped"] > 0
        assert events["closing_raised"] == ["", "", ""], job.printed()


@pytest.mark.parametrize("place", ["dispatch", "combine"])
@pytest.mark.parametrize("form", FORMS)
def test_a_killed_rank(tmp_path: Path, form: str, place: str) -> None:
    """The others go on: right rows, right sums, every pair that has no expert any more counted."""
    victim = NUM_RANKS - 1 if place == "dispatch" else 0
    with start(tmp_path, "ll", victim=victim, action="kill", at=(3, place), masks=True, **FORMS[form]) as job:
        job.wait_for(victim, "acted_s", START_S)
        statuses = job.wait(START_S)
        assert statuses == [-signal.SIGKILL if rank == victim else 0 for rank in range(NUM_RANKS)], job.printed()
        check_survivors(job, victim)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_a_rank_that_was_only_stopped(tmp_path: Path, form: str, streamed: bool) -> None:
    """Continued while the others work without it, it finds out, harms nobody, and is taken in again."""
    victim = 0 if streamed else NUM_RANKS - 1
    plan = {"victim": victim, "action": "stop", "at": (3, "combine"), "masks": True, "streamed": streamed}
    with start(tmp_path, "ll", seconds=AMID_S if streamed else 0, **plan, **FORMS[form]) as job:
        job.wait_for(victim, "acted_s", START_S)
        for rank in others(victim):
            job.wait_for(rank, "masked_rounds", TIMEOUT_S + GRACE_S)
        job.processes[victim].send_signal(signal.SIGCONT)
        assert job.wait(START_S) == [0] * NUM_RANKS, job.printed()
        check_survivors(job, victim)
        for rank in range(NUM_RANKS):
            assert job.events(rank)["rounds_again"] == 5
        events = job.events(victim)
        assert events["error"] == "PeerTimeout", job.printed()
        if not streamed:  # it found out by itself, before it sent anything
            assert f"goes on without rank {victim}, which its mask leaves out" in events["message"]
        assert events["closing_raised"] == ["", "", ""], job.printed()


def test_nobody_is_missing(tmp_path: Path) -> None:
    """A group with a mask that is never used is like any other."""
    with start(tmp_path, "ll", masks=True, num_rounds=GOOD_ROUNDS) as job:
        assert job.wait(START_S) == [0] * NUM_RANKS, job.printed()
        for rank in range(NUM_RANKS):
            assert job.events(rank)["good_rounds"] == GOOD_ROUNDS
            assert job.events(rank)["closing_raised"] == ["", "", ""]


def test_an_update_that_not_all_join(tmp_path: Path) -> None:
    """A mask with a dead rank in it ends in PeerTimeout, and can be mended."""
    victim = NUM_RANKS - 1
    plan = {"victim": victim, "action": "kill", "at": (3, "dispatch"), "masks": True, "wrong_mask": True}
    with start(tmp_path, "ll", **plan) as job:
        job.wait_for(victim, "acted_s", START_S)
        begin = time.monotonic()
        statuses = job.wait(START_S)
        assert statuses == [-signal.SIGKILL if rank == victim else 0 for rank in range(NUM_RANKS)], job.printed()
        assert time.monotonic() - begin < 5 * TIMEOUT_S + 2 + GRACE_S
        check_survivors(job, victim)
        for rank in others(victim):
            said = job.events(rank)["wrong_mask_message"]
            assert (
                f"update_mask: rank {rank} waited more than {2 * TIMEOUT_S + 1:g} s for the call of update_mask" in said
            )
