"""Lower bounds on the simulated step of any plan.

For any plan that cuts between the blocks of a chain, with any number of stages, replicas and any placement:

    work      step * sum over working devices of w >= M * sum over blocks of min over types of devices of w * t
              for any weights w >= 0 of the types, since a device cannot be busy for longer than the step and a share
              of the rows takes at least its share of the time t of the whole micro-batch.  A request that fixes stages
              or replicas leaves devices idle: then the heaviest ones count
    prices    work, the path, sums of gradients and memory, each at a price (`prices`): a plan with few micro-batches
              has to replicate its stages and pay for their sums, or waits for the path
    path      step >= the longest path of one micro-batch through the graph and back, each block on as many replicas as
              there can be; where a schedule may split backwards, without the part that makes gradients of weights
    chain     the pipeline latency of `partition` without everything that depends on the plan: no messages but their
              latency, the best place for every sum of gradients, memory for one micro-batch, each stage on any set of
              the devices that are left (`sets`).  Valid where the chain is the only order of the blocks, that is where
              each block reads from the one before it, with one stage a rank: with several a rank is busy with others
              while a stage waits.  Where a backward may be split, without the part that can wait
    positions with several stages a rank, on few devices: work, sums and how a pipeline fills, for each way to divide
              the devices (`positions`)

    slices    with slices of tokens, the work alone: the fastest stage for a slice is not known, and short slices fill a
              pipeline at once.  Their savings and their overheads are bounded by their model (`SliceShares.least_ns`).

The bound of a request is the least over the ways to cut the batch that it allows.  The certificate of `exact` covers
all orders, for one number of stages.

Assumed: costs are those of `chain`, and the step is the simulator's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise, product
from math import inf, prod

import numpy as np

from autopart.ir.errors import InfeasibleError
from autopart.ir.graph import Size
from autopart.passes.graph.cuts import Floats, Ints
from autopart.passes.proof.positions import positions_bound
from autopart.passes.proof.prices import Priced, priced_bound
from autopart.passes.proof.sets import Taken, counts_of, rates_of, rows_needed, sets_of
from autopart.passes.search.layout import SMALL
from autopart.passes.search.partition import INFEASIBLE
from autopart.passes.search.space import SearchSpace, block_costs, fastest_times, gradient_edges
from autopart.passes.simulation.charges import optimizer_ns

MOST_WORK = 10_000_000
"""Cells of the chain's bound (squares of the sets of devices and of the blocks, halved); larger problems go without."""
LEAST_CELLS = 1000
"""Cells that a step of it takes as long as."""


class Beaten(InfeasibleError):
    """No plan takes less than `least_ns`, a proven bound, and another request has a faster one (`rival_ns`)."""

    def __init__(self, least_ns: int) -> None:
        super().__init__(f"no plan of this request takes less than {least_ns / 1e6:.1f} ms, and another one does")
        self.least_ns = least_ns


def least_of(spaces: tuple[SearchSpace, SearchSpace], *, orders: bool) -> int:
    """Return the lower bound over the fine blocks, on few devices over the coarse ones."""
    coarse, fine = spaces
    return lower_bound(coarse if coarse.costs.cluster.world <= SMALL else fine, orders=orders)


def require_hope(spaces: tuple[SearchSpace, SearchSpace]) -> None:
    """Raise Beaten if no plan can be faster than the rival of the request."""
    request = spaces[0].request
    least_ns = least_of(spaces, orders=request.orders) if request.rival_ns else 0
    if request.rival_ns and least_ns >= request.rival_ns:
        raise Beaten(least_ns)


def lower_bound(space: SearchSpace, *, orders: bool = False) -> int:
    """Return a lower bound in nanoseconds on the simulated step of any plan of the space.

    orders: whether plans may split backwards or have several stages a rank (`search.orders`).
    Ways to cut the batch are tried as long as their cheap bounds are below the least one: on few devices first those
    with most micro-batches, which leave the fewest ways to replicate stages, else those that are cheapest.
    O(ways * devices^2 * blocks^2), or less, and on few devices `positions_bound`.
    """
    few = space.costs.cluster.world <= SMALL
    cheap = sorted(
        (
            (max(work_bound(space, rows), _path_bound(space, max(rows), orders)), rows)
            for rows in space.request.micro_rows
        ),
        key=lambda way: (-len(way[1]) if few else 0, way),
    )
    least: float = inf
    for cheap_bound, rows in cheap:
        if cheap_bound < least:
            least = min(least, _bound(space, cheap_bound, rows, orders, least))
    return int(least)


