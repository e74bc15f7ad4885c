"""What this rank notes of its training steps."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from autopart.capture import Captured
from autopart.ir.plan import Plan
from autopart.ir.timeline import Span
from autopart.session.executors.step_end import StepEnd
from autopart.session.ranks.listener import Listener
from autopart.session.session import Session

DRIFT, DRIFT_STEPS = 0.2, 50
"""By which part, and for how many steps in a row, a step may differ from its prediction before a line says so."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a kind of batch takes.

    flops: of a row, forward and backward.  peak_rate: operations per second of the whole cluster, in the dtype of most
    of them.  tokens: of a row, 0 without token ids.
    """

    captured: Captured
    flops: float
    peak_rate: float
    tokens: int


@dataclass
class Meter(Listener):
    """The last step of this rank.

    timed: whether actions are timed, which begins when metrics are first asked for.  seconds: of the last step.  loss:
    of its batch.  spans: of the last step, if it was timed.  drifting: steps in a row that differ from their
    prediction by more than `DRIFT`.  work: of the last batch whose metrics were asked for.
    """

    timed: bool = False
    seconds: float = 0.0
    loss: torch.Tensor | None = None
    spans: list[Span] = field(default_factory=list)
    drifting: int = 0
    work: Work | None = None
    _predicted: tuple[Plan, float] | None = None

    @contextmanager
    def step(self, session: Session) -> Iterator[None]:
        """Note the seconds of the body, which runs one step, and if steps are timed its actions."""
        traced = session.spans
        if self.timed and traced is None:
            session.spans = []
        begin = len(session.spans or ())
        began = time.perf_counter()
        try:
            yield
            self.seconds = time.perf_counter() - began
            if self.timed:
                self.spans = (session.spans or [])[begin:]
                self._compare(session)
        finally:
            session.spans = traced

    def step_ended(self, end: StepEnd) -> None:
        """Note the loss."""
        self.loss = end.loss

    def predicted_s(self, session: Session) -> float | None:
        """Return the simulated seconds of the last step, None for another kind of batch than the plan is for."""
        plan = session.plan
        if not session.road.ran_as_planned or not plan.step_ns:
            return None
        if self._predicted is None or self._predicted[0] is not plan:
            self._predicted = plan, plan.step_without_optimizer_ns * 1e-9
        return self._predicted[1]

    def _compare(self, session: Session) -> None:
        """Count the steps in a row that differ from their prediction."""
        said = self.predicted_s(session)
        if said is not None:
            self.drifting = self.drifting + 1 if differs(self.seconds, said) else 0


def differs(took: float, said: float) -> bool:
    """Return whether a measured time is far from its prediction."""
    return abs(took - said) > DRIFT * said
