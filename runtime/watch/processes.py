"""Processes of this machine: their state, read from /proc (unknown if there is none), and the end of this one when its
launcher ends."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import NoReturn

LOOK_S = 0.5
STOPPED_S = 5.0
"""Seconds for which the system has to report a rank as stopped by a signal before it is named."""
_PROC = Path("/proc")


def state_of(pid: int) -> str:
    """Return "stopped" (by a signal, not by a debugger), "gone", "alive", or "" if unknown."""
    if not _PROC.joinpath("self/stat").exists():
        return ""
    fields = _stat(pid)
    if fields is None or fields[0] in "ZX":
        return "gone"
    return "stopped" if fields[0] == "T" else "alive"


def this_machine() -> str:
    """Return a name that is equal for processes which see each other's ids: same boot, host and pid namespace."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts += [_PROC.joinpath("sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    return " ".join(parts)


def sibling(rank: int, env: Mapping[str, str] = os.environ) -> int | None:
    """Return the process of a rank that the same launcher started on this machine, before its first heartbeat."""
    wanted = {f"RANK={rank}".encode(), f"MASTER_PORT={env.get('MASTER_PORT', '')}".encode()}
    with suppress(OSError):
        for entry in _PROC.iterdir():
            if not entry.name.isdigit() or (fields := _stat(int(entry.name))) is None:
                continue
            if int(fields[1]) != os.getppid() or int(entry.name) == os.getpid():
                continue
            with suppress(OSError):
                if wanted <= set(entry.joinpath("environ").read_bytes().split(b"\0")):
                    return int(entry.name)
    return None


def _stat(pid: int) -> list[str] | None:
    """Return the state, the parent and further fields of a process, or None."""
    try:
        text = _PROC.joinpath(str(pid), "stat").read_text(errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()


@cache
def watch_launcher() -> None:
    """End this process when torchrun ends.

    Does nothing for workers of `autopart.launch`, which end with their parent, and for ranks started by hand, which may
    outlive their shell.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ and "AUTOPART_PARENT" not in os.environ:
        threading.Thread(target=_watch, args=(os.getppid(),), name="autopart-launcher", daemon=True).start()


def _watch(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(LOOK_S)
    end_process(f"rank {os.environ.get('RANK')} ends: its launcher, process {launcher}, is gone")


def end_process(why: str) -> NoReturn:
    """Print the reason and end the process at once, even while the main thread is blocked."""
    print(f"autopart: {why}", file=sys.stderr, flush=True)
    os._exit(1)
