"""Asynchronous training on ranks, with the weights after every update."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import autopart
from autopart.extras.asynchronous.part import Asynchronous
from support.models.learners import LEARNERS

ROWS, WIDTH = 4, 6
Batch = tuple[torch.Tensor, torch.Tensor]


def net(stages: int) -> nn.Sequential:
    """A layer and its activation for each stage, in fp64, with the same numbers everywhere."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(stages)]
    return nn.Sequential(*layers).double()


def batches(count: int, rows: int = ROWS) -> list[Batch]:
    found = []
    for seed in range(count):
        generator = torch.Generator().manual_seed(seed)
        x, y = (torch.randn(rows, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
        found.append((x, y))
    return found


def sgd(params: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def adamw(params: list[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=0.01)


OPTIMIZERS = {"sgd": sgd, "adamw": adamw}


class Recorder:
    """In place of a scheduler of the learning rate: keeps the weights after every step."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.seen: list[list[torch.Tensor]] = []

    def step(self) -> None:
        self.seen.append([p.detach().clone() for p in self.parameters])


def options(stages: int, schedule: str, micros: int, **more: Any) -> dict[str, Any]:
    return {
        "loss_fn": nn.functional.mse_loss, "costs": "analytic", "recompute": "off", "replicas": 1, "stages": stages,
        "cuts": tuple(str(n) for n in range(1, stages)), "micro_batches": micros, "schedule": schedule, **more,
    }  # fmt: skip


def trained(
    count: int,
    schedule: str,
    micros: int,
    optimizer: str,
    replicas: Sequence[int],
    flushes: Sequence[int] = (),
    **more: Any,
) -> dict[str, Any]:
    """On every rank: losses, its stage, its weights after every update, versions held, and the state at the end.

    flushes: numbers of losses after which the pipeline is flushed.  more: options of compile.
    """
    torch.set_num_threads(1)
    stages, world, data = len(replicas), sum(replicas), batches(count)
    asked = options(stages, schedule, micros)
    if world > stages:
        asked |= {"replicas": tuple(replicas), "replica_policy": "turn"}
    asked |= more
    recorders: list[Recorder] = []

    def recorded(made: torch.optim.Optimizer) -> Recorder:
        recorders.append(Recorder(made))
        return recorders[0]

    with autopart.compile(net(stages), f"cpu:{world}", sample=data[0], **asked) as pipe:
        losses = []
        training = pipe.train(data, optimizer=OPTIMIZERS[optimizer], scheduler=recorded)
        for number, loss in enumerate(training):
            losses.append(loss.item())
            if number in flushes:
                pipe.flush()
        (stage,) = pipe.plan.decision.stages_of_rank(pipe.rank)
        (engine,) = pipe._core.part(Asynchronous).training._engines.values()
        held = {s: versions.most_held for s, versions in engine.versions.items()}
        names = [name for name, _ in pipe.named_parameters()]
        return {
            "losses": losses, "stage": stage, "names": names, "seen": recorders[0].seen, "held": held[stage],
            "state": pipe.state_dict(), "steps": pipe.steps,
        }  # fmt: skip


def interrupted() -> dict[str, Any]:
    """On every rank: training with calls in between, a smaller last batch, and batches on one rank alone."""
    torch.set_num_threads(1)
    data = [*batches(5), *batches(1, rows=2), *batches(2)]
    with autopart.compile(net(2), "cpu:2", sample=data[0], **options(2, "pipedream", 1)) as pipe:
        given = data if pipe.needs_data else [None] * len(data)
        losses, seen = [], {}
        for number, loss in enumerate(pipe.train(given, optimizer=sgd)):
            losses.append(loss.item())
            if number == 1:
                seen["evaluated"] = pipe.eval_loss(data[0]).item()
                seen["state"] = pipe.state_dict()
                seen["predicted"] = pipe.predict(data[0][0])
        seen |= {"losses": losses, "end": pipe.state_dict(), "steps": pipe.steps}
        pipe.flush()  # nothing is in flight
        again = [loss.item() for loss in pipe.train(data[:3], optimizer=sgd)]
        unfinished = iter(pipe.train([*data[:5], *data[:5]], optimizer=sgd))
        again.append(next(unfinished).item())
        pipe.adopt(pipe.plan)
        seen |= {"again": again, "after": error_of(lambda: list(unfinished))}
        return seen


def error_of(call: Any) -> tuple[str, str]:
    """The kind and the text of the error that a call raises."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return "", "nothing was raised"


def wrong_batches() -> dict[str, Any]:
    """On every rank: what is raised for batches that end early and for an iterator that fails, and what still works."""
    torch.set_num_threads(1)
    data = batches(6)

    def failing() -> Any:
        yield from data[:3]
        if pipe.rank:
            raise ValueError("no fourth batch")
        yield from data[3:]

    with autopart.compile(net(2), "cpu:2", sample=data[0], **options(2, "pipedream", 1)) as pipe:
        early = error_of(lambda: list(pipe.train(data[: 5 - pipe.rank], optimizer=sgd)))
        fails = error_of(lambda: list(pipe.train(failing(), optimizer=sgd)))
        state = pipe.state_dict()
        losses = [loss.item() for loss in pipe.train(data, optimizer=sgd)]
        return {"early": early, "fails": fails, "losses": losses, "state": state, "steps": pipe.steps}


def traced() -> list[str]:
    """On every rank: what it computed while three batches were trained."""
    torch.set_num_threads(1)
    with autopart.compile(net(2), "cpu:2", sample=batches(1)[0], **options(2, "pipedream", 1)) as pipe:
        with pipe.traced() as spans:
            list(pipe.train(batches(3), optimizer=sgd))
        ordered = sorted(spans, key=lambda span: span.start_ns)
        return [str(span.action) for span in ordered if span.action.kind in "FBU"]


def failing_stage() -> dict[str, Any]:
    """On every rank: what is raised when a batch cannot be computed on the last stage, and what is left afterwards."""
    torch.set_num_threads(1)
    make, given, loss_fn = LEARNERS["gpt"]
    stream = given(4)
    data = [next(stream) for _ in range(8)]
    data[3][1][0, 0] = 99  # there is no such token
    asked = options(2, "pipedream", 1) | {"loss_fn": loss_fn, "cuts": ()}
    with autopart.compile(make(), "cpu:2", sample=data[0], **asked) as pipe:
        raised = error_of(lambda: list(pipe.train(data, optimizer=sgd)))
        after = error_of(pipe.state_dict)
        return {"raised": raised, "after": after, "left": sorted(pipe.local_state_dict())}


def refused(given: nn.Module, asked: dict[str, Any], call: Any) -> tuple[str, str]:
    """The error that a call of a pipe raises on two ranks."""
    torch.set_num_threads(1)
    with autopart.compile(given, "cpu:2", sample=batches(1)[0], **asked) as pipe:
        return error_of(lambda: call(pipe))


def step(pipe: Any) -> Any:
    return pipe.step(batches(1)[0])


def clip(pipe: Any) -> Any:
    return pipe.clip_grad_norm_(1.0)


def train(pipe: Any) -> Any:
    return pipe.train(batches(2), optimizer=sgd)


def train_without_optimizer(pipe: Any) -> Any:
    return pipe.train(batches(2))


class Tied(nn.Module):
    """A layer whose weight is used on both stages."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(WIDTH, WIDTH).double() for _ in range(2))
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def learned(name: str, stages: int, schedule: str, micros: int, steps: int) -> tuple[list[float], float]:
    """On every rank: the losses of some steps with AdamW and a falling learning rate, and then that of other data."""
    torch.set_num_threads(1)
    make, given, loss_fn = LEARNERS[name]
    rows, stream = 16, given(16)
    data = [next(stream) for _ in range(steps)]
    asked = options(stages, schedule, micros) | {"loss_fn": loss_fn, "cuts": ()}

    def optimizer(params: list[torch.Tensor]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=3e-3)

    def falling(made: torch.optim.Optimizer) -> Any:
        return torch.optim.lr_scheduler.LinearLR(made, 1.0, 0.02, total_iters=steps)

    with autopart.compile(make(), f"cpu:{stages}", sample=data[0], **asked) as pipe:
        if schedule in ("pipedream", "pipedream-2bw"):
            losses = [loss.item() for loss in pipe.train(data, optimizer=optimizer, scheduler=falling)]
        else:
            losses, made = [], optimizer(list(pipe.parameters()))
            following = falling(made)
            for batch in data:
                made.zero_grad()
                losses.append(pipe.step(batch).item())
                made.step()
                following.step()
        held_out = given(rows, seed=2)
        evaluated = [pipe.eval_loss(next(held_out)).item() for _ in range(20)]
        return losses, sum(evaluated) / len(evaluated)
