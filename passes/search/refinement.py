"""Refinement: steepest descent from a candidate, by moving cuts, devices and rows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, pairwise

from autopart.passes.search.archive import Archive
from autopart.passes.search.evaluation import Candidate, Evaluation
from autopart.passes.search.space import SearchSpace
from autopart.passes.simulation.estimate import played


def refined(evaluation: Evaluation, archive: Archive, effort: int) -> Evaluation:
    """Where steepest descent over `_neighbours`, and where that is cheap over cuts anywhere, ends.

    effort: simulated actions that it may cost.  All that is evaluated goes into the archive.
    """
    space, best = evaluation.space, evaluation
    budget = effort // actions_of(evaluation.candidate)
    while budget > 0:
        tried = []
        near = _neighbours(best.candidate, space)
        if budget > 2 * space.chain.n:
            near = chain(near, _with_one_cut_anywhere(best.candidate, space))
        for candidate in near:
            before = archive.evaluator.count
            tried.append(archive.evaluate(space, candidate))
            budget -= archive.evaluator.count - before
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
