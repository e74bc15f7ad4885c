"""Stages of a model's evaluation graph that follow the plan made for its training graph.

The weights are where the plan put them, so every op that reads a parameter runs where that parameter is; every other
op runs as early as its inputs allow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from autopart.ir.errors import PlanError
from autopart.ir.graph import Graph, Op
from autopart.ir.plan import Decision, Stage
from autopart.passes.graph.atoms import atoms
from autopart.passes.program.learning import with_forward_only


def project_plan(graph: Graph, trained: Graph, plan: Decision) -> tuple[Stage, ...]:
    """Return stages for `graph` (evaluation) from `plan`, which was made for `trained`.  O(ops).

    After: every op stands in a stage, no value flows back, and every trainable or updated tensor is read only on stages
    that hold it under the plan.  Raises PlanError if that is impossible.
    """
    try:
        return _projected(graph, atoms(graph), trained, plan)
    except PlanError as error:
        # A cheap op that reads a buffer of one stage was cloned into one that reads a parameter of another.
        try:
            return _projected(graph, graph, trained, plan)
        except PlanError:
            raise error from None


def _projected(graph: Graph, blocks: Graph, trained: Graph, plan: Decision) -> tuple[Stage, ...]:
    """Place blocks of ops of `graph` as a whole, as `project_plan` describes."""
    holders = _holders(trained, plan)
    modules = _module_stages(trained, plan)
    parts: list[list[str]] = [[] for _ in plan.stages]
    stage_of: dict[str, int] = {}
    for block in blocks.ops:
        earliest = max((stage_of.get(read, 0) for read in block.reads), default=0)
        stage = _stage(block, earliest, holders, modules)
        for value in block.writes:
            stage_of[value] = stage
        parts[stage].extend(block.parts or (block.name,))
    place = {op.name: index for index, op in enumerate(graph.ops)}
    stages = tuple(
        replace(stage, ops=tuple(sorted(set(names), key=place.__getitem__)), recompute=_kept_groups(stage, set(names)))
        for names, stage in zip(parts, plan.stages, strict=True)
    )
    return with_forward_only(replace(plan, stages=stages), graph.learning_ops()).stages


def _kept_groups(stage: Stage, names: set[str]) -> tuple[tuple[str, ...], ...]:
    """Return the recomputed groups of a stage, limited to ops with these names: any groups are exact."""
    groups = (tuple(name for name in group if name in names) for group in stage.recompute)
    return tuple(group for group in groups if group)


def _holders(trained: Graph, plan: Decision) -> dict[str, list[int]]:
    """Return for each parameter and updated buffer the stages that hold it."""
    updated = {buffer for buffer, _ in trained.updates}
    fixed = {p.name for p in trained.params if p.kind == "param"} | updated
    holders: dict[str, list[int]] = {}
    ops = trained.op_map()
    for index, stage in enumerate(plan.stages):
        for name in dict.fromkeys(p for op in stage.ops for p in ops[op].params):
            if name in fixed:
                holders.setdefault(name, []).append(index)
    return holders


def _module_stages(trained: Graph, plan: Decision) -> dict[str, int]:
    """Return the stage where most of each module's ops run."""
    counts: dict[str, Counter[int]] = {}
    ops = trained.op_map()
    for index, stage in enumerate(plan.stages):
        for name in stage.ops:
            counts.setdefault(ops[name].module, Counter())[index] += 1
    return {module: count.most_common(1)[0][0] for module, count in counts.items() if module}


def _stage(block: Op, earliest: int, holders: Mapping[str, list[int]], modules: Mapping[str, int]) -> int:
    held = [set(holders[name]) for name in block.params if name in holders]
    if not held:
        return earliest
    possible = [stage for stage in sorted(set.intersection(*held)) if stage >= earliest]
    if not possible:
        raise PlanError(
            f"in evaluation, {block.target} needs tensors that no stage from {earliest} on holds together",
            where=f"module {block.module} at {block.where}",
            why=f"it reads {', '.join(block.params)}",
            fix="plan with cuts= that keep these on one stage",
        )
    wanted = modules.get(block.module, possible[0])
    return wanted if wanted in possible else possible[0]


def check_gradients_stay(graph: Graph, stages: tuple[Stage, ...], trained: Graph, plan: Decision) -> None:
    """Raise PlanError if a training step of `graph` would leave a parameter wrong under a plan for `trained`.

    That is a parameter that no rank holds, or one that several hold and that only some of them would sum.  O(ops).
    """
    planned = _holders(trained, plan)
    ops = graph.op_map()
    users: dict[str, list[int]] = {}
    for index, stage in enumerate(stages):
        for name in dict.fromkeys(p for op in stage.ops for p in ops[op].params):
            users.setdefault(name, []).append(index)
    for param in graph.params:
        if not param.trainable or param.name not in users:
            continue
        held = planned.get(param.name, [])
        if not held or (len(held) > 1 and users[param.name] != held):
            raise PlanError(
                f"batches of this kind train parameter {param.name} elsewhere than the plan holds it",
                why="no rank holds it"
                if not held
                else f"stages {held} hold it, and stages {users[param.name]} use it here",
                fix="compile with a sample that uses all parameters, or a second pipe for these batches",
            )
