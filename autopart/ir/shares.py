"""Replicas: which rows of a micro-batch each rank of a stage has, which rows of a message go where, and which
parameters each keeps the optimizer's state of (ZeRO-1).

Everything that depends on it is derived from the cuts of a `Division`: code and inputs of a rank, weights of losses,
channels, messages, memory and times.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from heapq import heapreplace
from itertools import accumulate, pairwise
from math import gcd, lcm
from typing import Literal

from autopart.ir.printable import shortened

Policy = Literal["split", "turn"]
"""How the ranks of a stage divide the work: the rows of every micro-batch, or whole micro-batches in turn."""
POLICIES: tuple[Policy, ...] = ("split", "turn")
MOST_SHARES = 1000
"""The largest number that stands for the share of a rank."""


@dataclass(frozen=True, slots=True)
class RowLayout:
    """How a value holds the rows of a micro-batch: its `axis` has size stride * rows * block, and the row of an element
    is the middle index.  Flattening (batch, sequence) gives stride 1, flattening (sequence, batch) stride sequence."""

    axis: int
    stride: int = 1


@dataclass(frozen=True, slots=True)
class Window:
    """The rows of one replica: `own` rows from row `first` on, of a micro-batch of `whole` rows."""

    first: int
    own: int
    whole: int

    @property
    def end(self) -> int:
        """Behind the last row."""
        return self.first + self.own

    @property
    def is_all(self) -> bool:
        """Whether it is the whole micro-batch."""
        return self.own == self.whole


@dataclass(frozen=True, slots=True)
class Transfer:
    """Which part of a message goes from one rank to another.

    rows: (first, last + 1) of the micro-batch's rows in shares of `of`: with 2 equal senders and 3 equal receivers,
    (2, 3) of 6.  Values without a row axis go whole, from one rank.
    """

    src_rank: int
    dst_rank: int
    rows: tuple[int, int] = (0, 1)
    of: int = 1


@dataclass(frozen=True, slots=True)
class Passage:
    """What passes between one rank of a stage and one rank of a later stage for a micro-batch.

    src, dst: the ranks, in the direction of the forward.  first, end: rows of the micro-batch.  carries_whole: values
    without rows pass here too: each receiver takes them from one sender, to which their gradients come back.
    all_rows: these are all rows that either of the two has.
    """

    src: int
    dst: int
    first: int
    end: int
    carries_whole: bool
    all_rows: bool


@dataclass(frozen=True, slots=True)
class Division:
    """How the ranks of a stage divide micro-batches.

    shares: of each rank, as small whole numbers: it has so many of their sum of the rows of every micro-batch.
    in_turn: micro-batch m is instead whole on rank m % len(shares).  Made by `division`, so that equal ones are equal.
    """

    shares: tuple[int, ...] = (1,)
    in_turn: bool = False

    @property
    def count(self) -> int:
        """How many ranks there are."""
        return len(self.shares)

    @property
    def splits(self) -> bool:
        """Whether a rank may have a part of a micro-batch."""
        return self.count > 1 and not self.in_turn

    @property
    def period(self) -> int:
        """Micro-batches after which it repeats itself."""
        return self.count if self.in_turn else 1

    @property
    def most(self) -> tuple[int, int]:
        """The largest share of a micro-batch that a rank has, as a numerator and a denominator."""
        return (1, 1) if self.in_turn else (max(self.shares), sum(self.shares))

    def part(self, rows: int, replica: int) -> int:
        """The most rows that one replica has of a micro-batch of `rows` rows, the shares rounded up."""
        return rows if self.in_turn else -(-rows * self.shares[replica] // sum(self.shares))

    def largest_part(self, rows: int) -> int:
        """The most rows that any replica has."""
        mine, whole = self.most
        return -(-rows * mine // whole)

    def player(self, micro: int) -> int | None:
        """The only replica that takes part in a micro-batch, None where all do."""
        return micro % self.count if self.in_turn else None

    def cuts(self, micro: int) -> tuple[int, ...]:
        """Where the parts of the replicas begin, and where the last one ends, which is the whole micro-batch."""
        if not self.in_turn:
            return (0, *accumulate(self.shares))
        return tuple(int(replica > micro % self.count) for replica in range(self.count + 1))

    def windows(self, micro: int, rows: int) -> tuple[Window, ...]:
        """The rows of each replica, in order, as near to its share as can be; of few rows, some replicas have none.

        The cuts stand at cut * rows / whole, rounded up.  So two ranks of two stages have rows in common only where
        their cuts overlap (`crossings`), whatever the number of rows: a channel for each of those is enough.
        """
        cuts = self.cuts(micro)
        ends = [-(-cut * rows // cuts[-1]) for cut in cuts]
        return tuple(Window(first, end - first, rows) for first, end in pairwise(ends))


def division(count: int, shares: Sequence[int] = (), policy: Policy = "split") -> Division:
    """The division of a stage on `count` ranks; no shares are equal ones."""
    in_turn = policy == "turn" and count > 1
    if not shares or in_turn or count == 1:
        return Division((1,) * count, in_turn)
    common = gcd(*shares)
    return Division(tuple(share // common for share in shares))


def division_problems(count: int, shares: Sequence[int], policy: str) -> Iterator[tuple[str, str]]:
    """What is wrong with how `count` ranks are to divide micro-batches: (field of a stage, message)."""
    if policy not in POLICIES:
        yield "policy", f"replicas {' or '.join(POLICIES)}, not {shortened(policy, 100)}"
    if shares and len(shares) != count:
        yield "shares", f"{len(shares)} shares for {count} ranks; give one each or none"
    if not all(1 <= share <= MOST_SHARES for share in shares):
        yield "shares", f"a share is a number from 1 to {MOST_SHARES}"
    if shares and policy == "turn":
        yield "shares", "replicas that take turns have whole micro-batches; give no shares"


def parts(divided: Division, micro: int, rows: int) -> tuple[int, ...]:
    """How many rows each replica has."""
    return tuple(window.own for window in divided.windows(micro, rows))


def together(a: Division, b: Division) -> int:
    """Micro-batches after which what passes between two stages repeats itself."""
    return lcm(a.period, b.period)


def same_windows(a: Division, b: Division) -> bool:
    """Whether whoever sends a part of a micro-batch has the very rows that its receiver has, whatever their number."""
    return a == b or not (a.splits or b.splits)


def copies_of(divisions: Sequence[Division]) -> int:
    """Pipelines side by side, none of whose rows leaves its copy: where all shares are equal."""
    equal = all(max(each.shares) == 1 and not each.in_turn for each in divisions)
    return gcd(*(each.count for each in divisions)) if equal else 1


@lru_cache(maxsize=4096)
def crossings(sent: tuple[int, ...], received: tuple[int, ...]) -> tuple[tuple[int, int, int, int], ...]:
    """(sender, receiver, start, end) of what they have in common, in order of the rows; the whole is the product of the
    last cuts.  O(senders + receivers)."""
    found = []
    start, sender, receiver = 0, 0, 0
    while start < sent[-1] * received[-1]:
        sender_end, receiver_end = sent[sender + 1] * received[-1], received[receiver + 1] * sent[-1]
        end = min(sender_end, receiver_end)
        if end > start:
            found.append((sender, receiver, start, end))
        sender, receiver = sender + (end == sender_end), receiver + (end == receiver_end)
        start = end
    return tuple(found)


@lru_cache(maxsize=4096)
def split_rows(
    senders: tuple[int, ...], receivers: tuple[int, ...], sent: tuple[int, ...] = (), received: tuple[int, ...] = ()
) -> tuple[Transfer, ...]:
    """How the rows of a message go from the ranks that hold them to those that will, in order of the rows.

    sent, received: where the parts of both sides are cut (`Division.cuts`), empty for equal shares; each row goes once.
    O(senders + receivers).
    """
    ours, theirs = sent or tuple(range(len(senders) + 1)), received or tuple(range(len(receivers) + 1))
    whole, found = ours[-1] * theirs[-1], crossings(ours, theirs)
    return tuple(Transfer(senders[i], receivers[j], (start, end), whole) for i, j, start, end in found)


def passages(
    windows: Sequence[Window], senders: Sequence[int], others: Sequence[Window], receivers: Sequence[int]
) -> tuple[Passage, ...]:
    """What passes between the ranks of two stages for a micro-batch: each row once, in order; and values without rows
    once to each receiver.  windows, others: those of senders and receivers.  O(senders * receivers)."""
    found: list[Passage] = []
    for dst, theirs in zip(receivers, others, strict=True):
        first_sender = True
        for src, mine in zip(senders, windows, strict=True):
            first, end = max(mine.first, theirs.first), min(mine.end, theirs.end)
            if first < end:
                found.append(Passage(src, dst, first, end, first_sender, mine == theirs))
                first_sender = False
    return tuple(found)


def owners_of(sizes: Mapping[str, int], replicas: int) -> dict[str, int]:
    """Return the replica that keeps the optimizer's state of each parameter.

    Deals whole parameters, the largest first, each to the replica that has least; parameters of one size by name.  So
    optimizers that go by names or numbers of axes keep working, and each update is exactly as without sharing.  sizes:
    in bytes.  O(parameters * log(parameters * replicas)).

    Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020), section 5.1.
    """
    names = sorted(sizes, key=lambda name: (-sizes[name], name))
    return dict(zip(names, _dealt([sizes[name] for name in names], replicas), strict=True))


def largest_share(sizes: Iterable[int], replicas: int) -> int:
    """Return the bytes of the replica that owns most.  O(parameters * log(parameters * replicas))."""
    ordered, owned = sorted(sizes, reverse=True), [0] * replicas
    for size, owner in zip(ordered, _dealt(ordered, replicas), strict=True):
        owned[owner] += size
    return max(owned)


def _dealt(descending: Sequence[int], replicas: int) -> Iterator[int]:
    """Yield the replica that gets each parameter."""
    owned = [(0, replica) for replica in range(replicas)]  # a heap
    for size in descending:
        has, owner = owned[0]
        heapreplace(owned, (has + size, owner))
        yield owner
