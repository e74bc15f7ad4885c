"""Estimates: time, memory and messages of each stage of a plan, and the simulated step.

Memory of a device of stage s with r replicas, live = `plan.in_flight`:

    weights + gradients + optimizer state                      of the parameters that the stage uses, each once
    + live * (saved for the backward + received)               of the largest share of a micro-batch, rows / r
    + workspace                                                largest of one op, and of one recomputed group
    + 2 * (received + sent)                                    messages under way; receives are posted two ahead
    + (live - 1) * weights                                     asynchronous schedules alone: a version per micro-batch
    + the whole batch's inputs                                 on the first stage

A recomputed group keeps what enters and leaves it and pays its forward a second time.

Assumed, and wrong where: times and saved bytes of a stage are the sums of its ops'; weights, gradients and optimizer
state stay allocated; what the allocator wastes is left out.  Optimizer: reads weights, gradients and state, writes
weights and state, at memory speed.  Clones count in every stage that runs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from autopart.ir.cluster import Cluster, Device
from autopart.ir.graph import Graph, Op
from autopart.ir.plan import ASYNC, Decision, Estimate, Report, Stage, in_flight
from autopart.ir.program import Edge, Program
from autopart.ir.timeline import Timeline
from autopart.passes.ops.cost_model import CostsAt
from autopart.passes.program.routing import Tied, comm_template
from autopart.passes.program.schedules import order
from autopart.passes.simulation.simulate import Message, Work, ordered_ns, simulate, step_ns
from autopart.passes.simulation.traffic import PortLoad, bundle, ring

Estimates = tuple[Estimate, ...]
"""Of each stage, in order."""

LONG = 20_000
"""Actions of a program from which on candidates are judged by a shorter one."""


@dataclass(frozen=True)
class GraphIndex:
    """A graph by name.  params, trained, values: bytes of parameters, of the trainable ones and of values."""

    graph: Graph
    ops: dict[str, Op]
    params: dict[str, int]
    trained: dict[str, int]
    values: dict[str, int]

    @staticmethod
    def of(graph: Graph) -> GraphIndex:
        """O(ops + values + parameters)."""
        return GraphIndex(
            graph,
            graph.op_map(),
            {p.name: p.size_bytes for p in graph.params},
            {p.name: p.size_bytes for p in graph.params if p.trainable},
            {v.name: v.size_bytes for v in graph.values},
        )

    def trained_bytes(self, stage: Stage) -> int:
        """Bytes of the trainable parameters of a stage, each once."""
        used = {name for op in stage.ops for name in self.ops[op].params}
        return sum([self.trained.get(name, 0) for name in used])


@dataclass(frozen=True)
class CostContext:
    """What estimates are made from.  kinds: distinct devices of the cluster; costs_at: (rows, kind) to the graph whose
    ops the plan names.  state_factor: bytes of optimizer state per byte of trainable parameter.  overlap: gradients
    are summed while the last backward runs."""

    cluster: Cluster
    kinds: tuple[Device, ...]
    costs_at: CostsAt
    state_factor: float = 2.0
    overlap: bool = False
    _loads: dict[tuple[tuple[int, ...], tuple[int, ...]], PortLoad] = field(
        default_factory=dict, compare=False, repr=False
    )
    _books: dict[tuple[int, int], GraphIndex] = field(default_factory=dict, init=False, compare=False, repr=False)
    _known: dict[StageContext, Estimate] = field(default_factory=dict, init=False, compare=False, repr=False)

    def book(self, rows: int, kind: int) -> GraphIndex:
        """Costs at this number of rows on this kind of device, each looked up once."""
        if (rows, kind) not in self._books:
            self._books[rows, kind] = GraphIndex.of(self.costs_at(rows, kind))
        return self._books[rows, kind]

    def estimate(self, seat: StageContext) -> Estimate:
        """`stage_estimate`, each computed once."""
        if seat not in self._known:
            self._known[seat] = stage_estimate(seat, self)
        return self._known[seat]

    def bundle(self, senders: tuple[int, ...], receivers: tuple[int, ...]) -> PortLoad:
        """`traffic.bundle` on this cluster, each computed once."""
        if (senders, receivers) not in self._loads:
            self._loads[senders, receivers] = bundle(self.cluster, senders, receivers)
        return self._loads[senders, receivers]

    def ring(self, ranks: tuple[int, ...]) -> PortLoad:
        """`traffic.ring` on this cluster, each computed once."""
        if (ranks, ()) not in self._loads:
            self._loads[ranks, ()] = ring(self.cluster, ranks)
        return self._loads[ranks, ()]


def device_types(cluster: Cluster) -> tuple[Device, ...]:
    """Distinct devices; that of rank 0 comes first."""
    return tuple(dict.fromkeys(cluster.devices))


def optimizer_ns(trained_bytes: int, state_factor: float, device: Device) -> int:
    """Nanoseconds of an optimizer's step over parameters of trained_bytes."""
    return int(trained_bytes * (3 + 2 * state_factor) * 1e9 / device.mem_bytes_per_s)


