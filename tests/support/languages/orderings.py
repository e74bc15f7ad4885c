"""Pipelines whose computes are to be ordered: a chain of stages with any times, placement and memory."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from hypothesis import strategies as st

from autopart.ir.actions import BACKWARD, FORWARD
from autopart.ir.plan import Decision, Stage
from autopart.ir.program import Edge, Program
from autopart.passes.ordering.searched import MOVE_EFFORT, Found, search_order
from autopart.passes.program.named import SEARCHED
from autopart.passes.program.orders import LOOP, Shape, V, placed
from autopart.passes.program.routing import edges, route
from autopart.passes.simulation.simulate import Message, Work
from autopart.passes.simulation.traffic import PortLoad
from support.languages.graphs import graph

Times = tuple[float, float, float]


@dataclass(frozen=True)
class Case:
    """A plan without an order, what its stages take, and the room of each worker."""

    decision: Decision
    graph_text: str
    work: Work
    room_bytes: tuple[int, ...]

    @property
    def shape(self) -> Shape:
        return Shape.of(self.decision)

    @property
    def links(self) -> tuple[Edge, ...]:
        return edges(self.decision, graph(self.graph_text))

    def search(self, effort: int = MOVE_EFFORT) -> Found:
        ranks = [stage.ranks for stage in self.decision.stages]
        return search_order(self.shape, self.links, (), ranks, self.work, room_bytes=self.room_bytes, effort=effort)

    def program(self, schedule: str = SEARCHED, order: tuple[str, ...] = ()) -> Program:
        made = Decision(self.decision.world, self.decision.stages, self.decision.micro_rows, schedule, order=order)
        return route(made, graph(self.graph_text))


def chain_text(stages: int, skips: tuple[int, ...] = (), frozen: int = 0) -> str:
    """The graph of a chain of ops; skips: ops whose values the op after the next one reads too.  frozen: the first ops,
    which have no backward."""
    reads = [[f"v{s - 1}"] if s else ["x"] for s in range(stages)]
    for s in skips:
        if s + 2 < stages:
            reads[s + 2].append(f"v{s}")
    return "; ".join(f"v{s}{'-' * (s < frozen)}:1 #4 <- {' '.join(own)}" for s, own in enumerate(reads))


Messages = dict[Message, tuple[int, tuple[PortLoad, ...]]]


def messages(links: tuple[Edge, ...], homes: tuple[int, ...], after_ns: int) -> Messages:
    """Messages that take so long between workers, and that do not get into each other's way."""
    found: Messages = {}
    for edge in links if after_ns else ():
        if homes[edge.src] != homes[edge.dst]:
            back = ((edge.dst, edge.src, BACKWARD),) if edge.grads else ()
            for src, dst, way in ((edge.src, edge.dst, FORWARD), *back):
                port = np.array([2 * len(found)])  # of its own, outwards
                found[src, dst, way] = (1, (PortLoad(after_ns - 1, port, np.ones(1), np.array([10**9])),))
    return found


def even(
    workers: int, each: int, micros: int, times: Times, transfer: float = 0, placement: str = V, room: float = 0
) -> Case:
    """Equal stages. times: of F, I and W of all stages of a worker together, and transfer: in thousands of ns.

    room: micro-batches that a worker may hold, 0: as many as there are workers, as under 1F1B.
    """
    stages, unit = workers * each, 1000 * each
    homes = placed(placement, stages, workers) or tuple(range(stages))
    rows = tuple(Stage((f"v{s}",), (homes[s],)) for s in range(stages))
    decision = Decision(workers, rows, (1,) * micros, SEARCHED)
    fwd, back, weight = (int(taken * unit / each) for taken in times)
    links = edges(decision, graph(chain_text(stages)))
    work = Work(
        (fwd,) * stages, (back + weight,) * stages, (1,) * stages, messages(links, homes, int(transfer * unit)),
        weight_ns=(weight,) * stages, weight_bytes=(1,) * stages,
    )  # fmt: skip
    return Case(decision, chain_text(stages), work, (int((room or workers) * each),) * workers)


@st.composite
def cases(
    draw: st.DrawFn,
    most_workers: int = 4,
    most_micros: int = 6,
    *,
    kept_at_most_held: bool = False,
    freezing: bool = False,
) -> Case:
    """Any times, placements and memory, with room for at least one micro-batch.  freezing: whether the first stages may
    be forward only."""
    workers, micros = draw(st.integers(1, most_workers)), draw(st.integers(1, most_micros))
    stages = workers * draw(st.integers(1, 3))
    in_order = placed(draw(st.sampled_from([LOOP, V])), stages, workers) or tuple(range(stages))
    free = st.lists(st.integers(0, workers - 1), min_size=stages, max_size=stages)
    drawn = draw(st.just(in_order) | free.map(tuple))
    number = {home: i for i, home in enumerate(dict.fromkeys(drawn))}  # workers count in the order of their stages
    homes = tuple(number[home] for home in drawn)
    frozen = draw(st.integers(0, stages - 1)) if freezing else 0
    rows = tuple(Stage((f"v{s}",), (homes[s],), forward_only=s < frozen) for s in range(stages))
    decision = Decision(len(number), rows, (1,) * micros, SEARCHED)
    text = chain_text(stages, tuple(draw(st.lists(st.integers(0, stages), max_size=2))), frozen)

    def amounts(least: int) -> tuple[int, ...]:
        return tuple(draw(st.lists(st.integers(least, 9), min_size=stages, max_size=stages)))

    fwd = amounts(1)
    back, weight, held = ((0,) * frozen + amounts(least)[frozen:] for least in (1, 0, 0))
    most = held if kept_at_most_held else tuple(size + 2 for size in held)
    kept = tuple(draw(st.integers(0, size)) if taken else 0 for size, taken in zip(most, weight, strict=True))
    needed = [sum(max(held[s], kept[s]) for s in range(stages) if homes[s] == w) for w in range(len(number))]
    room = tuple(size + draw(st.integers(0, 2 * size)) for size in needed)
    links = edges(decision, graph(text))
    bwd = tuple(a + b for a, b in zip(back, weight, strict=True))
    work = Work(
        fwd, bwd, held, messages(links, homes, draw(st.sampled_from([0, 1, 4]))), weight_ns=weight, weight_bytes=kept
    )
    return Case(decision, text, work, room)
