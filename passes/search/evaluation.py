"""Candidates, their evaluation by the event simulator, and the search that collects them.

A candidate lays its positions over the cluster (`layout`) and cuts the chain into `per_rank` stages for each of them.
With three positions and two stages each:

    loop   positions 0 1 2 0 1 2   (Megatron's interleaved schedule, SC 2021, section 2.2)
    v      positions 0 1 2 2 1 0   (Qi et al., "Pipeline Parallelism with Controllable Memory", NeurIPS 2024); with
                                   more stages on and on there and back

Candidates are decisions over blocks, so that evaluating one costs O(blocks + actions); the chosen one is estimated once
more over captured ops (`finalize`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import log2
from typing import NamedTuple

from autopart.ir.cluster import DEVICE_KINDS
from autopart.ir.decision import Decision, Stage
from autopart.ir.plan import Estimate
from autopart.passes.program.orders import ONE, placed
from autopart.passes.program.routing import tied, with_forward_only
from autopart.passes.program.schedules import find
from autopart.passes.search.fitting import fit, partly_whole, without_room
from autopart.passes.search.layout import Layout, in_proportion
from autopart.passes.search.recomputation import Fitted
from autopart.passes.search.space import SearchSpace, Watch, is_other
from autopart.passes.simulation.estimate import simulated_ns, stage_estimates

SHARING = 0.02
"""Replicas share the optimizer state where memory does not demand it if the step gets shorter by at least this part, as
predicted steps are not worth more; and its messages, one or more for each large parameter, are charged by their bytes
alone."""
DOUBLING = 0.02
"""A plan whose micro-batches pass twice the devices is chosen if it saves at least this part of the step: predictions
are off by more (benchmarks/results/prediction.json), while each device is one more hop, and one more that all others
wait for.  For 15 stages instead of 16 it is 0.2 %.  Stages of one rank share its device."""
OTHER_ORDER = 0.02
"""A schedule that is not of 1F1B's family is chosen if it saves at least this part of the step."""


