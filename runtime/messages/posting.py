"""Messages of one rank over a carrier under which posting may block: both ends post each at its place in the
program."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from autopart.ir.actions import Action
from autopart.ir.program import Program
from autopart.runtime.group.carriers import NcclPosted
from autopart.runtime.group.world import World
from autopart.runtime.messages.transport import Specs, offsets, pack, unpack

_Message = tuple[int, Action]
"""The other rank, and the send that names the message."""


class Posting:
    """Posts the exchanges of this rank (`Program.posting`), each when the actions before it are over.

    Making one is collective: all ranks open the pairs that exchange messages in one order, with nothing else on its
    way.
    """

    def __init__(self, world: World, program: Program) -> None:
        assert world.carrier is not None
        self._carrier = world.carrier
        self._exchanges = program.posting[world.rank]
        self._device = world.device
        for pair in program.talking_pairs:
            self._carrier.open_pair(*pair)
        self._next = self._done = 0
        self._expected: dict[_Message, Specs] = {}
        self._given: dict[_Message, torch.Tensor] = {}
        self._posted: dict[_Message, tuple[NcclPosted, int]] = {}
        self._sent: dict[int, NcclPosted] = {}

    def begin(self) -> None:
        """Begin a step, whose messages were announced by `expect`."""
        self._next = self._done = 0
        self._post()

    def passed(self) -> None:
        """Note that one more of this rank's own actions, a compute, a send or a sum, is over."""
        self._done += 1
        self._post()

    def _post(self) -> None:
        while self._next < len(self._exchanges) and self._exchanges[self._next].after <= self._done:
            exchange = self._exchanges[self._next]
            self._post_one(exchange.peer, exchange.sends, exchange.receives)
            self._next += 1

    def _post_one(self, peer: int, own: Sequence[Action], others: Sequence[Action]) -> None:
        """Post the messages of an exchange that are not empty in this step."""
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

    def send(self, peer: int, key: Action, tensors: Sequence[torch.Tensor], specs: Specs) -> None:
        """Take a message, which is posted with its exchange.  specs: how its tensors are to lie."""
        self._given[peer, key] = pack(tensors, specs)

    def expect(self, peer: int, key: Action, specs: Specs) -> None:
        """Announce a message of this step."""
        self._expected[peer, key] = specs

    def receive(self, peer: int, key: Action) -> list[torch.Tensor]:
        """Return the tensors of a message.  On a device the stream waits, and not the host."""
        specs = self._expected.pop((peer, key))
        if (peer, key) not in self._posted:  # it is empty
            return unpack(torch.empty(0, dtype=torch.uint8, device=self._device), specs)
        posted, place = self._posted.pop((peer, key))
        posted.wait()
        return unpack(posted.received[place], specs)

    def flush(self) -> None:
        """End the step: what is issued from now on may overwrite what was sent.

        A channel is first in, first out, so it is enough to wait for its last send."""
        for posted in self._sent.values():
            posted.wait()
        self._sent.clear()
        self._expected.clear()
        self._posted.clear()
