"""Small planning problems and an exhaustive search to compare the planner with.

The costs of a problem are linear in the rows plus a fixed time per op. Devices are slower than the fastest by integer
factors, so that nothing is lost to rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, pairwise, permutations
from random import Random

from hypothesis import strategies as st

from autopart.ir.cluster import Cluster, Device, Level, Link
from autopart.ir.errors import InfeasibleError, PlanError
from autopart.ir.graph import Cost, Graph, Op, Size
from autopart.ir.plan import Decision, Estimate, Plan, Stage, check_decision
from autopart.passes.graph.atoms import atoms
from autopart.passes.graph.chain import BlockChain
from autopart.passes.graph.coarsen import coarsen
from autopart.passes.graph.cuts import forced_bounds, module_span
from autopart.passes.pipeline import PlannerInput, build
from autopart.passes.program.named import FAMILY
from autopart.passes.program.routing import route
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
    """A planning problem.

    model: graph with the costs of one row on the fastest device type; launch: nanoseconds added to each pass.
    """

    model: Graph
    cluster: Cluster
    request: PlanRequest
    launch: int = 0

    def costs_at(self, rows: int, kind: int) -> Graph:
        """Return the model with costs for a number of rows on a device type."""
        slower = FASTEST // device_types(self.cluster)[kind].flops_per_s
        values = tuple(replace(v, size_bytes=v.size_bytes * rows) for v in self.model.values)
        ops = tuple(replace(op, cost=self._cost(op.cost, rows, slower)) for op in self.model.ops)
        return replace(self.model, size=Size(rows), values=values, ops=ops)

    @property
    def cost_model(self) -> ComputedCosts:
        """`costs_at` as a cost model of the planner."""
        return ComputedCosts(self.costs_at)

    def _cost(self, one: Cost, rows: int, slower: int) -> Cost:
        times = [slower * (self.launch + rows * t) if t else 0 for t in (one.fwd_ns, one.bwd_ns)]
        return Cost(*times, one.saved_bytes * rows, one.scratch_bytes * rows, one.flops * rows)

    @property
    def source(self) -> PlannerInput:
        """The planner input: a capture at the largest requested number of rows."""
        rows = max(self.request.micro_rows[0])
        return PlannerInput(self.costs_at(rows, 0), self.cost_model, torch_version="")

    @property
    def space(self) -> SearchSpace:
        """The search space. Every op is a block, except ops that share an updated buffer."""
        captured = self.source.graph
        fine = atoms(captured)
        ends = {place for paths in self.request.keep_together() for place in module_span(fine, paths)} - {len(fine.ops)}
        blocks = coarsen(fine, blocks=64, cuts=self.request.cuts, also=tuple(sorted(ends)))
        chain = BlockChain(blocks, captured, self.cost_model)
        costs = Estimator(self.cluster, chain, self.request.state_factor, overlap=True)
        cuts = forced_bounds(blocks, fine, self.request.cuts)
        return SearchSpace(chain, costs, self.request.normalized(), fine, cuts)


# ---- exhaustive search ---------------------------------------------------------------------------------------------


def partitions(n: int, depth: int, widths: tuple[int, ...]) -> Iterator[Partition]:
    """Yield every way to cut n blocks into stages with these widths, of at most `depth` ranks in total."""
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
    """Return every order of the devices, without those that differ only in the names of equal devices."""
    seen: dict[object, tuple[int, ...]] = {}
    for order in permutations(range(cluster.world)):
        apart = tuple(cluster.level(a, b) for a, b in combinations(order, 2))
        seen.setdefault((tuple(cluster.devices[rank] for rank in order), apart), order)
    return list(seen.values())


def candidates(space: SearchSpace) -> Iterator[Candidate]:
    """Yield everything the request allows: every partition, on the devices in every order, idle ones last."""
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
    """Return whether the request allows a partition."""
    request = space.request
    if request.stages not in (None, len(partition.widths)) or max(partition.widths) > max(micro_rows):
        return False
    masks = [space.legal_at(s) for s in range(len(partition.widths))]
    legal = all(mask[a, b] for mask, (a, b) in zip(masks, pairwise(partition.bounds), strict=True))
    pinned = all(stage < len(partition.widths) for stage in request.pins.values())
    return legal and pinned and request.replicas_of(len(partition.widths)) in (None, partition.widths)


def exhaustive(space: SearchSpace) -> Evaluation | None:
    """Return the fastest candidate that fits into memory."""
    evaluations = (evaluate(space, candidate) for candidate in candidates(space))
    return min((e for e in evaluations if e.fits), key=lambda e: e.step_ns, default=None)


def assignments(blocks: Graph, stages: int) -> Iterator[tuple[tuple[str, ...], ...]]:
    """Yield every assignment of blocks to stages in which no value flows backwards."""
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
    """Return the shortest step over all assignments of blocks to stages on single devices that fit, in rank order."""
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
    """Return the simulated step time of a decision, or None if it is invalid or does not fit."""
    graph = setting.graph(Size(max(decision.micro_rows))).graph
    try:
        check_decision(decision, graph)
    except PlanError:
        return None
    report = estimate(decision, route(decision, graph), setting)
    return report.step_ns if fits(decision.stages, report.estimates, setting.cluster) else None


def fits(stages: tuple[Stage, ...], estimates: tuple[Estimate, ...], cluster: Cluster) -> bool:
    """Return whether every device has enough memory.

    An estimate holds for the device with the largest need. With unequal shares that device has a large share, and the
    others may have less memory.
    """
    limits = [[cluster.devices[rank].memory_bytes for rank in stage.ranks] for stage in stages]
    return all(
        estimate.peak_bytes <= (max(limit) if stage.shares else min(limit))
        for estimate, stage, limit in zip(estimates, stages, limits, strict=True)
    )


# ---- checking the planner ------------------------------------------------------------------------------------------


def planned(p: Problem) -> Plan | None:
    """Return the plan, or None if the planner finds none."""
    try:
        return build(p.source, p.cluster, p.request)
    except InfeasibleError:
        return None


def compare(p: Problem) -> float | None:
    """Check a plan against exhaustive search and return its relative excess, or None if no plan exists."""
    plan, best = planned(p), exhaustive(p.space)
    if plan is None or best is None:
        assert plan is None, "the planner returned a plan that exhaustive search does not find"
        assert best is None, f"missed a plan of {best.step_ns} ns: {best.candidate}" if best else ""
        return None
    assert fits(plan.stages, plan.estimates, p.cluster)
    known = plan.outlook.optimality
    assert known is not None and known.objective == plan.step_ns
    assert known.lower_bound <= best.step_ns, f"bound above {best.candidate}"
    assert plan.step_ns - best.step_ns <= known.gap * plan.step_ns + 1
    return plan.step_ns / best.step_ns - 1 if best.step_ns else 0.0


def says(excess: float | None) -> str:
    """Return the class of a result of `compare`."""
    if excess is None:
        return "infeasible"
    return "as fast" if excess <= 0 else f"slower by up to {1 if excess < 0.01 else 5 if excess < 0.05 else 100} %"


# ---- random problems -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """Properties of random problems. None: chosen at random."""

    least: int = 1
    most: int = 8
    devices: int = 4
    chain: bool | None = None
    replicas: bool | None = None
    recompute: bool | None = None
    mixed: bool | None = None
    roomy: bool = False


def either(random: Random, wish: bool | None) -> bool:
    """Return the wish, or a random choice."""
    return random.random() < 0.5 if wish is None else wish


def model(random: Random, kind: Kind) -> Graph:
    """Return a random chain or DAG with free, cheap and expensive ops, values of different sizes, and tied weights."""

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
    """Return random devices of one or two speeds, with much, enough or little memory, and slow or fast links."""
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
    """Return the rows of this many micro-batches, larger ones first."""
    return tuple(rows // micros + (i < rows % micros) for i in range(micros))


def problem(random: Random, kind: Kind = Kind()) -> Problem:
    """Return a random model on a random cluster with a random request."""
    g = model(random, kind)
    rows = random.randint(1, 6)
    counts = random.sample(range(1, rows + 1), random.randint(1, min(3, rows)))
    cluster = machines(random, g, rows, kind)
    request = PlanRequest(
        micro_rows=tuple(split(rows, count) for count in sorted(counts)),
        schedule=random.choice(["auto", "auto", *FAMILY]),
        replicas=None if either(random, kind.replicas) else 1,
        recompute="auto" if either(random, kind.recompute) else "off",
        zero=random.choice(["auto", 0, 1]),
    )
    return Problem(g, cluster, request, launch=random.choice([0, 5]))


def problems(kind: Kind = Kind()) -> st.SearchStrategy[Problem]:
    """Return a strategy for problems. Every example is drawn independently; hypothesis would repeat small ones."""
    return st.randoms(use_true_random=True).map(lambda random: problem(random, kind))


def two_kinds(
    world: int, *, fast: tuple[int, ...] = (), slower: int = 1, levels: tuple[tuple[int, int], ...] = ()
) -> Cluster:
    """Return devices with ample memory of which all but `fast` are slower. levels: (size, bytes/s) of each level."""
    devices = tuple(Device("cpu", 1 << 40, FASTEST // (1 if r in fast else slower), 10**11) for r in range(world))
    return Cluster(devices, tuple(Level(size, Link(0, rate)) for size, rate in levels or ((world, 10**9),)))
