"""Jobs in which a rank dies, stops or is late: the others find out in time, and nobody takes wrong rows for good ones.

What a rank does, and how it checks its rows, is in rank_program.py. CUEP_BACKEND=cuda runs the jobs on GPUs.
"""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from process_comm import Job, state

from cuep import mpiexec

NUM_RANKS = int(os.environ.get("CUEP_TEST_JOB_RANKS", "3"))  # more than one survivor
TIMEOUT_S = 2.0
GRACE_S = 5.0  # E16: how much later than timeout_s a survivor may raise
START_S = 60.0  # a job's start may compile
GOOD_ROUNDS = 10
AMID_S = 0.001  # after queueing operations: some have begun, few are over
CALLS = {"create_handle", "update", "dispatch", "combine", "num_recv_tokens", "host_counts", "check"}

_TIMEOUT = re.compile(
    r"(?P<op>create_handle/update|dispatch|combine): rank (?P<rank>\d+) waited more than "
    rf"{TIMEOUT_S:g} s for the "
    r"(reuse of a buffer that rank|counts of rank|rows of rank) (?P<peer>\d+)( reads)? "
    r"\(epoch (?P<epoch>\d+): expected (?P<expected>\d+), seen (?P<seen>\d+)\)"
)


def start(tmp_path: Path, mode: str, launcher: list[str] | None = None, **plan: Any) -> Job:
    plan = {"mode": mode, "timeout_s": TIMEOUT_S, "num_rounds": GOOD_ROUNDS + 2, "catches": launcher is None} | plan
    return Job(tmp_path, NUM_RANKS, plan, launcher)


def others(victim: int) -> list[int]:
    return [rank for rank in range(NUM_RANKS) if rank != victim]


def check_timeout(job: Job, rank: int, since_s: float, good_rounds: int = GOOD_ROUNDS) -> re.Match[str]:
    """A rank had so many good rounds and raised PeerTimeout, in time after `since_s`; returns what it names."""
    events = job.events(rank)
    assert events.get("error") == "PeerTimeout", job.printed()
    assert events["good_rounds"] == good_rounds
    assert events["raised_s"] - since_s < TIMEOUT_S + GRACE_S
    named = _TIMEOUT.match(events["message"])
    assert named, events["message"]
    assert int(named["rank"]) == rank
    assert int(named["peer"]) != rank
    # every round was one epoch of each operation
    assert int(named["epoch"]) == good_rounds + 1
    assert int(named["seen"]) < int(named["expected"]) <= good_rounds + 1
    return named


def check_closed_group(job: Job, rank: int) -> None:
    """After its PeerTimeout a rank's group refused every call, and closed at once; so did its world."""
    events = job.events(rank)
    assert events["afterwards"] == dict.fromkeys(CALLS, "ClosedError")
    assert events["closing_raised"] == ["", "", ""], job.printed()
    assert events["closing_s"] < GRACE_S


def check_nothing_is_left(job: Job) -> None:
    """No rank's process is there, and no shared memory with its number."""
    for rank in range(NUM_RANKS):
        pid = job.events(rank)["pid"]
        deadline = time.monotonic() + GRACE_S
        while state(pid) not in ("", "Z"):
            assert time.monotonic() < deadline, f"rank {rank} is still there"
            time.sleep(0.01)
        assert not list(Path("/dev/shm").glob(f"cuep-{pid}-*"))


@pytest.mark.parametrize(
    "mode,place", [("ll", "dispatch"), ("ll", "combine"), ("ht", "route"), ("ht", "dispatch"), ("ht", "combine")]
)
def test_a_killed_rank(tmp_path: Path, mode: str, place: str) -> None:
    """E16: SIGKILL between two operations: every survivor names the operation and the dead rank, and can close."""
    victim = NUM_RANKS - 1 if mode == "ll" else 0
    with start(tmp_path, mode, victim=victim, action="kill", at=(GOOD_ROUNDS, place)) as job:
        died_s = job.wait_for(victim, "acted_s", START_S)
        statuses = job.wait(TIMEOUT_S + GRACE_S)
        assert statuses == [-signal.SIGKILL if rank == victim else 0 for rank in range(NUM_RANKS)], job.printed()
        for rank in others(victim):
            named = check_timeout(job, rank, died_s)
            assert named["op"] == {"route": "create_handle/update"}.get(place, place)
            assert int(named["peer"]) == victim
            assert job.events(rank)["raised_s"] - job.events(rank)["round_begun_s"] >= TIMEOUT_S
            check_closed_group(job, rank)
        check_nothing_is_left(job)


