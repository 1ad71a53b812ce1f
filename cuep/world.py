"""World: the ranks of a job, the device of this one, and the backend that they agreed on."""

from __future__ import annotations

import logging
import threading
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any

from cuep import env
from cuep.agreement import idle_barrier, together
from cuep.backend import Backend, Comm
from cuep.errors import ArgumentError, ArgumentTypeError, BackendUnavailable, ClosedError, CuepError, SettingsMismatch
from cuep.events import Event

if TYPE_CHECKING:
    from cuep.group import Group

_log = logging.getLogger("cuep")
_open_worlds: set[World] = set()  # until closed: kernels may use their memory


class SingleComm:
    """The communicator of a process that no launcher started: one rank, no MPI."""

    rank = 0
    size = 1

    def allgather(self, sendobj: Any) -> list[Any]:
        return [sendobj]

    def bcast(self, obj: Any, root: int = 0) -> Any:
        return obj

    def barrier(self) -> None:
        pass


class World:
    """What `init` returns. Use as a context manager, or call `close()`.

    Attributes:
        rank, size: this process's rank, and the number of ranks.
        comm: the communicator.
        backend: the machine, `backend.name` "cpu" or "cuda"; `backend.xp` is NumPy or CuPy.
        backend_reason: why this backend was chosen, for people.
        is_orderly: whether all ranks have met whenever they should.
    """

    def __init__(self, comm: Comm, backend: Backend, backend_reason: str, *, owns_comm: bool) -> None:
        self.comm = comm
        self.rank = comm.rank
        self.size = comm.size
        self.backend = backend
        self.backend_reason = backend_reason
        self.is_closed = False
        self._owns_comm = owns_comm
        self.is_orderly = True
        self._groups: list[Group] = []
        _open_worlds.add(self)

    def stream(self, *, is_urgent: bool = False) -> Any:
        """A new stream: cupy.cuda.Stream, or the CPU backend's, which runs its kernels in order in a thread.

        is_urgent: blocks of its kernels come before those of other streams where both wait for room on the GPU: for
        communication beside computation.
        """
        self.check_open()
        return self.backend.new_stream(is_urgent=is_urgent)

    def record_event(self, stream: Any = None) -> Event:
        """The work that `stream` has been given so far; None = the current stream of the backend's own framework."""
        self.check_open()
        return Event(self.backend, self.backend.stream(stream).record())

    def check_open(self) -> None:
        if self.is_closed:
            raise ClosedError("this world is closed")

    def check_orderly(self) -> None:
        """A rank that is out of step would meet the others in the wrong collective call, and hang."""
        if not self.is_orderly:
            raise ClosedError(
                "the ranks of this world are out of step since one of them timed out: no new group can be made; start"
                " the job again"
            )

    def register(self, group: Group) -> None:
        self._groups.append(group)

    def forget(self, group: Group) -> None:
        if group in self._groups:
            self._groups.remove(group)

    def meet(self, seconds: float) -> bool:
        """A barrier that lasts at most about so long, where the communicator has Ibarrier (without it, as long as the
        communicator's own barrier does). False: not all ranks came, or the communicator does not work any more.

        Two in a row: a rank that gave up on the first one has left it behind, and its late peer must not take that for
        the rank itself.
        """
        try:
            self.is_orderly = self.is_orderly and all(idle_barrier(self.comm, seconds) for _ in range(2))
        except Exception as error:  # the communicator's own kind
            _log.warning("the ranks cannot meet: %s", error)
            self.is_orderly = False
        return self.is_orderly

    def close(self) -> None:
        """Close groups that are still open, oldest first, then the backend. Collective; twice is fine.

        Raises:
            what Group.close raises for a group that was still open, after everything is closed.
        """
        if self.is_closed:
            return
        problem: CuepError | None = None
        for group in list(self._groups):
            _log.warning("group %d was not closed before its world", group.serial)
            try:
                group.close()
            except CuepError as error:
                problem = problem or error
        self._end()
        if problem is not None:
            raise problem

    def _end(self) -> None:
        self.is_closed = True
        _open_worlds.discard(self)
        if not self.is_orderly:
            return
        self.backend.close()
        if self._owns_comm:
            with suppress(Exception):  # MPI may be finalised
                self.comm.Free()  # type: ignore[attr-defined]

    def __enter__(self) -> World:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self.close()
            return
        # peers may be elsewhere: a collective close could wait for them for ever
        for group in list(self._groups):
            group.abandon()
        self.is_orderly = False
        self._end()


