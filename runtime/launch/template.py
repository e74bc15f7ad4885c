"""A process that has imported torch and autopart, of which ranks are forked: they start in milliseconds, not seconds.

It is used where ranks are started again and again (elastic launches), on Linux.  It never imports the user's script and
runs nothing, so it has one thread and no device; a rank that was forked first takes over the environment of its rank,
and then imports the script as a spawned process does (`multiprocessing.spawn.prepare`).

The launcher sends a request and descriptors over a socket: of the rank's pipe, of its status in memory, and of a pipe
in which the process id and later the exit code are written.  The template ends when the launcher does, and ranks when
the template does (prctl).
"""

from __future__ import annotations

import atexit
import gc
import logging
import mmap
import multiprocessing
import os
import pickle
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import resource_tracker, spawn, util
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from autopart.runtime.activity import SharedStatus
from autopart.runtime.launch import worker
from autopart.runtime.launch.starting import Started, spawned
from autopart.runtime.launch.worker import PARENT_VARIABLE

PRELOADED = ("autopart.api", "torch.export._trace", "torch._dynamo")
"""What `compile` imports, which takes longer than its work on a small model."""
_NUMBER = struct.Struct("q")
_HEAD = struct.Struct("Q")
_log = logging.getLogger("autopart")
_GONE = 255
"""The exit code of a rank whose template has ended."""


