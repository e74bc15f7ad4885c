"""The numbers of one training step, the same on every rank, from what each rank noted of it."""

from __future__ import annotations

import logging
import os
import resource
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from autopart.capture import Captured
from autopart.ir.errors import UsageError
from autopart.ir.graph import Graph
from autopart.ir.plan import Plan
from autopart.ir.timeline import Span, Timeline, computing_ns, stage_sums
from autopart.options import given
from autopart.passes.ops.flops import model_flops
from autopart.report.comparison import Answer
from autopart.report.page.page import write_page
from autopart.report.page.rows import rank_peaks
from autopart.session.executors.step_end import StepEnd
from autopart.session.ranks.listener import Listener
from autopart.session.session import Session
from autopart.state.core import Core, Part
from autopart.state.misuse_guards import refuse_in_training
from autopart.state.state_dict import gradient_norm


@dataclass(frozen=True, slots=True)
class Metrics:
    """What the last training step took.

    step: its number, from 1.  loss: of the whole batch.  grad_norm: over all stages, as `clip_grad_norm_` returned it,
    else of the gradients that are there now; None without any.  skipped: whether it added no gradients.  loss_scale: of
    fp16, else None.

    step_s: seconds of `pipe.step` on the slowest rank.  predicted_s: simulated seconds of the same (all but the
    optimizer), None for another kind of batch than the plan is for.  rows_per_s.  tokens_per_s: padding included; None
    for a batch without a tensor of token ids.  flops_per_s: of the model, 3 times the operations of its forward (PaLM,
    appendix B; what is recomputed does not count, frozen weights do).  mfu: flops_per_s as a share of the peak rate of
    all devices of the cluster.

    bubble: share of the ranks' time without computes, None for a step that was not timed (the first call of
    `pipe.metrics` begins to).  predicted_bubble: simulated, optimizer included.  stage_s: of each stage, mean seconds
    of forward and backward of a micro-batch; () for a step that was not timed.  peak_bytes: of each rank: on a GPU the
    most that was allocated since the last call, on a CPU the most that the process ever had resident.
    predicted_peak_bytes: of each rank, what the plan charges; 0 where it runs nothing.
    """

    step: int
    loss: float
    grad_norm: float | None
    skipped: bool
    loss_scale: float | None
    step_s: float
    predicted_s: float | None
    rows_per_s: float
    tokens_per_s: float | None
    flops_per_s: float
    mfu: float
    bubble: float | None
    predicted_bubble: float
    stage_s: tuple[tuple[float, float], ...]
    peak_bytes: tuple[int, ...]
    predicted_peak_bytes: tuple[int, ...]

    def as_dict(self) -> dict[str, Any]:
        """Return the numbers by name, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        """Return one line."""
        parts = [f"step {self.step}", f"loss {self.loss:.4g}"]
        if self.grad_norm is not None:
            parts.append(f"gradient norm {self.grad_norm:.3g}")
        if self.loss_scale is not None:
            parts.append(f"scale {self.loss_scale:g}" + (" (skipped)" if self.skipped else ""))
        said = f" (predicted {self.predicted_s * 1e3:.1f})" if self.predicted_s else ""
        parts.append(f"{self.step_s * 1e3:.1f} ms{said}")
        rate, what = (self.rows_per_s, "rows") if self.tokens_per_s is None else (self.tokens_per_s, "tokens")
        parts.append(f"{rate:,.0f} {what}/s")
        parts.append(f"{self.flops_per_s / 1e12:.3g} TFLOP/s")
        parts.append(f"MFU {self.mfu:.1%}")
        if self.bubble is not None:
            parts.append(f"bubble {self.bubble:.0%}")
        parts.append(f"peak {max(self.peak_bytes, default=0) / 2**30:.2f} GiB")
        return ", ".join(parts)


DRIFT, DRIFT_STEPS = 0.2, 50
"""By which part, and for how many steps in a row, a step may differ from its prediction before a line says so."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a kind of batch takes.

    flops: of a row, forward and backward.  peak_rate: operations per second of the whole cluster, in the dtype of most
    of them.  tokens: of a row: the length of the first input of whole numbers that has one for each row, 0 without.
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


_log = logging.getLogger("autopart")


@dataclass(frozen=True, slots=True)
class _Own:
    """The report of one rank.  end_ns, busy_ns: of its actions, 0 if they were not timed.  stages: nanoseconds of
    forwards and of backwards, and the number of micro-batches, by stage."""

    seconds: float
    peak_bytes: int
    end_ns: int
    busy_ns: int
    stages: dict[int, tuple[int, int, int]]


