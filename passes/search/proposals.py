"""Proposals: for every way to cut the batch and every layout, the best partition for each number of stages.

A pipeline deeper than `SMALL` is cut out of a chain of many blocks, and most of its dynamic program is about stages far
too long for any good plan.  So ways to cut the batch and layouts come in order of a lower bound of their partitions;
those that are hopeless against the best pipeline latency so far are left out, and so are ranges that are longer than a
worthwhile pipeline latency allows.

Where all candidates together are few, every one of them is proposed (`enumerate_all`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, replace
from itertools import combinations, product
from math import comb, factorial, prod
from typing import Any

import numpy as np

from autopart.passes.search.evaluation import Candidate, Proposal, Search
from autopart.passes.search.layout import MOST_ORDERS, SMALL, Layout, Pools, all_orders, layouts, orders_of, pools_of
from autopart.passes.search.partition import INFEASIBLE, Cut, Partition, Table, Taken, solve_partition, solve_pools
from autopart.passes.search.space import SearchSpace, fastest_sums, gradient_edges
from autopart.passes.search.tables import StageCostTables

MOST_BLOCKS = 20_000
"""The most blocks of all enumerated candidates together; evaluating is about linear in them."""
MOST_ACTIONS = 250_000
"""The most actions of all enumerated candidates together."""
ACTIONS_PER_STAGE = 6
"""The most actions of a stage for one micro-batch: forward and backward, and its messages."""
HOPELESS = 1.1
"""A partition whose latency, which leaves out waiting, is above this multiple of the best simulated step is dropped."""
RIVAL = 1.2
"""How much longer the first plans may take than the rival of the request (`rival_ns`) for the search to go on: what is
tried on them shortens a step by at most about 15 %."""
WORTH = 1.5
"""A partition of a deep pipeline whose latency is above this multiple of the best one is only tried if nothing else
fits."""
MOST_STAGES = 128
"""The most stages, unless the user asks for more."""
ALIKE = 3
"""Partitions of unlike devices that are kept for each number of stages."""
MOST_MICROBATCH_OPTIONS = 12
"""Ways to cut the batch that get dynamic programs; the others are tried in refinement."""


def proposals_of(search: Search, *, ignore_memory: bool = False, worth: float = WORTH) -> list[Proposal]:
    """Return the partitions that the dynamic programs find, in the order of the request.

    ignore_memory: whether memory has no limit.  worth: the latency of a deep pipeline may be at most this multiple of
    the best one.  While none is known, deep pipelines are tried below a limit that doubles: the lower it is, the
    shorter the ranges.
    """
    proposing = _Proposing(search, ignore_memory)
    proposing.try_all(deep=False, limit=math.inf)
    limit = worth * (proposing.best_ns or max(1, proposing.least_deep_bound()))
    while not proposing.try_all(deep=True, limit=limit) and not proposing.best_ns:
        limit *= 2
    if limit < worth * proposing.best_ns:
        proposing.try_all(deep=True, limit=worth * proposing.best_ns)
    return [proposal for key in sorted(proposing.found) for proposal in proposing.found[key]]


@dataclass(frozen=True, slots=True)
class _LayoutTask:
    """A layout, its place among the layouts, the space that is cut for it, and a lower bound of its partitions."""

    bound: int
    place: int
    space: SearchSpace
    layout: Layout | Pools

    @property
    def deep(self) -> bool:
        """Whether the chain of many blocks is cut, into stages of one device in each pipeline."""
        return self.layout.depth > SMALL

    @property
    def explains(self) -> bool:
        """Whether its partitions are wanted for comparison: pipelines without replicas, where they cost little."""
        return self.layout.pipeline_replicas == 1 and not self.deep


class _Proposing:
    """Ways to cut the batch (options), the layouts for each in order of their bounds, and the proposals so far.

    found: by place of the option and of the layout.  best_ns: the best pipeline latency, 0 while there is none.
    """

    def __init__(self, search: Search, ignore_memory: bool) -> None:
        self._ignore_memory = ignore_memory
        self._search = search
        self._options = _spread(search.coarse.request.micro_rows)
        self._tasks = [_layout_tasks(search, micro_rows) for micro_rows in self._options]
        self.found: dict[tuple[int, int], list[Proposal]] = {}
        self.best_ns = 0

    def least_deep_bound(self) -> int:
        """Return the least bound of deep layouts; 0 when there are none."""
        return min((task.bound for tasks in self._tasks for task in tasks if task.deep), default=0)

    def try_all(self, *, deep: bool, limit: float) -> bool:
        """Look for partitions with a latency up to a limit; return whether none was left out because of it."""
        complete = True
        bounds = [min((task.bound for task in tasks), default=0) for tasks in self._tasks]
        for option in sorted(range(len(self._options)), key=bounds.__getitem__):
            memo: dict[Hashable, Any] = {}
            copies = 0
            for task in self._tasks[option]:
                if task.deep and task.layout.pipeline_replicas != copies:  # of many blocks, and of other shares
                    memo, copies = {}, task.layout.pipeline_replicas
                hopeless = self.best_ns > 0 and task.bound > HOPELESS * self.best_ns
                if task.deep == deep and (not hopeless or task.explains):
                    complete = self._try(option, task, memo, limit) and complete
            depth = "deep pipelines, " if deep else ""
            self._search.tell(f"partition, {depth}micro-batches of {max(self._options[option])} rows")
        return complete

    def _try(self, option: int, task: _LayoutTask, memo: dict[Hashable, Any], limit: float) -> bool:
        """Find the partitions of one layout; return whether none was left out because of the limit."""
        micro_rows, space = self._options[option], task.space
        schedule, longest = space.request.schedules[0], space.chain.n
        if limit < INFEASIBLE:
            share = -(-max(micro_rows) // task.layout.pipeline_replicas)
            longest = longest_range(space, share, len(micro_rows), int(limit))
        tables = StageCostTables(
            space, task.layout, micro_rows, schedule, longest, ignore_memory=self._ignore_memory, memo=memo
        )
        found = _partitions(tables)
        if not space.is_chain:  # branches may run side by side: a stage waits only for those that it reads from
            found += _partitions(replace(tables, waits=gradient_edges(space)))
        found = [(partition, layout) for partition, layout in found if partition.latency_ns <= limit]
        self.found[option, task.place] = [
            Proposal(space, Candidate(*partition, layout, micro_rows, schedule)) for partition, layout in found
        ]
        latencies = [partition.latency_ns for partition, _ in found] + ([self.best_ns] if self.best_ns else [])
        self.best_ns = min(latencies, default=0)
        return longest == space.chain.n


def layout_bound(space: SearchSpace, layout: Layout | Pools, micro_rows: tuple[int, ...], most: int) -> int:
    """Return about the least pipeline latency, in nanoseconds, of any partition into at most `most` stages.

    Stages of t_1 .. t_S that wait for one another have U >= sum of t_q over q < s + M * t_s for each s, which is least
    where all of these are equal: U = sum of t / (1 - (1 - 1 / M)^S).  Where widths are free, the bound is that the
    positions share the work.  O(blocks).
    """
    micros = len(micro_rows)
    whole = fastest_sums(space, -(-max(micro_rows) // layout.pipeline_replicas))[-1]
    if len(layout.widths) > 1 or not space.is_chain:
        positions = layout.depth if len(layout.widths) > 1 else min(layout.depth, most)
        return int(micros * whole) // positions
    return int(whole / (1 - (1 - 1 / micros) ** min(layout.depth, most, space.chain.n)))


def longest_range(space: SearchSpace, share: int, micros: int, most_ns: int) -> int:
    """Return the blocks of the longest range whose micro-batches, of `share` rows, take at most most_ns nanoseconds.

    O(blocks log blocks).
    """
    sums = fastest_sums(space, share)
    last = np.searchsorted(sums, sums + most_ns // micros, side="right") - 1
    return max(1, int((last - np.arange(len(sums))).max()))


def _layout_tasks(search: Search, micro_rows: tuple[int, ...]) -> list[_LayoutTask]:
    """Return the layouts with neighbouring replicas, for each number of pipelines and order, by their bounds; for a few
    unlike devices one of all orders."""
    tasks = []
    request, cluster = search.coarse.request, search.coarse.costs.cluster
    replicas = request.may_replicate
    every: list[Layout | Pools] = []
    if pools := pools_of(cluster, replicas=replicas):
        every.append(pools)
    else:
        near = layouts(cluster, replicas=replicas, wanted=request.copies)
        every += [lay for lay in near if lay.inner == lay.pipeline_replicas <= request.most_replicas(micro_rows)]
    for place, layout in enumerate(every):
        space = search.fine if layout.depth > SMALL else search.coarse
        bound = layout_bound(space, layout, micro_rows, request.stages or MOST_STAGES)
        tasks.append(_LayoutTask(bound, place, space, layout))
    return sorted(tasks, key=lambda task: task.bound)


def _spread(options: tuple[tuple[int, ...], ...]) -> list[tuple[int, ...]]:
    """Return at most `MOST_MICROBATCH_OPTIONS`, with numbers of micro-batches about a constant factor apart."""
    if len(options) <= MOST_MICROBATCH_OPTIONS:
        return list(options)
    order = sorted(options, key=len)
    low, high = math.log(len(order[0])), math.log(len(order[-1]))
    targets = [low + (high - low) * i / (MOST_MICROBATCH_OPTIONS - 1) for i in range(MOST_MICROBATCH_OPTIONS)]
    chosen = {min(range(len(order)), key=lambda i: abs(math.log(len(order[i])) - target)) for target in targets}
    return [order[i] for i in sorted(chosen)]


def _partitions(tables: StageCostTables) -> list[tuple[Partition, Layout]]:
    """Return the best partition for each number of stages that the request allows."""
    space, layout = tables.space, tables.layout
    request, n = space.request, space.chain.n

    def solved(most: int, tables: StageCostTables, idle: int) -> list[tuple[Partition, Layout]]:
        if isinstance(layout, Pools):
            return _taken(layout, most, tables)
        alike = len(space.costs.device_types) == 1  # else it matters which devices idle
        spare = 0 if alike or layout.depth > SMALL else layout.depth - idle
        found = solve_partition(n, layout.depth, layout.widths, most, tables, spare=spare)
        return [(_moved_up(partition, space, layout), layout) for partition in found]

    if not request.pins and request.replicas is None:
        found = solved(request.stages or min(MOST_STAGES, layout.depth), tables, 1)
        return [each for each in found if request.stages in (None, len(each[0].widths))]
    counts = [request.stages] if request.stages else range(1, min(MOST_STAGES, layout.depth, n) + 1)
    return [  # pins and replicas of single stages need the number of stages
        each
        for stages in counts
        for each in solved(stages, replace(tables, stages=stages), stages)
        if len(each[0].widths) == stages
    ]


def _taken(pools: Pools, most: int, tables: StageCostTables) -> list[tuple[Partition, Layout]]:
    """Return the best partitions of unlike devices: the `ALIKE` best for each number of stages, and the best of those
    whose stages have one device each."""
    cuts = solve_pools(tables.space.chain.n, pools.counts, pools.widths, most, tables, idle=[(0,) * len(pools.counts)])
    chosen: dict[int, None] = {}
    for single in (False, True):
        seen: Counter[int] = Counter()
        for place in sorted(range(len(cuts)), key=lambda place: cuts[place].latency_ns):
            stages = len(cuts[place].taken)
            if (not single or sum(cuts[place].used) == stages) and seen[stages] < (1 if single else ALIKE):
                chosen[place] = None
                seen[stages] += 1
    return [_placed(pools, cuts[place]) for place in sorted(chosen)]


def _placed(pools: Pools, cut: Cut) -> tuple[Partition, Layout]:
    """Return a way to cut the chain on unlike devices as a partition of a layout."""
    widths, first = tuple(map(sum, cut.taken)), pools.depth - sum(cut.used)
    return Partition(cut.bounds, widths, cut.latency_ns, first), pools.laid_out(cut.taken)


def _moved_up(partition: Partition, space: SearchSpace, layout: Layout) -> Partition:
    """Move a partition to the first positions where these are equal to its own, so that the last ranks idle."""
    cluster = space.costs.cluster
    nested = len(cluster.levels) > 1
    if len(space.costs.device_types) > 1 or (nested and (layout.pipeline_replicas > 1 or cluster.levels[-2].groups)):
        return partition
    unit = cluster.levels[-2].size if nested else 1  # whole nodes
    return partition._replace(first=partition.first % unit)


def with_equal_stages(candidate: Candidate, space: SearchSpace, most_ns: int) -> Iterator[Candidate]:
    """Yield the candidate with the cuts for which the busiest stage is least busy, recomputation included.

    Where micro-batches are few, stages wait for the first one to come back, the first stage longest, so that an early
    stage should not be slower than a late one, as the pipeline latency allows.  most_ns: no stage may take longer; 0:
    no limit.
    """
    micro_rows, layout, n = candidate.micro_rows, candidate.layout, space.chain.n
    share = -(-max(micro_rows) // layout.pipeline_replicas)
    longest = longest_range(space, share, len(micro_rows), most_ns) if most_ns else n
    nobody_waits = np.zeros((n + 1,) * 2, dtype=np.int64)
    tables = StageCostTables(
        space, layout, micro_rows, candidate.schedule, longest, stages=space.request.stages, waits=nobody_waits
    )
    for partition, _ in _partitions(tables):
        if len(partition.widths) == candidate.stages:
            yield replace(candidate, bounds=partition.bounds, widths=partition.widths, first=partition.first)


def rearranged(candidate: Candidate, space: SearchSpace) -> Iterator[Candidate]:
    """Yield the candidate with unlike positions in other orders, each cut anew: in all of them if they are few, else
    with two neighbours exchanged."""
    cluster, count = space.costs.cluster, len(candidate.widths)
    pools = pools_of(cluster, replicas=space.request.may_replicate)
    if pools is None or candidate.layout.pipeline_replicas > 1 or candidate.per_rank > 1 or space.request.pins:
        return
    kinds = [cluster.devices[own[0]] for own in pools.kinds]
    devices = [[cluster.devices[rank] for rank in ranks] for ranks in candidate.ranks]
    own = tuple(tuple(map(stage.count, kinds)) for stage in devices)
    ways = {(*own[:i], own[i + 1], own[i], *own[i + 2 :]) for i in range(count - 1)}
    if factorial(count) // prod(map(factorial, Counter(own).values())) <= MOST_ORDERS:
        ways = set(orders_of(own))
    tables = StageCostTables(space, pools, candidate.micro_rows, candidate.schedule, space.chain.n)
    for way in sorted(ways - {own}):

        def table_of(k: int, width: Taken, used: Taken, way: tuple[Taken, ...] = way) -> Table | None:
            return tables(k, width, used) if width == way[count - k] else None

        cuts = solve_pools(space.chain.n, pools.counts, sorted(set(own)), count, table_of, idle=[(0,) * len(kinds)])
        for cut in cuts:
            if len(cut.taken) == count:
                part, layout = _placed(pools, cut)
                yield replace(candidate, bounds=part.bounds, widths=part.widths, first=part.first, layout=layout)


# ---- small spaces --------------------------------------------------------------------------------------------------


def enumerate_all(space: SearchSpace) -> list[Candidate] | None:
    """Return every candidate that the request allows, each plan once; None if evaluating all would take long."""
    n, request, world = space.chain.n, space.request, space.costs.cluster.world
    if not all_orders(space.costs.cluster):
        return None
    all_layouts = list(layouts(space.costs.cluster, replicas=request.may_replicate, wanted=request.copies))
    deepest = min(n, world, request.stages or n)
    partitions = sum(comb(n - 1, s - 1) * comb(world, s) for s in range(request.stages or 1, deepest + 1))
    micros = sum(len(rows) for rows in request.micro_rows)
    about = partitions * micros * len(request.schedules) * ACTIONS_PER_STAGE * len(all_layouts)
    if about > MOST_ACTIONS * 10:
        return None
    found: dict[tuple[object, ...], Candidate] = {}
    actions = 0
    for candidate in _candidates(space, all_layouts):
        if found.setdefault(candidate.key, candidate) is candidate:
            actions += ACTIONS_PER_STAGE * candidate.stages * len(candidate.micro_rows)
            if actions > MOST_ACTIONS or n * len(found) > MOST_BLOCKS:
                return None
    return list(found.values())


def _candidates(space: SearchSpace, all_layouts: list[Layout]) -> Iterator[Candidate]:
    """Yield every candidate; a plan that several layouts can express comes several times."""
    request = space.request
    for layout in all_layouts:
        for partition in _all_partitions(space, layout):
            replicas = max(partition.widths) * layout.pipeline_replicas
            schedules = request.schedules if len(partition.widths) > 1 else request.schedules[:1]
            for micro_rows in request.micro_rows:
                if replicas <= request.most_replicas(micro_rows):
                    for schedule in schedules:
                        yield Candidate(*partition, layout, micro_rows, schedule)


def _all_partitions(space: SearchSpace, layout: Layout) -> Iterator[Partition]:
    n, request = space.chain.n, space.request
    for stages in [request.stages] if request.stages else range(1, min(n, layout.depth) + 1):
        fixed = request.replicas_of(stages)
        if any(home >= stages for home in request.pins.values()) or (fixed and len(fixed) != stages):
            continue
        for inner in combinations(range(1, n), stages - 1):
            bounds = (0, *inner, n)
            if not space.allows(bounds):
                continue
            for widths in product(layout.widths, repeat=stages):
                replicas = tuple(width * layout.pipeline_replicas for width in widths)
                if sum(widths) <= layout.depth and fixed in (None, replicas):
                    yield Partition(bounds, widths)


def falls_behind(search: Search) -> bool:
    """Return whether what was found so far is clearly slower than the rival of the request."""
    rival_ns = search.coarse.request.rival_ns
    return bool(rival_ns and search.fitting) and search.best_ns > RIVAL * rival_ns
