"""Small planning problems, and the exhaustive search that the planner is held against.

Costs of a problem grow along a line with the rows, from a fixed time for each op on; a kind of device is slower than
the fastest by a whole factor, so that nothing is lost to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, pairwise, permutations
from random import Random

from hypothesis import strategies as st

from autopart.ir.cluster import Cluster, Device, Level, Link
from autopart.ir.cost import Cost
from autopart.ir.errors import InfeasibleError, PlanError
from autopart.ir.graph import Graph, Op
from autopart.ir.plan import Decision, Estimate, Plan, Stage, check_decision
from autopart.ir.size import Size
from autopart.passes.graph.atoms import atoms
from autopart.passes.graph.chain import BlockChain
from autopart.passes.graph.coarsen import coarsen
from autopart.passes.graph.cuts import forced_bounds, module_span
from autopart.passes.pipeline import PlannerInput, build
from autopart.passes.program.routing import route
from autopart.passes.program.schedules import AUTOMATIC
from autopart.passes.search.evaluation import Candidate, Evaluation, evaluate
from autopart.passes.search.layout import Layout
from autopart.passes.search.partition import Partition
from autopart.passes.search.space import PlanRequest, SearchSpace
from autopart.passes.simulation.estimate import estimate
from autopart.passes.simulation.stage_costs import Estimator, device_types
from support.languages.graphs import ComputedCosts, graph

FASTEST = 10**12


@dataclass(frozen=True)
class Problem:
    """model: its costs are those of one row on the fastest kind, `launch` nanoseconds per pass beside them."""

    model: Graph
    cluster: Cluster
    request: PlanRequest
    launch: int = 0

    def costs_at(self, rows: int, kind: int) -> Graph:
        """The model at a number of rows on a kind of device."""
        slower = FASTEST // device_types(self.cluster)[kind].flops_per_s
        values = tuple(replace(v, size_bytes=v.size_bytes * rows) for v in self.model.values)
        ops = tuple(replace(op, cost=self._cost(op.cost, rows, slower)) for op in self.model.ops)
        return replace(self.model, size=Size(rows), values=values, ops=ops)

    @property
    def cost_model(self) -> ComputedCosts:
        """`costs_at` as the planner asks for it."""
        return ComputedCosts(self.costs_at)

    def _cost(self, one: Cost, rows: int, slower: int) -> Cost:
        times = [slower * (self.launch + rows * t) if t else 0 for t in (one.fwd_ns, one.bwd_ns)]
        return Cost(*times, one.saved_bytes * rows, one.scratch_bytes * rows, one.flops * rows)

    @property
    def source(self) -> PlannerInput:
        """What `build` plans for: a capture at the largest number of rows that is asked for."""
        rows = max(self.request.micro_rows[0])
        return PlannerInput(self.costs_at(rows, 0), self.cost_model, torch_version="")

    @property
    def space(self) -> SearchSpace:
        """The chain that the planner cuts; every op is a block, but those that share an updated buffer."""
        captured = self.source.graph
        fine = atoms(captured)
        ends = {place for paths in self.request.keep_together() for place in module_span(fine, paths)} - {len(fine.ops)}
        blocks = coarsen(fine, blocks=64, cuts=self.request.cuts, also=tuple(sorted(ends)))
        most = max(max(rows) for rows in self.request.micro_rows)
        chain = BlockChain(blocks, captured, self.cost_model, most)
        costs = Estimator(self.cluster, chain, self.request.state_factor, overlap=True)
        cuts = forced_bounds(blocks, fine, self.request.cuts)
        return SearchSpace(chain, costs, self.request.normalized(), fine, cuts)


# ---- exhaustive search ---------------------------------------------------------------------------------------------


def partitions(n: int, depth: int, widths: tuple[int, ...]) -> Iterator[Partition]:
    """Every way to cut n blocks and to give each stage one of these widths, of `depth` positions in all."""
    for stages in range(1, min(n, depth) + 1):
        for inner in combinations(range(1, n), stages - 1):
            for chosen in _vectors(stages, depth, widths):
                yield Partition((0, *inner, n), chosen)


def _vectors(stages: int, depth: int, widths: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    if not stages:
        yield ()
        return
    for width in widths:
        if width <= depth:
            yield from ((width, *rest) for rest in _vectors(stages - 1, depth - width, widths))


def orders(cluster: Cluster) -> list[tuple[int, ...]]:
    """Every order of the devices, one of those that differ in nothing but names."""
    seen: dict[object, tuple[int, ...]] = {}
    for order in permutations(range(cluster.world)):
        apart = tuple(cluster.level(a, b) for a, b in combinations(order, 2))
        seen.setdefault((tuple(cluster.devices[rank] for rank in order), apart), order)
    return list(seen.values())


def candidates(space: SearchSpace) -> Iterator[Candidate]:
    """Everything the request allows: every partition, on the devices in every order, idle ones last."""
    request, cluster = space.request, space.costs.cluster
    grounds = [Layout(1, cluster.world, 1, order) for order in orders(cluster)]
    widths = tuple(range(1, cluster.world + 1)) if request.may_replicate else (1,)
    for partition in partitions(space.chain.n, cluster.world, widths):
        for micro_rows in request.micro_rows:
            if not allowed(partition, micro_rows, space):
                continue
            for schedule in request.schedules if len(partition.widths) > 1 else request.schedules[:1]:
                found = {c.key: c for c in (Candidate(*partition, layout, micro_rows, schedule) for layout in grounds)}
                yield from found.values()


def allowed(partition: Partition, micro_rows: tuple[int, ...], space: SearchSpace) -> bool:
    """Whether a partition is one that the request asks for."""
    request = space.request
    if request.stages not in (None, len(partition.widths)) or max(partition.widths) > max(micro_rows):
        return False
    masks = [space.legal_at(s) for s in range(len(partition.widths))]
    legal = all(mask[a, b] for mask, (a, b) in zip(masks, pairwise(partition.bounds), strict=True))
    pinned = all(stage < len(partition.widths) for stage in request.pins.values())
    return legal and pinned and request.replicas_of(len(partition.widths)) in (None, partition.widths)


def exhaustive(space: SearchSpace) -> Evaluation | None:
    """The fastest candidate that fits."""
    evaluations = (evaluate(space, candidate) for candidate in candidates(space))
    return min((e for e in evaluations if e.fits), key=lambda e: e.step_ns, default=None)


def assignments(blocks: Graph, stages: int) -> Iterator[tuple[tuple[str, ...], ...]]:
    """Every way to put the blocks into stages so that nothing flows back, in whatever order the line has them."""
    writer = blocks.writer()

    def grow(ops: tuple[Op, ...], home: dict[str, int]) -> Iterator[dict[str, int]]:
        if not ops:
            yield home
            return
        low = max((home[writer[r]] for r in ops[0].reads if r in writer), default=0)
        for stage in range(low, stages):
            yield from grow(ops[1:], home | {ops[0].name: stage})

    for home in grow(blocks.ops, {}):
        if set(home.values()) == set(range(stages)):
            yield tuple(tuple(name for name, stage in home.items() if stage == s) for s in range(stages))


def fastest_assignment(space: SearchSpace) -> int | None:
    """The shortest step over all assignments of blocks to stages on single devices that fit, on ranks in order."""
    setting, world = space.costs, space.costs.cluster.world
    steps = [
        fitting_ns(Decision(world, own, micro_rows, schedule), setting)
        for stages in range(1, min(world, space.chain.n) + 1)
        for ops in assignments(space.chain.blocks, stages)
        for own in [tuple(Stage(names, (s,)) for s, names in enumerate(ops))]
        for micro_rows in space.request.micro_rows
        for schedule in space.request.schedules
    ]
    return min((step for step in steps if step is not None), default=None)


def fitting_ns(decision: Decision, setting: Estimator) -> int | None:
    """The simulated step of a decision, None where it may not be or does not fit."""
    graph = setting.graph(Size(max(decision.micro_rows))).graph
    try:
        check_decision(decision, graph)
    except PlanError:
        return None
    report = estimate(decision, route(decision, graph), setting)
    return report.step_ns if fits(decision.stages, report.estimates, setting.cluster) else None


def fits(stages: tuple[Stage, ...], estimates: tuple[Estimate, ...], cluster: Cluster) -> bool:
    """Whether no device is asked for more memory than it has.  An estimate is that of the device which needs most: with
    unequal shares of the rows that is one which has a large share, and others may have less memory."""
    limits = [[cluster.devices[rank].memory_bytes for rank in stage.ranks] for stage in stages]
    return all(
        estimate.peak_bytes <= (max(limit) if stage.shares else min(limit))
        for estimate, stage, limit in zip(estimates, stages, limits, strict=True)
    )


# ---- judging the planner -------------------------------------------------------------------------------------------


def planned(p: Problem) -> Plan | None:
    """The plan, or None where the planner says that there is none."""
    try:
        return build(p.source, p.cluster, p.request)
    except InfeasibleError:
        return None


def compare(p: Problem) -> float | None:
    """Check a problem's plan against exhaustive search: how much longer its step is, None where there is not a plan."""
    plan, best = planned(p), exhaustive(p.space)
    if plan is None or best is None:
        assert plan is None, "a plan where there is none"
        assert best is None, f"missed a plan of {best.step_ns} ns: {best.candidate}" if best else ""
        return None
    assert fits(plan.stages, plan.estimates, p.cluster)
    known = plan.optimality
    assert known is not None and known.objective == plan.step_ns
    assert known.lower_bound <= best.step_ns, f"bound above {best.candidate}"
    assert plan.step_ns - best.step_ns <= known.gap * plan.step_ns + 1
    return plan.step_ns / best.step_ns - 1 if best.step_ns else 0.0


