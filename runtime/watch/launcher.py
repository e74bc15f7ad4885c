"""What started this rank, seen from the rank: it ends with its launcher, and says when that was stopped."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from functools import cache
from typing import NoReturn

from autopart.runtime.watch.processes import state_of

LOOK_S = 0.5
STOPPED_S = 5.0
"""A process that the system calls stopped for so long is named."""

_log = logging.getLogger("autopart")


class Stopped:
    """Whether a process has been stopped by a signal for long; told once, by the first rank of its host."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._since: float | None = None
        self._noted = False

    def look(self) -> None:
        """To be called every second or so."""
        now = time.monotonic()
        if state_of(self._pid) != "stopped":
            self._since = None
            return
        self._since = self._since if self._since is not None else now
        if now - self._since >= STOPPED_S and not self._noted and os.environ.get("LOCAL_RANK", "0") == "0":
            self._noted = True
            _log.warning(
                "autopart: the launcher, process %d, is stopped by a signal; it answers to no rank until continued",
                self._pid,
            )


@cache
def watch_launcher() -> None:
    """Watch torchrun for the rest of this process's life.  The workers of our own launcher are tied to it anyhow; a
    rank that was started by hand may outlive its shell."""
    if "TORCHELASTIC_RUN_ID" in os.environ and "AUTOPART_PARENT" not in os.environ:
        threading.Thread(target=_watch, args=(os.getppid(),), name="autopart-launcher", daemon=True).start()


def _watch(launcher: int) -> None:
    stopped = Stopped(launcher)
    while os.getppid() == launcher:
        stopped.look()
        time.sleep(LOOK_S)
    end_process(f"rank {os.environ.get('RANK')} ends: its launcher, process {launcher}, is gone")


def end_process(why: str) -> NoReturn:
    """Say why and end, whatever the main thread waits in."""
    print(f"autopart: {why}", file=sys.stderr, flush=True)
    os._exit(1)
