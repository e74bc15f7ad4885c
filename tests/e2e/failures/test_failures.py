"""A worker that dies or raises ends the others within seconds, and the first cause is reported once with its place."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest
from support.jobs.failures.failing_jobs import (
    WORLD,
    exit_in_step,
    healthy_step,
    train_in_many_stages,
    train_until_failure,
    without_memory,
)
from support.oracles.ended import LIMIT_S, failed
from support.workers import Workers

from autopart.ir.errors import StageError, WorkerError

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def workers():
    with Workers(WORLD, timeout=90) as pool:
        yield pool


@pytest.mark.parametrize(
    ("phase", "calls", "words", "schedule"),
    [
        pytest.param("forward", 2, "2F1: forward of micro-batch 1", "1f1b", marks=pytest.mark.slow),
        ("backward", 5, "2B0: backward of micro-batch 0", "1f1b"),
        pytest.param("backward", 5, "2I0: backward of inputs of micro-batch 0", "zb-h1", marks=pytest.mark.slow),
        pytest.param("weights", 3, "2W1: backward of weights of micro-batch 1", "zb-h1", marks=pytest.mark.slow),
        pytest.param("idle", 1, "between steps", "1f1b", marks=pytest.mark.slow),
    ],
)
def test_a_killed_worker_is_named_and_ends_all_others_in_seconds(
    workers, tmp_path, phase, calls, words, schedule, capfd
):
    clock = tmp_path / "clock"
    error = failed(workers, train_until_failure, phase, "kill", calls, str(clock), schedule)
    assert time.monotonic() - float(clock.read_text()) <= LIMIT_S
    assert type(error) is WorkerError
    assert "rank 2 (stage 2) died" in str(error) and "SIGKILL" in str(error)
    assert words in str(error)
    out, err = capfd.readouterr()
    assert "Traceback" not in out + err


@pytest.mark.slow
def test_a_worker_that_exits_is_named_with_its_code(workers, tmp_path):
    clock = tmp_path / "clock"
    error = failed(workers, exit_in_step, str(clock))
    assert time.monotonic() - float(clock.read_text()) <= LIMIT_S
    assert "rank 1 (stage 1)" in str(error) and "code 3" in str(error)


@pytest.mark.parametrize(
    ("schedule", "calls", "micro"),
    [pytest.param(*case, marks=pytest.mark.slow) for case in (("1f1b", 3, 2), ("gpipe", 6, 1))],
)
def test_an_op_that_raises_is_reported_once_with_stage_micro_batch_and_module(workers, schedule, calls, micro):
    error = failed(workers, train_until_failure, "forward", "raise", calls, "", schedule)
    text = str(error)
    assert type(error) is StageError
    assert text.count("the op gave up") == 1
    assert f"stage 2, micro-batch {micro}, forward" in text
    assert "module layers.2.1" in text and "trouble" in text
    assert text.count("rank 2") == 1
    assert Path(__file__).parents[2].joinpath("support/failing_jobs.py").name in text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("phase", "calls", "schedule", "words"),
    [
        ("backward", 2, "1f1b", "backward"),
        ("backward", 2, "zb-h1", "backward of inputs"),
        ("weights", 3, "zb-h1", "backward of weights"),  # the stage has two weights
    ],
)
def test_what_raises_in_the_backward_is_reported_with_stage_and_micro_batch(workers, phase, calls, schedule, words):
    error = failed(workers, train_until_failure, phase, "raise", calls, "", schedule)
    assert type(error) is StageError
    assert f"stage 2, micro-batch 1, {words}:" in str(error)
    assert str(error).count("the op gave up") == 1


SAID = {"kill": "SIGKILL", "stop": "is stopped", "hang": "made no progress for 2 s"}


@pytest.mark.slow
@pytest.mark.parametrize("how", SAID)
@pytest.mark.parametrize(
    ("schedule", "phase", "words"),
    [
        ("zb-v", "forward", r"\dF\d: forward"),
        ("zb-v", "weights", r"\dW\d: backward of weights"),
        ("interleaved", "backward", r"\d[BI]\d: backward"),
        ("searched", "backward", r"\d[BI]\d: backward"),
    ],
)
def test_a_rank_of_several_stages_or_of_a_searched_order_is_named(workers, tmp_path, schedule, phase, words, how):
    clock = tmp_path / "clock"
    error = failed(workers, train_in_many_stages, phase, how, 4, str(clock), schedule)
    assert time.monotonic() - float(clock.read_text()) <= (LIMIT_S if how == "kill" else 15)
    assert type(error) is WorkerError
    assert re.search(rf"rank \d \(stages? [\d, ]+\).*{SAID[how]}", str(error)), error
    assert re.search(words, str(error)), error


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "phase"), [("zb-v", "weights"), ("interleaved", "forward"), ("searched", "forward")]
)
def test_what_raises_there_is_reported_once(workers, schedule, phase):
    error = failed(workers, train_in_many_stages, phase, "raise", 4, "", schedule)
    assert type(error) is StageError and re.search(r"stage \d, micro-batch \d", str(error))
    assert str(error).count("the op gave up") == 1


@pytest.mark.slow
def test_after_a_failure_new_workers_train(workers):
    failed(workers, train_until_failure, "forward", "raise", 1, "")
    assert len(set(workers.run(healthy_step))) == 1


def test_a_stage_without_memory_is_named_on_all_ranks_with_what_to_do(pair):
    first, second = pair.run(without_memory)
    assert second.startswith("StageError: stage 1, micro-batch 0") and "take more stages or micro-batches" in second
    assert first.startswith("WorkerError: rank 1 failed first: StageError: stage 1, micro-batch 0")
