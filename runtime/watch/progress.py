"""Say what a rank prepares: captures, measurements, searches of a plan, bring-up.

On the terminal rank 0 has a line for each.  Every rank logs one that takes long, since nothing else would show that it
hangs.  A thread looks at the activity of this process, so that a step that prepares nothing costs nothing.  Lines go
to stderr if that is a terminal: the last one counts seconds until the phase ends.  AUTOPART_PROGRESS=0 turns them off,
and AUTOPART_PROGRESS=1 on: where stderr is not a terminal, each phase gets its line when it has ended.
`tell` writes another line.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from functools import cache

from autopart.runtime import activity
from autopart.runtime.activity import JOINING, PATIENT

TICK_S, SLOW_TICK_S = 0.1, 1.0
"""Seconds between two looks, if progress is shown and if it is not."""
LEAST_S = 0.5
"""Seconds from which a phase gets a line."""
FIRST_S = 30.0
"""Seconds after which a phase is logged; each further line comes after four times as long."""
_CLEAR = "\r\x1b[K"
_log = logging.getLogger("autopart")


class Progress:
    """Writes the lines of one process from what it finds at each look.

    live: whether the line of a phase that goes on is written again and again.
    """

    def __init__(self, *, live: bool) -> None:
        self._live = live
        self._changes, self._since, self._what = -1, 0.0, ""
        self._shown = False

    def look(self, now: float) -> str:
        """Return what to write, "" for nothing.  now: in time.monotonic() seconds."""
        status = activity.current()
        if status.changes != self._changes:
            ended = self._ended(now)
            note = activity.text_of(status.note)
            self._what = note if status.phase in (PATIENT, JOINING) else ""
            self._changes, self._since, self._shown = status.changes, now, False
            return ended
        if not self._what or now - self._since < LEAST_S:
            return ""
        self._shown = True
        return f"{_CLEAR}autopart: {self._what} ... {now - self._since:.0f} s" if self._live else ""

    def _ended(self, now: float) -> str:
        """Return the last line of the phase that was shown."""
        if not self._shown:
            return ""
        start = _CLEAR if self._live else ""
        return f"{start}autopart: {self._what} took {now - self._since:.1f} s\n"


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


def tell(line: str) -> None:
    """Write a line, if progress is wanted in this process."""
    if is_wanted() and sys.stderr is not None:
        sys.stderr.write(f"{_CLEAR if _on_terminal() else ''}autopart: {line}\n")
        sys.stderr.flush()


def is_wanted() -> bool:
    """Return whether this process shows its progress."""
    if os.environ.get("RANK", "0") != "0":
        return False
    stated = os.environ.get("AUTOPART_PROGRESS", "")
    return stated != "0" and (bool(stated) or _on_terminal())


def _on_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


@cache
def show_progress() -> None:
    """Show from now on what this process prepares, if it is wanted, and log what takes long.  Starts one thread."""
    threading.Thread(target=_run, name="autopart-progress", daemon=True).start()


def _run() -> None:
    slow, progress = SlowPhase(), Progress(live=_on_terminal()) if is_wanted() else None
    while True:
        time.sleep(TICK_S if progress is not None else SLOW_TICK_S)
        now = time.monotonic()
        if (line := slow.look(now)) is not None:
            _log.warning(line)
        text = progress.look(now) if progress is not None else ""
        if text and sys.stderr is not None:
            sys.stderr.write(text)
            sys.stderr.flush()
