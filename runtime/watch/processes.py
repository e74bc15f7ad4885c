"""The state of processes of this machine, read from /proc; unknown if there is none."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

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
