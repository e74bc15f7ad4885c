"""Several stages a rank for pipelines of equal positions: plans that 1F1B's family would not choose.

With v stages a rank a pipeline of p positions fills in 1 / v of the time, so that longer pipelines and larger
micro-batches pay than under 1F1B.  The best plans of that family, on which other orders are tried (`orders`), are then
not the best to begin with: few stages, some with more replicas than others, which no loop can pass several times.  So
of each number of pipelines the partitions with a position for each stage are taken that promise most,

    (micro-batches + (p - 1) / v) * time of a position for one of them,

with the largest v, are evaluated, and tried under each order with several stages a rank.  That time is first the one
that the partition found, with recomputation by a closed form, and then the mean of the evaluated stages.

Assumed, and wrong where: several stages a rank hold as much for their backwards as one.
"""

from __future__ import annotations

from collections import Counter

from autopart.passes.program.named import SEARCHED
from autopart.passes.search.evaluation import Evaluation, Proposal, Search
from autopart.passes.search.refinement import actions_of
from autopart.passes.search.variants.orders import may_gain, promising, under, under_order, ways, with_enough_blocks

TRIED, ALIKE = 8, 2
"""Partitions that are evaluated, and those of each number of pipelines, which have different micro-batches."""


def evaluate_several(search: Search, effort: int) -> None:
    """Evaluate pipelines of equal positions under the orders with several stages a rank that the request allows.

    effort: simulated actions, shared evenly.
    """
    allowed = [way for way in ways(search.asked.request) if way.per_rank > 1 and way.schedule != SEARCHED]
    tried = [search.evaluate(*each) for each in equal_positions(search)[:TRIED]] if allowed and search.fitting else []
    most = max(search.asked.request.numbers_per_rank)
    for found in sorted((each for each in tried if each.fits), key=lambda each: promised_ns(each, most)):
        fine, left = with_enough_blocks(search.asked, len(found.candidate.widths)), effort // len(tried)
        if not may_gain(found, fine):
            continue
        search.other_orders = True
        for way in promising(allowed, found, search, fine):
            actions = actions_of(under_order(way, found))
            if actions > left:
                continue
            for candidate in under(way, found, fine):
                left -= actions
                search.evaluate(fine, candidate)
        search.tell("several stages a rank")


def equal_positions(search: Search) -> list[Proposal]:
    """Return the proposals with a position for each stage that may be faster than the best plan with several stages a
    rank, those that promise most first."""
    most = max(search.asked.request.numbers_per_rank)
    promised: dict[tuple[int, int], tuple[float, int]] = {}  # by number of pipelines and of micro-batches
    for place, (_, candidate) in enumerate(search.proposals):
        positions, micros, copies = len(candidate.widths), len(candidate.micro_rows), candidate.layout.pipeline_replicas
        if positions < max(2, candidate.layout.depth):
            continue
        left = (micros + (positions - 1) / most) / (micros + positions - 1)
        promise = candidate.latency_ns * left, place
        promised[copies, micros] = min(promise, promised.get((copies, micros), promise))
    chosen, numbers = list[Proposal](), Counter[int]()
    for (copies, _), (step_ns, place) in sorted(promised.items(), key=lambda item: item[1]):
        numbers[copies] += 1
        if numbers[copies] <= ALIKE and step_ns < search.best_ns:
            chosen.append(search.proposals[place])
    return chosen


def promised_ns(found: Evaluation, per_rank: int) -> float:
    """Return about what the step of a plan takes with so many stages a rank, with what it recomputes."""
    each_ns = sum([e.fwd_ns + e.bwd_ns for e in found.estimates]) / len(found.estimates)
    return (len(found.candidate.micro_rows) + (len(found.estimates) - 1) / per_rank) * each_ns