def copying_ns(size_bytes: int, devices: Sequence[Device]) -> int:
    """Nanoseconds that messages of size_bytes take from the work of the slowest of these devices.

    A GPU's messages pass beside its work.  On a CPU the cores that compute copy each of them twice, to or from the
    socket, and read and write it each time.
    """
    rates = [device.mem_bytes_per_s for device in devices if device.kind == "cpu"]
    return int(4 * size_bytes * 1e9 / min(rates)) if rates else 0


def estimate(decision: Decision, program: Program, setting: CostContext) -> Report:
    """`estimates` (bytes and nanoseconds), `step_ns` and `bubble` (a fraction) of a decision.

    Before: program is the decision's, verified.  step_ns of an asynchronous schedule is micro-batches times the
    slowest stage, its steady state (PipeDream, section 3.1).  bubble: idle share of the ranks that run a stage; the
    sums of gradients and the optimizer count as idle.  O(uses + actions).
    """
    estimates = stage_estimates(decision, program.edges, setting)
    if decision.schedule == ASYNC:
        return Report(steady_ns(decision, estimates), 0.0, estimates)
    step = step_ns(program, work_of(decision, estimates, program, setting))
    busy = program.micros * sum(e.fwd_ns + e.bwd_ns for e in estimates)
    whole = step * len(decision.stages)
    return Report(step, max(0.0, 1 - busy / whole) if whole else 0.0, estimates)


def stage_estimates(decision: Decision, links: tuple[Edge, ...], setting: CostContext) -> Estimates:
    """The estimate of each stage (bytes and nanoseconds); links: its edges (`routing.edges`).  O(uses)."""
    sizes = message_bytes(links, setting.book(max(decision.micro_rows), 0))
    return tuple([setting.estimate(seat) for seat in seats(decision, sizes)])


def simulated_ns(
    decision: Decision, estimates: Estimates, links: tuple[Edge, ...], shared: Tied, setting: CostContext
) -> int:
    """Nanoseconds of the step.  estimates: of its stages.  links, shared: edges and tied parameters (`routing`).

    Of a long program two short ones are played instead (`played`); the other micro-batches follow at the same pace.
    """
    stages, micros = len(decision.stages), len(decision.micro_rows)
    if decision.schedule == ASYNC:
        return steady_ns(decision, estimates)
    counts = played(stages, micros, decision.schedule)
    acts, ranks = comm_template(stages, links, shared), [stage.ranks[0] for stage in decision.stages]
    work = _work(decision, estimates, links, shared, setting)
    times = [ordered_ns(order(stages, count, decision.schedule), acts, ranks, work) for count in counts]
    if len(counts) == 1:
        return times[0]
    return times[1] + (times[1] - times[0]) * (micros - counts[1]) // (counts[1] - counts[0])


