"""Cluster descriptions: every form that is accepted, every mistake with its place."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopart.files.clusters import Host, cluster_to_yaml, parse_cluster, save_cluster, this_host
from autopart.files.presets import DEVICES, NODES
from autopart.ir.cluster import DEVICE_KINDS, Cluster, Device, Level, Link, check
from autopart.ir.errors import ClusterError

HOST = Host(memory_bytes=16 * 2**30, cores=8)


CPU = Device("cpu", 1, 1, 1)


def reserved(device: Device) -> Device:
    return replace(device, reserve_bytes=DEVICE_KINDS[device.kind].reserve(device.memory_bytes))


def read(path: Path, text: str) -> Cluster:
    """Parse a file with this text."""
    path.write_text(text)
    return parse_cluster(path, env={}, host=HOST)


def test_a_short_string_is_that_many_devices_of_one_host() -> None:
    cluster = parse_cluster("cpu:4", env={}, host=HOST)
    assert cluster.devices == (reserved(Device("cpu", 4 * 2**30, 10**11, 10**10)),) * 4
    assert cluster.levels == (Level(4, Link(20_000, 2 * 10**9)),)
    assert parse_cluster(" cpu ", env={}, host=HOST).world == 1


def test_many_gpus_are_several_hosts() -> None:
    cluster = parse_cluster("cuda:16", env={}, host=HOST)
    assert [level.size for level in cluster.levels] == [8, 16]
    assert cluster.kind == "cuda" and cluster.devices[0].memory_bytes == 80 * 2**30
    assert cluster.link(0, 7).bytes_per_s > cluster.link(7, 8).bytes_per_s


def test_the_host_is_asked_by_default() -> None:
    host = this_host()
    assert host.memory_bytes > 2**28 and host.cores >= 1
    assert parse_cluster("cpu:2").devices[0].memory_bytes == host.memory_bytes // 2


def test_a_cluster_passes_through_checked() -> None:
    good = Cluster((Device("cpu", 1, 1, 1),), (Level(1, Link(0, 1)),))
    assert parse_cluster(good) is good
    with pytest.raises(ClusterError, match="no devices"):
        parse_cluster(Cluster((), ()))


@pytest.mark.parametrize(
    ("env", "gpus", "kind", "world", "sizes"),
    [
        ({}, 0, "cpu", 1, [1]),
        ({}, 3, "cuda", 3, [3]),
        ({"WORLD_SIZE": "4"}, 0, "cpu", 4, [4]),
        ({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, 8, "cuda", 2, [2]),
        ({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, 1, "cpu", 2, [2]),
        ({"WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}, 8, "cuda", 16, [8, 16]),
        ({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}, 0, "cpu", 8, [4, 8]),
        ({"WORLD_SIZE": ""}, 0, "cpu", 1, [1]),
    ],
)
def test_none_takes_what_the_launcher_says(
    env: dict[str, str], gpus: int, kind: str, world: int, sizes: list[int]
) -> None:
    cluster = parse_cluster(None, env=env, cuda_devices=gpus, host=HOST)
    assert (cluster.kind, cluster.world, [level.size for level in cluster.levels]) == (kind, world, sizes)


@pytest.mark.parametrize("env", [{"WORLD_SIZE": "two"}, {"WORLD_SIZE": "0"}, {"WORLD_SIZE": "-3"}])
def test_a_launcher_that_lies_is_refused(env: dict[str, str]) -> None:
    with pytest.raises(ClusterError, match="WORLD_SIZE is"):
        parse_cluster(None, env=env)


@pytest.mark.parametrize(
    "what", ["tpu:4", "", "cpu:", "cpu:-1", "cpu:x", "gpu:1", "cluster.ini", 3, True, b"cpu", ["cpu"]]
)
def test_what_is_not_understood_lists_the_forms(what: object) -> None:
    with pytest.raises(ClusterError) as caught:
        parse_cluster(what, env={})  # type: ignore[arg-type]
    assert '"cpu:2"' in caught.value.fix


@pytest.mark.parametrize(
    ("what", "same"), [("H100x8", "h100x8"), ("CPU:2", "cpu:2"), ("P3.16xLarge:2", "p3.16xlarge:2")]
)
def test_capital_letters_do_not_matter(what: str, same: str) -> None:
    assert parse_cluster(what, env={}, host=HOST) == parse_cluster(same, env={}, host=HOST)


@pytest.mark.parametrize(
    ("what", "near"), [("h100:8", "h100x8"), ("gpu:2", "cuda"), ("A100", "a100x8"), ("cuda8", "cuda")]
)
def test_a_name_that_is_not_known_gets_the_nearest_one(what: str, near: str) -> None:
    with pytest.raises(ClusterError) as caught:
        parse_cluster(what, env={})
    assert caught.value.why == f"did you mean {near!r}?"


def test_other_sizes_of_a_preset_and_other_kinds_of_devices_are_told_what_to_write() -> None:
    for what, told in (("H100x4", "cluster show h100x8 --out mine.yaml"), ("mps:1", "devices are 'cpu' or 'cuda'")):
        with pytest.raises(ClusterError) as caught:
            parse_cluster(what, env={})
        assert told in caught.value.why
    with pytest.raises(ClusterError, match='one is "cuda:1"'):
        parse_cluster("cuda:0", env={})


@pytest.mark.parametrize("what", ["cpu:0", "cuda:999999999"])
def test_absurd_counts_are_refused(what: str) -> None:
    with pytest.raises(ClusterError, match="between 1 and"):
        parse_cluster(what, env={})


@given(st.text(max_size=20) | st.from_regex(r"(cpu|cuda):\d+", fullmatch=True))
def test_no_string_fails_otherwise(text: str) -> None:
    with suppress(ClusterError):
        check(parse_cluster(text, env={}, host=HOST))


YAML = """
devices:
  - {kind: cuda, count: 8, memory: 80GiB, flops: 4e14, memory_bandwidth: 2e12}
