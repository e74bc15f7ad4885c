"""The part of a pipe that measures its steps."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from autopart.extras.metrics.metrics import Meter, Metrics, measured
from autopart.ir.errors import UsageError
from autopart.ir.timeline import Timeline
from autopart.report.page.page import write_page
from autopart.session.ranks.listener import Listener
from autopart.session.session import Session
from autopart.state.core import Core, Part
from autopart.state.misuse_guards import refuse_in_training
from autopart.state.state_dict import gradient_norm


class Measurements(Part):
    """What the steps of a pipe took.  last: the metrics that were asked for last."""

    def __init__(self, core: Core) -> None:
        super().__init__(core)
        self.meter = Meter()
        self.last: Metrics | None = None

    def metrics(self) -> Metrics:
        """Return what the last step took, the same on every rank: loss, gradient norm, rates, bubble, memory.

        Collective.  The first call begins to time every action of later steps; the metrics of the step before it have
        no bubble.  Call it before `zero_grad`, or after `clip_grad_norm_`, for the gradient norm.  If 50 steps in a row
        took more than 20 % more or less than predicted, a line on the logger "autopart" names the stage that differs
        most.  Raises UsageError before the first step and under an asynchronous schedule.
        """
        core = self.core
        refuse_in_training(core.facts[1], "pipe.metrics()")
        if not self.meter.seconds:
            raise UsageError("there was no step yet", where="pipe.metrics()", fix="call it after pipe.step(batch)")
        with core.session.call("metrics") as session:
            known = core.clipped if core.clipped[0] == core.steps else None
            norm = known[1] if known is not None else gradient_norm(session, 2.0)
            scale = self.core.scaler.scale if self.core.scaler is not None else None
            self.last = measured(
                session,
                self.meter,
                step=self.core.steps,
                grad_norm=norm,
                loss_scale=scale,
                skipped=self.core.skipped > 0,
            )
        return self.last

    def report(self, path: str | os.PathLike[str], *, timeline: Timeline | None = None) -> Path | None:
        """Write the plan that runs, and what was measured of it, as one HTML page that needs no network.

        Call it on all ranks: rank 0 writes and returns the path, others return None.  path: ends in .html.  timeline:
        a measured step to show beside the simulated one; None: the last one that `timeline` returned under this plan.
        The memory that `metrics` measured is shown too.  Raises UsageError if it cannot be written.
        """
        rank, plan, graph = self.core.facts
        if rank != 0:
            return None
        shown = timeline
        if shown is None and self.core.timeline is not None and self.core.timeline[0] is plan:
            shown = self.core.timeline[1]
        peaks = dict(enumerate(self.last.peak_bytes)) if self.last is not None else {}
        title = f"autopart: {type(self.core.model).__name__}"
        return write_page(plan, path, graph=graph, measured=shown, peaks=peaks, title=title)

    def around_step(self, session: Session, batch: Sequence[Any]) -> AbstractContextManager[None]:
        """Time the step."""
        return self.meter.step(session)

    @property
    def listeners(self) -> Sequence[Listener]:
        """The meter notes the loss of each step."""
        return (self.meter,)
