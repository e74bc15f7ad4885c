"""Machines measured: what is made of the measurements, real processes, and the commands."""

from __future__ import annotations

import os
from pathlib import Path
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.workers import Workers

from autopart.cli.main import main
from autopart.costs.detect import detect, fit_link, merge_devices, pairs_of, probe, rounded
from autopart.files.clusters import cluster_to_yaml, link_within_host, parse_cluster, this_host
from autopart.ir.cluster import DEVICE_KINDS, Cluster, Device, Level, Link, check
from autopart.ir.errors import ClusterError
from autopart.report.cluster_table import cluster_table


def probe_uneven() -> Cluster:
    """Probe the cluster as if the launcher had started a different number of ranks on the last host."""
    with mock.patch.dict(os.environ, LOCAL_WORLD_SIZE="1" if os.environ["RANK"] == "2" else "2"):
        return probe("cpu", (2, 4))


# -- tests -----------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)  # tests of this machine's CPU, whatever it has
    for name in ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def assert_plausible(cluster: Cluster, world: int, sizes: list[int]) -> None:
    check(cluster)
    assert (cluster.world, cluster.kind, [level.size for level in cluster.levels]) == (world, "cpu", sizes)
    for device in cluster.devices:
        assert device == cluster.devices[0] and device.name and dict(device.rates)["float32"] == device.flops_per_s
        assert 10**7 < device.flops_per_s < 10**14 and 10**7 < device.mem_bytes_per_s < 10**13
    for level in cluster.levels:
        assert 10**3 < level.link.latency_ns < 10**9 and 10**6 < level.link.bytes_per_s < 10**12


# -- what is made of the measurements -------------------------------------------------------------------------------


@given(st.integers(1_000, 10**8), st.integers(10**7, 10**12), st.sampled_from(sorted(DEVICE_KINDS)))
def test_a_link_is_found_from_the_times_it_would_give(latency_ns: int, bytes_per_s: int, kind: str) -> None:
    samples = [(size, latency_ns + size * 1e9 / bytes_per_s) for size in DEVICE_KINDS[kind].message_bytes]
    found = fit_link(samples)
    assert found.latency_ns == pytest.approx(samples[0][1], rel=0.01)
    assert found.bytes_per_s == pytest.approx(bytes_per_s, rel=0.01)


@given(st.lists(st.floats(1, 1e12), min_size=2, max_size=5))
def test_any_times_make_a_link(times: list[float]) -> None:
    link = fit_link(list(zip(DEVICE_KINDS["cpu"].message_bytes, times, strict=False)))
    check(Cluster((Device("cpu", 1, 1, 1),), (Level(1, link),)))


def test_numbers_have_three_digits() -> None:
    assert [rounded(n) for n in (0.2, 7, 1234.5, 98765.0, 10**15 + 1)] == [1, 7, 1230, 98800, 10**15]


def test_devices_of_one_name_get_the_median_of_their_rates_and_the_least_memory() -> None:
    a = [
        Device("cuda", 10 + i, 100 * i, 1000 * i, "A", (("float32", 100 * i), ("bfloat16", 200 * i))) for i in (1, 2, 9)
    ]
    b = Device("cuda", 5, 7, 8, "B", (("float32", 7),))
    merged = Device("cuda", 11, 200, 2000, "A", (("float32", 200), ("bfloat16", 400)))
    assert merge_devices([a[0], b, a[1], a[2]]) == (merged, b, merged, merged)


def test_a_rate_that_only_some_devices_of_a_name_have_is_left_out() -> None:
    both, one = (("float32", 4), ("bfloat16", 8)), (("float32", 4),)
    assert merge_devices([Device("cpu", 1, 4, 1, "X", both), Device("cpu", 1, 4, 1, "X", one)])[0].rates == one


def test_one_pair_measures_a_host_and_all_ranks_of_two_hosts_their_ports() -> None:
    assert pairs_of((4,), 0) == [[(0, 1)]]
    assert pairs_of((2, 6), 0) == [[(0, 1)], [(2, 3)], [(4, 5)]]
    assert pairs_of((2, 6), 1) == [[(0, 2), (1, 3)]]
    assert pairs_of((1, 4), 1) == [[(0, 1)], [(2, 3)]]


# -- real processes ---------------------------------------------------------------------------------------------------


def test_two_hosts_are_two_levels(workers: Workers) -> None:
    results = workers.run(probe, "cpu", (2, 4))
    assert all(found == results[0] for found in results)
    assert_plausible(results[0], 4, [2, 4])


@pytest.mark.slow
def test_hosts_with_one_rank_each_are_one_level(workers: Workers) -> None:
    assert_plausible(workers.run(probe, "cpu", (1, 4))[0], 4, [4])


def test_hosts_with_different_numbers_of_ranks_are_refused(workers: Workers) -> None:
    with pytest.raises(ClusterError, match="different numbers of ranks"):
        workers.run(probe_uneven)


@pytest.mark.timeout(120)
def test_one_rank_has_nobody_to_talk_to_and_gets_the_default_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    found = detect()
    assert_plausible(found, 1, [1])
    assert found.levels[0].link == link_within_host("cpu") and found.devices[0].memory_bytes == this_host().memory_bytes


def test_more_ranks_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ClusterError, match="3 ranks and 2 visible GPUs"):
        detect(3)


def test_another_number_of_ranks_than_torchrun_started_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ClusterError, match="2 ranks run, but 3 were asked for"):
        detect(3)


# -- commands ---------------------------------------------------------------------------------------------------------


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(list(words))
    return int(end.value.code or 0)


@pytest.mark.timeout(120)
@pytest.mark.slow
def test_what_detect_writes_is_a_cluster(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mine.yaml"
    assert run("cluster", "detect", "--ranks", "2", "--out", str(path)) == 0
    out = capsys.readouterr().out
    assert "fp32 TFLOP/s" in out and f"cluster written to {path}" in out
    assert_plausible(parse_cluster(path), 2, [2])


def test_detect_does_not_measure_for_a_file_that_would_not_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("cluster", "detect", "--out", "cluster.txt") == 2
    assert "not the name of a YAML file" in capsys.readouterr().err


def test_show_prints_yaml_beside_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("cluster", "show", "p3.16xlarge:2") == 0
    out, err = capsys.readouterr()
    cluster = parse_cluster("p3.16xlarge:2")
    assert out == cluster_to_yaml(cluster) and err.strip() == cluster_table(cluster).strip()


def test_show_refuses_what_it_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("cluster", "show", "h300x8") == 2
    assert "a preset (h200x8," in capsys.readouterr().err


def test_the_table_has_a_line_for_equal_neighbours_and_one_for_a_level() -> None:
    slow, fast = Device("cpu", 2**30, 10**12, 10**10), Device("cpu", 2**31, 10**12, 10**10, "F", (("int8", 10**13),))
    table = cluster_table(Cluster((slow, slow, fast, fast), (Level(2, Link(5_000, 10**9)), Level(4, Link(0, 10**8)))))
    assert table.splitlines() == [
        " ranks  device  memory GiB  int8 TFLOP/s  other TFLOP/s  memory GB/s",
        " ───────────────────────────────────────────────────────────────────",
        " 0-1    cpu            1.0             1              1           10",
        " 2-3    F              2.0            10              1           10",
        "",
        " level  joins          latency us  GB/s of a port",
        " ────────────────────────────────────────────────",
        " 0      2 devices               5               1",
        " 1      2 groups of 2           0             0.1",
    ]
