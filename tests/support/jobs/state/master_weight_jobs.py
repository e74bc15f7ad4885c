"""Training with fp32 master weights of bf16 parameters, compared with a hand-written loop in one process."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import autopart
from support.jobs.step_jobs import cluster

State = dict[str, torch.Tensor]
ROWS, MICROS, STEPS = 8, 4, 10


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Embedding(50, 16), nn.Linear(16, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 50)
    return nn.Sequential(*layers).bfloat16()


def loss_fn(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), target.flatten())


def batch(step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = torch.randint(0, 50, (2, ROWS, 8), generator=torch.Generator().manual_seed(step))
    return inputs, targets


def optimizer(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3)


def compiled(trained: nn.Module, on: str, **options: Any) -> autopart.Pipe:
    """Return a pipe with master weights."""
    asked = {"micro_batches": MICROS, "master_weights": True, "costs": "analytic", "loss_fn": loss_fn, **options}
    return autopart.compile(trained, on, **{"sample": batch(), **asked})


@dataclass
class ByHand:
    """A hand-written training loop with master weights in one process.

    Before each step the master weights are rounded into the model. A gradient is summed in fp32 by each replica in the
    order of the micro-batches, and then over replicas.
    """

    replicas: int = 1
    trained: nn.Module = field(default_factory=model)
    masters: dict[str, nn.Parameter] = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        self.masters = {n: nn.Parameter(p.detach().float()) for n, p in self.trained.named_parameters()}
        self.optimizer = optimizer(self.masters.values())

    def round(self) -> None:
        with torch.no_grad():
            for name, parameter in self.trained.named_parameters():
                parameter.copy_(self.masters[name])

    def gradients(self, step: int) -> None:
        """Add the gradients of a batch to those of the master weights."""
        self.round()
        sums: list[State] = [{} for _ in range(self.replicas)]
        pieces = list(zip(*(tensor.chunk(MICROS * self.replicas) for tensor in batch(step)), strict=True))
        for place, (inputs, targets) in enumerate(pieces):
            self.trained.zero_grad()
            loss_fn(self.trained(inputs), targets).backward(torch.tensor(1 / len(pieces)))
            own = sums[place % self.replicas]
            for name, parameter in self.trained.named_parameters():
                own[name] = own[name] + parameter.grad.float() if name in own else parameter.grad.float()
        for name, master in self.masters.items():
            total = sum(own[name] for own in sums)
            master.grad = total if master.grad is None else master.grad + total

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.round()


def by_hand(steps: int, replicas: int = 1) -> ByHand:
    """Return the hand-written loop after `steps` steps."""
    run = ByHand(replicas)
    for step in range(steps):
        run.gradients(step)
        run.update()
    return run


def differing(pipe: autopart.Pipe, expected: ByHand) -> list[str]:
    """Return the names of the model values and master weights of a pipe that are not bit-equal. Collective."""
    state = pipe.state_dict()
    masters = state._metadata["autopart"]["masters"]
    values = [n for n, p in expected.trained.named_parameters() if not torch.equal(state[n], p)]
    return values + [f"master of {n}" for n, m in expected.masters.items() if not torch.equal(masters[n], m)]


def trained(steps: int = STEPS, replicas: int = 1, **options: Any) -> tuple[list[str], list[str], State]:
    """Train, and return the differences at the end and after closing, and this rank's master weights."""
    mine, expected = model(), by_hand(steps, replicas)
    with compiled(mine, cluster(), replicas=replicas, **options) as pipe:
        driver = optimizer(pipe.parameters())
        for step in range(steps):
            pipe.step(batch(step))
            assert all(p.dtype == p.grad.dtype == torch.float32 for _, p in pipe.named_parameters())
            driver.step()
            driver.zero_grad()
        wrong = differing(pipe, expected)
        masters = {name: p.detach().clone() for name, p in pipe.named_parameters()}
    left = [n for n, p in expected.trained.named_parameters() if not torch.equal(dict(mine.named_parameters())[n], p)]
    return wrong, left, masters


def adopted(first: dict[str, Any], second: dict[str, Any], replicas: int = 1) -> list[str]:
    """Train under one plan, change the plan within an accumulated step, train on, and return the differences."""
    plans = [
        autopart.plan(
            model(), cluster(), sample=batch(), loss_fn=loss_fn, costs="analytic", micro_batches=MICROS,
            replicas=replicas, schedule="1f1b", **asked,
        )
        for asked in (first, second)
    ]  # fmt: skip
    expected = ByHand(replicas)
    expected.optimizer = torch.optim.SGD(expected.masters.values(), lr=0.1)
    with compiled(model(), cluster(), plan=plans[0], micro_batches=None) as pipe:
        for step in range(6):
            pipe.step(batch(step))
            expected.gradients(step)
            if step == 2:
                pipe.adopt(plans[1])
                continue
            driver = torch.optim.SGD(pipe.parameters(), lr=0.1)
            driver.step()
            driver.zero_grad()
            expected.update()
        return differing(pipe, expected)


def resumed(when: str, **options: Any) -> list[str]:
    """Train, save and load everything through a file, train on in another pipe, and return the differences.

    when: the state is loaded "before" or "after" the pipe has seen a batch.
    """
    replicas = options.get("replicas", 1)
    with compiled(model(), cluster(), **options) as pipe:
        driver = optimizer(pipe.parameters())
        for step in range(3):
            pipe.step(batch(step))
            driver.step()
            driver.zero_grad()
        file = io.BytesIO()
        torch.save({"model": pipe.state_dict(), "optimizer": driver.state_dict()}, file)
    file.seek(0)
    kept = torch.load(file, weights_only=True)
    with compiled(model(), cluster(), sample=batch() if when == "after" else None, **options) as pipe:
        pipe.load_state_dict(kept["model"])
        if when == "before":
            pipe.step(batch())
            pipe.zero_grad()
            pipe.steps = 3
        driver = optimizer(pipe.parameters())
        driver.load_state_dict(kept["optimizer"])
        for step in range(3, 6):
            pipe.step(batch(step))
            driver.step()
            driver.zero_grad()
        return differing(pipe, by_hand(6, replicas))
