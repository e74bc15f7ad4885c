"""Plans do not change by accident: each of these requests has the plan that is kept in golden_plans.txt.

A change of the planner that changes a plan shows here, as a difference to read in review; that it is meant is said by
writing the file anew:

    python -m pytest tests/passes/test_golden_plans.py --write-golden
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support.languages.graphs import cluster, graph, layers, plan_of
from support.languages.text import decision_text

from autopart.ir.cluster import Cluster, Device, Level, Link
from autopart.ir.graph import Graph
from autopart.ir.plan import Plan

KEPT = Path(__file__).with_name("golden_plans.txt")


def two_nodes(each: int) -> Cluster:
    """Links between the nodes are twenty times slower than inside."""
    device = Device("cpu", 1 << 40, 10**12, 10**11)
    return Cluster((device,) * (2 * each), (Level(each, Link(1, 10**9)), Level(2 * each, Link(20, 5 * 10**7))))


def one_slow_device() -> Cluster:
    c = cluster(4)
    return replace(c, devices=(*c.devices[:3], replace(c.devices[3], flops_per_s=10**12 // 3)))


def heavy_head() -> Graph:
    """A vocabulary that outweighs the layers, its matrix tied with the embedding's."""
    body = "; ".join(f"n{i}:10 #16 @l.{i} +w{i}:16 <- {f'n{i - 1}' if i else 'embed'}" for i in range(6))
    return graph(f"embed:1 #16 @embed +table:512 <- ids; {body}; loss:45 @head +out:512=table <- n5 labels")


def two_branches() -> Graph:
    lines = ["a0:5 #8 +wa0:8 <- x", "b0:5 #8 +wb0:8 <- x"]
    lines += [f"{s}{i}:5 #8 +w{s}{i}:8 <- {s}{i - 1}" for i, s in itertools.product(range(1, 5), "ab")]
    return graph("; ".join([*lines, "loss:3 #8 <- a4 b4"]))


CASES: dict[str, Callable[[], Plan]] = {
    "equal layers": lambda: plan_of(layers(8), cluster(4), micros=8),
    "layers that do not divide": lambda: plan_of(layers(7), cluster(3), micros=6),
    "fill and drain": lambda: plan_of(layers(6), cluster(3), micros=6, schedule="gpipe"),
    "weights held twice": lambda: plan_of(layers(6), cluster(3), micros=6, schedule="pipedream"),
    "slow links": lambda: plan_of(layers(6, size=64), cluster(4, bytes_per_s=2 * 10**8, latency_ns=5), micros=8),
    "little memory": lambda: plan_of(layers(6), cluster(3, memory=1000), micros=6),
    "replicas": lambda: plan_of(layers(6), cluster(8), rows=(4,) * 8),
    "two nodes": lambda: plan_of(layers(8), two_nodes(4), rows=(4,) * 8),
    "two nodes, one replica": lambda: plan_of(layers(8), two_nodes(2), micros=8),
    "one slow device": lambda: plan_of(layers(8), one_slow_device(), micros=8),
    "heavy tied head": lambda: plan_of(heavy_head(), cluster(4), micros=8),
    "two branches": lambda: plan_of(two_branches(), cluster(4), micros=6),
    "cuts given": lambda: plan_of(layers(8), cluster(3), micros=6, cuts=("layers.2", "layers.5")),
    "uneven micro-batches": lambda: plan_of(layers(4), cluster(2), rows=(3, 3, 2)),
    "unequal replicas": lambda: plan_of(heavy_head(), cluster(3), rows=(4,) * 4, replicas=(1, 2)),
}


def text_of(name: str) -> str:
    plan = CASES[name]()
    return f"== {name}: {plan.step_ns} ns\n{decision_text(plan.decision)}\n"


def test_every_request_has_the_plan_that_was_kept(request: pytest.FixtureRequest) -> None:
    found = "\n".join(text_of(name) for name in CASES)
    if request.config.getoption("--write-golden"):
        KEPT.write_text(found)
    assert found == KEPT.read_text()
