"""The messages of one rank in a step: which channel each takes, and when the buffers of what was sent are released."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from autopart.ir.program import RECEIVE, SEND, Action, Program
from autopart.runtime.posting import PostedInbox, PostedOutbox, Posting
from autopart.runtime.transport import Inbox, Outbox, Spec
from autopart.runtime.world import World


class Mailbox:
    """One channel for each directed pair of ranks that exchange messages; first in, first out, in the order of the
    program.  Between two stages on this rank a message is handed over as it is.

    specs: shape and dtype of every value, by rows of the micro-batch and by name.  Making one is collective: every
    rank opens every channel, in the same order.  Where posting may block, messages are posted at their turns
    (`Posting`), else receives ahead of need (`Inbox`).
    """

    def __init__(self, world: World, program: Program, specs: Mapping[int, Mapping[str, Spec]]) -> None:
        self._rank = world.rank
        self._specs = specs
        self._rank_of = [ranks[0] for ranks in program.stage_ranks]
        self._names = {}
        for edge in program.edges:
            self._names[edge.src, edge.dst] = edge.values
            self._names[edge.dst, edge.src] = edge.grads
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

    def begin(self, rows: tuple[int, ...]) -> None:
        """A step begins, with micro-batches of so many rows: receives are posted."""
        for peer, inbox in self._inboxes.items():
            inbox.expect([(send, self._expected(send, rows[send.micro])) for send in self._coming[peer]])
        if self._posting is not None:
            self._posting.begin()

    def passed(self, action: Action) -> None:
        """An action of this rank is over: the messages whose turn is now are posted."""
        if self._posting is not None and action.is_a.role != RECEIVE:
            self._posting.passed()

    def _expected(self, send: Action, rows: int) -> tuple[Spec, ...]:
        assert send.peer is not None
        specs = self._specs[rows]
        return tuple(specs[name] for name in self._names[send.stage, send.peer])

    def send(self, action: Action, tensors: Sequence[torch.Tensor]) -> None:
        """Post a message; returns at once."""
        assert action.peer is not None
        peer = self._rank_of[action.peer]
        if peer == self._rank:
            self._handed[action] = [tensor.detach() for tensor in tensors]
        else:
            self._outboxes[peer].send(tensors, action)

    def receive(self, action: Action) -> list[torch.Tensor]:
        """The tensors of a message; waits for it."""
        assert action.peer is not None
        peer, send = self._rank_of[action.peer], action.other_end
        if peer == self._rank:
            return self._handed.pop(send)
        tensors = self._inboxes[peer].receive(send)
        if peer in self._outboxes:
            self._outboxes[peer].acknowledge(self._consumed[peer].get(send, ()))
        return tensors

    def flush(self) -> None:
        """The step ends: wait until every message has left."""
        for outbox in self._outboxes.values():
            outbox.flush()
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
        src, dst = program.stage_ranks[edge.src][0], program.stage_ranks[edge.dst][0]
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
        if action.peer is None or program.stage_ranks[action.peer][0] != me:
            continue
        if action.is_a.role == RECEIVE:
            fresh.append(action.other_end)
        elif action.is_a.role == SEND:
            found[action] = tuple(fresh)
            fresh = []
    return found
