"""Messages of one rank where both ends post each at its place in the program: for carriers under which posting may
block."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import torch

from autopart.ir.program import Action, Program
from autopart.runtime.group.carriers import Carrier, Posted
from autopart.runtime.group.world import World
from autopart.runtime.messages.transport import Spec, offsets, pack, unpack

_Message = tuple[int, Hashable]
"""The other rank, and the send that names the message."""


class Posting:
    """Posts the exchanges of this rank (`Program.posting`), each when the actions before it are over.

    Making one is collective: the pairs that talk are opened in one order on all ranks, nothing else being under way.
    """

    def __init__(self, world: World, carrier: Carrier, program: Program) -> None:
        self._carrier = carrier
        self._exchanges = program.posting[world.rank]
        self._device = world.device
        for pair in program.talking_pairs:
            world.open_pair(*pair)
        self._next = self._done = 0
        self._expected: dict[_Message, tuple[Spec, ...]] = {}
        self._given: dict[_Message, torch.Tensor] = {}
        self._posted: dict[_Message, tuple[Posted, int]] = {}
        self._sent: dict[int, Posted] = {}

    def outbox(self, peer: int) -> PostedOutbox:
        """Sends to a peer, as the mailbox knows them."""
        return PostedOutbox(self, peer)

    def inbox(self, peer: int) -> PostedInbox:
        """Receives from a peer, as the mailbox knows them."""
        return PostedInbox(self, peer)

    def begin(self) -> None:
        """A step begins; what comes in it was announced to the inboxes."""
        self._next = self._done = 0
        self._post()

    def passed(self) -> None:
        """One more of this rank's own actions, a compute, a send or a sum, is over."""
        self._done += 1
        self._post()

    def _post(self) -> None:
        while self._next < len(self._exchanges) and self._exchanges[self._next].after <= self._done:
            exchange = self._exchanges[self._next]
            self._post_one(exchange.peer, exchange.sends, exchange.receives)
            self._next += 1

    def _post_one(self, peer: int, own: Sequence[Action], others: Sequence[Action]) -> None:
        """Post those of an exchange's messages that carry anything in this step."""
        given = [(action, self._given.pop((peer, action), None)) for action in own]
        sends = [(action, buffer) for action, buffer in given if buffer is not None and buffer.numel()]
        sizes = [(action, offsets(self._expected.get((peer, action), ()))[1]) for action in others]
        receives = [(action, size) for action, size in sizes if size]
        if not sends and not receives:
            return
        posted = self._carrier.post(peer, sends, receives)
        for place, (action, _) in enumerate(receives):
            self._posted[peer, action] = posted, place
        if sends:
            self._sent[peer] = posted

    def give(self, peer: int, key: Hashable, tensors: Sequence[torch.Tensor]) -> None:
        """Take a message, which leaves with its exchange."""
        self._given[peer, key] = pack(tensors)

    def expect(self, peer: int, key: Hashable, specs: tuple[Spec, ...]) -> None:
        """A message to come in this step."""
        self._expected[peer, key] = specs

    def receive(self, peer: int, key: Hashable) -> list[torch.Tensor]:
        """Return the tensors of a message that was posted.  On a device, the stream waits and not the host."""
        specs = self._expected.pop((peer, key))
        if (peer, key) not in self._posted:  # no byte of it was sent
            return unpack(torch.empty(0, dtype=torch.uint8, device=self._device), specs)
        posted, place = self._posted.pop((peer, key))
        posted.wait()
        return unpack(posted.received[place], specs)

    def flush(self) -> None:
        """The step ends: what is issued from now on may overwrite what was sent.

        A channel is first in, first out: its last send is over when all are."""
        for posted in self._sent.values():
            posted.wait()
        self._sent.clear()
        self._expected.clear()
        self._posted.clear()


class PostedOutbox:
    """Sends to one peer: the interface of `transport.Outbox`."""

    def __init__(self, posting: Posting, peer: int) -> None:
        self._posting, self._peer = posting, peer

    def send(self, tensors: Sequence[torch.Tensor], key: Hashable = None) -> None:
        """Hand over a message; it leaves with its exchange."""
        self._posting.give(self._peer, key, tensors)

    def acknowledge(self, keys: Iterable[Hashable]) -> None:
        """Nothing is held for these: the device knows when a buffer has left."""

    def flush(self) -> None:
        """All peers are flushed at once (`Posting.flush`)."""


class PostedInbox:
    """Receives from one peer: the interface of `transport.Inbox`."""

    def __init__(self, posting: Posting, peer: int) -> None:
        self._posting, self._peer = posting, peer

    def expect(self, messages: Iterable[tuple[Hashable, tuple[Spec, ...]]]) -> None:
        """Messages to come in a step, by key."""
        for key, specs in messages:
            self._posting.expect(self._peer, key, specs)

    def receive(self, key: Hashable = None) -> list[torch.Tensor]:
        """The tensors of a message."""
        return self._posting.receive(self._peer, key)
