"""What each rank of a stage has: pieces of tensors; of replicas, the rows of a micro-batch and of a message, and the
parameters whose optimizer state each keeps (ZeRO-1).  Rows are derived from the cuts of a `Division`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from heapq import heapreplace
from itertools import accumulate, pairwise
from math import gcd, lcm
from typing import Literal

from autopart.ir.errors import shortened

Policy = Literal["split", "turn"]
"""How replicas divide the work: shares of the rows of every micro-batch, or whole micro-batches, round robin."""
POLICIES: tuple[Policy, ...] = ("split", "turn")
MOST_SHARES = 1000
"""Largest number that can describe the share of a rank."""


@dataclass(frozen=True, slots=True)
class RowLayout:
    """How a value holds the rows of a micro-batch.

    Its `axis` has size stride * rows * block, and the row of an element is the middle index.  Flattening (batch,
    sequence) gives stride 1, flattening (sequence, batch) gives a stride of the sequence length.
    """

    axis: int
    stride: int = 1


@dataclass(frozen=True, slots=True)
class Window:
    """The rows of one replica: `own` rows, starting at row `first`, of a micro-batch of `whole` rows."""

    first: int
    own: int
    whole: int

    @property
    def end(self) -> int:
        """First row after the window."""
        return self.first + self.own

    @property
    def is_all(self) -> bool:
        """Whether the window is the whole micro-batch."""
        return self.own == self.whole


@dataclass(frozen=True, slots=True)
class Transfer:
    """The part of a message that goes from one rank to another.

    rows: (first, last + 1) of the micro-batch's rows as fractions of `of`: with 2 equal senders and 3 equal receivers,
    (2, 3) of 6.  Values without a row axis are sent whole, by one rank.
    """

    src_rank: int
    dst_rank: int
    rows: tuple[int, int] = (0, 1)
    of: int = 1


@dataclass(frozen=True, slots=True)
class Passage:
    """The rows that pass between one rank of a stage and one rank of a later stage for a micro-batch.

    src, dst: the ranks, in the direction of the forward.  first, end: rows of the micro-batch.  carries_whole: whether
    values without rows pass here too; each receiver takes them from one sender, which gets their gradients back.
    all_rows: whether these are all rows of both ranks.
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

    shares: of each rank, as small whole numbers; a rank has shares[i] / sum(shares) of the rows of every micro-batch.
    in_turn: micro-batch m runs whole on rank m % len(shares) instead.  Use `division` to make one: it reduces shares to
    lowest terms.  shards: ranks that compute parts of the same rows, side by side: each of them has the rows of its
    replica.
    """

    shares: tuple[int, ...] = (1,)
    in_turn: bool = False
    shards: int = 1

    @property
    def count(self) -> int:
        """Number of replicas."""
        return len(self.shares)

    @property
    def splits(self) -> bool:
        """Whether ranks have parts of a micro-batch."""
        return self.count > 1 and not self.in_turn

    @property
    def period(self) -> int:
        """Number of micro-batches after which the division repeats."""
        return self.count if self.in_turn else 1

    @property
    def most(self) -> tuple[int, int]:
        """Largest share of a micro-batch that a rank has, as (numerator, denominator)."""
        return (1, 1) if self.in_turn else (max(self.shares), sum(self.shares))

    def part(self, rows: int, replica: int) -> int:
        """Return the most rows that one replica has of a micro-batch of `rows` rows: its share, rounded up."""
        return rows if self.in_turn else -(-rows * self.shares[replica] // sum(self.shares))

    def largest_part(self, rows: int) -> int:
        """Return the most rows that any replica has of a micro-batch of `rows` rows."""
        mine, whole = self.most
        return -(-rows * mine // whole)

    def groups(self, ranks: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """Yield the ranks that compute parts of the same rows, ascending; nothing where each has whole rows."""
        for first in range(0, len(ranks) if self.shards > 1 else 0, self.shards):
            yield tuple(sorted(ranks[first : first + self.shards]))

    def player(self, micro: int) -> int | None:
        """Return the only replica that takes part in a micro-batch; None if all do."""
        return micro % self.count if self.in_turn else None

    def cuts(self, micro: int) -> tuple[int, ...]:
        """Return the start of each replica's part, and the end of the last one, which is the whole micro-batch."""
        if not self.in_turn:
            return (0, *accumulate(self.shares))
        return tuple(int(replica > micro % self.count) for replica in range(self.count + 1))

    def windows(self, micro: int, rows: int) -> tuple[Window, ...]:
        """Return the rows of each rank, in order; with few rows, some replicas have none.

        Cuts are at cut * rows / whole, rounded up.  So two ranks of two stages have rows in common only if their cuts
        overlap (`split_rows`), for any number of rows: one channel for each of these pairs is enough.
        """
        cuts = self.cuts(micro)
        ends = [-(-cut * rows // cuts[-1]) for cut in cuts]
        return tuple(Window(first, end - first, rows) for first, end in pairwise(ends) for _ in range(self.shards))


def division(count: int, shares: Sequence[int] = (), policy: Policy = "split", shards: int = 1) -> Division:
    """Return the division of a stage among `count` replicas; without shares all are equal."""
    in_turn = policy == "turn" and count > 1
    if not shares or in_turn or count == 1:
        return Division((1,) * count, in_turn, shards)
    common = gcd(*shares)
    return Division(tuple(share // common for share in shares), shards=shards)


def division_problems(count: int, shares: Sequence[int], policy: str) -> Iterator[tuple[str, str]]:
    """Yield what is wrong with a division among `count` ranks, as (field of a stage, message)."""
    if policy not in POLICIES:
        yield "policy", f"must be {' or '.join(POLICIES)}, not {shortened(policy, 100)}"
    if shares and len(shares) != count:
        yield "shares", f"{len(shares)} shares for {count} ranks; give one each or none"
    if not all(1 <= share <= MOST_SHARES for share in shares):
        yield "shares", f"a share is a number from 1 to {MOST_SHARES}"
    if shares and policy == "turn":
        yield "shares", "replicas that take turns get whole micro-batches; give no shares"


def parts(divided: Division, micro: int, rows: int) -> tuple[int, ...]:
    """Return the number of rows that each rank has."""
    return tuple(window.own for window in divided.windows(micro, rows))


@lru_cache(maxsize=64)
def parts_of_all(divided: Division, micro_rows: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    """Return the number of rows that each rank has of each micro-batch; cached, since steps are mostly alike."""
    return tuple(parts(divided, micro, rows) for micro, rows in enumerate(micro_rows))


def common_period(a: Division, b: Division) -> int:
    """Return the number of micro-batches after which the messages between two stages repeat."""
    return lcm(a.period, b.period)


def same_windows(a: Division, b: Division) -> bool:
    """Return whether sender and receiver have identical rows for every number of rows."""
    return a == b or not (a.splits or b.splits)


def copies_of(divisions: Sequence[Division]) -> int:
    """Return the number of equal pipelines side by side; 1 if shares differ."""
    equal = all(max(each.shares) == 1 and not each.in_turn for each in divisions)
    return gcd(*(each.count for each in divisions)) if equal else 1


def split_among(
    senders: tuple[int, ...], receivers: tuple[int, ...], a: Division, b: Division, micro: int
) -> tuple[Transfer, ...]:
    """Return the transfers of a message between two stages: of each shard of one to the same shard of the other."""
    cuts = a.cuts(micro), b.cuts(micro)
    pairs = [(senders[n :: a.shards], receivers[n :: b.shards]) for n in range(a.shards)]
    return tuple(transfer for ours, theirs in pairs for transfer in split_rows(ours, theirs, *cuts))


@lru_cache(maxsize=4096)
def split_rows(
    senders: tuple[int, ...], receivers: tuple[int, ...], sent: tuple[int, ...] = (), received: tuple[int, ...] = ()
) -> tuple[Transfer, ...]:
    """Return the transfers that move each row of a message once from sender to receiver, in order of the rows.

    sent, received: the cuts of both sides (`Division.cuts`), empty for equal shares.  O(senders + receivers).
    """
    sent, received = sent or tuple(range(len(senders) + 1)), received or tuple(range(len(receivers) + 1))
    found = []
    start, sender, receiver, whole = 0, 0, 0, sent[-1] * received[-1]
    while start < whole:
        sender_end, receiver_end = sent[sender + 1] * received[-1], received[receiver + 1] * sent[-1]
        end = min(sender_end, receiver_end)
        if end > start:
            found.append(Transfer(senders[sender], receivers[receiver], (start, end), whole))
        sender, receiver = sender + (end == sender_end), receiver + (end == receiver_end)
        start = end
    return tuple(found)


def passages(
    windows: Sequence[Window],
    senders: Sequence[int],
    others: Sequence[Window],
    receivers: Sequence[int],
    shards: int = 1,
) -> tuple[Passage, ...]:
    """Return what passes between the ranks of two stages for a micro-batch.

    Each row passes once, in order; values without rows pass once to each receiver.  windows, others: rows of the
    senders and of the receivers.  shards: of both; each passes what it has to the same one.  O(senders * receivers).
    """
    found: list[Passage] = []
    for place, (dst, wanted) in enumerate(zip(receivers, others, strict=True)):
        first_sender = True
        alike = slice(place % shards, None, shards)
        for src, held in zip(senders[alike], windows[alike], strict=True):
            first, end = max(held.first, wanted.first), min(held.end, wanted.end)
            if first < end:
                found.append(Passage(src, dst, first, end, first_sender, held == wanted))
                first_sender = False
    return tuple(found)


def owners_of(sizes: Mapping[str, int], replicas: int) -> dict[str, int]:
    """Return the replica that keeps the optimizer's state of each parameter.

    Whole parameters are dealt, the largest first, each to the replica with the fewest bytes; parameters of equal size
    in order of their names.  Since parameters stay whole, every optimizer works, and updates are as without sharing.
    sizes: in bytes.  O(parameters * log(parameters * replicas)).

    Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models" (2020), section 5.1.
    """
    names = sorted(sizes, key=lambda name: (-sizes[name], name))
    return dict(zip(names, _dealt([sizes[name] for name in names], replicas), strict=True))


def largest_share(sizes: Iterable[int], replicas: int) -> int:
    """Return the bytes of the replica that owns the most.  O(parameters * log(parameters * replicas))."""
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


_PART = re.compile(r"(?s)(.*)\[(0|[1-9]\d*):(0|[1-9]\d*)/([1-9]\d*)(?:x([1-9]\d*))?\]")


@dataclass(frozen=True, slots=True, order=True)
class Piece:
    """Part `index` of `parts` equal parts of a tensor along one axis; a whole tensor is the only one of its parts.

    name: of the tensor.  blocks: equal blocks of the axis, of each of which it has this part: the heads of a rank in a
    product that makes queries, keys and values.  A whole tensor prints as its name, "w[1:0/2]" is the first half of w
    along axis 1, and "w[1:0/2x3]" the first halves of three blocks.
    """

    name: str
    axis: int = 0
    parts: int = 1
    index: int = 0
    blocks: int = 1

    def __str__(self) -> str:
        blocks = f"x{self.blocks}" if self.blocks > 1 else ""
        text = f"{self.name}[{self.axis}:{self.index}/{self.parts}{blocks}]"
        return self.name if parse_piece(self.name) == self else text

    @property
    def is_whole(self) -> bool:
        """Whether it is the whole tensor."""
        return self.parts == 1

    @property
    def spans(self) -> Iterator[tuple[Fraction, Fraction]]:
        """The parts of its axis that it has, each from where to where."""
        for block in range(self.blocks):
            first = Fraction(block * self.parts + self.index, self.blocks * self.parts)
            yield first, first + Fraction(1, self.blocks * self.parts)


@lru_cache(maxsize=1 << 16)
def whole(name: str) -> Piece:
    """Return a whole tensor."""
    return Piece(name)


def cut(name: str, axis: int, parts: int, blocks: int = 1) -> tuple[Piece, ...]:
    """Return all pieces of a tensor, in order."""
    return tuple(Piece(name, axis, parts, n, blocks) for n in range(parts)) if parts > 1 else (whole(name),)


def parse_piece(text: str) -> Piece:
    """Return the piece that prints like this."""
    found = _PART.fullmatch(text)
    axis, index, parts, blocks = [int(n or 1) for n in found.groups()[1:]] if found else (0, 0, 0, 1)
    known = found and index < parts and (parts > 1 or (axis == 0 and blocks == 1))
    return Piece(found[1], axis, parts, index, blocks) if found and known else whole(text)


def overlap(a: Piece, b: Piece) -> Fraction:
    """Return how much of their tensor two pieces of it have in common."""
    if a.axis != b.axis:
        return Fraction(1, a.parts * b.parts)
    if a.blocks == b.blocks:  # alike in every block
        first = max(Fraction(a.index, a.parts), Fraction(b.index, b.parts))
        return max(Fraction(0), min(Fraction(a.index + 1, a.parts), Fraction(b.index + 1, b.parts)) - first)
    pairs = ((own, other) for own in a.spans for other in b.spans)
    return sum((max(Fraction(0), min(o[1], t[1]) - max(o[0], t[0])) for o, t in pairs), Fraction(0))
