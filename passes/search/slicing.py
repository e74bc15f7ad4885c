"""Sequences cut into slices, of the best plans that were found: lengths by the dynamic program, and even ones.

The lengths minimise the time of a pipeline whose stages take alpha_k * t (`passes.tokens.lengths`), with what slices
take of the stages of the plan (`simulation.slices`); what comes out of it is simulated like every other candidate,
under every schedule that takes slices, and has to be clearly faster than whole sequences.

TeraPipe cuts batch and tokens in one program (section 3.4), of which all published results share one token cut among
all micro-batches, as ours must.  Of equal micro-batches that is the best over their numbers of the best cut of one: so
the best plan is tried with every number of micro-batches that is allowed, few of which are best for whole sequences.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np

from autopart.passes.program.schedules import find, takes_slices
from autopart.passes.search.evaluation import Candidate, Evaluation, Evaluator, Search
from autopart.passes.search.search import with_even_cuts
from autopart.passes.simulation.slices import SliceShares
from autopart.passes.simulation.stage_costs import Estimator
from autopart.passes.tokens.lengths import Ints, cut_tokens, other_stages, slice_times

SLICED = 6
"""Plans that are tried with slices: the best of as many shapes."""
CELLS = 64
"""Places between which a sequence may be cut."""
EVEN_COUNTS = (2, 4, 8)
"""Numbers of even slices that are tried beside the dynamic program's."""
WORTH = 0.97
"""Slices are taken where the simulated step is below this part of that of whole sequences: what a slice costs beyond
what is known of it (launches, joined states) has to be paid by what it gains."""


def evaluate_slices(search: Search) -> None:
    """Evaluate the best plans with slices, where the request leaves them open.  O(SLICED * cells^2), and programs."""
    request = search.spaces.coarse.request
    if request.token_slices != "auto" or request.token_axis is None or not search.fitting:
        return
    limit = WORTH * search.best_ns
    for place, found in enumerate(search.finalists(SLICED)):
        others = _other_micros(search, found) if not place else ()
        for whole in (found, *_evened(search, found), *others):
            if not _can_be_sliced(whole):
                continue
            for candidate in _sliced(whole, search.evaluator.estimator(whole.space)):
                sliced = search.evaluator(whole.space, candidate)
                if sliced.step_ns < limit and _can_be_sliced(sliced):
                    search.evaluate(whole.space, candidate)
        search.tell("slices of sequences")


def _evened(search: Search, found: Evaluation) -> list[Evaluation]:
    """The same with even cuts, which for few whole sequences are no faster, but are for slices."""
    fine = search.spaces.fine
    even = with_even_cuts(found.candidate, fine) if found.candidate.partition.stages > 1 else None
    return [] if even is None else [search.evaluate(fine, even)]


def _other_micros(search: Search, found: Evaluation) -> Iterator[Evaluation]:
    """The same with the batch cut into other numbers of micro-batches."""
    request, candidate = found.space.request, found.candidate
    most = candidate.layout.pipeline_replicas * max(candidate.partition.widths)
    for micro_rows in request.micro_rows:
        if micro_rows != candidate.micro_rows and request.most_replicas(micro_rows) >= most:
            yield search.evaluator(found.space, replace(candidate, micro_rows=micro_rows))


def _can_be_sliced(found: Evaluation) -> bool:
    """Whether there is a pipeline to fill."""
    return len(found.decision.stages) > 1 and (found.fits or not found.candidate.token_slices)


def slices_of(whole: Evaluation, evaluator: Evaluator) -> Evaluation | None:
    """The fastest that fits of a plan with its sequences in slices; None where there is none."""
    if not _can_be_sliced(whole):
        return None
    candidates = _sliced(whole, evaluator.estimator(whole.space))
    found = [evaluator(whole.space, candidate) for candidate in candidates]
    return min((e for e in found if e.fits), key=lambda e: e.step_ns, default=None)


def whole_of(sliced: Evaluation, evaluator: Evaluator) -> Evaluation | None:
    """The fastest that fits of a plan with its sequences whole; None where there is none."""
    space = replace(sliced.space, request=replace(sliced.space.request, token_slices=()))
    candidates = [replace(sliced.candidate, token_slices=(), schedule=name) for name in space.request.schedules]
    found = [evaluator(space, candidate) for candidate in candidates]
    return min((e for e in found if e.fits), key=lambda e: e.step_ns, default=None)


def _sliced(whole: Evaluation, estimator: Estimator) -> Iterator[Candidate]:
    """The plan with the dynamic program's slices and with even ones, under each schedule that takes slices."""
    request, shares = whole.space.request, estimator.context.slices
    if shares is None:
        return
    step = -(-shares.tokens // CELLS)
    found = [_best_lengths(whole, estimator, shares, step)]
    found += [even_lengths(shares.tokens, count) for count in EVEN_COUNTS if count <= shares.tokens // step]
    for lengths in dict.fromkeys(lengths for lengths in found if len(lengths) > 1):
        for schedule in request.schedules:
            if takes_slices(find(schedule)):
                yield replace(whole.candidate, token_slices=lengths, schedule=schedule)


def even_lengths(tokens: int, count: int) -> tuple[int, ...]:
    """So many slices, as even as they can be; () for one."""
    ends = [tokens * i // count for i in range(count + 1)]
    return tuple(b - a for a, b in pairwise(ends)) if count > 1 else ()


def _best_lengths(whole: Evaluation, estimator: Estimator, shares: SliceShares, step: int) -> tuple[int, ...]:
    """The dynamic program's, for the slowest stage of the plan."""
    stage_ns = [e.fwd_ns + e.bwd_ns for e in whole.estimates]
    slowest = max(range(len(stage_ns)), key=stage_ns.__getitem__)
    known, stage = whole.estimates[slowest], whole.decision.stages[slowest]
    blocks = whole.space.chain.blocks.op_map()
    ops = {part for name in stage.ops for part in blocks[name].parts or (name,)}
    paces = [estimator.loads.p2p(one.ranks, two.ranks).pace for one, two in pairwise(whole.decision.stages)]
    latency_ns, ns_per_byte = max(paces)
    token_bytes = max(known.in_bytes, known.out_bytes) / shares.tokens

    def cost(rows: int, lengths: Ints, contexts: Ints) -> Ints:
        taken = shares.stage_ns(ops, known.fwd_ns, lengths, contexts, backward=False)
        taken = taken + shares.stage_ns(ops, known.bwd_ns, lengths, contexts, backward=True)
        return np.asarray(taken + 2 * (latency_ns + ns_per_byte * token_bytes * lengths)).astype(np.int64)

    times = slice_times(cost, 1, shares.tokens, step)
    micros = len(whole.candidate.micro_rows)
    ((_, lengths), *_) = cut_tokens(times, micros, other_stages(stage_ns)).micro_batches
    return lengths
