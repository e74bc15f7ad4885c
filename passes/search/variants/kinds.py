"""Positions of like devices with several stages a rank, where devices are unlike.

The dynamic programs place unlike devices for one stage a rank: often all of them together, of which the slowest have a
whole row where less would do, or as a few stages.  With several stages a rank a pipeline fills early, and positions of
like devices pay: as many devices together as do about the work of another position.  So the devices of each type are
divided into positions in every way, and of these, with the ways to cut the batch, those are taken that promise the
least

    (M + (p - 1) / v) * time of a position for a micro-batch + sums of gradients less a backward that hides them

for M micro-batches and p positions of v stages each, which have work as they are fast.  These are laid out in different
orders, cut by speed, and ordered; of the ones that come out shortest, cuts and order are searched in turn.

Assumed, and wrong where: messages cost nothing, and the work can be divided anywhere.  What is chosen is evaluated.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from itertools import islice, product
from typing import NamedTuple

from autopart.passes.ops.weight_parts import summed_bytes
from autopart.passes.program.named import SEARCHED
from autopart.passes.program.orders import Shape, V
from autopart.passes.search.evaluation import Candidate, Search
from autopart.passes.search.layout import SMALL, Layout, in_order, orders_of
from autopart.passes.search.refinement import refined
from autopart.passes.search.space import PER_RANK, SearchSpace, block_costs
from autopart.passes.search.variants.ordered import Ordered, shortest_way, with_order
from autopart.passes.search.variants.orders import LITTLE, NEAR, Way, levelled_cuts, reordered, ways, with_enough_blocks

DIVISIONS, ORDERS, CLIMBED, ALIKE = 5, 12, 3, 2
"""Ways to divide the devices that are laid out, the orders of each, the plans whose cuts move, and those of them that
divide the devices alike."""
MOST_DIVISIONS, MOST_STAGES = 1000, 16
"""Ways to divide the devices up to which all are compared, and stages of plans with more than two a rank."""
ROUNDS, MOVES, BEHIND = 4, 20_000, 1.03
"""Times that cuts and order are searched in turn, computes that may be replayed to make an order shorter, and how far
above the best a plan may be to go on."""


class Position(NamedTuple):
    """Devices that work together: so many of a type."""

    kind: int
    width: int


class Promise(NamedTuple):
    """About the nanoseconds of a step on these positions with micro-batches of these rows."""

    step_ns: float
    positions: tuple[Position, ...]
    micro_rows: tuple[int, ...]


class Trial(NamedTuple):
    """A plan, a way to order it, and about the nanoseconds of its step."""

    step_ns: float
    plan: Candidate
    way: Ordered


def evaluate_kinds(search: Search, effort: int) -> None:
    """Evaluate positions of like devices with several stages a rank under the orders that the request allows.

    effort: simulated actions.
    """
    request = search.asked.request
    allowed = [way for way in ways(request) if way.schedule == SEARCHED and way.placement == V]
    few = [way for way in allowed if way.per_rank in PER_RANK[:2]] or allowed
    promised = promises(search, max([way.per_rank for way in few])) if few and search.fitting else []
    enough = (1 - LITTLE) * search.best_ns
    chosen = [promise for promise in promised if promise.step_ns < enough][:DIVISIONS]
    if not chosen:
        return
    search.other_orders = True
    space, limit, trials = with_enough_blocks(search.asked, search.asked.costs.cluster.world), math.inf, list[Trial]()
    for promise in chosen:
        for trial in _trials(space, promise, few, limit):
            trials.append(trial)
            limit = min(limit, NEAR * trial.step_ns)
        search.tell("positions of like devices")
    for trial in _different(trials):
        _climbed(search, space, trial, effort // CLIMBED)
        search.tell("positions of like devices")


def _different(trials: list[Trial]) -> list[Trial]:
    """Return the shortest trials of different orders, at most `ALIKE` of those that divide the devices alike."""
    found, alike, shapes = list[Trial](), Counter[object](), set[object]()
    for trial in sorted(trials, key=lambda trial: trial.step_ns):
        widths, micros = trial.plan.widths, len(trial.plan.micro_rows)
        shape, division = (trial.plan.ranks[: len(widths)], micros), (tuple(sorted(widths)), micros)
        if shape not in shapes and alike[division] < ALIKE:
            shapes.add(shape)
            alike[division] += 1
            found.append(trial)
    return found[:CLIMBED]


def _climbed(search: Search, space: SearchSpace, trial: Trial, effort: int) -> None:
    """Evaluate the plan of a trial; cuts and devices move, then the order is searched again, as long as that helps."""
    best = search.evaluate(space, with_order(space, trial.plan, trial.way, MOVES))
    for _ in range(ROUNDS):
        near = refined(search, best, effort // ROUNDS)
        again = reordered(search, near, MOVES) or near
        near = min(near, again, key=lambda e: (e.over_bytes, e.step_ns))
        if near.step_ns >= min(best.step_ns, BEHIND * search.best_ns):
            break
        best = near


# ---- promises --------------------------------------------------------------------------------------------------------


def promises(search: Search, per_rank: int) -> list[Promise]:
    """Return the ways to divide unlike devices into positions of like ones, and to cut the batch, the best first.

    None where there are many devices, or where the request fixes stages or replicas.  O(divisions * ways to cut).
    """
    space, request = search.fine, search.asked.request
    if len(space.costs.device_types) == 1 or space.costs.cluster.world > SMALL or request.fixed_slices:
        return []
    if request.stages or request.replicas is not None or request.cuts or request.pins or request.policy != "split":
        return []
    return sorted(_promises(space, per_rank), key=lambda promise: promise.step_ns)


def divisions(space: SearchSpace) -> list[tuple[Position, ...]]:
    """Return the ways to divide the devices of each type into positions; none if they are too many."""
    counts, each, number = space.costs.cluster.types, list[list[tuple[Position, ...]]](), 1
    for kind, device in enumerate(space.costs.device_types):
        each.append([tuple([Position(kind, width) for width in way]) for way in sums(counts[device], counts[device])])
        number *= len(each[-1])
        if number > MOST_DIVISIONS:
            return []
    return [tuple([position for own in way for position in own]) for way in product(*each)]


def sums(count: int, most: int) -> Iterator[tuple[int, ...]]:
    """Yield the ways to write a number as a sum of numbers up to `most`, each way with the largest first."""
    if count == 0:
        yield ()
    for first in range(min(count, most), 0, -1):
        for rest in sums(count - first, first):
            yield (first, *rest)


def _promises(space: SearchSpace, per_rank: int) -> Iterator[Promise]:
    every, levels = divisions(space), space.costs.cluster.levels
    summed = sum([summed_bytes(p) for p in space.chain.blocks.params if p.trainable])
    for rows in space.request.micro_rows:
        times = (block_costs(space, max(rows))[:, :2].sum(axis=2) / max(rows)).tolist()
        for positions in every:
            number, widest = len(positions), max(position.width for position in positions)
            if number < 2 or number * per_rank > space.chain.n or widest > space.request.most_replicas(rows):
                continue
            whole = [[time * -(-max(rows) // width) for time in times[kind]] for kind, width in positions]
            each = 1 / sum([1 / max(1.0, sum(both)) for both in whole])
            ends = 0.0
            for (_, width), (forward, backward) in zip(positions, whole, strict=True):
                pace = next(level.link.bytes_per_s for level in levels if width <= level.size)
                ring = 2 * (width - 1) / width * summed * 1e9 / pace
                ends = max(ends, each / max(1.0, forward + backward) * (ring - backward / per_rank))
            yield Promise((len(rows) + (number - 1) / per_rank) * each + ends, positions, rows)


# ---- plans -----------------------------------------------------------------------------------------------------------


def _trials(space: SearchSpace, promise: Promise, allowed: list[Way], limit: float) -> Iterator[Trial]:
    """Yield the plans of a promise, in different orders and by different cuts, that may take less than a limit."""
    zero = int(space.request.zero == 1)
    for positions in islice(orders_of(promise.positions), ORDERS):
        for way in allowed:
            if way.per_rank > PER_RANK[0] and way.per_rank * len(positions) > MOST_STAGES:
                continue
            for plan in levelled_cuts(_laid_out(space, promise, positions, way), space):
                found = shortest_way(space, plan, zero, limit)
                if found is not None:
                    trial = Trial(found.step_ns + _ends_ns(found), plan, found)
                    limit = min(limit, NEAR * trial.step_ns)
                    yield trial


def _laid_out(space: SearchSpace, promise: Promise, positions: tuple[Position, ...], way: Way) -> Candidate:
    """Return the plan on these positions, not yet cut."""
    cluster, kinds = space.costs.cluster, space.costs.device_types
    order = in_order(cluster, [kinds[kind] for kind, width in positions for _ in range(width)])
    layout, widths = Layout(1, cluster.world, 1, order), tuple([width for _, width in positions])
    return Candidate((), widths, 0, 0, layout, promise.micro_rows, way.schedule, (), way.per_rank, way.placement)


def _ends_ns(way: Ordered) -> int:
    """Return about what follows the last compute: sums of gradients less the backward that hides them, and the
    optimizer step."""
    work, found = way.work, 0
    for own in Shape.of(way.decision).workers:
        sums_ns = sum([work.reduce[s][1].alone_ns(work.reduce[s][0]) for s in own]) if work.reduce else 0
        hidden = max([work.bwd_ns[s] for s in own])
        found = max(found, sums_ns - hidden + sum([work.optimizer_ns[s] for s in own]))
    return found
