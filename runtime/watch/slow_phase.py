"""Log a capture or a plan that takes long, since nothing else would show that it hangs."""

from __future__ import annotations

import logging
import os
import threading
import time
from functools import cache

from autopart.runtime import activity
from autopart.runtime.activity import PATIENT

TICK_S = 1.0
FIRST_S = 30.0
"""Seconds after which a line is logged; each further line comes after four times as long."""

_log = logging.getLogger("autopart")


class SlowPhase:
    """Measures how long this rank has been in one capture or planning phase."""

    def __init__(self) -> None:
        self._changes, self._since, self._next_s = -1, 0.0, FIRST_S

    def look(self, now: float) -> str | None:
        """Return the line to log, or None.  now: in time.monotonic() seconds."""
        status = activity.current()
        if status.phase != PATIENT or status.changes != self._changes:
            self._changes, self._since, self._next_s = status.changes, now, FIRST_S
            return None
        if now - self._since < self._next_s:
            return None
        self._next_s *= 4
        rank, label = os.environ.get("RANK", "0"), activity.text_of(status.label)
        who = f"rank {rank} ({label})" if label else f"rank {rank}"
        return f"autopart: {who} has been {activity.text_of(status.note)} for {now - self._since:.0f} s"


@cache
def watch_slow_phases() -> None:
    """Log a line whenever a capture or planning of this process takes longer than `FIRST_S`.  Starts one thread."""
    threading.Thread(target=_run, name="autopart-slow-phase", daemon=True).start()


def _run() -> None:
    phase = SlowPhase()
    while True:
        time.sleep(TICK_S)
        line = phase.look(time.monotonic())
        if line is not None:
            _log.warning(line)
