"""What one stage needs and takes: memory and times of one of its devices.

Memory of a device of stage s with a share of 1 / r, live = `schedules.in_flight`:

    weights + gradients + optimizer state                      of the parameters that the stage uses, each once; in a
                                                               step gradients are in single precision at least
    + copies of weights in another precision                   under autocast, made once a step
    + live * (saved for the backward + received)               of the device's part of a micro-batch, rows / r
    + workspace                                                largest of one op, and of one recomputed group
    + MESSAGES_AHEAD * (received + sent)                       messages under way, and receives posted ahead
    + gradients, in half precision                             with replicas, of parameters in half precision: they are
                                                               summed in single precision and rounded when the step is
                                                               over; as far as that is more than activations, workspace
                                                               and messages were
    + (live - 1) * weights                                     asynchronous schedules alone: a version per micro-batch
    + the whole batch's inputs                                 on the first stage

Where replicas share the optimizer's state, that of the largest share (`ir.shares.owners_of`).
Then gradients go to their owner and new values come back, which is one turn of the ring each, as much as a sum.

Where replicas take micro-batches in turn, a device has all rows of every r-th one.

A recomputed group keeps what enters it (what leaves it is kept by whoever needs it) and pays its forward a second time,
up to the last op that autograd needs something of (torch.utils.checkpoint stops there): a product at its end, of which
only the operands are kept, does not run again.

Assumed, and wrong where: times and saved bytes of a stage are the sums of its ops'; weights, gradients and optimizer
state stay allocated; what the allocator wastes is left out.  Optimizer: reads weights, gradients and state, writes
weights and state, at memory speed.  Clones count in every stage that runs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from itertools import chain

from autopart.ir.cluster import Cluster, Device
from autopart.ir.graph import Graph, Op, Param
from autopart.ir.plan import Estimate, Stage
from autopart.ir.program import MESSAGES_AHEAD
from autopart.ir.shares import common_period, largest_share
from autopart.ir.size import Size
from autopart.passes.ops.cost_model import GraphCosts
from autopart.passes.ops.table import keeps
from autopart.passes.simulation.slices import SliceShares, share_of
from autopart.passes.simulation.traffic import PortLoad, p2p_load, ring_load


@dataclass(frozen=True)
class GraphIndex:
    """A graph by name.  params, trained, summed, copies, values: bytes of parameters, of the trainable ones, of those
    as replicas sum their gradients, of copies that are held of parameters, and of values."""

    graph: Graph
    ops: dict[str, Op]
    params: dict[str, int]
    trained: dict[str, int]
    summed: dict[str, int]
    copies: dict[str, int]
    values: dict[str, int]

    @staticmethod
    def of(graph: Graph) -> GraphIndex:
        """O(ops + values + parameters)."""
        return GraphIndex(
            graph,
            graph.op_map(),
            {p.name: p.size_bytes for p in graph.params},
            {p.name: p.size_bytes for p in graph.params if p.trainable},
            {p.name: summed_bytes(p) for p in graph.params if p.trainable},
            {p.name: p.copy_bytes for p in graph.params if p.copy_bytes},
            {v.name: v.size_bytes for v in graph.values},
        )

    def params_of(self, stage: Stage) -> set[str]:
        """The parameters that a stage uses.  O(uses)."""
        return set(chain.from_iterable([self.ops[op].params for op in stage.ops]))

    def largest_share(self, stage: Stage) -> int:
        """Bytes of the trainable parameters of the replica that owns most of them."""
        return largest_share(
            [self.trained[name] for name in self.params_of(stage) & self.trained.keys()], len(stage.ranks)
        )

    def trained_bytes(self, params: set[str]) -> int:
        """Bytes of those of these parameters that are trained."""
        return sum([self.trained[name] for name in params & self.trained.keys()])

    def summed_bytes(self, params: set[str]) -> int:
        """Bytes of the gradients of these parameters, as replicas sum them."""
        return sum([self.summed[name] for name in params & self.summed.keys()])


@dataclass(frozen=True, slots=True)
class CostContext:
    """What estimates are made from.

    device_types: distinct devices of the cluster.  cost_model: costs of the graph whose ops the plan names.
    state_factor: bytes of optimizer state per byte of trainable parameter.  overlap: gradients are summed while the
    last backward runs.  slices: what slices of sequences take of the whole; None where no decision has any.
    group_ns: what a recomputed group takes beside its ops.
    """

    cluster: Cluster
    device_types: tuple[Device, ...]
    cost_model: GraphCosts
    state_factor: float = 2.0
    overlap: bool = False
    slices: SliceShares | None = None
    group_ns: int = 0


class LoadMemo:
    """The loads of messages and sums on one cluster, each computed once and remembered here."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        self._messages: dict[tuple[tuple[int, ...], ...], PortLoad] = {}
        self._rings: dict[tuple[tuple[int, ...], int], PortLoad] = {}

    def p2p(
        self,
        senders: tuple[int, ...],
        receivers: tuple[int, ...],
        sent: tuple[int, ...] = (),
        received: tuple[int, ...] = (),
    ) -> PortLoad:
        """`traffic.p2p_load` on this cluster."""
        key = senders, receivers, sent, received
        if key not in self._messages:
            self._messages[key] = p2p_load(self._cluster, *key)
        return self._messages[key]

    def passing(self, src: Stage, dst: Stage) -> tuple[PortLoad, ...]:
        """Of a message from one stage to another, micro-batch by micro-batch until it repeats itself."""
        ours, theirs = src.division, dst.division
        return tuple(
            self.p2p(src.ranks, dst.ranks, ours.cuts(micro), theirs.cuts(micro))
            for micro in range(common_period(ours, theirs))
        )

    def ring_allreduce(self, ranks: tuple[int, ...]) -> PortLoad:
        """A sum over these ranks: two turns of the ring."""
        return self.ring(ranks, 2)

    def ring(self, ranks: tuple[int, ...], turns: int) -> PortLoad:
        """`traffic.ring_load` on this cluster."""
        key = ranks, turns
        if key not in self._rings:
            self._rings[key] = ring_load(self._cluster, ranks, turns)
        return self._rings[key]