def says(excess: float | None) -> str:
    """A class of results of `compare`."""
    if excess is None:
        return "infeasible"
    return "as fast" if excess <= 0 else f"slower by up to {1 if excess < 0.01 else 5 if excess < 0.05 else 100} %"


# ---- random problems -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """What random problems are like.  None: either."""

    least: int = 1
    most: int = 8
    devices: int = 4
    chain: bool | None = None
    replicas: bool | None = None
    recompute: bool | None = None
    mixed: bool | None = None
    roomy: bool = False


def either(random: Random, wish: bool | None) -> bool:
    """The wish, or a coin."""
    return random.random() < 0.5 if wish is None else wish


def model(random: Random, kind: Kind) -> Graph:
    """A chain or a DAG: free, cheap and heavy ops, small and large values, weights, some of them tied."""

    def amount() -> int:
        return random.choice([0, random.randint(1, 20), random.randint(20, 200)])

    straight = either(random, kind.chain)
    lines = []
    for i in range(random.randint(kind.least, kind.most)):
        reads = [f"v{i - 1}" if i else "x"]
        if not straight and i:
            pool = ["x", "y", *(f"v{k}" for k in range(i))]
            reads = random.sample(pool, random.randint(1, min(3, len(pool))))
        marks = f"#{amount()} ^{amount()} @m.{i}"
        marks += random.choice(["", "", f" +p{i}:{amount()}", " +tied:9"])
        marks += random.choice(["", "", f" ${amount()}"])
        lines.append(f"v{i}:{amount()}/{amount()} {marks} <- {' '.join(reads)}")
    return graph(";".join(lines))


