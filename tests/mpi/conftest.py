"""Runs a test on every MPI rank and reports it once: `mpiexec -n N python -m pytest tests/mpi`.

All ranks run the same tests in the same order. After each phase (setup, call, teardown) of a test they exchange how
it went, and a failure on any rank is a failure on all: ranks stay in step, and rank 0, the only one that prints, shows
every rank's message. A rank that hangs is ended by pytest-timeout's thread, and the launcher then ends the others.

CUEP_TEST_SECONDS=S: the first form of every test comes first, and what has not begun after S seconds is skipped.
"""

from __future__ import annotations

import io
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Generator, Iterator
from typing import Any

import pytest
from harness import verdict_comm

import cuep

# Above this, only tests that name the number of ranks run: 8 ranks on 2 cores are slow.
_MAX_UNMARKED_RANKS = 4

_collection_errors: list[str] = []
_start = time.monotonic()
_seconds = float(os.environ.get("CUEP_TEST_SECONDS", "inf"))


@pytest.fixture(scope="session")
def world() -> Iterator[Any]:
    """All ranks of this run; the backend is CUEP_BACKEND's, or a GPU where there is one."""
    with cuep.init() as world, world.backend.active():
        yield world


class _Silent(io.TextIOBase):
    """Drops the terminal report of ranks other than 0, but not what the timeout's thread dumps before it ends us."""

    def write(self, text: str) -> int:
        if threading.current_thread() is not threading.main_thread():
            sys.__stderr__.write(text)
            sys.__stderr__.flush()
        return len(text)


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    # pytest's own temporary folders are shared by all sessions of a user; ranks that tidy them up at once collide.
    folder = tempfile.mkdtemp(prefix="cuep-tests-")
    config.option.basetemp = folder
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    if verdict_comm().rank != 0:
        config.option.xmlpath = None


@pytest.hookimpl(tryfirst=True)
def pytest_sessionstart(session: pytest.Session) -> None:
    reporter: Any = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None and verdict_comm().rank != 0:
        reporter._tw._file = _Silent()


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _collection_errors.append(report.longreprtext)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    size = verdict_comm().size
    kept, dropped = [], []
    for item in items:
        marker = item.get_closest_marker("ranks")
        if marker and size not in marker.args:
            item.add_marker(pytest.mark.skip(reason=f"for {marker.args} ranks, not {size}"))
        (kept if size <= _MAX_UNMARKED_RANKS or (marker and size in marker.args) else dropped).append(item)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept
    if _seconds < float("inf"):
        seen: set[str] = set()

        def is_other_form(item: pytest.Item) -> bool:
            test = item.nodeid.split("[")[0]
            is_other = test in seen
            seen.add(test)
            return is_other

        items.sort(key=is_other_form)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Ranks that would run different tests must not start: the first collective call would hang."""
    mine = ([item.nodeid for item in session.items], len(_collection_errors))
    everyone = verdict_comm().allgather((mine, "\n".join(_collection_errors)))
    for rank, (theirs, errors) in enumerate(everyone):
        if theirs != everyone[0][0]:
            raise pytest.UsageError(f"rank {rank} does not collect the same tests as rank 0:\n{errors or theirs}")


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    if _seconds < float("inf") and verdict_comm().bcast(time.monotonic() - _start > _seconds):
        pytest.skip("out of time")


@pytest.hookimpl(wrapper=True, trylast=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Make one report of all ranks' reports of this phase."""
    report = yield
    comm = verdict_comm()
    everyone = comm.allgather((report.outcome, _message(report, call) if report.failed else ""))
    outcomes = [outcome for outcome, _ in everyone]
    failures = {rank: text for rank, (outcome, text) in enumerate(everyone) if outcome == "failed"}
    if not failures and len(set(outcomes)) > 1:
        failures = {0: f"ranks disagree: {outcomes}"}
    if failures and (comm.size > 1 or not report.failed):
        report.outcome = "failed"
        report.longrepr = "\n".join(f"rank {rank}: {text}" for rank, text in failures.items())
        report.sections = []
    return report


def _message(report: pytest.TestReport, call: pytest.CallInfo[None]) -> str:
    """What went wrong in one line, the traceback of the rank, and what it printed."""
    error = call.excinfo.exconly().splitlines()[0] if call.excinfo else report.outcome
    captured = "".join(f"\n-- {title} --\n{text}" for title, text in report.sections if text.strip())
    return f"{error}\n{report.longreprtext}{captured}"
