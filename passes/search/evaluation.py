"""The judge: what a candidate would really need and take, by the event simulator.

Candidates are plans over blocks, so that judging one costs O(blocks + actions); the one that is taken is estimated
once more over captured ops (`pipeline`).
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, replace

from autopart.ir.plan import Decision, Estimate, Stage
from autopart.passes.program.routing import edges, tied
from autopart.passes.search.layout import Layout
from autopart.passes.search.partition import Partition
from autopart.passes.search.space import SearchSpace
from autopart.passes.simulation.estimate import (
    StageContext,
    message_bytes,
    seats,
    simulated_ns,
    stage_estimate,
    stage_estimates,
)


@dataclass(frozen=True)
class Candidate:
    """Everything that is decided."""

    division: Partition
    layout: Layout
    micro_rows: tuple[int, ...]
    schedule: str

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for candidates that are the same plan."""
        return self.division.bounds, self.ranks, self.micro_rows, self.schedule

    @property
    def ranks(self) -> tuple[tuple[int, ...], ...]:
        """Ranks of each stage."""
        return tuple(self.layout.ranks(start, width) for _, _, start, width in self.division.ranges())


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
        """Equal for verdicts of the same plan on the same line."""
        return self.space.chain.n, *self.candidate.key

    @property
    def fits(self) -> bool:
        """Whether every stage fits its devices."""
        return self.over_bytes == 0


class Evaluator:
    """Judges candidates of one space; remembers what it judged.  O(blocks + actions) each.

    spare_bytes: left free on every device, where blocks are known to say too little.
    """

    def __init__(self, space: SearchSpace, spare_bytes: int = 0) -> None:
        self.space, self._spare_bytes = space, spare_bytes
        self.setting = replace(space.costs, costs_at=space.chain.graph)
        self._known: dict[tuple[object, ...], Evaluation] = {}
        self._leaned: dict[StageContext, Stage] = {}

    def __call__(self, candidate: Candidate) -> Evaluation:
        """The verdict, with as much recomputation as the memory demands."""
        if candidate.key not in self._known:
            self._known[candidate.key] = self._judged(candidate)
        return self._known[candidate.key]

    @property
    def count(self) -> int:
        """Candidates judged so far."""
        return len(self._known)

    def _judged(self, candidate: Candidate) -> Evaluation:
        blocks = self.space.chain.blocks
        names = [op.name for op in blocks.ops]
        stages = tuple(
            Stage(tuple(names[a:b]), ranks)
            for (a, b, _, _), ranks in zip(candidate.division.ranges(), candidate.ranks, strict=True)
        )
        world, recompute = self.setting.cluster.world, self.space.request.recompute
        decision = Decision(world, stages, candidate.micro_rows, candidate.schedule)
        links, shared = edges(decision, blocks), tied(decision, blocks)
        if recompute == "all" and self.space.request.may_recompute:
            decision = replace(decision, stages=tuple(replace(s, recompute=(s.ops,)) for s in stages))
        estimates = stage_estimates(decision, links, self.setting)
        over = self._over(decision, estimates)
        if max(over) > 0 and self.space.request.may_recompute:  # before it is simulated: memory needs no time
            sizes = message_bytes(links, self.setting.book(max(decision.micro_rows), 0))
            seated = zip(seats(decision, sizes), over, strict=True)
            leaner = tuple([self._lean(seat) if excess > 0 else seat.stage for seat, excess in seated])
            decision = replace(decision, stages=leaner)
            estimates = stage_estimates(decision, links, self.setting)
            over = self._over(decision, estimates)
        step = simulated_ns(decision, estimates, links, shared, self.setting)
        worst = max(range(len(over)), key=lambda s: over[s])
        return Evaluation(self.space, candidate, decision, estimates, step, max(0, over[worst]), worst)

    def _over(self, decision: Decision, estimates: tuple[Estimate, ...]) -> list[int]:
        return [e.peak_bytes - self._limit(stage) for e, stage in zip(estimates, decision.stages, strict=True)]

    def _limit(self, stage: Stage) -> int:
        return self.setting.cluster.least_memory_bytes(stage.ranks) - self._spare_bytes

    def _lean(self, seat: StageContext) -> Stage:
        """`_leaner`, each found once."""
        if seat not in self._leaned:
            self._leaned[seat] = self._leaner(seat)
        return self._leaned[seat]

    def _leaner(self, seat: StageContext) -> Stage:
        """The stage with the fewest recomputed blocks that make it fit; all as one group where that is not enough.

        In order of bytes freed per nanosecond of forward (Piper, NeurIPS 2021, section 5.2, chooses so too); how many
        is found by halving, each time with the stage's own estimate.
        """
        stage, limit = seat.stage, self._limit(seat.stage)
        rows = -(-seat.rows // len(stage.ranks))
        share = self.setting.book(rows, 0)
        crossing = dict(zip(share.ops, self.space.chain.sheet(rows).crossing.tolist(), strict=False))
        cost = {name: share.ops[name].cost for name in stage.ops}
        gain = {name: c.saved_bytes - crossing[name] for name, c in cost.items()}
        order = sorted((n for n in stage.ops if gain[n] > 0), key=lambda n: (-gain[n] / max(1, cost[n].fwd_ns), n))

        def leaner(count: int) -> Stage:
            chosen = set(order[:count])
            return replace(stage, recompute=tuple((n,) for n in stage.ops if n in chosen))

        def fits(count: int) -> bool:
            return stage_estimate(replace(seat, stage=leaner(count)), self.setting).peak_bytes <= limit

        if not order or not fits(len(order)):
            return replace(stage, recompute=(stage.ops,))
        return leaner(bisect_left(range(1, len(order)), True, key=fits) + 1)