def machines(random: Random, g: Graph, rows: int, kind: Kind) -> Cluster:
    """A few devices: of one or two speeds, with much, enough or little memory, slow and fast links."""
    world = random.randint(1, kind.devices)
    made = {w: op for op in g.ops for w in op.writes}
    need = sum(p.size_bytes * 4 for p in g.params)
    need += rows * sum(made[v.name].cost.saved_bytes + 3 * v.size_bytes for v in g.values if v.name in made)
    shares = random.choice([(None,), (None,), (0.9,), (0.6,), (0.4,), (0.3,), (0.8, 0.4, 0.2)])
    memories = [1 << 40 if share is None or kind.roomy else 1 + int(share * need) for share in shares]
    speeds = [1, random.choice([2, 3])] if either(random, kind.mixed) else [1]
    devices = tuple(
        Device("cpu", random.choice(memories), FASTEST // random.choice(speeds), 10**11) for _ in range(world)
    )

    def link() -> Link:
        return Link(random.choice([0, 3, 50]), random.choice([10**8, 10**9, 10**10, 10**11]))

    if world > 1 and random.random() < 0.5:
        return Cluster(devices, (Level(2, link()), Level(world + world % 2, link())))
    return Cluster(devices, (Level(world, link()),))


def split(rows: int, micros: int) -> tuple[int, ...]:
    """The rows of so many micro-batches, larger ones first."""
    return tuple(rows // micros + (i < rows % micros) for i in range(micros))


def problem(random: Random, kind: Kind = Kind()) -> Problem:
    """A random model on a random cluster under a random request."""
    g = model(random, kind)
    rows = random.randint(1, 6)
    counts = random.sample(range(1, rows + 1), random.randint(1, min(3, rows)))
    cluster = machines(random, g, rows, kind)
    request = PlanRequest(
        micro_rows=tuple(split(rows, count) for count in sorted(counts)),
        schedule=random.choice(["auto", "auto", *AUTOMATIC]),
        replicas=None if either(random, kind.replicas) else 1,
        recompute="auto" if either(random, kind.recompute) else "off",
        zero=random.choice(["auto", 0, 1]),
    )
    return Problem(g, cluster, request, launch=random.choice([0, 5]))


def problems(kind: Kind = Kind()) -> st.SearchStrategy[Problem]:
    """The same as a strategy.  Every example is drawn anew: hypothesis would try the same few small ones often."""
    return st.randoms(use_true_random=True).map(lambda random: problem(random, kind))


def two_kinds(
    world: int, *, fast: tuple[int, ...] = (), slower: int = 1, levels: tuple[tuple[int, int], ...] = ()
) -> Cluster:
    """Roomy devices of which all but `fast` are slower.  levels: (size, bytes/s) of each."""
    devices = tuple(Device("cpu", 1 << 40, FASTEST // (1 if r in fast else slower), 10**11) for r in range(world))
    return Cluster(devices, tuple(Level(size, Link(0, rate)) for size, rate in levels or ((world, 10**9),)))
