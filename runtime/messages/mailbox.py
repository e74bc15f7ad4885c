"""The messages of one rank in a step: which channel each takes, and when the buffers of what was sent are released."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from autopart.ir.program import RECEIVE, SEND, Action, Program
from autopart.ir.shares import RowLayout, parts
from autopart.runtime.group.world import World
from autopart.runtime.messages.posting import PostedInbox, PostedOutbox, Posting
from autopart.runtime.messages.row_routes import RowRoutes
from autopart.runtime.messages.transport import Inbox, Outbox, Spec


class Mailbox:
    """One channel for each directed pair of ranks that exchange messages; first in, first out, in the order of the
    program.  Between two stages on this rank a message is handed over as it is.

    specs: shape and dtype of every value, by rows that this rank has (and slice, where there are any) and by name.
    layouts: of the values that have to be cut between stages with other replicas (`RowRoutes`).  Making one is
    collective: every rank opens every channel, in the same order.  Where posting may block, messages are posted at
    their places (`Posting`), else receives ahead of need (`Inbox`).
    """

    def __init__(
        self,
        world: World,
        program: Program,
        specs: Mapping[int | tuple[int, int], Mapping[str, Spec]],
        layouts: Mapping[str | tuple[str, int], RowLayout] = MappingProxyType({}),
    ) -> None:
        self._rank = world.rank
        self._specs = specs
        self._routes = RowRoutes(world.rank, program, layouts)
        self._program = program
        self._outboxes: dict[int, Outbox | PostedOutbox] = {}
        self._inboxes: dict[int, Inbox | PostedInbox] = {}
        self._posting = Posting(world, world.carrier, program) if world.carrier is not None else None
        for src, dst in _rank_pairs(program):
            if src == world.rank:
                self._outboxes[dst] = self._posting.outbox(dst) if self._posting else _outbox(world, dst)
            elif dst == world.rank:
                self._inboxes[src] = self._posting.inbox(src) if self._posting else _inbox(world, src)
        self._coming = {peer: tuple(program.posts(peer, world.rank)) for peer in self._inboxes}
        self._consumed = {peer: _consumed_by(program, peer, world.rank) for peer in self._outboxes}
        self._handed: dict[Action, list[torch.Tensor]] = {}
        self._under_way: dict[int, set[Action]] = {peer: set() for peer in self._outboxes}
        self._rows: tuple[int, ...] = ()
        self._own: dict[tuple[Action, int], Mapping[str, Spec]] = {}

    def begin(self, rows: tuple[int, ...]) -> None:
        """A step begins, with micro-batches of so many rows: receives are posted."""
        self._rows = rows
        for peer, inbox in self._inboxes.items():
            inbox.expect([(send, specs) for send in self._coming[peer] for specs in self._expected(send, peer)])
        if self._posting is not None:
            self._posting.begin()

    def passed(self, action: Action) -> None:
        """An action of this rank is over: the messages that stand here are posted."""
        if self._posting is not None and action.is_a.role != RECEIVE:
            self._posting.passed()

    def _expected(self, send: Action, peer: int) -> list[tuple[Spec, ...]]:
        """What comes of a message from one rank, if anything does."""
        receive, rows = send.other_end, self._rows[send.micro]
        coming = [part for part in self._routes.parts(receive, rows) if part.peer == peer]
        return [self._routes.specs(part, self._own_specs(receive)) for part in coming]

    def _own_specs(self, action: Action) -> Mapping[str, Spec]:
        key = action, self._rows[action.micro]
        if key not in self._own:
            replica = self._program.stage_ranks[action.stage].index(self._rank)
            own = parts(self._program.division(action.stage), action.micro, key[1])[replica]
            self._own[key] = self._specs[(own, action.slot.slice) if (own, 0) in self._specs else own]
        return self._own[key]

    def send(self, action: Action, tensors: Mapping[str, torch.Tensor]) -> None:
        """Post a message, which takes its values from `tensors`; returns at once."""
        for part in self._routes.parts(action, self._rows[action.micro]):
            cut = self._routes.cut(part, tensors)
            if part.peer == self._rank:
                self._handed[action] = [tensor.detach() for tensor in cut]
            else:
                self._outboxes[part.peer].send(cut, action)
                self._under_way[part.peer].add(action)

    def receive(self, action: Action) -> dict[str, torch.Tensor]:
        """The tensors of a message by name; waits for it."""
        coming = self._routes.parts(action, self._rows[action.micro])
        if not coming:
            return {}
        found = [self._received(action.other_end, part.peer) for part in coming]
        return self._routes.joined(action.is_a.way, coming, found, self._own_specs(action))

    def _received(self, send: Action, peer: int) -> list[torch.Tensor]:
        if peer == self._rank:
            return self._handed.pop(send)
        tensors = self._inboxes[peer].receive(send)
        if peer in self._outboxes:
            consumed = self._under_way[peer].intersection(self._consumed[peer].get(send, ()))
            self._under_way[peer] -= consumed
            self._outboxes[peer].acknowledge(consumed)
        return tensors

    def flush(self) -> None:
        """The step ends: wait until every message has left."""
        for peer, outbox in self._outboxes.items():
            outbox.flush()
            self._under_way[peer].clear()
        if self._posting is not None:
            self._posting.flush()


def _outbox(world: World, peer: int) -> Outbox:
    return Outbox(peer, world.channel(world.rank, peer), staged=world.staged)


def _inbox(world: World, peer: int) -> Inbox:
    return Inbox(peer, world.channel(peer, world.rank), world.device, staged=world.staged)


def _rank_pairs(program: Program) -> list[tuple[int, int]]:
    """Directed pairs of ranks between which messages pass, in order of the first."""
    pairs: dict[tuple[int, int], None] = {}
    for edge in program.edges:
        for src, dst in program.channels(edge.src, edge.dst):
            if src != dst:
                pairs[src, dst] = None
                if edge.grads:
                    pairs[dst, src] = None
    return list(pairs)


def _consumed_by(program: Program, peer: int, me: int) -> dict[Action, tuple[Action, ...]]:
    """For each message from `peer` to `me`: those of mine that the peer has consumed since the one before.

    Known before the run, from the peer's own part: so sends are released without ever waiting for one.
    """
    found: dict[Action, tuple[Action, ...]] = {}
    fresh: list[Action] = []
    for action in program.part(peer):
        role = action.is_a.role
        if role == RECEIVE and program.carries(action.other_end, me, peer):
            fresh.append(action.other_end)
        elif role == SEND and program.carries(action, peer, me):
            found[action] = tuple(fresh)
            fresh = []
    return found
