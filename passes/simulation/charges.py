"""What a stage is charged, in bytes and nanoseconds: the list `CHARGES`.

An entry is a function of a `Share`: a stage on devices that have equal shares of its rows.  It returns what it adds to
fields of `Estimate`, by their names, and may read in `Share.sums` what the entries before it have added.  Its docstring
says what is charged for what, and where that is wrong.  Nothing but an entry adds to an estimate: what the simulator or
the search know of a stage besides follows from its fields.

Assumed, and wrong where: times and saved bytes of a stage are the sums over its ops; weights, gradients and optimizer
state stay allocated; the allocator wastes nothing.  Clones count in every stage that runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields

from autopart.ir.cluster import DEVICE_KINDS, Cluster, Device
from autopart.ir.plan import Estimate, Stage
from autopart.ir.program import MESSAGES_AHEAD
from autopart.passes.simulation.graph_index import GraphIndex
from autopart.passes.simulation.slices import share_of
from autopart.passes.simulation.traffic import Loads

FIELDS = tuple([each.name for each in fields(Estimate)])
"""What may be charged."""


@dataclass(frozen=True)
class StageContext:
    """Everything that the estimate of a stage depends on.

    rows: of the largest micro-batch.  live: micro-batches in flight.  first: whether it holds the whole batch.
    versions: copies of its weights.  in_bytes, out_bytes: received and sent in the forward of a whole micro-batch.
    back_bytes: of gradients, received and sent.  zero: whether replicas share the optimizer state.  held: with slices
    of tokens, (tokens in flight at most, tokens of a micro-batch).  counts: where a backward has two parts or a rank
    several stages, what the stage holds at its fullest times (`stage_costs.of_stage`), in micro-batches or tokens.
    peers: ranks that one of its ranks exchanges messages with, at most.
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
    peers: int = 0

    def in_flight_bytes(self, held_bytes: int, kept_bytes: int) -> int:
        """Return the most bytes that are held for backwards.

        held_bytes, kept_bytes: for a micro-batch, from its forward on, and from I to W.
        """
        tokens, of_tokens = self.held or (self.live, 1)
        if not self.counts:
            return share_of(held_bytes, tokens, of_tokens)
        return max(-(-(held * held_bytes + kept * kept_bytes) // of_tokens) for held, kept in self.counts)


@dataclass
class Share:
    """A stage on devices that have equal shares of its rows: what the entries of `CHARGES` read.

    ranks: of these devices.  whole: the graph at the rows of a whole micro-batch.  types: the types of these devices,
    each with the graph at their rows.  state_factor, group_ns: as in `Estimator`.  sums: what is charged so far, by
    field of `Estimate`.  costs: of the stage's ops together, for each type.  weights, copies, trained, summed: bytes of
    its parameters, of copies, of the trainable ones, and of gradients as replicas sum them.  once_ns: `Param.once_ns`
    of all.  updated: of the trainable ones, those that a device updates.  Where replicas take micro-batches in turn, a
    device has all rows of every r-th one (micros).
    """

    context: StageContext
    ranks: Sequence[int]
    whole: GraphIndex
    types: Mapping[Device, GraphIndex]
    cluster: Cluster
    loads: Loads
    state_factor: float
    group_ns: int
    sums: dict[str, int] = field(default_factory=lambda: dict.fromkeys(FIELDS, 0))

    def __post_init__(self) -> None:
        """O(uses) for new stages."""
        stage, whole = self.context.stage, self.whole
        self.stage, self._replica = stage, stage.ranks.index(self.ranks[0])
        self.micros = -(-self.context.micros // stage.division.period)
        self.costs = [index.sums(stage.ops) for index in self.types.values()]
        _, self.weights, self.copies, self.trained, self.summed, self.once_ns = whole.params_of(stage)
        self.updated = whole.largest_share(stage) if self.context.zero else self.trained

    def part(self, amount: int) -> int:
        """Return the part of these devices in an amount of all rows."""
        return self.stage.division.part(amount, self._replica)

    @property
    def in_flight_bytes(self) -> int:
        """The most bytes that are held for backwards, as charged so far."""
        return self.context.in_flight_bytes(self.sums["activation_bytes"], self.sums["weight_bytes"])


# ---- rates ---------------------------------------------------------------------------------------------------------


def optimizer_ns(trained_bytes: int, state_factor: float, device: Device) -> int:
    """Return the nanoseconds of an optimizer step over parameters of trained_bytes: the weights are read and written,
    the gradients are read, and those over its state (`DeviceKind`)."""
    passes = 3 + DEVICE_KINDS[device.kind].state_passes * state_factor
    return int(trained_bytes * passes * 1e9 / device.reached_bytes_per_s)


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


# ---- the charges ---------------------------------------------------------------------------------------------------

Amounts = Mapping[str, int]
"""What an entry adds, by field of `Estimate`."""


def computing(share: Share) -> Amounts:
    """Charge the times of the ops on the slowest device, what they save for their backwards, and the largest workspace
    of one of them."""
    own = share.costs[0]
    return {
        "fwd_ns": max([costs.fwd_ns for costs in share.costs]),
        "bwd_ns": max([costs.bwd_ns for costs in share.costs]),
        "flops": own.flops,
        "activation_bytes": own.saved_bytes,
        "workspace_bytes": own.scratch_bytes,
    }


def split_backward(share: Share) -> Amounts:
    """Charge what W takes where the backward has two parts, exchanges of I that it does not hide then, and what a
    micro-batch keeps from I to W: the inputs and the gradients of its products, also those that a recomputed group has
    freed.  Nothing of that where the stage's backward is whole."""
    if share.stage.whole_backward:
        return {}
    return {
        "hidden_ns": max([costs.hidden_ns for costs in share.costs]),
        "weight_ns": max([costs.weight_ns for costs in share.costs]),
        "weight_bytes": share.costs[0].weight_bytes,
    }


def messages(share: Share) -> Amounts:
    """Charge what is received, kept until the backward; `MESSAGES_AHEAD` messages of each kind under way, and receives
    posted ahead; and the cores that copy messages.

    Nothing comes back that shows a stage without a backward how far its readers are: all that it sends in a step may be
    under way.
    """
    context, devices = share.context, [*share.types]
    received, sent = share.part(context.in_bytes), share.part(context.out_bytes)
    ahead = max(share.micros, MESSAGES_AHEAD) if share.stage.forward_only else MESSAGES_AHEAD
    return {
        "fwd_ns": copying_ns(received + sent, devices),
        "bwd_ns": copying_ns(share.part(context.back_bytes), devices),
        "activation_bytes": received,
        "buffer_bytes": MESSAGES_AHEAD * received + ahead * sent,
    }


def recomputation(share: Share) -> Amounts:
    """Charge for each recomputed group what it keeps, its inputs instead of what its ops save (its outputs are kept by
    their readers), and a second forward; for the largest what it saves in its own backward.

    The second forward ends with the last op whose result autograd needs (`runtime/stages/recomputation` stops there): a
    product at its end, of which only the operands are kept, does not run again.
    """
    groups, indices = share.stage.recompute, [*share.types.values()]
    if not groups:
        return {}
    again = max([sum([index.redone(group).again_ns for group in groups]) for index in indices])
    again += share.group_ns * len(groups)
    redone = [indices[0].redone(group) for group in groups]
    inputs = frozenset[str]().union(*[group.inputs for group in redone]) & indices[0].written(share.stage)
    kept, left_out = sum([indices[0].values[name] for name in inputs]), sum([group.saved_bytes for group in redone])
    most = max([group.saved_bytes for group in redone])
    return {"recompute_ns": again, "bwd_ns": again, "activation_bytes": kept - left_out, "workspace_bytes": most}


def weights(share: Share) -> Amounts:
    """Charge each parameter once, with its copy in another precision (under autocast, made once a step), and its
    gradient in fp32 at least."""
    return {"param_bytes": share.weights + share.copies, "state_bytes": share.summed}


def weight_versions(share: Share) -> Amounts:
    """Charge the older weights that asynchronous schedules keep (`Streaming.versions`)."""
    return {"state_bytes": (share.context.versions - 1) * share.weights}


def optimizer(share: Share) -> Amounts:
    """Charge the optimizer state, and a step at memory speed, before which copies of the weights are cast.

    With ZeRO-1 (`ir.shares.owners_of`) both are those of the largest share.  The weights of a stage without a backward
    are cast in no time, since it has no optimizer.
    """
    state = int(share.updated * share.state_factor)
    steps = [
        optimizer_ns(share.updated, share.state_factor, device)
        + int(share.copies * 3 * 1e9 / device.mem_bytes_per_s)  # each is read, and its copy written
        for device in share.types
    ]
    return {"optimizer_bytes": state, "state_bytes": state, "optimizer_ns": max(steps)}


def replica_sums(share: Share) -> Amounts:
    """Charge the sum of gradients over replicas: two turns of the ring.

    With ZeRO-1 gradients go to their owner and new values come back, one turn each.  Gradients in half precision are
    summed in fp32 and rounded after the step; activations, workspace and messages are gone by then and make room.
    """
    ranks, sums = share.stage.ranks, share.sums
    if len(ranks) < 2:
        return {}
    rounded = (share.summed - share.trained) * share.updated // max(1, share.trained)
    free = share.in_flight_bytes + sums["workspace_bytes"] + sums["buffer_bytes"]
    return {
        "reduce_ns": share.loads.ring(ranks, 2).alone_ns(share.summed) + summing_ns(share.summed, ranks, share.cluster),
        "buffer_bytes": max(0, rounded - free),
    }


def group_sums(share: Share) -> Amounts:
    """Charge, before the optimizer's step, the sums of gradients of parameters that the ranks of a shard group hold
    whole, as if nothing ran beside them."""
    return {"optimizer_ns": share.once_ns}


def communicators(share: Share) -> Amounts:
    """Charge what a library holds for each rank that messages are exchanged with, and for the sum over replicas.

    Both by the kind of device (`DeviceKind`).  Sums of tied parameters over stages are left to its reserve.
    """
    kind, replicated = DEVICE_KINDS[share.cluster.kind], len(share.stage.ranks) > 1
    return {"buffer_bytes": share.context.peers * kind.peer_bytes + replicated * kind.group_bytes}


def batch_inputs(share: Share) -> Amounts:
    """Charge the first stage with the inputs of the whole batch."""
    if not share.context.first:
        return {}
    values = share.whole.values
    return {"peak_bytes": share.micros * share.part(sum([values[name] for name in share.whole.graph.inputs]))}


def at_once(share: Share) -> Amounts:
    """Charge everything that is allocated at the fullest time of a step, when most is held for backwards.

    Where the backward has two parts that is the most of what F and what I leave together, at any time of the order
    (`stage_costs.counts_in`).  Ranks with several stages: `estimate.excess_of`.
    """
    sums = share.sums
    standing = sums["param_bytes"] + sums["state_bytes"] + sums["workspace_bytes"] + sums["buffer_bytes"]
    return {"peak_bytes": standing + share.in_flight_bytes}


CHARGES: tuple[Callable[[Share], Amounts], ...] = (
    computing,
    split_backward,
    messages,
    recomputation,
    weights,
    weight_versions,
    optimizer,
    group_sums,
    replica_sums,  # behind all that may be gone by then
    communicators,
    batch_inputs,
    at_once,  # last: the sum of all memory
)
"""What is charged, in this order; the module's docstring says what an entry must hold."""


def charged(share: Share) -> Estimate:
    """Return the estimate of a stage on some of its devices: the sums of what `CHARGES` add."""
    sums, context = share.sums, share.context
    sums |= {"in_bytes": context.in_bytes, "out_bytes": context.out_bytes, "live": context.live}
    for charge in CHARGES:
        for name, amount in charge(share).items():
            sums[name] += amount
    return Estimate(**sums)
