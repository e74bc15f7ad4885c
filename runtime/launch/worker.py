"""The child's side of a local launch: tied to its parent, it runs one function after another and reports.

The parent (`supervise`) starts `main` in a spawned process and sends it `Run`s; each is answered by a `Success` or a
`Failure`.  What a rank is doing lies in memory shared with the parent (`Slot`), so that the parent can still say it
after the process was killed.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import re
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

from autopart.ir.errors import AutopartError, UsageError, WorkerError

READY = "ready"
LABEL_BYTES, NOTE_BYTES = 64, 192

# What torch.distributed, Gloo and NCCL say when the other side went away: an effect, not the cause.
_PEER_TROUBLE = re.compile(
    r"connection (closed|reset|refused|aborted)|broken pipe|closed by (remote )?peer|failed to recv"
    r"|socket (closed|timeout)|timed? ?out|recvvalue failed|remote process exited|ncclremoteerror"
    r"|nccl communicator was aborted|tcpstore",
    re.IGNORECASE,
)


class Slot(ctypes.Structure):
    """Shared memory of one rank: which stage it is (label) and what it is doing (note), in UTF-8."""

    _fields_ = (("label", ctypes.c_char * LABEL_BYTES), ("note", ctypes.c_char * NOTE_BYTES))
    label: bytes
    note: bytes


@dataclass(frozen=True, slots=True)
class Seat:
    """What a process is told when it starts.  by_main_thread: the parent's main thread starts it."""

    rank: int
    conn: Connection
    board: ctypes.Array[Slot]
    parent: int
    by_main_thread: bool


@dataclass(frozen=True, slots=True)
class Run:
    """One call.  call: pickled (function, arguments); name: the function's, for messages; env: variables to set."""

    call: bytes
    name: str
    env: dict[str, str]


@dataclass(frozen=True, slots=True)
class Success:
    """result: pickled; in_group: the process is still in a torch.distributed group."""

    rank: int
    result: bytes
    in_group: bool


@dataclass(frozen=True, slots=True)
class Failure:
    """An exception of a worker.  at: time.monotonic() seconds; weight: 0 for a cause, 2 for an effect of a peer's end.

    error: the pickled exception, empty when it cannot be pickled.
    """

    rank: int
    kind: str
    message: str
    trace: str
    error: bytes
    weight: int
    at: float
    in_group: bool


_slot: Slot | None = None


def set_rank_label(text: str) -> None:
    """Name this rank's place, as "stage 1", in messages about it.  Does nothing outside of a local launch."""
    if _slot is not None:
        _slot.label = _cut(text, LABEL_BYTES)


def set_activity(text: str) -> None:
    """Say what this rank does now, as "1F0 forward of micro-batch 0": named if it dies.  Costs well below 2 µs.

    Does nothing outside of a local launch.
    """
    if _slot is not None:
        _slot.note = _cut(text, NOTE_BYTES)


def _cut(text: str, size: int) -> bytes:
    return text.encode("utf-8", "replace")[: size - 1]


def main(seat: Seat) -> None:
    """Body of a worker process: answer every `Run` until the parent sends None or is gone."""
    global _slot
    _tie_to_parent(seat)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole terminal: the parent handles it
    _slot = seat.board[seat.rank]
    try:
        seat.conn.send(READY)
        while (run := seat.conn.recv()) is not None:
            _slot.label = _slot.note = b""
            os.environ.update(run.env)
            answer = _answer(seat.rank, run)
            _flush()
            seat.conn.send(answer)
    except (EOFError, OSError):  # the parent is gone
        os._exit(1)


def _answer(rank: int, run: Run) -> Success | Failure:
    try:
        fn, args = _load_call(run)
        return Success(rank, _dump_result(rank, run.name, fn(*args)), _in_group())
    except BaseException as error:  # SystemExit too: a worker has no other way to end early than to say so
        return _failure(rank, error)


def _load_call(run: Run) -> tuple[Any, tuple[Any, ...]]:
    try:
        fn, args = pickle.loads(run.call)
    except Exception as error:
        raise UsageError(
            f"a worker process cannot load {run.name} and its arguments",
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
    weight = 2 if is_effect(error) else 0
    message = str(error) or repr(error)
    return Failure(
        rank, type(error).__name__, message, trace, _dump_error(error), weight, time.monotonic(), _in_group()
    )


def _dump_error(error: BaseException) -> bytes:
    """Only our own errors are raised again as they are; others are reported as text, so nothing foreign is loaded."""
    if not isinstance(error, AutopartError):
        return b""
    try:
        return pickle.dumps(error)
    except Exception:
        return b""


def is_effect(error: BaseException) -> bool:
    """Whether an exception, or one it was raised from, only says that a peer went away."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, WorkerError | ConnectionError):
            return True
        if (
            isinstance(cause, RuntimeError)
            and not isinstance(cause, AutopartError)
            and _PEER_TROUBLE.search(str(cause))
        ):
            return True
        cause = cause.__cause__
    return False


def _in_group() -> bool:
    dist = sys.modules.get("torch.distributed")
    return bool(dist and dist.is_available() and dist.is_initialized())


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            stream.flush()


def _tie_to_parent(seat: Seat) -> None:
    """End this process when the parent ends, however it ends.

    A thread waits for the parent's pipe to close.  On Linux the kernel also sends SIGKILL, in case this process never
    runs Python again; it does so when the *thread* that started us ends, hence only for the parent's main thread.
    """
    parent = parent_process()
    assert parent is not None

    def watch() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=watch, name="autopart-parent-watch", daemon=True).start()
    if sys.platform == "linux" and seat.by_main_thread:
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != seat.parent:  # it ended before we asked
            os._exit(1)
