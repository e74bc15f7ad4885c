"""The memory and the times of one stage, on one of its devices.

Memory of a device of a stage with r equal replicas, where live is `schedules.in_flight`:

    weights + gradients + optimizer state            each parameter once; gradients in fp32 at least
    + copies of weights in another precision         under autocast, made once a step
    + live * (saved for the backward + received)     for the device's rows of a micro-batch, rows / r
    + workspace                                      largest of one op, and of one recomputed group
    + MESSAGES_AHEAD * (received + sent)             messages under way, and receives posted ahead; of a stage without
                                                     a backward all that it sends in a step
    + half-precision gradients                       with replicas: they are summed in fp32 and rounded after the
                                                     step; only what exceeds activations, workspace and messages
    + (versions - 1) * weights                       asynchronous schedules (`Streaming.versions`)
    + inputs of the whole batch                      first stage only

Where the backward has two parts, a micro-batch holds its activations until I, and from I to W the inputs and the
gradients of its products; what counts is the most of both together at any time of the order (`held`).  Ranks with
several stages: `rank_memory`.

With ZeRO-1 (`ir.shares.owners_of`) the optimizer state is that of the largest share.  Gradients then go to their owner
and new values come back: one turn of the ring each, together as much as an all-reduce.

Where replicas take micro-batches in turn, a device has all rows of every r-th micro-batch.

A recomputed group keeps its inputs (its outputs are kept by their readers) and runs its forward a second time, up to
the last op whose result autograd needs (torch.utils.checkpoint stops there): a product at its end, of which only the
operands are kept, does not run again.

Assumed, and wrong where: times and saved bytes of a stage are the sums over its ops; weights, gradients and optimizer
state stay allocated; the allocator wastes nothing.  The optimizer runs at memory speed (`optimizer_ns`).  Clones count
in every stage that runs them.  The weights of a stage without a backward are cast to half precision in no time, since
casts are charged with the optimizer, which it does not have.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, fields, replace
from itertools import chain

from autopart.ir.actions import BACKWARD, FORWARD
from autopart.ir.cluster import Cluster, Device
from autopart.ir.device_kinds import DEVICE_KINDS
from autopart.ir.graph import Graph, Param
from autopart.ir.plan import Decision, Estimate, Stage
from autopart.ir.program import MESSAGES_AHEAD, Edge
from autopart.ir.shares import largest_share
from autopart.ir.size import Size
from autopart.passes.ops.cost_model import GraphCosts
from autopart.passes.ops.table import keeps
from autopart.passes.program.orders import Shape
from autopart.passes.program.schedules import find, in_flight, most_tokens, streams
from autopart.passes.program.stream import streaming_of
from autopart.passes.simulation.held import Counts, counts_of, of_stage
from autopart.passes.simulation.slices import SliceShares, share_of
from autopart.passes.simulation.traffic import Loads


class GraphIndex:
    """A graph with its ops and its sizes in bytes by name.

    params: all parameters.  trained: trainable ones.  summed: their gradients as replicas sum them.  copies: copies of
    parameters in another precision.  values: values.
    """

    def __init__(self, graph: Graph) -> None:
        """O(ops + values + parameters)."""
        self.graph = graph
        self.ops = graph.op_map()
        self.params = {p.name: p.size_bytes for p in graph.params}
        self.trained = {p.name: p.size_bytes for p in graph.params if p.trainable}
        self.summed = {p.name: summed_bytes(p) for p in graph.params if p.trainable}
        self.copies = {p.name: p.copy_bytes for p in graph.params if p.copy_bytes}
        self.values = {v.name: v.size_bytes for v in graph.values}

    def params_of(self, stage: Stage) -> set[str]:
        """Return the parameters that a stage uses.  O(uses)."""
        return set(chain.from_iterable([self.ops[op].params for op in stage.ops]))

    def largest_share(self, stage: Stage) -> int:
        """Return the bytes of trainable parameters of the replica that owns most of them."""
        trained = self.params_of(stage) & self.trained.keys()
        return largest_share([self.trained[name] for name in trained], len(stage.ranks))

    def trained_bytes(self, params: set[str]) -> int:
        """Return the bytes of the trainable ones among these parameters."""
        return sum([self.trained[name] for name in params & self.trained.keys()])

    def summed_bytes(self, params: set[str]) -> int:
        """Return the bytes of these parameters' gradients as replicas sum them."""
        return sum([self.summed[name] for name in params & self.summed.keys()])