class ForkedProcess:
    """A rank that was forked from the template, with the methods of a `multiprocessing.Process` that a fleet needs.

    sentinel: becomes readable when it ends."""

    def __init__(self, sentinel: int) -> None:
        self.sentinel = sentinel
        self.pid: int | None = _read_number(sentinel)
        self._exitcode: int | None = None
        weakref.finalize(self, os.close, sentinel)

    @property
    def exitcode(self) -> int | None:
        """The exit code, minus the number of the signal that ended it, or None while it runs."""
        self.join(0.0)
        return self._exitcode

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has ended."""
        if self._exitcode is None and wait([self.sentinel], timeout):
            code = _read_number(self.sentinel)
            self._exitcode = _GONE if code is None else code

    def terminate(self) -> None:
        """Send SIGTERM."""
        self._send(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self._send(signal.SIGKILL)

    def _send(self, number: int) -> None:
        if self.exitcode is None and self.pid is not None:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)


def works_here() -> bool:
    """Return whether this system can do what the template needs."""
    return sys.platform == "linux" and hasattr(os, "pidfd_open") and hasattr(os, "memfd_create")


class Template:
    """The launcher's side; a context manager."""

    def __init__(self, env: Mapping[str, str], preloaded: Sequence[str] = PRELOADED) -> None:
        """Start the process, with changes of the environment; it imports these modules while the launcher goes on."""
        self._socket, theirs = socket.socketpair()
        tied = threading.current_thread() is threading.main_thread()
        code = (
            "import sys; sys.path[:] = filter(None, sys.path); "  # '' is the working folder, which -c puts there
            f"from autopart.runtime.launch.template import main; main({theirs.fileno()}, {os.getpid()}, {tied}, "
            f"{list(preloaded)})"
        )
        own = {**os.environ, **env, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
        with theirs:
            self._process = subprocess.Popen(
                [spawn.get_executable(), *util._args_from_interpreter_flags(), "-c", code],  # type: ignore[attr-defined]
                env=own, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL,
            )  # fmt: skip

    def start(self, rank: int, env: Mapping[str, str]) -> Started:
        """Start a rank by a fork, or as a new process if the template has ended."""
        try:
            return self._forked(rank, {**os.environ, **env})
        except (OSError, EOFError) as error:
            _log.warning("rank %d is started as a new process, since none can be forked: %s", rank, error)
            return spawned(rank, env)

    def _forked(self, rank: int, env: dict[str, str]) -> Started:
        ours, theirs = multiprocessing.Pipe()
        memory, (reading, writing) = os.memfd_create("autopart-status"), os.pipe()
        tracker: Any = resource_tracker.getfd()  # typeshed has an int or None
        try:
            os.ftruncate(memory, mmap.PAGESIZE)
            status = SharedStatus.from_buffer(mmap.mmap(memory, mmap.PAGESIZE))
            preparation: dict[str, Any] = spawn.get_preparation_data(f"autopart-rank-{rank}")
            preparation["start_method"] = "spawn"  # as in processes that are spawned
            preparation["authkey"] = bytes(preparation["authkey"])  # of itself it refuses to be sent
            request = pickle.dumps(_Request(rank, env, preparation))
            socket.send_fds(self._socket, [_HEAD.pack(len(request))], [theirs.fileno(), memory, tracker, writing])
            self._socket.sendall(request)
        finally:
            theirs.close()
            os.close(memory)
            os.close(writing)
        process = ForkedProcess(reading)
        if process.pid is None:
            raise EOFError("the template of the ranks has ended")
        return Started(process, ours, status)

    def __enter__(self) -> Template:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()
        self._process.kill()  # it may still import
        self._process.wait()


@dataclass(frozen=True, slots=True)
class _Request:
    """A rank to start.  preparation: as `multiprocessing.spawn` makes it."""

    rank: int
    env: dict[str, str]
    preparation: dict[str, Any]


def main(descriptor: int, launcher: int, tied: bool, preloaded: Sequence[str]) -> None:
    """Import these modules, and fork ranks until the launcher ends.  tied: whether the launcher's main thread started
    this process, so that the kernel may end it with that thread."""
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):  # sent to all processes of a job: ranks decide
        signal.signal(number, signal.SIG_IGN)
    if tied:
        worker.end_with_parent(launcher)
    for name in preloaded:
        import_module(name)
    gc.collect()
    gc.freeze()  # what is never looked at again stays shared
    with socket.socket(fileno=descriptor) as requests, selectors.DefaultSelector() as selector:
        selector.register(requests, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.data is not None:
                    selector.unregister(key.fd)
                    _report_end(key.fd, *key.data)
                elif not _fork_one(requests, selector):
                    return


def _fork_one(requests: socket.socket, selector: selectors.BaseSelector) -> bool:
    """Fork the rank of the next request, and return whether there was one.  Does not return in the rank."""
    head, descriptors, _, _ = socket.recv_fds(requests, _HEAD.size, 4)
    if len(head) < _HEAD.size:
        return False
    request: _Request = pickle.loads(_received(requests, _HEAD.unpack(head)[0]))
    *own, writing = descriptors
    template, pid = os.getpid(), os.fork()
    if pid == 0:
        worker.end_with_parent(template)
        others = [key for key in selector.get_map().values() if key.data is not None]
        for descriptor in [writing, *(key.fd for key in others), *(key.data[1] for key in others)]:
            os.close(descriptor)
        selector.close()
        requests.close()
        _run(request, *own)
        _leave()
    for descriptor in own:
        os.close(descriptor)
    with suppress(BrokenPipeError):
        os.write(writing, _NUMBER.pack(pid))
    selector.register(os.pidfd_open(pid), selectors.EVENT_READ, (pid, writing))
    return True


def _report_end(process: int, pid: int, writing: int) -> None:
    _, status = os.waitpid(pid, 0)
    os.close(process)
    with suppress(BrokenPipeError):
        os.write(writing, _NUMBER.pack(os.waitstatus_to_exitcode(status)))
    os.close(writing)


def _run(request: _Request, pipe: int, memory: int, tracker: int) -> None:
    """Become the rank of a request, as if this process had been spawned for it, until the launcher needs it no more.

    tracker: of semaphores and other things that outlive a process; all processes of a launch have one."""
    gc.unfreeze()
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_DFL)
    os.environ.clear()
    os.environ.update(request.env | {PARENT_VARIABLE: str(os.getppid())})
    threads = request.env.get("OMP_NUM_THREADS", "")
    if threads.isdigit() and int(threads):
        torch.set_num_threads(int(threads))  # libraries read the variable when they were loaded
    torch.default_generator.seed()  # generators that a script leaves unseeded differ between processes
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    shared: Any = resource_tracker
    shared._resource_tracker._fd = tracker
    me: Any = multiprocessing.current_process()
    me._inheriting = True
    try:
        spawn.prepare(request.preparation)
    finally:
        del me._inheriting
    status = SharedStatus.from_buffer(mmap.mmap(memory, mmap.PAGESIZE))
    os.close(memory)
    worker.main(request.rank, Connection(pipe), status)


def _leave() -> None:
    """End this process as Python does, but without taking all modules apart, which takes seconds."""
    ending: Any = threading
    ending._shutdown()  # waits for threads, such as that of a save
    atexit._run_exitfuncs()
    worker.flush()
    os._exit(0)


def _received(requests: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = requests.recv(size - len(parts))
        if not part:
            raise EOFError("the launcher has ended")
        parts += part
    return bytes(parts)


def _read_number(descriptor: int) -> int | None:
    """Return a number that the template wrote, None if it has ended."""
    raw = os.read(descriptor, _NUMBER.size)
    return int(_NUMBER.unpack(raw)[0]) if len(raw) == _NUMBER.size else None
