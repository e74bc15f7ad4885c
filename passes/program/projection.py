"""Stages of another graph of a model (evaluation, another kind of batch) that follow the plan of its training graph.

The weights are where the plan put them, so every op that reads a parameter runs where that parameter is; every other
op runs as early as its inputs allow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from autopart.ir.decision import stage_of_ops
from autopart.ir.errors import PlanError
from autopart.ir.graph import Graph, Op
from autopart.ir.plan import Decision, Stage
from autopart.passes.graph.atoms import atoms
from autopart.passes.program.routing import homes, users_of, with_forward_only


def project_plan(graph: Graph, trained: Graph, plan: Decision) -> tuple[Stage, ...]:
    """Return stages for `graph` from `plan`, which was made for `trained`.  O(ops).

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
    holders, places, ops = _holders(trained, plan), _places(graph, trained, plan), trained.op_map()
    runs: dict[str, Counter[int]] = {}  # how many ops of each module run on each stage
    for index, planned in enumerate(plan.stages):
        for name in planned.ops:
            runs.setdefault(ops[name].module, Counter())[index] += 1
    modules = {module: count.most_common(1)[0][0] for module, count in runs.items() if module}
    parts: list[list[str]] = [[] for _ in plan.stages]
    stage_of: dict[str, int] = {}
    for block in blocks.ops:
        earliest = max((stage_of.get(read, 0) for read in block.reads), default=0)
        wanted = next((places[name] for name in block.parts or (block.name,) if name in places), None)
        stage = _stage(block, earliest, holders, modules.get(block.module) if wanted is None else wanted)
        for value in block.writes:
            stage_of[value] = stage
        parts[stage].extend(block.parts or (block.name,))
    place = {op.name: index for index, op in enumerate(graph.ops)}
    stages = []
    for names, planned in zip(map(set, parts), plan.stages, strict=True):
        groups = [tuple([name for name in group if name in names]) for group in planned.recompute]  # any are exact
        own = tuple(sorted(names, key=place.__getitem__))
        stages.append(replace(planned, ops=own, recompute=tuple(filter(None, groups))))
    return with_forward_only(replace(plan, stages=tuple(stages)), graph.learning_ops()).stages


def _holders(trained: Graph, plan: Decision) -> dict[str, list[int]]:
    """Return for each parameter and updated buffer the stages that hold it, and what the first one holds besides."""
    updated = {buffer for buffer, _ in trained.updates}
    fixed = {p.name for p in trained.params if p.kind == "param"} | updated
    holders = {name: stages for name, stages in users_of(plan.stages, trained).items() if name in fixed}
    for name, index in homes(plan, trained).items():
        holders.setdefault(name, []).append(index)
    read = {name for op in trained.ops for name in op.params}
    for name in trained.before:
        if name not in read or (name in holders and 0 not in holders[name]):
            holders[name] = [0, *holders.get(name, ())]
    return holders


def _places(graph: Graph, trained: Graph, plan: Decision) -> dict[str, int]:
    """Return the stages of the ops of `graph` that use parameters as often as `trained` does: that of the same use
    there.  So a layer that is used several times, on several stages, stays on all of them.  O(uses)."""
    stages = stage_of_ops(plan, trained)
    uses: dict[str, tuple[list[int], list[str]]] = {}
    for op in trained.ops:
        for name in op.params:
            uses.setdefault(name, ([], []))[0].append(stages[op.name])
    for op in graph.ops:
        for name in op.params:
            uses.setdefault(name, ([], []))[1].append(op.name)
    return {
        op: s for before, now in uses.values() if len(before) == len(now) for op, s in zip(now, before, strict=True)
    }


def _stage(block: Op, earliest: int, holders: Mapping[str, list[int]], wanted: int | None) -> int:
    held = [set(holders[name]) for name in block.params if name in holders]
    if not held:
        return earliest
    possible = [stage for stage in sorted(set.intersection(*held)) if stage >= earliest]
    if not possible:
        raise PlanError(
            f"{block.target} needs tensors that no stage from {earliest} on holds together",
            where=f"module {block.module} at {block.where}",
            why=f"the plan is for another kind of batch, and it reads {', '.join(block.params)}",
            fix="compile with a batch of this kind as the sample, or with stages=1, which holds them all",
        )
    return wanted if wanted in possible else possible[0]


def check_gradients_stay(graph: Graph, stages: tuple[Stage, ...], trained: Graph, plan: Decision) -> None:
    """Raise PlanError if a training step of `graph` would leave a parameter wrong under a plan for `trained`.

    That is one used on a stage that does not hold it under the plan.  O(ops).
    """
    planned, users = _holders(trained, plan), users_of(stages, graph)
    for param in graph.params:
        if not param.trainable or param.name not in users:
            continue
        held = planned.get(param.name, [])
        if not set(users[param.name]) <= set(held):
            raise PlanError(
                f"batches of this kind train parameter {param.name} elsewhere than the plan holds it",
                why="no rank holds it"
                if not held
                else f"stages {held} hold it, and stages {users[param.name]} use it here",
                fix="pipe.replan(optimizer): it was frozen when the plan was made, and has no place in it"
                if not held and param.name not in {p.name for p in trained.params if p.trainable}
                else "compile with a batch of this kind as the sample",
            )
