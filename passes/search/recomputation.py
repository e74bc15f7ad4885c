"""The choice of the blocks that a stage recomputes, and of their groups, so that it fits in the least time.

Blocks are taken in order of bytes saved per nanosecond of forward (as in Piper, NeurIPS 2021, section 5.2), as few as
fit, or some more where that is quicker.  Neighbours form groups: a group keeps its inputs for each micro-batch in
flight, and in its own backward everything inside once, so few large groups keep little and need a large workspace, many
small ones the other way round.  Several sizes are tried; a group of a size ends where the fewest bytes cross in the
second half of what it may hold (with equal layers: between layers; Chen et al., "Training Deep Nets with Sublinear
Memory Cost", 2016, give the square root of their number as the best).  Where memory is left, groups end at more blocks:
the end of a group does not run again.

Assumed, and wrong where: a value that passes by a group counts at each of its ends.  The result is estimated like every
stage, and more is recomputed if the estimate does not fit.

Ranks with several stages share their memory among all of these.  Each stage has a few ways to recompute more or less,
which trade bytes for time.  So such a rank takes, from none recomputed on, the step that frees the most bytes for its
time, of any stage, as long as it needs too much: the greedy of the fractional knapsack.  What it exceeds the need by is
at most one such step.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, pairwise

from autopart.ir.decision import Decision, Stage
from autopart.ir.graph import Size
from autopart.ir.plan import Estimate
from autopart.ir.program import Edge
from autopart.passes.graph.cuts import Ints
from autopart.passes.program.orders import Shape
from autopart.passes.search.space import SearchSpace
from autopart.passes.simulation.charges import StageContext
from autopart.passes.simulation.stage_costs import Estimator, counts_for, most_bytes, own_bytes, stage_contexts

LEVELS = 12
"""Amounts of activations, as even parts of all, for which the recomputation of a stage of several is chosen."""

Way = tuple[int, list[range]]
"""(bytes kept for all micro-batches in flight and for the largest group, groups of blocks)."""
Grouping = tuple[int, int, list[range]]
"""(bytes kept for each micro-batch in flight, bytes of the largest group, groups of blocks)."""


@dataclass(frozen=True)
class StageBlocks:
    """The blocks of a stage in order, for a device's share of the rows.

    saved: bytes that each saves.  fwd_ns: of its forward.  tail_ns: of the end of its forward that does not run again
    where it ends a group.  crossing: bytes that cross the boundary before it.  group_ns: overhead of a group.
    """

    names: tuple[str, ...]
    saved: Sequence[int]
    fwd_ns: Sequence[int]
    tail_ns: Sequence[int]
    crossing: Sequence[int]
    group_ns: int = 0

    @cached_property
    def by_end(self) -> list[int]:
        """The places before which a group may end to save time: those that save most for what crosses there first."""
        ends = [place for place in range(1, len(self.names)) if self.tail_ns[place - 1] > self.group_ns]
        return sorted(ends, key=lambda place: self.crossing[place] / self.tail_ns[place - 1])

    def by_worth(self) -> list[int]:
        """Return the places of all blocks: most bytes freed for their time first, those that free none last."""
        freed = [saved - crossing for saved, crossing in zip(self.saved, self.crossing, strict=True)]

        def worth(place: int) -> tuple[bool, float, int]:
            return freed[place] <= 0, -self.saved[place] / max(1, self.fwd_ns[place]), place

        return sorted(range(len(self.names)), key=worth)


def recomputed_stage(space: SearchSpace, context: StageContext, spare_bytes: int = 0) -> Stage:
    """Return the stage with the quickest recomputation that fits its devices, found once for each context.

    spare_bytes: memory to leave free.  A stage without a backward recomputes nothing.
    """
    if context.stage.forward_only:
        return context.stage
    limit = space.costs.cluster.least_memory_bytes(context.stage.ranks) - spare_bytes
    key = limit, context
    if key not in space.recomputed:
        size = Size(context.stage.division.largest_part(context.rows))
        graph, names = space.costs.graph(size), context.stage.ops
        crossing = dict(zip(graph.ops, space.chain.range_costs(size).crossing.tolist(), strict=False))
        costs = [graph.ops[name].cost for name in names]
        blocks = StageBlocks(
            names,
            tuple([0 if name in space.asked else c.saved_bytes for name, c in zip(names, costs, strict=True)]),
            tuple([c.fwd_ns for c in costs]),
            tuple([c.tail_ns for c in costs]),
            tuple([crossing[name] for name in names]),
            space.costs.group_ns,
        )
        everything = space.request.recompute == "all"
        space.recomputed[key] = least_recomputed(
            context, blocks, space.costs, limit, space.grouped, everything=everything
        )
    return space.recomputed[key]


def least_recomputed(
    context: StageContext,
    blocks: StageBlocks,
    estimator: Estimator,
    limit: int,
    known: dict[Hashable, dict[int, list[Grouping]]],
    *,
    everything: bool,
) -> Stage:
    """Return the stage with the quickest recomputation that fits `limit` bytes; if nothing does, with one group of all.

    Groups that it recomputes already stay; their blocks count as saving nothing.  known: the ways to group the blocks
    of earlier stages that save as much.  everything: recompute all blocks, in the groups that hold least.
    O(blocks log^2 blocks), and an estimate for each way that turns out to be too large.
    """
    stage, already = context.stage, {name for group in context.stage.recompute for name in group}
    fixed = estimator.stage(context).peak_bytes - context.live * sum(blocks.saved)
    order = [place for place in blocks.by_worth() if blocks.names[place] not in already]
    if everything and not order:
        return stage
    least = len(order) if everything else 1

    costs = tuple(map(tuple, (blocks.saved, blocks.crossing, order)))
    groupings = known.setdefault(costs, {})  # equal layers are grouped alike

    def ways_of(count: int) -> list[Way]:
        if count not in groupings:
            groupings[count] = list(_groupings(blocks, frozenset(order[:count])))
        return [(context.live * each + most, groups) for each, most, groups in groupings[count]]

    def least_bytes(count: int) -> int:
        return fixed + min([kept for kept, _ in ways_of(count)])

    count = least + bisect_left(range(least, len(order)), True, key=lambda count: least_bytes(count) <= limit)
    while count <= len(order):
        more = [count + 2**step - 1 for step in range((len(order) - count + 1).bit_length())]
        ways = [way for n in more for way in ways_of(n)]
        least_first = [groups for _, groups in sorted(ways, key=lambda way: way[0])]
        for groups in least_first if everything else _cheapest_first(blocks, ways, context.live, limit - fixed):
            chosen = tuple(tuple(blocks.names[place] for place in group) for group in groups)
            found = replace(stage, recompute=stage.recompute + chosen)
            if estimator.stage(replace(context, stage=found)).peak_bytes <= limit:
                return found
        count += max(1, (len(order) - count) // 4) if count < len(order) else 1
    return replace(stage, recompute=(stage.ops,))


def _cheapest_first(blocks: StageBlocks, ways: Sequence[Way], live: int, limit: int) -> list[list[range]]:
    """Return the groups that seem to fit, those with the cheapest recomputation first, then those that keep least.

    Where none fits, returns the groups that keep least.
    """
    fitting = [_ended_oftener(way, blocks, live, limit) for way in ways if way[0] <= limit]

    def merit(way: Way) -> tuple[int, int]:
        again = sum([blocks.fwd_ns[place] for group in way[1] for place in group])
        spared = sum([blocks.tail_ns[group[-1]] - blocks.group_ns for group in way[1]])
        return again - spared, way[0]

    return [groups for _, groups in sorted(fitting or [min(ways, key=lambda way: way[0])], key=merit)]


def _ended_oftener(way: Way, blocks: StageBlocks, live: int, limit: int) -> Way:
    """Return the way with groups that end at more blocks, as far as `limit` allows.

    Blocks whose end saves most time for the bytes that cross there come first.
    """
    kept, groups = way
    inside = {place for group in groups for place in group[1:]}
    begins = set()
    for place in blocks.by_end:
        if place in inside and kept + live * blocks.crossing[place] <= limit:
            kept += live * blocks.crossing[place]
            begins.add(place)
    if not begins:
        return way
    ended: list[range] = []
    for group in groups:
        starts = [group.start, *(place for place in group if place in begins), group.stop]
        ended += [range(first, end) for first, end in pairwise(starts)]
    return kept, ended


def _groupings(blocks: StageBlocks, chosen: frozenset[int]) -> Iterator[Grouping]:
    """Yield ways to group the chosen blocks, with groups of several sizes."""
    runs, before = _runs(chosen), [0, *accumulate(blocks.saved)]
    inside = [before[run.stop] - before[run.start] for run in runs]
    size, least = max(inside), max(1, max(blocks.saved[place] for place in chosen))
    first = True
    while first or size >= least:
        groups = [group for run in runs for group in _divided(run, blocks, before, size)]
        entering = sum([blocks.crossing[group.start] for group in groups if group.start])  # else it was received
        workspace = max([before[group.stop] - before[group.start] for group in groups])
        yield before[-1] - sum(inside) + entering, workspace, groups
        size, first = size * 2 // 3, False


def _runs(chosen: frozenset[int]) -> list[range]:
    """Return the ranges of neighbours, ascending."""
    places = sorted(chosen)
    breaks = [0, *(i for i, (a, b) in enumerate(pairwise(places), 1) if b != a + 1), len(places)]
    return [range(places[a], places[b - 1] + 1) for a, b in pairwise(breaks)]


def _divided(run: range, blocks: StageBlocks, before: Sequence[int], size: int) -> list[range]:
    """Divide a run into groups that save at most `size` bytes each, or are single blocks.

    before: bytes saved in front of each block.
    """
    groups: list[range] = []
    start = run.start
    while start < run.stop:
        last = bisect_right(before, before[start] + size, start + 1, run.stop + 1) - 1
        end = max(last, start + 1)
        if end < run.stop:
            half = bisect_left(before, before[start] + (size + 1) // 2, start + 2, max(last, start + 1) + 1)
            crossing = blocks.crossing[half : last + 1]
            end = last - crossing[::-1].index(min(crossing)) if crossing else start + 1
        groups.append(range(start, end))
        start = end
    return groups


# ---- ranks with several stages --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fitted:
    """A decision over blocks that is not simulated yet.

    links: its edges.  estimates: of its stages.  excess: bytes that each stage needs beyond the memory that it may use,
    negative where it fits.
    """

    decision: Decision
    links: tuple[Edge, ...]
    estimates: tuple[Estimate, ...]
    excess: Sequence[int]


@dataclass(frozen=True, slots=True)
class Choice:
    """A stage with what it recomputes, and its estimate."""

    stage: Stage
    estimate: Estimate


def recomputed_jointly(
    space: SearchSpace, contexts: Sequence[StageContext], fits: Callable[[list[Choice]], bool]
) -> list[Choice]:
    """Return the choices of the stages of one rank; if nothing fits, those with as much recomputed as can be.

    contexts: with the micro-batches that each stage holds as `live`.  fits: whether choices fit the rank.
    One call of `fits` where nothing has to be recomputed; else O(stages * levels) choices, each made once, and as
    many calls.
    """
    whole = [Choice(context.stage, space.costs.stage(context)) for context in contexts]
    if fits(whole):
        return whole
    menus = [_menu(space, context) for context in contexts]
    picked = [0] * len(menus)
    while True:
        own = [menu[place] for menu, place in zip(menus, picked, strict=True)]
        if fits(own):
            return own
        steps = [
            (_price(context, menu[at].estimate, other.estimate), number, place)
            for number, (context, menu, at) in enumerate(zip(contexts, menus, picked, strict=True))
            for place, other in enumerate(menu)
            if other.estimate.activation_bytes < menu[at].estimate.activation_bytes
        ]
        if not steps:
            return own
        _, number, place = min(steps)
        picked[number] = place


def fitted_jointly(
    space: SearchSpace,
    whole: Fitted,
    measured: Callable[[Decision], Fitted],
    spare_bytes: Sequence[int],
) -> Fitted:
    """Return a decision with what its ranks have to recompute under its own order; it may still not fit.

    whole: without it.  spare_bytes: of each stage, memory to leave free.
    """
    decision, estimator = whole.decision, space.costs
    counts, known = counts_for(decision), stage_contexts(decision, whole.links, estimator)
    assert counts is not None  # an order of several stages a rank has counts of its own
    chosen = [context.stage for context in known]
    for own in Shape.of(decision).workers:
        if whole.excess[own[0]] <= 0:
            continue
        limit = estimator.cluster.least_memory_bytes(decision.stages[own[0]].ranks)
        limit -= sum([own_bytes(known[s], whole.estimates[s]) + (spare_bytes[s] if spare_bytes else 0) for s in own])

        def fits(choices: list[Choice], rows: Ints = counts[own], limit: int = limit) -> bool:
            estimates = [choice.estimate for choice in choices]
            held = [e.activation_bytes for e in estimates], [e.weight_bytes for e in estimates]
            most = most_bytes(rows, *held, sum(decision.token_slices) or 1)
            return most + max([e.workspace_bytes for e in estimates]) <= limit

        contexts = [replace(known[s], counts=(), held=None) for s in own]
        for s, choice in zip(own, recomputed_jointly(space, contexts, fits), strict=True):
            chosen[s] = choice.stage
    return measured(replace(decision, stages=tuple(chosen)))


def _price(context: StageContext, now: Estimate, other: Estimate) -> tuple[float, int]:
    """Return the nanoseconds per byte that a step frees, and the bytes, most first."""
    freed = context.live * (now.activation_bytes - other.activation_bytes)
    return (other.bwd_ns - now.bwd_ns) / freed, -freed


def _menu(space: SearchSpace, context: StageContext) -> list[Choice]:
    """Return the ways to recompute a stage, the first as it is, each with other activations."""
    estimator = space.costs
    first = estimator.stage(context)
    found = {first.activation_bytes: Choice(context.stage, first)}
    if space.request.may_recompute:
        limit = estimator.cluster.least_memory_bytes(context.stage.ranks)
        taken = own_bytes(context, first) + first.workspace_bytes
        for level in range(1, LEVELS + 1):
            held = context.live * (first.activation_bytes * (LEVELS - level) // LEVELS)
            stage = recomputed_stage(space, context, limit - taken - held)
            estimate = estimator.stage(replace(context, stage=stage))
            known = found.get(estimate.activation_bytes)
            if known is None or estimate.bwd_ns < known.estimate.bwd_ns:
                found[estimate.activation_bytes] = Choice(stage, estimate)
    return list(found.values())
