"""A free planner is no slower than one that is told what to do, and more of anything is no slower than less."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from support.grids import sampled
from support.oracles.drawn_clusters import drawn, found_for, preferred

from autopart.ir.cluster import Cluster

NAMES = ("1f1b", "1f1b-deep", "gpipe", "zb-h1", "zb-h2", "interleaved", "zb-v", "searched")
EQUAL, CLOSE = 1.001, 1.01


@pytest.mark.parametrize("seed", sampled(range(200), every=40))
def test_no_schedule_by_name_makes_a_better_plan_than_auto(seed: int) -> None:
    """Better: by the planner's criterion, which asks more stages and other orders to be worth it."""
    problem = drawn(seed, devices=3, layers=6)
    free = preferred(found_for(problem))
    for name in NAMES:
        asked = preferred(found_for(replace(problem, request=replace(problem.request, schedule=name))))
        if asked is not None:
            assert free is not None, f"{name} finds a plan, auto none"
            assert free.preference <= EQUAL * asked.preference, f"{name}: {asked.candidate}, auto: {free.candidate}"


def with_more(cluster: Cluster, draw: Random) -> Cluster:
    """Return the cluster with more memory, faster links, or another device or two at its end."""
    way, factor = draw.choice(["memory", "links", "devices"]), draw.choice([1.05, 1.3, 2, 8])
    if way == "memory":
        more = {d: int((d.memory_bytes - d.reserve_bytes) * (factor - 1)) for d in set(cluster.devices)}
        devices = tuple(replace(d, memory_bytes=d.memory_bytes + more[d]) for d in cluster.devices)
        return replace(cluster, devices=devices)
    if way == "links":
        links = [replace(lv.link, bytes_per_s=int(lv.link.bytes_per_s * factor)) for lv in cluster.levels]
        levels = tuple(replace(lv, link=link) for lv, link in zip(cluster.levels, links, strict=True))
        return replace(cluster, levels=levels)
    devices = (*cluster.devices, *[draw.choice(cluster.devices)] * (2 if len(cluster.levels) > 1 else 1))
    return replace(
        cluster, devices=devices, levels=(*cluster.levels[:-1], replace(cluster.levels[-1], size=len(devices)))
    )


@pytest.mark.parametrize("seed", sampled(range(300), every=40))
def test_more_memory_faster_links_and_more_devices_are_no_slower(seed: int) -> None:
    problem = drawn(seed, devices=3, layers=6)
    before = preferred(found_for(problem))
    after = preferred(found_for(replace(problem, cluster=with_more(problem.cluster, Random(seed)))))
    if before is not None:
        assert after is not None, "with more, nothing fits"
        assert after.preference <= CLOSE * before.preference, f"{before.candidate}, then {after.candidate}"
