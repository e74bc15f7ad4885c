"""Asynchronous training runs as defined: the weights of every stage after every update are those of the definition."""

from __future__ import annotations

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
