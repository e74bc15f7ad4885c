"""The child's side of a local launch: it runs one function after another and reports, and ends with its parent.

The parent (`supervise`) starts `main` in a spawned process and sends it calls; each is answered by a `Success` or a
`Failure`.  The rank's status lies in memory shared with the parent (`SharedStatus`), which can read it after the
process was killed.
"""

from __future__ import annotations

import atexit
import ctypes
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import parent_process
from typing import Any

from autopart.ir.errors import AutopartError, UsageError
from autopart.runtime.activity import NOBODY, SharedStatus, leave, publish_to, set_activity
from autopart.runtime.watch.effects import is_effect

READY = "ready"
PARENT_VARIABLE = "AUTOPART_PARENT"
"""The process that started this rank: it tells a rank from processes that a rank starts."""


@dataclass(frozen=True, slots=True)
class Success:
    """The pickled result of a function on one rank."""

    rank: int
    result: bytes


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception of a worker.

    error: the pickled exception if it is one of autopart's, else empty; priority: 0 for a cause, 2 for an effect of a
    peer's end; at: time.monotonic() seconds.  told_by: the rank that reported it first (`WorkerError`).
    """

    rank: int
    kind: str
    message: str
    trace: str
    error: bytes
    priority: int
    at: float
    told_by: int | None = None


def started(rank: int, conn: Connection, status: SharedStatus, tied: bool) -> None:
    """Run `main` in a process that the parent has started, and end as a new Python process does, however it came to
    be.  tied: whether the parent's main thread has spawned it."""
    _tie_to_parent(tied)
    multiprocessing.set_start_method("spawn", force=True)
    main(rank, conn, status)
    ending: Any = threading
    ending._shutdown()  # waits for threads, such as that of a save
    atexit._run_exitfuncs()


def main(rank: int, conn: Connection, status: SharedStatus) -> None:
    """Answer calls until the parent sends None or is gone: a pickled (function, arguments), and the function's name.

    status: of this rank, shared with the parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal: the parent handles it
    publish_to(status)
    try:
        conn.send(READY)
        while (call := conn.recv()) is not None:
            status.label, status.waits = b"", NOBODY
            set_activity("")
            answer = _answer(rank, *call)
            leave()
            flush()
            conn.send(answer)
    except (EOFError, OSError):  # the parent is gone
        os._exit(1)


def _answer(rank: int, call: bytes, name: str) -> Success | Failure:
    pid = os.getpid()
    try:
        fn, args = _load_call(call, name)
        result = fn(*args)
        _end_forked_child(pid)
        return Success(rank, _dump_result(rank, name, result))
    except BaseException as error:
        _end_forked_child(pid, error)
        return _failure(rank, error)


def _end_forked_child(pid: int, error: BaseException | None = None) -> None:
    """End this process if the called function forked it: a child of a rank does not answer for the rank.

    pid: of the rank.  error: what the child raised; its exit status is that of an ordinary Python process.
    """
    if os.getpid() == pid:
        return
    status = 0
    if isinstance(error, SystemExit):
        status = error.code if isinstance(error.code, int) else int(error.code is not None)
    elif error is not None:
        traceback.print_exception(error)
        status = 1
    flush()
    os._exit(status)


def _load_call(call: bytes, name: str) -> tuple[Any, tuple[Any, ...]]:
    try:
        fn, args = pickle.loads(call)
    except Exception as error:
        raise UsageError(
            f"a worker process cannot load {name} and its arguments",
            why=f"{type(error).__name__}: {error}",
            fix="define the function, and the classes of its arguments, at the top level of a file that workers import",
        ) from error
    return fn, args


def _dump_result(rank: int, name: str, result: object) -> bytes:
    try:
        return pickle.dumps(result)
    except Exception as error:
        raise UsageError(
            f"the result of {name} on rank {rank} cannot be sent to the parent process",
            where=f"a {type(result).__name__}",
            why=f"{type(error).__name__}: {error}",
            fix="return plain data: numbers, strings, lists, dicts, detached tensors",
        ) from error


def _failure(rank: int, error: BaseException) -> Failure:
    if error.__traceback__ is not None:
        error = error.with_traceback(error.__traceback__.tb_next)  # drop the frame of _answer
    trace = "".join(traceback.format_exception(error)).rstrip()
    priority = 2 if is_effect(error) else 0
    message = str(error) or repr(error)
    told_by = getattr(error, "told_by", None)
    return Failure(rank, type(error).__name__, message, trace, _dump_error(error), priority, time.monotonic(), told_by)


def _dump_error(error: BaseException) -> bytes:
    """Pickle an error of autopart, which the parent raises again; others are reported as text."""
    if not isinstance(error, AutopartError):
        return b""
    try:
        return pickle.dumps(error)
    except Exception:
        return b""


def flush() -> None:
    """Write what the streams of this process still hold."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()


def _tie_to_parent(by_main_thread: bool) -> None:
    """End this process when the parent ends, in any way.

    A thread waits for the parent's pipe to close.  On Linux the kernel also sends SIGKILL, in case this process does
    not run Python again; it does so when the *thread* that started us ends, hence only for the parent's main thread.
    """
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="autopart-parent-watch", daemon=True).start()
    if sys.platform == "linux" and by_main_thread:
        assert parent.pid is not None
        end_with_parent(parent.pid)


def end_with_parent(parent: int) -> None:
    """Let the kernel kill this process when the thread of the parent ends that started it.  On Linux."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before prctl
        os._exit(1)
