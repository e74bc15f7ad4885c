"""Layouts: the ranks that the stages of a pipeline get, and the rows that each of these ranks gets.

A layout lays `pipeline_replicas` equal pipelines over the cluster, each on `depth` positions.  `inner` of them stand
side by side, replicas of a stage next to each other; such groups follow one another.  With two nodes of four devices,
two stages and four replicas of the pipeline:

    inner 4   00001111      replicas together, activations between nodes (Append First)
    inner 2   0011 0011     both inside a node, gradients between nodes
    inner 1   01010101      each pipeline together, replicas far apart (Scatter First)

The names are DAPPLE's (PPoPP 2021, section 4.2); Fresh First is what Append First gives when stages fill nodes.

Unlike devices share rows in proportion to how fast each of them runs the stage.  Rows are dealt out one at a time, each
to the device that would be done first with it, which makes the slowest of them as fast as it can be where time grows
with the rows (Graham's list scheduling of equal jobs on unlike machines).  Assumed, and wrong where: a row takes a
device as long in a small part as in a large one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from itertools import pairwise, permutations, product
from math import factorial, prod
from typing import TypeVar

import numpy as np

from autopart.ir.cluster import Cluster, Device, Level
from autopart.ir.decision import Decision, Stage
from autopart.ir.graph import Size
from autopart.ir.shares import MOST_SHARES, division, parts
from autopart.passes.graph.cuts import Ints
from autopart.passes.search.partition import Taken
from autopart.passes.simulation.stage_costs import Estimator

_T = TypeVar("_T")
MOST_ORDERS = 24
"""The most orders of unlike devices of which all are laid out."""
MOST_KINDS = 3
"""The most kinds of which every order is laid out."""
MOST_TAKEN = 3_000
"""The most pairs of devices that are taken already and those that a stage takes, of `Pools`."""
SMALL = 16
"""On so many positions a stage may have any number of replicas; on more, one in each pipeline."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A way to lay equal pipelines over the ranks.

    depth: positions of one pipeline.  inner: pipelines side by side.  order: the ranks as they are laid out, first
    position first.  wide: whether a stage of one pipeline may have replicas.
    """

    pipeline_replicas: int
    depth: int
    inner: int
    order: tuple[int, ...] = field(hash=False)  # of all ranks: hashed with every key, it took a tenth of long searches
    wide: bool = True

    def ranks(self, start: int, width: int) -> tuple[int, ...]:
        """Return the ranks of a stage on positions start .. start + width - 1 of every pipeline, by their rows."""
        ranks: list[int] = []
        for outer in range(0, self.pipeline_replicas, self.inner):
            base = outer * self.depth + start * self.inner
            ranks += self.order[base : base + width * self.inner]
        return tuple(ranks)

    @property
    def widths(self) -> tuple[int, ...]:
        """The numbers of replicas that a stage may have in one pipeline."""
        return tuple(range(1, self.depth + 1)) if self.wide and self.depth <= SMALL else (1,)

    def stage(self, used: int, width: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the ranks of a stage that begins `used` positions from the end, and of one as wide before it."""
        start = self.depth - used
        before = max(0, start - width)
        return self.ranks(start, width), self.ranks(before, start - before)

    def replicas(self, width: int) -> int:
        """Return the ranks of a stage of this width."""
        return width * self.pipeline_replicas


