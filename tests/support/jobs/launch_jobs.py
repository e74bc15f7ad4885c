"""Functions that the tests of `autopart.runtime.launch` run in worker processes; importable there by name."""

from __future__ import annotations

import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from autopart.ir.errors import BatchError, StageError
from autopart.runtime.activity import set_activity, set_rank_label

ENV = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "OMP_NUM_THREADS")


def rank() -> int:
    """This process's rank."""
    return int(os.environ["RANK"])


def double(number: int) -> tuple[int, int, int]:
    """(rank, twice the number, pid)."""
    return rank(), 2 * number, os.getpid()


def environment() -> dict[str, str]:
    """The variables of the launch contract."""
    return {name: os.environ[name] for name in (*ENV, "GLOO_SOCKET_IFNAME")}


def double_with_environment(number: int) -> tuple[tuple[int, int, int], dict[str, str]]:
    """What `double` and `environment` say."""
    return double(number), environment()


def join_group() -> None:
    """Open the default group, over Gloo, with a time limit."""
    from datetime import timedelta

    import torch.distributed as dist

    dist.init_process_group("gloo", timeout=timedelta(seconds=30))


def sum_of_ranks(leave: bool = True) -> int:
    """All-reduce of the ranks; opens the group unless it is open, and leaves it when asked."""
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
    """Rank `bad` fails in a way; the others wait for it in a way that only supervision can end.

    stamp: file that gets the moment of the failure, in time.monotonic() seconds.
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


def refuse_alike() -> None:
    """Every rank raises the same error, as a bad batch does."""
    raise BatchError("the batch has 3 rows", fix="use 4")


def refuse_apart() -> None:
    """Every rank raises, each another error."""
    raise ValueError(f"rank {rank()} fails")


def effect_and_cause() -> None:
    """Rank 0 reports that a peer went away, rank 1 why."""
    if rank() == 0:
        raise RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1234")
    raise ValueError("the cause")


def interrupt_self() -> int:
    """What Ctrl-C does to every process of a terminal."""
    os.kill(os.getpid(), signal.SIGINT)
    return rank()


def unpicklable() -> Any:
    """A result that cannot be sent."""
    return threading.Lock()


def announce_and_wait(port: int) -> None:
    """Tell a listening test this process's pid, then wait for ever."""
    with socket.create_connection(("127.0.0.1", port)) as line:
        line.sendall(f"{os.getpid()}\n".encode())
        threading.Event().wait()


def forked_child_holds_pipes(port: int) -> None:
    """Fork a child that inherits every pipe and lives on until the test closes its line; then die by SIGKILL."""
    if rank() != 0:
        threading.Event().wait()
    line = socket.create_connection(("127.0.0.1", port))
    if os.fork() == 0:
        line.recv(1)
        os._exit(0)
    os.kill(os.getpid(), signal.SIGKILL)


def noted_forever() -> None:
    """Rank 0 answers; the others note what they do and never answer."""
    set_rank_label(f"stage {rank()}")
    if rank() != 0:
        set_activity("waiting for a batch")
        threading.Event().wait()
