"""How every op of a graph runs on the ranks of a shard group, and what each rank then holds of every tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from autopart.ir.errors import PlanError
from autopart.ir.graph import Graph, Op
from autopart.passes.shards.calls import Call, calls_of, shapes_of
from autopart.passes.shards.factors import Factors
from autopart.passes.shards.states import CUT_KIND, State
from autopart.passes.shards.strategies import Strategy, strategies


@dataclass(frozen=True, slots=True)
class Assignment:
    """The strategy of each op, and the state in which each value is made and each parameter held, by name.

    shards: number of ranks of a group.
    """

    shards: int
    strategies: Mapping[str, Strategy]
    states: Mapping[str, State]

    def local_shape(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of what a rank holds of a tensor."""
        return self.states[name].local(shape, self.shards)

    def pieces(self, graph: Graph) -> dict[str, State]:
        """Return the cut of each parameter that ranks hold in parts."""
        return {p.name: self.states[p.name] for p in graph.params if self.states[p.name].kind == CUT_KIND}

    def reads(self, op: Op, call: Call) -> Iterator[tuple[str, State, State]]:
        """Yield (tensor, state in which it is held, state in which the op reads it) of each argument of an op."""
        for name, wanted in zip(call.reads, self.strategies[op.name].reads, strict=True):
            yield name, self.states[name], wanted


def check(assignment: Assignment, graph: Graph, factors: Factors, calls: Sequence[Call] | None = None) -> Assignment:
    """Check that an assignment is exact, and return it: every op runs in a way that its rule allows, every value is
    held as its op makes it, has equal parts where it is cut, and is read through a transition; the outputs and new
    values of buffers are whole for their readers.  calls: the ops, if they are known.  Raises PlanError.  O(reads)."""
    shapes = shapes_of(graph)
    for name, state in assignment.states.items():
        if not state.fits(shapes[name], assignment.shards):
            raise PlanError(f"{name} of shape {shapes[name]} has no {assignment.shards} equal parts as {state}")
    for name in (*graph.inputs, *(p.name for p in graph.params if p.kind != "param")):
        if assignment.states[name].kind == CUT_KIND:
            raise PlanError(f"{name} is given whole to every rank, and held as {assignment.states[name]}")
    for call in calls_of(graph) if calls is None else calls:
        chosen = assignment.strategies[call.op.name]
        if chosen not in strategies(call, factors, assignment.shards):
            raise PlanError(
                f"op {call.op.name} cannot run as {chosen}", where=f"{call.op.module} {call.op.where}".strip()
            )
        for written, state in zip(call.op.writes, chosen.writes, strict=True):
            if assignment.states[written] != state:
                raise PlanError(f"op {call.op.name} makes {written} as {state}, not {assignment.states[written]}")
    return assignment


def local_graph(graph: Graph, assignment: Assignment) -> Graph:
    """Return the graph with the shapes and bytes of what one rank holds; ops keep their names and costs."""
    shards = assignment.shards

    def share(name: str, size_bytes: int) -> int:
        return size_bytes // shards if assignment.states[name].kind == CUT_KIND else size_bytes

    values = [
        replace(v, shape=assignment.local_shape(v.name, v.shape), size_bytes=share(v.name, v.size_bytes))
        for v in graph.values
    ]
    params = [
        replace(
            p,
            shape=assignment.local_shape(p.name, p.shape),
            size_bytes=share(p.name, p.size_bytes),
            copy_bytes=share(p.name, p.copy_bytes),
        )
        for p in graph.params
    ]
    return replace(graph, values=tuple(values), params=tuple(params))
