"""Ranks as plain processes, without MPI and without a launcher: `from process_comm import FileComm, Job`.

A launcher ends all ranks when one dies. Here the others live on, and the test that started them sees what they do.
"""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = Path(__file__).with_name("rank_program.py")

# A launcher tells its ranks their number on the host in these. Tests that were themselves launched do not pass them on.
_LAUNCHER_PREFIXES = ("OMPI_", "PMI_", "PMIX_", "MPI_", "MV2_", "SLURM_", "LOCAL_RANK")


class FileComm:
    """What cuep needs of a communicator, over a folder that all ranks see, and Ibarrier, which is optional.

    The n-th call of a rank leaves its object in the file `n.rank`. Ranks make the same calls in the same order.

    Raises:
        TimeoutError: the other ranks did not make the call within `patience_s`.
    """

    def __init__(self, folder: Path, rank: int, size: int, patience_s: float = 60) -> None:
        self.rank = rank
        self.size = size
        self._folder = folder
        self._patience_s = patience_s
        self._num_calls = 0

    def allgather(self, sendobj: Any) -> list[Any]:
        call = self._post(sendobj)
        deadline = time.monotonic() + self._patience_s
        while not call.Test():
            if time.monotonic() > deadline:
                raise TimeoutError(f"rank {self.rank}: no {call.missing()} within {self._patience_s:g} s")
            time.sleep(0.001)
        return [pickle.loads(path.read_bytes()) for path in call.paths]

    def bcast(self, obj: Any, root: int = 0) -> Any:
        return self.allgather(obj if self.rank == root else None)[root]

    def barrier(self) -> None:
        self.allgather(None)

    def Ibarrier(self) -> _Call:
        return self._post(None)

    def _post(self, obj: Any) -> _Call:
        paths = [self._folder / f"{self._num_calls}.{rank}" for rank in range(self.size)]
        self._num_calls += 1
        unfinished = paths[self.rank].with_suffix(f".{self.rank}-unfinished")
        unfinished.write_bytes(pickle.dumps(obj))
        unfinished.rename(paths[self.rank])  # nobody reads half an object
        return _Call(paths)


class _Call:
    """One collective call: over when every rank has left its object."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths

    def missing(self) -> list[str]:
        return [path.name for path in self.paths if not path.exists()]

    def Test(self) -> bool:
        return not self.missing()


class Job:
    """`rank_program.py` on `num_ranks` processes, or under `launcher`. A context manager that leaves no process behind.

    The plan is described there. `events(rank)` is what that rank has written so far.
    """

    def __init__(self, folder: Path, num_ranks: int, plan: dict[str, Any], launcher: list[str] | None = None) -> None:
        self.folder = folder
        self._has_launcher = launcher is not None
        program = [sys.executable, str(PROGRAM), str(folder), json.dumps(plan)]
        if launcher is not None:
            self.processes = [self._start(0, [*launcher, "-n", str(num_ranks), *program])]
        else:
            self.processes = [self._start(r, [*program, str(r), str(num_ranks)]) for r in range(num_ranks)]

    def _start(self, number: int, command: list[str]) -> subprocess.Popen[bytes]:
        environment = os.environ | {"PYTHONPATH": str(ROOT), "CUEP_BACKEND": os.environ.get("CUEP_BACKEND", "cpu")}
        if not self._has_launcher:
            environment = {k: v for k, v in environment.items() if not k.startswith(_LAUNCHER_PREFIXES)}
        with self._output(number).open("wb") as output:
            return subprocess.Popen(
                command, env=environment, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )

    def _output(self, number: int) -> Path:
        return self.folder / f"output-{number}.txt"

    def printed(self, number: int | None = None) -> str:
        numbers = range(len(self.processes)) if number is None else [number]
        return "\n".join(f"-- process {n}:\n{self._output(n).read_text(errors='replace')}" for n in numbers)

    def events(self, rank: int) -> dict[str, Any]:
        """The newest value of everything that a rank has told."""
        path = self.folder / f"events-{rank}.jsonl"
        text = path.read_text() if path.exists() else ""
        whole_lines = text[: text.rfind("\n") + 1].splitlines()
        return {name: value for line in whole_lines for name, value in json.loads(line).items()}

    def wait_for(self, rank: int, event: str, seconds: float) -> Any:
        """Wait until a rank tells `event`."""
        process = self.processes[0 if self._has_launcher else rank]
        deadline = time.monotonic() + seconds
        while True:
            is_over = process.poll() is not None or time.monotonic() > deadline
            events = self.events(rank)
            if event in events:
                return events[event]
            assert not is_over, f"rank {rank} told no {event!r} in {seconds:g} s or before its end: {self.printed()}"
            time.sleep(0.01)

    def wait(self, seconds: float, numbers: list[int] | None = None) -> list[int]:
        """Exit statuses, once all (or these) processes have ended."""
        chosen = self.processes if numbers is None else [self.processes[n] for n in numbers]
        deadline = time.monotonic() + seconds
        try:
            return [process.wait(max(0.0, deadline - time.monotonic())) for process in chosen]
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not over after {seconds} s: {self.printed()}") from None

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        if self._has_launcher and self.processes[0].poll() is None:
            self.processes[0].terminate()  # it ends its ranks
            with suppress(subprocess.TimeoutExpired):
                self.processes[0].wait(5)
        for process in self.processes:
            process.kill()  # also one that is stopped
            process.wait()


def state(pid: int) -> str:
    """The letter of /proc: R running, S sleeping, T stopped, Z ended and not yet waited for; "" gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""
