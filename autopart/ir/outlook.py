"""Report what a decision would take, and what speaks for it: nothing that is run depends on it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Estimate:
    """What the simulator predicts for one device of a stage; times and sizes of the largest micro-batch's share.

    fwd_ns, bwd_ns: nanoseconds of one micro-batch, bwd_ns with what is recomputed.  flops: of one forward.
    param_bytes: weights and buffers.  state_bytes: gradients and optimizer state (`optimizer_bytes` of it), and weight
    versions of an asynchronous schedule.  activation_bytes: kept for each micro-batch in flight, of which there are
    at most `live`.  workspace_bytes: needed for a moment, by gradients and by what is recomputed.  buffer_bytes: for
    messages under way, and for sums of gradients over replicas.  in_bytes, out_bytes: received and sent by the whole
    stage in one forward.  reduce_ns: sum of gradients over the replicas.  optimizer_ns: the optimizer's step.
    peak_bytes: all that is needed at once.
    """

    fwd_ns: int
    bwd_ns: int
    flops: int
    param_bytes: int
    state_bytes: int
    activation_bytes: int
    in_bytes: int
    out_bytes: int
    peak_bytes: int
    live: int = 1
    optimizer_bytes: int = 0
    workspace_bytes: int = 0
    buffer_bytes: int = 0
    recompute_ns: int = 0
    reduce_ns: int = 0
    optimizer_ns: int = 0


@dataclass(frozen=True, slots=True)
class Optimality:
    """How far a plan is from the best at most.  objective, lower_bound: nanoseconds of a step; for a placement of its
    worst load, in the unit of the problem.

    No plan that cuts between the planner's blocks, under the same costs, on this cluster, within the choices that were
    allowed, is simulated faster than lower_bound; one that was refined inside blocks may be, and is its own bound.
    gap: (objective - lower_bound) / objective.  proved: gap is 0.
    """

    objective: int
    lower_bound: int
    gap: float
    proved: bool

    @staticmethod
    def of(objective: int, lower_bound: int) -> Optimality:
        """From the two numbers; a bound above the objective is the objective's own."""
        low = min(objective, lower_bound)
        return Optimality(objective, low, (objective - low) / objective if objective else 0.0, low == objective)


@dataclass(frozen=True, slots=True)
class Alternative:
    """A plan that was not taken.  step_ns: its simulated step, 0 when it cannot be; why: what speaks against it."""

    name: str
    step_ns: int
    why: str


@dataclass(frozen=True, slots=True)
class Report:
    """What a decision would take, and what speaks for it; nothing that is run depends on it.

    step_ns: simulated nanoseconds of one step, optimizer included (of an asynchronous schedule: in its steady state).
    bubble: idle share of the devices in it, 0 to 1.  estimates: one for each stage, or none.  notes: what the planner
    wants said.  alternatives: what else was considered.
    """

    step_ns: int = 0
    bubble: float = 0.0
    estimates: tuple[Estimate, ...] = ()
    notes: tuple[str, ...] = ()
    optimality: Optimality | None = None
    alternatives: tuple[Alternative, ...] = ()

    def __str__(self) -> str:
        """Return one line; `Plan.explain` and the plan's file have all of it."""
        counts = f"{len(self.notes)} notes, {len(self.alternatives)} alternatives"
        return f"simulated step {self.step_ns / 1e6:.2f} ms, bubble {self.bubble:.1%}, {counts}"

    def __repr__(self) -> str:
        return f"<Report {self}>"


def report_problems(report: Report, stages: int) -> Iterator[tuple[str, str]]:
    """Yield everything that is wrong with a report on a decision with so many stages, as (path, message)."""
    if report.estimates and len(report.estimates) != stages:
        yield "estimates", f"{len(report.estimates)} estimates for {stages} stages; give one each or none"
    for s, estimate in enumerate(report.estimates):
        for name, amount in asdict(estimate).items():
            if amount < 0:
                yield f"estimates[{s}].{name}", f"must not be negative, not {amount}"
    if report.step_ns < 0:
        yield "step_ns", f"must not be negative, not {report.step_ns}"
    if not 0 <= report.bubble <= 1:
        yield "bubble", f"must be a share between 0 and 1, not {report.bubble}"
    if report.optimality is not None:
        bound = report.optimality
        if min(bound.objective, bound.lower_bound) < 0:
            yield "optimality", f"must not be negative, not {min(bound.objective, bound.lower_bound)}"
        if not 0 <= bound.gap <= 1:
            yield "optimality.gap", f"must be a share between 0 and 1, not {bound.gap}"
    for i, other in enumerate(report.alternatives):
        if other.step_ns < 0:
            yield f"alternatives[{i}].step_ns", f"must not be negative, not {other.step_ns}"