class Estimator:
    """Estimates in one context.  It remembers what it was asked: graphs by name, stages, and loads.

    loads: shared with other estimators of the same cluster, where there are any.
    """

    def __init__(self, context: CostContext, loads: LoadMemo | None = None) -> None:
        self.context = context
        self.loads = loads or LoadMemo(context.cluster)
        self._graphs: dict[tuple[Size, int], GraphIndex] = {}
        self._stages: dict[StageContext, Estimate] = {}

    def graph(self, size: Size, device_type: int) -> GraphIndex:
        """Costs at this size on this type of device."""
        key = size, device_type
        if key not in self._graphs:
            self._graphs[key] = GraphIndex.of(self.context.cost_model.graph(size, device_type))
        return self._graphs[key]

    def stage(self, stage: StageContext) -> Estimate:
        """`stage_estimate` in this context."""
        if stage not in self._stages:
            self._stages[stage] = stage_estimate(stage, self)
        return self._stages[stage]


def device_types(cluster: Cluster) -> tuple[Device, ...]:
    """Distinct devices; that of rank 0 comes first."""
    return tuple(dict.fromkeys(cluster.devices))


def summed_bytes(param: Param) -> int:
    """Bytes of its gradient as replicas sum it: half precision is added up in single."""
    return param.size_bytes * 2 if param.dtype in ("float16", "bfloat16") else param.size_bytes


def optimizer_ns(trained_bytes: int, state_factor: float, device: Device) -> int:
    """Nanoseconds of an optimizer's step over parameters of trained_bytes."""
    return int(trained_bytes * (3 + 2 * state_factor) * 1e9 / device.reached_bytes_per_s)


def casting_ns(copy_bytes: int, device: Device) -> int:
    """Nanoseconds of making copies of weights in half precision: each is read, and its copy written."""
    return int(copy_bytes * 3 * 1e9 / device.mem_bytes_per_s)