def measured(core: Core, session: Session, meter: Meter, grad_norm: float | None) -> Metrics:
    """Return the metrics of the last step.  Collective; from now on steps are timed."""
    plan, world = session.plan, session.world
    own = _Own(
        meter.seconds,
        _peak_bytes(world.device),
        max((span.end_ns for span in meter.spans), default=0),
        computing_ns(meter.spans),
        stage_sums(meter.spans),
    )
    every: list[_Own] = world.gather_objects(own)
    seconds = max(each.seconds for each in every)
    rows = sum(session.road.rows)
    work = _work_of(session, meter)
    flops = rows * work.flops
    timed = bool(meter.spans) or any(each.end_ns for each in every)
    meter.timed = True
    found = Metrics(
        step=core.steps,
        loss=float(meter.loss) if meter.loss is not None else float("nan"),
        grad_norm=grad_norm,
        skipped=core.skipped > 0,
        loss_scale=core.scaler.scale if core.scaler is not None else None,
        step_s=seconds,
        predicted_s=meter.predicted_s(session),
        rows_per_s=rows / seconds,
        tokens_per_s=rows * work.tokens / seconds if work.tokens else None,
        flops_per_s=flops / seconds,
        mfu=flops / seconds / work.peak_rate,
        bubble=_bubble(every, plan) if timed else None,
        predicted_bubble=plan.outlook.bubble,
        stage_s=_stage_means(every, len(plan.stages)) if timed else (),
        peak_bytes=tuple(each.peak_bytes for each in every),
        predicted_peak_bytes=rank_peaks(plan),
    )
    if world.rank == 0 and meter.drifting >= DRIFT_STEPS and (line := drift_line(found, plan)):
        meter.drifting = 0
        _log.warning(line)
    return found


def drift_line(metrics: Metrics, plan: Plan) -> str:
    """Return a line on a step that differs from its prediction, which names the stage that differs most; "" if it
    does not differ."""
    took, said = metrics.step_s, metrics.predicted_s
    if said is None or not differs(took, said):
        return ""
    line = (
        f"for {DRIFT_STEPS} steps or more, steps have not taken the predicted time: now {took * 1e3:.1f} ms, "
        f"{took / said - 1:+.0%} against {said * 1e3:.1f} ms"
    )
    stages = [
        (sum(pair), (e.fwd_ns + e.bwd_ns) * 1e-9) for pair, e in zip(metrics.stage_s, plan.estimates, strict=False)
    ]
    if stages:
        s = max(range(len(stages)), key=lambda s: abs(stages[s][0] - stages[s][1]))
        took, said = stages[s]
        line += (
            f"; stage {s} differs most: forward and backward of a micro-batch take {took * 1e3:.2f} ms, "
            f"not {said * 1e3:.2f} ms"
        )
    return line + "; pipe.replan() measures again, and continues under a faster plan"


def _stage_means(every: list[_Own], stages: int) -> tuple[tuple[float, float], ...]:
    """Return the mean seconds of forward and backward of a micro-batch, by stage."""
    found = []
    for s in range(stages):
        sums = [each.stages[s] for each in every if s in each.stages]
        micros = sum(count for _, _, count in sums) or 1
        found.append(tuple(sum(row[way] for row in sums) * 1e-9 / micros for way in (0, 1)))
    return tuple((forward, backward) for forward, backward in found)


def _bubble(every: list[_Own], plan: Plan) -> float:
    """Return the share of the step in which the ranks that run a stage do not compute."""
    ranks = {rank for stage in plan.stages for rank in stage.ranks}
    whole = len(ranks) * max(each.end_ns for each in every)
    return max(0.0, 1 - sum(each.busy_ns for each in every) / whole) if whole else 0.0


def _work_of(session: Session, meter: Meter) -> Work:
    """Return what a row of the last batch takes; found once for each kind of batch."""
    captured = session.road.captured
    if meter.work is None or meter.work.captured is not captured:
        graph = captured.graph
        flops = model_flops(graph)
        dtype = max(flops, key=flops.__getitem__)
        peak_rate = sum(device.rate(dtype) for device in session.cluster.devices)
        meter.work = Work(captured, sum(flops.values()) / graph.rows, float(peak_rate), _tokens(graph))
    return meter.work


def _tokens(graph: Graph) -> int:
    """Return the length of the first input of whole numbers that has one for each row, 0 without."""
    values = map(graph.value_map().__getitem__, graph.inputs)
    ids = (v for v in values if v.dtype in ("int64", "int32") and len(v.shape) == 2 and v.shape[0] == graph.rows)
    return next((value.shape[1] for value in ids), 0)


def _peak_bytes(device: torch.device) -> int:
    """Return the most memory of this rank: of the device since the last call, of a process on a CPU ever."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return resident if sys.platform == "darwin" else resident * 1024


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
            self.last = measured(core, session, self.meter, norm)
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
        core = self.core
        answer = Answer(title, core.cluster, _tokens(graph) or None, plan, graph, model_flops(graph))
        on_cpu = core.cluster.devices[rank].device_type == "cpu"
        told = {"answer": answer, "options": given(core.options), "peaks": peaks, "of_process": on_cpu}
        return write_page(plan, path, measured=shown, title=title, **told)

    def around_step(self, session: Session, batch: Sequence[Any]) -> AbstractContextManager[None]:
        """Time the step."""
        return self.meter.step(session)

    @property
    def listeners(self) -> Sequence[Listener]:
        """The meter notes the loss of each step."""
        return (self.meter,)
