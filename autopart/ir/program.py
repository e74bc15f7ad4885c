"""When it is computed: one linear order of everything that all ranks do in one step.

Actions print and parse:  2F0 forward of micro-batch 0 on stage 2;  2B0 its backward;  2SF0>3 send its activations to
stage 3;  3RF0<2 receive them;  3SB0>2 send their gradients back;  2RB0<3 receive those;  2R sum the gradients of a
stage over its replicas;  2T sum the gradients of parameters that several stages use;  2G gather the new values of
parameters from the replicas that updated them;  0A agree, on all ranks, on what the step gave;  2O the optimizer's
step.  A slice of a sequence stands behind the micro-batch: 2F0.1 is the second slice of micro-batch 0.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from autopart.ir.errors import ProgramError
from autopart.ir.shares import Division, Transfer, division, split_rows, together

COMPUTE, SEND, RECEIVE, COLLECTIVE, LOCAL = "compute", "send", "receive", "collective", "local"
FORWARD, BACKWARD = "forward", "backward"


ALONE, PAIR, REPLICAS, OWNERS, TIED, ALL = "alone", "pair", "replicas", "owners", "tied", "all"
"""Who meets in an action: nobody; sender and receiver; the ranks of a stage that has several; those of a stage whose
replicas share the optimizer's state; the ranks of all stages that are linked by tied parameters; every rank."""


@dataclass(frozen=True, slots=True)
class ActionKind:
    """Describes one kind of action.

    role: compute, send, receive, collective or local.  way: forward or backward; of what happens once a step, forward
    if it stands in programs without a backward too.  label: what it does, in words that follow the number of the stage
    or rank.  needs: the kind whose action on the same slot has to be over first; for what ends a step, the kind of
    every slot of all stages that meet.  A collective that needs nothing begins a step.  frees: what the slot no longer
    holds once it is over: "activations" or "gradients" or "".  meets: who meets in it (`Program.groups`).
    """

    role: str
    way: str
    label: str
    needs: str = ""
    frees: str = ""
    meets: str = ALONE

    @property
    def is_message(self) -> bool:
        """Whether it has a peer."""
        return self.role in (SEND, RECEIVE)

    @property
    def is_per_slot(self) -> bool:
        """Whether it belongs to one micro-batch (and slice); else it happens once a step."""
        return self.role in (COMPUTE, SEND, RECEIVE)


ACTIONS: dict[str, ActionKind] = {
    "F": ActionKind(COMPUTE, FORWARD, "forward"),
    "B": ActionKind(COMPUTE, BACKWARD, "backward", needs="F", frees="activations"),
    "SF": ActionKind(SEND, FORWARD, "sending activations", needs="F", meets=PAIR),
    "RF": ActionKind(RECEIVE, FORWARD, "receiving activations", meets=PAIR),
    "SB": ActionKind(SEND, BACKWARD, "sending gradients", needs="B", frees="gradients", meets=PAIR),
    "RB": ActionKind(RECEIVE, BACKWARD, "receiving gradients", meets=PAIR),
    "G": ActionKind(COLLECTIVE, FORWARD, "gathering new values of parameters", meets=OWNERS),
    "T": ActionKind(COLLECTIVE, BACKWARD, "summing tied gradients", needs="B", meets=TIED),
    "R": ActionKind(COLLECTIVE, BACKWARD, "summing gradients over replicas", needs="B", meets=REPLICAS),
    "A": ActionKind(COLLECTIVE, FORWARD, "agreeing on losses and failures", needs="B", meets=ALL),
    "O": ActionKind(LOCAL, "", "optimizer step", needs="B"),
}
"""The one table of actions, in the order in which those that happen once a step stand in a program.  Routing, verifier,
simulator, engine, trace and reports read what a kind is from here."""

OPTIMIZER = "O"


def begins_step(kind: str) -> bool:
    """Whether it stands before the computes of its stages: a collective that needs nothing."""
    return ACTIONS[kind].role == COLLECTIVE and not ACTIONS[kind].needs