class Estimator:
    """Estimates of stages under one cost model on one cluster; graphs, stages and loads are worked out once each.

    cost_model: costs of the graph whose ops the stages name.  state_factor: bytes of optimizer state per byte of
    trainable parameter.  overlap: whether gradients are summed while the last backward runs.  slices: the share of a
    stage's time that a slice of tokens takes.  group_ns: overhead of a recomputed group.
    """

    def __init__(
        self,
        cluster: Cluster,
        cost_model: GraphCosts,
        state_factor: float = 2.0,
        *,
        overlap: bool = False,
        slices: SliceShares | None = None,
        group_ns: int = 0,
    ) -> None:
        self.cluster, self.cost_model, self.state_factor = cluster, cost_model, state_factor
        self.device_types = device_types(cluster)
        self.overlap, self.group_ns = overlap, group_ns
        self.slices = slices or SliceShares(1, {}, (), (), 0)
        self.loads = Loads(cluster)
        self._graphs: dict[tuple[Size, int], GraphIndex] = {}
        self._stages: dict[StageContext, Estimate] = {}

    def over(self, cost_model: GraphCosts) -> Estimator:
        """Return an estimator of another graph, with the same cluster, options and loads."""
        other = copy(self)
        other.cost_model, other._graphs, other._stages = cost_model, {}, {}
        return other

    def graph(self, size: Size, device_type: int = 0) -> GraphIndex:
        """Return the graph with its costs at this size on this type of device."""
        key = size, device_type
        if key not in self._graphs:
            self._graphs[key] = GraphIndex(self.cost_model.graph(size, device_type))
        return self._graphs[key]

    def stage(self, stage: StageContext) -> Estimate:
        """Return the estimate of a stage in bytes and nanoseconds: times of its slowest device, and the memory of the
        one that needs most.  O(uses) for each share that some device has."""
        if stage not in self._stages:
            found = [_estimate(stage, self, ranks) for ranks in alike(stage.stage)]
            worst = {each.name: max(getattr(e, each.name) for e in found) for each in fields(Estimate)}
            self._stages[stage] = Estimate(**worst)
        return self._stages[stage]


def device_types(cluster: Cluster) -> tuple[Device, ...]:
    """Return the distinct devices; the one of rank 0 comes first."""
    return tuple(dict.fromkeys(cluster.devices))


def summed_bytes(param: Param) -> int:
    """Return the bytes of a gradient as replicas sum it: half precision is summed in fp32."""
    return param.size_bytes * 2 if param.dtype in ("float16", "bfloat16") else param.size_bytes


def optimizer_ns(trained_bytes: int, state_factor: float, device: Device) -> int:
    """Return the nanoseconds of an optimizer step over parameters of trained_bytes: the weights are read and written,
    the gradients are read, and those over its state (`DeviceKind`)."""
    passes = 3 + DEVICE_KINDS[device.kind].state_passes * state_factor
    return int(trained_bytes * passes * 1e9 / device.reached_bytes_per_s)


def casting_ns(copy_bytes: int, device: Device) -> int:
    """Return the nanoseconds of casting weights to half precision: each is read, and its copy written."""
    return int(copy_bytes * 3 * 1e9 / device.mem_bytes_per_s)


def copying_ns(size_bytes: int, devices: Sequence[Device]) -> int:
    """Return the nanoseconds of compute that messages of size_bytes take from the slowest of these devices.

    A GPU's messages overlap with its work.  On a CPU the cores that compute copy each of them twice, to or from the
    socket, and read and write it each time.
    """
    rates = [device.reached_bytes_per_s for device in devices if not DEVICE_KINDS[device.kind].beside]
    return int(4 * size_bytes * 1e9 / min(rates)) if rates else 0


def summing_ns(size_bytes: int, ranks: Sequence[int], cluster: Cluster) -> int:
    """Return the nanoseconds of compute that an all-reduce of size_bytes takes from the slowest of its ranks.

    A GPU's sums overlap with its work.  On a CPU each rank sends 2 (n - 1) / n of the bytes and receives as many
    (`copying_ns`), adds half of those, and copies gradients into buckets.
    """
    if DEVICE_KINDS[cluster.kind].beside or len(ranks) < 2:
        return 0
    passing = 2 * size_bytes * (len(ranks) - 1) // len(ranks)
    devices = [cluster.devices[rank] for rank in ranks]
    slowest = min(device.reached_bytes_per_s for device in devices)
    return copying_ns(2 * passing, devices) + int((1.5 * passing + 2 * size_bytes) * 1e9 / slowest)


