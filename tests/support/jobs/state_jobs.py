"""Jobs of the tests of a pipe's state, which run on every rank of a pool."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import nn

import autopart
from support.jobs.failing_jobs import CASE, arm
from support.jobs.step_jobs import cluster, compiled
from support.models.zoo import CASES


def _stack() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


DATA = (torch.linspace(-1, 1, 32).view(8, 4), torch.ones(8, 4))


def _opened(model: nn.Module, **options: Any) -> autopart.Pipe:
    return autopart.compile(
        model, cluster(), sample=DATA, loss_fn=nn.functional.mse_loss, costs="analytic", micro_batches=2,
        **{"stages": 2, **options},
    )  # fmt: skip


def _train(pipe: autopart.Pipe, steps: int) -> None:
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    for _ in range(steps):
        pipe.step(DATA)
        optimizer.step()
        optimizer.zero_grad()


def older_closed_last() -> Any:
    """Return the model's state after the newer of two pipes was closed and after the older one was closed too."""
    model = _stack()
    first = _opened(model, cuts=["4"])
    second = _opened(model, cuts=["2"])
    _train(second, 2)
    second.close()
    synced = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    first.close()
    return synced, dict(model.state_dict())


def parts_after_failure() -> Any:
    """Return the state before a failing step, this rank's part of it afterwards, and what the closed model holds."""
    batch = CASE.batch(8)
    pipe = compiled(CASE, CASE.model(), batch, cuts=["layers.2"], micro_batches=2)
    pipe.step(batch)
    before = pipe.state_dict()
    arm("forward", "raise", 2)
    with contextlib.suppress(autopart.RunError):
        pipe.step(batch)
    part = pipe.local_state_dict()
    model = pipe.model
    pipe.close()
    return dict(before), dict(part), {name for name, tensor in model.state_dict().items() if tensor.numel()}


def one_idle() -> int:
    """Return how many numbers this rank's optimizer updates when the plan uses only one of two ranks."""
    with _opened(_stack(), stages=1, replicas=1) as pipe:
        optimizer = torch.optim.AdamW([parameter for _, parameter in pipe.named_parameters()])
        pipe.step(DATA)
        optimizer.step()
        return sum(parameter.numel() for parameter in pipe.parameters())


def averaged() -> Any:
    """Return the exponential moving average over three steps, gathered from the ranks and computed in one process."""
    model, plain = _stack(), _stack()
    with _opened(model) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        average = {name: parameter.detach().clone() for name, parameter in pipe.named_parameters()}
        for _ in range(3):
            pipe.step(DATA)
            optimizer.step()
            optimizer.zero_grad()
            for name, parameter in pipe.named_parameters():
                average[name].lerp_(parameter.detach(), 0.5)
        with torch.no_grad():
            for name, parameter in pipe.named_parameters():
                parameter.copy_(average[name])
        found = dict(pipe.state_dict())
    averages = torch.optim.swa_utils.AveragedModel(plain, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5))
    averages.n_averaged += 1  # otherwise the first update replaces the average
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for _ in range(3):
        nn.functional.mse_loss(plain(DATA[0]), DATA[1]).backward()
        optimizer.step()
        optimizer.zero_grad()
        averages.update_parameters(plain)
    return found, dict(averages.module.state_dict())


class Constant(nn.Module):
    """A model that multiplies by a tensor created in forward() and by a plain tensor attribute."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = (nn.Linear(4, 4) for _ in range(3))
        self.scales = torch.tensor([1.0, 2.0, 3.0, 4.0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.middle(self.first(x)) * torch.tensor([1.0, 0.5, 2.0, 1.0]) * self.scales
        return self.last(x).square().mean()


def constants_adopted() -> Any:
    """Return the error of adopting another cut, and the losses before and after it."""
    options = {"costs": "analytic", "micro_batches": 2, "stages": 2}
    sample = DATA[0]
    other = autopart.plan(Constant(), cluster(), sample=sample, cuts=["middle"], **options)
    with autopart.compile(Constant(), cluster(), sample=sample, cuts=["last"], **options) as pipe:
        losses, error = [pipe.step(sample).item()], ""
        try:
            pipe.adopt(other)
        except Exception as raised:
            error = repr(raised)
        losses.append(pipe.step(sample).item())
        return error, losses


def clipped_by_torch() -> Any:
    """What torch's functions that clip gradients raise over the parameters of two stages, "" for nothing."""
    found = []
    with _opened(_stack(), cuts=["2"]) as pipe:
        pipe.step(DATA)
        for clip in (torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_):
            try:
                clip(pipe.parameters(), 1.0)
                found.append("")
            except autopart.UsageError as error:
                found.append(error.fix)
    return found


def saved_pretrained(folder: str) -> Any:
    """The state of a model of transformers that rank 0 saved between two steps, and the losses around that."""
    case = CASES["llama"]
    model, batch = case.model(), case.data(4, torch.float32)
    options: Any = {"costs": "analytic", "micro_batches": 2, "stages": 2}
    losses = []
    with autopart.compile(model, cluster(), sample=batch, **options) as pipe:
        optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
        for _ in range(2):
            losses.append(pipe.step(batch).item())
            optimizer.step()
            optimizer.zero_grad()
            pipe.save_pretrained(folder)
        losses.append(pipe.step(batch).item())
        state = pipe.state_dict()
    return state, losses
