"""Where a model is computed: a plan holds what it was made for, what is decided, and what that would take."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

from autopart.ir.actions import OPTIMIZER
from autopart.ir.decision import Decision as Decision
from autopart.ir.decision import Problem, decision_problems, refuse
from autopart.ir.decision import Stage as Stage
from autopart.ir.decision import check_decision as check_decision
from autopart.ir.errors import ProgramError, short_errors
from autopart.ir.graph import Graph
from autopart.ir.timeline import Timeline, read_spans

Precision = Literal["fp32", "bf16", "fp16"]
"""Precision of a model: as it is ("fp32"), or under torch.autocast."""


@dataclass(frozen=True, slots=True)
class Provenance:
    """What a plan was made for and with.

    graph_digest: `Graph.shape_digest` of the graph at max(micro_rows) rows.  structure_digest: digest of the graph that
    is equal for every number of rows.  torch_version: of the torch release that captured the model.  costs: source of
    the op costs, such as "analytic" or "measured".  precision: of the autocast that the graph was captured in, "fp32"
    for none.
    """

    graph_digest: str
    structure_digest: str
    torch_version: str
    costs: str = "analytic"
    precision: Precision = "fp32"


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
    weight_bytes: kept from I to W, for each micro-batch.  hidden_ns: what I takes besides bwd_ns less weight_ns.
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
    hidden_ns: int = 0


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


@dataclass(frozen=True, slots=True)
class Plan:
    """How to run one captured graph on one cluster.

    provenance: what the plan was made for.  decision: what runs where, and in which order.  outlook: what that would
    take; running the plan does not depend on it.
    """

    provenance: Provenance
    decision: Decision
    outlook: Outlook = field(default=Outlook())

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages, in the order of the pipeline."""
        return self.decision.stages

    @property
    def micro_rows(self) -> tuple[int, ...]:
        """Rows of each micro-batch."""
        return self.decision.micro_rows

    @property
    def schedule(self) -> str:
        """Name of the schedule."""
        return self.decision.schedule

    @property
    def step_ns(self) -> int:
        """Simulated nanoseconds of one step."""
        return self.outlook.step_ns

    @property
    def estimates(self) -> tuple[Estimate, ...]:
        """Simulated times and memory of each stage; empty if nothing was estimated."""
        return self.outlook.estimates

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks of the planner."""
        return self.outlook.notes

    def digest(self) -> str:
        """Return a fingerprint of the whole plan; ranks compare it before they run."""
        return hashlib.sha256(json.dumps(asdict(self), separators=(",", ":")).encode()).hexdigest()[:16]

    def explain(self) -> str:
        """Return the plan as a text table: a line for each stage, and a footer that explains the numbers.

        Times, work and memory are of one device of the stage.  Memory is in MiB: weights; gradients and optimizer
        state; activations of one micro-batch times the micro-batches in flight; work: workspace, messages, and sums
        over replicas; the peak.  recomputed: number of ops whose forward runs again in the backward.  end ms: sum of
        gradients over the replicas, and the optimizer.  in and out: MiB that the stage receives and sends for each
        micro-batch in the forward.
        """
        return _drawing("plan_table").stage_table(self, with_modules=False)  # type: ignore[no-any-return]

    @short_errors
    def report(self, path: str | os.PathLike[str], *, measured: Timeline | None = None) -> Path:
        """Write the plan as one HTML page that needs no network, and return its path.

        It shows what runs where, the simulated step as a picture, the memory of every device, and the plans that lost.
        path: ends in .html.  measured: a step that ran (`Pipe.timeline`), to be shown beside the simulated one.  Raises
        UsageError if it cannot be written.
        """
        return _drawing("page.page").write_page(self, path, measured=measured)  # type: ignore[no-any-return]

    def _repr_html_(self) -> str:
        """Return a table and a small picture, for notebooks."""
        return _drawing("page.page").plan_fragment(self)  # type: ignore[no-any-return]

    @property
    def step_without_optimizer_ns(self) -> int:
        """Simulated nanoseconds of what `Pipe.step` does: all but the optimizer; `step_ns` if it holds none."""
        ends = [span.end_ns for span in read_spans(self.outlook.spans).spans if span.action.kind != OPTIMIZER]
        return max(ends, default=self.step_ns)

    def with_notes(self, *notes: str) -> Plan:
        """Return the plan with these notes after its own, each once."""
        return replace(self, outlook=replace(self.outlook, notes=tuple(dict.fromkeys(self.outlook.notes + notes))))


def _drawing(module: str) -> Any:
    """Return a module that draws plans.  Those stand above the languages, and are loaded when something is drawn."""
    return import_module(f"autopart.report.{module}")


def check(plan: Plan, graph: Graph | None = None) -> Plan:
    """Check a plan by the rules of `problems` and, with a graph, of `check_decision`; return it.  Raises PlanError."""
    refuse(problems(plan))
    if graph is not None:
        check_decision(plan.decision, graph)
    return plan


def problems(plan: Plan) -> Iterator[Problem]:
    """Yield everything that is wrong with a plan without its graph, as (path in a plan file, message)."""
    for section, found in (
        ("decision", decision_problems(plan.decision)),
        ("outlook", _outlook_problems(plan.outlook, len(plan.decision.stages))),
    ):
        for path, message in found:
            yield f"{section}.{path}", message


def _outlook_problems(outlook: Outlook, stages: int) -> Iterator[Problem]:
    """Yield everything that is wrong with the outlook on a decision of `stages` stages, as (path, message)."""
    if outlook.estimates and len(outlook.estimates) != stages:
        yield "estimates", f"{len(outlook.estimates)} estimates for {stages} stages; give one each or none"
    if outlook.limits and len(outlook.limits) != stages:
        yield "limits", f"{len(outlook.limits)} limits for {stages} stages; give one each or none"
    try:
        read_spans(outlook.spans)
    except ProgramError as error:
        yield "spans", f"{error.what}: {error.why}" if error.why else error.what
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
