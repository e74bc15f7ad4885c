"""Sheets and tables against sums over ops and against the estimate of the same stage."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from support.planner import FASTEST, Kind, Problem, problem, problems

from autopart.capture import CaptureCache
from autopart.capture.batch import flatten
from autopart.ir.cluster import Cluster, Device, Level, Link
from autopart.ir.plan import Decision, Estimate, Stage
from autopart.passes.graph import chain as line_module
from autopart.passes.graph.atoms import atoms
from autopart.passes.graph.chain import BlockChain
from autopart.passes.graph.coarsen import coarsen
from autopart.passes.ops.analytic_costs import analytic_costs
from autopart.passes.ops.cost_model import sheets
from autopart.passes.program.routing import route
from autopart.passes.search.evaluation import Candidate, Evaluator
from autopart.passes.search.layout import Layout
from autopart.passes.search.partition import INFEASIBLE, Partition
from autopart.passes.search.space import SearchSpace
from autopart.passes.search.tables import StageCostTables, TableRequest
from autopart.passes.simulation.estimate import estimate

PLAIN = Kind(least=2, replicas=False, recompute=False, mixed=False, roomy=True)


def ranges(n: int) -> list[tuple[int, int]]:
    return [(a, b) for a in range(n) for b in range(a + 1, n + 1)]


# ---- sheets --------------------------------------------------------------------------------------------------------


@settings(max_examples=40)
@given(problems())
def test_ranges_are_sums_over_the_blocks(p: Problem) -> None:
    rows = max(p.request.micro_rows[0])
    space, graph = p.space, p.costs_at(rows, 0)
    sheet, blocks = space.chain.sheet(rows), space.chain.blocks
    size = {v.name: v.size_bytes for v in graph.values}
    cost = {op.name: op.cost for op in graph.ops}
    for a, b in ranges(space.chain.n):
        ops = blocks.ops[a:b]
        own = {w for op in ops for w in op.writes} | (set(blocks.inputs) if a == 0 else set())
        parts = [cost[part] for op in ops for part in op.parts]
        for field in ("fwd_ns", "bwd_ns", "saved_bytes", "flops"):
            assert sheet.ranges(field)[a, b] == sum(getattr(part, field) for part in parts)
        assert sheet.scratch[a, b] == max(part.scratch_bytes for part in parts)
        assert sheet.heaviest[a, b] == max(sum(cost[x].saved_bytes for x in op.parts) for op in ops)
        assert sheet.enters[a, b] == sum(size[r] for r in {r for op in ops for r in op.reads} - own)
        assert sheet.kept[a, b] == sum(sheet.crossing[a + 1 : b])
        used = {name for op in ops for name in op.params}
        assert space.chain.weights[a, b] == sum(q.size_bytes for q in blocks.params if q.name in used)
        assert space.chain.trained[a, b] == sum(q.size_bytes for q in blocks.params if q.name in used and q.trainable)


@settings(max_examples=20)
@given(problems())
def test_line_as_a_graph_has_the_costs_of_its_blocks(p: Problem) -> None:
    line = p.space.chain
    for rows in {max(rows) for rows in p.request.micro_rows}:
        graph = line.graph(rows)
        assert sum(op.cost.total_ns for op in graph.ops) == sum(op.cost.total_ns for op in p.costs_at(rows, 0).ops)
        sizes = {v.name: v.size_bytes for v in p.costs_at(rows, 0).values}
        assert all(v.size_bytes == sizes[v.name] for v in graph.values)


def test_between_powers_of_two_costs_lie_on_the_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """GPT-2: at most 2 % off in time, exact in bytes."""
    from support.models import CASES

    case = CASES["gpt2"]
    capturer, batch = CaptureCache(case.model()), flatten(case.data(16))
    device = Device("cpu", 1 << 34, 10**11, 10**10)
    first, other = capturer(batch, 2).graph, capturer(batch, 4).graph
    graph = analytic_costs(first, device)
    costs_at = sheets(graph, other, (device,))
    blocks = coarsen(atoms(graph), blocks=64)
    exact = BlockChain(blocks, graph, costs_at, 16)
    monkeypatch.setattr(line_module, "EXACT_OPS", 0)
    between = BlockChain(blocks, graph, costs_at, 16)
    for rows in (3, 5, 6, 7, 9, 11, 13, 15):
        one, two = exact.sheet(rows), between.sheet(rows)
        assert (one.sizes == two.sizes).all() and (one.enters == two.enters).all()
        for field in ("fwd_ns", "bwd_ns"):
            total = one.sums(field)[-1]
            assert abs(int(two.sums(field)[-1]) - int(total)) <= 0.02 * total
        assert two.sums("saved_bytes")[-1] == pytest.approx(one.sums("saved_bytes")[-1], rel=0.001)


# ---- tables --------------------------------------------------------------------------------------------------------


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
    partition = Partition(bounds, (1,) * stages, 0)
    layout = Layout(1, p.cluster.world, 1, tuple(range(p.cluster.world)))
    verdict = Evaluator(space)(Candidate(partition, layout, micro_rows, schedule))
    return space, verdict.estimates, partition, micro_rows, schedule


@settings(max_examples=60)
@given(problems(replace(PLAIN, chain=True)))
def test_memory_of_a_table_is_that_of_the_estimate(p: Problem) -> None:
    """On chains to the byte: with one byte less a stage that just fits is FAR."""
    _, estimates, partition, micro_rows, schedule = random_stages(p, Random(p.model.shape_digest()))
    for s, (a, b) in enumerate(pairwise(partition.bounds)):
        k, peak = partition.stages - s, estimates[s].peak_bytes
        for memory, fits in ((peak, True), (peak - 1, False)):
            if memory < 1:
                continue
            space = with_memory(p, memory)
            layout = Layout(1, space.costs.cluster.world, 1, tuple(range(space.costs.cluster.world)))
            table = StageCostTables(TableRequest(space, layout, micro_rows, schedule))(k, 1, k)
            assert table is not None
            assert bool(table[0][a, b - a] < INFEASIBLE) == fits


@settings(max_examples=60)
@given(problems(replace(PLAIN, chain=False)))
def test_table_never_lets_in_what_the_estimate_turns_away(p: Problem) -> None:
    """In a DAG what crosses a cut need not leave the stage before it, so a table asks for more.  It asks for less only
    where a value is sent to several stages: it crosses the cut once."""
    own, estimates, partition, micro_rows, schedule = random_stages(p, Random(p.model.shape_digest()))
    for s, (a, b) in enumerate(pairwise(partition.bounds)):
        k, peak = partition.stages - s, estimates[s].peak_bytes
        crossing = own.chain.sheet(max(micro_rows)).crossing[b]
        if peak > 1 and estimates[s].out_bytes <= crossing:
            space = with_memory(p, peak - 1)
            layout = Layout(1, space.costs.cluster.world, 1, tuple(range(space.costs.cluster.world)))
            table = StageCostTables(TableRequest(space, layout, micro_rows, schedule))(k, 1, k)
            assert table is not None and table[0][a, b - a] >= INFEASIBLE


@settings(max_examples=60)
@given(problems(PLAIN))
def test_time_of_a_table_is_that_of_the_estimate(p: Problem) -> None:
    """own: all micro-batches, the sum of gradients and the optimizer; one nanosecond of rounding.  On GPUs: what the
    cores of a CPU copy for messages is in the estimate alone."""
    gpus = tuple(replace(device, kind="cuda") for device in p.cluster.devices)
    p = replace(p, cluster=replace(p.cluster, devices=gpus))
    space, estimates, partition, micro_rows, schedule = random_stages(p, Random(p.model.shape_digest()))
    layout = Layout(1, space.costs.cluster.world, 1, tuple(range(space.costs.cluster.world)))
    tables = StageCostTables(TableRequest(space, layout, micro_rows, schedule))
    for s, (a, b) in enumerate(pairwise(partition.bounds)):
        e, k = estimates[s], partition.stages - s
        table = tables(k, 1, layout.depth - s)
        assert table is not None
        busy = e.fwd_ns + e.bwd_ns
        assert table[0][a, b - a] == pytest.approx(len(micro_rows) * busy + e.reduce_ns + e.optimizer_ns, abs=1)
        assert table[1][a, b - a] >= busy


@settings(max_examples=30)
@given(problems(replace(PLAIN, replicas=True)))
def test_one_stage_on_all_devices_takes_what_the_table_says(p: Problem) -> None:
    space = p.space
    for micro_rows in p.request.micro_rows:
        for width in range(1, min(space.costs.cluster.world, max(micro_rows)) + 1):
            ranks = tuple(range(width))
            layout = Layout(1, width, 1, ranks)
            table = StageCostTables(TableRequest(space, layout, micro_rows, "1f1b"))(1, width, width)
            assert table is not None
            names = tuple(op.name for op in space.chain.blocks.ops)
            graph = space.chain.graph(max(micro_rows))
            plan = Decision(p.cluster.world, (Stage(names, ranks),), micro_rows, "1f1b")
            setting = replace(space.costs, costs_at=space.chain.graph)
            known = estimate(plan, route(plan, graph), setting)
            assert table[0][0, space.chain.n] == pytest.approx(known.step_ns, abs=2)


def test_slowest_of_unlike_replicas_counts() -> None:
    p = problem(Random(3), replace(PLAIN, least=4))
    devices = tuple(Device("cpu", 1 << 40, FASTEST // slower, 10**11) for slower in (1, 3))
    mixed = replace(p, cluster=Cluster(devices, (Level(2, Link(0, 10**9)),)), launch=0)
    alike = replace(p, cluster=Cluster(devices[1:] * 2, (Level(2, Link(0, 10**9)),)), launch=0)
    found = [
        table[0]
        for each in (mixed, alike)
        for table in [StageCostTables(TableRequest(each.space, Layout(1, 2, 1, (0, 1)), (2, 2), "1f1b"))(1, 2, 2)]
        if table is not None
    ]
    assert len(found) == 2 and np.array_equal(*found)
