"""What a decision would take, and how it compares: simulated times, memory, bounds and alternatives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace

from autopart.ir.errors import ProgramError
from autopart.ir.timeline import read_spans


@dataclass(frozen=True, slots=True)
class Estimate:
    """What the simulator predicts for one device of a stage, for its share of the largest micro-batch.

    fwd_ns, bwd_ns: nanoseconds of one micro-batch; bwd_ns includes recomputation (`recompute_ns` of it).  flops: of one
    forward.  param_bytes: weights and buffers.  state_bytes: gradients, optimizer state (`optimizer_bytes` of it), and
    weight versions of an asynchronous schedule.  activation_bytes: kept for each micro-batch in flight, of which there
    are at most `live`.  workspace_bytes: temporary memory of gradients and recomputation.  buffer_bytes: messages under
    way, and sums of gradients over replicas.  in_bytes, out_bytes: received and sent by the whole stage in one forward.
    reduce_ns: sum of gradients over the replicas.  optimizer_ns: the optimizer step.  peak_bytes: the most memory that
    is needed at once by this stage.  weight_ns: the part of bwd_ns that W takes where the backward has two parts.
    weight_bytes: kept from I to W, for each micro-batch.
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
    weight_ns: int = 0
    weight_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Optimality:
    """How far a plan can be from the best one.

    objective, lower_bound: nanoseconds of a step (of a placement: its largest load).  No plan that cuts between the
    planner's blocks, under the same costs, on this cluster, within the choices that were allowed, is simulated faster
    than lower_bound; a plan that was refined inside blocks may be, and is then its own bound.  gap: (objective -
    lower_bound) / objective.  proved: whether gap is 0.
    """

    objective: int
    lower_bound: int
    gap: float
    proved: bool

    @staticmethod
    def of(objective: int, lower_bound: int) -> Optimality:
        """Make it from the two numbers; a bound above the objective is lowered to it."""
        low = min(objective, lower_bound)
        return Optimality(objective, low, (objective - low) / objective if objective else 0.0, low == objective)


@dataclass(frozen=True, slots=True)
class Alternative:
    """A plan that was not taken.  step_ns: its simulated step, 0 if it does not fit.  why: why it was not taken."""

    name: str
    step_ns: int
    why: str


@dataclass(frozen=True, slots=True)
class Outlook:
    """What a decision would take, and how it compares.

    step_ns: simulated nanoseconds of one step, optimizer included (of an asynchronous schedule: in its steady state).
    bubble: idle share of the devices in it, 0 to 1.  estimates: one for each stage, or empty.  notes: remarks of the
    planner.  alternatives: plans that were not taken.  limits: the memory of the devices of each stage in bytes, or
    empty.  spans: the simulated step, a line for each worker (`ir.timeline.spans_text`); empty if it is not known or
    has more than `MOST_SPANS`.
    """

    step_ns: int = 0
    bubble: float = 0.0
    estimates: tuple[Estimate, ...] = ()
    notes: tuple[str, ...] = ()
    optimality: Optimality | None = None
    alternatives: tuple[Alternative, ...] = ()
    limits: tuple[int, ...] = ()
    spans: tuple[str, ...] = ()

    def with_bound(self, bound_ns: int) -> Outlook:
        """Return the outlook with a lower bound of the step."""
        return replace(self, optimality=Optimality.of(self.step_ns, bound_ns))

    def __repr__(self) -> str:
        counts = f"{len(self.notes)} notes, {len(self.alternatives)} alternatives"
        return f"<Outlook simulated step {self.step_ns / 1e6:.2f} ms, bubble {self.bubble:.1%}, {counts}>"


def outlook_problems(outlook: Outlook, stages: int) -> Iterator[tuple[str, str]]:
    """Yield everything that is wrong with the outlook on a decision of `stages` stages, as (path, message)."""
    if outlook.estimates and len(outlook.estimates) != stages:
        yield "estimates", f"{len(outlook.estimates)} estimates for {stages} stages; give one each or none"
    if outlook.limits and len(outlook.limits) != stages:
        yield "limits", f"{len(outlook.limits)} limits for {stages} stages; give one each or none"
    try:
        read_spans(outlook.spans)
    except ProgramError as error:
        yield "spans", str(error)
    bound = outlook.optimality
    numbers = {
        **{f"estimates[{s}].{name}": n for s, e in enumerate(outlook.estimates) for name, n in asdict(e).items()},
        "step_ns": outlook.step_ns,
        "limits": min(outlook.limits, default=0),
        "optimality": min(bound.objective, bound.lower_bound) if bound else 0,
        **{f"alternatives[{i}].step_ns": other.step_ns for i, other in enumerate(outlook.alternatives)},
    }
    for path, number in numbers.items():
        if number < 0:
            yield path, f"must not be negative, not {number}"
    for path, share in (("bubble", outlook.bubble), ("optimality.gap", bound.gap if bound else 0.0)):
        if not 0 <= share <= 1:
            yield path, f"must be a share between 0 and 1, not {share}"
