"""Who holds up whom: the rank that is stuck is named, not one that waits for it; a rank that works is left alone."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from autopart.runtime import activity
from autopart.runtime.activity import AWAY, BUSY, EVERYONE, JOINING, PATIENT, SharedStatus
from autopart.runtime.watch.heart import Seen
from autopart.runtime.watch.monitor import Monitor
from autopart.runtime.watch.progress import SlowPhase
from autopart.runtime.watch.states import RankState, held_up_by, state_of_rank, verdict

DEAD = "is stopped: process 7, by a signal"


def rank(number: int, waits: int = 0, doing: str = "2F1", still_s: float = 50.0, **more: object) -> RankState:
    return RankState(number, f"stage {number}", doing, waits=waits, still_s=still_s, **more)  # type: ignore[arg-type]


def world(*states: RankState) -> dict[int, RankState]:
    return {state.rank: state for state in states}


def waits_for(number: int) -> int:
    return number + 1


CHAIN = (rank(0, waits_for(1)), rank(1, waits_for(2)))


@pytest.mark.parametrize(
    ("states", "named"),
    [
        ([*CHAIN, rank(2)], [2]),
        ([*CHAIN, rank(2, waits_for(0), dead=DEAD)], [2]),
        ([rank(0, EVERYONE), rank(1), rank(2, EVERYONE)], [1]),
        ([rank(0, EVERYONE), rank(1, waits_for(2)), rank(2)], [2]),
        ([*CHAIN, rank(2, waits_for(0), phase=AWAY)], [2]),
        ([*CHAIN, rank(2, EVERYONE)], []),
        ([rank(0), rank(1), rank(2)], []),
    ],
)
def test_the_ends_of_the_chains_of_waiting_ranks_hold_up_the_others(states: list[RankState], named: list[int]) -> None:
    assert [state.rank for state in held_up_by(0, world(*states))] == named


@pytest.mark.parametrize(
    ("last", "waited_s", "says"),
    [
        (rank(2), 99.0, None),  # a long forward is no hang
        (rank(2, still_s=100.0), 100.0, "rank 2 (stage 2) made no progress for 100 s, and the others wait for that"),
        (rank(2, still_s=5e3), 99.0, None),
        (rank(2, still_s=5e3, doing="planning", phase=PATIENT), 5e3, None),
        (rank(2, dead=DEAD, still_s=1.0), 6.0, "rank 2 (stage 2) is stopped: process 7, by a signal"),
        (rank(2, phase=AWAY, still_s=1.0), 9.0, None),  # what it sent may still be on its way
        (rank(2, phase=AWAY), 3.0, "rank 2 (stage 2) has left, and rank 0 waits for it"),
        (rank(2, EVERYONE), 99.0, None),
        (rank(2, EVERYONE), 100.0, "the ranks have waited for each other for 100 s"),
    ],
)
def test_waiting_is_ended_for_a_rank_that_cannot_go_on_or_has_left_or_at_the_limit(
    last: RankState, waited_s: float, says: str | None
) -> None:
    found = verdict(0, world(*CHAIN, last), waited_s, limit_s=100.0)
    assert (found and found.what) == says
    if found is not None:
        assert all(f"rank {number} (stage {number}): " in found.why for number in range(3))


def test_planning_has_no_limit_but_the_one_that_is_set() -> None:
    planning = rank(0, still_s=500.0, doing="planning", phase=PATIENT)
    states = world(planning, rank(1, EVERYONE))
    assert verdict(1, states, 500.0, limit_s=10.0) is None
    assert verdict(1, states, 500.0, limit_s=10.0, planning_s=501.0) is None
    found = verdict(1, states, 500.0, limit_s=10.0, planning_s=100.0)
    assert found is not None and "rank 0 (stage 0) made no progress for 100 s" in found.what


def test_a_long_capture_is_named_after_half_a_minute_and_again_after_two(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activity, "_status", SharedStatus())
    slow = SlowPhase()
    with activity.patient("capturing the model"):
        lines = [slow.look(float(second)) for second in range(200)]
    assert {second: line for second, line in enumerate(lines) if line} == {
        30: "autopart: rank 0 has been capturing the model for 30 s",
        120: "autopart: rank 0 has been capturing the model for 120 s",
    }
    assert slow.look(500.0) is None and slow.look(1000.0) is None  # nothing is said of what is no capture


def test_a_rank_that_waits_but_sends_no_heartbeat_is_the_one_that_holds_up_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Native code may hold the GIL: then the last heartbeat says that the rank waits, and it never goes on."""
    monkeypatch.setattr(activity, "_status", SharedStatus())
    monitor = Monitor(0, 2, limit_s=12.0)
    monitor._ending.set()
    monitor._thread.join()
    beat = {"machine": monitor._machine, "pid": os.getpid(), "label": "stage 1", "note": "1R0", "waits": waits_for(0),
            "phase": BUSY}  # fmt: skip
    heart = SimpleNamespace(
        wanted=[1], knows=lambda rank: True, seen={1: Seen(beat, 0.0, 0.0, 0.0)}, silent_s=lambda rank: silent,
        stuck_s=lambda: 0.0,
    )  # fmt: skip
    monkeypatch.setattr(monitor, "_heart", heart)
    named = {}
    for silent in (1.0, 13.0):
        states = monitor._states(13.0) | {0: rank(0, waits_for(1))}
        found = verdict(0, states, 13.0, 12.0)
        assert found is not None
        named[silent] = found
    assert named[1.0].what == "the ranks have waited for each other for 12 s"
    assert named[13.0].what.startswith("rank 1 (stage 1) made no progress for 12 s")
    assert "no sign of life for 13 s, its process runs: native code that holds the GIL?" in named[13.0].where
    monitor._heart = None
    monitor.stop()


