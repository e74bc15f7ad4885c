"""Routing: the values that flow between stages, and the messages and sums that carry them.

It works on the captured graph, so that a plan file can be routed without coarsening.

Stages without anything that learns, on them or before them, are forward only: with `requires_grad_(False)` on the first
modules of a model, their ops have no backward.  A stage of such ops alone keeps nothing for a backward, gets no
gradients, sums none and has no optimizer step.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from types import MappingProxyType

from autopart.ir.actions import begins_step
from autopart.ir.decision import Decision, Stage, stage_of_ops
from autopart.ir.errors import PlanError
from autopart.ir.graph import Graph
from autopart.ir.program import Edge, Program
from autopart.ir.shares import division, same_windows
from autopart.passes.program.linearize import linear_order
from autopart.passes.program.orders import Shape
from autopart.passes.program.schedules import find, worker_orders

NOWHERE: Mapping[str, Collection[int]] = MappingProxyType({})
Tied = tuple[tuple[str, tuple[int, ...]], ...]
"""(parameter, stages that use it) of parameters that several stages use."""


def route(
    decision: Decision,
    graph: Graph,
    prologue: Collection[str] = (),
    sharing: Collection[int] = (),
    held: Mapping[str, Collection[int]] = NOWHERE,
) -> Program:
    """Return the program of one step.  prologue: as for `edges`.  sharing: stages whose replicas shared the optimizer
    state when the plan was made: they gather new values also where all of it is frozen now, which one of them may have
    changed before.  held: as for `tied`.

    Before: `plan.check_decision(decision, graph)` holds.  After: the computes of each worker stand in the order of the
    schedule, each as early as it can (`linear_order`); a message stands right behind the compute that makes it, those
    to several stages with the receivers ascending.  Actions once a step that need nothing stand before all computes,
    the others behind them, both in the order of the table of actions.  Raises UsageError for an unknown schedule and
    ProgramError for one that can never end.  O(reads + actions * log ranks).
    """
    shape, divisions = Shape.of(decision), tuple(stage.division for stage in decision.stages)
    bare = Program(
        shape.micros,
        decision.world,
        tuple(stage.ranks for stage in decision.stages),
        (),
        edges(decision, graph, prologue),
        tied(decision, graph, held),
        shape.slices,
        divisions if any(each != division(each.count) for each in divisions) else (),
        owners=tuple(sorted({*owner_stages(decision, graph), *sharing})),
        forward_only=shape.forward_only,
        unsummed=unsummed_stages(decision, graph) if find(decision.schedule).synchronous else (),
    )
    orders = tuple(worker_orders(find(decision.schedule), shape))
    order = linear_order(decision.schedule, orders, bare)
    once = tuple(bare.once_a_step())
    begin = [action for action in once if begins_step(action.kind)]
    return replace(bare, order=(*begin, *order, *once[len(begin) :]))


def users_of(stages: Sequence[Stage], graph: Graph) -> dict[str, list[int]]:
    """Return for each parameter the stages that use it, ascending.  O(uses)."""
    ops = graph.op_map()
    found: dict[str, list[int]] = {}
    for s, stage in enumerate(stages):
        for name in dict.fromkeys(name for op in stage.ops for name in ops[op].params):
            found.setdefault(name, []).append(s)
    return found


def homes(decision: Decision, graph: Graph) -> dict[str, int]:
    """Return the stage that holds each trainable parameter that no op uses, so that a batch of another kind can train
    it: the stage of its neighbours in the model.  O(uses + parameters).

    Of the used parameters before and behind it, the one whose path has more in common with its own counts; of two that
    have as much, the one on the later stage."""
    users = users_of(decision.stages, graph)
    names = [param.name for param in graph.params if param.kind == "param"]
    unused = {param.name for param in graph.params if param.trainable} - users.keys()
    found: dict[str, tuple[int, int]] = dict.fromkeys((name for name in names if name in unused), (0, 0))
    for order, side in ((names, -1), (names[::-1], 0)) if unused else ():
        near = ""
        for name in order:
            if name in users:
                near = name
            elif name in unused and near:
                both = zip(name.split("."), near.split("."), strict=False)
                alike = list(takewhile(lambda parts: parts[0] == parts[1], both))
                found[name] = max(found[name], (len(alike), users[near][side]))
    return {name: stage for name, (_, stage) in found.items()}


def owner_stages(decision: Decision, graph: Graph) -> tuple[int, ...]:
    """Return the stages whose replicas share the optimizer state, and gather the values that each has updated."""
    trained = {param.name for param in graph.params if param.trainable} if decision.zero else set()
    ops = graph.op_map()
    return tuple(
        s
        for s, stage in enumerate(decision.stages if decision.zero else ())
        if stage.replicas > 1 and any(not trained.isdisjoint(ops[name].params) for name in stage.ops)
    )


def edges(decision: Decision, graph: Graph, prologue: Collection[str] = ()) -> tuple[Edge, ...]:
    """Return the values that flow from stage to stage for each micro-batch, ascending by (src, dst).

    A value that a stage reads and does not write comes from the first stage that writes it; a graph input comes from
    stage 0, which gets all of them.  Values go straight to the stage that reads them, however far; outputs stay where
    they are written.  Values stand in order of graph inputs, then of writing.  With slices of tokens, values without a
    gradient (labels, masks) are sent whole, and their readers cut them.  prologue: ops that depend on inputs alone and
    run at full length in every stage that reads their results: inputs are sent for them.  Raises PlanError when an op
    that must run once stands in two stages, or a value would flow back.  O(reads).
    """
    home = stage_of_ops(decision, graph)
    writer = {w: op.name for op in graph.ops for w in op.writes}
    inputs = set(graph.inputs)
    place = {name: i for i, name in enumerate((*graph.inputs, *writer))}
    grad = {v.name for v in graph.values if v.grad and v.name in writer}
    ops = graph.op_map()
    behind = _inputs_behind(graph, prologue)
    needed: dict[tuple[int, int], set[str]] = {}
    for t, stage in enumerate(decision.stages):
        run = [ops[name] for name in stage.ops if name not in prologue]
        own = {w for op in run for w in op.writes}
        reads = {source for op in run for read in op.reads for source in behind.get(read, (read,))}
        for read in reads - own:
            source = home[writer[read]] if read in writer else 0
            if source > t:
                raise PlanError(f"value {read} would flow back from stage {source} to stage {t}")
            if source < t:
                needed.setdefault((source, t), set()).add(read)
    result = []
    for (src, dst), names in sorted(needed.items()):
        values = tuple(sorted(names, key=place.__getitem__))
        once = inputs if prologue else place.keys() - grad
        whole = tuple(v for v in values if v in once) if decision.token_slices else ()
        result.append(Edge(src, dst, values, tuple(v for v in values if v in grad), whole))
    return tuple(result)


def _inputs_behind(graph: Graph, prologue: Collection[str]) -> dict[str, set[str]]:
    """Return the inputs that each value of the prologue depends on."""
    found: dict[str, set[str]] = {}
    for op in graph.ops if prologue else ():
        if op.name in prologue:
            sources = {source for read in op.reads for source in found.get(read, {read})}
            found.update(dict.fromkeys(op.writes, sources))
    return found


def divided_values(
    decision: Decision, graph: Graph, prologue: Collection[str] = ()
) -> tuple[frozenset[str], frozenset[str]]:
    """Return the values that replicas cut by rows.  prologue: as for `edges`.

    They are (values that pass between stages whose replicas have different rows, values that random ops read and write
    in stages whose replicas have parts of a micro-batch).  O(reads).
    """
    crossing = {
        name
        for edge in edges(decision, graph, prologue)
        if not same_windows(decision.stages[edge.src].division, decision.stages[edge.dst].division)
        for name in edge.values
    }
    ops = graph.op_map()
    replicated = (ops[name] for stage in decision.stages if stage.division.splits for name in stage.ops)
    drawn = {name for op in replicated if op.random for name in (*op.reads, *op.writes)}
    return frozenset(crossing), frozenset(drawn)


def tied(decision: Decision, graph: Graph, held: Mapping[str, Collection[int]] = NOWHERE) -> Tied:
    """Return the trainable parameters that several stages use, in the order of `graph.params`.  O(uses).

    held: stages that have a copy under the plan, by parameter; all of them need the sum, though this graph may use
    fewer."""
    users = {name: {*own, *held.get(name, ())} for name, own in users_of(decision.stages, graph).items()}
    return tuple(
        (p.name, tuple(sorted(users[p.name]))) for p in graph.params if p.trainable and len(users.get(p.name, ())) > 1
    )


def with_forward_only(decision: Decision, learning: Collection[str]) -> Decision:
    """Mark the stages that are forward only, and no others; they recompute nothing, and have no backward to be whole.

    learning: the ops that have a backward (`Graph.learning_ops`); where there are none, as in evaluation, no stage is
    marked.  Under asynchronous schedules none is either: the rhythm of their updates has a backward on every stage,
    which does nothing there.  O(ops).
    """
    may_be = bool(learning) and find(decision.schedule).synchronous

    def marked(stage: Stage) -> Stage:
        forward_only = may_be and not any(name in learning for name in stage.ops)
        if not forward_only:
            return replace(stage, forward_only=False)
        return replace(stage, forward_only=True, recompute=(), whole_backward=False)

    return replace(decision, stages=tuple([marked(stage) for stage in decision.stages]))


def unsummed_stages(decision: Decision, graph: Graph) -> tuple[int, ...]:
    """Return the stages whose replicas have nothing to sum: without trainable parameters, and without buffers that
    change.  O(uses)."""
    trained = {param.name for param in graph.params if param.trainable}
    ops, changing = graph.op_map(), {value for _, value in graph.updates}

    def sums(stage: Stage) -> bool:
        own = [ops[name] for name in stage.ops]
        return any(not (trained.isdisjoint(op.params) and changing.isdisjoint(op.writes)) for op in own)

    return tuple(s for s, stage in enumerate(decision.stages) if not sums(stage))
