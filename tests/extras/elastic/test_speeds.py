"""Which ranks are named as slower than planned, and what the planner is then told of their devices."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest

from autopart.extras.elastic.speeds import SKIPPED, WINDOW, Speeds, planned_ns, slowed
from autopart.ir.cluster import Cluster, Device, Level, Link
from autopart.ir.decision import Decision, Stage
from autopart.ir.plan import Estimate, Outlook, Plan, Provenance
from autopart.passes.shards.costs import group_sizes

MS = 10**6
ESTIMATE = Estimate(10 * MS, 20 * MS, *[0] * 7)


def cluster(*rates: int) -> Cluster:
    devices = tuple(Device("cpu", 1, rate, rate, rates=(("float32", rate),)) for rate in rates)
    return Cluster(devices, (Level(len(rates), Link(1, 10**9)),))


def plan(*stages: Stage, micros: int = 4, estimates: Sequence[Estimate] = ()) -> Plan:
    outlook = Outlook(estimates=tuple(estimates) or (ESTIMATE,) * len(stages))
    return Plan(
        Provenance("", "", ""), Decision(stages=stages, world=5, micro_rows=(1,) * micros, schedule="1f1b"), outlook
    )


def noting(speeds: Speeds, *computed_ms: float, steps: int = SKIPPED + WINDOW) -> Speeds:
    for _ in range(steps):
        speeds.step_ended(SimpleNamespace(computed_ns=[ms * MS for ms in computed_ms]))
    return speeds


def measured_on(*rates: int) -> Speeds:
    session = SimpleNamespace(world=SimpleNamespace(rank=0))
    return Speeds(SimpleNamespace(cluster=cluster(*rates), session=session))


def following(*rates: int) -> Speeds:
    speeds = measured_on(*rates)
    speeds.brought_up(plan(*(Stage((f"op{rank}",), (rank,)) for rank in range(len(rates)))))
    return speeds


def test_planned_times_follow_shares_and_speeds() -> None:
    uneven = Stage(("a",), (0, 1), shares=(2, 1))
    turns = Stage(("b",), (2, 3), policy="turn")
    planned = planned_ns(plan(uneven, turns), cluster(200, 100, 100, 50, 1))
    assert planned == (4 * 30 * MS, 4 * 30 * MS, 2 * 15 * MS, 2 * 30 * MS, 0.0)
    assert planned_ns(replace(plan(uneven), outlook=Outlook()), cluster(1, 1)) == (0.0, 0.0)


def test_a_rank_that_takes_three_times_as_long_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "autopart"):
        speeds = following(1, 1, 1, 1)
        assert noting(speeds, 70, 70, 210, 70, steps=SKIPPED + WINDOW - 1).stragglers() == {}
        assert noting(speeds, 70, 70, 210, 70, steps=9).stragglers() == {2: 3.0}
    assert caplog.text.count("rank 2 takes 3.0 times as long") == 1


def test_a_plan_that_is_wrong_by_one_factor_names_nobody() -> None:
    assert noting(following(1, 1, 1), 10**6, 10**6, 10**6).stragglers() == {}


def test_what_the_host_does_beside_the_ops_of_a_tiny_stage_names_nobody(caplog: pytest.LogCaptureFixture) -> None:
    """Times of one op and of 26, on an idle machine: the first is too short to tell how fast its device is."""
    speeds = measured_on(1, 1)
    estimates = [replace(ESTIMATE, fwd_ns=fwd, bwd_ns=bwd) for fwd, bwd in ((8_135, 6_475), (111_282, 144_384))]
    speeds.brought_up(plan(Stage(("a",), (0,)), Stage(("b",), (1,)), micros=1, estimates=estimates))
    with caplog.at_level(logging.INFO, "autopart"):
        assert noting(speeds, 0.176, 0.667).slowness() == (1.0, 1.0)
        assert noting(speeds, 0.300, 0.667).slowness() == (1.0, 1.0)  # another rank's work on the same core
        assert speeds.stragglers() == {} and not caplog.records
        assert noting(speeds, 0.176, 30).stragglers() == {1: pytest.approx(45, rel=0.1)}


def test_a_single_late_step_names_nobody() -> None:
    speeds = noting(following(1, 1), 10, 10)
    assert noting(speeds, 10, 1000, steps=1).stragglers() == {}


def test_the_slower_one_of_two_is_named() -> None:
    assert noting(following(1, 1), 30, 10).stragglers() == {0: 3.0}


def test_a_rank_that_was_judged_is_named_again_only_for_a_change() -> None:
    speeds = noting(following(1, 1, 1), 10, 10, 40)
    assert speeds.slowness() == (1.0, 1.0, 4.0)
    assert speeds.now(cluster(8, 8, 8)) == cluster(8, 8, 2)
    assert noting(speeds, 10, 10, 40).stragglers() == {}
    assert noting(speeds, 10, 10, 10).stragglers() == {2: 1.0}


def test_a_group_that_divides_its_work_is_as_slow_as_its_slowest_rank() -> None:
    speeds = measured_on(8, 8, 8, 8)
    groups = [Stage(("a",), (0, 1), shards=2), Stage(("b",), (2, 3), shards=2)]
    speeds.brought_up(plan(*groups))
    found = noting(speeds, 10, 10, 10, 40).now(cluster(8, 8, 8, 8))
    assert found == cluster(8, 8, 2, 2)
    assert group_sizes(found) == [1, 2]
    assert speeds.slowness() == (1.0, 1.0, 1.0, 4.0)


def test_a_plan_for_the_slow_device_expects_it_to_be_slow() -> None:
    speeds = measured_on(8, 8)
    machines = slowed(cluster(8, 8), (1.0, 4.0))
    assert [device.flops_per_s for device in machines.devices] == [8, 2]
    assert machines.devices[1].rates == (("float32", 2),) and machines.devices[1].mem_bytes_per_s == 2
    speeds.follow(plan(Stage(("a",), (0, 1), shares=(4, 1))), machines, (1.0, 4.0))
    assert noting(speeds, 50, 50).stragglers() == {}
    assert speeds.slowness() == (1.0, 4.0)
    assert noting(speeds, 50, 12).stragglers() == {1: 1.0}


@pytest.mark.parametrize("computed", [(0.0, 0.0), (10.0, 0.0)])
def test_ranks_that_are_not_measured_are_not_judged(computed: tuple[float, ...]) -> None:
    assert noting(following(1, 1), *computed).slowness() == (1.0, 1.0)


def test_a_rank_is_judged_beside_its_own_first_steps() -> None:
    """The costs of its stage are too high: by the plan alone it would stand at 1.8."""
    speeds = noting(following(1, 1), 10, 6)
    assert speeds.stragglers() == {} and speeds.slowness() == (1.0, 1.0)
    assert noting(speeds, 10, 18).stragglers() == {1: pytest.approx(3.0)}
    assert speeds.slowness() == pytest.approx((1.0, 3.0))
    speeds.now(cluster(1, 1))
    assert noting(speeds, 10, 18).stragglers() == {}
    assert noting(speeds, 10, 6).stragglers() == {1: pytest.approx(1.0)}


def test_first_steps_of_a_slow_rank_are_not_usual() -> None:
    speeds = noting(following(1, 1), 10, 30)
    assert speeds.stragglers() == {1: pytest.approx(3.0)}
    assert noting(speeds, 10, 14, steps=WINDOW).stragglers() == {}
    assert noting(speeds, 10, 30, steps=WINDOW).stragglers() == {1: pytest.approx(30 / 14)}


def test_a_new_plan_has_first_steps_of_its_own() -> None:
    speeds = noting(following(1, 1), 10, 6)
    speeds.follow(plan(Stage(("a",), (0,)), Stage(("b",), (1,))), cluster(1, 1))
    assert noting(speeds, 10, 14).slowness() == (1.0, 1.0)


def test_a_rank_is_named_by_its_new_speed_alone() -> None:
    """After half of the steps, a median of both halves would lie between both speeds."""
    speeds = noting(following(1, 1), 10, 10)
    assert noting(speeds, 10, 30, steps=WINDOW // 2).stragglers() == {}
    assert noting(speeds, 10, 30, steps=1).stragglers() == {1: 3.0}
