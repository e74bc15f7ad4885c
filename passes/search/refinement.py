"""Refinement: from an evaluated candidate by steepest descent, or by moving all cuts of a deep pipeline at once.

Steepest descent (`refined`) moves cuts, devices and rows, with a simulation for each move.  That is too slow where
programs are long, and gets stuck where only several moves together help; and the dynamic program of `partition` knows
recomputation by a closed form alone.  So there (`balanced`) every stage is estimated with each of its two cuts at
several places, recomputation chosen as in every evaluation, and a dynamic program over these places minimises the same
latency as `partition`, waiting included.

Assumed, and wrong where: values that pass by a stage make what it receives depend on cuts elsewhere.  The result is
simulated.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise, permutations, product
from typing import NamedTuple

import numpy as np

from autopart.ir.graph import Size
from autopart.passes.search.evaluation import Candidate, Evaluation, Search, fitted
from autopart.passes.search.recomputation import Fitted
from autopart.passes.search.space import SearchSpace, block_costs, fastest_sums
from autopart.passes.simulation.simulate import played

CHOICES = 7
"""Places of a cut after one round: its own, the next blocks, and the next local minima of the bytes that cross."""
ROUNDS = 4
"""The most rounds for a candidate."""
WAYS = 12
"""Ways to cut the stages from a place on that are kept, of those that none beats in both bound and time: a larger bound
with less time through the stages can end in the smaller one."""
EVEN = 8
"""Even cuts may be off by one in so many of a device's share of the work, where fewer bytes cross."""
MOVES = 400
"""The most moves of a cut to level the loads of ranks."""


def refined(search: Search, evaluation: Evaluation, effort: int) -> Evaluation:
    """Return the end of steepest descent over `_neighbours`, and where that is cheap, over cuts anywhere.

    effort: simulated actions that it may cost.  Its evaluations become results of the search.  Moves that cannot make
    the step shorter (`least_ns`) are not evaluated.
    """
    space, best = evaluation.space, evaluation
    budget = effort // actions_of(evaluation.candidate)
    while budget > 0:
        tried = []
        near = _neighbours(best.candidate, space)
        if budget > 2 * space.chain.n:
            near = chain(near, _with_one_cut_anywhere(best.candidate, space))
        for candidate in near:
            if best.fits and _is_worse(candidate, best):
                continue
            before = search.count
            tried.append(search.evaluate(space, candidate))
            budget -= search.count - before
            if budget <= 0:
                break
        better = min(tried, key=_merit, default=best)
        if _merit(better) >= _merit(best):
            break
        best = better
    return best


def _is_worse(candidate: Candidate, best: Evaluation) -> bool:
    least = least_ns(best.space, candidate)
    return least >= best.step_ns and candidate.preference(least, best.space.costs.cluster.kind) >= best.preference


