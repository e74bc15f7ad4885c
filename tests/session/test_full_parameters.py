"""`pipe.full_parameters()`: the model has all values inside, and training goes on to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.jobs import full_parameter_jobs as jobs
from support.workers import Workers


@pytest.mark.parametrize("options", [{"stages": 2}, {"stages": 1, "replicas": 2, "zero": 1}], ids=["stages", "zero"])
def test_training_goes_on_exactly_after_a_look_at_all_values(pair: Workers, options: dict[str, Any]) -> None:
    plain = pair.run(jobs.looked_at, options)
    for (losses, state, _, _), (same, after, equal, refused) in zip(
        plain, pair.run(jobs.looked_and_wrote, options), strict=True
    ):
        assert losses == same and equal
        assert all(torch.equal(tensor, after[name]) for name, tensor in state.items())
        inside, written = (
            f"{text} inside pipe.full_parameters()" for text in ("the pipe is used", "0.weight was written to")
        )
        assert refused == [inside, written] * 3
