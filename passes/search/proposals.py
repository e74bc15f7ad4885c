"""Proposals: for every way to cut the batch and every layout, the best partition for each number of stages.

A pipeline deeper than `SMALL` is cut out of a chain of many blocks, and most of its dynamic program is about stages far
too long to be in any good plan.  So microbatch options and layouts come in order of a lower bound of their partitions;
what is hopeless against the best pipeline latency so far is left out, and ranges longer than a worthwhile pipeline
latency allows are not looked at.

Where all candidates together are few, every one of them is proposed (`enumerate_all`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, pairwise, product
from math import comb
from typing import NamedTuple

import numpy as np

from autopart.passes.search.evaluation import Candidate, Search
from autopart.passes.search.layout import SMALL, Layout, layouts
from autopart.passes.search.partition import INFEASIBLE, Partition, solve_partition
from autopart.passes.search.space import (
    SearchSpace,
    SearchSpaces,
    gradient_edges,
    is_chain,
    layout_bound,
    longest_range,
)
from autopart.passes.search.tables import StageCostTables, TableMemo, TableRequest

MOST_BLOCKS = 20_000
"""Blocks of all candidates together; evaluating is about linear in them."""
MOST_ACTIONS = 250_000
"""Actions of all of them together."""
ACTIONS_PER_STAGE = 6
"""Actions of a stage for one micro-batch, at most: forward and backward, and its messages."""
HOPELESS = 1.1
"""A partition whose latency is so much above the best simulated step is not evaluated: it leaves waiting out."""
WORTH = 1.5
"""A partition of a deep pipeline whose latency is so much above the best one is not looked for, unless nothing better
fits."""
MOST_STAGES = 128
"""Unless more are asked for."""
MOST_MICROBATCH_OPTIONS = 12
"""Ways to cut the batch that get dynamic programs; the others are tried in refinement."""


class Proposal(NamedTuple):
    """space: whose blocks the candidate cuts."""

    space: SearchSpace
    candidate: Candidate


def proposals_of(search: Search, *, ignore_memory: bool = False, worth: float = WORTH) -> list[Proposal]:
    """What the dynamic programs find, but for what cannot be the best; in the order of the request.

    ignore_memory: as if memory had no end.  worth: how far above the best pipeline latency that of a deep pipeline may
    be.  While none is known, deep pipelines are tried below a limit that doubles: the lower it is, the shorter the
    ranges.
    """
    proposing = _Proposing(search, ignore_memory)
    proposing.try_all(deep=False, limit=math.inf)
    limit = worth * (proposing.best_ns or max(1, proposing.least_bound(deep=True)))
    while not proposing.try_all(deep=True, limit=limit) and not proposing.best_ns:
        limit *= 2
    if limit < worth * proposing.best_ns:
        proposing.try_all(deep=True, limit=worth * proposing.best_ns)
    return [proposal for key in sorted(proposing.found) for proposal in proposing.found[key]]


@dataclass(frozen=True, slots=True)
class _LayoutTask:
    """A layout, its place among the layouts, the chain that is cut for it, and a lower bound of its partitions."""

    bound: int
    place: int
    space: SearchSpace
    layout: Layout

    @property
    def deep(self) -> bool:
        """Whether the chain of many blocks is cut, into stages of one device in each pipeline."""
        return self.layout.depth > SMALL

    @property
    def explains(self) -> bool:
        """Whether its partitions are wanted for comparison: pipelines without replicas, where they cost little."""
        return self.layout.pipeline_replicas == 1 and not self.deep


class _Proposing:
    """Microbatch options, the layouts for each in order of their bounds, and what was found so far.

    found: by place of the option and of the layout.  best_ns: the best pipeline latency, 0 while there is none.
    """

    def __init__(self, search: Search, ignore_memory: bool) -> None:
        self._ignore_memory = ignore_memory
        self._search = search
        self._options = _spread(search.spaces.coarse.request.micro_rows)
        self._tasks = [_layout_tasks(search.spaces, micro_rows) for micro_rows in self._options]
        self.found: dict[tuple[int, int], list[Proposal]] = {}
        self.best_ns = 0

    def least_bound(self, *, deep: bool) -> int:
        """The least bound of deep layouts, or of the others; 0 when there are none."""
        return min((task.bound for tasks in self._tasks for task in tasks if task.deep == deep), default=0)

    def try_all(self, *, deep: bool, limit: float) -> bool:
        """Look for partitions with a latency up to a limit.  True when none was left out because of it."""
        complete = True
        for option in self._in_order_of_bounds():
            memo: TableMemo = {}
            for task in self._tasks[option]:
                hopeless = self.best_ns > 0 and task.bound > HOPELESS * self.best_ns
                if task.deep == deep and (not hopeless or task.explains):
                    complete = self._try(option, task, memo, limit) and complete
            depth = "deep pipelines, " if deep else ""
            self._search.tell(f"partition, {depth}micro-batches of {max(self._options[option])} rows")
        return complete

    def _in_order_of_bounds(self) -> list[int]:
        def bound(option: int) -> int:
            return min((task.bound for task in self._tasks[option]), default=0)

        return sorted(range(len(self._options)), key=bound)

    def _try(self, option: int, task: _LayoutTask, memo: TableMemo, limit: float) -> bool:
        """Find the partitions of one layout.  True when none was left out because of the limit."""
        micro_rows, space = self._options[option], task.space
        schedule = space.request.schedules[0]
        longest = space.chain.n
        if limit < INFEASIBLE:
            share = -(-max(micro_rows) // task.layout.pipeline_replicas)
            longest = longest_range(space, share, len(micro_rows), int(limit))
        wanted = TableRequest(
            space, task.layout, micro_rows, schedule, ignore_memory=self._ignore_memory, longest=longest
        )
        found = _partitions(wanted, memo)
        if not is_chain(space):  # branches may run side by side: only what a stage reads has to come before it
            found += _partitions(replace(wanted, waits=gradient_edges(space)), memo)
        found = [partition for partition in found if partition.pipeline_latency_ns <= limit]
        self.found[option, task.place] = [
            Proposal(space, Candidate(partition, task.layout, micro_rows, schedule)) for partition in found
        ]
        latencies = [partition.pipeline_latency_ns for partition in found]
        if self.best_ns:
            latencies.append(self.best_ns)
        self.best_ns = min(latencies, default=0)
        return longest == space.chain.n


def _layout_tasks(spaces: SearchSpaces, micro_rows: tuple[int, ...]) -> list[_LayoutTask]:
    """One layout for each number of pipelines and order of the devices, the one with replicas together; in order of
    their bounds."""
    tasks = []
    request, cluster = spaces.coarse.request, spaces.coarse.costs.cluster
    for place, layout in enumerate(layouts(cluster, replicas=request.may_replicate, wanted=request.copies)):
        if layout.inner == layout.pipeline_replicas <= request.most_replicas(micro_rows):
            space = spaces.fine if layout.depth > SMALL else spaces.coarse
            bound = layout_bound(space, layout, micro_rows, request.stages or MOST_STAGES)
            tasks.append(_LayoutTask(bound, place, space, layout))
    return sorted(tasks, key=lambda task: task.bound)


def _spread(options: tuple[tuple[int, ...], ...]) -> list[tuple[int, ...]]:
    """At most `MOST_MICROBATCH_OPTIONS`, with numbers of micro-batches about a constant factor apart, both ends
    included."""
    if len(options) <= MOST_MICROBATCH_OPTIONS:
        return list(options)
    order = sorted(options, key=len)
    low, high = math.log(len(order[0])), math.log(len(order[-1]))
    targets = [low + (high - low) * i / (MOST_MICROBATCH_OPTIONS - 1) for i in range(MOST_MICROBATCH_OPTIONS)]
    chosen = {min(range(len(order)), key=lambda i: abs(math.log(len(order[i])) - target)) for target in targets}
    return [order[i] for i in sorted(chosen)]


def _partitions(wanted: TableRequest, memo: TableMemo) -> list[Partition]:
    """The best partition for each number of stages that the request allows."""
    space, layout = wanted.space, wanted.layout
    request, n = space.request, space.chain.n
    if not request.pins and request.replicas is None:
        most = request.stages or min(MOST_STAGES, layout.depth)
        tables = StageCostTables(wanted, memo)
        found = solve_partition(n, layout.depth, layout.widths, most, tables, spare=_spare(space, layout, 1))
        return [_moved_up(p, space, layout) for p in found if request.stages in (None, p.stages)]
    found = []
    counts = [request.stages] if request.stages else range(1, min(MOST_STAGES, layout.depth, n) + 1)
    for stages in counts:  # what is asked of a stage by its number needs the number of stages
        tables = StageCostTables(replace(wanted, stages=stages), memo)
        spare = _spare(space, layout, stages)
        partitions = solve_partition(n, layout.depth, layout.widths, stages, tables, spare=spare)
        found += [_moved_up(partition, space, layout) for partition in partitions if partition.stages == stages]
    return found


def _moved_up(partition: Partition, space: SearchSpace, layout: Layout) -> Partition:
    """The same on the first positions, where others are no different: the last ranks idle, not those that users look
    at first."""
    cluster = space.costs.cluster
    if len(set(cluster.devices)) > 1 or (len(cluster.levels) > 1 and layout.pipeline_replicas > 1):
        return partition
    unit = cluster.levels[-2].size if len(cluster.levels) > 1 else 1  # whole nodes
    return replace(partition, first=partition.first % unit)


def with_equal_stages(candidate: Candidate, space: SearchSpace, most_ns: int) -> Iterator[Candidate]:
    """The same with the cuts for which the busiest stage is least busy, recomputation included, if there are any.

    Where micro-batches are few, stages wait for the first one to come back, the first stage longest, so that an early
    stage may not be slower than a late one, as the pipeline latency has it.  most_ns: no stage may take longer; 0: any
    time.
    """
    micro_rows, layout = candidate.micro_rows, candidate.layout
    share = -(-max(micro_rows) // layout.pipeline_replicas)
    longest = longest_range(space, share, len(micro_rows), most_ns) if most_ns else space.chain.n
    nobody_waits = np.zeros((space.chain.n + 1,) * 2, dtype=np.int64)
    wanted = TableRequest(
        space, layout, micro_rows, candidate.schedule, stages=space.request.stages, waits=nobody_waits, longest=longest
    )
    for partition in _partitions(wanted, {}):
        if partition.stages == candidate.partition.stages:
            latency_ns = candidate.partition.pipeline_latency_ns
            yield replace(candidate, partition=replace(partition, pipeline_latency_ns=latency_ns))


def _spare(space: SearchSpace, layout: Layout, stages: int) -> int:
    """Positions that may idle at the end: where devices are not alike, which of them idle matters."""
    all_alike = len(set(space.costs.cluster.devices)) == 1
    return 0 if all_alike or layout.depth > SMALL else layout.depth - stages


# ---- small spaces --------------------------------------------------------------------------------------------------


def enumerate_all(space: SearchSpace) -> list[Candidate] | None:
    """Every candidate that the request allows, each plan once; None when evaluating all would take long."""
    all_layouts = list(layouts(space.costs.cluster, replicas=space.request.may_replicate, wanted=space.request.copies))
    if _about_actions(space) * len(all_layouts) > MOST_ACTIONS * 10:
        return None
    found: dict[tuple[object, ...], Candidate] = {}
    actions = 0
    for candidate in _candidates(space, all_layouts):
        if found.setdefault(candidate.key, candidate) is candidate:
            actions += ACTIONS_PER_STAGE * candidate.partition.stages * len(candidate.micro_rows)
            if actions > MOST_ACTIONS or space.chain.n * len(found) > MOST_BLOCKS:
                return None
    return list(found.values())


def _about_actions(space: SearchSpace) -> int:
    """About the actions of all candidates of one layout, without looking at any."""
    n, request, world = space.chain.n, space.request, space.costs.cluster.world
    deepest = min(n, world, request.stages or n)
    partitions = sum(comb(n - 1, s - 1) * comb(world, s) for s in range(request.stages or 1, deepest + 1))
    micros = sum(len(rows) for rows in request.micro_rows)
    return partitions * micros * len(request.schedules) * ACTIONS_PER_STAGE


def _candidates(space: SearchSpace, all_layouts: list[Layout]) -> Iterator[Candidate]:
    """Every candidate; plans that several layouts can express come several times."""
    request = space.request
    for layout in all_layouts:
        for partition in _all_partitions(space, layout):
            replicas = max(partition.widths) * layout.pipeline_replicas
            schedules = request.schedules if partition.stages > 1 else request.schedules[:1]
            for micro_rows in request.micro_rows:
                if replicas <= request.most_replicas(micro_rows):
                    for schedule in schedules:
                        yield Candidate(partition, layout, micro_rows, schedule)


def _all_partitions(space: SearchSpace, layout: Layout) -> Iterator[Partition]:
    """Every partition for a layout that the request allows."""
    n, request = space.chain.n, space.request
    for stages in [request.stages] if request.stages else range(1, min(n, layout.depth) + 1):
        fixed = request.replicas_of(stages)
        legal = [space.legal_at(s) for s in range(stages)]
        if any(home >= stages for home in request.pins.values()) or (fixed and len(fixed) != stages):
            continue
        for inner in combinations(range(1, n), stages - 1):
            bounds = (0, *inner, n)
            if not all(legal[s][a, b] for s, (a, b) in enumerate(pairwise(bounds))):
                continue
            for widths in product(layout.widths, repeat=stages):
                replicas = tuple(width * layout.pipeline_replicas for width in widths)
                if sum(widths) <= layout.depth and fixed in (None, replicas):
                    yield Partition(bounds, widths, 0)
