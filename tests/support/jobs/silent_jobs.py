"""Training of models that fool a capture, on every rank: until the pipe differs from the plain model, or refuses."""

from __future__ import annotations

import copy
import functools
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import autopart
from support.jobs.step_jobs import cluster
from support.models import silent_models
from support.models.loss_models import LOSSES
from support.models.mask_models import MASKED
from support.models.silent_models import ROWS, WIDTH, Annealed, Net

SCRIPTS = silent_models.SCRIPTS | LOSSES | MASKED


def alone(name: str) -> tuple[list[float], list[dict[str, torch.Tensor]]]:
    """Losses and gradients of the plain model; of a case with batch statistics on whole batches."""
    script = SCRIPTS[name]
    model = script.model()
    losses, gradients = [], []
    for step, batch in enumerate(script.batches):
        script.change.get(step, lambda model: None)(model)
        model.zero_grad()
        args, kwargs = ((), batch) if isinstance(batch, dict) else (batch if isinstance(batch, tuple) else (batch,), {})
        loss = model(*args, **kwargs)
        loss.backward()
        losses.append(loss.item())
        gradients.append({n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None})
    return losses, gradients


def piped(name: str) -> tuple[list[float], list[dict[str, Any]], autopart.AutopartError | None]:
    """The same in a pipe of two stages: losses and gradients until something is refused, and the refusal."""
    script = SCRIPTS[name]
    model = copy.deepcopy(script.model())
    losses: list[float] = []
    gradients: list[dict[str, Any]] = []
    pipe = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", autopart.CaptureWarning)
            pipe = autopart.compile(
                model, cluster(), sample=script.batches[0], micro_batches=script.micros, stages=2, costs="analytic",
                **script.options,
            )  # fmt: skip
            for step, batch in enumerate(script.batches):
                script.change.get(step, lambda model: None)(model)
                for parameter in pipe.parameters():
                    parameter.grad = None
                loss = pipe.step(batch) if not isinstance(batch, tuple) else pipe.step(*batch)
                losses.append(loss.item())
                gradients.append(pipe.gradients())
    except autopart.AutopartError as error:
        return losses, gradients, error
    finally:
        if pipe is not None:
            pipe.close()
    return losses, gradients, None


# -- what stays after training ---------------------------------------------------------------------------------------

CACHE: dict[str, Any] = {}


def opened(model: nn.Module, **options: Any) -> autopart.Pipe:
    """A pipe of two stages for `Net`."""
    return autopart.compile(model, cluster(), sample=ROWS, micro_batches=4, stages=2, costs="analytic", **options)


def train(pipe: autopart.Pipe, steps: int) -> list[float]:
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(pipe.step(ROWS).item())
        optimizer.step()
    return losses


def trained_alone(steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and state of the plain model."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(ROWS)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    return losses, model.state_dict()


def trained_and_compiled_again(first: int, second: int) -> Any:
    """Losses over two pipes of one model, its state after `sync_model`, and after the second closed."""
    model = Net()
    with opened(model) as pipe:
        losses = train(pipe, first)
        pipe.sync_model()
        synced = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with opened(model) as pipe:
        losses += train(pipe, second)
    return losses, synced, model.state_dict()


def closed_without_sync() -> Any:
    """What this rank trained, and how many elements every tensor of the model has afterwards."""
    model = Net()
    pipe = opened(model)
    mine = [name for name, _ in pipe.named_parameters()]
    train(pipe, 1)
    pipe.close(sync=False)
    return mine, {name: tensor.numel() for name, tensor in model.state_dict().items()}


def step_after_close() -> autopart.AutopartError | None:
    pipe = opened(Net())
    pipe.close()
    try:
        pipe.step(ROWS)
    except autopart.AutopartError as error:
        return error
    return None


class Dropped(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.run(x), 0.5).square().mean()


def resumed() -> Any:
    """Losses of four steps, of two and two after the state was loaded, and with the steps set by hand."""
    with opened(Dropped()) as pipe:
        whole = [pipe.step(ROWS).item() for _ in range(4)]
    with opened(Dropped()) as pipe:
        parted = [pipe.step(ROWS).item() for _ in range(2)]
        state = pipe.state_dict()
    with opened(Dropped()) as pipe:
        pipe.load_state_dict(state)
        assert pipe.steps == 2
        rest = [pipe.step(ROWS).item() for _ in range(2)]
    with opened(Dropped()) as pipe:
        pipe.steps = 2
        by_hand = [pipe.step(ROWS).item() for _ in range(2)]
    return whole, parted + rest, parted + by_hand


def different_calls(first: str, second: str) -> Any:
    """What is raised when rank 0 makes one call and rank 1 another, and the loss of a step after it."""
    pipe = opened(Net())
    call = first if pipe.rank == 0 else second
    calls = {"step": lambda: pipe.step(ROWS), "eval_loss": lambda: pipe.eval_loss(ROWS), "close": pipe.close}
    try:
        calls.get(call, pipe.state_dict)()
    except autopart.AutopartError as error:
        if "close" in (first, second):
            pipe.close(sync=False)
            return error, None
        loss = pipe.step(ROWS).item()
        pipe.close()
        return error, loss
    return None, None


def unreadable_on_one_rank() -> Any:
    with opened(Net()) as pipe:
        try:
            pipe.step({"x": ROWS, "bad": object()} if pipe.rank == 1 else {"x": ROWS})
        except autopart.AutopartError as error:
            return error, pipe.step(ROWS).item()
    return None, None


def changed_on_one_rank() -> autopart.AutopartError | None:
    model = Annealed()
    with opened(model) as pipe:
        if pipe.rank == 1:
            model.beta = 0.9
        try:
            pipe.step(ROWS)
        except autopart.AutopartError as error:
            return error
    return None


@functools.lru_cache
def _table(rows: int) -> torch.Tensor:
    return torch.arange(rows, dtype=torch.float32)


class Cached(Net):
    """Fills a global table and a cache of Python in forward()."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if "ones" not in CACHE:
            CACHE["ones"] = torch.ones(WIDTH)
        return (self.run(x) * CACHE["ones"] * _table(WIDTH)).square().mean()


def caches_after_a_capture() -> Any:
    model = Cached()
    try:
        with opened(model) as pipe:
            pipe.step(ROWS)
    except autopart.AutopartError:
        pass
    return [type(t).__name__ for t in (*CACHE.values(), _table(WIDTH))], model(ROWS).item()


def closure_optimizer() -> autopart.AutopartError | None:
    """What is raised when an optimizer with a closure drives a rank's parameters."""
    with opened(Net()) as pipe:
        optimizer = torch.optim.LBFGS(pipe.parameters())
        try:
            optimizer.step(lambda: pipe.step(ROWS))
        except autopart.AutopartError as error:
            return error
    return None
