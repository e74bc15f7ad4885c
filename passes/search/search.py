"""The steps of the search, in the order in which `pipeline.search` takes them.

0. Where all candidates together are few, each of them is evaluated, and that is all.
1. For every way to cut the batch and every layout, the best partition for each number of stages (`proposals`).
2. The most promising by pipeline latency are evaluated (`evaluation`), the best of them under every schedule and layout
   of the same depth.
3. From the best few, cuts move by a block and widths by a device as long as the simulated step gets shorter; where
   that ends close to the best, once more with finer blocks (`refinement`).  Of long programs all cuts move at once
   (`balance`).

The order of trying and every limit is a count, never a clock: the same request gives the same plan everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import accumulate

import numpy as np

from autopart.ir.size import Size
from autopart.passes.graph.cuts import Ints
from autopart.passes.search.evaluation import Candidate, Evaluation, Search
from autopart.passes.search.layout import layouts
from autopart.passes.search.proposals import HOPELESS, Proposal, enumerate_all, with_equal_stages
from autopart.passes.search.refinement import actions_of, balanced, finer, is_legal, refined
from autopart.passes.search.space import SearchSpace, fastest_sums

PROMISING = 12
"""Proposals that are evaluated, besides the best one of each number of pipelines."""
VARIED = 4
"""Evaluated candidates that are tried under all schedules and layouts."""
LEAST_VARIANTS = 5
"""Variants of each of these that are tried however long their programs are."""
REFINED = 3
"""Evaluated candidates that are refined."""
HOPEFUL, CLOSE = 1.04, 1.005
"""How far above the best a candidate may be to be refined, and to be refined over more blocks after that over few."""
FAR_FEWER = 0.75
"""The part of the preferred stages that a candidate may have at most to be refined in order to be preferred itself."""
EVEN = 8
"""Even cuts may be off by this part of a device's share of the work, where less crosses."""
FEW = 4
"""Micro-batches for each stage up to which the pipeline latency misjudges stages so much that equal ones are tried."""
EFFORT = 250_000
"""Actions that may be simulated in refining, and in comparing schedules and layouts."""


# ---- small spaces --------------------------------------------------------------------------------------------------


def evaluate_all(search: Search) -> bool:
    """Evaluate every candidate where they are few.  Whether that was done, and some plan is allowed at all."""
    spaces = search.spaces
    candidates = None if spaces.differ else enumerate_all(spaces.coarse)
    for candidate in candidates or ():
        search.evaluate(spaces.coarse, candidate)
    return bool(candidates)


# ---- proposals -----------------------------------------------------------------------------------------------------


def evaluate_promising(search: Search, proposals: list[Proposal]) -> None:
    """Evaluate the promising, as long as they are not hopeless and effort is left or nothing fits."""
    effort = EFFORT
    for space, candidate in _promising(proposals):
        latency_ns = candidate.partition.pipeline_latency_ns
        hopeless = bool(search.fitting) and latency_ns > HOPELESS * search.best_ns
        if not hopeless and (effort > 0 or not search.fitting):
            search.evaluate(space, candidate)
            effort -= actions_of(candidate)
        search.tell("evaluate")


def _by_latency(proposals: list[Proposal]) -> list[Proposal]:
    """Ties stay in the order of trying."""
    return sorted(proposals, key=lambda proposal: proposal.candidate.partition.pipeline_latency_ns)


def _promising(proposals: list[Proposal]) -> list[Proposal]:
    """The best of each number of stages and of pipelines, so that every shape of plan is evaluated, and the best of
    all."""
    ranked = _by_latency(proposals)
    chosen: dict[int, None] = {}
    shapes: set[tuple[int, int]] = set()
    for place, (_, candidate) in enumerate(ranked):
        shape = min(candidate.partition.stages, 4), candidate.layout.pipeline_replicas
        if shape not in shapes and len(shapes) < 2 * PROMISING:
            shapes.add(shape)
            chosen[place] = None
    chosen |= dict.fromkeys(range(min(PROMISING, len(ranked))))
    return [ranked[place] for place in chosen]


def evaluate_for_comparison(search: Search, proposals: list[Proposal]) -> None:
    """Evaluate also, for explanations, a stage fewer and more than the best has, and the best without replicas."""
    if not search.fitting:
        return
    stages = search.ranked[0].candidate.partition.stages
    wanted: tuple[Callable[[Candidate], bool], ...] = (
        lambda candidate: candidate.partition.stages == stages - 1,
        lambda candidate: candidate.partition.stages == stages + 1,
        _is_pipeline_without_replicas,
    )
    ranked = _by_latency(proposals)
    for is_wanted in wanted:
        found = next((proposal for proposal in ranked if is_wanted(proposal.candidate)), None)
        if found is not None:
            search.evaluate(*found)


def _is_pipeline_without_replicas(candidate: Candidate) -> bool:
    partition = candidate.partition
    return partition.stages > 1 and candidate.layout.pipeline_replicas == max(partition.widths) == 1


# ---- variants ------------------------------------------------------------------------------------------------------


