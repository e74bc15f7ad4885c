"""What the operating system says about processes of this machine.  Where it has no /proc, nothing is known."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

_PROC = Path("/proc")


def state_of(pid: int) -> str:
    """ "stopped" (by a signal, not by a debugger), "gone", "alive", or "" where nobody knows."""
    if not _PROC.joinpath("self/stat").exists():
        return ""
    fields = _stat(pid)
    if fields is None or fields[0] in "ZX":
        return "gone"
    return "stopped" if fields[0] == "T" else "alive"


def this_machine() -> str:
    """Equal for processes that see each other's numbers: same boot, same host, same namespace of processes."""
    parts = [socket.gethostname()]
    with suppress(OSError):
        parts += [_PROC.joinpath("sys/kernel/random/boot_id").read_text().strip(), os.readlink("/proc/self/ns/pid")]
    return " ".join(parts)


def sibling(rank: int, env: Mapping[str, str] = os.environ) -> int | None:
    """The process of a rank that the same launcher started on this machine, before it ever spoke to us."""
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
    """The state, the parent and what follows of a process, None when there is none."""
    try:
        text = _PROC.joinpath(str(pid), "stat").read_text(errors="replace")
    except OSError:
        return None
    return text.rpartition(")")[2].split()
