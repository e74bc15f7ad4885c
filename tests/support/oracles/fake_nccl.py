"""A transport over Gloo that enforces NCCL's rules: a violation hangs until a deadline and then raises.

It follows the strictest rules of `passes.program.nccl_rules`: all operations of a rank are serialized. A post returns
when its messages have been transferred; communicators and pairs are created at first use. Each message has a header, so
that the two ends cannot mistake one message for another.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from autopart.ir.actions import Action
from autopart.runtime.group.carriers import CARRIERS

NAME = "fake-nccl"
DEADLINE_S = 20.0
_MADE, _TOLD, _CONNECTED, _HEADER, _BYTES, _SUMMED = range(6)

Message = tuple[bool, int, str, torch.Tensor]
"""(sent or received, peer, name known to both ends, bytes)."""


class Hang(Exception):
    """Raised when a peer does not arrive before the deadline."""


class Wrong(Exception):
    """Raised when the two ends of a message do not match."""


class Communicators:
    """One rank's end of all communicators over one Gloo group."""

    def __init__(self, group: dist.ProcessGroup, rank: int, deadline_s: float | None = None) -> None:
        self._group, self._rank = group, rank
        self._limit = timedelta(seconds=DEADLINE_S if deadline_s is None else deadline_s)
        self._made: set[str] = set()
        self._edges: set[tuple[str, int, int]] = set()

    def used_before(self, comm: str, members: Sequence[int]) -> None:
        """Mark the communicator and all its pairs as connected."""
        self._made.add(comm)
        self._edges |= {(comm, a, b) for a in members for b in members}

    def post(self, comm: str, members: Sequence[int], messages: Sequence[Message]) -> None:
        """Send and receive together and return when everything has been transferred."""
        self._make(comm, members)
        self._connect(comm, messages)
        doing = ", ".join(f"{'send' if sent else 'receive'} {name} ({peer})" for sent, peer, name, _ in messages)
        with ThreadPoolExecutor(len(messages)) as pool:
            for done in [pool.submit(self._pass_on, comm, message, doing) for message in messages]:
                done.result()

    def sum(self, comm: str, members: Sequence[int]) -> None:
        """Wait for all members."""
        self._make(comm, members)
        self._meet(comm, _SUMMED, [m for m in members if m != self._rank], f"sum over {comm}")

    def _make(self, comm: str, members: Sequence[int]) -> None:
        if comm not in self._made:
            self._meet(comm, _MADE, [m for m in members if m != self._rank], f"first use of {comm}")
            self._made.add(comm)

    def _connect(self, comm: str, messages: Sequence[Message]) -> None:
        """Connect new pairs in two phases, as NCCL does: all peers announce themselves before any pair is connected."""
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
            raise Wrong(f"{doing}: the message differs, or has {int(found[1])} bytes instead of {int(header[1])}")
        self._wait([dist.irecv(data, peer, self._group, self._tag(comm, _BYTES))], doing)

    def _wait(self, works: Sequence[Any], doing: str) -> None:
        for work in works:
            try:
                work.wait(self._limit)
            except RuntimeError as error:
                raise Hang(f"rank {self._rank} hangs at: {doing}") from error

    @staticmethod
    def _tag(comm: str, phase: int) -> int:
        return zlib.crc32(comm.encode()) % 2**24 * 16 + phase


class FakeCarrier:
    """A replacement for NCCL in a pipeline on CPUs."""

    def __init__(self, rank: int, *_: object) -> None:
        self._rank = rank
        group = dist.new_group(list(range(dist.get_world_size())))
        assert isinstance(group, dist.ProcessGroup)
        self._communicators = Communicators(group, rank)
        self._pairs: set[int] = set()
        self._under_way: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def open_pair(self, low: int, high: int) -> None:
        """Exchange a byte in both directions, once, as the NCCL transport does."""
        peer = low + high - self._rank
        if self._rank not in (low, high) or peer in self._pairs:
            return
        self._pairs.add(peer)
        one, other = torch.zeros(1, dtype=torch.uint8), torch.zeros(1, dtype=torch.uint8)
        self._post(peer, [(True, peer, "hello", one), (False, peer, "hello", other)])

    def open_group(self, group: dist.ProcessGroup) -> None:
        """Open the group by a sum."""
        dist.all_reduce(torch.zeros(1), group=group)

    def post(
        self, peer: int, sends: Sequence[tuple[Action, torch.Tensor]], receives: Sequence[tuple[Action, int]]
    ) -> FakePosted:
        """Send and receive, and return when everything has been transferred, the strictest allowed behaviour."""
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
        """Check that messages were not overwritten before the wait: on a device they might not have been sent yet."""
        if not all(torch.equal(tensor, copy) for tensor, copy in self._under_way.pop(peer, ())):
            raise Wrong(f"a message to rank {peer} was overwritten while it was under way")


class FakePosted:
    """Messages that have been transferred."""

    def __init__(self, carrier: FakeCarrier, peer: int, received: tuple[torch.Tensor, ...]) -> None:
        self._carrier, self._peer = carrier, peer
        self.received = received

    def wait(self) -> None:
        """Call `FakeCarrier.settle`."""
        self._carrier.settle(self._peer)


CARRIERS.setdefault(NAME, FakeCarrier)  # type: ignore[arg-type]
