"""The parent's side of a local launch: starts processes, watches them, and says once why they failed.

Rules.  No process outlives its `Fleet`: on the first failure the others get a moment to report, the first real cause
is chosen, then all are sent SIGTERM and a second later SIGKILL.  The parent holds the rendezvous store, bound to
loopback on a port the kernel chose, and workers join it as torchrun's workers do: no port is guessed.
"""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import os
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

from autopart.ir.errors import AutopartError, UsageError
from autopart.runtime.activity import Phase, SharedStatus
from autopart.runtime.launch import worker
from autopart.runtime.launch.reasons import GUARD, UNGUARDED, Death, Stop, no_answer, raised, state_of_rank, told
from autopart.runtime.launch.worker import READY, Failure, Run, Success, WorkerInit
from autopart.runtime.watch.launcher import STOPPED_S

GRACE_S = 1.0  # for other reports to arrive after the first failure, and again between SIGTERM and SIGKILL
CLOSE_S = 5.0  # for an orderly exit
POLL_S = 0.25  # a dead process whose pipes live on in a forked child of its own is noticed after this
PARENT_VARIABLE = "AUTOPART_PARENT"

_starting = threading.Lock()


@dataclass(frozen=True, slots=True)
class Member:
    """One worker process as the parent sees it."""

    rank: int
    process: SpawnProcess
    conn: Connection


class Fleet:
    """`world` live worker processes and the store through which they find each other."""

    def __init__(self, world: int, deadline: float | None = None) -> None:
        """Start the processes and wait until all are up.  deadline: in time.monotonic() seconds.

        Raises UsageError when the main script lacks its guard, WorkerError when a process does not come up.
        """
        spawn = multiprocessing.get_context("spawn")
        self.statuses: ctypes.Array[SharedStatus] = spawn.RawArray(SharedStatus, world)
        self.members: list[Member] = []
        self._store: Any = None
        self._env: dict[str, str] = {}
        atexit.register(self.kill)
        try:
            self._env = self.renew_store()
            self._start(world)
            ups = self.collect(deadline)
            if any(ups.get(rank) != READY for rank in range(world)):
                self.fail(ups, "starting")
        except BaseException:
            self.kill()
            raise

    def renew_store(self) -> dict[str, str]:
        """Open a fresh rendezvous store; returns the variables that lead workers to it."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        self._store = TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}

    def _start(self, world: int) -> None:
        context = multiprocessing.get_context("spawn")
        main_thread = threading.current_thread() is threading.main_thread()
        for rank in range(world):
            conn, theirs = context.Pipe()
            init = WorkerInit(rank, theirs, self.statuses, os.getpid(), main_thread)
            process = context.Process(target=worker.main, args=(init,), name=f"autopart-rank-{rank}")
            with _environment(self._env | _local_env(rank, world)):
                process.start()
            theirs.close()
            self.members.append(Member(rank, process, conn))

    def send(self, call: bytes, name: str) -> None:
        """Ask every rank to run a pickled call; a rank that is gone is noticed by `collect`."""
        for member in self.members:
            with suppress(OSError):
                member.conn.send(Run(call, name, self._env))

    def settle(self, in_group: bool) -> None:
        """After a run: unless a process group is still open, the next one finds a store without old keys."""
        if not in_group:
            self._env = self.renew_store()

    def collect(self, deadline: float | None) -> dict[int, Any]:
        """Wait for one message of every rank; returns early after a failure's grace, or at the deadline."""
        answers: dict[int, Any] = {}
        stopped: dict[int, float] = {}
        before = time.monotonic()
        while len(answers) < len(self.members):
            now = time.monotonic()
            if deadline is not None and self.statuses[0].phase == Phase.PATIENT:
                deadline += now - before  # rank 0 plans: that takes as long as it takes
            if now - before > STOPPED_S:  # this process was itself stopped
                stopped.clear()
            before = now
            remaining = POLL_S if deadline is None else min(POLL_S, deadline - now)
            if remaining <= 0:
                break
            missing = [m for m in self.members if m.rank not in answers]
            wait([s for m in missing for s in (m.conn, m.process.sentinel)], remaining)
            for member in missing:
                answer = _receive(member) or _stopped(member, stopped)
                if answer is None:
                    continue
                answers[member.rank] = answer
                if isinstance(answer, Failure | Death | Stop):
                    limit = time.monotonic() + GRACE_S
                    deadline = limit if deadline is None else min(deadline, limit)
        return answers

    def fail(self, answers: Mapping[int, Any], doing: str) -> None:
        """End all processes and raise the first real cause, or say who did not answer."""
        cause = first_cause(answers.values())
        states = [state_of_rank(rank, status) for rank, status in enumerate(self.statuses)]
        self.kill()
        if cause is None:
            raise no_answer(states, answers, doing)
        raise told(states[cause.rank], cause, doing)

    def raised(self, cause: Failure) -> AutopartError:
        """The error to raise for a worker's exception."""
        return raised(state_of_rank(cause.rank, self.statuses[cause.rank]), cause)

    def kill(self) -> None:
        """End all processes now: SIGTERM, SIGKILL after a second.  Safe to call twice."""
        atexit.unregister(self.kill)
        for end in (SpawnProcess.terminate, SpawnProcess.kill):
            alive = [m.process for m in self.members if m.process.exitcode is None]
            for process in alive:
                end(process)
            _join(alive, GRACE_S)
        self._forget()

    def close(self) -> None:
        """Let all processes exit by themselves; those that do not are killed."""
        for member in self.members:
            with suppress(OSError):
                member.conn.send(None)
        _join([m.process for m in self.members], CLOSE_S)
        self.kill()

    def _forget(self) -> None:
        for member in self.members:
            member.conn.close()
        self._store = None