def least_ns(space: SearchSpace, candidate: Candidate) -> int:
    """Return nanoseconds that the step takes at least, whatever memory demands: a position does all its work, and in a
    chain it waits for the first forward to come to it.

    Stages on unlike devices, whose rows are not known yet, count as nothing; 0 where the step is not a sum of whole
    micro-batches.  O(stages) in numpy.
    """
    request = space.request
    if request.policy == "turn" or not request.synchronous or candidate.token_slices or request.fixed_slices:
        return 0
    costs, rows, before = space.costs, max(candidate.micro_rows), 0
    busy: dict[tuple[int, ...], int] = {}  # by position, until all micro-batches have passed
    for (a, b), ranks in zip(pairwise(candidate.bounds), candidate.ranks, strict=True):
        kinds = set(costs.kinds_of(ranks))
        forward = backward = 0
        if len(kinds) == 1:
            known = space.chain.range_costs(Size(-(-rows // len(ranks))), kinds.pop())
            forward, backward = (int(each.sum()) for each in known.blocks[:2, a:b])
        busy[ranks] = busy.get(ranks, before) + len(candidate.micro_rows) * (forward + backward)
        before += forward if space.is_chain else 0
    return max(busy.values())


def actions_of(candidate: Candidate) -> int:
    """Return about the actions that evaluating a candidate simulates."""
    micros = played(candidate.stages, len(candidate.micro_rows), candidate.schedule)
    return 6 * candidate.stages * max(1, len(candidate.token_slices)) * sum(micros)


def _merit(evaluation: Evaluation) -> tuple[int, int]:
    return evaluation.over_bytes, evaluation.step_ns


def finer(evaluation: Evaluation, fine: SearchSpace) -> Candidate:
    """Return the candidate on the chain of more blocks, which can be cut wherever its own can."""
    candidate, coarse = evaluation.candidate, evaluation.space
    place = {op.parts[-1]: i for i, op in enumerate(fine.chain.blocks.ops)}  # the last part is not a clone
    ends = [0, *(place[op.parts[-1]] + 1 for op in coarse.chain.blocks.ops)]
    return replace(candidate, bounds=tuple(ends[b] for b in candidate.bounds))


def _neighbours(candidate: Candidate, space: SearchSpace) -> Iterator[Candidate]:
    """Yield the candidate after each move: the next ways to cut the batch, one cut by one or two blocks, all cuts from
    one on, or one device from a stage to another."""
    request, candidate = space.request, replace(candidate, recompute=())
    order = sorted(request.micro_rows, key=len)
    place = order.index(candidate.micro_rows)
    others = order[max(0, place - 1) : place] + order[place + 1 : place + 2]
    for rows in others if not candidate.order else ():  # which is one of so many micro-batches
        if candidate.most_replicas <= request.most_replicas(rows):
            yield replace(candidate, micro_rows=rows)
    for bounds in _moved(candidate.bounds):
        if space.allows(bounds):
            yield replace(candidate, bounds=bounds)
    if request.replicas is None and max(candidate.layout.widths) > 1:
        for giver, taker in permutations(range(len(candidate.widths)), 2):
            widths = list(candidate.widths)
            widths[giver] -= 1
            widths[taker] += 1
            moved = replace(candidate, widths=tuple(widths))
            if widths[giver] and moved.most_replicas <= request.most_replicas(candidate.micro_rows):
                yield moved


def _with_one_cut_anywhere(candidate: Candidate, space: SearchSpace) -> Iterator[Candidate]:
    """Yield the candidate with one cut moved to any place between its neighbours."""
    old = candidate.bounds
    for i in range(1, len(old) - 1):
        for place in range(old[i - 1] + 1, old[i + 1]):
            bounds = (*old[:i], place, *old[i + 1 :])
            if space.allows(bounds):
                yield replace(candidate, bounds=bounds, recompute=())


def _moved(bounds: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    inner = range(1, len(bounds) - 1)
    for step in (1, -1, 2, -2):
        for place in inner:
            yield (*bounds[:place], bounds[place] + step, *bounds[place + 1 :])
    for step in (1, -1):
        for first in inner[:-1]:
            yield (*bounds[:first], *(b + step for b in bounds[first:-1]), bounds[-1])


# ---- all cuts at once ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Need:
    """Times of a stage: of a micro-batch, behind the last one, of messages into it; and micro-batches in flight."""

    work_ns: int
    following_ns: int
    arriving_ns: int
    live: int


class Suffix(NamedTuple):
    """A way to cut the stages from one on: the least bound of their step, the time of a micro-batch through them, and
    their bounds.  Less is better."""

    bound_ns: int
    through_ns: int
    bounds: tuple[int, ...]


def balanced(search: Search, evaluation: Evaluation) -> Evaluation:
    """Move the cuts of a candidate as long as that makes its simulated step shorter, at most `ROUNDS` times.

    O(rounds * (choices^2 * (estimates + stages * ways) + actions)).  Its evaluations become results of the search.
    """
    space, best = evaluation.space, evaluation
    if evaluation.stages < 2 or not evaluation.fits:
        return evaluation
    for _ in range(ROUNDS):
        old = best.candidate.bounds
        found = least_bound(_needs(best), len(best.candidate.micro_rows), old[-1])
        if found is None or found.bounds == old or not space.allows(found.bounds):
            break
        tried = search.evaluate(space, replace(best.candidate, bounds=found.bounds))
        if not tried.fits or tried.step_ns >= best.step_ns:
            break
        best = tried
    return best


def _places(candidate: Candidate, space: SearchSpace) -> list[tuple[int, ...]]:
    """Return for each bound of the stages its possible places, `CHOICES`, its own first; the outer ones stay."""
    bounds, crossing = candidate.bounds, space.chain.range_costs(Size(max(candidate.micro_rows))).crossing
    inner = range(1, space.chain.n)
    cheap = [b for b in inner if crossing[b] <= crossing[b - 1] and crossing[b] <= crossing[b + 1]]
    places = [(bounds[0],) * CHOICES]
    for cut in bounds[1:-1]:
        below, above = bisect_left(cheap, cut), bisect_right(cheap, cut)
        near = [cut, *cheap[above : above + 2], *cheap[max(0, below - 2) : below], cut + 1, cut - 1, cut + 2, cut - 2]
        found = list(dict.fromkeys(place for place in near if place in inner))[:CHOICES]
        places.append(tuple(found + [cut] * (CHOICES - len(found))))
    return [*places, (bounds[-1],) * CHOICES]


def least_bound(needs: Sequence[Mapping[tuple[int, int], Need]], micros: int, last: int) -> Suffix | None:
    """Return the way through all stages, from 0 to `last`, with the least bound of the step.

    needs: of each stage by its two bounds.  O(sum of needs * ways * log ways).
    """
    behind = {last: [Suffix(0, 0, (last,))]}  # by their first bound
    for choices in reversed(needs):
        here: dict[int, list[Suffix]] = {}
        for (first, end), need in choices.items():
            joined = [_joined(need, rest, first, micros) for rest in behind.get(end, ())]
            here.setdefault(first, []).extend(joined)
        behind = {first: _undominated(found) for first, found in here.items() if found}
    return min(behind.get(0, ()), key=lambda suffix: suffix[:2], default=None)


def _undominated(found: list[Suffix]) -> list[Suffix]:
    """Return those that none beats in both bound and time, the smallest bound first; `WAYS` of them, evenly."""
    front: list[Suffix] = []
    for each in sorted(found, key=lambda suffix: suffix[:2]):
        if not front or each.through_ns < front[-1].through_ns:
            front.append(each)
    if len(front) <= WAYS:
        return front
    return [front[i * (len(front) - 1) // (WAYS - 1)] for i in range(WAYS)]


def _joined(need: Need, rest: Suffix, first: int, micros: int) -> Suffix:
    latency = need.work_ns + need.arriving_ns
    through = latency + rest.through_ns
    bound = max(latency + rest.bound_ns, micros * need.work_ns + need.following_ns, through)
    turns = micros - need.live - 1
    if turns >= 0:
        bound = max(bound, 2 * through + turns * need.work_ns + need.following_ns)
    return Suffix(bound, through, (first, *rest.bounds))


def _needs(known: Evaluation) -> list[dict[tuple[int, int], Need]]:
    """Return for each stage, by its two bounds, the times of every stage that fits, with bounds at any of their places.

    Stages are estimated all together, even bounds at one place and odd ones at another, so that as many estimates as
    there are pairs show them all.
    """
    candidate, space = known.candidate, known.space
    needs: list[dict[tuple[int, int], Need]] = [{} for _ in candidate.widths]
    places = _places(candidate, space)
    for pair in product(range(CHOICES), range(CHOICES)):
        bounds = tuple([choices[pair[number % 2]] for number, choices in enumerate(places)])
        if not space.allows(bounds):
            continue
        found = fitted(space, replace(candidate, bounds=bounds), known.decision.zero)
        arriving = _arriving_ns(space, found)
        for stage, between in enumerate(pairwise(bounds)):
            if found.excess[stage] <= 0:
                e = found.estimates[stage]
                reduce_ns = max(0, e.reduce_ns - e.bwd_ns) if space.costs.overlap else e.reduce_ns
                need = Need(e.fwd_ns + e.bwd_ns, reduce_ns + e.optimizer_ns, arriving[stage], e.live)
                needs[stage][between] = need
    return needs


def _arriving_ns(space: SearchSpace, found: Fitted) -> list[int]:
    """Return the nanoseconds of messages into each stage, of the slowest sender, both ways, alone on their ports."""
    sizes = space.costs.graph(Size(max(found.decision.micro_rows))).values
    ranks = [stage.ranks for stage in found.decision.stages]
    slowest = [0] * len(ranks)
    for edge in found.links:
        there = space.costs.loads.p2p(ranks[edge.src], ranks[edge.dst]).alone_ns(sum([sizes[v] for v in edge.values]))
        back = space.costs.loads.p2p(ranks[edge.dst], ranks[edge.src]).alone_ns(sum([sizes[v] for v in edge.grads]))
        slowest[edge.dst] = max(slowest[edge.dst], there + back)
    return slowest


# ---- even cuts -------------------------------------------------------------------------------------------------------
# The dynamic program of `partition` has one stage for each position.  With several of them the pipeline fills evenly
# and what counts is the work of all stages of a rank, and the longest of them.


def speeds_of(space: SearchSpace, candidate: Candidate) -> tuple[float, ...]:
    """Return how fast the devices of each position are together, in devices of the fastest type."""
    kinds = space.costs.device_types
    whole = [max(1, int(each.sum())) for each in block_costs(space, max(candidate.micro_rows))[:, :2]]
    starts = accumulate(candidate.widths, initial=candidate.first)
    ranks = [candidate.layout.ranks(start, width) for start, width in zip(starts, candidate.widths, strict=False)]
    devices = space.costs.cluster.devices
    copies = candidate.layout.pipeline_replicas
    return tuple([sum([min(whole) / whole[kinds.index(devices[rank])] for rank in own]) / copies for own in ranks])


def with_even_cuts(candidate: Candidate, space: SearchSpace) -> Candidate | None:
    """Return the candidate with work for each position as it is fast, cut where few bytes cross, or None where not
    allowed.

    The pipeline latency leaves out waiting for slow stages, which even cuts avoid.
    """
    widths = candidate.widths
    if space.request.pins or len(widths) > space.chain.n:
        return None
    ends = even_bounds(space, max(candidate.micro_rows), speeds_of(space, candidate))
    return replace(candidate, bounds=ends) if ends is not None and space.allows(ends) else None


def even_bounds(space: SearchSpace, rows: int, shares: Sequence[float]) -> tuple[int, ...] | None:
    """Return the bounds of stages with work in proportion to their shares, cut where few bytes cross.

    rows: of a micro-batch.  None where the blocks do not suffice.  O(stages * blocks).
    """
    sums, crossing = fastest_sums(space, rows), space.chain.range_costs(Size(rows)).crossing
    whole, bounds = sum(shares), [0]
    for done in accumulate(shares[:-1]):
        first = bounds[-1] + 1  # the boundaries that are left
        off = np.abs(sums[first:-1] - sums[-1] * done / whole)
        if not len(off):
            return None
        near = np.flatnonzero(off <= max(off.min(), sums[-1] / whole / EVEN))
        bounds.append(first + int(min(near, key=lambda i: (crossing[first + i], off[i]))))
    return (*bounds, space.chain.n)


def shortest_bounds(space: SearchSpace, rows: int, speeds: Sequence[float]) -> tuple[int, ...] | None:
    """Return the bounds for which the longest stage is shortest, of those that the request allows; None without any.

    Of equally short ones every stage ends as late as possible.  rows: of a micro-batch.  speeds: of the devices of each
    stage.  O(stages * blocks^2) in numpy.
    """
    n, stages, sums = space.chain.n, len(speeds), fastest_sums(space, rows)
    work = sums[None, :] - sums[:, None]
    far = float(sums[-1]) / min(speeds) + 1
    best = [np.full(n + 1, far)]
    best[0][n] = 0
    for k in range(1, stages + 1):  # the last k stages, from block a on
        allowed = np.where(space.legal_at(stages - k), work / speeds[stages - k], far)
        best.append(np.maximum(allowed, best[-1][None, :]).min(axis=1))
    if best[stages][0] >= far:
        return None
    bounds, limit = [0], best[stages][0]
    for stage in range(stages):
        legal, rest, a = space.legal_at(stage)[bounds[-1]], best[stages - stage - 1], bounds[-1]
        fits = work[a] / speeds[stage] <= limit
        bounds.append(int(np.flatnonzero(legal & fits & (rest <= limit)).max()))
    return tuple(bounds)


def levelled(
    space: SearchSpace, rows: int, bounds: tuple[int, ...], homes: Sequence[int], speeds: Sequence[float]
) -> tuple[int, ...]:
    """Return bounds with cuts moved by a block as long as the loads of positions get more even, for their speeds (the
    sum of squares of loads over speeds).

    homes: position of each stage.  O(moves * stages).
    """
    sums = fastest_sums(space, rows).tolist()
    cuts, loads = list(bounds), [0.0] * len(speeds)
    for home, (a, b) in zip(homes, pairwise(cuts), strict=True):
        loads[home] += sums[b] - sums[a]
    for _ in range(MOVES):
        gain, place, moved = min(_moves(space, cuts, sums, loads, homes, speeds), default=(0, 0, 0))
        if gain >= 0:
            break
        taken = sums[moved] - sums[cuts[place]]
        loads[homes[place - 1]] += taken
        loads[homes[place]] -= taken
        cuts[place] = moved
    return tuple(cuts)


def _moves(
    space: SearchSpace,
    cuts: Sequence[int],
    sums: Sequence[int],
    loads: Sequence[float],
    homes: Sequence[int],
    speeds: Sequence[float],
) -> Iterator[tuple[float, int, int]]:
    """Yield (change of the sum of squared loads over speeds, place of a cut, block that it moves to) of each move."""
    for place in range(1, len(cuts) - 1):
        giver, taker, here = homes[place], homes[place - 1], cuts[place]
        for moved in (here + 1, here - 1):
            if giver == taker or not cuts[place - 1] < moved < cuts[place + 1]:
                continue
            taken = sums[moved] - sums[here]
            change = 2 * taken * (loads[taker] / speeds[taker] - loads[giver] / speeds[giver])
            change += taken**2 * (1 / speeds[taker] + 1 / speeds[giver])
            before, after = space.legal_at(place - 1), space.legal_at(place)
            if change < 0 and before[cuts[place - 1], moved] and after[moved, cuts[place + 1]]:
                yield change, place, moved
