"""What a pipe shows of its model as a module does, and the errors where it is used as a module; nothing here moves
data."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any, NoReturn, Self

import torch
from torch import nn

from autopart.ir.errors import UsageError
from autopart.state.core import Core
from autopart.state.misuse_guards import TRAINS, refuse_clipping, short_tracebacks, unknown


@short_tracebacks
class ModuleSurface:
    """The model that was compiled, to look at: parameters that other ranks train are stale in its modules."""

    _core: Core

    @property
    def model(self) -> nn.Module:
        """The model that was compiled.  Parameters that other ranks train are stale until `sync_model` or `close`."""
        return self._core.model

    @property
    def training(self) -> bool:
        """Whether the model is in training mode."""
        return self.model.training

    def train(self, mode: bool = True) -> Self:
        """Set the training flags of the model; the next step follows them.  Call it on every rank.  `eval_loss` and
        `predict` need no eval(): they run in eval mode."""
        self.model.train(mode)
        return self

    def eval(self) -> Self:
        """Call `train(False)`."""
        return self.train(False)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of this rank's parameters, as the optimizer's zero_grad() does."""
        for parameter in self.parameters():
            if set_to_none or parameter.grad is None:
                parameter.grad = None
            else:
                parameter.grad.detach_().zero_()

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield this rank's parameters under their original names: those that its optimizer updates.

        Tied ones have the first name; with zero=1 only those that this rank owns are yielded.  Before the first step of
        a pipe without a sample, all parameters of the model are.  A rank without trainable ones (idle, with the loss or
        with frozen layers alone) also yields an empty one that is, since torch's optimizers refuse an empty list.
        """
        yield from self._core.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        """Yield `named_parameters` without the names.  Clip with `pipe.clip_grad_norm_`: torch's function would use the
        norm of this rank's gradients alone, and is refused."""
        running = self._core.running
        if running is not None and running.standing.divides_parameters:
            refuse_clipping(sys._getframe(1))
        for _, parameter in self.named_parameters():
            yield parameter

    def named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield this rank's buffers under their original names."""
        running = self._core.running
        held = running.tensors.held if running is not None else {}
        for name, buffer in self._core.captures.trained.named_buffers():
            if running is None or name in held:
                yield name, held.get(name, buffer)

    def buffers(self) -> Iterator[torch.Tensor]:
        """Yield `named_buffers` without the names."""
        for _, buffer in self.named_buffers():
            yield buffer

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules of the model under their names, itself under the empty one."""
        yield from self.model.named_modules()

    def modules(self) -> Iterator[nn.Module]:
        """Yield `named_modules` without the names."""
        yield from self.model.modules()

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the direct children of the model under their names."""
        yield from self.model.named_children()

    def children(self) -> Iterator[nn.Module]:
        """Yield `named_children` without the names."""
        yield from self.model.children()

    # -- what a module can do and a pipe cannot ------------------------------------------------------------------

    def __call__(self, *_: Any, **__: Any) -> NoReturn:
        """Raise UsageError: calling the model says neither whether to train nor what comes back."""
        raise UsageError(
            "a pipe is not called like a model",
            why="forward and backward of all micro-batches run together, so there is no output to call backward() on",
            fix=TRAINS,
        )

    def __getattr__(self, name: str) -> NoReturn:
        """Raise an AttributeError that says what to use instead."""
        raise unknown(name, self.__dict__.get("_core"))

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        """Raise UsageError: a pipe is neither copied nor saved."""
        raise UsageError(
            "a pipe can be neither copied nor saved",
            why="it holds connections to other ranks, and one stage of the model",
            fix="save pipe.state_dict(), or pipe.sync_model() and then copy or save pipe.model; for averages of the "
            "weights (EMA), autopart.AveragedModel(pipe)",
        )
