"""The estimate of one stage: what it is charged (`charges`) on the devices that need most, and what that depends on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import replace
from functools import lru_cache

import numpy as np

from autopart.ir.actions import BACKWARD, FORWARD, HOLDING
from autopart.ir.cluster import Cluster, Device
from autopart.ir.graph import Size
from autopart.ir.plan import Decision, Estimate, Stage
from autopart.ir.program import Edge
from autopart.passes.graph.cuts import Ints
from autopart.passes.ops.cost_model import GraphCosts
from autopart.passes.program.orders import Schedule, Shape, Turn
from autopart.passes.program.schedules import Pattern, find, in_flight, most_tokens, pattern, streams
from autopart.passes.program.stream import streaming_of
from autopart.passes.simulation.charges import FIELDS, Share, StageContext, charged
from autopart.passes.simulation.graph_index import GraphIndex
from autopart.passes.simulation.slices import SliceShares, share_of
from autopart.passes.simulation.traffic import Loads


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
        places = {device: place for place, device in enumerate(self.device_types)}
        self._kinds = [places[device] for device in cluster.devices]
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

    def kinds_of(self, ranks: Iterable[int]) -> list[int]:
        """Return the place of the device of each rank among `device_types`."""
        return [self._kinds[rank] for rank in ranks]

    def graph(self, size: Size, device_type: int = 0) -> GraphIndex:
        """Return the graph with its costs at this size on this type of device."""
        key = size, device_type
        if key not in self._graphs:
            self._graphs[key] = GraphIndex(self.cost_model.graph(size, device_type))
        return self._graphs[key]

    def stage(self, stage: StageContext) -> Estimate:
        """Return the estimate of a stage in bytes and nanoseconds: times of its slowest device, and the memory of the
        one that needs most.  O(uses) for each share that some device has."""
        known = self._stages.get(stage)  # looked up once: a key takes long
        if known is None:
            found = [self.stage_on(stage, ranks) for ranks in alike(stage.stage)]
            worst = {name: max([getattr(e, name) for e in found]) for name in FIELDS} if len(found) > 1 else {}
            known = self._stages[stage] = replace(found[0], **worst) if worst else found[0]
        return known

    def stage_on(self, stage: StageContext, ranks: Sequence[int]) -> Estimate:
        """Return the estimate of a stage on the slowest of some ranks, which have equal shares of a micro-batch."""
        rows = stage.stage.division.part(stage.rows, stage.stage.ranks.index(ranks[0]))
        types = {self.device_types[kind]: self.graph(Size(rows), kind) for kind in sorted(set(self.kinds_of(ranks)))}
        whole = self.graph(Size(stage.rows))
        return charged(Share(stage, ranks, whole, types, self.cluster, self.loads, self.state_factor, self.group_ns))


def device_types(cluster: Cluster) -> tuple[Device, ...]:
    """Return the distinct devices; the one of rank 0 comes first."""
    return tuple(cluster.types)


def message_bytes(
    links: tuple[Edge, ...], sizes: dict[str, int], number: int = 0, length: int = 1, tokens: int = 1
) -> dict[tuple[int, int, str], int]:
    """Return the bytes of a message by source stage, destination stage and way.

    sizes: of values, in bytes.  number, length, tokens: of a slice its number and its tokens, and those of a sequence.
    """

    def size(edge: Edge, way: str) -> int:
        names = edge.names(way, number)
        return sum([sizes[v] if v in edge.whole else share_of(sizes[v], length, tokens) for v in names])

    found = {(e.src, e.dst, FORWARD): size(e, FORWARD) for e in links}
    return found | {(e.dst, e.src, BACKWARD): size(e, BACKWARD) for e in links if e.grads}


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
    peers = [0] * len(decision.stages)
    for pair in {(e.src, e.dst) for e in links}:
        for s, t in (pair, pair[::-1]):
            width, others = len(decision.stages[s].ranks), len(decision.stages[t].ranks)
            aligned = others % width == 0 or width % others == 0
            peers[s] += min(others, -(-others // width) + (not aligned))
    schedule, shape, lengths = find(decision.schedule), Shape.of(decision), decision.token_slices
    counts, found = counts_for(decision), []
    for s, stage in enumerate(decision.stages):
        live, held = in_flight(schedule, s, replace(shape, slices=1)), None
        if lengths:
            held = most_tokens(schedule, shape, lengths)[s], sum(lengths)
            live = -(-held[0] // held[1])
        own = of_stage(counts, s) if counts is not None else ()
        if own and not lengths:
            live = own[0][0]  # activations; what W keeps is counted beside them
        versions = streaming_of(decision).versions(s) if streams(schedule) else 1 if schedule.synchronous else live
        sizes = into[s], out[s], back[s]
        found.append(
            StageContext(stage, rows, micros, live, s == 0, versions, *sizes, decision.zero > 0, held, own, peers[s])
        )
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
    shares = stage.division.shares
    if len(set(shares)) == 1:
        return (stage.ranks,)
    found: dict[int, list[int]] = {}
    for rank, share in zip(stage.ranks, shares, strict=True):
        found.setdefault(share, []).append(rank)
    return tuple(map(tuple, found.values()))


# ---- what is held for backwards -------------------------------------------------------------------------------------
# A stage holds the activations of a slot from F to the end of B, or to I, and from I to W what W needs.  The bytes that
# a worker holds after a compute are a sum over its stages, so the most bytes follow from how many slots of each stage
# are between F and I, and between I and W, after each of its computes.  Few such counts are different, and they depend
# on the order alone: they are found once for all candidates of a search that share it.

Counts = Mapping[tuple[int, ...], Ints]
"""By the stages of a worker, ascending: a row for each different state; of each stage first the slots between F and I,
then of each stage those between I and W.  With slices of tokens: tokens instead of slots."""


@lru_cache(maxsize=64)
def counts_of(schedule: Schedule, shape: Shape, lengths: tuple[int, ...] = ()) -> Counts:
    """Return the counts of a schedule's own order.  lengths: tokens of the slices.  O(stages * micros * slices)."""
    return counts_in(pattern(schedule, shape), lengths)


