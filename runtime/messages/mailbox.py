"""The messages of one rank in a step: which channel each takes, and when the buffers of sent messages are released."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch

from autopart.ir.actions import RECEIVE, SEND, Action
from autopart.ir.program import Program
from autopart.ir.shares import RowLayout, parts
from autopart.runtime.group.world import World
from autopart.runtime.messages.posting import Posting
from autopart.runtime.messages.row_routes import RowPart, RowRoutes
from autopart.runtime.messages.transport import Announced, Inbox, Outbox, Specs, offsets


class Mailbox:
    """Sends and receives the messages of this rank: over `Posting` if the transport needs it, else over one `Outbox` or
    `Inbox` for each directed pair of ranks.  Between two stages of this rank messages are handed over.

    specs: shape, dtype and memory order of every value, by rows that this rank has (or by rows and slice) and by name.
    layouts, orders: as for `RowRoutes`.  Making one is collective.
    """

    def __init__(
        self,
        world: World,
        program: Program,
        specs: Mapping[int | tuple[int, int], Mapping[str, torch.Tensor]],
        layouts: Mapping[str | tuple[str, int], RowLayout] = MappingProxyType({}),
        orders: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
    ) -> None:
        self._rank = world.rank
        self._specs = specs
        self._routes = RowRoutes(world.rank, program, layouts, orders)
        self._program = program
        self._outboxes: dict[int, Outbox] = {}
        self._inboxes: dict[int, Inbox] = {}
        pairs = _rank_pairs(program)
        self._coming = {src: tuple(program.posts(src, dst)) for src, dst in pairs if dst == world.rank}
        self._posting = Posting(world, program) if world.carrier is not None else None
        if self._posting is None and pairs:
            group = world.group(range(world.size))
            for src, dst in pairs:
                if src == world.rank:
                    self._outboxes[dst] = Outbox(dst, group, staged=world.staged)
                elif dst == world.rank:
                    self._inboxes[src] = Inbox(src, group, world.device, staged=world.staged)
        self._consumed = {peer: _consumed_by(program, peer, world.rank) for peer in self._outboxes}
        self._handed: dict[Action, list[torch.Tensor]] = {}
        self._pending: dict[int, set[Action]] = {peer: set() for peer in self._outboxes}
        self._rows: tuple[int, ...] = ()
        self._own: dict[tuple[Action, int], Mapping[str, torch.Tensor]] = {}
        self._laid: dict[tuple[Action, int], tuple[tuple[RowPart, Specs], ...]] = {}
        self._send_of = {a: a.other_end for a in program.part(world.rank) if a.is_a.role == RECEIVE}
        self._announced: list[tuple[int, list[Announced]]] = []  # of the last step, by peer

    def begin(self, rows: tuple[int, ...]) -> None:
        """Begin a step with micro-batches of these rows: the first receives are posted."""
        if rows != self._rows:
            self._rows = rows
            self._announced = [(peer, self._messages(peer)) for peer in self._coming]
        for peer, messages in self._announced:
            if self._posting is None:
                self._inboxes[peer].expect(messages)
                continue
            for send, specs, _ in messages:
                self._posting.expect(peer, send, specs)
        if self._posting is not None:
            self._posting.begin()

    def _messages(self, peer: int) -> list[Announced]:
        """Return what comes from one rank in a step with these rows, in order."""
        found = [(send, specs) for send in self._coming[peer] for specs in self._expected(send, peer)]
        return [(send, specs, offsets(specs)[1]) for send, specs in found]

    def passed(self, action: Action) -> None:
        """Note that an action of this rank is over: messages whose place is here are posted."""
        if self._posting is not None and action.is_a.role != RECEIVE:
            self._posting.passed()

    def _expected(self, send: Action, peer: int) -> list[Specs]:
        """Return what comes of a message from one rank, if anything does."""
        return [specs for part, specs in self._parts(send.other_end) if part.peer == peer]

    def _own_specs(self, action: Action) -> Mapping[str, torch.Tensor]:
        key = action, self._rows[action.micro]
        if key not in self._own:
            replica = self._program.stage_ranks[action.stage].index(self._rank)
            own = parts(self._program.division(action.stage), action.micro, key[1])[replica]
            self._own[key] = self._specs[(own, action.slot.slice) if (own, 0) in self._specs else own]
        return self._own[key]

    def _parts(self, action: Action) -> tuple[tuple[RowPart, Specs], ...]:
        """Return the parts of a message, each with how its tensors lie; cached, since it is asked for in every step."""
        key = action, self._rows[action.micro]
        if key not in self._laid:
            coming = self._routes.parts(*key)
            self._laid[key] = tuple((part, self._routes.specs(part, self._own_specs(action))) for part in coming)
        return self._laid[key]

    def send(self, action: Action, tensors: Mapping[str, torch.Tensor]) -> None:
        """Post a message, which takes its values from `tensors`, without waiting."""
        for part, specs in self._parts(action):
            cut = self._routes.cut(part, tensors)
            if part.peer == self._rank:
                self._handed[action] = [tensor.detach() for tensor in cut]
            elif self._posting is not None:
                self._posting.send(part.peer, action, cut, specs)
            else:
                self._outboxes[part.peer].send(cut, specs, action)
                self._pending[part.peer].add(action)

    def receive(self, action: Action) -> dict[str, torch.Tensor]:
        """Wait for a message and return its tensors by name."""
        coming = self._routes.parts(action, self._rows[action.micro])
        if not coming:
            return {}
        found = [self._received(self._send_of[action], part.peer) for part in coming]
        return self._routes.joined(action.is_a.way, coming, found, self._own_specs(action))

    def _received(self, send: Action, peer: int) -> list[torch.Tensor]:
        if peer == self._rank:
            return self._handed.pop(send)
        if self._posting is not None:
            return self._posting.receive(peer, send)
        tensors = self._inboxes[peer].receive(send)
        if peer in self._outboxes:
            consumed = self._pending[peer].intersection(self._consumed[peer].get(send, ()))
            self._pending[peer] -= consumed
            self._outboxes[peer].acknowledge(consumed)
        return tensors

    def flush(self) -> None:
        """End the step: wait until every message has left."""
        for peer, outbox in self._outboxes.items():
            outbox.flush()
            self._pending[peer].clear()
        if self._posting is not None:
            self._posting.flush()


def _rank_pairs(program: Program) -> list[tuple[int, int]]:
    """Return the directed pairs of ranks between which messages pass, in order of the first."""
    pairs: dict[tuple[int, int], None] = {}
    for edge in program.edges:
        for src, dst in program.channels(edge.src, edge.dst):
            if src != dst:
                pairs[src, dst] = None
                if edge.grads:
                    pairs[dst, src] = None
    return list(pairs)


def _consumed_by(program: Program, peer: int, me: int) -> dict[Action, tuple[Action, ...]]:
    """For each message from `peer` to `me`, return those of mine that the peer has consumed since the one before.

    It is read off the peer's part of the program, so sends are released without waiting for one.
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
