"""A user's own asynchronous schedule with weight stashing, and a reference by hand; importable on the ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

import autopart
from autopart.passes.program.orders import Schedule
from autopart.passes.program.schedules import register

ROWS, WIDTH, MICROS, STEPS = 8, 6, 4, 3
ORDER = "0F0 0F1 1F0 1B0 0B0 1F1 1B1 0F2 0B1 1F2 1B2 0F3 0B2 1F3 1B3 0B3"

# -- what a user writes ------------------------------------------------------------------------------------------


def one_forward_one_backward(stages: int, micro_batches: int) -> list[list[str]]:
    """1F1B without a flush of its own (PipeDream, SOSP 2019, section 3.2)."""
    orders = []
    for stage in range(stages):
        ahead = min(micro_batches, stages - stage)
        order = [f"{stage}F{i}" for i in range(ahead)]
        for i in range(micro_batches):
            order += [f"{stage}B{i}"] + [f"{stage}F{i + ahead}"] * (i + ahead < micro_batches)
        orders.append(order)
    return orders


class Momentum:
    """Updates a stage after each backward, with one optimizer for each stage."""

    def __init__(self) -> None:
        self.optimizers: dict[tuple[str, ...], torch.optim.Optimizer] = {}

    def __call__(self, parameters: Mapping[str, Any]) -> None:
        optimizer = self.optimizers.setdefault(
            tuple(parameters), torch.optim.SGD(parameters.values(), lr=0.1, momentum=0.9)
        )
        optimizer.step()


def registered() -> Schedule:
    return register(Schedule("own_pipedream", one_forward_one_backward, synchronous=False, update=Momentum()))


# -- what is done with it ----------------------------------------------------------------------------------------

OPTIONS: dict[str, Any] = {
    "loss_fn": nn.functional.mse_loss, "costs": "analytic", "recompute": "off", "replicas": 1, "stages": 2,
    "cuts": ("2",), "micro_batches": MICROS,
}  # fmt: skip


def net() -> nn.Sequential:
    """Two stages of a layer and its activation, with the same numbers everywhere."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()).double()


def batch(seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(ROWS, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
    return x, y


def trained() -> tuple[list[float], dict[str, torch.Tensor]]:
    """On every rank: the losses of some steps, and the weights after them."""
    torch.set_num_threads(1)
    schedule, model = registered(), net()
    with autopart.compile(model, "cpu:2", sample=batch(0), schedule=schedule.name, **OPTIONS) as pipe:
        losses = [pipe.step(batch(step)).item() for step in range(STEPS)]
        return losses, pipe.state_dict()


def by_hand() -> tuple[list[float], dict[str, torch.Tensor]]:
    """The definition: stage s runs the forward of micro-batch m with its weights after m + s - 1 updates of the step at
    most, and the backward with the same weights."""
    model = net()
    stages = [model[:2], model[2:]]
    optimizers = [torch.optim.SGD(stage.parameters(), lr=0.1, momentum=0.9) for stage in stages]
    losses = []
    for step in range(STEPS):
        inputs, targets = (part.chunk(MICROS) for part in batch(step))
        sent: dict[int, torch.Tensor] = {}
        back: dict[int, torch.Tensor] = {}
        stashed: dict[tuple[int, int], Any] = {}
        total = 0.0
        for action in ORDER.split():
            stage, kind, micro = int(action[0]), action[1], int(action[2])
            if kind == "F":
                version = {name: p.detach().clone().requires_grad_() for name, p in stages[stage].named_parameters()}
                x = inputs[micro] if stage == 0 else sent[micro].detach().requires_grad_()
                y = torch.func.functional_call(stages[stage], version, (x,))
                stashed[stage, micro] = x, y, version
                if stage == 0:
                    sent[micro] = y
                continue
            x, y, version = stashed.pop((stage, micro))
            if stage == 1:
                loss = nn.functional.mse_loss(y, targets[micro])
                total += loss.item() / MICROS
                (loss / MICROS).backward()
                back[micro] = x.grad
            else:
                y.backward(back.pop(micro))
            for name, p in stages[stage].named_parameters():
                p.grad = version[name].grad
            optimizers[stage].step()
        losses.append(total)
    return losses, model.state_dict()
