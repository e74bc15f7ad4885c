"""Which devices have ranks after losses and returns, and what their processes are told."""

from __future__ import annotations

import math

import pytest
from support.jobs.failures import launch_jobs as jobs

import autopart
from autopart import api
from autopart.files.clusters import parse_cluster
from autopart.ir.cluster import Cluster, Device, Level, Link, check
from autopart.ir.errors import UsageError, WorkerError
from autopart.launcher import Living, living_devices
from autopart.runtime.launch.local import launch
from autopart.runtime.launch.restarts import LONGEST_S, Members

pytestmark = pytest.mark.timeout(200)


def test_the_ranks_that_are_left_go_on_until_the_lost_one_joins_back() -> None:
    results = launch(jobs.die_and_return, 2, elastic=(1, 2), rejoin=0.5, timeout=100)
    assert results == [(2, "0", "0,1/2"), (2, "1", "0,1/2")]


@pytest.mark.slow
def test_a_run_that_ends_without_looking_at_the_request_is_over() -> None:
    assert launch(jobs.finish_unheeding, 2, elastic=(1, 2), rejoin=0.5, timeout=100) == [1]


@pytest.mark.slow
def test_too_few_ranks_end_the_run() -> None:
    with pytest.raises(WorkerError, match="rank 1 died: killed by signal 9"):
        launch(jobs.die_and_return, 2, elastic=(2, 2), rejoin=0.5, timeout=100)


def test_spare_devices_take_the_places_of_lost_ones() -> None:
    members = Members(5, 2, 3, 60.0)
    assert members.living(0.0) == Living((0, 1, 2), 5)
    assert members.lose([1], 10.0)
    assert members.living(10.0) == Living((0, 2, 3), 5)
    assert members.join_at(members.living(10.0)) == math.inf
    assert members.lose([3, 4], 20.0)
    assert members.living(20.0) == Living((0, 2), 5)
    assert members.join_at(members.living(20.0)) == 70.0
    assert members.living(70.0) == Living((0, 1, 2), 5)


def test_a_device_that_is_lost_again_and_again_is_left_alone_for_longer() -> None:
    members, now, waited = Members(2, 1, 2, 60.0), 0.0, []
    for _ in range(8):
        assert members.lose([1], now)
        waited.append(members.back_at[1] - now)
        now = members.back_at[1] + 1.0
    assert waited == [60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, LONGEST_S, LONGEST_S]
    assert members.lose([1], now + 11 * LONGEST_S)
    assert members.back_at[1] == now + 11 * LONGEST_S + 60.0


def test_all_devices_are_used_again_if_too_few_are_left() -> None:
    members = Members(3, 2, 3, math.inf)
    assert members.lose([0], 0.0)
    assert not members.lose([2], 1.0)
    assert members.living(1.0) == Living((0, 1, 2), 3)


def test_numbers_of_ranks_that_the_script_cannot_run_with_are_left_out() -> None:
    members = Members(4, 1, 4, 60.0)
    assert members.lose([1], 0.0)
    assert members.misfit(members.living(0.0))
    assert members.living(0.0) == Living((0, 2), 4)
    assert members.join_at(members.living(0.0)) == 60.0
    assert members.lose([3], 10.0)
    assert members.living(60.0) == Living((0, 1), 4)
    assert members.join_at(members.living(60.0)) == 70.0  # one more than two does not fit
    assert members.misfit(members.living(60.0))
    assert members.living(60.0) == Living((0,), 4)
    assert not members.misfit(members.living(60.0))


def test_a_run_goes_on_with_fewer_ranks_where_its_options_do_not_fit_those_that_are_left() -> None:
    assert launch(jobs.run_on_odd_numbers, 3, "", elastic=(1, 3), timeout=100) == [(2, "0/3")]


def test_an_error_of_usage_that_fewer_ranks_do_not_change_ends_the_run() -> None:
    with pytest.raises(UsageError, match="no plan") as error:
        launch(jobs.run_on_odd_numbers, 4, "no plan", elastic=(1, 4), timeout=100)
    assert error.value.why == "start 2"


def test_what_a_rank_is_told_reads_back() -> None:
    living = Living((0, 2, 3), 4)
    assert living_devices({"AUTOPART_DEVICES": living.text()}) == living
    assert living_devices({}) is None and living_devices({"AUTOPART_DEVICES": "0,,1/2"}) is None


HOST, NET = Link(10, 10**9), Link(100, 10**8)


def two_levels(devices: int, local: int) -> Cluster:
    kinds = tuple(Device("cpu", 1 + number, 1, 1) for number in range(devices))
    return check(Cluster(kinds, (Level(local, HOST), Level(-(-devices // local) * local, NET))))


@pytest.mark.parametrize(
    ("devices", "levels"),
    [
        ((0, 1, 2, 3), (Level(4, HOST), Level(4, NET))),
        ((0, 1, 2, 3, 4, 5, 7), (Level(4, HOST), Level(8, NET))),
        ((1, 2, 4, 7), (Level(2, HOST), Level(4, NET))),
        ((0, 1, 2, 4, 5, 6, 7), (Level(7, NET),)),
        ((3,), (Level(1, HOST), Level(1, NET))),
    ],
)
def test_the_part_of_a_cluster_keeps_its_devices_and_the_levels_that_still_nest(
    devices: tuple[int, ...], levels: tuple[Level, ...]
) -> None:
    whole = two_levels(8, 4)
    part = check(whole.part(devices))
    assert part.devices == tuple(whole.devices[device] for device in devices)
    assert part.levels == levels


def test_a_rank_compiles_for_the_part_of_the_cluster_that_lives(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPART_DEVICES", "0,2,3/4")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert api._cluster("cpu:4").world == api._cluster(None).world == 3
    assert api._cluster("cpu:2") == parse_cluster("cpu:2")


@pytest.mark.parametrize("elastic", [(0, 2), (3, 2), (1, 9), 2, (1,), (1.0, 2), "ab"])
def test_numbers_of_ranks_that_cannot_be_are_refused(elastic: object) -> None:
    with pytest.raises(UsageError, match="elastic is"):
        autopart.launch(print, "cpu:2", elastic=elastic)  # type: ignore[arg-type]


@pytest.mark.parametrize("rejoin", [-1, math.inf, True, "3"])
def test_a_time_to_come_back_that_is_none_is_refused(rejoin: object) -> None:
    with pytest.raises(UsageError, match="rejoin is"):
        autopart.launch(print, "cpu:2", elastic=(1, 2), rejoin=rejoin)  # type: ignore[arg-type]