def _bound(space: SearchSpace, cheap_bound: int, micro_rows: tuple[int, ...], orders: bool, enough: float = inf) -> int:
    """Return the lesser of the bounds of plans with one stage a rank, and with several if these are allowed.

    enough: a larger bound is of no use.
    """
    request, rows = space.request, max(micro_rows)
    times, counts = _times(space, rows)
    most = most_devices(space, rows)
    weights = _best_weights(times, counts, most)
    widest = max(_replicas(space, rows))
    one = Priced(space, micro_rows, weights, _heaviest(weights, counts, most), widest, orders=orders)
    bound = priced_bound(one)
    # The chain's bound counts shares of micro-batches.
    if request.policy == "split" and request.synchronous and space.is_chain:
        bound = max(bound, _chain_bound(space, micro_rows, orders))
    numbers = [number for number in request.numbers_per_rank if number > 1] if orders else []
    several = replace(one, several=True)
    if numbers and several.sets != []:  # where any set of devices can have several
        less = priced_bound(several)
        few = less < enough and space.costs.cluster.world <= SMALL
        bound = min(bound, max(less, positions_bound(several, numbers, min(enough, bound))) if few else less)
    return max(cheap_bound, bound)


def work_bound(space: SearchSpace, micro_rows: tuple[int, ...]) -> int:
    """Return the least nanoseconds that all devices together need, whichever of them computes a block."""
    times, counts = _times(space, max(micro_rows))
    return max(0, int(len(micro_rows) * _most_work(times, counts, most_devices(space, max(micro_rows)))))


def _times(space: SearchSpace, rows: int) -> tuple[Floats, Ints]:
    """Return the nanoseconds of each type of device for each block, both ways, and the devices of each type."""
    times = block_costs(space, rows)[:, :2].sum(axis=1).astype(np.float64)
    return times, np.array(counts_of(space))


def _heaviest(weights: Floats, counts: Ints, most: int) -> float:
    return float(np.sort(np.repeat(weights, counts))[::-1][:most].sum())


def _most_work(times: Floats, counts: Ints, most: int) -> float:
    """Return sum over blocks of min over types of w * t, over the weights w of the `most` heaviest devices, for good w.

    times: (types, blocks).  counts: devices of each type.
    """
    if not times.sum(axis=1).all():
        return 0.0
    weights = _best_weights(times, counts, most)
    return float((weights[:, None] * times).min(axis=0).sum()) / _heaviest(weights, counts, most)


def _best_weights(times: Floats, counts: Ints, most: int) -> Floats:
    """Return good weights: they begin as the rates of whole models and climb, a type at a time, to where another type
    takes over some block: the ratio is concave in each.  O(types^2 * blocks)."""
    if not times.sum(axis=1).all():
        return np.ones(len(times))

    def ratio(weights: Floats) -> float:
        return float((weights[:, None] * times).min(axis=0).sum()) / _heaviest(weights, counts, most)

    weights: Floats = max(1 / times.sum(axis=1), np.ones(len(times)), key=ratio)
    best = ratio(weights)
    for own in range(len(times)) if len(times) > 1 else ():
        others = (np.delete(weights, own)[:, None] * np.delete(times, own, axis=0)).min(axis=0)
        turns = np.divide(others, times[own], out=np.full(len(others), weights[own]), where=times[own] > 0)
        for weight in np.quantile(turns, np.linspace(0, 1, 9)):
            tried = weights.copy()
            tried[own] = weight
            if ratio(tried) > best:
                best, weights = ratio(tried), tried
    return weights


def slices_bound(space: SearchSpace) -> int:
    """Return a lower bound in nanoseconds on the step of any plan with slices, of the requested lengths if any."""
    return min(_slices_bound(space, rows) for rows in space.request.micro_rows)


