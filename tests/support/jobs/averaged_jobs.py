"""Averages of the weights of a pipe: trained, applied, saved, and loaded under another plan."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import swa_utils

import autopart
from autopart.ir.errors import UsageError

LOSS = nn.functional.cross_entropy
Kept = tuple[int, dict[str, torch.Tensor], dict[str, torch.Tensor], float]
"""Updates of the averages, the averaged state, the trained state, and the loss in eval mode under the averages."""


def net(seed: int = 0) -> nn.Module:
    """Return a model in fp64 with batch statistics and a frozen parameter."""
    torch.manual_seed(seed)
    made = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    made[2].bias.requires_grad_(False)
    return made


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the batch of a step."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 4, generator=generator, dtype=torch.float64), torch.randint(3, (8,), generator=generator)


def half(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the batch of a step in bfloat16."""
    return batch(step)[0].bfloat16(), batch(step)[1]


def averaging(kind: str) -> dict[str, Any]:
    """Return the options of AveragedModel for one way of averaging."""
    return {
        "swa": {},
        "ema": {"multi_avg_fn": swa_utils.get_ema_multi_avg_fn(0.8), "use_buffers": True},
        "own": {"avg_fn": lambda average, value, count: average * 0.75 + value * 0.25},
    }[kind]


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    """Return an optimizer without state that a checkpoint would have to carry."""
    return torch.optim.SGD(parameters, lr=0.2)


def plainly_averaged(kind: str) -> list[Kept]:
    """Train 3 steps, then 3 more, in one process with torch's AveragedModel; return what there is after each three."""
    model = net()
    averaged, optimizer = swa_utils.AveragedModel(model, **averaging(kind)), optimizer_of(model.parameters())
    found: list[Kept] = []
    for step in range(6):
        optimizer.zero_grad()
        LOSS(model(batch(step)[0]), batch(step)[1]).backward()
        optimizer.step()
        averaged.update_parameters(model)
        if step % 3 == 2:
            averaged.module.eval()
            with torch.no_grad():
                loss = LOSS(averaged.module(batch(9)[0]), batch(9)[1]).item()
            states = ({n: t.clone() for n, t in m.state_dict().items()} for m in (averaged.module, model))
            found.append((int(averaged.n_averaged), *states, loss))
    return found


def averaged(folder: str, kind: str, plans: list[dict[str, Any]]) -> list[Kept]:
    """Train 3 steps under each of two plans, with a checkpoint between them; return what there is after each three."""
    found: list[Kept] = []
    for number, options in enumerate(plans):
        model = net(number)
        with autopart.compile(model, sample=batch(0), loss_fn=LOSS, costs="analytic", **options) as pipe:
            averages, optimizer = autopart.AveragedModel(pipe, **averaging(kind)), optimizer_of(pipe.parameters())
            if number:
                pipe.load(folder, optimizer)
            for step in range(3 * number, 3 * number + 3):
                optimizer.zero_grad()
                pipe.step(batch(step))
                optimizer.step()
                averages.update_parameters(pipe)
            with averages.applied():
                loss, state = pipe.eval_loss(batch(9)).item(), dict(pipe.state_dict())
            pipe.save(folder, optimizer)
            found.append((int(averages.n_averaged), state, dict(pipe.state_dict()), loss))
    return found


def refused(options: dict[str, Any]) -> tuple[list[str], bool, bool]:
    """Return what is refused inside and outside the block, whether training goes on with the trained values after it,
    and whether a pipe that is closed inside leaves the averages in the model."""
    said = []
    with autopart.compile(net(), sample=batch(0), loss_fn=LOSS, costs="analytic", **options) as pipe:
        optimizer = optimizer_of(pipe.parameters())
        averages = autopart.AveragedModel(pipe)
        averages.update_parameters()
        pipe.step(batch(0))
        optimizer.step()
        trained = dict(pipe.state_dict())
        try:
            with averages.applied():
                for call in (
                    lambda: pipe.step(batch(1)),
                    lambda: pipe.load("nowhere"),
                    averages.update_parameters,
                    averages.applied().__enter__,
                ):
                    try:
                        call()
                    except UsageError as error:
                        said.append(error.what)
                optimizer.step()
        except UsageError as error:
            said.append(error.what)
        try:
            pipe.adopt(pipe.plan)
        except UsageError as error:
            said.append(error.what)
        unchanged = all(torch.equal(tensor, trained[name]) for name, tensor in pipe.state_dict().items())
        pipe.step(batch(1))
        with averages.applied():
            pipe.sync_model()
        with averages.applied():
            pipe.close()
        start = net().state_dict()
        averaged = {name: tensor for name, tensor in pipe.model.state_dict().items() if "num_" not in name}
        return said, unchanged, all(torch.equal(tensor, start[name]) for name, tensor in averaged.items())
