"""Functions that the tests of `autopart.runtime.launch` run in worker processes."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from autopart.ir.errors import BatchError, StageError, UsageError
from autopart.runtime.activity import current, set_activity, set_rank_label

ENV = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")


def rank() -> int:
    """Return the rank of this process."""
    return int(os.environ["RANK"])


def double(number: int) -> tuple[int, int, int]:
    """Return (rank, twice the number, pid)."""
    return rank(), 2 * number, os.getpid()


def environment() -> dict[str, str]:
    """Return the environment variables that the launcher sets."""
    return {name: os.environ[name] for name in (*ENV, "GLOO_SOCKET_IFNAME")}


def double_with_environment(number: int) -> tuple[tuple[int, int, int], dict[str, str]]:
    """Return the results of `double` and `environment`."""
    return double(number), environment()


def join_group() -> None:
    """Open the default process group over Gloo with a timeout of 30 s."""
    from datetime import timedelta

    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=30))


def sum_of_ranks(leave: bool = True) -> int:
    """Return the sum of all ranks. Opens the default group if needed and closes it if `leave`."""
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        join_group()
    total = torch.tensor(rank())
    dist.all_reduce(total)
    if leave:
        dist.destroy_process_group()
    return int(total)


def fail_on(bad: int, kind: str, wait: str, stamp: str) -> None:
    """Fail on rank `bad` while the others wait in a way that only the supervisor can end.

    stamp: file that receives the time of the failure, in time.monotonic() seconds.
    """
    set_rank_label(f"stage {rank()}")
    if wait == "gloo":
        join_group()
    set_activity(f"{rank()}F0 forward of micro-batch 0")
    if rank() == bad:
        Path(stamp).write_text(str(time.monotonic()))
        _fail(kind)
    _wait(wait, bad)


def _fail(kind: str) -> None:
    if kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if kind == "exit":
        os._exit(7)
    if kind == "stage":
        raise StageError("op boom raised", where="model.3", why="because", fix="do not")
    if kind == "value":
        raise ValueError("boom")
    if kind == "sys.exit":
        sys.exit(3)
    raise AssertionError(kind)


def _wait(how: str, bad: int) -> None:
    if how == "gloo":
        import torch
        import torch.distributed as dist

        dist.recv(torch.empty(1), src=bad)
    elif how == "event":
        threading.Event().wait()
    elif how == "spin":
        while True:
            pass


def same_error() -> None:
    """Raise the same error on every rank, as an invalid batch does."""
    raise BatchError("the batch has 3 rows", fix="use 4")


def different_errors() -> None:
    """Raise a different error on every rank."""
    raise ValueError(f"rank {rank()} fails")


def effect_and_cause(late_s: float = 0.0) -> None:
    """Raise a lost connection on rank 0 and its cause on rank 1, which is so much slower, as on a busy machine."""
    threading.Event().wait(late_s * rank())
    if rank() == 0:
        raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1234")
    raise ValueError("the cause")


def interrupt_self() -> int:
    """Send SIGINT to this process, as Ctrl-C does to every process of a terminal."""
    os.kill(os.getpid(), signal.SIGINT)
    return rank()


def unpicklable() -> Any:
    """Return a result that cannot be pickled."""
    return threading.Lock()


def announce_and_wait(port: int) -> None:
    """Send the pid of this process to a listening test, then wait forever."""
    with socket.create_connection(("127.0.0.1", port)) as line:
        line.sendall(f"{os.getpid()}\n".encode())
        threading.Event().wait()


def forked_child_exits(status: int) -> int:
    """Fork a child that leaves by sys.exit, as the workers of data loaders do, and return its exit status."""
    child = os.fork()
    if child == 0:
        sys.exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def forked_child_holds_pipes(port: int) -> None:
    """Fork a child that inherits every pipe and lives until the test closes its connection, then die by SIGKILL."""
    if rank() != 0:
        threading.Event().wait()
    line = socket.create_connection(("127.0.0.1", port))
    if os.fork() == 0:
        line.recv(1)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def activity_forever() -> None:
    """Return on rank 0; on the other ranks set an activity and wait forever."""
    set_rank_label(f"stage {rank()}")
    if rank() != 0:
        set_activity("waiting for a batch")
        threading.Event().wait()


def die_and_return() -> tuple[int, str, str]:
    """Kill rank 1 in the first generation, leave in the second one when the launcher asks for it; return the
    generation, the device of this rank and the devices that have ranks."""
    generation = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if generation == 0 and rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while generation < 2 and not current().asked:
        time.sleep(0.05)
    current().heeded = int(generation < 2)
    return generation, os.environ["LOCAL_RANK"], os.environ["AUTOPART_DEVICES"]


def run_on_odd_numbers(error: str) -> tuple[int, str]:
    """Kill rank 1 in the first generation, and refuse to run on two ranks; return the generation and the devices that
    have ranks.  error: what every later generation says; "" for one that odd numbers of ranks do not say."""
    generation, world = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["WORLD_SIZE"])
    if generation == 0 and rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while generation == 0:
        time.sleep(0.05)
    if error or world == 2:
        raise UsageError(error or f"{world} ranks", why=f"start {generation}")
    return generation, os.environ["AUTOPART_DEVICES"]


def finish_unheeding() -> int:
    """Wait until the launcher asks for a stop, and end as if the script had not looked; return the generation."""
    generation = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    if generation == 0 and rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while not current().asked:
        time.sleep(0.05)
    return generation


def about_this_process() -> dict[str, object]:
    """Return what a script may ask of its process, without what differs between any two of them."""
    import multiprocessing

    import torch

    own = {"MASTER_PORT", "AUTOPART_PARENT", "LINES", "COLUMNS"}  # the last two are set by readline, behind Python
    return {
        **{name: value for name, value in os.environ.items() if name not in own},
        "arguments": sys.argv,
        "path": sys.path,
        "folder": os.getcwd(),
        "name": multiprocessing.current_process().name,
        "method": multiprocessing.get_start_method(allow_none=True),
        "main": sys.modules["__main__"].__name__,
        "signals": [str(signal.getsignal(number)) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)],
        "threads": torch.get_num_threads(),
        "input": sys.stdin.read(),
    }


def unseeded_numbers() -> tuple[float, float, float]:
    """Return a random number of Python, one of numpy and one of torch, without a seed."""
    import random

    import numpy
    import torch

    return random.random(), float(numpy.random.random()), float(torch.rand(()))


def die_on_rank_1() -> None:
    """Kill rank 1, while the others wait for a while."""
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(20)