def test_a_dead_rank_is_named_before_one_that_is_late() -> None:
    states = world(rank(0, EVERYONE), rank(1, still_s=1e3), replace(rank(2), dead=DEAD))
    found = verdict(0, states, 1e3, limit_s=100.0)
    assert found is not None and found.what.startswith("rank 2")


def test_a_rank_that_opens_the_group_waits_for_one_that_left_the_one_before() -> None:
    joining = rank(0, EVERYONE, "opening the process group", phase=JOINING)
    states = world(joining, rank(1, phase=AWAY, still_s=500.0))
    assert verdict(0, states, 60.0, limit_s=100.0) is None
    late = verdict(0, states, 100.0, limit_s=100.0)
    assert late is not None and "made no progress" in late.what


def test_a_rank_that_opens_another_group_is_not_waited_for_in_the_one_before() -> None:
    states = world(rank(0, EVERYONE, "call 1: compile"), rank(1, waits_for(0), "opening", phase=JOINING))
    assert verdict(0, states, 19.0, limit_s=600.0) is None  # the first group may still be opened
    assert verdict(1, states, 50.0, limit_s=600.0) is None
    found = verdict(0, states, 21.0, limit_s=600.0)
    assert found is not None and found.what.startswith("rank 1 (stage 1) has left the group and opens another one")


def test_a_rank_that_goes_on_while_it_is_looked_at_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    status = SharedStatus(waits=waits_for(1))
    monkeypatch.setattr(activity, "_status", status)
    monitor = Monitor(0, 2, limit_s=0.0)
    monitor._ending.set()
    monitor._thread.join()
    monitor._wait_key, monitor._wait_from = (status.changes, status.waits), time.monotonic() - 100.0
    monitor._looked_at = time.monotonic()

    def seen(ending: bool) -> dict[int, RankState]:
        if ending:
            activity.waiting().__exit__(None, None, None)
        return world(state_of_rank(0, activity.current()), rank(1, still_s=200.0))

    monkeypatch.setattr(monitor, "_states", lambda _: seen(ending=True))
    monitor._look()
    assert monitor.verdict is None
    status.waits = waits_for(1)
    monkeypatch.setattr(monitor, "_states", lambda _: seen(ending=False))
    monitor._look()
    assert monitor.verdict is not None
    monitor.stop()