def played(stages: int, micros: int, schedule: str) -> tuple[int, ...]:
    """Numbers of micro-batches that are played to know the step: all, or of a long program as many as fill the
    pipeline, after which every schedule goes at an even pace, and twice as many."""
    full = stages * (2 if schedule == "1f1b-deep" else 1)
    return (full, 2 * full) if 6 * stages * micros > LONG and 3 * full < micros else (micros,)


def steady_ns(decision: Decision, estimates: Estimates) -> int:
    """Nanoseconds of all micro-batches when nothing is flushed: the slowest stage sets the pace, its replicas take
    turns."""
    return len(decision.micro_rows) * max(e.fwd_ns + e.bwd_ns + e.reduce_ns + e.optimizer_ns for e in estimates)


def timeline_of(decision: Decision, program: Program, setting: CostContext) -> Timeline:
    """The simulated step of a decision, in nanoseconds and bytes."""
    estimates = stage_estimates(decision, program.edges, setting)
    return simulate(program, work_of(decision, estimates, program, setting))


def message_bytes(links: tuple[Edge, ...], book: GraphIndex) -> dict[Message, int]:
    """Bytes of one message by (source stage, destination stage, "F" or "B").  O(values of edges)."""
    size = book.values
    sizes = {(e.src, e.dst, "F"): sum([size[v] for v in e.values]) for e in links}
    return sizes | {(e.dst, e.src, "B"): sum([size[v] for v in e.grads]) for e in links if e.grads}


def work_of(decision: Decision, estimates: Estimates, program: Program, setting: CostContext) -> Work:
    """What the simulator needs, in nanoseconds and bytes.  estimates: of the stages."""
    return _work(decision, estimates, program.edges, program.tied, setting)


def _work(
    decision: Decision, estimates: Estimates, links: tuple[Edge, ...], shared: Tied, setting: CostContext
) -> Work:
    ranks = [stage.ranks for stage in decision.stages]
    book = setting.book(max(decision.micro_rows), 0)
    return Work(
        fwd_ns=tuple(e.fwd_ns for e in estimates),
        bwd_ns=tuple(e.bwd_ns for e in estimates),
        held_bytes=tuple(e.activation_bytes for e in estimates),
        messages={
            (src, dst, kind): (size, setting.bundle(ranks[src], ranks[dst]))
            for (src, dst, kind), size in message_bytes(links, book).items()
        },
        tied_ns=_tied_ns(shared, [own[0] for own in ranks], book, setting.cluster),
        reduce=tuple((book.trained_bytes(stage), setting.ring(stage.ranks)) for stage in decision.stages),
        optimizer_ns=tuple(e.optimizer_ns for e in estimates),
        overlap=setting.overlap,
    )


@dataclass(frozen=True)
class StageContext:
    """All that the estimate of a stage depends on.  rows: of the largest micro-batch.  live: micro-batches in flight.
    first: it is given the whole batch.  versions: copies of its weights.  in_bytes, out_bytes: of a whole micro-batch;
    back_bytes: of the gradients that come and go for it.
    """

    stage: Stage
    rows: int
    micros: int
    live: int
    first: bool
    versions: int
    in_bytes: int
    out_bytes: int
    back_bytes: int


def seats(decision: Decision, sizes: dict[Message, int]) -> list[StageContext]:
    """The seat of each stage.  sizes: of its messages.  O(stages + edges)."""
    into, out, back = ([0] * len(decision.stages) for _ in range(3))
    for (src, dst, kind), size in sizes.items():
        if kind == "F":
            into[dst] += size
            out[src] += size
        else:
            back[src] += size
            back[dst] += size
    rows, micros, found = max(decision.micro_rows), len(decision.micro_rows), []
    for s, stage in enumerate(decision.stages):
        live = in_flight(decision.schedule, s, len(decision.stages), micros)
        versions = live if decision.schedule == ASYNC else 1
        found.append(StageContext(stage, rows, micros, live, s == 0, versions, into[s], out[s], back[s]))
    return found