def counts_in(order: Pattern, lengths: tuple[int, ...] = ()) -> Counts:
    """Return the counts of an order of computes.  lengths: tokens of the slices.  O(turns log turns)."""
    found: dict[tuple[int, ...], Ints] = {}
    for turns in order.workers:
        stages = tuple(sorted({stage for _, stage, _ in turns}))
        rows = _rows(_closed(turns, order.shape), stages, lengths)
        found[stages] = np.concatenate([found[stages], rows]) if stages in found else rows
    return {stages: np.unique(rows, axis=0) for stages, rows in found.items()}


def _closed(turns: Sequence[Turn], shape: Shape) -> Sequence[Turn]:
    """Return the computes with a backward right behind the forwards of each micro-batch on stages without a backward,
    which hold nothing afterwards."""
    if not shape.forward_only:
        return turns
    closed: list[Turn] = []
    for kind, stage, unit in turns:
        closed.append((kind, stage, unit))
        if stage in shape.forward_only and unit % shape.slices == shape.slices - 1:
            closed += [("B", stage, unit - piece) for piece in range(shape.slices)]
    return closed


def _rows(turns: Sequence[Turn], stages: tuple[int, ...], lengths: tuple[int, ...]) -> Ints:
    column = {stage: place for place, stage in enumerate(stages)}
    changes = np.zeros((len(turns), 2 * len(stages)), dtype=np.int64)
    for row, (kind, stage, unit) in enumerate(turns):
        size = lengths[unit % len(lengths)] if lengths else 1
        held, kept = HOLDING[kind]
        changes[row, column[stage]] = held * size
        changes[row, len(stages) + column[stage]] = kept * size
    return np.unique(np.cumsum(changes, axis=0), axis=0)


def of_stage(counts: Counts, stage: int) -> tuple[tuple[int, int], ...]:
    """Return (held, kept) of one stage, those that another state exceeds in both left out; most held first.

    O(states log states).
    """
    pairs: set[tuple[int, int]] = set()
    for stages, rows in counts.items():
        if stage in stages:
            at = stages.index(stage)
            pairs.update(map(tuple, rows[:, [at, len(stages) + at]].tolist()))
    front: list[tuple[int, int]] = []
    for held, kept in sorted(pairs, reverse=True):
        if not front or kept > front[-1][1]:
            front.append((held, kept))
    return tuple(front)


def most_bytes(rows: Ints, held_bytes: Sequence[int], kept_bytes: Sequence[int], tokens: int = 1) -> int:
    """Return the most bytes that a worker holds.

    rows: of its counts.  held_bytes, kept_bytes: of a slot of each of its stages.  tokens: of a slot, where rows count
    tokens.  O(states * stages).
    """
    amounts = np.array([*held_bytes, *kept_bytes], dtype=np.int64)
    return -(-int((rows @ amounts).max(initial=0)) // tokens)


def own_bytes(context: StageContext, estimate: Estimate) -> int:
    """Return the bytes of a stage besides what it holds for backwards, and its workspace."""
    held = context.in_flight_bytes(estimate.activation_bytes, estimate.weight_bytes)
    return estimate.peak_bytes - held - estimate.workspace_bytes
