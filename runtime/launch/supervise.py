"""The parent's side of a local launch: starts processes, watches them, and reports once why they failed.

No process outlives its `Fleet`: on the first failure the others get a moment to report, longer if it only follows from
one that was not reported yet; the first cause is chosen, then all get SIGTERM and a second later SIGKILL.  The parent
holds the rendezvous store, on loopback and a port that the kernel chose, and workers join it as torchrun's workers do.
"""

from __future__ import annotations

import atexit
import importlib
import math
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from operator import methodcaller
from types import MappingProxyType
from typing import Any, NoReturn

from autopart.ir.errors import UsageError
from autopart.launcher import RESTART_VARIABLE, Living
from autopart.runtime.activity import KEEPING, NOTHING, PATIENT, READY_TO_KEEP, SharedStatus
from autopart.runtime.launch.reasons import GUARD, STARTING, UNGUARDED, Death, error_for, first_cause, is_explained
from autopart.runtime.launch.starting import Member, Starter, local_env, spawned
from autopart.runtime.launch.worker import PARENT_VARIABLE, READY, Failure, Success
from autopart.runtime.watch.processes import STOPPED_S, state_of
from autopart.runtime.watch.states import no_answer, state_of_rank
from autopart.runtime.watch.stop_signals import StopSignals

GRACE_S = 1.0  # for other reports to arrive after the first failure, and again between SIGTERM and SIGKILL
CAUSE_S = 10.0  # as long as what arrived only follows from an error that nobody has reported yet
KEEP_S = 10.0  # for the others to learn that a rank is lost, if they keep their state in memory then
CLOSE_S = 5.0  # for an orderly exit
POLL_S = 0.25  # a dead process whose pipes live on in a forked child of its own is noticed after this


