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
from autopart.ir.graph import Graph
from autopart.ir.outlook import Estimate as Estimate
from autopart.ir.outlook import Outlook as Outlook
from autopart.ir.outlook import outlook_problems
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

    def report(self, path: str | os.PathLike[str], *, measured: Timeline | None = None) -> Path:
        """Write the plan as one HTML page that needs no network, and return its path.

        It shows what runs where, the simulated step as a picture, the memory of every device, and the plans that lost.
        path: ends in .html.  measured: a step that ran (`Pipe.timeline`), to be shown beside the simulated one.  Raises
        UsageError if it cannot be written.
        """
        return _drawing("page.page").write_page(self, path, measured=measured)  # type: ignore[no-any-return]

    def _repr_html_(self) -> str:
        """Return a table and a small picture, for notebooks."""
        return _drawing("page.notebook").plan_fragment(self)  # type: ignore[no-any-return]

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
        ("outlook", outlook_problems(plan.outlook, len(plan.decision.stages))),
    ):
        for path, message in found:
            yield f"{section}.{path}", message
