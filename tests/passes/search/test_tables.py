"""Tables of the partition against the estimate of the same stage."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from support.languages.graphs import cluster, graph
from support.oracles.planner_oracle import FASTEST, Kind, Problem, problem, problems

from autopart.ir.cluster import Cluster, Device, Level, Link
from autopart.ir.graph import Size
from autopart.ir.plan import Decision, Estimate, Stage
from autopart.passes.program.routing import route
from autopart.passes.search.evaluation import Candidate, evaluate
from autopart.passes.search.layout import Layout
from autopart.passes.search.partition import INFEASIBLE, Partition
from autopart.passes.search.space import PlanRequest, SearchSpace
from autopart.passes.search.tables import StageCostTables
from autopart.passes.simulation.estimate import estimate

PLAIN = Kind(least=2, replicas=False, recompute=False, mixed=False, roomy=True)


def with_memory(p: Problem, memory: int) -> SearchSpace:
    """The space of a problem on devices with other memory."""
    devices = tuple(replace(device, memory_bytes=memory) for device in p.cluster.devices)
    return replace(p, cluster=replace(p.cluster, devices=devices)).space


def random_stages(
    p: Problem, random: Random
) -> tuple[SearchSpace, tuple[Estimate, ...], Partition, tuple[int, ...], str]:
    """A random plan without replicas that uses all devices or all blocks: the estimates of its stages."""
    space = p.space
    n, stages = space.chain.n, min(space.chain.n, p.cluster.world)
    bounds = (0, *sorted(random.sample(range(1, n), stages - 1)), n)
    micro_rows, schedule = random.choice(p.request.micro_rows), random.choice(p.request.schedules)
    partition = Partition(bounds, (1,) * stages)
    layout = Layout(1, p.cluster.world, 1, tuple(range(p.cluster.world)))
    evaluation = evaluate(space, Candidate(*partition, layout, micro_rows, schedule))
    return space, evaluation.estimates, partition, micro_rows, schedule


@settings(max_examples=60)
@given(problems(replace(PLAIN, chain=True)))
def test_memory_of_a_table_is_that_of_the_estimate(p: Problem) -> None:
    """On chains to the byte: with one byte less a stage that just fits is infeasible."""
    _, estimates, partition, micro_rows, schedule = random_stages(p, Random(p.model.shape_digest()))
    for s, (a, b) in enumerate(pairwise(partition.bounds)):
        k, peak = len(partition.widths) - s, estimates[s].peak_bytes
        for memory, fits in ((peak, True), (peak - 1, False)):
            if memory < 1:
                continue
            space = with_memory(p, memory)
            layout = Layout(1, space.costs.cluster.world, 1, tuple(range(space.costs.cluster.world)))
            table = StageCostTables(space, layout, micro_rows, schedule, space.chain.n)(k, 1, k)
            assert table is not None
            assert bool(table[0][a, b - a] < INFEASIBLE) == fits


@settings(max_examples=60)
@given(problems(replace(PLAIN, chain=False)))
def test_table_never_lets_in_what_the_estimate_turns_away(p: Problem) -> None:
    """In a DAG what crosses a cut need not leave the stage before it, so a table asks for more.  It asks for less only
    where a value is sent to several stages: it crosses the cut once."""
    own, estimates, partition, micro_rows, schedule = random_stages(p, Random(p.model.shape_digest()))
    for s, (a, b) in enumerate(pairwise(partition.bounds)):
        k, peak = len(partition.widths) - s, estimates[s].peak_bytes
        crossing = own.chain.range_costs(Size(max(micro_rows))).crossing[b]
        if peak > 1 and estimates[s].out_bytes <= crossing:
            space = with_memory(p, peak - 1)
            layout = Layout(1, space.costs.cluster.world, 1, tuple(range(space.costs.cluster.world)))
            table = StageCostTables(space, layout, micro_rows, schedule, space.chain.n)(k, 1, k)
            assert table is not None and table[0][a, b - a] >= INFEASIBLE


@settings(max_examples=60)
@given(problems(PLAIN))
def test_time_of_a_table_is_that_of_the_estimate(p: Problem) -> None:
    """busy_ns: all micro-batches, the sum of gradients and the optimizer; one nanosecond of rounding.  On GPUs: what
    the cores of a CPU copy for messages is in the estimate alone."""
    gpus = tuple(replace(device, kind="cuda") for device in p.cluster.devices)
    p = replace(p, cluster=replace(p.cluster, devices=gpus))
    space, estimates, partition, micro_rows, schedule = random_stages(p, Random(p.model.shape_digest()))
    layout = Layout(1, space.costs.cluster.world, 1, tuple(range(space.costs.cluster.world)))
    tables = StageCostTables(space, layout, micro_rows, schedule, space.chain.n)
    for s, (a, b) in enumerate(pairwise(partition.bounds)):
        e, k = estimates[s], len(partition.widths) - s
        table = tables(k, 1, layout.depth - s)
        assert table is not None
        busy = e.fwd_ns + e.bwd_ns
        assert table[0][a, b - a] == pytest.approx(len(micro_rows) * busy + e.reduce_ns + e.optimizer_ns, abs=1)
        assert table[1][a, b - a] >= busy


@settings(max_examples=30)
@given(problems(replace(PLAIN, replicas=True)))
def test_one_stage_on_all_devices_takes_what_the_table_says(p: Problem) -> None:
    space = p.space

    def table_ns(zero: int | str, layout: Layout, micro_rows: tuple[int, ...]) -> int:
        asked = replace(space, request=replace(space.request, zero=zero))
        table = StageCostTables(asked, layout, micro_rows, "1f1b", asked.chain.n)(1, layout.depth, layout.depth)
        assert table is not None
        return int(table[0][0, space.chain.n])

    for micro_rows in p.request.micro_rows:
        for width in range(1, min(space.costs.cluster.world, max(micro_rows)) + 1):
            ranks = tuple(range(width))
            layout = Layout(1, width, 1, ranks)
            names = tuple(op.name for op in space.chain.blocks.ops)
            graph = space.chain.graph(Size(max(micro_rows)))
            decision = Decision(p.cluster.world, (Stage(names, ranks),), micro_rows, "1f1b")
            report = estimate(decision, route(decision, graph), space.costs)
            assert table_ns(0, layout, micro_rows) == pytest.approx(report.step_ns, abs=2)
            # Replicas that share the optimizer's state take even shares of it here, and whole parameters in truth.
            shared = estimate(replace(decision, zero=1), route(decision, graph), space.costs)
            assert table_ns("auto", layout, micro_rows) <= min(report.step_ns, shared.step_ns) + 3


def test_unlike_replicas_share_the_work_by_speed() -> None:
    p = problem(Random(3), replace(PLAIN, least=4))
    devices = tuple(Device("cpu", 1 << 40, FASTEST // slower, 10**11) for slower in (1, 3))
    mixed = replace(p, cluster=Cluster(devices, (Level(2, Link(0, 10**9)),)), launch=0)
    alike = replace(p, cluster=Cluster(devices[1:] * 2, (Level(2, Link(0, 10**9)),)), launch=0)
    found = [
        table[0]
        for each in (mixed.space, alike.space)
        for table in [StageCostTables(each, Layout(1, 2, 1, (0, 1)), (2, 2), "1f1b", each.chain.n)(1, 2, 2)]
        if table is not None
    ]
    assert len(found) == 2 and (found[0] <= found[1]).all() and (found[0] < found[1]).any()


def test_a_shared_memo_does_not_mix_up_stages_of_different_numbers_of_them() -> None:
    """Counted from the end the same stage has another number, so something else may be pinned to it."""
    text = "; ".join(f"v{i}:9 #1 @m.{i} <- {f'v{i - 1}' if i else 'x'}" for i in range(6))
    request = PlanRequest(((2, 2),), pins={"m.2": 1})
    space = Problem(graph(text), cluster(4), request).space
    tables = StageCostTables(space, Layout(1, 4, 1, (0, 1, 2, 3)), (2, 2), "1f1b", space.chain.n)
    for stages in (2, 3):
        shared = replace(tables, stages=stages)(1, 1, 1)
        alone = replace(tables, stages=stages, memo={})(1, 1, 1)
        assert shared is not None and alone is not None
        assert np.array_equal(shared[0], alone[0]) and np.array_equal(shared[1], alone[1])


def test_a_table_of_a_deep_pipeline_that_is_taken_again_is_the_one_that_would_be_made() -> None:
    text = "; ".join(f"v{i}:{9 + i} #{1 + i % 3} @m.{i} <- {f'v{i - 1}' if i else 'x'}" for i in range(6))
    made: list[int] = []
    for memory, micro_rows in ((1 << 40, (2,) * 4), (60, (1,) * 8)):
        machines = cluster(20)
        devices = tuple(replace(device, memory_bytes=memory) for device in machines.devices)
        space = Problem(graph(text), replace(machines, devices=devices), PlanRequest((micro_rows,))).space
        shared = StageCostTables(space, Layout(1, 20, 1, tuple(range(20))), micro_rows, "1f1b", space.chain.n)
        for longest in (6, 3):
            for k in range(1, 20):
                tables = replace(shared, longest=longest)
                table, alone = tables(k, 1, k), replace(tables, memo={})(k, 1, k)
                assert table is not None and alone is not None
                assert all(np.array_equal(one, other) for one, other in zip(table, alone, strict=True))
                made.append(id(table))
    assert len(set(made)) < len(made) / 2