@dataclass(frozen=True, slots=True)
class Pools:
    """Unlike devices, of which stages take any numbers of each kind: one pipeline under all orders of the kinds.

    kinds: ranks of each.  Stages take those of a kind in this order, the last stage the last ones.  wide: whether a
    stage may have replicas.
    """

    kinds: tuple[tuple[int, ...], ...]
    wide: bool = True

    @property
    def pipeline_replicas(self) -> int:
        """One."""
        return 1

    @property
    def depth(self) -> int:
        """The number of devices."""
        return sum(map(len, self.kinds))

    @property
    def counts(self) -> Taken:
        """The devices of each kind."""
        return tuple(map(len, self.kinds))

    @property
    def widths(self) -> tuple[Taken, ...]:
        """What a stage may take."""
        every = product(*(range(count + 1) for count in self.counts))
        return tuple([taken for taken in every if (sum(taken) > 0 if self.wide else sum(taken) == 1)])

    def stage(self, used: Taken, width: Taken) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the ranks of a stage with which `used` devices are taken, and of one before it: of the same kinds
        where some are left, else of others."""
        ranks, same, others = list[int](), list[int](), list[int]()
        for own, taken, count in zip(self.kinds, used, width, strict=True):
            start = len(own) - taken
            ranks += own[start : start + count]
            same += own[max(0, start - count) : start]
            others += own[max(0, start - sum(width)) : start]
        return tuple(ranks), tuple(same or others[-sum(width) :])

    def replicas(self, width: Taken) -> int:
        """Return the ranks of a stage that takes these."""
        return sum(width)

    def laid_out(self, stages: Sequence[Taken]) -> Layout:
        """Return the layout of stages that take these devices; idle ones come first."""
        left = [list(own) for own in self.kinds]
        order = list[int]()
        for taken in reversed(stages):
            ranks = [own.pop() for own, count in zip(left, taken, strict=True) for _ in range(count)]
            order += sorted(ranks, reverse=True)
        order += sorted((rank for own in left for rank in own), reverse=True)
        return Layout(1, self.depth, 1, tuple(reversed(order)), self.wide)


def pools_of(cluster: Cluster, *, replicas: bool) -> Pools | None:
    """Return the devices by kind; None where they are alike, or too many of too many kinds."""
    if cluster.world > SMALL:
        return None
    ranks: dict[object, list[int]] = {}
    for rank, device in enumerate(cluster.devices):
        ranks.setdefault(device, []).append(rank)
    pools = Pools(tuple(map(tuple, ranks.values())), replicas)
    ways = prod(count + 1 if not replicas else (count + 1) * (count + 2) // 2 for count in pools.counts)
    return pools if len(ranks) > 1 and ways <= MOST_TAKEN else None


def layouts(
    cluster: Cluster, *, replicas: bool, wanted: int = 1, orders: Sequence[tuple[int, ...]] = ()
) -> Iterator[Layout]:
    """Yield the layouts worth a search, the deepest pipelines first.

    Numbers of pipelines: all up to 16 devices, beyond that the divisors of the number of devices, and `wanted`, which
    may leave some devices over.  inner: all of them, one, and the numbers that keep neighbours of a pipeline inside a
    node, or where a pipeline is deeper than that, some of its neighbours.  Devices of several types are laid out in
    every order that differs in them, or if these are too many, in rank order and backwards, and three kinds at most
    also one kind after the other; where a link between groups of devices is better than the one inside them, also dealt
    out so that neighbours are in different groups.  orders: others, instead of these.
    """
    world = cluster.world
    plain = _orders(cluster)
    dealt = [
        _dealt_out(order, inner, outer)
        for inner, outer in pairwise(cluster.levels)
        if outer.link.latency_ns < inner.link.latency_ns or outer.link.bytes_per_s > inner.link.bytes_per_s
        for order in plain
    ]
    counts = [1]
    if replicas:
        counts = [count for count in range(1, world + 1) if world <= SMALL or world % count == 0 or count == wanted]
    sizes = [level.size for level in cluster.levels[:-1]]
    for order in orders or dict.fromkeys((*plain, *dealt)):
        for count in counts:
            depth = world // count
            inside = {size // depth for size in sizes if size >= depth and size % depth == 0}
            smaller = [
                (size, 1 << halvings) for size in sizes if size < depth for halvings in range(1, size.bit_length())
            ]
            inside |= {size // part for size, part in smaller if size % part == 0 and size > part}
            for inner in sorted({1, count, *(i for i in inside if i < count)}, reverse=True):
                if count % inner == 0:
                    yield Layout(count, depth, inner, order, replicas)


def all_orders(cluster: Cluster) -> bool:
    """Return whether every order of unlike devices is among the layouts."""
    counts, world = cluster.types.values(), cluster.world
    if len(counts) == 1 or world > MOST_ORDERS:
        return len(counts) == 1
    return factorial(world) // prod(map(factorial, counts)) <= MOST_ORDERS


def _orders(cluster: Cluster) -> list[tuple[int, ...]]:
    """Return the orders to lay the devices out in, rank order first; equal devices stay in order of rank."""
    plain = tuple(range(cluster.world))
    counts = cluster.types
    if len(counts) == 1:
        return [plain]
    if not all_orders(cluster):
        kinds = permutations(counts) if len(counts) <= MOST_KINDS else ()
        each = [tuple(rank for kind in way for rank in plain if cluster.devices[rank] == kind) for way in kinds]
        return list(dict.fromkeys((plain, plain[::-1], *each)))
    return sorted([in_order(cluster, order) for order in orders_of(cluster.devices)])


def orders_of(things: Sequence[_T]) -> Iterator[tuple[_T, ...]]:
    """Yield the different orders of things of which some are equal, those first that have the first of them first."""
    if not things:
        yield ()
    for first in dict.fromkeys(things):
        place = things.index(first)
        for rest in orders_of((*things[:place], *things[place + 1 :])):
            yield (first, *rest)


def in_order(cluster: Cluster, devices: Iterable[Device]) -> tuple[int, ...]:
    """Return the ranks of devices in this order; equal ones stay in order of rank."""
    left: dict[Device, list[int]] = {}
    for rank in reversed(range(cluster.world)):
        left.setdefault(cluster.devices[rank], []).append(rank)
    return tuple([left[device].pop() for device in devices])


def _dealt_out(order: tuple[int, ...], inner: Level, outer: Level) -> tuple[int, ...]:
    """Return the ranks taken in turn from every group of a level inside one of the next."""
    turns: Counter[int] = Counter()
    place = {}
    for rank in order:
        place[rank] = outer.group(rank), turns[inner.group(rank)]
        turns[inner.group(rank)] += 1
    return tuple(sorted(order, key=place.__getitem__))


# ---- rows in proportion to speed -----------------------------------------------------------------------------------


def dealt_out(rows: int, row_ns: Sequence[int], least: int = 1) -> tuple[int, ...]:
    """Return the rows of each device, at least `least`.  row_ns: its nanoseconds for a row.  O(rows log devices)."""
    found = [least] * len(row_ns)
    queue = [((least + 1) * taken, place) for place, taken in enumerate(row_ns)]
    heapify(queue)
    for _ in range(rows - sum(found)):
        end, place = heappop(queue)
        found[place] += 1
        heappush(queue, (end + row_ns[place], place))
    return tuple(found)


def in_proportion(decision: Decision, estimator: Estimator, least_rows: int = 1) -> Decision:
    """Return the decision with the rows of each stage on unlike devices in proportion to their speed.

    Stages on equal devices, or with too few rows for `least_rows` on each, stay as they are.
    O(uses + rows log devices).
    """
    stages = tuple(_in_proportion(stage, decision.micro_rows, estimator, least_rows) for stage in decision.stages)
    return replace(decision, stages=stages)


def _in_proportion(stage: Stage, micro_rows: Sequence[int], estimator: Estimator, least_rows: int) -> Stage:
    rows = max(micro_rows)
    kinds = estimator.kinds_of(stage.ranks)
    if len(set(kinds)) == 1 or rows < least_rows * len(kinds) or not stage.division.splits:
        return stage
    size = Size(stage.division.largest_part(rows))
    taken = {}
    for kind in set(kinds):
        ops = estimator.graph(size, kind).ops
        taken[kind] = max(1, sum(ops[name].cost.total_ns for name in stage.ops))
    shares = dealt_out(min(rows, MOST_SHARES), [taken[kind] for kind in kinds], least_rows)
    divided = division(len(kinds), shares)
    too_few = any(0 < own < least_rows for each in set(micro_rows) for own in parts(divided, 0, each))
    return stage if len(set(shares)) == 1 or too_few else replace(stage, shares=shares)


def by_speed(times: list[Ints]) -> Ints:
    """Return the nanoseconds of devices that divide rows by speed, from those of each with an equal share."""
    if len(times) == 1:
        return times[0]
    rates = sum(1 / np.maximum(each, 1) for each in times)
    return np.ceil(np.where(np.max(times, axis=0) > 0, len(times) / rates, 0)).astype(np.int64)
