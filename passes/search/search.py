"""The search: many partitions by dynamic programming, the promising ones by simulation, the best of those refined.

0. Where all candidates together are few, each of them is judged, and that is all.
1. For every way to cut the batch and every layout, the partition's best division for each number of stages (`drafts`).
2. The most promising by U are judged (`judge`), the best of them under every schedule and layout of the same depth.
3. From the best few, cuts move by a block and widths by a device as long as the simulated step gets shorter; where
   that ends close to the best, once more with finer blocks.

The order of trying and every limit is a count, never a clock: the same request gives the same plan everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, chain, pairwise

import numpy as np

from autopart.passes.search.evaluation import Candidate, Evaluation, Evaluator
from autopart.passes.search.exhaustive import enumerate_all
from autopart.passes.search.layout import layouts
from autopart.passes.search.proposals import HOPELESS, Proposal, Watch, proposals_of
from autopart.passes.search.relaxation import fastest_sums
from autopart.passes.search.space import SearchSpace
from autopart.passes.simulation.estimate import played

PROMISING = 12
"""Divisions that are judged, besides the best one of each number of copies."""
VARIED = 4
"""Verdicts that are judged under all schedules and layouts."""
REFINED = 3
"""Verdicts that are refined."""
HOPEFUL, CLOSE = 1.04, 1.005
"""How far above the best a verdict may be to be refined, and to be refined over more blocks after that over few."""
EVEN = 8
"""Even cuts may be off by this part of a device's share of the work, where less crosses."""
EFFORT = 250_000
"""Actions that may be simulated in refining, and in comparing schedules and layouts."""


@dataclass(frozen=True)
class SearchResult:
    """best: the fastest verdict that fits, if any.  nearest: of those that do not fit the one that lacks least.
    seen: the fastest of every (number of stages, replicas of the first stage) that fits, for explanations."""

    best: Evaluation | None
    nearest: Evaluation | None
    seen: tuple[Evaluation, ...]


