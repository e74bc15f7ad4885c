"""Where a model is computed: a plan holds what it was made for, what is decided, and what that would take."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Literal

from autopart.ir.decision import Decision as Decision
from autopart.ir.decision import Problem, decision_problems, refuse
from autopart.ir.decision import Stage as Stage
from autopart.ir.decision import check_decision as check_decision
from autopart.ir.explain import explain
from autopart.ir.graph import Graph
from autopart.ir.outlook import Estimate as Estimate
from autopart.ir.outlook import Report as Report
from autopart.ir.outlook import report_problems

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
class Plan:
    """How to run one captured graph on one cluster.

    provenance: what the plan was made for.  decision: what runs where, and in which order.  report: what that would
    take; running the plan does not depend on it.
    """

    provenance: Provenance
    decision: Decision
    report: Report = field(default=Report())

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
    def estimates(self) -> tuple[Estimate, ...]:
        """Simulated times and memory of each stage; empty if nothing was estimated."""
        return self.report.estimates

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks of the planner."""
        return self.report.notes

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
        return explain(self.decision, self.report, self.provenance.costs)

    def with_notes(self, *notes: str) -> Plan:
        """Return the plan with these notes after its own, each once."""
        return replace(self, report=replace(self.report, notes=tuple(dict.fromkeys(self.report.notes + notes))))


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
        ("report", report_problems(plan.report, len(plan.decision.stages))),
    ):
        for path, message in found:
            yield f"{section}.{path}", message
