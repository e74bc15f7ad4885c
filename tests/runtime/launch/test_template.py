"""Ranks that are forked from a process that has imported torch are like those that are started as new processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from multiprocessing import forkserver
from typing import Any

import pytest
from support.jobs.failures import launch_jobs as jobs

from autopart.ir.errors import WorkerError
from autopart.runtime.launch.starting import forked
from autopart.runtime.launch.supervise import Fleet, pickle_call

pytestmark = [
    pytest.mark.slow,  # elastic launches of the default suite fork too
    pytest.mark.timeout(200),
    pytest.mark.skipif(sys.platform != "linux", reason="forks need Linux"),
]


def told(fleet: Fleet) -> list[dict[str, object]]:
    try:
        return fleet.run(pickle_call(jobs.about_this_process, ()), "about_this_process", None)
    finally:
        fleet.close()


def test_a_forked_rank_sees_what_a_new_process_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setenv("SET_LATER", "1")
    (new,), (own,) = told(Fleet(1)), told(Fleet(1, start=forked))
    assert {name: (value, own.get(name)) for name, value in new.items() if own.get(name) != value} == {}
    assert own["threads"] == 2


def test_forked_ranks_draw_different_numbers() -> None:
    fleet = Fleet(2, start=forked)
    first, second = fleet.run(pickle_call(jobs.unseeded_numbers, ()), "unseeded_numbers", None)
    fleet.close()
    assert all(a != b for a, b in zip(first, second, strict=True))


def test_a_forked_rank_that_dies_is_reported_with_its_signal() -> None:
    fleet = Fleet(2, start=forked)
    with pytest.raises(WorkerError, match="rank 1 died: killed by signal 9"):
        fleet.run(pickle_call(jobs.die_on_rank_1, ()), "die_on_rank_1", None)
    assert fleet.lost == (1,)


@pytest.fixture
def own_server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A fork server beside the one from which the pools of this process are forked."""
    own = forkserver.ForkServer()
    for name in ("connect_to_new_process", "set_forkserver_preload"):
        monkeypatch.setattr(forkserver, name, getattr(own, name))
    yield own
    own._stop()  # type: ignore[attr-defined]


def test_ranks_end_with_the_process_that_they_are_forked_from_and_new_ones_are_forked_from_another(
    own_server: Any,
) -> None:
    fleet = Fleet(1, start=forked)
    rank, server = fleet.members[0].process, own_server._forkserver_pid
    os.kill(server, signal.SIGKILL)
    os.waitid(os.P_PID, server, os.WEXITED | os.WNOWAIT)
    rank.join(20)
    assert rank.exitcode is not None
    fleet.close()
    assert len(told(Fleet(1, start=forked))) == 1
    assert own_server._forkserver_pid != server


def test_what_a_rank_writes_goes_where_the_launcher_writes_now(capfd: pytest.CaptureFixture[str]) -> None:
    with open(os.devnull, "w") as nowhere:  # where the fork server writes, unless an earlier test has started it
        kept, _ = os.dup(1), os.dup2(nowhere.fileno(), 1)
        told(Fleet(1, start=forked))
        os.dup2(kept, 1)
        os.close(kept)
    fleet = Fleet(1, start=forked)
    fleet.run(pickle_call(print, ("here",)), "print", None)
    fleet.close()
    assert capfd.readouterr().out == "here\n"


def test_what_else_is_forked_by_the_launcher_ends_by_sigterm() -> None:
    told(Fleet(1, start=forked))
    process = multiprocessing.get_context("forkserver").Process(target=time.sleep, args=(60,))
    process.start()
    process.terminate()
    process.join(20)
    assert process.exitcode == -signal.SIGTERM
