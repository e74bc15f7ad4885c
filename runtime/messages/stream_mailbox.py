"""The messages of one rank in asynchronous training: tick after tick, with slots that are used again and again."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from autopart.ir.actions import FORWARD, SEND, Action
from autopart.ir.program import Streaming
from autopart.runtime.messages.mailbox import Mailbox
from autopart.runtime.messages.transport import offsets

_AHEAD = 2  # ticks for which messages are announced before they are needed


@dataclass
class _Channel:
    """Messages from one peer.  by_tick: its sends in each tick of the ring.  next: tick to be announced next."""

    by_tick: Sequence[Sequence[Action]]
    next: int = 0


class StreamMailbox(Mailbox):
    """Messages over Gloo whose actions bear numbers of the ring (`ir.program.Streaming`); `follow` comes first.

    A message of the peer's tick shows that the peer has consumed what it needed in earlier ticks, so the buffers of
    those are released then, without waiting.  What a peer that sends nothing has taken is waited for half a turn of the
    ring later.
    """

    def follow(self, rhythm: Streaming, ticks: Sequence[Sequence[Action]]) -> None:
        """Take the actions of this rank in each tick of the ring."""
        self._rhythm = rhythm
        self._unread: dict[int, deque[tuple[int, Action]]] = {peer: deque() for peer in self._outboxes}
        coming: dict[int, list[list[Action]]] = {peer: [[] for _ in ticks] for peer in self._inboxes}
        for peer, by_tick in coming.items():
            for send in self._program.posts(peer, self._rank):
                by_tick[(send.micro + self._lag(send)) % rhythm.ring].append(send)
        self._channels = {peer: _Channel(by_tick) for peer, by_tick in coming.items()}
        self._tick = 0

    def open(self, rows: tuple[int, ...]) -> None:
        """Begin with an empty pipeline.  rows: of each micro-batch of a batch."""
        self._rows = rows * (self._rhythm.ring // len(rows))
        self._tick = 0
        for channel in self._channels.values():
            channel.next = 0

    def pass_to(self, tick: int, entered: int) -> None:
        """Begin a tick.  entered: micro-batches that exist.  Announces what comes soon, in the order of each peer."""
        self._tick = tick
        for peer, channel in self._channels.items():
            while channel.next <= tick + _AHEAD and self._announce(peer, channel, entered):
                channel.next += 1
        for peer, unread in self._unread.items():
            self._release(peer, unread, tick - self._rhythm.ring // 2)

    def _announce(self, peer: int, channel: _Channel, entered: int) -> bool:
        """Announce what a peer sends in a tick; return False if a micro-batch of it has not entered yet."""
        sends = channel.by_tick[channel.next % self._rhythm.ring]
        micros = [channel.next - self._lag(send) for send in sends]
        if channel.next > self._tick and any(micro >= entered for micro in micros):
            return False
        for send, micro in zip(sends, micros, strict=True):
            if 0 <= micro < entered:
                found = [(send, specs, offsets(specs)[1]) for specs in self._expected(send, peer)]
                self._inboxes[peer].expect(found)
        return True

    def _lag(self, send: Action) -> int:
        """Return the ticks between the forward of a micro-batch and the compute that makes this message."""
        return 0 if send.is_a.way == FORWARD else self._rhythm.lags[send.stage]

    def _delay(self, send: Action) -> int:
        """Return the ticks between the sending of a message and the compute that needs it."""
        assert send.peer is not None
        return 0 if send.is_a.way == FORWARD else self._rhythm.lags[send.peer] - self._rhythm.lags[send.stage]

    def send(self, action: Action, tensors: Mapping[str, torch.Tensor]) -> None:
        """Post a message without waiting."""
        assert action.is_a.role == SEND
        for part, specs in self._parts(action):
            self._outboxes[part.peer].send(self._routes.cut(part, tensors), specs, action)
            self._unread[part.peer].append((self._tick + self._delay(action), action))

    def _received(self, send: Action, peer: int) -> list[torch.Tensor]:
        tensors = self._inboxes[peer].receive(send)
        if peer in self._unread:
            self._release(peer, self._unread[peer], self._tick - self._delay(send))
        return tensors

    def _release(self, peer: int, unread: deque[tuple[int, Action]], before: int) -> None:
        """Release the messages that the peer needed in ticks before this one.  They arrive in the order in which they
        were sent, which is that of these ticks."""
        while unread and unread[0][0] < before:
            self._outboxes[peer].acknowledge([unread.popleft()[1]])

    def flush(self) -> None:
        """Wait until every message has left."""
        super().flush()
        for unread in self._unread.values():
            unread.clear()
