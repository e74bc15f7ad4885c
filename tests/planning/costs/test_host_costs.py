"""What hosts spend, measured: what is made of the measurements, and real processes."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.workers import Workers

from autopart.cli.host_costs import MICROS, Waits, host_costs, measured_host
from autopart.files.clusters import cluster_to_yaml, parse_cluster
from autopart.ir.cluster import Cluster, HostCosts, check
from autopart.ir.errors import ClusterError
from autopart.report.cluster_table import cluster_table

HOST = HostCosts(compute_ns=16_500, message_ns=106_000, sum_ns=735_000, step_ns=484_000)
DEVICES = parse_cluster("cpu:2")


@given(*[st.integers(0, 10**6)] * 5, st.integers(2, 8))
def test_costs_are_found_from_what_they_would_make_ranks_spend(
    compute: int, message: int, summed: int, step: int, waited: int, world: int
) -> None:
    found = host_costs(
        one=step + 2 * compute,
        many=step + 2 * MICROS * compute,
        staged=(step + 4 * (compute + message), step + 4 * MICROS * (compute + message)),  # half of the model each
        replicated=world * (step + 2 * compute + summed),
        world=world,
        waits=Waits(waited, waited / 2),
    )
    expected = (compute, message, summed + waited / 2, step + waited)
    for own, wanted in zip((found.compute_ns, found.message_ns, found.sum_ns, found.step_ns), expected, strict=True):
        assert own == pytest.approx(wanted, rel=0.01, abs=2)


@given(*[st.floats(-1e9, 1e9)] * 5)
def test_any_measurements_make_costs(one: float, many: float, staged: float, flowing: float, replicated: float) -> None:
    spent = host_costs(one, many, (staged, flowing), replicated, world=2, waits=Waits())
    check(Cluster(DEVICES.devices, DEVICES.levels, spent))


def test_one_rank_has_no_messages_and_no_sums() -> None:
    assert host_costs(1000, 16_000, None, None, world=1, waits=Waits()) == HostCosts(500, 0, 0, 0)


def test_a_cluster_file_keeps_what_hosts_spend(tmp_path: Path) -> None:
    known = Cluster(DEVICES.devices, DEVICES.levels, HOST)
    path = tmp_path / "mine.yaml"
    path.write_text(cluster_to_yaml(known))
    assert "host: {compute_us: 16.5, message_us: 106.0, sum_us: 735.0, step_us: 484.0}" in path.read_text()
    assert parse_cluster(path) == known
    assert "host: 16.5 us a compute, 106 us a message, 735 us a sum, 484 us a step" in cluster_table(known)
    assert "host" not in cluster_to_yaml(DEVICES) + cluster_table(DEVICES)


@pytest.mark.parametrize("host", [HostCosts(compute_ns=-1), HostCosts(step_ns=1.5)])  # type: ignore[arg-type]
def test_impossible_costs_are_refused(host: HostCosts) -> None:
    with pytest.raises(ClusterError):
        check(Cluster(DEVICES.devices, DEVICES.levels, host))


@pytest.mark.slow
def test_real_ranks_spend_some_time(pair: Workers) -> None:
    found = pair.run(measured_host, DEVICES)
    assert found[0] == found[1]
    assert 10**4 < found[0].step_ns < 10**8
    assert found[0].message_ns < 10**8 and found[0].sum_ns < 10**8 and found[0].compute_ns < 10**8