def register_action(name: str, kind: ActionKind) -> None:
    """Add a collective to the table: it stands at the end of a step, before the agreement of all ranks.

    Every rank registers the same, before a program is made; `runtime.reduce.COLLECTIVES` says what a rank does for
    it.  Raises ProgramError for a name that is no upper-case letter or is taken, and for other kinds of action.
    """
    if name in ACTIONS or not (len(name) == 1 and name.isascii() and name.isupper()):
        raise ProgramError(f"an action cannot be called {name!r}", fix="choose an upper-case letter that is free")
    if kind.role != COLLECTIVE or kind.meets in (ALONE, PAIR) or kind.needs not in COMPUTES.values():
        why = "a collective needs every forward or backward, and has ranks that meet"
        raise ProgramError(f"action {name} cannot be added to the table", why=why)
    last = {other: ACTIONS.pop(other) for other in ("A", OPTIMIZER)}
    ACTIONS.update({name: kind, **last})


COMPUTES = {kind.way: name for name, kind in ACTIONS.items() if kind.role == COMPUTE}
SENDS = {kind.way: name for name, kind in ACTIONS.items() if kind.role == SEND}
RECEIVES = {kind.way: name for name, kind in ACTIONS.items() if kind.role == RECEIVE}
"""The kind of compute, send and receive of each way: COMPUTES[FORWARD] is "F"."""

MESSAGES_AHEAD = 2
"""Receives that a channel posts before they are needed; each, and each send under way, holds a buffer of its own."""

FIRST_BUCKET_BYTES, BUCKET_BYTES = 1 << 20, 25 << 20
"""Gradients that are summed over replicas together, in the order in which the last backward makes them: of the first
bucket, which is small so that the sums begin early, and of the others."""

MAX_BUCKET_BYTES = 1 << 40
"""More than any device has."""

_TEXT = re.compile(r"(\d+)([A-Z]+)(?:(\d+)(?:\.(\d+))?)?(?:([<>])(\d+))?$")


@dataclass(frozen=True, slots=True, order=True)
class Slot:
    """One micro-batch, or one slice of its sequences, on one stage: the key of everything alive during a step.

    micro is -1 for what happens once a step.
    """

    stage: int
    micro: int = -1
    slice: int = 0

    def __str__(self) -> str:
        if self.micro < 0:
            return f"stage {self.stage}"
        sliced = f", slice {self.slice}" if self.slice else ""
        return f"stage {self.stage}, micro-batch {self.micro}{sliced}"

    def on(self, stage: int) -> Slot:
        """The same micro-batch and slice on another stage."""
        return Slot(stage, self.micro, self.slice)


@dataclass(frozen=True, slots=True)
class Action:
    """One thing that the ranks of a stage do.  peer: the other stage of a message, else None."""

    kind: str
    slot: Slot
    peer: int | None = None

    @property
    def stage(self) -> int:
        """The stage that does it."""
        return self.slot.stage

    @property
    def micro(self) -> int:
        """Its micro-batch, -1 for what happens once a step."""
        return self.slot.micro

    @property
    def is_a(self) -> ActionKind:
        """What this kind of action is."""
        return ACTIONS[self.kind]

    @property
    def other_end(self) -> Action:
        """Of a send its receive, of a receive its send."""
        ends = RECEIVES if self.is_a.role == SEND else SENDS
        assert self.peer is not None
        return Action(ends[self.is_a.way], self.slot.on(self.peer), self.stage)

    def __str__(self) -> str:
        text = f"{self.stage}{self.kind}"
        if self.micro >= 0:
            text += str(self.micro)
        if self.slot.slice:
            text += f".{self.slot.slice}"
        if self.peer is None:
            return text
        return f"{text}{'>' if self.is_a.role == SEND else '<'}{self.peer}"


def parse_action(text: str) -> Action:
    """The inverse of `str(action)`; raises ProgramError."""
    found = _TEXT.match(text.strip())
    if not found or found[2] not in ACTIONS:
        raise ProgramError(f"{text!r} is not an action", why="actions look like 2F0, 2SF0>3, 3RF0<2, 2T")
    stage, name, micro, piece, arrow, peer = found.groups()
    kind = ACTIONS[name]
    if arrow != {SEND: ">", RECEIVE: "<"}.get(kind.role) or (micro is not None) != kind.is_per_slot:
        why = "a send has >peer, a receive has <peer, others have neither; what happens once a step has no micro-batch"
        raise ProgramError(f"{text!r} is not an action", why=why)
    slot = Slot(int(stage), -1 if micro is None else int(micro), int(piece or 0))
    return Action(name, slot, None if peer is None else int(peer))


