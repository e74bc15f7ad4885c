"""`pipe.full_parameters()`: the model has all values inside, and training goes on to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support.workers import Workers
from torch import nn

import autopart
from autopart.ir.errors import UsageError


def looked_at(
    options: dict[str, Any], block: bool = False
) -> tuple[list[float], dict[str, torch.Tensor], bool, list[str]]:
    """Return losses, the final state, whether the model had the state inside, and what was refused."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
    batch = torch.randn(8, 4), torch.randint(3, (8,))
    equal, refused = True, []
    with autopart.compile(
        model, "cpu:2", sample=batch, loss_fn=nn.functional.cross_entropy, costs="analytic", **options
    ) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.1)
        losses = []
        for _ in range(3):
            losses.append(pipe.step(batch).item())
            optimizer.step()
            optimizer.zero_grad()
            if block:
                state = pipe.state_dict()
                kept = {name: p.data_ptr() for name, p in pipe.named_parameters()}
                try:
                    with pipe.full_parameters():
                        equal &= all(torch.equal(t, state[name]) for name, t in model.state_dict().items())
                        try:
                            pipe.step(batch)
                        except UsageError as error:
                            refused.append(error.what)
                        with torch.no_grad():
                            model[0].weight.zero_()
                except UsageError as error:
                    refused.append(error.what)
                equal &= kept == {name: p.data_ptr() for name, p in pipe.named_parameters()}
        return losses, dict(pipe.state_dict()), equal, refused


def looked_and_wrote(options: dict[str, Any]) -> tuple[list[float], dict[str, torch.Tensor], bool, list[str]]:
    """Look at all values after every step, try a step inside, and write."""
    return looked_at(options, block=True)


# -- tests -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"stages": 2}, {"stages": 1, "replicas": 2, "zero": 1}], ids=["stages", "zero"])
def test_training_goes_on_exactly_after_a_look_at_all_values(pair: Workers, options: dict[str, Any]) -> None:
    plain = pair.run(looked_at, options)
    for (losses, state, _, _), (same, after, equal, refused) in zip(
        plain, pair.run(looked_and_wrote, options), strict=True
    ):
        assert losses == same and equal
        assert all(torch.equal(tensor, after[name]) for name, tensor in state.items())
        inside, written = (
            f"{text} inside pipe.full_parameters()" for text in ("the pipe is used", "0.weight was written to")
        )
        assert refused == [inside, written] * 3
