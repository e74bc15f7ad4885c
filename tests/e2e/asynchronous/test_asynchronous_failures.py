"""Asynchronous training that fails, is left early or goes on under another plan: named errors, and known weights."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from support.jobs import asynchronous_jobs
from support.jobs.asynchronous_jobs import batches, net, options
from support.jobs.failures import failing_jobs
from support.jobs.failures import streaming_failures as jobs
from support.jobs.failures.streaming_failures import BATCH, Fault
from support.oracles.asynchronous import emulated
from support.oracles.ended import LIMIT_S, failed
from support.workers import Workers

from autopart.ir.errors import StageError, WorkerError

pytestmark = pytest.mark.timeout(240)


@pytest.fixture(scope="module")
def three() -> Iterator[Workers]:
    with Workers(failing_jobs.WORLD, timeout=90) as pool:
        yield pool


def weights_after(updates: int, schedule: str = "pipedream") -> list[list[dict[str, torch.Tensor]]]:
    """The weights of each of two stages before the first update and after each of them."""
    return emulated(list(net(2)), batches(12)[:updates], asynchronous_jobs.sgd, (1, 1), schedule)[1]


def named(stage: int, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {f"{stage}.{name}": weight for name, weight in weights.items()}


def require_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("place", "rank"), [("optimizer", 0), ("scheduler", 1), ("optimizer", -1)])
def test_an_update_that_raises_ends_training_and_leaves_a_version_of_each_stage(
    pair: Workers, place: str, rank: int
) -> None:
    found = pair.run(jobs.caught, Fault(place, "raise", rank))
    history = weights_after(12)
    for own, seen in enumerate(found):
        kind, text = seen["raised"]
        first = kind == "ValueError"  # where both raise, the last stage may end the other before its update
        assert first or rank != own
        if first:
            assert rank in (own, -1) and text == f"the {place} gave up"
        else:
            failed = 1 - own if rank == -1 else rank
            assert kind == "WorkerError" and f"rank {failed} failed first: ValueError: the {place} gave up" in text
        for call, (name, what) in seen["after"].items():
            assert name == "RunError" and "Stages may be some updates apart" in what, call
        made = [n for n, weights in enumerate(history[own]) if _equal(seen["left"], named(own, weights))]
        if first:
            assert made == [BATCH + (place == "scheduler")]
        else:
            assert len(made) == 1 and abs(made[0] - BATCH) <= 2


def _equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return all(torch.allclose(found[name], tensor, rtol=0, atol=1e-12) for name, tensor in expected.items())


@pytest.mark.parametrize(("place", "rank"), [("data", 0), ("data", -1), ("body", -1), ("short", 1)])
def test_after_an_error_that_all_ranks_raise_all_stages_have_the_updates_of_what_entered(
    pair: Workers, place: str, rank: int
) -> None:
    found = pair.run(jobs.caught, Fault(place, "raise", rank))
    (steps,) = {seen["steps"] for seen in found}
    assert steps == BATCH if place != "body" else steps >= BATCH
    history = weights_after(steps)
    for own, seen in enumerate(found):
        if place == "short":
            assert seen["raised"][0] == "BatchError" and "rank 1 ended before those of rank 0" in seen["raised"][1]
        elif rank in (own, -1):
            assert seen["raised"] == ("ValueError", f"the {place} gave up")
        else:
            assert seen["raised"][0] == "WorkerError" and f"the {place} gave up" in seen["raised"][1]
        assert set(seen["after"].values()) == {("", "nothing was raised")}
        require_equal(seen["flushed"], named(own, history[own][-1]))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_loop_that_only_one_rank_leaves_is_an_error_on_all_ranks_at_the_next_call(pair: Workers, rank: int) -> None:
    found = pair.run(jobs.caught, Fault("body", "raise", rank))
    assert found[rank]["raised"] == ("ValueError", "the body gave up")
    kind, text = found[rank]["after"]["state_dict"]
    assert kind == "UsageError" and "ranks 0 and 1 make different calls" in text
    kind, text = found[1 - rank]["raised"]
    assert kind == "WorkerError" and f"rank {rank} failed first: UsageError: ranks 0 and 1 make different calls" in text
    for seen in found:
        for call in ("flush", "train", "adopt"):
            assert seen["after"][call][0] == "RunError"


def test_a_loop_that_is_left_takes_no_further_batch_and_what_entered_counts(pair: Workers) -> None:
    found = pair.run(jobs.left_early, "pipedream")
    assert found[0]["losses"] == found[1]["losses"] and found[0]["ends"] == found[1]["ends"]
    model, counted = net(2), 0
    expected: list[float] = []
    for place, told in (("broken", 3), ("closed", 2)):
        steps, state = found[0][place]
        losses, _ = emulated(list(model), batches(12)[: steps - counted], jobs.plain_sgd, (1, 1), "pipedream")
        expected, counted = expected + losses[:told], steps
        require_equal(state, model.state_dict())
    assert found[0]["refused"][0] == "PlanError" and "it is for 3, 2 run" in found[0]["refused"][1]
    assert len(found[0]["losses"]) == 3 + 2 + 12 and found[0]["steps"] == counted + 12
    torch.testing.assert_close(found[0]["losses"][:5], expected, rtol=0, atol=1e-12)
    assert len(found[0]["ends"]) == 3  # the user's generators were closed


TWO, FOUR = {"stages": 2, "cuts": ("2",)}, {"stages_per_rank": 2, "stages": 4, "cuts": ("1", "2", "3")}
PLANS: list[tuple[str, dict[str, Any]]] = [
    ("zb-v", FOUR), ("pipedream", TWO), ("1f1b", TWO), ("pipedream-2bw", TWO), ("interleaved", FOUR),
    ("pipedream", TWO), ("pipedream-2bw", TWO), ("zb-h1", TWO),
]  # fmt: skip


@pytest.mark.parametrize("count", [2, pytest.param(len(PLANS), marks=pytest.mark.slow)])
def test_plans_with_other_schedules_are_adopted_between_streams_and_steps(pair: Workers, count: int) -> None:
    asked = [(name, options(2, name, 4) | more) for name, more in PLANS[:count]]
    first, other = pair.run(jobs.adopting, asked, 3)
    model, data = net(4), batches(3 * count)
    stages = [model[:2], model[2:]]
    for number, (name, _) in enumerate(PLANS[:count]):
        own = data[3 * number : 3 * number + 3]
        versions = (lambda _, batch: batch) if not name.startswith("pipedream") else None
        if name == "pipedream":  # four micro-batches: the last stage's are ahead of nothing, the first one's of one
            versions = lambda stage, batch: max(0, (batch * 4 - (1 - stage)) // 4)  # noqa: E731
        losses, _ = emulated(stages, own, jobs.plain_sgd, (1, 1), name, versions)
        for found in (first, other):
            torch.testing.assert_close(found[number][0], losses, rtol=0, atol=1e-10)
            require_equal(found[number][1], model.state_dict())


@pytest.mark.parametrize(
    ("schedule", "micros"), [("pipedream", 1), pytest.param("pipedream-2bw", 2, marks=pytest.mark.slow)]
)
def test_training_goes_on_exactly_from_a_checkpoint_that_was_saved_on_the_way(
    pair: Workers, tmp_path: Path, schedule: str, micros: int
) -> None:
    for end, again, saved in pair.run(jobs.resumed, str(tmp_path), schedule, micros):
        assert 5 <= saved < 12
        require_equal(again, end)


KILLED = [
    ("optimizer", "kill", 1, "pipedream", "1U"),
    ("forward", "kill", 2, "pipedream-2bw", "2F"),
    ("backward", "kill", 2, "pipedream", "2B"),
    ("data", "kill", 0, "pipedream", "taking a batch"),
    ("body", "kill", 1, "pipedream-2bw", "between batches"),
    ("flush", "kill", 1, "pipedream", "1U"),
    ("save", "kill", 0, "pipedream", "0U"),
    ("backward", "stop", 2, "pipedream", "2B"),
    ("scheduler", "stop", 0, "pipedream-2bw", "0U"),
    ("flush", "stop", 1, "pipedream-2bw", "1U"),
    ("data", "hang", 1, "pipedream", "taking a batch"),
    ("body", "hang", 2, "pipedream", "between batches"),
    ("optimizer", "hang", 0, "pipedream-2bw", "0U"),
]
SAID = {"kill": "died: killed by signal 9 (SIGKILL)", "stop": "is stopped", "hang": "made no progress for 2 s"}
SECONDS = {"kill": LIMIT_S, "stop": 15.0, "hang": 15.0}


@pytest.mark.parametrize(
    ("place", "how", "rank", "schedule", "where"),
    [pytest.param(*case, marks=[pytest.mark.slow] if number else []) for number, case in enumerate(KILLED)],
)
def test_a_rank_that_dies_stops_or_hangs_in_a_stream_is_named_and_ends_all_others(
    three: Workers, tmp_path: Path, place: str, how: str, rank: int, schedule: str, where: str
) -> None:
    clock = tmp_path / "clock"
    folder = str(tmp_path / "saved") if place == "save" else ""
    error = failed(three, jobs.ended, Fault(place, how, rank, str(clock), schedule), folder)
    assert time.monotonic() - float(clock.read_text()) <= SECONDS[how]
    assert type(error) is WorkerError
    assert f"rank {rank} (stage {rank}) {SAID[how]}" in str(error) and where in str(error)
    assert not os.path.exists(folder)  # the flush before saving was the last that was done


@pytest.mark.slow
def test_an_op_that_raises_in_a_stream_is_reported_once(three: Workers) -> None:
    for place in ("forward", "backward"):
        error = failed(three, jobs.ended, Fault(place, "raise", 2))
        assert type(error) is StageError and f"stage 2, micro-batch 16, {place}" in str(error)
        assert str(error).count(f"the {place} gave up") == 1


@pytest.mark.slow
def test_a_loop_body_that_raises_on_one_rank_ends_all(three: Workers) -> None:
    error = failed(three, jobs.ended, Fault("body", "raise", 1))
    assert "rank 1 (stage 1) raised ValueError: the body gave up" in str(error)