def evaluate_variants(search: Search) -> None:
    """The fastest under all schedules and layouts, as far as effort reaches, and with even cuts."""
    effort = EFFORT
    for evaluation in search.finalists(VARIED):
        candidate, space = evaluation.candidate, evaluation.space
        variants = list(_variants(space, candidate))
        actions = actions_of(candidate)
        tried = variants[: max(LEAST_VARIANTS, effort // actions)]
        for variant in tried:
            search.evaluate(space, variant)
        effort -= len(tried) * actions
        even = with_even_cuts(candidate, search.spaces.fine)
        if even is not None:
            search.evaluate(search.spaces.fine, even)
        if candidate.partition.stages > 1 and len(candidate.micro_rows) <= FEW * candidate.partition.stages:
            for balanced in with_equal_stages(candidate, search.spaces.fine, search.best_ns):
                search.evaluate(search.spaces.fine, balanced)
        search.tell("schedules and layouts")


def _variants(space: SearchSpace, candidate: Candidate) -> Iterator[Candidate]:
    """The candidate under each schedule and each layout of as many pipelines."""
    request, partition = space.request, candidate.partition
    same_shape = [
        layout
        for layout in layouts(space.costs.cluster, replicas=request.may_replicate, wanted=request.copies)
        if layout.pipeline_replicas == candidate.layout.pipeline_replicas and layout.order == candidate.layout.order
    ]
    schedules = request.schedules if partition.stages > 1 else request.schedules[:1]
    for schedule in sorted(schedules, key=lambda name: name != candidate.schedule):  # of a stable order
        for layout in same_shape:
            for first in sorted({0, partition.first}):
                moved = replace(partition, first=first)
                yield replace(candidate, partition=moved, layout=layout, schedule=schedule)


def with_even_cuts(candidate: Candidate, space: SearchSpace) -> Candidate | None:
    """The same with as much work for each device, cut where little crosses: the pipeline latency leaves waiting for
    slow stages out."""
    widths = candidate.partition.widths
    if space.request.pins or len(widths) > space.chain.n:
        return None
    rows = max(candidate.micro_rows)
    sums, crossing = fastest_sums(space, rows), space.chain.range_costs(Size(rows)).crossing
    devices, bounds = sum(widths), [0]
    for done in accumulate(widths[:-1]):
        first = bounds[-1] + 1  # the boundaries that are left
        off = np.abs(sums[first:-1] - sums[-1] * done / devices)
        if not len(off):
            return None
        near = np.flatnonzero(off <= max(off.min(), sums[-1] / devices / EVEN))
        bounds.append(first + _cheapest(near, crossing[first:], off))
    ends = (*bounds, space.chain.n)
    if not is_legal(ends, space):
        return None
    return replace(candidate, partition=replace(candidate.partition, bounds=ends))


def _cheapest(places: np.ndarray[tuple[int, ...], np.dtype[np.intp]], crossing: Ints, off: Ints) -> int:
    """Of these places the one that the fewest bytes cross; of equals the one that is off the least."""
    return int(min(places, key=lambda place: (crossing[place], off[place])))


# ---- refinement ----------------------------------------------------------------------------------------------------


def refine_best(search: Search) -> None:
    """Refine the fastest, and those that may be preferred to them (`evaluation.preference`), best first."""
    done = set()
    for evaluation in search.finalists(REFINED):
        done.add(evaluation.stages)
        if not search.fitting or evaluation.step_ns <= HOPEFUL * search.best_ns:
            _refine(search, evaluation)
        search.tell("refine")
    for evaluation in search.preferred[:REFINED]:
        preferred = search.preferred[0]
        is_near = evaluation.preference <= HOPEFUL * preferred.preference
        is_apart = evaluation.stages <= FAR_FEWER * preferred.stages
        if evaluation.stages not in done and (evaluation is preferred or (is_near and is_apart)):
            done.add(evaluation.stages)
            _refine(search, evaluation)
            search.tell("refine")


def _refine(search: Search, evaluation: Evaluation) -> None:
    """Refine one, and once more over more blocks what comes close to the best."""
    near, fine = _refined_over_its_blocks(search, evaluation), search.spaces.fine
    if near.space.chain.n < fine.chain.n and (not search.fitting or _is_close(search, near)):
        _refined_over_its_blocks(search, search.evaluate(fine, finer(near, fine)))


def _refined_over_its_blocks(search: Search, evaluation: Evaluation) -> Evaluation:
    """The candidate refined; first all cuts at once, where programs are too long to move them one by one."""
    moves = EFFORT // REFINED // actions_of(evaluation.candidate)
    is_long = moves < 2 * evaluation.stages
    return refined(search, balanced(search, evaluation) if is_long else evaluation, EFFORT // REFINED)


def _is_close(search: Search, evaluation: Evaluation) -> bool:
    """Whether more blocks may make it the fastest, or the preferred one."""
    preferred = CLOSE * search.preferred[0].preference
    return evaluation.step_ns <= CLOSE * search.best_ns or evaluation.preference <= preferred
