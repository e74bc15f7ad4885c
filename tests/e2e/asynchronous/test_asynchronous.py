"""Asynchronous training runs as defined: the weights of every stage after every update are those of the definition."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from support.jobs import asynchronous_jobs as jobs
from support.oracles.asynchronous import emulated, version
from support.workers import Workers


def require_equal(
    found: Sequence[dict[str, Any]],
    count: int,
    schedule: str,
    optimizer: str,
    replicas: Sequence[int],
    start: int = 0,
    micros: int = 1,
) -> None:
    """start: number of the batch before which the pipeline was flushed."""
    model, data = jobs.net(len(replicas)), jobs.batches(count)
    versions = None
    if start:
        versions = _restarted(replicas, start)
    elif schedule == "pipedream" and micros > 1:
        versions = _in_parts(len(replicas), micros)
    means = replicas if micros == 1 else (1,) * len(replicas)
    losses, history = emulated(list(model), data, jobs.OPTIMIZERS[optimizer], means, schedule, versions)
    for rank in found:
        torch.testing.assert_close(rank["losses"], losses, rtol=0, atol=1e-10)
        stage = rank["stage"]
        expected = [list(weights.values()) for weights in history[stage][1:]]
        assert len(rank["seen"]) == len(expected)
        torch.testing.assert_close(rank["seen"], expected, rtol=0, atol=1e-10)
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(rank["state"][name], tensor, rtol=0, atol=1e-10)
        assert rank["steps"] == count


def _restarted(replicas: Sequence[int], start: int) -> Callable[[int, int], int]:
    """Versions with a flush before batch `start`: all updates are made then, and counting begins again."""

    def made(stage: int, batch: int) -> int:
        if batch < start:
            return version(stage, batch, replicas, "pipedream")
        return start + version(stage, batch - start, replicas, "pipedream")

    return made


def _in_parts(stages: int, micros: int) -> Callable[[int, int], int]:
    """Versions of batches in micro-batches: the updates of all batches whose last micro-batch was among those that had
    come back, which are all but the last `stages - stage - 1`."""
    return lambda stage, batch: max(0, (batch * micros - (stages - stage - 1)) // micros)


@pytest.mark.parametrize(("schedule", "micros", "held"), [("pipedream", 1, [2, 1]), ("pipedream-2bw", 2, [2, 2])])
def test_the_weights_after_every_update_are_those_of_the_definition(
    pair: Workers, schedule: str, micros: int, held: list[int]
) -> None:
    found = pair.run(jobs.trained, 8, schedule, micros, "sgd", (1, 1))
    require_equal(found, 8, schedule, "sgd", (1, 1))
    assert [rank["held"] for rank in found] == held


def test_a_flush_between_batches_begins_again_with_the_newest_weights(pair: Workers) -> None:
    count, flushed_at = 8, 3
    found = pair.run(jobs.trained, count, "pipedream", 1, "adamw", (1, 1), (flushed_at - 1,))
    entered = len(found[0]["seen"])
    assert entered == count
    (start,) = {_restart(rank, count) for rank in found}
    for rank in found:
        assert start is not None
        require_equal([rank], count, "pipedream", "adamw", (1, 1), start)


def _restart(rank: dict[str, Any], count: int) -> int | None:
    """The number of the batch that was the first after the flush, as the losses tell it."""
    for start in range(1, count):
        model, data = jobs.net(2), jobs.batches(count)
        versions = _restarted((1, 1), start)
        losses, _ = emulated(list(model), data, jobs.adamw, (1, 1), "pipedream", versions)
        if torch.allclose(torch.tensor(losses), torch.tensor(rank["losses"]), rtol=0, atol=1e-12):
            return start
    return None


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(
    ("schedule", "micros", "replicas"),
    [
        ("pipedream", 1, (1, 1, 1, 1)),
        ("pipedream", 2, (1, 1, 1, 1)),
        ("pipedream", 1, (2, 1, 1)),
        ("pipedream", 1, (1, 2, 1)),
        ("pipedream", 1, (1, 1, 2)),
        ("pipedream", 1, (3, 1)),
        ("pipedream", 1, (2, 2)),
        ("pipedream-2bw", 4, (1, 1, 1, 1)),
        ("pipedream-2bw", 4, (2, 1, 1)),
        ("pipedream-2bw", 4, (2, 2)),
    ],
)
def test_four_ranks(workers: Workers, schedule: str, micros: int, replicas: tuple[int, ...], optimizer: str) -> None:
    found = workers.run(jobs.trained, 20, schedule, micros, optimizer, replicas)
    require_equal(found, 20, schedule, optimizer, replicas, micros=micros)


def test_other_calls_flush_and_other_batches_follow_a_flush(pair: Workers) -> None:
    first, other = pair.run(jobs.interrupted)
    assert first["losses"] == other["losses"] and len(first["losses"]) == 8 and first["steps"] == 8
    model, (x, y) = jobs.net(2), jobs.batches(1)[0]
    for rank in (first, other):
        model.load_state_dict(rank["state"])
        assert rank["evaluated"] == pytest.approx(torch.nn.functional.mse_loss(model(x), y).item(), abs=1e-12)
        torch.testing.assert_close(rank["predicted"], model(x), rtol=0, atol=1e-12)
        assert rank["after"][0] == "UsageError" and "ended by another plan" in rank["after"][1]
        for name, tensor in first["end"].items():
            torch.testing.assert_close(rank["end"][name], tensor, rtol=0, atol=0)
    model.load_state_dict(first["end"])
    assert first["again"][0] == pytest.approx(torch.nn.functional.mse_loss(model(x), y).item(), abs=1e-12)


def test_batches_that_end_early_or_fail_are_errors_on_all_ranks_and_training_can_go_on(pair: Workers) -> None:
    first, other = pair.run(jobs.wrong_batches)
    assert first["early"] == other["early"] and "ended before those of rank" in first["early"][1]
    assert first["fails"][0] == "WorkerError" and "no fourth batch" in first["fails"][1]
    assert other["fails"] == ("ValueError", "no fourth batch")
    assert first["losses"] == other["losses"] and len(first["losses"]) == 6


def test_what_is_played_can_be_traced(pair: Workers) -> None:
    assert [" ".join(played) for played in pair.run(jobs.traced)] == [
        "0F0 0F1 0B0 0U0 0F2 0B1 0U1 0B2 0U2",
        "1F0 1B0 1U0 1F1 1B1 1U1 1F2 1B2 1U2",
    ]


def test_a_stage_that_fails_ends_training_on_all_ranks(pair: Workers) -> None:
    first, last = pair.run(jobs.failing_stage)
    assert last["raised"][0] == "StageError" and "stage 1, micro-batch 3, forward" in last["raised"][1]
    assert first["raised"][0] == "WorkerError" and "Target 99 is out of bounds" in first["raised"][1]
    for rank in (first, last):
        assert rank["after"][0] == "RunError" and "Stages may be some updates apart" in rank["after"][1]
    assert first["left"] and last["left"] and first["left"] != last["left"]


@pytest.mark.parametrize(
    ("schedule", "call", "words"),
    [
        ("pipedream", jobs.step, ("pipe.step(batch) has no meaning", "pipe.train(batches, optimizer=")),
        ("pipedream", jobs.clip, ("clipping by the norm of all gradients has no meaning", "schedule='1f1b'")),
        ("pipedream", jobs.train_without_optimizer, ("no function that makes an optimizer", "optimizer=lambda params")),
        ("1f1b", jobs.train, ("needs an asynchronous schedule", "'pipedream' or 'pipedream-2bw'")),
    ],
)
def test_what_has_no_meaning_is_refused_with_what_to_use_instead(
    pair: Workers, schedule: str, call: Any, words: tuple[str, ...]
) -> None:
    for kind, text in pair.run(jobs.refused, jobs.net(2), jobs.options(2, schedule, 1), call):
        assert kind == "UsageError" and all(word in text for word in words), text


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"cuts": ("second",), "stages": 2}, ("first.weight, which several stages use", "keep its uses on one stage")),
        ({"cuts": ("second",), "stages": 2, "non_finite": "raise"}, ("several stages use",)),
    ],
)
def test_what_cannot_be_trained_is_refused_by_name(pair: Workers, more: dict[str, Any], words: tuple[str, ...]) -> None:
    for kind, text in pair.run(jobs.refused, jobs.Tied(), jobs.options(2, "pipedream", 1) | more, jobs.train):
        assert kind == "RefusedError" and all(word in text for word in words), text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("schedule", "micros", "replicas", "more"),
    [
        ("pipedream", 1, (2, 1, 1), {"replica_policy": "split"}),
        ("pipedream", 1, (1, 3), {"replica_policy": "split"}),
        ("pipedream-2bw", 2, (2, 2), {"replica_policy": "split"}),
        ("pipedream", 1, (1, 1, 1, 1), {"recompute": "all"}),
        ("pipedream-2bw", 3, (1, 1, 1, 1), {"recompute": "all"}),
        ("pipedream", 1, (1, 1, 1, 1), {"backend": "inductor"}),
    ],
)
def test_four_ranks_with_other_options(
    workers: Workers, schedule: str, micros: int, replicas: tuple[int, ...], more: dict[str, Any]
) -> None:
    found = workers.run(functools.partial(jobs.trained, **more), 12, schedule, micros, "adamw", replicas)
    require_equal(found, 12, schedule, "adamw", (1,) * len(replicas))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vgg", "gpt"])
def test_models_end_near_the_loss_of_synchronous_training(workers: Workers, name: str) -> None:
    for schedule, micros in (("pipedream", 1), ("pipedream-2bw", 4)):
        # Batch norm takes the statistics of a micro-batch.
        (losses, synchronous), *_ = workers.run(jobs.learned, name, 4, "1f1b", micros, 300)
        assert synchronous < 0.8 * losses[0]
        (_, found), *others = workers.run(jobs.learned, name, 4, schedule, micros, 300)
        print(f"{name}, {schedule}: {found:.4f}, synchronous {synchronous:.4f}")
        assert all(loss == found for _, loss in others)
        assert abs(found - synchronous) <= 0.03 * synchronous