@dataclass(frozen=True)
class Candidate:
    """The choices of the search; memory decides the rest.

    bounds, widths, latency_ns, first: those of a `Partition`; widths are those of positions.  per_rank: stages of each
    position.  placement: ONE, LOOP or V.  order: computes of each worker (`Decision.order`); (): the schedule's own.
    recompute: the groups of each stage with which the order was found; (): as memory demands.  whole: stages whose
    backwards are not split in any case.
    """

    bounds: tuple[int, ...]
    widths: tuple[int, ...]
    latency_ns: int
    first: int
    layout: Layout
    micro_rows: tuple[int, ...]
    schedule: str
    token_slices: tuple[int, ...] = ()
    per_rank: int = 1
    placement: str = ONE
    order: tuple[str, ...] = ()
    recompute: tuple[tuple[tuple[str, ...], ...], ...] = ()
    whole: tuple[int, ...] = ()

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for candidates that are the same plan."""
        return self.bounds, self.ranks, self.micro_rows, self.schedule, self.token_slices, self.order

    @property
    def stages(self) -> int:
        """Number of stages."""
        return len(self.widths) * self.per_rank

    def preference(self, step_ns: int, kind: str) -> float:
        """Return the criterion by which plans are chosen, less is better.

        It is the step, with a penalty for each doubling of the devices that a micro-batch passes, and for a schedule
        that is not of 1F1B's family one for its further computes and another one.  kind: of device."""
        longer = (1 + DOUBLING) ** log2(len(self.widths))
        if self.other_order:
            each = self.per_rank * (3 if find(self.schedule).splits else 2)
            step_ns += len(self.micro_rows) * (each - 2) * DEVICE_KINDS[kind].compute_ns
            longer *= 1 + OTHER_ORDER
        return float(step_ns * longer)

    @property
    def other_order(self) -> str:
        """Its schedule if that is not of 1F1B's family (`orders`), else ""."""
        return self.schedule if is_other(self.schedule) else ""

    @property
    def most_replicas(self) -> int:
        """The devices of the stage that has most."""
        return self.layout.pipeline_replicas * max(self.widths)

    @property
    def ranks(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of each stage."""
        starts = accumulate(self.widths, initial=self.first)
        ranks = [self.layout.ranks(start, width) for start, width in zip(starts, self.widths, strict=False)]
        homes = placed(self.placement, self.stages, len(ranks)) or range(len(ranks))
        return tuple([ranks[home] for home in homes])


class Proposal(NamedTuple):
    """A candidate and the space whose blocks it cuts."""

    space: SearchSpace
    candidate: Candidate


@dataclass(frozen=True)
class Evaluation:
    """A candidate with its memory and its time.

    space: the one whose blocks it cuts.  decision: over blocks.  estimates: of its stages.  step_ns: simulated.
    over_bytes: by how much the worst device's memory is exceeded, 0 when all fit.  stage: the one on that device.
    """

    space: SearchSpace
    candidate: Candidate
    decision: Decision
    estimates: tuple[Estimate, ...]
    step_ns: int
    over_bytes: int
    stage: int

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for evaluations of the same plan on the same chain."""
        return self.space.chain.n, *self.candidate.key

    @property
    def stages(self) -> int:
        """Number of stages."""
        return self.candidate.stages

    @property
    def preference(self) -> float:
        """The criterion by which it is chosen, less is better."""
        return self.candidate.preference(self.step_ns, self.space.costs.cluster.kind)

    @property
    def fits(self) -> bool:
        """Whether every stage fits its devices."""
        return self.over_bytes == 0


def evaluate(space: SearchSpace, candidate: Candidate, spare_bytes: Sequence[int] = ()) -> Evaluation:
    """Evaluate a candidate over the blocks of this space, with as much recomputed as the memory demands.

    Where it has replicas and the request leaves that open, they share the optimizer state if the candidate does not fit
    otherwise, or if that makes it faster by `SHARING`.  Where backwards are split, some may be whole: those of stages
    without room for what W keeps (`partly_whole`).  spare_bytes: of each stage, memory to leave free.
    O(blocks + actions).
    """
    request, estimator = space.request, space.costs
    found = [fitted(space, candidate, int(request.zero == 1), spare_bytes)]
    first = found[0]
    if without_room(first) and not candidate.order and find(candidate.schedule).splits:
        every = replace(candidate, whole=tuple(range(candidate.stages)))
        found += partly_whole(space, first, fitted(space, every, first.decision.zero, spare_bytes), spare_bytes)
    if request.may_shard and candidate.most_replicas > 1 and not first.decision.zero:
        sharing = replace(first.decision, zero=1)  # needs less memory
        found.append(replace(first, decision=sharing, estimates=stage_estimates(sharing, first.links, estimator)))
    shared = tied(first.decision, space.chain.blocks) if space.may_be_tied else ()
    steps = [simulated_ns(f.decision, f.estimates, f.links, shared, estimator, whole=False) for f in found]
    step_ns, best = min(
        zip(steps, found, strict=True),
        key=lambda pair: (max(0, *pair[1].excess), pair[0] * (1 + SHARING * pair[1].decision.zero)),
    )
    worst = max(range(len(best.excess)), key=lambda s: best.excess[s])
    return Evaluation(space, candidate, best.decision, best.estimates, step_ns, max(0, best.excess[worst]), worst)


def fitted(space: SearchSpace, candidate: Candidate, zero: int, spare_bytes: Sequence[int] = ()) -> Fitted:
    """Fit a candidate into memory by sharing the optimizer state and then by recomputation, without simulating it.

    On unlike devices it has equal shares or shares in proportion to speed, whichever has the faster slowest stage.
    zero: 1 if replicas share the optimizer state in any case.  O(blocks), and once for each stage the choice of what it
    recomputes.
    """
    decision = staged(space, candidate, zero)
    unequal = in_proportion(decision, space.costs, space.request.least_rows)
    found = [fit(space, each, spare_bytes) for each in dict.fromkeys((decision, unequal))]
    return min(found, key=lambda f: (max(0, *f.excess), max(e.fwd_ns + e.bwd_ns for e in f.estimates)))


def staged(space: SearchSpace, candidate: Candidate, zero: int) -> Decision:
    """Return the decision of a candidate over blocks, without what memory demands.  O(blocks)."""
    request, names = space.request, [op.name for op in space.chain.blocks.ops]
    asked = candidate.recompute or [space.asked_of(names[a:b]) for a, b in pairwise(candidate.bounds)]
    chosen = zip(pairwise(candidate.bounds), candidate.ranks, asked, strict=True)
    stages = tuple(
        Stage(
            tuple(names[a:b]),
            ranks,
            groups,
            policy=request.policy if len(ranks) > 1 else "split",
            whole_backward=s in candidate.whole,
        )
        for s, ((a, b), ranks, groups) in enumerate(chosen)
    )
    decision = Decision(
        space.costs.cluster.world,
        stages,
        candidate.micro_rows,
        candidate.schedule,
        zero,
        candidate.token_slices or request.fixed_slices,
        bucket_bytes=request.bucket_bytes,
        order=candidate.order,
    )
    return with_forward_only(decision, space.learning)


# ---- the search ----------------------------------------------------------------------------------------------------


class Search:
    """One search: its spaces, and everything that it has evaluated.

    coarse: a chain of few blocks, for pipelines of at most `layout.SMALL` positions.  fine: one of more blocks, for
    deeper pipelines and for refinement; it can be cut wherever coarse can, and small models have one for both.  asked:
    like fine, but its request may name several stages a rank.  watch: called on progress.  proposals: of the dynamic
    programs.  fitting: evaluations that fit, by plan.  other_orders: whether plans outside 1F1B's family were tried.
    """

    def __init__(self, coarse: SearchSpace, fine: SearchSpace, watch: Watch | None = None) -> None:
        self.coarse, self.fine, self.asked = coarse.with_one_per_rank(), fine.with_one_per_rank(), fine
        self._watch = watch
        self.proposals: list[Proposal] = []
        self.fitting: dict[tuple[object, ...], Evaluation] = {}
        self.other_orders = False
        self._known: dict[tuple[object, ...], Evaluation] = {}

    def tell(self, what: str) -> None:
        """Report progress."""
        if self._watch:
            self._watch(what, self.best_ns, 0)

    @property
    def count(self) -> int:
        """Candidates evaluated so far."""
        return len(self._known)

    def evaluated(self, space: SearchSpace, candidate: Candidate) -> Evaluation:
        """Return the evaluation of a candidate, made once; it is not among the results."""
        key = space.chain.n, *candidate.key
        if key not in self._known:
            self._known[key] = evaluate(space, candidate)
        return self._known[key]

    def evaluate(self, space: SearchSpace, candidate: Candidate) -> Evaluation:
        """Return the evaluation of a candidate, which becomes one of the results."""
        evaluation = self.evaluated(space, candidate)
        if evaluation.fits:
            self.fitting[evaluation.key] = evaluation
        return evaluation

    @property
    def nearest(self) -> Evaluation | None:
        """Of the evaluations that do not fit the one that lacks least."""
        return next(iter(self._lacking), None)

    @property
    def _lacking(self) -> list[Evaluation]:
        return sorted((e for e in self._known.values() if not e.fits), key=lambda e: e.over_bytes)

    @property
    def ranked(self) -> list[Evaluation]:
        """The evaluations that fit, fastest first; equals by number of stages, then in the order of evaluation."""
        return sorted(self.fitting.values(), key=lambda e: (e.step_ns, e.stages))

    @property
    def best(self) -> Evaluation | None:
        """The fastest that fits, None while there is none."""
        return next(iter(self.ranked), None)

    @property
    def best_ns(self) -> int:
        """The step of the fastest that fits, 0 while there is none."""
        return min((e.step_ns for e in self.fitting.values()), default=0)

    @property
    def seen(self) -> list[Evaluation]:
        """The fastest that fits of every (number of stages, of those a rank, replicas of the first stage, schedule
        outside 1F1B's family), fastest first."""
        return _first_of_each(
            self.ranked, lambda e: (e.stages, e.candidate.per_rank, len(e.candidate.ranks[0]), e.candidate.other_order)
        )

    def keep_asked(self) -> None:
        """Drop results whose schedule or stages a rank the request does not allow: they served to find others."""
        request = self.asked.request

        def is_asked(plan: Candidate) -> bool:
            return request.schedule in ("auto", plan.schedule) and plan.per_rank in request.numbers_per_rank

        if not request.is_free:
            self._known = {key: e for key, e in self._known.items() if is_asked(e.candidate)}
            self.fitting = {key: e for key, e in self.fitting.items() if key in self._known}

    def finalists(self, most: int, *, by_kind: bool = False, schedule: str = "") -> list[Evaluation]:
        """Return the fastest of 1F1B's family with different numbers of stages, pipelines or rows, one of a single
        stage; if none fits the nearest.  by_kind: also with other orders of unlike devices.  schedule: only with it."""
        family, lacking = (
            [e for e in some if not e.candidate.other_order and schedule in ("", e.candidate.schedule)]
            for some in (self.ranked, self._lacking)
        )
        devices, types = self.fine.costs.cluster.devices, self.fine.costs.device_types

        def shape(e: Evaluation) -> object:
            plan = e.candidate
            kinds = [sorted(types.index(devices[rank]) for rank in ranks) for ranks in plan.ranks] if by_kind else []
            numbers = plan.stages, plan.layout.pipeline_replicas, len(plan.micro_rows)
            return plan.stages > 1 and (*numbers, *map(tuple, kinds))

        shapes = _first_of_each(family or lacking[:1], shape)
        return shapes[:most]


def _first_of_each(evaluations: list[Evaluation], shape: Callable[[Evaluation], object]) -> list[Evaluation]:
    found: dict[object, Evaluation] = {}
    for evaluation in evaluations:
        found.setdefault(shape(evaluation), evaluation)
    return list(found.values())