levels:
  - {size: 4, latency_us: 5, bandwidth: 3e11}
  - {size: 8, latency_us: 20.5, bandwidth: 25 GB}
"""
TOML = """
[[devices]]
kind = "cuda"
count = 8
memory = 85899345920
flops = 4e14
memory_bandwidth = "2 TB"
[[levels]]
size = 4
latency_us = 5
bandwidth = 300000000000
[[levels]]
size = 8
latency_us = 20.5
bandwidth = "2.5e10"
"""
JSON = """
{"devices": [{"kind": "cuda", "count": 8, "memory": "80 Gi", "flops": 4e14, "memory_bandwidth": "2e12"}],
 "levels": [{"size": 4, "latency_us": 5, "bandwidth": "300G"}, {"size": 8, "latency_us": 20.5, "bandwidth": 2.5e10}]}
"""


@pytest.mark.parametrize(("name", "text"), [("c.yaml", YAML), ("c.YML", YAML), ("c.toml", TOML), ("c.json", JSON)])
def test_files_say_the_same_in_every_language(tmp_path: Path, name: str, text: str) -> None:
    device = reserved(Device("cuda", 80 * 2**30, 4 * 10**14, 2 * 10**12))
    levels = (Level(4, Link(5_000, 3 * 10**11)), Level(8, Link(20_500, 25 * 10**9)))
    assert read(tmp_path / name, text) == Cluster((device,) * 8, levels)
    assert parse_cluster(str(tmp_path / name)) == Cluster((device,) * 8, levels)


def test_what_a_file_leaves_out_gets_defaults(tmp_path: Path) -> None:
    cluster = read(tmp_path / "c.yaml", "devices: [{kind: cpu, memory: 1GiB}, {kind: cpu}]")
    memory = 2**30, 8 * 2**30
    assert cluster.devices == tuple(reserved(Device("cpu", size, 2 * 10**11, 10**10)) for size in memory)
    assert cluster.levels == parse_cluster("cpu:2").levels


@pytest.mark.parametrize(
    ("text", "where", "says"),
    [
        ("", "the file", "must be a table of keys and values, not None"),
        ("devices: []", "devices", "at least 1 item"),
        ("device: []", "devices, device", "unknown key"),
        ("devices: [{kind: tpu}]", "devices[0].kind", "'cpu' or 'cuda'"),
        ("devices: [{kind: cpu}, 3]", "devices[1]", "must be a table of keys and values, not 3"),
        ("devices: [{kind: cpu, count: 0}]", "devices[0].count", "greater than or equal to 1, not 0"),
        ("devices: [{kind: cpu, count: true}]", "devices[0].count", "must be a valid integer, not True"),
        ("devices: [{kind: cpu, memory: lots}]", "devices[0].memory", "write a number such as"),
        ("devices: [{kind: cpu, memory: 0GiB}]", "devices[0].memory", "greater than 0"),
        ("devices: [{kind: cpu, memory: 1e-5}]", "devices[0].memory", "greater than 0"),
        ("devices: [{kind: cpu, flops: 1e99}]", "devices[0].flops", "less than"),
        ("devices: [{kind: cpu, flops: {bfloat16: lots}}]", "devices[0].flops.bfloat16", "write a number such as"),
        ("devices: [{kind: cpu, flops: {}}]", "devices[0].flops", "at least one dtype"),
        ("devices: [{kind: cpu, memry: 1}]", "devices[0].memry", "unknown key"),
        ("devices: [{kind: cpu}]\nlevels: [{size: 1, latency_us: -1, bandwidth: 1}]", "levels[0].latency_us", "not -1"),
        ("devices: [{kind: cpu}]\nlevels: [{size: 1}]", "levels[0].latency_us, levels[0].bandwidth", "Field required"),
    ],
)
def test_mistakes_in_files_are_named_by_their_place(tmp_path: Path, text: str, where: str, says: str) -> None:
    with pytest.raises(ClusterError, match="describes no cluster") as caught:
        read(tmp_path / "c.yaml", text)
    assert caught.value.where == where and says in caught.value.why
    assert "devices: list of" in caught.value.fix


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("devices: [{kind: cpu}, {kind: cuda}]", "c.yaml: the cluster mixes cpu and cuda"),
        ("devices: [{kind: cpu, count: 131072}, {kind: cpu}]", "c.yaml: 131073 devices"),
        (
            'devices: [{kind: cpu, name: "a\\nb", memory: 1, flops: 1, memory_bandwidth: 1}]',
            "c.yaml: device 0 has a name that is not printable",
        ),
        (
            "devices: [{kind: cpu, count: 3}]\nlevels: [{size: 2, latency_us: 1, bandwidth: 1}]",
            "has 2 devices, and the cluster has 3",
        ),
        (
            "devices: [{kind: cpu, count: 2}]\nlevels: [{size: 4, latency_us: 1, bandwidth: 1}]",
            "level has 4 devices, and the cluster has 2",
        ),
    ],
)
def test_clusters_that_make_no_sense_are_refused_by_file(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ClusterError, match=says):
        read(tmp_path / "c.yaml", text)


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("c.yaml", "devices: [\n", "not valid YAML\n  where: line 2, column 1"),
        ("c.yaml", "devices: [{kind: cpu, kind: cuda}]", "key 'kind' appears twice"),
        ("c.toml", "devices = [", "not valid TOML"),
        ("c.json", '{"devices": [}', "not valid JSON\n  where: line 1, column 14"),
        ("c.json", "NaN", "not valid JSON"),
    ],
)
def test_files_that_cannot_be_parsed(tmp_path: Path, name: str, text: str, says: str) -> None:
    with pytest.raises(ClusterError) as caught:
        read(tmp_path / name, text)
    assert says in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="cannot be read"):
        parse_cluster(tmp_path / "none.yaml")


def test_a_device_has_a_rate_for_each_dtype_and_one_for_the_rest() -> None:
    device = Device("cuda", 1, 5, 1, "V100", (("float16", 80), ("float32", 10)))
    assert [device.rate(dtype) for dtype in ("float16", "float32", "bfloat16")] == [80, 10, 5]


@pytest.mark.parametrize(
    ("rates", "says"),
    [
        ((("fp16", 1),), "not a dtype"),
        ((("torch.float16", 1),), "not a dtype"),
        ((("float16", 0),), "not positive"),
        ((("float16", 1), ("float16", 2)), "two rates for float16"),
    ],
)
def test_rates_that_make_no_sense_are_refused(rates: tuple[tuple[str, int], ...], says: str) -> None:
    with pytest.raises(ClusterError, match=says):
        check(Cluster((Device("cpu", 1, 1, 1, rates=rates),), (Level(1, Link(0, 1)),)))


@pytest.mark.parametrize("amount", [float("nan"), float("inf"), 2e12, True])
def test_an_amount_that_is_not_a_whole_number_is_refused_by_name(amount: float) -> None:
    level = Level(1, Link(0, 1))
    for wrong, name in (
        (Cluster((replace(CPU, memory_bytes=amount),), (level,)), "memory_bytes"),
        (Cluster((replace(CPU, mem_bytes_per_s=amount),), (level,)), "mem_bytes_per_s"),
        (Cluster((replace(CPU, rates=(("float16", amount),)),), (level,)), "rate for float16"),
        (Cluster((CPU,), (Level(1, Link(0, amount)),)), "bytes_per_s"),
    ):
        with pytest.raises(ClusterError, match=f"^{name} is {amount}, which is not a whole number"):
            check(wrong)


@pytest.mark.parametrize("share", [0.0, 1.5, float("nan")])
def test_an_efficiency_outside_of_0_and_1_is_refused(share: float) -> None:
    with pytest.raises(ClusterError, match="efficiency that is not between 0 and 1"):
        check(Cluster((replace(CPU, efficiency=share),), (Level(1, Link(0, 1)),)))


@pytest.mark.parametrize("name", NODES)
def test_a_preset_is_a_node_and_a_count_is_that_many_nodes(name: str) -> None:
    one, four = parse_cluster(name, env={}), parse_cluster(f" {name}:4", env={})
    assert (one.world, four.world, [level.size for level in four.levels]) == (8, 32, [8, 32])
    assert one == Cluster(four.devices[:8], four.levels[:1])
    assert four.link(0, 7).bytes_per_s > four.link(7, 8).bytes_per_s
    assert four.devices[0].rate("float16") > four.devices[0].rate("float32") >= four.devices[0].rate("float64")


def test_presets_have_the_numbers_of_their_data_sheets() -> None:
    h200, p3 = parse_cluster("h200x8"), parse_cluster("p3.16xlarge:2")
    assert h200.devices[0].memory_bytes == 141 * 10**9 and h200.devices[0].rate("bfloat16") == 989_500 * 10**9
    assert p3.devices[0].memory_bytes == 16 * 10**9 and p3.devices[0].rate("bfloat16") == 15_700 * 10**9
    assert p3.link(7, 8).bytes_per_s * 8 == 25 * 10**9


def test_kernels_and_single_messages_do_not_reach_the_peaks_of_a_preset(tmp_path: Path) -> None:
    cluster = parse_cluster("h200x8:2")
    device, link = cluster.devices[0], cluster.levels[1].link
    assert 0.5 <= device.efficiency <= 0.6 and device.reached("bfloat16") == int(989_500 * 10**9 * device.efficiency)
    assert device.reached_bytes_per_s == int(4800 * 10**9 * device.memory_efficiency)
    assert link.flow_bytes_per_s == link.bytes_per_s // 8 and link.latency_ns == 20_000
    save_cluster(cluster, tmp_path / "c.yaml")
    assert parse_cluster(tmp_path / "c.yaml") == cluster
    text = "devices: [{kind: cuda, name: H200, flops: 4e14}]\n"  # what is given is taken as it is
    (tmp_path / "own.yaml").write_text(text)
    own = parse_cluster(tmp_path / "own.yaml").devices[0]
    assert (own.efficiency, own.memory_efficiency) == (1.0, device.memory_efficiency)


@pytest.mark.parametrize("what", ["h200x8:0", "h200x8:16385", "h200x8:-1", "h200x9", "p3x16xlarge", "h200x8:"])
def test_what_is_no_preset_is_refused(what: str) -> None:
    with pytest.raises(ClusterError):
        parse_cluster(what, env={})


def test_devices_of_several_kinds_stand_in_one_file(tmp_path: Path) -> None:
    text = """