def _slices_bound(space: SearchSpace, micro_rows: tuple[int, ...]) -> int:
    shares, lengths = space.costs.slices, space.request.fixed_slices
    if space.request.token_axis is None:
        return 0
    blocks = [op.parts or (op.name,) for op in space.chain.blocks.ops]
    totals = []
    for forward, backward in block_costs(space, max(micro_rows))[:, :2]:
        both_ways = shares.least_ns(blocks, forward, lengths, backward=False)
        both_ways = both_ways + shares.least_ns(blocks, backward, lengths, backward=True)
        totals.append(float(both_ways.min()))
    return max(0, int(len(micro_rows) * min(totals)) // most_devices(space, max(micro_rows)))


def most_devices(space: SearchSpace, rows: int) -> int:
    """Return the most devices that work in a plan of the space.  rows: of a micro-batch."""
    request, world = space.request, space.costs.cluster.world
    if isinstance(request.replicas, tuple):
        return min(world, sum(request.replicas))
    stages = min(space.chain.n, request.stages or world)
    return min(world, stages * max(_replicas(space, rows)))


def _replicas(space: SearchSpace, rows: int) -> tuple[int, ...]:
    """Return the possible numbers of replicas of a stage, ascending."""
    request, world = space.request, space.costs.cluster.world
    if request.replicas is None:
        return tuple(range(1, (world if request.policy == "turn" else min(world, rows)) + 1))
    return (request.replicas,) if isinstance(request.replicas, int) else tuple(sorted(set(request.replicas)))


def _path_bound(space: SearchSpace, rows: int, orders: bool) -> int:
    """Return the nanoseconds of the longest path of blocks, both ways, on the fastest type of device.  O(reads)."""
    replicas = max(_replicas(space, rows)) if space.request.policy == "split" else 1
    times = fastest_times(space, -(-rows // replicas), inputs_alone=orders).tolist()
    ready: dict[str, int] = {}
    longest = 0
    for op, time in zip(space.chain.blocks.ops, times, strict=True):
        end = max((ready.get(read, 0) for read in op.reads), default=0) + time
        longest = max(longest, end)
        ready.update(dict.fromkeys(op.writes, end))
    return longest


def _chain_bound(space: SearchSpace, micro_rows: tuple[int, ...], orders: bool) -> int:
    """Return the larger of two relaxations: until the last backward has come back, and until the last sum is done; 0
    for too large a problem.

    The first micro-batch passes every stage before the next one can begin, since the blocks are a chain; it comes back
    where gradients do, not through frozen layers.
    """
    rows, micros = max(micro_rows), len(micro_rows)
    most, counts = most_devices(space, rows), counts_of(space)
    states = prod(min(count, most) + 1 for count in counts)
    if states**2 * max(space.chain.n**2, LEAST_CELLS) // 2 > MOST_WORK:
        return 0
    link_ns = min(level.link.latency_ns for level in space.costs.cluster.levels)
    waits, sends = gradient_edges(space), gradient_edges(space, rows)
    until_backward, until_sum, rates = {}, {}, rates_of(space, rows)
    for taken in sets_of(space, max(_replicas(space, rows)), MOST_WORK) or ():
        forward, backward, later, after = _optimistic(space, taken, rates, rows)
        both_ways = forward + backward - (later if orders else 0)
        busy = np.where(space.legal, micros * both_ways, INFEASIBLE)
        until_backward[taken] = busy, np.where(waits, both_ways, forward) + np.where(sends, 2 * link_ns, 0)
        if space.costs.overlap:  # the last backward hides the sum
            after = np.maximum(after - backward, 0)
        busy = np.where(space.legal, micros * (forward + backward) + after, INFEASIBLE)
        until_sum[taken] = busy, forward + np.where(sends, link_ns, 0)
    n = space.chain.n
    return max(_least_latency(n, counts, most, until_backward), _least_latency(n, counts, most, until_sum))


def _optimistic(space: SearchSpace, taken: Taken, rates: list[float], rows: int) -> tuple[Ints, Ints, Ints, Ints]:
    """Return (forward, backward, the part of it that can wait, sum and optimizer) of every range on these devices, at
    the best place."""
    context, chain, replicas = space.costs, space.chain, sum(taken)
    needed = [chain.range_costs(Size(own), kind) for kind, own in rows_needed(taken, rates, rows)]
    forward = np.min([costs.ranges("fwd_ns") for costs in needed], axis=0)
    backward = np.min([costs.ranges("bwd_ns") for costs in needed], axis=0)
    later = np.max([costs.ranges("weight_ns") for costs in needed], axis=0)
    # the slowest port that any ring must pass is one of each level whose inner groups cannot hold all its ranks
    levels = context.cluster.levels
    slower = [outer.link.bytes_per_s for inner, outer in pairwise(levels) if replicas > inner.size]
    rate = min(slower, default=max(level.link.bytes_per_s for level in levels))
    all_reduce = 2 * (replicas - 1) / replicas * 1e9 / rate
    own = [device for device, count in zip(context.device_types, taken, strict=True) if count]
    optimizer = max(optimizer_ns(1 << 30, context.state_factor, device) for device in own) / (1 << 30)
    if space.request.may_shard:
        optimizer /= replicas
    after = np.floor(chain.trained * (all_reduce + optimizer)).astype(np.int64)
    return forward, backward, np.minimum(later, backward), np.maximum(after - 1, 0)


def _least_latency(n: int, counts: Taken, most: int, tables: Mapping[Taken, tuple[Ints, Ints]]) -> int:
    """Solve the recurrence of `partition` without the number of stages: only devices of each type used so far.

    most: devices that may be used.  tables: (busy_ns, latency_ns) of every range, by set of devices.
    """
    best: dict[Taken, Ints] = {}
    for used in product(*(range(count + 1) for count in counts)):
        if sum(used) > most:
            continue
        value = np.full(n + 1, INFEASIBLE, dtype=np.int64)
        for kind, count in enumerate(used):
            if count:  # a device may idle
                value = np.minimum(value, best[(*used[:kind], count - 1, *used[kind + 1 :])])
        for taken, (busy, latency) in tables.items():
            left = tuple([a - b for a, b in zip(used, taken, strict=True)])
            if min(left) >= 0:
                value = np.minimum(value, np.maximum(busy, latency + best[left][None, :]).min(axis=1))
        value[n] = 0
        best[used] = value
    return int(min(value[0] for value in best.values()))
