"""SIGTERM and SIGUSR1, by which batch systems and launchers announce that a run has to end soon (preemption)."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
AGAIN_S = 5.0
"""Seconds after the first SIGTERM in which another one belongs to it: batch systems send it to launcher and ranks, and
the launcher passes it on, which a rank may notice late, after an op."""


class StopSignals:
    """Notes these signals between `enter` and `leave`, instead of ending the process.

    asked: number of the first one, 0 for none; it stays after `leave`.  A handler of the user's from before is called
    too, one that the user installs later replaces this one until the next `enter`, and a signal that is ignored stays
    ignored.  Python calls handlers in the main thread, so nothing is caught where another thread enters.
    """

    def __init__(self, again: Callable[[], Any] | None = None, after_s: float = AGAIN_S) -> None:
        """again: called for a second SIGTERM, at least `after_s` seconds later, if the user has no handler; by default
        the process ends by it."""
        self.asked = 0
        self._after_s = after_s
        self._caught: list[int] = []
        self._again = again or _end_by_it
        self._inside = 0
        self._before: dict[int, Any] = {}
        self._handling: set[int] = set()
        self._pid, self._terminated_at = 0, 0.0

    def enter(self) -> None:
        """Catch the signals.  May be called again; as many calls of `leave` end it.

        Each call catches anew what a handler of the user's has taken over meanwhile: an older pipe may still be open,
        one that was never closed perhaps, when the user installs a handler and compiles another."""
        self._inside += 1
        if threading.current_thread() is not threading.main_thread():
            return
        self._pid = os.getpid()  # an earlier call may have come from another thread, or before a fork
        if self._inside == 1:
            self._terminated_at = 0.0
        for number in SIGNALS:
            before = signal.getsignal(number)
            if before not in (None, signal.SIG_IGN, self._handle):  # None: installed by code that is not Python
                with suppress(ValueError):  # in a subinterpreter
                    signal.signal(number, self._handle)
                    self._before[number] = before

    def leave(self) -> None:
        """Install the handlers from before again, where the user has not installed others."""
        self._inside -= 1
        if self._inside or threading.current_thread() is not threading.main_thread():
            return
        for number, before in self._before.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, before)
        self._before.clear()

    def take(self) -> list[int]:
        """Return the signals that were caught since the last call."""
        caught, self._caught = self._caught, []
        return caught

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number in self._handling:  # the user's handler was installed over this one and calls it in turn
            return
        before = self._before.get(number, signal.SIG_DFL)
        if os.getpid() != self._pid:  # a forked child, of a data loader perhaps: as if nothing was installed
            signal.signal(number, before)
            os.kill(os.getpid(), number)
            return
        now = time.monotonic()
        if number == signal.SIGTERM and self._terminated_at and not callable(before):
            if now - self._terminated_at >= self._after_s:
                self._again()
            return
        if number == signal.SIGTERM:
            self._terminated_at = now
        self.asked = self.asked or number
        self._caught.append(number)
        if callable(before):
            self._handling.add(number)
            try:
                before(number, frame)
            finally:
                self._handling.discard(number)


def _end_by_it() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)


stop_signals = StopSignals()
"""Those of this process, while it has a running pipe."""