devices:
  - {kind: cuda, name: A100, count: 2, memory: 40GB}
  - {kind: cuda, name: Own, count: 2, flops: {bfloat16: 4e14, float32: 6e13}, memory: 40GB, memory_bandwidth: 1e12}
  - {kind: cuda, name: V100, flops: {default: 1e12, float16: 1e14}, memory_bandwidth: 1e12}
  - {kind: cuda, name: H200, flops: 1e13}
"""
    devices = read(tmp_path / "c.yaml", text).devices
    assert [d.name for d in devices] == ["A100", "A100", "Own", "Own", "V100", "H200"]
    assert devices[0].memory_bytes == 40 * 10**9 and devices[0].rates == DEVICES["A100"].rates
    assert [devices[2].rate(d) for d in ("bfloat16", "float32", "float64")] == [4 * 10**14, 6 * 10**13, 6 * 10**13]
    assert [devices[4].rate(d) for d in ("bfloat16", "float16")] == [10**12, 10**14]
    assert devices[5].rate("bfloat16") == 10**13 and devices[5].memory_bytes == 141 * 10**9


amounts = st.integers(1, 10**18)
DTYPES = ("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "int8")
rates = st.dictionaries(st.sampled_from(DTYPES), amounts).map(lambda table: tuple(table.items()))
names = st.text(max_size=8).filter(str.isprintable) | st.sampled_from([*DEVICES, "no", "1e5", "~", "{a: b}"])


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    kind = draw(st.sampled_from(["cpu", "cuda"]))
    device = st.builds(Device, st.just(kind), amounts, amounts, amounts, names, rates)
    devices = [d for d in draw(st.lists(device, min_size=1, max_size=3)) for _ in range(draw(st.integers(1, 3)))]
    levels, size = [], 1
    for factor in [*draw(st.lists(st.integers(1, 4), max_size=2)), 0]:
        whole = -(-len(devices) // size)  # groups of the level inside that hold all devices
        size *= min(factor, whole) or whole
        levels.append(Level(size, Link(draw(st.integers(0, 10**12)), draw(amounts))))
    return check(Cluster(tuple(devices), tuple(levels)))


@given(clusters())
def test_a_cluster_written_as_yaml_is_read_back_as_it_was(tmp_path_factory: pytest.TempPathFactory, c: Cluster) -> None:
    path = tmp_path_factory.getbasetemp() / "round-trip.yaml"
    save_cluster(c, path)
    assert parse_cluster(path, env={}, host=HOST) == c
    assert len(cluster_to_yaml(c).splitlines()) <= 2 + c.world + len(c.levels)


def test_a_cluster_that_cannot_be_written_says_so(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match="cannot write"):
        save_cluster(parse_cluster("h200x8"), tmp_path / "none" / "c.yaml")


def test_a_message_uses_the_ports_of_the_level_that_joins_its_ranks() -> None:
    cluster = check(Cluster((CPU,) * 16, tuple(Level(size, Link(size, 1)) for size in (2, 8, 16))))
    assert [cluster.level(0, rank) for rank in (1, 2, 7, 8)] == [0, 1, 1, 2]
    assert [cluster.link(0, rank).latency_ns for rank in (1, 2, 7, 8)] == [2, 8, 8, 16]
    assert cluster.ports(0, 1) == ((0, 0), (0, 1))
    assert cluster.ports(7, 0) == ((1, 3), (1, 0))
    assert cluster.ports(9, 12) == ((1, 4), (1, 6))
    assert cluster.ports(3, 15) == cluster.ports(7, 8) == ((2, 0), (2, 1))
    assert cluster.ports(12, 4) == tuple(reversed(cluster.ports(4, 12)))
