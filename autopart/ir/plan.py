"""Say where a model is computed: a plan is what it is made for, what is decided, and what that would take."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

from autopart.ir.decision import AGAIN as AGAIN
from autopart.ir.decision import Decision as Decision
from autopart.ir.decision import Problem as Problem
from autopart.ir.decision import Stage as Stage
from autopart.ir.decision import check_decision as check_decision
from autopart.ir.decision import check_ops, decision_problems, refuse
from autopart.ir.explain import explain
from autopart.ir.graph import Graph
from autopart.ir.outlook import Alternative as Alternative
from autopart.ir.outlook import Estimate as Estimate
from autopart.ir.outlook import Optimality as Optimality
from autopart.ir.outlook import Report as Report
from autopart.ir.outlook import report_problems

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
class Plan:
    """A complete answer for one captured graph on one cluster: for what, what is decided, and what it would take.

    What is read most can be read from the plan itself.
    """

    provenance: Provenance
    decision: Decision
    report: Report = field(default=Report())

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
        return explain(self.decision, self.report, self.provenance.costs)

    def with_notes(self, *notes: str) -> Plan:
        """The plan with these notes after its own."""
        return replace(self, report=replace(self.report, notes=self.notes + notes))


def check(plan: Plan, graph: Graph | None = None) -> Plan:
    """Check a plan, and its decision against its graph when given; return it.

    The rules are those of `problems` and, with a graph, of `check_decision`.  Raises PlanError.
    """
    refuse(problems(plan))
    if graph is not None:
        check_ops(plan.decision, graph)
    return plan


def problems(plan: Plan) -> Iterator[Problem]:
    """Everything that is wrong with a plan in itself, as (path, message); paths are those of a plan file."""
    for section, found in (
        ("decision", decision_problems(plan.decision)),
        ("report", report_problems(plan.report, len(plan.decision.stages))),
    ):
        for path, message in found:
            yield f"{section}.{path}", message
