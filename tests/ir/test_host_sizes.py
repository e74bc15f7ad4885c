"""Hosts of different size, in any order, in a cluster file."""

from __future__ import annotations

from pathlib import Path

import pytest

from autopart.files.clusters import parse_cluster, save_cluster
from autopart.ir.cluster import Cluster
from autopart.ir.errors import ClusterError


def _read(folder: Path, text: str) -> Cluster:
    (folder / "c.yaml").write_text(text)
    return parse_cluster(folder / "c.yaml")


@pytest.mark.parametrize("sizes", [(1, 4), (2, 3), (4, 1), (1, 1, 3)])
def test_hosts_of_different_size_stand_in_any_order(tmp_path: Path, sizes: tuple[int, ...]) -> None:
    text = (
        "devices: [{kind: cpu, count: 5}]\n"
        f"levels: [{{size: {list(sizes)}, latency_us: 1, bandwidth: 9}}, {{size: 5, latency_us: 7, bandwidth: 2}}]\n"
    )
    cluster = _read(tmp_path, text)
    host = [number for number, size in enumerate(sizes) for _ in range(size)]
    for a in range(5):
        for b in range(5):
            alike = host[a] == host[b]
            assert cluster.link(a, b).latency_ns == (1000 if alike else 7000)
            assert cluster.ports(a, b) == (((0, a), (0, b)) if alike else ((1, host[a]), (1, host[b])))
    save_cluster(cluster, tmp_path / "again.yaml")
    assert parse_cluster(tmp_path / "again.yaml") == cluster


@pytest.mark.parametrize(
    ("levels", "what"),
    [
        ("{size: [1, 3], latency_us: 1, bandwidth: 9}, {size: 5, latency_us: 7, bandwidth: 2}", "the cluster has 5"),
        (
            "{size: 2, latency_us: 1, bandwidth: 9}, {size: [1, 4], latency_us: 7, bandwidth: 2}",
            "divides devices 0 and 1",
        ),
    ],
)
def test_hosts_that_do_not_hold_the_devices_are_refused(tmp_path: Path, levels: str, what: str) -> None:
    with pytest.raises(ClusterError, match=what):
        _read(tmp_path, f"devices: [{{kind: cpu, count: 5}}]\nlevels: [{levels}]\n")
