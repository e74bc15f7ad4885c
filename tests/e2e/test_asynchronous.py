"""Asynchronous training runs as defined: the weights of every stage after every update are those of the definition."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from support.jobs import asynchronous_jobs as jobs
from support.oracles.asynchronous import emulated
from support.workers import Workers


def require_equal(
    found: Sequence[dict[str, Any]], count: int, schedule: str, optimizer: str, replicas: Sequence[int]
) -> None:
    model, data = jobs.net(len(replicas)), jobs.batches(count)
    losses, history = emulated(list(model), data, jobs.OPTIMIZERS[optimizer], replicas, schedule)
    for rank in found:
        torch.testing.assert_close(rank["losses"], losses, rtol=0, atol=1e-10)
        stage = rank["stage"]
        expected = [list(weights.values()) for weights in history[stage][1:]]
        assert len(rank["seen"]) == len(expected)
        torch.testing.assert_close(rank["seen"], expected, rtol=0, atol=1e-10)
        for name, tensor in model.state_dict().items():
            torch.testing.assert_close(rank["state"][name], tensor, rtol=0, atol=1e-10)
        assert rank["steps"] == count


@pytest.mark.parametrize(("schedule", "micros", "held"), [("pipedream", 1, [2, 1]), ("pipedream-2bw", 2, [2, 2])])
def test_the_weights_after_every_update_are_those_of_the_definition(
    pair: Workers, schedule: str, micros: int, held: list[int]
) -> None:
    found = pair.run(jobs.trained, 8, schedule, micros, "sgd", (1, 1))
    require_equal(found, 8, schedule, "sgd", (1, 1))
    assert [rank["held"] for rank in found] == held
