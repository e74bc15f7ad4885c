"""Evaluation of candidates by the event simulator, and the search that collects them.

Candidates are decisions over blocks, so that evaluating one costs O(blocks + actions); the one that is taken is
estimated once more over captured ops (`finalize`).
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from math import log2

from autopart.ir.plan import Decision, Estimate, Stage
from autopart.ir.program import Edge
from autopart.ir.size import Size
from autopart.passes.program.routing import edges, tied
from autopart.passes.search.layout import Layout, in_proportion
from autopart.passes.search.partition import Partition
from autopart.passes.search.recomputation import StageBlocks, Way, least_recomputed
from autopart.passes.search.space import SearchSpace, SearchSpaces, Watch
from autopart.passes.simulation.estimate import excess_of, message_bytes, simulated_ns, stage_contexts, stage_estimates
from autopart.passes.simulation.stage_costs import Estimator, StageContext

DOUBLING = 0.02
"""A plan with twice the stages is taken where that makes the step shorter by at least this part: predicted steps are
off by more than that from measured ones (benchmarks/results/prediction.json), while each stage is one more hop for
every micro-batch, and one more device that all others wait for.  For 15 stages instead of 16 it is 0.2 %."""


def preference(step_ns: int, stages: int) -> float:
    """What plans are chosen by, the least first: their steps, and something for each doubling of the stages."""
    return float(step_ns * (1 + DOUBLING) ** log2(stages))


@dataclass(frozen=True)
class Candidate:
    """Everything that is decided."""

    partition: Partition
    layout: Layout
    micro_rows: tuple[int, ...]
    schedule: str
    token_slices: tuple[int, ...] = ()

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for candidates that are the same plan."""
        return self.partition.bounds, self.ranks, self.micro_rows, self.schedule, self.token_slices

    @property
    def has_replicas(self) -> bool:
        """Whether a stage has several devices."""
        return self.layout.pipeline_replicas * max(self.partition.widths) > 1

    @property
    def ranks(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of each stage."""
        return tuple(self.layout.ranks(start, width) for _, _, start, width in self.partition.ranges())


@dataclass(frozen=True)
class Evaluation:
    """space: whose blocks these are.  decision: over blocks; estimates: of its stages.  step_ns: simulated.
    over_bytes: by how much the worst device's memory is exceeded, 0 when all fit; stage: the worst one."""

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
        return self.candidate.partition.stages

    @property
    def preference(self) -> float:
        """What it is chosen by, less is better."""
        return preference(self.step_ns, self.stages)

    @property
    def fits(self) -> bool:
        """Whether every stage fits its devices."""
        return self.over_bytes == 0


@dataclass(frozen=True)
class Fitted:
    """A candidate that is not simulated.  decision: over blocks; flows: its edges; estimates, excess_bytes: of its
    stages, the latter what each needs beyond what it may use, negative where it fits."""

    decision: Decision
    flows: tuple[Edge, ...]
    estimates: tuple[Estimate, ...]
    excess_bytes: tuple[int, ...]


def _slowest(fitted: Fitted) -> tuple[int, int]:
    """What is worst where, of those that differ in shares alone: bytes too many, and nanoseconds."""
    return max(0, *fitted.excess_bytes), max(e.fwd_ns + e.bwd_ns for e in fitted.estimates)


class Evaluator:
    """Evaluates candidates and remembers the results: all that is remembered while one plan is searched is here.

    It serves the spaces of one request, told apart by their numbers of blocks.  spare_bytes: of each stage, for
    candidates with so many stages: left free on its devices, where blocks are known to say too little.
    """

    def __init__(self, spare_bytes: Sequence[int] = ()) -> None:
        self._spare_bytes = tuple(spare_bytes)
        self._estimators: dict[int, Estimator] = {}
        self._evaluations: dict[tuple[object, ...], Evaluation] = {}
        self._recomputing: dict[tuple[int, int, StageContext], Stage] = {}
        self._ways: dict[Hashable, dict[int, list[Way]]] = {}  # equal layers are grouped alike in every stage

    def __call__(self, space: SearchSpace, candidate: Candidate) -> Evaluation:
        """Evaluate the candidate over the blocks of this space, with as much recomputed as the memory demands.

        Where it has replicas and the request leaves that open, they share the optimizer's state if the candidate does
        not fit otherwise, or if that makes it faster.  O(blocks + actions), and O(stages) when it was evaluated before.
        """
        key = (space.chain.n, *candidate.key)
        if key not in self._evaluations:
            self._evaluations[key] = self._evaluate(space, candidate)
        return self._evaluations[key]

    @property
    def count(self) -> int:
        """Candidates evaluated so far."""
        return len(self._evaluations)

    def _estimator(self, space: SearchSpace) -> Estimator:
        """Estimates over the space's blocks."""
        if space.chain.n not in self._estimators:
            costs = replace(space.costs, cost_model=space.chain)
            self._estimators[space.chain.n] = Estimator(costs, space.loads)
        return self._estimators[space.chain.n]

    def estimator(self, space: SearchSpace) -> Estimator:
        """Estimates over the space's blocks, to propose slices by."""
        return self._estimator(space)

    def fitted(self, space: SearchSpace, candidate: Candidate, zero: int) -> Fitted:
        """Fit the candidate into memory by sharing the optimizer's state and then by recomputation, without simulating
        it.  On unlike devices it has equal shares or shares in proportion, whichever has the faster slowest stage.

        zero: 1 where replicas share the optimizer's state in any case.  O(blocks), and what it takes to choose what
        each stage recomputes, once for each.
        """
        estimator, request = self._estimator(space), space.request
        names = [op.name for op in space.chain.blocks.ops]
        stages = tuple(
            Stage(
                tuple(names[a:b]),
                ranks,
                space.asked_of(names[a:b]),
                policy=request.policy if len(ranks) > 1 else "split",
            )
            for (a, b, _, _), ranks in zip(candidate.partition.ranges(), candidate.ranks, strict=True)
        )
        decision = Decision(
            space.costs.cluster.world,
            stages,
            candidate.micro_rows,
            candidate.schedule,
            zero,
            candidate.token_slices or request.fixed_slices,
            bucket_bytes=request.bucket_bytes,
        )
        found = self._fit(space, candidate, decision)
        unequal = in_proportion(decision, estimator, request.least_rows)
        return found if unequal == decision else min(found, self._fit(space, candidate, unequal), key=_slowest)

    def _fit(self, space: SearchSpace, candidate: Candidate, decision: Decision) -> Fitted:
        """A decision over blocks, of which stages, ranks and rows are settled, with what memory demands."""
        estimator, request = self._estimator(space), space.request
        flows = edges(decision, space.chain.blocks)

        def contexts(decision: Decision) -> list[StageContext]:
            sizes = message_bytes(flows, estimator.graph(Size(max(decision.micro_rows)), 0))
            return stage_contexts(decision, sizes)

        everything = request.recompute == "all" and request.may_recompute
        if everything:
            each = (self._add_recompute(space, stage, context) for stage, context in enumerate(contexts(decision)))
            decision = replace(decision, stages=tuple(each))
        estimates = stage_estimates(decision, flows, estimator)
        excess = excess_of(decision, flows, estimator, self._spare_bytes)
        if max(excess) > 0 and request.may_shard and candidate.has_replicas and not decision.zero:
            decision = replace(decision, zero=1)
            estimates = stage_estimates(decision, flows, estimator)
            excess = excess_of(decision, flows, estimator, self._spare_bytes)
        if max(excess) > 0 and request.may_recompute and not everything:  # not simulated yet: memory needs no time
            each = (
                self._add_recompute(space, stage, context) if excess[stage] > 0 else context.stage
                for stage, context in enumerate(contexts(decision))
            )
            decision = replace(decision, stages=tuple(each))
            estimates = stage_estimates(decision, flows, estimator)
            excess = excess_of(decision, flows, estimator, self._spare_bytes)
        return Fitted(decision, flows, estimates, tuple(excess))

    def arriving_ns(self, space: SearchSpace, fitted: Fitted) -> list[int]:
        """Nanoseconds of the messages into each stage, of the slowest sender, both ways, alone on their ports."""
        index = self._estimator(space).graph(Size(max(fitted.decision.micro_rows)), 0)
        ranks = [stage.ranks for stage in fitted.decision.stages]
        slowest = [0] * len(ranks)
        for edge in fitted.flows:
            both_ways = sum(
                space.loads.p2p(senders, receivers).alone_ns(sum([index.values[name] for name in names]))
                for senders, receivers, names in (
                    (ranks[edge.src], ranks[edge.dst], edge.values),
                    (ranks[edge.dst], ranks[edge.src], edge.grads),
                )
            )
            slowest[edge.dst] = max(slowest[edge.dst], both_ways)
        return slowest

    def _evaluate(self, space: SearchSpace, candidate: Candidate) -> Evaluation:
        request, estimator = space.request, self._estimator(space)
        found = [self.fitted(space, candidate, int(request.zero == 1))]
        if request.may_shard and candidate.has_replicas and not found[0].decision.zero:
            shared, flows = replace(found[0].decision, zero=1), found[0].flows
            estimates = stage_estimates(shared, flows, estimator)
            found.append(Fitted(shared, flows, estimates, found[0].excess_bytes))  # it needs less memory
        shared_params = tied(found[0].decision, space.chain.blocks) if space.may_be_tied else ()
        steps = [simulated_ns(f.decision, f.estimates, f.flows, shared_params, estimator) for f in found]
        step_ns, fitted = min(zip(steps, found, strict=True), key=lambda pair: pair[0])
        excess = fitted.excess_bytes
        worst = max(range(len(excess)), key=lambda s: excess[s])
        return Evaluation(space, candidate, fitted.decision, fitted.estimates, step_ns, max(0, excess[worst]), worst)

    def _add_recompute(self, space: SearchSpace, stage: int, context: StageContext) -> Stage:
        """The stage with the quickest recomputation that makes it fit, each found once.  stage: its number."""
        spare = self._spare_bytes[stage] if self._spare_bytes else 0
        key = space.chain.n, spare, context
        if key not in self._recomputing:
            self._recomputing[key] = self._least_recomputed(space, spare, context)
        return self._recomputing[key]

    def _least_recomputed(self, space: SearchSpace, spare: int, context: StageContext) -> Stage:
        estimator, names = self._estimator(space), context.stage.ops
        size = Size(context.stage.division.largest_part(context.rows))
        graph = estimator.graph(size, 0)
        crossing = dict(zip(graph.ops, space.chain.range_costs(size).crossing.tolist(), strict=False))
        costs = [graph.ops[name].cost for name in names]
        saved = [0 if name in space.asked else c.saved_bytes for name, c in zip(names, costs, strict=True)]
        blocks = StageBlocks(
            names,
            tuple(saved),
            tuple([c.fwd_ns for c in costs]),
            tuple([c.tail_ns for c in costs]),
            tuple([crossing[name] for name in names]),
            space.costs.group_ns,
        )
        limit = space.costs.cluster.least_memory_bytes(context.stage.ranks) - spare
        everything = space.request.recompute == "all"
        return least_recomputed(context, blocks, estimator, limit, everything=everything, known=self._ways)


# ---- the search ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SearchResult:
    """best: the fastest that fits, if any.  nearest: of those that do not fit the one that lacks least.
    seen: the fastest of every (number of stages, replicas of the first stage) that fits, for explanations."""

    best: Evaluation | None
    nearest: Evaluation | None
    seen: tuple[Evaluation, ...]


class Search:
    """One search: what it chooses from, and everything that it has evaluated.

    watch: told of progress.  fitting: what fits, by plan.  nearest: of the others the one that lacks least.
    """

    def __init__(self, spaces: SearchSpaces, watch: Watch | None = None) -> None:
        self.spaces = spaces
        self.evaluator = Evaluator()
        self._watch = watch
        self.fitting: dict[tuple[object, ...], Evaluation] = {}
        self.nearest: Evaluation | None = None

    def tell(self, what: str) -> None:
        """Tell whoever watches what has just been done."""
        if self._watch:
            self._watch(what, self.best_ns, 0)

    def evaluate(self, space: SearchSpace, candidate: Candidate) -> Evaluation:
        """The evaluation of a candidate, which is noted."""
        evaluation = self.evaluator(space, candidate)
        self._note(evaluation)
        return evaluation

    def _note(self, evaluation: Evaluation) -> None:
        if evaluation.fits:
            self.fitting[evaluation.key] = evaluation
        elif self.nearest is None or evaluation.over_bytes < self.nearest.over_bytes:
            self.nearest = evaluation

    @property
    def ranked(self) -> list[Evaluation]:
        """Those that fit, fastest first; of equals the fewest stages, then the one that was evaluated first."""
        return sorted(self.fitting.values(), key=lambda e: (e.step_ns, e.candidate.partition.stages))

    @property
    def best_ns(self) -> int:
        """Step of the fastest that fits, 0 while there is none."""
        return min((e.step_ns for e in self.fitting.values()), default=0)

    def finalists(self, most: int) -> list[Evaluation]:
        """The fastest with different numbers of stages, pipelines or rows; the nearest when none fits."""
        chosen: dict[tuple[object, ...], Evaluation] = {}
        pool = self.ranked or ([self.nearest] if self.nearest else [])
        for evaluation in pool:
            candidate = evaluation.candidate
            shape = candidate.partition.stages, candidate.layout.pipeline_replicas, len(candidate.micro_rows)
            chosen.setdefault(shape, evaluation)
        return list(chosen.values())[:most]

    @property
    def preferred(self) -> list[Evaluation]:
        """Of each number of stages the fastest that fits, in the order of `preference`."""
        found: dict[int, Evaluation] = {}
        for evaluation in self.ranked:
            found.setdefault(evaluation.stages, evaluation)
        return sorted(found.values(), key=lambda e: e.preference)

    def result(self) -> SearchResult:
        """What the search returns."""
        ranked = self.ranked
        seen: dict[tuple[int, int], Evaluation] = {}
        for evaluation in ranked:
            shape = evaluation.candidate.partition.stages, len(evaluation.candidate.ranks[0])
            seen.setdefault(shape, evaluation)
        return SearchResult(ranked[0] if ranked else None, self.nearest, tuple(seen.values()))
