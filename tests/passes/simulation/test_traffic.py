"""Loads on ports against counting rows one by one."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fractions import Fraction
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.languages.graphs import cluster
from support.oracles.planner_oracle import FASTEST

from autopart.ir.cluster import Cluster, Device, Level, Link, Port
from autopart.passes.simulation.traffic import Loads, PortLoad, merged, owners_load, p2p_load, ring_load

Pairs = Counter[tuple[int, int]]
Ranks = tuple[int, ...]


@st.composite
def nodes(draw: st.DrawFn) -> Cluster:
    """Twelve devices in one, two or three levels."""
    sizes = draw(st.sampled_from([(12,), (4, 12), (2, 6, 12), (3, 12)]))
    link = st.builds(Link, st.integers(0, 50), st.sampled_from([10**8, 10**9, 3 * 10**9]))
    return Cluster((Device("cpu", 1, FASTEST, 1),) * 12, tuple(Level(size, draw(link)) for size in sizes))


groups = st.lists(st.integers(0, 11), min_size=1, max_size=6, unique=True).map(tuple)


def rows_between(senders: tuple[int, ...], receivers: tuple[int, ...]) -> dict[tuple[int, int], Fraction]:
    """Share of the rows that goes from one rank to another, counted over a * b rows."""
    a, b = len(senders), len(receivers)
    pairs: Pairs = Counter()
    for row in range(a * b):
        pairs[senders[row // b], receivers[row // a]] += 1
    return {pair: Fraction(count, a * b) for pair, count in pairs.items()}


def loads(c: Cluster, hops: dict[tuple[int, int], Fraction]) -> dict[tuple[Port, bool], Fraction]:
    """Share over every way, hop by hop; nobody sends to himself."""
    ways: dict[tuple[Port, bool], Fraction] = {}
    for (sender, receiver), share in hops.items():
        if sender != receiver:
            out, into = c.ports(sender, receiver)
            ways[out, False] = ways.get((out, False), Fraction(0)) + share
            ways[into, True] = ways.get((into, True), Fraction(0)) + share
    return ways


def same(load: PortLoad, expected: dict[tuple[Port, bool], Fraction], c: Cluster) -> None:
    assert dict(zip(load.ways, load.shares.tolist(), strict=True)) == pytest.approx(
        {k: float(v) for k, v in expected.items()}
    )
    assert tuple(load.rates.tolist()) == tuple(c.levels[port[0]].link.bytes_per_s for port, _ in load.ways)


@given(nodes(), groups, groups)
def test_bundle_loads_ports_with_the_rows_that_pass(c: Cluster, senders: tuple[int, ...], receivers: tuple[int, ...]):
    load, pairs = p2p_load(c, senders, receivers), rows_between(senders, receivers)
    same(load, loads(c, pairs), c)
    latencies = [c.link(a, b).latency_ns for a, b in pairs if a != b]
    assert load.latency_ns == max(latencies, default=0)


@given(groups, groups)
def test_bundle_loses_no_byte(senders: tuple[int, ...], receivers: tuple[int, ...]) -> None:
    """On one flat level every rank has a port of its own: it gives and gets exactly its share."""
    if set(senders) & set(receivers):
        return
    load = p2p_load(cluster(12), senders, receivers)
    shares = dict(zip(load.ways, load.shares.tolist(), strict=True))
    assert {port[1]: share for (port, inwards), share in shares.items() if not inwards} == pytest.approx(
        dict.fromkeys(senders, 1 / len(senders))
    )
    assert {port[1]: share for (port, inwards), share in shares.items() if inwards} == pytest.approx(
        dict.fromkeys(receivers, 1 / len(receivers))
    )


@given(st.integers(1, 6))
def test_as_many_replicas_on_both_sides_match_one_to_one(n: int) -> None:
    load = p2p_load(cluster(12), tuple(range(n)), tuple(range(n, 2 * n)))
    assert len(load.ways) == 2 * n and set(load.shares.tolist()) == {1 / n}


@given(nodes(), groups)
def test_ring_carries_the_known_share_over_every_hop(c: Cluster, ranks: tuple[int, ...]) -> None:
    n, order = len(ranks), sorted(ranks)
    load = ring_load(c, ranks, 2)
    if n == 1:
        assert not load.ways and load.alone_ns(100) == 0
        return
    hops = {(order[i], order[(i + 1) % n]): Fraction(2 * (n - 1), n) for i in range(n)}
    same(load, loads(c, hops), c)
    assert load.latency_ns == 2 * (n - 1) * max(c.link(a, b).latency_ns for a, b in hops)


def test_replicas_of_a_node_share_its_card() -> None:
    """Two nodes of two: both halves of a message leave by one port; a ring inside a node leaves none."""
    c = Cluster((Device("cpu", 1, 1, 1),) * 4, (Level(2, Link(1, 10**9)), Level(4, Link(5, 10**8))))
    load = p2p_load(c, (0, 1), (2, 3))
    assert load.ways == (((1, 0), False), ((1, 1), True)) and load.shares.tolist() == [1.0, 1.0]
    assert load.alone_ns(100) == 5 + 1000
    assert {port for port, _ in ring_load(c, (0, 1), 2).ways} == {(0, 0), (0, 1)}


def test_a_device_has_one_of_the_cards_of_its_node() -> None:
    """Two nodes of two with a card each device, half of the port: one message has a card, two together the port, and a
    ring over both nodes has all cards."""
    link = Link(5, 10**8, flow_bytes_per_s=5 * 10**7)
    c = Cluster((Device("cpu", 1, 1, 1),) * 4, (Level(2, Link(1, 10**9)), Level(4, link)))
    assert p2p_load(c, (0,), (2,)).alone_ns(100) == 5 + 2000
    assert p2p_load(c, (0, 1), (2, 3)).alone_ns(100) == 5 + 1000
    assert p2p_load(c, (0, 1), (2,)).alone_ns(100) == 5 + 2000  # into one card
    assert ring_load(c, (0, 1, 2, 3), 2).alone_ns(100) == 6 * 5 + 1500
    assert ring_load(c, (0, 2), 2).alone_ns(100) == 2 * 5 + 2000
    both = p2p_load(c, (0,), (2,)), p2p_load(c, (0,), (3,))
    assert set(both[0].ways) & set(both[1].ways) == {((1, 0), False), ((-2, 0), False), ((1, 1), True)}


@given(nodes(), groups, groups, st.integers(0, 10**6))
def test_pace_says_what_a_message_takes(c: Cluster, senders: tuple[int, ...], receivers: tuple[int, ...], size: int):
    load = p2p_load(c, senders, receivers)
    latency, per_byte = load.pace
    taken = load.alone_ns(size)
    if not size or not load.ways:
        assert taken == 0
    else:
        assert taken == pytest.approx(latency + size * per_byte, abs=1.01)
        assert taken == latency + max(load.busy_ns(size).values())


@given(nodes(), st.lists(st.tuples(groups, groups), min_size=1, max_size=4))
def test_ports_count_as_one_where_every_load_puts_the_same_on_them(c: Cluster, ends: list[tuple[Ranks, Ranks]]) -> None:
    loads = tuple(p2p_load(c, *pair) for pair in ends)
    ways = {way for load in loads for way in load.ways}
    kinds = [
        dict(zip(load.ways, zip(load.shares.tolist(), load.rates.tolist(), strict=True), strict=True)) for load in loads
    ]
    expected = {tuple(kind.get(way) for kind in kinds) for way in ways}
    ports = [dict(own) for own in merged(loads)]
    numbers = {port for own in ports for port in own}
    assert {tuple(own.get(port) for own in ports) for port in numbers} == expected and len(numbers) == len(expected)


@given(nodes(), groups, groups)
def test_stages_that_stand_alike_on_other_groups_have_the_same_paces(c: Cluster, before: Ranks, ranks: Ranks) -> None:
    assert Loads(c).paces(before, ranks) == (p2p_load(c, before, ranks).pace, ring_load(c, ranks, 1).pace)
    assert Loads(c).paces((), ranks) == ((0, 0.0), ring_load(c, ranks, 1).pace)


def content(load: PortLoad) -> tuple[object, ...]:
    return load.latency_ns, load.ways, load.shares.tolist(), load.rates.tolist()


@given(nodes(), groups)
def test_sums_at_owners_take_as_long_as_for_all_where_gloo_sums(c: Cluster, ranks: tuple[int, ...]) -> None:
    assert content(owners_load(c, ranks)) == content(ring_load(c, ranks, 2))
    gpus = Cluster(tuple(replace(device, kind="cuda") for device in c.devices), c.levels)
    assert content(owners_load(gpus, ranks)) == content(ring_load(gpus, ranks, 1))


def test_the_load_of_a_ring_over_many_nodes_takes_steps_in_proportion_to_its_ranks() -> None:
    link = Link(0, 10**9, flow_bytes_per_s=10**8)

    def looked_up(ranks: int) -> int:
        many = Cluster((Device("cuda", 1, FASTEST, 1),) * ranks, (Level(8, link), Level(ranks, link)))
        with mock.patch.object(Level, "group", autospec=True, side_effect=Level.group) as looked:
            ring_load(many, tuple(range(ranks)), 2)
        return looked.call_count

    assert looked_up(512) <= 8 * looked_up(64)