def parse_actions(text: str) -> tuple[Action, ...]:
    """Actions separated by blanks or lines: the inverse of `str(program)` for `Program.order`."""
    return tuple(parse_action(word) for word in text.split())


@dataclass(frozen=True, slots=True)
class Edge:
    """What flows from one stage to a later one for each slot, as one message.

    values: names in a fixed order.  grads: those of them whose gradients come back.  whole: those that are not cut
    into slices of sequences, but pass once for a micro-batch: with its first slice, whose backward is the last.
    """

    src: int
    dst: int
    values: tuple[str, ...]
    grads: tuple[str, ...]
    whole: tuple[str, ...] = ()

    def names(self, way: str, slice: int = 0) -> tuple[str, ...]:
        """What is sent for a slice: values forward, gradients backward; nothing may be left of a later slice."""
        names = self.values if way == FORWARD else self.grads
        return tuple(name for name in names if name not in self.whole) if slice and self.whole else names


@dataclass(frozen=True, slots=True)
class Exchange:
    """Messages between a rank and one peer that are posted together: those that follow each other in the order.

    after: the number of the rank's own actions, receives not counted, that stand in the order before its end.  sends:
    those of this rank; receives: the peer's sends.  Replicas that have few rows in common may carry nothing in a step:
    both ends know that, and leave such messages out.
    """

    peer: int
    after: int
    sends: tuple[Action, ...]
    receives: tuple[Action, ...]


