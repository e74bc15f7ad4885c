"""Tests that the best published results of other planners are reached.

The profiles are not part of the project: they are read from the folder in AUTOPART_PLANNER_PROFILES, or from
`shared/data/planners` beside the checkout. Tests are skipped without them.
"""

from __future__ import annotations

import os
from math import isinf
from pathlib import Path

import pytest

from autopart.ir.errors import InfeasibleError
from benchmarks.papers import planner_objectives as command
from benchmarks.papers.planners import formats
from benchmarks.papers.planners.placement import Machine, Message
from benchmarks.papers.planners.published_values import PLACING as BEST
from benchmarks.papers.planners.published_values import PublishedValue, published_values

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(os.environ.get("AUTOPART_PLANNER_PROFILES", ROOT.parent / "shared" / "data" / "planners"))

needs_profiles = pytest.mark.skipif(
    not FOLDER.is_dir(), reason=f"no profiles at {FOLDER}: set AUTOPART_PLANNER_PROFILES to a folder that has them"
)


def slow(published: PublishedValue) -> bool:
    """Return whether a case takes over a second, or has no known proof and so uses up its time limit."""
    free = published.ask.get("objective") == "free" and not published.proved
    return free or any(name in published.file for name in ("gnmt_large", "piper", "xlnet", "bert-48"))


CASES = [
    pytest.param(a, id=str(a), marks=[pytest.mark.slow] if slow(a) or i % 3 else [])
    for i, a in enumerate(published_values())
]


@needs_profiles
@pytest.mark.parametrize("published", CASES)
def test_the_published_objective_is_reached(published: PublishedValue) -> None:
    if (
        published.ask.get("objective") == "free" and not published.proved
    ):  # the published solver took minutes on two cores
        answer = command.ask(FOLDER / published.file, command.Query(**published.ask, seconds=20))
        contiguous, _, bound = BEST[Path(published.file).stem]
        assert bound - published.digits <= answer.objective <= contiguous * (1 + 1e-6)
        assert 0 < answer.bound <= min(answer.objective, published.value + published.digits)
        return
    query = command.Query(**published.ask, seconds=100)
    if isinf(published.value):
        with pytest.raises(InfeasibleError, match=r"2\.00 GiB"):
            command.ask(FOLDER / published.file, query)
        return
    answer = command.ask(FOLDER / published.file, query)
    assert published.reached(answer.objective)
    if "gnmt_large" in published.file:
        assert answer.seconds < 52  # a fifth of the time of the original
    sign = -1 if published.larger_wins else 1
    assert sign * answer.bound <= sign * answer.objective * (1 + sign * 1e-9)
    if published.proved:
        near = pytest.approx(published.value, rel=1e-6, abs=published.digits)
        assert answer.objective == near, "better than the proven optimum: the cost model is wrong"
        assert answer.bound == answer.objective, "not proved in time"


@needs_profiles
@pytest.mark.parametrize(
    ("name", "devices", "bandwidth", "replicas"),
    [
        ("vgg16", 4, 1e9, [3, 1]),
        ("vgg16", 16, 3e9, [15, 1]),
        ("vgg16", 16, 5e9, [15, 1]),
        ("alexnet", 4, 1e9, [3, 1]),
        ("alexnet", 16, 1.25e9, [15, 1]),
    ],
)
def test_the_plan_is_the_published_one(name: str, devices: int, bandwidth: float, replicas: list[int]) -> None:
    query = command.Query(levels=(devices,), bandwidths=(bandwidth,))
    plan = command.ask(FOLDER / f"pipedream/{name}.graph.txt", query).plan
    assert [int(line.split("x")[-1]) for line in plan] == replicas


PROFILE = """\
node1 -- Input0 -- forward_compute_time=9.000, backward_compute_time=0.000, activation_size=8.0, parameter_size=0.000
node2 -- Conv2d(3, 64, kernel_size=(3, 3)) -- forward_compute_time=1.000, backward_compute_time=2.000, \
activation_size=[100.0; 20.0], parameter_size=40.000 -- stage_id=0
node3 -- __getitem__(1) -- forward_compute_time=0.0, backward_compute_time=0.0, activation_size=1, parameter_size=0
node4 -- Linear -- forward_compute_time=3.000, backward_compute_time=0.500, activation_size=4.0, parameter_size=8.0\x20
\tnode1 -- node2
\tnode2 -- node3
 \tnode2 -- node4"""


