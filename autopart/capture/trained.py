"""Everything that a step trains: the tensors of the model, and under `loss_fn.` those of a loss function."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from autopart.ir.errors import UsageError

PREFIX = "loss_fn."


class Trained:
    """A model and a loss function that has parameters, as one set of named tensors.

    A loss function without parameters is left out, with its buffers.  Raises UsageError if names collide.
    """

    def __init__(self, model: nn.Module, loss_fn: object = None) -> None:
        self.model = model
        learns = isinstance(loss_fn, nn.Module) and any(True for _ in loss_fn.parameters())
        self.loss_fn = loss_fn if learns and isinstance(loss_fn, nn.Module) else None
        if self.loss_fn is not None and PREFIX[:-1] in {**dict(model.named_children()), **vars(model)}:
            raise UsageError(
                "the model has a module loss_fn, and the loss function has parameters",
                why="the names of both would begin with loss_fn",
                fix="give that module of the model another name",
            )

    def named_parameters(self, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield every parameter; of tied ones only the first, unless duplicates are wanted."""
        yield from self._named(lambda module: module.named_parameters(remove_duplicate=False), remove_duplicate)

    def named_buffers(self, remove_duplicate: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield every buffer; of tied ones only the first, unless duplicates are wanted."""
        yield from self._named(lambda module: module.named_buffers(remove_duplicate=False), remove_duplicate)

    def _named(self, of: Callable[[nn.Module], Iterable[tuple[str, Any]]], once: bool) -> Iterator[tuple[str, Any]]:
        seen = set[int]()
        for prefix, module in self.parts():
            for name, tensor in of(module):
                if not (once and id(tensor) in seen):
                    yield prefix + name, tensor
                seen.add(id(tensor))

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return both states, holding the tensors themselves."""
        return {
            prefix + name: tensor
            for prefix, module in self.parts()
            for name, tensor in module.state_dict(keep_vars=True).items()
        }

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load what `state_dict` returned."""
        learned = {name for name in state if self.loss_fn is not None and name.startswith(PREFIX)}
        self.model.load_state_dict({name: tensor for name, tensor in state.items() if name not in learned})
        if self.loss_fn is not None:
            self.loss_fn.load_state_dict({name.removeprefix(PREFIX): state[name] for name in learned})

    def named_modules(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield every module under its name, the model itself under the empty one."""
        for prefix, module in self.parts():
            for name, inner in module.named_modules():
                yield f"{prefix}{name}" if name else prefix.removesuffix("."), inner

    @property
    def without_values(self) -> str:
        """The name of the first tensor that is on the meta device, "" if all have values."""
        return next((prefix + name for prefix, part in self.parts() if (name := on_meta([part]))), "")

    def parts(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield the model and the loss function, each with the prefix of its names."""
        yield "", self.model
        if self.loss_fn is not None:
            yield PREFIX, self.loss_fn


def on_meta(modules: Iterable[nn.Module]) -> str:
    """Return the name of the first parameter or buffer that is on the meta device and so has no values, "" if none."""
    for module in modules:
        for name, tensor in itertools.chain(module.named_parameters(), module.named_buffers()):
            if tensor.is_meta:
                return name
    return ""
