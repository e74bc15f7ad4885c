"""A run that plans and captures again and again keeps next to nothing of it."""

from __future__ import annotations

import gc
import linecache

import torch
from torch import nn
from torch.fx import graph_module

import autopart


def test_sources_of_code_that_a_capture_only_generates_are_not_kept() -> None:
    model, x = nn.Sequential(*[nn.Linear(4, 4) for _ in range(3)]), torch.ones(4, 4)
    with autopart.compile(
        model, "cpu:1", sample=(x, x), loss_fn=nn.MSELoss(), costs="analytic", micro_batches=2
    ) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        kept: list[int] = []
        for change in range(6):
            for number, parameter in enumerate(model.parameters()):
                parameter.requires_grad_(number >= 2 * (change % 3))
            pipe.replan(optimizer, steps=1000)
            optimizer.zero_grad()
            pipe.step((x, x))
            optimizer.step()
            gc.collect()
            kept.append(
                len(graph_module._loader.eval_cache) + sum(name.startswith("<eval") for name in linecache.cache)
            )
    assert kept[-1] <= kept[2] + 3 * 10, kept  # of the code of stages, whose lines an error names
