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
from itertools import compress
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from autopart.ir.cluster import DEVICE_KINDS, Cluster, Level, Port
from autopart.ir.decision import Stage
from autopart.ir.shares import common_period, split_rows
from autopart.passes.graph.cuts import Floats, Ints

_Hop = tuple[int, int, float]
"""Sender, receiver, and bytes between them per byte of the whole."""
PortUse = tuple[Port, bool]
"""A port and whether it is used inwards.  The network card of a rank is (-1 - index of the level, rank)."""
_BITS = 40
"""Of a port's code: those of the group or rank."""
Kind = tuple[float, int]
"""What a load puts on a port: bytes per byte of the whole, and the bytes/s of the port."""


@dataclass(frozen=True, eq=False)
class PortLoad:
    """The bytes over each port used, per byte of the whole.

    latency_ns: of the slowest hop.  codes: the ports and their directions (`_codes`).  shares: bytes over each.  rates:
    bytes/s.  Two loads are one only if they are the same object: comparing them port by port takes as long as making
    them.
    """

    latency_ns: int
    codes: Ints
    shares: Floats
    rates: Ints

    @cached_property
    def _by_kind(self) -> tuple[tuple[Kind, ...], Ints]:
        """The different kinds, and for each port the place of its own among them."""
        shares, rates = _numbered(self.shares)[1], _numbered(self.rates)[1]
        first, kinds = _numbered(shares * (len(rates) + 1) + rates)
        return tuple(zip(self.shares[first].tolist(), self.rates[first].tolist(), strict=True)), kinds

    @property
    def ways(self) -> tuple[PortUse, ...]:
        """The ports and whether they are used inwards."""
        ends = [(code >> 1, bool(code & 1)) for code in self.codes.tolist()]
        return tuple([((end >> _BITS, end & ((1 << _BITS) - 1)), inwards) for end, inwards in ends])

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """What it puts on its ports; few are different, none if it has no ports."""
        return self._by_kind[0]

    @property
    def kind_of(self) -> Ints:
        """For each port the place of what it puts there among `kinds`."""
        return self._by_kind[1]

    def busy_ns(self, size_bytes: int) -> dict[Kind, int]:
        """Return the nanoseconds that size_bytes keep the ports of each kind busy.  O(kinds)."""
        return {(share, rate): int(-(-(size_bytes * share) * 10**9 // rate)) for share, rate in self.kinds}

    def alone_ns(self, size_bytes: int) -> int:
        """Return the nanoseconds until all bytes arrive when nothing else is sent; 0 without bytes or ports."""
        if not size_bytes or not self.kinds:
            return 0
        return self.latency_ns + max(self.busy_ns(size_bytes).values())

    @property
    def pace(self) -> tuple[int, float]:
        """Return (latency in ns, ns per byte of the slowest port); (0, 0) without ports."""
        slowest = max((share * 1e9 / rate for share, rate in self.kinds), default=0.0)
        return self.latency_ns, slowest


NO_PORTS = PortLoad(0, np.zeros(0, dtype=np.int64), np.zeros(0), np.zeros(0, dtype=np.int64))
"""Of what is sent to nobody."""


@lru_cache(maxsize=32)
def merged(loads: tuple[PortLoad, ...]) -> tuple[tuple[tuple[int, Kind], ...], ...]:
    """Return what each load puts on which ports, by their numbers.

    Ports on which every one of these loads puts the same are always busy together, so they count as one: replicas cost
    nothing.  Load by load, the ports that are alike so far part by what it puts on them.  O(ports of all loads · log),
    once for plans on the same ranks.
    """
    found: list[list[tuple[int, Kind]]] = [[] for _ in loads]
    if not loads:
        return ()
    first, places = _numbered(np.concatenate([load.codes for load in loads]))
    state, end = np.zeros(len(first), dtype=np.int64), 0
    used: list[tuple[tuple[int, Kind], ...]] = [()]  # by state: what ports in it carry, by the number of the load
    for number, load in enumerate(loads):
        own, end = places[end : end + len(load.codes)], end + len(load.codes)
        parted = state[own] * len(load.kinds) + load.kind_of
        first, fresh = _numbered(parted)
        state[own] = len(used) + fresh
        for before, kind in (divmod(each, len(load.kinds)) for each in parted[first].tolist()):
            used.append((*used[before], (number, load.kinds[kind])))
    for port, last in enumerate(state[_numbered(state)[0]].tolist()):
        for number, carried in used[last]:
            found[number].append((port, carried))
    return tuple(map(tuple, found))


def _numbered(values: npt.NDArray[Any]) -> tuple[Ints, Ints]:
    """Return the places of the different values where they come first, and for each value its number among these."""
    _, first, inverse = np.unique(values, return_index=True, return_inverse=True)
    order = np.argsort(first)
    number = np.empty_like(order)
    number[order] = np.arange(len(order))
    return first[order], number[inverse]


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
        return NO_PORTS
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
    for (sender, receiver, share), index in zip(hops, _between(cluster, hops).levels.tolist(), strict=True):
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


class _Hops(NamedTuple):
    """Hops as arrays: the ranks that send and receive, the index of the level that holds both, and the group of each in
    the level inside it, or the rank itself."""

    senders: Ints
    receivers: Ints
    levels: Ints
    out: Ints
    into: Ints


def _between(cluster: Cluster, hops: Sequence[_Hop]) -> _Hops:
    """Return `Cluster.level` and `Cluster.ports` of all hops at once."""
    senders, receivers = (np.array([hop[end] for hop in hops], dtype=np.int64) for end in (0, 1))
    groups = [(senders, receivers), *((_groups(level, senders), _groups(level, receivers)) for level in cluster.levels)]
    last = len(cluster.levels) - 1
    levels, out, into = (np.full(len(hops), last), *(each.copy() for each in groups[last]))
    for index in reversed(range(last)):
        same = groups[index + 1][0] == groups[index + 1][1]
        levels[same], out[same], into[same] = index, groups[index][0][same], groups[index][1][same]
    return _Hops(senders, receivers, levels, out, into)


def _groups(level: Level, ranks: Ints) -> Ints:
    """Return `Level.group` of many ranks."""
    return np.searchsorted(np.cumsum(level.groups), ranks, side="right") if level.groups else ranks // level.size


def _codes(levels: Ints, ends: Ints, inwards: bool) -> Ints:
    """Return one number for each port and direction (`PortLoad.ways`)."""
    return np.asarray(((levels << _BITS) + ends) * 2 + inwards)


def _load(cluster: Cluster, hops: Sequence[_Hop], flows: Sequence[_Hop], rounds: int) -> PortLoad:
    """Return the load of these transfers.

    hops: carried by ports.  flows: carried by the network cards of single ranks, where a port has several.
    """
    links = [level.link for level in cluster.levels]
    latencies, rates, of_cards = (
        np.array(each, dtype=np.int64)
        for each in zip(*((link.latency_ns, link.bytes_per_s, link.flow_bytes_per_s) for link in links), strict=True)
    )
    by_port = _between(cluster, hops)
    ports = _summed(by_port.levels, by_port.out, by_port.into, hops, rates[by_port.levels])
    by_card = _between(cluster, flows) if flows is not hops else by_port
    has_cards = of_cards[by_card.levels] > 0
    levels, senders, receivers = (each[has_cards] for each in (by_card.levels, by_card.senders, by_card.receivers))
    carried = list(compress(flows, has_cards.tolist()))
    cards = _summed(-1 - levels, senders, receivers, carried, of_cards[levels])
    latency = int(latencies[by_port.levels].max(initial=0))
    return PortLoad(latency * rounds, *(np.concatenate(pair) for pair in zip(ports, cards, strict=True)))


def _summed(levels: Ints, out: Ints, into: Ints, hops: Sequence[_Hop], rates: Ints) -> tuple[Ints, Floats, Ints]:
    """Return the ports of hops, in the order in which these use them, the sums of the shares over each, and rates."""
    codes = np.stack([_codes(levels, out, False), _codes(levels, into, True)], axis=1).ravel()
    first, number = _numbered(codes)
    shares = np.repeat(np.array([hop[2] for hop in hops], dtype=np.float64), 2)
    summed = np.bincount(number, weights=shares, minlength=len(first)).astype(np.float64)
    return codes[first], summed, np.repeat(rates, 2)[first]


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
