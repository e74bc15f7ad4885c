"""What one rank really did: spans of its actions, the same type as the simulator's."""

from __future__ import annotations

import time

from autopart.ir.program import Action
from autopart.ir.timeline import Span, Timeline


class Trace:
    """Collects spans of the steps run while it is on; times count from the start of each step."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._began = 0
        self.spans: list[Span] = []

    def begin(self) -> None:
        """A step starts now."""
        self._began = time.perf_counter_ns()

    def now(self) -> int:
        """Nanoseconds since the step began."""
        return time.perf_counter_ns() - self._began

    def add(self, action: Action, start_ns: int) -> None:
        """An action that started at start_ns ends now."""
        self.spans.append(Span(self._rank, action, start_ns, self.now()))

    @property
    def timeline(self) -> Timeline:
        """What was collected, as a timeline."""
        return Timeline(tuple(self.spans))