@dataclass(frozen=True)
class StageContext:
    """Everything that the estimate of a stage depends on.

    rows: of the largest micro-batch.  live: micro-batches in flight.  first: whether it holds the whole batch.
    versions: copies of its weights.  in_bytes, out_bytes: received and sent in the forward of a whole micro-batch.
    back_bytes: of gradients, received and sent.  zero: whether replicas share the optimizer state.  held: with slices
    of tokens, (tokens in flight at most, tokens of a micro-batch).  counts: where a backward has two parts or a rank
    several stages, what the stage holds at its fullest times (`held.of_stage`), in micro-batches or tokens.
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
    zero: bool = False
    held: tuple[int, int] | None = None
    counts: tuple[tuple[int, int], ...] = ()

    def in_flight_bytes(self, held_bytes: int, kept_bytes: int) -> int:
        """Return the most bytes that are held for backwards.

        held_bytes, kept_bytes: for a micro-batch, from its forward on, and from I to W.
        """
        tokens, of_tokens = self.held or (self.live, 1)
        if not self.counts:
            return share_of(held_bytes, tokens, of_tokens)
        return max(-(-(held * held_bytes + kept * kept_bytes) // of_tokens) for held, kept in self.counts)


def message_bytes(links: tuple[Edge, ...], sizes: dict[str, int]) -> dict[tuple[int, int, str], int]:
    """Return the bytes of a message by source stage, destination stage and way.  sizes: of values, in bytes."""
    found = {(e.src, e.dst, FORWARD): sum([sizes[v] for v in e.values]) for e in links}
    return found | {(e.dst, e.src, BACKWARD): sum([sizes[v] for v in e.grads]) for e in links if e.grads}


def stage_contexts(decision: Decision, links: tuple[Edge, ...], estimator: Estimator) -> list[StageContext]:
    """Return what the estimate of each stage depends on.  links: the edges of the decision (`routing.edges`)."""
    rows, micros = max(decision.micro_rows), len(decision.micro_rows)
    into, out, back = ([0] * len(decision.stages) for _ in range(3))
    for (src, dst, way), size in message_bytes(links, estimator.graph(Size(rows)).values).items():
        if way == FORWARD:
            into[dst] += size
            out[src] += size
        else:
            back[src] += size
            back[dst] += size
    schedule, shape, lengths = find(decision.schedule), Shape.of(decision), decision.token_slices
    counts, found = counts_for(decision), []
    for s, stage in enumerate(decision.stages):
        live, held = in_flight(schedule, s, replace(shape, slices=1)), None
        if lengths:
            held = most_tokens(schedule, s, shape, lengths), sum(lengths)
            live = -(-held[0] // held[1])
        own = of_stage(counts, s) if counts is not None else ()
        if own and not lengths:
            live = own[0][0]  # activations; what W keeps is counted beside them
        versions = streaming_of(decision).versions(s) if streams(schedule) else 1 if schedule.synchronous else live
        sizes = into[s], out[s], back[s]
        found.append(StageContext(stage, rows, micros, live, s == 0, versions, *sizes, decision.zero > 0, held, own))
    return found


def counts_for(decision: Decision) -> Counts | None:
    """Return what the workers hold under a decision's order; None where each stage just holds `in_flight` slots.

    That is so with whole backwards, one stage a rank and a limit of slots, which the order then reaches.
    """
    schedule, shape = find(decision.schedule), Shape.of(decision)
    if schedule.limit is not None and not schedule.splits and not shape.homes:
        return None
    return counts_of(schedule, shape, decision.token_slices)


def alike(stage: Stage) -> tuple[tuple[int, ...], ...]:
    """Return the ranks of a stage in groups with equal shares of the rows."""
    found: dict[int, list[int]] = {}
    for rank, share in zip(stage.ranks, stage.division.shares, strict=True):
        found.setdefault(share, []).append(rank)
    return tuple(map(tuple, found.values()))


def excess_bytes(context: StageContext, estimator: Estimator, spare_bytes: int = 0) -> int:
    """Return the bytes that a stage needs beyond the memory of its worst device; negative where it fits.

    spare_bytes: memory to leave free on each device.
    """
    groups = alike(context.stage)
    peaks = [
        (_estimate(context, estimator, ranks) if len(groups) > 1 else estimator.stage(context)).peak_bytes
        - estimator.cluster.least_memory_bytes(ranks)
        for ranks in groups
    ]
    return max(peaks) + spare_bytes


def _estimate(context: StageContext, estimator: Estimator, ranks: Sequence[int]) -> Estimate:
    """Return the estimate of the slowest of these ranks, which have equal shares of a micro-batch."""
    stage, divided = context.stage, context.stage.division
    replica = stage.ranks.index(ranks[0])

    def part(amount: int) -> int:
        return divided.part(amount, replica)

    size = Size(part(context.rows))
    kinds = sorted({estimator.device_types.index(estimator.cluster.devices[rank]) for rank in ranks})
    devices = [estimator.device_types[kind] for kind in kinds]
    whole, indices = estimator.graph(Size(context.rows)), [estimator.graph(size, kind) for kind in kinds]
    costed = [[index.ops[name].cost for name in stage.ops] for index in indices]
    kept, group_bytes = _kept(stage, indices[0])
    recompute_ns = max(sum([redone_ns(group, index) for group in stage.recompute]) for index in indices)
    recompute_ns += estimator.group_ns * len(stage.recompute)
    used = whole.params_of(stage)
    copies = sum([whole.copies.get(name, 0) for name in used])
    weights = sum([whole.params[name] for name in used])
    trained, summed = whole.trained_bytes(used), whole.summed_bytes(used)
    stepped = whole.largest_share(stage) if context.zero else trained
    optimizer_bytes = int(stepped * estimator.state_factor)
    state_bytes = summed + optimizer_bytes + (context.versions - 1) * weights
    received, sent = part(context.in_bytes), part(context.out_bytes)
    activation_bytes = kept + received
    workspace = max([cost.scratch_bytes for cost in costed[0]], default=0) + group_bytes
    own_micros = -(-context.micros // divided.period)
    buffers = MESSAGES_AHEAD * received + _sends_under_way(stage, own_micros) * sent
    weight_bytes = sum([cost.weight_bytes for cost in costed[0]])
    in_flight_bytes = context.in_flight_bytes(activation_bytes, weight_bytes)
    if len(stage.ranks) > 1:  # activations, workspace and messages are gone by then and make room
        rounded = (summed - trained) * stepped // max(1, trained)
        buffers += max(0, rounded - in_flight_bytes - workspace - buffers)
    peak_bytes = weights + copies + state_bytes + in_flight_bytes + workspace + buffers
    if context.first:
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
        reduce_ns=estimator.loads.ring(stage.ranks, 2).alone_ns(summed)
        + summing_ns(summed, stage.ranks, estimator.cluster),
        optimizer_ns=max(optimizer_ns(stepped, estimator.state_factor, d) + casting_ns(copies, d) for d in devices),
        weight_ns=max(sum([cost.weight_ns for cost in costs]) for costs in costed),
        weight_bytes=weight_bytes,
    )


def _sends_under_way(stage: Stage, micros: int) -> int:
    """Return how many messages of its kind a stage may have sent that are not received yet.

    Nothing comes back that shows a stage without a backward how far its readers are: it may be ahead of them.
    """
    return max(micros, MESSAGES_AHEAD) if stage.forward_only else MESSAGES_AHEAD


def redone_ns(group: Sequence[str], index: GraphIndex) -> int:
    """Return the nanoseconds of running a recomputed group again, up to the last op whose result autograd needs.

    An op of which only the operands are kept need not run for that.  O(group).
    """
    total = sum([index.ops[name].cost.fwd_ns for name in group])
    for name in reversed(group):
        op = index.ops[name]
        if op.parts not in ((), (name,)):  # a block
            return total - op.cost.tail_ns
        kept = keeps(op.target)
        total -= op.cost.fwd_ns if kept != "after" else 0
        if kept:
            break
    return total


def _kept(stage: Stage, index: GraphIndex) -> tuple[int, int]:
    """Return (bytes kept per micro-batch, bytes of the largest recomputed group) for a device's share of the rows."""
    saved = {name: index.ops[name].cost.saved_bytes for name in stage.ops}
    if not stage.recompute:
        return sum(saved.values()), 0
    ops = [index.ops[name] for name in stage.ops]
    group_of = {name: place for place, group in enumerate(stage.recompute) for name in group}
    writer = {w: group_of.get(op.name, -1) for op in ops for w in op.writes}  # -1: written outside all groups
    users = [(group_of[op.name], op) for op in ops if op.name in group_of]
    inputs = {r for group, op in users for r in op.reads if r in writer and writer[r] != group}
    kept = sum([amount for name, amount in saved.items() if name not in group_of])
    largest = max([sum([saved[name] for name in group]) for group in stage.recompute])
    return kept + sum([index.values[name] for name in inputs]), largest