@dataclass(frozen=True, slots=True)
class Program:
    """Everything that all ranks do in one step.

    stage_ranks[s]: the ranks that run stage s, one or several (replicas); a rank may run several stages.  world: number
    of ranks.  order: all actions, each after everything that it depends on; a message stands in it once, as its send,
    and a collective of all ranks once, as an action of stage 0.  Each rank plays its part of the order, so that no rank
    can wait for ever: of all unfinished actions, the first has everything that it needs.  edges: what flows between
    stages.  tied: parameter name and the stages that use it, for every trainable parameter that several stages use; the
    first of them owns it.  slices: of each micro-batch's sequences, 1 where they are whole.  divisions: how the ranks
    of each stage divide micro-batches; empty where all have equal shares of the rows.  owners: stages whose replicas
    share the optimizer's state.  statistics: stages whose replicas meet inside every compute, to share the statistics
    of its batch.  posting: of each rank the exchanges in the order in which it posts them; empty where the transport
    may post messages ahead (`passes.program.posting`).
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

    def __str__(self) -> str:
        return " ".join(str(action) for action in self.order)

    def groups(self, meets: str) -> tuple[tuple[int, ...], ...]:
        """Groups of stages whose ranks meet in an action of this kind, each ascending.  Stages in no group do not take
        part."""
        stages = range(len(self.stage_ranks))
        if meets == ALL:
            return (tuple(stages),) if self.world > 1 else ()
        if meets == TIED:
            return linked_stages(self.tied)
        if meets == REPLICAS:
            return tuple((stage,) for stage in stages if len(self.stage_ranks[stage]) > 1)
        return tuple((stage,) for stage in (self.owners if meets == OWNERS else stages))

    def once_a_step(self, *, backward: bool = True) -> Iterator[Action]:
        """The actions that a whole step has once, in the order of the table."""
        for name, kind in ACTIONS.items():
            if not kind.is_per_slot and (backward or kind.way == FORWARD):
                for group in self.groups(kind.meets):
                    yield from (Action(name, Slot(stage)) for stage in (group[:1] if kind.meets == ALL else group))

    def group(self, action: Action) -> tuple[int, ...]:
        """The stages whose ranks meet in a collective, or in a compute that shares statistics; else ()."""
        kind, stage = ACTIONS[action.kind], action.stage
        if kind.role == COMPUTE:
            return (stage,) if stage in self.statistics else ()
        groups = self.groups(kind.meets) if kind.role == COLLECTIVE else ()
        return next((group for group in groups if stage in group), ())

    def members(self, action: Action) -> tuple[int, ...]:
        """The ranks that meet in a collective, or in a compute that shares statistics, ascending; else ()."""
        if ACTIONS[action.kind].meets == ALL:
            return tuple(range(self.world))
        return self.ranks_of(self.group(action))

    def joins(self, rank: int, action: Action) -> bool:
        """Whether a rank meets the others in this action: it does so once, with the last of its stages in the group."""
        group = self.group(action)
        own = [stage for stage in group if rank in self.stage_ranks[stage]]
        return bool(group) and (ACTIONS[action.kind].meets == ALL or own[-1:] == [action.stage])

    def ranks_of(self, stages: Iterable[int]) -> tuple[int, ...]:
        """The ranks that run any of these stages, ascending."""
        return tuple(sorted({rank for stage in stages for rank in self.stage_ranks[stage]}))

    def division(self, stage: int) -> Division:
        """How the ranks of a stage divide micro-batches."""
        return self.divisions[stage] if self.divisions else division(len(self.stage_ranks[stage]))

    def players(self, action: Action) -> tuple[int, ...]:
        """The ranks that have an action in their part: those of its stage, or the one that has the whole micro-batch;
        of a collective of all, every rank."""
        if ACTIONS[action.kind].meets == ALL:
            return tuple(range(self.world))
        ranks = self.stage_ranks[action.stage]
        alone = self.division(action.stage).player(action.micro) if self.divisions and action.micro >= 0 else None
        return ranks if alone is None else ranks[alone : alone + 1]

    def part(self, rank: int) -> tuple[Action, ...]:
        """What one rank does, in order: a message is a send where it leaves and a receive where it is needed.

        A receive stands right before the compute that needs it, those of several peers in the order of the peers:
        there the rank waits for the message.  When it may arrive, the transport decides (see `posts`).  O(order).
        """
        return self.parts((rank,))[0]

    def parts(self, ranks: Sequence[int]) -> tuple[tuple[Action, ...], ...]:
        """`part` of each of these ranks, all found in one walk.  O(order * ranks of a stage)."""
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
                messages.sort(key=_peer)
                for part in players:
                    part.extend(messages)
            for part in players:
                part.append(action)
        return tuple(tuple(parts[rank]) for rank in ranks)

    def transfers(self, send: Action) -> tuple[Transfer, ...]:
        """The parts of a message, in order of their rows: each row travels once.  O(senders + receivers)."""
        assert send.peer is not None
        return self._passing(send.stage, send.peer, send.micro)

    def _passing(self, src: int, dst: int, micro: int) -> tuple[Transfer, ...]:
        senders, receivers = self.stage_ranks[src], self.stage_ranks[dst]
        return split_rows(senders, receivers, self.division(src).cuts(micro), self.division(dst).cuts(micro))

    def channels(self, src: int, dst: int) -> tuple[tuple[int, int], ...]:
        """(rank of one stage, rank of another) of those between which messages may pass, whatever the number of rows;
        in the order in which they first do."""
        micros = range(min(max(1, self.micros), together(self.division(src), self.division(dst))))
        return tuple(dict.fromkeys((t.src_rank, t.dst_rank) for m in micros for t in self._passing(src, dst, m)))

    def carries(self, send: Action, src_rank: int, dst_rank: int) -> bool:
        """Whether a message may have a part that goes from one of these ranks to the other."""
        return any((t.src_rank, t.dst_rank) == (src_rank, dst_rank) for t in self.transfers(send))

    def posts(self, src_rank: int, dst_rank: int) -> Iterator[Action]:
        """The sends from one rank to another in order: both ends of a channel, first in, first out."""
        for action in self.order:
            if action.is_a.role == SEND and self.carries(action, src_rank, dst_rank):
                yield action

    @property
    def talking_pairs(self) -> tuple[tuple[int, int], ...]:
        """The pairs of ranks between which messages may pass, ascending: what is opened before the first step."""
        pairs: set[tuple[int, int]] = set()
        for edge in self.edges:
            pairs.update((min(a, b), max(a, b)) for a, b in self.channels(edge.src, edge.dst) if a != b)
        return tuple(sorted(pairs))


def linked_stages(tied: Sequence[tuple[str, tuple[int, ...]]]) -> tuple[tuple[int, ...], ...]:
    """Groups of stages that share parameters, directly or through others; each ascending, by its first stage."""
    groups: list[set[int]] = []
    for _, stages in tied:
        joined = set(stages).union(*(group for group in groups if not group.isdisjoint(stages)))
        groups = [group for group in groups if group.isdisjoint(stages)] + [joined]
    return tuple(sorted(tuple(sorted(group)) for group in groups))


def _peer(message: Action) -> int:
    return message.peer or 0
