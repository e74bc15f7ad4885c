"""NCCL's rules at run time, over Gloo: whoever breaks them hangs, as on GPUs, but no longer than a deadline.

As `passes.program.nccl_rules` has them, at their strictest: everything on a rank takes turns.  What is posted returns
when it has passed; a communicator is made, and pairs are connected, when they are first used.  Each message has a
header, so that the two ends cannot take one for another.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from autopart.ir.program import Action
from autopart.runtime.group.carriers import CARRIERS

NAME = "fake-nccl"
DEADLINE_S = 20.0
_MADE, _TOLD, _CONNECTED, _HEADER, _BYTES, _SUMMED = range(6)

Message = tuple[bool, int, str, torch.Tensor]
"""Whether it is sent, the other end, what both call it, and its bytes."""


class Hang(Exception):
    """Nobody came before the deadline."""


class Wrong(Exception):
    """The two ends do not fit."""


class Communicators:
    """One rank's end of all communicators over one Gloo group."""

    def __init__(self, group: dist.ProcessGroup, rank: int, deadline_s: float | None = None) -> None:
        self._group, self._rank = group, rank
        self._limit = timedelta(seconds=DEADLINE_S if deadline_s is None else deadline_s)
        self._made: set[str] = set()
        self._edges: set[tuple[str, int, int]] = set()

    def used_before(self, comm: str, members: Sequence[int]) -> None:
        """As if it had been made, and all its pairs connected."""
        self._made.add(comm)
        self._edges |= {(comm, a, b) for a in members for b in members}

    def post(self, comm: str, members: Sequence[int], messages: Sequence[Message]) -> None:
        """Send and receive together; returns when all of it has passed."""
        self._make(comm, members)
        self._connect(comm, messages)
        doing = ", ".join(f"{'send' if sent else 'receive'} {name} ({peer})" for sent, peer, name, _ in messages)
        with ThreadPoolExecutor(len(messages)) as pool:
            for done in [pool.submit(self._pass_on, comm, message, doing) for message in messages]:
                done.result()

    def sum(self, comm: str, members: Sequence[int]) -> None:
        """All members meet."""
        self._make(comm, members)
        self._meet(comm, _SUMMED, [m for m in members if m != self._rank], f"sum over {comm}")

    def _make(self, comm: str, members: Sequence[int]) -> None:
        if comm not in self._made:
            self._meet(comm, _MADE, [m for m in members if m != self._rank], f"first use of {comm}")
            self._made.add(comm)

    def _connect(self, comm: str, messages: Sequence[Message]) -> None:
        """Twice, as NCCL does: nobody is connected before all of its peers have heard from all of theirs."""
        edges = {(comm, self._rank, peer) if sent else (comm, peer, self._rank) for sent, peer, _, _ in messages}
        fresh = sorted(edges - self._edges)
        for phase in (_TOLD, _CONNECTED):
            works = []
            for _, a, b in fresh:
                works += self._exchange(comm, phase + 8 * (a < b), a + b - self._rank)
            self._wait(works, f"first message of {comm}")
        self._edges |= edges

    def _meet(self, comm: str, phase: int, peers: Iterable[int], doing: str) -> None:
        self._wait([work for peer in peers for work in self._exchange(comm, phase, peer)], doing)

    def _exchange(self, comm: str, phase: int, peer: int) -> list[Any]:
        tag = self._tag(comm, phase)
        one, other = torch.zeros(1), torch.zeros(1)
        return [dist.irecv(other, peer, self._group, tag), dist.isend(one, peer, self._group, tag)]

    def _pass_on(self, comm: str, message: Message, doing: str) -> None:
        sent, peer, name, data = message
        header = torch.tensor([zlib.crc32(name.encode()), data.numel()])
        if sent:
            works = [dist.isend(header, peer, self._group, self._tag(comm, _HEADER))]
            works += [dist.isend(data, peer, self._group, self._tag(comm, _BYTES))]
            self._wait(works, doing)
            return
        found = torch.empty_like(header)
        self._wait([dist.irecv(found, peer, self._group, self._tag(comm, _HEADER))], doing)
        if not torch.equal(found, header):
            raise Wrong(f"{doing}: the message is another one, or of {int(found[1])} bytes instead of {int(header[1])}")
        self._wait([dist.irecv(data, peer, self._group, self._tag(comm, _BYTES))], doing)

    def _wait(self, works: Sequence[Any], doing: str) -> None:
        for work in works:
            try:
                work.wait(self._limit)
            except RuntimeError as error:
                raise Hang(f"rank {self._rank} stands at: {doing}") from error

    @staticmethod
    def _tag(comm: str, phase: int) -> int:
        return zlib.crc32(comm.encode()) % 2**24 * 16 + phase


class FakeCarrier:
    """What stands for NCCL in a pipeline over CPUs."""

    def __init__(self, rank: int, *_: object) -> None:
        self._rank = rank
        group = dist.new_group(list(range(dist.get_world_size())))
        assert isinstance(group, dist.ProcessGroup)
        self._communicators = Communicators(group, rank)
        self._pairs: set[int] = set()
        self._under_way: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def open_pair(self, low: int, high: int) -> None:
        """As NCCL's: a byte in both directions."""
        if self._rank not in (low, high):
            return
        peer = low + high - self._rank
        self._pairs.add(peer)
        one, other = torch.zeros(1, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
        self._post(peer, [(True, peer, "hello", one), (False, peer, "hello", other)])

    def open_group(self, group: dist.ProcessGroup) -> None:
        """By a sum."""
        dist.all_reduce(torch.zeros(1), group=group)

    def post(
        self, peer: int, sends: Sequence[tuple[Action, torch.Tensor]], receives: Sequence[tuple[Action, int]]
    ) -> FakePosted:
        """Returns when all of it has passed: nobody may rely on less."""
        if peer not in self._pairs:
            raise Wrong(f"the channel between ranks {self._rank} and {peer} was not opened before the step")
        assert all(tensor.is_contiguous() and tensor.numel() for _, tensor in sends)
        assert all(size for _, size in receives)
        buffers = tuple(torch.empty(size, dtype=torch.uint8) for _, size in receives)
        messages = [(True, peer, str(action), tensor) for action, tensor in sends]
        messages += [(False, peer, str(action), b) for (action, _), b in zip(receives, buffers, strict=True)]
        self._post(peer, messages)
        self._under_way.setdefault(peer, []).extend((tensor, tensor.clone()) for _, tensor in sends)
        return FakePosted(self, peer, buffers)

    def _post(self, peer: int, messages: Sequence[Message]) -> None:
        low, high = sorted((self._rank, peer))
        self._communicators.post(f"pair {low} {high}", (low, high), messages)

    def settle(self, peer: int) -> None:
        """Until now nobody may have written into what was sent: on a device it may not have left yet."""
        if not all(torch.equal(tensor, copy) for tensor, copy in self._under_way.pop(peer, ())):
            raise Wrong(f"a message to rank {peer} was overwritten while it was under way")


class FakePosted:
    """Messages that have passed."""

    def __init__(self, carrier: FakeCarrier, peer: int, received: tuple[torch.Tensor, ...]) -> None:
        self._carrier, self._peer = carrier, peer
        self.received = received

    def wait(self) -> None:
        """See `FakeCarrier.settle`."""
        self._carrier.settle(self._peer)


CARRIERS.setdefault(NAME, FakeCarrier)
