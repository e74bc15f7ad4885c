"""One training run, over the ranks of a pipeline and in one process: same model, same data, same optimizer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from autopart.api import compile, verify
from autopart.cli.demo.models import gpt2
from autopart.cli.demo.text import Batches, library_bytes
from autopart.session.compare import Verification


@dataclass(frozen=True, slots=True)
class Setting:
    """What is trained.  compared: steps that are repeated in one process; every: steps between progress lines."""

    stages: int = 2
    steps: int = 200
    compared: int = 40
    every: int = 20
    layers: int = 4
    width: int = 128
    rows: int = 16
    seq: int = 64
    micro_batches: int = 4
    learning_rate: float = 3e-3
    warm_up: int = 10
    seed: int = 0

    @property
    def cluster(self) -> str:
        """A process per stage."""
        return f"cpu:{self.stages}"

    def model(self) -> nn.Module:
        """The same weights at every call."""
        torch.manual_seed(self.seed)
        return gpt2(self.layers, self.width, self.seq)

    def batches(self) -> Batches:
        """The data: batch i is the same everywhere."""
        return Batches(library_bytes(), self.rows, self.seq, self.seed)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """AdamW; a rank passes its own parameters."""
        return torch.optim.AdamW(parameters, lr=self.learning_rate, betas=(0.9, 0.95))

    def rate(self, step: int) -> float:
        """Learning rate of a step: a short warm-up, then constant."""
        return self.learning_rate * min(1.0, (step + 1) / self.warm_up)


@dataclass(frozen=True, slots=True)
class Run:
    """A finished run.  first_step: the first step against one process, for a run over ranks."""

    losses: tuple[float, ...]
    seconds: float
    first_step: Verification | None = None


def over_ranks(setting: Setting) -> Run:
    """Runs on every rank: the pipeline, trained.  Rank 0 prints."""
    model, batches = setting.model(), setting.batches()
    stages, micros = setting.stages, setting.micro_batches  # as many stages as ranks: replicas might be faster
    with compile(model, setting.cluster, sample=batches[0], stages=stages, micro_batches=micros) as pipe:
        say = _printer(pipe.rank == 0)
        say(pipe.explain())
        say("first step against one process ...")
        first_step = verify(model, setting.cluster, sample=batches[0], plan=pipe.plan)
        optimizer = setting.optimizer(pipe.parameters())

        def step(number: int) -> float:
            loss = pipe.step(batches[number])
            pipe.clip_grad_norm_(1.0)
            _update(optimizer, setting.rate(number))
            return loss.item()

        losses, seconds = _loop(setting, setting.steps, step, say)
    return Run(losses, seconds, first_step)


def in_one_process(setting: Setting) -> Run:
    """The plain model in this process, for the steps that are compared."""
    model, batches = setting.model(), setting.batches()
    optimizer = setting.optimizer(model.parameters())

    def step(number: int) -> float:
        loss: torch.Tensor = model(**batches[number]).loss
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        _update(optimizer, setting.rate(number))
        return loss.item()

    losses, seconds = _loop(setting, min(setting.compared, setting.steps), step, _printer(False))
    return Run(losses, seconds)


def _update(optimizer: torch.optim.Optimizer, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()
    optimizer.zero_grad()


def _loop(
    setting: Setting, steps: int, step: Callable[[int], float], say: Callable[[str], None]
) -> tuple[tuple[float, ...], float]:
    losses: list[float] = []
    began = last = time.perf_counter()
    for number in range(steps):
        losses.append(step(number))
        if number == 0 or (number + 1) % setting.every == 0 or number + 1 == steps:
            now = time.perf_counter()
            done = 1 if number == 0 else (number % setting.every) + 1 - (number < setting.every)
            rate = done * setting.rows * setting.seq / (now - last)
            say(f"step {number + 1:4d}   loss {losses[-1]:.3f}   {rate:7.0f} tokens/s")
            last = now
    return tuple(losses), time.perf_counter() - began


def _printer(speaks: bool) -> Callable[[str], None]:
    def say(line: str) -> None:
        if speaks:
            print(line, flush=True)

    return say
