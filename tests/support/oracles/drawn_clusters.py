"""Planning problems of GPUs and layers of milliseconds, where bubbles, sums of gradients and messages all count."""

from __future__ import annotations

from dataclasses import dataclass, replace
from random import Random

from autopart.ir.cluster import Cluster, Device, Level, Link
from autopart.ir.graph import Cost
from autopart.passes.pipeline import search
from autopart.passes.search.evaluation import Evaluation, Search
from autopart.passes.search.space import PlanRequest
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
