"""Routing: which values flow between which stages, and the sends and receives that carry them.

Everything here is on the captured graph, so that a plan file can be routed without coarsening anything again.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count

from autopart.ir.errors import PlanError
from autopart.ir.graph import Graph
from autopart.ir.plan import Decision
from autopart.ir.program import Action, Edge, Program
from autopart.passes.program.schedules import order

CommTemplate = Mapping[str, tuple[Action, ...]]
Tied = tuple[tuple[str, tuple[int, ...]], ...]
"""Parameters that several stages use, with those stages."""


def route(decision: Decision, graph: Graph) -> Program:
    """The whole program of one step: computes, messages, and the sums of tied gradients.

    Before: `plan.check_decision(decision, graph)` holds.  After, on the rank of each stage: receives from all sources
    stand right before the F or B that needs them and sends right behind the one that makes them, peers ascending; T is
    last.  A
    directed pair of stages carries activations (to the later stage) or gradients (to the earlier one), never both, in
    the order of the computes on both ends, so each is one first-in first-out channel.  A stage runs on the first of
    its ranks.  O(reads + actions).
    """
    links, shared = edges(decision, graph), tied(decision, graph)
    ranks: list[tuple[Action, ...]] = [()] * decision.world
    orders = order(len(decision.stages), len(decision.micro_rows), decision.schedule)
    for stage, text, acts in zip(
        decision.stages, orders, comm_template(len(decision.stages), links, shared), strict=True
    ):
        ranks[stage.ranks[0]] = _numbered(text, acts)
    stage_ranks = tuple(stage.ranks[0] for stage in decision.stages)
    return Program(len(decision.micro_rows), stage_ranks, tuple(ranks), links, shared)


def _numbered(text: str, acts: CommTemplate) -> tuple[Action, ...]:
    """What a stage does in all: its forwards and backwards in this order, then what comes last."""
    place = {"F": count(), "B": count()}
    actions = []
    for letter in text:
        micro = next(place[letter])
        actions += [Action(a.kind, a.stage, micro, a.peer) for a in acts[letter]]
    return (*actions, *acts["T"])


def comm_template(stages: int, links: tuple[Edge, ...], shared: Tied) -> tuple[CommTemplate, ...]:
    """What each stage does for the forward ("F") and for the backward ("B") of micro-batch 0, and after all ("T").

    Receives, the F or B, sends; of several peers in ascending order.  O(stages + edges).
    """
    into: dict[int, list[tuple[int, bool]]] = {s: [] for s in range(stages)}
    out: dict[int, list[tuple[int, bool]]] = {s: [] for s in range(stages)}
    for edge in links:  # ascending, so peers are ascending in both lists
        into[edge.dst].append((edge.src, bool(edge.grads)))
        out[edge.src].append((edge.dst, bool(edge.grads)))
    summing = {s for _, users in shared for s in users}
    return tuple(
        {
            "F": (
                *(Action("RF", s, 0, peer) for peer, _ in into[s]),
                Action("F", s, 0),
                *(Action("SF", s, 0, peer) for peer, _ in out[s]),
            ),
            "B": (
                *(Action("RB", s, 0, peer) for peer, grads in out[s] if grads),
                Action("B", s, 0),
                *(Action("SB", s, 0, peer) for peer, grads in into[s] if grads),
            ),
            "T": (Action("T", s),) if s in summing else (),
        }
        for s in range(stages)
    )


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
