"""Training that is saved, and goes on from the checkpoint in another pipe, perhaps under another plan."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

import autopart


class Net(nn.Module):
    """A small model with dropout, batch statistics, a tied weight and a layer norm."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Embedding(24, 16)
        self.body = nn.Sequential(
            nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.2), nn.Linear(32, 16), nn.LayerNorm(16), nn.Linear(16, 16)
        )
        self.norm = nn.BatchNorm1d(16)
        self.head = nn.Linear(16, 24, bias=False)
        self.head.weight = self.embed.weight
        self.to(dtype)

    def forward(self, ids, labels):
        hidden = self.body(self.embed(ids)).mean(1)
        return nn.functional.cross_entropy(self.head(self.norm(hidden)), labels)


def batch(step: int) -> dict[str, torch.Tensor]:
    """Return the batch of a step: 8 rows of 5 tokens."""
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(24, (8, 5), generator=generator)
    return {"ids": ids, "labels": ids[:, 0]}


def model(seed: int, dtype: torch.dtype = torch.float32) -> Net:
    """Return a model with weights of a seed."""
    torch.manual_seed(seed)
    return Net(dtype)


OPTIMIZERS = {
    "sgd": lambda groups: torch.optim.SGD(groups, lr=0.05, momentum=0.9),
    "adam": lambda groups: torch.optim.Adam(groups, lr=1e-2),
    "adamw": lambda groups: torch.optim.AdamW(groups, lr=1e-2, amsgrad=True),
    "adafactor": lambda groups: torch.optim.Adafactor(groups, lr=1e-2),
    "rmsprop": lambda groups: torch.optim.RMSprop(groups, lr=1e-3, momentum=0.5, centered=True),
}


def trainer(pipe, kind: str = "adamw"):
    """Return an optimizer with two groups, and its scheduler.  pipe: a pipe or a plain model."""
    named = list(pipe.named_parameters())
    groups = [
        {"params": [p for _, p in named if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for _, p in named if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = OPTIMIZERS[kind](groups)
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=50)


def train(pipe, optimizer, scheduler, steps) -> list[float]:
    """Run these steps; returns the losses."""
    losses = []
    for step in steps:
        optimizer.zero_grad()
        losses.append(float(pipe.step(batch(step))))
        if not pipe.skipped:
            optimizer.step()
        scheduler.step()
    return losses


def final(pipe, optimizer) -> dict[str, torch.Tensor]:
    """Return the whole model's state, and this rank's state of the optimizer, by name."""
    state = dict(pipe.state_dict())
    for name, parameter in pipe.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            if isinstance(value, torch.Tensor):
                state[f"{key}/{name}"] = value.detach().clone()
    return state


def saved_and_resumed(folder: str, kind: str, before: dict, after: dict, *, wait: bool = True):
    """Train 6 steps and save after 3; then load in a new pipe and run the last 3 again.

    Returns the losses and final states of both, and `extra` as it came back."""
    with autopart.compile(model(1), f"cpu:{before.pop('world', 2)}", sample=batch(0), **before) as pipe:
        optimizer, scheduler = trainer(pipe, kind)
        train(pipe, optimizer, scheduler, range(3))
        pipe.save(folder, optimizer, scheduler, {"note": "third", "best": float("inf")}, wait=wait)
        losses = train(pipe, optimizer, scheduler, range(3, 6))
        state = final(pipe, optimizer)
    with autopart.compile(model(2), f"cpu:{after.pop('world', 2)}", sample=batch(0), **after) as pipe:
        optimizer, scheduler = trainer(pipe, kind)
        extra = pipe.load(folder, optimizer, scheduler)
        assert pipe.steps == 3
        again = train(pipe, optimizer, scheduler, range(3, 6))
        return losses, again, state, final(pipe, optimizer), extra


def tree(folder: str) -> list[str]:
    """Return the files under a folder."""
    root = Path(folder)
    return sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())


def optimizer_state(pipe, optimizer) -> dict[str, torch.Tensor]:
    """Return the optimizer state of all ranks by "key/parameter"."""
    mine = {
        f"{key}/{name}": value.detach().cpu().clone()
        for name, parameter in pipe.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
    }
    whole = {}
    for part in pipe.session.world.gather_objects(mine):
        whole |= part
    return whole


def moved(folder: str, kind: str, before: dict, after: list[dict]):
    """Train 3 steps under one plan and save; load under each of the others.

    Returns for each of these the names of the weights and of the optimizer state that are not equal to the bit."""
    with autopart.compile(model(1), sample=batch(0), **before) as pipe:
        optimizer, scheduler = trainer(pipe, kind)
        train(pipe, optimizer, scheduler, range(3))
        pipe.save(folder, optimizer, scheduler)
        weights, state, lr = dict(pipe.state_dict()), optimizer_state(pipe, optimizer), scheduler.get_last_lr()
    wrong = []
    for options in after:
        with autopart.compile(model(2), sample=batch(0), **options) as pipe:
            optimizer, scheduler = trainer(pipe, kind)
            pipe.load(folder, optimizer, scheduler)
            found = {**pipe.state_dict(), **optimizer_state(pipe, optimizer)}
            assert [group["lr"] for group in optimizer.param_groups] == lr == scheduler.get_last_lr()
        expected = {**weights, **state}
        assert len(state) > 8
        wrong.append([n for n in expected.keys() | found.keys() if not _same(expected.get(n), found.get(n))])
    return wrong


def _same(a, b) -> bool:
    return a is not None and b is not None and torch.equal(a, b)
