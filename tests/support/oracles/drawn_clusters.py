"""Planning problems of GPUs and layers of milliseconds, where bubbles, sums of gradients and messages all count."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from random import Random

import numpy as np

from autopart.ir.cluster import Cluster, Device, Level, Link
from autopart.ir.graph import Cost
from autopart.passes.pipeline import search
from autopart.passes.program.orders import LOOP, ONE, V
from autopart.passes.proof.positions import positions_bound
from autopart.passes.proof.prices import Priced
from autopart.passes.search.evaluation import Candidate, Evaluation, Search, evaluate
from autopart.passes.search.layout import Layout
from autopart.passes.search.space import PlanRequest, SearchSpace
from autopart.passes.search.variants.ordered import shortest_way, with_order
from support.languages.graphs import graph
from support.oracles.planner_oracle import FASTEST, Problem, split


@dataclass(frozen=True)
class Timed(Problem):
    """A problem in which about half of a backward can wait."""

    def _cost(self, one: Cost, rows: int, slower: int) -> Cost:
        cost = super()._cost(one, rows, slower)
        return replace(cost, weight_ns=cost.bwd_ns // 2, weight_bytes=cost.saved_bytes)


def drawn(seed: int, *, devices: int = 8, layers: int = 16, kinds: int = 3) -> Timed:
    """Return a chain of layers of like times, at times with a long one, on devices of up to so many kinds."""
    draw = Random(seed)
    lines, base = [], draw.randint(20, 300) * 1000
    size, weights = 1 << draw.randint(10, 20), 1 << draw.randint(18, 28)
    count = draw.randint(3, layers)
    for i in range(count):
        time = int(base * draw.uniform(0.6, 1.4)) * (draw.randint(3, 6) if draw.random() < 0.1 else 1)
        own = int(weights * draw.uniform(0.5, 1.5))
        reads = f"v{i - 1}" if i else "x"
        lines.append(f"v{i}:{time}/{2 * time} #{size} ^{4 * size} +w{i}:{own} @l.{i} <- {reads}")
    model = graph("; ".join(lines))
    rows = draw.choice([8, 16, 32])
    splits = tuple(split(rows, micros) for micros in (1, 2, 4, 8, 16) if micros <= rows)
    state = sum(p.size_bytes for p in model.params) * 4 + rows * count * 6 * size
    cluster = machines(draw, draw.randint(1, devices), draw.randint(1, kinds), state)
    return Timed(model, cluster, PlanRequest(splits, orders=True), launch=draw.choice([0, 20_000]))


def machines(draw: Random, world: int, kinds: int, need: int) -> Cluster:
    """Return GPUs with more memory than they need, or about as much as their share."""
    made = []
    share = draw.choice([2.0, 2.0, 0.8, 0.4])
    for _ in range(kinds):
        memory = 1 + int(need * share * draw.uniform(0.6, 1.4))
        made.append(
            Device("cuda", memory + (1 << 33), FASTEST // draw.choice([1, 2, 3, 4, 6]), 10**12, reserve_bytes=1 << 33)
        )
    devices = tuple(sorted((draw.choice(made) for _ in range(world)), key=made.index))
    inside = Link(draw.choice([5_000, 20_000]), draw.choice([10**10, 10**11]))
    if world % 2 == 0 and draw.random() < 0.4:
        return Cluster(devices, (Level(2, inside), Level(world, Link(40_000, 12 * 10**8))))
    return Cluster(devices, (Level(world, inside),))


def found_for(problem: Problem) -> Search:
    """Return everything that the search finds; every op is a block."""
    space = problem.space
    return search((space, space))


def preferred(found: Search) -> Evaluation | None:
    """Return the plan that the planner would choose."""
    return min(found.fitting.values(), key=lambda e: (e.preference, e.step_ns), default=None)


# ---- what a free planner must keep ---------------------------------------------------------------------------------

NAMES = ("1f1b", "1f1b-deep", "gpipe", "zb-h1", "zb-h2", "interleaved", "zb-v", "searched")
EQUAL, CLOSE = 1.001, 1.01
"""How much worse than a schedule by name, and than with less of something, a plan may be, by the planner's criterion,
which asks more stages and other orders to be worth it."""


def beside_names(problem: Problem) -> dict[str, float]:
    """Return how much worse the free plan is than that of each schedule by name, as a ratio; infinite for no plan."""
    free, ratios = preferred(found_for(problem)), {}
    for name in NAMES:
        asked = preferred(found_for(replace(problem, request=replace(problem.request, schedule=name))))
        if asked is not None:
            ratios[name] = free.preference / asked.preference if free is not None else float("inf")
    return ratios


def beside_less(problem: Problem, draw: Random) -> tuple[str, float] | None:
    """Return what there is more of, and how much worse the plan then is, as a ratio; None where nothing fits before."""
    way, more = with_more(problem.cluster, draw)
    before = preferred(found_for(problem))
    if before is None:
        return None
    after = preferred(found_for(replace(problem, cluster=more)))
    return way, after.preference / before.preference if after is not None else float("inf")


def with_more(cluster: Cluster, draw: Random) -> tuple[str, Cluster]:
    """Return the cluster with more memory, faster links, or another device or two at its end, and which of these."""
    way, factor = draw.choice(["memory", "links", "devices"]), draw.choice([1.05, 1.3, 2, 8])
    if way == "memory":
        more = {d: int((d.memory_bytes - d.reserve_bytes) * (factor - 1)) for d in set(cluster.devices)}
        devices = tuple(replace(d, memory_bytes=d.memory_bytes + more[d]) for d in cluster.devices)
        return way, replace(cluster, devices=devices)
    if way == "links":
        links = [replace(lv.link, bytes_per_s=int(lv.link.bytes_per_s * factor)) for lv in cluster.levels]
        levels = tuple(replace(lv, link=link) for lv, link in zip(cluster.levels, links, strict=True))
        return way, replace(cluster, levels=levels)
    devices = (*cluster.devices, *[draw.choice(cluster.devices)] * (2 if len(cluster.levels) > 1 else 1))
    last = replace(cluster.levels[-1], size=len(devices))
    return way, replace(cluster, devices=devices, levels=(*cluster.levels[:-1], last))


# ---- plans of these problems, and the bound of those that are like them ---------------------------------------------


def case_of(space: SearchSpace, rows: tuple[int, ...], *, several: bool, orders: bool = True) -> Priced:
    types, world = len(space.costs.device_types), space.costs.cluster.world
    widest = min(world, max(rows))
    return Priced(space, rows, np.ones(types), 1.0, widest, several=several, orders=orders)


def bound_of(space: SearchSpace, rows: tuple[int, ...], per_rank: int) -> int:
    return positions_bound(case_of(space, rows, several=per_rank > 1), (per_rank,), float("inf"))


def random_plan(space: SearchSpace, draw: Random) -> Evaluation | None:
    """Devices in any order, any number of them a position, any cuts, and an order by name or a searched one."""
    world, n, rows = space.costs.cluster.world, space.chain.n, draw.choice(space.request.micro_rows)
    order = draw.sample(range(world), world)
    used = draw.randint(1, world)
    ends = sorted(draw.sample(range(1, used), draw.randint(0, used - 1)))
    widths = tuple(b - a for a, b in pairwise((0, *ends, used)))
    schedule, per_rank, placement = draw.choice(
        [("1f1b", 1, ONE), ("gpipe", 1, ONE), ("zb-h2", 1, ONE), ("searched", 1, ONE), ("zb-v", 2, V)]
        + [("searched", number, placement) for number in (2, 4) for placement in (V, LOOP)] * 2
    )
    if len(widths) * per_rank > n or (per_rank > 1 and len(widths) == 1):
        return None
    if max(widths) > space.request.most_replicas(rows):
        return None
    bounds = (0, *sorted(draw.sample(range(1, n), len(widths) * per_rank - 1)), n)
    layout = Layout(1, world, 1, tuple(order))
    plan = Candidate(bounds, widths, 0, 0, layout, rows, schedule, (), per_rank, placement)
    if not space.allows(bounds):
        return None
    if schedule == "searched":
        way = shortest_way(space, plan, 0)
        return None if way is None else evaluate(space, with_order(space, plan, way, 200))
    return evaluate(space, plan)