def first_cause(answers: Iterable[object]) -> Failure | Death | Stop | None:
    """The earliest of the failures that are causes rather than effects; None when nothing failed."""
    failures = [a for a in answers if isinstance(a, Failure | Death | Stop)]
    return min(failures, key=lambda a: (a.priority, a.at), default=None)


def pickle_call(fn: Callable[..., object], args: tuple[object, ...]) -> bytes:
    """Pickle a call by value; raises UsageError for what another process cannot load, such as a lambda."""
    try:
        return pickle.dumps((fn, args))
    except Exception as error:
        raise UsageError(
            f"{name_of(fn)} and its arguments cannot be sent to worker processes",
            why=f"{type(error).__name__}: {error}",
            fix="define the function at the top level of a file (no lambda, nothing local); " + GUARD,
        ) from error


def name_of(fn: object) -> str:
    """A function's name for messages."""
    return str(getattr(fn, "__qualname__", None) or type(fn).__name__)


def load_result(answer: Success) -> Any:
    """The result of one rank; raises UsageError when this process cannot load it."""
    try:
        return pickle.loads(answer.result)
    except Exception as error:
        what = f"the result of rank {answer.rank} cannot be loaded here"
        raise UsageError(what, why=f"{type(error).__name__}: {error}", fix="return plain data") from error


def refuse_while_importing() -> None:
    """In a worker that still imports the main script: end (our worker: quietly, the parent says why) or raise."""
    if not getattr(multiprocessing.current_process(), "_inheriting", False):
        return
    if os.environ.get(PARENT_VARIABLE) == str(os.getppid()):
        os._exit(UNGUARDED)
    raise UsageError("launch was called while a spawned process imports the main script", fix=GUARD)


def _receive(member: Member) -> Any:
    """A message of a member, its Death, or None when there is nothing yet."""
    ended = member.process.exitcode is not None  # asked first: what it sent before it ended is still in the pipe
    try:
        if member.conn.poll():
            return member.conn.recv()
    except (EOFError, OSError, pickle.UnpicklingError):
        member.process.join(GRACE_S)
        ended = True
    return Death(member.rank, member.process.exitcode, time.monotonic()) if ended else None


def _stopped(member: Member, since: dict[int, float]) -> Stop | None:
    """Whether the system says of a member that a signal has stopped it, for long enough; since: by rank, kept here."""
    pid, now, state = member.process.pid, time.monotonic(), None
    if pid is not None and hasattr(os, "waitid"):
        with suppress(ChildProcessError):
            state = os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT)
    if state is None:
        since.pop(member.rank, None)
        return None
    first = since.setdefault(member.rank, now)
    return Stop(member.rank, now) if now - first >= STOPPED_S else None


def _join(processes: Sequence[SpawnProcess], seconds: float) -> None:
    end = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))


def _local_env(rank: int, world: int) -> dict[str, str]:
    """What torchrun would set, and loopback and a fair share of the cores where the user did not say otherwise."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    defaults = {
        "OMP_NUM_THREADS": str(max(1, cores // world)),
        "GLOO_SOCKET_IFNAME": "lo" if os.uname().sysname == "Linux" else "lo0",
    }
    return {name: value for name, value in defaults.items() if name not in os.environ} | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        PARENT_VARIABLE: str(os.getpid()),
    }


@contextmanager
def _environment(changes: Mapping[str, str]) -> Iterator[None]:
    """Change os.environ for a moment: a spawned process imports torch before any code of ours could set a variable."""
    with _starting:
        before = {name: os.environ.get(name) for name in changes}
        os.environ.update(changes)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value