@pytest.mark.parametrize("mode", ["ll", "ht"])
def test_a_rank_killed_amid_its_operations(tmp_path: Path, mode: str) -> None:
    """E16: SIGKILL while queued kernels run: every survivor raises in time, and the rows it took were right.

    How far the dead rank's kernels came decides what a survivor waits for: at times for another one that has given up.
    """
    victim = 0 if mode == "ll" else NUM_RANKS - 1
    plan = {"victim": victim, "action": "kill", "at": (GOOD_ROUNDS, "combine"), "streamed": True, "seconds": AMID_S}
    with start(tmp_path, mode, **plan) as job:
        died_s = job.wait_for(victim, "acted_s", START_S)
        statuses = job.wait(TIMEOUT_S + GRACE_S)
        assert statuses == [-signal.SIGKILL if rank == victim else 0 for rank in range(NUM_RANKS)], job.printed()
        for rank in others(victim):
            check_timeout(job, rank, died_s)
            check_closed_group(job, rank)
        check_nothing_is_left(job)


@pytest.mark.parametrize("mode,place", [("ll", "combine"), ("ht", "dispatch")])
def test_a_rank_that_exits(tmp_path: Path, mode: str, place: str) -> None:
    """E16: sys.exit amid the rounds, and survivors that catch nothing: all end in time, none with status 0."""
    victim = NUM_RANKS - 1
    with start(tmp_path, mode, victim=victim, action="exit", at=(GOOD_ROUNDS, place), catches=False) as job:
        died_s = job.wait_for(victim, "acted_s", START_S)
        statuses = job.wait(TIMEOUT_S + GRACE_S)
        assert statuses == [3 if rank == victim else 1 for rank in range(NUM_RANKS)], job.printed()
        for rank in others(victim):
            named = check_timeout(job, rank, died_s)
            assert (named["op"], int(named["peer"])) == (place, victim)
            assert "cuep.errors.PeerTimeout: " in job.printed(rank)
        assert not re.search("Segmentation|core dumped|terminate called", job.printed()), job.printed()
        check_nothing_is_left(job)


@pytest.mark.parametrize("mode,action", [("ll", "kill"), ("ht", "exit")])
def test_a_job_under_a_launcher(tmp_path: Path, mode: str, action: str) -> None:
    """E16: with MPI, the launcher's whole job ends in time and with another status than 0 when one rank goes."""
    plan = {"victim": 0, "action": action, "at": (GOOD_ROUNDS, "dispatch")}
    with start(tmp_path, mode, mpiexec.command(), **plan) as job:
        job.wait_for(0, "acted_s", START_S)
        assert job.wait(TIMEOUT_S + GRACE_S) != [0], job.printed()
        for rank in range(NUM_RANKS):  # the launcher may end a rank while it still looks at its last good rows
            assert job.events(rank)["good_rounds"] in (GOOD_ROUNDS - 1, GOOD_ROUNDS)
        check_nothing_is_left(job)


def test_a_survivor_that_only_closes(tmp_path: Path) -> None:
    """E16: a rank dies when all operations are over: close() waits timeout_s for it, says so, and the world closes."""
    plan = {"victim": NUM_RANKS - 1, "action": "kill", "at": (3, "close"), "num_rounds": 3}
    with start(tmp_path, "ll", **plan) as job:
        job.wait_for(NUM_RANKS - 1, "acted_s", START_S)
        statuses = job.wait(TIMEOUT_S + GRACE_S)
        assert statuses == [0] * (NUM_RANKS - 1) + [-signal.SIGKILL], job.printed()
        for rank in others(NUM_RANKS - 1):
            events = job.events(rank)
            assert events["good_rounds"] == 3
            assert events["closing_raised"] == ["PeerTimeout", "", ""]
            assert TIMEOUT_S <= events["closing_s"] < TIMEOUT_S + GRACE_S
        check_nothing_is_left(job)


