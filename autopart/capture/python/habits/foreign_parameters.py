"""Uses of parameters that torch.export loses silently, or stops at with a misleading error.

Refused: a parameter that belongs to neither the model nor the loss function, a change of a parameter's values through
`.data` in forward(), and gradients taken with torch.func.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from autopart.capture.source_location import user_line
from autopart.ir.errors import RefusedError

_REAL = (nn.Parameter, torch.Tensor)
_DATA: Any = torch.Tensor.data
_CHANGES = frozenset({
    "__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__", "__ifloordiv__", "__imod__",
    "__ipow__", "__iand__", "__ior__", "__ixor__",
})  # fmt: skip
_HARMLESS = {"__get__", "detach"}
"""Reading a shape or a dtype, and taking the values without their gradient."""


class OwnParametersOnly(TorchFunctionMode):
    """Refuses, while a model is traced and its own parameters are fake, a real one that is used with gradients."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        """modules: the traced ones, which hold fake parameters by now."""
        super().__init__()
        self._own = {id(p): name for module in modules for name, p in module.named_parameters()}
        self._numbers: dict[int, tuple[torch.Tensor, str]] = {}

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if args and isinstance(args[0], torch.Tensor):
            self._see_numbers(func, args[0])
        if torch.is_grad_enabled() and getattr(func, "__name__", "") not in _HARMLESS:
            for leaf in pytree.tree_iter((args, kwargs)):
                if _is_trained(leaf):
                    raise _refusal(leaf)
        if func == _DATA.__get__ and id(args[0]) in self._own:  # which torch.export would lose track of
            numbers = args[0].detach()
            self._numbers[id(numbers)] = numbers, self._own[id(args[0])]
            return numbers
        return func(*args, **kwargs)

    def _see_numbers(self, func: Callable[..., Any], changed: torch.Tensor) -> None:
        """Raise RefusedError if a function changes the values of one of the model's parameters."""
        name = getattr(func, "__name__", "")
        if func == _DATA.__set__ and id(changed) in self._own:
            raise _changed(self._own[id(changed)])
        if id(changed) in self._numbers and (name in _CHANGES or (name.endswith("_") and not name.endswith("__"))):
            raise _changed(self._numbers[id(changed)][1])


def _is_trained(leaf: object) -> bool:
    """Return whether a real tensor requires a gradient, or a transform such as torch.func.grad made it."""
    return isinstance(leaf, torch.Tensor) and type(leaf) in _REAL and leaf.requires_grad and leaf.is_leaf


def _changed(name: str) -> RefusedError:
    return RefusedError(
        f"forward() changes parameter {name} in place, through .data",
        where=user_line(),
        why="every micro-batch would change it once more, unseen by autograd",
        fix="compute with the changed tensor (weight * mask, weight.clamp(...)) and leave the parameter as it is; or "
        "change it between steps, under torch.no_grad()",
    )


def _refusal(tensor: torch.Tensor) -> RefusedError:
    if is_functorch_wrapped_tensor(tensor):
        return RefusedError(
            "forward() takes a gradient with torch.func (grad, vjp, jacrev or hessian)",
            where=user_line(),
            why="torch.export cannot trace a backward of torch.func",
            fix="write the derivative out, or use forward-mode derivatives (torch.func.jvp) where the function "
            "consists of linear layers and elementary ops (tanh, GELU, exp; not softmax, SiLU or norms)",
        )
    return RefusedError(
        f"a parameter that belongs to neither the model nor the loss function is used, of shape {tuple(tensor.shape)}",
        where=user_line(),
        why="no stage would train it",
        fix="make it, or its module, a part of the model; of a loss, pass the module itself as loss_fn, not a function "
        "that calls it; what is not to be trained needs requires_grad_(False)",
    )
