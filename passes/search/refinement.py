"""Refinement: from an evaluated candidate by steepest descent, or by moving all cuts of a deep pipeline at once.

Steepest descent (`refined`) moves cuts, devices and rows, with a simulation for each move.  That is too slow where
programs are long, and gets stuck where only several moves together help; and the dynamic program of `partition` knows
recomputation by a closed form alone.  So there (`balanced`) every stage is estimated with each of its two cuts at
several places, recomputation chosen as in every evaluation, and a dynamic program over these places minimises the same
latency as `partition`, waiting included.

Assumed, and wrong where: values that pass by a stage make what it receives depend on cuts elsewhere.  What comes out is
simulated.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, pairwise, product

from autopart.ir.size import Size
from autopart.passes.search.evaluation import Candidate, Evaluation, Evaluator, Search
from autopart.passes.search.space import SearchSpace
from autopart.passes.simulation.estimate import played

CHOICES = 7
"""Places that a cut may have after one round: its own, the next blocks, and the next ones where locally least
crosses."""
ROUNDS = 4
"""Rounds that a candidate may take."""
WAYS = 12
"""Ways to cut the stages from a place on that are kept, of those of which none is better in both of its merits: a
larger bound with less time through the stages can end in the smaller one."""


def refined(search: Search, evaluation: Evaluation, effort: int) -> Evaluation:
    """Where steepest descent over `_neighbours`, and where that is cheap over cuts anywhere, ends.

    effort: simulated actions that it may cost.  All that is evaluated is noted in the search.
    """
    space, best = evaluation.space, evaluation
    budget = effort // actions_of(evaluation.candidate)
    while budget > 0:
        tried = []
        near = _neighbours(best.candidate, space)
        if budget > 2 * space.chain.n:
            near = chain(near, _with_one_cut_anywhere(best.candidate, space))
        for candidate in near:
            before = search.evaluator.count
            tried.append(search.evaluate(space, candidate))
            budget -= search.evaluator.count - before
            if budget <= 0:
                break
        better = min(tried, key=_merit, default=best)
        if _merit(better) >= _merit(best):
            break
        best = better
    return best


def actions_of(candidate: Candidate) -> int:
    """About the actions that evaluating it simulates."""
    stages, micros = candidate.partition.stages, len(candidate.micro_rows)
    return 6 * stages * sum(played(stages, micros, candidate.schedule))


def _merit(evaluation: Evaluation) -> tuple[int, int]:
    return evaluation.over_bytes, evaluation.step_ns


def finer(evaluation: Evaluation, fine: SearchSpace) -> Candidate:
    """The candidate on the chain of more blocks, which can be cut wherever its own can."""
    candidate, coarse = evaluation.candidate, evaluation.space
    place = {op.parts[-1]: i for i, op in enumerate(fine.chain.blocks.ops)}  # the last part is not a clone
    ends = [0, *(place[op.parts[-1]] + 1 for op in coarse.chain.blocks.ops)]
    bounds = tuple(ends[b] for b in candidate.partition.bounds)
    return replace(candidate, partition=replace(candidate.partition, bounds=bounds))


def is_legal(bounds: tuple[int, ...], space: SearchSpace) -> bool:
    """Whether the request allows a partition with these bounds."""
    if bounds[-2] >= bounds[-1] or bounds[1] <= 0:
        return False
    for stage, (a, b) in enumerate(pairwise(bounds)):
        legal = space.legal_at(stage) if space.request.pins else space.legal
        if not legal[a, b]:
            return False
    return True


def _neighbours(candidate: Candidate, space: SearchSpace) -> Iterator[Candidate]:
    """The next ways to cut the batch, one cut moved by one or two blocks, all cuts from one on shifted, or one device
    moved from a stage to another."""
    partition = candidate.partition
    order = sorted(space.request.micro_rows, key=len)
    place = order.index(candidate.micro_rows)
    for rows in order[max(0, place - 1) : place] + order[place + 1 : place + 2]:
        if max(partition.widths) * candidate.layout.pipeline_replicas <= space.request.most_replicas(rows):
            yield replace(candidate, micro_rows=rows)
    for bounds in _moved(partition.bounds):
        if all(a < b for a, b in pairwise(bounds)) and is_legal(bounds, space):
            yield replace(candidate, partition=replace(partition, bounds=bounds))
    if space.request.replicas is None and max(candidate.layout.widths) > 1:
        yield from _with_one_device_moved(candidate, space)


def _with_one_device_moved(candidate: Candidate, space: SearchSpace) -> Iterator[Candidate]:
    partition = candidate.partition
    for giver in range(partition.stages):
        for taker in range(partition.stages):
            if giver == taker or partition.widths[giver] == 1:
                continue
            widths = list(partition.widths)
            widths[giver] -= 1
            widths[taker] += 1
            if max(widths) * candidate.layout.pipeline_replicas <= space.request.most_replicas(candidate.micro_rows):
                yield replace(candidate, partition=replace(partition, widths=tuple(widths)))


def _with_one_cut_anywhere(candidate: Candidate, space: SearchSpace) -> Iterator[Candidate]:
    """One cut moved to any place between its neighbours."""
    old = candidate.partition.bounds
    for i in range(1, len(old) - 1):
        for place in range(old[i - 1] + 1, old[i + 1]):
            bounds = (*old[:i], place, *old[i + 1 :])
            if is_legal(bounds, space):
                yield replace(candidate, partition=replace(candidate.partition, bounds=bounds))


def _moved(bounds: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    inner = range(1, len(bounds) - 1)
    for step in (1, -1, 2, -2):
        for place in inner:
            yield (*bounds[:place], bounds[place] + step, *bounds[place + 1 :])
    for step in (1, -1):
        for first in inner:
            if first + 1 < len(bounds) - 1:
                yield (*bounds[:first], *(b + step for b in bounds[first:-1]), bounds[-1])


# ---- all cuts at once ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Need:
    """What a stage needs for a micro-batch and behind its last one, messages into it, and micro-batches in flight."""

    work_ns: int
    following_ns: int
    arriving_ns: int
    live: int


@dataclass(frozen=True, slots=True)
class Suffix:
    """The stages from one on: the least bound of their step, the time of a micro-batch through them, their bounds."""

    bound_ns: int
    through_ns: int
    bounds: tuple[int, ...]

    @property
    def merit(self) -> tuple[int, int]:
        """Less is better."""
        return self.bound_ns, self.through_ns


def balanced(search: Search, evaluation: Evaluation) -> Evaluation:
    """The candidate with its cuts moved as long as that makes its simulated step shorter, `ROUNDS` times at most.

    O(rounds * (choices^2 * (estimates + stages * ways) + actions)).  All that is simulated is noted in the search.
    """
    space, best = evaluation.space, evaluation
    if evaluation.candidate.partition.stages < 2 or not evaluation.fits:
        return evaluation
    for _ in range(ROUNDS):
        bounds = _best_bounds(best, search.evaluator)
        moved = _with_bounds(best.candidate, space, bounds)
        if moved is None or bounds == best.candidate.partition.bounds:
            break
        tried = search.evaluate(space, moved)
        if not tried.fits or tried.step_ns >= best.step_ns:
            break
        best = tried
    return best


def _places(candidate: Candidate, space: SearchSpace) -> list[tuple[int, ...]]:
    """For each bound of the stages, where it may lie: `CHOICES` places, its own first; the outer ones stay."""
    bounds, crossing = candidate.partition.bounds, space.chain.range_costs(Size(max(candidate.micro_rows))).crossing
    inner = range(1, space.chain.n)
    cheap = [b for b in inner if crossing[b] <= crossing[b - 1] and crossing[b] <= crossing[b + 1]]
    places = [(bounds[0],) * CHOICES]
    for cut in bounds[1:-1]:
        below, above = bisect_left(cheap, cut), bisect_right(cheap, cut)
        near = [cut, *cheap[above : above + 2], *cheap[max(0, below - 2) : below], cut + 1, cut - 1, cut + 2, cut - 2]
        found = list(dict.fromkeys(place for place in near if place in inner))[:CHOICES]
        places.append(tuple(found + [cut] * (CHOICES - len(found))))
    return [*places, (bounds[-1],) * CHOICES]


def _with_bounds(candidate: Candidate, space: SearchSpace, bounds: tuple[int, ...]) -> Candidate | None:
    """The candidate with these bounds, None where a stage would lose all its blocks or they are not allowed."""
    if any(a >= b for a, b in pairwise(bounds)) or not is_legal(bounds, space):
        return None
    return replace(candidate, partition=replace(candidate.partition, bounds=bounds))


def _best_bounds(known: Evaluation, evaluator: Evaluator) -> tuple[int, ...]:
    """The bounds with the least bound of the step, out of `_places`; the candidate's own where none can be judged."""
    bounds, micros = known.candidate.partition.bounds, len(known.candidate.micro_rows)
    needs = _needs(known, evaluator)
    best = least_bound([needs.get(stage, {}) for stage in range(len(bounds) - 1)], micros, bounds[-1])
    return best.bounds if best is not None else bounds


