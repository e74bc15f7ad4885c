"""PipeDream and PipeDream-2BW by their definition, in one process: no pipeline, only versions of the weights.

Batch t runs on stage s, forward and backward, with the weights after `version(s, t)` updates of that stage; its
gradient goes into the stage's next update, alone or as a mean with those of the batches beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

Weights = dict[str, torch.Tensor]


def version(stage: int, batch: int, replicas: Sequence[int], schedule: str) -> int:
    """The number of updates in the weights that a batch uses on a stage.

    pipedream: a replica has begun ceil(R / r) of its batches before the first one comes back, with R replicas from this
    stage on and r of this stage (SOSP 2019, section 3.2); it has made an update for each that came back since.
    pipedream-2bw: those of the batches before, but the last (ICML 2021, section 3.1).
    """
    if schedule == "pipedream-2bw":
        return max(0, batch - 1)
    own = replicas[stage]
    ahead = -(-sum(replicas[stage:]) // own)
    return max(0, batch // own - ahead + 1)


def emulated(
    stages: Sequence[nn.Module],
    batches: Sequence[tuple[torch.Tensor, torch.Tensor]],
    optimizer: Callable[[list[torch.Tensor]], torch.optim.Optimizer],
    replicas: Sequence[int],
    schedule: str,
    versions: Callable[[int, int], int] | None = None,
) -> tuple[list[float], list[list[Weights]]]:
    """Return the losses, and for each stage its weights after every update, the first ones first.

    replicas: of each stage, which take batches in turn; a stage makes one update for as many batches.  versions: in
    place of `version`.
    """
    made = versions or (lambda stage, batch: version(stage, batch, replicas, schedule))
    optimizers = [optimizer(list(stage.parameters())) for stage in stages]
    history = [[_copied(stage)] for stage in stages]
    waiting: list[list[Weights]] = [[] for _ in stages]
    losses = []
    for number, (x, y) in enumerate(batches):
        used = [
            {name: w.clone().requires_grad_() for name, w in history[s][made(s, number)].items()}
            for s in range(len(stages))
        ]
        for stage, weights in zip(stages, used, strict=True):
            x = torch.func.functional_call(stage, weights, (x,))
        loss = nn.functional.mse_loss(x, y)
        losses.append(loss.item())
        loss.backward()
        for s, weights in enumerate(used):
            waiting[s].append({name: _gradient(w) for name, w in weights.items()})
            if len(waiting[s]) == replicas[s] or number + 1 == len(batches):
                _update(stages[s], optimizers[s], waiting[s])
                waiting[s] = []
                history[s].append(_copied(stages[s]))
    return losses, history


def _gradient(weight: torch.Tensor) -> torch.Tensor:
    assert weight.grad is not None
    return weight.grad


def _update(stage: nn.Module, optimizer: Any, grads: list[Weights]) -> None:
    for name, parameter in stage.named_parameters():
        parameter.grad = torch.stack([each[name] for each in grads]).mean(0)
    optimizer.step()


def _copied(stage: nn.Module) -> Weights:
    return {name: p.detach().clone() for name, p in stage.named_parameters()}
