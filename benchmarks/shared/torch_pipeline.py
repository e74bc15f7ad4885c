"""The same model under torch.distributed.pipelining, traced and cut at the given modules."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import SplitPoint, pipeline


class Logits(nn.Module):
    """A model with one tensor input that returns logits, because torch's pipeline computes the loss outside the model.

    argument: the name of the model's input.
    """

    def __init__(self, model: nn.Module, argument: str) -> None:
        super().__init__()
        self.model, self._argument = model, argument

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return logits_of(self.model(**{self._argument: given}))


def logits_of(output: Any) -> torch.Tensor:
    """Return the logits of a transformers output, or a tensor unchanged."""
    return output if isinstance(output, torch.Tensor) else output.logits


def torch_pipeline(
    model: nn.Module,
    argument: str,
    given: torch.Tensor,
    target: torch.Tensor,
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    *,
    cuts: Sequence[str],
    micros: int,
    schedule: Any,
    device: torch.device | None = None,
) -> tuple[Callable[[], torch.Tensor | None], Iterable[nn.Parameter]]:
    """Return a forward and backward of the whole batch on this rank, and the parameters of its stage.

    A stage begins at each module of `cuts`; there are as many stages as ranks. The model must be on the CPU. The step
    returns the mean of the micro-batches' losses on the last rank, None on others. Raises whatever torch raises.
    """
    rank, device = dist.get_rank(), device or torch.device("cpu")
    split = {f"model.{cut}": SplitPoint.BEGINNING for cut in cuts}
    pipe = pipeline(Logits(model, argument), mb_args=(given[: len(given) // micros],), split_spec=split)
    stage = pipe.build_stage(rank, device)
    runner = schedule(stage, micros, loss_fn=loss)
    given, target = given.to(device), target.to(device)
    last = rank == dist.get_world_size() - 1

    def step() -> torch.Tensor | None:
        losses: list[torch.Tensor] = []
        targets = {"target": target, "losses": losses} if last else {}
        runner.step(*([given] if rank == 0 else []), **targets)
        return torch.stack([x.detach() for x in losses]).mean() if last else None

    return step, stage.submod.parameters()