def stage_estimate(seat: StageContext, setting: CostContext) -> Estimate:
    """The estimate, in bytes and nanoseconds, of the slowest device of a stage.  O(uses)."""
    stage, replicas = seat.stage, len(seat.stage.ranks)
    rows = -(-seat.rows // replicas)
    kinds = sorted({setting.kinds.index(setting.cluster.devices[rank]) for rank in stage.ranks})
    whole, share = setting.book(seat.rows, 0), setting.book(rows, kinds[0])
    costed = [[book.ops[name].cost for name in stage.ops] for book in (setting.book(rows, kind) for kind in kinds)]
    kept, group_bytes = _kept(stage, share)
    again = {name for group in stage.recompute for name in group}
    redone = [[cost.fwd_ns for name, cost in zip(stage.ops, costs, strict=True) if name in again] for costs in costed]
    recompute_ns = max(map(sum, redone))
    param_bytes = sum([whole.params[name] for name in {name for op in stage.ops for name in whole.ops[op].params}])
    trained = whole.trained_bytes(stage)
    optimizer_bytes = int(trained * setting.state_factor)
    state_bytes = trained + optimizer_bytes + (seat.versions - 1) * param_bytes
    received, sent = -(-seat.in_bytes // replicas), -(-seat.out_bytes // replicas)
    devices = [setting.kinds[kind] for kind in kinds]
    activation_bytes = kept + received
    workspace = max([cost.scratch_bytes for cost in costed[0]], default=0) + group_bytes
    buffers = 2 * (received + sent)
    peak_bytes = param_bytes + state_bytes + seat.live * activation_bytes + workspace + buffers
    if seat.first:
        peak_bytes += seat.micros * -(-sum(whole.values[name] for name in whole.graph.inputs) // replicas)
    return Estimate(
        fwd_ns=max(sum([cost.fwd_ns for cost in costs]) for costs in costed) + copying_ns(received + sent, devices),
        bwd_ns=max(sum([cost.bwd_ns for cost in costs]) for costs in costed)
        + recompute_ns
        + copying_ns(-(-seat.back_bytes // replicas), devices),
        flops=sum([cost.flops for cost in costed[0]]),
        param_bytes=param_bytes,
        state_bytes=state_bytes,
        activation_bytes=activation_bytes,
        in_bytes=seat.in_bytes,
        out_bytes=seat.out_bytes,
        peak_bytes=peak_bytes,
        live=seat.live,
        optimizer_bytes=optimizer_bytes,
        workspace_bytes=workspace,
        buffer_bytes=buffers,
        recompute_ns=recompute_ns,
        reduce_ns=setting.ring(stage.ranks).alone_ns(trained),
        optimizer_ns=max(optimizer_ns(trained, setting.state_factor, device) for device in devices),
    )


def _kept(stage: Stage, book: GraphIndex) -> tuple[int, int]:
    """(bytes kept per micro-batch, bytes of the largest recomputed group), for a device's share of the rows."""
    saved = {name: book.ops[name].cost.saved_bytes for name in stage.ops}
    if not stage.recompute:
        return sum(saved.values()), 0
    ops = [book.ops[name] for name in stage.ops]
    again = {name: place for place, group in enumerate(stage.recompute) for name in group}
    maker = {w: again.get(op.name, -1) for op in ops for w in op.writes}  # the group that writes it, -1: none
    edges = {r for op in ops for r in op.reads if r in maker and maker[r] != again.get(op.name, -1)}
    kept = sum([amount for name, amount in saved.items() if name not in again]) + sum([book.values[n] for n in edges])
    return kept, max([sum([saved[name] for name in group]) for group in stage.recompute])


def _tied_ns(shared: Tied, ranks: Sequence[int], book: GraphIndex, cluster: Cluster) -> tuple[int, ...]:
    """Time of T for each stage: its gradient to the owner and the sum back, one stage after the other at the owner."""
    times = [0] * len(ranks)
    for name, stages in shared:
        owner = stages[0]
        for other in stages[1:]:
            taken = 2 * cluster.link(ranks[owner], ranks[other]).transfer_ns(book.params[name])
            times[other] += taken
            times[owner] += taken
    return tuple(times)
