"""A plan on running processes: it can be changed, fails on all ranks at once, and its processes can be used again."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
import torch
from support.jobs import session_jobs as jobs
from support.jobs.failures import rank_error_jobs
from support.jobs.failures.failing_jobs import CASE as TROUBLED
from support.jobs.failures.failing_jobs import armed
from support.jobs.step_jobs import ALL
from support.workers import Workers

import autopart
from autopart.ir.errors import BatchError, CaptureError, PlanError, RunError, StageError, WorkerError

pytestmark = pytest.mark.timeout(200)
WORLD = 3
SPREAD_S = 2.0  # a second for a failure to reach all ranks, and what a loaded machine adds


@pytest.fixture(scope="module")
def workers() -> Iterator[Workers]:
    with Workers(WORLD, timeout=180) as pool:
        yield pool


@pytest.fixture(scope="module")
def clean() -> Iterator[Workers]:
    """Processes in which no pipe was left open."""
    with Workers(WORLD, timeout=180) as pool:
        yield pool


@cache
def plan_of(name: str, cuts: tuple[str, ...], micros: int, schedule: str = "1f1b") -> autopart.Plan:
    """A plan with these cuts, for all ranks of the pool."""
    case = ALL[name]
    return autopart.plan(
        case.model(),
        f"cpu:{WORLD}",
        sample=case.batch(jobs.ROWS),
        loss_fn=case.loss_fn,
        cuts=cuts,
        micro_batches=micros,
        schedule=schedule,
        costs="analytic",
        replicas=1,
        recompute="off",
    )


CUTS = {
    "tied": [("body.layers.1",), ("body.layers.0", "head")],
    "batch_norm": [("body.layers.2",), ("body.layers.1", "body.norms.2")],
}


def test_adopting_the_plan_that_runs_changes_no_bit(workers: Workers) -> None:
    plan = plan_of("tied", CUTS["tied"][0], 2)
    alone, _, state, evaluated = workers.run(jobs.trained, "tied", plan, {}, 3)[0]
    for losses, _, found, again in workers.run(jobs.trained, "tied", plan, {1: plan, 2: plan}, 3, False):
        assert (losses, again) == (alone, evaluated)
        assert all(torch.equal(found[name], state[name]) for name in state)


@pytest.mark.parametrize("name", ["tied", pytest.param("batch_norm", marks=pytest.mark.slow)])
def test_training_goes_on_under_another_plan_as_in_one_process(workers: Workers, name: str) -> None:
    few, more = CUTS[name]
    first, second = plan_of(name, few, 2), plan_of(name, more, 4, "gpipe")
    results = workers.run(jobs.trained, name, first, {2: second, 4: first}, 6)
    losses, state = jobs.trained_alone(name, {0: 2, 2: 4, 4: 2}, 6)
    for found, _, found_state, evaluated in results:
        assert found == pytest.approx(losses, rel=1e-5)
        # Not relative alone: behind a BatchNorm's mean stand biases whose gradient is zero but for rounding.
        torch.testing.assert_close(found_state, dict(state), rtol=1e-4, atol=1e-6)
        assert evaluated == results[0][3]
    held = [[names for _, held, *_ in results if (names := held[which])] for which in (0, 1)]
    assert len(held[0]) == 3 and len(held[1]) == 2  # the third rank trains under the second plan alone


def test_gradients_move_with_their_parameters(workers: Workers) -> None:
    few, more = CUTS["tied"]
    for same, left, error in workers.run(jobs.accumulated, "tied", plan_of("tied", few, 2), plan_of("tied", more, 4)):
        assert same and left == []
        assert error <= 1e-5


def test_a_plan_for_another_model_is_refused_and_the_old_one_goes_on(workers: Workers) -> None:
    plan = plan_of("tied", CUTS["tied"][0], 2)
    expected = workers.run(jobs.trained, "tied", plan, {}, 1)[0][0]
    other = plan_of("batch_norm", CUTS["batch_norm"][0], 2)
    for error, loss, kept in workers.run(jobs.refused_plan, "tied", plan, other):
        assert type(error) is PlanError and "something else" in error.what
        assert [loss] == expected and kept


@pytest.mark.parametrize("bad", [pytest.param(0, marks=pytest.mark.slow), 2])
def test_a_capture_that_fails_on_one_rank_is_told_to_all(workers: Workers, bad: int) -> None:
    pids = workers.run(jobs.rank) and workers.pids
    for error in workers.run(jobs.failing_capture, bad, True):
        assert type(error) is CaptureError and error.what == "cannot be captured"
        assert ("rank 2" in error.where) == (bad == 2)  # what rank 0 plans, it plans for all
    for rank, error in enumerate(workers.run(jobs.failing_capture, bad, False)):
        assert type(error) is (jobs.Broken if rank == bad else WorkerError)
        assert rank == bad or (f"rank {bad} failed while" in error.what and "an unexpected error" in error.why)
    assert len(set(workers.run(jobs.one_step, False))) == 1  # and the same processes go on
    assert workers.pids == pids


def test_a_batch_of_other_rows_on_one_rank_is_told_to_all_and_training_goes_on(workers: Workers) -> None:
    expected = workers.run(jobs.one_step, False)[0]
    for error, loss in workers.run(jobs.failing_later, 1):
        assert type(error) is BatchError and "ranks 0 and 1" in error.what
        assert loss == expected


def test_a_pool_serves_pipes_that_were_closed_or_left_open_in_any_order(workers: Workers) -> None:
    losses = [loss for leave_open in (False, False, True, False, True, True) for loss in _steps(workers, leave_open)]
    assert len(set(losses)) == 1


def _steps(workers: Workers, leave_open: bool) -> list[float]:
    pids = workers.run(jobs.rank) and workers.pids
    losses: list[float] = workers.run(jobs.one_step, leave_open)
    assert workers.pids == pids
    return losses


@pytest.mark.slow
def test_process_groups_end_with_the_last_that_uses_them(clean: Workers) -> None:
    assert clean.run(jobs.refused) == [True] * WORLD
    for before, after, gone in clean.run(jobs.two_at_once):
        assert before == pytest.approx(after) and gone
    found = clean.run(jobs.groups_of_a_closed_world)
    assert [ended for ended, _ in found[:2]] == [True, True]  # the two that were in it
    assert [total for _, total in found] == [3.0] * WORLD


@pytest.mark.slow
def test_ranks_find_each_other_after_one_did_not_come(clean: Workers) -> None:
    said = clean.run(jobs.open_after_absence, 1, 3)
    assert "rank 1 did not come" in said[0][0] and "rank 0 did not come" in said[2][0]
    assert [second for _, second in said] == ["sum 3"] * WORLD


def test_texts_and_weights_are_compared_and_sent_byte_by_byte(workers: Workers) -> None:
    assert all(workers.run(jobs.texts))
    results = workers.run(jobs.broadcast_weights)
    assert [weights for weights, _ in results] == [[1.0, 2.0, 3.0]] * WORLD
    assert ["permuted and 0 more" in "".join(said) for _, said in results] == [True, False, False]


@pytest.mark.slow
def test_a_rank_that_runs_no_python_for_long_is_waited_for(workers: Workers) -> None:
    workers.run(rank_error_jobs.blocked_interpreter, 0)  # planned: what it said last is that it had left
    assert len(set(workers.run(rank_error_jobs.blocked_interpreter, 13))) == 1


@pytest.mark.slow
def test_who_holds_up_the_others_is_noted_once(capfd: pytest.CaptureFixture[str]) -> None:
    with Workers(WORLD, timeout=180) as pool:
        assert pool.run(rank_error_jobs.late_rank, 12.0)[0][0] == "WorkerError"
    noted = [line for line in capfd.readouterr().err.splitlines() if "has waited" in line]
    assert len(noted) == 1 and "rank 0 has waited for 10 s (call" in noted[0]
    assert "held up by rank 1 (stage 1): between steps" in noted[0]


def spread(heard: list[tuple[str, str, float]]) -> float:
    """Seconds between the first and the last rank that raised."""
    return max(at for *_, at in heard) - min(at for *_, at in heard)


@pytest.mark.parametrize("bad", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_whatever_is_raised_on_one_rank_reaches_all_with_rank_and_cause(workers: Workers, bad: int) -> None:
    pids = workers.run(jobs.rank) and workers.pids
    found = workers.run(rank_error_jobs.failed_capture, bad)
    for place, error in enumerate(rank_error_jobs.RAISED):
        heard = [of_rank[place] for of_rank in found]
        assert spread(heard) <= 3 * SPREAD_S  # other ranks may be capturing, early, and hear of it after that
        for rank, (kind, text, _) in enumerate(heard):
            assert kind == (type(error).__name__ if rank == bad else "WorkerError"), text
            assert rank == bad or (f"rank {bad} failed" in text and type(error).__name__ in text), text
    assert workers.pids == pids


@pytest.mark.parametrize(
    ("phase", "calls", "micro"), [("forward", 3, 2), pytest.param("backward", 4, 3, marks=pytest.mark.slow)]
)
def test_a_step_that_failed_leaves_gradients_as_they_were_on_every_rank_and_processes_that_go_on(
    workers: Workers, phase: str, calls: int, micro: int
) -> None:
    pids = workers.run(jobs.rank) and workers.pids
    found = workers.run(rank_error_jobs.failed_step, phase, calls)
    assert spread([of_rank["failed"] for of_rank in found]) <= SPREAD_S
    for rank, of_rank in enumerate(found):
        kind, text, _ = of_rank["failed"]
        assert kind == ("StageError" if rank == WORLD - 1 else "WorkerError")
        assert text.count("the op gave up") == 1 and f"stage 2, micro-batch {micro}, {phase}" in text
        assert phase == "backward" or ("module layers.2.1" in text and "failing_jobs.py" in text)
        assert rank == WORLD - 1 or "rank 2 failed first: StageError" in text
        assert of_rank["kept"]
        assert of_rank["again"][0] == "RunError" and "takes no further step" in of_rank["again"][1]
        assert of_rank["emptied"][0] == "UsageError", of_rank["emptied"]
    assert len({of_rank["loss"] for of_rank in found}) == 1
    assert workers.pids == pids


@pytest.mark.slow
def test_a_group_that_the_user_opened_outlives_a_step_that_failed(clean: Workers) -> None:
    found = clean.run(rank_error_jobs.failed_step_in_open_group)
    assert [name for name, *_ in found] == ["WorkerError", "WorkerError", "StageError"]
    assert [total for _, total, _ in found] == [3.0] * WORLD
    assert len({loss for *_, loss in found}) == 1


@pytest.mark.slow
def test_a_call_of_one_rank_alone_ends_once_the_others_have_left(workers: Workers) -> None:
    kind, text, after_s = workers.run(rank_error_jobs.early_exit)[0]
    assert kind == "WorkerError" and "has left, and rank 0 waits for it" in text and "state_dict" in text
    assert after_s <= 10


@pytest.mark.slow
def test_an_error_of_the_script_between_two_steps_is_told(workers: Workers) -> None:
    heard = workers.run(rank_error_jobs.error_in_the_script)
    assert heard[1][0] == "ZeroDivisionError" and spread(heard) <= SPREAD_S
    for kind, text, _ in (heard[0], heard[2]):
        assert kind == "WorkerError" and "rank 1 failed first: ZeroDivisionError: my own mistake" in text


@pytest.mark.slow
def test_a_rank_that_stands_still_is_named_at_the_limit_and_planning_does_not_count(workers: Workers) -> None:
    assert len(set(workers.run(rank_error_jobs.slow_planning, 3.0))) == 1
    heard = workers.run(rank_error_jobs.late_rank, 3.0)
    for kind, text, after_s in (heard[0], heard[2]):
        assert kind == "WorkerError" and "rank 1 (stage 1) made no progress for 3 s" in text, text
        assert after_s <= 10


TRAINED = {"loss_fn": TROUBLED.loss_fn, "micro_batches": 2, "costs": "analytic"}


def test_a_pipe_whose_step_failed_takes_no_further_step() -> None:
    model, batch = TROUBLED.model(), TROUBLED.batch(8)
    with autopart.compile(model, "cpu:1", sample=batch, **TRAINED) as pipe:
        with pytest.raises(BatchError):
            pipe.step(object())  # nothing was sent: it goes on
        pipe.step(batch)
        before = pipe.state_dict()
        with armed("forward", "raise", 2), pytest.raises(StageError, match="gave up"):
            pipe.step(batch)
        assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
        for refused in (pipe.step, pipe.eval_loss):
            with pytest.raises(RunError, match="takes no further step") as caught:
                refused(batch)
            assert "StageError" in caught.value.why
        with pytest.raises(RunError, match="takes no further step"):
            pipe.adopt(pipe.plan)
    with autopart.compile(model, "cpu:1", sample=batch, **TRAINED) as pipe:
        assert isinstance(pipe.step(batch).item(), float)
