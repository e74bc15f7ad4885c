"""The stage table and its footer as data, for commands with --json."""

from __future__ import annotations

from dataclasses import asdict

from autopart.ir.graph import Graph, module_range
from autopart.ir.plan import Plan
from autopart.report.plan_table import modules_of, parameter_count


def plan_facts(plan: Plan, graph: Graph | None = None) -> dict[str, object]:
    """Return the content of `stage_table` in nanoseconds, bytes and numbers that are not rounded.

    graph: the captured graph the plan is for; adds the modules and the number of parameters of each stage.
    """
    return {
        "schedule": plan.schedule,
        "micro_rows": plan.micro_rows,
        "token_slices": plan.decision.token_slices,
        "world": plan.decision.world,
        "zero": plan.decision.zero,
        "copies": plan.decision.copies,
        "stages": [_stage(plan, s, graph) for s in range(len(plan.stages))],
        "step_ns": plan.step_ns,
        "bubble": plan.outlook.bubble,
        "costs": plan.provenance.costs,
        "optimality": asdict(plan.outlook.optimality) if plan.outlook.optimality is not None else None,
        "alternatives": [asdict(other) for other in plan.outlook.alternatives],
        "notes": plan.notes,
    }


def _stage(plan: Plan, s: int, graph: Graph | None) -> dict[str, object]:
    stage = plan.stages[s]
    facts: dict[str, object] = {"stage": s, "ranks": stage.ranks, "ops": len(stage.ops)}
    if modules := modules_of(plan, graph)[s]:
        facts["modules"] = module_range(modules)
    if graph is not None:
        facts["params"] = parameter_count(graph, set(stage.ops))
    facts["recomputed"] = sum(map(len, stage.recompute))
    facts["forward_only"] = stage.forward_only
    if plan.estimates:
        facts |= asdict(plan.estimates[s])
    return facts