def copying_ns(size_bytes: int, devices: Sequence[Device]) -> int:
    """Nanoseconds that messages of size_bytes take from the work of the slowest of these devices.

    A GPU's messages pass beside its work.  On a CPU the cores that compute copy each of them twice, to or from the
    socket, and read and write it each time.
    """
    rates = [device.reached_bytes_per_s for device in devices if device.kind == "cpu"]
    return int(4 * size_bytes * 1e9 / min(rates)) if rates else 0


def summing_ns(size_bytes: int, ranks: Sequence[int], cluster: Cluster) -> int:
    """Nanoseconds that a sum of size_bytes over the ranks of a stage takes from the work of the slowest of them.

    A GPU sums beside its work.  On a CPU each rank sends 2 (n - 1) / n of it and receives as much (`copying_ns`), adds
    up half of that, and copies gradients into buckets.
    """
    if cluster.kind != "cpu" or len(ranks) < 2:
        return 0
    passing = 2 * size_bytes * (len(ranks) - 1) // len(ranks)
    devices = [cluster.devices[rank] for rank in ranks]
    slowest = min(device.reached_bytes_per_s for device in devices)
    return copying_ns(2 * passing, devices) + int((1.5 * passing + 2 * size_bytes) * 1e9 / slowest)


@dataclass(frozen=True)
class StageContext:
    """All that the estimate of a stage depends on.  rows: of the largest micro-batch.  live: micro-batches in flight.
    first: it is given the whole batch.  versions: copies of its weights.  in_bytes, out_bytes: of a whole micro-batch;
    back_bytes: of the gradients that come and go for it.  shared: its replicas share the optimizer's state.
    held: where sequences are cut, tokens in flight at most and
    tokens of a micro-batch.
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
    shared: bool = False
    held: tuple[int, int] | None = None


def stage_estimate(context: StageContext, estimator: Estimator) -> Estimate:
    """The estimate, in bytes and nanoseconds, of a stage: times of its slowest device, memory of the one that needs
    most.  O(uses) for each share that some device has."""
    found = [_estimate(context, estimator, ranks) for ranks in alike(context.stage)]
    if len(found) == 1:
        return found[0]
    return Estimate(**{each.name: max(getattr(e, each.name) for e in found) for each in fields(Estimate)})


def alike(stage: Stage) -> tuple[tuple[int, ...], ...]:
    """The ranks of a stage, those with equal parts of a micro-batch together."""
    found: dict[int, list[int]] = {}
    for rank, share in zip(stage.ranks, stage.division.shares, strict=True):
        found.setdefault(share, []).append(rank)
    return tuple(map(tuple, found.values()))


def excess_bytes(context: StageContext, estimator: Estimator, spare_bytes: int = 0) -> int:
    """What a stage needs beyond what its devices have, on the worst of them; negative where it fits.  spare_bytes: left
    free on each."""
    cluster, groups = estimator.context.cluster, alike(context.stage)
    peaks = (
        (_estimate(context, estimator, ranks) if len(groups) > 1 else estimator.stage(context)).peak_bytes
        for ranks in groups
    )
    return max(
        peak - cluster.least_memory_bytes(ranks) + spare_bytes for peak, ranks in zip(peaks, groups, strict=True)
    )


def _estimate(context: StageContext, estimator: Estimator, ranks: Sequence[int]) -> Estimate:
    """The estimate of the slowest of these ranks, which have equal parts of a micro-batch."""
    stage, divided = context.stage, context.stage.division
    replica = stage.ranks.index(ranks[0])

    def part(amount: int) -> int:
        return divided.part(amount, replica)

    size = Size(part(context.rows))
    setting = estimator.context
    kinds = sorted({setting.device_types.index(setting.cluster.devices[rank]) for rank in ranks})
    whole, share = estimator.graph(Size(context.rows), 0), estimator.graph(size, kinds[0])
    indices = [estimator.graph(size, kind) for kind in kinds]
    costed = [[index.ops[name].cost for name in stage.ops] for index in indices]
    kept, group_bytes = _kept(stage, share)
    recompute_ns = max(sum([redone_ns(group, index) for group in stage.recompute]) for index in indices)
    recompute_ns += setting.group_ns * len(stage.recompute)
    used = whole.params_of(stage)
    copies = sum([whole.copies.get(name, 0) for name in used])
    weights = sum([whole.params[name] for name in used])
    trained = whole.trained_bytes(used)
    stepped = whole.largest_share(stage) if context.shared else trained
    optimizer_bytes = int(stepped * setting.state_factor)
    summed = whole.summed_bytes(used)
    state_bytes = summed + optimizer_bytes + (context.versions - 1) * weights
    received, sent = part(context.in_bytes), part(context.out_bytes)
    devices = [setting.device_types[kind] for kind in kinds]
    activation_bytes = kept + received
    workspace = max([cost.scratch_bytes for cost in costed[0]], default=0) + group_bytes
    buffers = MESSAGES_AHEAD * (received + sent)
    in_flight = _in_flight_bytes(context, activation_bytes)
    if len(stage.ranks) > 1:  # what is gone by then makes room for it
        given_out = (summed - trained) * stepped // max(1, trained)
        buffers += max(0, given_out - in_flight - workspace - buffers)
    peak_bytes = weights + copies + state_bytes + in_flight + workspace + buffers
    if context.first:
        own_micros = -(-context.micros // divided.period)
        peak_bytes += own_micros * part(sum(whole.values[name] for name in whole.graph.inputs))
    return Estimate(
        fwd_ns=max(sum([cost.fwd_ns for cost in costs]) for costs in costed) + copying_ns(received + sent, devices),
        bwd_ns=max(sum([cost.bwd_ns for cost in costs]) for costs in costed)
        + recompute_ns
        + copying_ns(part(context.back_bytes), devices),
        flops=sum([cost.flops for cost in costed[0]]),
        param_bytes=weights + copies,
        state_bytes=state_bytes,
        activation_bytes=activation_bytes,
        in_bytes=context.in_bytes,
        out_bytes=context.out_bytes,
        peak_bytes=peak_bytes,
        live=context.live,
        optimizer_bytes=optimizer_bytes,
        workspace_bytes=workspace,
        buffer_bytes=buffers,
        recompute_ns=recompute_ns,
        reduce_ns=estimator.loads.ring_allreduce(stage.ranks).alone_ns(summed)
        + summing_ns(summed, stage.ranks, setting.cluster),
        optimizer_ns=max(optimizer_ns(stepped, setting.state_factor, d) + casting_ns(copies, d) for d in devices),
    )


def redone_ns(group: Sequence[str], index: GraphIndex) -> int:
    """Nanoseconds of running a recomputed group again, up to the last op that autograd needs something of: one that
    keeps its operands alone needs not run for that.  O(group)."""
    total = sum([index.ops[name].cost.fwd_ns for name in group])
    for name in reversed(group):
        op = index.ops[name]
        if op.parts not in ((), (name,)):  # a block, which knows it of itself
            return total - op.cost.tail_ns
        kept = keeps(op.target)
        total -= op.cost.fwd_ns if kept != "after" else 0
        if kept:
            break
    return total


def _in_flight_bytes(context: StageContext, activation_bytes: int) -> int:
    if context.held is None:
        return context.live * activation_bytes
    tokens, whole = context.held
    return share_of(activation_bytes, tokens, whole)


def _kept(stage: Stage, index: GraphIndex) -> tuple[int, int]:
    """(bytes kept per micro-batch, bytes of the largest recomputed group), for a device's share of the rows."""
    saved = {name: index.ops[name].cost.saved_bytes for name in stage.ops}
    if not stage.recompute:
        return sum(saved.values()), 0
    ops = [index.ops[name] for name in stage.ops]
    again = {name: place for place, group in enumerate(stage.recompute) for name in group}
    maker = {w: again.get(op.name, -1) for op in ops for w in op.writes}  # the group that writes it, -1: none
    users = [(again[op.name], op) for op in ops if op.name in again]
    edges = {r for group, op in users for r in op.reads if r in maker and maker[r] != group}
    kept = sum([amount for name, amount in saved.items() if name not in again]) + sum([index.values[n] for n in edges])
    return kept, max([sum([saved[name] for name in group]) for group in stage.recompute])
