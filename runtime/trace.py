"""When the actions of one step began and ended on this rank."""

from __future__ import annotations

import time

import torch

from autopart.ir.actions import Action
from autopart.ir.timeline import Span

Moment = int | torch.cuda.Event
"""Nanoseconds since the step began; on a CUDA device an event, whose time is known when the step is over."""


class StepTrace:
    """The spans of one step, with times from its start.

    On a CUDA device times are those of the stream of the computes, and the host does not wait before `spans`: an action
    begins when what was issued before it is over, and a receive ends when the computes behind it can begin.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank = rank
        self._actions: list[tuple[Action, Moment, Moment]] = []
        self._origin = _event() if device.type == "cuda" else None
        self._began = time.perf_counter_ns()

    def now(self) -> Moment:
        """Return the present moment."""
        return time.perf_counter_ns() - self._began if self._origin is None else _event()

    def add(self, action: Action, start: Moment) -> None:
        """Note that an action which began at `start` ends now."""
        self._actions.append((action, start, self.now()))

    def spans(self) -> list[Span]:
        """Return the spans since the last call.  Waits for the device."""
        if self._origin is not None:
            torch.cuda.synchronize()
        actions, self._actions = self._actions, []
        return [Span(self._rank, action, self._ns(start), self._ns(end)) for action, start, end in actions]

    def _ns(self, moment: Moment) -> int:
        if isinstance(moment, int):
            return moment
        assert self._origin is not None
        elapsed_ms: float = self._origin.elapsed_time(moment)
        return round(elapsed_ms * 1e6)


def _event() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
    event.record()
    return event
