"""What a pipe tells of its steps: metrics, timelines, and a report."""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from pathlib import Path

from autopart.capture import CaptureCache
from autopart.extras.asynchronous.limits import refuse_in_training
from autopart.extras.metrics.measured import measured
from autopart.extras.metrics.meter import Meter
from autopart.extras.metrics.metrics import Metrics
from autopart.ir.cluster import Cluster
from autopart.ir.errors import UsageError
from autopart.ir.timeline import Span, Timeline
from autopart.options import Options
from autopart.pipe.plan import PipePlan
from autopart.report.page.notebook import plan_fragment
from autopart.report.page.page import write_page
from autopart.runtime.group.world import World
from autopart.state.misuse_guards import short_tracebacks
from autopart.state.state_dict import gradient_norm


@short_tracebacks
class PipeMeasured(PipePlan):
    """What the steps of a pipe took."""

    def __init__(self, captures: CaptureCache, cluster: Cluster, options: Options) -> None:
        super().__init__(captures, cluster, options)
        self._meter = Meter()
        self._metrics: Metrics | None = None

    def metrics(self) -> Metrics:
        """Return what the last step took, the same on every rank: loss, gradient norm, rates, bubble, memory.

        Collective.  The first call begins to time every action of later steps; the metrics of the step before it have
        no bubble.  Call it before `zero_grad`, or after `clip_grad_norm_`, for the gradient norm.  If 50 steps in a row
        took more than 20 % more or less than predicted, a line on the logger "autopart" names the stage that differs
        most.  Raises UsageError before the first step and under an asynchronous schedule.
        """
        refuse_in_training(self.plan, "pipe.metrics()")
        if not self._meter.seconds:
            raise UsageError("there was no step yet", where="pipe.metrics()", fix="call it after pipe.step(batch)")
        with self.session.call("metrics") as session:
            known = self._clipped if self._clipped[0] == self._steps else None
            norm = known[1] if known is not None else gradient_norm(session, 2.0)
            scale = self.scaler.scale if self.scaler is not None else None
            self._metrics = measured(
                session, self._meter, step=self._steps, grad_norm=norm, loss_scale=scale, skipped=self.skipped
            )
        return self._metrics

    @property
    def skipped(self) -> bool:
        """Whether the last step added no gradients, because some on any rank were not finite."""
        return self._skipped_in_a_row > 0

    def report(self, path: str | os.PathLike[str], *, timeline: Timeline | None = None) -> Path | None:
        """Write the plan that runs, and what was measured of it, as one HTML page that needs no network.

        Call it on all ranks: rank 0 writes and returns the path, others return None.  path: ends in .html.  timeline:
        a measured step to show beside the simulated one; None: the last one that `timeline` returned under this plan.
        The memory that `metrics` measured is shown too.  Raises UsageError if it cannot be written.
        """
        rank, plan, graph = self._facts
        if rank != 0:
            return None
        shown = timeline
        if shown is None and self._meter.timeline is not None and self._meter.timeline[0] is plan:
            shown = self._meter.timeline[1]
        peaks = dict(enumerate(self._metrics.peak_bytes)) if self._metrics is not None else {}
        title = f"autopart: {type(self.model).__name__}"
        return write_page(plan, path, graph=graph, measured=shown, peaks=peaks, title=title)

    def _repr_html_(self) -> str:
        """Return its plan as a table and a small picture, for notebooks."""
        if self._session is None and not self._closed:
            return "<p>a pipe that is planned at its first step</p>"
        rank, plan, _ = self._facts
        state = "closed" if self._closed else "running"
        return plan_fragment(plan, f"{state}, rank {rank} of {self._cluster.world}, {self._steps} steps taken")

    @contextlib.contextmanager
    def traced(self) -> Iterator[list[Span]]:
        """Record what this rank does in the training steps of the body; in `train` micro-batches and times count on
        from one flush to the next."""
        session = self.session
        session.spans = []
        try:
            yield session.spans
        finally:
            session.spans = None


def gathered(world: World, mine: list[Span]) -> Timeline:
    """Return the spans of all ranks, in order of start.  Collective, O(spans).  Each rank counts from its own start of
    the step, right after the ranks have compared their batches, so times of ranks differ by at most one exchange."""
    spans = itertools.chain.from_iterable(world.gather_objects(mine))
    return Timeline(tuple(sorted(spans, key=lambda span: (span.start_ns, span.rank))))
