"""NCCL's rules: when messages and collectives pass, and which rank waits for which.

- A communicator is made at its first use: the hosts of its members wait until all of them are at a use of it.
- The first message of a pair in one direction connects the two: their hosts wait until both are there, with all peers
  of messages posted together at once.
- Messages posted to a communicator run in that order on each rank; messages posted together run side by side.
- A send ends when its receive has taken it: nothing is buffered.
- A collective ends when all members of its communicator have reached it; each has to be at the same one.
- Communicators of one device take turns with each other and with its computes.  They may run side by side, but CUDA
  does not promise that.

`messages` derives what our programs post.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass

from autopart.ir.actions import Action, Slot

Comm = Hashable
SENT, RECEIVED = 1, -1


def _spelled(message: Hashable) -> str:
    if not isinstance(message, tuple):
        return str(message)
    micro, kind, stage, peer, piece = message
    return str(Action(kind, Slot(stage, micro, piece), peer))


@dataclass(frozen=True, slots=True)
class MessageEnd:
    """One end of a message.  way: SENT or RECEIVED.  peer: the other end.  message: its name on both ends."""

    way: int
    peer: int
    message: Hashable

    def __str__(self) -> str:
        done, where = ("send", "to") if self.way == SENT else ("receive", "from")
        return f"{done} {_spelled(self.message)} {where} rank {self.peer}"


@dataclass(frozen=True, slots=True)
class Post:
    """Messages posted together to one communicator."""

    comm: Comm
    ends: tuple[MessageEnd, ...]

    def __str__(self) -> str:
        return ", ".join(map(str, self.ends))


@dataclass(frozen=True, slots=True)
class Wait:
    """Waits for a message from a peer, which the next computes need."""

    comm: Comm
    peer: int
    message: Hashable

    def __str__(self) -> str:
        return f"wait for {_spelled(self.message)} from rank {self.peer}"


@dataclass(frozen=True, slots=True)
class Collective:
    """A sum, or another exchange, that all members of a communicator join.  label: its name on all of them."""

    comm: Comm
    label: str = "sum"

    def __str__(self) -> str:
        return f"{self.label} over {self.comm}"


Item = Post | Wait | Collective
"""Whatever waits for another rank; computes wait for nobody and are left out."""


def play(
    queues: Sequence[Sequence[Item]], members: Mapping[Comm, Collection[int]], *, connected: bool = False
) -> list[str]:
    """Play these queues, one for each rank; return what is wrong with them, nothing when all of them end.

    connected: all communicators are made and all their pairs connected.  The order in which ranks go on does not
    matter.  O(items).
    """
    return _Play(queues, members, connected=connected).run()


class _Play:
    """The state of all ranks.

    at: items of each rank that its host has passed.  left: of each rank that has posted messages, the ends that met no
    peer yet.
    """

    def __init__(
        self, queues: Sequence[Sequence[Item]], members: Mapping[Comm, Collection[int]], *, connected: bool
    ) -> None:
        self._queues, self._members = queues, members
        self._opened, self._all_connected = set(members) if connected else set[Comm](), connected
        self._connected: set[tuple[Comm, int, int]] = set()
        self._at = [0] * len(queues)
        self._left: dict[int, dict[tuple[int, int], deque[MessageEnd]]] = {}
        self._arrived: set[tuple[int, Comm, int, Hashable]] = set()
        self._joined: dict[Comm, dict[int, str]] = {}
        self._ready = deque(range(len(queues)))
        self._wrong: list[str] = []

    def run(self) -> list[str]:
        while self._ready and not self._wrong:
            self._advance(self._ready.popleft())
        ranks = range(len(self._queues))
        stuck = [rank for rank in ranks if self._front(rank) is not None]
        return self._wrong or [f"rank {rank} stands at: {self._front(rank)}" for rank in stuck]

    def _front(self, rank: int) -> Item | None:
        queue = self._queues[rank]
        return queue[self._at[rank]] if self._at[rank] < len(queue) else None

    def _advance(self, rank: int) -> None:
        """Let the host of a rank go on as far as it can."""
        while (item := self._front(rank)) is not None and not self._wrong:
            if isinstance(item, Wait):
                if (rank, item.comm, item.peer, item.message) not in self._arrived:
                    return
                self._at[rank] += 1
            elif not self._host_passes(rank, item):
                return
            elif isinstance(item, Post):
                self._post(rank, item)
                return
            elif not self._join(rank, item):
                return

    # -- the host: communicators are made, and pairs connected -----------------------------------------------------

    def _host_passes(self, rank: int, item: Post | Collective) -> bool:
        if rank not in self._members[item.comm]:
            self._wrong = [f"rank {rank}: {item}, of which it is not a member"]
            return False
        if item.comm not in self._opened:
            others = self._members[item.comm]
            if not all(self._is_at(other, item.comm) for other in others):
                return False
            self._opened.add(item.comm)
            self._ready.extend(others)
        if isinstance(item, Collective) or self._all_connected:
            return True
        met = [end.peer for end in item.ends if self._edge(rank, item.comm, end) not in self._connected]
        if not met:
            return True
        if not all(self._informed(other) for other in (rank, *met)):
            return False
        self._connected.update(self._edge(rank, item.comm, end) for end in item.ends)
        self._ready.extend(met)
        return True

    def _is_at(self, rank: int, comm: Comm) -> bool:
        item = self._front(rank)
        return isinstance(item, Post | Collective) and item.comm == comm

    def _informed(self, rank: int) -> bool:
        """Return whether every peer that a rank has yet to connect with is at the other end."""
        item = self._front(rank)
        if not isinstance(item, Post):
            return False
        for end in item.ends:
            if self._edge(rank, item.comm, end) in self._connected:
                continue
            other = self._front(end.peer)
            if not isinstance(other, Post) or other.comm != item.comm or item.comm not in self._opened:
                return False
            if not any(its.peer == rank and its.way == -end.way for its in other.ends):
                return False
        return True

    @staticmethod
    def _edge(rank: int, comm: Comm, end: MessageEnd) -> tuple[Comm, int, int]:
        return (comm, rank, end.peer) if end.way == SENT else (comm, end.peer, rank)

    # -- the device ------------------------------------------------------------------------------------------------

    def _join(self, rank: int, item: Collective) -> bool:
        """Join a collective; return whether all members are there, each for the same one."""
        joined = self._joined.setdefault(item.comm, {})
        joined[rank] = item.label
        if len(set(joined.values())) > 1:
            self._wrong = ["; ".join(f"rank {other} meets in {label}" for other, label in sorted(joined.items()))]
            return False
        if len(joined) < len(self._members[item.comm]):
            return False
        for other in joined:
            self._at[other] += 1
            if other != rank:
                self._ready.append(other)
        del self._joined[item.comm]
        return True

    def _post(self, rank: int, post: Post) -> None:
        """Post messages; the rank goes on when all of them have passed."""
        if rank in self._left:
            return  # posted before
        left = self._left[rank] = {}
        for end in post.ends:
            left.setdefault((end.peer, end.way), deque()).append(end)
        for peer, way in list(left):
            self._match(rank, peer, way, post.comm)
        self._end_if_over(rank)

    def _match(self, rank: int, peer: int, way: int, comm: Comm) -> None:
        mine = self._left[rank][peer, way]
        others = self._left.get(peer, {}).get((rank, -way)) if self._is_at(peer, comm) else None
        while mine and others:
            one, its = mine.popleft(), others.popleft()
            if one.message != its.message:
                self._wrong = [f"rank {rank}: {one}; rank {peer}: {its}"]
                return
        if peer != rank and others is not None:
            self._end_if_over(peer)

    def _end_if_over(self, rank: int) -> None:
        post = self._front(rank)
        if any(self._left[rank].values()) or not isinstance(post, Post):
            return
        del self._left[rank]
        received = [end for end in post.ends if end.way == RECEIVED]
        self._arrived.update((rank, post.comm, end.peer, end.message) for end in received)
        self._at[rank] += 1
        self._ready.append(rank)
