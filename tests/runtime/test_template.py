"""Ranks that are forked from a process that has imported torch are like those that are started as new processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from support.jobs import launch_jobs as jobs

from autopart.ir.errors import WorkerError
from autopart.runtime.launch.supervise import Fleet, pickle_call
from autopart.runtime.launch.template import Template, works_here

pytestmark = [
    pytest.mark.slow,  # elastic launches of the default suite use a template too
    pytest.mark.timeout(200),
    pytest.mark.skipif(not works_here(), reason="forks need Linux"),
]


@pytest.fixture(scope="module")
def template() -> Iterator[Template]:
    with Template({"OMP_NUM_THREADS": "1"}) as made:
        yield made


def told(fleet: Fleet) -> list[dict[str, object]]:
    try:
        return fleet.run(pickle_call(jobs.about_this_process, ()), "about_this_process", None)
    finally:
        fleet.close()


def test_a_forked_rank_sees_what_a_new_process_sees(template: Template, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    monkeypatch.setenv("SET_LATER", "1")
    (new,), (forked,) = told(Fleet(1)), told(Fleet(1, start=template.start))
    assert {name: (value, forked.get(name)) for name, value in new.items() if forked.get(name) != value} == {}
    assert forked["threads"] == 2


def test_forked_ranks_draw_different_numbers(template: Template) -> None:
    fleet = Fleet(2, start=template.start)
    first, second = fleet.run(pickle_call(jobs.unseeded_numbers, ()), "unseeded_numbers", None)
    fleet.close()
    assert all(a != b for a, b in zip(first, second, strict=True))


def test_a_forked_rank_that_dies_is_reported_with_its_signal(template: Template) -> None:
    fleet = Fleet(2, start=template.start)
    with pytest.raises(WorkerError, match="rank 1 died: killed by signal 9"):
        fleet.run(pickle_call(jobs.die_on_rank_1, ()), "die_on_rank_1", None)
    assert fleet.lost == (1,)


def test_ranks_end_with_their_template_and_new_ones_are_new_processes() -> None:
    with Template({}) as template:
        fleet = Fleet(1, start=template.start)
        process = fleet.members[0].process
        os.kill(template._process.pid, signal.SIGKILL)
        process.join(20)
        assert process.exitcode is not None
        fleet.close()
        assert len(told(Fleet(1, start=template.start))) == 1