def least_bound(needs: Sequence[Mapping[tuple[int, int], Need]], micros: int, last: int) -> Suffix | None:
    """The way through all stages, from 0 to `last`, with the least bound of the step; needs: of each stage by its two
    bounds.  O(sum of needs * ways * log ways)."""
    behind = {last: [Suffix(0, 0, (last,))]}  # by their first bound
    for choices in reversed(needs):
        here: dict[int, list[Suffix]] = {}
        for (first, end), need in choices.items():
            joined = [_joined(need, rest, first, micros) for rest in behind.get(end, ())]
            here.setdefault(first, []).extend(joined)
        behind = {first: _undominated(found) for first, found in here.items() if found}
    return min(behind.get(0, ()), key=lambda suffix: suffix.merit, default=None)


def _undominated(found: list[Suffix]) -> list[Suffix]:
    """Those of which no other has both a smaller bound and less time through them, the smallest bound first; `WAYS` of
    them, evenly."""
    front: list[Suffix] = []
    for each in sorted(found, key=lambda suffix: suffix.merit):
        if not front or each.through_ns < front[-1].through_ns:
            front.append(each)
    if len(front) <= WAYS:
        return front
    return [front[i * (len(front) - 1) // (WAYS - 1)] for i in range(WAYS)]


def _joined(need: Need, rest: Suffix, first: int, micros: int) -> Suffix:
    """A stage before others."""
    latency = need.work_ns + need.arriving_ns
    through = latency + rest.through_ns
    bound = max(latency + rest.bound_ns, micros * need.work_ns + need.following_ns, through)
    turns = micros - need.live - 1
    if turns >= 0:
        bound = max(bound, 2 * through + turns * need.work_ns + need.following_ns)
    return Suffix(bound, through, (first, *rest.bounds))


def _needs(known: Evaluation, evaluator: Evaluator) -> dict[int, dict[tuple[int, int], Need]]:
    """By stage and its two bounds what every stage that fits needs, with its bounds at any of their places.

    Stages are estimated all together, even bounds at one place and odd ones at another, so that as many estimates as
    there are pairs show them all.
    """
    candidate, space = known.candidate, known.space
    needs: dict[int, dict[tuple[int, int], Need]] = {}
    places = _places(candidate, space)
    for pair in product(range(CHOICES), range(CHOICES)):
        bounds = tuple([choices[pair[number % 2]] for number, choices in enumerate(places)])
        moved = _with_bounds(candidate, space, bounds)
        if moved is None:
            continue
        fitted = evaluator.fitted(space, moved, known.decision.zero)
        arriving = evaluator.arriving_ns(space, fitted)
        for stage, between in enumerate(pairwise(bounds)):
            if fitted.excess_bytes[stage] <= 0:
                e = fitted.estimates[stage]
                reduce_ns = max(0, e.reduce_ns - e.bwd_ns) if space.costs.overlap else e.reduce_ns
                need = Need(e.fwd_ns + e.bwd_ns, reduce_ns + e.optimizer_ns, arriving[stage], e.live)
                needs.setdefault(stage, {})[between] = need
    return needs
