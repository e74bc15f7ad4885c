"""Balance: all cuts of a deep pipeline moved at once, by what its stages really need.

Moving one cut at a time, with a simulation for each, is too slow where programs are long, and gets stuck where only
several moves together help; and the dynamic program of `partition` knows recomputation by a closed form alone.  So
here every stage is estimated with each of its two cuts at several places, recomputation chosen as in every evaluation,
and a dynamic program over these places minimises the same latency as `partition`, waiting included.

Assumed, and wrong where: values that pass by a stage make what it receives depend on cuts elsewhere.  What comes out is
simulated.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product

from autopart.ir.size import Size
from autopart.passes.search.archive import Archive
from autopart.passes.search.evaluation import Candidate, Evaluation, Evaluator
from autopart.passes.search.refinement import is_legal
from autopart.passes.search.space import SearchSpace

CHOICES = 7
"""Places that a cut may have after one round: its own, the next blocks, and the next ones where locally least
crosses."""
ROUNDS = 4
"""Rounds that a candidate may take."""
WAYS = 12
"""Ways to cut the stages from a place on that are kept, of those of which none is better in both of its merits: a
larger bound with less time through the stages can end in the smaller one."""


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


def balanced(evaluation: Evaluation, archive: Archive) -> Evaluation:
    """The candidate with its cuts moved as long as that makes its simulated step shorter, `ROUNDS` times at most.

    O(rounds * (choices^2 * (estimates + stages * ways) + actions)).  All that is simulated goes into the archive.
    """
    space, best = evaluation.space, evaluation
    if evaluation.candidate.partition.stages < 2 or not evaluation.fits:
        return evaluation
    for _ in range(ROUNDS):
        bounds = _best_bounds(best, archive.evaluator)
        moved = _moved(best.candidate, space, bounds)
        if moved is None or bounds == best.candidate.partition.bounds:
            break
        tried = archive.evaluate(space, moved)
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


def _moved(candidate: Candidate, space: SearchSpace, bounds: tuple[int, ...]) -> Candidate | None:
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
        moved = _moved(candidate, space, bounds)
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
