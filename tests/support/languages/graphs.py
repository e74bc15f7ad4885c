"""Graphs, clusters and programs for tests. Graphs are written in the language of `support.languages.text`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from hypothesis import strategies as st

from autopart.ir.cluster import Cluster, Device, Level, Link
from autopart.ir.graph import Cost, Graph, Size
from autopart.ir.plan import Plan
from autopart.passes.ops.cost_model import CostTable, table_of
from autopart.passes.pipeline import PlannerInput, build
from autopart.passes.search.space import PlanRequest
from autopart.passes.simulation.stage_costs import device_types
from support.languages.parse import parse_graph as graph


def cluster(
    world: int, *, memory: int | tuple[int, ...] = 1 << 40, latency_ns: int = 0, bytes_per_s: int = 1_000_000_000
) -> Cluster:
    """Return `world` equal devices on one link; at the default rate a byte takes a nanosecond."""
    sizes = (memory,) * world if isinstance(memory, int) else memory
    devices = tuple(Device("cpu", size, 10**12, 10**11) for size in sizes)
    return Cluster(devices, (Level(world, Link(latency_ns, bytes_per_s)),))


def layers(count: int, *, size: int = 8) -> Graph:
    """Return a residual network whose layer l has the ops l.norm, l.up, l.down and the sum with the residual stream."""
    lines = [f"embed:1 #{size} @embed +embed.w:{4 * size} <- ids"]
    stream = "embed"
    for i in range(count):
        at = f"@layers.{i}"
        lines += [
            f"n{i}:1 #{size} ^{size} {at}.norm +g{i}:{size} <- {stream}",
            f"u{i}:8 #{4 * size} ^{size} {at}.up +u{i}.w:{4 * size} <- n{i}",
            f"d{i}:8 #{size} ^{4 * size} {at}.down +d{i}.w:{4 * size} <- u{i}",
            f"s{i}:1 #{size} {at} <- {stream} d{i}",
        ]
        stream = f"s{i}"
    lines.append(f"loss:4 @head +head.w:{4 * size} <- {stream} labels")
    return graph(";".join(lines))


# ---- planning ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ComputedCosts:
    """A cost model from a function that maps (rows, device type) to a graph with costs."""

    at: Callable[[int, int], Graph]

    def graph(self, size: Size, device_type: int) -> Graph:
        return self.at(size.rows, device_type)

    def table(self, size: Size, device_type: int) -> CostTable:
        return table_of(self.graph(size, device_type))


def source(g: Graph, c: Cluster) -> PlannerInput:
    """Return the planner input for a graph.

    Times, saved bytes and value sizes scale with the rows; times scale inversely with a device's rate.
    """
    kinds = device_types(c)

    def costs_at(rows: int, kind: int) -> Graph:
        slower, size = kinds[0].flops_per_s / kinds[kind].flops_per_s, rows / g.rows
        if slower == size == 1:
            return g
        ops = []
        for op in g.ops:
            fwd_ns, bwd_ns = (int(t * slower * size) for t in (op.cost.fwd_ns, op.cost.bwd_ns))
            kept, scratch = (int(b * size) for b in (op.cost.saved_bytes, op.cost.scratch_bytes))
            ops.append(replace(op, cost=Cost(fwd_ns, bwd_ns, kept, scratch, int(op.cost.flops * size))))
        values = tuple(replace(v, size_bytes=int(v.size_bytes * size)) for v in g.values)
        return replace(g, size=Size(rows), ops=tuple(ops), values=values)

    return PlannerInput(g, ComputedCosts(costs_at), torch_version="2")


def plan_of(g: Graph, c: Cluster, *, micros: int = 4, rows: tuple[int, ...] | None = None, **request: Any) -> Plan:
    """Return the plan for micro-batches of one row, or of `rows`. request: other fields of `PlanRequest`."""
    return build(source(g, c), c, PlanRequest(((1,) * micros if rows is None else rows,), **request))


def frozen(g: Graph, count: int) -> Graph:
    """Return the graph with the parameters of its first ops frozen: what then has no backward costs none."""
    names = {name for op in g.ops[:count] for name in op.params}
    params = tuple(replace(p, trainable=p.trainable and p.name not in names) for p in g.params)
    trained = {p.name for p in params if p.trainable}
    grads: set[str] = set()
    ops = []
    for op in g.ops:
        learns = not (trained.isdisjoint(op.params) and grads.isdisjoint(op.reads))
        grads.update(op.writes if learns else ())
        ops.append(op if learns else replace(op, cost=replace(op.cost, bwd_ns=0, saved_bytes=0)))
    values = tuple(replace(v, grad=v.grad and v.name in grads) for v in g.values)
    return replace(g, values=values, params=params, ops=tuple(ops))


# ---- strategies ----------------------------------------------------------------------------------------------------


_SMALL = st.integers(0, 20)
_PLACES = st.integers(0, 59)
"""Strategies are made once: to make one for every op took longer than to draw."""
_OP = st.tuples(
    st.sampled_from((False, False, True)), st.integers(0, 3), st.lists(_PLACES, max_size=3), _PLACES,
    st.tuples(_SMALL, _SMALL, _SMALL, _SMALL), st.integers(0, 5), st.integers(0, 3),
)  # fmt: skip
"""Whether an op has a second result, whether it is free, what it reads, numbers, and what else it has."""


@st.composite
def graphs(draw: st.DrawFn, *, least: int = 1, most: int = 12, free: bool = True) -> Graph:
    """Draw random DAGs with skips, several readers, late inputs, tied parameters, buffer updates and ops that may be
    cloned.
    """
    lines = []
    constant: list[str] = []
    written: list[str] = []
    updater = draw(st.integers(0, 3 * most))  # which op, if any, updates the buffer `run`
    for i in range(draw(st.integers(least, most))):
        two, freely, places, place, (forward, backward, size, more), kind, runs = draw(_OP)
        second = f",w{i}" if two else ""
        names = [f"v{i}", *([f"w{i}"] if two else [])]
        if free and freely == 0:
            pool, places = [*constant, "x", "y"], places[:2]
            constant += names
            name, extra = f"v{i}{second}-:{forward % 2}/0", ("", " ~c", " !")[kind % 3]
        else:
            pool, places = [*written, "x", "y"], [*places[:2], place]
            name = f"v{i}{second}:{forward}/{backward}"
            extra = ("", f" +p{i}:5", " +tied:9", f" ^{more}", f" ${more}", " !")[kind]
            extra += " ~run =run" if i == updater else " ~run" * (runs == 3)
        reads = dict.fromkeys(pool[at % len(pool)] for at in places)
        written += names
        lines.append(f"{name} #{size}{extra} @m.{i // 3} <- {' '.join(reads)}")
    return graph(";".join(lines))


@st.composite
def clusters(draw: st.DrawFn, world: int, *, tight: int | None = None) -> Cluster:
    """Draw random links in one or two levels, with memory up to `tight` bytes if given."""
    link = st.builds(Link, st.integers(0, 5), st.sampled_from([10**8, 10**9, 3 * 10**9]))
    memory = st.integers(1, tight) if tight else st.just(1 << 40)
    devices = tuple(Device("cpu", draw(memory), 10**12, 10**11) for _ in range(world))
    if world % 2 == 0 and draw(st.booleans()):
        return Cluster(devices, (Level(2, draw(link)), Level(world, draw(link))))
    return Cluster(devices, (Level(world, draw(link)),))
