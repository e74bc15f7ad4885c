"""A failure of one rank reaches the others within a second, with its cause; the processes can be used again."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support import caught_jobs as jobs
from support.failing_jobs import WORLD

from autopart.ir.errors import UsageError
from autopart.options import read_options
from autopart.runtime.launch.local import Workers
from autopart.runtime.shared_group import default_timeout_s

pytestmark = pytest.mark.timeout(200)
SPREAD_S = 2.0  # a second, and what a loaded machine adds


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with Workers(WORLD, timeout=150) as pool:
        yield pool


def spread(heard: list[tuple[str, str, float]]) -> float:
    """Seconds between the first and the last rank that raised."""
    return max(at for *_, at in heard) - min(at for *_, at in heard)


@pytest.mark.parametrize("bad", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_whatever_is_raised_on_one_rank_reaches_all_with_rank_and_cause(workers: Workers, bad: int) -> None:
    pids = workers.run(jobs.rank) and workers.pids
    found = workers.run(jobs.raising, bad)
    for place, error in enumerate(jobs.RAISED):
        heard = [of_rank[place] for of_rank in found]
        assert spread(heard) <= SPREAD_S
        for rank, (kind, text, _) in enumerate(heard):
            assert kind == (type(error).__name__ if rank == bad else "WorkerError"), text
            assert rank == bad or (f"rank {bad} failed" in text and type(error).__name__ in text), text
    assert workers.pids == pids


@pytest.mark.parametrize(("phase", "calls"), [("backward", 4), pytest.param("forward", 2, marks=pytest.mark.slow)])
def test_a_step_that_failed_leaves_gradients_as_they_were_on_every_rank_and_processes_that_go_on(
    workers: Workers, phase: str, calls: int
) -> None:
    pids = workers.run(jobs.rank) and workers.pids
    found = workers.run(jobs.caught, phase, calls)
    assert spread([of_rank["failed"] for of_rank in found]) <= SPREAD_S
    for rank, of_rank in enumerate(found):
        kind, text, _ = of_rank["failed"]
        assert kind == ("StageError" if rank == WORLD - 1 else "WorkerError")
        assert "gave up" in text and "stage 2, micro-batch" in text
        assert rank == WORLD - 1 or "rank 2 failed first: StageError" in text
        assert of_rank["kept"]
        assert of_rank["again"][0] == "RunError" and "takes no further step" in of_rank["again"][1]
        assert of_rank["emptied"][0] == "UsageError", of_rank["emptied"]
    assert len({of_rank["loss"] for of_rank in found}) == 1
    assert workers.pids == pids


@pytest.mark.slow
def test_a_call_of_one_rank_alone_ends_once_the_others_have_left(workers: Workers) -> None:
    kind, text, after_s = workers.run(jobs.left)[0]
    assert kind == "WorkerError" and "has left, and rank 0 waits for it" in text and "state_dict" in text
    assert after_s <= 10


@pytest.mark.slow
def test_an_error_of_the_script_between_two_steps_is_told(workers: Workers) -> None:
    heard = workers.run(jobs.raised_in_the_script)
    assert heard[1][0] == "ZeroDivisionError" and spread(heard) <= SPREAD_S
    for kind, text, _ in (heard[0], heard[2]):
        assert kind == "WorkerError" and "rank 1 failed first: ZeroDivisionError: my own mistake" in text


@pytest.mark.slow
def test_a_rank_that_stands_still_is_named_at_the_limit_and_planning_does_not_count(workers: Workers) -> None:
    assert len(set(workers.run(jobs.planned_for_long, 3.0))) == 1
    heard = workers.run(jobs.late, 3.0)
    for kind, text, after_s in (heard[0], heard[2]):
        assert kind == "WorkerError" and "rank 1 (stage 1) did not go on for 3 s" in text, text
        assert after_s <= 10


@pytest.mark.parametrize("value", [0, -1.0, float("nan"), float("inf"), True, "10"])
def test_what_is_no_time_limit_is_refused(value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="timeout is"):
        read_options(timeout=value)
    monkeypatch.setenv("AUTOPART_TIMEOUT_S", str(value))
    if value not in (True, "10"):
        with pytest.raises(UsageError, match="AUTOPART_TIMEOUT_S is"):
            default_timeout_s()
