"""Where it is computed: which ops on which ranks, in which micro-batches, under which schedule."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Literal

from autopart.ir.errors import PlanError
from autopart.ir.explain import explain
from autopart.ir.graph import Graph
from autopart.ir.plan_graph import AGAIN as AGAIN
from autopart.ir.plan_graph import check_ops
from autopart.ir.printable import shortened
from autopart.ir.program import BUCKET_BYTES, MAX_BUCKET_BYTES
from autopart.ir.shares import Division, Policy, copies_of, division, division_problems
from autopart.ir.text import decision_text

Problem = tuple[str, str]
"""Where, as the path of a field, and what is wrong there."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage: the captured ops it runs, in captured order, and the ranks that run it.

    Ops that depend on constants or inputs alone may stand in several stages; every other op stands in one.  Several
    ranks are replicas: each has a part of the rows of every micro-batch, in the order of `ranks`: an equal one, or one
    in proportion to its number in `shares`.  Under the policy "turn" each has whole micro-batches instead: replica m
    modulo their number micro-batch m (PipeDream, SOSP 2019, section 3.2).  recompute: groups of ops of which only the
    inputs are kept; a group is computed again when its backward comes.
    """

    ops: tuple[str, ...]
    ranks: tuple[int, ...]
    recompute: tuple[tuple[str, ...], ...] = ()
    shares: tuple[int, ...] = ()
    policy: Policy = "split"

    @property
    def division(self) -> Division:
        """How the ranks divide micro-batches."""
        return division(len(self.ranks), self.shares, self.policy)


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


Precision = Literal["fp32", "bf16", "fp16"]
"""What a model runs in: as it is, or under an autocast."""


@dataclass(frozen=True, slots=True)
class Provenance:
    """What a plan was made for and with.

    graph_digest: `Graph.shape_digest` of the graph at max(micro_rows) rows.  structure_digest: equal for the same
    model at other row counts.  torch_version: of the release that captured it.  costs: where the costs of its ops
    come from, "analytic" or "measured".  precision: of the autocast that the graph was captured in, "fp32" for none.
    """

    graph_digest: str
    structure_digest: str
    torch_version: str
    costs: str = "analytic"
    precision: Precision = "fp32"


@dataclass(frozen=True, slots=True)
class Decision:
    """Everything that is decided, and nothing else: what a program is made from.

    world: ranks that start, of which some may idle.  micro_rows: rows of each micro-batch, in order; they differ by at
    most one.  zero: 1 where each replica of a stage keeps the optimizer's state (and masters) of its share of the
    stage's parameters alone, whole ones, and new values are gathered after the step (ZeRO, SC 2020); 0: all keep all.
    token_slices: lengths of the slices that the sequences of every micro-batch are cut into, in order; (): they are
    whole.  bucket_bytes: gradients that replicas sum together (`ir.program`); the buckets follow from it, for their
    order is that in which the last backward releases them.  compress: "bf16" where each gradient is rounded to that
    for these sums, which are then not exact; None for sums as wide as gradients are.
    """

    world: int
    stages: tuple[Stage, ...]
    micro_rows: tuple[int, ...]
    schedule: str
    zero: int = 0
    token_slices: tuple[int, ...] = ()
    bucket_bytes: int = BUCKET_BYTES
    compress: Literal["bf16"] | None = None

    def __str__(self) -> str:
        return decision_text(self)

    @property
    def slices(self) -> int:
        """Of each micro-batch, at least 1."""
        return max(1, len(self.token_slices))

    @property
    def copies(self) -> int:
        """Pipelines side by side: replica counts have this common divisor, so rows never leave their copy."""
        return copies_of([stage.division for stage in self.stages])

    def stages_of_rank(self, rank: int) -> tuple[int, ...]:
        """The stages that a rank runs, ascending; () for a rank that idles."""
        return tuple(index for index, stage in enumerate(self.stages) if rank in stage.ranks)


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


@dataclass(frozen=True, slots=True)
class Plan:
    """A complete answer for one captured graph on one cluster: for what, what is decided, and what it would take.

    What is read most can be read from the plan itself.
    """

    provenance: Provenance
    decision: Decision
    report: Report = Report()

    @property
    def world(self) -> int:
        """Ranks that start."""
        return self.decision.world

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
        return self.report.step_ns

    @property
    def bubble(self) -> float:
        """Idle share of the devices in the simulated step, 0 to 1."""
        return self.report.bubble

    @property
    def estimates(self) -> tuple[Estimate, ...]:
        """What each stage would take; empty when nothing was estimated."""
        return self.report.estimates

    @property
    def notes(self) -> tuple[str, ...]:
        """What the planner wants said."""
        return self.report.notes

    @property
    def optimality(self) -> Optimality | None:
        """How far from the best at most."""
        return self.report.optimality

    @property
    def alternatives(self) -> tuple[Alternative, ...]:
        """What else was considered."""
        return self.report.alternatives

    def digest(self) -> str:
        """Fingerprint of the whole plan: equal on every rank, or the ranks do not run the same thing."""
        return hashlib.sha256(json.dumps(asdict(self), separators=(",", ":")).encode()).hexdigest()[:16]

    def explain(self) -> str:
        """The plan as plain text: a line for each stage, and what the numbers are and mean.

        Times, work and memory are of one device of the stage.  Memory is in MiB: weights; gradients and optimizer
        state; activations of one micro-batch times the micro-batches in flight; work: workspace, messages, and sums
        over replicas; the peak.  recomputed: ops whose forward runs again in the backward.  end ms: sum of gradients
        over the replicas, and the optimizer.  in and out: MiB that the stage receives and sends per micro-batch in the
        forward.
        """
        return explain(self)

    def with_notes(self, *notes: str) -> Plan:
        """The plan with these notes after its own."""
        return replace(self, report=replace(self.report, notes=self.notes + notes))


def check(plan: Plan, graph: Graph | None = None) -> Plan:
    """Check a plan, and its decision against its graph when given; return it.

    The rules are those of `problems` and, with a graph, of `check_decision`.  Raises PlanError.
    """
    _refuse(problems(plan))
    if graph is not None:
        check_ops(plan.decision, graph)
    return plan


def check_decision(decision: Decision, graph: Graph | None = None) -> Decision:
    """Check what is decided, and against its graph when given; return it.

    1. Nothing is wrong in itself (`decision_problems`).
    2. Every op of the graph stands in at least one stage, and only ops of the graph do.
    3. No value flows from a stage to an earlier one.
    4. All uses of a buffer that is updated stand in the stage that updates it: each stage has its own copy.
    Raises PlanError.
    """
    _refuse(decision_problems(decision))
    if graph is not None:
        check_ops(decision, graph)
    return decision


def problems(plan: Plan) -> Iterator[Problem]:
    """Everything that is wrong with a plan in itself, as (path, message); paths are those of a plan file."""
    for section, found in (("decision", decision_problems(plan.decision)), ("report", _report_problems(plan))):
        for path, message in found:
            yield f"{section}.{path}", message


def decision_problems(decision: Decision) -> Iterator[Problem]:
    """Everything that is wrong with a decision in itself, as (path, message).

    The schedule has a name (`passes.program.schedules` knows which names there are), sizes are positive, micro-batches
    differ by at most a row, ranks exist, no stage lists a rank or an op twice, and what is recomputed
    are ops of the stage, each once.
    """
    if decision.world < 1:
        yield "world", f"at least 1 rank is needed, not {decision.world}"
    if not decision.schedule:
        yield "schedule", "a schedule needs a name"
    if decision.zero not in (0, 1):
        yield "zero", f"optimizer state is shared (1) or not (0), not {decision.zero}"
    if not 1 <= decision.bucket_bytes <= MAX_BUCKET_BYTES:
        yield "bucket_bytes", f"a bucket holds 1 to {MAX_BUCKET_BYTES} bytes, not {decision.bucket_bytes}"
    if not decision.stages:
        yield "stages", "at least one stage is needed"
    if not decision.micro_rows:
        yield "micro_rows", "at least one micro-batch is needed"
    for i, rows in enumerate(decision.micro_rows):
        if rows < 1:
            yield f"micro_rows[{i}]", f"a micro-batch needs at least 1 row, not {rows}"
    if decision.micro_rows and max(decision.micro_rows) - min(decision.micro_rows) > 1:
        yield "micro_rows", f"micro-batches differ by at most one row, not {shortened(str(decision.micro_rows), 100)}"
    yield from _slice_problems(decision)
    yield from _rank_problems(decision)
    for s, stage in enumerate(decision.stages):
        yield from _op_problems(s, stage)


def _slice_problems(decision: Decision) -> Iterator[Problem]:
    if len(decision.token_slices) == 1:
        yield "token_slices", "one slice is the whole sequence, which is []"
    for i, length in enumerate(decision.token_slices):
        if length < 1:
            yield f"token_slices[{i}]", f"a slice needs at least 1 token, not {length}"


def _rank_problems(decision: Decision) -> Iterator[Problem]:
    for s, stage in enumerate(decision.stages):
        taken: set[int] = set()
        if not stage.ranks:
            yield f"stages[{s}].ranks", "a stage needs a rank"
        for i, rank in enumerate(stage.ranks):
            if not 0 <= rank < decision.world:
                yield f"stages[{s}].ranks[{i}]", f"rank {rank} is outside 0..{decision.world - 1}"
            elif rank in taken:
                yield f"stages[{s}].ranks[{i}]", f"rank {rank} appears twice in this stage"
            taken.add(rank)
        for field, message in division_problems(len(stage.ranks), stage.shares, stage.policy):
            yield f"stages[{s}].{field}", message


def _op_problems(s: int, stage: Stage) -> Iterator[Problem]:
    seen: set[str] = set()
    for i, name in enumerate(stage.ops):
        if name in seen:
            yield f"stages[{s}].ops[{i}]", f"op {shortened(name)} appears twice in this stage"
        seen.add(name)
    again = [name for group in stage.recompute for name in group]
    if len(again) > len(set(again)) or not seen.issuperset(again):
        yield f"stages[{s}].recompute", "names an op twice, or one that is not in the stage"


def _report_problems(plan: Plan) -> Iterator[Problem]:
    report, stages = plan.report, plan.decision.stages
    if report.estimates and len(report.estimates) != len(stages):
        yield "estimates", f"{len(report.estimates)} estimates for {len(stages)} stages; give one each or none"
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


def _refuse(found: Iterator[Problem]) -> None:
    """Raise PlanError for the first problem, and count the others."""
    first = next(found, None)
    if first is not None:
        path, message = first
        more = sum(1 for _ in found)
        raise PlanError(f"the plan is not valid: {message}", where=path, why=f"{more} more problems" if more else "")
