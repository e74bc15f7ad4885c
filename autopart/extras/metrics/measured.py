"""The metrics of a step, from what every rank noted of it."""

from __future__ import annotations

import logging
import resource
import sys
from dataclasses import dataclass

import torch

from autopart.capture import Captured
from autopart.extras.metrics.meter import DRIFT_STEPS, Meter, Work, differs
from autopart.extras.metrics.metrics import Metrics
from autopart.ir.cluster import Cluster
from autopart.ir.graph import Graph
from autopart.ir.plan import Plan
from autopart.ir.timeline import computing_ns, stage_sums
from autopart.passes.ops.flops import model_flops
from autopart.report.page.rows import rank_peaks
from autopart.session.session import Session

_log = logging.getLogger("autopart")

StageSums = dict[int, tuple[int, int, int]]
"""Nanoseconds of forwards and of backwards, and the number of micro-batches, by stage."""


@dataclass(frozen=True, slots=True)
class _Own:
    """The report of one rank.  end_ns, busy_ns: of its actions, 0 if they were not timed."""

    seconds: float
    peak_bytes: int
    end_ns: int
    busy_ns: int
    stages: StageSums


def measured(
    session: Session,
    meter: Meter,
    *,
    step: int,
    grad_norm: float | None,
    loss_scale: float | None,
    skipped: bool,
) -> Metrics:
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
        step=step,
        loss=float(meter.loss) if meter.loss is not None else float("nan"),
        grad_norm=grad_norm,
        skipped=skipped,
        loss_scale=loss_scale,
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
        meter.work = _work(captured, session.cluster)
    return meter.work


def _work(captured: Captured, cluster: Cluster) -> Work:
    graph = captured.graph
    flops = model_flops(graph)
    dtype = max(flops, key=flops.__getitem__)
    peak_rate = sum(device.rate(dtype) for device in cluster.devices)
    return Work(captured, sum(flops.values()) / graph.rows, float(peak_rate), _tokens_of_a_row(graph))


def _tokens_of_a_row(graph: Graph) -> int:
    """Return the length of the first input of whole numbers that has one for each row, 0 if there is none."""
    values = graph.value_map()
    for value in map(values.__getitem__, graph.inputs):
        if value.dtype in ("int64", "int32") and len(value.shape) == 2 and value.shape[0] == graph.rows:
            return value.shape[1]
    return 0


def _peak_bytes(device: torch.device) -> int:
    """Return the most memory of this rank: of the device since the last call, of a process on a CPU ever."""
    if device.type == "cuda":
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return resident if sys.platform == "darwin" else resident * 1024