@pytest.mark.parametrize("mode", ["ll", "ht"])
def test_a_rank_that_stops_for_less_than_the_timeout(tmp_path: Path, mode: str) -> None:
    """E16: SIGSTOP amid queued operations, SIGCONT in time: the peers wait, nobody raises, all rows are right."""
    victim = 0 if mode == "ll" else NUM_RANKS - 1
    plan = {"victim": victim, "action": "stop", "at": (3, "combine"), "streamed": True, "seconds": AMID_S}
    with start(tmp_path, mode, **plan) as job:
        job.wait_for(victim, "acted_s", START_S)
        time.sleep(TIMEOUT_S / 2)
        assert state(job.events(victim)["pid"]) == "T"
        for rank in range(NUM_RANKS):
            assert job.events(rank)["good_rounds"] == 3
        job.processes[victim].send_signal(signal.SIGCONT)
        assert job.wait(START_S) == [0] * NUM_RANKS, job.printed()
        for rank in range(NUM_RANKS):
            events = job.events(rank)
            assert events["good_rounds"] == GOOD_ROUNDS + 2
            assert "error" not in events
            assert events["closing_raised"] == ["", "", ""]


@pytest.mark.parametrize("mode,is_streamed", [("ll", False), ("ht", True)])
def test_a_rank_that_stops_for_longer(tmp_path: Path, mode: str, is_streamed: bool) -> None:
    """E16: SIGSTOP beyond timeout_s: the peers raise in time. Continued when they are gone, the rank raises, too.

    Between two operations or amid queued ones. What it still gets after SIGCONT, the peers had sent: it is right.
    """
    victim = NUM_RANKS - 1 if is_streamed else 0
    place, seconds = ("combine", AMID_S) if is_streamed else ("dispatch", 0)
    plan = {"victim": victim, "action": "stop", "at": (3, place), "streamed": is_streamed, "seconds": seconds}
    with start(tmp_path, mode, **plan) as job:
        stopped_s = job.wait_for(victim, "acted_s", START_S)
        assert job.wait(TIMEOUT_S + GRACE_S, others(victim)) == [0] * (NUM_RANKS - 1), job.printed()
        for rank in others(victim):
            named = check_timeout(job, rank, stopped_s, good_rounds=3)
            assert is_streamed or (named["op"], int(named["peer"])) == (place, victim)
            check_closed_group(job, rank)
        assert state(job.events(victim)["pid"]) == "T"
        job.processes[victim].send_signal(signal.SIGCONT)
        continued_s = job.wait_for(victim, "continued_s", GRACE_S)
        assert continued_s - stopped_s > TIMEOUT_S
        assert job.wait(2 * TIMEOUT_S + GRACE_S) == [0] * NUM_RANKS, job.printed()
        check_timeout(job, victim, continued_s, good_rounds=job.events(victim)["good_rounds"])
        assert job.events(victim)["good_rounds"] <= (4 if is_streamed else 3)
        check_closed_group(job, victim)
        check_nothing_is_left(job)


@pytest.mark.parametrize("mode,place,seconds", [("ll", "dispatch", 1), ("ht", "group", 3)])
def test_a_late_rank(tmp_path: Path, mode: str, place: str, seconds: float) -> None:
    """E16: a rank comes late, as when it compiles; making a group takes any time, an operation less than timeout_s."""
    plan = {"victim": 0, "seconds": seconds, "at": (0, place), "num_rounds": 3}
    with start(tmp_path, mode, **plan) as job:
        assert job.wait(START_S) == [0] * NUM_RANKS, job.printed()
        for rank in range(NUM_RANKS):
            assert job.events(rank)["good_rounds"] == 3
            assert "error" not in job.events(rank)
