"""When a model is computed: one linear order of everything that all ranks do in one step (`ir.actions`)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import lcm

from autopart.ir.actions import (
    ACTIONS,
    ALL,
    ALONE,
    COLLECTIVE,
    COMPUTE,
    FORWARD,
    OWNERS,
    RECEIVES,
    REPLICAS,
    SEND,
    TIED,
    UPDATE,
    Action,
    Slot,
)
from autopart.ir.shares import Division, Transfer, common_period, division, split_among

MESSAGES_AHEAD = 2
"""Number of receives that a channel posts before they are needed; each of them and each send under way has a buffer."""

FIRST_BUCKET_BYTES, BUCKET_BYTES = 1 << 20, 25 << 20
"""Size of the first bucket in which replicas sum gradients, small so that the sums begin early, and of the others."""

MAX_BUCKET_BYTES = 1 << 40


@dataclass(frozen=True, slots=True)
class Edge:
    """The values that flow from one stage to a later one for each slot, as one message.

    values: names in a fixed order.  grads: those of them whose gradients come back.  whole: those that are not sliced
    and pass once for each micro-batch, with its first slice (whose backward is the last).
    """

    src: int
    dst: int
    values: tuple[str, ...]
    grads: tuple[str, ...]
    whole: tuple[str, ...] = ()

    def names(self, way: str, slice: int = 0) -> tuple[str, ...]:
        """Return what is sent for a slice: values forward, gradients backward; later slices may send nothing."""
        names = self.values if way == FORWARD else self.grads
        return tuple(name for name in names if name not in self.whole) if slice and self.whole else names


@dataclass(frozen=True, slots=True)
class Exchange:
    """Messages between a rank and one peer that are posted together, since they follow each other in the order.

    after: number of the rank's own actions, receives not counted, that come before the end of the exchange.  sends: of
    this rank.  receives: the peer's sends.  Both ends leave out messages that have no rows in a step.
    """

    peer: int
    after: int
    sends: tuple[Action, ...]
    receives: tuple[Action, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """Everything that all ranks do in one step.

    stage_ranks[s]: the ranks that run stage s, one or several (replicas); a rank may run several stages.  world: number
    of ranks.  order: all actions, each after everything that it depends on; a message is listed once, as its send, and
    a collective of all ranks once, as an action of stage 0.  Each rank plays its part of the order, so no rank waits
    for ever: the first of all unfinished actions has everything that it needs.  edges: what flows between stages.
    tied: parameter name and the stages that use it, for every trainable parameter that several stages use; the first
    stage owns it.  slices: number of slices of each sequence.  divisions: how the ranks of each stage divide
    micro-batches; empty if all have equal shares of the rows.  owners: stages whose replicas share the optimizer state.
    statistics: stages whose replicas meet in every compute, as they share batch statistics.  posting: for each rank its
    exchanges in the order in which it posts them (on a rank its own alone); empty if the transport may post messages
    ahead (`passes.program.messages`).  rhythm: of asynchronous training; nothing then happens once a step.
    forward_only: stages without a backward, whose optimizer does nothing.  unsummed: stages whose replicas have nothing
    to sum: no gradients, no new buffers.  parted: tied parameters of which each rank of a shard group has a part.
    """

    micros: int
    world: int
    stage_ranks: tuple[tuple[int, ...], ...]
    order: tuple[Action, ...]
    edges: tuple[Edge, ...] = ()
    tied: tuple[tuple[str, tuple[int, ...]], ...] = ()
    slices: int = 1
    divisions: tuple[Division, ...] = ()
    owners: tuple[int, ...] = ()
    statistics: tuple[int, ...] = ()
    posting: tuple[tuple[Exchange, ...], ...] = ()
    rhythm: Streaming | None = None
    forward_only: tuple[int, ...] = ()
    unsummed: tuple[int, ...] = ()
    parted: tuple[str, ...] = ()

    @property
    def updates(self) -> tuple[int, ...]:
        """In asynchronous training the number of micro-batches, for each stage, whose gradients make an update of its
        weights; else ()."""
        return self.rhythm.updates if self.rhythm is not None else ()

    def __str__(self) -> str:
        return " ".join(str(action) for action in self.order)

    def groups(self, meets: str) -> tuple[tuple[int, ...], ...]:
        """Return the groups of stages, each ascending, whose ranks take part in actions that meet like this."""
        stages = range(len(self.stage_ranks))
        if meets == ALL:
            return (tuple(stages),) if self.world > 1 else ()
        if meets == TIED:
            return linked_stages(self.tied)
        if meets == REPLICAS:
            return tuple(
                (stage,) for stage in stages if len(self.stage_ranks[stage]) > 1 and stage not in self.unsummed
            )
        if meets == ALONE:
            return tuple((stage,) for stage in stages if stage not in self.forward_only)
        return tuple((stage,) for stage in (self.owners if meets == OWNERS else stages))

    def once_a_step(self, *, backward: bool = True) -> Iterator[Action]:
        """Yield the actions that happen once a step, in the order of the table."""
        for name, kind in ACTIONS.items() if not self.updates else ():
            if not kind.is_per_slot and (backward or kind.way == FORWARD):
                for group in self.groups(kind.meets):
                    yield from (Action(name, Slot(stage)) for stage in (group[:1] if kind.meets == ALL else group))

    def updating(self, stage: int, micro: int) -> Action:
        """Return the update of a stage's weights that a micro-batch has a part in; it bears the last of its
        micro-batches."""
        every = self.updates[stage]
        return Action("U", Slot(stage, min(self.micros, (micro // every + 1) * every) - 1))

    def group(self, action: Action) -> tuple[int, ...]:
        """Return the stages whose ranks take part in a collective, else ()."""
        kind = ACTIONS[action.kind]
        groups = self.groups(kind.meets) if kind.role in (COLLECTIVE, UPDATE) else ()
        return next((group for group in groups if action.stage in group), ())

    def members(self, action: Action) -> tuple[int, ...]:
        """Return the ranks that take part in a collective, else ()."""
        if ACTIONS[action.kind].meets == ALL:
            return tuple(range(self.world))
        return self.ranks_of(self.group(action))

    def joins(self, rank: int, action: Action) -> bool:
        """Return whether a rank joins the others here: it does so once, with the last of its stages in the group."""
        group = self.group(action)
        own = [stage for stage in group if rank in self.stage_ranks[stage]]
        return bool(group) and (ACTIONS[action.kind].meets == ALL or own[-1:] == [action.stage])

    def ranks_of(self, stages: Iterable[int]) -> tuple[int, ...]:
        """Return the ranks that run any of these stages, ascending."""
        return tuple(sorted({rank for stage in stages for rank in self.stage_ranks[stage]}))

    def tied_ranks(self, name: str, stages: Iterable[int]) -> tuple[tuple[int, ...], ...]:
        """Return the groups of ranks that have the same of a tied parameter: all, or those with the same part."""
        parts = self.division(0).shards if name in self.parted else 1
        every = [[r for s in stages for r in self.stage_ranks[s][n::parts]] for n in range(parts)]
        return tuple(tuple(sorted(set(ranks))) for ranks in every)

    def division(self, stage: int) -> Division:
        """Return how the ranks of a stage divide micro-batches."""
        return self.divisions[stage] if self.divisions else division(len(self.stage_ranks[stage]))

    def players(self, action: Action) -> tuple[int, ...]:
        """Return the ranks that have an action in their part.

        These are the ranks of its stage, or the one that has the whole micro-batch; all ranks for a collective of all.
        """
        kind = ACTIONS[action.kind]
        if kind.meets == ALL:
            return tuple(range(self.world))
        ranks = self.stage_ranks[action.stage]
        if kind.role == UPDATE:
            return ranks
        alone = self.division(action.stage).player(action.micro) if self.divisions and action.micro >= 0 else None
        return ranks if alone is None else ranks[alone : alone + 1]

    def part(self, rank: int) -> tuple[Action, ...]:
        """Return what one rank does, in order; a message is a send on one rank and a receive on the other.

        A receive comes right before the compute that needs it, and several receives in the order of their peers: there
        the rank waits for the message.  The transport decides when it arrives (see `posts`).  O(order).
        """
        return self.parts((rank,))[0]

    def parts(self, ranks: Sequence[int]) -> tuple[tuple[Action, ...], ...]:
        """Return `part` of each of these ranks, found in one pass.  O(order * ranks of a stage)."""
        parts: dict[int, list[Action]] = {rank: [] for rank in ranks}
        all_of = [[parts[rank] for rank in own if rank in parts] for own in self.stage_ranks]
        arrived: dict[tuple[int, int, int, str], list[Action]] = {}
        for action in self.order:
            kind, slot = ACTIONS[action.kind], action.slot
            players = all_of[slot.stage]
            if self.divisions or kind.meets == ALL:
                players = [parts[rank] for rank in self.players(action) if rank in parts]
            if kind.role == SEND and action.peer is not None and all_of[action.peer]:
                received = Action(RECEIVES[kind.way], slot.on(action.peer), slot.stage)
                arrived.setdefault((action.peer, slot.micro, slot.slice, kind.way), []).append(received)
            elif kind.role == COMPUTE and all_of[slot.stage]:
                messages = arrived.pop((slot.stage, slot.micro, slot.slice, kind.way), [])
                messages.sort(key=lambda message: message.peer or 0)
                for part in players:
                    part.extend(messages)
            for part in players:
                part.append(action)
        return tuple(tuple(parts[rank]) for rank in ranks)

    def transfers(self, send: Action) -> tuple[Transfer, ...]:
        """Return the parts of a message, in order of their rows; each row is sent once.  O(senders + receivers)."""
        assert send.peer is not None
        return self._transfers(send.stage, send.peer, send.micro)

    def _transfers(self, src: int, dst: int, micro: int) -> tuple[Transfer, ...]:
        return split_among(self.stage_ranks[src], self.stage_ranks[dst], self.division(src), self.division(dst), micro)

    def channels(self, src: int, dst: int) -> tuple[tuple[int, int], ...]:
        """Return the pairs (rank of src, rank of dst) that may exchange messages, in the order of the first ones."""
        micros = range(min(max(1, self.micros), common_period(self.division(src), self.division(dst))))
        return tuple(dict.fromkeys((t.src_rank, t.dst_rank) for m in micros for t in self._transfers(src, dst, m)))

    def carries(self, send: Action, src_rank: int, dst_rank: int) -> bool:
        """Return whether a part of a message may go from src_rank to dst_rank."""
        return any((t.src_rank, t.dst_rank) == (src_rank, dst_rank) for t in self.transfers(send))

    def posts(self, src_rank: int, dst_rank: int) -> Iterator[Action]:
        """Yield the sends from one rank to another in order, which is the order of their channel."""
        for action in self.order:
            if action.is_a.role == SEND and self.carries(action, src_rank, dst_rank):
                yield action

    @property
    def talking_pairs(self) -> tuple[tuple[int, int], ...]:
        """The pairs of ranks that may exchange messages, ascending; they are connected before the first step."""
        pairs: set[tuple[int, int]] = set()
        for edge in self.edges:
            pairs.update((min(a, b), max(a, b)) for a, b in self.channels(edge.src, edge.dst) if a != b)
        return tuple(sorted(pairs))


@dataclass(frozen=True, slots=True)
class Streaming:
    """The rhythm of asynchronous training, whose pipeline is not emptied between batches, and its versions of weights.

    Micro-batches are counted over all batches.  In tick i every stage s runs the forward of micro-batch i, then the
    backward of micro-batch i - lags[s]; what does not exist (before the first, behind the last) is left out.  So one
    tick describes the warm-up, the steady state and the drain of any number of batches.

    micros: micro-batches of a batch.  lags: for each stage, the ticks between the forward and the backward of a
    micro-batch.  updates: for each stage, the number of micro-batches whose gradients make an update, a multiple of
    `micros`.  periods: for each stage, the replicas that take micro-batches in turn, 1 if none do.  delayed: whether
    every stage uses the weights of exactly one update earlier (PipeDream-2BW), in place of its newest (PipeDream).
    """

    micros: int
    lags: tuple[int, ...]
    updates: tuple[int, ...]
    periods: tuple[int, ...]
    delayed: bool = False

    @property
    def ring(self) -> int:
        """Number of slots of a stage: micro-batches a ring apart have the same slot, and are never alive together.

        It holds twice what is in flight, so that messages of the last user of a slot have long arrived.
        """
        unit = lcm(self.micros, *self.updates, *self.periods)
        return -(-2 * (self.micros + max(self.lags)) // unit) * unit

    def version(self, stage: int, batch: int) -> int:
        """Return the number of updates in the weights that a batch uses on a stage, forward and backward.

        These are all that the stage has made before the batch's first forward (weight stashing; PipeDream, SOSP 2019,
        section 3.3), or all but the last one (Narayanan et al., "Memory-Efficient Pipeline-Parallel DNN Training",
        ICML 2021, section 3.1).
        """
        if self.delayed:
            return max(0, batch - 1)
        return max(0, (batch * self.micros - self.lags[stage]) // self.updates[stage])

    def versions(self, stage: int) -> int:
        """Return the most versions of its weights that a stage holds at once, the newest included."""
        return 2 if self.delayed else 1 - (-self.lags[stage] // self.updates[stage])

    def staleness(self, stage: int) -> int:
        """Return how many updates the stage makes, at most, between a batch's forward and the update that it is in."""
        return self.versions(stage) - 1

    def last_tick(self, micros: int) -> int:
        """Return the tick after which nothing is in flight, when `micros` micro-batches have entered."""
        whole = [(micros - 1) // every * every + every for every in self.updates]
        return max(end - 1 + lag for end, lag in zip(whole, self.lags, strict=True))


def inside(program: Program, action: Action) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return the groups that make exchanges inside of a compute, each as (purpose, ranks ascending): ranks that compute
    parts of the same rows, then all ranks of a stage that share batch statistics; else ()."""
    if ACTIONS[action.kind].role != COMPUTE:
        return ()
    ranks = program.stage_ranks[action.stage]
    shared = (("statistics", tuple(sorted(ranks))),) if action.stage in program.statistics and len(ranks) > 1 else ()
    return (*(("shards", group) for group in program.division(action.stage).groups(ranks)), *shared)


def linked_stages(tied: Sequence[tuple[str, tuple[int, ...]]]) -> tuple[tuple[int, ...], ...]:
    """Return the groups of stages that share parameters, directly or through others, ordered by first stage."""
    groups: list[set[int]] = []
    for _, stages in tied:
        joined = set(stages).union(*(group for group in groups if not group.isdisjoint(stages)))
        groups = [group for group in groups if group.isdisjoint(stages)] + [joined]
    return tuple(sorted(tuple(sorted(group)) for group in groups))
