"""Sequences cut into slices, for the best plans so far: lengths by the dynamic program, and even ones.

The lengths minimise the time of a pipeline whose stages take alpha_k * t (`passes.tokens.lengths`), with the share of
the plan's stages that slices take (`simulation.slices`).  The result is simulated like every other candidate, under
every schedule that takes slices, and has to be clearly faster than whole sequences.

TeraPipe cuts batch and tokens in one program (section 3.4), of which all published results share one token cut among
all micro-batches, as ours must.  For equal micro-batches that is the best over their numbers of the best cut of one: so
the best plan is tried with every allowed number of micro-batches, few of which are best for whole sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np

from autopart.ir.errors import InfeasibleError
from autopart.passes.program.schedules import find
from autopart.passes.search.evaluation import Candidate, Evaluation, Search, evaluate
from autopart.passes.search.refinement import actions_of, with_even_cuts
from autopart.passes.tokens.lengths import Ints, cut_tokens, other_stages, slice_times

SLICED = 6
"""Plans of different shapes that are tried with slices."""
CELLS = 64
"""Places between which a sequence may be cut."""
EVEN_COUNTS = (2, 4, 8)
"""Numbers of even slices that are tried in addition to the dynamic program's."""
LONGEST = 250_000
"""Actions of a plan with slices; where more micro-batches fill a longer program, slices have nothing left to fill."""
WORTH = 0.97
"""Slices are chosen if the simulated step is below this part of the step with whole sequences: the gain has to pay for
overheads of a slice that the simulation leaves out."""


class NothingSaved(InfeasibleError):
    """A search for plans in slices alone (`PlanRequest.only_slices`) found none that is clearly faster."""


def evaluate_slices(search: Search, effort: int) -> None:
    """Evaluate the best plans with slices, where the request leaves them open.  O(SLICED * cells^2), and programs."""
    request = search.coarse.request
    if request.token_slices != "auto" or request.token_axis is None or not search.fitting:
        return
    limit = WORTH * search.best_ns
    for place, found in enumerate(search.finalists(SLICED)):
        wholes, plan = [found], found.candidate
        # Even cuts are no faster for few whole sequences, but for slices they are.
        even = with_even_cuts(plan, search.fine) if found.stages > 1 else None
        if even is not None:
            wholes.append(search.evaluate(search.fine, even))
        for micro_rows in found.space.request.micro_rows if not place else ():
            if micro_rows != plan.micro_rows and request.most_replicas(micro_rows) >= plan.most_replicas:
                wholes.append(search.evaluated(found.space, replace(plan, micro_rows=micro_rows)))
        for whole in wholes:
            for candidate in _sliced(whole):
                actions = actions_of(candidate)
                if actions > LONGEST or (effort < actions and search.fitting):
                    continue
                effort -= actions
                sliced = search.evaluated(whole.space, candidate)
                if sliced.step_ns < limit and sliced.fits:
                    search.evaluate(whole.space, candidate)
        search.tell("slices of sequences")
    # What is tried later changes the order of computes, and no whole sequences into slices.
    if request.only_slices and not any(each.candidate.token_slices for each in search.fitting.values()):
        raise NothingSaved("no plan in slices of sequences is clearly faster than whole ones")


def slices_of(whole: Evaluation) -> Evaluation | None:
    """Return the fastest way that fits to cut the sequences of a plan into slices, or None."""
    found = [evaluate(whole.space, candidate) for candidate in _sliced(whole)]
    return min((e for e in found if e.fits), key=lambda e: e.step_ns, default=None)


def whole_of(sliced: Evaluation) -> Evaluation | None:
    """Return the fastest schedule that fits for a plan with its sequences whole, or None."""
    space = replace(sliced.space, request=replace(sliced.space.request, token_slices=()))
    own = sliced.candidate.other_order
    names = (own,) if own else space.request.schedules
    candidates = [replace(sliced.candidate, token_slices=(), schedule=name) for name in names]
    found = [evaluate(space, candidate) for candidate in candidates]
    return min((e for e in found if e.fits), key=lambda e: e.step_ns, default=None)


def _sliced(whole: Evaluation) -> Iterator[Candidate]:
    """Yield a pipeline with the dynamic program's slices and with even ones, under each schedule that takes slices."""
    request, tokens = whole.space.request, whole.space.costs.slices.tokens
    if request.token_axis is None or whole.stages < 2 or whole.candidate.other_order:
        return
    step = request.token_step * -(-tokens // (CELLS * request.token_step))
    found = [_best_lengths(whole, step)]
    found += [even_lengths(tokens, n, request.token_step) for n in EVEN_COUNTS if n <= tokens // step]
    for lengths in dict.fromkeys(lengths for lengths in found if len(lengths) > 1):
        for schedule in request.schedules:
            if find(schedule).sliced:
                yield replace(whole.candidate, token_slices=lengths, schedule=schedule)


def even_lengths(tokens: int, count: int, step: int = 1) -> tuple[int, ...]:
    """Return the lengths of `count` slices, multiples of `step` as even as possible; () for one."""
    ends = [tokens // step * i // count * step for i in range(count + 1)]
    return tuple(b - a for a, b in pairwise(ends)) if count > 1 else ()


def _best_lengths(whole: Evaluation, step: int) -> tuple[int, ...]:
    """Return the dynamic program's lengths, multiples of step, for the slowest stage of the plan."""
    loads, shares = whole.space.costs.loads, whole.space.costs.slices
    stage_ns = [e.fwd_ns + e.bwd_ns for e in whole.estimates]
    slowest = max(range(len(stage_ns)), key=stage_ns.__getitem__)
    known, stage = whole.estimates[slowest], whole.decision.stages[slowest]
    blocks = whole.space.chain.blocks.op_map()
    ops = {part for name in stage.ops for part in blocks[name].parts or (name,)}
    paces = [loads.p2p(one.ranks, two.ranks).pace for one, two in pairwise(whole.decision.stages)]
    latency_ns, ns_per_byte = max(paces)
    token_bytes = max(known.in_bytes, known.out_bytes) / shares.tokens

    def cost(lengths: Ints, contexts: Ints) -> Ints:
        taken = shares.stage_ns(ops, known.fwd_ns, lengths, contexts, backward=False)
        taken = taken + shares.stage_ns(ops, known.bwd_ns, lengths, contexts, backward=True)
        return np.asarray(taken + 2 * (latency_ns + ns_per_byte * token_bytes * lengths)).astype(np.int64)

    times = slice_times(cost, shares.tokens, step)
    ends = cut_tokens(times, len(whole.candidate.micro_rows), other_stages(stage_ns))
    return tuple(b - a for a, b in pairwise((0, *(min(end * step, shares.tokens) for end in ends))))
