"""NCCL's rules, once: what a communicator does with what is posted to it, and who waits for whom.

- A communicator is made at its first use, and until all its members are at a use of it their hosts wait.
- The first message of a pair in one direction connects the two, and until both are there their hosts wait: with all
  peers of what is posted together at once.
- What is posted to a communicator runs in that order on each rank; messages posted together go side by side.
- A send is over when its receive took it: nothing is buffered.
- A collective is over when all members of its communicator are at it: each at the same one, or the program is wrong.
- Nothing is said of two communicators of one device: they may take turns (strict), or run side by side (relaxed).

A program has to run when everything on a rank takes turns.  One that runs only side by side relies on what CUDA does
not promise.  What programs of ours post, `messages` says.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from autopart.ir.program import Action, Slot

Comm = Hashable
SENT, RECEIVED = 1, -1


def _spelled(message: Hashable) -> str:
    if not isinstance(message, tuple):
        return str(message)
    micro, kind, stage, peer, piece = message
    return str(Action(kind, Slot(stage, micro, piece), peer))


@dataclass(frozen=True, slots=True)
class Op:
    """One end of a message.  way: SENT or RECEIVED; peer: the other end; message: what both ends call it."""

    way: int
    peer: int
    message: Hashable
    size_bytes: int = 0

    def __str__(self) -> str:
        done, where = ("send", "to") if self.way == SENT else ("receive", "from")
        return f"{done} {_spelled(self.message)} {where} rank {self.peer}"


@dataclass(frozen=True, slots=True)
class Compute:
    """Takes a while and waits for nobody."""

    label: str = "compute"

    def __str__(self) -> str:
        return self.label


@dataclass(frozen=True, slots=True)
class Post:
    """Messages posted together to one communicator."""

    comm: Comm
    ops: tuple[Op, ...]

    def __str__(self) -> str:
        return ", ".join(map(str, self.ops))


@dataclass(frozen=True, slots=True)
class Wait:
    """The computes behind it need a message from a peer."""

    comm: Comm
    peer: int
    message: Hashable

    def __str__(self) -> str:
        return f"wait for {_spelled(self.message)} from rank {self.peer}"


@dataclass(frozen=True, slots=True)
class Collective:
    """A sum, or another exchange, that all members of a communicator join.  label: what all of them call it."""

    comm: Comm
    label: str = "sum"

    def __str__(self) -> str:
        return f"{self.label} over {self.comm}"


Item = Compute | Post | Wait | Collective


def play(
    queues: Sequence[Sequence[Item]],
    members: Mapping[Comm, Collection[int]],
    *,
    strict: bool,
    opened: Iterable[Comm] = (),
    connected: bool = False,
) -> list[str]:
    """What is wrong with these queues, one for each rank: nothing when all is played.

    strict: everything on a rank takes turns; else each communicator has a queue beside the computes.  opened:
    communicators that are made; connected: and all their pairs are.  The order in which ranks get on does not matter.
    O(items).
    """
    return _Play(queues, members, strict=strict, opened=set(opened), connected=connected).run()


class _Play:
    """at: items of each rank that its host has passed.  streams: what is posted and not over, by rank and
    communicator; the first of each is its head, of which `left` has the ops that met nobody yet."""

    def __init__(
        self,
        queues: Sequence[Sequence[Item]],
        members: Mapping[Comm, Collection[int]],
        *,
        strict: bool,
        opened: set[Comm],
        connected: bool,
    ) -> None:
        self._queues, self._members, self._strict = queues, members, strict
        self._opened, self._all_connected = opened, connected
        self._connected: set[tuple[Comm, int, int]] = set()
        self._at = [0] * len(queues)
        self._streams: dict[tuple[int, Comm], deque[Post]] = {}
        self._left: dict[tuple[int, Comm], dict[tuple[int, int], deque[Op]]] = {}
        self._arrived: set[tuple[int, Comm, int, Hashable]] = set()
        self._joined: dict[Comm, dict[int, str]] = {}
        self._ready = deque(range(len(queues)))
        self._starting: deque[tuple[int, Comm]] = deque()
        self._wrong: list[str] = []

    def run(self) -> list[str]:
        while (self._ready or self._starting) and not self._wrong:
            if self._starting:
                self._begin(self._starting.popleft())
            else:
                self._advance(self._ready.popleft())
        if self._wrong:
            return self._wrong
        stuck = [rank for rank in range(len(self._queues)) if self._front(rank) is not None]
        waiting = [f"rank {rank} stands at: {self._front(rank)}" for rank in stuck]
        left = [
            f"rank {rank} has left over: {post}"
            for (rank, _), posts in self._streams.items()
            for post in posts
            if rank not in stuck
        ]
        return waiting + left

    def _front(self, rank: int) -> Item | None:
        queue = self._queues[rank]
        return queue[self._at[rank]] if self._at[rank] < len(queue) else None

    def _advance(self, rank: int) -> None:
        """Let the host of a rank go on as far as it can."""
        while (item := self._front(rank)) is not None and not self._wrong:
            if isinstance(item, Compute):
                self._at[rank] += 1
            elif isinstance(item, Wait):
                if (rank, item.comm, item.peer, item.message) not in self._arrived:
                    return
                self._at[rank] += 1
            elif not self._host_passes(rank, item):
                return
            elif isinstance(item, Collective):
                if not self._join(rank, item):
                    return
            elif not self._post(rank, item):
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
        met = [op.peer for op in item.ops if self._edge(rank, item.comm, op) not in self._connected]
        if not met:
            return True
        if not all(self._informed(other) for other in (rank, *met)):
            return False
        self._connected.update(self._edge(rank, item.comm, op) for op in item.ops)
        self._ready.extend(met)
        return True

    def _is_at(self, rank: int, comm: Comm) -> bool:
        item = self._front(rank)
        return isinstance(item, Post | Collective) and item.comm == comm

    def _informed(self, rank: int) -> bool:
        """Whether every peer that a rank has yet to connect with is at the other end."""
        item = self._front(rank)
        if not isinstance(item, Post):
            return False
        for op in item.ops:
            if self._edge(rank, item.comm, op) in self._connected:
                continue
            other = self._front(op.peer)
            if not isinstance(other, Post) or other.comm != item.comm or item.comm not in self._opened:
                return False
            if not any(o.peer == rank and o.way == -op.way for o in other.ops):
                return False
        return True

    @staticmethod
    def _edge(rank: int, comm: Comm, op: Op) -> tuple[Comm, int, int]:
        return (comm, rank, op.peer) if op.way == SENT else (comm, op.peer, rank)

    # -- the device ------------------------------------------------------------------------------------------------

    def _join(self, rank: int, item: Collective) -> bool:
        """Whether a collective is over: all members are there, each for the same one."""
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

    def _post(self, rank: int, post: Post) -> bool:
        """Whether the host may go on: strictly, once all of it has passed."""
        key = rank, post.comm
        stream = self._streams.setdefault(key, deque())
        if self._strict and stream:
            return False  # it is there already
        stream.append(post)
        if not self._strict:
            self._at[rank] += 1
        if len(stream) == 1:
            self._begin(key)
        return not self._strict

    def _begin(self, key: tuple[int, Comm]) -> None:
        """What is first in a stream begins."""
        post = self._streams[key][0]
        left: dict[tuple[int, int], deque[Op]] = {}
        for op in post.ops:
            left.setdefault((op.peer, op.way), deque()).append(op)
        self._left[key] = left
        for peer, way in list(left):
            self._match(key, peer, way)
        self._end_if_over(key)

    def _match(self, key: tuple[int, Comm], peer: int, way: int) -> None:
        """Let ops of one rank meet those of a peer."""
        rank, comm = key
        other_key = peer, comm
        mine = self._left[key][peer, way]
        other = self._left.get(other_key, {}).get((rank, -way))
        while mine and other:
            one, its = mine.popleft(), other.popleft()
            if (one.size_bytes, one.message) != (its.size_bytes, its.message):
                ends = ((rank, one), (peer, its))
                self._wrong = ["; ".join(f"rank {r}: {op}, {op.size_bytes} bytes" for r, op in ends)]
                return
        if peer != rank and other is not None:
            self._end_if_over(other_key)

    def _end_if_over(self, key: tuple[int, Comm]) -> None:
        if key not in self._left or any(self._left[key].values()):
            return
        rank, comm = key
        del self._left[key]
        post = self._streams[key].popleft()
        self._arrived.update((rank, comm, op.peer, op.message) for op in post.ops if op.way == RECEIVED)
        if self._strict:
            self._at[rank] += 1
        self._ready.append(rank)
        if self._streams[key]:
            self._starting.append(key)
        else:
            del self._streams[key]