class Fleet:
    """`world` live worker processes and the store through which they find each other."""

    def __init__(
        self, world: int, deadline: float | None = None, generation: int = 0, stop: StopSignals | None = None,
        grace_s: float = 0.0, living: Living | None = None, join_at: float = math.inf,
        env: Mapping[str, str] = MappingProxyType({}), start: Starter = spawned,
    ) -> None:  # fmt: skip
        """Start the processes; `run` waits until all are up.  deadline: in time.monotonic() seconds.
        generation: how often the ranks were restarted before.  stop: signals to this process, which are passed on to
        the ranks.  grace_s: seconds that they then have to end after SIGTERM.  living: the devices of the ranks, under
        an elastic launch.  join_at: when the ranks are asked to stop so that others can join, in time.monotonic()
        seconds.  env: more variables of the ranks.  start: starts a process.
        """
        self._statuses: list[SharedStatus] = []
        self.members: list[Member] = []
        self._store: Any = None
        self._stop, self._grace_s = stop, grace_s
        self._killed_at = math.inf  # end of the grace after SIGTERM, whatever the ranks do
        self._join_at = join_at
        self._up = False
        self.lost: tuple[int, ...] = ()
        """The ranks whose processes died by themselves or are stopped, if it failed.  Not those that ended by an exit
        code while they imported the script, which all of them would do."""
        self.cause: Failure | Death | None = None
        """Why it failed, if it did."""
        atexit.register(self.kill)
        try:
            own = {RESTART_VARIABLE: str(generation), **env, **self.open_store()}
            for rank in range(world):
                self.members.append(start(rank, own | local_env(rank, world, living)))
                self._statuses.append(self.members[-1].status)
        except BaseException:
            self.kill()
            raise

    def open_store(self) -> dict[str, str]:
        """Open a new rendezvous store, and return the variables that lead workers to it."""
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        listener = socket.create_server(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        self._store = TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        return {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "TORCHELASTIC_USE_AGENT_STORE": "True"}

    def run(self, call: bytes, name: str, deadline: float | None) -> list[Any]:
        """Run a pickled call on every rank and return the results by rank; raise after killing the processes.

        Raises UsageError if the main script lacks its guard, WorkerError if a process does not come up."""
        try:
            if not self._up:
                ups = self._collect(deadline)
                if any(ups.get(member.rank) != READY for member in self.members):
                    self._fail(ups, STARTING)
                self._up = True
            answers = self.answers(call, name, deadline)
            good = [answer for _, answer in sorted(answers.items()) if isinstance(answer, Success)]
            if len(good) < len(self.members):
                self._fail(answers, f"running {name}")
        except BaseException:
            self.kill()
            raise
        return [load_result(answer) for answer in good]

    def answers(self, call: bytes, name: str, deadline: float | None) -> dict[int, Any]:
        """Return what each rank answers to a pickled call, of the ranks that answer in time."""
        for member in self.members:
            with suppress(OSError):  # `_collect` notices that it is gone
                member.conn.send((call, name))
        return self._collect(deadline)

    def _collect(self, deadline: float | None) -> dict[int, Any]:
        """Wait for one message of every rank; stop a moment after a failure, or at the deadline."""
        answers: dict[int, Any] = {}
        stopped: dict[int, float] = {}
        before, failed_at = time.monotonic(), math.inf
        while len(answers) < len(self.members):
            now = time.monotonic()
            if deadline is not None and self._statuses[0].phase == PATIENT:
                deadline += now - before  # rank 0 plans, without a limit
            if now - before > STOPPED_S:  # this process was itself stopped
                stopped.clear()
            before = now
            self._pass_signals_on()
            if now >= self._join_at:
                for status in self._statuses:
                    status.asked = 1
            remaining = min(POLL_S, self._killed_at - now, POLL_S if deadline is None else deadline - now)
            if remaining <= 0:
                if failed_at == math.inf or now >= min(self._killed_at, failed_at + self._patience_s(answers)):
                    break
                remaining = POLL_S
            missing = [m for m in self.members if m.rank not in answers]
            wait([s for m in missing for s in (m.conn, m.process.sentinel)], remaining)
            for member in missing:
                answer = _receive(member) or _stopped(member, stopped)
                if answer is None:
                    continue
                answers[member.rank] = answer
                if first_cause([answer]) is not None:
                    limit = time.monotonic() + (GRACE_S if is_explained(answers.values()) else CAUSE_S)
                    deadline = limit if deadline is None else min(deadline, limit)
                    failed_at = min(failed_at, time.monotonic())
        return answers

    def _patience_s(self, answers: Collection[int]) -> float:
        """Return for how long after a failure ranks are waited for that keep their state in memory, or will."""
        limits = {NOTHING: 0.0, READY_TO_KEEP: KEEP_S, KEEPING: max(KEEP_S, self._grace_s)}
        keeping = [status.keeping for rank, status in enumerate(self._statuses) if rank not in answers]
        return max((limits[each] for each in keeping), default=0.0)

    def _pass_signals_on(self) -> None:
        """Pass the signals that ask this process to stop on to the ranks, which then have the grace to end."""
        for number in self._stop.take() if self._stop is not None else ():
            for member in self.members:
                if member.process.exitcode is None and member.process.pid is not None:
                    os.kill(member.process.pid, number)
            if number == signal.SIGTERM:
                self._killed_at = min(self._killed_at, time.monotonic() + self._grace_s)

    def _fail(self, answers: Mapping[int, Any], doing: str) -> NoReturn:
        """End all processes and raise the first cause, or name the ranks that did not answer."""
        cause = self.cause = first_cause(answers.values())
        deaths = [each for each in answers.values() if isinstance(each, Death)]
        self.lost = tuple(
            death.rank for death in deaths if death.alone or (death is cause and not (doing == STARTING and death.left))
        )
        self.kill()
        if cause is not None:
            raise error_for(cause, self._statuses[cause.rank], doing)
        if self._killed_at < math.inf:
            doing += f", {self._grace_s:g} s after SIGTERM"
        raise no_answer([state_of_rank(*each) for each in enumerate(self._statuses)], answers.keys(), doing)

    @property
    def heeded(self) -> bool:
        """Whether a script learned that its ranks were asked to stop so that others can join."""
        return any(status.heeded for status in self._statuses)

    def kill(self) -> None:
        """End all processes now: SIGTERM, SIGKILL after a second.  Safe to call twice."""
        atexit.unregister(self.kill)
        for end in (methodcaller("terminate"), methodcaller("kill")):
            alive = [m.process for m in self.members if m.process.exitcode is None]
            for process in alive:
                end(process)
            _join(alive, GRACE_S)
        for member in self.members:
            member.conn.close()
        self.members = []
        self._store = None

    def close(self) -> None:
        """Let all processes exit by themselves; kill those that do not."""
        for member in self.members:
            with suppress(OSError):
                member.conn.send(None)
        _join([m.process for m in self.members], CLOSE_S)
        self.kill()


def pickle_call(fn: Callable[..., object], args: tuple[object, ...]) -> bytes:
    """Pickle a call; raise UsageError for what another process cannot load, such as a lambda.

    What a notebook or a prompt defines cannot be imported, and is sent by value.
    """
    dumps = _by_value(fn) if is_interactive(fn) else pickle.dumps
    try:
        return dumps((fn, args))
    except Exception as error:
        raise UsageError(
            f"{name_of(fn)} and its arguments cannot be sent to worker processes",
            why=f"{type(error).__name__}: {error}",
            fix="define the function at the top level of a file (no lambda, nothing local); " + GUARD,
        ) from error


def is_interactive(fn: object) -> bool:
    """Return whether a function was defined in a notebook, or at a prompt: there is no file to import it from."""
    return getattr(fn, "__module__", "") == "__main__" and not hasattr(sys.modules["__main__"], "__file__")


def _by_value(fn: object) -> Callable[[object], bytes]:
    """Return cloudpickle's dumps.  Raises UsageError if it is not installed."""
    try:
        dumps: Callable[[object], bytes] = importlib.import_module("cloudpickle").dumps
    except ImportError as error:
        raise UsageError(
            f"{name_of(fn)} is defined in a notebook or at a prompt",
            why="worker processes have no file to import it from",
            fix='pip install "autopart[notebook]", which sends it by value; or write the cell to a file with '
            "%%writefile train.py, and import it from there",
        ) from error
    return dumps


def name_of(fn: object) -> str:
    """Return a function's name for messages."""
    return str(getattr(fn, "__qualname__", None) or type(fn).__name__)


def load_result(answer: Success) -> Any:
    """Return what a function returned; raise UsageError if it cannot be loaded in this process."""
    try:
        return pickle.loads(answer.result)
    except Exception as error:
        what = f"the result of rank {answer.rank} cannot be loaded here"
        raise UsageError(what, why=f"{type(error).__name__}: {error}", fix="return plain data") from error


def refuse_while_importing() -> None:
    """End a worker of ours that still imports the main script, since the parent reports why; raise UsageError in other
    spawned processes."""
    if not getattr(multiprocessing.current_process(), "_inheriting", False):
        return
    if os.environ.get(PARENT_VARIABLE) == str(os.getppid()):
        os._exit(UNGUARDED)
    raise UsageError("launch was called while a spawned process imports the main script", fix=GUARD)


def _receive(member: Member) -> Any:
    """Return a message of a member, its Death, or None if there is nothing yet."""
    ended = member.process.exitcode is not None  # read first: what it sent before it ended is still in the pipe
    try:
        if member.conn.poll():
            return member.conn.recv()
    except (EOFError, OSError, pickle.UnpicklingError):
        member.process.join(GRACE_S)
        ended = True
    return Death(member.rank, member.process.exitcode, time.monotonic()) if ended else None


def _stopped(member: Member, since: dict[int, float]) -> Death | None:
    """Return a stop if a signal has stopped a member for `STOPPED_S`; None otherwise, and where the system cannot say.

    since: when each rank was first seen stopped.
    """
    pid, now, state = member.process.pid, time.monotonic(), False
    if pid is not None and hasattr(os, "waitid"):
        try:
            state = os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # it was forked from the template
            state = state_of(pid) == "stopped"
    if not state:
        since.pop(member.rank, None)
        return None
    stopped = now - since.setdefault(member.rank, now) >= STOPPED_S
    return Death(member.rank, None, now, stopped=True) if stopped else None


def _join(processes: Sequence[BaseProcess], seconds: float) -> None:
    end = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