def init(comm: Comm | None = None, backend: str = "auto", device: int | None = None) -> World:
    """Join the ranks of a job. Collective over `comm`.

    Args:
        comm: an mpi4py communicator, or any object with rank, size, allgather, bcast and barrier, and perhaps Ibarrier
            as in MPI, which lets closing be bounded in time. None: COMM_WORLD where an MPI launcher started the
            process, else this process alone.
        backend: "cpu", "cuda", or "auto": CUEP_BACKEND if set, else "cuda" where every rank has a usable GPU.
        device: index of the GPU. None: the rank's number on its host, modulo the visible GPUs.

    Raises:
        ArgumentError, ArgumentTypeError: unknown backend, no such device, or no communicator.
        BackendUnavailable: something that the backend needs is missing; says what, and how to get it.
        SettingsMismatch: ranks asked for different backends.
    """
    source = "CUEP_BACKEND" if backend == "auto" and env.backend() else "backend"
    wanted = env.backend() or "auto" if backend == "auto" else backend
    if wanted != "cpu":
        _wake_driver(device)
    comm, owns_comm = _default_comm() if comm is None else _checked_comm(comm)
    problem = cuda_problem() if wanted == "auto" else None
    votes = comm.allgather((wanted, problem is None))
    for rank, vote in enumerate(votes):
        if vote[0] not in ("auto", "cpu", "cuda"):
            raise ArgumentError(f"rank {rank}: {source}={vote[0]!r} is not allowed; allowed: 'auto', 'cpu', 'cuda'")
    if len({vote[0] for vote in votes}) > 1:
        raise SettingsMismatch(f"backend differs between ranks: {[vote[0] for vote in votes]}")
    if wanted == "auto":
        blind = [rank for rank, vote in enumerate(votes) if not vote[1]]
        name = "cpu" if blind else "cuda"
        reason = "every rank has a GPU" if not blind else f"no GPU on {_ranks(blind)}: {problem or 'see there'}"
    else:
        name, reason = wanted, "asked for"
    return World(comm, _make_backend(name, comm, device), reason, owns_comm=owns_comm)


def _wake_driver(device: int | None) -> None:
    """Start the CUDA driver and the GPU's context beside MPI's start: each takes some tenths of a second."""
    is_begun = threading.Event()

    def work() -> None:
        with suppress(Exception):  # who needs the driver will say what is wrong with it
            from cuep.backend.cuda_context import wake

            wake(device, is_begun)
        is_begun.set()

    threading.Thread(target=work, name="cuep driver", daemon=True).start()
    is_begun.wait(1)  # MPI's start holds Python's lock, the driver's does not


def cuda_problem() -> str | None:
    """Why the CUDA backend cannot run here, or None. Makes no CUDA context."""
    try:
        import cupy
    except ImportError:
        return "CuPy is not installed"
    try:
        return None if cupy.cuda.runtime.getDeviceCount() > 0 else "no GPU is visible"
    except Exception as error:  # CuPy raises its own types, also when the driver's library is missing
        return f"CuPy finds no GPU ({type(error).__name__}: {error})"


def _ranks(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"{len(ranks)} ranks"


def _default_comm() -> tuple[Comm, bool]:
    if not env.has_mpi_launcher():
        return SingleComm(), False
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise BackendUnavailable(f"an MPI launcher started this process, but mpi4py cannot be used: {error}") from error
    return _checked_comm(MPI.COMM_WORLD)


def _checked_comm(comm: Comm) -> tuple[Comm, bool]:
    """The communicator to use, and whether it is cuep's own: a copy, so that cuep's calls meet nobody else's."""
    try:
        is_usable = isinstance(comm.rank, int) and comm.size >= 1
        is_usable = is_usable and all(callable(getattr(comm, name)) for name in ("allgather", "bcast", "barrier"))
    except Exception:  # mpi4py raises its own type for COMM_NULL
        is_usable = False
    if not is_usable:
        raise ArgumentTypeError(
            f"comm must have rank, size, allgather, bcast and barrier, got {type(comm).__name__}: {comm!r}"
        )
    if hasattr(comm, "Dup"):
        return comm.Dup(), True
    return comm, False


def _make_backend(name: str, comm: Comm, device: int | None) -> Backend:
    def make() -> Backend:
        try:
            if name == "cpu":
                from cuep.backend.cpu import CpuBackend

                return CpuBackend(comm, device)
            from cuep.backend.cuda import CudaBackend

            return CudaBackend(comm, device)
        except ImportError as error:
            raise BackendUnavailable(f"the {name} backend needs {error.name}: {error}") from error

    return together(comm, make, BackendUnavailable)
