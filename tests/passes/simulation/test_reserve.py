"""Memory that plans leave to what is not charged: by kind of device, by a cluster file, and by peers and groups."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support.languages.graphs import cluster, graph, layers, plan_of

from autopart.files.clusters import cluster_to_yaml, parse_cluster
from autopart.ir.cluster import DEVICE_KINDS, Cluster, Device, Level, Link
from autopart.ir.errors import ClusterError

CUDA = DEVICE_KINDS["cuda"]
ENTRY = "devices: [{{kind: cuda, count: 2, memory: 16GiB, flops: 1e14, memory_bandwidth: 1e12{}}}]"


def test_no_plan_uses_what_is_reserved() -> None:
    g, c = layers(6), cluster(3, memory=1600)
    assert all(not stage.recompute for stage in plan_of(g, c, micros=6, stages=3).stages)
    less = replace(c, devices=tuple(replace(device, reserve_bytes=500) for device in c.devices))
    plan = plan_of(g, less, micros=6, stages=3)
    assert max(e.peak_bytes for e in plan.estimates) <= 1100 and any(stage.recompute for stage in plan.stages)
    assert set(plan.outlook.limits) == {1100}


def test_a_cluster_file_replaces_the_reserve_of_the_kind(tmp_path: Path) -> None:
    file = tmp_path / "c.yaml"
    for more, reserve in (("", CUDA.reserve(16 << 30)), (", reserve: 1GiB", 1 << 30), (", reserve: 0", 0)):
        file.write_text(ENTRY.format(more))
        found = parse_cluster(file)
        assert found.devices[0].reserve_bytes == reserve
        assert found.least_memory_bytes((0, 1)) == (16 << 30) - reserve
        file.write_text(cluster_to_yaml(found))
        assert parse_cluster(file) == found
    file.write_text(ENTRY.format(", reserve: 16GiB"))
    with pytest.raises(ClusterError, match="leaves nothing"):
        parse_cluster(file)


def test_communicators_are_charged_by_peers_and_groups() -> None:
    device = Device("cuda", 1 << 40, 10**12, 10**12)
    c = Cluster((device,) * 4, (Level(4, Link(10, 10**9)),))
    ends = [1, 2, 2, 1]  # the stages inside have a neighbour on both sides
    chain = graph("; ".join(f"v{i}:8000 +w{i}:8 #8 <- {f'v{i - 1}' if i else 'x'}" for i in range(8)))
    plan = plan_of(chain, c, micros=8, stages=4, schedule="1f1b")
    held = [e.buffer_bytes // CUDA.peer_bytes for e in plan.estimates]
    assert held == ends
    two = plan_of(chain, c, rows=(4,) * 4, replicas=(2, 2), schedule="1f1b")
    assert [len(stage.ranks) for stage in two.stages] == [2, 2]
    assert all(e.buffer_bytes // (1 << 20) == (CUDA.peer_bytes + CUDA.group_bytes) >> 20 for e in two.estimates)
