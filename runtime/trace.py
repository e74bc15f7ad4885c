"""What one rank really did: spans of its actions, the same type as the simulator's."""

from __future__ import annotations

import time

import torch

from autopart.ir.program import Action
from autopart.ir.timeline import Span, Timeline

Moment = int | torch.cuda.Event
"""Nanoseconds since the step began; on a CUDA device an event, whose time is known when the step is over."""


class Trace:
    """Collects spans of the steps run while it is on; times count from the start of each step.

    On a CUDA device they are those of the stream of the computes, and the host waits for nothing before `end`: an
    action begins when what was issued before it is over, and a receive ends when the computes behind it can begin.
    """

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._began = 0
        self._origin: torch.cuda.Event | None = None
        self._fresh: list[tuple[Action, Moment, Moment]] = []
        self.spans: list[Span] = []

    def begin(self, device: torch.device) -> None:
        """A step begins now."""
        self._fresh.clear()
        self._origin = _event() if device.type == "cuda" else None
        self._began = time.perf_counter_ns()

    def now(self) -> Moment:
        """This moment."""
        return time.perf_counter_ns() - self._began if self._origin is None else _event()

    def add(self, action: Action, start: Moment) -> None:
        """An action that began at `start` ends now."""
        self._fresh.append((action, start, self.now()))

    def end(self) -> None:
        """The step is over: its spans are known.  Waits for the device."""
        if self._origin is not None:
            torch.cuda.synchronize()
        for action, start, end in self._fresh:
            self.spans.append(Span(self._rank, action, self._ns(start), self._ns(end)))
        self._fresh.clear()

    def _ns(self, moment: Moment) -> int:
        if isinstance(moment, int):
            return moment
        assert self._origin is not None
        elapsed_ms: float = self._origin.elapsed_time(moment)
        return round(elapsed_ms * 1e6)

    @property
    def timeline(self) -> Timeline:
        """What was collected, as a timeline."""
        return Timeline(tuple(self.spans))


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
