"""The load that a message or a sum of gradients puts on the ports of a cluster.

Replicas share the rows of a micro-batch, so a message between two stages is several transfers: each sender sends each
receiver the rows that both hold.  A sum of gradients is a ring over the replicas in order of rank (reduce-scatter, then
all-gather), in which every hop carries 2 (n - 1) / n of the gradients (Patarasuk and Yuan, 2009).

Assumed, and wrong where: what is sent is cut by rows (constants of a batch are sent whole); all transfers of a
message start at once; a collective library may choose a tree for small sums.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache, partial

from autopart.ir.cluster import DEVICE_KINDS, Cluster, Port
from autopart.ir.decision import Stage
from autopart.ir.shares import common_period, split_rows

_Hop = tuple[int, int, float]
"""Sender, receiver, and bytes between them per byte of the whole."""
PortUse = tuple[Port, bool]
"""A port and whether it is used inwards.  The network card of a rank is (-1 - index of the level, rank)."""


Kind = tuple[float, int]
"""What a load puts on a port: bytes per byte of the whole, and the bytes/s of the port."""


@dataclass(frozen=True, eq=False)
class PortLoad:
    """The bytes over each port used, per byte of the whole.

    latency_ns: of the slowest hop.  ways: the ports and their directions.  shares: bytes over each.  rates: bytes/s.
    Two loads are one only if they are the same object: comparing them port by port takes as long as making them.
    """

    latency_ns: int
    ways: tuple[PortUse, ...]
    shares: tuple[float, ...]
    rates: tuple[int, ...]

    @cached_property
    def kinds(self) -> tuple[Kind, ...]:
        """What it puts on its ports; few are different."""
        return tuple(dict.fromkeys(zip(self.shares, self.rates, strict=True)))

    def busy_ns(self, size_bytes: int) -> dict[Kind, int]:
        """Return the nanoseconds that size_bytes keep the ports of each kind busy.  O(kinds)."""
        return {(share, rate): int(-(-(size_bytes * share) * 10**9 // rate)) for share, rate in self.kinds}

    def alone_ns(self, size_bytes: int) -> int:
        """Return the nanoseconds until all bytes arrive when nothing else is sent; 0 without bytes or ports."""
        if not size_bytes or not self.ways:
            return 0
        return self.latency_ns + max(self.busy_ns(size_bytes).values())

    @property
    def pace(self) -> tuple[int, float]:
        """Return (latency in ns, ns per byte of the slowest port); (0, 0) without ports."""
        slowest = max((share * 1e9 / rate for share, rate in self.kinds), default=0.0)
        return self.latency_ns, slowest


@lru_cache(maxsize=32)
def merged(loads: tuple[PortLoad, ...]) -> tuple[tuple[tuple[int, Kind], ...], ...]:
    """Return what each load puts on which ports, by their numbers.

    Ports on which every one of these loads puts the same are always busy together, so they count as one: replicas cost
    nothing.  O(ports of all loads), once for plans on the same ranks.
    """
    users: dict[PortUse, list[tuple[int, Kind]]] = {}
    for number, load in enumerate(loads):
        for way, share, rate in zip(load.ways, load.shares, load.rates, strict=True):
            users.setdefault(way, []).append((number, (share, rate)))
    found: list[list[tuple[int, Kind]]] = [[] for _ in loads]
    for port, used in enumerate(dict.fromkeys(map(tuple, users.values()))):
        for number, kind in used:
            found[number].append((port, kind))
    return tuple(map(tuple, found))


def p2p_load(
    cluster: Cluster,
    senders: tuple[int, ...],
    receivers: tuple[int, ...],
    sent: tuple[int, ...] = (),
    received: tuple[int, ...] = (),
) -> PortLoad:
    """Return the load of a message from one stage to another.

    senders, receivers: ranks in order of their rows.  sent, received: where the rows of both are cut
    (`Division.cuts`), empty for equal shares.  Rows that stay on their rank take no time.  O(senders + receivers).
    """
    hops: list[_Hop] = []
    for part in split_rows(senders, receivers, sent, received):
        if part.src_rank != part.dst_rank:
            first, end = part.rows
            hops.append((part.src_rank, part.dst_rank, (end - first) / part.of))
    return _load(cluster, hops, hops, 1)


def owners_load(cluster: Cluster, ranks: tuple[int, ...]) -> PortLoad:
    """Return the load of sums of gradients of which each rank gets an equal part, by a reduce for each bucket.

    NCCL passes a bucket once around the ring.  Gloo scatters its sums over all ranks first (one turn of the ring), then
    its owner gathers them over its own port while the others wait, which takes as long as another turn: buckets of one
    group follow each other.  O(ranks).
    """
    return ring_load(cluster, ranks, 2 if DEVICE_KINDS[cluster.kind].transport == "gloo" else 1)


def ring_load(cluster: Cluster, ranks: tuple[int, ...], turns: int) -> PortLoad:
    """Return the load of a ring over `ranks`: one turn is a reduce-scatter or an all-gather, two are an all-reduce.

    O(ranks).
    """
    n = len(ranks)
    if n < 2:
        return PortLoad(0, (), (), ())
    share = turns * (n - 1) / n
    order = sorted(ranks)
    hops = [(a, b, share) for a, b in zip(order, [*order[1:], order[0]], strict=True)]
    return _load(cluster, hops, _over_all_cards(cluster, hops, order), turns * (n - 1))


def _over_all_cards(cluster: Cluster, hops: Sequence[_Hop], ranks: Sequence[int]) -> list[_Hop]:
    """Spread hops between groups over the network cards of their ranks.

    A library runs as many rings as there are cards, and each ring leaves a group through another card.
    O(levels * ranks).
    """
    flows: list[_Hop] = []
    members: dict[int, defaultdict[int, list[int]]] = {}  # by level, the ranks of each group of the one inside it
    for sender, receiver, share in hops:
        index = cluster.level(sender, receiver)
        if index and cluster.levels[index].link.flow_bytes_per_s:
            group = cluster.levels[index - 1].group
            if index not in members:
                members[index] = defaultdict(list)
                for rank in ranks:
                    members[index][group(rank)].append(rank)
            here, there = (members[index][group(end)] for end in (sender, receiver))
            lanes = max(len(here), len(there))
            flows += [(here[i % len(here)], there[i % len(there)], share / lanes) for i in range(lanes)]
    return flows


def _load(cluster: Cluster, hops: Sequence[_Hop], flows: Sequence[_Hop], rounds: int) -> PortLoad:
    """Return the load of these transfers.

    hops: carried by ports.  flows: carried by the network cards of single ranks, where a port has several.
    """
    shares: dict[PortUse, float] = {}
    latency = 0
    for sender, receiver, share in hops:
        out, into = cluster.ports(sender, receiver)
        shares[out, False] = shares.get((out, False), 0.0) + share
        shares[into, True] = shares.get((into, True), 0.0) + share
        latency = max(latency, cluster.link(sender, receiver).latency_ns)
    rates = [cluster.levels[port[0]].link.bytes_per_s for port, _ in shares]
    for sender, receiver, share in flows:
        index = cluster.level(sender, receiver)
        rate = cluster.levels[index].link.flow_bytes_per_s
        for card in (((-1 - index, sender), False), ((-1 - index, receiver), True)) if rate else ():
            if card not in shares:
                rates.append(rate)
            shares[card] = shares.get(card, 0.0) + share
    return PortLoad(latency * rounds, tuple(shares), tuple(shares.values()), tuple(rates))


def moved_by(cluster: Cluster) -> int:
    """Return by how many ranks stages may be moved, without a change of what they share with each other: a group inside
    the outermost level, where groups are equal; else as many as no rank is moved by."""
    if any(level.groups for level in cluster.levels):
        return cluster.world
    return cluster.levels[-2].size if len(cluster.levels) > 1 else 1


class Loads:
    """The loads of messages and sums on one cluster, each computed once.

    p2p, ring, to_owners: `p2p_load`, `ring_load` and `owners_load` on this cluster.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._unit = moved_by(cluster)
        self.p2p = cache(partial(p2p_load, cluster))
        self.ring = cache(partial(ring_load, cluster))
        self.to_owners = cache(partial(owners_load, cluster))

    def paces(self, before: tuple[int, ...], ranks: tuple[int, ...]) -> tuple[tuple[int, float], tuple[int, float]]:
        """Return the pace of a message between stages on these ranks, (0, 0) if nothing is before, and that of a turn
        of the ring of `ranks`; where stages stand alike on other groups of devices, they are found once.
        """
        away = min(min(before, default=ranks[0]), min(ranks)) // self._unit * self._unit
        before, ranks = (tuple([rank - away for rank in each]) for each in (before, ranks))
        return self.p2p(before, ranks).pace if before else (0, 0.0), self.ring(ranks, 1).pace

    def between(self, src: Stage, dst: Stage) -> tuple[PortLoad, ...]:
        """Return the loads of a message between two stages, by micro-batch until they repeat."""
        ours, theirs = src.division, dst.division
        return tuple(
            self.p2p(src.ranks, dst.ranks, ours.cuts(micro), theirs.cuts(micro))
            for micro in range(common_period(ours, theirs))
        )