def test_a_profile_is_read_without_inputs_and_unread_items(tmp_path: Path) -> None:
    path = tmp_path / "tiny.graph.txt"
    path.write_text(PROFILE)
    graph = formats.read_profile(path)
    assert formats.kind(path) == "profile"
    assert [(n.name, n.activation_bytes, n.parameter_bytes) for n in graph.nodes] == [
        ("node2", 120.0, 40.0),
        ("node4", 4.0, 8.0),
    ]
    assert graph.parents == ((), (0,))
    assert formats.pipedream_profile(path).compute_s.tolist() == pytest.approx([0.003, 0.0065])


PLACING = """{"maxSizePerFPGA": 10, "maxFPGAs": 2, "maxCPUs": 1, "nodes": [
 {"id": 1, "supportedOnFpga": 1, "cpuLatency": 10, "fpgaLatency": 1, "size": 4, "isBackwardNode": 0, "colorClass": 7},
 {"id": 2, "supportedOnFpga": 1, "cpuLatency": 20, "fpgaLatency": 2, "size": 4, "isBackwardNode": 0, "colorClass": 8},
 {"id": 3, "supportedOnFpga": 1, "cpuLatency": 30, "fpgaLatency": 3, "size": 4, "isBackwardNode": 1, "colorClass": 7},
 {"id": 4, "supportedOnFpga": 0, "cpuLatency": 1, "fpgaLatency": 0, "isBackwardNode": 1}],
 "edges": [{"sourceId": 1, "destId": 2, "cost": 0.5}, {"sourceId": 2, "destId": 3, "cost": 0.25},
 {"sourceId": 2, "destId": 4, "cost": 0.25}, {"sourceId": 3, "destId": 4, "cost": 0.0}]}"""


def test_a_placement_file_is_read_by_colour_class(tmp_path: Path) -> None:
    path = tmp_path / "tiny.json"
    path.write_text(PLACING)
    placing = formats.read_placing(path)
    assert formats.kind(path) == "dnn-partitioning"
    assert placing.nodes == ((1, 3), (2,), (4,))
    assert placing.problem.times == ((4_000_000, 2_000_000, None), (40_000_000, 20_000_000, 1_000_000))
    assert placing.problem.sizes == (8, 4, 0)
    assert placing.problem.messages == (Message(500_000, (0, 1)), Message(250_000, (1, 0, 2)))
    assert placing.problem.edges == ((0, 1), (2, 0))  # a node without a forward part is placed with its input
    assert placing.problem.machines == (Machine(0, 10), Machine(0, 10), Machine(1, None, pays=False))
    assert formats.placing_loads_ms(placing, (0, 1, 2)) == [4.75, 2.75, 1.0]


PIPER = """{"maxDevices": 2, "maxMemoryPerDevice": 100, "bandwidth": 10, "mbsInBatch": 4, "nodes": [
 {"id": 5, "name": "a", "TMPCs": {"1": [{"id": "vanilla", "timePerSample": 2.0, "parameterSize": 1.0,
  "memoryUsageA": 3.0, "memoryUsageB": 4.0, "syncTimeFw": {}, "syncTimeBw": {"9": 5.0}}]}},
 {"id": 9, "name": "b", "TMPCs": {"1": [{"id": "vanilla", "timePerSample": 1.0, "parameterSize": 0.0,
  "memoryUsageA": 0.0, "memoryUsageB": 0.0, "syncTimeFw": {"5": 6.0}, "syncTimeBw": {}}]}}],
 "edges": [{"sourceId": 5, "destId": 9, "communicationCost": 7.0}]}"""


def test_a_piper_file_is_solved_with_the_limits_it_states(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "tiny.json"
    path.write_text(PIPER)
    model, limits = formats.read_piper(path)
    assert formats.kind(path) == "piper"
    assert model.edges == ((0, 1, 7.0),) and limits.devices == 2 and limits.micros == 4
    assert model.modes[1][1][0].sync_in == ((0, 6.0),)
    assert command.main([str(path), "--bandwidth", "10"]) == 0
    printed = capsys.readouterr().out
    assert "objective  1.55 s per micro-batch" in printed  # two replicas of everything: 3 / 2 + 4 * 1 / (2 * 4) / 10
    assert "optimal, proved" in printed
    assert command.main([str(path), "--memory", "1"]) == 1
