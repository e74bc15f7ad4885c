"""Checkpoints that go through a pipe over all ranks, and through another format before and behind it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint import state_dict as states

import autopart

ROWS = 7


class Net(nn.Module):
    """Layers whose sizes three ranks do not share evenly."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, ROWS), nn.BatchNorm1d(ROWS), nn.Linear(ROWS, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)).tanh()).square().mean()


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer | None, **options: Any) -> dict[str, Any]:
    """Return the state as `torch.distributed.checkpoint` takes it."""
    how = states.StateDictOptions(**options)
    state = {"model": states.get_model_state_dict(model, options=how)}
    if optimizer is not None:
        state["optim"] = states.get_optimizer_state_dict(model, optimizer, options=how)
    return state


def flat(state: Any, prefix: str = "") -> dict[str, Any]:
    """Return all leaves of a state by their path."""
    items = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else None
    if items is None:
        return {prefix: state}
    return {name: each for key, value in items for name, each in flat(value, f"{prefix}/{key}").items()}


def require_same(one: Any, other: Any) -> None:
    """Raise AssertionError unless two states are equal to the bit."""
    a, b = flat(one), flat(other)
    assert a.keys() == b.keys()
    for name, value in a.items():
        same = torch.equal(value, b[name]) if isinstance(value, torch.Tensor) else value == b[name]
        assert same, name


def sharded(folder: str, seed: int, load: bool, with_optimizer: bool) -> dict[str, Any]:
    """Shard a trained model over all ranks with FSDP, save it or load it from a folder; returns its whole state."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo")
    try:
        torch.manual_seed(seed)
        model = Net()
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * seed)
        for _ in range(2):
            optimizer.zero_grad()
            model(torch.randn(8, 4)).backward()
            optimizer.step()
        kept = optimizer if with_optimizer else None
        state = state_of(model, kept)
        if load:
            dcp.load(state, checkpoint_id=folder)
            states.set_model_state_dict(model, state["model"])
            if kept is not None:
                states.set_optimizer_state_dict(model, kept, state["optim"])
        else:
            dcp.save(state, checkpoint_id=folder)
        return state_of(model, kept, full_state_dict=True)
    finally:
        dist.destroy_process_group()


def through_a_pipe(model: nn.Module, sample: Any, folder: str, out: str, with_optimizer: bool) -> None:
    """Load a checkpoint into a pipe over all ranks, and save it."""
    options: Any = {"sample": sample, "costs": "analytic", "micro_batches": 2}
    world = int(os.environ["WORLD_SIZE"])
    with autopart.compile(model, f"cpu:{world}", stages=world, **options) as pipe:
        optimizer = torch.optim.AdamW(pipe.parameters(), lr=0.5) if with_optimizer else None
        pipe.load(folder, optimizer)
        pipe.save(out, optimizer)


def learner() -> tuple[nn.Module, nn.Module]:
    """Return a network of double precision, and its loss."""
    torch.manual_seed(0)
    layers = nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)
    return nn.Sequential(*layers).double(), nn.MSELoss()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the batch of a step of the learner."""
    generator = torch.Generator().manual_seed(step)
    return tuple(torch.randn(8, n, dtype=torch.float64, generator=generator) for n in (4, 2))  # type: ignore[return-value]


def optimizer_of(named: Any) -> torch.optim.Optimizer:
    """Return an optimizer with two groups.  named: names and parameters, of a plain model or of a pipe."""
    kinds: tuple[list[Any], list[Any]] = [], []
    for name, parameter in named:
        kinds[name.endswith("bias")].append(parameter)
    groups = [{"params": kinds[0], "weight_decay": 0.1}, {"params": kinds[1], "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=1e-2, amsgrad=True)


def plain_steps(file: Path, steps: range) -> list[float]:
    """Take these steps in plain PyTorch, from what `torch.save` wrote to a file, if it exists, and save to it."""
    net, loss_fn = learner()
    optimizer = optimizer_of(net.named_parameters())
    if file.exists():
        state = torch.load(file)
        net.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    losses = []
    for inputs, targets in map(batch, steps):
        optimizer.zero_grad()
        loss = loss_fn(net(inputs), targets)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict()}, file)
    return losses


def piped_steps(folder: str, steps: range) -> list[float]:
    """Take these steps in a pipe over all ranks, from a checkpoint in a folder, and save there again."""
    net, loss_fn = learner()
    world = int(os.environ["WORLD_SIZE"])
    options: Any = {"loss_fn": loss_fn, "costs": "analytic", "micro_batches": 2, "stages": world}
    with autopart.compile(net, f"cpu:{world}", sample=batch(0), **options) as pipe:
        optimizer = optimizer_of(pipe.named_parameters())
        pipe.load(folder, optimizer)
        losses = []
        for each in map(batch, steps):
            optimizer.zero_grad()
            losses.append(float(pipe.step(each)))
            optimizer.step()
        pipe.save(folder, optimizer)
    return losses