def search(spaces: tuple[SearchSpace, SearchSpace], watch: Watch | None = None) -> SearchResult:
    """The fastest plan found.  spaces: a line of few blocks, for pipelines of at most `SMALL` positions, and one of
    more blocks, for deeper ones and for refinement; they may be the same.
    """
    judges = {id(space): Evaluator(space) for space in spaces}
    ledger = _Archive()
    everything = enumerate_all(spaces[0]) if spaces[0] is spaces[1] else None
    for candidate in everything or ():
        ledger.add(judges[id(spaces[0])](candidate))
    if ledger.fits or ledger.nearest:
        return ledger.found()
    drafts = proposals_of(spaces, watch)
    _judge_promising(drafts, judges, ledger, watch)
    if not ledger.fits:  # none of the good ones does: others may
        drafts = proposals_of(spaces, watch, worth=math.inf) or proposals_of(spaces, watch, roomy=True)
        _judge_promising(drafts, judges, ledger, watch)
    if not drafts:  # nothing can be divided as it was asked for
        return ledger.found()
    effort = EFFORT
    for verdict in _finalists(ledger, VARIED):
        variants = list(_variants(verdict.space, verdict.candidate))
        for variant in variants[: max(1, effort // _actions(verdict.candidate))]:
            ledger.add(judges[id(verdict.space)](variant))
        effort -= len(variants) * _actions(verdict.candidate)
        even = _evened(verdict.candidate, spaces[1])
        if even is not None:
            ledger.add(judges[id(spaces[1])](even))
        if watch:
            watch("schedules and layouts", ledger.best_ns, 0)
    _compare(drafts, judges, ledger)
    _refine_best(spaces, judges, ledger, watch)
    return ledger.found()


class _Archive:
    """The best of everything judged."""

    def __init__(self) -> None:
        self.fits: dict[tuple[object, ...], Evaluation] = {}
        self.nearest: Evaluation | None = None

    def add(self, verdict: Evaluation) -> None:
        """Note a verdict."""
        if verdict.fits:
            self.fits[verdict.key] = verdict
        elif self.nearest is None or verdict.over_bytes < self.nearest.over_bytes:
            self.nearest = verdict

    @property
    def ranked(self) -> list[Evaluation]:
        """Those that fit, fastest first; of equals the fewest stages, then the one that was judged first."""
        return sorted(self.fits.values(), key=lambda v: (v.step_ns, v.candidate.division.stages))

    @property
    def best_ns(self) -> int:
        """Step of the fastest that fits, 0 while there is none."""
        return min((v.step_ns for v in self.fits.values()), default=0)

    def found(self) -> SearchResult:
        """What the search returns."""
        ranked = self.ranked
        seen: dict[tuple[int, int], Evaluation] = {}
        for verdict in ranked:
            seen.setdefault((verdict.candidate.division.stages, len(verdict.candidate.ranks[0])), verdict)
        return SearchResult(ranked[0] if ranked else None, self.nearest, tuple(seen.values()))


def _judge_promising(
    drafts: list[Proposal], judges: dict[int, Evaluator], ledger: _Archive, watch: Watch | None
) -> None:
    """Judge the promising, as long as they are not hopeless and effort is left or nothing fits."""
    effort = EFFORT
    for space, candidate in _promising(drafts):
        hopeless = ledger.fits and candidate.division.value > HOPELESS * ledger.best_ns
        if not hopeless and (effort > 0 or not ledger.fits):
            ledger.add(judges[id(space)](candidate))
            effort -= _actions(candidate)
        if watch:
            watch("judge", ledger.best_ns, 0)


# ---- candidates ----------------------------------------------------------------------------------------------------


def _promising(drafts: list[Proposal]) -> list[Proposal]:
    """The best by U, and the best of each number of stages and of copies, so that no kind of plan goes unjudged."""
    ranked = sorted(drafts, key=lambda draft: draft[1].division.value)  # stable: ties stay in order of trying
    chosen = dict.fromkeys(range(min(PROMISING, len(ranked))))
    kinds: set[tuple[int, int]] = set()
    for place, (_, candidate) in enumerate(ranked):
        kind = min(candidate.division.stages, 4), candidate.layout.copies
        if kind not in kinds and len(kinds) < 2 * PROMISING:
            kinds.add(kind)
            chosen[place] = None
    return [ranked[place] for place in chosen]


def _compare(drafts: list[Proposal], judges: dict[int, Evaluator], ledger: _Archive) -> None:
    """Judge also, for explanations, a stage fewer and more than the best has, and the best without replicas."""
    if not ledger.fits:
        return
    stages = ledger.ranked[0].candidate.division.stages
    ranked = sorted(drafts, key=lambda draft: draft[1].division.value)
    tests: tuple[Callable[[Candidate], bool], ...] = (
        lambda c: c.division.stages == stages - 1,
        lambda c: c.division.stages == stages + 1,
        lambda c: c.division.stages > 1 and c.layout.copies == max(c.division.widths) == 1,
    )
    for wanted in tests:
        found = next(((space, c) for space, c in ranked if wanted(c)), None)
        if found is not None:
            ledger.add(judges[id(found[0])](found[1]))


def _variants(space: SearchSpace, candidate: Candidate) -> Iterator[Candidate]:
    """The candidate under each schedule and each layout of as many copies."""
    alike = [
        layout
        for layout in layouts(space.costs.cluster, replicas=space.request.may_replicate)
        if (layout.copies, layout.order) == (candidate.layout.copies, candidate.layout.order)
    ]
    several = candidate.division.stages > 1
    for layout in alike:
        for first in sorted({0, candidate.division.first}):
            division = replace(candidate.division, first=first)
            for schedule in space.request.schedules if several else space.request.schedules[:1]:
                yield replace(candidate, division=division, layout=layout, schedule=schedule)


def _evened(candidate: Candidate, space: SearchSpace) -> Candidate | None:
    """The same with as much work for each device, cut where little crosses: U leaves waiting for slow stages out."""
    widths = candidate.division.widths
    if space.request.pins or len(widths) > space.chain.n:
        return None
    rows = max(candidate.micro_rows)
    sums, crossing = fastest_sums(space, rows), space.chain.sheet(rows).crossing
    devices, bounds = sum(widths), [0]
    for done in accumulate(widths[:-1]):
        target = sums[-1] * done / devices
        off = np.abs(sums[bounds[-1] + 1 : -1] - target)
        if not len(off):
            return None
        near = np.flatnonzero(off <= max(off.min(), sums[-1] / devices / EVEN))
        bounds.append(bounds[-1] + 1 + int(min(near, key=lambda i: (crossing[bounds[-1] + 1 + i], off[i]))))
    ends = (*bounds, space.chain.n)
    return replace(candidate, division=replace(candidate.division, bounds=ends)) if _legal(ends, space) else None


def _finalists(ledger: _Archive, most: int) -> list[Evaluation]:
    """The fastest verdicts with different numbers of stages, copies or rows."""
    chosen: dict[tuple[object, ...], Evaluation] = {}
    pool = ledger.ranked or ([ledger.nearest] if ledger.nearest else [])
    for verdict in pool:
        candidate = verdict.candidate
        chosen.setdefault((candidate.division.stages, candidate.layout.copies, len(candidate.micro_rows)), verdict)
    return list(chosen.values())[:most]


# ---- refinement ----------------------------------------------------------------------------------------------------


def _finer(verdict: Evaluation, many: SearchSpace) -> Candidate:
    """The candidate on the line of more blocks, which can be cut wherever its own can."""
    candidate, few = verdict.candidate, verdict.space
    if few is many:
        return candidate
    place = {op.parts[-1]: i for i, op in enumerate(many.chain.blocks.ops)}  # the last part is no clone
    ends = [0, *(place[op.parts[-1]] + 1 for op in few.chain.blocks.ops)]
    bounds = tuple(ends[b] for b in candidate.division.bounds)
    return replace(candidate, division=replace(candidate.division, bounds=bounds))


def _refine_best(
    spaces: tuple[SearchSpace, SearchSpace], judges: dict[int, Evaluator], ledger: _Archive, watch: Watch | None
) -> None:
    """Refine the finalists, and once more over more blocks what comes close to the best."""
    for verdict in _finalists(ledger, REFINED):
        if ledger.fits and verdict.step_ns > HOPEFUL * ledger.best_ns:
            continue
        near = _refine(verdict, judges[id(verdict.space)], ledger)
        close = not ledger.fits or near.step_ns <= CLOSE * ledger.best_ns
        if near.space is not spaces[1] and close:
            finer = judges[id(spaces[1])](_finer(near, spaces[1]))
            ledger.add(finer)
            _refine(finer, judges[id(spaces[1])], ledger)
        if watch:
            watch("refine", ledger.best_ns, 0)


def _refine(verdict: Evaluation, judge: Evaluator, ledger: _Archive) -> Evaluation:
    """Steepest descent over `_neighbours`, and where that is cheap over cuts anywhere; within a number of simulated
    actions.  Where it ends."""
    budget = EFFORT // REFINED // _actions(verdict.candidate)
    best = verdict
    while budget > 0:
        tried = []
        near = _neighbours(best.candidate, judge.space)
        if budget > 2 * judge.space.chain.n:
            near = chain(near, _swept(best.candidate, judge.space))
        for candidate in near:
            before = judge.count
            tried.append(judge(candidate))
            ledger.add(tried[-1])
            budget -= judge.count - before
            if budget <= 0:
                break
        better = min(tried, key=_merit, default=best)
        if _merit(better) >= _merit(best):
            break
        best = better
    return best


def _actions(candidate: Candidate) -> int:
    """Actions that judging it plays, about."""
    stages, micros = candidate.division.stages, len(candidate.micro_rows)
    return 6 * stages * sum(played(stages, micros, candidate.schedule))


def _merit(verdict: Evaluation) -> tuple[int, int]:
    return verdict.over_bytes, verdict.step_ns


def _neighbours(candidate: Candidate, space: SearchSpace) -> Iterator[Candidate]:
    """The next ways to cut the batch, one cut moved by one or two blocks, all cuts from one on shifted, or one device
    moved from a stage to another."""
    division, request = candidate.division, space.request
    order = sorted(request.micro_rows, key=len)
    place = order.index(candidate.micro_rows)
    for rows in order[max(0, place - 1) : place] + order[place + 1 : place + 2]:
        if max(division.widths) * candidate.layout.copies <= max(rows):
            yield replace(candidate, micro_rows=rows)
    for bounds in _moved(division.bounds):
        if all(a < b for a, b in pairwise(bounds)) and _legal(bounds, space):
            yield replace(candidate, division=replace(division, bounds=bounds))
    if request.replicas is None and max(candidate.layout.widths) > 1:
        for s in range(division.stages):
            for t in range(division.stages):
                if s != t and division.widths[s] > 1:
                    widths = list(division.widths)
                    widths[s], widths[t] = widths[s] - 1, widths[t] + 1
                    if max(widths) * candidate.layout.copies <= max(candidate.micro_rows):
                        yield replace(candidate, division=replace(division, widths=tuple(widths)))


def _swept(candidate: Candidate, space: SearchSpace) -> Iterator[Candidate]:
    """One cut moved to any place between its neighbours."""
    division = candidate.division
    for i, (low, _, high) in enumerate(zip(division.bounds, division.bounds[1:], division.bounds[2:], strict=False), 1):
        for place in range(low + 1, high):
            bounds = (*division.bounds[:i], place, *division.bounds[i + 1 :])
            if _legal(bounds, space):
                yield replace(candidate, division=replace(division, bounds=bounds))


def _moved(bounds: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    inner = range(1, len(bounds) - 1)
    for step in (1, -1, 2, -2):
        for place in inner:
            yield (*bounds[:place], bounds[place] + step, *bounds[place + 1 :])
    for step in (1, -1):
        for first in inner:
            if first + 1 < len(bounds) - 1:
                yield (*bounds[:first], *(b + step for b in bounds[first:-1]), bounds[-1])


def _legal(bounds: tuple[int, ...], space: SearchSpace) -> bool:
    if bounds[-2] >= bounds[-1] or bounds[1] <= 0:
        return False
    masks = [space.legal_at(s) for s in range(len(bounds) - 1)] if space.request.pins else [space.legal] * len(bounds)
    return all(bool(masks[s][bounds[s], bounds[s + 1]]) for s in range(len(bounds) - 1))
