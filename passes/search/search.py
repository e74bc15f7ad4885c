"""The steps of the search, in the order in which `pipeline.search` takes them.

0. Where all candidates together are few, each of them is evaluated, and the search ends.
1. For every way to cut the batch and every layout, the best partition for each number of stages (`proposals`).
2. The most promising by pipeline latency are evaluated (`evaluation`), the best of them under every schedule and layout
   of the same depth.
3. From the best few, cuts move by a block and widths by a device as long as the simulated step gets shorter; if the
   result is close to the best, once more with finer blocks (`refinement`).  Of long programs all cuts move at once.

Every limit is a count, never a clock: the same request gives the same plan everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

from autopart.passes.search.evaluation import Candidate, Evaluation, Proposal, Search
from autopart.passes.search.layout import layouts
from autopart.passes.search.proposals import HOPELESS, enumerate_all, rearranged, with_equal_stages
from autopart.passes.search.refinement import actions_of, balanced, finer, refined, with_even_cuts
from autopart.passes.search.space import SearchSpace

PROMISING = 12
"""Proposals that are evaluated, besides the best one of each number of pipelines."""
VARIED = 4
"""Evaluated candidates that are tried under all schedules and layouts."""
LEAST_VARIANTS = 5
"""Variants of each of these that are tried however long their programs are."""
REFINED = 3
"""Evaluated candidates that are refined, which share the effort; twice as many where devices are unlike."""
HOPEFUL, CLOSE = 1.04, 1.005
"""How far above the best a candidate may be to be refined, and to be refined once more over finer blocks."""
FEW = 4
"""Micro-batches per stage up to which equal stages are tried too, since the pipeline latency misjudges them."""
EFFORT = 250_000
"""Actions that may be simulated in evaluating proposals."""
SHORT = 10_000
"""Actions up to which a proposal is evaluated whatever others took: deep pipelines come first where they promise as
much as shorter ones, and one of 128 stages takes it all."""


# ---- small spaces --------------------------------------------------------------------------------------------------


def evaluate_all(search: Search) -> bool:
    """Evaluate every candidate if they are few; return whether there were any and they were evaluated."""
    candidates = None if search.fine.chain.n > search.coarse.chain.n else enumerate_all(search.coarse)
    for candidate in candidates or ():
        search.evaluate(search.coarse, candidate)
    return bool(candidates)


# ---- proposals -----------------------------------------------------------------------------------------------------


def evaluate_promising(search: Search) -> None:
    """Evaluate the promising proposals that are not hopeless, while effort is left or nothing fits."""
    effort = EFFORT
    for space, candidate in _promising(search.proposals):
        hopeless = bool(search.fitting) and candidate.latency_ns > HOPELESS * search.best_ns
        actions = actions_of(candidate)
        if not hopeless and (effort > 0 or actions <= SHORT or not search.fitting):
            search.evaluate(space, candidate)
            effort -= actions
            # Groups are few, of few and coarse blocks each: of 12 stages some would have an eighth more than others.
            even = with_even_cuts(candidate, search.fine) if space.request.shards > 1 else None
            if even is not None:
                search.evaluate(search.fine, even)
        search.tell("evaluate")


def _by_latency(proposals: list[Proposal]) -> list[Proposal]:
    """Return the proposals by pipeline latency; ties stay in the order of trying."""
    return sorted(proposals, key=lambda proposal: proposal.candidate.latency_ns)


def _promising(proposals: list[Proposal]) -> list[Proposal]:
    """Return the best of each number of stages and of pipelines, so that every shape is evaluated, and the best."""
    ranked = _by_latency(proposals)
    chosen: dict[int, None] = {}
    shapes: set[tuple[int, int]] = set()
    for place, (_, candidate) in enumerate(ranked):
        shape = min(candidate.stages, 4), candidate.layout.pipeline_replicas
        if shape not in shapes and len(shapes) < 2 * PROMISING:
            shapes.add(shape)
            chosen[place] = None
    chosen |= dict.fromkeys(range(min(PROMISING, len(ranked))))
    return [ranked[place] for place in chosen]


def evaluate_for_comparison(search: Search, effort: int) -> None:
    """Evaluate, for explanations, a stage fewer and more than the best has, and the best without replicas.

    effort: proposals.
    """
    if search.best is None:
        return
    stages = search.best.stages
    wanted: tuple[Callable[[Candidate], bool], ...] = (
        lambda candidate: candidate.stages == stages - 1,
        lambda candidate: candidate.stages == stages + 1,
        lambda candidate: candidate.stages > 1 and candidate.most_replicas == 1,
    )
    ranked = _by_latency(search.proposals)
    for is_wanted in wanted[:effort]:
        found = next((proposal for proposal in ranked if is_wanted(proposal.candidate)), None)
        if found is not None:
            search.evaluate(*found)


# ---- variants ------------------------------------------------------------------------------------------------------


def evaluate_layouts(search: Search, effort: int) -> None:
    """Evaluate the fastest under all schedules and layouts, as far as effort allows, and with even cuts."""
    fine = search.fine
    for evaluation in search.finalists(VARIED):
        candidate, space = evaluation.candidate, evaluation.space
        actions = actions_of(candidate)
        tried = list(_variants(space, candidate))[: max(LEAST_VARIANTS, effort // actions)]
        for variant in tried:
            search.evaluate(space, variant)
        effort -= len(tried) * actions
        even = with_even_cuts(candidate, fine)
        if even is not None:
            search.evaluate(fine, even)
        if candidate.stages > 1 and len(candidate.micro_rows) <= FEW * candidate.stages:
            for equal in with_equal_stages(candidate, fine, search.best_ns):
                search.evaluate(fine, equal)
        search.tell("schedules and layouts")


def evaluate_arrangements(search: Search, effort: int) -> None:
    """Evaluate the fastest with unlike positions in other orders, as long as that makes the step shorter.

    effort: simulated actions.
    """
    for evaluation in search.finalists(VARIED):
        best = evaluation
        while effort > 0:
            near = list(rearranged(best.candidate, best.space))
            effort -= len(near) * actions_of(best.candidate)
            tried = [search.evaluate(best.space, candidate) for candidate in near]
            better = min((e for e in tried if e.fits), key=lambda e: e.step_ns, default=best)
            if better.step_ns >= best.step_ns:
                break
            best = better
        search.tell("orders of unlike devices")


def _variants(space: SearchSpace, candidate: Candidate) -> Iterator[Candidate]:
    """Yield the candidate under each schedule and each layout of as many pipelines."""
    request = space.request
    same_shape = [
        layout
        for layout in layouts(
            space.costs.cluster,
            replicas=request.may_replicate,
            wanted=request.copies,
            orders=(candidate.layout.order,),
        )
        if layout.pipeline_replicas == candidate.layout.pipeline_replicas
    ]
    schedules = request.schedules if candidate.stages > 1 else request.schedules[:1]
    for schedule in sorted(schedules, key=lambda name: name != candidate.schedule):  # its own first
        for layout in same_shape:
            for first in sorted({0, candidate.first}):
                yield replace(candidate, first=first, layout=layout, schedule=schedule)


# ---- refinement ----------------------------------------------------------------------------------------------------


def refine_best(search: Search, effort: int) -> None:
    """Refine the fastest, and those that come close to the best, or the preferred one, once more over finer blocks."""
    fine, effort = search.fine, effort // REFINED  # each
    unlike = len(fine.costs.device_types) > 1
    for evaluation in search.finalists(2 * REFINED if unlike else REFINED, by_kind=unlike):
        if not search.fitting or evaluation.step_ns <= HOPEFUL * search.best_ns:
            near = _refined_over_its_blocks(search, evaluation, effort)
            preferred = min([e.preference for e in search.fitting.values()], default=math.inf)
            is_close = near.step_ns <= CLOSE * search.best_ns or near.preference <= CLOSE * preferred
            if near.space.chain.n < fine.chain.n and (not search.fitting or is_close):
                _refined_over_its_blocks(search, search.evaluate(fine, finer(near, fine)), effort)
        search.tell("refine")


def _refined_over_its_blocks(search: Search, evaluation: Evaluation, effort: int) -> Evaluation:
    """Refine the candidate; first all cuts at once, where programs are too long to move them one by one."""
    is_long = effort // actions_of(evaluation.candidate) < 2 * evaluation.stages
    return refined(search, balanced(search, evaluation) if is_long else evaluation, effort)
