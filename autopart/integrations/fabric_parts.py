"""What a script of Fabric holds in place of its model: a module whose call makes a whole step."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from autopart.ir.errors import UsageError
from autopart.pipe.pipe import Pipe


def refused(what: str, why: str, fix: str) -> UsageError:
    """Return the error for what Fabric cannot do on a pipeline."""
    return UsageError(f"Fabric on a pipeline: {what}", why=why, fix=fix)


class _Step(torch.autograd.Function):
    """A step of a pipeline whose gradients are added where its loss goes backward."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, step: Callable[[], torch.Tensor], parameters: list[Any]
    ) -> torch.Tensor:
        before = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = None
        try:
            with torch.enable_grad():
                loss = step()
            ctx.made = [(parameter, parameter.grad) for parameter in parameters]
        finally:
            for parameter, gradient in zip(parameters, before, strict=True):
                parameter.grad = gradient
        return loss.detach().as_subclass(torch.Tensor).clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[None, None, None]:
        if ctx.made is None:
            raise refused("a loss goes backward twice", "its gradients were added", "call the model again")
        made, ctx.made = ctx.made, None
        for parameter, own in made:
            if own is not None:
                scaled = own.mul_(gradients[0].to(own.device))
                parameter.grad = scaled if parameter.grad is None else parameter.grad.add_(scaled)
        return None, None, None


class PipelineModel(nn.Module):
    """Takes a batch as the model does.  In training it returns the loss of a step, in the form that the model has; in
    evaluation the loss of a batch like the sample, and else what the model predicts."""

    def __init__(self, pipe: Pipe, model: nn.Module, sample: Any) -> None:
        super().__init__()
        self._pipe, self._like = pipe, _form(sample)
        transformers = sys.modules.get("transformers")
        self._output: Any = None
        if transformers is not None and isinstance(model, transformers.PreTrainedModel):
            self._output = transformers.utils.ModelOutput
        self._anchor = torch.zeros((), requires_grad=True)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run a step, or evaluate.  Collective."""
        if args and kwargs:
            raise refused("a batch is positional and by name", "a pipe takes one of both", "pass all by name")
        batch = kwargs or (args[0] if len(args) == 1 else args)
        if not self.training and _form(batch) != self._like:
            return self._pipe.predict(batch)
        if self.training:
            if not torch.is_grad_enabled():
                raise refused("a step without gradients", "model(batch) trains in training mode", "call model.eval()")
            parameters = list(dict(self._pipe.named_parameters()).values())
            loss: Any = _Step.apply(  # type: ignore[no-untyped-call]
                self._anchor, lambda: self._pipe.step(batch), parameters
            )
        else:
            loss = self._pipe.eval_loss(batch)
        return loss if self._output is None else self._output(loss=loss)


def _form(batch: Any) -> Any:
    if isinstance(batch, Mapping):
        return set(batch)
    return len(batch) if isinstance(batch, tuple | list) else 1


def sorted_state(state: Mapping[str, Any]) -> tuple[list[Any], list[Any], dict[str, Any]]:
    """Return the optimizers and the schedulers of a state, and the rest without the model."""
    optimizers, schedulers, rest = [], [], {}
    for name, each in state.items():
        if isinstance(each, torch.optim.Optimizer):
            optimizers.append(each)
        elif isinstance(each, torch.optim.lr_scheduler.LRScheduler):
            schedulers.append(each)
        elif not isinstance(each, nn.Module):
            rest[name] = each
    return optimizers, schedulers, rest


def replace_parameters(optimizer: torch.optim.Optimizer, names: Mapping[int, str], own: Mapping[str, Any]) -> None:
    """Give an optimizer a rank's own parameters in place of the model's.  names: of the model's, by identity."""
    if optimizer.state:
        raise refused("the optimizer has made steps", "its state is of one process", "fabric.load loads a state")
    for group in optimizer.param_groups:
        given = [names.get(id(parameter), "") for parameter in group["params"]]
        if "" in given:
            raise refused("the optimizer has a parameter that the model lacks", "", "make it of model.parameters()")
        group["params"] = [own[name] for name in given if name in own]
    if not any(group["params"] for group in optimizer.param_groups):
        optimizer.param_groups[0]["params"] = [*own.values()]  # a placeholder: this rank trains nothing
