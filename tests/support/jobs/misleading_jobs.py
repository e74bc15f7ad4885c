"""Training of models that could silently mislead a capture, until the pipe's results differ or it raises an error."""

from __future__ import annotations

import contextlib
import copy
import functools
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import autopart
from autopart.state.torch_calls import CALLS
from support.jobs.step_jobs import cluster, refusal_of
from support.models import misleading_models
from support.models.loss_models import LOSSES
from support.models.mask_models import MASKED
from support.models.misleading_models import ROWS, WIDTH, Annealed, Net

SCRIPTS = misleading_models.SCRIPTS | LOSSES | MASKED


def alone(name: str) -> tuple[list[float], list[dict[str, torch.Tensor]]]:
    """Return the losses and gradients of one process."""
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
    """Return the losses and gradients of a pipe of two stages until an error is raised, and that error."""
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
    """Return a pipe of two stages for `Net`."""
    return autopart.compile(model, cluster(), sample=ROWS, micro_batches=4, stages=2, costs="analytic", **options)


def other_batches() -> list[int]:
    """Return how often steps warn of different batches: with the same batch on every rank, with none on rank 1, and
    with another one there."""
    counts: list[int] = []
    for other in (ROWS, None, ROWS + 1):
        with warnings.catch_warnings(record=True) as found, opened(Net()) as pipe:
            warnings.simplefilter("always")
            for _ in range(2):
                pipe.step(other if pipe.rank == 1 else ROWS)
        counts.append(sum("ranks 0 and 1 were given different batches" in str(each.message) for each in found))
    return counts


def noticed() -> tuple[list[str], list[str], bool]:
    """Return what is told of calls of torch on the model of an open pipe, what is told where the values are there, and
    whether torch is as before afterwards."""
    before = [getattr(home, name) for home, name, _ in CALLS]
    with opened(Net()) as pipe:
        model = pipe.model
        with warnings.catch_warnings(record=True) as none:
            warnings.simplefilter("always")
            model.state_dict()  # no step was taken
            train(pipe, 1)
            pipe.state_dict()
            pipe.sync_model()
            model.state_dict()
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            train(pipe, 1)
            for _ in range(2):
                model.state_dict()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    told = [[str(each.message) for each in seen if each.filename == __file__] for seen in (found, none)]
    return told[0], told[1], before == [getattr(home, name) for home, name, _ in CALLS]


def train(pipe: autopart.Pipe, steps: int) -> list[float]:
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(pipe.step(ROWS).item())
        optimizer.step()
    return losses


def trained_alone(steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return the losses and the state of one process."""
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
    """Train one model in two successive pipes.

    Return the losses, the state after `sync_model`, and the state after the second pipe closed.
    """
    model = Net()
    with opened(model) as pipe:
        losses = train(pipe, first)
        pipe.sync_model()
        synced = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with opened(model) as pipe:
        losses += train(pipe, second)
    return losses, synced, model.state_dict()


def closed_without_sync() -> Any:
    """Return the parameters this rank trained and the number of elements of every tensor after close(sync=False)."""
    model = Net()
    pipe = opened(model)
    mine = [name for name, _ in pipe.named_parameters()]
    train(pipe, 1)
    pipe.close(sync=False)
    return mine, {name: tensor.numel() for name, tensor in model.state_dict().items()}


def step_after_close() -> autopart.AutopartError | None:
    """Return the error of a step of a closed pipe."""
    pipe = opened(Net())
    pipe.close()
    return refusal_of(lambda: pipe.step(ROWS))


class Dropped(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(self.run(x), 0.5).square().mean()


def resumed() -> Any:
    """Return the losses of four steps: in one pipe, in two pipes with a loaded state, and with the step number set by
    hand.
    """
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
    """Return the error when ranks 0 and 1 make different calls, and the loss of a step after it."""
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
    """Return the error of a step whose batch cannot be read on rank 1, and the loss of the next step."""
    with opened(Net()) as pipe:
        batch = {"x": ROWS, "bad": object()} if pipe.rank == 1 else {"x": ROWS}
        return refusal_of(lambda: pipe.step(batch)), pipe.step(ROWS).item()


def changed_on_one_rank() -> autopart.AutopartError | None:
    """Return the error of a step after the model changed on rank 1 only."""
    model = Annealed()
    with opened(model) as pipe:
        if pipe.rank == 1:
            model.beta = 0.9
        return refusal_of(lambda: pipe.step(ROWS))


@functools.lru_cache
def _table(rows: int) -> torch.Tensor:
    return torch.arange(rows, dtype=torch.float32)


class Cached(Net):
    """A model that fills a global dict and an lru_cache in forward()."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if "ones" not in CACHE:
            CACHE["ones"] = torch.ones(WIDTH)
        return (self.run(x) * CACHE["ones"] * _table(WIDTH)).square().mean()


def caches_after_a_capture() -> Any:
    """Return the types of the cached values after a capture and the model's loss."""
    model = Cached()
    with contextlib.suppress(autopart.AutopartError), opened(model) as pipe:
        pipe.step(ROWS)
    return [type(t).__name__ for t in (*CACHE.values(), _table(WIDTH))], model(ROWS).item()


def closure_optimizer() -> autopart.AutopartError | None:
    """Return the error when an optimizer with a closure updates a rank's parameters."""
    with opened(Net()) as pipe:
        optimizer = torch.optim.LBFGS(pipe.parameters())
        return refusal_of(lambda: optimizer.step(lambda: pipe.step(ROWS)))
