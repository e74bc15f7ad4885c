"""Routing: which values flow between which stages, and the messages and sums that carry them.

Everything here is on the captured graph, so that a plan file can be routed without coarsening anything again.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopart.ir.errors import PlanError
from autopart.ir.graph import Graph
from autopart.ir.plan import Decision
from autopart.ir.program import (
    OPTIMIZER,
    SUM_REPLICAS,
    SUM_TIED,
    Action,
    Edge,
    Program,
    Slot,
    linked_stages,
)
from autopart.passes.program.linearize import linear_order
from autopart.passes.program.schedules import find, worker_orders

Tied = tuple[tuple[str, tuple[int, ...]], ...]
"""Parameters that several stages use, with those stages."""


def route(decision: Decision, graph: Graph) -> Program:
    """The whole program of one step: computes, messages, sums of gradients and the optimizer's step.

    Before: `plan.check_decision(decision, graph)` holds.  After: the computes of each worker stand in the order of the
    schedule, each as early as it can (`linear_order`); a message stands right behind the compute that makes it, those
    to several stages with the receivers ascending; behind all of that stand the sums of tied gradients, the sums over
    replicas and the optimizer's steps.  Raises UsageError for an unknown schedule and ProgramError for one that can
    never end.  O(reads + actions * log ranks).
    """
    stages, micros = len(decision.stages), len(decision.micro_rows)
    links, shared = edges(decision, graph), tied(decision, graph)
    stage_ranks = tuple(stage.ranks for stage in decision.stages)
    orders = tuple(worker_orders(find(decision.schedule), stages, micros))
    order = linear_order(decision.schedule, orders, links, stage_ranks, micros)
    order += [Action(kind, Slot(stage)) for kind, stage in step_end(stage_ranks, shared)]
    return Program(micros, decision.world, stage_ranks, tuple(order), links, shared)


def step_end(stage_ranks: Sequence[tuple[int, ...]], shared: Tied) -> list[tuple[str, int]]:
    """(kind, stage) of what ends a step, in order.

    Stages that share parameters sum them side by side (they meet there), stages with replicas sum their gradients, and
    every stage has its optimizer.
    """
    sums = [(SUM_TIED, stage) for group in linked_stages(shared) for stage in group]
    replicas = [(SUM_REPLICAS, stage) for stage, ranks in enumerate(stage_ranks) if len(ranks) > 1]
    return sums + replicas + [(OPTIMIZER, stage) for stage in range(len(stage_ranks))]


def edges(decision: Decision, graph: Graph) -> tuple[Edge, ...]:
    """What flows from stage to stage for each micro-batch, ascending by (src, dst).

    A value that a stage reads and does not write comes from the first stage that writes it; a graph input comes from
    stage 0, which is given all of them.  Values go straight to the stage that reads them, however far; outputs stay
    where they are written.  Values stand in order of graph inputs, then of writing.  Raises PlanError when an op that
    must run once stands in two stages, or a value would flow back.  O(reads).
    """
    home = _homes(decision, graph)
    writer = {w: op.name for op in graph.ops for w in op.writes}
    place = {name: i for i, name in enumerate((*graph.inputs, *writer))}
    grad = {v.name for v in graph.values if v.grad and v.name in writer}
    ops = graph.op_map()
    needed: dict[tuple[int, int], set[str]] = {}
    for t, stage in enumerate(decision.stages):
        own = {w for name in stage.ops for w in ops[name].writes}
        for read in {r for name in stage.ops for r in ops[name].reads} - own:
            source = home[writer[read]] if read in writer else 0
            if source > t:
                raise PlanError(f"value {read} would flow back from stage {source} to stage {t}")
            if source < t:
                needed.setdefault((source, t), set()).add(read)
    result = []
    for (src, dst), names in sorted(needed.items()):
        values = tuple(sorted(names, key=place.__getitem__))
        result.append(Edge(src, dst, values, tuple(v for v in values if v in grad)))
    return tuple(result)


def divided_values(decision: Decision, graph: Graph) -> tuple[frozenset[str], frozenset[str]]:
    """What replicas have to cut by rows: (values that pass between stages with other numbers of replicas, what random
    ops of stages with replicas read and write).  O(reads)."""
    crossing = {
        name
        for edge in edges(decision, graph)
        if len(decision.stages[edge.src].ranks) != len(decision.stages[edge.dst].ranks)
        for name in edge.values
    }
    ops = graph.op_map()
    replicated = (ops[name] for stage in decision.stages if len(stage.ranks) > 1 for name in stage.ops)
    drawn = {name for op in replicated if op.random for name in (*op.reads, *op.writes)}
    return frozenset(crossing), frozenset(drawn)


def _homes(decision: Decision, graph: Graph) -> dict[str, int]:
    """The first stage of each op; an op in several must be one that can be repeated."""
    home: dict[str, int] = {}
    ops = graph.op_map()
    single = {v.name for v in graph.values if v.grad} | {value for _, value in graph.updates}
    learned = {p.name for p in graph.params if p.trainable} | {buffer for buffer, _ in graph.updates}
    for s, stage in enumerate(decision.stages):
        for name in stage.ops:
            op = ops[name]
            if name in home and (op.random or not single.isdisjoint(op.writes) or not learned.isdisjoint(op.params)):
                raise PlanError(
                    f"op {name} stands in stages {home[name]} and {s}",
                    where=f"{op.module} {op.where}".strip(),
                    why="an op that learns, draws random numbers or updates a buffer must run once",
                )
            home.setdefault(name, s)
    return home


def tied(decision: Decision, graph: Graph) -> Tied:
    """Trainable parameters that several stages use, with those stages; in the order of `graph.params`.  O(uses)."""
    ops = graph.op_map()
    users: dict[str, set[int]] = {}
    for s, stage in enumerate(decision.stages):
        for name in stage.ops:
            for param in ops[name].params:
                users.setdefault(param, set()).add(s)
    return tuple(
        (p.name, tuple(sorted(users[p.name]))) for p in graph.params if p.trainable and len(users.get(p.name, ())) > 1
    )
