"""`pipe.adopt` takes the model as it is, also where layers were frozen since the last step."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional as F

import autopart


def test_layers_frozen_since_the_last_step_are_no_other_model() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double()
    reference, batch = copy.deepcopy(model), (torch.randn(8, 6).double(), torch.randint(6, (8,)))
    with autopart.compile(
        model, "cpu:1", sample=batch, loss_fn=F.cross_entropy, micro_batches=4, costs="analytic"
    ) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        pipe.step(batch)
        optimizer.zero_grad()
        for own in (model, reference):
            own[0].requires_grad_(False)
        plan = autopart.plan(model, "cpu:1", sample=batch, loss_fn=F.cross_entropy, micro_batches=2, costs="analytic")
        pipe.adopt(plan, optimizer)
        assert len(pipe.plan.micro_rows) == 2
        loss = pipe.step(batch)
        expected = F.cross_entropy(reference(batch[0]), batch[1])
        expected.backward()
        assert abs(loss.item() - expected.item()) < 1e-6
        found = pipe.gradients()
        torch.testing.assert_close(found["2.weight"], reference[2].weight.grad)
        assert found.get("0.weight") is None
